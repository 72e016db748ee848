"""Products of large steps, off a GPU: every slice of rows is there."""

from __future__ import annotations

import pytest
import torch

from wicore_trt.backends.triton import products as triton_products
from wicore_trt.runtime.dtypes import E4M3


@pytest.mark.parametrize("rows", [1, 6, 7, 8, 20])
def test_slices_of_rows_make_the_product(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_products, "SLICE_ROWS", {"float": 7, "scaled": 7})
    x, w = torch.randn(rows, 32).bfloat16(), torch.randn(12, 32).bfloat16()
    out = torch.full((rows, 12), torch.nan)
    triton_products.float_mm(x, w, out)
    torch.testing.assert_close(out, x.float() @ w.float().T)
    x8, w8, scales, channels = x.to(E4M3), w.to(E4M3), torch.rand(rows), torch.rand(12)
    short = torch.full((rows, 12), torch.nan, dtype=torch.bfloat16)
    triton_products.scaled_mm(x8.view(torch.uint8), scales, w8.view(torch.uint8), channels, short)
    want = (x8.float() @ w8.float().T) * scales[:, None] * channels
    torch.testing.assert_close(short.float(), want, rtol=2e-2, atol=2e-2)
