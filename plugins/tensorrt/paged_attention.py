"""The plugin `WicorePagedAttention`: attention over KV pages. `enqueue` ran on a GPU; no plan with it was built or run.

It writes a step's keys and values into the pages first. For networks of others: our own lowering has linear caches, and
takes `WicoreCacheAttention`.
One plugin is one layer. Knows shapes and pointers; not models, pages' owners or files. Invariant: the pool is changed
in place, so its output is its input's memory, and the next layer of the group takes it from there: the data flow orders
the layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.layout import Launch, Pool, PoolShape, Slices, Tables, attention_launch, kv_write_launch
from wicore_trt.plugins.tensorrt.base import PluginLogic, TensorRule


@dataclass(frozen=True)
class PagedAttentionConfig:
    """One layer's attention. `layer` is its index in its group of `layers`; `window` is 0 for full attention; types are
    those of `layout.PoolShape`."""

    layers: int
    layer: int
    page_tokens: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    kv_dtype: str
    window: int
    softmax_scale: float

    def pool(self) -> PoolShape:
        return PoolShape(self.layers, self.page_tokens, self.kv_heads, self.head_dim, self.kv_dtype)


class PagedAttention(PluginLogic):
    """Inputs: q [N, heads, D], k, v [N, kv_heads, D], pool [pages, layers, 2, page_tokens, kv_heads, D], page table
    int32 [S, P], positions int32 [N], sequence of each token int32 [N], cu_seqlens int32 [S + 1], position of each
    slice's first token int32 [S]; with FP8 pages also the KV scales float32 [layers]. Outputs: [N, heads, D], the pool.
    """

    NAME = "WicorePagedAttention"
    CONFIG = PagedAttentionConfig
    ROLES = ("kv_write", "attention")
    POOL = 3

    def input_rules(self) -> list[TensorRule]:
        c: PagedAttentionConfig = self.config
        kv = (-1, c.kv_heads, c.head_dim)
        rules = [
            TensorRule("q", c.dtype, (-1, c.heads, c.head_dim)),
            TensorRule("k", c.dtype, kv),
            TensorRule("v", c.dtype, kv),
            TensorRule("pool", c.kv_dtype, (-1, c.layers, 2, c.page_tokens, c.kv_heads, c.head_dim)),
            TensorRule("page table", "int32", (-1, -1)),
            TensorRule("positions", "int32", (-1,)),
            TensorRule("sequences", "int32", (-1,)),
            TensorRule("cu_seqlens", "int32", (-1,)),
            TensorRule("first positions", "int32", (-1,)),
        ]
        return rules + ([TensorRule("KV scales", "float32", (c.layers,))] if c.kv_dtype == "fp8" else [])

    def output_rules(self) -> list[TensorRule]:
        rules = self.input_rules()
        return [rules[0], rules[self.POOL]]

    def output_sources(self) -> list[int]:
        return [0, self.POOL]

    def get_aliased_input(self, output_index: int) -> int:
        """Output 1 is input 3 in place; -1: an output with memory of its own."""
        return self.POOL if output_index == 1 else -1

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        super().on_shape_change(inputs, outputs)
        dims = [tuple(d.dims) for d in inputs]
        if min(extent for shape in dims for extent in shape) < 0:
            return  # building: extents are not known yet
        tokens, sequences = dims[0][0], dims[4][0]
        lengths = [d[0] for d in (dims[1], dims[2], dims[5], dims[6], dims[7], dims[8])]
        if lengths != [tokens] * 4 + [sequences + 1, sequences]:
            raise ValueError(f"{self.NAME}: {tokens} tokens and {sequences} sequences do not fit the lengths {lengths}")

    def launches(self, dims: Sequence[Sequence[int]], inputs: Sequence[int], outputs: Sequence[int]) -> list[Launch]:
        c: PagedAttentionConfig = self.config
        q, k, v, pool, table, positions, sequences, cu_seqlens, first_positions = inputs[:9]
        shape = c.pool()
        scale = inputs[9] + 4 * c.layer if c.kv_dtype == "fp8" else 0
        layer = Pool(pool + shape.layer_offset(c.layer), shape, scale)
        tokens = dims[0][0]
        tables = Tables(table, *dims[4])
        slices = Slices(cu_seqlens, first_positions, tokens)
        write, attend = (self.kernels[role].constants for role in self.ROLES)
        return [
            kv_write_launch(write, k, v, layer, tables, positions, sequences, tokens),
            attention_launch(attend, q, outputs[0], layer, tables, slices, c.softmax_scale, c.window),
        ]


def paged_attention_specs(config: PagedAttentionConfig) -> dict[str, KernelSpec]:
    """The plugin's kernels by role, for `aot.compile_kernels`; layers that differ in index, window or scale share them.

    Needs Triton, on the machine that builds. Raises ConfigError for types or heads that the kernels cannot do.
    """
    from wicore_trt.plugins.kernels import specs

    pool = config.pool()
    return {
        "kv_write": specs.kv_write_spec(pool, config.dtype),
        "attention": specs.attention_spec(pool, config.dtype, config.heads),
    }
