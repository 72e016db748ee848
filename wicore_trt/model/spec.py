"""Sizes and constants of a Gemma 3 text model, checked in one place before anything is allocated from them.

Values come from Hugging Face's config.json (`model.hf_config`), GGUF metadata, our checkpoints and manifests. Must not
know files, tensors or torch. Invariant: a constructed spec is consistent (heads divide, one kind per layer) and within
the limits below.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import Any, TypeVar

from wicore_trt.errors import CheckpointError, shown

T = TypeVar("T")
GLOBAL = "global"
LOCAL = "local"
GROUPS = (GLOBAL, LOCAL)
MAX_LAYERS = 512
MAX_RANKS = 64
"""Most ranks of a model: GPUs that reach each other fast enough."""

# Far beyond every Gemma 3 and small enough that tables of such a size fit into memory.
_WHOLE: dict[str, tuple[int, int]] = {
    "vocab_size": (1, 1 << 24), "hidden_size": (1, 1 << 20), "num_layers": (1, MAX_LAYERS),
    "num_heads": (1, 4096), "num_kv_heads": (1, 4096), "head_dim": (2, 4096), "intermediate_size": (1, 1 << 22),
    "sliding_window": (1, 1 << 24), "max_position_embeddings": (1, 1 << 24),
}  # fmt: skip
_REAL: dict[str, tuple[float, float]] = {
    "query_pre_attn_scalar": (1.0, 1e6), "rms_norm_eps": (1e-12, 1.0), "rope_theta": (1.0, 1e12),
    "rope_local_theta": (1.0, 1e12), "rope_scaling_factor": (1.0, 1e5), "final_logit_softcapping": (0.1, 1e6),
}  # fmt: skip


class SpecError(CheckpointError):
    """Value of the wrong type or range. `field` is the spec's name for it, and `problem` follows that name."""

    def __init__(self, message: str, *, field: str = "", problem: str = "", fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.field, self.problem = field, problem

    @classmethod
    def from_field(cls, field: str, problem: str) -> SpecError:
        return cls(f"model spec: {field} {problem}", field=field, problem=problem)

    def name_place(self, place: str, keys: Mapping[str, str]) -> CheckpointError:
        return CheckpointError(f"{place}: {keys.get(self.field, self.field)} {self.problem}")


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Attention of all layers of one group, whose KV pages belong together.

    A token sees the last `window` tokens with itself, all if 0. Positions are divided by `rope_factor` and rotate by
    frequencies of base `rope_theta`; scores are scaled by `softmax_scale`. Sizes may differ between groups.
    """

    name: str
    layers: tuple[int, ...]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    window: int
    rope_theta: float
    rope_factor: float
    softmax_scale: float

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def qkv_size(self) -> int:
        return self.q_size + 2 * self.kv_size


@dataclass(frozen=True, slots=True)
class Gemma3Spec:
    """Sizes of one Gemma 3 decoder. Raises SpecError for a value that cannot be right. `layer_groups[i]` is "global"
    (full attention, `rope_theta`, positions divided by `rope_scaling_factor`) or "local" (the last `sliding_window`
    tokens with self, `rope_local_theta`, no scaling). Attention scores are scaled by `query_pre_attn_scalar **
    -0.5`."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    query_pre_attn_scalar: float
    rms_norm_eps: float
    rope_theta: float
    rope_local_theta: float
    rope_scaling_factor: float
    sliding_window: int
    layer_groups: tuple[str, ...]
    max_position_embeddings: int
    tie_word_embeddings: bool
    final_logit_softcapping: float | None = None

    def __post_init__(self) -> None:
        for name, limits in _WHOLE.items():
            check_whole(name, getattr(self, name), *limits)
        for name, (low, high) in _REAL.items():
            value = getattr(self, name)
            if value is None and name == "final_logit_softcapping":
                continue
            check_real(name, value, low, high)
        if not isinstance(self.tie_word_embeddings, bool):
            raise SpecError.from_field(
                "tie_word_embeddings", f"is {shown(self.tie_word_embeddings)}; it must be true or false."
            )
        groups = self.layer_groups
        if not isinstance(groups, tuple) or any(not isinstance(g, str) or g not in GROUPS for g in groups):
            raise SpecError.from_field("layer_groups", f"is {shown(groups)}; it must list {GLOBAL!r} and {LOCAL!r}.")
        if len(groups) != self.num_layers:
            raise SpecError.from_field("layer_groups", f"names {len(groups)} layers; the model has {self.num_layers}.")
        if self.num_heads % self.num_kv_heads:
            raise SpecError.from_field(
                "num_kv_heads", f"is {self.num_kv_heads}; it must divide the {self.num_heads} heads."
            )
        if self.head_dim % 2:
            raise SpecError.from_field("head_dim", f"is {self.head_dim}; it must be even.")

    def layers_of(self, group: str) -> tuple[int, ...]:
        """List indices of the layers whose KV belongs to `group`, ascending."""
        return tuple(i for i, g in enumerate(self.layer_groups) if g == group)

    @property
    def groups(self) -> tuple[str, ...]:
        return tuple(group for group in GROUPS if group in self.layer_groups)

    def layer_group(self, name: str) -> LayerGroup:
        local = name == LOCAL
        return LayerGroup(
            name, self.layers_of(name), self.num_heads, self.num_kv_heads, self.head_dim,
            self.sliding_window if local else 0, self.rope_local_theta if local else self.rope_theta,
            1.0 if local else self.rope_scaling_factor, self.query_pre_attn_scalar**-0.5,
        )  # fmt: skip

    @property
    def attention_by_layer(self) -> list[LayerGroup]:
        groups = {name: self.layer_group(name) for name in self.groups}
        return [groups[name] for name in self.layer_groups]

    @property
    def embedding_scale(self) -> float:
        """Factor on embeddings before the first layer; executors round it to the embedding's dtype as HF does."""
        return math.sqrt(self.hidden_size)

    def page_bytes(self, group: str, page_tokens: int, kv_bytes: int) -> int:
        """Bytes of one KV page: K and V of every layer in the group for `page_tokens` tokens."""
        shape = self.layer_group(group)
        return len(shape.layers) * 2 * page_tokens * shape.kv_size * kv_bytes

    def shard(self, rank: int, ranks: int) -> RankSpec:
        """Compute what one of `ranks` ranks holds. Raises CheckpointError, naming what does not divide."""
        if not 1 <= ranks <= MAX_RANKS:
            raise CheckpointError(f"tp must be at least 1 and at most {MAX_RANKS}, got {ranks}.")
        if self.num_heads % ranks:
            fit = [str(n) for n in range(1, MAX_RANKS + 1) if self.num_heads % n == 0]
            problem = f"{self.num_heads} attention heads do not divide by tp {ranks}."
            raise CheckpointError(problem, fix=f"Use a tp of {', '.join(fit)}.")
        if self.num_kv_heads % ranks and ranks % self.num_kv_heads:
            raise CheckpointError(f"{self.num_kv_heads} KV heads can be neither split nor repeated over tp {ranks}.")
        if self.intermediate_size % ranks:
            raise CheckpointError(f"intermediate_size {self.intermediate_size} does not divide by tp {ranks}.")
        if self.vocab_size % ranks:
            raise CheckpointError(
                f"vocab_size {self.vocab_size} does not divide by tp {ranks}, and the embedding is split by tokens.",
                fix="Use a tp that divides it.",
            )
        kv_heads = _split_range(self.num_kv_heads, rank, ranks)
        if self.num_kv_heads < ranks:
            head = rank // (ranks // self.num_kv_heads)
            kv_heads = range(head, head + 1)
        heads, rows = _split_range(self.num_heads, rank, ranks), _split_range(self.intermediate_size, rank, ranks)
        return RankSpec(self, rank, ranks, heads, kv_heads, rows, _split_range(self.vocab_size, rank, ranks))

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "layer_groups": list(self.layer_groups)}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], place: str = "model spec") -> Gemma3Spec:
        """Invert to_dict; `place` names the file. Raises CheckpointError for unknown or missing keys and for bad
        values."""
        if isinstance(data, Mapping) and isinstance(groups := data.get("layer_groups"), list):
            data = {**data, "layer_groups": tuple(groups)}
        return read_spec(cls, data, place)


@dataclass(frozen=True, slots=True)
class RankSpec:
    """Part of the model `whole` that rank `rank` of `ranks` holds: ranges of heads, KV heads, rows of gate and up,
    token ids. Neighbours share a KV head where there are fewer than ranks."""

    whole: Gemma3Spec
    rank: int
    ranks: int
    heads: range
    kv_heads: range
    intermediate: range
    vocabulary: range

    @property
    def spec(self) -> Gemma3Spec:
        """Sizes of this rank's part; the hidden size is the whole model's."""
        return replace(
            self.whole, num_heads=len(self.heads), num_kv_heads=len(self.kv_heads),
            intermediate_size=len(self.intermediate), vocab_size=len(self.vocabulary),
        )  # fmt: skip


def _split_range(size: int, rank: int, ranks: int) -> range:
    return range(rank * size // ranks, (rank + 1) * size // ranks)


def check_whole(name: str, value: object, low: int, high: int) -> int:
    """Return `value` if it is an int (no bool) from `low` to `high`. Raises SpecError otherwise."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise SpecError.from_field(name, f"is {shown(value)}; it must be a whole number from {low:,} to {high:,}.")
    return value


def check_real(name: str, value: object, low: float, high: float) -> None:
    """Raises SpecError unless `value` is a number from `low` to `high`."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not low <= value <= high:
        raise SpecError.from_field(name, f"is {shown(value)}; it must be a number from {low:g} to {high:g}.")


def read_spec(spec: type[T], data: object, place: str) -> T:
    """Construct the dataclass `spec`, whose fields `data` has. Raises CheckpointError for other keys and bad values."""
    names = {f.name for f in fields(spec)}  # type: ignore[arg-type]
    if not isinstance(data, Mapping) or set(data) != names:
        given = set(data) if isinstance(data, Mapping) else set()
        wrong = ", ".join(sorted(map(str, names ^ given))[:4])
        raise CheckpointError(f"{place}: these keys are missing or unknown: {wrong}.")
    try:
        return spec(**data)
    except SpecError as error:
        raise error.name_place(place, {}) from error
