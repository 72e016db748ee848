"""Pages that leave and come coded: every bit back, those without a code told, and coders that lie found."""

from __future__ import annotations

import ctypes
import random
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from hostile_pages import make_pages
from lanes import AtOnce, Coder, Digests, Lane

from benchmarks.gpu.page_code import encode_page
from wicore_trt.kv.disk.files import aligned_buffer
from wicore_trt.plugins.code_layout import PageCode
from wicore_trt.runtime import page_copier
from wicore_trt.runtime.executor import UNFIT
from wicore_trt.runtime.page_copier import StreamPageCopier
from wicore_trt.runtime.page_digest import PageDigest
from wicore_trt.runtime.rank_copier import RankedCopier, cut_part

CODES = {"local": PageCode(6, 32, 128), "global": PageCode(2, 32, 128)}
SLOTS = 24


class World:
    """Pools of hostile pages, of which some have no code, and a copier that codes; `coded[group]` are the buffers."""

    def __init__(self, seed: int, coder: Callable[..., Coder] = Coder, lane: Callable[[], Lane] = Lane) -> None:
        self.rng, self.lanes = random.Random(seed), (Lane(), lane(), lane(), Lane())
        made = {g: make_pages(code, SLOTS, seed).astype("<u2") for g, code in CODES.items()}
        self.pools = {group: torch.from_numpy(pages.view(np.int16).copy()) for group, pages in made.items()}
        self.truth = {group: [bytes(page) for page in pages] for group, pages in made.items()}
        digest = PageDigest(b"k" * 32, max(code.raw_bytes for code in CODES.values()))
        self.copier = StreamPageCopier(
            self.pools, 32, self.lanes, self,
            digests=Digests(digest), digest=digest, starter=AtOnce, coder=coder(CODES, pages=3),
        )  # type: ignore[arg-type]  # fmt: skip

    def unpin_all(self) -> None:
        pass

    def run(self) -> None:
        self.copier.flush()
        while any(lane.run_one() for lane in self.rng.sample(self.lanes, 4)):
            self.rng.choice(self.lanes).run_all()  # far ahead of the others, as far as events let it

    def save(self, raw: bool = False) -> dict[tuple[str, int], tuple[list[memoryview], list[bytes | None]]]:
        """Store all pages, in any order, of both groups."""
        found: dict[tuple[str, int], Any] = {}
        order = [(group, slot) for group in CODES for slot in range(SLOTS)]
        for group, slot in self.rng.sample(order, len(order)):
            size = CODES[group].raw_bytes if raw else CODES[group].coded_bytes
            slab = aligned_buffer(size)[:size]
            parts, told = [slab[:4096], slab[4096:]], list[bytes | None]()
            found[group, slot] = parts, told
            self.copier.to_host(group, slot, parts, lambda digest, seconds, told=told: told.append(digest))
            if self.rng.random() < 0.1:
                self.run()
        self.run()
        return found

    def load(self, saved: dict[tuple[str, int], Any]) -> dict[tuple[str, int], bytes | None]:
        """Bring these pages back, into slots of rubbish."""
        told: dict[tuple[str, int], bytes | None] = {}
        for group in CODES:
            slots = [slot for name, slot in saved if name == group]
            self.pools[group][slots] = 0x5A5A
            digests: list[bytes | None] = []
            pages = [saved[group, slot][0] for slot in slots]
            self.copier.to_device(group, slots, pages, lambda found, seconds, digests=digests: digests.extend(found))
            self.run()
            self.wait(digests, len(slots))
            told |= {(group, slot): digest for slot, digest in zip(slots, digests, strict=True)}
        return told

    def wait(self, told: list[Any], count: int) -> None:
        for _ in range(20_000):
            if len(told) == count:
                return
            time.sleep(0.001)
        raise AssertionError("a copy never ended")

    def bytes_of(self, group: str, slot: int) -> bytes:
        return bytes(self.pools[group][slot].numpy().view(np.uint8))


@pytest.mark.parametrize("seed", range(2))
def test_every_bit_comes_back_or_the_page_is_told_to_have_no_code(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_copier, "BATCH", 5)
    world = World(seed)
    saved = world.save()
    for _, told in saved.values():
        world.wait(told, 1)
    unfit = {name for name, (_, told) in saved.items() if told[0] == UNFIT}
    assert 4 < len(unfit) < len(saved) - 4
    raw = world.save(raw=True)
    for name in unfit:
        world.wait(raw[name][1], 1)
        saved[name] = raw[name]
    for parts, told in saved.values():
        assert told[0] == world.copier.digest(parts), "host memory has the digest of what it holds, coded or not"
    order = list(saved)
    world.rng.shuffle(order)
    came = world.load({name: saved[name] for name in order})
    for (group, slot), (_, told) in saved.items():
        assert came[group, slot] == told[0] and world.bytes_of(group, slot) == world.truth[group][slot]
    assert {len(parts[1]) for parts, _ in saved.values()} == {
        size - 4096 for code in CODES.values() for size in (code.raw_bytes, code.coded_bytes)
    }
    world.copier.close()


def test_directions_do_not_share_their_staging() -> None:
    """Pages of one group come while those of the other leave."""
    world = World(5)
    saved = world.save()
    for _, told in saved.values():
        world.wait(told, 1)
    fit = {name: page for name, page in saved.items() if page[1][0] != UNFIT}
    slots = [slot for group, slot in fit if group == "local"]
    came, again = list[bytes | None](), dict[tuple[str, int], list[bytes | None]]()
    for name in fit:
        if name[0] == "global":
            again[name] = []
            world.copier.to_host(*name, fit[name][0], lambda digest, seconds, told=again[name]: told.append(digest))
        elif slots:
            pages = [fit["local", slot][0] for slot in slots]
            world.copier.to_device("local", slots, pages, lambda found, seconds: came.extend(found))
            slots, loaded = [], slots
    world.run()
    world.wait(came, len(loaded))
    for name, told in again.items():
        world.wait(told, 1)
        assert told[0] == fit[name][1][0]
    assert came == [fit["local", slot][1][0] for slot in loaded] and len(again) > 5 < len(came)
    world.copier.close()


class Liar(Coder):
    """Lies about every page once `lies`."""

    lies = ""

    def encode_one(self, code: PageCode, page: memoryview, coded: memoryview) -> bytes:
        before = bytes(coded)
        seal = super().encode_one(code, page, coded)
        if self.lies == "encodes a bit wrong":
            coded[code.signs + 5] ^= 4
        elif self.lies == "says that all fit":
            coded[12:16] = bytes(4)
        elif self.lies == "leaves what was staged before":
            coded[:] = before
        elif self.lies == "forgets the seal":
            coded[-16:] = bytes(16)
        return seal

    def decode_one(self, code: PageCode, page: memoryview, coded: memoryview) -> bytes:
        before = bytes(page)
        if self.lies == "decodes what came before":
            coded[:] = getattr(self, "last", bytes(len(coded)))[: len(coded)].ljust(len(coded), b"\0")
        self.last = bytes(coded)
        seal = super().decode_one(code, page, coded)
        if self.lies == "decodes nothing":
            page[:] = before
        elif self.lies == "decodes a bit wrong":
            page[7] ^= 1
        elif self.lies == "decodes half of it":
            page[len(page) // 2 :] = before[len(page) // 2 :]
        return self._digest.compute_digest([page]) if self.lies.startswith("decodes") else seal


LIES = (
    "encodes a bit wrong", "says that all fit", "leaves what was staged before", "forgets the seal",
    "decodes what came before", "decodes nothing", "decodes a bit wrong", "decodes half of it",
)  # fmt: skip


@pytest.mark.parametrize("lie", LIES)
def test_a_coder_that_lies_is_found_by_the_digest(lie: str) -> None:
    liars = list[Liar]()
    world = World(3, lambda *args, **more: liars.append(Liar(*args, **more)) or liars[0])
    honest = world.save()
    for _, told in honest.values():
        world.wait(told, 1)
    liars[0].lies = lie
    saved = world.save()
    for _, told in saved.values():
        world.wait(told, 1)
    kept = {name: page for name, page in saved.items() if page[1][0] != UNFIT}
    wrong = sum(page[1][0] != UNFIT and name not in kept for name, page in honest.items())
    came = world.load(kept)
    for (group, slot), (_, told) in kept.items():
        if world.bytes_of(group, slot) != world.truth[group][slot]:
            assert came[group, slot] != told[0], f"a coder that {lie} was believed"
            wrong += 1
    assert wrong > 4, "the lie did nothing"
    world.copier.close()


class Flipping(Lane):
    """Changes some bytes of each copy, which may be of many pages."""

    def copy(self, pieces: Any) -> None:
        made = list(pieces)
        super().copy(made)
        for target, _, count in made:
            for at in range(target + 1000, target + count, 4096):
                self.put(lambda at=at: flip_byte(at))


def flip_byte(address: int) -> None:
    ctypes.c_ubyte.from_address(address).value ^= 1


def test_bits_that_flip_on_the_way_are_found() -> None:
    world = World(4, lane=Flipping)
    saved = world.save()
    for _, told in saved.values():
        world.wait(told, 1)
    kept = {name: page for name, page in saved.items() if page[1][0] != UNFIT}
    assert kept and all(world.copier.digest(parts) != told[0] for parts, told in kept.values())
    came = world.load(kept)
    for (group, slot), (_, told) in kept.items():
        assert came[group, slot] != told[0] or world.bytes_of(group, slot) == world.truth[group][slot]
    world.copier.close()


def test_ranks_code_their_parts_and_keep_a_page_raw_together() -> None:
    """Two copiers, each with its part of every page; a page that one of them has no code for goes raw, and all comes
    back."""
    code, count = PageCode(4, 32, 64), 16
    made = [np.roll(make_pages(code, count, seed).astype("<u2"), seed, axis=0) for seed in (0, 1)]
    pools = [torch.from_numpy(pages.view(np.int16).copy()) for pages in made]
    lanes = [(Lane(), Lane(), Lane()) for _ in pools]
    digest = PageDigest(b"k" * 32, code.raw_bytes)

    class Group:
        count = 2

        def unpin_all(self) -> None:
            pass

        def send(self, kind: str, *given: Any, fds: Any = ()) -> None:
            for what, call, name, *more in given[0] if kind == "copies" else ():
                told = partial(self.tell, call)
                if what == "out":
                    slot, places, _ = more
                    ranks[1].to_host(name, slot, self.cut(places), lambda d, s, told=told: told([d], s))
                else:
                    slots, pages = more
                    ranks[1].to_device(name, slots, list(map(self.cut, pages)), told)

        def tell(self, call: int, digests: Any, seconds: float) -> None:
            copier._end_part(call, 1, list(digests), seconds)

        def cut(self, places: Any) -> list[memoryview]:
            return cut_part([copier._slab[at : at + size] for at, size in places], 1, 2)

    group: Any = Group()
    ranks: list[Any] = [
        StreamPageCopier(
            {"global": pool}, 32, each, group, digests=Digests(digest), digest=digest, starter=AtOnce,
            coder=Coder({"global": code}, pages=3),
        )  # type: ignore[arg-type]
        for pool, each in zip(pools, lanes, strict=True)
    ]  # fmt: skip
    copier = RankedCopier(group, ranks[0], {"global": code.raw_bytes})
    assert copier.coded_bytes == {"global": 2 * code.coded_bytes}
    slab, page = copier.map_memory(count * 2 * code.raw_bytes), 2 * code.raw_bytes

    def run(told: list[Any], wanted: int) -> None:
        copier.flush()
        ranks[1].flush()
        while any(lane.run_one() for each in lanes for lane in each):
            pass
        for _ in range(20_000):
            if len(told) == wanted:
                return
            time.sleep(0.001)
        raise AssertionError("a copy never ended")

    def store(slot: int, size: int) -> tuple[list[memoryview], bytes | None]:
        part, told = slab[slot * page :][:size], list[bytes | None]()
        parts = [part[:12288], part[12288:]]
        copier.to_host("global", slot, parts, lambda digest, seconds: told.append(digest))
        run(told, 1)
        return parts, told[0]

    kept = {slot: store(slot, 2 * code.coded_bytes) for slot in range(count)}
    fits = [{slot for slot in range(count) if encode_page(code, pages[slot].tobytes())} for pages in made]
    assert {slot for slot, (_, told) in kept.items() if told != UNFIT} == fits[0] & fits[1]
    assert fits[0] - fits[1] and fits[0] & fits[1]
    kept |= {slot: store(slot, page) for slot in kept.keys() - (fits[0] & fits[1])}
    assert all(copier.digest(parts) == told for parts, told in kept.values())
    for pool in pools:
        pool.fill_(0x5A5A)
    came, slots = list[bytes | None](), sorted(kept, key=lambda slot: slot * 7 % count)
    copier.to_device("global", slots, [kept[slot][0] for slot in slots], lambda found, seconds: came.extend(found))
    run(came, count)
    assert came == [kept[slot][1] for slot in slots]
    for pool, pages in zip(pools, made, strict=True):
        assert pool.numpy().tobytes() == pages.tobytes()
    for rank in ranks:
        rank.close()
