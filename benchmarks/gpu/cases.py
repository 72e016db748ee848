"""Cases of `benchmarks.gpu.run`: engines, batches, goals and the shortest times that the machine's rates allow.

Plain data and arithmetic; it must not know how anything is measured. Invariant: a bound counts only work that no
implementation of the same engine can leave out: every weight once, the KV that is looked at, the logits once, and the
FLOPs of what is computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import floor, inf

from wicore_trt.arithmetic import div_ceil
from wicore_trt.bench.bound import ModelCost
from wicore_trt.kv.sizing import builtin_spec
from wicore_trt.model.spec import GLOBAL, LOCAL, Gemma3Spec
from wicore_trt.runtime.pool_sizes import pages_per_sequence
from wicore_trt.weight_format import QUANTIZED

PAGE_TOKENS = 32
CONTEXT = 1024
"""Tokens of a prompt."""
OUTPUT = 65
"""Generated tokens of a long run."""
BATCH_TOKENS = 8192
"""Token budget of a step, on both sides."""
LOGIT_BYTES = 4


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """An engine to measure. `dtype` and `kv_dtype` are options of `wicore build`; `peer` are vLLM's quantization and
    KV dtype for the same model, None where it has none. `ranks`: GPUs that it is split over; its bounds and bytes are
    those of one."""

    name: str
    title: str
    model: str
    dtype: str
    kv_dtype: str
    batches: tuple[int, ...]
    peer: tuple[str, str] | None
    ranks: int = 1

    @property
    def spec(self) -> Gemma3Spec:
        return builtin_spec(self.model)

    @property
    def kv_bytes_per_element(self) -> int:
        return 1 if self.kv_dtype == "fp8" else 2

    def cost(self) -> ModelCost:
        base = "bfloat16" if self.dtype in QUANTIZED else self.dtype
        return ModelCost.from_dtypes(self.spec, self.dtype, base, base if self.kv_dtype == "auto" else self.kv_dtype)


CONFIGS = {
    config.name: config
    for config in (  # the most valuable first: what does not fit into the time is skipped
        EngineConfig("bf16", "27B BF16", "gemma3-27b", "bfloat16", "auto", (1, 32), ("none", "auto")),
        EngineConfig(
            "fp8", "27B FP8 weights", "gemma3-27b", "fp8", "auto", (1, 8, 32, 64), ("fp8_per_channel", "auto")
        ),
        EngineConfig("q4_0", "27B Q4_0 weights", "gemma3-27b", "q4_0", "auto", (1, 8, 32), ("none", "auto")),
        EngineConfig("fp8kv", "27B FP8 weights and KV", "gemma3-27b", "fp8", "fp8", (128,), ("fp8_per_channel", "fp8")),
        EngineConfig("270m", "270M BF16", "gemma3-270m", "bfloat16", "auto", (1,), ("none", "auto")),
        EngineConfig("bf16-tp2", "27B BF16, TP 2", "gemma3-27b", "bfloat16", "auto", (1, 8, 32), ("none", "auto"), 2),
        EngineConfig(
            "fp8-tp2",
            "27B FP8 weights, TP 2",
            "gemma3-27b",
            "fp8",
            "auto",
            (1, 8, 32, 64),
            ("fp8_per_channel", "auto"),
            2,
        ),
        EngineConfig("q4_0-tp2", "27B Q4_0 weights, TP 2", "gemma3-27b", "q4_0", "auto", (1, 8, 32), None, 2),
        EngineConfig("bf16-tp4", "27B BF16, TP 4", "gemma3-27b", "bfloat16", "auto", (1, 32), ("none", "auto"), 4),
        EngineConfig(
            "fp8-tp4", "27B FP8 weights, TP 4", "gemma3-27b", "fp8", "auto", (1, 32), ("fp8_per_channel", "auto"), 4
        ),
        EngineConfig("fp16", "27B FP16", "gemma3-27b", "float16", "auto", (1, 32), None),
    )
}
PEER_ORDER = ("fp8", "bf16", "q4_0", "fp8kv", "270m", "fp8-tp2", "bf16-tp2", "fp8-tp4", "bf16-tp4")

DECODE, PREFILL, OFFLINE = "decode", "prefill", "offline"
"""A step in which all sequences decode; all prompts to their first tokens; all prompts with OUTPUT tokens each."""
# (configuration, phase, batch): milliseconds that must be reached on an H100 80GB, and that are aimed for.
GOALS: dict[tuple[str, str, int], tuple[float, float]] = {
    ("bf16", DECODE, 1): (19.5, 18.3),
    ("bf16", DECODE, 32): (26.5, 25.0),
    ("fp16", DECODE, 1): (19.5, 18.3),
    ("fp16", DECODE, 32): (26.5, 25.0),
    ("fp8", DECODE, 1): (11.3, 10.2),
    ("fp8", DECODE, 8): (13.0, 11.5),
    ("fp8", DECODE, 32): (18.5, 16.5),
    ("fp8", DECODE, 64): (24.5, 22.0),
    ("q4_0", DECODE, 1): (7.4, 6.5),
    ("q4_0", DECODE, 8): (9.1, 8.2),
    ("q4_0", DECODE, 32): (14.9, 13.5),
    ("fp8kv", DECODE, 128): (33.0, 27.0),
    ("270m", DECODE, 1): (1.0, 0.6),
    ("bf16-tp2", DECODE, 1): (10.7, 9.7),
    ("bf16-tp2", DECODE, 8): (11.9, 10.8),
    ("bf16-tp2", DECODE, 32): (14.6, 13.0),
    ("fp8-tp2", DECODE, 1): (7.0, 5.8),
    ("fp8-tp2", DECODE, 8): (8.2, 7.0),
    ("fp8-tp2", DECODE, 32): (11.3, 9.7),
    ("fp8-tp2", DECODE, 64): (14.9, 13.0),
    ("bf16-tp2", PREFILL, 1): (46.0, 41.0),
    ("bf16-tp2", PREFILL, 32): (1420.0, 1250.0),
    ("fp8-tp2", PREFILL, 1): (34.0, 28.0),
    ("fp8-tp2", PREFILL, 32): (900.0, 780.0),
    ("bf16-tp4", DECODE, 1): (6.75, 5.8),
    ("bf16-tp4", DECODE, 32): (9.3, 8.1),
    ("fp8-tp4", DECODE, 1): (5.1, 3.9),
    ("fp8-tp4", DECODE, 32): (7.7, 6.5),
    ("bf16-tp4", PREFILL, 32): (850.0, 720.0),
    ("fp8-tp4", PREFILL, 32): (580.0, 480.0),
    ("bf16", PREFILL, 1): (85.0, 78.0),
    ("fp8", PREFILL, 1): (55.0, 46.0),
    ("q4_0", PREFILL, 1): (90.0, 80.0),
    ("q4_0", PREFILL, 32): (2800.0, 2650.0),
    ("bf16", PREFILL, 32): (2600.0, 2400.0),
    ("fp8", PREFILL, 32): (1750.0, 1400.0),
    ("bf16", OFFLINE, 32): (4400.0, 4300.0),
    ("fp8", OFFLINE, 64): (4800.0, 4500.0),
}
START_GOALS = (25000.0, 15000.0)
"""The same, from the start of the process to serving."""
GOALS_GPU = "H100"
SPLIT = ("bf16-tp2", "fp8-tp2", "bf16-tp4", "fp8-tp4", "q4_0-tp2")
"""Configurations of several GPUs."""
FIGURES = (
    *(
        (name, DECODE, batch)
        for name in ("bf16", "fp16", "fp8", "q4_0", "fp8kv", "270m", *SPLIT)
        for batch in CONFIGS[name].batches
    ),
    *((name, PREFILL, batch) for batch in (1, 32) for name in ("bf16", "fp8", "q4_0", *SPLIT[:4])),
    ("bf16", OFFLINE, 32),
    ("fp8", OFFLINE, 64),
)
"""The rows of the table, in order."""


@dataclass(frozen=True, slots=True)
class Rates:
    """Measured: bytes per second of a large copy (read and written) and of a sum (read), FLOP/s of 8192^3 products."""

    copy_bytes_per_s: float
    read_bytes_per_s: float
    bf16_flops: float
    fp8_flops: float | None = None


EXPECTED = Rates(3.0e12, 3.1e12, 8.0e14, 1.4e15)
"""Of an H100, for estimates of time when nothing was measured."""


def _decode_s(config: EngineConfig, batch: int, rates: Rates) -> float:
    """Shortest mean time of the steps behind the first token."""
    cost, spec = config.cost(), config.spec
    moved = cost.decode_bytes(batch, CONTEXT, OUTPUT) + batch * spec.vocab_size * LOGIT_BYTES
    linear = 2 * batch * cost.linear_parameters
    rest = cost.decode_flops(batch, CONTEXT, OUTPUT) - linear
    return max(moved / rates.copy_bytes_per_s, _flop_seconds(config, linear, rest, rates))


def _prefill_s(config: EngineConfig, batch: int, rates: Rates) -> float:
    """Shortest time from `batch` prompts to the first token of all."""
    cost = config.cost()
    linear = 2 * batch * CONTEXT * cost.linear_parameters
    rest = batch * cost.prefill_flops(CONTEXT) - linear
    return max(cost.weight_bytes / rates.copy_bytes_per_s, _flop_seconds(config, linear, rest, rates))


def bound_s(config: EngineConfig, phase: str, batch: int, rates: Rates) -> float:
    """Shortest seconds of a figure."""
    if phase == OFFLINE:
        return (_prefill_s(config, batch, rates) + (OUTPUT - 1) * _decode_s(config, batch, rates)) / config.ranks
    return (_decode_s if phase == DECODE else _prefill_s)(config, batch, rates) / config.ranks


def _flop_seconds(config: EngineConfig, linear: float, rest: float, rates: Rates) -> float:
    """Linears of FP8 weights may be multiplied in FP8; head and attention are in 16 bits."""
    fast = rates.fp8_flops if config.dtype == "fp8" and rates.fp8_flops else rates.bf16_flops
    return linear / fast + rest / rates.bf16_flops


def places(batch: int) -> int:
    """Sequences to make room for when `batch` are to run at once: the scheduler admits a sequence only while one page
    more is left for each that runs, and a window has 33 pages."""
    return batch + batch // 33 + 1


def kv_budget(config: EngineConfig, sequences: int, context: int) -> int:
    """Bytes of KV pages of one rank for `sequences` sequences of `context` tokens."""
    spec = config.spec
    pages = {g: pages_per_sequence(spec, g, PAGE_TOKENS, context) for g in (GLOBAL, LOCAL)}
    size = config.kv_bytes_per_element
    each = sum((pages[g] + (g == LOCAL)) * spec.page_bytes(g, PAGE_TOKENS, size) for g in pages)
    return div_ceil((sequences + 1) * each, config.ranks)


def memory_bytes(config: EngineConfig, batch: int) -> float:
    """Memory of one GPU for a run of `batch` in bytes: weights, KV pages, and WORK_BYTES for all else."""
    longest = div_ceil(CONTEXT + OUTPUT, PAGE_TOKENS) * PAGE_TOKENS
    return config.cost().weight_bytes / config.ranks + kv_budget(config, places(batch), longest) + WORK_BYTES


WORK_BYTES = 6 << 30
# Seconds beside the measured runs, as seen on machines with an H100 and 16 cores; for deciding what still fits.
LOAD_S = {"gemma3-27b": 14.0, "gemma3-270m": 5.0}
BUILD_S = {"gemma3-27b": 30.0, "gemma3-270m": 20.0}
PEER_START_S = {
    "bf16": 75.0,
    "fp8": 105.0,
    "q4_0": 105.0,
    "fp8kv": 110.0,
    "270m": 40.0,
    "bf16-tp2": 110.0,
    "bf16-tp4": 110.0,
    "fp8-tp4": 130.0,
    "fp8-tp2": 130.0,
}
CHECK_S, STARTUP_S, BOUNDS_S = 45.0, 45.0, 6.0


def case_estimate_s(config: EngineConfig, batch: int, runs: int, rates: Rates, case_s: float = inf) -> float:
    """Seconds that `runs` pairs of a short and a long run take; none begins behind `case_s` seconds."""
    prefill, step = _prefill_s(config, batch, rates), _decode_s(config, batch, rates)
    pair = 2 * 1.8 * prefill + (OUTPUT - 1) * 1.4 * step
    return pair * min(runs, floor(min(case_s / pair, runs)) + 1)


def fitting(
    config: EngineConfig,
    batches: Sequence[int],
    before_s: float,
    runs: int,
    rates: Rates,
    left_s: float,
    case_s: float = inf,
) -> int:
    """Count how many of `batches`, from the first, fit into `left_s` seconds behind `before_s` of loading."""
    needed, count = before_s, 0
    for batch in batches:
        needed += case_estimate_s(config, batch, runs, rates, case_s)
        if needed > left_s:
            break
        count += 1
    return count
