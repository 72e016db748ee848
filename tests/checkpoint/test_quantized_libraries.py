"""Quantized modules equal what the libraries that wrote them make of them, to the bit of a float32."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path

import pytest
import torch
from quantized_libraries import MAKERS, digest_of
from safetensors.torch import save_file

from wicore_trt.checkpoint.quantized import find_form
from wicore_trt.checkpoint.safetensors_io import SafetensorsFile
from wicore_trt.checkpoint.unpack import PackedModule, gather_modules
from wicore_trt.files import UntrustedFiles

RECORDED = Path(__file__).with_name("quantized_modules.json")


def read_module(config: dict[str, object], file: Path) -> PackedModule:
    form = find_form(file.parent, config, UntrustedFiles())
    assert form is not None
    held = SafetensorsFile(file)
    modules, taken = gather_modules(form, [held])
    assert [*modules] == ["down_proj"] and taken == {*held.tensors}
    return modules["down_proj"]


@pytest.mark.parametrize("name", MAKERS)
def test_recorded_modules_are_those_of_their_library(name: str, tmp_path: Path) -> None:
    said, file = json.loads(RECORDED.read_text())[name], tmp_path / "model.safetensors"
    file.write_bytes(zlib.decompress(base64.b64decode(said["file"])))
    module = read_module(said["config"], file)
    weight = torch.from_numpy(module.decode_rows(0, module.rows))
    assert list(weight.shape) == said["shape"] and digest_of(weight) == said["digest"]
    assert torch.equal(torch.from_numpy(module.decode_rows(5, 13)), weight[5:13])


@pytest.mark.long
@pytest.mark.parametrize("name", MAKERS)
def test_the_libraries_here_say_the_same(name: str, tmp_path: Path) -> None:
    try:
        config, parts, whole = MAKERS[name]()
    except ImportError as error:
        pytest.skip(f"its library is not here: {error}")
    file = tmp_path / "model.safetensors"
    save_file({f"down_proj.{part}": t.contiguous() for part, t in parts.items()}, file)
    module = read_module(config, file)
    assert torch.equal(torch.from_numpy(module.decode_rows(0, module.rows)), whole)
