"""A disk tier of a fleet's size, killed and started anew: `python -m benchmarks.kv.fleet DIRECTORY`.

By default 1,000 conversations of 32K of Gemma 3 27B, BF16, pages of 32 tokens, on 4 TiB. A process writes them through
`DiskStore` and kills itself with SIGKILL; with `--records` it writes their index records alone, which takes seconds.
Files have their true lengths and records; payloads are dropped, so slabs are holes. A fresh process then opens the
store, recovers its pages, restores the books with the default policy and names and looks up conversations, whole
chains and the windows before their ends. It must not read a payload. Exit code 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.kv.disk_index import DTYPE, PAGE_TOKENS, namespace_of, resident_bytes
from wicore_trt.kv.disk.files import Files, aligned_buffer
from wicore_trt.kv.disk.format import BLOCK_BYTES, SlotFormat
from wicore_trt.kv.disk.space import SLAB_BYTES
from wicore_trt.kv.disk.store import DiskStore
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.by_name import DEFAULT_POLICY, make_policy
from wicore_trt.kv.sizing import Geometry, builtin_spec
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.model.spec import GLOBAL, LOCAL

GOALS = {"start_s": 10.0, "books_gib": 1.0, "look_up_ms": 2.0}
TIB = 1 << 40
_SECRET = bytes(range(32))
_IN_FLIGHT = 64
_LOOKED_UP = 101


class HollowFiles(Files):
    """Drops what is written to slabs, which are opened by `open_slab`, and reserves no space."""

    def __init__(self) -> None:
        self._slabs = set[int]()

    def open_slab(self, path: Path) -> int:
        fd = self.open(path, os.O_RDWR)
        self._slabs.add(fd)
        return fd

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        os.ftruncate(fd, offset + nbytes)

    def pwritev(self, fd: int, buffers: Any, offset: int) -> int:  # type: ignore[override]
        return sum(map(len, buffers)) if fd in self._slabs else os.pwritev(fd, buffers, offset)

    def free_bytes(self, path: Path) -> int:
        return 1 << 60


def geometry_of(model: str) -> Geometry:
    return Geometry.from_spec(builtin_spec(model), PAGE_TOKENS, DTYPE)


def open_hollow(home: Path, geometry: Geometry, disk_bytes: int, slab_bytes: int = SLAB_BYTES) -> DiskStore:
    return DiskStore(
        home, namespace=namespace_of(geometry), slot_bytes=geometry.slot_bytes, limit_bytes=disk_bytes, free_bytes=0,
        threads=1, queue_limit=2 * _IN_FLIGHT, timeout_s=60.0, files=HollowFiles(), slab_bytes=slab_bytes, native=False,
    )  # fmt: skip


def tokens_of(number: int, count: int) -> list[int]:
    return random.Random(number).choices(range(3, 200_000), k=count)


def conversation(number: int, geometry: Geometry, tokens: int) -> Iterator[Page]:
    """Make its pages in the order of writing: the whole chain, and the local window that its next request reads."""
    names = KeyChain("fleet", PAGE_TOKENS, secret=_SECRET).derive_names("", "")
    keys: list[bytes] = []
    blocks = names.extend_keys(keys, tokens_of(number, tokens))
    window = geometry.first_visible_page(len(keys) * PAGE_TOKENS)
    for i, key in enumerate(keys):
        for group in (GLOBAL, LOCAL) if i >= window else (GLOBAL,):
            yield Page(key, group, i, keys[i - 1] if i else None, names.tag, blocks[i])


def fill(home: Path, geometry: Geometry, conversations: int, tokens: int, disk_bytes: int, slab_bytes: int) -> None:
    """Write through the store until every page is acknowledged, and die. Says how many pages there are."""
    store, slots = open_hollow(home, geometry, disk_bytes, slab_bytes), itertools.count()
    part, ended, pages = aligned_buffer(geometry.slot_bytes), list[object](), 0
    for page in itertools.chain.from_iterable(conversation(i, geometry, tokens) for i in range(conversations)):
        taken = tuple(itertools.islice(slots, geometry.slots_per_page[page.group]))
        while pages - len(ended) >= _IN_FLIGHT:
            time.sleep(1e-4)
        accepted = store.write_page(page, taken, [part] * len(taken), ended.append)
        assert accepted, "the store took no write"
        pages += 1
    while len(ended) < pages:
        time.sleep(1e-3)
    assert {getattr(outcome, "name", outcome) for outcome in ended} == {"OK"}, "a page was not written"
    print(pages, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)


def fill_records(home: Path, geometry: Geometry, conversations: int, tokens: int, disk_bytes: int) -> int:
    """Files as `fill` leaves them, without the store. Returns how many pages there are."""
    open_hollow(home, geometry, disk_bytes).close()
    home /= namespace_of(geometry).digest.hex()
    record, slots, pages = SlotFormat(namespace_of(geometry), None).make_record, itertools.count(), 0
    with (home / "index").open("wb") as index:
        for page in itertools.chain.from_iterable(conversation(i, geometry, tokens) for i in range(conversations)):
            pages, parts = pages + 1, geometry.slots_per_page[page.group]
            index.writelines(record(page, part, parts, next(slots), pages) for part in range(parts))
    count, per_slab = next(slots), json.loads((home / "namespace.json").read_bytes())["slab_slots"]
    for number, first in enumerate(range(0, count, per_slab)):
        with (home / f"slab-{number:05d}").open("wb") as slab:
            slab.truncate(min(per_slab, count - first) * (BLOCK_BYTES + geometry.slot_bytes))
    return pages


def start(
    home: Path, geometry: Geometry, conversations: int, tokens: int, disk_bytes: int, slab: int
) -> dict[str, Any]:
    """Open the tier as a fresh process does and look conversations up: seconds, GiB and pages found."""
    names = KeyChain("fleet", PAGE_TOKENS, secret=_SECRET).derive_names("", "")
    before, begun, cpu = resident_bytes(), time.perf_counter(), time.process_time()
    store = open_hollow(home, geometry, disk_bytes, slab)
    policy = make_policy(DEFAULT_POLICY, store.num_slots, page_tokens=PAGE_TOKENS)
    books = TierIndex(store.num_slots, dict(geometry.slots_per_page), policy, primary=GLOBAL)
    books.restore_pages(store.recover_pages())
    took = {"start_s": time.perf_counter() - begun, "start_cpu_s": time.process_time() - cpu}
    took["books_gib"] = (resident_bytes() - before) / (1 << 30)
    peak = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    took["peak_gib"] = int(peak.split()[1]) / (1 << 20)
    naming, seconds, lacking = list[float](), list[float](), 0
    for number in random.Random(1).choices(range(conversations), k=_LOOKED_UP):
        said, keys, at = tokens_of(number, tokens), list[bytes](), time.perf_counter()
        names.extend_keys(keys, said)
        naming.append(time.perf_counter() - at)
        window, at = geometry.first_visible_page(len(keys) * PAGE_TOKENS), time.perf_counter()
        chain, local = partial(books.find_ready, GLOBAL), partial(books.find_ready, LOCAL)
        found = sum(chain(key) is not None for key in keys) + sum(local(key) is not None for key in keys[window:])
        seconds.append(time.perf_counter() - at)
        lacking += 2 * len(keys) - window - found
    store.close()
    took |= {"name_ms": 1e3 * median(naming), "look_up_ms": 1e3 * median(seconds)}
    return took | {"not_found": lacking, "pages": dict(books.pages)}


def measure(
    folder: Path, model: str, conversations: int, tokens: int, disk_bytes: int, *, records: bool, slab: int = SLAB_BYTES
) -> dict[str, Any]:
    """Fill a disk tier in `folder`, which is empty, in a process that dies, and start in another one."""
    given = [str(folder), model, str(conversations), str(tokens), str(disk_bytes), str(slab)]
    if records:
        pages = fill_records(folder, geometry_of(model), conversations, tokens, disk_bytes)
    else:
        filler = _run("fill", given)
        assert filler.returncode == -signal.SIGKILL, filler.stderr
        pages = int(filler.stdout)
    starter = _run("start", given)
    assert starter.returncode == 0, starter.stderr
    found: dict[str, Any] = json.loads(starter.stdout)
    return {"model": model, "conversations": conversations, "written": pages} | found


def _run(part: str, given: list[str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.kv.fleet", *given, "--part", part]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", type=Path)
    parser.add_argument("model", nargs="?", default="gemma3-27b")
    parser.add_argument("conversations", nargs="?", type=int, default=1000)
    parser.add_argument("tokens", nargs="?", type=int, default=32 * 1024)
    parser.add_argument("disk_bytes", nargs="?", type=int, default=4 * TIB)
    parser.add_argument("slab_bytes", nargs="?", type=int, default=SLAB_BYTES)
    parser.add_argument("--records", action="store_true", help="write index records, not pages through the store")
    parser.add_argument("--part", choices=("fill", "start"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = (args.conversations, args.tokens, args.disk_bytes, args.slab_bytes)
    if args.part == "fill":
        fill(args.directory, geometry_of(args.model), *sizes)
    if args.part == "start":
        print(json.dumps(start(args.directory, geometry_of(args.model), *sizes)))
        return 0
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        result = measure(Path(folder), args.model, *sizes[:3], records=args.records, slab=args.slab_bytes)
    print(json.dumps(result | {"goals": GOALS}, indent=2))
    met = not result["not_found"] and sum(result["pages"].values()) == result["written"]
    return 0 if met and all(result[name] <= goal for name, goal in GOALS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
