"""The HTTP server that clients talk to: its routes on its address, origins, drain.

Must not know what the engine is or when it is ready; the lifecycle tells it. Invariant: generations are refused from
`set_draining` on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from starlette.types import ASGIApp

from wicore_trt.access.admission import Admission, message_limit
from wicore_trt.access.listening import http_host, is_local
from wicore_trt.config import ServerSettings
from wicore_trt.http.app import make_app
from wicore_trt.http.context import Context
from wicore_trt.http.listener import Listener
from wicore_trt.http.routes import routes
from wicore_trt.http.socket import MAX_FRAME

if TYPE_CHECKING:
    from wicore_trt.core.text_engine import TextEngine


class HttpServer:
    """One listening server. Construct it on the event loop that will run it."""

    def __init__(
        self, settings: ServerSettings, max_context: int | None = None, admission: Admission | None = None
    ) -> None:
        """`max_context` is that of the engine, where it is known; `admission` is what other servers of this process
        share. Raises ConfigError for bad TLS or keys files."""
        limit = message_limit(max_context, settings.max_message_mb)
        host = http_host(settings)
        local = is_local(host) and not host.startswith("unix:")
        admission = admission or Admission.of(settings)
        self.context = Context(admission, limit, settings.sse_keep_alive_s, local, settings.allowed_hosts)
        self.context.origins = settings.cors_origins
        self._listener = Listener(
            self._make_app(), settings, host, settings.http_port or 0,
            flag="--http-port", max_frame=min(limit, MAX_FRAME),
        )  # fmt: skip

    def _make_app(self) -> ASGIApp:
        origins = self.context.origins
        return make_app(self.context, routes(self.context, origins), origins)

    def change(self, settings: ServerSettings) -> None:
        """Other origins and another certificate for who comes from now on. Raises ConfigError, and changes nothing, for
        files that do not fit."""
        self._listener.change(settings)
        self.context.allowed_hosts, self.context.origins = settings.allowed_hosts, settings.cors_origins
        self._listener.app = self._make_app()

    async def start(self) -> str:
        """Listen and return the URL, with the port chosen by the system when the settings say 0.

        Raises EnvironmentUnfitError for an address that cannot be used.
        """
        return await self._listener.start()

    def set_draining(self) -> None:
        """Refuse new generations, and say so to probes."""
        self.context.draining = True

    def attach(self, engine: TextEngine) -> None:
        """Take requests from now on."""
        self.context.attach(engine)

    async def stop(self, grace_s: float) -> None:
        """Close the port; what is still open after `grace_s` seconds is cancelled."""
        self.set_draining()
        await self._listener.stop(grace_s, self.context.idle.wait)
