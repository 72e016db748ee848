"""The worker protocol of routers: vllm.grpc.engine.VllmEngine of smg-grpc-proto, which SMG speaks to its workers.

Prompts come as token ids, and the router detokenizes. It must not know how routers choose. Invariants: an unserved
field that would change the answer is refused; a snapshot of pages plus all later events is what the caches hold;
unserved calls are UNIMPLEMENTED.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import time
import uuid
import zipfile
from collections.abc import Awaitable, Callable, Iterable, Iterator
from contextlib import aclosing, suppress
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import grpc
from google.protobuf.message_factory import GetMessageClass
from smg_grpc_proto import vllm_engine_pb2 as pb2
from smg_grpc_proto.generated import common_pb2

from wicore_trt import __version__
from wicore_trt.access.calls import check_request_id, get_current_call
from wicore_trt.checks import check_count
from wicore_trt.core.port import UNKNOWN, Position
from wicore_trt.errors import DeadlineError, EngineDeadError, InvalidRequestError, NotFoundError, UnavailableError
from wicore_trt.kv.events import Event, EventSnapshot, Stored
from wicore_trt.kv.pages.page import Page
from wicore_trt.model.spec import GLOBAL, GROUPS, LOCAL
from wicore_trt.serve import convert
from wicore_trt.serve.guard import CallReply
from wicore_trt.text.model_files import FILES
from wicore_trt.types import EngineStats, FinishReason, SamplingParams, TextOutput, TextRequest, TokenLogprob

if TYPE_CHECKING:
    from wicore_trt.core.text_engine import TextEngine
    from wicore_trt.serve.service import InferenceService
    from wicore_trt.text.tokenizer import Tokenizer

DESCRIPTOR = pb2.DESCRIPTOR.services_by_name["VllmEngine"]
WORKER_SERVICE = DESCRIPTOR.full_name
EPOCH_SHIFT, FIRST_NUMBER = 32, 1 << 20
"""A KV batch's number is the second in which its feed was first seen, shifted by the first of these, and the event's in
that feed. The parts of a snapshot have numbers that end where it was taken, so there is room below the first event."""
RETURN_S = 0.1
"""Seconds between two looks for a replica that has ended."""
CHUNK_BYTES = 1 << 16
"""Bytes of a tokenizer in a message; a reader that stops has one on its way."""
TIERS = {"device": "GPU", "host": "CPU", "disk": "STORAGE"}
"""Our tiers by vLLM's names, in the order of the protocol's KvCacheTier, which begins with 1."""
KINDS = {GLOBAL: "full_attention", LOCAL: "sliding_window"}
PageRun = tuple[str, str, list[Page]]
"""Tier, layer group, and pages of which each follows its parent."""
_FINISH = {FinishReason.STOP: "stop", FinishReason.LENGTH: "length", FinishReason.ERROR: "error"}
_SERVED = {"request_id", "tokenized", "text", "sampling_params", "stream", "data_parallel_rank"}
"""Fields of GenerateRequest; a request that sets another one, of a later version too, is refused."""


def make_handlers(service: WorkerService) -> grpc.GenericRpcHandler:
    kinds = {True: grpc.unary_stream_rpc_method_handler, False: grpc.unary_unary_rpc_method_handler}
    methods = {
        method.name: kinds[method.server_streaming](
            getattr(service, method.name),
            request_deserializer=GetMessageClass(method.input_type).FromString,
            response_serializer=GetMessageClass(method.output_type).SerializeToString,
        )
        for method in DESCRIPTOR.methods
        if hasattr(service, method.name)
    }
    return grpc.method_handlers_generic_handler(WORKER_SERVICE, methods)


class WorkerService:
    """Serves the engine of `service`, under its limits. Draining and open counts cover the requests of both."""

    def __init__(self, service: InferenceService) -> None:
        self._service = service
        self._numbers = _BatchNumbers()
        self._bundle: tuple[bytes, str] | None = None
        self._bundling = asyncio.Lock()

    async def Generate(self, request: pb2.GenerateRequest, context: CallReply) -> None:
        call = get_current_call()
        engine = self._service.require_serving()
        made = _text_request(engine, request, call.who.tenant, context.find_time_left())
        answers = _AnswerMaker(made, request.stream, frozenset(engine.info.eos_token_ids))
        reasons = await self._service.relay_outputs(made, call, context, answers)
        if FinishReason.DEADLINE in reasons:
            raise DeadlineError("The call's deadline passed before the request finished.")

    async def Abort(self, request: pb2.AbortRequest, context: CallReply) -> pb2.AbortResponse:
        engine, tenant = self._service.require_engine(), get_current_call().who.tenant
        check_count(request.request_ids, 1024, "request_ids")
        for request_id in request.request_ids:
            engine.abort_request(check_request_id(request_id), tenant)
        return pb2.AbortResponse()

    async def HealthCheck(self, request: pb2.HealthCheckRequest, context: CallReply) -> pb2.HealthCheckResponse:
        engine = self._service.engine
        serving = engine is not None and engine.ready and not self._service.draining
        return pb2.HealthCheckResponse(healthy=serving, message="serving" if serving else "no requests are taken")

    async def GetModelInfo(self, request: pb2.GetModelInfoRequest, context: CallReply) -> pb2.GetModelInfoResponse:
        engine = self._service.require_engine()
        info = engine.info
        return pb2.GetModelInfoResponse(
            model_path=info.model_id, is_generation=True, max_context_length=info.max_context_tokens,
            vocab_size=info.vocab_size, served_model_name=info.model_id,
            tokenizer_path=f"worker:{info.model_id}",  # no path and no hub's name: routers then ask this worker
            model_type="gemma3_text", architectures=["Gemma3ForCausalLM"], eos_token_ids=info.eos_token_ids,
            bos_token_id=info.bos_token_id or 0, max_req_input_len=info.max_context_tokens,
        )  # fmt: skip

    async def GetServerInfo(self, request: pb2.GetServerInfoRequest, context: CallReply) -> pb2.GetServerInfoResponse:
        engine = self._service.require_engine()
        stats, streams = await self._service.collect_stats(get_current_call().who)
        return pb2.GetServerInfoResponse(
            active_requests=streams, uptime_seconds=stats.uptime_s, server_type="vllm-grpc",
            data_parallel_size=len(engine.engine.parts), kv_cache_dtype=engine.info.kv_dtype,
            block_size=engine.info.page_tokens, model_dtype=engine.info.dtype, constrained_decoding_start="first_token",
        )  # fmt: skip

    async def GetLoads(self, request: pb2.GetLoadsRequest, context: CallReply) -> pb2.GetLoadsResponse:
        engine, who = self._service.require_engine(), get_current_call().who
        parts = engine.engine.parts

        async def ask(rank: int) -> pb2.SchedulerLoad | None:
            with suppress(EngineDeadError, UnavailableError):  # an engine that hangs hides and delays no other's load
                part = parts[rank]
                stats = await (part.stats() if who.operator else engine.read_tenant_stats(who.tenant, part))
                return _make_load(stats, engine.info.page_tokens, rank)
            return None

        wanted = [i for i in range(len(parts)) if not request.HasField("dp_rank") or request.dp_rank == i]
        found = await asyncio.gather(*(ask(rank) for rank in wanted if parts[rank].dead is None))
        loads = [load for load in found if load is not None]
        timestamp = datetime.now(UTC).isoformat()
        return pb2.GetLoadsResponse(timestamp=timestamp, version=__version__, dp_rank_count=len(parts), loads=loads)

    async def GetTokenizer(self, request: common_pb2.GetTokenizerRequest, context: CallReply) -> None:
        engine = self._service.require_engine()
        async with self._bundling:
            if self._bundle is None:
                self._bundle = await engine.work(get_current_call().who.tenant, lambda: _make_bundle(engine.tokenizer))
            bundle, digest = self._bundle
        for start in range(0, len(bundle), CHUNK_BYTES):
            last = start + CHUNK_BYTES >= len(bundle)
            data = bundle[start : start + CHUNK_BYTES]
            await context.write_message(common_pb2.GetTokenizerChunk(data=data, sha256=digest if last else ""))

    async def SubscribeKvEvents(self, request: common_pb2.SubscribeKvEventsRequest, context: CallReply) -> None:
        """Send an operator's router all pages, any other its tenant's own. Batches of several replicas name theirs."""
        after, writing = self._numbers.position(request.start_sequence_number), asyncio.Lock()
        parts = self._service.require_engine().engine.parts
        if len(parts) == 1:
            return await self._send_events(0, after, context.write_message)

        async def write_batch(rank: int, batch: common_pb2.KvEventBatch) -> None:
            batch.dp_rank = rank
            async with writing:
                await context.write_message(batch)

        async def follow_replica(rank: int, after: Position) -> None:
            while True:
                with suppress(EngineDeadError, UnavailableError):
                    await self._send_events(rank, after, partial(write_batch, rank))
                after, cleared = UNKNOWN, common_pb2.KvEventBatch(timestamp=time.time())
                cleared.events.add(cleared=common_pb2.KvCacheCleared())
                await write_batch(rank, cleared)
                while parts[rank].dead is not None:
                    await asyncio.sleep(RETURN_S)

        try:
            async with asyncio.TaskGroup() as followers:
                for rank in range(len(parts)):
                    followers.create_task(follow_replica(rank, after))
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None

    async def _send_events(
        self, rank: int, after: Position, write: Callable[[common_pb2.KvEventBatch], Awaitable[None]]
    ) -> None:
        engine, call = self._service.require_engine(), get_current_call()
        async with aclosing(self._service.follow_kv_events(call.who, after, rank)) as feed:
            async for epoch, found in feed:
                if isinstance(found, EventSnapshot):
                    number = self._numbers.number(epoch, found.sequence)
                    batches = await engine.work(call.who.tenant, partial(_cut_batches, found))
                    for batch in _make_snapshot(batches, number):
                        await write(batch)
                else:
                    for event in found:
                        await write(_make_event(event, self._numbers.number(epoch, event.sequence)))


def _make_load(stats: EngineStats, page_tokens: int, rank: int) -> pb2.SchedulerLoad:
    """Make the load. Cached pages count as free: they are taken before anybody waits. Only full attention counts."""
    # throughput is left out: it measures load, not capacity, and routers that divide by it starve a new server
    running, waiting = stats.requests_running, stats.requests_waiting
    whole = next((pool for pool in stats.pools if pool.group == GLOBAL), None)
    return pb2.SchedulerLoad(
        dp_rank=rank,
        num_running_reqs=running,
        num_waiting_reqs=waiting,
        num_total_reqs=running + waiting,
        num_used_tokens=whole.used_pages * page_tokens if whole is not None else 0,
        max_total_num_tokens=whole.total_pages * page_tokens if whole is not None else 0,
        token_usage=max((pool.used_pages / max(pool.total_pages, 1) for pool in stats.pools), default=0.0),
        cache_hit_rate=stats.cached_prompt_tokens / max(stats.prompt_tokens, 1),
    )


def _make_bundle(tokenizer: Tokenizer) -> tuple[bytes, str]:
    """Pack a tokenizer's files into a ZIP, with its digest. Gemma's take up to a second, so pack once."""
    if tokenizer.home is None:
        raise NotFoundError("The tokenizer of this engine has no files.")
    from wicore_trt.engine.directory import open_engine  # numpy

    files = open_engine(tokenizer.home, verify=False).read_present(FILES)
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    bundle = made.getvalue()
    return bundle, hashlib.sha256(bundle).hexdigest()


# --- requests and answers --------------------------------------------------------------------------------------------


def _text_request(
    engine: TextEngine, request: pb2.GenerateRequest, tenant: str, timeout_s: float | None
) -> TextRequest:
    for field, _ in request.ListFields():
        if field.name not in _SERVED:
            raise InvalidRequestError(f"{field.name} is not served here.", field=field.name)
    count, rank = len(engine.engine.parts), request.data_parallel_rank
    if not 0 <= rank < count:
        raise InvalidRequestError(f"There are ranks 0 to {count - 1}.", field="data_parallel_rank")
    kind = request.WhichOneof("input")
    if kind is None:
        raise InvalidRequestError("Give tokenized or text.", field="input")
    prompt: dict[str, Any] = {"prompt": request.text}
    if kind == "tokenized":
        check_count(request.tokenized.input_ids, engine.info.max_context_tokens, "tokenized.input_ids")
        prompt = {"prompt_token_ids": tuple(request.tokenized.input_ids)}
    return TextRequest(
        request_id=check_request_id(request.request_id) if request.request_id else uuid.uuid4().hex,
        params=_read_sampling_params(request.sampling_params),
        timeout_s=timeout_s,
        tenant=tenant,
        replica=rank if request.HasField("data_parallel_rank") else None,
        **prompt,
    )


def _read_sampling_params(message: pb2.SamplingParams) -> SamplingParams:
    """Convert sampling parameters. Raises InvalidRequestError for values out of range or not served."""
    given = convert.read_sampling(message, router=True)
    if message.HasField("truncate_prompt_tokens"):
        raise InvalidRequestError("Prompts are not cut here.", field="truncate_prompt_tokens")
    name = message.WhichOneof("constraint")
    if name == "structural_tag":
        raise InvalidRequestError("Structural tags are not served here.", field="structural_tag")
    if name is not None and (name != "json_object" or message.json_object):
        given["constraint"] = convert.make_constraint(name, message, message.choice.choices)
    return SamplingParams(**given)


class _AnswerMaker:
    """Makes messages for a request's outputs; without streaming, one message for each sequence at its end."""

    def __init__(self, request: TextRequest, stream: bool, eos: frozenset[int]) -> None:
        self._stream, self._eos = stream, eos
        self._prompt_tokens = len(request.prompt_token_ids or ())
        self._kept: dict[int, list[TextOutput]] = {}

    def __call__(self, output: TextOutput, first_s: float | None, total_s: float) -> Iterator[pb2.GenerateResponse]:
        if self._stream:
            if output.token_ids or output.prompt_logprobs:
                chunk = pb2.GenerateStreamChunk(
                    token_ids=output.token_ids,
                    prompt_tokens=self._prompt_tokens,
                    completion_tokens=len(output.token_ids),
                    index=output.index,
                )
                _fill_logprobs(chunk, output.logprobs, output.prompt_logprobs)
                yield pb2.GenerateResponse(chunk=chunk)
            parts = [output]
        else:
            parts = self._kept.setdefault(output.index, [])
            parts.append(output)
        if output.finish_reason is not None:
            yield pb2.GenerateResponse(complete=self._make_complete(output, parts))

    def _make_complete(self, last: TextOutput, parts: list[TextOutput]) -> pb2.GenerateComplete:
        assert last.finish_reason is not None and last.usage is not None
        complete = pb2.GenerateComplete(
            output_ids=[token for part in parts for token in part.token_ids],
            finish_reason=_FINISH.get(last.finish_reason, "abort"),
            prompt_tokens=last.usage.prompt_tokens,
            completion_tokens=last.usage.completion_tokens,
            cached_tokens=last.usage.cached_tokens,
            index=last.index,
        )
        if isinstance(last.stop_reason, str):
            complete.matched_stop_str = last.stop_reason
        elif last.stop_reason is not None and last.stop_reason not in self._eos:
            complete.matched_token_id = last.stop_reason
        logprobs = [entry for part in parts for entry in part.logprobs]
        scored = [] if self._stream else [entry for part in parts for entry in part.prompt_logprobs]
        _fill_logprobs(complete, logprobs, scored)
        return complete


def _fill_logprobs(
    message: pb2.GenerateStreamChunk | pb2.GenerateComplete,
    logprobs: Iterable[TokenLogprob],
    prompt_logprobs: Iterable[TokenLogprob],
) -> None:
    for entry in logprobs:
        message.output_logprobs.token_logprobs.append(entry.logprob)
        _fill_top(message.output_logprobs, entry)
    for entry in prompt_logprobs:
        given = message.input_logprobs.token_logprobs.add()
        if entry.top or entry.logprob:  # left unset for the first token
            given.value = entry.logprob
        _fill_top(message.input_logprobs, entry)


def _fill_top(message: Any, entry: TokenLogprob) -> None:
    message.token_ids.append(entry.token_id)
    top = message.top_logprobs.add()
    for token_id, logprob in entry.top:
        top.token_ids.append(token_id)
        top.values.append(logprob)


# --- KV events -------------------------------------------------------------------------------------------------------


class _BatchNumbers:
    """Numbers of KV batches, higher for later feeds, which begin anew with an engine. Numbers identify the feed:
    after a restart a returning router does not pass for one that has the new feed's pages."""

    def __init__(self) -> None:
        self._bases: dict[int, int] = {}  # by epoch

    def number(self, epoch: int, sequence: int) -> int:
        """Compute the number of the batch with event `sequence`. The parts of a snapshot take numbers below it."""
        if epoch not in self._bases:
            newest = max(self._bases.values(), default=0)
            self._bases[epoch] = max(int(time.time()) << EPOCH_SHIFT, newest + (1 << EPOCH_SHIFT))
        return self._bases[epoch] + FIRST_NUMBER + sequence

    def position(self, number: int) -> Position:
        """Find the position of a subscriber that has all batches up to this number."""
        for epoch, base in self._bases.items():
            if base + FIRST_NUMBER <= number < base + (1 << EPOCH_SHIFT):
                return epoch, number - base - FIRST_NUMBER
        return UNKNOWN


def _cut_batches(found: EventSnapshot) -> list[list[PageRun]]:
    """Cut a snapshot into batches of runs of pages. Parents come before their children, also those in other tiers."""
    runs = [(run[0].index, name, run) for name, pages in found.pages.items() for run in _find_runs(pages)]
    runs.sort(key=lambda entry: entry[0])
    batches: list[list[PageRun]] = [[]]
    room = convert.MAX_PAGES_PER_MESSAGE
    for _, (tier, group), run in runs:
        for start in range(0, len(run), convert.MAX_PAGES_PER_MESSAGE):
            part = run[start : start + convert.MAX_PAGES_PER_MESSAGE]
            if len(part) > room:
                batches.append([])
                room = convert.MAX_PAGES_PER_MESSAGE
            room -= len(part)
            batches[-1].append((tier, group, part))
    return batches


def _make_snapshot(batches: list[list[PageRun]], number: int) -> Iterator[common_pb2.KvEventBatch]:
    """Yield batches numbered up to `number`, made on demand: all of a large cache at once would block others."""
    blocks = sum(len(part) for batch in batches for _, _, part in batch)
    for i, parts in enumerate(batches):
        made = common_pb2.KvEventBatch(sequence_number=number - len(batches) + 1 + i, timestamp=time.time())
        made.snapshot.index, made.snapshot.count, made.snapshot.blocks = i, len(batches), blocks
        if i == 0:
            made.events.add(cleared=common_pb2.KvCacheCleared())
        for tier, group, part in parts:
            made.events.add(stored=_make_stored(tier, group, part))
        yield made


def _make_event(event: Event, number: int) -> common_pb2.KvEventBatch:
    batch = common_pb2.KvEventBatch(sequence_number=number, timestamp=time.time())
    if isinstance(event, Stored):
        for run in _find_runs(event.pages):
            batch.events.add(event_id=number, stored=_make_stored(event.tier, event.group, run))
    else:
        removed = common_pb2.KvBlocksRemoved(
            block_hashes=map(_hash_key, event.keys[: event.named]), **_describe_place(event.tier, event.group)
        )
        batch.events.add(event_id=number, removed=removed)
    return batch


def _find_runs(pages: Iterable[Page]) -> Iterator[list[Page]]:
    """Split pages of one layer group into runs in which each page follows its parent. Pages whose token ids do not
    identify their content are left out, because routers match prompts by token ids."""
    held = {page.key: page for page in pages if page.tokens}
    children: dict[bytes, list[Page]] = {}
    waiting: list[Page] = []
    for page in held.values():
        if page.parent in held:
            children.setdefault(page.parent, []).append(page)
        else:
            waiting.append(page)
    waiting.reverse()
    while waiting:
        run = [waiting.pop()]
        while below := children.get(run[-1].key):
            run.append(below[0])
            waiting += below[1:]
        yield run


def _make_stored(tier: str, group: str, run: list[Page]) -> common_pb2.KvBlocksStored:
    parent = run[0].parent
    stored = common_pb2.KvBlocksStored(
        parent_block_hash=None if parent is None else _hash_key(parent),
        kv_cache_spec_kind=KINDS[group],
        **_describe_place(tier, group),
    )
    level = stored.tier - 1
    for page in run:
        tokens = page.token_ids
        stored.blocks.add(block_hash=_hash_key(page.key), token_ids=tokens, block_size=len(tokens), cache_level=level)
    return stored


def _describe_place(tier: str, group: str) -> dict[str, Any]:
    return {"tier": 1 + [*TIERS].index(tier), "medium": TIERS[tier], "group_idx": GROUPS.index(group)}


def _hash_key(key: bytes) -> int:
    return int.from_bytes(key[:8], "little", signed=True)
