"""The process of one rank but the first: does what rank 0 says, in order, until rank 0 ends.

It must not know requests. Invariants: it ends when rank 0 does, however; an error ends it, and with it the group.
"""

from __future__ import annotations

import logging
import mmap
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wicore_trt.child_process import import_named
from wicore_trt.collector import collect_rarely
from wicore_trt.errors import RankError, WicoreError
from wicore_trt.runtime.exchange import RankExchange
from wicore_trt.runtime.executor import AheadExecutor
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.runtime.rank_copier import cut_part
from wicore_trt.runtime.ranks import BEAT_S, MessageSocket, unpack_slices
from wicore_trt.types import Bytes

log = logging.getLogger(__name__)


def main(start: Mapping[str, Any]) -> None:
    """Run the rank that `start` describes (`ranks._Ranks`)."""
    logging.basicConfig(level=logging.WARNING, format=f"rank {start['rank']}: %(levelname)s %(message)s")
    for fd in (start["control"], *start["peers"].values()):
        os.set_inheritable(fd, False)
    peers = {int(rank): socket.socket(fileno=fd) for rank, fd in start["peers"].items()}
    control = MessageSocket(socket.socket(fileno=start["control"]))
    threading.Thread(target=send_beats, args=(control,), name="wicore-rank-beats", daemon=True).start()
    try:
        exchange = RankExchange(start["rank"], start["ranks"], start["memory"], peers)
        os.close(start["memory"])
        executor = import_named(start["opener"])(Path(start["engine"]), ExecutorOptions(**start["options"]), exchange)
        collect_rarely()
        control.send("ready")
        _Rank(control, executor, start).obey_messages()
    except WicoreError as error:
        with suppress(OSError):  # nobody hears it where another rank was refused before
            control.send("refused", type(error).__name__, error.message, error.fix)
    except (RankError, BrokenPipeError, ConnectionResetError) as error:
        log.warning("%s; this rank ends", error)
    except Exception:
        log.exception("this rank ends")


def send_beats(control: MessageSocket) -> None:
    with suppress(OSError):
        while True:
            if control.has_room():  # else rank 0 is suspended, and reads beats when it goes on
                control.send("beat")
            time.sleep(BEAT_S)


class _Rank:
    """Methods by kinds of messages. Steps are collected when there is no room for another, and at the end."""

    def __init__(self, control: MessageSocket, executor: Any, start: Mapping[str, Any]) -> None:
        self._control, self._executor = control, executor
        self._rank, self._ranks = start["rank"], start["ranks"]
        self._slab, self._under_way = memoryview(b""), 0
        if start["options"]["compare_ranks"]:
            executor.on_step = partial(control.send, "alike")

    def obey_messages(self) -> None:
        while (received := self._control.receive()) is not None:
            (kind, *given), fds = received
            getattr(self, f"do_{kind}")(*given, *fds)
        with suppress(OSError):  # of replies that nobody reads any more
            while self._under_way:  # so that the others need not wait in vain
                self._collect_step()

    def do_step(self, packed: Sequence[Sequence[Any]], measures: bool, rows: list[int] | None) -> None:
        batch, executor = unpack_slices(packed), self._executor
        if rows is not None:
            executor.logits(batch, torch.tensor(rows, dtype=torch.int64))
        elif not isinstance(executor, AheadExecutor):
            executor.execute(batch)
        else:
            batch.measure_attention = measures
            if self._under_way == 2:
                self._collect_step()
            executor.submit(batch)
            self._under_way += 1

    def do_image(self, slot: int, pixels: Bytes) -> None:
        self._executor.images.begin(slot, pixels)

    def do_parts(self, count: int) -> None:
        self._executor.images.run_parts(count)
        self._executor.images.take_ended()

    def do_memory(self, size: int, fd: int) -> None:
        self._slab = memoryview(mmap.mmap(fd, size))
        os.close(fd)

    def do_pin(self, call: int, at: int, size: int) -> None:
        """Lock memory beside the steps: it takes long."""

        def lock() -> None:
            self._executor.copier.pin(self._slab[at : at + size])
            self._report(call, [None], 0.0)

        threading.Thread(target=lock, name="wicore-rank-pin", daemon=True).start()

    def do_copies(self, asked: Sequence[Sequence[Any]]) -> None:
        copier = self._executor.copier
        for kind, call, group, *given in asked:
            if kind == "out":
                slot, places, settled = given
                copier.to_host(group, slot, self._cut(places), partial(self._report_one, call), settled=settled)
            else:
                slots, pages = given
                copier.to_device(group, slots, list(map(self._cut, pages)), partial(self._report, call))
        copier.flush()

    def _collect_step(self) -> None:
        self._executor.collect()
        self._under_way -= 1

    def _cut(self, places: Sequence[tuple[int, int]]) -> list[memoryview]:
        return cut_part([self._slab[at : at + size] for at, size in places], self._rank, self._ranks)

    def _report_one(self, call: int, digest: bytes | None, seconds: float) -> None:
        self._report(call, [digest], seconds)

    def _report(self, call: int, digests: Sequence[bytes | None], seconds: float) -> None:
        self._control.send("copied", call, list(digests), seconds)
