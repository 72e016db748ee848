"""A strict router that follows an engine's KV events as the worker protocol sends them.

It must not read the engine but to compare. Invariant: a removal names a block that the router has in that tier and
group, no block comes twice, what it has is what the tiers have, and it has a block's parent unless no tier has that;
for full attention, which alone feeds an index of prefixes, in that group.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from smg_grpc_proto.generated import common_pb2

from oracle.checks import require
from wicore_trt.kv.manager import KVCacheManager
from wicore_trt.model.spec import GROUPS
from wicore_trt.serve.worker import TIERS, _cut_batches, _hash_key, _make_event, _make_snapshot


class Router:
    """Follows a manager's log from a snapshot on; it compares after each step that changed anything."""

    def __init__(self, manager: KVCacheManager, counts: Counter[str]) -> None:
        self._manager, self._log, self._counts = manager, manager.events, counts
        self._held = set[tuple[str, int, int]]()
        self._copies = {group: Counter[int]() for group in range(len(GROUPS))}
        self._position = -1
        self._log.add_listener(self._follow)

    def _follow(self) -> None:
        truth = {
            (TIERS[tier], GROUPS.index(page.group), _hash_key(page.key))
            for tier, page in self._manager.list_pages()
            if page.tokens
        }
        self._there = {(group, name) for _, group, name in truth}
        if self._position < 0:
            found = self._log.take_snapshot()
            self._position = found.sequence
            for batch in _make_snapshot(_cut_batches(found), found.sequence):
                self._take(batch.events, "snapshot")
        for event in self._log.list_since(self._position) or ():
            self._position = event.sequence
            self._take(_make_event(event, event.sequence).events, "event")
        require(self._position == self._log.sequence, "router", "fell behind a step")
        require(self._held == truth, "router", "has other blocks", self._held ^ truth)

    def _take(self, events: Iterable[common_pb2.KvCacheEvent], kind: str) -> None:
        for event in events:
            if event.HasField("stored"):
                stored = event.stored
                above = stored.parent_block_hash if stored.HasField("parent_block_hash") else None
                for block in stored.blocks:
                    entry = (stored.medium, stored.group_idx, block.block_hash)
                    require(entry not in self._held, "router", "a block came twice", entry)
                    places = range(stored.group_idx + 1)
                    if above is not None and not any(self._copies[group][above] for group in places):
                        gone = not any((group, above) in self._there for group in places)
                        require(gone, "router", "an unknown parent in a", kind, entry)
                        self._counts[f"block without its parent in a {kind}"] += 1
                    self._held.add(entry)
                    self._copies[stored.group_idx][block.block_hash] += 1
                    above = block.block_hash
            for name in event.removed.block_hashes:
                entry = (event.removed.medium, event.removed.group_idx, name)
                require(entry in self._held, "router", "a removal of nothing", entry)
                self._held.remove(entry)
                self._copies[event.removed.group_idx][name] -= 1
                self._counts["block removed from a router"] += 1
