"""Images in TritonExecutor, in the interpreter, against TorchExecutor, which is compared with transformers."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from parity.paged import GREEDY  # noqa: E402
from parity.vision import random_encoder  # noqa: E402
from runtime.seeing import Part, Seeing, compare, count_images, features_of, text  # noqa: E402
from runtime.triton_cpu import executor_of, oracle_of, small_model, specs_of  # noqa: E402

from wicore_trt.backends.triton import executor as triton_executor  # noqa: E402
from wicore_trt.backends.triton import memory as triton_memory  # noqa: E402
from wicore_trt.backends.triton import roles  # noqa: E402
from wicore_trt.backends.triton import rows as triton_rows  # noqa: E402
from wicore_trt.backends.triton import table as triton_table  # noqa: E402
from wicore_trt.backends.triton.kernel_list import list_kernels  # noqa: E402
from wicore_trt.backends.triton.ops import TritonOps  # noqa: E402
from wicore_trt.backends.triton.table import EngineShape  # noqa: E402
from wicore_trt.model.gemma3 import EMBEDDING, layer_weight  # noqa: E402
from wicore_trt.model.spec import GROUPS  # noqa: E402
from wicore_trt.plugins.decode_layout import MEASURED_SEGMENTS, SPLIT_PREFILL, PrefillConfig, Segments  # noqa: E402
from wicore_trt.runtime.batch import UNREAD, StepBatch  # noqa: E402
from wicore_trt.runtime.dtypes import E4M3, E4M3_MAX  # noqa: E402
from wicore_trt.runtime.step_inputs import StepInputs  # noqa: E402
from wicore_trt.weight_format import PLAIN  # noqa: E402

TOKENS = 7
STEPS: list[list[list[Part]]] = [
    [[0, text(2)], [text(3)], [text(4), 2]],
    [[text(1)], [1, text(1), 0], [text(2)]],
    [[text(1)], [text(2), 2, text(1)], [text(1)]],
    [[text(1)], [text(1)], [text(1)]],
]
"""An image first, last, two of them but for a token, beside text and decoding, and decoding behind them."""


@pytest.mark.parametrize(
    ("dtype", "settings"),
    [
        ("bfloat16", {"graphs": True}),
        ("float16", {"batch_invariant": True}),
        pytest.param("bfloat16", {"kv_dtype": "fp8", "target": "sm80"}, marks=pytest.mark.long),
    ],
)
def test_images_beside_text_and_decoding(dtype: str, settings: dict[str, Any]) -> None:
    """Attention is measured in every step, also where it runs in a graph."""
    model = small_model(31, sliding_window=6)
    features, kv = features_of(model, dtype, TOKENS), settings.get("kv_dtype")
    vision = random_encoder(3, text_hidden=model.spec.hidden_size).weights if "graphs" in settings else None
    mine = Seeing(executor_of(model, dtype, images=True, vision=vision, **settings), features, 1)
    ran = count_images(mine.executor)
    oracle = Seeing(oracle_of(model, dtype, kv_dtype=kv), features, 2)
    compare(mine, oracle, STEPS, 0.04 if kv else 0.02 if dtype == "bfloat16" else 0.003, measure_attention=True)
    assert len(ran) == (3 if "graphs" in settings else 0)


@pytest.mark.parametrize("fp8", [False, True])
def test_features_stand_in_their_rows(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Unscaled, normed like embeddings, and as E4M3 rows with a scale each."""
    monkeypatch.setitem(triton_table.CROSSOVER, "sm90", {"16-bit": 2, "fp8": 2, "fp8 rows": 4})
    specs_of.cache_clear()
    model = small_model(32)
    features = features_of(model, "bfloat16", TOKENS) * torch.tensor([0.1, 3.0, 50.0]).bfloat16()[:, None, None]
    driver = Seeing(executor_of(model, fp8=fp8, images=True), features)
    executor, state = driver.executor, driver.executor.model
    pieces = [driver.piece(driver.new_sequence(), parts) for parts in ([text(2), 2, text(1), 0], [text(1)], [1])]
    slices, plan = executor.block.arrange_slices(pieces)
    inputs = StepInputs.from_batch(StepBatch(slices), executor.layout, GROUPS)
    ops = TritonOps(state, executor.block.upload_step(inputs, plan), None, features)
    weight = layer_weight(0, "input_layernorm")
    residual = ops.embed()
    out = ops.norm(residual, weight)
    want = state.weights[EMBEDDING][inputs.token_ids].float() * state.embedding_scale
    for first, slot in ((3, 2), (11, 0), (18, 1)):  # behind the row that decodes
        want[first : first + TOKENS] = features[slot].float()
    assert torch.equal(residual.rows, want)
    normed = torch.nn.functional.rms_norm(want, want.shape[1:], state.weights[weight], state.shape.spec.rms_norm_eps)
    if out.scales is None:
        assert not fp8 and torch.allclose(out.rows.float(), normed, rtol=0.01, atol=1e-6)
    else:
        assert fp8 and torch.allclose(out.scales * E4M3_MAX, normed.abs().amax(1), rtol=0.01)
        assert torch.allclose(out.rows.view(E4M3).float() * out.scales[:, None], normed, rtol=0.08, atol=0.01)
    specs_of.cache_clear()


def test_other_kernels_take_no_keys_of_steps_with_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither programs that share keys nor cuDNN, which know no images, though steps of text would go to both."""
    monkeypatch.setitem(SPLIT_PREFILL, ("sm90", 16), PrefillConfig(16, 16, splits=2, least=16))
    monkeypatch.setitem(MEASURED_SEGMENTS, ("sm90", 16), Segments(8, 16, 8, 1))
    monkeypatch.setattr(triton_memory, "KEPT_TOKENS", 4)
    specs_of.cache_clear()
    model = small_model(36, num_hidden_layers=3)  # the last layer's image is seen by nobody
    features = features_of(model, "bfloat16", TOKENS)
    mine = Seeing(executor_of(model, images=True), features, 1)
    segments = mine.executor.model.segments
    monkeypatch.setattr(segments, "check_library", lambda q: None)
    oracle = Seeing(oracle_of(model, "bfloat16"), features, 2)
    for long in (False, True):
        segments.wanted = long
        compare(mine, oracle, [[[text(9)]], [[0, text(2)]]], 0.02)
    specs_of.cache_clear()


def test_the_kernel_of_images_is_loaded_before_the_first_step() -> None:
    model = small_model(37)
    executor = Seeing(executor_of(model, images=True), features_of(model, "bfloat16", TOKENS)).executor
    launcher = executor.model.launcher
    launcher.idles = True
    executor._prepare_steps()
    assert any(name.endswith("_ends") for name in launcher.launched)


@pytest.mark.long
def test_padding_changes_no_bit_of_steps_with_images(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps with images run in graphs of their own, whatever lay in the memory before; logits and pages are those of
    the same steps launched as they are."""
    monkeypatch.setattr(triton_executor, "DECODE_BUCKETS", (2, 4))
    monkeypatch.setattr(triton_rows, "PROMPT_BUCKETS", {0: (12, 30), 4: (12, 24, 34)})
    monkeypatch.setattr(triton_rows, "IMAGE_BUCKETS", {False: (12, 24, 34)})
    model = small_model(38, sliding_window=6)
    features = features_of(model, "bfloat16", TOKENS)
    given = {"batch_invariant": True, "images": True, "kv_pages": {"global": 40, "local": 40}}
    vision = random_encoder(3, text_hidden=model.spec.hidden_size).weights
    padded, plain = executor_of(model, graphs=True, vision=vision, **given), executor_of(model, **given)
    assert padded.images is not None
    padded.images.close()
    drivers, ran = [Seeing(e, features, 1) for e in (padded, plain)], count_images(padded)
    sequences = [[d.new_sequence() for _ in STEPS[0]] for d in drivers]
    for parts in [*STEPS, [[0, text(20)], [text(2)], [text(1)]]]:
        padded.block._block.fill_(1 << 20)
        for tensor in (padded.memory.residual, padded.memory.q, padded.memory.attended):
            tensor.fill_(torch.nan)
        mine, want = (d.see(list(zip(own, parts, strict=True))) for d, own in zip(drivers, sequences, strict=True))
        assert torch.equal(mine.view(torch.int32), want.view(torch.int32)), parts
    for group, pool in padded.pools.items():
        assert torch.equal(pool.view(torch.uint8), plain.pools[group].view(torch.uint8)), group
    assert len(ran) == 4


def test_an_image_has_the_same_bits_in_company() -> None:
    """In a batch-invariant engine, and in other chunks."""
    model = small_model(33)
    features = features_of(model, "bfloat16", TOKENS)
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
    more = {
        roles.PREFILL_IMAGES,
        roles.IMAGE_NORM,
        *(roles.KernelRole("embed_images", results=r) for r in ("float32", "bfloat16")),
    }
    assert all(roles.parse_role(str(role)) == role for role in with_images), "as an engine on disk is read"
    assert {*with_images} - {*text_alone} == more and text_alone.items() <= with_images.items()
    assert not [s for s in text_alone.values() if {"key_ends", "features"} & {*s.signature, *s.constants}]


def test_graphs_of_steps_with_images_have_rows_that_products_take_fast() -> None:
    more = (512, 640, 768)
    for scaled, alone, beside in ((False, (256, 288, 336, 384, 448), (288, 336, 384, 448)), (True, (256, 384), (384,))):
        plans = [p for p in triton_rows.prompt_plans(2048, 128, 256, scaled=scaled) if p.images]
        sizes = {n: tuple(p.tokens for p in plans if p.decode.sequences == n) for n in (0, 16)}
        assert sizes == {0: alone + more, 16: beside + more} and all(p.prefill.rows >= 256 for p in plans)


def test_the_step_behind_an_image_starts_before_its_token_is_read() -> None:
    model = small_model(34)
    features, prompt = features_of(model, "bfloat16", TOKENS), [[3, 9], 2, [4]]
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
