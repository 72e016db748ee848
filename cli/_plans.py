"""Report of `wicore inspect` on a compiled engine: its plans, the memory they need, their inputs and outputs.

Reads `plans/plans.json` without TensorRT. Invariant: every input and output of a plan is in a row.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable
from math import prod
from typing import TYPE_CHECKING, Any

from wicore_trt.arithmetic import ITEM_BYTES

if TYPE_CHECKING:
    from wicore_trt.backends.tensorrt.plan_io import TensorSpec
    from wicore_trt.engine.directory import EngineDir

_BYTES = ITEM_BYTES | {"int32": 4}


def plans_report(engine: EngineDir) -> dict[str, Any] | None:
    """Report plans, memory and tensors as plain data; None without plans. Raises EngineFormatError for a bad index."""
    import msgspec

    from wicore_trt.backends.tensorrt.plan_io import INDEX, TensorSpec
    from wicore_trt.errors import EngineFormatError

    if INDEX not in engine.manifest.files:
        return None
    try:
        index = engine.read_json(INDEX)
        tensors = msgspec.convert(index["tensors"], dict[str, list[TensorSpec]])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineFormatError(
            f"{engine.path / INDEX} cannot be read: {error}.", fix="Build the engine again."
        ) from error
    files = engine.manifest.files
    plans = [{"file": name, "bytes": files[name].bytes, **facts} for name, facts in sorted(index["plans"].items())]
    decode = tensors["decode"]
    weights: dict[tuple[str, ...], int] = {
        t.parts: _count_bytes(t) for t in decode if t.kind == "weight"
    }  # a tied head once
    memory = {
        "weights": sum(weights.values()),
        "rope tables": sum(_count_bytes(t) for t in decode if t.kind == "table"),
        "KV of one slot": sum(_count_bytes(t) for t in decode if t.kind == "cache"),
        "slots at most": engine.manifest.compiled["max_batch"],
        "activations": max(plan["activation_bytes"] for plan in plans),
    }
    return {
        "plans": plans,
        "memory": memory,
        "tensors": {phase: _group_tensors(given) for phase, given in tensors.items()},
    }


def print_plans(report: dict[str, Any]) -> None:
    from wicore_trt.cli._ui import human_bytes, print_table

    rows = [
        (
            plan["file"],
            human_bytes(plan["bytes"]),
            plan["network_layers"],
            _format_counts(plan["kernels"]),
            _format_counts(plan["precisions"]),
            human_bytes(plan["activation_bytes"]),
        )
        for plan in report["plans"]
    ]
    print_table("plans", ("file", "size", "layers", "kernels", "written as", "activations"), rows)
    memory = [(name, str(v) if name == "slots at most" else human_bytes(v)) for name, v in report["memory"].items()]
    print_table("device memory", ("what", "size"), memory)
    columns = ("name", "count", "kind", "dtype", "shape")
    for phase, tensors in report["tensors"].items():
        cells = [(*(t[key] for key in columns[:-1]), f"[{', '.join(map(str, t['shape']))}]") for t in tensors]
        print_table(f"inputs and outputs of {phase}", columns, cells)
    for plan in report["plans"]:
        if plan["rearranged_weights"]:
            print(f"{plan['file']} transposes in every step: {', '.join(plan['rearranged_weights'])}")


def _group_tensors(tensors: Iterable[TensorSpec]) -> list[dict[str, Any]]:
    """Make a row per name without its layer number, kind, dtype and shape."""
    rows = Counter((re.sub(r"\.\d+(?=\.|$)", ".*", t.name), t.kind, t.dtype, t.shape) for t in tensors)
    return [
        {"name": name, "count": count, "kind": kind, "dtype": dtype, "shape": list(shape)}
        for (name, kind, dtype, shape), count in rows.items()
    ]


def _count_bytes(tensor: TensorSpec) -> int:
    return prod(d for d in tensor.shape if isinstance(d, int)) * _BYTES[tensor.dtype]


def _format_counts(counts: dict[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(counts.items(), key=lambda item: -item[1])) or "-"
