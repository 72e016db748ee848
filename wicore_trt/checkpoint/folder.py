"""Classify the files beside the configuration in a Hugging Face model's directory.

One table has the names that hubs, trainers and converters leave. It knows no contents. Invariant: every entry of a
directory is read, known to mean nothing to the model, reported to the user as ignored, or refused by name.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from fnmatch import fnmatchcase
from pathlib import Path

from wicore_trt.errors import CheckpointError, list_some, named
from wicore_trt.files import is_present, quote_arg

ADAPTER = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_BF16 = "Give the model in BF16, or as a GGUF file."

_KINDS = {  # a file that says what the whole directory is, where config.json is missing or says less
    "model_index.json": ("a diffusers pipeline", "WiCore builds Gemma 3 text models."),
    "modules.json": (
        "a sentence-transformers model (EmbeddingGemma), which writes no text",
        "WiCore serves chat models.",
    ),
    "mlc-chat-config.json": ("an MLC model", _BF16),
    "adapters.safetensors": ("an adapter of MLX", "Fuse it into its base with mlx_lm.fuse, and give the result."),
    "adapters.npz": ("an adapter of MLX", "Fuse it into its base with mlx_lm.fuse, and give the result."),
    "non_lora_trainables.bin": ("a part of a model that trained beside a LoRA adapter", "Merge all with the trainer."),
    "snapshots": ("a model's folder in the cache of Hugging Face", "Give the directory of a commit in snapshots/."),
    "blobs": ("a store of Ollama", "Export the model as GGUF, or give the largest file in blobs/."),
}
_NOTHING = (  # documents, pictures, what trainers keep for themselves
    ".*", "LICENSE*", "NOTICE*", "README*", "*.md", "*.txt", "*.rst", "*.pdf", "*.html", "*.png", "*.jpg", "*.jpeg",
    "*.gif", "*.svg", "*.webp", "*.mp4", "*.csv", "*.tsv", "*.jsonl", "*.log", "*.yaml", "*.yml", "*.toml", "*.py",
    "*.ipynb", "*.sh", "*.jinja", "*.tfevents.*", "events.out.*", "optimizer*", "scheduler*", "scaler*", "rng_state*",
    "random_states*", "trainer_state.json", "training_args.*", "*_results.json", "*_states.pt", "*.distcp",
    "sampler*.bin",
    "dl_state_dict*", "latest*", "zero_to_fp32*", "tokenizer*", "vocab.json", "merges.txt", "*preprocessor_config.json",
    "value_head.*", "v_head.*", "params.json", "args.json", "imatrix*", "*.lock", "*.sha256", "*.asc", "*.sig",
)  # fmt: skip
_OTHER_FORMS = (  # the same weights once more, for other programs
    "pytorch_model*", "model-*-of-*.bin", "model.*.safetensors", "model-*-of-*.safetensors", "consolidated*", "*.gguf",
    "tf_model*.h5", "flax_model*", "rust_model*", "*.onnx", "*.onnx_data", "*.tflite", "*.task", "*.litertlm", "*.pte",
    "*.index.json",
    "adapter_model.bin", "adapter_model.pt", "adapter_*.pt",
)  # fmt: skip
_WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".npz", ".npy", ".ckpt", ".pkl", ".h5", ".msgpack", ".nemo")


def list_entries(path: Path) -> list[str]:
    """List the names in a directory, sorted. Raises CheckpointError when it cannot be read."""
    try:
        return sorted(os.listdir(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror}.") from error


def name_kind(path: Path) -> CheckpointError | None:
    """Make the error for a directory that is no whole model, naming what it is; None where nothing in it tells."""
    for name, (what, fix) in _KINDS.items():
        if is_present(path / name) and ("." in name or not is_present(path / "config.json")):
            return CheckpointError(f"{path} is {what}: it holds {name}.", fix=fix)
    return None


def check_folder(path: Path, read: Collection[str], *, merges_adapter: bool) -> list[str]:
    """Check every entry of `path`, of which the source reads the files `read`; returns sentences on ignored ones.
    With `merges_adapter` the adapter in it is merged. Raises CheckpointError for files that change the model and are
    not applied, and for weights of unknown name that are not read."""
    kind = name_kind(path)
    if kind is not None:
        raise kind
    if is_present(path / ADAPTER) and not merges_adapter:
        problem = f"{path} holds whole weights and an adapter, {ADAPTER}, that may be in them or not."
        fix = f"Add --lora {quote_arg(path)} to merge it, or move {ADAPTER} away if it is merged already."
        raise CheckpointError(problem, fix=fix)
    forms, unread, notes = list[str](), list[str](), list[str]()
    for name in sorted({*list_entries(path)} - {*read, *((ADAPTER, ADAPTER_WEIGHTS) if merges_adapter else ())}):
        if os.path.isdir(path / name):
            if is_present(path / name / ADAPTER) and not name.startswith("checkpoint-"):
                notes.append(
                    f"{named(name)} holds an adapter that is not merged; --lora {quote_arg(path / name)} merges it."
                )
            if name == "additional_chat_templates":
                notes.append(f"{name} was left aside: the model's own chat template serves every chat.")
        elif any(fnmatchcase(name, pattern) for pattern in _OTHER_FORMS):
            forms.append(name)
        elif not any(fnmatchcase(name, pattern) for pattern in _NOTHING):
            unread.append(name)
    weights = [name for name in unread if name.endswith(_WEIGHTS)]
    if weights:
        fix = "Move it away if the model is whole without it."
        raise CheckpointError(f"{path / weights[0]} holds weights that no part of Gemma 3 reads.", fix=fix)
    if forms:
        notes.append(f"left aside, other forms of the weights: {list_some(forms)}.")
    if unread:
        notes.append(f"left aside, read by nobody: {list_some(unread)}.")
    return notes
