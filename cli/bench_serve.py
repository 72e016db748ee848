"""`wicore bench serve`: sends requests at given rates to a server, whatever it still has open, and reports results.

Must not import anything heavy before it runs. Invariant: standard output carries the tables, or one JSON document with
--json; progress and warnings go to standard error.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from wicore_trt.errors import WicoreError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wicore_trt.bench.client import Target

_WHERE, _WHAT, _WHEN, _OUT = (
    partial(typer.Option, rich_help_panel=panel)
    for panel in ("Who answers", "What is sent", "When it is sent", "What comes out")
)
LENGTHS = "N, N,N (one of these) or N..N (any between)."


def serve(
    target: Annotated[
        list[str] | None,
        _WHERE(help="URL of a server with OpenAI's API, or HOST:PORT of our gRPC. Several are compared, rate by rate."),
    ] = None,
    engine: Annotated[Path | None, _WHERE(help="In place of --target: an engine, run in this process.")] = None,
    api: Annotated[
        Literal["completions", "chat"], _WHERE(help="Over HTTP: prompts of token ids, or chats of made-up words.")
    ] = "completions",
    model: Annotated[str | None, _WHERE(help="Model to name over HTTP. Default: the server's first.")] = None,
    extra_body: Annotated[
        str, _WHERE(metavar="JSON", help="Fields to add to each HTTP body; a null takes one out.")
    ] = "{}",
    api_key: Annotated[str | None, _WHERE(envvar="WICORE_SERVER__API_KEY", help="Key of the server.")] = None,
    tls_ca: Annotated[Path | None, _WHERE(help="CA of the server's certificate, PEM; turns TLS on for gRPC.")] = None,
    recipe: Annotated[str | None, _WHERE(help="Recipe for the engine in this process.")] = None,
    threads: Annotated[int | None, _WHERE(min=0, help="CPU threads of one step of it; 0: all.")] = None,
    input_tokens: Annotated[str, _WHAT(metavar="LENGTHS", help=f"Prompt lengths: {LENGTHS}")] = "128",
    output_tokens: Annotated[str, _WHAT(metavar="LENGTHS", help="Output lengths, likewise.")] = "64",
    shared_prefix: Annotated[int, _WHAT(min=0, help="Of each prompt's tokens, those of a system prompt.")] = 0,
    prefixes: Annotated[int, _WHAT(min=1, help="Different system prompts.")] = 1,
    turns: Annotated[int, _WHAT(min=1, help="Turns of a conversation, each sent after the answer before.")] = 1,
    turn_tokens: Annotated[str, _WHAT(metavar="LENGTHS", help="What each further turn adds.")] = "64",
    trace: Annotated[
        Path | None, _WHAT(help="In place of all that: JSON lines in Mooncake's format. Equal hash_ids, equal blocks.")
    ] = None,
    ignore_eos: Annotated[bool, _WHAT(help="Outputs have exactly their lengths, else the request failed.")] = True,
    seed: Annotated[int, _WHAT(help="Seed of prompts, lengths and arrival times.")] = 0,
    rate: Annotated[
        str | None,
        _WHEN(metavar="N,N", help="Requests a second, one run each; inf: all at once. Default: 1, or a trace's."),
    ] = None,
    burstiness: Annotated[
        float, _WHEN(min=1e-3, help="Shape of the gamma-distributed gaps: 1 Poisson, less is bursts, inf constant.")
    ] = 1.0,
    requests: Annotated[int, _WHEN(min=1, help="Requests of a run.")] = 100,
    duration: Annotated[
        float | None, _WHEN(min=1e-3, help="In place of --requests: seconds in which they come.")
    ] = None,
    max_concurrency: Annotated[
        int | None, _WHEN(min=1, help="Requests open at a time; waiting for a place counts, unless the rate is inf.")
    ] = None,
    pause: Annotated[float, _WHEN(min=0, help="Seconds between an answer and the next turn.")] = 0.0,
    timeout: Annotated[float, _WHEN(min=1e-3, help="Seconds after which a request has failed.")] = 600.0,
    warmups: Annotated[int, _WHEN(min=0, help="Sessions before the first run, not counted.")] = 4,
    slo: Annotated[
        str | None, _OUT(metavar="LIMITS", help="A good request's, as ttft=450ms,tpot=40ms,e2e=20s.")
    ] = None,
    plot: Annotated[Path | None, _OUT(help="SVG to write.")] = None,
    as_json: Annotated[bool, _OUT("--json", help="Print one JSON document.")] = False,
) -> None:
    """Open-loop load: requests are sent when they are due, and latencies count from then.

    Examples:
      wicore bench serve --target http://127.0.0.1:8000 --rate 2,4,8 --duration 60 --slo ttft=450ms,tpot=40ms
      wicore bench serve --target 127.0.0.1:50051 --trace mooncake_conversation.jsonl --requests 500 --rate 1
    """
    given = {name: value for name, value in locals().items() if name not in ("api_key", "as_json", "plot", "target")}
    from wicore_trt.bench.load import LoadOptions
    from wicore_trt.bench.measure import Slo
    from wicore_trt.bench.plan import LoadShape, parse_lengths
    from wicore_trt.bench.report import make_report
    from wicore_trt.bench.serve import Offer, run_sweep
    from wicore_trt.bench.session import run_quickly
    from wicore_trt.cli._ui import print_json, progress
    from wicore_trt.kv.study.trace import load_trace

    if (engine is None) == (not target):
        raise typer.BadParameter("Give --target URL or HOST:PORT, or --engine DIR.", param_hint="--target")
    rates = _parse_option("--rate", lambda: [float(r) for r in rate.split(",")] if rate else [None if trace else 1.0])
    if not all(r is None or r > 0 for r in rates):
        raise typer.BadParameter(f"{rate!r} is not a list of rates.", param_hint="--rate")
    found = {
        "input_tokens": _parse_option("--input-tokens", lambda: parse_lengths(input_tokens)),
        "output_tokens": _parse_option("--output-tokens", lambda: parse_lengths(output_tokens)),
        "turn_tokens": _parse_option("--turn-tokens", lambda: parse_lengths(turn_tokens)),
    }
    fields = _parse_option("--extra-body", lambda: dict(json.loads(extra_body)))
    limits = _parse_option("--slo", lambda: Slo.parse_limits(slo) if slo else None)
    options = LoadOptions(max_concurrency, pause, timeout, ignore_eos)
    offer = Offer(
        LoadShape(**found, turns=turns, shared_prefix=shared_prefix, prefixes=prefixes),
        load_trace(trace, plain=True) if trace else (), burstiness, requests, duration, seed,
    )  # fmt: skip
    if plot is not None:
        from wicore_trt.bench.plot import write_load_plot  # before minutes of work, where it cannot be had

    async def run() -> tuple[list[dict[str, Any]], list[str]]:
        async with AsyncExitStack() as stack:
            targets: list[tuple[str, Target]] = []
            for where in target or (None,):
                opened = await _open_target(
                    where, engine, recipe, threads, api_key, tls_ca, (api == "chat", model, fields)
                )
                stack.push_async_callback(opened.close)
                targets.append((where or "in process", opened))
            with progress(quiet=as_json) as report:
                results = await run_sweep(
                    targets, offer, rates, options, warmups=warmups, slo=limits, progress=report
                )  # fmt: skip
            return results, [opened.info.model_id for _, opened in targets]

    results, models = run_quickly(run())
    if plot is not None:
        values = asdict(limits) if limits else {}
        limits_ms = {name.removesuffix("_s"): value * 1e3 for name, value in values.items() if value is not None}
        write_load_plot(results, plot, limits_ms)
    where, served = ", ".join(target or ["in process"]), ", ".join(dict.fromkeys(models))
    if as_json:
        about = {"model_id": served}
        print_json(make_report("serve", target=where, model=about, parameters=given, rates=None, results=results))
    else:
        _print_results(results, f"{served}, {where}")
    if not any(result["completed"] for result in results):
        raise WicoreError("Not one request was answered.")


def _parse_option(option: str, parse: Any) -> Any:
    """Call `parse`; a ValueError or TypeError becomes wrong usage."""
    try:
        return parse()
    except (ValueError, TypeError) as error:
        raise typer.BadParameter(f"{error}.", param_hint=option) from None


async def _open_target(
    where: str | None,
    engine: Path | None,
    recipe: str | None,
    threads: int | None,
    api_key: str | None,
    tls_ca: Path | None,
    http: tuple[bool, str | None, dict[str, Any]],
) -> Target:
    """Open the target at a URL, at HOST:PORT, or the engine in this process."""
    from wicore_trt.bench.session import BenchSession
    from wicore_trt.config import load_settings

    if where is not None and where.startswith(("http://", "https://")):
        from wicore_trt.bench.http import HttpTarget

        chat, model, extra = http
        return await HttpTarget.connect(where, chat=chat, model=model, api_key=api_key, tls_ca=tls_ca, extra=extra)
    settings = load_settings(recipe, {"engine": engine and str(engine), "executor.threads": threads})
    return await BenchSession(settings, where, api_key, tls_ca).connect()


def _print_results(results: Sequence[dict[str, Any]], head: str) -> None:
    from wicore_trt.bench.report import (
        LOAD_COLUMNS,
        LOAD_SUMMARY_COLUMNS,
        describe_machine,
        load_row,
        load_summary_rows,
        load_warnings,
    )
    from wicore_trt.cli._ui import print_table

    about = describe_machine()
    print(f"{head}\nclient: {about['cpu']}, {about['cores']} cores\n")
    several = len({result["target"] for result in results}) > 1
    print_table("load", LOAD_COLUMNS, [load_row(result, several=several) for result in results])
    rows = [row for result in results for row in load_summary_rows(result, several=several)]
    print_table("latencies, ms", LOAD_SUMMARY_COLUMNS, rows)
    for result in results:
        name = load_row(result, several=several)[0]
        hits = ", ".join(f"{tier} {tokens}" for tier, tokens in result["tier_hit_tokens"].items())
        if hits:
            print(f"{name}: prompt tokens saved by tier: {hits}")
        if result["left_out"]:
            print(f"{name}: {result['left_out']} sessions were left out, longer than the context")
        for warning in load_warnings(result):
            print(f"{name}: {warning}", file=sys.stderr)
