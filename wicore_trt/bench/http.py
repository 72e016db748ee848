"""Benchmark targets over HTTP: any server that streams OpenAI's completions or chat completions.

Turns one BenchRequest into one RequestRecord; must not know sweeps or statistics. Invariants: a moment is taken when
bytes came from the network, before they are read. Tokens are the server's `usage` where it gives one: counts in each
chunk (`continuous_usage_stats`), else one a chunk if their number is the final usage, else only the sum is known.
aiohttp costs half as much as httpx for each chunk.
"""

from __future__ import annotations

import asyncio
import errno
import resource
import ssl
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import aiohttp
import msgspec

from wicore_trt.bench.client import CONNECT_TIMEOUT_S, Served, describe_shortfall, has_enough_tokens
from wicore_trt.bench.measure import RequestRecord
from wicore_trt.bench.workload import BenchRequest
from wicore_trt.errors import ConfigError, UnavailableError, WicoreError, shortened

ANY_VOCABULARY = 32_000
"""Token ids below it are in the vocabulary of any model of today, where a server does not tell."""
ANY_CONTEXT = 1 << 62
KEEP_ALIVE_S = 3.0
"""Shorter than servers wait before they close an idle connection, so that no request goes to one that is closing."""
READ_BYTES = 1 << 20
UNREADABLE = (msgspec.MsgspecError, UnicodeDecodeError, RecursionError)
"""Errors of a decoder for bytes that are no JSON, or JSON of another shape."""
Count = Annotated[int, msgspec.Meta(ge=0, lt=1 << 53)]
"""A number of tokens."""
FAILURES = ("abort", "error")
"""Reasons to finish that are none of the model's."""
HIT_COUNTERS = {"vllm:prefix_cache_hits_total": "device", "vllm:external_prefix_cache_hits_total": "external"}
"""Tiers by counter, where a server names none."""


class ModelOfList(msgspec.Struct):
    id: str
    max_model_len: Any = None


class ModelList(msgspec.Struct):
    """Fields of /v1/models that a benchmark reads."""

    data: list[ModelOfList]


class PromptDetails(msgspec.Struct):
    cached_tokens: Count | None = None


class UsageOfChunk(msgspec.Struct):
    prompt_tokens: Count = 0
    completion_tokens: Count = 0
    prompt_tokens_details: PromptDetails | None = None


class ChatDelta(msgspec.Struct):
    content: str | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    tool_calls: Any = None


class Choice(msgspec.Struct):
    text: str | None = None
    delta: ChatDelta | None = None
    finish_reason: str | None = None


class Chunk(msgspec.Struct):
    """Fields of a chunk that a benchmark reads."""

    choices: list[Choice] = []
    usage: UsageOfChunk | None = None
    error: Any = None


_decode = msgspec.json.Decoder(Chunk).decode


@dataclass(slots=True)
class Stream:
    """Progress of one answer. `texts` are the moments of chunks with text, `counts` (moment, tokens so far) those of
    chunks with a usage and a choice; `bare` is set by a text without a usage beside it. `done` is set by "[DONE]", or
    by a finish reason where a server omits that."""

    texts: list[float] = field(default_factory=list)
    counts: list[tuple[float, int]] = field(default_factory=list)
    parts: list[str] = field(default_factory=list)
    usage: UsageOfChunk | None = None
    bare: bool = False
    done: bool = False
    error: str | None = None
    _rest: bytes = b""

    def take_bytes(self, data: bytes, now: float) -> None:
        """Take bytes that came at `now`. Raises UNREADABLE for what is no chunk."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                event = line[5:].strip()
                if event == b"[DONE]":
                    self.done = True
                elif event:
                    self._take_chunk(_decode(event), now)

    def _take_chunk(self, chunk: Chunk, now: float) -> None:
        if chunk.error is not None:
            error = chunk.error
            self.error = str(error.get("message", error) if isinstance(error, Mapping) else error)
        text = False
        for choice in chunk.choices:
            delta = choice.delta or ChatDelta()
            said = choice.text or delta.content
            if said:
                self.parts.append(said)
            if choice.finish_reason in FAILURES:
                self.error = f"finish_reason {choice.finish_reason}"
            self.done = self.done or choice.finish_reason is not None
            text = text or bool(said or delta.reasoning or delta.reasoning_content or delta.tool_calls)
        if text:
            self.texts.append(now)
        if chunk.usage is not None:
            self.usage = chunk.usage
            if chunk.choices:
                self.counts.append((now, chunk.usage.completion_tokens))
        elif text:
            self.bare = True

    def arrivals(self) -> list[tuple[float, int]]:
        """List (moment, tokens) of the chunks that brought tokens; where tokens are unknown, one for each with text."""
        if self.bare or not self.counts:
            return [(moment, 1) for moment in self.texts]
        found, before = [], 0
        for moment, tokens in self.counts:
            if tokens > before:
                found.append((moment, tokens - before))
                before = tokens
        return found


class HttpTarget:
    """Running server; make it with `connect`."""

    def __init__(
        self, session: aiohttp.ClientSession, url: str, info: Served, chat: bool, extra: Mapping[str, Any]
    ) -> None:
        self.info, self.chat = info, chat
        self._session, self._url, self._extra = session, url, extra
        self._path = f"{url}/v1/chat/completions" if chat else f"{url}/v1/completions"

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        chat: bool = False,
        model: str | None = None,
        api_key: str | None = None,
        tls_ca: Path | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> HttpTarget:
        """Connect to the server whose API is at `url` or `url` + "/v1". `extra` are fields of each body; null removes a
        field. Raises UnavailableError when no server answers in CONNECT_TIMEOUT_S, and WicoreError when it refuses."""
        url = url.rstrip("/").removesuffix("/v1")
        try:
            tls = ssl.create_default_context(cafile=tls_ca)
        except OSError as error:
            raise ConfigError(f"{tls_ca} cannot be read: {error.strerror}.") from None
        most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        with suppress(ValueError, OSError):  # each open request is a socket
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
        session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, ssl=tls, keepalive_timeout=KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_TIMEOUT_S),
            read_bufsize=READ_BYTES,
            headers={"authorization": f"Bearer {api_key}"} if api_key else {},
        )
        try:
            return cls(session, url, await _read_model_list(session, url, model), chat, extra or {})
        except BaseException:
            await session.close()
            raise

    async def generate(self, request: BenchRequest, started: float | None = None) -> RequestRecord:
        body = {
            "model": self.info.model_id, "temperature": 0.0, "max_tokens": request.output_tokens, "stream": True,
            **({"messages": request.messages} if self.chat else {"prompt": request.prompt_token_ids}),
            "stream_options": {"include_usage": True, "continuous_usage_stats": True},
            **({"ignore_eos": True} if request.ignore_eos else {}), **self._extra,
        }  # fmt: skip
        data = msgspec.json.encode({name: value for name, value in body.items() if value is not None})
        stream, error = Stream(), None
        sent = time.perf_counter()
        started = sent if started is None else started
        try:
            headers = {"content-type": "application/json"}
            async with self._session.post(self._path, data=data, headers=headers) as response:
                if response.status == 200:
                    async for block in response.content.iter_any():
                        stream.take_bytes(block, time.perf_counter())
                else:
                    error = f"{response.status}: {_find_message(await response.read())}"
        except aiohttp.ClientConnectorError as failure:
            error = f"CONNECT: {failure}"
        except (aiohttp.ClientError, OSError) as failure:
            error = f"BROKEN: {failure or type(failure).__name__}"
        except UNREADABLE as failure:
            error = f"INVALID: {failure}"
        return self._make_record(request, started, sent, stream, error)

    def _make_record(
        self, request: BenchRequest, started: float, sent: float, stream: Stream, error: str | None
    ) -> RequestRecord:
        finished, arrivals, usage = time.perf_counter(), stream.arrivals(), stream.usage
        tokens = len(stream.texts) if usage is None else usage.completion_tokens
        if error is None and stream.error is not None:
            error = f"ERROR: {stream.error}"
        elif error is None and not stream.done:
            error = "BROKEN: the stream ended before its end"
        elif error is None and (not arrivals or usage is not None and not has_enough_tokens(request, tokens)):
            error = describe_shortfall(request, tokens, sum(count for _, count in arrivals))
        if error is not None:
            return RequestRecord(started, finished, error=shortened(error), sent=sent)
        cached = usage.prompt_tokens_details.cached_tokens if usage and usage.prompt_tokens_details else None
        return RequestRecord(
            started, finished, tuple(arrivals), usage.prompt_tokens if usage else 0, tokens, cached or 0, sent=sent,
            counted=usage is not None, tells_cached=cached is not None, answer="".join(stream.parts),
        )  # fmt: skip

    async def tier_hits(self) -> dict[str, int]:
        from prometheus_client.parser import text_string_to_metric_families

        hits: dict[str, int] = {}
        # whatever is there: a run that has ended must not be lost for it
        with suppress(aiohttp.ClientError, OSError, TimeoutError, ValueError, KeyError, OverflowError):
            async with asyncio.timeout(CONNECT_TIMEOUT_S), self._session.get(f"{self._url}/metrics") as answer:
                text = await answer.text() if answer.status == 200 else ""
            samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
            own = [sample for sample in samples if sample.name == "wicore_kv_hit_tokens_total"]
            for sample in own or [sample for sample in samples if sample.name in HIT_COUNTERS]:
                tier = sample.labels["tier"] if own else HIT_COUNTERS[sample.name]
                hits[tier] = hits.get(tier, 0) + int(sample.value)
        return hits

    async def close(self) -> None:
        await self._session.close()


async def _read_model_list(session: aiohttp.ClientSession, url: str, model: str | None) -> Served:
    """Read `model`, or the first one, from /v1/models; our own servers add their vocabulary. A server without that list
    accepts any model."""
    try:
        async with asyncio.timeout(CONNECT_TIMEOUT_S):
            async with session.get(f"{url}/v1/models") as answer:
                body = await answer.read()
                if answer.status in (401, 403) or answer.status != 200 and model is None:
                    raise WicoreError(f"{url}: {answer.status}: {_find_message(body)}.")
                if answer.status == 200:
                    models = msgspec.json.decode(body, type=ModelList).data
                else:
                    models = [ModelOfList(str(model))]
            known = next((m for m in models if model in (None, m.id)), None)
            if known is None:
                raise ConfigError(f"{url} does not serve {model}.", fix=f"It serves {', '.join(m.id for m in models)}.")
            async with session.get(f"{url}/status") as answer:
                status = await answer.read()
    except (aiohttp.ClientError, OSError, TimeoutError) as error:
        refused = getattr(error, "errno", None) == errno.ECONNREFUSED
        why = "Connection refused" if refused else error or type(error).__name__
        fix = "Start one (wicore serve) or give another address."
        raise UnavailableError(f"No server answers at {url}: {why}.", fix=fix) from None
    except UNREADABLE as error:
        raise WicoreError(f"{url} does not answer as OpenAI's API does: {error}.") from None
    size = None
    with suppress(*UNREADABLE, KeyError, TypeError):  # another server's /status is anything
        size = msgspec.json.decode(status)["model"]["vocab_size"]
    return Served(known.id, _parse_size(size, ANY_VOCABULARY), _parse_size(known.max_model_len, ANY_CONTEXT))


def _parse_size(value: Any, otherwise: int) -> int:
    return value if type(value) is int and 0 < value < 1 << 31 else otherwise


def _find_message(body: bytes) -> str:
    with suppress(*UNREADABLE, KeyError, TypeError):
        error = msgspec.json.decode(body)["error"]
        return str(error["message"] if isinstance(error, dict) else error)
    return shortened(body.decode(errors="replace"))
