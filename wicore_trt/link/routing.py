"""Chooses the replica of a request: the one that holds its longest prefix, unless that one is loaded.

Plain data. It must not know engines or transports. Invariants: an outdated memory costs time, never tokens; no tenant's
or salt's prompts are found by another's; the memory is bounded.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from wicore_trt.kv.pages.hashing import mark_content
from wicore_trt.types import TextRequest

RUNNING_TOKENS, WAITING_TOKENS = 128, 1024
"""Tokens to compute that count as much as a sequence of the same steps, and as one more that waits for a place."""
MOST_BLOCKS = 1 << 17
"""Blocks of prompts that are remembered, some 200 bytes each."""
USUAL_BLOCK = 32
"""Tokens of a block for engines that keep their KV cache to themselves."""


def weigh_load(sequences: int, places: int, tokens: int) -> int:
    """Weigh a replica's load in tokens to compute: `tokens` of prompts without output, and `sequences` in `places`."""
    return tokens + RUNNING_TOKENS * sequences + WAITING_TOKENS * max(0, sequences - places)


def choose_replica(hits: Sequence[int], loads: Sequence[int | None], turn: int) -> int:
    """Choose the replica with the least to do before and beside a request. `hits`: prompt tokens that each one need not
    compute; `loads` as weighed, None for one that takes no requests, of which one is chosen only if all are so. Equal
    ones take turns, by any number that grows with each request."""
    count = len(loads)
    return min(range(count), key=lambda i: (loads[i] is None, (loads[i] or 0) - hits[i], (i - turn) % count))


class PrefixMemory:
    """Memory of the prompts that each replica was given last, by blocks of `block` tokens."""

    def __init__(self, replicas: int, block: int, most: int = MOST_BLOCKS) -> None:
        self._replicas, self._block, self._most = replicas, block or USUAL_BLOCK, most
        self.holders: OrderedDict[int, int] = OrderedDict()  # a bit for each replica, by block; oldest use first

    def name_blocks(self, request: TextRequest) -> list[int]:
        """Name the full blocks of a prompt of token ids by all that comes before, within tenant and salt. None of a
        prompt whose own probabilities are asked for, which uses no cache."""
        tokens, size = request.prompt_token_ids or (), self._block
        if request.params.prompt_logprobs is not None:
            return []
        marks = mark_content(request.content, size) if request.content else {}
        name, names = hash((request.tenant, request.cache_salt)), []  # keyed, as texts are
        for i in range(len(tokens) // size):
            name = hash((name, tokens[i * size : (i + 1) * size], marks.get(i)))
            names.append(name)
        return names

    def find_hits(self, names: Sequence[int]) -> list[int]:
        """Find how many tokens of a prompt each replica holds."""
        hits, holders = [0] * self._replicas, (1 << self._replicas) - 1
        for count, name in enumerate(names, 1):
            holders &= self.holders.get(name, 0)
            if not holders:
                break
            for i in range(self._replicas):
                if holders >> i & 1:
                    hits[i] = count * self._block
        return hits

    def note_prompt(self, names: Sequence[int], replica: int) -> None:
        """Note that a replica is given a prompt. Prompts are forgotten from their ends."""
        for name in reversed(names):
            self.holders[name] = self.holders.get(name, 0) | 1 << replica
            self.holders.move_to_end(name)
        while len(self.holders) > self._most:
            self.holders.popitem(last=False)

    def forget_replica(self, replica: int) -> None:
        """Forget what a replica was given, since it has begun anew."""
        for name, holders in list(self.holders.items()):
            self.holders[name] = holders & ~(1 << replica)
