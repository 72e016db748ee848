"""A few kernels as Gemma 3 270M and 27B need them."""

from __future__ import annotations

from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.decode_layout import PrefillConfig
from wicore_trt.plugins.kernels import fast_attention_specs
from wicore_trt.plugins.kernels.page_digest import page_digest_spec
from wicore_trt.plugins.layout import PoolShape

LARGE = PoolShape(52, 32, 16, 128, "bfloat16")  # 27B's local layers
SMALL = PoolShape(15, 16, 1, 256, "fp8")  # 270M's
NARROW = PoolShape(15, 16, 1, 64, "bfloat16")  # compiles in half the time

SPECS: dict[str, KernelSpec] = {
    spec.name: spec
    for spec in [
        page_digest_spec(),
        fast_attention_specs.gather_spec(SMALL, "float16", "sm86"),
        fast_attention_specs.add_segment_spec(LARGE, "bfloat16", 32),
        fast_attention_specs.prefill_spec(NARROW, "bfloat16", 4, "sm80", PrefillConfig(16, 32, 4, 2)),
    ]
}
