"""The plugin `WicoreKvPages`: KV between pages and linear caches. `enqueue` ran on a GPU; no plan with it was built.

It converts FP8 pages on the way. For networks of others: our executor launches the same kernels beside its plans.
It offloads nothing itself: a plugin never waits for a disk or a network, it packs and unpacks for those that do.
Invariant: the side that is written is changed in place and is the only output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.layout import CacheShape, Launch, Pool, PoolShape, Tables, copy_pages_launch
from wicore_trt.plugins.tensorrt.base import PluginLogic, TensorRule


@dataclass(frozen=True)
class KvPagesConfig:
    """A layer group's pages and caches. `to_cache`: pages are read and the cache is written; otherwise the reverse."""

    layers: int
    page_tokens: int
    kv_heads: int
    head_dim: int
    cache_dtype: str
    kv_dtype: str
    to_cache: bool

    def pool(self) -> PoolShape:
        return PoolShape(self.layers, self.page_tokens, self.kv_heads, self.head_dim, self.kv_dtype)

    @property
    def converts(self) -> bool:
        return self.kv_dtype != self.cache_dtype


class KvPages(PluginLogic):
    """Inputs: pool [pages, layers, 2, page_tokens, kv_heads, D], cache [layers, 2, slots, kv_heads, S, D], page tables
    int32 [C, P], copies int32 [C, 4] (`kernels.pages.copy_pages`); with FP8 pages and another cache also the KV scales
    float32 [layers]. Output: the side that is written."""

    NAME = "WicoreKvPages"
    CONFIG = KvPagesConfig
    ROLES = ("copy",)

    def input_rules(self) -> list[TensorRule]:
        c: KvPagesConfig = self.config
        rules = [
            TensorRule("pool", c.kv_dtype, (-1, c.layers, 2, c.page_tokens, c.kv_heads, c.head_dim)),
            TensorRule("cache", c.cache_dtype, (c.layers, 2, -1, c.kv_heads, -1, c.head_dim)),
            TensorRule("page tables", "int32", (-1, -1)),
            TensorRule("copies", "int32", (-1, 4)),
        ]
        return rules + ([TensorRule("KV scales", "float32", (c.layers,))] if c.converts else [])

    def output_rules(self) -> list[TensorRule]:
        return [self.input_rules()[self._target]]

    def output_sources(self) -> list[int]:
        return [self._target]

    def get_aliased_input(self, output_index: int) -> int:
        return self._target

    def on_shape_change(self, inputs: Sequence[Any], outputs: Sequence[Any]) -> None:
        super().on_shape_change(inputs, outputs)
        tables, copies = inputs[2].dims[0], inputs[3].dims[0]
        if min(tables, copies) >= 0 and tables != copies:
            raise ValueError(f"{self.NAME}: {tables} page tables for {copies} copies")

    def launches(self, dims: Sequence[Sequence[int]], inputs: Sequence[int], outputs: Sequence[int]) -> list[Launch]:
        c: KvPagesConfig = self.config
        _, _, slots, _, tokens, _ = dims[1]
        cache = CacheShape(c.layers, slots, c.kv_heads, tokens, c.head_dim, c.cache_dtype)
        tables = Tables(inputs[2], *dims[2])
        longest = min(tokens, tables.length * c.page_tokens)
        pool = Pool(inputs[0], c.pool(), inputs[4] if c.converts else 0)
        constants = self.kernels["copy"].constants
        return [copy_pages_launch(constants, pool, (inputs[1], cache), tables, inputs[3], longest)]

    @property
    def _target(self) -> int:
        return 1 if self.config.to_cache else 0


def kv_pages_specs(config: KvPagesConfig) -> dict[str, KernelSpec]:
    """The plugin's kernel by role, for `aot.compile_kernels`. Needs Triton; raises ConfigError for other types."""
    from wicore_trt.plugins.kernels import specs

    return {"copy": specs.copy_pages_spec(config.pool(), config.cache_dtype, to_cache=config.to_cache)}
