"""What serving feels while the host tier's memory is taken: clearing and locking in pieces, by some threads.

    python -m benchmarks.kv.pinning [--gib 1] [--pieces 256,64,32,16] [--threads 1,2,8] [--budget-s 38]

For each size of a piece and number of threads fresh memory is cleared (`MADV_POPULATE_WRITE`, whole pieces or steps of
as many MiB as `--steps` says) and locked by the product's `CudaHostMemory.pin`, while the main thread launches a small
kernel and waits for its stream, and takes and gives back a MiB of the system's memory (`mmap`, `munmap`). Before that
the product's own `Backing`, for an engine without work and for one with work, which is given up after some seconds.
Rows with "+ work" have another stream multiply and copy to host memory all the time: locking may wait for that, and
launches for locking. Prints seconds, GB/s and latencies of the main thread in milliseconds (median, 99th percentile,
longest) beside those of a machine that takes nothing. Needs a GPU; without one it says so and exits with 2.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import mmap
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from wicore_trt.kv.disk.files import aligned_buffer
from wicore_trt.kv.tiers import host as module
from wicore_trt.runtime.cuda_lanes import CudaHostMemory, host_address

MIB, GIB = 1 << 20, 1 << 30
SLOT_BYTES = 876_544
"""As 27B's."""
QUIET_S, BUSY_S = 1.0, 4.0


@dataclass
class Felt:
    """Seconds that the main thread took for a launch with its wait, and for memory of the system."""

    launches: list[float] = field(default_factory=list)
    maps: list[float] = field(default_factory=list)


@dataclass
class Taken:
    """Seconds that threads spent in one kind of call."""

    clearing: float = 0.0
    locking: float = 0.0
    count: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Work:
    """Products and copies to the host on a stream of their own, some tens of milliseconds ahead."""

    def __init__(self, device: torch.device) -> None:
        self._stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._matrix = torch.ones((8192, 8192), dtype=torch.bfloat16, device=device)
        self._host = torch.empty(self._matrix.shape, dtype=torch.bfloat16, pin_memory=True)
        self._event: Any = None

    def __call__(self) -> None:
        if self._event is None or self._event.query():
            with torch.cuda.stream(self._stream):
                for _ in range(10):
                    product = self._matrix @ self._matrix
                    self._host.copy_(product, non_blocking=True)
                self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
                self._event.record()


def nothing() -> None:
    """No work beside."""


def feel(until: Callable[[], bool], vector: torch.Tensor, work: Callable[[], None] = nothing) -> Felt:
    """Launch, and take memory, until it is over."""
    felt = Felt()
    while not until():
        work()
        begun = time.perf_counter()
        vector.add_(1.0)
        torch.cuda.current_stream().synchronize()
        felt.launches.append(time.perf_counter() - begun)
        begun = time.perf_counter()
        mmap.mmap(-1, MIB).close()
        felt.maps.append(time.perf_counter() - begun)
        time.sleep(0.0005)
    return felt


def spread(seconds: Sequence[float]) -> str:
    """Median, 99th percentile and maximum in ms."""
    if not seconds:
        return "-"
    ordered = sorted(seconds)
    found = (statistics.median(ordered), ordered[int(0.99 * (len(ordered) - 1))], ordered[-1])
    return " / ".join(f"{x * 1e3:.2f}" for x in found)


def row(name: str, threads: str, seconds: float, taken: int, calls: str, felt: Felt) -> None:
    rate = f"{taken / seconds / 1e9:.1f}" if seconds and taken else "-"
    print(
        f"| {name} | {threads} | {seconds:.2f} | {rate} | {calls} | {spread(felt.launches)} | {spread(felt.maps)} |",
        flush=True,
    )


def by_hand(
    nbytes: int, piece: int, step: int, threads: int, vector: torch.Tensor, beside: Callable[[], None] = nothing
) -> None:
    """Threads that each clear and lock one piece after the other."""
    device = vector.device
    slab, memory, taken = aligned_buffer(nbytes), CudaHostMemory(device), Taken()
    madvise = ctypes.CDLL(None, use_errno=True).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    base, left = host_address(slab), iter(range(0, nbytes, piece))
    madvise(base, nbytes, module.MADV_HUGEPAGE)

    def work() -> None:
        while True:
            with taken.lock:
                begin = next(left, None)
            if begin is None:
                return
            stop, begun = min(begin + piece, nbytes), time.perf_counter()
            for at in range(begin, stop, step):
                madvise(base + at, min(step, stop - at), module.MADV_POPULATE_WRITE)
            cleared = time.perf_counter()
            memory.pin(slab[begin:stop])
            with taken.lock:
                taken.clearing += cleared - begun
                taken.locking += time.perf_counter() - cleared
                taken.count += 1

    workers = [threading.Thread(target=work) for _ in range(threads)]
    begun = time.perf_counter()
    for worker in workers:
        worker.start()
    felt = feel(lambda: not any(worker.is_alive() for worker in workers), vector, beside)
    seconds = time.perf_counter() - begun
    memory.unpin_all()
    name = f"pieces of {piece // MIB} MiB" + (f", steps of {step // MIB}" if step != piece else "")
    name += " + work" if beside is not nothing else ""
    a_piece = f"{taken.clearing / taken.count * 1e3:.1f} / {taken.locking / taken.count * 1e3:.1f}"
    row(name, str(threads), seconds, nbytes, a_piece, felt)


def by_the_product(
    nbytes: int, working: bool, limit_s: float, vector: torch.Tensor, beside: Callable[[], None] = nothing
) -> None:
    """The host tier's own memory, for an engine that has work or has none."""
    device = vector.device
    slots = nbytes // SLOT_BYTES
    slab, memory, told = aligned_buffer(slots * SLOT_BYTES), CudaHostMemory(device), list[int]()
    begun = time.perf_counter()
    backing = module.Backing(slab, SLOT_BYTES, memory.pin)
    ready = time.perf_counter() - begun
    backing.working = lambda: working
    begun = time.perf_counter()
    backing.start_threads(lambda first, stop: told.append(stop - first))

    def over() -> bool:
        return backing.ready + sum(told) == slots or time.perf_counter() - begun > limit_s

    felt = feel(over, vector, beside)
    seconds, count = time.perf_counter() - begun, sum(told) * SLOT_BYTES
    backing.close()
    memory.unpin_all()
    what = ("with work" if working else "idle") + (" + work" if beside is not nothing else "")
    row(f"product, engine {what}", str(module.BACKERS), seconds, count, f"ready {ready:.2f} s", felt)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--gib", type=float, default=1.0, help="fresh memory for each row, 8 times as much for the product"
    )
    parser.add_argument("--pieces", default="256,64,32,16", help="MiB locked at once")
    parser.add_argument("--steps", default="0,4", help="MiB cleared at once; 0: the whole piece")
    parser.add_argument("--threads", default="1,2,8")
    parser.add_argument("--budget-s", type=float, default=38.0, help="rows beyond it are left out")
    args = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("This needs a GPU, and torch finds none here.", file=sys.stderr)
        return 2
    begun, nbytes = time.perf_counter(), int(args.gib * GIB)
    device = torch.device("cuda", torch.cuda.current_device())
    vector = torch.zeros(1024, device=device)
    vector.add_(1.0)
    torch.cuda.synchronize()
    print("| memory | threads | s | GB/s | clear / lock a piece, ms | launch + wait, ms | mmap + munmap, ms |")
    print("|---|---|---|---|---|---|---|")
    quiet = time.perf_counter() + QUIET_S
    row("nothing is taken", "-", QUIET_S, 0, "-", feel(lambda: time.perf_counter() > quiet, vector))
    work = Work(device)
    quiet = time.perf_counter() + QUIET_S
    row("nothing is taken + work", "-", QUIET_S, 0, "-", feel(lambda: time.perf_counter() > quiet, vector, work))
    for working, beside in ((True, work), (True, nothing), (False, nothing)):
        by_the_product(8 * nbytes, working, BUSY_S, vector, beside)
        gc.collect()
    for piece, step, threads in ((256, 256, 8), (256, 256, 1), (32, 4, 8), (32, 4, 1)):
        by_hand(nbytes, piece * MIB, step * MIB, threads, vector, work)
        gc.collect()
    skipped = 0
    for threads in map(int, args.threads.split(",")):
        for step in map(int, args.steps.split(",")):
            for piece in map(int, args.pieces.split(",")):
                if time.perf_counter() - begun > args.budget_s:
                    skipped += 1
                    continue
                by_hand(nbytes, piece * MIB, (step or piece) * MIB, threads, vector)
                gc.collect()
    print(f"\n{torch.cuda.get_device_name(device)}, {time.perf_counter() - begun:.0f} s, {skipped} rows left out")
    return 0


if __name__ == "__main__":
    sys.exit(main())
