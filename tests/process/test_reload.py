"""Settings, keys and certificates that change while real processes serve; over the fake engine."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import signal
import ssl
import subprocess
import sys

import grpc
import pytest
import trustme
from cryptography import x509
from process.test_supervisor import HERE, serving, supervised

from wicore_trt.config import LoadedSettings, ServerSettings, Settings
from wicore_trt.errors import ConfigError
from wicore_trt.process.supervisor import check_reload
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2

ALICE, BOB = "a" * 20, "b" * 20


def write_keys(path, *keys: str) -> None:
    path.touch(0o600)
    path.write_text("".join(f"tenant{i}:{key}\n" for i, key in enumerate(keys)))


async def code_of(stub, key: str) -> grpc.StatusCode:
    try:
        await stub.GetModelInfo(pb2.GetModelInfoRequest(), metadata=[("x-api-key", key)])
    except grpc.aio.AioRpcError as error:
        return error.code()
    return grpc.StatusCode.OK


async def becomes(ask, wanted) -> None:
    async with asyncio.timeout(60):
        while await ask() != wanted:
            await asyncio.sleep(0.02)


async def test_keys_change_while_the_server_runs_and_a_broken_file_keeps_them(tmp_path):
    keys = tmp_path / "keys"
    write_keys(keys, ALICE)
    ok, no = grpc.StatusCode.OK, grpc.StatusCode.UNAUTHENTICATED
    async with supervised(tmp_path, server={"keys_file": str(keys)}) as server:
        await serving(server)
        async with server.stub() as stub:
            assert (await code_of(stub, ALICE), await code_of(stub, BOB)) == (ok, no)
            write_keys(keys, BOB)
            server.process.send_signal(signal.SIGHUP)
            await becomes(lambda: code_of(stub, BOB), ok)
            assert await code_of(stub, ALICE) is no
            keys.write_text("no key at all\n")
            server.process.send_signal(signal.SIGHUP)
            assert "line 1" in await server.log_line("settings were not reloaded")
            assert await code_of(stub, BOB) is ok
            keys.write_text(f"tenant:{BOB}\n")
            fronts = server.alive("front")
            os.kill(fronts[0], signal.SIGHUP)  # nobody's business but the supervisor's
        server.process.terminate()
        assert (await server.end())[0] == 0


async def test_a_recipe_is_read_again_and_says_what_needs_a_restart(tmp_path):
    recipe = tmp_path / "server.yaml"
    recipe.write_text("server:\n  requests_per_minute: 1000\n")
    async with supervised(tmp_path, recipe=str(recipe)) as server:
        await serving(server)
        recipe.write_text(
            "server:\n  requests_per_minute: 7\nlog:\n  level: warning\nscheduler:\n  max_waiting: 5\nkv:\n  salt: x\n"
        )
        server.process.send_signal(signal.SIGHUP)
        line = await server.log_line("reloaded settings")
        assert "server.requests_per_minute" in line and "log.level" in line and "max_waiting" not in line
        line = await server.log_line("need a restart")
        assert "scheduler.max_waiting" in line and "kv.salt" in line
        recipe.write_text("server:\n  nothing_like_it: 7\n")
        server.process.send_signal(signal.SIGHUP)
        assert "nothing_like_it" in await server.log_line("settings were not reloaded")


@pytest.mark.parametrize("way", ["grpc", "https"])
async def test_a_new_certificate_is_shown_to_who_comes(tmp_path, way):
    ca = trustme.CA()
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"

    def issue(kind: trustme.KeyType = trustme.KeyType.ECDSA) -> int:
        made = ca.issue_cert("localhost", "127.0.0.1", key_type=kind)
        made.private_key_pem.write_to_path(key)
        cert.write_bytes(b"".join(part.bytes() for part in made.cert_chain_pems))
        return x509.load_pem_x509_certificate(cert.read_bytes()).serial_number

    first = issue()
    port = {"http_port": 0} if way == "https" else {}
    async with supervised(tmp_path, server={"tls_cert": str(cert), "tls_key": str(key), **port}) as server:
        await serving(server)
        address = server.address.removeprefix("https://")

        def shown() -> int:
            host, _, number = address.rpartition(":")
            text = ssl.get_server_certificate((host, int(number)))
            return x509.load_pem_x509_certificate(text.encode()).serial_number

        assert await asyncio.to_thread(shown) == first
        second = issue()
        server.process.send_signal(signal.SIGHUP)
        await becomes(lambda: asyncio.to_thread(shown), second)
        second = issue(trustme.KeyType.RSA)  # of another kind, for which a server may keep the first one
        server.process.send_signal(signal.SIGHUP)
        await becomes(lambda: asyncio.to_thread(shown), second)
        cert.write_text("broken")
        server.process.send_signal(signal.SIGHUP)
        await server.log_line("settings were not reloaded")
        assert await asyncio.to_thread(shown) == second


def test_a_terminal_that_closes_ends_the_server(tmp_path):
    """It has the terminal as its own, as under a shell; the kernel sends SIGHUP when the terminal goes."""
    path = os.pathsep.join([str(HERE.parent), str(HERE.parent / "serve")])
    controller, terminal = pty.openpty()
    take = "import fcntl, runpy, sys, termios; fcntl.ioctl(3, termios.TIOCSCTTY, 0); sys.argv = sys.argv[1:]; "
    take += "runpy.run_path(sys.argv[0], run_name='__main__')"

    def start() -> None:
        os.setsid()
        os.dup2(terminal, 3)

    process = subprocess.Popen(
        [sys.executable, "-c", take, str(HERE / "fake_parts.py"), json.dumps({"pids": str(tmp_path)})],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path},
        preexec_fn=start, pass_fds=(3,), text=True,
    )  # fmt: skip
    try:
        os.close(terminal)
        lines = [process.stdout.readline() for _ in range(2)]
        assert lines[1].startswith("ready on"), process.stderr.read()
        process.send_signal(signal.SIGHUP)  # from somebody, while the terminal is there
        assert any("reloaded settings" in line for line in iter(process.stderr.readline, ""))
        os.close(controller)
        _, log = process.communicate(timeout=60)
        assert process.returncode == 0 and "SIGHUP received" in log
    finally:
        process.kill()
        process.wait()


def test_what_would_open_the_server_is_refused(tmp_path):
    keys = tmp_path / "keys"
    write_keys(keys, ALICE)

    def loaded(**server) -> LoadedSettings:
        return LoadedSettings(Settings(server=ServerSettings(**server)), {})

    running = loaded(keys_file=str(keys))
    with pytest.raises(ConfigError, match="not opened to everybody"):
        check_reload(running, loaded)
    with pytest.raises(ConfigError, match="TLS cannot be switched"):
        check_reload(running, lambda: loaded(tls_cert="x", tls_key="y", keys_file=str(keys)))
    change = check_reload(running, lambda: loaded(keys_file=str(keys), host="127.0.0.2"))
    assert change == (running, (), ("server.host",))
