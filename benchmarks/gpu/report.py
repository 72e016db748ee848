"""The document of `benchmarks.gpu.run`: written after every stage, and rendered as a table and a plot without a GPU.

It must not know how anything is measured. Invariants: a figure that was not measured in this run is absent with its
reason; the file on disk is always a whole document.

JSON (`SCHEMA` 1):
  kind, schema, date, arguments, machine and versions (as `bench.report` has them), gpu (name, target)
  clocks   [{when, at_s, NVIDIA_SMI_FIELD: text}]; read, never set
  bounds   {copy_bytes_per_s (read and written), read_bytes_per_s, bf16_flops, fp8_flops} or null
  check    {ok, cases, problems, seconds} or null
  builds   {configuration: {seconds, kernels, prebuilt}}
  ours     [{config, batch, context, output_tokens, prefill_s: [...], total_s: [...], decode_s: [...], graph_ms,
            graph_context, preemptions, load_s, kernels}]; prefill_s: from adding all prompts to the last first token,
            total_s: to the last of output_tokens tokens, one entry per run of its own; decode_s: of each of the latter
            the median step in which all decode. Documents before 2026-11-26 lack it, and what `versions` says of
            commit and native library
  peer     {configuration: {version, seconds, startup_s, command, rows: [{batch, prefill_s, tpot_ms, total_s, runs}]}}
  startup  {config, ready_s, first_answer_s, tokens, log} or null; seconds from the start of the process
  absent   [{stage, item, reason}]: what was skipped or failed; `failed` true for failures
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Any

from benchmarks.gpu.cases import (
    CONFIGS,
    CONTEXT,
    DECODE,
    FIGURES,
    GOALS,
    GOALS_GPU,
    OFFLINE,
    OUTPUT,
    PREFILL,
    START_GOALS,
    Rates,
    bound_s,
)

KIND = "wicore-bench-gpu"
SCHEMA = 1
NOT_MEASURED = "not measured"

Document = dict[str, Any]


def new_document(**known: Any) -> Document:
    """An empty document; `known` are its first values."""
    empty: Document = {"clocks": [], "bounds": None, "check": None, "builds": {}, "ours": [], "peer": {}}
    return {"kind": KIND, "schema": SCHEMA, **known, **empty, "startup": None, "absent": []}


def save(document: Mapping[str, Any], path: Path) -> None:
    """Replace `path` by the document, in one step."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    partial.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    os.replace(partial, path)


def load_document(path: Path) -> Document:
    """The document at `path`. Raises ValueError for a file that is none."""
    document = json.loads(path.read_text(encoding="utf-8"))
    if not isinstance(document, dict) or document.get("kind") != KIND or document.get("schema") != SCHEMA:
        raise ValueError(f"{path} is no document of kind {KIND!r} and schema {SCHEMA}")
    return document


@dataclass(frozen=True, slots=True)
class Line:
    """A row of the table; times in milliseconds, None where nothing was measured, for which the reasons say why."""

    title: str
    ours: float | None
    graph: float | None
    bound: float | None
    must: float | None
    aim: float | None
    peer: float | None
    reason: str
    peer_reason: str


def lines(document: Mapping[str, Any]) -> list[Line]:
    """Every figure, measured or not, in the order of the table."""
    rates = None if document["bounds"] is None else Rates(**document["bounds"])
    goals = GOALS if GOALS_GPU in document.get("gpu", {}).get("name", "") else {}
    found = []
    for name, phase, batch in FIGURES:
        config = CONFIGS[name]
        row = next((r for r in document["ours"] if (r["config"], r["batch"]) == (name, batch)), None)
        must, aim = goals.get((name, phase, batch), (None, None))
        what = TITLES[phase].format(batch=batch)
        peer_name = "bf16" if name == "fp16" else name
        peer = _peer_row(document, peer_name, batch)
        found.append(
            Line(
                title=f"{config.title} {what}",
                ours=None if row is None else OURS[phase](row),
                graph=None if row is None or phase != DECODE else row["graph_ms"],
                bound=None if rates is None else 1e3 * bound_s(config, phase, batch, rates),
                must=must,
                aim=aim,
                peer=None if peer is None else _peer_ms(peer, phase),
                reason=_reason(document, "ours", name, batch),
                peer_reason=_reason(document, "vllm", peer_name, batch),
            )
        )
    started, peer_start = document["startup"], document["peer"].get("bf16", {}).get("startup_s")
    found.append(
        Line(
            title="27B start to serving, ms",
            ours=None if started is None else 1e3 * started["ready_s"],
            graph=None,
            bound=None,
            must=START_GOALS[0] if goals else None,
            aim=START_GOALS[1] if goals else None,
            peer=None if peer_start is None else 1e3 * peer_start,
            reason=_reason(document, "startup", "startup", None),
            peer_reason=_reason(document, "vllm", "bf16", None),
        )
    )
    return found


def decode_ms(row: Mapping[str, Any]) -> float | None:
    """Milliseconds of a step in which all decode: the median of runs, in old documents from their whole times."""
    if row.get("decode_s"):
        return float(1e3 * median(row["decode_s"]))
    if not row["total_s"] or row["output_tokens"] < 2:
        return None
    return float(1e3 * (median(row["total_s"]) - median(row["prefill_s"])) / (row["output_tokens"] - 1))


def prefill_ms(row: Mapping[str, Any]) -> float:
    return float(1e3 * median(row["prefill_s"]))


def offline_ms(row: Mapping[str, Any]) -> float:
    return float(1e3 * median(row["total_s"]))


TITLES = {
    DECODE: "decode, batch {batch}, ms/token",
    PREFILL: f"prefill {{batch}} x {CONTEXT:,}, ms",
    OFFLINE: f"offline {{batch}} x ({CONTEXT:,} + {OUTPUT}), ms",
}
OURS = {DECODE: decode_ms, PREFILL: prefill_ms, OFFLINE: offline_ms}


def _peer_ms(row: Mapping[str, Any], phase: str) -> float | None:
    if phase == DECODE:
        return float(row["tpot_ms"])
    seconds = row["prefill_s"] if phase == PREFILL else row.get("total_s")
    return None if seconds is None else 1e3 * float(seconds)


def _peer_row(document: Mapping[str, Any], name: str, batch: int) -> Mapping[str, Any] | None:
    rows = document["peer"].get(name, {}).get("rows", [])
    return next((r for r in rows if r["batch"] == batch), None)


def _reason(document: Mapping[str, Any], stage: str, name: str, batch: int | None) -> str:
    """Why a figure is absent: the most exact entry wins; a whole stage may be absent too."""
    items = [f"{name} batch {batch}", name, "*"]
    entries = {e["item"]: e["reason"] for e in document["absent"] if e["stage"] == stage}
    return next((entries[item] for item in items if item in entries), NOT_MEASURED)


NOTE_COLUMNS = 108
UNRELATED = ("numpy", "grpcio", "transformers", "aiohttp", "uvloop", "python")
"""Packages whose versions stand in the JSON file alone: no figure depends on them."""
COLUMNS = (
    "figure", "ours", "graph alone", "bound", "bound / ours", "must", "aim", "vLLM", "vLLM / ours",
)  # fmt: skip


def markdown(document: Mapping[str, Any]) -> str:
    """Table, what it rests on, and what is absent. Figures that nobody asked for have no row."""
    found = [cells_of(COLUMNS), cells_of(["---"] * len(COLUMNS))]
    for line in lines(document):
        ours, peer = line.ours, line.peer
        if ours is None is peer and line.reason == line.peer_reason == NOT_MEASURED:
            continue
        cells = (
            line.title,
            _ms(ours) + _verdict(line) if ours is not None else line.reason,
            _ms(line.graph),
            _ms(line.bound),
            f"{line.bound / ours:.0%}" if ours and line.bound else "-",
            _ms(line.must),
            _ms(line.aim),
            _ms(peer) if peer is not None else line.peer_reason,
            ratio(peer, ours),
        )
        found.append(cells_of([cell.replace("|", "/").replace("\n", " ") for cell in cells]))
    return "\n".join([*found, "", *_notes(document)])


def drop_empty_columns(table: str) -> str:
    """Leave out the columns of a page's table that hold no figure; `table` begins with its head and ends at a blank."""
    rows, blank, notes = table.partition("\n\n")
    cells = [row.strip("| ").split(" | ") for row in rows.splitlines()]
    kept = [i for i in range(len(cells[0])) if any(row[i] not in ("-", NOT_MEASURED) for row in cells[2:])]
    return "\n".join(cells_of([row[i] for i in kept]) for row in cells) + blank + notes


def _verdict(line: Line) -> str:
    if line.ours is None or line.must is None or line.aim is None:
        return ""
    return " (aim held)" if line.ours <= line.aim else " (must held)" if line.ours <= line.must else " (must MISSED)"


def _notes(document: Mapping[str, Any]) -> list[str]:
    gpu, bounds, check, startup = (document.get(key) for key in ("gpu", "bounds", "check", "startup"))
    versions = ", ".join(f"{k} {v}" for k, v in document.get("versions", {}).items() if k not in UNRELATED)
    found = [f"{(gpu or {}).get('name', 'unknown GPU')}, {document.get('date', '')}; {versions}."]
    if bounds:
        fp8 = f", FP8 {bounds['fp8_flops'] / 1e12:.0f} TFLOP/s" if bounds["fp8_flops"] else ""
        found.append(
            f"Measured in this run: copies {bounds['copy_bytes_per_s'] / 1e12:.2f} TB/s, sum "
            f"{bounds['read_bytes_per_s'] / 1e12:.2f} TB/s, BF16 {bounds['bf16_flops'] / 1e12:.0f} TFLOP/s{fp8}."
        )
    if check:
        verdict = "held" if check["ok"] else f"FAILED: {'; '.join(check['problems'][:3])}"
        found.append(f"Check against the CPU: {verdict} ({check['cases']} cases, {check['seconds']:.0f} s).")
    before = " (beforehand; Triton's cache may have helped)"
    built = [f"{name} {b['seconds']:.1f} s{before * b['prebuilt']}" for name, b in document["builds"].items()]
    if built:
        found.append(f"Built engines: {', '.join(built)}.")
    for name, peer in document["peer"].items():
        runs = min((r["runs"] for r in peer["rows"] if r.get("runs")), default=None)
        kind = f"medians of {runs} runs or more" if runs else "each the best of its script's runs"
        found.append(f"vLLM {peer['version']}, {name}: {peer['seconds']:.0f} s in all, {kind}.")
    if "bf16" in document["peer"]:
        found.append("vLLM runs no FP16 for this model: beside ours in FP16 is its BF16, which has as many bytes.")
    if startup:
        found.append(
            f"Start-up is {startup['config']} with made-up weights, from the start of the process; first answer after "
            f"{startup['first_answer_s']:.1f} s, {startup['tokens']} tokens. vLLM's is its constructor alone, without "
            "imports."
        )
    if few := [
        f"{r['config']} batch {r['batch']} ({len(r['total_s'])})" for r in document["ours"] if len(r["total_s"]) < 3
    ]:
        found.append(f"Fewer than three runs: {', '.join(few)}.")
    if moved := [f"{r['config']} batch {r['batch']}" for r in document["ours"] if r["preemptions"]]:
        found.append(f"Sequences lost their pages in {', '.join(moved)}: these figures are of no use.")
    if document["clocks"]:
        found.append(f"Clocks, each reading is in the JSON file: {_clock_ranges(document['clocks'])}.")
    for entry in document["absent"]:
        kind = "failed" if entry["failed"] else "skipped"
        item = "" if entry["item"] == "*" else f" {entry['item']}"
        found.append(f"Absent: {entry['stage']}{item} {kind}: {entry['reason']}.")
    return [
        "\n".join(wrap(f"- {note}", NOTE_COLUMNS, subsequent_indent="  ", break_on_hyphens=False)) for note in found
    ]


def _clock_ranges(readings: Sequence[Mapping[str, Any]]) -> str:
    """Least and largest value of each field over all readings."""
    parts = []
    for field in dict.fromkeys(key for reading in readings for key in reading if key not in ("when", "at_s")):
        values = sorted({str(r[field]) for r in readings if field in r}, key=lambda v: (len(v.split(".")[0]), v))
        ends = values[0] if len(values) == 1 else f"{values[0].split()[0]} to {values[-1]}"
        parts.append(f"{field} {ends}")
    return ", ".join(parts)


def _ms(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def ratio(peer: float | None, ours: float | None) -> str:
    """Compute how many times as long the peer takes."""
    return f"{peer / ours:.2f}x" if ours and peer else "-"


def cells_of(cells: Sequence[str]) -> str:
    """A row of a Markdown table."""
    return f"| {' | '.join(cells)} |"


BAR, GAP, LEFT, WIDTH, TOP = 11, 8, 330, 560, 46
LONGEST = 2.5
"""Times the bound, where the axis ends and a bar is cut."""
OURS_COLOUR, PEER_COLOUR, MUST_COLOUR = "#2b6cb0", "#b0b7c3", "#c53030"


def svg(document: Mapping[str, Any]) -> str:
    """Bars of time over bound, so that 1 is what the machine allows; a red tick where the goal lies."""
    shown = [line for line in lines(document) if line.bound and (line.ours or line.peer)]
    times = [(value, line.bound) for line in shown for value in (line.ours, line.peer, line.must)]
    top = min(max([1.5, *(value / bound for value, bound in times if value and bound)]), LONGEST)
    step = 2 * BAR + GAP
    height = TOP + step * len(shown) + 30
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{LEFT + WIDTH + 110}" height="{height}" '
        'font-family="sans-serif" font-size="11">',
        '<rect width="100%" height="100%" fill="white"/>',
        f'<text x="10" y="18" font-size="13">Time over the bound of the machine, '
        f"{_escaped(document.get('gpu', {}).get('name', ''))}</text>",
        f'<text x="10" y="34"><tspan fill="{OURS_COLOUR}">■ WiCore-TRT</tspan> <tspan fill="{PEER_COLOUR}">■ vLLM'
        f'</tspan> <tspan fill="{MUST_COLOUR}">| must</tspan></text>',
    ]
    at = [LEFT + WIDTH * tick / top / 2 for tick in range(int(2 * top) + 1)]
    for tick, x in enumerate(at):
        parts.append(f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{TOP}" y2="{height - 24}" stroke="#e2e8f0"/>')
        parts.append(f'<text x="{x:.1f}" y="{height - 10}" text-anchor="middle">{tick / 2:g}x</text>')
    for index, line in enumerate(shown):
        y = TOP + index * step
        parts.append(f'<text x="{LEFT - 8}" y="{y + BAR + 4}" text-anchor="end">{_escaped(line.title)}</text>')
        for offset, value, colour in ((0, line.ours, OURS_COLOUR), (BAR, line.peer, PEER_COLOUR)):
            if value and line.bound:
                long, label = WIDTH * min(value / line.bound / top, 1.0), f"{_ms(value)} ({value / line.bound:.2f}x)"
                bar = f'x="{LEFT}" y="{y + offset}" width="{long:.1f}" height="{BAR - 1}"'
                parts.append(f'<rect {bar} fill="{colour}"/>')
                parts.append(f'<text x="{LEFT + long + 4:.1f}" y="{y + offset + 9}">{label}</text>')
        if line.must and line.bound:
            x = LEFT + WIDTH * min(line.must / line.bound / top, 1.0)
            parts.append(
                f'<line x1="{x:.1f}" x2="{x:.1f}" y1="{y - 1}" y2="{y + 2 * BAR}" stroke="{MUST_COLOUR}" '
                'stroke-width="2"/>'
            )
    return "\n".join([*parts, "</svg>", ""])


def _escaped(text: str) -> str:
    return text.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;")
