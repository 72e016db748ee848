"""Whatever goes wrong below the disk store: a read is right, or it says that it failed."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from disk_campaign import LIMIT, SLOT, Campaign, make_page, namespace, open_store, other_rank
from disk_damage import Damage, Vandal
from fault_injection import Fault, FaultPlan, FaultyFiles, by_turns, flip_host_bits

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.kv.disk.cipher import PageCipher
from wicore_trt.kv.disk.files import aligned_buffer
from wicore_trt.kv.disk.io import Outcome

SEED = int.from_bytes(os.urandom(4), "little")

# What a read or write is told when this fault hit it. Faults that may be mended on the way (short transfers) or are
# seen only when the store opens are not here.
TOLD = {
    Fault.READ_BIT_FLIP: ("read", Outcome.CORRUPT),
    Fault.READ_MISDIRECTED: ("read", Outcome.CORRUPT),
    Fault.READ_EIO: ("read", Outcome.FAILED),
    Fault.READ_HANG: ("read", Outcome.TIMEOUT),
    Fault.WRITE_BIT_FLIP: ("read", Outcome.CORRUPT),
    Fault.WRITE_TORN: ("read", Outcome.CORRUPT),
    Fault.WRITE_LOST: ("read", Outcome.CORRUPT),
    Fault.WRITE_MISDIRECTED: ("read", Outcome.CORRUPT),
    Fault.WRITE_SWAPPED: ("read", Outcome.CORRUPT),
    Fault.WRITE_EIO: ("write", Outcome.FAILED),
    Fault.WRITE_NO_SPACE: ("write", Outcome.NO_SPACE),
    Fault.WRITE_HANG: ("write", Outcome.TIMEOUT),
}


def slabs(name: str) -> bool:
    return name.startswith("slab-")


def clean_rounds_work(campaign: Campaign) -> None:
    """After all faults the store is as good as new."""
    campaign.plan.rates.clear()
    campaign.plan.active = False
    campaign.outcomes.clear()
    campaign.restart()
    campaign.run(2)
    told = {what for what in campaign.outcomes if what != ("read", Outcome.CORRUPT)}
    assert told == {("read", Outcome.OK), ("write", Outcome.OK)}, campaign.outcomes
    for i in list(campaign.held):
        campaign._erase(i)
    campaign.outcomes.clear()
    campaign.run(2)
    assert set(campaign.outcomes) == {("read", Outcome.OK), ("write", Outcome.OK)}


def test_without_faults_everything_is_ok(tmp_path: Path) -> None:
    campaign = Campaign(tmp_path, FaultPlan(), seed=SEED)
    campaign.run(6)
    campaign.restart()
    campaign.run(2)
    assert set(campaign.outcomes) == {("read", Outcome.OK), ("write", Outcome.OK)}
    assert campaign.faults == campaign.wrong == 0 and campaign.reads_ok > 100
    campaign.store.close()


@pytest.mark.parametrize("fault", TOLD, ids=lambda fault: fault.name.lower())
def test_each_fault_is_noticed(tmp_path: Path, fault: Fault) -> None:
    """In the slabs, one fault in three calls: some are told as they should be, none gives a wrong read."""
    slow = fault in (Fault.READ_HANG, Fault.WRITE_HANG)
    plan = FaultPlan({fault: 0.02 if slow else 0.3}, seed=SEED, hang_s=0.08, only=slabs)
    campaign = Campaign(tmp_path, plan, seed=SEED, timeout_s=0.03 if slow else 20.0)
    plan.arm(fault)
    for _ in range(40):
        campaign.run(1)
        if campaign.outcomes[TOLD[fault]] >= 3 and plan.counts[fault] >= 5:
            break
    assert campaign.outcomes[TOLD[fault]] > 0, (SEED, campaign.outcomes)
    assert set(plan.counts) == {fault} and campaign.wrong == 0
    campaign.store.close()


@pytest.mark.parametrize("fault", by_turns(Fault, 0))
def test_no_fault_in_any_file_gives_a_wrong_read(tmp_path: Path, fault: Fault) -> None:
    """Index, namespace.json and lock included, over restarts; then the store works again."""
    plan = FaultPlan({fault: 0.3}, seed=SEED, hang_s=0.001)
    campaign = Campaign(tmp_path, plan, seed=SEED)
    for _ in range(4):
        campaign.run(1)
        if fault.call in ("replace", "unlink", "truncate", "statvfs"):
            campaign.restart(Damage.DELETE, Damage.EXTEND)  # so that files are made, cut and removed
        else:
            campaign.restart()
    assert campaign.wrong == 0, SEED
    clean_rounds_work(campaign)
    campaign.store.close()


@pytest.mark.parametrize("kind", by_turns(Damage, 0))
def test_no_damage_between_runs_gives_a_wrong_read(tmp_path: Path, kind: Damage) -> None:
    cipher = PageCipher(os.urandom(32)) if random.random() < 0.3 else None
    other = other_rank(tmp_path / "other") if kind.name.startswith("FOREIGN") else None
    campaign = Campaign(tmp_path / "own", FaultPlan(), seed=SEED, cipher=cipher, other=other)
    campaign.run(2)
    campaign.restart(remember=True)
    for _ in range(12):
        campaign.run(1)
        campaign.restart(kind)
        if campaign.damage[kind] >= 3:
            break
    assert campaign.damage[kind] > 0 and campaign.wrong == 0, SEED
    clean_rounds_work(campaign)
    campaign.store.close()


def random_rates(rng: random.Random) -> dict[Fault, float]:
    """Each call goes wrong with one chance of 5, 30 or 60 %, shared out among its faults at random."""
    total, rates = rng.choice((0.05, 0.3, 0.6)), {fault: rng.random() for fault in Fault}
    for call in {fault.call for fault in Fault}:
        mine = [fault for fault in Fault if fault.call == call]
        scale = total / sum(rates[fault] for fault in mine)
        rates |= {fault: rates[fault] * scale for fault in mine}
    rates[Fault.STATVFS_FULL] /= 10  # a full file system makes the rest too quiet
    return rates


def mixed_campaign(tmp_path: Path, faults: int, seed: int) -> Campaign:
    """Everything at once, over restarts, until so many faults were injected."""
    rng = random.Random(seed)
    cipher = PageCipher(rng.randbytes(32)) if seed % 4 == 0 else None
    plan = FaultPlan(seed=seed, hang_s=0.0005)
    campaign = Campaign(tmp_path / "own", plan, seed=seed, cipher=cipher, other=other_rank(tmp_path / "other"))
    while campaign.faults < faults:
        plan.rates = random_rates(rng)
        campaign.run(rng.randrange(1, 30))
        campaign.restart(*rng.sample(list(Damage), rng.randrange(4)), remember=rng.random() < 0.5)
        assert campaign.wrong == 0, seed
    return campaign


def test_mixed_faults(tmp_path: Path) -> None:
    campaign = mixed_campaign(tmp_path, 1500, SEED)
    assert campaign.reads_ok > 100 and len(campaign.plan.counts) > 10
    clean_rounds_work(campaign)
    campaign.store.close()


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_a_million_faults_and_no_wrong_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start, faults, reads, kinds = time.monotonic(), 0, 0, set()
    for part in range(20):
        campaign = mixed_campaign(tmp_path / str(part), 50_000, SEED + part)
        faults, reads = faults + campaign.faults, reads + campaign.reads_ok
        kinds |= {kind for kind, count in (campaign.plan.counts + campaign.damage).items() if count}
        clean_rounds_work(campaign)
        campaign.store.close()
    assert faults >= 1_000_000 and kinds == {*Fault, *Damage}, (SEED, {*Fault, *Damage} - kinds)
    with capsys.disabled():
        print(f"\n{faults} faults, {reads} right reads, 0 wrong, {faults / (time.monotonic() - start):.0f} faults/s")


def test_two_processes_cannot_have_one_directory(tmp_path: Path) -> None:
    code = (
        "import sys; sys.path.insert(0, sys.argv[2])\n"
        "from pathlib import Path\nfrom disk_campaign import open_store\n"
        "store = open_store(Path(sys.argv[1]))\nprint('open', flush=True)\nsys.stdin.read()\nstore.close()"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(Path(__file__).parents[1])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "open\n"
        with pytest.raises(EnvironmentUnfitError, match=f"process {process.pid}"):
            open_store(tmp_path)
        with pytest.raises(EnvironmentUnfitError):
            open_store(tmp_path, rank=1)
        process.kill()
        process.wait()
    store = open_store(tmp_path)  # the dead hold no lock
    with pytest.raises(EnvironmentUnfitError):
        open_store(tmp_path)
    store.close()
    open_store(tmp_path).close()


# --- the tools themselves ----------------------------------------------------------------------------------------


class Probe:
    """A file of 8 blocks, block i full of byte i, behind faulty calls."""

    def __init__(self, tmp_path: Path) -> None:
        self.path = tmp_path / "file"
        self.path.write_bytes(b"".join(bytes([i]) * SLOT for i in range(8)))
        self.plan = FaultPlan(seed=SEED, hang_s=30)
        self.files = FaultyFiles(self.plan)
        self.fd = self.files.open_slab(self.path)

    def read(self, blocks: int = 2) -> tuple[int, bytes]:
        buffers = [aligned_buffer(SLOT) for _ in range(blocks)]
        count = self.files.preadv(self.fd, buffers, SLOT)
        return count, b"".join(buffers)

    def write(self, at: int, blocks: int = 2, byte: int = 255) -> int:
        buffers = [aligned_buffer(SLOT) for _ in range(blocks)]
        for buffer in buffers:
            buffer[:] = bytes([byte]) * SLOT
        return self.files.pwritev(self.fd, buffers, at * SLOT)

    def changed(self) -> dict[int, int]:
        """Place to value of the bytes that are not as they were."""
        data = self.path.read_bytes()
        return {at: byte for at, byte in enumerate(data) if byte != min(at // SLOT, 7) or at >= 8 * SLOT}


@pytest.fixture
def probe(tmp_path: Path) -> Probe:
    return Probe(tmp_path)


def bits(a: bytes, b: bytes) -> int:
    return (int.from_bytes(a, "big") ^ int.from_bytes(b, "big")).bit_count()


RIGHT = b"\1" * SLOT + b"\2" * SLOT


def test_read_faults_do_what_they_say(probe: Probe) -> None:
    assert probe.read() == (2 * SLOT, RIGHT)
    probe.plan.arm(Fault.READ_BIT_FLIP)
    assert bits(probe.read()[1], RIGHT) == 1
    probe.plan.arm(Fault.READ_MISDIRECTED)
    assert probe.read()[1] != RIGHT
    probe.plan.arm(Fault.READ_SHORT)
    assert probe.read()[0] == SLOT
    probe.plan.arm(Fault.READ_EIO)
    with pytest.raises(OSError) as caught:
        probe.read()
    assert caught.value.errno == errno.EIO
    assert probe.read() == (2 * SLOT, RIGHT) and probe.plan.counts.total() == 4 and not probe.changed()


def test_write_faults_do_what_they_say(tmp_path: Path) -> None:
    def after(fault: Fault) -> tuple[int, dict[int, int]]:
        probe = Probe(tmp_path)
        probe.plan.arm(fault)
        count = probe.write(2)
        assert probe.plan.counts == {fault: 1}
        return count, probe.changed()

    whole, places = 2 * SLOT, dict.fromkeys(range(2 * SLOT, 4 * SLOT), 255)
    assert after(Fault.WRITE_LOST) == (whole, {})
    count, changed = after(Fault.WRITE_BIT_FLIP)
    assert count == whole and sum(byte != 255 for byte in changed.values()) == 1
    count, changed = after(Fault.WRITE_TORN)
    assert count == whole and list(changed) == list(range(2 * SLOT, 2 * SLOT + len(changed))) and changed != places
    count, changed = after(Fault.WRITE_MISDIRECTED)
    assert count == whole and len(changed) == whole and changed != places and set(changed.values()) == {255}
    count, changed = after(Fault.WRITE_SHORT)
    assert count == SLOT and changed == dict.fromkeys(range(2 * SLOT, 3 * SLOT), 255)
    for fault, code in ((Fault.WRITE_EIO, errno.EIO), (Fault.WRITE_NO_SPACE, errno.ENOSPC)):
        with pytest.raises(OSError) as caught:
            after(fault)
        assert caught.value.errno == code


def test_swapped_writes(probe: Probe) -> None:
    probe.plan.arm(Fault.WRITE_SWAPPED)
    assert probe.write(1, 1, 101) == SLOT and not probe.changed()
    assert probe.write(5, 1, 105) == SLOT
    assert probe.changed() == dict.fromkeys(range(SLOT, 2 * SLOT), 105) | dict.fromkeys(range(5 * SLOT, 6 * SLOT), 101)
    probe.plan.arm(Fault.WRITE_SWAPPED)
    probe.write(3, 1, 103)
    probe.files.close(probe.fd)  # no partner came: it lands late
    assert probe.path.read_bytes()[3 * SLOT : 4 * SLOT] == bytes([103]) * SLOT


def test_hung_calls_end_when_released(probe: Probe) -> None:
    probe.plan.arm(Fault.READ_HANG)
    results: list[tuple[int, bytes]] = []
    thread = threading.Thread(target=lambda: results.append(probe.read()))
    thread.start()
    thread.join(0.05)
    assert thread.is_alive()
    probe.plan.release()
    thread.join(60)
    assert results == [(2 * SLOT, RIGHT)]


def test_faults_of_other_calls(probe: Probe, tmp_path: Path) -> None:
    files, new = probe.files, tmp_path / "new"
    new.write_bytes(b"new")
    calls = {
        Fault.OPEN_EIO: lambda: files.open(probe.path, os.O_RDONLY),
        Fault.ALLOCATE_EIO: lambda: files.allocate(probe.fd, 8 * SLOT, SLOT),
        Fault.ALLOCATE_NO_SPACE: lambda: files.allocate(probe.fd, 8 * SLOT, SLOT),
        Fault.TRUNCATE_EIO: lambda: files.truncate(probe.fd, 0),
        Fault.UNLINK_EIO: lambda: files.unlink(new),
        Fault.REPLACE_EIO: lambda: files.replace(new, probe.path),
    }
    for fault, call in calls.items():
        probe.plan.arm(fault)
        with pytest.raises(OSError, match=fault.value):
            call()
    probe.plan.arm(Fault.REPLACE_LOST)
    files.replace(new, probe.path)
    assert new.exists() and not probe.changed()
    probe.plan.arm(Fault.STATVFS_FULL)
    assert files.free_bytes(tmp_path) == 0 < files.free_bytes(tmp_path)


def test_a_plan_is_repeatable_and_can_be_narrowed() -> None:
    def draws(**settings: object) -> list[Fault | None]:
        plan = FaultPlan({Fault.READ_EIO: 0.2, Fault.READ_SHORT: 0.2}, seed=5, **settings)
        found = [plan.draw("read", name) for name in ("slab-00000", "index") * 200]
        assert plan.counts.total() == sum(fault is not None for fault in found)
        return found

    assert draws() == draws() and 100 < sum(fault is not None for fault in draws()) < 220
    assert not any(draws(only=slabs)[1::2]) and any(draws(only=slabs)[::2])
    plan = FaultPlan({Fault.READ_EIO: 1.0})
    plan.active = False
    assert plan.draw("read", "") is None and not plan.counts


def test_damage_changes_files_when_it_says_so(tmp_path: Path) -> None:
    """And the store's own files only: their bytes before and after are compared."""
    other = other_rank(tmp_path / "other")
    campaign = Campaign(tmp_path / "own", FaultPlan(), seed=SEED)
    campaign.run(4)
    campaign.store.close()
    home = tmp_path / "own" / namespace().digest.hex()

    def contents() -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in home.iterdir()}

    whole = contents()
    for kind in Damage:
        vandal = Vandal(home, SLOT, seed=SEED, other=other)
        if kind.name.startswith("STALE"):
            vandal.remember()
            for path in home.glob("slab-*"):
                path.write_bytes(bytes(path.stat().st_size))
            (home / "index").write_bytes(bytes((home / "index").stat().st_size))
        before = contents()
        assert vandal.do(kind) is (contents() != before), kind
        for path in home.iterdir():
            path.unlink()
        for name, data in whole.items():
            (home / name).write_bytes(data)
    assert not Vandal(home, SLOT).do(Damage.STALE_INDEX) and not Vandal(home, SLOT).do(Damage.FOREIGN_SLAB)


def test_host_bits() -> None:
    slab = bytearray(1000)
    places = flip_host_bits(memoryview(slab), random.Random(SEED), 5)
    assert len(set(places)) == 5 and bits(bytes(slab), bytes(1000)) == 5
    assert all(slab[place // 8] >> place % 8 & 1 for place in places)


def test_the_limit_holds_under_faults(tmp_path: Path) -> None:
    """However growing fails, the files stay within the limit."""
    plan = FaultPlan({Fault.ALLOCATE_NO_SPACE: 0.5, Fault.TRUNCATE_EIO: 0.3, Fault.OPEN_EIO: 0.2}, seed=SEED)
    campaign = Campaign(tmp_path, plan, seed=SEED)
    for _ in range(6):
        campaign.run(1)
        campaign.restart()
        assert sum(path.stat().st_blocks * 512 for path in tmp_path.rglob("*")) <= LIMIT
    assert make_page(1) != make_page(2) and campaign.wrong == 0
    campaign.store.close()
