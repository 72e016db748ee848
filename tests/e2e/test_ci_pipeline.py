"""The pipeline in examples/ci does what it says: its own commands, run here on Gemma 3 270M."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import tiny_source
import yaml

from wicore_trt.engine.directory import open_engine

ROOT = Path(__file__).parents[2]
PIPELINE = ROOT / "examples" / "ci" / "build-engines.yml"
pytest.importorskip("tensorrt_rtx_bindings")
pytestmark = pytest.mark.model


def steps() -> list[dict[str, Any]]:
    job: dict[str, Any] = yaml.safe_load(PIPELINE.read_text())["jobs"]["build"]
    return list(job["steps"])


def test_it_installs_extras_that_exist() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    [install] = [step["run"] for step in steps() if step.get("name") == "Install"]
    asked = re.search(r"pip install \"\.\[([\w,]+)\]", install)
    assert asked and set(asked[1].split(",")) <= set(extras)


@pytest.fixture
def two_layers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A source of two layers with the shapes of 270M's."""
    shapes = {"hidden_size": 640, "num_hidden_layers": 2, "num_key_value_heads": 1, "head_dim": 256}
    sizes = {"intermediate_size": 2048, "sliding_window": 512, "max_position_embeddings": 32768}
    monkeypatch.setattr(tiny_source, "CONFIG", tiny_source.CONFIG | shapes | sizes)
    return tiny_source.write_tiny_source(tmp_path / "source")


@pytest.mark.parametrize("targets", ["sm89", pytest.param(None, id="all", marks=pytest.mark.long)])
def test_its_commands_build_engines(targets: str | None, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """In one go, without a GPU: two layers for one of its three architectures, or the real weights for all. Every
    layer's attention is a fused kernel when decoding."""
    source = str(request.getfixturevalue("two_layers")) if targets else ""
    if not source:
        request.getfixturevalue("gemma_270m_gguf")  # the weights are on this machine
    document = yaml.safe_load(PIPELINE.read_text())
    assert len(document["env"]["TARGETS"].split(",")) == 3
    document["env"]["TARGETS"] = targets or document["env"]["TARGETS"]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {**os.environ, **document["env"], "SOURCE": source, "PATH": path}
    for step in steps():
        if "run" in step and step["name"] != "Install":
            subprocess.run(["bash", "-euc", step["run"]], cwd=tmp_path, env=environment, check=True)
    manifest = open_engine(tmp_path / "engine").manifest
    assert manifest.targets == document["env"]["TARGETS"].split(",")
    report = json.loads((tmp_path / "engine.inspect.json").read_text())
    decode = [plan for plan in report["compiled"]["plans"] if plan["phase"] == "decode"]
    assert len(decode) == len(manifest.targets) and all(
        plan["kernels"]["attention"] == manifest.spec.num_layers for plan in decode
    )
    assert all(file["state"] == "ok" for file in report["files"])
    [upload] = [step["with"] for step in steps() if "upload-artifact" in step.get("uses", "")]
    assert all((tmp_path / name.rstrip("/")).exists() for name in upload["path"].split())
