"""Makes the oracle of these checks on a CPU: greedy tokens in float32, and what every dtype says along them.

Runs the torch operators of `backends.torch.ops`; it must not know the executor that is judged. Invariant: all oracles
see the same contexts, so their logits can be compared position by position.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from benchmarks.answers.data import (
    COMMON_TOP,
    FLOAT32,
    FP8_FLOAT32,
    FP8_WEIGHTS,
    NEW_TOKENS,
    OWN_TOP,
    Q4_0,
    Q4_0_FLOAT32,
    Answers,
    Oracle,
    choose_ids,
)
from benchmarks.answers.prompts import LONG, PROMPTS, SINGLE, long_text
from benchmarks.answers.runs import Run, count_pages, torch_step
from wicore_trt.arithmetic import div_ceil
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.backends.torch.weights import EngineTensors, load_engine_tensors, widen_blocks
from wicore_trt.checkpoint.names import weight_scale_name
from wicore_trt.engine.build import build_engine
from wicore_trt.model.spec import GROUPS
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.dtypes import E4M3
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.text.tokenizer import Tokenizer

CHUNK = 256
Say = Callable[[str], None]


def tokenize_prompts(tokenizer: Tokenizer) -> tuple[list[str], list[list[int]]]:
    """Return names and token ids of the twenty prompts."""
    texts = {**PROMPTS, LONG: long_text()}
    prompts = [tokenizer.encode(text) for text in texts.values()]
    single = tokenizer.encode("The")[:1]
    return [*texts, SINGLE], [*prompts, single]


def make_oracle(gguf: Path, say: Say, *, new_tokens: int = NEW_TOKENS) -> Oracle:
    """Make all oracles of a model; builds an engine per dtype in a temporary directory. Takes minutes on two cores."""
    with tempfile.TemporaryDirectory() as scratch:

        def loaded(dtype: str) -> EngineTensors:
            path = Path(scratch) / dtype
            say(f"oracle: {dtype} engine")
            return load_engine_tensors(build_engine(gguf, path, dtype=dtype))

        exact = loaded(FLOAT32)
        names, prompts = tokenize_prompts(Tokenizer.from_dir(Path(scratch) / FLOAT32))
        oracle = begin_oracle(names, prompts, exact, gguf.name, say, new_tokens)
        del exact
        for dtype in ("bfloat16", "float16"):
            oracle = join_oracle(oracle, dtype, loaded(dtype), say)
        oracle = join_oracle(oracle, "fp8", eight := loaded("fp8"), say)
        eight = dequantize_weights(eight)
        oracle = join_oracle(oracle, FP8_WEIGHTS, eight, say)
        oracle = join_oracle(oracle, FP8_FLOAT32, replace(eight, dtype="float32", kv_dtype="float32"), say)
        oracle = join_oracle(oracle, Q4_0, four := loaded(Q4_0), say)
        whole = replace(four, dtype="float32", kv_dtype="float32", tensors=widen_blocks(four.tensors))
        return join_oracle(oracle, Q4_0_FLOAT32, whole, say)


def begin_oracle(
    names: list[str], prompts: list[list[int]], exact: EngineTensors, source: str, say: Say, new_tokens: int
) -> Oracle:
    """Make an oracle of the greedy tokens of `exact` and its logits."""
    executor = _executor(exact, prompts, new_tokens)
    run = Run(torch_step(executor), executor.layout, new_tokens, marked=False)
    say(f"oracle: {len(prompts)} prompts of {sum(map(len, prompts))} tokens, the longest {max(map(len, prompts))}")
    tokens = run.together(prompts, CHUNK).tokens
    logits = _Logits(executor, prompts, tokens)
    vocab = exact.spec.vocab_size
    top = logits.collect(lambda rows, _: rows.topk(min(COMMON_TOP, vocab), 1).indices.numpy().astype(np.int32))
    ids = choose_ids(top, vocab)
    oracle = Oracle(names, prompts, tokens, ids, {FLOAT32: logits.answers(ids)}, source)
    executor.close()
    wrong = int((oracle.answers[FLOAT32].top_ids[..., 0] != tokens).sum())
    say(f"oracle: {tokens.size} positions; step by step and at once disagree at {wrong}")
    return oracle


def join_oracle(oracle: Oracle, name: str, engine: EngineTensors, say: Say) -> Oracle:
    """Return `oracle` with the logits of `engine` along its tokens."""
    executor = _executor(engine, oracle.prompts, oracle.tokens.shape[1])
    answers = _Logits(executor, oracle.prompts, oracle.tokens).answers(oracle.ids)
    executor.close()
    say(f"oracle: {name} done")
    return replace(oracle, answers={**oracle.answers, name: answers})


def dequantize_weights(engine: EngineTensors) -> EngineTensors:
    """Return the engine with its E4M3 weights as float32, so that rows stay as they are."""
    tensors = dict(engine.tensors)
    for name, tensor in engine.tensors.items():
        if tensor.dtype == E4M3:
            tensors[name] = tensor.float() * tensors.pop(weight_scale_name(name))[:, None]
    return replace(engine, tensors=tensors)


class _Logits:
    """The logits behind every prompt and token, prompt by prompt."""

    def __init__(self, executor: TorchExecutor, prompts: Sequence[Sequence[int]], tokens: np.ndarray) -> None:
        self._executor, self._prompts, self._tokens = executor, prompts, tokens
        self._vocab = executor.spec.vocab_size

    def collect(self, read: Callable[[torch.Tensor, int], np.ndarray]) -> np.ndarray:
        """`read(logits float32 [T, vocab], prompt)` of every prompt, stacked."""
        found = []
        for number, prompt in enumerate(self._prompts):
            ids = [*prompt, *self._tokens[number, :-1].tolist()]
            size = self._executor.layout.page_tokens
            pages = dict.fromkeys(GROUPS, list(range(div_ceil(len(ids), size))))
            rows = torch.arange(len(prompt) - 1, len(ids))
            piece = SequenceSlice(0, ids, 0, pages)
            found.append(read(self._executor.logits(StepBatch([piece]), rows), number))
        return np.stack(found)

    def answers(self, ids: np.ndarray) -> Answers:
        """Keep some logits of all prompts, in one pass."""
        values, tops = list[np.ndarray](), list[np.ndarray]()

        def read(rows: torch.Tensor, number: int) -> np.ndarray:
            values.append(rows.gather(1, torch.from_numpy(ids[number].astype(np.int64))).numpy())
            best = rows.topk(min(OWN_TOP, self._vocab), 1)
            tops.append(best.values.numpy())
            return best.indices.numpy().astype(np.int32)

        top_ids = self.collect(read)
        return Answers(np.stack(values), top_ids, np.stack(tops))


def _executor(engine: EngineTensors, prompts: Sequence[Sequence[int]], new_tokens: int) -> TorchExecutor:
    lengths = [len(p) + new_tokens for p in prompts]
    settings = ExecutorOptions(
        device="cpu", kernels="torch", kv_pages=count_pages(lengths, engine.page_tokens), max_batch_tokens=1 << 20
    )
    return TorchExecutor(engine, settings)
