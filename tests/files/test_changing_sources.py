"""A source that is replaced or written to while it is read refuses: no output is made of two versions."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_source import write_tiny_source

from wicore_trt.checkpoint.convert import convert
from wicore_trt.engine.build import build_engine
from wicore_trt.errors import CheckpointError
from wicore_trt.files import UntrustedFiles

NAMES = ("model.safetensors", "config.json", "tokenizer.json")


def renamed_over(file: Path, other: Path) -> None:
    shutil.copyfile(other, file.with_name("new"))
    os.replace(file.with_name("new"), file)


def written(file: Path, other: Path) -> None:
    with file.open("r+b") as out:
        out.write(other.read_bytes())


def removed(file: Path, other: Path) -> None:
    file.unlink()


@pytest.mark.parametrize("change", [renamed_over, written, removed])
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", [convert, build_engine])
def test_a_source_that_changes_refuses(
    command: Callable[..., object], name: str, change: Callable[[Path, Path], None], tmp_path: Path
) -> None:
    source, other = write_tiny_source(tmp_path / "source", 1), write_tiny_source(tmp_path / "other", 2)
    for file in source.iterdir():
        os.utime(file, ns=(0, 0))  # long ago, whatever the clock of the file system counts in
    changed: list[int] = []

    def progress(phase: str, done: int, total: int) -> None:
        if phase == "convert" and done > total // 2 and not changed:
            changed.append(done)
            change(source / name, other / name)

    with pytest.raises(CheckpointError, match=rf"{name} (changed while it was being read|is missing)") as caught:
        command(source, tmp_path / "out", progress=progress)
    assert changed and "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["other", "source"]


def test_a_door_that_remembers(tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"one")
    door, forgetful = UntrustedFiles(tmp_path, seen={}), UntrustedFiles(tmp_path)
    assert door.read_bytes(file) == forgetful.read_bytes(file) == b"one"
    door.check_unchanged()
    file.write_bytes(b"three")
    for again in (lambda: door.read_bytes(file), door.check_unchanged):
        with pytest.raises(CheckpointError, match="x changed while it was being read"):
            again()
    forgetful.check_unchanged()
    assert forgetful.read_bytes(file) == b"three"


@pytest.mark.parametrize("again", [False, True], ids=["written to", "made again"])
def test_a_time_that_is_set_back_hides_nothing(again: bool, tmp_path: Path) -> None:
    file = tmp_path / "x"
    file.write_bytes(b"one")
    os.utime(file, ns=(0, 0))  # as archives and images with fixed times have it
    door = UntrustedFiles(tmp_path, seen={})
    door.check_file(file)
    tick = tmp_path / "tick"
    tick.touch()
    while tick.stat().st_ctime_ns <= file.stat().st_ctime_ns:  # until the file system's clock has gone on
        tick.touch()
    if again:
        file.unlink()
    file.write_bytes(b"two")
    os.utime(file, ns=(0, 0))
    with pytest.raises(CheckpointError, match="x changed while it was being read"):
        door.check_unchanged()
