"""Engines that read images: what the digests cover, damage, interruption, and which engines have no images."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tiny_images import BOI, EOI, SOFT, write_image_source
from tiny_source import write_tiny_source

from wicore_trt import LLM
from wicore_trt.checkpoint.convert import convert
from wicore_trt.cli.main import run_command
from wicore_trt.engine import build
from wicore_trt.engine.build import build_engine
from wicore_trt.engine.directory import EngineDir, open_engine
from wicore_trt.engine.manifest import Manifest, compute_fingerprint
from wicore_trt.engine.options import BACKENDS
from wicore_trt.errors import CheckpointError, EngineFormatError
from wicore_trt.types import ImageInfo

FILE = "vision.safetensors"


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_image_source(tmp_path_factory.mktemp("images") / "m")


@pytest.fixture(scope="module")
def built(source: Path) -> EngineDir:
    return build_engine(source, source.parent / "e", dtype="float32")


def test_the_digests_cover_the_encoder(source: Path, built: EngineDir, tmp_path: Path) -> None:
    plain = build_engine(source, tmp_path / "t", dtype="float32", text_only=True)
    assert built.vision_file == built.path / FILE and FILE in built.manifest.files and plain.vision_file is None
    assert "vision" not in json.loads((plain.path / "engine.json").read_text())
    assert (
        len({e.manifest.fingerprint for e in (plain, built)})
        == len({e.manifest.weights_hash for e in (plain, built)})
        == 2
    )
    assert {*built.manifest.files} - {*plain.manifest.files} == {FILE}
    assert (
        plain.rebuild_advice.endswith(" --text-only --dtype float32 --force") and "--text" not in built.rebuild_advice
    )
    manifest = built.manifest
    assert manifest.vision
    assert compute_fingerprint(replace(manifest, vision=replace(manifest.vision, end_id=9))) != manifest.fingerprint
    other = build_engine(write_image_source(tmp_path / "n", seed=1), tmp_path / "o", dtype="float32").manifest
    assert other.weights_hash != manifest.weights_hash and other.vision == manifest.vision


def test_the_model_says_that_it_reads_images(built: EngineDir, source: Path, tmp_path: Path) -> None:
    with LLM(str(built.path)) as llm:
        assert llm.info.images == ImageInfo(size=56, tokens=4, begin_id=BOI, soft_id=SOFT, end_id=EOI)
    with LLM(str(build_engine(source, tmp_path / "t", text_only=True).path)) as llm:
        assert llm.info.images is None


def test_the_encoder_is_whole_and_once_whatever_the_ranks(source: Path, built: EngineDir, tmp_path: Path) -> None:
    checkpoint = convert(source, tmp_path / "c", dtype="float32", tp_size=2)
    engine = build_engine(checkpoint.path, tmp_path / "e")
    assert engine.vision_file and built.vision_file
    assert engine.vision_file.read_bytes() == built.vision_file.read_bytes()
    assert open_engine(engine.path, verify=True).manifest.tp_size == 2
    assert build_engine(checkpoint.path, tmp_path / "t", text_only=True).manifest.vision is None


def test_a_damaged_encoder_is_named(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    checkpoint = convert(source, tmp_path / "c")
    engine = build_engine(checkpoint.path, tmp_path / "e", text_only=False)
    random = np.random.default_rng(5)
    for path, opened in ((engine.path / FILE, engine.path), (checkpoint.path / FILE, None)):
        whole = path.read_bytes()
        for at in (0, 30, *random.integers(len(whole), size=6)):
            path.unlink()  # one file may be a link to the other
            path.write_bytes(whole[:at] + bytes([whole[at] ^ 4]) + whole[at + 1 :])
            if opened:
                with pytest.raises(EngineFormatError, match=f"{FILE}.*Rebuild it: wicore build"):
                    open_engine(opened)
            else:
                with pytest.raises(CheckpointError, match=f"{FILE}.*wicore convert"):
                    build_engine(checkpoint.path, tmp_path / "bad")
                assert not (tmp_path / "bad").exists()
        path.write_bytes(whole[:-1])
        with pytest.raises((EngineFormatError, CheckpointError), match=FILE):
            open_engine(opened, verify=False) if opened else build_engine(checkpoint.path, tmp_path / "bad")
        path.write_bytes(whole)
    assert run_command(["inspect", str(engine.path), "--verify", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["about"]["vision"]["tokens"] == 4


def test_a_manifest_and_its_file_agree(built: EngineDir) -> None:
    manifest, path = built.manifest, built.path / "engine.json"
    whole = path.read_text()
    assert manifest.vision
    files = {name: entry for name, entry in manifest.files.items() if name != FILE}

    def sealed(**changes: object) -> str:
        changed = replace(manifest, **changes)  # type: ignore[arg-type]
        return replace(changed, fingerprint=compute_fingerprint(changed)).to_json()

    for text, words in (
        (sealed(vision=None), f"files lists {FILE} for an engine without images"),
        (sealed(files=files), f"files lists {FILE} .* or lacks it"),
        (sealed(vision=replace(manifest.vision, soft_id=384)), "soft_id is 384; the text model has 384 tokens"),
        (sealed(vision=replace(manifest.vision, text_hidden_size=32)), "text_hidden_size is 32"),
    ):
        path.write_text(text)
        with pytest.raises(EngineFormatError, match=words):
            open_engine(built.path, verify=False)
    path.write_text(whole)
    assert isinstance(open_engine(built.path).manifest, Manifest)


def test_an_interrupted_build_leaves_nothing(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = build.place_weights

    def stop(path: Path, *args: object, **options: object) -> object:
        if path.name == FILE:
            raise KeyboardInterrupt
        return place(path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(build, "place_weights", stop)
    with pytest.raises(KeyboardInterrupt):
        build_engine(source, tmp_path / "e")
    assert not [*tmp_path.iterdir()]


class TextBackend:
    """A backend that has no image encoder."""

    def targets(self, options: object) -> list[str]:
        return ["any"]

    def default_context(self, limit: int) -> int:
        return limit

    def check(self, checkpoint: object, options: object) -> None:
        assert checkpoint.vision_file is None  # type: ignore[attr-defined]

    def compile(self, *args: object) -> dict[str, object]:
        return {}


@pytest.mark.parametrize("backend", ["tensorrt", "tensorrt-llm"])
def test_backends_of_text_leave_it_out_and_say_so(
    backend: str, source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(BACKENDS, backend, f"{__name__}:TextBackend")
    for name, text_only in (("a", False), ("b", True)):
        notes = list[str]()
        engine = build_engine(source, tmp_path / name, backend=backend, text_only=text_only, note=notes.append)
        assert engine.manifest.vision is None and FILE not in engine.manifest.files
        said = f"left aside: the image encoder; backend {backend} reads text alone."
        assert (said in notes) != text_only


def test_options_that_fit_nothing_are_refused(source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["build", str(source), str(tmp_path / "e"), "--mmproj", str(tmp_path / "p.gguf")]
    assert run_command(arguments) != 0 and "belongs to a GGUF model" in capsys.readouterr().err
    assert run_command([*arguments, "--text-only"]) == 3 and "--text-only take none" in capsys.readouterr().err
    assert run_command([*arguments[:3], "--text-only"]) == 0
    assert open_engine(tmp_path / "e").manifest.vision is None


def test_engines_of_text_models_are_as_before(tmp_path: Path) -> None:
    """The names of weights and of KV pages, which tiers on disk go by."""
    manifest = build_engine(write_tiny_source(tmp_path / "m"), tmp_path / "e").manifest
    assert manifest.weights_hash.startswith("32e6221defc01309") and manifest.fingerprint.startswith("80c9fc43a516a03d")
    assert "vision" not in manifest.to_dict()
