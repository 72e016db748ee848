"""Targets of a benchmark that answer its requests: a server over gRPC, or an engine in this process.

Turns one BenchRequest into one RequestRecord; must not know sweeps or statistics. Invariant: a record without an error
has exactly the tokens that were asked for, by the server's own count. `bench/http.py` has servers over HTTP.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast

import grpc

from wicore_trt.bench.measure import RequestRecord
from wicore_trt.bench.workload import BenchRequest
from wicore_trt.client import to_plain
from wicore_trt.engine.manifest import read_manifest
from wicore_trt.errors import ConfigError, UnavailableError, WicoreError
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc
from wicore_trt.serve.lifecycle import choose_loop_factory
from wicore_trt.types import ModelInfo, SamplingParams, TextOutput, TextRequest, Usage

if TYPE_CHECKING:
    from wicore_trt.config import Settings
    from wicore_trt.core.text_engine import TextEngine

CONNECT_TIMEOUT_S = 30.0
MAX_MESSAGE_BYTES = 64 << 20
T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Served:
    """Facts of a model that a benchmark needs, where its server tells no more."""

    model_id: str
    vocab_size: int
    max_context_tokens: int


class Target(Protocol):
    """Generator under test. `info` describes its model; `chat` tells whether it takes turns of text, not tokens."""

    @property
    def info(self) -> ModelInfo | Served: ...
    @property
    def chat(self) -> bool: ...

    async def generate(self, request: BenchRequest, started: float | None = None) -> RequestRecord:
        """Run one request to its end. `started` is when it was due (time.perf_counter()), by default now. A request
        that fails or ends early gives a record with `error`; nothing is raised for it."""
        ...

    async def tier_hits(self) -> dict[str, int]:
        """Count prompt tokens that each tier of the KV cache has saved so far; empty where the server does not tell."""
        ...

    async def close(self) -> None: ...


def has_enough_tokens(request: BenchRequest, tokens: int) -> bool:
    return tokens == request.output_tokens or not request.ignore_eos and 0 < tokens < request.output_tokens


def describe_shortfall(request: BenchRequest, counted: int, received: int) -> str:
    return f"INCOMPLETE: asked for {request.output_tokens} tokens, usage says {counted}, {received} came"


class UnreadableError(Exception):
    """A message of a stream that is none."""


async def record_stream(
    request: BenchRequest, due: float | None, parts: AsyncIterator[tuple[Sequence[int], Usage | None]]
) -> RequestRecord:
    """Record the stream `parts` of tokens and, at the end, usage; one that fails, or lacks tokens asked for, as an
    error. `due` None: now."""
    sent = time.perf_counter()
    started = sent if due is None else due
    arrivals, answer = list[tuple[float, int]](), list[int]()
    usage, error = None, "INCOMPLETE: the stream ended without usage"
    try:
        async for tokens, counts in parts:
            if tokens:
                arrivals.append((time.perf_counter(), len(tokens)))
                answer.extend(tokens)
            usage = counts or usage
        if usage is not None and usage.completion_tokens == len(answer) and has_enough_tokens(request, len(answer)):
            numbers = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
            finished = time.perf_counter()
            return RequestRecord(started, finished, tuple(arrivals), *numbers, sent=sent, answer=tuple(answer))
        if usage is not None:
            error = describe_shortfall(request, usage.completion_tokens, len(answer))
    except UnreadableError:
        error = "INVALID: a message cannot be read"
    except grpc.aio.AioRpcError as failure:
        error = _name_status(failure)
    except WicoreError as failure:
        error = f"{failure.grpc_code}: {failure.message}"
    return RequestRecord(started, time.perf_counter(), error=error, sent=sent)


class GrpcTarget:
    """Running server; make it with `connect`."""

    chat = False

    def __init__(self, channel: grpc.aio.Channel, info: ModelInfo, metadata: tuple[tuple[str, str], ...]) -> None:
        self.info = info
        self._channel = channel
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        self._metadata = metadata

    @classmethod
    async def connect(cls, address: str, *, api_key: str | None = None, tls_ca: Path | None = None) -> GrpcTarget:
        """Connect to HOST:PORT; with `tls_ca` (a PEM file) over TLS. Raises UnavailableError when no server answers in
        CONNECT_TIMEOUT_S, and WicoreError when it refuses."""
        options = [("grpc.max_receive_message_length", MAX_MESSAGE_BYTES)]
        if tls_ca is None:
            channel = grpc.aio.insecure_channel(address, options)
        else:
            try:
                credentials = grpc.ssl_channel_credentials(tls_ca.read_bytes())
            except OSError as error:
                raise ConfigError(f"{tls_ca} cannot be read: {error.strerror}.") from None
            channel = grpc.aio.secure_channel(address, credentials, options)
        metadata = (("authorization", f"Bearer {api_key}"),) if api_key else ()
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        try:
            answer = await stub.GetModelInfo(
                pb2.GetModelInfoRequest(), metadata=metadata, timeout=CONNECT_TIMEOUT_S, wait_for_ready=True
            )
        except grpc.aio.AioRpcError as error:
            await channel.close()
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED:
                fix = "Start one: wicore serve ENGINE."
                raise UnavailableError(f"No server answers at {address}.", fix=fix) from None
            raise WicoreError(f"{address}: {_name_status(error)}.") from None
        if answer is None or not answer.vocab_size:
            await channel.close()
            raise WicoreError(f"{address} does not answer as our servers do.")
        return cls(channel, to_plain(answer), metadata)

    async def generate(self, request: BenchRequest, started: float | None = None) -> RequestRecord:
        sampling = pb2.SamplingParams(
            max_tokens=request.output_tokens, temperature=0.0, ignore_eos=request.ignore_eos
        )  # fmt: skip
        message = pb2.GenerateRequest(token_ids=pb2.TokenIds(ids=request.prompt_token_ids), sampling=sampling)
        return await record_stream(request, started, self._stream_parts(message))

    async def _stream_parts(self, message: pb2.GenerateRequest) -> AsyncGenerator[tuple[Sequence[int], Usage | None]]:
        async for response in self._stub.Generate(message, metadata=self._metadata):
            if response is None:  # what gRPC gives for a message that is none
                raise UnreadableError
            if not response.HasField("finish"):
                yield response.delta.token_ids, None
                continue
            counts = response.finish.usage
            usage = Usage(counts.prompt_tokens, counts.completion_tokens, counts.cached_tokens)
            yield response.finish.delta.token_ids, usage

    async def tier_hits(self) -> dict[str, int]:
        try:
            stats = await self._stub.GetStats(pb2.GetStatsRequest(), metadata=self._metadata, timeout=CONNECT_TIMEOUT_S)
        except grpc.aio.AioRpcError:
            return {}
        return {} if stats is None else {tier.tier: tier.hit_tokens for tier in stats.kv.tiers}

    async def close(self) -> None:
        await self._channel.close()


def _name_status(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"


class LocalTarget:
    """Engine in this process, behind the same TextEngine that a server uses; no network."""

    chat = False

    def __init__(self, engine: TextEngine) -> None:
        self.info = engine.info
        self._engine = engine
        self._ids = (f"bench-{os.getpid()}-{i}" for i in itertools.count())

    @classmethod
    async def load(cls, settings: Settings, *, awaited: bool = True) -> LocalTarget:
        """Load the engine that `settings` name. `awaited`: readers wait for each token. Raises what `load_engine`
        raises."""
        from wicore_trt.core.assemble import load_engine
        from wicore_trt.core.port import LocalEngine
        from wicore_trt.core.text_engine import TextEngine

        loaded = load_engine(settings)
        loaded.core.set_pace(awaited=awaited)
        local = LocalEngine(loaded.core, max_waiting=settings.scheduler.max_waiting)
        engine = TextEngine(local, loaded.tokenizer, loaded.info)
        await engine.start()
        return cls(engine)

    async def generate(self, request: BenchRequest, started: float | None = None) -> RequestRecord:
        params = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=request.ignore_eos)
        asked = TextRequest(next(self._ids), params, prompt_token_ids=request.prompt_token_ids)
        return await record_stream(request, started, self._stream_parts(asked))

    async def _stream_parts(self, request: TextRequest) -> AsyncGenerator[tuple[Sequence[int], Usage | None]]:
        stream = await self._engine.submit(request)
        async with aclosing(cast("AsyncGenerator[TextOutput]", stream)):
            async for output in stream:
                yield output.token_ids, output.usage

    async def tier_hits(self) -> dict[str, int]:
        kv = (await self._engine.engine.stats()).kv
        return {tier.tier: tier.hit_tokens for tier in kv.tiers}

    async def close(self) -> None:
        await self._engine.close()


async def open_target(
    settings: Settings, address: str | None, *, api_key: str | None, tls_ca: Path | None, awaited: bool = True
) -> GrpcTarget | LocalTarget:
    """Open the server at `address`, or without one the engine of `settings` in this process (`awaited` as for
    `LocalTarget.load`). Raises what opening raises, and ConfigError where `settings` name another engine than the
    server runs, or nothing is named."""
    engine = settings.engine
    if address is None:
        if engine is None:
            raise ConfigError("Nothing to measure.", fix="Give --engine DIR or --target HOST:PORT.")
        return await LocalTarget.load(settings, awaited=awaited)
    named = None if engine is None else read_manifest(Path(engine)).fingerprint
    target = await GrpcTarget.connect(address, api_key=api_key, tls_ca=tls_ca)
    if named not in (None, target.info.fingerprint):
        await target.close()
        fix = "Name the engine that the server runs, or leave --engine out."
        raise ConfigError(f"{address} runs {target.info.model_id}, another engine than {engine}.", fix=fix)
    return target


def run_quickly(work: Coroutine[Any, Any, T]) -> T:
    """Run on the event loop that servers use, which halves a client's cost of a message."""
    with asyncio.Runner(loop_factory=choose_loop_factory()) as runner:
        return runner.run(work)
