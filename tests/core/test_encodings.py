"""When images are encoded beside steps."""

from __future__ import annotations

from types import SimpleNamespace

from wicore_trt.core.encodings import Encodings
from wicore_trt.schedule.images import PromptImage

OTHER, MINE = (PromptImage(0, 4, bytes([n]), bytes([n])) for n in range(2))


class Encoder:
    slots, tokens, pixel_bytes = 2, 4, 1

    def __init__(self) -> None:
        self.begun: list[bytes] = []

    def begin(self, slot: int, pixels: bytes, beside: bool) -> None:
        self.begun.append(pixels + bytes([beside]))

    def take_ended(self, timeout_s: float = 0.0) -> list[tuple[int, str | None]]:
        return [(0, None)]


def make_step(*slices: tuple[tuple[PromptImage, ...], int]):  # type: ignore[no-untyped-def]
    return SimpleNamespace(slices=[(SimpleNamespace(images=i, computed=0), count) for i, count in slices])


def test_an_encoding_waits_for_one_step_that_reads_an_image_beside_sequences_that_decode() -> None:
    decode, block = ((), 1), ((OTHER,), 5)
    for slices, waits in (([decode, block], True), ([block], False), ([decode], False), ([], False)):
        encoder = Encoder()
        encodings = Encodings(encoder, 256)
        for image in (OTHER, MINE):
            encodings.book.begin_schedule()
            encodings.book.limit_tokens(2, [image], 0, 9)
            encodings.begin_next(make_step(*(slices if image is MINE else ())))
            if image is OTHER:
                assert encodings.take_failed() == {} and encoder.begun.pop() == b"\x00\x00"
        assert encoder.begun == ([] if waits else [bytes([1, decode in slices])]), slices
        encodings.begin_next(make_step(*slices))
        assert encoder.begun == [bytes([1, decode in slices])], "nobody waits for ever"
