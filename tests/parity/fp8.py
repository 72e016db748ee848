"""The definition of an FP8 product, put into transformers' model: the reference for FP8 engines."""

from __future__ import annotations

import torch
from parity.tiny import TinyModel, cast, tiny_model
from torch import nn

from wicore_trt.checkpoint.quantize import quantize_e4m3_per_channel

E4M3 = torch.float8_e4m3fn


class Fp8Linear(nn.Module):
    """FP8 linear by its definition: per-channel weights, per-token activations, float64 sums."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        scale = torch.from_numpy(quantize_e4m3_per_channel(weight.numpy())[1])[:, None]
        self.weight, self.weight_scale = (weight / scale).clamp(-448, 448).to(E4M3).double(), scale.double()

    @staticmethod
    def quantize(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scale = x.abs().amax(-1, keepdim=True) / 448
        return (x / scale).clamp(-448, 448).to(E4M3).double(), scale.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = self.quantize(x)
        return ((q @ self.weight.T) * scale * self.weight_scale.T).float()


def replace_linears(hf: nn.Module) -> None:
    """Every linear of the decoder layers becomes an Fp8Linear."""
    for layer in hf.model.layers:  # type: ignore[union-attr]
        for block in (layer.self_attn, layer.mlp):
            for name, child in list(block.named_children()):
                if isinstance(child, nn.Linear):
                    setattr(block, name, Fp8Linear(child))


def fp8_model(seed: int) -> tuple[TinyModel, dict[str, torch.Tensor]]:
    """A tiny model whose layers' linears are Fp8Linear, and its engine's tensors with everything else in float32."""
    model = tiny_model(seed)
    tensors = cast(model.spec, model.tensors, E4M3)
    replace_linears(model.hf)
    model.hf.lm_head.weight.data.copy_(model.hf.lm_head.weight.bfloat16())
    model.hf.model.embed_tokens.weight.data.copy_(model.hf.model.embed_tokens.weight.bfloat16())
    return model, {n: t.float() if t.dtype == torch.bfloat16 else t for n, t in tensors.items()}
