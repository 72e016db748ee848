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
from collections.abc import Iterable, Sequence
from contextlib import aclosing
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import grpc

from wicore_trt.bench.measure import RequestRecord
from wicore_trt.bench.workload import BenchRequest
from wicore_trt.errors import ConfigError, UnavailableError, WicoreError
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc
from wicore_trt.types import ModelInfo, SamplingParams, TextOutput, TextRequest, Usage

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator

    from wicore_trt.config import Settings
    from wicore_trt.core.text_engine import TextEngine

CONNECT_TIMEOUT_S = 30.0
MAX_MESSAGE_BYTES = 64 << 20
UNREADABLE = "INVALID: a message cannot be read"


class Served(Protocol):
    """Facts of a model that a benchmark needs."""

    @property
    def model_id(self) -> str: ...
    @property
    def vocab_size(self) -> int: ...
    @property
    def max_context_tokens(self) -> int: ...


class Target(Protocol):
    """Generator under test. `info` describes its model; `chat` tells whether it takes turns of text, not tokens."""

    @property
    def info(self) -> Served: ...
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


def record_stream(
    request: BenchRequest,
    times: tuple[float, float],
    arrivals: Sequence[tuple[float, int]],
    usage: Usage | None,
    answer: Iterable[int],
) -> RequestRecord:
    """Record a stream that ended, or one without the tokens asked for as an error. `times`: when it was due, when it
    was sent."""
    started, sent = times
    finished = time.perf_counter()
    received = sum(tokens for _, tokens in arrivals)
    error = None
    if usage is None:
        error = "INCOMPLETE: the stream ended without usage"
    elif usage.completion_tokens != received or not has_enough_tokens(request, received):
        error = describe_shortfall(request, usage.completion_tokens, received)
    if usage is None or error:
        return RequestRecord(started, finished, error=error, sent=sent)
    counts = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens)
    return RequestRecord(started, finished, tuple(arrivals), *counts, sent=sent, answer=tuple(answer))


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
                raise UnavailableError(
                    f"No server answers at {address}.", fix="Start one: wicore serve ENGINE."
                ) from None
            raise WicoreError(f"{address}: {_name_status(error)}.") from None
        if answer is None or not answer.vocab_size:
            await channel.close()
            raise WicoreError(f"{address} does not answer as our servers do.")
        return cls(channel, _model_info(answer), metadata)

    async def generate(self, request: BenchRequest, started: float | None = None) -> RequestRecord:
        message = pb2.GenerateRequest(
            token_ids=pb2.TokenIds(ids=request.prompt_token_ids),
            sampling=pb2.SamplingParams(
                max_tokens=request.output_tokens, temperature=0.0, ignore_eos=request.ignore_eos
            ),
        )
        arrivals: list[tuple[float, int]] = []
        answer: list[int] = []
        usage = None
        sent = time.perf_counter()
        started = sent if started is None else started
        try:
            async for response in self._stub.Generate(message, metadata=self._metadata):
                if response is None:  # what gRPC gives for a message that is none
                    return RequestRecord(started, time.perf_counter(), error=UNREADABLE, sent=sent)
                last = response.HasField("finish")
                tokens = (response.finish.delta if last else response.delta).token_ids
                if tokens:
                    arrivals.append((time.perf_counter(), len(tokens)))
                    answer.extend(tokens)
                if last:
                    counts = response.finish.usage
                    usage = Usage(counts.prompt_tokens, counts.completion_tokens, counts.cached_tokens)
        except grpc.aio.AioRpcError as error:
            return RequestRecord(started, time.perf_counter(), error=_name_status(error), sent=sent)
        return record_stream(request, (started, sent), arrivals, usage, answer)

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


def _model_info(message: pb2.GetModelInfoResponse) -> ModelInfo:
    """Read ModelInfo, whose names are those of the wire's fields; unset ones are None."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(ModelInfo):
        descriptor = message.DESCRIPTOR.fields_by_name.get(field.name)
        if descriptor is None:
            continue
        value = getattr(message, field.name)
        if descriptor.has_presence and not message.HasField(cast("Any", field.name)):
            value = None
        values[field.name] = tuple(value) if field.name in ("eos_token_ids", "aliases") else value
    return ModelInfo(**values)


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
        arrivals: list[tuple[float, int]] = []
        answer: list[int] = []
        usage = None
        sent = time.perf_counter()
        started = sent if started is None else started
        try:
            stream = await self._engine.submit(
                TextRequest(next(self._ids), params, prompt_token_ids=request.prompt_token_ids)
            )
            async with aclosing(cast("AsyncGenerator[TextOutput]", stream)):
                async for output in stream:
                    if output.token_ids:
                        arrivals.append((time.perf_counter(), len(output.token_ids)))
                        answer += output.token_ids
                    usage = output.usage or usage
        except WicoreError as error:
            return RequestRecord(started, time.perf_counter(), error=f"{error.grpc_code}: {error.message}", sent=sent)
        return record_stream(request, (started, sent), arrivals, usage, answer)

    async def tier_hits(self) -> dict[str, int]:
        kv = (await self._engine.engine.stats()).kv
        return {tier.tier: tier.hit_tokens for tier in kv.tiers}

    async def close(self) -> None:
        await self._engine.close()


async def closed_loop(target: Target, requests: Sequence[BenchRequest], concurrency: int) -> list[RequestRecord]:
    """Keep `concurrency` requests open until all are done; records in the order of `requests`."""
    records: list[RequestRecord | None] = [None] * len(requests)
    queue = iter(range(len(requests)))

    async def worker() -> None:
        for index in queue:
            records[index] = await target.generate(requests[index])

    await asyncio.gather(*(worker() for _ in range(min(concurrency, len(requests)))))
    return [record for record in records if record is not None]
