"""Names that clients gave to their requests, over all fronts of an engine.

For any thread. It must not know sockets. Invariants: a tenant has one live request of a name; a name is free when each
sequence of its request has ended or been given up, or its front has left.
"""

from __future__ import annotations

import threading

from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.link.messages import Add
from wicore_trt.types import FinishReason, TokenOutput


class Names:
    """Requests by tenant and name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._requests: dict[tuple[str, str], str] = {}
        self._taken: dict[str, tuple[tuple[str, str], set[int]]] = {}  # name, and sequences that live, by request

    def take(self, request: Add) -> None:
        """Raises InvalidRequestError for a name that a live request has."""
        if not request.name:
            return
        name = request.tenant, request.name
        with self._lock:
            if name in self._requests:
                raise InvalidRequestError(f"Request id {shown(request.name)} is in use.", field="request_id")
            self._requests[name] = request.request_id
            self._taken[request.request_id] = name, set(range(request.params.n))

    def find(self, tenant: str, name: str) -> str | None:
        """The live request of this name."""
        with self._lock:
            return self._requests.get((tenant, name))

    def ended(self, output: TokenOutput) -> None:
        """The last output of a sequence."""
        self.drop(output.request_id, None if output.finish_reason is FinishReason.ERROR else output.index)

    def drop(self, request_id: str, index: int | None = None) -> None:
        """One of a request's sequences, or all of them, are nobody's any more."""
        with self._lock:
            found = self._taken.get(request_id)
            if found is None:
                return
            name, live = found
            live.discard(-1 if index is None else index)
            if index is None or not live:
                del self._taken[request_id], self._requests[name]

    def leave(self, prefix: str) -> None:
        """The front whose requests begin with this has left."""
        with self._lock:
            gone = [request_id for request_id in self._taken if request_id.startswith(prefix)]
        for request_id in gone:
            self.drop(request_id)
