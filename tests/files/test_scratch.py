"""Replacing safely: only our own kind is replaced, only our own scratch removed, and a kill loses nothing (I22)."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import signal
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from wicore_trt import scratch as scratch_module
from wicore_trt.errors import ConfigError
from wicore_trt.scratch import Product, replace_output


def listed(path: Path) -> list[str] | None:
    file = path / "list.json"
    return ["list.json", *json.loads(file.read_text())] if file.is_file() else None


BOX = Product("box", "list.json", listed)


def fill(directory: Path, text: str) -> None:
    (directory / "sub").mkdir()
    (directory / "sub" / "data").write_text(text)
    (directory / "list.json").write_text('["sub/data"]')


def make(output: Path, text: str, *, force: bool = False, source: Path | None = None) -> None:
    with replace_output(output, BOX, force=force, source=source) as scratch:
        fill(scratch.directory, text)
        scratch.publish_output()


def content(output: Path) -> str:
    assert sorted(p.name for p in output.rglob("*")) == ["data", "list.json", "sub"]
    return (output / "sub" / "data").read_text()


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.iterdir())


def test_new_and_replaced(tmp_path: Path) -> None:
    out = tmp_path / "made" / "parents" / "out"
    make(out, "one")
    with pytest.raises(ConfigError, match=r"already exists.*--force"):
        make(out, "two")
    make(out, "two", force=True)
    assert content(out) == "two" and names(out.parent) == ["out"]
    (tmp_path / "plain").mkdir()
    assert out.stat().st_mode == (tmp_path / "plain").stat().st_mode


def note(out: Path) -> None:
    (out / "notes.txt").write_text("mine")


def empty_folder(out: Path) -> None:
    (out / "kvcache").mkdir()


def deep(out: Path) -> None:
    (out / "sub" / "thesis").write_text("mine")


def link(out: Path) -> None:
    (out / "sub" / "link").symlink_to("data")


def folder_for_file(out: Path) -> None:
    (out / "sub" / "data").unlink()
    (out / "sub" / "data").mkdir()
    (out / "sub" / "data" / "thesis").write_text("mine")


@pytest.mark.parametrize("add", [note, empty_folder, deep, link, folder_for_file])
@pytest.mark.parametrize("late", [False, True], ids=["before", "while it runs"])
def test_unlisted_files_refuse_and_stay(add: Callable[[Path], None], late: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "one")
    if not late:
        add(out)
    with pytest.raises(ConfigError, match=r"does not list: (notes|kvcache|sub)"):  # noqa: SIM117
        with replace_output(out, BOX, force=True) as scratch:
            fill(scratch.directory, "two")
            if late:
                add(out)
            scratch.publish_output()
    kept = names(out), names(out / "sub")
    add_again = tmp_path / "again"
    make(add_again, "one")
    add(add_again)
    assert kept == (names(add_again), names(add_again / "sub"))
    assert names(tmp_path) == ["again", "out"]


@pytest.fixture(params=[True, False], ids=["exchanged", "renamed"])
def exchanges(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> bool:
    """Whether the file system exchanges names, which some do not."""
    if not request.param:
        monkeypatch.setattr(scratch_module, "exchange_names", lambda one, other: False)
    elif not scratch_module.exchange_names(tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("other")):
        pytest.skip("this file system does not exchange names")
    return bool(request.param)


def test_what_appears_between_the_last_look_and_the_rename_comes_back(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    make(out, "one")
    rename, exchange = os.rename, scratch_module.exchange_names

    def late(source: Path, target: Path) -> None:
        if Path(source) == out:
            (out / "thesis").write_text("mine")
        rename(source, target)

    def late_exchange(one: Path, other: Path) -> bool:
        if exchanges and not list(tmp_path.rglob("thesis")):
            (out / "thesis").write_text("mine")
        return exchange(one, other)

    monkeypatch.setattr(os, "rename", late)
    monkeypatch.setattr(scratch_module, "exchange_names", late_exchange)
    with pytest.raises(ConfigError, match="does not list: thesis"):
        make(out, "two", force=True)
    assert (out / "thesis").read_text() == "mine" and names(tmp_path) == ["out"]


def test_what_comes_into_the_old_one_after_the_last_look_stays(
    exchanges: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has the old one open, or as current directory, still writes into it."""
    out, sync = tmp_path / "out", scratch_module._sync_path
    make(out, "one")
    inside = os.open(out, os.O_RDONLY)

    def late(path: Path) -> None:
        sync(path)
        if path == tmp_path:
            with open("thesis", "w", opener=lambda name, flags: os.open(name, flags, dir_fd=inside)) as file:
                file.write("mine")

    with monkeypatch.context() as patch:
        patch.setattr(scratch_module, "_sync_path", late)
        make(out, "two", force=True)
    os.close(inside)
    make(out, "three", force=True)
    assert content(out) == "three"
    [thesis] = tmp_path.rglob("thesis")
    assert thesis.read_text() == "mine" and names(thesis.parent) == ["thesis"] and len(names(tmp_path)) == 2


@pytest.mark.parametrize("force", [False, True])
def test_what_appears_at_a_free_output_stays(force: bool, tmp_path: Path) -> None:
    out = tmp_path / "out"
    with pytest.raises(ConfigError), replace_output(out, BOX, force=force) as scratch:
        fill(scratch.directory, "one")
        out.mkdir()
        (out / "thesis").write_text("mine")
        scratch.publish_output()
    assert names(out) == ["thesis"] and names(tmp_path) == ["out"]


def test_what_is_no_box_is_left_alone(tmp_path: Path) -> None:
    box, file, other = tmp_path / "box", tmp_path / "file", tmp_path / "other"
    make(box, "one")
    (tmp_path / "link").symlink_to("box")
    (tmp_path / "dangling").symlink_to("nowhere")
    file.write_text("mine")
    other.mkdir()
    (other / "thesis").write_text("mine")
    os.mkfifo(tmp_path / "pipe")
    before = names(tmp_path)
    for force, name in itertools.product((False, True), ("link", "dangling", "file", "other", "pipe", ".")):
        with pytest.raises(ConfigError, match=r"is a symbolic link.*Name the directory itself|is not a"):
            make(tmp_path / name, "two", force=force)
    assert names(tmp_path) == before and content(box) == "one" and names(other) == ["thesis"]
    (tmp_path / "empty").mkdir()
    make(tmp_path / "empty", "two")


def test_a_source_at_or_in_the_output_refuses(tmp_path: Path) -> None:
    out = tmp_path / "out"
    make(out, "one")
    (tmp_path / "alias").symlink_to("out")
    for source in (out, out / "sub", tmp_path / "alias" / "sub" / "data"):
        with pytest.raises(ConfigError, match="The source .* lies in"):
            make(out, "two", force=True, source=source)
    assert content(out) == "one"
    make(tmp_path / "new", "one", source=tmp_path)  # a source above is not touched


NOT_OURS = [
    "out.old-20240101",
    "out.partial-4000001",
    ".out.partial-4000001",
    "out.old-\u00b2",
    ".out.wicore-" + "0" * 32,
    ".out.wicore-" + "f" * 32 + "x",
    ".other.wicore-" + "0" * 32,
]


def test_a_refused_run_clears_up_too(tmp_path: Path) -> None:
    """A process that was killed behind its last rename leaves a whole output and its scratch."""
    out = tmp_path / "out"
    make(out, "one")
    left = tmp_path / (".out.wicore-" + "a" * 32)
    for name in ("new", "work", "old"):
        (left / name).mkdir(parents=True)
    (left / scratch_module.MARKER).write_bytes(b"wicore scratch\nout")
    with pytest.raises(ConfigError, match="already exists"):
        make(out, "two")
    assert names(tmp_path) == ["out"] and content(out) == "one"


@pytest.mark.parametrize("marker", ["", "wicore scratch\nanother", "mine"], ids=["none", "another output's", "foreign"])
@pytest.mark.parametrize("force", [False, True])
def test_siblings_of_any_name_stay(force: bool, marker: str, tmp_path: Path) -> None:
    for name in NOT_OURS:
        (tmp_path / name / "new").mkdir(parents=True)
        (tmp_path / name / "new" / "thesis").write_text("mine")
        if marker:
            (tmp_path / name / scratch_module.MARKER).write_text(marker)
    make(tmp_path / "out", "one", force=force)
    assert names(tmp_path) == sorted([*NOT_OURS, "out"])
    assert all((tmp_path / name / "new" / "thesis").exists() for name in NOT_OURS)


EVENTS = {"os.rename", "os.mkdir", "open", "os.remove", "os.rmdir", "fcntl.flock", "os.listdir", "os.scandir"}


def killed_at(stop: int, out: Path, force: bool) -> bool:
    """Make a box in a process that is killed at its `stop`-th call on a file; False when it ended before."""
    child = os.fork()
    if child:
        status = os.waitpid(child, 0)[1]
        assert os.WIFSIGNALED(status) or os.WEXITSTATUS(status) == 0, f"{status} at {stop}"
        return os.WIFSIGNALED(status)
    seen = itertools.count(1)

    def dying(event: str, _: object) -> None:
        if event in EVENTS and next(seen) == stop:
            os.kill(os.getpid(), signal.SIGKILL)

    exchange = scratch_module.exchange_names

    def dying_exchange(one: Path, other: Path) -> bool:
        dying("open", None)
        done = exchange(one, other)
        dying("open", None)
        return done

    try:
        vars(scratch_module)["exchange_names"] = dying_exchange
        sys.addaudithook(dying)
        make(out, "two", force=force)
        os._exit(0)
    finally:
        os._exit(1)


@pytest.mark.forks
@pytest.mark.parametrize("old", [pytest.param(False, marks=pytest.mark.long), True], ids=["new", "replaced"])
def test_a_kill_at_every_system_call_loses_nothing(old: bool, exchanges: bool, tmp_path: Path) -> None:
    """Every call on a file is the last one once. Then the output is old or new or (between two renames) comes back, and
    the next run leaves nothing behind."""
    folder = tmp_path / "folder"
    for stop in itertools.count(1):
        folder.mkdir()
        out = folder / "out"
        if old:
            make(out, "one")
        (folder / "thesis").write_text("mine")
        killed = killed_at(stop, out, old)
        if out.exists():
            assert content(out) in ("one", "two")
        assert out.exists() or not (old and exchanges), "what is exchanged is never missing"
        with pytest.raises(LookupError), replace_output(out, BOX, force=True):  # a run that fails
            raise LookupError
        assert out.exists() or not old, "the old one is back"
        assert set(names(folder)) <= {"out", "thesis"}, stop
        make(out, "three", force=True)
        assert content(out) == "three" and names(folder) == ["out", "thesis"]
        shutil.rmtree(folder)
        if not killed:
            break
    assert stop > 20, "the child was killed at every call"


def killed_between_the_renames(out: Path) -> None:
    """What a kill behind the first of `publish`'s renames leaves: the old one in the scratch, nothing at the output."""
    make(out, "one")
    left = out.parent / f".{out.name}.wicore-{'a' * 32}"
    for name in ("new", "work"):
        (left / name).mkdir(parents=True)
    fill(left / "new", "two")
    (left / scratch_module.MARKER).write_bytes(b"wicore scratch\n" + os.fsencode(out.name))
    out.rename(left / "old")


def test_the_old_one_survives_a_directory_in_its_place_and_a_failed_run(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed_between_the_renames(out)
    out.mkdir()  # what `mkdir -p` in a script does
    with pytest.raises(LookupError), replace_output(out, BOX, force=True):
        raise LookupError
    assert content(out) == "one" and names(tmp_path) == ["out"]


def test_the_old_one_survives_a_strangers_directory_in_its_place(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed_between_the_renames(out)
    out.mkdir()
    (out / "thesis").write_text("mine")
    for _ in range(2):
        with pytest.raises(ConfigError, match="left alone"):
            make(out, "two", force=True)
    assert names(out) == ["thesis"]
    shutil.rmtree(out)
    with pytest.raises(ConfigError, match="already exists"):
        make(out, "two")
        make(out, "three")
    assert content(out) == "two" and names(tmp_path) == ["out"]


def test_the_old_one_goes_when_a_new_one_stands_there(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed_between_the_renames(out)
    make(tmp_path / "other", "three")
    (tmp_path / "other").rename(out)
    make(out, "four", force=True)
    assert content(out) == "four" and names(tmp_path) == ["out"]


def test_an_old_one_that_is_half_removed_does_not_come_back(tmp_path: Path) -> None:
    out = tmp_path / "out"
    killed_between_the_renames(out)
    next(tmp_path.glob(".out.*/new")).rename(out)
    next(tmp_path.glob(".out.*/old/sub/data")).unlink()
    out.rename(tmp_path / "kept")
    with pytest.raises(LookupError), replace_output(out, BOX, force=True):
        raise LookupError
    assert content(tmp_path / "kept") == "two" and names(tmp_path) == ["kept"]


def test_a_marker_stays_while_anything_else_does(tmp_path: Path) -> None:
    left = tmp_path / (".out.wicore-" + "a" * 32)
    (left / "unknown").mkdir(parents=True)
    (left / scratch_module.MARKER).write_bytes(b"wicore scratch\nout")
    make(tmp_path / "out", "one")
    assert names(left) == ["marker", "unknown"]


def test_dots_behind_a_link_mean_what_the_kernel_says(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b" / "c").mkdir(parents=True)
    (tmp_path / "a" / "link").symlink_to(tmp_path / "b" / "c")
    make(tmp_path / "a" / "out", "one")
    make(tmp_path / "a" / "link" / ".." / "out", "two", force=True)
    assert content(tmp_path / "a" / "out") == "one" and content(tmp_path / "b" / "out") == "two"


def test_the_current_directory_is_not_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in (".", str(tmp_path)):
        with pytest.raises(ConfigError, match="is the current directory"):
            make(Path(name), "one")
    make(Path("out"), "one")
    monkeypatch.chdir(tmp_path / "out")
    with pytest.raises(ConfigError, match="is the current directory"):
        make(tmp_path / "out", "two", force=True)
    assert os.listdir() and content(tmp_path / "out") == "one"


def test_a_mount_point_refuses_before_the_work() -> None:
    with pytest.raises(ConfigError, match="is a mount point"), replace_output(Path("/proc"), BOX, force=True):
        raise AssertionError


def test_an_empty_output_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o700)
    make(tmp_path / "out", "one")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize("length", [100, 101, 200, 255])
def test_names_of_any_length(length: int, tmp_path: Path) -> None:
    out = tmp_path / ("n" * length)
    with replace_output(out, BOX, force=False) as scratch:
        assert len(scratch.folder.name) <= 143, "what file systems that encrypt names allow"
        fill(scratch.directory, "one")
        scratch.publish_output()
    make(out, "two", force=True)
    assert content(out) == "two" and names(tmp_path) == [out.name]
