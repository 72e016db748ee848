"""How many KV pages each layer group gets from a memory budget: plain arithmetic, no torch.

It must not know devices or sequences that run. Invariant: the plan fits the budget, and the pools run out together
when all sequences are of the longest length.
"""

from __future__ import annotations

from wicore_trt.errors import ConfigError
from wicore_trt.model.spec import GROUPS, LOCAL, Gemma3Spec


def pages_per_sequence(spec: Gemma3Spec, group: str, page_tokens: int, tokens: int) -> int:
    """Pages of `group` that a sequence of `tokens` tokens holds between two steps.

    A window that is not aligned to pages touches one page more than it fills.
    """
    pages = -(-tokens // page_tokens)
    return min(pages, -(-spec.sliding_window // page_tokens) + 1) if group == LOCAL else pages


def plan_pools(
    spec: Gemma3Spec,
    page_tokens: int,
    kv_bytes_per_elem: int,
    budget_bytes: int,
    max_context: int,
    *,
    max_batch_tokens: int,
) -> dict[str, int]:
    """Pages per layer group of `spec` within `budget_bytes`.

    Both pools hold the same number of sequences of `max_context` tokens. The local pool also holds the tokens of one
    step, which keep their pages until the step is over. Raises ConfigError when one such sequence does not fit.
    """
    groups = [g for g in GROUPS if spec.layers_of(g)]
    page_bytes = {g: spec.page_bytes(g, page_tokens, kv_bytes_per_elem) for g in groups}
    whole = -(-max_context // page_tokens)
    each = {g: pages_per_sequence(spec, g, page_tokens, max_context) for g in groups}
    # a step's chunk needs local pages beyond the windows, but never more than a whole sequence in all
    spare = {g: min(-(-max_batch_tokens // page_tokens), whole - each[g]) if g == LOCAL else 0 for g in groups}
    fixed = sum(spare[g] * page_bytes[g] for g in groups)
    sequence = sum(each[g] * page_bytes[g] for g in groups)
    if budget_bytes < fixed + sequence:
        raise ConfigError(
            f"{budget_bytes:,} bytes of KV cache do not hold one sequence of {max_context} tokens, "
            f"which takes {fixed + sequence:,}.",
            fix="Raise kv.device_bytes or lower scheduler.max_context.",
        )
    # integer arithmetic: the same plan on every machine
    return {g: (budget_bytes - fixed) * each[g] // sequence + spare[g] for g in groups}
