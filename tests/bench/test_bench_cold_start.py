"""A start with nothing of the engine in memory, rehearsed with a tiny engine on the CPU."""

from __future__ import annotations

import json

import pytest
from safetensors import safe_open

from benchmarks.gpu import cold_start


def test_files_are_forgotten_or_there_is_no_figure(tmp_path, monkeypatch):
    """Files on a disk of its own, as those of tmpfs are memory."""
    path = tmp_path / "engine" / "weights"
    path.parent.mkdir()
    path.write_bytes(b"x" * (1 << 20))
    monkeypatch.setattr(cold_start, "command", lambda engine: [])
    monkeypatch.setattr(cold_start, "measure_startup", lambda *_: {"ready_s": 1.0})
    assert cold_start.kept_share([path]) == 1.0
    record = cold_start.start(path.parent, 9, tmp_path / "log", cold=False)
    assert record == {"cold": False, "in_memory_before": 1.0, "ready_s": 1.0}
    monkeypatch.setattr(cold_start, "forget", lambda paths: None)
    with pytest.raises(RuntimeError, match="100% of the engine's files stay in memory"):
        cold_start.start(path.parent, 9, tmp_path / "log", cold=True)


@pytest.mark.long  # imports transformers' models
def test_a_source_has_every_weight_of_the_model_once(tmp_path, monkeypatch):
    (tmp_path / "tokenizer").mkdir()
    (tmp_path / "tokenizer" / "tokenizer.json").write_text("{}")
    config = {
        "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "hidden_size": 16, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8, "intermediate_size": 32, "vocab_size": 99,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(cold_start, "SHARD_BYTES", 2000)
    total = cold_start.write_source(tmp_path, tmp_path / "tokenizer", tmp_path / "source")
    index = json.loads((tmp_path / "source/model.safetensors.index.json").read_text())
    sizes = {}
    for name in set(index["weight_map"].values()):
        with safe_open(tmp_path / "source" / name, "pt") as shard:
            sizes |= {key: shard.get_tensor(key).nbytes for key in shard.keys()}  # noqa: SIM118
    assert (
        sizes.keys() == index["weight_map"].keys() and sum(sizes.values()) == total == index["metadata"]["total_size"]
    )
    assert len(sizes) == 2 + 2 * 13 and (tmp_path / "source/tokenizer.json").exists()
