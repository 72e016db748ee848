"""Builds a TensorRT plan in a process of its own: `python -m wicore_trt.backends.tensorrt.plan_build`.

Knows the TensorRT API and no engine directories. TensorRT keeps state per process: of two builds at once one loses its
kernel listing, and a compiler crash ends the caller. Protocol: one JSON object on stdin (`job`). A line on stdout that
begins with MARK holds {"tensors", "facts"} or {"error"}; the plan's file is whole before. Facts of a plan are read from
TensorRT's messages, because inspecting a plan means loading it, which takes a GPU. Invariants: FP32 is FP32 (TF32 is
off). A plan needs no memory at run time that its context did not ask for, so a step can be captured in a CUDA graph. A
failed build's error has TensorRT's own words.
"""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from wicore_trt.backends.tensorrt.api import TensorRT, find_tensorrt
from wicore_trt.backends.tensorrt.ops import define_network
from wicore_trt.backends.tensorrt.plan_io import PlanRequest, TensorSpec
from wicore_trt.errors import EnvironmentUnfitError, WicoreError
from wicore_trt.files import write_whole

log = logging.getLogger(__name__)
MARK = "wicore-plan "
LAST_LINES = 5


@dataclass(frozen=True, slots=True)
class Plan:
    """Built plan. `tensors` are its inputs and outputs, dimensions that vary as letters; `facts` are for people; `data`
    its bytes, b"" where a worker wrote them."""

    tensors: list[TensorSpec]
    facts: dict[str, Any]
    data: bytes = b""


def build_plan(api: TensorRT, request: PlanRequest) -> Plan:
    """Build the plan of `request`. Raises EnvironmentUnfitError with TensorRT's reason when it cannot."""
    trt, book = api.module, BuildLog()
    builder = trt.Builder(make_logger(trt, book))
    network, tensors = make_network(trt, builder, request)
    config = builder.create_builder_config()
    config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED  # kernel names; no effect on what is built
    config.clear_flag(trt.BuilderFlag.TF32)
    if hasattr(trt.BuilderFlag, "REQUIRE_USER_ALLOCATION"):
        config.set_flag(trt.BuilderFlag.REQUIRE_USER_ALLOCATION)
    if api.targets[request.target] is not None:
        config.num_compute_capabilities = 1
        config.set_compute_capability(api.targets[request.target], 0)
    profile, dims = builder.create_optimization_profile(), request.limits.profile(request.phase)
    for tensor in tensors:
        if tensor.kind != "output" and any(isinstance(d, str) for d in tensor.shape):
            profile.set_shape(tensor.name, *(tensor.bound(dims, which) for which in range(3)))
    config.add_optimization_profile(profile)
    serialized = builder.build_serialized_network(network, config)
    if serialized is None:
        problem = f"{api.flavour} {api.version} could not build {request.phase} for {request.target}: {book.reason()}"
        raise EnvironmentUnfitError(problem)
    facts = {
        "network_layers": network.num_layers,
        "kernels": dict(sorted(book.kernels.items())),
        "precisions": dict(sorted(book.precisions.items())),
        "activation_bytes": book.activation_bytes,
        "rearranged_weights": sorted(book.rearranged),
    }
    return Plan(tensors, facts, bytes(serialized))


def make_network(trt: Any, builder: Any, request: PlanRequest) -> tuple[Any, list[TensorSpec]]:
    strongly_typed = 1 << int(trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED)
    network = builder.create_network(strongly_typed)
    return network, define_network(network, trt, request)


_KERNEL = re.compile(r"^Name: (?P<name>.+?), LayerType: (?P<type>\w+), .*?Outputs: \[ \{.*?Datatype: (?P<dtype>\w+)")
_MEMORY = re.compile(r"Total Activation Memory: (\d+) bytes")
_WEIGHT = re.compile(r"Name: ((?:transformer\.|lm_head\.)[\w.]+\.weight),")
_REARRANGED = re.compile(r"^__myl_(?:Cast|Mul|Resh|Move|Repl)*Tran")
_ATTENTION = re.compile(r"_mha_|_fmha")
_DTYPES = {"Float": "float32", "Half": "float16", "BFloat16": "bfloat16", "FP8": "fp8", "Int32": "int32"}
_DTYPES |= {"Int64": "int64", "Bool": "bool"}


@dataclass(slots=True)
class BuildLog:
    """Facts of one build. `kernels` counts the plan's kernels by kind ("gemm", "attention", "kgen": fused elementwise,
    ...), `precisions` by the dtype that they write. `activation_bytes` is the device memory that the plan needs beside
    inputs and outputs, 0 where TensorRT did not say. `rearranged` are weights that the plan transposes in every step,
    which costs bandwidth."""

    errors: list[str] = field(default_factory=list)
    kernels: Counter[str] = field(default_factory=Counter)
    precisions: Counter[str] = field(default_factory=Counter)
    rearranged: set[str] = field(default_factory=set)
    activation_bytes: int = 0

    def line(self, severity: str, text: str) -> None:
        if severity in ("ERROR", "INTERNAL_ERROR"):
            self.errors.append(text)
        elif severity == "WARNING":
            log.info("tensorrt: %s", text)
        elif memory := _MEMORY.search(text):
            self.activation_bytes = max(self.activation_bytes, int(memory[1]))
        else:
            for part in text.split("\n"):
                if kernel := _KERNEL.match(part):
                    self.kernels["attention" if _ATTENTION.search(kernel["name"]) else kernel["type"]] += 1
                    self.precisions[_DTYPES.get(kernel["dtype"], kernel["dtype"].lower())] += 1
                    if _REARRANGED.match(kernel["name"]):
                        self.rearranged.update(_WEIGHT.findall(part.partition("Outputs: [")[0]))

    def reason(self) -> str:
        return " | ".join(dict.fromkeys(self.errors)) or "it gave no reason"


def make_logger(trt: Any, book: BuildLog) -> Any:

    class Logger(trt.ILogger):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.ILogger.__init__(self)

        def log(self, severity: Any, message: str) -> None:
            book.line(severity.name, message)

    return Logger()


def start() -> subprocess.Popen[str]:
    """Start a worker, which waits for its job."""
    command = [sys.executable, "-m", "wicore_trt.backends.tensorrt.plan_build"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(worker: subprocess.Popen[str], request: PlanRequest, plan: Path) -> Plan:
    """Let the worker build `request` into the file `plan`. Raises EnvironmentUnfitError with its reason, or with its
    last words."""
    words = worker.communicate(msgspec.json.encode({"request": request, "plan": str(plan)}).decode())[0].splitlines()
    result: dict[str, Any] = next((json.loads(line.removeprefix(MARK)) for line in words if line.startswith(MARK)), {})
    if "error" in result:
        raise EnvironmentUnfitError(result["error"], fix=result["fix"])
    if "facts" not in result:
        what = f"building {request.phase} for {request.target} ended with exit code {worker.returncode}"
        raise EnvironmentUnfitError(f"{what}: {' | '.join(words[-LAST_LINES:]) or 'no output'}")
    return Plan(msgspec.convert(result["tensors"], list[TensorSpec]), result["facts"])


def _send_message(message: dict[str, Any]) -> None:
    print(MARK + json.dumps(message), flush=True)


def main() -> int:
    job = json.load(sys.stdin)
    try:
        request = msgspec.convert(job["request"], PlanRequest)
        plan = build_plan(find_tensorrt(), request)
        write_whole(Path(job["plan"]), plan.data)
    except WicoreError as error:
        _send_message({"error": error.message, "fix": error.fix})
        return error.exit_code
    _send_message({"tensors": msgspec.to_builtins(plan.tensors), "facts": plan.facts})
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
