"""Parts of ranks: over all sizes of Gemma 3 they are of one size and make up the whole; the rest is refused."""

from __future__ import annotations

from itertools import chain

import pytest

from wicore_trt.errors import CheckpointError
from wicore_trt.kv.sizing import builtin_spec
from wicore_trt.model.spec import MAX_RANKS


@pytest.mark.parametrize("size", ["270m", "1b", "4b", "12b", "27b"])
def test_parts_of_ranks_make_up_the_whole(size: str) -> None:
    spec = builtin_spec(f"gemma3-{size}")
    assert spec.shard(0, 1).spec == spec
    for ranks in (1, 2, 4):
        parts = [spec.shard(rank, ranks) for rank in range(ranks)]
        for name, whole in (("heads", spec.num_heads), ("intermediate", spec.intermediate_size),
                            ("vocabulary", spec.vocab_size)):  # fmt: skip
            spans = [getattr(part, name) for part in parts]
            assert [*chain(*spans)] == [*range(whole)] and len({len(span) for span in spans}) == 1, name
        repeat = spec.num_heads // spec.num_kv_heads
        for rank, part in enumerate(parts):
            assert (part.rank, part.ranks, part.whole) == (rank, ranks, spec)
            assert [*part.kv_heads] == sorted({head // repeat for head in part.heads})  # those that its heads read
            local = part.spec
            assert (local.num_heads, local.num_kv_heads) == (len(part.heads), len(part.kv_heads))
            assert (local.intermediate_size, local.vocab_size) == (len(part.intermediate), len(part.vocabulary))
            assert (local.hidden_size, local.layer_groups) == (spec.hidden_size, spec.layer_groups)


@pytest.mark.parametrize(
    ("size", "ranks", "message"),
    [("1b", 3, "4 attention heads"), ("270m", 8, "4 attention heads"), ("12b", 64, "16 attention heads"),
     ("27b", 3, "32 attention heads"), ("1b", 0, "at least 1"), ("1b", MAX_RANKS + 1, "at most 64")],
)  # fmt: skip
def test_what_does_not_divide_is_refused(size: str, ranks: int, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        builtin_spec(f"gemma3-{size}").shard(0, ranks)
