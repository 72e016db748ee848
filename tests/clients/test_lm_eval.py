"""The evaluation harness lm-eval against the real server, in float32: its log-likelihoods are transformers'."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import httpx
import pytest
import torch
from parity.tiny import transformers_model
from real_server import Served

from wicore_trt.backends.torch.weights import load_tensors
from wicore_trt.checkpoint.format import Checkpoint

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(1200)]
PROGRAM = Path(__file__).parents[2] / ".venv-clients-lm-eval" / "bin" / "lm_eval"
CAPITALS = (
    "France Paris, Italy Rome, Spain Madrid, Japan Tokyo, Germany Berlin, Russia Moscow, China Beijing, Egypt Cairo, "
    "Greece Athens, Austria Vienna, Poland Warsaw, Portugal Lisbon, Norway Oslo, Sweden Stockholm, Cuba Havana, "
    "Peru Lima, Chile Santiago, Kenya Nairobi, Hungary Budapest, Ireland Dublin, Turkey Ankara, Iraq Baghdad, "
    "Denmark Copenhagen, Finland Helsinki, Canada Ottawa"
)
PAIRS = [pair.split() for pair in CAPITALS.split(", ")]
ITEMS = [
    *(
        {"text": f"The capital of {land} is", "choices": [city, PAIRS[i - 1][1]]}
        for i, (land, city) in enumerate(PAIRS)
    ),
    *({"text": f"{n}, {n + 1}, {n + 2},", "choices": [f"{n + 3}", f"{n + 4}, and so on"]} for n in range(1, 26)),
]
TASK = """
task: choices
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{text}}"
doc_to_choice: "{{choices}}"
doc_to_target: 0
"""


@pytest.fixture(scope="module")
def expected(checkpoint_270m: Checkpoint):
    """Of token ids and where continuations begin: log-likelihoods of these by transformers, whether they are greedy."""
    tensors = load_tensors(checkpoint_270m.rank_files[0], checkpoint_270m.spec)
    model = transformers_model(checkpoint_270m.spec, tensors)

    @torch.inference_mode()
    def score(sent: list[tuple[list[int], int]]) -> list[tuple[float, bool]]:
        found = []
        for at in range(0, len(sent), 10):  # a batch reads the weights once; what pads its rows is behind them
            part = sent[at : at + 10]
            longest = max(len(tokens) for tokens, _ in part)
            rows = model(torch.tensor([tokens + [0] * (longest - len(tokens)) for tokens, _ in part])).logits
            for row, (tokens, begin) in zip(rows, part, strict=True):
                logits, wanted = row[begin - 1 : len(tokens) - 1].double(), torch.tensor(tokens[begin:])
                total = logits.log_softmax(-1).gather(1, wanted[:, None]).sum()
                found.append((float(total), bool((logits.argmax(-1) == wanted).all())))
        return found

    return score


@pytest.mark.parametrize("as_text", [False, True], ids=["ids", "text"])
def test_log_likelihoods_are_those_of_transformers(
    served_in_float32: Served, expected, tmp_path: Path, as_text: bool
) -> None:
    if not PROGRAM.exists():
        pytest.skip("lm-eval is not installed; make test-clients does it")
    served, data = served_in_float32, tmp_path / "items.jsonl"
    data.write_text("".join(json.dumps(item) + "\n" for item in ITEMS))
    (tmp_path / "choices.yaml").write_text(TASK % data)
    told = {"model": served.model, "base_url": f"{served.url}/v1/completions", "tokenizer_backend": "remote"}
    told |= {"num_concurrent": "4", "tokenized_requests": str(not as_text)}
    command = [PROGRAM, "--model", "local-completions", "--tasks", "choices", "--include_path", tmp_path]
    command += ["--model_args", ",".join(f"{k}={v}" for k, v in told.items())]
    env = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    env |= {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "home")}
    done = subprocess.run(
        [*command, "--log_samples", "--output_path", tmp_path / "out"], env=env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-10_000:]
    [samples] = (tmp_path / "out").rglob("samples_*.jsonl")
    found = {line["doc_id"]: line for line in map(json.loads, samples.read_text().splitlines())}
    assert len(found) == len(ITEMS) == 50

    def tokens(text: str, special: bool = False) -> list[int]:
        asked = {"prompt": text, "add_special_tokens": special}
        return httpx.post(f"{served.url}/tokenize", json=asked).json()["tokens"]

    # Begin of the continuation as lm-eval counts it. It knows nothing of the BOS that a text gets, so that it then
    # scores the context's last token too.
    sent = [
        (tokens(f"{item['text']} {choice}", as_text), len(tokens(item["text"])))
        for item in ITEMS
        for choice in item["choices"]
    ]
    answers = [answer for number in range(len(ITEMS)) for answer in found[number]["filtered_resps"]]
    wanted = expected(sent)
    assert [str(greedy) for _, greedy in answers] == [str(greedy) for _, greedy in wanted]
    worst = max(abs(float(a) - b) for (a, _), (b, _) in zip(answers, wanted, strict=True))
    greedy = sum(greedy for _, greedy in wanted)
    print(f"{2 * len(ITEMS)} continuations, worst difference {worst:.1e}, {greedy} of them greedy")
    assert worst < 2e-3 and greedy >= (0 if as_text else 5)
