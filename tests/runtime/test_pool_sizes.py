"""Division of KV memory between layer groups."""

from __future__ import annotations

import random
from dataclasses import replace
from math import lcm
from types import SimpleNamespace

import pytest

from wicore_trt.errors import ConfigError
from wicore_trt.kv.manager import CacheOptions, KVCacheManager
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.kv.sizing import MODELS, builtin_spec
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.runtime.pool_sizes import TYPICAL_WINDOWS, pages_per_sequence, pool_sizes, shared_pages

SPEC = Gemma3Spec(
    vocab_size=100,
    hidden_size=64,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    intermediate_size=64,
    query_pre_attn_scalar=16,
    rms_norm_eps=1e-6,
    rope_theta=1e6,
    rope_local_theta=1e4,
    rope_scaling_factor=1,
    sliding_window=100,
    layer_groups=("local",) * 5 + ("global",),
    max_position_embeddings=4096,
    tie_word_embeddings=True,
)


def pages_held(window: int, page_tokens: int, tokens: int) -> int:
    """Pages with a position that the next token sees, counted one by one."""
    return len({p // page_tokens for p in range(max(0, tokens - window + 1), tokens + 1)})


@pytest.mark.parametrize("seed", range(60))
def test_plan_fits_the_budget_and_holds_what_it_promises(seed: int) -> None:
    rng = random.Random(seed)
    spec = replace(SPEC, sliding_window=rng.choice((5, 64, 100, 1024)))
    page_tokens, context = rng.choice((8, 16, 32)), rng.randint(40, 4000)
    batch, budget, sequences = rng.randint(1, 600), rng.randint(10, 80) << 20, rng.choice((1, 4, 64))
    loads = seed % 3 == 0
    plan = pool_sizes(
        spec, page_tokens, 4, budget, context, max_batch_tokens=batch, max_sequences=sequences, loads=loads
    )
    page_bytes = {g: spec.page_bytes(g, page_tokens, 4) for g in plan}
    used = sum(plan[g] * page_bytes[g] for g in plan)
    assert budget - max(page_bytes.values()) < used <= budget, "over the budget, or another page would fit"

    # One sequence of the longest context, at its end, computing a whole step's tokens at once.
    held = {"global": -(-context // page_tokens), "local": pages_held(spec.sliding_window, page_tokens, context)}
    window = pages_per_sequence(spec, "local", page_tokens, context)
    peak = min(-(-min(batch, context) // page_tokens) + window, held["global"])
    if loads:
        peak += window  # that of a prefix on its way from a lower tier
    assert peak <= plan["local"] and held["global"] <= plan["global"], "one sequence fits whatever the budget"
    assert held["local"] <= window <= held["local"] + 1

    # Typical sequences run out of both pools at about the same time, or max_sequences of them fit.
    typical = min(held["global"], TYPICAL_WINDOWS * window)
    fit = {"global": plan["global"] // (typical + 1), "local": (plan["local"] - (peak - window)) // (window + 1)}
    if plan["global"] > held["global"] and fit["local"] > 1:
        assert min(fit.values()) >= min(sequences, max(fit["local"] - 1, 1))


def test_a_long_context_does_not_starve_the_windows() -> None:
    """270M shapes, 1 GiB, 32K tokens: a plan for longest sequences alone would hold the windows of ten."""
    spec = replace(
        SPEC, num_layers=18, num_heads=4, num_kv_heads=1, head_dim=256, sliding_window=512,
        layer_groups=(("local",) * 5 + ("global",)) * 3,
    )  # fmt: skip
    plan = pool_sizes(spec, 32, 2, 1 << 30, 32768, max_batch_tokens=512, max_sequences=64)
    assert plan["local"] // 17 >= 48 and plan["global"] * 32 >= 150_000


@pytest.mark.parametrize("group", ["global", "local"])
def test_one_group_takes_all(group: str) -> None:
    spec = replace(SPEC, layer_groups=(group,) * 6)
    plan = pool_sizes(spec, 16, 2, 1 << 24, 1000, max_batch_tokens=64, max_sequences=8)
    assert list(plan) == [group]
    assert plan[group] == (1 << 24) // spec.page_bytes(group, 16, 2)


def test_budget_below_one_sequence_is_refused_with_the_size_it_takes() -> None:
    smallest = next(b for b in range(1 << 16, 1 << 24, 1 << 12) if fits(b))
    with pytest.raises(ConfigError, match=r"which takes ([\d,]+)") as error:
        pool_sizes(SPEC, 16, 2, smallest - (1 << 12), 1000, max_batch_tokens=64, max_sequences=8)
    needed = int(str(error.value).split("which takes ")[1].split(".")[0].replace(",", ""))
    assert fits(needed) and not fits(needed - 1)


def fits(budget: int) -> bool:
    try:
        pool_sizes(SPEC, 16, 2, budget, 1000, max_batch_tokens=64, max_sequences=8)
    except ConfigError:
        return False
    return True


@pytest.mark.parametrize("name", MODELS)
def test_memory_is_shared_from_a_size_on_that_holds_the_longest_sequence_however_it_lies(name: str) -> None:
    """The manager takes whatever is shared; below that size the memory is split."""
    spec = builtin_spec(name)
    context = spec.max_position_embeddings
    page_bytes = {g: spec.page_bytes(g, 32, 2) for g in ("global", "local")}
    slab = lcm(*page_bytes.values())
    for loads in (False, True):
        many = range(1, 2000)
        first = next(n for n in many if shared_pages(spec, 32, 2, n * slab, context, max_batch_tokens=512, loads=loads))
        for count in (first, first + 1, 5 * first):
            found = shared_pages(spec, 32, 2, count * slab + slab - 1, context, max_batch_tokens=512, loads=loads)
            assert found is not None
            assert {g: n * page_bytes[g] for g, n in found.num_pages.items()} == dict.fromkeys(page_bytes, count * slab)
            options = CacheOptions(slab_pages=found.slab_pages)
            tiers = SimpleNamespace() if loads else None
            chain = KeyChain("", 32)
            manager = KVCacheManager(found.num_pages, spec.sliding_window, chain, options=options, tiers=tiers)  # type: ignore[arg-type]
            assert manager.can_run(context, 512)
        # not much more than the sequence takes: its global pages, and a slab for each local one
        whole, window = context // 32, spec.sliding_window // 32 + 1
        assert first * slab <= whole * page_bytes["global"] + (window + 24 + 2 * window * loads) * slab


def test_a_model_with_one_group_shares_nothing() -> None:
    spec = replace(SPEC, layer_groups=("global",) * 6)
    assert shared_pages(spec, 16, 2, 1 << 24, 1000, max_batch_tokens=64) is None
