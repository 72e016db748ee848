"""A disk store under random operations and faults, beside a model of what it may answer. Shared by fault tests."""

from __future__ import annotations

import random
import threading
from collections import Counter
from hashlib import blake2b
from pathlib import Path

from disk_damage import Damage, Vandal
from disk_store_helpers import read_page
from fault_injection import FaultPlan, FaultyFiles

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.kv.disk.cipher import PageCipher
from wicore_trt.kv.disk.files import Files, aligned_buffer
from wicore_trt.kv.disk.format import Namespace
from wicore_trt.kv.disk.io import Outcome
from wicore_trt.kv.disk.store import DiskStore
from wicore_trt.kv.pages.hashing import tenant_tag
from wicore_trt.kv.pages.page import Page

SLOT = 4096
SLAB = 16 * 2 * SLOT
LIMIT = 64 * 9000 + (200 << 10)
LAYOUT = {"global": SLOT, "local": 3 * SLOT}


def namespace(rank: int = 0) -> Namespace:
    return Namespace("engine", "torch", 16, LAYOUT, "bf16", rank, 2)


def open_store(path: Path, *, rank: int = 0, files: Files | None = None, **more: object) -> DiskStore:
    settings: dict[str, object] = {
        "slot_bytes": SLOT, "limit_bytes": LIMIT, "free_bytes": 0, "threads": 1, "queue_limit": 64,
        "timeout_s": 20.0, "slab_bytes": SLAB,
    }  # fmt: skip
    return DiskStore(path, namespace=namespace(rank), files=files, **(settings | more))


def other_rank(path: Path) -> Path:
    """The namespace directory of a rank that holds the same pages in the same slots, with other bytes."""
    store = open_store(path, rank=1)
    first = 0
    for page in map(make_page, range(60)):
        slots = tuple(range(first, first + part_count(page)))
        if slots[-1] >= store.num_slots:
            break
        first += len(slots)
        buffers = [aligned_buffer(SLOT) for _ in slots]
        for part, buffer in enumerate(buffers):
            buffer[:] = content(page, -1, part)
        waiter = Waiter(1)
        assert store.write_page(page, slots, buffers, waiter.callback(0)) and waiter.wait() == [Outcome.OK]
    store.close()
    return path / namespace(1).digest.hex()


def tag_of(salt: str) -> bytes:
    """A tenant's tag, by a secret that all tests have."""
    return tenant_tag(bytes(32), "", salt)


def make_page(number: int, tenant: bytes = tag_of("t")) -> Page:
    key = blake2b(b"%d" % number, digest_size=32).digest()
    parent = None if number % 3 == 0 else blake2b(b"%d parent" % number, digest_size=32).digest()
    return Page(key, "local" if number % 4 == 0 else "global", number, parent, tenant)


def part_count(page: Page) -> int:
    return LAYOUT[page.group] // SLOT


def content(page: Page, version: int, part: int) -> bytes:
    """SLOT bytes that no other page, version and part has."""
    return blake2b(page.key + b"%d %d" % (version, part)).digest() * (SLOT // 64)


class Waiter:
    """Waits for operations; `outcomes[i]` is the first thing that the i-th was told."""

    def __init__(self, count: int) -> None:
        self.outcomes: list[Outcome | None] = [None] * count
        self._left = threading.Semaphore(0)
        self._count = 0

    def callback(self, place: int):
        self._count += 1

        def done(outcome: Outcome) -> None:
            if self.outcomes[place] is None:
                self.outcomes[place] = outcome
            if outcome is not Outcome.TIMEOUT:  # RETURNED follows: the buffers are still in use
                self._left.release()

        return done

    def refused(self, place: int) -> None:
        self._count -= 1
        self.outcomes[place] = Outcome.FAILED

    def wait(self) -> list[Outcome | None]:
        for _ in range(self._count):
            assert self._left.acquire(timeout=60), "an operation was never answered"
        return self.outcomes


class Campaign:
    """Random writes, reads, erases and restarts. `wrong` counts reads that were OK with bytes never written there."""

    BATCH = 16

    def __init__(
        self,
        path: Path,
        plan: FaultPlan,
        *,
        seed: int,
        cipher: PageCipher | None = None,
        other: Path | None = None,
        **store: object,
    ) -> None:
        self.path, self.plan, self.cipher, self.store_settings = path, plan, cipher, store
        self.rng = random.Random(seed)
        self.pages = [make_page(i) for i in range(120)]
        self.versions = [0] * len(self.pages)
        self.held: dict[int, tuple[tuple[int, ...], range]] = {}  # page -> its slots, versions that a read may give
        self.outcomes: Counter[tuple[str, Outcome | None]] = Counter()
        self.damage: Counter[Damage] = Counter()
        self.wrong = self.reads_ok = 0
        self.number = {page.key: i for i, page in enumerate(self.pages)}
        self.buffers = [[aligned_buffer(SLOT) for _ in range(3)] for _ in range(self.BATCH)]
        self.store = self._open()
        self.free = list(range(self.store.num_slots))
        self.vandal = Vandal(path / namespace().digest.hex(), SLOT, seed=seed, other=other)

    @property
    def faults(self) -> int:
        return self.plan.counts.total() + self.damage.total()

    def _open(self) -> DiskStore:
        for attempt in range(20):
            self.plan.active = attempt < 10
            try:
                store = open_store(self.path, files=FaultyFiles(self.plan), cipher=self.cipher, **self.store_settings)
                self.plan.active = True
                return store
            except EnvironmentUnfitError:
                pass
        raise AssertionError("the store does not open without faults")

    def write_batch(self) -> None:
        chosen = self.rng.sample(range(len(self.pages)), self.BATCH)
        waiter, tried = Waiter(self.BATCH), []
        for place, i in enumerate(chosen):
            page = self.pages[i]
            if i in self.held:
                if self.rng.random() < 0.3:  # over itself, into the slots it has
                    slots = self.held.pop(i)[0]
                    self.free += slots
                else:
                    continue
            else:
                while len(self.free) < part_count(page):
                    self._erase(self.rng.choice(list(self.held)))
                self.rng.shuffle(self.free)
                slots = tuple(self.free[: part_count(page)])
            self.free = [slot for slot in self.free if slot not in slots]
            self.versions[i] += 1
            buffers = self.buffers[place][: len(slots)]
            for part, buffer in enumerate(buffers):
                buffer[:] = content(page, self.versions[i], part)
            tried.append((place, i, slots))
            if not self.store.write_page(page, slots, buffers, waiter.callback(place)):
                waiter.refused(place)
        outcomes = waiter.wait()
        for place, i, slots in tried:
            self.outcomes["write", outcomes[place]] += 1
            if outcomes[place] is Outcome.OK:
                self.held[i] = slots, range(self.versions[i], self.versions[i] + 1)
            else:
                self.free += slots

    def run(self, rounds: int) -> None:
        for _ in range(rounds):
            self.write_batch()
            self.read_batch()
            self.read_batch()

    def read_batch(self) -> None:
        self._read(self.rng.sample(list(self.held), min(self.BATCH, len(self.held))))

    def _read(self, chosen: list[int]) -> None:
        waiter = Waiter(len(chosen))
        for place, i in enumerate(chosen):
            slots = self.held[i][0]
            if not read_page(
                self.store, self.pages[i], slots, self.buffers[place][: len(slots)], waiter.callback(place)
            ):
                waiter.refused(place)
        for place, (i, outcome) in enumerate(zip(chosen, waiter.wait(), strict=True)):
            self.outcomes["read", outcome] += 1
            slots, versions = self.held[i]
            if outcome is Outcome.OK:
                got = [bytes(buffer) for buffer in self.buffers[place][: len(slots)]]
                good = any(
                    got == [content(self.pages[i], version, part) for part in range(len(slots))] for version in versions
                )
                self.reads_ok += good
                self.wrong += not good
            elif outcome is Outcome.CORRUPT and self.rng.random() < 0.5:  # what a tier does with a bad page
                self._erase(i)

    def _erase(self, i: int) -> None:
        slots = self.held.pop(i)[0]
        self.store.erase_slots(slots)
        self.free += slots

    def restart(self, *kinds: Damage, remember: bool = False) -> None:
        """Close, damage the files, open again, and read all that is said to be there."""
        self.store.close(30)
        if remember:
            self.vandal.remember()
        for kind in kinds:
            self.damage[kind] += self.vandal.do(kind)
        self.store = self._open()
        # Any version that this life or an earlier one wrote may come back from old files, but nothing else.
        found = [(self.number[page.key], page, slots) for page, slots in self.store.recover_pages()]
        assert all(page == self.pages[i] for i, page, _ in found), "a page that was never written"
        self.held = {i: (slots, range(1, self.versions[i] + 1)) for i, _, slots in found}
        used = [slot for _, _, slots in found for slot in slots]
        assert len(used) == len(set(used)), "one slot, two pages"
        self.free = sorted(set(range(self.store.num_slots)) - set(used))
        order = list(self.held)
        for at in range(0, len(order), self.BATCH):
            self._read([i for i in order[at : at + self.BATCH] if i in self.held])
