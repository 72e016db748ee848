"""What one tenant has in a tier, and in which order it loses pages at its quota.

Plain data; it must not know slots, states or other tenants. Invariant: the order follows the times at which the
tenant's pages were used or stored, and nothing else.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass, field

from wicore_trt.kv.policy.policy import LRUPolicy


class Recency(LRUPolicy):
    """One tenant's pages, least recently used or stored first: look-ups of pages that are not here do not reach it."""

    _clock_per_page = 1


@dataclass(slots=True)
class Tenant:
    """`slots` in use, keys of `spare` nodes that may leave, oldest first, and at its quota the `order` of its other
    pages."""

    slots: int = 0
    spare: OrderedDict[bytes, None] = field(default_factory=OrderedDict)
    order: Recency | None = None
