"""The worker protocol of routers, by its own stubs over real sockets."""

from __future__ import annotations

import asyncio
import hashlib
import io
import random
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import grpc
import pytest
from serving import TOKENIZER, Running, expected, failure, make_engine, request, rest_of, serving, until
from smg_grpc_proto import vllm_engine_pb2 as pb2
from smg_grpc_proto import vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from test_grpc_kv import Publisher, with_events

from wicore_trt.errors import UnavailableError
from wicore_trt.kv.events import EventSnapshot, KVEventLog
from wicore_trt.kv.pages.page import Page
from wicore_trt.serve.worker import _AnswerMaker, _cut_batches, _make_snapshot
from wicore_trt.types import FinishReason, SamplingParams, TextOutput, TextRequest, TokenLogprob, Usage

OPERATOR, ALICE = "o" * 16, "a" * 16


def stub_of(running: Running) -> vllm_engine_pb2_grpc.VllmEngineStub:
    return vllm_engine_pb2_grpc.VllmEngineStub(running.channel)


def ask(prompt: str = "hello", max_tokens: int = 10, *, stream: bool = True, **sampling) -> pb2.GenerateRequest:
    params = pb2.SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **sampling})
    tokens = pb2.TokenizedInput(input_ids=TOKENIZER.encode(prompt), original_text=prompt)
    return pb2.GenerateRequest(request_id="r", tokenized=tokens, sampling_params=params, stream=stream)


@pytest.mark.parametrize("stream", [True, False])
async def test_tokens_and_counts(stream):
    async with serving() as running:
        messages = [m async for m in stub_of(running).Generate(ask("hello", 10, stream=stream, n=2))]
        tokens, ends = {0: [], 1: []}, {}
        for message in messages:
            if message.HasField("chunk"):
                assert message.chunk.prompt_tokens == 5
                tokens[message.chunk.index] += message.chunk.token_ids
            else:
                ends[message.complete.index] = message.complete
                if not stream:
                    tokens[message.complete.index] += message.complete.output_ids
        assert tokens == {0: expected("hello", 10)[1], 1: expected("hello", 10)[1]}
        for end in ends.values():
            assert (end.finish_reason, end.prompt_tokens, end.completion_tokens) == ("length", 5, 10)
        assert len(ends) == 2 and stream == any(m.HasField("chunk") for m in messages)
        [again] = [m async for m in stub_of(running).Generate(ask("hello" * 8, 2, stream=False))]
        [again] = [m async for m in stub_of(running).Generate(ask("hello" * 8, 2, stream=False))]
        assert again.complete.cached_tokens >= 36


async def test_what_ended_a_sequence():
    text, tokens = expected("hello", 10)
    async with serving() as running:
        stub = stub_of(running)
        [end] = [m.complete async for m in stub.Generate(ask(stream=False, stop=[text[4:6]]))]
        assert (end.finish_reason, end.matched_stop_str) == ("stop", text[4:6])
        assert [*end.output_ids] == tokens[:6]
        [end] = [m.complete async for m in stub.Generate(ask(stream=False, stop_token_ids=[tokens[3]]))]
        assert (end.finish_reason, end.matched_token_id) == ("stop", tokens[3])


@pytest.mark.parametrize("stream", [True, False])
def test_probabilities(stream):
    request = TextRequest("r", SamplingParams(logprobs=2, prompt_logprobs=1), prompt_token_ids=(5, 6))
    make = _AnswerMaker(request, stream, frozenset({1}))
    prompt = TextOutput("r", 0, "", (), prompt_logprobs=(TokenLogprob(5, 0.0, ()), TokenLogprob(6, -1.0, ((9, -0.5),))))
    parts = [
        TextOutput("r", 0, "a", (7,), (TokenLogprob(7, -0.25, ((7, -0.25), (8, -2.0))),)),
        TextOutput("r", 0, "", (1,), (TokenLogprob(1, -0.5, ((1, -0.5),)),), FinishReason.STOP, 1, Usage(2, 2, 0)),
    ]
    messages = [message for part in (prompt, *parts) for message in make(part, None, 0.0)]
    end = messages[-1].complete
    told = [message.chunk for message in messages[:-1]] if stream else [end]
    scored = [value for part in told for value in part.input_logprobs.token_logprobs]
    assert [(value.HasField("value"), value.value) for value in scored] == [(False, 0.0), (True, -1.0)]
    assert [value for part in told for value in part.output_logprobs.token_logprobs] == [-0.25, -0.5]
    tops = [[*top.token_ids] for part in told for top in part.output_logprobs.top_logprobs]
    assert tops == [[7, 8], [1]] and not end.HasField("matched_token_id"), "the model's own end is no match"


async def test_what_is_not_served_is_refused_by_name():
    async with serving() as running:
        stub = stub_of(running)
        cases = [
            (ask(temperature=-1.0), "temperature"),
            (ask(structural_tag="x"), "structural_tag"),
            (ask(truncate_prompt_tokens=4), "truncate_prompt_tokens"),
            (pb2.GenerateRequest(), "input"),
        ]
        for name, value in (("data_parallel_rank", 1), ("kv_transfer_params_json", "{}"),
                            ("media_refs", pb2.MediaRefs()), ("mm_inputs", pb2.MultimodalInputs()),
                            ("extra_mm_inputs", [pb2.MultimodalInputs()])):  # fmt: skip
            wrong = ask()
            wrong.MergeFrom(pb2.GenerateRequest(**{name: value}))
            cases.append((wrong, name))
        for message, field in cases:
            code, _, details = await failure(stub.Generate(message))
            assert code is grpc.StatusCode.INVALID_ARGUMENT, field
            assert details["BadRequest"].field_violations[0].field == field
        for call in (stub.Embed(pb2.EmbedRequest()), stub.FlushCache(common_pb2.FlushCacheRequest())):
            assert (await failure(call))[0] is grpc.StatusCode.UNIMPLEMENTED
        assert (await failure(stub.GetTokenizer(common_pb2.GetTokenizerRequest())))[0] is grpc.StatusCode.NOT_FOUND


async def test_an_answer_may_be_larger_than_the_largest_request(monkeypatch):
    """One message has all of a long answer to a call that does not stream, with its log-probabilities."""
    monkeypatch.setattr("wicore_trt.serve.server.find_message_limit", lambda *limits: 200)
    async with serving() as running:
        [end] = [m async for m in stub_of(running).Generate(ask("hello", 300, stream=False))]
        assert end.ByteSize() > 200 and list(end.complete.output_ids) == expected("hello", 300)[1]


def test_batches_of_a_large_snapshot_are_made_one_by_one(monkeypatch):
    made = []
    monkeypatch.setattr(
        "wicore_trt.serve.worker._make_stored", lambda *run: made.append(run) or common_pb2.KvBlocksStored()
    )
    pages = tuple(Page(i.to_bytes(32, "big"), "global", 0, None, b"t", bytes(4)) for i in range(5000))
    batches = _cut_batches(EventSnapshot(9, 1, {("device", "global"): pages}))
    told = _make_snapshot(batches, 100)
    first = next(told)
    assert first.events[0].HasField("cleared") and len(made) == 1024
    rest = list(told)
    assert [batch.sequence_number for batch in (first, *rest)] == [96, 97, 98, 99, 100] and len(made) == 5000
    assert {(batch.snapshot.count, batch.snapshot.blocks) for batch in rest} == {(5, 5000)}


async def test_a_tokenizer_is_packed_once_whoever_asks_and_leaves(monkeypatch):
    packed, go = [], threading.Event()

    def pack(made: bytes) -> bytes:
        packed.append(made)
        assert go.wait(60)
        return made

    directory = SimpleNamespace(
        read_present=lambda names: {"tokenizer.json": pack(random.Random(1).randbytes(3 << 20))}
    )
    monkeypatch.setattr("wicore_trt.engine.directory.open_engine", lambda home, verify: directory)
    monkeypatch.setattr(TOKENIZER, "home", Path("somewhere"), raising=False)
    async with serving() as running:
        stub = stub_of(running)
        calls = [stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
        await until(lambda: packed)
        calls += [stub.GetTokenizer(common_pb2.GetTokenizerRequest()) for _ in range(4)]
        calls[-1].cancel()
        go.set()
        for chunks in await asyncio.gather(*(rest_of(call) for call in calls[:-1])):
            whole = b"".join(chunk.data for chunk in chunks)
            assert hashlib.sha256(whole).hexdigest() == chunks[-1].sha256
            with zipfile.ZipFile(io.BytesIO(whole)) as archive:
                assert archive.read("tokenizer.json") == packed[0]
            assert max(len(chunk.data) for chunk in chunks) <= 1 << 16  # what one holds who reads nothing
        await rest_of(stub.GetTokenizer(common_pb2.GetTokenizerRequest()))
    assert len(packed) == 1


async def test_loads_of_replicas_are_asked_at_once_and_a_silent_one_is_left_out(monkeypatch):
    engine, asked = make_engine(), asyncio.Barrier(3)

    async def stats(tenant: str | None = None):
        await asked.wait()  # for the other two
        return await engine.engine.stats(tenant)

    async def silence(tenant: str | None = None):
        await asked.wait()
        raise UnavailableError("The engine does not tell its statistics.", fix="Try again soon.")

    parts = [SimpleNamespace(dead=None, stats=tell) for tell in (stats, silence, stats)]
    parts.insert(2, SimpleNamespace(dead="killed"))
    async with serving(engine) as running:
        monkeypatch.setattr(type(engine.engine), "parts", parts)
        loads = (await stub_of(running).GetLoads(pb2.GetLoadsRequest())).loads
        assert [load.dp_rank for load in loads] == [0, 3]
        monkeypatch.undo()


async def test_overload_abort_load_and_drain():
    engine = make_engine(step_s=0.01, max_waiting=1, max_sequences=1)
    async with serving(engine) as running:
        stub = stub_of(running)
        first, second = ask(max_tokens=900), ask(max_tokens=900)
        second.request_id = "second"
        runs = stub.Generate(first)
        assert (await runs.read()).HasField("chunk")
        waits = stub.Generate(second)

        async def load() -> pb2.SchedulerLoad:
            return (await stub.GetLoads(pb2.GetLoadsRequest())).loads[0]

        async def both() -> bool:
            now = await load()
            return (now.num_running_reqs, now.num_waiting_reqs) == (1, 1) and now.num_used_tokens > 0

        await until(both)
        third = ask()
        third.request_id = "third"
        code, _, details = await failure(stub.Generate(third))
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and details["RetryInfo"].retry_delay.ToMilliseconds() > 0
        await stub.Abort(pb2.AbortRequest(request_ids=["r"]))
        *_, end = await rest_of(runs)
        assert end.complete.finish_reason == "abort"
        assert (await waits.read()).HasField("chunk")
        waits.cancel()  # as a router does whose client has gone

        async def idle() -> bool:
            return (await load()).num_total_reqs == 0

        await until(idle)
        now = await load()
        assert now.token_usage == 0, "what is only cached is free"
        assert now.gen_throughput == 0, "a rate of the past would have routers send least to who just started"
        assert (await stub.HealthCheck(pb2.HealthCheckRequest())).healthy
        await running.server.set_draining()
        assert not (await stub.HealthCheck(pb2.HealthCheckRequest())).healthy
        assert (await failure(stub.Generate(ask())))[0] is grpc.StatusCode.UNAVAILABLE


async def test_health_before_the_engine_has_come():
    async with serving(attach=False) as running:
        assert not (await stub_of(running).HealthCheck(pb2.HealthCheckRequest())).healthy


# --- KV events -------------------------------------------------------------------------------------------------------


class Router:
    """What a router makes of batches: the copies of each block, and where it is in a chain. It is strict."""

    def __init__(self) -> None:
        self.held: dict[tuple[int, int, int], tuple] = {}
        self.number, self.snapshots, self.parts = 0, 0, 0

    def take(self, batch: common_pb2.KvEventBatch) -> None:
        if batch.HasField("snapshot"):
            assert batch.snapshot.index == self.parts
            if self.parts == 0:
                assert batch.events[0].HasField("cleared")
                self.snapshots += 1
            self.parts = (self.parts + 1) % batch.snapshot.count
        else:
            assert not self.parts
        if self.number and batch.snapshot.index + batch.HasField("snapshot") != 1:
            assert batch.sequence_number == self.number + 1, "a gap"
        self.number = batch.sequence_number
        for event in batch.events:
            self.apply(event)
        if batch.HasField("snapshot") and not self.parts:
            assert len(self.held) == batch.snapshot.blocks

    def pages(self) -> dict[tuple[int, int, int], tuple]:
        return {entry: (parent, tokens) for entry, (parent, _, tokens) in self.held.items()}

    def apply(self, event: common_pb2.KvCacheEvent) -> None:
        match event.WhichOneof("data"):
            case "cleared":
                self.held.clear()
            case "stored":
                stored = event.stored
                parent = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
                known = {name for _, group, name in self.held if group == stored.group_idx}
                for block in stored.blocks:
                    assert block.block_size == len(block.token_ids) and block.cache_level == stored.tier - 1
                    entry = (stored.tier, stored.group_idx, block.block_hash)
                    assert entry not in self.held
                    self.held[entry] = (parent, parent in known, tuple(block.token_ids))
                    parent = block.block_hash
                    known.add(parent)
            case "removed":
                for name in event.removed.block_hashes:
                    del self.held[event.removed.tier, event.removed.group_idx, name]


def truth(publisher: Publisher) -> dict[tuple[int, int, int], tuple]:
    def name(key: bytes) -> int:
        return int.from_bytes(key[:8], "little", signed=True)

    tiers, groups = {"device": 1, "host": 2, "disk": 3}, {"global": 0, "local": 1}
    return {
        (tiers[tier], groups[page.group], name(page.key)): (page.parent and name(page.parent), tuple(page.token_ids))
        for tier, page in publisher.held
    }


async def test_routers_have_the_true_pages_however_late_they_come(monkeypatch):
    """In a snapshot parents come before their children."""
    monkeypatch.setattr("test_grpc_kv.page", chained)
    log = KVEventLog(1500)
    publisher = Publisher(log, keys=1500)
    async with serving(with_events(log)) as running:
        stub = stub_of(running)
        routers = [Router(), Router()]

        async def follow(router: Router) -> None:
            call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=router.number))
            while not publisher.ended or router.parts or router.pages() != truth(publisher):
                router.take(await asyncio.wait_for(call.read(), 60))
            call.cancel()

        publisher.start()
        early = asyncio.ensure_future(follow(routers[0]))
        await until(lambda: log.sequence > 300)
        late = asyncio.ensure_future(follow(routers[1]))
        end = log.sequence + 500
        await until(lambda: log.sequence > end)
        await publisher.end()
        await asyncio.wait_for(asyncio.gather(early, late), 60)
        fresh = Router()
        await follow(fresh)
        kept = {name for _, group, name in fresh.held if not group}
        for (_, group, _), (parent, known, _) in fresh.held.items():
            assert group or known == (parent in kept)


def chained(number: int, group: str = "global") -> Page:
    """Pages of 50 chains."""
    parent = (number - 50).to_bytes(8, "little") + bytes(24) if number >= 50 else None
    tokens = (number % 97).to_bytes(4, "little")
    return Page(number.to_bytes(8, "little") + bytes(24), group, number // 50, parent, b"t" * 16, tokens)


async def test_who_comes_back_goes_on_and_after_a_restart_begins_anew():
    log = KVEventLog(100)
    publisher = Publisher(log, keys=20, changes=1)
    for _ in range(30):
        publisher.change()
        log.publish_step()
    engine = with_events(log)
    async with serving(engine) as running:
        stub = stub_of(running)

        async def first(number: int) -> common_pb2.KvEventBatch:
            call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(start_sequence_number=number))
            batch = await asyncio.wait_for(call.read(), 60)
            call.cancel()
            return batch

        snapshot = await first(0)
        assert snapshot.HasField("snapshot")
        publisher.change()
        log.publish_step()
        after = await first(snapshot.sequence_number)
        assert after.sequence_number == snapshot.sequence_number + 1 and not after.HasField("snapshot")
        assert (await first(after.sequence_number + 7)).HasField("snapshot"), "a number that was never given"
        other = KVEventLog(100)
        engine.engine.core.find_feed = lambda tenant: other
        anew = await first(after.sequence_number)
        assert anew.HasField("snapshot") and anew.sequence_number > after.sequence_number


async def test_a_router_with_a_tenants_key_hears_of_that_tenant_alone(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text(f"alice:{ALICE}\nops:{OPERATOR}:operator\n")
    keys.chmod(0o600)
    async with serving(keys_file=str(keys)) as running:
        stub = stub_of(running)
        assert (await failure(stub.GetModelInfo(pb2.GetModelInfoRequest())))[0] is grpc.StatusCode.UNAUTHENTICATED
        for key, prompt in ((ALICE, "what alice asks"), (OPERATOR, "what ops asks")):
            metadata = [("x-api-key", key)]
            assert [m async for m in running.stub.Generate(request(prompt, 20), metadata=metadata)]
        told = {}
        for key in (ALICE, OPERATOR):
            call = stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), metadata=[("x-api-key", key)])
            batch = await asyncio.wait_for(call.read(), 60)
            told[key] = "".join(
                TOKENIZER.decode(block.token_ids) for event in batch.events for block in event.stored.blocks
            )
            call.cancel()
        assert "alice" in told[ALICE] and "ops" not in told[ALICE]
        assert "alice" in told[OPERATOR] and "ops" in told[OPERATOR]
