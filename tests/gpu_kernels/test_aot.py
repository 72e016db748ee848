"""Every kernel compiles for every target without a GPU, and what is saved says all that a launch needs."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

triton = pytest.importorskip("triton", reason="pip install -e .[triton]")

from representative import SPECS  # noqa: E402

from wicore_trt.errors import ConfigError, EngineFormatError  # noqa: E402
from wicore_trt.plugins import aot  # noqa: E402

NAMES = {"sm80": 80, "sm86": 86, "sm89": 89, "sm90": 90, "sm100": 100, "sm120": 120}


def elf_architecture(cubin: bytes) -> int:
    """The SM that a cubin is for: in the ELF header's flags, whose layout changed with ABI version 8."""
    flags = int.from_bytes(cubin[48:52], "little")
    return (flags >> 8) & 0xFF if cubin[8] >= 8 else flags & 0xFF


def parameter_sizes(cubin: bytes, symbol: str) -> list[int]:
    """Sizes of a kernel's parameters in order, from the EIATTR_KPARAM_INFO (0x17) records of its .nv.info section: u32
    index, u16 ordinal, u16 offset, u32 whose bits 18 and up are the size."""
    found = {}
    for match in re.finditer(rb"\x04\x17\x0c\x00", cubin):
        record = cubin[match.end() : match.end() + 12]
        found[int.from_bytes(record[4:6], "little")] = int.from_bytes(record[8:12], "little") >> 18
    assert sorted(found) == list(range(len(found))), symbol
    return [found[i] for i in sorted(found)]


@pytest.mark.parametrize(
    ("name", "target"), [(name, aot.TARGETS[n % len(aot.TARGETS)]) for n, name in enumerate(SPECS)]
)  # the kernels of whole engines are compiled for all of them by `make test-targets`
def test_kernel_compiles(name: str, target: str) -> None:
    spec = SPECS[name]
    kernel = aot.compile_kernel(spec, target)
    assert kernel.cubin[:4] == b"\x7fELF" and kernel.symbol.encode() + b"\0" in kernel.cubin
    assert elf_architecture(kernel.cubin) == NAMES[target]
    assert kernel.arguments == tuple(spec.signature.items()) and kernel.target == target
    assert 0 <= kernel.shared_bytes <= aot.SHARED_LIMIT[target]
    assert len(kernel.cubin) < 400_000, "line tables are left out"
    widths = {"i32": 4, "fp32": 4, "i64": 8}
    want = [8 if type_.startswith("*") else widths[type_] for _, type_ in kernel.arguments]
    assert parameter_sizes(kernel.cubin, kernel.symbol) == [*want, 8, 8], "the arguments and two scratch pointers"


def test_saved_kernels_come_back(tmp_path: Path) -> None:
    kernel = aot.compile_kernel(SPECS["page_digest"], "sm89")
    aot.save_kernel(kernel, tmp_path)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["page_digest.cubin", "page_digest.json"]
    assert aot.load_kernel(lambda name: (tmp_path / name).read_bytes(), kernel.name) == kernel


def test_metadata_says_what_may_be_launched_early() -> None:
    kernel = aot.compile_kernel(SPECS["page_digest"], "sm89")
    early = replace(kernel, dependent=True)
    assert not kernel.dependent and aot.CompiledKernel.from_metadata(early.metadata(), kernel.cubin) == early
    older = kernel.metadata()
    del older["dependent"]
    assert aot.CompiledKernel.from_metadata(older, kernel.cubin) == kernel


def test_damage_is_reported(tmp_path: Path) -> None:
    kernel = aot.compile_kernel(SPECS["page_digest"], "sm89")
    aot.save_kernel(kernel, tmp_path)
    cubin, meta = tmp_path / f"{kernel.name}.cubin", tmp_path / f"{kernel.name}.json"
    cubin.write_bytes(kernel.cubin[:-1])
    with pytest.raises(EngineFormatError, match="bytes expected"):
        aot.load_kernel(lambda name: (tmp_path / name).read_bytes(), kernel.name)
    meta.write_text("{}")
    with pytest.raises(EngineFormatError, match="format"):
        aot.load_kernel(lambda name: (tmp_path / name).read_bytes(), kernel.name)
    meta.unlink()
    with pytest.raises(EngineFormatError, match="cannot be read"):
        aot.load_kernel(lambda name: (tmp_path / name).read_bytes(), kernel.name)


def test_what_cannot_be_compiled_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = next(spec for name, spec in SPECS.items() if name.startswith("prefill"))
    with pytest.raises(ConfigError, match="sm75"):
        aot.compile_kernel(spec, "sm75")
    monkeypatch.setitem(aot.SHARED_LIMIT, "sm80", 1000)
    with pytest.raises(ConfigError, match="shared memory"):
        aot.compile_kernel(spec, "sm80")
    with pytest.raises(AssertionError, match="without a type"):
        aot.compile_kernel(replace(spec, constants={}), "sm80")


def test_loading_needs_no_triton_and_no_torch() -> None:
    modules = "aot, layout, launch"
    imports = "; ".join(f"import wicore_trt.plugins.{m}" for m in modules.split(", "))
    code = f"{imports}; import sys; print([m for m in ('triton', 'torch', 'tensorrt', 'cuda') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
