"""The five rows of the README, from a document of `benchmarks.gpu.run` and one of `benchmarks.kv.on_gpu`.

It must not know how anything is measured. Invariant: the caption names card, date, commit and native library of the
figures below it, and a figure that was not measured is told as such.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.gpu.cases import DECODE, FIGURES, OFFLINE
from benchmarks.gpu.report import NOT_MEASURED, cells_of, lines, ratio

FIVE = (("bf16", DECODE, 1), ("fp8", DECODE, 64), ("bf16", OFFLINE, 32), ("fp8", OFFLINE, 64))
CONVERSATIONS = "27B FP8 weights, 48 conversations of 8K tokens beyond the GPU's memory, turns/s"
REMARK = "Made-up weights (times hold, text means nothing); vLLM runs without its own KV offload."


def five_rows(document: Mapping[str, Any], kv: Mapping[str, Any] | None = None) -> str:
    """A caption and a Markdown table. The conversations are those of the best arm with a host or disk tier."""
    known, said = dict(zip(FIGURES, lines(document), strict=False)), document.get("versions", {})
    peers = sorted({entry["version"] for entry in document["peer"].values()})
    caption = (
        f"{document['gpu']['name']}, {document['date'][:10]}, commit {said.get('commit', 'unknown')}, native library "
        f"{said.get('native', 'unknown')}, torch {said.get('torch', 'unknown')}. {REMARK}"
    )
    found = [(line.title, line.ours, line.peer) for line in map(known.__getitem__, FIVE)]
    rows = [["", "WiCore-TRT", f"vLLM {', '.join(peers)}".strip(), "vLLM / ours"], ["---"] * 4]
    rows += [[title, _said(ours), _said(peer), ratio(peer, ours)] for title, ours, peer in found]
    ours, peer = _conversations(kv or {"sessions": [], "vllm": {}})
    rows.append([CONVERSATIONS, _said(ours), _said(peer), f"{ours / peer:.2f}x as many" if ours and peer else "-"])
    return "\n".join([caption, "", *map(cells_of, rows)])


def _conversations(kv: Mapping[str, Any]) -> tuple[float | None, float | None]:
    """Turns a second behind the first turn: of ours where it is best, and of the peer."""
    arms: dict[str, list[Mapping[str, Any]]] = {}
    for row in kv["sessions"]:
        if "host" in row["arm"]:
            arms.setdefault(row["arm"], []).append(row)
    best = max((rate for rows in arms.values() if (rate := _rate(rows))), default=None)
    return best, _rate(kv["vllm"].get("sessions", {}).get("rows", []))


def _rate(rows: Sequence[Mapping[str, Any]]) -> float | None:
    later = [row["turns_per_s"] for row in rows if row["turn"]]
    return sum(later) / len(later) if later else None


def _said(value: float | None) -> str:
    return NOT_MEASURED if value is None else f"{value:,.0f}" if value >= 1000 else f"{value:.1f}"
