"""Read the body of a request: bounded, in time, parsed, checked field by field.

Fields that the JSON schema names are served; one that would change the answer, or a likely misspelling, is refused
by its path; others are accepted, for real clients send many. Must not know what a request does. Invariants: nothing
is kept beyond the limit or unpacked; all bodies held at once are bounded, together and by tenant; any bytes become a
model or a WicoreError.
"""

from __future__ import annotations

import asyncio
import difflib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
from pydantic import BaseModel, ValidationError
from starlette.datastructures import Headers
from starlette.types import Receive

from wicore_trt.arithmetic import div_ceil
from wicore_trt.core.shares import Gate
from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.http.errors import ClientGoneError, HttpError
from wicore_trt.text.chat import REFUSED_KEYS

_HARMLESS = """
user metadata store service_tier safety_identifier prompt_cache_key prompt_cache_retention reasoning_effort reasoning
verbosity truncation max_tool_calls prompt_cache_options background_options access_programs thinking context_management
inference_geo speed diagnostics user_profile_id workspace_id cache_control betas include_reasoning request_id session_id
stream_interval cache_prompt models provider timings_per_token separate_reasoning stream_reasoning stream_tokens
keep_alive output_schema
"""
HARMLESS = frozenset(_HARMLESS.split())
"""Accepted and ignored wherever they stand: they say nothing about the tokens of the answer, or would only have let a
prompt be shortened that is refused without them. `output_schema` of a tool says what its result is."""

Neutral = Mapping[str, tuple[object, ...]]

REFUSED: Neutral = {
    # What a server with a memory of its own would do.
    **dict.fromkeys(("previous_response_id", "conversation", "moderation", "container"), ()),
    "background": (False,), "mcp_servers": ([],),
    # Older names of tools, and other constraints.
    "functions": ([],), "function_call": ("none", "auto"),
    **dict.fromkeys(("structural_tag", "guided_decoding_backend", "guided_whitespace_pattern"), ()),
    # Other media and other ways to an answer.
    **dict.fromkeys(("audio", "prediction", "web_search_options", "logprob_token_ids"), ()),
    "modalities": (["text"],), "suffix": ("",), "best_of": (1,), "use_beam_search": (False,),
    "length_penalty": (1, 1.0), "early_stopping": (False,), "return_tokens_as_token_ids": (False,),
    # Other prompts.
    **dict.fromkeys(("chat_template", "prompt_embeds"), ()),
    "documents": ([],), "continue_final_message": (False,), "mm_processor_kwargs": ({},),
    # Other sampling.
    **dict.fromkeys(("thinking_token_budget", "repetition_detection", "samplers", "custom_logit_processor"), ()),
    **dict.fromkeys(("top_a", "dry_multiplier", "xtc_probability", "dynatemp_range"), (0, 0.0)),
    **dict.fromkeys(("typical_p", "tfs_z"), (1, 1.0)),
    "spaces_between_special_tokens": (True,), "logits_processors": ([],), "mirostat": (0,),
    # Names of llama.cpp, SGLang and Transformers.
    "n_predict": (-1,), "t_max_predict_ms": (-1,), "n_probs": (0,), "no_repeat_ngram_size": (0,),
    **dict.fromkeys(("n_cmpl", "num_beams", "num_return_sequences"), (1,)), "typ_p": (1, 1.0), "top_n_sigma": (-1, 0),
    **dict.fromkeys(("input_ids", "input_embeds"), ()), "stop_regex": ([], ""), "negative_prompt": ("",),
    **dict.fromkeys(("return_logprob", "return_hidden_states"), (False,)), "guidance_scale": (1, 1.0), "lora": ([],),
    # Other machines.
    **dict.fromkeys(("vllm_xargs", "kv_transfer_params", "session_params"), ({},)), "lora_path": (),
}  # fmt: skip
"""Refused with 400, but for null and for these values, which ask for nothing."""
REFUSED_INSIDE: Mapping[str, Neutral] = {
    "messages": dict.fromkeys(REFUSED_KEYS, (False, [], {}, "")),
    "tools": {"parameters": (), "function": ()},  # where another shape of tools is served
    "tools.function": {"input_schema": ()},
    "structured_outputs": {
        **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), (False,)),
        "disable_fallback": (False, True),
    },
}
"""Fields refused at places inside, by their paths without numbers."""

MAX_FIELDS = 128
"""Fields of one body. Looking for misspellings takes time for each."""
LONGEST = 40
"""Characters of a name that may be a misspelling."""
MISSPELLED = 0.8
"""Least likeness of two names that are meant to be the same, by difflib's ratio."""


@dataclass(frozen=True, slots=True)
class FieldPath:
    """Object of a request, or each object of a list.
    `served` has the fields inside, None where these are not checked; `closed`: nothing else is accepted. `elsewhere`
    are fields of other routes, refused because a client that sends them expects an effect."""

    served: Mapping[str, FieldPath | None]
    refused: Neutral
    closed: bool = False
    elsewhere: frozenset[str] = frozenset()

    def check_object(self, found: Mapping[str, Any], above: str, strange: set[tuple[int, str]]) -> None:
        """Raise InvalidRequestError for the first field that changes the answer, or is a likely misspelling.
        `above` is the object's path. `strange` are (place, name) already compared with served names."""
        for name, value in found.items():
            if value is None:
                continue
            if name not in self.served:
                self._check_unserved(name, value, f"{above}.{name}" if above else name, strange)
            elif (inside := self.served[name]) is not None:
                path = f"{above}.{name}" if above else name
                if isinstance(value, dict):
                    inside.check_object(value, path, strange)
                elif isinstance(value, list):
                    for i, item in enumerate(value):
                        if isinstance(item, dict):
                            inside.check_object(item, f"{path}[{i}]", strange)

    def _check_unserved(self, name: str, value: object, path: str, strange: set[tuple[int, str]]) -> None:
        if name in self.refused:
            # True is no 1 here.
            if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in self.refused[name]):
                raise InvalidRequestError(f"{path} is not supported.", field=path, fix="Leave it out.")
        elif self.closed:
            if value is not False:
                raise InvalidRequestError(f"{shown(path)} is no known field.", field=path, fix="Leave it out.")
        elif name in self.elsewhere:
            if value is not False:
                raise InvalidRequestError(f"{name} is no field of this route.", field=name, fix="Leave it out.")
        elif name not in HARMLESS and (id(self), name) not in strange:
            strange.add((id(self), name))
            if len(strange) > MAX_FIELDS:
                raise InvalidRequestError(f"More than {MAX_FIELDS} unknown fields.", field=path)
            snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in name[: LONGEST + 1])  # of JavaScript's topP
            if len(name) <= LONGEST and (near := difflib.get_close_matches(snake, self.served, n=1, cutoff=MISSPELLED)):
                fix = f"Did you mean {near[0]}?"
                raise InvalidRequestError(f"{shown(path)} is no known field.", field=path, fix=fix)


def read_path(schema: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> FieldPath | None:
    """Read the fields of a value, or of a list's items, from a schema; None where it names no fields."""
    objects = list(_list_objects(schema, definitions))
    names = {name for one in objects for name in one["properties"]}
    served = {}
    for name in sorted(names):
        inside = {"anyOf": [one["properties"][name] for one in objects if name in one["properties"]]}
        served[name] = read_path(inside, definitions, f"{path}.{name}".lstrip("."))
    closed = all(one.get("additionalProperties") is False for one in objects)
    refused = {name: neutral for name, neutral in REFUSED_INSIDE.get(path, {}).items() if name not in served}
    return FieldPath(served, refused, closed) if names else None


def _list_objects(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    if "$ref" in schema:
        yield from _list_objects(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    for inner in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())):
        yield from _list_objects(inner, definitions)
    if "properties" in schema:
        yield schema


READ_S = 20.0
"""A body that has not come by then is given up."""
BLOCK = 1 << 16
"""Bytes by which room for bodies is shared out."""
ROOM = 256 << 20
"""Bytes of all bodies that are here: being read, waiting for a thread that tokenizes, or part of an open request."""
MANY_ITEMS = 50_000
"""Objects, lists, items and texts that a body may have; a text costs its own length in memory, an empty list
25 times that. A prompt of token ids has one item for each, so servers of long contexts take more."""
DIGITS = 4
"""Digits that a body may have for each of its items. A number of thousands of digits takes a tenth of a millisecond."""
UNIONS = {
    "prompt": "a text, a list of texts, token ids or a list of token ids",
    "stop": "a text or a list of at most 16 texts",
    "input": "a text or a list of items",
    "system": "a text or a list of text blocks",
}
"""Fields that take several types, and these in words."""

Model = TypeVar("Model", bound=BaseModel)


class BodyBudget(Gate):
    """Memory for bodies that are read, wait for a thread or are being answered: blocks, shared among tenants."""

    def __init__(self, blocks: int = ROOM // BLOCK) -> None:
        super().__init__(blocks, "request bodies")

    @contextmanager
    def open_share(self, tenant: str) -> Iterator[BodyShare]:
        """Open an empty share for one body."""
        hold = BodyShare(self, tenant)
        try:
            yield hold
        finally:
            hold.fit_to(0)


@dataclass(slots=True)
class BodyShare:
    """Blocks of one body."""

    budget: BodyBudget
    tenant: str
    blocks: int = 0

    def grow_to(self, size: int) -> None:
        """Grow to at least `size` bytes. Raises QueueFullError when no block is left for this tenant."""
        more = div_ceil(size, BLOCK) - self.blocks
        if more > 0:
            self.budget.take_places(self.tenant, more)
            self.blocks += more

    def fit_to(self, size: int) -> None:
        """Grow or shrink to `size` bytes. Raises QueueFullError."""
        self.grow_to(size)
        self.budget.give_back(self.tenant, self.blocks - div_ceil(size, BLOCK))
        self.blocks = div_ceil(size, BLOCK)


async def read_body(receive: Receive, headers: Headers, limit: int, hold: BodyShare) -> bytes:
    """Read a body. Raises HttpError (too long, too slow, no plain JSON), QueueFullError, ClientGoneError.
    Asking for JSON also keeps strangers' web pages from posting here: a browser asks before it sends JSON."""
    kind = headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json" and not (kind.startswith("application/") and kind.endswith("+json")):
        raise HttpError(415, "The body must be JSON.", fix="Send the header content-type: application/json.")
    if headers.get("content-encoding", "identity").lower() != "identity":
        raise HttpError(415, "Compressed bodies are not taken.", fix="Send the body as it is.")
    announced = headers.get("content-length", "0")
    if not announced.isdecimal() or len(announced) > 18 or int(announced) > limit:
        raise _too_long(limit)
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
                    raise _too_long(limit)
                hold.grow_to(size)
                parts.append(part)
                if not message.get("more_body", False):
                    return b"".join(parts)
    except TimeoutError:
        raise HttpError(408, f"The body did not come within {READ_S:g} s.") from None


def _too_long(limit: int) -> HttpError:
    return HttpError(413, f"The body has more than {limit} bytes.", fix="Shorten it, or set server.max_message_mb.")


def decode_json(raw: bytes, most_items: int) -> dict[str, Any]:
    """Decode the JSON object of a body. Raises InvalidRequestError for anything else."""
    outside = _strip_texts(raw, 4 * most_items)
    if outside is None or sum(map(outside.count, (b",", b"[", b"{"))) > most_items:
        raise _refuse_body(f"it has more than {most_items} items")
    if len(outside) - len(outside.translate(None, b"0123456789")) > DIGITS * most_items:
        raise _refuse_body(f"it has more than {DIGITS * most_items} digits")
    try:
        value = msgspec.json.decode(raw)
    except RecursionError:
        raise _refuse_body("it is nested too deeply") from None
    except UnicodeDecodeError:
        raise _refuse_body("it is not UTF-8") from None
    except ValueError as error:
        raise _refuse_body(str(error)) from None
    if not isinstance(value, dict):
        raise _refuse_body("it is no JSON object")
    return value


def _strip_texts(raw: bytes, most: int) -> bytes | None:
    """Return a body without its texts, whose commas and digits are their own; None for more than `most` texts."""
    plain = raw.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in raw else raw
    parts = plain.split(b'"', 2 * most + 1)
    return b"".join(parts[::2]) if len(parts) <= 2 * most + 1 else None


def _refuse_body(why: str) -> InvalidRequestError:
    return InvalidRequestError(f"The body cannot be read: {why}.", field="body")


def parse_body(model: type[Model], fields: FieldPath, value: Mapping[str, Any]) -> Model:
    """Parse the body to a model. Raises InvalidRequestError that names the first wrong field."""
    if len(value) > MAX_FIELDS:
        raise InvalidRequestError(f"The body has {len(value)} fields; at most {MAX_FIELDS} are taken.", field="body")
    fields.check_object(value, "", set())
    try:
        return model.model_validate(value)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False)[0]
    except RecursionError:
        raise _refuse_body("it is nested too deeply") from None
    whole = str(first["loc"][0]) if first["loc"] else "body"
    absent = first["type"] == "missing" and len(first["loc"]) == 1
    if whole in UNIONS and not absent:  # the path goes on with the name of an alternative, which no client knows
        raise InvalidRequestError(f"{whole} must be {UNIONS[whole]}, got {shown(first['input'])}.", field=whole)
    path = whole + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"][1:])[:128]
    if first["type"] == "missing":
        raise InvalidRequestError(f"{path} is missing.", field=path)
    raise InvalidRequestError(f"{path}: {first['msg']}, got {shown(first['input'])}.", field=path)
