"""Engines for the benchmarks: built by the code of `wicore build` with made-up weights, or taken from a directory.

It must not know what is measured with them. Invariant: prebuilt engines are used only when they were built for this
target from these very sources, because launches and kernels change together.

A directory of prebuilt engines holds one engine per configuration, `check-<n>` with the kernels of the n-th shape of
the check, and `built.json`: {digest, target, engines: {configuration: {seconds, kernels, cores}}, checks: [shape]}.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any

from benchmarks.gpu.cases import PAGE_TOKENS, EngineConfig
from wicore_trt.backends.triton import table as triton_table
from wicore_trt.backends.triton.index import read_table, write_kernels
from wicore_trt.backends.triton.table import EngineShape, KernelTable
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.options import DummyModel
from wicore_trt.model import spec
from wicore_trt.plugins import aot

INDEX = "built.json"

Say = Callable[[str], None]


def source_digest() -> str:
    """Of all sources that kernels, their launches and their choice come from."""
    model, backend, plugins = (Path(module.__file__ or "").parent for module in (spec, triton_table, aot))
    patterns = [(model, "spec.py"), (backend, "*.py"), (plugins, "*.py"), (plugins, "kernels/*.py")]
    digest = blake2b(digest_size=16)
    for root, pattern in patterns:
        for path in sorted(root.glob(pattern), key=lambda p: p.relative_to(root).as_posix()):
            digest.update(f"{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return digest.hexdigest()


def build_bench_engine(config: EngineConfig, output: Path, target: str) -> dict[str, Any]:
    """Build the engine of `config` at `output` as `wicore build --dummy-weights` does; returns its record."""
    begun = time.monotonic()
    engine = build_engine(
        config.model,
        output,
        backend="triton",
        dtype=config.dtype,
        kv_dtype=config.kv_dtype,
        tp_size=config.ranks,
        page_tokens=PAGE_TOKENS,
        targets=[target],
        dummy=DummyModel(config.model, config.spec),
        force=True,
    )
    seconds = time.monotonic() - begun
    kernels = engine.manifest.compiled["kernels"][target]
    return {"seconds": seconds, "kernels": kernels, "cores": os.cpu_count()}


class Engines:
    """Engines by configuration: prebuilt ones where they fit, others built into `scratch` when asked for."""

    def __init__(self, target: str, scratch: Path, prebuilt: Path | None, say: Say) -> None:
        self._target, self._scratch, self._say = target, scratch, say
        self._prebuilt, self._index = None, dict[str, Any]()
        if prebuilt is not None:
            self._index, problem = read_prebuilt_index(prebuilt, target)
            if problem:
                say(f"engines in {prebuilt} are not used: {problem}")
            else:
                self._prebuilt = prebuilt

    def has(self, config: EngineConfig) -> bool:
        """Tell whether `config` takes no building any more."""
        return self._at(config) is not None

    def engine(self, config: EngineConfig) -> tuple[Path, dict[str, Any] | None]:
        """The engine's directory, and the record of its build where this call is the first to ask for it."""
        path = self._scratch / config.name
        if path.exists():
            return path, None
        found = self._at(config)
        if found is not None:
            path.symlink_to(found.resolve())
            return path, self._index["engines"][config.name] | {"prebuilt": True}
        self._say(f"building {config.name} for {self._target}")
        record = build_bench_engine(config, path, self._target) | {"prebuilt": False}
        self._say(f"built {config.name}: {record['kernels']} kernels in {record['seconds']:.1f} s")
        return path, record

    def _at(self, config: EngineConfig) -> Path | None:
        if (self._scratch / config.name).exists():
            return self._scratch / config.name
        known = self._prebuilt is not None and config.name in self._index["engines"]
        return self._prebuilt / config.name if known and self._prebuilt else None

    def check_table(self, shape: EngineShape, target: str) -> KernelTable | None:
        """Prebuilt kernels of a shape of the check, None where there are none."""
        if self._prebuilt is None or repr(shape) not in self._index["checks"]:
            return None
        folder = self._prebuilt / f"check-{self._index['checks'].index(repr(shape))}"
        return read_table(lambda name: (folder / name).read_bytes(), folder, target)


def read_prebuilt_index(directory: Path, target: str) -> tuple[dict[str, Any], str]:
    """(`built.json`, why it cannot be used or "")."""
    try:
        index = json.loads((directory / INDEX).read_text(encoding="utf-8"))
        digest, built_for = index["digest"], index["target"]
        named, checks = index["engines"].keys(), index["checks"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return {}, f"{INDEX} cannot be read ({error!r})"
    if built_for != target:
        return {}, f"they are for {built_for}, and this GPU is {target}"
    if digest != source_digest():
        return {}, "they were built from other sources"
    wanted = [*named, *(f"check-{n}" for n in range(len(checks)))]
    if missing := [name for name in wanted if not (directory / name).is_dir()]:
        return {}, f"{missing[0]} is missing"
    return index, ""


def prebuild(configs: Sequence[EngineConfig], directory: Path, target: str, say: Say) -> None:
    """Build all engines of `configs` and the kernels of the check into `directory`; needs no GPU."""
    from benchmarks.gpu.step_check import CASES, case_shape
    from wicore_trt.backends.triton.compile import compile_listed

    directory.mkdir(parents=True, exist_ok=True)
    (directory / INDEX).unlink(missing_ok=True)
    index: dict[str, Any] = {"digest": source_digest(), "target": target, "engines": {}, "checks": []}
    for config in configs:
        index["engines"][config.name] = build_bench_engine(config, directory / config.name, target)
        say(f"{config.name}: {index['engines'][config.name]}")
    for shape in dict.fromkeys(case_shape(case) for case in CASES):
        folder = directory / f"check-{len(index['checks'])}"
        for old in sorted(folder.rglob("*"), reverse=True):
            old.rmdir() if old.is_dir() else old.unlink()
        folder.mkdir(exist_ok=True)
        write_kernels(folder, {target: compile_listed(shape, target)})
        index["checks"].append(repr(shape))
    say(f"{len(index['checks'])} shapes of the check")
    if index["digest"] != source_digest():
        raise RuntimeError("sources changed while building; build again")
    (directory / INDEX).write_text(json.dumps(index, indent=1) + "\n", encoding="utf-8")
