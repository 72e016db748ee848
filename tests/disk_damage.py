"""Damage on purpose to a disk cache directory that no store holds, for tests and campaigns.

What a disk, a file system, a copy gone wrong or somebody with a shell can do to files between two runs. It must not
know what a store makes of it. Invariant: `Vandal.do` returns True when, and only when, it changed a file.
"""

from __future__ import annotations

import enum
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

from wicore_trt.kv.disk.format import BLOCK_BYTES, record_bytes


class Damage(enum.Enum):
    """What happens to a directory."""

    FLIP_SLAB_BIT = "bit flipped in a slab"
    FLIP_INDEX_BIT = "bit flipped in the index"
    FLIP_NAMESPACE_BIT = "bit flipped in namespace.json"
    TRUNCATE = "file cut short"
    EXTEND = "bytes appended to a file"
    DELETE = "file deleted"
    SWAP_SLOTS = "two slots swapped"
    COPY_SLOT = "one slot copied over another"
    TEAR_SLOT = "header of one slot, payload of another"
    ZERO_HEADER = "header zeroed"
    ZERO_PAYLOAD = "payload zeroed"
    SWAP_SLABS = "two slabs swapped"
    SWAP_RECORDS = "two index records swapped"
    GARBAGE_INDEX = "index of random bytes"
    EMPTY_INDEX = "index of zeros"
    STALE_INDEX = "old index, new slabs"
    STALE_SLABS = "new index, old slabs"
    CHANGE_NAMESPACE = "other facts in namespace.json"
    FOREIGN_SLAB = "slab of another rank"
    FOREIGN_INDEX = "index of another rank"
    FOREIGN_FILES = "slabs and index of another rank"


class Vandal:
    """Damages one namespace directory (`home`) with slots of `slot_bytes`, by a seed. `other`: the namespace directory
    of another rank with the same geometry; without it FOREIGN kinds do nothing, nor do STALE kinds without
    `remember`."""

    def __init__(self, home: Path, slot_bytes: int, *, seed: int = 0, other: Path | None = None) -> None:
        self._home = home
        self._other = other
        self._old: dict[str, bytes] = {}
        self._random = random.Random(seed)
        self._stride = stride = BLOCK_BYTES + slot_bytes
        self._do: dict[Damage, Callable[[], bool]] = {
            Damage.FLIP_SLAB_BIT: lambda: self._flip(self._slabs()),
            Damage.FLIP_INDEX_BIT: lambda: self._flip(self._named("index")),
            Damage.FLIP_NAMESPACE_BIT: lambda: self._flip(self._named("namespace.json")),
            Damage.TRUNCATE: lambda: self._resize(longer=False),
            Damage.EXTEND: lambda: self._resize(longer=True),
            Damage.DELETE: self._delete,
            Damage.SWAP_SLOTS: lambda: self._slots(0, stride, back=True),
            Damage.COPY_SLOT: lambda: self._slots(0, stride, back=False),
            Damage.TEAR_SLOT: lambda: self._slots(BLOCK_BYTES, stride, back=False),
            Damage.ZERO_HEADER: lambda: self._zero(0, BLOCK_BYTES),
            Damage.ZERO_PAYLOAD: lambda: self._zero(BLOCK_BYTES, stride),
            Damage.SWAP_SLABS: self._swap_slabs,
            Damage.SWAP_RECORDS: self._swap_records,
            Damage.GARBAGE_INDEX: lambda: self._fill_index(self._random.randbytes),
            Damage.EMPTY_INDEX: lambda: self._fill_index(bytes),
            Damage.STALE_INDEX: lambda: self._bring_back(index=True),
            Damage.STALE_SLABS: lambda: self._bring_back(index=False),
            Damage.CHANGE_NAMESPACE: self._change_namespace,
            Damage.FOREIGN_SLAB: lambda: self._foreign("slab-"),
            Damage.FOREIGN_INDEX: lambda: self._foreign("index"),
            Damage.FOREIGN_FILES: lambda: self._foreign("slab-", "index"),
        }

    def remember(self) -> None:
        """Keep today's files in memory: what STALE damage brings back."""
        self._old = {path.name: path.read_bytes() for path in self._home.iterdir()}

    def do(self, damage: Damage) -> bool:
        """Do one piece of damage at a random place; False when there was nothing to damage."""
        return self._do[damage]()

    def _slabs(self) -> list[Path]:
        return sorted(path for path in self._home.glob("slab-*") if path.stat().st_size >= self._stride)

    def _named(self, prefix: str = "") -> list[Path]:
        return sorted(path for path in self._home.glob(f"{prefix}*") if path.stat().st_size)

    def _flip(self, paths: list[Path]) -> bool:
        if not paths:
            return False
        path = self._random.choice(paths)
        bit = self._random.randrange(path.stat().st_size * 8)
        with path.open("r+b") as file:
            file.seek(bit // 8)
            byte = file.read(1)[0]
            file.seek(bit // 8)
            file.write(bytes([byte ^ 1 << bit % 8]))
        return True

    def _resize(self, *, longer: bool) -> bool:
        paths = self._named()
        if not paths:
            return False
        path = self._random.choice(paths)
        size = path.stat().st_size
        with path.open("r+b") as file:
            if longer:
                file.seek(size)
                file.write(self._random.randbytes(self._random.randrange(1, 2 * self._stride)))
            else:
                file.truncate(self._random.randrange(size))
        return True

    def _delete(self) -> bool:
        paths = self._named()
        for path in paths[:1] and [self._random.choice(paths)]:
            path.unlink()
        return bool(paths)

    def _two_slots(self) -> list[tuple[Path, int]]:
        """(slab, offset) of two different slots."""
        slots = [(path, at) for path in self._slabs() for at in self._offsets(path, self._stride)]
        return self._random.sample(slots, 2) if len(slots) > 1 else []

    @staticmethod
    def _offsets(path: Path, step: int) -> range:
        return range(0, path.stat().st_size - step + 1, step)

    def _slots(self, first: int, last: int, *, back: bool) -> bool:
        """Bytes [first, last) of one slot over those of another, and with `back` the other way as well."""
        slots = self._two_slots()
        if not slots:
            return False
        data = []
        for path, at in slots:
            with path.open("rb") as file:
                file.seek(at + first)
                data.append(file.read(last - first))
        self._put(*slots[1], first, data[0])
        if back:
            self._put(*slots[0], first, data[1])
        return data[0] != data[1]

    @staticmethod
    def _put(path: Path, at: int, first: int, data: bytes) -> None:
        with path.open("r+b") as file:
            file.seek(at + first)
            file.write(data)

    def _zero(self, first: int, last: int) -> bool:
        slots = self._two_slots()
        if slots:
            self._put(*slots[0], first, bytes(last - first))
        return bool(slots)

    def _swap_slabs(self) -> bool:
        slabs = self._slabs()
        if len(slabs) < 2:
            return False
        one, two = self._random.sample(slabs, 2)
        between = self._home / "between"
        one.rename(between)
        two.rename(one)
        between.rename(two)
        return True

    def _swap_records(self) -> bool:
        for path in self._named("index"):
            data = bytearray(path.read_bytes())
            try:
                facts = json.loads((path.parent / "namespace.json").read_bytes())
                size = record_bytes(facts["namespace"]["page_tokens"])
            except (ValueError, KeyError, TypeError):
                continue  # damaged before
            starts = list(self._offsets(path, size))
            if len(starts) > 1:
                one, two = (slice(at, at + size) for at in self._random.sample(starts, 2))
                data[one], data[two] = data[two], data[one]
                changed = data[one] != data[two]
                path.write_bytes(data)
                return changed
        return False

    def _fill_index(self, fill: Callable[[int], bytes]) -> bool:
        for path in self._named("index"):
            path.write_bytes(fill(path.stat().st_size))
            return True
        return False

    def _bring_back(self, *, index: bool) -> bool:
        """The remembered index, or the remembered slabs."""
        changed = False
        for name, data in self._old.items():
            path = self._home / name
            if (name == "index") is index and name != "namespace.json" and path.exists():
                changed |= path.read_bytes() != data
                path.write_bytes(data)
        return changed

    def _change_namespace(self) -> bool:
        """The facts of another rank under this directory's name, or another size of slots."""
        for path in self._named("namespace.json"):
            text = path.read_text(errors="replace")
            old, new = (
                ('"rank": 0', '"rank": 1') if self._random.random() < 0.5 else ('"slot_bytes": ', '"slot_bytes": 1')
            )
            path.write_text(text.replace(old, new))
            return old in text
        return False

    def _foreign(self, *prefixes: str) -> bool:
        if self._other is None:
            return False
        found = [path for path in self._other.iterdir() if path.name.startswith(prefixes)]
        for path in found:
            shutil.copyfile(path, self._home / path.name)
        return bool(found)
