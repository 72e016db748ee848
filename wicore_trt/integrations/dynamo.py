"""A worker of NVIDIA Dynamo for one server: `python -m wicore_trt.integrations.dynamo --server HOST:PORT`.

Runs beside `wicore serve` in its own environment with ai-dynamo-runtime, and speaks the worker protocol
(serve/worker.py). Dynamo's frontend handles text, counts tokens, and moves streams of a dead worker. It must not know
engines. Invariants: a stream ends with a finish reason, an error after which Dynamo moves the request, or an error of
the request; when the server takes no more requests this worker exits, and its starter restarts it.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import io
import json
import logging
import os
import shutil
import signal
import tempfile
import zipfile
from collections.abc import AsyncGenerator, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import grpc
from dynamo.common.backend import EngineConfig, LLMEngine, LlmRegistration, WorkerConfig
from dynamo.common.backend.publisher import ComponentSnapshot, PushSource
from dynamo.common.backend.run import run
from dynamo.llm.exceptions import HttpError, InvalidArgument, StreamIncomplete, Unknown
from smg_grpc_proto import vllm_engine_pb2 as pb2
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

log = logging.getLogger(__name__)

POLL_S = 1.0
"""Seconds between two questions to the server: its load, and whether it takes requests."""
READY_S = 3600.0
"""An engine of many gigabytes takes minutes to load."""
GRACE, GRACE_S = "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS", 30
"""After SIGTERM Dynamo waits so long, and then cancels what streams there are."""
_SAMPLING = (
    "temperature", "top_p", "min_p", "frequency_penalty", "presence_penalty", "repetition_penalty", "seed", "n",
    "include_stop_str_in_output", "max_tokens", "min_tokens", "ignore_eos", "logprobs",
)  # fmt: skip
_TEMPLATES = ("chat_template.jinja", "chat_template.json")


class WicoreEngine(LLMEngine):
    """Dynamo's engine: the server at the other end of `stub`."""

    def __init__(self, stub: vllm_engine_pb2_grpc.VllmEngineStub, info: Any, page_tokens: int, model: Path) -> None:
        self._stub, self._info, self._page_tokens, self._model = stub, info, page_tokens, model
        self._events: Any = None  # Dynamo's publishers
        self._loads: Any = None
        self._endpoint: Any = None
        self._open = 0
        self._tasks: list[asyncio.Task[None]] = []
        self._loop = asyncio.get_running_loop()

    @classmethod
    async def from_args(cls, argv: list[str] | None = None) -> tuple[WicoreEngine, WorkerConfig]:
        """Wait for the server, and take its tokenizer from it."""
        args = _make_parser().parse_args(argv)
        stub = _open_stub(args)
        while True:
            with suppress(grpc.aio.AioRpcError):
                if (await stub.HealthCheck(pb2.HealthCheckRequest(), timeout=READY_S, wait_for_ready=True)).healthy:
                    break
            await asyncio.sleep(POLL_S)
        info = await stub.GetModelInfo(pb2.GetModelInfoRequest())
        server = await stub.GetServerInfo(pb2.GetServerInfoRequest())
        model = await _model_files(stub, info, Path(args.cache))
        chats = any((model / name).exists() for name in _TEMPLATES)
        chats = chats or "chat_template" in json.loads((model / "tokenizer_config.json").read_bytes())
        engine = cls(stub, info, server.block_size, model)
        return engine, WorkerConfig(
            namespace=args.namespace,
            component=args.component,
            endpoint=args.endpoint,
            model_name=str(model),
            served_model_name=info.served_model_name,
            endpoint_types="chat,completions" if chats else "completions",
            discovery_backend=args.discovery_backend,
            request_plane=args.request_plane,
            event_plane=args.event_plane,
            use_kv_events=True,
        )

    async def start(self, worker_id: int) -> EngineConfig:
        self._tasks.append(asyncio.create_task(self._watch_server()))
        return EngineConfig(
            model=str(self._model),
            served_model_name=self._info.served_model_name,
            llm=LlmRegistration(
                context_length=self._info.max_context_length, kv_cache_block_size=self._page_tokens or None
            ),
        )

    async def generate(self, request: Mapping[str, Any], context: Any) -> AsyncGenerator[dict[str, Any], None]:
        call = self._stub.Generate(_request(request, context.id()))
        self._open += 1
        try:
            async for message in call:
                if message.HasField("chunk"):
                    yield _make_chunk(message.chunk)
                elif message.complete.finish_reason == "error":
                    raise StreamIncomplete("the server could not finish the sequence")
                else:
                    reason = message.complete.finish_reason.replace("abort", "cancelled")
                    yield {"token_ids": [], "index": message.complete.index, "finish_reason": reason}
        except grpc.aio.AioRpcError as error:
            kind = _ERRORS.get(error.code().name, Unknown)
            raise kind(error.details() or error.code().name) from None
        finally:
            self._open -= 1
            call.cancel()  # does nothing after its end

    async def cleanup(self) -> None:
        for task in self._tasks:
            task.cancel()

    async def on_endpoint_ready(self, endpoint: Any) -> None:
        self._endpoint = endpoint

    async def kv_event_sources(self) -> list[PushSource]:
        return [PushSource(on_ready=self._follow_events)] if self._page_tokens else []

    def component_metrics_dp_ranks(self) -> list[int]:
        return [0]

    def attach_snapshot_publisher(self, publisher: Any) -> None:
        self._loads = publisher

    def _follow_events(self, publisher: Any) -> None:
        """Start publishing on the event loop; Dynamo may call this on its own thread."""
        follow = self._tell_events(publisher)
        self._loop.call_soon_threadsafe(lambda: self._tasks.append(self._loop.create_task(follow)))

    async def _tell_events(self, publisher: Any) -> None:
        """Publish the pages that the caches gain and lose. Dynamo asks whether a worker has a page, so copies in
        several tiers and replicas count as one."""
        tiers: dict[int, set[tuple[int, int]]] = {}
        with suppress(grpc.aio.AioRpcError):  # the server has ended, and `_watch_server` sees it
            async for batch in self._stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest()):
                for event in batch.events:
                    match event.WhichOneof("data"):
                        case "cleared":
                            kept = {name: {at for at in held if at[0] != batch.dp_rank} for name, held in tiers.items()}
                            tiers = {name: held for name, held in kept.items() if held}
                            if len(tiers) < len(kept):
                                publisher.publish_removed([name for name in kept if name not in tiers])
                        case "stored" if not event.stored.group_idx:
                            for block in event.stored.blocks:
                                tiers.setdefault(block.block_hash, set()).add((batch.dp_rank, event.stored.tier))
                            publisher.publish_stored(
                                [token for block in event.stored.blocks for token in block.token_ids],
                                [block.block_size for block in event.stored.blocks],
                                [block.block_hash for block in event.stored.blocks],
                                event.stored.parent_block_hash if event.stored.HasField("parent_block_hash") else None,
                            )
                        case "removed" if not event.removed.group_idx:
                            gone = []
                            for name in event.removed.block_hashes:
                                held = tiers.get(name, set())
                                held.discard((batch.dp_rank, event.removed.tier))
                                if not held and tiers.pop(name, None) is not None:
                                    gone.append(name)
                            if gone:
                                publisher.publish_removed(gone)

    async def _watch_server(self) -> None:
        """Report the server's load to Dynamo until it takes no more requests; then leave when streams have ended."""
        while True:
            try:
                health = await self._stub.HealthCheck(pb2.HealthCheckRequest(), timeout=10 * POLL_S)
                if not health.healthy:
                    break
                loads = (await self._stub.GetLoads(pb2.GetLoadsRequest(), timeout=10 * POLL_S)).loads
            except grpc.aio.AioRpcError as error:
                log.warning("the server is gone: %s", error.details())
                break
            if self._loads is not None and self._page_tokens:
                names = ("num_used_tokens", "max_total_num_tokens", "token_usage", "cache_hit_rate")
                used, total, usage, hits = (sum(getattr(load, name) for load in loads) for name in names)
                pages, count = [n // self._page_tokens for n in (used, total)], max(1, len(loads))
                self._loads.publish(0, ComponentSnapshot(*pages, usage / count, 0, hits / count))
            await asyncio.sleep(POLL_S)
        log.warning("the server takes no more requests; leaving")
        if self._endpoint is not None:
            await self._endpoint.unregister_endpoint_instance()  # no more requests come here
        while self._open:  # the server ends them, at the latest with itself
            await asyncio.sleep(POLL_S / 10)
        os.environ[GRACE] = "0"
        os.kill(os.getpid(), signal.SIGTERM)


def _request(request: Mapping[str, Any], name: str) -> Any:
    """Convert a request. Raises InvalidArgument for options that the server's protocol lacks."""
    sampling, stopping, output = (
        {key: value for key, value in (request.get(part) or {}).items() if value is not None}
        for part in ("sampling_options", "stop_conditions", "output_options")
    )
    given = {key: value for key, value in (sampling | stopping | output).items() if key in _SAMPLING}
    if "prompt_logprobs" in output:
        raise InvalidArgument("prompt_logprobs are not served through Dynamo")
    top_k = sampling.get("top_k", 0)
    message = pb2.GenerateRequest(request_id=name, stream=True)
    message.tokenized.input_ids.extend(request["token_ids"])
    try:
        message.sampling_params.CopyFrom(pb2.SamplingParams(**given, top_k=max(top_k, 0)))
    except (TypeError, ValueError) as error:
        raise InvalidArgument(str(error)) from None
    hidden = stopping.get("stop_token_ids_hidden", [])
    message.sampling_params.stop_token_ids.extend({*stopping.get("stop_token_ids", []), *hidden})
    message.sampling_params.logit_bias.update({int(k): v for k, v in sampling.get("logit_bias", {}).items()})
    _set_constraint(message.sampling_params, sampling.get("guided_decoding") or {})
    return message


def _set_constraint(params: Any, guided: Mapping[str, Any]) -> None:
    kinds = [key for key in ("json", "regex", "choice", "grammar", "structural_tag") if guided.get(key) is not None]
    if len(kinds) > 1 or kinds == ["structural_tag"]:
        raise InvalidArgument(f"one constraint is served, and no structural tag, not {', '.join(kinds)}")
    for kind in kinds:
        value = guided[kind]
        match kind:
            case "json":
                params.json_schema = value if isinstance(value, str) else json.dumps(value)
            case "choice":
                params.choice.choices.extend(map(str, value))
            case _:
                setattr(params, kind, value)


def _make_chunk(chunk: Any) -> dict[str, Any]:
    made: dict[str, Any] = {"token_ids": [*chunk.token_ids], "index": chunk.index}
    scored = chunk.output_logprobs
    if scored.token_logprobs:
        made["log_probs"] = [*scored.token_logprobs]
        made["top_logprobs"] = [
            [
                {"rank": rank, "token_id": token, "token": f"token_id:{token}", "logprob": value}
                for rank, (token, value) in enumerate(zip(top.token_ids, top.values, strict=True), 1)
            ]
            for top in scored.top_logprobs
        ]
    return made


_ERRORS = {
    **dict.fromkeys(("INVALID_ARGUMENT", "NOT_FOUND", "ALREADY_EXISTS"), InvalidArgument),
    **dict.fromkeys(("UNAVAILABLE", "INTERNAL", "CANCELLED"), StreamIncomplete),  # on which Dynamo moves the request
    "RESOURCE_EXHAUSTED": partial(HttpError, 429),
}


async def _model_files(stub: Any, info: Any, cache: Path) -> Path:
    """Write a model folder as Dynamo registers it: the server's tokenizer files, and a configuration where it has none.
    Its name follows from its content, because the frontend takes folders of different names for different models."""
    chunks = [chunk async for chunk in stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    bundle = b"".join(chunk.data for chunk in chunks)
    if not chunks or hashlib.sha256(bundle).hexdigest() != chunks[-1].sha256:
        raise RuntimeError("the server's tokenizer came damaged")
    facts = {
        "model_type": info.model_type,
        "architectures": [*info.architectures],
        "max_position_embeddings": info.max_context_length,
        "vocab_size": info.vocab_size,
        "bos_token_id": info.bos_token_id,
        "eos_token_id": [*info.eos_token_ids],
    }
    files = {"config.json": json.dumps(facts).encode()}
    with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
        files |= {Path(name).name: archive.read(name) for name in archive.namelist()}
    folder = cache / hashlib.sha256(b"".join(name.encode() + files[name] for name in sorted(files))).hexdigest()[:16]
    cache.mkdir(parents=True, exist_ok=True)
    made = Path(tempfile.mkdtemp(dir=cache))
    for name, content in files.items():
        (made / name).write_bytes(content)
    try:
        made.rename(folder)
    except OSError:  # another worker made it first
        shutil.rmtree(made)
    return folder


def _open_stub(args: argparse.Namespace) -> vllm_engine_pb2_grpc.VllmEngineStub:
    """Open a channel to the server; every call carries the operator's key, where there is one."""
    options = [("grpc.max_receive_message_length", -1)]
    if args.tls_ca is None:
        channel = grpc.aio.insecure_channel(args.server, options=options)
    else:
        roots = grpc.ssl_channel_credentials(Path(args.tls_ca).read_bytes())
        channel = grpc.aio.secure_channel(args.server, roots, options=options)
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    if key := os.environ.get("WICORE_SERVER__API_KEY"):
        for name, call in [*vars(stub).items()]:
            setattr(stub, name, partial(call, metadata=[("x-api-key", key)]))
    return stub


def _make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="wicore_trt.integrations.dynamo", description=__doc__.splitlines()[0])
    parser.add_argument("--server", default="127.0.0.1:50051", help="gRPC address of `wicore serve`")
    parser.add_argument("--tls-ca", help="PEM of the CA of the server's certificate; without it there is no TLS")
    parser.add_argument("--namespace", default="dynamo")
    parser.add_argument("--component", default="wicore")
    parser.add_argument("--endpoint", default="generate")
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "wicore" / "dynamo"
    parser.add_argument("--cache", default=str(cache), help="where tokenizers go; the same path beside each server")
    parser.add_argument("--discovery-backend", default="etcd", help="kubernetes, etcd, file or mem")
    parser.add_argument("--request-plane", default="tcp", help="tcp or nats")
    parser.add_argument("--event-plane", default="zmq", help="zmq or nats")
    return parser


if __name__ == "__main__":
    os.environ.setdefault(GRACE, str(GRACE_S))
    run(WicoreEngine)
