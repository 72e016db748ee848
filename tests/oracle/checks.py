"""What must hold of an engine between steps and when it is idle. Reads internals; it must not change anything."""

from __future__ import annotations

from oracle.device import Failure
from oracle.stack import Stack
from wicore_trt.kv.tiers.moves import CopyState

SETTLE_S = 4000.0
"""Beyond every timeout and pause of the tiers."""


def check_steady(stack: Stack) -> None:
    """Books agree with each other."""
    stack.scheduler.check_integrity()
    stack.manager.retention.check_integrity()
    if stack.loader is not None:
        require(not stack.loader.refused, "refused jump", "a load would have passed over pages that nobody wrote")
    stats = stack.core.stats()
    for pool in stats.pools:
        require(pool.used_pages + pool.cached_pages <= pool.total_pages, "stats", pool)
    for tier in stats.kv.tiers:
        require(0 <= tier.used_bytes <= tier.capacity_bytes, "stats", tier)
    require(stats.requests_running >= 0 and stats.cached_prompt_tokens <= stats.prompt_tokens, "stats", stats)


def settle(stack: Stack) -> None:
    """Let all that is under way end: an idle engine tidies up."""
    world = stack.world
    begun = world.clock()
    while stack.core.do_housekeeping() or (stack.tiers is not None and stack.tiers.loads.loads):
        spent = world.clock() - begun
        require(spent < (SETTLE_S if world.virtual else 60.0), "never idle", under_way(stack))
        if world.virtual:
            world.advance(0.02 if spent < 2 else 5.0)
        else:
            stack.tiers.wait_for_report(0.01)
            stack.tiers.down.no_writes_before = 0.0  # nobody waits for half a minute here


def under_way(stack: Stack) -> str:
    tiers = stack.tiers
    return f"{tiers.movers.outstanding} transfers, {len(tiers.down.to_save)} to save, loading: {tiers.loads.loads}"


def check_idle(stack: Stack) -> None:
    """Nothing is held or under way when no request lives. Call it after `settle`."""
    check_steady(stack)
    manager = stack.manager
    for group, pool in manager.pools.items():
        require(pool.used_slots == 0, "leak", f"{pool.used_slots} {group} pages are used by nobody")
    require(not manager._computing, "leak", "pages in flight that nobody computes")
    stats = stack.core.stats()
    require(stats.requests_running == stats.requests_waiting == 0, "stats", stats)
    if stack.tiers is None:
        return
    tiers = stack.tiers
    require(not stack.loader._begun and not stack.tiers.loads.loads, "leak", "a load of nobody")
    require(not tiers.movers.outstanding and not tiers.up.waiting, "leak", under_way(stack))
    require(not tiers.up.reading_bytes and not tiers.down.saving_slots, "leak", "bytes that move for ever")
    for name, index in stack.tiers.indexes.items():
        state = index.inspect()
        require(not state.lost_copies, "leak", name, "slots that never came back")
        for copy in index.iterate_copies():
            require(copy.state is CopyState.READY and not copy.readers, "leak", name, "a copy is held", copy)
            require(copy.page.parent is not None or copy.page.index == 0, "leak", name, "a private page was left")
        require(not state.users, "leak", name, "a page is in use")


def require(holds: bool, kind: str, *what: object) -> None:
    """`what` is put into words only when it does not hold: this runs at every step."""
    if not holds:
        raise Failure(kind, " ".join(map(str, what)))
