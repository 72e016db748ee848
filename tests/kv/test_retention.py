"""Sessions are held, and times to live end, exactly as clients said: against a model with a fake clock."""

from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.policy import LRUPolicy
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.kv.tiers.retention import Retention
from wicore_trt.types import CacheHints, CachePriority

PIN_S = 60.0
TENANTS = (b"alpha", b"beta")
CHAINS = st.lists(st.integers(0, 2), max_size=4)
TTLS = st.sampled_from([None, None, 1.0, 10.0, 60.0, 500.0])
HINTS = st.builds(
    CacheHints,
    session=st.sampled_from(["", "one", "two"]),
    priority=st.sampled_from([CachePriority.NORMAL, CachePriority.HIGH]),
    ttl_s=TTLS,
)


def chain(tenant: bytes, path: list[int]) -> list[bytes]:
    return [tenant + bytes(path[: i + 1]) for i in range(len(path))]


def tier(slots: int = 400, pin_share: float = 1.0) -> TierIndex:
    return TierIndex(slots, {"global": 1}, LRUPolicy(slots), primary="global", pin_share=pin_share)


def store(index: TierIndex, keys: list[bytes], tenant: bytes = TENANTS[0]) -> None:
    for i, key in enumerate(keys):
        if index.find_copy("global", key) is None:
            copy = index.reserve_copy(Page(key, "global", i, keys[i - 1] if i else None, tenant))
            assert copy is not None
            index.commit_copy(copy)


def held(index: TierIndex) -> set[bytes]:
    return index.inspect().pinned


class Sessions(RuleBasedStateMachine):
    """Many requests, uses and waits; the model is two dictionaries that say what must be so."""

    @initialize()
    def start(self) -> None:
        self.now = 1000.0
        self.tiers = [tier(), tier()]
        self.retention = Retention(PIN_S, lambda: self.now)
        self.ends: dict[bytes, tuple[float, float]] = {}  # when, and after which time to live
        self.sessions: dict[object, tuple[list[bytes], float]] = {}

    def extend(self, key: bytes, ttl_s: float) -> None:
        if key not in self.ends or self.now + ttl_s > self.ends[key][0]:
            self.ends[key] = self.now + ttl_s, ttl_s

    def model_used(self, keys: list[bytes], hints: CacheHints, tenant: bytes) -> None:
        for key in keys:
            if hints.ttl_s is None:
                self.ends.pop(key, None)
            elif key in self.ends:
                self.extend(key, hints.ttl_s)
        name = (tenant, hints.session)
        if name in self.sessions:
            kept, end = self.sessions[name]
            self.sessions[name] = kept, max(end, self.now + (hints.ttl_s or PIN_S))

    @rule(tenant=st.sampled_from(TENANTS), path=CHAINS, hints=HINTS)
    def used(self, tenant: bytes, path: list[int], hints: CacheHints) -> None:
        keys = chain(tenant, path)
        self.retention.renew_ends(keys, hints, tenant)
        self.model_used(keys, hints, tenant)

    @rule(tenant=st.sampled_from(TENANTS), path=CHAINS, hints=HINTS, found=st.integers(0, 4), late=st.booleans())
    def finished(self, tenant: bytes, path: list[int], hints: CacheHints, found: int, late: bool) -> None:
        keys = chain(tenant, path)
        if not late:
            store(self.tiers[0], keys, tenant)
        self.retention.end_request(keys, hints, tenant, self.tiers, found=found)
        store(self.tiers[1], keys, tenant)  # a write that ends after the request is held too
        self.model_used(keys, hints, tenant)
        if hints.ttl_s is not None:
            for key in keys[found:]:
                self.extend(key, hints.ttl_s)
        name = (tenant, hints.session or (keys[-1] if keys and hints.priority is CachePriority.HIGH else None))
        if name[1] is not None:
            self.sessions.pop(name, None)
            if keys:
                self.sessions[name] = keys, self.now + (hints.ttl_s or PIN_S)

    @rule(seconds=st.sampled_from([0.0, 0.5, 1.0, 9.0, 10.0, 60.0, 1000.0]), busy=st.sets(st.sampled_from(TENANTS)))
    def wait(self, seconds: float, busy: set[bytes]) -> None:
        self.now += seconds
        over = {key for key, (end, _) in self.ends.items() if end <= self.now}
        spared = {key for key in over if key.startswith(tuple(busy))}
        due = self.retention.take_due(self.now, lambda key: key.startswith(tuple(busy)))
        assert len(due) == len(set(due)) and set(due) == over - spared
        for key in due:
            del self.ends[key]
            for index in self.tiers:
                index.drop_key(key, "ttl")
        for key in spared:
            self.extend(key, self.ends[key][1])
        self.sessions = {name: s for name, s in self.sessions.items() if s[1] > self.now}

    @invariant()
    def agrees(self) -> None:
        expected = {key for keys, _ in self.sessions.values() for key in keys}
        for index in self.tiers:
            index.check_integrity()
            assert held(index) == expected & {copy.page.key for copy in index.iterate_copies()}
        self.retention.check_integrity()


TestSessions = Sessions.TestCase
TestSessions.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


@pytest.mark.long
def test_sessions_long() -> None:
    run_state_machine_as_test(Sessions, settings=settings(max_examples=1500, stateful_step_count=70, deadline=None))


def test_a_full_tier_keeps_the_latest_chain_of_a_session() -> None:
    index, now = tier(slots=8), 0.0
    retention = Retention(PIN_S, lambda: now)
    talk = CacheHints(session="talk")
    first, second = chain(b"a", [1, 1, 1]), chain(b"a", [2, 2])
    for keys in (first, second):
        store(index, keys)
        retention.end_request(keys, talk, TENANTS[0], [index])
    for i in range(20):
        store(index, chain(b"other" + bytes([i]), [0]))
    assert all(index.find_copy("global", key) for key in second)
    assert not any(index.find_copy("global", key) for key in first)
    retention.take_due(PIN_S)
    for i in range(20):
        store(index, chain(b"more" + bytes([i]), [0]))
    assert not any(index.find_copy("global", key) for key in second)


def test_equal_session_names_of_two_tenants_are_two_sessions() -> None:
    index = tier()
    retention = Retention(PIN_S, lambda: 0.0)
    for tenant in TENANTS:
        store(index, chain(tenant, [1]), tenant)
        retention.end_request(chain(tenant, [1]), CacheHints(session="same"), tenant, [index])
    assert held(index) == {key for tenant in TENANTS for key in chain(tenant, [1])}


def test_a_session_holds_the_head_of_its_chain_up_to_the_share() -> None:
    index = tier(slots=10, pin_share=0.5)
    retention = Retention(PIN_S, lambda: 0.0)
    keys = chain(b"a", [0] * 7)
    store(index, keys)
    retention.end_request(keys, CacheHints(session="s"), TENANTS[0], [index])
    assert held(index) == set(keys[:5]) and index.pinned_slots == 5


def test_clients_cannot_fill_memory() -> None:
    """Over the limit the soonest end goes first, whether due or not; a cleared time leaves nothing behind."""
    now = 0.0
    retention = Retention(PIN_S, lambda: now, max_keys=100)
    for i in range(50):
        keys = chain(b"a%d" % i, [0] * 10)
        retention.end_request(keys, CacheHints(session=str(i), ttl_s=1000.0 + i), TENANTS[0], [tier(slots=1)])
        due = retention.take_due(now)
        assert due == (chain(b"a%d" % (i - 10), [0] * 10) if i >= 10 else [])
        retention.check_integrity()
        assert len(retention._pinned) <= 10 and len(retention._ends) <= 100
    for _ in range(1000):
        retention.end_request([b"k"], CacheHints(ttl_s=9e5), TENANTS[0], [])
        retention.renew_ends([b"k"], CacheHints(), TENANTS[0])
    assert len(retention._ends._heap) < 500


def test_pages_that_others_made_get_no_time_to_live() -> None:
    now = 0.0
    retention = Retention(PIN_S, lambda: now)
    keys = chain(b"a", [0] * 4)
    retention.end_request(keys[:2], CacheHints(), TENANTS[0], [])
    retention.end_request(keys, CacheHints(ttl_s=5.0), TENANTS[0], [], found=2)
    assert retention.take_due(4.9) == [] and retention.take_due(5.0) == keys[2:]


def test_a_time_too_short_to_count_ends_when_its_page_is_free() -> None:
    retention = Retention(PIN_S, lambda: 1e9)
    retention.end_request([b"k"], CacheHints(ttl_s=1e-12), TENANTS[0], [])
    assert retention.take_due(1e9, lambda key: True) == []
    assert retention.take_due(1e9 + 1) == [b"k"]
