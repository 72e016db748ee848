"""Prefixes of sequences that wait, read from disk to host memory meanwhile.

It must not know steps or budgets. Invariant: what a sequence will need is asked for at most once, and only when it is
known to wait: one that enters in the step after it came asks for its own pages, and reads that were asked for just
before would be ahead of those.
"""

from __future__ import annotations

from collections.abc import Callable

from wicore_trt.kv.manager import KVCacheManager
from wicore_trt.kv.prefix.loader import PrefixLoader
from wicore_trt.kv.prefix.planner import ComputeRate
from wicore_trt.schedule.sequence import Sequence, SequenceState

# Of a long queue only the first are prefetched, or their pages would drive each other out of host memory; a sequence
# behind them is prefetched when it comes first.
AHEAD = 4


class ReadAhead:
    """`rate` tells what the prefill of a newcomer gets."""

    def __init__(self, manager: KVCacheManager, loader: PrefixLoader | None, rate: Callable[[], ComputeRate]) -> None:
        self._manager, self._loader, self._rate = manager, loader, rate
        self._newcomers: list[Sequence] = []

    def came(self, sequence: Sequence, ahead: int) -> None:
        """A sequence was queued behind `ahead` others."""
        if self._loader is not None and ahead < AHEAD:
            self._newcomers.append(sequence)

    def prefetch(self, first: Sequence | None = None) -> None:
        """The newcomers that wait still go on waiting, and so does the `first` of the queue."""
        waiting, self._newcomers = [*self._newcomers, *([first] if first is not None else [])], []
        for sequence in waiting:
            if sequence.state is SequenceState.WAITING:
                self._prefetch(sequence)

    def _prefetch(self, sequence: Sequence) -> None:
        if self._loader is not None and not (sequence.prefetched or sequence.scoring) and sequence.pages.parked is None:
            sequence.prefetched = True
            hit = self._manager.lookup(sequence.pages, sequence.tokens)
            self._loader.prefetch(sequence.pages, len(sequence.tokens), hit, self._rate())
