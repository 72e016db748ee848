"""`wicore kv plan`: what it prints is what the arithmetic says, pastes as a recipe, and holds what it promises."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from tiny_source import write_tiny_source

from wicore_trt.checkpoint.format import count_weight_bytes
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile
from wicore_trt.cli._ui import human_bytes
from wicore_trt.cli.main import run_command
from wicore_trt.config import BATCH_TOKENS, load_settings, parse_bytes
from wicore_trt.engine.build import build_engine
from wicore_trt.kv.sizing import MODELS, Geometry, SessionSize, builtin_spec
from wicore_trt.model.spec import GLOBAL
from wicore_trt.recipe import resolve_recipe
from wicore_trt.runtime.pool_sizes import pool_sizes
from wicore_trt.weight_format import Q4_0


def plan(capsys, *options: str) -> str:
    code = run_command(["kv", "plan", *options])
    captured = capsys.readouterr()
    assert code == 0, captured.err
    return captured.out


def plan_json(capsys, *options: str) -> dict:
    return json.loads(plan(capsys, *options, "--json"))


@pytest.mark.parametrize("name", MODELS)
def test_the_recipe_lines_load_and_hold_what_the_comment_says(capsys, tmp_path, name):
    out = plan(capsys, "--model", name, "--users", "20", "--active", "3", "--context", "8K,16K")
    recipe = tmp_path / "plan.yaml"
    recipe.write_text(out[out.index("\n# ") :])
    settings = load_settings(str(recipe))
    assert "20 conversations of 16,384 tokens: 3 on the device, 20 in host memory, 20 on disk" in out
    spec, geometry = builtin_spec(name), Geometry.from_spec(builtin_spec(name), 32, "bfloat16")
    slots = SessionSize(geometry, 16_384, 128).slot_count
    assert settings.kv.host_bytes // geometry.slot_bytes // slots == 20
    assert geometry.disk_slots(settings.kv.disk_bytes) // slots == 20
    scheduler = settings.scheduler
    pools = pool_sizes(
        spec, settings.kv.page_tokens, 2, settings.kv.device_bytes, scheduler.max_context,
        max_batch_tokens=scheduler.max_batch_tokens, max_sequences=scheduler.max_sequences,
    )  # fmt: skip
    assert pools[GLOBAL] >= 3 * 16_384 // 32


def test_the_figures_of_27b(capsys):
    options = ("--host-bytes", "100GB", "--disk-bytes", "1TB", "--disk-rate", "4GB", "--prefill-tokens-per-s", "9600")
    report = plan_json(capsys, "--model", "gemma3-27b", "--context", "8K,32K,128K", *options)
    rows = {row["context"]: row for row in report["sessions"]}
    row, slot_bytes = rows[32_768], report["slot_bytes"]
    assert 1 <= row["global_bytes"] / (81_920 * 32_768) < 1.04 and row["all_layers_bytes"] == 507_904 * 32_768
    assert row["saving"] >= 5.0 and row["session_bytes"] == row["global_bytes"] + row["window_bytes"]
    assert row["tokens_per_gb"] == int(32_768e9 / row["session_bytes"])
    assert row["sessions_in_host"] == 10**11 // slot_bytes // (row["session_bytes"] // slot_bytes)
    assert 0.99 < row["sessions_on_disk"] * row["session_bytes"] / 1e12 < 1.0
    assert row["break_even_disk_rate"] * row["recompute_s"] == pytest.approx(4e9 * row["disk_read_s"], rel=0.001)
    assert rows[8192]["saving"] < row["saving"] < rows[131_072]["saving"] < 6.2
    stored = {group: count * slot_bytes for group, count in report["slots_per_page"].items()}
    assert all(count <= stored[group] < 1.04 * count for group, count in report["page_bytes"].items())


def test_the_table_of_sizes_is_what_the_commands_beside_it_print(capsys):
    text = (Path(__file__).parents[2] / "docs/kv-tiers.md").read_text(encoding="utf-8")
    section = text.partition("## Size the tiers\n")[2].partition("\n## ")[0]
    shown = [line.strip("| ").split(" | ") for line in section.splitlines() if line.startswith("| 2")]
    printed = []
    for command in re.findall(r"^wicore kv plan (.*)$", section, re.M):
        model = command.split()[1].removeprefix("gemma3-").upper()
        for row in plan_json(capsys, *command.split())["sessions"]:
            sizes = [human_bytes(row[name]) for name in ("session_bytes", "all_layers_bytes")]
            counts = [f"{row[name]:,}" for name in ("sessions_in_host", "sessions_on_disk")]
            printed.append([model, f"{row['context'] // 1024}K", *sizes, f"{row['saving']:.2f}", *counts])
    assert [[row[0], row[1].split()[0], *row[2:]] for row in shown] == printed and len(printed) == 5


def test_the_table_of_what_fits_is_what_the_command_beside_it_prints(capsys):
    text = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8").partition("What fits:")[2]
    command = " ".join(text[text.index("`wicore kv plan") + 15 : text.index("`)")].split())
    shown = [line.strip("| ").split(" | ") for line in text.partition("\n\n!")[0].splitlines() if "GiB" in line]
    names, printed = {"q4_0": "Q4_0", "fp8": "FP8", "bfloat16": "BF16"}, []
    for size in ("27b", "12b"):
        for fit in plan_json(capsys, *command.replace("27b", size).split())["fits"]:
            weights, nbytes, *cards = fit.values()
            printed.append([f"{size.upper()} {names[weights]}", human_bytes(nbytes), *cards])
    assert shown == printed[:4]


@pytest.mark.parametrize("name", ["fp16-h100", "fp8-h100", "fp8-l20", "q4-h100", "q4-rtx4090"])
def test_the_recipes_say_how_many_conversations_their_host_tier_holds(capsys, name):
    recipe = f"gemma3-27b-{name}"
    settings = load_settings(recipe)
    kv_dtype = "bfloat16" if settings.build.kv_dtype == "auto" else settings.build.kv_dtype
    options = ("--host-bytes", str(settings.kv.host_bytes), "--kv-dtype", kv_dtype)
    row = plan_json(capsys, "--model", "gemma3-27b", *options)["sessions"][0]
    assert f"holds {row['sessions_in_host']} (wicore kv plan)" in resolve_recipe(recipe).read_text()


def test_weights_are_counted_exactly_and_leave_room_for_conversations(capsys, tmp_path):
    options = ("--dtype", "q4_0,fp8,bfloat16", "--context", "8K", "--kv-dtype", "fp8", "--gpus", "16GB,24GB,80GB")
    report = plan_json(capsys, "--model", "gemma3-27b", *options)
    linear, head = 25_598_361_600, 262_208 * 5376  # of the published sizes
    norms = 62 * (4 * 5376 + 2 * 128) + 5376
    channels = 62 * (64 * 128 + 5376 + 2 * 21_504 + 5376)  # with a scale in FP8
    wanted = {"q4_0": linear * 18 // 32, "fp8": linear + 4 * channels, "bfloat16": 2 * linear}
    assert report["weight_bytes"] == {name: size + 2 * head + 4 * norms for name, size in wanted.items()}
    assert [fit["24GB"] for fit in report["fits"]] == ["7", "no", "no"]
    assert all(fit["16GB"] == "no" != fit["80GB"] for fit in report["fits"])
    engine = build_engine(write_tiny_source(tmp_path / "source"), tmp_path / "engine", dtype="fp8")
    spec, heads = builtin_spec("gemma3-270m"), ("", "float16", "q8_0", "q6_k")
    widened = [count_weight_bytes(spec, replace(Q4_0, head=head)) for head in heads]
    assert len({*widened}) == 1  # as a GPU holds them
    held = sum(info.bytes for info in SafetensorsFile(engine.rank_files[0]).tensors.values())
    assert plan_json(capsys, "--model", str(engine.path), "--context", "64")["weight_bytes"] == {"fp8": held}


def test_dtype_page_size_and_length_of_the_reply_count(capsys):
    base = ("--model", "gemma3-4b", "--context", "16384")

    def session_bytes(*options: str) -> int:
        return plan_json(capsys, *base, *options)["sessions"][0]["session_bytes"]

    assert session_bytes("--kv-dtype", "float32") == 2 * session_bytes()
    assert session_bytes("--reply-tokens", "2000") > session_bytes("--reply-tokens", "10")
    assert plan_json(capsys, *base, "--page-tokens", "16")["page_bytes"]["global"] == 5 * 2 * 16 * 4 * 256 * 2


def test_figures_fit_a_terminal_and_share_their_units(capsys):
    options = ("--host-bytes", "100GB", "--disk-bytes", "1TB", "--disk-rate", "4GB", "--prefill-tokens-per-s", "1")
    out = plan(capsys, "--model", "gemma3-27b", "--context", "8K,32K,128K", *options)
    assert max(map(len, out.partition("\n\n")[0].splitlines())) <= 80
    assert "0.00" not in out and "GB" not in out and re.search(r"break-even disk +1\d\d\.\d KiB/s", out)
    assert re.search(r"  host_bytes: [\d.]+GiB", out)


def test_given_tiers_bound_the_plan(capsys):
    out = plan(capsys, "--model", "gemma3-27b", "--host-bytes", "32GiB", "--disk-bytes", "64GiB", "--users", "50")
    assert re.search(r"50 conversations of 32,768 tokens: 8 on the device, 10 in host memory, 21 on disk", out)
    lines = yaml.safe_load(out[out.index("\nkv:") :])["kv"]
    assert parse_bytes(lines["host_bytes"]) <= 32 << 30 and parse_bytes(lines["disk_bytes"]) <= 64 << 30
    small = plan_json(capsys, "--model", "gemma3-270m", "--users", "2", "--host-bytes", "1TB")["recipe"]
    assert parse_bytes(small["kv"]["host_bytes"]) < 1 << 30 and small["scheduler"]["max_sequences"] == 2


def test_a_model_directory_and_an_engine_are_taken_as_they_are(capsys, tmp_path):
    source = write_tiny_source(tmp_path / "source")
    assert (
        run_command(["build", str(source), str(tmp_path / "engine"), "--dtype", "float32", "--page-tokens", "8"]) == 0
    )
    assert run_command(["convert", str(source), str(tmp_path / "checkpoint")]) == 0
    capsys.readouterr()
    report = plan_json(capsys, "--model", str(tmp_path / "engine"), "--context", "32")
    assert (report["kv_dtype"], report["page_tokens"]) == ("float32", 8)
    for path in (source, tmp_path / "checkpoint"):
        other = plan_json(capsys, "--model", str(path), "--context", "32", "--page-tokens", "8")
        assert other["kv_dtype"] == "bfloat16"
        assert other["page_bytes"] == {group: count // 2 for group, count in report["page_bytes"].items()}


@pytest.mark.parametrize(
    ("options", "what"),
    [
        (("--model", "gemma3-27"), "gemma3-27b"),
        (("--model", "engines/nothing"), "no such directory"),
        (("--model", "gemma3-270m", "--context", "128K"), "32768"),
        (("--model", "gemma3-270m", "--context", "8K,"), "--context ''"),
        (("--model", "gemma3-270m", "--context", "31"), "one page"),
        (("--model", "gemma3-270m", "--context", "-5"), "--context '-5'"),
        (("--model", "gemma3-270m", "--context", "²"), "--context"),
        (("--model", "gemma3-270m", "--kv-dtype", "int4"), "--kv-dtype 'int4'"),
        (("--model", "gemma3-270m", "--host-bytes", "many"), "'many' is not a size"),
        (("--model", "gemma3-270m", "--disk-rate", "0"), "'0' is nothing"),
    ],
)
def test_what_is_wrong_is_named_with_its_fix(capsys, options, what):
    assert run_command(["kv", "plan", *options]) == 3
    error = capsys.readouterr().err
    assert what in error and error.startswith("error: ") and error.count("\n") == 1


@pytest.mark.parametrize("name", ["gemma3-270m", "gemma3-27b"])
def test_the_device_limits_what_is_active(capsys, name):
    geometry = Geometry.from_spec(builtin_spec(name), 32, "bfloat16")
    batch = BATCH_TOKENS["cuda"]
    for nbytes in (10**7, 10**9, 24 * 10**9, 80 * 10**9):
        fit = geometry.device_sessions(nbytes, 8192, batch, loads=True)
        assert geometry.device_bytes(fit + 1, 8192, batch, loads=True) > nbytes
        assert not fit or geometry.device_bytes(fit, 8192, batch, loads=True) <= nbytes
    size = f"{geometry.device_bytes(3, 8192, BATCH_TOKENS['cuda'], loads=True)}"
    found = plan_json(capsys, "--model", name, "--context", "8K", "--device-bytes", size)
    assert found["sessions"][0]["sessions_on_device"] == found["recipe"]["scheduler"]["max_sequences"] == 3
    assert run_command(["kv", "plan", "--model", name, "--context", "8K", "--device-bytes", size, "--active", "4"]) == 3
    assert "3 conversations of 8,192 tokens fit" in capsys.readouterr().err


def test_the_figures_of_the_document_are_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    text = (Path(__file__).parents[2] / "docs" / "scale.md").read_text()
    (command,) = re.findall(r"    wicore (kv plan .*)", text)
    assert run_command(command.split()) == 0
    sizes = re.findall(r"(?:device|host|disk)_bytes: ([\d.]+)GiB", capsys.readouterr().out)
    assert "{} GiB of device memory, {} GiB of host memory, {} GiB of disk".format(*sizes) in text
