"""Models whose files are whole and whose contents are odd: parts of tokenizers, chat templates, rope keys, values.

Much of it is right, so that what is accepted can be compared. Knows the files and nothing of the product.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np

from . import models
from .models import ARRAY, BOOL, F32, I32, STRING, U32

SPACE = "\u2581"
REPLACE = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
BACK = {"type": "Replace", "pattern": {"String": SPACE}, "content": " "}
BOMB = {"type": "Replace", "pattern": {"String": "a"}, "content": "a" * 4}
REGEX = {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": "b"}
SPLIT = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
META = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": True}
BOS = {"SpecialToken": {"id": "<bos>", "type_id": 0}}
TEXT = {"Sequence": {"id": "A", "type_id": 0}}
BOS_FIRST = {
    "type": "TemplateProcessing", "single": [BOS, TEXT], "pair": [BOS, TEXT],
    "special_tokens": {"<bos>": {"id": "<bos>", "ids": [2], "tokens": ["<bos>"]}},
}  # fmt: skip
PARTS: dict[str, list[Any]] = {  # what a tokenizer.json may hold, and in each list some that it may not
    "normalizer": [
        None, REPLACE, {"type": "Prepend", "prepend": SPACE}, {"type": "Sequence", "normalizers": [REPLACE, BOMB]},
        {"type": "Sequence", "normalizers": []}, {"type": "Sequence", "normalizers": [BOMB] * 9}, REGEX,
        {"type": "Precompiled", "precompiled_charsmap": "/w=="}, {"type": "Sequence", "normalizers": [BOMB] * 5},
        BOMB | {"content": "a" * 10**6}, BOMB | {"pattern": {"String": ""}}, {"type": "NFKC"},
    ],
    "pre_tokenizer": [
        None, SPLIT, META, SPLIT | {"behavior": "Isolated"}, {"type": "Sequence", "pretokenizers": [SPLIT, META]},
        SPLIT | {"pattern": {"String": ""}}, SPLIT | {"pattern": {"Regex": "(x+x+)+y"}},
        SPLIT | {"behavior": "Removed"}, SPLIT | {"invert": True},
        {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
    ],
    "decoder": [
        None, {"type": "Sequence", "decoders": [BACK, {"type": "ByteFallback"}, {"type": "Fuse"}]}, {"type": "Fuse"},
        BACK, {"type": "Strip", "content": " ", "start": 1, "stop": 0}, META,
        {"type": "Sequence", "decoders": [BOMB] * 5}, {"type": "Strip", "content": " ", "start": 1 << 62, "stop": 1},
        {"type": "WordPiece", "prefix": "", "cleanup": True},
    ],
    "post_processor": [None, BOS_FIRST, BOS_FIRST | {"special_tokens": {}}, {"type": "ByteLevel"}],
    "padding": [None, {"strategy": "BatchLongest", "direction": "Left", "pad_to_multiple_of": 0, "pad_id": 0,
                       "pad_type_id": 0, "pad_token": "<pad>"}],
    "truncation": [None, {"direction": "Right", "max_length": 0, "strategy": "LongestFirst", "stride": 9}],
}  # fmt: skip
MODEL: dict[str, list[Any]] = {
    "byte_fallback": [True, False], "fuse_unk": [True], "ignore_merges": [True], "dropout": [None, 0.0, 0.5, 2.0],
    "unk_token": [None, "<unk>", "nowhere"], "continuing_subword_prefix": [None, "", "\u00e9"],
    "end_of_word_suffix": ["", "</w>"], "merges": [[["a", "a"]], ["b b"], [["a", "q"]], [["a"]], [[]], ["x"], [3]],
    "type": ["BPE", "Unigram", "WordLevel", "WordPiece"],
}  # fmt: skip
FRAGMENTS = [
    "{{ bos_token }}", "{% for m in messages %}{{ m['role'] }}: {{ m['content'] | trim }}{% endfor %}", "text",
    "{% if add_generation_prompt %}{{ '<go>' }}{% endif %}", "{% set x = messages[0].content * 3 %}{{ x }}",
    "{% for i in range(100) %}{{ loop.index }}{% endfor %}", "{{ messages | tojson }}",
    "{% macro f() %}m{% endmacro %}{{ f() }}",
    "{% for m in messages %}{% if loop.last %}{% break %}{% endif %}{% endfor %}", "{{ tools is none }}",
]  # fmt: skip
BAD_FRAGMENTS = [
    "{{ 'x' * 10**10 }}",
    "{% set n = namespace(x='ab') %}{% for i in range(99) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
    "{{ 'a' | center(10**11) }}", "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "{{ ''.__class__.__mro__ }}",
    "{{ messages.nothing.more }}", "{% if %}", "{{ 9**9**9 }}", "{{ raise_exception('no') }}",
    "{{ '%99999999999d' % 1 }}",
    "{{ 'a' * 40000000 }}", "{% include 'x' %}", "{{ 1 / 0 }}", "\ud800", "(" * 20_000, "{{" + "(" * 5_000,
]  # fmt: skip
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
SIZES = [1e-45, 1e-42, 1e-40, 1.2e-38, 1e-20, 1e-9, 6e-8, 3e-5, 1.0, 3e4, 6.5e4, 7e4, 1e20, 1e38, 3.38e38, 3.4028235e38]
NORMS = [1e-7, 1e-3, 0.1, 0.3, 0.4999, 0.5, 1.0, 3.0, 60.0, 300.0, -0.3, 0.0, -0.0]
TOKENIZER_KEYS: list[tuple[str, int, Any]] = [
    ("add_bos_token", BOOL, True), ("add_bos_token", BOOL, False), ("add_eos_token", BOOL, False),
    ("pre", STRING, "default"),
    ("eos_token_ids", ARRAY, (I32, [1, 7])), ("eot_token_id", U32, 5), ("merges", ARRAY, (STRING, [])),
    ("add_sep_token", BOOL, False), ("mask_token_id", U32, 4), ("padding_token_id", U32, 0),
    ("add_space_prefix", BOOL, True), ("add_eos_token", BOOL, True), ("merges", ARRAY, (STRING, ["a b"])),
    ("scores", ARRAY, (F32, [0.0] * 48)), ("scores", ARRAY, (F32, [float(i) for i in range(48)])), ("pre", STRING, "x"),
    ("scores", ARRAY, (F32, [1.0])), ("token_type", ARRAY, (I32, [6] * 48)), ("token_type", ARRAY, (I32, [4] * 48)),
    ("token_type", ARRAY, (I32, [9] * 48)), ("remove_extra_whitespaces", BOOL, True), ("eot_token_id", U32, 48),
    ("precompiled_charsmap", ARRAY, (I32, [1, 2])), ("eos_token_ids", ARRAY, (I32, [99])),
    ("token_type", ARRAY, (I32, [1] * 48)), ("token_type", ARRAY, (I32, [5] * 48)), ("eom_token_id", U32, 6),
    ("model", STRING, "gpt2"), ("merges", ARRAY, (STRING, ["a a", "b b"])), ("merges", ARRAY, (STRING, ["b b", "a a"])),
    ("merges", ARRAY, (STRING, ["a  a"])), ("pre", STRING, "gemma4"), ("fim_pre_token_id", U32, 7),
]  # fmt: skip

GOOD_KEYS: list[tuple[str, Any]] = [  # of a config.json, each at a value that another model could have
    ("sliding_window", 16), ("rms_norm_eps", 1e-5), ("rope_theta", 5e5), ("max_position_embeddings", 512),
    ("query_pre_attn_scalar", 24), ("torch_dtype", "x"), ("note", [1]), ("final_logit_softcapping", 30.0),
    ("layer_types", ["full_attention"] * 2), ("rope_local_base_freq", 2e3), ("attention_bias", None),
]  # fmt: skip
GOOD_GGUF: list[list[tuple[str, int, Any]]] = [
    [("gemma3.rope.scaling.type", STRING, "linear"), ("gemma3.rope.scaling.factor", F32, 8.0)],
    [("gemma3.rope.freq_base_swa", F32, 5e3)], [("gemma3.final_logit_softcapping", F32, 30.0)],
    [("general.name", STRING, "n\nx")], [("tokenizer.chat_template", STRING, "{{ messages[0].content }}")],
    [("split.count", U32, 1), ("split.no", U32, 0)], [("gemma3.attention.key_length_swa", U32, 8)],
    [("tokenizer.chat_templates", ARRAY, (STRING, ["rag"])), ("tokenizer.chat_template.rag", STRING, "{{ tools }}")],
    [("general.quantization_version", U32, 2)], [("other.program", STRING, "x")],
    [("tokenizer.ggml.eot_token_id", U32, 5)], [("gemma3.vocab_size", U32, 48)], [("gemma3.expert_count", U32, 0)],
]  # fmt: skip


def pick(rng: np.random.Generator, items: Any) -> Any:
    return items[int(rng.integers(len(items)))]


def tokenizer_json(rng: np.random.Generator) -> dict[str, Any]:
    """A tokenizer of Gemma's parts, with some parts exchanged and some ids and tokens odd."""
    value = copy.deepcopy(models.tokenizer_files()["tokenizer.json"])
    value |= {
        "normalizer": REPLACE,
        "pre_tokenizer": SPLIT,
        "decoder": PARTS["decoder"][1],
        "post_processor": BOS_FIRST,
    }
    for _ in range(int(rng.integers(0, 3))):
        how, model, added = int(rng.integers(8)), value["model"], value["added_tokens"]
        token, entry = pick(rng, models.PIECES), pick(rng, added)
        if how < 4:
            key = pick(rng, list(PARTS))
            value[key] = copy.deepcopy(pick(rng, PARTS[key]))
        elif how == 4:
            key = pick(rng, list(MODEL))
            model[key] = copy.deepcopy(pick(rng, MODEL[key]))
        elif how == 5:
            model["vocab"][token] = pick(rng, [model["vocab"].get(token, 0), 0, 47, 48, -1, 1 << 31, 1 << 40, 1.0])
        elif how == 6:
            entry[pick(rng, ["id", "lstrip", "rstrip", "single_word", "normalized"])] = pick(
                rng, [True, False, entry["id"]]
            )
        else:
            added.append(
                dict(
                    entry, id=pick(rng, [9, 47, 48, 5000]), content=pick(rng, ["", "new", models.PIECES[9], "z" * 600])
                )
            )
    return value


def chat_template(rng: np.random.Generator) -> str:
    """Fragments one behind the other; one template in three has one that must not render."""
    found = [pick(rng, FRAGMENTS) for _ in range(int(rng.integers(1, 6)))]
    how = rng.random()
    if how < 0.33:
        found.insert(int(rng.integers(len(found))), SLOW if how < 0.005 else pick(rng, BAD_FRAGMENTS))
    return "".join(found)


def rope_keys(rng: np.random.Generator) -> dict[str, Any]:
    """The keys of a config.json that say how positions are rotated, in old and new places at once."""
    theta, local, factor = (pick(rng, numbers) for numbers in ([1e6, 5e5], [1e4, 2e3], [8.0, 1.0]))

    def rope(base: float, scaled: bool) -> dict[str, Any]:
        said: dict[str, Any] = {"rope_theta": base} if rng.random() < 0.4 else {}
        said |= {"rope_type": "linear", "factor": factor} if scaled and factor != 1.0 else {}
        odd = {"rope_theta": 3e3, "factor": 2.0, "rope_type": "yarn", "type": "linear", "attention_factor": 2.0,
               "partial_rotary_factor": 1.0, "original_max_position_embeddings": 64}  # fmt: skip
        if rng.random() < 0.15:
            key = pick(rng, list(odd))
            said[key] = odd[key]
        return said

    found: dict[str, Any] = {}
    if rng.random() < 0.5:
        found["rope_theta"] = theta
    if rng.random() < 0.5:
        found["rope_local_base_freq"] = local
    new = rng.random() < 0.5
    if new:
        found["rope_parameters"] = {"full_attention": rope(theta, True), "sliding_attention": rope(local, False)}
    if not new or rng.random() < 0.3:
        found["rope_scaling"] = rope(theta, True) or None
    if rng.random() < 0.1:
        found[pick(rng, ["partial_rotary_factor", "rope_percent", "rope_type"])] = pick(rng, [0.5, 1, None])
    return found


def change_values(rng: np.random.Generator, tensors: dict[str, np.ndarray], norm_add: float) -> None:
    """Rows of float32 tensors at the ends of the formats' ranges; norms that multiply by little or by much."""
    for _ in range(int(rng.integers(1, 5))):
        tensor = tensors[pick(rng, list(tensors))]
        if tensor.ndim == 1:
            tensor[int(rng.integers(len(tensor)))] = np.float32(pick(rng, NORMS) + norm_add)
            continue
        row = rng.standard_normal(tensor.shape[1]).astype(np.float32)
        size = np.float32(pick(rng, SIZES if rng.random() < 0.5 else SIZES[:10]))
        tensor[int(rng.integers(len(tensor)))] = row / np.abs(row).max() * size
