"""Statistics of the engine: counters, and gauges of the pools and tiers as they are now.

Only reads the scheduler and its cache. It must not know requests. Invariant: a page is counted once per tier.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from wicore_trt.core.times import Histogram
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.types import EngineStats, KVStats, PoolStats, TierStats


def read_engine_stats(
    scheduler: Scheduler,
    layout: KVLayout,
    counts: Mapping[str, int],
    finished: Mapping[str, int],
    times: tuple[float, float],
    running: int,
    step_tokens: Histogram,
) -> Callable[[], EngineStats]:
    """Read all statistics now; the returned function assembles them on any thread. `counts`: tokens by "prompt",
    "cached", "generated", and "steps". `finished`: requests by reason. `times`: seconds of uptime, and in steps."""
    manager, loader, counts, finished = scheduler.manager, scheduler.loader, dict(counts), dict(finished)
    pools = [
        (name, pool.num_pages, pool.used_slots, pool.cached_slots, pool.evictions)
        for name, pool in manager.pools.items()
    ]
    waiting, preemptions, hit_tokens = len(scheduler.waiting), scheduler.preemptions, manager.hit_tokens
    tiers = manager.tiers.collect_stats() if manager.tiers is not None else ()
    decisions = dict(loader.decisions) if loader is not None else {}
    parked, resumed = (loader.parking.parked, loader.parking.resumed) if loader is not None else (0, 0)
    events, step_counts, step_total = manager.events.sequence, tuple(step_tokens.counts), step_tokens.total

    def make_stats() -> EngineStats:
        held = [(used + cached, used, layout.page_bytes[name]) for name, _, used, cached, _ in pools]
        used_bytes = sum(pages * size for pages, _, size in held)
        device = TierStats(
            tier="device",
            capacity_bytes=layout.memory_bytes,
            used_bytes=used_bytes,
            raw_bytes=used_bytes,
            pinned_bytes=sum(used * size for _, used, size in held),
            pages={name: used + cached for name, _, used, cached, _ in pools},
            hit_tokens=hit_tokens,
            evictions={"capacity": sum(evictions for *_, evictions in pools)},
        )
        return EngineStats(
            uptime_s=times[0], requests_running=running, requests_waiting=waiting, requests_finished=finished,
            prompt_tokens=counts.get("prompt", 0), cached_prompt_tokens=counts.get("cached", 0),
            generated_tokens=counts.get("generated", 0), steps=counts.get("steps", 0), step_seconds=times[1],
            step_tokens=(*step_counts, int(step_total)), preemptions=preemptions,
            pools=tuple(PoolStats(*pool[:4], layout.page_bytes[pool[0]]) for pool in pools),
            kv=KVStats((device, *tiers), decisions, parked, resumed, events),
        )  # fmt: skip

    return make_stats
