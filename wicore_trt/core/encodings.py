"""Encodings of images between the steps of an engine: begins what the books choose, takes what ended.

Single-threaded; it must not know pages. Invariant: no step that is under way or scheduled reads a slot that is begun.
The books know the last schedule, and steps ahead of it read no image.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable

from wicore_trt.runtime.executor import NOT_ENCODED, NOT_FINITE, ImageEncoder
from wicore_trt.schedule.images import ImageBook, PromptImage, count_parts

_FAILED = "An image could not be encoded: "
log = logging.getLogger(__name__)
LITTLE = 4
"""Text of a slice / LITTLE tokens is not worth a step of its own before an image."""


class Encodings:
    def __init__(self, encoder: ImageEncoder, slice_tokens: int) -> None:
        self.book = ImageBook(encoder.slots, slice_tokens // LITTLE)
        self._encoder, self._left, self._rests = encoder, 0, False
        self._failed: dict[int, tuple[str, str | None]] = {}
        self._begun: dict[bytes, int] = {}  # what `begin` returned, by key; others may have these slots by now

    def run_next(self, decode_s: Callable[[], float]) -> bool:
        """Begin the next image that is wanted, if any may be begun. Run parts of the one under way behind the steps so
        far, as many as fit the time `decode_s` of a step that decodes, where 0 is none; return whether any run. Where
        an image was just encoded, they wait for the step that reads it: together they would delay its tokens."""
        rests, self._rests = self._rests, False
        seconds = decode_s() if (self._left or self.book.is_awaited) else 0.0
        if rests and seconds:
            return False
        try:
            if not self._left and (chosen := self.book.begin_encoding()) is not None:
                number = self._encoder.begin(chosen[0], chosen[1].pixels)
                self._begun = {key: n for key, n in self._begun.items() if n != number} | {chosen[1].key: number}
                self._left = self._encoder.parts
            if not self._left:
                return False
            count = count_parts(self._left, self._encoder.part_s, seconds)
            self._left -= count
            self._encoder.run_parts(count)
        except Exception:  # fails those who asked for it
            log.exception("an image could not be encoded")
            self._left = 0
            self._note_end(NOT_ENCODED)
        return True

    def take_failed(self, timeout_s: float = 0.0) -> dict[int, tuple[str, str | None]]:
        """Take what ended, waiting at most `timeout_s` seconds for it; return why images failed, and the field
        at fault, by the numbers of the sequences that asked for them."""
        if self.book.busy:
            for _, why in self._encoder.take_ended(timeout_s):
                self._note_end(why)
        failed, self._failed = self._failed, {}
        return failed

    def explain_failure(self, images: Iterable[PromptImage], why: str) -> tuple[str, str | None]:
        """Say why a sequence failed that read these images, and the field at fault; `why`, if it is none of them."""
        finite = all(self._encoder.is_finite(self._begun[i.key]) for i in images if i.key in self._begun)
        return (why, None) if finite else (_FAILED + NOT_FINITE, "images")

    def _note_end(self, why: str | None) -> None:
        asked = self.book.end_encoding(failed=why is not None)
        self._rests = bool(asked) and why is None
        if why is not None:
            field = "images" if why == NOT_FINITE else None
            self._failed |= dict.fromkeys(asked, (_FAILED + why, field))
