"""Python's cyclic garbage collector where very many objects are made that stay, or go without its help.

Each collection on the way walks what was made and frees nothing. It must not know what is made. Invariant: behind
`collection_paused` collection is on exactly where it was on before.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

RARELY = (50_000, 20, 20)
"""For gc.set_threshold: objects made since, and collections of the generation below. With Python's own (700, 10, 10) a
fifth of the time of looking up, loading and evicting pages goes into collections that free nothing."""


def collect_rarely() -> None:
    """Freeze what a process has loaded, so that no collection looks at it again, and collect rarely from then on."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*RARELY)


@contextmanager
def collection_paused() -> Iterator[None]:
    """Process-wide, so only where no other thread makes much garbage meanwhile, as at start-up."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
