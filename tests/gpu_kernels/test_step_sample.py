"""Sampling on the device against the host's sampler: in the interpreter, and on a GPU where there is one."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import torch
from kernel_checks import Runner
from step_runners import RUNNERS

from wicore_trt.plugins import step_layout
from wicore_trt.plugins.kernels import sample, step_specs
from wicore_trt.plugins.step_layout import Logits, SampleArrays
from wicore_trt.runtime.batch import SequenceSlice
from wicore_trt.runtime.sampler import Sampler
from wicore_trt.types import SamplingParams

POISON = {torch.float32: math.nan, torch.float64: math.nan, torch.int32: -7, torch.int64: -7}
GREEDY = SamplingParams(temperature=0)


def slices(params: list[SamplingParams]) -> list[SequenceSlice]:
    """Rows with fresh seeds, behind a prompt of three and 0 to 40 tokens of output."""
    found = []
    for row, one in enumerate(params):
        seed = random.choice([0, 1, 2**63, 2**64 - 1, random.getrandbits(64)])
        last = 2 + random.randrange(41)
        found.append(SequenceSlice(row, [1], last, {}, True, one, 3, seed))
    return found


@dataclass
class Device:
    """The kernels over `logits` [R, V]; rows lie further apart than they are long, and NaN lies between."""

    run: Runner
    logits: torch.Tensor
    rows: list[SequenceSlice]
    softcap: float = 0.0
    candidates: int = 32  # the interpreter sorts slowly
    tokens: list[int] = field(default_factory=list)
    status: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        run, (r, vocab) = self.run, self.logits.shape
        stored = torch.cat([self.logits, torch.full((1, vocab), math.nan)])
        params = [s.params for s in self.rows if s.params is not None]
        sampled = any(not p.greedy for p in params)
        specs = step_specs.sample_specs(vocab, sampled=sampled, softcap=self.softcap, candidates=self.candidates)
        chunk = int(specs["choose"].constants["CHUNK"])
        capacity = int(specs["draw"].constants["CAPACITY"]) if sampled else 0
        scratch = step_layout.sample_scratch(vocab, chunk, sample.GROUP, capacity)
        arrays = {
            n: run.put(torch.full((r, size), POISON[getattr(torch, t)], dtype=getattr(torch, t)))
            for n, (t, size) in scratch.items()
        }
        arrays |= {n: run.put(torch.full((r + 1,), -7, dtype=torch.int32)) for n in ("tokens", "status")}
        for name in ("temperature", "top_p", "min_p"):
            values = torch.tensor([getattr(p, name) for p in params], dtype=torch.float64)
            arrays["temperatures" if name == "temperature" else name] = run.put(values)
        arrays["top_k"] = run.ints([p.top_k for p in params])
        seeds = [s.seed - 2**64 if s.seed >= 2**63 else s.seed for s in self.rows]
        arrays["seeds"] = run.put(torch.tensor(seeds, dtype=torch.int64))
        arrays["indices"] = run.ints([s.start + 1 - s.prompt_len for s in self.rows])
        if not sampled:  # null pointers, which must not be touched
            arrays = {n: a for n, a in arrays.items() if n in ("tokens", "status", "chunk_max", "chunk_token")}
        there = Logits(run.put(stored), r, vocab)
        calls = step_layout.sample_launches(specs["choose"].constants, there, SampleArrays(**arrays))
        for name, call in calls.items():
            if name in specs:
                run.launch(specs[name], call)
        self.tokens, self.status = arrays["tokens"].tolist(), arrays["status"].tolist()
        assert self.tokens.pop() == self.status.pop() == -7, "the row behind the last one is not written"

    def check(self) -> None:
        """Tokens and failures are the host's."""
        logits = self.logits
        if self.softcap:
            logits = (torch.tanh(logits.double() / self.softcap) * self.softcap).float()
        want = Sampler().sample(logits, self.rows)
        tokens = {t.seq_id: t.token_ids[0] for t in want.sampled}
        for row in range(len(self.rows)):
            state = sample.NOT_FINITE if row in want.failed else sample.DONE
            assert (self.status[row], self.tokens[row]) == (state, tokens.get(row, -1)), self.rows[row].params


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("vocab", [1, 64, 2048, 5000])
def test_greedy(run: Runner, vocab: int) -> None:
    """Ties within a chunk and across chunks, the first and the last token, zeros of both signs."""
    logits = torch.randn(6, vocab)
    logits[1, :: max(1, vocab // 3)] = 9
    logits[2, -1] = 20
    logits[3, 0] = 20
    logits[4] = -5
    logits[4, vocab // 2] = -0.0
    logits[4, -1] = 0.0
    logits[5] = -math.inf
    logits[5, vocab // 3] = -1e30
    Device(run, logits, slices([GREEDY] * 6)).check()


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("params", [GREEDY, SamplingParams(), SamplingParams(top_k=5)], ids=["greedy", "all", "top-k"])
def test_rows_that_are_not_finite_fail_alone(run: Runner, params: SamplingParams) -> None:
    logits = torch.randn(5, 4100)
    logits[0, 4099] = math.nan
    logits[1, 3] = math.inf
    logits[2] = -math.inf
    logits[3] = math.nan
    device = Device(run, logits, slices([params] * 5))
    device.check()
    assert device.status == [1, 1, 1, 1, 0]


DRAWN = [
    SamplingParams(),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=1e-6),
    SamplingParams(top_k=1),
    SamplingParams(top_k=32, top_p=0.95),
    SamplingParams(temperature=1.7, top_k=31),
    SamplingParams(top_p=0.5),
    SamplingParams(top_p=1e-9),
    SamplingParams(min_p=0.1),
    SamplingParams(min_p=1.0),
    SamplingParams(temperature=0.7, top_k=25, top_p=0.9, min_p=0.02),
    GREEDY,
]
WIDE = [SamplingParams(temperature=100.0, top_k=39), SamplingParams(top_k=10_000, top_p=0.999), SamplingParams(top_p=1)]


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("vocab", [40, 9000])
def test_draws_are_the_hosts(run: Runner, vocab: int) -> None:
    params = DRAWN * 2 + (WIDE if vocab == 40 else [])
    logits = torch.randn(len(params), vocab) * 4
    logits[len(DRAWN) :] = (logits[len(DRAWN) :] * 4).round() / 4  # ties
    logits[:, 1::7] = -math.inf
    Device(run, logits, slices(params)).check()


@pytest.mark.parametrize("run", RUNNERS)
def test_a_nucleus_that_is_reached_exactly(run: Runner) -> None:
    """Two tokens of one half each: the first alone reaches top_p = 0.5, whatever the number drawn."""
    logits = torch.full((8, 50), -math.inf)
    logits[:, 11] = logits[:, 17] = 2.5
    device = Device(run, logits, slices([SamplingParams(top_p=0.5)] * 8))
    device.check()
    assert device.tokens == [11] * 8


@pytest.mark.parametrize("run", RUNNERS)
def test_many_candidates(run: Runner) -> None:
    params = random.choice([SamplingParams(temperature=3, top_k=1024), SamplingParams(temperature=0.15, top_p=0.9)])
    Device(run, torch.randn(1, 140_000), slices([params]), candidates=1024).check()


@pytest.mark.parametrize("run", RUNNERS)
def test_a_row_depends_on_itself_alone(run: Runner) -> None:
    logits, rows = torch.randn(4, 4500) * 3, slices([SamplingParams(top_p=0.8), *DRAWN[:3]])
    together = Device(run, logits, rows)
    for row in range(4):
        assert Device(run, logits[row : row + 1], rows[row : row + 1]).tokens == together.tokens[row : row + 1]


@pytest.mark.parametrize("run", RUNNERS)
def test_what_candidates_cannot_decide_is_left_to_the_host(run: Runner) -> None:
    """A nucleus of thousands of tokens, more ties than candidates find room, and a top-k beyond the candidates."""
    flat, ties, narrow = torch.randn(5000) * 1e-3, torch.zeros(5000), torch.randn(5000) * 6
    params = [SamplingParams(top_p=0.9), SamplingParams(top_k=3), SamplingParams(top_k=2000), SamplingParams(top_p=0.5)]
    device = Device(run, torch.stack([flat, ties, narrow, narrow]), slices(params))
    assert device.status == [sample.UNDECIDED] * 3 + [sample.DONE] and device.tokens[:3] == [-1] * 3


@pytest.mark.parametrize("run", RUNNERS)
@pytest.mark.parametrize("sampled", [False, True])
def test_softcap(run: Runner, sampled: bool) -> None:
    """Far apart logits become near ones, so draws change; the vocabulary's end stays masked; +inf is not hidden."""
    logits = torch.randn(6, 2500) * 40 - 100
    logits[2] = -1e4  # at the cap, where a masked entry must not be
    logits[5, 7] = math.inf
    params = [SamplingParams(temperature=2), SamplingParams(top_k=15)] if sampled else [GREEDY, GREEDY]
    device = Device(run, logits, slices(params * 3), softcap=30.0)
    assert (device.status.pop(), device.tokens.pop()) == (sample.NOT_FINITE, -1)
    device.logits, device.rows = logits[:5], device.rows[:5]
    device.check()
