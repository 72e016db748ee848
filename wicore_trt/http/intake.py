"""How the body of a request comes in: bounded, in time, parsed, checked.

Must not know what a request does. Invariants: nothing is kept beyond the limit, and nothing is unpacked; a body that
does not come ends its request; all bodies that are here together, and a tenant's among them, are bounded; whatever
bytes come, the answer is a model or a WicoreError.
"""

from __future__ import annotations

import asyncio
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive

from wicore_trt.arithmetic import div_ceil
from wicore_trt.core.shares import fits
from wicore_trt.errors import InvalidRequestError, QueueFullError, shown
from wicore_trt.http.errors import ClientGoneError, HttpError
from wicore_trt.http.fields import Place

READ_S = 20.0
"""A body that has not come by then is given up."""
BLOCK = 1 << 16
"""Bytes by which room for bodies is shared out."""
ROOM = 256 << 20
"""Bytes of all bodies that are here: being read, waiting for a thread that tokenizes, or part of an open request."""
MANY_ITEMS = 50_000
"""Objects, lists, items and texts that a body may have; a text costs its own length in memory, an empty list
25 times that. A prompt of token ids has one item for each, so that who serves long contexts takes more."""
DIGITS = 4
"""Digits that a body may have for each of its items. A number of thousands of digits takes a tenth of a millisecond."""
UNIONS = {
    "prompt": "a text, a list of texts, token ids or a list of token ids",
    "stop": "a text or a list of at most 16 texts",
    "input": "a text or a list of items",
    "system": "a text or a list of text blocks",
}
"""Fields that take several types, and these in words."""
_ITEMS = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+(?:"|\\?\Z)|[,\[{]', re.DOTALL)
"""Strings, whose commas are text, and what begins or parts items. Possessive, and a string that never ends goes to the
end of the body: so whatever comes is read once."""

Model = TypeVar("Model", bound=BaseModel)


class Room:
    """Memory for bodies that are read, wait for a thread or are being answered, shared among tenants."""

    def __init__(self, places: int = ROOM // BLOCK) -> None:
        self._places = places
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        return self._taken.total()

    @contextmanager
    def hold(self, tenant: str) -> Iterator[Hold]:
        """Room for one body, none at first."""
        hold = Hold(self, tenant)
        try:
            yield hold
        finally:
            self.give(tenant, hold.blocks)

    def take(self, tenant: str, blocks: int) -> None:
        """Raises QueueFullError when there is none for this tenant."""
        own, taken = self._taken[tenant], self._taken.total()
        if taken + blocks > self._places or (tenant and not fits(self._places, taken - own, own, blocks)):
            raise QueueFullError("There is no room for more request bodies of yours now.")
        self._taken[tenant] += blocks

    def give(self, tenant: str, blocks: int) -> None:
        """Have some of it back."""
        self._taken[tenant] -= blocks
        if not self._taken[tenant]:
            del self._taken[tenant]


class Hold:
    """What one body has."""

    def __init__(self, room: Room, tenant: str) -> None:
        self._room, self._tenant = room, tenant
        self.blocks = 0

    def grow(self, size: int) -> None:
        """Have room for so many bytes. Raises QueueFullError."""
        more = div_ceil(size, BLOCK) - self.blocks
        if more > 0:
            self._room.take(self._tenant, more)
            self.blocks += more

    def fit(self, size: int) -> None:
        """Have room for so many bytes and no more. Raises QueueFullError."""
        self.grow(size)
        self._room.give(self._tenant, self.blocks - div_ceil(size, BLOCK))
        self.blocks = div_ceil(size, BLOCK)


def check_kind(headers: Mapping[str, str]) -> None:
    """Raise HttpError for a body that is not plain JSON.

    This is also what keeps web pages of strangers from posting here: a browser sends JSON only after asking.
    """
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HttpError(415, "The body must be JSON.", fix="Send the header content-type: application/json.")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "Compressed bodies are not taken.", fix="Send the body as it is.")


async def read_body(receive: Receive, headers: Headers, limit: int, hold: Hold) -> bytes:
    """The body. Raises HttpError (too long, too slow, no JSON), QueueFullError, ClientGoneError."""
    check_kind(headers)
    too_long = HttpError(413, f"The body has more than {limit} bytes.", fix="Shorten it, or set server.max_message_mb.")
    announced = headers.get("content-length", "0")
    if not announced.isdecimal() or len(announced) > 18 or int(announced) > limit:
        raise too_long
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(READ_S):
            while True:
                message = await receive()
                if message["type"] == "http.disconnect":
                    raise ClientGoneError
                part: bytes = message.get("body", b"")
                size += len(part)
                if size > limit:
                    raise too_long
                hold.grow(size)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise HttpError(408, f"The body did not come within {READ_S:g} s.") from None


def decoded(raw: bytes, most_items: int) -> dict[str, Any]:
    """The JSON object of a body. Raises InvalidRequestError for anything else."""
    if sum(map(raw.count, (b",", b"[", b"{"))) > most_items:
        items = sum(1 for _ in islice(_ITEMS.finditer(raw), most_items + 1))
        if items > most_items:
            raise _bad(f"it has more than {most_items} items")
    if len(raw) - len(raw.translate(None, b"0123456789")) > DIGITS * most_items:
        raise _bad(f"it has more than {DIGITS * most_items} digits")
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise _bad("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise _bad("it is not UTF-8") from None
    except ValueError as error:
        raise _bad(str(error)) from None
    if not isinstance(value, dict):
        raise _bad("it is no JSON object")
    return value


def validated(model: type[Model], fields: Place | None, value: Mapping[str, Any]) -> Model:
    """The body as a model. Raises InvalidRequestError with the name of the first field that is wrong."""
    if fields is not None:
        fields.check(value)
    try:
        return model.model_validate(value)
    except ValidationError as error:
        raise _fault(error) from None
    except RecursionError:
        raise _bad("it is nested too deeply") from None


def _bad(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"The body cannot be read: {why}.", field="body")


def _fault(error: ValidationError) -> InvalidRequestError:
    """The first fault, by its path."""
    first = error.errors(include_url=False, include_context=False)[0]
    whole = str(first["loc"][0]) if first["loc"] else "body"
    if whole in UNIONS:  # the path goes on with the name of an alternative, which no client knows
        return InvalidRequestError(f"{whole} must be {UNIONS[whole]}, got {shown(first['input'])}.", field=whole)
    path = whole + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"][1:])[:128]
    if first["type"] == "missing":
        return InvalidRequestError(f"{path} is missing.", field=path)
    return InvalidRequestError(f"{path}: {first['msg']}, got {shown(first['input'])}.", field=path)
