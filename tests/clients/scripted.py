"""`wicore serve` over a model of two layers whose next token is what a script says: no model that a CPU runs can use
tools well. Engine, sampler, constraints, parser and server are the real ones, with the real vocabulary of Gemma 3; the
script's token only gets the highest logit, so that one which a constraint forbids comes out as another.

    python tests/clients/scripted.py ENGINE SCRIPT NAMES

SCRIPT is JSON: a list of [pattern, answer]. The first pattern that is found in the last turn of the prompt decides,
from its last result of a function on where it has one. What no pattern fits is answered with NOTHING.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from wicore_trt.checkpoint.names import hf_shapes
from wicore_trt.config import Settings
from wicore_trt.model.hf_config import read_hf_config

SCRIPT = "WICORE_TEST_SCRIPT"
NOTHING = "The script says nothing of this."
START, END = 105, 106  # <start_of_turn>, <end_of_turn>
CONFIG = {
    "model_type": "gemma3_text", "vocab_size": 262144, "hidden_size": 32, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 32, "sliding_window": 512,
    "sliding_window_pattern": 2, "max_position_embeddings": 65536, "hidden_activation": "gelu_pytorch_tanh",
    "eos_token_id": [1, END], "tie_word_embeddings": True,
}  # fmt: skip


def write_source(path: Path, tokenizer: Path) -> Path:
    """Random weights beside the tokenizer of an engine of Gemma 3."""
    path.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(tokenizer / name, path / name)
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, END]}))
    rng, shapes = np.random.default_rng(0), hf_shapes(read_hf_config(CONFIG))
    weights = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    save_file(weights, path / "model.safetensors")
    return path


class Script:
    """Tokens that come next after the tokens of a sequence."""

    def __init__(self, tokenizer) -> None:
        self._tokenizer = tokenizer
        self._rules = json.loads(Path(os.environ[SCRIPT]).read_text())
        self._answers: dict[int, list[int]] = {}

    def next(self, seq_id: int, tokens: Sequence[int], prompt_len: int) -> int:
        answer = self._answers.get(seq_id)
        if answer is None or len(tokens) == prompt_len:
            answer = self._answers[seq_id] = self._answer(list(tokens[:prompt_len]))
        at = len(tokens) - prompt_len
        return answer[at] if at < len(answer) else END

    def _answer(self, prompt: list[int]) -> list[int]:
        starts = [i for i, token in enumerate(prompt) if token == START]
        turn = self._tokenizer.decode(prompt[starts[-2] : starts[-1]], skip_special=True)
        turn = turn[max(turn.rfind("<tool_response>"), 0) :]
        said = next((answer for pattern, answer in self._rules if re.search(pattern, turn)), NOTHING)
        return self._tokenizer.encode(said, add_bos=False)


def load_engine(settings: Settings):
    """As `process.engine.load_engine`."""
    from wicore_trt.core.assemble import load_engine

    loaded = load_engine(settings, serves=True)
    sampler = loaded.core.executor._sampler
    script, step = Script(loaded.tokenizer), sampler.step

    def forced(logits, slices):
        assert not any(piece.targets for piece in slices)
        for row, piece in enumerate(piece for piece in slices if piece.sample):
            tokens = next(s.tokens for s in loaded.core.scheduler.running if s.seq_id == piece.seq_id)
            logits[row, script.next(piece.seq_id, tokens, piece.prompt_len)] = 1e6
        return step(logits, slices)

    sampler.step = forced
    return loaded.core, loaded.info


def serve(engine: str, names: str) -> None:
    """Prints the URL."""
    from wicore_trt.access import log
    from wicore_trt.config import LoadedSettings, ModelSettings, ServerSettings
    from wicore_trt.process.supervisor import Supervisor

    log.configure_logging(json_lines=False, level="INFO")
    settings = Settings(
        engine=engine,
        model=ModelSettings(name=tuple(names.split(","))),
        server=ServerSettings(port=0, http_port=0),
    )
    report = lambda address, url: print(url, flush=True)  # noqa: E731
    Supervisor(LoadedSettings(settings, {}), load_engine="scripted:load_engine", report_serving=report).run()


if __name__ == "__main__":
    os.environ[SCRIPT] = sys.argv[2]
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    serve(sys.argv[1], sys.argv[3])
