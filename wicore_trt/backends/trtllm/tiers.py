"""Our host and disk tiers under another engine's block pool: one layer group, pages by chain key.

Must not know TensorRT-LLM. Invariant: `match` returns only pages whose bytes were just checked against their identity,
and which stay until they are released (I5).
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from itertools import takewhile

from wicore_trt.config import KVSettings
from wicore_trt.kv.disk.claim import derive_secret
from wicore_trt.kv.disk.format import Namespace
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.moves import Fetch, Stage
from wicore_trt.kv.tiers.open_tiers import open_tiers
from wicore_trt.kv.tiers.tiers import LowerTiers
from wicore_trt.kv.tiers.up import IN_FLIGHT
from wicore_trt.runtime.executor import PageCopier

GROUP = "blocks"
_WAIT_S = 0.02


class BlockTiers:
    """Tiers for pages of `namespace`, which has the one group GROUP; `copier` moves them to and from the pool. All
    calls, those of `lower` too, come from one thread. `secret` is the operator's, None where neither a setting nor a
    disk tier keeps one. Raises what `open_tiers` raises."""

    def __init__(self, settings: KVSettings, namespace: Namespace, copier: PageCopier) -> None:
        self.lower = open_tiers(settings, namespace, GROUP, copier)
        store = self.lower.store
        self.secret = derive_secret(settings.salt) if settings.salt else store.secret if store is not None else None

    def has_page(self, page: Page) -> bool:
        """Tell whether some tier has the page, or is getting it."""
        return self.lower.find_tier(*page.name) is not None

    def match(self, chain: Sequence[bytes], pages: Sequence[Page], timeout_s: float) -> list[Fetch]:
        """Find the longest run of `pages`, from the first on, in host memory or loaded from disk within `timeout_s`,
        with right checksums. Each is held until it is released or uploaded. `chain` has the keys of the whole
        prompt, from which the eviction policy learns."""
        self.lower.touch_chain(chain, None)
        wanted = list(takewhile(self.has_page, pages))
        match = _Match(self.lower, wanted)
        end = time.monotonic() + timeout_s
        while not match.complete and (left := end - time.monotonic()) > 0:
            match.start()
            if not match.waiting and not self.lower.movers.outstanding:
                break  # the host is full of pages that are held
            self.lower.wait_for_report(min(left, _WAIT_S))
            match.take_in()
        return match.close()


class _Match:
    """Fetches of one `match`, in no particular order. `waiting` are unanswered pages by their place. Pages from `_stop`
    on are useless, because one before them is missing."""

    def __init__(self, tiers: LowerTiers, pages: Sequence[Page]) -> None:
        self._tiers = tiers
        self._pages = pages
        self._inbox: deque[Fetch] = deque()
        self._arrived: dict[int, Fetch] = {}
        self._started = 0
        self._stop = len(pages)
        self.waiting: dict[Fetch, int] = {}

    @property
    def complete(self) -> bool:
        return self._started >= self._stop and all(place >= self._stop for place in self.waiting.values())

    def start(self) -> None:
        while self._started < self._stop and len(self.waiting) < IN_FLIGHT:
            fetch = self._tiers.up.fetch_page(self._pages[self._started], self._inbox)
            if fetch is None:
                return
            self.waiting[fetch] = self._started
            self._started += 1
            self.take_in()

    def take_in(self) -> None:
        while self._inbox:
            fetch = self._inbox.popleft()
            place = self.waiting.pop(fetch)
            if fetch.stage is Stage.HERE:
                self._arrived[place] = fetch
            else:
                self._stop = min(self._stop, place)

    def close(self) -> list[Fetch]:
        """Return the run from the first page on; pages beyond a gap are released, now or when they arrive."""
        run = 0
        while run in self._arrived:
            run += 1
        for fetch in [*self.waiting, *(fetch for place, fetch in self._arrived.items() if place >= run)]:
            self._tiers.up.release_fetch(fetch)
        return [self._arrived[place] for place in range(run)]
