"""Modules quantized and dequantized by the libraries themselves, and a file of a few of them.

`python quantized_libraries.py FILE` records: the configuration, the digest of the library's own weights in float32, and
the safetensors file, compressed. Libraries: compressed-tensors, nvidia-modelopt, mlx, bitsandbytes,
autoawq, auto-gptq; each maker imports its own.
"""

from __future__ import annotations

import base64
import hashlib
import json
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

Made = tuple[dict[str, Any], dict[str, torch.Tensor], torch.Tensor]
"""config.json's part, the tensors of one module, and its weight in float32 as the library says."""


def _weight(rows: int, columns: int, seed: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed)) * 0.05


def make_compressed(form: str, weights: dict[str, Any], inputs: dict[str, Any] | None, scale: torch.dtype) -> Made:
    from compressed_tensors.compressors import FloatQuantizationCompressor, PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme

    args = QuantizationArgs(**weights)
    scheme = QuantizationScheme(
        targets=["Linear"], weights=args, input_activations=QuantizationArgs(**inputs) if inputs else None
    )
    config = QuantizationConfig(config_groups={"group_0": scheme}, format=form, quantization_status="compressed")
    w = _weight(16, 128, 1)
    largest = 448.0 if args.type == "float" else (1 << (args.num_bits - 1)) - 1.0
    grouped = w.abs().reshape(16, -1, args.group_size or 128).amax(2) if args.strategy != "tensor" else w.abs().max()
    scales = (grouped / largest).to(scale).reshape((1,) if args.strategy == "tensor" else (16, -1))
    kind = PackedQuantizationCompressor if form == "pack-quantized" else FloatQuantizationCompressor
    packed = kind.compress({"weight": w, "weight_scale": scales}, scheme)
    whole = {name: t.float() if name == "weight_scale" else t for name, t in packed.items()}
    said = json.loads(json.dumps(config.to_dict(), default=str))
    return {"quantization_config": said}, packed, kind.decompress(whole, scheme)["weight"].float()


_ARGS8 = {"num_bits": 8, "type": "float", "symmetric": True}


def make_modelopt() -> Made:
    from modelopt.torch.export.convert_hf_config import convert_hf_quant_config_format
    from modelopt.torch.quantization.qtensor import FP8QTensor

    w = _weight(16, 64, 2)
    held, scales = FP8QTensor.quantize(w)
    said = convert_hf_quant_config_format(
        {"producer": {"name": "modelopt", "version": "0.47.0"},
         "quantization": {"quant_algo": "FP8_PER_CHANNEL_PER_TOKEN", "kv_cache_quant_algo": None,
                          "exclude_modules": ["lm_head"]}}
    )  # fmt: skip
    parts = {"weight": held._quantized_data, "weight_scale": scales.float().reshape(())}
    return (
        {"quantization_config": said | {"quant_method": "modelopt"}},
        parts,
        held.dequantize(torch.float32, scale=scales),
    )


def make_mlx(bits: int, group: int) -> Made:
    import mlx.core as mx
    import numpy as np

    words, scales, biases = mx.quantize(mx.array(_weight(16, 128, 3).numpy()), group_size=group, bits=bits)
    half = [x.astype(mx.bfloat16).astype(mx.float32) for x in (scales, biases)]
    whole = mx.dequantize(words, *half, group_size=group, bits=bits)
    parts = {
        "weight": torch.from_numpy(np.array(words).view(np.int32)).view(torch.uint32),
        "scales": torch.from_numpy(np.array(half[0])).bfloat16(),
        "biases": torch.from_numpy(np.array(half[1])).bfloat16(),
    }
    said = {"group_size": group, "bits": bits, "mode": "affine"}
    return {"quantization": said, "quantization_config": said}, parts, torch.from_numpy(np.array(whole))


def make_bitsandbytes(nested: bool, rows: int, columns: int) -> Made:
    import bitsandbytes.functional as bnb
    import transformers
    from bitsandbytes.backends.default.ops import _dequantize_4bit_compute

    packed, state = bnb.quantize_4bit(_weight(rows, columns, 4), quant_type="nf4", compress_statistics=nested)
    scales = bnb.dequantize_blockwise(state.absmax, state.state2) + state.offset if nested else state.absmax
    whole = _dequantize_4bit_compute(packed.reshape(-1), scales, state.code, 64, (rows, columns), torch.float32)
    if columns % 64 == 0:  # its CPU kernel begins a block with each row, where columns are no multiple of it
        assert torch.equal(whole, bnb.dequantize_4bit(packed, state))
    said = transformers.BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4",
                                           bnb_4bit_use_double_quant=nested).to_dict()  # fmt: skip
    parts = {"weight": packed} | {f"weight.{part}": t for part, t in state.as_dict(packed=True).items()}
    return {"quantization_config": said}, parts, whole.float()


def make_awq(group: int) -> Made:
    from awq.modules.linear.gemm import WQLinear_GEMM
    from awq.utils.packing_utils import dequantize_gemm

    linear = torch.nn.Linear(128, 32, bias=False)
    linear.weight.data = w = _weight(32, 128, 5)
    low, high = (f(w.reshape(32, -1, group), 2) for f in (torch.amin, torch.amax))
    scales = ((high - low) / 15).half().float()
    zeros = (-low / scales).round().clamp(0, 15)
    linear.weight.data = (((w.reshape(32, -1, group) / scales[..., None]).round() + zeros[..., None]).clamp(0, 15)
                          - zeros[..., None]).mul(scales[..., None]).reshape(32, 128)  # fmt: skip
    held = WQLinear_GEMM.from_linear(linear, 4, group, scales=scales.t().contiguous(), zeros=zeros.t().contiguous())
    parts = {"qweight": held.qweight, "qzeros": held.qzeros, "scales": held.scales}
    whole = dequantize_gemm(held.qweight.cpu(), held.qzeros.cpu(), held.scales.float(), 4, group).t()
    said = {"quant_method": "awq", "bits": 4, "group_size": group, "zero_point": True, "version": "gemm",
            "modules_to_not_convert": None}  # fmt: skip
    return {"quantization_config": said}, {n: t.cpu().contiguous() for n, t in parts.items()}, whole


def make_gptq(bits: int, group: int) -> Made:
    import transformers
    from auto_gptq.nn_modules.qlinear.qlinear_cuda_old import QuantLinear

    linear = torch.nn.Linear(128, 32, bias=False)
    linear.weight.data = w = _weight(32, 128, 6)
    half = 1 << (bits - 1)
    scales = (w.reshape(32, -1, group).abs().amax(2) / (half - 1)).half().float()
    codes = (w.reshape(32, -1, group) / scales[..., None]).round().clamp(-half, half - 1)
    linear.weight.data = (codes * scales[..., None]).reshape(32, 128)
    held = QuantLinear(bits, group, 128, 32, False, weight_dtype=torch.float32)
    held.pack(linear, scales.clone(), torch.full_like(scales, half), None)
    held.scales = held.scales.float()
    whole = held(torch.eye(128)).t()
    said = transformers.GPTQConfig(bits=bits, group_size=group, sym=True, desc_act=False).to_dict()
    parts = {"qweight": held.qweight, "qzeros": held.qzeros, "scales": held.scales.half(), "g_idx": held.g_idx}
    return {"quantization_config": json.loads(json.dumps(said, default=str))}, parts, whole


def _group(size: int, bits: int = 4) -> dict[str, Any]:
    return {"num_bits": bits, "type": "int", "symmetric": True, "strategy": "group", "group_size": size}


_TOKEN = _ARGS8 | {"strategy": "token", "dynamic": True}
MAKERS: dict[str, Callable[[], Made]] = {
    "ct fp8": lambda: make_compressed("float-quantized", _ARGS8 | {"strategy": "channel"}, _TOKEN, torch.bfloat16),
    "ct fp8 tensor": lambda: make_compressed("float-quantized", _ARGS8 | {"strategy": "tensor"}, _TOKEN, torch.float32),
    "ct w4 32": lambda: make_compressed("pack-quantized", _group(32), None, torch.bfloat16),
    "ct w4 128": lambda: make_compressed("pack-quantized", _group(128), None, torch.float16),
    "ct w8": lambda: make_compressed("pack-quantized", {"num_bits": 8, "strategy": "channel"}, None, torch.bfloat16),
    "modelopt": make_modelopt,
    "mlx 4 64": lambda: make_mlx(4, 64), "mlx 4 32": lambda: make_mlx(4, 32), "mlx 8": lambda: make_mlx(8, 64),
    "nf4": lambda: make_bitsandbytes(False, 16, 128), "nf4 nested": lambda: make_bitsandbytes(True, 130, 160),
    "awq 128": lambda: make_awq(128), "awq 32": lambda: make_awq(32),
    "gptq 4": lambda: make_gptq(4, 32), "gptq 8": lambda: make_gptq(8, 128),
}  # fmt: skip


def digest_of(weight: torch.Tensor) -> str:
    return hashlib.blake2b(weight.contiguous().numpy().tobytes(), digest_size=16).hexdigest()


def main() -> None:
    from safetensors.torch import save

    said = {}
    for name, make in MAKERS.items():
        config, parts, whole = make()
        data = save({f"down_proj.{part}": t.contiguous() for part, t in parts.items()})
        text = base64.b64encode(zlib.compress(data, 9)).decode()
        said[name] = {"config": config, "shape": list(whole.shape), "digest": digest_of(whole), "file": text}
    Path(sys.argv[1]).write_text(json.dumps(said, indent=0) + "\n")


if __name__ == "__main__":
    main()
