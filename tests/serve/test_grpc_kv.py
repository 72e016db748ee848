"""Cache hints, statistics of the KV tiers and KV events, over real sockets."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import threading
import time
from array import array
from unittest.mock import AsyncMock

import grpc
import pytest
from google.protobuf.duration_pb2 import Duration
from serving import expected, failure, make_engine, request, serving, until

from wicore_trt.core.text_engine import TextEngine
from wicore_trt.kv.events import EventSnapshot, KVEventLog, Removed, Stored
from wicore_trt.kv.pages.page import Page
from wicore_trt.serve import convert
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import kv_pb2
from wicore_trt.types import CacheHints, CachePriority, CacheStore, KVStats, TierStats

DAY_S = 86_400


def page(number: int, group: str = "global") -> Page:
    parent = (number - 1).to_bytes(32, "big") if number else None
    return Page(number.to_bytes(32, "big"), group, number, parent, b"t" * 16, array("I", [number, 7]).tobytes())


# --- hints -----------------------------------------------------------------------------------------------------------


def record_requests(engine: TextEngine) -> list:
    """Requests as the engine core gets them."""
    core, seen = engine.engine._loop._core, []
    add = core.add
    core.add = lambda made: (seen.append(made), add(made))[1]
    return seen


async def test_hints_arrive_at_the_engine_and_unset_ones_are_the_defaults_of_the_plain_type():
    engine = make_engine()
    seen = record_requests(engine)
    low, high = kv_pb2.CACHE_PRIORITY_LOW, kv_pb2.CACHE_PRIORITY_HIGH
    cases = [
        (None, CacheHints()),
        (kv_pb2.CacheHints(), CacheHints()),
        (kv_pb2.CacheHints(priority=kv_pb2.CACHE_PRIORITY_NORMAL), CacheHints()),
        (kv_pb2.CacheHints(priority=low), CacheHints(priority=CachePriority.LOW)),
        (kv_pb2.CacheHints(session="ü" * 256, priority=high, ttl=Duration(seconds=2, nanos=500_000_000)),
         CacheHints("ü" * 256, CachePriority.HIGH, 2.5)),
        (kv_pb2.CacheHints(store=kv_pb2.CACHE_STORE_ALL), CacheHints()),
        (kv_pb2.CacheHints(store=kv_pb2.CACHE_STORE_NEVER), CacheHints(store=CacheStore.NEVER)),
        (kv_pb2.CacheHints(session="a", ttl=Duration(seconds=30 * DAY_S)), CacheHints("a", ttl_s=30.0 * DAY_S)),
    ]  # fmt: skip
    async with serving(engine) as running:
        for cache, _ in cases:
            finish = [r async for r in running.stub.Generate(request("hi", 3, cache=cache))][-1].finish
            assert list(finish.delta.token_ids) == expected("hi", 3)[1][-len(finish.delta.token_ids) :]
    assert [made.cache for made in seen] == [hints for _, hints in cases]


@pytest.mark.parametrize(
    ("field", "cache"),
    [
        ("cache.session", kv_pb2.CacheHints(session="s" * 257)),
        ("cache.priority", kv_pb2.CacheHints(priority=4)),
        ("cache.priority", kv_pb2.CacheHints(priority=-1)),
        ("cache.store", kv_pb2.CacheHints(store=4)),
        ("cache.store", kv_pb2.CacheHints(store=kv_pb2.CACHE_STORE_DEVICE, session="s")),
        ("cache.ttl", kv_pb2.CacheHints(ttl=Duration())),
        ("cache.ttl", kv_pb2.CacheHints(ttl=Duration(seconds=-5))),
        ("cache.ttl", kv_pb2.CacheHints(ttl=Duration(nanos=2 * 10**9))),
        ("cache.ttl", kv_pb2.CacheHints(ttl=Duration(seconds=30 * DAY_S, nanos=1))),
    ],
)
async def test_a_bad_hint_is_named_by_its_path(field, cache):
    async with serving() as running:
        code, message, details = await failure(running.stub.Generate(request(cache=cache)))
        assert code is grpc.StatusCode.INVALID_ARGUMENT and message
        assert [v.field for v in details["BadRequest"].field_violations] == [field]


# --- statistics ------------------------------------------------------------------------------------------------------


def random_tier(rng: random.Random, tier: str) -> TierStats:
    counts = {name: rng.randrange(2**40) for name in ("capacity", "quota", "corrupt")}
    values: dict[str, object] = {f.name: rng.randrange(1, 2**50) for f in dataclasses.fields(TierStats)}
    values |= {"tier": tier, "pages": {"global": rng.randrange(9), "local": 7}, "queue_depth": rng.randrange(99)}
    values |= {"evictions": counts, "failures": dict(list(counts.items())[1:])}
    return TierStats(**{**values, "read_seconds": rng.random() * 1e6, "write_seconds": rng.random()})


async def test_every_figure_of_the_tiers_is_on_the_wire():
    rng = random.Random()
    tiers = tuple(random_tier(rng, name) for name in ("device", "host", "disk"))
    kv = KVStats(tiers, {"load": 5, "split": 2**40}, parked=7, resumed=6, event_sequence=2**60)
    engine = make_engine()
    async with serving(engine) as running:
        assert [t.tier for t in (await running.stub.GetStats(pb2.GetStatsRequest())).kv.tiers] == ["device"]
        now = dataclasses.replace(await engine.engine.stats(), kv=kv)
        engine.engine.stats = AsyncMock(return_value=now)
        got = (await running.stub.GetStats(pb2.GetStatsRequest())).kv
    times = {"read_seconds": "read_time", "write_seconds": "write_time"}
    names = {times.get(f.name, f.name) for f in dataclasses.fields(TierStats)}
    assert {f.name for f in kv_pb2.TierStats.DESCRIPTOR.fields} == names
    assert {f.name for f in kv_pb2.KVStats.DESCRIPTOR.fields} == {f.name for f in dataclasses.fields(KVStats)}
    assert (dict(got.decisions), got.parked, got.resumed, got.event_sequence) == (dict(kv.decisions), 7, 6, 2**60)
    for sent, tier in zip(got.tiers, tiers, strict=True):
        for name, value in dataclasses.asdict(tier).items():
            on_wire = getattr(sent, times.get(name, name))
            if name in times:
                assert on_wire.ToNanoseconds() == pytest.approx(value * 1e9, abs=1000), name
            else:
                assert (dict(on_wire) if isinstance(value, dict) else on_wire) == value, name


# --- events ----------------------------------------------------------------------------------------------------------


def with_events(log: KVEventLog, **kwargs) -> TextEngine:
    """An engine whose event log is the given one."""
    engine = make_engine(**kwargs)
    engine.engine.core.find_feed = lambda tenant: log
    return engine


class Publisher(threading.Thread):
    """Plays the engine thread: changes two tiers at random, and publishes after each step."""

    def __init__(self, log: KVEventLog, keys: int, *, changes: int = 20) -> None:
        super().__init__()
        self.log, self.keys, self.changes = log, keys, changes
        self.rng, self.over, self.ended = random.Random(), False, False
        self.held: set[tuple[str, Page]] = set()

    def run(self) -> None:
        while not self.over:
            for _ in range(self.changes):
                self.change()
            self.log.publish_step()
            time.sleep(0.001)

    async def end(self) -> None:
        """Make one last change, so that whoever waits for one sees the end."""
        self.over = True
        await asyncio.to_thread(self.join)
        self.ended = True
        self.change()
        self.log.publish_step()

    def change(self) -> None:
        tier = self.rng.choice(("host", "disk"))
        entry = (tier, page(self.rng.randrange(self.keys), self.rng.choice(("global", "local"))))
        if entry in self.held:
            self.held.remove(entry)
            self.log.append_removed(tier, entry[1].group, entry[1].key, "capacity")
        else:
            self.held.add(entry)
            self.log.append_stored(*entry)


class Subscriber:
    """A client's picture. It is strict: what repeats or is missing raises."""

    def __init__(self) -> None:
        self.held: dict[tuple[str, str, bytes], tuple] = {}
        self.sequence, self.epoch, self.snapshots, self.whole = 0, 0, 0, False

    def take(self, message: kv_pb2.SubscribeKVEventsResponse) -> None:
        assert self.epoch in (0, message.epoch)
        self.epoch = message.epoch
        if message.HasField("snapshot"):
            if message.snapshot.first:
                self.held, self.snapshots, self.whole = {}, self.snapshots + 1, False
            assert not self.whole
            for pages in message.snapshot.pages:
                self.add(pages)
            self.whole = message.snapshot.last
        else:
            assert self.whole and message.events.events
            for event in message.events.events:
                assert event.sequence == self.sequence + 1, "a gap"
                self.apply(event)
            assert message.sequence == self.sequence
        self.sequence = message.sequence

    def add(self, pages: kv_pb2.KVPages) -> None:
        new = {(pages.tier, pages.group, p.key): (p.parent, p.index, p.tenant, tuple(p.token_ids)) for p in pages.pages}
        assert len(new) == len(pages.pages) and not new.keys() & self.held.keys(), "a duplicate"
        self.held |= new

    def apply(self, event: kv_pb2.KVEvent) -> None:
        self.sequence, kind = event.sequence, event.WhichOneof("change")
        if kind == "stored":
            self.add(event.stored)
            return
        assert kind == "removed" and event.removed.cause
        for key in event.removed.keys:
            del self.held[event.removed.tier, event.removed.group, key]  # raises for what is not there

    async def follow(self, call, publisher: Publisher) -> None:
        """Read until the last event; `publisher` must come to its end."""
        while not publisher.ended or self.sequence < publisher.log.sequence or not self.whole:
            self.take(await call.read())

    def is_right(self, publisher: Publisher) -> bool:
        true = {
            (t, p.group, p.key): (p.parent or b"", p.index, p.tenant, tuple(p.token_ids)) for t, p in publisher.held
        }
        return self.held == true


async def test_late_and_slow_subscribers_end_with_the_true_pages_and_hold_nobody_up():
    log = KVEventLog(3000)
    publisher = Publisher(log, keys=3000)
    small_buffers = [("grpc.http2.bdp_probe", 0), ("grpc.http2.lookahead_bytes", 16_384)]
    async with serving(with_events(log, step_s=0.001), options=small_buffers) as running:
        stub = running.stub
        fast, late, slow = Subscriber(), Subscriber(), Subscriber()
        calls = [stub.SubscribeKVEvents(kv_pb2.SubscribeKVEventsRequest()) for _ in range(2)]
        publisher.start()
        work = [asyncio.ensure_future(fast.follow(calls[0], publisher))]
        slow.take(await calls[1].read())
        await until(lambda: log.sequence > 200)
        calls.append(stub.SubscribeKVEvents(kv_pb2.SubscribeKVEventsRequest()))
        work.append(asyncio.ensure_future(late.follow(calls[2], publisher)))
        got = [r async for r in stub.Generate(request("beside the events", 20))]
        assert got[-1].HasField("finish")
        end = log.sequence + 9000  # beyond what the log keeps and what all buffers on the way hold
        await until(lambda: log.sequence > end)  # the slow one reads nothing: buffers fill up, then it falls behind
        work.append(asyncio.ensure_future(slow.follow(calls[1], publisher)))
        await asyncio.sleep(0.3)
        await publisher.end()
        await asyncio.wait_for(asyncio.gather(*work), 60)
        assert all(s.is_right(publisher) for s in (fast, late, slow))
        assert slow.snapshots >= 2, "the slow one did not fall behind"
        for call in calls:
            call.cancel()
        await until(lambda: not log._listeners)


async def test_who_comes_back_goes_on_where_it_was_unless_that_is_too_old_or_of_another_process():
    log = KVEventLog(50)
    publisher = Publisher(log, keys=20, changes=1)
    for _ in range(30):
        publisher.change()
        log.publish_step()
    async with serving(with_events(log)) as running:

        async def first(**fields) -> list[kv_pb2.SubscribeKVEventsResponse]:
            """The first message, or all parts of a snapshot."""
            call = running.stub.SubscribeKVEvents(kv_pb2.SubscribeKVEventsRequest(**fields))
            messages = [await asyncio.wait_for(call.read(), 60)]
            while messages[-1].HasField("snapshot") and not messages[-1].snapshot.last:
                messages.append(await asyncio.wait_for(call.read(), 60))
            call.cancel()
            return messages

        end = log.sequence
        [known] = await first(from_sequence=end - 3, epoch=log.epoch)
        assert [e.sequence for e in known.events.events] == [end - 3, end - 2, end - 1, end]
        assert (known.epoch, known.sequence) == (log.epoch, end)
        for stale in ({}, {"from_sequence": end}, {"from_sequence": end, "epoch": log.epoch ^ 1},
                      {"from_sequence": 1, "epoch": log.epoch}, {"from_sequence": end + 2, "epoch": log.epoch},
                      {"epoch": log.epoch}, {"from_sequence": 2**64 - 1, "epoch": log.epoch}):  # fmt: skip
            messages, subscriber = await first(**stale), Subscriber()
            assert messages[0].snapshot.first and messages[-1].snapshot.last, stale
            for message in messages:
                subscriber.take(message)
            assert subscriber.is_right(publisher) and subscriber.sequence == end
        call = running.stub.SubscribeKVEvents(kv_pb2.SubscribeKVEventsRequest(from_sequence=end + 1, epoch=log.epoch))
        log.append_stored("host", page(99))
        await asyncio.sleep(0.05)
        log.publish_step()
        message = await asyncio.wait_for(call.read(), 60)
        assert [e.WhichOneof("change") for e in message.events.events] == ["stored"] and message.sequence == end + 1
        call.cancel()


async def test_events_of_an_engine_that_serves_and_sleeps():
    """The engine's own log: a snapshot of an idle engine, and each request's pages come as events."""
    async with serving(make_engine()) as running:
        stub, subscriber = running.stub, Subscriber()
        await anext(aiter(stub.Generate(request("before", 20))))
        await until(lambda: not running.engine.engine._loop.live_ids())
        call = stub.SubscribeKVEvents(kv_pb2.SubscribeKVEventsRequest())
        while not subscriber.whole:
            subscriber.take(await asyncio.wait_for(call.read(), 60))
        assert subscriber.snapshots == 1 and subscriber.held
        for prompt in ("several words", "several words more", "before"):
            assert [r async for r in stub.Generate(request(prompt, 30))]
        stats = (await stub.GetStats(pb2.GetStatsRequest())).kv
        while subscriber.sequence < stats.event_sequence:
            subscriber.take(await asyncio.wait_for(call.read(), 60))
        manager = running.engine.engine._loop._core.scheduler.manager
        true = {
            (t, p.group, p.key): (p.parent or b"", p.index, p.tenant, tuple(p.token_ids))
            for t, p in manager.list_pages()
        }
        assert subscriber.held == true and {name[:2] for name in true} == {("device", "global"), ("device", "local")}
        call.cancel()


async def test_a_subscription_needs_an_engine():
    async with serving(attach=False) as running:
        code, _, _ = await failure(running.stub.SubscribeKVEvents(kv_pb2.SubscribeKVEventsRequest()))
        assert code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 1025, 5000])
def test_a_snapshot_of_any_size_comes_in_bounded_parts(count):
    rng = random.Random(count)
    pages: dict[tuple[str, str], tuple[Page, ...]] = {}
    for i in range(count):
        name = rng.choice(("device", "disk")), rng.choice(("global", "local"))
        pages[name] = (*pages.get(name, ()), page(i, name[1]))
    messages = list(convert.make_kv_snapshot(EventSnapshot(9, 2**64 - 1, pages)))
    assert 1 <= len(messages) <= 4 + count // 1024 and all(m.ByteSize() < 128_000 for m in messages)
    assert [m.snapshot.first for m in messages] == [True] + [False] * (len(messages) - 1)
    assert [m.snapshot.last for m in messages] == [False] * (len(messages) - 1) + [True]
    subscriber = Subscriber()
    for message in messages:
        subscriber.take(message)
    assert len(subscriber.held) == count and (subscriber.sequence, subscriber.epoch) == (9, 2**64 - 1)


def test_many_events_come_in_bounded_messages_in_order():
    events = []
    for number in range(1, 4000):
        if number % 2:
            events.append(Stored(number, "disk", "local", tuple(page(number + i, "local") for i in range(number % 7))))
        else:
            events.append(Removed(number, "disk", "local", (page(number).key,), "quota", 1))
    events.append(Stored(4000, "disk", "global", tuple(page(i) for i in range(1024))))
    messages = list(convert.make_kv_events(5, events))
    assert [e.sequence for m in messages for e in m.events.events] == list(range(1, 4001))
    assert [m.sequence for m in messages] == [m.events.events[-1].sequence for m in messages]
    assert all(m.ByteSize() < 300_000 and m.epoch == 5 for m in messages) and len(messages) < 20
