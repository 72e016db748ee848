"""Backend "torch": nothing to compile. It must not import torch before an engine is opened."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from wicore_trt.engine.options import Backend, BuildOptions
from wicore_trt.errors import ConfigError

if TYPE_CHECKING:
    from wicore_trt.backends.torch.executor import TorchExecutor
    from wicore_trt.engine.directory import EngineDir
    from wicore_trt.runtime.exchange import RankExchange
    from wicore_trt.runtime.executor import Executor
    from wicore_trt.runtime.options import ExecutorOptions


class TorchBackend(Backend):
    """Backend wherever PyTorch runs; it compiles nothing."""

    has = frozenset({"kernels", "threads", "batch_invariant", "peer_access", "compare_ranks"})

    def targets(self, options: BuildOptions) -> list[str]:
        if options.targets:
            raise ConfigError("backend 'torch' takes no targets.", fix="Leave --target out.")
        return ["any"]

    def open_fit(self, engine: EngineDir, settings: ExecutorOptions) -> Executor:
        from wicore_trt.backends.torch.executor import TorchExecutor

        manifest = engine.manifest
        if manifest.tp_size > 1:
            from wicore_trt.runtime.ranks import RankedExecutor

            opener = f"{__name__}:open_rank"
            return RankedExecutor(engine.path, manifest.spec, manifest.tp_size, opener, settings)
        return TorchExecutor(engine, settings)


def open_rank(path: Path, settings: ExecutorOptions, ranks: RankExchange) -> TorchExecutor:
    """Open the part of the engine at `path` that the rank of `ranks` runs; it was verified before ranks started."""
    from wicore_trt.backends.torch.executor import TorchExecutor
    from wicore_trt.engine.directory import open_engine

    return TorchExecutor(open_engine(path, verify=False), settings, ranks)
