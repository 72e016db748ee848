"""The mutants fit the code; that each is caught is `make test-mutants`."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from cases import MUTANTS
from run import moved


def test_every_mutant_fits_the_code() -> None:
    assert not moved()


def test_none_was_lost() -> None:
    assert len(set(MUTANTS)) == 83
