"""What a model's files say, read by a program of its own: numpy, struct and the gguf package's dequantization.

It trusts nothing of the product and checks little: the question is what a build must hold if it was accepted. Anything
that it cannot read raises, which the runner counts as a wrong acceptance.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from .models import CODES, GGUF_NAMES

_PREFIXES = {
    "language_model.model.": "model.",
    "model.language_model.": "model.",
    "language_model.lm_head.": "lm_head.",
}
_LAYER = {
    "input_layernorm": ["input_layernorm"],
    "attention.qkv": ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"],
    "attention.q_layernorm": ["self_attn.q_norm"],
    "attention.k_layernorm": ["self_attn.k_norm"],
    "attention.dense": ["self_attn.o_proj"],
    "post_layernorm": ["post_attention_layernorm"],
    "pre_feedforward_layernorm": ["pre_feedforward_layernorm"],
    "mlp.fc": ["mlp.gate_proj"],
    "mlp.gate": ["mlp.up_proj"],
    "mlp.proj": ["mlp.down_proj"],
    "post_feedforward_layernorm": ["post_feedforward_layernorm"],
}


@dataclass
class Model:
    """Tensors in float32 by Hugging Face's names, norms as the number that multiplies (1 + w); facts of the spec; and
    the tokens of a GGUF by id. `published`: tensors in Q4_0 or Q4_1."""

    tensors: dict[str, np.ndarray]
    spec: dict[str, Any]
    tokens: list[str] | None = None
    published: frozenset[str] = frozenset()


def widened(raw: bytes, tag: str) -> np.ndarray:
    """Stored values as float32."""
    if tag == "BF16":
        return (np.frombuffer(raw, np.uint16).astype(np.uint32) << 16).view(np.float32)
    return np.frombuffer(raw, {"F32": np.float32, "F16": np.float16}[tag]).astype(np.float32)


def read_safetensors(data: bytes) -> dict[str, tuple[str, list[int], bytes]]:
    """(dtype, shape, bytes) by name."""
    (length,) = struct.unpack("<Q", data[:8])
    header, start = json.loads(data[8 : 8 + length], object_pairs_hook=_once), 8 + length
    header.pop("__metadata__", None)
    return {
        name: (item["dtype"], item["shape"], data[start + item["data_offsets"][0] : start + item["data_offsets"][1]])
        for name, item in header.items()
    }


def read_hf(path: Path) -> Model:
    """A Hugging Face directory."""
    config = json.loads((path / "config.json").read_text("utf-8"), object_pairs_hook=_once)
    index = path / "model.safetensors.index.json"
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.exists() else None
    tensors: dict[str, np.ndarray] = {}
    for file in names or ["model.safetensors"]:
        for name, (tag, shape, raw) in read_safetensors((path / file).read_bytes()).items():
            for prefix, plain in _PREFIXES.items():
                name = plain + name.removeprefix(prefix) if name.startswith(prefix) else name
            if name.startswith(("vision_tower.", "multi_modal_projector.", "model.vision_tower.")):
                continue
            if name in tensors:
                raise ValueError(f"{name} twice")
            one = np.float32(1 if name.endswith("norm.weight") else 0)
            tensors[name] = widened(raw, tag).reshape(shape) + one if one else widened(raw, tag).reshape(shape)
    return Model(tensors, _hf_spec(config))


def _hf_spec(config: dict[str, Any]) -> dict[str, Any]:
    text = config["text_config"] if config["model_type"] == "gemma3" else config
    defaults = {
        "vocab_size": 262_208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256,
        "query_pre_attn_scalar": 256, "rms_norm_eps": 1e-6, "sliding_window": 4096, "rope_theta": 1e6,
        "max_position_embeddings": 131_072, "tie_word_embeddings": True, "rope_local_base_freq": 1e4,
    }  # fmt: skip
    text = defaults | {k: v for k, v in text.items() if v is not None}
    if "tie_word_embeddings" in config and config["model_type"] == "gemma3":
        text["tie_word_embeddings"] = config["tie_word_embeddings"]
    count = text["num_hidden_layers"]
    pattern = text.get("sliding_window_pattern", text.get("_sliding_window_pattern", 6))
    kinds = text.get("layer_types") or [
        "sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(count)
    ]
    ropes = text.get("rope_parameters") or {}
    full, sliding = ropes.get("full_attention", {}), ropes.get("sliding_attention", {})
    scaling = full | (text.get("rope_scaling") or {})
    linear = "linear" in (scaling.get("rope_type"), scaling.get("type"))
    return {
        "vocab_size": text["vocab_size"], "hidden_size": text["hidden_size"], "num_layers": count,
        "num_heads": text["num_attention_heads"], "num_kv_heads": text["num_key_value_heads"],
        "head_dim": text["head_dim"], "intermediate_size": text["intermediate_size"],
        "query_pre_attn_scalar": text["query_pre_attn_scalar"], "rms_norm_eps": text["rms_norm_eps"],
        "rope_theta": scaling.get("rope_theta", text["rope_theta"]),
        "rope_local_theta": sliding.get("rope_theta", text["rope_local_base_freq"]),
        "rope_scaling_factor": scaling["factor"] if linear else 1.0, "sliding_window": text["sliding_window"],
        "layer_groups": ["global" if k == "full_attention" else "local" for k in kinds],
        "max_position_embeddings": text["max_position_embeddings"],
        "tie_word_embeddings": text["tie_word_embeddings"],
        "final_logit_softcapping": text.get("final_logit_softcapping"),
    }  # fmt: skip


def read_gguf(path: Path) -> Model:
    """A GGUF file."""
    import gguf

    data = path.read_bytes()
    at = 4

    def take(code: str) -> Any:
        nonlocal at
        (value,) = struct.unpack_from("<" + code, data, at)
        at += struct.calcsize("<" + code)
        return value

    def text() -> str:
        nonlocal at
        size = take("Q")
        at += size
        return data[at - size : at].decode()

    def value(kind: int) -> Any:
        if kind == 8:
            return text()
        if kind != 9:
            return take(CODES[kind])
        item, count = take("I"), take("Q")
        return [value(item) for _ in range(count)]

    _, tensor_count, key_count = take("I"), take("Q"), take("Q")
    keys = _once([(text(), value(take("I"))) for _ in range(key_count)])
    table = [(text(), [take("Q") for _ in range(take("I"))], take("I"), take("Q")) for _ in range(tensor_count)]
    align = keys.get("general.alignment", 32)
    start = -(-at // align) * align
    back, published = {v: k for k, v in GGUF_NAMES.items()}, set[str]()
    tensors: dict[str, np.ndarray] = {}
    spans = []
    for name, dims, kind, offset in table:
        items, block = gguf.GGML_QUANT_SIZES[gguf.GGMLQuantizationType(kind)]
        count = int(np.prod(dims, dtype=object))
        raw = data[start + offset : start + offset + count // items * block]
        spans.append((offset, offset + len(raw)))
        tag = {0: "F32", 1: "F16", 30: "BF16"}.get(kind)
        if tag:
            flat = widened(raw, tag)
        else:
            blocks = np.frombuffer(raw, np.uint8).reshape(-1, dims[0] // items * block)
            with np.errstate(all="ignore"):
                flat = gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType(kind)).reshape(-1)
        hf = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}.get(name)
        if name == "output.weight":
            hf = "lm_head.weight"
        if hf is None:
            _, layer, rest, _ = name.split(".")
            hf = f"model.layers.{layer}.{back[rest]}.weight"
        if hf in tensors:
            raise ValueError(f"{name} twice")
        tensors[hf] = flat.reshape(list(reversed(dims)))
        published |= {hf} if kind in (2, 3) else set()  # Q4_0 and Q4_1
    if any(a[1] > b[0] for a, b in zip(sorted(spans), sorted(spans)[1:], strict=False)):
        raise ValueError("tensors overlap")
    return Model(tensors, _gguf_spec(keys, tensors), keys["tokenizer.ggml.tokens"], frozenset(published))


def _gguf_spec(keys: dict[str, Any], tensors: dict[str, np.ndarray]) -> dict[str, Any]:
    get = {k.removeprefix("gemma3."): v for k, v in keys.items()}.get
    layers, heads, hidden = get("block_count"), get("attention.head_count"), get("embedding_length")
    head_dim = get("attention.key_length", hidden // heads)
    pattern = get("attention.sliding_window_pattern", 6)
    flags = pattern if isinstance(pattern, list) else [bool((i + 1) % pattern) for i in range(layers)]
    scaled = get("rope.scaling.type", "linear") == "linear"
    return {
        "vocab_size": tensors["model.embed_tokens.weight"].shape[0], "hidden_size": hidden, "num_layers": layers,
        "num_heads": heads, "num_kv_heads": get("attention.head_count_kv", heads), "head_dim": head_dim,
        "intermediate_size": get("feed_forward_length"), "query_pre_attn_scalar": head_dim,
        "rms_norm_eps": get("attention.layer_norm_rms_epsilon"), "rope_theta": get("rope.freq_base", 10_000.0),
        "rope_local_theta": get("rope.freq_base_swa", 10_000.0),
        "rope_scaling_factor": get("rope.scaling.factor", get("rope.scale_linear", 1.0)) if scaled else 1.0,
        "sliding_window": get("attention.sliding_window"), "layer_groups": ["local" if f else "global" for f in flags],
        "max_position_embeddings": get("context_length"), "tie_word_embeddings": "lm_head.weight" not in tensors,
        "final_logit_softcapping": get("final_logit_softcapping"),
    }  # fmt: skip


def differences(model: Model, built: Path, dtype: str) -> str | None:
    """What the checkpoint `built` holds that `model` does not say, or None."""
    config = json.loads((built / "config.json").read_text())
    spec = config["wicore"]["spec"]
    for key, want in model.spec.items():
        have = spec[key]
        close = isinstance(want, float) and isinstance(have, (int, float)) and abs(have - want) <= 1e-6 * abs(want)
        if not close and (have != want or isinstance(have, bool) != isinstance(want, bool)):
            return f"spec {key} is {have!r}, not {want!r}"
    if model.tokens is not None:
        vocabulary = json.loads((built / "tokenizer.json").read_text())["model"]["vocab"]
        if [t for i, t in enumerate(model.tokens) if vocabulary.get(t.replace(" ", "\u2581"), vocabulary.get(t)) != i]:
            return "the tokenizer's ids"
    stored = read_safetensors((built / "rank0.safetensors").read_bytes())
    names = {
        "transformer.vocab_embedding.weight": ["model.embed_tokens.weight"],
        "transformer.ln_f.weight": ["model.norm.weight"],
    }
    names["lm_head.weight"] = ["model.embed_tokens.weight" if spec["tie_word_embeddings"] else "lm_head.weight"]
    for i in range(spec["num_layers"]):
        for unified, parts in _LAYER.items():
            names[f"transformer.layers.{i}.{unified}.weight"] = [f"model.layers.{i}.{p}.weight" for p in parts]
    scales = {n for n in stored if n.endswith(("weights_scaling_factor", "weights_minimum"))}
    if set(names) != set(stored) - scales:
        return f"tensors {sorted(set(names) ^ (set(stored) - scales))[:3]}"
    flushed = 0
    for name, parts in names.items():
        want = np.concatenate([model.tensors[p] for p in parts])
        tag, shape, raw = stored[name]
        shape = [shape[0], 2 * shape[1]] if tag == "U8" else shape
        if list(want.shape) != shape or not np.isfinite(want).all():
            return f"{name}: shape {shape} or values that are not finite"
        if tag == "F8_E4M3":
            scale = widened(stored[name + "s_scaling_factor"][2], "F32")
            wrong = _fp8_error(np.frombuffer(raw, np.uint8).reshape(shape), scale, want)
        elif tag in ("U8", "I8"):
            have = _blocks(name, stored)
            exact = [p in model.published for p in parts for _ in range(len(model.tensors[p]))]
            rounded = _as_q4_0(want) if tag == "U8" and not all(exact) else want
            wrong = not np.array_equal(have, np.where(np.array(exact)[:, None], want, rounded))
        elif len(shape) == 1:
            wrong = not np.array_equal(widened(raw, tag).view(np.uint32), want.view(np.uint32))  # bit for bit
        else:
            with np.errstate(all="ignore"):
                wrong = not np.array_equal(widened(raw, tag), widened(_narrowed(want, tag), tag))
        if wrong:
            return f"{name} as {tag} ({dtype})"
        if (
            len(shape) > 1
            and tag not in ("U8", "I8")
            and not (name == "lm_head.weight" and spec["tie_word_embeddings"])
        ):
            kept = np.frombuffer(raw, np.uint8) & 0x7F if tag == "F8_E4M3" else widened(raw, tag)
            flushed += int(np.count_nonzero(want)) - int(np.count_nonzero(kept))
    said = json.loads((built / "config.json").read_text())["wicore"]["flushed_to_zero"]
    return f"{flushed} weights became 0, {said} are reported" if said != flushed else None


def _blocks(name: str, stored: dict[str, tuple[str, list[int], bytes]]) -> np.ndarray:
    """Decode a weight in blocks: 16 bytes of low then high nibbles, or integers; scales and perhaps minimums."""
    tag, (rows, _), raw = stored[name]
    scales = widened(stored[f"{name}s_scaling_factor"][2], stored[f"{name}s_scaling_factor"][0]).reshape(rows, -1, 1)
    if tag == "I8":
        return (np.frombuffer(raw, np.int8).reshape(*scales.shape[:2], -1) * scales).reshape(rows, -1)
    nibbles = np.frombuffer(raw, np.uint8).reshape(*scales.shape[:2], 16)
    values = np.concatenate([nibbles & 15, nibbles >> 4], axis=2).astype(np.float32)
    minimums = stored.get(f"{name}s_minimum")
    if minimums is None:
        return ((values - 8) * scales).reshape(rows, -1)
    return (values * scales + widened(minimums[2], "F16").reshape(rows, -1, 1)).reshape(rows, -1)


def _as_q4_0(want: np.ndarray) -> np.ndarray:
    """Weights quantized by the gguf package's rule."""
    import gguf

    kind = gguf.GGMLQuantizationType.Q4_0
    with np.errstate(all="ignore"):
        return np.asarray(gguf.quants.dequantize(gguf.quants.quantize(want, kind), kind))


def tokenizer_differences(source: Path, built: Path) -> str | None:
    """What is wrong with the tokenizer files of a checkpoint: not the source's bytes, or ids beyond the embedding."""
    from tokenizers import Tokenizer

    size = json.loads((built / "config.json").read_text())["vocab_size"]
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"):
        given = source / name
        if source.is_dir() and given.exists() and (built / name).read_bytes() != given.read_bytes():
            return f"{name} is not the source's"
    if not (built / "tokenizer.json").exists():
        return None
    tokenizer = Tokenizer.from_file(str(built / "tokenizer.json"))
    vocabulary = tokenizer.get_vocab()
    if len(set(vocabulary.values())) != len(vocabulary):
        return "an id of two tokens"
    found = tokenizer.encode("ab <bos>c  aa\u65e5" * 40, add_special_tokens=False).ids
    if len(found) > 8 * 600 or len(tokenizer.decode(found)) > 8 * 8 * 600:
        return f"a short text has {len(found)} tokens"
    ends = (
        json.loads((built / "generation_config.json").read_text())
        if (built / "generation_config.json").exists()
        else {}
    )
    # Added tokens may lie beyond the rows, as <image_soft_token> of the 1B does: the build tells it.
    ids = [
        *tokenizer.get_vocab(with_added_tokens=False).values(),
        *np.ravel([ends.get("eos_token_id") or 0]),
        ends.get("bos_token_id") or 0,
    ]
    return f"an id of {max(ids)} in a model of {size} tokens" if max(ids) >= size else None


def _narrowed(x: np.ndarray, tag: str) -> bytes:
    if tag != "BF16":
        return x.astype({"F32": np.float32, "F16": np.float16}[tag]).tobytes()
    wide = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return (((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16) & 0xFFFF).astype(np.uint16).tobytes()


def _fp8_error(codes: np.ndarray, scale: np.ndarray, want: np.ndarray) -> bool:
    """Whether a row is off by more than E4M3 can be: half a step of its largest value."""
    sign, exponent, mantissa = codes >> 7, (codes >> 3) & 15, codes & 7
    value = np.where(exponent == 0, mantissa * 2.0**-9, (1 + mantissa / 8) * np.exp2(exponent.astype(float) - 7))
    back = np.where(sign, -value, value) * scale[:, None].astype(np.float64)
    with np.errstate(over="ignore"):
        if not np.isfinite(back.astype(np.float32)).all():
            return True
    amax = np.abs(want).max(axis=1).astype(np.float64)
    error = np.abs(back - want).max(axis=1)
    return bool((error > 0.07 * amax)[amax > 1e-41].any())


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len({k for k, _ in pairs}) != len(pairs):
        raise ValueError("a key twice")
    return dict(pairs)
