"""Preemption with a host tier: pages wait in host memory and come back; no full page is computed twice."""

from __future__ import annotations

import os
import random
import threading
from collections import Counter
from pathlib import Path

import pytest
from campaign import Shape, Stack
from fault_injection import Fault, FaultPlan, FaultyFiles, flip_bit

from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.schedule.sequence import Sequence
from wicore_trt.types import CacheHints, CachePriority, FinishReason

SEED = int.from_bytes(os.urandom(4), "little")


def crowded(path: Path | None = None, *, window: int = 8, host_slots: int = 400, seed: int = SEED, **settings) -> Stack:
    """Four long outputs fit a pool of 40 pages only two at a time."""
    shape = Shape(window=window, pages={GLOBAL: 40, LOCAL: 40}, max_sequences=8)
    return Stack(path, seed=seed, shape=shape, host_slots=host_slots, **settings)


def twice(stack: Stack) -> int:
    """Tokens that were computed more than once, over all sequences that ended."""
    computed: Counter[int] = Counter()
    for step in stack.executor.steps:
        for seq_id, count in step:
            computed[seq_id] += count
    return sum(computed.values()) - stack.needed


def fill(stack: Stack, count: int = 4, *, prompt: int = 18, answer: int = 70, **more: object) -> list[str]:
    """Requests with nothing in common, whose answers have all their tokens; `needed` sums the positions that have to be
    computed."""
    names = []
    stack.needed = 0
    for _ in range(count):
        tokens = stack.tokens(prompt)
        names.append(stack.add(tokens, answer=answer, whole=True, **more))
        stack.needed += prompt + len(stack.expected[names[-1], 0]) - 1
    return names


def parked(stack: Stack) -> list[Sequence]:
    return [s for s in stack.core.scheduler.waiting if s.pages.parked is not None]


def until_parked(stack: Stack) -> Sequence:
    for _ in range(2000):
        stack.step()
        stack.core.scheduler.check_integrity()
        if parked(stack):
            return parked(stack)[0]
    raise AssertionError("nothing was parked")


@pytest.mark.parametrize("window", [2, 4, 7, 8, 9, 13, 40])
@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2))])
def test_no_full_page_is_computed_twice(window: int, seed: int) -> None:
    rng = random.Random(SEED + seed)
    stack = crowded(window=window, seed=SEED + seed)
    fill(stack, 4, prompt=rng.randint(3, 40), answer=70)
    stack.settle(check=True)
    counts = stack.counts()
    assert counts["parked"] >= 1, (SEED, counts)
    assert twice(stack) <= 3 * counts["parked"] and stack.wrong == 0, SEED
    stack.check_idle()
    stack.close()


@pytest.mark.parametrize("groups", [{GLOBAL: 40}, {LOCAL: 20}], ids=["global", "local"])
def test_models_with_one_kind_of_layers(groups: dict[str, int]) -> None:
    shape = Shape(window=40, pages=groups, max_sequences=8)
    stack = Stack(None, seed=SEED, shape=shape, host_slots=400)
    fill(stack)
    stack.settle(check=True)
    assert twice(stack) <= 3 * stack.counts()["parked"] and stack.counts()["parked"] >= 1 and stack.wrong == 0, SEED
    stack.check_idle()
    stack.close()


@pytest.mark.parametrize("tokens", range(4))
def test_the_tokens_of_a_partly_filled_page_are_computed_again(tokens: int) -> None:
    """Parked with 0..3 tokens in the last page: by hand, at every place in a page. Full pages alone leave the device:
    the rest of that one holds bytes of whoever had its slot before."""
    stack = crowded()
    fill(stack, 1, prompt=21, answer=30)
    while not stack.core.scheduler.running or stack.core.scheduler.running[0].computed < 36 + tokens:
        stack.step()
    victim = stack.core.scheduler.running[0]
    assert victim.computed == 36 + tokens
    stack.core.scheduler._preempt_sequence(victim, type(stack.core.scheduler.schedule_step())())
    assert victim.pages.parked.tokens == 36
    stack.forget_device()
    stack.settle(check=True)
    assert twice(stack) == tokens and stack.wrong == 0
    stack.check_idle()
    stack.close()


@pytest.mark.parametrize("host_slots", [4, 12, 20, 30])
def test_without_room_in_the_host_it_is_computed_again(host_slots: int) -> None:
    stack = crowded(host_slots=host_slots)
    fill(stack)
    stack.settle(check=True)
    counts = stack.counts()
    assert counts["preempted"] > counts["parked"], counts
    assert twice(stack) > 0 and stack.wrong == 0
    stack.check_idle()
    stack.close()


def test_abort_and_deadline_while_parked(tmp_path: Path) -> None:
    for how in ("abort", "deadline", "abort while it comes back"):
        stack = crowded(tmp_path / how)
        fill(stack)
        victim = until_parked(stack)
        name = victim.request.request_key
        if how == "abort":
            stack.abort(name)
        elif how == "deadline":
            stack.core._deadlines[name] = stack.now
        else:
            while victim.pages.load is None and stack.core.has_work:
                stack.step()
            assert victim.pages.parked is not None
            stack.abort(name)
        stack.settle(check=True)
        assert stack.ends[FinishReason.CANCELLED] + stack.ends[FinishReason.DEADLINE] == 1
        assert stack.wrong == 0
        stack.check_idle()
        stack.close()


@pytest.mark.parametrize("which", ["all", "first", "last"])
@pytest.mark.parametrize("disk", [False, True])
def test_bits_flipped_while_parked(tmp_path: Path, which: str, disk: bool) -> None:
    """The page is read from disk where it is there, else the sequence starts over."""
    stack = crowded(tmp_path if disk else None)
    fill(stack)
    victim = until_parked(stack)
    if disk:
        stack.settle_transfers()
    copies = victim.pages.parked.copies
    for copy in copies if which == "all" else copies[:1] if which == "first" else copies[-1:]:
        flip_bit(stack.tiers.movers.host.page_parts(copy), stack.rng.randrange(8 * 32))
    stack.forget_device()
    stack.settle(check=True)
    assert stack.wrong == 0 and stack.counts()["host corrupt"] >= 1
    if not disk:
        assert twice(stack) > 0
    stack.check_idle()
    stack.close()


def test_a_parked_sequence_does_not_wait_for_a_disk_that_hangs(tmp_path: Path) -> None:
    """Its host copies are corrupt, the disk has them all but for the private ones, and every thread of the disk hangs
    for ever: when the reads time out it starts over."""
    plan = FaultPlan({Fault.READ_HANG: 1.0}, hang_s=600.0, only=lambda name: name.startswith("slab-"))
    plan.active = False
    stack = crowded(tmp_path, files=FaultyFiles(plan))
    fill(stack)
    victim = until_parked(stack)
    stack.settle_transfers()
    saved = [copy for copy in victim.pages.parked.copies if stack.tiers.disk.find_copy(*copy.page.name) is not None]
    assert len(saved) >= 5
    for copy in saved:
        flip_bit(stack.tiers.movers.host.cut_slots(copy.slots), 5)
    stack.forget_device()
    plan.active = True
    while not (plan.counts[Fault.READ_HANG] and stack.tiers.up.reading_bytes):
        stack.step()
    assert victim.pages.parked is not None and not victim.pages.load.finished
    stack.hurry_disk(0.1)
    stack.settle(60.0)
    assert stack.wrong == 0 and stack.counts()["disk read timeout"] > 0 and twice(stack) > 0
    plan.release()
    stack.check_idle()
    stack.close()


def test_a_park_that_takes_too_long_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksums are not there in time, so the sequence gives up its host copies while they are being written."""
    monkeypatch.setattr("wicore_trt.kv.tiers.tiers.RETAIN_S", 0.0)
    stack = crowded()
    go_on = threading.Event()
    stack.tiers.movers.checker.submit(go_on.wait, 60)
    fill(stack)
    while not stack.counts()["preempted"]:
        stack.step()
    go_on.set()
    stack.settle(check=True)
    counts = stack.counts()
    assert counts["preempted"] > counts["parked"] and stack.wrong == 0
    stack.check_idle()
    stack.close()


@pytest.mark.parametrize(
    ("write_policy", "host_slots"),
    [
        pytest.param(policy, slots, marks=pytest.mark.long if (i + j) % 2 else ())
        for i, policy in enumerate(("through", "selective", "back"))
        for j, slots in enumerate((16, 40, 90))
    ],
)
def test_nothing_private_is_left(tmp_path: Path, write_policy: str, host_slots: int) -> None:
    """Under pressure from all sides: parks fail half-way, parked pages fill the host, saves go to disk."""
    stack = crowded(tmp_path, host_slots=host_slots, write_policy=write_policy)
    for _ in range(3):
        names = fill(stack, 5, prompt=stack.rng.randint(4, 30), answer=60)
        for _ in range(60):
            stack.step()
        stack.abort(stack.rng.choice(names))
        stack.settle(check=True)
        stack.check_idle()
    assert stack.wrong == 0 and stack.counts()["preempted"] > 0, SEED
    stack.restart()
    stack.check_idle()
    stack.close()


def test_events_tell_nothing_of_pages_that_one_sequence_alone_can_use() -> None:
    """Their names are told to nobody, so nobody can be told that they left."""
    stack, stored, removed = crowded(), set(), list[tuple]()
    log = stack.core.find_feed(None)
    tell, leave = log.append_stored, log.append_removed
    log.append_stored = lambda tier, *pages: (stored.update((tier, page.name) for page in pages), tell(tier, *pages))
    log.append_removed = lambda tier, group, key, cause: (
        removed.append((tier, (group, key), cause)), leave(tier, group, key, cause),
    )  # fmt: skip
    stack.tiers.movers.announce = log.append_stored
    fill(stack, cache=CacheHints(priority=CachePriority.LOW))
    waits = until_parked(stack).pages.parked
    private = {waits.pages[group][i].name for group, i in waits.private}
    assert private
    assert not {name for _, name in stored}.intersection(private)
    assert not {page.name for _, page in stack.core.scheduler.manager.list_pages()}.intersection(private)
    stack.settle()
    assert stack.counts()["parked"] and {(tier, name) for tier, name, _ in removed} <= stored
