"""Bounds of this machine: measured memory and arithmetic rates, and a model's shortest times by them.

Must not know engines or clients. Invariant: a bound counts only work that no implementation of the engine can avoid. So
a figure beyond its bound means a cache (a model smaller than it) or a wrong measurement.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from wicore_trt.arithmetic import ITEM_BYTES
from wicore_trt.model.spec import Gemma3Spec, LayerGroup
from wicore_trt.weight_format import row_bytes

READ_BYTES = {"cpu": 512 << 20, "cuda": 4 << 30}
GEMM_SIZE = {"cpu": 2048, "cuda": 8192}
REPEATS = 7
_ROW = 256  # values that are whole blocks of any format


@dataclass(frozen=True, slots=True)
class MachineRates:
    """Measured bytes per second of reading a large buffer, and FLOP/s of a large matrix product."""

    device: str
    threads: int
    read_bytes_per_s: float
    flops: float
    gemm_dtype: str


@dataclass(frozen=True, slots=True)
class ModelCost:
    """Bytes and FLOPs of one model. Element sizes are in bytes: of the linear weights, of the LM head, of the KV cache.
    Small parts are left out: norms, FP8 scales, minimums of Q4_1, embedding rows, activations."""

    spec: Gemma3Spec
    linear_bytes: float
    head_bytes: float
    kv_bytes: int

    @classmethod
    def from_dtypes(cls, spec: Gemma3Spec, dtype: str, head: str, kv_dtype: str) -> ModelCost:
        """Make the cost by storage names; a quantized engine keeps its `head` in its base dtype, unless its format says
        otherwise. Blocks include their scales."""
        linear, last = (ITEM_BYTES.get(name) or row_bytes(name, _ROW) / _ROW for name in (dtype, head))
        return cls(spec, linear, last, ITEM_BYTES[kv_dtype])

    @property
    def linear_parameters(self) -> int:
        """Count elements of all linear layers, the head apart."""
        s = self.spec
        attention = sum(s.hidden_size * (group.qkv_size + group.q_size) for group in s.attention_by_layer)
        return attention + s.num_layers * 3 * s.hidden_size * s.intermediate_size

    @property
    def head_parameters(self) -> int:
        return self.spec.vocab_size * self.spec.hidden_size

    @property
    def weight_bytes(self) -> int:
        """Count bytes of weights that every step reads; a tied head is read once, as the head."""
        return int(self.linear_parameters * self.linear_bytes + self.head_parameters * self.head_bytes)

    def kv_read_bytes(self, context: int) -> int:
        """Count bytes of keys and values that a token reads with `context` visible tokens, itself included."""
        groups = map(self.spec.layer_group, self.spec.groups)
        return sum(2 * group.kv_size * self.kv_bytes * _count_visible_keys(group, context) for group in groups)

    def decode_bytes(self, batch: int, input_tokens: int, output_tokens: int) -> float:
        """Average bytes of the decode steps after the first token; every sequence has the same lengths."""
        steps = range(input_tokens + 1, input_tokens + output_tokens)
        kv = sum(self.kv_read_bytes(context) for context in steps) / len(steps)
        return self.weight_bytes + batch * kv

    def decode_flops(self, batch: int, input_tokens: int, output_tokens: int) -> float:
        steps = range(input_tokens + 1, input_tokens + output_tokens)
        groups = [self.spec.layer_group(name) for name in self.spec.groups]
        attention = sum(4 * g.q_size * _count_visible_keys(g, context) for context in steps for g in groups)
        return batch * (2 * (self.linear_parameters + self.head_parameters) + attention / len(steps))

    def prefill_flops(self, input_tokens: int) -> float:
        """Count FLOPs from a prompt to the logits of its last token: causal attention, windows counted."""
        spec = self.spec
        attention = 0
        for group in spec.attention_by_layer:
            seen = min(input_tokens, group.window or input_tokens)
            attention += 4 * group.q_size * (seen * (seen + 1) // 2 + (input_tokens - seen) * seen)
        return 2 * self.linear_parameters * input_tokens + attention + 2 * self.head_parameters


def _count_visible_keys(group: LayerGroup, context: int) -> int:
    return len(group.layers) * min(context, group.window or context)


def prefill_bound_s(cost: ModelCost, rates: MachineRates, batch: int, input_tokens: int) -> float:
    return max(batch * cost.prefill_flops(input_tokens) / rates.flops, cost.weight_bytes / rates.read_bytes_per_s)


def decode_bound_s(cost: ModelCost, rates: MachineRates, batch: int, input_tokens: int, output_tokens: int) -> float:
    return max(
        cost.decode_bytes(batch, input_tokens, output_tokens) / rates.read_bytes_per_s,
        cost.decode_flops(batch, input_tokens, output_tokens) / rates.flops,
    )


def measure_rates(
    device: str, *, threads: int = 0, read_bytes: int | None = None, gemm_size: int | None = None
) -> MachineRates:
    """Measure "cpu", "cuda" or "auto", as `executor.device`. `threads` 0 takes PyTorch's choice, which is restored
    afterwards. The GEMM dtype is the fastest that an engine may compute in, because a bound is of the machine."""
    import torch

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    before = torch.get_num_threads()
    torch.set_num_threads(threads or before)
    try:
        buffer = torch.ones((read_bytes or READ_BYTES[device]) // 4, device=device)
        seconds = min(_best_of(read, device) for read in (buffer.sum, partial(torch.dot, buffer, buffer)))
        read_rate = buffer.numel() * 4 / seconds
        del buffer
        size = gemm_size or GEMM_SIZE[device]
        rates = {}
        for dtype in (torch.float32, torch.bfloat16):
            a = torch.randn(size, size, device=device).to(dtype)
            rates[str(dtype).removeprefix("torch.")] = 2 * size**3 / _best_of(partial(torch.mm, a, a), device)
        fastest = max(rates, key=rates.__getitem__)
        return MachineRates(device, threads or before, read_rate, rates[fastest], fastest)
    finally:
        torch.set_num_threads(before)


def _best_of(work: Callable[[], object], device: str) -> float:
    """Measure the shortest seconds of REPEATS runs after one uncounted: a bound wants the undisturbed run."""
    import torch

    times = []
    for _ in range(REPEATS + 1):
        if device == "cuda":
            torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - started)
    return min(times[1:])
