"""Kernels that may be launched early read and write nothing of other kernels' before their wait, in PTX and in SASS."""

from __future__ import annotations

import re
import subprocess
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

triton = pytest.importorskip("triton", reason="pip install -e .[triton]")

from ptx import recorded_ptx  # noqa: E402

from wicore_trt.backends.triton.kernel_list import list_kernels  # noqa: E402
from wicore_trt.backends.triton.table import EngineShape  # noqa: E402
from wicore_trt.kv.sizing import builtin_spec  # noqa: E402
from wicore_trt.plugins import aot  # noqa: E402
from wicore_trt.plugins.aot import KernelSpec  # noqa: E402
from wicore_trt.plugins.decode_layout import DecodeConfig, PrefillConfig  # noqa: E402
from wicore_trt.plugins.dependent import ALONE, IN_CHAINS, IN_TURN, ORDINARY, find_mode  # noqa: E402
from wicore_trt.plugins.kernels import step_specs  # noqa: E402
from wicore_trt.plugins.kernels.fast_attention_specs import (  # noqa: E402
    add_splits_spec,
    combine_spec,
    decode_spec,
    prefill_spec,
)
from wicore_trt.plugins.kernels.linear_specs import linear_spec, quantize_parts_spec, quantize_rows_spec  # noqa: E402
from wicore_trt.plugins.kernels.step_specs import NormShape, StepConfig  # noqa: E402
from wicore_trt.plugins.launch import MAP_TYPE  # noqa: E402
from wicore_trt.plugins.layout import PoolShape  # noqa: E402
from wicore_trt.plugins.linear_layout import LinearConfig, LinearShape  # noqa: E402
from wicore_trt.weight_format import BF16, FP8, FP16, Q4_0  # noqa: E402

POOL = PoolShape(2, 16, 2, 64, "fp8")
WIDE = LinearShape(4096, 512, "bfloat16", FP8, "bfloat16", geglu=True)
TILES = LinearShape(64, 256, "bfloat16", Q4_0, "float32")
PLAIN = LinearShape(70, 208, "bfloat16", BF16, "float32")
VECTOR = LinearConfig("vector", 2, 128, unroll=2)
MATRIX = LinearConfig("matrix", 32, 64, 16, num_stages=3)
SPLIT = LinearConfig("matrix", 32, 32, 8, splits=3)
SAMPLING = step_specs.sample_specs(4096, sampled=True, candidates=16).values()
SPECS: list[KernelSpec] = [
    linear_spec(WIDE, VECTOR, "sm90"),
    linear_spec(WIDE, MATRIX, "sm90"),
    linear_spec(PLAIN, SPLIT, "sm90"),
    step_specs.add_norm_spec(NormShape(640, "bfloat16", fp8=True), 4, x_dtype="float32"),
    step_specs.add_norm_spec(NormShape(640, "float16"), 4, x_dtype="bfloat16", gather=True),
    step_specs.add_norm_spec(NormShape(640, "bfloat16"), 4, x_dtype="float32", ranks=2, way="push"),
    step_specs.add_norm_spec(NormShape(640, "bfloat16"), 4, x_dtype="bfloat16", ranks=2),
    step_specs.add_norm_spec(NormShape(640, "bfloat16", fp8=True), 4, x_dtype="bfloat16", ranks=4, way="own"),
    step_specs.meet_spec(2),
    step_specs.gather_spec(2, 4096),
    step_specs.qk_rope_spec(POOL, 4, "float32", "bfloat16", StepConfig(1, 1)),
    decode_spec(POOL, "bfloat16", 4, "sm90", DecodeConfig(1, 32, 4, fused=True)),
    combine_spec(POOL, "bfloat16", DecodeConfig(1, 32, 4, fused=False)),
    prefill_spec(POOL, "bfloat16", 4, "sm90", PrefillConfig(32, 32, 4, splits=3, least=64)),
    prefill_spec(POOL, "bfloat16", 4, "sm90", PrefillConfig(32, 32, 4), segmented=True),
    add_splits_spec(POOL, "bfloat16", 4, PrefillConfig(32, 32, 4, splits=3)),
    quantize_rows_spec(512, "bfloat16", native=True),
    quantize_parts_spec(4096, "bfloat16", native=True),
    linear_spec(TILES, LinearConfig("tiles", 32, 64, 8, 2, 2), "sm90"),
    linear_spec(replace(TILES, k=512), LinearConfig("groups", 128, 128, 8, 2, 4, 2), "sm90"),
    step_specs.order_spec(512, "bfloat16"),
    *(spec for spec in SAMPLING if spec and spec.function.__name__ in IN_CHAINS),
]
EARLY_READS = {
    "split_decode": {"kv_lengths", "tables"},
    "linear_q4": {"w", "w_scale"},
    "linear_q4_groups": {"w", "w_scale"},
    "add_norm": {"post_weight", "next_weight", "peers"},
}
"""By function the arrays that no kernel of a chain writes, which it may read before its wait."""

ACCESS = re.compile(r"^(?:@!?%p\d+\s+)?(ld|st|atom|red|cp|prefetch\w*|discard|applypriority|multimem)\.(\S*)")
SASS_ACCESS = re.compile(r"\b(LDG|LDGSTS|STG|LD\.|ST\.|ATOM|ATOMG|RED|REDG|UBLK|UTMALDG|UTMA|CCTL)")


@dataclass
class Access:
    """An instruction on global memory and the arrays that its operands may come from."""

    text: str
    arrays: set[str]


def accesses_before_wait(ptx: str, arguments: tuple[tuple[str, str], ...]) -> list[Access]:
    """Global accesses before the only wait. AssertionError where the wait may be skipped."""
    body = ptx[ptx.index("\n{") :]
    assert body.count("griddepcontrol.wait;") == 1
    sources: dict[str, set[str]] = {}
    names = list[str]()
    for name, type_ in arguments:  # behind a tensor map come its extents and strides
        names += [name] if type_.startswith("*") else [""]
        if found_map := MAP_TYPE.match(type_):
            names[-1:] = [name] + [""] * 2 * len(found_map["box"].split(","))
    found = []
    for line in body[: body.index("griddepcontrol.wait;")].splitlines():
        text = re.sub(r"//.*", "", line).strip()
        assert not re.search(r"\b(?:bra|brx|ret|exit|call)\b|^\$\w+:", text), f"{text!r} before the wait"
        registers = re.findall(r"%[a-z]+\d+|\bp\b", text)
        origin = set[str]().union(*(sources.get(r, set()) for r in registers))
        parameter = re.search(r"(?:ld\.param|mov\.b64)\S*\s.*_param_(\d+)", text)
        if parameter and int(parameter[1]) < len(names):
            origin |= {names[int(parameter[1])]} - {""}
        access = ACCESS.match(text.removeprefix("@p ")) if not parameter else None
        if access and not access[2].startswith("shared"):
            found.append(Access(text, origin))
        target = re.match(r"(?:@\S+\s+)?\S+\s+(\{[^}]*\}|%\w+|p\b)", text)
        for register in re.findall(r"%[a-z]+\d+|\bp\b", target[1]) if target else ():
            sources[register] = sources.get(register, set()) | origin
    return found


def built(spec: KernelSpec, target: str, monkeypatch: pytest.MonkeyPatch) -> tuple[aot.CompiledKernel, str]:
    """`spec` for `target` and its PTX."""
    with monkeypatch.context() as patch:
        texts = recorded_ptx(patch)
        kernel = aot.compile_kernel(spec, target)
    return kernel, texts[0]


def in_turn(spec: KernelSpec, target: str = "sm90") -> KernelSpec:
    return replace(spec, dependent=find_mode(spec.function.__name__, target))


def list_cases() -> list[Any]:
    """SPECS; all but the first of each function that reads early are marked long, and `make test-targets` has them."""
    cases, others = [], {*EARLY_READS}
    for spec in SPECS:
        name = spec.function.__name__
        cases.append(pytest.param(spec, id=spec.name, marks=[] if name in others else [pytest.mark.long]))
        others.discard(name)
    return cases


@pytest.mark.parametrize("spec", list_cases())
def test_nothing_of_other_kernels_is_touched_before_the_wait(
    spec: KernelSpec, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    kernel, ptx = built(in_turn(spec), "sm90", monkeypatch)
    assert kernel.dependent
    early = accesses_before_wait(ptx, kernel.arguments)
    allowed = EARLY_READS.get(spec.function.__name__, set())
    for access in early:
        assert access.arrays and access.arrays <= allowed, access
        assert re.search(r"\bld\.global|\bcp\.async\.bulk\.tensor\.\dd\.shared::\w+\.global", access.text), access
    assert ptx.count("griddepcontrol.launch_dependents;") == 1
    assert ptx.index("griddepcontrol.launch_dependents;") > ptx.index("griddepcontrol.wait;")
    sass_waits_first(kernel.cubin, tmp_path, len(early))


def test_behind_a_kernel_that_fills_the_gpu_a_linear_is_launched_ordinarily(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = linear_spec(PLAIN, SPLIT, "sm90")
    mode = find_mode(spec.function.__name__, "sm90", crowds=True)
    kernel, ptx = built(replace(spec, dependent=mode), "sm90", monkeypatch)
    assert mode == ALONE and not kernel.dependent and "griddepcontrol.launch_dependents;" in ptx


def test_the_plan_knows_which_linears_lie_behind_such_a_kernel() -> None:
    """o and down, but not where E4M3 rows are quantised in front of them, and not those of one row; and gate and up of
    E4M3 rows."""
    planned = list_kernels(EngineShape(builtin_spec("gemma3-270m"), "bfloat16", FP8, "bfloat16", 16), "sm90")
    alone = {(str(p.role), (p.config or {})["kind"]) for p in planned if p.spec.dependent == ALONE}
    assert alone == {(role, "matrix") for role in ("o", "down", "o.invariant", "down.invariant", "gate_up.x8")}
    assert all(p.spec.name.endswith("_alone") == (p.spec.dependent == ALONE) for p in planned)
    assert {p.spec.dependent for p in planned if str(p.role) in ("qkv", "gate_up", "o.x8", "down.x8")} == {IN_TURN}


def sass_waits_first(cubin: bytes, folder: Path, loads: int) -> None:
    """The assembler has moved nothing before the wait, and no jump leads past it."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not tool.exists():
        pytest.skip("this Triton has no disassembler")
    path = folder / "kernel.cubin"
    path.write_bytes(cubin)
    done = subprocess.run([tool, "-c", path], capture_output=True, text=True, check=True)
    code = done.stdout[done.stdout.index("\n.text.") :]
    assert code.count("ACQBULK") == 1 and code.count("PREEXIT") == 1
    before = code[: code.index("ACQBULK")]
    seen = SASS_ACCESS.findall(before)
    assert {*seen} <= {"LDG", "UTMALDG"}
    assert len(seen) <= loads  # of masks that are never true there is none
    labels = {*re.findall(r"^(\.L_x_\d+):", before, re.MULTILINE)}
    assert {*re.findall(r"`\((\.L_x_\d+)\)", before)} <= labels and "EXIT" not in before.replace("PREEXIT", "")
    assert "LDG" in code or "LDGSTS" in code


def test_every_kernel_of_a_chain_was_looked_at() -> None:
    assert {spec.function.__name__ for spec in SPECS} == {*IN_CHAINS}


@pytest.mark.parametrize("target", ["sm80", "sm89"])
def test_older_gpus_have_none_of_it(target: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert {find_mode(name, target) for name in IN_CHAINS} == {ORDINARY}
    shape = LinearShape(64, 64, "float16", FP16, "float16")
    for spec in (linear_spec(shape, VECTOR, target), SPECS[4]):
        kernel, ptx = built(in_turn(spec, target), target, monkeypatch)
        assert "griddepcontrol" not in ptx and not kernel.dependent
    with pytest.raises(AssertionError, match="no dependents"):
        aot.compile_kernel(in_turn(SPECS[4]), target)


def test_newer_gpus_wait_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    for target, spec in (("sm100", SPECS[4]), ("sm120", SPECS[2])):
        kernel, ptx = built(in_turn(spec, target), target, monkeypatch)
        arrays = [access.arrays for access in accesses_before_wait(ptx, kernel.arguments)]
        assert all(a <= EARLY_READS[spec.function.__name__] for a in arrays)


def test_the_embedding_begins_a_chain() -> None:
    spec = step_specs.embed_norm_spec(NormShape(640, "bfloat16"), 4)
    assert find_mode(spec.function.__name__, "sm90") == ORDINARY
    with pytest.raises(AssertionError, match="does not wait"):
        aot.compile_kernel(replace(spec, dependent=IN_TURN), "sm90")
