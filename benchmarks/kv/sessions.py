"""What the KV tiers do, measured on a CPU: sessions that come back, on Gemma 3 270M. `make bench-kv`.

Many sessions take turns in round robin: a session returns when all others were served, the worst distance for a cache.
Their KV is ten times the device pool; the host tier is three times that pool, and the disk holds all. Arms: device
only, + host, + host + disk, an unlimited device pool, a new engine on the disk of the one before it; and traffic
without any reuse, with tiers and without in turn. Every answer must be that of the unlimited arm, token by token. Exit
code 1 when a requirement does not hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import note
from benchmarks.cpu.decode import QUIET_LOAD, prompt_source
from benchmarks.kv.report import (
    DEVICE,
    DISK,
    HOST,
    NEXT,
    RESTART,
    UNLIMITED,
    ArmRun,
    NoReuse,
    arm_results,
    as_json,
    compare_answers,
    markdown,
    requirement_json,
    requirements,
    tier_hits,
)
from benchmarks.kv.workload import (
    BATCH_TOKENS,
    Conversations,
    FinishedRequest,
    NewPrompts,
    Prompts,
    Sizes,
    TrafficShape,
    Turn,
    choose_sizes,
    replay,
    text_tokens,
)
from wicore_trt.arithmetic import ITEM_BYTES
from wicore_trt.bench.perplexity import read_tokens
from wicore_trt.bench.report import make_report
from wicore_trt.checkpoint.demo import fetch_model
from wicore_trt.config import load_settings
from wicore_trt.core.assemble import LoadedEngine, load_engine
from wicore_trt.core.engine import EngineCore
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import open_engine
from wicore_trt.errors import WicoreError
from wicore_trt.runtime.executor import Executor
from wicore_trt.text.model_files import FILES
from wicore_trt.text.tokenizer import Tokenizer

FULL = TrafficShape(40, 3, system_prompts=2, system_tokens=128, turn_tokens=128, output_tokens=16, in_flight=3)
QUICK = TrafficShape(20, 2, system_prompts=2, system_tokens=32, turn_tokens=32, output_tokens=4, in_flight=2)
BURST = 3
"""Requests of one turn without reuse."""
DRAIN_S = 10.0
ARMS = {"device": DEVICE, "host": HOST, "disk": DISK, "unlimited": UNLIMITED}


@dataclass(frozen=True, slots=True)
class Experiment:
    """Everything that the arms have in common."""

    engine: Path
    shape: TrafficShape
    sizes: Sizes
    text: Sequence[int]
    bos_id: int
    scratch: Path
    threads: int
    write_policy: str = "through"

    def settings(self, arm: str, disk: Path | None) -> dict[str, Any]:
        """Settings of an arm; `disk` is the directory of its disk tier."""
        unlimited = arm == UNLIMITED
        found: dict[str, Any] = {
            "engine": str(self.engine),
            "executor.device": "cpu",
            "executor.threads": self.threads,
            "kv.device_bytes": self.sizes.unlimited if unlimited else self.sizes.device,
            "scheduler.max_context": self.shape.length(self.shape.turns + 1),
            "scheduler.max_batch_tokens": BATCH_TOKENS,
            "scheduler.max_sequences": self.sizes.windows,
        }
        if arm in (HOST, DISK):
            found |= {"kv.host_bytes": self.sizes.host, "kv.write_policy": self.write_policy}
        if arm == DISK:
            # one thread: more of them take turns on the cores that compute
            found |= {"kv.disk_path": str(disk), "kv.disk_bytes": self.sizes.disk}
        return found


@contextmanager
def open_core(settings: Mapping[str, Any], executor: Executor | None = None) -> Iterator[LoadedEngine]:
    """A loaded engine, closed at the end; its memory is free afterwards. `executor`: run on that of another one."""
    loaded = load_engine(load_settings(None, settings), executor)
    try:
        yield loaded
    finally:
        loaded.engine_core.close()
        del loaded
        gc.collect()


def play(
    bench: Experiment, core: EngineCore, prompts: Prompts, schedule: Sequence[Turn], arm: str, number: int
) -> ArmRun:
    """Serve `schedule` and read the counters around it."""
    before = core.stats()
    served = replay(core, prompts, schedule, output_tokens=bench.shape.output_tokens, in_flight=bench.shape.in_flight)
    after = core.stats()
    run = ArmRun(arm, number, served, tier_hits(before, after), [asdict(tier) for tier in after.kv.tiers])
    result = run.throughput
    note(
        f"round {number}, {arm}: {result.duration_s:.1f} s, {result.output_tokens_per_s:.1f} generated tokens/s, "
        f"hits {dict(run.hits)} of {result.prompt_tokens} prompt tokens"
    )
    return run


def play_arm(bench: Experiment, arm: str, number: int) -> list[ArmRun]:
    """One arm of one round on a fresh engine; with a disk also the turn after a restart, and for the unlimited arm
    the same turn without one."""
    shape = bench.shape
    conversations = Conversations(shape, bench.text, bench.bos_id)
    turns, last = shape.schedule(range(shape.turns)), shape.schedule([shape.turns])
    with tempfile.TemporaryDirectory(dir=bench.scratch) as disk:
        settings = bench.settings(arm, Path(disk))
        with open_core(settings) as loaded:
            runs = [play(bench, loaded.engine_core, conversations, turns, arm, number)]
            if arm == UNLIMITED:
                runs.append(play(bench, loaded.engine_core, conversations, last, NEXT, number))
        if arm == DISK:
            with open_core(settings) as loaded:
                runs.append(play(bench, loaded.engine_core, conversations, last, RESTART, number))
    return runs


def no_reuse(bench: Experiment, groups: int, arm: str = DISK) -> NoReuse:
    """The same new prompts without tiers (A) and with those of `arm` (B), in turns A B B A, after one group that is not
    counted. A turn is timed to its last token; the copies that it leaves are waited for before the next one. Both
    run on one executor: two copies of the weights differ in speed by more than what is measured, because of where in
    memory they lie. Neither finds the other's pages, as there is nothing to find."""
    length = bench.shape.length(bench.shape.turns)
    prompts = prompt_source(bench.text, bench.bos_id, length - bench.shape.output_tokens)
    ratios: list[float] = []
    drains: list[float] = []
    requests = tokens = differing = 0
    with (
        tempfile.TemporaryDirectory(dir=bench.scratch) as disk,
        open_core(bench.settings(DEVICE, None)) as plain,
        open_core(bench.settings(arm, Path(disk)), plain.engine_core.executor) as tiered,
    ):
        for number in range(groups + 1):
            seconds = [0.0, 0.0]
            for order in ((plain, tiered), (tiered, plain)):
                burst = [next(prompts) for _ in range(BURST)]
                answers = []
                for loaded in order:
                    served = _burst(bench, loaded.engine_core, burst)
                    seconds[loaded is tiered] += max(s.record.finished for s in served)
                    seconds[loaded is tiered] -= min(s.record.started for s in served)
                    answers.append({s.turn: s.token_ids for s in served})
                    drain = _drain(loaded.engine_core)
                    if number and loaded is tiered:
                        drains.append(drain)
                requests += BURST
                tokens += sum(map(len, answers[0].values()))
                differing += sum(answers[0][turn] != answers[1][turn] for turn in answers[0])
            if number:
                ratios.append(seconds[0] / seconds[1])
                note(f"without reuse, group {number} of {groups}: {100 * ratios[-1]:.1f} % of the speed without tiers")
        names = [tier.tier for tier in tiered.engine_core.stats().kv.tiers]
    return NoReuse(requests, tokens, differing, ratios, drains, names, arm)


def _burst(bench: Experiment, core: EngineCore, prompts: Sequence[Sequence[int]]) -> list[FinishedRequest]:
    served = replay(
        core,
        NewPrompts(prompts),
        [(i, 0) for i in range(len(prompts))],
        output_tokens=bench.shape.output_tokens,
        in_flight=bench.shape.in_flight,
    )
    if any(s.record.cached_tokens for s in served):
        raise WicoreError("Traffic without reuse had a prefix hit.", fix="Use an engine with larger pages.")
    return served


def _drain(core: EngineCore) -> float:
    """Seconds until the engine's tiers have nothing under way."""
    started = time.perf_counter()
    while any(tier.queue_depth for tier in core.stats().kv.tiers):
        core.step()
        time.sleep(0.0005)
        if time.perf_counter() - started > DRAIN_S:
            note(f"transfers were still under way after {DRAIN_S:.0f} s")
            break
    return time.perf_counter() - started


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.kv.sessions", description=__doc__)
    parser.add_argument("--engine", type=Path, help="engine of Gemma 3 270M; built afresh when left out")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, help="rounds of the replay; default 3")
    parser.add_argument("--write-policy", default="through", choices=("through", "selective", "back"))
    parser.add_argument("--without-reuse", default="disk", choices=("host", "disk"), help="the tiers that may cost")
    parser.add_argument("--groups", type=int, help="groups A B B A without reuse, 0 for none; default 20")
    parser.add_argument("--sessions", type=int, help=f"default {FULL.sessions}")
    parser.add_argument("--arms", nargs="*", choices=ARMS, default=list(ARMS), help="arms of the replay")
    parser.add_argument("--quick", action="store_true", help="seconds, not minutes; speed is not judged")
    parser.add_argument(
        "--scratch", type=Path, help="where the disk tier lives; default: the system's temporary directory"
    )
    parser.add_argument("--output", type=Path, help="write the JSON document to this file")
    return parser.parse_args(argv)


def _shape(args: argparse.Namespace) -> TrafficShape:
    base = asdict(QUICK if args.quick else FULL)
    return TrafficShape(**base | ({"sessions": args.sessions} if args.sessions else {}))


def measure_arms(
    bench: Experiment, arms: Sequence[str], rounds: int, groups: int, without: str = DISK
) -> tuple[list[ArmRun], NoReuse | None]:
    """All rounds, the arms in the opposite order every other time; then traffic without reuse on the tiers of
    `without`."""
    runs = []
    for number in range(rounds):
        for name in arms if number % 2 == 0 else list(reversed(arms)):
            runs += play_arm(bench, ARMS[name], number)
    return runs, no_reuse(bench, groups, without) if groups else None


def main(argv: Sequence[str] | None = None) -> int:
    """Measure, print the tables and a line per requirement; returns the exit code."""
    args = _arguments(argv)
    if (load := os.getloadavg()[0]) > QUIET_LOAD:
        note(f"load average {load:.1f}: other work is running here, so these figures say little")
    shape = _shape(args)
    rounds = args.rounds or (1 if args.quick else 3)
    groups = args.groups if args.groups is not None else (1 if args.quick else 20)
    with tempfile.TemporaryDirectory(dir=args.scratch) as scratch:
        path = args.engine or build_engine(fetch_model("gemma3-270m"), Path(scratch) / "engine").path
        engine = open_engine(path)
        manifest, tokenizer = engine.manifest, Tokenizer.from_files(engine.read_present(FILES), engine.path)
        assert tokenizer.bos_id is not None
        text = read_tokens(tokenizer, None, max(50_000, text_tokens(shape, shape.turns + 1)))
        itemsize = ITEM_BYTES[manifest.kv_dtype]
        sizes = choose_sizes(shape, manifest.spec, manifest.page_tokens, itemsize)
        bench = Experiment(path, shape, sizes, text, tokenizer.bos_id, Path(scratch), args.threads, args.write_policy)
        print(
            f"{shape.sessions} sessions, {shape.turns} turns, {shape.length(shape.turns)} tokens each at the end: "
            f"{_mib(sizes.working_set)} of KV. Device pool {_mib(sizes.device)}, host {_mib(sizes.host)}, "
            f"disk {_mib(sizes.disk)}; the unlimited device pool is {_mib(sizes.unlimited)}."
        )
        runs, without = measure_arms(bench, args.arms, rounds, groups, ARMS[args.without_reuse])
    results = arm_results(runs)
    print(markdown(results, without))
    found = requirements(results, compare_answers(runs), without, judge_speed=not args.quick)
    report = make_report(
        "kv",
        target="in process",
        model={"model_id": manifest.model_id, "dtype": manifest.dtype, "kv_dtype": manifest.kv_dtype},
        parameters={"shape": asdict(shape), "sizes": asdict(sizes), "rounds": rounds, "threads": args.threads}
        | {"write_policy": args.write_policy},
        rates=None,
        results=as_json(results, without),
    )
    if args.output:
        document = report | {"requirements": requirement_json(found)}
        args.output.write_text(json.dumps(document, indent=2) + "\n")
    for requirement in found:
        print(requirement.line())
    return 1 if any(requirement.held is False for requirement in found) else 0


def _mib(count: int) -> str:
    return f"{count / 2**20:.1f} MiB"


if __name__ == "__main__":
    sys.exit(main())
