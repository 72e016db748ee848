"""Answers of an oracle, and how those of another executor are judged against it: arrays and arithmetic.

Knows neither executors nor files of engines, and loads no torch. Invariant: what is allowed follows from the oracles
alone. `rounding` compares two oracles, so an error of the executor that is judged cannot widen its own bound.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

NEW_TOKENS = 64
COMMON_TOP, COMMON_RANDOM, OWN_TOP, CANDIDATES = 32, 224, 8, 7
FLOAT32, FP8_FLOAT32, FP8_WEIGHTS = "float32", "fp8-float32", "fp8-weights"
Q4_0, Q4_0_FLOAT32 = "q4_0", "q4_0-float32"
"""Oracles: float32 between operators and in weights; E4M3 weights behind float32 rows, and behind bfloat16 rows; Q4_0
weights behind bfloat16 rows, and behind float32 rows. "bfloat16" and "float16" round where kernels round; "fp8" has
weights and rows in E4M3."""

INVARIANT, DEFAULT = "invariant", "default"
_JUDGES = {"bfloat16": FLOAT32, "float16": FLOAT32, "fp8": FP8_FLOAT32, Q4_0: Q4_0_FLOAT32, FLOAT32: FLOAT32}
JUDGES = {(name, mode): (name, exact) for name, exact in _JUDGES.items() for mode in (INVARIANT, DEFAULT)}
JUDGES["fp8", INVARIANT] = (FP8_WEIGHTS, FP8_FLOAT32)
"""By engine and mode: the oracle that rounds at the same places, and the one that rounds nowhere."""

MAX_FACTOR, MEAN_FACTOR = 2.0, 1.5
"""Logits may err by this much more than those of the oracle that rounds at the same places, in the largest and in the
mean: the errors are as large and not the same ones."""
FLOAT32_ROUNDING = 2e-3
"""Largest difference between float32 executors: sums in another order."""


@dataclass(frozen=True)
class Answers:
    """Logits of one oracle at P prompts x T positions: `values` float32 [P, T, C] of `Oracle.ids`, its own largest
    `top_ids` int32 and `top_logits` float32 [P, T, OWN_TOP], largest first."""

    values: np.ndarray
    top_ids: np.ndarray
    top_logits: np.ndarray


@dataclass(frozen=True)
class Oracle:
    """`prompts` token ids and `names`; `tokens` int32 [P, T], the greedy continuation in float32, which all oracles are
    given; `ids` int32 [P, T, C], the tokens whose logits are kept: the largest in float32 in order, and random ones."""

    names: list[str]
    prompts: list[list[int]]
    tokens: np.ndarray
    ids: np.ndarray
    answers: Mapping[str, Answers]
    source: str

    def save(self, path: Path) -> None:
        arrays = {"tokens": self.tokens, "ids": self.ids}
        for name, found in self.answers.items():
            arrays |= {f"{name}.values": found.values, f"{name}.top_ids": found.top_ids}
            arrays[f"{name}.top_logits"] = found.top_logits
        about = json.dumps({"names": self.names, "prompts": self.prompts, "source": self.source})
        with path.open("wb") as file:
            np.savez_compressed(file, about=np.frombuffer(about.encode(), np.uint8), **arrays)  # type: ignore[arg-type]

    @classmethod
    def load(cls, path: Path) -> Oracle:
        with np.load(path) as arrays:
            about = json.loads(arrays["about"].tobytes())
            parts = ("values", "top_ids", "top_logits")
            names = [name.removesuffix(".values") for name in arrays.files if name.endswith(".values")]
            answers = {name: Answers(*(arrays[f"{name}.{part}"] for part in parts)) for name in names}
            return cls(about["names"], about["prompts"], arrays["tokens"], arrays["ids"], answers, about["source"])

    def rounding(self, name: str, exact: str) -> Errors:
        """Measure how far oracle `name` lies from `exact`, on the CPU alone: errors that come of its dtype."""
        if name == exact:
            return Errors(FLOAT32_ROUNDING, FLOAT32_ROUNDING)
        return Errors.between(self.answers[name].values, self.answers[exact].values)

    def turnable(self, name: str, exact: str) -> float:
        """Find the largest gap between two tokens that rounding can turn over: by how much the gaps between the largest
        logit and the next CANDIDATES in float32 differ between the two oracles, at worst. At most twice `rounding`."""
        if name == exact:
            return 2 * FLOAT32_ROUNDING
        a, b = (self.answers[n].values[..., : CANDIDATES + 1].astype(np.float64) for n in (name, exact))
        return float(np.abs((a[..., :1] - a[..., 1:]) - (b[..., :1] - b[..., 1:])).max())


@dataclass(frozen=True)
class Errors:
    """Of logits: largest and mean absolute difference."""

    largest: float
    mean: float

    @classmethod
    def between(cls, a: np.ndarray, b: np.ndarray) -> Errors:
        apart = np.abs(a.astype(np.float64) - b)
        if not np.isfinite(apart).all():
            return cls(float("inf"), float("inf"))
        return cls(float(apart.max()), float(apart.mean()))

    def within(self, allowed: Errors) -> bool:
        return self.largest <= MAX_FACTOR * allowed.largest and self.mean <= MEAN_FACTOR * allowed.mean

    def __str__(self) -> str:
        return f"max {self.largest:.4g}, mean {self.mean:.4g}"


@dataclass(frozen=True)
class Divergence:
    """Another token than the oracle's at step `step` of prompt `prompt`, with the oracle's context. `gap` is the
    oracle's logit of its own token less that of `token`; `first` and `second` are the oracle's two largest logits.
    `at_least`: the oracle's list ends before `token`, so the gap is larger than said."""

    prompt: int
    step: int
    expected: int
    token: int
    first: float
    second: float
    gap: float
    at_least: bool = False

    def explained(self, turnable: float) -> bool:
        return not self.at_least and self.gap <= turnable

    def line(self, name: str, turnable: float) -> str:
        verdict = "a tie within rounding" if self.explained(turnable) else "NOT EXPLAINED"
        return (
            f"{name}, position {self.step}: token {self.token} in place of {self.expected}; the oracle's two largest "
            f"{self.first:.4f} and {self.second:.4f}, gap {'above ' if self.at_least else ''}{self.gap:.4f}, rounding "
            f"turns gaps up to {turnable:.4f}: {verdict}"
        )


def find_divergences(tokens: np.ndarray, answers: Answers) -> list[Divergence]:
    """Find where `tokens` [P, T], each chosen behind the oracle's context, are not the oracle's."""
    found = []
    for prompt, step in np.argwhere(tokens != answers.top_ids[..., 0]).tolist():
        ids, logits = answers.top_ids[prompt, step], answers.top_logits[prompt, step]
        token = int(tokens[prompt, step])
        known = np.flatnonzero(ids == token)
        at = int(known[0]) if len(known) else len(ids) - 1
        first, second, gap = float(logits[0]), float(logits[1]), float(logits[0] - logits[at])
        found.append(Divergence(prompt, step, int(ids[0]), token, first, second, gap, not len(known)))
    return found


def find_differences(a: np.ndarray, b: np.ndarray) -> list[int | None]:
    """Find each row's first column where two arrays differ, None for rows that are equal."""
    return [int(row.argmax()) if row.any() else None for row in a != b]


def choose_ids(top: np.ndarray, vocab: int, seed: int = 0) -> np.ndarray:
    """Choose the ids whose logits are kept: `top` [P, T, COMMON_TOP], and random ones, equal at every position."""
    drawn = np.random.default_rng(seed).choice(vocab, min(COMMON_RANDOM, vocab), replace=False).astype(np.int32)
    return np.concatenate([top, np.broadcast_to(drawn, (*top.shape[:2], len(drawn)))], axis=2)


@dataclass(frozen=True)
class Piece:
    """Tokens [start, start + count) of a sequence to compute in a step."""

    sequence: int
    start: int
    count: int


def plan_step(done: Sequence[int], prompts: Sequence[int], wanted: Sequence[int], budget: int) -> list[Piece]:
    """Plan a step: one token of each sequence that is past its prompt, then prompts in order while `budget`
    tokens last. `done` tokens are computed, `prompts` are the lengths of prompts, `wanted` tokens are needed in all."""
    pieces = [Piece(i, d, 1) for i, d in enumerate(done) if prompts[i] <= d < wanted[i]]
    left = budget - len(pieces)
    for i, d in enumerate(done):
        if d < prompts[i] and left > 0:
            pieces.append(Piece(i, d, min(left, prompts[i] - d)))
            left -= pieces[-1].count
    return pieces
