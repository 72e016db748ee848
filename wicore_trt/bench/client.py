"""Who answers the requests of a benchmark: a server over gRPC, or an engine in this process.

Turns one BenchRequest into one RequestRecord; it must not know sweeps or statistics. Invariant: a record without an
error has exactly the tokens that were asked for, by the server's own count.
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import os
import time
from collections.abc import Sequence
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


class Target(Protocol):
    """Something that generates. `info` says which model it runs."""

    info: ModelInfo

    async def generate(self, request: BenchRequest, started: float | None = None) -> RequestRecord:
        """Run one request to its end. `started` is when it was due (time.perf_counter()); now, when left out.

        A request that fails or ends early gives a record with `error`; nothing is raised for it.
        """
        ...

    async def close(self) -> None: ...


def _record(
    request: BenchRequest, started: float, arrivals: Sequence[tuple[float, int]], usage: Usage | None
) -> RequestRecord:
    """The record of a stream that ended well, or of one that did not give what was asked for."""
    finished = time.perf_counter()
    received = sum(tokens for _, tokens in arrivals)
    if usage is None:
        return RequestRecord(started, finished, error="the stream ended without usage")
    if not usage.completion_tokens == received == request.output_tokens:
        error = f"asked for {request.output_tokens} tokens, usage says {usage.completion_tokens}, {received} came"
        return RequestRecord(started, finished, error=error)
    return RequestRecord(
        started, finished, tuple(arrivals), usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens
    )


class GrpcTarget:
    """A running server. Make it with `connect`."""

    def __init__(self, channel: grpc.aio.Channel, info: ModelInfo, metadata: tuple[tuple[str, str], ...]) -> None:
        self.info = info
        self._channel = channel
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)  # type: ignore[no-untyped-call]
        self._metadata = metadata

    @classmethod
    async def connect(cls, address: str, *, api_key: str | None = None, tls_ca: Path | None = None) -> GrpcTarget:
        """Connect to HOST:PORT; with `tls_ca` (a PEM file) over TLS.

        Raises UnavailableError when no server answers in CONNECT_TIMEOUT_S, and WicoreError when it refuses.
        """
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
            raise WicoreError(f"{address}: {_status(error)}.") from None
        return cls(channel, _model_info(answer), metadata)

    async def generate(self, request: BenchRequest, started: float | None = None) -> RequestRecord:
        message = pb2.GenerateRequest(
            token_ids=pb2.TokenIds(ids=request.prompt_token_ids),
            sampling=pb2.SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True),
        )
        arrivals: list[tuple[float, int]] = []
        usage = None
        started = time.perf_counter() if started is None else started
        try:
            async for response in self._stub.Generate(message, metadata=self._metadata):
                ended = response.HasField("finish")
                tokens = len((response.finish.delta if ended else response.delta).token_ids)
                if tokens:
                    arrivals.append((time.perf_counter(), tokens))
                if ended:
                    counts = response.finish.usage
                    usage = Usage(counts.prompt_tokens, counts.completion_tokens, counts.cached_tokens)
        except grpc.aio.AioRpcError as error:
            return RequestRecord(started, time.perf_counter(), error=_status(error))
        return _record(request, started, arrivals, usage)

    async def close(self) -> None:
        await self._channel.close()


def _status(error: grpc.aio.AioRpcError) -> str:
    return f"{error.code().name}: {error.details()}"


def _model_info(message: pb2.GetModelInfoResponse) -> ModelInfo:
    """The wire's fields have the names of ModelInfo's; unset ones are None."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(ModelInfo):
        descriptor = message.DESCRIPTOR.fields_by_name[field.name]
        value = getattr(message, field.name)
        if descriptor.has_presence and not message.HasField(cast("Any", field.name)):
            value = None
        values[field.name] = tuple(value) if field.name == "eos_token_ids" else value
    return ModelInfo(**values)


class LocalTarget:
    """An engine in this process, behind the same TextEngine that a server uses; no network."""

    def __init__(self, engine: TextEngine) -> None:
        """`engine` has started."""
        self.info = engine.info
        self._engine = engine
        self._ids = (f"bench-{os.getpid()}-{i}" for i in itertools.count())

    @classmethod
    async def load(cls, settings: Settings) -> LocalTarget:
        """Load the engine that `settings` name; raises what `load_engine` raises."""
        from wicore_trt.core.assemble import load_engine
        from wicore_trt.core.port import LocalEngine
        from wicore_trt.core.text_engine import TextEngine

        loaded = load_engine(settings)
        local = LocalEngine(loaded.core, max_waiting=settings.scheduler.max_waiting)
        engine = TextEngine(local, loaded.tokenizer, loaded.info)
        await engine.start()
        return cls(engine)

    async def generate(self, request: BenchRequest, started: float | None = None) -> RequestRecord:
        params = SamplingParams(max_tokens=request.output_tokens, temperature=0.0, ignore_eos=True)
        arrivals: list[tuple[float, int]] = []
        usage = None
        started = time.perf_counter() if started is None else started
        try:
            stream = await self._engine.submit(
                TextRequest(next(self._ids), params, prompt_token_ids=request.prompt_token_ids)
            )
            async with aclosing(cast("AsyncGenerator[TextOutput]", stream)):
                async for output in stream:
                    if output.token_ids:
                        arrivals.append((time.perf_counter(), len(output.token_ids)))
                    usage = output.usage or usage
        except WicoreError as error:
            return RequestRecord(started, time.perf_counter(), error=f"{error.grpc_code}: {error.message}")
        return _record(request, started, arrivals, usage)

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


async def open_loop(target: Target, requests: Sequence[BenchRequest], arrivals: Sequence[float]) -> list[RequestRecord]:
    """Send request i `arrivals[i]` seconds from now, whatever is still open. Latencies count from that moment, so a
    sender that falls behind makes them longer and not shorter."""
    origin = time.perf_counter()

    async def one(request: BenchRequest, due: float) -> RequestRecord:
        await asyncio.sleep(max(0.0, due - time.perf_counter()))
        return await target.generate(request, started=due)

    return await asyncio.gather(*(one(request, origin + at) for request, at in zip(requests, arrivals, strict=True)))
