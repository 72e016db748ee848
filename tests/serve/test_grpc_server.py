"""The listening server: health, reflection, API key, keepalive, addresses, TLS."""

from __future__ import annotations

import asyncio
import os
import socket
from pathlib import Path

import grpc
import pytest
import trustme
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from serving import SERVICE, expected, failure, make_engine, request, serving

from wicore_trt.config import ServerSettings
from wicore_trt.errors import ConfigError, EnvironmentUnfitError
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc
from wicore_trt.serve.server import GrpcServer

Status = health_pb2.HealthCheckResponse
INFO = pb2.GetServerInfoRequest()


async def text_of(stub, prompt: str = "over tls") -> str:
    call = stub.Generate(request(prompt, 8))
    return "".join([r.delta.text or r.finish.delta.text async for r in call])


async def test_health_is_not_serving_then_serving_then_not_serving_for_good():
    async with serving(attach=False) as running:
        stub = health_pb2_grpc.HealthStub(running.channel)
        requests = [
            health_pb2.HealthCheckRequest(service=name) for name in ("", "wicore.inference.v1.InferenceService")
        ]
        watches = [stub.Watch(message) for message in requests]
        for change, status in (
            (None, Status.NOT_SERVING),
            (running.server.set_serving, Status.SERVING),
            (running.server.set_draining, Status.NOT_SERVING),
        ):
            if change is not None:
                await change()
            assert [(await watch.read()).status for watch in watches] == [status] * 2
            assert [(await stub.Check(message)).status for message in requests] == [status] * 2
        await running.server.set_serving()
        assert [(await stub.Check(message)).status for message in requests] == [Status.NOT_SERVING] * 2
        for watch in watches:
            watch.cancel()
        code, _, _ = await failure(stub.Check(health_pb2.HealthCheckRequest(service="other")))
        assert code is grpc.StatusCode.NOT_FOUND


async def reflection_refused(channel: grpc.aio.Channel, metadata=()) -> grpc.StatusCode:
    """The status of a reflection call that sends no message: gRPC's client makes INTERNAL of a refusal that comes while
    it writes one."""
    stub = reflection_pb2_grpc.ServerReflectionStub(channel)
    return (await failure(stub.ServerReflectionInfo(metadata=metadata)))[0]


@pytest.mark.parametrize("on", [True, False])
async def test_reflection_lists_the_services_when_it_is_on(on):
    async with serving(reflection=on) as running:
        if not on:
            assert await reflection_refused(running.channel) is grpc.StatusCode.UNIMPLEMENTED
            return
        stub = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        call = stub.ServerReflectionInfo(iter([reflection_pb2.ServerReflectionRequest(list_services="")]))
        names = {service.name for service in (await call.read()).list_services_response.service}
        assert {"wicore.inference.v1.InferenceService", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(
    ("metadata", "admitted"),
    [
        ((), False),
        ((("authorization", "Bearer s3cret"),), True),
        ((("authorization", "bearer s3cret"),), True),
        ((("x-api-key", "s3cret"),), True),
        ((("authorization", "Bearer s3cre"),), False),
        ((("authorization", "Basic s3cret"),), False),
        ((("authorization", "Bearer "),), False),
        ((("x-api-key", "S3CRET"),), False),
        ((("x-api-key", ""),), False),
    ],
)
async def test_api_key(metadata, admitted):
    async with serving(api_key="s3cret") as running:
        calls = [
            running.stub.GetServerInfo(INFO, metadata=metadata),
            running.stub.Generate(request(), metadata=metadata),
        ]
        for call in calls:
            if admitted:
                assert [m async for m in call] if hasattr(call, "__aiter__") else await call
                continue
            code, message, details = await failure(call)
            assert code is grpc.StatusCode.UNAUTHENTICATED and "s3cret" not in message
            sent = metadata in ((("authorization", "Bearer s3cre"),), (("x-api-key", "S3CRET"),))
            assert ("is not one of the server's" if sent else "needs an API key") in message
            assert details["ErrorInfo"].reason == "AUTHENTICATION"
        health = health_pb2_grpc.HealthStub(running.channel)
        assert (await health.Check(health_pb2.HealthCheckRequest())).status == Status.SERVING
        if not admitted:
            assert await reflection_refused(running.channel, metadata) is grpc.StatusCode.UNAUTHENTICATED
            return
        reflect = reflection_pb2_grpc.ServerReflectionStub(running.channel)
        call = reflect.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), metadata=metadata
        )
        assert (await call.read()).list_services_response.service


async def test_an_unknown_method_is_unimplemented():
    async with serving() as running:
        call = running.channel.unary_unary(SERVICE + "Nothing")(b"")
        assert (await failure(call))[0] is grpc.StatusCode.UNIMPLEMENTED


async def test_a_client_that_pings_too_often_on_a_silent_stream_is_not_thrown_out():
    # With gRPC's own server options this client loses its connection ("too many pings") after 3 pings, in about 3 s.
    options = [
        ("grpc.keepalive_time_ms", 1000),
        ("grpc.keepalive_timeout_ms", 60_000),
        ("grpc.http2.max_pings_without_data", 0),
        ("grpc.keepalive_permit_without_calls", 1),
    ]
    async with serving(make_engine(step_s=5.5), options=options) as running:
        responses = [r async for r in running.stub.Generate(request(max_tokens=1))]
        assert responses[-1].finish.usage.completion_tokens == 1


async def test_a_used_port_is_an_error_and_not_shared():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(EnvironmentUnfitError, match="in use"):
            await GrpcServer(ServerSettings(port=taken.getsockname()[1])).start_listening()
    async with serving() as running:
        port = int(running.address.rpartition(":")[2])
        with pytest.raises(EnvironmentUnfitError, match="in use"):
            await GrpcServer(ServerSettings(port=port)).start_listening()


@pytest.mark.parametrize("host", ["no-such-host.invalid", "192.0.2.1"])
async def test_a_host_that_is_not_ours_is_an_error(host):
    with pytest.raises(EnvironmentUnfitError, match="unknown|Cannot listen"):
        await GrpcServer(ServerSettings(host=host, port=0)).start_listening()


async def test_unix_sockets_and_leftover_files(tmp_path):
    path = tmp_path / "wicore.sock"
    async with serving(host=f"unix:{path}") as running:
        assert running.address == f"unix:{path}"
        assert await text_of(running.stub) == expected("over tls", 8)[0]
        with pytest.raises(EnvironmentUnfitError, match="in use"):
            await GrpcServer(ServerSettings(host=f"unix:{path}")).start_listening()
        assert await text_of(running.stub)  # and the refused one has not taken the path away
    with socket.socket(socket.AF_UNIX) as left_behind:
        left_behind.bind(str(tmp_path / "old.sock"))
    async with serving(host=f"unix:{tmp_path / 'old.sock'}") as running:
        assert await text_of(running.stub)
    (tmp_path / "file").write_text("precious")
    for bad in (tmp_path / "file", tmp_path / "missing" / "s.sock"):
        with pytest.raises(EnvironmentUnfitError):
            await GrpcServer(ServerSettings(host=f"unix:{bad}")).start_listening()
    assert (tmp_path / "file").read_text() == "precious"


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """Paths of a server certificate, its key and the CA; and a client certificate of that CA as bytes."""
    folder, ca = tmp_path_factory.mktemp("tls"), trustme.CA()
    server, client = ca.issue_cert("localhost"), ca.issue_cert("client@example.org")
    paths = {name: str(folder / f"{name}.pem") for name in ("cert", "key", "ca", "other", "garbage", "empty")}
    server.cert_chain_pems[0].write_to_path(paths["cert"])
    server.private_key_pem.write_to_path(paths["key"])
    ca.cert_pem.write_to_path(paths["ca"])
    ca.issue_cert("elsewhere").private_key_pem.write_to_path(paths["other"])
    (folder / "garbage.pem").write_bytes(os.urandom(64))
    (folder / "empty.pem").touch()
    return paths, client


async def connect(address: str, credentials) -> str:
    port = address.rpartition(":")[2]
    async with grpc.aio.secure_channel(f"localhost:{port}", credentials) as channel:
        async with asyncio.timeout(60):
            return await text_of(inference_pb2_grpc.InferenceServiceStub(channel))


async def test_tls_and_mutual_tls(tls):
    paths, client = tls
    root = Path(paths["ca"]).read_bytes()
    files = {"tls_cert": paths["cert"], "tls_key": paths["key"]}
    async with serving(**files) as running:
        assert await connect(running.address, grpc.ssl_channel_credentials(root)) == expected("over tls", 8)[0]
        assert (await failure(running.stub.GetServerInfo(INFO)))[0] is grpc.StatusCode.UNAVAILABLE  # clear text
    async with serving(**files, tls_client_ca=paths["ca"]) as running:
        with_cert = grpc.ssl_channel_credentials(
            root, client.private_key_pem.bytes(), b"".join(p.bytes() for p in client.cert_chain_pems)
        )
        assert await connect(running.address, with_cert) == expected("over tls", 8)[0]
        with pytest.raises(grpc.aio.AioRpcError):
            await connect(running.address, grpc.ssl_channel_credentials(root))


@pytest.mark.parametrize(
    ("cert", "key", "ca"),
    [
        ("nowhere", "key", None),
        ("cert", "nowhere", None),
        ("cert", "other", None),
        ("garbage", "key", None),
        ("cert", "garbage", None),
        ("empty", "key", None),
        ("cert", "key", "garbage"),
        ("cert", "key", "nowhere"),
        ("cert", "key", "empty"),
    ],
)
def test_bad_tls_files_are_found_before_listening(tls, cert, key, ca):
    paths = {**tls[0], "nowhere": "/nonexistent/file.pem", None: None}
    with pytest.raises(ConfigError):
        GrpcServer(ServerSettings(tls_cert=paths[cert], tls_key=paths[key], tls_client_ca=paths[ca]))
