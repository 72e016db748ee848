"""Define build options and the protocol of backends, which `engine.build` and backends share.

It must not know any backend's compiler. Invariant: a backend is found by name, and loaded only when it is asked for.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from wicore_trt.errors import ConfigError, EnvironmentUnfitError

if TYPE_CHECKING:
    from wicore_trt.checkpoint.convert import Calibration
    from wicore_trt.checkpoint.format import Checkpoint
    from wicore_trt.engine.directory import EngineDir
    from wicore_trt.model.spec import Gemma3Spec
    from wicore_trt.model.vision import VisionSpec
    from wicore_trt.progress import Progress
    from wicore_trt.runtime.executor import Executor, RequestExecutor
    from wicore_trt.runtime.options import ExecutorOptions


@dataclass(frozen=True, slots=True)
class DummyModel:
    """Model without weights, to measure speed; its weights are made up at load."""

    name: str
    spec: Gemma3Spec
    vision: VisionSpec | None = None


@dataclass(frozen=True, slots=True)
class BuildOptions:
    """Arguments of `build_engine` that say what to build.
    `max_batch` limits the sequences of a compiled engine's decode step, `max_chunk` the tokens of its prefill step.
    `dummy` replaces a source. `revision` is the source's hub commit, branch or tag, `lora` the directory of an
    adapter to merge, `mmproj` a GGUF file with the source's image encoder, which `text_only` leaves out."""

    backend: str
    dtype: str
    kv_dtype: str
    tp_size: int
    page_tokens: int
    targets: tuple[str, ...]
    max_context: int | None
    max_batch: int
    max_chunk: int
    calibration: Calibration | None
    dummy: DummyModel | None = None
    revision: str | None = None
    lora: Path | None = None
    mmproj: Path | None = None
    text_only: bool = False

    def kv_dtype_of(self, checkpoint: Checkpoint, *, compiled: bool = False) -> str:
        """Return the dtype of the KV cache; "auto" takes the dtype of the activations. Raises ConfigError for a dtype
        that no `compiled` step converts to."""
        dtype = checkpoint.dtype if self.kv_dtype == "auto" else self.kv_dtype
        if compiled and dtype not in (checkpoint.dtype, "fp8"):
            raise ConfigError(
                f"kv_dtype {dtype!r} with {checkpoint.dtype} activations is not supported by backend {self.backend!r}.",
                fix=f"Use --kv-dtype {checkpoint.dtype} or fp8.",
            )
        return dtype


OF_SOME = {
    "kernels": "executor.kernels", "threads": "executor.threads", "batch_invariant": "executor.batch_invariant",
    "peer_access": "executor.peer_access", "compare_ranks": "executor.compare_ranks",
    "kv_fraction": "kv.device_fraction",
}  # fmt: skip
"""Options of an executor that some backends lack, and the settings that they come from."""


class Backend(ABC):
    """Compiles and opens engines: base of the classes named in BACKENDS. `has`: what it knows of OF_SOME."""

    has: frozenset[str] = frozenset()

    @abstractmethod
    def targets(self, options: BuildOptions) -> list[str]:
        """List the GPU architectures to compile for. Raises ConfigError or EnvironmentUnfitError before work."""

    def default_context(self, limit: int) -> int:
        """Return max_context of an engine for which none is given; `limit` is the model's."""
        return limit

    def check(self, checkpoint: Checkpoint, options: BuildOptions) -> None:  # noqa: B027 -- some build any
        """Raise ConfigError for a checkpoint that this backend does not build, before anything is copied."""

    def compile(
        self, checkpoint: Checkpoint, directory: Path, options: BuildOptions, progress: Progress
    ) -> dict[str, Any]:
        """Put the compiled files into the engine `directory`, whose weights are there; return the manifest's
        `compiled`. `options` have their targets and max_context filled in."""
        return {}

    def open(self, engine: EngineDir, settings: ExecutorOptions) -> Executor | RequestExecutor:
        """Return the executor of an engine of this backend, a RequestExecutor for those in SCHEDULE_THEMSELVES.
        Raises EnvironmentUnfitError where this machine cannot run it, EngineFormatError for files that do not fit,
        ConfigError for settings that do not or that would have no effect."""
        for name, key in OF_SOME.items():
            if name not in self.has and getattr(settings, name) != getattr(type(settings)(), name):
                backend = engine.manifest.backend
                raise ConfigError(f"{key}: engines of backend {backend} do not have it.", fix=f"Leave {key} out.")
        return self.open_fit(engine, settings)

    @abstractmethod
    def open_fit(self, engine: EngineDir, settings: ExecutorOptions) -> Executor | RequestExecutor:
        """Do the work of `open`, for settings that this backend has."""


BACKENDS = {
    "torch": "wicore_trt.backends.torch.build:TorchBackend",
    "triton": "wicore_trt.backends.triton.build:TritonBackend",
    "tensorrt": "wicore_trt.backends.tensorrt.build:TensorRTBackend",
    "tensorrt-llm": "wicore_trt.backends.trtllm.build:TensorRTLLMBackend",
}
"""Name of a backend to "module:class"."""
READ_IMAGES = frozenset({"torch", "triton"})
"""Backends whose engines keep the image encoder."""
READ_BLOCKS = frozenset({"torch", "triton"})
"""Backends that compute with Q4_0 weights."""
SCHEDULE_THEMSELVES = frozenset({"tensorrt-llm"})
"""Backends whose engines take whole requests and have a KV cache of their own."""


def check_equal_groups(spec: Gemma3Spec, backend: str) -> None:
    """Raise ConfigError for layer groups whose attention has different sizes, which `backend` does not compute."""
    groups = map(spec.layer_group, spec.groups)
    if len({(group.num_heads, group.num_kv_heads, group.head_dim) for group in groups}) > 1:
        raise ConfigError(
            f"backend {backend!r} needs global and local layers of one head size and one number of heads and KV heads.",
            fix="Use --backend torch.",
        )


def find_backend(name: str) -> Backend:
    """Find a backend by name. Raises EnvironmentUnfitError for one that does not exist."""
    if name not in BACKENDS:
        problem = f"backend {name!r} is not built in this version; there is: {', '.join(BACKENDS)}."
        raise EnvironmentUnfitError(problem, fix="Use --backend torch.")
    module, attribute = BACKENDS[name].split(":")
    backend: Backend = getattr(import_module(module), attribute)()
    return backend
