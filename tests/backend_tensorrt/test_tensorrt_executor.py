"""TensorRTExecutor on the fake TensorRT against TorchExecutor: the same pages in, the same tokens and logits out."""

from __future__ import annotations

import random
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_tensorrt.tensorrt_engines import LIMITS, executor_of, fake_engine
from backend_tensorrt.tensorrt_fakes import FakeDevice, fake_tensorrt
from parity.paged import GREEDY, PagedDriver, PagedSequence, relative_error
from parity.tiny import TinyModel, cast, tiny_model

from wicore_trt.backends.tensorrt.plan_io import PlanLimits
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.checkpoint.names import kv_scale_name
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.batch import SequenceSlice, StepBatch, StepResult
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.runtime.sampler import Sampler

PAGES = {GLOBAL: 120, LOCAL: 120}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Twins:
    """Both executors behind drivers, and a schedule that runs on both. Page tables differ; contents must not."""

    def __init__(
        self,
        path: Path,
        model: TinyModel,
        *,
        dtype: str = "float32",
        kv_dtype: str | None = None,
        fp8_weights: bool = False,
    ) -> None:
        self.spec = model.spec
        tensors = cast(model.spec, model.tensors, torch.float8_e4m3fn if fp8_weights else DTYPES[dtype])
        if kv_dtype == "fp8":
            for layer in range(0, self.spec.num_layers, 2):
                tensors[kv_scale_name(layer)] = torch.tensor([0.01 + 0.02 * layer])
        engine = fake_engine(path / "engine", self.spec, tensors, dtype=dtype, kv_dtype=kv_dtype)
        settings = ExecutorOptions(device="cpu", kernels="torch", page_tokens=8, kv_pages=PAGES)
        self.trt = executor_of(engine, kv_pages=PAGES, max_batch_tokens=512)
        self.torch = TorchExecutor.from_tensors(self.spec, dtype, tensors, settings, kv_dtype=kv_dtype)
        self.drivers = [PagedDriver(self.trt, 1), PagedDriver(self.torch, 2)]  # type: ignore[arg-type]

    def new(self) -> list[PagedSequence]:
        return [driver.new_sequence() for driver in self.drivers]

    def step(self, work: list[tuple[list[PagedSequence], list[int]]]) -> list[torch.Tensor]:
        return [d.step([(pair[i], ids) for pair, ids in work]) for i, d in enumerate(self.drivers)]

    def finish(self, pair: list[PagedSequence], *, release: bool = True) -> None:
        for driver, sequence in zip(self.drivers, pair, strict=True):
            driver.finish(sequence)
            if release:
                driver.executor.release(sequence.seq_id)

    def moved(self, pair: list[PagedSequence], length: int, *, same_id: bool) -> list[PagedSequence]:
        """Sequences that begin with the first `length` tokens of `pair`, in pages of their own, as after a prefix hit
        or a return from preemption. Local pages before the window are not there."""
        out = []
        for driver, old in zip(self.drivers, pair, strict=True):
            new = driver.new_sequence()
            new.seq_id = old.seq_id if same_id else new.seq_id
            new.token_ids = old.token_ids[:length]
            size = driver.executor.layout.page_tokens
            for group, free in driver._free.items():
                first = max(0, length - self.spec.sliding_window + 1) // size if group == LOCAL else 0
                for j in range(-(-length // size)):
                    new.pages[group].append(free.pop() if j >= first else -1)
                    if j >= first:
                        pool = driver.executor.pools[group]
                        pool.view(torch.uint8)[new.pages[group][j]] = pool.view(torch.uint8)[old.pages[group][j]]
            out.append(new)
        return out


def random_run(twins: Twins, rng: random.Random, steps: int) -> tuple[list[float], int]:
    """Random steps; each one's relative error of logits, and how many greedy tokens differed."""
    alive: list[list[PagedSequence]] = []
    errors, differed, vocab = [], 0, twins.spec.vocab_size
    for _ in range(steps):
        event = rng.random()
        if alive and event < 0.1:
            twins.finish(alive.pop(rng.randrange(len(alive))), release=rng.random() < 0.7)
        elif alive and event < 0.2:
            pair = rng.choice(alive)
            length = len(pair[0].token_ids)
            fork = twins.moved(pair, length, same_id=event < 0.15)
            if event < 0.15:  # preempted, and back in other pages
                twins.finish(pair, release=rng.random() < 0.5)
                alive.remove(pair)
            alive.append(fork)
        while len(alive) > 6:
            twins.finish(alive.pop(0))
        while len(alive) < rng.randint(1, 5):
            alive.append(twins.new())
        members = rng.sample(alive, rng.randint(1, len(alive)))
        sizes = [rng.choice((1, 1, 1, rng.randint(1, 30))) for _ in members]
        work = [
            (pair, [rng.randrange(vocab) for _ in range(n)])
            for pair, n in zip(members, sizes, strict=True)
            if len(pair[0].token_ids) + n < 100
        ]
        if not work:
            twins.finish(alive.pop())
            continue
        got, want = twins.step(work)
        errors += [relative_error(g, w) for g, w in zip(got, want, strict=True)]
        differed += int((got.argmax(1) != want.argmax(1)).sum())
    return errors, differed


@pytest.mark.parametrize(
    ("window", "layers"),
    [(5, 3), (9, 2), *(pytest.param(window, 3, marks=pytest.mark.long) for window in (16, 33))],
)
def test_random_schedules_give_the_tokens_of_the_torch_executor(window: int, layers: int, tmp_path: Path) -> None:
    """Chunks, decode, more sequences than slots, preemption, pages that move, prefix hits, releases. Of three layers
    the last is global; two are both local."""
    overrides: dict[str, Any] = {"sliding_window": window, "num_hidden_layers": layers, "sliding_window_pattern": 3}
    twins = Twins(tmp_path, tiny_model(random.randrange(1 << 30), **overrides))
    errors, differed = random_run(twins, random.Random(random.random()), 40)
    assert max(errors) < 2e-5 and differed == 0


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "bound"),
    [
        ("bfloat16", None, 0.02),
        pytest.param("float16", "fp8", 0.01, marks=pytest.mark.long),
        ("float32", "fp8", 1e-4),
    ],
)
def test_rounded_engines_stay_near(dtype: str, kv_dtype: str | None, bound: float, tmp_path: Path) -> None:
    """The median, because a value that falls between two of E4M3 may go either way, and then far."""
    model = tiny_model(random.randrange(1 << 30), num_hidden_layers=3, sliding_window_pattern=3, sliding_window=16)
    errors, _ = random_run(Twins(tmp_path, model, dtype=dtype, kv_dtype=kv_dtype), random.Random(5), 25)
    assert statistics.median(errors) < bound and max(errors) < 0.5


def test_an_engine_with_fp8_weights(tmp_path: Path) -> None:
    model = tiny_model(random.randrange(1 << 30), num_hidden_layers=3, sliding_window_pattern=3, sliding_window=16)
    errors, _ = random_run(Twins(tmp_path, model, dtype="bfloat16", fp8_weights=True), random.Random(5), 20)
    assert statistics.median(errors) < 0.05 and max(errors) < 0.5


@pytest.mark.long
def test_a_window_that_slides_several_times(tmp_path: Path) -> None:
    model = tiny_model(6, sliding_window=5, num_hidden_layers=3, sliding_window_pattern=3)
    assert LIMITS.entries(model.spec, LOCAL) == 64, "the cache must be much shorter than the sequence"
    twins = Twins(tmp_path, model)
    pairs = [twins.new(), twins.new()]
    twins.step([(pairs[0], [3] * 11), (pairs[1], [4] * 29)])
    for token in range(190):
        got, want = twins.step([(pair, [token % 90]) for pair in pairs[: 1 + token % 2]])
        assert relative_error(got, want) < 2e-5


def test_a_sequence_that_reads_unwritten_pages_fails_alone_and_leaves_nothing_behind(tmp_path: Path) -> None:
    """Pools begin as NaN. The fake multiplies hidden entries by 0, so NaN left in a slot would spoil the next one."""
    model = tiny_model(21)
    executor = executor_of(fake_engine(tmp_path / "e", model.spec, model.tensors, limits=PlanLimits(2, 8, 64)))
    seen: list[torch.Tensor] = []

    class Watched(Sampler):
        def sample(self, logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> StepResult:
            seen.append(logits.clone())
            return super().sample(logits, slices)

    executor._sampler = Watched()

    def piece(seq_id: int, start: int, first_page: int) -> SequenceSlice:
        pages = list(range(first_page, first_page + 4))
        return SequenceSlice(seq_id, [5, 6], start, {GLOBAL: pages, LOCAL: pages}, True, GREEDY)

    result = executor.execute(StepBatch([piece(1, 9, 0), piece(2, 0, 10)]))
    assert set(result.failed) == {1} and [t.seq_id for t in result.sampled] == [2]
    executor.release(1)
    after = executor.execute(StepBatch([piece(3, 0, 20)]))
    assert [t.seq_id for t in after.sampled] == [3] and not after.failed
    for logits in (seen[0][1], seen[1][0]):  # beside the other and alone, where sums may have another order
        assert relative_error(logits, model.hf_logits([5, 6])[-1]) < 1e-4


def test_a_released_sequence_is_read_from_its_pages_again(tmp_path: Path) -> None:
    """The same id, position and pages, but what the pages hold has changed."""
    model = tiny_model(21)
    executor = executor_of(fake_engine(tmp_path / "e", model.spec, model.tensors))
    driver = PagedDriver(executor)  # type: ignore[arg-type]
    sequence = driver.new_sequence()
    driver.step([(sequence, [5, 6, 7])])
    for group, pool in executor.pools.items():
        pool[sequence.pages[group]] = torch.nan
    assert driver.step([(sequence, [5])]).isfinite().all(), "a sequence in its slot does not read pages"
    executor.release(sequence.seq_id)
    assert not driver.step([(sequence, [5])]).isfinite().all()


def test_results_are_in_the_order_of_the_sampling_slices(tmp_path: Path) -> None:
    model = tiny_model(21)
    executor = executor_of(fake_engine(tmp_path / "e", model.spec, model.tensors), max_batch_tokens=64)
    prompts = {7: [5, 6, 7, 8], 3: [9], 5: [11, 12, 13], 9: [4]}
    slices = [
        SequenceSlice(i, ids, 0, {g: [4 * n, 4 * n + 1] for g in PAGES}, i != 3, GREEDY)
        for n, (i, ids) in enumerate(prompts.items())
    ]
    result = executor.execute(StepBatch(slices))
    expected = [(i, int(model.hf_logits(prompts[i])[-1].argmax())) for i in (7, 5, 9)]
    assert [(t.seq_id, t.token_ids[0]) for t in result.sampled] == expected
    assert executor.execute(StepBatch([])).sampled == []


def test_full_tensorrt_replays_one_graph_per_number_of_slots(tmp_path: Path) -> None:
    model, device = tiny_model(8), FakeDevice()
    engine = fake_engine(tmp_path / "e", model.spec, model.tensors, compiled={"flavour": "tensorrt"})
    trt = fake_tensorrt(device, rtx=False)
    driver = PagedDriver(executor_of(engine, device, trt))  # type: ignore[arg-type]
    pairs = [driver.new_sequence() for _ in range(3)]
    for count in (1, 2, 3, 3, 1, 2, 1):
        ids = [s.token_ids + [9] for s in pairs[:count]]
        got = driver.step([(s, [9]) for s in pairs[:count]])
        for row, tokens in zip(got, ids, strict=True):
            assert relative_error(row, model.hf_logits(tokens)[-1]) < 1e-4
    assert (device.captured, device.replayed) == (3, 7), "1, 2 and 3 slots, captured before the first request"


def test_rtx_captures_decode_alone_and_keeps_what_it_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    model, kept = tiny_model(8), []
    engine = fake_engine(tmp_path / "e", model.spec, model.tensors)
    for _ in range(2):
        device = FakeDevice()
        trt = fake_tensorrt(device)
        executor = executor_of(engine, device, trt)
        driver = PagedDriver(executor)  # type: ignore[arg-type]
        driver.step([(driver.new_sequence(), [1, 2, 3])])
        driver.step([(driver.new_sequence(), [1])])
        graphs = {e.plan["phase"]: [context.graphs for context in e.contexts] for e in trt.engines}
        assert graphs == {"prefill": [False], "decode": [True] * 3} and device.captured == 0
        kept.append([cache.kept for cache in trt.caches])
        executor.close()
        executor.close()
        with pytest.raises(AssertionError, match="after close"):
            executor.execute(StepBatch([]))
    assert kept == [[0, 0], [1, 1]], "one cache per plan, read again at the next start"
    for file in (tmp_path / "cache" / "wicore").iterdir():
        file.write_bytes(b"damaged")
    executor_of(engine).close()
