"""Gemma 3's operators in plain PyTorch, for the CPU and any GPU: the oracle of other lowerings.

Must not know files, requests or sampling. Invariants (I20): residual stream, norms, softmax and sums are float32.
Values are rounded to the engine's dtype only as operands of a matrix product (`_round_operand`) or as keys, values and
queries. A sequence reads only KV slots that its own tokens have written.

Definition of an FP8 product (E4M3, arXiv:2209.05433): each row x of the operand, rounded to the dtype, gets the scale s
= max(abs(x)) / 448 (1 for a row of zeros; or the checkpoint's static activation scale), and x / s saturates at +-448
and is rounded to E4M3, to nearest even. The result is (q @ W.T) * s * weight_scale, the sum in float32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from wicore_trt.arithmetic import div_ceil, first_visible
from wicore_trt.backends.torch.weights import BLOCK_DTYPES, widen_blocks
from wicore_trt.checkpoint.names import activation_scale_name, kv_scale_name, weight_scale_name
from wicore_trt.model.gemma3 import EMBEDDING, LM_HEAD, layer_weight
from wicore_trt.model.spec import Gemma3Spec, LayerGroup
from wicore_trt.runtime.attention_mass import AttentionProbe
from wicore_trt.runtime.dtypes import E4M3, E4M3_MAX, TORCH_DTYPES
from wicore_trt.runtime.exchange import RankExchange
from wicore_trt.runtime.step_inputs import StepInputs

QUERY_BLOCK = 256  # rows of attention scores held at once: heads * 256 * context * 4 bytes


class TorchModel:
    """Weights and KV pages on one device, as `TorchOps` needs them. `tensors` are a tp=1 unified checkpoint's with gate
    and up fused (`backends.torch.weights`). `dtype` of the activations is "float32", "bfloat16" or "float16"; a linear
    is FP8 when its weight is E4M3, and weights stored in blocks are widened to float32. `pools[group]` is [pages,
    layers_in_group, 2, page_tokens, kv_heads, head_dim]. A GPU multiplies in `dtype` with a float32 result. Elsewhere
    weights are widened to float32 once, here, so products of 16-bit or E4M3 values are exact."""

    def __init__(
        self,
        spec: Gemma3Spec,
        dtype: str,
        tensors: Mapping[str, torch.Tensor],
        pools: Mapping[str, torch.Tensor],
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.dtype = TORCH_DTYPES[dtype]
        self.device = device
        self.pools = pools
        self.page_tokens = next(iter(pools.values())).shape[3]
        self.fp8 = {name for name, tensor in tensors.items() if tensor.dtype == E4M3}
        # As transformers does, the factor is rounded to the embedding's dtype; the product stays float32. Where the
        # embedding is kept more precisely than in the engine's dtype, the latter counts.
        embedding = tensors[EMBEDDING].dtype
        exact = embedding in BLOCK_DTYPES or any(tensor.dtype == torch.uint8 for tensor in tensors.values())
        self.embedding_scale = torch.tensor(spec.embedding_scale).to(self.dtype if exact else embedding).item()
        tensors = widen_blocks(tensors)
        self.groups = spec.attention_by_layer
        self.index_in_group = {i: n for g in pools for n, i in enumerate(spec.layers_of(g))}
        on_gpu = device.type == "cuda"
        moved: dict[int, torch.Tensor] = {}  # a tied head stays one tensor
        self.weights: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if id(tensor) not in moved:
                if not on_gpu or tensor.dim() == 1:
                    moved[id(tensor)] = tensor.to(device, torch.float32)
                else:
                    moved[id(tensor)] = tensor.to(device, E4M3 if tensor.dtype == E4M3 else self.dtype)
            self.weights[name] = moved[id(tensor)]
        self.scalars = {n: t.item() for n, t in tensors.items() if t.numel() == 1 and n.endswith("_scaling_factor")}


def sum_embeddings(
    ranks: RankExchange,
    rows: torch.Tensor,
    absent: torch.Tensor,
    images: Sequence[tuple[int, int, int]],
    features: torch.Tensor | None,
) -> torch.Tensor:
    """Complete embeddings, float32 [N, H], that are right on this rank but for the rows `absent`, over all ranks.
    Features of images come from the rank that has them."""
    rows[absent] = 0.0
    for first, count, slot in images:
        rows[first : first + count] = 0.0 if features is None else features[slot, :count]
    return ranks.sum_rows(rows)


class TorchOps:
    """`Ops` of one step; T is a tensor, always float32 between operators. Not bitwise independent of the batch: BLAS
    picks its blocking by the number of rows, so logits move by float32 rounding. `features` [slots, tokens, hidden
    size] hold what the step's images have in place of embeddings."""

    def __init__(
        self,
        model: TorchModel,
        inputs: StepInputs,
        probe: AttentionProbe | None = None,
        features: torch.Tensor | None = None,
        ranks: RankExchange | None = None,
    ) -> None:
        device, spec = model.device, model.spec
        self._model, self._spec, self._probe, self._ranks = model, spec, probe, ranks
        self._token_ids = inputs.token_ids.to(device)
        self._images, self._features, self._key_ends = inputs.images, features, inputs.key_ends
        self._sample_rows = inputs.sample_rows.to(device)
        positions = inputs.positions.to(device)
        bounds = inputs.cu_seqlens.tolist()
        self._rows = list(zip(bounds[:-1], bounds[1:], strict=True))
        self._starts = inputs.positions[inputs.cu_seqlens[:-1].long()].tolist()
        self._tables = inputs.page_tables
        owner = torch.repeat_interleave(torch.arange(len(self._rows)), inputs.cu_seqlens.diff().long())
        page = (inputs.positions // model.page_tokens).long()
        slots = {g: table[owner, page].long() for g, table in inputs.page_tables.items()}
        assert all(int(s.min()) >= 0 for s in slots.values()), "a token of the step has no page"
        self._slots = {g: s.to(device) for g, s in slots.items()}
        self._offset = (positions % model.page_tokens).long()
        self._rope = {g: _rope_table(spec.layer_group(g), positions) for g in inputs.page_tables}

    def embed(self) -> torch.Tensor:
        ids, ranks, table = self._token_ids, self._ranks, self._model.weights[EMBEDDING]
        if ranks is not None:
            ids, absent = ranks.find_own_tokens(ids, len(table))
        rows = table[ids].float() * self._model.embedding_scale
        if ranks is not None:
            return sum_embeddings(ranks, rows, absent, self._images, self._features)
        for first, count, slot in self._images:
            assert self._features is not None
            rows[first : first + count] = self._features[slot, :count]
        return rows

    def norm(self, residual: torch.Tensor, weight: str) -> torch.Tensor:
        return self._rms_norm(residual, weight)

    def linear(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        model = self._model
        w = model.weights[weight]
        operand, scale = _round_operand(x, model.dtype)
        if weight not in model.fp8:
            return _multiply(operand, w, scale)
        quantized, fp8_scale = quantize_rows(operand, model.scalars.get(activation_scale_name(weight)))
        # E4M3 is exact in float16, which every GPU multiplies with float32 sums.
        y = _multiply(quantized.half(), w.half() if w.dtype == E4M3 else w, fp8_scale)
        y = y * model.weights[weight_scale_name(weight)]
        return y if scale is None else y * scale

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x if self._ranks is None else self._ranks.sum_rows(x)

    def qk_norm_rope_write(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        model = self._model
        group = model.groups[layer]
        q, k, v = torch.split(qkv, [group.q_size, group.kv_size, group.kv_size], dim=1)
        q, k, v = (t.view(len(t), -1, group.head_dim) for t in (q, k, v))
        q = _rotate_heads(self._rms_norm(q, layer_weight(layer, "attention.q_layernorm")), *self._rope[group.name])
        k = _rotate_heads(self._rms_norm(k, layer_weight(layer, "attention.k_layernorm")), *self._rope[group.name])
        pool = model.pools[group.name][:, model.index_in_group[layer]]
        kv = torch.stack((k, v), dim=1)  # [N, 2, kv_heads, D]
        if pool.dtype == E4M3:
            kv = (kv / self._kv_scale(layer)).clamp(-E4M3_MAX, E4M3_MAX)
            pool, stored = pool.view(torch.uint8), kv.to(E4M3).view(torch.uint8)  # E4M3 has no index_put
        else:
            stored = kv.to(pool.dtype)
        pool[self._slots[group.name], :, self._offset] = stored
        return q.to(model.dtype).float()

    def attention(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        group = self._model.groups[layer]
        pool = self._model.pools[group.name][:, self._model.index_in_group[layer]]
        scale = self._kv_scale(layer) if pool.dtype == E4M3 else None
        if self._probe is not None and self._probe.layer == layer:
            self._probe.queries, self._probe.key_scale = q[self._probe.rows.to(q.device)], scale or 1.0
        out = torch.empty_like(q)
        for (first, last), start, table in zip(self._rows, self._starts, self._tables[group.name], strict=True):
            for row in range(first, last, QUERY_BLOCK):
                block = slice(row, min(row + QUERY_BLOCK, last))
                at, end = start + row - first, start + block.stop - first
                ends = torch.arange(at + 1, end + 1, device=q.device)
                if self._key_ends is not None:
                    ends, end = self._key_ends[block].to(q.device), int(self._key_ends[block.stop - 1])
                k, v, low = self._gather_keys(pool, table, at, end, group)
                if scale is not None:
                    k, v = k * scale, v * scale
                out[block] = self._attend_block(q[block], k, v, at, ends, low, group)
        return out.flatten(1)

    def add_norm(
        self, residual: torch.Tensor, x: torch.Tensor, post_weight: str, next_weight: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._residual = residual = residual + self._rms_norm(x, post_weight)
        return residual, self._rms_norm(residual, next_weight)

    def geglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return F.gelu(gate, approximate="tanh") * up

    def sampled_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x[self._sample_rows]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        operand, scale = _round_operand(x, self._model.dtype)
        logits = _multiply(operand, self._model.weights[LM_HEAD], scale)
        if self._ranks is not None:
            self._ranks.compare_rows(self._residual, x)
            logits = self._ranks.gather_columns(logits)
        cap = self._spec.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _rms_norm(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], self._model.weights[weight], self._spec.rms_norm_eps)

    def _kv_scale(self, layer: int) -> float:
        return self._model.scalars.get(kv_scale_name(layer), 1.0)

    def _gather_keys(
        self, pool: torch.Tensor, table: torch.Tensor, first: int, end: int, group: LayerGroup
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """Gather K and V [kv_heads, keys, D] float32 of positions [low, end), all that a query at `first` sees; and
        low."""
        size = self._model.page_tokens
        low = first_visible(first, group.window) if group.window else 0
        skipped = low // size
        pages = table[skipped : div_ceil(end, size)].long()
        assert int(pages.min()) >= 0, "a page inside the window is absent"
        kv = pool[pages.to(pool.device)].transpose(0, 1).flatten(1, 2)  # [2, pages * size, kv_heads, D]
        k, v = kv[:, low - skipped * size : end - skipped * size].float().transpose(1, 2)
        return k, v, low

    def _attend_block(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        first: int,
        ends: torch.Tensor,
        low: int,
        group: LayerGroup,
    ) -> torch.Tensor:
        """Compute [n, heads, D] for queries at positions first, first + 1, ..., which see keys before `ends` ([n],
        ascending); keys begin at position low. A window limits what comes before a query alone."""
        n, kv_heads, keys = q.shape[0], k.shape[0], k.shape[1]
        # query head h reads KV head h // (heads / kv_heads)
        grouped = q.view(n, kv_heads, -1, q.shape[2]).permute(1, 2, 0, 3)  # [kv_heads, repeat, n, D]
        scores = (grouped.flatten(1, 2) @ k.transpose(1, 2)).view(kv_heads, -1, n, keys)
        scores = scores * group.softmax_scale
        key = torch.arange(low, low + keys, device=q.device)
        hidden = key >= ends[:, None]
        if group.window:
            hidden |= key <= torch.arange(first, first + n, device=q.device)[:, None] - group.window
        weights = scores.masked_fill(hidden, -math.inf).softmax(-1)
        attended: torch.Tensor = weights.flatten(1, 2) @ v
        return attended.view(kv_heads, -1, n, q.shape[2]).permute(2, 0, 1, 3).flatten(1, 2)


def _rope_table(group: LayerGroup, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Make cos and sin float32 [N, 1, D / 2]; the linear factor stretches global layers only."""
    exponents = torch.arange(0, group.head_dim, 2, dtype=torch.float32) / group.head_dim
    frequencies = (1.0 / group.rope_theta**exponents / group.rope_factor).to(positions.device)
    angles = positions.float()[:, None, None] * frequencies
    return angles.cos(), angles.sin()


def _rotate_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotary embedding of [N, heads, D] by halves: pair i is (x[i], x[i + D / 2])."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


def _round_operand(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Round rows to operands in `dtype`; also return the factor [N, 1] that the product's rows need, if any. A row with
    values beyond float16 is scaled by an exact power of two, never clipped: gate * up has no bound."""
    if dtype != torch.float16:
        return x.to(dtype), None
    exponent = torch.frexp(x.abs().amax(-1, keepdim=True)).exponent
    scale = torch.ldexp(torch.ones_like(x[:, :1]), (exponent - 15).clamp_min(0))
    return (x / scale).half(), scale


def quantize_rows(x: torch.Tensor, static_scale: float | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x [N, K] to E4M3 rows and scales float32 [N, 1], as the module's docstring defines."""
    x = x.float()
    if static_scale is None:
        largest = x.abs().amax(-1, keepdim=True)
        scale = largest / torch.full_like(largest, E4M3_MAX)  # by a number torch's CUDA multiplies with its reciprocal
        scale = torch.where(scale == 0, 1.0, scale)
    else:
        scale = x.new_full((x.shape[0], 1), static_scale)
    return (x / scale).clamp(-E4M3_MAX, E4M3_MAX).to(E4M3), scale


def _multiply(x: torch.Tensor, w: torch.Tensor, row_scale: torch.Tensor | None) -> torch.Tensor:
    """Compute float32 (x @ w.T) * row_scale: exact products, summed in float32."""
    y = x.float() @ w.T if w.dtype == torch.float32 else torch.mm(x, w.T, out_dtype=torch.float32)
    return y if row_scale is None else y * row_scale
