"""Tools for a disk cache directory: they report what a store wrote, and remove what they are asked to and no more."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path

import pytest
from disk_campaign import SLOT, Waiter, content, make_page, namespace, open_store, part_count, tag_of
from disk_damage import Damage, Vandal
from disk_store_helpers import read_page
from msgspec.structs import replace

from wicore_trt.errors import ConfigError, EnvironmentUnfitError, NotFoundError
from wicore_trt.kv.disk.cipher import TAG_FAULT, PageCipher
from wicore_trt.kv.disk.files import aligned_buffer
from wicore_trt.kv.disk.format import BLOCK_BYTES, record_bytes
from wicore_trt.kv.disk.io import Outcome
from wicore_trt.kv.disk.store import DiskStore
from wicore_trt.kv.disk.tools import inspect_directory, purge_directory, verify_directory
from wicore_trt.kv.pages.page import Page

KEY = b"k" * 32
STRIDE = BLOCK_BYTES + SLOT
RECORD_BYTES = record_bytes(namespace().page_tokens)
PAGES = [replace(make_page(i), tenant=tag_of("ab"[i % 3 == 0])) for i in range(1, 19)]  # tenant "b" has each third


def put(store: DiskStore, pages: list[Page], first: int = 0) -> dict[Page, tuple[int, ...]]:
    """Write pages into slots one after another."""
    places = {}
    for page in pages:
        places[page] = slots = tuple(range(first, first + part_count(page)))
        first += len(slots)
        buffers = [aligned_buffer(SLOT) for _ in slots]
        for part, buffer in enumerate(buffers):
            buffer[:] = content(page, 1, part)
        waiter = Waiter(1)
        assert store.write_page(page, slots, buffers, waiter.callback(0)) and waiter.wait() == [Outcome.OK]
    return places


def get(store: DiskStore, page: Page, slots: tuple[int, ...]) -> Outcome | None:
    buffers, waiter = [aligned_buffer(SLOT) for _ in slots], Waiter(1)
    assert read_page(store, page, slots, buffers, waiter.callback(0))
    (outcome,) = waiter.wait()
    right = [bytes(buffer) for buffer in buffers] == [content(page, 1, part) for part in range(len(slots))]
    assert right or outcome is not Outcome.OK
    return outcome


def fill(path: Path, **more: object) -> dict[Page, tuple[int, ...]]:
    store = open_store(path, **more)
    places = put(store, PAGES)
    store.close()
    return places


def kept(path: Path, **more: object) -> set[Page]:
    """Pages that a server finds and can read."""
    store = open_store(path, **more)
    found = {page for page, slots in list(store.recover_pages()) if get(store, page, slots) is Outcome.OK}
    store.close()
    return found


def home(path: Path, rank: int = 0) -> Path:
    return path / namespace(rank).digest.hex()


def change(path: Path, slot: int, at: int) -> None:
    """Flip a bit of a slot."""
    slab, place = divmod(slot, 16)
    with (home(path) / f"slab-{slab:05d}").open("r+b") as file:
        file.seek(place * STRIDE + at)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 1]))


@pytest.mark.parametrize("cipher", [None, PageCipher(KEY)])
def test_inspect_tells_what_was_written(tmp_path: Path, cipher: PageCipher | None) -> None:
    places = fill(tmp_path, cipher=cipher)
    report = inspect_directory(tmp_path)
    (found,) = report.namespaces
    slots = sum(len(place) for place in places.values())
    assert (found.pages, found.used_slots, found.problem) == (len(PAGES), slots, None)
    assert found.encrypted_pages == (0 if cipher is None else len(PAGES))
    assert found.allocated_slots >= slots and found.allocated_bytes == found.allocated_slots * STRIDE
    assert found.made_for == namespace().facts and found.name == namespace().digest.hex()
    for group, use in found.groups.items():
        mine = [page for page in PAGES if page.group == group]
        assert (use.pages, use.bytes) == (len(mine), sum(part_count(page) for page in mine) * SLOT)
    for salt in "ab":
        mine = [page for page in PAGES if page.tenant == tag_of(salt)]
        use = found.tenants[tag_of(salt).hex()]
        assert (use.pages, use.bytes) == (len(mine), sum(part_count(page) for page in mine) * SLOT)
    made = (tmp_path / "LOCK").stat().st_mtime
    assert found.oldest is not None and found.newest is not None and found.oldest <= found.newest
    assert abs(found.newest - made) < 60 and report.used_by is None and report.total_bytes >= found.allocated_bytes


def test_inspect_works_while_a_server_runs_and_does_not_disturb_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    places = put(store, PAGES[:4])
    report = inspect_directory(tmp_path)
    assert report.used_by == os.getpid() and report.namespaces[0].pages == 4
    assert {get(store, page, slots) for page, slots in places.items()} == {Outcome.OK}
    for tool in (verify_directory, purge_directory):
        with pytest.raises(EnvironmentUnfitError, match="Stop the server first"):
            tool(tmp_path)
    store.close()
    assert kept(tmp_path) == set(PAGES[:4])


def test_inspect_of_a_cache_that_nothing_was_written_to(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    (found,) = inspect_directory(tmp_path).namespaces
    assert (found.problem, found.pages) == (None, 0)
    store.close()


def test_inspect_shows_namespaces_that_cannot_be_used(tmp_path: Path) -> None:
    fill(tmp_path)
    facts = home(tmp_path) / "namespace.json"
    good = json.loads(facts.read_text())
    bad = {
        "format": {**good, "format": 99},
        "another namespace": {**good, "namespace": {**good["namespace"], "rank": 1}},
        "lacks": {key: value for key, value in good.items() if key != "slot_bytes"},
        "geometry": {**good, "slab_slots": 0},
    }
    for problem, text in bad.items():
        facts.write_text(json.dumps(text))
        assert problem in str(inspect_directory(tmp_path).namespaces[0].problem)
        assert verify_directory(tmp_path, dry_run=True).faults.total() == 1
    for text in (b"", b"[]", b"{", b"\xff" * 9, b"null"):
        facts.write_bytes(text)
        assert inspect_directory(tmp_path).namespaces[0].problem
    facts.unlink()
    assert inspect_directory(tmp_path).namespaces[0].problem


def test_directories_that_are_no_cache_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    for tool in (inspect_directory, verify_directory, purge_directory):
        for path in (tmp_path, tmp_path / "none", tmp_path / "file"):
            with pytest.raises(NotFoundError, match=r"kv\.disk_path"):
                tool(path)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("sealed", [False, True])
def test_verify_finds_all_well(tmp_path: Path, sealed: bool) -> None:
    cipher = PageCipher(KEY) if sealed else None
    fill(tmp_path, cipher=cipher)
    report = verify_directory(tmp_path, cipher=PageCipher(KEY))
    assert (report.pages, report.good, report.unopened, report.erased_records) == (len(PAGES), len(PAGES), 0, 0)
    assert not report.faults and report.bytes == inspect_directory(tmp_path).namespaces[0].used_slots * STRIDE
    assert verify_directory(tmp_path).unopened == (len(PAGES) if sealed else 0)
    assert kept(tmp_path, cipher=cipher) == set(PAGES)


@pytest.mark.parametrize("sealed", [False, True])
@pytest.mark.parametrize(
    ("at", "cause"), [(100, "header checksum"), (BLOCK_BYTES + 1000, "payload checksum")], ids=["header", "payload"]
)
def test_verify_takes_out_what_is_damaged_and_nothing_else(tmp_path: Path, at: int, cause: str, sealed: bool) -> None:
    cipher = PageCipher(KEY) if sealed else None
    places = fill(tmp_path, cipher=cipher)
    bad = random.sample(PAGES, 3)
    for page in bad:
        change(tmp_path, places[page][-1], at)
    index = (home(tmp_path) / "index").read_bytes()
    dry = verify_directory(tmp_path, cipher=cipher, dry_run=True)
    assert dry.faults == {cause: 3} and dry.erased_records == 0
    assert (home(tmp_path) / "index").read_bytes() == index
    report = verify_directory(tmp_path)  # without the key the checksums still find it
    assert report.faults == {cause: 3} and report.good == len(PAGES) - 3
    assert report.erased_records == sum(len(places[page]) for page in bad)
    assert not verify_directory(tmp_path, cipher=cipher).faults
    assert kept(tmp_path, cipher=cipher) == set(PAGES) - set(bad)


def test_verify_tells_other_damage_apart(tmp_path: Path) -> None:
    places = fill(tmp_path)
    last = max(slot for slots in places.values() for slot in slots)
    whole = {path: path.read_bytes() for path in home(tmp_path).iterdir()}

    def faults() -> dict[str, int]:
        report = verify_directory(tmp_path, dry_run=True)
        for path, data in whole.items():
            path.write_bytes(data)
        return dict(report.faults)

    vandal = Vandal(home(tmp_path), SLOT)
    while not vandal.do(Damage.SWAP_RECORDS):
        pass
    assert set(faults()) <= {"index record"}
    slab = home(tmp_path) / "slab-00000"
    slab.write_bytes(whole[slab][STRIDE:] + whole[slab][:STRIDE])
    assert set(faults()) == {"another page, part, slot, write, namespace or format"}
    slab.unlink()
    assert set(faults()) == {"slab missing"}
    end = home(tmp_path) / f"slab-{last // 16:05d}"
    end.write_bytes(whole[end][: last % 16 * STRIDE + 10])
    assert set(faults()) == {"slab too short"}
    index = home(tmp_path) / "index"
    record = bytearray(whole[index])
    record[places[PAGES[0]][0] * RECORD_BYTES + 20] ^= 1  # the key in one record
    index.write_bytes(record)
    assert faults() == {"index record": 1}


def test_a_page_half_recorded_is_a_leftover(tmp_path: Path) -> None:
    """A server that died while it wrote the records of a page left no damage."""
    places = fill(tmp_path)
    page = next(page for page in PAGES if part_count(page) > 1)
    with (home(tmp_path) / "index").open("r+b") as file:
        file.seek(places[page][0] * RECORD_BYTES)
        file.write(bytes(RECORD_BYTES))
    report = verify_directory(tmp_path)
    assert (report.leftovers, report.erased_records, report.good) == (2, 2, len(PAGES) - 1) and not report.faults
    assert kept(tmp_path) == set(PAGES) - {page}


def test_verify_with_the_wrong_key_clears_nothing(tmp_path: Path) -> None:
    cipher = PageCipher(KEY)
    fill(tmp_path, cipher=cipher)
    with pytest.raises(ConfigError, match="Nothing was cleared"):
        verify_directory(tmp_path, cipher=PageCipher(b"x" * 32))
    assert kept(tmp_path, cipher=cipher) == set(PAGES)


def test_verify_finds_pages_under_an_older_key(tmp_path: Path) -> None:
    fill(tmp_path, cipher=PageCipher(b"x" * 32))
    store = open_store(tmp_path, cipher=PageCipher(KEY))
    old = list(store.recover_pages())
    new = replace(make_page(50), tenant=tag_of("a"))
    put(store, [new], first=60)
    store.close()
    report = verify_directory(tmp_path, cipher=PageCipher(KEY))
    assert report.faults == {TAG_FAULT: len(old)} and report.good == 1
    assert kept(tmp_path, cipher=PageCipher(KEY)) == {new}


def test_purge_everything(tmp_path: Path) -> None:
    fill(tmp_path)
    foreign = home(tmp_path) / "notes.txt"
    foreign.write_text("mine")
    report = purge_directory(tmp_path)
    assert report.pages == len(PAGES) and report.namespaces == [home(tmp_path).name] and report.bytes > 0
    assert {path.name for path in tmp_path.rglob("*")} == {"LOCK", home(tmp_path).name, "notes.txt"}
    assert kept(tmp_path) == set()
    assert purge_directory(tmp_path).pages == 0


def test_purge_one_namespace(tmp_path: Path) -> None:
    fill(tmp_path)
    fill(tmp_path, rank=1, limit_bytes=4 << 20)
    name = home(tmp_path, 1).name
    for wrong in ("", "zz", name + "0"):
        with pytest.raises(NotFoundError, match="inspect"):
            purge_directory(tmp_path, namespace=wrong)
    assert purge_directory(tmp_path, namespace=name[:6]).namespaces == [name]
    assert not home(tmp_path, 1).exists() and kept(tmp_path, limit_bytes=4 << 20) == set(PAGES)


@pytest.mark.parametrize("sealed", [False, True])
def test_purge_one_tenant_leaves_no_byte_of_it(tmp_path: Path, sealed: bool) -> None:
    cipher = PageCipher(KEY) if sealed else None
    store = open_store(tmp_path, cipher=cipher)
    places = put(store, PAGES)
    mine = {page for page in PAGES if page.tenant == tag_of("b")}
    gone = sorted(mine, key=lambda page: page.index)[0]
    store.erase_slots(places[gone])  # evicted: no record any more, but the bytes are there
    store.close()
    report = purge_directory(tmp_path, tenant=tag_of("b"))
    assert report.pages == len(mine) - 1 and report.slots == sum(len(places[page]) for page in mine)
    everything = b"".join(path.read_bytes() for path in home(tmp_path).iterdir())
    assert tag_of("b") not in everything and tag_of("a") in everything
    for page in mine:
        assert page.key not in everything and content(page, 1, 0)[:64] not in everything
    assert kept(tmp_path, cipher=cipher) == set(PAGES) - mine
    assert purge_directory(tmp_path, tenant=tag_of("b")).slots == 0
    assert not verify_directory(tmp_path, cipher=cipher).faults


def test_purge_deletes_damaged_namespaces(tmp_path: Path) -> None:
    fill(tmp_path)
    (home(tmp_path) / "namespace.json").write_text("{")
    assert purge_directory(tmp_path, tenant=tag_of("a")).slots == 0
    assert purge_directory(tmp_path).namespaces == [home(tmp_path).name] and not home(tmp_path).exists()


def test_another_tenant_gets_nothing_from_the_store(tmp_path: Path) -> None:
    """Probes at the slots themselves, with the thief's tag on the owner's page and with the thief's own page names."""
    store = open_store(tmp_path, cipher=PageCipher(KEY), queue_limit=4096)
    places = put(store, PAGES)
    tags, probes, hits = [tag_of(f"thief {i}") for i in range(40)], 0, 0
    for page, slots in places.items():
        waiter, buffers = Waiter(2 * len(tags)), [aligned_buffer(SLOT) for _ in slots]
        for place, tag in enumerate(tags):
            names = (replace(page, tenant=tag), replace(page, tenant=tag, key=os.urandom(32)))
            for side, thief in enumerate(names):
                assert read_page(store, thief, slots, buffers, waiter.callback(2 * place + side))
        outcomes = waiter.wait()
        probes, hits = probes + len(outcomes), hits + sum(outcome is not Outcome.CORRUPT for outcome in outcomes)
        assert get(store, page, slots) is Outcome.OK
    assert probes == 2 * 40 * len(PAGES) and hits == 0
    store.close()
