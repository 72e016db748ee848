"""LoRA adapters merged into sources: the model that comes out is the one that peft runs."""

from __future__ import annotations

import copy
import functools
import json
import shutil
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from lazy import LazyModule
from safetensors.torch import load_file, save_file
from test_gguf import write_gguf
from tiny_source import write_tiny_source

from wicore_trt import LLM, SamplingParams
from wicore_trt.checkpoint.convert import convert
from wicore_trt.checkpoint.open_source import open_source
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import open_engine
from wicore_trt.errors import CheckpointError, ConfigError

peft = LazyModule("peft")
IDS = [2, *(5 + (7 * i) % 50 for i in range(30))]
Q0 = "base_model.model.model.layers.0.self_attn.q_proj"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_source(tmp_path_factory.mktemp("base") / "gemma-3-tiny")


@functools.cache
def _loaded(path: Path) -> Any:
    import transformers

    return transformers.Gemma3ForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def load(path: Path) -> Any:
    """A model of its own: peft writes into it."""
    return copy.deepcopy(_loaded(path))


def adapter(base: Path, path: Path, *, embeddings: bool | str = "auto", **options: Any) -> Path:
    """Train an adapter, by noise on every weight that could be trained, and save it with peft."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = peft.get_peft_model(load(base), peft.LoraConfig(**({"r": 4, "lora_alpha": 12} | options)))
        noise = torch.Generator().manual_seed(1)
        for name, weight in model.named_parameters():
            if weight.requires_grad:
                shift = torch.randn(weight.shape, generator=noise) * 0.2
                weight.data += shift.abs() if "magnitude" in name else shift
        model.save_pretrained(path, save_embedding_layers=embeddings)
    return path


def of_peft(base: Path, path: Path) -> np.ndarray:
    """Log-probabilities of the tokens of IDS by the unmerged model, float32 [len(IDS) - 1]."""
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        model = peft.PeftModel.from_pretrained(load(base), path).eval()
        rows = torch.log_softmax(model(input_ids=torch.tensor([IDS])).logits[0].float(), -1)
    return rows[torch.arange(len(IDS) - 1), torch.tensor(IDS[1:])].numpy()


def of_engine(path: Path) -> np.ndarray:
    with LLM(str(path)) as llm:
        sampling = SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, ignore_eos=True)
        [[answer]] = llm.generate([IDS], sampling)
    assert answer.prompt_logprobs is not None
    return np.array([entry.logprob for entry in answer.prompt_logprobs[1:]])


KINDS: dict[str, dict[str, Any]] = {
    "plain": {"target_modules": ["q_proj", "v_proj"]},
    "all linears, rslora": {"target_modules": "all-linear", "use_rslora": True},
    "a regular expression": {"target_modules": r".*layers\.[13]\.mlp\.(up|down)_proj"},
    "some layers": {"target_modules": ["o_proj", "gate_proj"], "layers_to_transform": [0, 2]},
    "patterns": {
        "target_modules": "all-linear",
        "rank_pattern": {"q_proj": 2, r"layers\.1\.mlp\.up_proj": 6},
        "alpha_pattern": {"mlp.up_proj": 3, "o_proj": 20},
    },
    "dora": {"target_modules": "all-linear", "use_dora": True},
    "a trained head": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
    "trained embeddings": {"target_modules": ["q_proj"], "modules_to_save": ["embed_tokens"]},
    "head, embeddings and norms": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["lm_head", "embed_tokens", "input_layernorm", "norm"],
    },
    "the embedding": {"target_modules": ["q_proj", "embed_tokens"]},
    "the head": {"target_modules": ["q_proj", "lm_head"]},
    "some layers and the head": {"target_modules": ["o_proj", "lm_head"], "layers_to_transform": [0, 2]},
    "a module that others have": {"target_modules": ["q_proj"], "modules_to_save": ["score"]},
    "embeddings saved all over": {
        "target_modules": ["q_proj"],
        "modules_to_save": ["lm_head", "embed_tokens"],
        "embeddings": True,
    },
    "tied on purpose": {"target_modules": ["q_proj", "embed_tokens"], "ensure_weight_tying": True},
    "fan in and out, excluded": {"target_modules": "all-linear", "exclude_modules": ["k_proj"], "fan_in_fan_out": True},
}


@pytest.fixture(scope="module")
def plain(base: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, np.ndarray]:
    """Fingerprint of the engine without an adapter, and what it computes."""
    engine = build_engine(base, path := tmp_path_factory.mktemp("plain") / "p", dtype="float32")
    return engine.manifest.fingerprint, of_engine(path)


@pytest.fixture(scope="module")
def of_queries(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter of q_proj, to be copied."""
    return adapter(base, tmp_path_factory.mktemp("queries") / "a", target_modules=["q_proj"])


PARTS_OF_OTHERS = {
    "plain", "some layers", "a trained head", "trained embeddings", "the head", "a regular expression", "the embedding",
    "some layers and the head",
}  # fmt: skip


@pytest.mark.parametrize(
    "kind", [pytest.param(k, marks=pytest.mark.long) if k in PARTS_OF_OTHERS else k for k in KINDS]
)
def test_an_engine_computes_what_peft_computes(
    kind: str, base: Path, plain: tuple[str, np.ndarray], tmp_path: Path
) -> None:
    path, notes = adapter(base, tmp_path / "a", **KINDS[kind]), list[str]()
    engine = build_engine(base, tmp_path / "e", dtype="float32", lora=path, note=notes.append)
    expected = of_peft(base, path)
    np.testing.assert_allclose(of_engine(tmp_path / "e"), expected, atol=2e-4)
    assert np.abs(plain[1] - expected).max() > 0.01
    assert engine.manifest.fingerprint != plain[0]
    assert engine.manifest.compiled["lora"] == str(path) and f"--lora {path}" in engine.rebuild_advice
    assert f"merged {path}: rank 4, alpha 12" in notes[0]
    apart = kind in ("a trained head", "trained embeddings", "head, embeddings and norms", "the embedding", "the head",
                     "some layers and the head", "embeddings saved all over",
                     "tied on purpose")  # fmt: skip
    assert engine.manifest.spec.tie_word_embeddings is not apart
    assert any("holds both" in note for note in notes) is apart


@pytest.mark.long  # what is merged is cut into shards as any source, which test_sharding.py has
def test_two_ranks_compute_what_peft_computes(base: Path, plain: tuple[str, np.ndarray], tmp_path: Path) -> None:
    path = adapter(base, tmp_path / "a", target_modules="all-linear")
    build_engine(base, tmp_path / "e", dtype="float32", lora=path, tp_size=2)
    found, expected = of_engine(tmp_path / "e"), of_peft(base, path)
    np.testing.assert_allclose(found, expected, atol=2e-4)
    assert np.abs(plain[1] - expected).max() > 0.01


def test_merged_weights_are_rounded_once(base: Path, tmp_path: Path) -> None:
    path = adapter(base, tmp_path / "a", target_modules="all-linear")
    stored = {n: t.bfloat16() for n, t in load_file(base / "model.safetensors").items()}
    shutil.copytree(base, tmp_path / "b")
    save_file(stored, tmp_path / "b" / "model.safetensors")
    source = open_source(tmp_path / "b", lora=path)
    low = load_file(path / "adapter_model.safetensors")
    name = "model.layers.2.mlp.down_proj"
    up, down = (low[f"base_model.model.{name}.lora_{side}.weight"].numpy() for side in "BA")
    merged = stored[f"{name}.weight"].float().numpy() + (up @ down) * np.float32(3)
    np.testing.assert_allclose(source.read_tensor(f"{name}.weight"), merged, rtol=1e-6, atol=1e-6)
    rows, tag = source.read_rows(f"{name}.weight", 3, 9)
    np.testing.assert_array_equal(rows, source.read_tensor(f"{name}.weight")[3:9])
    assert tag == "F32" and source.read_rows("model.norm.weight", 0, 4)[1] == "BF16"
    checkpoint = convert(tmp_path / "b", tmp_path / "c", lora=path)
    assert checkpoint.dtype == "bfloat16" and checkpoint.config["wicore"]["lora"] == str(path)
    assert f"--lora {path}" in checkpoint.rebuild_command


def test_an_adapter_beside_whole_weights_is_merged_when_it_is_named(base: Path, tmp_path: Path) -> None:
    shutil.copytree(base, tmp_path / "m")
    adapter(base, tmp_path / "m", target_modules=["q_proj"])
    with pytest.raises(CheckpointError, match="--lora"):
        open_source(tmp_path / "m")
    build_engine(tmp_path / "m", tmp_path / "e", dtype="float32", lora=tmp_path / "m")
    np.testing.assert_allclose(of_engine(tmp_path / "e"), of_peft(base, tmp_path / "m"), atol=2e-4)


def test_the_tokenizer_beside_an_adapter_is_used(base: Path, tmp_path: Path) -> None:
    path = adapter(base, tmp_path / "a", target_modules=["q_proj"], task_type="CAUSAL_LM")
    text = (base / "tokenizer.json").read_text()
    (path / "tokenizer.json").write_text(text.replace('"a":', '"A":'))
    (path / "training_args.bin").write_text("x")
    (path / "chat_template.jinja").write_text("{{ messages[0].content }}")
    said = json.loads((path / "adapter_config.json").read_text())
    (path / "adapter_config.json").write_text(json.dumps(said | {"base_model_name_or_path": "unsloth/other-bnb-4bit"}))
    notes = list[str]()
    engine = build_engine(base, tmp_path / "e", lora=path, note=notes.append)
    assert engine.read("tokenizer.json") == (path / "tokenizer.json").read_bytes()
    assert engine.read("generation_config.json") == (base / "generation_config.json").read_bytes()
    assert "chat_template.jinja" in open_engine(tmp_path / "e").manifest.files
    (path / "tokenizer.json").unlink()
    (path / "adapter_config.json").write_text(
        json.dumps(said | {"odd": 1, "base_model_name_or_path": "x/Gemma-3-Tiny"})
    )
    said_now = open_source(base, lora=path).notes[1:]
    assert "adapter_config.json says odd" in said_now[0]
    assert "chat_template.jinja of the adapter left aside" in said_now[1] and len(said_now) == 2
    assert "trained on unsloth/other-bnb-4bit" in notes[1] and "those beside the adapter" in " ".join(notes)


def test_added_tokens_come_with_their_rows(base: Path, tmp_path: Path) -> None:
    path = adapter(base, tmp_path / "a", target_modules=["q_proj"], modules_to_save=["lm_head", "embed_tokens"])
    tensors = load_file(path / "adapter_model.safetensors")
    names = [f"base_model.model.{name}" for name in ("lm_head.weight", "model.embed_tokens.weight")]
    save_file(
        {n: torch.cat([t, t[:2]]) if n in names else t for n, t in tensors.items()}, path / "adapter_model.safetensors"
    )
    source = open_source(base, lora=path)
    assert source.spec.vocab_size == 66 and source.read_tensor("lm_head.weight").shape == (66, 16)
    save_file({n: t for n, t in tensors.items() if n != names[0]} | {names[1]: torch.zeros(66, 16)},
              path / "adapter_model.safetensors")  # fmt: skip
    with pytest.raises(CheckpointError, match=r"lm_head\.weight is \[64, 16\], not \[66, 16\]"):
        open_source(base, lora=path)


def test_an_adapter_over_a_gguf_file(tmp_path: Path) -> None:
    """Its names are canonical, and of a trained norm peft saves w where the file holds 1 + w."""
    write_gguf(tmp_path / "m.gguf", "Q8_0")
    base, name = open_source(tmp_path / "m.gguf"), "model.layers.1.self_attn.q_proj"
    up, down, norm = torch.randn(512, 4), torch.randn(4, 256), torch.randn(256)
    (tmp_path / "a").mkdir()
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["q_proj"], "modules_to_save": ["norm"]}
    (tmp_path / "a" / "adapter_config.json").write_text(json.dumps(config | {"layers_to_transform": [1]}))
    low = {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up, "model.norm.weight": norm}
    save_file({f"base_model.model.{n}": t for n, t in low.items()}, tmp_path / "a" / "adapter_model.safetensors")
    source = open_source(tmp_path / "m.gguf", lora=tmp_path / "a")
    merged = base.read_tensor(f"{name}.weight") + 2 * (up @ down).numpy()
    np.testing.assert_allclose(source.read_tensor(f"{name}.weight"), merged, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(source.read_norm("model.norm.weight", 0, 256), (1 + norm).numpy())
    other = "model.layers.0.input_layernorm.weight"
    np.testing.assert_array_equal(source.read_norm(other, 0, 256), base.read_norm(other, 0, 256))
    np.testing.assert_array_equal(
        source.read_tensor("model.embed_tokens.weight"), base.read_tensor("model.embed_tokens.weight")
    )


def renamed(old: str, new: str) -> Callable[[dict[str, Any], dict[str, Any]], None]:
    def edit(config: dict[str, Any], tensors: dict[str, Any]) -> None:
        for name in [name for name in tensors if old in name]:
            tensors[name.replace(old, new)] = tensors.pop(name)

    return edit


BAD: list[tuple[Callable[[dict[str, Any], dict[str, Any]], Any], str]] = [
    (lambda c, t: c.update(peft_type="IA3"), "'IA3' is no LoRA"),
    (lambda c, t: c.update(r=8), "has rank 4, and adapter_config.json says 8"),
    (lambda c, t: c.update(rank_pattern={"q_proj": 2}), "has rank 4, and adapter_config.json says 2"),
    (lambda c, t: c.update(rank_pattern={"(": 2}), "no regular expression"),
    (lambda c, t: c.update(target_modules="(q_proj"), "no regular expression"),
    (lambda c, t: c.update(modules_to_save=["lm_head"]), "lacks 1 of the weights.*lm_head"),
    (
        lambda c, t: (
            c.update(modules_to_save=["input_layernorm"]),
            t.update({"base_model.model.model.layers.0.input_layernorm.weight": torch.zeros(16)}),
        ),
        "lacks 3 of the weights.*layers.1.input_layernorm",
    ),
    (
        lambda c, t: t.update(
            {
                f"base_model.model.lm_head{n}.weight": torch.full((64, 16), float(i))
                for i, n in enumerate(("", ".modules_to_save"))
            }
        ),
        "holds lm_head.weight twice",
    ),
    (lambda c, t: c.update(use_dora=True), "use_dora is True, and .* has no lora_magnitude_vector"),
    (lambda c, t: c.update(init_lora_weights="pissa"), "init_lora_weights is 'pissa'.*merge_and_unload"),
    (lambda c, t: c.update(trainable_token_indices=[1]), "trainable_token_indices"),
    (lambda c, t: c.update(lora_bias=True), "lora_bias"),
    (lambda c, t: c.update(r="x"), "r is 'x'"),
    (lambda c, t: c.update(target_modules=["v_proj"]), "q_proj.*which target_modules .* does not name"),
    (lambda c, t: c.update(target_modules=["q_proj", "v_proj"]), "lacks 4 of the weights.*v_proj"),
    (lambda c, t: c.update(fine_tune_type="lora"), "an adapter of MLX"),
    (lambda c, t: t.pop(f"{Q0}.lora_B.weight"), "it holds lora_A alone"),
    (lambda c, t: t.update({f"{Q0}.lora_B.weight": torch.zeros(31, 4)}), r"\[31, 4\] x \[4, 16\] does not fit"),
    (lambda c, t: t.update({f"{Q0}.lora_B.bias": torch.zeros(32)}), "lora_B.bias is nothing that can be merged"),
    (lambda c, t: t.update({"base_model.model.score.weight": torch.zeros(2, 16)}), "score.weight is nothing"),
    (renamed("layers.3.", "layers.9."), "layers.9.*nothing that can be merged"),
    (lambda c, t: t.clear(), "holds nothing that changes"),
]


@pytest.mark.parametrize(("edit", "words"), BAD)
def test_what_does_not_fit_is_refused(
    edit: Callable[..., Any], words: str, base: Path, of_queries: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(of_queries, tmp_path / "a")
    config, tensors = (
        json.loads((path / "adapter_config.json").read_text()),
        load_file(path / "adapter_model.safetensors"),
    )
    edit(config, tensors)
    (path / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, path / "adapter_model.safetensors")
    with pytest.raises(CheckpointError, match=words) as caught:
        open_source(base, lora=path)
    assert "\n" not in str(caught.value)


def test_what_is_no_adapter_and_what_takes_none(base: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no adapter: it has no adapter_config.json"):
        open_source(base, lora=base)
    path = adapter(base, tmp_path / "a", target_modules=["q_proj"])
    convert(base, tmp_path / "c")
    with pytest.raises(ConfigError, match="an adapter is merged into a source"):
        build_engine(tmp_path / "c", tmp_path / "e", lora=path)
    with pytest.raises(ConfigError, match="is a checkpoint, and an adapter is merged into a source"):
        convert(tmp_path / "c", tmp_path / "d", lora=path)
    (path / "adapter_model.safetensors").rename(path / "adapter_model.bin")
    with pytest.raises(CheckpointError, match="lacks adapter_model.safetensors"):
        open_source(base, lora=path)
