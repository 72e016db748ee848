"""4-bit engines of the triton backend in Triton's interpreter: logits against what the stored blocks mean.

Invariants: I21.
"""

from __future__ import annotations

import logging
import random
from dataclasses import replace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

from parity.paged import relative_error  # noqa: E402
from runtime.test_triton_executor import MIXED, TOLERANCE, run  # noqa: E402
from runtime.test_triton_weights import engine_at  # noqa: E402
from runtime.triton_cpu import CpuDevice, Driver, blocks_of, executor_of, oracle_of, small_model, specs_of  # noqa: E402

from benchmarks.gpu.kernels.tiles_back import unpack_scales, unpack_tiles  # noqa: E402
from wicore_trt.backends.torch.weights import fuse_weights  # noqa: E402
from wicore_trt.backends.triton import table as triton_table  # noqa: E402
from wicore_trt.backends.triton.table import EngineShape  # noqa: E402
from wicore_trt.backends.triton.weights import load_constants, make_dummy_weights  # noqa: E402
from wicore_trt.checkpoint.names import weight_minimum_name, weight_scale_name  # noqa: E402
from wicore_trt.errors import ConfigError  # noqa: E402
from wicore_trt.model.gemma3 import EMBEDDING, LM_HEAD  # noqa: E402
from wicore_trt.plugins import decode_layout, linear_configs  # noqa: E402
from wicore_trt.plugins.decode_layout import DecodeConfig  # noqa: E402
from wicore_trt.weight_format import Q4_0  # noqa: E402

MIXED_KINDS = replace(Q4_0, minimums=("mlp.gate_up", "mlp.proj"))
SIZES = {"intermediate_size": 64}


@pytest.mark.parametrize(
    ("dtype", "weights"), [("bfloat16", MIXED_KINDS), pytest.param("float16", Q4_0, marks=pytest.mark.long)]
)
def test_few_rows_many_rows_and_invariant(dtype: str, weights: object, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps of 12 rows are written in 16 bits for cuBLAS; decoding and invariant engines multiply the blocks."""
    monkeypatch.setitem(triton_table.CROSSOVER, "sm90", {"q4_0": 8})
    specs_of.cache_clear()
    model = small_model(random.randrange(1000), **SIZES)
    stored, meant = blocks_of(model, dtype, weights)
    mine, fixed = (executor_of(model, dtype, tensors=stored, weights=weights, batch_invariant=i) for i in (False, True))
    oracle = oracle_of(model, dtype, tensors=meant)
    run([Driver(mine, 1), Driver(fixed, 3), Driver(oracle, 2)], MIXED, 48, TOLERANCE[dtype])
    assert any(n.startswith("dequantize") for n in mine.model.launcher.launched)
    assert not any(n.startswith("dequantize") for n in fixed.model.launcher.launched)
    assert any(n.startswith("linear") and "q4" in n for n in mine.model.launcher.launched)
    specs_of.cache_clear()


def test_steps_of_some_tens_of_rows_multiply_by_warp_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their operands have another order of columns, whoever writes them: also prompts beside decoding, and the sampled
    rows behind the last attention of a step for cuBLAS. Smaller steps and larger ones are as ever."""
    layers = {(192, 128, False): 1, (128, 128, False): 1, (256, 128, True): 1, (128, 256, False): 2}
    shapes = {shape: {16: splits, 32: splits} for shape, splits in layers.items()}
    monkeypatch.setattr(linear_configs, "MEASURED_GROUPS", shapes)
    monkeypatch.setitem(decode_layout.MEASURED_DECODE, ("sm90", 32, 2), ((1 << 31, DecodeConfig(1, 64, 1)),))
    monkeypatch.setitem(triton_table.CROSSOVER, "sm90", {"q4_0": 32})
    specs_of.cache_clear()
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
    model = small_model(random.randrange(1000), **sizes)
    stored, meant = blocks_of(model, "bfloat16", Q4_0)
    room = {"max_sequences": 12, "kv_pages": {"global": 80, "local": 80}}
    many = {**room, "max_batch_tokens": 48}
    mine = executor_of(model, tensors=stored, weights=Q4_0, **many)
    drivers = [Driver(mine, 1), Driver(oracle_of(model, "bfloat16", tensors=meant, **room), 2)]
    names = mine.model.launcher.launched
    run(drivers, ([2] * 8 + [4], [1] * 9, [1] * 9 + [24]), 48, 0.02)
    for part in ("_g128x128c16", "_g128x128c32", "_g64x128c16", "order_", "_rows_ordered", "norm_bfloat16_ordered"):
        assert any(part in name for name in names), part
    specs_of.cache_clear()


@pytest.mark.parametrize("head", ["float16", "q8_0"])
def test_heads_keep_the_bits_of_float16(head: str, caplog: pytest.LogCaptureFixture) -> None:
    weights, model = replace(Q4_0, head=head), small_model(3, tie_word_embeddings=True, **SIZES)
    stored, meant = blocks_of(model, "bfloat16", weights)
    with caplog.at_level(logging.INFO):
        mine = executor_of(model, tensors=stored, weights=weights)
    assert ("embedding and head are stored as" in caplog.text) == (head == "q8_0")
    table = mine.model.weights[EMBEDDING]
    assert table.dtype == torch.float16 and mine.model.weights[LM_HEAD].data_ptr() == table.data_ptr()
    assert relative_error(table.float(), meant[EMBEDDING]) < 2.0**-11
    run([Driver(mine, 1), Driver(oracle_of(model, "bfloat16", tensors=meant), 2)], ([3], [1]), 48, 0.02)


def test_a_file_loads_into_tiles_that_give_its_bytes_back(tmp_path) -> None:
    model, device = small_model(1, **SIZES), CpuDevice("sm90")
    stored, _ = blocks_of(model, "bfloat16", MIXED_KINDS)
    shape = EngineShape(model.spec, "bfloat16", MIXED_KINDS, "bfloat16", 4)
    loaded = load_constants(engine_at(tmp_path, stored, shape), shape, 64, device).weights
    fused = fuse_weights(stored, model.spec)
    tiles = [name for name, weight in fused.items() if weight.dtype == torch.uint8]
    assert len(tiles) == 4 * model.spec.num_layers
    for name in tiles:
        assert torch.equal(unpack_tiles(loaded[name]), fused[name]), name
        for other in (weight_scale_name(name), weight_minimum_name(name)):
            assert (other in loaded) == (other in fused), other
            if other in fused:
                assert torch.equal(unpack_scales(loaded[other]), fused[other]), other
    made = make_dummy_weights(shape, device.torch_device)
    assert {n: (t.dtype, t.numel()) for n, t in made.items()} == {n: (t.dtype, t.numel()) for n, t in loaded.items()}


def test_widths_that_are_no_whole_tiles_are_refused() -> None:
    with pytest.raises(ConfigError, match="multiples of 32"):
        EngineShape(small_model(1).spec, "bfloat16", Q4_0, "bfloat16", 4)
