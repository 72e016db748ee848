"""The index against a slow and simple reading of the same records; and the order of clearing and writing."""

from __future__ import annotations

import errno
import random
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest
from disk_store_helpers import RECORD_BYTES, SPACE, make_page
from msgspec import structs

from wicore_trt.kv.disk.cipher import PageCipher
from wicore_trt.kv.disk.files import Files, move_buffers
from wicore_trt.kv.disk.format import SlotFormat
from wicore_trt.kv.disk.index import SlotIndex, find_runs
from wicore_trt.kv.pages.page import Page

PLAIN = SlotFormat(SPACE, None)


def open_index(path: Path, records: int = 64, files: Files | None = None) -> SlotIndex:
    index = SlotIndex(path / "index", SPACE, PLAIN, files or Files())
    index.resize_to(records)
    return index


def pages(index: SlotIndex) -> list[tuple[Page, tuple[int, ...]]]:
    return [(page, tuple(slots)) for page, slots in index.load_pages()]


def simply(records: dict[int, tuple[Page, int, int, int]]) -> list[tuple[Page, tuple[int, ...]]]:
    """What must be found, from slot -> (page, part, parts, write id)."""
    writes: dict[int, list[tuple[int, Page, int, int]]] = defaultdict(list)
    for slot, (page, part, parts, write_id) in records.items():
        writes[write_id].append((part, page, parts, slot))
    newest: dict[tuple[str, bytes], tuple[int, Page, tuple[int, ...]]] = {}
    for write_id, found in sorted(writes.items()):
        found.sort(key=lambda entry: entry[0])
        numbers, owners, counts, slots = zip(*found, strict=True)
        if len(set(owners)) == 1 and set(counts) == {len(found)} and numbers == tuple(range(len(found))):
            newest[owners[0].name] = (write_id, owners[0], slots)
    return [(page, slots) for _, page, slots in sorted(newest.values(), key=lambda entry: entry[0])]


@pytest.mark.parametrize("round_", range(40))
def test_records_in_any_disorder(tmp_path: Path, round_: int, monkeypatch: pytest.MonkeyPatch) -> None:
    choose, records = random.Random(), {}
    monkeypatch.setattr("wicore_trt.kv.disk.index._AT_ONCE", choose.choice([1, 7, 64, 1 << 14]))
    for write_id in choose.sample(range(1, 60), choose.randint(0, 25)):
        page = make_page(choose.randrange(8), choose.choice(["local", "global"]))
        parts = choose.choice([1, 1, 2, 3, 5])
        for part, slot in enumerate(choose.sample(range(64), parts)):
            kind = choose.random()
            if kind < 0.03:
                continue  # lost
            if kind < 0.05:
                part = choose.randrange(parts)
            if kind > 0.97:
                page = structs.replace(page, index=page.index + 1)
            records[slot] = (page, part, parts, write_id)
    data = bytearray(64 * RECORD_BYTES)
    for slot, (page, part, parts, write_id) in records.items():
        data[slot * RECORD_BYTES : (slot + 1) * RECORD_BYTES] = PLAIN.make_record(page, part, parts, slot, write_id)
    for slot in choose.sample(range(64), 2):  # damage
        data[slot * RECORD_BYTES + choose.randrange(112)] ^= 1 << choose.randrange(8)
        records.pop(slot, None)
    (tmp_path / "index").write_bytes(data)
    index = open_index(tmp_path)
    found = index.load_pages()
    expected = simply(records)
    assert [(page, tuple(slots)) for page, slots in found] == expected
    used = {slot for _, slots in expected for slot in slots}
    assert not used & set(found.stale) and set(records) <= used | set(found.stale)
    ids = found.per_slot(found.write_ids, 64)
    for slot in range(64):
        assert ids[slot] == (records[slot][3] if slot in used else 0)
    index.close()


def test_records_for_another_slot_cipher_or_with_absurd_write_ids_are_damage(tmp_path: Path) -> None:
    other = SlotFormat(SPACE, PageCipher(b"k" * 32))
    page, data = make_page(1), bytearray(8 * RECORD_BYTES)
    bad = [PLAIN.make_record(page, 0, 1, 5, 9), other.make_record(page, 0, 1, 1, 9)]
    bad += [
        PLAIN.make_record(page, 0, 1, 2, 1 << 63),
        PLAIN.make_record(page, 0, 1, 3, 0),
        PLAIN.make_record(page, 1, 1, 4, 9),
    ]
    data[: len(bad) * RECORD_BYTES] = b"".join(bad)
    (tmp_path / "index").write_bytes(data)
    index = open_index(tmp_path, 8)
    found = index.load_pages()
    assert not list(found) and found.stale == [0, 1, 2, 3, 4]
    index.close()


def test_a_record_written_after_a_forget_stays(tmp_path: Path) -> None:
    index, page = open_index(tmp_path), make_page(1, "global")
    index.put_records(make_page(2), [3], 1)
    index.forget_slots([3, 4, 9])
    index.put_records(page, [4, 3], 2)
    index.flush_records()
    assert pages(index) == [(page, (4, 3))]
    index.forget_slots([3])
    assert pages(index) == [(page, (4, 3))], "only noted"
    index.close()
    index = open_index(tmp_path)
    assert not pages(index), "closing writes it"
    index.close()


def test_a_clear_that_failed_is_tried_again(tmp_path: Path) -> None:
    class Failing(Files):
        fails = False

        def pwritev(self, fd: int, buffers: Sequence[memoryview | bytes], offset: int) -> int:
            if self.fails:
                raise OSError(errno.EIO, "bad disk")
            return super().pwritev(fd, buffers, offset)

    files = Failing()
    index = open_index(tmp_path, files=files)
    index.put_records(make_page(1), [3], 1)
    index.put_records(make_page(2), [5], 2)
    index.forget_slots([3])
    files.fails = True
    with pytest.raises(OSError):
        index.flush_records()
    files.fails = False
    index.flush_records()
    assert pages(index) == [(make_page(2), (5,))]
    index.close()


@pytest.mark.parametrize("leave", ["forget_slots", "put_records", "leave_records"])
def test_a_new_end_does_not_bring_a_record_back(tmp_path: Path, leave: str) -> None:
    """It was noted, the page left, and only then the index was brought up to date."""
    index = open_index(tmp_path)
    index.put_records(make_page(1), [3, 5], 10)
    index.stamp_records(make_page(1), [3, 5], 10, 1 << 31)
    if leave == "put_records":
        index.put_records(make_page(2), [3], 11)
        index.put_records(make_page(3), [5], 12)
    else:
        getattr(index, leave)([3, 5])
    index.flush_records()
    left = {
        "forget_slots": [],
        "put_records": [(make_page(2), (3,)), (make_page(3), (5,))],
        "leave_records": [(make_page(1), (3, 5))],
    }
    assert pages(index) == left[leave] and not index.load_pages().find_ends()
    index.close()


def test_a_page_ends_with_the_soonest_of_its_parts(tmp_path: Path) -> None:
    """A server died while it wrote a new end down."""
    index = open_index(tmp_path)
    for number, ends in ((1, (0, 50)), (2, (70, 0)), (3, (90, 80)), (4, (0, 0))):
        for part, end in enumerate(ends):
            record = PLAIN.make_record(make_page(number), part, 2, 2 * number + part, number, end)
            move_buffers(Files().pwritev, index._fd, [record], (2 * number + part) * RECORD_BYTES)
    ends = {make_page(1).key: 50, make_page(2).key: 70, make_page(3).key: 80}
    assert index.load_pages().find_ends() == ends
    found = index.load_pages(now=75.0)
    assert {page.index for page, _ in found} == {3, 4} and found.stale == [2, 3, 4, 5] and found.passing == [3, 4]
    assert found.find_ends() == {make_page(3).key: 80}
    index.close()


def test_growing_keeps_and_cutting_drops(tmp_path: Path) -> None:
    index = open_index(tmp_path, 4)
    index.put_records(make_page(1), [3], 1)
    index.resize_to(8)
    index.put_records(make_page(2), [7], 2)
    assert len(pages(index)) == 2
    index.resize_to(5)
    assert pages(index) == [(make_page(1), (3,))]
    index.close()
    assert (tmp_path / "index").stat().st_size == 5 * RECORD_BYTES


@pytest.mark.parametrize("cipher", [None, PageCipher(b"k" * 32)])
def test_pages_come_back_with_their_tokens(tmp_path: Path, cipher: PageCipher | None) -> None:
    """Also a page of several parts, one whose end was written anew, and those whose tokens nobody knew. What is
    encrypted has its tokens nowhere in the file, and another key gets none of them."""
    slot_format = SlotFormat(SPACE, cipher)
    index = SlotIndex(tmp_path / "index", SPACE, slot_format, Files())
    index.resize_to(16)
    made = [make_page(number) for number in range(5)]
    for number, page in enumerate(made):
        index.put_records(page, [3 * number + 1, 3 * number], number + 1)
    index.stamp_records(made[1], [4, 3], 2, 99)
    index.flush_records()
    assert [page.tokens for page, _ in index.load_pages()] == [page.tokens for page in made]
    assert {len(page.tokens) for page in made} == {0, 64}
    index.close()
    stored = (tmp_path / "index").read_bytes()
    assert [page.tokens in stored for page in made[1:4]] == [cipher is None] * 3
    if cipher is not None:
        other = SlotIndex(tmp_path / "index", SPACE, SlotFormat(SPACE, PageCipher(b"x" * 32)), Files())
        found = list(other.load_pages())
        assert [page for page, _ in found] == made and not any(page.tokens for page, _ in found)
        other.close()


def test_adjacent() -> None:
    assert list(find_runs([3, 4, 5, 9, 8, 1, 2])) == [(0, 3), (3, 4), (4, 5), (5, 7)]
    assert list(find_runs([6, 7, 8, 9, 11], 4)) == [(0, 2), (2, 4), (4, 5)]
    assert list(find_runs([])) == [] and list(find_runs([7])) == [(0, 1)]
