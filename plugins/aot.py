"""Compiles Triton kernels to cubins, ahead of time and without a GPU; reads and writes cubins as files.

A kernel is a function, its arguments' types, its constants and its launch shape; no kernel is known by name. Importing
loads no Triton; only `compile_kernel` needs it. Invariant: a `CompiledKernel` holds all that a launch needs, so the
machine that runs it needs no Triton.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wicore_trt.errors import ConfigError, EngineFormatError, EnvironmentUnfitError, install_command
from wicore_trt.plugins.dependent import ALONE, ORDINARY, launches_dependents

# Largest dynamic shared memory of one block in bytes (CUDA C++ programming guide, compute capabilities).
SHARED_LIMIT = {"sm80": 166912, "sm86": 101376, "sm89": 101376, "sm90": 232448, "sm100": 232448, "sm120": 101376}
TARGETS = tuple(SHARED_LIMIT)
FORMAT = 1
DEPENDENT = "DEPENDENT"
"""The constant by which a kernel knows its mode of `plugins.dependent`."""

Constant = int | float | bool


@dataclass(frozen=True)
class KernelSpec:
    """Specialisation of a kernel, `function`, which is Triton's or Gluon's. `signature` gives the Triton types of its
    arguments in order: "*fp16", "*i32", "i32", "i64", "fp32", ... It leaves out constants and what has a default.
    Arguments in `aligned` are multiples of 16 (a pointer: bytes; an integer: its value), which vectorises loads; the
    launcher checks it. `dependent` is a mode of `plugins.dependent` and becomes the function's constant DEPENDENT, if
    any. `registers`: the most of a thread, 0: as many as there are."""

    name: str
    function: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Constant]
    aligned: frozenset[str] = frozenset()
    num_warps: int = 4
    num_stages: int = 2
    dependent: int = ORDINARY
    registers: int = 0


@dataclass(frozen=True)
class CompiledKernel:
    """Cubin and how to launch it. `arguments` are (name, Triton type) in the order of the parameters; Triton adds two
    scratch pointers behind them. `symbol` is the function's name in the cubin, `shared_bytes` its dynamic shared
    memory. `dependent`: it may be launched before the kernel in front has ended (`plugins.dependent`)."""

    name: str
    symbol: str
    target: str
    arguments: tuple[tuple[str, str], ...]
    aligned: frozenset[str]
    constants: Mapping[str, Constant]
    num_warps: int
    num_stages: int
    shared_bytes: int
    triton_version: str
    cubin: bytes = field(repr=False)
    dependent: bool = False

    def metadata(self) -> dict[str, Any]:
        facts = {name: value for name, value in vars(self).items() if name != "cubin"}
        facts |= {"arguments": [list(a) for a in self.arguments], "aligned": sorted(self.aligned)}
        return facts | {"constants": dict(self.constants), "format": FORMAT, "cubin_bytes": len(self.cubin)}

    @classmethod
    def from_metadata(cls, data: Mapping[str, Any], cubin: bytes) -> CompiledKernel:
        """Join `metadata` and cubin. Raises EngineFormatError where they do not belong together."""
        try:
            if data["format"] != FORMAT or data["cubin_bytes"] != len(cubin):
                raise ValueError(f"format {data['format']}, {data['cubin_bytes']} bytes expected, {len(cubin)} found")
            facts = {name: value for name, value in data.items() if name not in ("format", "cubin_bytes")}
            facts["arguments"] = tuple((name, type_) for name, type_ in data["arguments"])
            return cls(**{**facts, "aligned": frozenset(data["aligned"]), "cubin": cubin})
        except (KeyError, TypeError, ValueError) as error:
            fix = "Build the engine again."
            raise EngineFormatError(f"A compiled kernel does not fit its description: {error!r}.", fix=fix) from error


def compile_kernel(spec: KernelSpec, target: str) -> CompiledKernel:
    """Compile `spec` for one of TARGETS; takes seconds, less when Triton's own cache has it. Raises ConfigError for
    an unknown target or a kernel that needs more shared memory than the target has, EnvironmentUnfitError without
    Triton."""
    if target not in SHARED_LIMIT:
        raise ConfigError(f"Kernels cannot be compiled for {target!r}.", fix=f"Use one of {', '.join(TARGETS)}.")
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
        from triton.experimental.gluon._runtime import GluonASTSource
    except ImportError as error:
        raise EnvironmentUnfitError("Triton is not installed.", fix=install_command("triton")) from error
    names = spec.function.arg_names
    assert spec.dependent == ORDINARY or launches_dependents(target), f"{spec.name}: {target} launches no dependents"
    assert spec.dependent == ORDINARY or DEPENDENT in names, f"{spec.name} does not wait"
    constants = {p.name: p.default for p in spec.function.params if p.has_default and p.name not in spec.signature}
    constants |= {**spec.constants, **({DEPENDENT: spec.dependent} if DEPENDENT in names else {})}
    assert {*spec.signature, *constants} == {*names}, f"{spec.name}: arguments without a type or a value"
    assert [n for n in names if n in spec.signature] == list(spec.signature), f"{spec.name}: order of arguments"
    source = (GluonASTSource if spec.function.is_gluon() else ASTSource)(
        fn=spec.function,
        signature={n: spec.signature.get(n, "constexpr") for n in names},
        constexprs=constants,
        attrs={(names.index(n),): [["tt.divisibility", 16]] for n in sorted(spec.aligned)},
    )
    # Without fusion of multiplication and addition a value does not depend on what the compiler finds beside it.
    options = {"num_warps": spec.num_warps, "num_stages": spec.num_stages, "enable_fp_fusion": False}
    options |= {"maxnreg": spec.registers} if spec.registers else {}
    with triton.knobs.compilation.scope():
        triton.knobs.compilation.disable_line_info = True  # a tenth of the size
        built = triton.compile(source, target=GPUTarget("cuda", int(target.removeprefix("sm")), 32), options=options)
    meta = built.metadata
    assert meta.num_ctas == 1 and not meta.global_scratch_size and not meta.profile_scratch_size
    assert not meta.launch_cooperative_grid and not meta.launch_pdl
    if meta.shared > SHARED_LIMIT[target]:
        problem = f"Kernel {spec.name} needs {meta.shared} bytes of shared memory; {target} has {SHARED_LIMIT[target]}."
        raise ConfigError(problem, fix="Use smaller blocks or fewer stages.")
    return CompiledKernel(
        name=spec.name, symbol=meta.name, target=target, arguments=tuple(spec.signature.items()),
        aligned=spec.aligned, constants=dict(spec.constants), num_warps=meta.num_warps,
        num_stages=spec.num_stages, shared_bytes=meta.shared, triton_version=triton.__version__,
        cubin=built.asm["cubin"], dependent=spec.dependent not in (ORDINARY, ALONE),
    )  # fmt: skip


def save_kernel(kernel: CompiledKernel, directory: Path) -> None:
    """Write `<name>.cubin` and `<name>.json` into `directory`, which exists."""
    (directory / f"{kernel.name}.cubin").write_bytes(kernel.cubin)
    text = json.dumps(kernel.metadata(), indent=1, sort_keys=True)
    (directory / f"{kernel.name}.json").write_text(text + "\n", encoding="utf-8")


def load_kernel(read: Callable[[str], bytes], name: str) -> CompiledKernel:
    """Load a kernel that `save_kernel` wrote; `read` gives the bytes of a file by its name, which begins with `name`.
    Raises EngineFormatError for files that are missing or do not fit."""
    try:
        data = json.loads(read(f"{name}.json").decode())
        cubin = read(f"{name}.cubin")
    except (OSError, ValueError, RecursionError) as error:
        raise EngineFormatError(f"Kernel {name!r} cannot be read: {error}.", fix="Build the engine again.") from error
    return CompiledKernel.from_metadata(data, cubin)
