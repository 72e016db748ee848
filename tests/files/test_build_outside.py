"""What `build`, `convert`, `inspect` and `serve` do with files that are none, with links and without a tokenizer."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_source import write_tiny_source

from wicore_trt.checkpoint.convert import convert
from wicore_trt.engine.build import build_engine
from wicore_trt.errors import CheckpointError, WicoreError


def sparse(path: Path) -> None:
    with path.open("wb") as file:
        file.truncate(1 << 38)


SPECIALS: dict[str, Callable[[Path], None]] = {
    "pipe": os.mkfifo,
    "zero": lambda path: path.symlink_to("/dev/zero"),
    "sparse": sparse,
    "directory": lambda path: path.mkdir(),
    "dangling": lambda path: path.symlink_to("nowhere"),
    "loop": lambda path: path.symlink_to(path.name),
}
SOURCE = [
    "config.json",
    "model.safetensors",
    "model.safetensors.index.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "chat_template.jinja",
]
CHECKPOINT = ["config.json", "rank0.safetensors", "tokenizer.json"]


def put(path: Path, kind: str) -> None:
    path.unlink(missing_ok=True)
    SPECIALS[kind](path)


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", SPECIALS)
def test_specials_in_a_source_or_checkpoint_are_refused(kind: str, tmp_path: Path) -> None:
    for number, name in enumerate(SOURCE):
        source = write_tiny_source(tmp_path / f"source{number}")
        put(source / name, kind)
        with pytest.raises(CheckpointError, match=name) as caught:
            build_engine(source, tmp_path / "engine")
        assert "\n" not in str(caught.value)
    whole = write_tiny_source(tmp_path / "source")
    for number, name in enumerate(CHECKPOINT):
        checkpoint = convert(whole, tmp_path / f"checkpoint{number}").path
        put(checkpoint / name, kind)
        with pytest.raises(CheckpointError, match=name):
            build_engine(checkpoint, tmp_path / "engine")
    assert not (tmp_path / "engine").exists() and not [*tmp_path.glob(".*")]


@pytest.mark.parametrize(
    "command", [["inspect"], ["serve", "--grpc-port", "0", "--http-port", "0"]], ids=["inspect", "serve"]
)
def test_specials_in_an_engine_are_refused(command: list[str], tmp_path: Path) -> None:
    """In processes of their own, so that what would hang is killed."""
    source = write_tiny_source(tmp_path / "source")
    for kind in ("pipe", "zero"):
        engine = build_engine(source, tmp_path / f"engine-{kind}").path
        put(engine / "engine.json", kind)
        line = [sys.executable, "-m", "wicore_trt.cli.main", command[0], str(engine), *command[1:]]
        done = subprocess.run(line, capture_output=True, text=True, timeout=100)
        assert done.returncode == 4 and "engine.json" in done.stderr, done.stderr
        assert "bug in wicore" not in done.stderr and "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["added_tokens.json", "tokenizer.json", "config.json", "model.safetensors"])
def test_links_out_of_a_source_are_refused(name: str, tmp_path: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    secret = tmp_path / "secret"
    if (source / name).exists():
        (source / name).rename(secret)
    else:
        secret.write_text("SECRET")
    (source / name).symlink_to("../secret")
    with pytest.raises(CheckpointError, match=f"{name} is a link to .*secret, outside of"):
        build_engine(source, tmp_path / "engine")
    assert not (tmp_path / "engine").exists()


def test_a_snapshot_of_the_hub_cache_builds(tmp_path: Path) -> None:
    repository = tmp_path / "models--owner--tiny"
    (repository / "snapshots").mkdir(parents=True)
    (repository / "blobs").mkdir()
    snapshot = write_tiny_source(repository / "snapshots" / "c0ffee")
    for number, file in enumerate(sorted(snapshot.iterdir())):
        file.rename(repository / "blobs" / str(number))
        file.symlink_to(f"../../blobs/{number}")
    engine = build_engine(snapshot, tmp_path / "engine")
    assert not any(path.is_symlink() for path in engine.path.rglob("*"))


def test_an_engine_without_a_tokenizer_is_not_built(tmp_path: Path) -> None:
    source = write_tiny_source(tmp_path / "source")
    for content in (None, b"", b"{}", b"\0" * 1000, b'{"version": "1.0"}'):
        (source / "tokenizer.json").unlink(missing_ok=True)
        if content is not None:
            (source / "tokenizer.json").write_bytes(content)
        with pytest.raises(WicoreError, match=r"tokenizer\.json"):
            build_engine(source, tmp_path / "engine")
        assert not (tmp_path / "engine").exists()
