"""Long slices, whose keys are divided between two kernels: results are those of one, whatever the step holds."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from parity.paged import relative_error  # noqa: E402
from runtime.triton_cpu import Driver, executor_of, oracle_of, small_model, specs_of  # noqa: E402

from wicore_trt.backends.triton import memory as triton_memory  # noqa: E402
from wicore_trt.backends.triton import products  # noqa: E402
from wicore_trt.backends.triton import rows as triton_rows  # noqa: E402
from wicore_trt.backends.triton import segments as triton_segments  # noqa: E402
from wicore_trt.plugins.decode_layout import (  # noqa: E402
    MEASURED_PREFILL,
    MEASURED_SEGMENTS,
    SPLIT_PREFILL,
    PrefillConfig,
    Segments,
)

SMALL = Segments(32, 64, 64, 2)
SETTINGS: dict[str, Any] = {
    **{"page_tokens": 8, "kv_pages": {"global": 96, "local": 96}},
    **{"max_batch_tokens": 150, "max_sequences": 4},
}


@pytest.fixture(autouse=True)
def small_segments(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setitem(MEASURED_SEGMENTS, ("sm90", 16), SMALL)
    for size in (1, 2):
        monkeypatch.setitem(MEASURED_PREFILL, ("sm90", 16, size), ((1 << 31, PrefillConfig(32, 32)),))
    monkeypatch.setattr(triton_memory, "KEPT_TOKENS", 8)  # steps of graphs are smaller than those with segments
    specs_of.cache_clear()
    yield
    specs_of.cache_clear()


def segmented(model: Any, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> Driver:
    """An executor that is ready for segments, whose launcher finds what the library allocates."""
    driver, full = Driver(executor_of(model, **settings), 1), products.full_attention
    triton = driver.executor.model

    def found(*args: Any) -> Any:
        results = tuple(x.contiguous() for x in full(*args))
        triton.launcher.more += results
        return results

    monkeypatch.setattr(products, "full_attention", found)
    triton.segments.check_library(driver.executor.memory.q)
    return driver


def parts_launched(driver: Driver) -> tuple[int, int]:
    """How often segments were gathered, and results added."""
    names = driver.executor.model.launcher.launched
    return tuple(sum(name.startswith(part) for name in names) for part in ("gather_", "add_segment_"))  # type: ignore[return-value]


def long_steps(rng: random.Random) -> list[list[int]]:
    """New tokens of each sequence: prompts in chunks of which some see whole segments, with rows left over, beside
    sequences that decode and others too short or too early."""
    return [[rng.randint(32, 50), 3, 9], [rng.choice((64, 65, 70)), 1, rng.choice((1, 30))], [1, 1, 1]]


@pytest.mark.parametrize(
    "fp8, kv_dtype", [pytest.param(False, "bfloat16", marks=pytest.mark.long), (False, "fp8"), (True, "bfloat16")]
)
def test_steps_with_long_slices_compute_what_the_oracle_does(
    fp8: bool, kv_dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, rng = small_model(random.randrange(1000)), random.Random()
    given = {**SETTINGS, "fp8": fp8, "kv_dtype": kv_dtype}
    mine, oracle = segmented(model, monkeypatch, **given), Driver(oracle_of(model, "bfloat16", **given), 2)
    sequences: list[list[Any]] = [[d.new_sequence() for _ in range(3)] for d in (mine, oracle)]
    errors = []
    for lengths in long_steps(rng):
        tokens = [[rng.randrange(48) for _ in range(n)] for n in lengths]
        for name in ("residual", "x", "q", "attended", "act", "_wide"):
            getattr(mine.executor.memory, name).view(torch.uint8).fill_(0xFF)
        for memory in (mine.executor.model.segments._dense, mine.executor.model.segments.lse):
            memory.view(torch.uint8).fill_(0xFF)
        errors.append(
            relative_error(
                *(d.step(list(zip(s, tokens, strict=True))) for d, s in zip((mine, oracle), sequences, strict=True))
            )
        )
    assert parts_launched(mine) == (1, 1), "the second step alone has a slice behind a segment"
    assert max(errors) < (0.3 if fp8 else 0.12 if kv_dtype == "fp8" else 0.02), errors


@pytest.mark.long
def test_several_segments_and_two_long_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A span of several segments, and slices behind each other in a step, one without rows left over. Each row of what
    the attention gives is that of the kernel alone."""
    model, rng = small_model(random.randrange(1000)), random.Random()
    drivers = segmented(model, monkeypatch, **SETTINGS), Driver(executor_of(model, **SETTINGS), 2)
    monkeypatch.setattr(drivers[1].executor.model.segments, "check_library", lambda q: None)
    sequences: list[list[Any]] = [[d.new_sequence() for _ in range(2)] for d in drivers]
    for lengths in ([64, 32], [64, 66]):
        tokens = [[rng.randrange(48) for _ in range(n)] for n in lengths]
        works = [list(zip(s, tokens, strict=True)) for s in sequences]
        assert relative_error(*(d.step(w) for d, w in zip(drivers, works, strict=True))) < 0.02
        attended = [d.executor.memory.attended[: sum(lengths)] for d in drivers]  # of the last layer, a global one
        for rows in zip(*(found.float() for found in attended), strict=True):
            assert relative_error(*rows) < 0.03
    assert parts_launched(drivers[0]) == (2, 2)


def test_a_library_that_gives_other_sums_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    full = products.full_attention
    for wrong in (lambda out, lse: (out, lse / 0.6931), lambda out, lse: (out * 1.1, lse)):
        monkeypatch.setattr(products, "full_attention", lambda *args, w=wrong: w(*full(*args)))
        mine = executor_of(small_model(3), **SETTINGS)
        mine.model.segments.check_library(mine.memory.q)
        assert not mine.model.segments.find_long_slices([triton_segments.LongSlice(0, 64, 32, 0)])

    def full_memory(*args: Any) -> Any:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(products, "full_attention", full)
    with monkeypatch.context() as patch:
        patch.setattr(triton_segments, "_attend_plainly", full_memory)
        mine = executor_of(small_model(3), **SETTINGS)
        mine.model.segments.check_library(mine.memory.q)
        assert not mine.model.segments.find_long_slices([triton_segments.LongSlice(0, 64, 32, 0)])

    def fails(*args: Any) -> Any:
        raise RuntimeError("no engine")

    monkeypatch.setattr(products, "full_attention", fails)
    mine, oracle = (
        Driver(executor_of(small_model(3), **SETTINGS), 1),
        Driver(oracle_of(small_model(3), "bfloat16", **SETTINGS), 2),
    )
    sequences = [d.new_sequence() for d in (mine, oracle)]
    for length in (35, 65):
        tokens = [random.randrange(48) for _ in range(length)]
        assert relative_error(*(d.step([(s, tokens)]) for d, s in zip((mine, oracle), sequences, strict=True))) < 0.02


@pytest.mark.parametrize("kv_dtype", [pytest.param("bfloat16", marks=pytest.mark.long), "fp8"])
def test_few_tokens_behind_many_share_their_keys(kv_dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In graphs and without; each row of what the attention gives is that of the kernel alone."""
    monkeypatch.setitem(SPLIT_PREFILL, ("sm90", 16), PrefillConfig(16, 16, splits=3, least=32))
    monkeypatch.setattr(triton_rows, "PROMPT_BUCKETS", dict.fromkeys((0, 4), (24,)))
    monkeypatch.setattr(triton_memory, "KEPT_TOKENS", 300)
    model, rng = small_model(random.randrange(1000)), random.Random()
    given = {**SETTINGS, "kv_dtype": kv_dtype, "graphs": True}
    drivers = [Driver(executor_of(model, **given), n) for n in range(2)]
    drivers[1].executor.memory.split_tokens = 0
    for driver in drivers:
        driver.executor.model.launcher.launched.clear()
    sequences: list[list[Any]] = [[d.new_sequence() for _ in range(3)] for d in drivers]
    for lengths in ([48, 9, 20], [3, 1, 17], [1, 2, 1]):
        tokens = [[rng.randrange(48) for _ in range(n)] for n in lengths]
        for driver, own in zip(drivers, sequences, strict=True):
            for name in ("attended", "split_sums", "split_lse"):
                getattr(driver.executor.memory, name).view(torch.uint8).fill_(0xFF)
            driver.step(list(zip(own, tokens, strict=False)))
        singles = lengths.count(1)
        padded = 4 if singles else 0
        places = (
            [*range(singles), *range(padded, padded + sum(lengths) - singles)]
            if sum(lengths) < 25
            else range(sum(lengths))
        )
        attended = [d.executor.memory.attended[list(places)].float() for d in drivers]
        for rows in zip(*attended, strict=True):
            assert relative_error(*rows) < 0.03
    launched = [d.executor.model.launcher.launched for d in drivers]
    assert [sum(name.startswith("add_splits") for name in names) for names in launched] == [3, 0]


@pytest.mark.long
def test_models_with_more_heads_than_their_mlp_is_wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the kernel leaves is float32, and wider than all that products of bfloat16 rows give."""
    model = small_model(3, num_attention_heads=8, intermediate_size=16)
    given = {**SETTINGS, "max_batch_tokens": 65}
    mine, oracle = segmented(model, monkeypatch, **given), Driver(oracle_of(model, "bfloat16", **given), 2)
    sequences = [d.new_sequence() for d in (mine, oracle)]
    for length in (35, 65):
        tokens = [random.randrange(48) for _ in range(length)]
        assert relative_error(*(d.step([(s, tokens)]) for d, s in zip((mine, oracle), sequences, strict=True))) < 0.02
    assert parts_launched(mine) == (1, 1)


@pytest.mark.parametrize("page_tokens", [32, 64])
def test_pages_that_are_longer_than_segments(page_tokens: int) -> None:
    given = {**SETTINGS, "page_tokens": page_tokens, "kv_pages": {"global": 9, "local": 9}}
    assert (executor_of(small_model(3), **given).model.segments is None) is (page_tokens > SMALL.tokens)


def test_short_contexts_take_no_memory_for_it() -> None:
    assert executor_of(small_model(3), **{**SETTINGS, "max_batch_tokens": 50}).model.segments is None
    assert executor_of(small_model(3), **SETTINGS, batch_invariant=True).model.segments is None
