"""Every parity test runs on the torch operators and, where the library was built, on the native CPU kernels."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["torch", "native"])
def kernels(request: pytest.FixtureRequest) -> str:
    if request.param == "native":
        native = pytest.importorskip("wicore_trt.backends.torch.native")
        if native.load_library() is None:
            pytest.skip("the native kernels are not built")
    return str(request.param)
