"""Checks the triton backend on a GPU against the torch operators on the CPU, on a small random model.

Used by `benchmarks.gpu.step_time --check`. Weights, prompts and the cutting of prompts are drawn anew at each call. Two
executors take the same steps over the same pages: prompts in chunks, several sequences at once, windows that slide,
then decode steps in CUDA graphs; where launches overlap, replays of them are compared with ordered ones. Invariant: a
kernel that is wrong beyond rounding or reads too early, or a device sampler that does not take the largest logit,
makes `check_step` return a sentence that says where.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from benchmarks.gpu.step_overlap import overlapping, replay_problems
from wicore_trt.arithmetic import first_visible_page
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.backends.torch.weights import fuse_weights
from wicore_trt.backends.triton.compile import compile_table
from wicore_trt.backends.triton.executor import Loading, TritonExecutor
from wicore_trt.backends.triton.table import EngineShape, KernelTable
from wicore_trt.backends.triton.weights import Constants, finish_constants
from wicore_trt.checkpoint.blocks import quantize_q4_0
from wicore_trt.checkpoint.names import Role, unified_tensors, weight_minimum_name, weight_scale_name
from wicore_trt.model.spec import GLOBAL, GROUPS, LOCAL, Gemma3Spec
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.cuda_device import CudaDevice
from wicore_trt.runtime.dtypes import E4M3, TORCH_DTYPES
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.types import SamplingParams
from wicore_trt.weight_format import FP8, PLAIN, Q4_0

PAGE_TOKENS = 16
PAGES = 64
DECODE_STEPS = 12
REPLAYS = 200
MASS_TOLERANCE = 0.25
"""Of a page's attention, which moves with the rounding of KV in all layers below."""
GREEDY = SamplingParams(temperature=0.0)
LOGPROBS = SamplingParams(temperature=0.0, logprobs=0)


@dataclass(frozen=True)
class StepCase:
    """`chunk`: most tokens of a slice of a prompt; small for FP8 weights, whose steps of few rows leave activations
    alone. `lengths`: tokens of the prompts. `exact8`: steps so large that E4M3 rows are multiplied, so the
    oracle quantises activations too; otherwise its weights are what the E4M3 bytes mean."""

    name: str
    dtype: str
    tolerance: float
    fp8: bool = False
    q4: bool = False
    kv_dtype: str | None = None
    chunk: int = 90
    exact8: bool = False
    invariant: bool = False
    lengths: tuple[int, int, int] = (150, 70, 21)


MINIMUMS = ("mlp.proj",)
"""Kinds of linears that 4-bit weights give minimums."""
CASES = (
    StepCase("bfloat16", "bfloat16", 0.03),
    StepCase("float16", "float16", 0.004),
    StepCase("bfloat16, invariant", "bfloat16", 0.03, invariant=True),
    StepCase("fp8 weights, few rows", "bfloat16", 0.03, fp8=True, chunk=5),
    StepCase("fp8 weights, more rows", "bfloat16", 0.08, fp8=True, exact8=True, lengths=(60, 37, 3)),
    StepCase("fp8 weights, many rows", "bfloat16", 0.08, fp8=True, exact8=True),
    StepCase("4-bit weights, few rows", "bfloat16", 0.03, q4=True, chunk=30),
    StepCase("4-bit weights, many rows", "bfloat16", 0.04, q4=True),
    StepCase("4-bit weights, invariant, FP8 KV", "float16", 0.08, q4=True, invariant=True, kv_dtype="fp8"),
    StepCase("fp8 weights and KV", "bfloat16", 0.08, fp8=True, kv_dtype="fp8", chunk=5),
)


def small_spec() -> Gemma3Spec:
    """All parts of Gemma 3 in small: two groups, grouped heads, a window that slides."""
    return Gemma3Spec(
        vocab_size=4096, hidden_size=256, num_layers=4, num_heads=4, num_kv_heads=2, head_dim=64,
        intermediate_size=512, query_pre_attn_scalar=64, rms_norm_eps=1e-6, rope_theta=1e6, rope_local_theta=1e4,
        rope_scaling_factor=8.0, sliding_window=40, layer_groups=(LOCAL, GLOBAL, LOCAL, GLOBAL),
        max_position_embeddings=1024, tie_word_embeddings=True,
    )  # fmt: skip


def case_shape(case: StepCase) -> EngineShape:
    """Make the shape that a case's kernels are made for."""
    weights = FP8 if case.fp8 else replace(Q4_0, minimums=MINIMUMS) if case.q4 else PLAIN[case.dtype]
    return EngineShape(small_spec(), case.dtype, weights, case.kv_dtype or case.dtype, PAGE_TOKENS)


def check_step(
    case: StepCase,
    say: Callable[[str], None],
    table_of: Callable[[EngineShape, str], KernelTable | None] = lambda shape, target: None,
) -> list[str]:
    """Return sentences on faults; nothing if all is right. `table_of(shape, target)` may have kernels already;
    others are compiled."""
    shape = case_shape(case)
    spec, kv_dtype = shape.spec, shape.kv_dtype
    engine, reference = _weights(spec, case)
    device = CudaDevice()
    table = table_of(shape, device.target) or _table(shape, device.target)
    settings = ExecutorOptions(
        page_tokens=PAGE_TOKENS,
        kv_pages=dict.fromkeys(GROUPS, PAGES),
        max_batch_tokens=320,
        max_sequences=4,
        max_context=512,
        batch_invariant=case.invariant,
    )
    loading = Loading(
        shape, table, 512, lambda positions: place_constants(fuse_weights(engine, spec), shape, positions, device)
    )
    mine = TritonExecutor(loading, settings, device)
    cpu = ExecutorOptions(device="cpu", kernels="torch", page_tokens=PAGE_TOKENS, kv_pages=settings.kv_pages)
    oracle = TorchExecutor.from_tensors(spec, case.dtype, reference, cpu, kv_dtype=kv_dtype)
    problems = _Comparison(case, mine, oracle, say).run()
    mine.close()
    return problems


@lru_cache
def _table(shape: EngineShape, target: str) -> KernelTable:
    return compile_table(shape, target)


def _weights(spec: Gemma3Spec, case: StepCase) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Random tensors of a unified checkpoint, for the engine and for the oracle."""
    engine: dict[str, torch.Tensor] = {}
    oracle: dict[str, torch.Tensor] = {}
    for tensor in unified_tensors(spec):
        if tensor.role is Role.HEAD:
            continue
        if tensor.role is Role.NORM:
            engine[tensor.name] = oracle[tensor.name] = 1 + 0.4 * torch.randn(tensor.shape)
            continue
        spread = 0.6 if tensor.role is Role.EMBEDDING else 1.5 * tensor.shape[1] ** -0.5
        w = torch.randn(tensor.shape) * spread
        if case.q4 and tensor.role is Role.LINEAR:
            blocks = quantize_q4_0(w.numpy())
            if tensor.name.split(".", 3)[-1].removesuffix(".weight") in MINIMUMS:
                blocks = replace(blocks, minimums=(blocks.scales * -6).astype(blocks.scales.dtype))
                engine[weight_minimum_name(tensor.name)] = torch.from_numpy(blocks.minimums)
            engine[tensor.name] = torch.from_numpy(blocks.values)
            engine[weight_scale_name(tensor.name)] = torch.from_numpy(blocks.scales)
            oracle[tensor.name] = torch.from_numpy(blocks.to_float32())
        elif case.fp8 and tensor.role is Role.LINEAR:
            scale = w.abs().amax(1) / 448
            bits = (w / scale[:, None]).to(E4M3)
            engine[tensor.name], engine[weight_scale_name(tensor.name)] = bits, scale
            if case.exact8:
                oracle[tensor.name], oracle[weight_scale_name(tensor.name)] = bits, scale
            else:
                oracle[tensor.name] = bits.float() * scale[:, None]
        else:
            engine[tensor.name] = oracle[tensor.name] = w.to(TORCH_DTYPES[case.dtype])
    return engine, oracle


class _Comparison:
    """Both executors over the same steps; a sequence's pages are dealt in advance, local ones given back in time."""

    def __init__(self, case: StepCase, mine: TritonExecutor, oracle: TorchExecutor, say: Callable[[str], None]) -> None:
        self._case, self._mine, self._oracle, self._say = case, mine, oracle, say
        self._rng = random.Random()
        self._worst = 0.0
        self._problems: list[str] = []

    def run(self) -> list[str]:
        vocab, rng = self._mine.spec.vocab_size, self._rng
        slots = rng.sample(range(PAGES), PAGES)
        lengths = self._case.lengths
        tokens = [[rng.randrange(vocab) for _ in range(n)] for n in lengths]
        pages = [slots[16 * i : 16 * i + 16] for i in range(3)]
        done = [0, 0, 0]
        while any(d < n for d, n in zip(done, lengths, strict=True)):
            work = [
                (i, done[i], min(rng.randint(1, self._case.chunk), lengths[i] - done[i]))
                for i in range(3)
                if done[i] < lengths[i]
            ]
            if self._case.exact8:  # one step for all of it
                work = [(i, 0, lengths[i]) for i in range(3)]
            self._step("prefill", [self._slice(i, tokens[i][a : a + n], a, pages[i]) for i, a, n in work])
            for i, a, n in work:
                done[i] = a + n
        if self._case.exact8:
            return self._finish(done, pages)
        for count in range(DECODE_STEPS):
            batch = [self._slice(i, [rng.randrange(vocab)], done[i], pages[i]) for i in range(3)]
            self._step(f"decode {count}", batch, measure=count == DECODE_STEPS // 2)
            done = [d + 1 for d in done]
        return self._finish(done, pages)

    def _finish(self, done: list[int], pages: list[list[int]]) -> list[str]:
        self._say(f"  {self._case.name}: largest relative error of logits {self._worst:.2e}")
        kernels = overlapping(self._mine)
        if kernels:
            for what, counts in (("decode", (1, 1, 1)), ("prompt", (1, 1, 40))):
                slices = [self._slice(i, [0] * counts[i], done[i], pages[i]) for i in range(3)]
                found = replay_problems(self._mine, slices, REPLAYS)
                said = "; ".join(found) or "bit-identical to one kernel after the other"
                where = f"{self._case.name}, {what} steps"
                self._say(f"  {where}: {REPLAYS} replays, launches of {kernels} kernels overlap: {said}")
                self._problems += [f"{where}: {problem}" for problem in found]
        return self._problems

    def _slice(self, seq: int, token_ids: list[int], start: int, pages: list[int]) -> SequenceSlice:
        low = first_visible_page(start, self._mine.spec.sliding_window, PAGE_TOKENS)
        mapping: Mapping[str, list[int]] = {GLOBAL: pages, LOCAL: [-1] * low + pages[low:]}
        return SequenceSlice(seq, token_ids, start, mapping, sample=True, params=GREEDY)

    def _step(self, where: str, slices: list[SequenceSlice], *, measure: bool = False) -> None:
        ends = torch.tensor([len(s.token_ids) for s in slices]).cumsum(0) - 1
        expected = self._oracle.logits(StepBatch(slices), ends).clone()
        result = self._mine.execute(StepBatch(slices, measure_attention=measure))
        actual = self._mine.memory.logits[self._mine.rows_of(slices)].float().cpu()
        error = float((actual - expected).abs().max() / expected.abs().max())
        self._worst = max(self._worst, error if error == error else float("inf"))
        name = f"{self._case.name}, {where}"
        if not error <= self._case.tolerance:
            self._problems.append(f"{name}: relative error {error:.3g} of logits, above {self._case.tolerance}")
        tokens = [t.token_ids[0] for t in result.sampled]
        if result.failed or tokens != actual.argmax(1).tolist():
            self._problems.append(
                f"{name}: tokens {tokens}, failed {result.failed}, largest {actual.argmax(1).tolist()}"
            )
        top = expected.topk(2, dim=1).values
        sure = (top[:, 0] - top[:, 1]) > 2 * self._case.tolerance * expected.abs().max()
        if any(sure & (actual.argmax(1) != expected.argmax(1))):
            self._problems.append(f"{name}: another token where the oracle is sure")
        if measure:
            theirs = self._oracle.execute(StepBatch(slices, measure_attention=True)).attention
            for seq, masses in theirs.items():
                found = result.attention.get(seq, [])
                near = [abs(a - b) <= MASS_TOLERANCE * max(1.0, b) for a, b in zip(found, masses, strict=False)]
                if len(found) != len(masses) or not all(near):
                    self._problems.append(f"{name}: attention of {seq} is {found}, the oracle's {masses}")


def place_constants(
    tensors: Mapping[str, torch.Tensor], shape: EngineShape, positions: int, device: Any, rank: int = 0
) -> Constants:
    """Place the tensors of `backends.torch.weights.fuse_weights` on `device`, rounded to the engine's types."""
    moved: dict[int, torch.Tensor] = {}
    weights = {}
    for name, tensor in tensors.items():
        if id(tensor) not in moved:
            kept = tensor.dtype in (E4M3, torch.uint8, torch.int8) or (tensor.dim() == 2 and "scaling_factor" in name)
            kept |= name.endswith("_minimum") or (tensor.dtype == torch.float16 and shape.weights.head == "float16")
            dtype: torch.dtype = (
                tensor.dtype if kept else TORCH_DTYPES[shape.dtype] if tensor.dim() == 2 else torch.float32
            )
            moved[id(tensor)] = tensor.to(device.torch_device, dtype, copy=kept)
        weights[name] = moved[id(tensor)]
    return finish_constants(shape, weights, positions, device, rank)
