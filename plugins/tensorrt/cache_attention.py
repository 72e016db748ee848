"""Plugin `WicoreCacheAttention`: a TensorRT engine's attention. Never run on a GPU, and in no plan that was built.

Writes a step's keys and values into a layer's linear caches and attends over them, with kernels for pages: a slot's
cache is PAGE entries after PAGE entries, so a page table of consecutive numbers makes it pages. One plugin is one
layer. Knows shapes and pointers; not models or files. Invariant: both caches are changed in place: outputs are their
inputs' memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wicore_trt.arithmetic import ITEM_BYTES
from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.layout import (
    Launch,
    LinearPages,
    Pool,
    PoolShape,
    Slices,
    Tables,
    attention_launch,
    kv_write_launch,
)
from wicore_trt.plugins.tensorrt.base import PluginLogic, TensorRule

PAGE = 64
"""Cache entries that one place of the page table stands for; caches are multiples of it."""


@dataclass(frozen=True)
class CacheAttentionConfig:
    """Configuration of one layer's attention over caches of `entries`, in `dtype` like the queries; `window` 0: full
    attention."""

    entries: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str
    window: int
    softmax_scale: float

    def pool(self) -> PoolShape:
        return PoolShape(1, PAGE, self.kv_heads, self.head_dim, self.dtype)


class CacheAttention(PluginLogic):
    """Plugin with inputs q [N, heads, D], k, v [N, kv_heads, D], K cache, V cache [B, kv_heads, entries, D], and int32:

    - page table [B, entries / PAGE]; place p of slot b is b * kv_heads * entries / PAGE + p;
    - entry of each token [N]; slot of each token [N]; cu_seqlens [B + 1]; entry of each slot's first token [B].

    Outputs are [N, heads, D], K cache, V cache. A token sees the entries of its slot up to its own, with a window the
    last `window` of them."""

    NAME = "WicoreCacheAttention"
    CONFIG = CacheAttentionConfig
    ROLES = ("kv_write", "attention")
    CACHES = (3, 4)

    def input_rules(self) -> list[TensorRule]:
        c: CacheAttentionConfig = self.config
        kv, cache = (-1, c.kv_heads, c.head_dim), (-1, c.kv_heads, c.entries, c.head_dim)
        return [
            TensorRule("q", c.dtype, (-1, c.heads, c.head_dim)), TensorRule("k", c.dtype, kv),
            TensorRule("v", c.dtype, kv), TensorRule("K cache", c.dtype, cache),
            TensorRule("V cache", c.dtype, cache), TensorRule("page table", "int32", (-1, c.entries // PAGE)),
            TensorRule("entries", "int32", (-1,)), TensorRule("slots", "int32", (-1,)),
            TensorRule("cu_seqlens", "int32", (-1,)), TensorRule("first entries", "int32", (-1,)),
        ]  # fmt: skip

    def output_rules(self) -> list[TensorRule]:
        rules = self.input_rules()
        return [rules[source] for source in self.output_sources()]

    def output_sources(self) -> list[int]:
        return [0, *self.CACHES]

    def get_aliased_input(self, output_index: int) -> int:
        return self.output_sources()[output_index] if output_index else -1

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        super().on_shape_change(inputs, outputs)
        first = [d.dims[0] for d in inputs]
        if min(first) < 0:
            return  # building: extents are not known yet
        tokens, slots = first[0], first[3]
        if first != [tokens] * 3 + [slots] * 3 + [tokens, tokens, slots + 1, slots]:
            raise ValueError(f"{self.NAME}: {tokens} tokens and {slots} slots do not fit the lengths {first}")

    def launches(self, dims: Sequence[Sequence[int]], inputs: Sequence[int], outputs: Sequence[int]) -> list[Launch]:
        c: CacheAttentionConfig = self.config
        q, k, v, keys, values, table, entries, slots, cu_seqlens, first = inputs
        apart, rest = divmod(values - keys, ITEM_BYTES[c.dtype])
        if rest or apart % 16:
            raise ValueError(
                f"{self.NAME}: the caches lie {values - keys} bytes apart, which is no multiple of 16 values"
            )
        pool = Pool(keys, LinearPages(1, PAGE, c.kv_heads, c.head_dim, c.dtype, entries=c.entries, values=apart))
        tables, tokens = Tables(table, *dims[5]), dims[0][0]
        write, attend = (self.kernels[role].constants for role in self.ROLES)
        return [
            kv_write_launch(write, k, v, pool, tables, entries, slots, tokens),
            attention_launch(
                attend, q, outputs[0], pool, tables, Slices(cu_seqlens, first, tokens), c.softmax_scale, c.window
            ),
        ]


def cache_attention_specs(config: CacheAttentionConfig) -> dict[str, KernelSpec]:
    """Specify the plugin's kernels by role, for `aot.compile_kernels`; layers of one engine share them. Raises
    EnvironmentUnfitError without Triton, ConfigError for heads that the kernels do not take."""
    try:
        from wicore_trt.plugins.kernels import specs
    except ImportError as error:
        raise EnvironmentUnfitError(
            f"The attention plugin is compiled by Triton, which is not here ({error})."
        ) from None

    pool = config.pool()
    return {"kv_write": specs.kv_write_spec(pool), "attention": specs.attention_spec(pool, config.heads)}
