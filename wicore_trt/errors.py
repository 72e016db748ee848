"""Exceptions for every failure that a user can meet, as one tree.

Each class carries the process exit code and the gRPC status name that it maps to. This module knows nothing of gRPC or
torch. Invariant: a message says what is wrong, and `fix`, when given, says what to do about it.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from reprlib import Repr
from typing import Any

UNAVAILABLE_RETRY_S = 1.0
"""Seconds after which a client may ask again that the server could not serve for now."""
MAX_SHOWN, MAX_TOLD = 80, 512  # characters of a value in a message; of a message to a client
_EXTRAS = {
    "torch": "torch", "triton": "triton", "tensorrt_rtx_bindings": "tensorrt", "gguf": "gguf", "cuda": "cuda",
    **dict.fromkeys(("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google"), "serve"),
    **dict.fromkeys(("starlette", "uvicorn", "httptools", "websockets", "msgspec", "llguidance", "PIL"), "serve"),
    **dict.fromkeys(("prometheus_client", "smg_grpc_proto"), "serve"),
    "aiohttp": "bench", "opentelemetry": "otel",
}  # fmt: skip
"""Module to the extra of this package that brings it."""


class WicoreError(Exception):
    """Base of all errors raised on purpose. `fix` is a sentence or a command that mends the cause."""

    exit_code = 1
    grpc_code = "INTERNAL"
    retry_after_s: float | None = None
    """Seconds after which a client may ask again, None where that does not help."""

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} {self.fix}" if self.fix else self.message

    @classmethod
    def name_kind(cls) -> str:
        """Name the kind of error for programs: QueueFullError is queue_full."""
        return re.sub(r"(?<!^)(?=[A-Z])", "_", cls.__name__.removesuffix("Error")).lower()

    def tell_client(self) -> str:
        """Return the text for a client, within the limits that clients have for metadata."""
        return shortened(str(self), MAX_TOLD)


class InvalidRequestError(WicoreError):
    """Request that is wrong; the engine is not. `field` names the offending request field."""

    grpc_code = "INVALID_ARGUMENT"

    def __init__(self, message: str, *, field: str, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.field = field


class ContextLengthError(InvalidRequestError):
    """Prompt of at least `tokens` tokens, of which `most` fit; both are 0 when another process reported it."""

    def __init__(self, message: str, *, field: str, fix: str | None = None, tokens: int = 0, most: int = 0) -> None:
        super().__init__(message, field=field, fix=fix)
        self.tokens, self.most = tokens, most

    @classmethod
    def from_counts(
        cls, tokens: int, context: int, field: str, *, built: int = 0, least: bool = False
    ) -> ContextLengthError:
        """Make the error in the words that clients search for. `context` counts the tokens of prompt and output;
        `built` is the engine's own limit, where known. With `least` the prompt may have more than `tokens`."""
        message = (
            f"This model's maximum context length is {context} tokens, one of them for the output, and the prompt has "
            f"{'at least ' if least else ''}{tokens}."
        )
        fix = "Shorten it."
        if built:
            longer = "a larger --max-context" if context < built else "an engine that was built for more"
            fix = f"Shorten it, or serve with {longer}."
        return cls(message, field=field, fix=fix, tokens=tokens, most=context - 1)


class NotFoundError(WicoreError):
    """The named model or request does not exist here."""

    grpc_code = "NOT_FOUND"


class ModelNotFoundError(NotFoundError):
    """Another model than the served one was asked for."""

    field = "model"


class QueueFullError(WicoreError):
    """The waiting queue is at its limit; the client may retry after `retry_after_s` seconds."""

    grpc_code = "RESOURCE_EXHAUSTED"

    retry_after_s: float
    pace_s: float | None
    """Seconds between two places of the queue that become free, 0 where not known; None where the queue is not full."""

    def __init__(
        self, message: str, *, retry_after_s: float = 1.0, fix: str | None = None, pace_s: float | None = None
    ) -> None:
        super().__init__(message, fix=fix)
        self.retry_after_s, self.pace_s = retry_after_s, pace_s


class RateLimitError(QueueFullError):
    """The tenant has used up its requests or tokens of this minute."""


class UnavailableError(WicoreError):
    """The server is starting or draining."""

    grpc_code = "UNAVAILABLE"
    retry_after_s = UNAVAILABLE_RETRY_S


class DeadlineError(WicoreError):
    """The request's deadline passed before it finished."""

    grpc_code = "DEADLINE_EXCEEDED"


class RequestCancelledError(WicoreError):
    """The client went away or called Abort."""

    grpc_code = "CANCELLED"


class AuthenticationError(WicoreError):
    """No valid API key was presented."""

    grpc_code = "UNAUTHENTICATED"


class ForbiddenError(WicoreError):
    """The key is valid, and its owner may not do this."""

    grpc_code = "PERMISSION_DENIED"


class CheckpointError(WicoreError):
    """A source or unified checkpoint cannot be read, or holds unknown or missing tensors."""

    grpc_code = "FAILED_PRECONDITION"


class ConfigError(WicoreError):
    """A recipe, environment variable or flag is wrong. The message names file and line where there is one."""

    exit_code = 3
    grpc_code = "INVALID_ARGUMENT"


class EnvironmentUnfitError(WicoreError):
    """Machine that lacks something: an optional extra, a GPU, a free port, disk space."""

    exit_code = 4
    grpc_code = "FAILED_PRECONDITION"


class EngineFormatError(WicoreError):
    """An engine directory is missing, corrupted, truncated, foreign or of a newer format."""

    exit_code = 4
    grpc_code = "FAILED_PRECONDITION"


class EngineDeadError(WicoreError):
    """The step loop ended on an unexpected error; every waiting request fails with this."""

    grpc_code = "UNAVAILABLE"
    retry_after_s = UNAVAILABLE_RETRY_S


class UnwrittenPageError(WicoreError):
    """KV that nobody computed or loaded was about to be used: a defect of ours, which ends the sequence."""


class RankError(RuntimeError):
    """Failure of another rank of a split engine: it ended, or it does not answer. Starting again may help."""


def error_named(
    kind: str, message: str, *, fix: str | None, field: str | None = None, retry_after_s: float | None = None
) -> WicoreError:
    """Make an error that another process sent by the name of its class. It is a WicoreError where that class is not of
    this module or needs more arguments than were sent."""
    given = {"fix": fix, "field": field, "retry_after_s": retry_after_s}
    made: Any = globals().get(kind, WicoreError)
    try:
        error: WicoreError = made(message, **{name: value for name, value in given.items() if value is not None})
    except TypeError:
        error = WicoreError(message, fix=fix)
    return error


def install_command(*extras: str) -> str:
    """Return the sentence that says how to install extras: from the clone or a wheel, as the package is on no index."""
    names = ",".join(extras)
    return f"Run in the clone: pip install -e '.[{names}]' (of a wheel: pip install 'FILE.whl[{names}]')."


def missing_package(module: str | None) -> EnvironmentUnfitError | None:
    """Make the error for a module that cannot be found; None for a module that no extra brings."""
    top = (module or "").partition(".")[0]
    if top not in _EXTRAS:
        return None
    return EnvironmentUnfitError(f"This needs {top}, which is not installed.", fix=install_command(_EXTRAS[top]))


def list_installed(packages: Iterable[str]) -> dict[str, str]:
    """List the versions of the installed `packages`."""
    found = {}
    for package in packages:
        with suppress(PackageNotFoundError):
            found[package] = version(package)
    return found


def check_extras(*extras: str) -> None:
    """Raise EnvironmentUnfitError when a module of these extras is missing, before processes need it."""
    for module, extra in _EXTRAS.items():
        if extra in extras and find_spec(module) is None and (lacking := missing_package(module)):
            raise lacking


_BRIEF = Repr()
_BRIEF.maxlevel = 4
_BRIEF.maxdict = _BRIEF.maxlist = _BRIEF.maxtuple = _BRIEF.maxset = _BRIEF.maxfrozenset = 20
_BRIEF.maxstring = _BRIEF.maxlong = _BRIEF.maxother = 2 * MAX_SHOWN  # what is longer is cut by us


def shown(value: object) -> str:
    """Format any value for an error: one line, and short."""
    try:
        text = repr(value[:MAX_SHOWN]) if isinstance(value, (str, bytes)) else _BRIEF.repr(value)
    except Exception:  # an int of more digits than Python prints, or an object whose __repr__ fails
        return f"a {type(value).__name__}"
    return shortened(text)


def shortened(text: str, most: int = MAX_SHOWN) -> str:
    """Return the text, cut and ended with dots when it is longer than `most` characters."""
    return text if len(text) <= most else f"{text[: most - 3]}..."


def first_fault(error: Any, whole: str = "it") -> str:
    """Describe the first error of pydantic's ValidationError; `whole` names the validated object."""
    first = error.errors(include_url=False)[0]
    return f"{named('.'.join(map(str, first['loc']))) or whole} is {shown(first['input'])}: {first['msg']}"


def named(name: str) -> str:
    """Format a name from a file for an error: unchanged when it is one line and not long."""
    return name if name.isprintable() and len(name) <= 2 * MAX_SHOWN else shown(name)


def list_some(names: Collection[str], most: int = 4) -> str:
    """Format the first of several names as `named` does, and the number of the others."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(named, [*names][:most])) + more
