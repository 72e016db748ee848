"""When images are encoded between steps."""

from __future__ import annotations

import pytest

from wicore_trt.core.encodings import Encodings
from wicore_trt.runtime.executor import NOT_ENCODED
from wicore_trt.schedule.images import PromptImage, count_parts

MINE, OTHER = (PromptImage(0, 4, bytes([n]), bytes([n])) for n in range(2))


class Encoder:
    slots, tokens, pixel_bytes, parts, part_s = 2, 4, 1, 27, 0.5e-3

    def __init__(self) -> None:
        self.ran: list[int] = []
        self.ended: list[tuple[int, str | None]] = []
        self.broken = False
        self.finite: list[bool] = []

    def begin(self, slot: int, pixels: bytes) -> int:
        self.slot, self.left = slot, self.parts
        self.finite.append(pixels != b"bad")
        return len(self.finite) - 1

    def run_parts(self, count: int) -> None:
        if self.broken:
            raise RuntimeError("no kernel")
        self.ran.append(count)
        self.left -= count
        if not self.left:
            self.ended.append((self.slot, None))

    def is_finite(self, begun: int) -> bool:
        return self.finite[begun]

    def take_ended(self, timeout_s: float = 0.0) -> list[tuple[int, str | None]]:
        ended, self.ended = self.ended, []
        return ended


def ask(encodings: Encodings, *images: PromptImage) -> None:
    encodings.book.begin_schedule()
    for seq_id, image in enumerate(images):
        encodings.book.limit_tokens(seq_id, [image], 0, 9)


def test_parts_between_steps_that_decode_leave_gaps_below_1_5_times_a_step() -> None:
    for decode_s, part_s, want in ((13.6e-3, 0.45e-3, [9, 9, 9]), (21.5e-3, 0.45e-3, [14, 13]), (1e-3, 1.0, [1] * 27),
                                   (0.0, 0.45e-3, [27]), (5e-3, 0.0, [27])):  # fmt: skip
        left, ran = 27, list[int]()
        while left:
            ran.append(count_parts(left, part_s, decode_s))
            left -= ran[-1]
        assert ran == want


def test_an_image_waits_for_the_step_that_reads_the_one_before() -> None:
    encoder = Encoder()
    encodings = Encodings(encoder, 256)
    ask(encodings, MINE, OTHER)
    assert [encodings.run_next(lambda: 14e-3) for _ in range(3)] == [True] * 3 and encoder.ran == [9] * 3
    assert encodings.book.is_stopped(0, 0), "until it is told that it ended, the next step need not wait for it"
    assert encodings.take_failed() == {} and not encodings.book.busy
    assert not encodings.run_next(lambda: 14e-3), "the next step reads it"
    assert encodings.run_next(lambda: 14e-3) and encoder.ran == [9] * 4
    assert encodings.run_next(lambda: 0.0) and encoder.ran == [*[9] * 4, 18], "all the rest, as nobody decodes"
    encodings.take_failed()
    ask(encodings)
    assert not encodings.run_next(pytest.fail), "nothing is wanted, so nothing is asked"


def test_an_encoder_that_raises_between_parts_fails_the_image_and_encodes_on() -> None:
    encoder = Encoder()
    encodings = Encodings(encoder, 256)
    ask(encodings, MINE)
    encodings.run_next(lambda: 14e-3)
    encoder.broken = True
    encodings.run_next(lambda: 14e-3)
    assert NOT_ENCODED in encodings.take_failed()[0][0]
    encoder.broken, encoder.ran = False, []
    ask(encodings, OTHER)
    assert encodings.run_next(lambda: 0.0) and encoder.ran == [27]


def test_a_bad_image_whose_slot_another_has_is_still_the_reason() -> None:
    """The step that read it lands when the next image is encoded already."""
    encoder = Encoder()
    encoder.slots = 1
    encodings, bad = Encodings(encoder, 256), PromptImage(0, 4, b"bad", b"bad")
    for image in (bad, OTHER):
        ask(encodings, image)
        encodings.run_next(lambda: 0.0)
        encodings.take_failed()
    assert encodings.book.find_slots([OTHER], 0, 9) == ((0, 4, 0),)
    assert encodings.explain_failure([OTHER], "plain") == ("plain", None)
    assert encodings.explain_failure([OTHER, bad], "plain")[1] == "images"
