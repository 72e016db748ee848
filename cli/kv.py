"""`wicore kv`: commands on KV tiers without a model. This file has `simulate`; `kv_plan` and `kv_disk` the others."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer import Option

from wicore_trt.cli import kv_disk
from wicore_trt.cli.kv_plan import plan

if TYPE_CHECKING:
    from wicore_trt.kv.study.simulate import SimulationReport

app = typer.Typer(no_args_is_help=True, add_completion=False, rich_markup_mode="rich", help="KV cache tools.")


app.command()(plan)
app.command()(kv_disk.inspect)
app.command()(kv_disk.verify)
app.command()(kv_disk.purge)


@app.callback()
def root() -> None:
    """Size KV cache tiers, simulate eviction policies, look after disk caches."""


@app.command()
def simulate(
    trace: Annotated[
        Path | None, Option(help="JSON lines with hash_ids (Mooncake format).", show_default=False)
    ] = None,
    generate: Annotated[
        int | None,
        Option(min=1, metavar="N", help="In place of --trace: so many made-up conversations, 5 turns each."),
    ] = None,
    policy: Annotated[str, Option(help="cost, lru, a2cr, lfu or belady; several with commas; or all.")] = "cost",
    capacity: Annotated[
        str, Option(help="Device pages, or a share of the unique blocks (5%); several with commas.")
    ] = "2%,5%,10%,20%,30%",
    host: Annotated[str | None, Option(help="Host tier: pages or share.")] = None,
    disk: Annotated[str | None, Option(help="Disk tier: pages or share.")] = None,
    inclusive: Annotated[
        bool, Option("--inclusive/--exclusive", help="Write pages through to lower tiers, or move them down.")
    ] = False,
    recompute: Annotated[
        bool, Option("--recompute-cost", help="Weigh pages by the time to recompute them (policy cost).")
    ] = False,
    bytes_per_token: Annotated[int, Option(min=0, metavar="N", help="KV bytes of global layers.")] = 81_920,
    window_bytes: Annotated[
        int, Option(min=0, metavar="N", help="KV bytes of sliding windows at one resume point.")
    ] = 436_207_616,
    coded: Annotated[
        bool, Option("--coded", help="kv.compression lossless: lower tiers hold a third more in the same memory.")
    ] = False,
    limit: Annotated[int | None, Option(min=1, metavar="N", help="Replay only the first requests.")] = None,
    json: Annotated[bool, Option("--json", help="Print JSON.")] = False,
) -> None:
    """Replay a trace: token hit rate per tier and bytes moved between tiers.

    Example:  wicore kv simulate --generate 2000 --policy all
    """
    from functools import partial
    from itertools import product

    from wicore_trt.cli._ui import print_json, progress
    from wicore_trt.kv.policy.by_name import POLICIES
    from wicore_trt.kv.study.simulate import KVBytes, recompute_cost
    from wicore_trt.kv.study.simulate import simulate as replay
    from wicore_trt.kv.study.trace import count_unique_blocks, generate_trace, load_trace

    if trace is not None and generate is None:
        title, requests = trace.name, load_trace(trace, limit=limit)
    elif generate is not None and trace is None:
        title, requests = f"{generate} made-up conversations", generate_trace(generate)[:limit]
    else:
        raise typer.BadParameter("Give --trace FILE or --generate N.", param_hint="--trace")
    unique = count_unique_blocks(requests)
    lower = {
        name: _parse_pages(text, unique, name) for name, text in (("host", host), ("disk", disk)) if text is not None
    }
    if coded:
        lower = {name: count * 4 // 3 for name, count in lower.items()}
        bytes_per_token, window_bytes = bytes_per_token * 3 // 4, window_bytes * 3 // 4
    sizes = [_parse_pages(text, unique, "capacity") for text in capacity.split(",")]
    names = [*POLICIES, "belady"] if policy == "all" else policy.split(",")
    options: dict[str, Any] = {
        "inclusive": inclusive,
        "page_cost": recompute_cost if recompute else None,
        "kv_bytes": KVBytes(bytes_per_token, window_bytes),
    }
    reports = []
    with progress(quiet=json) as report:
        for name, size in product(names, sizes):
            report_one = partial(report, f"{name}, {size} pages")
            reports.append(replay(requests, name, {"device": size, **lower}, progress=report_one, **options))
    if json:
        about = {"trace": str(trace or title), "unique_blocks": unique}
        print_json({**about, "results": [r.to_dict() for r in reports]})
    else:
        _print_reports(f"{title}: {len(requests)} requests, {unique} unique blocks", reports)


def _parse_pages(text: str, unique: int, option: str) -> int:
    """Parse pages from "1000" or "5%" (of the unique blocks)."""
    from wicore_trt.errors import ConfigError

    try:
        pages = int(unique * float(text[:-1]) / 100) if text.endswith("%") else int(text)
    except ValueError:
        pages = 0
    if pages < 1:
        raise ConfigError(f"--{option} {text!r} is not a number of pages.", fix="Write 1000 or 5%.")
    return pages


def _print_reports(title: str, reports: list[SimulationReport]) -> None:
    from wicore_trt.cli._ui import human_bytes, print_table

    tiers, flows = list(reports[0].hit_tokens), list(reports[0].moved_bytes)
    columns = [
        "policy",
        *(f"{tier} pages" for tier in tiers),
        "hit rate",
        *(f"{tier} hits" for tier in tiers),
        *flows,
        "s",
    ]
    rows = [
        [
            r.policy, *r.capacity.values(), f"{r.hit_rate:.4f}",
            *(f"{r.hit_tokens[tier] / max(1, r.tokens):.4f}" for tier in tiers),
            *(human_bytes(r.moved_bytes[flow]) for flow in flows), f"{r.seconds:.1f}",
        ]
        for r in reports
    ]  # fmt: skip
    print_table(title, columns, rows)
