"""The architectures that a test of compiling is repeated for: few in every run, all in the long profile."""

from __future__ import annotations

from typing import Any

import pytest

ALL = ("sm80", "sm89", "sm90", "sm100", "sm120")


def targets(*always: str) -> list[Any]:
    """`always`, those whose code differs, and the others marked long."""
    return [*always, *(pytest.param(target, marks=pytest.mark.long) for target in ALL if target not in always)]
