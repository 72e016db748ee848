"""Compiled files of an engine: a kernel, a plan or a table that was not built with it never reaches a driver."""

from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

from backend_tensorrt.tensorrt_engines import fake_engine
from backend_tensorrt.tensorrt_fakes import FakeDevice, fake_tensorrt
from parity.tiny import tiny_model
from test_triton_backend import build, source  # noqa: F401 -- `source` is a fixture

from wicore_trt.backends.tensorrt import session as tensorrt_plan
from wicore_trt.backends.tensorrt.build import INDEX as PLAN_INDEX
from wicore_trt.backends.tensorrt.plan_io import PHASES, plan_file
from wicore_trt.backends.triton.index import INDEX as KERNEL_INDEX
from wicore_trt.backends.triton.index import load_table
from wicore_trt.backends.triton.weights import engine_shape
from wicore_trt.engine.directory import EngineDir, open_engine
from wicore_trt.errors import EngineFormatError

SEED = 7
TARGET = "sm90"


def flipped(path: Path, random_: random.Random) -> None:
    content = bytearray(path.read_bytes())
    content[random_.randrange(len(content))] ^= 1 << random_.randrange(8)
    path.write_bytes(content)


def swapped(first: Path, second: Path) -> None:
    content = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(content)


def kernel_attacks(engine: EngineDir) -> Iterator[tuple[str, Callable[[], object]]]:
    """What is done to a copy of the engine, by name."""
    folder, random_ = engine.path / "kernels" / TARGET, random.Random(SEED)
    cubins, described = sorted(folder.glob("*.cubin")), sorted(folder.glob("*.json"))
    pairs = [(a, b) for a in cubins for b in cubins if a < b and a.stat().st_size == b.stat().st_size]
    assert pairs, "two cubins of one size"
    for file in (*random_.sample(cubins, 4), *random_.sample(described, 4), *[engine.path / KERNEL_INDEX] * 4):
        yield f"flip in {file.name}", lambda file=file: flipped(file, random_)  # type: ignore[misc]
    yield "swapped cubins", lambda: swapped(*pairs[0])
    yield "swapped targets", lambda: swapped(cubins[0], engine.path / "kernels" / "sm80" / cubins[0].name)
    for file in (cubins[0], described[0], engine.path / KERNEL_INDEX):
        yield f"without {file.name}", file.unlink

    def added() -> None:
        index = json.loads((engine.path / KERNEL_INDEX).read_text())
        shutil.copyfile(cubins[0], folder / "more.cubin")
        shutil.copyfile(described[0], folder / "more.json")
        index["targets"][TARGET][0]["kernel"] = "more"
        (engine.path / KERNEL_INDEX).write_text(json.dumps(index))

    yield "an added kernel", added


def test_a_kernel_that_was_not_built_is_refused(source: Path) -> None:  # noqa: F811
    built = build(source, target=f"sm80,{TARGET}")
    whole = load_table(built, engine_shape(built), TARGET)
    kept = source.parent / "kept"
    shutil.copytree(built.path, kept)
    for label, attack in kernel_attacks(built):
        attack()
        with pytest.raises(EngineFormatError):
            open_engine(built.path)
            pytest.fail(f"{label}: opened")
        with pytest.raises(EngineFormatError, match=r"corrupted|is missing|has \d+ bytes") as caught:
            load_table(built, engine_shape(built), TARGET)
            pytest.fail(f"{label}: loaded")
        assert "wicore build" in str(caught.value) and "--backend triton" in str(caught.value), label
        shutil.rmtree(built.path)
        shutil.copytree(kept, built.path)
    shutil.copyfile(next((built.path / "kernels" / TARGET).glob("*.cubin")), built.path / "kernels/x.cubin")
    with pytest.raises(EngineFormatError, match=r"holds kernels/x\.cubin"):
        open_engine(built.path)
    again = load_table(open_engine(built.path, verify=False), engine_shape(built), TARGET)
    assert [e.kernel for e in again.all_entries()] == [e.kernel for e in whole.all_entries()]


class Runtime:
    """TensorRT's, which keeps what it was given."""

    def __init__(self, trt: Any) -> None:
        self._runtime, self.given = trt.Runtime(None), list[bytes]()

    def deserialize_cuda_engine(self, data: bytes) -> Any:
        self.given.append(data)
        return self._runtime.deserialize_cuda_engine(data)


def test_a_plan_that_was_not_built_is_refused(tmp_path: Path) -> None:
    model = tiny_model(3)
    engine = fake_engine(tmp_path / "engine", model.spec, model.tensors)
    trt = fake_tensorrt(FakeDevice())
    plans = {phase: engine.path / plan_file("sm89", phase) for phase in PHASES}
    built = {phase: plans[phase].read_bytes() for phase in PHASES}
    random_ = random.Random(SEED)
    other = engine.path / plan_file("sm120", PHASES[0])
    other.write_bytes(other.read_bytes() + b" ")
    index = engine.path / PLAN_INDEX
    attacks: list[tuple[str, Callable[[], object]]] = [
        *[
            (f"flip {n} in {phase}", lambda phase=phase: flipped(plans[phase], random_))
            for phase in PHASES
            for n in "ab"
        ],
        *[(f"flip {n} in the index", lambda: flipped(index, random_)) for n in "abc"],
        ("swapped phases", lambda: swapped(*plans.values())),
        ("another target's", lambda: shutil.copyfile(other, plans[PHASES[0]])),
        *[(f"without {phase}", plans[phase].unlink) for phase in PHASES],
        ("without the index", index.unlink),
    ]
    kept = tmp_path / "kept"
    shutil.copytree(engine.path, kept)
    for label, attack in attacks:
        attack()
        runtime = Runtime(trt)
        with pytest.raises(EngineFormatError, match=r"corrupted|is missing|has \d+ bytes") as caught:
            tensorrt_plan.load_plans(trt, engine, "sm89", runtime)
            pytest.fail(f"{label}: loaded")
        assert "--backend tensorrt --target sm89,sm120 --force" in str(caught.value), label
        assert all(data in built.values() for data in runtime.given), f"{label}: TensorRT was given it"
        shutil.rmtree(engine.path)
        shutil.copytree(kept, engine.path)
    runtime = Runtime(trt)
    tensorrt_plan.load_plans(trt, engine, "sm89", runtime)
    assert runtime.given == list(built.values())
