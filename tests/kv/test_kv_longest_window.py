"""The longest cached prefix of a model with local layers, against a search of every length."""

from __future__ import annotations

import random

import pytest

from wicore_trt.kv.manager import KVCacheManager
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.kv.sequence_pages import SequencePages
from wicore_trt.model.spec import GLOBAL, LOCAL


@pytest.mark.parametrize("seed", range(40))
def test_the_hit_is_the_longest_prefix_whose_window_is_there(seed):
    rng = random.Random(seed)
    size, pages = rng.choice([1, 2, 4, 8]), 24
    manager = KVCacheManager({GLOBAL: pages, LOCAL: pages}, rng.randint(1, 40), KeyChain("engine", size))
    tokens = [rng.randrange(97) for _ in range(pages * size + 1)]
    sequence = SequencePages(manager.chain.derive_names("", ""))
    assert manager.find_prefix(sequence, tokens).tokens == 0
    there = {
        group: {i for i in range(pages) if rng.random() < (0.97 if group == GLOBAL else 0.8)}
        for group in (GLOBAL, LOCAL)
    }
    for group, pool in manager.pools.items():
        for i in there[group]:
            (slot,) = pool.allocate_slots(1)
            pool.write_tokens(slot, 0, size)
            pool.publish_slots([slot], [sequence.make_page(group, i)])

    def usable(n: int) -> bool:
        window = range(manager.first_visible_page(n * size), n)
        return set(range(n)) <= there[GLOBAL] and set(window) <= there[LOCAL]

    hit = manager.find_prefix(sequence, tokens)
    assert hit.tokens == size * max(n for n in range(pages + 1) if usable(n))
    assert hit.reachable == next((i for i in range(pages) if i not in there[GLOBAL]), pages)
