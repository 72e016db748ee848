"""Engines of several ranks in Triton's interpreter: processes with a part each give the logits of the whole model."""

from __future__ import annotations

import multiprocessing
import socket
from itertools import combinations, count
from multiprocessing.connection import Connection
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from parity.paged import relative_error  # noqa: E402
from parity.tiny import TinyModel  # noqa: E402
from runtime.triton_cpu import Driver, blocks_of, executor_of, oracle_of, small_model  # noqa: E402

from wicore_trt.backends.triton import table as triton_table  # noqa: E402
from wicore_trt.plugins import exchange_layout  # noqa: E402
from wicore_trt.plugins.kernels import exchange  # noqa: E402
from wicore_trt.runtime.exchange import RankExchange, create_memory  # noqa: E402
from wicore_trt.weight_format import Q4_0  # noqa: E402

LONG = ("bfloat16", "float16", "q4_0", "invariant", "large", "fp8 large of 4", "invariant of 4")
STEPS = ([9, 3], [1, 4], [1, 2], [1, 1])


def run_rank(model: TinyModel, exchange: RankExchange, sent: Connection, given: dict[str, Any]) -> None:
    executor = executor_of(model, part=model.spec.shard(exchange.rank, exchange.ranks), ranks=exchange, **given)
    driver, sequences, vocab = Driver(executor, 1), [], model.spec.vocab_size
    told = list[bytes]()
    executor.on_step = told.append
    executor.model.launcher.launched.clear()
    tokens = torch.Generator().manual_seed(3)
    for lengths in STEPS:
        while len(sequences) < len(lengths):
            sequences.append(driver.new_sequence())
        work = [
            (s, torch.randint(vocab, (n,), generator=tokens).tolist()) for s, n in zip(sequences, lengths, strict=False)
        ]
        sent.send((driver.step(work).numpy(), told.pop()))
    assert executor.model.owns == any("_own" in name for name in executor.model.launcher.launched)


@pytest.mark.parametrize(
    "case",
    ["fp8", "large of 4", *(pytest.param(c, marks=pytest.mark.long) for c in LONG)],
)
def test_ranks_give_the_logits_of_the_whole_model(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """All ranks the same bits, near those of one. "large": more rows than are pushed, products by cuBLAS. Of 4
    ranks, each row then has an owner, also of a step that is large by its padding alone."""
    ranks, fp8, invariant = 4 if "of 4" in case else 2, "fp8" in case, "invariant" in case
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": ranks}
    model, given = small_model(7, **sizes, vocab_size=96), {}
    dtype = "float16" if case == "float16" else "bfloat16"
    meant = None
    if case == "q4_0":
        given["tensors"], meant = blocks_of(model, dtype, Q4_0)
        given["weights"] = Q4_0
    if "large" in case or ranks == 4:
        monkeypatch.setattr(exchange_layout, "PUSHED_ROWS", 4)
        monkeypatch.setattr(exchange, "ROOM", type(exchange.ROOM)(4))
        monkeypatch.setattr("wicore_trt.backends.triton.memory.PUSHED_ROWS", 4)
        monkeypatch.setitem(triton_table.CROSSOVER, "sm90", {"16-bit": 2, "fp8": 2, "fp8 rows": 4})
    given |= {"dtype": dtype, "fp8": fp8, "batch_invariant": invariant, "graphs": "of 4" in case}
    memory, mesh = create_memory(ranks), {pair: socket.socketpair() for pair in combinations(range(ranks), 2)}
    context, group = multiprocessing.get_context("fork"), list[RankExchange]()
    glances = count()
    for rank in range(ranks):
        ends = {sum(pair) - rank: pair_ends[pair[1] == rank] for pair, pair_ends in mesh.items() if rank in pair}
        group.append(RankExchange(rank, ranks, memory, ends, lambda rank: next(glances) < 1000))
    pipes = [context.Pipe(duplex=False) for _ in group]
    processes = [
        context.Process(target=run_rank, args=(model, end, sent, given))
        for end, (_, sent) in zip(group, pipes, strict=True)
    ]
    for process in processes:
        process.start()
    for _, end in pipes:
        end.close()
    driver, sequences = Driver(oracle_of(model, dtype, fp8=fp8, tensors=meant), 2), []
    tokens = torch.Generator().manual_seed(3)
    for lengths in STEPS:
        while len(sequences) < len(lengths):
            sequences.append(driver.new_sequence())
        work = [
            (s, torch.randint(model.spec.vocab_size, (n,), generator=tokens).tolist())
            for s, n in zip(sequences, lengths, strict=False)
        ]
        expected, (logits, told) = driver.step(work), zip(*(begin.recv() for begin, _ in pipes), strict=True)
        found = [*map(torch.from_numpy, logits)]
        assert len({*told}) == 1, "ranks tell of different rows"
        assert all(torch.equal(found[0], other) for other in found), "ranks differ"
        assert fp8 or torch.equal(found[0].argmax(-1), expected.argmax(-1)), lengths
        assert relative_error(found[0], expected) < (0.08 if fp8 else 0.03), lengths
    for process in processes:
        process.join(60)
        process.kill()
        assert process.exitcode == 0
