"""The event log: whoever replays a snapshot and the events after it holds exactly the pages of the tiers."""

from __future__ import annotations

import random
import threading
import time
from functools import partial

import pytest
from fakes import make_core
from hypothesis import given, settings
from hypothesis import strategies as st

from wicore_trt.config import KVSettings
from wicore_trt.core.assemble_kv import _note_eviction
from wicore_trt.kv import events
from wicore_trt.kv.events import KVEventLog, Removed, Stored
from wicore_trt.kv.manager import KVCacheManager
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.by_name import make_policy
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import GenerateRequest, SamplingParams

TIERS, GROUPS = ("device", "host", "disk"), ("global", "local")
TENANT = bytes(16)


def page(key: int, group: str = "global") -> Page:
    return Page(key.to_bytes(32, "big"), group, key, None, TENANT)


class Tiers:
    """The truth, changed at random the way an engine does it, and told to a log."""

    def __init__(self, log: KVEventLog, rng: random.Random, keys: int) -> None:
        self.log, self.rng, self.keys = log, rng, keys
        self.held: set[tuple[str, Page]] = set()
        self.history = {0: frozenset()}  # by sequence number after a step

    def change(self) -> None:
        tier, group = self.rng.choice(TIERS), self.rng.choice(GROUPS)
        entry = (tier, page(self.rng.randrange(self.keys), group))
        if entry in self.held:
            self.held.remove(entry)
            self.log.append_removed(tier, group, entry[1].key, self.rng.choice(("capacity", "quota")))
        else:
            self.held.add(entry)
            self.log.append_stored(*entry)

    def step(self) -> None:
        for _ in range(self.rng.randrange(12)):
            self.change()
        self.log.publish_step()
        self.history[self.log.sequence] = frozenset(self.held)


class Replica:
    """A subscriber's copy. It is strict: an event that repeats or misses a change raises."""

    def __init__(self, log: KVEventLog) -> None:
        self.log, self.position, self.snapshots = log, -1, 0
        self.held: set[tuple[str, str, bytes]] = set()

    def load(self, snapshot: events.EventSnapshot) -> None:
        assert snapshot.epoch == self.log.epoch and snapshot.sequence > self.position
        self.held = {(tier, group, p.key) for (tier, group), pages in snapshot.pages.items() for p in pages}
        assert all(p.group == group for (_, group), pages in snapshot.pages.items() for p in pages)
        self.position = snapshot.sequence
        self.snapshots += 1

    def apply(self, found: list[events.Event]) -> None:
        for event in found:
            assert event.sequence == self.position + 1, "a gap"
            self.position = event.sequence
            if isinstance(event, Stored):
                new = {(event.tier, event.group, p.key) for p in event.pages}
                assert len(new) == len(event.pages) and not new & self.held, "a duplicate"
                self.held |= new
            else:
                gone = {(event.tier, event.group, key) for key in event.keys}
                assert len(gone) == len(event.keys) and gone <= self.held, "a removal of nothing"
                self.held -= gone

    def is_at(self, history: dict[int, frozenset]) -> bool:
        return self.held == {(tier, p.group, p.key) for tier, p in history[self.position]}


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**32), limit=st.integers(0, 200), pace=st.integers(1, 30))
def test_late_and_slow_subscribers_hold_the_true_pages(seed, limit, pace):
    rng = random.Random(seed)
    log = KVEventLog(limit)
    tiers = Tiers(log, rng, keys=rng.choice((5, 40)))
    replicas: list[Replica] = []
    for step in range(60):
        tiers.step()
        if step % 10 == 0:
            replicas.append(Replica(log))
        for replica in replicas:
            if rng.randrange(pace):
                continue
            found = log.list_since(replica.position)
            if found is None:
                for _ in range(rng.randrange(3)):
                    tiers.change()  # of a step that is not over
                replica.load(log.take_snapshot())
                assert replica.is_at(tiers.history)
                log.publish_step()
                tiers.history[log.sequence] = frozenset(tiers.held)
                found = log.list_since(replica.position)
            replica.apply(found or [])
            if found is not None:
                assert replica.position == log.sequence and replica.is_at(tiers.history)


@pytest.mark.parametrize("seed", range(3))
def test_subscribers_on_threads_see_no_gap_and_no_duplicate(seed):
    """The engine never waits for them; those that fall behind start again from a snapshot."""
    rng = random.Random(seed)
    log = KVEventLog(limit=150)
    tiers = Tiers(log, rng, keys=30)
    seen: list[tuple[int, frozenset]] = []
    failures: list[BaseException] = []
    over, fell_behind = threading.Event(), threading.Event()

    def subscribe(behind: int) -> None:
        """Reads when the log is so many events further."""
        replica = Replica(log)
        try:
            while not over.is_set() or replica.position < log.sequence:
                found = log.list_since(replica.position)
                if found is None:
                    replica.load(log.take_snapshot())
                elif found:
                    replica.apply(found)
                else:
                    time.sleep(0.001)
                seen.append((replica.position, frozenset(replica.held)))
                while not over.is_set() and log.sequence < replica.position + behind:
                    time.sleep(0.001)
                if behind and replica.snapshots >= 3:
                    fell_behind.set()
            assert replica.snapshots >= (3 if behind else 1)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=subscribe, args=(behind,)) for behind in (0, 0, 200)]
    for thread in threads:
        thread.start()
    for step in range(60_000):
        tiers.step()
        time.sleep(0.0005)
        if step >= 600 and fell_behind.is_set() and len(seen) > 100:
            break
    over.set()
    for thread in threads:
        thread.join(60)
    assert not failures, failures
    true = {n: frozenset((t, p.group, p.key) for t, p in held) for n, held in tiers.history.items()}
    assert all(true[position] == held for position, held in seen) and len(seen) > 100
    assert max(position for position, _ in seen) == log.sequence


def test_a_step_makes_one_event_of_pages_that_come_in_turn_from_two_groups():
    """Arrivals are told first, parents before children, in whatever order they came."""
    log = KVEventLog(1000)
    for key in (6, 7):
        log.append_stored("device", page(key, "local"))
    log.publish_step()
    log.append_removed("device", "local", page(7).key, "capacity")
    log.append_removed("device", "local", page(6).key, "quota")
    for key in reversed(range(5)):
        for tier in ("disk", "host"):
            for group in reversed(GROUPS):
                log.append_stored(tier, page(key, group))
    log.append_removed("host", "local", page(3).key, "capacity")
    assert log.list_since(1) == [] and log.sequence == 1, "events of an unfinished step are not shown"
    log.publish_step()
    found = log.list_since(1)
    assert found == [
        Stored(2, "host", "global", tuple(page(k) for k in range(5))),
        Stored(3, "disk", "global", tuple(page(k) for k in range(5))),
        Stored(4, "host", "local", tuple(page(k, "local") for k in (0, 1, 2, 4))),
        Stored(5, "disk", "local", tuple(page(k, "local") for k in range(5))),
        Removed(6, "device", "local", (page(7).key,), "capacity", 0),
        Removed(7, "device", "local", (page(6).key,), "quota", 0),
    ]
    assert log.list_since(6) == found[5:] and log.list_since(7) == [] and log.list_since(8) is None
    assert log.list_since(-1) is None


def test_a_page_comes_behind_its_parent_from_another_tier():
    """The parent left the device and host memory before, and its bytes are on disk only now."""
    keys = [bytes([n]) * 32 for n in range(5)]
    chain = [Page(key, "global", n, keys[n - 1] if n else None, TENANT, b"abcd") for n, key in enumerate(keys)]
    log = KVEventLog(1000)
    for tier, *numbers in (("host", 0, 2, 3), ("disk", 1, 2), ("device", 3, 4)):
        for n in numbers:
            log.append_stored(tier, chain[n])
    log.publish_step()
    assert [(event.tier, event.pages) for event in log.list_since(0)] == [
        ("host", (chain[0],)), ("disk", (chain[1], chain[2])), ("host", (chain[2],)),
        ("device", (chain[3],)), ("host", (chain[3],)), ("device", (chain[4],)),
    ]  # fmt: skip


def test_a_page_of_a_window_comes_behind_a_late_parent_of_the_global_group():
    keys = [bytes([n]) * 32 for n in range(4)]
    chain = [Page(key, "global", n, keys[n - 1] if n else None, TENANT, b"abcd") for n, key in enumerate(keys)]
    window = Page(keys[3], "local", 3, keys[2], TENANT, b"abcd")
    log = KVEventLog(1000)
    for tier, one in (("device", window), ("host", chain[0]), ("host", chain[2]), ("disk", chain[1])):
        log.append_stored(tier, one)
    log.publish_step()
    told = [(event.tier, event.pages) for event in log.list_since(0)]
    assert told == [("host", (chain[0],)), ("disk", (chain[1],)), ("host", (chain[2],)), ("device", (window,))]


def test_pages_without_tokens_are_told_of_apart_when_they_leave():
    """Routers, who match by tokens, never heard of them."""
    log = KVEventLog(1000)
    pages = [Page(bytes([n]) * 32, "global", n, None, TENANT, b"abcd" * (n % 2)) for n in range(6)]
    log.append_stored("device", *pages)
    log.publish_step()
    for one in pages:
        log.append_removed("device", "global", one.key, "capacity")
    log.append_removed("device", "global", b"nobody's", "capacity")
    log.publish_step()
    [_, gone] = log.list_since(0)
    assert gone.named == 3 and gone.keys == tuple(pages[n].key for n in (1, 3, 5, 0, 2, 4))


def test_what_is_kept_is_bounded_by_pages_and_an_event_by_its_own_limit(monkeypatch):
    monkeypatch.setattr(events, "MAX_EVENT_PAGES", 10)
    log = KVEventLog(100)
    for key in range(1000):
        log.append_stored("host", page(key))
    log.publish_step()
    kept = log.list_since(log.sequence - 9)
    assert log.sequence == 100 and [len(e.pages) for e in kept] == [10] * 9
    assert log.list_since(log.sequence - 10) is None
    assert [p.index for e in kept for p in e.pages] == list(range(910, 1000))


def test_the_first_publish_tells_of_what_is_there_already():
    log = KVEventLog(5000)
    there = [("disk", page(key)) for key in range(3000)]
    log.snapshot_source = lambda: iter(there)
    log.append_stored("disk", page(0))  # told while the tiers were opened
    assert log.take_snapshot().pages == {} and log.take_snapshot().sequence == 0
    log.publish_step()
    assert log.sequence == 3 and [p.index for e in log.list_since(0) for p in e.pages] == list(range(3000))
    assert log.take_snapshot().pages == {("disk", "global"): tuple(p for _, p in there)}
    there.append(("disk", page(9999)))
    log.publish_step()
    assert log.sequence == 3


def test_listeners_are_told_once_per_step_until_they_leave():
    log, told = KVEventLog(20), []
    leave = log.add_listener(lambda: told.append(log.sequence))
    for key in range(3):
        log.append_stored("host", page(key))
        log.append_stored("disk", page(key))
        log.publish_step()
        log.publish_step()
    leave()
    log.append_removed("host", "global", page(0).key, "quota")
    log.publish_step()
    assert told == [2, 4, 6] and log.sequence == 7


def test_epochs_differ_and_are_never_zero():
    epochs = {KVEventLog(1).epoch for _ in range(100)}
    assert len(epochs) == 100 and all(0 < epoch < 2**64 for epoch in epochs)


def check_tokens(manager: KVCacheManager, known: dict[bytes, bytes]) -> None:
    """The pages have tokens, and those that are known have the right ones. A sequence in the making has others."""
    for _, page in manager.list_pages():
        assert len(page.tokens) == 4 * manager.page_tokens and known.get(page.key, page.tokens) == page.tokens


@pytest.mark.parametrize("write_policy", ["through", "selective", "back"])
def test_an_engine_tells_of_every_page_of_all_its_tiers(tmp_path, write_policy):
    """After each step the events say what the tiers hold, with the tokens of each page; a second engine starts with
    what the first left on disk."""
    rng = random.Random()
    prompts = [[rng.randrange(2, 97) for _ in range(rng.randint(6, 20))] for _ in range(8)]
    kv = KVSettings(
        host_bytes=rng.choice([24, 60]) << 12, disk_path=str(tmp_path / "kv"), disk_bytes=3 << 20, disk_free_bytes=0,
        write_policy=write_policy,
    )  # fmt: skip
    seen, tokens_of = set(), {}
    for life in range(2):
        core = make_core(pages={GLOBAL: 40, LOCAL: 24}, kv=kv, max_context=120)
        core.scheduler.prefill.observe_step([(0, 64)], 64.0)  # computing is slow: pages are loaded
        manager, log = core.scheduler.manager, core.scheduler.manager.events
        log.publish_step()
        replica = Replica(log)
        replica.load(log.take_snapshot())
        seen |= {f"{tier} {life}" for tier, _, _ in replica.held}
        check_tokens(manager, tokens_of)
        for turn in range(3):
            for i in rng.sample(range(8), 8):
                params = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)
                core.add(GenerateRequest(f"{turn}/{i}", tuple(prompts[i]), params))
                while core.has_work and (i % 2 or i == 0):
                    for output in core.step():
                        prompts[int(output.request_key.split("/")[1])] += output.token_ids
                    log.publish_step()
                    replica.apply(log.list_since(replica.position))
                    assert replica.held == {(tier, p.group, p.key) for tier, p in manager.list_pages()}
                    seen |= {tier for tier, _, _ in replica.held}
                for tokens in prompts:
                    blocks = manager.chain.derive_names("", "").extend_keys(keys := [], tokens)
                    tokens_of |= zip(keys, blocks, strict=True)
                check_tokens(manager, tokens_of)
        core.close()
    assert write_policy != "through" or seen == {*TIERS, "disk 1"}


def test_a_page_that_could_not_be_found_yet_does_not_leave() -> None:
    """A read or write that fails, or is left out, told nobody of its page; restored pages are told of by a snapshot."""
    log = KVEventLog(100)
    told: list[tuple[bytes, str]] = []
    log.append_removed = lambda tier, group, key, cause: told.append((key, cause))  # type: ignore[method-assign]
    index = TierIndex(
        4, {"global": 1}, make_policy("lru", 4), primary="global", on_evict=partial(_note_eviction, log, "host")
    )
    pages = [Page(bytes([n]) * 32, "global", 0, None, b"t" * 32, b"b") for n in range(3)]
    index.restore_pages([(pages[0], (0,))])
    for page in pages[1:]:
        copy = index.reserve_copy(page)
        assert copy is not None
        if page is pages[1]:
            index.abort_copy(copy, "unwanted")
        else:
            index.commit_copy(copy)
    for page in (pages[0], pages[2]):
        index.drop_key(page.key, "gone")
    assert told == [(pages[0].key, "gone"), (pages[2].key, "gone")]
