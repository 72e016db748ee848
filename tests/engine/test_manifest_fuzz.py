"""Fuzzed manifests: a JSON file of an engine or checkpoint is accepted as it was written, or refused in one line.

The oracle of an unsealed edit is the original: whatever is accepted must say the same. Of a structured edit under a new
seal only the form can be judged: no other exception than the refusal, and what is accepted keeps the invariants.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tiny_source import write_tiny_source

from wicore_trt.backends.triton.index import INDEX, read_table, write_kernels
from wicore_trt.backends.triton.roles import KernelRole
from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.digest import SEAL, make_seal
from wicore_trt.checkpoint.format import CONFIG, open_checkpoint, write_config
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import EngineDir, open_engine
from wicore_trt.engine.manifest import MANIFEST_NAME, compute_fingerprint
from wicore_trt.errors import CheckpointError, EngineFormatError, WicoreError
from wicore_trt.plugins.aot import CompiledKernel

VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 1 << 31, 1 << 64, 10**400, 0.5, -0.0, 1e308, float("inf"), float("nan"), "", "x",
    "\ud800", "\x1b[31m", "../x", "0" * 64, [], [1], ["any"], {}, {"a": 1}, {"bytes": 0, "blake2b": "0" * 64},
)  # fmt: skip
MOST = 2_000
"""Characters of a refusal, its fix included."""


def places(value: Any, at: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """Paths to everything inside of a JSON value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    return [path for key, inner in items for path in ((*at, key), *places(inner, (*at, key)))]


def edited(whole: dict[str, Any], random_: random.Random) -> dict[str, Any]:
    """A copy with one or two places replaced, removed, added or doubled."""
    data = copy.deepcopy(whole)
    for _ in range(random_.choice((1, 1, 2))):
        *outer, key = random_.choice(places(data))
        parent: Any = data
        for step in outer:
            parent = parent[step]
        action = random_.randrange(4)
        if action == 0:
            del parent[key]
        elif action == 1 and isinstance(parent, dict):
            parent[random_.choice(("added", f"{key} ", "", "__proto__"))] = parent[key]
        else:
            parent[key] = copy.deepcopy(random_.choice(VALUES))
        if not data:
            return data
    return data


def damaged(text: bytes, random_: random.Random) -> bytes:
    """Flipped bits, a piece lost, doubled or moved, the end lost, or deep nesting."""
    data, at = bytearray(text), random_.randrange(len(text))
    length = random_.choice((1, 2, 16, 200))
    match random_.randrange(8):
        case 0:
            del data[at : at + length]
        case 1:
            data[at:at] = data[at : at + length]
        case 2:
            del data[at:]
        case 3:
            data[at:at] = random_.choice((b"\0", b"[" * 5000, b'{"a":' * 5000, b"\xff", b"9" * 5000, b"1e999", b"NaN"))
        case _:
            for _ in range(random_.choice((1, 1, 1, 3))):
                data[random_.randrange(len(data))] ^= 1 << random_.randrange(8)
    return bytes(data)


def attempt(read: Callable[[], Any], error: type[WicoreError], label: str, most: int = MOST) -> Any:
    """What `read` gives, None where it refuses."""
    try:
        return read()
    except error as refused:
        assert "\n" not in str(refused) and len(str(refused)) < most, f"{label}: {refused}"
    except BaseException as crash:
        raise AssertionError(f"{label}: {crash!r}") from crash
    return None


def inputs(count: int) -> list[int]:
    """Seeds; a failure prints its own."""
    return list(range(count))


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> tuple[EngineDir, Path]:
    base = tmp_path_factory.mktemp("fuzz")
    checkpoint = convert(write_tiny_source(base / "source"), base / "checkpoint")
    return build_engine(checkpoint.path, base / "engine"), checkpoint.path


def fuzz_engine(engine: EngineDir, count: int) -> None:
    path = engine.path / MANIFEST_NAME
    whole = path.read_bytes()
    parsed = json.loads(whole)
    for seed in inputs(count):
        random_ = random.Random(seed)
        structured = seed % 3 == 0
        data = edited(parsed, random_) if structured else {}
        path.write_bytes(json.dumps(data).encode() if structured else damaged(whole, random_))
        found = attempt(lambda: open_engine(engine.path, verify=False), EngineFormatError, f"engine.json, seed {seed}")
        assert found is None or found.manifest == engine.manifest, f"seed {seed}: accepted and different"
        if structured:
            body = {key: value for key, value in data.items() if key != SEAL}
            path.write_bytes(json.dumps({**body, SEAL: make_seal(body)}).encode())
            found = attempt(lambda: open_engine(engine.path, verify=False), EngineFormatError, f"sealed, seed {seed}")
            if found is not None:
                manifest = found.manifest
                assert manifest.fingerprint == compute_fingerprint(manifest) and manifest.max_context <= 128, seed
                assert set(manifest.files) <= {p.name for p in engine.path.iterdir()}, seed
    path.write_bytes(whole)


def fuzz_checkpoint(checkpoint: Path, count: int) -> None:
    path = checkpoint / CONFIG
    whole = path.read_bytes()
    parsed = json.loads(whole)
    for seed in inputs(count):
        random_ = random.Random(seed)
        structured = seed % 3 == 0
        data = edited(parsed, random_) if structured else {}
        path.write_bytes(json.dumps(data).encode() if structured else damaged(whole, random_))
        found = attempt(lambda: open_checkpoint(checkpoint), CheckpointError, f"config.json, seed {seed}")
        assert found is None or found.config == parsed, f"seed {seed}: accepted and different"
        if structured and isinstance(data.get("wicore"), dict):
            write_config(checkpoint, data)
            attempt(lambda: open_checkpoint(checkpoint), CheckpointError, f"config.json sealed, seed {seed}")
    path.write_bytes(whole)


def fuzz_kernels(directory: Path, count: int) -> None:
    """The table and a description, as `EngineDir.read` would never give them: their form alone must be refused."""
    kernels = {
        name: CompiledKernel(name, "f", "sm90", (("x", "i32"),), frozenset("x"), {"N": 1}, 4, 2, 0, "3", name.encode())
        for name in ("one", "two")
    }
    rows = [(KernelRole("add_norm"), 1 << 20, "one", None), (KernelRole("embed_norm"), 1 << 20, "two", None)]
    write_kernels(directory, {"sm90": (rows, kernels)})
    files = {p.relative_to(directory).as_posix(): p.read_bytes() for p in directory.rglob("*") if p.is_file()}
    for seed in inputs(count):
        random_ = random.Random(seed)
        name = random_.choice((INDEX, "kernels/sm90/one.json"))
        structured = seed % 3 == 0
        bad = json.dumps(edited(json.loads(files[name]), random_)).encode() if structured else b""
        given = {**files, name: bad or damaged(files[name], random_)}

        def read(wanted: str, given: dict[str, bytes] = given) -> bytes:
            if wanted not in given:
                raise FileNotFoundError(wanted)
            return given[wanted]

        def table(read: Callable[[str], bytes] = read) -> object:
            return read_table(read, directory, "sm90")

        attempt(table, EngineFormatError, f"{name}, seed {seed}", most=1 << 20)  # a name of the table may be long


def test_manifests(made: tuple[EngineDir, Path]) -> None:
    fuzz_engine(made[0], 700)


def test_checkpoints(made: tuple[EngineDir, Path]) -> None:
    fuzz_checkpoint(made[1], 500)


def test_kernel_tables(tmp_path: Path) -> None:
    fuzz_kernels(tmp_path, 1500)


@pytest.mark.long
def test_many(made: tuple[EngineDir, Path], tmp_path: Path) -> None:
    fuzz_engine(made[0], 20_000)
    fuzz_checkpoint(made[1], 10_000)
    fuzz_kernels(tmp_path, 30_000)
