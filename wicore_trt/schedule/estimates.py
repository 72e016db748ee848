"""Estimate how long prompts take: alone, beside running sequences, and beside a slow load from disk.

Must not decide. Invariant: a newcomer's share and delay count all that is computed before or beside it, and no more.
"""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace

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


@dataclass(frozen=True, slots=True)
class PromptEstimates:
    """Estimates of one engine from what its scheduler measures and is limited to; without `time` costs are 0."""

    manager: KVCacheManager
    loader: PrefixLoader | None
    prefill: PrefillMeter
    time: StepTime | None
    max_tokens: int
    slice_tokens: int

    def learn_step(self, load: StepLoad, slices: Seq[tuple[int, int]], seconds: float) -> None:
        """Learn from a step that computed (start, count) of each sequence; [] where all counts are one. Once LEARNT
        steps are known, prompts beside a load from disk teach only how much it slows them down."""
        loader, prefill = self.loader, self.prefill
        if slices and (loader is None or not loader.reads_disk or prefill.observed < LEARNT):
            prefill.observe_step(slices, seconds, self.slice_tokens)
        elif slices and loader and sum(n for _, n in slices if n > 1) >= DRAGGED * self.slice_tokens:
            loader.observe_step(prefill.expected_seconds(slices), seconds)
        if self.time is not None:
            self.time.observe_step(load, seconds)

    def estimate_prompt(self, sequence: Sequence) -> float:
        """Estimate the seconds that a newcomer's prompt takes without its cached part."""
        if self.time is None:
            return 0.0
        pages, total = sequence.pages, len(sequence.tokens)
        seconds = self.time.prompt_s(0, total)
        if seconds > LOOK_UP_S and not sequence.scoring:
            hit = self.manager.find_prefix(pages, sequence.tokens)
            seconds = self.time.prompt_s(hit.tokens, total - hit.tokens)
            if self.loader is not None and seconds > LOOK_UP_S:
                rate = self.prefill.compute_rate(slice_tokens=self.slice_tokens)
                chosen = self.loader.choose_load(pages, total, hit, rate)
                seconds = seconds if chosen is None else min(seconds, chosen.seconds)
        return seconds

    def raise_cost(self, sequence: Sequence) -> None:
        """Raise the cost of a sequence whose load from disk is slow: it has more to compute and comes later."""
        assert self.loader is not None
        load, cached = self.loader.find_begun(sequence.pages), sequence.cached or 0
        if load is not None and load.from_disk and self.time is not None:
            count = min(load.choice.meet, len(sequence.tokens)) - cached
            sequence.cost_s = max(sequence.cost_s, self.time.prompt_s(cached, max(0, count)))

    def lower_cost(self, sequence: Sequence, computed: int) -> None:
        """Lower the cost of a sequence after a jump from `computed`: loaded tokens cost nothing."""
        if self.time is not None:
            begun = sequence.cached or 0
            before = self.time.prompt_s(begun, max(0, computed - begun))
            after = self.time.prompt_s(sequence.computed, sequence.remaining_tokens)
            sequence.cost_s = min(sequence.cost_s, before + after)

    def rate_beside(self, running: Seq[Sequence]) -> ComputeRate:
        """Estimate the prefill rate of a sequence whose turn it is, beside those that decode."""
        decoding = [s for s in running if s.remaining_tokens == 1]
        return self._shared_rate(decoding, max(1, self.max_tokens - len(decoding)) / self.max_tokens)

    def rate_behind(self, running: Seq[Sequence], chooser: Sequence | None = None) -> ComputeRate:
        """Estimate the prefill rate of a newcomer, or of the running `chooser`. Its turn comes after the prompts being
        prefilled. Each step gives a token to every sequence that decodes, and sequences that compute beside their loads
        go on. Counting more would make a request wait longer for its load than for computing."""
        busy = [s for s in running if s.pages.load is None and s is not chooser]
        ahead = sum(s.remaining_tokens for s in busy if s.remaining_tokens > 1)
        loads = [self.loader.find_begun(s.pages) for s in running] if self.loader is not None else []
        splits = sum(load is not None and load.choice.decision == "split" for load in loads)
        decoding = [s for s in busy if s.remaining_tokens == 1]
        rate = self._shared_rate(decoding, max(1, self.max_tokens - len(busy)) / self.max_tokens, 1 + splits)
        return replace(rate, delay_s=rate.shared_seconds(0, ahead))

    def _shared_rate(self, decoding: Seq[Sequence], share: float, prompts: int = 1) -> ComputeRate:
        """Return the rate of one of `prompts` beside sequences that decode, whose tokens leave a step's `share`. What
        time leaves may be less, which the meter does not know: it learns from steps that prompts fill."""
        if self.time is not None and decoding:
            left = max(1, self.max_tokens - len(decoding))
            load, budget = StepLoad(len(decoding), sum(s.computed for s in decoding)), Budget(left)
            budget.set_time(self.time, load, max(1, self.slice_tokens // LEAST))
            tokens = budget.fit_tokens(0, left)
            alone = self.prefill.compute_rate().seconds_alone(0, tokens)
            share = min(share, alone / self.time.step_s(load.with_prompt(0, tokens)))
        each, most = OTHERS
        rate = self.prefill.compute_rate(share=share / prompts, slice_tokens=min(self.slice_tokens, self.max_tokens))
        return replace(rate, others=min(most, each * len(decoding)))
