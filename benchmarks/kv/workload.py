"""Conversations that come back: prompts of many sessions, how they are served, and how large their KV is.

Closed loop on an EngineCore: a few requests in flight, the next one sent when one ends. It must not know engines' tiers
or settings. Invariants: a turn is sent only after the answer to the one before, as the whole conversation so far; every
request gives exactly the tokens it was asked for, or the replay raises.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from wicore_trt.arithmetic import div_ceil, first_visible_page
from wicore_trt.bench.measure import RequestRecord
from wicore_trt.core.engine import EngineCore
from wicore_trt.errors import WicoreError
from wicore_trt.model.spec import GLOBAL, LOCAL, Gemma3Spec
from wicore_trt.runtime.pool_sizes import TYPICAL_WINDOWS, pages_per_sequence
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams, TokenOutput

SET_TIMES, HOST_TIMES, DISK_TIMES = 10, 3, 40
"""Working set, host tier and disk tier as multiples of the device pool."""
BATCH_TOKENS = 256
"""Token budget of a step; a small one leaves more of a small pool to the windows of the sequences."""
STALL_S = 60.0
"""A replay in which no request gains a token for this long has lost one."""

Turn = tuple[int, int]
"""(session, turn)."""


@dataclass(frozen=True, slots=True)
class TrafficShape:
    """Lengths in tokens. A session is a system prompt, which it shares with every `system_prompts`-th other one, and
    per turn `turn_tokens` of a user and `output_tokens` of the model."""

    sessions: int
    turns: int
    system_prompts: int
    system_tokens: int
    turn_tokens: int
    output_tokens: int
    in_flight: int

    def length(self, turns: int) -> int:
        """Tokens of a conversation after that many turns."""
        return self.system_tokens + turns * (self.turn_tokens + self.output_tokens)

    def schedule(self, turns: Iterable[int]) -> list[Turn]:
        """Round robin over the sessions, turn by turn: before a session comes back, all others were served."""
        return [(session, turn) for turn in turns for session in range(self.sessions)]


def working_set_bytes(
    shape: TrafficShape, turns: int, page_tokens: int, window: int, page_bytes: Mapping[str, int]
) -> dict[str, int]:
    """Bytes per layer group that let every session continue after `turns` turns, shared pages counted once.

    Full pages only, as a cache keeps them, and the last token of an answer has no KV yet. Local layers need the pages
    that the next token sees: keys p - window + 1 .. p.
    """
    pages = (shape.length(turns) - 1) // page_tokens
    shared = shape.system_tokens // page_tokens
    window_pages = pages - first_visible_page(pages * page_tokens, window, page_tokens)
    counts = {
        GLOBAL: shape.sessions * (pages - shared) + min(shape.sessions, shape.system_prompts) * shared,
        LOCAL: shape.sessions * window_pages,
    }
    return {group: counts[group] * page_bytes[group] for group in page_bytes}


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes. `unlimited` is a device pool that keeps every page of every session; `windows` is the number of
    sequences that the pools are sized for."""

    working_set: int
    device: int
    host: int
    disk: int
    unlimited: int
    windows: int


def choose_sizes(shape: TrafficShape, spec: Gemma3Spec, page_tokens: int, itemsize: int) -> Sizes:
    """Sizes of the arms for `shape`. KV elements take `itemsize` bytes; the pools are divided as in
    runtime/pool_sizes.py, for sequences of one turn more than `shape` has."""
    page_bytes = {g: spec.page_bytes(g, page_tokens, itemsize) for g in (GLOBAL, LOCAL)}
    working_set = sum(working_set_bytes(shape, shape.turns, page_tokens, spec.sliding_window, page_bytes).values())
    longest = shape.length(shape.turns + 1)
    whole = pages_per_sequence(spec, GLOBAL, page_tokens, longest)
    window = pages_per_sequence(spec, LOCAL, page_tokens, longest)
    windows = div_ceil(shape.sessions * whole, window) + shape.in_flight
    each = min(whole, TYPICAL_WINDOWS * window) * page_bytes[GLOBAL] + window * page_bytes[LOCAL]
    chunk = min(div_ceil(BATCH_TOKENS, page_tokens), whole - window)
    device = working_set // SET_TIMES
    return Sizes(
        working_set,
        device,
        host=HOST_TIMES * device,
        disk=DISK_TIMES * device,
        unlimited=windows * each + chunk * page_bytes[LOCAL],
        windows=windows,
    )


class Prompts(Protocol):
    """Source of a replay's prompts, which takes its answers too."""

    def prompt(self, turn: Turn) -> tuple[int, ...]: ...

    def answer(self, turn: Turn, token_ids: Sequence[int]) -> None: ...


class Conversations:
    """The sessions of one arm: what was said so far. Equal arguments and answers give equal prompts."""

    def __init__(self, shape: TrafficShape, text: Sequence[int], bos_id: int) -> None:
        """`text` is cut into system prompts and user turns, no piece used twice: see `text_tokens`."""
        self._shape = shape
        self._users = text[shape.system_prompts * shape.system_tokens :]
        size = shape.system_tokens
        systems = [[bos_id, *text[i * size : (i + 1) * size - 1]] for i in range(shape.system_prompts)]
        self._said = [list(systems[session % len(systems)]) for session in range(shape.sessions)]

    def prompt(self, turn: Turn) -> tuple[int, ...]:
        """Add the user's turn and return the whole conversation."""
        session, number = turn
        size = self._shape.turn_tokens
        at = (number * self._shape.sessions + session) * size
        self._said[session] += self._users[at : at + size]
        return tuple(self._said[session])

    def answer(self, turn: Turn, token_ids: Sequence[int]) -> None:
        self._said[turn[0]] += token_ids


def text_tokens(shape: TrafficShape, turns: int) -> int:
    """Tokens of text that Conversations of `turns` turns take."""
    return shape.system_prompts * shape.system_tokens + shape.sessions * turns * shape.turn_tokens


@dataclass(frozen=True, slots=True)
class NewPrompts:
    """Prompts that have nothing in common; turn (i, 0) is the i-th one."""

    prompts: Sequence[Sequence[int]]

    def prompt(self, turn: Turn) -> tuple[int, ...]:
        return tuple(self.prompts[turn[0]])

    def answer(self, turn: Turn, token_ids: Sequence[int]) -> None:
        pass


@dataclass(slots=True)
class FinishedRequest:
    """One finished request."""

    turn: Turn
    token_ids: tuple[int, ...]
    record: RequestRecord


@dataclass(slots=True)
class _Live:
    turn: Turn
    started: float
    token_ids: list[int] = field(default_factory=list)
    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def gain(self, output: TokenOutput, wanted: int, now: float) -> FinishedRequest | None:
        """Take what one step gave; the finished request if that was its end."""
        if output.token_ids:
            self.token_ids += output.token_ids
            self.arrivals.append((now, len(output.token_ids)))
        if output.finish_reason is None:
            return None
        if output.finish_reason is not FinishReason.LENGTH or len(self.token_ids) != wanted:
            raise WicoreError(f"Request {output.request_key} ended wrongly: {output}.")
        assert output.usage is not None
        usage, arrivals = output.usage, tuple(self.arrivals)
        record = RequestRecord(
            self.started, now, arrivals, usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
        )
        return FinishedRequest(self.turn, tuple(self.token_ids), record)


def replay(
    core: EngineCore,
    prompts: Prompts,
    schedule: Sequence[Turn],
    *,
    output_tokens: int,
    in_flight: int,
    clock: Callable[[], float] = time.perf_counter,
) -> list[FinishedRequest]:
    """Serve `schedule` in order, greedy, `in_flight` requests at a time; results in order of their ends.

    Raises WicoreError when a request fails, ends early, or no request gains a token for STALL_S seconds.
    """
    params = SamplingParams(max_tokens=output_tokens, temperature=0.0, ignore_eos=True)
    pending, live, served = deque(schedule), dict[str, _Live](), list[FinishedRequest]()
    progress = clock()
    while pending or live:
        busy = {request.turn[0] for request in live.values()}
        while pending and len(live) < in_flight and pending[0][0] not in busy:
            turn = pending.popleft()
            busy.add(turn[0])
            name = f"{turn[0]}/{turn[1]}"
            request = GenerateRequest(name, prompts.prompt(turn), params)
            core.validate_request(request)
            live[name] = _Live(turn, clock())
            core.add(request)
        outputs = core.step()
        now = clock()
        if any(output.token_ids for output in outputs):
            progress = now
        elif now - progress > STALL_S:
            raise WicoreError(f"No token for {STALL_S:.0f} s; waiting: {', '.join(live)}.")
        for output in outputs:
            done = live[output.request_key].gain(output, output_tokens, now)
            if done is not None:
                del live[output.request_key]
                prompts.answer(done.turn, done.token_ids)
                served.append(done)
    return served
