"""Triton's types, made quick for its interpreter: what a shape or a dtype says is worked out once.

By itself the interpreter does that for every value, which took half of its time. It must not know kernels. Invariant:
values and types are what Triton 3.6 makes of the same arguments, errors included (but 2.0 is taken for 2).
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np
import triton.language as tl
from triton._utils import validate_block_shape
from triton.runtime import interpreter

Sizes = tuple[int, ...]
_of_scalar = cache(interpreter._get_np_dtype)


@cache
def _of_type(sizes: Sizes) -> tuple[Any, int, str]:
    """Shape, number of elements and the shape's text, as a block type has them."""
    if not sizes:
        raise TypeError("0d block_type is forbidden")
    shape = tl.core.tuple(sizes)
    return shape, validate_block_shape(shape), str(shape)


@cache
def _of_value(sizes: Sizes) -> tuple[Any, Any]:
    """Shape and number of elements, as a tensor has them."""
    return tl.core.tuple([tl.constexpr(s) for s in sizes]), tl.constexpr(math.prod(sizes))


def block_type_init(self: Any, element_ty: Any, shape: Any) -> None:
    """`block_type.__init__`."""
    assert isinstance(shape, (list, tl.core.tuple))
    values = shape.values if type(shape) is tl.core.tuple else shape
    sizes = tuple([s.value if isinstance(s, tl.constexpr) else s for s in values])
    self.element_ty = element_ty
    self.shape, self.numel, text = _of_type(sizes)
    self.name = f"<{text}, {element_ty}>"


def tensor_init(self: Any, handle: Any, type: Any) -> None:
    """`tensor.__init__`."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.shape, self.numel = _of_value(tuple(type.shape.values) if type.is_block() else ())


def np_dtype(type: Any) -> np.dtype:
    """`interpreter._get_np_dtype`."""
    if isinstance(type, tl.block_type):
        type = type.element_ty
    return np.dtype(np.uint64) if isinstance(type, tl.pointer_type) else _of_scalar(type)
