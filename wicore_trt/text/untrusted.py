"""Keep special tokens in texts of messages as text: only the template itself writes tokens.

Methods and ids follow transformers' `apply_chat_template(sanitize_control_tokens=True)`
(utils/chat_template_utils.py): marks are put between two characters that no text has, and the text between is
encoded by the tokenizer's model alone. Templates join texts of parts: where these together are a mark, they are cut.
Must not know messages. Invariant: texts without such a mark are not touched.
"""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import accumulate, count
from os.path import commonprefix
from typing import Any

import tokenizers

_FIRST, _LAST = 0xF0000, 0xFFFFD  # private characters
_PIECES = ("text", "content")
"""Keys of texts that a template may join, stripped or not."""


class ControlTokens:
    """Added tokens of `backend` that steer: special and unused ones, those that `template` writes, and `more` ids.
    White space and HTML's tags, also added tokens of Gemma's, are ordinary text."""

    def __init__(self, backend: tokenizers.Tokenizer, template: str, more: Collection[int | None]) -> None:
        self._backend = backend
        names = [
            token.content
            for index, token in backend.get_added_tokens_decoder().items()
            if token.special or index in more or (token.content in template and not token.content.isspace())
            or token.content.startswith("<unused")
        ]  # fmt: skip
        self._names = _any_of(names) if names else "(?!)"
        self.pattern = re.compile(self._names)

    def mark_texts(self, values: Any) -> tuple[Any, Callable[[str], list[str | None]] | None]:
        """Mark texts in `values`, JSON; return them with a function that cuts a text into text, token, text and so
        on.
        None in place of the function where there are no marks."""
        texts = list(_walk_texts(values))
        pieces = [text.strip() for text, piece in texts if piece]
        ends, seams = list(accumulate(map(len, pieces))), set[int]()
        for mark in self.pattern.finditer("".join(pieces)):
            seams.update(range(bisect_right(ends, mark.start()), bisect_left(ends, mark.end())))
        every = set[str]()
        if not seams and not any(self.pattern.search(text) for text, _ in texts):
            return values, None
        for text, _ in texts:
            every.update(text)
        begin, end = [c for c in map(chr, range(_FIRST, _LAST)) if c not in every][:2]
        cuts = re.compile(f"{begin}({self._names}){end}|[{begin}{end}]")
        number = count()

        def marked(text: str, piece: bool) -> str:
            if piece and next(number) in seams:
                text = f"{text.rstrip()}{begin}{text[len(text.rstrip()) :]}"
            return self.pattern.sub(lambda found: f"{begin}{found[0]}{end}", text)

        return _replace_texts(values, marked), cuts.split

    def encode_as_text(self, name: str) -> list[int]:
        backend = self._backend
        text = backend.normalizer.normalize_str(name) if backend.normalizer else name
        words = [word for word, _ in backend.pre_tokenizer.pre_tokenize_str(text)] if backend.pre_tokenizer else [text]
        ids = [token.id for word in words for token in backend.model.tokenize(word)]
        if len(name) > 1 and backend.token_to_id(name) in ids:
            return [i for c in name for i in self.encode_as_text(c)]
        return ids


def _any_of(names: list[str]) -> str:
    """Make a regular expression of names, the longest first, as a tree."""
    head, rest = commonprefix(names), dict[str, list[str]]()
    for name in names:
        if len(name) > len(head):
            rest.setdefault(name[len(head)], []).append(name[len(head) :])
    # Thousands of names in a row would take 0.1 ms for each < in a text, while the front stands still.
    tree = "|".join(map(_any_of, rest.values()))
    return re.escape(head) + (f"(?:{tree}){'?' if head in names else ''}" if rest else "")


def _walk_texts(value: Any, piece: bool = False) -> Iterator[tuple[str, bool]]:
    """Yield the texts of `value`, and whether each is of _PIECES; `piece`: a text `value` is one."""
    if isinstance(value, str):
        yield value, piece
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _walk_texts(key)
            yield from _walk_texts(item, key in _PIECES)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _walk_texts(item)


def _replace_texts(value: Any, new: Callable[[str, bool], str], piece: bool = False) -> Any:
    """Replace the texts of `value`, pieces in the order of `_walk_texts`; `piece`: a text `value` is one of these."""
    if isinstance(value, str):
        return new(value, piece)
    if isinstance(value, Mapping):
        return {_replace_texts(key, new): _replace_texts(item, new, key in _PIECES) for key, item in value.items()}
    return [_replace_texts(item, new) for item in value] if isinstance(value, (list, tuple)) else value
