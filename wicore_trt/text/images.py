"""Write the places of images into prompts, as Gemma 3's processor does, and find them among token ids.

Must not know files or templates. Invariant: each image has its tokens at one place, or the caller gets an
InvalidRequestError.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from wicore_trt.errors import InvalidRequestError
from wicore_trt.types import CONTENT_DIGEST_BYTES, ContentSpan, ImageFile, ImageInfo, TextRequest

IMAGE_MARK = "<start_of_image>"
"""The place of an image in a prompt, and in a rendered conversation."""
IMAGE_TOKENS = (IMAGE_MARK, "<image_soft_token>", "<end_of_image>")
_SEQUENCE = f"\n\n{IMAGE_MARK}<end_of_image>\n\n"


def is_image_part(part: object) -> bool:
    return isinstance(part, Mapping) and part.get("type") == "image"


def list_image_roles(messages: object) -> list[str]:
    """List the role of the turn of each image part, in order; whatever is no message has none."""
    turns = messages if isinstance(messages, Sequence) else ()
    return [
        str(turn.get("role"))
        for turn in turns
        if isinstance(turn, Mapping) and isinstance(turn.get("content"), (list, tuple))
        for part in turn["content"]
        if is_image_part(part)
    ]


def check_images(request: TextRequest, info: ImageInfo | None, most: int) -> None:
    """Raise InvalidRequestError, with the image's field, for images of a request that cannot be where they are: of an
    engine that reads none, more than `most` with their crops, in a turn that takes none, or without a place."""
    images, count = request.images, 0
    for image in images:
        if info is None:
            raise InvalidRequestError(
                "This engine reads text alone, no images.", field=image.field,
                fix="Gemma 3 of 4B, 12B and 27B see, unless they were built with --text-only.",
            )  # fmt: skip
        count += max(1, len(image.pixels))
        if count > most:
            problem = f"A request has at most {most} images, crops included (scheduler.max_images)."
            raise InvalidRequestError(problem, field=image.field)
    if not images:
        return
    if request.truncate_prompt_tokens is not None:
        raise InvalidRequestError("A prompt with images is not truncated.", field="truncate_prompt_tokens")
    if request.prompt_token_ids is not None:
        raise InvalidRequestError("Images need messages, or a prompt as text.", field=images[0].field)
    if request.messages is None:
        return
    roles = list_image_roles(request.messages)
    for image, role in zip(images, roles, strict=False):
        if role in ("system", "developer"):  # Gemma's template reads the text alone of such a turn
            raise InvalidRequestError(f"A turn of role {role} takes no image; send it as the user.", field=image.field)
    if len(roles) != len(images):
        problem = f'The messages have {len(roles)} parts {{"type": "image"}} for {len(images)} images.'
        raise InvalidRequestError(problem, field=images[0].field)


def expand_marks(texts: Sequence[str], images: Sequence[ImageFile], field: str) -> list[str]:
    """Write the text of each image, and of its crops, at its mark; soft tokens come with `insert_soft_tokens`. The text
    follows transformers' Gemma3Processor.replace_image_token. Raises InvalidRequestError unless there is a mark for
    each image."""
    cut = [text.split(IMAGE_MARK) for text in texts]
    marks = sum(map(len, cut)) - len(cut)
    if marks != len(images):
        what = "The chat template writes" if field == "messages" else f"The prompt ({IMAGE_MARK}) has"
        problem = f"{what} {marks} places for {len(images)} images."
        raise InvalidRequestError(problem, field=images[0].field if images else field)
    left = iter(images)
    return ["".join([head, *(_describe_image(next(left)) + part for part in rest)]) for head, *rest in cut]


def _describe_image(image: ImageFile) -> str:
    crops = len(image.pixels) - 1
    if not crops:
        return _SEQUENCE
    more = " ".join([_SEQUENCE] * crops)
    return f"Here is the original image {_SEQUENCE} and here are some crops to help you see better {more}"


def insert_soft_tokens(ids: Sequence[int], info: ImageInfo, images: Sequence[ImageFile]) -> list[int]:
    """Insert the tokens of images, and of their crops, behind their begins. Raises InvalidRequestError where the text
    has others."""
    if ids.count(info.begin_id) != sum(len(image.pixels) for image in images) or info.soft_id in ids:
        raise InvalidRequestError("The text has tokens of images beside those of its images.", field=images[0].field)
    found = list[int]()
    for token in ids:
        found += [token, *[info.soft_id] * info.tokens] if token == info.begin_id else [token]
    return found


def make_spans(ids: Sequence[int], info: ImageInfo, images: Sequence[ImageFile]) -> tuple[ContentSpan, ...]:
    """Make the content of a prompt of `insert_soft_tokens`: the soft tokens behind each begin, and their pixels."""
    begins = [at + 1 for at, token in enumerate(ids) if token == info.begin_id]
    spans = [ContentSpan(begin, begin + info.tokens, bytes(CONTENT_DIGEST_BYTES)) for begin in begins]
    return fill_spans(spans, images)


def fill_spans(spans: Sequence[ContentSpan], images: Sequence[ImageFile]) -> tuple[ContentSpan, ...]:
    """Put the pixels of images, and of their crops, and the digests of these into spans."""
    parts = [part for image in images for part in zip(image.digests, image.pixels, strict=True)]
    return tuple(replace(span, digest=d, pixels=p) for span, (d, p) in zip(spans, parts, strict=True))


def blank_image(image: ImageFile) -> ImageFile:
    """Make what stands for an image without crops until it is prepared."""
    return replace(image, data=b"", url="", pixels=(b"",), digests=(bytes(CONTENT_DIGEST_BYTES),))
