"""Tiny models as files in memory, written by hand so that every field of them can be broken.

Knows the file layouts and nothing of the product. A model is {file name: bytes}; what builds it is plain data that
`mutations` changes before it becomes bytes.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

CONFIG: dict[str, Any] = {
    "model_type": "gemma3_text", "architectures": ["Gemma3ForCausalLM"], "vocab_size": 48, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8,
    "intermediate_size": 64, "query_pre_attn_scalar": 16, "rms_norm_eps": 1e-6, "sliding_window": 8,
    "max_position_embeddings": 256, "tie_word_embeddings": True, "hidden_activation": "gelu_pytorch_tanh",
    "attention_bias": False, "rope_theta": 1000000.0, "rope_local_base_freq": 10000.0,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
EMBEDDING = "model.embed_tokens.weight"
PIECES = ["<pad>", "<eos>", "<bos>", "<unk>", *(chr(97 + i % 26) * (1 + i // 26) for i in range(44))]
DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}

GGUF_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.o_proj": "attn_output", "post_attention_layernorm": "post_attention_norm",
    "pre_feedforward_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
U32, I32, F32, BOOL, STRING, ARRAY, U64 = 4, 5, 6, 7, 8, 9, 10
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
GGUF_F32, GGUF_F16, GGUF_Q4_0, GGUF_Q5_0, GGUF_Q8_0, GGUF_BF16 = 0, 1, 2, 6, 8, 30
GGUF_Q4_1 = 3
GGUF_BLOCKS = (GGUF_Q4_0, GGUF_Q5_0, GGUF_Q8_0, GGUF_Q4_1, 7, 20, 39)  # and Q5_1, IQ4_NL, MXFP4: blocks of 32
GGUF_KINDS = (GGUF_F32, GGUF_F16, GGUF_BF16, *GGUF_BLOCKS)


def shapes() -> dict[str, tuple[int, ...]]:
    """Tensors of CONFIG under Hugging Face's names."""
    hidden, mlp, head = CONFIG["hidden_size"], CONFIG["intermediate_size"], CONFIG["head_dim"]
    q, kv = CONFIG["num_attention_heads"] * head, CONFIG["num_key_value_heads"] * head
    layer: dict[str, tuple[int, ...]] = dict.fromkeys(GGUF_NAMES, (hidden,)) | {
        "self_attn.q_proj": (q, hidden), "self_attn.k_proj": (kv, hidden), "self_attn.v_proj": (kv, hidden),
        "self_attn.q_norm": (head,), "self_attn.k_norm": (head,), "self_attn.o_proj": (hidden, q),
        "mlp.gate_proj": (mlp, hidden), "mlp.up_proj": (mlp, hidden), "mlp.down_proj": (hidden, mlp),
    }  # fmt: skip
    found: dict[str, tuple[int, ...]] = {EMBEDDING: (CONFIG["vocab_size"], hidden), "model.norm.weight": (hidden,)}
    for i in range(CONFIG["num_hidden_layers"]):
        found |= {f"model.layers.{i}.{name}.weight": shape for name, shape in layer.items()}
    return found


def bf16(x: np.ndarray) -> np.ndarray:
    """float32 to BF16 bits, nearest even; finite values."""
    wide = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return (((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16) & 0xFFFF).astype(np.uint16)


def weights(rng: np.random.Generator, tag: str) -> dict[str, np.ndarray]:
    """Random tensors of the model as stored in `tag`."""
    found = {}
    for name, shape in shapes().items():
        x = (rng.standard_normal(shape) * (0.1 if name.endswith("norm.weight") else 0.3)).astype(np.float32)
        found[name] = bf16(x) if tag == "BF16" else x.astype(DTYPES[tag])
    return found


def safetensors(tensors: dict[str, np.ndarray], tag: str) -> tuple[dict[str, Any], bytes]:
    """Header and data of a safetensors file."""
    header: dict[str, Any] = {}
    data = b""
    for name, array in tensors.items():
        raw = array.tobytes()
        header[name] = {"dtype": tag, "shape": list(array.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    return header, data


def packed(header: dict[str, Any] | bytes, data: bytes) -> bytes:
    """The file of a header and its data."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def tokenizer_files() -> dict[str, Any]:
    """The files of a tokenizer of PIECES, as JSON values."""
    added = [
        {"id": i, "content": PIECES[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
         "special": True}
        for i in range(4)
    ]  # fmt: skip
    model = {"type": "BPE", "vocab": {p: i for i, p in enumerate(PIECES)}, "merges": [], "unk_token": "<unk>"}
    names = {"bos_token": "<bos>", "eos_token": "<eos>", "unk_token": "<unk>", "pad_token": "<pad>"}
    return {
        "tokenizer.json": {"version": "1.0", "added_tokens": added, "model": model},
        "tokenizer_config.json": {**names, "tokenizer_class": "GemmaTokenizer", "chat_template": "{{ bos_token }}"},
        "generation_config.json": {"bos_token_id": 2, "eos_token_id": [1]},
        "special_tokens_map.json": names,
    }


def metadata() -> list[tuple[str, int, Any]]:
    """Keys of a GGUF of the model: (name, type, value); an array's value is (type of items, values)."""
    g = "gemma3."
    sizes = {
        "block_count": "num_hidden_layers", "embedding_length": "hidden_size",
        "feed_forward_length": "intermediate_size", "attention.head_count": "num_attention_heads",
        "attention.head_count_kv": "num_key_value_heads", "attention.key_length": "head_dim",
        "attention.value_length": "head_dim", "attention.sliding_window": "sliding_window",
        "context_length": "max_position_embeddings",
    }  # fmt: skip
    return [
        ("general.architecture", STRING, "gemma3"),
        *((g + key, U32, CONFIG[name]) for key, name in sizes.items()),
        (g + "attention.layer_norm_rms_epsilon", F32, CONFIG["rms_norm_eps"]),
        (g + "attention.sliding_window_pattern", ARRAY, (BOOL, [True, False])),
        (g + "rope.freq_base", F32, CONFIG["rope_theta"]),
        ("tokenizer.ggml.model", STRING, "llama"),
        ("tokenizer.ggml.tokens", ARRAY, (STRING, list(PIECES))),
        ("tokenizer.ggml.token_type", ARRAY, (I32, [3] * 4 + [1] * (len(PIECES) - 4))),
        ("tokenizer.ggml.scores", ARRAY, (F32, [-1000.0] * 4 + [-float(i) for i in range(len(PIECES) - 4)])),
        ("tokenizer.ggml.add_space_prefix", BOOL, False),
        *((f"tokenizer.ggml.{n}_token_id", U32, i) for n, i in (("bos", 2), ("eos", 1), ("unknown", 3))),
    ]


def gguf_name(name: str) -> str:
    """llama.cpp's name of a Hugging Face tensor."""
    top = {EMBEDDING: "token_embd.weight", "model.norm.weight": "output_norm.weight"}
    if name in top:
        return top[name]
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{GGUF_NAMES[rest.removesuffix('.weight')]}.weight"


def gguf_tensors(
    rng: np.random.Generator, change: Callable[..., None] | None = None, kinds: tuple[int, ...] = GGUF_KINDS
) -> list[dict[str, Any]]:
    """Tensors of a GGUF as llama.cpp's converter writes them: norms + 1; matrices of random `kinds`, or, when `change`
    changes values, float32."""
    import gguf

    found, values = [], weights(rng, "F32")
    values = {name: x + np.float32(1) if x.ndim == 1 else x for name, x in values.items()}
    if change is not None:
        change(rng, values, 0.0)
    for name, x in values.items():
        kind = int(rng.choice(kinds))
        if x.ndim == 1:
            kind = int(rng.choice([GGUF_F32, GGUF_F16, GGUF_BF16]))
        if change is not None:
            kind = GGUF_F32
        if kind == 20:  # gguf encodes none; float16 scales from 2**-8 to 2**-5, of either sign
            blocks = rng.integers(0, 256, (x.size // 32, 18), dtype=np.uint8)
            blocks[:, 1] = blocks[:, 1] & 0x80 | 0x1C + blocks[:, 1] % 12
            raw = blocks.tobytes()
        else:
            raw = gguf.quants.quantize(x, gguf.GGMLQuantizationType(kind)).tobytes()
        found.append({"name": gguf_name(name), "dims": list(reversed(x.shape)), "kind": kind, "raw": raw, "at": None})
    return found


def gguf_file(keys: list[tuple[str, int, Any]], tensors: list[dict[str, Any]], *, align: int = 32, **odd: Any) -> bytes:
    """A GGUF file; `odd` may replace `version`, `tensor_count` or `key_count`, a tensor's "at" its offset."""
    counts = odd.get("tensor_count", len(tensors)), odd.get("key_count", len(keys))
    head = b"GGUF" + struct.pack("<IQQ", odd.get("version", 3), *counts)
    for name, kind, value in keys:
        head += _string(name) + struct.pack("<I", kind) + (value if isinstance(value, bytes) else _value(kind, value))
    data = b""
    for tensor in tensors:
        dims, at = tensor["dims"], len(data) if tensor["at"] is None else tensor["at"]
        head += _string(tensor["name"]) + struct.pack(f"<I{len(dims)}QIQ", len(dims), *dims, tensor["kind"], at)
        data += tensor["raw"] + b"\0" * (-len(tensor["raw"]) % align)
    return head + b"\0" * (-len(head) % align) + data


def _string(text: str) -> bytes:
    raw = text.encode("utf-8", "surrogateescape")
    return struct.pack("<Q", len(raw)) + raw


def _value(kind: int, value: Any) -> bytes:
    if kind == STRING:
        return _string(value)
    if kind == ARRAY:
        item, values = value
        return struct.pack("<IQ", item, len(values)) + b"".join(_value(item, v) for v in values)
    return struct.pack("<" + CODES[kind], value)
