"""A disk tier of a fleet's size, killed and started anew: `python -m benchmarks.kv.fleet DIRECTORY`.

By default 1,000 conversations of 32K of Gemma 3 27B, BF16, pages of 32 tokens, on 4 TiB. A process serves them over a
device that computes nothing, so that scheduler, manager, host tier and `DiskStore` fill the disk, and kills itself with
SIGKILL. Pages have their true number of slots, but slots of 4 KiB, or checksums alone would take ten minutes. With
`--records` slots have their true size, and the disk's index is written without serving, in seconds. Payloads are
dropped, so slabs are holes. A fresh process then opens the store, recovers its pages, restores the books with the
default policy and names and looks up conversations, whole chains and the windows before their ends. It must not read a
payload. Exit code 1 when a goal is missed.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.kv.device_capacity import Blank
from benchmarks.kv.engine_thread import Device
from wicore_trt.config import KVSettings
from wicore_trt.core.assemble_kv import make_cache
from wicore_trt.core.engine import EngineCore
from wicore_trt.kv.disk.claim import derive_secret
from wicore_trt.kv.disk.files import Files
from wicore_trt.kv.disk.format import BLOCK_BYTES, Namespace, SlotFormat
from wicore_trt.kv.disk.store import DiskStore
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.by_name import DEFAULT_POLICY, make_policy
from wicore_trt.kv.sizing import Geometry, builtin_spec
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.model.spec import GLOBAL, GROUPS, LOCAL
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.types import GenerateRequest, SamplingParams

GOALS = {"start_s": 10.0, "books_gib": 1.0, "both_ms": 2.0}
TIB = 1 << 40
PAGE_TOKENS, DTYPE = 32, "bfloat16"
_SALT = "fleet"
_NAMES = KeyChain("bench/none", PAGE_TOKENS, secret=derive_secret(_SALT)).derive_names("", "")
_STEP_TOKENS = 8192
_LOOKED_UP = 101


class FastDevice(Device):
    """Takes no time, and tells digests that are always right."""

    execute = Blank.execute


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


def geometry_of(model: str, disk_bytes: int, *, whole: bool) -> tuple[Geometry, int]:
    """Sizes of a model's pages, with slots of 4 KiB unless `whole`, and the limit for as many slots as `disk_bytes`
    hold."""
    found = Geometry.from_spec(builtin_spec(model), PAGE_TOKENS, DTYPE)
    if whole:
        return found, disk_bytes
    page_bytes = {group: BLOCK_BYTES * count for group, count in found.slots_per_page.items()}
    small = replace(found, page_bytes=page_bytes, slot_bytes=BLOCK_BYTES)
    return small, small.disk_bytes(found.disk_slots(disk_bytes))


def namespace_of(geometry: Geometry) -> Namespace:
    return Namespace("bench", "none", PAGE_TOKENS, geometry.page_bytes, DTYPE)


def resident_bytes() -> int:
    """Resident memory of this process, without what its allocator could give back."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def open_hollow(home: Path, geometry: Geometry, disk_bytes: int) -> DiskStore:
    return DiskStore(
        home, namespace=namespace_of(geometry), slot_bytes=geometry.slot_bytes, limit_bytes=disk_bytes, free_bytes=0,
        threads=1, queue_limit=1, timeout_s=60.0, files=HollowFiles(), native=False,
    )  # fmt: skip


def tokens_of(number: int, count: int) -> list[int]:
    return random.Random(number).choices(range(3, 200_000), k=count)


def conversation(number: int, geometry: Geometry, tokens: int) -> Iterator[Page]:
    """Make its pages in the order of writing: the whole chain, and the local window that its next request reads."""
    keys: list[bytes] = []
    blocks = _NAMES.extend_keys(keys, tokens_of(number, tokens))
    window = geometry.first_visible_page(len(keys) * PAGE_TOKENS)
    for i, key in enumerate(keys):
        for group in (GLOBAL, LOCAL) if i >= window else (GLOBAL,):
            yield Page(key, group, i, keys[i - 1] if i else None, _NAMES.tag, blocks[i])


def fill(home: Path, geometry: Geometry, conversations: int, tokens: int, disk_bytes: int) -> None:
    """Serve the conversations, one after the other, until all pages are acknowledged, and die. Says how many there
    are."""
    window, room = geometry.spec.sliding_window, tokens + _STEP_TOKENS
    layout = KVLayout(PAGE_TOKENS, DTYPE, dict.fromkeys(GROUPS, 2 * room // PAGE_TOKENS), dict(geometry.page_bytes))
    host_bytes = sum(layout.num_pages[group] * size for group, size in geometry.page_bytes.items())
    settings = KVSettings(
        host_bytes=host_bytes, disk_path=str(home), disk_bytes=disk_bytes, disk_free_bytes=0, salt=_SALT
    )
    device = FastDevice(layout, window, _STEP_TOKENS)
    manager, loader = make_cache(
        settings, layout, window, engine="bench", kernels="none", copier=device, files=HollowFiles()
    )
    scheduler = Scheduler(manager, max_batch_tokens=_STEP_TOKENS, max_sequences=1, loader=loader)
    core = EngineCore(device, scheduler, eos_ids=(1,), max_context=room)  # type: ignore[arg-type]
    tiers = manager.tiers
    assert tiers is not None and tiers.disk is not None
    for number in range(conversations):
        once = SamplingParams(max_tokens=1, temperature=0.0)
        core.add(GenerateRequest(str(number), tuple(tokens_of(number, tokens)), once))
        while core.has_work:
            core.step()
        while core.do_housekeeping():
            tiers.wait_idle(60.0)
    failures = tiers.movers.host_traffic.failures + tiers.movers.disk_traffic.failures
    assert not failures, f"a page was not written: {failures}"
    print(tiers.disk.pages.total(), flush=True)
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


def start(home: Path, geometry: Geometry, conversations: int, tokens: int, disk_bytes: int) -> dict[str, Any]:
    """Open the tier as a fresh process does and look conversations up: seconds, GiB and pages found."""
    before, begun, cpu = resident_bytes(), time.perf_counter(), time.process_time()
    store = open_hollow(home, geometry, disk_bytes)
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
        _NAMES.extend_keys(keys, said)
        naming.append(time.perf_counter() - at)
        window, at = geometry.first_visible_page(len(keys) * PAGE_TOKENS), time.perf_counter()
        chain, local = partial(books.find_ready, GLOBAL), partial(books.find_ready, LOCAL)
        found = sum(chain(key) is not None for key in keys) + sum(local(key) is not None for key in keys[window:])
        seconds.append(time.perf_counter() - at)
        lacking += 2 * len(keys) - window - found
    store.close()
    found_s = [a + b for a, b in zip(naming, seconds, strict=True)]
    took |= {"both_ms": 1e3 * median(found_s), "name_ms": 1e3 * median(naming), "look_up_ms": 1e3 * median(seconds)}
    return took | {"not_found": lacking, "pages": dict(books.pages)}


def measure(
    folder: Path, model: str, conversations: int, tokens: int, disk_bytes: int, *, records: bool
) -> dict[str, Any]:
    """Fill a disk tier in `folder`, which is empty, in a process that dies, and start in another one."""
    given, begun = [str(folder), model, str(conversations), str(tokens), str(disk_bytes)], time.perf_counter()
    given += ["--records"] * records
    if records:
        geometry, limit = geometry_of(model, disk_bytes, whole=True)
        pages = fill_records(folder, geometry, conversations, tokens, limit)
    else:
        filler = _run("fill", given)
        assert filler.returncode == -signal.SIGKILL, filler.stderr
        pages = int(filler.stdout)
    fill_s = time.perf_counter() - begun
    starter = _run("start", given)
    assert starter.returncode == 0, starter.stderr
    found: dict[str, Any] = json.loads(starter.stdout)
    return {"model": model, "conversations": conversations, "written": pages, "fill_s": fill_s} | found


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
    parser.add_argument("--records", action="store_true", help="write index records, and serve nothing")
    parser.add_argument("--part", choices=("fill", "start"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    sizes = (args.conversations, args.tokens, args.disk_bytes)
    if args.part is not None:
        geometry, limit = geometry_of(args.model, args.disk_bytes, whole=args.records)
        run: Callable[..., object] = fill if args.part == "fill" else start
        print(json.dumps(run(args.directory, geometry, args.conversations, args.tokens, limit)))
        return 0
    with tempfile.TemporaryDirectory(dir=args.directory) as folder:
        result = measure(Path(folder), args.model, *sizes, records=args.records)
    print(json.dumps(result | {"goals": GOALS}, indent=2))
    met = not result["not_found"] and sum(result["pages"].values()) == result["written"]
    return 0 if met and all(result[name] <= goal for name, goal in GOALS.items()) else 1


if __name__ == "__main__":
    sys.exit(main())
