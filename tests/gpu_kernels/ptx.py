"""The PTX of what Triton compiles, for tests that read it."""

from __future__ import annotations

from typing import Any

import pytest
import triton


def recorded_ptx(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The PTX of each kernel that is compiled from now on, in this order."""
    texts: list[str] = []
    compile_ = triton.compile

    def recorded(*arguments: Any, **options: Any) -> Any:
        built = compile_(*arguments, **options)
        texts.append(built.asm["ptx"])
        return built

    monkeypatch.setattr(triton, "compile", recorded)
    return texts
