"""Runs Triton kernels in Triton's interpreter, on the CPU, in a process that compiles kernels as well.

`triton.jit` decides when it decorates, by TRITON_INTERPRET, whether a function is interpreted; a process that sets it
cannot compile. So here the compiled functions stay as they are, and `launch` puts interpreted ones in their place while
it runs: those of the kernel's module, and those of Triton's own library (tl.sum, tl.max, ...). The interpreter also
patches `triton.language` and leaves some patches behind; all are undone. Programs run in a random order, as a GPU has
none. Every address that a kernel touches must lie in one of its arguments. Triton 3.6's interpreter keeps bfloat16 as
uint16, truncates where GPUs round, and multiplies matrices of the integers; `_bfloat16` mends that. `_float8` mends its
conversions to E4M3 and its fused products.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from types import FunctionType
from typing import Any

import numpy as np
import torch
import triton.experimental.gluon  # noqa: F401 - the first launch imports it, and it must find compiled functions
import triton.language as tl
from gpu_kernels import quick_semantic, quick_types
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, InterpreterOptions, TensorHandle
from triton.runtime.jit import JITFunction

from wicore_trt.plugins.aot import CompiledKernel, KernelSpec
from wicore_trt.plugins.dependent import ALONE, ORDINARY
from wicore_trt.plugins.layout import Launch

PATCHED = (
    *(tl, tl.core, tl.math, tl.tensor, tl.dtype, tl.core.tensor_descriptor_base, tl.block_type),
    *(interpreter, TensorHandle),
)
MISSING, ALONE_THERE = object(), nullcontext()
OPTIONS = InterpreterOptions(sanitize_overflow=False)
"""By default every sum of integers is computed again in 64 bits, for a `device_assert` that without `debug` is none."""
Names = dict[str, Any]


def _scalar_index(scalar: Any) -> int:
    """The interpreter keeps scalars in arrays of one element, which numpy >= 2.4 no longer turns into an int; Triton
    3.6 does that for every loop bound that is not a constant."""
    return int(scalar.handle.data.item())


def _put(owner: Any, names: Names) -> None:
    for name, value in names.items():
        delattr(owner, name) if value is MISSING else setattr(owner, name, value)


@cache
def _language() -> list[Names]:
    """What the interpreter, `quick_types` and `quick_semantic` set on each of `PATCHED`. The interpreter looks its five
    hundred names up again at every launch and at every call of one function by another, which took a third of the
    tests' time; they are always the same."""
    before = [dict(vars(o)) for o in PATCHED]
    interpreter._patch_attr = quick_semantic.patch_attr
    interpreter._patch_lang(FunctionType((lambda: None).__code__, {"tl": tl, "core": tl.core}))
    interpreter.interpreter_semantic = quick_semantic.Semantic(interpreter.interpreter_builder)
    tl.core._unwrap_if_constexpr = quick_semantic.unwrap
    TensorHandle.__init__ = quick_semantic.handle_init
    tl.tensor.__index__ = _scalar_index
    tl.tensor.__init__ = quick_types.tensor_init
    tl.block_type.__init__ = quick_types.block_type_init
    interpreter._get_np_dtype = quick_types.np_dtype
    found = [{n: v for n, v in vars(o).items() if v is not b.get(n)} for o, b in zip(PATCHED, before, strict=True)]
    for o, names, b in zip(PATCHED, found, before, strict=True):
        _put(o, {n: b.get(n, MISSING) for n in names})
    return found


_interpreted = cache(InterpretedFunction)


def _functions(function: FunctionType) -> list[tuple[Names, Names]]:
    """Namespaces of all modules that `function` reaches, each with what stands for its compiled functions meanwhile."""
    spaces: dict[int, Names] = {}
    left = [vars(tl), vars(tl.standard), function.__globals__]
    while left:
        names = left.pop()
        if id(names) not in spaces:
            spaces[id(names)] = names
            left += [f.fn.__globals__ for f in names.values() if isinstance(f, JITFunction)]
    return [
        (names, {n: _interpreted(f.fn) for n, f in names.items() if isinstance(f, JITFunction)})
        for names in spaces.values()
    ]


@contextmanager
def _interpreting(function: JITFunction) -> Iterator[InterpretedFunction]:
    """The function, interpreted, in a process patched for it. Rewritten functions are kept from launch to launch: they
    find all that they call by name, in the namespaces of their modules, and of the interpreter its semantic."""
    spaces = _functions(function.fn)
    language = [(o, n, {k: vars(o).get(k, MISSING) for k in n}) for o, n in zip(PATCHED, _language(), strict=True)]
    kept = [dict(names) for names, _ in spaces]
    patch_lang = interpreter._patch_lang
    interpreter._patch_lang = lambda _: interpreter._LangPatchScope()  # nothing is left to do, and nothing to restore
    try:
        for o, names, _ in language:
            _put(o, names)
        for names, functions in spaces:
            names.update(functions, interpreter_semantic=interpreter.interpreter_semantic)
        yield _interpreted(function.fn)
    finally:
        interpreter._patch_lang = patch_lang
        for (names, _), before in zip(spaces, kept, strict=True):
            names.clear()
            names.update(before)
        for o, _, before in language:
            _put(o, before)


@contextmanager
def _patched(**members: Any) -> Iterator[None]:
    """Members of the interpreter, replaced."""
    builder = interpreter.interpreter_builder
    before = dict(vars(builder))
    vars(builder).update(members)
    try:
        yield
    finally:
        _put(builder, {name: before.get(name, MISSING) for name in members})


def _bfloat16() -> dict[str, Any]:
    """Conversions and products of bfloat16 as GPUs do them."""
    cast = interpreter.interpreter_builder.cast_impl

    def widened(x: Any) -> Any:
        if x.dtype.scalar != tl.bfloat16:
            return x
        return TensorHandle((x.data.astype(np.uint32) << 16).view(np.float32), tl.float32)

    def right_cast(x: Any, to: Any) -> Any:
        if x.dtype.scalar == tl.float32 and to.scalar == tl.bfloat16:
            rounded = torch.from_numpy(np.ascontiguousarray(x.data)).to(torch.bfloat16)
            return TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), tl.bfloat16)
        if x.dtype.scalar == tl.bfloat16 and to.scalar == tl.float32:
            return widened(x)
        return cast(x, to)

    def factor(x: Any) -> Any:
        if x.dtype.primitive_bitwidth == 8 and x.dtype.is_floating():
            return interpreter._convert_float(x.data, x.dtype, tl.float16, None).view(np.float16).astype(np.float64)
        return widened(x).data.astype(np.float64)

    def right_dot(a: Any, b: Any, d: Any, *_: Any) -> Any:
        # Not numpy's matmul: on some processors its library rounds a row otherwise in another place, as no kernel does.
        total = np.einsum("...mk,...kn->...mn", factor(a), factor(b)).astype(d.data.dtype)
        return TensorHandle(total + d.data, d.dtype.scalar)

    return {"cast_impl": right_cast, "create_dot": right_dot}


def _float8() -> dict[str, Any]:
    """Conversions of float32 to E4M3 (to nearest even, saturated) and back, and fused products, as GPUs do them."""
    convert = interpreter.interpreter_builder.create_fp_to_fp

    def right_convert(x: Any, to: Any, rounding: Any) -> Any:
        if x.dtype.scalar == tl.float32 and to.scalar == tl.float8e4nv:
            value = torch.from_numpy(np.ascontiguousarray(x.data)).clamp(-448, 448)
            return TensorHandle(value.to(torch.float8_e4m3fn).view(torch.uint8).numpy(), tl.float8e4nv)
        if x.dtype.scalar == tl.float8e4nv and to.scalar in (tl.float16, tl.float32):  # 0x7F is NaN, not 480
            value = torch.from_numpy(np.ascontiguousarray(x.data).view(np.uint8)).view(torch.float8_e4m3fn)
            return TensorHandle(
                value.to(torch.float16 if to.scalar == tl.float16 else torch.float32).numpy(), to.scalar
            )
        return convert(x, to, rounding)

    def right_fma(x: Any, y: Any, z: Any) -> Any:
        # Exact in float64 but for the addition; a second rounding that matters is too rare to meet.
        exact = x.data.astype(np.float64) * y.data.astype(np.float64) + z.data.astype(np.float64)
        return TensorHandle(exact.astype(np.float32), z.dtype.scalar)

    class Nibbles:
        """Does as `linear_q4` tells the GPU: halves of a word's bytes to values of -8 to 7, first all low ones."""

        def __init__(self, text: str, values: list[Any]) -> None:
            assert text.count("0x000f000f") == 4 and "prmt.b32 first, $8, 0, 0x4140;" in text, text
            self._type = tl.bfloat16 if "bf16x2" in text else tl.float16
            self._words = values[0].data

        def get_result(self, index: int) -> Any:
            shift = 8 * (index % 4) + 4 * (index // 4)
            found = torch.from_numpy((self._words >> shift & 15).astype(np.float32) - 8)
            if self._type == tl.float16:
                return TensorHandle(found.to(torch.float16).numpy(), tl.float16)
            return TensorHandle(found.to(torch.bfloat16).view(torch.int16).numpy().view(np.uint16), tl.bfloat16)

    class Pairs:
        """What `e4m3.halves` tells the GPU to do."""

        def __init__(self, text: str, constraints: str, values: list[Any], types: list[Any], pure: bool, pack: int):
            assert "prmt.b32 sorted, $2, $2, 0x3120;" in text and text.count("cvt.rn.f16x2.e4m3x2") == 2, text
            self._bytes = np.ascontiguousarray(values[0].data)

        def get_result(self, index: int) -> Any:
            chosen = torch.from_numpy(((self._bytes >> (8 * index)) & 0xFF).astype(np.uint8))
            return TensorHandle(chosen.view(torch.float8_e4m3fn).to(torch.float16).numpy(), tl.float16)

    def assemble(text: str, constraints: str, values: list[Any], *rest: Any) -> Any:
        return Nibbles(text, values) if "0x000f000f" in text else Pairs(text, constraints, values, *rest)

    return {"create_fp_to_fp": right_convert, "create_fma": right_fma, "create_inline_asm": assemble}


def _within(tensors: list[torch.Tensor], turns: AbstractContextManager[Any]) -> dict[str, Any]:
    """Loads and stores that are AssertionErrors outside of the memory of `tensors`, each within `turns`."""
    builder = interpreter.interpreter_builder
    load, store = builder.create_masked_load, builder.create_masked_store
    memory = [t.untyped_storage() for t in tensors]
    bounds = [(m.data_ptr(), m.data_ptr() + m.nbytes()) for m in memory if m.nbytes()]

    def check(pointers: Any, mask: Any) -> None:
        every = mask.data.all()
        touched = (
            pointers.data if every else pointers.data[np.broadcast_to(mask.data.astype(bool), pointers.data.shape)]
        )
        if not touched.size:
            return
        size = pointers.get_element_ty().primitive_bitwidth // 8
        least, most = touched.min(), touched.max() + np.uint64(size)
        if any(low <= least and most <= high for low, high in bounds):
            return
        inside = np.zeros(touched.shape, bool)
        for low, high in bounds:
            inside |= (touched >= low) & (touched + size <= high)
        assert inside.all(), "a kernel touches memory that is not its own"

    def checked_load(pointers: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        check(pointers, mask)
        with turns:
            return load(pointers, mask, *rest, **more)

    def checked_store(pointers: Any, value: Any, mask: Any, *rest: Any, **more: Any) -> Any:
        check(pointers, mask)
        with turns:
            return store(pointers, value, mask, *rest, **more)

    return {"create_masked_load": checked_load, "create_masked_store": checked_store}


def _shuffled(grid: tuple[int, int, int]) -> dict[str, Any]:
    """Programs of `grid` in an order of no meaning, as a GPU has none: two that touch one place are found."""
    place, count = interpreter.interpreter_builder.set_grid_idx, math.prod(grid)
    order = iter(random.Random(count).sample(range(count), count))

    def place_next(*_: int) -> None:
        rest, z = divmod(next(order), grid[2])
        place(*divmod(rest, grid[1]), z)

    return {"set_grid_idx": place_next}


def launch(
    spec: KernelSpec,
    call: Launch,
    reached: Sequence[torch.Tensor] = (),
    turns: AbstractContextManager[Any] = ALONE_THERE,
) -> None:
    """Run `call` on CPU tensors; the integer 0 is a null pointer. Its names must be the spec's, as for the launcher.
    Kernels also find the memory of `reached`, by addresses in that of arguments. Ranks, each in its process, load and
    store by `turns`, a lock: the interpreter writes an item byte by byte, a GPU all of it at once."""
    assert {*call.arguments} == {*spec.signature}, {*call.arguments} ^ {*spec.signature}
    arguments = dict(call.arguments)
    for name, type_ in spec.signature.items():
        if type_.startswith("*") and isinstance(arguments[name], int):
            arguments[name] = torch.empty(0)  # its address is 0
    tensors = [*(a for a in arguments.values() if isinstance(a, torch.Tensor)), *reached]
    mended = {**_bfloat16(), **_float8(), **_within(tensors, turns), **_shuffled(call.grid), "options": OPTIONS}
    with _interpreting(spec.function) as kernel, _patched(**mended), np.errstate(all="ignore"):
        kernel.run(**arguments, **spec.constants, grid=call.grid, warmup=False)


def uncompiled(spec: KernelSpec) -> CompiledKernel:
    """A kernel as if compiled."""
    arguments = tuple(spec.signature.items())
    symbol = spec.function.__name__
    facts = (spec.name, symbol, "sm0", arguments, spec.aligned, spec.constants, 4, 1, 0, "none", b"")
    return CompiledKernel(*facts, dependent=spec.dependent not in (ORDINARY, ALONE))
