"""Gemma 3's operators on the native CPU kernels (plugins/cpu).

Operators are recorded, and run in one call of the library when logits are asked for. So a step releases the GIL once,
and a step with as many rows as the last one runs its operators again, without Python between them.
Must not know files, requests or sampling. Invariants: steady state allocates nothing; a row's bits are the same in any
batch, chunking, page slots and number of threads (I21).

A T here is a scratch buffer, one per kind of value, valid until the next operator of its kind:
`model.gemma3.forward` uses each at once, except for the residual, which is updated in place.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from wicore_trt.backends.torch import native_args
from wicore_trt.backends.torch.native import NativeLibrary
from wicore_trt.backends.torch.native_args import OPERANDS, PackedWeight
from wicore_trt.backends.torch.ops import sum_embeddings
from wicore_trt.backends.torch.weights import BLOCK_DTYPES
from wicore_trt.checkpoint.names import activation_scale_name, kv_scale_name, weight_minimum_name, weight_scale_name
from wicore_trt.model.gemma3 import EMBEDDING, LM_HEAD, forward, layer_weight
from wicore_trt.model.spec import Gemma3Spec, LayerGroup
from wicore_trt.runtime.attention_mass import AttentionProbe
from wicore_trt.runtime.dtypes import E4M3, TORCH_DTYPES
from wicore_trt.runtime.exchange import RankExchange
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.runtime.step_inputs import StepInputs

ROPE_BLOCK = 4096  # positions by which the rotary tables grow


def explain_unsupported(spec: Gemma3Spec, kv_dtype: str, tensor_names: Collection[str]) -> str | None:
    """Explain why the native kernels cannot run an engine; None if they can."""
    multiple, most = native_args.HEAD_DIM_MULTIPLE, native_args.MAX_HEAD_DIM
    sizes = [spec.layer_group(group).head_dim for group in spec.groups]
    if wrong := [size for size in sizes if size % multiple or size > most]:
        return f"head_dim {wrong[0]} is not a multiple of {multiple} up to {most}"
    if TORCH_DTYPES[kv_dtype] not in native_args.DTYPE_CODES:
        return f"KV in {kv_dtype}"
    static = {kv_scale_name(i) for i in range(spec.num_layers)}
    static |= {activation_scale_name(n) for n in tensor_names if n.endswith(".weight")}
    if found := static & set(tensor_names):
        return f"static scales ({min(found)})"
    return None


@dataclass(frozen=True, slots=True)
class NativeWeights:
    """Packed matrices and float32 norms by unified name; `head` is the embedding when they are tied."""

    packed: dict[str, PackedWeight]
    norms: dict[str, torch.Tensor]

    @classmethod
    def from_tensors(
        cls, lib: NativeLibrary, tensors: Mapping[str, torch.Tensor], spec: Gemma3Spec, dtype: str
    ) -> NativeWeights:
        """Pack `tensors`, which are as `weights.fuse_weights` returns them. Packing copies: drop `tensors` afterwards.
        `dtype` of the activations is "float32", "bfloat16" or "float16"; matrices are converted to it, but for blocks
        and a float16 embedding or head, which stay. E4M3 ones (scales float32 [out] beside them) need "bfloat16"."""
        packed: dict[str, PackedWeight] = {}
        norms: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            if not name.endswith(".weight"):
                continue
            if tensor.dim() == 1:
                norms[name] = tensor.to(torch.float32).contiguous()
            elif name != LM_HEAD or not spec.tie_word_embeddings:
                assert tensor.dtype != E4M3 or dtype == "bfloat16", "FP8 engines run with bfloat16 activations"
                kept = tensor.dtype in (E4M3, *BLOCK_DTYPES)
                parts = [tensors.get(name_of(name)) for name_of in (weight_scale_name, weight_minimum_name) if kept]
                if not kept and not (tensor.dtype == torch.float16 and name in (EMBEDDING, LM_HEAD)):
                    tensor = tensor.to(TORCH_DTYPES[dtype])
                packed[name] = lib.pack(tensor, *parts, dtype=TORCH_DTYPES[dtype])
        packed.setdefault(LM_HEAD, packed[EMBEDDING])
        return cls(packed, norms)


class NativeOps:
    """`Ops` of one engine, reused for every step by one thread. `pools[group]` is [pages, layers_in_group, 2,
    page_tokens, kv_heads, head_dim]. Logits are valid until the next step."""

    def __init__(
        self,
        lib: NativeLibrary,
        weights: NativeWeights,
        spec: Gemma3Spec,
        dtype: str,
        layout: KVLayout,
        pools: dict[str, torch.Tensor],
        ranks: RankExchange | None = None,
    ) -> None:
        assert all(p.shape[3] == layout.page_tokens for p in pools.values())
        self._lib, self._weights, self._spec, self._ranks = lib, weights, spec, ranks
        self._dtype = TORCH_DTYPES[dtype]
        self._operand = OPERANDS[self._dtype]
        embedding = weights.packed[EMBEDDING]
        self._embedding_scale = torch.tensor(spec.embedding_scale).to(embedding.dtype).item()
        self._geometry = {g: native_args.StepGeometry() for g in pools}
        self._groups = spec.attention_by_layer
        self._kv = [
            native_args.layer_kv(pools[g.name], g.layers.index(i), g.num_heads, self._geometry[g.name])
            for i, g in enumerate(self._groups)
        ]
        q_size, qkv_size = (max(getattr(g, size) for g in self._groups) for size in ("q_size", "qkv_size"))
        operand = max(q_size, spec.intermediate_size, spec.hidden_size)
        self._widest = {"q": q_size, "operand": operand, "quantized": operand,
                        "product": max(qkv_size, 2 * spec.intermediate_size, spec.hidden_size)}  # fmt: skip
        self._rope: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rope_length = 0
        self._capacity, self._rows = {"tokens": 1, "samples": 1}, dict[str, int]()
        self._buffers: dict[str, torch.Tensor] = {}
        self._args: dict[str, native_args.Args] = {}
        self._steps: list[native_args.Args] = []
        self._inputs: StepInputs
        self._features: torch.Tensor | None = None
        self._counting = torch.arange(0)
        self._probe: AttentionProbe | None = None
        self._commands: Any = ()
        self._again: tuple[dict[str, int], Any, torch.Tensor] | None = None  # rows, commands, logits of the last step

    def compute_logits(
        self, inputs: StepInputs, probe: AttentionProbe | None = None, features: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Compute a step by `model.gemma3.forward`. `probe` has its queries once logits are there. `features`
        [slots, tokens, hidden size] hold what the step's images have in place of embeddings."""
        again, self._again = self._again, None
        stale = self._take_step(inputs, probe, features)
        usual = self._ranks is None and probe is None and not inputs.images
        if again is None or stale or not usual or again[0] != self._rows:
            out = forward(self, self._spec)
            commands = self._commands
        else:
            _, commands, out = again
            self._args["embed"].index = inputs.token_ids.data_ptr()
            self._args["gather"].index = inputs.sample_rows.data_ptr()
            self._lib.run_again(commands)
            self._cap_logits(out)
        self._again = (self._rows, commands, out) if usual else None
        return out

    def _take_step(self, inputs: StepInputs, probe: AttentionProbe | None, features: torch.Tensor | None) -> bool:
        """Take the next step's geometry. Scratch grows to the largest step seen; return whether it was made anew."""
        self._inputs, self._probe, self._features, self._steps = inputs, probe, features, []
        last = int(inputs.positions.numpy().max())
        self._rows = {"tokens": inputs.token_ids.shape[0], "samples": inputs.sample_rows.shape[0]}
        stale = last >= self._rope_length
        if stale:
            length = (last // ROPE_BLOCK + 1) * ROPE_BLOCK
            self._rope = {g: rope_table(self._spec.layer_group(g), length) for g in self._geometry}
            self._rope_length = length  # last: tables that memory lacked for are made by the next step
        for count, rows in self._rows.items():
            if rows > self._capacity[count]:
                self._capacity[count], stale = 1 << (rows - 1).bit_length(), True
        if stale:
            self._args, self._buffers = {}, {}  # they point to each other; rebuilt as the step asks for them
        for group, step in self._geometry.items():
            table = inputs.page_tables[group]
            native_args.set_step(step, inputs.cu_seqlens, inputs.positions, table, inputs.key_ends)
        return stale

    def embed(self) -> torch.Tensor:
        out = self._find_buffer("residual", torch.float32, self._spec.hidden_size)
        index = self._find_buffer("token index", torch.int64, 1).flatten()
        table, ids, ranks = self._weights.packed[EMBEDDING], self._inputs.token_ids, self._ranks
        if ranks is not None:
            ids, absent = ranks.find_own_tokens(ids, table.n)
        given = index, table, self._embedding_scale, out
        self._record_operator("embed", native_args.make_embed, *given, index=ids)
        if ranks is not None:
            self._run_steps()
            sum_embeddings(ranks, out[: len(ids)], absent, self._inputs.images, self._features)
            return out
        for first, count, slot in self._inputs.images:
            assert self._features is not None
            if len(self._counting) != count:
                self._counting = torch.arange(count)
            rows = self._features[slot, :count].to(torch.float32).contiguous()
            self._steps.append(native_args.make_gather(rows, self._counting, out[first : first + count]))
        return out

    def norm(self, residual: torch.Tensor, weight: str) -> torch.Tensor:
        out = self._find_buffer("operand", self._operand, self._spec.hidden_size)
        given = residual, self._weights.norms[weight], self._spec.rms_norm_eps, self._dtype, out
        return self._record_operator(weight, native_args.make_norm, *given)

    def linear(self, x: torch.Tensor, weight: str, kind: str = "product", count: str = "tokens") -> torch.Tensor:
        """Extends `Ops.linear`: `kind` and `count` choose the results' buffer."""
        packed, quantized = self._weights.packed[weight], None
        out = self._find_buffer(kind, torch.float32, packed.n, count)
        if packed.scale is not None:
            scale = self._find_buffer("quantized_scale", torch.float32, 1)
            quantized = self._find_buffer("quantized", torch.bfloat16, packed.k), scale
        self._record_operator(weight, native_args.make_linear, x, packed, out, quantized, count=count)
        return out

    def reduce(self, x: torch.Tensor) -> torch.Tensor:
        if self._ranks is not None:
            self._run_steps()
            self._ranks.sum_rows(x[: self._rows["tokens"]])
        return x

    def qk_norm_rope_write(self, qkv: torch.Tensor, layer: int) -> torch.Tensor:
        group, norms = self._groups[layer], self._weights.norms
        q = self._find_buffer("q", self._operand, group.q_size).view(-1, group.num_heads, group.head_dim)
        weights = tuple(norms[layer_weight(layer, f"attention.{part}_layernorm")] for part in "qk")
        given = qkv, weights, self._rope[group.name], self._spec.rms_norm_eps, self._dtype, self._kv[layer], q
        return self._record_operator(f"rope {layer}", native_args.make_qk_norm_rope_write, *given)

    def attention(self, q: torch.Tensor, layer: int) -> torch.Tensor:
        group = self._groups[layer]
        out = self._find_buffer("operand", self._operand, group.q_size)
        if self._probe is not None and self._probe.layer == layer:  # the next layer overwrites q
            kept = self._probe.queries = q.new_empty((self._probe.rows.shape[0], *q.shape[1:]))
            self._steps.append(native_args.make_gather(q, self._probe.rows, kept))
        given = q, self._kv[layer], group.window, group.softmax_scale, self._dtype, out
        return self._record_operator(f"attention {layer}", native_args.make_attention, *given)

    def add_norm(
        self, residual: torch.Tensor, x: torch.Tensor, post_weight: str, next_weight: str
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out = self._find_buffer("operand", self._operand, self._spec.hidden_size)
        weights = self._weights.norms[post_weight], self._weights.norms[next_weight]
        given = residual, x, weights, self._spec.rms_norm_eps, self._dtype, out
        return residual, self._record_operator(post_weight, native_args.make_add_norm, *given)

    def geglu(self, gate_up: torch.Tensor) -> torch.Tensor:
        out = self._find_buffer("operand", self._operand, self._spec.intermediate_size)
        return self._record_operator("geglu", native_args.make_geglu, gate_up, self._dtype, out)

    def sampled_rows(self, x: torch.Tensor) -> torch.Tensor:
        out = self._find_buffer("sampled", self._operand, self._spec.hidden_size, "samples")
        rows = self._find_buffer("sample index", torch.int64, 1, "samples").flatten()
        index = self._inputs.sample_rows
        return self._record_operator("gather", native_args.make_gather, x, rows, out, index=index, count="samples")

    def logits(self, x: torch.Tensor) -> torch.Tensor:
        out = self.linear(x, LM_HEAD, "logits", "samples")[: self._rows["samples"]]
        self._run_steps()
        if self._ranks is not None:
            residual = self._find_buffer("residual", torch.float32, self._spec.hidden_size)
            self._ranks.compare_rows(residual[: self._rows["tokens"]], x[: self._rows["samples"]])
            out = self._ranks.gather_columns(out)
        return self._cap_logits(out)

    def _cap_logits(self, out: torch.Tensor) -> torch.Tensor:
        cap = self._spec.final_logit_softcapping
        return out if cap is None else out.div_(cap).tanh_().mul_(cap)

    def _run_steps(self) -> None:
        self._commands = self._lib.run(self._steps)
        self._steps = []

    def _record_operator(
        self,
        key: str,
        make: Callable[..., native_args.Args],
        *given: Any,
        index: torch.Tensor | None = None,
        count: str = "tokens",
    ) -> torch.Tensor:
        """Append an operator to the step, made by `make(*given)` for full buffers at its first use. `index` is the
        step's. Returns the last of `given`, the operator's output."""
        args = self._args.get(key)
        if args is None:
            args = self._args[key] = make(*given)
        args.rows = self._rows[count]
        if index is not None:
            args.index = index.data_ptr()
        self._steps.append(args)
        out: torch.Tensor = given[-1]
        return out

    def _find_buffer(self, kind: str, dtype: torch.dtype, width: int, count: str = "tokens") -> torch.Tensor:
        """Find or make scratch [capacity, width]; buffers of a kind share memory whatever their width."""
        key = f"{kind} {width}"
        if key not in self._buffers:
            rows = self._capacity[count]
            if kind not in self._buffers:
                self._buffers[kind] = torch.empty(rows * self._widest.get(kind, width), dtype=dtype)
            self._buffers[key] = self._buffers[kind][: rows * width].view(rows, width)
        return self._buffers[key]


def rope_table(group: LayerGroup, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make cos and sin float32 [length, head_dim / 2] of one layer group, by position. Angles are float32 products as
    in transformers. Cosines are taken in float64 and rounded, so that values do not depend on the table's length."""
    exponents = torch.arange(0, group.head_dim, 2, dtype=torch.float32) / group.head_dim
    frequencies = 1.0 / group.rope_theta**exponents / group.rope_factor
    angles = (torch.arange(length, dtype=torch.float32)[:, None] * frequencies).double()
    return angles.cos().float(), angles.sin().float()
