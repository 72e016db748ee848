"""The listening gRPC server: options, TLS, health, reflection, interceptors.

Must not know what the engine is or when it is ready; the lifecycle tells it. Invariants: health is NOT_SERVING from the
first moment of listening until `set_serving`, and for ever after `set_draining`; while it is not stopped, it listens.

grpc.aio ends its loop that accepts calls, and with it the port, when a call cannot be decoded: one HTTP/2 request whose
:path is not UTF-8 is enough, before any code of ours runs. Streams that are open then go on. Nothing tells of it in
time (`wait_for_termination` waits for the very client that did it), so we look whether the address is still taken, and
if it is not, a fresh grpc.aio server with the same services takes it. Calls that come in the same moment are lost.
"""

from __future__ import annotations

import asyncio
import logging
from contextlib import suppress

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from wicore_trt.config import ServerSettings
from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.serve.credentials import address_of, check_free, is_free, server_credentials
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc
from wicore_trt.serve.health import Health
from wicore_trt.serve.interceptors import CallInterceptor
from wicore_trt.serve.keys import KeyRing
from wicore_trt.serve.log import Sparingly
from wicore_trt.serve.service import SERVICE_NAME, InferenceService

log = logging.getLogger(__name__)

HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
HEALTH_NAMES = ("", SERVICE_NAME)
MAX_PENDING = 1 << 16
"""Calls that gRPC holds for us to take. Beyond its own default of 1,000 it refuses them as CANCELLED, with nothing that
tells clients why or when to come back; we take each at once and say so."""
BYTES_PER_TOKEN, LEAST_MESSAGE_BYTES = 128, 4 << 20
"""No token of Gemma's is longer than 93 bytes of UTF-8, so that every prompt that fits the context fits a message."""
WATCH_S = 0.02
"""How often we look whether the address is still taken, which costs some 20 us."""
STOP_S = 1.0
"""How much longer than its grace gRPC may take to stop. A server that broke waits for the client that broke it."""
KEEPALIVE_OPTIONS = (
    # Clients may ping every 10 s, with or without a call, and are never thrown out for more ("too many pings").
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client machine that vanished without closing its connection is noticed after 80 s and its work is stopped.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


def message_limit(max_context: int | None) -> int:
    """Bytes of the largest request message, unless the settings say: what a context of so many tokens can take."""
    return max(LEAST_MESSAGE_BYTES, BYTES_PER_TOKEN * (max_context or 0))


def channel_options(max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    """Options of the listening server."""
    return (
        ("grpc.so_reuseport", 0),  # gRPC would share a used port with the other process, which then gets half the calls
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.server.max_pending_requests", MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", 2 * MAX_PENDING),
        *KEEPALIVE_OPTIONS,
    )


class GrpcServer:
    """One listening server. Construct it on the event loop that will run it."""

    def __init__(self, settings: ServerSettings, max_context: int | None = None) -> None:
        """`max_context` is that of the engine, where it is known. Raises ConfigError for bad TLS or keys files."""
        self._settings = settings
        self._max_message_bytes = (
            settings.max_message_mb << 20 if settings.max_message_mb is not None else message_limit(max_context)
        )
        self.service = InferenceService(max_message_bytes=self._max_message_bytes)
        self._health = Health(HEALTH_NAMES)
        self._interceptor = CallInterceptor(KeyRing.load(settings.api_key, settings.keys_file))
        self._credentials = server_credentials(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        self._server = self._fresh()
        self._stopping = self._has_broken = False
        self._watcher: asyncio.Task[None] | None = None
        self._broke = Sparingly(log, logging.WARNING)

    def _fresh(self) -> grpc.aio.Server:
        """A server of all services that does not listen yet."""
        server = grpc.aio.server(interceptors=[self._interceptor], options=channel_options(self._max_message_bytes))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.service, server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, server)
        if self._settings.reflection:
            reflection.enable_server_reflection((SERVICE_NAME, HEALTH_SERVICE, reflection.SERVICE_NAME), server)
        return server

    async def start(self) -> str:
        """Listen and return the address, with the port chosen by the system when the settings say 0.

        Raises EnvironmentUnfitError for an address that cannot be used.
        """
        host, port = self._settings.host, self._settings.port
        check_free(host, port)
        try:
            port = self._bind(address_of(host, port))
        except RuntimeError as error:
            raise EnvironmentUnfitError(f"Cannot listen on {address_of(host, port)}: {error}.") from None
        await self._server.start()
        address = address_of(host, port)
        self._watcher = asyncio.ensure_future(self._keep_listening(address, port))
        return address

    def _bind(self, address: str) -> int:
        """Raises RuntimeError when the address is taken."""
        if self._credentials is None:
            port: int = self._server.add_insecure_port(address)
        else:
            port = self._server.add_secure_port(address, self._credentials)
        return port

    async def _keep_listening(self, address: str, port: int) -> None:
        """Take the address again whenever the server that listens on it has broken."""
        while not self._stopping:
            await asyncio.sleep(WATCH_S)
            if self._stopping or not is_free(self._settings.host, port):
                continue
            if not self._has_broken:
                # When the last server is freed, grpc.aio waits on the event loop's thread until every one has ended,
                # and one that broke ends when its clients please. With one more reference it never does.
                grpc.aio.init_grpc_aio()
                self._has_broken = True
            self._server = self._fresh()
            try:
                self._bind(address)
            except RuntimeError:
                continue
            await self._server.start()
            self._broke("a request that cannot be decoded broke the listener; listening again", address=address)

    async def set_serving(self) -> None:
        """Tell health checks that requests are taken."""
        self._health.set(health_pb2.HealthCheckResponse.SERVING)

    async def set_draining(self) -> None:
        """Tell health checks, once and for all, that requests are not taken any more, and refuse them."""
        self.service.refuse_new()
        self._health.retire()

    async def stop(self, grace_s: float) -> None:
        """Close the port; calls still open after `grace_s` seconds are cancelled."""
        self._stopping = True
        stopping = asyncio.ensure_future(self._server.stop(grace_s))
        await asyncio.wait((stopping,), timeout=grace_s + STOP_S)
        with suppress(Exception):  # it broke in this moment
            if stopping.done():
                stopping.result()
