"""vLLM beside us at 27B's shapes: its scripts, each in a process of its own, and the rows that they wrote.

A script is called as its first lines say (`SCRIPT vllm MODEL_DIR OUT.json ...`, `kvbench.py OUT.json`), in its own
folder, where `g27` (a config.json) lies. It must not know what the rows are compared with. Invariant: a row is what a
script wrote; one that failed or ran out of time leaves the rows it had, and the reason.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.gpu.peer import peer_version, problem_of, run_script

CASES = "32x4096,16x8192,8x32768,1x32768,1x130000"
RUNS: dict[str, Sequence[str]] = {
    "sessions": ("sessions.py", "vllm", "g27", "OUT", "POOL", "0"),
    "prefix": ("kvbench.py", "OUT"),
    "decode": ("longctx.py", "vllm", "g27", "OUT", "fp8_per_channel", "auto", CASES),
    "decode-fp8": ("longctx.py", "vllm", "g27", "OUT", "fp8_per_channel", "fp8", CASES),
}


def run_peer(
    name: str, site: Path, scripts: Path, scratch: Path, timeout_s: float, pool_gib: int = 80
) -> dict[str, Any]:
    """{version, rows, problem} of one of RUNS; its conversations have KV pages of `pool_gib` on the GPU. Waits at most
    `timeout_s`; ends all that it started."""
    out, log = scratch / f"{name}.json", scratch / f"{name}.log"
    words = {"OUT": str(out), "POOL": f"{pool_gib}GiB"}
    script, *arguments = (words.get(word, word) for word in RUNS[name])
    code = run_script([sys.executable, script, *arguments], site, log, timeout_s, scripts)
    try:
        found = json.loads(out.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        found = []
    rows = found["rows"] if isinstance(found, dict) else [row for row in found if "startup_s" not in row]
    return {
        "version": peer_version(site),
        "rows": rows,
        "problem": "" if code == 0 else problem_of(code, log, timeout_s),
    }
