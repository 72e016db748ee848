"""The books of an image encoder, against random askers: nobody waits for ever, no slot changes while it is read."""

from __future__ import annotations

import random
from hashlib import blake2b

from hypothesis import given, settings
from hypothesis import strategies as st

from wicore_trt.schedule.images import ImageBook, PromptImage, list_images
from wicore_trt.types import ContentSpan

TOKENS = 3


def image(begin: int, name: int) -> PromptImage:
    return PromptImage(begin, begin + TOKENS, bytes([name]), bytes([name]))


class Reader:
    """A prompt with images and text between them; its features are read from `slots`, by key."""

    def __init__(self, seq_id: int, names: list[int], rng: random.Random) -> None:
        self.seq_id, self.computed, at = seq_id, 0, 0
        self.images = []
        for name in names:
            at += rng.randrange(3)
            self.images.append(image(at, name))
            at += TOKENS
        self.total = at + 1

    def restart(self) -> None:
        self.computed = 0


@settings(max_examples=300, deadline=None)
@given(
    st.integers(1, 4),
    st.lists(st.lists(st.integers(0, 5), max_size=6), min_size=1, max_size=6),
    st.integers(0, 1 << 30),
)
def test_every_prompt_is_computed_with_its_own_features(slots: int, prompts: list[list[int]], seed: int) -> None:
    """With one slot and many images too: encodings end late or fail, prompts are preempted or begin anew, and steps
    compute whole images. A slot is not begun while a step that was made up reads it."""
    rng = random.Random(seed)
    book, held = ImageBook(slots, seed % 3), [b""] * slots  # what the encoder's slots hold
    readers = [Reader(n, names, rng) for n, names in enumerate(prompts)]
    encoding: tuple[int, PromptImage] | None = None
    begun = 0
    for turn in range(20_000):
        live = [reader for reader in readers if reader.computed < reader.total]
        if not live:
            break
        book.begin_schedule()
        step: list[tuple[Reader, int]] = []
        for reader in live:
            count = book.limit_tokens(reader.seq_id, reader.images, reader.computed, reader.total - reader.computed)
            room = rng.randrange(1, 12)
            cut = next((i for i in reader.images if i.begin < reader.computed + min(count, room) < i.end), None)
            if cut is not None:
                room = (cut.begin if cut.begin > reader.computed else cut.end) - reader.computed
            if turn < 5000 and rng.random() < 0.05:
                book.withdraw_sequence(reader.seq_id)
                reader.restart()
            elif min(count, room):
                step.append((reader, min(count, room)))
        chosen = book.begin_encoding()
        book.check_integrity()
        read = {}
        for reader, count in step:
            for first, tokens, slot in book.find_slots(reader.images, reader.computed, count):
                assert tokens == TOKENS
                read[slot] = next(i for i in reader.images if i.begin == reader.computed + first).key
        if chosen is not None:
            assert encoding is None and chosen[0] not in read
            encoding, begun = chosen, begun + 1
            held[chosen[0]] = b"begun"
        for slot, key in read.items():
            assert held[slot] == key
        for reader, count in step:
            reader.computed += count
        if encoding is not None and rng.random() < 0.5:
            failed = turn < 5000 and rng.random() < 0.2
            asked = book.end_encoding(failed=failed)
            assert asked <= {reader.seq_id for reader in live}
            held[encoding[0]] = b"failed" if failed else encoding[1].key
            encoding = None
        if turn < 5000 and rng.random() < 0.02:
            book.forget_images(readers[0].images)
    assert all(reader.computed >= reader.total for reader in readers), "somebody waits for ever"
    if encoding is not None:
        book.end_encoding(failed=False)
    book.check_integrity()


def ask(book: ImageBook, seq_id: int, *images: PromptImage, start: int = 0) -> int:
    return book.limit_tokens(seq_id, images, start, 100)


def test_an_image_asked_for_by_several_is_encoded_once() -> None:
    book = ImageBook(2)
    for turn in range(3):
        book.begin_schedule()
        assert (ask(book, 1, image(4, 7)), ask(book, 2, image(9, 7), start=2)) == (4, 7)
        assert (book.begin_encoding() is None) == bool(turn)
    assert book.end_encoding(failed=False) == {1, 2}
    book.begin_schedule()
    assert ask(book, 1, image(4, 7)) == ask(book, 2, image(9, 7), start=2) == 100
    assert book.begin_encoding() is None


def test_a_little_text_waits_for_the_image_behind_it() -> None:
    """But not for one behind a ready image."""
    book = ImageBook(2, 4)
    book.begin_schedule()
    assert (ask(book, 1, image(4, 7)), ask(book, 2, image(5, 7))) == (0, 5)
    book.begin_encoding()
    assert book.is_stopped(1, 0) and book.is_stopped(2, 5) and not book.is_stopped(2, 0)
    book.end_encoding(failed=False)
    book.begin_schedule()
    assert ask(book, 1, image(4, 7), image(8, 9)) == 8


def test_the_image_asked_for_least_recently_leaves() -> None:
    book = ImageBook(2)
    for name in (1, 2, 1, 3):
        book.begin_schedule()
        if ask(book, 1, image(0, name)) == 0:
            assert book.begin_encoding() is not None
            book.end_encoding(failed=False)
    book.begin_schedule()
    assert ask(book, 1, image(0, 1)) == 100 and ask(book, 1, image(0, 2)) == 0


def test_one_that_waits_is_stopped_only_while_an_image_is_encoded() -> None:
    """Others then run ahead; as soon as it may go on, it is asked again."""
    book = ImageBook(1)
    book.begin_schedule()
    ask(book, 1, image(4, 1))
    assert not book.is_stopped(1, 4)
    book.begin_encoding()
    assert book.is_stopped(1, 4) and not book.is_stopped(1, 2) and not book.is_stopped(2, 4)
    book.withdraw_sequence(1)
    assert not book.is_stopped(1, 4)


def test_names_tell_tenants_and_contents_apart() -> None:
    """And no place: the same image anywhere has the same features. Spans without pixels are no images."""
    digests = [blake2b(bytes([n]), digest_size=32).digest() for n in range(2)]
    spans = [ContentSpan(8 * n, 8 * n + 4, digests[n % 2], b"p") for n in range(4)]
    keys = [
        i.key for scope in (b"a" * 32, b"b" * 32) for i in list_images([*spans, ContentSpan(40, 44, digests[0])], scope)
    ]
    assert len(keys) == 8 and len(set(keys)) == 4
