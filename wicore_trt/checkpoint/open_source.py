"""Choose the reader of a source: a Hugging Face directory or hub id, a GGUF file, an adapter merged into either.

It must not know tensors or names. Invariant: each reference opens as one kind of source or is refused with the fix.
"""

from __future__ import annotations

import os
from pathlib import Path

from wicore_trt.checkpoint import hub
from wicore_trt.checkpoint.gguf import GgufSource
from wicore_trt.checkpoint.gguf_file import choose_gguf, list_mmproj
from wicore_trt.checkpoint.lora import LoraSource
from wicore_trt.checkpoint.source import HfSource, Source
from wicore_trt.errors import CheckpointError
from wicore_trt.files import UntrustedFiles, is_present, quote_arg


def open_source(
    ref: str | Path,
    *,
    revision: str | None = None,
    lora: Path | None = None,
    mmproj: Path | None = None,
    text_only: bool = False,
) -> Source:
    """Open a directory, a GGUF file or a hub id (`owner/name`, at `revision`); merge the adapter in the directory
    `lora`. The image encoder is left out if `text_only`; a GGUF file's is in the file `mmproj`, or in itself.
    Raises CheckpointError for anything missing, truncated, gated, unreachable or not Gemma 3. Raises
    EnvironmentUnfitError for a GGUF file when the extra `gguf` is not installed."""
    base = _open_base(ref, revision, lora, mmproj, text_only)
    return base if lora is None else LoraSource(base, lora)


def _open_base(
    ref: str | Path, revision: str | None, lora: Path | None, mmproj: Path | None, text_only: bool
) -> Source:
    path = Path(os.path.expanduser(ref))  # an unknown ~name stays as it is
    if is_present(path) and not os.path.isdir(path):
        if path.suffix == ".safetensors":
            fix = f"Give its directory: {quote_arg(path.parent)}"
            raise CheckpointError(f"{path} is one file of a model.", fix=fix)
        return GgufSource(path, mmproj, text_only=text_only)
    if os.path.isdir(path):
        if is_present(path / "engine.json") and not is_present(path / "config.json"):
            fix = f"Serve it (wicore serve {quote_arg(path)}), or build from its model."
            raise CheckpointError(f"{path} is an engine; a build needs a model.", fix=fix)
        safetensors = is_present(path / "config.json") and any(path.glob("*.safetensors"))
        gguf = None if safetensors else choose_gguf(path)
        if gguf is None:
            _refuse_mmproj(mmproj)
            return HfSource(path, name=str(ref), lora=lora, text_only=text_only)
        UntrustedFiles(path, fix="Give the path of the GGUF file itself.").check_file(gguf)
        beside = [] if mmproj or text_only or gguf in list_mmproj(path) else list_mmproj(path)
        source = GgufSource(gguf, mmproj or (beside[0] if len(beside) == 1 else None), text_only=text_only)
        if beside:
            taken = f"the image encoder is that of {beside[0].name}, which lies beside the model."
            many = f"left aside: {len(beside)} image encoders; --mmproj {quote_arg(beside[0])} takes the first."
            source.notes.append(taken if len(beside) == 1 else many)
        return source
    if not isinstance(ref, str) or not hub.is_hub_id(ref):
        raise CheckpointError(
            f"{ref} does not exist.",
            fix="Give a model directory, a .gguf file or a hub id such as google/gemma-3-27b-it, or run: wicore fetch "
            "gemma3-270m",
        )
    _refuse_mmproj(mmproj)
    snapshot = hub.download_snapshot(ref, revision)
    return HfSource(snapshot, name=ref, revision=snapshot.name, text_only=text_only)


def _refuse_mmproj(mmproj: Path | None) -> None:
    if mmproj is not None:
        raise CheckpointError(f"{mmproj} belongs to a GGUF model, and this model is none.", fix="Leave --mmproj out.")
