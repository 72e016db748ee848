"""The kernels in Triton's interpreter against plain references."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")

import interpreted
import kernel_checks

CHECKS = kernel_checks.CHECKS
CPU = kernel_checks.Runner("cpu", interpreted.launch)


@pytest.mark.parametrize("name", CHECKS)
def test_kernel(name: str) -> None:
    CHECKS[name](CPU)
