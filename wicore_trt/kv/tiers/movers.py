"""What moves and checks pages, what it moved, and the mailbox for its reports: common to the way down and the way up.

It must not decide what moves. Invariants: whatever happens on another thread comes back through the mailbox; seconds
of traffic are those of moving alone, without waiting for steps or for each other, so that bytes / seconds is a rate.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

from wicore_trt.kv.disk.page_store import PageStore
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.host import HostTier
from wicore_trt.kv.tiers.index import TierCopy, TierIndex
from wicore_trt.kv.tiers.moves import Mailbox
from wicore_trt.kv.tiers.stored import Checksum
from wicore_trt.runtime.executor import PageCopier


class Traffic:
    """Bytes and seconds towards the device (`read_*`) and into a tier (`write_*`), and failures by cause."""

    def __init__(self) -> None:
        self.read_bytes = self.write_bytes = 0
        self.read_seconds = self.write_seconds = 0.0
        self.failures: Counter[str] = Counter()

    def read(self, count: int, seconds: float) -> None:
        """A copy towards the device."""
        self.read_bytes += count
        self.read_seconds += seconds

    def wrote(self, count: int, seconds: float) -> None:
        """A copy into the tier."""
        self.write_bytes += count
        self.write_seconds += seconds


@dataclass(slots=True, eq=False)
class Movers:
    """`disk` is the index and the store of the disk tier, or None. `stored(tier, page)` is told of each page that a
    tier gained; `checker` is one thread, so that checks end in the order in which they begin."""

    host: HostTier
    disk: tuple[TierIndex, PageStore] | None
    copier: PageCopier
    stored: Callable[[str, Page], None]
    mailbox: Mailbox
    checker: ThreadPoolExecutor
    host_traffic: Traffic = field(default_factory=Traffic)
    disk_traffic: Traffic = field(default_factory=Traffic)

    def checksum(self, copy: TierCopy) -> Checksum:
        """Of what a host copy's buffers hold now. Any thread."""
        return (self.copier.digest(self.host.payload(copy)), copy.page)

    def is_right(self, copy: TierCopy) -> bool:
        """Whether no bit of a host copy flipped since it was stored. Any thread."""
        return self.checksum(copy) == copy.checksum
