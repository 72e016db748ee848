"""Fixtures of the native kernels' tests: the library on each instruction set of this machine, fresh random numbers."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import pytest
import torch

from wicore_trt.backends.torch import native
from wicore_trt.backends.torch.native import NativeLibrary

LIBRARY = native.load_library()


@pytest.fixture(params=native.ISAS)
def lib(request: pytest.FixtureRequest) -> Iterator[NativeLibrary]:
    """The library with two threads, once per instruction set."""
    if LIBRARY is None:
        pytest.skip("the native kernels were not built")
    if not LIBRARY.set_isa(request.param):
        pytest.skip(f"this processor lacks {request.param}")
    assert LIBRARY.isa == request.param
    LIBRARY.set_threads(2)
    yield LIBRARY
    LIBRARY.set_isa("auto")


@pytest.fixture
def rng() -> torch.Generator:
    seed = secrets.randbits(32)
    print(f"seed {seed}")
    return torch.Generator().manual_seed(seed)
