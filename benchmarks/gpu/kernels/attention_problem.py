"""Problems for the attention kernels on a GPU: shapes, pools with tables in random order, and float64 results.

Knows no kernel. Invariant: what no query sees is NaN where a problem is poisoned, and pages outside of windows are
absent. Needs torch with CUDA; nothing when imported.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from wicore_trt.arithmetic import div_ceil

if TYPE_CHECKING:
    import torch


def pointer(tensor: torch.Tensor) -> int:
    return int(tensor.data_ptr())


@dataclass(frozen=True)
class AttentionSizes:
    name: str
    heads: int
    kv_heads: int
    head_dim: int
    page_tokens: int
    layers: int


@dataclass(frozen=True)
class Point:
    """`rows` sequences of `context` keys; the last `tokens` of them are queries (0: decode)."""

    model: AttentionSizes
    rows: int
    context: int
    window: int = 0
    kv: str = "bfloat16"
    tokens: int = 0

    def __str__(self) -> str:
        what = f"prefill {self.rows}x{self.tokens}" if self.tokens else f"decode B={self.rows}"
        return f"{self.model.name} {what} ctx {self.context} window {self.window} KV {self.kv}"

    @property
    def seen(self) -> int:
        return min(self.context, self.window or self.context)

    def cost(self) -> tuple[float, float]:
        """Bytes of keys and values, FLOPs."""
        m = self.model
        item = 1 if self.kv == "fp8" else 2
        low = min(self.context, self.seen + max(self.tokens - 1, 0)) if self.window else self.context
        pairs = sum(min(p + 1, self.window or p + 1) for p in range(self.context - max(self.tokens, 1), self.context))
        return 2.0 * self.rows * low * m.kv_heads * m.head_dim * item, 4.0 * m.heads * m.head_dim * self.rows * pairs


class AttentionProblem:
    """A pool of `layers` layers with tables in random order. Slots that nobody sees hold NaN when `poison` is set."""

    def __init__(self, point: Point, lengths: list[int], layers: int, device: str, poison: bool = False) -> None:
        import torch

        from wicore_trt.plugins.layout import Pool, PoolShape, Tables

        m, self.point, self.device, self.lengths = point.model, point, device, lengths
        self.shape = PoolShape(layers, m.page_tokens, m.kv_heads, m.head_dim, point.kv)
        columns = max(1, div_ceil(max(lengths), m.page_tokens))
        pages = len(lengths) * columns
        fp8 = torch.float8_e4m3fn
        form = (layers, 2, m.page_tokens, m.kv_heads, m.head_dim)
        self.kv = torch.empty(pages, *form, dtype=fp8 if point.kv == "fp8" else torch.bfloat16, device=device)
        for page in range(pages):
            self.kv[page] = torch.randn(form, device=device).to(self.kv.dtype)
        tables = torch.randperm(pages).view(len(lengths), columns)
        for s, length in enumerate(lengths):
            first = max(0, length - max(point.tokens, 1) + 1 - point.window) if point.window else 0
            for j in range(columns):
                inside = [first <= j * m.page_tokens + t < length for t in range(m.page_tokens)]
                if poison and not all(inside):
                    hidden = ~torch.tensor(inside, device=device)
                    nan = torch.full((), torch.nan, device=device).to(self.kv.dtype)
                    where = hidden.view(1, 1, -1, 1, 1).expand(form)
                    bits = torch.uint8 if point.kv == "fp8" else torch.int16
                    page_bits = self.kv[tables[s, j]].view(bits)
                    page_bits[where] = nan.view(bits)
                if not any(inside):
                    tables[s, j] = -1
        self.tables = tables.int().to(device)
        self.scale = torch.full((1,), 0.5, device=device)
        self.unit = 0.5 if point.kv == "fp8" else 1.0
        self.raw = self.kv.view(torch.uint8) if point.kv == "fp8" else self.kv
        self.pools = [Pool(pointer(self.raw[:, i:]), self.shape, pointer(self.scale)) for i in range(layers)]
        self.table = Tables(pointer(self.tables), len(lengths), columns)
        tokens = [min(point.tokens, n) if point.tokens else 1 for n in lengths]
        self.bounds = [sum(tokens[:i]) for i in range(len(tokens) + 1)]
        ints: dict[str, Any] = {"dtype": torch.int32, "device": device}
        self.kv_lengths = torch.tensor(lengths, **ints)
        self.cu = torch.tensor(self.bounds, **ints)
        self.first = torch.tensor([n - t for n, t in zip(lengths, tokens, strict=True)], **ints)
        self.q = torch.randn(self.bounds[-1], m.heads, m.head_dim, device=device).to(torch.bfloat16)
        self.out = torch.full_like(self.q, torch.nan)
        self.keep: list[Any] = []

    def dense(self, layer: int, s: int) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 K, V [length, kv_heads, D] of a sequence as stored; zeros for pages that are absent."""
        import torch

        table = self.tables[s].long()
        page = self.kv[table.clamp(min=0), layer].to(torch.float64) * (table >= 0).view(-1, 1, 1, 1, 1)
        k, v = page[:, 0].flatten(0, 1), page[:, 1].flatten(0, 1)
        return (k * self.unit)[: self.lengths[s]], (v * self.unit)[: self.lengths[s]]

    def weights(self, layer: int, s: int) -> torch.Tensor:
        """float64 [heads, tokens, length]."""
        import torch

        m, n = self.point.model, self.lengths[s]
        k, _ = self.dense(layer, s)
        q = self.q[self.bounds[s] : self.bounds[s + 1]].double()
        scores = torch.einsum("thd,phd->htp", q, k.repeat_interleave(m.heads // m.kv_heads, 1)) * m.head_dim**-0.5
        behind = torch.arange(n - len(q), n, device=self.device)[:, None] - torch.arange(n, device=self.device)
        hidden = (behind < 0) | ((behind >= self.point.window) if self.point.window else False)
        weights: torch.Tensor = scores.masked_fill(hidden, -torch.inf).softmax(-1)
        return weights

    def worst(self, layer: int) -> float:
        """Largest error of `out` over what rounding of weights and results allows; above 1 is wrong."""
        import torch

        m, worst = self.point.model, 0.0
        for s, length in enumerate(self.lengths):
            got = self.out[self.bounds[s] : self.bounds[s + 1]].double()
            if not length:
                worst = max(worst, 0.0 if not got.any() else 99.0)
                continue
            w, (_, v) = self.weights(layer, s), self.dense(layer, s)
            v = v.nan_to_num(0.0).repeat_interleave(m.heads // m.kv_heads, 1)  # NaN lies where the weight is 0
            want, size = torch.einsum("htp,phd->thd", w, v), torch.einsum("htp,phd->thd", w, v.abs())
            ratio = (got - want).abs() / (size * (2 * 2.0**-8 + 4e-6) + 1e-6)
            worst = max(worst, ratio.nan_to_num(nan=99.0, posinf=99.0).max().item())
        return worst
