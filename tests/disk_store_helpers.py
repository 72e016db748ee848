"""Small disk stores for tests: blocking calls, random pages, a page's bytes from a number."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from wicore_trt.kv.disk.files import aligned_buffer
from wicore_trt.kv.disk.format import Namespace, record_bytes
from wicore_trt.kv.disk.io import IoPool, PageMove, Probe
from wicore_trt.kv.disk.store import DiskStore, Outcome
from wicore_trt.kv.pages.page import Page

SLOT = 4096
SPACE = Namespace("engine", "torch", 16, {"global": 2 * SLOT, "local": SLOT}, "bfloat16")
RECORD_BYTES = record_bytes(SPACE.page_tokens)


def open_store(path: Path, **changes: Any) -> DiskStore:
    settings: dict[str, Any] = {
        "namespace": SPACE,
        "slot_bytes": SLOT,
        "limit_bytes": 2 << 20,
        "free_bytes": 0,
        "threads": 2,
        "queue_limit": 64,
        "timeout_s": 30.0,
        "slab_bytes": 16 * 2 * SLOT,
    }
    return DiskStore(path, **{**settings, **changes})


def hurry(pool: IoPool, timeout_s: float) -> None:
    """From now on operations time out after so many seconds, also those under way: a test waits for a hang first, and
    nothing times out before on a busy machine."""
    with pool._lock:
        pool._timeout_s = timeout_s
        for op in pool._waiting:
            op.deadline = min(op.deadline, time.monotonic() + timeout_s)
        pool._watch.notify()


def recover(store: DiskStore) -> list[tuple[Page, tuple[int, ...]]]:
    return [(page, tuple(slots)) for page, slots in store.recover_pages()]


def make_page(number: int, group: str = "local") -> Page:
    """The same page for the same numbers, in every process."""
    key = blake2b(f"{group} {number}".encode(), digest_size=32).digest()
    parent = blake2b(key).digest()[:32] if number % 3 else None
    tokens = blake2b(key, digest_size=64).digest() if number % 4 else b""  # of 16 tokens, where they are known
    return Page(key, group, number, parent, bytes([number % 7]) * 16, tokens)


def content(number: int, part: int, version: int = 0, nbytes: int = SLOT) -> bytes:
    return random.Random(f"{number} {part} {version}").randbytes(nbytes)


def buffers(parts: Sequence[bytes]) -> list[memoryview]:
    made = [aligned_buffer(len(part)) for part in parts]
    for buffer, part in zip(made, parts, strict=True):
        buffer[:] = part
    return made


def wait_for(call: Callable[..., bool], *args: Any, timeout_s: float = 30.0) -> Outcome:
    """Run one operation and wait for its first outcome."""
    event, found = threading.Event(), []

    def done(outcome: Outcome) -> None:
        found.append(outcome)
        event.set()

    assert call(*args, done), "refused"
    assert event.wait(timeout_s), "no outcome"
    return found[0]


def read_page(
    store: DiskStore,
    page: Page,
    slots: Sequence[int],
    parts: Sequence[memoryview],
    done: Callable[[Outcome], None],
    *,
    probe: Probe | None = None,
    seen: Callable[[bytes], None] = lambda digest: None,
    wanted: Callable[[], bool] = lambda: True,
) -> bool:
    """Read one page; `done` hears what became of it, and `seen` of the digest of a page that is OK before."""
    move = PageMove(page, slots, parts, probe, wanted)

    def end_read(outcome: Outcome) -> None:
        if outcome is move.outcome is Outcome.OK:
            seen(move.digest)
        done(move.outcome if outcome is Outcome.OK else outcome)

    return store.read_pages([move], end_read)


def put(store: DiskStore, page: Page, slots: Sequence[int], parts: Sequence[bytes]) -> Outcome:
    return wait_for(store.write_page, page, slots, buffers(parts))


def get(store: DiskStore, page: Page, slots: Sequence[int], nbytes: int = SLOT) -> tuple[Outcome, list[bytes]]:
    found = [aligned_buffer(nbytes) for _ in slots]
    outcome = wait_for(read_page, store, page, slots, found)
    return outcome, [bytes(buffer) for buffer in found]
