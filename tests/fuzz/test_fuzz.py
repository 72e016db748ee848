"""Broken models against the product: every one is refused in one line, or built to what an independent reader computes.

A failure prints the case's number; `python -m tests.fuzz --seed SEED --only NUMBER` runs it again.
"""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
from fuzz.mutations import KINDS
from fuzz.runner import BUILT, DIFFERENT, TRACEBACK, Report, case_of, judge, run_command

SEED = 20


def _assert_clean(report: Report, seed: int) -> None:
    assert not report.failures, f"seed {seed}\n{report.table()}\n" + "\n".join(map(str, report.failures[:10]))
    assert all(report.counts[kind, BUILT] for kind in KINDS), report.table()  # the oracle had something to compare


@pytest.mark.forks
def test_broken_models_are_refused_or_built_right() -> None:
    _assert_clean(run_command(SEED, range(160), jobs=2), SEED)


@pytest.mark.forks
@pytest.mark.long
@pytest.mark.timeout(3600)
def test_fifty_thousand_broken_models() -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    _assert_clean(run_command(seed, range(50_000), jobs=os.cpu_count() or 1), seed)


def test_the_oracle_sees_one_changed_weight(tmp_path, monkeypatch) -> None:
    """The judge itself: a product that changes one bit of one weight, or crashes, is found out."""
    import numpy as np

    from wicore_trt.checkpoint import convert

    case = replace(case_of(SEED, 0)[1], target="bfloat16")
    cast = convert._Conversion._cast_rows

    def wrong(self, name, rows, tag, **how):
        block = np.array(cast(self, name, rows, tag, **how))
        if name.endswith("1.mlp.up_proj.weight"):
            block.view(np.uint8).reshape(-1)[-1] ^= 0x40
        return block

    assert judge(case, tmp_path)[0] == BUILT
    monkeypatch.setattr(convert._Conversion, "_cast_rows", wrong)
    assert judge(case, tmp_path)[0] == DIFFERENT
    monkeypatch.setattr(convert._Conversion, "_cast_rows", lambda *_, **how: 1 / 0)
    assert judge(case, tmp_path)[0] == TRACEBACK


def test_cases_follow_from_seed_and_number() -> None:
    for number in (1, 2, 4, 5, 61):
        assert case_of(7, number) == case_of(7, number) != case_of(8, number)
