"""The server of the campaigns: `wicore serve`'s own processes over an engine of fixed step time that keeps constraints.

    python parts.py '{"step_s": 0.02, "server": {...}}'

Prints the address of gRPC, the URL of HTTP, and the file into which the front writes what it holds when it gets
SIGUSR1: tasks, places, bytes of bodies.
"""

from __future__ import annotations

import asyncio
import gc
import json
import os
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

TESTS = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(TESTS / "hostile"), str(TESTS / "http"), str(TESTS), str(TESTS.parent)]

from constrained_web import WebCharTokenizer  # noqa: E402
from fakes import FakeEncoder  # noqa: E402
from web import IMAGES  # noqa: E402

from benchmarks.serve import paced  # noqa: E402
from wicore_trt.access import log  # noqa: E402
from wicore_trt.config import LoadedSettings, SchedulerSettings, ServerSettings, Settings  # noqa: E402
from wicore_trt.core.engine import EngineCore  # noqa: E402
from wicore_trt.core.shares import Gate  # noqa: E402
from wicore_trt.errors import InvalidRequestError  # noqa: E402
from wicore_trt.grammar.matcher import Grammars  # noqa: E402
from wicore_trt.kv.manager import CacheOptions, KVCacheManager  # noqa: E402
from wicore_trt.kv.pages.hashing import KeyChain  # noqa: E402
from wicore_trt.process.supervisor import Supervisor  # noqa: E402
from wicore_trt.runtime.batch import SampledTokens, StepBatch, StepResult  # noqa: E402
from wicore_trt.schedule.scheduler import Scheduler  # noqa: E402

SEQUENCES = 256
PORTS = {"port": 0, "http_port": 0}
REPORT = "WICORE_HOSTILE_REPORT"


class Tokenizer(WebCharTokenizer):
    """Refuses by its length what is too long, as the real one."""

    reads_images = True

    def encode(self, text, *, add_bos=True, max_tokens=None):
        if max_tokens is not None and len(text) > max_tokens:
            raise InvalidRequestError(f"The text has {len(text)} characters.", field="prompt")
        return super().encode(text)


class Executor(paced.PacedExecutor):
    """Constrained sequences get one of the tokens that are allowed, by length; the end where there is no other."""

    def execute(self, batch: StepBatch) -> StepResult:
        result = super().execute(batch)
        by_id = {piece.seq_id: piece for piece in batch.slices}
        kept = []
        for found in result.sampled:
            piece = by_id[found.seq_id]
            if isinstance(piece.mask, str):
                result.failed[found.seq_id] = piece.mask
                continue
            if piece.mask is not None:
                token = self._choose(piece.mask, piece.start + len(piece.token_ids))
                found = SampledTokens(found.seq_id, (token,))
            kept.append(found)
        return StepResult(kept, result.failed)

    @staticmethod
    def _choose(mask: bytes, length: int) -> int:
        allowed = [t for t in range(2, paced.VOCAB) if mask[t >> 3] >> (t & 7) & 1]
        return allowed[length % len(allowed)] if allowed else 1


def load_engine(settings: Settings):
    given = json.loads(os.environ[paced.OPTIONS])
    executor = Executor(given)
    executor.images = FakeEncoder()
    pages = {"global": SEQUENCES * paced.MAX_CONTEXT // paced.PAGE_TOKENS}
    executor.layout = replace(executor.layout, num_pages=pages)
    manager = KVCacheManager(pages, 1024, KeyChain("paced", paced.PAGE_TOKENS), options=CacheOptions(prefix_cache=True))
    scheduler = Scheduler(manager, max_batch_tokens=4096, max_sequences=SEQUENCES, slice_tokens=32)
    grammars = Grammars(Tokenizer(), paced.VOCAB)
    core = EngineCore(executor, scheduler, eos_ids=(1,), max_context=paced.MAX_CONTEXT, grammars=grammars)
    info = replace(paced.load_engine(settings)[1], chat=True, images=IMAGES)
    return core, info


def load_tokenizer(settings: Settings, checked_build: str | None) -> Tokenizer:
    signal.signal(signal.SIGUSR1, _report)
    return Tokenizer()


def _report(*_: object) -> None:
    held: Counter[str] = Counter()
    for found in gc.get_objects():
        if isinstance(found, Gate):
            held[found._what] += found.taken_places
    for task in asyncio.all_tasks():
        held[f"task {task.get_coro().__qualname__}"] += 1
    path = Path(os.environ[REPORT])
    path.with_suffix(".new").write_text(json.dumps(held))
    path.with_suffix(".new").rename(path)


def main(given: dict) -> int:
    os.environ[paced.OPTIONS] = json.dumps({"step_s": given.get("step_s", 0.02)})
    with tempfile.TemporaryDirectory() as folder:
        report = os.environ[REPORT] = f"{folder}/held"
        log.configure_logging(json_lines=False)
        settings = Settings(
            server=ServerSettings(
                **{"allowed_hosts": ("x",), "port": 0, "http_port": 0, "grace_s": 2.0, **given.get("server", {})}
            ),
            scheduler=SchedulerSettings(max_waiting=1024),
        )
        parts = {"load_engine": "parts:load_engine", "load_tokenizer": "parts:load_tokenizer"}

        def announce(address: str, url: str | None) -> None:
            print(address, url, report, flush=True)

        loaded = LoadedSettings(settings, {})
        return Supervisor(loaded, max_context=paced.MAX_CONTEXT, **parts, report_serving=announce).run()


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
