"""Make masks of the tokens that may follow: matchers of constrained sequences, over the model's own tokenizer.

Must not know sequences, logits or threads of the engine. Slow work is done once, beforehand: the tokenizer's tables
on a thread of their own (`warm`), a grammar by `prepare`. Invariant: bytes of tokens that were allowed and taken,
put together, begin a text that the constraint allows. An end is allowed exactly where the text is whole.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from typing import Any

from wicore_trt.arithmetic import div_ceil
from wicore_trt.errors import shortened
from wicore_trt.grammar.source import grammar_of, load_llguidance, make_limits, make_refusal, token_ids
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.types import Constraint, ConstraintKind

KEPT = 32
"""Grammars that are kept, with the states that their lexers have seen."""
_REASON = 200


class MatcherError(Exception):
    """Failure to keep a constraint any further, of one sequence alone."""


class Matcher:
    """Position of one sequence in its grammar. `broken`: the text of the MatcherError that it raised."""

    def __init__(self, inner: Any, size: int, ends: Sequence[int]) -> None:
        """Take `ends`, the tokens that end an output; llguidance knows only the first."""
        self._inner, self._size, self._ends = inner, size, ends
        self.broken: str | None = None

    def allowed(self, held: Collection[int] = ()) -> bytes:
        """Return the tokens that may follow, a bit for each, lowest first. Raises MatcherError. `held` are left out
        unless nothing else may follow."""
        mask = bytearray(self._inner.compute_bitmask()[: self._size])
        if self._inner.is_error():
            raise self._make_error()
        if self._ends and _has_token(mask, self._ends[0]):
            for token in self._ends[1:]:
                mask[token >> 3] |= 1 << (token & 7)
        if any(_has_token(mask, token) for token in held):
            left = mask.copy()
            for token in held:
                left[token >> 3] &= ~(1 << (token & 7))
            mask = left if any(left) else mask
        if not any(mask):
            self.broken = "The constraint leaves no token to go on with."
            raise MatcherError(self.broken)
        return bytes(mask)

    def take(self, token: int) -> None:
        """Advance by a token that was allowed and is no end. Raises MatcherError."""
        if not self._inner.consume_token(token):
            raise self._make_error()

    def _make_error(self) -> MatcherError:
        reason = shortened(" ".join(str(self._inner.get_error()).split()), _REASON)
        self.broken = f"The constraint cannot be kept any further: {reason}"
        return MatcherError(self.broken)


def _has_token(mask: bytes | bytearray, token: int) -> bool:
    return bool(mask[token >> 3] >> (token & 7) & 1)


class Grammars:
    """Matchers for a model of `vocab_size` tokens with this tokenizer. For any thread."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        self.tokenizer, self._vocab = tokenizer, vocab_size
        self._ends = [token for token in tokenizer.eos_ids if token < vocab_size]
        self._table: Any = None
        self._building = threading.Lock()
        self._kept: OrderedDict[Constraint, Any] = OrderedDict()
        self._books = threading.Lock()

    def warm(self) -> None:
        """Make the tokenizer's tables, on a thread. Nothing happens where llguidance is not installed."""

        def build() -> None:
            try:
                self._make_tables()
            except Exception:  # the first request with a constraint says why
                return

        threading.Thread(target=build, name="wicore-grammar", daemon=True).start()

    def prepare(self, constraint: Constraint) -> None:
        """Build a constraint's grammar, so that `matcher` has it. Raises InvalidRequestError."""
        with self._books:
            if constraint in self._kept:
                self._kept.move_to_end(constraint)
                return
        if constraint.kind is ConstraintKind.TOKENS:
            inner: Any = _Among(token_ids(constraint), self._vocab)
        else:
            inner = load_llguidance().LLMatcher(
                self._make_tables(), grammar_of(constraint), log_level=0, limits=make_limits()
            )
        # The first mask is the dearest one; the states that it finds are shared by what is copied.
        first = b"" if inner.is_error() else inner.compute_bitmask()
        if inner.is_error() or not any(first):
            raise make_refusal(str(inner.get_error()) if inner.is_error() else "nothing satisfies it")
        with self._books:
            self._kept[constraint] = inner
            while len(self._kept) > KEPT:
                self._kept.popitem(last=False)

    def matcher(self, constraint: Constraint) -> Matcher:
        """Make a matcher at an output's beginning; slow without a recent `prepare`. Raises InvalidRequestError."""
        for _ in range(2):
            with self._books:
                inner = self._kept.get(constraint)
            if inner is not None:
                ends = [] if constraint.kind is ConstraintKind.TOKENS else self._ends
                return Matcher(inner.deep_copy(), div_ceil(self._vocab, 8), ends)
            self.prepare(constraint)
        raise AssertionError("a grammar that was just built is not there")

    def _make_tables(self) -> Any:
        with self._building:
            if self._table is None:
                made, vocab = load_llguidance(), self._vocab
                wrapper = made.TokenizerWrapper(_Vocabulary(self.tokenizer, vocab))
                self._table = made.LLTokenizer(wrapper, n_vocab=vocab, eos_token=self._ends[:1])
            return self._table


class _Among:
    """Set of tokens allowed at any position, with llguidance's matcher methods; ends follow only if in it."""

    def __init__(self, tokens: Sequence[int], vocab_size: int) -> None:
        if max(tokens) >= vocab_size:
            raise make_refusal(f"token id {max(tokens)} is outside the vocabulary of {vocab_size}")
        mask = bytearray(div_ceil(vocab_size, 8))
        for token in tokens:
            mask[token >> 3] |= 1 << (token & 7)
        self._mask = bytes(mask)

    def compute_bitmask(self) -> bytes:
        return self._mask

    def is_error(self) -> bool:
        return False

    def consume_token(self, token: int) -> bool:
        return _has_token(self._mask, token)

    def deep_copy(self) -> _Among:
        return self


class _Vocabulary:
    """Tokenizer as llguidance asks for it. It gets the bytes of all tokens, several times as fast as reading
    tokenizer.json. It would tokenize texts only to force tokens, which is not done here."""

    def __init__(self, tokenizer: Tokenizer, vocab_size: int) -> None:
        texts = tokenizer.list_vocabulary()[:vocab_size]
        texts += [None] * (vocab_size - len(texts))  # rows of the model that are no tokens
        self.tokens = [b"\xff<%d>" % i if text is None else text for i, text in enumerate(texts)]
        self.special_token_ids = [i for i, text in enumerate(texts) if text is None]
        self.eos_token_id, self.bos_token_id = tokenizer.eos_ids[0], None
        self._encode = tokenizer.encode

    def __call__(self, text: bytes) -> list[int]:
        return self._encode(text.decode(errors="replace"), add_bos=False)
