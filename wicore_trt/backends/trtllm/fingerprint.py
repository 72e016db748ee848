"""Names, for a TensorRT-LLM PyTorch engine, everything that its KV blocks depend on besides tokens.

Reads its arguments and the model's files. Must not know the tiers. Invariant: engines of equal names compute equal
blocks, up to the engine's own rounding between batch shapes.
"""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from wicore_trt.checkpoint.digest import hash_file
from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.files import UntrustedFiles

_ARGUMENTS = ("dtype", "load_format", "model_kwargs", "quant_config", "attn_backend")
_FILES = ("*.json", "*.safetensors", "*.bin")
_OPAQUE = ("image_token_index", "image_token_id", "boi_token_index", "eoi_token_index")


class EngineIdentity:
    """Identity of an engine: `fingerprint` and `kernels` for page keys and the disk's namespace; `plain` tells prompts
    of text alone. Hashes all files of the model, once. Raises EnvironmentUnfitError when `llm_args.model` is no
    directory."""

    def __init__(self, llm_args: Any) -> None:
        directory = Path(str(llm_args.model))
        if not directory.is_dir():
            raise EnvironmentUnfitError(
                f"The connector names KV blocks after the model's files, and {directory} is no directory.",
                fix="Give LLM the directory that the model was downloaded to.",
            )
        files = sorted(path for pattern in _FILES for path in directory.glob(pattern))
        facts: dict[str, Any] = {name: repr(getattr(llm_args, name, None)) for name in _ARGUMENTS}
        facts["kv_dtype"] = repr(getattr(llm_args.kv_cache_config, "dtype", None))
        facts["files"] = {path.name: hash_file(path) for path in files}
        text = json.dumps(facts, sort_keys=True).encode()
        self.fingerprint = hashlib.blake2b(text, digest_size=32, person=b"wicore-trtllm-1").hexdigest()
        self.kernels = f"tensorrt-llm/{_find_version()}"
        config = UntrustedFiles(directory, EnvironmentUnfitError).read_json(directory / "config.json")
        self._vocab = int((config.get("text_config") or config).get("vocab_size", 1 << 31))
        self._opaque = frozenset(config[key] for key in _OPAQUE if isinstance(config.get(key), int))

    def plain(self, tokens: list[int]) -> bool:
        """Tell whether no token stands for an image, whose content tokens do not name."""
        return max(tokens) < self._vocab and self._opaque.isdisjoint(tokens)


def _find_version() -> str:
    try:
        return version("tensorrt-llm")
    except PackageNotFoundError:
        raise EnvironmentUnfitError("TensorRT-LLM is not installed.", fix="pip install tensorrt-llm") from None
