"""`wicore bench`: latency, throughput and perplexity, each figure beside what the machine allows; load.

Invariant: standard output carries the tables, or one JSON document with --json; progress goes to standard error.
"""

from __future__ import annotations

from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wicore_trt.cli.bench_serve import serve
from wicore_trt.errors import missing_package

if TYPE_CHECKING:
    from wicore_trt.bench.report import Roof
    from wicore_trt.bench.session import BenchSession

app = typer.Typer(no_args_is_help=True, help="Measure latency, throughput, load and perplexity.")
app.command()(serve)

_WHERE, _WHAT = (partial(typer.Option, rich_help_panel=panel) for panel in ("What is measured", "What is sent"))
EngineOption = Annotated[
    Path | None,
    _WHERE(
        help="Engine directory, run in this process; with --target, the engine that the server on this machine runs."
    ),
]
TargetOption = Annotated[str | None, _WHERE(help="HOST:PORT of a running server.")]
ApiKeyOption = Annotated[str | None, _WHERE(envvar="WICORE_SERVER__API_KEY", help="Key of the server.")]
TlsCaOption = Annotated[Path | None, _WHERE(help="CA of the server's certificate, PEM; turns TLS on.")]
RecipeOption = Annotated[str | None, _WHERE(help="Recipe for the engine in this process.")]
ThreadsOption = Annotated[int | None, _WHERE(min=0, help="CPU threads of one step; 0: all.")]
SeedOption = Annotated[int, _WHAT(help="Seed of prompts.")]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document.")]


def _parse_list(text: str) -> list[int]:
    """Parse "1,8" to [1, 8]."""
    parts = text.split(",")
    if not all(part.strip().isdecimal() and int(part) > 0 for part in parts):
        raise typer.BadParameter(f"{text!r} is not a list of positive numbers like 1,8,32.")
    return [int(part) for part in parts]


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
    from wicore_trt.bench.report import LATENCY_COLUMNS, latency_result, latency_row
    from wicore_trt.bench.runs import list_cases, run_latency
    from wicore_trt.cli._ui import print_table

    cases = list_cases(_parse_list(batch), _parse_list(input_tokens), _parse_list(output_tokens))
    flags = {"scheduler.max_sequences": max(case.batch for case in cases), "executor.threads": threads}
    session = _open_session(engine, target, recipe, flags, api_key, tls_ca)
    points, model, roof = _measure_target(
        session, partial(run_latency, cases=cases, repeats=repeats, warmups=warmups, seed=seed), quiet=as_json
    )
    results = [latency_result(point, roof) for point in points]
    parameters = {"repeats": repeats, "warmups": warmups, "seed": seed, "threads": threads, "recipe": recipe}
    _print_report("latency", session, model, parameters, roof, results, as_json=as_json)
    if not as_json:
        print_table("latency", LATENCY_COLUMNS, [latency_row(result) for result in results])


@app.command()
def throughput(
    engine: EngineOption = None,
    target: TargetOption = None,
    requests: Annotated[int, _WHAT(min=1, help="Requests that are measured.")] = 64,
    concurrency: Annotated[int, _WHAT(min=1, help="Requests open at a time.")] = 8,
    input_tokens: Annotated[int, _WHAT(min=1, help="Prompt length.")] = 128,
    output_tokens: Annotated[int, _WHAT(min=1, help="Output length.")] = 64,
    shared_prefix: Annotated[int, _WHAT(min=0, help="Prompt tokens that all requests share.")] = 0,
    warmups: Annotated[int, _WHAT(min=0, help="Requests before those.")] = 2,
    seed: SeedOption = 0,
    recipe: RecipeOption = None,
    threads: ThreadsOption = None,
    api_key: ApiKeyOption = None,
    tls_ca: TlsCaOption = None,
    as_json: JsonOption = False,
) -> None:
    """So many requests at a time: rates, and distributions of the latencies. `serve` has rates of arrival.

    Tokens are counted from the server's usage. Requests that fail are counted apart and give no latencies.
    """
    _require_package("grpc")
    from dataclasses import asdict

    from wicore_trt.bench.report import throughput_result
    from wicore_trt.bench.runs import ThroughputCase, run_throughput

    if shared_prefix >= input_tokens:
        raise typer.BadParameter("--shared-prefix must be less than --input-tokens.")
    case = ThroughputCase(requests, input_tokens, output_tokens, concurrency, shared_prefix, seed)
    flags = {"scheduler.max_sequences": concurrency, "executor.threads": threads}
    session = _open_session(engine, target, recipe, flags, api_key, tls_ca)
    measured, model, roof = _measure_target(session, partial(run_throughput, case=case, warmups=warmups), quiet=as_json)
    result = throughput_result(measured, case, roof)
    parameters = {**asdict(case), "warmups": warmups, "threads": threads, "recipe": recipe}
    _print_report("throughput", session, model, parameters, roof, [result], as_json=as_json)
    if not as_json:
        _print_throughput(result)


@app.command()
def perplexity(
    engine: Annotated[list[Path], typer.Option(help="Engine directory; give several to compare with the first.")],
    text: Annotated[Path | None, typer.Option(help="UTF-8 file. Default: Python's own documentation topics.")] = None,
    tokens: Annotated[int, typer.Option(min=2, help="Tokens of the text to take.")] = 20_000,
    context: Annotated[int, typer.Option(min=2, help="Tokens of a window.")] = 1024,
    stride: Annotated[int | None, typer.Option(min=1, help="Tokens scored per window. Default: context / 2.")] = None,
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


def _require_package(package: str) -> None:
    if find_spec(package) is None and (lacking := missing_package(package)):
        raise lacking


def _open_session(
    engine: Path | None,
    target: str | None,
    recipe: str | None,
    flags: dict[str, Any],
    api_key: str | None,
    tls_ca: Path | None,
) -> BenchSession:
    from wicore_trt.bench.session import BenchSession
    from wicore_trt.config import load_settings

    settings = load_settings(recipe, {"engine": engine and str(engine), **flags})
    return BenchSession(settings, target, api_key, tls_ca)


def _measure_target(session: BenchSession, measure: Any, *, quiet: bool) -> tuple[Any, dict[str, Any], Roof | None]:
    """Measure this machine and then the target; returns the result of `measure`, the target's model and the bounds."""
    from wicore_trt.cli._ui import progress

    with progress(quiet=quiet) as report:
        report("measuring the machine", 0, 1)
        roof = session.measure_roof()
        report("measuring the machine", 1, 1)
        return *session.run_measurement(partial(measure, progress=report)), roof


def _print_report(
    command: str,
    session: BenchSession,
    model: dict[str, Any],
    parameters: dict[str, Any],
    roof: Roof | None,
    results: list[dict[str, Any]],
    *,
    as_json: bool,
) -> None:
    """Print the JSON document, or what stands above the tables."""
    from wicore_trt.bench.report import describe_machine, make_report
    from wicore_trt.cli._ui import print_json

    rates = roof.rates if roof else None
    if as_json:
        print_json(
            make_report(command, target=session.place, model=model, parameters=parameters, rates=rates, results=results)
        )
        return
    about = describe_machine()
    engine = f"{model['dtype']}, {model['backend']} backend, {model['kernels']} kernels"
    print(f"{model['model_id']}, {engine}, {session.place}")
    gpus = "".join(f", {gpu['name']}" for gpu in about["gpus"])
    print(f"{about['cpu']}, {about['cores']} cores{gpus}")
    if rates is not None:
        print(
            f"bounds: {rates.read_bytes_per_s / 1e9:.1f} GB/s read, {rates.flops / 1e12:.3g} TFLOP/s "
            f"({rates.gemm_dtype}), measured on {rates.device} in this run"
        )
    print()


def _print_throughput(result: dict[str, Any]) -> None:
    from wicore_trt.bench.measure import LATENCIES
    from wicore_trt.bench.report import LATENCY_KEYS, RATE_KEYS, list_cells
    from wicore_trt.cli._ui import print_table

    print(
        f"{result['completed']} requests in {result['duration_s']:.1f} s; {result['prompt_tokens']} prompt tokens, "
        f"{result['cached_tokens']} of them cached; {result['output_tokens']} output tokens"
    )
    for error, count in result["errors"].items():
        print(f"{count} requests failed: {error}")
    rates = {"requests": "requests/s", "output": "output tokens/s", "total": "total tokens/s"}
    print_table("rates", ("figure", "value", "bound", "bound %"), list_cells(result, rates, RATE_KEYS))
    latencies = {name: name.upper() for name in LATENCIES}
    print_table("latencies", ("ms", *LATENCY_KEYS), list_cells(result, latencies, LATENCY_KEYS))
