"""Patience with a busy machine, and the disk's movers, one after the other."""

from __future__ import annotations

import pytest
from native_calls import calls_of

from wicore_trt.kv.disk import native
from wicore_trt.plugins.cpu_library import open_library


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a checksum may take longer than an engine would wait for it, which then parks nothing."""
    monkeypatch.setattr("wicore_trt.kv.tiers.tiers.RETAIN_S", 10.0)


@pytest.fixture(params=["python", "native"])
def each_mover(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Disk stores that a test opens move pages by this one."""
    if request.param == "python":
        monkeypatch.setattr(native.NativeMover, "start_threads", lambda *args: False)
    elif open_library() is None:
        pytest.skip("the native library was not built")
    else:
        monkeypatch.setattr(native, "find_calls", calls_of)
    return request.param
