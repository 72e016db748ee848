"""PagePool against its invariant under random operations, and its eviction order."""

from __future__ import annotations

import pytest
from fakes import clear_pool
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.by_name import make_policy
from wicore_trt.kv.pool import PagePool


def make_page(key: bytes, parent: bytes | None = None) -> Page:
    return Page(key, "global", 0, parent if parent != key else None, b"tenant")


class PoolMachine(RuleBasedStateMachine):
    """Random legal operations; a dictionary of held slots is the oracle."""

    policy: str | None = None

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[bytes] = []
        policy = make_policy(self.policy, 7) if self.policy else None
        self.pool = PagePool(7, 4, policy, lambda page, slot: self.evicted.append((page.key, slot)))
        self.held: list[int] = []
        self.counter = 0

    @rule(count=st.integers(0, 9))
    def allocate(self, count):
        available = self.pool.available_slots
        self.evicted.clear()
        slots = self.pool.allocate_slots(count)
        assert all(slot in (slots or ()) for _, slot in self.evicted), "a page was evicted for nothing"
        assert all(self.pool.find_slot(key) is None for key, _ in self.evicted)
        if count > available:
            assert slots is None and self.pool.available_slots == available
            return
        assert len(set(slots)) == count and not set(slots) & set(self.held), "a held slot was handed out"
        self.held += slots

    @precondition(lambda self: self.held)
    @rule(data=st.data(), reuse=st.booleans())
    def publish(self, data, reuse):
        slot = data.draw(st.sampled_from(self.held))
        self.counter += 1
        page = make_page(b"%d" % (self.counter // 2 if reuse else self.counter), b"%d" % (self.counter // 3))
        named = self.pool.page_of[slot]
        if named is None:
            self.pool.write_tokens(slot, 0, 4)
        done = bool(self.pool.publish_slots([slot], [page]))
        assert self.pool.find_slot((named or page).key) is not None
        assert done == (self.pool.page_of[slot] is page)

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data, keep):
        slot = data.draw(st.sampled_from(self.held))
        self.held.remove(slot)
        self.pool.release_slots([slot], keep=keep)

    @rule(number=st.integers(0, 60))
    def hit(self, number):
        slot = self.pool.find_slot(b"%d" % number)
        if slot is not None:
            self.pool.acquire_slots([slot])
            self.held.append(slot)

    @rule()
    def clear(self):
        clear_pool(self.pool)
        assert self.pool.cached_slots == 0

    @invariant()
    def consistent(self):
        self.pool.check_integrity()
        assert self.pool.used_slots == len(set(self.held))


@pytest.mark.parametrize("policy", [None, "lru", "cost", "a2cr"])
def test_random_operations(policy):
    machine = type("Machine", (PoolMachine,), {"policy": policy})
    run_state_machine_as_test(machine, settings=settings(max_examples=30, stateful_step_count=40, deadline=None))


def test_the_least_recently_released_page_goes_first_and_chains_lose_their_tail_first():
    pool = PagePool(4, 4)
    a, b, c, d = pool.allocate_slots(4)
    for slot, key in ((a, b"a"), (b, b"b"), (c, b"c"), (d, b"d")):
        pool.write_tokens(slot, 0, 4)
        pool.publish_slots([slot], [make_page(key)])
    pool.release_slots([b, a])  # a chain a -> b, tail first
    pool.release_slots([d, c])
    assert pool.allocate_slots(1) == [b]
    assert pool.find_slot(b"a") == a and pool.find_slot(b"b") is None
    assert sorted(pool.allocate_slots(2)) == sorted([a, d])


def test_a_second_page_with_the_same_key_is_not_indexed_and_becomes_free():
    pool = PagePool(2, 4)
    first, second = pool.allocate_slots(2)
    pool.write_tokens(first, 0, 4)
    pool.write_tokens(second, 0, 4)
    assert pool.publish_slots([first], [make_page(b"k")])
    assert not pool.publish_slots([second], [make_page(b"k")])
    pool.release_slots([second])
    assert pool.find_slot(b"k") == first and pool.cached_slots == 0 and pool.available_slots == 1
    pool.check_integrity()
