"""Images of prompts: computed whole, with their own features, found in the cache only at their edges.

The executor here sees what is in the encoder's slots in place of placeholder ids, and checks in each step that all KV a
position looks at is of this very prompt.
"""

from __future__ import annotations

import random
import sys
from collections import deque
from hashlib import blake2b
from pathlib import Path

import campaign
import pytest
from campaign import Shape, Stack
from fakes import FakeExecutor
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from wicore_trt.errors import InvalidRequestError
from wicore_trt.kv.manager import KVCacheManager
from wicore_trt.kv.pages.hashing import KeyChain, mark_content
from wicore_trt.kv.sequence_pages import SequencePages, bar_pages
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.batch import SequenceSlice, StepBatch, StepResult
from wicore_trt.runtime.executor import NOT_FINITE
from wicore_trt.schedule.step_time import Budget, StepLoad, StepTime
from wicore_trt.types import ContentSpan, FinishReason, GenerateRequest, SamplingParams

PAGE, TOKENS, SOFT = 4, 6, 7
Content = tuple[ContentSpan, ...]


def image(begin: int, name: int, tokens: int = TOKENS) -> ContentSpan:
    pixels = bytes([name] * 3)
    return ContentSpan(begin, begin + tokens, blake2b(pixels, digest_size=32).digest(), pixels)


def seen_rows(pixels: bytes, count: int) -> list[int]:
    """Features in place of an image's tokens."""
    return [
        1000 + int.from_bytes(blake2b(pixels + bytes([i, count]), digest_size=3).digest(), "little")
        for i in range(count)
    ]


def seen_tokens(tokens: list[int], content: Content) -> list[int]:
    seen = list(tokens)
    for span in content:
        seen[span.begin : span.end] = seen_rows(span.pixels, span.end - span.begin)
    return seen


class SlowEncoder:
    """Ends an encoding when it was asked `delay` times; `failing` are pixels that it cannot encode."""

    slots, tokens, pixel_bytes, parts, part_s = 2, TOKENS, 3, 0, 0.0

    def __init__(self) -> None:
        self.held: list[bytes | None] = [None] * self.slots
        self.delay, self.begun, self.failing = 2, list[bytes](), set[bytes]()
        self._under_way: deque[list] = deque()

    def begin(self, slot: int, pixels: bytes) -> int:
        assert not self._under_way, "two at once"
        self.held[slot] = None
        self.begun.append(pixels)
        self._under_way.append([self.delay, slot, pixels])
        return slot

    def is_finite(self, slot: int) -> bool:
        return True

    def take_ended(self, timeout_s: float = 0.0) -> list[tuple[int, str | None]]:
        if not self._under_way:
            return []
        self._under_way[0][0] -= 1
        if self._under_way[0][0] > 0:
            return []
        _, slot, pixels = self._under_way.popleft()
        if pixels in self.failing:
            return [(slot, NOT_FINITE)]
        self.held[slot] = pixels
        return [(slot, None)]


class SeeingExecutor(FakeExecutor):
    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self.images = SlowEncoder()

    def execute(self, batch: StepBatch) -> StepResult:
        pieces = []
        for piece in batch.slices:
            tokens = list(piece.token_ids)
            for first, count, slot in piece.images:
                assert count == TOKENS and first + count <= len(tokens), "an image is cut"
                held = self.images.held[slot]
                assert held is not None, "a slot without features is read"
                tokens[first : first + count] = seen_rows(held, count)
            pieces.append(structs.replace(piece, token_ids=tokens))
        return super().execute(StepBatch(pieces, batch.measure_attention))

    def history(self, piece: SequenceSlice) -> list[int]:
        known = super().history(piece)
        return seen_tokens(known, self.content_of(piece.seq_id))


class SeeingStack(Stack):
    def open(self) -> None:
        super().open()
        running = self.core.scheduler.running
        self.executor.content_of = lambda seq: next(s.request.content for s in running if s.seq_id == seq)

    @property
    def encoder(self) -> SlowEncoder:
        return self.executor.images

    def ask(self, tokens: list[int], content: Content, **request: object) -> str:
        return self.add(tokens, seen=seen_tokens(tokens, content), content=content, **request)


@pytest.fixture
def make_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(campaign, "FakeExecutor", SeeingExecutor)
    made: list[Stack] = []

    def make(**settings: object) -> SeeingStack:
        made.append(SeeingStack(tmp_path, seed=3, **settings))
        return made[-1]

    yield make
    for stack in made:
        stack.close()


# --- where a prefix may end ------------------------------------------------------------------------------------------


@st.composite
def pictures(draw: st.DrawFn) -> tuple[int, Content]:
    """A prompt's length and its images, some of which follow each other at once."""
    at, found = 0, []
    for _ in range(draw(st.integers(0, 4))):
        at += draw(st.integers(0, 5))
        size = draw(st.integers(1, 9))
        found.append(image(at, draw(st.integers(0, 1)), size))
        at += size
    return at + draw(st.integers(1, 9)), tuple(found)


@settings(deadline=None)
@given(pictures(), pictures(), st.sampled_from([1, 2, 3, 4, 8]))
def test_a_prefix_ends_at_no_place_inside_an_image(
    one: tuple[int, Content], two: tuple[int, Content], page: int
) -> None:
    """Against brute force: the longest prefix of equal contents that an earlier prompt computed, in whole pages, that
    leaves a token to compute and cuts no image of the later prompt."""
    manager = KVCacheManager({GLOBAL: 400}, 8, KeyChain("engine", page))
    for length, content in (one, two):
        tokens = [SOFT] * length
        pages = SequencePages(
            manager.chain.derive_names("", ""), marks=mark_content(content, page), barred=bar_pages(content, page)
        )
        hit = manager.find_prefix(pages, tokens)
        if (length, content) == two and one != two:
            former = seen_tokens([SOFT] * one[0], one[1]), seen_tokens(tokens, content)
            common = next((i for i, (a, b) in enumerate(zip(*former, strict=False)) if a != b), min(map(len, former)))
            # a page that a span reaches into is named after all of that span
            fits = [
                n
                for n in range(0, min(common // page, (length - 1) // page) + 1)
                if not any(s.begin < n * page < s.end for s in (*content, *one[1]))
            ]
            assert hit.tokens == max(fits) * page
        manager.attach_prefix(pages, hit, length)
        assert manager.reserve_pages(pages, length)
        manager.commit_tokens(pages, tokens, hit.tokens, length, finite=True)
        manager.free_pages(pages)
        manager.check_integrity()


# --- the whole engine ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", [False, True])
def test_no_step_sees_another_image_or_a_part_of_one(make_stack, late: bool) -> None:
    """Prompts with few different images, cut, extended and moved, with tiers too small for all, preemption, parking and
    restarts; some are cancelled, and some images fail once."""
    stack = make_stack(late=late, host_slots=150, shape=Shape(pages={GLOBAL: 36, LOCAL: 26}))
    rng = random.Random(f"images/{late}")
    known: list[tuple[list[int], Content]] = [([SOFT] * 5, ())]
    for _ in range(7):
        for _ in range(12):
            tokens, content = rng.choice(known)
            cut = rng.randrange(1, len(tokens) + 1)
            tokens, content = tokens[:cut], tuple(span for span in content if span.end <= cut)
            for _ in range(rng.choice([0, 1, 1, 2, 3])):
                content = (*content, image(len(tokens), rng.randrange(4)))
                tokens = [*tokens, *[SOFT] * TOKENS, *stack.tokens(rng.choice([0, 1, 2, 5]))]
            tokens = [*tokens, *stack.tokens(rng.choice([0, 1, 9]))]
            if len(tokens) > 90:
                continue
            known.append((tokens, content))
            name = stack.ask(tokens, content, n=rng.choice([1, 1, 2]), answer=rng.choice([1, 6, 20]))
            stack.encoder.delay = rng.choice([1, 1, 2, 5])
            for _ in range(rng.choice([0, 1, 4])):
                stack.step()
            if rng.random() < 0.1:
                stack.abort(name)
        stack.settle(check=True)
        if rng.random() < 0.5:
            stack.forget_device()
        if rng.random() < 0.3:
            stack.restart()
    assert stack.wrong == 0 and stack.finished > 60
    counts = stack.totals + stack.counts()
    assert counts["host hits"] + counts["disk hits"] > 0
    stack.check_idle()


def test_an_image_is_encoded_once_for_all_sequences_and_not_at_all_where_it_is_cached(make_stack) -> None:
    stack = make_stack(shape=Shape(max_batch_tokens=TOKENS))
    tokens, content = [*[SOFT] * 20, *[9] * 9], (image(3, 1), image(13, 2))
    stack.ask(tokens, content, n=4)
    stack.settle()
    assert len(stack.encoder.begun) == 2
    prompts = sum(count for step in stack.executor.steps for _, count in step if count > 1)
    assert prompts <= len(tokens), "a sequence computed an image that another one was about to compute"
    for _ in range(2):
        stack.ask([*tokens, 11], content)
        stack.settle()
    assert len(stack.encoder.begun) == 2
    stack.ask([*tokens[:15], *[SOFT] * 6, 3], (image(3, 1), image(15, 2)))  # at another place: the features are kept
    stack.settle()
    assert len(stack.encoder.begun) == 2 and stack.wrong == 0
    for tenant, salt in (("other", ""), ("", "salted")):
        stack.ask(tokens, content, tenant=tenant, cache_salt=salt)
        stack.settle()
    assert len(stack.encoder.begun) == 6 and stack.wrong == 0


def test_a_failed_image_ends_its_request_alone(make_stack) -> None:
    """Pages computed before it stay cached, and the same image is tried again when it is asked for again."""
    stack = make_stack()
    stack.encoder.failing, stack.encoder.delay = {image(0, 5).pixels}, 20
    request = GenerateRequest(
        "bad", (*[9] * 80, *[SOFT] * TOKENS, 3), SamplingParams(max_tokens=2), content=(image(80, 5),)
    )
    stack.ask([*[9] * 4, *[SOFT] * TOKENS, 3], (image(4, 1),), answer=20)
    stack.core.add(request)
    outputs = []
    while stack.core.has_work:
        outputs += stack.core.step()
    ended = {o.request_key: o for o in outputs if o.finish_reason is not None}
    assert (ended["bad"].error, ended["bad"].field) == (f"An image could not be encoded: {NOT_FINITE}", "images")
    del ended["bad"]
    assert [o.finish_reason for o in ended.values()] == [FinishReason.LENGTH]
    stack.expected.clear(), stack.got.clear()
    stack.encoder.failing = set()
    pages = SequencePages(stack.manager.chain.derive_names("", ""))
    assert stack.manager.find_prefix(pages, [9] * 81).tokens == 16  # the rest is little
    stack.ask([*[9] * 80, *[SOFT] * TOKENS, 3], (image(80, 5),))
    stack.settle()
    assert stack.wrong == 0


def test_features_that_are_known_to_be_bad_behind_a_step_end_its_request_alone(make_stack) -> None:
    """Where a step was submitted before the encoding ended; the image is encoded anew when it is asked for again."""
    stack, tokens = make_stack(), [*[9] * 40, *[SOFT] * TOKENS, 3]
    stack.encoder.is_finite = lambda slot: stack.encoder.held[slot] != image(0, 5).pixels
    stack.ask([*[9] * 4, *[SOFT] * TOKENS, 3], (image(4, 1),), answer=20)
    stack.core.add(GenerateRequest("bad", tuple(tokens), SamplingParams(max_tokens=2), content=(image(40, 5),)))
    bad = stack.core.sequences["bad"][0].seq_id
    stack.executor.poison.add(bad)
    ended = {}
    while stack.core.has_work:
        ended |= {o.request_key: o for o in stack.core.step() if o.finish_reason is not None}
    assert (ended["bad"].error, ended["bad"].field) == (f"An image could not be encoded: {NOT_FINITE}", "images")
    del ended["bad"]
    assert [o.finish_reason for o in ended.values()] == [FinishReason.LENGTH]
    stack.expected.clear(), stack.got.clear()
    stack.ask(tokens, (image(40, 5),))
    stack.settle()
    assert stack.wrong == 0 and len(stack.encoder.begun) == 3


def test_all_that_read_bad_features_in_one_step_are_told_so(make_stack) -> None:
    stack = make_stack()
    stack.encoder.is_finite = lambda slot: False
    for first in (8, 9):
        tokens = (first, *[SOFT] * TOKENS, 3)
        stack.core.add(GenerateRequest(f"{first}", tokens, SamplingParams(max_tokens=2), content=(image(1, 5),)))
        stack.executor.poison.add(stack.core.sequences[f"{first}"][0].seq_id)
    ended = []
    while stack.core.has_work:
        ended += [(o.error, o.field) for o in stack.core.step() if o.finish_reason is not None]
    assert ended == [(f"An image could not be encoded: {NOT_FINITE}", "images")] * 2


def test_those_who_leave_while_an_image_is_encoded_keep_no_slot(make_stack) -> None:
    stack = make_stack()
    stack.encoder.delay = 4
    for name in range(6):
        stack.ask([*[SOFT] * TOKENS, 3], (image(0, name),))
        stack.step()
        assert sys.getrefcount(stack.encoder.begun[-1]) > 3
        stack.abort(f"r{name}")
    stack.encoder.delay = 1
    stack.ask([*[SOFT] * TOKENS, 3], (image(0, 9),))
    stack.settle()
    assert stack.wrong == 0
    stack.core.scheduler.images.check_integrity()
    stack.encoder.held.clear()
    for pixels in stack.encoder.begun:  # nobody keeps the request's: they are megabytes
        assert sys.getrefcount(pixels) == 3


def test_a_little_text_before_an_image_takes_no_step_of_its_own(make_stack) -> None:
    """It is computed with the image, and meanwhile others decode in steps that no prompt makes longer."""
    stack = make_stack()
    stack.ask([*[9] * 5, *[SOFT] * TOKENS, 3], (image(5, 1),), answer=30, whole=True)
    while not stack.executor.steps:
        stack.step()
    assert stack.executor.steps == [[(0, 5 + TOKENS + 1)]]
    stack.step()
    stack.ask([*[8] * 5, *[SOFT] * TOKENS, 3], (image(5, 2),))
    stack.step()
    assert stack.executor.steps[-1] == [(0, 1)]
    stack.settle()
    assert [(0, 1), (1, 5 + TOKENS + 1)] in stack.executor.steps
    assert stack.wrong == 0


# --- steps -----------------------------------------------------------------------------------------------------------


def test_a_step_is_stretched_for_one_image() -> None:
    """Though its time is over, as an image is computed whole; what the executor cannot take waits."""
    budget, time = Budget(32), StepTime(1e-9)
    budget.take_tokens(0, 20, prompt=False, ends=False)
    budget.set_time(time, StepLoad(20, 20), least=2)
    assert budget.fit_tokens(0, 30) == 2
    assert budget.fit_image(13) == 0 and budget.fit_image(12) == 12
    assert budget.fit_image(1) == 0, "one a step"
    budget.take_tokens(0, 12, prompt=True, ends=False)
    assert (budget.tokens, budget.room) == (0, 0)
    budget.give_back(12)
    assert (budget.tokens, budget.room) == (12, 12)


# --- requests --------------------------------------------------------------------------------------------------------


def test_what_the_encoder_cannot_read_is_refused(make_stack) -> None:
    stack = make_stack()

    def refused(content: Content, **params: object) -> str:
        request = GenerateRequest("r", (SOFT,) * 30, SamplingParams(max_tokens=1, **params), content=content)
        with pytest.raises(InvalidRequestError) as caught:
            stack.core.validate_request(request)
        return str(caught.value)

    assert "6 tokens of 3 bytes" in refused((image(0, 1, 5),))
    assert "6 tokens of 3 bytes" in refused((ContentSpan(0, 6, bytes(32), b"four"),))
    assert "no log-probabilities" in refused((image(0, 1),), prompt_logprobs=0)
    stack.executor.images = None
    assert "reads no images" in refused((image(0, 1),))
