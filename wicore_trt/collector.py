"""Python's cyclic garbage collector, kept from running in vain over many long-lived objects.

It must not know what is made. Invariant: after `collection_paused`, collection is on exactly if it was on before.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = (50_000, 20, 20)
"""Thresholds of gc.set_threshold: objects made since, and collections of the generation below. With Python's own (700,
10, 10) a fifth of the time of looking up, loading and evicting pages goes into collections that free nothing."""


def collect_rarely() -> None:
    """Freeze what a process has loaded, so that no collection walks it again, and collect rarely from then on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Pause collection process-wide: use it only while no other thread makes much garbage, as at start-up."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
