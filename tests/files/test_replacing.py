"""Nothing of the user's is deleted: what `build` and `convert` find at and beside their output."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_source import write_tiny_source

from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.format import open_checkpoint
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import open_engine
from wicore_trt.errors import CheckpointError, ConfigError, EngineFormatError

COMMANDS = {"build": build_engine, "convert": convert}
Command = Callable[..., object]


def precious(path: Path, *more: str) -> Path:
    path.mkdir(parents=True)
    (path / "thesis.txt").write_text("years of work")
    for name in more:
        (path / name).write_text("{}")
    return path / "thesis.txt"


@pytest.fixture(params=sorted(COMMANDS))
def command(request: pytest.FixtureRequest) -> Command:
    return COMMANDS[request.param]


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_source(tmp_path / "source")


@pytest.mark.parametrize("force", [False, True])
def test_siblings_with_digits_stay(command: Command, force: bool, source: Path, tmp_path: Path) -> None:
    names = [f"{dot}out.{kind}-{stamp}" for dot in ("", ".") for kind in ("old", "partial") for stamp in
             ("20240101", "4000001", "20240101123000", "\u00b2")]  # fmt: skip
    kept = [precious(tmp_path / name) for name in names]
    command(source, tmp_path / "out", force=force)
    assert all(path.exists() for path in kept)


def test_force_takes_the_commands_own_kind_only(command: Command, source: Path, tmp_path: Path) -> None:
    kept = [
        precious(tmp_path / "game", "engine.json"),
        precious(tmp_path / "weights", "rank0.safetensors", "config.json"),
        precious(tmp_path / "home"),
    ]
    other = COMMANDS["convert" if command is build_engine else "build"]
    other(source, tmp_path / "other")
    for output in (*(path.parent for path in kept), tmp_path / "other"):
        before = sorted(p.name for p in output.iterdir())
        with pytest.raises(ConfigError, match="left alone"):
            command(source, output, force=True)
        assert sorted(p.name for p in output.iterdir()) == before


def test_force_keeps_what_lies_beside(command: Command, source: Path, tmp_path: Path) -> None:
    output = tmp_path / "out"
    command(source, output)
    (output / "notes.txt").write_text("mine")
    with pytest.raises(ConfigError, match=r"does not list: notes\.txt"):
        command(source, output, force=True)
    assert (output / "notes.txt").exists()
    (output / "notes.txt").unlink()
    inside = write_tiny_source(output / "original")
    with pytest.raises(ConfigError, match="source .* lies in"):
        command(inside, output, force=True)
    assert (inside / "model.safetensors").exists()


def test_a_damaged_output_of_ones_own_kind_is_replaced(command: Command, source: Path, tmp_path: Path) -> None:
    """--force is the remedy that error messages name."""
    output = tmp_path / "out"
    command(source, output)
    with (output / "rank0.safetensors").open("r+b") as file:
        file.truncate(100)
    (output / "tokenizer.json").unlink()
    command(source, output, force=True)
    assert (output / "tokenizer.json").exists()


def test_a_link_is_not_followed(command: Command, source: Path, tmp_path: Path) -> None:
    command(source, tmp_path / "real")
    (tmp_path / "link").symlink_to("real")
    for force in (False, True):
        with pytest.raises(ConfigError, match=r"symbolic link.*Name the directory itself: .*real"):
            command(source, tmp_path / "link", force=force)
    assert (tmp_path / "link").is_symlink()


def test_printed_commands_quote_paths(source: Path, tmp_path: Path) -> None:
    engine = build_engine(source, tmp_path / "with space; $(rm)").path
    (engine / "tokenizer.json").unlink()
    with pytest.raises(EngineFormatError) as caught:
        open_engine(engine)
    assert f"'{engine}' --force" in str(caught.value)
    checkpoint = convert(source, tmp_path / "with 'quotes'").path
    config = json.loads((checkpoint / "config.json").read_text())
    config["dtype"], config["mapping"]["tp_size"] = "; reboot", "$(reboot)"
    (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as refused:
        open_checkpoint(checkpoint)
    words = shlex.split(str(refused.value).split("Run: ")[1])
    assert words[:4] == ["wicore", "convert", str(source), str(checkpoint)]
    assert words[4:] == ["--dtype", "; reboot", "--tp", "$(reboot)", "--force"]
