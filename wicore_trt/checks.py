"""Checks of single values that a client sends: type, range, Unicode.

Knows values and the names of their fields; it must not know requests. Invariant: for any object, a check returns or
raises an InvalidRequestError that names the field in one short line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sized
from numbers import Integral

from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.request_fields import RequestField

MAX_TOKEN_ID = (1 << 31) - 1
_INFINITE = (float("inf"), float("-inf"))


def check_finite(name: str, value: object, low: float, high: float, *, open_low: bool = False) -> None:
    """Raise unless `value` is a number in [low, high], or (low, high]."""
    if not isinstance(value, (int, float)) or isinstance(value, bool) or value != value or value in _INFINITE:
        raise InvalidRequestError(f"{name} must be a finite number, got {shown(value)}.", field=name)
    if value < low or value > high or (open_low and value == low):
        bracket = "(" if open_low else "["
        raise InvalidRequestError(f"{name} must be in {bracket}{low:g}, {high:g}], got {shown(value)}.", field=name)


def check_integer(name: str, value: object, low: int, high: int) -> None:
    """Raise unless `value` is an int in [low, high]."""
    if not isinstance(value, int) or isinstance(value, bool) or not low <= value <= high:
        raise InvalidRequestError(f"{name} must be an integer in [{low}, {high}], got {shown(value)}.", field=name)


def check_text(name: str, value: object, longest: int) -> None:
    """Raise unless `value` is a str of valid Unicode and at most `longest` characters."""
    if not isinstance(value, str) or len(value) > longest:
        raise InvalidRequestError(f"{name} must be text of at most {longest} characters.", field=name)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise InvalidRequestError(f"{name} is not valid Unicode: {error.reason}.", field=name) from None


def check_field(row: RequestField, value: object) -> None:
    """Raise unless `value` is of the kind and within the limits of its row."""
    name, low, high = row.name, row.low, row.high
    if value is None and row.optional:
        return
    match row.kind:
        case "integer":
            check_integer(name, value, int(low), int(high))
        case "number":
            check_finite(name, value, low, high, open_low=row.open_low)
        case "flag":
            if not isinstance(value, bool):
                raise InvalidRequestError(f"{name} must be true or false, got {shown(value)}.", field=name)
        case "text":
            check_text(name, value, int(high))
        case "texts":
            texts = value if isinstance(value, (tuple, list)) and len(value) <= row.most else [None]
            for text in texts:
                if not isinstance(text, str) or not low <= len(text) <= high:
                    limits = f"at most {row.most} non-empty strings of up to {high} characters"
                    raise InvalidRequestError(f"{name} takes {limits}.", field=name)
                check_text(name, text, int(high))
        case "tokens":
            if not isinstance(value, (tuple, list)) or len(value) > row.most:
                raise InvalidRequestError(f"{name} takes at most {row.most} tokens.", field=name)
            for token in value:
                check_integer(name, token, 0, MAX_TOKEN_ID)
        case "biases":
            if not isinstance(value, Mapping) or len(value) > row.most:
                limits = f"maps token ids to numbers, at most {row.most} of them"
                raise InvalidRequestError(f"{name} {limits}.", field=name)
            for token, bias in value.items():
                check_integer(name, token, 0, MAX_TOKEN_ID)
                check_finite(name, bias, low, high)


def check_count(items: Sized, most: int, field: str) -> None:
    if len(items) > most:
        raise InvalidRequestError(f"{field} has {len(items)} items; at most {most} are taken.", field=field)


def as_token_ids(ids: object) -> tuple[int, ...]:
    """Convert ids to plain ints. Raises for anything but integers in [0, 2**31); bools are no integers here."""
    name = "prompt_token_ids"
    if isinstance(ids, (str, bytes)) or not isinstance(ids, Iterable):
        raise InvalidRequestError(f"{name} must be a sequence of token ids, got {shown(ids)}.", field=name)
    found = ids if isinstance(ids, tuple) else tuple(ids)
    if set(map(type, found)) - {int}:
        for bad in (i for i in found if not isinstance(i, Integral) or isinstance(i, bool)):
            raise InvalidRequestError(f"{name} must be integers, got {shown(bad)}.", field=name)
        found = tuple(map(int, found))
    if found and not 0 <= min(found) <= max(found) <= MAX_TOKEN_ID:
        bad = next(i for i in found if not 0 <= i <= MAX_TOKEN_ID)
        raise InvalidRequestError(f"{name} must be token ids, got {shown(bad)}.", field=name)
    return found
