"""The arithmetic of `wicore kv plan` against what the pools, the tiers' books and the disk really do."""

from __future__ import annotations

import random

import pytest
from disk_store_helpers import SPACE
from fakes import make_core, tiny_spec
from hypothesis import given, settings
from hypothesis import strategies as st

from wicore_trt.config import KVSettings
from wicore_trt.kv.disk.files import Files
from wicore_trt.kv.disk.space import SLAB_BYTES, DiskSpace
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.by_name import make_policy
from wicore_trt.kv.sizing import MODELS, Geometry, SessionSize, builtin_spec
from wicore_trt.kv.slabs import Slabs
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.pool_sizes import pages_per_sequence, pool_sizes, shared_pages
from wicore_trt.types import GenerateRequest, SamplingParams

KIB, MIB = 1 << 10, 1 << 20

geometries = st.builds(
    Geometry.from_spec,
    st.sampled_from([builtin_spec(name) for name in MODELS] + [tiny_spec(6, (LOCAL, LOCAL)), tiny_spec(6, (GLOBAL,))]),
    st.sampled_from([1, 8, 16, 32, 48]),
    st.sampled_from(["float32", "bfloat16", "fp8"]),
    coded=st.booleans(),
)


@pytest.mark.parametrize(
    ("name", "all_kib", "global_kib", "window_mib"),
    [
        ("gemma3-270m", 18, 3, 7.5),
        ("gemma3-1b", 26, 4, 11),
        ("gemma3-4b", 136, 20, 116),
        ("gemma3-12b", 384, 64, 320),
        ("gemma3-27b", 496, 80, 416),
    ],
)
def test_bytes_of_the_published_sizes(name, all_kib, global_kib, window_mib):
    """KV per token is 2 (K, V) x KV heads x head size x 2 bytes x layers."""
    geometry = Geometry.from_spec(builtin_spec(name), 32, "bfloat16")
    assert geometry.page_bytes[GLOBAL] == 32 * global_kib * KIB
    assert sum(geometry.page_bytes.values()) == 32 * all_kib * KIB
    window = builtin_spec(name).sliding_window // 32
    assert geometry.page_bytes[LOCAL] * window == window_mib * MIB


def test_27b_at_32k_takes_a_fifth_of_all_layers():
    geometry = Geometry.from_spec(builtin_spec("gemma3-27b"), 32, "bfloat16")
    size = SessionSize(geometry, 32_768, 128)
    assert size.all_layers_bytes == 496 * KIB * 32_768 and size.saving_factor >= 5.0
    # slots of a quarter of 2.5 MiB: 4 for the page of 10 global layers, 21 for one of 52 local ones
    assert geometry.slot_bytes == 655_360
    assert size.host_bytes == (1024 * 4 + 37 * 21) * 655_360
    assert list(size.page_indices[LOCAL]) == list(range(1024 - 37, 1024))
    one_window = SessionSize(geometry, 32_768, 0)
    assert one_window.page_indices[LOCAL] == list(range(1023 - 32, 1024))
    assert SessionSize(geometry, 131_072, 128).saving_factor > 5.8


@pytest.mark.parametrize("name", MODELS)
def test_coded_pages_take_three_quarters(name):
    for page_tokens in (16, 32, 64):
        raw, coded = (Geometry.from_spec(builtin_spec(name), page_tokens, "bfloat16", coded=on) for on in (False, True))
        assert raw.page_bytes == coded.page_bytes, "the device keeps them raw"
        less, more = (SessionSize(each, 8192, 128).host_bytes for each in (coded, raw))
        assert 0.72 < less / more < 0.78
        fp8, on = (Geometry.from_spec(builtin_spec(name), page_tokens, "fp8", coded=c) for c in (False, True))
        assert fp8 == on, "FP8 has no code"


def index_of(geometry: Geometry, slots: int) -> TierIndex:
    primary = GLOBAL if GLOBAL in geometry.page_bytes else LOCAL
    return TierIndex(slots, dict(geometry.slots_per_page), make_policy("lru", max(1, slots)), primary=primary)


def store(index: TierIndex, session: int, group: str, number: int) -> None:
    key, parent = (b"%d/%d" % (session, n) for n in (number, number - 1))
    copy = index.reserve_copy(Page(key, group, number, parent if number else None, b"t"))
    assert copy is not None
    index.commit_copy(copy)


def fill(index: TierIndex, size: SessionSize, session: int) -> None:
    """Put a session's pages into a tier, chain first, with windows of earlier turns that nobody needs any more."""
    primary = index.primary
    for number in size.page_indices[primary]:
        store(index, session, primary, number)
    if primary == LOCAL:
        return
    for number in size.page_indices.get(LOCAL, ()):
        store(index, session, LOCAL, number)
    for number in sorted(set(size.page_indices[GLOBAL]) - set(size.page_indices.get(LOCAL, ())))[-3:]:
        if LOCAL in size.page_indices and index.num_slots - index.used_slots >= index.slots_per_page[LOCAL]:
            store(index, session, LOCAL, number)
            index.spare_copies(LOCAL, [b"%d/%d" % (session, number)])


@settings(max_examples=40, deadline=None)
@given(
    geometry=geometries, pages=st.integers(1, 60), rest=st.integers(0, 7), reply=st.integers(0, 400),
    count=st.integers(1, 4),
)  # fmt: skip
def test_a_tier_of_the_planned_bytes_holds_the_sessions_and_not_one_more(geometry, pages, rest, reply, count):
    size = SessionSize(geometry, pages * geometry.page_tokens + min(rest, geometry.page_tokens - 1), reply)
    index = index_of(geometry, count * size.host_bytes // geometry.slot_bytes)
    for session in range(count):
        fill(index, size, session)
    index.check_integrity()
    assert not index.evictions["capacity"] and index.used_slots <= index.num_slots == count * size.slot_count
    needed = {group: len(found) * count for group, found in size.page_indices.items()}
    assert all(index.pages[group] >= held for group, held in needed.items())
    fill(index, size, count)
    assert index.evictions["capacity"]


@settings(max_examples=60, deadline=None)
@given(
    geometry=geometries, sessions=st.integers(1, 40), tokens=st.integers(1, 20_000), batch=st.integers(1, 8192),
    loads=st.booleans(),
)  # fmt: skip
def test_the_device_budget_holds_the_active_sessions(geometry, sessions, tokens, batch, loads):
    spec, size = geometry.spec, {"float32": 4, "bfloat16": 2, "fp8": 1}[geometry.kv_dtype]
    budget = geometry.device_bytes(sessions, tokens, batch, loads=loads)
    given = (spec, geometry.page_tokens, size, budget, tokens)
    shared = shared_pages(*given, max_batch_tokens=batch, loads=loads)
    assert geometry.device_sessions(budget, tokens, batch, loads=loads) >= sessions
    need = {}
    for group in geometry.page_bytes:
        held = pages_per_sequence(spec, group, geometry.page_tokens, tokens)
        need[group] = sessions * (held + (sessions > 1)) + (held if loads and group == LOCAL else 0)
    if shared is not None:
        slabs = Slabs(budget // geometry.slab_bytes, shared.slab_pages)
        assert slabs.can_take(need) and budget == slabs.count * geometry.slab_bytes
        return
    pools = pool_sizes(*given, max_batch_tokens=batch, max_sequences=sessions, loads=loads)
    for group, pages in pools.items():
        assert need[group] <= pages <= need[group] + -(-batch // geometry.page_tokens)
    assert sum(pools[group] * geometry.page_bytes[group] for group in pools) == budget


@pytest.mark.parametrize("name", ["gemma3-270m", "gemma3-27b"])
@pytest.mark.parametrize("slots", [1, 50, 3000, 40_000, 400_000])
def test_the_disk_limit_holds_the_slots(tmp_path, name, slots):
    geometry = Geometry.from_spec(builtin_spec(name), 32, "bfloat16")
    limit = geometry.disk_bytes(slots)
    space = DiskSpace(
        tmp_path / "kv", SPACE, geometry.slot_bytes,
        limit_bytes=limit, free_bytes=0, slab_bytes=SLAB_BYTES, files=Files(),
    )  # fmt: skip
    assert slots <= space.num_slots <= slots * 1.001 + 1
    assert slots - 1 <= geometry.disk_slots(limit) <= space.num_slots
    space.close()
    assert slots * (4096 + geometry.slot_bytes) < limit < 1.005 * slots * (4096 + geometry.slot_bytes) + MIB


@pytest.mark.parametrize("seed", range(6))
def test_an_engine_keeps_the_pages_of_a_session_that_the_plan_counts(seed):
    """Of a conversation of several turns the host needs these pages; all others are free to leave first."""
    rng = random.Random(seed)
    window, page_tokens = rng.randint(2, 20), 4
    core = make_core(
        pages={GLOBAL: 64, LOCAL: 64}, window=window, page_tokens=page_tokens, kv=KVSettings(host_bytes=8 * MIB)
    )
    tokens = [rng.randrange(2, 97) for _ in range(rng.randint(1, 40))]
    for turn in range(rng.randint(1, 4)):
        reply = rng.randint(1, 20)
        params = SamplingParams(max_tokens=reply, temperature=0, ignore_eos=True)
        core.add(GenerateRequest(str(turn), tuple(tokens), params))
        while core.has_work:
            for output in core.step():
                assert output.error is None
                tokens += output.token_ids
        held = len(tokens) - 1  # the last token was sampled, not computed
        tokens += [rng.randrange(2, 97) for _ in range(rng.randint(1, 9))]
    tiers = core.scheduler.manager.tiers
    assert tiers.wait_idle(60)
    geometry = Geometry.from_spec(tiny_spec(window), page_tokens, "float32")
    size = SessionSize(geometry, held, reply - 1)
    found = {GLOBAL: set(), LOCAL: set()}
    for copy in tiers.host.iterate_copies():
        if copy.page.group == GLOBAL or copy.page.key not in tiers.host._spare:
            found[copy.page.group].add(copy.page.index)
    assert found[GLOBAL] == set(size.page_indices[GLOBAL]) and found[LOCAL] <= set(size.page_indices[LOCAL])
    published = held // page_tokens * page_tokens
    if geometry.first_visible_page(held) == geometry.first_visible_page(
        published
    ):  # else its window had begun to leave
        assert found[LOCAL] == set(size.page_indices[LOCAL])
    core.close()


def test_a_conversation_goes_on_from_its_global_pages_and_one_window():
    geometry = Geometry.from_spec(builtin_spec("gemma3-27b"), 32, "bfloat16")
    size = SessionSize(geometry, 32_768, 128)
    assert size.resume_bytes == (1024 * 4 + 32 * 21) * (4096 + 655_360)
