"""Conversations that outgrow the device and the host tier, in virtual time: what is where when a turn comes.

    python -m benchmarks.kv.sessions_simulation [--device 16 --host 16 --disk 56 --disk-gb-per-s 1.65] [--host-ms ...]

The workload of `benchmarks.kv.on_gpu`'s `sessions` at 27B's sizes over the engine of `disk_simulation.py`. It tells
what a run on a GPU cannot: before each request looks, how much of its prompt a hit could bring from the device, from
host memory, from both together, and with the disk; a hit needs the window in front of its end as well as all pages up
to there. It must not know how the tiers decide. Invariant: looking changes nothing.
"""

from __future__ import annotations

import argparse
import random
from collections import deque
from collections.abc import Callable, Sequence
from statistics import median, quantiles

from benchmarks.kv.disk_simulation import Engine, Sizes
from benchmarks.kv.host_costs import HostCosts
from benchmarks.kv.on_gpu import AT_ONCE, HISTORY, NEW, OUT, PROMPT_TOKENS, SESSIONS, TURNS
from benchmarks.kv.virtual_disk import GPUS, GRAPH_TOKENS, PAGE_TOKENS, World
from wicore_trt.kv.sequence_pages import SequencePages
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import CacheHints

LAUNCH_S, DRAG = 0.06, 1.1
"""Of steps beside a disk that is read, as an H200's machine took (`docs/benchmarks/log.md`)."""
PAGE_S = 1e-4
"""Of the engine's thread for a page from disk: to find room, ask, book and send it on, beside threads that report."""
Place = Callable[[str, bytes], object]
"""Where a tier has the page of a layer group and key; None where it has not."""
PLACES = ("device", "host", "device or host", "any tier")


def usable(engine: Engine, tokens: Sequence[int]) -> dict[str, int]:
    """By place, how many tokens of a prompt a hit could bring from there."""
    manager, host, disk = engine.manager, engine.tiers.host, engine.tiers.disk
    pages = SequencePages(manager.chain.derive_names("", ""), CacheHints())
    pages.name_pages(tokens)
    assert disk is not None

    def device(group: str, key: bytes) -> int | None:
        return manager.pools[group].find_slot(key)

    places: tuple[tuple[Place, ...], ...] = (
        (device,),
        (host.find_ready,),
        (device, host.find_ready),
        (device, host.find_ready, disk.find_ready),
    )
    found = {}
    for name, tiers in zip(PLACES, places, strict=True):

        def there(group: str, key: bytes, tiers: tuple[Place, ...] = tiers) -> bool:
            return any(tier(group, key) is not None for tier in tiers)

        whole = next((i for i, key in enumerate(pages.keys) if not there(GLOBAL, key)), len(pages.keys))
        local = [there(LOCAL, key) or None for key in pages.keys[:whole]]
        found[name] = PAGE_TOKENS * manager.find_longest_window(pages, whole, local)
    return found


def play(world: World, sizes: Sizes, conversations: int, history: int, turns: int, seed: int) -> list[dict[str, float]]:
    """A row for each round of turns in random order. Seconds are virtual."""
    engine, rng = Engine(world, rated=world.disk[0][1], sizes=sizes, seed=seed), random.Random(seed)
    said, rows = [rng.choices(PROMPT_TOKENS, k=history) for _ in range(conversations)], []
    with engine.running():
        for turn in range(turns):
            waiting, live = deque(rng.sample(range(conversations), conversations)), dict[str, int]()
            came, first = dict[str, float](), list[float]()
            begun, before, asked = engine.events.now, engine.core.stats().cached_prompt_tokens, 0
            read, written, there = engine.disk.read_bytes, engine.disk.write_bytes, dict.fromkeys(PLACES, 0)
            while waiting or live:
                while waiting and len(live) < sizes.sequences:
                    number = waiting.popleft()
                    for place, count in usable(engine, said[number]).items():
                        there[place] += count
                    said[number] += rng.choices(PROMPT_TOKENS, k=NEW)
                    asked += len(said[number])
                    live[name := engine.ask(said[number], OUT)] = number
                    came[name] = engine.events.now
                for output in engine.step():
                    if output.token_ids and (asked_at := came.pop(output.request_key, None)) is not None:
                        first.append(engine.events.now - asked_at)
                    said[live[output.request_key]] += output.token_ids
                    if output.finish_reason is not None:
                        del live[output.request_key]
            row = {"round": turn + 1, "turns/s": conversations / (engine.events.now - begun)}
            row["found"] = (engine.core.stats().cached_prompt_tokens - before) / asked
            row |= {"first token p50, s": median(first), "p90, s": quantiles(first, n=10)[-1]}
            row |= {f"in {place}": count / asked for place, count in there.items()}
            row |= {
                "GB read": (engine.disk.read_bytes - read) / 1e9,
                "GB written": (engine.disk.write_bytes - written) / 1e9,
            }
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in {"device": 16.0, "host": 16.0, "disk": 56.0}.items():
        parser.add_argument(f"--{name}", type=float, default=size, help="GiB of the tier")
    parser.add_argument("--disk-gb-per-s", type=float, default=1.65, help="through the tier: `benchmarks.kv.disk_rate`")
    parser.add_argument("--conversations", type=int, default=SESSIONS)
    parser.add_argument("--history", type=int, default=HISTORY, help="tokens before the first turn")
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--host-ms", help="of the engine's thread, as `benchmarks.kv.paced` prints it: `HostCosts`")
    parser.add_argument("--graph-tokens", type=int, default=GRAPH_TOKENS, help="of the largest step that has a graph")
    parser.add_argument("--gpu", choices=GPUS, default="h200", help="whose steps take their time")
    given = parser.parse_args()
    host = None if given.host_ms is None else HostCosts(*map(float, given.host_ms.split(",")))
    drag = DRAG if host is None else 1.0  # which is its thread's part
    world = World(
        ((0.0, 1e9 * given.disk_gb_per_s),), launch_s=LAUNCH_S, drag=drag, page_s=PAGE_S, host=host,
        graph_tokens=given.graph_tokens, gpu=given.gpu,
    )  # fmt: skip
    sizes = Sizes(given.device, given.host, given.disk, AT_ONCE)
    rows = play(world, sizes, given.conversations, given.history, given.turns, given.seed)
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{value:.3g}" for value in row.values()) + " |")


if __name__ == "__main__":
    main()
