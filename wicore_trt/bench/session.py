"""Session of a benchmark: against a server or on an engine in this process, with bounds.

Joins settings, machine rates and target; must not know what is measured. Invariant: the machine's rates are measured in
the same run as the figures, before an engine is loaded, so that nothing of ours runs beside them.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from wicore_trt.bench.bound import ModelCost, measure_rates
from wicore_trt.bench.client import GrpcTarget, LocalTarget, Target
from wicore_trt.bench.report import Roof
from wicore_trt.config import Settings
from wicore_trt.engine.manifest import read_manifest
from wicore_trt.errors import ConfigError
from wicore_trt.serve.lifecycle import choose_loop_factory

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BenchSession:
    """Session on the engine of `settings` in this process, or with `address` on that server. The engine of `settings`,
    if named, then describes what the server runs; bounds hold if it runs on this machine."""

    settings: Settings
    address: str | None = None
    api_key: str | None = None
    tls_ca: Path | None = None

    def __post_init__(self) -> None:
        if self.address is None and self.settings.engine is None:
            raise ConfigError("Nothing to measure.", fix="Give --engine DIR or --target HOST:PORT.")

    @property
    def place(self) -> str:
        return self.address or "in process"

    def measure_roof(self) -> Roof | None:
        """Measure this machine; None without an engine to compute bounds for. Raises EngineFormatError."""
        if self.settings.engine is None:
            return None
        manifest = read_manifest(Path(self.settings.engine))
        cost = ModelCost.from_dtypes(manifest.spec, manifest.dtype, manifest.base_dtype, manifest.kv_dtype)
        threads = self.settings.executor.threads or len(os.sched_getaffinity(0))
        device = self.settings.executor.device
        if device == "auto":
            import torch

            device = "cuda" if torch.cuda.is_available() else "cpu"
        return Roof(cost, measure_rates(device, threads=threads))

    def run_measurement(self, measure: Callable[[Target], Awaitable[T]]) -> tuple[T, dict[str, Any]]:
        """Open the target, measure it, close it; returns the result of `measure` and the measured model. Raises what
        opening and measuring raise, and ConfigError when the server runs another engine than the named."""

        async def run() -> tuple[T, dict[str, Any]]:
            target = await self.connect(awaited=False)
            try:
                return await measure(target), asdict(target.info)
            finally:
                await target.close()

        return run_quickly(run())

    async def connect(self, *, awaited: bool = True) -> GrpcTarget | LocalTarget:
        """Open the target, which the caller closes; `awaited` as for `LocalTarget.load`. Raises as `run_measurement`
        does."""
        if self.address is None:
            return await LocalTarget.load(self.settings, awaited=awaited)
        engine = self.settings.engine
        named = None if engine is None else read_manifest(Path(engine)).fingerprint
        target = await GrpcTarget.connect(self.address, api_key=self.api_key, tls_ca=self.tls_ca)
        if named not in (None, target.info.fingerprint):
            await target.close()
            raise ConfigError(
                f"{self.address} runs {target.info.model_id}, another engine than {engine}.",
                fix="Name the engine that the server runs, or leave --engine out.",
            )
        return target


def run_quickly(work: Coroutine[Any, Any, T]) -> T:
    """Run on the event loop that servers use, which halves a client's cost of a message."""
    with asyncio.Runner(loop_factory=choose_loop_factory()) as runner:
        return runner.run(work)
