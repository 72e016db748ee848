"""What a step that has ended did for its sequences: tokens that are computed, and the pages that hold them.

It must not know what was sampled. Invariant: `Sequence.computed` tokens are in the cache's books, and no others.
"""

from __future__ import annotations

from collections.abc import Collection

from wicore_trt.kv.manager import KVCacheManager
from wicore_trt.schedule.sequence import Sequence


def computed(manager: KVCacheManager, sequence: Sequence, count: int, *, finite: bool) -> None:
    """Record that a step computed `count` more tokens of a running sequence; `finite`: it had logits, and they were
    finite. Raises UnwrittenPageError when the tokens before them are in no page."""
    begin, sequence.ran = sequence.computed, sequence.ran + 1
    sequence.computed = end = begin + count
    manager.commit(sequence.pages, sequence.tokens, begin, end, sequence.seq_id, finite=finite)


def decoded(manager: KVCacheManager, slices: Collection[tuple[Sequence, int, object]]) -> list[bool]:
    """`computed` of those of a step's slices where nearly nothing is to be done, which are nearly all: of one token,
    and with what was sampled from finite logits (else None). Whether it was done, for each."""
    rows = [(s.pages, s.computed if count == 1 and token is not None else -1) for s, count, token in slices]
    done = manager.commit_tokens(rows)
    for (sequence, _, _), recorded in zip(slices, done, strict=True):
        if recorded:
            sequence.computed += 1
            sequence.ran += 1
    return done
