"""Steps as plain data: batches that crossed to another process do the same, and results may have several tokens."""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import pytest
from constrained import constrained_core
from fakes import greedy, make_core, next_token

from wicore_trt.core.engine import EngineCore
from wicore_trt.runtime.batch import SampledTokens, StepBatch, StepResult
from wicore_trt.types import Constraint, ConstraintKind, FinishReason, GenerateRequest, SamplingParams


def run(core: EngineCore, requests: list[GenerateRequest]) -> dict[tuple[str, int], tuple[int, ...]]:
    """Tokens by sequence."""
    found: dict[tuple[str, int], tuple[int, ...]] = {}
    for request in requests:
        core.add(request)
    while core.has_work:
        for output in core.step():
            assert output.finish_reason is not FinishReason.ERROR, output.error
            name = output.request_key, output.index
            found[name] = found.get(name, ()) + output.token_ids
    return found


def requests_of(rng: random.Random) -> list[GenerateRequest]:
    stem = [rng.randrange(2, 97) for _ in range(20)]
    choices = [
        {"temperature": 0.0, "repetition_penalty": 1.5},
        {"presence_penalty": 0.5, "frequency_penalty": -0.5, "n": 2},
        {"constraint": Constraint(ConstraintKind.REGEX, "[ab]{3,30}"), "repetition_penalty": 0.7},
        {"prompt_logprobs": 1, "logprobs": 2},
        {"min_tokens": 5, "logit_bias": {7: 3.0}, "stop_token_ids": (9,)},
    ]
    return [
        GenerateRequest(
            f"r{i}",
            (*stem[: rng.randint(1, 20)], *(rng.randrange(2, 97) for _ in range(rng.randint(1, 20)))),
            SamplingParams(max_tokens=rng.randint(5, 30), seed=rng.randrange(99), **rng.choice(choices)),
        )
        for i in range(12)
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_batch_that_was_pickled_gives_the_same_tokens(seed: int) -> None:
    rng = random.Random(seed)
    requests = requests_of(rng)
    small = {"pages": {"global": 26, "local": 26}, "score_rows": 16}
    plain, copied = constrained_core(**small), constrained_core(**small)
    execute: Callable[[StepBatch], StepResult] = copied.executor.execute
    copied.executor.execute = lambda batch: pickle.loads(pickle.dumps(execute(pickle.loads(pickle.dumps(batch)))))
    assert run(plain, requests) == run(copied, requests)
    assert plain.scheduler.preemptions, "or no penalized sequence is counted anew"


@pytest.mark.parametrize("seed", range(8))
def test_a_step_may_bring_several_tokens(seed: int) -> None:
    """As from drafts that were right: they end where they would have one by one."""
    rng, core = random.Random(seed), make_core()
    execute, most = core.executor.execute, 0

    def eager(batch: StepBatch) -> StepResult:
        nonlocal most
        result = execute(batch)
        pieces = {piece.seq_id: piece for piece in batch.slices}
        for i, found in enumerate(result.sampled):
            tokens = [*core.executor.history(pieces[found.seq_id]), *found.token_ids]
            ids = found.token_ids
            for _ in range(rng.randint(0, 3)):
                tokens.append(next_token(tokens))
                ids += (tokens[-1],)
            result.sampled[i], most = SampledTokens(found.seq_id, ids), max(most, len(ids))
        return result

    core.executor.execute = eager
    prompts = {f"r{i}": [rng.randrange(2, 97) for _ in range(rng.randint(1, 30))] for i in range(10)}
    lengths = {name: rng.randint(1, 60) for name in prompts}
    params = {name: SamplingParams(temperature=0.0, max_tokens=length) for name, length in lengths.items()}
    found = run(core, [GenerateRequest(name, tuple(prompt), params[name]) for name, prompt in prompts.items()])
    assert {name: [*tokens] for (name, _), tokens in found.items()} == {
        name: greedy(prompt, lengths[name]) for name, prompt in prompts.items()
    }
    assert most == 4
