"""Two contents of equal token ids never share a page: images, say, whose placeholders are the same ids (I1).

The executor here sees content in place of placeholder ids, and checks in each step that all KV a position looks at is
of this very prompt and content.
"""

from __future__ import annotations

import os
import random
from hashlib import blake2b
from pathlib import Path

import campaign
import pytest
from campaign import Shape, Stack
from fakes import FakeExecutor
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from wicore_trt.errors import InvalidRequestError
from wicore_trt.kv.events import Stored
from wicore_trt.kv.pages.hashing import KeyChain, mark_content
from wicore_trt.kv.sequence_pages import SequencePages
from wicore_trt.link.messages import Add, decode_to_engine, encode
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.batch import SequenceSlice, StepBatch, StepResult
from wicore_trt.serve.worker import _find_runs
from wicore_trt.types import ContentSpan, GenerateRequest, SamplingParams, TextRequest

PAGE = 4
PLACEHOLDER = 7
SEED = int.from_bytes(os.urandom(4), "little")


def digest_of(name: object) -> bytes:
    return blake2b(str(name).encode(), digest_size=32).digest()


def span(begin: int, end: int, name: object) -> ContentSpan:
    return ContentSpan(begin, end, digest_of(name))


def seen_tokens(tokens: list[int], content: tuple[ContentSpan, ...], first: int = 0) -> list[int]:
    """Model input for tokens from position `first` on: in a span, numbers that follow from its content."""
    seen = list(tokens)
    for s in content:
        for i in range(max(s.begin, first), min(s.end, first + len(seen))):
            data = s.digest + bytes([i - s.begin, s.end - s.begin])
            seen[i - first] = 1000 + int.from_bytes(blake2b(data, digest_size=3).digest(), "little")
    return seen


def keys_of(tokens: list[int], content: tuple[ContentSpan, ...] = (), page_tokens: int = PAGE) -> list[bytes]:
    keys: list[bytes] = []
    names = KeyChain("engine", page_tokens, secret=b"s" * 32).derive_names("", "tenant")
    names.extend_keys(keys, tokens, mark_content(content, page_tokens))
    return keys


# --- names -----------------------------------------------------------------------------------------------------------


def test_without_content_names_are_what_they_were() -> None:
    """Page keys of directories that earlier versions wrote stay valid."""
    keys = keys_of(list(range(16)))
    assert keys[0].hex() == "fbd3bf64c47e9c35a6e42ab43c783572d6c6b3d7faf34a9d1afcbb3dce689271"
    assert keys[3].hex() == "b30df1846420723e2a316ff060cc866bff351f952d14529d55e0c91fc9aa5712"


@pytest.mark.parametrize(
    ("begin", "end", "pages"),
    [(0, 1, {0}), (3, 4, {0}), (3, 5, {0, 1}), (4, 8, {1}), (2, 13, {0, 1, 2, 3}), (7, 8, {1}), (15, 16, {3})],
)
def test_a_span_marks_each_page_that_it_reaches_into(begin: int, end: int, pages: set[int]) -> None:
    """Over a page's boundary too, and not the page that begins where it ends."""
    assert set(mark_content((span(begin, end, "a"),), PAGE)) == pages
    plain, one, two = (keys_of([PLACEHOLDER] * 16, c) for c in ((), (span(begin, end, 1),), (span(begin, end, 2),)))
    first = begin // PAGE
    for i in range(4):
        assert len({plain[i], one[i], two[i]}) == (1 if i < first else 3)


def test_tokens_are_told_up_to_the_first_content() -> None:
    """Routers match prompts by tokens: behind a span they would take one content for another."""
    names, keys = KeyChain("engine", PAGE, secret=b"s" * 32).derive_names("", ""), list[bytes]()
    tokens, marks = [PLACEHOLDER] * 24, mark_content((span(9, 10, "a"),), PAGE)
    told = names.extend_keys(keys, tokens[:12], marks) + names.extend_keys(keys, tokens, marks)
    assert len(keys) == 6 and [len(block) for block in told] == [4 * PAGE, 4 * PAGE, 0, 0, 0, 0]


@st.composite
def contents(draw: st.DrawFn) -> tuple[ContentSpan, ...]:
    ends = sorted(draw(st.sets(st.integers(0, 40), max_size=8)))
    spans = [(a, b) for a, b in zip(ends, ends[1:], strict=False) if draw(st.booleans())]
    return tuple(span(a, b, draw(st.integers(0, 2))) for a, b in spans)


@given(contents(), contents(), st.sampled_from([1, 3, 4, 16]))
def test_names_are_equal_where_contents_are(
    one: tuple[ContentSpan, ...], two: tuple[ContentSpan, ...], page: int
) -> None:
    """Of equal token ids, for any spans: up to the first page that differs in a span that begins before its end."""
    found = [keys_of([PLACEHOLDER] * 40, content, page) for content in (one, two)]
    for i, (a, b) in enumerate(zip(*found, strict=True)):
        same = [s for s in one if s.begin < (i + 1) * page] == [s for s in two if s.begin < (i + 1) * page]
        assert (a == b) == same


# --- the whole cache -------------------------------------------------------------------------------------------------


class ContentExecutor(FakeExecutor):
    """Sees what `content_of` says of a sequence."""

    def execute(self, batch: StepBatch) -> StepResult:
        pieces = []
        for piece in batch.slices:
            content = self.content_of(piece.seq_id)
            pieces.append(structs.replace(piece, token_ids=seen_tokens(piece.token_ids, content, piece.start)))
        return super().execute(StepBatch(pieces, batch.measure_attention))

    def history(self, piece: SequenceSlice) -> list[int]:
        return seen_tokens(super().history(piece), self.content_of(piece.seq_id))


class ContentStack(Stack):
    def open(self) -> None:
        super().open()
        running = self.core.scheduler.running
        self.executor.content_of = lambda seq: next(s.request.content for s in running if s.seq_id == seq)

    def ask(self, tokens: list[int], content: tuple[ContentSpan, ...], **request: object) -> str:
        return self.add(tokens, seen=seen_tokens(tokens, content), content=content, **request)

    def found(self, tokens: list[int], content: tuple[ContentSpan, ...]) -> int:
        """Tokens that a request would find, on the device or below it."""
        pages = SequencePages(
            self.manager.chain.derive_names("", ""), marks=mark_content(content, self.shape.page_tokens)
        )
        hit, scheduler = self.manager.find_prefix(pages, tokens), self.core.scheduler
        rate = scheduler.estimates.rate_behind(scheduler.running)
        plan = scheduler.loader.choose_load(pages, len(tokens), hit, rate)
        return max(hit.tokens, plan.stop if plan is not None else 0)


@pytest.fixture
def make_stack(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr(campaign, "FakeExecutor", ContentExecutor)
    made: list[Stack] = []

    def make(**settings: object) -> ContentStack:
        made.append(ContentStack(tmp_path, seed=SEED, **settings))
        return made[-1]

    yield make
    for stack in made:
        stack.close()


A, B = (span(6, 21, "a"),), (span(6, 21, "b"),)


@pytest.mark.parametrize("where", ["device", "host", "disk"])
def test_a_content_finds_its_own_pages_alone(make_stack, where: str) -> None:
    """In each tier; and its beginning, which no content is in, all of them share. The local windows are no other way
    in: the prompt is five windows long."""
    stack = make_stack(host_slots=400)
    tokens = [PLACEHOLDER] * 40
    stack.ask(tokens, A)
    stack.settle()
    stack.settle_transfers()
    if where != "device":
        stack.forget_device()
    if where == "disk":
        stack.forget_host()
    own = stack.found(tokens, A)
    assert own >= 36
    for other in (B, (), (span(6, 20, "a"),), (span(7, 21, "a"),), (*A, span(21, 22, "c")), (span(30, 40, "a"),)):
        shared = next(
            i for i, (a, b) in enumerate(zip(seen_tokens(tokens, A), seen_tokens(tokens, other), strict=True)) if a != b
        )
        assert stack.found(tokens, other) <= shared
    stack.loads_first = True
    for content in (B, A, ()):
        stack.ask(tokens, content)
        stack.settle()
    assert stack.wrong == 0
    stack.check_idle()


def test_a_request_waits_for_no_other_content_in_flight(make_stack) -> None:
    """Only for the prefix that it would have, which a running request computes."""
    stack = make_stack()
    tokens = [PLACEHOLDER] * 80
    stack.ask(tokens, A)
    stack.step()
    manager = stack.manager
    for content, waits in ((A, True), (B, False), ((), False)):
        pages = SequencePages(manager.chain.derive_names("", ""), marks=mark_content(content, PAGE))
        assert manager.find_prefix(pages, tokens).in_flight is waits
    for content in (A, B, ()):
        stack.ask(tokens, content)
    stack.settle()
    assert stack.wrong == 0


def test_events_name_each_content_apart(make_stack) -> None:
    """Routers, which match pages by tokens, are told of none that is behind a content."""
    stack = make_stack(host_slots=400)
    names: dict[str, set[bytes]] = {}
    for name, content in (("a", A), ("b", B), ("plain", ())):
        before = stack.manager.events.sequence
        stack.ask([PLACEHOLDER] * 40, content, answer=1)
        stack.settle()
        stored = [
            e
            for e in stack.manager.events.list_since(before)
            if isinstance(e, Stored) and (e.tier, e.group) == ("device", GLOBAL)
        ]
        pages = [page for event in stored for page in event.pages if page.index]
        names[name] = {page.key for page in pages}
        assert {bool(page.tokens) for page in pages} == {not content}
        assert [page.index for run in _find_runs(pages) for page in run] == ([*range(1, 10)] if not content else [])
    assert not names["a"] & names["b"] and not (names["a"] | names["b"]) & names["plain"]


@pytest.mark.parametrize("late", [False, True])
def test_no_step_sees_another_content(make_stack, late: bool) -> None:
    """Requests with spans anywhere, over few token ids and few contents, with tiers too small for all, preemption,
    parking and restarts."""
    stack = make_stack(late=late, host_slots=150, shape=Shape(pages={GLOBAL: 40, LOCAL: 24}))
    rng = random.Random(SEED)

    def content(length: int) -> tuple[ContentSpan, ...]:
        ends = sorted(rng.sample(range(0, length, rng.choice([1, 1, 2, 6])), k=rng.choice([0, 2, 2, 4])))
        return tuple(span(a, b, rng.randrange(2)) for a, b in zip(ends[::2], ends[1::2], strict=True))

    for _ in range(8):
        spans = [content(24) for _ in range(3)]
        for _ in range(12):
            tokens = [PLACEHOLDER] * rng.choice([26, 30, 45, 60])
            own = rng.choice(spans) or content(len(tokens))
            stack.ask(tokens, own, n=rng.choice([1, 1, 2]), answer=rng.choice([1, 6, 20]))
            for _ in range(rng.choice([0, 1, 4])):
                stack.step()
        stack.settle(check=True)
        if rng.random() < 0.5:
            stack.forget_device()
        if rng.random() < 0.3:
            stack.restart()
    assert stack.wrong == 0 and stack.finished > 90
    counts = stack.totals + stack.counts()
    assert counts["host hits"] + counts["disk hits"] > 0
    stack.check_idle()


# --- requests --------------------------------------------------------------------------------------------------------


def test_the_link_carries_content() -> None:
    request = GenerateRequest("1/0", (7,) * 24, SamplingParams(), content=[*A, span(21, 24, "c")])
    sent = decode_to_engine(encode(Add(1, request))).request
    assert sent == request and sent.content == (*A, span(21, 24, "c"))


def test_spans_are_in_order_apart_and_inside() -> None:
    for spans in ((span(0, 3, 1), span(2, 4, 1)), (span(4, 5, 1), span(0, 1, 1)), (span(20, 25, 1),), ("a",)):
        with pytest.raises(InvalidRequestError, match="in order, apart and inside"):
            GenerateRequest("r", (7,) * 24, SamplingParams(), content=spans)
    for begin, end, digest in ((3, 3, bytes(32)), (-1, 3, bytes(32)), (0, 1, bytes(31)), (0, 1, "a" * 32)):
        with pytest.raises(InvalidRequestError):
            ContentSpan(begin, end, digest)
    for fields in ({"prompt": "text"}, {"prompt_token_ids": (7,) * 24, "truncate_prompt_tokens": 24}):
        with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
            TextRequest("r", SamplingParams(), content=A, **fields)
