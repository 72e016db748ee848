"""An engine directory is opened only when every byte of it is what was built."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import wicore_trt.checkpoint.digest as digest
from wicore_trt.checkpoint.digest import SEAL, hash_file, make_seal
from wicore_trt.engine.directory import EngineDir, open_engine, read_intact
from wicore_trt.engine.manifest import compute_fingerprint, read_manifest
from wicore_trt.errors import EngineFormatError


def edit(engine: EngineDir, **changes: Any) -> None:
    """Rewrite fields of engine.json and seal it; a change to None stays None, `...` removes the field."""
    path = engine.path / "engine.json"
    data = json.loads(path.read_text()) | changes
    data = {k: v for k, v in data.items() if v is not ... and k != SEAL}
    path.write_text(json.dumps(data | {SEAL: make_seal(data)}))


def refusal(engine: EngineDir, **options: bool) -> str:
    with pytest.raises(EngineFormatError) as caught:
        open_engine(engine.path, **options)
    assert caught.value.exit_code == 4
    assert "wicore build" in str(caught.value), "the message must carry the command that mends it"
    return caught.value.message


def test_manifest_survives_the_disk(engine: EngineDir) -> None:
    again = open_engine(engine.path)
    assert again.manifest == engine.manifest
    assert [p.name for p in again.rank_files] == ["rank0.safetensors"]
    assert set(again.manifest.files) == {p.name for p in engine.path.iterdir()} - {"engine.json"}


def test_missing_directory_and_file_in_its_place(tmp_path: Path) -> None:
    with pytest.raises(EngineFormatError, match="does not exist.*wicore build SOURCE"):
        open_engine(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    with pytest.raises(EngineFormatError, match="is a file"):
        open_engine(tmp_path / "file")


def test_a_missing_engine_that_could_be_a_hub_id_is_built_into_engines(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name, command in (("google/gemma", "google/gemma engines/gemma"), ("engines/gemma", "SOURCE engines/gemma")):
        with pytest.raises(EngineFormatError, match=f"does not exist. Build one: wicore build {command}$"):
            open_engine(Path(name))
    (tmp_path / "google").mkdir()
    with pytest.raises(EngineFormatError, match="wicore build SOURCE google/gemma$"):
        open_engine(Path("google/gemma"))


def test_foreign_directories(tmp_path: Path, engine: EngineDir) -> None:
    with pytest.raises(EngineFormatError, match="no engine.json"):
        open_engine(tmp_path)
    edit(engine, kind="other")
    assert "not written by wicore" in refusal(engine)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"kind": "wicore-engine"}', "\xff"])
def test_damaged_manifest(engine: EngineDir, text: str) -> None:
    (engine.path / "engine.json").write_text(text, encoding="latin-1")
    refusal(engine)


def test_newer_format_says_upgrade(engine: EngineDir) -> None:
    edit(engine, format_version=4)
    with pytest.raises(EngineFormatError, match="format 4; this wicore reads 2 and 3.*Upgrade wicore-trt") as caught:
        open_engine(engine.path)
    assert "--force" in str(caught.value)


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": "int3"},
        {"dtype": "fp8"},
        {"page_tokens": 0},
        {"page_tokens": True},
        {"tp_size": "1"},
        {"files": []},
        {"model_id": ...},
        {"surprise": 1},
        {"spec": {}},
        {"weights_hash": "0" * 64},
        {"kv_dtype": "float16"},
    ],
    ids=str,
)
def test_edited_fields_are_refused(engine: EngineDir, change: dict[str, Any]) -> None:
    edit(engine, **change)
    refusal(engine)


@pytest.mark.parametrize("name", ["../x", "/etc/passwd", "a/../../b", "", ".", "a//b", "a\\b", "./a", "a\0b"])
def test_file_names_cannot_leave_the_directory(engine: EngineDir, name: str) -> None:
    (engine.path.parent / "x").write_text("")
    entry = {"bytes": 0, "blake2b": hash_file(engine.path.parent / "x")}
    files = json.loads((engine.path / "engine.json").read_text())["files"]
    edit(engine, files=files | {name: entry})
    assert "leaves the engine directory" in refusal(engine)


def test_rank_file_must_be_listed(engine: EngineDir) -> None:
    files = json.loads((engine.path / "engine.json").read_text())["files"]
    files.pop("rank0.safetensors")
    edit(engine, files=files)
    assert "rank 0 of 1" in refusal(engine)


def test_missing_truncated_and_grown_files(engine: EngineDir) -> None:
    weights = engine.path / "rank0.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-1])
    assert "truncated" in refusal(engine, verify=False)
    weights.write_bytes(content + b"\0")
    assert "too long" in refusal(engine, verify=False)
    weights.unlink()
    assert "missing" in refusal(engine, verify=False)
    weights.mkdir()
    assert "not a regular file" in refusal(engine, verify=False)


@pytest.mark.parametrize("seed", range(5))
def test_any_flipped_bit_is_found(engine: EngineDir, seed: int) -> None:
    random = np.random.default_rng(seed)
    name = str(random.choice(sorted(engine.manifest.files)))
    content = bytearray((engine.path / name).read_bytes())
    content[random.integers(len(content))] ^= 1 << random.integers(8)
    (engine.path / name).write_bytes(content)
    assert name in (message := refusal(engine)) and "corrupted" in message
    assert read_intact(engine, name) is None
    open_engine(engine.path, verify=False)  # sizes still fit: this is what verify=False gives up


def test_unreadable_file(engine: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> bytes:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(os, "pread", broken)
    assert "cannot be read" in refusal(engine)


@pytest.mark.parametrize("size", [0, 1, 63, 64, 65, 200])
def test_hash_is_the_documented_two_level_blake2b(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(digest, "PIECE_BYTES", 64)
    monkeypatch.setattr(digest, "READ_BYTES", 10)
    content = np.random.default_rng(size).bytes(size)
    (tmp_path / "f").write_bytes(content)
    chunks = [hashlib.blake2b(content[i : i + 64], digest_size=32).digest() for i in range(0, size, 64)]
    assert hash_file(tmp_path / "f") == hashlib.blake2b(b"".join(chunks), digest_size=32).hexdigest()


def test_fingerprint_leaves_page_size_and_time_out(engine: EngineDir) -> None:
    edit(engine, page_tokens=64, created="2001-01-01T00:00:00+00:00", source="elsewhere")
    manifest = read_manifest(engine.path)
    assert manifest.page_tokens == 64
    assert compute_fingerprint(manifest) == engine.manifest.fingerprint
