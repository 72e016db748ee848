"""What leaves a tier first, one case each; `test_tier_index` has the rules under random use."""

from __future__ import annotations

import pytest
from test_tier_index import chain, page_of

from wicore_trt.kv.policy.by_name import make_policy
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.kv.tiers.moves import CopyState


def filled(index: TierIndex, keys: list[bytes], group: str = "global") -> None:
    for key in keys:
        copy = index.reserve_copy(page_of(key, group))
        assert copy is not None
        index.commit_copy(copy)


def left(index: TierIndex, group: str, keys: list[bytes]) -> list[bytes]:
    return [key for key in keys if index.find_copy(group, key) is None]


def test_spare_copies_leave_first_oldest_first() -> None:
    index = TierIndex(10, {"global": 1, "local": 1}, make_policy("lru", 10), primary="global")
    keys = chain(b"A", [0] * 5)
    filled(index, keys)
    filled(index, keys, "local")
    for i in (3, 1, 2):
        index.spare_copies("local", [keys[i]])
    more = chain(b"B", [0] * 4)
    for gone in (keys[3:4], [keys[1], keys[3]], keys[1:4]):
        filled(index, [more.pop(0)])
        assert left(index, "local", keys) == gone and not left(index, "global", keys)
    filled(index, more)
    assert left(index, "global", keys) == keys[4:] and index.evictions == {"window": 3, "capacity": 2}


def test_a_quota_of_everything_leaves_the_choice_to_the_policy() -> None:
    index = TierIndex(4, {"global": 1}, make_policy("lfu", 4), primary="global", quota=1.0)
    often, once = chain(b"A", [0, 0]), [chain(b"A", [i])[0] for i in (1, 2, 3)]
    for _ in range(3):
        index.touch_chain(often)
    filled(index, often)
    for key in once:
        index.touch_chain([key])
        filled(index, [key])
    assert not left(index, "global", often) and index.evictions == {"capacity": 1}


@pytest.mark.parametrize("spare", [False, True])
def test_at_its_quota_a_tenant_loses_spare_copies_then_the_tails_of_its_oldest_chains(spare: bool) -> None:
    index = TierIndex(20, {"global": 1, "local": 1}, make_policy("lru", 20), primary="global", quota=0.5)
    old, new, other = chain(b"A", [0] * 4), chain(b"A", [1] * 5), chain(b"B", [0] * 8)
    for keys in (other, old, new):
        filled(index, keys)
    filled(index, old[:1], "local")
    if spare:
        index.spare_copies("local", [old[0]])
    filled(index, chain(b"A", [2, 2, 2]))
    assert left(index, "global", old) == (old[2:] if spare else old[1:])
    assert left(index, "local", old[:1]) == (old[:1] if spare else [])
    assert not left(index, "global", new) and not left(index, "global", other)


def test_what_a_full_share_could_not_hold_is_not_held_above_a_gap() -> None:
    """A held page keeps its parents in place: beyond the share it is held only if its parent is."""
    index = TierIndex(20, {"global": 1}, make_policy("lru", 20), primary="global", pin_share=0.2)
    first, second = chain(b"A", [0] * 3), chain(b"A", [1] * 5)
    index.pin_keys(first)
    filled(index, first)
    index.pin_keys(second)
    filled(index, second[:4])
    assert index.pinned_slots == 4
    index.unpin_keys(first)
    filled(index, second[4:])
    assert index.pinned_slots == 1


def test_a_dropped_copy_keeps_its_slots_until_its_last_reader_is_done() -> None:
    index = TierIndex(4, {"global": 1}, make_policy("lru", 4), primary="global")
    key = chain(b"A", [0])[0]
    filled(index, [key])
    copy = index.find_copy("global", key)
    assert copy is not None
    index.acquire_copies([copy])
    index.acquire_copies([copy])
    index.drop_copy(copy, "corrupt")
    filled(index, [key])  # written anew meanwhile, elsewhere
    index.release_copies([copy])
    assert copy.state is CopyState.LOST and index.used_slots == 2
    index.release_copies([copy])
    assert copy.state is CopyState.FREE and index.used_slots == 1
    index.check_integrity()
