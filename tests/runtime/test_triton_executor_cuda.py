"""TritonExecutor on a GPU: pools from free memory, rows drawn on the device, copies of pages between steps.

pytest -q -s tests/runtime/test_triton_executor_cuda.py
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")
if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)

from benchmarks.gpu import step_check as small  # noqa: E402
from benchmarks.gpu.step_check import place_constants  # noqa: E402
from benchmarks.gpu.step_overlap import graph_problems  # noqa: E402
from wicore_trt.backends.torch.weights import fuse_weights  # noqa: E402
from wicore_trt.backends.triton.compile import compile_table  # noqa: E402
from wicore_trt.backends.triton.executor import (  # noqa: E402
    Loading,
    TritonExecutor,
)
from wicore_trt.kv.disk.files import aligned_buffer  # noqa: E402
from wicore_trt.model.spec import GROUPS  # noqa: E402
from wicore_trt.runtime.batch import SequenceSlice, StepBatch  # noqa: E402
from wicore_trt.runtime.cuda_device import CudaDevice  # noqa: E402
from wicore_trt.runtime.options import ExecutorOptions  # noqa: E402
from wicore_trt.runtime.sampler import Sampler  # noqa: E402
from wicore_trt.types import SamplingParams  # noqa: E402

CASE = small.CASES[0]
FRACTION = 0.3
ROWS = 8
PARAMS = [
    SamplingParams(temperature=0.0),
    SamplingParams(),
    SamplingParams(temperature=0.7, top_k=64, top_p=0.95),
    SamplingParams(temperature=30.0, top_p=0.99),
    SamplingParams(temperature=2.0, min_p=0.01),
    SamplingParams(top_k=3000),
    SamplingParams(temperature=0.9, repetition_penalty=1.2),
    SamplingParams(logprobs=5),
]


@pytest.fixture(scope="module")
def executor() -> Iterator[TritonExecutor]:
    """Its pools take FRACTION of the GPU, everything else included."""
    shape = small.case_shape(CASE)
    device = CudaDevice()
    table = compile_table(shape, device.target)
    weights, _ = small._weights(shape.spec, CASE)
    settings = ExecutorOptions(
        page_tokens=small.PAGE_TOKENS, kv_bytes=None, kv_fraction=FRACTION, max_batch_tokens=320, max_sequences=ROWS
    )
    constants = lambda positions: place_constants(fuse_weights(weights, shape.spec), shape, positions, device)  # noqa: E731
    begun = time.perf_counter()
    found = TritonExecutor(Loading(shape, table, 512, constants), settings, device)
    print(f"\nopened in {time.perf_counter() - begun:.2f} s, pages {found.layout.num_pages}")
    yield found
    found.close()


def piece(seq_id: int, tokens: list[int], start: int, params: SamplingParams, **more: Any) -> SequenceSlice:
    pages = dict.fromkeys(GROUPS, list(range(8 * seq_id, 8 * seq_id + 8)))
    values = {"earlier_ids": [1] * start, "prompt_len": 0, "seed": random.getrandbits(64), **more}
    return SequenceSlice(seq_id, tokens, start, pages, True, params, **values)


def test_pools_leave_what_they_should(executor: TritonExecutor) -> None:
    """Also after steps of all kinds. Prints how far the allocator grew."""
    free, total = torch.cuda.mem_get_info()
    reserved = torch.cuda.memory_reserved()
    assert abs(free - (1 - FRACTION) * total) < 600 << 20, f"{free:,} of {total:,} are free"
    vocab = executor.spec.vocab_size
    for length in (1, 17, 40):
        batch = [piece(r, [random.randrange(vocab) for _ in range(length)], 0, p) for r, p in enumerate(PARAMS)]
        executor.execute(StepBatch(batch, measure_attention=length == 17))
    torch.cuda.synchronize()
    print(f"\nfree {free:,} of {total:,}; the allocator grew by {torch.cuda.memory_reserved() - reserved:,}")
    assert torch.cuda.mem_get_info()[0] >= (1 - FRACTION) * total - (600 << 20)


@pytest.mark.parametrize("length", [1, 9])
def test_draws_are_the_samplers(executor: TritonExecutor, length: int) -> None:
    """In graphs and without, in any order; wide filters included."""
    vocab, order = executor.spec.vocab_size, random.sample(range(ROWS), ROWS)
    batch = [piece(r, [random.randrange(vocab) for _ in range(length)], 0, PARAMS[r]) for r in order]
    result = executor.execute(StepBatch(batch))
    want = Sampler().sample(executor.memory.logits[:ROWS].clone(), batch)
    assert [t.seq_id for t in result.sampled] == order
    assert [t.token_ids for t in result.sampled] == [t.token_ids for t in want.sampled]


def opened(pages: int, tokens: int, rows: int) -> TritonExecutor:
    shape, device = small.case_shape(CASE), CudaDevice()
    weights, _ = small._weights(shape.spec, CASE)
    settings = ExecutorOptions(
        page_tokens=small.PAGE_TOKENS, kv_pages=dict.fromkeys(GROUPS, pages), max_batch_tokens=tokens,
        max_sequences=rows, max_context=2048,
    )  # fmt: skip
    constants = lambda positions: place_constants(fuse_weights(weights, shape.spec), shape, positions, device)  # noqa: E731
    return TritonExecutor(Loading(shape, compile_table(shape, device.target), 2048, constants), settings, device)


def test_steps_in_graphs_of_all_sizes_are_those_that_are_launched() -> None:
    """Prompts beside sequences that decode, as many tokens as a graph holds and few fewer. Prints what graphs cost."""
    rng, rows = random.Random(), 128
    begun, free = time.perf_counter(), torch.cuda.mem_get_info()[0]
    executor = opened(rows * 4 + 160, 1536, rows)
    graphs = len(executor.prompt_graphs)
    taken = (free - torch.cuda.mem_get_info()[0]) >> 20
    print(f"\nopened in {time.perf_counter() - begun:.2f} s, {graphs} graphs of prompts, {taken:,} MiB", end="")
    vocab, problems, size = executor.spec.vocab_size, [], executor.layout.page_tokens
    try:
        for graph in executor.prompt_graphs:
            singles = rng.randint(max(0, graph.decode.sequences // 2), graph.decode.sequences)
            most = graph.prefill.rows - rng.randint(0, 20)
            lengths = [rng.randint(2, max(2, most // 2))] if rng.random() < 0.3 else []
            lengths.append(max(2, most - sum(lengths)))
            slots = {group: rng.sample(range(n), n) for group, n in executor.layout.num_pages.items()}
            slices = []
            for i, length in enumerate([1] * singles + lengths):
                pages = {group: [free.pop() for _ in range(-(-length // size))] for group, free in slots.items()}
                tokens = [rng.randrange(vocab) for _ in range(length)]
                slices.append(SequenceSlice(i, tokens, 0, pages, sample=True, params=PARAMS[0]))
            problems += graph_problems(executor, slices, CASE.tolerance)
    finally:
        executor.close()
    assert not problems, problems


def test_pages_move_between_steps(executor: TritonExecutor) -> None:
    """A sequence whose pages went to the host and came back in other slots goes on as it would have."""
    size, greedy = executor.layout.page_bytes, SamplingParams(temperature=0.0, logprobs=3)
    prompt = [random.randrange(executor.spec.vocab_size) for _ in range(100)]
    executor.execute(StepBatch([piece(0, prompt, 0, greedy)]))
    following = piece(0, [7], 100, greedy)
    want = executor.execute(StepBatch([following]))
    executor.execute(StepBatch([piece(0, prompt, 0, greedy)]))
    moved: list[Any] = []
    free = min(executor.layout.num_pages.values()) - 8
    for group in GROUPS:
        for slot in range(8):
            slab = aligned_buffer(size[group])
            executor.copier.to_host(group, slot, [slab], lambda *_: moved.append(None))
            executor.execute(StepBatch([piece(5, [3], 0, greedy)]))  # steps go on meanwhile
            while len(moved) < 1:
                time.sleep(0.001)
            executor.copier.to_device(group, [free + slot], [[slab]], lambda *_: moved.append(None))
            executor.copier.flush()
            while len(moved) < 2:
                time.sleep(0.001)
            moved.clear()
    for slot in range(8):
        executor.execute(StepBatch([piece(slot // 8, [9] * 16, 16 * slot, greedy)]))  # overwrites where they were
    following.pages = dict.fromkeys(GROUPS, list(range(free, free + 8)))
    got = executor.execute(StepBatch([following]))
    assert got.sampled == want.sampled
