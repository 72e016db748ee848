"""The model that the campaign's device runs: a hash of what is read from KV memory.

The entry of a position follows from every entry that its attention sees, of both layer groups; a sampled token from
every entry that the last position sees, the sampling parameters, the seed and the output so far. `answer` is the same
without any memory: what an engine must output. Tokens of an image follow from all of it and from what is before it; in
plans they are the numbers of `image_tokens`. Invariant: one wrong byte of KV or of features gives another token, up to
chance.
"""

from __future__ import annotations

import struct
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b

import xxhash

from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import ContentSpan, FinishReason, SamplingParams

VOCAB, EOS = 97, 1
SOFT = 7
"""The id of an image's tokens, and of some text."""
IMAGES, PIXEL_BYTES = 1000, 4
DIGEST = 8
POISON = b"\xdb\x17\xee\x99\xc3\x5a\x81\x42"
NAN = b"\xffNaN\xfe\x81"
_PLACE = struct.Struct("<II")


@dataclass(frozen=True)
class Model:
    """`entry_bytes` of a position by layer group, multiples of DIGEST; `name` is whatever KV values depend on."""

    name: str
    window: int
    entry_bytes: dict[str, int]

    def begin(self, entries: bytes) -> xxhash.xxh3_128:
        """What has read these global entries, all from the first one on."""
        state = xxhash.xxh3_128(self.name.encode())
        state.update(entries)
        return state

    def entry(
        self, seen: xxhash.xxh3_128, window: bytes, token: int, position: int, image: bytes = b""
    ) -> dict[str, bytes]:
        """Entries of a position by group, from the global entries and the local ones of the window before it, or before
        the image whose features and size it knows."""
        state = seen.copy()
        state.update(window)
        state.update(_PLACE.pack(token, position) + image)
        digest = state.digest()
        parts = {GLOBAL: digest[:DIGEST], LOCAL: digest[DIGEST:]}
        return {group: parts[group] * (size // DIGEST) for group, size in self.entry_bytes.items()}

    def sample(
        self,
        seen: xxhash.xxh3_128,
        window: bytes,
        params: SamplingParams,
        seed: int,
        history: Sequence[int],
        prompt: int,
        count: int,
    ) -> int:
        """The token after `count` tokens of output. Of penalized sequences `history` has all tokens, `prompt` of them
        of the prompt."""
        output = history[prompt:]
        kept = (params.temperature, params.top_k, params.top_p, params.min_p, sorted(params.logit_bias.items()))
        parts = [repr(kept), str(count), "" if params.temperature == 0 else str(seed)]
        if params.repetition_penalty != 1:
            parts.append(repr(sorted(set(history))))
        if params.presence_penalty or params.frequency_penalty:
            parts.append(repr(sorted(Counter(output).items())))
        state = seen.copy()
        state.update(window)
        state.update("/".join(parts).encode())
        return state.intdigest() % VOCAB


def permitted(token: int, stop_ids: Sequence[int], suppressed: bool) -> int:
    """What is sampled in place of a token that would end the output too soon."""
    if suppressed and token in stop_ids:
        return next(other for other in range(2, VOCAB) if other not in stop_ids)
    return token


@dataclass(frozen=True)
class Answer:
    tokens: tuple[int, ...]
    reason: FinishReason
    stop_reason: int | None


def image_tokens(name: int, count: int) -> list[int]:
    """An image in the prompts of plans."""
    return [IMAGES + 100 * name + i for i in range(count)]


def whole_images(prompt: Sequence[int], count: int) -> list[int]:
    """A prompt in which images of fewer than `count` tokens are text."""
    found, at = list(prompt), 0
    while at < len(found):
        if found[at] >= IMAGES and found[at : at + count] == image_tokens((found[at] - IMAGES) // 100, count):
            at += count
            continue
        found[at] = SOFT if found[at] >= IMAGES else found[at]
        at += 1
    return found


def list_spans(prompt: Sequence[int], count: int) -> list[ContentSpan]:
    spans = []
    for at, token in enumerate(prompt):
        if token >= IMAGES and (token - IMAGES) % 100 == 0:
            pixels = bytes([(token - IMAGES) // 100]) * PIXEL_BYTES
            spans.append(ContentSpan(at, at + count, blake2b(pixels, digest_size=32).digest(), pixels))
    return spans


def token_ids(prompt: Sequence[int]) -> tuple[int, ...]:
    return tuple(SOFT if token >= IMAGES else token for token in prompt)


def features_of(pixels: bytes) -> bytes:
    return blake2b(b"seen" + pixels, digest_size=DIGEST).digest()


def image_of(features: bytes, count: int) -> bytes:
    """Value that the tokens of an image take from it."""
    return features + bytes([count])


def answer(
    model: Model, prompt: Sequence[int], params: SamplingParams, seed: int, max_context: int, image: int = 0
) -> Answer:
    """Answer of the model to a prompt with images of so many tokens."""
    tokens, window = list(token_ids(prompt)), bytearray()
    spans = {span.begin: span for span in list_spans(prompt, image)}
    size = model.entry_bytes.get(LOCAL, 0)
    seen = model.begin(b"")
    stops = params.stop_token_ids if params.ignore_eos else (EOS, *params.stop_token_ids)
    position = 0
    while True:
        while position < len(tokens):
            span = spans.get(position)
            known = b"" if span is None else image_of(features_of(span.pixels), image)
            before, here = (window, seen) if span is None else (window[:], seen.copy())
            for at in range(position, position + 1 if span is None else span.end):
                visible = before[max(0, at - model.window + 1) * size :] if size else b""
                entry = model.entry(here, bytes(visible), tokens[at], at, known)
                seen.update(entry.get(GLOBAL, b""))
                window += entry.get(LOCAL, b"")
            position = at + 1
        visible = bytes(window[max(0, len(tokens) - model.window) * size :]) if size else b""
        token = model.sample(seen, visible, params, seed, tokens, len(prompt), len(tokens) - len(prompt))
        tokens.append(permitted(token, stops, len(tokens) - len(prompt) < params.min_tokens))
        made = tuple(tokens[len(prompt) :])
        if tokens[-1] in stops and len(made) >= params.min_tokens:
            return Answer(made, FinishReason.STOP, tokens[-1] if tokens[-1] in params.stop_token_ids else None)
        if len(made) == params.max_tokens or len(tokens) >= max_context:
            return Answer(made, FinishReason.LENGTH, None)


def seed_of(seed: int, index: int) -> int:
    """The seed of the index-th sequence of a request, as users were told that it does not change."""
    return int.from_bytes(blake2b(f"{seed}/{index}".encode(), digest_size=8).digest(), "little")
