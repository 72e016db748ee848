"""Casts against torch and against a search over all values in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from wicore_trt.checkpoint.quantize import (
    E4M3_MAX,
    e4m3_bits,
    e4m3_values,
    find_bad_row,
    from_float32,
    quantize_e4m3_per_channel,
    to_float32,
)
from wicore_trt.errors import CheckpointError


def _spread(seed: int, size: int) -> np.ndarray:
    """Values over all of E4M3's binades and beyond, with exact ties among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(size) * np.exp2(rng.integers(-14, 10, size))
    grid = e4m3_values()[:0x7F].astype(np.float64)
    ties = (grid[1:] + grid[:-1]) / 2
    return np.concatenate([x, ties, -ties, np.nextafter(ties.astype(np.float32), 1e9), grid]).astype(np.float32)


def _nearest_even(x: np.ndarray) -> np.ndarray:
    """E4M3 bits by distance to every value in float64; a tie goes to the even code."""
    grid = e4m3_values()[:0x7F].astype(np.float64)
    distance = np.abs(np.minimum(np.abs(x.astype(np.float64)), E4M3_MAX)[:, None] - grid)
    best = distance.min(axis=1, keepdims=True)
    odd = np.arange(grid.size) % 2
    code = np.argmin(np.where(distance == best, odd, 2), axis=1)
    return (code | np.where(np.signbit(x), 0x80, 0)).astype(np.uint8)


@pytest.mark.parametrize("seed", range(3))
def test_e4m3_rounds_to_nearest_even(seed: int) -> None:
    x = _spread(seed, 5_000)
    np.testing.assert_array_equal(e4m3_bits(x), _nearest_even(x))
    clamped = torch.from_numpy(x).clamp(-E4M3_MAX, E4M3_MAX)
    np.testing.assert_array_equal(e4m3_bits(x), clamped.to(torch.float8_e4m3fn).view(torch.uint8).numpy())


def test_e4m3_values_and_limits() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().numpy()
    np.testing.assert_array_equal(e4m3_values(), codes)
    x = np.array([1e9, -1e9, np.inf, -np.inf, np.nan, 0.0, -0.0], np.float32)
    assert e4m3_bits(x).tolist() == [0x7E, 0xFE, 0x7E, 0xFE, 0x7F, 0x00, 0x80]


@pytest.mark.parametrize("seed", range(3))
def test_per_channel_scales(seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = (rng.standard_normal((37, 129)) * np.exp2(rng.integers(-30, 30, (37, 1)))).astype(np.float32)
    w[5] = 0
    q, scale = quantize_e4m3_per_channel(w)
    assert q.dtype == np.uint8 and scale.dtype == np.float32 and scale.shape == (37,)
    assert scale[5] == 1 and not q[5].any()
    others = np.delete(np.arange(37), 5)
    plain = np.abs(w).max(1) / np.float32(E4M3_MAX)
    assert (plain[others] <= scale[others]).all() and (scale[others] < 2 * plain[others]).all()
    quotient = w / scale[:, None]
    np.testing.assert_array_equal(q, _nearest_even(quotient.ravel()).reshape(q.shape))
    values = e4m3_values()[q]
    assert (np.abs(values[others]).max(1) >= E4M3_MAX / 2).all()  # the whole range is used, but for one binade
    wide, least = w[others].astype(np.float64), np.full(36, np.inf)
    for k in range(16):  # no scale of the grid does better
        tried = (plain[others] * np.float32(2 ** (k / 16)))[:, None]
        rounded = e4m3_values()[e4m3_bits(w[others] / tried)].astype(np.float64) * tried
        least = np.minimum(least, ((rounded - wide) ** 2).sum(1))
    ours = ((values[others].astype(np.float64) * scale[others][:, None] - wide) ** 2).sum(1)
    np.testing.assert_allclose(ours, least, rtol=1e-5)
    step = np.maximum(np.abs(values) / 16, 2.0**-10)  # half a unit in the last place
    assert (np.abs(values.astype(np.float64) - quotient) <= step + 1e-6 * np.abs(quotient)).all()


def test_tiny_rows_keep_a_usable_scale() -> None:
    q, scale = quantize_e4m3_per_channel(np.array([[1e-45, 0], [1e-40, -1e-40]], np.float32))
    assert scale[0] == 1 and (scale > 0).all() and not q[0].any()


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_weights_that_are_not_finite_are_refused(bad: float) -> None:
    w = np.ones((2, 3), np.float32)
    w[1, 2] = bad
    with pytest.raises(CheckpointError, match="not finite"):
        quantize_e4m3_per_channel(w)


@pytest.mark.parametrize("tag,dtype", [("BF16", torch.bfloat16), ("F16", torch.float16), ("F32", torch.float32)])
def test_casts_equal_torch(tag: str, dtype: torch.dtype) -> None:
    bits = np.random.default_rng(7).integers(0, 1 << 32, 200_000, dtype=np.uint64).astype(np.uint32)
    bits[: bits.size // 4] = bits[: bits.size // 4] & 0xFFFF0000 | 0x8000  # BF16 ties
    bits[bits.size // 4 : bits.size // 2] &= 0xFFFFF000  # F16 ties
    special = np.array(
        [0x7F7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0x7F800001, 0xFFFFFFFF, 1, 0x80000000], np.uint32
    )
    x = np.concatenate([bits, special]).view(np.float32)
    ours, theirs = from_float32(x, tag), torch.from_numpy(x).to(dtype)
    nan = np.isnan(x)
    raw = {"BF16": torch.int16, "F16": torch.int16, "F32": torch.int32}[tag]
    np.testing.assert_array_equal(ours[~nan].view(f"i{ours.itemsize}"), theirs.view(raw).numpy()[~nan])
    back = to_float32(ours, tag)
    assert np.isnan(back[nan]).all()
    np.testing.assert_array_equal(back[~nan], theirs.float().numpy()[~nan])


@pytest.mark.parametrize("seed", range(2))
def test_rows_of_any_size_get_the_same_codes(seed: int) -> None:
    """A row times a power of two has the row's codes and its scale times that power, from 2^-80 to 2^125."""
    rng = np.random.default_rng(seed)
    w = rng.standard_normal((8, 300)).astype(np.float32)
    w /= np.abs(w).max(axis=1, keepdims=True)
    codes, scale = quantize_e4m3_per_channel(w)
    for power in (-80, -40, 40, 62, 64, 80, 100, 125):
        factor = np.float32(2.0**power)
        again, scaled = quantize_e4m3_per_channel(w * factor)
        np.testing.assert_array_equal(again, codes, err_msg=f"2^{power}")
        np.testing.assert_array_equal(scaled, scale * factor)
    largest = np.float32(3.4e38) * w
    back = e4m3_values()[quantize_e4m3_per_channel(largest)[0]].astype(np.float64)
    scaled = quantize_e4m3_per_channel(largest)[1].astype(np.float64)
    assert (np.abs(back * scaled[:, None] - largest).max(axis=1) < 0.07 * np.abs(largest).max(axis=1)).all()


def test_the_largest_rows_come_back_finite() -> None:
    """No code times its scale is beyond float32, up to its largest number, and nothing saturates."""
    w = np.random.default_rng(2).standard_normal((400, 64)).astype(np.float32)
    w *= (np.finfo(np.float32).max * np.linspace(0.5, 1, 400, dtype=np.float32) / np.abs(w).max(axis=1))[:, None]
    w = np.clip(
        np.concatenate([w, np.full((1, 64), np.finfo(np.float32).max)]),
        *[s * np.finfo(np.float32).max for s in (-1, 1)],
    )
    codes, scale = quantize_e4m3_per_channel(w)
    back = e4m3_values()[codes] * scale[:, None]
    assert np.isfinite(back).all()
    assert (np.abs(back.astype(np.float64) - w).max(axis=1) < 0.07 * np.abs(w).max(axis=1).astype(np.float64)).all()


@pytest.mark.parametrize("tag", ["F32", "F16", "BF16"])
def test_rows_that_are_not_finite_are_found(tag: str) -> None:
    rng = np.random.default_rng(1)
    good = from_float32(rng.standard_normal((9, 5)).astype(np.float32), tag)
    assert find_bad_row(good, tag) is None and find_bad_row(good[:0], tag) is None
    dtype = {"F32": np.uint32, "F16": np.uint16, "BF16": np.uint16}[tag]
    top = {"F32": 0x7F800000, "F16": 0x7C00, "BF16": 0x7F80}[tag]
    sign = 1 << (8 * good.itemsize - 1)
    for bits, wrong in ((top, True), (top | 1, True), (sign | top, True), (sign | top | 1, True), (2 * sign - 1, True),
                        (top - 1, False), ((sign | top) - 1, False), (sign, False), (1, False)):  # fmt: skip
        block = good.copy()
        block.view(dtype)[4, 3] = bits
        assert find_bad_row(block, tag) == (4 if wrong else None), hex(bits)
