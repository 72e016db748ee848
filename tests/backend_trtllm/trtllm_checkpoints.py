"""Small unified checkpoints for the tests of the TensorRT-LLM integration."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from checkpoint.tiny_gemma import TEXT_CONFIG, random_tensors, write_model
from text.synthetic_tokenizer import backend
from text.synthetic_tokenizer import write as write_tokenizer

from wicore_trt.backends.torch.calibrate import TextCalibration
from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.format import Checkpoint
from wicore_trt.model.hf_config import read_hf_config

TEXT = "hello world, Hello. What is that: a bear? No! it's a whale. " * 20
CONFIG = TEXT_CONFIG | {
    "num_hidden_layers": 7,
    "hidden_size": 32,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
}


def source(directory: Path, seed: int, **changes: Any) -> Path:
    """A Hugging Face directory with a tokenizer; the names are those of the multimodal models."""
    config = CONFIG | {"vocab_size": 2 * -(-backend().get_vocab_size() // 2)} | changes
    tensors = random_tensors(read_hf_config(config), seed)
    write_model(directory, tensors, config, prefix="old")
    return write_tokenizer(directory)


def checkpoint(directory: Path, *, seed: int = 0, dtype: str = "bfloat16", tp: int = 1, static: bool = False,
               kv_scales: bool = False, **changes: Any) -> Checkpoint:  # fmt: skip
    """A converted model; `static` calibrates it, `kv_scales` its KV cache too."""
    calibration = None
    hf = source(directory / "hf", seed, **changes)
    if static or kv_scales:
        (directory / "text.txt").write_text(TEXT)
        calibration = TextCalibration(directory / "text.txt", tokens=200, kv_scales=kv_scales)
    return convert(hf, directory / "unified", dtype=dtype, tp_size=tp, calibration=calibration)
