"""Gemma 3's image encoder, written once against `VisionOps`: SigLIP and the projector to the text model's width.

Imports `spec` alone; must not know tensors, files or devices. Names are those of published checkpoints without outer
prefixes. Invariants: a constructed spec is consistent; lowerings differ by their operators alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import isqrt
from typing import Any, Protocol, TypeVar

from wicore_trt.model.spec import MAX_LAYERS, Gemma3Spec, SpecError, check_real, check_whole, read_spec

TOWER = "vision_tower.vision_model."
PATCHES = f"{TOWER}embeddings.patch_embedding"
POSITIONS = f"{TOWER}embeddings.position_embedding.weight"
FINAL_NORM = f"{TOWER}post_layernorm"
SOFT_NORM = "multi_modal_projector.mm_soft_emb_norm.weight"
PROJECTION = "multi_modal_projector.mm_input_projection_weight"
CHANNELS = 3
_MAX_ID = (1 << 24) - 1
_WHOLE: dict[str, tuple[int, int]] = {
    "image_size": (1, 4096), "patch_size": (1, 256), "hidden_size": (1, 1 << 16), "num_layers": (1, MAX_LAYERS),
    "num_heads": (1, 1024), "intermediate_size": (1, 1 << 20), "tokens": (1, 1 << 16),
    "text_hidden_size": (1, 1 << 20), "begin_id": (0, _MAX_ID), "soft_id": (0, _MAX_ID), "end_id": (0, _MAX_ID),
}  # fmt: skip
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VisionSpec:
    """Sizes of an image encoder. Raises SpecError for a value that cannot be right. An image is `image_size` pixels
    square and cut into patches of `patch_size` squared. The text model reads it as `tokens` times the token `soft_id`
    between `begin_id` and `end_id`, with features of `text_hidden_size`. `layer_norm_eps` is the projector's, too."""

    image_size: int
    patch_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    intermediate_size: int
    layer_norm_eps: float
    tokens: int
    text_hidden_size: int
    begin_id: int
    soft_id: int
    end_id: int

    def __post_init__(self) -> None:
        for name, limits in _WHOLE.items():
            check_whole(name, getattr(self, name), *limits)
        check_real("layer_norm_eps", self.layer_norm_eps, 1e-12, 1.0)
        if self.image_size % self.patch_size:
            raise SpecError.from_field("patch_size", f"is {self.patch_size}; it must divide {self.image_size} pixels.")
        if self.hidden_size % self.num_heads:
            raise SpecError.from_field("num_heads", f"is {self.num_heads}; it must divide {self.hidden_size}.")
        side = isqrt(self.tokens)
        if side * side != self.tokens or self.patches_per_side % side:
            raise SpecError.from_field(
                "tokens", f"is {self.tokens}; it must be a square that {self.patches_per_side}^2 patches fill evenly."
            )
        if len({self.begin_id, self.soft_id, self.end_id}) != 3:
            raise SpecError.from_field("soft_id", f"is {self.soft_id}; it must differ from the begin and end tokens.")

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def patches(self) -> int:
        return self.patches_per_side**2

    @property
    def pooled_side(self) -> int:
        """Patches on each side of the square whose mean becomes a token."""
        return self.patches_per_side // isqrt(self.tokens)

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads

    @property
    def pixel_bytes(self) -> int:
        """Bytes of an image: uint8 [image_size, image_size, 3], RGB."""
        return CHANNELS * self.image_size**2

    @property
    def marks(self) -> tuple[int, int, int]:
        """Tokens in and around an image."""
        return self.begin_id, self.soft_id, self.end_id

    def check_text(self, text: Gemma3Spec) -> None:
        """Raise SpecError for an encoder that belongs to another text model."""
        if self.text_hidden_size != text.hidden_size:
            raise SpecError.from_field(
                "text_hidden_size", f"is {self.text_hidden_size}; the text model's is {text.hidden_size}."
            )
        for name in ("begin_id", "soft_id", "end_id"):
            if getattr(self, name) >= text.vocab_size:
                known = f"the text model has {text.vocab_size} tokens"
                raise SpecError.from_field(name, f"is {getattr(self, name)}; {known}.")

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any], place: str = "vision spec") -> VisionSpec:
        """Invert to_dict; `place` names the file. Raises CheckpointError for unknown or missing keys and for bad
        values."""
        return read_spec(cls, data, place)


def vision_layer(layer: int, name: str) -> str:
    """Name a layer's module in full, e.g. vision_layer(3, "mlp.fc1"), which has a `.weight` and a `.bias`."""
    return f"{TOWER}encoder.layers.{layer}.{name}"


def vision_tensors(spec: VisionSpec) -> dict[str, tuple[int, ...]]:
    """List all tensors by name, with their shapes. Linear weights are [out, in], but the projection is [in, out]. The
    projector's norm is stored as w of the factor 1 + w, as in Hugging Face's checkpoints."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    found: dict[str, tuple[int, ...]] = {
        f"{PATCHES}.weight": (hidden, CHANNELS, spec.patch_size, spec.patch_size),
        f"{PATCHES}.bias": (hidden,),
        POSITIONS: (spec.patches, hidden),
    }
    square = {f"self_attn.{part}": (hidden, hidden) for part in ("q_proj", "k_proj", "v_proj", "out_proj")}
    linears = {**square, "mlp.fc1": (inner, hidden), "mlp.fc2": (hidden, inner)}
    shapes: dict[str, tuple[int, ...]] = {"layer_norm1": (hidden,), **linears, "layer_norm2": (hidden,)}
    for layer in range(spec.num_layers):
        for name, shape in shapes.items():
            module = vision_layer(layer, name)
            found |= {f"{module}.weight": shape, f"{module}.bias": shape[:1]}
    return {
        **found, f"{FINAL_NORM}.weight": (hidden,), f"{FINAL_NORM}.bias": (hidden,), SOFT_NORM: (hidden,),
        PROJECTION: (hidden, spec.text_hidden_size),
    }  # fmt: skip


class VisionOps(Protocol[T]):
    """Operators of one image. P patches, H hidden size, I intermediate size. `module` names a weight and a bias.
    Invariant (I20): the residual stream, norms and sums are float32; operands of products are rounded to the engine's
    dtype."""

    def embed_patches(self) -> T:
        """[P, H] float32: the patches, channel first, of pixels (x / 255 - 0.5) / 0.5 times PATCHES, plus POSITIONS."""

    def norm(self, residual: T, module: str) -> T:
        """[P, H]: LayerNorm, rounded to the dtype."""

    def linear(self, x: T, module: str) -> T:
        """[P, out]: x @ W.T + bias, rounded to the dtype; "self_attn.qkv" stands for q_proj, k_proj and v_proj."""

    def attention(self, qkv: T) -> T:
        """[P, H]: softmax attention of all patches to all, scaled by head_dim ** -0.5, rounded to the dtype."""

    def gelu_linear(self, x: T, module: str) -> T:
        """[P, I]: gelu_tanh(x @ W.T + bias), rounded to the dtype."""

    def add_linear(self, residual: T, x: T, module: str) -> T:
        """[P, H] float32: residual + x @ W.T + bias."""

    def project(self, residual: T) -> T:
        """[tokens, text hidden size] in the dtype: FINAL_NORM, mean of each square of patches, RMSNorm by SOFT_NORM,
        times PROJECTION."""


def encode_part(ops: VisionOps[T], spec: VisionSpec, i: int, residual: T | None) -> T:
    """Compute part i of `num_layers` of an image's features, given what part i - 1 returned; the last returns the
    features, which replace embeddings after their scaling. Each part is a layer of SigLIP (arXiv:2303.15343, without a
    pooling head); the last has Gemma 3's projector, too (arXiv:2503.19786, section 2.1)."""
    residual = ops.embed_patches() if residual is None else residual
    qkv = ops.linear(ops.norm(residual, vision_layer(i, "layer_norm1")), vision_layer(i, "self_attn.qkv"))
    residual = ops.add_linear(residual, ops.attention(qkv), vision_layer(i, "self_attn.out_proj"))
    hidden = ops.gelu_linear(ops.norm(residual, vision_layer(i, "layer_norm2")), vision_layer(i, "mlp.fc1"))
    residual = ops.add_linear(residual, hidden, vision_layer(i, "mlp.fc2"))
    return residual if i + 1 < spec.num_layers else ops.project(residual)
