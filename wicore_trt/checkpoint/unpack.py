"""Decode the quantized modules of Hugging Face sources: one table of kinds, each a layout and a small function.

Layouts and formulas are those of compressed-tensors, ModelOpt, mlx.core.dequantize, bitsandbytes, AutoAWQ and
AutoGPTQ (`wicore_trt.checkpoint.quantized` reads their keys). It must not know the unified checkpoint. Invariant: every
value is the formula's in float32, of integers and scales as stored; a part of another shape or dtype is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from wicore_trt.arithmetic import div_ceil
from wicore_trt.checkpoint.blocks import GROUP, join_q4_0
from wicore_trt.checkpoint.names import Role, activation_scale_name, kv_scale_name, run_weights
from wicore_trt.checkpoint.quantize import FLOATS, e4m3_values, to_float32
from wicore_trt.checkpoint.quantized import FIX, PackedForm, check_keys
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile, TensorInfo
from wicore_trt.errors import CheckpointError, named, shown
from wicore_trt.files import UntrustedFiles
from wicore_trt.model.spec import Gemma3Spec

_STATE = "weight.quant_state.bitsandbytes__nf4"
_STATE_BYTES = 4096
_NF4 = np.array(
    [
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ],
    np.float32,
)  # fmt: skip
"""Levels of NF4 (arXiv:2305.14314, appendix E), which bitsandbytes' kernels have built in."""
_AWQ_ORDER = [0, 4, 1, 5, 2, 6, 3, 7]  # the nibble that holds each of eight outputs
_BLOCKS = (64, 128, 256, 512, 1024, 2048, 4096)


class PackedModule:
    """Quantized module, whose weight is [rows, columns] in `groups` of one scale a row; `parts` are its tensors by
    name within the module. Raises CheckpointError for parts that do not fit the form and one another."""

    rows: int
    columns: int
    groups: int

    def __init__(
        self, form: PackedForm, module: str, parts: Mapping[str, tuple[SafetensorsFile, str]], memo: dict[str, Any]
    ) -> None:
        self.form, self.module, self.parts, self._memo = form, module, parts, memo
        self.path, self.state = next(iter(parts.values()))[0].path, dict[str, Any]()
        size, self.bits = form.sizes_of(module)
        kind = KINDS[form.kind]
        if not form.is_covered(module):
            raise self.make_error("is quantized, and its configuration says that it is not")
        for part in (*kind.parts, *(["input_scale"] if form.static else [])):
            if part not in parts and (part not in kind.optional or form.ordered):
                raise self.make_error(f"lacks {part}")
        self.rows, self.columns = kind.measure(self)
        if self.columns % (size or self.columns):
            raise self.make_error(f"has {self.columns} columns, which groups of {size} do not divide")
        self.groups = self.columns // (size or self.columns)
        for part, (tags, find_shapes) in (kind.parts | {"input_scale": (FLOATS, lambda m: ((), (1,)))}).items():
            if part in parts and ((info := self.info(part)).dtype not in tags or info.shape not in find_shapes(self)):
                fits = f"{' or '.join(tags)} {list(find_shapes(self)[0])}"
                raise self.make_error(f"has {part} as {info.dtype} {list(info.shape)}, not {fits}")

    def make_error(self, what: str) -> CheckpointError:
        return CheckpointError(f"{self.path}: {named(self.module)}, of {self.form.title}, {what}.", fix=FIX)

    def info(self, part: str) -> TensorInfo:
        file, raw = self.parts[part]
        return file.tensors[raw]

    def measure_dims(self, part: str) -> tuple[int, int]:
        """Return the shape of a part, which must be a matrix."""
        shape = self.info(part).shape
        if len(shape) != 2:
            raise self.make_error(f"has {part} as {list(shape)}, which is no matrix")
        return shape[0], shape[1]

    def read_rows(self, part: str, start: int, stop: int) -> np.ndarray:
        """Read rows of a part, floats as float32."""
        file, raw = self.parts[part]
        block, tag = file.read_rows(raw, start, stop), file.tensors[raw].dtype
        return to_float32(block, tag) if tag in FLOATS else block

    def read_whole(self, part: str) -> np.ndarray:
        """Read a whole part; a scalar is one row. Parts of one module are kept until another is read."""
        if self._memo.get("module") is not self:
            self._memo.clear()
            self._memo["module"] = self
        if part not in self._memo:
            self._memo[part] = self.read_rows(part, 0, (*self.info(part).shape, 1)[0])
        return np.asarray(self._memo[part])

    def decode_rows(self, start: int, stop: int) -> np.ndarray:
        """Decode rows [start, stop) of the weight, float32 [stop - start, columns]."""
        with np.errstate(invalid="ignore", over="ignore"):  # the converter refuses what is not finite
            return KINDS[self.form.kind].decode(self, start, stop)

    def repeat_groups(self, scales: np.ndarray) -> np.ndarray:
        """Repeat [rows, groups] to [rows, columns]."""
        return np.repeat(scales, self.columns // scales.shape[1], axis=1)


def read_e4m3(module: PackedModule, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Read rows of an FP8 module: E4M3 bits uint8 [rows, in], and float32 [rows], a tensor's one scale repeated.
    Raises CheckpointError for a NaN and for scales that are not finite and above 0."""
    bits = module.read_rows("weight", start, stop)
    scales = module.read_whole("weight_scale").reshape(-1)
    scales = np.repeat(scales, stop - start) if scales.size == 1 else scales[start:stop]
    with np.errstate(over="ignore", invalid="ignore"):
        good = np.isfinite(scales * np.float32(448)) & (scales > 0)
    wrong = np.flatnonzero(~good | ((bits & 0x7F) == 0x7F).any(axis=1))
    if wrong.size:
        raise module.make_error(f"has a NaN, or a scale that is not finite and above 0, in row {start + wrong[0]}")
    return bits, scales


def read_integers(module: PackedModule, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Read rows of a symmetric module, compressed-tensors' or GPTQ's: int8 [rows, in] from -2^(bits-1), and float32
    scales [rows, groups]; the groups are consecutive if GPTQ has no g_idx."""
    if module.form.kind == "pack":
        codes = unpack_words(module.read_rows("weight_packed", start, stop), module.bits)[:, : module.columns]
        scales = module.read_rows("weight_scale", start, stop)
    else:
        codes = unpack_words(module.read_whole("qweight")[:, start:stop].T, module.bits)
        scales = module.read_whole("scales")[:, start:stop].T
    return (codes - np.uint8(1 << (module.bits - 1))).view(np.int8), scales


def fits_q4_0(module: PackedModule) -> bool:
    """Tell whether Q4_0 holds a module exactly: symmetric W4A16, or GPTQ whose columns have no order of their own, in
    groups of whole blocks, its scales float16."""
    part = {"pack": "weight_scale", "gptq": "scales"}.get(module.form.kind)
    if part is None or module.form.ordered or module.bits != 4 or module.columns // module.groups % GROUP:
        return False
    scales = module.read_whole(part)
    with np.errstate(over="ignore"):
        return bool((scales.astype(np.float16).astype(np.float32) == scales).all())


def read_q4_0(module: PackedModule, start: int, stop: int) -> np.ndarray:
    """Read rows of a module that fits as GGUF's Q4_0 blocks, uint8 [rows, bytes]; a wider group's scale is repeated."""
    _find_order(module)  # which must be that of the columns
    values, scales = read_integers(module, start, stop)
    wide = np.repeat(scales, module.columns // GROUP // module.groups, axis=1)
    return join_q4_0(values, wide.astype(np.float16))


def unpack_words(words: np.ndarray, bits: int) -> np.ndarray:
    """Unpack 32-bit words [..., n] of 4 or 8 bits each, lowest bits first: uint8 [..., n * 32 / bits]."""
    data: np.ndarray = np.ascontiguousarray(words).view(np.uint8)
    return data if bits == 8 else np.stack([data & 15, data >> 4], axis=-1).reshape(*data.shape[:-1], -1)


def _decode_e4m3(module: PackedModule, start: int, stop: int) -> np.ndarray:
    bits, scales = read_e4m3(module, start, stop)
    return np.asarray(e4m3_values()[bits] * scales[:, None])


def _measure_pack(module: PackedModule) -> tuple[int, int]:
    if module.info("weight_shape").shape != (2,):
        raise module.make_error("has a weight_shape that is no two numbers")
    rows, columns = map(int, module.read_whole("weight_shape"))
    if not (0 < rows < 1 << 32 and 0 < columns < 1 << 32):
        raise module.make_error(f"has the weight_shape {[rows, columns]}")
    return rows, columns


def _decode_ints(module: PackedModule, start: int, stop: int) -> np.ndarray:
    values, scales = read_integers(module, start, stop)
    return np.asarray(values * scales[:, _find_order(module)])


def _decode_mlx(module: PackedModule, start: int, stop: int) -> np.ndarray:
    codes = unpack_words(module.read_rows("weight", start, stop), module.bits)
    scales, biases = (module.repeat_groups(module.read_rows(part, start, stop)) for part in ("scales", "biases"))
    return np.asarray(codes * scales + biases)


def _decode_awq(module: PackedModule, start: int, stop: int) -> np.ndarray:
    first, last = start // 8, div_ceil(stop, 8)

    def read_codes(part: str) -> np.ndarray:
        nibbles = unpack_words(module.read_whole(part)[:, first:last], 4)
        ordered = nibbles.reshape(len(nibbles), -1, 8)[:, :, _AWQ_ORDER].reshape(len(nibbles), -1)
        return ordered[:, start - 8 * first : stop - 8 * first].T.view(np.int8)

    scales = module.read_whole("scales")[:, start:stop].T
    codes = read_codes("qweight") - module.repeat_groups(read_codes("qzeros"))
    return np.asarray(codes * module.repeat_groups(scales))


def _find_order(module: PackedModule) -> np.ndarray:
    """Return the group of each column of a module, int [columns]. Raises CheckpointError for GPTQ's order if
    configuration or groups do not allow it, and for zero points of weights that are not symmetric."""
    zero, parts = module.form.stored_zero, module.parts
    if "qzeros" in parts and (unpack_words(module.read_whole("qzeros"), module.bits)[:, : module.rows] != zero).any():
        raise module.make_error(f"has zero points other than {zero}, which symmetric GPTQ has")
    consecutive = np.arange(module.columns) * module.groups // module.columns
    order = module.read_whole("g_idx") if "g_idx" in parts else consecutive
    if order.min() < 0 or order.max() >= module.groups:
        raise module.make_error(f"has a g_idx outside of its {module.groups} groups")
    if not module.form.ordered and (order != consecutive).any():
        raise module.make_error("has a g_idx of its own, and desc_act is false")
    return order


def _measure_nf4(module: PackedModule) -> tuple[int, int]:
    info = module.info(_STATE)
    if info.dtype != "U8" or info.bytes > _STATE_BYTES:
        raise module.make_error("has a quant_state that is no short text")
    state = UntrustedFiles(fix=FIX).parse_json(bytes(module.read_whole(_STATE)), f"{module.path}: {_STATE}")
    nested = "weight.nested_absmax" in module.parts
    alike = "weight.nested_quant_map" in module.parts, module.info("weight.absmax").dtype == "U8"
    allowed: dict[str, tuple[Any, ...]] = {
        "quant_type": ("nf4",), "blocksize": _BLOCKS, "dtype": ("bfloat16", "float16", "float32"),
    }  # fmt: skip
    if nested:
        allowed |= {"nested_blocksize": _BLOCKS, "nested_dtype": ("float32",)}
    given = dict(state) if isinstance(state, dict) else {}
    shape, offset = given.pop("shape", None), given.pop("nested_offset", None) if nested else None
    check_keys(f"{module.path}: {module.module}.{_STATE}", given, allowed, allowed)
    sound = isinstance(shape, list) and len(shape) == 2 and all(type(n) is int and 0 < n < 1 << 32 for n in shape)
    if not sound or alike != (nested, nested) or prod(shape) % 2 or isinstance(offset, float) != nested:
        raise module.make_error(f"has the quant_state {shown(state)}")
    module.state = state
    return shape[0], shape[1]


def _count_blocks(module: PackedModule) -> int:
    return div_ceil(module.rows * module.columns, module.state["blocksize"])


def _decode_nf4(module: PackedModule, start: int, stop: int) -> np.ndarray:
    if not np.array_equal(module.read_whole("weight.quant_map"), _NF4):
        raise module.make_error("has a quant_map that is not NF4's")
    state, first, last = module.state, start * module.columns, stop * module.columns  # in the flat weight
    data = module.read_rows("weight", first // 2, div_ceil(last, 2)).reshape(-1)
    values = _NF4[np.stack([data >> 4, data & 15], axis=-1).reshape(-1)][first % 2 :][: last - first]
    low, high = first // state["blocksize"], div_ceil(last, state["blocksize"])
    scales = module.read_whole("weight.absmax")[low:high]
    if "weight.nested_absmax" in module.parts:
        outer = module.read_whole("weight.nested_absmax")[np.arange(low, high) // state["nested_blocksize"]]
        scales = module.read_whole("weight.nested_quant_map")[scales] * outer + np.float32(state["nested_offset"])
    spread = np.repeat(scales, state["blocksize"])[first - low * state["blocksize"] :][: last - first]
    return np.asarray(values * spread).reshape(stop - start, module.columns)


@dataclass(frozen=True, slots=True)
class Kind:
    """Storage of modules of one kind. `measure` finds rows and columns of the weight, `decode` its rows. `parts`,
    of which the first marks a module, have dtypes and the shapes that fit; the `optional` ones may lack."""

    measure: Callable[[PackedModule], tuple[int, int]]
    decode: Callable[[PackedModule, int, int], np.ndarray]
    parts: dict[str, tuple[tuple[str, ...], Callable[[PackedModule], tuple[tuple[int, ...], ...]]]]
    optional: tuple[str, ...] = ()


_I32 = ("I32",)
KINDS = {
    "e4m3": Kind(lambda m: m.measure_dims("weight"), _decode_e4m3, {
        "weight_scale": (FLOATS, lambda m: ((m.rows, 1), (m.rows,), (1,), ())),
        "weight": (("F8_E4M3",), lambda m: ((m.rows, m.columns),)),
    }),
    "pack": Kind(_measure_pack, _decode_ints, {
        "weight_packed": (_I32, lambda m: ((m.rows, div_ceil(m.columns * m.bits, 32)),)),
        "weight_scale": (FLOATS, lambda m: ((m.rows, m.groups),)), "weight_shape": (("I64", "I32"), lambda m: ((2,),)),
    }),
    "mlx": Kind(lambda m: (m.measure_dims("weight")[0], m.measure_dims("weight")[1] * 32 // m.bits), _decode_mlx, {
        "scales": (FLOATS, lambda m: ((m.rows, m.groups),)), "biases": (FLOATS, lambda m: ((m.rows, m.groups),)),
        "weight": (("U32",), lambda m: ((m.rows, m.columns * m.bits // 32),)),
    }),
    "awq": Kind(lambda m: (m.measure_dims("qweight")[1] * 8, m.measure_dims("qweight")[0]), _decode_awq, {
        "qweight": (_I32, lambda m: ((m.columns, m.rows // 8),)),
        "qzeros": (_I32, lambda m: ((m.groups, m.rows // 8),)),
        "scales": (FLOATS, lambda m: ((m.groups, m.rows),)),
    }),
    "gptq": Kind(lambda m: (m.measure_dims("qweight")[1], m.measure_dims("qweight")[0] * 32 // m.bits), _decode_ints, {
        "qweight": (_I32, lambda m: ((m.columns * m.bits // 32, m.rows),)),
        "qzeros": (_I32, lambda m: ((m.groups, div_ceil(m.rows * m.bits, 32)),)),
        "scales": (FLOATS, lambda m: ((m.groups, m.rows),)), "g_idx": (_I32, lambda m: ((m.columns,),)),
    }, ("g_idx",)),
    "nf4": Kind(_measure_nf4, _decode_nf4, {
        "weight.absmax": (("U8", "F32"), lambda m: ((_count_blocks(m),),)),
        "weight": (("U8",), lambda m: ((m.rows * m.columns // 2, 1),)),
        "weight.quant_map": (("F32",), lambda m: ((16,),)), "weight.nested_quant_map": (("F32",), lambda m: ((256,),)),
        "weight.nested_absmax": (("F32",), lambda m: ((div_ceil(_count_blocks(m), m.state["nested_blocksize"]),),)),
        _STATE: (("U8",), lambda m: (m.info(_STATE).shape,)),
    }, ("weight.nested_absmax", "weight.nested_quant_map")),
}  # fmt: skip
_KV_SCALE = re.compile(r"(?:.+\.)?layers\.(0|[1-9]\d{0,4})\.self_attn\.(?:[kv]_proj\.)?([kv])_scale")


def gather_modules(form: PackedForm, files: Iterable[SafetensorsFile]) -> tuple[dict[str, PackedModule], set[str]]:
    """Find the quantized modules of a source by name in the files; returns the names of all their tensors, too.
    Raises CheckpointError for a module that lacks a part, or has one twice or in another shape."""
    kind, memo, modules, taken = KINDS[form.kind], dict[str, Any](), dict[str, PackedModule](), set[str]()
    held: dict[str, tuple[SafetensorsFile, str]] = {}
    for file in files:
        if twice := [raw for raw in file.tensors if raw in held]:
            raise CheckpointError(f"{file.path} holds {named(twice[0])}, as {held[twice[0]][0].path.name} does.")
        held |= {raw: (file, raw) for raw in file.tensors}
    names, marker = [*kind.parts, *(["input_scale"] if form.static else [])], f".{next(iter(kind.parts))}"
    for module in [raw.removesuffix(marker) for raw in held if raw.endswith(marker)]:
        parts = {part: held[name] for part in names if (name := f"{module}.{part}") in held}
        modules[module] = PackedModule(form, module, parts, memo)
        taken |= {name for _, name in parts.values()}
    return modules, taken


def find_input_scales(spec: Gemma3Spec, packed: Mapping[str, PackedModule]) -> dict[str, np.ndarray]:
    """Return static scales of the linears' inputs, float32 [1] by the checkpoint's name; none where a linear lacks
    one, or where linears of one input have different ones. `packed` is by canonical name."""
    found: dict[str, np.ndarray] = {}
    for tensors in run_weights(spec).values():
        if tensors[0].role is not Role.LINEAR:
            continue
        names = [name for tensor in tensors for name in tensor.sources]
        held = [packed[name] for name in names if name in packed]
        scales = [module.read_whole("input_scale")[0] for module in held]
        if wrong := [module for module, scale in zip(held, scales, strict=True) if not _is_scale(scale)]:
            raise wrong[0].make_error("has an input_scale that is not finite and above 0")
        if len(held) < len(names) or any(scale != scales[0] for scale in scales):
            return {}
        found |= {activation_scale_name(tensor.name): np.array([scales[0]], np.float32) for tensor in tensors}
    return found


def find_kv_scales(
    form: PackedForm, files: Iterable[SafetensorsFile], layers: int
) -> tuple[set[str], dict[str, np.ndarray]]:
    """Find a source's scales of keys and values: the names of their tensors, and one scale a layer, the larger of
    both, float32 [1] by the checkpoint's name. Raises CheckpointError where some are missing or wrong."""
    taken, found = set[str](), dict[int, dict[str, np.float32]]()
    for file in files if form.kv else ():
        for raw, info in file.tensors.items():
            if match := _KV_SCALE.fullmatch(raw):
                kinds, fits = found.setdefault(int(match[1]), {}), info.dtype in FLOATS and info.shape in ((), (1,))
                value = to_float32(file.read_rows(raw, 0, 1), info.dtype)[0] if fits else np.float32(0)
                if match[2] in kinds or not _is_scale(value):
                    raise CheckpointError(f"{file.path}: {named(raw)} is no scale of a layer, or one of two.", fix=FIX)
                kinds[match[2]] = value
                taken.add(raw)
    if found and ({*found} != {*range(layers)} or any(len(kinds) < 2 for kinds in found.values())):
        raise CheckpointError(f"{file.path}: some layers have scales of keys and values, others have none.", fix=FIX)
    return taken, {kv_scale_name(i): np.array([max(kinds.values())], np.float32) for i, kinds in found.items()}


def _is_scale(value: np.float32) -> bool:
    return bool(np.isfinite(value) and value > 0)
