"""An engine at the other end of a socket, in this process, for tests that must hold wherever the engine runs."""

from __future__ import annotations

import asyncio
import socket

import pytest
from fakes import FAKE_INFO

from wicore_trt.core.loop import Core
from wicore_trt.core.port import EnginePort, LocalEngine
from wicore_trt.link.host import EngineHost
from wicore_trt.link.remote import RemoteEngine


class LinkedEngine(RemoteEngine):
    """A RemoteEngine whose host it starts and stops itself."""

    def __init__(self, core: Core, *, max_waiting: int) -> None:
        super().__init__(self._changed_now)
        self.host = EngineHost(core, FAKE_INFO, max_waiting=max_waiting)
        self._core, self._loop = core, self.host.engine
        self._up_now = asyncio.Event()

    def _changed_now(self) -> None:
        if self.dead is None:
            self._up_now.set()

    async def start(self, sink) -> None:
        await super().start(sink)
        self.host.start()
        ours, theirs = socket.socketpair()
        self.connect(ours)
        self.host.attach(theirs)
        await self._up_now.wait()

    async def stop(self, timeout_s: float) -> None:
        await asyncio.to_thread(self.host.stop, timeout_s)
        await asyncio.sleep(0.01)
        await super().stop(timeout_s)


WAYS: dict[str, type] = {"local": LocalEngine, "linked": LinkedEngine}
_way = "local"


def engine_of(core: Core, max_waiting: int) -> EnginePort:
    """An engine of the kind that this test runs with."""
    return WAYS[_way](core, max_waiting=max_waiting)


@pytest.fixture(autouse=True, params=list(WAYS))
def way(request, monkeypatch) -> None:
    """Import this, and each test of the module runs with each kind of engine."""
    monkeypatch.setattr(f"{__name__}._way", request.param)
