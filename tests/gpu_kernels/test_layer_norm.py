"""The image encoder's norm, which adds a product first: in Triton's interpreter, and compiled for every target."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import torch
from gpu_kernels.targets import targets
from kernel_checks import Runner
from parity.vision import random_encoder, random_pixels
from step_runners import RUNNERS
from torch.nn import functional as F

from wicore_trt.backends.torch.vision import TorchVision
from wicore_trt.plugins import aot
from wicore_trt.plugins.kernels.layer_norm import add_layer_norm_spec
from wicore_trt.plugins.step_layout import add_layer_norm_launch


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("columns", [48, 1152, 2048])
def test_a_product_is_added_and_normed(run: Runner, columns: int) -> None:
    residual, added = torch.randn(3, columns) * 9 + 40, torch.randn(3, columns).bfloat16()
    weight, bias = torch.randn(columns), torch.randn(columns)
    residual[2] = torch.inf
    total = residual + added.float()
    x, out = run.put(residual), run.put(torch.full((4, columns), 7.0, dtype=torch.bfloat16))
    given = run.put(added), (run.put(weight), run.put(bias)), out
    run.launch(add_layer_norm_spec(), add_layer_norm_launch(x, *given, (3, columns), 1e-6))
    want = F.layer_norm(total, (columns,), weight, bias, 1e-6)
    assert torch.equal(x.cpu(), total) and (out[3] == 7.0).all() and out[2].isnan().all()
    assert (out[:2].cpu().float() - want[:2]).abs().max() < 0.02 * want[:2].abs().max()


@pytest.mark.parametrize("target", targets())
def test_it_compiles(target: str) -> None:
    aot.compile_kernel(add_layer_norm_spec(), target)


def test_an_encoder_that_adds_with_the_next_norm_has_the_same_features() -> None:
    source, pixels = random_encoder(3), random_pixels(0, 56)
    calls: list[int] = []

    def add_norm(residual: torch.Tensor, added: torch.Tensor, *norm: object) -> torch.Tensor:
        calls.append(len(residual))
        residual += added.float()
        weight, bias, eps = norm
        return F.layer_norm(residual, residual.shape[-1:], weight, bias, eps).bfloat16()  # type: ignore[arg-type]

    with torch.inference_mode():
        plain, fused = (
            TorchVision(source.weights, "bfloat16", torch.device("cpu"), given, faster=True)
            for given in (None, add_norm)
        )
        for _ in range(2):
            assert torch.equal(fused.encode(pixels), plain.encode(pixels))
    assert calls == [16] * 2 * (2 * source.weights.spec.num_layers - 1), "all norms but the first of an image"
