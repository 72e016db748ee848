"""Measure the disk tier moving pages, beside plain O_DIRECT reads and writes of the same sizes by as many threads.

    python -m benchmarks.kv.disk_rate DIRECTORY [--pages 400] [--threads 4] [--page-bytes 2621440] [--rounds 3]

The default page is one of 27B's global layers in BF16 with 32 tokens. Ours seals, checks, digests and acknowledges
every page, by native threads and by Python's in turns, alone and beside a busy Python thread; files are there already.
Plain writes make theirs and end with fdatasync. Prints medians, also of ratios. Invariant: files go when it ends.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import NamedTuple

from wicore_trt.core.assemble_kv import SWITCH_S
from wicore_trt.kv.disk.files import aligned_buffer
from wicore_trt.kv.disk.format import Namespace
from wicore_trt.kv.disk.io import Outcome, PageMove, Probe
from wicore_trt.kv.disk.store import QUEUE_LIMIT, DiskStore
from wicore_trt.kv.pages.page import Page
from wicore_trt.runtime.page_digest import PageDigest

BUFFERS = 64


class Rate(NamedTuple):
    gb_per_s: float
    cpu_s_per_gb: float


def plain(path: Path, slots: list[memoryview], pages: int, threads: int, *, write: bool) -> float:
    """GB/s of `threads` that move page after page."""
    fd, size = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600), slots[0].nbytes
    left, lock = iter(range(pages)), threading.Lock()

    def run() -> None:
        while True:
            with lock:
                i = next(left, None)
            if i is None:
                return
            (os.pwritev if write else os.preadv)(fd, [slots[i % BUFFERS]], i * size)

    workers = [threading.Thread(target=run) for _ in range(threads)]
    begun = time.perf_counter()
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if write:
        os.fdatasync(fd)
    seconds = time.perf_counter() - begun
    os.close(fd)
    return pages * size / seconds / 1e9


def tier(store: DiskStore, slots: list[memoryview], pages: int, digest: PageDigest, *, write: bool) -> Rate:
    """As many pages through the store, BUFFERS / 2 at a time, each with its digest; writes go where others were."""
    room, left, over = threading.Semaphore(BUFFERS // 2), [pages], threading.Event()
    expected = digest.compute_digest(slots[:1])

    def done(outcome: Outcome) -> None:
        assert outcome is Outcome.OK, outcome
        left[0] -= 1
        room.release()
        if not left[0]:
            over.set()

    def ended(move: PageMove, outcome: Outcome) -> None:
        done(move.outcome if outcome is Outcome.OK else outcome)

    begun, cpu = time.perf_counter(), time.process_time()
    for i in range(pages):
        page = Page(i.to_bytes(32, "little"), "global", i, None, bytes(16))
        room.acquire()
        parts = [slots[i % BUFFERS]]
        probe = Probe(digest.compute_digest, slots[0].nbytes)
        if write:
            store.erase_slots((i,))
        read = [PageMove(page, (i,), parts, probe)]
        begin = partial(store.write_page, page, (i,), parts, probe=probe, expected=expected)
        while not (begin(done) if write else store.read_pages(read, partial(ended, read[0]))):
            time.sleep(0.001)
    over.wait()
    count = pages * slots[0].nbytes / 1e9
    return Rate(count / (time.perf_counter() - begun), (time.process_time() - cpu) / count)


@contextmanager
def busy_thread(on: bool) -> Iterator[None]:
    """A thread that computes in Python all the time, as an engine's does."""
    stop = threading.Event()

    def spin() -> None:
        while not stop.is_set():
            sum(range(200))

    if on:
        threading.Thread(target=spin, daemon=True).start()
    try:
        yield
    finally:
        stop.set()


def open_store(folder: Path, native: bool, size: int, pages: int, threads: int) -> DiskStore:
    return DiskStore(
        folder, namespace=Namespace("bench", "none", 32, {"global": size}, "bfloat16"), slot_bytes=size,
        limit_bytes=pages * (size + (1 << 14)) + (1 << 20), free_bytes=0, threads=threads, queue_limit=QUEUE_LIMIT,
        timeout_s=60.0, native=native,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--pages", type=int, default=400)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--page-bytes", type=int, default=2_621_440, help="a multiple of 4096")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    sys.setswitchinterval(SWITCH_S)
    size, found = args.page_bytes, dict[tuple[bool, bool], dict[str, list[Rate]]]()
    slab = aligned_buffer(BUFFERS * size)
    slab[:] = os.urandom(size) * BUFFERS
    slots = [slab[i * size : (i + 1) * size] for i in range(BUFFERS)]
    digest, raw = PageDigest(bytes(32), size), list[tuple[float, ...]]()
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        stores = {native: open_store(Path(folder) / f"{native}", native, size, args.pages, args.threads)
                  for native in (False, True)}  # fmt: skip
        for store in stores.values():
            tier(store, slots, args.pages, digest, write=True)  # files are there from now on
        for number in range(args.rounds):
            path = Path(folder) / "plain"
            raw.append(tuple(plain(path, slots, args.pages, args.threads, write=write) for write in (True, False)))
            path.unlink()
            for busy in (False, True):
                for native in (False, True) if number % 2 else (True, False):
                    with busy_thread(busy):
                        kinds = found.setdefault((busy, native), {"write": [], "read": []})
                        for kind, rates in kinds.items():
                            rates.append(tier(stores[native], slots, args.pages, digest, write=kind == "write"))
        for store in stores.values():
            store.close()
    print("plain: write {:.2f}, read {:.2f} GB/s".format(*map(statistics.median, zip(*raw, strict=True))))
    for (busy, native), kinds in sorted(found.items()):
        who = f"{'beside a busy thread' if busy else 'alone'}, {'native' if native else 'Python'}"
        for kind, rates in kinds.items():
            print(f"{who}: {kind} {_median(rates, 0):.2f} GB/s ({_median(rates, 1):.2f} CPU s/GB)")
    for busy in (False, True):
        for kind in ("write", "read"):
            pairs = zip(found[busy, True][kind], found[busy, False][kind], strict=True)
            ratio = statistics.median(fast.gb_per_s / slow.gb_per_s for fast, slow in pairs)
            print(f"native / Python, {kind}{' beside a busy thread' if busy else ''}: {ratio:.2f}")


def _median(rates: list[Rate], at: int) -> float:
    return statistics.median(rate[at] for rate in rates)


if __name__ == "__main__":
    main()
