"""The checks behind `wicore doctor`, one function each.

Standard library only, at import and where it can be avoided afterwards. No check talks to the network. Invariant:
`check_machine` returns a row for every check, whatever is broken.
"""

from __future__ import annotations

import ctypes.util
import mmap
import os
import platform
import resource
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
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
CUDA_LIBRARIES = ("cuda", "cudart", "cublas", "nvrtc")
PACKAGES = ("wicore-trt", "torch", "numpy", "safetensors", "tokenizers", "huggingface_hub", "grpcio", "protobuf")


class Check(NamedTuple):
    """One line of the report; `fix` is empty when there is nothing to do."""

    name: str
    state: str
    found: str
    fix: str = ""


def check_machine(*, engine: Path | None, cache_dir: Path, port: int) -> list[Check]:
    """All checks in reading order."""
    checks: list[tuple[str, Callable[[], Check]]] = [
        ("python", _python), ("system", _system), ("cpu", _cpu), ("memory", _memory), ("torch", _torch),
        ("native kernels", _native_kernels), ("gpu", _gpu), ("cuda libraries", _cuda_libraries),
        ("tensorrt", _tensorrt), ("extras", _extras), ("versions", _versions),
        ("disk", lambda: _disk(cache_dir)), ("direct I/O", lambda: _direct_io(cache_dir)),
        ("locked memory", _memlock), ("hugging face", _hugging_face), ("port", lambda: _port(port)),
        ("clock", _clock),
    ]  # fmt: skip
    if engine is not None:
        checks.append(("engine", lambda: _engine(engine)))
    return [_guarded(name, check) for name, check in checks]


def _guarded(name: str, check: Callable[[], Check]) -> Check:
    try:
        return check()
    except Exception as error:  # a report with a hole helps more than no report
        return Check(name, WARN, f"could not be checked: {error!r}", "Please report this as a bug.")


def _python() -> Check:
    found = f"{platform.python_version()} at {sys.executable}"
    if sys.version_info[:2] < MIN_PYTHON:
        return Check("python", FAIL, found, "Install Python 3.11 or newer.")
    return Check("python", OK, found)


def _system() -> Check:
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() != "Linux":
        return Check("system", WARN, found, "Linux is what WiCore is tested on.")
    return Check("system", OK, found)


def _cpu() -> Check:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    info = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    lines = dict(line.split(":", 1) for line in info.split("\n\n")[0].splitlines() if ":" in line)
    values = {key.strip(): value.strip() for key, value in lines.items()}
    flags = set(values.get("flags", values.get("Features", "")).split())
    have = [flag for flag in ISA_FLAGS if flag in flags]
    return Check(
        "cpu", OK, f"{values.get('model name', platform.machine())}, {cores} cores, {' '.join(have) or 'no AVX'}"
    )


def _memory() -> Check:
    from wicore_trt.memory import available_bytes

    lines = Path("/proc/meminfo").read_text(encoding="utf-8").splitlines()
    kib = {name: int(rest.split()[0]) for name, rest in (line.split(":", 1) for line in lines)}
    free = available_bytes() or 0
    found = f"{free / GIB:.1f} GiB available of {kib['MemTotal'] / (1 << 20):.1f} GiB"
    if free < MIN_FREE_BYTES:
        return Check("memory", WARN, found, "Close other programs; Gemma 3 270M alone needs about 2 GiB.")
    return Check("memory", OK, found)


def _torch() -> Check:
    from wicore_trt.errors import install_command

    fix = install_command("torch")
    if find_spec("torch") is None:
        return Check("torch", WARN, "not installed; engines are built without it, and run with it", fix)
    try:
        import torch
    except Exception as error:
        return Check("torch", FAIL, f"cannot be imported: {error}", fix)
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Check("torch", OK, f"{torch.__version__}, {cuda}, {torch.get_num_threads()} threads")


def _native_kernels() -> Check:
    import wicore_trt

    found = next((p for root in wicore_trt.__path__ for p in Path(root, "_native").glob("libwicore_cpu.*")), None)
    if found is None:
        from wicore_trt.plugins.cpu_library import FIX, why_lacking

        return Check("native kernels", WARN, why_lacking(), f"{FIX} Until then slower torch operators run.")
    try:
        library = ctypes.CDLL(str(found))
        library.wicore_cpu_isa.restype = ctypes.c_char_p
        return Check("native kernels", OK, f"{found.name}, {library.wicore_cpu_isa().decode()}")
    except (OSError, AttributeError) as error:
        return Check("native kernels", WARN, f"{error}", "Reinstall wicore-trt on this machine.")


def _gpu() -> Check:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return Check("gpu", OK, "none (no nvidia-smi); engines run on the CPU")
    query = "--query-gpu=name,memory.total,driver_version,compute_cap"
    done = subprocess.run([tool, query, "--format=csv,noheader"], capture_output=True, text=True, timeout=20)
    if done.returncode or not done.stdout.strip():
        reason = (done.stdout + done.stderr).strip().splitlines()
        return Check(
            "gpu", WARN, reason[0] if reason else "nvidia-smi failed", "Reload or reinstall the NVIDIA driver."
        )
    found = "; ".join(done.stdout.strip().splitlines())
    torch = sys.modules.get("torch")
    if torch is not None and not torch.cuda.is_available():
        return Check("gpu", WARN, f"{found}; PyTorch cannot use it", "Install a CUDA build of PyTorch for this driver.")
    return Check("gpu", OK, found)


def _cuda_libraries() -> Check:
    have = [name for name in CUDA_LIBRARIES if ctypes.util.find_library(name)]
    return Check("cuda libraries", OK, ", ".join(have) or "none on the library path")


def _tensorrt() -> Check:
    for package in ("tensorrt", "tensorrt-rtx-cu13-bindings"):
        try:
            return Check("tensorrt", OK, f"{package} {version(package)}")
        except PackageNotFoundError:
            continue
    return Check("tensorrt", OK, "not installed; builds with --backend tensorrt need the extra tensorrt")


def _extras() -> Check:
    from wicore_trt.errors import install_command

    missing = [extra for extra, modules in EXTRAS.items() if any(find_spec(m) is None for m in modules)]
    have = [extra for extra in EXTRAS if extra not in missing]
    found = f"have {', '.join(have) or 'none'}"
    if missing:
        return Check("extras", WARN, f"{found}; lack {', '.join(missing)}", install_command(*missing))
    return Check("extras", OK, found)


def _versions() -> Check:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {version(package)}")
        except PackageNotFoundError:
            found.append(f"{package} -")
    return Check("versions", OK, ", ".join(found))


def _existing(path: Path) -> Path:
    """The path, or its nearest ancestor that exists."""
    return next(p for p in (path, *path.absolute().parents) if p.exists())


def _disk(cache_dir: Path) -> Check:
    place = _existing(cache_dir)
    free = shutil.disk_usage(place).free
    found = f"{free / GIB:.1f} GiB free at {cache_dir}"
    if not os.access(place, os.W_OK):
        return Check("disk", FAIL, f"{found}, not writable", "Make it writable or name another with --cache-dir.")
    if free < MIN_FREE_BYTES:
        return Check("disk", WARN, found, "Free some space or name another directory with --cache-dir.")
    return Check("disk", OK, found)


def _direct_io(cache_dir: Path) -> Check:
    fix = "Put the cache on a local disk (ext4, xfs); reads and writes go through the page cache until then."
    with tempfile.TemporaryDirectory(dir=_existing(cache_dir), prefix=".wicore-doctor-") as scratch:
        try:
            descriptor = os.open(Path(scratch, "probe"), os.O_CREAT | os.O_RDWR | os.O_DIRECT)
        except OSError as error:
            return Check("direct I/O", WARN, f"refused: {error.strerror}", fix)
        try:
            with mmap.mmap(-1, mmap.PAGESIZE) as page:  # O_DIRECT wants aligned memory; mmap gives it
                written = os.write(descriptor, page)
        except OSError as error:
            return Check("direct I/O", WARN, f"refused: {error.strerror}", fix)
        finally:
            os.close(descriptor)
    return Check("direct I/O", OK, f"O_DIRECT works ({written} bytes written)")


def _memlock() -> Check:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    if soft == resource.RLIM_INFINITY:
        return Check("locked memory", OK, "unlimited")
    found = f"limit {soft / GIB:.2f} GiB"
    if shutil.which("nvidia-smi") and soft < GIB:
        return Check("locked memory", WARN, found, "ulimit -l unlimited, so that host memory can be pinned.")
    return Check("locked memory", OK, found)


def _hugging_face() -> Check:
    home = Path(os.environ.get("HF_HOME", Path.home() / ".cache" / "huggingface"))
    token = bool(os.environ.get("HF_TOKEN")) or (home / "token").is_file()
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    found = f"token {'present' if token else 'absent'}, {'offline' if offline else 'online'}"
    if not token and not offline:
        fix = "Gated models need it: accept the licence on the model's page, then set HF_TOKEN or run `hf auth login`."
        return Check("hugging face", WARN, found, fix)
    return Check("hugging face", OK, found)


def _port(port: int) -> Check:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            return Check(
                "port", WARN, f"{port}: {error.strerror}", "Stop what listens there, or serve with --grpc-port."
            )
    return Check("port", OK, f"{port} is free")


def _clock() -> Check:
    now = time.time()
    found = time.strftime("%Y-%m-%d %H:%M:%S %z", time.localtime(now))
    newest = max((p.stat().st_mtime for p in Path(__file__).parent.glob("*.py")), default=now)
    if now + 86400 < newest:
        return Check("clock", WARN, f"{found}, before this program was installed", "Set the clock; TLS needs it.")
    return Check("clock", OK, found)


def _engine(path: Path) -> Check:
    from wicore_trt.engine.directory import open_engine
    from wicore_trt.errors import WicoreError

    try:
        engine = open_engine(path)
    except WicoreError as error:
        return Check("engine", FAIL, error.message, error.fix or "Rebuild it.")
    manifest = engine.manifest
    return Check("engine", OK, f"{path}: {manifest.model_id}, {manifest.backend}, {manifest.dtype}, all hashes match")
