"""Estimate how long prompts take: alone, beside running sequences, and beside a slow load from disk.

Plain functions over running sequences and measurements; they decide nothing. Invariant: a newcomer's share and delay
count all that is computed before or beside it, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import replace

from wicore_trt.kv.manager import KVCacheManager
from wicore_trt.kv.prefix.loader import PrefixLoader
from wicore_trt.kv.prefix.rates import ComputeRate, PrefillMeter
from wicore_trt.schedule.sequence import Sequence
from wicore_trt.schedule.step_time import Budget, StepLoad, StepTime

# Prompts get at least a slice / LEAST tokens in a step, however little time sequences that decode leave them.
LEAST = 8
# Seconds by which a first token may come later if loading spares a second of the device: for each sequence that
# decodes, and at most. In a server of conversations nearly all decode, and shorter steps gain time for each of them.
OTHERS = (0.3, 2.0)
# A prompt that takes longer than this is looked up in the cache at arrival, to estimate its cost.
LOOK_UP_S = 0.02
# After LEARNT steps, those of DRAGGED or more slices show whether loads from disk slow prefill down.
LEARNT, DRAGGED = 4, 4


def learn_step(
    prefill: PrefillMeter, loader: PrefixLoader | None, slices: Seq[tuple[int, int]], seconds: float, slice_tokens: int
) -> None:
    """Learn from a step that computed (start, count) of each sequence. Once LEARNT steps are known, steps beside a load
    from disk teach only how much it slows them down."""
    if loader is None or not loader.reads_disk or prefill.observed < LEARNT:
        prefill.observe_step(slices, seconds, slice_tokens)
    elif sum(n for _, n in slices if n > 1) >= DRAGGED * slice_tokens:
        loader.observe_step(prefill.expected_seconds(slices), seconds)


def estimate_prompt(
    sequence: Sequence, time: StepTime | None, manager: KVCacheManager, loader: PrefixLoader | None, rate: ComputeRate
) -> float:
    """Estimate the seconds that a newcomer's prompt takes without its cached part; 0 without `time`."""
    if time is None:
        return 0.0
    pages, total = sequence.pages, len(sequence.tokens)
    seconds = time.prompt_s(0, total)
    if seconds > LOOK_UP_S and not sequence.scoring:
        hit = manager.find_prefix(pages, sequence.tokens)
        seconds = time.prompt_s(hit.tokens, total - hit.tokens)
        if loader is not None and seconds > LOOK_UP_S:
            chosen = loader.choose_load(pages, total, hit, rate)
            seconds = seconds if chosen is None else min(seconds, chosen.seconds)
    return seconds


def raise_cost(sequence: Sequence, time: StepTime | None, loader: PrefixLoader) -> None:
    """Raise the cost of a sequence whose load from disk is slow: it has more to compute and comes later."""
    meet = loader.meeting_token(sequence.pages)
    if meet is not None and time is not None:
        begun = sequence.cached or 0
        count = min(meet, len(sequence.tokens)) - begun
        sequence.cost_s = max(sequence.cost_s, time.prompt_s(begun, max(0, count)))


def lower_cost(sequence: Sequence, time: StepTime | None, computed: int) -> None:
    """Lower the cost of a sequence after a jump from `computed`: loaded tokens cost nothing."""
    if time is not None:
        begun = sequence.cached or 0
        seconds = time.prompt_s(begun, max(0, computed - begun)) + time.prompt_s(
            sequence.computed, sequence.remaining_tokens
        )
        sequence.cost_s = min(sequence.cost_s, seconds)


def prefill_rate_beside(
    running: Seq[Sequence], prefill: PrefillMeter, time: StepTime | None, max_tokens: int, slice_tokens: int
) -> ComputeRate:
    """Estimate the prefill rate of a sequence whose turn it is, beside those that decode."""
    decoding = [s for s in running if s.remaining_tokens == 1]
    left = max(1, max_tokens - len(decoding))
    share = min(left / max_tokens, _prompt_share(decoding, prefill, time, left, slice_tokens))
    rate = prefill.compute_rate(share=share, slice_tokens=min(slice_tokens, max_tokens))
    return replace(rate, others=_benefit_to_others(decoding))


def prefill_rate_behind(
    running: Seq[Sequence],
    chooser: Sequence | None,
    prefill: PrefillMeter,
    time: StepTime | None,
    loader: PrefixLoader | None,
    max_tokens: int,
    slice_tokens: int,
) -> ComputeRate:
    """Estimate the prefill rate of a newcomer, or of the running `chooser`. Its turn comes after the prompts being
    prefilled. Each step gives a token to every sequence that decodes, and sequences that compute beside their loads go
    on. Counting more would make a request wait longer for its load than for computing."""
    busy = [s for s in running if s.pages.load is None and s is not chooser]
    ahead = sum(s.remaining_tokens for s in busy if s.remaining_tokens > 1)
    decoding = [s for s in busy if s.remaining_tokens == 1]
    share = max(1, max_tokens - len(busy)) / max_tokens
    share = min(share, _prompt_share(decoding, prefill, time, max(1, max_tokens - len(decoding)), slice_tokens))
    share /= 1 + sum(loader is not None and loader.is_split(s.pages) for s in running)
    rate = prefill.compute_rate(share=share, slice_tokens=slice_tokens)
    return replace(rate, delay_s=rate.shared_seconds(0, ahead), others=_benefit_to_others(decoding))


def _benefit_to_others(decoding: Seq[Sequence]) -> float:
    """Return `ComputeRate.others`: sequences that decode wait for the prompts in each of their steps."""
    each, most = OTHERS
    return min(most, each * len(decoding))


def _prompt_share(
    decoding: Seq[Sequence], prefill: PrefillMeter, time: StepTime | None, left: int, slice_tokens: int
) -> float:
    """Return the share of the device's time that prompts get, in steps with `left` tokens for them, beside sequences
    that decode. The meter knows only steps that prompts fill."""
    if time is None or not decoding:
        return 1.0
    load, budget = StepLoad(len(decoding), sum(s.computed for s in decoding)), Budget(left)
    budget.set_time(time, load, max(1, slice_tokens // LEAST))
    tokens = budget.fit_tokens(0, left)
    return min(1.0, prefill.compute_rate().seconds_alone(0, tokens) / time.step_s(load.with_prompt(0, tokens)))
