"""`wicore convert`: a unified checkpoint from a source."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from wicore_trt.cli import _options


def command(
    source: Annotated[str, Argument(help="Hub id, Hugging Face directory, GGUF file, or checkpoint to calibrate.")],
    output: Annotated[Path, Argument(help="Checkpoint directory to write.")],
    dtype: Annotated[str, Option(help="auto, float32, bfloat16, float16, fp8 or q4_0. auto: the source's.")] = "auto",
    tp: Annotated[int, Option(min=1, max=64, metavar="N", help="GPUs to split the weights over.")] = 1,
    revision: Annotated[str | None, Option(help="Branch, tag or commit of a hub id.")] = None,
    lora: _options.LoraOption = None,
    mmproj: _options.MmprojOption = None,
    text_only: _options.TextOnlyOption = False,
    calibrate: Annotated[
        Path | None, Option(help="UTF-8 text to measure static FP8 scales on, in place of scales per token.")
    ] = None,
    calibrate_tokens: _options.CalibrateTokensOption = 2048,
    no_kv_scales: _options.NoKVScalesOption = False,
    force: Annotated[bool, Option("--force", help="Replace an existing checkpoint.")] = False,
    json: Annotated[bool, Option("--json", help="Print the result as JSON.")] = False,
) -> None:
    """Convert a model into TensorRT-LLM's checkpoint layout, a few rows at a time.

    Examples:  wicore convert google/gemma-3-27b-it ckpt/ --dtype fp8   |   wicore convert model.gguf ckpt/
    A checkpoint that is there already gets scales:  wicore convert ckpt/ ckpt/ --calibrate text.txt --force
    """
    import sys
    import time

    from wicore_trt.checkpoint.convert import convert
    from wicore_trt.cli._ui import human_bytes, print_json, progress

    start, lost = time.monotonic(), list[str]()
    calibration = _options.make_calibration(calibrate, calibrate_tokens, not no_kv_scales)
    with progress(quiet=json) as report:
        checkpoint = convert(
            source, output, dtype=dtype, tp_size=tp, revision=revision, lora=lora, mmproj=mmproj,
            text_only=text_only, calibration=calibration, force=force, progress=report, note=lost.append,
        )  # fmt: skip
    kind = checkpoint.weights.storage
    total = sum(record.bytes for record in checkpoint.files.values())
    if not any(file.name == "tokenizer.json" for file in checkpoint.tokenizer_files):
        print("warning: the source has no tokenizer.json; an engine will need one.", file=sys.stderr)
    if json:
        print_json({
            "path": str(checkpoint.path), "dtype": kind, "tp_size": checkpoint.tp_size, "bytes": total,
            "seconds": round(time.monotonic() - start, 3),
            "flushed_to_zero": checkpoint.config["wicore"]["flushed_to_zero"], "notes": lost,
            "quantization": checkpoint.weights.algo, "kv_scales": checkpoint.kv_scales,
            "vision": checkpoint.vision is not None, "revision": checkpoint.revision,
        })  # fmt: skip
        return
    for line in lost:
        print(f"note: {line}", file=sys.stderr)
    print(f"converted {checkpoint.path}: {kind}, tp {checkpoint.tp_size}, {human_bytes(total)}")
