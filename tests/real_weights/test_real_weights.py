"""A short form of the campaign on a tiny random model: it finds nothing wrong, and would find it."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch")

from tiny_source import write_tiny_source

from real_weights import campaign
from wicore_trt.engine.build import build_engine


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scratch = tmp_path_factory.mktemp("tiny")
    return build_engine(write_tiny_source(scratch / "source"), scratch / "engine", dtype="float32", page_tokens=4).path


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WICORE_EXECUTOR__THREADS", "1")  # tiny operators are slower in two


OPTIONS = ["--device", "cpu", "--faults", "250", "--conversations", "6"]


def run_until_seen(ways: tuple[str, ...], options: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Run campaigns, at most four, until every way is among what they found: a slow disk may leave one without reads.
    None may answer wrongly."""
    said = ""
    for _ in range(4):
        status = campaign.main(options)
        said += capsys.readouterr().out
        assert status == 0, said
        if all(way in said for way in ways):
            return
    pytest.fail(said)


def test_no_fault_is_believed(engine: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run_until_seen(
        ("found host bit", "found leaving", "found coming", "disk: corrupt"), [str(engine), *OPTIONS], capsys
    )


def test_no_fault_is_believed_where_pages_are_coded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_tiny_source(tmp_path / "source", head_dim=128)
    built = build_engine(source, tmp_path / "engine", dtype="float32", kv_dtype="bfloat16", page_tokens=16)
    ways = ("found host bit", "found coming", "disk: corrupt", "host: unfit")
    run_until_seen(ways, [str(built.path), *OPTIONS, "--coded"], capsys)


def test_without_the_check_answers_are_wrong(engine: Path) -> None:
    assert campaign.main([str(engine), *OPTIONS, "--unchecked"]) == 0
