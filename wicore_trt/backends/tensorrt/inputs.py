"""The step inputs of a plan for one part of a step, as numpy arrays.

Knows the names and shapes of `backends.tensorrt.plan_io`; neither torch nor TensorRT. Invariant: a slot without work
writes to its scratch entry and nowhere else, and its row sees values that are finite.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from wicore_trt.backends.tensorrt import plan_io
from wicore_trt.backends.tensorrt.plan_io import PREFILL
from wicore_trt.backends.tensorrt.slots import GroupSlots, Part


def decode_slots(highest_slot: int, slots: int) -> int:
    """Slots that a decode step runs so that `highest_slot` is among them: a power of two, or all of them. So few shapes
    occur that each can keep an execution context, and a CUDA graph, of its own."""
    return min(slots, 1 << highest_slot.bit_length())


def part_batch(part: Part, slots: int) -> int:
    """B of a part: 1 for prefill."""
    return 1 if part.phase == PREFILL else decode_slots(max(row.slot for row in part.rows), slots)


def step_inputs(part: Part, batch: int, groups: Mapping[str, GroupSlots]) -> dict[str, np.ndarray]:
    """All inputs of kind "step", int32. Logits row b is that after slot b's last token; prefill has row 0 alone.

    An idle slot has token 0 at position 0. Its global row sees entry 0 alone, because a row costs as much as it sees;
    its local row sees the window that ends at the scratch entry.
    """
    tokens = len(part.rows[0].token_ids)
    assert all(len(row.token_ids) == tokens for row in part.rows)
    ids, positions = np.zeros((batch, tokens), np.int32), np.zeros((batch, tokens), np.int32)
    first: dict[str, np.ndarray] = {}
    lengths: dict[str, np.ndarray] = {}
    for name, group in groups.items():
        first[name] = np.full(batch, group.usable, np.int32)
        lengths[name] = np.full(batch, 1 if group.window is None else group.usable + 1, np.int32)
    for row in part.rows:
        b = 0 if part.phase == PREFILL else row.slot
        ids[b] = row.token_ids
        positions[b] = np.arange(row.position, row.position + tokens)
        for name, entry in row.entries.items():
            first[name][b], lengths[name][b] = entry, entry + tokens
    arrays: dict[str, np.ndarray] = {plan_io.TOKEN_IDS: ids, plan_io.POSITIONS: positions}
    arrays[plan_io.SAMPLE_ROWS] = np.arange(tokens - 1, batch * tokens, tokens, dtype=np.int32)
    for name in groups:
        arrays[plan_io.write_indices(name)], arrays[plan_io.kv_lengths(name)] = first[name], lengths[name]
    return arrays
