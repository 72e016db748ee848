"""`wicore bench`: latency beside what the machine allows, load at given rates or concurrency, and perplexity.

Must not import anything heavy before a command runs. Invariant: standard output carries the tables, or with --json one
JSON document; progress and warnings go to standard error.
"""

from __future__ import annotations

import json
import sys
from contextlib import AsyncExitStack
from dataclasses import asdict
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Option

from wicore_trt.errors import WicoreError, missing_package

if TYPE_CHECKING:
    from collections.abc import Sequence

    from wicore_trt.bench.client import Target
    from wicore_trt.bench.report import Roof
    from wicore_trt.config import Settings
    from wicore_trt.progress import Progress

app = typer.Typer(no_args_is_help=True, help="Measure latency, load and perplexity.")

_WHAT, _WHO, _WHEN, _OUT = (
    partial(Option, rich_help_panel=panel)
    for panel in ("What is sent", "Who answers", "When it is sent", "What comes out")
)
LENGTHS = "N, N,N (one of these) or N..N (any between)."
EngineOption = Annotated[
    Path | None,
    _WHO(help="Engine directory, run in this process; with --target, the engine that the server on this machine runs."),
]
TargetOption = Annotated[str | None, _WHO(help="HOST:PORT of a running server.")]
ApiKeyOption = Annotated[str | None, _WHO(envvar="WICORE_SERVER__API_KEY", help="Key of the server.")]
TlsCaOption = Annotated[Path | None, _WHO(help="CA of the server's certificate, PEM; turns TLS on for gRPC.")]
RecipeOption = Annotated[str | None, _WHO(help="Recipe for the engine in this process.")]
ThreadsOption = Annotated[int | None, _WHO(min=0, help="CPU threads of one step; 0: all.")]
SeedOption = Annotated[int, _WHAT(help="Seed of prompts, lengths and arrival times.")]
JsonOption = Annotated[bool, _OUT("--json", help="Print one JSON document.")]


@app.command()
def latency(
    engine: EngineOption = None,
    target: TargetOption = None,
    batch: Annotated[str, _WHAT(help="Batch sizes.", metavar="N,N")] = "1,8",
    input_tokens: Annotated[str, _WHAT(help="Prompt lengths.", metavar="N,N")] = "128,1024",
    output_tokens: Annotated[str, _WHAT(help="Output lengths.", metavar="N,N")] = "64",
    repeats: Annotated[int, _WHAT(min=1, help="Measured runs of a case.")] = 3,
    warmups: Annotated[int, _WHAT(min=0, help="Runs of a case before those.")] = 1,
    seed: SeedOption = 0,
    recipe: RecipeOption = None,
    threads: ThreadsOption = None,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    as_json: JsonOption = False,
) -> None:
    """Prefill and decode step of fixed batches, for each combination of batch, prompt and output length.

    Figures are medians. A decode step is (time for all tokens - time for one token) / (output tokens - 1).
    """
    _require_package("grpc")
    from wicore_trt.bench.client import open_target, run_quickly
    from wicore_trt.bench.report import LATENCY_COLUMNS, describe_machine, latency_result, latency_row, make_report
    from wicore_trt.bench.runs import list_cases, run_latency
    from wicore_trt.bench.workload import parse_lengths
    from wicore_trt.cli._ui import print_json, print_table, progress

    given = {"--batch": batch, "--input-tokens": input_tokens, "--output-tokens": output_tokens}
    cases = list_cases(*(_parse_option(option, partial(parse_lengths, text)) for option, text in given.items()))
    settings = _read_settings(engine, recipe, threads, max(case.batch for case in cases))

    async def run() -> tuple[list[Any], dict[str, Any]]:
        opened = await open_target(settings, target, api_key=api_key, tls_ca=tls_ca, awaited=False)
        try:
            points = await run_latency(opened, cases, repeats=repeats, warmups=warmups, seed=seed, progress=report)
            return points, asdict(opened.info)
        finally:
            await opened.close()

    with progress(quiet=as_json) as report:
        roof = _measure_machine(settings, report) if settings.engine else None  # before an engine runs beside
        points, model = run_quickly(run())
    results, where = [latency_result(point, roof) for point in points], target or "in process"
    rates = roof.rates if roof else None
    if as_json:
        parameters = {"repeats": repeats, "warmups": warmups, "seed": seed, "threads": threads, "recipe": recipe}
        print_json(
            make_report("latency", target=where, model=model, parameters=parameters, rates=rates, results=results)
        )
        return
    about = describe_machine()
    gpus = "".join(f", {gpu['name']}" for gpu in about["gpus"])
    print(f"{model['model_id']}, {model['dtype']}, {model['backend']} backend, {model['kernels']} kernels, {where}")
    print(f"{about['cpu']}, {about['cores']} cores{gpus}")
    if rates is not None:
        print(
            f"bounds: {rates.read_bytes_per_s / 1e9:.1f} GB/s read, {rates.flops / 1e12:.3g} TFLOP/s "
            f"({rates.gemm_dtype}), measured on {rates.device} in this run"
        )
    print()
    print_table("latency", LATENCY_COLUMNS, [latency_row(result) for result in results])


@app.command()
def perplexity(
    engine: Annotated[list[Path], Option(help="Engine directory; give several to compare with the first.")],
    text: Annotated[Path | None, Option(help="UTF-8 file. Default: Python's own documentation topics.")] = None,
    tokens: Annotated[int, Option(min=2, help="Tokens of the text to take.")] = 20_000,
    context: Annotated[int, Option(min=2, help="Tokens of a window.")] = 1024,
    stride: Annotated[int | None, Option(min=1, help="Tokens scored per window. Default: context / 2.")] = None,
    threads: ThreadsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Perplexity of engines on the same tokens, and how much each differs from the first."""
    _require_package("torch")
    from wicore_trt.bench.perplexity import compare_engines
    from wicore_trt.bench.report import make_report
    from wicore_trt.cli._ui import print_json, print_table, progress

    with progress(quiet=as_json) as report:
        results = compare_engines(
            engine, text, tokens=tokens, context=context, stride=stride, threads=threads or 0, progress=report
        )
    if as_json:
        parameters = {"text": text and str(text), "tokens": tokens, "context": context, "stride": stride}
        print_json(
            make_report("perplexity", target="in process", model={}, parameters=parameters, rates=None, results=results)
        )
        return
    names = ("engine", "dtype", "kernels", "tokens")
    rows = [
        (*(r[name] for name in names), f"{r['perplexity']:.4f}", f"{r['difference_percent']:+.3f} %") for r in results
    ]
    print_table("perplexity", (*names, "perplexity", "difference"), rows)


@app.command()
def serve(
    target: Annotated[
        list[str] | None,
        _WHO(help="URL of a server with OpenAI's API, or HOST:PORT of our gRPC. Several are compared, rate by rate."),
    ] = None,
    engine: Annotated[Path | None, _WHO(help="In place of --target: an engine, run in this process.")] = None,
    api: Annotated[
        Literal["completions", "chat"], _WHO(help="Over HTTP: prompts of token ids, or chats of made-up words.")
    ] = "completions",
    model: Annotated[str | None, _WHO(help="Model to name over HTTP. Default: the server's first.")] = None,
    extra_body: Annotated[
        str, _WHO(metavar="JSON", help="Fields to add to each HTTP body; a null takes one out.")
    ] = "{}",
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    recipe: RecipeOption = None,
    threads: ThreadsOption = None,
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
    seed: SeedOption = 0,
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
    as_json: JsonOption = False,
) -> None:
    """Open-loop load: requests are sent when they are due, and latencies count from then.

    Examples:
      wicore bench serve --target http://127.0.0.1:8000 --rate 2,4,8 --duration 60 --slo ttft=450ms,tpot=40ms
      wicore bench serve --target 127.0.0.1:50051 --trace mooncake_conversation.jsonl --requests 500 --rate 1
    """
    given = {name: value for name, value in locals().items() if name not in ("api_key", "as_json", "target")}
    from wicore_trt.bench.client import open_target, run_quickly
    from wicore_trt.bench.load import LoadOptions, Offer, run_sweep
    from wicore_trt.bench.measure import Slo
    from wicore_trt.bench.report import make_report
    from wicore_trt.bench.workload import LoadShape, parse_lengths
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

    async def run() -> tuple[list[dict[str, Any]], list[str]]:
        async with AsyncExitStack() as stack:
            targets: list[tuple[str, Target]] = []
            for where in target or (None,):
                opened: Target
                if where is not None and where.startswith(("http://", "https://")):
                    from wicore_trt.bench.http import HttpTarget

                    opened = await HttpTarget.connect(
                        where, chat=api == "chat", model=model, api_key=api_key, tls_ca=tls_ca, extra=fields
                    )
                else:
                    settings = _read_settings(engine, recipe, threads)
                    opened = await open_target(settings, where, api_key=api_key, tls_ca=tls_ca)
                stack.push_async_callback(opened.close)
                targets.append((where or "in process", opened))
            with progress(quiet=as_json) as report:
                results = await run_sweep(
                    targets, offer, rates, options, warmups=warmups, slo=limits, progress=report
                )  # fmt: skip
            return results, [opened.info.model_id for _, opened in targets]

    results, models = run_quickly(run())
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


def _require_package(package: str) -> None:
    if find_spec(package) is None and (lacking := missing_package(package)):
        raise lacking


def _read_settings(
    engine: Path | None, recipe: str | None, threads: int | None, sequences: int | None = None
) -> Settings:
    from wicore_trt.config import load_settings

    flags = {"executor.threads": threads, "scheduler.max_sequences": sequences}
    return load_settings(recipe, {"engine": engine and str(engine), **flags})


def _measure_machine(settings: Settings, report: Progress) -> Roof:
    """Measure this machine; returns the bounds of the engine of `settings` on it."""
    from wicore_trt.bench.bound import ModelCost, measure_rates
    from wicore_trt.bench.report import Roof
    from wicore_trt.cores import count_cores
    from wicore_trt.engine.manifest import read_manifest

    report("measuring the machine", 0, 1)
    manifest = read_manifest(Path(settings.engine or ""))
    head = manifest.weights.head or manifest.base_dtype
    cost = ModelCost.from_dtypes(manifest.spec, manifest.dtype, head, manifest.kv_dtype)
    threads = settings.executor.threads or count_cores()
    roof = Roof(cost, measure_rates(settings.executor.device, threads=threads))
    report("measuring the machine", 1, 1)
    return roof


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
