"""Images in TritonExecutor, in the interpreter, against TorchExecutor, which is compared with transformers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from parity.paged import GREEDY, PagedSequence, relative_error  # noqa: E402
from runtime.triton_cpu import Driver, executor_of, oracle_of, small_model, specs_of  # noqa: E402

from wicore_trt.backends.triton import roles  # noqa: E402
from wicore_trt.backends.triton import table as triton_table  # noqa: E402
from wicore_trt.backends.triton.kernel_list import list_kernels  # noqa: E402
from wicore_trt.backends.triton.table import EngineShape  # noqa: E402
from wicore_trt.runtime.batch import UNREAD, SequenceSlice, StepBatch  # noqa: E402
from wicore_trt.runtime.dtypes import TORCH_DTYPES  # noqa: E402
from wicore_trt.weight_format import PLAIN  # noqa: E402

TOKENS, SLOTS, SOFT = 7, 3, 47
Part = list[int] | int
"""Token ids, or the slot of an image."""


class Seeing(Driver):
    """`Driver` of sequences made of parts."""

    def __init__(self, executor: Any, features: torch.Tensor, seed: int = 0) -> None:
        super().__init__(executor, seed)
        executor.images = SimpleNamespace(features=features, tokens=TOKENS, close=lambda: None)
        if hasattr(executor, "model"):
            executor.model.launcher.more.append(features)
        self.images: tuple[tuple[int, int, int], ...] = ()

    def _slice(self, sequence: PagedSequence, token_ids: list[int]) -> SequenceSlice:
        piece = super()._slice(sequence, token_ids)
        piece.images = self.images
        return piece

    def piece(self, sequence: PagedSequence, parts: Sequence[Part]) -> SequenceSlice:
        """The next tokens of a sequence."""
        token_ids: list[int] = []
        images = []
        for part in parts:
            if isinstance(part, int):
                images.append((len(token_ids), TOKENS, part))
            token_ids += [SOFT] * TOKENS if isinstance(part, int) else part
        self.images = tuple(images)
        found = self._slice(sequence, token_ids)
        self.images = ()
        sequence.token_ids += token_ids
        return found

    def see(self, work: Sequence[tuple[PagedSequence, Sequence[Part]]], **batch: Any) -> torch.Tensor:
        """Logits behind the given parts of each sequence, computed in one step; `attention` is what was measured."""
        result = self.executor.execute(StepBatch([self.piece(*given) for given in work], **batch))
        self.attention = result.attention
        for sequence, _ in work:
            self._slide(sequence)
        return self.sampler.logits


def features_of(model: Any, dtype: str) -> torch.Tensor:
    return torch.randn(SLOTS, TOKENS, model.spec.hidden_size).to(TORCH_DTYPES[dtype])


def text(count: int) -> list[int]:
    return [random.randrange(SOFT) for _ in range(count)]


STEPS: list[list[list[Part]]] = [
    [[0, text(2)], [text(3)], [text(4), 2]],
    [[text(1)], [1, text(1), 0], [text(2)]],
    [[text(1)], [text(2), 2, text(1)], [text(1)]],
    [[text(1)], [text(1)], [text(1)]],
]
"""An image first, last, two of them but for a token, beside text and decoding, and decoding behind them."""


def compare(
    mine: Seeing, oracle: Seeing, steps: Sequence[Sequence[list[Part]]], tolerance: float, **batch: Any
) -> None:
    sequences = [[driver.new_sequence() for _ in steps[0]] for driver in (mine, oracle)]
    for parts in steps:
        found = [
            d.see(list(zip(own, parts, strict=True)), **batch) for d, own in zip((mine, oracle), sequences, strict=True)
        ]
        assert relative_error(*found) < tolerance, parts
        assert {*mine.attention} == {*oracle.attention}
        for seq_id, masses in mine.attention.items():
            assert torch.allclose(torch.tensor(masses), torch.tensor(oracle.attention[seq_id]), atol=0.1)


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        ("bfloat16", {"graphs": True}),
        ("float16", {"batch_invariant": True}),
        pytest.param("bfloat16", {"kv_dtype": "fp8", "target": "sm80"}, marks=pytest.mark.long),
    ],
)
def test_images_beside_text_and_decoding(dtype: str, settings: dict[str, Any]) -> None:
    """Attention is measured in every step; steps of text go on in graphs."""
    model = small_model(31, sliding_window=6)
    features, kv = features_of(model, dtype), settings.get("kv_dtype")
    mine = Seeing(executor_of(model, dtype, images=True, **settings), features, 1)
    oracle = Seeing(oracle_of(model, dtype, kv_dtype=kv), features, 2)
    compare(mine, oracle, STEPS, 0.04 if kv else 0.02 if dtype == "bfloat16" else 0.003, measure_attention=True)


def test_images_reach_quantized_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """E4M3 rows have a scale each, and those of an image its own. Large steps go on with the sampled rows."""
    monkeypatch.setitem(triton_table.CROSSOVER, "sm90", {"16-bit": 2, "fp8": 2, "fp8 rows": 4})
    specs_of.cache_clear()
    model = small_model(32)
    features = features_of(model, "bfloat16")
    mine = Seeing(executor_of(model, fp8=True, images=True), features, 1)
    compare(mine, Seeing(oracle_of(model, "bfloat16", fp8=True), features, 2), [STEPS[0], STEPS[1]], 0.25)
    specs_of.cache_clear()


def test_an_image_has_the_same_bits_in_company() -> None:
    """In a batch-invariant engine, and in other chunks."""
    model = small_model(33)
    features = features_of(model, "bfloat16")
    driver = Seeing(executor_of(model, batch_invariant=True, images=True), features, 1)
    alone, other, third = (driver.new_sequence() for _ in range(3))
    want = driver.see([(alone, [[5, 6], 1, [8]])])
    driver.see([(other, [[5, 6]])])
    found = driver.see([(third, [2, [4]]), (other, [1, [8]])])
    assert torch.equal(found[1], want[0])


def test_engines_of_text_have_the_kernels_that_they_had() -> None:
    spec = small_model(35).spec
    with_images, text_alone = (
        {
            p.role: p.spec
            for p in list_kernels(EngineShape(spec, "bfloat16", PLAIN["bfloat16"], "bfloat16", 4, i), "sm90")
        }
        for i in (True, False)
    )
    assert {*with_images} - {*text_alone} == {roles.PREFILL_IMAGES} and text_alone.items() <= with_images.items()
    assert not [s for s in text_alone.values() if "key_ends" in {*s.signature, *s.constants}]


def test_the_step_behind_an_image_starts_before_its_token_is_read() -> None:
    model = small_model(34)
    features, prompt = features_of(model, "bfloat16"), [[3, 9], 2, [4]]
    driver, tokens = Seeing(executor_of(model, images=True), features, 1), []
    for ahead in (True, False):
        executor, sequence = driver.executor, driver.new_sequence()
        first, found = driver.piece(sequence, prompt), []
        first.params = GREEDY
        batch = StepBatch([first])
        executor.submit(batch)
        assert executor.leads(batch)
        if not ahead:
            found += executor.collect().sampled[0].token_ids
        second = driver.piece(sequence, [[UNREAD] if ahead else found])
        second.params = GREEDY
        executor.submit(StepBatch([second]))
        for _ in range(2 if ahead else 1):
            found += executor.collect().sampled[0].token_ids
        tokens.append(found)
    assert tokens[0] == tokens[1]
