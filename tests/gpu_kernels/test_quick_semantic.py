"""The interpreter's quick operators give what Triton's own give, errors included."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton", reason="pip install -e .[triton]")

import triton.language as tl
from gpu_kernels import quick_semantic
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

DTYPES = (
    tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint32, tl.int64, tl.uint64,
    tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e4nv,
)  # fmt: skip
ELEMENTS = (*DTYPES, tl.pointer_type(tl.float32), tl.pointer_type(tl.int8))
NUMBERS = (
    0, 1, -1, 255, 256, 2**31 - 1, 2**31, -(2**31) - 1, 2**63, True,
    0.0, 1.5, -2.0, 1e-40, 1e300, float("inf"), float("nan"), tl.constexpr(3), None, "a",
)  # fmt: skip
SHAPES = ((), (1,), (4,), (2,), (1, 4), (2, 1), (2, 4), (2, 4, 1), (4, 4))
CHECKS = tuple(itertools.product((False, True), repeat=4))
OPERATORS = ("add", "sub", "mul", "truediv", "floordiv", "mod", "and_", "less_than", "equal", "minimum", "maximum")


@pytest.fixture
def semantics(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, Any]:
    """The quick one and Triton's own, in a process that takes types for the interpreter's."""
    monkeypatch.setattr(tl.core.dtype, "to_ir", _to_ir)
    builder = interpreter.interpreter_builder
    return quick_semantic.Semantic(builder), TritonSemantic(builder)


def _to_ir(self: Any, builder: Any) -> Any:
    """What the interpreter makes of it."""
    return tl.void if self.name == "void" else self


def value(element: Any, shape: tuple[int, ...]) -> Any:
    data = (np.arange(np.prod(shape or (1,))) % 3 + 1).reshape(shape or (1,))
    handle = TensorHandle(data.astype(interpreter._get_np_dtype(element)), element)
    return tl.tensor(handle, tl.block_type(element, list(shape)) if shape else element)


def told(call: Any, *arguments: Any) -> Any:
    """A comparable account of what a call gives or raises."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = call(*arguments)
    except Exception as error:
        return type(error), str(error), getattr(error, "message", None)
    return [_account(f) for f in (found if isinstance(found, tuple) else (found,))]


def _account(found: Any) -> Any:
    if not isinstance(found, tl.tensor):
        return type(found), repr(found)
    handle = found.handle
    facts = found.type.name, repr(found.type), repr(found.shape), repr(found.numel), found.dtype.name
    return *facts, repr(handle.dtype), handle.data.dtype.str, handle.data.shape, handle.data.tobytes(), handle.attr


def test_any_two_dtypes_and_any_number(semantics: tuple[Any, Any]) -> None:
    """Every two operands, with one of the checks: each operand meets all checks on either side."""
    operands = [value(e, s) for e in ELEMENTS for s in ((), (4,))] + list(NUMBERS)
    for (i, lhs), (j, rhs) in itertools.product(enumerate(operands), repeat=2):
        checks = CHECKS[(i + j) % len(CHECKS)]
        quick, slow = (told(s.binary_op_type_checking_impl, lhs, rhs, *checks) for s in semantics)
        assert quick == slow, (lhs, rhs, checks)


def test_any_two_shapes(semantics: tuple[Any, Any]) -> None:
    for a, b in itertools.product(SHAPES, repeat=2):
        lhs, rhs = value(tl.int32, a), value(tl.float16, b)
        for method in ("broadcast_impl_value", "binary_op_type_checking_impl"):
            quick, slow = (told(getattr(s, method), lhs, rhs) for s in semantics)
            assert quick == slow, (a, b, method)


@pytest.mark.parametrize("name", OPERATORS)
def test_operators(name: str, semantics: tuple[Any, Any]) -> None:
    more = {"add": (False,), "sub": (False,), "mul": (False,)}.get(name, ())
    if name in ("minimum", "maximum"):
        more = (tl.PropagateNan.NONE,)
    for a, b in itertools.product((tl.int32, tl.uint8, tl.float32, tl.float16), (tl.int32, tl.float32, 3, 0.5)):
        rhs = b if isinstance(b, (int, float)) else value(b, (1, 4))
        quick, slow = (told(getattr(s, name), value(a, (2, 4)), rhs, *more) for s in semantics)
        assert quick == slow, (a, b)


def test_casts_and_tensors_of_numbers(semantics: tuple[Any, Any]) -> None:
    for element, to, shape in itertools.product(ELEMENTS, ELEMENTS, ((), (4,))):
        quick, slow = (told(s.cast, value(element, shape), to) for s in semantics)
        assert quick == slow, (element, to, shape)
    for number, check in itertools.product((*NUMBERS, value(tl.int8, (2,))), (False, True)):
        quick, slow = (told(s.to_tensor, number, check) for s in semantics)
        assert quick == slow, (number, check)


def test_constants_and_handles() -> None:
    for wrapped in (*NUMBERS, [tl.constexpr(2), 3], (tl.constexpr(2),), tl.core.tuple([tl.constexpr(2)]), tl.int8):
        assert repr(quick_semantic.unwrap(wrapped)) == repr(tl.core._unwrap_if_constexpr(wrapped))
    for element, kind in itertools.product(ELEMENTS, (np.uint8, np.float16, np.int32, np.float64)):
        accounts = []
        for make in (quick_semantic.handle_init, TensorHandle.__init__):
            handle = object.__new__(TensorHandle)
            found = told(make, handle, np.zeros(2, kind), element)
            accounts.append((found, repr(handle)))
        assert accounts[0] == accounts[1], (element, kind)
