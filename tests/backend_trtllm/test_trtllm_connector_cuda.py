"""The connector on a GPU pool: copies are in order with the forward pass on a stream of its own."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
import torch
from backend_trtllm import trtllm_stand_in
from backend_trtllm.trtllm_engine_model import EngineModel, arguments, model_directory

from wicore_trt.backends.trtllm import connector

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")
SEED = int.from_bytes(os.urandom(4), "little")


def test_saves_and_loads_follow_the_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The stream sleeps before each pass writes; a copy on any other stream would see poison."""
    trtllm_stand_in.install(monkeypatch)
    trtllm_stand_in.install_metadata(monkeypatch, tmp_path / "site")
    monkeypatch.setenv("WICORE_KV__HOST_BYTES", "1MiB")
    monkeypatch.setattr(connector, "_pending", [])
    args = arguments(model_directory(tmp_path / "model"))
    stream = torch.cuda.Stream()
    engine = EngineModel(connector, args, device="cuda", stream=stream)
    written = engine._write

    def late(running: object, start: int, stop: int) -> None:
        torch.cuda._sleep(20_000_000)
        written(running, start, stop)  # type: ignore[arg-type]

    monkeypatch.setattr(engine, "_write", late)
    tokens = random.Random(SEED).choices(range(500), k=22)

    def serve() -> int:
        running = engine.add(tokens)
        with torch.cuda.stream(stream):  # the forward pass; the connector is called from outside of it
            while running.first or running.computed < len(tokens):
                engine.step(running, min(7, len(tokens) - running.computed - running.matched * running.first))
        stream.synchronize()
        engine.check(running)
        engine.finish(running)
        return running.matched

    assert serve() == 0
    engine.settle()
    assert serve() == 20
    engine.check_idle()
    engine.close()
