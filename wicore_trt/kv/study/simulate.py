"""Replay a trace through one or more KV tiers of a server; count hits and bytes.

The hit of a request is the contiguous prefix found over all tiers. Its pages then enter the first tier, which may
briefly exceed its capacity, as for a running sequence. Then every tier evicts down to its capacity, the request's own
pages included. It moves no data and must not know a clock. Invariants: after each request every tier is within its
capacity and, in an exclusive hierarchy, a page is in one tier only.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from wicore_trt.kv.policy.by_name import make_policy
from wicore_trt.kv.policy.policy import ChainPolicy, Node
from wicore_trt.kv.study.trace import BLOCK_TOKENS, TraceRequest

_NEVER = 1 << 60


@dataclass(frozen=True, slots=True)
class KVBytes:
    """Bytes of KV: `per_token` of global layers, `window` of sliding-window layers at one resume point. The defaults
    are Gemma 3 27B in 16 bit: 10 global and 52 local layers, windows of 1,024 tokens. A full prompt's last page carries
    one window."""

    per_token: int = 81_920
    window: int = 436_207_616


@dataclass(slots=True)
class SimulationReport:
    """Report of a replay, in tokens of whole blocks: `hit_tokens` by tier, `moved_bytes` by "source_to_target"."""

    policy: str
    capacity: dict[str, int]
    inclusive: bool
    requests: int = 0
    tokens: int = 0
    hit_tokens: dict[str, int] = field(default_factory=dict)
    moved_bytes: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def hit_rate(self) -> float:
        return sum(self.hit_tokens.values()) / max(1, self.tokens)

    def to_dict(self) -> dict[str, Any]:
        rates = {tier: tokens / max(1, self.tokens) for tier, tokens in self.hit_tokens.items()}
        return {**asdict(self), "hit_rate": self.hit_rate, "hit_rate_by_tier": rates}


def simulate(
    requests: Sequence[TraceRequest],
    policy: str,
    capacity: dict[str, int],
    *,
    inclusive: bool = False,
    page_cost: Callable[[int], float] | None = None,
    kv_bytes: KVBytes | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> SimulationReport:
    """Replay `requests` over tiers of `capacity` pages, from the nearest to the farthest. `policy` is a name of
    `POLICIES` or "belady". Exclusive tiers pass evicted pages down; inclusive ones are written through when a page is
    made. Raises ConfigError for an unknown policy."""
    names, start = list(capacity), time.perf_counter()
    future = find_next_uses([request.blocks for request in requests]) if policy == "belady" else None
    policies = [
        make_policy(policy, capacity[name], page_cost=page_cost, victim_cache=i > 0 and not inclusive)
        if future is None
        else BeladyPolicy(capacity[name], future)
        for i, name in enumerate(names)
    ]
    tiers = Tiers(names, policies, kv_bytes or KVBytes(), inclusive=inclusive)
    report = SimulationReport(policy, dict(capacity), inclusive, len(requests), 0, dict.fromkeys(names, 0))
    for i, request in enumerate(requests):
        for tier in tiers.serve(request):
            report.hit_tokens[names[tier]] += BLOCK_TOKENS
        report.tokens += len(request.blocks) * BLOCK_TOKENS
        if progress is not None and (i % 64 == 0 or i + 1 == len(requests)):
            progress(i + 1, len(requests))
    report.moved_bytes = tiers.moved
    report.seconds = time.perf_counter() - start
    return report


class Tiers:
    """Tiers during a replay; tier 0 is the nearest."""

    def __init__(self, names: list[str], policies: list[ChainPolicy], kv_bytes: KVBytes, *, inclusive: bool) -> None:
        self._names = names
        self._policies = policies
        self._bytes = kv_bytes
        self._inclusive = inclusive
        self._parent: dict[int, int | None] = {}
        self._resume: set[int] = set()
        steps = range(len(names) - 1)
        self.moved = {f"{names[i]}_to_{names[i + 1]}": 0 for i in steps}
        self.moved |= {f"{names[i + 1]}_to_{names[i]}": 0 for i in steps}

    def serve(self, request: TraceRequest) -> list[int]:
        """Replay one request; returns the tier of each page hit."""
        blocks = request.blocks
        hit = self.look_up(blocks)
        if len(self._names) > 1:
            self._parent.update(zip(blocks, (None, *blocks[:-1]), strict=True))
            if full := request.tokens // BLOCK_TOKENS:
                self._resume.add(blocks[min(full, len(blocks)) - 1])
            self._load(blocks, hit)
        for policy in self._policies:
            policy.touch_chain(blocks)
        first = self._policies[0]
        first.add_pages([block for block in blocks if block not in first])
        for i in range(1, len(self._policies)) if self._inclusive else ():
            fresh = [block for block in blocks if block not in self._policies[i]]
            self._policies[i].add_pages(fresh)
            self._count_arrivals(i, fresh, self._evict(i))
        if request.answer is not None:
            for policy in self._policies:
                policy.note_answer(blocks, request.answer)
        self._shrink()
        return hit

    def look_up(self, blocks: Sequence[int]) -> list[int]:
        hit = []
        for block in blocks:
            tier = next((i for i, policy in enumerate(self._policies) if block in policy), None)
            if tier is None:
                break
            hit.append(tier)
        return hit

    def _load(self, blocks: Sequence[int], hit: list[int]) -> None:
        """Bring the hit to tier 0. In an exclusive hierarchy all lower copies of the request's pages go."""
        for tier in hit:
            for step in range(tier):
                self._count(step + 1, step, self._bytes.per_token * BLOCK_TOKENS)
        for step in range(hit[-1] if hit else 0):
            self._count(step + 1, step, self._bytes.window)  # only the window at the end of the hit is needed
        if not self._inclusive:
            for block in blocks:
                for policy in self._policies[1:]:
                    if block in policy:
                        policy.remove_page(block)

    def _shrink(self) -> None:
        """Evict every tier down to its capacity; exclusive tiers pass pages on."""
        leaving = self._evict(0)
        if self._inclusive:
            return
        for i in range(1, len(self._policies)):
            # Leaves come first out of the upper tier; parents go in first, so that children find them.
            for block in reversed(leaving):
                self._policies[i].add_pages([block], self._parent[block])
            arrived, leaving = leaving, self._evict(i)
            self._count_arrivals(i, arrived, leaving)

    def _evict(self, tier: int) -> list[Any]:
        policy = self._policies[tier]
        excess = len(policy) - policy.capacity
        if excess <= 0:
            return []
        victims = policy.choose_victims(excess)
        assert victims is not None, "nothing is pinned in a simulation"
        for block in victims:
            policy.remove_page(block)
        return victims

    def _count_arrivals(self, tier: int, arrived: Sequence[int], leaving: Sequence[int]) -> None:
        """Count the bytes of pages that came into a tier from the one above it and stayed."""
        kept, resumable = set(arrived).difference(leaving), self._resume
        windows = self._bytes.window * len(kept & resumable)
        self._count(tier - 1, tier, self._bytes.per_token * BLOCK_TOKENS * len(kept) + windows)

    def _count(self, source: int, target: int, count: int) -> None:
        self.moved[f"{self._names[source]}_to_{self._names[target]}"] += count


def recompute_cost(depth: int) -> float:
    """Relative time to recompute the block at index `depth` of a chain: FLOP per token of Gemma 3 27B there over that
    at the start (2 x 25.6e9 for the weights, 4 x 4,096 per key and layer for attention: 52 windows, 10 full)."""
    position = (depth + 0.5) * BLOCK_TOKENS
    return 1.0 + (52 * 16_384 * min(position, 1024.0) + 10 * 16_384 * position) / 51.2e9


def find_next_uses(chains: Sequence[Sequence[int]]) -> list[list[int]]:
    """Find, for each page of each request, the index of the next request that contains it."""
    coming: dict[int, int] = {}
    uses: list[list[int]] = [[] for _ in chains]
    for i in range(len(chains) - 1, -1, -1):
        uses[i] = [coming.get(page, _NEVER) for page in chains[i]]
        for page in chains[i]:
            coming[page] = i
    return uses


class BeladyPolicy(ChainPolicy):
    """Policy that evicts the page whose next use is farthest: an optimum that no server can have. `future` is
    `find_next_uses` of the replayed trace; `touch_chain` is called once per request of it, in order. A page's next use
    is never later than its child's, so "leaf first" and "farthest first" agree. Hits are optimal but for ties."""

    def __init__(self, capacity: int, future: list[list[int]]) -> None:
        super().__init__(capacity)
        self._future = iter(future)

    def _score_node(self, node: Node) -> float:
        return -node.uses

    def _learn_touch(self, path: list[Node], seen: int, signal: Sequence[float] | None) -> None:
        for node, use in zip(path, next(self._future), strict=True):
            node.uses = use
