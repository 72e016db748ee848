"""Stages of pages in motion: each table is closed, each stage can be reached, and nothing happens twice (I6)."""

from __future__ import annotations

from collections import deque

import pytest

from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.moves import ChecksumJob, Fetch, Read, Save, Stage, Store, TierCopy, Upload

PAGE = Page(b"k" * 32, "global", 0, None, b"t")
COPY = TierCopy(PAGE, (0,))
MOVES = [
    lambda: Store(COPY),
    lambda: Save(COPY, COPY, 0),
    lambda: Read([COPY], [COPY], [], 0),
    lambda: Fetch(PAGE, deque()),
    lambda: ChecksumJob([COPY], lambda places, right: None),
    lambda: Upload([COPY], lambda places, right: None),
]
NAMES = ["store", "save", "read", "fetch", "check", "upload"]


@pytest.mark.parametrize("make", MOVES, ids=NAMES)
def test_all_stages_can_be_reached_and_lead_to_an_end(make):
    table, reached, todo = make().LEGAL, set(), [make().stage]
    while todo:
        stage = todo.pop()
        if stage not in reached:
            reached.add(stage)
            todo += table[stage]
    assert reached == set(table)
    ends = {stage for stage in table if not table[stage]}
    while grown := {stage for stage in table if table[stage] & ends} - ends:
        ends |= grown
    assert ends == set(table), "a page in motion could stay so for ever"


@pytest.mark.parametrize("make", MOVES, ids=NAMES)
def test_what_is_not_legal_is_refused(make):
    for start, legal in make().LEGAL.items():
        for stage in Stage:
            move = make()
            move.stage = start
            if stage in legal:
                move.enter_stage(stage)
                assert move.stage is stage
            else:
                with pytest.raises(AssertionError, match=type(move).__name__):
                    move.enter_stage(stage)
                assert move.stage is start
