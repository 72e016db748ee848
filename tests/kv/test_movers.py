"""Rates of overlapping copies."""

from __future__ import annotations

import pytest

from wicore_trt.kv.tiers.movers import Traffic


def test_seconds_of_copies_that_overlap_count_once():
    traffic = Traffic()
    for begun, ended in ((1.0, 2.0), (1.0, 3.0), (1.5, 3.5), (10.0, 11.0)):
        traffic.read(100, begun, ended)
        traffic.wrote(50, begun, ended)
    assert traffic.read_seconds == traffic.write_seconds == pytest.approx(3.5)
    assert (traffic.read_bytes, traffic.write_bytes) == (400, 200)
