"""The process of one rank but the first: does what rank 0 says, in order, until rank 0 ends.

It must not know requests. Invariants: it ends when rank 0 does, however that ends; an error ends it, and with it the
group, so that ranks never go on at different places.
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
from wicore_trt.errors import RankError, WicoreError
from wicore_trt.runtime.exchange import RankExchange
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.runtime.ranks import BEAT_S, MessageSocket, RankExecutor, unpack_slices

log = logging.getLogger(__name__)


def main(start: Mapping[str, Any]) -> None:
    """Run the rank that `start` describes (`ranks._Ranks`)."""
    logging.basicConfig(level=logging.WARNING, format=f"rank {start['rank']}: %(levelname)s %(message)s")
    for fd in (start["control"], *start["peers"].values()):
        os.set_inheritable(fd, False)
    peers = {int(rank): socket.socket(fileno=fd) for rank, fd in start["peers"].items()}
    control = MessageSocket(socket.socket(fileno=start["control"]))
    threading.Thread(target=_send_beats, args=(control,), name="wicore-rank-beats", daemon=True).start()
    try:
        exchange = RankExchange(start["rank"], start["ranks"], start["memory"], peers)
        os.close(start["memory"])
        executor = import_named(start["opener"])(Path(start["engine"]), ExecutorOptions(**start["options"]), exchange)
        control.send("ready")
        _obey_messages(control, executor)
    except WicoreError as error:
        control.send("refused", type(error).__name__, error.message, error.fix)
    except (RankError, BrokenPipeError, ConnectionResetError) as error:
        log.warning("%s; this rank ends", error)
    except Exception:
        log.exception("this rank ends")


def _send_beats(control: MessageSocket) -> None:
    with suppress(OSError):
        while True:
            control.send("beat")
            time.sleep(BEAT_S)


def _obey_messages(control: MessageSocket, executor: RankExecutor) -> None:
    slab = memoryview(b"")

    def cut(places: Sequence[tuple[int, int]]) -> list[memoryview]:
        return [slab[at : at + size] for at, size in places]

    def report(call: int, digests: object, seconds: float) -> None:
        control.send("copied", call, seconds)

    while (received := control.receive()) is not None:
        (kind, *given), fds = received
        if kind == "step":
            packed, rows = given
            batch = unpack_slices(packed)
            if rows is None:
                executor.execute(batch)
            else:
                executor.logits(batch, torch.tensor(rows, dtype=torch.int64))
        elif kind == "memory":
            slab = memoryview(mmap.mmap(fds[0], given[0]))
            os.close(fds[0])
        elif kind == "out":
            call, group, slot, places = given
            executor.copier.to_host(group, slot, cut(places), partial(report, call))
        elif kind == "in":
            call, group, slots, pages = given
            executor.copier.to_device(group, slots, [cut(places) for places in pages], partial(report, call))
            executor.copier.flush()
