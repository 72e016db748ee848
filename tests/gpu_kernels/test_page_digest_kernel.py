"""The kernel of page digests against the CPU's, in the interpreter and on a GPU."""

from __future__ import annotations

import random

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import torch
from kernel_checks import Runner
from step_runners import RUNNERS

from wicore_trt.plugins.kernels.page_digest import page_digest_spec
from wicore_trt.plugins.step_layout import page_digest_launch
from wicore_trt.runtime.page_digest import PageDigest


def digests(run: Runner, memory: torch.Tensor, pages: list[tuple[int, int]], digest: PageDigest) -> list[bytes]:
    """Of pages (first byte, bytes) of `memory`, two programs of the grid past the longest page's end."""
    key = torch.from_numpy(digest.words.view("<i4"))
    arrays = {
        "memory": run.put(memory.view(torch.int32)).view(torch.uint32),
        "offsets": run.put(torch.tensor([at // 4 for at, _ in pages])),
        "lengths": run.put(torch.tensor([size // 4 for _, size in pages])),
        "key": run.put(key).view(torch.uint32),
        "sums": run.put(torch.zeros((len(pages), 2), dtype=torch.int64)),
    }
    longest = max(size for _, size in pages)
    run.launch(page_digest_spec(), page_digest_launch(arrays, len(pages), longest + 2 * 16384, digest.second_pairs))
    return [row.numpy().tobytes() for row in arrays["sums"].cpu()]


@pytest.mark.parametrize("run", RUNNERS)
def test_a_gpu_and_a_cpu_have_the_same_digests(run: Runner) -> None:
    rng = random.Random(3)
    memory = torch.frombuffer(bytearray(rng.randbytes(200 * 1024)), dtype=torch.uint8)
    memory[70_000:80_000] = 255  # sums overflow
    sizes = [16, 4096, 4112, 16384, 16400, 40_000, 65_536]
    pages = [(16 * rng.randrange((len(memory) - size) // 16), size) for size in sizes] + [(70_000, 9008)]
    digest = PageDigest(bytes(range(32)), max(sizes))
    found = digests(run, memory, pages, digest)
    for (at, size), mine in zip(pages, found, strict=True):
        page = memoryview(memory[at : at + size].numpy())
        assert mine == digest.compute_digest([page]), f"{size} bytes at {at}"
