"""Rows drawn on the device against the host's sampler, in Triton's interpreter, and through the executor."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from msgspec import structs

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from runtime.triton_cpu import executor_of, small_model, specs_of  # noqa: E402

from wicore_trt.backends.triton import kernel_list as triton_plan  # noqa: E402
from wicore_trt.backends.triton.roles import DRAW_WIDE, DRAWING  # noqa: E402
from wicore_trt.backends.triton.sampler import DRAWN as DRAWN_WAY  # noqa: E402
from wicore_trt.backends.triton.sampler import HOST as HOST_WAY  # noqa: E402
from wicore_trt.backends.triton.sampler import DeviceSampler  # noqa: E402
from wicore_trt.backends.triton.table import KernelTable  # noqa: E402
from wicore_trt.model.spec import GROUPS  # noqa: E402
from wicore_trt.runtime.batch import UNREAD, SequenceSlice, StepBatch  # noqa: E402
from wicore_trt.runtime.sampler import Sampler  # noqa: E402
from wicore_trt.types import SamplingParams  # noqa: E402

GREEDY = SamplingParams(temperature=0.0)
DRAWN = [
    SamplingParams(),
    SamplingParams(temperature=0.4, top_p=0.8),
    SamplingParams(temperature=1.5, top_k=7),
    SamplingParams(top_k=1 << 31, min_p=0.05),
    SamplingParams(temperature=0.9, top_k=20, top_p=0.95, min_p=0.01),
]
HOST = [
    SamplingParams(logprobs=0),
    SamplingParams(repetition_penalty=1.3),
    SamplingParams(presence_penalty=0.5),
    SamplingParams(frequency_penalty=-0.5),
    SamplingParams(logit_bias={3: 1.0}),
    SamplingParams(temperature=0.0, logprobs=2),
]


@pytest.fixture(scope="module")
def executor() -> Any:
    return executor_of(small_model(3), max_sequences=6)


def asking(seq_id: int, params: SamplingParams, **more: Any) -> SequenceSlice:
    """A first token that ends a prompt; the pages are the sequence's own."""
    values = {"prompt_len": 1, "seed": random.getrandbits(64), **more}
    return SequenceSlice(seq_id, [7 + seq_id], 0, dict.fromkeys(GROUPS, [seq_id]), True, params, **values)


def tokens(executor: Any, rows: int) -> list[int]:
    assert executor.memory.results[1, :rows].tolist() == [0] * rows
    return executor.memory.results[0, :rows].tolist()  # type: ignore[no-any-return]


def test_draws_are_the_samplers(executor: Any) -> None:
    """Greedy rows lie between; a row's token is the same alone, and where nobody has read the one before."""
    rows = [asking(r, p, prompt_len=1 - random.randrange(27)) for r, p in enumerate([GREEDY, *DRAWN])]
    random.shuffle(rows)
    logits = executor.memory.logits
    logits.copy_(torch.randn(logits.shape))
    want = [t.token_ids[0] for t in Sampler().sample(logits[:6], rows).sampled]
    drawn = {r: s for r, s in enumerate(rows) if not s.params.greedy}  # type: ignore[union-attr]
    executor.memory.results.fill_(-7)
    executor.sampler.drawing.draw_rows(6, drawn)
    assert tokens(executor, 6) == want
    unread = {r: structs.replace(s, token_ids=[UNREAD]) for r, s in drawn.items()}
    executor.sampler.drawing.draw_rows(6, unread)
    assert tokens(executor, 6) == want
    row, piece = random.choice(list(drawn.items()))
    logits[0] = logits[row].clone()
    executor.sampler.drawing.draw_rows(1, {0: piece})
    assert tokens(executor, 1) == [want[row]]


def test_parameters_of_two_steps_lie_apart(executor: Any) -> None:
    """The device may still read the first step's when the second's are written."""
    sampler = executor.sampler.drawing
    sampler.draw_rows(1, {0: asking(0, DRAWN[0])})
    first, before = sampler._staging[0], sampler._staging[0].clone()
    sampler.draw_rows(1, {0: asking(0, DRAWN[2])})
    assert torch.equal(first, before)


def test_rows_of_a_step_go_where_they_can_be_chosen(executor: Any) -> None:
    """Device and host rows in one step, in the order of the batch, one without finite logits."""
    ways = executor.sampler.choose_ways([asking(0, p) for p in (*DRAWN, *HOST)])
    assert ways == [DRAWN_WAY] * len(DRAWN) + [HOST_WAY] * len(HOST)
    assert executor.sampler.choose_ways([asking(0, GREEDY, suppress_eos=True)]) == [HOST_WAY]
    batch = [asking(r, p) for r, p in enumerate([*random.sample(DRAWN, 3), *random.sample(HOST, 2), GREEDY])]
    random.shuffle(batch)
    result = executor.execute(StepBatch(batch))
    want = Sampler().sample(executor.memory.logits[:6], batch)
    assert [t.seq_id for t in result.sampled] == [s.seq_id for s in batch]
    assert [t.token_ids for t in result.sampled] == [t.token_ids for t in want.sampled]
    assert [len(t.logprobs) for t in result.sampled] == [len(t.logprobs) for t in want.sampled]
    bad = structs.replace(batch[2], token_ids=[5], start=3, pages=dict.fromkeys(GROUPS, [20, 21]), earlier_ids=[5] * 3)
    result = executor.execute(StepBatch([batch[0], bad, batch[1]]))
    assert set(result.failed) == {bad.seq_id} and len(result.sampled) == 2


def test_filters_that_leave_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    """More than the candidates that kernels hold: all rows are decided on the device nevertheless."""
    few = partial(triton_plan.sample_specs, candidates=4)
    monkeypatch.setattr(triton_plan, "sample_specs", few)
    specs_of.cache_clear()
    executor = executor_of(small_model(3, vocab_size=400), max_sequences=4)
    specs_of.cache_clear()
    rows = [asking(r, p) for r, p in enumerate([SamplingParams(top_p=0.9), *random.sample(DRAWN, 2), GREEDY])]
    logits = executor.memory.logits
    logits.copy_(torch.randn(logits.shape) * 0.1)
    want = [t.token_ids[0] for t in Sampler().sample(logits[:4], rows).sampled]
    wide, launched = executor.model.table.role_entries(DRAW_WIDE)[0].kernel.name, executor.model.launcher.launched
    executor.sampler.drawing.draw_rows(4, {r: s for r, s in enumerate(rows) if not s.params.greedy})  # type: ignore
    assert tokens(executor, 4) == want and launched.count(wide) == 1
    executor.sampler.drawing.draw_rows(1, {0: asking(0, DRAWN[0])})
    assert launched.count(wide) == 1, "rows without filters need no such kernel"


def test_engines_without_these_kernels_draw_on_the_host(executor: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = [asking(r, p) for r, p in enumerate([*[SamplingParams(temperature=9.0)] * 3, GREEDY])]
    want = executor.execute(StepBatch(batch))
    model = executor.model
    for role in (DRAWING["draw"], DRAW_WIDE):
        old = KernelTable(model.table.target, [e for e in model.table.all_entries() if e.role != role])
        sampler = DeviceSampler(replace(model, table=old), executor.device)
        assert not sampler.available
    monkeypatch.setattr(executor.sampler, "drawing", sampler)
    assert executor.execute(StepBatch(batch)).sampled == want.sampled
