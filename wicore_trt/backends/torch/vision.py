"""Image encoder in PyTorch: the oracle on the CPU, and what runs on a GPU for the backends torch and triton.

Must not know slots or steps. Invariants (I20): residual stream, norms and sums are float32; values are rounded to the
engine's dtype only as operands, and on a GPU in bfloat16 as results of products. It multiplies in the dtype, with bias
and GELU in cuBLAS's epilogue; the CPU widens weights to float32 once, so that products of 16-bit values are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from wicore_trt.arithmetic import div_ceil
from wicore_trt.errors import EngineFormatError, list_some
from wicore_trt.memory import check_room
from wicore_trt.model.vision import (
    CHANNELS,
    FINAL_NORM,
    PATCHES,
    POSITIONS,
    PROJECTION,
    SOFT_NORM,
    VisionSpec,
    encode_part,
    vision_layer,
    vision_tensors,
)
from wicore_trt.runtime.cuda_device import CudaDevice
from wicore_trt.runtime.dtypes import TORCH_DTYPES
from wicore_trt.runtime.image_encoder import AddNorm, FeatureEncoder, StreamEncoder, ThreadEncoder

if TYPE_CHECKING:
    from wicore_trt.engine.directory import EngineDir

ATTENTION = [
    SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH,
]  # fmt: skip
"""Ways of attention, the fastest first; each refuses what it cannot do, such as float32."""


@dataclass(frozen=True, slots=True)
class VisionWeights:
    """Image encoder in host memory: `tensors` by the names of `vision_tensors`."""

    spec: VisionSpec
    tensors: Mapping[str, torch.Tensor]

    def __post_init__(self) -> None:
        """Raises EngineFormatError for tensors that are missing or do not fit the spec."""
        shapes = vision_tensors(self.spec)
        wrong = [n for n, s in shapes.items() if n not in self.tensors or tuple(self.tensors[n].shape) != s]
        if wrong:
            raise EngineFormatError(
                f"The engine's image encoder lacks these tensors, or they do not fit its spec: {list_some(wrong, 6)}.",
                fix="Build the engine again.",
            )


class TorchVision:
    """Weights of an image encoder on one device. `dtype` is "float32", "bfloat16" or "float16". Linears are rounded to
    it, with their biases; norms and positions stay float32. The three attention inputs are one product. A GPU attends
    faster to heads that zeros fill up to a multiple of 16, and writes bfloat16 results of products faster than float32
    ones: those are rounded before they are added, by `add_norm` together with the next norm if that is given."""

    def __init__(
        self, weights: VisionWeights, dtype: str, device: torch.device, add_norm: AddNorm | None = None,
        *, faster: bool | None = None,
    ) -> None:  # fmt: skip
        spec, tensors = weights.spec, dict(weights.tensors)
        self.spec, self.dtype, self.stopped = spec, TORCH_DTYPES[dtype], False
        faster = device.type == "cuda" if faster is None else faster
        self.head_width = div_ceil(spec.head_dim, 16) * 16 if faster else spec.head_dim
        self.rounds_products = faster and dtype == "bfloat16"  # float16 might not hold them
        self.add_norm = add_norm if self.rounds_products else None
        more = self.head_width - spec.head_dim
        for layer in range(spec.num_layers):
            for kind in ("weight", "bias"):
                parts = [tensors.pop(vision_layer(layer, f"self_attn.{part}_proj.{kind}")) for part in "qkv"]
                heads = torch.cat(parts).view(3 * spec.num_heads, spec.head_dim, -1)
                wide = F.pad(heads, (0, 0, 0, more)).flatten(0, 1)
                tensors[vision_layer(layer, f"self_attn.qkv.{kind}")] = wide if kind == "weight" else wide.flatten()
            out = vision_layer(layer, "self_attn.out_proj.weight")
            tensors[out] = F.pad(tensors[out].view(spec.hidden_size, -1, spec.head_dim), (0, more)).flatten(1)
        stored = self.dtype if device.type == "cuda" else torch.float32
        self.positions = (tensors.pop(POSITIONS).float() + tensors.pop(f"{PATCHES}.bias").float()).to(device)
        self.soft_norm = tensors.pop(SOFT_NORM).to(device, torch.float32) + 1.0
        self.weights = {
            name: t.to(device, torch.float32) if "norm" in name else t.to(device, self.dtype).to(stored)
            for name, t in tensors.items()
        }
        self.weights[f"{PATCHES}.weight"] = self.weights[f"{PATCHES}.weight"].flatten(1)
        # transformers' order of operations (rescale in float64, rounded; normalize in float32)
        values = (torch.arange(256, dtype=torch.float64) * (1 / 255)).float()
        self.pixel_values = ((values - 0.5) / 0.5).to(device, self.dtype).to(stored)

    def encode(self, pixels: torch.Tensor) -> torch.Tensor:
        """Encode uint8 [size, size, 3] on the device into [tokens, text hidden size]."""
        part = self.cut(pixels)
        return [part(number) for number in range(self.spec.num_layers)][-1]

    def cut(self, pixels: torch.Tensor) -> Callable[[int], torch.Tensor]:
        """Return what computes one part of `encode`, by its number. Parts run in order, the first on what `pixels` are
        then, and work in the same memory again."""
        ops, found = TorchVisionOps(self, pixels), None

        def compute_part(number: int) -> torch.Tensor:
            nonlocal found
            found = encode_part(ops, self.spec, number, found if number else None)
            return found

        return compute_part

    def stop(self) -> None:
        """Let an encoding under way raise RuntimeError at its next norm: a CPU takes a minute for an image."""
        self.stopped = True


class TorchVisionOps:
    """`VisionOps` of one image."""

    def __init__(self, model: TorchVision, pixels: torch.Tensor) -> None:
        self._model, self._spec, self._weights, self._pixels = model, model.spec, model.weights, pixels
        self._added: torch.Tensor | None = None  # what the residual lacks

    def embed_patches(self) -> torch.Tensor:
        side, size = self._spec.patches_per_side, self._spec.patch_size
        patches = self._pixels.view(side, size, side, size, CHANNELS).permute(0, 2, 4, 1, 3)
        rows = self._model.pixel_values[patches.reshape(side * side, -1).int()]
        return _add_product(self._model.positions.clone(), rows, self._weights[f"{PATCHES}.weight"])

    def norm(self, residual: torch.Tensor, module: str) -> torch.Tensor:
        if self._model.stopped:
            raise RuntimeError("the image encoder was stopped")
        added, self._added = self._added, None
        if added is not None and self._model.add_norm is not None:
            weight, bias = self._weights[f"{module}.weight"], self._weights[f"{module}.bias"]
            return self._model.add_norm(residual, added, weight, bias, self._spec.layer_norm_eps)
        return self._layer_norm(residual, module).to(self._model.dtype)

    def linear(self, x: torch.Tensor, module: str) -> torch.Tensor:
        weight, bias = self._weights[f"{module}.weight"], self._weights[f"{module}.bias"]
        return torch.addmm(bias, x.to(weight.dtype), weight.T).to(self._model.dtype)

    def attention(self, qkv: torch.Tensor) -> torch.Tensor:
        q, k, v = qkv.view(1, len(qkv), 3, self._spec.num_heads, -1).permute(2, 0, 3, 1, 4)
        if not qkv.is_cuda:
            q, k, v = q.float(), k.float(), v.float()
        with sdpa_kernel(ATTENTION, set_priority=True):
            attended = F.scaled_dot_product_attention(q, k, v, scale=self._spec.head_dim**-0.5)
        return attended.transpose(1, 2).reshape(len(qkv), -1).to(self._model.dtype)

    def gelu_linear(self, x: torch.Tensor, module: str) -> torch.Tensor:
        weight, bias = self._weights[f"{module}.weight"], self._weights[f"{module}.bias"]
        if x.is_cuda:  # cuBLAS's GELU is the one by tanh
            return torch._addmm_activation(bias, x, weight.T, use_gelu=True)  # noqa: SLF001 -- it has no public name
        hidden = torch.addmm(bias, x.to(weight.dtype), weight.T)
        return F.gelu(hidden, approximate="tanh").to(self._model.dtype)

    def add_linear(self, residual: torch.Tensor, x: torch.Tensor, module: str) -> torch.Tensor:
        if self._model.add_norm is not None:
            self._added = self.linear(x, module)
            return residual
        if self._model.rounds_products:
            return residual.add_(self.linear(x, module))
        return _add_product(residual, x, self._weights[f"{module}.weight"]).add_(self._weights[f"{module}.bias"])

    def project(self, residual: torch.Tensor) -> torch.Tensor:
        spec, model = self._spec, self._model
        if self._added is not None:
            residual, self._added = residual.add_(self._added), None
        side, pooled = spec.patches_per_side, spec.pooled_side
        x = self._layer_norm(residual, FINAL_NORM).view(side // pooled, pooled, side // pooled, pooled, -1)
        x = x.mean((1, 3)).flatten(0, 1)
        x = F.rms_norm(x, x.shape[-1:], model.soft_norm, spec.layer_norm_eps).to(model.dtype)
        weight = self._weights[PROJECTION]
        return (x.to(weight.dtype) @ weight).to(model.dtype)

    def _layer_norm(self, residual: torch.Tensor, module: str) -> torch.Tensor:
        weight, bias = self._weights[f"{module}.weight"], self._weights[f"{module}.bias"]
        return F.layer_norm(residual, residual.shape[-1:], weight, bias, self._spec.layer_norm_eps)


def _add_product(residual: torch.Tensor, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """Add x @ weight.T to the residual [P, out] float32, in its place."""
    if weight.dtype == torch.float32:
        return residual.addmm_(x.float(), weight.T)
    return torch.addmm(residual, x, weight.T, out_dtype=torch.float32, out=residual)


def load_vision(engine: EngineDir) -> VisionWeights | None:
    """Read an engine's image encoder, memory-mapped; None if it has none. It is made up for an engine without weights.
    Raises EngineFormatError for a file that cannot be read or does not fit its spec."""
    spec, file = engine.manifest.vision, engine.vision_file
    if spec is None or file is None:
        return None
    if engine.manifest.dummy_weights:
        return VisionWeights(spec, {n: torch.randn(shape) * 0.02 for n, shape in vision_tensors(spec).items()})
    return VisionWeights(spec, read_tensors(file))


def read_tensors(file: Path) -> dict[str, torch.Tensor]:
    """Read the tensors of a file, memory-mapped. Raises EngineFormatError for one that cannot be read."""
    try:
        return load_file(file)
    except (OSError, SafetensorError) as error:
        raise EngineFormatError(f"{file} cannot be read: {error}.", fix="Build the engine again.") from error


def open_encoder(
    weights: VisionWeights, dtype: str, slots: int, device: torch.device | CudaDevice, add_norm: AddNorm | None = None
) -> FeatureEncoder:
    """Make the encoder of an executor on `device`, whose stream it shares. It takes all its memory now."""
    if isinstance(device, torch.device) and device.type == "cuda":
        device = CudaDevice(str(device))
    if isinstance(device, torch.device):
        needed = sum(4 * t.numel() for t in weights.tensors.values())
        check_room(needed, "the image encoder", "Use a machine that has it, or an engine built with --text-only.")
        model = TorchVision(weights, dtype, device)
        return ThreadEncoder(weights.spec, slots, model.dtype, model.encode, model.stop)
    with device.active():
        model = TorchVision(weights, dtype, device.torch_device, add_norm)
    return StreamEncoder(weights.spec, slots, model.dtype, model.cut, device)
