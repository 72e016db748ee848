"""A GPU's stream, with streams that are not there."""

from __future__ import annotations

from dataclasses import dataclass, field
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
