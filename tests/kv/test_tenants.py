"""What one tenant made no other one finds, in no tier; and a tenant that floods takes no more than its quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from campaign import SLOT, Shape, Stack

from wicore_trt.kv.sequence_pages import SequencePages
from wicore_trt.model.spec import GLOBAL, LOCAL

SEED = int.from_bytes(os.urandom(4), "little")
SALTS = ["", "a", "A", "a ", "a\0", "aa", "ab", "b", "ä", "a\u0308", "0", "00", "x" * 200, "x" * 201]
PAGES = {GLOBAL: 300, LOCAL: 300}
SHARED = 16


def names(stack: Stack, tokens: list[int], salt: str) -> list[bytes]:
    """What a tenant's pages of a prompt are called."""
    pages = SequencePages(stack.manager.chain.derive_names("", salt))
    stack.manager.find_prefix(pages, [*tokens, 2])
    return pages.keys


def usable(stack: Stack, tokens: list[int], salt: str) -> int:
    """Tokens that a request would find on the device or be planned to load."""
    pages = SequencePages(stack.manager.chain.derive_names("", salt))
    hit = stack.manager.find_prefix(pages, [*tokens, 2])
    scheduler = stack.core.scheduler
    rate = scheduler.estimates.rate_behind(scheduler.running)
    plan = scheduler.loader.choose_load(pages, len(tokens) + 1, hit, rate)
    return max(hit.tokens, plan.stop if plan is not None else 0)


def fill(stack: Stack, salts: list[str], each: int) -> list[tuple[str, list[int]]]:
    """Prompts of tenants, each asked with the salt of one, and now in all tiers."""
    owned = []
    shared = stack.tokens(SHARED)
    for salt in salts:
        for _ in range(each):
            tokens = shared + stack.tokens(24)
            stack.add(tokens, answer=2, cache_salt=salt)
            owned.append((salt, tokens))
        stack.settle()
    stack.settle_transfers()
    return owned


def in_tiers(stack: Stack, owned: list[tuple[str, list[int]]]) -> int:
    """How many of the owners find something of their own."""
    return sum(usable(stack, tokens, salt) > 0 for salt, tokens in owned)


@pytest.mark.parametrize("where", ["everywhere", "below the device", "on disk"])
def test_a_hundred_thousand_probes_across_tenants(tmp_path: Path, where: str) -> None:
    """Each tenant asks each tier for each prompt of each other one, 39,312 names per case. All prompts begin alike, so
    every tenant has that beginning, under names of its own."""
    shape = Shape(pages={GLOBAL: 900, LOCAL: 500})
    stack = Stack(tmp_path, seed=SEED, shape=shape, host_slots=1500, disk_bytes=16 << 20)
    owned = fill(stack, SALTS, 6)
    if where != "everywhere":
        stack.forget_device()
    if where == "on disk":
        stack.forget_host()
    assert in_tiers(stack, owned) == len(owned)
    finders = [pool.find_slot for pool in stack.manager.pools.values()]
    finders += [
        lambda key, index=index, group=group: index.find_copy(group, key)
        for index in stack.tiers.indexes.values()
        for group in (GLOBAL, LOCAL)
    ]
    probes = hits = 0
    for owner, tokens in owned:
        mine = set(names(stack, tokens, owner))
        for thief in SALTS:
            if thief != owner:
                asked = names(stack, tokens, thief)
                assert not mine & set(asked) and usable(stack, tokens, thief) <= SHARED
                probes += len(asked[SHARED // 4 :]) * len(finders)
                hits += sum(find(key) is not None for key in asked[SHARED // 4 :] for find in finders)
    print(f"{where}: {probes:,} probes, {hits} hits")
    assert hits == 0 and probes >= 39_000
    stack.close()


def test_a_stranger_that_asks_for_a_cached_prompt_computes_it(tmp_path: Path) -> None:
    stack = Stack(tmp_path, seed=SEED, shape=Shape(pages=PAGES), host_slots=700)
    ((_, tokens),) = fill(stack, ["owner"], 1)
    stack.forget_device()
    stack.loads_first = True
    for salt, cached in (("stranger", False), ("", False), ("owner", True)):
        stack.executor.steps.clear()
        stack.add(tokens, answer=1, cache_salt=salt)
        stack.settle()
        computed = sum(count for step in stack.executor.steps for _, count in step)
        assert (computed < len(tokens)) == cached, salt
    assert stack.wrong == 0
    stack.close()


def test_the_operators_salt_separates_servers(tmp_path: Path) -> None:
    """One directory, one engine, another kv.salt: nothing is found; with the first salt again, everything is."""
    stack = Stack(tmp_path, seed=SEED, host_slots=400, salt="first")
    owned = fill(stack, ["", "a"], 3)
    first = stack.kv
    for salt, found in (("second", 0), (None, 0), ("first", len(owned))):
        stack.kv = first.__class__(**(vars(first) | {"salt": salt}))
        stack.restart()
        assert in_tiers(stack, owned) == found, salt
    stack.close()


def test_another_servers_disk_key_opens_nothing(tmp_path: Path) -> None:
    keys = []
    for name in ("one", "two"):
        path = tmp_path / name
        path.write_bytes(os.urandom(32))
        path.chmod(0o600)
        keys.append(str(path))
    stack = Stack(tmp_path / "kv", seed=SEED, host_slots=400, disk_key_file=keys[0])
    owned = fill(stack, ["", "a"], 3)
    first = stack.kv
    for key in (keys[1], None):
        stack.kv = first.__class__(**(vars(first) | {"disk_key_file": key}))
        stack.restart()
        for salt, tokens in owned:
            stack.add(tokens, answer=2, cache_salt=salt)
        stack.settle()
        assert stack.counts()["disk hits"] == 0 and stack.wrong == 0
        stack.check_idle()
    stack.close()


def test_with_its_own_key_a_restart_finds_everything(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_bytes(os.urandom(32))
    key.chmod(0o600)
    stack = Stack(tmp_path / "kv", seed=SEED, host_slots=400, disk_key_file=str(key))
    owned = fill(stack, ["", "a"], 3)
    digests = {
        bytes(part[:8])
        for copy in stack.tiers.host.iterate_copies()
        for part in stack.tiers.movers.host.page_parts(copy)
    }
    stack.restart()
    data = b"".join(file.read_bytes() for file in stack.home().glob("slab-*"))
    assert len(digests) > 20 and not any(digest in data for digest in digests), "plain text on disk"
    assert in_tiers(stack, owned) == len(owned)
    stack.loads_first = True
    for salt, tokens in owned:
        stack.add(tokens, answer=2, cache_salt=salt)
    stack.settle()
    assert stack.counts()["disk hits"] > 0 and stack.wrong == 0
    stack.close()


@pytest.mark.parametrize("policy", ["lru", "cost", "a2cr"])
def test_a_flood_takes_no_more_than_its_quota(tmp_path: Path, policy: str) -> None:
    """In host memory and on disk; the other tenant's pages outlive it."""
    stack = Stack(
        tmp_path, seed=SEED, host_slots=200, disk_bytes=200 * 2 * SLOT, tenant_quota=0.5, policy=policy,
        shape=Shape(pages={GLOBAL: 60, LOCAL: 60}),
    )  # fmt: skip
    owned = fill(stack, ["victim"], 3)
    had = {name: {copy.page.name for copy in index.iterate_copies()} for name, index in stack.tiers.indexes.items()}
    assert all(len(pages) > 20 for pages in had.values())
    flood = stack.manager.chain.derive_names("", "flood").tag
    for _ in range(15):
        for _ in range(4):
            stack.add(stack.tokens(60), answer=4, cache_salt="flood")
        stack.settle()
        stack.settle_transfers()
        for index in stack.tiers.indexes.values():
            used = sum(len(copy.slots) for copy in index.iterate_copies() if copy.page.tenant == flood)
            assert used <= index.num_slots // 2
    for name, index in stack.tiers.indexes.items():
        assert index.evictions["quota"] > 0, name
        assert had[name] <= {copy.page.name for copy in index.iterate_copies()}, f"{name}: pages of the victim left"
    stack.forget_device()
    assert in_tiers(stack, owned) == len(owned) and stack.wrong == 0
    stack.check_idle()
    stack.close()
