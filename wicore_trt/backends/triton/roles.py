"""Roles of kernels in a step as plain data: products, and the names by which an engine's kernels are listed and found.

Must not know shapes, targets or how kernels are chosen. Invariant: the spelling of a role never changes, because
engines on disk list their kernels by it.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

from wicore_trt.plugins.code_layout import DECODE as DECODE_PAGE
from wicore_trt.plugins.code_layout import ENCODE

LINEARS = ("qkv", "o", "gate_up", "down", "head")
LINEAR_ROLES = {"attention.qkv": "qkv", "attention.dense": "o", "mlp.gate_up": "gate_up", "mlp.proj": "down"}
KINDS = {role: kind for kind, role in LINEAR_ROLES.items()}
WIDE, NARROW = "16-bit", "fp8"
"""Storage of rows of activations for a product: in the engine's dtype, or as E4M3 with a scale each."""


class MatrixProduct(NamedTuple):
    """Way to multiply by a layer's weights: storage of the `rows` that it takes, dtype of `results`, Triton `kernels`
    or not. Without them cuBLAS multiplies (torch.mm, torch._scaled_mm)."""

    rows: str
    results: str
    kernels: bool


KERNEL, KERNEL8 = MatrixProduct(WIDE, "float32", True), MatrixProduct(NARROW, "float32", True)
MM, MM16 = MatrixProduct(WIDE, "float32", False), MatrixProduct(WIDE, "bfloat16", False)
SCALED_MM = MatrixProduct(NARROW, "bfloat16", False)


class KernelRole(NamedTuple):
    """Role of a kernel in a step; `str(role)` is its spelling on disk. `operation`: "embed_norm", "add_norm",
    "final_norm" (both with a prefix of RANKED on several ranks), "qk_rope", one of LINEARS, "geglu", "quantize",
    "decode", "prefill" and so on. `rows` and `results` are those of the products around it (a linear: its own).
    `variant`: INVARIANT for any number of rows, SAMPLED for rows that are drawn, SEGMENTED and SPLIT for prefill that
    leaves keys to cuDNN or shares them between programs. IMAGES: for prefill of steps with images.
    Engines hold roles by their target, weights and time of building."""

    operation: str
    rows: str = WIDE
    results: str = "float32"
    variant: str = ""

    def __str__(self) -> str:
        return self.operation + (f".{self.variant}" if self.variant else _SUFFIXES[self.rows, self.results])


Row = tuple[KernelRole, int, str, dict[str, Any] | None]
"""Role, bucket, name of the kernel, configuration."""


_SUFFIXES = {
    (WIDE, "float32"): "", (WIDE, "bfloat16"): ".r16", (NARROW, "float32"): ".x8", (NARROW, "bfloat16"): ".fp8"
}  # fmt: skip
INVARIANT, SAMPLED, SEGMENTED, SPLIT, IMAGES = "invariant", "sampled", "segments", "splits", "images"
PAGE_DIGEST, PAGE_LOGSUMS, PAGE_MASSES = map(KernelRole, ("page_digest", "page_logsums", "page_masses"))
PAGE_CODE = tuple(map(KernelRole, (*ENCODE, DECODE_PAGE)))
IMAGE_NORM = KernelRole("layer_norm", variant=IMAGES)
DEQUANTIZE = {role: KernelRole("dequantize", variant=role) for role in LINEARS[:-1]}
"""Roles of the kernels that write a layer's 4-bit weights as 16-bit ones, by the linear's role."""
QUANTIZE, QUANTIZE_ACT = KernelRole("quantize"), KernelRole("quantize_act")
DECODE, COMBINE, PREFILL = map(KernelRole, ("decode", "combine", "prefill"))
PREFILL_SEGMENTS, GATHER = KernelRole("prefill", variant=SEGMENTED), KernelRole("gather")
DECODE_ORDERED, ORDER = KernelRole("decode", variant="ordered"), KernelRole("order")
"""Decode whose results are in the order of `kernels.order`, and what brings those of other kernels into it."""
ADD_SEGMENT, ADD_SPLITS = KernelRole("add_segment"), KernelRole("add_splits")
PREFILL_IMAGES = KernelRole("prefill", variant=IMAGES)
SEGMENT_ROLES, PREFILL_SPLITS = (PREFILL_SEGMENTS, GATHER, ADD_SEGMENT), KernelRole("prefill", variant=SPLIT)
RANKED = PUSH, PULL, OWN = "push_", "pull_", "own_"
"""Prefixes of norms that sum their rows over ranks: few are pushed, many pulled; above two ranks by their owners."""
MEET, GATHER_COLUMNS, COLLECT_ROWS = map(KernelRole, ("meet", "gather_columns", "collect_rows"))
SCAN, CHOOSE = KernelRole("scan"), KernelRole("choose")
DRAWING = {
    **{operation: KernelRole(operation, variant=SAMPLED) for operation in ("scan", "choose")},
    **{operation: KernelRole(operation) for operation in ("collect", "draw")},
}
"""Roles of the kernels that draw tokens, by their names in `sample_launches`; greedy steps take SCAN and CHOOSE."""
DRAW_WIDE = KernelRole("wide")


def parse_role(text: str) -> KernelRole:
    operation, dot, suffix = text.partition(".")
    for (rows, results), known in _SUFFIXES.items():
        if dot + suffix == known:
            return KernelRole(operation, rows, results)
    return KernelRole(operation, variant=suffix)


@cache
def step_role(operation: str, product: MatrixProduct) -> KernelRole:
    """Make the role of an operation between a step's products; products that it treats alike share one kernel. An
    embedding takes no results; behind float32 results the last norm and the rope give no narrow rows."""
    rows, results = product.rows, product.results
    if operation == "embed_norm" and rows == NARROW:
        results = "bfloat16"
    elif operation.endswith(("final_norm", "qk_rope")) and results == "float32":
        rows = WIDE
    return KernelRole(operation, rows, results)


@cache
def linear_role(operation: str, rows: str = WIDE, variant: str = "") -> KernelRole:
    """Make a `KernelRole`, cached because a step makes hundreds."""
    return KernelRole(operation, rows, variant=variant)
