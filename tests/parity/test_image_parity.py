"""Prompts with images against transformers in float32: logits of every row, and greedy tokens.

Both sides take the same features, those of transformers' own encoder. So this proves where features go, and which keys
the rows of an image see, in whatever chunks and company.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import product
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lazy import LazyModule
from parity.paged import PagedDriver, PagedSequence, relative_error
from parity.tiny import TinyModel, tiny_model

from wicore_trt.backends.torch import executor as torch_executor
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.options import ExecutorOptions

transformers = LazyModule("transformers")

TOLERANCE = 1e-4
SOFT, VOCAB = 96, 97
SLOTS = 6


@dataclass(frozen=True)
class Prompt:
    """Token ids, and (position, slot of the features) of each image in them."""

    token_ids: list[int]
    images: tuple[tuple[int, int], ...]


class Seeing:
    """transformers' model that sees, around the weights of a `TinyModel`. `pixels` [SLOTS, 3, size, size] are images,
    `features` [SLOTS, tokens, hidden size] what it makes of them."""

    def __init__(self, seed: int, tokens: int, **overrides: Any) -> None:
        self.tokens, self.rng = tokens, random.Random(seed)
        self.text: TinyModel = tiny_model(seed, vocab_size=VOCAB, final_logit_softcapping=None, **overrides)
        size = 112 if tokens > 16 else 56
        vision = transformers.SiglipVisionConfig(
            hidden_size=16, image_size=size, patch_size=14, intermediate_size=24, num_hidden_layers=1,
            num_attention_heads=2, vision_use_head=False,
        )  # fmt: skip
        config = transformers.Gemma3Config(
            text_config=self.text.hf.config, vision_config=vision, mm_tokens_per_image=tokens,
            image_token_id=SOFT, attn_implementation="eager",
            tie_word_embeddings=self.text.spec.tie_word_embeddings,
        )  # fmt: skip
        self.hf = transformers.Gemma3ForConditionalGeneration(config).eval().float()
        self.hf.model.language_model.load_state_dict(self.text.hf.model.state_dict())
        self.hf.lm_head.load_state_dict(self.text.hf.lm_head.state_dict())
        projector = self.hf.model.multi_modal_projector
        torch.nn.init.normal_(projector.mm_input_projection_weight, 0, 0.3)
        self.pixels = torch.randn(SLOTS, 3, size, size)
        with torch.inference_mode():
            self.features = self.hf.get_image_features(self.pixels, return_dict=True).pooler_output.clone()

    def prompt(self, gaps: Sequence[int]) -> Prompt:
        """Text of as many tokens as each gap says, and an image of any slot between two of them."""
        ids: list[int] = []
        images = []
        for number, gap in enumerate(gaps):
            if number:
                images.append((len(ids), self.rng.randrange(SLOTS)))
                ids += [SOFT] * self.tokens
            ids += [self.rng.randrange(SOFT) for _ in range(gap)]
        return Prompt(ids, tuple(images))

    def _inputs(self, prompt: Prompt) -> dict[str, torch.Tensor]:
        ids = torch.tensor([prompt.token_ids])
        given = {"input_ids": ids, "token_type_ids": (ids == SOFT).int(), "attention_mask": torch.ones_like(ids)}
        slots = [slot for _, slot in prompt.images]
        return given | ({"pixel_values": self.pixels[slots]} if slots else {})

    @torch.inference_mode()
    def logits(self, prompt: Prompt) -> torch.Tensor:
        return self.hf(**self._inputs(prompt)).logits[0]

    @torch.inference_mode()
    def generate(self, prompt: Prompt, count: int) -> list[int]:
        found = self.hf.generate(
            **self._inputs(prompt), max_new_tokens=count, do_sample=False, eos_token_id=None, pad_token_id=0
        )
        return found[0, len(prompt.token_ids) :].tolist()


class Driver(PagedDriver):
    """`PagedDriver` of sequences with prompts."""

    def __init__(self, seeing: Seeing, kernels: str, seed: int, page_tokens: int, **settings: Any) -> None:
        options = {"kv_pages": {"global": 400, "local": 400}, "max_batch_tokens": 2048, "kernels": kernels, **settings}
        options |= {"device": "cpu", "page_tokens": page_tokens}
        executor = TorchExecutor.from_tensors(
            seeing.text.spec, "float32", seeing.text.tensors, ExecutorOptions(**options)
        )
        executor.images = SimpleNamespace(features=seeing.features)  # type: ignore[assignment]
        super().__init__(executor, seed)
        self.tokens = seeing.tokens
        self.prompts: dict[int, Prompt] = {}

    def begin(self, prompt: Prompt) -> PagedSequence:
        sequence = self.new_sequence()
        self.prompts[sequence.seq_id] = prompt
        return sequence

    def _slice(self, sequence: PagedSequence, token_ids: list[int]) -> SequenceSlice:
        piece = super()._slice(sequence, token_ids)
        first, end = piece.start, piece.start + len(token_ids)
        inside = [(at - first, self.tokens, s) for at, s in self.prompts[sequence.seq_id].images if first <= at < end]
        piece.images = tuple(inside)
        return piece

    def all_logits(self, work: Sequence[tuple[PagedSequence, list[int]]]) -> list[torch.Tensor]:
        """Compute the given next tokens of each sequence in one step: logits [tokens, vocab] of each."""
        slices = [self._slice(sequence, token_ids) for sequence, token_ids in work]
        lengths = [len(token_ids) for _, token_ids in work]
        logits = self.executor.logits(StepBatch(slices), torch.arange(sum(lengths))).clone()
        for sequence, token_ids in work:
            sequence.token_ids += token_ids
            self._slide(sequence)
        return list(logits.split(lengths))


@dataclass
class Running:
    """A prompt under way: what is left of it, and the logits of all its tokens."""

    sequence: PagedSequence
    left: list[list[int]]
    want: torch.Tensor
    got: list[torch.Tensor] = field(default_factory=list)


def legal_cuts(prompt: Prompt, tokens: int) -> list[int]:
    """Positions at which a chunk may end before the prompt does: all that are inside no image."""
    inside = {at + n for at, _ in prompt.images for n in range(1, tokens)}
    return [n for n in range(1, len(prompt.token_ids)) if n not in inside]


def cut(prompt: Prompt, cuts: Sequence[int]) -> list[list[int]]:
    bounds = [0, *cuts, len(prompt.token_ids)]
    return [prompt.token_ids[a:b] for a, b in zip(bounds, bounds[1:], strict=False)]


def check(seeing: Seeing, driver: Driver, running: Sequence[Running], largest: int) -> None:
    """Run all prompts, several in a step, and compare every row."""
    while waiting := [r for r in running if r.left]:
        chosen = seeing.rng.sample(waiting, min(len(waiting), seeing.rng.randint(1, largest)))
        for r, logits in zip(chosen, driver.all_logits([(r.sequence, r.left.pop(0)) for r in chosen]), strict=True):
            r.got.append(logits)
            if not r.left:
                driver.finish(r.sequence)
    for r in running:
        prompt = driver.prompts[r.sequence.seq_id]
        error = relative_error(torch.cat(r.got), r.want)
        assert error < TOLERANCE, (error, prompt)


def begin(seeing: Seeing, driver: Driver, prompt: Prompt, cuts: Sequence[int] = ()) -> Running:
    return Running(driver.begin(prompt), cut(prompt, cuts), seeing.logits(prompt))


@pytest.mark.parametrize(
    ("tokens", "window", "page_tokens"),
    [
        *((16, 5, 4), (4, 6, 16)),
        *(pytest.param(*sizes, marks=pytest.mark.long) for sizes in ((16, 19, 8), (64, 66, 16), (1, 3, 4))),
    ],
)
def test_images_in_every_order_with_text(tokens: int, window: int, page_tokens: int, kernels: str) -> None:
    """0, 1, 2 and 5 of them, at the front, at the end, side by side but for one token; alone, in company, cut at random
    legal places. Windows are shorter than an image, a little longer, and shorter than all prompts."""
    seeing = Seeing(tokens, tokens, sliding_window=window)
    driver = Driver(seeing, kernels, tokens, page_tokens)
    edge, rng = (0, 21), seeing.rng
    orders = [(33,), *product(edge, edge), *product(edge, (1, 21), edge)]
    orders += [(rng.choice(edge), *rng.choices((1, 2, 9), k=4), rng.choice(edge)) for _ in range(2)]
    prompts = [seeing.prompt(gaps) for gaps in orders]
    alone = [begin(seeing, driver, prompt) for prompt in prompts]
    check(seeing, driver, alone, 1)
    running = []
    for prompt in prompts:
        cuts = legal_cuts(prompt, tokens)
        chosen = sorted(rng.sample(cuts, min(len(cuts), rng.randint(1, 6))))
        running.append(Running(driver.begin(prompt), cut(prompt, chosen), alone[len(running)].want))
    check(seeing, driver, running, 9)


def test_chunks_end_at_every_legal_place(kernels: str) -> None:
    seeing = Seeing(3, 16, sliding_window=18, num_hidden_layers=3, sliding_window_pattern=2)
    driver = Driver(seeing, kernels, 3, 4)
    prompt = seeing.prompt((3, 2, 7))
    want = seeing.logits(prompt)
    cuts = legal_cuts(prompt, 16)
    running = [Running(driver.begin(prompt), cut(prompt, [at]), want) for at in cuts]
    running.append(Running(driver.begin(prompt), cut(prompt, cuts), want))  # text token by token
    check(seeing, driver, running, 6)


def test_images_longer_than_a_block_of_queries(kernels: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("wicore_trt.backends.torch.ops.QUERY_BLOCK", 24)
    seeing = Seeing(5, 64, sliding_window=70)
    driver = Driver(seeing, kernels, 5, 16)
    check(seeing, driver, [begin(seeing, driver, seeing.prompt((9, 5, 40)))], 1)


def test_greedy_tokens(kernels: str) -> None:
    """Decoding behind images, in the company of prompts, goes on as transformers does."""
    seeing = Seeing(8, 16, sliding_window=18)
    driver = Driver(seeing, kernels, 8, 8)
    prompts = [seeing.prompt(gaps) for gaps in ((4, 0), (0, 1, 30), (12,), (3, 2, 1, 1, 4, 5))]
    sequences, following, found = [], [], []
    for prompt in prompts:
        sequences.append(driver.begin(prompt))
        following.append(prompt.token_ids)
        found.append(list[int]())
        for _ in range(4):  # the last prompt is not there yet
            logits = driver.step(list(zip(sequences, following, strict=True)))
            following = [[int(row.argmax())] for row in logits]
            for own, new in zip(found, following, strict=True):
                own += new
    for prompt, own in zip(prompts, found, strict=True):
        assert own == seeing.generate(prompt, len(own))


def test_rows_beside_images_keep_their_bits() -> None:
    """On the native kernels a row's bits depend on nothing but its own sequence (I21)."""
    native = pytest.importorskip("wicore_trt.backends.torch.native")
    if native.load_library() is None:
        pytest.skip("the native kernels are not built")
    seeing = Seeing(9, 16, sliding_window=19)
    driver = Driver(seeing, "native", 9, 8)
    prompts = [seeing.prompt((40,)), seeing.prompt((7, 5, 20))]
    whole = [torch.cat(driver.all_logits([(driver.begin(p), p.token_ids)])) for p in prompts]
    sequences, chunks = [driver.begin(p) for p in prompts], (cut(prompts[0], [9, 30]), cut(prompts[1], [7, 23]))
    parts = [driver.all_logits(list(zip(sequences, some, strict=True))) for some in zip(*chunks, strict=True)]
    for want, own in zip(whole, zip(*parts, strict=True), strict=True):
        assert torch.equal(torch.cat(own), want)


def test_steps_images_and_copies_share_a_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU nothing else orders them, whichever thread steps."""
    active, seen = list[str](), list[Any]()

    class Stream:
        stream = 7

        @contextmanager
        def active(self) -> Iterator[None]:
            active.append("in")
            yield
            active.append("out")

    def run_forward(*given: Any) -> torch.Tensor:
        active.append("step")
        return forward(*given)

    stream, make_copier, forward = Stream(), torch_executor.make_copier, torch_executor.forward
    seeing = Seeing(9, 16)
    encoder = SimpleNamespace(features=seeing.features)
    monkeypatch.setattr(torch_executor, "_find_stream", lambda device: stream)
    monkeypatch.setattr(torch_executor, "open_encoder", lambda *given: seen.append(given[-1]) or encoder)
    monkeypatch.setattr(torch_executor, "make_copier", lambda *g, **k: seen.append(g[-1]) or make_copier(*g, **k))
    monkeypatch.setattr(torch_executor, "forward", run_forward)
    pages = {"global": 9, "local": 9}
    options = ExecutorOptions("cpu", kernels="torch", kv_pages=pages, page_tokens=8, max_batch_tokens=64)
    text = seeing.text
    executor = TorchExecutor.from_tensors(text.spec, "float32", text.tensors, options, vision=SimpleNamespace())  # type: ignore[arg-type]
    sequence = PagedDriver(executor, 9)
    executor.logits(StepBatch([sequence._slice(sequence.new_sequence(), [1, 2])]), torch.arange(1))
    assert seen == [stream, 7] and active == ["in", "step", "out"]
