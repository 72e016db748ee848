"""Partners of `wicore chat`: a server over gRPC or HTTP, or an engine in this process.

Must not know terminals. Invariant: closing a stream, or an exception inside it, ends its request.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from wicore_trt.errors import AuthenticationError, InvalidRequestError, UnavailableError, WicoreError

Prompt = str | Sequence[Mapping[str, Any]]
TIMEOUT_S = 600.0


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """Text that came, and the counts (prompt, completion, cached) where they are known."""

    text: str
    counts: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Partner:
    """`chats`: whether the model has a chat template. `steps_here`: the work is done in this process, and must not be
    left in the middle of a step."""

    chats: bool
    stream: Callable[[Prompt, Mapping[str, Any]], Iterator[ReplyPart]]
    close: Callable[[], None]
    steps_here: bool = False


def partner_of(where: str, *, api_key: str | None, ca: Path | None, threads: int) -> Partner:
    """Choose the partner by `where`: a URL, an engine's directory, else HOST:PORT of gRPC."""
    if where.startswith(("http://", "https://")):
        return _open_http(where.rstrip("/"), api_key, ca)
    if Path(where).is_dir():
        from wicore_trt.llm import LLM

        llm = LLM(Path(where), executor__threads=threads)
        return Partner(llm.info.chat, _adapt_stream(llm.stream), llm.close, steps_here=True)
    if "/" in where:
        raise InvalidRequestError(f"{where} is neither a directory nor an address.", field="where")
    from wicore_trt.client import Client

    client = Client(where, api_key=api_key, ca=ca)
    return Partner(client.has_chat_template(), _adapt_stream(client.stream), client.close)


def _adapt_stream(stream: Callable[..., Any]) -> Callable[[Prompt, Mapping[str, Any]], Iterator[ReplyPart]]:
    """Adapt `LLM.stream` and `Client.stream` to ReplyPart."""

    def pieces(prompt: Prompt, sampling: Mapping[str, Any]) -> Iterator[ReplyPart]:
        from wicore_trt.types import SamplingParams

        outputs = stream(prompt, SamplingParams(**sampling))
        try:
            for output in outputs:
                usage = output.usage
                counts = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) if usage else None
                yield ReplyPart(output.text, counts)
        finally:
            outputs.close()

    return pieces


def _open_http(url: str, api_key: str | None, ca: Path | None) -> Partner:
    def call(path: str, body: object = None) -> Any:
        return _send_request(url, path, body, api_key, ca)

    with call("/status") as answer:
        model = json.load(answer)["model"]
    if model is None:
        raise UnavailableError(f"{url} is loading its engine.", fix="Try again in a moment.")

    def stream(prompt: Prompt, sampling: Mapping[str, Any]) -> Iterator[ReplyPart]:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {**options, **{name: value for name, value in sampling.items() if value is not None}}
        path, field = ("/v1/completions", "prompt") if isinstance(prompt, str) else ("/v1/chat/completions", "messages")
        with call(path, {**body, field: prompt}) as answer:
            yield from _read_parts(answer)

    return Partner(model["chat"], stream, lambda: None)


def _send_request(url: str, path: str, body: object, api_key: str | None, ca: Path | None) -> Any:
    """Send a request and return the response. Raises the error that the server reports."""
    import ssl
    from urllib.error import HTTPError, URLError
    from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    request = Request(url + path, None if body is None else json.dumps(body).encode(), headers)
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=ssl.create_default_context(cafile=ca)))
    try:
        return opener.open(request, timeout=TIMEOUT_S)
    except HTTPError as error:
        try:
            text = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = f"{url} answered {error.code}."
        known = {401: AuthenticationError, 503: UnavailableError}
        raise known.get(error.code, WicoreError)(text) from None
    except URLError as error:
        raise UnavailableError(f"{url} does not answer: {error.reason}.") from None


def _read_parts(lines: Any) -> Iterator[ReplyPart]:
    """Read the events of a streamed answer. Raises WicoreError for one that breaks off."""
    failed = False
    for raw in lines:
        line = raw.decode().rstrip("\r\n")
        failed = failed or line == "event: error"
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return
        data = json.loads(line[6:])
        if failed:
            raise WicoreError(data["error"]["message"])
        choice: dict[str, Any] = next(iter(data["choices"]), {})
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        usage = data.get("usage")
        counts = None
        if usage:
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            counts = (usage["prompt_tokens"], usage["completion_tokens"], cached)
        yield ReplyPart(text, counts)
    raise WicoreError("The connection ended before the answer did.")
