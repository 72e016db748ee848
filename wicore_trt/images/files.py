"""Make image files of what callers give: bytes, paths, URLs, and parts of messages.

Must not know servers. A server reads URLs alone (`read_image_url`): paths are for programs on their own machine.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.types import ImageFile

MAX_FILE = 20 << 20
"""Bytes of a file."""
MAX_URL = 4096
"""Characters of a URL that is no `data:` URL."""
_URL = re.compile(r"(data|https?):", re.IGNORECASE)


def read_image_url(url: str, field: str, *, crops: bool = False) -> ImageFile:
    """Make the image of a client's URL: `data:`, which is decoded when the image is prepared, or one to be fetched.
    Raises InvalidRequestError (`field`)."""
    kind = _URL.match(url)
    if kind is None or (kind[1].lower() != "data" and len(url) > MAX_URL):
        problem = f"An image's URL begins with data:, https: or http: and is not long, got {shown(url)}."
        raise InvalidRequestError(problem, field=field)
    return ImageFile(url=url, crops=crops, field=field)


def read_image(given: object, field: str, *, crops: bool = False) -> ImageFile:
    """Make an image of a file's bytes, its path, a URL or an ImageFile. Raises InvalidRequestError (`field`)."""
    if isinstance(given, ImageFile):
        return given
    if isinstance(given, (bytes, bytearray, memoryview)):
        return ImageFile(data=bytes(given), crops=crops, field=field)
    if isinstance(given, str) and _URL.match(given):
        return read_image_url(given, field, crops=crops)
    if not isinstance(given, (str, os.PathLike)):
        raise InvalidRequestError(f"An image is bytes, a path or a URL, got {shown(given)}.", field=field)
    try:
        check_size(os.stat(given).st_size, field)
        return ImageFile(data=Path(given).read_bytes(), crops=crops, field=field)
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise InvalidRequestError(f"The image {shown(str(given))} cannot be read: {why}.", field=field) from None


def check_size(size: int, field: str) -> None:
    """Raise InvalidRequestError for a file of more than MAX_FILE bytes."""
    if size > MAX_FILE:
        raise InvalidRequestError(f"The image has more than {MAX_FILE >> 20} MiB.", field=field)


def take_images(prompt: Any, place: str = "messages[{}].content[{}]") -> tuple[Any, tuple[ImageFile, ...]]:
    """Take the images out of a prompt: of a dict its "images"; of messages those of parts {"type": "image", "image": a
    file's bytes, path or URL, "crops": whether to crop} and of OpenAI's {"type": "image_url"}. Return the prompt with
    parts {"type": "image"} in their places, and the images. `place` names that of a part for errors. Raises
    InvalidRequestError."""
    found: list[ImageFile] = []
    if isinstance(prompt, Mapping) and prompt.get("images") is not None:
        if not isinstance(prompt["images"], (list, tuple)):
            raise InvalidRequestError("images must be a list.", field="images")
        found = [read_image(one, f"images[{i}]") for i, one in enumerate(prompt["images"])]
        return {name: value for name, value in prompt.items() if name != "images"}, tuple(found)
    if not isinstance(prompt, (list, tuple)) or not any(isinstance(turn, Mapping) for turn in prompt):
        return prompt, ()
    turns = []
    for index, turn in enumerate(prompt):
        content = turn.get("content") if isinstance(turn, Mapping) else None
        if isinstance(content, (list, tuple)):
            parts = [_take_image(place.format(index, i), part, found) for i, part in enumerate(content)]
            turn = {**turn, "content": parts}
        turns.append(turn)
    return turns, tuple(found)


def _take_image(where: str, part: Any, found: list[ImageFile]) -> Any:
    match part:
        case {"type": "image", "image": image, **others}:
            found.append(read_image(image, where, crops=bool(others.pop("crops", False))))
        case {"type": "image_url", "image_url": {"url": str() as url, **more}, **others}:
            found.append(read_image_url(url, where, crops=more.get("detail") == "high"))
        case _:
            return part
    return {**others, "type": "image"}
