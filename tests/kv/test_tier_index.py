"""The books of a tier under random use, against a model that knows only what each call promises."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field

import hypothesis.strategies as st
import pytest
from hypothesis import settings
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.by_name import make_policy
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.kv.tiers.moves import CopyState, TierCopy

BOTH = {"global": 2, "local": 3}
LAYOUTS = (BOTH, BOTH, {"global": 1}, {"local": 1})
TENANTS = (b"A", b"B", b"C")
PATHS = st.lists(st.integers(0, 2), min_size=1, max_size=5)
TENANT, PICK = st.sampled_from(TENANTS), st.integers(0, 1 << 16)
SPACE = ("window", "capacity", "quota")


def chain(tenant: bytes, path: list[int]) -> list[bytes]:
    return [tenant + bytes(path[: i + 1]) for i in range(len(path))]


def page_of(key: bytes, group: str) -> Page:
    return Page(key, group, len(key) - 2, key[:-1] if len(key) > 2 else None, key[:1])


@dataclass
class Model:
    """What is where. `links`: (child, parent) pairs that the index was shown while both pages were here."""

    copies: dict[tuple[str, bytes], TierCopy] = field(default_factory=dict)
    writing: set[TierCopy] = field(default_factory=set)
    lost: dict[TierCopy, bool] = field(default_factory=dict)  # to whether `reclaim` frees it
    spare: set[bytes] = field(default_factory=set)
    links: set[tuple[bytes, bytes]] = field(default_factory=set)
    sessions: list[list[bytes]] = field(default_factory=list)
    evictions: Counter[str] = field(default_factory=Counter)


class Tier(RuleBasedStateMachine):
    @initialize(
        layout=st.sampled_from(LAYOUTS),
        policy=st.sampled_from(["lru", "a2cr", "cost"]),
        slots=st.integers(4, 24),
        quota=st.sampled_from([1.0, 1.0, 0.5, 0.8]),
        pin_share=st.sampled_from([0.0, 0.3, 1.0]),
    )
    def start(self, layout: dict[str, int], policy: str, slots: int, quota: float, pin_share: float) -> None:
        self.need = layout
        self.groups = tuple(layout)
        self.primary = self.groups[0]
        self.slots, self.quota, self.pin = slots, int(quota * slots), int(pin_share * slots)
        self.left: list[tuple[TierCopy, str]] = []
        self.index = TierIndex(
            slots,
            layout,
            make_policy(policy, slots),
            primary=self.primary,
            quota=quota,
            pin_share=pin_share,
            on_evict=lambda copy, cause: self.left.append((copy, cause)),
        )
        self.model = Model()

    # --- the model's view ----------------------------------------------------------------------------------------

    def here(self, key: bytes) -> list[TierCopy]:
        return [copy for group in self.groups if (copy := self.model.copies.get((group, key))) is not None]

    def idle(self, key: bytes) -> bool:
        return key not in self.held and not any(c in self.model.writing or c.readers for c in self.here(key))

    def look_at_pins(self) -> None:
        self.held = self.index.inspect().pinned

    def chained(self) -> list[bytes]:
        return [key for group, key in self.model.copies if group == self.primary]

    def spare_to_leave(self, page: Page, tenant: bytes | None) -> set[bytes]:
        return {k for k in self.model.spare if k != page.key and self.idle(k) and tenant in (None, k[:1])}

    def used(self, tenant: bytes | None = None) -> int:
        return sum(len(c.slots) for (_, key), c in self.model.copies.items() if tenant in (None, key[:1]))

    def full(self, page: Page) -> bytes | None:
        """The tenant that must make room for this page, or None where anybody may."""
        limited = self.quota < self.slots and self.used(page.tenant) + self.need[page.group] > self.quota
        return page.tenant if limited else None

    def forget(self, copy: TierCopy) -> None:
        group, key = copy.page.name
        del self.model.copies[group, key]
        self.model.writing.discard(copy)
        if group == self.primary:
            self.model.links = {link for link in self.model.links if key not in link}
        self.model.spare.discard(key)
        if self.here(key) and (self.primary, key) not in self.model.copies:
            self.model.spare.add(key)

    def explicit(self, expected: list[TierCopy], cause: str) -> None:
        """Exactly these copies left, by a call that named them."""
        assert self.left == [(copy, cause) for copy in expected]
        self.left.clear()
        for copy in expected:
            self.forget(copy)

    def made_room(self, page: Page) -> None:
        """Check each copy that left for space against what was legal at that moment."""
        for at, (copy, cause) in enumerate(self.left):
            key, among = copy.page.key, self.full(page)
            again = at > 0 and self.left[at - 1][0].page.key == key
            assert cause in SPACE and among in (None, copy.page.tenant), "another tenant paid for the quota"
            assert self.idle(key), "evicted in use"
            if cause == "window":
                assert key in self.spare_to_leave(page, among) and copy.page.group != self.primary
            elif not again:
                assert (cause == "quota") == (among is not None)
                assert not self.spare_to_leave(page, among), "a spare copy was to leave first"
                assert key not in (page.key, page.parent) and (self.primary, key) in self.model.copies
                assert not any(parent == key for _, parent in self.model.links), "a parent left before its child"
                together = self.left[at : at + len(self.here(key))]
                assert {copy for copy, _ in together} == set(self.here(key)), "half a node left"
            assert copy.state is CopyState.FREE
            self.model.evictions[cause] += 1
            self.forget(copy)
        self.left.clear()

    # --- writing -------------------------------------------------------------------------------------------------

    def reserve_page(self, page: Page) -> TierCopy | None:
        self.look_at_pins()
        copy = self.index.reserve_copy(page)
        self.made_room(page)
        if copy is None:
            among = self.full(page)
            assert among is not None or self.used() + self.lost_slots() + self.need[page.group] > self.slots
            assert not self.spare_to_leave(page, among), "refused beside a spare copy"
            if self.need[page.group] <= self.quota:
                for key in self.chained():
                    mine = among in (None, key[:1]) and key not in (page.key, page.parent)
                    leaf = not any(other[:-1] == key for other in self.chained())
                    assert not (mine and leaf and self.idle(key)), "refused beside a page that could leave"
            return None
        assert copy.state is CopyState.WRITING and len(copy.slots) == self.need[page.group]
        self.model.copies[page.name] = copy
        self.model.writing.add(copy)
        if page.group == self.primary:
            self.model.spare.discard(page.key)
            if page.parent is not None and (self.primary, page.parent) in self.model.copies:
                self.model.links.add((page.key, page.parent))
        elif (self.primary, page.key) not in self.model.copies:
            self.model.spare.add(page.key)
        return copy

    @rule(tenant=TENANT, path=PATHS, which=PICK)
    def reserve(self, tenant: bytes, path: list[int], which: int) -> None:
        page = page_of(chain(tenant, path)[-1], self.groups[which % len(self.groups)])
        if page.name not in self.model.copies:
            self.reserve_page(page)

    @rule(tenant=TENANT, paths=st.lists(PATHS, min_size=1, max_size=6), windows=st.booleans(), seen=st.booleans())
    def store_chains(self, tenant: bytes, paths: list[list[int]], windows: bool, seen: bool) -> None:
        for path in paths:
            if seen:
                self.touch(tenant, path, None)
            self.store_chain(chain(tenant, path), windows)

    def store_chain(self, keys: list[bytes], windows: bool) -> None:
        for key in keys:
            for group in self.groups if windows or key == keys[-1] else self.groups[:1]:
                if (group, key) not in self.model.copies and (copy := self.reserve_page(page_of(key, group))):
                    self.index.commit_copy(copy)
                    self.model.writing.remove(copy)

    def some(self, pick: int, *states: CopyState, readers: bool = False) -> TierCopy | None:
        found = [c for c in (*self.model.copies.values(), *self.model.lost) if c.state in states]
        found = [c for c in found if c.readers or not readers]
        return found[pick % len(found)] if found else None

    @rule(pick=PICK)
    def commit(self, pick: int) -> None:
        copy = self.some(pick, CopyState.WRITING)
        if copy is not None:
            self.index.commit_copy(copy)
            self.model.writing.remove(copy)
            assert copy.ready

    @rule(pick=PICK, touched=st.booleans())
    def abort(self, pick: int, touched: bool) -> None:
        copy = self.some(pick, CopyState.WRITING)
        if copy is not None:
            self.index.abort_copy(copy, "failed", touched=touched)
            self.explicit([copy], "failed")
            if touched:
                self.model.lost[copy] = True

    @rule(pick=PICK, how=st.sampled_from(["reclaim", "commit", "abort"]))
    def end_of_lost(self, pick: int, how: str) -> None:
        """A write that was given up ends after all, well or not."""
        lost = [copy for copy, by_reclaim in self.model.lost.items() if by_reclaim]
        if lost:
            copy = lost[pick % len(lost)]
            self.index.abort_copy(copy, "again", touched=True)
            assert copy.state is CopyState.LOST
            {"reclaim": self.index.reclaim_slots, "commit": self.index.commit_copy}.get(
                how, lambda c: self.index.abort_copy(c, "failed")
            )(copy)
            assert copy.state is CopyState.FREE
            del self.model.lost[copy]

    # --- reading -------------------------------------------------------------------------------------------------

    @rule(pick=PICK)
    def acquire(self, pick: int) -> None:
        copy = self.some(pick, CopyState.READY)
        if copy is not None:
            self.index.acquire_copies([copy])

    @rule(pick=PICK)
    def release(self, pick: int) -> None:
        copy = self.some(pick, CopyState.READY, CopyState.LOST, readers=True)
        if copy is not None:
            self.index.release_copies([copy])
            if copy in self.model.lost and not copy.readers:
                assert copy.state is CopyState.FREE
                del self.model.lost[copy]

    @rule(tenant=TENANT, path=PATHS, signal=st.one_of(st.none(), st.floats(0, 3)))
    def touch(self, tenant: bytes, path: list[int], signal: float | None) -> None:
        keys = chain(tenant, path)
        self.index.touch_chain(keys, None if signal is None else [signal] * len(keys))
        here = set(self.chained())
        self.model.links |= {(child, parent) for parent, child in itertools.pairwise(keys) if {child, parent} <= here}

    # --- leaving -------------------------------------------------------------------------------------------------

    @rule(pick=PICK)
    def drop(self, pick: int) -> None:
        copy = self.some(pick, CopyState.READY)
        if copy is not None:
            self.dropped([copy], lambda: self.index.drop_copy(copy, "corrupt"), "corrupt")

    @rule(tenant=TENANT, path=PATHS)
    def drop_key(self, tenant: bytes, path: list[int]) -> None:
        key = chain(tenant, path)[-1]
        ready = [copy for copy in self.index_order(key) if copy.ready]
        self.dropped(ready, lambda: self.index.drop_key(key, "ttl"), "ttl")

    def index_order(self, key: bytes) -> list[TierCopy]:
        return sorted(self.here(key), key=list(self.model.copies.values()).index)

    def dropped(self, copies: list[TierCopy], call: object, cause: str) -> None:
        assert callable(call)
        call()
        self.explicit(copies, cause)
        self.model.evictions[cause] += len(copies)
        for copy in copies:
            assert copy.state is (CopyState.LOST if copy.readers else CopyState.FREE)
            if copy.readers:
                self.model.lost[copy] = False

    @rule(tenant=TENANT, path=PATHS)
    def spare(self, tenant: bytes, path: list[int]) -> None:
        for key in chain(tenant, path):
            self.index.spare_copies("local", [key])
            if self.primary != "local" and ("local", key) in self.model.copies:
                self.model.spare.add(key)

    @rule(tenant=TENANT, path=PATHS)
    def hold(self, tenant: bytes, path: list[int]) -> None:
        keys = chain(tenant, path)
        self.index.pin_keys(keys)
        self.model.sessions.append(keys)
        state = self.index.inspect()
        for key in keys:
            if key in state.slots and key not in state.pinned:
                assert self.index.pinned_slots + state.slots[key] > self.pin, "there was room to pin the page"
                break

    @precondition(lambda self: self.model.sessions)
    @rule(pick=PICK)
    def unhold(self, pick: int) -> None:
        self.index.unpin_keys(self.model.sessions.pop(pick % len(self.model.sessions)))

    @rule(slots=st.integers(0, 20))
    def cold(self, slots: int) -> None:
        self.look_at_pins()
        everything = self.index.find_cold(1 << 30)
        some = self.index.find_cold(slots)
        assert some == everything[: len(some)]
        assert some == everything or sum(len(copy.slots) for copy in some) >= slots
        assert all(c.ready and not c.saved and self.idle(c.page.key) for c in everything)
        place = {copy.page.key: i for i, copy in enumerate(everything)}
        assert all(place[a] < place[b] for a, b in self.model.links if a in place and b in place)
        for key in self.chained():
            below = [other for other in self.chained() if other.startswith(key)]
            if all(map(self.idle, below)):
                assert {copy for copy in self.here(key) if not copy.saved} <= set(everything), "never to be saved"

    @rule(pick=PICK)
    def mark_saved(self, pick: int) -> None:
        copy = self.some(pick, *CopyState)
        if copy is not None:
            self.index.mark_saved(copy)
            assert copy.saved

    # --- always --------------------------------------------------------------------------------------------------

    def lost_slots(self) -> int:
        return sum(len(copy.slots) for copy in self.model.lost)

    @invariant()
    def agrees(self) -> None:
        model, index = self.model, self.index
        index.check_integrity()
        assert not self.left, "a copy left that nobody asked for"
        assert {copy.page.name: copy for copy in index.iterate_copies()} == model.copies
        assert all(index.find_copy(*name) is copy for name, copy in model.copies.items())
        slots = [slot for copy in (*model.copies.values(), *model.lost) for slot in copy.slots]
        assert len(slots) == len(set(slots)) == index.used_slots, "slots are shared or lost"
        assert all(self.used(tenant) <= self.quota for tenant in TENANTS)
        assert index.evictions == model.evictions
        wanted = {key for keys in model.sessions for key in keys}
        self.look_at_pins()
        assert self.held <= wanted and index.pinned_slots <= self.pin
        assert self.pin < self.slots or self.held == wanted & {key for _, key in model.copies}

    def teardown(self) -> None:
        """Everything that was taken can be given back."""
        if not hasattr(self, "index"):
            return
        for keys in self.model.sessions:
            self.index.unpin_keys(keys)
        for copy in [*self.model.copies.values(), *self.model.lost]:
            if copy.state is CopyState.WRITING:
                self.index.abort_copy(copy, "end")
            elif self.model.lost.get(copy):
                self.index.reclaim_slots(copy)
            while copy.readers:
                self.index.release_copies([copy])
            if copy.ready:
                self.index.drop_copy(copy, "end")
        self.index.check_integrity()
        assert (
            self.index.used_slots == self.index.pinned_slots == self.index.unsaved_slots == len(self.index.policy) == 0
        )


TestTier = Tier.TestCase
TestTier.settings = settings(max_examples=60, stateful_step_count=50, deadline=None)


@pytest.mark.long
def test_tier_long() -> None:
    run_state_machine_as_test(Tier, settings=settings(max_examples=2000, stateful_step_count=80, deadline=None))


STATES = list(itertools.product(CopyState, CopyState))


@pytest.mark.parametrize(("old", "new"), STATES, ids=lambda state: state.value)
def test_illegal_transitions_are_refused(old: CopyState, new: CopyState) -> None:
    legal = {("writing", "ready"), ("writing", "lost"), ("writing", "free")}
    legal |= {("ready", "lost"), ("ready", "free"), ("lost", "free")}
    copy = TierCopy(page_of(b"A0", "global"), (0,), old)
    if (old.value, new.value) in legal:
        copy.change_state(new)
        assert copy.state is new
    else:
        with pytest.raises(AssertionError):
            copy.change_state(new)
        assert copy.state is old


@pytest.mark.parametrize(
    ("state", "call", "legal"),
    [
        (state, call, state in legal)
        for call, legal in {
            "commit_copy": (CopyState.WRITING, CopyState.LOST),
            "abort_copy": (CopyState.WRITING, CopyState.LOST),
            "reclaim_slots": (CopyState.LOST,),
            "acquire_copies": (CopyState.READY,),
            "drop_copy": (CopyState.READY,),
            "release_copies": (),
        }.items()
        for state in CopyState
    ],
)
def test_calls_in_the_wrong_state_are_refused_and_change_nothing(state: CopyState, call: str, legal: bool) -> None:
    index = TierIndex(4, {"global": 2}, make_policy("lru", 4), primary="global")
    copy = index.reserve_copy(page_of(b"A0", "global"))
    assert copy is not None
    if state is CopyState.READY:
        index.commit_copy(copy)
    elif state is not CopyState.WRITING:
        index.abort_copy(copy, "failed", touched=state is CopyState.LOST)
    assert copy.state is state
    arguments = (
        (copy, "cause")
        if call in ("abort_copy", "drop_copy")
        else ([copy] if call in ("acquire_copies", "release_copies") else copy,)
    )
    if legal:
        getattr(index, call)(*arguments)
    else:
        with pytest.raises(AssertionError):
            getattr(index, call)(*arguments)
        assert copy.state is state
    index.check_integrity()


def test_the_policy_of_a_full_tier_knows_how_many_pages_it_holds() -> None:
    """Slots are not pages: a policy that takes itself for larger than it is compares itself with an LRU that finds more
    than any order could in this tier."""
    policy = make_policy("cost", 600)
    index = TierIndex(600, {"global": 3, "local": 16}, policy, primary="global")
    for number in range(60):
        for group in ("global", "local"):
            copy = index.reserve_copy(page_of(b"A" + bytes([number]), group))
            assert copy is not None
            index.commit_copy(copy)
    assert 0 <= policy.capacity - len(policy) <= 1 and len(policy) == 600 // 19
    index.check_integrity()
