"""Executor of an engine that is split over several ranks: rank 0 in this process, a process for each other one.

Knows steps, copies and processes; must not know backends, requests or queues. A step goes to the ranks as the plain
data of its batch, a copy as places in the host tier's memory, which all ranks map. Invariants: ranks get steps and
copies in the order of the calls here; a page was copied when all ranks have copied their part of it; once a rank has
failed, no step runs any more, so the engine process ends and is started again; no rank outlives this process.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

import msgspec
import torch

from wicore_trt.child_process import child_command, import_named
from wicore_trt.errors import RankError, WicoreError, error_named
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.runtime.batch import SequenceSlice, StepBatch, StepResult
from wicore_trt.runtime.cuda_lanes import host_address
from wicore_trt.runtime.exchange import RankExchange, create_memory
from wicore_trt.runtime.executor import CameIn, Done, Executor, ImageEncoder, KVLayout, PageCopier
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.runtime.page_digest import KEY_BYTES, PageDigest

log = logging.getLogger(__name__)

BEAT_S, SILENCE_S = 0.25, 2.0
"""How often a rank's process says that it runs, whatever it computes; for how long it may be silent in a step."""
START_S = 60.0
"""The same while a rank starts and loads."""
END_S = 5.0
"""Time for a rank's process to end by itself when this one closes."""


class RankExecutor(Executor, Protocol):
    """Executor of one rank. Steps of ranks other than 0 sample nothing."""

    def logits(self, batch: StepBatch, rows: torch.Tensor) -> torch.Tensor: ...


Opener = Callable[[Path, ExecutorOptions, RankExchange], RankExecutor]
"""Opens the part of an engine directory that the exchange's rank runs."""


class MessageSocket:
    """Stream socket of messages, each a msgpack array with the kind first, and at most one file descriptor."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock, self._lock = sock, threading.Lock()

    def send(self, *message: object, fds: Sequence[int] = ()) -> None:
        """Send a message; any thread may. Raises OSError when the other side has ended."""
        data = msgspec.msgpack.encode(message)
        data = len(data).to_bytes(4, "little") + data
        with self._lock:
            sent = socket.send_fds(self._sock, [data], fds) if fds else 0
            self._sock.sendall(data[sent:])

    def receive(self) -> tuple[list[Any], list[int]] | None:
        """Receive the next message and its descriptors; None when the other side has ended."""
        header, fds, _, _ = socket.recv_fds(self._sock, 4, 1)
        header += self._read(4 - len(header)) if header else b""
        if len(header) < 4:
            return None
        size = int.from_bytes(header, "little")
        data = self._read(size)
        return (msgspec.msgpack.decode(data), fds) if len(data) == size else None

    def close(self) -> None:
        with suppress(OSError):  # wakes a thread that receives
            self._sock.shutdown(socket.SHUT_RDWR)
        self._sock.close()

    def _read(self, size: int) -> bytes:
        data = bytearray()
        while len(data) < size and (part := self._sock.recv(size - len(data))):
            data += part
        return bytes(data)


def pack_slices(batch: StepBatch) -> list[tuple[object, ...]]:
    """Pack the fields of slices by which KV values and logits are computed; sampling is for rank 0 alone."""
    return [
        (s.seq_id, s.token_ids, s.start, {g: list(table) for g, table in s.pages.items()}, s.sample, list(s.targets),
         s.images)
        for s in batch.slices
    ]  # fmt: skip


def unpack_slices(packed: Sequence[Sequence[Any]]) -> StepBatch:
    return StepBatch([
        SequenceSlice(seq_id, ids, start, pages, sample, targets=targets, images=tuple(map(tuple, images)))
        for seq_id, ids, start, pages, sample, targets, images in packed
    ])  # fmt: skip


class RankedExecutor:
    """Implements `Executor` over all ranks; its pages have the bytes of all ranks, in rank order."""

    def __init__(self, engine: Path, spec: Gemma3Spec, ranks: int, opener: str, options: ExecutorOptions) -> None:
        """Start ranks 1 and up, then open rank 0. `spec` is the whole model's, `opener` the name of an `Opener`.
        `options.threads` 0 shares the cores of this process. Raises what the opener raises on any rank, and RankError
        for a rank that ended or hangs."""
        threads = options.threads or max(1, len(os.sched_getaffinity(0)) // ranks)
        options = replace(options, threads=threads)
        self._group = _Ranks(ranks, {"engine": str(engine), "opener": opener, "options": asdict(options)})
        try:
            self._local: RankExecutor = import_named(opener)(engine, options, self._group.exchange)
            self._group.await_ready()
        except BaseException:
            self._group.close()
            raise
        local = self._local
        self.spec, self.kernels = spec, f"{local.kernels}-tp{ranks}"
        self.max_batch_tokens, self.slice_tokens = local.max_batch_tokens, local.slice_tokens
        self.max_sequences, self.score_rows, self.graph_sizes = local.max_sequences, local.score_rows, local.graph_sizes
        sizes = {group: ranks * count for group, count in local.layout.page_bytes.items()}
        self.layout: KVLayout = replace(local.layout, page_bytes=sizes)
        self.copier: PageCopier = RankedCopier(self._group, local.copier, local.layout.page_bytes)

    @property
    def images(self) -> ImageEncoder | None:
        return self._local.images

    def execute(self, batch: StepBatch) -> StepResult:
        self._begin_step(batch, None)
        with self._group.run_step():
            return self._local.execute(batch)

    def logits(self, batch: StepBatch, rows: torch.Tensor) -> torch.Tensor:
        """Run one step like execute(), but return logits [R, vocab] float32 of `rows`, int64[R] ascending."""
        self._begin_step(batch, rows.tolist())
        with self._group.run_step():
            return self._local.logits(batch, rows)

    def release(self, seq_id: int) -> None:
        self._local.release(seq_id)

    def close(self) -> None:
        self._group.close()
        self._local.close()

    def _begin_step(self, batch: StepBatch, rows: list[int] | None) -> None:
        self._group.send("step", pack_slices(batch), rows)


class _Ranks:
    """Processes of ranks 1 and up, and this process's end of the exchange. `start` is what they open, as JSON."""

    def __init__(self, ranks: int, start: Mapping[str, object]) -> None:
        self.count, self._closing = ranks, False
        self.failure: RankError | None = None
        self.refusal: WicoreError | None = None
        """Why a rank cannot open its part."""
        self.on_reply: Callable[[int, list[Any]], None] = lambda rank, message: None
        self.on_failure: Callable[[RankError], None] = lambda error: None
        memory = create_memory(ranks)
        mesh = {(a, b): socket.socketpair() for a in range(ranks) for b in range(a + 1, ranks)}

        def peers_of(rank: int) -> dict[int, socket.socket]:
            return {(b if a == rank else a): pair[a != rank] for (a, b), pair in mesh.items() if rank in (a, b)}

        self.processes, self._sockets = list[subprocess.Popen[bytes]](), list[MessageSocket]()
        for rank in range(1, ranks):
            ours, theirs = socket.socketpair()
            peers = {other: end.fileno() for other, end in peers_of(rank).items()}
            given = {**start, "rank": rank, "ranks": ranks, "memory": memory, "control": theirs.fileno(),
                     "peers": peers}  # fmt: skip
            with theirs:
                process = subprocess.Popen(
                    child_command("wicore_trt.runtime.rank_process", given), stdin=subprocess.DEVNULL,
                    start_new_session=True, pass_fds=(memory, theirs.fileno(), *peers.values()),
                )  # fmt: skip
            self.processes.append(process)
            self._sockets.append(MessageSocket(ours))
        self._beats = dict.fromkeys(range(ranks), time.monotonic())
        self.exchange = RankExchange(0, ranks, memory, peers_of(0), self._has_beaten)
        os.close(memory)
        for a, b in mesh:
            for rank, end in zip((a, b), mesh[a, b], strict=True):
                if rank:  # else an end of a rank that has ended would stay open here
                    end.close()
        self._ready = threading.Semaphore(0)
        self._readers = [
            threading.Thread(target=self._read_replies, args=(rank, sock), name=f"wicore-rank-{rank}", daemon=True)
            for rank, sock in enumerate(self._sockets, 1)
        ]
        for reader in self._readers:
            reader.start()

    def await_ready(self) -> None:
        """Wait until all ranks have opened their part. Raises the error of one that cannot, RankError for one that
        ended or hangs."""
        for _ in self._sockets:
            while not self._ready.acquire(timeout=BEAT_S):
                for rank in range(1, self.count):
                    if not self._has_beaten(rank, START_S):
                        self._fail(RankError(f"rank {rank} hangs while it loads"))
                        raise RankError(f"rank {rank} hangs while it loads")
        if self.refusal is not None:
            raise self.refusal
        if self.failure is not None:
            raise self.failure

    def send(self, *message: object, fds: Sequence[int] = ()) -> None:
        """Send a message to all ranks. Raises RankError once one has failed."""
        for rank in range(1, self.count):
            self.send_to(rank, *message, fds=fds)

    def send_to(self, rank: int, *message: object, fds: Sequence[int] = ()) -> None:
        if self.failure is not None:
            raise self.failure
        try:
            self._sockets[rank - 1].send(*message, fds=fds)
        except OSError as error:
            self._fail(RankError(f"rank {rank} has ended: {error}"))
            raise RankError(f"rank {rank} has ended") from error

    @contextmanager
    def run_step(self) -> Iterator[None]:
        """Run a step of this rank. After an error within it ranks are at different places, so no step can follow."""
        self.exchange.within_step = True
        try:
            yield
        except Exception as error:
            if self.exchange.within_step:
                self._fail(error if isinstance(error, RankError) else RankError(f"rank 0 failed in a step: {error}"))
            raise

    def close(self) -> None:
        """End all ranks and wait for them."""
        self._closing = True
        for sock in self._sockets:
            sock.close()
        self.exchange.close()
        end = time.monotonic() + (END_S if self.failure is None else 0.0)
        for process in self.processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, end - time.monotonic()))
            process.kill()
            process.wait()
        for reader in self._readers:
            reader.join()

    def _has_beaten(self, rank: int, silence_s: float | None = None) -> bool:
        return time.monotonic() - self._beats[rank] < (SILENCE_S if silence_s is None else silence_s)

    def _fail(self, error: RankError) -> None:
        """Note that no step can run any more."""
        if self.failure is None and not self._closing:
            log.error("%s; this engine ends", error)
            self.failure = error
            self.on_failure(error)

    def _read_replies(self, rank: int, sock: MessageSocket) -> None:
        ready = False
        try:
            while (received := sock.receive()) is not None:
                message, _ = received
                if message[0] == "ready":
                    ready = True
                    self._ready.release()
                elif message[0] == "refused":
                    _, kind, text, fix = message
                    self.refusal = error_named(kind, text, fix=fix)
                elif message[0] == "beat":
                    self._beats[rank] = time.monotonic()
                else:
                    self.on_reply(rank, message)
        except OSError:
            pass
        finally:
            self._fail(RankError(f"rank {rank} has ended"))
            if not ready:
                self._ready.release()


@dataclass(slots=True)
class _Pending:
    """Copies of one call: `left` ranks have not reported; `done` gets the seconds of the slowest."""

    left: int
    done: Callable[[float], None]
    seconds: float = 0.0


@dataclass(slots=True)
class RankedCopier:
    """Implements `PageCopier` over all ranks. Pages are copied to and from the memory of `map_memory` alone.
    `rank_bytes`: of each rank's part of a page, by layer group."""

    group: _Ranks
    local: PageCopier
    rank_bytes: Mapping[str, int]
    broken: BaseException | None = None
    checks: bool = False
    _slab: memoryview = field(default_factory=lambda: memoryview(b""))
    _address: int = 0
    _lock: threading.RLock = field(default_factory=threading.RLock)
    _pending: dict[int, _Pending] = field(default_factory=dict)
    _calls: int = 0
    _digest: PageDigest = field(init=False)

    def __post_init__(self) -> None:
        self._digest = PageDigest(os.urandom(KEY_BYTES), self.group.count * max(self.rank_bytes.values()))
        self.group.on_reply, self.group.on_failure = self._take_reply, self._break_copies

    def map_memory(self, size: int) -> memoryview:
        """Map `size` zero bytes that all ranks see; call it once."""
        fd = os.memfd_create("wicore-host-tier", os.MFD_CLOEXEC)
        os.ftruncate(fd, size)
        self._slab = memoryview(mmap.mmap(fd, size))
        self._address = host_address(self._slab)
        self.group.send("memory", size, fds=[fd])
        os.close(fd)
        return self._slab

    def pin(self, memory: memoryview) -> bool:
        return self.local.pin(memory)

    def digest(self, parts: Sequence[memoryview]) -> bytes:
        return self._digest.compute_digest(parts)

    def to_host(self, group: str, slot: int, parts: Sequence[memoryview], done: Done, *, settled: bool = False) -> None:
        call = self._begin_call(lambda seconds: done(None, seconds))
        for rank in range(1, self.group.count):
            self.group.send_to(rank, "out", call, group, slot, self._find_places(self._cut_parts(group, rank, parts)))
        own = self._cut_parts(group, 0, parts)
        self.local.to_host(group, slot, own, lambda digest, seconds: self._end_part(call, seconds), settled=settled)

    def to_device(self, group: str, slots: Sequence[int], pages: Sequence[Sequence[memoryview]], done: CameIn) -> None:
        call = self._begin_call(lambda seconds: done([None] * len(slots), seconds))
        for rank in range(1, self.group.count):
            places = [self._find_places(self._cut_parts(group, rank, parts)) for parts in pages]
            self.group.send_to(rank, "in", call, group, list(slots), places)
        own = [self._cut_parts(group, 0, parts) for parts in pages]
        self.local.to_device(group, slots, own, lambda digests, seconds: self._end_part(call, seconds))

    def flush(self) -> None:
        self.local.flush()

    def _begin_call(self, done: Callable[[float], None]) -> int:
        with self._lock:
            self._calls += 1
            self._pending[self._calls] = _Pending(self.group.count, done)
            return self._calls

    def _end_part(self, call: int, seconds: float) -> None:
        with self._lock:  # held while `done` runs, so that calls end in order
            pending = self._pending[call]
            pending.left -= 1
            pending.seconds = max(pending.seconds, seconds)
            if not pending.left:
                del self._pending[call]
                pending.done(pending.seconds)

    def _take_reply(self, rank: int, message: list[Any]) -> None:
        _, call, seconds = message
        self._end_part(call, seconds)

    def _break_copies(self, error: RankError) -> None:
        self.broken = error

    def _cut_parts(self, group: str, rank: int, parts: Sequence[memoryview]) -> list[memoryview]:
        """Cut a rank's part out of the buffers of a page."""
        begin, found = rank * self.rank_bytes[group], list[memoryview]()
        end, at = begin + self.rank_bytes[group], 0
        for part in parts:
            piece = part[max(0, begin - at) : max(0, end - at)]
            if len(piece):
                found.append(piece)
            at += len(part)
        return found

    def _find_places(self, parts: Sequence[memoryview]) -> list[tuple[int, int]]:
        """Find (offset, bytes) of buffers in the shared memory."""
        places = [(host_address(part) - self._address, len(part)) for part in parts]
        assert all(at >= 0 and at + size <= len(self._slab) for at, size in places), "a page lies in shared memory"
        return places
