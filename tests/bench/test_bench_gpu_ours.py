"""The timed serving loop of the GPU benchmark: real settings, cache, scheduler and core over an executor that computes
nothing; engines that are prebuilt, built and refused."""

from __future__ import annotations

import json
import random
import time
from math import inf
from types import SimpleNamespace

import pytest
from fakes import FakeExecutor

from benchmarks.gpu import engines as gpu_engines
from benchmarks.gpu.cases import BATCH_TOKENS, CONFIGS, CONTEXT, OUTPUT
from benchmarks.gpu.engines import Engines, prebuild, read_prebuilt_index, source_digest
from benchmarks.gpu.ours import BatchRunner, Run, decode_batch, settings_for
from benchmarks.gpu.step_check import CASES, case_shape
from wicore_trt.backends.triton import compile as triton_compile
from wicore_trt.core.assemble import load_engine
from wicore_trt.engine.directory import open_engine
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.runtime.pool_sizes import SharedPages, pool_sizes, shared_pages
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.types import FinishReason, TokenOutput


class Idle(FakeExecutor):
    """Of a real model's sizes; its tokens mean nothing."""

    def __init__(self, config, settings) -> None:
        super().__init__({"global": 1, "local": 1}, 32, 1024, settings.scheduler.max_batch_tokens)
        size, self.spec = config.kv_bytes_per_element, config.spec
        limits = {"max_batch_tokens": BATCH_TOKENS, "max_sequences": settings.scheduler.max_sequences}
        given = (self.spec, 32, size, settings.kv.device_bytes, settings.scheduler.max_context)
        shared = shared_pages(*given, max_batch_tokens=BATCH_TOKENS) or SharedPages(pool_sizes(*given, **limits), None)
        kv_dtype, pages = "fp8" if size == 1 else "bfloat16", shared.num_pages
        page_bytes = {g: self.spec.page_bytes(g, 32, size) for g in pages}
        self.layout = KVLayout(32, kv_dtype, pages, page_bytes, shared.slab_pages)
        self.memory = {g: [] for g in pages}
        self.graphs = {}

    def _run(self, piece):
        return 7 if piece.sample else None


@pytest.fixture
def no_compiler(monkeypatch):
    """Engines without kernels, which are built in no time."""
    asked = []

    def compile_listed(shape, target, workers=None, report=None):
        asked.append((shape, target))
        return [], {}

    monkeypatch.setattr(triton_compile, "compile_listed", compile_listed)
    return asked


def served(config, path, batch) -> BatchRunner:
    gpu_engines.build_bench_engine(config, path, "sm90")
    settings = settings_for(config, path, batch)
    assert not settings.kv.prefix_cache and settings.executor.device == "cuda"
    return BatchRunner(load_engine(settings, Idle(config, settings)).core)


@pytest.mark.parametrize(("name", "batch"), [("bf16", 32), ("fp8", 1), ("fp8kv", 128)])
def test_the_pools_hold_all_sequences_of_a_run(name, batch, tmp_path, no_compiler):
    """A sequence that loses its pages computes its prompt twice, and the figure is of no use."""
    run = served(CONFIGS[name], tmp_path / "e", batch)
    timed = run.run(batch, CONTEXT, OUTPUT)
    core, steps = run.core, run.core.executor.steps
    assert core.scheduler.preemptions == 0 and not core.has_work
    first = -(-batch * CONTEXT // (BATCH_TOKENS - batch))  # steps until every prompt is computed
    assert len(steps) <= 1 + first + OUTPUT - 1  # none waits until others are done
    assert max(map(len, steps)) == batch
    assert max(sum(n for _, n in step) for step in steps) <= BATCH_TOKENS
    assert len(timed.steps) == sum(len(step) == batch and {n for _, n in step} == {1} for step in steps[1:])
    assert len(timed.steps) >= OUTPUT - 1 - first, "all decode in most of them"
    computed = sum(n for step in steps for _, n in step)
    assert computed == batch * (CONTEXT + OUTPUT - 1) + 1  # no prompt is cached; one token of the warm-up


def test_a_row_has_medians_of_new_prompts(tmp_path, no_compiler, monkeypatch):
    config = CONFIGS["270m"]
    run = served(config, tmp_path / "e", 1)
    prompts = []
    add = run.core.add
    monkeypatch.setattr(run.core, "add", lambda request: (prompts.append(request.prompt_token_ids), add(request)))
    monkeypatch.setattr("benchmarks.gpu.ours.CHEAP_S", 0.0)
    steps = run.core.executor.steps
    clock = SimpleNamespace(perf_counter=lambda: float(len(steps)))  # a step takes a second
    monkeypatch.setattr("benchmarks.gpu.ours.time", clock)
    monkeypatch.setattr("benchmarks.gpu.ours.SHORT_S", inf)
    monkeypatch.setattr("benchmarks.gpu.ours.gc", SimpleNamespace(collect=lambda: None))  # 19 of a whole session's heap
    row = run.measure(config, 1, 3, inf, print)
    assert len(row["prefill_s"]) == 15 and len(row["total_s"]) == 3 and row["graph_ms"] is None
    [prefill], [total] = set(row["prefill_s"]), set(row["total_s"])
    assert total == prefill + OUTPUT - 1 and row["decode_s"] == [1.0] * 3
    assert (row["batch"], row["context"], row["output_tokens"], row["preemptions"]) == (1, CONTEXT, OUTPUT, 0)
    assert len(prompts) == len(set(prompts)) == 19 and {len(p) for p in prompts} == {CONTEXT}
    json.dumps(row)


@pytest.mark.parametrize(("name", "batch"), [("bf16", 32), ("fp8kv", 128)])
def test_the_graph_is_timed_over_a_step_of_all_rows(name, batch, tmp_path, no_compiler, monkeypatch):
    """A run ends with fewer rows, whose inputs lie elsewhere: replaying a graph over them would touch any memory."""
    run = served(CONFIGS[name], tmp_path / "e", batch)
    executor, seen = run.core.executor, []
    executor.graphs = {rows: f"graph of {rows}" for rows in (8, batch, 256)}

    def events(given, graph, repeats):
        assert given is executor and graph == f"graph of {batch}"
        seen.append(executor.steps[-1])
        return 1.25

    monkeypatch.setattr("benchmarks.gpu.step_time.events", events)
    monkeypatch.setattr(run, "run", lambda *_: executor.steps.append([(0, 1)] * 8) or Run(5.0, [1.0]))
    row = run.measure(CONFIGS[name], batch, 1, inf, print)
    assert row["graph_ms"] == 1.25 and row["graph_context"] == 1056 and [len(step) for step in seen] == [batch]
    assert {*executor.released} == {seq_id for seq_id, _ in seen[0]} and min(executor.released) == -batch
    monkeypatch.setattr("benchmarks.gpu.step_time.events", lambda *_: 1 / 0)
    assert run.measure(CONFIGS[name], batch, 1, inf, print)["graph_ms"] is None


@pytest.mark.parametrize("keys", [1, 31, 32, 1023, 1024, 1025, 1056, 1088])
def test_rows_of_a_graph_have_every_page_they_look_at(keys):
    executor = FakeExecutor({"global": 90, "local": 90}, 32, 1024, 64)
    tables = [piece.pages for piece in decode_batch(executor, 2, keys).slices]
    first = max(0, keys - 1024)  # position of the first key in the window
    for table in tables:
        assert len(table["global"]) == len(table["local"]) == -(-keys // 32) and min(table["global"]) >= 0
        assert [slot >= 0 for slot in table["local"]] == [32 * i + 31 >= first for i in range(len(table["local"]))]
    for group in ("global", "local"):
        used = [slot for table in tables for slot in table[group] if slot >= 0]
        assert len(used) == len(set(used))


class Core:
    """Answers with what it is told."""

    def __init__(self, tokens: int, reason: FinishReason) -> None:
        self.executor = FakeExecutor({"global": 4, "local": 4}, 4, 8, 64)
        self.waiting, self._tokens, self._reason = [], tokens, reason

    def set_pace(self, *, awaited: bool) -> None:
        assert not awaited

    def add(self, request) -> None:
        self.waiting.append(request.request_key)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting)

    def step(self) -> list[TokenOutput]:
        return [TokenOutput(self.waiting.pop(), 0, (1,) * self._tokens, finish_reason=self._reason, error="bad logits")]


def test_a_run_that_gives_other_tokens_is_no_figure():
    assert BatchRunner(Core(5, FinishReason.LENGTH)).run(3, 8, 5).seconds >= 0
    with pytest.raises(RuntimeError, match="5 tokens were asked for"):
        BatchRunner(Core(4, FinishReason.LENGTH)).run(3, 8, 5)
    with pytest.raises(RuntimeError, match="bad logits"):
        BatchRunner(Core(5, FinishReason.ERROR)).run(3, 8, 5)


def test_engines_without_a_source_can_be_loaded(tmp_path, no_compiler):
    record = gpu_engines.build_bench_engine(CONFIGS["fp8kv"], tmp_path / "e", "sm90")
    assert record["seconds"] > 0 and record["kernels"] == 0
    manifest = open_engine(tmp_path / "e").manifest
    assert (manifest.dtype, manifest.kv_dtype, manifest.targets) == ("fp8", "fp8", ["sm90"])
    assert manifest.dummy_weights and manifest.source == "--dummy-weights --model gemma3-27b"
    tokenizer = Tokenizer.from_dir(tmp_path / "e")
    assert tokenizer.eos_ids == (1,) and tokenizer.decode([200_000]) == ""
    assert "tokenizer.json" in manifest.files


@pytest.fixture
def prebuilt(tmp_path, no_compiler):
    configs = [CONFIGS["bf16"], CONFIGS["270m"]]
    prebuild(configs, tmp_path / "made", "sm90", print)
    return tmp_path / "made"


def test_prebuilt_engines_are_used_and_the_rest_is_built(prebuilt, tmp_path, no_compiler):
    said: list[str] = []
    (tmp_path / "scratch").mkdir()
    engines = Engines("sm90", tmp_path / "scratch", prebuilt, said.append)
    no_compiler.clear()
    assert engines.has(CONFIGS["bf16"]) and not engines.has(CONFIGS["fp8"])
    path, record = engines.engine(CONFIGS["bf16"])
    assert record["prebuilt"] and open_engine(path).manifest.dtype == "bfloat16" and not no_compiler
    path, record = engines.engine(CONFIGS["fp8"])
    assert not record["prebuilt"] and open_engine(path).manifest.dtype == "fp8" and len(no_compiler) == 1
    assert engines.engine(CONFIGS["fp8"]) == (path, None) and engines.has(CONFIGS["fp8"]) and len(no_compiler) == 1
    shape = case_shape(random.choice(CASES))
    assert engines.check_table(shape, "sm90") is not None
    assert engines.check_table(case_shape(CASES[0]), "sm80") is None
    assert Engines("sm90", tmp_path, None, said.append).check_table(shape, "sm90") is None


@pytest.mark.parametrize("how", ["target", "sources", "missing", "broken", "absent"])
def test_prebuilt_engines_that_do_not_fit_are_refused(how, prebuilt, tmp_path, monkeypatch):
    """Kernels and launches change together: an engine of other sources would compute nonsense, or crash."""
    assert read_prebuilt_index(prebuilt, "sm90")[1] == ""
    if how == "sources":
        monkeypatch.setattr(gpu_engines, "source_digest", lambda: "another")
    elif how == "missing":
        (prebuilt / "bf16").rename(prebuilt / "gone")
    elif how == "broken":
        (prebuilt / "built.json").write_text(random.choice(["[]", "{}", "{"]))
    elif how == "absent":
        (prebuilt / "built.json").unlink()
    said: list[str] = []
    engines = Engines("sm89" if how == "target" else "sm90", tmp_path, prebuilt, said.append)
    assert not engines.has(CONFIGS["bf16"]) and len(said) == 1 and "not used" in said[0]


def test_the_digest_is_of_every_source(monkeypatch, tmp_path):
    """It must be the same wherever the sources lie, and another when one of them changes."""
    for folder in ("model", "backends/triton", "plugins/kernels"):
        (tmp_path / folder).mkdir(parents=True)
    names = ["model/spec", "backends/triton/table", "backends/triton/ops", "plugins/aot", "plugins/kernels/k"]
    files = {f"{name}.py": name for name in names}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    monkeypatch.setattr(gpu_engines.spec, "__file__", str(tmp_path / "model/spec.py"))
    monkeypatch.setattr(gpu_engines.triton_table, "__file__", str(tmp_path / "backends/triton/table.py"))
    monkeypatch.setattr(gpu_engines.aot, "__file__", str(tmp_path / "plugins/aot.py"))
    first, seen = source_digest(), set()
    for name in files:
        (tmp_path / name).write_text("changed")
        seen.add(source_digest())
    assert first not in seen and len(seen) == len(files)
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "model" / "gemma3.py").write_text("neither compiled nor launched by an engine of kernels")
    (tmp_path / "plugins").rename(tmp_path / "a_plugins")
    monkeypatch.setattr(gpu_engines.aot, "__file__", str(tmp_path / "a_plugins/aot.py"))
    assert source_digest() == first


def test_short_runs_are_repeated_more_often(tmp_path, no_compiler, monkeypatch):
    config = CONFIGS["270m"]
    run = served(config, tmp_path / "e", 1)
    monkeypatch.setattr(run, "run", lambda *_: time.sleep(0) or Run(0.01, [0.001]))
    assert len(run.measure(config, 1, 3, inf, print)["total_s"]) == 9
    monkeypatch.setattr(run, "run", lambda *_: Run(5.0, [0.05]))
    assert len(run.measure(config, 1, 4, inf, print)["total_s"]) == 4
    assert len(run.measure(config, 1, 4, 15.0, print)["total_s"]) == 2
    assert len(run.measure(config, 1, 4, 0.0, print)["total_s"]) == 1
