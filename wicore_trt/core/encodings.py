"""Encodings of images beside the steps of an engine: begins what the books choose, takes what ended.

Single-threaded; it must not know pages. Invariant: a slot is begun right after a schedule was made up and before
its step starts, while no step under way reads images.
"""

from __future__ import annotations

import logging

from wicore_trt.runtime.executor import ImageEncoder
from wicore_trt.schedule.images import ImageBook
from wicore_trt.schedule.sequence import StepSchedule

log = logging.getLogger(__name__)


class Encodings:
    def __init__(self, encoder: ImageEncoder) -> None:
        self.book = ImageBook(encoder.slots)
        self._encoder = encoder
        self._failed: dict[int, str] = {}

    def begin_next(self, schedule: StepSchedule, little: int) -> None:
        """Begin the next image that is wanted, if any may be begun. A step that has nothing but a `little` text before
        the image that is encoded waits for it: then it reads the weights once for both."""
        book, chosen = self.book, self.book.begin_encoding()
        if chosen is not None:
            try:
                self._encoder.begin(chosen[0], chosen[1].pixels)
            except Exception as error:  # fails those who asked for it
                log.exception("an image could not be encoded")
                self._note_end(f"{type(error).__name__}: {error}")
        if sum([count for _, count in schedule.slices]) <= little and all(
            book.awaits_encoding(s.seq_id, s.computed + count) and not book.find_slots(s.images, s.computed, count)
            for s, count in schedule.slices
        ):
            schedule.slices.clear()

    def take_failed(self, timeout_s: float = 0.0) -> dict[int, str]:
        """Take what ended, waiting at most `timeout_s` seconds for it; return why images failed, by the numbers of the
        sequences that asked for them."""
        if self.book.busy:
            for _, why in self._encoder.take_ended(timeout_s):
                self._note_end(why)
        failed, self._failed = self._failed, {}
        return failed

    def _note_end(self, why: str | None) -> None:
        asked = self.book.end_encoding(failed=why is not None)
        if why is not None:
            self._failed |= dict.fromkeys(asked, f"An image could not be encoded: {why}")
