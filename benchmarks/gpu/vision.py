"""Time of one image through the encoder's true shapes on this GPU, by part and by way, beside its bound.

    python -m benchmarks.gpu.vision [--dtype bfloat16] [--repeats 20]

Random weights: times do not depend on them. The bound counts products alone, at TFLOPS that large ones reach on an
H100. The product's way is the first of each list. Every figure is the median over runs of a CUDA graph. What images
cost sequences that decode: `benchmarks.serve.images`.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any, cast

import torch
from torch.nn import functional as F
from torch.nn.attention import sdpa_kernel

from wicore_trt.backends.torch.vision import ATTENTION, TorchVision, VisionWeights, open_encoder
from wicore_trt.model.vision import CHANNELS, VisionSpec, vision_tensors
from wicore_trt.plugins.aot import compile_kernel
from wicore_trt.plugins.kernels.layer_norm import add_layer_norm_spec
from wicore_trt.plugins.launch import SHARED_LAUNCHER
from wicore_trt.plugins.step_layout import add_layer_norm_launch
from wicore_trt.runtime.cuda_device import CudaDevice
from wicore_trt.runtime.dtypes import TORCH_DTYPES
from wicore_trt.runtime.image_encoder import AddNorm

TFLOPS = 700.0
SPEC = VisionSpec(896, 14, 1152, 27, 16, 4304, 1e-6, 256, 5376, 255_999, 262_144, 256_000)
"""The encoder of every published Gemma 3 that sees, before the text model of 27B."""
Work = Callable[[], object]


def make_weights(spec: VisionSpec) -> VisionWeights:
    torch.manual_seed(0)
    tensors = {n: torch.randn(s) * (0.02 if len(s) > 1 else 0.1) for n, s in vision_tensors(spec).items()}
    return VisionWeights(spec, {n: t + 1 if "norm" in n and n.endswith("weight") else t for n, t in tensors.items()})


def count_flops(spec: VisionSpec) -> tuple[float, float]:
    """Operations of an image's linears, and of its attention."""
    patches, hidden = spec.patches, spec.hidden_size
    layer = patches * hidden * (4 * hidden + 2 * spec.intermediate_size)
    ends = patches * CHANNELS * spec.patch_size**2 * hidden + spec.tokens * hidden * spec.text_hidden_size
    return 2.0 * (layer * spec.num_layers + ends), 4.0 * patches * patches * hidden * spec.num_layers


def make_events() -> tuple[Any, Any]:
    return tuple(torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call,return-value]


class Timer:
    """Times work in a CUDA graph of its own."""

    def __init__(self, device: CudaDevice, repeats: int) -> None:
        self._device, self._repeats = device, repeats

    def measure(self, work: Work, times: int = 1) -> float:
        """Median milliseconds of one `work`, of which the graph has `times`."""

        def all_times() -> None:
            for _ in range(times):
                work()

        torch.cuda.synchronize()  # what was made on other streams is there
        with self._device.active(), torch.inference_mode():
            work()
            self._device.synchronize()
            graph = self._device.capture(all_times)
            found = []
            for _ in range(self._repeats + 3):
                begin, end = make_events()
                begin.record()
                graph()
                end.record()
                end.synchronize()
                found.append(begin.elapsed_time(end) / times)
            return float(median(found[3:]))

    def show(self, name: str, work: Work, flops: float = 0.0) -> None:
        try:
            ms = self.measure(work, SPEC.num_layers)
        except RuntimeError as error:
            print(f"  {name:44} refused: {str(error).splitlines()[0][:70]}")
            return
        rate = f"{flops / ms / 1e9:6.0f} TFLOP/s" if flops else ""
        print(f"  {name:44} {ms * 1e3:8.1f} us   {ms * SPEC.num_layers:6.2f} ms an image {rate}")


def attention_ways(spec: VisionSpec, dtype: torch.dtype) -> dict[str, Work]:
    """Attention of one layer as the product chooses it, by the width to which heads are padded; 80 is the product's."""
    qkv = torch.randn(spec.patches, 3 * spec.hidden_size, device="cuda", dtype=dtype)

    def attend(width: int) -> Work:
        q, k, v = qkv.view(1, spec.patches, 3, spec.num_heads, -1).permute(2, 0, 3, 1, 4)
        if width > spec.head_dim:  # as fused weights with rows of zeros would give them
            q, k, v = (F.pad(t.transpose(1, 2), (0, width - spec.head_dim)).transpose(1, 2) for t in (q, k, v))

        def work() -> torch.Tensor:
            with sdpa_kernel(ATTENTION, set_priority=True):
                return F.scaled_dot_product_attention(q, k, v, scale=spec.head_dim**-0.5)

        return work

    return {f"heads of {width}": attend(width) for width in (80, spec.head_dim, 128)}


def product_ways(spec: VisionSpec, dtype: torch.dtype) -> dict[str, tuple[Work, int]]:
    """Products of one layer, and the values that a patch's row multiplies."""
    hidden, inner, patches = spec.hidden_size, spec.intermediate_size, spec.patches

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", dtype=dtype) * 0.02

    x, y = random(patches, hidden), random(patches, inner)
    shapes = {"qkv": (3 * hidden, x), "out": (hidden, x), "fc1": (inner, x), "fc2": (hidden, y)}

    def multiply(width: int, a: torch.Tensor, gelu: bool) -> Work:
        w, bias = random(width, a.shape[1]), random(width)
        if gelu:
            return lambda: torch._addmm_activation(bias, a, w.T, use_gelu=True)  # noqa: SLF001 -- as the product
        return lambda: torch.addmm(bias, a, w.T)

    return {n: (multiply(width, a, n == "fc1"), width * a.shape[1]) for n, (width, a) in shapes.items()}


def open_norm(device: CudaDevice) -> AddNorm:
    """Compile the product's kernel of norms for this GPU."""
    kernel = compile_kernel(add_layer_norm_spec(), device.target)

    def add_norm(x: torch.Tensor, added: torch.Tensor, *norm: Any) -> torch.Tensor:
        (weight, bias, eps), out = norm, torch.empty_like(added)
        places = x.data_ptr(), added.data_ptr(), (weight.data_ptr(), bias.data_ptr()), out.data_ptr()
        SHARED_LAUNCHER.launch(kernel, add_layer_norm_launch(*places, (len(x), x.shape[1]), eps), device.stream)
        return out

    return add_norm


def whole_ways(weights: VisionWeights, dtype: str, pixels: torch.Tensor, norm: AddNorm) -> dict[str, Work]:
    """Ways through the whole encoder."""
    product, narrow = (TorchVision(weights, dtype, pixels.device, norm, faster=faster) for faster in (True, False))
    apart, padded_alone = copy.copy(product), copy.copy(narrow)
    apart.add_norm, padded_alone.rounds_products = None, dtype == "bfloat16"
    models = {"product": product, "additions and norms apart": apart, "and heads as they are": padded_alone,
              "and float32 results of products": narrow}  # fmt: skip
    return {name: partial(model.encode, pixels) for name, model in models.items()}


def compare_ways(ways: dict[str, Work]) -> None:
    """Print how far the features of each way are from those of the first."""
    with torch.inference_mode():
        found = {name: cast(torch.Tensor, work())[: SPEC.tokens].float() for name, work in ways.items()}
    first = found["product"]
    for name, features in found.items():
        print(f"  {name:44} {float((features - first).norm() / first.norm()):.5f} from the product's features")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    parser.add_argument("--repeats", type=int, default=20)
    options = parser.parse_args()
    dtype, device = TORCH_DTYPES[options.dtype], CudaDevice()
    timer = Timer(device, options.repeats)
    linears, attention = count_flops(SPEC)
    bound = (linears + attention) / TFLOPS / 1e9
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {options.dtype}: an image of {SPEC.image_size}^2"
    )
    print(f"bound {bound:.2f} ms: {(linears + attention) / 1e12:.2f} TFLOP at {TFLOPS:.0f} TFLOP/s")
    weights = make_weights(SPEC)
    pixels = torch.randint(0, 256, (SPEC.image_size, SPEC.image_size, 3), dtype=torch.uint8, device="cuda")
    print("whole encoder:")
    norm = open_norm(device)
    ways = whole_ways(weights, options.dtype, pixels, norm)
    for name, work in ways.items():
        ms = timer.measure(work)
        print(f"  {name:44} {ms:8.2f} ms   {ms / bound:.2f} x bound")
    compare_ways(ways)
    encoder = open_encoder(weights, options.dtype, 4, device, norm)
    image, found = pixels.cpu().numpy().tobytes(), []
    for _ in range(options.repeats):
        torch.cuda.synchronize()
        begun = time.perf_counter()
        encoder.begin(0, image)
        encoder.run_parts(encoder.parts)
        device.synchronize()
        found.append(1e3 * (time.perf_counter() - begun))
    encoder.close()
    print(f"  {'by parts, copies included':44} {median(found):8.2f} ms   {median(found) / bound:.2f} x bound")
    with torch.inference_mode():
        print("attention of a layer:")
        for name, work in attention_ways(SPEC, dtype).items():
            timer.show(name, work, attention / SPEC.num_layers)
        print("products of a layer:")
        for name, (work, values) in product_ways(SPEC, dtype).items():
            timer.show(name, work, 2.0 * SPEC.patches * values)


if __name__ == "__main__":
    main()
