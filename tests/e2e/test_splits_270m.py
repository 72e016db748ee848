"""The real 270M over host and disk, with loads that come early, late or wrongly estimated: tokens as without tiers.

Conversations come back in random order, after restarts with a warm disk too; the disk is slow, fast or both during one
load, and what the planner believes of the machine is now and then far off, so that it splits wherever it can.
"""

from __future__ import annotations

import random
import time
from collections import Counter
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from unittest import mock

import pytest
from fakes import clear_pool

from wicore_trt.config import load_settings
from wicore_trt.core import assemble, assemble_kv
from wicore_trt.core.assemble import load_engine
from wicore_trt.kv.disk.files import Files
from wicore_trt.kv.prefix.rates import DISK_PRIOR, HOST_PRIOR, TierMeter
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.types import GenerateRequest, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.long]  # tests/oracle has splits in the default suite

TEXT = " ".join(topics[name] for name in sorted(topics))
ANSWER = 4
BYTES_PER_TOKEN = 12_000
"""Of a prefix of some hundred tokens with its window."""
PARAMS = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)


class Weather(Files):
    """Reads take as long as `rate` bytes a second say, which changes now and then, also within a load."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self.rate = 0.0

    def preadv(self, fd, buffers, offset):
        if self._rng.random() < 0.05:
            self.rate = self._rng.choice([0.0, 0.0, 3e6, 2e7, 1e8])
        if self.rate:
            time.sleep(min(0.05, sum(map(len, buffers)) / self.rate))
        return super().preadv(fd, buffers, offset)


class Engine:
    """Lives of one engine on one executor and one directory."""

    def __init__(self, path: Path, engine: Path, rng: random.Random, tokenizer: Tokenizer) -> None:
        self.rng, self.files = rng, Weather(rng)
        self.tokenizer = mock.patch.object(Tokenizer, "from_files", lambda *_: tokenizer)  # reading it takes seconds
        self.settings = load_settings(
            None,
            {
                "engine": str(engine), "executor.threads": 1, "kv.device_bytes": "28MB", "kv.salt": "s",
                "scheduler.max_context": 1000, "scheduler.max_batch_tokens": 64, "kv.host_bytes": "60MB",
                "kv.disk_path": str(path), "kv.disk_bytes": "1GB", "kv.disk_free_bytes": 0,
            },
        )  # fmt: skip
        self.executor = None
        self.counts: Counter[str] = Counter()
        self.open()

    def open(self) -> None:
        make_cache = partial(assemble_kv.make_cache, files=self.files)
        with mock.patch.object(assemble, "make_cache", make_cache), self.tokenizer:
            loaded = load_engine(self.settings, self.executor)
        self.core, self.executor = loaded.core, loaded.core.executor
        self.scheduler, self.loader = self.core.scheduler, self.core.scheduler.loader
        begin, jump = self.loader.begin_load, self.loader.end_load

        def begun(pages, chosen, **room):
            done = begin(pages, chosen, **room)
            self.counts[chosen.decision if done else "no room"] += 1
            return done

        def jumped(pages, computed):
            self.counts["jump"] += 1
            self.counts["jump after computing"] += computed > 0
            return jump(pages, computed)

        self.loader.begin_load, self.loader.end_load = begun, jumped

    def restart(self) -> None:
        assert not self.loader.refused
        self.core.scheduler.manager.close(60.0)
        self.open()
        self.counts["restart"] += 1

    def forget_device(self) -> None:
        """As when others filled it."""
        for pool in self.scheduler.manager.pools.values():
            clear_pool(pool)

    def misjudge(self) -> None:
        """What the meters say need not be so: loading seems to take about as long as computing, so plans are splits."""
        tokens_per_s = self.rng.choice([60.0, 300.0, 2000.0])
        while not self.loader._probed.empty():
            self.loader._probed.get_nowait()
        self.scheduler.prefill.__init__()
        self.scheduler.prefill.observe_step([(0, 64)], 64 / tokens_per_s)
        for name, prior in (("host_meter", HOST_PRIOR), ("disk_meter", DISK_PRIOR)):
            meter = TierMeter(prior)
            bytes_per_s = BYTES_PER_TOKEN * tokens_per_s * self.rng.choice([0.5, 1.0, 2.0, 4.0, 1000.0])
            meter.observe_read(10 << 20, (10 << 20) / bytes_per_s, now=self.loader._clock())
            setattr(self.loader, name, meter)

    def ask(self, requests: dict[str, list[int]]) -> dict[str, list[int]]:
        got: dict[str, list[int]] = {name: [] for name in requests}
        for name, prompt in requests.items():
            self.core.add(GenerateRequest(name, tuple(prompt), PARAMS))
        while self.core.has_work:
            for output in self.core.step():
                assert output.error is None, output.error
                got[output.request_key] += output.token_ids
        return got


def compare(engine_270m: Path, path: Path, conversations: int, seed: int) -> Counter[str]:
    """Ask so many questions about known texts and compare with an engine that has no tiers; what was reached."""
    rng = random.Random(seed)
    plain = load_engine(
        load_settings(
            None,
            {
                "engine": str(engine_270m), "executor.threads": 1, "kv.device_bytes": "400MB",
                "scheduler.max_context": 1000, "scheduler.max_batch_tokens": 256,
            },
        )
    )  # fmt: skip
    encode = plain.tokenizer.encode
    texts = []
    for _ in range(max(3, conversations // 12)):
        start = rng.randrange(len(TEXT) - 8000)
        texts.append(encode(TEXT[start : start + 8000])[: rng.randint(250, 900)])
    questions = [encode(f" Number {i}:", add_bos=False) for i in range(40)]
    engine = Engine(path, engine_270m, rng, plain.tokenizer)
    asked = 0
    while asked < conversations:
        if asked and rng.random() < 0.08:
            engine.restart()
        if rng.random() < 0.6:
            engine.forget_device()
        if rng.random() < 0.7:
            engine.misjudge()
        batch = {f"c{asked + k}": rng.choice(texts) + rng.choice(questions) for k in range(rng.choice([1, 1, 1, 3]))}
        right = {}
        for name, prompt in batch.items():
            plain.core.add(GenerateRequest(name, tuple(prompt), PARAMS))
            while plain.core.has_work:
                for output in plain.core.step():
                    right.setdefault(name, []).extend(output.token_ids)
        assert engine.ask(batch) == right, f"seed {seed}, after {asked} conversations"
        asked += len(batch)
    engine.counts["conversations"] = asked
    engine.counts["hits from disk"] = engine.loader.tiers.hit_tokens["disk"]
    engine.core.close()
    plain.core.close()
    return engine.counts


@pytest.mark.timeout(5400)
def test_five_hundred_conversations_with_splits_give_the_tokens_of_no_tiers(engine_270m, tmp_path):
    counts = compare(engine_270m, tmp_path / "kv", 500, seed=2)
    print(dict(counts))
    assert counts["split"] >= 50 and counts["jump after computing"] >= 30 and counts["restart"] >= 10
