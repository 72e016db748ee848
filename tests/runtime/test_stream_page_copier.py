"""StreamPageCopier on a device whose streams are queues that run in any order the events allow."""

from __future__ import annotations

import ctypes
import random
import threading
import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from lanes import AtOnce, Digests, Event, Lane

from wicore_trt.kv.disk.files import aligned_buffer
from wicore_trt.runtime import cuda_lanes
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.runtime.page_copier import (
    BATCH,
    StreamPageCopier,
    TorchPageCopier,
    list_own_slot,
    list_written_slots,
    make_copier,
)
from wicore_trt.runtime.page_digest import PageDigest

PAGE_TOKENS, SLOTS, BYTES = 4, 3, 64
SLABS = {"global": 3, "local": 2}


class FakeDevice:
    """Four lanes; `waits` False is a copier that forgot its events."""

    def __init__(self, rng: random.Random, waits: bool = True) -> None:
        self.rng = rng
        self.lanes = tuple(Lane(waits=waits) for _ in range(4))
        self.pinned: list[memoryview] = []

    def run(self, most: int) -> None:
        """Up to `most` operations, each of a lane that can go on."""
        for _ in range(most):
            if not any(lane.run_one() for lane in self.rng.sample(self.lanes, 4)):
                assert not any(lane.queue for lane in self.lanes), "the lanes wait for each other"
                return

    def pin(self, memory: memoryview) -> bool:
        self.pinned.append(memory)
        return True

    def unpin_all(self) -> None:
        self.pinned = []


def piece(slots: list[int], start: int, count: int) -> SequenceSlice:
    return SequenceSlice(1, [0] * count, start, {"global": slots})


class World:
    """Steps and copies through a StreamPageCopier, and what the same calls do when each is over before the next."""

    def __init__(self, seed: int, waits: bool = True) -> None:
        self.rng = random.Random(seed)
        self.device = FakeDevice(self.rng, waits)
        self.pool = torch.zeros((SLOTS, BYTES), dtype=torch.uint8)
        self.truth = self.pool.clone()
        pools, digest = {"global": self.pool}, PageDigest(bytes(32), BYTES)
        digests = Digests(digest) if self.rng.random() < 0.5 else None
        self.copier = StreamPageCopier(
            pools,
            PAGE_TOKENS,
            self.device.lanes,
            self.device,
            list_own_slot,
            digests,
            digest,  # type: ignore[arg-type]
            AtOnce,
        )
        self.digests: list[tuple[bytes | None, bytes]] = []
        self.kept: list[memoryview] = []  # lanes without events copy when nobody waits any more
        self.reads: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.saved: list[tuple[memoryview, bytes]] = []
        self.done: list[int] = []
        self.loading: dict[int, threading.Event] = {}
        self.calls = 0

    def step(self, slot: int) -> None:
        """Writes a page, reads the others that are nobody's target."""
        value, compute = self.rng.randrange(256), self.device.lanes[0]
        self.copier.begin_step(StepBatch([piece([-1, slot], PAGE_TOKENS, self.rng.randint(1, PAGE_TOKENS))]))
        compute.queue.append(lambda: self.pool[slot].fill_(value))
        self.truth[slot] = value
        for other in range(SLOTS):
            if other not in self.loading:
                seen = torch.empty(BYTES, dtype=torch.uint8)
                compute.queue.append(lambda seen=seen, other=other: seen.copy_(self.pool[other]))
                self.reads.append((seen, self.truth[other].clone()))

    def buffer(self) -> tuple[memoryview, list[memoryview]]:
        slab, cut = aligned_buffer(BYTES)[:BYTES], self.rng.randint(1, BYTES - 1)
        return slab, [slab[:cut], slab[cut:]]

    def called(self, page: bytes = b"") -> Any:
        """`page`: what the digest must be of."""
        number, happened = self.calls, threading.Event()
        self.calls += 1

        def done(digest: bytes | None, seconds: float) -> None:
            assert (digest is not None) == self.copier.checks and seconds == 0.0
            if page:
                self.digests.append((digest, page))
            self.done.append(number)
            happened.set()

        return done, happened

    def save(self, slot: int) -> None:
        slab, parts = self.buffer()
        page = bytes(self.truth[slot].tolist())
        done, _ = self.called(page)
        self.copier.to_host("global", slot, parts, done)
        self.saved.append((slab, page))

    def load(self, slot: int) -> None:
        slab, parts = self.buffer()
        self.kept.append(slab)
        slab[:] = self.rng.randbytes(BYTES)
        done, self.loading[slot] = self.called(bytes(slab))
        self.copier.to_device("global", [slot], [parts], lambda found, seconds: done(*found, seconds))
        self.truth[slot] = torch.tensor(list(slab), dtype=torch.uint8)

    def check(self) -> None:
        self.copier.flush()
        self.device.run(1 << 30)
        self.copier.close()
        assert sorted(self.done) == list(range(self.calls))
        assert torch.equal(self.pool, self.truth)
        for seen, expected in self.reads:
            assert torch.equal(seen, expected), "a step read what a later copy brought"
        for slab, expected in self.saved:
            assert bytes(slab) == expected, "the host got a page of another time"
        for digest, page in self.digests:
            assert digest in (None, self.copier.digest([memoryview(page)])), "the digest of something else"


def play(seed: int, waits: bool = True) -> None:
    world = World(seed, waits)
    for _ in range(40):
        slot = world.rng.randrange(SLOTS)
        world.rng.choice([world.step, world.step, world.save, world.load])(slot)
        if world.rng.random() < 0.3:
            world.copier.flush()
        world.device.run(world.rng.choice([0, 0, 1, 4, 30]))
        for other, happened in list(world.loading.items()):
            if happened.is_set():  # from now on steps may read it
                del world.loading[other]
    world.check()


def test_steps_and_copies_see_pages_in_the_order_of_the_calls() -> None:
    for _ in range(40):
        seed = random.getrandbits(32)
        print(f"seed {seed}")
        play(seed)


def test_a_copier_without_waits_is_noticed() -> None:
    failed = 0
    for seed in range(10):
        try:
            play(seed, waits=False)
        except (AssertionError, RuntimeError):
            failed += 1
    assert failed > 0


def test_done_comes_when_the_copy_is_over() -> None:
    world = World(1)
    slab, parts = world.buffer()
    done, happened = world.called()
    world.copier.to_host("global", 0, parts, done)
    world.device.run(100)
    assert not world.device.lanes[1].queue, "it begins with its batch"
    world.copier.flush()
    assert not happened.wait(0.02)
    world.device.run(100)
    assert happened.wait(60)
    world.check()


@pytest.mark.parametrize("settled", [True, False])
def test_a_settled_page_waits_for_no_step_but_for_copies_of_its_slot(settled: bool) -> None:
    world = World(6)
    compute, out, into, behind = world.device.lanes
    for slot in (0, 1):
        world.step(slot)  # never ends here
    slab, parts = world.buffer()
    done, happened = world.called(bytes(BYTES))
    world.copier.to_host("global", 2, parts, done, settled=settled)
    world.copier.flush()
    while out.run_one() or into.run_one():
        pass
    assert happened.wait(2 if settled else 0.05) == settled
    if settled:
        source = world.rng.randbytes(BYTES)
        slab[:] = source
        loaded, _ = world.called()
        world.copier.to_device("global", [2], [[slab]], lambda found, seconds: loaded(*found, seconds))
        copy, _ = world.called(source)
        target = aligned_buffer(BYTES)[:BYTES]
        world.copier.to_host("global", 2, [target], copy, settled=True)
        world.copier.flush()
        while out.run_one():
            pass
        assert bytes(target) != source, "it came before the page was there"
        world.truth[2] = torch.tensor(list(source), dtype=torch.uint8)
        world.saved.append((target, source))
    world.check()


def test_copies_begin_in_batches() -> None:
    """One event before and one behind; a slot that is asked for again, in whatever direction, begins another batch."""
    world = World(4)
    for slot in range(SLOTS):
        world.save(slot)
    assert not any(lane.queue for lane in world.device.lanes)
    world.load(1)
    out, into, behind = world.device.lanes[1:]
    assert len([entry for entry in out.queue if isinstance(entry, Event)]) == 1 and not into.queue
    assert [len(batch) for batch in (world.copier._leaving.copies, world.copier._coming.copies)] == [0, 1]
    world.copier.flush()
    assert len([entry for entry in into.queue if isinstance(entry, Event)]) == 2, "the steps, and the page that leaves"
    world.check()
    assert BATCH > SLOTS


@pytest.mark.parametrize("first", [0, 1, 5])
def test_a_call_for_many_pages_is_cut_into_batches(first: int) -> None:
    """Each page comes into its slot, and is heard of once, in order, with its own digest."""
    count, rng, device = 3 * BATCH - 7, random.Random(first), FakeDevice(random.Random(1))
    pool, digest = torch.zeros((count, BYTES), dtype=torch.uint8), PageDigest(bytes(32), BYTES)
    copier = StreamPageCopier({"global": pool}, 4, device.lanes, device, list_own_slot, Digests(digest), digest, AtOnce)  # type: ignore[arg-type]
    slots, slab = rng.sample(range(count), count), aligned_buffer(BYTES * count)
    slab[:] = rng.randbytes(len(slab))
    pages = [slab[at : at + BYTES] for at in range(0, BYTES * count, BYTES)]
    parts = [[page[:cut], page[cut:]] for page in pages for cut in [rng.randrange(4, BYTES, 4)]]
    reports: list[list[bytes | None]] = []
    for begin, end in ((0, first), (first, count)):
        copier.to_device("global", slots[begin:end], parts[begin:end], lambda found, _: reports.append([*found]))
    copier.flush()
    device.run(1 << 30)
    copier.close()
    assert [found for report in reports for found in report] == [digest.compute_digest([page]) for page in pages]
    assert len(reports) == 3 + (first > 0) and max(map(len, reports)) <= BATCH
    for slot, page in zip(slots, pages, strict=True):
        assert bytes(pool[slot].numpy()) == bytes(page)


def test_slots_side_by_side_are_one_copy() -> None:
    """But for memory that was locked piece by piece, whose borders no copy may pass."""
    world, slab = World(4), aligned_buffer(4 * 4096)
    asked: list[list[tuple[int, int, int]]] = []
    for lane in world.device.lanes:
        lane.copy = lambda pieces: asked.append(list(pieces))  # type: ignore[method-assign]
    parts = [slab[at : at + 16] for at in (0, 16, 48, 32)]
    world.copier.to_host("global", 1, parts, lambda *_: None)
    world.copier.flush()
    world.copier.pin(slab[16:])
    world.copier.to_device("global", [1], [parts], lambda *_: None)
    world.copier.flush()
    base = world.pool.data_ptr() + BYTES
    host = ctypes.addressof(ctypes.c_char.from_buffer(slab))
    assert asked[0] == [(host, base, 32), (host + 32, base + 48, 16), (host + 48, base + 32, 16)]
    assert [(source - host, size) for _, source, size in asked[1]] == [(0, 16), (16, 16), (32, 16), (48, 16)]
    for slot in (1, 0):
        world.copier.to_host("global", slot, [slab[64 + slot * BYTES :][:BYTES]], lambda *_: None)
    world.copier.flush()
    assert asked[2] == [(host + 64, base - BYTES, 2 * BYTES)], "two pages"
    world.device.run(1000)
    world.copier.close()


def test_a_busy_driver_does_not_hold_up_who_asks() -> None:
    """And a step that writes the slot waits until its copy is on the lane."""
    free, order = threading.Event(), list[str]()
    world = World(5)
    copier = StreamPageCopier({"global": world.pool}, PAGE_TOKENS, world.device.lanes, world.device)  # type: ignore[arg-type]
    out, real = world.device.lanes[1], world.device.lanes[1].copy

    def slow(pieces: Any) -> None:
        assert free.wait(60)
        order.append("copy")
        real(pieces)

    out.copy = slow  # type: ignore[method-assign]
    done = threading.Event()
    copier.to_host("global", 1, [aligned_buffer(BYTES)[:BYTES]], lambda *_: done.set())
    copier.flush()
    copier.begin_step(StepBatch([piece([0, 2], PAGE_TOKENS, 1)]))
    step = threading.Thread(
        target=lambda: (copier.begin_step(StepBatch([piece([0, 1], PAGE_TOKENS, 1)])), order.append("step"))
    )
    step.start()
    time.sleep(0.02)
    assert not order
    free.set()
    step.join(60)
    assert order == ["copy", "step"]
    world.device.run(1000)
    assert done.wait(60)
    copier.close()


def test_steps_wait_for_the_slots_that_they_write_alone() -> None:
    world = World(2)
    world.save(0)
    world.copier.begin_step(StepBatch([piece([0, 1], PAGE_TOKENS, 1)]))
    assert not any(isinstance(entry, Event) for entry in world.device.lanes[0].queue)
    world.copier.begin_step(StepBatch([piece([0, 1], PAGE_TOKENS - 1, 2)]))
    assert sum(isinstance(entry, Event) for entry in world.device.lanes[0].queue) == 1
    world.check()
    assert not world.copier._under_way


def test_slots_written() -> None:
    batch = StepBatch([piece([5, 6, 7], 3, 5), SequenceSlice(2, [1], 4, {"global": [8, 9], "local": [-1, 2]})])
    assert set(list_written_slots(batch, 4)) == {("global", 5), ("global", 6), ("global", 9), ("local", 2)}


def test_memory_is_pinned_until_the_end() -> None:
    world = World(3)
    slab = aligned_buffer(4096)
    assert world.copier.pin(slab) and world.device.pinned == [slab]
    world.save(1)
    world.check()
    assert not world.device.pinned


def test_the_cpu_copies_at_once() -> None:
    copier = make_copier({"global": torch.zeros((2, 8))}, PAGE_TOKENS)
    assert isinstance(copier, TorchPageCopier) and not copier.pin(aligned_buffer(4096))


def test_a_device_that_fails_is_heard_of() -> None:
    world = World(3)
    slab, parts = world.buffer()
    done, happened = world.called()
    world.copier._out._over = lambda batch: 1 / 0  # as synchronizing raises on a device that is lost
    world.copier.to_host("global", 0, parts, done)
    world.copier.flush()
    world.device.run(100)
    end = time.monotonic() + 60
    while world.copier.broken is None and time.monotonic() < end:
        time.sleep(0.01)
    assert isinstance(world.copier.broken, ZeroDivisionError) and not happened.is_set()


def test_slots_that_share_memory_wait_for_each_others_copies() -> None:
    """A page leaves for the host; its slab changes hands, and a step writes another group's page in the same bytes."""
    layout = KVLayout(PAGE_TOKENS, "float32", {"global": 6, "local": 4}, {"global": 32, "local": 48}, SLABS)
    seen = {}
    for overlapping in (layout.find_overlaps, list_own_slot):
        memory, device = torch.zeros(192, dtype=torch.uint8), FakeDevice(random.Random(1))
        pools = {"global": memory.view(6, 32), "local": memory.view(4, 48)}
        copier = StreamPageCopier(pools, PAGE_TOKENS, device.lanes, device, overlapping, starter=AtOnce)  # type: ignore[arg-type]
        compute, out, into, behind = device.lanes
        host, done = aligned_buffer(32)[:32], threading.Event()
        copier.to_host("global", 4, [host], lambda *_, done=done: done.set())  # bytes 128 to 160: local pages 2 and 3
        copier.begin_step(StepBatch([SequenceSlice(1, [0], 0, {"local": [2]})]))
        compute.put(lambda pool=pools["local"]: pool[2].fill_(9))
        copier.to_device("global", [3], [[memoryview(bytearray(b"\7" * 32))]], lambda *_: None)  # and 96 to 128: page 2
        copier.flush()
        compute.run_all()
        for lane in (into, behind, out, compute, into, behind):
            lane.run_all()
        assert done.wait(60)
        seen[overlapping] = bytes(host), bytes(memory[96:128].numpy())
        copier.close()
    assert seen[layout.find_overlaps] == (bytes(32), b"\7" * 32)
    assert seen[list_own_slot][0] != bytes(32), "the copy read what the step wrote: nothing waited"


def test_copies_asked_for_together_that_share_bytes_keep_their_order() -> None:
    """A page comes in; what lies in the same bytes under another name leaves: with the bytes that came."""
    layout = KVLayout(PAGE_TOKENS, "float32", {"global": 6, "local": 4}, {"global": 32, "local": 48}, SLABS)
    memory, device = torch.zeros(192, dtype=torch.uint8), FakeDevice(random.Random(1))
    pools = {"global": memory.view(6, 32), "local": memory.view(4, 48)}
    copier = StreamPageCopier(pools, PAGE_TOKENS, device.lanes, device, layout.find_overlaps, starter=AtOnce)  # type: ignore[arg-type]
    host, done = aligned_buffer(48)[:48], threading.Event()
    copier.to_device("global", [3], [[memoryview(bytearray(b"\7" * 32))]], lambda *_: None)  # bytes 96 to 128
    copier.to_host("local", 2, [host], lambda *_: done.set())  # 96 to 144
    copier.flush()
    device.run(1000)
    assert done.wait(60) and bytes(host) == b"\7" * 32 + bytes(16)
    copier.close()


def test_what_overlaps_is_what_has_a_byte_in_common() -> None:
    layout = KVLayout(PAGE_TOKENS, "float32", {"global": 6, "local": 4}, {"global": 32, "local": 48}, SLABS)
    for group, slot in [("global", i) for i in range(6)] + [("local", i) for i in range(4)]:
        mine = set(range(slot * layout.page_bytes[group], (slot + 1) * layout.page_bytes[group]))
        expected = [
            (other, i)
            for other, size in layout.page_bytes.items()
            for i in range(layout.num_pages[other])
            if other != group and mine & set(range(i * size, i * size + size))
        ]
        assert layout.find_overlaps(group, slot) == [(group, slot), *expected]
    assert replace(layout, slab_pages=None).find_overlaps("global", 1) == [("global", 1)]
    assert layout.separate_slots() == {"global": range(3), "local": range(2, 4)}
    assert replace(layout, slab_pages=None).separate_slots() == {"global": range(6), "local": range(4)}
    assert layout.memory_bytes == 192 and replace(layout, slab_pages=None).memory_bytes == 384


def test_a_copy_that_cannot_begin_breaks_the_copier() -> None:
    world = World(1)
    parts = [aligned_buffer(BYTES)]

    def copy(pieces: object) -> None:
        raise RuntimeError("cuMemcpyAsync")

    world.device.lanes[2].copy = copy  # type: ignore[method-assign]
    world.copier.to_device("global", [1], [parts], lambda *_: pytest.fail("it never began"))
    world.copier.flush()
    assert str(world.copier.broken) == "cuMemcpyAsync"
    with pytest.raises(RuntimeError, match="could not begin"):
        world.copier.begin_step(StepBatch([piece([0, 1], PAGE_TOKENS, 1)]))
    world.copier.to_device("global", [1], [parts], lambda *_: pytest.fail("it never began"))
    world.copier.close()
    assert not world.device.pinned


def test_of_a_run_no_page_is_told_behind_one_that_never_came() -> None:
    """Whoever asked takes the first that are told for the first that it asked for."""
    count, told = 2 * BATCH, list[bytes | None]()
    world, pool = World(1), torch.zeros((2 * BATCH, BYTES), dtype=torch.uint8)
    copier = StreamPageCopier({"global": pool}, PAGE_TOKENS, world.device.lanes, world.device, starter=AtOnce)  # type: ignore[arg-type]
    into, calls = world.device.lanes[2], list[int]()

    def copy(pieces: Any) -> None:
        calls.append(len(pieces))
        if len(calls) == 1:
            raise RuntimeError("the first half")
        Lane.copy(into, pieces)

    into.copy = copy  # type: ignore[method-assign]
    pages = [[aligned_buffer(BYTES)[:BYTES]] for _ in range(count)]
    copier.to_device("global", range(count), pages, lambda found, seconds: told.extend(found))
    copier.flush()
    world.device.run(10 * count)
    copier.close()
    assert str(copier.broken) == "the first half" and calls == [BATCH] and not told
    world.copier.close()


@pytest.mark.parametrize("what", ["event", "thread"])
def test_a_batch_that_fails_where_a_step_begins_breaks_the_copier(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The step fails, its sequences run again each alone, and whoever waits for the copies must hear of it."""
    world = World(1)
    target, name = (world.device.lanes[0], "record") if what == "event" else (world.copier._into.starter, "submit")

    def fail(*args: object) -> None:
        raise RuntimeError("once")

    world.copier.to_device("global", [1], [[aligned_buffer(BYTES)]], lambda *_: pytest.fail("it never began"))
    again = StepBatch([piece([0, 1], PAGE_TOKENS, 1)])
    with monkeypatch.context() as patched, pytest.raises(RuntimeError, match="once"):
        patched.setattr(target, name, fail)
        world.copier.begin_step(again)
    assert str(world.copier.broken) == "once"
    if what == "thread":
        with pytest.raises(RuntimeError, match="could not begin"):
            world.copier.begin_step(again)
    world.copier.close()


@pytest.mark.parametrize("native", [True, False])
def test_copies_go_to_the_driver_in_order_until_one_is_refused(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, ...]] = []
    kind = ctypes.CFUNCTYPE(ctypes.c_int, *(ctypes.c_void_p,) * 2, ctypes.c_size_t, ctypes.c_void_p)
    memcpy = kind(lambda *call: 0 if len(seen) < 5 and seen.append(call) is None else 7)
    if not native:
        monkeypatch.setattr(cuda_lanes, "open_library", lambda: None)
    elif cuda_lanes.open_library() is None:
        pytest.skip("the library was not built")
    put = cuda_lanes.copy_all(memcpy)
    pieces = [(1 << 40, 2, 3), (4, 5, 6), (7, 8, 1 << 33)]
    assert put(pieces, 9) == 0 and seen == [(*p, 9) for p in pieces]
    assert put(pieces, 9) == 7 and len(seen) == 5
