"""An engine whose steps take what a formula says, on a clock that only they and the test move."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from wicore_trt.core.engine import EngineCore
from wicore_trt.kv.manager import CacheOptions, KVCacheManager
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.model.spec import GLOBAL
from wicore_trt.runtime.batch import SampledTokens, StepBatch, StepResult
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.schedule.step_time import StepLoad, StepTime, sum_load
from wicore_trt.types import GenerateRequest, SamplingParams, TokenOutput


@dataclass(frozen=True)
class Device:
    """seconds = (weights^corner + (tokens * token)^corner)^(1 / corner) + rows * row + keys * key + pairs * pair"""

    weights: float
    row: float
    key: float
    token: float
    pair: float
    corner: float = 2.0

    def step_s(self, load: StepLoad) -> float:
        computed = (load.rows + load.tokens) * self.token
        body = (self.weights**self.corner + computed**self.corner) ** (1 / self.corner)
        return body + load.rows * self.row + load.keys * self.key + load.pairs * self.pair


# Weights of 27 B at 8 bits and 4.8 TB/s, 55 us of arithmetic a token: some 10 requests of 1,088 and 149 tokens
H200 = Device(9e-3, 1e-4, 1.8e-8, 5.5e-5, 3e-10)
# A small model on two cores: a token takes some 5 ms, weights 50.
CPU = Device(0.05, 2e-3, 1e-7, 5e-3, 5e-9)
# What costs is starting kernels.
SMALL = Device(1.5e-3, 1e-5, 1e-9, 1e-6, 3e-11, corner=1.0)


class Simulated:
    """An executor, and the clock of its engine. `noise` is the standard deviation of a step's logarithm. Where there
    are `graph_sizes`, steps are padded to them, and of those that no size holds the host takes `launch_s` to start the
    kernels, beside the step before it."""

    kernels, slice_tokens, max_sequences, score_rows = "simulated", 256, None, 0
    broken: BaseException | None = None

    def __init__(self, device: Device, *, noise: float = 0.0, seed: int = 0) -> None:
        self.device, self.noise, self.rng = device, noise, random.Random(seed)
        self.graph_sizes: Mapping[int, Sequence[int]] = {}
        self.images = None
        self.launch_s, self._before = 0.0, 0.0
        self.now = 0.0
        self.copier = self
        self.steps: list[list[tuple[int, int]]] = []

    def execute(self, batch: StepBatch) -> StepResult:
        self.steps.append([(s.seq_id, len(s.token_ids)) for s in batch.slices])
        load, launch_s = sum_load([(s.start, len(s.token_ids)) for s in batch.slices]), 0.0
        if load.tokens and self.graph_sizes:
            sizes = next((found for rows, found in self.graph_sizes.items() if rows >= load.rows), ())
            padded = next((tokens for tokens in sizes if tokens >= load.tokens), None)
            load, launch_s = load._replace(tokens=padded or load.tokens), 0.0 if padded else self.launch_s
        seconds = self.device.step_s(load)
        seconds += max(0.0, launch_s - self._before)
        self._before = seconds
        self.now += seconds * self.rng.lognormvariate(0, self.noise)
        return StepResult([SampledTokens(s.seq_id, (7,)) for s in batch.slices if s.sample])

    def release(self, seq_id: int) -> None:
        pass

    def close(self) -> None:
        pass


def make_simulated(
    executor: Simulated,
    *,
    target_s: float | None = None,
    max_batch_tokens: int = 2048,
    max_sequences: int = 64,
    page_tokens: int = 256,
    pages: int = 1600,
) -> EngineCore:
    executor.layout = KVLayout(page_tokens, "float32", {GLOBAL: pages}, {GLOBAL: 64})
    manager = KVCacheManager(
        {GLOBAL: pages}, 1024, KeyChain("e", page_tokens), options=CacheOptions(prefix_cache=False)
    )
    scheduler = Scheduler(
        manager, max_batch_tokens=max_batch_tokens, max_sequences=max_sequences,
        slice_tokens=executor.slice_tokens, step_time=StepTime(target_s), graph_sizes=executor.graph_sizes,
    )  # fmt: skip
    return EngineCore(executor, scheduler, eos_ids=(1,), max_context=1 << 17, clock=lambda: executor.now)


def ask(
    name: str, prompt: int, output: int, *, tenant: str = "", priority: int = 0, deadline: float | None = None
) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_tokens=output, ignore_eos=True)
    return GenerateRequest(name, (5,) * prompt, params, deadline, priority, tenant)


@dataclass
class Seen:
    """When a request came, when its tokens did, and how it ended."""

    came: float
    tokens: list[float] = field(default_factory=list)
    last: TokenOutput | None = None

    @property
    def gaps(self) -> list[float]:
        return [b - a for a, b in zip(self.tokens, self.tokens[1:], strict=False)]

    @property
    def ttft(self) -> float:
        return self.tokens[0] - self.came

    @property
    def tpot(self) -> float:
        return (self.tokens[-1] - self.tokens[0]) / max(1, len(self.tokens) - 1)


def note(seen: dict[str, Seen], outputs: list[TokenOutput], now: float) -> None:
    for output in outputs:
        one = seen[output.request_key]
        one.tokens += [now] * len(output.token_ids)
        one.last = output if output.finish_reason is not None else one.last


def p99(values: list[float]) -> float:
    return sorted(values)[int(0.99 * (len(values) - 1))]
