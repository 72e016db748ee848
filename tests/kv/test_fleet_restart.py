"""The benchmark of a fleet's disk tier: a small one is filled through the store, killed and started anew."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.kv.fleet import fill_records, geometry_of, measure, start


@pytest.mark.parametrize("records", [pytest.param(False, marks=pytest.mark.long), True])
def test_pages_of_a_killed_process_are_found(tmp_path: Path, records: bool) -> None:
    found = measure(tmp_path, "gemma3-27b", 2, 2048, 1 << 33, records=records)
    local = 32 if records else 33  # serving keeps the window of the same prompt, too
    assert found["written"] == 2 * (64 + local)
    assert found["pages"] == {"global": 128, "local": 2 * local}
    assert found["not_found"] == 0


def test_a_record_that_is_damaged_is_missed(tmp_path: Path) -> None:
    geometry, limit = geometry_of("gemma3-27b", 1 << 33, whole=True)
    sizes = (2, 2048, limit)
    fill_records(tmp_path, geometry, *sizes)
    (index,) = tmp_path.glob("*/index")
    data = bytearray(index.read_bytes())
    data[40] ^= 1  # in the key of the first conversation's first page
    index.write_bytes(data)
    found = start(tmp_path, geometry, *sizes)
    assert found["pages"] == {"global": 127, "local": 64}
    assert found["not_found"] > 0
