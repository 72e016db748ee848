"""The fields of a generation, one row each: kind, limits, and the name that each API gives it.

Plain data; must not know transports, bodies or messages. Invariant: the rows SAMPLING are the fields of
`types.SamplingParams` but its constraint, and only the row of a field holds its limit.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

MAX_LOGPROBS = 20
MAX_PRIORITY = 2
"""Priorities are in [-MAX_PRIORITY, MAX_PRIORITY]: what waits for its turn is overtaken for a bounded time alone."""
MAX_SESSION = 256
MAX_CACHE_SALT = 256
MAX_TIMEOUT_S = 1e12
MAX_TTL_S = 30 * 86_400.0
MAX_TOKENS = 1 << 31


@dataclass(frozen=True, slots=True)
class RequestField:
    """Field of `types.SamplingParams`, `types.TextRequest` or `types.CacheHints`.

    `low` and `high` bound numbers, the numbers of `biases`, the lengths of `texts` and of a `text`. `open_low`: `low`
    itself is excluded. `most`: items at most. `optional`: None is a value. `http` and `grpc` are paths in a body and in
    GenerateRequest, "" where that API lacks the field; rows of SAMPLING default to `name`. `router` is the name in the
    routers' protocol; `unset` says how that protocol omits it: never, by absence, by 0, or always ("unserved").
    """

    name: str
    kind: Literal["integer", "number", "flag", "text", "texts", "tokens", "biases"]
    low: float = 0
    high: float = 0
    open_low: bool = False
    most: int = 0
    optional: bool = False
    http: str = ""
    grpc: str = ""
    router: str = ""
    unset: Literal["never", "absent", "zero", "unserved"] = "never"


_SAMPLING = (
    RequestField("max_tokens", "integer", 0, MAX_TOKENS, unset="absent", optional=True),
    RequestField("min_tokens", "integer", 0, MAX_TOKENS),
    RequestField("temperature", "number", 0, 100, unset="absent"),
    RequestField("top_k", "integer", 0, MAX_TOKENS),
    RequestField("top_p", "number", 0, 1, open_low=True, unset="zero"),
    RequestField("min_p", "number", 0, 1),
    RequestField("repetition_penalty", "number", 0.01, 100, unset="zero"),
    RequestField("presence_penalty", "number", -2, 2),
    RequestField("frequency_penalty", "number", -2, 2),
    RequestField("seed", "integer", -(1 << 63), (1 << 64) - 1, unset="absent", optional=True),
    RequestField("n", "integer", 1, 32, unset="zero"),
    RequestField("logprobs", "integer", 0, MAX_LOGPROBS, unset="absent", optional=True),
    RequestField("prompt_logprobs", "integer", 0, MAX_LOGPROBS, unset="absent", optional=True),
    RequestField("logit_bias", "biases", -100, 100, most=1024),
    RequestField("stop", "texts", 1, 256, most=16),
    RequestField("stop_token_ids", "tokens", most=1024),
    RequestField("ignore_eos", "flag"),
    RequestField("include_stop", "flag", http="include_stop_str_in_output", router="include_stop_str_in_output"),
    RequestField("skip_special_tokens", "flag", unset="unserved"),
)
SAMPLING = tuple(
    replace(row, http=row.http or row.name, grpc=f"sampling.{row.name}", router=row.router or row.name)
    for row in _SAMPLING
)
REQUEST = (
    RequestField("timeout_s", "number", 0, MAX_TIMEOUT_S, open_low=True, optional=True, http="timeout", grpc="timeout"),
    RequestField("priority", "integer", -MAX_PRIORITY, MAX_PRIORITY, http="priority", grpc="priority"),
    RequestField("cache_salt", "text", 0, MAX_CACHE_SALT, http="cache_salt", grpc="cache_salt"),
    RequestField("session", "text", 0, MAX_SESSION, http="cache.session", grpc="cache.session"),
    RequestField("ttl_s", "number", 0, MAX_TTL_S, open_low=True, optional=True, http="cache.ttl_s", grpc="cache.ttl"),
    RequestField("truncate_prompt_tokens", "integer", 1, MAX_TOKENS, optional=True, http="truncate_prompt_tokens"),
    RequestField("add_bos", "flag"),
    RequestField("add_generation_prompt", "flag"),
)
FIELDS = {row.name: row for row in (*SAMPLING, *REQUEST)}
