"""Soak of an engine of several ranks: random load, cancels and preemption for minutes, every answer checked.

python -m benchmarks.gpu.ranks_soak ENGINE --minutes 8 --seed 1

The engine is batch-invariant, so that a prompt with a seed has one answer, in any company and from any tier: each
answer is compared with the first one. Ranks compare rows and tokens of every step; a bit that changes at the end proves
it. Prints a line every half minute, with the memory of all GPUs and processes. Fails when an answer differs or is lost,
memory or the number of open files grows, nothing was cancelled or preempted, or a process or its file in /dev/shm is
left behind.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import resource
import subprocess
import time
from collections import Counter
from pathlib import Path
from shutil import which
from typing import Any

import torch

from wicore_trt.config import load_settings
from wicore_trt.core.assemble import load_engine
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams

PROMPTS, SEEDS, LIVE = 48, 2, 48
"""Different prompts, seeds of each, and requests that live at once at most."""
GROWTH, FILES = 64 << 20, 8
"""Bytes that memory of a process or GPU, and number that open files may grow by after the first minute."""


class Soak:
    """Load on a core; `known` are the tokens of each prompt and seed."""

    def __init__(self, core: Any, vocab: int, longest: int, seed: int) -> None:
        self._core, self._rng, self.counts = core, random.Random(seed), Counter[str]()
        shared = [self._rng.randrange(vocab) for _ in range(longest // 2)]
        self._prompts = []
        for _ in range(PROMPTS):
            begin = shared[: self._rng.choice((0, 0, longest // 4, longest // 2))]
            own = [self._rng.randrange(vocab) for _ in range(self._rng.randrange(1, longest // 4))]
            self._prompts.append((*begin, *own))
        self._live: dict[str, tuple[int, int, list[int]]] = {}
        self._known: dict[tuple[int, int], tuple[int, ...]] = {}

    def add_request(self) -> None:
        prompt, seed = self._rng.randrange(PROMPTS), self._rng.randrange(SEEDS)
        params = SamplingParams(
            temperature=0.0 if prompt % 3 == 0 else 0.8, top_k=0 if prompt % 2 else 40, seed=seed, ignore_eos=True,
            max_tokens=8 + prompt % 5 * 24, repetition_penalty=1.1 if prompt % 7 == 0 else 1.0,
        )  # fmt: skip
        key = f"soak-{self.counts['begun']}"
        self.counts["begun"] += 1
        self._live[key] = prompt, seed, []
        self._core.add(GenerateRequest(key, self._prompts[prompt], params))

    def run_step(self) -> None:
        rng = self._rng
        if len(self._live) < LIVE and rng.random() < 0.3:
            for _ in range(rng.choice((1, 1, 2, 12))):
                self.add_request()
        if self._live and rng.random() < 0.02:
            key = rng.choice(list(self._live))
            self.take_outputs(self._core.abort(key))
            self._live.pop(key, None)
            self.counts["cancelled"] += 1
        self.take_outputs(self._core.step())

    def take_outputs(self, outputs: Any) -> None:
        for output in outputs:
            if output.request_key not in self._live or output.finish_reason is FinishReason.CANCELLED:
                continue
            prompt, seed, tokens = self._live[output.request_key]
            tokens += output.token_ids
            if output.finish_reason is None:
                continue
            assert output.finish_reason is FinishReason.LENGTH, output
            del self._live[output.request_key]
            self.counts["ended"] += 1
            right = self._known.setdefault((prompt, seed), tuple(tokens))
            assert right == tuple(tokens), f"prompt {prompt}, seed {seed}: {tokens} and before {right}"

    def finish(self) -> None:
        end = time.monotonic() + 60
        while self._live:
            assert time.monotonic() < end, f"lost: {sorted(self._live)}"
            self.take_outputs(self._core.step())

    def find_change(self) -> None:
        """Change a bit of rank 0's residual behind each step from now on: ranks have to notice."""
        ranked, end = self._core.executor, time.monotonic() + 60
        local, name = ranked._local, "_enqueue_step"  # noqa: SLF001
        ranked._group.exchange.sum_rows = lambda rows: rows  # noqa: SLF001 -- of ranks on CPUs
        if (enqueue := getattr(local, name, None)) is not None:

            def change(*given: Any) -> Any:
                found = enqueue(*given)
                local.model.residual.view(torch.int32)[0, 0] ^= 1
                return found

            setattr(local, name, change)
        try:
            while time.monotonic() < end:
                self.run_step()
        except RuntimeError as error:  # RankError, or that of copies of pages, which may notice it first
            assert "different rows" in str(error), error
            print(f"a changed bit ended the engine: {error}", flush=True)
            return
        raise AssertionError("a rank with another residual was not noticed")


def list_left(pids: list[int]) -> list[str]:
    """List processes that still run, and files in /dev/shm that are named after one."""
    shared = os.listdir("/dev/shm")
    return [f"/proc/{pid}" for pid in pids if Path(f"/proc/{pid}").exists()] + [
        name for name in shared if any(str(pid) in re.findall(r"\d+", name) for pid in pids)
    ]


def measure_memory(pids: list[int]) -> list[int]:
    """Measure bytes in use: of each GPU that this process may use, then of each process, without shared memory."""
    query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    query += [f"--id={gpus}"] if (gpus := os.environ.get("CUDA_VISIBLE_DEVICES")) else []
    said = subprocess.run(query, capture_output=True, text=True, check=True).stdout if which("nvidia-smi") else ""
    page = resource.getpagesize()
    statm = [[*map(int, Path(f"/proc/{pid}/statm").read_text().split())] for pid in pids]
    return [int(line) << 20 for line in said.split()] + [
        (resident - shared) * page for _, resident, shared, *_ in statm
    ]


def list_mappings(pids: list[int]) -> Counter[str]:
    """List bytes of memory that is a process's own, by process and mapping."""
    found, at = Counter[str](), ""
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps").read_text().splitlines():
            name, *rest = line.split()
            if not name.endswith(":"):
                at = f"{pid} {name} {' '.join(rest[4:])}"
            elif name == "Anonymous:":
                found[at] += int(rest[0]) << 10
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine")
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kv-bytes", default="4MiB")
    parser.add_argument("--context", type=int, default=1024)
    given = parser.parse_args()
    flags = {
        "engine": given.engine, "executor.batch_invariant": True, "executor.compare_ranks": True,
        "kv.device_bytes": given.kv_bytes, "kv.host_bytes": "64MiB", "scheduler.max_context": given.context,
        "scheduler.max_sequences": 32,
    }  # fmt: skip
    os.environ["CUDA_MODULE_LOADING"] = "EAGER"  # else a kernel's first use, at any time, loads up to 66 MiB of code
    loaded = load_engine(load_settings(overrides=flags))
    core: Any = loaded.core
    pids = [os.getpid(), *(process.pid for process in core.executor._group.processes)]  # noqa: SLF001
    soak = Soak(core, min(loaded.info.vocab_size, 256), given.context * 5 // 8, given.seed)
    begun, first, opened = time.monotonic(), None, 0
    told, mapped = begun, Counter[str]()
    try:
        while (now := time.monotonic()) < begun + 60 * given.minutes:
            soak.run_step()
            if now > told + 30:
                told, memory = now, measure_memory(pids)
                files = sum(len(os.listdir(f"/proc/{pid}/fd")) for pid in pids)
                if now > begun + 60:
                    first, opened = first or memory, opened or files
                    mapped = mapped or list_mappings(pids)
                    grown = [after - before for before, after in zip(first, memory, strict=True)]
                    assert max(grown) < GROWTH, (
                        f"memory grew: {first} {memory}, most {(list_mappings(pids) - mapped).most_common(12)}"
                    )
                    assert files <= opened + FILES, f"files are left open: {opened} {files}"
                stats = core.stats()
                print(
                    f"{now - begun:.0f} s: {dict(soak.counts)}, {stats.preemptions} preemptions, "
                    f"memory {[size >> 20 for size in memory]} MiB, {files} open files", flush=True,
                )  # fmt: skip
        soak.finish()
        stats = core.stats()
        print(f"seed {given.seed}: {dict(soak.counts)}, {stats.preemptions} preemptions", flush=True)
        assert soak.counts["ended"] + soak.counts["cancelled"] == soak.counts["begun"], "requests were lost"
        assert stats.preemptions and soak.counts["cancelled"], "nothing was preempted, or cancelled"
        soak.find_change()
    finally:
        core.close()
    left = list_left(pids[1:])
    assert not left, left
    print("all right", flush=True)


if __name__ == "__main__":
    main()
