"""Lanes without a GPU: side by side on GPUs of their own, in turn where there are none free, and nothing outlives them.

Commands wait for one another's files; only what never ends is ended by time.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from benchmarks.gpu import lanes

PLANS = sorted(Path(lanes.__file__).parent.glob("plans/*.toml"))
MEET = "i=0; until [ -e {shared}/%s ]; do sleep 0.02; i=$((i + 1)); [ $i -lt 3000 ] || exit 9; done"
"""Waits a minute for a file."""
OWN_SESSION = """
import os, sys, time
os.setsid()
with open(sys.argv[1] + "-new", "w") as file:
    file.write(str(os.getpid()))
os.rename(file.name, sys.argv[1])
time.sleep(3600)
"""


def write_plan(path: Path, *given: tuple[str, int, list[str]]) -> Path:
    """Write (name, GPUs, commands of the shell, each with more lines of TOML behind a newline)."""
    text = ""
    for name, gpus, commands in given:
        text += f'[[lane]]\nname = "{name}"\ngpus = {gpus}\n'
        for command in commands:
            script, _, more = command.partition("\n")
            text += f"[[lane.command]]\nrun = '''sh -c \"{script}\"'''\nlimit_s = 60\n{more}\n"
    path.write_text(text)
    return path


def run_plan(plan: Path, tmp_path: Path, *more: str, beside: tuple[Path, ...] = ()) -> tuple[int, str]:
    """Run plans on two GPUs: the exit code and the summary."""
    words = (f"shared={tmp_path}", f"memory={tmp_path}")
    code = lanes.main(
        [*map(str, (plan, *beside)), "--out", str(tmp_path / "out"), "--gpus", "4,7", *more, "--set", *words]
    )
    return code, (tmp_path / "out" / "summary.txt").read_text()


def is_running(pid: int) -> bool:
    """Return whether a process is there, and is not one that waits for its parent to ask for its exit code."""
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_lanes_run_side_by_side_on_gpus_of_their_own(tmp_path, monkeypatch):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    saying = "echo on $CUDA_VISIBLE_DEVICES $NCCL_NVLS_ENABLE $TORCH_SYMM_MEM_DISABLE_MULTICAST $NVSHMEM_DISABLE_NVLS"
    meet_each_other = [
        (name, 1, [f"touch {{shared}}/{name}; {MEET % other}; {saying}; touch {{shared}}/{name}-over"])
        for name, other in (("a", "b"), ("b", "a"))
    ]
    both = ("both", 2, [f"[ -e {{shared}}/a-over ] && [ -e {{shared}}/b-over ] && {saying} && echo {{port}} {{out}}"])
    beside = ("beside", 0, [f"touch {{shared}}/c; {MEET % 'd'}", f"{MEET % 'c'}; touch {{shared}}/d\nbeside = true"])
    code, summary = run_plan(write_plan(tmp_path / "plan", *meet_each_other, both, beside), tmp_path)
    assert code == 0, summary
    assert re.search(r"all: over; failed: none\n$", summary)
    used = [(tmp_path / "out" / name / "1.log").read_text().split() for name in ("a", "b", "both")]
    assert sorted(said[1] for said in used) == ["4", "4,7", "7"]
    assert all(said[2:5] == ["0", "1", "1"] for said in used)
    assert used[2][-2:] == ["20200", str(tmp_path / "out" / "both")]
    assert not list(tmp_path.glob("lanes-*")), "folders of lanes are left"
    assert not lanes.MARK.startswith("WICORE_")  # which `wicore serve` would take for a setting


def test_what_fails_is_named_and_what_never_ends_is_ended(tmp_path):
    (tmp_path / "child.py").write_text(OWN_SESSION)
    child = f"{sys.executable} {{shared}}/child.py {{shared}}/pid & {MEET % 'pid'}; echo figure 1; echo then"
    commands = [f'{child}\nshow = "figure"', "exit 3", "sleep 3600\nlimit_s = 0.5", "echo {site}", "echo last"]
    plan = write_plan(tmp_path / "plan", ("bad", 1, commands), ("wide", 3, ["true"]))
    plan.write_text(plan.read_text().replace("limit_s = 60\nlimit_s = 0.5", "limit_s = 0.5"))
    code, summary = run_plan(plan, tmp_path)
    assert code == 1
    assert re.search(r"bad 1: exit code 0 in .*, 1 left: .*\n    figure 1\n\[", summary)
    assert not is_running(int((tmp_path / "pid").read_text()))
    assert "bad 2: exit code 3" in summary and "bad 3: ended at its limit" in summary
    assert "bad 4: left out for want of --set site" in summary and re.search("bad 5: exit code 0.*\n    last", summary)
    assert summary.rstrip().endswith("failed: wide, bad 2, bad 3")
    assert "wide: not begun" in summary


def test_what_cannot_begin_is_told_and_gives_its_gpus_back(tmp_path):
    plan = write_plan(tmp_path / "plan", ("lost", 2, ["true"]), ("next", 2, ["echo begun"]))
    plan.write_text(plan.read_text().replace("sh -c", "/no/program -c", 1))
    code, summary = run_plan(plan, tmp_path)
    assert code == 1 and re.search("lost 1: FileNotFoundError.*/no/program", summary) and "    begun" in summary
    command = ["--out", str(tmp_path / "again"), "--gpus", "0,1", "--set", f"memory={plan}"]  # a file, not a folder
    assert lanes.main([str(plan), *command]) == 1
    assert re.search("lost: NotADirectoryError", (tmp_path / "again" / "summary.txt").read_text())


def test_lanes_of_several_plans_have_names_of_their_own(tmp_path, capsys):
    for name in ("first", "second"):
        write_plan(tmp_path / name, ("one", 1, [f"echo from {name}"]))
    code, summary = run_plan(tmp_path / "first", tmp_path, "--only", "second-one", beside=(tmp_path / "second",))
    assert code == 0 and "    from second" in summary and "from first" not in summary
    with pytest.raises(SystemExit):
        run_plan(tmp_path / "first", tmp_path, "--only", "second-one")
    assert "no lane is named second-one: one" in capsys.readouterr().err


def test_all_is_ended_and_told_when_the_run_is(tmp_path):
    plan = write_plan(tmp_path / "plan", ("one", 1, ["echo $$ > {shared}/up; sleep 3600", "true"]))
    command = [sys.executable, "-m", "benchmarks.gpu.lanes", str(plan), "--out", str(tmp_path / "out"), "--gpus", "0"]
    command += ["--set", f"shared={tmp_path}", f"memory={tmp_path}"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env={**os.environ, "TMPDIR": str(tmp_path)})
    end = time.monotonic() + 60
    while not ((tmp_path / "up").exists() and (tmp_path / "up").read_text().strip()):
        assert time.monotonic() < end and process.poll() is None
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == 1
    assert not is_running(int((tmp_path / "up").read_text()))
    summary = (tmp_path / "out" / "summary.txt").read_text()
    assert "one 1: ended at its limit" in summary and "one 2: not begun" in summary


@pytest.mark.parametrize("path", PLANS, ids=lambda path: path.stem)
def test_plans_name_files_that_are_there(path, monkeypatch, capsys):
    """Each module and test file of a plan exists; `--dry-run` by hand lets commands parse their options."""
    asked: list[list[str]] = []

    def run(command, **more):
        asked.append(command)
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(lanes.subprocess, "run", run)
    monkeypatch.setattr(lanes.shutil, "which", lambda name: None)
    assert lanes.main([str(path), "--dry-run", "--gpus", "0,1,2,3"]) == 0
    took = int(re.search(r"expected to take (\d+) s on 4 GPUs", capsys.readouterr().out)[1])
    assert 60 < took < 540
    for command in asked:
        words = [*command[3:]] if command[1] == "-c" else []
        files = [word.partition("::")[0] for word in command if word.startswith("tests/")]
        files += [words[0].replace(".", "/") for words in [words] if words and words[0] != "wicore_trt"]
        for file in files:
            there = Path(file), Path(f"{file}.py"), Path(file, "__main__.py")
            assert any(found.is_file() for found in there), file
