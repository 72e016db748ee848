"""How long a restart takes to know its pages again: `python -m wicore_trt.bench.disk_index`.

Builds the index of a disk tier of `--gigabytes` in a temporary directory, with slabs that are holes, because only the
index is read; drops it from the page cache; then opens the store and builds a dictionary of all pages. Every slot holds
a page of its own, in random order of writing: no index of that many slots has more pages. The time for 1 TB is the
measured time x slots of 1 TB / slots built. Exit code 1 when 1 TB of Gemma 3 27B pages takes longer than GOAL_S.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from wicore_trt.bench.report import machine, versions
from wicore_trt.kv.disk_format import BLOCK_BYTES, Namespace, SlotFormat
from wicore_trt.kv.disk_store import DiskStore
from wicore_trt.kv.page import Page

GOAL_S = 5.0
TERABYTE = 10**12


@dataclass(frozen=True, slots=True)
class Shape:
    """`slot_bytes` is a page of the global layers: layers x 2 x KV heads x head size x 2 bytes x tokens."""

    name: str
    slot_bytes: int


SHAPES = (
    Shape("Gemma 3 27B, 32 tokens", 10 * 2 * 16 * 128 * 2 * 32),
    Shape("Gemma 3 270M, 32 tokens", 3 * 2 * 1 * 256 * 2 * 32),
)


def open_store(path: Path, space: Namespace, slot_bytes: int, slots: int) -> DiskStore:
    """A store whose limit holds `slots` and some more."""
    limit = (slots + 1000) * (BLOCK_BYTES + slot_bytes) * 101 // 100
    return DiskStore(
        path,
        namespace=space,
        slot_bytes=slot_bytes,
        limit_bytes=limit,
        free_bytes=0,
        threads=1,
        queue_limit=1,
        timeout_s=60.0,
    )


def build(home: Path, space: Namespace, slot_bytes: int, slots: int) -> None:
    """Files of a full namespace: slabs without content and an index of `slots` pages."""
    per_slab = json.loads((home / "namespace.json").read_bytes())["slab_slots"]
    for number, first in enumerate(range(0, slots, per_slab)):
        with (home / f"slab-{number:05d}").open("wb") as slab:
            slab.truncate(min(per_slab, slots - first) * (BLOCK_BYTES + slot_bytes))
    record = SlotFormat(space, None).record
    write_ids = random.sample(range(1, slots + 1), slots)
    with (home / "index").open("wb") as index:
        for slot, write_id in enumerate(write_ids):
            key = slot.to_bytes(32, "little")
            index.write(record(Page(key, space.groups[0], slot % 4096, key, bytes(16)), 0, 1, slot, write_id))
        index.flush()
        os.fsync(index.fileno())
        os.posix_fadvise(index.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure(shape: Shape, gigabytes: float) -> dict[str, object]:
    """Seconds to open the store and to have all pages in a dictionary, and the same for 1 TB."""
    space = Namespace("bench", "none", 32, {"global": shape.slot_bytes}, "bfloat16")
    stride = BLOCK_BYTES + shape.slot_bytes
    slots = int(gigabytes * 1e9) // stride
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory)
        open_store(path, space, shape.slot_bytes, slots).close()
        build(path / space.digest.hex(), space, shape.slot_bytes, slots)
        start, busy = time.perf_counter(), time.process_time()
        store = open_store(path, space, shape.slot_bytes, slots)
        opened = time.perf_counter()
        pages = {page.name: held for page, held in store.recover()}
        done, busy = time.perf_counter(), time.process_time() - busy
        store.close()
    assert len(pages) == slots, f"{len(pages)} of {slots} pages were found"
    per_terabyte = TERABYTE // stride
    return {
        "shape": shape.name,
        "slot_bytes": shape.slot_bytes,
        "records": slots,
        "open_s": round(opened - start, 3),
        "pages_s": round(done - opened, 3),
        "cpu_s": round(busy, 3),
        "records_per_s": round(slots / (done - start)),
        "records_per_tb": per_terabyte,
        "seconds_per_tb": round((done - start) * per_terabyte / slots, 2),
    }


def main() -> int:
    """Measure both shapes and print one JSON document."""
    parser = argparse.ArgumentParser(prog="python -m wicore_trt.bench.disk_index", description=__doc__)
    parser.add_argument("--gigabytes", type=float, default=50.0, help="size of the disk tier whose index is built")
    args = parser.parse_args()
    results = [measure(shape, args.gigabytes) for shape in SHAPES]
    head = {"date": datetime.now(UTC).isoformat(timespec="seconds"), "machine": machine(), "versions": versions()}
    print(json.dumps({**head, "gigabytes": args.gigabytes, "goal_s_per_tb": GOAL_S, "results": results}, indent=2))
    return 0 if float(str(results[0]["seconds_per_tb"])) <= GOAL_S else 1


if __name__ == "__main__":
    sys.exit(main())
