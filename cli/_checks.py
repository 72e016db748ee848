"""Checks of `wicore doctor`, one function each.

Standard library only, at import and where possible afterwards. No check talks to the network. Invariant:
`check_machine` returns a row for every check, whatever is broken.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import re
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

OK, WARN, FAIL = "ok", "warn", "fail"
MIN_PYTHON = (3, 11)
MIN_FREE_BYTES = 2 << 30
GIB = 1 << 30
ISA_FLAGS = ("avx2", "f16c", "fma", "avx512f", "avx512bw", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
EXTRAS = {
    "torch": ("torch",),
    "gguf": ("gguf",),
    "serve": ("grpc", "grpc_health", "grpc_reflection", "grpc_status", "uvicorn", "starlette", "msgspec"),
}
PACKAGES = (
    *("wicore-trt", "torch", "triton", "tensorrt", "tensorrt-rtx-cu13-bindings", "numpy", "safetensors", "tokenizers"),
    *("huggingface_hub", "grpcio", "protobuf"),
)


Finding = tuple[str, str, str]
"""State, what was found, and the fix, "" when there is nothing to do."""


class DoctorCheck(NamedTuple):
    """Line of the report; `fix` is empty when there is nothing to do."""

    name: str
    state: str
    found: str
    fix: str


def check_machine(*, engine: Path | None, cache_dir: Path, port: int, http_port: int) -> list[DoctorCheck]:
    checks: list[tuple[str, Callable[[], Finding]]] = [
        ("python", _check_python), ("system", _check_system),
        ("cpu", _check_cpu), ("memory", _check_memory), ("torch", _check_torch),
        ("native kernels", _native_kernels), ("gpu", _check_gpu), ("gpu links", _check_gpu_links),
        ("extras", _check_extras), ("versions", _list_versions),
        ("disk", lambda: _check_disk(cache_dir)), ("direct I/O", lambda: _direct_io(cache_dir)),
        ("locked memory", _check_memlock), ("hugging face", _hugging_face),
        ("port", lambda: _check_port(port, "grpc")), ("HTTP port", lambda: _check_port(http_port, "http")),
    ]  # fmt: skip
    if engine is not None:
        checks.append(("engine", lambda: _check_engine(engine)))
    return [DoctorCheck(name, *_run_check(check)) for name, check in checks]


def _run_check(check: Callable[[], Finding]) -> Finding:
    try:
        return check()
    except Exception as error:  # a report with a hole helps more than no report
        return WARN, f"could not be checked: {error!r}", "Please report this as a bug."


def _judge(fit: bool, found: str, fix: str, state: str = WARN) -> Finding:
    return (OK, found, "") if fit else (state, found, fix)


def _check_python() -> Finding:
    found = f"{platform.python_version()} at {sys.executable}"
    return _judge(sys.version_info[:2] >= MIN_PYTHON, found, "Install Python 3.11 or newer.", FAIL)


def _check_system() -> Finding:
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    return _judge(platform.system() == "Linux", found, "Linux is what WiCore is tested on.")


def _check_cpu() -> Finding:
    from wicore_trt.cores import count_cores

    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    lines = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    values = {key.strip(): value.strip() for key, value in lines.items()}
    flags = set(values.get("flags", values.get("Features", "")).split())
    have = " ".join(flag for flag in ISA_FLAGS if flag in flags) or "no AVX"
    return OK, f"{values.get('model name', platform.machine())}, {count_cores()} cores, {have}", ""


def _check_memory() -> Finding:
    from wicore_trt.memory import available_bytes

    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    kib = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}
    free = available_bytes() or 0
    found = f"{free / GIB:.1f} GiB available of {kib['MemTotal'] / (1 << 20):.1f} GiB"
    return _judge(free >= MIN_FREE_BYTES, found, "Close other programs; Gemma 3 270M alone needs about 2 GiB.")


def _check_torch() -> Finding:
    from wicore_trt.errors import install_command

    fix = install_command("torch")
    if find_spec("torch") is None:
        return WARN, "not installed; engines are built without it, and run with it", fix
    try:
        import torch
    except Exception as error:
        return FAIL, f"cannot be imported: {error}", fix
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return OK, f"{torch.__version__}, {cuda}, {torch.get_num_threads()} threads", ""


def _native_kernels() -> Finding:
    import wicore_trt

    found = next((p for root in wicore_trt.__path__ for p in Path(root, "_native").glob("libwicore_cpu.*")), None)
    if found is None:
        from wicore_trt.plugins.cpu_library import FIX, why_lacking

        return WARN, why_lacking(), f"{FIX} Until then slower torch operators run."
    try:
        library = ctypes.CDLL(str(found))
        library.wicore_cpu_isa.restype = ctypes.c_char_p
        return OK, f"{found.name}, {library.wicore_cpu_isa().decode()}", ""
    except (OSError, AttributeError) as error:
        return WARN, f"{error}", "Reinstall wicore-trt on this machine."


def _check_gpu() -> Finding:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return OK, "none (no nvidia-smi); engines run on the CPU", ""
    query = "--query-gpu=name,memory.total,driver_version,compute_cap"
    done = subprocess.run([tool, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
    if done.returncode or not done.stdout.strip():
        reason = (done.stdout + done.stderr).strip().splitlines()
        return WARN, reason[0] if reason else "nvidia-smi failed", "Reload or reinstall the NVIDIA driver."
    found = "; ".join(done.stdout.strip().splitlines())
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        return WARN, f"{found}; PyTorch cannot use it", "Install a CUDA build of PyTorch for this driver."
    return OK, found, ""


def _check_gpu_links() -> Finding:
    """Say how GPUs are linked, by pairs, and which of them reach each other's memory."""
    links, reads = _read_topology("-m"), _read_topology("-p2p", "r")
    if not links:
        return OK, "no two GPUs", ""
    kinds: dict[str, list[str]] = {}
    for pair, link in links.items():
        kinds.setdefault(f"{link}, {'peer access' if reads.get(pair) == 'OK' else 'no peer access'}", []).append(pair)
    found = "; ".join(f"{' '.join(pairs)}: {kind}" for kind, pairs in kinds.items())
    fix = "Engines of several GPUs run there, but exchange through host memory, which takes several times as long."
    return _judge(not any("no peer" in kind for kind in kinds), found, fix)


def _read_topology(*query: str) -> dict[str, str]:
    """Read a matrix of `nvidia-smi topo`: for each pair of GPUs, like "0-1", what it says."""
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    done = subprocess.run([tool, "topo", *query], capture_output=True, text=True, timeout=20)
    rows = [line.split() for line in re.sub(r"\x1b\[\d*m", "", done.stdout).splitlines()]
    cells = {int(row[0][3:]): row[1:] for row in rows if len(row) > 1 and re.fullmatch(r"GPU\d+", row[0])}
    cells = {gpu: row for gpu, row in cells.items() if "X" in row}  # not the heading
    return {f"{a}-{b}": cells[a][b] for a in cells for b in cells if a < b and b < len(cells[a])}


def _check_extras() -> Finding:
    from wicore_trt.errors import install_command

    missing = [extra for extra, modules in EXTRAS.items() if any(find_spec(m) is None for m in modules)]
    found = f"have {', '.join(extra for extra in EXTRAS if extra not in missing) or 'none'}"
    lacking = f"; lack {', '.join(missing)}" if missing else ""
    return _judge(not missing, found + lacking, install_command(*missing))


def _list_versions() -> Finding:
    from wicore_trt.errors import list_installed

    have = list_installed(PACKAGES)
    return OK, ", ".join(f"{package} {have.get(package, '-')}" for package in PACKAGES), ""


def _find_ancestor(path: Path) -> Path:
    """Find the nearest ancestor that exists, or the path itself."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def _check_disk(cache_dir: Path) -> Finding:
    place = _find_ancestor(cache_dir)
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.1f} GiB free at {cache_dir}"
    if not os.access(place, os.W_OK):
        return FAIL, f"{found}, not writable", "Make it writable or name another with --cache-dir."
    return _judge(free >= MIN_FREE_BYTES, found, "Free some space or name another directory with --cache-dir.")


def _direct_io(cache_dir: Path) -> Finding:
    fix = "Put the cache on a local disk (ext4, xfs); reads and writes go through the page cache until then."
    with tempfile.TemporaryDirectory(dir=_find_ancestor(cache_dir), prefix=".wicore-doctor-") as scratch:
        try:
            descriptor = os.open(Path(scratch, "probe"), os.O_CREAT | os.O_RDWR | os.O_DIRECT)
            with open(descriptor, "wb", buffering=0) as file, mmap.mmap(-1, mmap.PAGESIZE) as page:
                written = file.write(page)  # O_DIRECT wants aligned memory; mmap gives it
        except OSError as error:
            return WARN, f"refused: {error.strerror}", fix
    return OK, f"O_DIRECT works ({written} bytes written)", ""


def _check_memlock() -> Finding:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return OK, "unlimited", ""
    fit = shutil.which("nvidia-smi") is None or soft >= GIB
    return _judge(fit, f"limit {soft / GIB:.2f} GiB", "ulimit -l unlimited, so that host memory can be pinned.")


def _hugging_face() -> Finding:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    token = bool(os.environ.get("HF_TOKEN")) or (home / "token").is_file()
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    found = f"token {'present' if token else 'absent'}, HF_HUB_OFFLINE {'set' if offline else 'not set'}"
    fix = "Gated models need it: accept the licence on the model's page, then set HF_TOKEN or run `hf auth login`."
    return _judge(token or offline, found, fix)


def _check_port(port: int, kind: str) -> Finding:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return WARN, f"{port}: {error.strerror}", f"Stop what listens there, or serve with --{kind}-port."
    return OK, f"{port} is free", ""


def _check_engine(path: Path) -> Finding:
    from wicore_trt.checkpoint.format import count_weight_bytes
    from wicore_trt.engine.directory import open_engine
    from wicore_trt.errors import WicoreError

    try:
        manifest = open_engine(path).manifest
    except WicoreError as error:
        return FAIL, error.message, error.fix or "Rebuild it."
    size = f"{count_weight_bytes(manifest.spec, manifest.weights) / GIB:.1f} GiB of weights"
    return OK, f"{path}: {manifest.model_id}, {manifest.backend}, {manifest.dtype}, {size}, all hashes match", ""
