"""Static scales: against what transformers computes, through conversion, building and running, and when it fails."""

from __future__ import annotations

import random
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lazy import LazyModule
from parity.tiny import TinyModel, tiny_model
from safetensors.torch import load_file, save_file
from text.synthetic_tokenizer import BOS
from text.synthetic_tokenizer import write as write_tokenizer
from tiny_source import open_intact

from wicore_trt.backends.torch import calibrate as module
from wicore_trt.backends.torch.calibrate import TextCalibration, measure_magnitudes
from wicore_trt.bench.perplexity import default_text, load_scorer, score_tokens
from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.format import open_checkpoint, write_config
from wicore_trt.checkpoint.names import unified_tensors
from wicore_trt.checkpoint.open_source import open_source
from wicore_trt.checkpoint.records import file_entries, record_file
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile
from wicore_trt.checkpoint.whole import CheckpointTensors, SourceTensors
from wicore_trt.cli.main import run_command
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import open_engine
from wicore_trt.errors import CheckpointError, ConfigError, WicoreError
from wicore_trt.text.tokenizer import Tokenizer

transformers = LazyModule("transformers")

TEXT = "hello world, Hello. What is that: a bear? No! it's a 日本 🙂 whale.\nß é 12 "
HOOKED = {"attention.qkv": "self_attn.q_proj", "attention.dense": "self_attn.o_proj", "mlp.fc": "mlp.gate_proj"}
HOOKED |= {"mlp.gate": "mlp.up_proj", "mlp.proj": "mlp.down_proj"}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    """About 2,500 tokens in an order of their own."""
    words = (TEXT * 40).split(" ")
    random.Random(5).shuffle(words)
    (tmp_path / "text.txt").write_text(" ".join(words), encoding="utf-8")
    return tmp_path / "text.txt"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that a text of a few hundred tokens takes several pieces and steps, the last ones short."""
    monkeypatch.setattr(module, "PIECE", 48)
    monkeypatch.setattr(module, "STEP_PIECES", 3)


def source_of(model: TinyModel, directory: Path, dtype: torch.dtype = torch.float32) -> Path:
    model.hf.to(dtype).save_pretrained(directory)
    model.hf.float()
    return write_tokenizer(directory)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """bfloat16 weights that 4 ranks can share, KV heads repeated."""
    shape: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2, "hidden_size": 64, "head_dim": 16}
    model = tiny_model(1, vocab_size=400, intermediate_size=96, num_hidden_layers=3, **shape)
    return source_of(model, tmp_path_factory.mktemp("calibrated") / "source", torch.bfloat16)


def static_scales(file: Path) -> dict[str, float]:
    return {n: t.item() for n, t in load_file(file).items() if t.numel() == 1 and t.dtype == torch.float32}


def hf_amax(model: TinyModel, pieces: list[list[int]]) -> dict[str, float]:
    """Largest magnitudes by hooks on transformers' linears and from its KV cache (keys after norm and rope)."""
    found: dict[str, float] = {}

    def note(name: str, x: torch.Tensor) -> None:
        found[name] = max(found.get(name, 0.0), x.abs().max().item())

    hooks = [
        model.hf.get_submodule(f"model.layers.{i}.{hf}").register_forward_pre_hook(
            lambda _, args, name=f"transformer.layers.{i}.{ours}.activation_scaling_factor": note(name, args[0])
        )
        for i in range(model.spec.num_layers)
        for ours, hf in HOOKED.items()
    ]
    for piece in pieces:
        cache = transformers.DynamicCache()
        with torch.inference_mode():
            model.hf(torch.tensor([piece]), past_key_values=cache)
        for i, layer in enumerate(cache.layers):
            name = f"transformer.layers.{i}.attention.kv_cache_scaling_factor"
            note(name, layer.keys)
            note(name, layer.values)
    for hook in hooks:
        hook.remove()
    return found


@pytest.mark.parametrize("seed", [0, *(pytest.param(n, marks=pytest.mark.long) for n in (1, 2, 3))])
def test_amax_is_that_of_transformers(seed: int, tmp_path: Path) -> None:
    model = tiny_model(seed)
    source = source_of(model, tmp_path / "m")
    rng = random.Random(seed)
    tokens = [rng.randrange(model.spec.vocab_size) for _ in range(400)]
    whole = SourceTensors(open_source(source))
    assert whole.dtype == "float32"
    pieces = [[BOS, *tokens[i : i + 47]] for i in range(0, len(tokens), 47)]
    expected = hf_amax(model, pieces)
    assert measure_magnitudes(whole, tokens, BOS) == pytest.approx(expected, rel=2e-5)
    assert measure_magnitudes(whole, tokens[:20], BOS) == pytest.approx(hf_amax(model, [pieces[0][:21]]), rel=2e-5)


@pytest.mark.parametrize("tp", [1, pytest.param(2, marks=pytest.mark.long), 4])
def test_scales_of_a_conversion(tp: int, source: Path, text: Path, tmp_path: Path) -> None:
    calibration = TextCalibration(text, 500)
    checkpoint = convert(source, tmp_path / "c", dtype="fp8", tp_size=tp, calibration=calibration)
    open_intact(checkpoint.path)
    quantization = checkpoint.config["quantization"]
    assert (quantization["quant_algo"], quantization["kv_cache_quant_algo"]) == ("FP8", "FP8")
    token_ids = Tokenizer.from_dir(source).encode(text.read_text(), add_bos=False)[:500]
    whole = SourceTensors(open_source(source))
    assert whole.dtype == "bfloat16"
    amax = measure_magnitudes(whole, token_ids, BOS)
    expected = {name: np.float32(value) / np.float32(448) for name, value in amax.items()}
    for file in checkpoint.rank_files:
        assert static_scales(file) == expected
    plain = convert(source, tmp_path / "plain", dtype="fp8", tp_size=tp)
    for ours, theirs in zip(checkpoint.rank_files, plain.rank_files, strict=True):
        a, b = load_file(ours), load_file(theirs)
        assert set(a) - set(b) == set(expected)
        assert all(torch.equal(a[n].view(torch.uint8), t.view(torch.uint8)) for n, t in b.items())


@pytest.mark.parametrize(
    ("dtype", "tp"),
    [("bfloat16", 1), ("fp8", 4), *(pytest.param(*p, marks=pytest.mark.long) for p in [("bfloat16", 4), ("fp8", 1)])],
)
def test_an_existing_checkpoint(dtype: str, tp: int, source: Path, text: Path, tmp_path: Path) -> None:
    """In place, from ranks put back together; a bfloat16 checkpoint computes what its bfloat16 source does."""
    plain = convert(source, tmp_path / "c", dtype=dtype, tp_size=tp)
    before = [load_file(file) for file in plain.rank_files]
    calibration = TextCalibration(text, 300)
    found = convert(plain.path, plain.path, calibration=calibration, force=True)
    assert open_intact(found.path).tp_size == tp and found.kv_scales
    assert found.weights.algo == ("FP8" if dtype == "fp8" else None)
    scales = [static_scales(file) for file in found.rank_files]
    assert all(s == scales[0] for s in scales)
    for old, file in zip(before, found.rank_files, strict=True):
        new = load_file(file)
        assert all(torch.equal(new[n].view(torch.uint8), t.view(torch.uint8)) for n, t in old.items())
    direct = convert(source, tmp_path / "direct", dtype=dtype, tp_size=tp, calibration=calibration)
    if dtype == "bfloat16":
        assert found.files == direct.files, "file for file the same"
    else:  # measured behind FP8 weights and activations, so near
        assert list(SafetensorsFile(found.rank_files[0]).tensors) == list(SafetensorsFile(direct.rank_files[0]).tensors)
        assert scales[0] == pytest.approx(static_scales(direct.rank_files[0]), rel=0.35)
    again = calibration.of_checkpoint(found.path, tmp_path / "again")
    assert again.files == found.files and again.config == found.config
    if dtype == "fp8":
        without = TextCalibration(text, 300, kv_scales=False).of_checkpoint(found.path, tmp_path / "without")
        assert not without.kv_scales and not any("kv_cache" in n for n in static_scales(without.rank_files[0]))
    assert not [p.name for p in tmp_path.iterdir() if "partial" in p.name or "old-" in p.name]


def test_ranks_are_put_back_together(source: Path, tmp_path: Path) -> None:
    one = CheckpointTensors(convert(source, tmp_path / "one", dtype="fp8"))
    four = CheckpointTensors(convert(source, tmp_path / "four", dtype="fp8", tp_size=4))
    for tensor in unified_tensors(one.spec):
        (a, tag), (b, other) = one.read_whole(tensor), four.read_whole(tensor)
        assert tag == other and a.shape == tensor.shape and np.array_equal(a, b), tensor.name
        if tag == "F8_E4M3":
            assert np.array_equal(one.weight_scale(tensor), four.weight_scale(tensor))
    for token_id in (0, 99, 100, 399):
        assert np.array_equal(one.embedding_row(token_id)[0], four.embedding_row(token_id)[0])


def test_one_matrix_is_in_memory_at_a_time(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, alive, matrices = module._make_tensor, weakref.WeakSet[torch.Tensor](), 0

    def watched(block: np.ndarray, tag: str) -> torch.Tensor:
        nonlocal matrices
        tensor = real(block, tag)
        if block.ndim == 2 and block.shape[0] > 1:  # not a row of the embedding
            matrices += 1
            assert not len(alive), "an earlier matrix is still held"
            alive.add(tensor)
        return tensor

    monkeypatch.setattr(module, "_make_tensor", watched)
    whole = SourceTensors(open_source(source))
    measure_magnitudes(whole, [random.randrange(400) for _ in range(200)], BOS)
    steps = 2  # 200 tokens are 5 pieces, 3 to a step
    assert matrices == steps * whole.spec.num_layers * 4, "each matrix is read once a step, the head never"


def test_through_an_engine(source: Path, text: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """convert, build, load, run: predictions stay those of the model, and the scales are in use."""
    checkpoint = convert(source, tmp_path / "c", dtype="fp8", calibration=TextCalibration(text, 600))
    plain = build_engine(source, tmp_path / "plain")
    token_ids = [BOS, *Tokenizer.from_dir(source).encode(text.read_text(), add_bos=False)[-300:]]
    logprobs = {}
    for name, kv_dtype in (("static", "auto"), ("kv", "fp8")):
        engine = build_engine(checkpoint.path, tmp_path / name, kv_dtype=kv_dtype)
        kept = [n for n in static_scales(engine.rank_files[0]) if "kv_cache" in n]
        assert len(kept) == (3 if kv_dtype == "fp8" else 0), "an engine keeps the KV scales that it uses"
        assert engine.manifest.quantization == {"algo": "FP8", "base_dtype": "bfloat16"}
        executor = load_scorer(open_engine(engine.path), context=301, device="cpu")
        assert executor.kernels.startswith("torch-")
        logprobs[name] = np.array(score_tokens(executor, token_ids, 1))
    assert run_command(["inspect", str(tmp_path / "kv")]) == 0
    assert "torch, not native: KV in fp8" in capsys.readouterr().out
    logprobs["bf16"] = np.array(score_tokens(load_scorer(plain, context=301, device="cpu"), token_ids, 1))
    losses = {name: -values.mean() for name, values in logprobs.items()}
    print(losses)
    assert losses["static"] == pytest.approx(losses["bf16"], rel=0.05)
    assert losses["kv"] == pytest.approx(losses["bf16"], rel=0.05)
    assert not np.array_equal(logprobs["static"], logprobs["kv"])


def test_a_static_scale_that_is_wrong_shows(source: Path, text: Path, tmp_path: Path) -> None:
    """What the engine computes depends on the scales: with 1/200 of them, most activations saturate."""
    checkpoint = convert(source, tmp_path / "c", dtype="fp8", calibration=TextCalibration(text, 300))
    tensors = load_file(checkpoint.rank_files[0])
    spoiled = {n: t / 200 if n.endswith("activation_scaling_factor") else t for n, t in tensors.items()}
    token_ids = [BOS, *range(20, 120)]
    executor = load_scorer(build_engine(checkpoint.path, tmp_path / "good"), context=101, device="cpu")
    good = np.array(score_tokens(executor, token_ids, 1))
    save_file(spoiled, checkpoint.rank_files[0])
    checkpoint.config["wicore"]["files"] |= file_entries({"rank0.safetensors": record_file(checkpoint.rank_files[0])})
    write_config(checkpoint.path, checkpoint.config)
    executor = load_scorer(build_engine(checkpoint.path, tmp_path / "bad"), context=101, device="cpu")
    assert np.abs(np.array(score_tokens(executor, token_ids, 1)) - good).max() > 0.5


def test_building_calibrates_on_the_way(source: Path, text: Path, tmp_path: Path) -> None:
    options = ["--calibrate", str(text), "--calibrate-tokens", "300", "--kv-dtype", "fp8"]
    assert run_command(["build", str(source), str(tmp_path / "a"), "--dtype", "fp8", *options]) == 0
    assert run_command(["convert", str(source), str(tmp_path / "c"), "--dtype", "fp8", *options[:4]]) == 0
    assert run_command(["build", str(tmp_path / "c"), str(tmp_path / "b"), "--kv-dtype", "fp8"]) == 0
    fingerprints = {open_engine(tmp_path / name).manifest.fingerprint for name in "ab"}
    assert len(fingerprints) == 1
    bare = convert(source, tmp_path / "bare", dtype="fp8")
    assert run_command(["build", str(bare.path), str(tmp_path / "d"), *options]) == 0
    assert open_engine(tmp_path / "d").manifest.quantization == {"algo": "FP8", "base_dtype": "bfloat16"}
    unscaled = build_engine(bare.path, tmp_path / "e", kv_dtype="fp8")
    scores = score_tokens(load_scorer(unscaled, context=50, device="cpu"), [BOS, *range(20, 60)], 1)
    assert unscaled.manifest.kv_dtype == "fp8" and np.isfinite(scores).all()


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda p: p.write_bytes(b"ab\xff\xfe" * 500), "cannot be read as UTF-8"),
        (lambda p: p.write_bytes(b""), "has 0 tokens, not 300"),
        (lambda p: p.write_text("hello " * 20), r"has \d+ tokens, not 300.*longer text"),
        (lambda p: None, r"bad\.txt is missing"),
        (lambda p: p.mkdir(), "is a directory, not a regular file"),
    ],
)
@pytest.mark.parametrize("existing", [False, True])
def test_bad_texts(write: Callable[[Path], Any], message: str, existing: bool, source: Path, tmp_path: Path) -> None:
    text, output = tmp_path / "bad.txt", tmp_path / "c"
    write(text)
    given = convert(source, tmp_path / "given", dtype="fp8").path if existing else source
    left = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(ConfigError, match=message):
        convert(given, output, dtype="fp8", calibration=TextCalibration(text, 300))
    assert sorted(p.name for p in tmp_path.iterdir()) == left


def test_what_cannot_be_calibrated(source: Path, text: Path, tmp_path: Path) -> None:
    plain = convert(source, tmp_path / "c", dtype="bfloat16", tp_size=2)
    kv, only = TextCalibration(text, 50), TextCalibration(text, 50, kv_scales=False)
    refused: list[tuple[Path, dict[str, Any], str]] = [
        (source, {"dtype": "bfloat16", "calibration": only}, "nothing to calibrate.*--dtype fp8"),
        (plain.path, {"dtype": "auto", "calibration": only}, "nothing to calibrate.*--dtype fp8"),
        (plain.path, {"dtype": "fp8", "calibration": kv}, "checkpoint of bfloat16 for tp 2; it can be calibrated"),
        (plain.path, {"tp_size": 4, "calibration": kv}, "Leave --dtype and --tp out"),
    ]
    for given, options, message in refused:
        with pytest.raises(ConfigError, match=message):
            convert(given, tmp_path / "out", **options)
    source = shutil.copytree(source, tmp_path / "broken")
    weights = load_file(source / "model.safetensors")
    weights["model.layers.1.mlp.up_proj.weight"][0, 0] = torch.inf
    save_file(weights, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"no finite numbers: transformer\.layers\.1\.mlp\.proj"):
        convert(source, tmp_path / "out", dtype="fp8", calibration=kv)
    (source / "tokenizer.json").unlink()
    with pytest.raises(WicoreError, match=r"tokenizer\.json"):
        convert(source, tmp_path / "out", dtype="fp8", calibration=kv)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("phase", ["calibrate", "write"])
def test_an_interrupted_calibration_keeps_the_checkpoint(phase: str, source: Path, text: Path, tmp_path: Path) -> None:
    plain = convert(source, tmp_path / "c", dtype="fp8")
    seen: list[tuple[str, int, int]] = []

    def interrupt(now: str, done: int, total: int) -> None:
        seen.append((now, done, total))
        if now == phase and done * 2 > total:
            raise KeyboardInterrupt

    left = sorted(p.name for p in tmp_path.iterdir())
    with pytest.raises(KeyboardInterrupt):
        TextCalibration(text, 400).of_checkpoint(plain.path, plain.path, force=True, progress=interrupt)
    assert open_intact(plain.path).files == plain.files
    assert sorted(p.name for p in tmp_path.iterdir()) == left
    assert all(0 <= done <= total for _, done, total in seen)


def test_the_command_to_repeat_it(source: Path, text: Path, tmp_path: Path) -> None:
    checkpoint = convert(source, tmp_path / "c", dtype="fp8", calibration=TextCalibration(text, 100, kv_scales=False))
    checkpoint.rank_files[0].unlink()
    with pytest.raises(CheckpointError, match=f"--calibrate {text} --calibrate-tokens 100 --no-kv-scales --force"):
        open_checkpoint(checkpoint.path)


@pytest.mark.model
@pytest.mark.long
@pytest.mark.parametrize(("kv_dtype", "tokens", "within"), [("fp8", 120, 0.03), ("auto", 1000, 0.02)])
def test_the_real_model_keeps_its_predictions(
    kv_dtype: str,
    tokens: int,
    within: float,
    gemma_270m_gguf: Path,
    engine_270m: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Calibrated on one part of a text, scored on another. `test_through_an_engine` is its short form."""
    monkeypatch.setattr(module, "PIECE", 256)
    words = default_text()
    (tmp_path / "text.txt").write_text(words[-40_000:])
    checkpoint = convert(
        gemma_270m_gguf, tmp_path / "c", dtype="fp8", calibration=TextCalibration(tmp_path / "text.txt", 254)
    )
    token_ids = Tokenizer.from_dir(checkpoint.path).encode(words[:8000])[:tokens]
    losses = []
    for engine in (open_engine(engine_270m), build_engine(checkpoint.path, tmp_path / "engine", kv_dtype=kv_dtype)):
        executor = load_scorer(engine, context=1000, device="cpu")
        losses.append(-np.mean(score_tokens(executor, token_ids, 1)))
        executor.close()
    print(losses)
    assert losses[1] == pytest.approx(losses[0], rel=within)
