"""Triton's operators, made quick for its interpreter: what two operands become is looked up by their types.

By itself the interpreter asks for it anew at every operation, through hundreds of calls. It must not know kernels.
Invariant: results are those of Triton 3.6; what is not common, errors above all, is left to Triton itself.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import TensorHandle

_unwrap = tl.core._unwrap_if_constexpr
_check_handle = TensorHandle.__post_init__
_plain = TritonSemantic(None)
_DTYPES = {d.name: d for d in vars(tl).values() if type(d) is tl.dtype}
_LIMITS = {n: (d.get_int_min_value(), d.get_int_max_value()) for n, d in _DTYPES.items() if d.is_int()}
_BYTES = {n: max(1, d.primitive_bitwidth // 8) for n, d in _DTYPES.items()}
_SINGLE = (2.0**-126, (2 - 2.0**-23) * 2.0**127)
_NEVER_WRAPPED = frozenset({tl.tensor, int, float, bool, str, type(None), tl.dtype, tl.block_type, tl.pointer_type})


def unwrap(value: Any) -> Any:
    """`tl.core._unwrap_if_constexpr`."""
    kind = type(value)
    if kind in _NEVER_WRAPPED:
        return value
    return value.value if kind is tl.constexpr else _unwrap(value)


def handle_init(self: Any, data: Any, dtype: Any, attr: Any = None) -> None:
    """`TensorHandle.__init__`."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr
    if type(dtype) is not tl.dtype or data.itemsize > _BYTES.get(dtype.name, 0):
        _check_handle(self)


@cache
def _computed(a: str, a_is_scalar: bool, b: str, b_is_scalar: bool, div_or_mod: bool) -> Any:
    """What operands of these dtypes are computed in."""
    return _plain.computation_type_impl(_DTYPES[a], a_is_scalar, _DTYPES[b], b_is_scalar, div_or_mod)


@cache
def _together(a: tuple[int, ...], b: tuple[int, ...]) -> list[int] | None:
    """The shape that both are broadcast to; None: Triton says what is wrong."""
    if len(a) != len(b) or any(x != y and 1 not in (x, y) for x, y in zip(a, b, strict=True)):
        return None
    return [y if x == 1 else x for x, y in zip(a, b, strict=True)]


def _number_type(value: Any) -> str | None:
    """Name of the dtype of a common number, None of others."""
    if type(value) is int:
        return "int32" if -(2**31) <= value < 2**31 else None
    if type(value) is float:
        size = abs(value)
        return "fp32" if size == 0.0 or size == float("inf") or _SINGLE[0] <= size <= _SINGLE[1] else None
    return None


class Semantic(TritonSemantic):
    """`TritonSemantic` of the interpreter."""

    def binary_op_type_checking_impl(
        self,
        lhs: Any,
        rhs: Any,
        allow_lhs_ptr: bool = False,
        allow_rhs_ptr: bool = False,
        arithmetic_check: bool = True,
        div_or_mod: bool = False,
    ) -> Any:
        if arithmetic_check:
            found = self._operands(lhs, rhs, allow_lhs_ptr, div_or_mod)
            if found is not None:
                return self.broadcast_impl_value(*found)
        return super().binary_op_type_checking_impl(
            lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod
        )

    def _operands(self, lhs: Any, rhs: Any, allow_lhs_ptr: bool, div_or_mod: bool) -> tuple[Any, Any] | None:
        """Two values of one dtype or an address and an offset, as yet of two shapes; None for what is not common."""
        left, right = type(lhs) is tl.tensor, type(rhs) is tl.tensor
        if left and right:
            a, b = lhs.dtype, rhs.dtype
            if type(b) is tl.dtype and type(a) is tl.dtype:
                to = _computed(a.name, False, b.name, False, div_or_mod)
                return (
                    lhs if a.name == to.name else self.cast(lhs, to),
                    rhs if b.name == to.name else self.cast(rhs, to),
                )
            if allow_lhs_ptr and type(a) is tl.pointer_type and type(b) is tl.dtype and b.name in _LIMITS:
                return lhs, rhs
            return None
        if not left and not right:
            return None
        value, number = (lhs, rhs) if left else (rhs, lhs)
        name, dtype = _number_type(number), value.dtype
        if name is None or type(dtype) is not tl.dtype:
            return None
        operands = (dtype.name, False, name, True) if left else (name, True, dtype.name, False)
        to = _computed(*operands, div_or_mod)
        if to.name in _LIMITS:
            low, high = _LIMITS[to.name]
            if not low <= number <= high:
                return None
        if dtype.name != to.name:
            value = self.cast(value, to)
        constant = self.scalar_constant(number, to)
        return (value, constant) if left else (constant, value)

    def broadcast_impl_value(self, lhs: Any, rhs: Any) -> Any:
        a, b = lhs.type, rhs.type
        if type(a) is tl.block_type and type(b) is tl.block_type:
            if a.shape is b.shape:
                return lhs, rhs
            shape = _together(tuple(a.shape.values), tuple(b.shape.values))
            if shape is None:
                return super().broadcast_impl_value(lhs, rhs)
            return self._stretched(lhs, shape), self._stretched(rhs, shape)
        if type(a) is tl.block_type:
            return lhs, self._splat(rhs, a)
        if type(b) is tl.block_type:
            return self._splat(lhs, b), rhs
        return lhs, rhs

    def _stretched(self, value: Any, shape: list[int]) -> Any:
        if value.type.shape.values == shape:
            return value
        return tl.tensor(self.builder.create_broadcast(value.handle, shape), tl.block_type(value.dtype, shape))

    def _splat(self, value: Any, like: Any) -> Any:
        handle = value.handle
        data = np.full(like.shape.values, handle.data, dtype=interpreter._get_np_dtype(handle.dtype))
        type_ = like if like.element_ty is value.dtype else tl.block_type(value.dtype, like.shape)
        return tl.tensor(TensorHandle(data, handle.dtype.scalar), type_)

    def cast(self, input: Any, dst_ty: Any, fp_downcast_rounding: str | None = None) -> Any:
        a, b = input.dtype, dst_ty.scalar
        if a is b or (type(a) is tl.dtype and type(b) is tl.dtype and a.name == b.name):
            return input
        return super().cast(input, dst_ty, fp_downcast_rounding)

    def to_tensor(self, x: Any, check_type: bool = True) -> Any:
        if type(x) is tl.tensor:
            return x
        name = _number_type(x)
        return super().to_tensor(x, check_type) if name is None else self.scalar_constant(x, _DTYPES[name])


def patch_attr(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """`interpreter._patch_attr`: one semantic for all, and no wrapper that asks whether there is one."""
    function, semantic = getattr(member, "__wrapped__", member), _semantic(builder)

    def called(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, called)


@cache
def _semantic(builder: Any) -> Semantic:
    return Semantic(builder)
