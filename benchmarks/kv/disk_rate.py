"""How fast the disk tier moves pages, beside plain O_DIRECT reads and writes of the same sizes by as many threads.

    python -m benchmarks.kv.disk_rate DIRECTORY [--pages 400] [--threads 4] [--page-bytes 2621440] [--rounds 3]

The default page is one of 27B's global layers in BF16 with 32 tokens. Ours seals, checks and acknowledges every page;
plain writes end with fdatasync. Prints GB/s and CPU seconds per GB of each round. Invariant: files go when it ends.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

from wicore_trt.kv.disk.files import aligned_buffer
from wicore_trt.kv.disk.format import Namespace
from wicore_trt.kv.disk.io import Outcome
from wicore_trt.kv.disk.store import QUEUE_LIMIT, DiskStore
from wicore_trt.kv.pages.page import Page

BUFFERS = 64


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


def tier(store: DiskStore, slots: list[memoryview], pages: int, *, write: bool) -> tuple[float, float]:
    """GB/s and CPU seconds per GB of as many pages through the store, BUFFERS / 2 at a time."""
    room, left, over = threading.Semaphore(BUFFERS // 2), [pages], threading.Event()

    def done(outcome: Outcome) -> None:
        assert outcome is Outcome.OK, outcome
        left[0] -= 1
        room.release()
        if not left[0]:
            over.set()

    begun, cpu = time.perf_counter(), time.process_time()
    for i in range(pages):
        page = Page(i.to_bytes(32, "little"), "global", i, None, bytes(16))
        room.acquire()
        move: Callable[..., bool] = store.write_page if write else store.read_page
        while not move(page, (i,), [slots[i % BUFFERS]], done):
            time.sleep(0.001)
    over.wait()
    count = pages * slots[0].nbytes / 1e9
    return count / (time.perf_counter() - begun), (time.process_time() - cpu) / count


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--pages", type=int, default=400)
    parser.add_argument("--threads", type=int, default=4)
    parser.add_argument("--page-bytes", type=int, default=2_621_440, help="a multiple of 4096")
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    size, rows = args.page_bytes, []
    slab = aligned_buffer(BUFFERS * size)
    slab[:] = os.urandom(size) * BUFFERS
    slots = [slab[i * size : (i + 1) * size] for i in range(BUFFERS)]
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory(dir=args.directory) as folder:
            path = Path(folder) / "plain"
            plain_write = plain(path, slots, args.pages, args.threads, write=True)
            plain_read = plain(path, slots, args.pages, args.threads, write=False)
            path.unlink()
            namespace = Namespace("bench", "none", 32, {"global": size}, "bfloat16")
            limit = 2 * args.pages * size
            store = DiskStore(
                Path(folder) / "kv", namespace=namespace, slot_bytes=size, limit_bytes=limit, free_bytes=0,
                threads=args.threads, queue_limit=QUEUE_LIMIT, timeout_s=60.0,
            )  # fmt: skip
            wrote, read = (tier(store, slots, args.pages, write=write) for write in (True, False))
            store.close()
        rows.append((plain_write, wrote[0], plain_read, read[0]))
        print(
            f"write: plain {plain_write:.2f}, tier {wrote[0]:.2f} GB/s ({wrote[1]:.2f} CPU s/GB); "
            f"read: plain {plain_read:.2f}, tier {read[0]:.2f} GB/s ({read[1]:.2f} CPU s/GB)",
            flush=True,
        )
    medians = [statistics.median(column) for column in zip(*rows, strict=True)]
    print(f"medians: writes at {medians[1] / medians[0]:.2f}, reads at {medians[3] / medians[2]:.2f} of plain ones")


if __name__ == "__main__":
    main()
