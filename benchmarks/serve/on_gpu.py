"""A server under load on a GPU, vLLM beside it: requests that come when they come, a long prompt beside streams.

    python -m benchmarks.serve.on_gpu ENGINE [--rates 8,12] [--seconds 30] [--vllm-site DIR --peer-scripts DIR]

`load`: `wicore serve` as a process of its own with targets for the first token and for the time per token, and
`wicore bench serve` against its gRPC port: Poisson arrivals, prompts of 256 to 2,048 tokens and outputs of 64 to 256. A
request is good when its first token came within `--ttft-ms` and the others took at most `--tpot-ms` each; what the
server refuses is not good. `long`: streams decode, a prompt of `--long` tokens comes, and the gaps between their tokens
are told for before and during it. With --vllm-site and --peer-scripts the peer's script sends the same kind of load to
vLLM's engine in its own process, without a server. It must not know how an engine works. Invariant: every stream must
give the tokens that were asked for or an error with a status, or the run fails. Needs a GPU, or `--device cpu`.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import installed, say
from benchmarks.gpu.peer import peer_version, problem_of, run_script
from wicore_trt.bench.client import GrpcTarget
from wicore_trt.bench.workload import BenchRequest, PromptPart, WordList

TPOT_MARGIN = 0.95
"""Of the promised time per token, what the scheduler is told to keep."""
PROMPTS, OUTPUTS = "256,1024,1024,2048", "64,128,256"
STREAM_PROMPT, STREAM_TOKENS = 512, 1500
WARM, BEFORE = 20, 300
"""Tokens of each stream until gaps count, and of one that came with them before the long prompt comes."""
ANSWER = 8
READY_S = 90.0


@contextmanager
def server(given: argparse.Namespace, **settings: Any) -> Iterator[str]:
    """The gRPC address of a server of the engine with such settings, where it listens."""
    common = {"kv__device_bytes": given.kv_bytes, "kv__prefix_cache": "false", "scheduler__max_sequences": 64}
    common |= {"scheduler__max_context": max(4096, given.long + 4096 if given.long else 0)}
    made = {f"WICORE_{name.upper()}": str(value) for name, value in (common | settings).items() if value is not None}
    command = [sys.executable, "-m", "wicore_trt", "serve", str(given.engine), "--device", given.device]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen(
            [*command, "--grpc-port", "0", "--http-port", "none"],
            env=os.environ | made, stdout=subprocess.PIPE, stderr=log, text=True,
        )  # fmt: skip
        assert process.stdout is not None
        killer = threading.Timer(READY_S, process.kill)
        killer.start()
        try:
            if not (found := re.match(r"ready on (\S+)", process.stdout.readline())):
                log.seek(0)
                raise RuntimeError(f"the server did not start:\n{log.read()[-2000:]}")
            killer.cancel()
            yield found[1]
        finally:
            killer.cancel()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def load(given: argparse.Namespace, ttft_ms: float) -> list[dict[str, Any]]:
    """A row of `wicore bench serve` for each rate, where the server refuses what it expects later than `ttft_ms`."""
    targets = {"target_itl_ms": TPOT_MARGIN * given.tpot_ms, "target_ttft_ms": ttft_ms}
    with server(given, **{f"scheduler__{name}": value for name, value in targets.items()}) as address:
        command = [sys.executable, "-m", "wicore_trt", "bench", "serve", "--target", address, "--rate", given.rates]
        command += ["--duration", str(given.seconds), "--input-tokens", given.prompts, "--output-tokens", given.outputs]
        command += ["--slo", f"ttft={given.ttft_ms}ms,tpot={given.tpot_ms}ms", "--warmups", "16", "--json"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(f"wicore bench serve ended with {done.returncode}:\n{done.stderr[-2000:]}")
    return [
        {"who": f"wicore serve, target {ttft_ms:.0f} ms"} | row_of(result)
        for result in json.loads(done.stdout)["results"]
    ]


def row_of(result: dict[str, Any]) -> dict[str, Any]:
    """What the table shows of a result of `wicore bench serve`. Times in ms."""
    row = {"rate": result["rate"], "sent": result["planned"], "good": result["good_share"]}
    row |= {"refused": result["refused"], "failed": result["failed"]}
    row |= {"output_tok_per_s": result["output"]["value"]}
    for name in ("ttft", "tpot", "itl"):
        found = result[name] or {}
        row |= {f"{name}_p50": found.get("p50"), f"{name}_p99": found.get("p99")}
    refusal = result["refusal"] or {}
    return row | {"refusal_p50": refusal.get("p50"), "refusal_p99": refusal.get("p99")}


def peer_load(given: argparse.Namespace, scratch: Path) -> list[dict[str, Any]]:
    """Rows of the peer's script."""
    out, log = scratch / "goodput.json", scratch / "goodput.log"
    scripts = given.peer_scripts.resolve()
    command = [sys.executable, "goodput.py", "vllm", "g27", str(out), given.rates, str(given.seconds)]
    code = run_script(command, given.vllm_site, log, given.peer_s, scripts)
    found = json.loads(out.read_text(encoding="utf-8")) if out.exists() else []
    if code or not found:
        say(f"vLLM: {problem_of(code, log, given.peer_s)}")
    who = f"vLLM {peer_version(given.vllm_site)}, in one process"
    return [
        {"who": who, "rate": row["rate"], "sent": row["n"], "good": row["good"], "refused": 0, "failed": row["bad"]}
        | {"output_tok_per_s": row["tok_s"]}
        | {f"{name}_{part}": 1e3 * row[f"{name}_{part}"] for name in ("ttft", "tpot") for part in ("p50", "p99")}
        | {"longest_gap_p99": 1e3 * row["gap_p99"]}
        for row in found
    ]


async def long_beside(address: str, tokens: int, count: int) -> dict[str, Any]:
    """Gaps between tokens of `count` streams, in ms, before a prompt of so many tokens comes and until it has its
    first token."""
    target = await GrpcTarget.connect(address)
    vocabulary = WordList(target.info.vocab_size, seed=1)

    async def one(name: str, prompt: int, output: int) -> Any:
        record = await target.generate(BenchRequest(vocabulary.tokens(PromptPart(name, prompt)), output))
        if record.error:
            raise RuntimeError(f"{name}: {record.error}")
        return record

    try:
        await asyncio.gather(*(one(f"warm {n}", STREAM_PROMPT, WARM) for n in range(count)))
        await one("warm", tokens // 4, ANSWER)
        streams = [asyncio.ensure_future(one(f"stream {n}", STREAM_PROMPT, STREAM_TOKENS)) for n in range(count)]
        await one("pace", STREAM_PROMPT, BEFORE)
        record = await one("long", tokens, ANSWER)
        records = await asyncio.gather(*streams)
    finally:
        await target.close()
    begun, first = record.started, record.arrivals[0][0]
    times = [[at for at, _ in stream.arrivals] for stream in records]
    paced = max(row[WARM] for row in times)
    gaps = [pair for row in times for pair in itertools.pairwise(row)]
    parts = {"before": [b - a for a, b in gaps if paced < a and b < begun]}
    parts["during"] = [b - a for a, b in gaps if begun < b and a < first]
    row: dict[str, Any] = {"tokens": tokens, "streams": count, "first_token_s": first - begun}
    for name, part in parts.items():
        found = [1e3 * gap for gap in part]
        row |= {f"{name}_n": len(found), f"{name}_p50": statistics.median(found)}
        row |= {f"{name}_p99": statistics.quantiles(found, n=100)[-1], f"{name}_max": max(found)}
    return row | {"p99_ratio": row["during_p99"] / row["before_p99"]}


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(names) + " |", "|" + " --- |" * len(names)]
    for row in rows:
        cells = (f"{x:.3g}" if isinstance(x, float) else "" if x is None else str(x) for x in map(row.get, names))
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rates", default="8,12", help="requests a second; empty: no load")
    parser.add_argument("--seconds", type=float, default=30.0, help="in which the requests of a rate come")
    parser.add_argument("--prompts", default=PROMPTS)
    parser.add_argument("--outputs", default=OUTPUTS)
    parser.add_argument("--ttft-ms", type=float, default=450.0)
    parser.add_argument("--target-ttft-ms", help="scheduler.target_ttft_ms, with commas; default: as --ttft-ms")
    parser.add_argument("--tpot-ms", type=float, default=40.0)
    parser.add_argument("--kv-bytes", default="60GiB")
    parser.add_argument("--long", type=int, default=32768, help="tokens of the prompt beside streams; 0: none")
    parser.add_argument("--streams", type=int, default=16, help="that decode beside it")
    parser.add_argument("--long-itl-ms", help="scheduler.target_itl_ms for it, with commas; 0 is its default")
    parser.add_argument("--vllm-site", type=Path, help="packages of vLLM, with --peer-scripts")
    parser.add_argument("--peer-scripts", type=Path, help="folder with goodput.py and g27, a folder of a config.json")
    parser.add_argument("--peer-s", type=float, default=400.0, help="longest run of the peer")
    parser.add_argument("--output", type=Path, default=Path("build/bench-serve-gpu.json"))
    given = parser.parse_args()
    document: dict[str, Any] = {"versions": installed(), "load": [], "long": []}
    given.output.parent.mkdir(parents=True, exist_ok=True)

    def keep(name: str, rows: list[dict[str, Any]]) -> None:
        document[name] += rows
        given.output.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        for row in rows:
            say(f"{name} {row}")

    if given.long:
        for itl in (given.long_itl_ms or "0").split(","):
            with server(
                given, scheduler__target_itl_ms=itl if float(itl) else None, scheduler__max_queue_s=600
            ) as address:
                keep("long", [{"target_itl_ms": itl, **asyncio.run(long_beside(address, given.long, given.streams))}])
    if given.rates:
        first, *others = (float(ms) for ms in (given.target_ttft_ms or str(given.ttft_ms)).split(","))
        keep("load", load(given, first))
        if given.vllm_site and given.peer_scripts:
            with tempfile.TemporaryDirectory() as scratch:
                keep("load", peer_load(given, Path(scratch)))
        for ttft_ms in others:
            keep("load", load(given, ttft_ms))
    print(*(table(document[name]) for name in ("load", "long") if document[name]), sep="\n")


if __name__ == "__main__":
    main()
