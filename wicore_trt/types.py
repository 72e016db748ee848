"""Requests, sampling parameters and results as plain data.

Every layer from the scheduler to the clients shares them; imports neither torch nor any transport. Invariant: a
client's values (`SamplingParams`, `CacheHints`, `TextRequest`, `GenerateRequest`) are valid once constructed, in the
caller's thread, so later code checks only what depends on the engine.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral
from typing import TYPE_CHECKING, Any

from msgspec import Struct, structs

from wicore_trt.checks import as_token_ids, check_field, check_finite, check_integer, check_text
from wicore_trt.errors import InvalidRequestError, ModelNotFoundError, shown
from wicore_trt.request_fields import FIELDS, MAX_CACHE_SALT, MAX_TIMEOUT_S, MAX_TOKENS, SAMPLING

REPLICA_HOME = "replica-{}"
"""Directory of a server's replica, by its index, below kv.disk_path."""
MIN_TEMPERATURE = 1e-6
"""Least temperature that is not greedy: below it, logits divided by it leave the range of float32."""
MAX_REQUEST_ID = 128
CONTENT_DIGEST_BYTES = 32
Clock = Callable[[], float]
"""Gives seconds, and never goes back."""
if TYPE_CHECKING:
    Bytes = bytes | memoryview
else:
    Bytes = bytes  # as messages have them
MAX_CONSTRAINT = 1 << 17
"""Characters of a constraint's text."""


class FinishReason(enum.Enum):
    """Reason for the end of a sequence."""

    STOP = "stop"  # eos, stop token or stop string
    LENGTH = "length"  # max_tokens or the context limit
    CANCELLED = "cancelled"  # client went away, Abort
    DEADLINE = "deadline"
    ERROR = "error"


class ConstraintKind(enum.Enum):
    """Kind of a `Constraint`'s text."""

    JSON_OBJECT = "json_object"  # nothing: any JSON object
    JSON_SCHEMA = "json_schema"
    REGEX = "regex"  # the whole output matches it
    GRAMMAR = "grammar"  # Lark, as llguidance reads it
    CHOICE = "choice"  # a JSON list of strings, one of which is the output
    TOKENS = "tokens"  # a JSON list of token ids, of which alone the output is made


@dataclass(frozen=True, slots=True)
class Constraint:
    """Constraint on every finished output: tokens that do not lead there are never sampled. `wicore_trt.grammar` parses
    the text, which takes time."""

    kind: ConstraintKind
    text: str = ""

    def __post_init__(self) -> None:
        if not isinstance(self.kind, ConstraintKind):
            raise InvalidRequestError(f"{shown(self.kind)} is no kind of constraint.", field="constraint")
        check_text("constraint", self.text, MAX_CONSTRAINT)
        if bool(self.text) == (self.kind is ConstraintKind.JSON_OBJECT):
            raise InvalidRequestError(
                f"A constraint of kind {self.kind.value} {'has no' if self.text else 'needs a'} text.",
                field="constraint",
            )


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Parameters of sampling: how the next token is chosen and when a sequence ends.

    Logit bias and penalties apply to the raw logits, then the constraint, then temperature, then top-k, top-p and
    min-p. `temperature=0` is greedy. `top_k=0` and `top_p=1` mean off. `repetition_penalty` divides positive and
    multiplies negative logits of tokens seen in prompt or output (CTRL, arXiv:1909.05858); presence and frequency
    penalties count output tokens only (OpenAI's definition). `logprobs` is the number of alternatives reported per
    token (None: none at all, 0: the chosen token only), taken from the untempered, unfiltered distribution, which no
    constraint changes. `prompt_logprobs` is the same for the prompt's own tokens; nothing of such a prompt comes from
    the KV cache, and `max_tokens` may then be 0. `max_tokens=None` means up to the context limit. Under a `constraint`
    eos can be chosen only where the output may end, and is chosen where nothing else may follow, whatever `min_tokens`
    and `ignore_eos` say. An output that ends for another reason is the beginning of a valid one. Unless
    `skip_special_tokens`, the text has special tokens by their names.

    Raises InvalidRequestError with the field's name for values of another type, NaN, infinite or out of range.
    """

    max_tokens: int | None = None
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    seed: int | None = None
    n: int = 1
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop: bool = False
    skip_special_tokens: bool = True
    constraint: Constraint | None = None

    def __post_init__(self) -> None:
        if self.max_tokens is not None and self.prompt_logprobs is None:
            check_integer("max_tokens", self.max_tokens, 1, MAX_TOKENS)
        for row in SAMPLING:
            check_field(row, getattr(self, row.name))
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidRequestError("min_tokens must not exceed max_tokens.", field="min_tokens")
        if 0.0 < self.temperature < MIN_TEMPERATURE:
            raise InvalidRequestError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, got {shown(self.temperature)}.",
                field="temperature",
            )
        if self.constraint is not None and not isinstance(self.constraint, Constraint):
            raise InvalidRequestError(
                f"constraint must be a Constraint, got {type(self.constraint).__name__}.", field="constraint"
            )
        # copies, so that later changes by the caller do not reach a running step
        object.__setattr__(self, "logit_bias", dict(self.logit_bias))
        object.__setattr__(self, "stop", tuple(self.stop))
        object.__setattr__(self, "stop_token_ids", tuple(self.stop_token_ids))

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0

    @property
    def penalized(self) -> bool:
        return self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0


class Usage(Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Token counts of one request. `cached_tokens` of the prompt came from the KV cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0


class TokenLogprob(Struct, frozen=True, array_like=True, omit_defaults=True):
    """Natural-log probability of a chosen token and of its best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


class CachePriority(enum.Enum):
    """Rank of a request's pages: LOW ones are never copied to another tier, HIGH ones are held like a session's."""

    LOW = "low"
    NORMAL = "normal"
    HIGH = "high"


class CacheStore(enum.Enum):
    """Tiers that may keep a request's pages: ALL; DEVICE memory alone; or NEVER any, for another request."""

    ALL = "all"
    DEVICE = "device"
    NEVER = "never"


@dataclass(frozen=True, slots=True)
class CacheHints:
    """Hints of a client about the future of its pages. `session` names a conversation: its latest request's pages stay
    pinned in host memory and on disk until it is silent for `ttl_s` (default: the server's kv.pin_s), within
    kv.pin_share. `ttl_s`, 0 < ttl_s <= 30 days, also bounds how long this request's pages are kept unused, whatever
    space there is. `store` bounds where they are kept at all. Raises InvalidRequestError for hints that contradict."""

    session: str = ""
    priority: CachePriority = CachePriority.NORMAL
    ttl_s: float | None = None
    store: CacheStore = CacheStore.ALL

    def __post_init__(self) -> None:
        check_field(FIELDS["session"], self.session)
        if not isinstance(self.priority, CachePriority):
            raise InvalidRequestError(f"{shown(self.priority)} is no CachePriority.", field="cache.priority")
        check_field(FIELDS["ttl_s"], self.ttl_s)
        if not isinstance(self.store, CacheStore):
            raise InvalidRequestError(f"{shown(self.store)} is no CacheStore.", field="cache.store")
        pinned = self.session or self.priority is CachePriority.HIGH
        if self.store is not CacheStore.ALL and pinned or self.store is CacheStore.NEVER and self.ttl_s is not None:
            lacking = "a session, high priority" + (" or ttl" if self.store is CacheStore.NEVER else "")
            message = f"cache.store {self.store.value!r} keeps no pages for {lacking}: leave out one of both."
            raise InvalidRequestError(message, field="cache.store")

    @property
    def stays_on_device(self) -> bool:
        """True if the pages that the request makes may go to no lower tier under a name that others find."""
        return self.priority is CachePriority.LOW or self.store is not CacheStore.ALL


@dataclass(frozen=True, slots=True)
class ContentSpan:
    """Prompt tokens [begin, end) that stand for content, such as an image, which their ids do not identify. `digest`
    (CONTENT_DIGEST_BYTES) is a cryptographic hash of that content; requests share KV pages by it. `pixels`: an image as
    its encoder reads it, uint8 [size, size, 3], RGB. Its features replace the embeddings, and the tokens see one
    another, so a step computes all of them or none. Empty where ids alone are embedded, and each token sees those
    before it."""

    begin: int
    end: int
    digest: bytes
    pixels: Bytes = b""

    def __post_init__(self) -> None:
        check_integer("content", self.begin, 0, 1 << 31)
        check_integer("content", self.end, self.begin + 1, 1 << 31)
        if not isinstance(self.digest, bytes) or len(self.digest) != CONTENT_DIGEST_BYTES:
            raise InvalidRequestError(f"A content digest has {CONTENT_DIGEST_BYTES} bytes.", field="content")


@dataclass(frozen=True, slots=True)
class ImageFile:
    """Image of a request as a client gives it: the bytes of a file, or a URL from which a server may fetch it. `crops`
    asks for pan and scan: crops of a long image are encoded beside the whole. `field` names its place for errors.
    `pixels` and their `digests`, once it is prepared, are in place of these: those of the whole image, then of its
    crops, as ContentSpan has them."""

    data: bytes = b""
    url: str = ""
    crops: bool = False
    field: str = "images"
    pixels: tuple[Bytes, ...] = ()
    digests: tuple[bytes, ...] = ()

    def __post_init__(self) -> None:
        given = [isinstance(self.data, bytes) and self.data, isinstance(self.url, str) and self.url, self.pixels]
        if sum(map(bool, given)) != 1:
            raise InvalidRequestError("An image is the bytes of a file, or a URL.", field=self.field)

    @property
    def remote(self) -> bool:
        """Tell whether its bytes must be fetched; a `data:` URL has them."""
        return bool(self.url) and self.url[:5].lower() != "data:"


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """Request of a client after validation and tokenization.

    `deadline` is a time.monotonic() stamp or None. `priority`, in [-2, 2]: of one tenant's requests lower runs first, 0
    is normal. `tenant` is set by the server, never by a client. `cache_salt` is the client's own: two requests share
    pages only when their tenants and their salts are equal. `log_id` names the request in the log. `content`: spans of
    the prompt that token ids do not identify, in order and apart.

    Raises InvalidRequestError with the field's name for values of another type or out of range; integers of numpy among
    the token ids become plain ones.
    """

    request_key: str
    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    deadline: float | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    cache: CacheHints = CacheHints()
    log_id: str = ""
    content: tuple[ContentSpan, ...] = ()

    def __post_init__(self) -> None:
        check_text("request_key", self.request_key, MAX_REQUEST_ID)
        _check_request(self)
        object.__setattr__(self, "prompt_token_ids", as_token_ids(self.prompt_token_ids))
        begun = 0
        for span in self.content:
            if not isinstance(span, ContentSpan) or not begun <= span.begin < span.end <= len(self.prompt_token_ids):
                raise InvalidRequestError("Content spans are in order, apart and inside the prompt.", field="content")
            begun = span.end
        object.__setattr__(self, "content", tuple(self.content))
        if self.deadline is not None:
            check_finite("deadline", self.deadline, -MAX_TIMEOUT_S, MAX_TIMEOUT_S)


class TokenOutput(Struct, frozen=True, array_like=True, omit_defaults=True, gc=False):
    """Tokens that one sequence of one request gained in one or more steps; the engine loop's only output.

    `index` is the sequence in [0, n). `usage` counts up to and including this output. `finish_reason` is set on the
    last output of the sequence; `stop_reason` is the stop token id or stop string that ended it, if one did. `error` is
    set with FinishReason.ERROR, and `field` when a field of the request is the cause. An error without `usage` is the
    whole request's. `prompt_logprobs`, where requested, come before the first token, one for each token of the prompt,
    in parts; the first token has no predecessor, so 0 and no alternatives. `prefill_s`, with a sequence's first tokens:
    seconds since its first step began. `retry_s`: the request was refused; retry after so many seconds. A
    msgspec.Struct, because it may cross to another process.
    """

    request_key: str
    index: int
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    error: str | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()
    prefill_s: float | None = None
    field: str | None = None
    retry_s: float | None = None


class TextOutput(Struct, frozen=True):
    """TokenOutput after detokenization: `text` is the delta, with partial UTF-8 and partial stops held back. The last
    output of a sequence has `usage` and `finish_reason`. A Struct for speed: a front makes one for every token."""

    request_id: str
    index: int
    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    usage: Usage | None = None
    prompt_logprobs: tuple[TokenLogprob, ...] = ()


def merge_outputs(parts: Sequence[TextOutput]) -> TextOutput:
    if len(parts) == 1:
        return parts[0]
    return structs.replace(
        parts[-1],
        text="".join(part.text for part in parts),
        token_ids=tuple(token for part in parts for token in part.token_ids),
        logprobs=tuple(entry for part in parts for entry in part.logprobs),
        prompt_logprobs=tuple(entry for part in parts for entry in part.prompt_logprobs),
    )


@dataclass(frozen=True, slots=True)
class Completion:
    text: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    usage: Usage
    logprobs: tuple[TokenLogprob, ...] = ()
    prompt_logprobs: tuple[TokenLogprob, ...] = ()

    @classmethod
    def from_outputs(cls, parts: Sequence[TextOutput]) -> Completion:
        whole = merge_outputs(parts)
        assert whole.finish_reason is not None and whole.usage is not None
        return cls(
            whole.text, whole.token_ids, whole.finish_reason, whole.stop_reason, whole.usage, whole.logprobs,
            whole.prompt_logprobs,
        )  # fmt: skip


Prompt = str | Sequence[int] | Mapping[str, object]
"""Text, token ids, or one of these as the dict {"prompt": text} or {"prompt_token_ids": ids}."""


def prompt_list(prompts: Prompt | Sequence[Prompt]) -> Sequence[Prompt]:
    single = isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], Integral))
    return [prompts] if single else prompts  # type: ignore[return-value, list-item]


def pair_prompts(
    prompts: Prompt | Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams] | None
) -> list[tuple[Prompt, SamplingParams]]:
    """Pair each prompt with its params. Raises InvalidRequestError unless there are params for all, or one for each."""
    many = prompt_list(prompts)
    if params is None or isinstance(params, SamplingParams):
        params = [params or SamplingParams()] * len(many)
    if not isinstance(params, Sequence) or not all(isinstance(one, SamplingParams) for one in params):
        raise InvalidRequestError(f"params must be SamplingParams, got {shown(params)}.", field="params")
    if len(params) != len(many):
        raise InvalidRequestError(f"There are {len(params)} params for {len(many)} prompts.", field="params")
    return list(zip(many, params, strict=True))


def prompt_fields(prompt: Prompt | Sequence[Mapping[str, object]]) -> dict[str, Any]:
    """Return the field of TextRequest for a prompt, or for a conversation of {"role", "content"} turns. Raises
    InvalidRequestError for a dict that is no prompt."""
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if isinstance(prompt, Mapping):
        match {name: value for name, value in prompt.items() if value is not None}:
            case {"prompt": str() as text, **others} if not others:
                return {"prompt": text}
            case {"prompt_token_ids": ids, **others} if not others:
                return {"prompt_token_ids": as_token_ids(ids)}
        raise InvalidRequestError(
            f"A prompt that is a dict has either a text as prompt or prompt_token_ids, got {shown(prompt)}.",
            field="prompt",
        )
    if len(prompt) > 0 and isinstance(prompt[0], Mapping):
        return {"messages": tuple(prompt)}
    return {"prompt_token_ids": as_token_ids(prompt)}


@dataclass(frozen=True, slots=True)
class TextRequest:
    """Request at the text level; exactly one of `prompt`, `prompt_token_ids`, `messages` is given.

    `messages` are chat turns ({"role", "content"}), rendered by the model's own template. `functions` ({"name",
    "description", "parameters"}) are those that the model may call, and `chat_template_kwargs` the template's other
    variables. `timeout_s` counts from submission. `add_bos` applies to `prompt` only, and `content` to the whole of
    `prompt_token_ids`. The rest is as in GenerateRequest, which checks the token ids.

    Raises InvalidRequestError with the field's name for values of another type or out of range.
    """

    request_id: str
    params: SamplingParams
    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[Mapping[str, object], ...] | None = None
    timeout_s: float | None = None
    priority: int = 0
    tenant: str = ""
    cache_salt: str = ""
    cache: CacheHints = CacheHints()
    add_bos: bool = True
    functions: tuple[Mapping[str, Any], ...] = ()
    log_id: str = ""
    replica: int | None = None
    """Index of the replica that must compute it, where there are several."""
    chat_template_kwargs: Mapping[str, Any] | None = None
    add_generation_prompt: bool = True
    """End a conversation with the opening of the model's turn."""
    truncate_prompt_tokens: int | None = None
    """The last tokens of the prompt that are kept; -1: as many as fit."""
    content: tuple[ContentSpan, ...] = ()
    images: tuple[ImageFile, ...] = ()
    """Images of `messages`, whose parts {"type": "image"} mark their places in order, or of `prompt`, whose places are
    the model's begin-of-image tokens."""

    def __post_init__(self) -> None:
        check_text("request_id", self.request_id, MAX_REQUEST_ID)
        _check_request(self)
        if self.prompt is not None and not isinstance(self.prompt, str):
            raise InvalidRequestError(f"prompt must be text, got {type(self.prompt).__name__}.", field="prompt")
        check_field(FIELDS["timeout_s"], self.timeout_s)
        check_field(FIELDS["add_bos"], self.add_bos)
        check_field(FIELDS["add_generation_prompt"], self.add_generation_prompt)
        if self.truncate_prompt_tokens != -1:
            check_field(FIELDS["truncate_prompt_tokens"], self.truncate_prompt_tokens)
        if self.content and (self.prompt_token_ids is None or self.truncate_prompt_tokens is not None):
            raise InvalidRequestError("content needs prompt_token_ids, none of them truncated.", field="content")


def _check_request(request: GenerateRequest | TextRequest) -> None:
    if not isinstance(request.params, SamplingParams):
        raise InvalidRequestError(
            f"params must be SamplingParams, got {type(request.params).__name__}.", field="params"
        )
    check_field(FIELDS["priority"], request.priority)
    check_text("tenant", request.tenant, MAX_CACHE_SALT)
    check_field(FIELDS["cache_salt"], request.cache_salt)
    if not isinstance(request.cache, CacheHints):
        raise InvalidRequestError(f"cache must be CacheHints, got {type(request.cache).__name__}.", field="cache")


@dataclass(frozen=True, slots=True)
class ImageInfo:
    """Images that an engine reads: squares of `size` pixels, each `tokens` times the token `soft_id` of a prompt,
    between the tokens `begin_id` and `end_id`."""

    size: int
    tokens: int
    begin_id: int
    soft_id: int
    end_id: int


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """Description of a loaded engine, for GetModelInfo and `wicore inspect`. `page_tokens` is 0 if the backend keeps
    its own KV cache; of `engine_context_tokens`, for which the engine was built, `max_context_tokens` are served."""

    model_id: str
    backend: str
    kernels: str
    dtype: str
    kv_dtype: str
    quantization: str | None
    max_context_tokens: int
    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    chat: bool
    page_tokens: int = 0
    aliases: tuple[str, ...] = ()
    """Other names that it is served under."""
    engine_context_tokens: int = 0
    ranks: int = 1
    build: str = ""
    """Names the build of the engine, tokenizer files included; `fingerprint` is the same for equal weights."""
    chat_note: str | None = None
    """A note for users who chat with it: that it is a base model, or why it cannot chat."""
    images: ImageInfo | None = None
    """Facts on images; None for an engine that reads text alone."""

    @property
    def names(self) -> tuple[str, ...]:
        return (self.model_id, *self.aliases)

    def shown_as(self, name: str | None) -> str:
        """Return the name to answer a client that asked for `name`. Raises ModelNotFoundError for another model's."""
        if name is not None and name not in self.names:
            raise ModelNotFoundError(
                f"Model {shown(name)} is not served here; {', '.join(map(repr, self.names))} is.",
                fix="Ask for that, or serve it under this name too: --served-model-name A,B.",
            )
        return name or self.model_id


@dataclass(frozen=True, slots=True)
class PoolStats:
    """Pages of one layer group on the device. `cached` pages hold reusable KV and are free to be taken."""

    group: str
    total_pages: int
    used_pages: int
    cached_pages: int
    page_bytes: int


@dataclass(frozen=True, slots=True)
class TierStats:
    """Tier of the KV cache ("device", "host" or "disk"), counters since start and gauges.

    `used_bytes` hold pages; `pages` counts them by layer group, and `raw_bytes` is what those that are there take on
    the device. `hit_tokens` are prompt tokens that this tier saved
    (each token counts once, for the tier that was nearest). `read_*` is traffic towards the device, `write_*` into
    this tier. `evictions` and `failures` count pages by cause. `queue_depth` is the number of transfers under way.
    """

    tier: str
    capacity_bytes: int
    used_bytes: int
    pinned_bytes: int
    pages: Mapping[str, int]
    hit_tokens: int
    read_bytes: int = 0
    read_seconds: float = 0.0
    write_bytes: int = 0
    write_seconds: float = 0.0
    evictions: Mapping[str, int] = field(default_factory=dict)
    failures: Mapping[str, int] = field(default_factory=dict)
    queue_depth: int = 0
    raw_bytes: int = 0


@dataclass(frozen=True, slots=True)
class KVStats:
    """Whole KV cache. `decisions` counts the planner's choices ("compute", "load", "split"); `parked` and `resumed`
    preempted sequences whose pages waited in host memory; `event_sequence` is the last KV event's."""

    tiers: tuple[TierStats, ...] = ()
    decisions: Mapping[str, int] = field(default_factory=dict)
    parked: int = 0
    resumed: int = 0
    event_sequence: int = 0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Counters since start (tokens, requests, steps) and gauges (running, waiting, pools). Fields with a default keep
    it where they are unknown or belong to no single tenant."""

    uptime_s: float
    requests_running: int
    requests_waiting: int
    requests_finished: Mapping[str, int]
    prompt_tokens: int
    cached_prompt_tokens: int
    generated_tokens: int
    steps: int = 0
    step_seconds: float = 0.0
    step_tokens: tuple[int, ...] = ()
    """Steps by their tokens, as `core.times.STEP_TOKENS` parts them, and behind these the tokens of all."""
    preemptions: int = 0
    pools: tuple[PoolStats, ...] = ()
    kv: KVStats = field(default_factory=KVStats)
