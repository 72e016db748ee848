"""The kernels in Triton's interpreter against plain references."""

from __future__ import annotations

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install wicore-trt[triton]")

import attention_checks  # noqa: E402
import interpreted  # noqa: E402
import kernel_checks  # noqa: E402

CHECKS = {**kernel_checks.CHECKS, **attention_checks.CHECKS}


@pytest.mark.parametrize("name", CHECKS)
def test_kernel(name: str) -> None:
    CHECKS[name](kernel_checks.Runner("cpu", interpreted.launch))
