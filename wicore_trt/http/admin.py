"""Serve the operator's calls on a port of their own: reload, drain, settings, metrics, health.

Runs in the supervisor, so that it answers whatever engine and fronts do. Must not know processes. Invariants:
operators alone call it, but for /health; no web page of another origin does; a secret is in no answer.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any, Protocol

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from wicore_trt.access.admission import Admission
from wicore_trt.access.calls import Call
from wicore_trt.access.listening import is_local
from wicore_trt.config import ServerSettings
from wicore_trt.errors import ForbiddenError, InvalidRequestError
from wicore_trt.http.app import HttpApp
from wicore_trt.http.context import Context
from wicore_trt.http.replies import json_reply, run_unless_gone
from wicore_trt.http.server import Listener
from wicore_trt.http.socket import check_origin
from wicore_trt.metrics.exposition import describe_processes, render_metrics

MAX_WAIT_S = 3600.0


class Steered(Protocol):
    """Server as the operator's calls see it."""

    def reload_settings(self) -> tuple[Sequence[str], Sequence[str]]:
        """Read the settings again; return keys that changed, and those that need a restart. Raises ConfigError."""

    async def drain(self, wait_s: float) -> bool:
        """Refuse generations from now on; return True when none is left within `wait_s` seconds."""

    def list_settings(self) -> list[dict[str, Any]]:
        """List key, value and source of each setting; secrets are masked."""

    async def collect_metrics(self) -> tuple[str, Mapping[str, tuple[bool, int]]]:
        """Return the front's Prometheus text, "" when it does not answer, and (runs, restarts) by process."""


class AdminServer(Listener):
    """Server of the operator's calls. Construct it on the event loop that will run it."""

    def __init__(self, settings: ServerSettings, server: Steered) -> None:
        """Raises ConfigError for bad TLS or keys files."""
        self._server = server
        local = is_local(settings.admin_host) and not settings.admin_host.startswith("unix:")
        self._context = Context(Admission.from_settings(settings), 0, local, settings.allowed_hosts)
        self._answers: dict[str, Callable[[Request], Awaitable[Response]]] = {
            "/reload": self._serve_reload, "/drain": self._serve_drain,
            "/config": self._serve_config, "/metrics": self._serve_metrics,
        }  # fmt: skip
        routes = [
            Route(path, self._serve_operator, methods=["POST" if path in ("/reload", "/drain") else "GET"])
            for path in self._answers
        ]
        app = HttpApp(self._context, [*routes, Route("/health", _serve_health)])
        super().__init__(app, settings, settings.admin_host, settings.admin_port or 0, flag="--admin-port")

    def change(self, settings: ServerSettings) -> None:
        """Use other keys and another certificate from now on. Raises ConfigError."""
        super().change(settings)
        self._context.allowed_hosts = settings.allowed_hosts
        self._context.admission.apply_settings(settings)

    async def _serve_operator(self, request: Request) -> Response:
        call: Call = request.scope["state"]["call"]
        check_origin(Headers(scope=request.scope), ())
        if not call.who.operator:
            raise ForbiddenError("These calls are an operator's.", fix="Use an operator's key.")
        return await self._answers[request.url.path](request)

    async def _serve_reload(self, request: Request) -> Response:
        changed, restart = self._server.reload_settings()
        return json_reply({"changed": changed, "needs_restart": restart})

    async def _serve_drain(self, request: Request) -> Response:
        """Answer when the last generation has ended, or after `?wait=SECONDS`."""
        text = request.query_params.get("wait", "0")
        try:
            wait_s = float(text)
        except ValueError:
            wait_s = -1.0
        if not 0 <= wait_s <= MAX_WAIT_S:
            raise InvalidRequestError(f"wait is a number of seconds, at most {MAX_WAIT_S:g}.", field="wait")
        idle = await run_unless_gone(request.receive, self._server.drain(wait_s))
        return json_reply({"state": "draining", "idle": idle})

    async def _serve_config(self, request: Request) -> Response:
        return json_reply({"settings": self._server.list_settings()})

    async def _serve_metrics(self, request: Request) -> Response:
        text, processes = await self._server.collect_metrics()
        raw, content_type = render_metrics(describe_processes(processes))
        return Response(text.encode() + raw, media_type=content_type)


async def _serve_health(request: Request) -> Response:
    return json_reply({"status": "ok"})
