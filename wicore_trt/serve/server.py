"""The listening gRPC server: options, TLS, services, health, reflection.

Must not know the engine or when it is ready; the lifecycle tells it. Invariant: health is NOT_SERVING from the first
moment of listening until `set_serving`, and for ever after `set_draining`.
"""

from __future__ import annotations

import asyncio
import resource

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection, reflection_pb2_grpc

from wicore_trt.access.admission import Admission, find_message_limit
from wicore_trt.access.listening import check_free, format_address, read_tls
from wicore_trt.config import ServerSettings
from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc
from wicore_trt.serve.guard import MAX_METADATA_BYTES, Context, Guard
from wicore_trt.serve.listeners import LISTENERS, Listeners, Services
from wicore_trt.serve.service import SERVICE_NAME, InferenceService
from wicore_trt.serve.worker import WORKER_SERVICE, WorkerService, make_handlers

HEALTH_SERVICE = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
HEALTH_NAMES = ("", SERVICE_NAME, WORKER_SERVICE)
MAX_PENDING, MOST_PENDING = 2500, 4000
"""Calls that each listener holds for us; above the first number gRPC refuses some, above the second all, as CANCELLED.
It cannot bound calls that are reset at once (16 connections: 1.3 GB, seconds of the loop): a proxy in front has to."""
MAX_STREAMS = 1024
"""Calls that are open on one connection; a client's own library holds back what is more."""
MAX_CONNECTIONS = 4096
"""Connections that are open at the same time, on all listeners together. More are closed as they come."""
FILES_KEPT = 512
"""File descriptors that connections leave to the engine, the log and the KV tiers."""
KEEPALIVE_OPTIONS = (
    # Clients may ping every 10 s, with or without a call, and are never thrown out for more ("too many pings").
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client machine that vanished without closing its connection is noticed after 80 s and its work is stopped.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
    # Connections that nobody uses give their file descriptors back; a client's library connects again when it calls.
    ("grpc.server_handshake_timeout_ms", 10_000),
    ("grpc.max_connection_idle_ms", 300_000),
)


def find_connection_limit() -> int:
    """Return the connections of each listener; together they fit the files that the process may open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    files = MAX_CONNECTIONS if soft == resource.RLIM_INFINITY else max(soft - FILES_KEPT, soft // 2)
    return max(1, min(MAX_CONNECTIONS, files) // LISTENERS)


def make_channel_options(max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    return (
        ("grpc.so_reuseport", 1),  # for our own listeners; `check_free` sees the port of another process
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", -1),  # an answer of any size was worth computing; it is the reader's to refuse
        # Without the first of these a part of the calls with more than 8 KiB is refused, at random.
        ("grpc.max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
        ("grpc.server.max_pending_requests", MAX_PENDING),
        ("grpc.server.max_pending_requests_hard_limit", MOST_PENDING),
        ("grpc.max_concurrent_streams", MAX_STREAMS),
        ("grpc.max_allowed_incoming_connections", find_connection_limit()),
        *KEEPALIVE_OPTIONS,
    )


Status = health_pb2.HealthCheckResponse


class HealthService(health_pb2_grpc.HealthServicer):  # type: ignore[misc]
    """Statuses by service name, NOT_SERVING at first."""

    def __init__(self, names: tuple[str, ...]) -> None:
        self._statuses = dict.fromkeys(names, Status.NOT_SERVING)
        self._changed = asyncio.Event()
        self.retired = False  # later changes are ignored

    def set_status(self, status: int) -> None:
        if self.retired:
            return
        self._statuses = dict.fromkeys(self._statuses, status)
        self._changed.set()
        self._changed = asyncio.Event()

    async def Check(self, request: health_pb2.HealthCheckRequest, context: Context) -> health_pb2.HealthCheckResponse:
        if request.service not in self._statuses:
            await context.abort(grpc.StatusCode.NOT_FOUND, "No such service.")
        return Status(status=self._statuses[request.service])

    async def List(self, request: health_pb2.HealthListRequest, context: Context) -> health_pb2.HealthListResponse:
        statuses = {name: Status(status=status) for name, status in self._statuses.items()}
        return health_pb2.HealthListResponse(statuses=statuses)

    async def Watch(self, request: health_pb2.HealthCheckRequest, context: Context) -> None:
        last = None
        while True:
            changed = self._changed
            status = self._statuses.get(request.service, Status.SERVICE_UNKNOWN)
            if status != last:
                await context.write(Status(status=status))
            last = status
            await changed.wait()


def read_certificates(settings: ServerSettings) -> grpc.ServerCertificateConfiguration | None:
    """Read the TLS files, None where none is set. Raises ConfigError for missing, malformed or mismatched ones."""
    files = read_tls(settings)
    if files is None:
        return None
    return grpc.ssl_server_certificate_configuration([(files.secret, files.chain)], root_certificates=files.roots)


class GrpcServer:
    """Listens for gRPC calls. Construct it on the event loop that will run it."""

    def __init__(
        self, settings: ServerSettings, max_context: int | None = None, admission: Admission | None = None
    ) -> None:
        """`max_context`: the engine's, if known; `admission`: the process's. Raises ConfigError for bad files."""
        self._settings = settings
        admission = admission or Admission.from_settings(settings)
        self._max_message_bytes = find_message_limit(max_context, settings.max_message_mb)
        self.service = InferenceService(max_message_bytes=self._max_message_bytes, admission=admission)
        self._health = HealthService(HEALTH_NAMES)
        services = Services()
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.service, services)  # type: ignore[no-untyped-call]
        services.add_generic_rpc_handlers((make_handlers(WorkerService(self.service)),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, services)
        if settings.reflection:
            names = (SERVICE_NAME, WORKER_SERVICE, HEALTH_SERVICE, reflection.SERVICE_NAME)
            reflected = reflection.aio.ReflectionServicer(names)
            reflection_pb2_grpc.add_ServerReflectionServicer_to_server(reflected, services)
        self._guard = Guard(admission, services.handlers)
        self._certificates = read_certificates(settings)
        self._credentials: grpc.ServerCredentials | None = None
        if self._certificates is not None:
            self._credentials = grpc.dynamic_ssl_server_credentials(
                self._certificates,
                lambda: self._certificates,  # gRPC asks before each handshake, and adopts changes
                settings.tls_client_ca is not None,
            )
        self._listeners = Listeners(self._make_server, self._bind_server)

    def apply_settings(self, settings: ServerSettings) -> None:
        """Use another certificate for new connections. Raises ConfigError, changing nothing, for bad files."""
        self._certificates = read_certificates(settings)

    def _make_server(self) -> grpc.aio.Server:
        server = grpc.aio.server(options=make_channel_options(self._max_message_bytes))
        server.add_generic_rpc_handlers((self._guard,))
        return server

    async def start_listening(self) -> str:
        """Listen and return the address with its actual port. Raises EnvironmentUnfitError for an unusable address."""
        host, port = self._settings.host, self._settings.port
        check_free(host, port)
        try:
            return await self._listeners.start_listening(host, port)
        except RuntimeError as error:
            raise EnvironmentUnfitError(f"Cannot listen on {format_address(host, port)}: {error}.") from None

    def _bind_server(self, server: grpc.aio.Server, address: str) -> int:
        """Bind the address and return the port. Raises RuntimeError when the address is taken."""
        if self._credentials is None:
            port: int = server.add_insecure_port(address)
        else:
            port = server.add_secure_port(address, self._credentials)
        return port

    async def set_serving(self, serving: bool = True) -> None:
        self._health.set_status(Status.SERVING if serving else Status.NOT_SERVING)

    async def set_draining(self) -> None:
        """Refuse requests from now on, and tell health checks once and for all."""
        self.service.draining = True
        self._health.set_status(Status.NOT_SERVING)
        self._health.retired = True

    async def stop_listening(self, grace_s: float) -> None:
        await self._listeners.stop_listening(grace_s)
