"""Pages of a wrong kernel must not outlive its cure: names change with all that KV values rest on, and nothing else."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

import wicore_trt
from wicore_trt.backends.torch import native
from wicore_trt.plugins.cpu_library import LIBRARY, open_library
from wicore_trt.runtime import kernels_name as module
from wicore_trt.runtime.kernels_name import kernels_name

FOLDERS = ("backends/torch",)


@pytest.fixture
def sources(tmp_path, monkeypatch) -> Path:
    """A copy of the package's sources, which may be changed."""
    root = tmp_path / "wicore_trt"
    for folder in ("model", "runtime", "backends/torch"):
        shutil.copytree(Path(wicore_trt.__file__).parent / folder, root / folder)
    monkeypatch.setattr(wicore_trt, "__file__", str(root / "__init__.py"))
    return root


def test_every_source_that_computes_is_in_the_name(sources):
    first = kernels_name("torch", FOLDERS)
    assert first.startswith("torch-") and len(first) == len("torch-") + 16
    seen = {first}
    for name in ("model/gemma3.py", "runtime/step_inputs.py", "backends/torch/native_ops.py", "backends/torch/ops.py"):
        text = (sources / name).read_text()
        (sources / name).write_text(text + "\n")
        seen.add(kernels_name("torch", FOLDERS))
        (sources / name).write_text(text)
    assert len(seen) == 5 and kernels_name("torch", FOLDERS) == first


def test_equal_installations_share_their_pages(sources, tmp_path, monkeypatch):
    first = kernels_name("torch", FOLDERS, "part")
    sources.rename(tmp_path / "elsewhere")
    monkeypatch.setattr(wicore_trt, "__file__", str(tmp_path / "elsewhere" / "__init__.py"))
    assert kernels_name("torch", FOLDERS, "part") == first


def test_libraries_and_parts_are_in_the_name(monkeypatch):
    first = kernels_name("triton", (), "a", b"b")
    assert len({first, kernels_name("triton", (), "ab", b""), kernels_name("triton", (), "a", b"c")}) == 3
    monkeypatch.setattr(module, "version", lambda package: "13.1.0.3")
    with_libraries = kernels_name("triton", (), "a", b"b")
    monkeypatch.setattr(module, "version", lambda package: "13.1.0.4")
    assert len({first, with_libraries, kernels_name("triton", (), "a", b"b")}) == 3
    seen = {kernels_name("triton", ())}
    for where, name in ((torch, "__version__"), (torch.version, "cuda")):
        with monkeypatch.context() as patch:
            patch.setattr(where, name, "0.0")
            seen.add(kernels_name("triton", ()))
    with monkeypatch.context() as patch:
        patch.setattr(torch.backends.cudnn, "version", lambda: 91_301)
        seen.add(kernels_name("triton", ()))
    assert len(seen) == 4


def test_another_build_of_the_native_library_has_another_name(tmp_path):
    library = open_library()
    assert library is not None, "the package is installed where a compiler is"
    changed = tmp_path / LIBRARY
    changed.write_bytes(Path(library._name).read_bytes() + b"\0")  # the loader does not look behind the sections
    ours, theirs = native.load_library(), native.load_library(changed)
    assert ours.isa == theirs.isa and ours.name != theirs.name and ours.name == native.load_library().name
    assert ours.name.startswith(f"{ours.isa}-")
