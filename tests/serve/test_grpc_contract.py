"""The wire contract: the committed code is what the .proto gives, and the .proto keeps to the style."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import re
import shutil
import subprocess

import pytest
from serve.generate_proto import GEN_DIR, PROTO_DIR, generate

from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.types import SamplingParams


def test_the_committed_code_is_what_the_proto_files_give(tmp_path):
    pytest.importorskip("grpc_tools", reason="grpcio-tools is not installed (dependency group dev)")
    source = (GEN_DIR / "wicore/inference/v1/inference_pb2_grpc.py").read_text()
    committed_by = re.search(r"GRPC_GENERATED_VERSION = '(.+)'", source)[1]
    installed = importlib.metadata.version("grpcio-tools")
    if installed != committed_by:
        pytest.skip(f"committed by grpcio-tools {committed_by}; {installed} is installed")
    written = {path.relative_to(tmp_path): path.read_bytes() for path in generate(tmp_path)}
    committed = {p.relative_to(GEN_DIR): p.read_bytes() for p in GEN_DIR.rglob("*.py*") if p.suffix in (".py", ".pyi")}
    assert written == committed, "run: make proto"


@pytest.mark.parametrize("command", [["lint"], ["format", "--diff", "--exit-code"]])
def test_buf_has_nothing_to_say(command):
    if shutil.which("buf") is None:
        pytest.skip("buf is not on PATH (npm install -g @bufbuild/buf)")
    result = subprocess.run(["buf", *command], cwd=PROTO_DIR, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


def test_every_sampling_parameter_is_on_the_wire_and_can_be_left_unset():
    on_wire = {field.name: field for field in pb2.SamplingParams.DESCRIPTOR.fields}
    assert set(on_wire) == {field.name for field in dataclasses.fields(SamplingParams)}
    for name, field in on_wire.items():
        assert field.has_presence or field.is_repeated, f"{name} cannot be told apart from its zero"


def test_enums_have_an_unspecified_zero_and_token_ids_are_packed():
    for enum in pb2.DESCRIPTOR.enum_types_by_name.values():
        assert enum.values_by_number[0].name.endswith("_UNSPECIFIED")
    ids = [5, 300, 262_143]
    assert pb2.TokenIds(ids=ids).ByteSize() == 2 + 1 + 2 + 3
