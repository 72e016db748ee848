"""Helpers of the HTTP tests: a real HttpServer on a real socket, over the checked fake executor."""

from __future__ import annotations

import asyncio
import io
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import httpx
from fake_tokenizer import IMAGE_BEGIN, IMAGE_END, IMAGE_SOFT, encode_any
from fakes import FAKE_INFO, FakeEncoder, FakeTokenizer, greedy, make_core
from PIL import Image

from wicore_trt.config import ServerSettings
from wicore_trt.core.port import LocalEngine
from wicore_trt.core.text_engine import TextEngine
from wicore_trt.http.server import HttpServer
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.batch import SampledTokens, StepBatch, StepResult
from wicore_trt.text.chat import shaped_turns
from wicore_trt.text.images import expand_marks
from wicore_trt.text.turns import has_calls, render_turns
from wicore_trt.types import ImageInfo, TokenLogprob

MAX_CONTEXT = 1024
VOCAB = 97
IMAGES = ImageInfo(8, FakeEncoder.tokens, IMAGE_BEGIN, IMAGE_SOFT, IMAGE_END)
"""Of engines that see."""
SEQUENCE = "\n\n\x7f~\n\n"


class WebTokenizer(FakeTokenizer):
    """Takes any text, and checks conversations as the real one does."""

    def encode(self, text, *, add_bos=True, max_tokens=None):
        return encode_any(text)

    def apply_chat(self, messages, *, functions=(), add_generation_prompt=True, max_tokens=None, images=(), **_):
        if functions or has_calls(messages):
            text = render_turns(messages, functions, add_generation_prompt=add_generation_prompt)
        else:
            turns = shaped_turns(messages, frozenset(("text", "answers", "system")))
            text = "".join(turn["content"] for turn in turns)
        return self.encode(expand_marks([text], images, "messages")[0])


TOKENIZER = WebTokenizer()
GREEDY = {"temperature": 0, "ignore_eos": True}


def with_logprobs(execute):
    """Steps that report probabilities: each alternative is the next id."""

    def reporting(batch: StepBatch) -> StepResult:
        result = execute(batch)
        counts = {piece.seq_id: piece.params.logprobs for piece in batch.slices if piece.params is not None}
        for i, sampled in enumerate(result.sampled):
            if (count := counts[sampled.seq_id]) is None:
                continue
            [token] = sampled.token_ids
            top = tuple(((token + k) % VOCAB, -0.5 - k) for k in range(count))
            result.sampled[i] = SampledTokens(sampled.seq_id, (token,), (TokenLogprob(token, -0.5, top),))
        return result

    return reporting


def make_engine(
    *, max_waiting: int = 100, step_s: float = 0.0, logprobs: bool = False, images: bool = False, **kwargs
) -> TextEngine:
    """A TextEngine over a FakeExecutor with room for a few sequences of MAX_CONTEXT tokens. With `images` it sees."""
    pages = {GLOBAL: 2 * MAX_CONTEXT // 4, LOCAL: 256}
    core = make_core(**{"pages": pages, "max_context": MAX_CONTEXT, "max_sequences": 16, **kwargs},
                     images=FakeEncoder() if images else None)  # fmt: skip
    core.executor.step_s = step_s
    if logprobs:
        core.executor.execute = with_logprobs(core.executor.execute)
    info = replace(FAKE_INFO, max_context_tokens=MAX_CONTEXT, bos_token_id=2, images=IMAGES if images else None)
    return TextEngine(LocalEngine(core, max_waiting=max_waiting), TOKENIZER, info)


def executor_of(engine: TextEngine):
    return engine.engine._loop._core.executor


def expected(prompt: str, count: int) -> str:
    """Text that the fake model continues a prompt with."""
    return TOKENIZER.decode(greedy(TOKENIZER.encode(prompt), count, ignore_eos=True))


@dataclass
class Running:
    server: HttpServer
    engine: TextEngine
    url: str
    client: httpx.AsyncClient

    @property
    def address(self) -> tuple[str, int]:
        host, _, port = self.url.removeprefix("http://").rpartition(":")
        return host, int(port)

    async def post(self, path: str, body: object, **kwargs) -> httpx.Response:
        return await self.client.post(path, json=body, **kwargs)

    async def completion(self, **body) -> httpx.Response:
        return await self.post("/v1/completions", {"prompt": "hello", "max_tokens": 5, **GREEDY, **body})

    async def chat(self, text: str = "hello", **body) -> httpx.Response:
        messages = [{"role": "user", "content": text}]
        return await self.post("/v1/chat/completions", {"messages": messages, "max_tokens": 5, **GREEDY, **body})


@asynccontextmanager
async def serving(engine=None, *, attach: bool = True, headers=None, **settings) -> AsyncIterator[Running]:
    """A started server, its engine and a client. Settings are those of ServerSettings; the port is a free one."""
    engine = engine or make_engine()
    server = HttpServer(ServerSettings(**{"http_port": 0, **settings}), MAX_CONTEXT)
    server.context.admission.rates._clock = lambda: 0.0  # what was taken is not filled up however long a test takes
    url = await server.start()
    if attach:
        await engine.start()
        server.context.attach(engine)
    try:
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60, verify=False) as client:
            yield Running(server, engine, url, client)
    finally:
        await server.stop(0)
        await engine.close()


async def until(condition, timeout_s: float = 60.0) -> None:
    """Wait until a condition holds; fails after `timeout_s`."""
    async with asyncio.timeout(timeout_s):
        while not condition():
            await asyncio.sleep(0.005)


def error_of(response: httpx.Response) -> dict:
    """The error of an answer, whose shape is checked: OpenAI's, or Anthropic's on its own routes."""
    body = response.json()
    error, anthropic = body["error"], response.url.path.startswith("/v1/messages")
    assert set(error) == {"message", "type", "param"} | (set() if anthropic else {"code"}) and error["message"]
    assert set(body) == ({"type", "error", "request_id"} if anthropic else {"error"})
    assert response.headers["x-request-id"]
    return error


def png(colour: int, width: int = 8, height: int = 8) -> bytes:
    """A file of one colour."""
    made = io.BytesIO()
    Image.new("RGB", (width, height), (colour, 2, 3)).save(made, "PNG")
    return made.getvalue()


def pixels(colour: int) -> bytes:
    """Pixels that an encoder is given of that file."""
    return bytes((colour, 2, 3)) * IMAGES.size**2


def expected_seeing(prompt: str, count: int) -> tuple[str, int]:
    """What the fake model continues a prompt with, ~ being the end of an image, and the prompt's tokens."""
    ids = []
    for token in TOKENIZER.encode(prompt):
        ids += [token, *[IMAGES.soft_id] * IMAGES.tokens] if token == IMAGES.begin_id else [token]
    return TOKENIZER.decode(greedy(ids, count, ignore_eos=True)), len(ids)
