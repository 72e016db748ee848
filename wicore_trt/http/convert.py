"""Make requests of bodies: sampling, constraints, tools, prompts and messages.

Must not know engines or calls. Invariants: a field that was not given has the default of the plain type, or of the
API where that has another; a body has at most one constraint; errors name the field that asked.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from wicore_trt.checks import check_count
from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.grammar.source import without_words
from wicore_trt.http.bodies import Cache, ChatBody, CompletionBody, GenerationFields, InferenceBody, Knobs, Sampling
from wicore_trt.images.files import read_image_url
from wicore_trt.request_fields import SAMPLING
from wicore_trt.text.calls import Function
from wicore_trt.text.tools import AUTO, NONE, REQUIRED, Tools, make_function, make_tools
from wicore_trt.types import (
    CacheHints,
    CachePriority,
    CacheStore,
    Constraint,
    ConstraintKind,
    ImageFile,
    SamplingParams,
    TextRequest,
    prompt_list,
)

NAMES = {
    **dict.fromkeys(("guided_json", "json_schema"), ConstraintKind.JSON_SCHEMA),
    **dict.fromkeys(("guided_regex", "regex"), ConstraintKind.REGEX), "guided_choice": ConstraintKind.CHOICE,
    **dict.fromkeys(("guided_grammar", "ebnf", "grammar"), ConstraintKind.GRAMMAR),
    "allowed_token_ids": ConstraintKind.TOKENS,
}  # fmt: skip
"""Fields that are a constraint: vLLM's, SGLang's and llama.cpp's."""
STRUCTURED = {name.removeprefix("guided_"): kind for name, kind in NAMES.items() if name.startswith("guided_")}
"""Names inside of structured_outputs, beside json_object."""


def read_constraint(body: Knobs) -> tuple[str, Constraint] | None:
    """Read the constraint, and the field that asks for it. Raises InvalidRequestError."""
    found: list[tuple[str, Constraint]] = []
    if body.bad_words:
        found.append(
            ("bad_words", _make_constraint("bad_words", ConstraintKind.GRAMMAR, without_words(body.bad_words)))
        )
    if isinstance(body, GenerationFields) and body.response_format is not None:
        found += [("response_format", made) for made in _read_response_format(body.response_format)]
    if isinstance(body, GenerationFields) and body.structured_outputs is not None:
        found += [("structured_outputs", made) for made in _read_structured(body.structured_outputs)]
    for name, kind in NAMES.items():
        if (value := getattr(body, name, None)) is not None:
            found.append((name, _make_constraint(name, kind, value)))
    if len(found) > 1:
        raise InvalidRequestError(f"{found[0][0]} and {found[-1][0]} exclude each other.", field=found[-1][0])
    return found[0] if found else None


def name_field(error: InvalidRequestError, body: Knobs) -> InvalidRequestError:
    """Name in an error the field that asked for the wrong value: tools, where they may be called."""
    if error.field == "prompt_logprobs" and getattr(body, "prompt_logprobs", None) is None:
        return InvalidRequestError(error.message, field="echo", fix="Leave echo or logprobs out.")
    if error.field != "constraint":
        return error
    found = read_constraint(body)
    tools = getattr(body, "tools", None) and getattr(body, "tool_choice", None) != "none"
    return InvalidRequestError(error.message, field="tools" if found is None or tools else found[0], fix=error.fix)


def _read_response_format(given: dict[str, Any]) -> list[Constraint]:
    kind = given.get("type")
    match kind:
        case "text":
            return []
        case "json_object" if isinstance(given.get("schema"), (dict, bool)):  # as llama.cpp takes it
            return [_make_constraint("response_format", ConstraintKind.JSON_SCHEMA, given["schema"])]
        case "json_object":
            return [Constraint(ConstraintKind.JSON_OBJECT)]
        case "json_schema":
            inside = given.get("json_schema")
            if not isinstance(inside, dict) or not isinstance(inside.get("schema"), (dict, bool)):
                problem = "response_format.json_schema.schema must be a JSON schema."
                raise InvalidRequestError(problem, field="response_format")
            return [_make_constraint("response_format", ConstraintKind.JSON_SCHEMA, inside["schema"])]
    problem = f"response_format.type is text, json_object or json_schema, got {shown(kind)}."
    raise InvalidRequestError(problem, field="response_format")


def _read_structured(given: dict[str, Any]) -> list[Constraint]:
    names = ("json_object", *STRUCTURED)  # other names ask for nothing, as the table of fields knows
    asked = {name: given[name] for name in names if given.get(name) not in (None, False)}
    if len(asked) != 1:
        raise InvalidRequestError("structured_outputs takes exactly one constraint.", field="structured_outputs")
    [(name, value)] = asked.items()
    if name == "json_object" and value is True:
        return [Constraint(ConstraintKind.JSON_OBJECT)]
    return [_make_constraint("structured_outputs", STRUCTURED[name], value)]


def _make_constraint(field: str, kind: ConstraintKind, value: object) -> Constraint:
    as_json = kind in (ConstraintKind.CHOICE, ConstraintKind.TOKENS) or (
        kind is ConstraintKind.JSON_SCHEMA and not isinstance(value, str)
    )
    if not as_json and not isinstance(value, str):
        raise InvalidRequestError(f"{field}: a {kind.value} is a text, got {shown(value)}.", field=field)
    try:
        return Constraint(kind, msgspec.json.encode(value).decode() if as_json else str(value))
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, field=field) from None


COMPLETION_TOKENS = 16
"""Tokens that /v1/completions gives unless max_tokens says otherwise, as in OpenAI's API."""
MAX_PROMPTS = 1024
IMAGES = ("image_url", "image", "input_image")
"""Types of parts: of OpenAI's chats, of Anthropic's messages and other servers, of Responses."""
DETAILS = (None, "auto", "low", "high", "original")
TEXTS = ("text", "input_text", "output_text")
_OWN_WAY = frozenset(("max_tokens", "logprobs", "prompt_logprobs", "top_k", "stop", "logit_bias"))
"""Fields of the plain type that a body has in another form."""


def make_sampling(
    body: Sampling,
    logprobs: int | None,
    max_tokens: int | None,
    constraint: Constraint | None = None,
    prompt_logprobs: int | None = None,
) -> SamplingParams:
    """Make sampling parameters; `constraint` replaces the body's. Raises InvalidRequestError for bad values."""
    if isinstance(body, GenerationFields) and body.prompt_logprobs is not None and body.stream:
        fix = "Use /v1/completions, echo and logprobs."
        raise InvalidRequestError("prompt_logprobs are not streamed.", field="prompt_logprobs", fix=fix)
    given: dict[str, Any] = {}
    for row in SAMPLING:
        if row.name not in _OWN_WAY and (value := getattr(body, row.http, None)) is not None:
            given[row.name] = value
    if (penalty := body.repeat_penalty) is not None and given.setdefault("repetition_penalty", penalty) != penalty:
        raise InvalidRequestError("It is another repetition_penalty.", field="repeat_penalty", fix="Leave one out.")
    if body.top_k is not None:
        given["top_k"] = max(0, body.top_k)
    if body.stop is not None:
        given["stop"] = (body.stop,) if isinstance(body.stop, str) else tuple(body.stop)
    if body.logit_bias:
        for key in body.logit_bias:
            if not (key.isascii() and key.isdigit() and len(key) <= 10):
                raise InvalidRequestError(f"logit_bias has {shown(key)}, which is no token id.", field="logit_bias")
        given["logit_bias"] = {int(key): bias for key, bias in body.logit_bias.items()}
    found = read_constraint(body) if constraint is None else None
    given["constraint"] = constraint if found is None else found[1]
    return SamplingParams(max_tokens=max_tokens, logprobs=logprobs, prompt_logprobs=prompt_logprobs, **given)


def _read_common(body: Sampling, tenant: str) -> dict[str, Any]:
    cache = body.cache or Cache()
    try:
        priority = CachePriority("normal" if cache.priority is None else cache.priority)
    except ValueError:
        raise InvalidRequestError("cache.priority is low, normal or high.", field="cache.priority") from None
    try:
        store = CacheStore("all" if cache.store is None else cache.store)
    except ValueError:
        raise InvalidRequestError("cache.store is all, device or never.", field="cache.store") from None
    return {
        "request_id": uuid.uuid4().hex, "tenant": tenant, "timeout_s": body.timeout, "priority": body.priority or 0,
        "cache_salt": body.cache_salt or "", "cache": CacheHints(cache.session or "", priority, cache.ttl_s, store),
        "truncate_prompt_tokens": body.truncate_prompt_tokens,
    }  # fmt: skip


def make_chat_request(body: ChatBody, tenant: str, facts: dict[str, Any]) -> TextRequest:
    """Make the request of a chat; `facts` of the call get the tools that are left out. Raises InvalidRequestError."""
    tools = read_tools(body, facts)
    if body.top_logprobs and not body.logprobs:
        raise InvalidRequestError("top_logprobs needs logprobs: true.", field="top_logprobs")
    logprobs = (body.top_logprobs or 0) if body.logprobs else None
    max_tokens = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    functions = tools.functions if tools is not None else ()
    messages, images = read_messages(body.messages)
    try:
        constraint = tools.constraint if tools is not None else None
        params = make_sampling(body, logprobs, max_tokens, constraint, body.prompt_logprobs)
    except InvalidRequestError as error:
        raise InvalidRequestError(error.message, field="tools") if error.field == "constraint" else error from None
    return TextRequest(
        params=params, messages=messages, images=images, functions=tuple(map(Function.describe_function, functions)),
        chat_template_kwargs=body.chat_template_kwargs, add_generation_prompt=body.add_generation_prompt is not False,
        **_read_common(body, tenant),
    )  # fmt: skip


def make_completion_requests(body: CompletionBody, tenant: str) -> list[TextRequest]:
    """Make a request for each prompt. Raises InvalidRequestError."""
    prompts: Sequence[Any] = prompt_list(body.prompt)
    if not prompts:
        raise InvalidRequestError("The prompt is empty.", field="prompt")
    check_count(prompts, MAX_PROMPTS, "prompt")
    max_tokens = COMPLETION_TOKENS if body.max_tokens is None else body.max_tokens
    if body.max_tokens is None and body.min_tokens is not None:
        max_tokens = max(max_tokens, body.min_tokens)
    if body.echo and body.truncate_prompt_tokens is not None:
        raise InvalidRequestError("echo shows whole prompts.", field="truncate_prompt_tokens", fix="Leave one out.")
    wanted = [count for count in (body.prompt_logprobs, body.logprobs if body.echo else None) if count is not None]
    params = make_sampling(body, body.logprobs, max_tokens, prompt_logprobs=max(wanted, default=None))
    add_bos = body.add_special_tokens is not False
    return [
        TextRequest(
            params=params,
            prompt=prompt if isinstance(prompt, str) else None,
            prompt_token_ids=None if isinstance(prompt, str) else tuple(prompt),
            add_bos=add_bos,
            **_read_common(body, tenant),
        )
        for prompt in prompts
    ]


def make_inference_request(body: InferenceBody, tenant: str) -> TextRequest:
    """Raises InvalidRequestError."""
    params = make_sampling(body, None, body.max_tokens)
    images = tuple(_read_image_text(one, f"images[{i}]", binary=True) for i, one in enumerate(body.images or ()))
    return TextRequest(params=params, prompt=body.prompt, images=images, **_read_common(body, tenant))


def read_messages(given: Sequence[Mapping[str, Any]]) -> tuple[tuple[dict[str, object], ...], tuple[ImageFile, ...]]:
    """Read the turns for the chat template, which checks the rest, and the images of their parts. Raises
    InvalidRequestError with the path of a wrong image."""
    turns, images = [], list[ImageFile]()
    for i, message in enumerate(given):
        turn, content = dict(message), message.get("content")
        if isinstance(content, list):
            parts = [(part, f"messages[{i}].content[{j}]") for j, part in enumerate(content)]
            turn["content"] = [_read_part(part, where, images) for part, where in parts]
            if not content and message.get("role") == "tool":  # a function that returned nothing
                turn["content"] = ""
        turns.append(turn)
    return tuple(turns), tuple(images)


def _read_part(part: Any, where: str, images: list[ImageFile]) -> Any:
    if isinstance(part, ImageFile):  # of another API, which has read it
        images.append(part)
        return {"type": "image"}
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind in IMAGES:
        return _read_part(read_image_part(part, where), where, images)
    if kind in TEXTS:
        return {**part, "type": "text"}
    return {"type": "text", "text": part.get("refusal")} if kind == "refusal" else part


def read_image_part(part: Mapping[str, Any], where: str) -> ImageFile:
    """Read the image of a part: OpenAI's image_url (an object or a text), Anthropic's source, or url, image, base64 or
    data, which other servers take. `detail`: high asks for crops. Raises InvalidRequestError (`where`)."""
    inside = next((part[name] for name in ("image_url", "source") if isinstance(part.get(name), Mapping)), part)
    detail = inside.get("detail", part.get("detail"))
    if detail not in DETAILS:
        raise InvalidRequestError(f"{where}: detail is auto, low or high, got {shown(detail)}.", field=where)
    for name in ("url", "image_url", "image", "base64", "data"):
        if isinstance(text := inside.get(name), str):
            return _read_image_text(text, where, binary=name in ("image", "base64", "data"), crops=detail == "high")
    raise InvalidRequestError(f"{where}: an image has a url (data: or https:) or its bytes as base64.", field=where)


def _read_image_text(text: str, where: str, *, binary: bool, crops: bool = False) -> ImageFile:
    """Read a URL; where it may be `binary`, a text that has no scheme is base64."""
    whole = f"data:;base64,{text}" if binary and ":" not in text[:8] else text
    return read_image_url(whole, where, crops=crops)


DESCRIBED = frozenset(("function", "parameters", "input_schema", "format", "tools"))
"""Keys of tools that say how they are called."""
_KIND = re.compile(r"(?!function$)[a-zA-Z0-9_.-]{1,64}")


def read_tools(body: ChatBody, facts: dict[str, Any]) -> Tools | None:
    """Read the tools of a chat, None where no function may be called.
    Tools that another server would run, such as a web search, are left out and named in `facts` of the call. Raises
    InvalidRequestError, also where one of these must be called."""
    functions, left_out = [], dict[str, str]()
    if body.tools is None and body.tool_choice is None:
        return None
    for i, tool in enumerate(body.tools or ()):
        kind = tool.get("type")  # a server that knows the type runs a tool without anything to call it by
        if isinstance(kind, str) and kind != "custom" and _KIND.fullmatch(kind) and not DESCRIBED & tool.keys():
            left_out[str(tool.get("name") or tool.get("server_label") or kind)] = kind
        else:
            functions.append(_read_function(f"tools[{i}]", tool))
    if left_out:
        facts["tools_left_out"] = ", ".join(dict.fromkeys(left_out.values()))
    choice, named = _read_choice(body.tool_choice, left_out)
    if choice == REQUIRED and left_out and not functions:
        raise _cannot_run(next(iter(left_out.values())))
    several = body.parallel_tool_calls is not False
    return make_tools(functions, choice, named, several=several, beside=read_constraint(body))


def _cannot_run(kind: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"tool_choice asks for {kind}, which this server cannot run.", field="tool_choice", fix="Leave it out."
    )


def _read_choice(given: object, left_out: dict[str, str]) -> tuple[str, str | None]:
    """Return none, auto or required, and the name of a function that must be called."""
    if given is None:
        return AUTO, None
    if isinstance(given, str) and given in (NONE, AUTO, REQUIRED):
        return given, None
    function = given.get("function") if isinstance(given, dict) and given.get("type") == "function" else None
    name = function.get("name") if isinstance(function, dict) else None
    for asked in (name, given.get("type") if isinstance(given, dict) else None):
        if isinstance(asked, str) and (asked in left_out or asked in left_out.values()):
            raise _cannot_run(left_out.get(asked, asked))
    if not isinstance(name, str):
        problem = f"tool_choice is none, auto, required or a function, got {shown(given)}."
        raise InvalidRequestError(problem, field="tool_choice")
    return REQUIRED, name


def _read_function(where: str, tool: dict[str, Any]) -> Function:
    function = tool.get("function")
    if tool.get("type", "function") != "function" or not isinstance(function, dict):
        raise InvalidRequestError(f"{where} must be of type function.", field=where)
    name, description, parameters = (function.get(key) for key in ("name", "description", "parameters"))
    return make_function(where, name, description, parameters, function.get("strict") is True)
