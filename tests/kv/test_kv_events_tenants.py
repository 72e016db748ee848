"""A tenant's feed of KV events: its own pages, whole and in order, and nothing of anybody else."""

from __future__ import annotations

import os
import random
import time
from dataclasses import replace

from fakes import make_core
from hypothesis import given, settings
from hypothesis import strategies as st

from wicore_trt.config import KVSettings
from wicore_trt.kv.events import EventFeed, KVEventLog
from wicore_trt.kv.pages.page import Page
from wicore_trt.types import GenerateRequest, SamplingParams

MINE, OTHER = b"m" * 16, b"o" * 16
TIERS, GROUPS, CAUSES = ("device", "host", "disk"), ("global", "local"), ("capacity", "quota")


def plain(feed: EventFeed) -> list[tuple]:
    """All that a feed's events say."""
    found = feed.list_since(0)
    assert found is not None
    return [tuple(getattr(event, name) for name in event.__struct_fields__) for event in found]


def change(log: KVEventLog, rng: random.Random, held: set[tuple[str, Page]], tenant: bytes) -> None:
    """One page of a tenant comes or goes."""
    tier, group, number = rng.choice(TIERS), rng.choice(GROUPS), rng.randrange(12)
    entry = (tier, Page(tenant * 2 + bytes([number]), group, number, None, tenant))
    if entry in held:
        held.remove(entry)
        log.append_removed(tier, group, entry[1].key, rng.choice(CAUSES))
    else:
        held.add(entry)
        log.append_stored(*entry)


@settings(max_examples=80, deadline=None)
@given(seed=st.integers(0, 2**32), late=st.booleans())
def test_a_feed_is_the_same_whatever_others_do(seed: int, late: bool) -> None:
    """The tenant alone on one server, and among others on another: numbers, order, cuts, what is kept."""
    alone, among = KVEventLog(16 * 60), KVEventLog(16 * 60)
    steps = random.Random(seed)
    ways = [(alone, random.Random(seed + 1), set(), 0), (among, random.Random(seed + 1), set(), 1)]
    noise, others = random.Random(seed + 2), set()
    feeds: list[EventFeed] = [] if late else [alone.tenant_feed(MINE), among.tenant_feed(MINE)]
    for step in range(40):
        count = steps.randrange(5)
        for log, rng, held, crowd in ways:
            for _ in range(count):
                for _ in range(noise.randrange(4) * crowd):
                    change(log, noise, others, OTHER)
                change(log, rng, held, MINE)
            for _ in range(noise.randrange(4) * crowd):
                change(log, noise, others, OTHER)
            log.publish_step()
        if step == 20 and late:
            feeds = [alone.tenant_feed(MINE), among.tenant_feed(MINE)]
        for feed in feeds:
            assert {(tier, page) for (tier, _), pages in feed.take_snapshot().pages.items() for page in pages} == ways[
                0
            ][2]
            assert all(page.tenant == MINE for pages in feed.take_snapshot().pages.values() for page in pages)
        if feeds:
            one, two = feeds
            assert one.sequence == two.sequence and one.epoch != two.epoch != among.epoch
            first = one.sequence - len(one._events)
            assert (one.list_since(first - 1) is None) == (two.list_since(first - 1) is None)
            assert one.list_since(first) == two.list_since(first), f"seed {seed}"
            assert list(one.take_snapshot().pages.items()) == list(two.take_snapshot().pages.items())


def test_only_its_own_events_wake_a_subscriber() -> None:
    log, calls = KVEventLog(1000), []
    feed = log.tenant_feed(MINE)
    feed.add_listener(lambda: calls.append(1))
    log.append_stored("host", Page(b"k" * 32, "global", 0, None, OTHER))
    log.publish_step()
    log.append_removed("host", "global", b"k" * 32, "quota")
    log.publish_step()
    assert not calls and feed.sequence == 0 and not feed.list_since(0) and not feed.take_snapshot().pages
    log.append_stored("host", Page(b"m" * 32, "global", 0, None, MINE))
    log.publish_step()
    assert len(calls) == 1 and feed.sequence == 1 and log.tenant_feed(MINE) is feed
    log.append_removed("host", "global", b"m" * 32, "quota")
    log.publish_step()
    assert plain(feed)[1:] == [(2, "host", "global", (b"m" * 32,), "quota", 0)]


def test_tenants_of_an_engine_see_their_own_pages() -> None:
    """Tenants by who asks and by salt, through requests; a guess of another's prompt changes nothing in a feed."""
    core = make_core(kv=KVSettings(host_bytes=1 << 20))
    manager, rng = core.scheduler.manager, random.Random(os.urandom(4))
    askers = [("alice", "x"), ("alice", "y"), ("", "bob"), ("", "alice"), ("", "")]
    tags = {asker: manager.chain.derive_names(*asker).tag for asker in askers}
    assert len(set(tags.values())) == 4, "salts do not divide a tenant that the server knows"
    feeds = {asker: manager.events.tenant_feed(tag) for asker, tag in tags.items()}
    prompt = tuple(rng.randrange(2, 90) for _ in range(30))
    seen: dict[tuple[str, str], set] = {}
    for number, (who, salt) in enumerate(askers):
        request = GenerateRequest(f"r{number}", prompt, SamplingParams(max_tokens=1, temperature=0))
        core.add(replace(request, tenant=who, cache_salt=salt))
        while core.has_work:
            core.step()
        end = time.monotonic() + 60
        while core.do_housekeeping() and time.monotonic() < end:
            manager.tiers.wait_for_report(0.01)
        manager.events.publish_step()
        after = {asker: plain(feed) for asker, feed in feeds.items()}
        for asker, was in seen.items():
            assert (after[asker] == was) == (tags[asker] != tags[who, salt]), "others' requests are no events of mine"
        seen = after
    everything = {page.name for _, page in manager.list_pages()}
    own = [{page.name for pages in feeds[a].take_snapshot().pages.values() for page in pages} for a in askers]
    assert set().union(*own) == everything and len(own[0]) == 2 * len(own[2]), "each salt has pages of its own"
    core.close()
