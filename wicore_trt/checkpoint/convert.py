"""Convert a source to a unified checkpoint.

Only a block of rows is in memory, whatever the model's size. The directory gets its name when everything is on disk
(`wicore_trt.scratch`). Files are read and written by `source` and `safetensors_io` alone. Invariant: an interrupted
run leaves nothing that open_checkpoint accepts.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from wicore_trt.checkpoint.blocks import HEAD_BLOCKS, LINEAR_BLOCKS, fits_bfloat16, quantize_q4_0
from wicore_trt.checkpoint.cast_report import CastReport, check_cast, check_finite_rows
from wicore_trt.checkpoint.format import (
    CHECKPOINT,
    READ_AS,
    TAGS,
    Checkpoint,
    CheckpointForm,
    build_config,
    open_checkpoint,
    vision_entries,
    write_config,
)
from wicore_trt.checkpoint.names import (
    HF_EMBEDDING,
    Role,
    UnifiedTensor,
    activation_scale_name,
    kv_scale_name,
    linear_kind,
    unified_tensors,
)
from wicore_trt.checkpoint.open_source import open_source
from wicore_trt.checkpoint.quantize import FLOATS, from_float32, quantize_e4m3_per_channel, to_float32
from wicore_trt.checkpoint.records import FileRecord, record_file
from wicore_trt.checkpoint.safetensors_io import TAG_BYTES, SafetensorsWriter, TensorEntry, split_rows
from wicore_trt.checkpoint.sharding import Shard, shard_of
from wicore_trt.checkpoint.source import Source
from wicore_trt.errors import CheckpointError, ConfigError, EnvironmentUnfitError
from wicore_trt.files import is_present, make_printable
from wicore_trt.model.gemma3 import LM_HEAD
from wicore_trt.progress import Progress, count_progress, ignore_progress
from wicore_trt.scratch import replace_output
from wicore_trt.weight_format import FP8, LAYOUTS, PLAIN, QUANTIZED, VISION, WeightFormat

DTYPES = ("auto", *PLAIN, *QUANTIZED)

_SPARE_BYTES = 64 << 20  # tokenizer files and headers
_DTYPE_OF_SOURCE = {"BF16": "bfloat16", "F16": "float16"}


@dataclass(frozen=True, slots=True)
class StaticScales:
    """Static scales: float32 [1] by tensor name of the checkpoint; `origin` is what `wicore.calibration` records."""

    scales: dict[str, np.ndarray]
    origin: dict[str, str | int]


class Calibration(Protocol):
    """Measures the scales of activations and, with `kv_scales`, of the KV cache."""

    @property
    def kv_scales(self) -> bool: ...

    def of_source(self, source: Source, tokenizer_files: Path, progress: Progress = ignore_progress) -> StaticScales:
        """Measure the scales of a source whose tokenizer lies in `tokenizer_files`.
        Raises CheckpointError when the model computes numbers that are not finite."""

    def of_checkpoint(
        self, path: str | Path, output: str | Path, *, force: bool = False, progress: Progress = ignore_progress
    ) -> Checkpoint:
        """Write the unified checkpoint `path`, with static scales, to `output`, which may be the same directory."""


def convert(  # noqa: PLR0913 -- the public call is flat
    source: str | Path,
    output: str | Path,
    *,
    dtype: str = "auto",
    tp_size: int = 1,
    for_engine: bool = False,
    revision: str | None = None,
    lora: Path | None = None,
    mmproj: Path | None = None,
    text_only: bool = False,
    calibration: Calibration | None = None,
    force: bool = False,
    progress: Progress = ignore_progress,
    note: Callable[[str], None] | None = None,
) -> Checkpoint:
    """Convert `source` (see open_source) into the unified checkpoint directory `output`. `dtype` "auto" keeps FP8 of
    the source, and bfloat16 or float16 if not `for_engine`; else it is bfloat16. "fp8" keeps the source's FP8 or
    quantizes the linears (`weight_format.FP8`); embedding and head are bfloat16. "q4_0" keeps linears that the source
    has in Q4_0 or Q4_1, bit for bit, and quantizes others (`blocks.quantize_q4_0`). It keeps embedding and head in
    Q8_0, Q6_K or float16 where bfloat16 would round them. Norms are always float32. The source's static scales are
    kept; `calibration` puts others in their place, measured in the source's precision: of activations for fp8, of KV
    for any dtype. With it the source may be a unified checkpoint (see Calibration.of_checkpoint). `lora` is the
    directory of an adapter to merge, `mmproj` the GGUF file of a GGUF model's image encoder; `text_only` leaves the
    encoder out. `force` replaces an existing directory at the end. `for_engine` requires disk space for an engine, too.
    `note` gets a sentence for each loss, on quantized sources, and for each decision between contradictions.
    Raises CheckpointError for a bad source and for a model that tp_size does not divide. It is raised, too, for a
    weight that is not finite or beyond the range of the new dtype, naming tensor and row. Raises ConfigError for an
    unknown dtype, a bad calibration text or an output that exists; EnvironmentUnfitError when the disk is too small."""
    if dtype not in DTYPES:
        raise ConfigError(f"dtype {dtype!r} is unknown.", fix=f"Use one of {', '.join(DTYPES)}.")
    is_checkpoint = is_present(Path(source) / "rank0.safetensors")
    if lora is not None and is_checkpoint:
        fix = "Give the model that it was converted from."
        raise ConfigError(f"{source} is a checkpoint, and an adapter is merged into a source.", fix=fix)
    if calibration and is_checkpoint:
        old = open_checkpoint(source)
        form = f"{old.weights.storage} for tp {old.tp_size}"
        if dtype not in ("auto", old.weights.storage) or tp_size not in (1, old.tp_size):
            fix = f"Leave --dtype and --tp out, or convert {old.source}."
            raise ConfigError(f"{old.path} is a checkpoint of {form}; it can be calibrated, not cast.", fix=fix)
        return calibration.of_checkpoint(source, output, force=force, progress=progress)
    if calibration and dtype != FP8.storage and not calibration.kv_scales:
        raise ConfigError(f"Without KV scales a {dtype} checkpoint has nothing to calibrate.", fix="Use --dtype fp8.")
    with replace_output(Path(output), CHECKPOINT, force=force, source=source) as scratch:
        progress("read", 0, 1)
        opened = open_source(source, revision=revision, lora=lora, mmproj=mmproj, text_only=text_only)
        opened.spec.shard(0, tp_size)
        if dtype == "auto":
            own = opened.tensors[unified_tensors(opened.spec)[2].sources[0]].dtype  # of the first linear
            dtype = opened.auto_dtype or _DTYPE_OF_SOURCE.get("" if for_engine else own, "bfloat16")
        origin = {"lora": lora and make_printable(str(lora)), "mmproj": mmproj and make_printable(str(mmproj))}
        lost = _Conversion(opened, scratch.directory, dtype, tp_size, calibration, progress).write_checkpoint(
            for_engine, origin | {"text_only": text_only}
        )
        opened.check_unchanged()
        open_checkpoint(scratch.directory)  # a checkpoint that does not open replaces none
        scratch.publish_output()
    if note:
        for line in lost:
            note(line)
    return open_checkpoint(output)


def check_has_tokenizer(source: str, files: Iterable[Path]) -> None:
    """Raise CheckpointError for a source without tokenizer.json, whose engine could not answer text."""
    if not any(file.name == "tokenizer.json" for file in files):
        fix = "Put the model's tokenizer files beside its weights and build again."
        raise CheckpointError(f"{source} has no tokenizer.json, and an engine without one can answer nothing.", fix=fix)


class _Conversion:
    def __init__(
        self,
        source: Source,
        directory: Path,
        dtype: str,
        tp_size: int,
        calibration: Calibration | None,
        progress: Progress,
    ) -> None:
        self._source, self._directory = source, directory
        self._dtype = "bfloat16" if dtype in QUANTIZED else dtype
        self._read_as = source.describe_reading(dtype, None if calibration else source.static_scales)
        self._calibration, own = calibration, {} if calibration else source.static_scales
        self._linears = [(t, n) for t in unified_tensors(source.spec) if t.role is Role.LINEAR for n in t.sources]
        weights = QUANTIZED.get(dtype, PLAIN[self._dtype])
        weights = self._find_block_format(weights) if weights.group else weights
        static = calibration is not None or activation_scale_name(self._linears[0][0].name) in own
        self._weights = weights.calibrated if static else weights
        kv_scales = calibration.kv_scales if calibration else kv_scale_name(0) in own
        self._form = CheckpointForm(source.spec, self._dtype, self._weights, tp_size, kv_scales=kv_scales)
        self._progress, self._report = progress, CastReport()
        self._scales: Mapping[str, np.ndarray] = own
        self._entries = [self._form.list_entries(rank) for rank in range(tp_size)]
        self._vision = vision_entries(source.vision, self._dtype) if source.vision else []
        self._total = sum(_count_bytes(entries) for entries in (*self._entries, self._vision))

    def _find_block_format(self, weights: WeightFormat) -> WeightFormat:
        """Return `weights` with the minimums that the source's Q4_1 linears have, and the storage of its head."""
        source = self._source
        kinds = {linear_kind(t.name) for t, name in self._linears if source.find_blocks(name) == "Q4_1"}
        names = {t.sources[0]: t.role for t in unified_tensors(source.spec) if t.role in (Role.EMBEDDING, Role.HEAD)}
        heads = {name: self._find_head(name) for name in names}
        head = next(iter(heads.values())) if len({*heads.values()}) == 1 else ""
        self._rounded = [
            f"the {names[name].value}, {source.tensors[name].dtype} in the source, is rounded to {self._dtype}."
            for name, kept in heads.items()
            if not head and (kept or source.tensors[name].dtype not in FLOATS)
        ]
        return replace(weights, minimums=tuple(sorted(kinds)), head=head)

    def _find_head(self, name: str) -> str:
        """Find the storage that holds an embedding or head as published, "" for the base dtype."""
        if (kind := self._source.find_blocks(name)) in HEAD_BLOCKS:
            return HEAD_BLOCKS[kind][0]
        info = self._source.tensors[name]
        pieces = split_rows(info.shape) if info.dtype == "F16" else []
        blocks = (self._source.read_rows(name, *piece) for piece in pieces)
        return "float16" if any(tag == "F16" and not fits_bfloat16(block) for block, tag in blocks) else ""

    def _describe_blocks(self) -> list[str]:
        """Return sentences on what is kept as published and what is not, for the dtype of this conversion."""
        source, linears = self._source, [name for _, name in self._linears]
        kept = [n for n in linears if source.find_blocks(n) in LINEAR_BLOCKS]
        if not self._weights.group:
            advice = f"{len(kept)} of {len(linears)} linears have 4 bits that --dtype q4_0 keeps, bit for bit."
            return [advice] if 2 * len(kept) > len(linears) else []
        other = [source.tensors[n].dtype for n in linears if n not in {*kept}]
        again = sorted({kind for kind in other if kind not in FLOATS})
        compare = "wicore bench perplexity --engine BF16_ENGINE --engine Q4_0_ENGINE"
        said = [f"{len(kept)} of {len(linears)} linears are kept as published, bit for bit."] if kept else []
        if other:
            said.append(f"{len(other)} linears are quantized to Q4_0 after training; to see the loss: {compare}")
        if again:
            said.append(f"they are quantized twice, as the source has {', '.join(again)}: the original loses less.")
        return [*said, *self._rounded]

    def write_checkpoint(self, for_engine: bool, options: dict[str, Any]) -> list[str]:
        """Return sentences on what casts lost, and on tokens that the model lacks. `options` go into config.json."""
        tied = self._source.spec.tie_word_embeddings  # the engine leaves the second embedding out, so it is no link
        placed = [entry for entries in self._entries for entry in entries if not entry[0].startswith(LM_HEAD)]
        check_disk_room(self._directory, self._total + (_count_bytes(placed) if for_engine and tied else 0))
        tokenizer = self._source.write_tokenizer(self._directory)
        if for_engine:  # an engine needs one, and weights take hours
            check_has_tokenizer(self._source.name, tokenizer)
        from wicore_trt.checkpoint.tokenizer_check import check_tokenizer

        spec, vision = self._source.spec, self._source.vision
        notes = check_tokenizer(self._directory, self._source.name, spec.vocab_size, vision.marks if vision else ())
        source = make_printable(self._source.name)
        origin = {"source": source, "revision": self._source.revision, READ_AS: self._read_as, **options}
        if self._calibration:
            found = self._calibration.of_source(self._source, self._directory, self._progress)
            self._scales, origin["calibration"] = found.scales, found.origin
        self._progress("read", 1, 1)
        self._moved = count_progress(self._progress, "convert", self._total)
        files = self._write_ranks()
        if self._vision:
            files[VISION] = self._write_vision()
        files |= {file.name: record_file(file) for file in tokenizer}
        origin |= {"vision": vision and vision.to_dict(), "flushed_to_zero": self._report.flushed_to_zero}
        write_config(self._directory, build_config(self._form, files, origin))
        read_as = filter(None, [self._read_as])
        return [*read_as, *self._source.notes, *notes, *self._describe_blocks(), *self._report.describe_losses()]

    def _write_ranks(self) -> dict[str, FileRecord]:
        with ExitStack() as stack:
            writers = [
                stack.enter_context(SafetensorsWriter(self._directory / f"rank{r}.safetensors", entries))
                for r, entries in enumerate(self._entries)
            ]
            for tensor in unified_tensors(self._source.spec):
                self._write_tensor(tensor, writers)
        return {w.path.name: FileRecord(w.size, w.digest, w.digests) for w in writers}

    def _write_vision(self) -> FileRecord:
        with SafetensorsWriter(self._directory / VISION, self._vision) as writer:
            for name, tag, shape in self._vision:
                for start, stop in split_rows(shape):
                    block = self._cast_rows(name, (start, stop), tag)
                    if name.endswith(".bias") and "norm" not in name:  # backends round it, as the product's weight
                        run = TAGS[self._dtype]
                        check_cast(self._source.place_of(name), name, start, block, from_float32(block, run), run)
                    self._moved(writer.write(name, block))
        return FileRecord(writer.size, writer.digest, writer.digests)

    def _write_tensor(self, tensor: UnifiedTensor, writers: list[SafetensorsWriter]) -> None:
        form = self._form
        shards = [shard_of(tensor, form.spec, rank, form.tp_size) for rank in range(form.tp_size)]
        storage, entries = form.find_storage(tensor.role), form.list_parts(tensor)
        later: list[list[list[np.ndarray]]] = [[[] for _ in entries[1:]] for _ in shards]
        for part, name in enumerate(tensor.sources):
            shape = self._source.tensors[name].shape
            tied_copy = tensor.sources == (HF_EMBEDDING,) and tensor.role is not Role.EMBEDDING
            for start, stop in split_rows(shape):
                norm = tensor.role is Role.NORM
                if storage in LAYOUTS:
                    blocks = self._quantize_rows(tensor, name, (start, stop), counted=not tied_copy)
                else:
                    blocks = [self._cast_rows(name, (start, stop), TAGS[storage], norm=norm, counted=not tied_copy)]
                for shard, writer, kept in zip(shards, writers, later, strict=True):
                    low, high = max(start, shard.rows[part][0]), min(stop, shard.rows[part][1])
                    if low < high:
                        values, *more = (_take_part(b, low - start, high - start, shard, shape) for b in blocks)
                        self._moved(writer.write(tensor.name, values))
                        for pieces, piece in zip(kept, more, strict=True):
                            pieces.append(piece)
        for writer, kept in zip(writers, later, strict=True):
            for (name, *_), pieces in zip(entries[1:], kept, strict=True):
                for piece in pieces:
                    self._moved(writer.write(name, piece))
        for name in form.list_static(tensor):
            for writer in writers:
                self._moved(writer.write(name, self._scales[name]))

    def _cast_rows(
        self, name: str, rows: tuple[int, int], tag: str, *, norm: bool = False, counted: bool = True
    ) -> np.ndarray:
        """Return rows of one source tensor stored as `tag`. A `norm` of the text model is its factor, `counted` losses
        go into the report."""
        place = self._source.place_of(name)
        if norm:
            stored = self._source.read_norm(name, *rows)
            check_finite_rows(place, name, rows[0], stored, "F32")
            return stored
        block, have = self._source.read_rows(name, *rows)
        if tag == have:
            check_finite_rows(place, name, rows[0], block, have)
            return block
        values = to_float32(block, have)
        stored = from_float32(values, tag)
        check_cast(place, name, rows[0], values, stored, tag)
        if tag != "F32" and counted:
            self._report.count_losses(name, values, stored, tag)
        return stored

    def _quantize_rows(
        self, tensor: UnifiedTensor, name: str, rows: tuple[int, int], *, counted: bool
    ) -> list[np.ndarray]:
        """Return the parts that store rows of one source tensor of a quantized `tensor`, as `list_parts` names them."""
        place, linear, kind = self._source.place_of(name), tensor.role is Role.LINEAR, self._source.find_blocks(name)
        split = LINEAR_BLOCKS.get(kind) if linear else HEAD_BLOCKS[kind][1]
        if self._weights.fp8 and (published := self._source.read_e4m3(name, *rows)):
            return [*published]
        if self._weights.fp8 or split is None:
            block, have = self._source.read_rows(name, *rows)
            check_finite_rows(place, name, rows[0], block, have)
            values = to_float32(block, have)
            if self._weights.fp8:
                stored, scale = quantize_e4m3_per_channel(values)
                if counted:
                    self._report.count_losses(name, values, stored, LAYOUTS["fp8"].tag)
                return [stored, scale]
            blocks = quantize_q4_0(values)
            check_cast(place, f"a block's scale of {name}", rows[0], values / np.float32(8), blocks.scales, "F16")
        else:
            blocks = split(self._source.read_blocks(name, *rows))
        for part in blocks.parts[1:]:
            check_finite_rows(place, f"the scales of {name}", rows[0], part, "F16" if part.itemsize == 2 else "F32")
        if linear and linear_kind(tensor.name) in self._weights.minimums and blocks.minimums is None:
            least, blocks = blocks.scales.astype(np.float32) * np.float32(-8), blocks.add_minimums()
            assert blocks.minimums is not None
            what = f"beside Q4_1 each block needs its least weight, and that of {name}"
            check_cast(place, what, rows[0], least, blocks.minimums, "F16")
        return blocks.parts


def _take_part(part: np.ndarray, low: int, high: int, shard: Shard, shape: tuple[int, ...]) -> np.ndarray:
    """Take rows [low, high) of a part of a weight of this `shape`, and of these the shard's columns."""
    held = part[low:high]
    if shard.columns is None or held.ndim == 1:
        return held
    first, last = (column * held.shape[1] // shape[1] for column in shard.columns)
    return held[:, first:last]


def _count_bytes(entries: list[TensorEntry]) -> int:
    return sum(prod(shape) * TAG_BYTES[tag] for _, tag, shape in entries)


def check_disk_room(directory: Path, nbytes: int) -> None:
    """Raise EnvironmentUnfitError when `nbytes` of weights, and the files that go with them, do not fit on the disk."""
    free, needed = shutil.disk_usage(directory).free, nbytes + _SPARE_BYTES
    if free < needed:
        problem = f"This needs {_format_bytes(needed)} on disk, and {_format_bytes(free)} are free there."
        raise EnvironmentUnfitError(problem, fix="Free some space or choose another output.")


def _format_bytes(count: int) -> str:
    return f"{count / 1e9:.1f} GB" if count >= 1e9 else f"{count / 1e6:.1f} MB"
