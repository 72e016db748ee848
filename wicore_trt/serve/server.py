"""The listening gRPC server: options, TLS, health, reflection, interceptors.

Must not know what the engine is or when it is ready; the lifecycle tells it. Invariant: health is NOT_SERVING from the
first moment of listening until `set_serving`, and for ever after `set_draining`.
"""

from __future__ import annotations

import grpc
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from wicore_trt.config import ServerSettings
from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.serve.credentials import address_of, check_free, server_credentials
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc
from wicore_trt.serve.interceptors import ApiKeyInterceptor, CallInterceptor
from wicore_trt.serve.service import SERVICE_NAME, InferenceService

HEALTH_NAMES = ("", SERVICE_NAME)
KEEPALIVE_OPTIONS = (
    # Clients may ping every 10 s, with or without a call, and are never thrown out for more ("too many pings").
    ("grpc.http2.min_ping_interval_without_data_ms", 10_000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.keepalive_permit_without_calls", 1),
    # A client machine that vanished without closing its connection is noticed after 80 s and its work is stopped.
    ("grpc.keepalive_time_ms", 60_000),
    ("grpc.keepalive_timeout_ms", 20_000),
)


def channel_options(max_message_bytes: int) -> tuple[tuple[str, int], ...]:
    """Options of the listening server."""
    return (
        ("grpc.so_reuseport", 0),  # gRPC would share a used port with the other process, which then gets half the calls
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        *KEEPALIVE_OPTIONS,
    )


class GrpcServer:
    """One listening server. Construct it on the event loop that will run it."""

    def __init__(self, settings: ServerSettings) -> None:
        self._settings = settings
        max_message_bytes = settings.max_message_mb << 20
        self.service = InferenceService(max_message_bytes=max_message_bytes)
        self._health = health.aio.HealthServicer()
        interceptors: list[grpc.aio.ServerInterceptor] = [CallInterceptor()]
        if settings.api_key:
            interceptors.insert(0, ApiKeyInterceptor(settings.api_key))
        self._server = grpc.aio.server(interceptors=interceptors, options=channel_options(max_message_bytes))
        inference_pb2_grpc.add_InferenceServiceServicer_to_server(self.service, self._server)  # type: ignore[no-untyped-call]
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        if settings.reflection:
            names = (SERVICE_NAME, health.SERVICE_NAME, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, self._server)

    async def start(self) -> str:
        """Listen and return the address, with the port chosen by the system when the settings say 0.

        Raises EnvironmentUnfitError for an address that cannot be used, ConfigError for bad TLS files.
        """
        settings = self._settings
        credentials = server_credentials(settings.tls_cert, settings.tls_key, settings.tls_client_ca)
        check_free(settings.host, settings.port)
        address = address_of(settings.host, settings.port)
        await self._report(health_pb2.HealthCheckResponse.NOT_SERVING)
        try:
            if credentials is None:
                port = self._server.add_insecure_port(address)
            else:
                port = self._server.add_secure_port(address, credentials)
        except RuntimeError as error:
            raise EnvironmentUnfitError(f"Cannot listen on {address}: {error}.") from None
        await self._server.start()
        return address_of(settings.host, port)

    async def set_serving(self) -> None:
        """Tell health checks that requests are taken."""
        await self._report(health_pb2.HealthCheckResponse.SERVING)

    async def set_draining(self) -> None:
        """Tell health checks, once and for all, that requests are not taken any more, and refuse them."""
        self.service.refuse_new()
        await self._health.enter_graceful_shutdown()

    async def stop(self, grace_s: float) -> None:
        """Close the port; calls still open after `grace_s` seconds are cancelled."""
        await self._server.stop(grace_s)

    async def _report(self, status: health_pb2.HealthCheckResponse.ServingStatus) -> None:
        for name in HEALTH_NAMES:
            await self._health.set(name, status)
