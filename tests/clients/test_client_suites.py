"""Clients that people use, from npm and PyPI, against the real server and the real Gemma 3 270M.

They have a folder of Node's and virtual environments of their own, which `make test-clients` fills: their packages
exclude each other's and ours. Each file of node/ and python/ is one suite, which also runs alone, with BASE_URL and
MODEL in its environment.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from real_server import Served

pytestmark = [
    *(pytest.mark.model, pytest.mark.long, pytest.mark.timeout(1200)),
    pytest.mark.parametrize("served", ["270m"], indirect=True),
]
HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PYTHON = {
    "langchain": ".venv-clients",
    "instructor": ".venv-clients",
    "agents": ".venv-clients",
    "litellm": ".venv-clients-litellm",
    "llama_index": ".venv-clients-litellm",
}
"""Suites, and where their packages lie: litellm is for an older openai than the others."""
PYTEST = (
    f"-m pytest --noconftest -c {os.devnull} -p no:cacheprovider -q --tb=short -o asyncio_mode=auto"
    " -o asyncio_default_test_loop_scope=session -o asyncio_default_fixture_loop_scope=session"
).split()
"""One event loop for all tests: some clients keep a connection for the next one."""


def run(served: Served, command: list[str], folder: Path, passed: str) -> None:
    """Run a suite; `passed` finds the number of its tests that passed, and there must be some."""
    told = {"BASE_URL": served.url, "MODEL": served.model, "SERVER_PID": str(served.process.pid)}
    env = {**os.environ, **told, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}  # or litellm fetches it
    env = {name: value for name, value in env.items() if not name.startswith(("PYTEST", "PYTHON", "OPENAI"))}
    done = subprocess.run(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=1100
    )
    found = re.search(passed, done.stdout)
    assert done.returncode == 0 and found and int(found[1]) > 0, done.stdout[-20_000:]


@pytest.mark.parametrize("suite", sorted(path.name for path in (HERE / "node").glob("*.test.js")))
def test_node(served: Served, suite: str) -> None:
    node = shutil.which("node")
    if node is None:
        pytest.skip("node is not on PATH")
    if not (HERE / "node" / "node_modules").is_dir():
        pytest.skip("the npm packages are not installed; make test-clients does it")
    run(served, [node, "--test", "--test-reporter=tap", suite], HERE / "node", r"(?m)^# pass (\d+)$")


@pytest.mark.parametrize("suite", PYTHON)
def test_python(served: Served, suite: str) -> None:
    python = ROOT / PYTHON[suite] / "bin" / "python"
    if not python.exists():
        pytest.skip(f"{PYTHON[suite]} is not there; make test-clients makes it")
    run(served, [str(python), *PYTEST, f"{suite}_suite.py"], HERE / "python", r"(\d+) passed")
