"""Numbers of KV pages of each layer group within a memory budget: plain arithmetic, no torch.

Must not know devices or running sequences. Invariant: pools fit the budget and hold one sequence of the longest length.
"""

from __future__ import annotations

from dataclasses import dataclass

from wicore_trt.arithmetic import count_lone_pages, div_ceil, least_slabs, pages_per_slab
from wicore_trt.errors import ConfigError
from wicore_trt.model.spec import GLOBAL, GROUPS, LOCAL, Gemma3Spec

TYPICAL_WINDOWS = 4


@dataclass(frozen=True, slots=True)
class SharedPages:
    """Memory shared by both layer groups: pages of each group if it had all, and pages of each in a slab."""

    num_pages: dict[str, int]
    slab_pages: dict[str, int]


def pages_per_sequence(spec: Gemma3Spec, group: str, page_tokens: int, tokens: int) -> int:
    """Count pages of `group` that a sequence holds between two steps. A window touches one page more than it fills."""
    pages, window = div_ceil(tokens, page_tokens), spec.layer_group(group).window
    return min(pages, div_ceil(window, page_tokens) + 1) if window else pages


def shared_pages(
    spec: Gemma3Spec,
    page_tokens: int,
    kv_bytes_per_elem: int,
    budget_bytes: int,
    max_context: int,
    *,
    max_batch_tokens: int,
    loads: bool = False,
) -> SharedPages | None:
    """Share at most `budget_bytes` between both layer groups. `loads` as in `pool_sizes`. Returns None for a model with
    one group, and where too few slabs fit for a sequence of `max_context` tokens: then `pool_sizes` is better."""
    page_bytes = {g: spec.page_bytes(g, page_tokens, kv_bytes_per_elem) for g in spec.groups}
    if len(page_bytes) == 1:
        return None
    slab_pages = pages_per_slab(page_bytes)
    count = budget_bytes // (slab_pages[GLOBAL] * page_bytes[GLOBAL])
    tokens = spec.layer_group(LOCAL).window
    whole, local, window = count_lone_pages(max_context, tokens, max_batch_tokens, page_tokens, loads=loads)
    if count < least_slabs((whole, slab_pages[GLOBAL]), (local, slab_pages[LOCAL]), window):
        return None
    return SharedPages({group: count * pages for group, pages in slab_pages.items()}, slab_pages)


def pool_sizes(
    spec: Gemma3Spec,
    page_tokens: int,
    kv_bytes_per_elem: int,
    budget_bytes: int,
    max_context: int,
    *,
    max_batch_tokens: int,
    max_sequences: int,
    loads: bool = False,
) -> dict[str, int]:
    """Count pages per layer group of `spec` within `budget_bytes`, each group in memory of its own.

    `loads`: lower tiers exist, so a sequence may hold its own window and that of a prefix being loaded. Most sequences
    are far shorter than the longest one, and a short one needs as many local pages as a long one. So the local pool
    gets two parts: windows of as many sequences of TYPICAL_WINDOWS windows as fit, at most `max_sequences`, and the
    tokens of one step, whose pages stay until it ends. The global pool gets the rest, at least one sequence of
    `max_context` tokens. Raises ConfigError when that one does not fit."""
    groups = spec.groups
    page_bytes = {g: spec.page_bytes(g, page_tokens, kv_bytes_per_elem) for g in groups}
    if len(groups) == 1:
        page_bytes = {g: page_bytes.get(g, 0) for g in GROUPS}
    whole = div_ceil(max_context, page_tokens)
    window = pages_per_sequence(spec, LOCAL, page_tokens, max_context)
    # a step's chunk needs local pages beyond the windows, but never more than a whole sequence in all
    spare = min(div_ceil(max_batch_tokens, page_tokens), whole - window) + window * loads
    smallest = whole * page_bytes[GLOBAL] + (window + spare) * page_bytes[LOCAL]
    if budget_bytes < smallest:
        raise ConfigError(
            f"{budget_bytes:,} bytes of KV cache do not hold one sequence of {max_context} tokens, "
            f"which takes {smallest:,}.",
            fix="Raise kv.device_bytes or lower scheduler.max_context.",
        )
    if len(groups) == 1:
        return {groups[0]: budget_bytes // page_bytes[groups[0]]}
    typical = min(whole, TYPICAL_WINDOWS * window)
    # a newcomer is admitted while there is a page more for each sequence that runs
    each = (typical + 1) * page_bytes[GLOBAL] + (window + 1) * page_bytes[LOCAL]
    count = max(1, min(max_sequences, (budget_bytes - spare * page_bytes[LOCAL]) // each))
    rest = budget_bytes - (count * (window + (count > 1)) + spare) * page_bytes[LOCAL]
    global_pages = max(whole, rest // page_bytes[GLOBAL])
    return {GLOBAL: global_pages, LOCAL: (budget_bytes - global_pages * page_bytes[GLOBAL]) // page_bytes[LOCAL]}
