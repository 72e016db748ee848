"""The problems of the sweep in `step.py`: data, launches, checks against float64 and what torch needs for the same.

Knows neither timing nor compilation. Invariant: `check` draws fresh inputs, poisons what the kernel writes, and raises
AssertionError for the first difference.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from wicore_trt.arithmetic import ITEM_BYTES
from wicore_trt.plugins import step_layout
from wicore_trt.plugins.aot import KernelSpec
from wicore_trt.plugins.kernels import sample, step_specs
from wicore_trt.plugins.kernels.step_specs import NormShape, StepConfig
from wicore_trt.plugins.layout import Launch, Pool, PoolShape, Tables
from wicore_trt.plugins.step_layout import Logits, NormOut, QkNorms, RopeTable, SampleArrays, StepTokens

EPS, POSITIONS, CONTEXT = 1e-6, 4096, 1024
TORCH = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16, "fp8": torch.uint8}
STEP = {"float32": 2.0**-23, "bfloat16": 2.0**-8, "float16": 2.0**-11}
Calls = list[tuple[KernelSpec, Launch]]
Run = Callable[[KernelSpec, Launch], None]


@dataclass(frozen=True)
class ModelSizes:
    """Shapes that the small kernels see."""

    name: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    page_tokens: int = 32

    def pool(self, dtype: str) -> PoolShape:
        return PoolShape(2, self.page_tokens, self.kv_heads, self.head_dim, dtype)


LARGE = ModelSizes("27b", 5376, 32, 16, 128, 262_208)
SMALL = ModelSizes("270m", 640, 4, 1, 256, 262_144)


def launch_all(run: Run, calls: Calls) -> None:
    for spec, call in calls:
        run(spec, call)


def rms(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float64 x * rsqrt(mean(x**2) + eps) * weight."""
    x = x.double()
    return x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * weight.double()


def poisoned(shape: tuple[int, ...], dtype: torch.dtype, device: str) -> torch.Tensor:
    """All bits set: NaN for floats."""
    *rows, last = shape
    return torch.full((*rows, last * dtype.itemsize), 0xFF, dtype=torch.uint8, device=device).view(dtype)


class AddNormProblem:
    """add_norm of `rows` rows."""

    def __init__(self, model: ModelSizes, shape: NormShape, rows: int, device: str) -> None:
        self.shape, self.rows, h = shape, rows, model.hidden
        self.residual = torch.randn(rows, h, device=device) * 4
        self.x = torch.randn(rows, h, device=device).to(TORCH[shape.dtype])
        self.post, self.following = (torch.rand(h, device=device) + 0.5 for _ in range(2))
        self.out = poisoned((rows, h), torch.uint8 if shape.fp8 else TORCH[shape.dtype], device)
        self.scales = torch.full((rows,), math.nan, device=device)
        self.nbytes = rows * h * (self.x.element_size() + 8 + self.out.element_size()) + 8 * h

    def spec(self, num_warps: int) -> KernelSpec:
        return step_specs.add_norm_spec(self.shape, num_warps, x_dtype=self.shape.dtype)

    def calls(self, spec: KernelSpec) -> Calls:
        to = NormOut(self.out, self.scales if self.shape.fp8 else 0)
        weights = (self.post, self.following)
        return [(spec, step_layout.add_norm_launch(self.residual, self.x, weights, to, self.rows, EPS))]

    def check(self, run: Run, spec: KernelSpec) -> None:
        if self.rows > 1:
            self.residual[-1] = self.x[-1] = 0
        before, added = self.residual.double(), rms(self.x.double(), self.post)
        launch_all(run, self.calls(spec))
        error = (self.residual.double() - before - added).abs()
        assert (error <= (before.abs() + added.abs().amax(-1, keepdim=True)) * 3e-6).all(), "residual"
        check_norm_out(self.out, self.scales, rms(self.residual, self.following), self.shape)

    def torch_way(self) -> None:
        normalize, h = torch.nn.functional.rms_norm, (self.shape.hidden,)
        self.residual.add_(normalize(self.x.float(), h, self.post, EPS))
        y = normalize(self.residual, h, self.following, EPS).to(TORCH[self.shape.dtype])
        if self.shape.fp8:
            scale = y.float().abs().amax(-1, keepdim=True) / 448
            (y.float() / scale.clamp_min(1e-30)).to(torch.float8_e4m3fn)


def check_norm_out(out: torch.Tensor, scales: torch.Tensor, want: torch.Tensor, shape: NormShape) -> None:
    """`want` is float64; a row of zeros has scale 1."""
    step = STEP[shape.dtype]
    if not shape.fp8:
        assert ((out.double() - want).abs() <= want.abs() * (step + 1e-5) + 2.0**-25).all(), "out"
        return
    peak = want.abs().amax(-1)
    wanted = torch.where(peak == 0, 1.0, peak / 448)
    assert ((scales.double() - wanted).abs() <= wanted * (step + 1e-5)).all(), "scales"
    got = out.view(torch.float8_e4m3fn).float().double() * scales[:, None].double()
    bound = want.abs() * (2.0**-4 + 2 * step) + scales[:, None].double() * 2.0**-10 * 1.01
    assert ((got - want).abs() <= bound).all(), "E4M3 out"


class EmbedNormProblem:
    """embed_norm of `rows` random tokens of a short table."""

    def __init__(self, model: ModelSizes, shape: NormShape, rows: int, device: str) -> None:
        self.shape, self.rows, self.vocab, h = shape, rows, 8192, model.hidden
        self.table = torch.randn(self.vocab, h, device=device).to(TORCH[shape.dtype])
        self.ids = torch.randint(0, self.vocab, (rows,), dtype=torch.int32, device=device)
        self.weight = torch.rand(h, device=device) + 0.5
        self.scale = torch.tensor(math.sqrt(h)).to(TORCH[shape.dtype]).item()
        self.residual = torch.full((rows, h), math.nan, device=device)
        self.out = poisoned((rows, h), torch.uint8 if shape.fp8 else TORCH[shape.dtype], device)
        self.scales = torch.full((rows,), math.nan, device=device)
        self.nbytes = rows * h * (2 + 4 + self.out.element_size()) + 4 * h

    def spec(self, num_warps: int) -> KernelSpec:
        return step_specs.embed_norm_spec(self.shape, num_warps)

    def calls(self, spec: KernelSpec) -> Calls:
        to = NormOut(self.out, self.scales if self.shape.fp8 else 0)
        table, rows = (self.table, self.vocab, self.scale), self.rows
        return [(spec, step_layout.embed_norm_launch(self.ids, table, self.weight, self.residual, to, rows, EPS))]

    def check(self, run: Run, spec: KernelSpec) -> None:
        self.ids[0] = -1
        launch_all(run, self.calls(spec))
        want = self.table[self.ids.clamp_min(0).long()].float() * self.scale
        want[0] = 0
        assert torch.equal(self.residual, want), "residual"
        check_norm_out(self.out, self.scales, rms(want, self.weight), self.shape)

    def torch_way(self) -> None:
        residual = self.table[self.ids.clamp_min(0)].float() * self.scale
        torch.nn.functional.rms_norm(residual, (self.shape.hidden,), self.weight, EPS).to(TORCH[self.shape.dtype])


class RopeProblem:
    """One decode token of each of `rows` sequences, at positions up to CONTEXT."""

    def __init__(self, model: ModelSizes, rows: int, dtype: str, kv_dtype: str, device: str) -> None:
        self.model, self.rows, self.dtype, self.shape = model, rows, dtype, model.pool(kv_dtype)
        m, d, columns = model, model.head_dim, CONTEXT // model.page_tokens
        sequences = min(rows, 128)
        self.qkv = torch.randn(rows, (m.heads + 2 * m.kv_heads) * d, device=device).to(TORCH[dtype])
        self.q = poisoned((rows, m.heads, d), TORCH[dtype], device)
        self.weights = [torch.rand(d, device=device) + 0.5 for _ in "qk"]
        self.angles = torch.rand(POSITIONS, d // 2, device=device) * 6.28
        self.cos, self.sin = self.angles.cos(), self.angles.sin()
        places = torch.randperm(sequences * CONTEXT, device=device)[:rows]  # no two tokens share an entry
        self.positions, self.sequences = (places % CONTEXT).int(), (places // CONTEXT).int()
        pages = sequences * columns
        self.tables = torch.randperm(pages, device=device).int().view(sequences, columns)
        self.pool = poisoned((pages, 2, 2, m.page_tokens, m.kv_heads, d), TORCH[kv_dtype], device)
        self.kv_scale = torch.tensor([0.25], device=device)
        kv_bytes = 2 * m.kv_heads * d * ITEM_BYTES[kv_dtype]
        self.nbytes = rows * (self.qkv[0].nbytes + self.q[0].nbytes + kv_bytes + d * 4)

    def spec(self, chosen: StepConfig) -> KernelSpec:
        return step_specs.qk_rope_spec(self.shape, self.model.heads, self.dtype, self.dtype, chosen)

    def calls(self, spec: KernelSpec) -> Calls:
        rows, columns = self.tables.shape
        scale = self.kv_scale if self.shape.dtype == "fp8" else 0
        call = step_layout.qk_rope_launch(
            spec.constants,
            self.qkv,
            self.q,
            QkNorms(self.weights[0], self.weights[1], EPS),
            RopeTable(self.cos, self.sin, POSITIONS),
            Pool(self.pool[:, 1:], self.shape, scale),
            Tables(self.tables, rows, columns),
            StepTokens(self.positions, self.sequences, self.rows),
        )
        return [(spec, call)]

    def rotated(self) -> tuple[torch.Tensor, torch.Tensor]:
        """float64 q and k after norm and rotation, [N, heads, D]."""
        m = self.model
        q, k, _ = torch.split(self.qkv.view(self.rows, -1, m.head_dim), [m.heads, m.kv_heads, m.kv_heads], 1)
        x = torch.cat([rms(q, self.weights[0]), rms(k, self.weights[1])], 1)
        c, s = (t[self.positions.long()].double()[:, None] for t in (self.cos, self.sin))
        a, b = x.chunk(2, -1)
        y = torch.cat([a * c - b * s, b * c + a * s], -1)
        return y[:, : m.heads], y[:, m.heads :]

    def check(self, run: Run, spec: KernelSpec) -> None:
        m = self.model
        if self.rows > 2:
            self.tables[int(self.sequences[0]), int(self.positions[0]) // m.page_tokens] = -1
            self.positions[1] = -1
        before = self.pool.clone()
        launch_all(run, self.calls(spec))
        place = self.positions.clamp_min(0).long()
        q, k = self.rotated()
        alive = self.positions >= 0
        near(self.q[alive].double(), q[alive], STEP[self.dtype], "q")
        page = self.tables[self.sequences.long(), place // m.page_tokens].long()
        alive &= page >= 0
        v = self.qkv.view(self.rows, -1, m.head_dim)[:, -m.kv_heads :].double()
        at = (page[alive], 1, slice(None), place[alive] % m.page_tokens)
        entry = self.pool[at]
        want = torch.stack([k, v], 1)[alive]
        if self.shape.dtype == "fp8":
            near(entry.view(torch.float8_e4m3fn).float().double() * 0.25, want.clamp(-112, 112), 2.0**-4, "kv", 0.25)
        else:
            near(entry.double(), want, STEP[self.shape.dtype], "kv")
        after = self.pool.clone()
        after[at] = before[at]
        assert torch.equal(after.view(torch.uint8), before.view(torch.uint8)), "a byte beside the entries was written"

    def torch_way(self) -> None:
        m, norm = self.model, torch.nn.functional.rms_norm
        q, k, v = torch.split(self.qkv.view(self.rows, -1, m.head_dim), [m.heads, m.kv_heads, m.kv_heads], 1)
        x = torch.cat([norm(t.float(), (m.head_dim,), w, EPS) for t, w in zip((q, k), self.weights, strict=True)], 1)
        c, s = self.cos[self.positions][:, None], self.sin[self.positions][:, None]
        a, b = x.chunk(2, -1)
        y = torch.cat([a * c - b * s, b * c + a * s], -1).to(TORCH[self.dtype])
        page = self.tables[self.sequences, self.positions // m.page_tokens]
        entry = torch.stack([y[:, m.heads :], v], 1).to(self.pool.dtype)
        self.pool[page, 1, :, self.positions % m.page_tokens] = entry


def near(got: torch.Tensor, want: torch.Tensor, step: float, what: str, scale: float = 0.0) -> None:
    bound = want.abs() * step + want.abs().amax(-1, keepdim=True) * 1e-5 + scale * 2.0**-10 + 2.0**-25
    assert ((got - want).abs() <= bound).all(), what


class SampleProblem:
    """`rows` rows of logits, all greedy or all drawn with `parameters` (temperature, top_k, top_p, min_p)."""

    def __init__(
        self,
        model: ModelSizes,
        rows: int,
        parameters: tuple[float, int, float, float] | None,
        candidates: int,
        device: str,
    ) -> None:
        self.vocab, self.rows, self.parameters = model.vocab, rows, parameters
        self.candidates, self.device = candidates, device
        self.logits = torch.randn(rows, model.vocab, device=device) * 3
        temperature, top_k, top_p, min_p = parameters or (0.0, 0, 1.0, 0.0)
        doubles = {"temperatures": temperature, "top_p": top_p, "min_p": min_p}
        self.arrays: dict[str, Any] = {
            n: torch.full((rows,), v, dtype=torch.float64, device=device) for n, v in doubles.items()
        }
        self.arrays["top_k"] = torch.full((rows,), top_k, dtype=torch.int32, device=device)
        self.arrays["seeds"] = torch.randint(-(2**62), 2**62, (rows,), dtype=torch.int64, device=device)
        self.arrays["indices"] = torch.randint(0, 99, (rows,), dtype=torch.int32, device=device)
        self.arrays |= {n: torch.full((rows,), -7, dtype=torch.int32, device=device) for n in ("tokens", "status")}
        self.nbytes = self.logits.nbytes * (2 if parameters and parameters[1:] != (0, 1.0, 0.0) else 1)

    def specs(self) -> dict[str, KernelSpec]:
        sampled = self.parameters is not None
        return step_specs.sample_specs(self.vocab, sampled=sampled, rows=self.rows, candidates=self.candidates)

    def calls(self, specs: dict[str, KernelSpec]) -> Calls:
        constants = specs["choose"].constants
        capacity = int(specs["draw"].constants["CAPACITY"]) if "draw" in specs else 0
        sizes = step_layout.sample_scratch(self.vocab, int(constants["CHUNK"]), sample.GROUP, capacity)
        scratch = {
            n: torch.zeros(self.rows, size, dtype=getattr(torch, t), device=self.device)
            for n, (t, size) in sizes.items()
        }
        there = Logits(self.logits, self.rows, self.vocab)
        launches = step_layout.sample_launches(constants, there, SampleArrays(**self.arrays, **scratch))
        return [(spec, launches[n]) for n, spec in specs.items()]

    def check(self, run: Run, specs: dict[str, KernelSpec]) -> None:
        """The host's sampler on the host's copy: tokens are equal, failures are the same rows."""
        from wicore_trt.runtime.batch import SequenceSlice
        from wicore_trt.runtime.sampler import Sampler
        from wicore_trt.types import SamplingParams

        self.logits[0, 5] = self.logits[0, 77_777] = self.logits[0].max() + 1
        if self.rows > 1:
            self.logits[1, 1000] = math.nan
        launch_all(run, self.calls(specs))
        temperature, top_k, top_p, min_p = self.parameters or (0.0, 0, 1.0, 0.0)
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        rows = []
        for row in range(self.rows):
            start = int(self.arrays["indices"][row])
            seed = int(self.arrays["seeds"][row]) & (2**64 - 1)
            rows.append(SequenceSlice(row, [1], start, {}, True, params, 1, seed))
        want = Sampler().sample(self.logits.cpu(), rows)
        tokens = [-1] * self.rows
        for found in want.sampled:
            tokens[found.seq_id] = found.token_ids[0]
        got, status = self.arrays["tokens"].tolist(), self.arrays["status"].tolist()
        expected = [sample.NOT_FINITE if row in want.failed else sample.DONE for row in range(self.rows)]
        assert (got, status) == (tokens, expected), f"tokens {got}, status {status}; host {tokens}"

    def torch_way(self) -> None:
        if self.parameters is None:
            self.logits.argmax(-1)
        else:
            temperature, top_k, _, _ = self.parameters
            logits = self.logits.topk(top_k, -1).values if top_k else self.logits
            exponential = torch.empty_like(logits).exponential_()
            ((logits / temperature).softmax(-1) / exponential).argmax(-1)
