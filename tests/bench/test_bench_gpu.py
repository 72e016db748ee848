"""The GPU benchmark without a GPU: bounds, table and plot, the peer's process, the order of stages and their budget."""

from __future__ import annotations

import json
import random
import re
import sys
import textwrap
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from benchmarks.gpu import cases as gpu_cases
from benchmarks.gpu import machine as gpu_machine
from benchmarks.gpu import ours as gpu_ours
from benchmarks.gpu import peer as gpu_peer
from benchmarks.gpu import report as gpu_report
from benchmarks.gpu import run as gpu
from benchmarks.gpu import startup as gpu_startup
from benchmarks.gpu import step_check as gpu_step_check
from benchmarks.gpu.cases import CONFIGS, CONTEXT, DECODE, EXPECTED, FIGURES, GOALS, PREFILL, Rates, bound_s
from benchmarks.gpu.report import drop_empty_columns, lines, load_document, markdown, new_document, save, svg
from wicore_trt.bench.report import list_versions

H100 = {"name": "NVIDIA H100 80GB HBM3", "target": "sm90"}


def row(config: str, batch: int, prefill_s: float, step_ms: float, **more):
    """A row of `ours` whose medians are these, between runs that were disturbed."""
    total = prefill_s + 64 * step_ms / 1e3
    return {
        **{"config": config, "batch": batch, "context": CONTEXT, "output_tokens": 65, "graph_ms": step_ms - 0.1},
        **{"prefill_s": [9.0, prefill_s, prefill_s / 2], "total_s": [total, 99.0, total / 2]},
        **{"preemptions": 0, **more},
    }


def document(**known):
    rates = gpu_machine.rates_json(Rates(3e12, 3.1e12, 8e14, 1.4e15))
    return new_document(date="2000-01-01", gpu=H100, versions={"torch": "2"}) | {"bounds": rates} | known


def cells(text: str) -> dict[str, list[str]]:
    """Rows of a Markdown table by their first cell."""
    rows = [[c.strip() for c in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("|")]
    return {r[0]: r for r in rows}


# Worked out by hand: 62 layers of 5,376 x 8,192 + 4,096 x 5,376 + 3 x 5,376 x 21,504 weights, a head, and elements of
# KV per layer and token.
LINEAR, HEAD, KV_TOKEN = 25_598_361_600, 262_208 * 5_376, 2 * 16 * 128


@pytest.mark.parametrize(
    ("name", "batch", "linear", "head", "kv"),
    [
        ("bf16", 1, 2, 2, 2),
        ("fp16", 1, 2, 2, 2),
        ("fp8", 64, 1, 2, 2),
        ("fp8kv", 128, 1, 2, 1),
        ("q4_0", 8, 0.5625, 2, 2),
    ],
)
def test_a_decode_step_is_bound_by_its_bytes(name, batch, linear, head, kv):
    seen = 52 * 1024 + 10 * (1025 + 1088) / 2  # keys by layer, mean over 64 steps
    moved = LINEAR * linear + HEAD * head + batch * (KV_TOKEN * kv * seen + 4 * 262_208)
    slow = Rates(1e12, 9e12, 1e18, 1e18)
    assert bound_s(CONFIGS[name], DECODE, batch, slow) == pytest.approx(moved / 1e12, rel=1e-9)


def test_prefill_is_bound_by_its_flops_and_each_part_by_its_rate():
    linear = 2 * LINEAR * 1024
    attention = 62 * 4 * 32 * 128 * 1024 * 1025 // 2
    other = attention + 2 * HEAD
    fast = Rates(1e18, 1e18, 1e14, 2e14)
    assert bound_s(CONFIGS["bf16"], PREFILL, 3, fast) == pytest.approx(3 * (linear + other) / 1e14, rel=1e-9)
    assert bound_s(CONFIGS["fp8"], PREFILL, 3, fast) == pytest.approx(3 * (linear / 2e14 + other / 1e14), rel=1e-9)
    none = Rates(1e18, 1e18, 1e14, None)  # a GPU without E4M3 products
    assert bound_s(CONFIGS["fp8"], PREFILL, 3, none) == pytest.approx(3 * (linear + other) / 1e14, rel=1e-9)
    assert bound_s(CONFIGS["bf16"], PREFILL, 1, Rates(1e9, 1e9, 1e18)) == pytest.approx((LINEAR + HEAD) * 2 / 1e9)


def test_every_goal_has_a_row_and_lies_between_bound_and_must():
    assert set(GOALS) <= set(FIGURES) and len(FIGURES) == len(set(FIGURES)) == 43
    for (name, phase, batch), (must, aim) in GOALS.items():
        assert 1e3 * bound_s(CONFIGS[name], phase, batch, EXPECTED) < aim < must
    assert {batch for _, phase, batch in FIGURES if phase == PREFILL} == {1, 32}
    assert set(gpu_cases.PEER_START_S) == set(gpu_cases.PEER_ORDER) == {n for n, c in CONFIGS.items() if c.peer}


def test_what_fits_is_counted_from_the_first():
    config, batches = CONFIGS["fp8"], (1, 8, 32, 64)
    each = [gpu_cases.case_estimate_s(config, b, 3, EXPECTED) for b in batches]
    for count in range(5):
        for extra, expected in ((0.01, count), (-0.01, max(count - 1, 0))):
            left = 10 + sum(each[:count]) + extra
            assert gpu_cases.fitting(config, batches, 10, 3, EXPECTED, left) == expected


def test_an_estimate_ends_with_the_run_that_passes_the_limit():
    config = CONFIGS["fp8kv"]
    pair = gpu_cases.case_estimate_s(config, 128, 1, EXPECTED)
    assert gpu_cases.case_estimate_s(config, 128, 3, EXPECTED) == pytest.approx(3 * pair)
    for case_s, runs in ((0.5, 1), (1.5, 2), (2.5, 3), (9.0, 3)):
        assert gpu_cases.case_estimate_s(config, 128, 3, EXPECTED, case_s * pair) == pytest.approx(runs * pair)


def test_the_table_has_medians_bounds_goals_and_the_peer():
    peer = {"version": "0.26.0", "seconds": 99.0, "startup_s": 55.0, "rows": []}
    peer["rows"] = [{"batch": 1, "prefill_s": 0.09, "tpot_ms": 22.0, "runs": None}]
    ours = [row("bf16", 1, 0.080, 19.0), row("fp16", 1, 0.080, 20.0), row("fp8", 8, 0.4, 11.0)]
    started = {"config": "bf16", "ready_s": 21.0, "first_answer_s": 21.5, "tokens": 16}
    text = markdown(document(ours=ours, peer={"bf16": peer}, startup=started))
    table = cells(text)
    assert len({len(r) for r in table.values()}) == 1
    assert table["27B BF16 decode, batch 1, ms/token"][1:] == [
        "19.0 (must held)", "18.9", "18.2", "96%", "19.5", "18.3", "22.0", "1.16x",
    ]  # fmt: skip
    assert table["27B FP16 decode, batch 1, ms/token"][1:3] == ["20.0 (must MISSED)", "19.9"]
    assert table["27B FP16 decode, batch 1, ms/token"][7:] == ["22.0", "1.10x"]  # vLLM's in BF16: as many bytes
    assert table["27B FP8 weights decode, batch 8, ms/token"][1] == "11.0 (aim held)"
    assert table["27B BF16 prefill 1 x 1,024, ms"][1:3] == ["80.0 (must held)", "-"]
    assert table["27B BF16 prefill 1 x 1,024, ms"][7:] == ["90.0", "1.12x"]
    assert [table["27B start to serving, ms"][i] for i in (1, 7)] == ["21,000 (must held)", "55,000"]
    assert table["27B FP8 weights decode, batch 8, ms/token"][7:] == ["not measured", "-"]
    assert not {"27B BF16 decode, batch 32, ms/token", "27B FP8 weights prefill 32 x 1,024, ms"} & table.keys()


def test_absent_figures_say_why_and_are_never_made_up():
    absent = [
        {"stage": "vllm", "item": "fp8", "reason": "exit code 1: out | of\nmemory", "failed": True},
        {"stage": "ours", "item": "fp8 batch 64", "reason": "9 s are left", "failed": False},
        {"stage": "ours", "item": "fp8", "reason": "EngineFormatError", "failed": True},
    ]
    text = markdown(document(absent=absent, bounds=None))
    table = cells(text)
    assert table["27B FP8 weights decode, batch 64, ms/token"][1] == "9 s are left"
    assert table["27B FP8 weights decode, batch 8, ms/token"][1] == "EngineFormatError"
    assert table["27B FP8 weights decode, batch 8, ms/token"][3] == "-"  # no bound without rates
    assert table["27B FP8 weights decode, batch 8, ms/token"][7] == "exit code 1: out / of memory"
    assert "27B BF16 decode, batch 1, ms/token" not in table  # nobody asked for it
    assert "- Absent: vllm fp8 failed: exit code 1" in text
    elsewhere = cells(markdown(document(gpu={"name": "NVIDIA L20"}, ours=[row("fp8", 1, 1, 30)])))
    assert elsewhere["27B FP8 weights decode, batch 1, ms/token"][1] == "30.0"  # goals are of one GPU


def test_a_figure_with_lost_pages_is_called_useless():
    assert "of no use" in markdown(document(ours=[row("fp8", 8, 0.4, 11.0, preemptions=2)]))
    assert "of no use" not in markdown(document(ours=[row("fp8", 8, 0.4, 11.0)]))


def test_the_plot_shows_times_over_bounds():
    peer = {
        "fp8": {"version": "1", "seconds": 1, "startup_s": 1, "rows": [{"batch": 8, "prefill_s": 1, "tpot_ms": 22}]}
    }
    name = {"name": 'GPU <"&'}
    for doc, bars in (
        (document(ours=[row("fp8", 8, 0.4, 11.0)], peer=peer), 2),
        (document(), 0),
        (document(gpu=name), 0),
    ):
        root = ET.fromstring(svg(doc))
        found = [e for e in root.iter("{http://www.w3.org/2000/svg}rect") if e.get("fill") in ("#2b6cb0", "#b0b7c3")]
        assert len(found) == bars
    root = ET.fromstring(svg(document(ours=[row("fp8", 8, 0.4, 11.0)], peer=peer)))
    ours, theirs = (float(e.get("width")) for e in root if e.get("fill") in ("#2b6cb0", "#b0b7c3"))
    assert theirs == pytest.approx(2 * ours, abs=0.2)


def test_a_document_survives_and_others_are_refused(tmp_path, capsys):
    path = tmp_path / "deep" / "bench.json"
    save(document(ours=[row("fp8", 1, 0.06, 11.0)]), path)
    assert [line.ours for line in lines(load_document(path))].count(None) == len(FIGURES) - 1
    assert gpu.main(["report", str(path)]) == 0
    printed, written = capsys.readouterr().out.strip(), path.with_suffix(".md").read_text().strip()
    assert written == drop_empty_columns(printed)
    assert "vLLM" in printed.splitlines()[0] and "vLLM" not in written.splitlines()[0]
    assert ET.fromstring(path.with_suffix(".svg").read_text()).tag.endswith("svg")
    for wrong in ("[]", "{", json.dumps({"kind": "wicore-bench", "schema": 1})):
        path.write_text(wrong)
        assert gpu.main(["report", str(path)]) == 1
    assert gpu.main(["report", str(tmp_path / "none.json")]) == 1


# ---- the peer

SCRIPT = """
import json, os, subprocess, sys, time
model, out, quant, kv, batches, lengths, tokens = sys.argv[1:]
assert os.environ["PYTHONPATH"].endswith("site") and "WICORE_ENGINE" not in os.environ
rows = [dict(startup_s=5.5)]
for b in map(int, batches.split(",")):
    rows.append(dict(B=b, input_len=int(lengths), prefill_s=b / 10, tpot_ms=b * 2.0))
    json.dump(rows, open(out, "w"))
MORE
"""


def peer(tmp_path: Path, more: str, batches=(1, 8), timeout_s: float = 30.0):
    script, site = tmp_path / "v.py", tmp_path / "site"
    (site / "vllm-0.26.0.dist-info").mkdir(parents=True, exist_ok=True)
    script.write_text(SCRIPT.replace("MORE", textwrap.dedent(more)))
    return gpu_peer.run_peer(CONFIGS["fp8"], batches, site, script, tmp_path, timeout_s)


def test_the_peer_is_asked_for_the_same_and_its_figures_are_taken(tmp_path, monkeypatch):
    monkeypatch.setenv("WICORE_ENGINE", "/nowhere")
    done = peer(tmp_path, "")
    assert done.problem == "" and done.record["version"] == "0.26.0" and done.record["startup_s"] == 5.5
    assert [(r["batch"], r["prefill_s"], r["tpot_ms"]) for r in done.record["rows"]] == [(1, 0.1, 2.0), (8, 0.8, 16.0)]
    assert done.record["command"][1:] == [
        str(tmp_path / "g27"), str(tmp_path / "vllm-fp8.json"), "fp8_per_channel", "auto", "1,8", "1024", "65",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("more", "timeout_s", "problem"),
    [
        ("raise RuntimeError('CUDA out of memory')", 30.0, "exit code 1: RuntimeError: CUDA out of memory"),
        ("subprocess.Popen(['sleep', '60']); time.sleep(60)", 6.0, "no answer within 6 s"),
        ("sys.exit(7)", 30.0, "exit code 7"),
    ],
)
def test_a_peer_that_fails_keeps_what_it_measured(more, timeout_s, problem, tmp_path):
    done = peer(tmp_path, more, timeout_s=timeout_s)
    assert done.problem.startswith(problem) and len(done.record["rows"]) == 2


def test_a_peer_that_leaves_out_a_batch_has_a_problem(tmp_path):
    (tmp_path / "v").mkdir()
    done = peer(tmp_path / "v", "json.dump(rows[:2], open(out, 'w'))")
    assert done.problem and [r["batch"] for r in done.record["rows"]] == [1]
    assert peer(tmp_path / "v", "open(out, 'w').write('nonsense')").record["rows"] == []


# ---- start-up

SERVER = """
import sys
sys.path[:0] = PATHS
from fake_server import main
print("ready on ", end="")
sys.exit(main({}))
"""


def test_start_up_ends_with_an_answer_over_grpc(tmp_path):
    tests = Path(__file__).parents[1]
    paths = [str(tests), str(tests / "serve")]
    command = [sys.executable, "-c", SERVER.replace("PATHS", repr(paths))]
    record = gpu_startup.measure_startup(command, 97, tmp_path / "log", 60.0)
    assert 0 < record["ready_s"] < record["first_answer_s"] < 60 and record["tokens"] == gpu_startup.ANSWER_TOKENS


@pytest.mark.parametrize(
    ("code", "message", "timeout_s"),
    [
        ("raise SystemExit('no such engine')", "in place of its address; the log ends: no such engine", 30.0),
        ("print('ready on 127.0.0.1:1', flush=True); raise SystemExit(4)", "ended with code 4", 30.0),
        ("import time; time.sleep(60)", "does not serve", 1.0),
    ],
)
def test_a_server_that_does_not_serve_is_no_figure(code, message, timeout_s, tmp_path):
    with pytest.raises(RuntimeError, match=message):
        gpu_startup.measure_startup([sys.executable, "-c", code], 97, tmp_path / "log", timeout_s)


def test_the_served_command_is_one_that_exists(tmp_path, capsys):
    from wicore_trt.cli.main import run_command

    _, *arguments = gpu_startup.command(tmp_path)[2:]
    assert run_command([*arguments, "--print-config"]) == 0
    assert f'engine: "{tmp_path}"  # argument' in capsys.readouterr().out


# ---- stages


@pytest.fixture
def faked(monkeypatch, tmp_path):
    """Everything that needs a GPU answers at once; the calls in order, and what shall fail."""
    calls: list[str] = []
    bad: dict[str, str] = {}

    class BatchRunner:
        load_s = 1.0

        @classmethod
        def load(cls, settings):
            calls.append(f"load {settings.scheduler.max_sequences}")
            if "load" in bad:
                raise RuntimeError(bad["load"])
            return cls()

        def measure(self, config, batch, repeats, case_s, say):
            calls.append(f"measure {config.name} {batch}")
            if f"{config.name} {batch}" in bad:
                raise RuntimeError(bad[f"{config.name} {batch}"])
            return row(config.name, batch, 0.1, 20.0)

        def run(self, batch, context, tokens):
            calls.append(f"run {batch} {context} {tokens}")

        def close(self):
            calls.append("close")

    class Engines:
        def __init__(self, *_):
            self.built = set()

        def has(self, config):
            return config.name in self.built

        def engine(self, config):
            new = not self.has(config)
            self.built.add(config.name)
            return tmp_path / config.name, {"seconds": 1.0, "kernels": 2, "prebuilt": False} if new else None

        check_table = None

    def run_peer(config, batches, site, script, scratch, timeout_s):
        calls.append(f"vllm {config.name} {batches}")
        rows = [{"batch": b, "prefill_s": 0.1, "tpot_ms": 30.0, "total_s": 5.0, "runs": 3} for b in batches]
        record = {"version": "1", "seconds": 2.0, "startup_s": 1.0, "command": [], "rows": rows}
        return gpu_peer.PeerRun(record, bad.get("vllm", ""))

    def measure_startup(command, vocab, log, timeout_s):
        calls.append("startup")
        return {"ready_s": 20.0, "first_answer_s": 21.0, "tokens": 16}

    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(gpu_ours, "free_device_memory", lambda: None)
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (99, 100))
    monkeypatch.setattr(gpu.signal, "signal", lambda *_: None)
    monkeypatch.setattr(gpu, "describe", lambda: H100)
    monkeypatch.setattr(gpu, "clocks", lambda when, at: {"when": when, "at_s": at, "clocks.sm": "1980 MHz"})
    monkeypatch.setattr(gpu, "measure_gpu_rates", lambda: calls.append("bounds") or EXPECTED)
    monkeypatch.setattr(gpu, "BEGUN", gpu.time.monotonic())
    monkeypatch.setattr(gpu_step_check, "CASES", gpu_step_check.CASES[:2])
    monkeypatch.setattr(
        gpu_step_check, "check_step", lambda case, say, tables: calls.append("check") or bad.get("check", "").split()
    )
    monkeypatch.setattr(gpu_ours, "BatchRunner", BatchRunner)
    monkeypatch.setattr("benchmarks.gpu.engines.Engines", Engines)
    monkeypatch.setattr(gpu_peer, "run_peer", run_peer)
    monkeypatch.setattr(gpu_startup, "measure_startup", measure_startup)
    return calls, bad


def bench(tmp_path: Path, *argv: str) -> tuple[int, dict]:
    path = tmp_path / "out" / "bench.json"
    code = gpu.main([*argv, "--output", str(path)])
    return code, load_document(path)


WITH_PEER = ("--vllm-site", "site", "--vbench", "v.py")


def test_all_stages_run_in_their_order_and_are_kept(faked, tmp_path, capsys):
    calls, _ = faked
    code, doc = bench(tmp_path, *WITH_PEER)
    assert (
        code == 0
        and {a["reason"] for a in doc["absent"]} == {"it takes 2 GPUs", "it takes 4 GPUs"}
        and doc["check"]["ok"]
        and doc["bounds"]["copy_bytes_per_s"] == 3e12
    )
    assert calls[:3] == ["bounds", "check", "check"] and calls[3:6] == ["load 33", "measure bf16 1", "measure bf16 32"]
    assert calls[-6:] == [
        "startup", "vllm fp8 [1, 8, 32, 64]", "vllm bf16 [1, 32]", "vllm q4_0 [1, 8, 32]",
        "vllm fp8kv [128]", "vllm 270m [1]",
    ]  # fmt: skip
    assert (
        len(doc["ours"]) == 13
        and calls.count("close") == 6
        and set(doc["builds"]) == {n for n, c in CONFIGS.items() if c.ranks == 1}
    )
    assert doc["clocks"][0]["when"] == "before" and doc["clocks"][-1]["when"] == "after"
    rows = cells(capsys.readouterr().out)
    assert not any("not measured" in cell for name, row in rows.items() if ", TP " not in name for cell in row)
    assert (tmp_path / "out" / "bench.md").exists() and (tmp_path / "out" / "bench.svg").exists()


def test_a_failed_check_stops_everything(faked, tmp_path):
    calls, bad = faked
    bad["check"] = "wrong-tokens"
    code, doc = bench(tmp_path, *WITH_PEER)
    assert code == 1 and set(calls) == {"bounds", "check"} and not doc["check"]["ok"] and doc["ours"] == []
    assert "FAILED: wrong-tokens" in (tmp_path / "out" / "bench.md").read_text()


def test_a_failure_costs_its_own_figure_alone(faked, tmp_path):
    calls, bad = faked
    bad["fp8 8"] = "device lost"
    bad["vllm"] = "exit code 1: out of memory"
    code, doc = bench(tmp_path, "--only", "fp8", *WITH_PEER)
    assert code == 1 and [r["batch"] for r in doc["ours"]] == [1, 32, 64] and calls.count("close") == 1
    assert {(e["stage"], e["item"], e["failed"]) for e in doc["absent"]} == {
        ("ours", "fp8 batch 8", True), ("vllm", "fp8", True),
    }  # fmt: skip
    calls.clear()
    bad.clear()
    bad["vllm"] = "exit code 1: out of memory"
    assert bench(tmp_path, "--only", "fp8", *WITH_PEER)[0] == 0  # the peer's failure is not ours
    bad.clear()
    bad["load"] = "no memory"
    code, doc = bench(tmp_path, "--only", "fp8", "--stages", "ours,startup")
    assert code == 1 and doc["ours"] == [] and doc["startup"]["ready_s"] == 20.0


def test_what_does_not_fit_into_the_time_is_skipped_and_said(faked, tmp_path):
    calls, _ = faked
    config = CONFIGS["fp8"]
    needed = 44 + sum(gpu_cases.case_estimate_s(config, b, 3, EXPECTED) for b in (1, 8))
    code, doc = bench(
        tmp_path, "--only", "fp8", "--stages", "ours,startup,vllm", "--budget-s", str(needed + 3), *WITH_PEER
    )
    assert code == 0 and [r["batch"] for r in doc["ours"]] == [1, 8] and calls[0] == "load 9"
    skipped = {(e["stage"], e["item"]) for e in doc["absent"]}
    assert (
        ("ours", "fp8 batch 32") in skipped
        and ("ours", "fp8 batch 64") in skipped
        and ("vllm", "fp8 batch 1") in skipped
    )
    assert not any(e["failed"] for e in doc["absent"]) and not any(c.startswith("vllm") for c in calls)
    calls.clear()
    code, doc = bench(tmp_path, "--budget-s", "0")
    assert code == 0 and calls == [] and doc["ours"] == [] and len(doc["absent"]) >= len(CONFIGS) + 3


def test_what_the_gpu_has_no_memory_for_is_skipped_and_said(faked, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu, "describe", lambda: H100 | {"memory_bytes": 60 << 30})  # weights of 50 GiB fit
    calls, _ = faked
    code, doc = bench(tmp_path, "--only", "bf16,fp8", "--stages", "ours,vllm", *WITH_PEER)
    assert code == 0 and [(r["config"], r["batch"]) for r in doc["ours"]] == [
        ("bf16", 1), ("fp8", 1), ("fp8", 8), ("fp8", 32),
    ]  # fmt: skip
    assert calls[-2:] == ["vllm fp8 [1, 8, 32]", "vllm bf16 [1]"]
    said = {(e["stage"], e["item"]): e["reason"] for e in doc["absent"]}
    assert said["ours", "bf16 batch 32"].endswith("GiB and the GPU has 60") and ("vllm", "fp8 batch 64") in said
    assert all(gpu_cases.memory_bytes(c, b) < 79 << 30 for c in CONFIGS.values() for b in c.batches), "all ran on 80 GB"


def test_figures_are_of_what_is_installed(faked, tmp_path, monkeypatch):
    """Without the native library digests of pages take most of what threads for disks do."""
    _, doc = bench(tmp_path, "--stages", "bounds")
    assert doc["versions"]["commit"] not in ("", "unknown")
    assert re.fullmatch(r"(avx512bf16|avx2|generic)-[0-9a-f]{8}", doc["versions"]["native"])
    monkeypatch.setattr("wicore_trt.bench.report.open_library", lambda: None)
    with pytest.raises(SystemExit, match="no native library"):
        bench(tmp_path, "--stages", "bounds")


def test_sources_without_their_history_have_the_commit_they_are_told(monkeypatch, tmp_path):
    monkeypatch.setenv("BENCH_COMMIT", "abc")
    monkeypatch.setattr("wicore_trt.bench.report.__file__", str(tmp_path / "report.py"))
    assert list_versions()["commit"] == "abc"


def test_the_five_rows_name_card_commit_and_library(tmp_path, capsys):
    kept = {"27B": [("bf16", 1, 0.08, 19.0), ("bf16", 32, 2.7, 25.0), ("fp8", 64, 1.6, 24.0)]}
    rows = [{"batch": 64, "prefill_s": 3.0, "tpot_ms": 27.0, "total_s": 5.4, "runs": 3}]
    peer = {"fp8": {"version": "0.26.0", "seconds": 9, "startup_s": 5, "rows": rows}}
    said = {"commit": "0a1b", "native": "avx2-00ff", "torch": "2.11"}
    save(document(ours=[row(*known) for known in kept["27B"]], peer=peer, versions=said), tmp_path / "gpu.json")
    arms = (("device 80 GiB", 9.0), ("device 16 GiB, host 56 GiB", 8.0), ("device 16 GiB, nothing cached", 2.0))
    turns = [{"arm": arm, "turn": n, "turns_per_s": rate * (n > 0) + 1} for arm, rate in arms for n in range(3)]
    peers = {"sessions": {"rows": [{"turn": n, "turns_per_s": 2.0 + n} for n in range(3)]}}
    (tmp_path / "kv.json").write_text(json.dumps({"sessions": turns, "vllm": peers}))
    assert gpu.main(["five", str(tmp_path / "gpu.json"), str(tmp_path / "kv.json")]) == 0
    out = capsys.readouterr().out
    for word in (
        "H100",
        "2000-01-01",
        "commit 0a1b",
        "native library avx2-00ff",
        "Made-up weights",
        "its own KV offload",
    ):
        assert word in out.splitlines()[0]
    table = list(cells(out).values())
    assert [r[1:] for r in table[2:]] == [
        ["19.0", "not measured", "-"], ["24.0", "27.0", "1.12x"], ["4,300", "not measured", "-"],
        ["3,136", "5,400", "1.72x"], ["9.0", "3.5", "2.57x as many"],
    ]  # fmt: skip
    assert table[0][2] == "vLLM 0.26.0"
    assert gpu.main(["five", str(tmp_path / "none.json")]) == 1
    assert gpu.main(["five", str(tmp_path / "gpu.json")]) == 0 and "not measured" in capsys.readouterr().out


def test_memory_is_that_of_an_engine_that_has_answered_a_long_prompt(faked, tmp_path, monkeypatch):
    calls, _ = faked
    monkeypatch.setattr("torch.cuda.mem_get_info", lambda: (60 << 30, (60 << 30) + 2**30 * len(calls)))
    code, doc = bench(tmp_path, "--only", "q4_0,bf16-tp2", "--stages", "memory")
    assert calls == ["load 2", "run 1 8127 65", "close"]
    assert code == 0 and doc["memory"] == {"q4_0": 2.0}
    assert [absent["item"] for absent in doc["absent"] if absent["stage"] == "memory"] == ["bf16-tp2"]


def test_stages_come_in_the_order_that_was_asked_for(faked, tmp_path):
    calls, _ = faked
    bench(tmp_path, "--only", "270m,bf16", "--batches", "1", "--stages", "vllm,startup,ours", *WITH_PEER)
    assert calls == [
        "vllm bf16 [1]", "vllm 270m [1]", "startup",
        "load 2", "measure bf16 1", "close", "load 2", "measure 270m 1", "close",
    ]  # fmt: skip


def test_an_end_from_outside_keeps_what_there_is(faked, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_startup, "measure_startup", lambda *_: sys.exit(143))
    with pytest.raises(SystemExit):
        bench(tmp_path, "--only", "bf16")
    doc = load_document(tmp_path / "out" / "bench.json")
    assert len(doc["ours"]) == 2 and (tmp_path / "out" / "bench.md").exists()


@pytest.mark.parametrize(
    "argv", [["--only", "fp4"], ["--stages", "warm"], ["--vbench", "v.py"], ["--repeats", "many"], ["prebuild", "d"]]
)
def test_arguments_that_mean_nothing_are_refused(argv, faked, capsys):
    with pytest.raises(SystemExit) as refused:
        gpu.main(argv)
    assert refused.value.code == 2 and "error:" in capsys.readouterr().err


def test_without_a_gpu_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert gpu.main(["--only", random.choice(list(CONFIGS)), "--vllm-site", "", "--vbench", ""]) == 2
    assert "no GPU" in capsys.readouterr().err


def test_clocks_are_read_and_their_absence_is_told(monkeypatch):
    said = "1980 MHz, 2619 MHz, 0x0000000000000000, 41, 120.50 W, 4 MiB\n"

    def run_command(command, **_):
        assert command[0] == "nvidia-smi" and not {"-lgc", "-pl", "-pm", "-ac", "-r"} & set(command)
        return type("Done", (), {"stdout": said})

    monkeypatch.setattr(gpu_machine.subprocess, "run", run_command)
    reading = gpu_machine.clocks("before", 1.0)
    assert reading["clocks.sm"] == "1980 MHz" and reading["power.draw"] == "120.50 W" and reading["when"] == "before"
    monkeypatch.setattr(gpu_machine.subprocess, "run", lambda *_, **__: Path("/nonexistent/nvidia-smi").read_text())
    assert "error" in gpu_machine.clocks("after", 2.0)
    assert "clocks.sm 1980 MHz" in gpu_report.markdown(document(clocks=[reading]))
