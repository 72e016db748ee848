"""Divides a machine among the replicas of a server: each one's settings, and the GPUs that its process sees.

Plain data; it must not know processes or devices.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from glob import glob
from itertools import takewhile
from pathlib import Path

from wicore_trt.config import Settings
from wicore_trt.cores import count_cores
from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.types import REPLICA_HOME

GPUS = "CUDA_VISIBLE_DEVICES"


def divide_settings(settings: Settings, replica: int, gpus: Sequence[str] = ()) -> Settings:
    """Make the settings of one replica: its share of the memory and disk space given, a directory below the one given,
    and without GPUs its share of the cores unless a number of threads is set."""
    count, kv, executor = settings.server.replicas, settings.kv, settings.executor
    if count == 1:
        return settings
    path = None if kv.disk_path is None else str(Path(kv.disk_path) / REPLICA_HOME.format(replica))
    host_bytes = max(1, kv.host_bytes // count) if kv.host_bytes else 0
    kv = replace(kv, host_bytes=host_bytes, disk_bytes=max(1, kv.disk_bytes // count), disk_path=path)
    threads = executor.threads or (0 if gpus else max(1, count_cores() // count))
    return replace(settings, kv=kv, executor=replace(executor, threads=threads))


def find_gpus(device: str, replicas: int, each: int) -> Sequence[str]:
    """Find the GPUs of all replicas, `each` for one; none for a single replica, and on a CPU. Raises
    EnvironmentUnfitError for too few."""
    given = os.environ.get(GPUS)
    if given is None:
        found = [str(i) for i in range(len(glob("/dev/nvidia[0-9]*")))]
    else:
        names = (name.strip() for name in given.split(","))
        found = list(takewhile(re.compile(r"\d|GPU-|MIG-").match, names))  # CUDA ignores what follows another name
    if replicas == 1 or device == "cpu" or (device == "auto" and not found):
        return ()
    if len(found) < (needed := replicas * each):
        raise EnvironmentUnfitError(
            f"{replicas} replicas of {each} GPU{'s' * (each > 1)} each need {needed}, and there are {len(found)}.",
            fix=f"Lower --replicas, or name the GPUs in {GPUS}.",
        )
    return found[:needed]


def divide_gpus(gpus: Sequence[str], replica: int, count: int) -> Mapping[str, str] | None:
    """Return what one replica's process has in its environment to see its GPUs alone; None where all see all."""
    if count == 1 or not gpus:
        return None
    each = len(gpus) // count
    return {GPUS: ",".join(gpus[replica * each : (replica + 1) * each])}
