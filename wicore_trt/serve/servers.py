"""The gRPC and the HTTP server of one process as one thing to start, to tell about the engine and to stop.

Must not know what either serves. Invariant: both have the same keys, places and rates, and tell the same of the engine.
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from wicore_trt.access.admission import Admission
from wicore_trt.config import ServerSettings
from wicore_trt.http.metrics import everything
from wicore_trt.http.server import HttpServer
from wicore_trt.metrics.exposition import rendered
from wicore_trt.serve.server import GrpcServer

if TYPE_CHECKING:
    from wicore_trt.core.text_engine import TextEngine


class Servers:
    """Construct it on the event loop that will run them. Without server.http_port there is no HTTP."""

    def __init__(self, settings: ServerSettings, max_context: int | None = None) -> None:
        """`max_context` is that of the engine, where it is known. Raises ConfigError for bad TLS or keys files."""
        admission = self._admission = Admission.of(settings)
        self._grpc = GrpcServer(settings, max_context, admission)
        self._http = HttpServer(settings, max_context, admission)
        self._serves_http = settings.http_port is not None

    async def start(self) -> tuple[str, str | None]:
        """Listen and return the address of gRPC and the URL of HTTP. Raises EnvironmentUnfitError."""
        address = await self._grpc.start()
        return address, await self._http.start() if self._serves_http else None

    def attach(self, engine: TextEngine) -> None:
        """Take requests from now on."""
        self._grpc.service.attach(engine)
        self._http.attach(engine)

    def change(self, settings: ServerSettings) -> None:
        """Other keys, rates, origins and certificates from now on. Raises ConfigError."""
        self._grpc.change(settings)
        self._http.change(settings)
        self._admission.change(settings)

    @property
    def streams_open(self) -> int:
        """Generations in progress."""
        return self._grpc.service.streams_open + self._http.context.open.total()

    async def until_idle(self) -> None:
        """Wait until no generation is open."""
        await self._grpc.service.idle.wait()
        await self._http.context.idle.wait()

    async def set_serving(self) -> None:
        """Tell probes that requests are taken. HTTP looks at the engine itself."""
        await self._grpc.set_serving()

    async def set_waiting(self) -> None:
        """Tell probes that requests are not taken for now."""
        await self._grpc.set_waiting()

    async def set_draining(self) -> None:
        """Refuse requests from now on, and tell probes."""
        self._http.set_draining()
        await self._grpc.set_draining()

    async def render_metrics(self) -> str:
        """Render the metrics as Prometheus text."""
        return rendered(await everything(self._http.context))[0].decode()

    async def stop(self, grace_s: float) -> None:
        """Close the ports; calls still open after `grace_s` seconds are cancelled."""
        await asyncio.gather(self._grpc.stop(grace_s), self._http.stop(grace_s))
