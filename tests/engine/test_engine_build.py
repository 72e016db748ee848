"""Building: equal inputs give equal engines, and the output is whole or untouched."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

import wicore_trt.engine.build as build_module
from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.records import record_file
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile, SafetensorsWriter
from wicore_trt.engine.build import build_engine, model_id
from wicore_trt.engine.directory import EngineDir, open_engine
from wicore_trt.engine.manifest import FileEntry
from wicore_trt.engine.weights import hash_weights, place_weights
from wicore_trt.errors import CheckpointError, ConfigError, EngineFormatError, EnvironmentUnfitError, WicoreError

MakeSource = Callable[..., Path]


def names(directory: Path) -> list[str]:
    return sorted(p.name for p in directory.iterdir())


def test_a_source_is_converted_to_bfloat16(engine: EngineDir, tmp_path: Path) -> None:
    manifest = engine.manifest
    assert (manifest.dtype, manifest.kv_dtype, manifest.tp_size, manifest.targets) == (
        "bfloat16",
        "bfloat16",
        1,
        ["any"],
    )
    assert manifest.max_context == 128 and manifest.page_tokens == 32
    assert manifest.model_id == "source" and manifest.source == str(tmp_path / "source")
    assert names(engine.path) == ["engine.json", "generation_config.json", "rank0.safetensors", "tokenizer.json"]
    assert names(tmp_path) == ["engine", "source"], "no scratch directory stays behind"
    open_engine(engine.path)


def test_tied_head_is_left_out_and_the_rest_is_untouched(make_source: MakeSource, tmp_path: Path) -> None:
    checkpoint = convert(make_source(), tmp_path / "checkpoint", dtype="float32")
    engine = build_engine(checkpoint.path, tmp_path / "engine")
    before, after = load_file(checkpoint.rank_files[0]), load_file(engine.rank_files[0])
    assert set(before) - set(after) == {"lm_head.weight"}
    for name, value in after.items():
        np.testing.assert_array_equal(value, before[name])


def test_untied_head_stays(make_source: MakeSource, tmp_path: Path) -> None:
    engine = build_engine(make_source(tied=False), tmp_path / "engine", dtype="float32")
    assert "lm_head.weight" in load_file(engine.rank_files[0])


@pytest.mark.parametrize("dtype", ["float32", "float16", "fp8"])
def test_dtypes(make_source: MakeSource, tmp_path: Path, dtype: str) -> None:
    manifest = build_engine(make_source(), tmp_path / "engine", dtype=dtype).manifest
    assert manifest.dtype == dtype
    assert manifest.base_dtype == manifest.kv_dtype == ("bfloat16" if dtype == "fp8" else dtype)
    assert (manifest.quantization is not None) == (dtype == "fp8")


def test_tensor_parallel_ranks(make_source: MakeSource, tmp_path: Path) -> None:
    engine = build_engine(make_source(), tmp_path / "engine", tp_size=2)
    assert [p.name for p in engine.rank_files] == ["rank0.safetensors", "rank1.safetensors"]
    with pytest.raises(EngineFormatError, match="2 ranks.*--tp 1"):
        open_engine(engine.path).local_part()  # what a backend asks that runs one rank
    assert open_engine(engine.path).local_part(1).rank == 1


def test_fingerprint_follows_content_only(make_source: MakeSource, tmp_path: Path) -> None:
    source = make_source()
    base = build_engine(source, tmp_path / "a").manifest
    checkpoint = convert(source, tmp_path / "checkpoint", dtype="bfloat16")
    assert build_engine(checkpoint.path, tmp_path / "b", page_tokens=64).manifest.fingerprint == base.fingerprint
    assert build_engine(make_source(name="copy"), tmp_path / "c").manifest.fingerprint == base.fingerprint
    others = [
        build_engine(make_source(1, name="other"), tmp_path / "d").manifest,
        build_engine(source, tmp_path / "e", dtype="float32").manifest,
        build_engine(source, tmp_path / "f", kv_dtype="float32").manifest,
        build_engine(source, tmp_path / "g", tp_size=2).manifest,
    ]
    assert len({base.fingerprint, *(m.fingerprint for m in others)}) == 5


def test_weights_hash_ignores_order_and_metadata(make_source: MakeSource, tmp_path: Path) -> None:
    file = make_source() / "model.safetensors"
    tensors = load_file(file)

    def write(path: Path) -> Path:
        entries = [(name, "F32", value.shape) for name, value in reversed(tensors.items())]
        with SafetensorsWriter(path, entries) as writer:
            for name, _, _ in entries:
                writer.write(name, tensors[name])
        return path

    again = write(tmp_path / "again.safetensors")
    assert [*SafetensorsFile(again).tensors] != [*SafetensorsFile(file).tensors]
    whole = record_file(file)
    assert hash_weights([whole]) == hash_weights([record_file(again)])
    assert hash_weights([whole]) != hash_weights([whole, whole])
    name = sorted(tensors)[0]
    tensors[name].flat[-1] += 1
    assert hash_weights([whole]) != hash_weights([record_file(write(tmp_path / "changed.safetensors"))])


def test_weights_are_linked_or_copied(make_source: MakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = make_source() / "model.safetensors"
    record = record_file(file)

    def place(target: Path) -> None:
        assert place_weights(file, target, record, damaged=CheckpointError).parts == record.parts

    place(tmp_path / "linked.safetensors")
    assert (tmp_path / "linked.safetensors").samefile(file)

    def refuse(*_: object) -> None:
        raise OSError("no links here")

    monkeypatch.setattr(os, "link", refuse)
    place(tmp_path / "copied.safetensors")
    assert not (tmp_path / "copied.safetensors").samefile(file)
    assert (tmp_path / "copied.safetensors").read_bytes() == file.read_bytes()


def test_existing_output_needs_force(make_source: MakeSource, engine: EngineDir, tmp_path: Path) -> None:
    before = engine.manifest.fingerprint
    other = make_source(1, name="other")
    with pytest.raises(ConfigError, match="already exists.*--force"):
        build_engine(other, engine.path)
    assert open_engine(engine.path).manifest.fingerprint == before
    built = build_engine(other, engine.path, force=True)
    assert open_engine(engine.path).manifest.fingerprint == built.manifest.fingerprint != before
    assert names(tmp_path) == ["engine", "other", "source"]


def test_force_never_replaces_what_is_not_an_engine(make_source: MakeSource, tmp_path: Path) -> None:
    source = make_source()
    home = tmp_path / "home"
    home.mkdir()
    (home / "thesis.tex").write_text("years of work")
    with pytest.raises(ConfigError, match="left alone"):
        build_engine(source, home, force=True)
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="not a directory"):
        build_engine(source, tmp_path / "file", force=True)
    assert names(home) == ["thesis.tex"]
    (tmp_path / "empty").mkdir()
    build_engine(source, tmp_path / "empty")


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"backend": "tensorflow"}, "not built in this version; there is: torch"),
        ({"targets": ("sm_90",)}, "takes no targets"),
        ({"kv_dtype": "int4"}, "kv_dtype"),
        ({"page_tokens": 24}, "power of two"),
        ({"page_tokens": 0}, "power of two"),
        ({"max_context": 129}, "max_context"),
        ({"max_context": 0}, "max_context"),
        ({"tp_size": 3}, "do not divide"),
        ({"dtype": "int8"}, "int8"),
    ],
)
def test_wrong_options_leave_nothing_behind(
    make_source: MakeSource, tmp_path: Path, options: dict[str, object], error: str
) -> None:
    source = make_source()
    with pytest.raises(WicoreError, match=error):
        build_engine(source, tmp_path / "engine", **options)  # type: ignore[arg-type]
    assert names(tmp_path) == ["source"]


def test_options_must_describe_the_checkpoint(make_source: MakeSource, tmp_path: Path) -> None:
    checkpoint = convert(make_source(), tmp_path / "checkpoint", dtype="bfloat16")
    for options, error in (({"dtype": "float16"}, "Convert the source with --dtype"), ({"tp_size": 2}, "--tp 2")):
        with pytest.raises(ConfigError, match=error):
            build_engine(checkpoint.path, tmp_path / "engine", **options)  # type: ignore[arg-type]


def test_a_disk_that_holds_the_checkpoint_but_no_engine_beside_it(
    make_source: MakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = make_source()
    checkpoint = convert(source, tmp_path / "checkpoint", dtype="bfloat16")
    weights = checkpoint.files["rank0.safetensors"].bytes
    for free, origin in ((weights + (64 << 20), source), ((64 << 20) + weights // 2, checkpoint.path)):
        monkeypatch.setattr(shutil, "disk_usage", lambda path, free=free: shutil._ntuple_diskusage(1 << 40, 0, free))
        with pytest.raises(EnvironmentUnfitError, match="on disk, and .* are free"):
            build_engine(origin, tmp_path / "engine")


@pytest.mark.parametrize("step", ["place_weights", "hash_weights", "describe_files", "open_engine"])
def test_failure_at_any_step_keeps_the_old_engine(
    make_source: MakeSource, engine: EngineDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    other = make_source(1, name="other")
    monkeypatch.setattr(build_module, step, full)
    with pytest.raises(EnvironmentUnfitError, match="No space left"):
        build_engine(other, engine.path, force=True)
    assert open_engine(engine.path).manifest == engine.manifest
    assert names(tmp_path) == ["engine", "other", "source"]


def test_an_engine_that_does_not_open_replaces_none(
    make_source: MakeSource, engine: EngineDir, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The new engine is opened where it was made; what stands at the output stays."""
    describe = build_module.describe_files

    def damage(partial: Path, weights: Any) -> dict[str, FileEntry]:
        files = describe(partial, weights)
        with (partial / "rank0.safetensors").open("ab") as file:
            file.write(b"x")
        return files

    monkeypatch.setattr(build_module, "describe_files", damage)
    with pytest.raises(CheckpointError, match=r"makes no engine that opens: .*rank0\.safetensors is too long"):
        build_engine(make_source(1, name="other"), engine.path, force=True)
    assert open_engine(engine.path).manifest == engine.manifest
    assert names(tmp_path) == ["engine", "other", "source"]


def test_killed_build_leaves_no_engine_and_the_next_one_cleans_up(make_source: MakeSource, tmp_path: Path) -> None:
    source = make_source()
    code = (
        "import os, sys, wicore_trt.engine.build as b\n"
        "b.open_engine = lambda *a, **k: os._exit(9)\n"
        "b.build_engine(sys.argv[1], sys.argv[2])"
    )
    done = subprocess.run([sys.executable, "-c", code, str(source), str(tmp_path / "engine")])
    assert done.returncode == 9
    assert not (tmp_path / "engine").exists()
    assert len(names(tmp_path)) > 1, "the killed build left its scratch"
    build_engine(source, tmp_path / "engine")
    assert names(tmp_path) == ["engine", "source"]


def test_progress_and_tools(make_source: MakeSource, tmp_path: Path) -> None:
    seen: list[tuple[str, int, int]] = []
    engine = build_engine(make_source(), tmp_path / "engine", progress=lambda *report: seen.append(report))
    assert [*dict.fromkeys(phase for phase, _, _ in seen)] == ["read", "convert", "weights"]
    assert all(0 <= done <= total for _, done, total in seen)
    assert {"python", "wicore-trt", "safetensors"} <= set(engine.manifest.tools)
    assert json.loads((engine.path / "engine.json").read_text())["kind"] == "wicore-engine"


def test_model_id(tmp_path: Path) -> None:
    assert model_id("google/gemma-3-27b-it") == "google/gemma-3-27b-it"
    assert model_id(str(tmp_path / "gemma-3-1b.v2")) == "gemma-3-1b.v2"
    assert model_id("models/here/tiny-q4.gguf") == "tiny-q4"
    assert model_id(f"hub/models--google--gemma-3-1b-it/snapshots/{'a' * 40}") == "google/gemma-3-1b-it"
