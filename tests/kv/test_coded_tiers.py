"""Tiers that keep pages coded: sizes that differ by page, restarts with and without it, engines that have none."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

pytest.importorskip("torch")

from campaign import Shape, Stack
from late_device import CODES

from wicore_trt.errors import ConfigError
from wicore_trt.kv.tiers.host import find_coded_geometry, find_slot_geometry
from wicore_trt.model.spec import GLOBAL, LOCAL

SLOT = 12288


def crowded(path: Path | None, **settings: object) -> Stack:
    settings = {"compression": "lossless", "host_bytes": 300 * SLOT} | settings
    stack = Stack(path, seed=3, coded=True, shape=Shape(pages={GLOBAL: 40, LOCAL: 32}, max_sequences=3), **settings)
    stack.loads_first = True
    return stack


def sizes_of(stack: Stack, tier: str) -> set[tuple[str, int]]:
    return {(copy.page.group, len(copy.slots)) for copy in stack.tiers.indexes[tier].iterate_copies() if copy.ready}


ALL_SIZES = {(GLOBAL, 1), (GLOBAL, 2), (LOCAL, 2), (LOCAL, 3)}


def test_a_directory_is_read_with_the_code_that_wrote_it(tmp_path: Path) -> None:
    """Coded and raw pages come back after a restart; without the code they are neither read nor lost."""
    stack = crowded(tmp_path, disk_bytes=16 << 20)
    for _ in range(6):
        stack.serve(4)
        stack.forget_device()
    stack.settle_transfers()
    assert sizes_of(stack, "host") == sizes_of(stack, "disk") == ALL_SIZES
    known = {copy.page.name: len(copy.slots) for copy in stack.tiers.disk.iterate_copies()}
    stack.restart()
    assert {copy.page.name: len(copy.slots) for copy in stack.tiers.disk.iterate_copies()} == known
    stack.serve(8)
    assert stack.tiers.hit_tokens["disk"] and not stack.tiers.movers.host_traffic.failures["corrupt"]
    stack.check_idle()
    coded = stack.kv
    stack.kv = dataclasses.replace(coded, compression="none")
    stack.restart()
    assert not list(stack.tiers.disk.iterate_copies())
    stack.serve(4)
    stack.settle_transfers()
    assert not list(stack.tiers.disk.iterate_copies()) or sizes_of(stack, "disk") == {(GLOBAL, 1), (LOCAL, 2)}
    stack.kv = coded
    stack.restart()
    assert {*known} <= {copy.page.name for copy in stack.tiers.disk.iterate_copies()}
    stack.serve(4)
    stack.check_idle()
    assert not stack.wrong and stack.finished
    stack.close()


@pytest.mark.parametrize("write_policy", ["through", "back", "selective"])
def test_pages_without_a_code_come_back(write_policy: str) -> None:
    stack = crowded(None, write_policy=write_policy)
    failures, hits = stack.tiers.movers.host_traffic.failures, stack.tiers.hit_tokens
    for _ in range(60):
        if failures["unfit"] and hits["host"] and (write_policy != "through" or sizes_of(stack, "host") == ALL_SIZES):
            break
        stack.serve(4)
        if write_policy != "back":
            stack.forget_device()
    else:
        raise AssertionError((failures, hits, sizes_of(stack, "host")))
    stack.check_idle()
    assert not stack.wrong and stack.finished
    stack.close()


def test_what_only_a_preempted_sequence_can_use_is_kept_raw() -> None:
    """Its slots are given away at once, and a page that turned out to have no code would be lost with them."""
    stack = Stack(
        None, seed=5, coded=True, compression="lossless", host_bytes=300 * SLOT,
        shape=Shape(pages={GLOBAL: 34, LOCAL: 30}, max_context=100),
    )  # fmt: skip
    seen, store = list[bool](), stack.tiers.down.store_page

    def watched(page, slot, *, private=False, **more):  # type: ignore[no-untyped-def]
        copy = store(page, slot, private=private, **more)
        if private and copy is not None:
            seen.append(len(copy.slots) == stack.tiers.host.raw_slots[page.group])
        return copy

    stack.tiers.down.store_page = watched  # type: ignore[method-assign]
    while len(seen) < 4 or not stack.counts()["parked"]:
        stack.serve(6, answer=25, whole=True)
    assert all(seen) and not stack.wrong
    stack.check_idle()
    stack.close()


def test_engines_without_a_code_say_so() -> None:
    with pytest.raises(ConfigError, match=r"kv\.compression = lossless, but this engine has no code"):
        Stack(None, seed=1, compression="lossless")


@pytest.mark.parametrize("coded", [True, False])
def test_by_default_pages_are_coded_where_there_is_a_code(coded: bool) -> None:
    stack = Stack(None, seed=1, coded=coded, host_bytes=300 * SLOT)
    index = stack.tiers.movers.host.index
    assert (index.slots_per_page != index.raw_slots) == coded
    stack.close()


def test_slots_follow_from_coded_pages() -> None:
    raw = {g: code.raw_bytes for g, code in CODES.items()}
    coded = {g: code.coded_bytes for g, code in CODES.items()}
    found = find_coded_geometry(raw, coded)
    assert (found.slot_bytes, found.slots, found.raw_slots) == (SLOT, {GLOBAL: 1, LOCAL: 2}, {GLOBAL: 2, LOCAL: 3})
    assert find_coded_geometry(raw, {})[:2] == find_slot_geometry(raw)
    tiny = find_coded_geometry({GLOBAL: 4096, LOCAL: 8192}, {GLOBAL: 3072, LOCAL: 6144})
    assert tiny.slots == tiny.raw_slots and tiny.page_bytes == {GLOBAL: 4096, LOCAL: 8192}, "no slot is saved"
