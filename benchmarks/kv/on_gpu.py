"""The KV cache at 27B's shapes on a GPU: conversations, one prefix, decode at long contexts. `make bench-kv-gpu`.

    python -m benchmarks.kv.on_gpu [--only sessions,prefix,decode,masses,reuse-free] [--disk DIR] [--budget-s 600]

Weights are made up (FP8), so text means nothing and times hold. `sessions`: conversations that together outgrow the
device pool take turns, some at a time; every turn sends the whole history and some new tokens. `prefix`: time to first
token of one prefix with a new end, when it is computed, on the device, in host memory, and on disk for a new process's
engine. `decode`: milliseconds a step of a batch that decodes at long contexts, beside the bytes it must read over the
copy bandwidth of the same run. `masses`: the same with the policy `a2cr`, when attention is measured on no step, on one
in so many and on every step, in turns on one engine. `reuse-free`: what tiers cost when nothing is found
(`benchmarks.kv.reuse_free`). With --vllm-site and --peer-scripts vLLM's scripts run behind ours. Invariant: every
request must give the tokens that were asked for, or the run ends. Prints Markdown tables; what does not fit into the
budget or onto the GPU is skipped, and the table says so. Needs a GPU.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import json
import random
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.common import BEGUN, installed, say
from benchmarks.gpu.cases import CONFIGS, PAGE_TOKENS, WORK_BYTES
from benchmarks.gpu.engines import Engines
from benchmarks.gpu.machine import describe, measure_gpu_rates
from benchmarks.gpu.ours import free_device_memory
from benchmarks.kv import reuse_free
from benchmarks.kv.peer import RUNS, run_peer
from wicore_trt.arithmetic import div_ceil
from wicore_trt.collector import collect_rarely
from wicore_trt.config import resolve_settings
from wicore_trt.core import engine as core_engine
from wicore_trt.core.assemble import load_engine
from wicore_trt.core.engine import EngineCore
from wicore_trt.types import GenerateRequest, SamplingParams, TierStats

GIB = 1 << 30
SESSIONS, HISTORY, TURNS, AT_ONCE, NEW, OUT = 48, 8192, 3, 8, 256, 64
ARMS = {  # name: device, host, disk in GiB
    "device 80 GiB": (80, 0, 0),
    "device 16 GiB, host 56 GiB": (16, 56, 0),
    "device 16 GiB, host 16 GiB, disk 56 GiB": (16, 16, 56),
    "device 16 GiB, nothing cached": (16, 0, 0),
    "device 16 GiB, host 40 GiB": (16, 40, 0),
}
ORDERS = ("random", "round-robin", "zipf")
PREFIXES = (4096, 8192, 32768, 130_000)
DECODE = ((32, 4096), (16, 8192), (8, 32768), (1, 32768), (1, 130_000))
STEPS = 65
MEASURED = {"never": 1 << 62, "one in 32": 32, "every": 1}
"""By what a table says, steps from one that measures attention to the next."""
MASS_CASES, MASS_STEPS = ((32, 4096), (8, 32768), (1, 32768)), 321
PROMPT_TOKENS = range(10, 9999)
SETTLE_S, REST_S = 30.0, 0.5
SAMPLE_S = 0.01
SAMPLED = ("loads", "pages on their way up", "disk operations", "reads queued", "writes begun", "writes queued",
           "pages to save")  # fmt: skip
"""Of the tiers, in this order, while the disk reads."""
MEMORY_THREADS = "wicore-kv-memory"
POOL_GIB = 64
"""Of KV pages, for decode at long contexts; less where the GPU has no room for so many."""
Cases = Sequence[tuple[int, int]]
TABLES = ("sessions", "prefix", "decode", "masses", "reuse-free")


@dataclass
class Turned:
    """One round of all conversations. Times to first token in seconds; `found` is the share of prompt tokens."""

    arm: str
    order: str
    turn: int
    seconds: float
    turns_per_s: float
    ttft_p50: float
    ttft_p90: float
    found: float


class Engine:
    """A loaded engine and requests to it."""

    def __init__(self, path: Path, device_gib: float, at_once: int, longest: int, **flags: Any) -> None:
        begun = time.perf_counter()
        settings = {
            "engine": str(path),
            "executor.device": "cuda",
            "kv.device_bytes": int(device_gib * GIB),
            "scheduler.max_batch_tokens": 8192,
            "scheduler.max_sequences": at_once,
            "scheduler.max_context": min(div_ceil(longest, PAGE_TOKENS) * PAGE_TOKENS, 131072),
        }
        more = {name.replace("__", "."): value for name, value in flags.items()}
        self.core: EngineCore = load_engine(resolve_settings(None, settings | more, environ={}).settings).engine_core
        self.core.set_pace(awaited=False)  # as vLLM: steps as large as their tokens allow
        self.ready_s = time.perf_counter() - begun
        collect_rarely()  # as the server's engine process does
        self._ids = itertools.count()

    def add(self, tokens: Sequence[int], count: int) -> str:
        name = f"bench-{next(self._ids)}"
        params = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True)
        self.core.add(GenerateRequest(name, tuple(tokens), params))
        return name

    def step(self) -> Iterator[tuple[str, list[int], bool]]:
        """(request, its new tokens, whether it has ended) of a step. Raises RuntimeError for one that failed."""
        for output in self.core.step():
            if output.error:
                raise RuntimeError(str(output.error))
            yield output.request_key, list(output.token_ids), output.finish_reason is not None

    def first_token_s(self, tokens: Sequence[int]) -> tuple[float, int]:
        """Seconds until the first token of a prompt that runs alone, and how many of its tokens were found."""
        before, begun = self.core.stats().cached_prompt_tokens, time.perf_counter()
        self.add(tokens, 1)
        while self.core.has_work:
            for _ in self.step():
                pass
        return time.perf_counter() - begun, self.core.stats().cached_prompt_tokens - before

    def settle(self) -> None:
        """Let the host tier's memory come and copies to the tiers end, then rest: what is measured next has the GPU,
        the bus and the disk for itself."""
        end, rest = time.monotonic() + SETTLE_S, time.monotonic() + REST_S
        while time.monotonic() < min(rest, end):
            if self.core.do_housekeeping() or any(
                thread.name.startswith(MEMORY_THREADS) for thread in threading.enumerate()
            ):
                rest = time.monotonic() + REST_S
            time.sleep(0.002)

    def forget_device(self, *, host: bool = False) -> None:
        """Nothing is cached on the device any more, nor with `host` what the disk has in host memory. What was computed
        last must have been copied before (`settle`)."""
        manager = self.core.scheduler.manager
        assert not manager.copies.due, "pages wait for their copies"
        for pool in manager.pools.values():
            for page in pool.list_pages():
                pool.drop_page(page.key)
        if host and manager.tiers is not None:
            for copy in [copy for copy in manager.tiers.host.iterate_copies() if copy.ready and copy.saved]:
                manager.tiers.host.drop_copy(copy, "forgotten")

    def close(self) -> None:
        self.core.close()
        del self.core
        gc.unfreeze()  # set aside by `collect_rarely`, it would never be found to be garbage, with its host memory
        free_device_memory()


@contextmanager
def opened(*args: Any, **flags: Any) -> Iterator[Engine]:
    engine = Engine(*args, **flags)
    try:
        yield engine
    finally:
        engine.close()


def room_gib() -> float:
    """GiB of KV pages that the GPU holds beside 27B's weights in FP8 and WORK_BYTES."""
    return float((describe()["memory_bytes"] - CONFIGS["fp8"].cost().weight_bytes - WORK_BYTES) / GIB)


def turn_orders(order: str, rng: random.Random) -> Iterator[list[int]]:
    """Choose conversations that take their turn, round by round. "zipf": the n-th most popular with weight 1 / n."""
    every = list(range(SESSIONS))
    weights = [1 / (n + 1) for n in every]
    for turn in range(TURNS):
        if order == "zipf" and turn:
            yield rng.choices(every, weights, k=SESSIONS)
        else:
            yield rng.sample(every, SESSIONS) if order == "random" else list(every)


def one_round(engine: Engine, history: list[list[int]], order: list[int], rng: random.Random) -> tuple[float, ...]:
    """(seconds, TTFT p50, p90, share of prompt tokens found) of one turn of each conversation in `order`."""
    waiting, live, ttft, prompt = order[::-1], dict[str, int](), list[float](), 0
    asked: dict[str, float] = {}
    before, begun = engine.core.stats().cached_prompt_tokens, time.perf_counter()
    while waiting or live:
        while waiting and len(live) < AT_ONCE and waiting[-1] not in live.values():
            session = waiting.pop()
            history[session] += rng.choices(PROMPT_TOKENS, k=NEW)
            prompt += len(history[session])
            name = engine.add(history[session], OUT)
            live[name], asked[name] = session, time.perf_counter()
        for name, tokens, ended in engine.step():
            if tokens and name in asked:
                ttft.append(time.perf_counter() - asked.pop(name))
            history[live[name]] += tokens
            if ended:
                del live[name]
    seconds = time.perf_counter() - begun
    found = (engine.core.stats().cached_prompt_tokens - before) / prompt
    return seconds, statistics.median(ttft), statistics.quantiles(ttft, n=10)[-1], found


@contextmanager
def watched(engine: Engine) -> Iterator[dict[str, float]]:
    """Time a round by part: seconds of the engine's steps by kind, and samples of the tiers, every SAMPLE_S, while
    the disk reads. Of a step also what its thread took, waits for the device and the tiers apart: by the clock, and as
    CPU time. Where that is far less, the thread waited for the interpreter, the driver or a processor."""
    found, over, tiers = dict[str, float](), threading.Event(), engine.core.scheduler.manager.tiers
    ended, waits = list[float](), list[float]()
    samples, gaps = list[tuple[float, ...]](), {"load": list[float](), "decode": list[float]()}
    store = tiers.store if tiers is not None else None
    took = {kind: [0.0, 0.0] for kind in gaps}

    def count(sign: int) -> None:
        for i, now in enumerate((time.perf_counter(), time.thread_time())):
            took["load" if loading[0] else "decode"][i] += sign * now

    def timed_wait(wait: Any, *args: Any) -> Any:
        count(1)
        try:
            return wait(*args)
        finally:
            count(-1)

    def sample() -> None:
        at = time.perf_counter()
        while tiers is not None and store is not None and not over.wait(SAMPLE_S):
            since, at = at, time.perf_counter()
            pool, loads = store._pool, tiers.loads.loads  # noqa: SLF001 -- what nobody else needs
            up = sum(load.in_flight - load.reading for load in loads)
            counts = len(pool._urgent), pool._begun, len(pool._normal), len(tiers.down.to_save)  # noqa: SLF001
            if tiers.up.reading_bytes:
                samples.append((at - since, len(loads), up, len(pool.live), *counts))

    def timed_step() -> list[Any]:
        begun, loading[0] = time.perf_counter(), engine.core.scheduler.is_loading
        count(-1)
        outputs = step()
        count(1)
        gaps["load" if loading[0] else "decode"].append(time.perf_counter() - begun)
        return outputs

    def timed_upload(copies: Any, *args: Any) -> None:
        now = time.perf_counter()
        waits.extend(now - at for copy in copies if (at := came.pop(id(copy), None)) is not None)
        upload(copies, *args)

    def timed_report(way: Any, apply: Any, move: Any, begun: float, outcome: Any) -> None:
        if (copy := getattr(move, "copy", None)) is not None and hasattr(move, "asked"):
            came[id(copy)] = time.perf_counter()
            ended.append(came[id(copy)] - begun)
        report(way, apply, move, begun, outcome)

    came, step, loading, core = dict[int, float](), engine.core.step, [False], engine.core
    waits_of = [(core, "_wait_or_fail"), (core.executor, "collect")]
    core.step = timed_step  # type: ignore[method-assign]
    for owner, name in waits_of:
        setattr(owner, name, partial(timed_wait, getattr(owner, name)))
    patched: Any = nullcontext()
    if store is not None and tiers is not None:
        upload, report = tiers.up.upload_pages, tiers.movers.post_timed
        tiers.up.upload_pages = timed_upload  # type: ignore[assignment,method-assign]
        patched = mock.patch.object(type(tiers.movers), "post_timed", lambda _, *args: timed_report(*args))
    cpu = time.thread_time()
    read = tiers.movers.disk_traffic.read_bytes if tiers is not None else 0
    with patched:
        thread = threading.Thread(target=sample, daemon=True)
        thread.start()
        yield found
        over.set()
        thread.join()
    for owner, name in (*waits_of, (core, "step")):
        delattr(owner, name)
    if store is not None and tiers is not None:
        del tiers.up.upload_pages
        seconds = sum(sample[0] for sample in samples)
        found["disk reads, s"], found["GB/s"] = seconds, (tiers.movers.disk_traffic.read_bytes - read) / 1e9
        found["GB/s"] /= max(seconds, SAMPLE_S)
        for number, name in enumerate(SAMPLED, 1) if samples else ():
            found[name] = statistics.mean(sample[number] for sample in samples)
        for name, values in (("read asked to end, ms", ended), ("read ended to upload, ms", waits)):
            if values:
                found[name] = 1e3 * statistics.median(values)
    for name, values in gaps.items():
        found[f"steps, {name}"], found[f"s in them, {name}"] = len(values), sum(values)
        found[f"longest, {name}"] = max(values, default=0.0)
        found |= {f"ms of the thread, {name}": 1e3 * took[name][0] / max(1, len(values))}
        found |= {f"CPU ms, {name}": 1e3 * took[name][1] / max(1, len(values))}
    found["engine thread, CPU s"] = time.thread_time() - cpu


def sessions(path: Path, arm: str, order: str, disk: Path, **flags: Any) -> tuple[float, list[Turned], dict[str, Any]]:
    """(seconds until ready, rounds, decisions of the planner and what the tiers moved)."""
    device, host, on_disk = ARMS[arm]
    flags |= {"kv__host_bytes": host * GIB} if host else {}
    if arm.endswith("nothing cached"):
        flags["kv__prefix_cache"] = False
    if on_disk:
        flags |= {"kv__disk_path": str(disk), "kv__disk_bytes": on_disk * GIB}
    rng, rows = random.Random(3), []
    history = [rng.choices(PROMPT_TOKENS, k=HISTORY) for _ in range(SESSIONS)]
    longest = HISTORY + (TURNS * (NEW + OUT) if order != "zipf" else SESSIONS * (NEW + OUT)) + 64
    with opened(path, device, AT_ONCE, longest, **flags) as engine:
        for turn, chosen in enumerate(turn_orders(order, rng)):
            with watched(engine) as went:
                seconds, p50, p90, found = one_round(engine, history, chosen, rng)
            say(", ".join(f"{name} {value:.3g}" for name, value in went.items()))
            rows.append(Turned(arm, order, turn, seconds, SESSIONS / seconds, p50, p90, found))
            say(f"sessions {arm}, {order}, turn {turn}: {SESSIONS / seconds:.2f} turns/s, TTFT {p50:.3f}, {found:.2f}")
        kv = engine.core.stats().kv
        return engine.ready_s, rows, dict(kv.decisions) | {tier.tier: traffic(tier) for tier in kv.tiers}


def traffic(tier: TierStats) -> dict[str, Any]:
    """Return the bytes that a tier moved, and the rate while it moved."""
    moved = {"read": (tier.read_bytes, tier.read_seconds), "write": (tier.write_bytes, tier.write_seconds)}
    found = {f"{way}_gb": round(count / 1e9, 1) for way, (count, _) in moved.items()}
    found |= {f"{way}_gb_per_s": round(count / s / 1e9, 1) for way, (count, s) in moved.items() if s}
    found |= {"used_gb": round(tier.used_bytes / 1e9, 1), "raw_gb": round(tier.raw_bytes / 1e9, 1)}
    return found | {"evictions": dict(tier.evictions), "failures": dict(tier.failures)}


def prefix(path: Path, lengths: Sequence[int], disk: Path, flags: dict[str, Any]) -> list[dict[str, Any]]:
    """Seconds to the first token by length of the prefix and by where it is. 64 tokens behind it are new each time."""
    rng, longest = random.Random(7), max(lengths) + 128
    tiers = {"kv__host_bytes": 24 * GIB, "kv__disk_path": str(disk), "kv__disk_bytes": 30 * GIB, **flags}
    prompts = {n: rng.choices(PROMPT_TOKENS, k=n) for n in lengths}
    rows: dict[int, dict[str, Any]] = {n: {"tokens": n} for n in lengths}

    def asked(engine: Engine, n: int, where: str) -> None:
        seconds, found = engine.first_token_s(prompts[n] + rng.choices(PROMPT_TOKENS, k=64))
        rows[n].setdefault(where, []).append((round(seconds, 4), found))

    with opened(path, 24, 8, longest, **tiers) as engine:
        engine.first_token_s(rng.choices(PROMPT_TOKENS, k=min(2000, longest - 64)))
        engine.first_token_s(rng.choices(PROMPT_TOKENS, k=min(9000, longest - 64)))
        for n in lengths:
            engine.settle()
            asked(engine, n, "computed")
            for _ in range(3):
                engine.settle()
                asked(engine, n, "device")
            engine.settle()
            for _ in range(3):
                engine.forget_device()
                asked(engine, n, "host")
                engine.settle()
            say(f"prefix {rows[n]}")
        engine.settle()
    with opened(path, 24, 8, longest, **tiers) as engine:
        engine.first_token_s(rng.choices(PROMPT_TOKENS, k=min(2000, longest - 64)))
        for n in lengths:
            for _ in range(3):
                engine.settle()
                engine.forget_device(host=True)
                asked(engine, n, "disk")
            say(f"prefix {n} from disk: {rows[n]['disk']}")
    return list(rows.values())


def decode(path: Path, cases: Cases, kv: str, bytes_per_s: float, gib: int = POOL_GIB) -> list[dict[str, Any]]:
    """Milliseconds a step of `sequences` at `context`, and the bytes that a step must read over `bytes_per_s`."""
    config, rows = CONFIGS["fp8kv" if kv == "fp8" else "fp8"], []
    longest = max(n for _, n in cases) + 16 * STEPS
    with opened(path, gib, max(b for b, _ in cases), longest, kv__prefix_cache=False) as engine:
        engine.first_token_s(random.Random(1).choices(PROMPT_TOKENS, k=9000))
        for batch, context in cases:
            first, gaps = decode_gaps(engine, batch, context, STEPS)
            cost = config.cost()
            bound = (cost.weight_bytes + batch * cost.kv_read_bytes(context)) / bytes_per_s
            rows.append(
                {"kv": kv, "sequences": batch, "context": context, "prefill_s": round(first, 3)}
                | {
                    "step_ms": round(statistics.median(gaps) * 1e3, 2),
                    "bound_ms": round(bound * 1e3, 2),
                    "steps": len(gaps),
                }
            )
            say(f"decode {rows[-1]}")
    return rows


def decode_gaps(engine: Engine, batch: int, context: int, steps: int) -> tuple[float, list[float]]:
    """Seconds until all of `batch` sequences decode behind `context` tokens, and of each of about `steps` steps from
    then on. The same tokens each time."""
    rng, begun, first, ends = random.Random(batch * context), time.perf_counter(), 0.0, list[float]()
    count = steps + batch * div_ceil(context, 8192)
    have = {engine.add(rng.choices(PROMPT_TOKENS, k=context), count): 0 for _ in range(batch)}
    while engine.core.has_work:
        for name, tokens, _ in engine.step():
            have[name] += len(tokens)
        if min(have.values()):
            first = first or time.perf_counter() - begun
            if max(have.values()) < count:
                ends.append(time.perf_counter())
    return first, [b - a for a, b in itertools.pairwise(ends[2:])]


def masses(path: Path, cases: Cases, kv: str, steps: int, gib: int = POOL_GIB, **flags: Any) -> list[dict[str, Any]]:
    """Milliseconds a step by how often attention is measured: the mean, because most steps do not, and the median. The
    share is of the mean without. Two rounds of each, the second the other way around."""
    rows, kept = [], core_engine.ATTENTION_STEPS
    longest = max(n for _, n in cases) + 16 * steps
    given = {"kv__policy": "a2cr", **flags}
    with opened(path, gib, max(b for b, _ in cases), longest, **given) as engine:
        for batch, context in cases:
            decode_gaps(engine, batch, context, 8)  # computes the prompts, which the others find
            gaps: dict[str, list[float]] = {name: [] for name in MEASURED}
            for name in (*MEASURED, *reversed(MEASURED)):
                core_engine.ATTENTION_STEPS = MEASURED[name]
                gaps[name] += decode_gaps(engine, batch, context, steps)[1]
            plain = statistics.mean(gaps["never"])
            for name, found in gaps.items():
                mean = statistics.mean(found)
                rows.append(
                    {"kv": kv, "sequences": batch, "context": context, "measured": name, "steps": len(found)}
                    | {"mean_ms": round(mean * 1e3, 3), "median_ms": round(statistics.median(found) * 1e3, 3)}
                    | {"share": f"{mean / plain - 1:+.2%}"}
                )
                say(f"masses {rows[-1]}")
    core_engine.ATTENTION_STEPS = kept
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of rows that have the same keys."""
    if not rows:
        return ""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + " --- |" * len(rows[0])]
    for row in rows:
        cells = (f"{x:.3g}" if isinstance(x, float) else str(x) for x in row.values())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(TABLES), help=f"of {','.join(TABLES)}")
    parser.add_argument("--arms", default=",".join(str(n) for n in range(len(ARMS))), help=f"numbers of {list(ARMS)}")
    parser.add_argument("--orders", default="random", help=f"of {','.join(ORDERS)}")
    parser.add_argument("--prefixes", default=",".join(map(str, PREFIXES)))
    parser.add_argument("--kv-dtypes", default="auto,fp8", help="auto: BF16")
    parser.add_argument("--compression", default="auto", help="of the tiers: auto, none, lossless")
    parser.add_argument("--repeat", type=int, default=1, help="how often the rounds of reuse-free run")
    parser.add_argument("--engines", type=Path, help="made by `benchmarks.gpu.run prebuild`; others are built now")
    parser.add_argument("--disk", type=Path, help="a folder on the disk to measure; default: a temporary one")
    parser.add_argument("--vllm-site", type=Path, help="packages of vLLM, to measure it beside us with --peer-scripts")
    parser.add_argument("--peer-scripts", type=Path, help="folder with the scripts that `benchmarks.kv.peer` calls")
    parser.add_argument("--peer-runs", default=",".join(RUNS), help=f"of {','.join(RUNS)}")
    parser.add_argument("--budget-s", type=float, default=1800.0)
    parser.add_argument("--output", type=Path, default=Path("build/bench-kv-gpu.json"))
    args = parser.parse_args(argv)
    about, room = installed(), room_gib()
    rates = measure_gpu_rates()
    document: dict[str, Any] = {"machine": describe(), "versions": about, "bytes_per_s": rates.copy_bytes_per_s}
    document |= {name: [] for name in (*TABLES, "reuse-free, decode")} | {
        "ready_s": {},
        "decisions": {},
        "skipped": [],
        "vllm": {},
    }
    with tempfile.TemporaryDirectory() as scratch:
        engines = Engines(document["machine"]["target"], Path(scratch), args.engines, say)
        disk = args.disk or Path(scratch) / "kv"
        disk.mkdir(parents=True, exist_ok=True)

        def ready(what: str, gib: float = 0.0) -> bool:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            args.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
            left = args.budget_s - (time.monotonic() - BEGUN)
            if left > 0 and gib <= room:
                return True
            why = f"{gib:g} GiB of KV pages, and the GPU has room for {room:.0f}" if left > 0 else "no time is left"
            document["skipped"].append(f"{what}: {why}")
            return False

        flags = {"kv__compression": args.compression}
        for kv in args.kv_dtypes.split(","):
            path, _ = engines.engine(CONFIGS["fp8kv" if kv == "fp8" else "fp8"])
            if "prefix" in args.only and ready(f"prefix, KV {kv}"):
                lengths = [int(n) for n in args.prefixes.split(",")]
                with tempfile.TemporaryDirectory(dir=disk) as kept:
                    document["prefix"] += [{"kv": kv, **row} for row in prefix(path, lengths, Path(kept), flags)]
            if "decode" in args.only and ready(f"decode, KV {kv}"):
                document["decode"] += decode(path, DECODE, kv, rates.copy_bytes_per_s, min(POOL_GIB, int(room)))
            if "masses" in args.only and ready(f"masses, KV {kv}"):
                document["masses"] += masses(path, MASS_CASES, kv, MASS_STEPS, min(POOL_GIB, int(room)))
            if "reuse-free" in args.only and kv == "auto" and ready("reuse-free"):
                found = reuse_free.rounds(partial(opened, **flags), decode_gaps, path, args.repeat)
                document["reuse-free"], document["reuse-free, decode"] = found
            for number, order in itertools.product(args.arms.split(","), args.orders.split(",")):
                arm = list(ARMS)[int(number)]
                if "sessions" in args.only and kv == "auto" and ready(f"sessions {arm}, {order}", ARMS[arm][0]):
                    name = f"{arm}, {order}"
                    with tempfile.TemporaryDirectory(dir=disk) as kept:
                        seconds, rows, decisions = sessions(path, arm, order, Path(kept), **flags)
                    document["ready_s"][name], document["decisions"][name] = seconds, decisions
                    document["sessions"] += [asdict(row) for row in rows]
        for name in args.peer_runs.split(",") if args.vllm_site and args.peer_scripts else ():
            if ready(f"vLLM, {name}"):
                left = args.budget_s - (time.monotonic() - BEGUN)
                document["vllm"][name] = run_peer(
                    name, args.vllm_site, args.peer_scripts.resolve(), Path(scratch), left, min(80, int(room))
                )
                say(f"vLLM, {name}: {document['vllm'][name]}")
        ready("")
    for name, found in document["vllm"].items():
        print(f"vLLM {found['version']}, {name} {found['problem']}\n\n{table(found['rows'])}")
    print(*(table(document[name]) for name in (*TABLES, "reuse-free, decode")), sep="\n")
    print(f"ready, s: {document['ready_s']}\nskipped: {document['skipped'] or 'nothing'}\n{document['machine']}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
