"""The binding itself: finding the library, and its behaviour around threads, fork and exit."""

from __future__ import annotations

import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from wicore_trt.backends.torch import native, native_args
from wicore_trt.backends.torch.native import NativeLibrary
from wicore_trt.plugins import cpu_library

FORK = """
import os, torch
from wicore_trt.backends.torch import native, native_args
lib = native.load_library()
lib.set_threads(4)
weight = lib.pack(torch.arange(640.0 * 4096).view(4096, 640) / 1e6)
x, out = torch.ones(3, 640), torch.zeros(3, 4096)
args = native_args.make_linear(x, weight, out)
lib.run([args])
expected = out.clone()
child = os.fork()
out.zero_()
lib.run([args])  # parent and child alike; the child has no workers until it starts its own
same = bool((out == expected).all())
if child == 0:
    os._exit(0 if same else 1)
_, status = os.waitpid(child, 0)
print(same, os.waitstatus_to_exitcode(status))
"""


def test_load_without_a_library_is_none(tmp_path: Path) -> None:
    assert native.load_library(tmp_path / cpu_library.LIBRARY) is None
    broken = tmp_path / "broken.so"
    broken.write_bytes(b"not a library")
    assert native.load_library(broken) is None


def test_another_interface_version_is_refused(lib: NativeLibrary, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_library, "ABI", cpu_library.ABI + 1)
    assert native.load_library() is None


def test_an_unknown_instruction_set_changes_nothing(lib: NativeLibrary) -> None:
    before = lib.isa
    assert not lib.set_isa("mmx")
    assert lib.isa == before


def test_calls_from_several_threads_are_serialized(lib: NativeLibrary, rng: torch.Generator) -> None:
    weight = lib.pack(torch.randn(500, 200, generator=rng))
    xs = [torch.randn(rows, 200, generator=rng) for rows in (1, 3, 8, 30)]

    def run(x: torch.Tensor) -> torch.Tensor:
        for _ in range(50):
            out = torch.full((len(x), 500), torch.nan)
            lib.run([native_args.make_linear(x, weight, out)])
        return out

    expected = [run(x) for x in xs]
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(run, xs))
    assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_computes_and_both_exit() -> None:
    if native.load_library() is None:
        pytest.skip("the native kernels were not built")
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", FORK], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout.split()) == (0, ["True", "0"]), done.stderr
