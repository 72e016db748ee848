"""Every policy: books, victims and chains under random use (I9)."""

from __future__ import annotations

import random

import pytest

from wicore_trt.errors import ConfigError
from wicore_trt.kv.policy.by_name import DEFAULT_POLICY, POLICIES, make_policy
from wicore_trt.kv.policy.policy import ChainPolicy, LRUPolicy

SEEDS = range(4)


def chains(rng: random.Random, count: int) -> list[list[bytes]]:
    """Random chains that share prefixes."""
    known: list[list[bytes]] = [[]]
    for _ in range(count):
        base = rng.choice(known)
        base = base[: rng.randint(0, len(base))]
        known.append(base + [rng.randbytes(8) for _ in range(rng.randint(1, 6))])
    return known[1:]


def evict(policy: ChainPolicy, capacity: int) -> list[bytes]:
    excess = len(policy) - capacity
    victims = policy.choose_victims(excess) if excess > 0 else []
    assert victims is not None
    for key in victims:
        policy.remove_page(key)
    return victims  # type: ignore[return-value]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", POLICIES)
def test_books_hold_under_random_use(name: str, seed: int) -> None:
    rng = random.Random(seed)
    capacity = rng.randint(5, 60)
    policy = make_policy(name, capacity)
    pool, pinned, inside = chains(rng, 60), [], set()
    for step in range(600):
        chain = rng.choice(pool)
        policy.touch_chain(chain, [rng.random() * 2 for _ in chain] if rng.random() < 0.5 else None)
        policy.add_pages([key for key in chain if key not in policy])
        inside.update(chain)
        if rng.random() < 0.3 and len(pinned) < 3:
            policy.pin_pages(chain)
            pinned.append(chain)
        elif pinned:
            policy.unpin_pages(pinned.pop(rng.randrange(len(pinned))))
        excess = len(policy) - capacity
        victims = policy.choose_victims(excess) if excess > 0 else []
        held = {key for chain in pinned for key in chain}
        if victims is None:
            assert len(inside - held) < excess
        else:
            assert not held & set(victims)
            for key in victims:
                policy.remove_page(key)
                inside.remove(key)
        if inside - held and rng.random() < 0.1:
            leaf = policy.choose_victims(1)
            assert leaf is None or leaf[0] in inside
        assert len(policy) == len(inside)
        assert all(key in policy for key in inside)
        if step % 20 == 0:
            policy.check_integrity()
    policy.check_integrity()


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("name", POLICIES)
def test_children_leave_before_parents(name: str, seed: int) -> None:
    rng = random.Random(seed)
    policy = make_policy(name, 40)
    parent: dict[bytes, bytes | None] = {}
    for chain in rng.choices(chains(rng, 80), k=500):
        parent.update(zip(chain, [None, *chain[:-1]], strict=True))
        policy.touch_chain(chain)
        policy.add_pages([key for key in chain if key not in policy])
        evict(policy, 40)
        assert all(above is None or above in policy for key, above in parent.items() if key in policy)


@pytest.mark.parametrize("name", POLICIES)
def test_victims_are_all_or_none_and_change_nothing(name: str) -> None:
    policy = make_policy(name, 10)
    policy.touch_chain([b"a", b"b", b"c", b"d"])
    policy.add_pages([b"a", b"b", b"c", b"d"])
    policy.pin_pages([b"a", b"b"])
    assert policy.choose_victims(3) is None
    assert policy.choose_victims(2) == [b"d", b"c"]
    assert policy.choose_victims(2) == [b"d", b"c"], "asking twice gives the same answer"
    assert policy.choose_victims(1, {b"d"}) is None, "a protected child protects its parents"
    assert len(policy) == 4
    policy.unpin_pages([b"a", b"b"])
    assert policy.choose_victims(4) == [b"d", b"c", b"b", b"a"]
    policy.check_integrity()


@pytest.mark.parametrize("name", POLICIES)
def test_generated_pages_need_no_touch(name: str) -> None:
    policy = make_policy(name, 10)
    policy.touch_chain([b"a", b"b"])
    policy.add_pages([b"a", b"b"])
    policy.add_pages([b"c", b"d"], parent=b"b")
    policy.check_integrity()
    assert policy.choose_victims(2) == [b"d", b"c"]
    policy.touch_chain([])
    policy.touch_chain([b"a", b"b", b"c", b"d", b"e"])
    policy.check_integrity()


@pytest.mark.parametrize("name", POLICIES)
def test_memory_is_bounded_and_runs_are_equal(name: str) -> None:
    def run() -> tuple[int, list[bytes]]:
        rng, policy, gone = random.Random(7), make_policy(name, 50), []
        for i in range(3000):
            chain = [b"root", *(f"{i}.{j}".encode() for j in range(rng.randint(1, 5)))]
            policy.touch_chain(chain)
            policy.add_pages([key for key in chain if key not in policy])
            gone += evict(policy, 50)
        return len(policy._nodes), gone

    known, gone = run()
    assert known <= 50 * 5 + 10
    assert run()[1] == gone


def test_lru_evicts_the_least_recent_chain_deepest_first() -> None:
    policy = LRUPolicy(10)
    for chain in ([b"s", b"a1", b"a2"], [b"s", b"b1"], [b"s", b"a1", b"a3"]):
        policy.touch_chain(chain)
        policy.add_pages([key for key in chain if key not in policy])
    assert policy.choose_victims(5) == [b"a2", b"b1", b"a3", b"a1", b"s"]


def test_an_unknown_policy_is_a_config_error() -> None:
    assert DEFAULT_POLICY in POLICIES
    with pytest.raises(ConfigError, match="Choose one of"):
        make_policy("clock", 10)
