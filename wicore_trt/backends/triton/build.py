"""Backend `triton`: kernels compiled ahead of time for each target, beside the weights that targets share.

`backends.triton.index` defines the files. Must not know how a step runs. Invariants: what cannot be built is refused
before any work; building needs Triton and no GPU, running needs a GPU and no Triton.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from wicore_trt.backends.triton.index import write_kernels
from wicore_trt.backends.triton.table import EngineShape
from wicore_trt.engine.options import Backend, BuildOptions
from wicore_trt.errors import ConfigError, EnvironmentUnfitError, install_command

if TYPE_CHECKING:
    from wicore_trt.checkpoint.format import Checkpoint
    from wicore_trt.engine.directory import EngineDir
    from wicore_trt.progress import Progress
    from wicore_trt.runtime.executor import Executor
    from wicore_trt.runtime.options import ExecutorOptions

TARGETS = ("sm80", "sm89", "sm90", "sm100", "sm120")
DTYPES = ("bfloat16", "float16")
SIZES = 16
"""Widths of matrices are multiples of this."""


class TritonBackend(Backend):
    has = frozenset({"batch_invariant", "peer_access", "compare_ranks", "kv_fraction"})

    def targets(self, options: BuildOptions) -> list[str]:
        known = ", ".join(TARGETS)
        if not options.targets:
            raise ConfigError("backend 'triton' needs a target.", fix=f"Give --target; known: {known}.")
        for target in options.targets:
            if target not in TARGETS:
                raise ConfigError(f"backend 'triton' cannot build for {target!r}.", fix=f"Use one of {known}.")
        if options.dtype == "float32":
            fix = f"Use --dtype {', '.join(DTYPES)} or fp8."
            raise ConfigError("backend 'triton' has no float32 kernels.", fix=fix)
        try:
            import triton  # noqa: F401 -- imported to see that it is here
        except ImportError as error:
            raise EnvironmentUnfitError("Triton is not installed.", fix=install_command("triton")) from error
        return list(options.targets)

    def check(self, checkpoint: Checkpoint, options: BuildOptions) -> None:
        shape_of(checkpoint, options)

    def compile(
        self, checkpoint: Checkpoint, directory: Path, options: BuildOptions, progress: Progress
    ) -> dict[str, Any]:
        """Compile every target's kernels, in as many processes as there are cores."""
        from wicore_trt.backends.triton.compile import compile_listed

        shape = shape_of(checkpoint, options)
        tables = {}
        for number, target in enumerate(options.targets):

            def report(done: int, total: int, number: int = number) -> None:
                progress("kernels", number * total + done, len(options.targets) * total)

            tables[target] = compile_listed(shape, target, report=report)
        write_kernels(directory, tables)
        versions = {k.triton_version for _, kernels in tables.values() for k in kernels.values()}
        facts: dict[str, Any] = {"flavour": "triton", "version": ", ".join(sorted(versions))}
        return facts | {"kernels": {target: len(kernels) for target, (_, kernels) in tables.items()}}

    def open_fit(self, engine: EngineDir, settings: ExecutorOptions) -> Executor:
        from wicore_trt.backends.triton import executor

        manifest = engine.manifest
        if manifest.tp_size > 1:
            from wicore_trt.runtime.ranks import RankedAheadExecutor

            opener = f"{executor.__name__}:open_rank"
            return RankedAheadExecutor(engine.path, manifest.spec, manifest.tp_size, opener, settings)
        return executor.open_executor(engine, settings)


def shape_of(checkpoint: Checkpoint, options: BuildOptions) -> EngineShape:
    """Make the shape that kernels are compiled for. Raises ConfigError for what no kernel computes."""
    dtype = checkpoint.dtype
    if dtype not in DTYPES:
        problem = f"backend 'triton' computes in {' or '.join(DTYPES)}, and the checkpoint is {dtype}."
        raise ConfigError(problem, fix="Convert the source with --dtype bfloat16, float16 or fp8.")
    kv_dtype = options.kv_dtype_of(checkpoint, compiled=True)
    spec, d = checkpoint.spec.shard(0, checkpoint.tp_size).spec, checkpoint.spec.head_dim
    if d < SIZES or d & (d - 1):
        raise ConfigError(f"head_dim {d} is no power of two of at least 16.", fix="Use --backend torch.")
    for name in ("hidden_size", "intermediate_size", "vocab_size"):
        if getattr(spec, name) % SIZES:
            raise ConfigError(f"{name} {getattr(spec, name)} is no multiple of {SIZES}.", fix="Use --backend torch.")
    images, ranks = checkpoint.vision is not None, checkpoint.tp_size
    return EngineShape(spec, dtype, checkpoint.weights, kv_dtype, options.page_tokens, images, ranks)
