"""Chooses the kernel of an operation by role and number of rows; describes the shapes of an engine's kernels.

Plain data without Triton or torch, so that kernels can be listed, loaded and launched without them. Must not know how
kernels are compiled or stored. Invariant: the kernel of a role depends on the bucket of the number of rows alone.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from wicore_trt.backends.triton import roles
from wicore_trt.engine.options import check_equal_groups
from wicore_trt.errors import ConfigError
from wicore_trt.model.spec import GLOBAL, GROUPS, Gemma3Spec
from wicore_trt.plugins.aot import CompiledKernel
from wicore_trt.plugins.decode_layout import DecodeConfig, PrefillConfig
from wicore_trt.plugins.layout import PoolShape
from wicore_trt.plugins.linear_layout import LinearConfig, LinearShape
from wicore_trt.weight_format import PLAIN, WeightFormat

ANY = (1 << 31) - 1
"""The bucket that holds any number of rows."""
DECODE_BUCKETS = (1, 2, 4, 6, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Rows of a decode step, rounded up to these."""
SPLIT_TOKENS, KEPT_TOKENS = 384, 768
"""The most tokens of a step whose prompts' keys are split, and of one whose queries are kept until it is over."""
DEFAULT_CROSSOVER = {"16-bit": 16, "fp8": 64, "fp8 rows": 0, "q4_0": 128}
CROSSOVER: dict[str, dict[str, int]] = {"sm90": {"16-bit": 64, "fp8": 8, "fp8 rows": 128}}
"""Measurements by target, in place of DEFAULT_CROSSOVER: the most rows for which Triton kernels are faster than
cuBLAS by 16-bit weights ("16-bit"), than products of E4M3 rows by E4M3 weights ("fp8"), and the most rows for which
Triton's own of those are faster than cuBLAS's ("fp8 rows"). "q4_0": the most for which they are faster than writing
4-bit weights as 16-bit ones, each rounded once, for cuBLAS.

In a bfloat16 engine cuBLAS writes bfloat16 results, which halve the traffic of large steps between kernels. The oracle
lacks this rounding, of half a unit in bfloat16's last place once per product, as every other
bfloat16 engine rounds; sums stay float32. Products of Triton's kernels, so all of a batch-invariant engine, of float16
(results may exceed 65,504) and the logits are float32 for any number of rows."""
SCALED_PRODUCTS = {"fp8": 89}
"""First architecture whose matrix units take weights of this storage with rows quantized alike."""


@dataclass(frozen=True)
class EngineShape:
    """Shapes and types that an engine's kernels are made for. `dtype` of activations and 16-bit weights is "bfloat16"
    or "float16"; `weights` is the storage of the layers' linears; `kv_dtype` is `dtype` or "fp8"; `images`: the engine
    reads images. `spec` has the sizes of one rank's part, which are the same on all `ranks`. Kernels of one shape serve
    both groups of layers: raises ConfigError for groups that differ."""

    spec: Gemma3Spec
    dtype: str
    weights: WeightFormat
    kv_dtype: str
    page_tokens: int
    images: bool = False
    ranks: int = 1

    def __post_init__(self) -> None:
        check_equal_groups(self.spec, "triton")
        for shape in self._linear_shapes.values() if self.weights.storage == "q4_0" else ():
            if shape.four_bit and (shape.n % 32 or shape.k % 32):
                problem = f"A linear of {shape.n} x {shape.k} weights has no 4-bit kernels, which take multiples of 32."
                raise ConfigError(problem, fix="Build with --dtype bfloat16, or for fewer ranks.")

    @property
    def vocab_size(self) -> int:
        """Size of the whole vocabulary, whose embedding every rank holds, and of which it computes a part's logits."""
        return self.ranks * self.spec.vocab_size

    @cached_property
    def pool_shapes(self) -> dict[str, PoolShape]:
        return {
            g.name: PoolShape(max(1, len(g.layers)), self.page_tokens, g.num_kv_heads, g.head_dim, self.kv_dtype)
            for g in map(self.spec.layer_group, GROUPS)
        }

    @property
    def table_dtype(self) -> str:
        """Dtype of embedding and head: float16 holds those that are stored more precisely than bfloat16."""
        return "float16" if self.weights.head else self.dtype

    def linear_shape(self, role: str, rows: str = roles.WIDE) -> LinearShape:
        """Shape of one of LINEARS as the kernels compute it: GeGLU within gate_up, all others with float32 results.
        With NARROW `rows` gate_up finds the largest values of its rows, which are quantised next."""
        return self._linear_shapes[role, rows]

    @cached_property
    def _linear_shapes(self) -> dict[tuple[str, str], LinearShape]:
        narrow = roles.LINEARS[:-1] if self.weights.fp8 else ()
        kinds = [*((role, roles.WIDE) for role in roles.LINEARS), *((role, roles.NARROW) for role in narrow)]
        return {kind: self._make_linear_shape(*kind) for kind in kinds}

    def _make_linear_shape(self, role: str, rows: str) -> LinearShape:
        spec, group = self.spec, self.spec.layer_group(GLOBAL)
        n, k = {
            "qkv": (group.qkv_size, spec.hidden_size),
            "o": (spec.hidden_size, group.q_size),
            "gate_up": (spec.intermediate_size, spec.hidden_size),
            "down": (spec.hidden_size, spec.intermediate_size),
            "head": (spec.vocab_size, spec.hidden_size),
        }[role]
        weights = self.weights.of_kind(roles.KINDS[role]) if role != "head" else PLAIN[self.table_dtype]
        geglu = role == "gate_up"
        out = self.dtype if geglu else "float32"
        narrow = rows == roles.NARROW
        return LinearShape(n, k, self.dtype, weights, out, narrow, geglu, largest=narrow and geglu)

    def has_scaled_products(self, target: str) -> bool:
        """Tell whether large steps quantize activations and multiply them by the weights as stored."""
        first = SCALED_PRODUCTS.get(self.weights.storage)
        return first is not None and int(target.removeprefix("sm")) >= first

    def most_kernel_rows(self, target: str, role: str) -> int:
        """Most rows for which a linear runs as a Triton kernel; ANY for E4M3 weights without scaled products."""
        if role == "head" and self.table_dtype != self.dtype:
            return ANY
        if role == "head" or not self.weights.fp8:
            return self._row_limits(target)["16-bit" if role == "head" else self.weights.storage]
        return self._row_limits(target)[self.weights.storage] if self.has_scaled_products(target) else ANY

    def most_narrow_rows(self, target: str) -> int:
        """Most rows for which Triton multiplies E4M3 rows; no more than `crossover`: never."""
        return self._row_limits(target)["fp8 rows"] if self.has_scaled_products(target) else 0

    def has_float_sums(self, target: str, least: int, most: int) -> bool:
        """Tell whether a step of `least` to `most` rows has float32 products; large ones may have none."""
        limits = (self.most_kernel_rows(target, "qkv"), self.most_narrow_rows(target), ANY)
        steps = {min(most, limit) for limit in limits}  # the most rows of each kind of product
        return any(self.choose_product(target, "qkv", n).results == "float32" for n in steps if n >= least)

    @staticmethod
    def _row_limits(target: str) -> dict[str, int]:
        limits = DEFAULT_CROSSOVER | CROSSOVER.get(target, {})
        return limits | dict.fromkeys(PLAIN, limits["16-bit"])

    def choose_product(self, target: str, role: str, rows: int) -> roles.MatrixProduct:
        if rows <= self.most_kernel_rows(target, role):
            return roles.KERNEL
        if not self.weights.fp8 or role == "head":
            return roles.MM if self.dtype != "bfloat16" or role == "head" else roles.MM16
        return roles.KERNEL8 if rows <= self.most_narrow_rows(target) else roles.SCALED_MM


@dataclass(frozen=True)
class KernelEntry:
    """Kernel of a role for up to `bucket` rows. `config` is the LinearConfig, DecodeConfig or PrefillConfig that it was
    made from, None for roles whose launch follows from the kernel's constants."""

    role: roles.KernelRole
    bucket: int
    kernel: CompiledKernel
    config: Any = None


_CONFIGS: dict[str, Any] = {
    **{"decode": DecodeConfig, "combine": DecodeConfig, "prefill": PrefillConfig},
    **dict.fromkeys(roles.LINEARS, LinearConfig),
}


def parse_config(role: roles.KernelRole, data: dict[str, Any] | None) -> Any:
    """Read a role's configuration from plain data. Raises TypeError for other fields."""
    kind = _CONFIGS.get(role.operation)
    return kind(**data) if kind and data is not None else None


class KernelTable:
    def __init__(self, target: str, entries: Iterable[KernelEntry]) -> None:
        self.target = target
        self._roles: dict[roles.KernelRole, list[KernelEntry]] = {}
        for entry in sorted(entries, key=lambda e: (str(e.role), e.bucket)):
            self._roles.setdefault(entry.role, []).append(entry)
        self._buckets = {role: [entry.bucket for entry in found] for role, found in self._roles.items()}

    def find_entry(self, role: roles.KernelRole, rows: int) -> KernelEntry:
        """Find the smallest bucket that holds `rows`, else the largest bucket."""
        entries = self._roles[role]
        at = bisect_left(self._buckets[role], rows)
        return entries[min(at, len(entries) - 1)]

    def role_entries(self, role: roles.KernelRole) -> list[KernelEntry]:
        """List a role's entries by ascending bucket; empty for a role that the engine does not need."""
        return list(self._roles.get(role, ()))

    def all_entries(self) -> list[KernelEntry]:
        return [entry for entries in self._roles.values() for entry in entries]
