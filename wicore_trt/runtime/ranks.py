"""Executor of an engine that is split over several ranks: rank 0 in this process, a process for each other one.

Knows steps and processes; must not know backends, requests or queues. A step goes to the ranks as the plain data of its
batch. On GPUs all ranks sample alike, so that a step may take tokens of the last one that nobody has read; rank 0
answers. Invariants: ranks get steps and copies in the order of the calls here; once a rank has failed, no step runs any
more, so the engine process ends and is started again; no rank outlives this process.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import struct
import subprocess
import threading
import time
import zlib
from array import array
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import msgspec
import torch

from wicore_trt.child_process import child_command, find_halt, import_named, start_beside
from wicore_trt.cores import count_cores
from wicore_trt.errors import EnvironmentUnfitError, RankError, WicoreError, error_named
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.runtime.batch import SequenceSlice, StepBatch, StepResult
from wicore_trt.runtime.exchange import GLANCE_S, RankExchange, create_memory
from wicore_trt.runtime.executor import Executor, ImageEncoder, KVLayout, PageCopier
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.runtime.rank_copier import RankedCopier
from wicore_trt.types import Bytes, SamplingParams

log = logging.getLogger(__name__)

BEAT_S, HALT_S, SILENCE_S, REST_S = 0.25, 1.0, 1.5, 10.0
"""How often a rank's process says that it runs, whatever it computes; for how long it may be silent once it was stopped
or has ended, else in a step, and else between steps."""
START_S = 60.0
"""For how long a rank may be silent while it starts and loads."""
SEND_S = 10.0
"""For how long a message may wait until the other side, which may run steps and is alive, takes some of it."""
END_S = 5.0
"""Time for a rank's process to end by itself when this one closes."""


class MessageSocket:
    """Stream socket of messages, each a msgpack array with the kind first, and at most one file descriptor. While a
    message waits, `is_alive` tells every GLANCE_S whether the other side is worth it."""

    def __init__(self, sock: socket.socket, is_alive: Callable[[], bool] = lambda: True) -> None:
        self._sock, self._lock, self._is_alive = sock, threading.Lock(), is_alive
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 0, int(1e6 * GLANCE_S)))

    def send(self, *message: object, fds: Sequence[int] = ()) -> None:
        """Send a message; any thread may. Raises OSError when the other side has ended or hangs."""
        self.send_encoded(encode_message(message), fds)

    def send_encoded(self, data: bytes, fds: Sequence[int]) -> None:
        left, glances = memoryview(data), 0
        with self._lock:
            while left:
                try:
                    left = left[socket.send_fds(self._sock, [left], fds) if fds else self._sock.send(left) :]
                    fds, glances = (), 0
                except BlockingIOError:
                    glances += 1
                    if glances * GLANCE_S >= SEND_S or not self._is_alive():
                        raise

    def has_message(self, seconds: float) -> bool:
        """Wait so long for a message, or the other side's end. Raises ValueError when this end is closed."""
        return self._wait_for(select.POLLIN, seconds)

    def has_room(self) -> bool:
        """Tell whether a small message would be sent at once, or raise at once because the other side has ended."""
        return self._wait_for(select.POLLOUT, 0.0)

    def _wait_for(self, event: int, seconds: float) -> bool:
        poll = select.poll()
        poll.register(self._sock, event)
        return bool(poll.poll(1e3 * seconds))

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


def encode_message(message: Sequence[object]) -> bytes:
    data = msgspec.msgpack.encode(message)
    return len(data).to_bytes(4, "little") + data


def pack_slices(batch: StepBatch) -> list[tuple[object, ...]]:
    """Pack the fields of slices by which KV values and logits are computed, and tokens drawn on a device."""
    return [
        (s.seq_id, s.token_ids, s.start, {g: _pack_table(table) for g, table in s.pages.items()}, s.sample,
         _pack_drawing(s), s.prompt_len, s.stamp, list(s.targets), s.images)
        for s in batch.slices
    ]  # fmt: skip


def _pack_table(table: Sequence[int]) -> bytes:
    return (table if isinstance(table, array) else array("i", table)).tobytes()


def _pack_drawing(piece: SequenceSlice) -> tuple[float, int, float, float, int] | None:
    """Pack what a token is drawn by. None where it is chosen greedily, or by rank 0's host."""
    p = piece.params
    if p is None or p.greedy or piece.suppress_eos or piece.mask is not None or p.logprobs is not None:
        return None
    return None if p.logit_bias or p.penalized else (p.temperature, p.top_k, p.top_p, p.min_p, piece.seed)


def unpack_slices(packed: Sequence[Sequence[Any]]) -> StepBatch:
    slices = []
    for seq_id, ids, start, pages, sample, drawing, prompt_len, stamp, targets, images in packed:
        tables = {group: array("i", table) for group, table in pages.items()}
        params, seed = (_drawing_params(*drawing[:4]), drawing[4]) if drawing else (None, 0)
        piece = SequenceSlice(seq_id, ids, start, tables, sample, params, prompt_len, seed, stamp=stamp)
        piece.targets, piece.images = targets, tuple(map(tuple, images))
        slices.append(piece)
    return StepBatch(slices)


@lru_cache(1024)
def _drawing_params(temperature: float, top_k: int, top_p: float, min_p: float) -> SamplingParams:
    return SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)


class RankedExecutor:
    """Implements `Executor` over all ranks; its pages have the bytes of all ranks, in rank order."""

    def __init__(
        self, engine: Path, spec: Gemma3Spec, ranks: int, opener: str, options: ExecutorOptions, *, gpus: bool = False
    ) -> None:
        """Start ranks 1 and up, then open rank 0. `spec` is the whole model's; `opener` names what opens the part of
        the engine that a rank runs: a function of path, options and exchange, at "module:function". `options.threads` 0
        shares the cores of this process. With `gpus` each rank has its own. Raises what the opener raises on any rank,
        EnvironmentUnfitError for too few GPUs, and RankError for a rank that ended or hangs."""
        threads = options.threads or max(1, count_cores() // ranks)
        options = replace(options, threads=threads)
        start = {"engine": str(engine), "opener": opener, "options": asdict(options)}
        self._group, self._local = _Ranks(ranks, start, _list_gpus(ranks) if gpus else []), cast(Any, None)
        try:
            self._local = import_named(opener)(engine, options, self._group.exchange)
            self._group.await_ready()
        except BaseException as error:
            self.close()
            if isinstance(error, RankError) and self._group.refusal is not None:  # what ended that rank
                raise self._group.refusal from error
            raise
        local: Executor = self._local
        self.spec, self.kernels = spec, f"{local.kernels}-tp{ranks}"
        self.max_batch_tokens, self.slice_tokens = local.max_batch_tokens, local.slice_tokens
        self.max_sequences, self.score_rows, self.graph_sizes = local.max_sequences, local.score_rows, local.graph_sizes
        sizes = {group: ranks * count for group, count in local.layout.page_bytes.items()}
        self.layout: KVLayout = replace(local.layout, page_bytes=sizes)
        self._copies = RankedCopier(self._group, local.copier, local.layout.page_bytes)
        self.copier: PageCopier = self._copies
        self.images: ImageEncoder | None = self._local.images

    def execute(self, batch: StepBatch) -> StepResult:
        self._begin_step(batch)
        with self._group.run_step():
            return self._local.execute(batch)  # type: ignore[no-any-return]

    def logits(self, batch: StepBatch, rows: torch.Tensor) -> torch.Tensor:
        """Run one step like execute(), but return logits [R, vocab] float32 of `rows`, int64[R] ascending. On CPUs."""
        self._begin_step(batch, rows.tolist())
        with self._group.run_step():
            return self._local.logits(batch, rows)  # type: ignore[no-any-return]

    def release(self, seq_id: int) -> None:
        self._local.release(seq_id)

    def close(self) -> None:
        self._group.close()
        if self._local is not None:
            self._local.close()

    def _begin_step(self, batch: StepBatch, rows: list[int] | None = None) -> None:
        self._copies.send_asked()
        self._group.send("step", pack_slices(batch), batch.measure_attention, rows)


class RankedAheadExecutor(RankedExecutor):
    """Implements `AheadExecutor` over all ranks, each a `TritonExecutor` on its GPU, whose `collect` raises RankError
    where ranks have lost each other. Attention is measured over the heads of rank 0. With `options.compare_ranks` a
    rank that has other rows or tokens than rank 0 ends the engine."""

    def __init__(self, engine: Path, spec: Gemma3Spec, ranks: int, opener: str, options: ExecutorOptions) -> None:
        super().__init__(engine, spec, ranks, opener, options, gpus=options.device != "cpu")
        encoder = self._local.images
        self.images = None if encoder is None else _RankedEncoder(self._group, encoder)
        self._group.flag = None if self._local.peers is None else self._local.peers.failed
        if options.compare_ranks:
            self._local.on_step = self._group.note_step

    def execute(self, batch: StepBatch) -> StepResult:
        self.submit(batch)
        return self.collect()

    def submit(self, batch: StepBatch) -> None:
        self._begin_step(batch)
        try:
            self._local.submit(batch)
        except Exception as error:  # the other ranks run this step, and would wait for this one
            self._group.fail(RankError(f"rank 0 could not start a step: {error}"))
            raise

    def collect(self) -> StepResult:
        try:
            return self._local.collect()  # type: ignore[no-any-return]
        except RankError as error:
            raise self._group.fail(error) from error

    def leads(self, batch: StepBatch) -> bool:
        return self._local.leads(batch)  # type: ignore[no-any-return]


class _RankedEncoder:
    """Implements `ImageEncoder`: every rank encodes each image, between the same steps."""

    def __init__(self, group: _Ranks, local: ImageEncoder) -> None:
        self._group, self._local = group, local
        self.slots, self.tokens, self.pixel_bytes = local.slots, local.tokens, local.pixel_bytes
        self.parts, self.part_s = local.parts, local.part_s
        self.take_ended, self.is_finite = local.take_ended, local.is_finite

    def begin(self, slot: int, pixels: Bytes) -> int:
        self._group.send("image", slot, pixels)
        return self._local.begin(slot, pixels)

    def run_parts(self, count: int) -> None:
        self._group.send("parts", count)
        self._local.run_parts(count)


def _list_gpus(ranks: int) -> list[str]:
    """List the first GPUs that this process may use, by the names that CUDA_VISIBLE_DEVICES takes."""
    found, given = torch.cuda.device_count(), os.environ.get("CUDA_VISIBLE_DEVICES")
    if found < ranks:
        raise EnvironmentUnfitError(
            f"The engine is split over {ranks} GPUs, and this process may use {found}.",
            fix="Name as many in executor.devices, or build the engine with a smaller --tp.",
        )
    return (given.split(",") if given else list(map(str, range(found))))[:ranks]


class _Ranks:
    """Processes of ranks 1 and up, and this process's end of the exchange. `start` is what they open, as JSON."""

    def __init__(self, ranks: int, start: Mapping[str, object], gpus: list[str]) -> None:
        """`gpus`: names of each rank's, or none. A rank has its own first, and those of its peers behind it."""
        self.count, self._closing, self._loaded = ranks, False, False
        self.failure: RankError | None = None
        self.refusal: WicoreError | None = None
        """Why a rank cannot open its part."""
        self.on_copied: Callable[[int, int, Sequence[bytes | None], float], None] = lambda *copied: None
        self.on_failure: Callable[[RankError], None] = lambda error: None
        self.flag: torch.Tensor | None = None
        """Of peer memory: kernels that wait for a rank see there that it has failed."""
        self._alike = [deque[int]() for _ in range(ranks)]
        """Checksums of what each rank had alike in steps that were not compared yet."""
        mesh = {(a, b): socket.socketpair() for a in range(ranks) for b in range(a + 1, ranks)}
        memory = create_memory(ranks)

        def peers_of(rank: int) -> dict[int, socket.socket]:
            return {(b if a == rank else a): pair[a != rank] for (a, b), pair in mesh.items() if rank in (a, b)}

        self.processes, self._sockets = list[subprocess.Popen[bytes]](), list[MessageSocket]()
        self._beats, self._lock = dict.fromkeys(range(ranks), time.monotonic()), threading.Lock()
        self._glances = dict.fromkeys(range(ranks), 0)  # since the last beat
        try:
            for rank in range(1, ranks):
                ours, theirs = socket.socketpair()
                self._sockets.append(MessageSocket(ours, partial(self._is_alive, rank)))
                peers = {other: end.fileno() for other, end in peers_of(rank).items()}
                given = {**start, "rank": rank, "ranks": ranks, "memory": memory, "control": theirs.fileno(),
                         "peers": peers}  # fmt: skip
                order = {"CUDA_VISIBLE_DEVICES": ",".join(gpus[rank:] + gpus[:rank])} if gpus else {}
                with theirs:
                    process = start_beside(
                        child_command("wicore_trt.runtime.rank_process", given), stdin=subprocess.DEVNULL,
                        start_new_session=True, pass_fds=(memory, theirs.fileno(), *peers.values()),
                        env=os.environ | order,
                    )  # fmt: skip
                self.processes.append(process)
            self.exchange = RankExchange(0, ranks, memory, peers_of(0), self._is_alive)
        except BaseException:
            for process in self.processes:
                process.kill()
                process.wait()
            for control in self._sockets:
                control.close()
            for end in peers_of(0).values():
                end.close()
            raise
        finally:
            os.close(memory)
            for (first, _), pair in mesh.items():
                for end in pair[first == 0 :]:  # else an end of a rank that has ended would stay open here
                    end.close()
        self._ready = threading.Semaphore(0)
        self._readers = [
            threading.Thread(target=self._read_replies, args=(rank, sock), name=f"wicore-rank-{rank}", daemon=True)
            for rank, sock in enumerate(self._sockets, 1)
        ]
        for reader in self._readers:
            reader.start()

    def await_ready(self) -> None:
        """Wait until all ranks have opened their part. Raises the error of one that cannot, RankError if one ended."""
        for _ in self._sockets:
            self._ready.acquire()
        if self.refusal is not None:
            raise self.refusal
        if self.failure is not None:
            raise self.failure
        self._loaded = True

    def send(self, *message: object, fds: Sequence[int] = ()) -> None:
        """Send a message to all ranks. Raises RankError once one has failed."""
        data = encode_message(message)
        for rank, sock in enumerate(self._sockets, 1):
            if self.failure is not None:
                raise self.failure
            try:
                sock.send_encoded(data, fds)
            except OSError as error:
                raise self.fail(RankError(f"rank {rank} has ended")) from error

    @contextmanager
    def run_step(self) -> Iterator[None]:
        """Run a step of this rank. After an error within it ranks are at different places, so no step can follow."""
        self.exchange.within_step = True
        try:
            yield
        except RankError as error:
            raise self.fail(error) from error
        except Exception as error:
            if self.exchange.within_step:
                self.fail(RankError(f"rank 0 failed in a step: {error}"))
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

    def note_step(self, alike: bytes, rank: int = 0) -> None:
        """Note what a rank had in its next step, and compare steps of which all ranks have told."""
        with self._lock:
            self._alike[rank].append(zlib.crc32(alike))
            while all(self._alike):
                if len({told.popleft() for told in self._alike}) > 1:
                    self.fail(RankError("ranks computed different rows or tokens"))

    def fail(self, error: RankError) -> RankError:
        """Note that no step can run any more, and end the others; return the first reason, or that a rank is silent."""
        if self.failure is None and not self._closing:
            silent = [rank for rank in range(1, self.count) if time.monotonic() - self._beats[rank] >= 4 * BEAT_S]
            self.failure = self._name_fault(silent[0]) if silent else error
            log.error("%s; this engine ends", self.failure)
            self.on_failure(self.failure)
            if self.flag is not None:
                self.flag.fill_(1)
            for process in self.processes:
                process.kill()
        return self.failure or error

    def _name_fault(self, rank: int) -> RankError:
        return RankError(f"rank {rank} {find_halt(self.processes[rank - 1].pid) or 'hangs'}")

    def _is_alive(self, rank: int) -> bool:
        """Count a glance at a rank that is waited for, and tell whether it has beaten lately. Glances are GLANCE_S
        apart; it is not time that counts, so that all of a container may be suspended."""
        self._glances[rank] += 1
        return self._glances[rank] * GLANCE_S < (SILENCE_S if self._loaded else START_S)

    def _await_message(self, rank: int, sock: MessageSocket) -> tuple[list[Any], list[int]] | None:
        """Receive a rank's next message, and note that it hangs when it does not even beat, while no step runs, too."""
        silent_s = 0.0
        while not sock.has_message(GLANCE_S):
            silent_s += GLANCE_S
            halted = silent_s >= HALT_S and find_halt(self.processes[rank - 1].pid)
            if halted or silent_s >= (REST_S if self._loaded else START_S):
                self.fail(self._name_fault(rank))
        return sock.receive()

    def _read_replies(self, rank: int, sock: MessageSocket) -> None:
        ready = False
        try:
            while (received := self._await_message(rank, sock)) is not None:
                message, _ = received
                if message[0] == "ready":
                    ready = True
                    self._ready.release()
                elif message[0] == "refused":
                    _, kind, text, fix = message
                    self.refusal = error_named(kind, text, fix=fix)
                elif message[0] == "beat":
                    self._beats[rank], self._glances[rank] = time.monotonic(), 0
                elif message[0] == "alike":
                    self.note_step(message[1], rank)
                else:
                    _, call, digests, seconds = message
                    self.on_copied(call, rank, digests, seconds)
        except (OSError, ValueError):
            pass
        finally:
            self.fail(RankError(f"rank {rank} has ended"))
            if not ready:
                self._ready.release()
