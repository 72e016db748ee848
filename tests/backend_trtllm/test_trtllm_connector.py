"""Pages go out to our tiers and come back byte by byte, through the life of requests; no wrong page ever does."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from backend_trtllm import trtllm_stand_in
from backend_trtllm.trtllm_engine_model import LAYERS, SIZE, WIDTH, EngineModel, arguments, model_directory
from copiers import PlainCopier

from wicore_trt.backends.trtllm import connector
from wicore_trt.errors import ConfigError, EnvironmentUnfitError
from wicore_trt.runtime.executor import Done

SEED = int.from_bytes(os.urandom(4), "little")
Make = Callable[..., EngineModel]


@pytest.fixture(autouse=True)
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trtllm_stand_in.install(monkeypatch)
    trtllm_stand_in.install_metadata(monkeypatch, tmp_path / "site")
    monkeypatch.setenv("WICORE_KV__HOST_BYTES", "1MiB")
    monkeypatch.setenv("WICORE_KV__DISK_PATH", str(tmp_path / "tier"))
    monkeypatch.setenv("WICORE_KV__DISK_BYTES", "4MiB")
    monkeypatch.setenv("WICORE_KV__DISK_FREE_BYTES", "0")
    monkeypatch.setattr(connector, "_pending", [])
    model_directory(tmp_path / "model", image_token_index=999)


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Make]:
    """Engines on one disk directory; the one before is closed first, as a restart is."""
    made: list[EngineModel] = []

    def start(**changes: Any) -> EngineModel:
        if made:
            made[-1].close()
        counts = changes.pop("counts_matched", False)
        made.append(EngineModel(connector, arguments(tmp_path / "model", **changes), counts_matched=counts))
        return made[-1]

    yield start
    if made:
        made[-1].close()


def prompt(length: int, seed: int = 0) -> list[int]:
    return random.Random(f"{SEED} {seed}").choices(range(500), k=length)


@pytest.mark.parametrize("counts_matched", [False, True])
@pytest.mark.parametrize("chunk", [3, 4, 64])
def test_a_prompt_comes_back(make: Make, counts_matched: bool, chunk: int) -> None:
    engine = make(counts_matched=counts_matched)
    tokens = prompt(18)
    assert engine.serve(tokens, answer=8, chunk=chunk) == 0
    engine.settle()
    assert engine.serve(tokens, chunk=chunk) == 16
    assert engine.serve(tokens[:16], chunk=chunk) == 12  # one token must be computed
    answered = [*tokens, *(500 + (tokens[-1] + i) % 97 for i in range(8))]
    assert engine.serve([*answered, 1], chunk=chunk) == 24  # generated tokens count too
    assert engine.serve(tokens[:3], chunk=chunk) == 0
    engine.check_idle()


@pytest.mark.parametrize("counts_matched", [False, True])
def test_what_follows_a_matched_prefix_is_saved_right(make: Make, counts_matched: bool) -> None:
    """Versions differ in whether computed_position counts matched tokens; neither may save pages too early."""
    engine = make(counts_matched=counts_matched)
    prefix, one, two = prompt(9), prompt(13, 1), prompt(13, 2)
    engine.serve([*prefix, *one])
    engine.settle()
    assert engine.serve([*prefix, *two], chunk=3) == 8
    engine.settle()
    assert engine.serve([*prefix, *two, 1]) == 20
    engine.check_idle()


def test_a_page_is_saved_when_it_is_full(make: Make) -> None:
    """Not before its last position was computed, though all of its tokens are known."""
    engine = make()
    running = engine.add(prompt(16))
    for count, pages in ((3, 0), (1, 1), (7, 2), (5, 4)):
        engine.step(running, count)
        engine.settle()
        assert len(list(engine.hub.tiers.lower.host.iterate_copies())) == pages
    engine.finish(running)
    engine.check_idle()


def test_identical_chunks_elsewhere_are_other_pages(make: Make) -> None:
    """Keys are chained: the same four tokens after other tokens have other KV."""
    engine = make()
    first, second, same = prompt(4, 1), prompt(4, 2), prompt(8, 3)
    engine.serve([*first, *same, 1])
    engine.settle()
    assert engine.serve([*second, *same, 1]) == 0
    assert engine.serve([*same, 1]) == 0
    assert engine.serve([*first, *same, 1]) == 12
    engine.check_idle()


def test_tenants_do_not_match(make: Make) -> None:
    engine = make()
    tokens = prompt(13)
    for salt in (None, 0, 7):
        assert engine.serve(tokens, salt) == 0
        engine.settle()
    assert engine.serve(tokens, 7) == engine.serve(tokens, 0) == engine.serve(tokens) == 12
    engine.check_idle()


def test_a_restart_is_warm(make: Make) -> None:
    tokens = prompt(22)
    make().serve(tokens)
    engine = make()
    assert engine.serve(tokens) == 20
    host, disk = engine.hub.tiers.lower.collect_stats()
    assert disk.read_bytes == 5 * LAYERS * 2 * SIZE * WIDTH * 2 and host.read_bytes == disk.read_bytes
    engine.check_idle()


def test_a_process_that_ends_keeps_its_pages(make: Make, tmp_path: Path) -> None:
    """TensorRT-LLM never tells a connector to close."""
    tokens = prompt(22)
    code = f"""
from pathlib import Path
from backend_trtllm import trtllm_stand_in
from backend_trtllm.trtllm_engine_model import EngineModel, arguments
trtllm_stand_in.install()
from wicore_trt.backends.trtllm import connector as trtllm_connector
EngineModel(trtllm_connector, arguments(Path({str(tmp_path / "model")!r}))).serve({tokens})
"""
    path = os.pathsep.join([str(tmp_path / "site"), str(Path(__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": path}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True, timeout=60, cwd=tmp_path)
    assert make().serve(tokens) == 20


@pytest.mark.parametrize(
    "changed", ["weights", "config", {"dtype": "float16"}, {"model_kwargs": {"rope": 1}}, "version", "salt"], ids=str
)
def test_another_engine_finds_nothing(
    make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changed: Any
) -> None:
    tokens = prompt(22)
    make().serve(tokens)
    if changed == "weights":
        (tmp_path / "model" / "model.safetensors").write_bytes(b"Weights")
    elif changed == "config":
        (tmp_path / "model" / "config.json").write_text('{"vocab_size": 1000, "x": 1}')
    elif changed == "version":
        trtllm_stand_in.install_metadata(monkeypatch, tmp_path / "other", "1.2.2")
    elif changed == "salt":
        monkeypatch.setenv("WICORE_KV__SALT", "operator")
    engine = make(**(changed if isinstance(changed, dict) else {}))
    assert engine.serve(tokens) == 0
    engine.check_idle()


def test_corruption_in_memory_is_a_shorter_match(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WICORE_KV__DISK_PATH")
    engine = make()
    tokens = prompt(22)
    engine.serve(tokens)
    engine.settle()
    host = engine.hub.tiers.lower.movers.host
    third = next(copy for copy in host.index.iterate_copies() if copy.page.index == 2)
    host.page_parts(third)[0][5] ^= 1
    assert engine.serve(tokens) == 8
    engine.settle()
    assert engine.serve(tokens) == 20  # computed again, and saved again
    engine.check_idle()


def test_corruption_on_disk_is_a_shorter_match(make: Make, tmp_path: Path) -> None:
    tokens = prompt(22)
    engine = make()
    engine.serve(tokens)
    engine.settle()
    host = engine.hub.tiers.lower.movers.host
    third = next(copy for copy in host.index.iterate_copies() if copy.page.index == 2)
    content = bytes(host.page_parts(third)[0])
    engine.close()
    spoiled = 0
    for path in (path for path in (tmp_path / "tier").rglob("*") if path.is_file()):
        data = path.read_bytes()
        if (at := data.find(content)) >= 0:
            path.write_bytes(data[: at + 7] + bytes([data[at + 7] ^ 64]) + data[at + 8 :])
            spoiled += 1
    assert spoiled == 1
    engine = make()
    assert engine.serve(tokens) == 8
    engine.check_idle()


def test_an_aborted_request_gives_its_pages_back(make: Make) -> None:
    """Aborted between match and load, and after some steps."""
    engine = make()
    tokens = prompt(22)
    engine.serve(tokens)
    engine.settle()
    running = engine.add(tokens)
    assert running.matched == 20
    host = engine.hub.tiers.lower.host
    assert sum(copy.readers for copy in host.iterate_copies()) == 5  # what was promised cannot leave
    engine.finish(running)
    running = engine.add(prompt(20, 4))
    engine.step(running, 6)
    engine.finish(running)
    engine.check_idle()


class SlowCopier(PlainCopier):
    """Holds saves back until `release`."""

    def __init__(self, inner: Any) -> None:
        self.inner, self.held = inner, []

    def digest(self, parts: Sequence[memoryview]) -> bytes:
        return self.inner.digest(parts)

    def to_host(self, group: str, slot: int, parts: Sequence[memoryview], done: Done, *, settled: bool = False) -> None:
        self.held.append((group, slot, parts, done))

    def to_device(self, *arguments: Any) -> None:
        self.inner.to_device(*arguments)

    def release(self) -> None:
        for arguments_ in self.held:
            self.inner.to_host(*arguments_)
        self.held = []


def test_blocks_stay_until_they_are_saved(make: Make) -> None:
    engine = make()
    copier = engine.hub.tiers.lower.movers.copier = SlowCopier(engine.hub.tiers.lower.movers.copier)
    tokens = prompt(13)
    running = engine.add(tokens)
    engine.prefill(running)
    assert engine.finish(running) and len(engine.saving) == 1
    engine.poll([])
    assert len(engine.saving) == 1 and len(engine.free) == len(engine.pool) - 4
    copier.release()
    engine.settle()
    assert len(engine.free) == len(engine.pool)
    assert engine.serve(tokens) == 12
    copier.release()
    engine.check_idle()


def test_the_engines_own_reuse(make: Make) -> None:
    """Tokens on the device are not promised again; pages that only the device has are saved."""
    engine = make()
    tokens = prompt(22)
    running = engine.add(tokens, device=8)
    assert running.matched == 0
    engine.prefill(running)
    engine.finish(running)
    engine.settle()
    assert engine.serve(tokens) == 20
    for device, matched in ((8, 12), (20, 0), (6, 0)):
        running = engine.add(tokens, device=device)
        assert running.matched == matched
        engine.prefill(running)
        engine.finish(running)
    engine.check_idle()


def test_a_slow_disk_promises_nothing(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens = prompt(22)
    make().serve(tokens)
    engine = make()
    monkeypatch.setattr(connector, "MATCH_S", 0.0)
    assert engine.serve(tokens) == 0
    monkeypatch.undo()
    engine.check_idle()


@pytest.mark.parametrize("attributes", [{"multimodal_hashes": [[1]]}, {"lora": 3}, {"image": True}], ids=str)
def test_requests_that_tokens_do_not_name(make: Make, attributes: dict) -> None:
    """LoRA and images change KV values and not the tokens: such requests neither match nor are saved."""
    engine = make()
    tokens = [*prompt(21), 999 if "image" in attributes else 3]
    other = {"multimodal_hashes": attributes.get("multimodal_hashes")}
    for _ in range(2):
        running = engine.add(tokens, **other)
        if "lora" in attributes:
            engine.finish(running)
            running = engine.add(tokens, **other)
            running.request.lora_task_id = 3
            engine.scheduler.request_finished(running.request, [])
            running.matched, _ = engine.scheduler.get_num_new_matched_tokens(running.request, 0)
        assert running.matched == 0
        engine.prefill(running)
        engine.finish(running)
        engine.settle()
    assert not list(engine.hub.tiers.lower.host.iterate_copies())


def test_a_paused_request_is_left_alone(make: Make) -> None:
    """Its blocks changed, and the engine tells only what it takes for new."""
    engine = make()
    tokens = prompt(22)
    running = engine.add(tokens)
    engine.step(running, 8)
    assert engine.scheduler.get_num_new_matched_tokens(running.request, 0) == (0, False)
    before = len(list(engine.hub.tiers.lower.host.iterate_copies()))
    engine.prefill(running)
    engine.finish(running)
    engine.settle()
    assert len(list(engine.hub.tiers.lower.host.iterate_copies())) == before == 2


@pytest.mark.parametrize("disk", [True, False])
def test_random_traffic(make: Make, monkeypatch: pytest.MonkeyPatch, disk: bool) -> None:
    """Conversations that share beginnings, interleaved, in tiers far too small; `step` checks every byte."""
    monkeypatch.setenv("WICORE_KV__HOST_BYTES", str((12 if disk else 40) * 4096))
    if not disk:
        monkeypatch.delenv("WICORE_KV__DISK_PATH")
    engine, rng = make(), random.Random(SEED)
    roots = [prompt(rng.randrange(4, 40), i) for i in range(6)]
    running: list[Any] = []
    for i in range(150):
        if disk and i in (60, 110):
            while running:
                engine.finish(running.pop())
            engine.check_idle()
            loaded = engine.loaded
            engine = make()
            engine.loaded = loaded
        tokens = [*rng.choice(roots), *prompt(rng.randrange(1, 9), rng.randrange(3))]
        if len(engine.free) > 15:
            running.append(engine.add(tokens, rng.choice((None, None, 5))))
        for one in rng.sample(running, min(2, len(running))):
            if one.computed < len(one.tokens):
                engine.prefill(one, rng.randrange(1, 12))
            elif len(engine.free) > 2:
                engine.generate(one, rng.randrange(500))
        while len(running) > 3 or (running and rng.random() < 0.2):
            engine.finish(running.pop(rng.randrange(len(running))))
        if rng.random() < 0.1:
            engine.settle()  # or on a busy machine hardly a page is there before the traffic is over
    while running:
        engine.finish(running.pop())
    engine.check_idle()
    assert engine.loaded > 50, SEED


def test_what_it_refuses(make: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "model"
    for changes, words in (
        ({"tensor_parallel_size": 2}, "one rank"),
        ({"windows": [32, 128]}, "several KV pools"),
        ({"model": "google/gemma-3-1b-it"}, "no directory"),
    ):
        with pytest.raises(EnvironmentUnfitError, match=words):
            connector.WicoreScheduler(arguments(model, **changes))
    pool = torch.zeros(8, LAYERS, 2, SIZE * WIDTH)
    for bad, words in (
        ([pool, pool], "several KV pools"),
        (pool.transpose(1, 2), "contiguous"),
        (torch.zeros(8, 3, 3), "contiguous"),
        (torch.zeros(8), "contiguous"),
    ):
        worker = connector.WicoreWorker(arguments(model))
        with pytest.raises(EnvironmentUnfitError, match=words):
            worker.register_kv_caches(bad)
    monkeypatch.setattr(connector, "_pending", [])
    with pytest.raises(EnvironmentUnfitError, match="several KV pools"):
        make().worker.register_kv_caches(pool)
    monkeypatch.setenv("WICORE_KV__HOST_BYTES", "0")
    monkeypatch.delenv("WICORE_KV__DISK_PATH")
    with pytest.raises(ConfigError, match="HOST_BYTES"):
        connector.WicoreScheduler(arguments(model))


def test_the_classes_are_theirs(make: Make, tmp_path: Path) -> None:
    engine = make()
    assert connector.CONNECTOR["connector_module"] == connector.__name__
    assert isinstance(engine.scheduler, trtllm_stand_in.KvCacheConnectorScheduler)
    assert isinstance(engine.worker, trtllm_stand_in.KvCacheConnectorWorker)
    assert engine.scheduler.hub is engine.worker.hub
    other = connector.WicoreScheduler(arguments(tmp_path / "model"))
    assert other.hub is not engine.hub
    with pytest.raises(AttributeError):
        connector.Unknown  # noqa: B018
