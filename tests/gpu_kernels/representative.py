"""One or two specialisations of every kernel, as Gemma 3 270M and 27B need them."""

from __future__ import annotations

from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.kernels import specs
from wicore_trt.plugins.layout import PoolShape

LARGE = PoolShape(52, 32, 16, 128, "bfloat16")  # 27B's local layers
SMALL = PoolShape(15, 16, 1, 256, "fp8")  # 270M's
NARROW = PoolShape(15, 16, 1, 64, "bfloat16")  # compiles in half the time

SPECS: dict[str, KernelSpec] = {
    spec.name: spec
    for spec in [
        specs.copy_pages_spec(LARGE, "bfloat16", to_cache=True),
        specs.copy_pages_spec(SMALL, "float16", to_cache=False),
        specs.slide_spec(LARGE, "bfloat16"),
        specs.kv_write_spec(LARGE),
        specs.attention_spec(LARGE, 32),
        specs.attention_spec(NARROW, 4, block_rows=16),
    ]
}
