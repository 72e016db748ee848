"""Incremental detokenization against whole-text oracles, over random tokens and chunkings."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st
from synthetic_tokenizer import EOS, FIRST_BYTE, backend, synthetic
from tokenizers import decoders

from wicore_trt.text.detokenizer import IncrementalDetokenizer
from wicore_trt.text.tokenizer import Tokenizer

TOKENIZER = synthetic()
VOCAB = TOKENIZER.vocab_size
BYTES = st.integers(FIRST_BYTE, FIRST_BYTE + 255)
# Whole and broken UTF-8, specials, ordinary tokens, and ids that models pad their vocabulary with.
PIECES = st.one_of(
    st.lists(BYTES, max_size=5),
    st.text(max_size=3).map(lambda s: [FIRST_BYTE + b for b in s.encode("utf-8", "ignore")]),
    st.sampled_from("🙂😀é").map(lambda s: [FIRST_BYTE + b for b in s.encode()]),
    st.lists(st.integers(0, FIRST_BYTE - 1), max_size=2),
    st.lists(st.integers(FIRST_BYTE + 256, VOCAB + 3), max_size=4),
)
TOKENS = st.lists(PIECES, max_size=12).map(lambda parts: list(itertools.chain.from_iterable(parts)))


class Letters:
    """Token t is the t-th character of a small alphabet, which makes stop strings match often."""

    byte_ids: frozenset[int] = frozenset()

    def find_named_specials(self, text):
        return {}

    def token_text(self, token: int) -> str | None:
        return None

    def decode(self, ids: Sequence[int]) -> str:
        return "".join("abc"[t] for t in ids)


def chunks(tokens: list[int], sizes: Iterable[int]) -> list[list[int]]:
    rest, parts = iter(tokens), []
    for size in itertools.chain(sizes, itertools.repeat(1)):
        part = list(itertools.islice(rest, size))
        if size and not part:
            return parts
        parts.append(part)


def oracle(text: str, stops: tuple[str, ...], include: bool) -> tuple[str, str | None]:
    """The text cut at the first place where some stop string is complete, the longest of them if several are."""
    for end in range(1, len(text) + 1):
        for stop in sorted(stops, key=len, reverse=True):
            if text[:end].endswith(stop):
                return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.lists(st.integers(0, 4), max_size=20))
def test_pushes_concatenate_to_decode_of_all(tokens: list[int], sizes: list[int]) -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    text = "".join(map(detokenizer.push_ids, chunks(tokens, sizes))) + detokenizer.flush_text()
    assert text == TOKENIZER.decode(tokens)


@settings(max_examples=100, deadline=None)
@given(TOKENS)
def test_decoder_that_strips_the_first_space(tokens: list[int]) -> None:
    inner = backend()
    inner.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer = Tokenizer(inner, bos_id=None, eos_ids=(EOS,))
    # Prefixed by a word: what the Strip decoder does to byte runs that spell spaces is not part of the promise.
    tokens = [*inner.encode(" world hello world", add_special_tokens=False).ids, *tokens]
    detokenizer = IncrementalDetokenizer(tokenizer)
    assert "".join(detokenizer.push_ids([t]) for t in tokens) + detokenizer.flush_text() == tokenizer.decode(tokens)
    assert tokenizer.decode(tokens).startswith("world hello world")


def test_what_is_known_of_a_token_is_what_decoding_gives() -> None:
    """In any company, and nothing where that matters."""
    known = {t: TOKENIZER.token_text(t) for t in range(VOCAB + 4)}
    assert known[FIRST_BYTE + 65] is None and known[EOS] == "" and sum(text is not None for text in known.values()) > 3
    for first, text in known.items():
        for second, other in known.items():
            if text is not None and other is not None:
                assert TOKENIZER.decode([first, second]) == text + other
    inner = backend()
    inner.decoder = decoders.Sequence([decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    stripping = Tokenizer(inner, bos_id=None, eos_ids=(EOS,))
    assert {stripping.token_text(t) for t in range(VOCAB)} == {None}


def test_the_bytes_of_tokens_put_together_are_the_text() -> None:
    grin = [FIRST_BYTE + b for b in "😀".encode()]
    ids = [*tokenizers_ids("hello world"), *grin, *tokenizers_ids("hello")]
    assert b"".join(map(TOKENIZER.token_bytes, ids)).decode() == TOKENIZER.decode(ids) != ""
    assert TOKENIZER.token_bytes(EOS).decode() == TOKENIZER.decode([EOS], skip_special=False) != ""


def test_text_comes_as_soon_as_it_is_certain() -> None:
    ids = tokenizers_ids("hello world")
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert [detokenizer.push_ids([i]) for i in ids] == ["hello", " world"]
    grin = [FIRST_BYTE + b for b in "😀".encode()]
    assert [detokenizer.push_ids([b]) for b in grin] == ["", "", "", "😀"]
    assert [detokenizer.push_ids([b]) for b in (*grin[:2], EOS, *grin[2:])] == ["", "", "", "", "😀"], "EOS has no text"
    assert [detokenizer.push_ids([b]) for b in (*grin[:2], ids[0])] == ["", "", "\ufffd\ufffdhello"]
    assert detokenizer.push_ids(ids[1:]) == " world"


def tokenizers_ids(text: str) -> list[int]:
    inner: tokenizers.Tokenizer = backend()
    return inner.encode(text, add_special_tokens=False).ids


@pytest.mark.parametrize("byte", [0x80, 0xFF, 0xC0, 0xF0, 0xE2, 0xC3])
def test_bytes_that_are_no_character_do_not_hold_the_text_up(byte: int) -> None:
    detokenizer, ids = IncrementalDetokenizer(TOKENIZER), [FIRST_BYTE + byte] * 400
    text = ""
    for count, token in enumerate(ids, 1):
        text += detokenizer.push_ids([token])
        assert count - len(text) <= 3
    assert text + detokenizer.flush_text() == TOKENIZER.decode(ids) == backend().decode(ids) == "\ufffd" * 400


@settings(max_examples=300, deadline=None)
@given(st.lists(BYTES, max_size=12), st.text(max_size=4))
def test_a_wrong_byte_spoils_no_character_beside_it(wrong: list[int], right: str) -> None:
    """Each byte of no character is one U+FFFD; where all bytes of a run are right, or none, as Hugging Face has it."""
    good = right.encode("utf-8", "ignore")
    ids = [FIRST_BYTE + b for b in good] + wrong
    whole = good + bytes(b - FIRST_BYTE for b in wrong)
    expected, at = "", 0
    while at < len(whole):
        size = next((n for n in (1, 2, 3, 4) if _is_character(whole[at : at + n])), 0)
        expected += whole[at : at + size].decode() if size else "\ufffd"
        at += size or 1
    assert TOKENIZER.decode(ids) == expected
    if all(char != "\ufffd" for char in expected) or set(expected) == {"\ufffd"}:
        assert expected == backend().decode(ids)


def _is_character(data: bytes) -> bool:
    try:
        return len(data.decode()) == 1
    except UnicodeDecodeError:
        return False


def test_incomplete_utf8_becomes_replacement_at_flush() -> None:
    detokenizer = IncrementalDetokenizer(TOKENIZER)
    assert detokenizer.push_ids([FIRST_BYTE + 0xF0, FIRST_BYTE + 0x9F]) == ""
    assert detokenizer.flush_text() == "\ufffd\ufffd"


def test_cost_per_token_does_not_grow() -> None:
    class Counting:
        byte_ids = TOKENIZER.byte_ids
        decoded = 0

        def token_text(self, token: int) -> str | None:
            return None

        def byte_run(self) -> None:
            return None

        def decode(self, ids: Sequence[int]) -> str:
            self.decoded += len(ids)
            return TOKENIZER.decode(ids)

    counting = Counting()
    detokenizer = IncrementalDetokenizer(counting)
    tokens = (tokenizers_ids("hello world") + [FIRST_BYTE + 0x80] * 50 + [EOS] * 3) * 20
    for token in tokens:
        detokenizer.push_ids([token])
    assert counting.decoded <= 6 * len(tokens)


@settings(max_examples=500, deadline=None)
@given(
    st.lists(st.integers(0, 2), max_size=40),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=4).map(tuple),
    st.lists(st.integers(0, 6), max_size=20),
    st.booleans(),
)
def test_stop_strings_against_whole_text(
    tokens: list[int], stops: tuple[str, ...], sizes: list[int], include: bool
) -> None:
    expected, matched = oracle(Letters().decode(tokens), stops, include)
    detokenizer = IncrementalDetokenizer(Letters(), stops, include)
    text, pushed = "", 0
    for part in chunks(tokens, sizes):
        text += detokenizer.push_ids(part)
        pushed += len(part)
        if detokenizer.matched is None:
            so_far = Letters().decode(tokens[:pushed])
            held = so_far[len(text) :]
            longest = max((n for s in stops for n in range(len(s)) if so_far.endswith(s[:n])), default=0)
            assert so_far.startswith(text) and len(held) == longest
    text += detokenizer.flush_text()
    assert (text, detokenizer.matched) == (expected, matched)
    if matched is not None:
        assert detokenizer.push_ids([0, 1, 2]) == "" and detokenizer.flush_text() == ""


@settings(max_examples=300, deadline=None)
@given(TOKENS, st.lists(st.integers(0, 4), max_size=20), st.data())
def test_stop_strings_over_byte_tokens(tokens: list[int], sizes: list[int], data: st.DataObject) -> None:
    whole = TOKENIZER.decode(tokens)
    if not whole:
        return
    start = data.draw(st.integers(0, len(whole) - 1))
    stop = whole[start : start + data.draw(st.integers(1, 6))]
    detokenizer = IncrementalDetokenizer(TOKENIZER, (stop,))
    text = "".join(map(detokenizer.push_ids, chunks(tokens, sizes))) + detokenizer.flush_text()
    assert (text, detokenizer.matched) == (whole[: whole.find(stop)], stop)


@pytest.mark.parametrize(
    ("stops", "text", "matched"),
    [(("abcd", "bc"), "xa", "bc"), (("bc", "abc"), "x", "abc"), (("cd", "d"), "xab", "cd")],
)
def test_first_complete_match_wins(stops: tuple[str, ...], text: str, matched: str) -> None:
    for sizes in ([1] * 6, [6], [2, 4]):
        detokenizer = IncrementalDetokenizer(TOKENIZER, stops)
        ids = [tokenizers_ids(c)[0] for c in "xabcdy"]
        assert "".join(map(detokenizer.push_ids, chunks(ids, sizes))) + detokenizer.flush_text() == text
        assert detokenizer.matched == matched
