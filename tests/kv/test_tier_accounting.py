"""How many tokens of conversation a tier holds, counted in slots that are really taken, rounding included."""

from __future__ import annotations

import pytest

from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.policy.policy import LRUPolicy
from wicore_trt.kv.tiers.host import find_slot_geometry
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.model.hf_config import read_hf_config
from wicore_trt.model.spec import GLOBAL, GROUPS, LOCAL, Gemma3Spec

PAGE_TOKENS, ANSWER_TOKENS, KV_BYTES = 32, 256, 2  # bf16
KIB = 1024

# Layers, KV heads, head size, window: from the config.json of google/gemma-3-{270m,1b-it,4b-it,12b-it,27b-it}.
SHAPES = {
    "270m": (18, 1, 256, 512),
    "1b": (26, 1, 256, 512),
    "4b": (34, 4, 256, 1024),
    "12b": (48, 8, 256, 1024),
    "27b": (62, 16, 128, 1024),
}
# Tokens per byte against all layers for all tokens, at least. Conversations shorter than a few windows gain nothing:
# they are all window, and a local page leaves part of its last slot empty.
AT_LEAST = {
    "270m": {1: 1.4, 4: 3.1, 32: 5.3},
    "1b": {1: 1.3, 4: 3.0, 32: 5.6},
    "4b": {1: 0.95, 4: 2.4, 32: 5.4, 128: 6.4},
    "12b": {1: 1.0, 4: 2.3, 32: 5.0, 128: 5.7},
    "27b": {1: 0.88, 4: 2.2, 32: 5.0, 128: 5.8},
}
LARGE = 128
CASES = [
    pytest.param(size, kilo, least, marks=[pytest.mark.long] * (kilo == LARGE))
    for size, row in AT_LEAST.items()
    for kilo, least in row.items()
]


def spec_of(size: str) -> Gemma3Spec:
    layers, kv_heads, head_dim, window = SHAPES[size]
    config = {"num_hidden_layers": layers, "num_key_value_heads": kv_heads, "head_dim": head_dim}
    config |= {"sliding_window": window, "num_attention_heads": 4 * kv_heads, "hidden_size": 640}
    return read_hf_config({"model_type": "gemma3_text", "intermediate_size": 2048, **config})


class Conversations:
    """A tier that is given one conversation after the other: a prompt, then an answer."""

    def __init__(self, spec: Gemma3Spec, prompt_tokens: int, capacity: int) -> None:
        page_bytes = {group: spec.page_bytes(group, PAGE_TOKENS, KV_BYTES) for group in GROUPS}
        self.slot_bytes, slots_per_page = find_slot_geometry(page_bytes)
        slots = capacity // self.slot_bytes
        self.index = TierIndex(slots, slots_per_page, LRUPolicy(slots), primary=GLOBAL)
        # The next turn resumes at the end of this one; the same prompt again, before its last token.
        pages = (prompt_tokens + ANSWER_TOKENS) // PAGE_TOKENS
        resume = ((prompt_tokens - 1) // PAGE_TOKENS, pages)
        # the token at position n sees itself and the window - 1 tokens before it
        first = [max(0, n * PAGE_TOKENS - spec.sliding_window + 1) // PAGE_TOKENS for n in resume]
        self.windows = {i for begin, end in zip(first, resume, strict=True) for i in range(begin, end)}
        self.pages = pages

    def store(self, name: int) -> int:
        """Number of pages of one more conversation."""
        keys = [b"%d %d" % (name, i) for i in range(self.pages)]
        self.index.touch_chain(keys)
        for i, key in enumerate(keys):
            for group in (GLOBAL, LOCAL) if i in self.windows else (GLOBAL,):
                copy = self.index.reserve_copy(Page(key, group, i, keys[i - 1] if i else None, b"tenant"))
                assert copy is not None
                self.index.commit_copy(copy)
        return self.pages + len(self.windows)


@pytest.mark.parametrize(("size", "kilo", "least"), CASES)
def test_tokens_per_byte(size: str, kilo: int, least: float) -> None:
    spec = spec_of(size)
    tokens = kilo * KIB + ANSWER_TOKENS
    everything = tokens * sum(spec.page_bytes(group, 1, KV_BYTES) for group in GROUPS)
    tier = Conversations(spec, kilo * KIB, capacity=3 * everything)
    fitted = stored = used = 0
    while True:
        pages = tier.store(fitted)
        if tier.index.evictions:
            break
        fitted, stored, used = fitted + 1, stored + pages, tier.index.used_slots
        assert sum(tier.index.pages.values()) == stored, "a conversation cannot be resumed"
    tier.index.check_integrity()
    ratio = fitted * everything / (used * tier.slot_bytes)
    print(f"{size} at {kilo}K: {ratio:.2f}x, {fitted} conversations where 3 whole ones would fit")
    assert ratio >= least
    assert fitted >= int(3 * least)


def test_27b_whole_is_496_kib_a_token() -> None:
    spec = spec_of("27b")
    assert len(spec.layers_of(GLOBAL)) == 10 and len(spec.layers_of(LOCAL)) == 52
    assert sum(spec.page_bytes(group, 1, KV_BYTES) for group in GROUPS) == 496 * KIB
