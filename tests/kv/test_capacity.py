"""Tokens per byte of the host tier, through the manager's own decisions, at the shapes of Gemma 3 27B."""

from __future__ import annotations

import random

import pytest
from copiers import PlainCopier

from wicore_trt.config import KVSettings
from wicore_trt.core.assemble_kv import make_cache
from wicore_trt.kv.policy.cost import CostPolicy
from wicore_trt.kv.prefix.rates import ComputeRate
from wicore_trt.kv.sequence_pages import SequencePages
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.executor import KVLayout

PAGE_TOKENS, WINDOW, ANSWER = 32, 1024, 256
LAYERS = {GLOBAL: 10, LOCAL: 52}
SCALE = 8
"""Pages are an eighth of the real ones, so that the slab fits a small machine; slots scale with them."""
LAYER_BYTES = 2 * PAGE_TOKENS * 16 * 128 * 2
PAGE_BYTES = {group: LAYER_BYTES * layers // SCALE for group, layers in LAYERS.items()}


class NoCopies(PlainCopier):
    """A device without memory; what counts here are the books."""

    def to_host(self, group, slot, parts, done, *, settled=False) -> None:
        assert sum(map(len, parts)) == PAGE_BYTES[group]
        done(None, 0.0)

    def to_device(self, group, slots, pages, done) -> None:
        done([None] * len(slots), 0.0)  # the link is rated; nothing is loaded here


def serve(manager, tokens: list[int], prompt: int) -> None:
    """What the engine does for one request, without computing: chunks of 2,048 tokens, then one by one."""
    pages = SequencePages(manager.chain.derive_names("", ""))
    hit = manager.find_prefix(pages, tokens[:prompt])
    manager.attach_prefix(pages, hit, prompt)
    manager.touch_chain(pages, hit.tokens)
    computed = hit.tokens
    while computed < len(tokens):
        step = min(2048, prompt - computed) if computed < prompt else 1
        assert manager.reserve_pages(pages, computed + step, total=prompt + 1)
        manager.commit_tokens(pages, tokens, computed, computed + step, finite=computed + step >= prompt)
        computed += step
        manager.prepare_step()
        manager.work_beside_step(0)
    manager.end_request(pages, prompt, hit.tokens)
    manager.free_pages(pages)
    manager.tiers.wait_idle(60)


@pytest.mark.long
@pytest.mark.parametrize("turns", [1, 4])
def test_a_32k_conversation_of_27b_takes_a_fifth_of_all_layers_or_less(turns):
    context, rng = 32_768, random.Random(turns)
    layout = KVLayout(PAGE_TOKENS, "bfloat16", {GLOBAL: 1200, LOCAL: 300}, PAGE_BYTES)
    sessions = 3
    every_layer = sessions * context * sum(LAYERS.values()) * LAYER_BYTES // PAGE_TOKENS // SCALE
    # with several turns the running request has a window of its own until the one before it is given up
    running = (WINDOW // PAGE_TOKENS + ANSWER // PAGE_TOKENS + 2) * PAGE_BYTES[LOCAL] if turns > 1 else 0
    settings = KVSettings(host_bytes=every_layer // 5 + running, policy="lru")
    manager, loader = make_cache(settings, layout, WINDOW, engine="27b", kernels="none", copier=NoCopies())
    conversations = [rng.choices(range(1 << 18), k=context) for _ in range(sessions)]
    for turn in range(turns):
        for tokens in conversations:
            end = context * (turn + 1) // turns
            serve(manager, tokens[:end], end - ANSWER)
    index = manager.tiers.host
    index.check_integrity()
    for tokens in conversations:
        pages = SequencePages(manager.chain.derive_names("", ""))
        hit = manager.find_prefix(pages, [*tokens, 0])
        plan = loader.choose_load(pages, context + 1, hit, ComputeRate(per_token_s=1.0, slice_tokens=1))
        assert max(hit.tokens, plan.stop if plan else 0) == context, "a conversation does not continue where it ended"
    print(f"{turns} turns: all layers {every_layer:,} bytes, tier {settings.host_bytes:,}, {index.evictions}")
    manager.tiers.close(1)


def test_the_policies_hear_how_long_an_answer_was(monkeypatch):
    layout = KVLayout(PAGE_TOKENS, "bfloat16", {GLOBAL: 200, LOCAL: 200}, PAGE_BYTES)
    settings = KVSettings(host_bytes=100 * PAGE_BYTES[LOCAL])
    manager, _ = make_cache(settings, layout, WINDOW, engine="27b", kernels="none", copier=NoCopies())
    heard = []
    monkeypatch.setattr(CostPolicy, "note_answer", lambda self, keys, tokens: heard.append((self, len(keys), tokens)))
    serve(manager, list(range(1000)), 900)
    held = [manager._policy, *(index.policy for index in manager.tiers.indexes.values())]
    pages = 1000 // PAGE_TOKENS
    assert [(id(policy), pages, pages * PAGE_TOKENS - 900) for policy in held] == [(id(p), n, t) for p, n, t in heard]
    assert len(held) >= 2
