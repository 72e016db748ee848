"""Every failure that a user can meet, as one exception tree.

Each class carries the process exit code, the gRPC status name and the HTTP status it maps to, so that the
command line, the gRPC server and the gateway never decide these on their own. This module knows nothing of
gRPC, HTTP or torch. Invariant: a message says what is wrong, and `fix`, when given, says what to do about it.

    WicoreError                     1    INTERNAL             500
    ├── InvalidRequestError         1    INVALID_ARGUMENT     400   one bad field of one request
    ├── NotFoundError               1    NOT_FOUND            404   unknown model, unknown request
    ├── QueueFullError              1    RESOURCE_EXHAUSTED   429   try again after `retry_after_s`
    ├── UnavailableError            1    UNAVAILABLE          503   starting or draining
    ├── DeadlineError               1    DEADLINE_EXCEEDED    504
    ├── RequestCancelledError       1    CANCELLED            499
    ├── AuthenticationError         1    UNAUTHENTICATED      401
    ├── CheckpointError             1    FAILED_PRECONDITION  500   unreadable, incomplete or unknown source
    ├── ConfigError                 3    INVALID_ARGUMENT     400   recipe, environment variable or flag
    ├── EnvironmentUnfitError       4    FAILED_PRECONDITION  500   missing extra, no GPU, used port
    ├── EngineFormatError           4    FAILED_PRECONDITION  500   corrupted, foreign or newer engine
    └── EngineDeadError             1    INTERNAL             500   the step loop ended
"""

from __future__ import annotations

_SHOWN = 60  # characters of a value in a message
_EXTRAS = {
    "torch": "torch",
    "triton": "triton",
    "tensorrt_rtx_bindings": "tensorrt",
    "gguf": "gguf",
    "cuda": "cuda",
    **dict.fromkeys(("grpc", "grpc_health", "grpc_reflection", "grpc_status", "google"), "serve"),
}
"""Module to the extra of this package that brings it."""


class WicoreError(Exception):
    """Base of all errors raised on purpose. `fix` is a sentence or a command that mends the cause."""

    exit_code = 1
    grpc_code = "INTERNAL"
    http_status = 500

    def __init__(self, message: str, *, fix: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message} {self.fix}" if self.fix else self.message


class InvalidRequestError(WicoreError):
    """One request is wrong; the engine is not. `field` names the offending request field."""

    grpc_code = "INVALID_ARGUMENT"
    http_status = 400

    def __init__(self, message: str, *, field: str, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.field = field


class NotFoundError(WicoreError):
    """The named model or request does not exist here."""

    grpc_code = "NOT_FOUND"
    http_status = 404


class QueueFullError(WicoreError):
    """The waiting queue is at its limit; the client may retry after `retry_after_s` seconds."""

    grpc_code = "RESOURCE_EXHAUSTED"
    http_status = 429

    def __init__(self, message: str, *, retry_after_s: float = 1.0, fix: str | None = None) -> None:
        super().__init__(message, fix=fix)
        self.retry_after_s = retry_after_s


class UnavailableError(WicoreError):
    """The server is starting or draining."""

    grpc_code = "UNAVAILABLE"
    http_status = 503


class DeadlineError(WicoreError):
    """The request's deadline passed before it finished."""

    grpc_code = "DEADLINE_EXCEEDED"
    http_status = 504


class RequestCancelledError(WicoreError):
    """The client went away or called Abort."""

    grpc_code = "CANCELLED"
    http_status = 499


class AuthenticationError(WicoreError):
    """No valid API key was presented."""

    grpc_code = "UNAUTHENTICATED"
    http_status = 401


class CheckpointError(WicoreError):
    """A source or unified checkpoint cannot be read, or holds unknown or missing tensors."""

    grpc_code = "FAILED_PRECONDITION"


class ConfigError(WicoreError):
    """A recipe, environment variable or flag is wrong. The message names file and line where there is one."""

    exit_code = 3
    grpc_code = "INVALID_ARGUMENT"
    http_status = 400


class EnvironmentUnfitError(WicoreError):
    """This machine lacks something: an optional extra, a GPU, a free port, disk space."""

    exit_code = 4
    grpc_code = "FAILED_PRECONDITION"


class EngineFormatError(WicoreError):
    """An engine directory is missing, corrupted, truncated, foreign or of a newer format."""

    exit_code = 4
    grpc_code = "FAILED_PRECONDITION"


class EngineDeadError(WicoreError):
    """The step loop ended on an unexpected error; every waiter is told with this."""


class UnwrittenPageError(WicoreError):
    """KV of tokens that nobody computed or loaded was about to be used: a defect of ours, stopped before it is a wrong
    token. It ends the sequence that it concerns."""


def install(*extras: str) -> str:
    """The sentence that says how to install extras: the package is on no index, so from the clone or a wheel."""
    names = ",".join(extras)
    return f"Run in the clone: pip install -e '.[{names}]' (of a wheel: pip install 'FILE.whl[{names}]')."


def missing_package(module: str | None) -> EnvironmentUnfitError | None:
    """The error for a module that cannot be found, None for one that no extra brings."""
    top = (module or "").partition(".")[0]
    if top not in _EXTRAS:
        return None
    return EnvironmentUnfitError(f"This needs {top}, which is not installed.", fix=install(_EXTRAS[top]))


def shown(value: object) -> str:
    """A value as an error shows it: one line, and not long."""
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return "a number of very many digits"
    text = repr(value[:_SHOWN] if isinstance(value, (str, bytes, list, tuple)) else value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def named(name: str) -> str:
    """A name that a file gives something, as an error shows it: as it is when that is one line and not long."""
    return name if name.isprintable() and len(name) <= 2 * _SHOWN else shown(name)
