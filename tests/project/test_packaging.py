"""The wheel and the editable install hold the command line, the recipes and, given a compiler, the kernels."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
from importlib.metadata import distribution
from pathlib import Path

import pytest
from repository import ROOT, tracked

import wicore_trt
from wicore_trt.recipe import list_recipes


def test_editable_install() -> None:
    script = Path(sysconfig.get_path("scripts"), "wicore")
    done = subprocess.run([script, "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"wicore {wicore_trt.__version__}\n"
    assert distribution("wicore-trt").version == wicore_trt.__version__


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the contents of a freshly built wheel."""
    pytest.importorskip("scikit_build_core", reason="make setup installs the build backend")
    place = tmp_path_factory.mktemp("wheel")
    quiet = ["-q", "--disable-pip-version-check", "--no-deps"]
    build = ["wheel", *quiet, "--no-build-isolation", "--no-index", "-w", str(place), str(ROOT)]
    options = [f"-Cbuild-dir={place}/build", "-Ccmake.build-type=Debug"]  # not optimised: a quarter of the time
    subprocess.run([sys.executable, "-m", "pip", *build, *options], check=True)
    (wheel,) = place.glob("*.whl")
    target = place / "site"
    install = ["install", *quiet, "--no-index", "--target", str(target), str(wheel)]
    subprocess.run([sys.executable, "-m", "pip", *install], check=True)
    return target


def in_wheel(installed: Path, code: str, tmp_path: Path) -> str:
    """Run code against the wheel: -S keeps the editable install's import hook out."""
    paths = [str(installed), *{sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}]
    prelude = f"import sys; sys.path[:0] = {paths!r}\n"
    command = [sys.executable, "-I", "-S", "-c", prelude + code]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.long  # `make test-install` runs it
def test_wheel_runs_outside_the_repository(installed: Path, tmp_path: Path) -> None:
    out = in_wheel(
        installed,
        "import wicore_trt; print(wicore_trt.__file__)\n"
        "from wicore_trt.cli.main import run_command\n"
        "assert run_command(['--version']) == 0\n"
        "assert run_command(['recipes', 'show', 'gemma3-270m-cpu']) == 0\n"
        "from wicore_trt.recipe import list_recipes; print(list_recipes())\n",
        tmp_path,
    )
    lines = out.splitlines()
    assert Path(lines[0]).is_relative_to(installed)
    assert lines[1] == f"wicore {wicore_trt.__version__}"
    assert lines[-1] == str(list_recipes()) and "gemma3-270m-cpu" in lines[-1]


@pytest.mark.long
def test_wheel_contents(installed: Path) -> None:
    names = {p.relative_to(installed).as_posix() for p in installed.rglob("*")}
    assert {"wicore_trt/py.typed", "wicore_trt/cli/main.py", "wicore_trt/recipes/gemma3-270m-cpu.yaml"} <= names
    page = [n for n in tracked() if n.startswith("wicore_trt/http/static/")]
    assert len(page) >= 12 and {*page} <= names
    assert {p.split("/")[0] for p in names} - {"bin"} == {
        "wicore_trt",
        f"wicore_trt-{wicore_trt.__version__}.dist-info",
    }
    assert not [n for n in names if "tests" in n.split("/")]


@pytest.mark.long
def test_wheel_holds_each_file_once(installed: Path) -> None:
    """cli/, plugins/ and recipes/ are folders at the root and links inside of the package."""
    contents = [p.read_bytes() for p in installed.rglob("*.py") if p.name != "__init__.py" and "gen" not in p.parts]
    assert len(contents) > 200 and len(contents) == len({*contents})


def test_sdist_holds_each_file_once(tmp_path: Path) -> None:
    pytest.importorskip("scikit_build_core", reason="make setup installs the build backend")
    code = f"from scikit_build_core.build import build_sdist; print(build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True, capture_output=True)
    (path,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        members = archive.getmembers()
    names = {m.name.partition("/")[2] for m in members}
    assert {"CMakeLists.txt", "wicore_trt/cli/main.py", "wicore_trt/plugins/cpu/src/linear.h"} <= names
    assert not [n for n in names if n.startswith(("cli/", "plugins/", "recipes/", "tests/", "benchmarks/"))]
    assert all(m.isfile() for m in members)


def test_a_checkout_runs_without_being_installed(tmp_path: Path) -> None:
    """As `PYTHONPATH=. python -m wicore_trt` does where the dependencies are there."""
    code = (
        "from wicore_trt.cli.main import run_command\nassert run_command(['recipes', 'show', 'gemma3-270m-cpu']) == 0\n"
    )
    code += "import wicore_trt.plugins.aot, wicore_trt\nprint(wicore_trt.__path__)\n"
    assert in_wheel(ROOT, code, tmp_path).splitlines()[-1] == str([str(ROOT / "wicore_trt")])


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
def test_wheel_has_the_native_library(installed: Path, tmp_path: Path) -> None:
    code = (
        "from pathlib import Path; from wicore_trt.cli._checks import check_machine\n"
        "rows = {r.name: r for r in check_machine(engine=None, cache_dir=Path('.'), port=0, http_port=0)}\n"
        "print(rows['native kernels'])"
    )
    assert "state='ok'" in in_wheel(installed, code, tmp_path)


FAILS = """#!/bin/sh
case "$*" in
  *plugins/cpu/src*) echo "library.cpp:30:46: error: deducing wants a header" >&2; exit 1;;
  *) exec c++ "$@";;
esac
"""
"""A compiler that takes CMake's own programs and not our sources, as one does whose library lacks a header."""


@pytest.mark.long
@pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")
@pytest.mark.parametrize("editable", [False, True], ids=["package", "editable"])
@pytest.mark.parametrize(("compiler", "said"), [(FAILS, "library.cpp:30:46: error: deducing wants a header"), ("", "")])
def test_a_compiler_that_fails_leaves_a_package_that_works(
    compiler: str, said: str, editable: bool, tmp_path: Path
) -> None:
    """Installed by pip into an environment of its own, whose other packages are this one's."""
    venv.create(tmp_path / "env")
    python, broken = tmp_path / "env" / "bin" / "python", tmp_path / "c++"
    broken.write_text(compiler or "#!/bin/sh\nexit 1\n")
    broken.chmod(0o755)
    others = tmp_path / "others"
    others.mkdir()
    for path in {*Path(sysconfig.get_path("purelib")).iterdir(), *Path(sysconfig.get_path("platlib")).iterdir()}:
        if "wicore" not in path.name:
            (others / path.name).symlink_to(path)
    environment = os.environ | {"PYTHONPATH": str(others), "CXX": str(broken)}
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "-v", "--ignore-installed"]
    command += ["--no-deps", "--no-build-isolation", "--no-index", f"-Cbuild-dir={tmp_path}/build"]
    source = ["-e", str(ROOT)] if editable else [str(ROOT)]
    done = subprocess.run([*command, *source], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    doctor = [str(python), "-m", "wicore_trt.cli.main", "doctor", "--json"]
    report = subprocess.run(doctor, env=environment, capture_output=True, text=True, cwd=tmp_path)
    (row,) = (row for row in json.loads(report.stdout)["checks"] if row["name"] == "native kernels")
    assert row["state"] == "warn" and "C++17 compiler" in row["fix"]
    assert row["found"].startswith(f"was not built: {said}") and len(row["found"]) > len("was not built: ")
    code = "from wicore_trt.backends.torch import native, executor; print(executor.__file__, native.load_library())"
    place = subprocess.run([str(python), "-c", code], env=environment, capture_output=True, text=True, cwd=tmp_path)
    imported, library = place.stdout.split()
    assert Path(imported).is_relative_to(ROOT if editable else tmp_path / "env") and library == "None"
