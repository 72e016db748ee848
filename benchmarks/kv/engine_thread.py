"""Measure the engine's thread on a prompt whose prefix is computed, on the device or in host memory.

    python -m benchmarks.kv.engine_thread [--tokens 8192,32768,131072] [--repeat 7] [--profile device]

An engine with 27B's page counts over a device that takes 20 us a token and copies pages at once; pages are small, so
that only the books are measured. Each prompt has 64 new tokens behind the prefix and asks for one. Prints milliseconds
of CPU time of the thread (median), and microseconds a global page. Needs no device.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from benchmarks.kv.device_capacity import LONGEST, PAGE_TOKENS, Blank
from wicore_trt.collector import collect_rarely
from wicore_trt.config import KVSettings
from wicore_trt.core.assemble_kv import make_cache
from wicore_trt.core.engine import EngineCore
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.batch import StepBatch, StepResult
from wicore_trt.runtime.executor import CameIn, Done, KVLayout
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.types import GenerateRequest, SamplingParams

TOKEN_S = 20e-6
SLOT_BYTES = 4096
CASES = ("computed", "device", "host")


class Device(Blank):
    """Takes time for tokens; pages arrive at once."""

    checks = True
    coded_bytes: Mapping[str, int] = {}

    def execute(self, batch: StepBatch) -> StepResult:
        time.sleep(TOKEN_S * batch.num_tokens)
        return super().execute(batch)

    def pin(self, memory: memoryview) -> bool:
        return True

    def flush(self) -> None:
        pass

    def digest(self, parts: Sequence[memoryview]) -> bytes:
        return bytes(16)

    def to_host(self, group: str, slot: int, parts: Sequence[memoryview], done: Done, *, settled: bool = False) -> None:
        done(bytes(16), 1e-6)

    def to_device(self, group: str, slots: Sequence[int], pages: Sequence[Sequence[memoryview]], done: CameIn) -> None:
        done([bytes(16)] * len(slots), 1e-6 * len(slots))


def make_core(tokens: int) -> EngineCore:
    """Room for two prompts on the device, for four in host memory."""
    pages = {GLOBAL: tokens // PAGE_TOKENS * 2 + 300, LOCAL: 1200}
    layout = KVLayout(PAGE_TOKENS, "bfloat16", pages, {GLOBAL: SLOT_BYTES, LOCAL: 5 * SLOT_BYTES})
    executor = Device(layout, 1024, 8192)
    settings = KVSettings(host_bytes=(4 * pages[GLOBAL] + 5 * pages[LOCAL]) * SLOT_BYTES)
    manager, loader = make_cache(settings, layout, 1024, engine="e", kernels="k", copier=executor)
    scheduler = Scheduler(manager, max_batch_tokens=8192, max_sequences=8, loader=loader)
    return EngineCore(executor, scheduler, eos_ids=(1,), max_context=LONGEST + 2048)  # type: ignore[arg-type]


def measure(tokens: int, repeat: int, profiled: str) -> dict[str, float]:
    """CPU seconds by case."""
    rng, core = random.Random(tokens), make_core(tokens)
    prompt = [rng.randrange(5, 200_000) for _ in range(tokens)]

    def ask(name: str) -> None:
        ids = (*prompt, *(rng.randrange(5, 200_000) for _ in range(64)))
        core.add(GenerateRequest(name, ids, SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)))
        while core.has_work:
            core.step()

    def timed(case: str, before: Callable[[], None]) -> float:
        found = []
        for i in range(repeat):
            before()
            profile = cProfile.Profile() if case == profiled and i == repeat - 1 else None
            hits = core.stats().cached_prompt_tokens
            begun = time.thread_time()
            if profile is not None:
                profile.enable()
            ask(f"{case}-{i}")
            if profile is not None:
                profile.disable()
                pstats.Stats(profile).sort_stats("tottime").print_stats(25)
            found.append(time.thread_time() - begun)
            hits = core.stats().cached_prompt_tokens - hits
            assert hits >= (0 if case == "computed" else 0.9 * tokens), f"{case}: {hits} tokens found"
            while core.do_housekeeping():  # until all that it made is in host memory
                pass
        return statistics.median(found)

    def forget_device() -> None:
        for pool in core.scheduler.manager.pools.values():
            for page in pool.list_pages():
                pool.drop_page(page.key)

    def forget_all() -> None:
        manager = core.scheduler.manager
        for _, page in list(manager.list_pages()):
            manager.drop_page(page.key, "cleared")

    seconds = {"computed": timed("computed", forget_all)}
    seconds["device"] = timed("device", lambda: None)
    seconds["host"] = timed("host", forget_device)
    core.close()
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", default=f"8192,32768,{LONGEST}")
    parser.add_argument("--repeat", type=int, default=7)
    parser.add_argument("--profile", choices=("", *CASES), default="", help="print where the time of a case goes")
    args = parser.parse_args()
    collect_rarely()  # as the engine's process does
    print("| prefix | " + " | ".join(f"{case}, ms (us a page)" for case in CASES) + " |\n|---" + "|---" * 3 + "|")
    for tokens in map(int, args.tokens.split(",")):
        seconds, pages = measure(tokens, args.repeat, args.profile), tokens / PAGE_TOKENS
        cells = (f"{seconds[case] * 1e3:.1f} ({seconds[case] / pages * 1e6:.1f})" for case in CASES)
        print(f"| {tokens:,} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()
