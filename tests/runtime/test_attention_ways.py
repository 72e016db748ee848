"""Whichever way attention of a step is computed, it is what the definition says, whatever else is in the step.

`pytest -m long tests/runtime/test_attention_ways.py` plays for minutes and says which ways were gone how often.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from dataclasses import dataclass, replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from runtime.attention_ways import LAYERS, LOCAL, ROWS, STAMPS, Bench, Made, Piece, Shape, worst  # noqa: E402


def a_step(rng: random.Random, shape: Shape) -> list[Piece]:
    """Pieces whose beginnings and lengths lie at the edges of pages, blocks, windows and segments, or anywhere."""
    s, m, page = shape.segments, shape.block.block_m, shape.page_tokens
    units = (page, shape.block.block_k, s.tokens, s.tokens * s.most, shape.window, shape.split.block_k)
    lengths = (2, m, shape.split.block_m, s.rows, s.least, 2 * s.rows, s.rows + s.least, page)
    pieces, budget = list[Piece](), rng.randint(max(1, shape.few), shape.tokens)
    if rng.random() < 0.6:
        budget = rng.randint(1, max(2, shape.few))
    while budget > 0 and len(pieces) < ROWS - 4 and (not pieces or rng.random() < 0.85):
        tokens = 1
        if rng.random() < 0.75:
            tokens = max(1, rng.choice(lengths) + rng.choice((-1, 0, 0, 1, rng.randint(0, 9))))
        tokens = min(tokens, budget, shape.context)
        start = rng.choice((0, 0, 1, rng.randrange(shape.context)))
        if rng.random() < 0.6:
            unit = rng.choice(units)
            start = unit * rng.randint(0, max(1, shape.context // unit)) + rng.choice((-1, 0, 0, 1))
        start = max(0, min(start, shape.context - tokens))
        pieces.append(Piece(len(pieces), start, tokens, rng.choice((0, 0, 1, 3))))
        budget -= tokens
    rng.shuffle(pieces)
    return pieces


@dataclass
class Step:
    """A step that was made: `kv` are the pieces' keys and values at `layer`."""

    bench: Bench
    rng: random.Random
    pieces: list[Piece]
    layer: int
    kv: list[tuple[torch.Tensor, torch.Tensor]]
    queries: list[torch.Tensor]
    padded: bool

    @classmethod
    def random(cls, bench: Bench, rng: random.Random) -> Step:
        shape, torch_seed = bench.shape, rng.randrange(1 << 30)
        torch.manual_seed(torch_seed)
        pieces, layer = a_step(rng, shape), rng.choice((0, 1, 1, 2, 3, 3))
        bench.place(pieces)
        kv = bench.fill(layer, pieces, rng.choice((0.01, 1.0, 1.0, 3.0, 20.0)))
        queries = [torch.randn(p.tokens, shape.heads, shape.head_dim) * rng.choice((0.1, 1, 1, 4)) for p in pieces]
        if rng.random() < 0.1:
            queries[0][0] = 0
        count = sum(p.tokens for p in pieces)
        padded = count + 8 < bench.model.memory.queries.shape[1] and rng.random() < 0.6
        cast = [q.to(bench.model.memory.q.dtype) for q in queries]
        return cls(bench, rng, pieces, layer, kv, cast, padded)

    def found(self) -> list[torch.Tensor]:
        return self.bench.step(self.pieces, self.layer, padded=self.padded, queries=self.queries)

    def errors(self, found: list[torch.Tensor]) -> list[float]:
        """The largest of each piece, in units of what may be."""
        errors = []
        for piece, (k, v), q, out in zip(self.pieces, self.kv, self.queries, found, strict=True):
            way = self.bench.way(self.pieces, self.layer, piece)
            errors.append(worst(Made(piece, k, v, q, out, way), self.bench.shape, self.layer, way))
            self._count(piece, way)
        return errors

    def _count(self, piece: Piece, way: str) -> None:
        ways, s = self.bench.ways, self.bench.shape.segments
        ways[way + (" padded" if self.padded else "")] += 1
        if way != "large" or self.bench.model.segments is None or not s.dense_rows(piece.start, piece.tokens):
            return
        spans, rows = [*s.spans(piece.start)], s.dense_rows(piece.start, piece.tokens)
        ways["dense slices"] += 1
        ways["dense, spans of several segments"] += any(n > s.tokens for _, n in spans)
        ways["dense, several spans"] += len(spans) > 1
        ways["dense, rows left over"] += rows < piece.tokens
        ways["dense, rows padded"] += rows % s.rows > 0
        ways["dense, several products of rows"] += rows > s.rows

    def hurt(self) -> str:
        """Take a page from a piece, or make one of its keys or values NaN: whoever sees that gets no number."""
        rng, shape, bench = self.rng, self.bench.shape, self.bench
        n = rng.randrange(len(self.pieces))
        piece, group = self.pieces[n], LAYERS[self.layer]
        table, window = piece.pages[group], shape.window if group == LOCAL else 0
        position = torch.arange(piece.start, piece.end)
        at = rng.randrange(max(0, piece.start - window + 1) if window else 0, piece.end)
        low, high = at, at
        what, heads, columns = rng.choice(("page", "key", "value")), slice(None), slice(None)
        if what == "page":
            low, high = (
                at // shape.page_tokens * shape.page_tokens,
                (at // shape.page_tokens + 1) * shape.page_tokens - 1,
            )
            table[at // shape.page_tokens], piece.stamp = -1, next(STAMPS)
        else:
            index = [i for i, g in enumerate(LAYERS) if g == group].index(self.layer)
            head, column = rng.randrange(shape.kv_heads), rng.randrange(shape.head_dim)
            pool, repeat = bench.model.pools[group], shape.heads // shape.kv_heads
            place = (table[at // shape.page_tokens], index, int(what == "value"), at % shape.page_tokens, head, column)
            pool[place] = 0x7F if pool.dtype == torch.uint8 else torch.nan
            heads = slice(head * repeat, (head + 1) * repeat)
            columns = slice(column, column + 1) if what == "value" else columns
        sees = (position >= low) & ((position - window < high) if window else True)
        found = self.found()
        others = [e for i, e in enumerate(self.errors(found)) if i != n]
        assert max(others, default=0) <= 1, "it reached another sequence"
        assert found[n][sees][:, heads, columns].isnan().all(), f"a {what} that is not there gave a number"
        return what


def apart(step: Step) -> int:
    """The rows of a batch-invariant step, alone, in other chunks and beside others: the same bits. How often compared.

    Of other engines only prompts have the same bits, padded or not, and only while the same kernel computes both. A
    graph launches what its own number of tokens asks for, as it was recorded before any step was there. So a step that
    is padded beyond `split_tokens` leaves its keys in one piece, where the plain step divides them among programs. Each
    is then as near to the definition as it may be."""
    bench, rng, found = step.bench, step.rng, step.found()
    if not bench.shape.invariant:
        if LAYERS[step.layer] == LOCAL or not step.padded:
            return 0
        few, padded = bench.model.memory.split_tokens, bench.tokens
        again = bench.step(step.pieces, step.layer, padded=False, queries=step.queries)
        if bench.tokens <= few < padded:
            assert max(step.errors(again)) <= 1
            return 0
        several = [(a, b) for a, b, p in zip(found, again, step.pieces, strict=True) if p.tokens > 1]
        assert all(torch.equal(a, b) for a, b in several)
        return len(several)
    count = 0
    for piece, q, whole in zip(step.pieces, step.queries, found, strict=True):
        cuts = sorted({0, piece.tokens, *(rng.randrange(piece.tokens) for _ in range(2))})
        for a, b in zip(cuts, cuts[1:], strict=False):
            part = replace(piece, seq_id=77, start=piece.start + a, tokens=b - a)
            others = [p for p in step.pieces if p is not piece][: rng.randint(0, 2)]
            some = [step.queries[step.pieces.index(p)] for p in others]
            padded = rng.random() < 0.5 and sum(p.tokens for p in (part, *others)) < 160
            got = bench.step([*others, part], step.layer, padded=padded, queries=[*some, q[a:b]])[-1]
            assert torch.equal(got, whole[a:b]), (piece, a, b, padded)
            count += 1
    return count


def run(bench: Bench, rng: random.Random) -> None:
    step = Step.random(bench, rng)
    errors = step.errors(step.found())
    assert max(errors) <= 1, (errors, step.layer, step.padded, step.pieces, bench.shape)
    bench.ways["worst"] = max(bench.ways["worst"], int(100 * max(errors)))
    if rng.random() < 0.3:
        bench.ways["same bits"] += apart(step)
    if rng.random() < 0.3:
        bench.ways[f"hurt: {step.hurt()}"] += 1


@pytest.mark.parametrize("invariant", [False, True])
def test_random_steps(invariant: bool) -> None:
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    bench = Bench(Shape.random(rng, invariant=invariant, tokens=120, context=150), rng)
    for step in range(4):
        try:
            run(bench, rng)
        except Exception as error:
            raise AssertionError((seed, step)) from error


def campaign(first: int, seconds: float, **given: Any) -> tuple[Counter[str], list[Any]]:
    """Random benches from seed `first` on: which ways were gone how often, and what was wrong."""
    ways, wrong, end, seed = Counter[str](), list[Any](), time.monotonic() + seconds, first
    while time.monotonic() < end:
        rng = random.Random(seed)
        bench = Bench(Shape.random(rng, **{"invariant": rng.random() < 0.2} | given), rng)
        for step in range(12):
            try:
                run(bench, rng)
            except Exception as error:
                wrong.append((seed, step, repr(error)))
                break
            ways["steps"] += 1
        for name in bench.launcher.launched:
            ways["kernel " + name.split("_d")[0]] += 1
        ways["worst"] = max(ways["worst"], bench.ways.pop("worst", 0))
        ways += bench.ways
        seed += 1
    ways["benches"] = seed - first
    return ways, wrong


@pytest.mark.long
@pytest.mark.parametrize(
    "given", [{}, {"head_dim": 128, "heads": 2, "kv_heads": 1}, {"head_dim": 256, "heads": 2, "kv_heads": 2}]
)
def test_random_engines(given: dict[str, Any]) -> None:
    ways, wrong = campaign(random.randrange(1 << 30), 300, **given)
    print(given, ways)
    assert not wrong, wrong[:3]
    assert all(ways[name] for name in ("few", "few padded", "large", "dense slices", "dense, several spans", "window"))
