"""Plans of an engine directory, loaded into TensorRT and checked against their index.

Knows the files of `backends.tensorrt.build` and TensorRT's engine object; no devices, no memory. Invariant: a
`LoadedPlan` has exactly the inputs and outputs that the index lists, and this version binds exactly those.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import msgspec

from wicore_trt.backends.tensorrt import plan_io
from wicore_trt.backends.tensorrt.api import TRT_TYPES
from wicore_trt.backends.tensorrt.plan_build import BuildLog, make_logger
from wicore_trt.backends.tensorrt.plan_io import INDEX, PHASES, PlanLimits, TensorSpec, plan_file
from wicore_trt.engine.directory import EngineDir
from wicore_trt.engine.manifest import rebuild_engine
from wicore_trt.errors import EngineFormatError, EnvironmentUnfitError


@dataclass(frozen=True, slots=True)
class LoadedPlan:
    """Plan in TensorRT's `engine`; `tensors` are inputs and outputs by name, B, T and R as in `profile`. `digest` names
    the plan's content."""

    phase: str
    engine: Any
    tensors: Mapping[str, TensorSpec]
    profile: Mapping[str, tuple[int, int, int]]
    digest: str

    @property
    def caches(self) -> list[TensorSpec]:
        return [t for t in self.tensors.values() if t.kind == "cache"]


def plan_limits(engine: EngineDir) -> PlanLimits:
    """Read the limits that the plans were built for. Raises EngineFormatError when the manifest lacks them."""
    manifest = engine.manifest
    try:
        return PlanLimits(
            int(manifest.compiled["max_batch"]), int(manifest.compiled["max_chunk"]), manifest.max_context
        )
    except (KeyError, TypeError, ValueError) as error:
        raise _make_damaged(engine, f"engine.json says {manifest.compiled!r} of its plans ({error!r})") from None


def rebuild_plans(engine: EngineDir, *more: str) -> str:
    return rebuild_engine(engine.path, engine.manifest, more)


def read_index(engine: EngineDir) -> dict[str, list[TensorSpec]]:
    """Read inputs and outputs of each phase's plans. Raises EngineFormatError for an index that cannot be read, or that
    does not list what this version binds."""
    try:
        data = engine.read_json(INDEX)["tensors"]
        index = {phase: msgspec.convert(data[phase], list[TensorSpec]) for phase in PHASES}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _make_damaged(engine, f"{INDEX} cannot be read ({error!r})") from None
    spec, limits, dtype = engine.manifest.spec, plan_limits(engine), engine.manifest.base_dtype
    caches = plan_io.cache_tensors(spec, limits, dtype)
    bound = [*plan_io.step_tensors(spec, limits), *caches, *plan_io.output_tensors(spec, caches)]
    for phase, tensors in index.items():
        expected = {t.name: t.fixed(limits.profile(phase)) for t in bound}
        listed = {t.name: t for t in tensors if t.kind != "weight"}
        for name in sorted({*expected, *listed}):
            if expected.get(name) != listed.get(name):
                raise _make_damaged(
                    engine, f"{INDEX}, {phase}: {name} is {listed.get(name)}, and this version has {expected.get(name)}"
                )
    weights = [[t for t in index[phase] if t.kind == "weight"] for phase in PHASES]
    if weights[0] != weights[1]:
        raise _make_damaged(engine, f"{INDEX}: the phases take different weights")
    return index


def load_plans(trt: Any, engine: EngineDir, target: str, runtime: Any = None) -> dict[str, LoadedPlan]:
    """Load the plans of both phases for `target`. Raises EngineFormatError for a plan that differs from the index,
    EnvironmentUnfitError with TensorRT's words for one that it refuses."""
    index, limits, book = read_index(engine), plan_limits(engine), BuildLog()
    runtime = runtime or trt.Runtime(make_logger(trt, book))
    plans = {}
    for phase in PHASES:
        name = plan_file(target, phase)
        loaded = runtime.deserialize_cuda_engine(engine.read(name))
        if loaded is None:
            raise EnvironmentUnfitError(
                f"TensorRT {trt.__version__} does not load {name}: {book.reason()}.", fix=rebuild_plans(engine)
            )
        profile, tensors = limits.profile(phase), {t.name: t for t in index[phase]}
        names = {loaded.get_tensor_name(i) for i in range(loaded.num_io_tensors)}
        problems = [f"it lacks {tensor}" for tensor in sorted({*tensors} - names)]
        problems += [f"it has {tensor}" for tensor in sorted(names - {*tensors})]
        for tensor in sorted(names & {*tensors}):
            found = _list_problems(trt, loaded, tensors[tensor], profile)
            problems += [f"{tensor}: {problem}" for problem in found]
        if problems:
            raise _make_damaged(engine, f"{name} is not as {INDEX} says: {'; '.join(problems[:3])}")
        plans[phase] = LoadedPlan(phase, loaded, tensors, profile, engine.manifest.files[name].blake2b)
    return plans


def _list_problems(trt: Any, engine: Any, tensor: TensorSpec, profile: Mapping[str, tuple[int, int, int]]) -> list[str]:
    """List differences between a tensor of TensorRT's `engine` and `tensor`."""
    name, is_output = tensor.name, tensor.kind == "output"
    shape = tuple(d if isinstance(d, int) else -1 for d in tensor.shape)
    compared = [
        ("mode", engine.get_tensor_mode(name), trt.TensorIOMode.OUTPUT if is_output else trt.TensorIOMode.INPUT),
        ("dtype", engine.get_tensor_dtype(name), getattr(trt.DataType, TRT_TYPES[tensor.dtype])),
        ("shape", tuple(engine.get_tensor_shape(name)), shape),
        ("location", engine.get_tensor_location(name), trt.TensorLocation.DEVICE),
    ]
    if not is_output and -1 in shape:
        bounds = [tuple(bound) for bound in engine.get_tensor_profile_shape(name, 0)]
        compared.append(("profile", bounds, [tensor.bound(profile, which) for which in range(3)]))
    if is_output and hasattr(engine, "get_aliased_input_tensor"):
        aliased = name.removesuffix(plan_io.updated("")) if name != plan_io.LOGITS else None
        compared.append(("alias", engine.get_aliased_input_tensor(name) or None, aliased))
    return [f"its {what} is {got}, expected {want}" for what, got, want in compared if got != want]


def _make_damaged(engine: EngineDir, what: str) -> EngineFormatError:
    return EngineFormatError(f"engine {engine.path}: {what}.", fix=rebuild_plans(engine))
