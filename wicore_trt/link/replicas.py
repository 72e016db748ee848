"""Several engines of one server as one: each request goes to one of them, which its key names.

It must not know text, transports or processes. Invariants of RemoteEngine hold too; a replica that ends takes only its
own requests with it, and no others are sent to it until the next one has come. An outdated memory of prompts costs
time, never tokens; it is bounded, and no tenant's or salt's prompts are found by another's.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections import OrderedDict
from collections.abc import AsyncGenerator, Mapping, Sequence
from functools import reduce
from itertools import zip_longest
from typing import Any

from wicore_trt.core.port import Change, EnginePort, Position, Sink
from wicore_trt.errors import InvalidRequestError
from wicore_trt.kv.pages.hashing import mark_content
from wicore_trt.link.remote import RemoteEngine
from wicore_trt.types import CacheStore, EngineStats, GenerateRequest, TextRequest, TokenOutput

RUNNING_TOKENS, WAITING_TOKENS = 128, 1024
"""Tokens to compute that count as much as a sequence of the same steps, and as one more that waits for a place."""
MOST_BLOCKS = 1 << 17
"""Blocks of prompts that are remembered, some 200 bytes each."""
USUAL_BLOCK = 32
"""Tokens of a block for engines that keep their KV cache to themselves."""
_SAME = frozenset({"uptime_s", "page_bytes"})
"""Figures whose largest one stands for all."""


class Replicas(EnginePort):
    """Engines that serve the same. `places`: sequences that each one runs at a time. `caches`: they reuse prefixes.
    `keeps_pages`: the next engine has the pages of the former one, on disk."""

    def __init__(self, engines: Sequence[RemoteEngine], *, places: int, caches: bool, keeps_pages: bool) -> None:
        self._engines, self._places, self._caches, self._keeps_pages = tuple(engines), places, caches, keeps_pages
        self._sink: Sink = lambda outputs: None
        self._memory: PrefixMemory | None = None
        self._pids = [engine.pid for engine in engines]  # as of the last request
        self._turn = 0
        self._chosen: tuple[int, list[int], int] = (0, [], 0)  # replica, blocks and tokens to compute of the next one
        self.computing: dict[str, int] = {}  # tokens to compute, by request without an output
        self.tokens = [0] * len(engines)  # their sum

    @property
    def parts(self) -> Sequence[EnginePort]:
        return self._engines

    @property
    def dead(self) -> str | None:
        """Return why no replica takes requests."""
        reasons = [engine.dead for engine in self._engines]
        return reasons[0] if all(reasons) else None

    async def start(self, sink: Sink) -> None:
        self._sink = sink
        for engine in self._engines:
            await engine.start(self._take_outputs)

    def choose_prefix(self, request: TextRequest) -> str:
        if self._memory is None:
            sizes = [engine.info.page_tokens for engine in self._engines if engine.info is not None]
            self._memory = PrefixMemory(len(self._engines), max(sizes, default=0))
        for i, engine in enumerate(self._engines):
            if engine.pid not in (None, self._pids[i]):
                if not self._keeps_pages:
                    self._memory.forget_replica(i)
                self._pids[i] = engine.pid
        names = self._memory.name_blocks(request) if self._caches else []
        hits, both = self._memory.find_hits(names), zip(self._engines, self.tokens, strict=True)
        loads = [None if e.dead is not None else weigh_load(e.sequences, self._places, tokens) for e, tokens in both]
        self._turn += 1
        chosen = choose_replica(hits, loads, self._turn) if request.replica is None else request.replica
        self._chosen = chosen, names, max(0, len(request.prompt_token_ids or ()) - hits[chosen])
        return f"{self._engines[chosen].prefix}{chosen}/"

    async def add(self, request: GenerateRequest) -> None:
        """Hand the request over to the replica that was chosen for it just now."""
        (chosen, names, tokens), key = self._chosen, request.request_key
        assert self._memory is not None and self.part_of(key) is self._engines[chosen]
        if request.cache.store is not CacheStore.NEVER:
            self._memory.note_prompt(names, chosen)
        self.computing[key] = tokens
        self.tokens[chosen] += tokens
        try:
            await self._engines[chosen].add(request)
        except BaseException:
            self._end_computing(key)
            raise

    def part_of(self, request_key: str) -> RemoteEngine:
        return self._engines[_find_replica(request_key)]

    def abort(self, request_key: str, index: int | None = None) -> None:
        self.part_of(request_key).abort(request_key, index)

    async def stats(self, tenant: str | None = None) -> EngineStats:
        """Return the sums of the replicas that serve."""
        asked = [engine for engine in self._engines if engine.dead is None] or self._engines[:1]
        found = await asyncio.gather(*(engine.stats(tenant) for engine in asked), return_exceptions=True)
        known = [stats for stats in found if not isinstance(stats, BaseException)]
        if not known:
            raise next(error for error in found if isinstance(error, BaseException))
        return reduce(add_figures, known)

    async def kv_events(self, tenant: str | None, after: Position) -> AsyncGenerator[Change, None]:
        """Refuse: each replica has a feed of its own, with its own numbers (`parts`)."""
        raise InvalidRequestError(
            f"This server has {len(self._engines)} replicas, and each one has KV events of its own.",
            fix="Name one of them, from 0.", field="replica",
        )  # fmt: skip
        yield

    async def stop(self, timeout_s: float) -> None:
        for engine in self._engines:
            await engine.stop(timeout_s)

    def _take_outputs(self, outputs: list[TokenOutput]) -> None:
        for output in outputs:
            if output.request_key in self.computing and (output.token_ids or output.finish_reason is not None):
                self._end_computing(output.request_key)
        self._sink(outputs)

    def _end_computing(self, key: str) -> None:
        self.tokens[_find_replica(key)] -= self.computing.pop(key, 0)


def _find_replica(request_key: str) -> int:
    return int(request_key.rsplit("/", 2)[-2])


def add_figures(one: Any, other: Any, name: str = "") -> Any:
    """Add statistics: numbers, mappings by key, and tuples of parts by the first field of each."""
    if isinstance(one, str) or one is None:
        return one
    if isinstance(one, Mapping):
        return {key: add_figures(one.get(key, 0), other.get(key, 0)) for key in {**one, **other}}
    if isinstance(one, tuple):
        if not any(map(dataclasses.is_dataclass, one + other)):
            return tuple(a + b for a, b in zip_longest(one, other, fillvalue=0))
        first = dataclasses.fields((one + other)[0])[0].name
        mine, theirs = ({getattr(part, first): part for part in parts} for parts in (one, other))
        both = {**theirs, **mine}
        return tuple(add_figures(part, theirs[k]) if k in mine and k in theirs else part for k, part in both.items())
    if dataclasses.is_dataclass(one) and not isinstance(one, type):
        names = [field.name for field in dataclasses.fields(one)]
        return type(one)(**{n: add_figures(getattr(one, n), getattr(other, n), n) for n in names})
    return max(one, other) if name in _SAME else one + other


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
