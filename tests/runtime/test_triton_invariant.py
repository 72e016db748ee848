"""Batch-invariant mode of the triton backend: a sequence's logits are the same bits in any company and any chunks.

Invariants: I21.
"""

from __future__ import annotations

import torch
from runtime.triton_cpu import Driver, executor_of, small_model


def logits_of(executor, prompt: list[int], chunks: list[int], others: list[list[int]], seed: int) -> list[torch.Tensor]:
    """Logits after the prompt, cut into `chunks`, and after a decoded token, while `others` come
    along with a token or a chunk per step."""
    driver = Driver(executor, seed)
    mine, company = driver.new_sequence(), [driver.new_sequence() for _ in others]
    rest, kept = [list(o) for o in others], []
    for count in [*chunks, 1]:
        at = len(mine.token_ids)
        work = [(mine, [*prompt, 7][at : at + count])]
        for number, sequence in enumerate(company):
            size = 1 + number * 3
            if rest[number]:
                work.insert(number % 2, (sequence, rest[number][:size]))
                rest[number] = rest[number][size:]
        logits = driver.step(work)
        row = next(i for i, (sequence, _) in enumerate(work) if sequence is mine)
        if at + count >= len(prompt):
            kept.append(logits[row].clone())
    for sequence in (mine, *company):
        driver.finish(sequence)
    return kept


def test_logits_do_not_depend_on_company_nor_on_single_tokens_of_a_prompt() -> None:
    model = small_model(21)
    executor = executor_of(model, batch_invariant=True)
    prompt = [5, 40, 3, 17]
    alone = logits_of(executor, prompt, [4], [], 1)
    assert len(alone) == 2 and torch.stack(alone).isfinite().all()
    together = logits_of(executor, prompt, [3, 1], [[3] * 3, [8] * 9], 2)
    assert torch.equal(torch.stack(together), torch.stack(alone))
    assert not any(name.startswith("split_decode") for name in executor.model.launcher.launched)
