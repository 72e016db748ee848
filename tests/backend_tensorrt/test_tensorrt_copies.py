"""Copies between pages and slots: positions, bits, and what is left alone."""

from __future__ import annotations

import random

import pytest
import torch

from wicore_trt.backends.tensorrt.copies import SlotCopier
from wicore_trt.backends.tensorrt.slots import PageCopy, Slide

E4M3 = torch.float8_e4m3fn
LAYERS, HEADS, DIM, PAGE, ENTRIES, SLOTS, PAGES = 3, 2, 4, 4, 32, 3, 20


def copier_of(dtype: torch.dtype, *, fp8: bool) -> tuple[SlotCopier, torch.Tensor, torch.Tensor]:
    """A copier, its pool and its cache, both of random bits of finite values."""
    pool = torch.randn(PAGES, LAYERS, 2, PAGE, HEADS, DIM).to(E4M3 if fp8 else dtype)
    cache = torch.randn(LAYERS, 2, SLOTS, HEADS, ENTRIES, DIM).to(dtype)
    scales = torch.rand(LAYERS) + 0.01
    return SlotCopier({"g": pool}, {"g": cache}, {"g": scales}), pool, cache


def entries_of(copy: PageCopy) -> list[tuple[int, int, int]]:
    """(page, token of the page, entry) of each token."""
    at = range(copy.offset, copy.offset + copy.tokens)
    return [(copy.pages[i // PAGE], i % PAGE, copy.entry + n) for n, i in enumerate(at)]


def random_copies() -> list[PageCopy]:
    pages, copies = random.sample(range(PAGES), PAGES), []
    for slot in random.sample(range(SLOTS), random.randint(1, SLOTS)):
        offset, tokens = random.randrange(PAGE), random.randint(1, 20)
        used = [pages.pop() for _ in range(-(-(offset + tokens) // PAGE))]
        copies.append(PageCopy(slot, random.randint(0, ENTRIES - tokens), tokens, used, offset))
    return copies


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("store", [True, False])
def test_bits_go_where_they_belong_and_nowhere_else(dtype: torch.dtype, store: bool) -> None:
    copier, pool, cache = copier_of(dtype, fp8=False)
    want_pool, want_cache, copies = pool.clone(), cache.clone(), random_copies()
    for copy in copies:
        for page, token, entry in entries_of(copy):
            if store:
                want_pool[page, :, :, token] = cache[:, :, copy.slot, :, entry]
            else:
                want_cache[:, :, copy.slot, :, entry] = pool[page, :, :, token]
    (copier.store if store else copier.load)("g", copies)
    assert torch.equal(pool, want_pool) and torch.equal(cache, want_cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_finite_e4m3_byte_survives_the_way_through_a_slot(dtype: torch.dtype) -> None:
    """Page to slot to page, and slot to page to slot: the same bytes, whatever the scale."""
    codes = torch.tensor([c for c in range(256) if c & 0x7F != 0x7F], dtype=torch.uint8)
    pool = torch.zeros(64, 1, 2, PAGE, 1, DIM, dtype=torch.uint8)
    pool[:32].flatten()[: len(codes) * 4] = codes.repeat(4)[torch.randperm(len(codes) * 4)]
    cache = torch.full((1, 2, 2, 1, 128, DIM), torch.nan, dtype=dtype)
    scale = torch.tensor([random.choice((1.0, 0.0625, random.uniform(0.003, 3.0)))])
    copier = SlotCopier({"g": pool.view(E4M3)}, {"g": cache}, {"g": scale})
    copier.load("g", [PageCopy(0, 0, 128, list(range(32)), 0)])
    expected = pool[:32].view(E4M3).float() * scale
    assert torch.equal(
        cache[0, :, 0, 0].transpose(0, 1).float(),
        expected.to(dtype).float().view(32, 2, 4, 4).transpose(1, 2).reshape(128, 2, 4),
    )
    copier.store("g", [PageCopy(0, 0, 128, list(range(32, 64)), 0)])
    assert torch.equal(pool[32:], pool[:32])
    copier.load("g", [PageCopy(1, 0, 128, list(range(32, 64)), 0)])
    assert torch.equal(cache[:, :, 1].view(torch.uint8), cache[:, :, 0].view(torch.uint8))


def test_values_beyond_e4m3_saturate() -> None:
    copier, pool, cache = copier_of(torch.float32, fp8=True)
    cache[:, :, 0, :, 0] = 1e9
    cache[:, :, 0, :, 1] = -1e9
    copier.store("g", [PageCopy(0, 0, 2, [5], 1)])
    assert (pool[5, :, :, 1].float() == 448).all() and (pool[5, :, :, 2].float() == -448).all()


def test_slides_keep_what_they_say_and_touch_no_other_slot() -> None:
    copier, _, cache = copier_of(torch.float32, fp8=False)
    before = cache.clone()
    first, keep = random.randint(1, 10), random.randint(1, 20)
    copier.slide("g", [Slide(1, first, keep)])
    assert torch.equal(cache[:, :, 1, :, :keep], before[:, :, 1, :, first : first + keep])
    assert torch.equal(cache[:, :, 1, :, keep:], before[:, :, 1, :, keep:])
    assert torch.equal(cache[:, :, [0, 2]], before[:, :, [0, 2]])
    cache[:, :, 2] = torch.nan
    copier.clear(2)
    assert (cache[:, :, 2] == 0).all() and torch.equal(cache[:, :, 0], before[:, :, 0])
