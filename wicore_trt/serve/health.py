"""The service grpc.health.v1.Health.

In place of grpc_health's own: that one writes to watchers under the lock that a change of status needs, so a watcher
that reads nothing keeps the server from draining, and it keeps whatever name a stranger sends. Must not know what the
statuses mean. Invariants: nobody who watches can hold up a change of status; after `retire` every status stays
NOT_SERVING.
"""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

Status = health_pb2.HealthCheckResponse


class Health(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Statuses by service name, NOT_SERVING at first."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._statuses = dict.fromkeys(names, Status.NOT_SERVING)
        self._changed = asyncio.Event()
        self._retired = False

    def set(self, status: int) -> None:
        """Change the status of every service."""
        if self._retired:
            return
        self._statuses = dict.fromkeys(self._statuses, status)
        self._changed.set()
        self._changed = asyncio.Event()

    def retire(self) -> None:
        """NOT_SERVING from now on, whatever is set."""
        self.set(Status.NOT_SERVING)
        self._retired = True

    async def Check(
        self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthCheckResponse:
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, "No such service.")
        return Status(status=self._statuses[request.service])

    async def List(
        self, request: health_pb2.HealthListRequest, context: grpc.aio.ServicerContext
    ) -> health_pb2.HealthListResponse:
        statuses = {name: Status(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: grpc.aio.ServicerContext) -> None:
        last = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, Status.SERVICE_UNKNOWN)
            if status != last:
                await context.write(Status(status=status))
            last = status
            await changed.wait()
