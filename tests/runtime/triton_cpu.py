"""The triton executor on the CPU: Triton's interpreter in place of a GPU, around tiny random models."""

from __future__ import annotations

import ctypes
import fcntl
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import lru_cache
from itertools import accumulate
from typing import Any
from unittest import mock

import torch
from gpu_kernels import gluon_numpy, interpreted
from parity.paged import PagedDriver, PagedSequence
from parity.tiny import TinyModel, cast, tiny_model

from benchmarks.gpu.step_check import place_constants
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.backends.torch.vision import VisionWeights, open_encoder
from wicore_trt.backends.torch.weights import fuse_weights
from wicore_trt.backends.triton.executor import Loading, TritonExecutor
from wicore_trt.backends.triton.kernel_list import list_kernels
from wicore_trt.backends.triton.table import EngineShape, KernelEntry, KernelTable, parse_config
from wicore_trt.checkpoint.blocks import Blocks, quantize_q4_0
from wicore_trt.checkpoint.names import Role, unified_tensors, weight_minimum_name, weight_scale_name
from wicore_trt.checkpoint.sharding import shard_of
from wicore_trt.model.gemma3 import EMBEDDING, LM_HEAD
from wicore_trt.model.spec import GLOBAL, RankSpec
from wicore_trt.plugins.aot import CompiledKernel, KernelSpec
from wicore_trt.plugins.decode_layout import DecodeConfig
from wicore_trt.plugins.kernels import step_specs
from wicore_trt.plugins.kernels.step_specs import StepConfig
from wicore_trt.plugins.launch import MAP_TYPE, ParameterBlock
from wicore_trt.plugins.layout import Launch, TensorMap
from wicore_trt.runtime.batch import SequenceSlice
from wicore_trt.runtime.dtypes import E4M3, TORCH_DTYPES
from wicore_trt.runtime.exchange import RankExchange
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.runtime.peer_memory import PeerMemory, open_peer_memory
from wicore_trt.types import SamplingParams
from wicore_trt.weight_format import FP8, PLAIN, WeightFormat

POINTED = {
    **{"*fp32": torch.float32, "*fp64": torch.float64, "*fp16": torch.float16, "*bf16": torch.bfloat16},
    **{"*i32": torch.int32, "*i64": torch.int64, "*u8": torch.uint8, "*fp8e4nv": E4M3},
}
CONTEXT = 256
LOGITS_TOO = SamplingParams(temperature=0.0, logprobs=0)
"""Greedy, but through the executor's sampler, where a `RecordingSampler` sees the logits."""


class CpuDevice:
    """`runtime.cuda_device.CudaDevice` in host memory. It knows what it gave, so that addresses can be turned back into
    tensors."""

    def __init__(self, target: str) -> None:
        self.torch_device, self.target, self.stream = torch.device("cpu"), target, 0
        self.free, self.total = 1 << 40, 1 << 30
        self.given: list[torch.Tensor] = []

    def empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.empty(tuple(shape), dtype=dtype)
        tensor.view(torch.uint8).fill_(0xFF)  # NaN, or an impossible index
        self.given.append(tensor)
        return tensor

    def staging(self, shape: Sequence[int], dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.zeros(tuple(shape), dtype=dtype)

    def free_bytes(self) -> int:
        return self.free

    def unclaimed_bytes(self) -> int:
        return self.free

    def total_bytes(self) -> int:
        return self.total

    def active(self) -> AbstractContextManager[object]:
        return nullcontext()

    def synchronize(self) -> None:
        pass

    def record(self) -> Callable[[], None]:
        return self.synchronize

    def with_own_graphs(self) -> CpuDevice:
        return self

    def capture(self, work: Callable[[], None]) -> Callable[[], None]:
        """A graph: the same work at the same addresses, whatever the caller thinks by then."""
        return work


class Turns:
    """Lock of processes that have the same file."""

    def __init__(self, file: Any) -> None:
        self._file = file

    def __enter__(self) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_EX)

    def __exit__(self, *error: object) -> None:
        fcntl.lockf(self._file, fcntl.LOCK_UN)


class InterpretingLauncher:
    """`Launcher` for kernels of `interpreted.uncompiled`. Addresses lie in the device's memory or in `more`. While it
    `idles` it looks at arguments and computes nothing."""

    def __init__(self, device: CpuDevice, specs: Mapping[str, KernelSpec]) -> None:
        self._device, self._specs = device, specs
        self.more: list[torch.Tensor] = []
        self.reached: list[torch.Tensor] = []
        """Memory that kernels find by addresses in memory: peers' blocks."""
        self.turns: AbstractContextManager[Any] = nullcontext()
        self.launched: list[str] = []
        self.idles = False

    def launch(self, kernel: CompiledKernel, call: Launch, stream: int) -> None:
        ParameterBlock(kernel).fill_parameters(call.arguments)
        if 0 in call.grid:
            return
        spec = self._specs[kernel.name]
        self.launched.append(kernel.name)
        arguments: dict[str, Any] = dict(call.arguments)
        for name, type_ in kernel.arguments:
            if type_.startswith("*") and arguments[name]:
                arguments[name] = self._at(arguments[name], POINTED[type_])
            elif found := MAP_TYPE.match(type_):
                at = self._at(arguments[name].address, POINTED["*" + found["item"]])
                arguments[name] = TensorMap(at, *arguments[name][1:])
        if not self.idles and spec.function.is_gluon():
            gluon_numpy.launch(spec, Launch(call.grid, arguments))
        elif not self.idles:
            interpreted.launch(spec, Launch(call.grid, arguments), self.reached, self.turns)

    def _at(self, address: int, dtype: torch.dtype) -> torch.Tensor:
        for t in (*self._device.given, *self.more):
            if t.data_ptr() <= address < t.data_ptr() + t.nbytes:
                flat = t.flatten().view(torch.uint8)[address - t.data_ptr() :]
                return flat[: len(flat) // dtype.itemsize * dtype.itemsize].view(dtype)
        raise AssertionError(f"{address:#x} is in none of the executor's tensors")


@lru_cache
def specs_of(shape: EngineShape, target: str) -> tuple[KernelTable, dict[str, KernelSpec]]:
    with mock.patch.dict(step_specs.DEFAULTS, qk_rope=((1 << 31, StepConfig(4, 16)),)):  # few programs, of many tokens
        planned = list_kernels(shape, target)
    specs = {p.spec.name: p.spec for p in planned}
    kernels = {name: interpreted.uncompiled(spec) for name, spec in specs.items()}
    entries = [
        KernelEntry(p.role, p.bucket, kernels[p.spec.name], _used(parse_config(p.role, p.config))) for p in planned
    ]
    return KernelTable(target, entries), specs


def _used(config: Any) -> Any:
    """Without the programs that find no block of keys in any context: the interpreter runs one after the other, and a
    small batch has 33 splits of which `CONTEXT` tokens use 4."""
    if isinstance(config, DecodeConfig):
        return replace(config, splits=min(config.splits, CONTEXT // config.block_k))
    return config


def small_model(seed: int, **overrides: Any) -> TinyModel:
    """A tiny model of sizes that the kernels take."""
    sizes = {
        **{"vocab_size": 48, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "head_dim": 16},
        **{"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 5, "sliding_window_pattern": 2},
    }
    return tiny_model(seed, **{**sizes, **overrides})


def executor_of(
    model: TinyModel,
    dtype: str = "bfloat16",
    *,
    fp8: bool = False,
    kv_dtype: str | None = None,
    target: str = "sm90",
    graphs: bool = False,
    prepares: bool = False,
    images: bool = False,
    tensors: Mapping[str, torch.Tensor] | None = None,
    weights: WeightFormat | None = None,
    vision: VisionWeights | None = None,
    part: RankSpec | None = None,
    ranks: RankExchange | None = None,
    **settings: Any,
) -> TritonExecutor:
    """An executor of the model's weights in `dtype`, with `kv_scale`s if `tensors` has them. What it runs to prepare,
    large steps whose results nobody takes, is computed if it `prepares`. `part`: of one rank, whose peers the caller
    joins unless it gives `ranks`."""
    values = {"kv_pages": {"global": 24, "local": 24}, "max_batch_tokens": 40, "max_sequences": 4, **settings}
    stored, page_tokens = weights or (FP8 if fp8 else PLAIN[dtype]), values.pop("page_tokens", 4)
    part = part or model.spec.shard(0, 1)
    shape = EngineShape(part.spec, dtype, stored, kv_dtype or dtype, page_tokens, images, part.ranks)
    table, specs = specs_of(shape, target)
    device = CpuDevice(target)
    launcher = InterpretingLauncher(device, specs)
    launcher.idles = not prepares

    def constants(positions: int) -> Any:
        whole = tensors or rounded(model, dtype, fp8)
        fused = fuse_weights(whole if part.ranks == 1 else cut_part(whole, part), part.spec)
        if part.ranks > 1:
            for name in {EMBEDDING, weight_scale_name(EMBEDDING)} & whole.keys():
                fused[name] = whole[name]
                if part.spec.tie_word_embeddings:
                    fused[name.replace(EMBEDDING, LM_HEAD)] = whole[name]
        found = place_constants(fused, shape, positions, device, part.rank)
        launcher.more += found.weights.values()
        return found

    plan = Loading(shape, table, 512, constants, vision=vision)

    def open_known(*given: Any) -> Any:
        encoder = open_encoder(*given)
        launcher.more.append(encoder.features)
        return encoder

    def open_known_peers(*given: Any, **options: Any) -> PeerMemory:
        peers = open_peer_memory(*given, **options)
        device.given += [peers.own, peers.addresses, peers.failed]
        views = [(ctypes.c_char * len(peers.own)).from_address(address) for address in peers.addresses.tolist()]
        launcher.reached = [torch.frombuffer(view, dtype=torch.uint8) for view in views]
        launcher.turns = Turns(given[0]._memory)
        return peers

    place, options = "wicore_trt.backends.triton.executor", ExecutorOptions(max_context=CONTEXT, **values)
    with mock.patch(f"{place}.open_encoder", open_known), mock.patch(f"{place}.open_peer_memory", open_known_peers):
        executor = TritonExecutor(plan, options, device, launcher, graphs=graphs, ranks=ranks)
    launcher.idles = False
    return executor


def cut_part(tensors: Mapping[str, torch.Tensor], part: RankSpec) -> dict[str, torch.Tensor]:
    """A rank's part of the tensors of a whole engine."""
    found, whole = {}, part.whole.layer_group(GLOBAL)
    for tensor in unified_tensors(part.whole):
        shard = shard_of(tensor, part.whole, part.rank, part.ranks)
        for name in {tensor.name, tensor.scale_name, weight_minimum_name(tensor.name)} & tensors.keys():
            sources = [0, *accumulate(whole.q_size if n == 0 else whole.kv_size for n in range(len(shard.rows) - 1))]
            rows = [tensors[name][at + low : at + high] for at, (low, high) in zip(sources, shard.rows, strict=True)]
            held = rows[0] if len(rows) == 1 else torch.cat([r.view(torch.uint8) for r in rows]).view(rows[0].dtype)
            if shard.columns is not None and held.dim() == 2:
                low, high = (column * held.shape[1] // tensor.shape[1] for column in shard.columns)
                held = held[:, low:high].contiguous()
            found[name] = held
    return found


def rounded(model: TinyModel, dtype: str, fp8: bool) -> dict[str, torch.Tensor]:
    """The model's tensors as an engine of that dtype has them."""
    found = cast(model.spec, model.tensors, E4M3 if fp8 else TORCH_DTYPES[dtype])
    return {n: t.to(TORCH_DTYPES[dtype]) if t.dtype == torch.bfloat16 else t for n, t in found.items()}


def blocks_of(
    model: TinyModel, dtype: str, weights: WeightFormat
) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """The model's tensors as an engine of 4-bit `weights` has them, and what they mean."""
    stored, meant = rounded(model, dtype, False), rounded(model, dtype, False)
    for tensor in unified_tensors(model.spec):
        kind = tensor.name.split(".", 3)[-1].removesuffix(".weight")
        table = tensor.role in (Role.EMBEDDING, Role.HEAD) and tensor.name in stored
        if tensor.role is Role.LINEAR:
            blocks = quantize_q4_0(model.tensors[tensor.name].float().numpy())
            if {"mlp.fc": "mlp.gate_up", "mlp.gate": "mlp.gate_up"}.get(kind, kind) in weights.minimums:
                blocks = replace(blocks, minimums=(blocks.scales * -6).astype(blocks.scales.dtype))
        elif table and weights.head == "q8_0":
            values = stored[tensor.name].float()
            scale = (values.abs().amax() / 127).half()
            bits = (values / scale.float()).round().to(torch.int8)
            blocks = Blocks(bits.numpy(), scale.expand(len(values), tensor.shape[1] // 32).contiguous().numpy())
        else:
            if table and weights.head == "float16":
                stored[tensor.name] = model.tensors[tensor.name].half()
                meant[tensor.name] = stored[tensor.name].float()
            continue
        stored[tensor.name], stored[tensor.scale_name] = map(torch.from_numpy, (blocks.values, blocks.scales))
        if blocks.minimums is not None:
            stored[weight_minimum_name(tensor.name)] = torch.from_numpy(blocks.minimums)
        meant[tensor.name] = torch.from_numpy(blocks.to_float32())
    return stored, meant


def oracle_of(
    model: TinyModel,
    dtype: str,
    *,
    fp8: bool = False,
    kv_dtype: str | None = None,
    tensors: Mapping[str, torch.Tensor] | None = None,
    **settings: Any,
) -> TorchExecutor:
    """TorchExecutor of the same weights."""
    values = {"page_tokens": 4, "kv_pages": {"global": 24, "local": 24}, **settings}
    return TorchExecutor.from_tensors(
        model.spec,
        dtype,
        tensors or rounded(model, dtype, fp8),
        ExecutorOptions(device="cpu", kernels="torch", **values),
        kv_dtype=kv_dtype,
    )


class Driver(PagedDriver):
    """`PagedDriver` whose sampler sees the logits."""

    def __init__(self, executor: Any, seed: int = 0) -> None:
        super().__init__(executor, seed)
        if isinstance(executor, TritonExecutor):
            executor.sampler.host = self.sampler

    def _slice(self, sequence: PagedSequence, token_ids: list[int]) -> SequenceSlice:
        piece = super()._slice(sequence, token_ids)
        piece.params = LOGITS_TOO
        return piece
