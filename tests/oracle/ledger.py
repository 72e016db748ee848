"""What every live sequence must output, and what it did output: each output of an engine is held against it.

It must not know the engine. Invariant (`take`): tokens are the oracle's from the first to the last, each sequence ends
once, for a reason that it has, and what it found cached somebody of its tenant and salt had.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from oracle.checks import require
from oracle.device import Bad, Failure
from oracle.model import Answer
from wicore_trt.types import FinishReason, GenerateRequest, TokenOutput

CLEAN = (FinishReason.STOP, FinishReason.LENGTH)
Realm = tuple[str, str, str]
"""Engine, tenant and salt: what may share pages."""


@dataclass
class Live:
    """A sequence that has not ended. `prompt` has its images; `order` is the number of requests before its own."""

    seq_id: int
    request: GenerateRequest
    prompt: tuple[int, ...]
    right: Answer
    realm: Realm
    order: int
    cached: int = 0
    got: list[int] = field(default_factory=list)
    aborted: bool = False
    furthest: int = 0

    @property
    def whole(self) -> tuple[int, ...]:
        """Its tokens when it has ended by itself."""
        return (*self.prompt, *self.right.tokens)


class Ledger:
    def __init__(self, counts: Counter[str]) -> None:
        self.counts = counts
        self.live: dict[tuple[str, int], Live] = {}
        self.history: dict[Realm, list[Sequence[int]]] = {}
        self.requests = 0
        self._noticed: dict[int, int] = {}
        """By number of a spoilt entry: how many requests had come when one first failed of it."""

    def add(self, live: Live, index: int) -> None:
        self.live[live.request.request_key, index] = live

    def forget(self) -> None:
        """The engine was killed: nobody hears of the live ones any more."""
        for live in self.live.values():
            self.history.setdefault(live.realm, []).append(live.whole)
        self.live.clear()

    def none_left(self) -> None:
        require(not self.live, "lost", f"{len(self.live)} sequences never ended: {sorted(self.live)}")

    def take(self, output: TokenOutput, now: float, bad: Bad) -> None:
        place, usage = (output.request_key, output.index), output.usage
        require(place in self.live, "unknown output", output)
        live = self.live[place]
        live.got += output.token_ids
        prompt, right = live.prompt, live.right.tokens
        if tuple(live.got) != right[: len(live.got)]:
            raise Failure("wrong token", f"{place}: {live.got}, right is {list(right)}; prompt of {len(prompt)} tokens")
        assert usage is not None
        require(usage.prompt_tokens == len(prompt) and usage.completion_tokens == len(live.got), "usage", output)
        require(usage.cached_tokens <= len(prompt), "cached above prompt", usage)
        if usage.cached_tokens > live.cached:
            self._check_cached(live, usage.cached_tokens)
        if output.finish_reason is None:
            return
        del self.live[place]
        self.history.setdefault(live.realm, []).append((*prompt, *live.got))
        self.counts[f"ended: {output.finish_reason.value}"] += 1
        self._check_end(output, live, now, bad)

    def _check_end(self, output: TokenOutput, live: Live, now: float, bad: Bad) -> None:
        reason, right, deadline = output.finish_reason, live.right, live.request.deadline
        if reason in CLEAN:
            complete = tuple(live.got) == right.tokens and reason is right.reason
            require(complete and output.stop_reason == right.stop_reason, "wrong end", output, right)
        elif reason is FinishReason.CANCELLED:
            require(live.aborted, "cancelled by nobody", output)
        elif reason is FinishReason.DEADLINE:
            require(deadline is not None and deadline <= now, "deadline", output)
        else:
            self._check_error(output, live, bad)

    def _check_error(self, output: TokenOutput, live: Live, bad: Bad) -> None:
        """A request may fail when it has read something spoilt that nobody had noticed before it came."""
        if "could not be encoded" in (output.error or ""):
            pixels = {span.pixels for span in live.request.content}
            require(bool(pixels & bad.blind), "failed request", output.error)
            self.counts["failed image"] += 1
            return
        require("finite" in (output.error or ""), "failed request", output.error)
        if live.seq_id in bad.unlucky:
            self.counts["failed logits"] += 1
            return
        numbers = bad.read.get(live.seq_id, set())
        fresh = [number for number in numbers if live.order < self._noticed.get(number, 1 << 60)]
        for number in numbers:
            self._noticed.setdefault(number, self.requests)
        if not fresh:
            text = f"{output}: it read {numbers}, noticed when so many requests had come: {self._noticed}"
            raise Failure("never heals" if numbers else "failed request", text)
        self.counts["failed of a spoilt entry"] += 1

    def _check_cached(self, live: Live, cached: int) -> None:
        mine, live.cached = live.realm, cached
        if cached > self._shared(live, lambda realm: realm == mine):
            salted = self._shared(live, lambda realm: realm[::2] == mine[::2])
            text = f"{cached} tokens of {live.request.request_key} were cached"
            raise Failure("foreign tenant" if cached <= salted else "foreign cache", text)

    def _shared(self, mine: Live, of: Callable[[Realm], bool]) -> int:
        """The longest prefix of a prompt that somebody else has sent or got."""
        prompt = mine.prompt
        if mine.request.params.n > 1:
            return len(prompt)
        known = [tokens for realm, all_of in self.history.items() if of(realm) for tokens in all_of]
        known += [live.whole for live in self.live.values() if live is not mine and of(live.realm)]
        return max((common(prompt, other) for other in known), default=0)


def common(one: Sequence[int], other: Sequence[int]) -> int:
    """Length of the longest common prefix."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
