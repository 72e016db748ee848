"""Backend `tensorrt`: plans per target and phase, beside the weights that they all share.

Files in the engine directory: `plans/<target>.<phase>.plan`, and `plans/plans.json` with each plan's inputs, outputs,
contents and builder. Must not know the network. Invariants: a plan holds no weights, so the engine's safetensors serve
every target; what cannot be built is refused before any work.
"""

from __future__ import annotations

import json
import logging
import subprocess
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from wicore_trt.backends.tensorrt.api import find_tensorrt
from wicore_trt.backends.tensorrt.plan_build import Plan, finish, start
from wicore_trt.backends.tensorrt.plan_io import (
    INDEX,
    PHASES,
    PLANS,
    PlanLimits,
    PlanRequest,
    plan_file,
    weight_tensors,
)
from wicore_trt.cores import count_cores
from wicore_trt.engine.options import Backend, BuildOptions, check_equal_groups
from wicore_trt.errors import ConfigError, EnvironmentUnfitError

if TYPE_CHECKING:
    from wicore_trt.checkpoint.format import Checkpoint
    from wicore_trt.engine.directory import EngineDir
    from wicore_trt.progress import Progress
    from wicore_trt.runtime.executor import Executor
    from wicore_trt.runtime.options import ExecutorOptions

log = logging.getLogger(__name__)
DEFAULT_CONTEXT = 8192  # a KV slot is as long as the longest sequence, so the model's own limit is seldom wanted
OLDEST_SM = {"fp8": 89, "bfloat16": 80, "float16": 75, "float32": 75}
PARALLEL_BUILDS = 2  # each takes about 1 GB for 27B


class TensorRTBackend(Backend):
    def targets(self, options: BuildOptions) -> list[str]:
        """List the targets asked for; full TensorRT takes its own GPU when none is named."""
        check_ranks(options.tp_size)
        api = find_tensorrt()
        targets = list(options.targets)
        if not targets and len(api.targets) == 1:
            targets = list(api.targets)
        if not targets:
            fix = f"Give --target; known: {', '.join(api.targets)}."
            raise ConfigError("backend 'tensorrt' needs a target.", fix=fix)
        for target in targets:
            api.check_target(target)
        check_dtypes(targets, (options.dtype, options.kv_dtype))  # what is known before converting takes its time
        return targets

    def default_context(self, limit: int) -> int:
        return min(limit, DEFAULT_CONTEXT)

    def check(self, checkpoint: Checkpoint, options: BuildOptions) -> None:
        check_ranks(checkpoint.tp_size)
        kv_dtype = options.kv_dtype_of(checkpoint, compiled=True)
        check_equal_groups(checkpoint.spec, "tensorrt")
        check_dtypes(options.targets, (checkpoint.dtype, kv_dtype, checkpoint.weights.storage))

    def compile(
        self, checkpoint: Checkpoint, directory: Path, options: BuildOptions, progress: Progress
    ) -> dict[str, Any]:
        api, requests = find_tensorrt(), plan_requests(checkpoint, directory, options)
        (directory / PLANS).mkdir()
        index: dict[str, Any] = {"tensors": {}, "plans": {}}
        for request, plan in zip(requests, build_plans(requests, directory, progress), strict=True):
            name = plan_file(request.target, request.phase)
            index["tensors"][request.phase] = msgspec.to_builtins(plan.tensors)
            index["plans"][name] = {"target": request.target, "phase": request.phase, **plan.facts}
        (directory / INDEX).write_text(json.dumps(index, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        limits = requests[0].limits
        return {
            "flavour": api.flavour,
            "version": api.version,
            "max_batch": limits.max_batch,
            "max_chunk": limits.max_chunk,
        }

    def open_fit(self, engine: EngineDir, settings: ExecutorOptions) -> Executor:
        from wicore_trt.backends.tensorrt.executor import open_executor

        return open_executor(engine, settings)


def plan_requests(checkpoint: Checkpoint, directory: Path, options: BuildOptions) -> list[PlanRequest]:
    spec, kv_dtype = checkpoint.spec, options.kv_dtype_of(checkpoint)
    assert options.max_context is not None, "build_engine fills it in"
    limits = PlanLimits(options.max_batch, min(options.max_chunk, options.max_context), options.max_context)
    weights = weight_tensors(directory / "rank0.safetensors", spec, kv_dtype)
    return [
        PlanRequest(spec, limits, weights, checkpoint.dtype, kv_dtype, target, phase)
        for target in options.targets
        for phase in PHASES
    ]


def check_ranks(count: int) -> None:
    if count > 1:
        raise ConfigError(f"backend 'tensorrt' runs one rank, not {count}.", fix="Use --tp 1, or --backend triton.")


def check_dtypes(targets: Sequence[str], dtypes: Sequence[str]) -> None:
    """Raises ConfigError for a target that cannot compute in one of `dtypes`; "auto" is any."""
    for target in targets:
        for dtype in dtypes:
            if int(target.removeprefix("sm")) < OLDEST_SM.get(dtype, 0):
                problem = f"target {target!r} has no {dtype} arithmetic; it begins with sm{OLDEST_SM[dtype]}."
                raise ConfigError(problem, fix="Leave the target out, or build it from a checkpoint of another dtype.")


def build_plans(requests: list[PlanRequest], directory: Path, progress: Progress) -> list[Plan]:
    """Build all plans into `directory`/plans, two at a time; results are in the order of `requests`. Raises
    EnvironmentUnfitError with TensorRT's reason. The first failure, and Ctrl-C, ends the other builds."""
    lock, workers, done, stopping = threading.Lock(), list[subprocess.Popen[str]](), 0, False
    progress("plans", 0, len(requests))

    def build(request: PlanRequest) -> Plan:
        nonlocal done
        begun = time.monotonic()
        with lock:
            if stopping:
                raise EnvironmentUnfitError("the build was ended")
            workers.append(worker := start())
        plan = finish(worker, request, directory / plan_file(request.target, request.phase))
        log.info("plan %s %s: %.1f s", request.target, request.phase, time.monotonic() - begun)
        with lock:
            done += 1
            progress("plans", done, len(requests))
        return plan

    with ThreadPoolExecutor(min(PARALLEL_BUILDS, count_cores())) as pool:
        futures: list[Future[Plan]] = [pool.submit(build, request) for request in requests]
        try:
            return [future.result() for future in futures]
        except BaseException:
            with lock:
                stopping = True
                for worker in workers:
                    worker.terminate()
            raise
