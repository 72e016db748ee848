"""Copies KV pages between a torch device's pools and host buffers: the copy engine of the KV tiers.

Must not know which pages are where or why. Invariant (`executor.PageCopier`): copies and steps see pages in the order
of the calls. `TorchPageCopier` copies at once; `StreamPageCopier` keeps the order by events:

- a copy starts after all steps that were on the device when it was asked for, and after copies of its slot; a settled
  one, whose page no such step writes, starts after the copies alone;
- a step that writes a slot starts after copies of that slot (`begin_step`). Reading needs no wait: nobody uses a page
  on its way to the device before `done`, and a copy to the host only reads;
- where layer groups share memory, copies of a slot are copies of all slots that share a byte (`overlapping`);
- a thread for each direction puts batches on the device, in the order of calls: a driver whose queue is full (1,024
  copies) makes its caller wait, which must not be the engine's thread;
- `done` is called when the copy is over, so nobody reuses or reads a host buffer before;
- digests are of the page's bytes on the device: before a copy to the host, after a copy to the device;
- a coded page passes through staging memory of its direction, which one batch uses after the other. Its digest is that
  of the code there. Its code ends with a seal, the digest of the page, which what was decoded must have;
- digests of pages on their way to the device, and decoding, have a lane behind that of the copies: the bus never
  waits for kernels. A lane always waits for an event, never for the order of another.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np
import torch

from wicore_trt.plugins.aot import CompiledKernel
from wicore_trt.plugins.code_layout import HEADER_BYTES, SEAL_BYTES, SEAL_KEY, PageCode
from wicore_trt.runtime.batch import StepBatch
from wicore_trt.runtime.cuda_coder import PLACES, CodeKernels, CudaCoder, place_bytes
from wicore_trt.runtime.cuda_lanes import CudaDigests, CudaEvent, CudaHostMemory, CudaLane, host_address
from wicore_trt.runtime.executor import UNFIT, CameIn, Done, PageCopier, Parts
from wicore_trt.runtime.page_digest import KEY_BYTES, PageDigest

SlotKey = tuple[str, int]  # layer group and slot
StagedPage = tuple[str, int, int]
BATCH = 64  # copies that begin together: one event and one digest kernel for all; 27B's take 3 to 15 ms on PCIe 5


class StepCopier(PageCopier, Protocol):
    def begin_step(self, batch: StepBatch) -> None:
        """Order copies before a step. Call it before any work of the step is put on the device."""

    def close(self) -> None:
        """Wait for copies under way; no calls may follow. Call it before the pools are freed."""


def list_own_slot(group: str, slot: int) -> list[SlotKey]:
    return [(group, slot)]


def make_copier(
    pools: Mapping[str, torch.Tensor],
    page_tokens: int,
    stream: int = 0,
    *,
    overlapping: Callable[[str, int], list[SlotKey]] = list_own_slot,
    digest_kernel: CompiledKernel | None = None,
    key: bytes | None = None,
    code: CodeKernels | None = None,
) -> StepCopier:
    """Make the copier for `pools`, whose steps run on the CUDA stream of this handle (0: the default stream).
    `overlapping(group, slot)` lists all slots that share a byte with that one, itself first. With `digest_kernel` the
    GPU computes digests of pages, under `key` if given; without it the CPU checks them. With `code`, too, it codes."""
    device = next(iter(pools.values())).device
    if device.type == "cpu":
        return TorchPageCopier(pools)
    lanes, digest = (CudaLane(device, stream), *(CudaLane(device) for _ in range(3))), make_digest(pools, key)
    digests, coder = None, None
    if digest_kernel is not None:
        base = min(pool.data_ptr() for pool in pools.values())
        digests = CudaDigests(digest_kernel, digest, base, device, BATCH)
        if code is not None:
            seals = CudaDigests(digest_kernel, make_digest(pools, SEAL_KEY), base, device, BATCH)
            coder = CudaCoder(code, seals, base, device, BATCH)
    return StreamPageCopier(
        pools, page_tokens, lanes, CudaHostMemory(device), overlapping, digests, digest, coder=coder
    )


def staging_bytes(code: CodeKernels | None) -> int:
    """Count the device memory that a copier takes for coded pages."""
    return PLACES * place_bytes(code.codes, BATCH) if code is not None else 0


def make_digest(pools: Mapping[str, torch.Tensor], key: bytes | None = None) -> PageDigest:
    """Make digests of the pages of `pools` under a key, by default a random one: they never leave this engine."""
    return PageDigest(key or secrets.token_bytes(KEY_BYTES), max(pool[0].nbytes for pool in pools.values()))


def list_written_slots(batch: StepBatch, page_tokens: int) -> Iterator[SlotKey]:
    for piece in batch.slices:
        first, last = piece.start // page_tokens, (piece.start + len(piece.token_ids) - 1) // page_tokens
        for group, table in piece.pages.items():
            for slot in table[first : last + 1]:
                yield group, slot


class TorchPageCopier:
    """Copier that is done when a call returns; on a GPU it takes its turn in the caller's stream. `pools[group]` is the
    pool tensor, the page first; a page's bytes are in the order of its memory. There are no digests on the device. On
    the CPU numpy copies: waking torch's thread pool for each page costs more than the copy."""

    broken: BaseException | None = None
    checks = False
    coded_bytes: Mapping[str, int] = {}

    def __init__(self, pools: Mapping[str, torch.Tensor]) -> None:
        flat = _flatten_pools(pools)
        self._pages = {group: pages.numpy() if pages.device.type == "cpu" else pages for group, pages in flat.items()}
        self.digest = make_digest(pools).compute_digest

    def pin(self, memory: memoryview) -> bool:
        return False

    def to_host(self, group: str, slot: int, parts: Parts, done: Done, *, settled: bool = False) -> None:
        begun = time.perf_counter()
        for piece, part in self._cut_pieces(group, slot, parts):
            if isinstance(piece, torch.Tensor):
                torch.frombuffer(part, dtype=torch.uint8).copy_(piece)
            else:
                np.frombuffer(part, np.uint8)[:] = piece
        done(None, time.perf_counter() - begun)

    def to_device(self, group: str, slots: Sequence[int], pages: Sequence[Parts], done: CameIn) -> None:
        begun = time.perf_counter()
        for slot, parts in zip(slots, pages, strict=True):
            for piece, part in self._cut_pieces(group, slot, parts):
                if isinstance(piece, torch.Tensor):
                    piece.copy_(torch.frombuffer(part, dtype=torch.uint8))
                else:
                    piece[:] = np.frombuffer(part, np.uint8)
        done([None] * len(slots), time.perf_counter() - begun)

    def _cut_pieces(self, group: str, slot: int, parts: Parts) -> Iterator[tuple[Any, memoryview]]:
        page, offset = self._pages[group][slot], 0
        for part in parts:
            yield page[offset : offset + len(part)], part
            offset += len(part)
        assert offset == page.shape[0]

    def flush(self) -> None:
        pass

    def begin_step(self, batch: StepBatch) -> None:
        pass

    def close(self) -> None:
        pass


@dataclass(slots=True)
class _Copies:
    """Pages of one size from one call: device addresses, `keys`, host memory kept alive by `parts`. `shared` are all
    slots that share a byte with them. `count` bytes of each move, of its `code` if any, which is `staged` there."""

    addresses: list[int]
    count: int
    keys: list[SlotKey]
    shared: set[SlotKey]
    parts: Sequence[Parts]
    done: CameIn
    code: PageCode | None = None
    staged: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Asked:
    """Copies of one direction that have not begun: so many `pages`, `coded` bytes of them coded."""

    copies: list[_Copies] = field(default_factory=list)
    pages: int = 0
    coded: int = 0
    settled: bool = True


class StreamPageCopier:
    """Copier beside the steps: per direction a lane, a thread that puts copies on it and one that calls `done`. Batches
    of at most BATCH pages, and no more coded bytes than the staging has room for, begin at `flush` and before a step.
    `lanes` are those of the steps, to the host, to the device and, if there is a fourth, behind that. `digests`
    computes digests on the device; without it pages have none. `coder`, which needs it, codes pages. One thread calls
    all but `digest`."""

    def __init__(  # noqa: PLR0913
        self,
        pools: Mapping[str, torch.Tensor],
        page_tokens: int,
        lanes: Sequence[CudaLane],
        memory: CudaHostMemory,
        overlapping: Callable[[str, int], list[SlotKey]] = list_own_slot,
        digests: CudaDigests | None = None,
        digest: PageDigest | None = None,
        starter: Callable[[], Executor] = lambda: ThreadPoolExecutor(1, "wicore-page-copies"),
        coder: CudaCoder | None = None,
    ) -> None:
        self._overlapping, self._sharing = overlapping, dict[SlotKey, list[SlotKey]]()
        flat = _flatten_pools(pools)
        self._places = {group: (pages.data_ptr(), pages.shape[1]) for group, pages in flat.items()}
        self._pools, self._page_tokens, self._memory = flat, page_tokens, memory
        self._compute, out, into = lanes[:3]
        self._digests, self.digest = digests, (digest or make_digest(pools)).compute_digest
        self.checks, self._coder = digests is not None, coder
        self._codes: Mapping[str, PageCode] = coder.codes if coder is not None else {}
        self.coded_bytes: Mapping[str, int] = {group: code.coded_bytes for group, code in self._codes.items()}
        self.broken: BaseException | None = None
        self._lock = threading.Lock()
        self._under_way: dict[SlotKey, _Batch] = {}  # that with the last copy of a slot; it waits for those before
        self._asked: set[SlotKey] = set()  # slots with a byte of a copy that has not begun
        staging = coder.staging if coder is not None else ((), ())
        self._out = _Way(out, out, starter(), staging[0], self._over, self._broke)
        self._into = _Way(into, lanes[-1], starter(), staging[1], self._over, self._broke)
        self._pinned: set[int] = set()  # where memory locked by one call begins: one copy must not pass such a border
        self._leaving, self._coming = _Asked(), _Asked()

    def pin(self, memory: memoryview) -> bool:
        self._pinned.add(host_address(memory))
        return self._memory.pin(memory)

    def to_host(self, group: str, slot: int, parts: Parts, done: Done, *, settled: bool = False) -> None:
        code = self._find_code(group, parts)
        self._find_room(self._leaving, code)
        copies = self._make_copies(group, [slot], [parts], lambda digests, seconds: done(digests[0], seconds), code)
        self._add_copies(self._leaving, copies, settled=settled)

    def to_device(self, group: str, slots: Sequence[int], pages: Sequence[Parts], done: CameIn) -> None:
        begun = 0
        while begun < len(slots):
            code, end = self._find_code(group, pages[begun]), begun + 1
            end += self._find_room(self._coming, code) - 1
            if group in self._codes:  # a call may bring coded and raw ones
                kinds = (self._find_code(group, parts) for parts in pages[begun:end])
                end = next((begun + i for i, kind in enumerate(kinds) if kind is not code), end)
            copies = self._make_copies(group, slots[begun:end], pages[begun:end], done, code)
            self._add_copies(self._coming, copies, settled=False)
            begun = end

    def flush(self) -> None:
        leaving, self._leaving = self._leaving, _Asked()
        coming, self._coming = self._coming, _Asked()
        if leaving.copies:
            self._submit_batch(self._out, leaving)
        if coming.copies:
            self._submit_batch(self._into, coming)
        self._asked.clear()

    def begin_step(self, batch: StepBatch) -> None:
        self.flush()
        with self._lock:
            under_way = set(self._under_way.values())
        if under_way:
            written = set(list_written_slots(batch, self._page_tokens))
            for copies in under_way:
                if not written.isdisjoint(copies.touched):
                    self._compute.wait(copies.end())

    def close(self) -> None:
        try:
            self.flush()
        finally:
            for way in (self._out, self._into):
                way.close()
            self._memory.unpin_all()
            self._pools = {}

    def _find_code(self, group: str, parts: Parts) -> PageCode | None:
        """Find by which code a page lies in these buffers; None: it is raw."""
        code = self._codes.get(group)
        return code if code is not None and sum([part.nbytes for part in parts]) == code.coded_bytes else None

    def _find_room(self, asked: _Asked, code: PageCode | None) -> int:
        """Count the pages of this code that can be added to a batch; where there is no room, it begins first."""
        if code is None or self._coder is None:
            return BATCH - asked.pages
        room = (self._coder.staging_bytes - asked.coded) // code.coded_bytes
        if not room:
            self.flush()
            room = self._coder.staging_bytes // code.coded_bytes
        return min(BATCH - asked.pages, room)

    def _make_copies(
        self, group: str, slots: Sequence[int], pages: Sequence[Parts], done: CameIn, code: PageCode | None
    ) -> _Copies:
        """Make the pages of one call; copies that were asked for and share a byte with them begin first."""
        (base, count), sharing = self._places[group], self._sharing
        keys = [(group, slot) for slot in slots]
        for key in keys:
            if key not in sharing:
                sharing[key] = self._overlapping(*key)
        if not self._asked.isdisjoint(keys):
            self.flush()  # so that within a batch, and between those of both directions, no order matters
        shared = set[SlotKey]().union(*[sharing[key] for key in keys])
        self._asked |= shared
        addresses = [base + slot * count for slot in slots]
        return _Copies(addresses, count if code is None else code.coded_bytes, keys, shared, pages, done, code)

    def _cut_pieces(self, asked: Sequence[_Copies]) -> list[tuple[int, int, int]]:
        """Cut copies into pieces (device, host, bytes), joining parts that lie side by side in both memories,
        in one pool or one place of the staging: no copy passes a border between allocations."""
        parts = list[tuple[int, int, int, tuple[str, bool]]]()
        for copies in asked:
            within = copies.keys[0][0], copies.code is None
            for address, page in zip(copies.staged or copies.addresses, copies.parts, strict=True):
                at = address
                for part in page:
                    parts.append((host_address(part), at, part.nbytes, within))
                    at += part.nbytes
                assert at == address + copies.count
        pieces, ends = list[tuple[int, int, int]](), (-1, -1, ("", False))
        for there, at, size, within in sorted(parts):
            if ends == (there, at, within) and there not in self._pinned:
                device, begun, before = pieces[-1]
                pieces[-1] = (device, begun, before + size)
            else:
                pieces.append((at, there, size))
            ends = there + size, at + size, within
        return pieces

    def _add_copies(self, asked: _Asked, copies: _Copies, *, settled: bool) -> None:
        asked.copies.append(copies)
        asked.pages += len(copies.keys)
        asked.coded += len(copies.keys) * copies.count if copies.code is not None else 0
        asked.settled = asked.settled and settled
        if asked.pages >= BATCH:
            self.flush()

    def _submit_batch(self, way: _Way, asked: _Asked) -> None:
        touched = frozenset[SlotKey]().union(*[copies.shared for copies in asked.copies])
        leaving, pieces = way is self._out, list[tuple[int, int, int]]()
        room = way.rooms[0] if way.rooms and asked.coded else None
        staged = self._stage_pages(asked.copies, room.address) if room is not None else []
        for device, host, size in self._cut_pieces(asked.copies):
            pieces.append((host, device, size) if leaving else (device, host, size))
        way.rooms.rotate(-bool(staged))
        batch, under_way = _Batch(asked.copies, pieces, touched, staged, room), self._under_way
        try:
            batch.behind = None if asked.settled else self._compute.record()
            with self._lock:
                batch.before = {under_way[key] for key in under_way.keys() & touched}
                for copies in batch.copies:
                    under_way.update(dict.fromkeys(copies.keys, batch))
            way.starter.submit(partial(self._start_batch, way, batch))
        except Exception as error:  # the caller may go on as if only its step had failed
            self._broke(error)
            batch.started.set()
            raise

    def _stage_pages(self, asked: Sequence[_Copies], at: int) -> list[StagedPage]:
        """Give the coded ones of a batch their places in the staging: those of a group side by side, in the order that
        they have in host memory, so that pieces of many pages are copied at once."""
        staged = list[StagedPage]()
        for group, code in self._codes.items():
            found = [copies for copies in asked if copies.code is code]
            for copies in found:
                copies.staged = [0] * len(copies.keys)
            pages = [
                (host_address(page[0]), n, i) for n, copies in enumerate(found) for i, page in enumerate(copies.parts)
            ]
            for _, n, i in sorted(pages):
                found[n].staged[i] = at
                staged.append((group, found[n].addresses[i], at))
                at += code.coded_bytes
        return staged

    def _start_batch(self, way: _Way, batch: _Batch) -> None:
        lane, behind, leaving, room, coder = way.lane, way.behind, way is self._out, batch.room, self._coder
        found: Callable[[], Sequence[bytes]] | None = None
        sealed: Callable[[], Sequence[bytes]] | None = None
        try:
            if self.broken is not None:  # of a call that asked for many, pages are told in order: none behind these
                return
            if batch.behind is not None:
                lane.wait(batch.behind)
            for earlier in batch.before:
                lane.wait(earlier.end())
            if room is not None and room.free is not None:
                lane.wait(room.free)
            begun = lane.record()
            pages = [(at, copies.count) for copies in batch.copies for at in copies.staged or copies.addresses]
            digest = self._digests.ask(lane, pages) if self._digests is not None else None
            code = None
            if coder is not None and room is not None:
                code = (coder.encode if leaving else coder.decode)(lane, batch.staged)
            if leaving and code is not None:
                sealed = code(lane)
            if leaving and digest is not None:
                found = digest(lane)
            lane.copy(batch.pieces)
            if behind is not lane:
                behind.wait(lane.record())
            if not leaving and digest is not None:
                found = digest(behind)
            if not leaving and code is not None:
                sealed = code(behind)
            batch.begun, batch.ended = begun, behind.record()
            if room is not None:
                room.free = batch.ended
        except Exception as error:  # these copies will never end
            self._broke(error)
            return
        finally:
            batch.before = set()
            batch.started.set()
        if found is not None and sealed is not None:
            found = partial(_judge_codes, batch, leaving, found, sealed)
        way.started.put((batch, found))

    def _broke(self, error: BaseException) -> None:
        self.broken = self.broken or error

    def _over(self, batch: _Batch) -> None:
        under_way = self._under_way
        with self._lock:
            for copies in batch.copies:
                for key in copies.keys:
                    if under_way.get(key) is batch:
                        del under_way[key]


@dataclass(slots=True, eq=False)
class _Room:
    """A place of the staging at `address`, which is free once its last batch has `free` behind it."""

    address: int
    free: CudaEvent | None = None


@dataclass(slots=True, eq=False)
class _Batch:
    """Copies that begin together, after the batches `before` and, unless all are settled, after `behind` of the steps'
    lane. Once `started` they lie between two points of their own lanes. `pieces` are (target, source, bytes); `touched`
    are all slots that share a byte with them; `staged` are those that are coded, and pass `room`."""

    copies: list[_Copies]
    pieces: list[tuple[int, int, int]]
    touched: frozenset[SlotKey]
    staged: list[StagedPage] = field(default_factory=list)
    room: _Room | None = None
    behind: CudaEvent | None = None
    before: set[_Batch] = field(default_factory=set)
    started: threading.Event = field(default_factory=threading.Event)
    begun: CudaEvent | None = None
    ended: CudaEvent | None = None

    def end(self) -> CudaEvent:
        """Wait until the batch is on its lane. Raises RuntimeError when it could not be put there."""
        self.started.wait()
        if self.ended is None:
            raise RuntimeError("page copies could not begin")
        return self.ended


class _Way:
    """Copies of one direction: the lane, that of the work `behind` its copies, the thread `starter` that puts batches
    on both, and `rooms` of the staging, for coded ones in turn. A thread reports the `started` ones in order."""

    def __init__(
        self,
        lane: CudaLane,
        behind: CudaLane,
        starter: Executor,
        staging: Sequence[int],
        over: Callable[[_Batch], None],
        broke: Callable[[BaseException], None],
    ) -> None:
        self.lane, self.behind, self.starter, self._over, self._broke = lane, behind, starter, over, broke
        self.rooms = deque(map(_Room, staging))
        self.started = SimpleQueue[tuple[_Batch, Callable[[], Sequence[bytes]] | None] | None]()
        self._thread = threading.Thread(target=self._finish_batches, name="wicore-page-copies-over", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self.starter.shutdown()
        self.started.put(None)
        self._thread.join()

    def _finish_batches(self) -> None:
        try:
            last: CudaEvent | None = None
            while (item := self.started.get()) is not None:
                batch, found = item
                assert batch.begun is not None and batch.ended is not None
                batch.ended.synchronize()
                sizes = [copies.count * len(copies.keys) for copies in batch.copies]
                seconds = batch.ended.seconds_after(batch.begun)  # in part those of the batch before, with two lanes
                each = (min(seconds, batch.ended.seconds_after(last)) if last is not None else seconds) / sum(sizes)
                last = batch.ended
                pages, told = sum(len(copies.keys) for copies in batch.copies), 0
                digests: Sequence[bytes | None] = found() if found is not None else [None] * pages
                assert len(digests) == pages
                self._over(batch)
                for copies, size in zip(batch.copies, sizes, strict=True):
                    copies.done(digests[told : told + len(copies.keys)], each * size)
                    told += len(copies.keys)
        except Exception as error:  # of the device: whoever waits for `done` must hear of it
            self._broke(error)


def _judge_codes(
    batch: _Batch, leaving: bool, digests: Callable[[], Sequence[bytes]], sealed: Callable[[], Sequence[bytes]]
) -> list[bytes]:
    """Take the digests of a batch that is over: UNFIT for a page that did not fit its code. Also UNFIT where the seal
    in host memory is not that of the slot's bytes, before they were encoded or after they were decoded."""
    found, seals, told = list(digests()), dict(zip([at for *_, at in batch.staged], sealed(), strict=True)), 0
    for copies in batch.copies:
        for i, at in enumerate(copies.staged):
            first, last = copies.parts[i][0], copies.parts[i][-1]
            assert copies.code is not None
            good = last[-SEAL_BYTES:] == seals[at] and (not leaving or copies.code.fits(first[:HEADER_BYTES]))
            found[told + i] = found[told + i] if good else UNFIT
        told += len(copies.keys)
    return found


def _flatten_pools(pools: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {group: pool.view(pool.shape[0], -1).view(torch.uint8) for group, pool in pools.items()}
