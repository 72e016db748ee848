"""The kernels that an engine needs on a target: every role of `backends.triton.table`, bucket by bucket.

Loads Triton, because a kernel's specification holds its function; so only builders import this. It must not know how
kernels are compiled or stored. Invariant: a list depends on the engine's shape and the target alone, so another process
makes the same one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from wicore_trt.backends.triton.table import (
    ADD_SEGMENT,
    ADD_SPLITS,
    ANY,
    COMBINE,
    DECODE,
    DECODE_BUCKETS,
    DRAW_WIDE,
    DRAWING,
    GATHER,
    INVARIANT,
    KERNEL8,
    LINEARS,
    MM,
    MM16,
    NARROW,
    PAGE_DIGEST,
    PAGE_LOGSUMS,
    PAGE_MASSES,
    PREFILL,
    PREFILL_SEGMENTS,
    PREFILL_SPLITS,
    QUANTIZE,
    QUANTIZE_ACT,
    SCALED_MM,
    EngineShape,
    KernelRole,
    Product,
    step_role,
)
from wicore_trt.model.spec import GROUPS
from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.decode_layout import (
    MEASURED_SEGMENTS,
    SPLIT_PREFILL,
    DecodeConfig,
    decode_config,
    prefill_config,
)
from wicore_trt.plugins.dependent import ALONE, mode_of
from wicore_trt.plugins.kernels.e4m3 import has_conversions
from wicore_trt.plugins.kernels.fast_attention_specs import (
    add_segment_spec,
    add_splits_spec,
    combine_spec,
    decode_spec,
    gather_spec,
    logsums_spec,
    masses_spec,
    prefill_spec,
)
from wicore_trt.plugins.kernels.geglu import geglu_rows_spec, geglu_spec
from wicore_trt.plugins.kernels.linear_specs import linear_spec, quantize_parts_spec, quantize_rows_spec
from wicore_trt.plugins.kernels.page_digest import page_digest_spec
from wicore_trt.plugins.kernels.step_specs import (
    NormShape,
    add_norm_spec,
    config,
    embed_norm_spec,
    norm_config,
    qk_rope_spec,
    sample_specs,
    wide_spec,
)
from wicore_trt.plugins.linear_configs import BUCKETS, bucket_of, linear_config
from wicore_trt.plugins.linear_layout import LinearConfig

INVARIANT_LINEAR_BUCKET = 64
"""The bucket whose configuration serves any number of rows where results must not depend on it: a compromise, since
one row would be faster with the smallest and prefill with the largest."""
_ROWS = (*DECODE_BUCKETS, ANY)


@dataclass(frozen=True)
class ListedKernel:
    """A kernel to compile: `backends.triton.table.KernelEntry` with a specification in place of the kernel, and its
    configuration as plain data."""

    role: KernelRole
    bucket: int
    spec: KernelSpec
    config: dict[str, Any] | None = None


def list_kernels(shape: EngineShape, target: str) -> list[ListedKernel]:
    """All kernels of an engine for `target`. Raises ConfigError for shapes that a kernel does not take."""
    listed = [*_norms(shape, target), *_linears(shape, target), *_attention(shape, target)]
    listed += _sampling(shape, target)
    listed.append(ListedKernel(PAGE_DIGEST, ANY, page_digest_spec()))
    return [replace(p, spec=_in_turn(p, target)) for p in listed]


def _in_turn(listed: ListedKernel, target: str) -> KernelSpec:
    """A kernel as part of a step, where kernels wait for each other instead of the GPU for them."""
    spec, function, role = listed.spec, listed.spec.function.__name__, listed.role
    behind = ("gate_up",) if role.rows == NARROW else ("o", "down")
    mode = mode_of(function, target, crowds=function == "linear_matrix" and role.operation in behind)
    return replace(spec, dependent=mode, name=spec.name + ("_alone" if mode == ALONE else ""))


def _sampling(shape: EngineShape, target: str) -> list[ListedKernel]:
    """Kernels for greedy rows alone, and those that draw."""
    vocab, softcap = shape.spec.vocab_size, shape.spec.final_logit_softcapping or 0.0
    listed = []
    for sampled in (False, True):
        specs = {rows: sample_specs(vocab, target, sampled=sampled, softcap=softcap, rows=rows) for rows in _ROWS}
        for name in specs[ANY]:
            role = DRAWING[name] if sampled else KernelRole(name)
            listed += _merged(role, {rows: found[name] for rows, found in specs.items()}.__getitem__)
    return [*listed, ListedKernel(DRAW_WIDE, ANY, wide_spec(vocab, softcap))]


def _merged(
    role: KernelRole, spec_for: Callable[[int], KernelSpec], config_for: Callable[[int], DecodeConfig] | None = None
) -> list[ListedKernel]:
    """A kernel per bucket of rows; neighbours that are the same become one."""
    listed: list[ListedKernel] = []
    for rows in _ROWS:
        spec, data = spec_for(rows), asdict(config_for(rows)) if config_for else None
        if listed and listed[-1].spec.name == spec.name and listed[-1].config == data:
            listed.pop()
        listed.append(ListedKernel(role, rows, spec, data))
    return listed


def _norms(shape: EngineShape, target: str) -> list[ListedKernel]:
    spec = shape.spec
    hidden = spec.hidden_size
    pool, native = shape.pool(GROUPS[0]), has_conversions(target)

    def warps(rows: int) -> int:
        return norm_config(target, rows, hidden).num_warps

    def roles(product: Product) -> list[ListedKernel]:
        fp8, x_dtype, wide = product.rows == NARROW, product.results, spec.intermediate_size
        operands, plain = NormShape(hidden, shape.dtype, fp8, fp8 and native), NormShape(hidden, shape.dtype)
        geglu = geglu_rows_spec(wide, shape.dtype, x_dtype, native=native) if fp8 else None
        role = partial(KernelRole, rows=product.rows, results=product.results)
        return [
            *_merged(role("embed_norm"), lambda rows: embed_norm_spec(operands, warps(rows))),
            *_merged(role("add_norm"), lambda rows: add_norm_spec(operands, warps(rows), x_dtype=x_dtype)),
            *_merged(role("final_norm"), lambda rows: add_norm_spec(plain, warps(rows), x_dtype=x_dtype, gather=True)),
            *_merged(
                role("qk_rope"),
                lambda rows: qk_rope_spec(pool, spec.num_heads, x_dtype, shape.dtype, config("qk_rope", target, rows)),
            ),
            ListedKernel(role("geglu"), ANY, geglu or geglu_spec(wide, shape.dtype, x_dtype)),
        ]

    listed = roles(MM)
    if shape.narrow_results(target):
        listed += roles(MM16)
    if shape.scaled_products(target):
        listed += roles(SCALED_MM)
        quantize = quantize_rows_spec(shape.linear("o").k, shape.dtype, native=native)
        listed.append(ListedKernel(QUANTIZE, ANY, quantize))
    if shape.crossover8(target):
        narrow = NormShape(hidden, shape.dtype, True, native)
        parts = quantize_parts_spec(spec.intermediate_size, shape.dtype, native=native)
        listed.append(ListedKernel(QUANTIZE_ACT, ANY, parts))
        listed += _merged(
            step_role("add_norm", KERNEL8), lambda rows: add_norm_spec(narrow, warps(rows), x_dtype="float32")
        )
    return listed


def _linears(shape: EngineShape, target: str) -> list[ListedKernel]:
    listed = []

    def add(role: KernelRole, bucket: int, chosen: LinearConfig) -> None:
        spec = linear_spec(shape.linear(role.operation, role.rows), chosen, target)
        listed.append(ListedKernel(role, bucket, spec, asdict(chosen)))

    for operation in LINEARS:
        linear, most = shape.linear(operation), shape.crossover(target, operation)
        for bucket in BUCKETS:
            add(KernelRole(operation), bucket, linear_config(target, linear, bucket))
            if bucket >= most:
                break
        # Whole sums, and weights that stay in L2: large steps have several programs for each.
        chosen = replace(linear_config(target, linear, INVARIANT_LINEAR_BUCKET), splits=1, evict_first=False)
        add(KernelRole(operation, variant=INVARIANT), ANY, chosen)
    for operation in LINEARS[:-1] if shape.crossover8(target) else ():
        linear = shape.linear(operation, NARROW)
        for bucket in BUCKETS:
            if shape.crossover(target, operation) < bucket <= bucket_of(shape.crossover8(target)):
                add(KernelRole(operation, NARROW), bucket, linear_config(target, linear, bucket))
    return listed


def _attention(shape: EngineShape, target: str) -> list[ListedKernel]:
    heads, dtype, pool = shape.spec.num_heads, shape.dtype, shape.pool(GROUPS[0])

    def chosen_for(rows: int) -> DecodeConfig:
        return decode_config(target, pool, heads, min(rows, DECODE_BUCKETS[-1]))

    prefill = prefill_config(target, pool)
    listed = _merged(DECODE, lambda rows: decode_spec(pool, dtype, heads, target, chosen_for(rows)), chosen_for)
    listed.append(ListedKernel(PREFILL, ANY, prefill_spec(pool, dtype, heads, target, prefill), asdict(prefill)))
    if (target, pool.head_dim) in MEASURED_SEGMENTS:
        segmented = prefill_spec(pool, dtype, heads, target, prefill, segmented=True)
        listed.append(ListedKernel(PREFILL_SEGMENTS, ANY, segmented, asdict(prefill)))
        listed.append(ListedKernel(GATHER, ANY, gather_spec(pool, dtype, target)))
        listed.append(ListedKernel(ADD_SEGMENT, ANY, add_segment_spec(pool, dtype, heads)))
    if (few := SPLIT_PREFILL.get((target, pool.head_dim))) is not None:
        listed.append(ListedKernel(PREFILL_SPLITS, ANY, prefill_spec(pool, dtype, heads, target, few), asdict(few)))
        listed.append(ListedKernel(ADD_SPLITS, ANY, add_splits_spec(pool, dtype, heads, few)))
    listed.append(ListedKernel(PAGE_LOGSUMS, ANY, logsums_spec(pool, dtype, heads, target)))
    listed.append(ListedKernel(PAGE_MASSES, ANY, masses_spec(pool, heads)))
    if not all(chosen_for(rows).fused for rows in DECODE_BUCKETS):
        listed += _merged(COMBINE, lambda rows: combine_spec(pool, dtype, chosen_for(rows)), chosen_for)
    return listed
