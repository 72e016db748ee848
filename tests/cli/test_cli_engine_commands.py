"""build, inspect, recipes: what they print and the codes they exit with."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file, save_file
from tiny_source import write_tiny_source

from wicore_trt.cli.inspect import _group_files
from wicore_trt.cli.main import run_command
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import open_engine


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    for name in [n for n in os.environ if n.startswith("WICORE_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_tiny_source(tmp_path / "source")


def test_build_with_flags(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    output = tmp_path / "engine"
    flags = ["--dtype", "float32", "--kv-dtype", "float16", "--page-tokens", "16", "--max-context", "64"]
    assert run_command(["build", str(source), str(output), *flags]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"built {output}: source, float32")
    lines = [line for line in captured.err.splitlines() if not line.startswith("note: ")]
    assert lines == ["convert ...", "weights ..."], "plain lines without a terminal"
    manifest = open_engine(output).manifest
    assert (manifest.dtype, manifest.kv_dtype, manifest.page_tokens, manifest.max_context) == (
        "float32",
        "float16",
        16,
        64,
    )
    assert run_command(["build", str(source), str(output)]) == 3
    assert "--force" in capsys.readouterr().err
    assert run_command(["build", str(source), str(output), "--force", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["fingerprint"] == open_engine(output).manifest.fingerprint
    assert all(line.startswith("note: ") for line in captured.err.splitlines())


def test_build_from_a_recipe_and_flags_over_it(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"engine: {tmp_path}/one\nkv:\n  page_tokens: 8\nbuild:\n  source: {source}\n  dtype: float32\n")
    assert run_command(["build", "--recipe", str(recipe)]) == 0
    assert open_engine(tmp_path / "one").manifest.page_tokens == 8
    monkeypatch.setenv("WICORE_BUILD__DTYPE", "float16")
    assert (
        run_command(["build", "--recipe", str(recipe), "--page-tokens", "4", str(source), str(tmp_path / "two")]) == 0
    )
    manifest = open_engine(tmp_path / "two").manifest
    assert (manifest.page_tokens, manifest.dtype) == (4, "float16")
    assert run_command(["build", str(source)]) == 3
    assert "SOURCE and an OUTPUT" in capsys.readouterr().err


def test_an_unknown_backend(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run_command(["build", str(source), str(tmp_path / "e"), "--backend", "tritn"]) == 2
    monkeypatch.setenv("WICORE_BUILD__BACKEND", "tritn")
    assert run_command(["build", str(source), str(tmp_path / "e")]) == 3
    assert "no backend 'tritn'. Known: " in capsys.readouterr().err


def test_many_files_of_a_directory_are_one_row() -> None:
    files = [{"name": f"kernels/sm90/k{i}", "bytes": 2, "state": "ok"} for i in range(20)]
    files[3]["state"] = "corrupted"
    files.append({"name": "tokenizer.json", "bytes": 1, "state": "ok"})
    assert _group_files(files) == [
        ("kernels/sm90/: 19 files", 38, "ok"),
        ("kernels/sm90/k3", 2, "corrupted"),
        ("tokenizer.json", 1, "ok"),
    ]


@pytest.mark.parametrize(
    ("option", "value"),
    [("--page-tokens", 1 << 62), ("--page-tokens", 0), ("--tp", 10**8), ("--max-context", 0), ("--page-tokens", 24)],
)
def test_option_ranges(
    option: str, value: int, source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command(["build", str(source), str(tmp_path / "e"), option, str(value)]) in (2, 3)
    assert option.strip("-").replace("-", "_") in capsys.readouterr().err.replace("-", "_")
    assert not (tmp_path / "e").exists()


def test_what_a_cast_loses_is_said(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = load_file(source / "model.safetensors")
    weights["model.layers.0.mlp.up_proj.weight"][0, :3] = 1e-30
    save_file(weights, source / "model.safetensors")
    for command in ("build", "convert"):
        assert run_command([command, str(source), str(tmp_path / command), "--dtype", "float16"]) == 0
        notes = [line for line in capsys.readouterr().err.splitlines() if line.startswith("note: ")]
        assert len([n for n in notes if "became 0, 3 of them in model.layers.0.mlp.up_proj.weight" in n]) == 1
        assert notes[0].startswith("note: answers end at 1 '<eos>' (generation_config.json)")


def test_inspect_engine(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = build_engine(source, tmp_path / "engine")
    assert run_command(["inspect", str(engine.path), "--verify", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["about"]["fingerprint"] == engine.manifest.fingerprint
    assert report["about"]["ends"] == "1 '<eos>' (generation_config.json), 6 '<end>' (generation_config.json)"
    assert report["about"]["chat"].startswith("The model cannot chat: its mark <end_of_turn> is ")
    assert {f["name"]: f["state"] for f in report["files"]} == dict.fromkeys(engine.manifest.files, "ok")
    # 2 of 4 layers each, K and V of 2 heads of 16, 2 bytes: 2 x 2 x 32 x 2 = 256 bytes per token.
    assert [(k["group"], k["layers"], k["bytes_per_token"], k["bytes_per_page"]) for k in report["kv"]] == [
        ("global", 2, 256, 8192),
        ("local", 2, 256, 8192),
    ]
    assert run_command(["inspect", str(engine.path)]) == 0
    out = capsys.readouterr().out
    assert "\x1b" not in out and "not checked" in out and engine.manifest.fingerprint in out


def test_inspect_without_torch(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = build_engine(source, tmp_path / "engine")
    monkeypatch.delitem(sys.modules, "wicore_trt.backends.torch.native_ops", raising=False)
    monkeypatch.setitem(sys.modules, "torch", None)
    assert run_command(["inspect", str(engine.path)]) == 0
    assert "unknown here, torch is not installed" in capsys.readouterr().out


def test_inspect_names_corrupted_files_and_exits_4(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    engine = build_engine(source, tmp_path / "engine")
    weights = engine.rank_files[0]
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert run_command(["inspect", str(engine.path), "--verify"]) == 4
    captured = capsys.readouterr()
    assert "rank0.safetensors" in captured.err and f"wicore build {source} {engine.path} --force" in captured.err
    weights.write_bytes(content[:-1])
    assert run_command(["inspect", str(engine.path)]) == 4
    assert "truncated" in capsys.readouterr().err
    assert run_command(["inspect", str(tmp_path)]) == 4


def test_inspect_checkpoint(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from wicore_trt.checkpoint.convert import convert

    convert(source, tmp_path / "checkpoint", dtype="bfloat16")
    assert run_command(["inspect", str(tmp_path / "checkpoint"), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["kind"] == "checkpoint" and report["about"]["dtype"] == "bfloat16"
    assert "rank0.safetensors" in {f["name"] for f in report["files"]}


def test_recipes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run_command(["recipes"]) == 0
    plain = capsys.readouterr().out
    assert run_command(["recipes", "list"]) == 0 and capsys.readouterr().out == plain and "gemma3-270m-cpu" in plain
    assert run_command(["recipes", "list", "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert "gemma3-270m-cpu" in [r["name"] for r in listed] and all(r["about"] for r in listed)
    assert run_command(["recipes", "show", "gemma3-270m-cpu"]) == 0
    assert 'device: "cpu"  # recipe ' in capsys.readouterr().out
    assert run_command(["recipes", "show", "gemma3-270m-cpu", "--raw"]) == 0
    (tmp_path / "copy.yaml").write_text(capsys.readouterr().out)
    assert run_command(["recipes", "show", str(tmp_path / "copy.yaml")]) == 0


@pytest.mark.parametrize("options", [[], ["--json"]], ids=["text", "json"])
def test_convert_warns_of_a_source_without_a_tokenizer(
    options: list[str], source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (source / "tokenizer.json").unlink()
    assert run_command(["convert", str(source), str(tmp_path / "checkpoint"), *options]) == 0
    assert [line for line in capsys.readouterr().err.splitlines() if "no tokenizer.json" in line] == [
        "warning: the source has no tokenizer.json; an engine will need one."
    ]
    for origin in (source, tmp_path / "checkpoint"):
        assert run_command(["build", str(origin), str(tmp_path / "engine"), *options]) == 1
        errors = [line for line in capsys.readouterr().err.splitlines() if line.startswith("error: ")]
        assert len(errors) == 1 and "no tokenizer.json" in errors[0]


def test_a_build_without_a_tokenizer_ends_before_weights_are_converted(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (source / "tokenizer.json").unlink()
    monkeypatch.setattr("wicore_trt.checkpoint.convert._Conversion._write_ranks", lambda _: pytest.fail("converted"))
    assert run_command(["build", str(source), str(tmp_path / "engine")]) == 1
