"""A tiny Gemma 3 in Hugging Face layout, with random weights, for tests that build engines.

`python -m tests.tiny_source ENGINE --tp 2 --target sm90` builds one for GPUs, of 2,048 tokens of context.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE

from wicore_trt.checkpoint.format import Checkpoint, open_checkpoint
from wicore_trt.checkpoint.names import hf_shapes
from wicore_trt.model.hf_config import read_hf_config

CONFIG = {
    "model_type": "gemma3_text",
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,  # a multiple of 16: the CPU kernels take it, whose tokens are the same in any company
    "intermediate_size": 24,
    "sliding_window": 8,
    "sliding_window_pattern": 2,
    "max_position_embeddings": 128,
    "hidden_activation": "gelu_pytorch_tanh",
}

GPU_SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "head_dim": 64, "vocab_size": 384, "num_hidden_layers": 6,
    "sliding_window": 64, "sliding_window_pattern": 3, "max_position_embeddings": 2048,
}  # fmt: skip
"""Of models whose kernels a GPU has."""


def write_tiny_source(path: Path, seed: int = 0, *, tied: bool = True, **sizes: int) -> Path:
    """Write config.json, float32 weights and the files of a tokenizer of a few letters. `sizes` replace those of
    CONFIG."""
    path.mkdir()
    config = CONFIG | {"tie_word_embeddings": tied} | sizes
    random = np.random.default_rng(seed)
    shapes = hf_shapes(read_hf_config(config))
    save_file({n: random.standard_normal(s, np.float32) for n, s in shapes.items()}, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    write_tiny_tokenizer(path)
    return path


def write_tiny_tokenizer(path: Path) -> None:
    """tokenizer.json of 23 tokens, and generation_config.json."""
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<start>", "<turn>", "<end>", *"abcdefghijklmnop"]
    Tokenizer(BPE({p: i for i, p in enumerate(pieces)}, [], unk_token="<unk>")).save(str(path / "tokenizer.json"))
    (path / "generation_config.json").write_text('{"eos_token_id": [1, 6]}')


def open_intact(path: Path) -> Checkpoint:
    """Open a checkpoint of which every byte is as recorded. Raises its error for a damaged file."""
    checkpoint = open_checkpoint(path)
    for name, record in checkpoint.files.items():
        if part := record.describe_change(path / name):
            raise checkpoint.make_damage_error(name, part)
    return checkpoint


def main() -> None:
    from wicore_trt.engine.build import build_engine

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--target", default="sm90")
    given = parser.parse_args()
    source = write_tiny_source(given.engine.with_name(f"{given.engine.name}-source"), **GPU_SIZES)
    build_engine(source, given.engine, backend="triton", targets=[given.target], tp_size=given.tp)


if __name__ == "__main__":
    main()
