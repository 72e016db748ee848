"""Figures of the system about this server's processes and the GPUs.

Reads /proc, and NVML where nvidia-ml-py is installed. It must not know engines. Invariant: unreadable figures are left
out and never raise.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ProcessUse:
    cpu_seconds: float
    resident_bytes: int
    open_files: int | None


@dataclass(frozen=True, slots=True)
class GpuUse:
    """State of a GPU: values by the names of `metrics.exposition.GPU`, as far as the driver gives them."""

    index: int
    name: str
    uuid: str
    figures: Mapping[str, float]


def read_process_use(pid: int) -> ProcessUse | None:
    """Read a process's use so far, None when it has ended."""
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


def read_gpu_use() -> Sequence[GpuUse]:
    """Read this machine's GPUs; none without NVML. Takes milliseconds, or for ever with a broken driver."""
    nvml = _load_nvml()
    try:
        count = 0 if nvml is None else nvml.nvmlDeviceGetCount()
    except Exception:  # the driver has gone
        return ()
    return [_read_gpu(nvml, index) for index in range(count)]


@cache
def _load_nvml() -> Any:
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:  # no package, library or driver, or another package of that name
        log.debug("no GPU metrics: %s", error)
        return None
    return pynvml


def _read_gpu(nvml: Any, index: int) -> GpuUse:
    def read_figure(name: str, *more: Any) -> Any:
        try:
            return getattr(nvml, name)(*more)
        except Exception:  # virtual GPUs and slices report less, a lost one nothing
            return None

    handle = read_figure("nvmlDeviceGetHandleByIndex", index)
    name, uuid = read_figure("nvmlDeviceGetName", handle), read_figure("nvmlDeviceGetUUID", handle)
    memory, rates = read_figure("nvmlDeviceGetMemoryInfo", handle), read_figure("nvmlDeviceGetUtilizationRates", handle)
    power = read_figure("nvmlDeviceGetPowerUsage", handle)
    heat = read_figure("nvmlDeviceGetTemperature", handle, 0)  # of the chip
    figures = {
        "memory_used_bytes": None if memory is None else int(memory.used),
        "memory_total_bytes": None if memory is None else int(memory.total),
        "utilization": None if rates is None else rates.gpu / 100,
        "power_watts": None if power is None else power / 1000,
        "temperature_celsius": None if heat is None else float(heat),
    }
    known = {key: value for key, value in figures.items() if value is not None}
    return GpuUse(index, _decode_text(name), _decode_text(uuid), known)


def _decode_text(value: Any) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else str(value or "")
