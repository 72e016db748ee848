"""Backend triton: engines with kernels for several targets, read back without Triton, and what is refused."""

from __future__ import annotations

import json
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from tiny_source import CONFIG, write_tiny_source

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from wicore_trt.backends.tensorrt.build import TensorRTBackend  # noqa: E402
from wicore_trt.backends.triton import compile as triton_compile  # noqa: E402
from wicore_trt.backends.triton.index import (  # noqa: E402
    INDEX,
    KERNELS,
    load_table,
    read_table,
)
from wicore_trt.backends.triton.kernel_list import list_kernels  # noqa: E402
from wicore_trt.backends.triton.roles import (  # noqa: E402
    DECODE_ORDERED,
    KERNEL,
    KERNEL8,
    LINEARS,
    MM,
    MM16,
    SCALED_MM,
    parse_role,
    step_role,
)  # fmt: skip
from wicore_trt.backends.triton.table import ANY, CROSSOVER, EngineShape  # noqa: E402
from wicore_trt.backends.triton.weights import engine_shape  # noqa: E402
from wicore_trt.cli.main import run_command  # noqa: E402
from wicore_trt.config import load_settings  # noqa: E402
from wicore_trt.core.assemble import make_executor  # noqa: E402
from wicore_trt.engine.build import build_engine  # noqa: E402
from wicore_trt.engine.directory import EngineDir, open_engine  # noqa: E402
from wicore_trt.engine.options import DummyModel  # noqa: E402
from wicore_trt.errors import ConfigError, EngineFormatError, EnvironmentUnfitError  # noqa: E402
from wicore_trt.kv.sizing import builtin_spec  # noqa: E402
from wicore_trt.model.hf_config import read_hf_config  # noqa: E402
from wicore_trt.model.spec import GLOBAL, Gemma3Spec, LayerGroup  # noqa: E402
from wicore_trt.plugins.aot import TARGETS, CompiledKernel, KernelSpec  # noqa: E402
from wicore_trt.weight_format import BF16, FP8, PLAIN, QUANTIZED  # noqa: E402

SIZES = {"hidden_size": 32, "head_dim": 16, "intermediate_size": 48, "num_hidden_layers": 2}


def described(spec: KernelSpec, target: str) -> CompiledKernel:
    """Stands in for the compiler."""
    arguments, code = tuple(spec.signature.items()), f"{target} {spec.name}".encode()
    symbol = spec.function.__name__
    return CompiledKernel(
        spec.name, symbol, target, arguments, spec.aligned, dict(spec.constants), 4, 1, 0, "3.6.0", code
    )


@pytest.fixture
def source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source whose sizes the kernels take; kernels are not really compiled."""
    for name, value in SIZES.items():
        monkeypatch.setitem(CONFIG, name, value)  # type: ignore[arg-type]
    monkeypatch.setattr(triton_compile, "compile_kernel", described)
    monkeypatch.setattr(triton_compile, "count_cores", lambda: 1)
    return write_tiny_source(tmp_path / "source")


def build(source: Path, target: str = "sm80,sm90", **options: Any) -> EngineDir:
    output = source.parent / f"engine-{len(list(source.parent.iterdir()))}"
    return build_engine(source, output, backend="triton", targets=[target], **options)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [("bfloat16", "auto"), ("fp8", "fp8")])
def test_kernels_of_every_target_are_read_back(source: Path, dtype: str, kv_dtype: str) -> None:
    seen: list[tuple[str, int, int]] = []
    engine = build(source, dtype=dtype, kv_dtype=kv_dtype, progress=lambda *a: seen.append(a))
    assert engine.manifest.targets == ["sm80", "sm90"] and engine.manifest.compiled["flavour"] == "triton"
    shape = engine_shape(engine)
    for target in ("sm80", "sm90"):
        table = load_table(engine, shape, target)
        planned = list_kernels(shape, target)
        assert {(e.role, e.bucket, e.kernel.name) for e in table.all_entries()} == {
            (p.role, p.bucket, p.spec.name) for p in planned
        }
        assert {e.kernel.cubin for e in table.all_entries()} == {f"{target} {p.spec.name}".encode() for p in planned}
        assert all(e.config is not None for e in table.all_entries() if e.role.operation in (*LINEARS, "decode"))
        files = {n for n in engine.manifest.files if n.startswith(f"{KERNELS}/{target}/")}
        assert len(files) == 2 * len({e.kernel.name for e in table.all_entries()})
    steps = [(done, total) for phase, done, total in seen if phase == "kernels"]
    assert steps[-1][0] == steps[-1][1] and [d for d, _ in steps] == sorted(d for d, _ in steps)
    assert read_table(engine.read, engine.path, "sm120") is None


def test_a_damaged_kernel_is_found(source: Path) -> None:
    engine = build(source, target="sm90")
    name = next(n for n in engine.manifest.files if n.endswith(".cubin"))
    content = (engine.path / name).read_bytes()
    (engine.path / name).write_bytes(bytes([content[0] ^ 1]) + content[1:])
    with pytest.raises(EngineFormatError, match=r"\.cubin is corrupted"):
        open_engine(engine.path)
    (engine.path / name).write_bytes(b"")

    def unverified(name: str) -> bytes:
        return (engine.path / name).read_bytes()

    with pytest.raises(EngineFormatError, match=r"\.cubin is corrupted"):
        read_table(engine.read, engine.path, "sm90")
    with pytest.raises(EngineFormatError, match="does not fit its description"):
        read_table(unverified, engine.path, "sm90")
    for text in ("{}", "[]", json.dumps({"format": 1, "targets": {}})):
        (engine.path / INDEX).write_text(text)
        with pytest.raises(EngineFormatError, match="Build the engine again"):
            read_table(unverified, engine.path, "sm90")


def test_another_gpu_is_refused_with_the_command_or_compiled_for_with_a_warning(
    source: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = build(source, target="sm90", dtype="fp8")
    shape = engine_shape(engine)
    assert load_table(engine, shape, "sm89").target == "sm89"
    assert "compiled now" in caplog.text and "--target sm90,sm89" in caplog.text
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(EnvironmentUnfitError) as refused:
        load_table(engine, shape, "sm89")
    assert refused.value.fix is not None
    for part in (f"wicore build {source}", "--backend triton", "--dtype fp8", "--target sm90,sm89"):
        assert part in refused.value.fix
    with pytest.raises(EnvironmentUnfitError, match="pages of 8"):
        load_table(engine, engine_shape(engine, page_tokens=8), "sm90")


def test_what_cannot_be_built_is_refused(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("wicore_trt.engine.build.place_weights")  # before any weight is copied
    refused: tuple[tuple[dict[str, Any], str], ...] = (
        ({"target": "sm75"}, "sm75"),
        ({"target": ""}, "needs a target"),
        ({"dtype": "float32"}, "float32"),
        ({"kv_dtype": "float16"}, "kv_dtype"),
        ({"tp_size": 4}, "intermediate_size 12"),
    )
    for options, message in refused:
        with pytest.raises(ConfigError, match=message):
            build(source, **options)
    spec = read_hf_config({**CONFIG, "head_dim": 24})
    with pytest.raises(ConfigError, match="head_dim 24"):
        build(source, dummy=DummyModel("odd", spec))


def test_an_engine_without_weights_says_so(source: Path) -> None:
    spec = read_hf_config(CONFIG)
    engine = build(source, dummy=DummyModel("tiny", spec), dtype="fp8", target="sm90")
    assert engine.manifest.dummy_weights and "dummy weights" in engine.manifest.model_id
    assert not any(n.endswith(".safetensors") for n in engine.manifest.files)
    assert "--dummy-weights --model tiny" in engine.manifest.source and engine.manifest.dtype == "fp8"
    with pytest.raises(ConfigError, match="triton"):
        build_engine(source, source.parent / "x", dummy=DummyModel("tiny", spec))


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_machine_without_a_gpu_is_refused(source: Path) -> None:
    engine = build(source, target="sm90")
    with pytest.raises(EnvironmentUnfitError, match="'triton' runs on an NVIDIA GPU"):
        make_executor(engine, load_settings(None, {"engine": str(engine.path)}))


def test_flags_of_engines_without_weights_go_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given: list[DummyModel] = []

    def record(*_: object, dummy: DummyModel, **__: object) -> None:
        given.append(dummy)
        raise ConfigError("Nothing was built.")

    monkeypatch.setattr("wicore_trt.engine.build.build_engine", record)
    output = str(tmp_path / "engine")
    assert run_command(["build", "--dummy-weights", "--model", "gemma3-27b", "--backend", "triton", output]) == 3
    assert given == [DummyModel("gemma3-27b", builtin_spec("gemma3-27b"))]
    for flags in (["--model", "gemma3-27b"], ["--dummy-weights"], ["--dummy-weights", "--model", "gemma4"]):
        assert run_command(["build", *flags, output]) == 3 and "go together" in capsys.readouterr().err
    assert len(given) == 1


@pytest.mark.parametrize("target", ["sm80", "sm89", "sm90", "sm100", "sm120"])
@pytest.mark.parametrize("dtype", ["bfloat16", "fp8", "q4_0"])
def test_every_model_has_kernels_for_every_number_of_rows(target: str, dtype: str) -> None:
    for model in ("gemma3-270m", "gemma3-27b"):
        shape = EngineShape(builtin_spec(model), "bfloat16", QUANTIZED.get(dtype, BF16), "bfloat16", 32)
        planned = list_kernels(shape, target)
        largest: dict[str, int] = {}
        for p in planned:
            largest[str(p.role)] = max(largest.get(str(p.role), 0), p.bucket)
        for role in LINEARS:
            assert (
                largest[role] >= min(shape.most_kernel_rows(target, role), 128) and largest[f"{role}.invariant"] == ANY
            )
        others = {r: b for r, b in largest.items() if r.split(".")[0] not in LINEARS}
        grouped = (model, dtype, target) == ("gemma3-27b", "q4_0", "sm90")  # linears by warp groups, of 9 to 32 rows
        assert others.pop(str(DECODE_ORDERED), 0) == (32 if grouped else 0)
        assert {*others.values()} == {ANY}
        assert ("add_norm.fp8" in others) == (dtype == "fp8" and target != "sm80")


def test_roles_keep_the_spelling_of_engines_built_before() -> None:
    shapes = [EngineShape(builtin_spec("gemma3-27b"), "bfloat16", weights, "bfloat16", 32) for weights in (BF16, FP8)]
    listed = {str(p.role): p.role for shape in shapes for p in list_kernels(shape, "sm90")}
    assert all(parse_role(text) == role for text, role in listed.items())
    assert {*listed} >= {"qkv", "qkv.x8", "head.invariant", "add_norm", "add_norm.x8", "add_norm.r16", "final_norm.fp8"}
    assert {*listed} >= {"embed_norm.fp8", "scan", "scan.sampled", "wide", "prefill.segments", "prefill.splits"}
    assert step_role("embed_norm", KERNEL8) == listed["embed_norm.fp8"]
    assert step_role("qk_rope", KERNEL8) == listed["qk_rope"]


def test_products_by_number_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = builtin_spec("gemma3-270m")
    wide, fp8 = EngineShape(spec, "bfloat16", BF16, "bfloat16", 32), EngineShape(spec, "bfloat16", FP8, "fp8", 32)
    assert [wide.choose_product("sm89", "qkv", n) for n in (16, 17)] == [KERNEL, MM16]
    half = replace(wide, dtype="float16")
    assert [half.choose_product("sm89", "qkv", 17), wide.choose_product("sm89", "head", 17)] == [MM, MM], (
        "may overflow; logits"
    )
    assert [fp8.choose_product("sm89", "qkv", n) for n in (64, 65)] == [KERNEL, SCALED_MM]
    assert [fp8.choose_product("sm89", "head", n) for n in (16, 17)] == [KERNEL, MM]
    monkeypatch.setitem(CROSSOVER, "sm90", {"16-bit": 24, "fp8": 8, "fp8 rows": 32})
    assert [fp8.choose_product("sm90", "qkv", n) for n in (8, 9, 32, 33)] == [KERNEL, KERNEL8, KERNEL8, SCALED_MM]
    assert [wide.choose_product("sm90", "qkv", n) for n in (24, 25)] == [KERNEL, MM16]
    half = EngineShape(spec, "float16", PLAIN["float16"], "float16", 32)
    assert not any(".r16" in str(p.role) for p in list_kernels(half, "sm90"))
    assert fp8.choose_product("sm80", "down", 4096) == KERNEL


def test_groups_of_layers_must_be_alike() -> None:
    """All kernels are of one shape, so models whose global layers have another head size or other KV heads are
    refused, by the TensorRT backend as well, whose plans are tested with one shape alone."""

    class UnlikeSpec(Gemma3Spec):
        changes: ClassVar[dict[str, int]] = {}

        def layer_group(self, name: str) -> LayerGroup:
            group = super().layer_group(name)
            return replace(group, **self.changes) if name == GLOBAL else group  # type: ignore[arg-type]

    plain = builtin_spec("gemma3-270m")
    spec = UnlikeSpec(**{f.name: getattr(plain, f.name) for f in fields(plain)})
    checkpoint: Any = SimpleNamespace(spec=spec, dtype="bfloat16", weights=BF16, tp_size=1)
    options: Any = SimpleNamespace(kv_dtype_of=lambda *_, **__: "bfloat16", targets=("sm89",))

    def build() -> None:
        TensorRTBackend().check(checkpoint, options)

    EngineShape(spec, "bfloat16", BF16, "bfloat16", 32)
    build()
    for changes in ({"head_dim": 128}, {"num_kv_heads": 2}, {"num_heads": 8}):
        UnlikeSpec.changes = changes
        with pytest.raises(ConfigError, match="'tensorrt' needs global and local layers of one head size"):
            build()
        with pytest.raises(ConfigError, match="'triton' needs global and local layers of one head size"):
            EngineShape(spec, "bfloat16", BF16, "bfloat16", 32)


def build_dummy(path: Path, target: str, model: str, dtype: str, kv_dtype: str, ranks: int) -> set[str]:
    """Compile the kernels of an engine without weights; return their names."""
    given = {"dtype": dtype, "kv_dtype": kv_dtype, "tp_size": ranks, "dummy": DummyModel(model, builtin_spec(model))}
    engine = build_engine("none", path / "engine", backend="triton", targets=[target], **given)  # type: ignore[arg-type]
    table = read_table(engine.read, engine.path, target)
    assert table is not None
    return {entry.kernel.name for entry in table.all_entries()}


@pytest.mark.long
@pytest.mark.parametrize("target", [t for t in TARGETS if t != "sm86"])
@pytest.mark.parametrize(
    ("model", "dtype", "kv_dtype", "ranks"),
    [
        ("gemma3-27b", "fp8", "fp8", 1),
        ("gemma3-27b", "float16", "auto", 2),
        ("gemma3-27b", "q4_0", "fp8", 1),
        ("gemma3-270m", "bfloat16", "auto", 1),
    ],
)
def test_all_kernels_compile(model: str, dtype: str, kv_dtype: str, ranks: int, target: str, tmp_path: Path) -> None:
    assert len(build_dummy(tmp_path, target, model, dtype, kv_dtype, ranks)) > 25


@pytest.mark.long
@pytest.mark.parametrize("target", [t for t in TARGETS if t != "sm86"])
@pytest.mark.parametrize(
    ("model", "dtype", "kv_dtype", "ranks"),
    [
        ("gemma3-27b", "fp8", "fp8", 2),
        ("gemma3-27b", "q4_0", "fp8", 4),
    ],
)
def test_kernels_of_several_ranks_compile(
    model: str, dtype: str, kv_dtype: str, ranks: int, target: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Exchanges and the norms in which ranks sum; others differ from one rank's by sizes alone."""
    monkeypatch.setattr(
        triton_compile, "list_kernels", lambda *of: [p for p in list_kernels(*of) if "RANKS" in p.spec.constants]
    )
    names = build_dummy(tmp_path, target, model, dtype, kv_dtype, ranks)
    kinds = ("meet", "gather", "push", "pull", "collect", "own")[: 6 if ranks > 2 else 4]
    assert all(any(f"{kind}{ranks}_" in name for name in names) for kind in kinds)
