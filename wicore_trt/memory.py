"""Measures how much memory this process may still take, on this machine and in the control groups of its container.

Callers ask before they take memory, so that too much is an error with figures and no killed process. It must not know
the memory's purpose. Invariant: unreadable figures bound nothing; memory of cached files counts as free.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath

from wicore_trt.errors import EnvironmentUnfitError

RESERVE_BYTES = 256 << 20
"""Left for the processes themselves."""
GIB = 1 << 30
_FILES = {
    "cgroup2": ("memory.max", "memory.current", ""),
    "cgroup": ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
}
"""File system type to the names of limit and usage (Documentation/admin-guide/cgroup-v2.rst, cgroup-v1/memory.rst), and
what stands before those of `memory.stat` that count the groups below."""


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that can still be taken, None when unknown: MemAvailable, or less where a control group or one
    around it allows less. `root`: the folder of /proc and /sys."""
    found = []
    with suppress(OSError, StopIteration, ValueError):
        lines = (root / "proc/meminfo").read_text().splitlines()
        found.append(next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")))
    for group, system in find_groups("memory", root):
        with suppress(OSError, ValueError):  # "max" is no number: no limit
            limit, usage, total = _FILES[system]
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            cached = sum(int(stat.get(f"{total}{kind}_file", 0)) for kind in ("active", "inactive"))
            used = max(0, int((group / usage).read_text()) - cached)
            found.append(max(0, int((group / limit).read_text()) - used))
    return min(found, default=None)


def check_room(needed: int, what: str, fix: str) -> None:
    """Raise EnvironmentUnfitError when `what` ("kv.host_bytes", say) wants more memory than is available."""
    have = available_bytes()
    if have is not None and needed > (room := max(0, have - RESERVE_BYTES)):
        raise EnvironmentUnfitError(
            f"{what}: {needed / GIB:.1f} GiB of memory are wanted, and {room / GIB:.1f} GiB can be had "
            "(of the machine, or of the container's limit).",
            fix=fix.format(room=f"{int(room / GIB * 10) / 10}GiB"),
        )


def find_groups(controller: str, root: Path = Path("/")) -> Iterator[tuple[Path, str]]:
    """Yield the folders of this process's control groups that limit what `controller` names, "memory" or "cpu",
    innermost first, each with its file system's type: cgroup2 or cgroup. `root`: the folder of /proc and /sys."""
    with suppress(OSError, ValueError):
        own = [line.split(":", 2) for line in (root / "proc/self/cgroup").read_text().splitlines()]
        for line in (root / "proc/self/mountinfo").read_text().splitlines():
            mount, _, system = line.partition(" - ")
            kind, _, options = system.split(" ", 2)
            if kind not in _FILES or (kind == "cgroup" and controller not in options.split(",")):
                continue
            top, place = PurePosixPath(mount.split()[3]), PurePosixPath(mount.split()[4])
            for _, controllers, path in own:
                if controller in controllers.split(",") if kind == "cgroup" else controllers == "":
                    inner = PurePosixPath(path)
                    inside = inner.relative_to(top) if inner.is_relative_to(top) else PurePosixPath()
                    for folder in (inside, *inside.parents):
                        yield root / place.relative_to("/") / folder, kind
