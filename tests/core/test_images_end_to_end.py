"""Images in a whole engine on the CPU: greedy tokens equal those of transformers for each prompt alone.

In company, in chunks of all sizes, cached, preempted, parked, through host and disk tiers and a restart, on one rank
and on two: the same.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from fakes import clear_cache
from tiny_images import BOI, EOI, SOFT, TOKENS, load_oracle, write_image_source

from wicore_trt.config import ExecutorSettings, KVSettings, SchedulerSettings, Settings
from wicore_trt.core.assemble import executor_options, load_engine
from wicore_trt.core.engine import EngineCore
from wicore_trt.engine.build import build_engine
from wicore_trt.errors import ConfigError
from wicore_trt.types import ContentSpan, GenerateRequest, SamplingParams

SIDE, PAGE, CONTEXT, ANSWER = 56, 4, 130, 6
SLOT = 4096


@dataclass(frozen=True)
class Prompt:
    """Token ids, and images as uint8 [SIDE, SIDE, 3] by where they begin."""

    ids: tuple[int, ...]
    images: tuple[tuple[int, bytes], ...]

    @property
    def content(self) -> tuple[ContentSpan, ...]:
        digest = lambda pixels: blake2b(pixels, digest_size=32).digest()  # noqa: E731
        return tuple(ContentSpan(at, at + TOKENS, digest(pixels), pixels) for at, pixels in self.images)

    def extended(self, ids: Sequence[int]) -> Prompt:
        return Prompt((*self.ids, *ids), self.images)


class Author:
    """Writes prompts of words and a few pictures."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.pictures = [self.rng.randbytes(SIDE * SIDE * 3) for _ in range(5)]

    def words(self, count: int) -> list[int]:
        return [self.rng.randrange(264, 310) for _ in range(count)]

    def prompt(self, *parts: int) -> Prompt:
        """Words, so many at a time, with an image between two parts."""
        ids, images = [2], []
        for number, count in enumerate(parts):
            if number:
                ids.append(BOI)
                images.append((len(ids), self.rng.choice(self.pictures)))
                ids += [*[SOFT] * TOKENS, EOI]
            ids += self.words(count)
        return Prompt(tuple(ids), tuple(images))


class Oracle:
    def __init__(self, source: Path) -> None:
        self.model = load_oracle(source)
        self.known: dict[tuple[Prompt, int], list[int]] = {}

    @torch.inference_mode()
    def answer(self, prompt: Prompt, count: int = ANSWER) -> list[int]:
        if (prompt, count) not in self.known:
            ids = torch.tensor([prompt.ids])
            given = {"input_ids": ids, "token_type_ids": (ids == SOFT).int(), "attention_mask": torch.ones_like(ids)}
            if prompt.images:
                pixels = torch.stack([torch.frombuffer(bytearray(p), dtype=torch.uint8) for _, p in prompt.images])
                values = pixels.view(-1, SIDE, SIDE, 3).permute(0, 3, 1, 2)
                given["pixel_values"] = (values * (1 / 255) - 0.5) / 0.5
            found = self.model.generate(
                **given, max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
            )
            self.known[prompt, count] = found[0, len(prompt.ids) :].tolist()
        return self.known[prompt, count]


class Served:
    """An engine, and the tokens and cached tokens of the prompts that it served last."""

    def __init__(self, path: Path, oracle: Oracle, *, batch: int = 24, sequences: int = 4, **kv: object) -> None:
        settings = Settings(
            engine=str(path),
            executor=ExecutorSettings(device="cpu", threads=1),
            scheduler=SchedulerSettings(max_batch_tokens=batch, max_sequences=sequences, max_context=CONTEXT),
            kv=KVSettings(page_tokens=PAGE, **kv),
        )
        self.core: EngineCore = load_engine(settings).engine_core
        self.oracle, self.count, self.encoded = oracle, 0, 0
        self.core.scheduler.prefill.observe_step([(0, 64)], 64.0)  # the planner is to load whatever it can
        self.core.scheduler.prefill.observe_step = lambda *args: None
        encoder = self.core.executor.images
        begin = encoder.begin

        def begun(slot: int, pixels: bytes) -> None:
            self.encoded += 1
            begin(slot, pixels)

        encoder.begin = begun

    def serve(self, prompts: Sequence[Prompt], *, n: int = 1, apart: bool = False, answer: int = ANSWER) -> int:
        """Assert that all get the tokens of transformers, at once or one after the other; return tokens cached."""
        cached = 0
        for group in [[prompt] for prompt in prompts] if apart else [prompts]:
            right: dict[str, list[int]] = {}
            for prompt in group:
                self.count += 1
                params = SamplingParams(max_tokens=answer, temperature=0.0, ignore_eos=True, n=n)
                request = GenerateRequest(f"r{self.count}", prompt.ids, params, content=prompt.content)
                self.core.validate_request(request)
                self.core.add(request)
                right[request.request_key] = self.oracle.answer(prompt, answer)
            got: dict[tuple[str, int], list[int]] = {(name, i): [] for name in right for i in range(n)}
            while self.core.has_work:
                for output in self.core.step():
                    assert output.error is None
                    got[output.request_key, output.index] += output.token_ids
                    if output.finish_reason is not None:
                        cached += output.usage.cached_tokens
            assert got == {place: right[place[0]] for place in got}
        return cached

    def settle(self) -> None:
        """Let pages reach the tiers."""
        while self.core.do_housekeeping():
            self.core.scheduler.manager.tiers.wait_for_report(0.01)

    def forget_device(self) -> None:
        manager = self.core.scheduler.manager
        tiers, manager.tiers = manager.tiers, None
        clear_cache(manager)
        manager.tiers = tiers

    def hits(self, tier: str) -> int:
        return next(t.hit_tokens for t in self.core.stats().kv.tiers if t.tier == tier)


@pytest.fixture(scope="module")
def engines(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[int, Path], Oracle]:
    """Engines of one model by number of ranks."""
    path = tmp_path_factory.mktemp("images")
    source = write_image_source(path / "source", seed=5)
    found = {1: path / "engine", 2: path / "two ranks"}
    for ranks, engine in found.items():
        build_engine(source, engine, dtype="float32", page_tokens=PAGE, tp_size=ranks)
    return found, Oracle(source)


ONE_RANK = pytest.mark.parametrize("serving", [1], indirect=True)
SELDOM_TWO = pytest.mark.parametrize("serving", [1, pytest.param(2, marks=pytest.mark.long)], indirect=True)


@pytest.fixture(params=[1, 2], ids=["1 rank", "2 ranks"])
def serving(engines: tuple[dict[int, Path], Oracle], request: pytest.FixtureRequest) -> Iterator:
    made: list[Served] = []

    def make(device_bytes: int = 1 << 20, **settings: object) -> Served:
        path = engines[0][request.param]
        made.append(Served(path, engines[1], device_bytes=device_bytes // request.param, **settings))
        return made[-1]

    yield make
    for served in made:
        served.core.close()


def prompts_of(seed: int) -> list[Prompt]:
    """With 0, 1, 2 and 5 images: first, last, in a row, and between words."""
    author = Author(seed)
    parts = [(9,), (0, 5), (7, 0), (3, 4), (0, 0, 3), (6, 1, 9), (2, 0, 3, 0, 1, 0), (11, 5, 2, 8, 3, 4)]
    return [author.prompt(*counts) for counts in parts]


def test_tokens_are_those_of_transformers_alone_and_in_company(serving) -> None:
    prompts = prompts_of(1)
    serving(prefix_cache=False).serve(prompts, apart=True)
    assert len({tuple(prompt.ids) for prompt in prompts}) == len(prompts)
    served = serving()
    served.serve(prompts)
    served.serve(prompts[5:], n=3)


@ONE_RANK
@pytest.mark.parametrize("batch", [7, 8, 11, 64])
def test_tokens_do_not_depend_on_chunks(serving, batch: int) -> None:
    serving(batch=batch, prefix_cache=False).serve(prompts_of(2))


@ONE_RANK
def test_what_is_cached_is_not_encoded_again_and_gives_the_same_tokens(serving) -> None:
    """Also behind an image, where another one took its place, and where the same one is elsewhere."""
    served, author = serving(), Author(3)
    prompts = [author.prompt(6, 9), author.prompt(2, 3, 12), author.prompt(5, 0, 4, 11)]
    served.serve(prompts, apart=True)
    encoded = served.encoded
    longer = [prompt.extended([*served.oracle.answer(prompt), *author.words(5)]) for prompt in prompts]
    assert served.serve(longer, apart=True) >= sum(len(prompt.ids) - PAGE for prompt in prompts)
    assert served.encoded == encoded
    (at, pixels), *_ = prompts[0].images
    other = next(picture for picture in author.pictures if picture != pixels)
    moved = Prompt((2, *prompts[0].ids), ((at + 1, pixels),))
    assert served.serve([Prompt(prompts[0].ids, ((at, other),)), moved], apart=True) <= at
    assert (
        len({tuple(served.oracle.answer(p)) for p in (prompts[0], moved, Prompt(prompts[0].ids, ((at, other),)))}) > 1
    )


@SELDOM_TWO
def test_preempted_and_parked_sequences_go_on_with_the_same_tokens(serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wicore_trt.kv.tiers.tiers.RETAIN_S", 10.0)
    served = serving(device_bytes=130_000, host_bytes=400 * SLOT, sequences=6)
    served.serve(prompts_of(4), n=2, answer=60)
    stats = served.core.stats()
    assert stats.preemptions > 0 and stats.kv.parked > 0


@SELDOM_TWO
def test_tiers_and_a_restart_give_the_same_tokens(serving, tmp_path: Path) -> None:
    tiers = {"host_bytes": 400 * SLOT, "disk_path": str(tmp_path), "disk_bytes": 64 << 20, "disk_free_bytes": 0}
    prompts = [p.extended(Author(6).words(13)) for p in prompts_of(6)]
    first = serving(**tiers)
    first.serve(prompts, apart=True)
    first.settle()
    first.forget_device()
    encoded = first.encoded
    first.serve(prompts, apart=True)
    assert first.hits("host") > 0
    first.settle()
    first.core.close()
    second = serving(**tiers)
    second.serve(prompts, apart=True)
    assert second.hits("disk") > 0 and first.encoded - encoded + second.encoded < encoded
    second.serve(prompts)


def test_a_step_has_room_for_an_image_beside_all_that_decode(engines: tuple[dict[int, Path], Oracle]) -> None:
    settings = Settings(engine=str(engines[0][1]), scheduler=SchedulerSettings(max_batch_tokens=6, max_sequences=4))
    with pytest.raises(ConfigError, match="an image of 4 tokens beside 3 sequences") as refused:
        load_engine(settings)
    assert "7 at least" in str(refused.value.fix)
    settings = Settings(executor=ExecutorSettings(device="cpu"), scheduler=SchedulerSettings(max_sequences=40))
    options = [executor_options(settings, vision) for vision in (None, SimpleNamespace(tokens=256))]
    assert [found.max_batch_tokens for found in options] == [256, 256 + 39]
