"""The disk tier's directory: who owns it, what lies in it, and how far it may grow.

    <path>/LOCK                     held by the one process that uses <path>; names its pid
    <path>/secret                   keys the names of pages where no setting does
    <path>/<namespace>/namespace.json   what the pages depend on, and the geometry of the slabs
    <path>/<namespace>/index        one record per slot
    <path>/<namespace>/slab-00000   slots; all slabs but the last are full

It must not know pages. Invariant: the files under <path> never take more than `limit_bytes`, and a slab is added only
when `free_bytes` stay free on the file system. Other namespaces are deleted, oldest first, when space is needed.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import stat
import threading
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from wicore_trt.arithmetic import div_ceil
from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.kv.disk.claim import NAMESPACE, OURS, check_contents, ensure_secret, find_root, lock_directory
from wicore_trt.kv.disk.files import (
    Files,
    aligned_buffer,
    disk_bytes,
    in_memory,
    move_buffers,
    read_file,
    tree_bytes,
    write_file,
)
from wicore_trt.kv.disk.format import BLOCK_BYTES, FORMAT_VERSION, Namespace, record_bytes

SLAB_BYTES, MEMORY_SLAB_BYTES = 1 << 30, 64 << 20
"""In memory a gigabyte takes half a second, and a file that grows lets no write in."""
GROW_BYTES = 128 << 20
"""Larger files grow by so much at a time: writes wait for it."""
COUNTED_BYTES = 1 << 30
"""While more than this is left of the limit others' bytes are not counted anew, which looks at each file."""
MAX_SLABS = 512
# The file system keeps its own notes about a file and they count as used: at worst two extents of 12 bytes per slot,
# doubled, and some blocks per file.
_NOTES_PER_SLOT = 64
_NOTES_PER_SLAB = 16 << 10
_FIXED_BYTES = 64 << 10
_FULL = (errno.ENOSPC, errno.EDQUOT)
_JSON = "namespace.json"
_log = logging.getLogger(__name__)


class Space:
    """Geometry of the slots of one namespace, and how many bytes its files take."""

    def __init__(self, slot_bytes: int, slab_slots: int, page_tokens: int) -> None:
        self.stride = BLOCK_BYTES + slot_bytes
        self.slab_slots = slab_slots
        self._slot_cost = self.stride + record_bytes(page_tokens) + _NOTES_PER_SLOT
        self._slab_cost = slab_slots * self._slot_cost + _NOTES_PER_SLAB

    def slots_within(self, nbytes: int) -> int:
        """The most slots whose files stay within `nbytes`."""
        slabs, rest = divmod(max(0, nbytes - _FIXED_BYTES), self._slab_cost)
        return slabs * self.slab_slots + max(0, rest - _NOTES_PER_SLAB) // self._slot_cost

    def bytes_of(self, slots: int) -> int:
        """Bytes that the files of so many slots take at most."""
        slabs = div_ceil(slots, self.slab_slots)
        return _FIXED_BYTES + slabs * _NOTES_PER_SLAB + slots * self._slot_cost


class DiskSpace:
    """The directory, locked and fitted to the limit. `allocated` slots exist, of at most `num_slots`; `secret` is what
    lies there for the operator. EnvironmentUnfitError when another has the directory or the limit holds no slot."""

    def __init__(
        self,
        path: Path,
        namespace: Namespace,
        slot_bytes: int,
        *,
        limit_bytes: int,
        free_bytes: int,
        slab_bytes: int,
        files: Files,
    ) -> None:
        self._path = path = find_root(files, path)
        self._home = path / namespace.digest.hex()
        self.index_path = self._home / "index"
        self._limit = limit_bytes
        self._free = free_bytes
        self._files = files
        self._growing = threading.Lock()
        self._slabs: list[int] = []
        self._short = False
        self._others = limit_bytes  # bytes of others, as they were counted last
        files.claim_directory(path)
        self._lock_fd = lock_directory(files, path)
        try:
            check_contents(files, path)
            self.secret = ensure_secret(files, path)
            known = _is_namespace(files, self._home)
            while not known and tree_bytes(files, path) + _FIXED_BYTES > limit_bytes and self._delete_stale():
                pass
            files.claim_directory(self._home)
            if in_memory(files.lstat(path).st_dev):
                slab_bytes = min(slab_bytes, MEMORY_SLAB_BYTES)
            slab_bytes = max(slab_bytes, limit_bytes // (MAX_SLABS * 3 // 4))
            self._space = self._adopt_geometry(namespace, slot_bytes, max(1, slab_bytes // (BLOCK_BYTES + slot_bytes)))
            self.stride, self.slab_slots = self._space.stride, self._space.slab_slots
            self.num_slots = self._space.slots_within(limit_bytes - self._count_other_bytes(stale=False))
            if self.num_slots < 1:
                least = self._space.bytes_of(1) + self._count_other_bytes(stale=False)
                raise EnvironmentUnfitError(
                    f"A limit of {limit_bytes} bytes for {path} does not hold one KV page.",
                    fix=f"Set kv.disk_bytes to more than {least}, or remove other files from there.",
                )
            self.allocated = self._trim_slabs()
            own = self._space.bytes_of(self.allocated)
            while limit_bytes - self._count_other_bytes() < own and self._delete_stale():
                pass
            count = div_ceil(self.allocated, self.slab_slots)
            for number in range(count):
                self._slabs.append(files.open_slab(self._slab_path(number)))
            room = self.allocated + self._space.slots_within(files.free_bytes(path) - free_bytes)
            if room < self.num_slots:
                said = "disk tier at %s: the disk has room for %.1f of the %.1f GiB that kv.disk_bytes allows"
                _log.warning(said, path, *(self._space.bytes_of(slots) / (1 << 30) for slots in (room, self.num_slots)))
        except BaseException:
            self.close()
            raise

    @property
    def spare_bytes(self) -> int:
        """Bytes by which the files may still grow."""
        return max(0, self._count_possible() - self.allocated) * self.stride

    def locate_slot(self, slot: int) -> tuple[int, int]:
        """(file descriptor, offset) of an existing slot's header block."""
        slab, place = divmod(slot, self.slab_slots)
        return self._slabs[slab], place * self.stride

    def ensure_slot(self, slot: int, grow_index: Callable[[int], None]) -> bool:
        """Make `slot` exist, after its index record by `grow_index(num_records)`. False without room."""
        if slot < self.allocated:
            return True
        with self._growing:
            while self.allocated <= slot:
                try:
                    grown = self._add_slots(grow_index)
                except OSError as error:
                    if error.errno not in _FULL:
                        raise
                    grown = False
                if not grown and not self._short:
                    said = "disk tier at %s stays at %.1f GiB: the disk has no more room above kv.disk_free_bytes"
                    _log.warning(said, self._path, self._space.bytes_of(self.allocated) / (1 << 30))
                self._short = not grown
                if not grown:
                    return False
            return True

    def close(self) -> None:
        """Close the slabs and give the directory free."""
        for fd in self._slabs:
            self._files.close(fd)
        self._slabs = []
        self._files.close(self._lock_fd)

    def _add_slots(self, grow_index: Callable[[int], None]) -> bool:
        """Add GROW_BYTES to the last slab or to a new one, as far as there is room."""
        number = self.allocated // self.slab_slots
        step = max(1, GROW_BYTES // self.stride)
        end = min((number + 1) * self.slab_slots, self.num_slots, self.allocated + step)
        while (room := self._count_possible()) < end and self._delete_stale():
            pass
        end = min(end, room)
        if end <= self.allocated:
            return False
        grow_index(end)
        first = number * self.slab_slots
        old, new = (self.allocated - first) * self.stride, (end - first) * self.stride
        with self._files.hold_open(self._slab_path(number), os.O_RDWR | os.O_CREAT) as fd:
            try:
                self._files.allocate(fd, old, new - old)
            except OSError:
                self._files.truncate(fd, old)
                raise
        if number == len(self._slabs):
            self._slabs.append(self._files.open_slab(self._slab_path(number)))
        self.allocated = end
        return True

    def _count_possible(self) -> int:
        """Count the slots that may exist now."""
        free = self._files.free_bytes(self._path) - self._free
        by_floor = self.allocated + self._space.slots_within(free)
        if self._limit - self._others - self._space.bytes_of(self.allocated) < COUNTED_BYTES:
            self._others = self._count_other_bytes()
        return min(by_floor, self._space.slots_within(self._limit - self._others))

    def _slab_path(self, number: int) -> Path:
        return self._home / f"slab-{number:05d}"

    def _count_other_bytes(self, *, stale: bool = True) -> int:
        """Bytes under the path that are not this namespace's; without stale namespaces, those that stay."""
        total = tree_bytes(self._files, self._path)
        for home in (self._home, *(() if stale else self._find_stale())):
            for _, found in _own_files(self._files, home):
                total -= disk_bytes(found)
        return total

    def _find_stale(self) -> list[Path]:
        """Other namespaces, the one written longest ago first."""
        homes = (self._path / name for name in self._files.listdir(self._path) if NAMESPACE.fullmatch(name))
        found = [home for home in homes if home != self._home and _is_namespace(self._files, home)]
        return sorted(found, key=lambda home: max(found.st_mtime_ns for _, found in _own_files(self._files, home)))

    def _delete_stale(self) -> bool:
        """Delete the oldest other namespace; False without any."""
        for home in self._find_stale():
            _log.info("disk tier: deleting %s, left by another model or other settings", home)
            delete_namespace(self._files, home)
            self._others = self._limit
            return True
        return False

    def _adopt_geometry(self, namespace: Namespace, slot_bytes: int, slab_slots: int) -> Space:
        """The geometry on disk when it fits, else an empty namespace with a new one."""
        facts = {"format": FORMAT_VERSION, "slot_bytes": slot_bytes, "namespace": namespace.facts}
        try:
            found = json.loads(read_file(self._files, self._home / _JSON, _FIXED_BYTES))
        except (FileNotFoundError, ValueError, EOFError):
            found = None
        old = found.pop("slab_slots", None) if isinstance(found, dict) else None
        if found == facts and type(old) is int and old > 0:
            space = Space(slot_bytes, old, namespace.page_tokens)
            if space.slots_within(self._limit) <= MAX_SLABS * old:
                return space
        empty_namespace(self._files, self._home)
        text = json.dumps({**facts, "slab_slots": slab_slots}, indent=1, sort_keys=True) + "\n"
        write_file(self._files, self._home / _JSON, text.encode())
        return Space(slot_bytes, slab_slots, namespace.page_tokens)

    def _trim_slabs(self) -> int:
        """Cut the slabs on disk to what the limit allows; how many slots are left."""
        count, whole = 0, True
        names = sorted(name for name in self._files.listdir(self._home) if name.startswith("slab-"))
        for number, name in enumerate(names):
            path = self._home / name
            size = self._files.lstat(path).st_size
            slots = min(size // self.stride, self.slab_slots, self.num_slots - count)
            if not whole or path != self._slab_path(number) or slots <= 0:
                self._files.unlink(path)
                whole = False  # slots are numbered through: what follows a gap is lost
                continue
            if size != slots * self.stride:
                with self._files.hold_open(path, os.O_RDWR) as fd:
                    self._files.truncate(fd, slots * self.stride)
            count += slots
            whole = slots == self.slab_slots
        return count


def _is_namespace(files: Files, home: Path) -> bool:
    try:
        return stat.S_ISDIR(files.lstat(home).st_mode) and _JSON in files.listdir(home)
    except OSError:
        return False


def _own_files(files: Files, home: Path) -> list[tuple[Path, os.stat_result]]:
    """The disk tier's files in a namespace directory."""
    try:
        names = files.listdir(home)
    except FileNotFoundError:
        return []
    return [(home / name, files.lstat(home / name)) for name in sorted(names) if OURS.fullmatch(name)]


def empty_namespace(files: Files, home: Path) -> None:
    """Delete the disk tier's files in a namespace directory, its description last, so that a stop leaves no orphans."""
    for path, _ in sorted(_own_files(files, home), key=lambda found: found[0].name == _JSON):
        files.unlink(path)


def delete_namespace(files: Files, home: Path) -> None:
    """Delete a namespace's files, and its directory unless somebody's file is in it."""
    empty_namespace(files, home)
    if files.listdir(home):
        _log.warning("disk tier: %s stays, because other files are in it", home)
    else:
        files.rmdir(home)


class Wiper:
    """Overwrites slots of `slot_bytes` payload, and their header blocks, with zeros. `wiped(slot)` hears of each, in
    the thread of `wipe_slots`."""

    def __init__(self, files: Files, space: DiskSpace, slot_bytes: int, wiped: Callable[[int], None]) -> None:
        self._files = files
        self._space = space
        self._wiped = wiped
        self._slot_bytes = slot_bytes
        self._changed = threading.Condition()
        self._pending: set[int] = set()
        self._slot = -1  # that is overwritten just now

    @property
    def pending(self) -> bool:
        return bool(self._pending)

    def __contains__(self, slot: int) -> bool:
        return slot in self._pending or slot == self._slot

    def add_slots(self, slots: Iterable[int]) -> None:
        """Have slots overwritten that hold nothing which anybody may read any more."""
        with self._changed:
            self._pending.update(slots)

    def take_slots(self, slots: Sequence[int]) -> set[int]:
        """Take slots that are to be written whole; return those that were pending. Waits while one is overwritten."""
        with self._changed:
            while self._slot in slots:
                self._changed.wait()
            found = self._pending.intersection(slots)
            self._pending -= found
            return found

    def wipe_slots(self, limit_bytes: float) -> None:
        """Overwrite about `limit_bytes` of pending slots, from one thread at a time. OSError keeps a slot pending."""
        done, zeros = 0, [aligned_buffer(BLOCK_BYTES), aligned_buffer(self._slot_bytes)] if self._pending else []
        while done < limit_bytes:
            with self._changed:
                if not self._pending:
                    return
                slot = self._slot = self._pending.pop()
            failed = True
            try:
                if slot < self._space.allocated:
                    fd, offset = self._space.locate_slot(slot)
                    move_buffers(self._files.pwritev, fd, zeros, offset)
                self._wiped(slot)
                failed = False
            finally:
                with self._changed:
                    self._slot = -1
                    if failed:
                        self._pending.add(slot)
                    self._changed.notify_all()
            done += self._space.stride
