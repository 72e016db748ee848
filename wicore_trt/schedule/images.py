"""Books of an image encoder: which image is in which of its slots, and which one is encoded next.

Plain data; it must not know tensors, pixels' meaning or transports. Invariant: a slot is begun anew only if no sequence
asked for its image since the schedule before, so none that a step reads. Images of a sequence are asked for in order,
so whoever keeps a slot can compute, and nobody waits for ever.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from wicore_trt.arithmetic import div_ceil
from wicore_trt.types import Bytes, ContentSpan

LONGER = 0.4
"""Encoding may lengthen a step that decodes by this share: gaps between tokens stay below 1.5 times the usual."""


def count_parts(left: int, part_s: float, decode_s: float) -> int:
    """Count parts of an encoding, of `left` that take `part_s` each, to run before the next step, which takes
    `decode_s` to decode: all if nothing decodes (0), else about equally many each time, as few times as LONGER allows.
    """
    most = max(1, int(LONGER * decode_s / part_s)) if decode_s and part_s else left
    return div_ceil(left, div_ceil(left, most))


class PromptImage(NamedTuple):
    """Image at tokens [begin, end) of a prompt. `key` names its features: by tenant, salt and digest."""

    begin: int
    end: int
    key: bytes
    pixels: Bytes


def list_images(content: Iterable[ContentSpan], scope: bytes) -> tuple[PromptImage, ...]:
    """List the images of a prompt whose tenant and salt have this `TenantNames.scope`."""
    return tuple(PromptImage(s.begin, s.end, scope + s.digest, s.pixels) for s in content if s.pixels)


class ImageBook:
    """Books of `slots` slots. Each schedule opens with `begin_schedule`; then sequences ask for their next images. At
    most one image is encoded at a time. Ready ones that nobody asks for stay until their slot is needed, the one asked
    for last the longest. `little` tokens of text before an image are computed with it, not in a step of their own."""

    def __init__(self, slots: int, little: int = 0) -> None:
        self._little = little
        self._free = list(range(slots))
        self._slots: dict[bytes, int] = {}  # by key, the least recently asked for first
        self._asked: dict[bytes, set[int]] = {}  # who asked since the schedule began, by key
        self._wanted: dict[bytes, PromptImage] = {}  # asked for and in no slot, in order
        self._stops: dict[int, int] = {}  # where sequences must stop for an image
        self._encoding: bytes | None = None

    @property
    def busy(self) -> bool:
        """True while an image is being encoded."""
        return self._encoding is not None

    @property
    def is_awaited(self) -> bool:
        """True while an image is wanted that is not being encoded."""
        return bool(self._wanted)

    def begin_schedule(self) -> None:
        self._asked.clear()
        self._wanted.clear()
        self._stops.clear()

    def limit_tokens(self, seq_id: int, images: Sequence[PromptImage], start: int, count: int) -> int:
        """Limit tokens from `start` on to those before the first image that is not ready, which is then wanted, and
        keep the ready ones before it. A little text alone is none."""
        self._stops.pop(seq_id, None)
        known = start
        for image in images:
            if start <= image.begin < start + count:
                key = image.key
                self._asked.setdefault(key, set()).add(seq_id)
                if key in self._slots:
                    self._slots[key] = self._slots.pop(key)
                else:
                    self._wanted.setdefault(key, image)
                if key == self._encoding or key not in self._slots:
                    stop = start if known == start and image.begin - start <= self._little else image.begin
                    self._stops[seq_id] = stop
                    return stop - start
                known = image.end
        return count

    def withdraw_sequence(self, seq_id: int) -> None:
        """Forget what a sequence asked for, which will not compute now."""
        self._stops.pop(seq_id, None)
        for key, asked in list(self._asked.items()):
            asked.discard(seq_id)
            if not asked:
                del self._asked[key]
                self._wanted.pop(key, None)

    def is_stopped(self, seq_id: int, computed: int) -> bool:
        """Say whether a sequence with so many tokens has no other to compute before the encoding under way ends."""
        return self.busy and self._stops.get(seq_id) == computed

    def find_slots(self, images: Sequence[PromptImage], start: int, count: int) -> tuple[tuple[int, int, int], ...]:
        """Return `SequenceSlice.images` of tokens [start, start + count), whose images are ready."""
        return tuple(
            (image.begin - start, image.end - image.begin, self._slots[image.key])
            for image in images
            if start <= image.begin < start + count
        )

    def begin_encoding(self) -> tuple[int, PromptImage] | None:
        """Choose the next image and its slot; None while one is encoded, none is wanted or no slot may be taken."""
        if self.busy or not self._wanted:
            return None
        if not self._free:
            unasked = next((key for key in self._slots if key not in self._asked), None)
            if unasked is None:
                return None
            self._free.append(self._slots.pop(unasked))
        key = self._encoding = next(iter(self._wanted))
        self._slots[key] = self._free.pop()
        return self._slots[key], self._wanted.pop(key)

    def end_encoding(self, *, failed: bool) -> set[int]:
        """End the encoding under way; return the sequences that asked for it."""
        key, self._encoding = self._encoding, None
        assert key is not None, "an encoding ended that nobody began"
        if failed:
            self._free.append(self._slots.pop(key))
        return self._asked.get(key, set())

    def forget_images(self, images: Iterable[PromptImage]) -> None:
        """Drop features that may be wrong; these images are encoded anew when they are asked for again."""
        for image in images:
            if image.key in self._slots and image.key != self._encoding:
                self._free.append(self._slots.pop(image.key))

    def check_integrity(self) -> None:
        slots = [*self._free, *self._slots.values()]
        assert sorted(slots) == list(range(len(slots))), "a slot is lost, or in two places"
        assert self._encoding is None or self._encoding in self._slots
        assert not self._wanted.keys() & self._slots.keys()
