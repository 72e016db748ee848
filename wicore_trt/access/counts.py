"""How many calls ended how, by the way they came in.

Plain numbers; it must not know calls. Invariant: what strangers write adds no name: methods and paths that are not
served count as OTHER.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

OTHER = "other"
VERBS = frozenset(("GET", "POST", "PUT", "DELETE", "HEAD", "OPTIONS", "WEBSOCKET"))


@dataclass(slots=True)
class CallCounts:
    """Ended calls of one process."""

    http: Counter[tuple[str, str, str]] = field(default_factory=Counter)  # by method, path and status
    grpc: Counter[tuple[str, str]] = field(default_factory=Counter)  # by method and code
    refused: Counter[str] = field(default_factory=Counter)  # without a valid key, by "http" and "grpc"

    def ended_http(self, method: str, path: str, status: int) -> None:
        """`path` is a route's, or OTHER."""
        self.http[method if method in VERBS else OTHER, path, str(status)] += 1

    def ended_grpc(self, method: str, code: str) -> None:
        """`method` is one that is served."""
        self.grpc[method, code] += 1
