"""A small tokenizer of Gemma's construction, and its files, for tests that need no model."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from wicore_trt.text.tokenizer import Tokenizer

SPECIALS = ["<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>"]
PAD, EOS, BOS, UNK, TURN, END_OF_TURN = range(6)
FIRST_BYTE = len(SPECIALS)
LETTERS = [*"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:!?'\n", "\u2581", "é", "ß", "日", "本", "🙂"]
MERGES = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o"), ("\u2581", "w"), ("o", "r"), ("\u2581w", "or"),
          ("l", "d"), ("\u2581wor", "ld"), ("\u2581", "\u2581"), ("日", "本")]  # fmt: skip

# The control flow of Gemma 3's published template: BOS, system folded into the first user turn, model for assistant.
TEMPLATE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- set prefix = messages[0]['content'] + '\n\n' -%}
    {%- set turns = messages[1:] -%}
{%- else -%}
    {%- set prefix = '' -%}
    {%- set turns = messages -%}
{%- endif -%}
{%- for message in turns -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}
    {%- endif -%}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] -%}
    {{ '<start_of_turn>' + role + '\n' + (prefix if loop.first else '') }}
    {{- message['content'] | trim + '<end_of_turn>\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{ '<start_of_turn>model\n' }}
{%- endif -%}"""


def backend(*, post_processor: bool = True) -> tokenizers.Tokenizer:
    """BPE with byte fallback, Gemma's normalizer, splitter and decoder."""
    pieces = [*SPECIALS, *(f"<0x{b:02X}>" for b in range(256)), *LETTERS, *(a + b for a, b in MERGES)]
    model = models.BPE(
        vocab={piece: i for i, piece in enumerate(pieces)},
        merges=MERGES,
        unk_token="<unk>",
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in SPECIALS])
    if post_processor:
        tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    return tokenizer


def write(directory: Path, *, post_processor: bool = True, **files: object) -> Path:
    """Tokenizer files of an instruction-tuned model. `files` adds or replaces JSON files by stem; None drops one."""
    backend(post_processor=post_processor).save(str(directory / "tokenizer.json"))
    contents: dict[str, object] = {
        "tokenizer_config": {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE},
        "generation_config": {"eos_token_id": [EOS, END_OF_TURN]},
    }
    for stem, value in (contents | files).items():
        if value is not None:
            (directory / f"{stem}.json").write_text(json.dumps(value), encoding="utf-8")
    return directory


def synthetic() -> Tokenizer:
    """The same without files or a chat template."""
    return Tokenizer(backend(), bos_id=BOS, eos_ids=(EOS,))
