"""Build an engine directory from a source or a unified checkpoint.

Lays out files and writes the manifest; `checkpoint.convert` converts, executors compute. It must not know how a
backend runs. Invariants: the output appears whole or not at all, and only when it opens; every byte of an engine was
compared with its checkpoint's digests while it was read.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wicore_trt.checkpoint.format import READ_AS, Checkpoint, open_checkpoint
from wicore_trt.checkpoint.hub import is_hub_id
from wicore_trt.checkpoint.names import kv_scale_name, weight_scale_name
from wicore_trt.checkpoint.records import FileRecord
from wicore_trt.engine.directory import ENGINE, EngineDir, describe_files, open_engine
from wicore_trt.engine.manifest import (
    DUMMY_SOURCE,
    DUMMY_WEIGHTS,
    LORA,
    MANIFEST_NAME,
    MAX_PAGE_TOKENS,
    MMPROJ,
    TEXT_ONLY,
    Manifest,
    compute_fingerprint,
    find_version,
)
from wicore_trt.engine.options import READ_BLOCKS, READ_IMAGES, Backend, BuildOptions, DummyModel, find_backend
from wicore_trt.engine.weights import hash_weights, place_weights
from wicore_trt.errors import CheckpointError, ConfigError, EngineFormatError, list_installed
from wicore_trt.files import is_present, make_printable
from wicore_trt.model.gemma3 import LM_HEAD
from wicore_trt.model.spec import MAX_RANKS
from wicore_trt.progress import Progress, count_progress, ignore_progress
from wicore_trt.scratch import replace_output
from wicore_trt.weight_format import PLAIN, Q4_0, QUANTIZED

if TYPE_CHECKING:
    from wicore_trt.checkpoint.convert import Calibration

KV_DTYPES = ("auto", "float32", "bfloat16", "float16", "fp8")
TOOLS = (
    "wicore-trt", "torch", "numpy", "safetensors", "tokenizers", "gguf", "triton", "tensorrt",
    "tensorrt-rtx-cu13-bindings",
)  # fmt: skip
_DUMMY_TOKENIZER = {
    "tokenizer.json": {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"<eos>": 1}, "unk_token": "<eos>"}},
    "tokenizer_config.json": {"eos_token": "<eos>"},
}
"""Tokenizer of one token, so that an engine without a source can be served by token ids."""


def build_engine(  # noqa: PLR0913 -- the public call is flat; inside, the options travel as one value
    source: str | Path,
    output: Path,
    *,
    backend: str = "torch",
    dtype: str = "auto",
    kv_dtype: str = "auto",
    tp_size: int = 1,
    page_tokens: int = 32,
    targets: Sequence[str] = (),
    max_context: int | None = None,
    max_batch: int = 8,
    max_chunk: int = 512,
    calibration: Calibration | None = None,
    dummy: DummyModel | None = None,
    revision: str | None = None,
    lora: Path | None = None,
    mmproj: Path | None = None,
    text_only: bool = False,
    force: bool = False,
    progress: Progress = ignore_progress,
    note: Callable[[str], None] | None = None,
) -> EngineDir:
    """Build the engine `output` from a source (hub id, directory, GGUF) or a unified checkpoint directory.
    With `dummy` only a model's sizes are given: weights are made up at load, and the manifest says so.
    `dtype="auto"` keeps a checkpoint's dtype, and FP8 of a source, which else becomes bfloat16. `kv_dtype="auto"` is
    the dtype of the activations; "fp8" is a KV cache in E4M3, with the checkpoint's KV scales or else unscaled.
    `page_tokens` is the KV page size in tokens. `max_context` limits sequences in tokens (None: the backend's choice,
    at most the model's limit); `max_batch` and `max_chunk` limit the steps of compiled engines. `calibration` measures
    static scales on the way; `revision` is the commit, branch or tag of a hub id; `lora` is the directory of an
    adapter to merge. `mmproj` is the GGUF file of a GGUF model's image encoder; `text_only` leaves the encoder out. An
    existing engine is replaced only with `force`. `note` gets a sentence for each kind of loss in converting, and on
    quantized sources. The environment variable SOURCE_DATE_EPOCH (seconds since 1970) sets the manifest's `created`.
    Raises ConfigError for options that do not fit the checkpoint or an output that is in the way. Raises
    CheckpointError for a bad source or a damaged checkpoint, EnvironmentUnfitError for a backend that is not here or
    a full disk."""
    names = [part.strip().lower() for target in targets for part in target.split(",")]  # "sm80,sm89" are two
    architectures = tuple(dict.fromkeys(filter(None, names)))
    options = BuildOptions(
        backend, dtype, kv_dtype, tp_size, page_tokens, architectures, max_context, max_batch, max_chunk,
        calibration, dummy, revision, lora, mmproj, text_only,
    )  # fmt: skip
    epoch = os.environ.get("SOURCE_DATE_EPOCH")
    try:
        created = datetime.fromtimestamp(int(epoch), UTC) if epoch else datetime.now(UTC)
    except (ValueError, OverflowError, OSError):
        fix = "Unset it or correct it."
        raise ConfigError(f"SOURCE_DATE_EPOCH is {epoch!r}; it must be seconds since 1970.", fix=fix) from None
    _check_options(options, source)
    compiler = find_backend(options.backend)
    with replace_output(output, ENGINE, force=force, source=None if dummy else source) as scratch:
        options = replace(options, targets=tuple(compiler.targets(options)))
        checkpoint = _checkpoint_of(source, scratch.work / "checkpoint", options, progress, note)
        checkpoint = _leave_vision(checkpoint, options, note or (lambda text: None))
        _check_fit(checkpoint, options)
        compiler.check(checkpoint, options)
        limit = checkpoint.spec.max_position_embeddings
        options = replace(options, max_context=options.max_context or compiler.default_context(limit))
        name = f"{DUMMY_SOURCE}{dummy.name}" if dummy else make_printable(str(source))
        manifest = _lay_out(checkpoint, scratch.directory, options, compiler, name, progress)
        manifest = replace(manifest, created=created.isoformat(timespec="seconds"))
        (scratch.directory / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")
        try:  # weights are not read again: their digests were computed while they were written
            engine = open_engine(scratch.directory, verify=False)
        except EngineFormatError as error:
            said = error.message.replace(str(scratch.directory), scratch.output.name)
            fix = f"{scratch.output} was left as it was. Check the model's files."
            raise CheckpointError(f"{name} makes no engine that opens: {said}", fix=fix) from error
        scratch.publish_output()
    return replace(engine, path=scratch.output)


def is_unified_checkpoint(path: Path) -> bool:
    """Return True for a directory with `config.json` and `rank0.safetensors`."""
    return os.path.isdir(path) and is_present(path / "rank0.safetensors") and is_present(path / "config.json")


def make_blocks_error(backend: str) -> ConfigError:
    """Make the refusal of Q4_0 weights by a backend without products for them."""
    return ConfigError(
        f"backend {backend!r} does not compute with q4_0 weights.",
        fix=f"Use --backend {' or '.join(sorted(READ_BLOCKS))}, or --dtype bfloat16 or fp8.",
    )


def _check_options(options: BuildOptions, source: str | Path) -> None:
    if options.kv_dtype not in KV_DTYPES:
        raise ConfigError(f"kv_dtype {options.kv_dtype!r} is unknown.", fix=f"Known: {', '.join(KV_DTYPES)}.")
    if options.dtype == Q4_0.storage and options.backend not in READ_BLOCKS:
        raise make_blocks_error(options.backend)
    if options.dummy and options.backend != "triton":
        raise ConfigError("only backend 'triton' builds engines without weights.", fix="Add --backend triton.")
    sourceless = options.dummy is not None or is_unified_checkpoint(Path(source))
    if options.mmproj is not None and (options.text_only or sourceless):
        what = "--mmproj is for a GGUF model; checkpoints, made-up weights and --text-only take none."
        raise ConfigError(what, fix="Leave it out, or give the GGUF file that it belongs to.")
    if options.lora is not None and sourceless:
        fix = "Give the model that the adapter was trained on, or convert it with --lora."
        raise ConfigError("an adapter is merged into a source, which a checkpoint or made-up weights are not.", fix=fix)
    if options.revision and (is_present(Path(source)) or not is_hub_id(str(source))):
        fix = "Leave --revision out."
        raise ConfigError(f"--revision is a commit, branch or tag of a hub id, and {source} is none.", fix=fix)
    if not 1 <= options.page_tokens <= MAX_PAGE_TOKENS or options.page_tokens & (options.page_tokens - 1):
        raise ConfigError(f"page_tokens must be a power of two up to {MAX_PAGE_TOKENS}, got {options.page_tokens}.")
    if not 1 <= options.tp_size <= MAX_RANKS:
        raise ConfigError(f"tp must be 1 to {MAX_RANKS}, got {options.tp_size}.")


def _checkpoint_of(
    source: str | Path, work: Path, options: BuildOptions, progress: Progress, note: Callable[[str], None] | None
) -> Checkpoint:
    if options.dummy:  # a checkpoint without files; "auto", and the 16-bit parts of "fp8", are bfloat16
        base = options.dtype if options.dtype in PLAIN else "bfloat16"
        origin = {"source": f"{options.dummy.name} (dummy weights)"}
        return Checkpoint(
            path=Path(), config={"wicore": origin}, spec=options.dummy.spec, dtype=base,
            weights=QUANTIZED.get(options.dtype, PLAIN[base]), tp_size=options.tp_size, rank_files=[],
            tokenizer_files=[], vision=options.dummy.vision, vision_file=None, files={},
        )  # fmt: skip
    from wicore_trt.checkpoint.convert import check_disk_room, convert

    if is_unified_checkpoint(Path(source)) and not options.calibration:
        checkpoint = open_checkpoint(Path(source))
        if checkpoint.spec.tie_word_embeddings:  # its weights are copied, not linked: an engine has one embedding
            check_disk_room(work.parent, sum(checkpoint.files[path.name].bytes for path in checkpoint.rank_files))
        return checkpoint
    return convert(
        source, work, dtype=options.dtype, tp_size=options.tp_size, for_engine=True, revision=options.revision,
        lora=options.lora, mmproj=options.mmproj, text_only=options.text_only, calibration=options.calibration,
        progress=progress, note=note,
    )  # fmt: skip


def _leave_vision(checkpoint: Checkpoint, options: BuildOptions, note: Callable[[str], None]) -> Checkpoint:
    """Return the checkpoint without an image encoder where the engine gets none."""
    reads = checkpoint.vision and options.backend in READ_IMAGES and not options.text_only
    if checkpoint.vision_file is None or reads:
        return checkpoint
    if checkpoint.vision is None:
        note(f"left aside: {checkpoint.vision_file.name} of an older checkpoint; convert again for images.")
    elif not options.text_only:
        note(f"left aside: the image encoder; backend {options.backend} reads text alone.")
    return replace(checkpoint, vision=None, vision_file=None)


def _check_fit(checkpoint: Checkpoint, options: BuildOptions) -> None:
    """Check that options describe the checkpoint: building does not convert a second time."""
    have = checkpoint.weights.storage
    if options.dtype not in ("auto", have):
        fix = f"Convert the source with --dtype {options.dtype}."
        raise ConfigError(f"the checkpoint is {have}, not {options.dtype}.", fix=fix)
    if checkpoint.weights.group and options.backend not in READ_BLOCKS:
        raise make_blocks_error(options.backend)
    if options.tp_size not in (1, checkpoint.tp_size):
        fix = f"Convert the source with --tp {options.tp_size}."
        raise ConfigError(f"the checkpoint is split for {checkpoint.tp_size} ranks, not {options.tp_size}.", fix=fix)
    if not options.dummy:
        from wicore_trt.checkpoint.convert import check_has_tokenizer

        check_has_tokenizer(checkpoint.source, checkpoint.tokenizer_files)
    limit = checkpoint.spec.max_position_embeddings
    if options.max_context is not None and not 1 <= options.max_context <= limit:
        raise ConfigError(f"max_context {options.max_context} is outside [1, {limit}], the model's limit.")


def _lay_out(
    checkpoint: Checkpoint, directory: Path, options: BuildOptions, compiler: Backend, source: str, progress: Progress
) -> Manifest:
    weights: dict[str, FileRecord] = {}
    kv_dtype = options.kv_dtype_of(checkpoint)
    paths = [*checkpoint.rank_files, *filter(None, [checkpoint.vision_file])]
    moved = count_progress(progress, "weights", sum(checkpoint.files[path.name].bytes for path in paths))
    # A tied head is the embedding: one copy is enough.
    drop = {LM_HEAD, weight_scale_name(LM_HEAD)} if checkpoint.spec.tie_word_embeddings else set()
    if kv_dtype != "fp8":  # kernels for other KV caches refuse these scales
        drop |= {kv_scale_name(layer) for layer in range(checkpoint.spec.num_layers)}
    for path in paths:
        placed, damaged = directory / path.name, partial(checkpoint.make_damage_error, path.name)
        record = checkpoint.files[path.name]
        weights[path.name] = place_weights(path, placed, record, drop=drop, damaged=damaged, moved=moved)
    for path in checkpoint.tokenizer_files:
        (directory / path.name).write_bytes(checkpoint.read(path.name))
    compiled = compiler.compile(checkpoint, directory, options, progress)
    files = {LORA: options.lora, MMPROJ: options.mmproj}
    more: dict[str, Any] = {key: file and make_printable(str(file)) for key, file in files.items()}
    more |= {TEXT_ONLY: options.text_only, READ_AS: checkpoint.config["wicore"].get(READ_AS)}
    more[DUMMY_WEIGHTS] = options.dummy is not None
    compiled |= {key: value for key, value in more.items() if value}
    for name, content in _DUMMY_TOKENIZER.items() if options.dummy else ():
        (directory / name).write_text(json.dumps(content) + "\n", encoding="utf-8")
    form = checkpoint.weights
    manifest = Manifest(
        spec=checkpoint.spec, weights_hash=hash_weights(weights.values()), dtype=form.storage, kv_dtype=kv_dtype,
        quantization={**form.describe(), "base_dtype": checkpoint.dtype} if form.algo else None,
        tp_size=checkpoint.tp_size, fingerprint="", model_id=model_id(checkpoint.source), backend=options.backend,
        targets=list(options.targets), compiled=compiled, page_tokens=options.page_tokens,
        max_context=options.max_context or checkpoint.spec.max_position_embeddings,
        files=describe_files(directory, weights),  # but weights, a few MB
        tools={"python": platform.python_version(), **list_installed(TOOLS)},
        source=source, revision=checkpoint.revision, vision=checkpoint.vision, created="",
    )  # fmt: skip
    manifest = replace(manifest, format_version=find_version(form))
    return replace(manifest, fingerprint=compute_fingerprint(manifest))


def model_id(source: str) -> str:
    """Return the model's name for clients. A hub id is kept, also of a snapshot in the hub's cache; else it is
    the file's or directory's name without `.gguf`."""
    path = Path(source)
    if is_hub_id(source) and not is_present(path):
        return source
    if path.parent.name == "snapshots" and path.parent.parent.name.startswith("models--"):
        return path.parent.parent.name.removeprefix("models--").replace("--", "/")
    return path.name.removesuffix(".gguf")
