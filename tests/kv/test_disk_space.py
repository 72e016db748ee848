"""The directory: one process, one user, closed modes, a limit that nothing passes, a floor of free space."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import random
import stat
from pathlib import Path

import pytest
from disk_store_helpers import SLOT, SPACE, buffers, content, get, make_page, open_store, put, wait_for

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.kv.disk.files import Files, tree_bytes
from wicore_trt.kv.disk.space import DiskSpace, Space
from wicore_trt.kv.disk.store import DiskStore, Outcome

OTHER = dataclasses.replace(SPACE, engine="other")


def used(path: Path) -> int:
    """What `du` counts, or the lengths where those are more."""
    found = [path, *path.rglob("*")]
    return sum(max(entry.lstat().st_size, entry.lstat().st_blocks * 512) for entry in found)


def fill(store: DiskStore, path: Path, limit: int, first: int = 0) -> int:
    """Write one page into each slot; how many were written."""
    for slot in range(first, store.num_slots):
        if put(store, make_page(slot), [slot], [content(slot, 0)]) is not Outcome.OK:
            return slot
        assert used(path) <= limit
    return store.num_slots


@pytest.mark.parametrize("slots", [1, 2, 15, 16, 17, 100])
def test_space_arithmetic(slots: int) -> None:
    space = Space(SLOT, 16, 16)
    need = space.bytes_of(slots)
    assert space.slots_within(need) == slots and space.slots_within(need - 1) == slots - 1
    assert space.slots_within(0) == space.slots_within(-5) == 0


@pytest.mark.parametrize("limit", [300_000, 1_000_000])
def test_the_limit_holds_and_is_used(tmp_path: Path, limit: int) -> None:
    store = open_store(tmp_path, limit_bytes=limit)
    assert fill(store, tmp_path, limit) == store.num_slots == store.existing_slots
    assert used(tmp_path) > limit - 64 * 1024 - 16 * 1024 * (store.num_slots // 16 + 2) - 3 * SLOT
    store.close()


@pytest.mark.parametrize(("limit", "most"), [(4 << 30, 1), (1 << 28, 6)])
def test_others_are_counted_again_only_near_the_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int, most: int
) -> None:
    store, counted = open_store(tmp_path, limit_bytes=limit, slab_bytes=1 << 20), list[int]()
    count = DiskSpace._count_other_bytes

    def noted(space: DiskSpace, *, stale: bool = True) -> int:
        counted.append(count(space, stale=stale))
        return counted[-1]

    monkeypatch.setattr(DiskSpace, "_count_other_bytes", noted)
    slots = store._space.slab_slots  # type: ignore[attr-defined]
    for number in range(6):
        assert put(store, make_page(number), [number * slots], [content(number, 0)]) is Outcome.OK
    assert len(counted) == most
    store.close()


def test_files_are_closed_to_others(tmp_path: Path) -> None:
    home = tmp_path / "cache"
    home.mkdir(mode=0o755)
    store = open_store(home)
    put(store, make_page(0), [0], [content(0, 0)])
    for entry in [home, *home.rglob("*")]:
        assert stat.S_IMODE(entry.stat().st_mode) == (0o700 if entry.is_dir() else 0o600), entry
    store.close()


def test_another_users_directory_is_refused(tmp_path: Path) -> None:
    class Foreign(Files):
        owner = os.geteuid() + 1

    with pytest.raises(EnvironmentUnfitError, match=f"{tmp_path}: it is owned by user.*this user owns"):
        open_store(tmp_path, files=Foreign())


def test_a_second_user_of_the_directory_is_told_who_has_it(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    with pytest.raises(EnvironmentUnfitError, match=rf"process {os.getpid()}\..*disk_path of its own"):
        open_store(tmp_path, namespace=OTHER)
    store.close()
    open_store(tmp_path, namespace=OTHER).close()


def test_what_the_system_refuses_is_said_with_a_fix(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(EnvironmentUnfitError, match="directory"):
            open_store(path)


def test_a_limit_below_one_slot_names_the_least(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentUnfitError, match="more than") as caught:
        open_store(tmp_path, limit_bytes=50_000)
    least = int(caught.value.fix.split("more than ")[1].split(",")[0])
    store = open_store(tmp_path, limit_bytes=least)
    assert store.num_slots == 1
    store.close()


def test_files_of_others_count_and_stay(tmp_path: Path) -> None:
    (tmp_path / "notes").write_bytes(bytes(500_000))
    store = open_store(tmp_path, limit_bytes=1_000_000)
    assert fill(store, tmp_path, 1_000_000) == store.num_slots
    store.close()
    assert (tmp_path / "notes").stat().st_size == 500_000


def test_a_file_that_appears_later_counts_too(tmp_path: Path) -> None:
    store = open_store(tmp_path, limit_bytes=1_000_000)
    put(store, make_page(0), [0], [content(0, 0)])
    (tmp_path / "notes").write_bytes(bytes(500_000))
    written = fill(store, tmp_path, 1_000_000, first=1)
    assert 16 <= written == store.existing_slots < store.num_slots
    store.close()


def test_other_namespaces_go_oldest_first_when_space_is_needed(tmp_path: Path) -> None:
    limit, homes = 1_200_000, []
    for number in range(3):
        other = dataclasses.replace(SPACE, rank=number)
        store = open_store(tmp_path, namespace=other, limit_bytes=limit)
        fill_to = 30
        for slot in range(fill_to):
            put(store, make_page(slot), [slot], [content(slot, 0)])
        store.close()
        homes.append(tmp_path / other.digest.hex())
        for path in homes[-1].iterdir():
            os.utime(path, (number + 1e9, number + 1e9))
    assert all(home.exists() for home in homes) and used(tmp_path) <= limit
    seen = []
    store = open_store(tmp_path, namespace=OTHER, limit_bytes=limit)
    for slot in range(store.num_slots):
        assert put(store, make_page(slot), [slot], [content(slot, 0)]) is Outcome.OK
        assert used(tmp_path) <= limit
        seen.append([home.exists() for home in homes])
    assert seen[0] != seen[-1] == [False] * 3
    for state in seen:
        assert state == sorted(state), "the oldest goes first"
    store.close()


def test_a_smaller_limit_cuts_the_slabs(tmp_path: Path) -> None:
    store = open_store(tmp_path, limit_bytes=1_000_000)
    count = fill(store, tmp_path, 1_000_000)
    store.close()
    store = open_store(tmp_path, limit_bytes=500_000)
    assert used(tmp_path) <= 500_000 and store.num_slots < count
    assert sum(path.stat().st_size for path in tmp_path.rglob("slab-*")) == store.num_slots * 2 * SLOT
    found = dict(store.recover_pages())
    assert sorted(map(tuple, found.values())) == [(slot,) for slot in range(store.num_slots)]
    for page, slots in found.items():
        assert get(store, page, slots) == (Outcome.OK, [content(slots[0], 0)])
    store.close()
    store = open_store(tmp_path, limit_bytes=1_000_000)
    kept = len(dict(store.recover_pages()))
    assert kept == len(found) and fill(store, tmp_path, 1_000_000, first=kept) == count
    store.close()


def test_another_geometry_starts_over(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    put(store, make_page(0), [0], [content(0, 0)])
    store.close()
    store = open_store(tmp_path, slot_bytes=2 * SLOT)
    assert not list(store.recover_pages())
    store.close()
    store = open_store(tmp_path)
    assert not list(store.recover_pages())
    store.close()


@pytest.mark.parametrize("text", ["", "[]", "{", '{"slab_slots": -1}', "null", "\xff"])
def test_a_damaged_description_starts_over(tmp_path: Path, text: str) -> None:
    store = open_store(tmp_path)
    put(store, make_page(0), [0], [content(0, 0)])
    store.close()
    description = tmp_path / SPACE.digest.hex() / "namespace.json"
    assert json.loads(description.read_text())["namespace"] == json.loads(json.dumps(SPACE.facts))
    description.write_bytes(text.encode("latin-1"))
    store = open_store(tmp_path)
    assert not list(store.recover_pages())
    assert put(store, make_page(0), [0], [content(0, 0)]) is Outcome.OK
    store.close()


class Full(Files):
    """A file system with so many bytes free. `floor` lies: allocation fails before statvfs says so."""

    def __init__(self, free: int, lies: bool = False) -> None:
        self.left, self.lies = free, lies

    def free_bytes(self, path: Path) -> int:
        return self.left + (1 << 40 if self.lies else 0)

    def allocate(self, fd: int, offset: int, nbytes: int) -> None:
        if nbytes > self.left:
            super().allocate(fd, offset, nbytes // 2)  # as file systems do: some of it is taken, then ENOSPC
            raise OSError(errno.ENOSPC, "no space")
        self.left -= nbytes
        super().allocate(fd, offset, nbytes)


def test_the_floor_of_free_space_is_kept(tmp_path: Path) -> None:
    files = Full(1_000_000)
    store = open_store(tmp_path, files=files, free_bytes=600_000)
    written = fill(store, tmp_path, 2 << 20)
    assert 16 <= written == store.existing_slots < store.num_slots and files.left >= 600_000
    files.left += 500_000
    assert put(store, make_page(written), [written], [content(written, 0)]) is Outcome.OK, "space came back"
    assert store.existing_slots > written and files.left >= 600_000
    store.close()


def test_a_full_file_system_is_no_space_and_what_exists_goes_on(tmp_path: Path) -> None:
    store = open_store(tmp_path, files=Full(400_000, lies=True))
    written = fill(store, tmp_path, 2 << 20)
    assert 16 <= written == store.existing_slots < store.num_slots
    assert sum(path.stat().st_size for path in tmp_path.rglob("slab-*")) == written * 2 * SLOT, "given back"
    for slot in random.sample(range(written), 10):
        assert put(store, make_page(slot), [slot], [content(slot, 0, 1)]) is Outcome.OK
        assert get(store, make_page(slot), [slot]) == (Outcome.OK, [content(slot, 0, 1)])
    beyond = buffers([content(0, 0)])
    assert wait_for(store.write_page, make_page(0), [written], beyond) is Outcome.NO_SPACE
    store.close()
    store = open_store(tmp_path)
    assert len(list(store.recover_pages())) == written
    store.close()


def test_files_that_cannot_reserve_space_are_filled_with_zeros(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.EOPNOTSUPP, "not supported")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    store = open_store(tmp_path)
    assert fill(store, tmp_path, 2 << 20) == store.num_slots
    store.close()


def test_without_o_direct(tmp_path: Path) -> None:
    class Buffered(Files):
        def open(self, path: Path, flags: int) -> int:
            if flags & os.O_DIRECT:
                raise OSError(errno.EINVAL, "no O_DIRECT here")
            return super().open(path, flags)

    store = open_store(tmp_path, files=Buffered())
    assert put(store, make_page(0), [0], [content(0, 0)]) is Outcome.OK
    assert get(store, make_page(0), [0]) == (Outcome.OK, [content(0, 0)])
    store.close()


def test_links_are_not_followed(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "big").write_bytes(bytes(5 << 20))
    cache = tmp_path / "cache"
    open_store(cache).close()
    (cache / "link").symlink_to(outside)
    (cache / ("0" * 32)).symlink_to(outside)
    assert tree_bytes(Files(), cache) < 1 << 20
    index = cache / SPACE.digest.hex() / "index"
    index.unlink()
    index.symlink_to(outside / "big")
    with pytest.raises(EnvironmentUnfitError):
        open_store(cache)
    assert (outside / "big").stat().st_size == 5 << 20


def test_a_file_system_that_is_too_small_is_said_at_the_start(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    open_store(tmp_path).close()
    assert not caplog.records
    open_store(tmp_path, files=Full(0)).close()
    assert "the disk has room for 0.0 of the" in caplog.text
