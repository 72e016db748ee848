"""What a host tier costs when nothing is found in it: the table `reuse-free` of `benchmarks.kv.on_gpu`.

Rounds of fresh prompts, some at a time, by an engine that keeps nothing, by one whose host tier has its memory, and by
one that is asked at once, while memory is being taken; in turns, so that a machine that drifts is seen. Then
milliseconds a step of a batch that decodes, with pages copied down beside each step and without. Invariant: nothing is
found, or the run ends.
"""

from __future__ import annotations

import itertools
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import say

GIB = 1 << 30
PROMPTS, LENGTH, OUT, AT_ONCE, WARM = 24, 8192, 64, 8, 2000
DEVICE_GIB, HOST_GIB = 24, 28
"""A round's pages, 27.6 GB, pass the device's memory and fit the host's."""
KEPT_NOTHING, SETTLED, STARTING = "nothing kept", "host tier, settled", "host tier, at once"
ORDER = (SETTLED, KEPT_NOTHING, STARTING, KEPT_NOTHING)
DECODE, STEPS, COPIES = (32, 1024), 129, 64
"""Sequences and their context; steps of a round; pages that are copied beside each step."""
TOKENS = range(10, 9999)
Opened = Callable[..., Any]
Gaps = Callable[[Any, int, int, int], tuple[float, list[float]]]
"""`on_gpu.opened` and `on_gpu.decode_gaps`."""


def one_round(engine: Any, rng: random.Random) -> dict[str, Any]:
    """Seconds of a round, and what its tier wrote."""
    waiting, live = [rng.choices(TOKENS, k=LENGTH) for _ in range(PROMPTS)], set[str]()
    before, begun = engine.core.stats(), time.perf_counter()
    while waiting or live:
        while waiting and len(live) < AT_ONCE:
            live.add(engine.add(waiting.pop(), OUT))
        live -= {name for name, _, ended in engine.step() if ended}
    seconds, after = time.perf_counter() - begun, engine.core.stats()
    assert after.cached_prompt_tokens == before.cached_prompt_tokens, "something was found"
    host = [tier for tier in after.kv.tiers if tier.tier == "host"]
    written = sum(tier.write_bytes for tier in host)
    copying = sum(tier.write_seconds for tier in host)
    return {
        "seconds": round(seconds, 3),
        "turns_per_s": round(PROMPTS / seconds, 3),
        "written_gb": round(written / 1e9, 1),
        "gb_per_s": round(written / copying / 1e9, 1) if copying else "-",
        "no_room": sum(tier.failures.get("no room", 0) for tier in host),
    }


def rounds(opened: Opened, gaps: Gaps, path: Path, repeat: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of the rounds, each with its share of the time of those that keep nothing, and rows of decode."""
    rows, decode, rng = list[dict[str, Any]](), list[dict[str, Any]](), random.Random(17)
    for number, arm in enumerate(ORDER * repeat):
        flags = {"kv__prefix_cache": False} if arm == KEPT_NOTHING else {"kv__host_bytes": int(HOST_GIB * GIB)}
        with opened(path, DEVICE_GIB, DECODE[0], LENGTH + OUT + 64, **flags) as engine:
            ready = engine.ready_s
            engine.first_token_s(rng.choices(TOKENS, k=WARM))
            begun = time.perf_counter()
            if arm == SETTLED:
                engine.first_token_s(rng.choices(TOKENS, k=LENGTH))
                engine.settle()
            settled = {"ready_s": round(ready, 1), "settled_s": round(time.perf_counter() - begun, 1)}
            rows.append({"arm": arm, **one_round(engine, rng), **settled})
            say(f"reuse-free {rows[-1]}")
            if not number:
                engine.settle()
                decode = decode_beside(engine, gaps)
    plain = statistics.median(row["seconds"] for row in rows if row["arm"] == KEPT_NOTHING)
    for arm in dict.fromkeys(ORDER):
        median = statistics.median(row["seconds"] for row in rows if row["arm"] == arm)
        for row in rows:
            if row["arm"] == arm:
                row["median_s"], row["share"] = round(median, 3), f"{median / plain - 1:+.2%}"
    return rows, decode


@contextmanager
def copying(engine: Any, count: int) -> Iterator[list[int]]:
    """Beside each step `count` pages that the device has are copied down, the same ones again and again; what comes
    grows by the pages of each step."""
    manager, copied = engine.core.scheduler.manager, list[int]()
    tiers, beside = manager.tiers, manager.work_beside_step
    held = [(pool, page, slot) for pool in manager.pools.values() for page in pool.list_pages()
            if (slot := pool.find_slot(page.key)) is not None and pool.trusted[slot]]  # fmt: skip
    turn = itertools.cycle(held)

    def beside_step(tokens: int) -> None:
        beside(tokens)
        begun = 0
        for pool, page, slot in itertools.islice(turn, count):
            if pool.page_of[slot] is page:
                known = tiers.host.find_copy(*page.name)
                if known is not None and known.ready and not known.readers:
                    tiers.host.drop_copy(known, "cleared")
                begun += tiers.down.store_page(page, slot) is not None
        copied.append(begun)

    manager.work_beside_step = beside_step
    try:
        yield copied
    finally:
        del manager.work_beside_step  # it holds the engine, which nobody would collect


def decode_beside(engine: Any, gaps: Gaps) -> list[dict[str, Any]]:
    """Milliseconds a step of a batch that decodes, with copies beside it and without, two rounds of each."""
    found: dict[str, list[float]] = {"none": [], f"{COPIES} pages a step": []}
    gaps(engine, *DECODE, 8)  # computes the prompts, which the others find
    engine.settle()
    names, written = (*found, *reversed(found)), 0.0
    for name in names:
        before = host_bytes(engine)
        if name == "none":
            found[name] += gaps(engine, *DECODE, STEPS)[1]
        else:
            begun = time.perf_counter()
            with copying(engine, COPIES):
                found[name] += gaps(engine, *DECODE, STEPS)[1]
            written = (host_bytes(engine) - before) / (time.perf_counter() - begun)
        engine.settle()
    plain, rows = statistics.median(found["none"]), []
    for name, seconds in found.items():
        median = statistics.median(seconds)
        rows.append(
            {"sequences": DECODE[0], "context": DECODE[1], "copies": name, "steps": len(seconds)}
            | {"median_ms": round(median * 1e3, 3), "mean_ms": round(statistics.mean(seconds) * 1e3, 3)}
            | {"gb_per_s": 0.0 if name == "none" else round(written / 1e9, 1), "share": f"{median / plain - 1:+.2%}"}
        )
        say(f"reuse-free, decode {rows[-1]}")
    return rows


def host_bytes(engine: Any) -> int:
    """Bytes that were copied to host memory so far."""
    return sum(tier.write_bytes for tier in engine.core.stats().kv.tiers if tier.tier == "host")
