"""Stand-ins for devices: an executor whose KV cache is checked memory and whose tokens are a pure function.

`FakeExecutor` writes into each page slot, for each position, a digest of the whole prefix up to that position, and
checks on every step that every position a query may look at holds the digest of this very sequence. A page that is
shared wrongly, overwritten early, slid out too soon or findable before it is written raises at once. The window must
be 2 or more, because a slice continues from the digest of the position before it.
"""

from __future__ import annotations

import math
import random
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from hashlib import blake2b
from itertools import pairwise
from math import lcm
from pathlib import Path

from copiers import PlainCopier
from fake_tokenizer import EOS, VOCAB, FakeTokenizer
from msgspec import structs

from wicore_trt.config import KVSettings
from wicore_trt.core.assemble_kv import make_cache
from wicore_trt.core.engine import EngineCore
from wicore_trt.kv.disk.files import Files
from wicore_trt.kv.manager import CacheOptions, KVCacheManager
from wicore_trt.kv.pages.hashing import KeyChain
from wicore_trt.kv.policy.by_name import make_policy
from wicore_trt.kv.pool import PagePool
from wicore_trt.model.spec import GLOBAL, LOCAL, Gemma3Spec
from wicore_trt.runtime.batch import UNREAD, SampledTokens, SequenceSlice, StepBatch, StepResult
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.types import ModelInfo, TokenLogprob

__all__ = ["EOS", "VOCAB", "FakeTokenizer"]


def tiny_spec(window: int, groups: tuple[str, ...] = (LOCAL, GLOBAL)) -> Gemma3Spec:
    """A spec of the smallest sizes, for engines that never compute."""
    return Gemma3Spec(
        vocab_size=VOCAB, hidden_size=8, num_layers=len(groups), num_heads=1, num_kv_heads=1, head_dim=4,
        intermediate_size=8, query_pre_attn_scalar=4, rms_norm_eps=1e-6, rope_theta=1e6, rope_local_theta=1e4,
        rope_scaling_factor=1.0, sliding_window=window, layer_groups=groups, max_position_embeddings=4096,
        tie_word_embeddings=True,
    )  # fmt: skip


def prefix_digests(tokens: list[int], salt: bytes = b"") -> list[bytes]:
    """Digest of tokens[: i + 1] for each i."""
    state, digests = blake2b(salt, digest_size=8), []
    for token in tokens:
        state.update(token.to_bytes(4, "little"))
        digests.append(state.digest())
    return digests


def next_token(tokens: list[int]) -> int:
    """The fake model: the next token is a function of all tokens so far; about 1 in 97 is EOS."""
    return int.from_bytes(prefix_digests(tokens)[-1], "little") % VOCAB


def greedy(prompt: list[int], max_tokens: int, *, ignore_eos: bool = False) -> list[int]:
    """What an engine over FakeExecutor must output for a prompt."""
    tokens = list(prompt)
    while len(tokens) - len(prompt) < max_tokens:
        tokens.append(next_token(tokens))
        if tokens[-1] == EOS and not ignore_eos:
            break
    return tokens[len(prompt) :]


class FakeEncoder:
    """An encoder of images that is done at once; `begun` are the pixels of all images that it encoded."""

    slots, tokens, pixel_bytes, parts, part_s = 4, 4, 3 * 8 * 8, 0, 0.0

    def __init__(self) -> None:
        self.begun: list[bytes] = []
        self._ended: list[tuple[int, str | None]] = []

    def begin(self, slot: int, pixels: bytes) -> int:
        self.begun.append(pixels)
        self._ended.append((slot, None))
        return slot

    def run_parts(self, count: int) -> None:
        raise NotImplementedError

    def is_finite(self, slot: int) -> bool:
        return True

    def take_ended(self, timeout_s: float = 0.0) -> list[tuple[int, str | None]]:
        ended, self._ended = self._ended, []
        return ended


class FakeExecutor(PlainCopier):
    """See the module's docstring. It is its own page copier. `fail_at` makes the step of that number raise;
    `step_s` slows steps down; `poison` lists seq_ids whose logits are not finite. `tokens_of` gives all tokens of a
    sequence, which no slice has."""

    def __init__(
        self, num_pages: dict[str, int], page_tokens: int, window: int, max_batch_tokens: int, score_rows: int = 0
    ) -> None:
        self.spec = tiny_spec(window, tuple(g for g in (LOCAL, GLOBAL) if g in num_pages))
        self.layout = KVLayout(page_tokens, "float32", num_pages, dict.fromkeys(num_pages, 8 * page_tokens))
        self.copier = self
        self.slice_tokens = page_tokens
        self.max_sequences: int | None = None
        self.score_rows, self.graph_sizes = score_rows, {}
        self.images: FakeEncoder | None = None
        self.kernels = "fake"
        self.max_batch_tokens = max_batch_tokens
        self.memory = {g: [[b""] * page_tokens for _ in range(n)] for g, n in num_pages.items()}
        self.steps: list[list[tuple[int, int]]] = []
        self.released: list[int] = []
        self.fail_at: int | None = None
        self.step_s = 0.0
        self.poison: set[int] = set()
        self.tokens_of: Callable[[int], list[int]]

    def watch(self, scheduler: Scheduler) -> None:
        """Know the tokens of its sequences."""
        self.tokens_of = lambda seq_id: next(s.tokens for s in scheduler.running if s.seq_id == seq_id)

    def share(self, slab_pages: dict[str, int] | None) -> None:
        """Writing a slot wipes those of the other group that lie in the same memory."""
        if slab_pages is not None:
            size = lcm(*slab_pages.values())
            page_bytes = {group: size // count for group, count in slab_pages.items()}
            self.layout = replace(self.layout, page_bytes=page_bytes, slab_pages=slab_pages)

    def _wipe(self, group: str, slot: int) -> None:
        for other, shared in self.layout.find_overlaps(group, slot)[1:]:
            self.memory[other][shared] = [b"wiped"] * self.layout.page_tokens

    def execute(self, batch: StepBatch) -> StepResult:
        if self.step_s:
            time.sleep(self.step_s)
        assert 0 < batch.num_tokens <= self.max_batch_tokens
        self.steps.append([(s.seq_id, len(s.token_ids)) for s in batch.slices])
        if self.fail_at is not None and len(self.steps) >= self.fail_at:
            raise RuntimeError("device lost")
        result = StepResult([])
        assert sum(len(s.targets) for s in batch.slices) <= self.score_rows
        for piece in batch.slices:
            if piece.seq_id in self.poison:
                result.failed[piece.seq_id] = "logits are not finite"
                continue
            token = self._run(piece)
            if piece.targets:
                result.prompt_logprobs[piece.seq_id] = self._scores(piece)
            if token is not None:
                result.sampled.append(SampledTokens(piece.seq_id, (token,)))
        return result

    def _run(self, piece) -> int | None:
        size = self.layout.page_tokens
        for group, memory in self.memory.items():
            table = piece.pages[group]
            writable = [slot for slot in table if slot >= 0]
            assert len(set(writable)) == len(writable), "one slot twice in one table"
            before = b"" if piece.start == 0 else memory[table[(piece.start - 1) // size]][(piece.start - 1) % size]
            for position, token in enumerate(piece.token_ids, piece.start):
                before = chain(before, token)
                memory[table[position // size]][position % size] = before
                if self.layout.slab_pages is not None:
                    self._wipe(group, table[position // size])
                first = max(0, position - self.spec.sliding_window + 1) if group == LOCAL else 0
                for page in {first // size, position // size}:
                    assert table[page] >= 0, f"{group} page {page} slid out while position {position} needs it"
        if not piece.sample:
            return None
        history = self.history(piece)
        self._check(piece, history)
        return next_token(history)

    def history(self, piece) -> list[int]:
        """All tokens up to the end of a slice that samples."""
        known = piece.known if isinstance(piece, Taken) else self.tokens_of(piece.seq_id)
        assert len(known) <= piece.start + len(piece.token_ids), "sampling before the last token was computed"
        return [*known[: piece.start], *piece.token_ids]

    def _scores(self, piece) -> list[TokenLogprob]:
        """From what is in the pages, as logits are."""
        size, table = self.layout.page_tokens, piece.pages[GLOBAL]
        return [
            fake_logprob(self.memory[GLOBAL][table[at // size]][at % size], token, piece.params.prompt_logprobs)
            for at, token in enumerate(piece.targets, piece.start)
        ]

    def _check(self, piece, history: list[int]) -> None:
        """Every position that the last query sees must hold this sequence's own prefix."""
        size, digest, truth, end = self.layout.page_tokens, b"", [], len(history)
        for token in history:
            digest = chain(digest, token)
            truth.append(digest)
        for group, memory in self.memory.items():
            first = max(0, end - self.spec.sliding_window) if group == LOCAL else 0
            for position in range(first, end):
                slot = piece.pages[group][position // size]
                assert slot >= 0, f"{group} page of position {position} is gone"
                assert memory[slot][position % size] == truth[position], f"{group}: wrong KV at position {position}"

    def to_host(self, group, slot, parts, done, *, settled=False) -> None:
        """Digests of a page, 8 bytes per position, zeros where nothing was written."""
        (part,) = parts
        part[:] = b"".join(digest.ljust(8, b"\0") for digest in self.memory[group][slot])
        done(None, 0.0)

    def to_device(self, group, slots, pages, done) -> None:
        for slot, (part,) in zip(slots, pages, strict=True):
            self.memory[group][slot] = [bytes(part[i : i + 8]) for i in range(0, len(part), 8)]
        done([None] * len(slots), 0.0)

    def release(self, seq_id: int) -> None:
        self.released.append(seq_id)

    def close(self) -> None:
        self.memory.clear()


class Gate:
    """Where the steps of an engine wait, so that what must happen beside them does at any speed of the machine. `let`
    lets so many pass, all by default; at the end of a `with` block all do."""

    def __init__(self, executor: FakeExecutor) -> None:
        self.left, self._change, execute = 0.0, threading.Condition(), executor.execute
        self.waits = False  # a step stands here
        executor.execute = lambda batch: self._take_turn() and execute(batch)

    def _take_turn(self) -> bool:
        with self._change:
            self.waits = True
            assert self._change.wait_for(lambda: self.left > 0, 120), "nobody let this step pass"
            self.waits = False
            self.left -= 1
        return True

    def let(self, count: float = math.inf) -> None:
        with self._change:
            self.left += count
            self._change.notify_all()

    def __enter__(self) -> Gate:
        return self

    def __exit__(self, *_: object) -> None:
        self.let()


def hold_steps(executor: FakeExecutor, file: Path) -> None:
    """While the file is there, the engine stands still after ten steps."""
    execute = executor.execute

    def held(batch: StepBatch) -> StepResult:
        while len(executor.steps) >= 10 and file.exists():
            time.sleep(0.005)
        return execute(batch)

    executor.execute = held


class Taken(SequenceSlice, kw_only=True):
    """A slice as it was when its step was submitted, with the tokens that its sequence had."""

    known: list[int]


class AheadFakeExecutor(FakeExecutor):
    """Runs a step at some random time between `submit` and `collect`, and copies of pages wait for the steps before
    them, as on a device with queues. `leads` says no at random."""

    def __init__(self, *args, seed: int = 0) -> None:
        super().__init__(*args)
        self.rng = random.Random(seed)
        self.queue: list[StepBatch] = []
        self.results: list[StepResult | Exception] = []
        self.sampled: dict[int, int] = {}
        self.led = 0

    def submit(self, batch: StepBatch) -> None:
        assert len(self.queue) + len(self.results) < 2, "a third step in flight"
        self.queue.append(self.taken(batch))
        if self.rng.random() < 0.3:
            self.flush()

    def taken(self, batch: StepBatch) -> StepBatch:
        """The batch as it is now, whatever becomes of its sequences."""
        self.led += any(UNREAD in piece.token_ids for piece in batch.slices)
        pieces = [
            Taken(
                **structs.asdict(s) | {"token_ids": [*s.token_ids], "pages": {g: [*t] for g, t in s.pages.items()}},
                known=[*self.tokens_of(s.seq_id)],
            )
            for s in batch.slices
        ]
        return StepBatch(pieces, batch.measure_attention)

    def flush(self) -> None:
        """Let the device do all it was given."""
        while self.queue:
            try:
                self.results.append(self.computed(self.queue.pop(0)))
            except Exception as error:  # raised where the step is collected
                self.results.append(error)

    def computed(self, batch: StepBatch) -> StepResult:
        """Run a step of `taken`; its unread tokens are those of the step before."""
        for piece in batch.slices:
            if piece.token_ids == [UNREAD]:
                piece.token_ids = [self.sampled.get(piece.seq_id, 0)]  # nothing where the logits were not finite
        result = super().execute(batch)
        self.sampled = {found.seq_id: found.token_ids[-1] for found in result.sampled}
        return result

    def collect(self) -> StepResult:
        if not self.results:
            return self.computed(self.queue.pop(0))
        if isinstance(found := self.results.pop(0), Exception):
            raise found
        return found

    def leads(self, batch: StepBatch) -> bool:
        return self.rng.random() < 0.9

    def execute(self, batch: StepBatch) -> StepResult:
        self.submit(batch)
        return self.collect()

    def to_host(self, group, slot, parts, done, *, settled=False) -> None:
        if not settled:
            self.flush()
        super().to_host(group, slot, parts, done)

    def to_device(self, group, slots, pages, done) -> None:
        self.flush()
        super().to_device(group, slots, pages, done)


def clear_pool(pool: PagePool) -> None:
    """Free all cached slots of a pool; nobody hears of it."""
    for page in pool.list_pages():
        pool.drop_page(page.key)


def clear_cache(manager: KVCacheManager) -> None:
    """Drop all pages that are not in use, in every tier."""
    for _, page in list(manager.list_pages()):
        manager.drop_page(page.key, "cleared")


def chain(before: bytes, token: int) -> bytes:
    """Digest of a prefix from the digest of the prefix one token shorter."""
    return blake2b(before + token.to_bytes(4, "little"), digest_size=8).digest()


def fake_logprob(prefix: bytes, token: int, top: int) -> TokenLogprob:
    """Of a token behind a prefix of this digest; the alternatives are the tokens from it on."""
    value = -(int.from_bytes(blake2b(prefix, digest_size=2).digest(), "little") + token) / 4096
    return TokenLogprob(token, value, tuple(((token + k) % VOCAB, value - k) for k in range(top)))


def prompt_logprobs(prompt: list[int], top: int) -> tuple[TokenLogprob, ...]:
    """What an engine over FakeExecutor must report of a prompt."""
    found, digest = [TokenLogprob(prompt[0], 0.0)], b""
    for before, token in pairwise(prompt):
        digest = chain(digest, before)
        found.append(fake_logprob(digest, token, top))
    return tuple(found)


def make_core(
    *,
    pages: dict[str, int] | None = None,
    page_tokens: int = 4,
    window: int = 8,
    max_batch_tokens: int = 16,
    max_sequences: int = 8,
    max_context: int = 128,
    prefix_cache: bool = True,
    checkpoint_tokens: int = 32,
    clock=time.monotonic,
    kv: KVSettings | None = None,
    engine: str = "fake",
    files: Files | None = None,
    ahead: int | None = None,
    slab_pages: dict[str, int] | None = None,
    kv_policy: str | None = None,
    score_rows: int = 0,
    images: FakeEncoder | None = None,
) -> EngineCore:
    """An EngineCore over a FakeExecutor (core.executor) with small pools; with `kv` its cache is made as a server's is,
    `files` being what its disk tier does to the system. `ahead` is the seed of an executor that runs ahead.
    With `slab_pages` the groups share one memory; `kv_policy` orders what leaves it."""
    pages = pages or {GLOBAL: 64, LOCAL: 64}
    sizes = (pages, page_tokens, window, max_batch_tokens, score_rows)
    executor = FakeExecutor(*sizes) if ahead is None else AheadFakeExecutor(*sizes, seed=ahead)
    executor.share(slab_pages)
    executor.images = images
    if kv is None:
        manager, loader = (
            KVCacheManager(
                pages, window, KeyChain(engine, page_tokens), 
                options=CacheOptions(
                    prefix_cache=prefix_cache, checkpoint_tokens=checkpoint_tokens, slab_pages=slab_pages
                ),
                policy=make_policy(kv_policy, pages[GLOBAL] // 2, page_tokens=page_tokens) if kv_policy else None,
            ),
            None,
        )  # fmt: skip
    else:
        manager, loader = make_cache(
            kv, executor.layout, window, engine=engine, kernels="fake", copier=executor.copier, files=files
        )
    scheduler = Scheduler(
        manager,
        max_batch_tokens=max_batch_tokens,
        max_sequences=max_sequences,
        loader=loader,
        slice_tokens=executor.slice_tokens,
        score_rows=score_rows,
    )
    executor.watch(scheduler)
    return EngineCore(executor, scheduler, eos_ids=(EOS,), max_context=max_context, clock=clock)


FAKE_INFO = ModelInfo(
    model_id="fake", backend="torch", kernels="fake", dtype="float32", kv_dtype="float32", quantization=None,
    max_context_tokens=128, vocab_size=VOCAB, hidden_size=8, num_layers=2, num_heads=1, num_kv_heads=1,
    fingerprint="fake", eos_token_ids=(EOS,), bos_token_id=None, chat=False,
)  # fmt: skip
