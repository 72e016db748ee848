"""`wicore build --backend tensorrt`: real plans from tiny sources, what they contain, and what is refused."""

from __future__ import annotations

import json
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from tiny_source import CONFIG, write_tiny_source

from wicore_trt.backends.tensorrt import api
from wicore_trt.backends.tensorrt import build as backend
from wicore_trt.backends.tensorrt.api import find_tensorrt
from wicore_trt.backends.tensorrt.build import plan_requests
from wicore_trt.backends.tensorrt.plan_build import BuildLog, PlanRequest
from wicore_trt.backends.tensorrt.plan_io import INDEX, PHASES, TensorSpec
from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile
from wicore_trt.cli.main import run_command
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import open_engine
from wicore_trt.engine.options import BuildOptions
from wicore_trt.errors import ConfigError, EnvironmentUnfitError
from wicore_trt.progress import ignore_progress

trt: Any = pytest.importorskip("tensorrt_rtx_bindings")
MakeSource = Callable[..., Path]


@dataclass(frozen=True)
class Built:
    """An engine in bfloat16 for sm89, and how its plans' progress was told."""

    source: Path
    engine: Path
    index: dict[str, Any]
    progress: list[tuple[int, int]]


@pytest.fixture(autouse=True, scope="module")
def two_layers() -> Iterator[None]:
    """One of each kind: twice the layers take twice the time to compile and show nothing else."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(CONFIG, "num_hidden_layers", 2)  # type: ignore[arg-type]
        yield


@pytest.fixture(scope="module")
def built(two_layers: None, tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Made once; tests only look at it."""
    directory, seen = tmp_path_factory.mktemp("built"), []

    def report(phase: str, done: int, total: int) -> None:
        if phase == "plans":
            seen.append((done, total))

    source = write_tiny_source(directory / "source")
    index = build(source, directory / "engine", dtype="bfloat16", progress=report)
    return Built(source, directory / "engine", index, seen)


def build(source: Path, output: Path, target: str = "sm89", **options: Any) -> dict[str, Any]:
    """The plan index of a new engine."""
    build_engine(source, output, backend="tensorrt", targets=(target,), max_batch=2, max_chunk=16, **options)
    return dict(json.loads((output / INDEX).read_text()))


@pytest.mark.long
def test_several_targets_in_one_go(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """One set of weights, a plan for each target and phase; `inspect` shows layers, precisions and memory."""
    source, output = write_tiny_source(tmp_path / "source"), tmp_path / "engine"
    flags = ["--backend", "tensorrt", "--target", "sm80,sm89", "--target", "sm120", "--max-batch", "3"]
    assert run_command(["build", str(source), str(output), *flags]) == 0
    assert "plans ..." in capsys.readouterr().err
    manifest = open_engine(output).manifest
    assert manifest.targets == ["sm80", "sm89", "sm120"] and manifest.backend == "tensorrt"
    assert manifest.compiled == {
        "flavour": "tensorrt-rtx",
        "version": find_tensorrt().version,
        "max_batch": 3,
        "max_chunk": 128,  # the model's longest sequence
    }
    plans = [f"plans/{target}.{phase}.plan" for target in manifest.targets for phase in PHASES]
    assert {*plans, INDEX, "rank0.safetensors"} <= set(manifest.files)
    assert all((output / name).stat().st_size > 10_000 for name in plans)
    assert run_command(["inspect", str(output), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)["compiled"]
    assert [plan["file"] for plan in report["plans"]] == sorted(plans)
    for plan in report["plans"]:
        assert sum(plan["kernels"].values()) > manifest.spec.num_layers, "TensorRT says which kernels it chose"
        assert plan["precisions"]["bfloat16"] > 0 and plan["activation_bytes"] > 0 and plan["network_layers"] > 50
    assert report["memory"]["weights"] == sum(
        2 * t.shape[0] * t.shape[1] if len(t.shape) == 2 else 4 * t.shape[0]
        for t in SafetensorsFile(output / "rank0.safetensors").tensors.values()
    )
    assert run_command(["inspect", str(output)]) == 0
    out = capsys.readouterr().out
    assert "plans/sm89.decode.plan" in out and "KV of one slot" in out


@pytest.mark.parametrize(
    "dtype",
    ["bfloat16", *(pytest.param(dtype, marks=pytest.mark.long) for dtype in ("float32", "float16", "fp8"))],
)
def test_every_dtype(dtype: str, built: Built, make_source: MakeSource, tmp_path: Path) -> None:
    """Weights are inputs of exactly the file's tensors, and no plan transposes one in every step."""
    index, engine = built.index, built.engine
    if dtype != "bfloat16":
        engine = tmp_path / "engine"
        index = build(make_source(), engine, dtype=dtype)
    file = SafetensorsFile(engine / "rank0.safetensors").tensors
    for phase in PHASES:
        tensors = msgspec.convert(index["tensors"][phase], list[TensorSpec])
        assert {part for t in tensors if t.kind == "weight" for part in t.parts} == set(file)
        assert tensors[0].shape == {"prefill": (1, "T"), "decode": ("B", 1)}[phase]
    for plan in index["plans"].values():
        assert plan["rearranged_weights"] == []
        wanted = {"fp8": "fp8"}.get(dtype, dtype)
        assert plan["precisions"][wanted] > 0


@pytest.mark.long
def test_an_untied_head_and_fp8_pages(make_source: MakeSource, tmp_path: Path) -> None:
    index = build(make_source(tied=False), tmp_path / "engine", dtype="float16", kv_dtype="fp8")
    head = next(t for t in index["tensors"]["decode"] if t["name"] == "lm_head.weight")
    assert head["parts"] == ["lm_head.weight"]


@pytest.mark.long
def test_two_builds_differ_in_nothing_that_matters(built: Built, tmp_path: Path) -> None:
    again = build(built.source, tmp_path / "two", dtype="bfloat16")
    assert built.index == again, "inputs, outputs, layers, kernels, memory"
    sizes = [[(engine / plan).stat().st_size for plan in again["plans"]] for engine in (built.engine, tmp_path / "two")]
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize(
    ("targets", "options", "error"),
    [
        ((), {}, "needs a target.*sm75.*sm121"),
        (("sm90",), {}, "TensorRT-RTX does not run on data-centre Hopper"),
        (("h100",), {}, "builds for sm75"),
        (("sm75",), {"dtype": "bfloat16"}, "no bfloat16 arithmetic; it begins with sm80"),
        (("sm75",), {}, "no bfloat16 arithmetic; it begins with sm80"),
        (("sm89", "sm80"), {"dtype": "fp8"}, "target 'sm80' has no fp8 arithmetic"),
        (("sm80",), {"kv_dtype": "fp8"}, "no fp8 arithmetic"),
        (("sm89",), {"dtype": "bfloat16", "kv_dtype": "float16"}, "Use --kv-dtype bfloat16 or fp8"),
        (("sm89",), {"tp_size": 2}, "runs one rank, not 2"),
        (("sm89",), {"max_batch": 0}, "max_batch must be positive"),
    ],
)
def test_what_cannot_be_built_is_refused(
    targets: tuple[str, ...],
    options: dict[str, Any],
    error: str,
    make_source: MakeSource,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = make_source()
    if "max_batch" not in options:  # before any weight is copied
        monkeypatch.delattr("wicore_trt.engine.build.place_weights")
    with pytest.raises(ConfigError, match=error):
        build_engine(source, tmp_path / "engine", backend="tensorrt", targets=targets, **options)
    assert [p.name for p in tmp_path.iterdir()] == ["source"]


def test_without_tensorrt_it_says_what_to_install(
    make_source: MakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "tensorrt_rtx_bindings", None)
    with pytest.raises(EnvironmentUnfitError, match=r"pip install -e '\.\[tensorrt\]'"):
        build(make_source(), tmp_path / "engine")


@pytest.mark.parametrize(
    ("version", "gpu", "found"),
    [
        ("10.15.1", (9, 0), "tensorrt"),
        ("10.15.1", None, "tensorrt-rtx"),
        ("10.14.0", (9, 0), "tensorrt-rtx"),
        (None, (9, 0), "tensorrt-rtx"),
    ],
)
def test_full_tensorrt_is_taken_where_it_and_a_gpu_are(
    version: str | None, gpu: tuple[int, int] | None, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the GPU is asked for only beside it: that takes PyTorch, which every plan's process would load."""
    asked: list[None] = []
    monkeypatch.setattr(api, "_gpu_capability", lambda: [gpu, asked.append(None)][0])
    monkeypatch.setattr(api, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "tensorrt", raising=False)
    if version:
        monkeypatch.setitem(sys.modules, "tensorrt", SimpleNamespace(__version__=version, Builder=object))  # type: ignore[arg-type]
    here = find_tensorrt()
    assert here.flavour == found and len(asked) == (1 if version else 0)
    assert list(here.targets) == ["sm90"] if found == "tensorrt" else {"sm75", "sm120"} < {*here.targets}


def test_a_plan_that_tensorrt_refuses_carries_its_reason(
    make_source: MakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("wicore_trt.backends.tensorrt.build.OLDEST_SM", dict.fromkeys(("fp8", "bfloat16"), 75))
    with pytest.raises(EnvironmentUnfitError, match="could not build .* for sm80.*fp8_e4m3"):
        build(make_source(), tmp_path / "engine", "sm80", dtype="fp8")
    assert not (tmp_path / "engine").exists()


def test_progress_grows_to_the_end(built: Built) -> None:
    assert built.progress == [(0, 2), (1, 2), (2, 2)]


def test_a_cancelled_build_ends(make_source: MakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C ends the workers; nothing is left behind."""

    def interrupt(phase: str, done: int, total: int) -> None:
        if phase == "plans":
            raise KeyboardInterrupt

    with pytest.raises((KeyboardInterrupt, EnvironmentUnfitError)):
        build(make_source(), tmp_path / "engine", progress=interrupt)
    assert not (tmp_path / "engine").exists()


def test_a_worker_that_dies_is_an_error(
    make_source: MakeSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "sitecustomize.py").write_text("import os, sys\nprint('out of luck')\nsys.stdout.flush()\nos._exit(9)")
    with pytest.raises(EnvironmentUnfitError, match="ended with exit code 9: out of luck"):
        build(make_source(), tmp_path / "engine")


def test_log_lines() -> None:
    book = BuildLog()
    weight = "Name: transformer.layers.1.attention.qkv.weight, Dimensions: [1536,640], Datatype: FP8"
    out = "Constants: [], Outputs: [ { Name: x, Dimensions: [640,1536], Datatype: FP8 }], TacticName: t"
    book.line("VERBOSE", f"Name: __myl_Tran_myl0_33, LayerType: kgen, Inputs: [ {{ {weight} }}], {out}")
    book.line("VERBOSE", "Name: _gemv_mha_v1_myl1_5, LayerType: kgen, Inputs: [], Outputs: [ { Datatype: BFloat16 }]")
    book.line("INFO", "Total Activation Memory: 1234 bytes")
    book.line("ERROR", "one")
    book.line("ERROR", "one")
    assert book.kernels == {"kgen": 1, "attention": 1} and book.precisions == {"fp8": 1, "bfloat16": 1}
    assert book.rearranged == {"transformer.layers.1.attention.qkv.weight"}
    assert book.activation_bytes == 1234 and book.reason() == "one"


def test_plans_come_in_the_order_of_their_requests(
    built: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever ends first: of the two that are built at once the later one does."""
    checkpoint = convert(built.source, tmp_path / "checkpoint", dtype="bfloat16")
    options = BuildOptions("tensorrt", "auto", "auto", 1, 32, ("sm120", "sm80"), 64, 2, 16, None)
    requests = plan_requests(checkpoint, checkpoint.path, options)
    assert [(r.target, r.phase) for r in requests] == [(t, p) for t in ("sm120", "sm80") for p in PHASES]
    ended = {file: threading.Event() for file in (f"{r.target}.{r.phase}.plan" for r in requests)}
    order: list[str] = []

    def finish(worker: None, request: PlanRequest, plan: Path) -> str:
        file = plan.name
        if request.phase == PHASES[0]:
            assert ended[f"{request.target}.{PHASES[1]}.plan"].wait(60)
        order.append(file)
        ended[file].set()
        return file

    monkeypatch.setattr(backend, "start", lambda: None)
    monkeypatch.setattr(backend, "finish", finish)
    monkeypatch.setattr(backend, "count_cores", lambda: 2)
    assert backend.build_plans(requests, tmp_path, ignore_progress) == list(ended) != order
