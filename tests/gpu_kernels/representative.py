"""One or two specialisations of every kernel, as Gemma 3 270M and 27B need them."""

from __future__ import annotations

from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.decode_layout import PrefillConfig
from wicore_trt.plugins.kernels import fast_attention_specs, specs
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
        fast_attention_specs.prefill_spec(NARROW, "bfloat16", 4, "sm80", PrefillConfig(16, 32, 4, 2)),
    ]
}
