"""Constrained sequences over the checked fake executor: characters are tokens, and logits a function of the prefix."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
from fakes import EOS, VOCAB, AheadFakeExecutor, FakeExecutor, FakeTokenizer, make_core, prefix_digests

from wicore_trt.core.engine import EngineCore
from wicore_trt.grammar.matcher import Grammars
from wicore_trt.runtime.batch import StepBatch, StepResult
from wicore_trt.types import Constraint, ConstraintKind

if TYPE_CHECKING:
    import torch  # seconds in each process of the servers that use this module, which sample nothing


class CharTokenizer(FakeTokenizer):
    """Token t is the character chr(32 + t), but the end; the last one is a line feed."""

    LINE = VOCAB - 1

    def list_vocabulary(self) -> list[bytes | None]:
        texts: list[bytes | None] = [chr(32 + t).encode() for t in range(VOCAB)]
        texts[EOS], texts[self.LINE] = None, b"\n"
        return texts

    def decode(self, ids, *, skip_special: bool = True) -> str:
        return super().decode(ids, skip_special=skip_special).replace(chr(32 + self.LINE), "\n")


def logits_of(history: list[int]) -> torch.Tensor:
    """The fake model; about every fifth character closes something."""
    seed = int.from_bytes(prefix_digests(history)[-1], "little")
    logits = np.random.default_rng(seed).standard_normal(VOCAB).astype(np.float32)
    logits[[ord(c) - 32 for c in '"}]']] += 2.0
    import torch

    return torch.from_numpy(logits)


def sampling(executor: FakeExecutor, execute: Callable[[StepBatch], StepResult]) -> Callable[[StepBatch], StepResult]:
    """Steps whose tokens are sampled from `logits_of`, as a real executor does."""
    import torch

    from wicore_trt.runtime.sampler import Sampler

    sampler = Sampler()

    def run(batch: StepBatch) -> StepResult:
        result = execute(batch)
        pieces = [p for p in batch.slices if p.sample and p.seq_id not in result.failed]
        if not pieces:
            return result
        found = sampler.sample(torch.stack([logits_of(executor.history(p)) for p in pieces]), pieces)
        executor.sampled = {one.seq_id: one.token_ids[-1] for one in found.sampled}
        return found

    return run


def constrained_core(*, grammars: Grammars | None = None, **kwargs) -> EngineCore:
    core = make_core(**kwargs)
    core._grammars = grammars or Grammars(CharTokenizer(), VOCAB)
    step = "computed" if isinstance(core.executor, AheadFakeExecutor) else "execute"
    setattr(core.executor, step, sampling(core.executor, getattr(core.executor, step)))
    return core


def schema(value: object) -> Constraint:
    return Constraint(ConstraintKind.JSON_SCHEMA, json.dumps(value))


def random_schema(rng: random.Random) -> dict:
    """As people write them, sometimes with a definition."""
    if rng.random() < 0.2:
        reference = {"$ref": "#/$defs/d"}
        return {"$defs": {"d": _schema(rng, 1)}, "type": "array", "items": reference, "maxItems": 2}
    return _schema(rng, 2)


def _schema(rng: random.Random, depth: int) -> dict:
    kinds = ["string", "integer", "boolean", "null", "enum", "const"] + ["object", "array", "anyOf"] * (depth > 0)
    match rng.choice(kinds):
        case "string":
            return rng.choice([{"maxLength": rng.randint(0, 6)}, {"pattern": "^[a-c]{1,3}$"}]) | {"type": "string"}
        case "integer":
            low = rng.randint(-50, 50)
            return {"type": "integer", "minimum": low, "maximum": low + rng.randint(0, 200)}
        case "enum":
            return {"enum": [rng.choice(["a", "b c", 'd"e', 1, 2.5, None, True]) for _ in range(rng.randint(1, 3))]}
        case "const":
            return {"const": rng.choice(["x", 7, False])}
        case "object":
            names = rng.sample("abcdefg", rng.randint(0, 3))
            return {
                "type": "object",
                "properties": {name: _schema(rng, depth - 1) for name in names},
                "required": [name for name in names if rng.random() < 0.7],
                "additionalProperties": False,
            }
        case "array":
            return {"type": "array", "items": _schema(rng, depth - 1), "maxItems": rng.randint(0, 3)}
        case "anyOf":
            return {"anyOf": [_schema(rng, depth - 1) for _ in range(2)]}
        case kind:
            return {"type": kind}
