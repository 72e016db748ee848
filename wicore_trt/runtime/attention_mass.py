"""Measures the attention that each KV page of a sequence receives, for the A2CR policy.

A probe takes queries of one global layer from a step's operators; after the step torch computes masses from them and
the keys in the pages. `plugins.kernels.page_masses` does the same on a GPU. Must not know policies or requests.
Invariant: measuring only reads, so it changes neither tokens nor KV.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from wicore_trt.arithmetic import div_ceil
from wicore_trt.model.spec import GLOBAL
from wicore_trt.runtime.batch import StepBatch
from wicore_trt.runtime.step_inputs import StepInputs

KEY_BLOCK = 1024  # keys widened to float32 at once: on a CPU they stay in its cache


@dataclass(slots=True)
class AttentionProbe:
    """Request for the last query of each slice at `layer`. `rows` int64 [S] are those queries' rows in the step. The
    operators set `queries` [S, heads, head_dim] of any float dtype and the factor `key_scale` of stored keys, both
    valid until the next step."""

    layer: int
    rows: torch.Tensor
    queries: torch.Tensor | None = None
    key_scale: float = 1.0

    def compute_masses(
        self, pool: torch.Tensor, inputs: StepInputs, batch: StepBatch, scale: float
    ) -> dict[int, list[float]]:
        """Compute by seq_id the softmax mass that the slice's last query gives to each page up to its own. Masses are
        means over heads, times the number of pages, so their mean is 1. Sequences with masses that are not finite are
        left out. `pool` is the layer's [pages, 2, page_tokens, kv_heads, head_dim], `scale` multiplies q . k."""
        assert self.queries is not None, "the operators did not pass the probed layer"
        keys, tables = pool[:, 0], inputs.page_tables[GLOBAL]
        ends = inputs.positions[self.rows] + 1
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # the operations are too small to share: many times slower on a busy machine
        try:
            found = [
                _page_masses(query, keys, table, end, scale * self.key_scale)
                for query, table, end in zip(self.queries.float(), tables, ends.tolist(), strict=True)
            ]
        finally:
            torch.set_num_threads(threads)
        flat = torch.cat(found).tolist()  # one transfer from the device
        masses, at = {}, 0
        for s, part in zip(batch.slices, found, strict=True):
            values = flat[at : at + len(part)]
            at += len(part)
            if all(value < float("inf") for value in values):
                masses[s.seq_id] = values
        return masses


def _page_masses(query: torch.Tensor, keys: torch.Tensor, table: torch.Tensor, end: int, scale: float) -> torch.Tensor:
    """Compute float32 [pages up to `end`] from a query [heads, head_dim] and keys [slots, page_tokens, kv_heads, D]."""
    size, kv_heads = keys.shape[1], keys.shape[2]
    count = div_ceil(end, size)
    pages = table[:count].long()
    assert int(pages.min()) >= 0, "a global page is absent"
    pages = pages.to(keys.device)
    grouped = query.view(kv_heads, -1, query.shape[1])  # query head h reads KV head h // (heads / kv_heads)
    step = max(1, KEY_BLOCK // size)
    scores = torch.cat(
        [
            grouped @ _select_pages(keys, pages[first : first + step]).flatten(0, 1).float().permute(1, 2, 0)
            for first in range(0, count, step)
        ],
        dim=2,
    )  # [kv_heads, repeat, count * size]
    scores[:, :, end:] = -torch.inf  # slots after the query: another sequence's leftovers, or NaN
    weights = (scores * scale).softmax(-1)
    return weights.view(-1, count, size).sum(2).mean(0) * count


def _select_pages(keys: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
    """Return keys[pages], faster, and also for E4M3, which has no index_select."""
    if keys.dtype == torch.float8_e4m3fn:
        return keys.view(torch.uint8).index_select(0, pages).view(keys.dtype)
    return keys.index_select(0, pages)
