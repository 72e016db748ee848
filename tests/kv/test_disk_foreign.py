"""What others may have put under the disk path: refused by name, never followed, never waited for, never changed."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from disk_store_helpers import SPACE, content, make_page, open_store, put

from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.kv.disk.files import Files
from wicore_trt.kv.disk.tools import inspect_directory, purge_directory, verify_directory

LEFT = replace(SPACE, rank=7)
HOME, OTHER = SPACE.digest.hex(), LEFT.digest.hex()
PLACES = ["LOCK", f"{HOME}/namespace.json", f"{HOME}/index", f"{HOME}/slab-00000", f"{HOME}/slab-00007",
          f"{HOME}/namespace.json.new", f"{OTHER}/index", HOME, OTHER]  # fmt: skip
KINDS = ["link", "dangling link", "hard link", "pipe", "socket", "device", "writable", "foreign"]
PRECIOUS = b"precious" * 4096


@pytest.fixture(autouse=True)
def in_time() -> Iterator[None]:
    """A pipe that is waited for fails the test instead of stopping the run."""

    def late(*_: object) -> None:
        raise TimeoutError("somebody waits for a pipe")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(60)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    """A directory with one page, of this namespace, and a namespace that an earlier server left."""
    path = tmp_path / "cache"
    for space in (LEFT, SPACE):
        store = open_store(path, namespace=space)
        put(store, make_page(0), [0], [content(0, 0)])
        store.close()
    return path


def plant(kind: str, place: Path, aside: Path) -> None:
    """Put something in the place of a file or directory of ours."""
    directory = place.name in (HOME, OTHER)
    if directory and kind in ("hard link", "writable", "foreign"):
        if kind == "hard link":
            pytest.skip("directories have none")
        place.chmod(0o770 if kind == "writable" else 0o700)
        if kind == "foreign":
            chown(place)
        return
    if directory:
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)
    if kind == "link":
        place.symlink_to(aside.parent / "directory" if directory else aside)
    elif kind == "dangling link":
        place.symlink_to(aside.parent / "made elsewhere")
    elif kind == "hard link":
        place.hardlink_to(aside)
    elif kind == "pipe":
        os.mkfifo(place, 0o600)
    elif kind == "socket":
        os.chdir(place.parent)  # a socket's path is short
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(place.name)
        os.chdir("/")
        place.chmod(0o600)
    elif kind == "device":
        if os.geteuid():
            pytest.skip("takes root")
        try:
            os.mknod(place, 0o600 | stat.S_IFCHR, os.makedev(1, 3))
        except PermissionError:
            pytest.skip("takes a container that may make devices")
    else:
        place.write_bytes(PRECIOUS)
        place.chmod(0o622 if kind == "writable" else 0o600)
        if kind == "foreign":
            chown(place)


def chown(place: Path) -> None:
    if os.geteuid():
        pytest.skip("takes root")
    os.chown(place, 4711, -1, follow_symlinks=False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_what_is_not_ours_is_refused_and_left_alone(
    cache: Path, tmp_path: Path, place: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    aside = tmp_path / "precious"
    aside.write_bytes(PRECIOUS)
    aside.chmod(0o600)
    (tmp_path / "directory").mkdir(mode=0o700)
    for name in ("index", "slab-00000", "namespace.json"):
        (tmp_path / "directory" / name).write_bytes(PRECIOUS)
    plant(kind, cache / place, aside)
    before = os.lstat(cache / place)
    with pytest.raises(EnvironmentUnfitError, match=f"{cache / place}: it is "):
        open_store(cache)
    inspect_directory(cache)
    for look in (verify_directory, lambda path: verify_directory(path, dry_run=True)):
        try:
            look(cache)
        except EnvironmentUnfitError:
            assert place == "LOCK"
    after = os.lstat(cache / place)
    same = ("st_mode", "st_ino", "st_size", "st_uid", "st_nlink")
    assert [getattr(before, name) for name in same] == [getattr(after, name) for name in same]
    try:
        purge_directory(cache)
    except EnvironmentUnfitError:
        assert place == "LOCK"
    assert aside.read_bytes() == PRECIOUS and not (tmp_path / "made elsewhere").exists()
    assert all(file.read_bytes() == PRECIOUS for file in (tmp_path / "directory").iterdir())
    assert len(list((tmp_path / "directory").iterdir())) == 3


@pytest.mark.parametrize("umask", [0, 0o777, 0o22])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    path = tmp_path / "new" / "parents" / "cache"
    old = os.umask(umask)
    try:
        store = open_store(path)
        put(store, make_page(0), [0], [content(0, 0)])
        store.close()
    finally:
        os.umask(old)
    for entry in [tmp_path / "new", *(tmp_path / "new").rglob("*")]:
        assert stat.S_IMODE(entry.lstat().st_mode) == (0o700 if entry.is_dir() else 0o600), entry
    store = open_store(path)
    assert len(list(store.recover_pages())) == 1
    store.close()


def test_open_modes_of_ours_are_closed(cache: Path) -> None:
    """As a copy of the directory leaves them; what others may write is not trusted, what they may read is closed."""
    for entry in [cache, cache / HOME]:
        entry.chmod(0o755)
    for name in ("LOCK", f"{HOME}/index", f"{HOME}/slab-00000"):
        (cache / name).chmod(0o644)
    open_store(cache).close()
    for name in (".", "LOCK", HOME, f"{HOME}/index", f"{HOME}/slab-00000"):
        assert not stat.S_IMODE((cache / name).stat().st_mode) & 0o077, name


def test_the_operators_own_link_names_the_directory(tmp_path: Path) -> None:
    """kv.disk_path itself may be a link of this user: it is followed once. Another user's is not."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "link").symlink_to("disk")
    store = open_store(tmp_path / "link")
    (tmp_path / "link").unlink()  # whoever moves it later moves nothing
    put(store, make_page(0), [0], [content(0, 0)])
    store.close()
    assert (tmp_path / "disk" / HOME / "slab-00000").exists()
    (tmp_path / "link").symlink_to("disk")
    chown(tmp_path / "link")
    with pytest.raises(EnvironmentUnfitError, match="symbolic link of user 4711"):
        open_store(tmp_path / "link")


def test_what_is_left_of_a_new_file_is_replaced(cache: Path) -> None:
    """A server died between writing namespace.json and putting it into place."""
    (cache / HOME / "namespace.json.new").write_bytes(b"{")
    (cache / HOME / "namespace.json").unlink()
    open_store(cache).close()
    assert not (cache / HOME / "namespace.json.new").exists()


def test_names_of_others_are_left_alone(cache: Path, tmp_path: Path) -> None:
    """A file system's lost+found, somebody's notes."""
    os.mkfifo(cache / "pipe")
    (cache / HOME / "link").symlink_to(tmp_path)
    (cache / "lost+found").mkdir(mode=0o777)
    store = open_store(cache, files=Files())
    assert len(list(store.recover_pages())) == 1
    store.close()
    assert (cache / "pipe").is_fifo() and (cache / HOME / "link").is_symlink()


@pytest.mark.parametrize("kind", ["hard link", "writable", "foreign", "pipe", "link"])
def test_what_is_put_there_between_look_and_opening_is_seen(tmp_path: Path, kind: str) -> None:
    """The look before is for devices; what counts is what was opened."""
    aside = tmp_path / "aside"
    aside.write_bytes(PRECIOUS)
    aside.chmod(0o600)
    good = os.lstat(aside)
    plant(kind, tmp_path / "index", aside)
    for flags in (os.O_RDWR, os.O_RDONLY, os.O_RDWR | os.O_CREAT):
        with mock.patch("wicore_trt.kv.disk.files.os.lstat", lambda path: good), pytest.raises(OSError):
            Files().open(tmp_path / "index", flags)
    assert aside.read_bytes() == PRECIOUS
