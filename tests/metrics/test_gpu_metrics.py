"""GPU metrics with NVML there, in part, broken and missing; `pynvml` is a stand-in."""

from __future__ import annotations

import builtins
import sys
import threading
from types import SimpleNamespace

import pytest
from prometheus_client.parser import text_string_to_metric_families

from wicore_trt.access.admission import Admission
from wicore_trt.config import ServerSettings
from wicore_trt.http import metrics
from wicore_trt.http.context import Context
from wicore_trt.metrics import machine
from wicore_trt.metrics.exposition import collect_families, render_metrics


class NVMLError(Exception):
    pass


def fake(**changes) -> SimpleNamespace:
    """Two GPUs. A change is what a call answers with: an exception is raised."""
    answers = {
        "nvmlInit": None,
        "nvmlDeviceGetCount": 2,
        "nvmlDeviceGetName": b"GPU \xff",
        "nvmlDeviceGetMemoryInfo": SimpleNamespace(used=3 << 30, total=80 << 30),
        "nvmlDeviceGetUtilizationRates": SimpleNamespace(gpu=25),
        "nvmlDeviceGetPowerUsage": 312_500,
        "nvmlDeviceGetTemperature": 61,
        **changes,
    }

    def call(answer):
        def answered(*_):
            if isinstance(answer, Exception):
                raise answer
            return answer

        return answered

    made = {name: call(answer) for name, answer in answers.items() if answer is not AttributeError}
    made |= {"nvmlDeviceGetHandleByIndex": lambda index: index, "nvmlDeviceGetUUID": lambda handle: f"GPU-{handle}"}
    return SimpleNamespace(NVMLError=NVMLError, **made)


@pytest.fixture
def installed(monkeypatch):
    def install(module: object) -> None:
        machine._load_nvml.cache_clear()
        monkeypatch.setitem(sys.modules, "pynvml", module)

    yield install
    machine._load_nvml.cache_clear()


async def samples() -> dict[tuple[str, str], float]:
    """GPU samples of a scrape, by name and uuid."""
    found = await metrics.take_snapshot(Context(Admission.from_settings(ServerSettings()), 0))
    told = text_string_to_metric_families(render_metrics(collect_families(found))[0].decode())
    return {(s.name, s.labels["uuid"]): s.value for f in told for s in f.samples if s.name.startswith("wicore_gpu")}


async def test_what_nvml_tells_is_told(installed):
    installed(fake())
    got = await samples()
    assert {uuid for _, uuid in got} == {"GPU-0", "GPU-1"} and len(got) == 10
    assert got["wicore_gpu_memory_used_bytes", "GPU-0"] == 3 << 30
    assert got["wicore_gpu_utilization", "GPU-1"] == 0.25 and got["wicore_gpu_power_watts", "GPU-1"] == 312.5


@pytest.mark.parametrize(
    "call", ["MemoryInfo", "UtilizationRates", "PowerUsage", "Temperature"], ids=lambda name: name.lower()
)
@pytest.mark.parametrize("how", [NVMLError("not supported"), AttributeError], ids=["unsupported", "unknown"])
async def test_what_a_gpu_does_not_tell_is_left_out_alone(installed, call, how):
    installed(fake(**{f"nvmlDeviceGet{call}": how}))
    assert len(await samples()) == (6 if call == "MemoryInfo" else 8)


@pytest.mark.parametrize(
    "module",
    [
        fake(nvmlInit=NVMLError("driver not loaded")), fake(nvmlInit=OSError("libnvidia-ml.so.1")),
        fake(nvmlDeviceGetCount=NVMLError("lost")), SimpleNamespace(), None,
    ],
    ids=["no driver", "no library", "driver lost", "another package", "no package"],
)  # fmt: skip
async def test_without_nvml_a_scrape_has_no_gpus(installed, module):
    installed(module)  # None in sys.modules makes an import fail
    assert await samples() == {}


async def test_a_driver_that_hangs_takes_one_thread_and_no_scrape(installed, monkeypatch):
    installed(fake())
    monkeypatch.setattr(metrics, "ANSWER_S", 0.05)
    goes_on, asked = threading.Event(), []

    def hangs():
        asked.append(1)
        goes_on.wait(60)
        return machine.read_gpu_use()

    monkeypatch.setattr(metrics, "read_gpu_use", hangs)
    context = Context(Admission.from_settings(ServerSettings()), 0)
    for _ in range(3):
        assert (await metrics.take_snapshot(context)).gpus == ()
    goes_on.set()
    assert len(await context.gpus) == 2 and len(asked) == 1
    assert len((await metrics.take_snapshot(context)).gpus) == 2


def test_nothing_is_imported_twice(monkeypatch, installed):
    """A missing package is looked for once, not at every scrape."""
    installed(None)
    looked, original = [], builtins.__import__
    monkeypatch.setattr(builtins, "__import__", lambda name, *a: looked.append(name) or original(name, *a))
    assert machine.read_gpu_use() == machine.read_gpu_use() == []
    assert looked.count("pynvml") == 1
