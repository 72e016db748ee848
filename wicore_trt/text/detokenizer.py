"""Convert token ids to text as they come, with stop strings.

Knows a tokenizer's `decode`; must not know requests or why a sequence ends. Invariant: the results of all `push_ids`
and of `flush_text`, put together, are the tokenizer's decode of all pushed ids, cut at the stop match.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from wicore_trt.text.tokenizer import Tokenizer


class IncrementalDetokenizer:
    """Text of one growing sequence of output ids.
    If tokens have the same text in any company, nothing is decoded, and at most three byte-fallback tokens are held
    back, which may still become a character. Otherwise a run of these is held back until it ends, and other tokens
    are final at once. Each is decoded behind the token before, because decoders that strip a text's first space
    (SentencePiece) may strip it of the first token alone. So a token is decoded a constant number of times, however
    long the output. Special tokens are no text unless `special`; those in stop strings become private characters
    until these were searched."""

    def __init__(
        self, tokenizer: Tokenizer, stop: tuple[str, ...] = (), include_stop: bool = False, *, special: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._byte_ids = tokenizer.byte_ids
        self._token_text = tokenizer.token_text
        self._context: list[int] = []  # the last token that became text
        self._pending: list[int] = []  # the run of bytes after it
        self._run = tokenizer.byte_run() if self._byte_ids else None  # the same where each token's text is known
        self._special = special
        named: dict[int, str] = {}
        for text in () if special else stop:
            named |= tokenizer.find_named_specials(text)
        self._marks = dict(zip(named, map(chr, count(_PRIVATE)), strict=False))
        self._unmarked = dict.fromkeys(map(ord, self._marks.values()))
        self._given = dict(zip(stop, stop, strict=True))  # stop strings as they were given, by what is looked for
        for text in stop if named else ():
            marked = text
            for token, name in named.items():
                marked = marked.replace(name, self._marks[token])
            self._given.setdefault(marked, text)
        self._include = include_stop
        self._stops = _StopStrings(tuple(self._given), include_stop) if stop else None
        self.matched: str | None = None
        """Stop string that ended the text."""

    def push_ids(self, token_ids: Iterable[int], *, may_stop: bool = True) -> str:
        """Return the text that became certain with these ids; "" after a stop match. Unless `may_stop`, a stop
        string that ends in this text does not count."""
        if self.matched is not None:
            return ""
        text = "".join(map(self._decode_token, token_ids))
        return text if self._stops is None else self._hide_marks(self._stops.push_text(text, may_stop))

    def flush_text(self, *, may_stop: bool = True) -> str:
        """Return the rest at the end of the sequence, incomplete UTF-8 as U+FFFD. May still match a stop string."""
        if self.matched is not None:
            return ""
        text = self._end_pending()
        if self._stops is None:
            return text
        return self._hide_marks(self._stops.push_text(text, may_stop) + self._stops.flush_held())

    def _hide_marks(self, text: str) -> str:
        """Remove marks of special tokens from a searched text; a stop string is shown as it was given."""
        assert self._stops is not None
        if (found := self._stops.matched) is not None:
            self.matched = self._given[found]
            if self._marks and self._include:
                return text[: len(text) - len(found)].translate(self._unmarked) + self.matched
        return text.translate(self._unmarked) if self._marks else text

    def _decode_token(self, token: int) -> str:
        if token in self._marks:
            return self._end_pending() + self._marks[token]
        if self._special and not (
            token in self._byte_ids or self._token_text(token) or self._decode_ids([token, token])
        ):
            return self._end_pending() + self._tokenizer.token_bytes(token).decode(errors="replace")
        if self._run is not None:
            return self._run.decode_next(token)
        if not self._pending:
            known = self._token_text(token)
            if known is not None:
                if known:
                    self._context = [token]
                return known
        # Twice, because a decoder may strip the first space of a text. Skipped special tokens do not end a run of
        # bytes, and ids beyond the vocabulary do not either.
        if not self._decode_ids([token, token]):
            return ""
        self._pending.append(token)
        if token in self._byte_ids:
            return ""
        text = self._decode_pending()
        self._context = [token]
        return text

    def _end_pending(self) -> str:
        return self._decode_pending() if self._run is None else self._run.end_run()

    def _decode_pending(self) -> str:
        before = self._decode_ids(self._context)
        text = self._decode_ids(self._context + self._pending)[len(before) :]
        self._pending.clear()
        return text

    def _decode_ids(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids) if ids else ""


_PRIVATE = 0xF0000
"""Characters of a plane for private use, which no tokenizer's text has."""


class _StopStrings:
    """Finds the stop string whose match ends first, and of those the longest, in text given in chunks.
    Holds back the longest end of the text that could begin a stop string, and no more."""

    def __init__(self, stops: tuple[str, ...], include: bool) -> None:
        self.matched: str | None = None
        self._stops = stops
        self._include = include
        self._longest = max(map(len, stops))
        self._first = frozenset(s[0] for s in stops)
        self._held = ""

    def push_text(self, text: str, may_stop: bool) -> str:
        """Return the text that no stop string can claim any more, cut at the match."""
        if not text or self.matched is not None:
            return ""
        held = len(self._held)
        text = self._held + text
        # A match ends in the new text: one that ended before was seen, or was not to count.
        starts = {stop: text.find(stop, max(0, held + 1 - len(stop))) for stop in self._stops} if may_stop else {}
        found = [(at + len(stop), at, stop) for stop, at in starts.items() if at >= 0]
        if found:
            end, start, self.matched = min(found)
            self._held = ""
            return text[: end if self._include else start]
        cut = len(text)
        for start in range(max(0, len(text) - self._longest + 1), len(text)):
            if text[start] in self._first and any(stop.startswith(text[start:]) for stop in self._stops):
                cut = start
                break
        self._held = text[cut:]
        return text[:cut]

    def flush_held(self) -> str:
        held, self._held = self._held, ""
        return held
