"""Rates of overlapping copies, and ends of copies that other threads report."""

from __future__ import annotations

import threading

import pytest

from wicore_trt.kv.tiers.traffic import Traffic, at_home


def test_seconds_of_copies_that_overlap_count_once():
    traffic = Traffic()
    for begun, ended in ((1.0, 2.0), (1.0, 3.0), (1.5, 3.5), (10.0, 11.0)):
        traffic.read(100, begun, ended)
        traffic.wrote(50, begun, ended)
    assert traffic.read_seconds == traffic.write_seconds == pytest.approx(3.5)
    assert (traffic.read_bytes, traffic.write_bytes) == (400, 200)


def test_ends_reach_the_thread_that_asked():
    posted, happened = [], []
    done = at_home(happened.append, posted.append)
    done()
    assert len(happened) == 1 and not posted
    thread = threading.Thread(target=done)
    thread.start()
    thread.join()
    assert len(happened) == 1 and len(posted) == 1
    posted[0]()
    assert len(happened) == 2 and happened[0] <= happened[1]
