"""Engines of several ranks: the logits of one rank, sums with the same bits on all, and no rank left behind."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, nullcontext, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from suspend import suspend_process
from tiny_source import CONFIG, write_tiny_source

from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import open_engine
from wicore_trt.engine.options import find_backend
from wicore_trt.errors import CheckpointError, EngineFormatError, EnvironmentUnfitError, RankError
from wicore_trt.llm import LLM
from wicore_trt.runtime import exchange, rank_process, ranks
from wicore_trt.runtime.batch import SequenceSlice, StepBatch, StepResult
from wicore_trt.runtime.exchange import RankExchange, create_memory, hash_bits
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.runtime.rank_copier import RankedCopier
from wicore_trt.runtime.ranks import RankedExecutor
from wicore_trt.types import SamplingParams

PAGE = 4
PAGES = {"global": 24, "local": 24}
Group = list[RankExchange]


@pytest.fixture
def new_group() -> Iterator[Callable[..., Group]]:
    with ExitStack() as stack:

        def make(count: int, **options: object) -> Group:
            memory = create_memory(count)
            mesh = {(a, b): socket.socketpair() for a in range(count) for b in range(a + 1, count)}
            peers = [{b: mesh[min(a, b), max(a, b)][a > b] for b in range(count) if b != a} for a in range(count)]
            group = [RankExchange(rank, count, memory, peers[rank], **options) for rank in range(count)]  # type: ignore
            os.close(memory)
            for end in group:
                stack.callback(end.close)
            return group

        yield make


def run_all(group: Group, run: Callable[[RankExchange], torch.Tensor]) -> list[torch.Tensor]:
    with ThreadPoolExecutor(len(group)) as pool:
        return list(pool.map(run, group))


@pytest.mark.parametrize("count", [2, 3, 4])
def test_all_ranks_get_the_bits_of_a_sum_in_rank_order(new_group, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """In rows that take many parts and turns, and in rows that take none."""
    monkeypatch.setattr(exchange, "PART_BYTES", 256)
    group, rng = new_group(count), random.Random(count)
    shapes = [(rng.randrange(0, 9), rng.randrange(1, 60)) for _ in range(20)]
    given = [[torch.randn(shape) * 10.0 ** rng.randrange(-3, 4) for shape in shapes] for _ in range(count)]

    def run(end: RankExchange) -> list[torch.Tensor]:
        found = []
        for x in given[end.rank]:
            found += [end.gather_columns(x), end.sum_rows(x.clone())]
        return found

    for found in run_all(group, run):  # type: ignore[arg-type]
        for i, parts in enumerate(zip(*given, strict=True)):
            total = parts[0].clone()
            for part in parts[1:]:
                total += part
            assert torch.equal(found[2 * i], torch.cat(parts, 1)) and torch.equal(found[2 * i + 1], total)


@pytest.mark.parametrize("way", ["ended", "hangs"])
def test_a_rank_that_does_not_come_is_named(new_group, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    monkeypatch.setattr(exchange, "GLANCE_S", 0.01)
    first, second, third = new_group(3, is_alive=lambda rank: rank != 2)
    if way == "ended":
        third.close()
    with pytest.raises(RankError, match=f"rank 2 (has )?{way}"):
        run_all([first, second], lambda end: end.sum_rows(torch.ones(3)))


@pytest.mark.parametrize("change", [lambda row: row + 1e-3, lambda row: row.roll(2), lambda row: row[[2, 3, 0, 1]]])
@pytest.mark.parametrize("when", ["before", "behind"])
@pytest.mark.parametrize("method", ["sum_rows", "gather_columns"])
def test_rows_that_were_overwritten_are_no_result(new_group, when: str, method: str, change: Any) -> None:
    """A rank's own, which all read, before they meet; or another's behind it, just before it is read. Also by values
    that are all there, at other places."""
    group, faults = new_group(2), [None, None]
    first, meet = group[0], group[0]._meet_ranks

    def overwrite(told: object) -> object:
        found = None if when == "before" else meet(told)
        shared = torch.from_numpy(first._buffers[0, int(when == "behind"), :4])
        shared.copy_(change(shared).clone())
        return found or meet(told)

    first._meet_ranks = overwrite  # type: ignore[method-assign]

    def run(end: RankExchange) -> None:
        try:
            getattr(end, method)(torch.arange(4.0).view(2, 2))
        except RankError as error:
            faults[end.rank] = str(error)  # type: ignore[call-overload]

    run_all(group, run)  # type: ignore[arg-type]
    assert faults[0] == f"what rank {int(when == 'behind')} gave to an exchange was changed"
    assert faults[1] == faults[0] or when == "behind"


@pytest.mark.parametrize("compares", [False, True])
@pytest.mark.parametrize("kernels", ["native", "torch"])
def test_ranks_with_different_rows_end_a_step_if_they_compare(
    tmp_path: Path, new_group, kernels: str, compares: bool
) -> None:
    """Rows that no exchange shows: they differ behind it, or in their order alone; or the head reads
    others, or a rank has another token or page, of which sums are alike on all."""
    write_tiny_source(tmp_path / "source")
    engine = build_engine(tmp_path / "source", tmp_path / "engine", tp_size=2, page_tokens=PAGE)
    options = ExecutorOptions(device="cpu", kernels=kernels, threads=1, kv_pages=PAGES, compare_ranks=compares)
    group = new_group(2)
    parts = [TorchExecutor(engine, options, end) for end in group]

    def run(end: RankExchange) -> StepResult:
        return parts[end.rank].execute(StepBatch([greedy_slice()]))

    def read_other(end: RankExchange) -> torch.Tensor:
        return parts[end.rank].logits(StepBatch([greedy_slice()]), torch.tensor([end.rank]))

    def read_tokens(end: RankExchange) -> StepResult:
        piece = greedy_slice()
        piece.token_ids = [3, 4 + end.rank]
        return parts[end.rank].execute(StepBatch([piece]))

    def read_pages(end: RankExchange) -> StepResult:
        piece = greedy_slice()
        piece.pages = {**piece.pages, "local": [end.rank]}
        return parts[end.rank].execute(StepBatch([piece]))

    def compare_moved(end: RankExchange) -> None:
        end.compare_rows(torch.arange(4.0).roll(2 * end.rank))

    assert run_all(group, run)[0].sampled  # type: ignore
    for different in (read_other, read_tokens, read_pages, compare_moved):
        with pytest.raises(RankError, match="different rows") if compares else nullcontext():
            run_all(group, different)  # type: ignore[arg-type]
    add = group[1].sum_rows
    group[1].sum_rows = lambda x: add(x).add_(1e-3)  # type: ignore[method-assign]
    with pytest.raises(RankError, match="different rows") if compares else nullcontext():
        run_all(group, run)  # type: ignore[arg-type]
    for part in parts:
        part.close()


@pytest.mark.parametrize("dtype", [torch.int16, torch.int32])
def test_the_hash_of_rows_shows_values_that_change_or_move(dtype: torch.dtype) -> None:
    info, generator = torch.iinfo(dtype), torch.Generator().manual_seed(7)
    rows = torch.randint(info.min, info.max, (300, 24), generator=generator).to(dtype)
    square = torch.zeros(24, 24, dtype=dtype)
    square[3, 5] = 1
    others = [rows.roll(1, 0), rows.roll(1, 1), rows[torch.randperm(300, generator=generator)], rows.flip(1), rows + 1]
    for bit in range(8 * rows.itemsize):  # of two places: sums of the highest bits cancel each other
        other = rows.clone()
        other[[7, 7, 255], [2, 3, 20]] ^= torch.tensor(
            info.min if bit == 8 * rows.itemsize - 1 else 1 << bit, dtype=dtype
        )
        others.append(other)
    assert len({int(hash_bits(part)) for part in (rows, *others)}) == len(others) + 1
    assert hash_bits(square) != hash_bits(square.T) and hash_bits(rows) == hash_bits(rows.clone())


def test_tokens_of_other_ranks_have_no_row_here(new_group) -> None:
    group, ids = new_group(2), torch.tensor([0, 9, 10, 19])
    assert [[t.tolist() for t in end.find_own_tokens(ids, 10)] for end in group] == [
        [[0, 9, 0, 0], [False, False, True, True]],
        [[0, 0, 0, 9], [True, True, False, False]],
    ]


def open_tiny(tmp_path: Path, tp: int, kernels: str = "auto", **build: object):
    path = tmp_path / f"tp{tp}-{'-'.join(map(str, build.values()))}"
    if not path.exists():
        build_engine(tmp_path / "source", path, tp_size=tp, page_tokens=PAGE, **build)  # type: ignore[arg-type]
    engine = open_engine(path)
    options = ExecutorOptions(device="cpu", kernels=kernels, threads=1, kv_pages=PAGES)
    return find_backend("torch").open(engine, options)


def all_logits(executor: TorchExecutor | RankedExecutor, seed: int) -> torch.Tensor:
    """Logits of all tokens of two sequences, in steps of random sizes."""
    rng, found = random.Random(seed), [list[torch.Tensor](), list[torch.Tensor]()]
    prompts = [[rng.randrange(CONFIG["vocab_size"]) for _ in range(count)] for count in (30, 17)]
    starts = [0, 0]
    while any(start < len(prompt) for start, prompt in zip(starts, prompts, strict=True)):
        slices, owners = [], list[int]()
        for i, prompt in enumerate(prompts):
            ids = prompt[starts[i] : starts[i] + rng.randrange(1, 9)]
            if ids:
                pages = {group: list(range(10 * i, 10 * i + 10)) for group in PAGES}
                slices.append(SequenceSlice(i, ids, starts[i], pages))
                owners += [i] * len(ids)
                starts[i] += len(ids)
        logits = executor.logits(StepBatch(slices), torch.arange(len(owners)))
        for owner, row in zip(owners, logits.clone(), strict=True):
            found[owner].append(row)
    return torch.stack(found[0] + found[1])


@pytest.mark.parametrize(
    ("tp", "kernels", "build", "kv_heads"),
    [
        (2, "native", {"dtype": "float32"}, 2),
        # more ranks than KV heads
        pytest.param(2, "torch", {"dtype": "bfloat16", "kv_dtype": "fp8"}, 1, marks=pytest.mark.long),
        pytest.param(4, "torch", {"dtype": "float32"}, 2, marks=pytest.mark.long),
        pytest.param(2, "auto", {"dtype": "q4_0"}, 2, marks=pytest.mark.long),  # shards: tests/checkpoint/test_q4_0.py
    ],
)
def test_logits_are_those_of_one_rank(
    tmp_path: Path, tp: int, kernels: str, build: dict[str, str], kv_heads: int
) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 128} if build["dtype"] == "q4_0" else {}
    sizes |= {"num_key_value_heads": kv_heads}
    write_tiny_source(tmp_path / "source", seed=tp, tied=tp == 2, **sizes)
    one, many = open_tiny(tmp_path, 1, kernels, **build), open_tiny(tmp_path, tp, kernels, **build)
    try:
        right, found = all_logits(one, 1), all_logits(many, 1)
        assert many.layout.page_bytes["global"] == one.layout.page_bytes["global"] * tp // min(tp, kv_heads)
    finally:
        one.close()
        many.close()
    bound = {"float32": 2e-5, "bfloat16": 0.03, "q4_0": 0.03}[build["dtype"]]
    assert float((found - right).abs().max() / right.abs().max()) < bound
    assert float((found - right).abs().max()) > 0 or build["dtype"] != "float32"


def greedy_slice() -> SequenceSlice:
    params = SamplingParams(temperature=0.0)
    return SequenceSlice(1, [3, 4], 0, dict.fromkeys(PAGES, [0]), sample=True, params=params, prompt_len=2)


def test_a_rank_beats_on_when_the_first_one_was_suspended_for_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-Z in a program that runs the engine itself: nobody reads for longer than a message may wait."""
    monkeypatch.setattr(ranks, "SEND_S", 0.25)
    monkeypatch.setattr(rank_process, "BEAT_S", 0.001)
    ours, theirs = socket.socketpair()
    beats = threading.Thread(target=rank_process.send_beats, args=(ranks.MessageSocket(theirs),), daemon=True)
    beats.start()
    time.sleep(2.0)
    ours.setblocking(False)
    with suppress(BlockingIOError):
        while ours.recv(1 << 16):
            pass
    assert select.select([ours], [], [], 5.0)[0], "it beats no more"
    ours.close()
    beats.join(60)
    assert not beats.is_alive()


@pytest.mark.parametrize("way", ["has ended", "was stopped by a signal", "hangs"])
def test_a_rank_that_dies_or_hangs_ends_the_engine_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """A rank that was killed or stopped also between steps; another that is silent in a step, for no known reason."""
    write_tiny_source(tmp_path / "source")
    executor = open_tiny(tmp_path, 2)
    assert isinstance(executor, RankedExecutor)
    process = executor._group.processes[0]
    try:
        assert executor.execute(StepBatch([greedy_slice()])).sampled
        monkeypatch.setattr(ranks, "REST_S", 1e9)
        monkeypatch.setattr(ranks, "SILENCE_S", 0.5 if way == "hangs" else 1e9)
        if way == "hangs":
            monkeypatch.setattr(ranks, "find_halt", lambda pid: None)
        process.kill() if way == "has ended" else suspend_process(process.pid)
        end = time.monotonic() + 60
        while way != "hangs" and executor.copier.broken is None:
            assert time.monotonic() < end
            time.sleep(0.01)
        for _ in range(2):
            with pytest.raises(RankError, match=f"rank 1 {way}"):
                executor.execute(StepBatch([greedy_slice()]))
        assert isinstance(executor.copier.broken, RankError)
    finally:
        executor.close()
    assert process.returncode == -signal.SIGKILL


def test_a_message_waits_while_the_other_side_is_alive() -> None:
    ours, theirs = socket.socketpair()
    asked, data = list[int](), bytes(1 << 21)
    with ours, theirs:
        with pytest.raises(BlockingIOError):
            ranks.MessageSocket(ours, lambda: asked.append(0) or len(asked) < 3).send(data)  # type: ignore[func-returns-value]
        assert len(asked) == 3
    ours, theirs = socket.socketpair()
    with ours, theirs, ThreadPoolExecutor(1) as pool:
        waits = threading.Event()
        sent = pool.submit(ranks.MessageSocket(ours, lambda: not waits.set()).send, "kind", data)
        assert waits.wait(60)
        assert ranks.MessageSocket(theirs).receive() == (["kind", data], [])
        sent.result(60)


@pytest.mark.parametrize("waits_for", ["memory", *(pytest.param(w, marks=pytest.mark.long) for w in ("step", "none"))])
def test_a_rank_that_hangs_outside_of_an_exchange_ends_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, waits_for: str
) -> None:
    """Calls that wait for a rank: for memory to be locked, a step's message to be taken, or nothing."""
    write_tiny_source(tmp_path / "source")
    started, start = list[subprocess.Popen[bytes]](), ranks.start_beside
    monkeypatch.setattr(
        ranks, "start_beside", lambda *given, **more: started.append(start(*given, **more)) or started[-1]
    )
    executor = open_tiny(tmp_path, 2)
    copier, long_step = executor.copier, greedy_slice()
    assert isinstance(copier, RankedCopier)
    memory, end = copier.map_memory(4096), time.monotonic() + 60
    with ThreadPoolExecutor(1) as pool:
        try:
            suspend_process(started[0].pid)
            if waits_for == "step":  # given up when the rank is known to hang, long before SEND_S
                monkeypatch.setattr(ranks, "SEND_S", 1e9)
                monkeypatch.setattr(ranks.MessageSocket, "has_message", lambda sock, seconds: True)
                long_step.pages["global"] = [0] * (1 << 19)
                waits = pool.submit(executor.execute, StepBatch([long_step]))
            else:
                waits = pool.submit(copier.pin, memory) if waits_for == "memory" else Future()
                monkeypatch.setattr(ranks, "find_halt", lambda pid: None)
                monkeypatch.setattr(ranks, "REST_S", 0.1)
            while copier.broken is None:
                assert time.monotonic() < end
                time.sleep(0.01)
            if waits_for == "memory":
                assert waits.result(60) is False
            with pytest.raises(RankError, match="rank 1 (hangs|was stopped)"):
                waits.result(60) if waits_for == "step" else executor.execute(StepBatch([greedy_slice()]))
        finally:
            executor.close()


def test_ranks_outlive_the_thread_that_started_them_and_a_suspension(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Time in which all ranks are suspended does not count as silence."""
    write_tiny_source(tmp_path / "source")
    for name in ("HALT_S", "SILENCE_S", "REST_S"):
        monkeypatch.setattr(ranks, name, 60.0)
    waited, receive = threading.Event(), exchange._receive_sum

    def note_glance(peer: socket.socket) -> bytes | None:
        if (byte := receive(peer)) is None:
            waited.set()
        return byte

    with ThreadPoolExecutor(1) as pool:
        executor = pool.submit(open_tiny, tmp_path, 2).result()
        thread = Path(f"/proc/self/task/{pool.submit(threading.get_native_id).result()}")
    now, end, process = time.monotonic, time.monotonic() + 60, executor._group.processes[0]
    try:
        while thread.exists():  # the kernel signals a thread's children before it forgets the thread
            assert now() < end
            time.sleep(0.01)
        assert executor.execute(StepBatch([greedy_slice()])).sampled
        suspend_process(process.pid)
        monkeypatch.setattr(exchange, "_receive_sum", note_glance)
        monkeypatch.setattr(ranks, "time", SimpleNamespace(monotonic=lambda: now() + 1000))
        with ThreadPoolExecutor(1) as pool:
            step = pool.submit(executor.execute, StepBatch([greedy_slice()]))
            assert waited.wait(60)
            process.send_signal(signal.SIGCONT)
            assert step.result().sampled
    finally:
        executor.close()


def test_an_error_within_a_step_ends_the_group_and_a_later_one_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tiny_source(tmp_path / "source")
    executor = open_tiny(tmp_path, 2)
    sampler, local = executor._local._sampler, executor._local
    try:
        with monkeypatch.context() as patched:
            patched.setattr(sampler, "step", lambda *args: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                executor.execute(StepBatch([greedy_slice()]))
        assert executor.execute(StepBatch([greedy_slice()])).sampled
        monkeypatch.setattr(local, "_compute", lambda *given: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            executor.execute(StepBatch([greedy_slice()]))
        with pytest.raises(RankError, match="rank 0 failed in a step"):
            executor.execute(StepBatch([greedy_slice()]))
    finally:
        executor.close()


def test_a_rank_that_cannot_open_its_part_is_an_error(tmp_path: Path) -> None:
    write_tiny_source(tmp_path / "source")
    with pytest.raises(CheckpointError, match="4 attention heads"):
        open_tiny(tmp_path, 3)
    engine = build_engine(tmp_path / "source", tmp_path / "engine", tp_size=2)
    weights = engine.rank_files[1]
    weights.write_bytes(bytes(weights.stat().st_size))  # rank 0 does not read them
    with pytest.raises(EngineFormatError, match="rank1.safetensors cannot be read"):
        find_backend("torch").open(engine, ExecutorOptions(device="cpu", threads=1, kv_pages=PAGES))


def list_open() -> list[str]:
    files = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return sorted(os.readlink(file) for file in files if os.path.lexists(file))


@pytest.mark.parametrize("fault", ["no process starts", pytest.param("no disk", marks=pytest.mark.long)])
def test_a_start_that_fails_leaves_nothing_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Before ranks are there, or when all have loaded: neither files nor processes."""
    write_tiny_source(tmp_path / "source")
    build_engine(tmp_path / "source", tmp_path / "engine", tp_size=4 if fault == "no process starts" else 2)
    started, start = list[int](), ranks.start_beside

    def start_or_fail(command: list[str], **options: object) -> object:
        if fault != "no disk" and started:
            raise FileNotFoundError(fault)
        process = start(command, **options)
        started.append(process.pid)
        return process

    monkeypatch.setattr(ranks, "start_beside", start_or_fail)
    before = list_open()
    with pytest.raises((FileNotFoundError, EnvironmentUnfitError), match=fault if "process" in fault else "disk tier"):
        LLM(tmp_path / "engine", kv__host_bytes="1MiB", kv__disk_path=str(tmp_path / "source" / "config.json"))
    assert list_open() == before
    assert started and not any(Path(f"/proc/{pid}").exists() for pid in started)


def test_a_refusal_that_nobody_hears_ends_a_rank_all_the_same(tmp_path: Path) -> None:
    """The first rank that is refused ends the engine, so the second may find nobody."""
    ours, theirs = socket.socketpair()
    theirs.close()
    start = {"rank": 1, "ranks": 2, "control": ours.detach(), "peers": {}, "memory": create_memory(2), "options": {}}
    rank_process.main(start | {"engine": str(tmp_path), "opener": f"{__name__}:refuse_rank"})


def refuse_rank(*given: object) -> None:
    raise EngineFormatError("No rank opens this.")


@pytest.mark.long  # by tiny models in every run: `test_logits_are_those_of_one_rank`
@pytest.mark.parametrize("tp", [2, 4])
def test_the_real_270m_answers_alike_on_all_numbers_of_ranks(
    tmp_path: Path, gemma_270m_gguf: Path, engine_270m: Path, tp: int
) -> None:
    """In bfloat16, where a tie may fall otherwise: each token is the best of one rank but for rounding."""
    path = tmp_path / "engine"
    build_engine(gemma_270m_gguf, path, tp_size=tp)
    prompts = ["The capital of France is", "Once upon a time there was", "def add(a, b):\n    return"]
    params, cache = SamplingParams(temperature=0.0, max_tokens=12, logprobs=2), {"kv.device_bytes": 64 << 20}
    answers = []
    for engine in (engine_270m, path):
        model = LLM(engine, **cache, **{"scheduler.max_context": 128})
        try:
            answers.append([found[0] for found in model.generate(prompts, params)])
        finally:
            model.close()
    for one, many in zip(*answers, strict=True):
        for i, (right, found) in enumerate(zip(one.token_ids, many.token_ids, strict=True)):
            if right != found:
                known = dict(one.logprobs[i].top)
                assert found in known and known[right] - known[found] < 0.05, (i, "another token, and no tie")
                break
