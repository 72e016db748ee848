"""What a step that has ended did for its sequences: tokens that are computed, and the pages that hold them.

It must not know what was sampled. Invariant: `Sequence.computed` tokens are in the cache's books, and no others.
"""

from __future__ import annotations

from wicore_trt.kv.manager import KVCacheManager
from wicore_trt.schedule.sequence import Sequence


def computed(manager: KVCacheManager, sequence: Sequence, count: int, *, finite: bool) -> None:
    """Record that a step computed `count` more tokens of a running sequence; `finite`: it had logits, and they were
    finite. Raises UnwrittenPageError when the tokens before them are in no page."""
    begin, sequence.ran = sequence.computed, sequence.ran + 1
    sequence.computed = end = begin + count
    manager.commit(sequence.pages, sequence.tokens, begin, end, sequence.seq_id, finite=finite)


def decoded(manager: KVCacheManager, sequence: Sequence) -> bool:
    """`computed` of one token with finite logits, where nearly nothing is to be done. False where `computed` is to be
    called."""
    if not manager.commit_token(sequence.pages, sequence.computed):
        return False
    sequence.computed += 1
    sequence.ran += 1
    return True
