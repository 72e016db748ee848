"""Runs the commands of a plan side by side on the GPUs of this machine, and keeps what they have said so far.

    python -m benchmarks.gpu.lanes PLAN.toml ... --out DIR [--limit 560] [--only NAME ...] [--dry-run]

Plans lie in benchmarks/gpu/plans. A plan is TOML: each `[[lane]]` has a `name`, a number of `gpus` and
`[[lane.command]]`s, one after the other: `run`, `limit_s`, and if need be `takes_s` (measured or guessed), `show` (a
pattern: lines for the summary; by default the last three), `env`, and `beside` (true: begins with the command before).
A lane begins when its GPUs are free, in the plan's order. `python` and `wicore` are those that run this. Words in
braces are replaced: {out}, {tmp} and {memory} by folders of the lane's own (the last in /dev/shm), {port} by the first
of 100 ports, {left_s} by what is left of the command's time, {target} by the GPUs' target, others by `[words]` of the
plan or --set KEY=VALUE; without its word a command is left out. DIR/NAME/N.log gets the output of command N, and
DIR/summary.txt the results, each at once. At its limit a command is ended with all that it started. Invariant: nothing
that a command starts outlives it. Exit code 1: commands failed, which the summary's last line names. --dry-run prints
commands and lets each parse its options; it needs no GPU.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import tomllib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.gpu.peer import ENVIRONMENT, end_group

MARK = "LANE_MARK"
"""In the environment of all that a command starts, so that it is found in sessions of its own, too."""
CACHES = ("XDG_CACHE_HOME", "TRITON_HOME", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR", "CUDA_CACHE_PATH",
          "VLLM_CACHE_ROOT")  # fmt: skip
MULTICAST_OFF = {name: value for name, value in ENVIRONMENT.items() if name.startswith(("NCCL", "TORCH", "NVSHMEM"))}
POLL_S, MARGIN_S, MOST_LINES, WIDTH, TAIL_BYTES = 0.1, 5.0, 40, 400, 1 << 20
STOP_AT_OPTIONS = """
import argparse, runpy, sys
parse = argparse.ArgumentParser.parse_args
argparse.ArgumentParser.parse_args = lambda *given: (parse(*given), sys.exit(0))
if sys.argv[1] == "wicore_trt":
    import typer.core
    typer.core.TyperCommand.invoke = lambda *given: sys.exit(0)
sys.argv[:] = sys.argv[1:]
runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
"""


@dataclass
class Command:
    run: str
    limit_s: float
    takes_s: float = 0.0
    show: str = ""
    env: dict[str, str] = field(default_factory=dict)
    beside: bool = False

    def find_words(self, known: dict[str, str]) -> tuple[list[str], list[str]]:
        """Return the words to run, and the names in braces that nobody gave."""
        missing = [name for name in re.findall(r"\{(\w+)\}", self.run) if name not in known]
        parts = shlex.split(self.run)
        words = [re.sub(r"\{(\w+)\}", lambda found: known.get(found[1], found[1]), part) for part in parts]
        first = {"python": [sys.executable], "wicore": [sys.executable, "-m", "wicore_trt"]}.get(words[0], words[:1])
        return [*first, *words[1:]], missing


@dataclass
class Lane:
    name: str
    gpus: int
    command: list[Command]


def ask_gpus(field_name: str) -> list[str]:
    smi = shutil.which("nvidia-smi")
    query = [str(smi), f"--query-gpu={field_name}", "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True, check=True).stdout.split() if smi else []


def end_marked(mark: str) -> int:
    """Kill whatever has this mark; returns how many that were."""
    killed, wanted = set[int](), f"{MARK}={mark}".encode()
    for _ in range(50):  # one may start another meanwhile
        found = set[int]()
        for path in Path("/proc").glob("[0-9]*/environ"):
            try:
                if wanted in path.read_bytes().split(b"\0"):
                    os.kill(pid := int(path.parent.name), signal.SIGKILL)
                    found.add(pid)
            except OSError:  # it is over, or another user's
                continue
        if not found:
            break
        killed |= found
        time.sleep(POLL_S)
    return len(killed)


def read_end(log: Path, show: str, *, failed: bool) -> list[str]:
    """Read what the summary says of a log: lines with `show`, and the last three without it or of what failed."""
    with log.open("rb") as stream:
        stream.seek(max(0, log.stat().st_size - TAIL_BYTES))
        lines = [line[:WIDTH] for line in stream.read().decode(errors="replace").splitlines() if line.strip()]
    shown = [line for line in lines if re.search(show, line)][-MOST_LINES:] if show else []
    return shown + (lines[-3:] if failed or not show else [])


class Lanes:
    """A run of lanes; `failed` names commands."""

    def __init__(self, lanes: list[Lane], gpus: list[str], out: Path, limit_s: float, words: dict[str, str]) -> None:
        self._lanes, self._gpus, self._free, self._out, self._words = lanes, gpus, gpus, out, words
        self._begun, self._end = time.monotonic(), time.monotonic() + limit_s
        self._home, self._mark = Path(tempfile.mkdtemp(prefix="lanes-")), f"{os.getpid()}-{time.time_ns()}"
        self._lock, self.stopped, self.failed = threading.Lock(), False, list[str]()

    def run(self) -> None:
        running, every = list[threading.Thread](), list(enumerate(self._lanes))
        waiting = [(number, lane) for number, lane in every if lane.gpus <= len(self._free)]
        never = [lane for lane in self._lanes if lane.gpus > len(self._free)]
        while waiting and time.monotonic() < self._end and not self.stopped:
            for number, lane in list(waiting):
                if lane.gpus <= len(self._free):
                    with self._lock:
                        given, self._free = self._free[: lane.gpus], self._free[lane.gpus :]
                    waiting.remove((number, lane))
                    running.append(threading.Thread(target=self._run_lane, args=(number, lane, given)))
                    running[-1].start()
            time.sleep(POLL_S)
        for lane in [*never, *(lane for _, lane in waiting)]:
            self._tell(lane.name, f"not begun; it takes {lane.gpus} GPUs", failed=True)
        for thread in running:
            thread.join()
        self._tell("all", f"over; failed: {', '.join(self.failed) or 'none'}")
        shutil.rmtree(self._home, ignore_errors=True)

    def _tell(self, name: str, what: str, lines: Sequence[str] = (), *, failed: bool = False) -> None:
        said = "\n    ".join([f"[{time.monotonic() - self._begun:5.0f} s] {name}: {what}", *lines])
        with self._lock, (self._out / "summary.txt").open("a", encoding="utf-8") as summary:
            self.failed += [name] * failed
            summary.write(f"{said}\n")
            print(said, flush=True)

    @contextmanager
    def _told(self, name: str, gpus: Sequence[str] = ()) -> Iterator[None]:
        """Tell of what is raised, and give GPUs back."""
        try:
            yield
        except Exception as error:
            self._tell(name, f"{type(error).__name__}: {error}", failed=True)
        with self._lock:
            self._free = [gpu for gpu in self._gpus if gpu in {*self._free, *gpus}]

    def _run_lane(self, place: int, lane: Lane, gpus: list[str]) -> None:
        with self._told(lane.name, gpus):
            self._run_commands(place, lane, gpus)

    def _run_commands(self, place: int, lane: Lane, gpus: list[str]) -> None:
        home, out, port = self._home / lane.name, self._out / lane.name, 20_000 + 100 * place
        memory = Path(self._words["memory"], f"{self._home.name}-{lane.name}")
        words = self._words | {"out": str(out), "tmp": str(home), "memory": str(memory), "port": str(port)}
        env = os.environ | MULTICAST_OFF | {name: str(home / "cache" / name.lower()) for name in CACHES}
        env |= {"CUDA_VISIBLE_DEVICES": ",".join(gpus), "TMPDIR": str(home), "PYTHONUNBUFFERED": "1"}
        env |= {"MASTER_PORT": str(port), "VLLM_PORT": str(port + 1)}
        threads = list[threading.Thread]()
        for folder in (home, out, memory):
            folder.mkdir(parents=True, exist_ok=True)
        for number, command in enumerate(lane.command, 1):
            while threads and not command.beside:
                threads.pop().join()
            mark, name = {MARK: f"{self._mark}/{lane.name}/{number}"}, f"{lane.name} {number}"
            given = (name, command, words, env | command.env | mark, out / f"{number}.log")
            threads.append(threading.Thread(target=self._run_command, args=given))
            threads[-1].start()
        for thread in threads:
            thread.join()
        for folder in (home, memory):
            shutil.rmtree(folder, ignore_errors=True)

    def _run_command(self, name: str, command: Command, words: dict[str, str], env: dict[str, str], log: Path) -> None:
        begun = time.monotonic()
        end = min(begun + command.limit_s, self._end)
        line, missing = command.find_words(words | {"left_s": f"{max(end - begun - MARGIN_S, 1):.0f}"})
        if missing:
            return self._tell(name, f"left out for want of --set {missing[0]}=...: {command.run}")
        if end <= begun or self.stopped:
            return self._tell(name, f"not begun: {command.run}", failed=True)
        with self._told(name), log.open("wb") as out:
            process = subprocess.Popen(
                line, env=env, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True
            )
            while process.poll() is None and time.monotonic() < end and not self.stopped:
                time.sleep(POLL_S)
            code = process.poll()
            end_group(process)
            left = end_marked(env[MARK])
            what = "ended at its limit" if code is None else f"exit code {code}"
            what += f" in {time.monotonic() - begun:.0f} s, {command.takes_s:.0f} expected"
            what += f", {left} left" * bool(left)
            lines = read_end(log, command.show, failed=code != 0)
            self._tell(name, f"{what}: {command.run}", lines, failed=code != 0)
        return None


def check_plan(lanes: list[Lane], words: dict[str, str], gpus: int) -> list[str]:
    """Print commands and let each parse its options; returns those that cannot."""
    wrong, free = list[str](), [0.0] * max(gpus, *(lane.gpus for lane in lanes))
    words = words | {"out": "/tmp", "tmp": "/tmp", "port": "20000", "left_s": "9"}
    for lane in lanes:
        free.sort()
        over = [max(free[: lane.gpus], default=0.0)] * 2  # all commands, and those that the next one may be beside
        for number, command in enumerate(lane.command, 1):
            over = [max(over), over[1]] if command.beside else [max(over), max(over)]
            over[0] = max(over[0], over[1] + command.takes_s)
            line, missing = command.find_words(words)
            print(f"{lane.name} {number}, {command.takes_s:.0f} of {command.limit_s:.0f} s: {shlex.join(line)}")
            print(f"    needs --set {missing[0]}=..." if missing else "", end="\n" * bool(missing), flush=True)
            is_pytest = line[1:3] == ["-m", "pytest"]
            test = [line[0], "-c", STOP_AT_OPTIONS, *line[2:]] if line[1:2] == ["-m"] else ["which", line[0]]
            test = [*line, "--collect-only"] if is_pytest else test
            done = subprocess.run(test, capture_output=True, text=True, env=os.environ | command.env)
            if done.returncode not in (0, 5 * is_pytest):  # 5: without a GPU a file has no tests
                wrong.append(f"{lane.name} {number}")
                print(f"    WRONG: exit code {done.returncode}: {(done.stdout + done.stderr)[-1000:]}", flush=True)
        free[: lane.gpus] = over[:1] * lane.gpus
    print(f"expected to take {max(free):.0f} s on {len(free)} GPUs; wrong: {', '.join(wrong) or 'none'}")
    return wrong


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plans", type=Path, nargs="+", help="lanes of several are named PLAN-NAME")
    parser.add_argument("--out", type=Path, default=Path("build/lanes"))
    parser.add_argument("--limit", type=float, default=560.0, metavar="SECONDS", help="for all of it")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="lanes to run")
    parser.add_argument("--set", nargs="+", default=[], metavar="KEY=VALUE", help="words for commands")
    parser.add_argument("--gpus", help="their numbers; default: CUDA_VISIBLE_DEVICES, else all")
    parser.add_argument("--dry-run", action="store_true")
    args = parser.parse_args(argv)
    lanes = list[Lane]()
    words = {"memory": "/dev/shm", "target": "sm" + "".join(ask_gpus("compute_cap")[:1] or ["9.0"]).replace(".", "")}
    for path in args.plans:
        plan, front = tomllib.loads(path.read_text(encoding="utf-8")), f"{path.stem}-" if args.plans[1:] else ""
        for one in plan["lane"]:
            lanes.append(Lane(front + one["name"], one["gpus"], [Command(**command) for command in one["command"]]))
        words |= plan.get("words", {})
    words |= dict(text.split("=", 1) for text in args.set)
    if unknown := set(args.only) - {lane.name for lane in lanes}:
        parser.error(f"no lane is named {', '.join(sorted(unknown))}: {', '.join(lane.name for lane in lanes)}")
    lanes = [lane for lane in lanes if not args.only or lane.name in args.only]
    named = args.gpus or os.environ.get("CUDA_VISIBLE_DEVICES")
    gpus = named.split(",") if named else ask_gpus("index")
    if args.dry_run:
        return int(bool(check_plan(lanes, words, len(gpus) or 4)))
    args.out.mkdir(parents=True, exist_ok=True)
    run = Lanes(lanes, gpus, args.out.resolve(), args.limit, words)
    for number in (signal.SIGTERM, signal.SIGINT):  # no lock is taken: the main thread may hold it
        signal.signal(number, lambda *_: setattr(run, "stopped", True))
    run.run()
    return int(bool(run.failed))


if __name__ == "__main__":
    sys.exit(main())
