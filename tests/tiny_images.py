"""A tiny multimodal Gemma 3 in Hugging Face layout, with random weights, and transformers' model of it as an oracle.

Writing needs no transformers: `load_oracle` proves that its Gemma3ForConditionalGeneration finds every tensor.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import tokenizers
from safetensors.numpy import save_file
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors

from wicore_trt.checkpoint.names import hf_shapes
from wicore_trt.model.hf_config import read_hf_config

if TYPE_CHECKING:
    from transformers import Gemma3ForConditionalGeneration
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

VISION = {
    "model_type": "siglip_vision_model", "hidden_size": 32, "image_size": 56, "patch_size": 14,
    "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2, "num_channels": 3,
    "hidden_act": "gelu_pytorch_tanh", "layer_norm_eps": 1e-6, "attention_dropout": 0.0, "vision_use_head": False,
}  # fmt: skip
"""16 patches of 14 x 14 pixels, pooled to 2 x 2 tokens."""
TRUE_VISION = VISION | {
    "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "num_hidden_layers": 27,
    "num_attention_heads": 16,
}  # fmt: skip
"""The 416 M parameters of every Gemma 3 that sees: 4,096 patches, 256 tokens (`mm_tokens_per_image` 256)."""
TEXT = {
    "model_type": "gemma3_text", "vocab_size": 384, "hidden_size": 16, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "intermediate_size": 24, "sliding_window": 8,
    "sliding_window_pattern": 2, "max_position_embeddings": 512, "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 16,
}  # fmt: skip
TOKENS = 4
"""Tokens of an image."""
_EMBEDDING = 0.25  # standard deviation
_PIECES = [
    "<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>", "<end_of_image>",
    *(f"<0x{byte:02X}>" for byte in range(256)), *"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.,:!?\n\u2581",
]  # fmt: skip
_MERGES = [("\n", "\n"), ("\n\n", "\n"), ("\n\n", "\n\n"), ("u", "s"), ("us", "e"), ("use", "r")]
PAD, EOS, BOS, UNK, TURN, END_OF_TURN, BOI, EOI = range(8)
SOFT = len(_PIECES) + len(_MERGES)
"""The id of `<image_soft_token>`, the last of the tokenizer; the embedding has more rows, as Gemma's has."""
SPECIALS = {
    "bos_token": "<bos>", "eos_token": "<eos>", "pad_token": "<pad>", "unk_token": "<unk>",
    "boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>",
}  # fmt: skip
TEMPLATE = """{{ bos_token }}
{%- if messages[0]['role'] == 'system' -%}
    {%- if messages[0]['content'] is string -%}
        {%- set first_user_prefix = messages[0]['content'] + '

' -%}
    {%- else -%}
        {%- set first_user_prefix = messages[0]['content'][0]['text'] + '

' -%}
    {%- endif -%}
    {%- set loop_messages = messages[1:] -%}
{%- else -%}
    {%- set first_user_prefix = "" -%}
    {%- set loop_messages = messages -%}
{%- endif -%}
{%- for message in loop_messages -%}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) -%}
        {{ raise_exception("Conversation roles must alternate user/assistant/user/assistant/...") }}
    {%- endif -%}
    {%- if (message['role'] == 'assistant') -%}
        {%- set role = "model" -%}
    {%- else -%}
        {%- set role = message['role'] -%}
    {%- endif -%}
    {{ '<start_of_turn>' + role + '
' + (first_user_prefix if loop.first else "") }}
    {%- if message['content'] is string -%}
        {{ message['content'] | trim }}
    {%- elif message['content'] is iterable -%}
        {%- for item in message['content'] -%}
            {%- if item['type'] == 'image' -%}
                {{ '<start_of_image>' }}
            {%- elif item['type'] == 'text' -%}
                {{ item['text'] | trim }}
            {%- endif -%}
        {%- endfor -%}
    {%- else -%}
        {{ raise_exception("Invalid content type") }}
    {%- endif -%}
    {{ '<end_of_turn>
' }}
{%- endfor -%}
{%- if add_generation_prompt -%}
    {{'<start_of_turn>model
'}}
{%- endif -%}
"""
"""The template that Google publishes with Gemma 3, its line breaks included."""


def vision_shapes(vision: dict[str, Any], text_hidden: int) -> dict[str, tuple[int, ...]]:
    """Tensors of the tower and the projector, by the names of transformers 4 and of Google's files."""
    size, mlp = vision["hidden_size"], vision["intermediate_size"]
    patches = (vision["image_size"] // vision["patch_size"]) ** 2
    inside = {f"self_attn.{n}_proj": (size, size) for n in ("q", "k", "v", "out")}
    inside |= {"mlp.fc1": (mlp, size), "mlp.fc2": (size, mlp), "layer_norm1": (size,), "layer_norm2": (size,)}
    shapes: dict[str, tuple[int, ...]] = {
        "embeddings.patch_embedding.weight": (size, vision["num_channels"], *[vision["patch_size"]] * 2),
        "embeddings.patch_embedding.bias": (size,),
        "embeddings.position_embedding.weight": (patches, size),
    }
    for layer in range(vision["num_hidden_layers"]):
        for name, shape in inside.items():
            shapes[f"encoder.layers.{layer}.{name}.weight"] = shape
            shapes[f"encoder.layers.{layer}.{name}.bias"] = shape[:1]
    shapes |= {"post_layernorm.weight": (size,), "post_layernorm.bias": (size,)}
    return {
        **{f"vision_tower.vision_model.{name}": shape for name, shape in shapes.items()},
        "multi_modal_projector.mm_input_projection_weight": (size, text_hidden),
        "multi_modal_projector.mm_soft_emb_norm.weight": (size,),
    }


def make_vision_tensors(vision: dict[str, Any], text_hidden: int, seed: int = 0) -> dict[str, np.ndarray]:
    """Random float32 tensors, scaled so that every layer matters and features are as large as embeddings."""
    random = np.random.default_rng(seed)
    tensors = {}
    for name, shape in vision_shapes(vision, text_hidden).items():
        values = random.standard_normal(shape, np.float32)
        if len(shape) == 1:  # biases, and norms: those of the tower are factors, the projector's is 1 + w
            factor = "norm" in name and name.endswith("weight") and "mm_soft" not in name
            tensors[name] = values * np.float32(0.1) + np.float32(factor)
        elif "position" in name:
            tensors[name] = values * np.float32(0.5)
        elif "mm_input" in name:
            tensors[name] = values * np.float32(_EMBEDDING * (text_hidden / shape[0]) ** 0.5)
        else:
            tensors[name] = values / np.float32(np.sqrt(np.prod(shape[1:])))
    return tensors


def make_config(vision: dict[str, Any] = VISION, *, tokens: int = TOKENS, **text: Any) -> dict[str, Any]:
    """config.json; `text` replaces keys of the text model."""
    return {
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": TEXT | text,
        "vision_config": vision, "mm_tokens_per_image": tokens, "boi_token_index": BOI, "eoi_token_index": EOI,
        "image_token_index": SOFT, "eos_token_id": [EOS, END_OF_TURN],
    }  # fmt: skip


def write_image_source(
    path: Path, seed: int = 0, *, vision: dict[str, Any] = VISION, tokens: int = TOKENS, **text: Any
) -> Path:
    """Write config.json, float32 weights and the files of tokenizer and processor. `text` replaces keys of TEXT."""
    path.mkdir()
    config = make_config(vision, tokens=tokens, **text)
    random = np.random.default_rng(seed)
    shapes = hf_shapes(read_hf_config(config))
    tensors = {f"language_model.{n}": random.standard_normal(s, np.float32) for n, s in shapes.items()}
    tensors["language_model.model.embed_tokens.weight"] *= _EMBEDDING  # small, so that layers choose the tokens
    tensors |= make_vision_tensors(vision, config["text_config"]["hidden_size"], seed)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(config))
    write_image_tokenizer(path, image_size=vision["image_size"], tokens=tokens)
    return path


def write_image_tokenizer(path: Path, *, image_size: int = 56, tokens: int = TOKENS) -> None:
    """Files of a tokenizer built as Gemma's (merged line breaks, bytes) and of Gemma 3's processor."""
    pieces = [*_PIECES, *(a + b for a, b in _MERGES)]
    tokenizer = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, _MERGES, unk_token="<unk>", fuse_unk=True, byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Replace(" ", "\u2581")
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = [*pieces[: EOI + 1], "<image_soft_token>"]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.post_processor = processors.TemplateProcessing(single="<bos> $A", special_tokens=[("<bos>", BOS)])
    tokenizer.save(str(path / "tokenizer.json"))
    extra = {name: SPECIALS[name] for name in ("boi_token", "eoi_token", "image_token")}
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                **SPECIALS, "extra_special_tokens": extra, "add_bos_token": True, "add_eos_token": False,
                "tokenizer_class": "GemmaTokenizer", "processor_class": "Gemma3Processor", "chat_template": TEMPLATE,
            }
        )
    )  # fmt: skip
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [EOS, END_OF_TURN]}))
    (path / "processor_config.json").write_text(
        json.dumps({"image_seq_length": tokens, "processor_class": "Gemma3Processor"})
    )
    (path / "preprocessor_config.json").write_text(
        json.dumps(
            {
                "image_processor_type": "Gemma3ImageProcessor", "processor_class": "Gemma3Processor", "resample": 2,
                "do_normalize": True, "do_rescale": True, "do_resize": True, "do_pan_and_scan": None,
                "image_mean": [0.5] * 3, "image_std": [0.5] * 3, "rescale_factor": 1 / 255,
                "image_seq_length": tokens, "size": {"height": image_size, "width": image_size},
            }
        )
    )  # fmt: skip


def load_oracle(path: Path) -> Gemma3ForConditionalGeneration:
    """Transformers' model of a source in float32, eager attention; asserts that no tensor is missing or left over."""
    import torch
    from transformers import Gemma3ForConditionalGeneration

    model, info = Gemma3ForConditionalGeneration.from_pretrained(
        path, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), info
    return model.eval()


def load_image_processor(path: Path) -> Gemma3ImageProcessorPil:
    """Transformers' image processor of a source: Pillow's resizer."""
    from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

    return Gemma3ImageProcessorPil.from_pretrained(path)


def load_processor(path: Path) -> Gemma3Processor:
    """Transformers' processor of a source: texts with `<start_of_image>` and images to token ids and pixels."""
    from transformers import GemmaTokenizer
    from transformers.models.gemma3.processing_gemma3 import Gemma3Processor

    tokenizer = GemmaTokenizer.from_pretrained(path)
    seq = json.loads((path / "processor_config.json").read_text())["image_seq_length"]
    return Gemma3Processor(load_image_processor(path), tokenizer, tokenizer.chat_template, image_seq_length=seq)
