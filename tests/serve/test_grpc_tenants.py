"""Keys with tenants over gRPC: what one client may learn of another, and that a flood leaves room for the polite."""

from __future__ import annotations

import asyncio

import grpc
import pytest
from fakes import Gate
from serving import executor_of, expected, failure, make_engine, request, rest_of, serving, stats_now, until

from wicore_trt.access.keys import Identity, KeyRing
from wicore_trt.config import KVSettings
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import kv_pb2

KEYS = {name: f"{name}-secret-0123456789" for name in ("alice", "bob", "ops")}
TENANT_OF = {name: (("x-api-key", key),) for name, key in KEYS.items()}
ALICE, BOB, OPS = (TENANT_OF[name] for name in KEYS)
STATS = pb2.GetStatsRequest()


@pytest.fixture
def keys_file(tmp_path) -> str:
    path = tmp_path / "keys"
    path.write_text("".join(f"{name}:{key}{':operator' * (name == 'ops')}\n" for name, key in KEYS.items()))
    path.chmod(0o600)
    return str(path)


async def finish_of(call):
    return [message async for message in call][-1].finish


async def test_ids_counts_and_cached_work_of_one_tenant_are_hidden_from_another(keys_file):
    secret = "the very same prompt of two tenants, long enough for several pages"
    async with serving(make_engine(step_s=0.005), keys_file=keys_file) as running:
        stub = running.stub
        first = await finish_of(stub.Generate(request(secret, 5), metadata=ALICE))
        again = await finish_of(stub.Generate(request(secret, 5), metadata=ALICE))
        assert first.usage.cached_tokens == 0 < again.usage.cached_tokens
        for salt in ("", "alice"):  # a salt separates within a tenant and names no other
            other = await finish_of(stub.Generate(request(secret, 5, cache_salt=salt), metadata=BOB))
            assert other.usage.cached_tokens == 0
        before = await stub.GetStats(STATS, metadata=BOB)
        assert before.prompt_tokens == 2 * len(secret) and before.generated_tokens == 10 and before.steps == 0
        assert not before.pools and not before.kv.tiers and before.kv.event_sequence == 0

        running_call = stub.Generate(request("tell me", 900, request_id="turn-7"), metadata=ALICE)
        await running_call.read()
        during = await stub.GetStats(STATS, metadata=BOB)
        during.ClearField("uptime")
        before.ClearField("uptime")
        assert during == before, "what alice does shows in bob's counts"
        assert (await stub.GetStats(STATS, metadata=ALICE)).streams_open == 1
        whole = await stub.GetStats(STATS, metadata=OPS)
        assert whole.streams_open == 1 and whole.steps > 0 and whole.pools
        assert await finish_of(stub.Generate(request("mine", 3, request_id="turn-7"), metadata=BOB))
        assert not (await stub.Abort(pb2.AbortRequest(request_id="turn-7"), metadata=BOB)).aborted
        assert (await stub.Abort(pb2.AbortRequest(request_id="turn-7"), metadata=ALICE)).aborted
        assert (await rest_of(running_call))[-1].finish.reason == pb2.FINISH_REASON_CANCELLED


async def pages_seen(running, metadata) -> dict[bytes, bytes]:
    """Tags by key that a subscriber's first snapshot shows."""
    call = running.stub.SubscribeKVEvents(kv_pb2.SubscribeKVEventsRequest(), metadata=metadata)
    seen: dict[bytes, bytes] = {}
    while True:
        message = await call.read()
        for pages in message.snapshot.pages:
            seen |= {page.key: page.tenant for page in pages.pages}
        if message.snapshot.last:
            call.cancel()
            return seen


def on_device_and_host(feed) -> bool:
    """Whether the host tier holds all pages that the device holds, and there are some."""
    pages = feed.take_snapshot().pages
    held = {
        tier: {page.key for name, found in pages.items() if name[0] == tier for page in found}
        for tier in ("device", "host")
    }
    return held["device"] == held["host"] != set()


async def test_kv_events_of_a_tenant_show_its_own_pages_and_an_operators_show_all(keys_file):
    engine = make_engine(kv=KVSettings(host_bytes=1 << 20))
    async with serving(engine, keys_file=keys_file) as running:
        for metadata in (ALICE, BOB):
            await finish_of(running.stub.Generate(request("the same prompt for both", 5), metadata=metadata))
        # Pages reach the host tier after the answer: alice's own last copies would count as events that bob caused.
        await until(lambda: all(on_device_and_host(engine.engine.core.find_feed(who)) for who in ("alice", "bob")))
        alice, bob, everything = [await pages_seen(running, who) for who in (ALICE, BOB, OPS)]
        assert alice and bob and not set(alice) & set(bob), "equal prompts have other names"
        assert len(set(alice.values())) == len(set(bob.values())) == 1 and alice | bob == everything
        number = engine.engine.core.find_feed("alice").sequence
        for i in range(3):
            await finish_of(running.stub.Generate(request(f"another one of bob {i}", 5), metadata=BOB))
        assert engine.engine.core.find_feed("alice").sequence == number


async def test_subscribers_are_limited(keys_file):
    async with serving(keys_file=keys_file) as running:
        calls = [running.stub.SubscribeKVEvents(kv_pb2.SubscribeKVEventsRequest(), metadata=ALICE) for _ in range(16)]
        for call in calls:
            await call.read()
        more = running.stub.SubscribeKVEvents(kv_pb2.SubscribeKVEventsRequest(), metadata=ALICE)
        code, message, details = await failure(more)
        assert code is grpc.StatusCode.RESOURCE_EXHAUSTED and "RetryInfo" in details and "no room" in message
        assert await pages_seen(running, BOB) == {}
        for call in calls:
            call.cancel()


async def test_events_end_when_the_key_is_taken_back_or_another_s(keys_file):
    async with serving(make_engine(), keys_file=keys_file) as running:
        stub, keys = running.stub, running.server.service.admission.keys
        subscriptions = {}
        for name in KEYS:
            subscriptions[name] = stub.SubscribeKVEvents(kv_pb2.SubscribeKVEventsRequest(), metadata=TENANT_OF[name])
            await subscriptions[name].read()
        now = {KEYS["alice"]: Identity("alice", requests_per_minute=99), KEYS["ops"]: Identity("ops")}
        keys.replace_keys(KeyRing(now | {"another key of bob": Identity("bob")}))
        for key in (KEYS["alice"], "another key of bob"):
            await finish_of(stub.Generate(request("several pages of a prompt", 9), metadata=(("x-api-key", key),)))
        assert (await subscriptions["alice"].read()).HasField("events")
        assert await subscriptions["ops"].code() is grpc.StatusCode.UNAUTHENTICATED, "no operator any more"
        assert await subscriptions["bob"].code() is grpc.StatusCode.UNAUTHENTICATED


async def test_a_flood_of_one_tenant_leaves_a_polite_one_its_turn(keys_file):
    engine = make_engine(max_sequences=4, max_waiting=200)
    async with serving(engine, keys_file=keys_file) as running, asyncio.timeout(200):
        stub, stop = running.stub, False

        async def flood(i: int) -> None:
            while not stop:
                try:
                    await finish_of(stub.Generate(request(f"f{i}", 40, n=2, priority=-2), metadata=ALICE))
                except grpc.aio.AioRpcError as error:
                    assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
                    await asyncio.sleep(0.01)

        with Gate(executor_of(engine)) as gate:
            floods = [asyncio.create_task(flood(i)) for i in range(100)]
            await until(lambda: stats_now(engine, "alice").requests_waiting > 80)
            for i in range(3):
                call = stub.Generate(request(f"polite {i}", 10), metadata=BOB)
                await until(lambda: stats_now(engine, "bob").requests_waiting == 1)
                gate.let(200)  # all that wait would take a thousand steps
                text = "".join([r.delta.text or r.finish.delta.text async for r in call])
                assert text == expected(f"polite {i}", 10)[0]
                await until(lambda: gate.left == 0)
            stop = True
        await asyncio.gather(*floods)
