"""doctor always reports, whatever is broken, and exits 4 only for what makes the machine unfit."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from tiny_source import write_tiny_source

from wicore_trt.cli import _checks as checks
from wicore_trt.cli.main import run_command
from wicore_trt.engine.build import build_engine


def rows_of(tmp_path: Path, engine: Path | None = None, **ports: int) -> dict[str, checks.DoctorCheck]:
    ports = {"port": 0, "http_port": 0} | ports
    return {row.name: row for row in checks.check_machine(engine=engine, cache_dir=tmp_path, **ports)}


def test_report_is_complete_and_every_finding_has_a_fix(tmp_path: Path) -> None:
    rows = rows_of(tmp_path)
    wanted = [
        "python",
        "system",
        "cpu",
        "memory",
        "torch",
        "gpu",
        "extras",
        "versions",
        "disk",
        "port",
        "HTTP port",
    ]
    assert set(wanted) <= set(rows)
    for row in rows.values():
        assert row.state in (checks.OK, checks.WARN, checks.FAIL) and row.found
        assert bool(row.fix) == (row.state != checks.OK), row
    assert "could not be checked" not in str(rows)


def test_a_broken_check_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> checks.Finding:
        raise ValueError("no such file")

    names = [f"_check_{part}" for part in ("python", "cpu", "memory", "torch", "gpu", "memlock")]
    names += ["_native_kernels", "_list_versions"]
    count = len(rows_of(tmp_path))
    for name in names:
        monkeypatch.setattr(checks, name, broken)
    rows = checks.check_machine(engine=None, cache_dir=tmp_path, port=0, http_port=0)
    assert len(rows) == count
    assert sum("could not be checked: ValueError('no such file')" in row.found for row in rows) == len(names)


def test_engine_argument(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    engine = build_engine(write_tiny_source(tmp_path / "source"), tmp_path / "engine")
    assert rows_of(tmp_path, engine.path)["engine"].state == checks.OK
    content = engine.rank_files[0].read_bytes()
    engine.rank_files[0].write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    row = rows_of(tmp_path, engine.path)["engine"]
    assert row.state == checks.FAIL and "corrupted" in row.found and "--force" in row.fix
    assert run_command(["doctor", str(engine.path), "--json"]) == 4
    report = json.loads(capsys.readouterr().out)
    assert report["fit"] is False
    assert run_command(["doctor", str(tmp_path / "nothing")]) == 4
    assert "fail: engine:" in capsys.readouterr().out


def test_used_port(tmp_path: Path) -> None:
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        used = other.getsockname()[1]
        assert rows_of(tmp_path, port=used)["port"].fix.endswith("--grpc-port.")
        assert rows_of(tmp_path, http_port=used)["HTTP port"].fix.endswith("--http-port.")


def test_missing_torch_is_a_warning_because_builds_need_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = checks.find_spec
    monkeypatch.setattr(checks, "find_spec", lambda name: None if name == "torch" else real(name))
    rows = rows_of(tmp_path)
    assert rows["torch"].state == checks.WARN and "pip install" in rows["torch"].fix
    assert "lack torch" in rows["extras"].found


def test_read_only_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "access", lambda *_: False)  # root may write anywhere, so the answer is made up
    assert rows_of(tmp_path)["disk"].state == checks.FAIL


@pytest.mark.parametrize(
    ("output", "code", "state"),
    [("NVIDIA H100, 81559 MiB, 580.1, 9.0", 0, checks.OK), ("driver/library version mismatch", 9, checks.WARN)],
)
def test_gpu_through_nvidia_smi(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, output: str, code: int, state: str
) -> None:
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\necho '{output}'\nexit {code}\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.delitem(sys.modules, "torch", raising=False)
    said, found, _ = checks._check_gpu()
    assert said == state and output in found


LINKS = """\t\x1b[4mGPU0\tGPU1\tGPU2\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tPXB\t0-31\t0
GPU1\tNV18\t X \tSYS\tSYS\t0-31\t0
GPU2\tSYS\tSYS\t X \tSYS\t32-63\t1
NIC0\tPXB\tSYS\tSYS\t X

Legend:

  X    = Self
  NV#  = Connection traversing a bonded set of # NVLinks
"""
ACCESS = " \tGPU0\tGPU1\tGPU2\n GPU0\tX\tOK\tCNS\n GPU1\tOK\tX\tCNS\n GPU2\tCNS\tCNS\tX\n\nLegend:\n\n  X    = Self\n"


@pytest.mark.parametrize(
    ("gpus", "state", "said"),
    [
        (3, checks.WARN, "0-1: NV18, peer access; 0-2 1-2: SYS, no peer access"),
        (2, checks.OK, "0-1: NV18, peer access"),
        (1, checks.OK, "no two GPUs"),
    ],
)
def test_links_of_gpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gpus: int, state: str, said: str) -> None:
    def shown(text: str) -> str:
        lines = text.splitlines(keepends=True)
        return "".join(line for line in lines if not any(line.lstrip().startswith(f"GPU{n}") for n in range(gpus, 9)))

    (tmp_path / "links").write_text(shown(LINKS))
    (tmp_path / "access").write_text(shown(ACCESS))
    tool = tmp_path / "nvidia-smi"
    tool.write_text(f'#!/bin/sh\n[ "$2" = -m ] && exec cat {tmp_path}/links\ncat {tmp_path}/access\n')
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert checks._check_gpu_links()[:2] == (state, said)


def test_hugging_face_flags(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert rows_of(tmp_path)["hugging face"].found == "token absent, HF_HUB_OFFLINE set"
    monkeypatch.setenv("HF_HUB_OFFLINE", "0")
    assert rows_of(tmp_path)["hugging face"].state == checks.WARN
    (tmp_path / "token").write_text("hf_secret")
    row = rows_of(tmp_path)["hugging face"]
    assert row.found == "token present, HF_HUB_OFFLINE not set" and "hf_secret" not in str(row)


def test_starts_with_the_standard_library_alone(tmp_path: Path) -> None:
    """The checks load in an interpreter that has no third-party package at all."""
    source = Path(checks.__file__)
    code = (
        f"import runpy; m = runpy.run_path({str(source)!r}); assert len(m['check_machine'](engine=None, "
        f"cache_dir=m['Path']({str(tmp_path)!r}), port=0, http_port=0)) > 10"
    )
    done = subprocess.run([sys.executable, "-S", "-I", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
