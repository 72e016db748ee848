"""Page pools that all executors share: sizes, memory left over, poison."""

from __future__ import annotations

import random
from math import lcm

import pytest

torch = pytest.importorskip("torch")

from parity.tiny import tiny_model  # noqa: E402

from wicore_trt.errors import ConfigError  # noqa: E402
from wicore_trt.runtime.options import DEFAULT_KV_BYTES, ExecutorOptions  # noqa: E402
from wicore_trt.runtime.pools import RESERVE_BYTES, check_pool_room, make_layout, make_pools, plan_layout, spare_bytes  # noqa: E402

GIB = 1 << 30


def test_what_is_left_of_a_gpu() -> None:
    assert spare_bytes(30 * GIB, 80 * GIB, 0.9) == 30 * GIB - int((1 - 0.9) * 80 * GIB)
    assert spare_bytes(30 * GIB, 80 * GIB, 1.0) == 30 * GIB - RESERVE_BYTES
    assert spare_bytes(2 * GIB, 80 * GIB, 0.9) == 0


def test_pages_by_number_and_by_bytes() -> None:
    spec = tiny_model(1).spec
    pages = {"global": random.randint(1, 9), "local": random.randint(1, 9)}
    given = plan_layout(spec, "bfloat16", 8, 64, ExecutorOptions(kv_pages=pages, kv_bytes=1))
    assert given.num_pages == pages == make_layout(spec, "bfloat16", 8, pages.__getitem__).num_pages

    def used(settings: ExecutorOptions, kv_bytes: int | None = None) -> int:
        found = plan_layout(spec, "bfloat16", 8, 64, settings, kv_bytes)
        return found.memory_bytes

    slab = lcm(*given.page_bytes.values())
    for bytes_, total in (
        (1 << 22, used(ExecutorOptions(kv_bytes=1 << 22))),
        (1 << 23, used(ExecutorOptions(kv_bytes=1 << 22), 1 << 23)),
        (DEFAULT_KV_BYTES, used(ExecutorOptions(kv_bytes=None))),
    ):
        assert bytes_ - slab < total <= bytes_


def test_pools_that_do_not_fit_are_refused() -> None:
    layout = make_layout(tiny_model(1).spec, "bfloat16", 8, lambda group: 3)
    needed = sum(3 * count for count in layout.page_bytes.values())
    check_pool_room(layout, RESERVE_BYTES + needed)
    with pytest.raises(ConfigError, match=r"kv\.device_bytes"):
        check_pool_room(layout, RESERVE_BYTES + needed - 1)


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_pools_hold_nothing_that_could_be_text(dtype: str) -> None:
    spec = tiny_model(1).spec
    layout = make_layout(spec, dtype, 8, lambda group: 2)
    pools = make_pools(spec, layout, lambda shape, kind: torch.zeros(tuple(shape), dtype=kind))
    for group, pool in pools.items():
        assert pool[0].nbytes == layout.page_bytes[group] and pool.float().isnan().all()


@pytest.mark.parametrize("dtype", ["bfloat16", "fp8"])
def test_groups_that_share_memory_have_views_of_it(dtype: str) -> None:
    spec = tiny_model(1).spec
    layout = plan_layout(spec, dtype, 8, 64, ExecutorOptions(kv_bytes=1 << 22, max_batch_tokens=16))
    assert layout.slab_pages is not None and (1 << 22) - layout.memory_bytes < 1 << 18
    pools = make_pools(spec, layout, lambda shape, kind: torch.zeros(tuple(shape), dtype=kind))
    assert len({pool.data_ptr() for pool in pools.values()}) == 1
    for group, pool in pools.items():
        assert pool.is_contiguous() and pool.nbytes == layout.memory_bytes and pool.float().isnan().all()
        assert pool.shape[0] == layout.num_pages[group] and pool[0].nbytes == layout.page_bytes[group]
        assert layout.num_pages[group] % layout.slab_pages[group] == 0
    pools["global"][3] = 1
    for other, slot in layout.find_overlaps("global", 3):
        assert (pools[other][slot].float() == 1).any()
