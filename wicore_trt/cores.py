"""Counts the processor cores that this process may use: its affinity, and the quota of a container.

It must not know the work that shares them. Invariant: at least one; unreadable figures bound nothing.
"""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from wicore_trt.arithmetic import div_ceil
from wicore_trt.memory import find_groups


def count_cores(root: Path = Path("/")) -> int:
    """Count the cores that this process may use, a part of one as one. A control group bounds CPU time, not cores
    (cgroup-v2.rst, cpu.max; v1's cpu.cfs_quota_us): more threads than its quota has cores only wait for one another.
    `root`: the folder of /proc and /sys."""
    found = [len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1]
    for group, system in find_groups("cpu", root):
        names = ("cpu.max",) if system == "cgroup2" else ("cpu.cfs_quota_us", "cpu.cfs_period_us")
        with suppress(OSError, ValueError):  # "max" is no number: no limit, as is -1
            quota, period = map(int, " ".join((group / name).read_text() for name in names).split())
            if quota > 0:
                found.append(div_ceil(quota, period))
    return min(found)
