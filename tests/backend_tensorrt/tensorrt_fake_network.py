"""What a plan computes, in torch on linear caches: Gemma 3 with the inputs and outputs of `backends.tensorrt.plan_io`.

Unlike the product's lowerings it is written to be harsh: a hidden key or value has weight 0 and is multiplied all the
same, so NaN in an entry that should have been cleared reaches the logits; indices out of range are errors.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch.nn import functional as F

from wicore_trt.backends.torch.ops import quantize_rows
from wicore_trt.model.gemma3 import EMBEDDING, LM_HEAD, forward, layer_weight
from wicore_trt.model.spec import LOCAL, Gemma3Spec
from wicore_trt.runtime.dtypes import E4M3

Memory = dict[str, torch.Tensor]


def run_network(spec: Gemma3Spec, memory: Memory, plan: Mapping[str, Any]) -> None:
    """One run of `plan` (`tensorrt_fakes.FakeEngine` says what it is). `memory` has every input and output by name;
    caches and logits are written in place."""
    with torch.inference_mode():
        memory["logits"].copy_(forward(_Ops(spec, memory, plan["kv_dtype"]), spec))


class _Ops:
    """`Ops` over B slots of T tokens; float32 between operators, operands rounded to the caches' dtype."""

    def __init__(self, spec: Gemma3Spec, memory: Memory, kv_dtype: str) -> None:
        self._spec, self._in, self._kv_dtype = spec, memory, kv_dtype
        self._batch, self._chunk = memory["token_ids"].shape
        self._dtype = memory["cache.k.0"].dtype
        assert int(memory["token_ids"].min()) >= 0 and int(memory["token_ids"].max()) < spec.vocab_size
        for group in {*spec.layer_groups}:
            first, lengths = memory[f"write_indices.{group}"], memory[f"kv_lengths.{group}"]
            entries = memory[f"cache.k.{spec.layers_of(group)[0]}"].shape[2]
            assert int(first.min()) >= 0 and int(first.max()) + self._chunk <= entries, f"{group}: writes at {first}"
            assert int(lengths.min()) >= 1 and int(lengths.max()) <= entries, f"{group}: lengths {lengths}"

    def embed(self) -> torch.Tensor:
        table = self._in[EMBEDDING]
        scale = torch.tensor(self._spec.embedding_scale).to(table.dtype).float()
        return table[self._in["token_ids"].flatten().long()].float() * scale

    def norm(self, residual: torch.Tensor, weight: str) -> torch.Tensor:
        return self._unit(residual) * self._in[weight]

    def linear(self, x: torch.Tensor, weight: str) -> torch.Tensor:
        w, x = self._in[weight], x.to(self._dtype).float()
        if w.dtype != E4M3:
            return x @ w.float().T
        static = self._in.get(weight.removesuffix("weight") + "activation_scaling_factor")
        q, scale = quantize_rows(x, None if static is None else float(static))
        return (q.float() @ w.float().T) * scale * self._in[weight + "s_scaling_factor"]

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        return x

    def qk_norm_rope_write(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        spec, group = self._spec, self._spec.layer_groups[layer]
        heads = qkv.view(self._batch, self._chunk, -1, spec.head_dim).transpose(1, 2)
        q, k, v = heads.split([spec.num_heads, spec.num_kv_heads, spec.num_kv_heads], 1)
        q, k = self._unit(q), self._unit(k)
        q = self._rotate(q * self._in[layer_weight(layer, "attention.q_layernorm")], group)
        k = self._rotate(k * self._in[layer_weight(layer, "attention.k_layernorm")], group)
        for part, values in (("k", k), ("v", v)):
            entry = self._entry(values, layer)
            for slot, first in enumerate(self._in[f"write_indices.{group}"].tolist()):
                self._in[f"cache.{part}.{layer}"][slot, :, first : first + self._chunk] = entry[slot]
        return (q * spec.query_pre_attn_scalar**-0.5).to(self._dtype).float()

    def attention(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        spec, group = self._spec, self._spec.layer_groups[layer]
        repeat = spec.num_heads // spec.num_kv_heads
        k, v = (self._in[f"cache.{p}.{layer}"].float().repeat_interleave(repeat, 1) for p in ("k", "v"))
        j = torch.arange(k.shape[2], device=k.device)
        t = torch.arange(self._chunk, device=k.device)[:, None]
        lengths, first = self._in[f"kv_lengths.{group}"], self._in[f"write_indices.{group}"]
        out = []
        for slot in range(self._batch):
            length = int(lengths[slot])
            visible = (j < length).expand(self._chunk, -1)
            if group == LOCAL:
                own = int(first[slot]) + t
                visible = visible & (j <= own) & (j > own - spec.sliding_window)
            else:
                visible = visible & (j <= length - self._chunk + t)
            scores = (q[slot] @ k[slot].transpose(1, 2)).masked_fill(~visible, -torch.inf)
            out.append(scores.softmax(-1) @ v[slot])
        attended = torch.stack(out).to(self._dtype).float()
        return attended.transpose(1, 2).reshape(self._batch * self._chunk, -1)

    def add_norm(
        self, residual: torch.Tensor, x: torch.Tensor, post_weight: str, next_weight: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        residual = residual + self.norm(x, post_weight)
        return residual, self.norm(residual, next_weight)

    def geglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=1)
        return F.gelu(gate, approximate="tanh") * up

    def sampled_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x[self._in["sample_rows"].long()]

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        logits, cap = self.linear(x, LM_HEAD), self._spec.final_logit_softcapping
        return logits if cap is None else torch.tanh(logits / cap) * cap

    def _unit(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self._spec.rms_norm_eps)

    def _rotate(self, x: torch.Tensor, group: str) -> torch.Tensor:
        positions = self._in["positions"].long()
        cos, sin = (self._in[f"rope.{group}.{p}"][positions].unsqueeze(1) for p in ("cos", "sin"))
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)

    def _entry(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        if self._kv_dtype == "fp8":
            name = layer_weight(layer, "attention").removesuffix("weight") + "kv_cache_scaling_factor"
            scale = self._in[name] if name in self._in else x.new_ones(1)
            x = (x / scale).clamp(-448, 448).to(E4M3).float() * scale
        return x.to(self._dtype)
