"""Define the bodies of requests as pydantic models.

They check types and describe bodies in /openapi.json; ranges are checked by the plain types that they become. Must
not know engines. Invariant: null means that a field was not given.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from wicore_trt.http.intake import HARMLESS, REFUSED, FieldPath, read_path
from wicore_trt.request_fields import FIELDS, MAX_LOGPROBS, RequestField
from wicore_trt.text.tools import MAX_TOOLS

TEXT, NUMBER, FLAG, OBJECT = ({"type": kind} for kind in ("string", "integer", "boolean", "object"))
TEXTS: dict[str, Any] = {"type": "array", "items": TEXT}


def object_of(required: str = "", /, **properties: Any) -> dict[str, Any]:
    """Make the schema of an object with these properties; the names in `required` must be there."""
    needed = {"required": required.split()} if required else {}
    return {"type": "object", "properties": properties, **needed}


def one_of(names: str) -> dict[str, Any]:
    return {"enum": names.split()}


def either_of(*schemas: dict[str, Any]) -> dict[str, Any]:
    return {"anyOf": list(schemas)}


def list_of(items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "array", "items": items, **more}


Id = Annotated[int, Field(ge=0, lt=1 << 31)]
MAX_MESSAGES = 8192
# Lists end with their first fault: an error for each of thousands of items takes a tenth of a second to make.
Ids = Annotated[list[Id], Field(fail_fast=True)]
Texts = Annotated[list[str], Field(fail_fast=True)]
CALL = object_of(
    "id type function", id=TEXT, type={"const": "function"},
    function=object_of("name arguments", name=TEXT, arguments=TEXT),
)  # fmt: skip
IMAGE_URL = either_of(TEXT, object_of("url", url=TEXT, detail=one_of("auto low high")))
SOURCE = object_of("type", type=one_of("base64 url"), media_type=TEXT, data=TEXT, url=TEXT)
PART = object_of(
    "type", type=one_of("text input_text output_text refusal image_url input_image image"), image_url=IMAGE_URL,
    source=SOURCE, **dict.fromkeys(("text", "refusal", "detail", "url", "image", "base64", "data"), TEXT),
)  # fmt: skip
MESSAGE = object_of(
    "role", role=one_of("system developer user assistant model tool"), tool_calls=list_of(CALL), tool_call_id=TEXT,
    content=either_of(TEXT, list_of(PART, minItems=1)),
)  # fmt: skip
Message = Annotated[dict[str, Any], WithJsonSchema(MESSAGE)]

FUNCTION_NAME = {"type": "string", "pattern": "^[a-zA-Z0-9_.-]{1,64}$"}
TOOL = object_of(
    "type function", type={"const": "function"},
    function=object_of("name", name=FUNCTION_NAME, description=TEXT, parameters=OBJECT, strict=FLAG),
)  # fmt: skip
_CHOICE = one_of("none auto required")
TOOL_CHOICE = either_of(
    _CHOICE, object_of("type function", type={"const": "function"}, function=object_of("name", name=FUNCTION_NAME))
)
RESPONSE_FORMAT = object_of(
    "type", type=one_of("text json_object json_schema"), schema=OBJECT, json_schema=object_of("schema", schema=OBJECT)
)
STRUCTURED_OUTPUTS = {
    **object_of(
        json={"type": ["object", "string"]}, json_object={"const": True}, regex=TEXT, grammar=TEXT,
        choice=list_of({"type": "string", "minLength": 1}, minItems=1),
    ),
    **{"minProperties": 1, "maxProperties": 1, "additionalProperties": False},
}  # fmt: skip


def _bound_range(name: str) -> Any:
    row = FIELDS[name]
    return Field(gt=row.low, le=row.high) if row.open_low else Field(ge=row.low, le=row.high)


_BIASES: RequestField = FIELDS["logit_bias"]


def _check_count(value: object) -> object:
    """Check the number of items first: pydantic validates all of them before it checks their number."""
    if isinstance(value, dict) and len(value) > _BIASES.most:
        raise ValueError(f"at most {_BIASES.most} items are taken")
    return value


class Body(BaseModel):
    """Base of bodies. `http.intake` checks fields that a model does not have."""

    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)

    model: str | None = None
    """The served model; another one is 404."""


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore", use_attribute_docstrings=True)

    include_usage: bool | None = None
    """A last chunk with the counts of the whole request."""
    continuous_usage_stats: bool | None = None
    """The counts so far in every chunk."""


class Cache(BaseModel):
    """Hints of a client about the future of its KV pages."""

    model_config = ConfigDict(strict=True, extra="forbid", use_attribute_docstrings=True)

    session: str | None = None
    """Names a conversation, whose pages stay pinned until it has been silent for `ttl_s`."""
    priority: Annotated[str, Field(json_schema_extra={"enum": ["low", "normal", "high"]})] | None = None
    """Rank of the pages in the cache."""
    ttl_s: float | None = None
    """Seconds that the pages are kept at most after their last use."""
    store: Annotated[str, Field(json_schema_extra={"enum": ["all", "device", "never"]})] | None = None
    """Tiers that may keep the pages: all, GPU memory alone, or none once the request has ended."""


Stops = Annotated[Texts, Field(max_length=FIELDS["stop"].most)]


class Knobs(Body):
    """Fields that all routes share: how tokens are chosen and how a request is treated."""

    min_tokens: Annotated[int, Field(ge=0)] | None = None
    """No end before so many tokens."""
    temperature: Annotated[float, _bound_range("temperature")] | None = None
    """0 is greedy; default 1."""
    top_p: Annotated[float, _bound_range("top_p")] | None = None
    """Share of the probability that is sampled from."""
    top_k: Annotated[int, Field(ge=-1)] | None = None
    """Number of tokens that are sampled from; 0 and -1 are all."""
    min_p: Annotated[float, _bound_range("min_p")] | None = None
    """Least probability, as a share of the most probable token's."""
    repetition_penalty: Annotated[float, _bound_range("repetition_penalty")] | None = None
    """Above 1: against tokens of prompt and output."""
    repeat_penalty: Annotated[float, _bound_range("repetition_penalty")] | None = None
    """repetition_penalty, as llama.cpp and Ollama name it."""
    presence_penalty: Annotated[float, _bound_range("presence_penalty")] | None = None
    """Against tokens that the output has."""
    frequency_penalty: Annotated[float, _bound_range("frequency_penalty")] | None = None
    """Against tokens that the output has, once for each time."""
    seed: Annotated[int, _bound_range("seed")] | None = None
    """Equal seeds give equal tokens."""
    logit_bias: Annotated[dict[str, float], BeforeValidator(_check_count), Field(max_length=_BIASES.most)] | None = None
    """Added to the logits of token ids, -100 to 100."""
    stop_token_ids: Ids | None = None
    """Tokens that end a sequence."""
    include_stop_str_in_output: bool | None = None
    """Leave the stop in the text."""
    ignore_eos: bool | None = None
    """Go on behind the end that the model gives."""
    allowed_token_ids: Ids | None = None
    """Tokens of which alone the output is made; it ends by itself only where an end is among them."""
    bad_words: Texts | None = None
    """Texts that do not stand in the output, not as parts of words either."""
    skip_special_tokens: bool | None = None
    """Leave special tokens out of the text; default true."""
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    """Take the last so many tokens of the prompt alone; -1: as many as fit."""
    priority: Annotated[int, _bound_range("priority")] | None = None
    """Order among one tenant's requests: lower ones run first."""
    cache_salt: str | None = None
    """Requests share cached work only under equal salts."""
    cache: Cache | None = None
    timeout: Annotated[float, Field(gt=0)] | None = None
    """Seconds until the request is given up."""


class Sampling(Knobs):
    """Knobs, and what ends a sequence."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of one sequence."""
    stop: str | Stops | None = None
    """Strings that end a sequence."""


class GenerationFields(Sampling):
    n: Annotated[int, _bound_range("n")] | None = None
    """Sequences for one prompt."""
    stream: bool | None = None
    """Send server-sent events."""
    stream_options: StreamOptions | None = None
    response_format: Annotated[dict[str, Any], WithJsonSchema(RESPONSE_FORMAT)] | None = None
    """Form of the text: any JSON object, or JSON of a schema. The text keeps to it in any case, strict or not."""
    structured_outputs: Annotated[dict[str, Any], WithJsonSchema(STRUCTURED_OUTPUTS)] | None = None
    """Form of the text, as vLLM names it: one of json (a schema), json_object, regex, choice, grammar (Lark)."""
    guided_json: dict[str, Any] | str | None = None
    """A JSON schema that the text satisfies."""
    guided_regex: str | None = None
    """A regular expression that the whole text matches."""
    guided_choice: Texts | None = None
    """Texts of which one is the answer."""
    guided_grammar: str | None = None
    """A grammar of the text: Lark, or EBNF, which has `::=`."""
    json_schema: dict[str, Any] | str | None = None
    """guided_json, as llama.cpp and SGLang name it."""
    regex: str | None = None
    """guided_regex, as SGLang names it."""
    ebnf: str | None = None
    """guided_grammar, as SGLang names it."""
    grammar: str | None = None
    """guided_grammar, as llama.cpp names it."""
    prompt_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Probabilities of the prompt's tokens with so many alternatives, in vLLM's shape; not with stream."""
    return_token_ids: bool | None = None
    """The ids of the tokens of prompt and text too, in vLLM's shape."""


class ChatBody(GenerationFields):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES, fail_fast=True)]
    """The conversation; a system or developer message may come first."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    """The newer name of max_tokens, which it overrules."""
    logprobs: Annotated[bool, BeforeValidator(lambda value: False if value == 0 else value)] | None = None
    """Report the probabilities of the tokens."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Alternatives that are reported for each token."""
    tools: (
        Annotated[list[Annotated[dict[str, Any], WithJsonSchema(TOOL)]], Field(max_length=MAX_TOOLS, fail_fast=True)]
        | None
    ) = None
    """Functions that the model may call."""
    tool_choice: Annotated[str | dict[str, Any], WithJsonSchema(TOOL_CHOICE)] | None = None
    """Call of functions: allowed (auto, the default), required (or one by name), or forbidden (none)."""
    parallel_tool_calls: bool | None = None
    """Several calls in one answer; default true."""
    add_generation_prompt: bool | None = None
    """End the conversation with the opening of the model's turn; default true."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Other variables of the model's chat template."""


class CompletionBody(GenerationFields):
    prompt: str | Texts | Ids | Annotated[list[Ids], Field(fail_fast=True)]
    """A text or token ids, or a list of one of them."""
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """Most tokens of one sequence; 0 where probabilities of the prompt alone are wanted."""
    echo: bool | None = None
    """Put the prompt in front of the text, and its tokens in front of those in logprobs."""
    logprobs: Annotated[
        Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None,
        BeforeValidator(lambda value: None if value is False else value),
    ] = None
    """Alternatives that are reported for each token."""
    add_special_tokens: bool | None = None
    """Put BOS in front of a text; default true."""


_PARTS = either_of(TEXT, list_of(PART))
ITEM = object_of(
    type=one_of("message function_call function_call_output reasoning"),
    role=one_of("system developer user assistant"),
    **dict.fromkeys(("content", "output"), _PARTS), **dict.fromkeys(("call_id", "name", "arguments"), TEXT),
)  # fmt: skip
RESPONSE_TOOL = object_of(
    "type name", type={"const": "function"}, name=FUNCTION_NAME, description=TEXT, parameters=OBJECT, strict=FLAG
)
RESPONSE_TOOL_CHOICE = either_of(_CHOICE, object_of("type name", type={"const": "function"}, name=FUNCTION_NAME))
TEXT_FORMAT = object_of(format=object_of("type", type=one_of("text json_object json_schema"), schema=OBJECT))
RESPONSE_OPTIONS = object_of(include_usage=FLAG, include_obfuscation=FLAG) | {"additionalProperties": False}


class ResponsesBody(Knobs):
    input: str | Annotated[list[Annotated[dict[str, Any], WithJsonSchema(ITEM)]], Field(min_length=1)]
    """A text, or messages, calls of functions and their results."""
    instructions: str | None = None
    """Text of a system message."""
    max_output_tokens: Annotated[int, Field(ge=1)] | None = None
    """Most tokens of the answer."""
    stream: bool | None = None
    """Send server-sent events."""
    text: Annotated[dict[str, Any], WithJsonSchema(TEXT_FORMAT)] | None = None
    """`format`: any JSON object, or JSON of a schema."""
    tools: list[Annotated[dict[str, Any], WithJsonSchema(RESPONSE_TOOL)]] | None = None
    """Functions that the model may call."""
    tool_choice: Annotated[str | dict[str, Any], WithJsonSchema(RESPONSE_TOOL_CHOICE)] | None = None
    """Call of functions: allowed (auto, the default), required (or one by name), or forbidden (none)."""
    parallel_tool_calls: bool | None = None
    """Several calls in one answer; default true."""
    include: list[str] | None = None
    """message.output_text.logprobs: report the probabilities of the tokens."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """Alternatives that are reported for each token."""
    metadata: dict[str, Any] | None = None
    """Comes back with the answer."""
    stream_options: Annotated[dict[str, Any], WithJsonSchema(RESPONSE_OPTIONS)] | None = None
    """Changes nothing: the last event of a stream has the counts in any case."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Other variables of the model's chat template."""


TEXT_BLOCK = object_of("type text", type={"const": "text"}, text=TEXT)
IMAGE_BLOCK = object_of("type source", type={"const": "image"}, source=SOURCE)
BLOCK = object_of(
    "type", type=one_of("text image tool_use tool_result thinking"), source=SOURCE, input=OBJECT, is_error=FLAG,
    content=either_of(TEXT, list_of(either_of(TEXT_BLOCK, IMAGE_BLOCK))),
    **dict.fromkeys(("text", "id", "name", "tool_use_id"), TEXT),
)  # fmt: skip
TURN = object_of("role content", role=one_of("user assistant"), content=either_of(TEXT, list_of(BLOCK, minItems=1)))
MESSAGE_TOOL = object_of(
    "name input_schema", type={"const": "custom"}, name=FUNCTION_NAME, description=TEXT, strict=FLAG,
    input_schema=OBJECT,
)  # fmt: skip
MESSAGE_TOOL_CHOICE = object_of(
    "type", type=one_of("auto any tool none"), name=FUNCTION_NAME, disable_parallel_tool_use=FLAG
)
OUTPUT_FORMAT = object_of("type schema", type={"const": "json_schema"}, schema=OBJECT)
OUTPUT_CONFIG = object_of(format=OUTPUT_FORMAT)


class PromptBody(Body):
    """The prompt of a message, as Anthropic's API has it."""

    messages: Annotated[list[Annotated[dict[str, Any], WithJsonSchema(TURN)]], Field(min_length=1)]
    """The conversation; the last turn is the user's."""
    system: str | list[Annotated[dict[str, Any], WithJsonSchema(TEXT_BLOCK)]] | None = None
    """Text of a system message."""
    tools: list[Annotated[dict[str, Any], WithJsonSchema(MESSAGE_TOOL)]] | None = None
    """Functions that the model may call."""
    tool_choice: Annotated[dict[str, Any], WithJsonSchema(MESSAGE_TOOL_CHOICE)] | None = None
    """Call of functions: allowed (auto, the default), required (any, or tool by name), or forbidden (none)."""


class MessagesBody(PromptBody, Knobs):
    max_tokens: Annotated[int, Field(ge=1)]
    """Most tokens of the answer."""
    stop_sequences: Stops | None = None
    """Strings that end the answer."""
    stream: bool | None = None
    """Send server-sent events."""
    output_config: Annotated[dict[str, Any], WithJsonSchema(OUTPUT_CONFIG)] | None = None
    """`format`: JSON of a schema."""
    output_format: Annotated[dict[str, Any], WithJsonSchema(OUTPUT_FORMAT)] | None = None
    """The older name of output_config.format."""


class InferenceBody(Sampling):
    prompt: str
    images: Texts | None = None
    """Files of images as base64 or URLs; <start_of_image> in the prompt is the place of each, else its beginning."""


class TokenizeBody(Body):
    """Exactly one of prompt and messages."""

    prompt: str | None = None
    messages: Annotated[list[Message], Field(max_length=MAX_MESSAGES, fail_fast=True)] | None = None
    add_special_tokens: bool | None = None
    """Put BOS in front of a text; default true."""
    add_generation_prompt: bool | None = None
    """End a conversation with the opening of the model's turn; default true."""
    tools: list[Annotated[dict[str, Any], WithJsonSchema(TOOL)]] | None = None
    """Functions that a conversation describes."""
    tool_choice: Annotated[str | dict[str, Any], WithJsonSchema(TOOL_CHOICE)] | None = None
    """With none the conversation describes no functions."""
    chat_template_kwargs: dict[str, Any] | None = None
    """Other variables of the model's chat template."""
    return_token_strs: bool | None = None
    """The text of each token too."""


class DetokenizeBody(Body):
    tokens: Ids
    skip_special_tokens: bool | None = None
    """Default true."""


GENERATIONS = (ChatBody, CompletionBody, ResponsesBody, MessagesBody, InferenceBody)
EVERY_FIELD = frozenset(name for model in GENERATIONS for name in model.model_fields)
"""Fields that some generation route serves."""


@cache
def read_fields(model: type[BaseModel]) -> FieldPath:
    """Return the fields of a body as its schema names them, those inside of fields too."""
    schema = model.model_json_schema()
    path = read_path(schema, schema.get("$defs", {}), "")
    assert path is not None
    elsewhere = EVERY_FIELD - path.served.keys() - HARMLESS if model in GENERATIONS else frozenset[str]()
    return FieldPath(path.served, REFUSED, path.closed, elsewhere)
