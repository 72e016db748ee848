"""`CudaCoder` puts the right launches in the right order: through the interpreter, and on a GPU through the copier."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import torch
from gpu_kernels import interpreted
from hostile_pages import make_pages

from benchmarks.gpu.page_code import encode_pages
from wicore_trt.kv.disk.files import aligned_buffer
from wicore_trt.plugins.aot import compile_kernel
from wicore_trt.plugins.code_layout import SEAL_BYTES, SEAL_KEY, PageCode
from wicore_trt.plugins.kernels.page_code import page_code_specs
from wicore_trt.plugins.kernels.page_digest import page_digest_spec
from wicore_trt.plugins.layout import Launch
from wicore_trt.runtime import cuda_coder
from wicore_trt.runtime.cuda_coder import CodeKernels, CudaCoder
from wicore_trt.runtime.executor import UNFIT
from wicore_trt.runtime.page_copier import make_copier
from wicore_trt.runtime.page_digest import PageDigest

CODES = {"local": PageCode(4, 32, 64), "global": PageCode(2, 32, 64)}
COUNT = 12


def memory_at(address: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    buffer = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(buffer, dtype=dtype)


class Interpreter:
    """A launcher by addresses."""

    def __init__(self, base: int, values: int) -> None:
        self.base, self.values = base, values

    def launch(self, spec: Any, call: Launch, stream: int) -> None:
        given, pages = (
            dict(call.arguments),
            call.grid[1] if call.grid[1] > 1 or "memory" in call.arguments else call.grid[0],
        )
        blocks = given["blocks"]
        size = next(code.coded_bytes for code in CODES.values() if code.blocks == blocks)
        places = {
            "memory": (self.values, torch.int16), "offsets": (pages, torch.int64),
            "coded": (pages * size, torch.uint8), "found": (pages, torch.int32),
        }  # fmt: skip
        given |= {name: memory_at(given[name], *places[name]) for name in places.keys() & given.keys()}
        interpreted.launch(spec, Launch(call.grid, given))


class Seals:
    """As `CudaDigests.ask`, and all at once."""

    def __init__(self, base: int, page_bytes: int) -> None:
        self._base, self._digest = base, PageDigest(SEAL_KEY, page_bytes)

    def ask(self, lane: Any, pages: Sequence[tuple[int, int]]) -> Any:
        return partial(self.start, pages)

    def start(self, pages: Sequence[tuple[int, int]], lane: Any, first: Any, then: Any = None) -> Callable[[], Any]:
        first(torch.tensor([(address - self._base) // 4 for address, _ in pages]))
        found = [self._digest.compute_digest([memoryview(memory_at(*page, torch.uint8).numpy())]) for page in pages]
        if then is not None:
            then(torch.tensor(np.frombuffer(b"".join(found), np.int64).reshape(-1, 2)))
        return lambda: found


def test_pages_of_both_groups_are_coded_sealed_and_decoded(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {group: make_pages(code, COUNT, 1) for group, code in CODES.items()}
    pool = np.concatenate([pages.reshape(-1) for pages in made.values()])
    on = aligned_buffer(pool.nbytes)[: pool.nbytes]
    on[:] = pool.tobytes()
    base = ctypes.addressof(ctypes.c_char.from_buffer(on))
    monkeypatch.setattr(cuda_coder, "SHARED_LAUNCHER", Interpreter(base, len(pool)))
    specs: Any = page_code_specs(CODES["local"])
    seals: Any = Seals(base, CODES["local"].raw_bytes)
    coder = CudaCoder(CodeKernels(CODES, specs), seals, base, torch.device("cpu"), 2 * COUNT)
    lane: Any = SimpleNamespace(stream=SimpleNamespace(cuda_stream=0))
    pages, begins, at = [], {"local": base, "global": base + made["local"].nbytes}, coder.staging[0][0]
    for group, code in CODES.items():
        for slot in np.random.default_rng(1).permutation(COUNT)[:7]:
            pages.append((group, int(begins[group] + slot * code.raw_bytes), at))
            at += code.coded_bytes
    assert at <= coder.staging[1][0] and coder.staging_bytes == 2 * COUNT * CODES["local"].coded_bytes
    before, sealed = bytes(on), coder.encode(lane, pages)(lane)()
    assert bytes(on) == before
    fits = []
    for (group, address, staged), seal in zip(pages, sealed, strict=True):
        code = CODES[group]
        coded = memory_at(staged, code.coded_bytes, torch.uint8).numpy()
        raw = memory_at(address, code.values, torch.int16).numpy().view(np.uint16)
        want, escapes = encode_pages(code, raw[None])
        fits.append(code.fits(memoryview(coded)[:16]))
        assert fits[-1] == (escapes[0] <= code.room)
        if fits[-1]:
            assert coded[:-SEAL_BYTES].tobytes() == want[0, :-SEAL_BYTES].tobytes()
            assert coded[-SEAL_BYTES:].tobytes() == seal
    assert 0 < sum(fits) < len(pages)
    kept = [(page, seal) for page, seal, fit in zip(pages, sealed, fits, strict=True) if fit]
    for group, address, _ in pages:
        memory_at(address, CODES[group].raw_bytes, torch.uint8).fill_(0x5A)
    came, at = [], coder.staging[1][1]
    for (group, address, staged), _ in kept:  # by way of the staging of the other direction
        size = CODES[group].coded_bytes
        ctypes.memmove(at, staged, size)
        came.append((group, address, at))
        at += size
    assert coder.decode(lane, came)(lane)() == [seal for _, seal in kept]
    for group, address, _ in came:
        begin, size = address - base, CODES[group].raw_bytes
        assert on[begin : begin + size] == before[begin : begin + size]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_pages_leave_a_gpu_coded_and_come_back() -> None:
    """Hostile pages of both groups in one memory, in rounds; bits that flip in host memory are found."""
    target = "sm{}{}".format(*torch.cuda.get_device_capability())
    kernels = {name: compile_kernel(spec, target) for name, spec in page_code_specs(CODES["local"]).items()}
    made = {g: make_pages(code, 48, 2) for g, code in CODES.items()}
    memory = torch.from_numpy(np.concatenate([p.reshape(-1) for p in made.values()]).view(np.int16)).cuda()
    cut = made["local"].size
    pools = {"local": memory[:cut].view(48, -1), "global": memory[cut:].view(48, -1)}
    digest = compile_kernel(page_digest_spec(), target)
    copier = make_copier(pools, 32, digest_kernel=digest, code=CodeKernels(CODES, kernels))
    for seed in range(5):
        kept, wrong = dict[tuple[str, int], tuple[memoryview, bytes | None]](), 0
        for name, code in CODES.items():
            for slot in np.random.default_rng(seed).permutation(48).tolist():
                slab, told, over = aligned_buffer(code.coded_bytes)[: code.coded_bytes], [], threading.Event()

                def done(found: bytes | None, seconds: float, told: Any = told, over: Any = over) -> None:
                    told.append(found)
                    over.set()

                copier.to_host(name, slot, [slab], done)
                kept[name, slot] = (slab, told)  # type: ignore[assignment]
        copier.flush()
        assert over.wait(20)
        torch.cuda.synchronize()
        fit: Any = {key: (slab, told[0]) for key, (slab, told) in kept.items() if told[0] != UNFIT}  # type: ignore[index]
        assert len(kept) > len(fit) > 20
        assert all(copier.digest([slab]) == told for slab, told in fit.values())
        before = {name: pool.clone() for name, pool in pools.items()}
        flipped = list(fit)[::7]
        for key in flipped:
            fit[key][0][int(np.random.default_rng(seed).integers(len(fit[key][0])))] ^= 1
        for name in CODES:
            slots = [slot for group, slot in fit if group == name]
            pools[name][slots] = 0x5A5A
            told, over = [], threading.Event()

            def came(found: Sequence[bytes | None], seconds: float, told: Any = told, over: Any = over) -> None:
                told.extend(found)
                over.set()

            copier.to_device(name, slots, [[fit[name, slot][0]] for slot in slots], came)
            copier.flush()
            while len(told) < len(slots):
                assert over.wait(20)
            torch.cuda.synchronize()
            for slot, found in zip(slots, told, strict=True):
                right = found == fit[name, slot][1]
                assert right == ((name, slot) not in flipped)
                wrong += not right
                assert not right or torch.equal(pools[name][slot], before[name][slot])
            pools[name].copy_(before[name])
        assert wrong == len(flipped)
    copier.close()
