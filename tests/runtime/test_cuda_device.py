"""A GPU's stream, with streams that are not there."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from wicore_trt.runtime.cuda_device import CudaDevice  # noqa: E402


@dataclass(eq=False)
class Stream:
    name: str
    waited: list[str] = field(default_factory=list)

    def wait_stream(self, other: Stream) -> None:
        self.waited.append(other.name)


def test_a_threads_work_is_in_order_with_steps_which_wait_for_no_other_stream(monkeypatch: pytest.MonkeyPatch) -> None:
    own, before = Stream("own"), Stream("before")
    now: list[Any] = [before]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[-1])
    monkeypatch.setattr(torch.cuda, "set_stream", now.append)
    device = object.__new__(CudaDevice)
    device.torch_device, device._stream = torch.device("cuda"), own  # type: ignore[assignment]
    for _ in range(3):
        with device.active():
            assert now[-1] is own
        assert now[-1] is own, "what the thread does next is behind the step"
    assert own.waited == ["before"] and not before.waited, "once for what came before, and never again"
    now.append(before)  # somebody changed it
    with device.active():
        assert now[-1] is own
    assert own.waited == ["before", "before"]


def test_a_limited_stream_works_within_its_own_context(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, Any]] = []

    class Driver:
        """`cuda.bindings.driver` that returns names; what is in `refuses` fails."""

        refuses = ""

        def __getattr__(self, name: str) -> Any:
            if not name.startswith("cu"):
                return Driver()

            def call(*given: Any) -> tuple[Any, ...]:
                calls.append((name, given[-1] if given else None))
                return (801 if name == self.refuses else 0, 7 if name == "cuGreenCtxStreamCreate" else name)

            return call

    driver = Driver()
    monkeypatch.setitem(sys.modules, "cuda", SimpleNamespace())
    monkeypatch.setitem(sys.modules, "cuda.bindings", SimpleNamespace(driver=driver))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda handle, device: SimpleNamespace(cuda_stream=handle))
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext(calls.append(("stream", stream.cuda_stream))))
    device = CudaDevice("cuda:0", multiprocessors=32)
    assert device.stream == 7 and ("cuDevSmResourceSplitByCount", 32) in calls
    calls.clear()
    with pytest.raises(ZeroDivisionError), device.visit():
        assert calls == [("cuCtxPushCurrent", "cuCtxFromGreenCtx"), ("stream", 7)]
        raise ZeroDivisionError
    assert calls[-1][0] == "cuCtxPopCurrent"
    Driver.refuses = "cuGreenCtxCreate"
    with pytest.raises(RuntimeError, match="limits no stream: 801"):
        CudaDevice("cuda:0", multiprocessors=32)
