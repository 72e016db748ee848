"""The campaign's device: KV memory as bytes, steps that run `Model` over what is really there, copies beside them.

Slots that nobody may read hold POISON. It must not know what a request should get. Invariant: whoever reads poison, or
a page that is absent, is told at once (`Failure`); what was read wrongly otherwise changes the sampled token.
"""

from __future__ import annotations

import random
import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from types import SimpleNamespace

from msgspec.structs import replace

from oracle.model import DIGEST, NAN, PIXEL_BYTES, POISON, VOCAB, Model, features_of, image_of, permitted
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.runtime.batch import UNREAD, SampledTokens, SequenceSlice, StepBatch, StepResult
from wicore_trt.runtime.executor import UNFIT, CameIn, Done, KVLayout


class Failure(Exception):
    """Something that must not happen did; `kind` names it."""

    def __init__(self, kind: str, text: str) -> None:
        super().__init__(f"{kind}: {text}")
        self.kind = kind


@dataclass
class Bad:
    """What goes wrong with values on the device: the next entries, or the next logits, that are not finite."""

    entries: deque[tuple[int, str]] = field(default_factory=deque)
    """(number, layer group) of entries to be spoilt."""
    logits: int = 0
    read: dict[int, set[int]] = field(default_factory=dict)
    """By seq_id: the numbers of the spoilt entries that it has read."""
    unlucky: set[int] = field(default_factory=set)
    """seq_ids whose logits were spoilt."""
    blind: set[bytes] = field(default_factory=set)
    """Pixels that were not encoded once."""


class Encoder:
    """Encodes images beside steps, one after the other; `blind` is how often one fails. With `parts` each is run when
    it is told to, and an image ends some time after its last."""

    part_s = 1e-3

    def __init__(self, world, bad: Bad, *, slots: int, tokens: int, seconds: float, blind: float) -> None:
        self.slots, self.tokens, self.pixel_bytes = slots, tokens, PIXEL_BYTES
        self.world, self.bad, self.seconds, self.blind = world, bad, seconds, blind
        self.held: list[bytes | None] = [None] * slots
        self.reads, self.parts, self._left = 0, world.rng.choice((0, 1, 3, 8)), 0
        self.under_way, self.begun, self.until, self.busy_s = 0, 0, 0.0, 0.0
        self._ended: deque[tuple[int, str | None]] = deque()

    def begin(self, slot: int, pixels: bytes) -> int:
        if self.under_way or self._left:
            raise Failure("encoder", "two images are encoded at once")
        self.under_way, self.begun = 1, self.begun + 1
        self.held[slot] = None
        fails = self.world.rng.random() < self.blind
        if fails:
            self.bad.blind.add(pixels)
            if self.world.rng.random() < 0.3:
                self.under_way = 0
                raise RuntimeError("the encoder is blind")

        def end() -> None:
            self.held[slot] = None if fails else features_of(pixels)
            self.under_way = 0
            self._ended.append((slot, "its features are not finite" if fails else None))

        self._left, self._end = self.parts, end
        if not self.parts:
            self._run()
        return slot

    def run_parts(self, count: int) -> None:
        if not 0 < count <= self._left:
            raise Failure("encoder", f"{count} parts are run, of which {self._left} are left")
        self._left -= count
        if not self._left:
            self._run()

    def _run(self) -> None:
        seconds = self.world.takes(self.seconds)
        self.until, self.busy_s = self.world.clock() + seconds, self.busy_s + seconds
        self.world.later(seconds, self._end)

    def is_finite(self, slot: int) -> bool:
        return True

    def take_ended(self, timeout_s: float = 0.0) -> list[tuple[int, str | None]]:
        self.world.wait(lambda: bool(self._ended), timeout_s)
        return [self._ended.popleft() for _ in range(len(self._ended))]

    def read(self, slot: int) -> bytes:
        found = self.held[slot]
        if found is None:
            raise Failure("features", f"slot {slot} is read, and has no features")
        self.reads += 1
        return image_of(found, self.tokens)


class Device:
    """Runs each step when it is told to. `world` says how long things take; `copier` moves pages."""

    def __init__(self, world, model: Model, layout: KVLayout, *, max_batch_tokens: int, slice_tokens: int) -> None:
        self.spec = SimpleNamespace(vocab_size=VOCAB, sliding_window=model.window)
        self.kernels = "oracle"
        self.layout = layout
        self.max_batch_tokens = max_batch_tokens
        self.slice_tokens, self.score_rows, self.graph_sizes = slice_tokens, 0, {}
        self.images: Encoder | None = None
        self.max_sequences: int | None = None
        self.world, self.model = world, model
        self.size = layout.page_tokens
        self.copier: object = None
        self.bad = Bad()
        self._tables: dict[object, dict[str, Sequence[int]]] = {}
        self._histories: dict[int, list[int]] = {}  # of penalized sequences
        self.steps = self.tokens = 0
        self.busy_s = self.busy_until = 0.0
        self.pages: dict[str, list[memoryview]] = {}
        shared = memoryview(bytearray(POISON * (layout.memory_bytes // DIGEST)))
        for group, count in layout.num_pages.items():
            nbytes = layout.page_bytes[group]
            own = memoryview(bytearray(POISON * (nbytes * count // DIGEST)))
            memory = own if layout.slab_pages is None else shared
            self.pages[group] = [memory[i * nbytes : (i + 1) * nbytes] for i in range(count)]

    # --- what tests do to it -------------------------------------------------------------------------------------

    def poison(self, group: str, slot: int) -> None:
        """A slot changes hands: nobody may read it before it is written."""
        page = self.pages[group][slot]
        page[:] = POISON * (len(page) // DIGEST)

    def same_bytes(self, one: tuple[str, int], other: tuple[str, int]) -> bool:
        """Whether two slots have a byte in common."""
        if one[0] == other[0] or self.layout.slab_pages is None:
            return one == other
        (begin, end), (start, stop) = (
            (slot * self.layout.page_bytes[group], (slot + 1) * self.layout.page_bytes[group])
            for group, slot in (one, other)
        )
        return begin < stop and start < end

    # --- what an engine does with it -----------------------------------------------------------------------------

    def execute(self, batch: StepBatch) -> StepResult:
        seconds = self._seconds(batch)
        self.world.advance(seconds)
        self.busy_s += seconds
        return self.run(StepBatch([replace(s, pages=self._held(s)) for s in batch.slices], batch.measure_attention))

    def release(self, seq_id: int) -> None:
        self._histories.pop(seq_id, None)

    def close(self) -> None:
        self.copier.close()
        self.pages = {}

    def _held(self, piece: SequenceSlice) -> dict[str, Sequence[int]]:
        """A slice's page tables as who keeps a copy has them: good for ever if its stamp says what is in them."""
        if piece.stamp not in self._tables:
            self._tables[piece.stamp] = {group: table[:] for group, table in piece.pages.items()}
        return self._tables[piece.stamp]

    # --- a step --------------------------------------------------------------------------------------------------

    def _seconds(self, batch: StepBatch) -> float:
        speeds = self.world.speeds
        return self.world.takes(max(batch.num_tokens, min(self.slice_tokens, self.max_batch_tokens) / 2) * speeds.token)

    def run(self, batch: StepBatch) -> StepResult:
        if not 0 < batch.num_tokens <= self.max_batch_tokens:
            raise Failure("budget", f"{batch.num_tokens} tokens in a step")
        self.steps += 1
        self.tokens += batch.num_tokens
        self.copier.begin_step(batch)
        result = StepResult([])
        order = list(batch.slices)
        self.world.rng.shuffle(order)
        for piece in order:
            self._run(piece, result)
            if batch.measure_attention and GLOBAL in self.pages:
                count = -(-(piece.start + len(piece.token_ids)) // self.size)
                result.attention[piece.seq_id] = [((piece.seq_id + i) % 7 + 0.5) / 3.5 for i in range(count)]
        result.sampled.sort(key=lambda found: found.seq_id)
        return result

    def _run(self, piece: SequenceSlice, result: StepResult) -> None:
        model, window = self.model, self.model.window
        start, first = piece.start, max(0, piece.start - window + 1)
        end = start + len(piece.token_ids)
        before = self._read(piece, GLOBAL, 0, start)
        local = bytearray(self._read(piece, LOCAL, first, start))
        spoilt = self._spoilt(before) | self._spoilt(local)
        unit, seen = model.entry_bytes.get(LOCAL, 0), model.begin(before)
        images = {first: (first + count, self.images.read(slot)) for first, count, slot in piece.images}
        until, known, behind, here = 0, b"", local, seen
        for at, token in enumerate(piece.token_ids):
            position = start + at
            if at >= until:  # tokens of an image see what is before it, and all of it
                until, known = images.get(at, (at + 1, b""))
                behind, here = (local[:], seen.copy()) if at in images else (local, seen)
                if until > len(piece.token_ids):
                    raise Failure("image", f"a step has {len(piece.token_ids)} tokens of {piece.seq_id}, cut at {at}")
            visible = behind[(max(0, position - window + 1) - first) * unit :]
            entry = model.entry(here, bytes(visible), token, position, known)
            while self.bad.entries and self.world.rng.random() < 0.3:
                number, group = self.bad.entries.popleft()
                if group in entry:
                    entry[group] = NAN + number.to_bytes(2, "little") + entry[group][DIGEST:]
                    spoilt.add(number)
            if spoilt:  # what follows from something that is not finite is not either
                mark = NAN + min(spoilt).to_bytes(2, "little")
                entry = {group: mark * (len(value) // DIGEST) for group, value in entry.items()}
            seen.update(entry.get(GLOBAL, b""))
            local += entry.get(LOCAL, b"")
            self._write(piece, position, entry)
        if spoilt:
            self.bad.read.setdefault(piece.seq_id, set()).update(spoilt)
        if not piece.sample:
            return
        history = self._count(piece) if piece.params.penalized else ()
        if self.bad.logits and not spoilt:
            self.bad.logits -= 1
            self.bad.unlucky.add(piece.seq_id)
            spoilt = {-1}
        if spoilt:
            result.failed[piece.seq_id] = "logits are not finite"
            return
        visible = bytes(local[(max(0, end - window) - first) * unit :])
        prompt = piece.prompt_len
        token = model.sample(seen, visible, piece.params, piece.seed, history, prompt, end - prompt)
        result.sampled.append(SampledTokens(piece.seq_id, (permitted(token, piece.stop_ids, piece.suppress_eos),)))

    def _count(self, piece: SequenceSlice) -> list[int]:
        """All tokens up to the end of a slice, from what slices told."""
        if piece.start == len(piece.earlier_ids):
            self._histories[piece.seq_id] = [*piece.earlier_ids]
        known = self._histories.get(piece.seq_id, [])
        if len(known) != piece.start:
            raise Failure("history", f"sampling behind {piece.start} with a history of {len(known)}")
        known += piece.token_ids
        return known

    def _read(self, piece: SequenceSlice, group: str, start: int, end: int) -> bytes:
        """Entries of positions [start, end) as the page table has them."""
        if group not in self.pages or end <= start:
            return b""
        size, table, pages, unit = self.size, piece.pages[group], self.pages[group], self.model.entry_bytes[group]
        first, last = start // size, (end - 1) // size
        slots = table[first : last + 1]
        if len(slots) <= last - first or min(slots) < 0:
            raise Failure("absent", f"{group} page of [{start}, {end}) is absent for {piece.seq_id}: {list(table)}")
        found = b"".join([pages[slot] for slot in slots])[(start - first * size) * unit : (end - first * size) * unit]
        at = found.find(POISON)
        if at >= 0:
            raise Failure(
                "poison", f"sequence {piece.seq_id} at {piece.start} read poison: {group} {start + at // unit}"
            )
        return found

    def _write(self, piece: SequenceSlice, position: int, entry: dict[str, bytes]) -> None:
        number, place = divmod(position, self.size)
        for group, value in entry.items():
            table = piece.pages[group]
            if number >= len(table) or table[number] < 0:
                raise Failure("absent", f"no {group} page to write {position} of {piece.seq_id}: {list(table)}")
            self.copier.written(group, table[number])
            self.pages[group][table[number]][place * len(value) : (place + 1) * len(value)] = value

    @staticmethod
    def _spoilt(entries: bytes | bytearray) -> set[int]:
        """Numbers of the spoilt entries among these."""
        found, at = set(), entries.find(NAN)
        while at >= 0:
            found.add(int.from_bytes(entries[at + 6 : at + 8], "little"))
            at = entries.find(NAN, at + DIGEST)
        return found


class AheadDevice(Device):
    """Steps run at some moment between `submit` and `collect`; whatever else is done to memory takes its turn."""

    def __init__(self, *args, **kwargs) -> None:
        super().__init__(*args, **kwargs)
        self._todo: deque[StepBatch | tuple[str, int]] = deque()
        self._results: deque[StepResult] = deque()
        self._ends: deque[float] = deque()
        self._sampled: dict[int, int] = {}
        self.led = 0

    def submit(self, batch: StepBatch) -> None:
        if len(self._ends) >= 2:
            raise Failure("ahead", "a third step in flight")
        begin = max([self.world.clock(), *self._ends])
        seconds = self._seconds(batch)
        self.busy_s += seconds
        self._ends.append(begin + seconds)
        self.busy_until = begin + seconds
        self.led += any(UNREAD in piece.token_ids for piece in batch.slices)
        pieces = [replace(s, token_ids=[*s.token_ids], pages=self._held(s)) for s in batch.slices]
        self._todo.append(StepBatch(pieces, batch.measure_attention))
        if self.world.rng.random() < 0.3:
            self.flush()
        if self.world.rng.random() < 0.5:  # to launch a step takes time, in which copies end and disks answer
            self.world.advance(seconds * self.world.rng.random())

    def flush(self) -> None:
        """Let the device do all it was given."""
        while self._todo:
            work = self._todo.popleft()
            if isinstance(work, tuple):
                super().poison(*work)
                continue
            for piece in work.slices:
                if piece.token_ids == [UNREAD]:
                    piece.token_ids = [self._sampled.get(piece.seq_id, 0)]  # nothing where the logits were not finite
            result = self.run(work)
            self._sampled = {found.seq_id: found.token_ids[-1] for found in result.sampled}
            self._results.append(result)

    def collect(self) -> StepResult:
        self.flush()
        self.world.advance(max(0.0, self._ends.popleft() - self.world.clock()))
        return self._results.popleft()

    def leads(self, batch: StepBatch) -> bool:
        return self.world.rng.random() < 0.9

    def execute(self, batch: StepBatch) -> StepResult:
        self.submit(batch)
        return self.collect()

    def poison(self, group: str, slot: int) -> None:
        if self._todo:
            self._todo.append((group, slot))
        else:
            super().poison(group, slot)


class Copier:
    """Copies at once, as on a CPU; the engine's thread spends the time. `checks`: it computes digests on the device.
    `lies`: how often a bit changes on the way, which who computes digests on the device notices. Pages of large entries
    have a code of three quarters of their bytes, but for one in nine of them and those that no step has filled."""

    broken: BaseException | None = None

    def __init__(self, device: Device, *, checks: bool = False, lies: float = 0.0) -> None:
        self.device, self.checks, self.lies = device, checks, lies
        self.lied = 0
        self.seconds = 0.0
        sizes = {group: len(pages[0]) for group, pages in device.pages.items()}
        self.coded_bytes = {group: size * 3 // 4 for group, size in sizes.items() if checks and size >= 16384}

    def pin(self, memory: memoryview) -> bool:
        return self.device.world.virtual  # else the product has a thread touch it

    def begin_step(self, batch: StepBatch) -> None:
        pass

    def written(self, group: str, slot: int) -> None:
        pass

    def flush(self) -> None:
        pass

    def digest(self, parts: Sequence[memoryview]) -> bytes:
        return blake2b(b"".join(parts), digest_size=16).digest()

    def to_host(self, group: str, slot: int, parts: Sequence[memoryview], done: Done, *, settled: bool = False) -> None:
        seconds = self._spend()
        done(self._leave(group, bytes(self.page(group, slot, settled)), parts), seconds)

    def to_device(self, group: str, slots: Sequence[int], pages: Sequence[Sequence[memoryview]], done: CameIn) -> None:
        for slot, parts in zip(slots, pages, strict=True):
            seconds = self._spend()
            done([self._come(group, self.page(group, slot), parts)], seconds)

    def _leave(self, group: str, data: bytes, parts: Sequence[memoryview]) -> bytes | None:
        if sum(map(len, parts)) < len(data):
            coded = self._encode(group, data)
            if coded is None:
                scramble(parts, self.device.world.rng)
                return UNFIT
            data = coded
        put(parts, data)
        self._lie(parts)
        return self._seen(data)

    def _come(self, group: str, page: memoryview, parts: Sequence[memoryview]) -> bytes | None:
        data = b"".join(parts)
        raw = len(data) == len(page)
        page[:] = data if raw else self._decode(group, data)
        self._lie([page])
        if raw:
            return self._seen(page)
        return self._seen(data) if self._encode(group, bytes(page)) == data else UNFIT

    def _encode(self, group: str, page: bytes) -> bytes | None:
        each = len(page) // self.device.size
        coded = b"".join(page[at : at + each * 3 // 4] for at in range(0, len(page), each))
        return coded if page[0] % 9 and self._decode(group, coded) == page else None

    def _decode(self, group: str, coded: bytes) -> bytes:
        """Entries repeat eight bytes."""
        each = len(coded) // self.device.size
        parts = (coded[at : at + each] for at in range(0, len(coded), each))
        return b"".join(part + part[: each // 3] for part in parts)

    def _seen(self, page: bytes | memoryview) -> bytes | None:
        return self.digest([memoryview(page)]) if self.checks else None

    def _lie(self, parts: Sequence[memoryview]) -> None:
        if self.lies and self.device.world.rng.random() < self.lies:
            self.lied += 1
            scramble(parts, self.device.world.rng)

    def page(self, group: str, slot: int, settled: bool = False) -> memoryview:
        """A page as it is after all steps that were started, or now, if none of these is to write it."""
        if not settled and isinstance(self.device, AheadDevice):
            self.device.flush()
        return self.device.pages[group][slot]

    def close(self) -> None:
        pass

    def _spend(self) -> float:
        world = self.device.world
        seconds = world.takes(world.speeds.link)
        self.seconds += seconds
        world.advance(seconds)
        return seconds


class LateCopier(Copier):
    """Copies on two streams, as a GPU's copy engines: in order of the steps and of each other, over some time later."""

    def __init__(self, device: Device, *, checks: bool = False, lies: float = 0.0) -> None:
        super().__init__(device, checks=checks, lies=lies)
        self._lock = threading.RLock()
        self._until = {True: 0.0, False: 0.0}
        self._loads: deque[tuple[tuple[str, int], Callable[[], None]]] = deque()
        self._leaving: list[list] = []
        """Copies to the host that nobody has waited for: [slot, what is read there]."""

    def to_host(self, group: str, slot: int, parts: Sequence[memoryview], done: Done, *, settled: bool = False) -> None:
        with self._lock:
            self._settle({(group, slot)})
            leaving = [(group, slot), bytes(self.page(group, slot, settled))]
            self._leaving.append(leaving)

        def over(seconds: float) -> None:
            if self.broken is None:
                with self._lock:
                    self._leaving = [other for other in self._leaving if other is not leaving]
                    data = leaving[1]
                done(self._leave(group, data, parts), seconds)

        self._queue(False, over)

    def to_device(self, group: str, slots: Sequence[int], pages: Sequence[Sequence[memoryview]], done: CameIn) -> None:
        for slot, parts in zip(slots, pages, strict=True):
            self._load(group, slot, parts, done)

    def _load(self, group: str, slot: int, parts: Sequence[memoryview], done: CameIn) -> None:
        with self._lock:
            page = self.page(group, slot)
            self._settle({(group, slot)})
            self.written(group, slot)
            page[:] = b"\xa5" * len(page)  # half-copied pages mean nothing, even where they would become what they were

            seen: list[bytes | None] = []

            def move() -> None:
                seen.append(self._come(group, page, parts))

            entry = ((group, slot), move)
            self._loads.append(entry)

        def over(seconds: float) -> None:
            if self.broken is not None:
                return
            with self._lock:
                while entry in self._loads:
                    self._loads.popleft()[1]()
            done(seen, seconds)

        self._queue(True, over)

    def begin_step(self, batch: StepBatch) -> None:
        """A step that writes a slot comes after the copies of that slot."""
        written = set()
        for piece in batch.slices:
            first = piece.start // self.device.size
            last = (piece.start + len(piece.token_ids) - 1) // self.device.size
            written |= {(group, slot) for group in self.device.pages for slot in piece.pages[group][first : last + 1]}
        with self._lock:
            self._settle(written)

    def _settle(self, slots: set[tuple[str, int]]) -> None:
        """The copies of these slots have happened, and so have those before them."""
        slots = {other for slot in slots for other in self.device.layout.find_overlaps(*slot)}
        self._leaving = [leaving for leaving in self._leaving if leaving[0] not in slots]
        if any(slot in slots for slot, _ in self._loads):
            last = max(i for i, (slot, _) in enumerate(self._loads) if slot in slots)
            for _ in range(last + 1):
                self._loads.popleft()[1]()

    def written(self, group: str, slot: int) -> None:
        """Tear the copies to the host that still read bytes of a slot which is being written."""
        if self._leaving:
            with self._lock:
                for leaving in self._leaving:
                    if self.device.same_bytes(leaving[0], (group, slot)):
                        leaving[1] = b"\x5a" * len(leaving[1])

    def _queue(self, towards_device: bool, over: Callable[[float], None]) -> None:
        world = self.device.world
        seconds = world.takes(world.speeds.link)
        until = max(self._until[towards_device], world.clock()) + seconds
        self._until[towards_device] = until
        world.later(until - world.clock(), lambda: over(seconds))


def put(parts: Sequence[memoryview], data: bytes | memoryview) -> None:
    at = 0
    for part in parts:
        part[:] = data[at : at + len(part)]
        at += len(part)
    assert at == len(data)


def scramble(parts: Sequence[memoryview], rng: random.Random) -> None:
    """Flip one bit somewhere."""
    part = rng.choice(list(parts))
    part[rng.randrange(len(part))] ^= 1 << rng.randrange(8)
