"""The index of one namespace: one record per slot, so that a restart knows its pages without reading the slabs.

A record is written after its slot and before the page is acknowledged, with an ordinary write: it survives the death
of the process. It is a hint, because each read checks the slot itself; a lie costs a miss. It must not know slabs or
buffers. Invariant: a record that `put_records` wrote is never cleared by a `forget_slots` that came before it.
"""

from __future__ import annotations

import logging
import os
import threading
from array import array
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from msgspec import structs
from numpy.typing import NDArray

from wicore_trt.kv.disk.files import Files, aligned_buffer, move_buffers
from wicore_trt.kv.disk.format import (
    CHECK_BYTES,
    FLAG_PARENT,
    FLAG_SEALED,
    FLAG_TOKENS,
    KEY_BYTES,
    RECORD_MAGIC,
    SAME_IN_PARTS,
    SEALED_BYTES,
    Namespace,
    SlotFormat,
    record_check,
    record_fields,
)
from wicore_trt.kv.pages.page import Page

_AT_ONCE = 1 << 14
"""Records at once that stay in a processor's cache."""
_WRITE_ID_END = 1 << 63  # nanoseconds since 1970 in the year 2262; more is damage, and would overflow soon
_log = logging.getLogger(__name__)


def read_records(files: Files, fd: int, page_tokens: int, count: int) -> Iterator[NDArray[np.void]]:
    """Read the first `count` records of an index, some at once, in the same memory. Raises as `move_buffers`."""
    record = np.dtype(record_fields(page_tokens))
    buffer = aligned_buffer(_AT_ONCE * record.itemsize)
    for begin in range(0, count, _AT_ONCE):
        some = buffer[: min(_AT_ONCE, count - begin) * record.itemsize]
        move_buffers(files.preadv, fd, [some], begin * record.itemsize)
        yield np.frombuffer(some, dtype=record)


class FoundPages:
    """Pages in an index: `page(i)` lies in `slots(i)`, written as `write_ids[i]`; ascending by write id. `stale` are
    the other slots with records: parts of incomplete pages, pages written again elsewhere, those whose time is over at
    `now` (seconds since 1970), and damage. `expires[i]` is when a page's time is over, 0 for never; `passing` are the
    stale slots whose record has such a time. `last_write` is the largest
    write id, also of a page whose time is over, or 0. Pages know their tokens as far as `slot_format` opens them."""

    def __init__(
        self,
        records: Iterable[NDArray[np.void]],
        namespace: Namespace,
        flags: int,
        now: float = 0.0,
        slot_format: SlotFormat | None = None,
    ) -> None:
        self._format = slot_format
        found, tokens, named, passing = _take_candidates(records, namespace, flags)
        parts, counts = _find_complete(found)
        first = np.cumsum(counts) - counts
        heads = parts[first]
        keep = _find_newest(found["key"][heads], found["group"][heads])
        # the soonest of a page's parts, as a server may have died while it wrote them anew; 0, for never, wraps to the
        # latest
        ends = np.minimum.reduceat(found["expires"][parts] - np.uint32(1), first) + np.uint32(1)
        self.last_write = int(found["write_id"][heads].max(initial=0))
        if now and len(heads):
            # write ids are times: a clock that was set back since must not lengthen anybody's time
            now = max(now, self.last_write / 1e9)
            keep = keep[(ends[keep] == 0) | (ends[keep] > now)]
        self.expires: NDArray[np.uint32] = ends[keep]
        self._first, self._counts, self._parts = first[keep], counts[keep], found["slot"][parts]
        self._heads, self._groups = found[heads[keep]], namespace.groups
        self._tokens, self._places = tokens, (np.cumsum(found["part"] == 0) - 1)[heads[keep]]
        self.write_ids: NDArray[np.uint64] = self._heads["write_id"]
        stale = (self.per_slot(self.write_ids, len(named)) == 0) & named
        self.stale: list[int] = np.flatnonzero(stale).tolist()
        self.passing: list[int] = np.flatnonzero(stale & passing).tolist()

    def per_slot(self, values: NDArray[Any], num_slots: int) -> NDArray[Any]:
        """Spread over the slots the value, such as `write_ids`, of the page in it; 0 for none."""
        spread = np.zeros(num_slots, dtype=values.dtype)
        for column in range(int(self._counts.max(initial=0))):
            longer = self._counts > column
            spread[self._parts[self._first[longer] + column]] = values[longer]
        return spread

    def find_ends(self) -> dict[bytes, int]:
        """Ends of the pages with a time to live by key, in seconds since 1970."""
        at = np.flatnonzero(self.expires)
        ends: dict[bytes, int] = {}
        for key, end in zip(self._heads["key"][at].tolist(), self.expires[at].tolist(), strict=True):
            ends[key] = min(end, ends.get(key, end))
        return ends

    def __iter__(self) -> Iterator[tuple[Page, Sequence[int]]]:
        groups, slots = self._groups, array("I", self._parts.tobytes())
        known: dict[Any, Any] = {}  # one object for equal values: a fleet's disk has millions of pages
        one, slot_format = known.setdefault, self._format
        plain = slot_format is not None and not slot_format.encrypts
        for begin in range(0, len(self._heads), _AT_ONCE):
            some = slice(begin, begin + _AT_ONCE)
            heads = self._heads[some]
            names = ("key", "group", "index", "parent", "tenant", "flags", "write_id")
            columns = [heads[name].tolist() for name in names]
            columns += [values[some].tolist() for values in (self._first, self._counts)]
            columns.append(self._tokens[self._places[some]].tolist())
            for key, group, index, parent, tenant, flags, write_id, first, count, stored in zip(*columns, strict=True):
                tokens = stored[SEALED_BYTES:] if plain and flags & FLAG_TOKENS else b""
                above = one(parent, parent) if flags & FLAG_PARENT else None
                page = Page(one(key, key), groups[group], one(index, index), above, one(tenant, tenant), tokens)
                if slot_format is not None and slot_format.encrypts and flags & FLAG_TOKENS:
                    tokens = slot_format.open_tokens(page, count, write_id, stored)
                    page = structs.replace(page, tokens=tokens)
                yield page, slots[first : first + count]


class SlotIndex:
    """The index file. Its length follows that of the slabs: one record for each slot that exists."""

    def __init__(self, path: Path, namespace: Namespace, slot_format: SlotFormat, files: Files) -> None:
        """Opens or creates the file. OSError when that fails."""
        self._namespace = namespace
        self._format, self._record_bytes = slot_format, slot_format.record_bytes
        self._files = files
        self._fd = files.open(path, os.O_RDWR | os.O_CREAT)
        self.num_records = files.fstat(self._fd).st_size // self._record_bytes
        self._writing = threading.Lock()  # held during writes: a clear and a put of one slot keep their order
        self._mutex = threading.RLock()  # guards _forgotten; never held during I/O
        self._forgotten: set[int] = set()
        self._stamped: dict[int, bytes] = {}  # records to be written anew

    def resize_to(self, num_records: int) -> None:
        """Have records [0, num_records). OSError when there is no room for them; then nothing changed."""
        old, new = self.num_records * self._record_bytes, num_records * self._record_bytes
        if new < old:
            self._files.truncate(self._fd, new)
        elif new > old:
            try:
                self._files.allocate(self._fd, old, new - old)
            except OSError:
                self._files.truncate(self._fd, old)
                raise
        self.num_records = num_records

    def load_pages(self, now: float = 0.0) -> FoundPages:
        """Read all records, and take those of pages whose time is over at `now` for stale. OSError when that fails."""
        records = read_records(self._files, self._fd, self._namespace.page_tokens, self.num_records)
        return FoundPages(records, self._namespace, self._format.flags, now, self._format)

    def put_records(self, page: Page, slots: Sequence[int], write_id: int, expires: int = 0) -> None:
        """Record that `slots` hold `page`. OSError when that fails; some of the records may then be written."""
        with self._writing:
            self._write_records(slots, self._replace_records(page, slots, write_id, expires))

    def prepare_records(self, page: Page, slots: Sequence[int], write_id: int, expires: int) -> tuple[int, int, bytes]:
        """Make the records of `put_records` for a caller that writes them: (file descriptor, bytes of a record, the
        slots' records). Nothing that was noted of the slots is written any more."""
        return self._fd, self._record_bytes, b"".join(self._replace_records(page, slots, write_id, expires))

    def _replace_records(self, page: Page, slots: Sequence[int], write_id: int, expires: int) -> list[bytes]:
        with self._mutex:
            self._forgotten.difference_update(slots)
            self.leave_records(slots)
        return self._make_records(page, slots, write_id, expires)

    def stamp_records(self, page: Page, slots: Sequence[int], write_id: int, expires: int) -> None:
        """Note that the page's time is over at `expires`. Only noted: `flush_records` writes it."""
        records = self._make_records(page, slots, write_id, expires)
        with self._mutex:
            self._stamped.update(zip(slots, records, strict=True))

    def forget_slots(self, slots: Sequence[int]) -> None:
        """Note that these slots hold nothing any more; `flush_records` writes it."""
        with self._mutex:
            self._forgotten.update(slots)
            self.leave_records(slots)

    def leave_records(self, slots: Sequence[int]) -> None:
        """The records of these slots stay as they are on disk until `forget_slots` or `put_records`."""
        with self._mutex:
            for slot in slots:
                self._stamped.pop(slot, None)

    def flush_records(self) -> None:
        """Clear the records of forgotten slots and write stamped ones. OSError if that fails; the next call retries."""
        with self._writing:  # first: who writes a slot next needs what another thread clears just now
            if not self._forgotten and not self._stamped:
                return
            with self._mutex:
                slots = sorted(slot for slot in self._forgotten if slot < self.num_records)
                stamped = sorted(self._stamped.items())
                self._forgotten.clear()
                self._stamped.clear()
            try:
                self._write_records(slots, [bytes(self._record_bytes)] * len(slots))
                self._write_records([slot for slot, _ in stamped], [record for _, record in stamped])
            except OSError:
                with self._mutex:
                    again = {slot: record for slot, record in stamped if slot not in self._forgotten}
                    self._stamped = again | self._stamped
                    self._forgotten.update(slots)
                raise

    def _make_records(self, page: Page, slots: Sequence[int], write_id: int, expires: int) -> list[bytes]:
        return [self._format.make_record(page, i, len(slots), slot, write_id, expires) for i, slot in enumerate(slots)]

    def _write_records(self, slots: Sequence[int], records: Sequence[bytes]) -> None:
        for first, last in find_runs(slots):
            move_buffers(self._files.pwritev, self._fd, records[first:last], slots[first] * self._record_bytes)

    def close(self) -> None:
        """Flush, and close the file."""
        try:
            self.flush_records()
        except OSError as error:
            _log.warning("index of the disk tier: %s", error)
        self._files.close(self._fd)


def find_runs(slots: Sequence[int], slab_slots: int = 1 << 63) -> Iterator[tuple[int, int]]:
    """Ranges [first, last) of positions at which the slots follow each other in one slab of so many slots."""
    first = 0
    for at in range(1, len(slots) + 1):
        if at == len(slots) or slots[at] != slots[at - 1] + 1 or slots[at] % slab_slots == 0:
            yield first, at
            first = at


def _take_candidates(
    records: Iterable[NDArray[np.void]], namespace: Namespace, flags: int
) -> tuple[NDArray[np.void], NDArray[np.void], NDArray[np.bool_], NDArray[np.bool_]]:
    """Copy the records that are whole and belong here: the fields before the tokens; the tokens of first parts. By
    slot, whether there is any record, and whether it has an end."""
    *names, tokens, check = record_fields(namespace.page_tokens)
    fields, width = np.dtype(names), np.dtype(names).itemsize
    size = width + np.dtype([tokens, check]).itemsize
    checked = Struct(f"{size - CHECK_BYTES}s{CHECK_BYTES}s")
    rows, texts, named, passing = bytearray(), bytearray(), [np.zeros(0, bool)], [np.zeros(0, bool)]
    for some in records:
        begin = sum(map(len, named))
        named.append(some["magic"] != 0)
        passing.append(some["expires"] != 0)
        plausible = (some["magic"] == RECORD_MAGIC) & (some["slot"] == np.arange(begin, begin + len(some)))
        plausible &= (some["flags"] & FLAG_SEALED) == flags
        plausible &= (some["group"] < len(namespace.groups)) & (some["part"] < some["parts"])
        plausible &= (some["write_id"] > 0) & (some["write_id"] < _WRITE_ID_END)
        raw = some.view(np.uint8)
        plausible &= np.array([record_check(rest) == check for rest, check in checked.iter_unpack(raw.data)], bool)
        places = np.flatnonzero(plausible)
        rows += raw.reshape(-1, size)[places, :width].tobytes()
        texts += some["tokens"][places[some["part"][places] == 0]].tobytes()
    found, said = np.frombuffer(rows, fields), np.frombuffer(texts, tokens[1])
    return found, said, np.concatenate(named), np.concatenate(passing)


def _find_complete(found: NDArray[np.void]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places of complete pages, page after page in write order and part after part, and the parts of each page."""
    order = np.lexsort((found["part"], found["write_id"]))
    if not len(order):
        return order, order
    write_ids = found["write_id"][order]
    starts = np.flatnonzero(np.concatenate(([True], write_ids[1:] != write_ids[:-1])))
    counts = np.diff(np.append(starts, len(order)))
    first = np.repeat(starts, counts)
    good = found["part"][order] == np.arange(len(order)) - first
    good &= found["parts"][order] == np.repeat(counts, counts)
    same = found.getfield(f"V{SAME_IN_PARTS.stop - SAME_IN_PARTS.start}", SAME_IN_PARTS.start)
    for begin in range(0, len(order), _AT_ONCE):
        some = slice(begin, begin + _AT_ONCE)
        good[some] &= same[order[some]] == same[order[first[some]]]
    whole = np.logical_and.reduceat(good, starts)
    return order[np.repeat(whole, counts)], counts[whole]


def _find_newest(keys: NDArray[np.void], groups: NDArray[np.uint16]) -> NDArray[np.int64]:
    """Positions, ascending, of the last of each (group, key)."""
    words = np.ascontiguousarray(keys).view("<u8")[:: KEY_BYTES // 8]
    _, which, counts = np.unique(words ^ groups, return_inverse=True, return_counts=True)
    keep = counts[which] == 1  # most are alone; only the others are compared in full
    rest = np.flatnonzero(~keep)
    names = zip(groups[rest].tolist(), keys[rest].tolist(), strict=True)
    last = {name: at for at, name in zip(rest.tolist(), names, strict=True)}
    keep[list(last.values())] = True
    return np.flatnonzero(keep)
