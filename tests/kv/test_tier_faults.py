"""Faults under a running engine: whatever host memory, disk and files do, each request ends with the right tokens.

How faults are counted: each flipped host page, each file operation that `FaultPlan` spoiled and each piece of damage
that `Vandal` did to the files is one. A fault is noticed when a tier refuses a page, gives up a write, or does not name
a page after a restart; a fault in bytes that mean nothing, or that nobody read any more, is not.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import deque
from pathlib import Path

import pytest
from campaign import SLOT, Shape, Stack, Table
from disk_damage import Damage, Vandal
from fault_injection import Fault, FaultPlan, FaultyFiles, by_turns, flip_bit

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.kv.pages.page import Page
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import CacheHints

SEED = int.from_bytes(os.urandom(4), "little")
HANGS = (Fault.READ_HANG, Fault.WRITE_HANG)
LOST = ("host corrupt", "disk corrupt", "disk failed", "disk write error", "disk no space", "disk read timeout",
        "disk write timeout")  # fmt: skip


def slabs(name: str) -> bool:
    return name.startswith("slab-")


def noticed(stack: Stack) -> int:
    counts = stack.totals + stack.counts()
    return sum(counts[name] for name in LOST)


def flip_rounds(stack: Stack, rounds: int, table: Table, *, requests: int = 6) -> None:
    """All pages of the host get a wrong bit, and all traffic comes from the host."""
    for _ in range(rounds):
        stack.serve(requests)
        stack.settle_transfers()
        before, wrong = noticed(stack), stack.wrong
        stack.forget_device()
        flipped = stack.flip_host()
        stack.serve(2)
        sweep(stack)
        table.add("host bit flip", flipped, noticed(stack) - before, stack.wrong - wrong)


def ask_for(stack: Stack, page: Page) -> bool:
    """Have a page brought to host memory and checked; nobody uses it. False when there is no room just now."""
    fetch = stack.tiers.up.fetch_page(page, deque())
    if fetch is not None:
        stack.tiers.up.release_fetch(fetch)
    return fetch is not None


def sweep(stack: Stack) -> None:
    """Ask for every page of the host, as a load does; those that are refused leave."""
    stack.settle_transfers()
    for copy in list(stack.tiers.host.iterate_copies()):
        if copy.ready:
            ask_for(stack, copy.page)
    stack.settle_transfers()


def fault_rounds(
    stack: Stack, plan: FaultPlan, rounds: int, table: Table, *, requests: int = 6, dense: bool = False
) -> None:
    """Traffic from the disk, whose calls go wrong by the plan; `dense`: all its pages are read, too."""
    for _ in range(rounds):
        before, injected, wrong = noticed(stack), plan.counts.copy(), stack.wrong
        stack.tiers.down.no_writes_before = 0.0  # no pause after a row of failed writes
        stack.serve(requests)
        stack.settle_transfers()
        stack.forget_device()
        stack.forget_host()
        stack.serve(requests)
        if dense:
            read_disk(stack)
        stack.settle_transfers()
        done = plan.counts - injected
        for fault, count in done.items():
            share = noticed(stack) - before if len(done) == 1 else 0
            table.add(fault.value, count, share, stack.wrong - wrong)


def damage_round(stack: Stack, kind: Damage, table: Table, *, pieces: int = 1, other: Path | None = None) -> int:
    """Close, damage the files, open again and serve from them; returns the pieces of damage done."""
    stack.serve(6)
    stack.settle_transfers()
    had = stack.tiers.disk.pages.total()
    stack.close()
    vandal = Vandal(stack.home(), SLOT, seed=stack.rng.randrange(1 << 30), other=other)
    if kind.name.startswith("STALE"):
        vandal.remember()
        stack.open()
        stack.serve(6)
        stack.settle_transfers()
        had = stack.tiers.disk.pages.total()
        stack.close()
    done = sum(vandal.do(kind) for _ in range(pieces))
    stack.open()
    before, wrong = noticed(stack), stack.wrong
    unnamed = had - stack.tiers.disk.pages.total()
    stack.serve(6)
    read_disk(stack)
    stack.check_idle()
    table.add(kind.value, done, min(done, unnamed + noticed(stack) - before), stack.wrong - wrong)
    return done


def read_disk(stack: Stack) -> None:
    """Ask for every page of the disk, as many at a time as the host has room for."""
    stack.settle_transfers()
    stack.forget_host()
    for copy in list(stack.tiers.disk.iterate_copies()):
        if copy.ready and stack.tiers.host.find_copy(*copy.page.name) is None:
            while not ask_for(stack, copy.page):
                stack.tiers.wait_for_report(0.01)
    stack.settle_transfers()


# --- a sample of each kind -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("disk", [False, True])
def test_flipped_bits_in_host_memory(tmp_path: Path, disk: bool) -> None:
    stack, table = Stack(tmp_path if disk else None, seed=SEED, host_slots=1000), Table()
    flip_rounds(stack, 3, table)
    assert table.total.injected == table.total.detected > 100 and stack.wrong == 0, (SEED, table)
    stack.check_idle()
    stack.close()


@pytest.mark.parametrize("fault", by_turns(Fault, 1))
def test_each_fault_of_the_disk(tmp_path: Path, fault: Fault) -> None:
    slow = fault in HANGS
    plan = FaultPlan({fault: 0.01 if slow else 0.2}, seed=SEED, hang_s=0.15, only=None if slow else slabs)
    stack = Stack(tmp_path, seed=SEED, files=FaultyFiles(plan), disk_timeout_s=0.05 if slow else 10.0)
    table = Table()
    for _ in range(12):
        if slow:
            plan.arm(fault)
        fault_rounds(stack, plan, 1, table)
        if plan.counts[fault] >= 4 or fault.call not in ("read", "write"):
            break
    assert plan.counts[fault] > 0 or fault.call not in ("read", "write")
    plan.active = False
    stack.restart()
    stack.serve(4)
    assert stack.wrong == 0 and stack.ends.total() == stack.finished == stack.added, (SEED, table)
    stack.check_idle()
    stack.close()


@pytest.mark.parametrize("kind", by_turns(Damage, 1))
def test_each_damage_to_the_files_between_runs(tmp_path: Path, kind: Damage) -> None:
    other = None
    if kind.name.startswith("FOREIGN"):
        foreign = Stack(tmp_path / "other", seed=SEED, shape=Shape(rank=1))
        foreign.serve(6)  # the same traffic: the same keys, pages and slots
        foreign.settle_transfers()
        foreign.close()
        other = foreign.home()
    stack, table = Stack(tmp_path / "own", seed=SEED), Table()
    stack.serve(8)  # so that there are several slabs
    assert damage_round(stack, kind, table, pieces=40 if "SLOT" in kind.name or "ZERO" in kind.name else 5, other=other)
    assert stack.wrong == 0 and stack.finished == stack.added, (SEED, table)
    stack.close()


def test_the_disk_is_full(tmp_path: Path) -> None:
    plan = FaultPlan({Fault.WRITE_NO_SPACE: 1.0, Fault.ALLOCATE_NO_SPACE: 1.0}, seed=SEED, only=slabs)
    stack = Stack(tmp_path, seed=SEED, files=FaultyFiles(plan))
    stack.serve(20)
    stack.settle_transfers()
    assert stack.wrong == 0 and stack.counts()["disk no space"] > 0 and stack.counts()["disk hits"] == 0
    stack.check_idle()
    stack.close()


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("fault", HANGS, ids=lambda fault: fault.name.lower())
def test_a_disk_that_never_answers(tmp_path: Path, fault: Fault, threads: int) -> None:
    """Each request ends about one timeout later at most, and so does the engine."""
    plan = FaultPlan({fault: 1.0}, hang_s=600.0, only=slabs)
    plan.active = False
    files = FaultyFiles(plan)
    stack = Stack(tmp_path, seed=SEED, files=files, disk_threads=threads)
    stack.serve(10)
    stack.settle_transfers()
    stack.forget_device()
    stack.forget_host()
    plan.active = True
    rounds = 0
    while rounds < 3 or (plan.counts[fault] == 0 and rounds < 60):
        for _ in range(4):
            stack.add()
        while stack.core.has_work and not plan.counts[fault]:
            stack.step()
        if plan.counts[fault]:
            stack.hurry_disk(0.2)
        stack.settle(60.0)
        stack.forget_device()
        rounds += 1
    assert plan.counts[fault] >= 1 and stack.wrong == 0 and stack.finished == stack.added, (SEED, rounds)
    if fault is Fault.READ_HANG and threads == 2:
        stack.core.close(0.1)  # or this would not end
    else:
        stack.tiers.movers.disk[1].close(0.0)
    plan.release()


def test_the_device_pool_runs_out_amid_a_batch(tmp_path: Path) -> None:
    shape = Shape(pages={GLOBAL: 34, LOCAL: 14}, max_sequences=8)
    stack = Stack(tmp_path, seed=SEED, shape=shape)
    for _ in range(2):
        for _ in range(8):
            stack.add(answer=40)
        stack.settle(check=True)
        stack.check_idle()
    assert stack.wrong == 0 and stack.counts()["preempted"] > 0
    stack.close()


def test_the_host_pool_is_full_of_held_pages(tmp_path: Path) -> None:
    """Sessions hold as much as they may, and a reader keeps the rest: nothing can be stored, loaded or parked."""
    stack = Stack(tmp_path, seed=SEED, host_slots=40, pin_share=1.0, shape=Shape(pages={GLOBAL: 40, LOCAL: 40}))
    for i in range(6):
        stack.serve(1, cache=CacheHints(session=f"s{i}"), answer=12)
    stack.settle_transfers()
    host = stack.tiers.host
    taken = [copy for copy in host.iterate_copies() if copy.ready]
    host.acquire_copies(taken)
    stack.forget_device()
    for _ in range(6):
        stack.add(answer=60)
    stack.settle(check=True)
    assert stack.wrong == 0 and stack.counts()["host no room"] > 0 and stack.finished == stack.added
    host.release_copies(taken)
    stack.serve(6)
    stack.check_idle()
    stack.close()


def test_two_processes_on_one_directory(tmp_path: Path) -> None:
    stack = Stack(tmp_path, seed=SEED)
    with pytest.raises(EnvironmentUnfitError):
        Stack(tmp_path, seed=SEED)
    code = (
        "import sys; sys.path[:0] = sys.argv[2:]\n"
        "from campaign import Stack\nfrom pathlib import Path\nfrom wicore_trt.errors import EnvironmentUnfitError\n"
        "try: Stack(Path(sys.argv[1]), seed=1)\nexcept EnvironmentUnfitError: sys.exit(7)\n"
    )
    here = Path(__file__).parent
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path), str(here), str(here.parent)], timeout=60)
    assert done.returncode == 7
    stack.serve(4)
    assert stack.wrong == 0
    stack.close()
    Stack(tmp_path, seed=SEED).close()


def test_a_page_of_another_place_is_refused(tmp_path: Path) -> None:
    """The bytes of one host page copied over another one's, with and without its checksum."""
    stack = Stack(None, seed=SEED)
    stack.loads_first = True
    stack.serve(8)
    stack.settle_transfers()
    copies = [copy for copy in stack.tiers.host.iterate_copies() if copy.ready and copy.page.group == GLOBAL]
    for one, two in zip(copies, copies[1:] + copies[:1], strict=True):
        stack.tiers.movers.host.cut_slots(two.slots)[0][:] = stack.tiers.movers.host.cut_slots(one.slots)[0]
        two.checksum = one.checksum
    flip_bit(stack.tiers.movers.host.cut_slots(copies[0].slots), 0)
    stack.forget_device()
    stack.serve(8)
    assert stack.wrong == 0 and stack.counts()["host corrupt"] > 0
    stack.close()


def test_bits_that_flip_before_a_page_is_saved_do_not_reach_the_disk(tmp_path: Path) -> None:
    """Stored and hashed, flipped, saved, forgotten by host and device, read from disk: it stays wrong."""
    stack = Stack(tmp_path, seed=SEED, host_slots=400)
    stack.tiers.down.no_writes_before = time.monotonic() + 3600  # hold the saves back
    stack.serve(8)
    while stack.moving:
        stack.tiers.wait_for_report(0.01)
    flipped = stack.flip_host()
    stack.tiers.down.no_writes_before = 0.0
    stack.settle_transfers()
    assert stack.counts()["host corrupt"] == flipped > 20 and not list(stack.tiers.disk.iterate_copies())
    stack.forget_device()
    stack.forget_host()
    stack.serve(8)
    assert stack.wrong == 0
    stack.check_idle()
    stack.restart()
    stack.serve(8)
    assert stack.wrong == 0
    stack.close()


def test_a_slab_cut_to_nothing_leaves_no_gap(tmp_path: Path) -> None:
    stack = Stack(tmp_path, seed=SEED)
    stack.serve(12)
    stack.settle_transfers()
    stack.close()
    slabs_there = sorted(stack.home().glob("slab-*"))
    assert len(slabs_there) > 1
    os.truncate(slabs_there[0], 100)
    stack.open()
    stack.serve(6)
    assert stack.wrong == 0
    stack.check_idle()
    stack.close()


# --- the long campaign -----------------------------------------------------------------------------------------------

BULK = (Fault.READ_BIT_FLIP, Fault.READ_MISDIRECTED, Fault.READ_SHORT, Fault.READ_EIO, Fault.WRITE_BIT_FLIP,
        Fault.WRITE_TORN, Fault.WRITE_LOST, Fault.WRITE_MISDIRECTED, Fault.WRITE_SWAPPED, Fault.WRITE_SHORT,
        Fault.WRITE_EIO, Fault.WRITE_NO_SPACE)  # fmt: skip
FAULTS = int(os.environ.get("WICORE_TEST_FAULTS", "1000000"))


@pytest.mark.long
@pytest.mark.timeout(4 * 3600)
def test_a_million_faults(tmp_path: Path) -> None:
    """WICORE_TEST_FAULTS sets another number."""
    table, begun, turn = Table(), time.monotonic(), 0
    try:
        while table.total.injected < FAULTS:
            campaign_turn(tmp_path / str(turn), SEED + turn, table)
            assert table.total.wrong == 0, SEED + turn
            turn += 1
    finally:
        seconds = time.monotonic() - begun
        print(f"\n{table}\n{seconds:.0f} s, {table.total.injected / seconds:.0f} faults/s, seed {SEED}, turn {turn}")


def campaign_turn(path: Path, seed: int, table: Table) -> None:
    """One engine's life: bits in host memory, calls on disk, damage between runs."""
    fault, kinds = BULK[seed % len(BULK)], [kind for kind in Damage if not kind.name.startswith("FOREIGN")]
    plan = FaultPlan({fault: 0.5}, seed=seed, only=slabs)
    stack = Stack(path, seed=seed, files=FaultyFiles(plan), host_slots=1000)
    fault_rounds(stack, plan, 12, table, requests=12, dense=True)
    plan.active = False
    for _ in range(3):
        damage_round(stack, stack.rng.choice(kinds), table, pieces=20)
    damage_round(stack, Damage.FLIP_SLAB_BIT, table, pieces=500)
    for _ in range(20):
        flip_rounds(stack, 1, table, requests=24)
    assert stack.finished == stack.added, seed
    stack.check_idle()
    stack.close()
    for file in stack.home().iterdir():
        file.unlink()


def test_a_copier_that_broke_ends_the_engine_instead_of_a_wait_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = Stack(tmp_path, seed=1)
    stack.add(stack.tokens(20), answer=4)
    stack.step()
    stack.executor.broken = OSError("device lost")
    with pytest.raises(RuntimeError, match="Copies of KV pages failed"):
        stack.step()
    with pytest.raises(RuntimeError, match="Copies of KV pages failed"):
        stack.tiers.wait_for_report(0.01)
    monkeypatch.setattr(type(stack.tiers), "has_work", True)  # that will not end
    stack.core.close()
