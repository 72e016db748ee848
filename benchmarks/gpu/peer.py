"""vLLM beside us: its own script in a process of its own, one configuration at a time.

It must not know what the figures are compared with. Invariant: a figure is what the script wrote; what it did not
write, because it failed or ran out of time, is absent with the reason.

The script is called as `SCRIPT MODEL_DIR OUT.json QUANTIZATION|none KV_DTYPE BATCHES PROMPT_LENGTHS OUTPUT_TOKENS`;
directories `g27`, `g27w4` (4 bits, groups of 32) and `g270`, a config.json each, lie beside it. It writes a list of
JSON objects, again after every batch: first {startup_s}, then {B, input_len, prefill_s, tpot_ms}; `total_s` may say
how long all tokens took, `runs` of how many runs these are medians. TP in its environment is the number of GPUs to use.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import CONTEXT, OUTPUT, EngineConfig

MODEL_DIRS = {"gemma3-27b": "g27", "gemma3-270m": "g270"}
ENVIRONMENT = {
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "PYTHONUNBUFFERED": "1",
}
STOP_S = 5.0


@dataclass(frozen=True, slots=True)
class PeerRun:
    """Results of a run of the script; `problem` is empty when all batches were measured."""

    record: dict[str, Any]
    problem: str


def run_peer(
    config: EngineConfig, batches: Sequence[int], site: Path, script: Path, scratch: Path, timeout_s: float
) -> PeerRun:
    """Measure `batches` with the packages below `site`. Waits at most `timeout_s` seconds; ends all that it started."""
    assert config.peer is not None
    out, log = scratch / f"vllm-{config.name}.json", scratch / f"vllm-{config.name}.log"
    out.unlink(missing_ok=True)
    command = peer_command(config, batches, script, out)
    begun = time.monotonic()
    code = run_script(command, site, log, timeout_s, more={"TP": str(config.ranks)})
    record = parse_peer(out)
    record |= {"version": peer_version(site), "seconds": time.monotonic() - begun, "command": command[1:]}
    missing = [b for b in batches if b not in [row["batch"] for row in record["rows"]]]
    if not missing and code == 0:
        return PeerRun(record, "")
    return PeerRun(record, problem_of(code, log, timeout_s))


def run_script(
    command: Sequence[str], site: Path, log: Path, timeout_s: float, folder: Path | None = None,
    more: Mapping[str, str] | None = None,
) -> int | None:  # fmt: skip
    """Run with the packages below `site`, in `folder`, with `more` in the environment; its exit code, None when
    `timeout_s` seconds were not enough.
    Ends all that it started."""
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, cwd=folder, stdout=stream, stderr=subprocess.STDOUT, start_new_session=True,
            env={**peer_environment(site), **(more or {})},
        )  # fmt: skip
        try:
            return process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            end_group(process)


def problem_of(code: int | None, log: Path, timeout_s: float) -> str:
    """Why a script did not do all that it should."""
    return f"no answer within {timeout_s:.0f} s" if code is None else f"exit code {code}: {last_words(log)}"


def peer_command(config: EngineConfig, batches: Sequence[int], script: Path, out: Path) -> list[str]:
    assert config.peer is not None
    quantization, kv_dtype = config.peer
    model = script.resolve().parent / (MODEL_DIRS[config.model] + ("w4" if config.dtype == "q4_0" else ""))
    sizes = ",".join(map(str, batches))
    arguments = [str(script), str(model), str(out), quantization, kv_dtype, sizes, str(CONTEXT), str(OUTPUT)]
    return [sys.executable, *arguments]


def peer_environment(site: Path) -> dict[str, str]:
    """Ours without our own packages, so that both sides run what they brought."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WICORE_", "PYTHONPATH"))}
    return kept | ENVIRONMENT | {"PYTHONPATH": str(site)}


def peer_version(site: Path) -> str:
    found = sorted(path.name for path in site.glob("vllm-*.dist-info"))
    return found[0].removeprefix("vllm-").removesuffix(".dist-info") if found else "unknown"


def parse_peer(path: Path) -> dict[str, Any]:
    """`startup_s` and rows of a script's file; empty for a file that is missing or broken."""
    record: dict[str, Any] = {"startup_s": None, "rows": []}
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return record
    for entry in entries if isinstance(entries, list) else []:
        if not isinstance(entry, dict):
            continue
        if "startup_s" in entry:
            record["startup_s"] = float(entry["startup_s"])
        if entry.get("input_len") == CONTEXT and {"B", "prefill_s", "tpot_ms"} <= entry.keys():
            row = {"batch": int(entry["B"]), "prefill_s": float(entry["prefill_s"]), "runs": entry.get("runs")}
            record["rows"].append(row | {"tpot_ms": float(entry["tpot_ms"]), "total_s": entry.get("total_s")})
    return record


def last_words(log: Path, size: int = 300) -> str:
    """The end of a log: the last line that names an error, else the last line."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "no log"
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [line for line in lines if "Error" in line or "error:" in line]
    return (named or lines or ["an empty log"])[-1][-size:]


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End the process and what it started, which is a process group of its own."""
    for number, wait_s in ((signal.SIGTERM, STOP_S), (signal.SIGKILL, STOP_S)):
        try:
            os.killpg(process.pid, number)
        except ProcessLookupError:
            break
        try:
            process.wait(wait_s)
        except subprocess.TimeoutExpired:
            continue
        if number == signal.SIGTERM:
            time.sleep(0.2)  # children that outlive the first signal are ended by the second
    process.wait()
