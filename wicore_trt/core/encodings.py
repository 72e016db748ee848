"""Encodings of images beside the steps of an engine: begins what the books choose, takes what ended.

Single-threaded; it must not know pages. Invariant: a slot is begun right after a schedule was made up, which the books
know, and no other step is under way; so no step under way reads that slot.
"""

from __future__ import annotations

import logging

from wicore_trt.runtime.executor import NOT_ENCODED, NOT_FINITE, ImageEncoder
from wicore_trt.schedule.images import ImageBook
from wicore_trt.schedule.sequence import StepSchedule

log = logging.getLogger(__name__)
LITTLE = 4
"""Text of a slice / LITTLE tokens is not worth a step of its own before an image."""


class Encodings:
    def __init__(self, encoder: ImageEncoder, slice_tokens: int) -> None:
        self.book = ImageBook(encoder.slots, slice_tokens // LITTLE)
        self._encoder, self._postponed = encoder, False
        self._failed: dict[int, tuple[str, str | None]] = {}

    def begin_next(self, schedule: StepSchedule) -> None:
        """Begin the next image that is wanted, if any may be begun. Where sequences decode beside an image in the step,
        it waits for one step: both are arithmetic, and those tokens would be late by the sum."""
        decode = any(count == 1 for _, count in schedule.slices)
        images = any(self.book.find_slots(s.images, s.computed, count) for s, count in schedule.slices)
        self._postponed = decode and images and not self._postponed
        if not self._postponed and (chosen := self.book.begin_encoding()) is not None:
            try:
                self._encoder.begin(chosen[0], chosen[1].pixels, decode)
            except Exception:  # fails those who asked for it
                log.exception("an image could not be encoded")
                self._note_end(NOT_ENCODED)

    def take_failed(self, timeout_s: float = 0.0) -> dict[int, tuple[str, str | None]]:
        """Take what ended, waiting at most `timeout_s` seconds for it; return why images failed, and the field
        at fault, by the numbers of the sequences that asked for them."""
        if self.book.busy:
            for _, why in self._encoder.take_ended(timeout_s):
                self._note_end(why)
        failed, self._failed = self._failed, {}
        return failed

    def _note_end(self, why: str | None) -> None:
        asked = self.book.end_encoding(failed=why is not None)
        if why is not None:
            field = "images" if why == NOT_FINITE else None
            self._failed |= dict.fromkeys(asked, (f"An image could not be encoded: {why}", field))
