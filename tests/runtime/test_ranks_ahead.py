"""Ranks of the triton executor in Triton's interpreter, a process each: steps ahead, drawing alike, lost ranks."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from runtime.triton_cpu import executor_of  # noqa: E402
from runtime.triton_rank_cpu import OPENER, make_model  # noqa: E402

from wicore_trt.errors import RankError  # noqa: E402
from wicore_trt.runtime.batch import UNREAD, SequenceSlice, StepBatch  # noqa: E402
from wicore_trt.runtime.executor import AheadExecutor  # noqa: E402
from wicore_trt.runtime.options import ExecutorOptions  # noqa: E402
from wicore_trt.runtime.ranks import RankedAheadExecutor  # noqa: E402
from wicore_trt.types import SamplingParams  # noqa: E402

PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(temperature=0.8, top_k=20, top_p=0.9),
    SamplingParams(temperature=1.3, min_p=0.01),
]
HOSTS = SamplingParams(temperature=0.7, repetition_penalty=1.2)


def open_ranks(path: str = "engine") -> RankedAheadExecutor:
    options = ExecutorOptions(device="cpu", threads=1, compare_ranks=True)
    return RankedAheadExecutor(Path(path), make_model().spec, 2, OPENER, options)


def piece(seq_id: int, tokens: list[int], start: int, params: SamplingParams, **more: Any) -> SequenceSlice:
    pages = dict.fromkeys(("global", "local"), list(range(6 * seq_id, 6 * seq_id + 6)))
    values = {"prompt_len": 5, "seed": (1 << 64) - 7 - seq_id, "stamp": seq_id + 1, **more}
    return SequenceSlice(seq_id, tokens, start, pages, True, params, **values)


def run_steps(executor: AheadExecutor) -> list[list[int]]:
    """Prompts, three steps of which each but the first begins before the last one was read, and one that a host's
    parameters join."""
    rng = random.Random(3)
    prompts = [[rng.randrange(make_model().spec.vocab_size) for _ in range(5)] for _ in PARAMS]
    found = [executor.execute(StepBatch([piece(i, p, 0, PARAMS[i]) for i, p in enumerate(prompts)]))]
    ids = [list(token.token_ids) for token in found[0].sampled]
    for step in range(3):
        batch = StepBatch([piece(i, ids[i] if not step else [UNREAD], 5 + step, p) for i, p in enumerate(PARAMS)])
        executor.submit(batch)
        assert executor.leads(batch)
        if step:
            found.append(executor.collect())
    found.append(executor.collect())
    ids = [list(token.token_ids) for token in found[-1].sampled]
    last = [piece(i, ids[i], 8, p) for i, p in enumerate([HOSTS, *PARAMS[1:]])]
    last[0].earlier_ids, last[1].mask = prompts[0] + [1, 2, 3], b"\xff" * 12
    found.append(executor.execute(StepBatch(last, measure_attention=True)))
    return [[token.token_ids[0] for token in result.sampled] for result in found]


@pytest.fixture(scope="module")
def two() -> Iterator[RankedAheadExecutor]:
    executor = open_ranks()
    yield executor
    executor.close()


def test_two_ranks_choose_the_tokens_of_one(two: RankedAheadExecutor) -> None:
    """On the device greedily and by drawing, a step ahead, and by rank 0's host; no rank sees other tokens."""
    one, told = executor_of(make_model(), graphs=True), list[bytes]()
    assert isinstance(two, AheadExecutor)
    assert run_steps(two) == run_steps(one)
    assert two._group.failure is None and two.layout.page_bytes == one.layout.page_bytes

    one.on_step, enqueue = told.append, one._enqueue_step
    for step, rows in enumerate((one.memory.residual, one.memory.residual, one.memory.head_in)):

        def change(*given: Any, step: int = step, rows: torch.Tensor = rows) -> Any:
            found = enqueue(*given)
            rows.view(torch.int16)[0, 0] ^= step  # a bit
            return found

        one._enqueue_step = change  # type: ignore[method-assign]
        one.execute(StepBatch([piece(0, [3, 4, 5], 0, PARAMS[0])]))
    assert len({*told}) == 3, "of a row that differs nobody tells"


@pytest.mark.long
def test_pages_of_both_ranks_go_and_come(two: RankedAheadExecutor) -> None:
    """In batches, before the next step; a page in other slots is the page that it was."""
    copier, size = two.copier, two.layout.page_bytes
    slab, ended = copier.map_memory(8 * size["global"]), list[Any]()  # type: ignore[attr-defined]
    assert not copier.pin(slab)  # it is a CPU
    first = [
        two.execute(StepBatch([piece(0, [3, 1, 4], 0, PARAMS[0])])),
        two.execute(StepBatch([piece(0, [1], 3, PARAMS[0])])),
    ]
    for number, group in enumerate(("global", "local")):
        part = slab[number * size["global"] :][: size[group]]
        copier.to_host(group, 0, [part[:100], part[100:]], lambda digest, seconds: ended.append(digest))
    two.execute(StepBatch([piece(0, [9, 9, 9], 0, PARAMS[0])]))  # sends them, and writes the slots again
    for number, group in enumerate(("global", "local")):
        part = slab[number * size["global"] :][: size[group]]
        assert any(part)
        copier.to_device(group, [7], [[part]], lambda digests, seconds: ended.append(digests))
    copier.flush()
    end = time.monotonic() + 60
    while len(ended) < 4 and time.monotonic() < end:
        time.sleep(0.01)
    assert ended == [None, None, [None], [None]]
    again = piece(0, [1], 3, PARAMS[0], stamp=99)
    again.pages = {"global": [7], "local": [7]}
    assert two.execute(StepBatch([again])).sampled == first[1].sampled


@pytest.mark.long
@pytest.mark.parametrize("other", ["tokens", "rows"])
def test_ranks_with_other_tokens_or_rows_end_the_engine(other: str) -> None:
    executor = open_ranks(f"{other}-1")
    try:
        with pytest.raises(RankError, match="computed different rows or tokens"):
            for _ in range(5):
                executor.execute(StepBatch([piece(1, [3, 4], 0, PARAMS[1])]))
                time.sleep(0.2)
    finally:
        executor.close()


@pytest.mark.long
def test_kernels_that_wait_for_a_lost_rank_leave() -> None:
    """Long before they give up by themselves: the host says so."""
    executor = open_ranks()
    process = executor._group.processes[0]
    try:
        executor.execute(StepBatch([piece(1, [3, 4], 0, PARAMS[0])]))
        process.kill()
        begun = time.monotonic()
        with pytest.raises(RankError, match="rank 1 has ended"):
            while time.monotonic() < begun + 60:
                executor.execute(StepBatch([piece(1, [3, 4], 0, PARAMS[0])]))
        with pytest.raises(RankError):
            executor.submit(StepBatch([piece(1, [3, 4], 0, PARAMS[0])]))
        assert executor.copier.broken is not None
    finally:
        executor.close()
    assert process.returncode == -signal.SIGKILL
