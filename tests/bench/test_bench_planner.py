"""The planner's table: every cell of a small grid is there, the worst are named, the exit code says if goals hold."""

from __future__ import annotations

import pytest

from benchmarks.kv import planner


def test_the_table_and_the_exit_code(capsys: pytest.CaptureFixture[str]) -> None:
    assert planner.main(["--longest", "2048", "--noise", "0"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert sum("K  " in line for line in lines) == 3 * 2 * 5 * 13 + 3
    assert lines[-1].startswith("390 cells, 0 miss a goal")
    assert lines[1].split()[-2:] == ["/oracle", "/recomp"]


def test_a_missed_goal_is_an_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(planner, "ORACLE_GOAL", 0.99)
    assert planner.main(["--longest", "1024", "--noise", "0", "--worst", "2"]) == 1
    assert "0 miss" not in capsys.readouterr().out
