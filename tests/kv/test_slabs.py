"""Slabs against a slow reference, and room for several groups at once (I8)."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from wicore_trt.arithmetic import ITEM_BYTES, div_ceil, pages_per_slab
from wicore_trt.kv.sizing import MODELS, Geometry, builtin_spec
from wicore_trt.kv.slabs import Slabs
from wicore_trt.model.spec import GLOBAL, LOCAL

PAGES = {GLOBAL: 6, LOCAL: 4}


class SlabMachine(RuleBasedStateMachine):
    """The reference knows which bytes are whose: pages of 2 and 3 bytes in slabs of 12."""

    size = {group: 12 // count for group, count in PAGES.items()}

    def __init__(self) -> None:
        super().__init__()
        self.slabs = Slabs(3, PAGES)
        self.used: dict[str, set[int]] = {GLOBAL: set(), LOCAL: set()}
        self.cached: dict[str, set[int]] = {GLOBAL: set(), LOCAL: set()}

    def held(self, group: str) -> set[int]:
        return {slot // PAGES[group] for slot in self.used[group]}

    def could_have(self, need: dict[str, int]) -> bool:
        """By trying all ways to divide the slabs in which nothing is used."""
        open_slabs = 3 - len(self.held(GLOBAL) | self.held(LOCAL))
        beside = {g: PAGES[g] * len(self.held(g)) - len(self.used[g]) for g in PAGES}
        return any(
            need[GLOBAL] <= beside[GLOBAL] + n * PAGES[GLOBAL]
            and need[LOCAL] <= beside[LOCAL] + (open_slabs - n) * PAGES[LOCAL]
            for n in range(open_slabs + 1)
        )

    @rule(group=st.sampled_from((GLOBAL, LOCAL)), count=st.integers(0, 20))
    def take(self, group, count):
        count = min(count, self.slabs.free_slots(group))
        before, pinned = self.slabs.would_pin(group, count), len(self.held(group))
        slots = self.slabs.take_slots(group, count)
        assert len(set(slots)) == count and not set(slots) & (self.used[group] | self.cached[group])
        self.used[group] |= set(slots)
        assert len(self.held(group)) == pinned + before

    @precondition(lambda self: any(self.used.values()))
    @rule(data=st.data())
    def unpin(self, data):
        group, slot = data.draw(st.sampled_from([(g, s) for g in PAGES for s in sorted(self.used[g])]))
        self.slabs.unpin_slot(group, slot)
        self.used[group].remove(slot)
        self.cached[group].add(slot)

    @precondition(lambda self: any(self.cached.values()))
    @rule(data=st.data(), again=st.booleans())
    def leave_or_pin(self, data, again):
        group, slot = data.draw(st.sampled_from([(g, s) for g in PAGES for s in sorted(self.cached[g])]))
        self.cached[group].remove(slot)
        if again:
            self.slabs.pin_slot(group, slot)
            self.used[group].add(slot)
        else:
            self.slabs.return_slot(group, slot)

    @rule(chain=st.integers(0, 20), local=st.integers(0, 14))
    def ask(self, chain, local):
        assert self.slabs.can_take({GLOBAL: chain, LOCAL: local}) == self.could_have({GLOBAL: chain, LOCAL: local})

    @invariant()
    def consistent(self):
        self.slabs.check_integrity({g: (self.used[g], self.cached[g]) for g in PAGES})
        taken = [
            byte
            for group in PAGES
            for slot in self.used[group] | self.cached[group]
            for byte in range(slot * self.size[group], (slot + 1) * self.size[group])
        ]
        assert len(taken) == len(set(taken)), "a byte is in two pages"
        for group in PAGES:
            most = next(n for n in range(40) if not self.could_have({GLOBAL: 0, LOCAL: 0, group: n + 1}))
            assert self.slabs.available_slots(group) == most


def test_random_operations():
    run_state_machine_as_test(SlabMachine, settings=settings(max_examples=50, stateful_step_count=40, deadline=None))


@pytest.mark.parametrize("dtype", list(ITEM_BYTES))
@pytest.mark.parametrize("model", MODELS)
def test_slabs_of_all_models_are_a_small_part_of_their_memory(model, dtype):
    """The memory of eight windows has at least 50 slabs, and no byte of a slab is in no page."""
    geometry = Geometry.from_spec(builtin_spec(model), 32, dtype)
    pages = pages_per_slab(geometry.page_bytes)
    assert {pages[group] * size for group, size in geometry.page_bytes.items()} == {geometry.slab_bytes}
    windows = 8 * (builtin_spec(model).sliding_window // 32 + 1) * geometry.page_bytes[LOCAL]
    assert div_ceil(windows, geometry.slab_bytes) >= 25
    assert geometry.slab_bytes <= 130 << 20


@given(counts=st.lists(st.integers(0, 30), min_size=2, max_size=2))
def test_a_pool_of_its_own_is_one_slab(counts):
    slabs = Slabs(1, {"x": 30})
    first, second = counts
    taken = slabs.take_slots("x", first)
    assert taken == list(range(first)) and slabs.available_slots("x") == slabs.free_slots("x") == 30 - first
    assert slabs.can_take({"x": second}) == (first + second <= 30)
