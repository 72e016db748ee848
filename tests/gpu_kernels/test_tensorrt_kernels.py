"""KernelSlotCopier in Triton's interpreter against the copier in torch."""

from __future__ import annotations

import random
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import interpreted
import torch

from wicore_trt.backends.tensorrt.copies import KernelSlotCopier, SlotCopier, copy_specs
from wicore_trt.backends.tensorrt.slots import PageCopy, Slide

PAGE, ENTRIES, SLOTS, PAGES = 4, 24, 3, 16


def random_copies() -> list[PageCopy]:
    pages, copies = random.sample(range(PAGES), PAGES), []
    for slot in random.sample(range(SLOTS), random.randint(1, SLOTS)):
        offset, tokens = random.randrange(PAGE), random.randint(1, 13)
        used = [pages.pop() for _ in range(-(-(offset + tokens) // PAGE))]
        copies.append(PageCopy(slot, random.randint(0, ENTRIES - tokens), tokens, used, offset))
    return copies


@pytest.mark.parametrize(("dtype", "fp8"), [("float32", False), ("bfloat16", False), ("float16", True)])
def test_kernels_and_torch_copy_the_same(dtype: str, fp8: bool) -> None:
    cache_dtype = getattr(torch, dtype)
    pool = torch.randn(PAGES, 2, 2, PAGE, 2, 16).to(torch.float8_e4m3fn if fp8 else cache_dtype)
    cache = torch.randn(2, 2, SLOTS, 2, ENTRIES, 16).to(cache_dtype)
    scales = torch.rand(2) + 0.05
    own_pool, own_cache = pool.clone(), cache.clone()
    kernels = {role: interpreted.uncompiled(spec) for role, spec in copy_specs(pool, cache).items()}
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}
    bits = own_cache.view(integers[cache.itemsize])
    known = [own_pool.view(integers[pool.itemsize]), scales, own_cache if fp8 else bits, bits]
    uploads: list[torch.Tensor] = []

    class Launcher:
        """Finds each call's uploads, and the cache as the kernel's own type."""

        def launch(self, kernel: Any, call: Any, stream: int) -> None:
            assert stream == 5
            tensors = [*uploads, known[0], known[1], known[3 if kernel.symbol == "slide" else 2]]
            interpreted.AddressLauncher(tensors).launch(kernel, call, stream)

    copier = KernelSlotCopier({"g": own_pool}, {"g": own_cache}, {"g": scales}, kernels, Launcher(), 5)
    ints = copier._upload_ints
    copier._upload_ints = lambda values: uploads.append(ints(values)) or uploads[-1]  # type: ignore[method-assign]
    plain = SlotCopier({"g": pool}, {"g": cache}, {"g": scales})
    for _ in range(2):
        loads, stores = random_copies(), random_copies()
        slide = Slide(random.randrange(SLOTS), random.randint(1, 9), random.randint(1, 15))
        for each in (copier, plain):
            each.load("g", loads)
            each.slide("g", [slide])
            each.store("g", stores)
        assert torch.equal(own_cache.view(torch.uint8), cache.view(torch.uint8))
        assert torch.equal(own_pool.view(torch.uint8), pool.view(torch.uint8))
    copier.clear(1)
    assert (own_cache[:, :, 1] == 0).all() and torch.equal(own_cache[:, :, 0], cache[:, :, 0])
