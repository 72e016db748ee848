"""Engines without weights, for measurements of speed: a checkpoint of sizes alone.

Invariant: nothing is read or made up here; the manifest of what is built from it says that the weights are missing.
"""

from __future__ import annotations

from pathlib import Path

from wicore_trt.checkpoint.format import QUANT_FP8, Checkpoint
from wicore_trt.engine.options import DummyModel


def dummy_checkpoint(model: DummyModel, dtype: str) -> Checkpoint:
    """A checkpoint of `model` in `dtype` ("auto" is bfloat16; "fp8" has 16-bit parts in bfloat16), without files."""
    config = {"wicore": {"source": f"{model.name} (dummy weights)"}, "quantization": {"kv_cache_quant_algo": None}}
    fp8 = dtype == "fp8"
    return Checkpoint(
        path=Path(),
        config=config,
        spec=model.spec,
        dtype="bfloat16" if fp8 or dtype == "auto" else dtype,
        quant_algo=QUANT_FP8 if fp8 else None,
        tp_size=1,
        rank_files=[],
        tokenizer_files=[],
        vision_file=None,
        files={},
    )
