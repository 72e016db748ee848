"""Attention mass of pages between two requests, for the `a2cr` policy.

Executors measure it on sampled steps of running sequences; policies want it when the next request looks a chain up. It
must not know tiers or how mass is measured. Invariant: at most `limit` keys are remembered, the longest unmeasured go.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

from wicore_trt.kv.policy.policy import NEUTRAL_SIGNAL


class AttentionSignals:
    """Running mean per page key of its attention mass relative to an average page (1.0)."""

    def __init__(self, limit: int = 1 << 18) -> None:
        self._limit = limit
        self._mass: OrderedDict[bytes, float] = OrderedDict()

    def measured(self, keys: Sequence[bytes], mass: Sequence[float]) -> None:
        """One measurement of a sequence whose first pages are `keys`; a partly filled last page has no key."""
        for key, value in zip(keys, mass, strict=False):
            old = self._mass.pop(key, None)
            self._mass[key] = value if old is None else 0.5 * (old + value)
        while len(self._mass) > self._limit:
            self._mass.popitem(last=False)

    def take(self, keys: Sequence[bytes]) -> list[float] | None:
        """The signal for `EvictionPolicy.touch`, and forget it; None when none of the pages was measured."""
        if not any(key in self._mass for key in keys):
            return None
        return [self._mass.pop(key, NEUTRAL_SIGNAL) for key in keys]
