"""Runs Gluon kernels on the CPU, which has no interpreter for them: their source, over numpy arrays.

Layouts are ignored: they say which lane holds a value, never its value; the compiler checks them. Programs run one
after another in any order, instructions of a program one after another. Shared memory begins as NaN, words where
nothing was loaded are any, and every address must lie in its array. Copies arrive at once, and barriers count their
bytes. So what is left out is the order of threads, and of copies among these.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.launch import MAP_TYPE
from wicore_trt.plugins.layout import Launch, TensorMap

ANY = np.random.default_rng()
BFLOAT16 = "bfloat16"


def _raw(value: Any) -> Any:
    return value.a if isinstance(value, Tensor) else value


class Tensor:
    """An array; bfloat16 is kept in float32."""

    def __init__(self, a: Any) -> None:
        self.a = np.asarray(a)

    def to(self, dtype: Any) -> Tensor:
        if dtype is BFLOAT16:
            return Tensor(torch.from_numpy(np.ascontiguousarray(self.a, np.float32)).bfloat16().float().numpy())
        return Tensor(self.a.astype(dtype))


def _tensor_method(name: str) -> Any:
    return lambda self, other: Tensor(getattr(self.a, name)(_raw(other)))


for _name in ("add", "radd", "sub", "rsub", "mul", "rmul", "floordiv", "mod", "truediv", "rtruediv", "and", "lt"):
    setattr(Tensor, f"__{_name}__", _tensor_method(f"__{_name}__"))


class Scalar(int):
    """An integer of a program."""

    def to(self, _: Any) -> Scalar:
        return self


def _scalar_method(name: str) -> Any:
    def method(self: Scalar, other: Any) -> Any:
        found = getattr(int, name)(self, other)
        return found if found is NotImplemented else Scalar(found)

    return method


for _name in ("add", "radd", "sub", "mul", "rmul", "floordiv", "mod"):
    setattr(Scalar, f"__{_name}__", _scalar_method(f"__{_name}__"))


class Pointers:
    """Indices into an array; `type` is that of its elements."""

    def __init__(self, base: Any, type_: Any, at: Any = 0) -> None:
        self.base, self.type, self.at = base, type_, np.asarray(at)
        self.dtype = self
        self.element_ty = type_

    def __add__(self, other: Any) -> Pointers:
        return Pointers(self.base, self.type, self.at + _raw(other))

    def to(self, dtype: Any) -> Pointers:
        return Pointers(self.base.view(dtype), dtype, self.at)

    def find(self, mask: Any) -> tuple[Any, Any]:
        """(Indices, which of them are live)."""
        at, live = np.broadcast_arrays(self.at, np.asarray(True if mask is None else _raw(mask)))
        assert ((at[live] >= 0) & (at[live] < len(self.base))).all(), "an address outside of its array"
        return np.where(live, at, 0), live


class Map:
    """A tensor map; elements outside of the array are zeros."""

    layout = None

    def __init__(self, type_: str, array: TensorMap) -> None:
        found = MAP_TYPE.match(type_)
        assert found
        flat = array.address.contiguous().flatten()
        self.dtype = {"bf16": BFLOAT16, "fp16": np.float16, "i32": np.int32}[found["item"]]
        flat = flat.float().numpy() if self.dtype is BFLOAT16 else flat.numpy().view(self.dtype)
        item = 2 if found["item"] == "bf16" else flat.itemsize
        assert all(stride % 16 == 0 for stride in array.strides) and max(self.box_of(found)) <= 256
        strides = [stride // item for stride in array.strides] + [1]
        assert sum((n - 1) * s for n, s in zip(array.extents, strides, strict=True)) < len(flat)
        self.a = np.lib.stride_tricks.as_strided(flat, array.extents, [s * flat.itemsize for s in strides])
        self.box, self.bytes = self.box_of(found), item * int(np.prod(self.box_of(found)))

    @staticmethod
    def box_of(found: re.Match[str]) -> list[int]:
        return [int(size) for size in found["box"].split(",")]


class Barrier:
    """Barrier of copies in shared memory: bytes that it expects and that came."""

    phase, expected, came = 0, None, 0


class Barriers:
    """`hopper.mbarrier` and `hopper.tma`."""

    MBarrierLayout = type("MBarrierLayout", (), {})

    def init(self, bar: Barrier, count: int) -> None:
        assert count == 1

    def expect(self, bar: Barrier, count: int, live: bool) -> None:
        if live:
            assert bar.expected is None, "a stage is asked for twice"
            bar.expected, bar.came = count, 0

    def wait(self, bar: Barrier, parity: int) -> None:
        assert bar.expected == bar.came and bar.phase % 2 == parity, (bar.expected, bar.came, bar.phase, parity)
        bar.phase, bar.expected = bar.phase + 1, None

    def invalidate(self, bar: Barrier) -> None:
        assert bar.expected is None, "copies are under way at the end"

    def async_copy_global_to_shared(self, from_: Map, at: Sequence[int], bar: Barrier, to: Memory, live: bool) -> None:
        if live:
            assert [*to.a.shape] == from_.box and min(at) >= 0
            box = tuple(slice(int(b), int(b) + n) for b, n in zip(at, from_.box, strict=True))
            to.a[...] = 0
            to.a[tuple(slice(0, n) for n in from_.a[box].shape)] = from_.a[box]
            bar.came += from_.bytes


class Memory:
    """Shared memory."""

    def __init__(self, a: Any, dtype: Any = None) -> None:
        self.a, self.dtype = a, dtype

    def index(self, i: int) -> Any:
        assert 0 <= i < len(self.a)
        return self.a[int(i)] if isinstance(self.a, list) else Memory(self.a[int(i)], self.dtype)

    def slice(self, start: int, length: int, dim: int = 0) -> Memory:
        assert start + length <= self.a.shape[dim]
        return Memory(np.moveaxis(np.moveaxis(self.a, dim, 0)[start : start + length], 0, dim), self.dtype)

    def permute(self, order: Sequence[int]) -> Memory:
        return Memory(self.a.transpose(order), self.dtype)

    def reshape(self, shape: Sequence[int]) -> Memory:
        return Memory(self.a.reshape(shape), self.dtype)

    def store(self, value: Tensor) -> None:
        assert self.a.shape == value.a.shape
        self.a[...] = value.a

    def load(self, _: Any) -> Tensor:
        return Tensor(self.a.copy())


class Language:
    """Names of `gluon.language` and of its `hopper` that kernels use; other names are layouts."""

    float32, float16, int32, int64, bfloat16 = np.float32, np.float16, np.int32, np.int64, BFLOAT16
    program, grid = 0, (1, 1, 1)

    def __getattr__(self, name: str) -> Any:
        assert name.endswith("Layout"), name
        return type(name, (), {"__init__": lambda self, *given: setattr(self, "given", given)})

    def program_id(self, _: int) -> Scalar:
        return Scalar(self.program)

    def pointer_type(self, dtype: Any) -> Any:
        return dtype

    def static_range(self, *bounds: int) -> range:
        return range(*bounds)

    def cdiv(self, a: int, b: int) -> Scalar:
        return Scalar(-(-a // b))

    def minimum(self, a: Any, b: Any) -> Any:
        return Tensor(np.minimum(_raw(a), _raw(b))) if isinstance(a, Tensor) else Scalar(min(a, b))

    def where(self, condition: bool, a: Any, b: Any) -> Any:
        return a if condition else b

    def zeros(self, shape: Sequence[int], dtype: Any, _: Any) -> Tensor:
        return Tensor(np.zeros(shape, dtype))

    def reshape(self, value: Tensor, shape: Sequence[int]) -> Tensor:
        return Tensor(value.a.reshape(shape))

    def permute(self, value: Tensor, order: Sequence[int]) -> Tensor:
        return Tensor(value.a.transpose(order))

    def expand_dims(self, value: Tensor, dim: int) -> Tensor:
        return Tensor(np.expand_dims(value.a, dim))

    def join(self, a: Tensor, b: Tensor) -> Tensor:
        return Tensor(np.stack([a.a, b.a], -1))

    def split(self, value: Tensor) -> tuple[Tensor, Tensor]:
        assert value.a.shape[-1] == 2
        return Tensor(value.a[..., 0]), Tensor(value.a[..., 1])

    def convert_layout(self, value: Tensor, _: Any, assert_trivial: bool = False) -> Tensor:
        return value

    def broadcast(self, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        return Tensor(np.broadcast_arrays(a.a, b.a)[0]), b

    def fma(self, a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        return Tensor((a.a.astype(np.float64) * b.a + c.a).astype(np.float32))

    def exp(self, value: Tensor) -> Tensor:
        return Tensor(np.exp(value.a))

    def load(self, at: Pointers, mask: Any = None, other: Any = None, **_: Any) -> Tensor:
        places, live = at.find(mask)
        return Tensor(np.where(live, at.base[places], 0 if other is None else other).astype(at.base.dtype))

    def store(self, at: Pointers, value: Any, mask: Any = None, **_: Any) -> None:
        places, live = at.find(mask)
        at.base[places[live]] = np.broadcast_to(_raw(value), live.shape)[live]

    def atomic_add(self, at: Pointers, value: int, **_: Any) -> int:
        places, _live = at.find(None)
        at.base[places] += value
        return int(at.base[places]) - value

    def thread_barrier(self) -> None: ...

    def fence_async_shared(self) -> None: ...

    def allocate_shared_memory(self, dtype: Any, shape: Sequence[int], layout: Any) -> Memory:
        if isinstance(layout, Barriers.MBarrierLayout):
            return Memory([Barrier() for _ in range(shape[0])])
        kept = np.dtype(np.float32 if dtype is BFLOAT16 else dtype)
        begin = np.full(shape, np.nan, kept) if kept.kind == "f" else ANY.integers(0, 1 << 31, shape).astype(kept)
        return Memory(begin, dtype)

    def inline_asm_elementwise(self, text: str, _: str, values: list[Tensor], *__: Any) -> list[Tensor]:
        """`linear_q4`'s widening: halves of a word's bytes to values of -8 to 7, first all low ones."""
        assert text.count("0x000f000f") == 4 and "prmt.b32 first, $8, 0, 0x4140;" in text, text
        shifts = [8 * (i % 4) + 4 * (i // 4) for i in range(8)]
        return [Tensor((values[0].a >> s & 15).astype(np.float32) - 8) for s in shifts]

    def warpgroup_mma(self, a: Tensor, b: Memory, c: Tensor, *, use_acc: bool = True, is_async: bool) -> Tensor:
        total = np.einsum("mk,kn->mn", a.a.astype(np.float64), b.a.astype(np.float64))
        assert is_async
        return Tensor((total + c.a if use_acc else total).astype(np.float32))

    def warpgroup_mma_wait(self, _: int, deps: list[Tensor]) -> tuple[Tensor, ...]:
        return tuple(deps)


def _count(size: int, dim: int, layout: Any) -> Tensor:
    """In place of the kernels' function of this name, which finds dimensions by layout."""
    return Tensor(np.arange(size).reshape([size if i == dim else 1 for i in range(_rank(layout))]))


def _rank(layout: Any) -> int:
    """Dimensions of a layout, by what it was made of."""
    name, given = type(layout).__name__, layout.given
    if name == "SliceLayout":
        return _rank(given[1]) - 1
    return {"NVMMADistributedLayout": 2}.get(name) or len(given[0])


def launch(spec: KernelSpec, call: Launch) -> None:
    """Run `call` on CPU tensors. Its names must be the spec's, as for the launcher."""
    assert {*call.arguments} == {*spec.signature}, {*call.arguments} ^ {*spec.signature}
    language, module = Language(), inspect.getmodule(spec.function.fn)
    source = re.sub(r"^@gluon\..*\n", "", inspect.getsource(module), flags=re.M)
    source = re.sub(r"^(?:from|import) (?!__future__).*(?:\n    .*|\n\))*$", "", source, flags=re.M)
    source = re.sub(r"^[A-Z0-9_]+(, | = gl.constexpr).*$", "", source, flags=re.M)
    names = {n: getattr(getattr(module, n), "value", None) for n in vars(module) if n.isupper()}
    names |= {"gl": language, "hopper": language, "take_turn": lambda mode: None}
    names |= dict.fromkeys(("mbarrier", "tma"), Barriers())
    exec(compile(source, str(module.__file__), "exec"), names)
    names["_count"] = _count
    given: dict[str, Any] = {}
    copies = []
    for name, type_ in spec.signature.items():
        value = call.arguments[name]
        if MAP_TYPE.match(type_):
            given[name] = Map(type_, value)
        elif not type_.startswith("*"):
            given[name] = Scalar(value) if type_[0] == "i" else value
        elif isinstance(value, int):
            given[name] = Pointers(np.empty(0, np.float32), np.float32)
        else:
            wide = value.dtype == torch.bfloat16
            array = (value.float() if wide else value).contiguous().flatten().numpy()
            given[name] = Pointers(array, BFLOAT16 if wide else array.dtype.type)
            copies.append((value, array))
    for program in ANY.permutation(call.grid[0]):
        language.program = int(program)
        with np.errstate(all="ignore"):
            names[spec.function.fn.__name__](**given, **spec.constants)
    for value, array in copies:
        value.copy_(torch.from_numpy(array).view(value.shape))
