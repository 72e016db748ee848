"""After a restart the books are filled in bulk: as if each page had been stored again, one after the other."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable

import pytest

from wicore_trt.collector import collection_paused
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.by_name import POLICIES, make_policy
from wicore_trt.kv.policy.cost import CostPolicy
from wicore_trt.kv.policy.policy import ChainPolicy
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.kv.tiers.moves import TierCopy

NEED = {"global": 3, "local": 2}
TENANTS = (b"A" * 16, b"B" * 16, b"C" * 16)
Found = list[tuple[Page, tuple[int, ...]]]


def make_index(
    policy: str, slots: int, quota: float = 1.0, told: Callable[[TierCopy, str], None] = lambda copy, cause: None
) -> TierIndex:
    return TierIndex(slots, NEED, make_policy(policy, slots), primary="global", quota=quota, on_evict=told)


def random_chains(choose: random.Random, tenants: tuple[bytes, ...] = TENANTS, longest: int = 6) -> list[list[Page]]:
    """Global pages of chains that share first pages, each page once, in the chain in which it came first."""
    chains, known = [], []
    for _ in range(choose.randint(1, 8)):
        tenant = choose.choice(tenants)
        above = choose.choice([None, *(page for page in known if page.tenant == tenant)])
        chain = []
        for _ in range(choose.randint(1, longest)):
            index = above.index + 1 if above is not None else 0
            parent = above.key if above is not None else None
            above = Page(choose.randbytes(32), "global", index, parent, tenant)
            chain.append(above)
        known += chain
        chains.append(chain)
    return chains


def placed(choose: random.Random, pages: list[Page], slots: int) -> Found:
    free = choose.sample(range(slots), slots)
    return [(page, tuple(free.pop() for _ in range(NEED[page.group]))) for page in pages]


def local(page: Page) -> Page:
    return Page(page.key, "local", page.index, page.parent, page.tenant)


def one_by_one(index: TierIndex, found: Found) -> None:
    """What `restore` must amount to, but for the slots."""
    for page, _ in found:
        copy = index.reserve_copy(page)
        if copy is not None:
            index.mark_saved(copy)
            index.commit_copy(copy)


def check_groups(policy: ChainPolicy) -> None:
    """Each page that the cost policy knows is open in exactly one group of pages."""
    if isinstance(policy, CostPolicy):
        assert all(group.open > 0 for group in policy._groups)
        assert sum(group.open for group in policy._groups) == len(policy._nodes)


def names(index: TierIndex) -> set[tuple[str, bytes]]:
    return {copy.page.name for copy in index.iterate_copies()}


def order_of_leaving(index: TierIndex, left: list[tuple[str, bytes]], restored: int) -> list[tuple[str, bytes]]:
    """Store new pages until nothing of what was restored is there."""
    number = 0
    while len(left) < restored:
        new = Page(number.to_bytes(32, "little"), "global", 0, None, bytes(16))
        index.touch_chain([new.key])
        copy = index.reserve_copy(new)
        assert copy is not None
        index.commit_copy(copy)
        number += 1
    index.check_integrity()
    return left[:restored]


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("quota", [1.0, 0.999])
@pytest.mark.parametrize("round_", range(5))
def test_the_same_as_one_by_one(policy: str, quota: float, round_: int) -> None:
    """`quota` below 1: every tenant has an order of its own, and none is at its limit."""
    choose, slots = random.Random(), 200
    pages = [page for chain in random_chains(choose) for page in chain]
    for page in choose.sample(pages, len(pages) // 3):
        pages.insert(choose.randrange(len(pages) + 1), local(page))
    for page in choose.sample(pages, len(pages) // 5):  # lost before the restart: gaps in chains, windows alone
        pages.remove(page)
    found = placed(choose, pages, slots)
    left: tuple[list[tuple[str, bytes]], ...] = ([], [])
    indexes = [make_index(policy, slots, quota, lambda c, _, log=log: log.append(c.page.name)) for log in left]
    one_by_one(indexes[0], found)
    indexes[1].restore_pages(found)
    for index in indexes:
        index.check_integrity()
    slow, fast = indexes
    assert not left[0] and not left[1]
    for page, held in found:
        copy = fast.find_copy(page.group, page.key)
        assert copy is not None and copy.ready and copy.saved and copy.page == page and copy.slots == held
    assert names(slow) == names(fast) and slow.pages == fast.pages
    assert (slow.used_slots, slow.unsaved_slots, list(slow._spare)) == (
        fast.used_slots,
        fast.unsaved_slots,
        list(fast._spare),
    )
    for tag in TENANTS:
        orders = [t.order for index in indexes if (t := index._tenants.get(tag)) is not None and t.order is not None]
        assert not orders or orders[0].choose_victims(len(orders[0])) == orders[1].choose_victims(len(orders[1]))
    for index in indexes:
        index._quota_slots = slots  # the one tenant that follows may push everything out
    assert order_of_leaving(slow, left[0], len(found)) == order_of_leaving(fast, left[1], len(found))


@pytest.mark.parametrize("policy", POLICIES)
def test_children_leave_first_in_whatever_order_pages_were_written(policy: str) -> None:
    choose, slots = random.Random(), 200
    pages = [page for chain in random_chains(choose) for page in chain]
    choose.shuffle(pages)
    left: list[tuple[str, bytes]] = []
    index = make_index(policy, slots, told=lambda copy, cause: left.append(copy.page.name))
    index.restore_pages(placed(choose, pages, slots))
    index.check_integrity()
    gone: set[bytes] = set()
    parents = {page.key: page.parent for page in pages}
    for _, key in order_of_leaving(index, left, len(pages)):
        assert parents[key] not in gone
        gone.add(key)


@pytest.mark.parametrize("round_", range(10))
def test_what_passes_a_quota_leaves_tails_of_the_oldest_chains_first(round_: int) -> None:
    """As one by one, where no chain alone fills the quota."""
    choose = random.Random()
    chains, slots = random_chains(choose, TENANTS[:2], longest=3), 3 * 24
    for at, chain in enumerate(chains):  # no shared pages: the oldest chain stays the oldest
        chains[at] = [Page(p.key, p.group, i, chain[i - 1].key if i else None, p.tenant) for i, p in enumerate(chain)]
    found = placed(choose, [page for chain in chains for page in chain], slots)
    left: list[TierCopy] = []
    slow, fast = make_index("cost", slots, 0.2), make_index("cost", slots, 0.2, lambda copy, _: left.append(copy))
    one_by_one(slow, found)
    fast.restore_pages(found)
    fast.check_integrity()
    assert names(slow) == names(fast) and slow.evictions == fast.evictions
    assert {copy.page.name for copy in left} == {page.name for page, _ in found} - names(fast)


@pytest.mark.parametrize("round_", range(10))
def test_no_tenant_passes_its_quota_nor_loses_more_than_it_must(round_: int) -> None:
    choose, slots = random.Random(), 400
    pages = [page for chain in random_chains(choose) for page in chain]
    pages += [local(page) for page in choose.sample(pages, len(pages) // 2)]
    choose.shuffle(pages)
    had = {tag: sum(NEED[page.group] for page in pages if page.tenant == tag) for tag in TENANTS}
    index = make_index("cost", slots, 0.05)
    index.restore_pages(placed(choose, pages, slots))
    index.check_integrity()
    for tag in TENANTS:
        has = sum(len(copy.slots) for copy in index.iterate_copies() if copy.page.tenant == tag)
        assert min(had[tag], 20 - sum(NEED.values()) + 1) <= has <= 20
    keys = {key for group, key in names(index) if group == "global"}
    stored = {page.key: page.parent for page in pages if page.group == "global"}
    assert all(stored[key] is None or stored[key] in keys for key in keys), "a page stayed without its parent"


def test_what_does_not_fit_is_left_out() -> None:
    pages = [Page(bytes([i]) * 32, "global", 0, None, TENANTS[0]) for i in range(4)]
    unknown = Page(bytes(32), "other", 0, None, TENANTS[0])
    good, again = (pages[0], (0, 5, 8)), (pages[0], (1, 2, 3))
    index = make_index("cost", 9)
    index.restore_pages([good, again, (pages[1], (1, 2)), (pages[2], (1, 2, 9)), (unknown, (4,))])
    assert [(copy.page, copy.slots) for copy in index.iterate_copies()] == [good] and index.used_slots == 3
    index.check_integrity()
    small = make_index("cost", 9, 0.3)
    window = local(pages[3])
    small.restore_pages([(window, (4, 5)), good])
    assert [copy.page for copy in small.iterate_copies()] == [window], (
        "a page that fits no quota drove out one that does"
    )


def test_pages_that_name_each_other_as_parents_can_leave() -> None:
    """Only a damaged index says so."""
    a, b = b"a" * 32, b"b" * 32
    index = make_index("cost", 6)
    index.restore_pages(
        [(Page(a, "global", 1, b, TENANTS[0]), (0, 1, 2)), (Page(b, "global", 2, a, TENANTS[0]), (3, 4, 5))]
    )
    for i in range(2):
        assert index.reserve_copy(Page(bytes([i]) * 32, "global", 0, None, TENANTS[0])) is not None
    assert index.evictions == {"capacity": 2}


@pytest.mark.parametrize("policy", POLICIES)
def test_restored_pages_are_used_and_evicted_like_others(policy: str) -> None:
    """Enough traffic for the policies to learn; the cost policy's groups must end with their pages."""
    choose, slots = random.Random(), 90
    known = {page.key: page for chain in random_chains(choose, longest=3) for page in chain}
    index = make_index(policy, slots)
    index.restore_pages(placed(choose, list(known.values())[: slots // 3], slots))
    check_groups(index.policy)
    for _ in range(300):
        known.update({page.key: page for page in random_chains(choose, longest=4)[0]})
        path = [choose.choice(list(known.values())[-40:])]
        while path[0].parent is not None:
            path.insert(0, known[path[0].parent])
        index.touch_chain([page.key for page in path])
        for page in path:
            if index.find_copy("global", page.key) is None and (copy := index.reserve_copy(page)) is not None:
                index.commit_copy(copy)
    index.check_integrity()
    check_groups(index.policy)


def test_collection_is_as_before() -> None:
    index = make_index("cost", 9)
    states = []

    def found() -> Found:
        states.append(gc.isenabled())
        return []

    index.restore_pages(page for page in found())
    assert gc.isenabled()
    with pytest.raises(RuntimeError), collection_paused():
        states.append(gc.isenabled())
        raise RuntimeError
    assert gc.isenabled() and states[-1] is False
