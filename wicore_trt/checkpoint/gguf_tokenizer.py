"""Gemma's tokenizer from GGUF metadata, as the files Hugging Face's tokenizers read.

GGUF stores SentencePiece pieces without merges; they follow from the vocabulary: each piece can come from any two
pieces it splits into, and pieces merge in the order of their ids. Gemma's normalizer, splitter and decoder are those
of its published tokenizer.json. It knows nothing of weights. Invariant: the ids equal those of transformers'
AutoTokenizer for the same file (checked in tests).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wicore_trt.errors import CheckpointError

SPACE = "\u2581"  # SentencePiece's visible space
_CONTROL, _USER_DEFINED = 3, 4
_ROLES = {
    "bos_token": "bos_token_id",
    "eos_token": "eos_token_id",
    "unk_token": "unknown_token_id",
    "pad_token": "padding_token_id",
}
_END_OF_TURN = "<end_of_turn>"


def end_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Ids that end a generation: eos, end of turn if named, and `<end_of_turn>` when the model has a chat template."""
    ids = [metadata.get("tokenizer.ggml.eos_token_id"), metadata.get("tokenizer.ggml.eot_token_id")]
    tokens = metadata.get("tokenizer.ggml.tokens", [])
    if "tokenizer.chat_template" in metadata and _END_OF_TURN in tokens:
        ids.append(tokens.index(_END_OF_TURN))
    return sorted({i for i in ids if i is not None})


def write_tokenizer(metadata: Mapping[str, Any], generation_config: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json; returns their paths.

    Raises CheckpointError when the file carries no SentencePiece vocabulary.
    """
    if metadata.get("tokenizer.ggml.model") != "llama" or "tokenizer.ggml.tokens" not in metadata:
        raise CheckpointError(f"The GGUF's tokenizer is {metadata.get('tokenizer.ggml.model')!r}, not SentencePiece.")
    paths = [directory / n for n in ("tokenizer.json", "tokenizer_config.json", "generation_config.json")]
    paths[0].write_text(_build(metadata).to_str(pretty=False), encoding="utf-8")  # its own save hides what failed
    tokens = metadata["tokenizer.ggml.tokens"]
    config: dict[str, Any] = {
        "tokenizer_class": "GemmaTokenizer",
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", True)),
        "add_eos_token": bool(metadata.get("tokenizer.ggml.add_eos_token", False)),
        "clean_up_tokenization_spaces": False,
    }
    for role, key in _ROLES.items():
        index = metadata.get(f"tokenizer.ggml.{key}")
        if index is not None:
            config[role] = tokens[index]
    if "tokenizer.chat_template" in metadata:
        config["chat_template"] = metadata["tokenizer.chat_template"]
    for path, data in zip(paths[1:], (config, dict(generation_config)), strict=True):
        path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return paths


def _build(metadata: Mapping[str, Any]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    tokens = [_respelled(t) for t in metadata["tokenizer.ggml.tokens"]]
    vocab = {token: index for index, token in enumerate(tokens)}
    raw = metadata["tokenizer.ggml.tokens"]
    unk = raw[metadata.get("tokenizer.ggml.unknown_token_id", 3)]
    bpe = models.BPE(vocab=vocab, merges=_merges(tokens, vocab), unk_token=unk, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    types = metadata.get("tokenizer.ggml.token_type") or [0] * len(raw)
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(raw, types, strict=True)
        if kind in (_CONTROL, _USER_DEFINED) and token in vocab
    ]
    tokenizer.add_tokens(added)
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if bos is not None and metadata.get("tokenizer.ggml.add_bos_token", True):
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{raw[bos]} $A", pair=f"{raw[bos]} $A {raw[bos]}:1 $B:1", special_tokens=[(raw[bos], bos)]
        )
    return tokenizer


def _respelled(token: str) -> str:
    """GGUF spells runs of spaces with spaces; the normalizer turns text's spaces into the visible one."""
    return SPACE * len(token) if " " in token and not token.strip() else token


def _merges(tokens: list[str], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """All splits of each token into two tokens, by the token's id and then longest left part first."""
    return [
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    ]
