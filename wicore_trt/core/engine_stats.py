"""What the engine tells of itself: counters, and gauges of the pools and tiers as they are now.

Reads the scheduler and its cache and changes nothing. It must not know requests. Invariant: a page is counted once per
tier.
"""

from __future__ import annotations

from collections.abc import Mapping

from wicore_trt.runtime.executor import KVLayout
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.types import EngineStats, KVStats, PoolStats, TierStats


def engine_stats(
    scheduler: Scheduler,
    layout: KVLayout,
    counts: Mapping[str, int],
    finished: dict[str, int],
    *,
    uptime_s: float,
    step_seconds: float,
    running: int,
) -> EngineStats:
    """`counts` has "prompt", "cached" and "generated" tokens and "steps"; `finished` requests by reason."""
    pools = tuple(
        PoolStats(group, pool.num_pages, pool.used, pool.cached, layout.page_bytes[group])
        for group, pool in scheduler.manager.pools.items()
    )
    return EngineStats(
        uptime_s=uptime_s,
        requests_running=running,
        requests_waiting=len(scheduler.waiting),
        requests_finished=finished,
        prompt_tokens=counts["prompt"],
        cached_prompt_tokens=counts["cached"],
        generated_tokens=counts["generated"],
        steps=counts["steps"],
        step_seconds=step_seconds,
        preemptions=scheduler.preemptions,
        pools=pools,
        kv=_kv_stats(scheduler, pools, layout.memory_bytes),
    )


def _kv_stats(scheduler: Scheduler, pools: tuple[PoolStats, ...], capacity_bytes: int) -> KVStats:
    manager, loader = scheduler.manager, scheduler.loader
    device = TierStats(
        tier="device",
        capacity_bytes=capacity_bytes,
        used_bytes=sum((pool.used_pages + pool.cached_pages) * pool.page_bytes for pool in pools),
        pinned_bytes=sum(pool.used_pages * pool.page_bytes for pool in pools),
        pages={pool.group: pool.used_pages + pool.cached_pages for pool in pools},
        hit_tokens=manager.hit_tokens,
        evictions={"capacity": sum(pool.evictions for pool in manager.pools.values())},
    )
    return KVStats(
        tiers=(device, *(manager.tiers.stats() if manager.tiers is not None else ())),
        decisions=dict(loader.decisions) if loader is not None else {},
        parked=loader.parking.parked if loader is not None else 0,
        resumed=loader.parking.resumed if loader is not None else 0,
        event_sequence=manager.events.sequence,
    )
