"""How many calls ended how, by the way they came in.

Plain numbers; it must not know calls. Invariant: what strangers write adds no name: methods and paths that are not
served count as OTHER.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

OTHER = "other"
VERBS = frozenset(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "WEBSOCKET"))


@dataclass(slots=True)
class CallCounts:
    """Ended calls of one process."""

    http: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by method, path and status
    grpc: Counter[tuple[str, str]] = field(default_factory=Counter)  # by method and code
    refused: Counter[str] = field(default_factory=Counter)  # without a valid key, by "http" and "grpc"

    @classmethod
    def of(cls, told: Mapping[str, Any]) -> CallCounts:
        """What `told` told."""
        made = cls(refused=Counter(told["refused"]))
        for method, path, status, count in told["http"]:
            made.http[method, path, status] = count
        for method, code, count in told["grpc"]:
            made.grpc[method, code] = count
        return made

    def told(self) -> dict[str, Any]:
        """As JSON has it."""
        rows = {"http": self.http.items(), "grpc": self.grpc.items()}
        return {way: [(*name, count) for name, count in found] for way, found in rows.items()} | {
            "refused": self.refused
        }

    def ended_http(self, method: str, path: str, status: int) -> None:
        """`path` is a route's, or OTHER."""
        self.http[method if method in VERBS else OTHER, path, str(status)] += 1

    def ended_grpc(self, method: str, code: str) -> None:
        """`method` is one that is served."""
        self.grpc[method, code] += 1
