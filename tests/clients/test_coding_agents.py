"""Coding agents from npm with their default settings against the real server: each reads a file, changes it, runs a
command and stops by itself. What the model says is scripted (scripted.py). The commands and settings are those of
docs/serving.md, which a test compares. Nothing but loopback is reached: sessions must not wait for other hosts.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import httpx
import pytest
from scripted import NOTHING, write_source

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(600)]
HERE = Path(__file__).parent
BIN = HERE / "node" / "node_modules" / ".bin"
DOCS = (HERE.parents[1] / "docs" / "serving.md").read_text()
TASK = "{}: fix greet.py and run it."
WRONG, RIGHT = 'print("helo")\n', 'print("hello")\n'
DONE = "It says hello now."
CODEX, CLAUDE = "gpt-5-codex", "claude-sonnet-4-5"
SESSION_S = 120


def call(name: str, **parameters: object) -> str:
    return json.dumps({"name": name, "parameters": parameters})


def result(name: str, holds: str = "") -> str:
    """A pattern of a function's result."""
    return rf'(?s)^<tool_response>\s*{{"name": "{name}".*{holds}'


def script(file: Path) -> list[tuple[str, str]]:
    """Answers of the model in the sessions of all clients, whose tools differ in name."""
    fix = f"sed -i s/helo/hello/ {file}"
    return [
        # Codex: one tool runs everything.
        (result("exec_command", "RAN"), DONE),
        (result("exec_command", "CHANGED"), call("exec_command", cmd=f"python3 {file} && echo RAN")),
        (result("exec_command", "helo"), call("exec_command", cmd=f"{fix} && echo CHANGED")),
        # Claude Code.
        (result("Read"), call("Edit", file_path=str(file), old_string="helo", new_string="hello")),
        (result("Edit"), call("Bash", command=f"python3 {file}", description="Run it.")),
        (result("Bash", "hello"), DONE),
        ("Write the title", '{"title": "Greet properly"}'),
        # opencode.
        (result("read"), call("edit", filePath=str(file), oldString="helo", newString="hello")),
        (result("edit"), call("bash", command=f"python3 {file}", description="Run it.")),
        (result("bash", "hello"), DONE),
        ("(?i)generate a title", "Greet properly"),
        # How each begins.
        (re.escape(TASK.format("codex")), call("exec_command", cmd=f"cat {file}")),
        (re.escape(TASK.format("claude")), call("Read", file_path=str(file))),
        (re.escape(TASK.format("opencode")), call("read", filePath=str(file))),
    ]


@dataclass
class Scripted:
    url: str
    log: Path
    file: Path

    def lines(self) -> list[str]:
        """Access lines of generations so far."""
        return [line for line in self.log.read_text().splitlines() if re.search(r"INFO POST /v1/\S+ \d+ ", line)]


@pytest.fixture(scope="module")
def scripted(engine_270m: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scripted]:
    folder = tmp_path_factory.mktemp("scripted")
    source, engine = write_source(folder / "source", engine_270m), folder / "engine"
    build = [sys.executable, "-m", "wicore_trt.cli.main", "build", str(source), str(engine)]
    subprocess.run(build, check=True, stdout=subprocess.DEVNULL)
    file = folder / "work" / "greet.py"
    file.parent.mkdir()
    (folder / "script.json").write_text(json.dumps(script(file)))
    command = [sys.executable, str(HERE / "scripted.py"), str(engine), str(folder / "script.json")]
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, f"local,{CODEX},{CLAUDE}"], stdout=subprocess.PIPE, stderr=log, text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url, (folder / "log").read_text()
        yield Scripted(url, folder / "log", file)
        process.terminate()
        assert process.wait(60) == 0
    finally:
        process.kill()


def session(scripted: Scripted, home: Path, name: str, arguments: list[str], **environment: str) -> list[str]:
    """Run a client to its end; the access lines of its requests. Fails unless it has done the task."""
    if not (BIN / name).exists():
        pytest.skip(f"{name} is not installed; make test-clients does it")
    scripted.file.write_text(WRONG)
    before = len(scripted.lines())
    env = {"PATH": os.environ["PATH"], "HOME": str(home), "TERM": "dumb", "LANG": "C.UTF-8", **environment}
    try:
        done = subprocess.run(
            [str(BIN / name), *arguments], cwd=scripted.file.parent, env=env, stdin=subprocess.DEVNULL, text=True,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=SESSION_S,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        pytest.fail(f"{name} did not end: {str(late.stdout)[-5000:]}")
    lines = scripted.lines()[before:]
    said = f"{done.stdout[-5000:]}\n" + "\n".join(lines)
    assert done.returncode == 0 and DONE in done.stdout and NOTHING not in done.stdout, said
    assert scripted.file.read_text() == RIGHT, said
    assert len(lines) >= 4 and all(re.search(r" 200 .* finish=stop ", line) for line in lines), said
    return lines


def documented(block: str, **values: str) -> str:
    """A block of docs/serving.md as it stands there, with values in place of its own."""
    assert block in DOCS, f"docs/serving.md does not say:\n{block}"
    for known, value in values.items():
        block = block.replace(known, value)
    return block


CODEX_CONFIG = """\
model = "gpt-5-codex"
model_provider = "wicore"

[model_providers.wicore]
name = "WiCore-TRT"
base_url = "http://127.0.0.1:8000/v1"
wire_api = "responses"
env_key = "GEMMA_KEY"
"""
CLAUDE_ENV = """\
export ANTHROPIC_BASE_URL=http://127.0.0.1:8000
export ANTHROPIC_AUTH_TOKEN=any-key
export ANTHROPIC_MODEL=claude-sonnet-4-5
export ANTHROPIC_DEFAULT_HAIKU_MODEL=claude-sonnet-4-5
"""


def test_codex(scripted: Scripted, tmp_path: Path) -> None:
    folder = tmp_path / ".codex"
    folder.mkdir()
    config = documented(CODEX_CONFIG).replace("http://127.0.0.1:8000", scripted.url)
    (folder / "config.toml").write_text(config)
    arguments = ["exec", "--skip-git-repo-check", "--sandbox", "danger-full-access", TASK.format("codex")]
    lines = session(scripted, tmp_path, "codex", arguments, GEMMA_KEY="made-up")
    assert all(" POST /v1/responses " in line and "tools_left_out=web_search " in line for line in lines)


def test_claude_code(scripted: Scripted, tmp_path: Path) -> None:
    lines = documented(CLAUDE_ENV).replace("http://127.0.0.1:8000", scripted.url).splitlines()
    environment = dict(line.removeprefix("export ").split("=", 1) for line in lines)
    arguments = ["-p", TASK.format("claude"), "--allowedTools", "Bash,Read,Edit"]
    lines = session(scripted, tmp_path, "claude", arguments, **environment)
    assert all(" POST /v1/messages " in line for line in lines)


def test_opencode(scripted: Scripted, tmp_path: Path) -> None:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "WiCore-TRT",
        "options": {"baseURL": f"{scripted.url}/v1", "apiKey": "made-up"},
        "models": {"local": {"name": "local"}},
    }
    (tmp_path / "opencode.json").write_text(json.dumps({"model": "wicore/local", "provider": {"wicore": provider}}))
    config = str(tmp_path / "opencode.json")
    lines = session(scripted, tmp_path, "opencode", ["run", TASK.format("opencode")], OPENCODE_CONFIG=config)
    assert all(" POST /v1/chat/completions " in line for line in lines)


def test_the_names_of_the_clients_are_listed(scripted: Scripted) -> None:
    listed = httpx.get(f"{scripted.url}/v1/models").json()["data"]
    assert [model["id"] for model in listed] == ["local", CODEX, CLAUDE]
