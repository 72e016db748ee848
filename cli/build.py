"""`wicore build`: an engine directory from a source, a checkpoint or a recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from wicore_trt.cli import _options


def command(
    source: Annotated[
        str | None, Argument(help="Hub id, Hugging Face directory, GGUF file or unified checkpoint.")
    ] = None,
    output: Annotated[Path | None, Argument(help="Engine directory to write.")] = None,
    recipe: Annotated[
        str | None,
        Option(
            autocompletion=_options.complete_recipes,
            help="Recipe, by name or path, for what is not given here.",
        ),
    ] = None,
    dtype: Annotated[
        str | None,
        Option(
            show_default="auto",
            help="float32, bfloat16, float16, fp8, q4_0, or auto: a checkpoint's own; of a source fp8 or bfloat16.",
        ),
    ] = None,
    kv_dtype: Annotated[
        str | None,
        Option(show_default="auto", help="float32, bfloat16, float16, fp8, or auto: that of the activations."),
    ] = None,
    backend: Annotated[
        str | None,
        Option(
            autocompletion=_options.complete_backends,
            show_default="torch",
            help="How the engine computes: torch, triton, tensorrt or tensorrt-llm.",
        ),
    ] = None,
    target: Annotated[
        list[str] | None,
        Option(metavar="SM", help="GPU architectures to compile for, such as sm89 or sm80,sm89."),
    ] = None,
    tp: Annotated[
        int | None, Option(min=1, max=64, metavar="N", show_default="1", help="GPUs to split the weights over.")
    ] = None,
    page_tokens: Annotated[
        int | None,
        Option(min=1, max=65536, metavar="N", show_default="32", help="Tokens per KV page, a power of two."),
    ] = None,
    max_context: Annotated[
        int | None,
        Option(min=1, metavar="N", help="Longest sequence in tokens. Default: the model's; tensorrt: 8192."),
    ] = None,
    max_batch: Annotated[
        int | None,
        Option(min=1, metavar="N", show_default="8", help="Compiled engines: sequences of a decode step."),
    ] = None,
    max_chunk: Annotated[
        int | None,
        Option(min=1, metavar="N", show_default="512", help="Compiled engines: tokens of a prefill step."),
    ] = None,
    lora: _options.LoraOption = None,
    mmproj: _options.MmprojOption = None,
    text_only: _options.TextOnlyOption = False,
    calibrate: Annotated[
        Path | None, Option(help="UTF-8 text to measure static FP8 scales on; see wicore convert.")
    ] = None,
    calibrate_tokens: _options.CalibrateTokensOption = 2048,
    no_kv_scales: _options.NoKVScalesOption = False,
    dummy_weights: Annotated[
        bool,
        Option("--dummy-weights", help="Backend triton: no weights, made-up ones at load, to measure speed."),
    ] = False,
    model: Annotated[
        str | None, Option(help="With --dummy-weights, in place of SOURCE: gemma3-270m, 1b, 4b, 12b or 27b.")
    ] = None,
    revision: Annotated[str | None, Option(help="Commit, branch or tag of a hub id. Default: main.")] = None,
    force: Annotated[bool, Option("--force", help="Replace an existing engine.")] = False,
    json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Build an engine directory.

    Examples:  wicore build google/gemma-3-270m-it engine/   |   wicore build --recipe gemma3-270m-cpu
    """
    import sys

    from wicore_trt.cli._ui import human_bytes, print_json, progress
    from wicore_trt.config import Flag, load_settings
    from wicore_trt.engine.build import build_engine
    from wicore_trt.engine.options import BACKENDS, DummyModel
    from wicore_trt.errors import ConfigError
    from wicore_trt.kv.sizing import MODELS, builtin_spec

    dummy = None
    if dummy_weights or model:
        if model is None or not dummy_weights or model not in MODELS:
            problem = "--dummy-weights and --model go together: wicore build --dummy-weights --model gemma3-27b OUTPUT."
            raise ConfigError(problem, fix=f"Models: {', '.join(MODELS)}.")
        dummy = DummyModel(model, builtin_spec(model))
        source, output = model, output or (None if source is None else Path(source))
    flags = {
        "engine": None if output is None else str(output), "build.source": source,
        "build.dtype": Flag("--dtype", dtype), "build.kv_dtype": Flag("--kv-dtype", kv_dtype),
        "build.backend": Flag("--backend", backend), "build.targets": Flag("--target", target or None),
        "build.tp_size": Flag("--tp", tp), "build.max_batch": Flag("--max-batch", max_batch),
        "build.max_chunk": Flag("--max-chunk", max_chunk), "kv.page_tokens": Flag("--page-tokens", page_tokens),
        "scheduler.max_context": Flag("--max-context", max_context),
    }  # fmt: skip
    settings = load_settings(recipe, flags)
    if settings.build.source is None or settings.engine is None:
        raise ConfigError("build needs a SOURCE and an OUTPUT.", fix="Give both, or a recipe that names them.")
    if settings.build.backend not in BACKENDS:
        said = f"there is no backend {settings.build.backend!r}. Known: {', '.join(BACKENDS)}."
        if backend is not None:
            raise typer.BadParameter(said, param_hint="--backend")
        raise ConfigError(said)
    calibration = _options.make_calibration(calibrate, calibrate_tokens, not no_kv_scales)
    lost: list[str] = []
    with progress(quiet=json) as report:
        engine = build_engine(
            settings.build.source, Path(settings.engine), backend=settings.build.backend,
            dtype=settings.build.dtype, kv_dtype=settings.build.kv_dtype, tp_size=settings.build.tp_size,
            page_tokens=settings.kv.page_tokens or 32, targets=settings.build.targets,
            max_context=settings.scheduler.max_context, max_batch=settings.build.max_batch,
            max_chunk=settings.build.max_chunk, calibration=calibration, dummy=dummy,
            revision=revision, lora=lora, mmproj=mmproj, text_only=text_only, force=force, progress=report,
            note=lost.append,
        )  # fmt: skip
    manifest = engine.manifest
    for line in lost:
        print(f"note: {line}", file=sys.stderr)
    if json:
        print_json({"path": str(engine.path), "fingerprint": manifest.fingerprint, "bytes": manifest.total_bytes})
    else:
        print(f"built {engine.path}: {manifest.model_id}, {manifest.dtype}, {human_bytes(manifest.total_bytes)}")
