"""Conversations that outgrow the device and the host tier, in virtual time: what is where when a turn comes.

    python -m benchmarks.kv.sessions_simulation [--device 16 --host 16 --disk 45 --disk-gb-per-s 1.65]

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

from benchmarks.kv.disk_simulation import Engine, Sizes
from benchmarks.kv.virtual_disk import PAGE_TOKENS, WINDOW, World
from wicore_trt.kv.sequence_pages import SequencePages
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import CacheHints

AT_ONCE, NEW, OUT = 8, 256, 64
LAUNCH_S, DRAG = 0.06, 1.1
"""Of steps beside a disk that is read, as an H200's machine took (`docs/benchmarks/log.md`)."""
PROMPT_TOKENS = range(10, 9999)
PLACES = ("device", "host", "device or host", "any tier")


def usable(engine: Engine, tokens: Sequence[int]) -> dict[str, int]:
    """By place, how many tokens of a prompt a hit could bring from there."""
    pages = SequencePages(engine.manager.names("", ""), CacheHints())
    pages.name(tokens)
    pools, host, disk = engine.manager.pools, engine.tiers.host, engine.tiers.disk
    assert disk is not None

    def on_device(group: str, key: bytes) -> bool:
        return pools[group].find(key) is not None

    def near(group: str, key: bytes) -> bool:
        return on_device(group, key) or host.ready(group, key) is not None

    found: tuple[Callable[[str, bytes], bool], ...] = (
        on_device,
        lambda group, key: host.ready(group, key) is not None,
        near,
        lambda group, key: near(group, key) or disk.ready(group, key) is not None,
    )
    return {place: PAGE_TOKENS * _end(pages.keys, has) for place, has in zip(PLACES, found, strict=True)}


def _end(keys: Sequence[bytes], has: Callable[[str, bytes], bool]) -> int:
    """Pages up to the last place where all global ones and a window of local ones are there."""
    whole = next((i for i, key in enumerate(keys) if not has(GLOBAL, key)), len(keys))
    run = best = 0
    for i, key in enumerate(keys[:whole]):
        run = run + 1 if has(LOCAL, key) else 0
        if run >= min(i + 1, WINDOW // PAGE_TOKENS):
            best = i + 1
    return best


def play(world: World, sizes: Sizes, conversations: int, history: int, turns: int, seed: int) -> list[dict[str, float]]:
    """A row for each round of turns in random order. Seconds are virtual."""
    engine, rng = Engine(world, rated=world.disk[0][1], sizes=sizes, seed=seed), random.Random(seed)
    said, rows = [rng.choices(PROMPT_TOKENS, k=history) for _ in range(conversations)], []
    with engine.running():
        for turn in range(turns):
            waiting, live = deque(rng.sample(range(conversations), conversations)), dict[str, int]()
            begun, before, asked = engine.events.now, engine.core.stats().cached_prompt_tokens, 0
            read, written, there = engine.disk.read_bytes, engine.disk.write_bytes, dict.fromkeys(PLACES, 0)
            while waiting or live:
                while waiting and len(live) < sizes.sequences:
                    number = waiting.popleft()
                    for place, count in usable(engine, said[number]).items():
                        there[place] += count
                    said[number] += rng.choices(PROMPT_TOKENS, k=NEW)
                    asked += len(said[number])
                    live[engine.ask(said[number], OUT)] = number
                for output in engine.step():
                    said[live[output.request_id]] += output.token_ids
                    if output.finish_reason is not None:
                        del live[output.request_id]
            row = {"round": turn + 1, "turns/s": conversations / (engine.events.now - begun)}
            row["found"] = (engine.core.stats().cached_prompt_tokens - before) / asked
            row |= {f"in {place}": count / asked for place, count in there.items()}
            row |= {
                "GB read": (engine.disk.read_bytes - read) / 1e9,
                "GB written": (engine.disk.write_bytes - written) / 1e9,
            }
            rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, size in {"device": 16.0, "host": 16.0, "disk": 45.0}.items():
        parser.add_argument(f"--{name}", type=float, default=size, help="GiB of the tier")
    parser.add_argument("--disk-gb-per-s", type=float, default=1.65)
    parser.add_argument("--conversations", type=int, default=48)
    parser.add_argument("--history", type=int, default=8192, help="tokens before the first turn")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--seed", type=int, default=3)
    given = parser.parse_args()
    world = World(((0.0, 1e9 * given.disk_gb_per_s),), launch_s=LAUNCH_S, drag=DRAG)
    sizes = Sizes(given.device, given.host, given.disk, AT_ONCE)
    rows = play(world, sizes, given.conversations, given.history, given.turns, given.seed)
    print("| " + " | ".join(rows[0]) + " |\n|" + " --- |" * len(rows[0]))
    for row in rows:
        print("| " + " | ".join(f"{value:.3g}" for value in row.values()) + " |")


if __name__ == "__main__":
    main()
