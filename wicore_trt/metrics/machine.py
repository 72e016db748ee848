"""What the system says of this server's processes and of the GPUs.

Reads /proc, and NVML where nvidia-ml-py is installed. It must not know engines. Invariant: what cannot be read is left
out, and never raises.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessUse:
    """One process."""

    cpu_seconds: float
    resident_bytes: int
    open_files: int | None


@dataclass(frozen=True, slots=True)
class GpuUse:
    """One GPU. `utilization` is in [0, 1]; what a GPU does not tell is None."""

    index: int
    name: str
    uuid: str
    used_bytes: int
    total_bytes: int
    utilization: float | None
    power_watts: float | None
    temperature_celsius: float | None


def process_use(pid: int) -> ProcessUse | None:
    """What a process took so far, None when it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
    try:
        files = len(os.listdir(f"/proc/{pid}/fd"))
    except OSError:  # another user's
        files = None
    ticks, page = os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    return ProcessUse((int(fields[11]) + int(fields[12])) / ticks, int(fields[21]) * page, files)


def gpu_use() -> Sequence[GpuUse]:
    """The GPUs of this machine; none where there is no NVML. May take milliseconds."""
    nvml = _nvml()
    if nvml is None:
        return ()
    try:
        return [_one(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    except nvml.NVMLError:
        return ()


@cache
def _nvml() -> Any:
    """NVML, initialized, or None."""
    try:
        import pynvml
    except ImportError:
        return None
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        log.debug("NVML: %s", error)
        return None
    return pynvml


def _one(nvml: Any, index: int) -> GpuUse:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)

    def told(ask: Any, *more: Any) -> Any:
        try:
            return ask(handle, *more)
        except nvml.NVMLError:  # a virtual GPU, or a part of one, tells less
            return None

    name, uuid = (x.decode() if isinstance(x, bytes) else str(x) for x in
                  (nvml.nvmlDeviceGetName(handle), nvml.nvmlDeviceGetUUID(handle)))  # fmt: skip
    memory = nvml.nvmlDeviceGetMemoryInfo(handle)
    rates, power = told(nvml.nvmlDeviceGetUtilizationRates), told(nvml.nvmlDeviceGetPowerUsage)
    heat = told(nvml.nvmlDeviceGetTemperature, nvml.NVML_TEMPERATURE_GPU)
    return GpuUse(
        index=index,
        name=name,
        uuid=uuid,
        used_bytes=int(memory.used),
        total_bytes=int(memory.total),
        utilization=None if rates is None else rates.gpu / 100,
        power_watts=None if power is None else power / 1000,
        temperature_celsius=None if heat is None else float(heat),
    )
