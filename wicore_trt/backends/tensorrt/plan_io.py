"""Inputs and outputs of a TensorRT plan of Gemma 3: names, dtypes and shapes, as plain data.

The lowering adds these inputs, the manifest records them, the runtime binds them. Must not know TensorRT, torch or
files. Invariant: everything that differs from step to step is an input, so a plan serves every batch within its limits.

A step has B linear KV slots with T tokens each. Each phase has a plan: prefill runs one slot with a chunk of tokens,
decode many slots with one token. Weights are inputs, so both read the same memory. Global layers keep every position of
a sequence. Local layers keep a sliding linear cache: entries of consecutive positions, the oldest first. When a step
does not fit, the runtime first moves the last `window - 1` entries to the front. Keys are stored rotated by their
absolute position, so moving them changes no value. The last entry of a cache is scratch, where a slot without work
writes in a decode step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from wicore_trt.arithmetic import div_ceil
from wicore_trt.errors import ConfigError
from wicore_trt.model.spec import LOCAL, Gemma3Spec
from wicore_trt.runtime.weight_specs import WeightSpec, list_weights, rope_name

PLANS = "plans"  # folder of the plans in an engine directory
INDEX = f"{PLANS}/plans.json"
TOKEN_IDS = "token_ids"
POSITIONS = "positions"
SAMPLE_ROWS = "sample_rows"
LOGITS = "logits"
BATCH, CHUNK, ROWS = "B", "T", "R"
PREFILL, DECODE = "prefill", "decode"
PHASES = (PREFILL, DECODE)
CACHE_ALIGNMENT = 64  # entries; attention kernels read keys in blocks of at most this many


def write_indices(group: str) -> str:
    """Name int32[B]: cache entry of the step's first token in each slot."""
    return f"write_indices.{group}"


def kv_lengths(group: str) -> str:
    """Name int32[B]: cache entries of each slot after the step."""
    return f"kv_lengths.{group}"


def cache(part: str, layer: int) -> str:
    """Name the cache [B, kv_heads, entries, head_dim] in the plan's KV dtype; `part` is "k" or "v"."""
    return f"cache.{part}.{layer}"


def updated(cache_name: str) -> str:
    """Name the output that aliases the cache input `cache_name`."""
    return f"{cache_name}.updated"


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Input or output of a compiled step. `shape` has numbers, or "B" (slots), "T" (tokens of a slot), "R" (sampled
    rows). `kind`: "step" (differs from step to step), "table" (rope), "cache", "weight" or "output". A weight is made
    of the tensors `parts` of the weight file: `combine` "rows" stacks them on dim 0, "max" takes each element's largest
    value."""

    name: str
    dtype: str
    shape: tuple[int | str, ...]
    kind: str
    parts: tuple[str, ...] = ()
    combine: str = "rows"

    def fixed(self, profile: Mapping[str, tuple[int, int, int]]) -> TensorSpec:
        """Fill in numbers for the dimensions that `profile` does not let vary."""
        one_size = {letter: least for letter, (least, _, most) in profile.items() if least == most}
        return replace(self, shape=tuple(one_size.get(d, d) if isinstance(d, str) else d for d in self.shape))

    def bound(self, profile: Mapping[str, tuple[int, int, int]], which: int) -> tuple[int, ...]:
        """Least (0), best (1) or largest (2) shape in `profile`."""
        return tuple(d if isinstance(d, int) else profile[d][which] for d in self.shape)

    @property
    def weight(self) -> WeightSpec:
        """Specification for `load_weights`, of a tensor of kind "weight"."""
        return WeightSpec(self.name, self.dtype, self.bound({}, 0), self.parts, self.combine)


def weight_tensors(file: Path, spec: Gemma3Spec, kv_dtype: str) -> list[TensorSpec]:
    """List a plan's weight inputs of the weight `file`. Raises CheckpointError for one that misses a tensor."""
    # A tied head is an input of its own: TensorRT would transpose the embedding in every step to read it in two ways.
    return [
        TensorSpec(weight.name, weight.dtype, weight.shape, "weight", weight.parts, weight.combine)
        for weight in list_weights([file], spec, kv_dtype)
    ]


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """Most slots of a decode step, most tokens of a prefill step, longest sequence in tokens."""

    max_batch: int
    max_chunk: int
    max_context: int

    def __post_init__(self) -> None:
        for name in ("max_batch", "max_chunk", "max_context"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} must be positive, got {getattr(self, name)}.")

    def entries(self, spec: Gemma3Spec, group: str) -> int:
        """Count entries of a slot's cache in `group`, with the scratch entry. A local cache holds the window before
        a step and the step. It is at least twice the window, so that decode steps move entries once in a window's
        length."""
        needed = self.max_context
        if group == LOCAL:
            needed = min(needed, spec.sliding_window - 1 + max(self.max_chunk, spec.sliding_window))
        return div_ceil(needed + 1, CACHE_ALIGNMENT) * CACHE_ALIGNMENT

    def profile(self, phase: str) -> dict[str, tuple[int, int, int]]:
        """Make the optimization profile of a phase's plan: dimension letter to (least, best, most)."""
        one = (1, 1, 1)
        if phase == PREFILL:
            return {BATCH: one, CHUNK: (1, self.max_chunk, self.max_chunk), ROWS: one}
        batch = (1, min(8, self.max_batch), self.max_batch)
        return {BATCH: batch, CHUNK: one, ROWS: batch}


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """Inputs of a plan's build. `dtype` is of the activations."""

    spec: Gemma3Spec
    limits: PlanLimits
    weights: Sequence[TensorSpec]
    dtype: str
    kv_dtype: str
    target: str
    phase: str


def step_tensors(spec: Gemma3Spec, limits: PlanLimits) -> list[TensorSpec]:
    """List inputs that are neither weights nor caches."""
    tensors = [
        TensorSpec(TOKEN_IDS, "int32", (BATCH, CHUNK), "step"),
        TensorSpec(POSITIONS, "int32", (BATCH, CHUNK), "step"),
        TensorSpec(SAMPLE_ROWS, "int32", (ROWS,), "step"),
    ]
    for group in spec.groups:
        tensors.append(TensorSpec(write_indices(group), "int32", (BATCH,), "step"))
        tensors.append(TensorSpec(kv_lengths(group), "int32", (BATCH,), "step"))
        shape = (limits.max_context, spec.layer_group(group).head_dim // 2)
        tensors += [TensorSpec(rope_name(group, part), "float32", shape, "table") for part in ("cos", "sin")]
    return tensors


def cache_tensors(spec: Gemma3Spec, limits: PlanLimits, dtype: str) -> list[TensorSpec]:
    """List cache inputs of all layers, K before V."""
    found = []
    for layer, group in enumerate(spec.attention_by_layer):
        shape = (BATCH, group.num_kv_heads, limits.entries(spec, group.name), group.head_dim)
        found += [TensorSpec(cache(part, layer), dtype, shape, "cache") for part in ("k", "v")]
    return found


def output_tensors(spec: Gemma3Spec, caches: list[TensorSpec]) -> list[TensorSpec]:
    """List outputs: logits of the whole vocabulary, and each cache again."""
    logits = TensorSpec(LOGITS, "float32", (ROWS, spec.vocab_size), "output")
    return [logits, *(TensorSpec(updated(c.name), c.dtype, c.shape, "output") for c in caches)]


def plan_file(target: str, phase: str) -> str:
    """Name a plan within the engine directory."""
    return f"{PLANS}/{target}.{phase}.plan"
