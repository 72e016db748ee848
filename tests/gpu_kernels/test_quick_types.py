"""The interpreter's quick types are those of Triton itself."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton", reason="pip install -e .[triton]")

import triton.language as tl
from gpu_kernels import quick_types
from triton.runtime import interpreter

SCALARS = (
    tl.int1,
    tl.int8,
    tl.uint8,
    tl.int32,
    tl.int64,
    tl.uint64,
    tl.bfloat16,
    tl.float16,
    tl.float32,
    tl.float8e4nv,
)
ELEMENTS = (*SCALARS, tl.pointer_type(tl.float32), tl.pointer_type(tl.int8))


def shapes() -> list[Any]:
    rng = random.Random(1)
    sizes = [rng.choices((1, 2, 16, 32), k=rng.randint(1, 4)) for _ in range(20)]  # at most 2**20 elements
    return [*sizes, *(tl.core.tuple(s) for s in sizes), *([tl.constexpr(n) for n in s] for s in sizes)]


def same(quick: Any, slow: Any) -> None:
    assert vars(quick).keys() == vars(slow).keys()
    for name, value in vars(slow).items():
        assert type(vars(quick)[name]) is type(value) and repr(vars(quick)[name]) == repr(value), name


@pytest.mark.parametrize("element", ELEMENTS, ids=str)
def test_types_of_blocks_and_their_values(element: Any) -> None:
    for shape in shapes():
        quick, slow = (object.__new__(tl.block_type) for _ in range(2))
        quick_types.block_type_init(quick, element, shape)
        type(slow).__init__(slow, element, shape)
        same(quick, slow)
        assert quick == slow
        assert quick_types.np_dtype(quick) == interpreter._get_np_dtype(slow)
        for type_ in (slow, element):
            values = [object.__new__(tl.tensor) for _ in range(2)]
            quick_types.tensor_init(values[0], "handle", type_)
            tl.tensor.__init__(values[1], "handle", type_)
            same(*values)
    assert quick_types.np_dtype(element) == interpreter._get_np_dtype(element)


@pytest.mark.parametrize("shape", [[], [3], [2.5], [2048, 1024], (2, 2)], ids=str)
def test_what_is_no_shape_is_none(shape: Any) -> None:
    errors = []
    for make in (quick_types.block_type_init, tl.block_type.__init__):
        with pytest.raises((TypeError, ValueError, AssertionError)) as error:
            make(SimpleNamespace(), tl.int32, shape)
        errors.append((type(error.value), str(error.value) * isinstance(shape, list)))
    assert errors[0] == errors[1]
