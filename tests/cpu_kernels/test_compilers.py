"""The CPU kernels compile without a warning by every compiler that people have, and include what they use.

A header that comes in by accident comes with one compiler's library and not with the next one's. So each file is asked
what it uses (include-what-you-use), each header is compiled alone, and each source by each compiler that is here; the
options are those that CMake gives.
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from functools import cache
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "plugins" / "cpu"
COMPILERS = ("g++-11", "g++-12", "g++-13", "g++-14", "g++-15", "clang++")
ALONE = ["-DWICORE_ISA=alone", '-DWICORE_ISA_NAME="alone"', "-DWICORE_ISA_TABLE=kGeneric"]
READABLE = ("wicore_cpu.h", "kernels.h", "kernels_impl.h", "pool.h")
"""Sources that include-what-you-use can read: it fails at vectors of GCC."""
USES = {
    r"u?int(?:8|16|32|64)_t|uintptr_t": ("stdint.h",),
    r"size_t": ("stddef.h", "string.h"),
    r"mem(?:cpy|set|move|cmp)|strcmp": ("string.h",),
    r"initializer_list|for \([^;)]*: \{[^)]*\)": ("initializer_list",),
}
"""Patterns of names to the headers that bring them."""
NAMES = {"bits/chrono.h": "chrono", "bits/types/struct_iovec.h": "sys/uio.h"}
"""A header of one library's own to the one that stands for it."""


def need(tool: str) -> str:
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed; .ci/run installs it from Debian's packages")
    return tool


@cache
def commands(place: Path) -> dict[str, list[str]]:
    """The command of CMake for each source, without compiler, input and output."""
    need("cmake")
    options = ["-DCMAKE_EXPORT_COMPILE_COMMANDS=ON"]
    subprocess.run(["cmake", "-S", SOURCES, "-B", place / "build", *options], check=True, capture_output=True)
    entries = json.loads((place / "build" / "compile_commands.json").read_text())
    return {Path(e["file"]).name: e["command"].split(" -o ")[0].split()[1:] for e in entries}


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    found = commands(tmp_path_factory.mktemp("cmake"))
    assert {*found} == {p.name for p in SOURCES.glob("src/*.cpp")}
    assert any("-mavx512bf16" in options for options in found.values()) or "x86" not in str(found)
    return found


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.long
def test_each_source_compiles_without_a_warning(compiler: str, built: dict[str, list[str]], tmp_path: Path) -> None:
    need(compiler)
    for name, options in built.items():
        # CMake names the standard only where it is not the default of the compiler that it found.
        options = ["-std=c++17", *options, "-Werror"]
        command = [compiler, *options, "-c", str(SOURCES / "src" / name), "-o", str(tmp_path / "o")]
        done = subprocess.run(command, capture_output=True, text=True)
        assert done.returncode == 0, f"{compiler} {name}: {done.stderr[:2000]}"


def build_native(clone: Path) -> str:
    """Build `clone`/source as an install does; returns what was built of it."""
    native = [f"-DSOURCE={clone / 'source'}", f"-DPLACE={clone / 'build'}", "-P", str(SOURCES / "build.cmake")]
    subprocess.run(["cmake", *native], check=True, capture_output=True)
    return "".join(sorted(p.read_text() for p in (clone / "build/stage").rglob("*.txt")))


def test_a_clone_that_was_moved_is_built_anew_and_another_is_not(tmp_path: Path) -> None:
    need("cmake")
    need("make")
    clone, moved = tmp_path / "clone", tmp_path / "moved"
    (clone / "source").mkdir(parents=True)
    (clone / "build").mkdir()
    (clone / "build/options.cmake").write_text('set(options "")\nset(generator "Unix Makefiles")\n')
    (clone / "source/CMakeLists.txt").write_text(
        "cmake_minimum_required(VERSION 3.20)\nproject(tiny LANGUAGES NONE)\n"
        "install(FILES kernels.txt DESTINATION wicore_trt/_native)\n"
    )
    (clone / "source/kernels.txt").write_text("built")
    assert build_native(clone) == "built"
    kept = clone / "build/native/kept"
    kept.touch()
    assert build_native(clone) == "built"
    assert kept.exists()
    clone.rename(moved)
    assert build_native(moved) == "built"


@pytest.mark.long
@pytest.mark.parametrize("library", ["libstdc++", "libc++"])
def test_each_header_compiles_alone(library: str) -> None:
    """libc++ brings in far fewer headers by accident."""
    need("clang++")
    for header in [*SOURCES.glob("src/*.h"), *SOURCES.glob("include/*.h")]:
        command = ["clang++", f"-stdlib={library}", "-std=c++17", "-fsyntax-only", "-x", "c++", *ALONE, "-"]
        command += [f"-I{SOURCES / 'include'}", f"-I{SOURCES / 'src'}"]
        done = subprocess.run(command, capture_output=True, text=True, input=f'#include "{header.name}"\n')
        if "file not found" in done.stderr and library == "libc++":
            pytest.skip("libc++ is not installed; .ci/run installs it from Debian's packages")
        assert done.returncode == 0, f"{header.name}: {done.stderr[:2000]}"


def lacking(report: str) -> list[str]:
    """The lines that a report of include-what-you-use wants added, as "file: header"."""
    found = []
    for block in re.findall(r"(?m)^(\S+) should add these lines:\n((?:.+\n)*)", report):
        headers = re.findall(r"#include [<\"]([^>\"]+)", block[1])
        text = Path(block[0]).read_text()
        names = [NAMES.get(header, header) for header in headers]
        found += [
            f"{Path(block[0]).name}: {name}" for name in names if not re.search(rf'[<"/]{re.escape(name)}[>"]', text)
        ]
    return found


@pytest.mark.long
def test_each_file_includes_what_it_uses(built: dict[str, list[str]]) -> None:
    need("include-what-you-use")
    for name, options in built.items():
        also = [part for header in READABLE for part in ("-Xiwyu", f"--check_also={SOURCES}/*/{header}")]
        command = ["include-what-you-use", "-std=c++17", *also, *options, str(SOURCES / "src" / name)]
        done = subprocess.run(command, capture_output=True, text=True)
        assert "error:" not in done.stderr and "Assertion" not in done.stderr, done.stderr
        assert "correct #includes" in done.stderr or "full include-list" in done.stderr
        assert lacking(done.stderr) == []


@pytest.mark.parametrize("path", sorted(SOURCES.rglob("*.h")) + sorted(SOURCES.rglob("*.cpp")), ids=lambda p: p.name)
def test_each_file_includes_the_headers_of_c_that_it_uses(path: Path) -> None:
    """Said of the headers with vectors too, which include-what-you-use cannot read."""
    code = re.sub(r'//.*|"(?:[^"\\]|\\.)*"', "", path.read_text())
    for names, headers in USES.items():
        if found := re.search(rf"\b(?:{names})\b", code):
            assert any(f"#include <{header}>" in path.read_text() for header in headers), f"{found[0]} wants {headers}"


def test_a_lacking_header_is_found(tmp_path: Path) -> None:
    need("include-what-you-use")
    source = tmp_path / "lacks.cpp"
    source.write_text(
        "#include <mutex>\nint sum() { int s = 0; for (int i : {1, 2}) s += i; return s; }\nstd::mutex m;\n"
    )
    done = subprocess.run(["include-what-you-use", "-std=c++17", str(source)], capture_output=True, text=True)
    assert lacking(done.stderr) == ["lacks.cpp: initializer_list"]
