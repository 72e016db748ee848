"""An engine on a device that is not there, whose steps take the time they are told, and a tokenizer that costs little.

A step sleeps without the interpreter's lock in PIECES parts, as a real one gives it back for each of some calls, and
notes how long the thread waited for the lock when each part was over. It must not know who serves it.
"""

from __future__ import annotations

import ctypes
import json
import math
import os
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from wicore_trt.config import Settings
from wicore_trt.core.engine import EngineCore
from wicore_trt.core.limits import Limits
from wicore_trt.kv.manager import CacheOptions, KVCacheManager
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.model.spec import GLOBAL, Gemma3Spec
from wicore_trt.runtime.batch import SampledTokens, StepBatch, StepResult
from wicore_trt.runtime.executor import ImageEncoder, KVLayout
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.schedule.step_time import StepTime
from wicore_trt.types import ModelInfo

PIECES = 8
PAGE_TOKENS, MAX_CONTEXT, MAX_SEQUENCES = 32, 4096, 2048
VOCAB = 97
OPTIONS = "WICORE_PACED"
"""Environment variable of JSON: `step_s`, in which computing, `token_s` for each token, hides in part, and `row_s` more
for each sequence; `report`, a file that gets the waits of each step in milliseconds; `sequences` that run at once,
`target_ttft_s` and `target_itl_s`; `slice_tokens`, as executors have it; `ahead`, if the next step is to be started
before one has ended, as on a GPU."""
_SLEEP = """
#include <time.h>
long long sleep_until(long long ns) {
    struct timespec t = {ns / 1000000000, ns % 1000000000};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, 0)) {}
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000LL + t.tv_nsec;
}
"""


def sleeper() -> Any:
    """A function that sleeps until a time of CLOCK_MONOTONIC in ns without the interpreter's lock, and returns the time
    at which it woke up, before it has the lock again. Needs a C compiler."""
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder) / "sleep.c", Path(folder) / "sleep.so"
        source.write_text(_SLEEP)
        subprocess.run(["cc", "-O2", "-shared", "-fPIC", str(source), "-o", str(library)], check=True)
        function = ctypes.CDLL(str(library)).sleep_until
    function.argtypes, function.restype = [ctypes.c_longlong], ctypes.c_longlong
    return function


def token_after(length: int) -> int:
    """The token that follows so many."""
    return 65 + (length & 15)


class PacedExecutor:
    """Steps take what OPTIONS say, and every sequence gets a token."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        self.spec = Gemma3Spec(
            vocab_size=VOCAB, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1, head_dim=4,
            intermediate_size=8, query_pre_attn_scalar=4, rms_norm_eps=1e-6, rope_theta=1e6, rope_local_theta=1e4,
            rope_scaling_factor=1.0, sliding_window=1024, layer_groups=(GLOBAL,), max_position_embeddings=MAX_CONTEXT,
            tie_word_embeddings=True,
        )  # fmt: skip
        pages = MAX_SEQUENCES * MAX_CONTEXT // PAGE_TOKENS
        self.layout = KVLayout(PAGE_TOKENS, "float32", {GLOBAL: pages}, {GLOBAL: 8 * PAGE_TOKENS})
        self.graph_sizes: dict[int, tuple[int, ...]] = {}
        self.images: ImageEncoder | None = None
        self.kernels, self.max_batch_tokens, self.slice_tokens = "paced", 4096, given.get("slice_tokens", 32)
        self.max_sequences: int | None = None
        self.score_rows = 0
        self.copier: Any = self  # no page is moved
        self.broken = None
        self._step_s, self._row_s, self._token_s = (given.get(f"{name}_s", 0.0) for name in ("step", "row", "token"))
        self._report = given.get("report")
        self._sleep = sleeper()
        self.waits: list[tuple[float, float, int]] = []  # seconds of each step, of its waits, and its sequences

    def execute(self, batch: StepBatch) -> StepResult:
        begun = now = time.monotonic_ns()
        piece, waited = self._ns(batch) // PIECES, 0
        for _ in range(PIECES):
            woke = self._sleep(now + piece)
            now = time.monotonic_ns()
            waited += now - woke
        self.waits.append(((now - begun) / 1e9, waited / 1e9, len(batch.slices)))
        if self._report is not None and len(self.waits) % 100 == 0:
            Path(self._report).write_text(json.dumps(self.waits))
        return self._result(batch)

    def _ns(self, batch: StepBatch) -> int:
        """What a step takes: reading the weights and computing hide each other in part."""
        return int(1e9 * (math.hypot(self._step_s, batch.num_tokens * self._token_s) + len(batch.slices) * self._row_s))

    @staticmethod
    def _result(batch: StepBatch) -> StepResult:
        sampled = (piece for piece in batch.slices if piece.sample)
        return StepResult(
            [SampledTokens(piece.seq_id, (token_after(piece.start + len(piece.token_ids)),)) for piece in sampled]
        )

    def release(self, seq_id: int) -> None:
        """Nothing is kept."""

    def close(self) -> None:
        """Nothing is held."""


class AheadExecutor(PacedExecutor):
    """The device goes from one step to the next without the host."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        super().__init__(given)
        self._end_ns = 0
        self._submitted: deque[tuple[StepBatch, int]] = deque()

    def submit(self, batch: StepBatch) -> None:
        self._end_ns = max(self._end_ns, time.monotonic_ns()) + self._ns(batch)
        self._submitted.append((batch, self._end_ns))

    def collect(self) -> StepResult:
        batch, end = self._submitted.popleft()
        self._sleep(end)
        return self._result(batch)

    def leads(self, batch: StepBatch) -> bool:
        return True

    def execute(self, batch: StepBatch) -> StepResult:
        self.submit(batch)
        return self.collect()


class PlainTokenizer:
    """Token t is the character chr(32 + t)."""

    bos_id: int | None = None
    eos_ids = (1,)
    vocab_size = VOCAB
    has_chat = False
    turn_end: int | None = None
    chat_fault = chat_note = None
    takes_tools = False
    byte_ids: frozenset[int] = frozenset()
    longest_token = 1

    def encode(self, text: str, *, add_bos: bool = True, max_tokens: int | None = None) -> list[int]:
        return [(ord(c) - 32) % 95 + 2 for c in text]

    def apply_chat(self, messages: Iterable[Mapping[str, object]], **_: object) -> list[int]:
        return self.encode("".join(str(message["content"]) for message in messages))

    def token_text(self, token: int) -> str:
        return chr(32 + token)

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        return "".join(chr(32 + i) for i in ids)


def load_engine(settings: Settings | None = None) -> tuple[EngineCore, ModelInfo]:
    """As `process.engine.load_engine`."""
    given = json.loads(os.environ[OPTIONS])
    executor = (AheadExecutor if given.get("ahead") else PacedExecutor)(given)
    manager = KVCacheManager(
        executor.layout.num_pages, 1024, KeyChain("paced", PAGE_TOKENS), options=CacheOptions(prefix_cache=False)
    )
    sequences = given.get("sequences", MAX_SEQUENCES)
    scheduler = Scheduler(
        manager, max_batch_tokens=4096, max_sequences=sequences, slice_tokens=executor.slice_tokens,
        step_time=StepTime(given["target_itl_s"]) if "target_itl_s" in given else None,
    )  # fmt: skip
    core = EngineCore(executor, scheduler, eos_ids=(1,), max_context=MAX_CONTEXT)
    core.limits = Limits(target_ttft_s=given.get("target_ttft_s"))
    info = ModelInfo(
        model_id="paced", backend="none", kernels="paced", dtype="float32", kv_dtype="float32", quantization=None,
        max_context_tokens=MAX_CONTEXT, vocab_size=VOCAB, hidden_size=8, num_layers=1, num_heads=1, num_kv_heads=1,
        fingerprint="0", eos_token_ids=(1,), bos_token_id=None, chat=False,
    )  # fmt: skip
    return core, info


def load_tokenizer(settings: Settings | None = None, checked_build: str | None = None) -> PlainTokenizer:
    """As `serve.front.load_tokenizer`."""
    return PlainTokenizer()


def serve(
    http_port: int | None,
    tokenizer: str = f"{__name__}:load_tokenizer",
    keys_file: str | None = None,
) -> None:
    """Such an engine as `wicore serve` runs one; prints the address of gRPC and the URL of HTTP, where there is one.
    `tokenizer` loads the front's, as `process.supervisor.Supervisor` has it."""
    from wicore_trt.config import LoadedSettings, SchedulerSettings, ServerSettings
    from wicore_trt.process.supervisor import Supervisor

    settings = Settings(
        server=ServerSettings(port=0, http_port=http_port, keys_file=keys_file),
        scheduler=SchedulerSettings(max_waiting=4096),
    )

    announce = lambda *at: print(*filter(None, at), flush=True)  # noqa: E731
    Supervisor(
        LoadedSettings(settings, {}),
        load_engine=f"{__name__}:load_engine",
        load_tokenizer=tokenizer,
        report_serving=announce,
    ).run()
