"""Broken models, made at random from whole ones: one function per kind of file.

A case is a directory as {file name: bytes} and the name in it that is given to the product. Structured changes (fields
dropped, doubled, retyped, extreme, overlapping, nested) and flipped bytes. Everything follows from the generator.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from . import contents, models
from .models import ARRAY, BOOL, CODES, EMBEDDING, F32, I32, STRING, U32, U64

TARGETS = ("auto", "float32", "bfloat16", "float16", "fp8", "q4_0")
NUMBERS = [0, 1, -1, 2, 3, 7, 31, 64, 255, 2**31, 2**32 - 1, 2**53, 2**63, 10**9, 10**18, -(2**31), 10**400]
REALS = [0.0, -1.0, 0.5, 1e-30, 1e30, 1e308, 16.0, 1e6, 3.9, -0.0, 1e-6, float("nan"), float("inf")]
TEXTS = ["", "x", "false", "true", "0", "64", "full_attention", "linear", "yarn", "a\nb", "\u202e\u0000", "é" * 300,
         "q" * 100_000, "../x", "/etc/passwd", "\ud800"]  # fmt: skip
OTHERS = [None, True, False, [], {}, [1], {"a": 1}, [[["x"]]], ["sliding_attention"] * 2, ["full_attention"] * 3]
EXTRA_KEYS = [
    "rope_scaling", "rope_parameters", "sliding_window_pattern", "_sliding_window_pattern", "final_logit_softcapping",
    "attn_logit_softcapping", "use_bidirectional_attention", "quantization_config", "text_config", "hidden_act",
    "num_experts", "mlp_bias", "torch_dtype", "note",
]  # fmt: skip
ROPES = [
    {"rope_type": "linear", "factor": 8.0}, {"type": "linear", "factor": 4}, {"factor": 8.0}, {"rope_type": "yarn"},
    {"rope_type": "linear"}, {"full_attention": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    {"full_attention": {"rope_theta": 1e6}, "sliding_attention": {"rope_theta": 1e4}}, {"full_attention": None},
    {"rope_type": "default"}, {"rope_theta": 1e6},
]  # fmt: skip
TEMPLATES = [
    "{{ messages[0].content }}", "{% for a in range(10**9) %}x{% endfor %}", "{{ a.b.c }}", "{% if %}",
    "{{ raise_exception('no') }}", "{{ ''.__class__.__mro__ }}", 7, None,
]  # fmt: skip


@dataclass(frozen=True)
class Case:
    """`given` is the name in the directory that is converted ("" for the directory itself) to `target`."""

    files: dict[str, bytes]
    given: str
    target: str


def pick(rng: np.random.Generator, items: Any) -> Any:
    return items[int(rng.integers(len(items)))]


def odd_value(rng: np.random.Generator, old: Any = None) -> Any:
    """A value for a JSON field: near the old one, extreme, or of another type."""
    number = isinstance(old, (int, float)) and not isinstance(old, bool) and abs(old) < 1e300
    if number and rng.random() < 0.5:
        return pick(rng, [old + 1, old - 1, old * 2, -old, float(old), str(old), old * 1.5, [old], bool(old)])
    return copy.deepcopy(pick(rng, pick(rng, [NUMBERS, REALS, TEXTS, OTHERS])))


def flipped(rng: np.random.Generator, data: bytes, first: int = 0) -> bytes:
    """Some bytes changed, cut out or doubled, mostly near `first`, where a file's structure is."""
    raw = bytearray(data)
    for _ in range(int(rng.integers(1, 4))):
        if not raw:
            break
        at = int(rng.integers(len(raw))) if rng.random() < 0.3 else min(len(raw) - 1, first + int(rng.integers(4000)))
        how = rng.random()
        if how < 0.6:
            raw[at] ^= 1 << int(rng.integers(8))
        elif how < 0.8:
            raw[at] = int(rng.integers(256))
        elif how < 0.9:
            del raw[at : at + int(rng.integers(1, 40))]
        else:
            raw[at:at] = raw[at : at + int(rng.integers(1, 40))]
    return bytes(raw)


def changed(rng: np.random.Generator, value: Any) -> Any:
    """A JSON value with one place of it changed, at any depth."""
    value = copy.deepcopy(value)
    place: Any = value
    while True:
        keys = list(place) if isinstance(place, dict) else list(range(len(place)))
        if not keys:
            return value
        key = pick(rng, keys)
        inner = place[key]
        if isinstance(inner, (dict, list)) and inner and rng.random() < 0.7:
            place = inner
            continue
        how = rng.random()
        if how < 0.2:
            del place[key]
        elif how < 0.3 and isinstance(place, dict):
            place[str(pick(rng, TEXTS))] = inner
        else:
            place[key] = odd_value(rng, inner)
        return value


def as_json(rng: np.random.Generator, value: Any) -> bytes:
    """A value as JSON, at times with a doubled key, nested absurdly deep, with a BOM, or in UTF-16."""
    text = json.dumps(value)
    how = rng.random()
    if how < 0.03 and isinstance(value, dict) and value:
        key = pick(rng, list(value))
        text = text[:-1] + ", " + json.dumps({key: odd_value(rng, value[key])})[1:]
    elif how < 0.05:
        depth = int(pick(rng, [20, 40, 2000, 100_000]))
        text = text[:-1] + ', "deep": ' + "[" * depth + "]" * depth + "}"
    elif how < 0.06:
        return b"\xef\xbb\xbf" + text.encode()
    elif how < 0.07:
        return text.encode("utf-16")
    return text.encode()


def _hugging_face(rng: np.random.Generator, tag: str | None = None) -> tuple[dict[str, bytes], dict[str, Any], bytes]:
    """Files of a whole directory without its weights, and the weights' header and data."""
    files = {name: json.dumps(value).encode() for name, value in models.tokenizer_files().items()}
    tag = tag or str(pick(rng, ["F32", "F16", "BF16"]))
    header, data = models.safetensors(models.weights(rng, tag), tag)
    files["config.json"] = json.dumps(models.CONFIG).encode()
    return files, header, data


def whole(rng: np.random.Generator) -> Case:
    """Nothing changed: it must build."""
    files, header, data = _hugging_face(rng)
    return Case(files | {"model.safetensors": models.packed(header, data)}, "", str(pick(rng, TARGETS)))


def config(rng: np.random.Generator) -> Case:
    files, header, data = _hugging_face(rng, "BF16")
    value: dict[str, Any] = dict(models.CONFIG)
    if rng.random() < 0.25:
        value |= dict(pick(rng, contents.GOOD_KEYS) for _ in range(3))
        files["config.json"] = json.dumps(value).encode()
        return Case(files | {"model.safetensors": models.packed(header, data)}, "", "auto")
    for _ in range(int(rng.integers(1, 3))):
        key = str(pick(rng, [*value, *EXTRA_KEYS]))
        if key.startswith("rope_") and rng.random() < 0.4:
            value[key] = copy.deepcopy(pick(rng, ROPES))
        elif rng.random() < 0.15:
            value.pop(key, None)
        else:
            value[key] = odd_value(rng, value.get(key))
    if rng.random() < 0.2:
        value = {"model_type": "gemma3", "text_config": value, "tie_word_embeddings": True}
        value = changed(rng, value) if rng.random() < 0.5 else value
    text = as_json(rng, value)
    files["config.json"] = flipped(rng, text) if rng.random() < 0.2 else text
    return Case(files | {"model.safetensors": models.packed(header, data)}, "", "auto")


def _change_header(rng: np.random.Generator, header: dict[str, Any]) -> dict[str, Any]:
    name, other = str(pick(rng, list(header))), str(pick(rng, list(header)))
    item, how = header[name], int(rng.integers(12))
    if how == 0:
        del header[name]
    elif how == 1:
        header[str(pick(rng, [*TEXTS, "model.layers.00.mlp.up_proj.weight", "language_model." + name]))] = dict(item)
    elif how == 2:
        item["data_offsets"] = list(header[other]["data_offsets"])
    elif how == 3:
        item["data_offsets"], header[other]["data_offsets"] = header[other]["data_offsets"], item["data_offsets"]
    elif how == 4:
        item["data_offsets"][int(rng.integers(2))] = odd_value(rng, item["data_offsets"][0])
    elif how == 5:
        item["shape"] = pick(rng, [item["shape"][::-1], [*item["shape"], 1], [-s for s in item["shape"]], []])
    elif how == 6:
        item["shape"][0] = odd_value(rng, item["shape"][0])
    elif how == 7:
        item["dtype"] = pick(rng, ["F32", "F16", "BF16", "I32", "F64", "F8_E4M3", "Q4", "", None, 3])
    elif how == 8:
        header["__metadata__"] = pick(rng, [{"format": "pt"}, {"a": 1}, [], "x", None])
    elif how == 9:
        header = {
            str(pick(rng, ["model.language_model.", "language_model.model.", "x."])) + n: v for n, v in header.items()
        }
    elif how == 10:
        header[name] = odd_value(rng)
    else:
        return dict(changed(rng, header))
    return header


def safetensors(rng: np.random.Generator) -> Case:
    files, header, data = _hugging_face(rng)
    how = rng.random()
    if how < 0.15:  # in any order, which means nothing
        names = rng.permutation(list(header))
        file = models.packed({"__metadata__": {"format": "pt"}} | {str(n): header[str(n)] for n in names}, data)
    elif how < 0.6:
        file = models.packed(as_json(rng, _change_header(rng, header)), data)
    elif how < 0.75:  # values: a float of any bits somewhere
        raw = bytearray(data)
        at = 4 * int(rng.integers(len(raw) // 4))
        raw[at : at + 4] = pick(rng, [rng.bytes(4), b"\x00\x00\xc0\x7f", b"\xff\xff\x7f\x7f", b"\x80\x7f\x80\x7f"])
        file = models.packed(header, bytes(raw))
    elif how < 0.9:
        file = flipped(rng, models.packed(header, data))
    else:
        file = pick(rng, [lambda f: f[: int(rng.integers(len(f)))], lambda f: f + b"x", lambda f: f[8:]])(
            models.packed(header, data)
        )
    return Case(files | {"model.safetensors": file}, "", str(pick(rng, TARGETS)))


def index(rng: np.random.Generator) -> Case:
    files, _, _ = _hugging_face(rng, "BF16")
    tensors = models.weights(rng, "BF16")
    names = list(tensors)
    weight_map: dict[str, Any] = {}
    for i, part in enumerate((names[::2], names[1::2])):
        shard = f"model-{i}.safetensors"
        files[shard] = models.packed(*models.safetensors({n: tensors[n] for n in part}, "BF16"))
        weight_map |= dict.fromkeys(part, shard)
    value: Any = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    how = int(rng.integers(6))
    if how == 0:
        weight_map[str(pick(rng, names))] = pick(
            rng, [*TEXTS, "model-9.safetensors", "..", ".", "config.json", 1, None]
        )
    elif how == 1:
        weight_map[str(pick(rng, [*TEXTS, "nowhere.weight"]))] = "model-0.safetensors"
    elif how == 2:
        other = models.safetensors({EMBEDDING: tensors[EMBEDDING]} if rng.random() < 0.5 else tensors, "BF16")
        files[str(pick(rng, ["model.safetensors", "model-0.safetensors", "model-1.safetensors"]))] = models.packed(
            *other
        )
    elif how == 3:
        value = changed(rng, value)
    elif how == 4:
        del files["model-0.safetensors"]
    text = as_json(rng, value)
    files["model.safetensors.index.json"] = flipped(rng, text) if rng.random() < 0.2 else text
    return Case(files, "", "auto")


def tokenizer(rng: np.random.Generator) -> Case:
    files, header, data = _hugging_face(rng, "BF16")
    values = models.tokenizer_files()
    name = str(pick(rng, [*values, "chat_template.jinja", "chat_template.json"]))
    if rng.random() < 0.5:
        files["tokenizer.json"] = json.dumps(contents.tokenizer_json(rng)).encode()
    elif name not in values:
        template: Any = pick(rng, [*TEXTS, *TEMPLATES])
        text = str(template) if name.endswith("jinja") else json.dumps({"chat_template": template})
        files[name] = text.encode("utf-8", "replace")
    else:
        value = values[name]
        for _ in range(int(rng.integers(1, 3))):
            value = changed(rng, value)
        files[name] = as_json(rng, value)
        if rng.random() < 0.2:
            files[name] = flipped(rng, files[name])
        if rng.random() < 0.1:
            del files[name]
    return Case(files | {"model.safetensors": models.packed(header, data)}, "", "auto")


def template(rng: np.random.Generator) -> Case:
    files, header, data = _hugging_face(rng, "BF16")
    files["chat_template.jinja"] = contents.chat_template(rng).encode("utf-8", "replace")
    return Case(files | {"model.safetensors": models.packed(header, data)}, "", "auto")


def ropes(rng: np.random.Generator) -> Case:
    files, header, data = _hugging_face(rng, "BF16")
    value = {k: v for k, v in models.CONFIG.items() if not k.startswith("rope_")} | contents.rope_keys(rng)
    files["config.json"] = json.dumps(value).encode()
    return Case(files | {"model.safetensors": models.packed(header, data)}, "", "auto")


def values(rng: np.random.Generator) -> Case:
    target = str(pick(rng, TARGETS))
    if rng.random() < 0.4:
        return Case({"m.gguf": models.gguf_file(models.metadata(), models.gguf_tensors(rng, contents.change_values))},
                    "m.gguf", target)  # fmt: skip
    files, _, _ = _hugging_face(rng, "F32")
    tensors = models.weights(rng, "F32")
    contents.change_values(rng, tensors, -1.0)
    return Case(files | {"model.safetensors": models.packed(*models.safetensors(tensors, "F32"))}, "", target)


def vocabulary(rng: np.random.Generator) -> Case:
    keys = {key[0]: key for key in models.metadata()}
    for _ in range(int(rng.integers(1, 3))):
        key, kind, value = pick(rng, contents.TOKENIZER_KEYS)
        keys["tokenizer.ggml." + key] = ("tokenizer.ggml." + key, kind, value)
    data = models.gguf_file(list(keys.values()), models.gguf_tensors(rng))
    return Case({"m.gguf": data}, "m.gguf", str(pick(rng, TARGETS)))


def _odd_key(rng: np.random.Generator) -> tuple[int, Any]:
    """A GGUF value of any type."""
    kind = int(pick(rng, [*CODES, STRING, ARRAY]))
    if kind == STRING:
        return kind, str(pick(rng, TEXTS)).encode("utf-8", "replace").decode()
    if kind == ARRAY:
        item = int(pick(rng, [U32, I32, BOOL, STRING]))
        return kind, (item, ["a", "", "b"] if item == STRING else [1, 0, 1][: int(rng.integers(4))])
    if CODES[kind] in "fd":
        value = float(pick(rng, REALS))
        return kind, value if CODES[kind] == "d" or abs(value) < 3e38 or value != value else float("inf")
    bits = {"B": 8, "b": 7, "H": 16, "h": 15, "I": 32, "i": 31, "?": 1, "Q": 64, "q": 63}[CODES[kind]]
    return kind, int(pick(rng, [0, 1, 2, 3, 8, 31, 32, 48, 64, (1 << bits) - 1])) % (1 << bits)


GGUF_EXTRA = [
    ("gemma3.rope.scaling.type", STRING, "linear"), ("gemma3.rope.scaling.type", STRING, "none"),
    ("gemma3.rope.scaling.factor", F32, 8.0), ("gemma3.rope.scale_linear", F32, 4.0),
    ("gemma3.rope.freq_base_swa", F32, 5e3), ("gemma3.attn_logit_softcapping", F32, 50.0),
    ("gemma3.final_logit_softcapping", F32, 30.0), ("gemma3.expert_count", U32, 8), ("gemma3.unknown", U32, 1),
    ("general.alignment", U32, 64), ("general.alignment", U32, 3), ("split.count", U32, 2),
    ("tokenizer.chat_template", STRING, "{{ messages[0].content }}"), ("tokenizer.chat_template", STRING, "{% if %}"),
    ("tokenizer.ggml.add_bos_token", BOOL, False), ("tokenizer.ggml.eot_token_id", U64, 5),
    ("gemma3.rope.dimension_count", U32, 8), ("gemma3.vocab_size", U32, 47), ("general.name", STRING, "n\nx"),
]  # fmt: skip


def gguf(rng: np.random.Generator) -> Case:
    keys, tensors = models.metadata(), models.gguf_tensors(rng)
    odd: dict[str, Any] = {}
    if rng.random() < 0.3:
        keys += [key for group in rng.permutation(len(contents.GOOD_GGUF))[:2] for key in contents.GOOD_GGUF[group]]
        order = [keys[i] for i in rng.permutation(len(keys))]
        return Case({"m.gguf": models.gguf_file(order, tensors)}, "m.gguf", str(pick(rng, TARGETS)))
    for _ in range(int(rng.integers(1, 3))):
        _break_gguf(rng, keys, tensors, odd)
    aligned = [v for k, kind, v in keys if k == "general.alignment" and kind == U32 and v in (32, 64)]
    data = models.gguf_file(keys, tensors, align=aligned[0] if aligned else 32, **odd)
    how = rng.random()
    if how < 0.2:
        data = flipped(rng, data)
    elif how < 0.25:
        data = data[: int(rng.integers(len(data)))]
    return Case({"m.gguf": data}, "m.gguf", str(pick(rng, TARGETS)))


def _break_gguf(
    rng: np.random.Generator, keys: list[tuple[str, int, Any]], tensors: list[dict[str, Any]], odd: dict[str, Any]
) -> None:
    at, key = int(rng.integers(len(tensors))), int(rng.integers(len(keys)))
    tensor, how = tensors[at], int(rng.integers(14))
    if how == 0:
        del keys[key]
    elif how == 1:
        keys.append((keys[key][0], *_odd_key(rng)))
    elif how in (2, 3):
        keys[key] = (keys[key][0], *_odd_key(rng))
    elif how in (4, 5):
        keys.append(pick(rng, GGUF_EXTRA))
    elif how == 6:
        tensor["at"] = int(pick(rng, [0, 4, 32, 64, 1 << 40, (1 << 64) - 1, int(rng.integers(4000))]))
    elif how == 7:
        tensor["dims"] = pick(rng, [[], [0], tensor["dims"][::-1], [*tensor["dims"], 1], [1 << 63, 32], [1] * 9])
    elif how == 8:
        tensor["kind"] = int(rng.integers(45))
    elif how == 9:
        tensor["name"] = str(
            pick(rng, [tensors[0]["name"], EMBEDDING, "output.weight", "blk.07.attn_q.weight", "", "x\n"])
        )
    elif how == 10:
        tensors.append(dict(tensor))
    elif how == 11:
        del tensors[at]
    elif how == 12:
        odd[str(pick(rng, ["tensor_count", "key_count"]))] = int(pick(rng, [0, 1, 5, 1 << 28, 1 << 63]))
    else:
        tensor["raw"] = tensor["raw"][:-4] + bytes(pick(rng, [rng.bytes(4), b"\x00\x00\x80\x7f", b"\x00\x7e\x00\x7e"]))


def blocks(rng: np.random.Generator) -> Case:
    """A GGUF of Q4_0, mostly with some Q4_1 or others: odd scales, kinds, places and bytes."""
    others = pick(rng, [(), (models.GGUF_Q4_1,), (models.GGUF_Q4_1,), (models.GGUF_Q4_1, models.GGUF_Q8_0, 1, 30)])
    tensors, keys = models.gguf_tensors(rng, kinds=(models.GGUF_Q4_0,) * 6 + others), models.metadata()
    for _ in range(int(rng.integers(0, 3))):
        tensor, how = pick(rng, [t for t in tensors if t["kind"] in SCALES]), rng.random()
        if how < 0.6:
            size, words = SCALES[tensor["kind"]]
            raw = bytearray(tensor["raw"])
            for _ in range(int(rng.integers(1, 4))):
                at = int(rng.integers(len(raw) // size)) * size + 2 * int(rng.integers(words))
                raw[at : at + 2] = pick(rng, ODD_HALVES).to_bytes(2, "little")
            tensor["raw"] = bytes(raw)
        elif how < 0.7:
            tensor["kind"] = int(pick(rng, [*SCALES, 0, 1, 6, 7, 20, 30]))
        elif how < 0.8:
            length = len(tensor["raw"])
            tensor["at"] = int(pick(rng, [0, length, 32 * int(rng.integers(400)), 1 << 20, (1 << 64) - 32]))
        elif how < 0.9:
            tensor["raw"] = pick(rng, [tensor["raw"][:-32], tensor["raw"] * 2, rng.bytes(len(tensor["raw"]))])
        else:
            tensor["dims"] = pick(rng, [tensor["dims"][::-1], [2 * tensor["dims"][0], tensor["dims"][1] // 2]])
    data, how = models.gguf_file(keys, tensors), rng.random()
    if how < 0.3:
        data = flipped(rng, data) if how < 0.2 else data[: int(rng.integers(len(data)))]
    return Case({"m.gguf": data}, "m.gguf", str(pick(rng, [*TARGETS, "q4_0", "q4_0", "q4_0", "q4_0", "q4_0"])))


SCALES = {models.GGUF_Q4_0: (18, 1), models.GGUF_Q4_1: (20, 2), models.GGUF_Q8_0: (34, 1)}
"""Bytes of a block by its kind, and the float16s in front of them."""
ODD_HALVES = [0, 0x8000, 1, 0x83FF, 0x0400, 0x3C00, 0x6FFF, 0x7000, 0xF000, 0x7BFF, 0xFBFF, 0x7C00, 0xFC00, 0x7E01]
"""float16: zeros, denormals, the least normal one, 1, the largest of which 8 times fits, and beyond; inf and NaN."""
KINDS: dict[str, Callable[[np.random.Generator], Case]] = {
    "whole": whole, "config": config, "safetensors": safetensors, "index": index, "tokenizer": tokenizer, "gguf": gguf,
    "template": template, "ropes": ropes, "values": values, "vocabulary": vocabulary, "blocks": blocks,
}  # fmt: skip
"""Maker of cases by the name that the runner prints. A kind of file with its own runner is a line of its own here."""
