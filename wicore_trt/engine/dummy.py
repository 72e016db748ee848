"""Engines without weights, for measurements of speed: a checkpoint of sizes alone, and a tokenizer of one token.

Invariant: nothing is read or made up here; the manifest of what is built from it says that the weights are missing.
"""

from __future__ import annotations

import json
from pathlib import Path

from wicore_trt.checkpoint.format import QUANT_FP8, Checkpoint
from wicore_trt.engine.options import DummyModel

EOS = "<eos>"


def write_dummy_tokenizer(directory: Path) -> None:
    """A tokenizer of one token, so that an engine without a source can be loaded and served by token ids."""
    model = {"type": "WordLevel", "vocab": {EOS: 1}, "unk_token": EOS}
    files = {"tokenizer.json": {"version": "1.0", "model": model}, "tokenizer_config.json": {"eos_token": EOS}}
    for name, content in files.items():
        (directory / name).write_text(json.dumps(content) + "\n", encoding="utf-8")


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
