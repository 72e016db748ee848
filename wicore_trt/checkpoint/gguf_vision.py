"""Read Gemma 3's image encoder from GGUF: llama.cpp's mmproj file, or Ollama's file of the whole model.

Names and values follow the converters: llama.cpp's conversion/gemma.py (Gemma3VisionModel) and tools/mtmd/clip.cpp,
and Ollama's convert/convert_gemma3.go. It knows no text tensors. Invariant: tensors get the names of `model.vision`.
Both add 1 to the projector's norm and keep the projection as [in, out], as Hugging Face has it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from wicore_trt.checkpoint.gguf_file import GgufFile
from wicore_trt.checkpoint.gguf_tokenizer import GgufVocabulary
from wicore_trt.checkpoint.names import TEXT_ONLY, check_vision
from wicore_trt.errors import CheckpointError, named
from wicore_trt.model.spec import Gemma3Spec, SpecError
from wicore_trt.model.vision import FINAL_NORM, PATCHES, POSITIONS, PROJECTION, SOFT_NORM, VisionSpec, vision_layer

IMAGE_TENSORS = ("v.", "mm.")
_TOP = {  # llama.cpp's names, and then Ollama's
    "v.patch_embd.weight": f"{PATCHES}.weight", "v.patch_embd.bias": f"{PATCHES}.bias",
    "v.position_embd.weight": POSITIONS, "v.post_ln.weight": f"{FINAL_NORM}.weight",
    "v.post_ln.bias": f"{FINAL_NORM}.bias", "mm.input_projection.weight": PROJECTION,
    "mm.soft_emb_norm.weight": SOFT_NORM,
    "v.patch_embedding.weight": f"{PATCHES}.weight", "v.patch_embedding.bias": f"{PATCHES}.bias",
    "v.position_embedding.weight": POSITIONS, "v.post_layernorm.weight": f"{FINAL_NORM}.weight",
    "v.post_layernorm.bias": f"{FINAL_NORM}.bias", "mm.mm_input_projection.weight": PROJECTION,
    "mm.mm_soft_emb_norm.weight": SOFT_NORM,
}  # fmt: skip
_LAYER = {
    "ln1": "layer_norm1", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj",
    "attn_out": "self_attn.out_proj", "ln2": "layer_norm2", "ffn_up": "mlp.fc1", "ffn_down": "mlp.fc2",
    "attn_output": "self_attn.out_proj", "layer_norm1": "layer_norm1", "layer_norm2": "layer_norm2",
    "mlp.fc1": "mlp.fc1", "mlp.fc2": "mlp.fc2",
}  # fmt: skip
_LAYER_NAME = re.compile(r"v\.blk\.(0|[1-9]\d*)\.(.+)\.(weight|bias)")
_SWAPPED = {"ffn_up": "ffn_down", "ffn_down": "ffn_up"}
_KEYS = {
    "image_size": "image_size", "patch_size": "patch_size", "hidden_size": "embedding_length",
    "num_layers": "block_count", "num_heads": "attention.head_count", "intermediate_size": "feed_forward_length",
    "layer_norm_eps": "attention.layer_norm_epsilon",
}  # fmt: skip
_MARKS = ("<start_of_image>", "<image_soft_token>", "<end_of_image>")
_UNUSED = re.compile(r"<unused\d+>")
_SCALE = 4  # patches on each side of a token where the file does not say it
_TOKENS = 256


def read_gguf_vision(
    file: GgufFile, text: Gemma3Spec, vocabulary: GgufVocabulary, note: Callable[[str], None]
) -> tuple[VisionSpec, dict[str, str]]:
    """Read the encoder in `file`, whose general.architecture is clip for an mmproj file; returns names in the file by
    those of `model.vision`, all of them. An unused token of `vocabulary` becomes the image's where it has none, and
    `note` gets a sentence on it. Raises CheckpointError for another encoder and for keys or tensors that do not fit."""
    mmproj, prefix, place = file.metadata.get("general.architecture") == "clip", "gemma3.vision.", str(file.path)
    if mmproj:
        prefix = "clip.vision."
        _check_projector(file)
    values: dict[str, Any] = {field: file.metadata.get(prefix + key) for field, key in _KEYS.items()}
    lacking = [prefix + _KEYS[field] for field, value in values.items() if value is None]
    if lacking:
        raise CheckpointError(f"{place} lacks the key {lacking[0]}.", fix=TEXT_ONLY)
    marks = _find_marks(vocabulary)
    try:
        values["layer_norm_eps"] = float(f"{values['layer_norm_eps']:.7g}")  # the decimal that was meant
        side, scale = values["image_size"] // values["patch_size"], file.metadata.get(f"{prefix}projector.scale_factor")
        tokens = (
            (side // (scale or _SCALE)) ** 2 if mmproj else file.metadata.get("gemma3.mm.tokens_per_image", _TOKENS)
        )
        ids = dict(zip(("begin_id", "soft_id", "end_id"), marks, strict=True))
        vision = VisionSpec(**values, tokens=tokens, text_hidden_size=text.hidden_size, **ids)
    except (SpecError, TypeError, ValueError, ArithmeticError) as error:
        raise CheckpointError(f"{place}: {prefix}* describes no image encoder: {error}", fix=TEXT_ONLY) from error
    names = _map_names(file, vision)
    shapes = {name: file.tensors[stored].shape for name, stored in names.items()}
    needed = check_vision(vision, text, shapes, place)
    if (spelt := vocabulary.pieces[vision.soft_id]) != _MARKS[1]:
        note(f"{named(spelt)} becomes {_MARKS[1]}, which the file lacks.")
        vocabulary.pieces[vision.soft_id] = _MARKS[1]
    return vision, {name: names[name] for name in needed}


def _check_projector(file: GgufFile) -> None:
    """Refuse an mmproj file of another model, or one that asks for other pixels than Gemma 3's."""
    kind = file.metadata.get("clip.vision.projector_type") or file.metadata.get("clip.projector_type")
    if kind != "gemma3":
        raise CheckpointError(f"{file.path} is the mmproj of another model: its projector is {kind!r}.", fix=TEXT_ONLY)
    for key in ("image_mean", "image_std"):
        if file.metadata.get(f"clip.vision.{key}", [0.5] * 3) != [0.5] * 3:
            raise CheckpointError(f"{file.path}: clip.vision.{key} must be 0.5 for Gemma 3.", fix=TEXT_ONLY)


def _find_marks(vocabulary: GgufVocabulary) -> list[int]:
    """Find the tokens in and around an image. Early files of llama.cpp end before `<image_soft_token>`; its embedding
    is never used, so that the last token that stands for nothing will do."""
    ids = {piece: index for index, piece in enumerate(vocabulary.pieces) if piece in _MARKS or _UNUSED.match(piece)}
    if _MARKS[1] not in ids and (unused := [index for piece, index in ids.items() if piece not in _MARKS]):
        ids[_MARKS[1]] = unused[-1]
    lacking = [mark for mark in _MARKS if mark not in ids]
    if lacking:
        raise CheckpointError(f"{vocabulary.place}: its tokenizer lacks {lacking[0]}.", fix=TEXT_ONLY)
    return [ids[mark] for mark in _MARKS]


def _map_names(file: GgufFile, vision: VisionSpec) -> dict[str, str]:
    """Map names of `model.vision` to the file's. Early mmproj files call the first product of a layer ffn_down: shapes
    tell them, as in clip.cpp."""
    names, down = dict[str, str](), file.tensors.get("v.blk.0.ffn_down.weight")
    wide = (vision.intermediate_size, vision.hidden_size)
    swapped = down is not None and down.shape == wide != wide[::-1]
    for stored in filter(lambda name: name.startswith(IMAGE_TENSORS), file.tensors):
        name, layer = _TOP.get(stored), _LAYER_NAME.fullmatch(stored)
        if layer:
            part = _LAYER.get(_SWAPPED.get(layer[2], layer[2]) if swapped else layer[2])
            name = part and f"{vision_layer(int(layer[1]), part)}.{layer[3]}"
        if name is None or name in names:
            what = "once more" if name else "that Gemma 3's image encoder does not have"
            raise CheckpointError(f"{file.path} holds the tensor {named(stored)} {what}.", fix=TEXT_ONLY)
        names[name] = stored
    return names
