"""One command for the GPU goals: builds, checks, sweeps, and prints every figure beside its bound and beside vLLM's.

    make bench-gpu [VLLM_SITE=DIR VBENCH=SCRIPT] [ARGS="--only fp8 --budget-s 300"]
    python -m benchmarks.gpu.run [options]
    python -m benchmarks.gpu.run report FILE.json             table and plot again, without a GPU
    python -m benchmarks.gpu.run five FILE.json [KV.json]     the five rows of the README
    python -m benchmarks.gpu.run prebuild DIR --target sm90   engines for --engines DIR, without a GPU

Stages run in the order given: bounds (copies, sums, matrix products), check (small models against the CPU; a failure
ends the run), ours (engines behind the serving loop), startup (`wicore serve` until it serves), vllm; only if asked for
memory (of a GPU when each engine has answered a prompt of 8K). The document
(fields: `benchmarks/gpu/report.py`) is written after every step of a stage; table (.md) and plot (.svg) lie beside it.
What does not fit into --budget-s or onto the GPU is skipped, and the table says so. Exit code 1: something of ours
failed; 2: no GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from functools import partial
from math import inf
from pathlib import Path

from benchmarks.common import BEGUN, installed, say
from benchmarks.gpu import cases
from benchmarks.gpu.cases import CONFIGS, EXPECTED, PEER_ORDER, EngineConfig, Rates
from benchmarks.gpu.five import five_rows
from benchmarks.gpu.machine import clocks, describe, gpu_versions, measure_gpu_rates, rates_json
from benchmarks.gpu.report import (
    Document,
    decode_ms,
    drop_empty_columns,
    load_document,
    markdown,
    new_document,
    save,
    svg,
)
from wicore_trt.bench.report import describe_machine

STAGES = ("bounds", "check", "ours", "startup", "vllm", "memory")
MEMORY_TOKENS = 8192
MEMORY_SETTINGS = {"kv__device_bytes": 2 << 30, "scheduler__max_batch_tokens": 2048}
"""As the recipe for cards of 24 GB has them, but KV pages in 16 bits of one sequence."""
FREE_SHARE, FREE_WAIT_S = 0.9, 20.0
PATIENCE = 1.6
"""A peer may take so many times what it is expected to take."""


class CheckFailed(Exception):
    """The kernels are wrong, so their speed says nothing."""


class GpuRun:
    """One run over one GPU; fills `document` and saves it after every step."""

    def __init__(self, args: argparse.Namespace, document: Document, scratch: Path) -> None:
        from benchmarks.gpu.engines import Engines

        self.args, self.document = args, document
        self.configs = [config for name, config in CONFIGS.items() if name in args.only]
        self._engines = Engines(document["gpu"]["target"], scratch, args.engines, say)
        self._logs = args.output.parent / f"{args.output.stem}-logs"

    @property
    def rates(self) -> Rates:
        """Of this run, else what to expect."""
        bounds = self.document["bounds"]
        return EXPECTED if bounds is None else Rates(**bounds)

    def left_s(self) -> float:
        """Seconds until the budget is spent."""
        return float(self.args.budget_s - (time.monotonic() - BEGUN))

    def run(self) -> None:
        """All stages. Raises CheckFailed."""
        stages: dict[str, Callable[[], object]] = {
            "bounds": lambda: self._step("bounds", "*", cases.BOUNDS_S, self._bounds),
            "check": self._checked,
            "ours": self._all_ours,
            "startup": self._startup,
            "vllm": self._all_peers,
            "memory": self._all_memory,
        }
        self._read_clocks("before")
        for name in self.args.stages:
            say(f"stage {name}")
            stages[name]()
        self._read_clocks("after")

    def _step(self, stage: str, item: str, needs_s: float, work: Callable[[], None]) -> bool:
        """Do `work` if it fits into the time; whatever happens, the document says so. True when it was done."""
        if needs_s > self.left_s():
            self._absent(stage, item, f"{self.left_s():.0f} s are left and about {needs_s:.0f} s are needed", False)
            return False
        try:
            work()
        except Exception as error:
            say(traceback.format_exc())
            self._absent(stage, item, f"{type(error).__name__}: {error}"[:400], True)
            return False
        self._save()
        return True

    def _absent(self, stage: str, item: str, reason: str, failed: bool) -> None:
        say(f"{stage} {item}: {reason}")
        self.document["absent"].append({"stage": stage, "item": item, "reason": reason, "failed": failed})
        self._save()

    def _save(self) -> None:
        save(self.document, self.args.output)

    def _read_clocks(self, when: str) -> None:
        self.document["clocks"].append(clocks(when, time.monotonic() - BEGUN))
        self._save()

    def _bounds(self) -> None:
        from benchmarks.gpu.ours import free_device_memory

        self.document["bounds"] = rates_json(measure_gpu_rates())
        free_device_memory()
        say(f"rates {self.document['bounds']}")

    def _checked(self) -> None:
        if self._step("check", "*", cases.CHECK_S, self._check) and not self.document["check"]["ok"]:
            raise CheckFailed("; ".join(self.document["check"]["problems"]))

    def _check(self) -> None:
        from benchmarks.gpu.ours import free_device_memory
        from benchmarks.gpu.step_check import CASES, check_step

        problems: list[str] = []
        begun = time.monotonic()
        for case in CASES:
            try:
                problems += check_step(case, say, self._engines.check_table)
            except Exception as error:
                problems.append(f"{case.name}: {error!r}")
                say(traceback.format_exc())
        free_device_memory()
        record = {"ok": not problems, "cases": len(CASES), "problems": problems, "seconds": time.monotonic() - begun}
        self.document["check"] = record
        say(f"check: {problems or 'ok'}")

    def _engine(self, config: EngineConfig) -> Path:
        path, record = self._engines.engine(config)
        if record is not None:
            self.document["builds"][config.name] = record
        return path

    def _case_s(self, config: EngineConfig, batch: int) -> float:
        """Expected seconds of a figure."""
        return cases.case_estimate_s(config, batch, self.args.repeats, self.rates, self.args.case_s)

    def _batches(self, stage: str, config: EngineConfig) -> list[int]:
        """Batches to measure, without those that the GPU has no memory for."""
        wanted = [b for b in config.batches if not self.args.batches or b in self.args.batches]
        if config.ranks > self.document["gpu"].get("count", 1):
            self._absent(stage, config.name, f"it takes {config.ranks} GPUs", False)
            return []
        have = self.document["gpu"].get("memory_bytes", inf)
        for batch in wanted:
            if (need := cases.memory_bytes(config, batch)) > have:
                reason = f"it takes {need / 2**30:.0f} GiB and the GPU has {have / 2**30:.0f}"
                self._absent(stage, f"{config.name} batch {batch}", reason, False)
        return [batch for batch in wanted if cases.memory_bytes(config, batch) <= have]

    def _fitting(self, config: EngineConfig, batches: Sequence[int], before_s: float) -> int:
        args = self.args
        return cases.fitting(config, batches, before_s, args.repeats, self.rates, self.left_s(), args.case_s)

    def _ready_s(self, config: EngineConfig) -> float:
        """Expected seconds until an engine of `config` is loaded."""
        return cases.LOAD_S[config.model] + (0.0 if self._engines.has(config) else cases.BUILD_S[config.model])

    def _all_ours(self) -> None:
        for config in self.configs:
            self._ours(config)

    def _ours(self, config: EngineConfig) -> None:
        import torch

        from benchmarks.gpu.ours import BatchRunner, free_device_memory, settings_for

        batches = self._batches("ours", config)
        repeats, served = self.args.repeats, list[BatchRunner]()
        before = self._ready_s(config)
        count = self._fitting(config, batches, before)
        most = max(batches[: max(count, 1)], default=0)

        def open_engine() -> None:
            free_device_memory()
            served.append(BatchRunner.load(settings_for(config, self._engine(config), most)))
            free, total = torch.cuda.mem_get_info()
            say(f"{config.name} loaded in {served[0].load_s:.1f} s; {(total - free) / 2**30:.2f} GiB in use")

        def measure(batch: int) -> None:
            row = served[0].measure(config, batch, repeats, self.args.case_s, say)
            self.document["ours"].append(row)
            say(f"{config.name} batch {batch}: {decode_ms(row) or 0:.2f} ms/token, graph {row['graph_ms']} ms")

        needed = before + sum(self._case_s(config, b) for b in batches[:1])
        if not batches or not self._step("ours", config.name, needed, open_engine):
            return
        try:
            for batch in batches:
                needed = self._case_s(config, batch)
                if batch > most:
                    self._absent("ours", f"{config.name} batch {batch}", "it did not fit into the time", False)
                    continue
                self._step("ours", f"{config.name} batch {batch}", needed, partial(measure, batch))
        finally:
            served.pop().close()
        self._read_clocks(f"after {config.name}")

    def _all_memory(self) -> None:
        import torch

        from benchmarks.gpu.ours import BatchRunner, free_device_memory, settings_for

        def measure(config: EngineConfig) -> None:
            free_device_memory()
            runner = BatchRunner.load(settings_for(config, self._engine(config), 1, MEMORY_TOKENS, **MEMORY_SETTINGS))
            try:
                runner.run(1, MEMORY_TOKENS - cases.OUTPUT, cases.OUTPUT)
                free, total = torch.cuda.mem_get_info()
            finally:
                runner.close()
            self.document.setdefault("memory", {})[config.name] = found = (total - free) / 2**30
            say(f"{config.name}, {MEMORY_TOKENS} tokens of context: {found:.2f} GiB in use")

        for config in self.configs:
            if self._batches("memory", config):
                self._step("memory", config.name, self._ready_s(config), partial(measure, config))

    def _startup(self) -> None:
        from benchmarks.gpu.startup import command, measure_startup

        large = [config for config in self.configs if config.model == "gemma3-27b"]
        ready = [config for config in large if self._engines.has(config)]
        if not large:
            return
        config = (ready or large)[0]

        def work() -> None:
            engine = self._engine(config)
            self._wait_free()
            self._logs.mkdir(parents=True, exist_ok=True)
            log, timeout = self._logs / "serve.log", max(min(3 * cases.STARTUP_S, self.left_s()), 1.0)
            record = measure_startup(command(engine), config.spec.vocab_size, log, timeout)
            self.document["startup"] = {"config": config.name, **record}
            say(f"start-up {self.document['startup']}")

        self._step("startup", "startup", self._ready_s(config) - cases.LOAD_S[config.model] + cases.STARTUP_S, work)

    def _all_peers(self) -> None:
        for name in PEER_ORDER:
            if CONFIGS[name] in self.configs:
                self._peer(CONFIGS[name])

    def _peer(self, config: EngineConfig) -> None:
        from benchmarks.gpu.peer import run_peer

        site, script = self.args.vllm_site, self.args.vbench
        if site is None or script is None:
            return
        wanted = self._batches("vllm", config)
        start = cases.PEER_START_S[config.name]
        count = self._fitting(config, wanted, start)
        for batch in wanted[count:]:
            self._absent("vllm", f"{config.name} batch {batch}", f"{self.left_s():.0f} s are left", False)
        batches = wanted[:count]
        if not batches:
            return
        needed = start + sum(self._case_s(config, b) for b in batches)

        def work() -> None:
            self._wait_free()
            self._logs.mkdir(parents=True, exist_ok=True)
            done = run_peer(config, batches, site, script, self._logs, min(PATIENCE * needed, self.left_s()))
            self.document["peer"][config.name] = done.record
            say(f"vLLM {config.name}: {done.record['rows']} in {done.record['seconds']:.0f} s")
            if done.problem:
                self._absent("vllm", config.name, done.problem, True)

        self._step("vllm", config.name, needed, work)

    def _wait_free(self) -> None:
        """Wait for memory that an earlier process may still be giving back."""
        import torch

        from benchmarks.gpu.ours import free_device_memory

        free_device_memory()
        deadline = time.monotonic() + FREE_WAIT_S
        while time.monotonic() < deadline:
            free, total = torch.cuda.mem_get_info()
            if free > FREE_SHARE * total:
                return
            time.sleep(0.2)
        say(f"only {free / 1e9:.1f} GB of the GPU are free")


def render(document: Document, path: Path) -> str:
    """Write table and plot beside `path`; returns the table."""
    table = markdown(document)
    path.with_suffix(".md").write_text(drop_empty_columns(table) + "\n", encoding="utf-8")
    path.with_suffix(".svg").write_text(svg(document), encoding="utf-8")
    return table


def exit_code(document: Document) -> int:
    """1 when a check or a measurement of ours failed; the peer's failures are only told."""
    wrong = document["check"] is not None and not document["check"]["ok"]
    return int(wrong or any(e["failed"] and e["stage"] != "vllm" for e in document["absent"]))


def _names(known: Sequence[str]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        names = [name.strip() for name in text.split(",") if name.strip()]
        if unknown := [name for name in names if name not in known]:
            raise argparse.ArgumentTypeError(f"{unknown[0]!r} is none of {', '.join(known)}")
        return names

    return parse


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",") if number]


def _path(text: str) -> Path | None:
    return Path(text) if text else None


def arguments(argv: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.gpu.run", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=_names(tuple(CONFIGS)), default=list(CONFIGS), help=f"of {','.join(CONFIGS)}")
    parser.add_argument("--batches", type=_numbers, default=[], help="only these batch sizes")
    parser.add_argument(
        "--stages", type=_names(STAGES), default=list(STAGES[:-1]), help=f"of {','.join(STAGES)}, in order"
    )
    parser.add_argument("--budget-s", type=float, default=3600.0, help="seconds for all of it, from the start")
    parser.add_argument("--repeats", type=int, default=3, help="pairs of runs per figure, at least; medians count")
    parser.add_argument(
        "--case-s", type=float, default=inf, help="no new pair of runs behind so many seconds of a figure"
    )
    parser.add_argument("--engines", type=Path, help="engines made by `prebuild_command`; others are built now")
    parser.add_argument("--vllm-site", type=_path, help="directory with vLLM and what it needs, for PYTHONPATH")
    parser.add_argument("--vbench", type=_path, help="script that measures vLLM; see benchmarks/gpu/peer.py")
    parser.add_argument("--output", type=Path, default=Path("build/bench-gpu.json"))
    args = parser.parse_args(argv)
    if (args.vllm_site is None) != (args.vbench is None):
        parser.error("--vllm-site and --vbench go together")
    return args


def measure_command(argv: Sequence[str]) -> int:
    """Run the stages; returns the exit code."""
    import torch

    args = arguments(argv)
    if not torch.cuda.is_available():
        print("There is no GPU here that PyTorch can use.", file=sys.stderr)
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    document = new_document(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        arguments={name: str(value) for name, value in vars(args).items()},
        describe_machine=describe_machine(),
        versions=installed() | gpu_versions(),
        gpu=describe(),
    )
    if args.vllm_site is None:
        document["absent"].append({"stage": "vllm", "item": "*", "reason": "not measured", "failed": False})
    try:
        with tempfile.TemporaryDirectory() as scratch:
            GpuRun(args, document, Path(scratch)).run()
    except CheckFailed as error:
        say(f"the check failed, so nothing is measured: {error}")
    finally:
        save(document, args.output)
        print(render(document, args.output), flush=True)
    return exit_code(document)


def report_command(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run report")
    parser.add_argument("document", type=Path)
    path = parser.parse_args(argv).document
    try:
        print(render(load_document(path), path))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def five_command(argv: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run five")
    parser.add_argument("document", type=Path)
    parser.add_argument("conversations", type=Path, nargs="?", help="of `benchmarks.kv.on_gpu` on the same GPU")
    args = parser.parse_args(argv)
    try:
        kv = json.loads(args.conversations.read_text(encoding="utf-8")) if args.conversations else None
        print(five_rows(load_document(args.document), kv))
    except (OSError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def prebuild_command(argv: Sequence[str]) -> int:
    from benchmarks.gpu import engines as gpu_engines

    parser = argparse.ArgumentParser(prog="python -m benchmarks.gpu.run prebuild")
    parser.add_argument("directory", type=Path)
    parser.add_argument("--target", required=True, help="such as sm90")
    parser.add_argument("--only", type=_names(tuple(CONFIGS)), default=list(CONFIGS))
    args = parser.parse_args(argv)
    gpu_engines.prebuild([CONFIGS[name] for name in args.only], args.directory, args.target, say)
    return 0


COMMANDS = {"report": report_command, "five": five_command, "prebuild": prebuild_command}


def main(argv: Sequence[str] | None = None) -> int:
    argv = sys.argv[1:] if argv is None else argv
    if argv and argv[0] in COMMANDS:
        return COMMANDS[argv[0]](argv[1:])
    return measure_command(argv)


if __name__ == "__main__":
    os.environ.setdefault("PYTHONUNBUFFERED", "1")
    sys.exit(main())
