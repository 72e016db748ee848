"""Python's cyclic garbage collector while very many objects are made at once that stay.

Each full collection on the way walks everything made so far and frees nothing: half of the time. It must not know what
is made. Invariant: afterwards collection is on exactly where it was on before.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


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
