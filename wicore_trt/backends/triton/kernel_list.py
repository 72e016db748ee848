"""Lists the kernels that an engine needs on a target: every role of `backends.triton.roles`, bucket by bucket.

Loads Triton, because a kernel's specification holds its function; so only builders import this. Must not know how
kernels are compiled or stored. Invariant: a list depends on the engine's shape and the target alone, so that another
process makes the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from wicore_trt.backends.triton import roles
from wicore_trt.backends.triton.roles import KernelRole
from wicore_trt.backends.triton.table import ANY, DECODE_BUCKETS, EngineShape
from wicore_trt.model.spec import GROUPS
from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.code_layout import find_code
from wicore_trt.plugins.decode_layout import (
    MEASURED_SEGMENTS,
    SPLIT_PREFILL,
    DecodeConfig,
    PrefillConfig,
    decode_config,
    prefill_config,
)
from wicore_trt.plugins.dependent import ALONE, find_mode
from wicore_trt.plugins.kernels import fast_attention_specs as attention_specs
from wicore_trt.plugins.kernels.e4m3 import has_conversions
from wicore_trt.plugins.kernels.geglu import geglu_rows_spec, geglu_spec
from wicore_trt.plugins.kernels.layer_norm import add_layer_norm_spec
from wicore_trt.plugins.kernels.linear_specs import (
    dequantize_spec,
    linear_spec,
    quantize_parts_spec,
    quantize_rows_spec,
)
from wicore_trt.plugins.kernels.page_code import page_code_specs
from wicore_trt.plugins.kernels.page_digest import page_digest_spec
from wicore_trt.plugins.kernels.step_specs import (
    NormShape,
    add_norm_spec,
    collect_spec,
    embed_norm_spec,
    gather_spec,
    meet_spec,
    norm_config,
    order_spec,
    qk_rope_spec,
    sample_specs,
    wide_spec,
)  # fmt: skip
from wicore_trt.plugins.kernels.step_specs import config as step_config
from wicore_trt.plugins.linear_configs import BUCKETS, find_bucket, groups_config, linear_config
from wicore_trt.plugins.linear_layout import LinearConfig

INVARIANT_LINEAR_BUCKET = 64
"""The bucket whose configuration serves any number of rows where results must not depend on it: a compromise, since
one row would be faster with the smallest and prefill with the largest."""
_ROWS = (*DECODE_BUCKETS, ANY)


@dataclass(frozen=True)
class ListedKernel:
    """Kernel to compile: a `KernelEntry` with a specification in place of the kernel, its configuration as plain
    data."""

    role: KernelRole
    bucket: int
    spec: KernelSpec
    config: dict[str, Any] | None = None


def list_kernels(shape: EngineShape, target: str) -> list[ListedKernel]:
    listed = [*_list_norms(shape, target), *_list_linears(shape, target), *_list_attention(shape, target)]
    listed += _list_sampling(shape, target)
    listed.append(ListedKernel(roles.PAGE_DIGEST, ANY, page_digest_spec()))
    code = find_code(shape.pool_shapes[GROUPS[0]])  # both groups' kernels: these differ in blocks alone
    listed += [ListedKernel(KernelRole(n), ANY, s) for n, s in (page_code_specs(code) if code else {}).items()]
    if shape.images and shape.dtype == "bfloat16":
        listed.append(ListedKernel(roles.IMAGE_NORM, ANY, add_layer_norm_spec()))
    return [replace(p, spec=_chain_kernel(p, target)) for p in listed]


def _list_groups(shape: EngineShape, target: str, rows: int) -> dict[str, LinearConfig]:
    """Configurations by warp groups of all linears of a layer for so many rows, or none: these take ordered x."""
    linears = {role: shape.linear_shape(role) for role in roles.LINEARS[:-1]}
    found = {role: groups_config(target, linear, rows) for role, linear in linears.items() if rows < ANY}
    chosen = {role: config for role, config in found.items() if config}
    return chosen if len(chosen) == len(linears) else {}


def _chain_kernel(listed: ListedKernel, target: str) -> KernelSpec:
    """Specify a kernel as part of a step, where kernels wait for each other instead of the GPU for them."""
    spec, function, role = listed.spec, listed.spec.function.__name__, listed.role
    behind = ("gate_up",) if role.rows == roles.NARROW else ("o", "down")
    fills = function == "linear_matrix" or (function in ("linear_q4", "linear_q4_groups") and listed.bucket > 1)
    mode = find_mode(function, target, crowds=fills and role.operation in behind)
    return replace(spec, dependent=mode, name=spec.name + ("_alone" if mode == ALONE else ""))


def _merge_buckets(
    role: KernelRole, spec_for: Callable[[int], KernelSpec], config_for: Callable[[int], DecodeConfig] | None = None
) -> list[ListedKernel]:
    listed: list[ListedKernel] = []
    for rows in _ROWS:
        spec, data = spec_for(rows), asdict(config_for(rows)) if config_for else None
        if listed and listed[-1].spec.name == spec.name and listed[-1].config == data:
            listed.pop()
        listed.append(ListedKernel(role, rows, spec, data))
    return listed


def _list_sampling(shape: EngineShape, target: str) -> list[ListedKernel]:
    vocab, softcap = shape.vocab_size, shape.spec.final_logit_softcapping or 0.0
    listed = []
    for sampled in (False, True):
        specs = {rows: sample_specs(vocab, sampled=sampled, softcap=softcap, rows=rows) for rows in _ROWS}
        for name in specs[ANY]:
            role = roles.DRAWING[name] if sampled else KernelRole(name)
            listed += _merge_buckets(role, {rows: found[name] for rows, found in specs.items()}.__getitem__)
    return [*listed, ListedKernel(roles.DRAW_WIDE, ANY, wide_spec(vocab, softcap))]


def _list_norms(shape: EngineShape, target: str) -> list[ListedKernel]:
    spec, listed = shape.spec, list[ListedKernel]()
    hidden, wide, native = spec.hidden_size, spec.intermediate_size, has_conversions(target)
    pool, plain = shape.pool_shapes[GROUPS[0]], NormShape(hidden, shape.dtype)

    def ordered(to: NormShape, role: KernelRole, rows: int) -> NormShape:
        few = role.rows == roles.WIDE and role.results == "float32" and bool(_list_groups(shape, target, rows))
        return replace(to, ordered=few)

    def add_norm(role: KernelRole, to: NormShape, *, gather: bool = False) -> list[ListedKernel]:
        def spec_for(prefix: str, rows: int) -> KernelSpec:
            warps, given = norm_config(rows, hidden).num_warps, {"way": prefix[:-1]}
            shaped = to if gather else ordered(to, role, rows)
            return add_norm_spec(shaped, warps, x_dtype=role.results, gather=gather, ranks=shape.ranks, **given)

        ways = roles.RANKED[: min(shape.ranks, 3)] if shape.ranks > 1 else ("",)
        listed = [(role._replace(operation=way + role.operation), partial(spec_for, way)) for way in ways]
        return [each for way in listed for each in _merge_buckets(*way)]

    def embed_norm(rows: int, *, images: bool = False) -> KernelSpec:
        table = shape.table_dtype if shape.table_dtype != shape.dtype else ""
        to = ordered(operands, role("embed_norm"), rows)
        return embed_norm_spec(to, norm_config(rows, hidden).num_warps, table=table, images=images)

    def qk_rope(rows: int) -> KernelSpec:
        chosen = step_config("qk_rope", rows)
        return qk_rope_spec(pool, spec.num_heads, product.results, shape.dtype, chosen)

    narrow = shape.choose_product(target, "qkv", ANY) == roles.MM16
    scaled = shape.has_scaled_products(target)
    for product in (roles.MM, *((roles.MM16,) if narrow else ()), *((roles.SCALED_MM,) if scaled else ())):
        fp8, role = product.rows == roles.NARROW, partial(KernelRole, rows=product.rows, results=product.results)
        operands = NormShape(hidden, shape.dtype, fp8, fp8 and native)
        listed += _merge_buckets(role("embed_norm"), embed_norm)
        if shape.images:
            listed += _merge_buckets(role("embed_images"), partial(embed_norm, images=True))
        listed += [*add_norm(role("add_norm"), operands), *add_norm(role("final_norm"), plain, gather=True)]
        listed += _merge_buckets(role("qk_rope"), qk_rope)
        geglu = geglu_rows_spec(wide, shape.dtype, product.results, native=native) if fp8 else None
        listed.append(ListedKernel(role("geglu"), ANY, geglu or geglu_spec(wide, shape.dtype, product.results)))
    if scaled:
        listed.append(
            ListedKernel(roles.QUANTIZE, ANY, quantize_rows_spec(shape.linear_shape("o").k, shape.dtype, native=native))
        )
    if shape.ranks > 1:
        listed.append(ListedKernel(roles.MEET, ANY, meet_spec(shape.ranks)))
        listed.append(ListedKernel(roles.GATHER_COLUMNS, ANY, gather_spec(shape.ranks, spec.vocab_size)))
    if shape.ranks > 2:
        listed.append(ListedKernel(roles.COLLECT_ROWS, ANY, collect_spec(shape.ranks, hidden)))
    if shape.most_narrow_rows(target):
        listed.append(ListedKernel(roles.QUANTIZE_ACT, ANY, quantize_parts_spec(wide, shape.dtype, native=native)))
        narrow_rows = NormShape(hidden, shape.dtype, True, native)
        listed += add_norm(roles.step_role("add_norm", roles.KERNEL8), narrow_rows)
    return listed


def _list_linears(shape: EngineShape, target: str) -> list[ListedKernel]:
    listed = []

    def add_linear(role: KernelRole, bucket: int, chosen: LinearConfig) -> None:
        spec = linear_spec(shape.linear_shape(role.operation, role.rows), chosen, target)
        listed.append(ListedKernel(role, bucket, spec, asdict(chosen)))

    for operation in roles.LINEARS:
        linear, most = shape.linear_shape(operation), shape.most_kernel_rows(target, operation)
        for bucket in BUCKETS:
            grouped = _list_groups(shape, target, bucket).get(operation)
            add_linear(KernelRole(operation), bucket, grouped or linear_config(target, linear, bucket))
            if bucket >= most:
                break
        # Whole sums, and weights that stay in L2: large steps have several programs for each.
        chosen = replace(linear_config(target, linear, INVARIANT_LINEAR_BUCKET), splits=1, evict_first=False)
        add_linear(KernelRole(operation, variant=roles.INVARIANT), ANY, chosen)
    for operation, role in roles.DEQUANTIZE.items() if shape.weights.storage == "q4_0" else ():
        listed.append(ListedKernel(role, ANY, dequantize_spec(shape.linear_shape(operation))))
    for operation in roles.LINEARS[:-1] if shape.most_narrow_rows(target) else ():
        linear = shape.linear_shape(operation, roles.NARROW)
        for bucket in BUCKETS:
            if shape.most_kernel_rows(target, operation) < bucket <= find_bucket(shape.most_narrow_rows(target)):
                add_linear(KernelRole(operation, roles.NARROW), bucket, linear_config(target, linear, bucket))
    return listed


def _list_attention(shape: EngineShape, target: str) -> list[ListedKernel]:
    heads, dtype, pool = shape.spec.num_heads, shape.dtype, shape.pool_shapes[GROUPS[0]]
    common, listed = (pool, dtype, heads, target), list[ListedKernel]()

    def decode_for(rows: int) -> DecodeConfig:
        return decode_config(target, pool, min(rows, DECODE_BUCKETS[-1]))

    def add_kernel(role: KernelRole, spec: KernelSpec, chosen: PrefillConfig | None = None) -> None:
        listed.append(ListedKernel(role, ANY, spec, asdict(chosen) if chosen else None))

    prefill = prefill_config(target, pool)
    listed += _merge_buckets(
        roles.DECODE, lambda rows: attention_specs.decode_spec(*common, decode_for(rows)), decode_for
    )
    if ordered := [rows for rows in DECODE_BUCKETS if _list_groups(shape, target, rows)]:
        add_kernel(roles.ORDER, order_spec(shape.linear_shape("o").k, dtype))
        for rows in ordered if all(decode_for(n).splits == 1 for n in ordered) else ():
            each = attention_specs.decode_spec(*common, decode_for(rows), ordered=True)
            listed.append(ListedKernel(roles.DECODE_ORDERED, rows, each, asdict(decode_for(rows))))
    add_kernel(roles.PREFILL, attention_specs.prefill_spec(*common, prefill), prefill)
    if shape.images:
        add_kernel(roles.PREFILL_IMAGES, attention_specs.prefill_spec(*common, prefill, ends=True), prefill)
    if (target, pool.head_dim) in MEASURED_SEGMENTS:
        add_kernel(roles.PREFILL_SEGMENTS, attention_specs.prefill_spec(*common, prefill, segmented=True), prefill)
        add_kernel(roles.GATHER, attention_specs.gather_spec(pool, dtype, target))
        add_kernel(roles.ADD_SEGMENT, attention_specs.add_segment_spec(pool, dtype, heads))
    if (few := SPLIT_PREFILL.get((target, pool.head_dim))) is not None:
        add_kernel(roles.PREFILL_SPLITS, attention_specs.prefill_spec(*common, few), few)
        add_kernel(roles.ADD_SPLITS, attention_specs.add_splits_spec(pool, dtype, heads, few))
    add_kernel(roles.PAGE_LOGSUMS, attention_specs.logsums_spec(*common))
    add_kernel(roles.PAGE_MASSES, attention_specs.masses_spec(pool, heads))
    if not all(decode_for(rows).fused for rows in DECODE_BUCKETS):
        listed += _merge_buckets(
            roles.COMBINE, lambda rows: attention_specs.combine_spec(pool, dtype, decode_for(rows)), decode_for
        )
    return listed
