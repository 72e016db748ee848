"""Copies KV pages between a torch device's pools and host buffers: the copy engine of the KV tiers.

It must not know which pages are where or why. Invariant (`executor.PageCopier`): copies and steps see pages in the
order of the calls, whatever runs at the same time. `TorchPageCopier` has it because it copies at once.
`StreamPageCopier` has it by events:

- a copy starts after every step that was put on the device before it was asked for, and after copies of its slot;
- a step that writes a slot starts after the copies of that slot (`begin_step`); reading needs no such wait, because a
  page on its way to the device is used by nobody before `done`, and a copy to the host only reads;
- where layer groups share memory, copies of a slot are copies of all slots that have a byte of it (`overlapping`);
- `done` is called when the copy is over, so nobody reuses or reads a host buffer before.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from queue import SimpleQueue
from typing import Protocol

import numpy as np
import torch

from wicore_trt.runtime.batch import StepBatch
from wicore_trt.runtime.cuda_lanes import CudaHostMemory, CudaLane, Event, Lane
from wicore_trt.runtime.executor import PageCopier

SlotKey = tuple[str, int]
"""Layer group and slot."""


class StepCopier(PageCopier, Protocol):
    """What an executor needs of its copier beyond what the tiers need."""

    def begin_step(self, batch: StepBatch) -> None:
        """Call it before any work of a step is put on the device."""
        ...

    def close(self) -> None:
        """Wait for copies under way; there will be no more calls. Call it before the pools go."""
        ...


class HostMemory(Protocol):
    """What `StreamPageCopier` needs of `cuda_lanes.CudaHostMemory`."""

    def pin(self, memory: memoryview) -> bool: ...

    def unpin_all(self) -> None: ...


def alone(group: str, slot: int) -> list[SlotKey]:
    """The slots that share memory with one, in pools of their own."""
    return [(group, slot)]


def make_copier(
    pools: Mapping[str, torch.Tensor],
    page_tokens: int,
    stream: int = 0,
    *,
    overlapping: Callable[[str, int], list[SlotKey]] = alone,
) -> StepCopier:
    """The copier for `pools`, whose steps run on the CUDA stream of this handle (0: the default stream).
    `overlapping(group, slot)` are all slots with a byte of that one, itself included."""
    device = next(iter(pools.values())).device
    if device.type == "cpu":
        return TorchPageCopier(pools)
    lanes = (CudaLane(device, stream), CudaLane(device), CudaLane(device))
    return StreamPageCopier(pools, page_tokens, lanes, CudaHostMemory(device), overlapping)


def written_slots(batch: StepBatch, page_tokens: int) -> Iterator[SlotKey]:
    """The slots that a step writes."""
    for piece in batch.slices:
        first, last = piece.start // page_tokens, (piece.start + len(piece.token_ids) - 1) // page_tokens
        for group, table in piece.pages.items():
            for slot in table[first : last + 1]:
                yield group, slot


class TorchPageCopier:
    """`pools[group]` is the pool tensor, the page first; a page's bytes go out in the order of its memory. A copy is
    over when the call returns; on a GPU it takes its turn in the caller's stream.

    On the CPU numpy copies, because torch would wake its thread pool for each page, which costs more than the copy.
    """

    broken: BaseException | None = None

    def __init__(self, pools: Mapping[str, torch.Tensor]) -> None:
        flat = _flat(pools)
        self._pages = {group: pages.numpy() if pages.device.type == "cpu" else pages for group, pages in flat.items()}

    def pin(self, memory: memoryview) -> bool:
        return False

    def to_host(self, group: str, slot: int, parts: Sequence[memoryview], done: Callable[[], None]) -> None:
        """Copy a page into `parts`, whose lengths add up to the page's bytes."""
        page, offset = self._pages[group][slot], 0
        for part in parts:
            piece = page[offset : offset + len(part)]
            if isinstance(piece, torch.Tensor):
                torch.frombuffer(part, dtype=torch.uint8).copy_(piece)
            else:
                np.frombuffer(part, np.uint8)[:] = piece
            offset += len(part)
        assert offset == page.shape[0]
        done()

    def to_device(self, group: str, slot: int, parts: Sequence[memoryview], done: Callable[[], None]) -> None:
        """Fill a page from `parts`."""
        page, offset = self._pages[group][slot], 0
        for part in parts:
            piece = page[offset : offset + len(part)]
            if isinstance(piece, torch.Tensor):
                piece.copy_(torch.frombuffer(part, dtype=torch.uint8))
            else:
                piece[:] = np.frombuffer(part, np.uint8)
            offset += len(part)
        assert offset == page.shape[0]
        done()

    def begin_step(self, batch: StepBatch) -> None:
        pass

    def close(self) -> None:
        pass


class StreamPageCopier:
    """Copies beside the steps: a lane for each direction, and a thread for each that calls `done`. `lanes` are the
    steps' own, the one to the host and the one to the device. All calls come from one thread."""

    def __init__(
        self,
        pools: Mapping[str, torch.Tensor],
        page_tokens: int,
        lanes: tuple[Lane, Lane, Lane],
        memory: HostMemory,
        overlapping: Callable[[str, int], list[SlotKey]] = alone,
    ) -> None:
        self._overlapping = overlapping
        self._pages, self._page_tokens, self._memory = _flat(pools), page_tokens, memory
        self._compute, out, into = lanes
        self.broken: BaseException | None = None
        self._lock = threading.Lock()
        self._under_way: dict[SlotKey, Event] = {}
        """The last copy of a slot; it waited for those before."""
        self._out, self._into = _Finisher(out, self._over, self._broke), _Finisher(into, self._over, self._broke)

    def pin(self, memory: memoryview) -> bool:
        return self._memory.pin(memory)

    def to_host(self, group: str, slot: int, parts: Sequence[memoryview], done: Callable[[], None]) -> None:
        """Copy a page into `parts`, whose lengths add up to the page's bytes."""
        self._start(self._out, (group, slot), [(host, page) for page, host in self._pairs(group, slot, parts)], done)

    def to_device(self, group: str, slot: int, parts: Sequence[memoryview], done: Callable[[], None]) -> None:
        """Fill a page from `parts`."""
        self._start(self._into, (group, slot), self._pairs(group, slot, parts), done)

    def begin_step(self, batch: StepBatch) -> None:
        with self._lock:
            if not self._under_way:
                return
            written = set(written_slots(batch, self._page_tokens))
            events = {self._under_way.get(key) for slot in written for key in self._overlapping(*slot)}
        for event in events:
            if event is not None:
                self._compute.wait(event)

    def close(self) -> None:
        for finisher in (self._out, self._into):
            finisher.close()
        self._memory.unpin_all()
        self._pages = {}

    def _pairs(self, group: str, slot: int, parts: Sequence[memoryview]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """(page, host) pieces."""
        page, offset, pairs = self._pages[group][slot], 0, []
        for part in parts:
            pairs.append((page[offset : offset + len(part)], torch.frombuffer(part, dtype=torch.uint8)))
            offset += len(part)
        assert offset == page.shape[0]
        return pairs

    def _start(
        self,
        finisher: _Finisher,
        key: SlotKey,
        pairs: list[tuple[torch.Tensor, torch.Tensor]],
        done: Callable[[], None],
    ) -> None:
        lane = finisher.lane
        lane.wait(self._compute.record())
        with self._lock:
            before = {self._under_way.get(other) for other in self._overlapping(*key)}
        for event in before:
            if event is not None:
                lane.wait(event)
        lane.copy(pairs)
        event = lane.record()
        with self._lock:
            self._under_way[key] = event
        finisher.put(event, key, done)

    def _broke(self, error: BaseException) -> None:
        self.broken = error

    def _over(self, event: Event, key: SlotKey) -> None:
        with self._lock:
            if self._under_way.get(key) is event:
                del self._under_way[key]


class _Finisher:
    """A thread that sleeps until a lane's copies are over, one after the other, and tells."""

    def __init__(
        self, lane: Lane, over: Callable[[Event, SlotKey], None], broke: Callable[[BaseException], None]
    ) -> None:
        self.lane = lane
        self._over = over
        self._broke = broke
        self._queue: SimpleQueue[tuple[Event, SlotKey, Callable[[], None]] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="wicore-page-copies", daemon=True)
        self._thread.start()

    def put(self, event: Event, key: SlotKey, done: Callable[[], None]) -> None:
        self._queue.put((event, key, done))

    def close(self) -> None:
        self._queue.put(None)
        self._thread.join()

    def _run(self) -> None:
        try:
            while (item := self._queue.get()) is not None:
                event, key, done = item
                event.synchronize()
                self._over(event, key)
                done()
        except Exception as error:  # of the device: whoever waits for `done` must hear of it
            self._broke(error)


def _flat(pools: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """uint8 [pages, bytes of a page]."""
    return {group: pool.view(pool.shape[0], -1).view(torch.uint8) for group, pool in pools.items()}
