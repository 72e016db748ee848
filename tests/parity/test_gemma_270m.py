"""The real Gemma 3 270M in float32: logits of a long prompt and greedy tokens, against transformers."""

from __future__ import annotations

import pydoc_data.topics
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from parity.paged import PagedDriver, PagedSequence, relative_error
from parity.tiny import transformers_model
from tokenizers import Tokenizer

from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.backends.torch.weights import EngineTensors, load_tensors
from wicore_trt.engine.directory import open_engine
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.runtime.options import ExecutorOptions

pytestmark = [
    pytest.mark.model,
    pytest.mark.timeout(900),
]  # three minutes of CPU time in the long profile, on any machine
BUDGET = 512  # tokens of a step, as the scheduler's default
NEW_TOKENS = 64
# in the long profile prompts below, around, above and far above the window of 512 tokens, which tiny models have of 8
FEW_PROMPT_TOKENS, FEW_NEW_TOKENS = (70, 40, 5), 8
PROMPT_TOKENS = (2100, 700, 530, 512, 250, 160, 120, 100, 90, 80, 70, 60, 50, 40, 30, 24, 16, 12, 8, 5)


@dataclass
class Gemma270M:
    spec: Gemma3Spec
    tensors: dict[str, torch.Tensor]
    hf: Any
    tokenizer: Tokenizer
    known: dict[str, torch.Tensor] = field(default_factory=dict)

    def prompt(self, index: int, tokens: int) -> list[int]:
        """BOS and the first tokens of one of Python's own help pages of sufficient length."""
        pages = [t for t in sorted(pydoc_data.topics.topics.values(), key=len) if len(t) > 6 * tokens]
        return [2, *self.tokenizer.encode(pages[index % len(pages)], add_special_tokens=False).ids[: tokens - 1]]

    def driver(self, kernels: str) -> PagedDriver:
        settings = ExecutorOptions(
            device="cpu", kernels=kernels, kv_pages={"global": 320, "local": 320}, max_batch_tokens=BUDGET
        )
        return PagedDriver(TorchExecutor(EngineTensors(self.spec, "float32", "float32", self.tensors), settings))

    @torch.inference_mode()
    def hf_logits(self, tokens: list[int], positions: list[int]) -> torch.Tensor:
        """transformers' logits [positions, vocab]; computed once for all kernels."""
        key = f"{tokens} at {positions}"
        if key not in self.known:
            self.known[key] = self.hf(torch.tensor([tokens]), logits_to_keep=torch.tensor(positions)).logits[0]
        return self.known[key]

    def hf_given(self, prompt: list[int], output: list[int]) -> torch.Tensor:
        """transformers' logits for each position of `output`, given everything before it."""
        first = len(prompt) - 1
        return self.hf_logits([*prompt, *output[:-1]], [*range(first, first + len(output))])


@pytest.fixture(scope="module")
def gemma(engine_270m: Path) -> Gemma270M:
    """The engine's bfloat16 weights in float32: on both sides the same, and no other conversion of the file."""
    engine = open_engine(engine_270m)
    spec = engine.manifest.spec
    tensors = {n: t.float() for n, t in load_tensors(engine.rank_files[0], spec).items()}
    tokenizer = Tokenizer.from_file(str(engine_270m / "tokenizer.json"))
    return Gemma270M(spec, tensors, transformers_model(spec, tensors), tokenizer)


def prefill(driver: PagedDriver, sequences: list[PagedSequence], prompts: list[list[int]]) -> list[torch.Tensor]:
    """Compute the prompts in steps of at most BUDGET tokens that several of them share: logits [vocab] of each."""
    rest, last = [list(p) for p in prompts], [torch.empty(0) for _ in prompts]
    while any(rest):
        work, room = [], BUDGET
        for i, tokens in enumerate(rest):
            if tokens and room:
                chunk, rest[i] = tokens[:room], tokens[room:]
                room -= len(chunk)
                work.append((i, chunk))
        for (i, _), row in zip(work, driver.step([(sequences[i], c) for i, c in work]), strict=True):
            last[i] = row
    return last


@pytest.mark.long
def test_logits_of_a_long_prompt(gemma: Gemma270M, kernels: str) -> None:
    """550 tokens in uneven chunks, then three tokens one by one, each compared."""
    driver, prompt = gemma.driver(kernels), gemma.prompt(0, 550)
    sizes = torch.tensor([1, 300, 7, 150, 89, 1, 1, 1])
    assert sizes.sum() == len(prompt)
    expected = gemma.hf_logits(prompt, (sizes.cumsum(0) - 1).tolist())
    sequence, at = driver.new_sequence(), 0
    for size, row in zip(sizes.tolist(), expected, strict=True):
        logits = driver.step([(sequence, prompt[at : at + size])])
        at += size
        assert relative_error(logits[0], row) < 1e-4, f"position {at - 1}"


@pytest.mark.parametrize("kernels", [pytest.param("torch", marks=pytest.mark.long), "native"], indirect=True)
@pytest.mark.parametrize(
    ("lengths", "new_tokens"),
    [
        pytest.param(FEW_PROMPT_TOKENS, FEW_NEW_TOKENS, id="few"),
        pytest.param(PROMPT_TOKENS, NEW_TOKENS, id="all", marks=pytest.mark.long),
    ],
)
def test_greedy_tokens_are_those_of_transformers(
    gemma: Gemma270M, kernels: str, lengths: tuple[int, ...], new_tokens: int
) -> None:
    """Prompts of real text, decoded together: 3 with 8 tokens each, in the long profile 20 with 64. Of the first
    one logits are compared too; over it the window slides in the long profile.

    transformers does not generate here: one teacher-forced forward per prompt gives its most probable token after
    every prefix of ours. If all of them are our tokens, its greedy decoding is ours, by induction, at a fraction of
    the time.
    """
    driver = gemma.driver(kernels)
    prompts = [gemma.prompt(i, n) for i, n in enumerate(lengths)]
    assert [len(p) for p in prompts] == list(lengths)
    sequences = [driver.new_sequence() for _ in prompts]
    computed = prefill(driver, sequences, prompts)
    outputs, first = [[int(row.argmax())] for row in computed], computed[:1]
    for _ in range(new_tokens - 1):
        logits = driver.step([(s, o[-1:]) for s, o in zip(sequences, outputs, strict=True)])
        first.append(logits[0])
        for output, token in zip(outputs, logits.argmax(1).tolist(), strict=True):
            output.append(token)
    for i, (prompt, output) in enumerate(zip(prompts, outputs, strict=True)):
        rows = gemma.hf_given(prompt, output)
        assert rows.argmax(1).tolist() == output, f"prompt {i} of {len(prompt)} tokens"
        for number, row in enumerate(first if i == 0 else ()):
            assert relative_error(row, rows[number]) < 1e-4, f"token {number}"
