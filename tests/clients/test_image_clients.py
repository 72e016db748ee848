"""Clients that send images, unmodified, to `wicore serve` over a tiny model that sees; transformers says the answer."""

from __future__ import annotations

import base64
import io
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from lazy import LazyModule
from PIL import Image
from real_server import Served, serving
from tiny_images import load_oracle, load_processor, write_image_source

from wicore_trt.cli.generate import command as generate
from wicore_trt.cli.main import run_command
from wicore_trt.client import Client
from wicore_trt.errors import InvalidRequestError
from wicore_trt.types import SamplingParams

openai = LazyModule("openai")
anthropic = LazyModule("anthropic")

HERE, ROOT, TOKENS = Path(__file__).parent, Path(__file__).parents[2], 8


@dataclass
class Seen:
    """A server, a picture, and what the model says of it: token ids and text."""

    served: Served
    picture: bytes
    token_ids: list[int]
    text: str
    prompt_tokens: int
    engine: Path
    continued: str
    """Continuation of a prompt that the picture begins."""

    @property
    def data(self) -> str:
        return base64.b64encode(self.picture).decode()


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    home = tmp_path_factory.mktemp("seen")
    source = write_image_source(home / "source")
    made = io.BytesIO()
    image = Image.frombytes("RGB", (96, 64), random.Random(2).randbytes(96 * 64 * 3))
    image.save(made, "PNG")
    processor = load_processor(source)
    turn = {"role": "user", "content": [{"type": "text", "text": "use"}, {"type": "image"}]}
    prompt = processor.tokenizer.apply_chat_template([turn], tokenize=False, add_generation_prompt=True)
    oracle, answers = load_oracle(source), []
    for one in (image, Image.new("RGB", image.size)):
        inputs = processor(text=prompt, images=[one], add_special_tokens=False, return_tensors="pt")
        with torch.inference_mode():
            found = oracle.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
        given = inputs["input_ids"].shape[1]
        answers.append(found[0, given:].tolist())
    inputs = processor(text="<start_of_image>use", images=[image], return_tensors="pt")
    with torch.inference_mode():
        found = oracle.generate(**inputs, max_new_tokens=TOKENS, do_sample=False)
    continued = processor.tokenizer.decode(found[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)
    ids = answers[0]
    assert ids != answers[1], "the picture makes no difference"
    build = [sys.executable, "-m", "wicore_trt.cli.main", "build", str(source), str(home / "engine")]
    subprocess.run([*build, "--dtype", "float32"], check=True)
    with serving(home / "engine", home / "log") as served:
        text = processor.tokenizer.decode(ids, skip_special_tokens=True)
        yield Seen(served, made.getvalue(), ids, text, given, home / "engine", continued)


def test_openai(seen: Seen) -> None:
    url = f"data:image/png;base64,{seen.data}"
    with openai.OpenAI(base_url=f"{seen.served.url}/v1", api_key="none", max_retries=0) as client:
        content = [{"type": "text", "text": "use"}, {"type": "image_url", "image_url": {"url": url, "detail": "auto"}}]
        found = client.chat.completions.create(
            model=seen.served.model, messages=[{"role": "user", "content": content}], max_completion_tokens=TOKENS,
            temperature=0, extra_body={"return_token_ids": True},
        )  # fmt: skip
        assert found.choices[0].token_ids == seen.token_ids and found.usage.prompt_tokens == seen.prompt_tokens
        parts = [{"type": "input_text", "text": "use"}, {"type": "input_image", "image_url": url, "detail": "auto"}]
        response = client.responses.create(
            model=seen.served.model, input=[{"role": "user", "content": parts}], max_output_tokens=TOKENS, temperature=0
        )
        assert response.output_text == found.choices[0].message.content == seen.text


def test_anthropic(seen: Seen) -> None:
    source = {"type": "base64", "media_type": "image/png", "data": seen.data}
    content = [{"type": "text", "text": "use"}, {"type": "image", "source": source}]
    with anthropic.Anthropic(base_url=seen.served.url, api_key="none", max_retries=0) as client:
        asked = {"model": seen.served.model, "messages": [{"role": "user", "content": content}]}
        with client.messages.stream(**asked, max_tokens=TOKENS, extra_body={"temperature": 0}) as stream:
            assert stream.get_final_text() == seen.text
        assert client.messages.count_tokens(**asked).input_tokens == seen.prompt_tokens


def test_our_client(seen: Seen) -> None:
    turns = [{"role": "user", "content": [{"type": "text", "text": "use"}, {"type": "image", "image": seen.picture}]}]
    with Client(seen.served.address) as client:
        [found] = client.chat(turns, SamplingParams(max_tokens=TOKENS, temperature=0))
    assert list(found.token_ids) == seen.token_ids and found.usage.prompt_tokens == seen.prompt_tokens


def test_wicore_generate(seen: Seen, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "a.png").write_bytes(seen.picture)
    generate(seen.engine, "use", image=[str(tmp_path / "a.png")], max_tokens=TOKENS, as_json=True)
    assert json.loads(capsys.readouterr().out)["text"] == seen.continued
    generate(seen.engine, "use", image=[str(tmp_path / "a.png")], max_tokens=TOKENS, as_json=True, chat=True)
    # the picture comes first: its line breaks and that of the turn are one token
    assert json.loads(capsys.readouterr().out)["prompt_tokens"] == seen.prompt_tokens - 1
    with pytest.raises(InvalidRequestError, match="cannot be read: No such file or directory.$"):
        generate(seen.engine, "use", image=[str(tmp_path / "none.png")])
    (tmp_path / "b.png").write_bytes(seen.picture[:999])
    files = [part for name in "ab" for part in ("--image", str(tmp_path / f"{name}.png"))]
    assert run_command(["generate", str(seen.engine), "use", *files]) == 1
    assert f"error: --image {tmp_path / 'b.png'}: The image cannot be read" in capsys.readouterr().err


def run(seen: Seen, tmp_path: Path, command: list[str], folder: Path) -> None:
    """Run a script of another environment, which prints the answer between bars."""
    (tmp_path / "a.png").write_bytes(seen.picture)
    told = {"BASE_URL": seen.served.url, "MODEL": seen.served.model, "PICTURE": str(tmp_path / "a.png")}
    env = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "PYTHON", "OPENAI"))}
    done = subprocess.run(command, cwd=folder, env=env | told, capture_output=True, text=True, timeout=300)
    answer = re.search(r"\|(.*)\|", done.stdout, re.DOTALL)
    assert answer and answer[1] == seen.text, done.stdout + done.stderr


@pytest.mark.long
def test_vercel(seen: Seen, tmp_path: Path) -> None:
    node = shutil.which("node")
    if node is None or not (HERE / "node" / "node_modules").is_dir():
        pytest.skip("no node, or the npm packages are not installed; make test-clients does it")
    run(seen, tmp_path, [node, "images.js"], HERE / "node")


@pytest.mark.long
def test_langchain(seen: Seen, tmp_path: Path) -> None:
    python = ROOT / ".venv-clients" / "bin" / "python"
    if not python.exists():
        pytest.skip(".venv-clients is not there; make test-clients makes it")
    run(seen, tmp_path, [str(python), "langchain_images.py"], HERE / "python")
