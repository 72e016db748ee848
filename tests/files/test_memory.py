"""Memory that may still be taken, and cores: machines and control groups of both versions, made up and real."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from wicore_trt import memory
from wicore_trt.cores import count_cores
from wicore_trt.errors import EnvironmentUnfitError
from wicore_trt.memory import available_bytes, check_room

MIB = 1 << 20


def write(root: Path, files: dict[str, object]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{content}\n")


def group(root: Path, folder: str, limit: object, used: int, cached: int, version: int) -> None:
    names = ("memory.max", "memory.current") if version == 2 else ("memory.limit_in_bytes", "memory.usage_in_bytes")
    total = "" if version == 2 else "total_"
    stat = f"anon 5\n{total}active_file {cached // 2}\n{total}inactive_file {cached - cached // 2}"
    write(root, {f"{folder}/{names[0]}": limit, f"{folder}/{names[1]}": used, f"{folder}/memory.stat": stat})


def machine(root: Path, mounts: str, own: str) -> None:
    meminfo = f"MemTotal: 99999999 kB\nMemFree: 1 kB\nMemAvailable: {8000 * 1024} kB"
    write(root, {"proc/meminfo": meminfo, "proc/self/mountinfo": mounts, "proc/self/cgroup": own})


V2 = "30 24 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate"
V1 = """31 23 0:28 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
35 31 0:32 {top} /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory"""


@pytest.mark.parametrize(("outer", "inner", "left"), [(3000, 2000, 1500), (1000, 2000, 600), (9000, 9000, 8000)])
def test_the_smallest_of_nested_groups_counts_less_what_is_used_and_not_cached(
    outer: int, inner: int, left: int, tmp_path: Path
) -> None:
    machine(tmp_path, V2, "0::/pod/box")
    group(tmp_path, "sys/fs/cgroup/pod", outer * MIB, 900 * MIB, 500 * MIB, 2)
    group(tmp_path, "sys/fs/cgroup/pod/box", inner * MIB, 800 * MIB, 300 * MIB, 2)
    assert available_bytes(tmp_path) == left * MIB


def test_no_limit_leaves_what_the_machine_has(tmp_path: Path) -> None:
    machine(tmp_path, V2, "0::/pod")
    group(tmp_path, "sys/fs/cgroup/pod", "max", 900 * MIB, 0, 2)
    assert available_bytes(tmp_path) == 8000 * MIB


@pytest.mark.parametrize("top", ["/", "/docker/4f"], ids=["own name space", "the host's names"])
def test_version_1(top: str, tmp_path: Path) -> None:
    machine(tmp_path, V1.format(top=top), f"5:cpu:/\n4:memory:{top}\n0::/")
    group(tmp_path, "sys/fs/cgroup/memory", 3000 * MIB, 1000 * MIB, 200 * MIB, 1)
    assert available_bytes(tmp_path) == 2200 * MIB


def test_a_group_that_is_over_its_limit_leaves_nothing(tmp_path: Path) -> None:
    machine(tmp_path, V2, "0::/")
    group(tmp_path, "sys/fs/cgroup", 100 * MIB, 900 * MIB, 0, 2)
    assert available_bytes(tmp_path) == 0


def test_what_cannot_be_read_bounds_nothing(tmp_path: Path) -> None:
    assert available_bytes(tmp_path) is None
    machine(tmp_path, V2, "nonsense")
    assert available_bytes(tmp_path) == 8000 * MIB


def test_the_error_has_figures_and_a_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "available_bytes", lambda: 3 << 30)
    check_room(2 << 30, "kv.host_bytes", "")
    with pytest.raises(EnvironmentUnfitError) as error:
        check_room(4 << 30, "kv.host_bytes", "Lower it to {room} at most.")
    assert str(error.value).startswith("kv.host_bytes: 4.0 GiB of memory are wanted, and 2.8 GiB can be had ")
    assert error.value.fix == "Lower it to 2.7GiB at most." and error.value.exit_code == 4


@pytest.mark.skipif(
    not os.access("/sys/fs/cgroup/memory", os.W_OK), reason="no control groups of memory, version 1, can be made here"
)
def test_a_real_group(tmp_path: Path) -> None:
    """The kernel's own files: a limit of 64 MiB, a file of 16 MiB that is cached, and a process that has 8 MiB."""
    place = Path(f"/sys/fs/cgroup/memory/wicore-test-{os.getpid()}")
    place.mkdir()
    try:
        (place / "memory.limit_in_bytes").write_text(str(64 * MIB))
        code = (
            f"import os; open({str(place / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
            f"open({str(tmp_path / 'f')!r}, 'wb').write(bytes({16 * MIB}))\n"
            "from wicore_trt.memory import available_bytes; print(available_bytes())"
        )
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
        assert 30 * MIB < int(done.stdout) < 64 * MIB
    finally:
        place.rmdir()


@pytest.mark.parametrize(
    ("outer", "inner", "cores"),
    [("max 100000", "max 100000", 6), ("250000 100000", "max 100000", 3), ("400000 100000", "50000 100000", 1),
     ("900000 100000", "garbage", 6)],
)  # fmt: skip
def test_the_least_quota_of_nested_groups_bounds_cores(
    outer: str, inner: str, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6))
    machine(tmp_path, V2, "0::/pod/box")
    write(tmp_path, {"sys/fs/cgroup/pod/cpu.max": outer, "sys/fs/cgroup/pod/box/cpu.max": inner})
    assert count_cores(tmp_path) == cores


@pytest.mark.parametrize(("quota", "cores"), [(-1, 6), (150000, 2)])
def test_a_quota_of_version_1_bounds_cores(
    quota: int, cores: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: range(6))
    machine(tmp_path, V1.format(top="/"), "5:cpu:/\n4:memory:/\n0::/")
    write(tmp_path, {"sys/fs/cgroup/cpu/cpu.cfs_quota_us": quota, "sys/fs/cgroup/cpu/cpu.cfs_period_us": 100000})
    assert count_cores(tmp_path) == cores
