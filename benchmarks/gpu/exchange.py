"""Checks and times one exchange between ranks on GPUs of one host, beside NCCL's all-reduce with the same norm behind.

    python -m benchmarks.gpu.exchange [--ranks 2] [--rows 1,8,32,128,1024,8192] [--rounds 300] [--host-memory]

Prints a table: microseconds of sum and norms in a CUDA graph, of the norms alone, and with NCCL; of many rows also
where each has an owner ("owned_us"), with operands of 16 bits and of E4M3. First every rank runs
random exchanges with random delays of host and GPU, whose bits must be those of one rank that adds in rank order. Exit
code 1: they are not.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from statistics import median
from typing import Any

import torch

from benchmarks.common import say
from wicore_trt.plugins import exchange_layout, step_layout
from wicore_trt.plugins.aot import CompiledKernel, KernelSpec, compile_kernel
from wicore_trt.plugins.dependent import find_mode
from wicore_trt.plugins.exchange_layout import (
    LOGITS,
    NORMED,
    NORMED_SCALES,
    PUSHED_ROWS,
    RESIDUAL,
    ExchangeLayout,
    pushed_type,
)
from wicore_trt.plugins.kernels.step_specs import NormShape, add_norm_spec, gather_spec, meet_spec, norm_config
from wicore_trt.plugins.launch import SHARED_LAUNCHER
from wicore_trt.plugins.layout import Launch
from wicore_trt.plugins.step_layout import NormOut
from wicore_trt.runtime.cuda_device import CudaDevice
from wicore_trt.runtime.exchange import RankExchange, create_memory
from wicore_trt.runtime.peer_memory import open_peer_memory

HIDDEN, VOCABULARY, TOKENS, DTYPE = 5376, 262_208, 8192, "bfloat16"
EXCHANGES = 60
"""In a graph."""
REPLAYS = 15


class OwningLayout(ExchangeLayout):
    """Has room for owned rows also of two ranks, to time both ways."""

    owns_rows = True


class BenchmarkRank:
    """One rank: its block, and products and residual of random numbers that all ranks know."""

    def __init__(self, exchange: RankExchange, args: argparse.Namespace) -> None:
        torch.cuda.set_device(exchange.rank)
        self.exchange, self.rank, self.ranks = exchange, exchange.rank, exchange.ranks
        self.device = CudaDevice(f"cuda:{self.rank}")
        columns = VOCABULARY // self.ranks
        self.layout = OwningLayout(self.ranks, HIDDEN, pushed_type(DTYPE), TOKENS, 2, PUSHED_ROWS, columns)
        name = self.device.torch_device
        self.peers = open_peer_memory(exchange, name, self.layout.size_bytes, peer_access=not args.host_memory)
        self.ranked = {
            "peers": self.peers.addresses.data_ptr(), "rank": self.rank, "failed": self.peers.failed.data_ptr()
        }  # fmt: skip
        self.turn = 0
        self.weights = torch.ones(2, HIDDEN, device=name)
        self.out = torch.empty(TOKENS, HIDDEN, dtype=torch.bfloat16, device=name)
        self.residual = self.buffer(RESIDUAL, TOKENS, HIDDEN, torch.float32)  # zero
        self.scales = self.buffer(NORMED_SCALES, TOKENS, 1, torch.float32)
        self.logits = torch.empty(PUSHED_ROWS, self.ranks * self.layout.columns, device=name)

    def launch(self, name: str, spec: Callable[[], KernelSpec], call: Callable[[Any], Launch]) -> None:
        kernel = _KERNELS.get(name) or _KERNELS.setdefault(name, self.compile(spec()))
        SHARED_LAUNCHER.launch(kernel, call(kernel.constants), self.device.stream)

    def compile(self, spec: KernelSpec) -> CompiledKernel:
        mode = find_mode(spec.function.__name__, self.device.target)
        return compile_kernel(replace(spec, dependent=mode), self.device.target)

    def buffer(self, part: int, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        begin = self.layout.part_offsets[part]
        return self.peers.own[begin : begin + rows * columns * dtype.itemsize].view(dtype).view(rows, columns)

    def meet(self) -> None:
        self.launch("meet", lambda: meet_spec(self.ranks), lambda _: exchange_layout.meet_launch(self.ranked))

    def norm(self, x: torch.Tensor, way: str, residual: torch.Tensor, out: torch.Tensor) -> None:
        """Add and norm `x` [rows, HIDDEN]: of one rank, or summed by "push", "pull" or "own"; `out` uint8: E4M3."""
        rows, dtype, fp8 = len(x), str(x.dtype).removeprefix("torch."), out.dtype == torch.uint8
        warps = norm_config(rows, HIDDEN).num_warps
        if way in ("pull", "own"):
            self.meet()
        shape = NormShape(HIDDEN, DTYPE, fp8, fp8)
        several: dict[str, Any] = {"ranks": self.ranks, "way": way} if way else {}
        self.launch(
            f"{way} {dtype} {warps} {fp8}", lambda: add_norm_spec(shape, warps, x_dtype=dtype, **several),
            lambda _: step_layout.add_norm_launch(
                residual.data_ptr(), x.data_ptr(), (self.weights[0].data_ptr(), self.weights[1].data_ptr()),
                NormOut(out.data_ptr(), self.scales.data_ptr() if fp8 else 0), rows, 1e-6,
                ranked=self.ranked if way else None,
            ),
        )  # fmt: skip
        if way == "own":
            self.meet()

    def check(self, rounds: int) -> int:
        """Run random exchanges; count those with other bits than one rank's."""
        common, own, wrong = random.Random(1), random.Random(self.rank), 0
        generator = torch.Generator(self.device.torch_device)
        for number in range(rounds):
            way = common.choice(["push", "push", "pull", "own", "gathered"])
            pushed = way in ("push", "gathered")
            rows = common.randint(1, PUSHED_ROWS) if pushed else common.choice([1, 40, 129, 700])
            columns = self.layout.columns if way == "gathered" else HIDDEN
            dtype = torch.float32 if pushed else torch.bfloat16
            rows = min(rows, 8) if way == "gathered" else rows
            generator.manual_seed(number)
            parts = [
                torch.randn(rows, columns, generator=generator, device=self.device.torch_device).to(dtype)
                for _ in range(self.ranks)
            ]
            if own.random() < 0.3:
                time.sleep(own.random() * 0.003)
            if own.random() < 0.5:
                torch.cuda._sleep(own.randrange(200_000))  # type: ignore[no-untyped-call]  # noqa: SLF001 -- cycles
            if way == "gathered":
                wrong += self._gather_wrong(parts, rows)
            else:
                wrong += self._sum_wrong(parts, way)
        self.device.synchronize()
        return wrong + int(self.peers.failed.item() != 0)

    def _gather_wrong(self, parts: list[torch.Tensor], rows: int) -> bool:
        found = self.logits[:rows]
        self.gather(self.buffer(LOGITS, rows, self.layout.columns, torch.float32).copy_(parts[self.rank]), found)
        wrong = not torch.equal(found, torch.cat(parts, 1))
        self.meet()  # as an exchange of the next step would
        return wrong

    def gather(self, part: torch.Tensor, to: torch.Tensor) -> None:
        self.meet()
        self.launch(
            "gather", lambda: gather_spec(self.ranks, self.layout.columns),
            lambda constants: exchange_layout.gather_launch(
                constants, part.data_ptr(), to.data_ptr(), len(part), self.ranked
            ),
        )  # fmt: skip

    def _sum_wrong(self, parts: list[torch.Tensor], way: str) -> bool:
        rows, total = len(parts[0]), torch.zeros_like(parts[0], dtype=torch.float32)
        for part in parts:
            total += part.to(torch.bfloat16).float()
        x, before = parts[self.rank], self.residual[:rows].clone()
        if way in ("pull", "own"):
            x = self.buffer(self.turn, rows, HIDDEN, torch.bfloat16).copy_(x)
            self.turn ^= 1
        ours, theirs = torch.empty_like(self.out[:rows]), torch.empty_like(self.out[:rows])
        if way == "own":
            ours = self.buffer(NORMED, rows, HIDDEN, ours.dtype)
        self.norm(x, way, self.residual[:rows], ours)
        self.norm(total, "", before, theirs)
        mine = slice(self.rank, None, self.ranks) if way == "own" else slice(None)
        right = torch.equal(ours, theirs) and torch.equal(self.residual[:rows][mine], before[mine])
        self.residual[:rows] = before
        return not right

    def time_rows(self, rows: int, nccl: bool) -> dict[str, float | int]:
        """Time each way for `rows`, microseconds of one exchange; all ranks at the same time."""
        way = "push" if rows <= PUSHED_ROWS else "pull"
        x = torch.randn(rows, HIDDEN, device=self.device.torch_device)
        if rows > PUSHED_ROWS:
            x = x.bfloat16()
        sums = x.bfloat16()
        inputs = [x, x]
        if way == "pull":
            inputs = [self.buffer(turn, rows, HIDDEN, torch.bfloat16) for turn in range(2)]
        residual, out = self.residual[:rows], self.out[:rows]

        def exchange_all() -> None:
            for number in range(EXCHANGES):
                self.norm(inputs[number % 2], way, residual, out)

        def own_all(dtype: torch.dtype = torch.bfloat16) -> None:
            for number in range(EXCHANGES):
                self.norm(inputs[number % 2], "own", residual, self.buffer(NORMED, rows, HIDDEN, dtype))

        def norm_all() -> None:
            for _ in range(EXCHANGES):
                self.norm(x, "", residual, out)

        def nccl_all() -> None:
            for _ in range(EXCHANGES):
                torch.distributed.all_reduce(sums)
                self.norm(sums, "", residual, out)

        found: dict[str, float | int] = {"rows": rows, "exchange_us": self.time_graph(exchange_all)}
        found["norm_us"] = self.time_graph(norm_all)
        if way == "pull":
            found["owned_us"] = self.time_graph(own_all)
            found["owned_e4m3_us"] = self.time_graph(lambda: own_all(torch.uint8))
        if nccl:
            found["nccl_us"] = self.time_graph(nccl_all)
        if rows <= PUSHED_ROWS:
            part, to = self.buffer(LOGITS, rows, self.layout.columns, torch.float32), self.logits[:rows]

            def gather_all() -> None:
                for _ in range(EXCHANGES):
                    self.gather(part, to)

            found["gather_us"] = self.time_graph(gather_all)
        return found

    def time_graph(self, work: Callable[[], None]) -> float:
        self.residual.zero_()
        work()
        self.device.synchronize()
        replay, times = self.device.capture(work), list[float]()
        for _ in range(REPLAYS):
            self.exchange.share_bytes(b"\0")
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            begin.record()
            replay()
            end.record()
            end.synchronize()
            times.append(begin.elapsed_time(end) * 1000 / EXCHANGES)
        return round(median(times[3:]), 2)


_KERNELS: dict[str, CompiledKernel] = {}


def run_rank(exchange: RankExchange, args: argparse.Namespace, port: int, sent: Connection) -> None:
    rank = BenchmarkRank(exchange, args)
    with rank.device.active(), torch.inference_mode():
        sent.send({"wrong": rank.check(args.rounds), "direct": rank.peers.direct})
        if args.nccl:
            os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
            torch.distributed.init_process_group(
                "nccl", rank=rank.rank, world_size=rank.ranks, device_id=rank.device.torch_device
            )
        for rows in args.rows:
            sent.send(rank.time_rows(rows, args.nccl))
        exchange.share_bytes(b"\0")
    os._exit(0)  # NCCL's end may wait for ever behind a captured graph


def start_ranks(args: argparse.Namespace) -> list[Connection]:
    """Start a process for each rank; none of them, nor this one, has touched a GPU."""
    context, memory, ranks = get_context("fork"), create_memory(args.ranks), range(args.ranks)
    mesh = {(a, b): socket.socketpair() for a in ranks for b in range(a + 1, args.ranks)}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    pipes = []
    for rank in ranks:
        peers = {(b if a == rank else a): pair[a != rank] for (a, b), pair in mesh.items() if rank in (a, b)}
        begin, end = context.Pipe(duplex=False)

        def work(rank: int = rank, peers: Any = peers, end: Connection = end) -> None:
            run_rank(RankExchange(rank, args.ranks, memory, peers), args, port, end)

        context.Process(target=work, daemon=True).start()
        end.close()
        pipes.append(begin)
    return pipes


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=lambda text: [*map(int, text.split(","))], default=[1, 8, 32, 128, 1024, 8192])
    parser.add_argument("--rounds", type=int, default=300, help="random exchanges of the check")
    parser.add_argument("--host-memory", action="store_true", help="as where GPUs do not reach each other")
    parser.add_argument("--no-nccl", dest="nccl", action="store_false")
    args = parser.parse_args()
    os.environ |= {"NCCL_NVLS_ENABLE": "0", "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NVSHMEM_DISABLE_NVLS": "1"}
    pipes = start_ranks(args)
    checks = [pipe.recv() for pipe in pipes]
    say(f"check: {checks}")
    for _ in args.rows:
        rows = [pipe.recv() for pipe in pipes]
        last = {key: min(row[key] for row in rows) for key in rows[0]}  # who comes last waits for nobody
        print(json.dumps(last), flush=True)
    return int(any(check["wrong"] for check in checks))


if __name__ == "__main__":
    sys.exit(main())
