"""Plans with the attention plugin: transformers' logits, evaluated on the CPU; what is built, and what is refused."""

from __future__ import annotations

import random
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from parity.paged import relative_error
from parity.tiny import cast, tiny_model
from plan_driver import PlanDriver, trt
from plugin_networks import PluginNetwork, evaluate_plugins
from test_plan_parity import BOUNDS, LIMITS, compare
from tiny_source import write_tiny_tokenizer

from wicore_trt.backends.tensorrt import build as backend
from wicore_trt.backends.tensorrt import plan_build
from wicore_trt.backends.tensorrt.api import FULL, TensorRT, find_tensorrt
from wicore_trt.backends.tensorrt.plan import rebuild_plans
from wicore_trt.backends.tensorrt.plan_build import build_plan
from wicore_trt.backends.tensorrt.plan_io import PHASES, PlanRequest
from wicore_trt.cli.main import run_command
from wicore_trt.engine.build import build_engine
from wicore_trt.errors import ConfigError, EnvironmentUnfitError

TWO_LAYERS = {"head_dim": 16, "num_hidden_layers": 2, "sliding_window_pattern": 2, "sliding_window": 8}


def kinds(driver: PlanDriver) -> set[str]:
    return {step.kind for phase in PHASES for step in driver.evaluators[phase]._steps}


def test_networks_with_the_plugin_reproduce_transformers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prefill and decode, an idle slot between two, both windows, and a local cache that slides."""
    evaluate_plugins(monkeypatch)
    model, rng = tiny_model(1, **TWO_LAYERS), random.Random(1)
    driver = PlanDriver(model.spec, model.tensors, tmp_path, LIMITS, dtype="float32", attention="plugin")
    assert "PLUGIN_V3" in kinds(driver) and not kinds(driver) & {"ATTENTION_INPUT", "KVCACHE_UPDATE"}
    long, short = ([rng.randrange(model.spec.vocab_size) for _ in range(n)] for n in (73, 7))
    a, idle, b = (driver.new_slot() for _ in range(3))
    found = [(long[:24], driver.prefill(a, long[:24])), (short[:6], driver.prefill(b, short[:6]))]
    both = driver.decode([a, idle, b], [long[24], None, short[6]])
    found += [(long[:25], both[0]), (short, both[1])]
    found += [(long[: n + 24], driver.prefill(a, long[n : n + 24])) for n in (25, 49)]
    assert a.base["local"] > 0
    for tokens, logits in found:
        assert relative_error(logits, model.hf_logits(tokens)[-1]) < BOUNDS["float32"]


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "seed"), [("float32", 0), ("float32", 1), ("float16", 2), ("bfloat16", 3)])
def test_random_schedules(seed: int, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    evaluate_plugins(monkeypatch)
    model = tiny_model(seed, head_dim=16)
    tensors = cast(model.spec, model.tensors, getattr(torch, dtype))
    driver = PlanDriver(model.spec, tensors, tmp_path, LIMITS, dtype=dtype, attention="plugin")
    assert compare(model, driver, seed)[0] < BOUNDS[dtype]


class Config:
    """A builder's config, without the timing cache that RTX does not have."""

    def __init__(self, config: Any) -> None:
        self._config = config

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def create_timing_cache(self, data: bytes) -> Any:
        return None

    def set_timing_cache(self, cache: Any, ignore_mismatch: bool) -> None:
        return None


class RecordingBuilder:
    """A builder that takes plugins and ends where TensorRT would begin to compile."""

    made: list[Any] = []

    def __init__(self, logger: Any) -> None:
        self._builder = trt.Builder(logger)
        RecordingBuilder.made.append(self)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._builder, name)

    def create_builder_config(self) -> Config:
        return Config(self._builder.create_builder_config())

    def create_network(self, flags: int) -> PluginNetwork:
        return PluginNetwork(self._builder.create_network(flags))

    def build_serialized_network(self, network: PluginNetwork, config: Any) -> bytes:
        self.network, self.aliased = network, config.get_preview_feature(trt.PreviewFeature.ALIASED_PLUGIN_IO_10_03)
        return b"plan"


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> TensorRT:
    """What passes for a full TensorRT; the kernels of plugins are not compiled."""
    evaluate_plugins(monkeypatch)
    module = type(sys)(trt.__name__)
    takes_plugins = type("INetworkDefinition", (), {"add_plugin_v3": None})
    module.__dict__.update(vars(trt) | {"Builder": RecordingBuilder, "INetworkDefinition": takes_plugins})
    module.__dict__["__version__"] = "10.15.0"
    monkeypatch.setattr(RecordingBuilder, "made", [])
    return TensorRT(module, FULL, "10.15.0", {"sm89": None})


def test_a_build_puts_the_plugin_s_layers_into_the_plan(
    full: TensorRT, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Through `build_engine`: the setting reaches the plans and the manifest, and rebuilding says it again."""
    model = tiny_model(22, vocab_size=256, **TWO_LAYERS)
    model.hf.save_pretrained(tmp_path / "hf")
    write_tiny_tokenizer(tmp_path / "hf")
    compiled: list[str] = []
    compile_kernel = plan_build.compile_kernel

    def compile_for(spec: Any, target: str) -> Any:
        compiled.append(target)
        return compile_kernel(spec, target)

    def here(api: TensorRT, requests: list[PlanRequest], directory: Path, progress: Any) -> list[Any]:
        built = []
        for request in requests:
            travelled = msgspec.json.decode(
                msgspec.json.encode(request), type=PlanRequest
            )  # as it goes to the process that builds
            built.append(build_plan(api, travelled))
            (directory / backend.plan_file(request.target, request.phase)).write_bytes(built[-1].data)
        return built

    monkeypatch.setattr(plan_build, "compile_kernel", compile_for)
    monkeypatch.setattr(backend, "find_tensorrt", lambda: full)
    monkeypatch.setattr(backend, "build_plans", here)
    engine = build_engine(
        tmp_path / "hf", tmp_path / "engine", backend="tensorrt", dtype="bfloat16", max_context=128, attention="plugin"
    )
    assert engine.manifest.compiled["attention"] == "plugin" and compiled == ["sm89"] * 4
    assert "--attention plugin" in rebuild_plans(engine)
    for builder in RecordingBuilder.made:
        assert builder.aliased and len(builder.network.layers) == 2
        for number, layer in enumerate(builder.network.layers):
            c = layer.plugin.config
            local = model.spec.layer_groups[number] == "local"
            assert (c.window, c.softmax_scale, c.dtype) == (model.spec.sliding_window * local, 1.0, "bfloat16")
            assert layer.name.startswith(f"layers.{number}.attention")
    again = full.module.get_plugin_registry().get_creator("WicoreCacheAttention", "1", "wicore")
    assert again is not None, "a plan could not be loaded"


def test_rtx_refuses_it_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if find_tensorrt().flavour == FULL:
        pytest.skip("full TensorRT takes plugins")
    tiny_model(22, vocab_size=256, **TWO_LAYERS).hf.save_pretrained(tmp_path / "hf")
    write_tiny_tokenizer(tmp_path / "hf")
    arguments = ["build", str(tmp_path / "hf"), str(tmp_path / "engine"), "--backend", "tensorrt", "--target", "sm89"]
    assert run_command([*arguments, "--attention", "plugin"]) == 4
    [line] = [line for line in capsys.readouterr().err.splitlines() if "error" in line]
    assert "has networks without plugins" in line and not (tmp_path / "engine").exists()


def test_other_backends_and_heads_are_refused(tmp_path: Path, full: TensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="only backend 'tensorrt'"):
        build_engine(tmp_path / "hf", tmp_path / "engine", attention="plugin")
    with pytest.raises(ConfigError, match="'flash' is unknown"):
        build_engine(tmp_path / "hf", tmp_path / "engine", backend="tensorrt", attention="flash")
    spec = tiny_model(22, **TWO_LAYERS).spec
    with pytest.raises(ConfigError, match="head_dim .* not 24"):
        backend.check_plugin_heads(replace(spec, head_dim=24))
    monkeypatch.setitem(sys.modules, "wicore_trt.plugins.kernels.specs", None)
    monkeypatch.delattr("wicore_trt.plugins.kernels.specs", raising=False)
    request = PlanRequest(spec, LIMITS, (), "float32", "float32", 1, "sm89", "decode", "plugin")
    with pytest.raises(EnvironmentUnfitError, match="Triton"):
        plan_build.make_network(full.module, full.module.Builder(full.module.Logger()), request)


def test_the_page_table_counts_as_the_plugin_wants(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With several KV heads and pages to a slot: place p of slot b is b * kv_heads * pages + p."""
    evaluate_plugins(monkeypatch)
    model = tiny_model(6, num_attention_heads=4, num_key_value_heads=2, **TWO_LAYERS)
    driver = PlanDriver(model.spec, model.tensors, tmp_path, LIMITS, dtype="float32", attention="plugin")
    seen: list[Any] = []
    monkeypatch.setattr("plugin_networks.enqueue", lambda plugin, tensors: seen.append(tensors) or [
        torch.zeros_like(tensors[0]), tensors[3], tensors[4]
    ])  # fmt: skip
    driver.decode([driver.new_slot() for _ in range(3)], [5, None, 6])
    table, entries, slots, bounds, first = (t.tolist() for t in seen[1][5:])  # of the global layer: 192 entries
    assert table == [[0, 1, 2], [6, 7, 8], [12, 13, 14]] and slots == [0, 1, 2] and bounds == [0, 1, 2, 3]
    assert entries == first == [0, LIMITS.entries(model.spec, "global") - 1, 0]
