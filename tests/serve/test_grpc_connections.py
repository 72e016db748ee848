"""Connections: how many a server takes, and how many file descriptors it may open."""

from __future__ import annotations

import asyncio
import resource
import subprocess
import sys

import raw_http2
from serving import serving

from wicore_trt.serve import server
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2


async def test_connections_beyond_the_limit_are_closed_and_those_that_are_there_go_on(monkeypatch):
    monkeypatch.setattr(server, "MAX_CONNECTIONS", 4 * server.LISTENERS)
    async with serving() as running:
        await running.stub.GetServerInfo(pb2.GetServerInfoRequest())
        opened = [raw_http2.connect(running.address) for _ in range(16 * server.LISTENERS)]
        loop = asyncio.get_running_loop()

        async def greeted(one) -> bool:
            one.setblocking(False)
            try:
                return await asyncio.wait_for(loop.sock_recv(one, 9), 60) != b""
            except ConnectionResetError:
                return False

        assert 0 < sum(await asyncio.gather(*map(greeted, opened))) < 4 * server.LISTENERS
        await running.stub.GetServerInfo(pb2.GetServerInfoRequest())
        for one in opened:
            one.close()


def test_the_limit_leaves_file_descriptors_to_the_rest(monkeypatch):
    for soft, limit in ((1 << 20, 4096), (resource.RLIM_INFINITY, 4096), (4096, 3584), (1024, 512), (600, 300)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, soft=soft: (soft, soft))
        assert server.find_connection_limit() * server.LISTENERS == limit


def test_the_serve_command_takes_all_the_file_descriptors_it_may():
    code = (
        "import resource; from wicore_trt.cli.main import run_command; "
        "_, most = resource.getrlimit(resource.RLIMIT_NOFILE); "
        "resource.setrlimit(resource.RLIMIT_NOFILE, (256, most)); run_command(['serve', '/nonexistent/engine']); "
        "assert resource.getrlimit(resource.RLIMIT_NOFILE) == (most, most)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
