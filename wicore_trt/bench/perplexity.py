"""Perplexity: how well an engine predicts a real text, which checks that its numbers are the model's.

Windows and sums are plain arithmetic over any `Scorer`; `score_tokens` is an engine's own steps. Invariant: every token
is scored exactly once, and engines are compared on the same token ids in the same windows.

Perplexity is exp of the mean negative log-likelihood per token, natural logarithm. Windows of `context` tokens move by
`stride`, and each scores what the one before did not see. So behind the first window every token has at least context -
stride - 1 tokens before it. Each window begins with BOS, without which Gemma predicts nothing sensible.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from wicore_trt.arithmetic import div_ceil
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.engine.directory import EngineDir, open_engine
from wicore_trt.errors import ConfigError
from wicore_trt.progress import Progress
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.text.model_files import FILES
from wicore_trt.text.tokenizer import Tokenizer, check_rows

ROWS = 128  # logits held at once: 128 rows of a 262,144-token vocabulary are 134 MB

Scorer = Callable[[Sequence[int], int], list[float]]
"""score(token_ids, first): natural-log probabilities of token_ids[first:], each given all before it; first >= 1."""


@dataclass(frozen=True, slots=True)
class Perplexity:
    """Perplexity `value` over `tokens` scored tokens; `nll` is the mean negative log-likelihood per token."""

    tokens: int
    nll: float

    @property
    def value(self) -> float:
        return math.exp(self.nll)


def cut_windows(count: int, context: int, stride: int) -> Iterator[tuple[int, int, int]]:
    """Cut (begin, end, first): tokens [begin, end) of a text of `count` are one window of at most `context`, of which
    [first, end) are new."""
    first = begin = 0
    while first < count:
        end = min(begin + context, count)
        yield begin, end, first
        first, begin = end, begin + stride


def compute_perplexity(
    score: Scorer,
    token_ids: Sequence[int],
    *,
    bos_id: int | None,
    context: int = 1024,
    stride: int | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Perplexity:
    """Compute the perplexity of a text of two tokens or more that does not itself begin with BOS. `context` counts the
    BOS of a window. `stride` defaults to half of it and is at most what a window holds. Without a `bos_id` the text's
    first token is not scored. Raises ConfigError for a bad stride."""
    head = () if bos_id is None else (bos_id,)
    room = context - len(head)
    stride = context // 2 if stride is None else stride
    if not 1 <= stride <= room - (not head):
        raise ConfigError(f"stride {stride} does not fit a context of {context} tokens.", fix="Choose a smaller one.")
    total, scored = 0.0, 0
    for begin, end, first in cut_windows(len(token_ids), room, stride):
        if progress:
            progress(begin, len(token_ids))
        window = [*head, *token_ids[begin:end]]
        logprobs = score(window, max(1, len(head) + first - begin))
        total -= math.fsum(logprobs)
        scored += len(logprobs)
    return Perplexity(scored, total / scored)


def load_scorer(engine: EngineDir, *, context: int, threads: int = 0, device: str = "auto") -> TorchExecutor:
    """Load `engine` for `score_tokens` over windows of up to `context` tokens. Raises what TorchExecutor raises."""
    manifest = engine.manifest
    if context > manifest.max_context:
        raise ConfigError(f"A context of {context} exceeds the engine's {manifest.max_context}.")
    settings = ExecutorOptions(
        device=device, threads=threads, kv_pages=pages_for(context, manifest.page_tokens), max_batch_tokens=ROWS,
        max_context=context,
    )  # fmt: skip
    return TorchExecutor(engine, settings)


def pages_for(context: int, page_tokens: int) -> dict[str, int]:
    """Count KV pages of each layer group for one sequence whose local pages are never given back."""
    return dict.fromkeys(("global", "local"), div_ceil(context, page_tokens))


def score_tokens(executor: TorchExecutor, token_ids: Sequence[int], first: int) -> list[float]:
    """Score with an executor that has `pages_for(len(token_ids), ...)` or more pages in each group."""
    assert first >= 1
    pages = {group: list(range(count)) for group, count in executor.layout.num_pages.items()}
    found: list[float] = []
    inputs = list(token_ids[:-1])  # nothing is asked about what follows the last token
    for start in range(0, len(inputs), ROWS):
        chunk = inputs[start : start + ROWS]
        batch = StepBatch([SequenceSlice(seq_id=0, token_ids=chunk, start=start, pages=pages)])
        skipped = min(max(0, first - 1 - start), len(chunk))  # row i predicts token i + 1
        logits = executor.logits(batch, torch.arange(skipped, len(chunk)))
        targets = torch.tensor(token_ids[start + skipped + 1 : start + len(chunk) + 1], device=logits.device)
        found += chosen_logprobs(logits, targets).tolist()
    return found


def chosen_logprobs(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """Compute float64 [R]: log-softmax of logits [R, vocab] at targets int64 [R]."""
    chosen = logits.gather(1, targets[:, None])[:, 0]
    return chosen.double() - torch.logsumexp(logits.float(), dim=1).double()


def default_text() -> str:
    """Real English technical prose that every CPython ships: the topics of its documentation, in sorted order."""
    from pydoc_data.topics import topics

    return "\n\n".join(topics[name] for name in sorted(topics))


def read_tokens(tokenizer: Tokenizer, path: Path | None, tokens: int) -> list[int]:
    """Read the first `tokens` ids of a UTF-8 file, or of the default text. Raises ConfigError for a bad or short
    text."""
    try:
        text = default_text() if path is None else path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read as UTF-8: {error}.") from None
    token_ids = tokenizer.encode(text, add_bos=False)
    if len(token_ids) < tokens:
        raise ConfigError(f"The text has {len(token_ids)} tokens, not {tokens}.", fix="Lower --tokens.")
    return token_ids[:tokens]


def compare_engines(
    engines: Sequence[Path],
    text: Path | None,
    *,
    tokens: int,
    context: int,
    stride: int | None,
    threads: int,
    progress: Progress,
) -> list[dict[str, Any]]:
    """Compute perplexities of `engines` over the same tokens, each with its difference to the first in percent. Raises
    ConfigError when the engines do not share a tokenizer, EngineFormatError for a bad engine."""
    results: list[dict[str, Any]] = []
    expected: list[int] | None = None
    for path in engines:
        engine = open_engine(path)
        tokenizer = Tokenizer.from_files(engine.read_present(FILES), engine.path)
        token_ids = read_tokens(tokenizer, text, tokens)
        check_rows(token_ids, engine.manifest.spec.vocab_size, text or "The text")
        if expected is not None and token_ids != expected:
            fix = "Compare engines of one model."
            raise ConfigError(f"{path} and {engines[0]} have different tokenizers.", fix=fix)
        expected = token_ids
        executor = load_scorer(engine, context=context, threads=threads)
        try:
            found = compute_perplexity(
                partial(score_tokens, executor), token_ids, bos_id=tokenizer.bos_id, context=context, stride=stride,
                progress=partial(progress, str(path)),
            )  # fmt: skip
        finally:
            executor.close()
        first = results[0]["perplexity"] if results else found.value
        digest = hashlib.blake2b(repr(token_ids).encode(), digest_size=16).hexdigest()
        results.append({
            "engine": str(path), "dtype": engine.manifest.dtype, "kernels": executor.kernels, "tokens": found.tokens,
            "text_blake2b": digest, "perplexity": found.value, "nll": found.nll,
            "difference_percent": 100 * (found.value / first - 1),
        })  # fmt: skip
    return results
