"""Real weights through every tier while memory, disk and link lie: tokens and log-probabilities as without tiers.

    python -m tests.real_weights ENGINE [--faults 10000] [--seed S] [--device cuda|cpu] [--coded] [--unchecked]

One engine without a cache computes conversations; a second one of little device memory, with host memory and a disk,
serves their turns in any order, several at a time, while pages are torn, lost, swapped and changed on the link in both
directions, bits flip in host memory, disk operations lie, and files are damaged between two runs. Both are invariant to
batches, so that every bit of every log-probability has to be the same. It must not know how a page is checked.
Invariant: a page that was changed is counted as found when it was given up for that, as unread when it left for another
reason, and as believed when it was served; believed ones and wrong answers end with exit code 1. A bit that flips while
its page is being read may come too late to matter. On a CPU a thread stands for the link. `--coded` keeps pages coded
(bfloat16 KV); on a CPU one of UNFIT_SHARE has no code. `--unchecked` takes the device's comparison away, and has to
find wrong answers.
"""

from __future__ import annotations

import argparse
import inspect
import os
import random
import shutil
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from disk_damage import Damage, Vandal
from fault_injection import Fault, FaultPlan, FaultyFiles, flip_bit
from lanes import Coder, Digests, Event
from late_device import Device

from wicore_trt.backends.torch import executor as torch_executor
from wicore_trt.config import resolve_settings
from wicore_trt.core import assemble_kv
from wicore_trt.core.assemble import load_engine
from wicore_trt.engine.directory import open_engine
from wicore_trt.kv.tiers import up
from wicore_trt.kv.tiers.host import HostTier, Movers
from wicore_trt.kv.tiers.index import TierIndex
from wicore_trt.kv.tiers.moves import Store, TierCopy, Upload
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.plugins.code_layout import PageCode, find_code
from wicore_trt.plugins.layout import PoolShape
from wicore_trt.runtime import page_copier
from wicore_trt.types import FinishReason, GenerateRequest, SamplingParams, TokenLogprob

MIB = 1 << 20
AT_ONCE = 4
LINK_RATE, HOST_RATE = 0.04, 0.9
"""Share of the pieces of copies that are changed on the way, and flips in host memory a step."""
DISK = {
    Fault.READ_BIT_FLIP: 0.01, Fault.READ_MISDIRECTED: 0.004, Fault.READ_SHORT: 0.002, Fault.READ_EIO: 0.002,
    Fault.WRITE_BIT_FLIP: 0.01, Fault.WRITE_TORN: 0.01, Fault.WRITE_LOST: 0.01, Fault.WRITE_MISDIRECTED: 0.004,
    Fault.WRITE_SWAPPED: 0.004,
}  # fmt: skip
DAMAGE = (Damage.FLIP_SLAB_BIT, Damage.TRUNCATE, Damage.SWAP_SLOTS, Damage.COPY_SLOT, Damage.TEAR_SLOT)
LIES = ("flipped", "torn", "lost", "swapped", "another page")
REQUESTS_OF_A_RUN = 150
IN_USE, UNFIT_SHARE = ", in use", 12
FLIPS = 3


@dataclass(frozen=True)
class Shape:
    """Of conversations, in tokens, and the memory that they are served with, in bytes."""

    turns: int
    first: int
    new: int
    out: int
    vocab: int
    context: int
    device: int
    host: int
    disk: int
    error: float
    """By how much log-probabilities may differ: a tiny model's operators are not invariant to batches."""


def shape_of(engine: Path) -> Shape:
    """Device memory holds five conversations, host memory ten."""
    manifest = open_engine(engine).manifest
    spec, size = manifest.spec, manifest.page_tokens
    tiny = spec.max_position_embeddings < 1000
    turns, first, new, out = (5, 24, 6, 4) if tiny else (8, 180, 50, 12)
    context = first + turns * (new + out) + 2
    pages = {GLOBAL: -(-context // size), LOCAL: -(-min(context, spec.sliding_window) // size) + 1}
    item = 4 if manifest.kv_dtype == "float32" else 2
    bytes_of = {g: spec.page_bytes(g, size, item) for g in pages}
    device = sum(pages[g] * bytes_of[g] for g in pages)
    stored = sum(pages[g] * max(4096, bytes_of[g]) for g in pages)
    return Shape(turns, first, new, out, spec.vocab_size, context, 5 * device, 10 * stored, 100 * stored, tiny * 1e-3)


Answer = tuple[tuple[int, ...], tuple[TokenLogprob, ...]]
Piece = tuple[int, int, int]


class Ledger:
    """What was changed and what became of it. `host` maps changed slots of host memory to what was done; `coming` are
    pages, by `coming_page`, whose copy to the device was changed on the way."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.done: Counter[str] = Counter()
        self.host: dict[int, str] = {}
        self.coming: dict[tuple[int, int], str] = {}
        self.base = self.slot_bytes = self.slots = 0

    @property
    def faults(self) -> int:
        return sum(count for name, count in self.done.items() if name.startswith("did "))

    def opened(self, slab: memoryview, slot_bytes: int) -> None:
        self.base, self.slot_bytes = page_copier.host_address(slab), slot_bytes
        self.slots = len(slab) // slot_bytes
        self.host.clear()
        self.coming.clear()

    def slot(self, address: int) -> int:
        """Of host memory; -1 for memory that is no page's."""
        at = (address - self.base) // self.slot_bytes if self.slot_bytes else -1
        return at if 0 <= at < self.slots else -1

    def did(self, what: str, count: int = 1) -> None:
        self.done[f"did {what}"] += count

    def left(self, slots: Iterable[int], cause: str) -> None:
        """A copy is given up."""
        for slot in slots:
            if (what := self.host.pop(slot, None)) is not None:
                self.done[f"{'found' if cause == 'corrupt' else 'unread'} {what}"] += 1

    def judged(self, move: Any, place: int, *, believed: bool) -> None:
        """A page came to the device, and was taken for the right one or not."""
        copy = move.copies[place]
        if (what := self.coming.pop(coming_page(move, copy), None)) is not None:
            self.done[f"{'BELIEVED' if believed else 'found'} {what}"] += 1
        for slot in copy.slots:
            if believed and (what := self.host.pop(slot, None)) is not None:
                self.done[f"{'late' if what.endswith(IN_USE) else 'BELIEVED'} {what}"] += 1


def coming_page(move: Any, copy: Any) -> tuple[int, int]:
    """Stands for a page of a `Upload`: one may be placed twice at once."""
    return id(move), id(copy)


def moves_of(done: Any, kind: type) -> list[Any]:
    """Moves of a kind that a callback was made with; callbacks may hold others, as partials and closures do."""
    if isinstance(done, partial):
        return [move for part in done.args for move in moves_of(part, kind)]
    if inner := inspect.getclosurevars(done).nonlocals.get("done") if inspect.isfunction(done) else None:
        return moves_of(inner, kind)
    return [done] if isinstance(done, kind) else []


class LyingLane:
    """A lane in front of the real one, whose copies go wrong. `batch` is what is being put on it."""

    batch: Any = None

    def __init__(self, ledger: Ledger, lane: Any) -> None:
        self._ledger, self._lane = ledger, lane
        self._rubbish = bytearray(ledger.rng.randbytes(MIB))
        self._source = page_copier.host_address(memoryview(self._rubbish))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._lane, name)

    def copy(self, pieces: Iterable[Piece]) -> None:
        ledger, coming, leaving = self._ledger, self._coming(), self._leaving()
        made = [part for piece in pieces for part in self._cut(piece)]
        rng, told = ledger.rng, list[Piece]()
        for at, (target, source, count) in enumerate(made):
            up = ledger.slot(source)
            slot = up if up >= 0 else ledger.slot(target)
            if up < 0:
                ledger.left([slot], "overwritten")
            other = made[rng.randrange(len(made))]
            asks = slot in leaving if up < 0 else target in coming  # the rating of the link asks for nothing
            lie = rng.choice(LIES) if asks and rng.random() < LINK_RATE else ""
            if lie in ("swapped", "another page") and (other[2] != count or other == made[at]):
                lie = "torn"
            if lie == "flipped":  # a byte of rubbish: one in 256 changes nothing, and one of 16 does not matter so
                told.append((target, source, count))
                told.append((target + rng.randrange(count - 16), self._source + rng.randrange(MIB - 16), 16))
            elif lie == "torn":
                half = count // 2
                told += [(target, source, half), (target + half, self._source, min(count - half, MIB))]
            elif lie == "lost":
                told.append((target, self._source, min(count, MIB)))
            elif lie:
                told.append((target, other[1], count))
            else:
                told.append((target, source, count))
            if lie:
                way = "coming" if up >= 0 else "leaving"
                ledger.did(f"{way} {lie}")
                if up >= 0:
                    ledger.coming[coming[target]] = f"{way} {lie}"
                else:
                    ledger.host[slot] = f"{way} {lie}"
        self._lane.copy(told)

    def _cut(self, piece: Piece) -> Iterator[Piece]:
        """A piece by slots of host memory, of which pages that lie in a row are one: each has a lie of its own."""
        target, source, count = piece
        ledger, done = self._ledger, 0
        host = source if ledger.slot(source) >= 0 else target
        while done < count:
            part = count - done
            if ledger.slot(host) >= 0:
                part = min(part, ledger.slot_bytes - (host + done - ledger.base) % ledger.slot_bytes)
            yield target + done, source + done, part
            done += part

    def _leaving(self) -> set[int]:
        """Slots of the pages of a batch that go to host memory to be kept. The disk may read others into the slots that
        the rating of the link was given, and no lane sees that."""
        found = set[int]()
        for copies in self.batch.copies:
            found.update(slot for move in moves_of(copies.done, Store) for slot in move.copy.slots)
        return found

    def _coming(self) -> dict[int, tuple[int, int]]:
        """The pages of a batch that go to the device, by the addresses where parts of them begin there."""
        found = {}
        for copies in self.batch.copies:
            if not (uploads := moves_of(copies.done, Upload)):
                continue
            (move,) = uploads
            by_slot = {slot: copy for copy in move.copies for slot in copy.slots}
            for address, parts in zip(copies.staged or copies.addresses, copies.parts, strict=True):
                page = coming_page(move, by_slot[self._ledger.slot(page_copier.host_address(parts[0]))])
                for part in parts:
                    found[address] = page
                    address += part.nbytes
        return found


class Compute:
    """The stream of the steps of an executor that computes at once."""

    def record(self) -> Event:
        event = Event()
        event.happened.set()
        return event

    def wait(self, event: Event) -> None:
        event.synchronize()


class PickyCoder(Coder):
    """Has no code for some pages."""

    def encode_one(self, code: PageCode, page: memoryview, coded: memoryview) -> bytes:
        seal = super().encode_one(code, page, coded)
        if seal[0] % UNFIT_SHARE == 0:
            coded[12:16] = b"\xff" * 4
        return seal


def linked_copier(pools: Any, page_tokens: int, _stream: int, *, overlapping: Any) -> Any:
    """A link to a CPU's own pools, which copies late and computes digests; and codes pages, if it can."""
    codes = dict[str, PageCode]()
    for group, pool in pools.items():
        _, layers, _, tokens, heads, dim = pool.shape
        if (
            code := find_code(PoolShape(layers, tokens, heads, dim, str(pool.dtype).removeprefix("torch.")))
        ) is not None:
            codes[group] = code
    link, digest = Device(random.Random(0)), page_copier.make_digest(pools)
    lanes, digests = (Compute(), *link.streams[1:]), Digests(digest)
    return page_copier.StreamPageCopier(
        pools, page_tokens, lanes, link, overlapping, digests, digest, coder=PickyCoder(codes, 8) if codes else None
    )  # fmt: skip


@contextmanager
def lies(ledger: Ledger, plan: FaultPlan, *, unchecked: bool) -> Iterator[None]:
    """Everything that an engine opened inside believes in may lie."""
    open_truly, copier = assemble_kv.open_tiers, page_copier.StreamPageCopier
    put = copier._start_batch
    placed, corrupt, remove = up.UpTransfers.apply_uploaded, up.UpTransfers._drop_corrupt, TierIndex._remove_copy

    def open_tiers(*args: Any, **more: Any) -> Any:
        found = open_truly(*args, **{**more, "files": FaultyFiles(plan)})
        host = found.movers.host
        ledger.opened(host._slab, host.slot_bytes)
        ours.append(host.index)
        return found

    def open_copier(pools: Any, page_tokens: int, lanes: Any, *args: Any, **more: Any) -> Any:
        compute, out, into, *behind = lanes
        lying = (LyingLane(ledger, lane) for lane in (out, into))
        return copier(pools, page_tokens, (compute, *lying, *behind), *args, **more)

    def see_put(self: Any, way: Any, batch: Any) -> None:
        way.lane.batch = batch
        put(self, way, batch)

    def see_placed(self: Any, move: Upload, digests: Sequence[bytes | None], seconds: float) -> None:
        over = move.on_verdict

        def hear(places: Sequence[int], right: bool) -> None:
            for place in places:
                ledger.judged(move, place, believed=right)
            over(places, right)

        move.on_verdict = hear
        placed(self, move, [None] * len(digests) if unchecked else digests, seconds)
        move.on_verdict = over

    def see_corrupt(self: Any, copy: TierCopy) -> None:
        ledger.left(copy.slots if copy.ready else (), "corrupt")
        corrupt(self, copy)

    def see_removed(self: TierIndex, copy: TierCopy, cause: str, **more: Any) -> None:
        if self is ours[-1]:
            ledger.left(copy.slots, cause)
        remove(self, copy, cause, **more)

    ours: list[Any] = [None]
    with (
        mock.patch.object(assemble_kv, "open_tiers", open_tiers),
        mock.patch.object(page_copier, "StreamPageCopier", open_copier),
        mock.patch.object(copier, "_start_batch", see_put),
        mock.patch.object(torch_executor, "make_copier", linked_copier),
        mock.patch.object(up.UpTransfers, "apply_uploaded", see_placed),
        mock.patch.object(up.UpTransfers, "_drop_corrupt", see_corrupt),
        mock.patch.object(TierIndex, "_remove_copy", see_removed),
    ):
        if not unchecked:
            yield
            return
        with mock.patch.object(Movers, "is_right", lambda self, copy: True):
            yield


class Engine:
    """A core and requests to it."""

    def __init__(self, path: Path, device: str, shape: Shape, **flags: Any) -> None:
        self._out = shape.out
        settings = {
            "engine": str(path),
            "executor.device": device,
            "executor.batch_invariant": True,
            "scheduler.max_batch_tokens": 128,
            "scheduler.max_sequences": AT_ONCE,
            "scheduler.max_context": shape.context,
        }
        more = {name.replace("__", "."): value for name, value in flags.items()}
        self.core = load_engine(resolve_settings(None, settings | more, environ=os.environ).settings).engine_core
        self._count = 0

    def serve(
        self, asked: Iterable[tuple[Any, Sequence[int]]], between: Callable[[], None] = lambda: None
    ) -> Iterator[tuple[Any, Answer]]:
        """The answers to (name, prompt), AT_ONCE at a time, as they end."""
        waiting, live = iter(asked), dict[str, tuple[Any, list[int], list[TokenLogprob]]]()
        while True:
            while len(live) < AT_ONCE and (item := next(waiting, None)) is not None:
                self._count += 1
                name, params = (
                    f"r{self._count}",
                    SamplingParams(self._out, temperature=0.0, ignore_eos=True, logprobs=3),
                )
                live[name] = (item[0], [], [])
                self.core.add(GenerateRequest(name, tuple(item[1]), params))
            if not live:
                return
            for output in self.core.step():
                what, tokens, probabilities = live[output.request_key]
                tokens += output.token_ids
                probabilities += output.logprobs
                if output.finish_reason is not None:
                    del live[output.request_key]
                    if output.finish_reason is not FinishReason.LENGTH:
                        tokens.append(-1)
                        print(f"ERROR: {output}", flush=True)
                    yield what, (tuple(tokens), tuple(probabilities))
            between()

    def close(self) -> None:
        self.core.close()


def reference(
    path: Path, device: str, shape: Shape, rng: random.Random, count: int
) -> dict[tuple[int, int], tuple[list[int], Answer]]:
    """(prompt, answer) by (conversation, turn), of an engine that computes everything. Two and two begin alike."""
    engine, found = Engine(path, device, shape, kv__prefix_cache=False, kv__device_bytes=2 * shape.device), {}
    words = range(10, shape.vocab - 10)
    heads = [[2, *rng.choices(words, k=shape.first)] for _ in range(count)]
    history = [[*heads[n // 2], words[n % len(words)]] for n in range(count)]
    for turn in range(shape.turns):
        for n, answer in engine.serve([(n, prompt) for n, prompt in enumerate(history)]):
            found[n, turn] = list(history[n]), answer
        for n in range(count):
            history[n] += [*found[n, turn][1][0], *rng.choices(words, k=shape.new)]
    engine.close()
    return found


def same(answer: Answer, expected: Answer, error: float) -> bool:
    pairs = zip(answer[1], expected[1], strict=False)
    return answer[0] == expected[0] and all(abs(a.logprob - b.logprob) <= error for a, b in pairs)


def flip_in_host(ledger: Ledger, host: HostTier) -> None:
    """Bits of pages that lie in host memory."""
    rng, found = ledger.rng, list(copies(host.index))
    for copy in rng.sample(found, min(FLIPS, len(found))):
        number = rng.randrange(len(copy.slots))
        slot, used = copy.slots[number], host.bytes_of(copy) - number * host.slot_bytes
        if slot not in ledger.host:
            part = host.cut_slots(copy.slots)[number][:used]
            flip_bit([part], rng.randrange(len(part) * 8))
            ledger.host[slot] = what = f"host bit{IN_USE * (copy.readers > 0)}"
            ledger.did(what)


def copies(index: TierIndex) -> Iterator[TierCopy]:
    """READY ones."""
    for node in list(index._nodes.values()):
        yield from (copy for copy in node.copies if copy.ready)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("engine", type=Path)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--faults", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 30))
    parser.add_argument("--conversations", type=int, default=24)
    parser.add_argument("--disk", type=Path, help="where the disk tier lies; default: a temporary folder")
    parser.add_argument("--limit-s", type=float, default=1e9)
    parser.add_argument("--coded", action="store_true")
    parser.add_argument("--unchecked", action="store_true")
    args = parser.parse_args(argv)
    ledger, begun = Ledger(args.seed), time.monotonic()
    rng, plan = random.Random(args.seed), FaultPlan(DISK, seed=args.seed, only=lambda name: name.startswith("slab"))
    shape = shape_of(args.engine)
    expected = reference(args.engine, args.device, shape, rng, args.conversations)
    print(f"{len(expected)} answers of an engine without tiers in {time.monotonic() - begun:.0f} s", flush=True)
    disk = Path(tempfile.mkdtemp(dir=args.disk))
    wrong, served, runs, hits = 0, 0, 0, Counter[str]()
    try:
        while ledger.faults + sum(plan.counts.values()) < args.faults and time.monotonic() - begun < args.limit_s:
            with lies(ledger, plan, unchecked=args.unchecked):
                more = one_run(args, shape, ledger, rng, expected, disk, hits)
            served, wrong, runs = served + REQUESTS_OF_A_RUN, wrong + more, runs + 1
            damage(ledger, disk, rng)
            print(f"{ledger.faults + sum(plan.counts.values()):,} faults so far, {wrong} wrong", flush=True)
    finally:
        shutil.rmtree(disk, ignore_errors=True)
    report(ledger, plan, hits)
    faults = ledger.faults + sum(plan.counts.values())
    print(f"seed {args.seed}: {faults:,} faults, {served:,} answers in {runs} runs of the engine, {wrong} wrong, "
          f"{time.monotonic() - begun:.0f} s")  # fmt: skip
    believed = sum(count for name, count in ledger.done.items() if name.startswith("BELIEVED"))
    return int(bool(wrong or believed) != args.unchecked)


def one_run(
    args: argparse.Namespace,
    shape: Shape,
    ledger: Ledger,
    rng: random.Random,
    expected: dict[Any, Any],
    disk: Path,
    hits: Counter[str],
) -> int:
    """How many of an engine's answers are wrong, from its start to its end on `disk`."""
    engine = Engine(
        args.engine, args.device, shape, kv__device_bytes=shape.device, kv__host_bytes=shape.host,
        kv__disk_path=str(disk), kv__disk_bytes=shape.disk, kv__disk_free_bytes=0,
        kv__compression="lossless" if args.coded else "none",
    )  # fmt: skip
    tiers = engine.core.scheduler.manager.tiers
    assert tiers is not None
    host, wrong = tiers.movers.host, 0

    def between() -> None:
        if rng.random() < HOST_RATE:
            flip_in_host(ledger, host)

    order = [rng.choice(list(expected)) for _ in range(REQUESTS_OF_A_RUN)]
    for name, answer in engine.serve([(name, expected[name][0]) for name in order], between):
        if not same(answer, expected[name][1], shape.error):
            wrong += 1
            if wrong < 4:
                print(f"WRONG: {name}: {answer[0]} for {expected[name][1][0]}", flush=True)
    for tier in engine.core.stats().kv.tiers:
        hits[f"tokens found in {tier.tier}"] += tier.hit_tokens
    for kind, traffic in (("host", tiers.movers.host_traffic), ("disk", tiers.movers.disk_traffic)):
        hits.update({f"{kind}: {cause}": count for cause, count in traffic.failures.items()})
    engine.close()
    return wrong


def damage(ledger: Ledger, disk: Path, rng: random.Random) -> None:
    """To the files between two runs."""
    for home in {path.parent for path in disk.rglob("index")}:
        facts = (home / "namespace.json").read_text()
        vandal = Vandal(
            home, int(facts.partition('"slot_bytes": ')[2].split(",")[0].strip("} \n")), seed=rng.randrange(1 << 30)
        )
        for _ in range(40):
            kind = rng.choice(DAMAGE[:1] * 8 + DAMAGE[2:] * 4) if rng.random() < 0.99 else Damage.TRUNCATE
            if vandal.do(kind):
                ledger.did(f"file: {kind.value}")


def report(ledger: Ledger, plan: FaultPlan, hits: Counter[str]) -> None:
    rows = {**ledger.done, **{f"did disk {fault.value}": n for fault, n in plan.counts.items()}, **hits}
    for name, count in sorted(rows.items()):
        print(f"  {name:50} {count:>10,}")
