"""Pages go out and come back bit by bit, to their own slots and no others."""

from __future__ import annotations

import secrets
from functools import partial

import pytest
import torch
from copiers import PlainCopier

from wicore_trt.config import KVSettings
from wicore_trt.core.assemble_kv import make_cache
from wicore_trt.kv.disk.files import aligned_buffer
from wicore_trt.kv.pages.page import Page
from wicore_trt.runtime.cuda_lanes import host_address
from wicore_trt.runtime.dtypes import TORCH_DTYPES
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.runtime.page_copier import TorchPageCopier, make_copier

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "fp8"])
@pytest.mark.parametrize("part_bytes", [4096, 1024, 3000])
def test_a_page_comes_back_as_it_was(device, dtype, part_bytes):
    shape = (5, 3, 2, 4, 2, 16)  # pages, layers, K and V, tokens, heads, head size
    count = 3 * 2 * 4 * 2 * 16 * TORCH_DTYPES[dtype].itemsize
    pool = torch.randint(0, 255, (5, count), dtype=torch.uint8, device=device).view(TORCH_DTYPES[dtype]).view(shape)
    before = pool.view(5, -1).view(torch.uint8).clone()
    copier, done = TorchPageCopier({"global": pool}), []
    slab = aligned_buffer(2 * count)
    slab[:] = b"\xaa" * len(slab)
    cuts = [*range(0, count, part_bytes), count]
    parts = [slab[a:b] for a, b in zip(cuts, cuts[1:], strict=False)]

    copier.to_host("global", 3, parts, lambda *_: done.append("out"))
    assert bytes(slab[:count]) == bytes(before[3].cpu().numpy())
    assert bytes(slab[count:]) == b"\xaa" * count, "the copy wrote past the page"

    copier.to_device("global", [1], [parts], lambda *_: done.append("in"))
    after = pool.view(5, -1).view(torch.uint8)
    assert torch.equal(after[1], before[3]) and torch.equal(after[[0, 2, 3, 4]], before[[0, 2, 3, 4]])
    assert done == ["out", "in"]


def test_the_link_is_rated_without_writing_what_nobody_wrote():
    """An unwritten slot is full of NaN, so that who reads it fails."""
    pool = torch.full((600, 2048), torch.nan)
    layout = KVLayout(4, "float32", {"global": 600}, {"global": 8192})
    copier = make_copier({"global": pool}, 4)
    _, loader = make_cache(KVSettings(host_bytes=8 << 20), layout, 8, engine="e", kernels="k", copier=copier)
    assert loader._probed.get_nowait()[1] == 600 * 8192
    assert pool.isnan().all()


def test_no_page_comes_into_memory_of_the_rating_before_its_last_copy_is_over():
    """Copies of the rating may be late: what one of them overwrites was checked before."""
    layout, asked = KVLayout(4, "float32", {"global": 600}, {"global": 8192}), []
    copier = PlainCopier()
    copier.to_host = lambda group, slot, parts, done: asked.append((parts, partial(done, None)))
    copier.to_device = lambda group, slots, pages, done: asked.extend((parts, partial(done, [None])) for parts in pages)
    manager, loader = make_cache(KVSettings(host_bytes=8 << 20), layout, 8, engine="e", kernels="k", copier=copier)
    tiers, taken = manager.tiers, []

    def take_all() -> None:
        while (copy := tiers.host.reserve_copy(Page(secrets.token_bytes(32), "global", 0, None, b""))) is not None:
            taken.extend(host_address(part) for part in tiers.movers.host.cut_slots(copy.slots))

    take_all()
    lent = {host_address(part) for parts, _ in asked for part in parts}
    assert taken and lent and not lent.intersection(taken)
    for _, done in asked[:-1]:
        done(1e-6)
    tiers.apply_reports()
    take_all()
    assert not lent.intersection(taken)
    asked[-1][1](1e-6)
    tiers.apply_reports()
    take_all()
    assert lent < set(taken) and len(taken) == tiers.host.num_slots
    assert not loader._probed.empty()
    tiers.host.check_integrity()
