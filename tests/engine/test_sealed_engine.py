"""An engine is what its manifest says: no field of engine.json and no file beside it can change what is loaded.

Invariants: I22.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import wicore_trt.engine.build as build_module
from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.digest import SEAL, describe_broken_seal, make_seal
from wicore_trt.cli.main import run_command
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import EngineDir, open_engine
from wicore_trt.engine.manifest import MANIFEST_NAME, read_manifest
from wicore_trt.errors import CheckpointError, ConfigError, EngineFormatError
from wicore_trt.text.model_files import FILES
from wicore_trt.text.tokenizer import Tokenizer

MakeSource = Callable[..., Path]
FIELDS: dict[str, Any] = {
    "backend": "triton",
    "compiled": {"dummy_weights": True},
    "created": "2001-01-01T00:00:00+00:00",
    "dtype": "float32",
    "files": {},
    "fingerprint": "0" * 64,
    "kind": "wicore-motor",
    "kv_dtype": "fp8",
    "max_context": 64,
    "model_id": "another",
    "page_tokens": 64,
    "quantization": {"algo": "FP8", "base_dtype": "bfloat16"},
    "revision": "main",
    "source": "x; rm -rf ~",
    "spec": {},
    "targets": ["sm90"],
    "tools": {},
    "tp_size": 2,
    "weights_hash": "0" * 64,
}


def manifest_of(path: Path) -> dict[str, Any]:
    data: dict[str, Any] = json.loads((path / MANIFEST_NAME).read_text())
    return data


def write(path: Path, data: dict[str, Any], *, sealed: bool = False) -> None:
    if sealed:
        data = {k: v for k, v in data.items() if k != SEAL}
        data[SEAL] = make_seal(data)
    (path / MANIFEST_NAME).write_text(json.dumps(data))


@pytest.mark.parametrize("name", sorted(FIELDS))
def test_an_edited_field_is_refused_by_name(engine: EngineDir, name: str) -> None:
    data = manifest_of(engine.path)
    assert {*data} - {*FIELDS} == {"format_version", SEAL}, "every field has its edit"
    write(engine.path, data | {name: FIELDS[name]})
    with pytest.raises(EngineFormatError, match=name) as caught:
        open_engine(engine.path, verify=False)
    assert "wicore build" in str(caught.value)
    assert run_command(["inspect", str(engine.path)]) == 4
    write(engine.path, {k: v for k, v in data.items() if k != name})
    with pytest.raises(EngineFormatError):
        open_engine(engine.path, verify=False)


def test_order_and_white_space_of_the_manifest_do_not_count(engine: EngineDir) -> None:
    write(engine.path, dict(reversed(manifest_of(engine.path).items())))
    assert open_engine(engine.path).manifest == engine.manifest


def test_keys_inside_are_named_and_the_seal_guards_itself() -> None:
    data = {"a": 1, "b": {"c": [1.0, "x"], "d": None}}
    seal = make_seal(data)
    assert describe_broken_seal({"b": {"d": None, "c": [1.0, "x"]}, "a": 1}, json.loads(json.dumps(seal))) is None
    for other, said in (
        ({**data, "a": 1.0}, "'a' was changed"),
        ({**data, "a": True}, "'a' was changed"),
        ({**data, "b": {"c": [1.0], "d": None}}, "'b.c' was changed"),
        ({**data, "e": 1}, "'e' was added"),
        ({"b": data["b"]}, "'a' is missing"),
    ):
        assert describe_broken_seal(other, seal) == said
    for damaged in (None, 3, {}, {"digest": "0" * 64}, {**seal, "keys": []}, {**seal, "digest": 1}):
        assert describe_broken_seal(data, damaged) is not None
    mixed = {**seal, "keys": {**seal["keys"], "a": make_seal({**data, "a": 2})["keys"]["a"]}}
    assert describe_broken_seal({**data, "a": 2}, mixed) == "its seal was changed", (
        "a value with the short digest of another"
    )


def test_an_engine_of_the_first_format_says_rebuild(engine: EngineDir) -> None:
    data = manifest_of(engine.path)
    del data[SEAL]
    write(engine.path, data | {"format_version": 1})
    with pytest.raises(EngineFormatError, match=r"format 1 of an older wicore.*Rebuild it: wicore build SOURCE"):
        open_engine(engine.path)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"page_tokens": 3}, "page_tokens: .*power of two"),
        ({"page_tokens": 1 << 40}, "page_tokens"),
        ({"max_context": 129}, "max_context 129 is beyond the model's 128"),
        ({"max_context": 0}, "max_context"),
        ({"max_context": True}, "max_context"),
        ({"backend": "\x1b[31mX"}, r"backend: .*\^\(torch"),
        ({"targets": [3]}, "targets"),
        ({"targets": []}, "targets"),
        ({"created": "never"}, "created"),
        ({"tools": {"a": [1]}}, "tools"),
        ({"tp_size": 3}, "do not divide"),
        ({"tp_size": 2}, "rank 1 of 2"),
        ({"quantization": {"algo": "FP8"}}, "quantization"),
        ({"weights_hash": "x"}, "weights_hash"),
    ],
    ids=str,
)
def test_a_sealed_manifest_must_still_make_sense(engine: EngineDir, change: dict[str, Any], says: str) -> None:
    write(engine.path, manifest_of(engine.path) | change, sealed=True)
    with pytest.raises(EngineFormatError, match=says):
        open_engine(engine.path, verify=False)


def test_weights_of_another_model_are_refused_under_a_new_seal(
    engine: EngineDir, make_source: MakeSource, tmp_path: Path
) -> None:
    """The fingerprint roots the keys of KV pages, so it must name the weights that are there."""
    other = build_engine(make_source(1, name="other"), tmp_path / "e2")
    shutil.copyfile(other.rank_files[0], engine.rank_files[0])
    write(engine.path, manifest_of(engine.path) | {"files": manifest_of(other.path)["files"]}, sealed=True)
    with pytest.raises(EngineFormatError, match="weights_hash"):
        open_engine(engine.path)


STRAYS = {
    "generation_config.json": '{"eos_token_id": [7, 8, 9]}',
    "config.json": '{"eos_token_id": 5}',
    "chat_template.jinja": "IGNORE ALL {{ messages[0]['content'] }}",
    "chat_template.json": '{"chat_template": "x"}',
    "special_tokens_map.json": '{"bos_token": "b"}',
    "kernels/kernels.json": "{}",
    "notes.txt": "",
}


@pytest.mark.parametrize("name", sorted(STRAYS))
def test_a_file_that_is_not_listed_is_refused_and_never_read(
    name: str, make_source: MakeSource, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = make_source()
    (source / "generation_config.json").unlink()
    (source / "tokenizer_config.json").write_text('{"eos_token": "<eos>"}')
    engine = build_engine(source, tmp_path / "engine")
    assert name not in engine.manifest.files
    before = Tokenizer.from_files(engine.read_present(FILES), engine.path)
    (engine.path / name).parent.mkdir(exist_ok=True)
    (engine.path / name).write_text(STRAYS[name])
    with pytest.raises(EngineFormatError, match=f"holds {name}, which it was not built with"):
        open_engine(engine.path)
    loaded = open_engine(engine.path, verify=False)
    after = Tokenizer.from_files(loaded.read_present(FILES), loaded.path)
    assert (after.eos_ids, after.bos_id, after.has_chat) == (before.eos_ids, before.bos_id, before.has_chat)
    assert run_command(["inspect", str(engine.path)]) == 0
    assert run_command(["inspect", str(engine.path), "--verify"]) == 4
    assert f"{name} is not listed" in capsys.readouterr().err


def test_what_file_systems_and_file_managers_leave_is_no_harm(engine: EngineDir) -> None:
    (engine.path / "lost+found").mkdir()
    (engine.path / ".DS_Store").write_text("x")
    assert open_engine(engine.path).find_unlisted() == []
    (engine.path / "link").symlink_to(engine.path.parent, target_is_directory=True)
    assert engine.find_unlisted() == ["link"]


def test_directories_that_were_not_built_count(engine: EngineDir, monkeypatch: pytest.MonkeyPatch) -> None:
    (engine.path / "empty").mkdir()
    (engine.path / "closed").mkdir()
    (engine.path / "closed" / "thesis").write_text("mine")
    scandir = os.scandir

    def refusing(path: Path) -> Any:
        if Path(path).name == "closed":
            raise PermissionError(13, "Permission denied", str(path))
        return scandir(path)

    monkeypatch.setattr(os, "scandir", refusing)
    assert engine.find_unlisted() == ["closed", "empty"]
    with pytest.raises(EngineFormatError, match="holds closed and 1 more"):
        open_engine(engine.path)
    assert run_command(["inspect", str(engine.path), "--verify"]) == 4
    monkeypatch.setattr(os, "scandir", lambda path: refusing(Path("closed")))
    with pytest.raises(EngineFormatError, match="closed cannot be read: Permission denied"):
        engine.find_unlisted()


def test_a_file_is_compared_when_it_is_read(engine: EngineDir) -> None:
    name = "tokenizer.json"
    content = (engine.path / name).read_bytes()
    assert engine.read(name) == content
    (engine.path / name).write_bytes(content.replace(b"1", b"2"))
    for _ in range(2):
        with pytest.raises(EngineFormatError, match=f"{name} is corrupted"):
            engine.read(name)
    for other in ("engine.json", "../source/config.json", "absent"):
        with pytest.raises(EngineFormatError, match="is not in engine.json"):
            engine.read(other)


def test_created_is_the_source_date(make_source: MakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Equal builds are equal byte for byte."""
    source = make_source()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1000000000")
    engines = [build_engine(source, tmp_path / name) for name in "ab"]
    assert engines[0].manifest.created == "2001-09-09T01:46:40+00:00"
    assert (engines[0].path / MANIFEST_NAME).read_bytes() == (engines[1].path / MANIFEST_NAME).read_bytes()
    for wrong in ("yesterday", "1e400", "9" * 30):
        monkeypatch.setenv("SOURCE_DATE_EPOCH", wrong)
        with pytest.raises(ConfigError, match="SOURCE_DATE_EPOCH"):
            build_engine(source, tmp_path / "c")


def test_the_commit_of_a_hub_model_is_recorded(
    make_source: MakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "a" * 40
    snapshot = make_source(name=commit)
    asked: list[str | None] = []

    def download(repo: str, revision: str | None) -> Path:
        asked.append(revision)
        return snapshot

    monkeypatch.setattr("wicore_trt.checkpoint.hub.download_snapshot", download)
    assert run_command(["build", "owner/model", str(tmp_path / "e"), "--revision", "v1"]) == 0
    assert asked == ["v1"] and read_manifest(tmp_path / "e").revision == commit
    checkpoint = convert("owner/model", tmp_path / "c", revision="v1")
    assert build_engine(checkpoint.path, tmp_path / "f").manifest.revision == commit
    with pytest.raises(ConfigError, match="--revision is a commit"):
        build_engine(snapshot, tmp_path / "g", revision="v1")


def test_what_does_not_open_never_replaces_an_engine(
    engine: EngineDir, make_source: MakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compute = build_module.compute_fingerprint
    monkeypatch.setattr(build_module, "compute_fingerprint", lambda manifest: compute(manifest)[::-1])
    other = make_source(1, name="other")
    for output in (engine.path, tmp_path / "fresh"):
        with pytest.raises(CheckpointError, match="makes no engine that opens.*fingerprint.*left as it was"):
            build_engine(other, output, force=True)
    assert open_engine(engine.path).manifest == engine.manifest
    assert not (tmp_path / "fresh").exists()
