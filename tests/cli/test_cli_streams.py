"""Standard streams as shells give them: full, closed, without a reader, in another encoding."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_source import write_tiny_source

from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import open_engine

WICORE = f"{sys.executable} -m wicore_trt.cli.main"


def shell(command: str, cwd: Path, **env: str) -> subprocess.CompletedProcess[bytes]:
    done = subprocess.run(["bash", "-c", command], capture_output=True, cwd=cwd, env=os.environ | env)
    assert b"bug in wicore" not in done.stderr and b"Traceback" not in done.stderr, done.stderr
    return done


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_source(tmp_path / "source")


def test_stdout_that_takes_nothing(tmp_path: Path) -> None:
    full = shell(f"{WICORE} recipes list > /dev/full", tmp_path)
    assert full.returncode == 4 and full.stderr.count(b"\n") == 1 and b"No space left on device" in full.stderr
    assert shell(f"{WICORE} recipes list >&-", tmp_path).returncode == 0
    assert shell(f"{WICORE} recipes show nothing 2>&-", tmp_path).returncode == 3
    assert shell(f"{WICORE} recipes list | true; exit ${{PIPESTATUS[0]}}", tmp_path).returncode in (0, 1)


def test_a_closed_stream_gives_its_number_to_no_file(source: Path) -> None:
    """What is written to a closed standard stream must not land in the engine."""
    done = shell(f"{WICORE} build source out >&- 2>&-", source.parent)
    assert done.returncode == 0, done.stderr
    open_engine(source.parent / "out")


STRICT = [
    ({"PYTHONIOENCODING": "ascii"}, b"by\xfftes"),
    ({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, "\u00fc \u4e2d".encode()),
]


@pytest.mark.parametrize(("env", "name"), STRICT, ids=["ascii", "C"])
def test_encodings_that_lack_the_path(env: dict[str, str], name: bytes, source: Path) -> None:
    done = subprocess.run(
        [*map(os.fsencode, WICORE.split()), b"build", b"source", name],
        capture_output=True, cwd=source.parent, env=os.environ | env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(b"built ") and (source.parent / os.fsdecode(name)).is_dir()


def test_the_current_directory_is_gone(source: Path) -> None:
    root = Path(__file__).parents[2]
    command = f"mkdir gone && cd gone && rmdir ../gone && {WICORE} build {source.parent}/source relative"
    done = shell(command, source.parent, PYTHONPATH=str(root))
    assert done.returncode == 4 and b"current directory no longer exists" in done.stderr
    build_engine(source, source.parent / "out")
    command = f"mkdir gone && cd gone && rmdir ../gone && {WICORE} inspect {source.parent}/out"
    done = shell(command, source.parent, PYTHONPATH=str(root))
    assert done.returncode == 4 and done.stderr.count(b"\n") == 1, done.stderr


def test_progress_that_nobody_can_read_ends_nothing(source: Path) -> None:
    done = shell(f"{WICORE} build source out 2> /dev/full", source.parent)
    assert done.returncode == 0 and done.stdout.startswith(b"built ")
    open_engine(source.parent / "out")


def test_errors_are_one_line_without_control_characters(tmp_path: Path) -> None:
    done = shell(f"{WICORE} recipes show $'no\\nwhere\\e[31m'", tmp_path)
    assert done.returncode == 3 and done.stderr.count(b"\n") == 1 and b"\x1b" not in done.stderr
