"""Which kernel an operation of a step runs, by role and number of rows, and what shapes an engine's kernels are for.

Plain data: it loads neither Triton nor torch, so that an engine's kernels can be listed, loaded and launched without
them. It must not know how kernels are compiled or stored. Invariant: the kernel of a role depends on the bucket of the
number of rows alone.

Roles: "embed_norm", "add_norm", "final_norm", "qk_rope"; linears "qkv", "o", "gate_up", "down", "head"; "geglu",
"quantize"; "decode", "combine", "prefill"; "scan", "choose", and where rows are drawn "scan.sampled",
"choose.sampled", "collect", "draw", "wide". With FP8 products there are "embed_norm.fp8",
"add_norm.fp8", "final_norm.fp8", "qk_rope.fp8" and "geglu.fp8" too, which take or give what those products do; for
Triton's own products of E4M3 rows "add_norm.x8", "quantize_act" and linears ".x8"; and ".r16" of those that take the
bfloat16 results of cuBLAS.
Linears have one more each, ".invariant", for any number of rows. "page_digest" runs beside steps, on KV pages that
leave the device or came to it; engines built before it have none, and the CPU checks their pages. "page_logsums" and
"page_masses" measure attention; engines built before them do not. "prefill.segments", "gather" and "add_segment" leave
keys that all rows of a long slice see to a product of cuDNN (`backends.triton.segments`); "prefill.splits" and
"add_splits" share the keys of few tokens between programs. Engines built before these, and for targets that they were
not measured on, have none.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from wicore_trt.model.spec import GROUPS, Gemma3Spec
from wicore_trt.plugins.aot import CompiledKernel
from wicore_trt.plugins.decode_layout import DecodeConfig, PrefillConfig
from wicore_trt.plugins.layout import PoolShape
from wicore_trt.plugins.linear_layout import LinearConfig, LinearShape
from wicore_trt.weight_format import PLAIN, WeightFormat

ANY = (1 << 31) - 1
"""The bucket that holds any number of rows."""
DECODE_BUCKETS = (1, 2, 4, 6, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256)
"""Rows of a decode step, rounded up to these."""
SPLIT_TOKENS, KEPT_TOKENS, PROMPT_CHUNKS = 384, 768, 4
"""The most tokens of a step whose prompts' keys are split, and of one whose queries are kept until it is over; the most
prompts in a graph."""
_FEW = (32, *range(64, SPLIT_TOKENS + 1, 64))
_MORE = (*_FEW, *range(SPLIT_TOKENS + 64, KEPT_TOKENS + 1, 64))
PROMPT_BUCKETS = {
    0: (*_FEW, *range(KEPT_TOKENS + 64, 1537, 64)),
    4: _FEW,
    **{singles: tuple(tokens for tokens in _MORE if tokens >= 2 * singles) for singles in (16, 32, 64, 128)},
}
"""Tokens of a step with prompts in a graph, rounded up to one of these, by the number of sequences that decode a token
each of them, rounded up too. A larger step takes a GPU longer than the host that launches it kernel by kernel; prompts
alone run in graphs of up to 1,536, because beside threads that read a disk the host takes more than twice as long."""
LINEARS = ("qkv", "o", "gate_up", "down", "head")
LINEAR_ROLES = {"attention.qkv": "qkv", "attention.dense": "o", "mlp.gate_up": "gate_up", "mlp.proj": "down"}
INVARIANT, SAMPLED = ".invariant", ".sampled"
FP8, X8, R16 = ".fp8", ".x8", ".r16"
PAGE_DIGEST = "page_digest"
PAGE_LOGSUMS, PAGE_MASSES = "page_logsums", "page_masses"
SEGMENT_ROLES = PREFILL_SEGMENTS, GATHER, ADD_SEGMENT = "prefill.segments", "gather", "add_segment"
PREFILL_SPLITS, ADD_SPLITS = "prefill.splits", "add_splits"

KERNEL, KERNEL8, MM, MM16, SCALED_MM = "kernel", "kernel8", "mm", "mm16", "scaled_mm"
"""How a step multiplies by a layer's weights: Triton kernels of 16-bit rows or of E4M3 rows, torch.mm (cuBLAS) with
float32 or with bfloat16 results, or torch._scaled_mm of E4M3 rows, whose results are bfloat16."""

DEFAULT_CROSSOVER = {"16-bit": 16, "fp8": 64, "fp8 rows": 0, "float32 results": 0}
CROSSOVER: dict[str, dict[str, int]] = {"sm90": {"16-bit": 64, "fp8": 8, "fp8 rows": 128, "float32 results": 0}}
"""By target what was measured instead of DEFAULT_CROSSOVER: the most rows for which Triton kernels are faster than
cuBLAS by 16-bit weights ("16-bit"), than products of E4M3 rows by E4M3 weights ("fp8"), and the most rows for which
Triton's own of those are faster than cuBLAS's ("fp8 rows"). "float32 results": the most rows for which cuBLAS writes
float32 results in a bfloat16 engine (ANY: always).

bfloat16 results halve what large steps write and read between kernels. They are a rounding that the oracle does not
have, of half a unit in bfloat16's last place once per product, as every other bfloat16 engine rounds; sums stay
float32. Products of Triton's kernels, so all of a batch-invariant engine, of float16 (results may exceed 65,504) and
the logits are float32 for any number of rows."""
SCALED_PRODUCTS = {"fp8": 89}
"""By the storage of weights the first architecture whose matrix units take them with rows quantized alike."""


@dataclass(frozen=True)
class EngineShape:
    """What an engine's kernels are for. `dtype` is that of activations and 16-bit weights, "bfloat16" or "float16";
    `weights`: how the linears of the layers are stored; `kv_dtype` is `dtype` or "fp8"."""

    spec: Gemma3Spec
    dtype: str
    weights: WeightFormat
    kv_dtype: str
    page_tokens: int

    def pool(self, group: str) -> PoolShape:
        return self._pools[group]

    @cached_property
    def _pools(self) -> dict[str, PoolShape]:
        spec, layers = self.spec, {group: max(1, len(self.spec.layers_of(group))) for group in GROUPS}
        sizes = (self.page_tokens, spec.num_kv_heads, spec.head_dim, self.kv_dtype)
        return {group: PoolShape(count, *sizes) for group, count in layers.items()}

    def linear(self, role: str, *, rows8: bool = False) -> LinearShape:
        """Shape of one of LINEARS as the kernels compute it: GeGLU within gate_up, all others with float32 results.
        `rows8`: of E4M3 rows; gate_up then finds the largest values of its rows, which are quantised next."""
        return self._linears[role, rows8]

    @cached_property
    def _linears(self) -> dict[tuple[str, bool], LinearShape]:
        kinds = [(role, rows8) for role in LINEARS for rows8 in (False, self.weights.quantized and role != "head")]
        return {kind: self._linear(*kind) for kind in kinds}

    def _linear(self, role: str, rows8: bool) -> LinearShape:
        spec = self.spec
        n, k = {
            "qkv": (spec.q_size + 2 * spec.kv_size, spec.hidden_size),
            "o": (spec.hidden_size, spec.q_size),
            "gate_up": (spec.intermediate_size, spec.hidden_size),
            "down": (spec.hidden_size, spec.intermediate_size),
            "head": (spec.vocab_size, spec.hidden_size),
        }[role]
        weights = self.weights if role != "head" else PLAIN[self.dtype]
        geglu = role == "gate_up"
        out = self.dtype if geglu else "float32"
        return LinearShape(n, k, self.dtype, weights, out, rows8, geglu, largest=rows8 and geglu)

    def scaled_products(self, target: str) -> bool:
        """Whether large steps quantize activations and multiply them by the weights as they are stored."""
        first = SCALED_PRODUCTS.get(self.weights.storage)
        return first is not None and int(target.removeprefix("sm")) >= first

    def crossover(self, target: str, role: str) -> int:
        """Most rows for which a linear runs as a Triton kernel. Quantized weights that no product takes: always."""
        if role == "head" or not self.weights.quantized:
            return self._limits(target)["16-bit"]
        return self._limits(target)[self.weights.storage] if self.scaled_products(target) else ANY

    def crossover8(self, target: str) -> int:
        """Most rows for which Triton multiplies E4M3 rows; no more than `crossover`: never."""
        return self._limits(target)["fp8 rows"] if self.scaled_products(target) else 0

    def float32_results(self, target: str) -> int:
        """Most rows for which cuBLAS's products of bfloat16 rows have float32 results."""
        return self._limits(target)["float32 results"]

    def narrow_results(self, target: str) -> bool:
        """Whether steps exist whose products are MM16."""
        return self.product(target, "qkv", ANY) == MM16

    @staticmethod
    def _limits(target: str) -> dict[str, int]:
        return DEFAULT_CROSSOVER | CROSSOVER.get(target, {})

    def product(self, target: str, role: str, rows: int) -> str:
        """KERNEL, KERNEL8, MM, MM16 or SCALED_MM for a step of `rows` rows."""
        if rows <= self.crossover(target, role):
            return KERNEL
        if not self.weights.quantized or role == "head":
            wide = self.dtype != "bfloat16" or role == "head" or rows <= self.float32_results(target)
            return MM if wide else MM16
        return KERNEL8 if rows <= self.crossover8(target) else SCALED_MM


@dataclass(frozen=True)
class Entry:
    """The kernel of a role for up to `bucket` rows. `config` is the LinearConfig, DecodeConfig or PrefillConfig that it
    was made from, None for roles whose launch follows from the kernel's constants."""

    role: str
    bucket: int
    kernel: CompiledKernel
    config: Any = None


def config_of(role: str, data: dict[str, Any] | None) -> Any:
    """The configuration of a role from plain data. Raises TypeError for other fields."""
    kinds = {"decode": DecodeConfig, "combine": DecodeConfig, "prefill": PrefillConfig}
    kind = kinds.get(role.split(".")[0]) or (LinearConfig if role.split(".")[0] in LINEARS else None)
    return kind(**data) if kind and data is not None else None


class KernelTable:
    """All kernels of an engine for one target."""

    def __init__(self, target: str, entries: Iterable[Entry]) -> None:
        self.target = target
        self._roles: dict[str, list[Entry]] = {}
        for entry in sorted(entries, key=lambda e: (e.role, e.bucket)):
            self._roles.setdefault(entry.role, []).append(entry)
        self._buckets = {role: [entry.bucket for entry in found] for role, found in self._roles.items()}

    def find(self, role: str, rows: int) -> Entry:
        """The entry of the smallest bucket that holds `rows`, else the largest bucket's."""
        entries = self._roles[role]
        at = bisect_left(self._buckets[role], rows)
        return entries[min(at, len(entries) - 1)]

    def entries(self, role: str) -> list[Entry]:
        """Entries of a role by bucket, ascending; none for a role that the engine does not need."""
        return list(self._roles.get(role, ()))

    def all(self) -> list[Entry]:
        return [entry for entries in self._roles.values() for entry in entries]

    @property
    def kernel_names(self) -> list[str]:
        """Names of all kernels, sorted, each once."""
        return sorted({entry.kernel.name for entry in self.all()})
