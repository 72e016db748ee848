"""Settings that a backend lacks: refused by name before its engine opens, never ignored."""

from __future__ import annotations

from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest

from wicore_trt.config import ExecutorSettings
from wicore_trt.engine.options import BACKENDS, OF_SOME, find_backend
from wicore_trt.errors import ConfigError
from wicore_trt.runtime.options import ExecutorOptions

OTHER = {
    "kernels": "torch", "threads": 2, "batch_invariant": True, "peer_access": False, "compare_ranks": True,
    "kv_fraction": 0.5,
}  # fmt: skip
LACKING = {
    "torch": {"kv_fraction"},
    "triton": {"kernels", "threads"},
    "tensorrt": set(OTHER),
    "tensorrt-llm": set(OTHER) - {"kv_fraction"},
}


@pytest.mark.parametrize("name", BACKENDS)
def test_a_setting_that_would_have_no_effect_is_refused(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    backend, opened = find_backend(name), list[ExecutorOptions]()
    monkeypatch.setattr(type(backend), "open_fit", lambda self, engine, options: opened.append(options))
    engine: Any = SimpleNamespace(manifest=SimpleNamespace(backend=name))
    assert set(OTHER) == set(OF_SOME)
    for option, value in OTHER.items():
        given = ExecutorOptions(**{option: value})  # type: ignore[arg-type]
        if option in LACKING[name]:
            with pytest.raises(ConfigError, match=f"^{OF_SOME[option]}: engines of backend {name} do not have it"):
                backend.open(engine, given)
        else:
            backend.open(engine, given)
            assert opened.pop() is given
    backend.open(engine, ExecutorOptions())
    assert opened == [ExecutorOptions()]


def test_every_setting_of_the_executor_is_judged() -> None:
    """But for where an engine runs, which `core.assemble` and devices judge."""
    named = {f"executor.{field.name}" for field in fields(ExecutorSettings)}  # type: ignore[arg-type]
    assert named - set(OF_SOME.values()) == {"executor.device", "executor.devices"}
