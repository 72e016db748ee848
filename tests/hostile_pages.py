"""Pages of bfloat16 that a code of exponents finds easy, hard or impossible."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from wicore_trt.plugins.code_layout import PageCode

Values = np.ndarray
SPECIAL = np.array(
    [0, 0x8000, 1, 0x807F, 0x7F, 0x80, 0x7F7F, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF, 0x3F80], np.uint16
)
"""Zeros, denormals, the least and the largest numbers, infinities, NaN with payloads, 1."""


def like_kv(rng: np.random.Generator, shape: tuple[int, ...]) -> Values:
    """Normal values with a scale for each channel."""
    x = rng.standard_normal(shape) * np.exp2(rng.integers(-30, 30, (shape[0], 1, shape[2])))
    return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def with_escapes(rng: np.random.Generator, shape: tuple[int, ...], count: int) -> Values:
    """Exactly `count` escapes in random places: exponents of 100, but for 93 or less; row 0 holds no escape."""
    x = (rng.integers(0, 2, shape) << 15 | 100 << 7 | rng.integers(0, 128, shape)).astype(np.uint16)
    places = rng.permutation(shape[0] * (shape[1] - 1) * shape[2])[:count]
    rest = x[:, 1:].reshape(-1)
    rest[places] = rest[places] & 0x807F | rng.integers(0, 94, count, dtype=np.uint16) << 7
    x[:, 1:] = rest.reshape(shape[0], shape[1] - 1, shape[2])
    return x


def in_one_tile(rng: np.random.Generator, shape: tuple[int, ...], code: PageCode) -> Values:
    """As many escapes as fit, side by side."""
    x = np.full(shape, 0x4000, np.uint16)
    flat = x.reshape(shape[0], shape[1], -1)[:, 1:].reshape(-1)
    flat[: code.room] = rng.integers(0, 128, code.room)
    x[:, 1:] = flat.reshape(shape[0], shape[1] - 1, shape[2])
    return x


Make = Callable[[np.random.Generator, PageCode, tuple[int, ...]], Values]
PAGES: dict[str, Make] = {
    "random bits": lambda rng, code, shape: rng.integers(0, 65536, shape),
    "like KV": lambda rng, code, shape: like_kv(rng, shape),
    "special": lambda rng, code, shape: rng.choice(SPECIAL, shape),
    "a constant": lambda rng, code, shape: np.full(shape, rng.choice(SPECIAL)),
    "NaN": lambda rng, code, shape: rng.integers(0, 2, shape) << 15 | 0x7F80 | rng.integers(0, 128, shape),
    "denormals": lambda rng, code, shape: rng.integers(0, 2, shape) << 15 | rng.integers(0, 128, shape),
    "distances up to 8": lambda rng, code, shape: rng.integers(60, 69, shape) << 7,
    "as many escapes as fit": lambda rng, code, shape: with_escapes(rng, shape, code.room),
    "one escape too many": lambda rng, code, shape: with_escapes(rng, shape, code.room + 1),
    "all escapes in one place": lambda rng, code, shape: in_one_tile(rng, shape, code),
    "one loud row": lambda rng, code, shape: np.where(np.arange(shape[1])[:, None] == 3, 0x7F00, like_kv(rng, shape)),
}


def make_pages(code: PageCode, count: int, seed: int) -> Values:
    """uint16 [count, values]: of every kind in turn."""
    rng, kinds = np.random.default_rng(seed), list(PAGES.values())
    shape = (code.blocks, code.rows, code.channels)
    made = [kinds[i % len(kinds)](rng, code, shape) for i in range(count)]
    return np.stack([page.astype(np.uint16).reshape(-1) for page in made])
