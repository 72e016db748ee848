"""PagePool against its invariant under random operations, and its eviction order."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from wicore_trt.kv.pool import PagePool


class PoolMachine(RuleBasedStateMachine):
    """Random legal operations; a dictionary of held slots is the oracle."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(7)
        self.held: list[int] = []
        self.counter = 0

    @rule(count=st.integers(0, 9))
    def allocate(self, count):
        available = self.pool.available
        slots = self.pool.allocate(count)
        if count > available:
            assert slots is None and self.pool.available == available
            return
        assert len(set(slots)) == count and not set(slots) & set(self.held), "a held slot was handed out"
        self.held += slots

    @precondition(lambda self: self.held)
    @rule(data=st.data(), reuse=st.booleans())
    def publish(self, data, reuse):
        slot = data.draw(st.sampled_from(self.held))
        self.counter += 1
        key = b"%d" % (self.counter // 2 if reuse else self.counter)
        named = self.pool._key_of[slot]
        self.pool.publish(slot, key)
        assert self.pool.find(named or key) is not None

    @precondition(lambda self: self.held)
    @rule(data=st.data(), keep=st.booleans())
    def release(self, data, keep):
        slot = data.draw(st.sampled_from(self.held))
        self.held.remove(slot)
        self.pool.release([slot], keep=keep)

    @rule(number=st.integers(0, 60))
    def hit(self, number):
        slot = self.pool.find(b"%d" % number)
        if slot is not None:
            self.pool.acquire(slot)
            self.held.append(slot)

    @rule()
    def clear(self):
        self.pool.clear()
        assert self.pool.cached == 0

    @invariant()
    def consistent(self):
        self.pool.check_integrity()
        assert self.pool.used == len(set(self.held))


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


def test_the_least_recently_released_page_goes_first_and_chains_lose_their_tail_first():
    pool = PagePool(4)
    a, b, c, d = pool.allocate(4)
    for slot, key in ((a, b"a"), (b, b"b"), (c, b"c"), (d, b"d")):
        pool.publish(slot, key)
    pool.release([b, a])  # a chain a -> b, tail first
    pool.release([d, c])
    assert pool.allocate(1) == [b]
    assert pool.find(b"a") == a and pool.find(b"b") is None
    assert pool.allocate(2) == [a, d]


def test_a_second_page_with_the_same_key_is_not_indexed_and_becomes_free():
    pool = PagePool(2)
    first, second = pool.allocate(2)
    pool.publish(first, b"k")
    pool.publish(second, b"k")
    pool.release([second])
    assert pool.find(b"k") == first and pool.cached == 0 and pool.available == 1
    pool.check_integrity()
