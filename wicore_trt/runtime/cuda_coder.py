"""Codes KV pages on a GPU for the page copier, by the kernels of `plugins.kernels.page_code`.

Must not know slots or tiers. Invariant: work runs in the order of its lane, so the staging has a batch's own codes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from wicore_trt.plugins.aot import CompiledKernel
from wicore_trt.plugins.code_layout import DECODE, ENCODE, SEAL_BYTES, PageCode, decode_launch, encode_launches
from wicore_trt.plugins.launch import SHARED_LAUNCHER
from wicore_trt.runtime.cuda_lanes import CudaDigests, CudaLane

StartWork = Callable[[CudaLane], Callable[[], Sequence[bytes]]]
STAGING_BYTES = 64 << 20
"""Staging of a batch, or one page if that is larger: a millisecond or two of a bus."""
PLACES = 3
"""Batches to the host take one, batches to the device two: the next one arrives while the last is decoded."""


class CodeKernels(NamedTuple):
    """Codes by layer group, and the kernels by name, which all groups share."""

    codes: Mapping[str, PageCode]
    kernels: Mapping[str, CompiledKernel]


def place_bytes(codes: Mapping[str, PageCode], most: int) -> int:
    """Count the bytes of one of the PLACES of the staging, for batches of at most `most` pages."""
    largest = max(code.coded_bytes for code in codes.values())
    return max(largest, min(STAGING_BYTES, most * largest))


class CudaCoder:
    """Codes pages in memory behind `base`: of each layer group in `codes`, between its pool and `staging`, for each
    direction, to the host and to the device, some places of `staging_bytes`. `seals` takes their digests and has the
    kernels' arrays of places. A call takes at most `most` pages (layer group, address, address of its code), codes of a
    group side by side. It asks on the lane; its result works on the lane that it is given, the same or one behind. Call
    the result of that once this lane has passed: the pages' digests under SEAL_KEY, as they were or are not coded."""

    def __init__(self, code: CodeKernels, seals: CudaDigests, base: int, device: torch.device, most: int) -> None:
        self.codes, self._kernels, self._seals, self._base = code.codes, code.kernels, seals, base
        self.staging_bytes = place_bytes(self.codes, most)
        self._memory = torch.zeros((PLACES, self.staging_bytes), dtype=torch.uint8, device=device)
        self._first = self._memory.data_ptr()
        out, *into = (self._first + i * self.staging_bytes for i in range(PLACES))
        self.staging: tuple[Sequence[int], Sequence[int]] = (out,), tuple(into)
        self._found = torch.zeros(most, dtype=torch.int32, device=device)

    def encode(self, lane: CudaLane, pages: Sequence[tuple[str, int, int]]) -> StartWork:
        """Encode and seal. The code of a page that does not fit is unspecified behind its header."""
        runs, asked = self._find_runs(pages), self._seals.ask(lane, self._list_pages(pages))

        def launch(lane: CudaLane, places: torch.Tensor) -> None:
            offsets = places * 2  # of values, from words; its memory goes to later work of this stream
            for code, first, stop, coded in runs:
                arrays = self._make_arrays(offsets[first:stop], coded) | {"found": self._found.data_ptr()}
                calls = encode_launches(self._kernels[ENCODE[-1]].constants, code, arrays, stop - first)
                for name, call in zip(ENCODE, calls, strict=True):
                    SHARED_LAUNCHER.launch(self._kernels[name], call, int(lane.stream.cuda_stream))

        def seal(sums: torch.Tensor) -> None:
            for code, first, stop, coded in runs:
                at, count = coded - self._first, stop - first
                room = self._memory.view(-1)[at : at + count * code.coded_bytes].view(count, -1)
                room[:, -SEAL_BYTES:] = sums[first:stop].view(torch.uint8)

        return lambda lane: asked(lane, partial(launch, lane), seal)

    def decode(self, lane: CudaLane, pages: Sequence[tuple[str, int, int]]) -> StartWork:
        kernel, asked = self._kernels[DECODE], self._seals.ask(lane, self._list_pages(pages))

        def launch(lane: CudaLane, places: torch.Tensor) -> None:
            offsets = places * 2
            for code, first, stop, coded in self._find_runs(pages):
                arrays = self._make_arrays(offsets[first:stop], coded)
                call = decode_launch(kernel.constants, code, arrays, stop - first)
                SHARED_LAUNCHER.launch(kernel, call, int(lane.stream.cuda_stream))

        return lambda lane: asked(lane, partial(launch, lane))

    def _make_arrays(self, offsets: torch.Tensor, coded: int) -> dict[str, Any]:
        return {"memory": self._base, "offsets": offsets.data_ptr(), "coded": coded}

    def _list_pages(self, pages: Sequence[tuple[str, int, int]]) -> list[tuple[int, int]]:
        return [(address, self.codes[group].raw_bytes) for group, address, _ in pages]

    def _find_runs(self, pages: Sequence[tuple[str, int, int]]) -> list[tuple[PageCode, int, int, int]]:
        """Find (code, first, stop, address of the first one's code) of the pages of each group, which lie in a row."""
        runs, groups = list[tuple[PageCode, int, int, int]](), [group for group, *_ in pages]
        for group in dict.fromkeys(groups):
            first, count = groups.index(group), groups.count(group)
            runs.append((self.codes[group], first, first + count, pages[first][2]))
        return runs
