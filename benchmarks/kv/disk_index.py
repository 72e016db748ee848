"""How long a restart takes to know its pages again: `python -m benchmarks.kv.disk_index`.

Builds the index of a disk tier full of sessions of SESSION_TOKENS in a temporary directory, with slabs that are holes,
because only the index is read; drops it from the page cache; then does what the start of a server does: opens the
store, recovers its pages and restores the tier's books with the default policy. Pages were written session after
session, to slots in random order: the worst case. Slots per page and pages per session are those of the model.

`books_mib` is the memory that the books take in the end, `look_up_ms` the time to find a session's chain in them.

The time for 1 TB is the measured time x slots of 1 TB / slots built; `--slots` is by default what 1 TB of Gemma 3 27B
has, so nothing is extrapolated there. Exit code 1 when 1 TB of Gemma 3 27B pages takes longer than GOAL_S of wall time.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path

from wicore_trt.bench.report import describe_machine, list_versions
from wicore_trt.kv.disk.format import BLOCK_BYTES, Namespace, SlotFormat
from wicore_trt.kv.disk.store import DiskStore
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.by_name import DEFAULT_POLICY, make_policy
from wicore_trt.kv.sizing import Geometry, builtin_spec
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.model.spec import GLOBAL

GOAL_S = 5.0
TERABYTE = 10**12
MODELS = ("gemma3-27b", "gemma3-270m")
PAGE_TOKENS, DTYPE = 32, "bfloat16"
SESSION_TOKENS = 32 * 1024


def namespace_of(geometry: Geometry) -> Namespace:
    return Namespace("bench", "none", PAGE_TOKENS, geometry.page_bytes, DTYPE)


def open_store(path: Path, geometry: Geometry, slots: int) -> DiskStore:
    """A store whose limit holds `slots` and some more."""
    return DiskStore(
        path,
        namespace=namespace_of(geometry),
        slot_bytes=geometry.slot_bytes,
        limit_bytes=(slots + 1000) * (BLOCK_BYTES + geometry.slot_bytes) * 101 // 100,
        free_bytes=0,
        threads=1,
        queue_limit=1,
        timeout_s=60.0,
    )


def session(number: int, geometry: Geometry) -> Iterator[Page]:
    """A session's pages in the order of writing: the chain, and the window that its next request reads."""
    count = SESSION_TOKENS // PAGE_TOKENS
    window = geometry.first_visible_page(SESSION_TOKENS - 1)
    keys = [blake2b(b"%d %d" % (number, index), digest_size=32).digest() for index in range(count)]
    for index, key in enumerate(keys):
        for group in geometry.page_bytes if index >= window else (GLOBAL,):
            yield Page(key, group, index, keys[index - 1] if index else None, bytes(16), bytes(4 * PAGE_TOKENS))


def build_index(home: Path, geometry: Geometry, slots: int) -> int:
    """Files of a namespace with `slots` slots, all but the last few in use: slabs without content and an index. Returns
    how many pages it names."""
    per_slab = json.loads((home / "namespace.json").read_bytes())["slab_slots"]
    for number, first in enumerate(range(0, slots, per_slab)):
        with (home / f"slab-{number:05d}").open("wb") as slab:
            slab.truncate(min(per_slab, slots - first) * (BLOCK_BYTES + geometry.slot_bytes))
    slot_format = SlotFormat(namespace_of(geometry), None)
    record, size = slot_format.make_record, slot_format.record_bytes
    free = random.sample(range(slots), slots)
    records = bytearray(slots * size)
    sessions = itertools.chain.from_iterable(session(number, geometry) for number in itertools.count())
    pages = 0
    for page in sessions:
        parts = geometry.slots_per_page[page.group]
        if len(free) < parts:
            break
        pages += 1
        for part in range(parts):
            slot = free.pop()
            records[slot * size : (slot + 1) * size] = record(page, part, parts, slot, pages)
    with (home / "index").open("wb") as index:
        index.write(records)
        index.flush()
        os.fsync(index.fileno())
        os.posix_fadvise(index.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return pages


def resident_bytes() -> int:
    """Resident memory of this process, without what its allocator could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class Stopwatch:
    """Wall and CPU seconds of consecutive steps."""

    def __init__(self) -> None:
        self.wall: dict[str, float] = {}
        self.cpu: dict[str, float] = {}
        self._last = (time.perf_counter(), time.process_time())

    def lap(self, step: str) -> None:
        now = (time.perf_counter(), time.process_time())
        self.wall[step], self.cpu[step] = (b - a for a, b in zip(self._last, now, strict=True))
        self._last = now


def measure_index(model: str, slots: int) -> dict[str, object]:
    """Seconds to open the store, to recover its pages and to restore the books; the sum, and the same for 1 TB."""
    geometry = Geometry.from_spec(builtin_spec(model), PAGE_TOKENS, DTYPE)
    stride = BLOCK_BYTES + geometry.slot_bytes
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        open_store(path, geometry, slots).close()
        pages = build_index(path / namespace_of(geometry).digest.hex(), geometry, slots)
        before, watch = resident_bytes(), Stopwatch()
        store = open_store(path, geometry, slots)
        watch.lap("open")
        found = store.recover_pages()
        watch.lap("recover")
        policy = make_policy(DEFAULT_POLICY, store.num_slots, page_tokens=PAGE_TOKENS)
        books = TierIndex(store.num_slots, dict(geometry.slots_per_page), policy, primary=GLOBAL)
        books.restore_pages(found)
        watch.lap("restore")
        del found
        books_bytes = resident_bytes() - before
        chain = [page.key for page in session(0, geometry) if page.group == GLOBAL]
        begun = time.perf_counter()
        assert sum(books.find_copy(GLOBAL, key) is not None for key in chain) == len(chain)
        look_up_s = time.perf_counter() - begun
        store.close()
    assert books.pages.total() == pages, f"{books.pages.total()} of {pages} pages were found"
    per_terabyte = TERABYTE // stride
    return {
        "model": model,
        "slot_bytes": geometry.slot_bytes,
        "slots_per_page": dict(geometry.slots_per_page),
        "slots": slots,
        "pages": dict(books.pages),
        "wall_s": {step: round(seconds, 3) for step, seconds in watch.wall.items()},
        "cpu_s": {step: round(seconds, 3) for step, seconds in watch.cpu.items()},
        "books_mib": round(books_bytes / 2**20, 1),
        "look_up_ms": round(1e3 * look_up_s, 3),
        "us_per_page": round(1e6 * sum(watch.cpu.values()) / pages, 2),
        "slots_per_tb": per_terabyte,
        "seconds_per_tb": round(sum(watch.wall.values()) * per_terabyte / slots, 2),
        "cpu_seconds_per_tb": round(sum(watch.cpu.values()) * per_terabyte / slots, 2),
        "arithmetic": f"1 TB / ({geometry.slot_bytes:,} + {BLOCK_BYTES:,} B) = {per_terabyte:,} slots; "
        f"{sum(watch.wall.values()):.3f} s x {per_terabyte:,} / {slots:,}",
    }


def main() -> int:
    """Measure both models and print one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv.disk_index", description=__doc__)
    parser.add_argument("--slots", type=int, default=1_136_000, help="slots of the disk tier whose index is built")
    args = parser.parse_args()
    results = [measure_index(model, args.slots) for model in MODELS]
    head = {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": describe_machine(),
        "versions": list_versions(),
    }
    print(json.dumps({**head, "policy": DEFAULT_POLICY, "goal_s_per_tb": GOAL_S, "results": results}, indent=2))
    return 0 if float(str(results[0]["seconds_per_tb"])) <= GOAL_S else 1


if __name__ == "__main__":
    sys.exit(main())
