"""What every way into the server asks before it takes a call: whose key it is, whether there is a place, how fast.

One object for all servers of a process, so that a tenant's limits are the same whatever it speaks. Must not know what a
call does. Invariant: limits and rates count all calls of this process together.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from wicore_trt.access.counts import CallCounts
from wicore_trt.access.keys import Identity, KeyRing
from wicore_trt.access.rates import Grant, Rates
from wicore_trt.arithmetic import div_ceil
from wicore_trt.config import ServerSettings
from wicore_trt.core.shares import Gate
from wicore_trt.errors import AuthenticationError
from wicore_trt.types import TextOutput, TextRequest

MAX_CALLS = 4096
"""Calls that are open at the same time; more are refused."""
CHARS_PER_TOKEN = 4
"""Of a text that nobody has tokenized yet, roughly."""
OPEN_OUTPUT = 256
"""Tokens that a sequence without max_tokens reserves; what it takes beyond is a debt of its tenant."""
BYTES_PER_TOKEN, LEAST_MESSAGE_BYTES = 128, 4 << 20
"""No token of Gemma's is longer than 93 bytes of UTF-8, so that every prompt that fits the context fits a message."""


@dataclass(frozen=True, slots=True)
class Admission:
    """Keys, places and rates, and how many calls ended how."""

    keys: KeyRing
    calls: Gate
    rates: Rates
    counts: CallCounts = field(default_factory=CallCounts)

    @classmethod
    def of(cls, settings: ServerSettings) -> Admission:
        """Raises ConfigError for a bad keys file."""
        return cls(
            KeyRing.load(settings.api_key, settings.keys_file),
            Gate(MAX_CALLS, "calls"),
            Rates(settings.requests_per_minute, settings.tokens_per_minute),
        )

    def change(self, settings: ServerSettings) -> None:
        """Other keys and rates from now on. Raises ConfigError, and changes nothing, for a bad keys file."""
        self.keys.replace(KeyRing.load(settings.api_key, settings.keys_file))
        self.rates.change(settings.requests_per_minute, settings.tokens_per_minute, self.keys.named)

    def still(self, who: Identity) -> Identity:
        """What the key of an open connection stands for by now. Raises AuthenticationError where it was taken back."""
        found = self.keys.now(who)
        if found is None:
            raise AuthenticationError("The API key of this connection is not valid any more.", fix="Use another one.")
        return found

    @contextmanager
    def metered(self, who: Identity) -> Iterator[Meter]:
        """The tokens of one call, settled when it ends."""
        meter = Meter(self.rates, who)
        try:
            yield meter
        finally:
            meter.settle()


class Meter:
    """What the generation requests of one call reserve and take."""

    def __init__(self, rates: Rates, who: Identity) -> None:
        self._rates, self._who = rates, who
        self._grant: Grant | None = None
        self._used = 0

    def reserve(self, requests: Sequence[TextRequest]) -> None:
        """Raises RateLimitError."""
        tokens = sum(prompt_guess(request) + output_guess(request) for request in requests)
        self._grant = self._rates.take(self._who, tokens, len(requests))

    def begin(self, prompt_tokens: int) -> None:
        """The engine has taken the requests, so that their prompts cost what they have, however they end."""
        self._used += prompt_tokens

    def count(self, output: TextOutput) -> None:
        """Count an output."""
        self._used += len(output.token_ids)

    def settle(self) -> None:
        """The call has ended."""
        if self._grant is not None:
            self._grant.settle(self._used)


def message_limit(max_context: int | None, megabytes: int | None = None) -> int:
    """Bytes of the largest request: what the settings say, else what a context of so many tokens can take."""
    return megabytes << 20 if megabytes is not None else max(LEAST_MESSAGE_BYTES, BYTES_PER_TOKEN * (max_context or 0))


def prompt_guess(request: TextRequest) -> int:
    """Tokens of a prompt before it is tokenized; what is wrong is settled when the request has ended."""
    if request.prompt_token_ids is not None:
        return len(request.prompt_token_ids)
    text = request.prompt if request.prompt is not None else "".join(str(m) for m in request.messages or ())
    return div_ceil(len(text), CHARS_PER_TOKEN)


def output_guess(request: TextRequest) -> int:
    """Tokens that a request may put out; OPEN_OUTPUT for each sequence that has no limit of its own."""
    limit = request.params.max_tokens
    return request.params.n * (OPEN_OUTPUT if limit is None else limit)
