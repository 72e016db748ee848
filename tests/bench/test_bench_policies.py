"""Synthetic traffic is repeatable and has the shape that its name says; the tolerance is what the document says."""

from __future__ import annotations

import pytest

from benchmarks.kv.policies import WORKLOADS, main, shortfall, trace


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.long] if i % 3 else []) for i, name in enumerate(sorted(WORKLOADS))]
)
def test_workloads_are_functions_of_the_seed_and_have_chains(name: str) -> None:
    requests = trace(name, 50, 0)
    assert requests == trace(name, 50, 0)
    parents: dict[int, int | None] = {}
    for r in requests:
        assert len(set(r.blocks)) == len(r.blocks) > 0
        for parent, block in zip((None, *r.blocks[:-1]), r.blocks, strict=True):
            assert parents.setdefault(block, parent) == parent, "a block has one parent"
    if name != "scan" and not name.startswith("loop"):
        assert requests != trace(name, 50, 1)


def test_the_tolerance() -> None:
    assert shortfall(0.5, 0.495) == pytest.approx(1)
    assert shortfall(0.01, 0.009) == pytest.approx(1)
    assert shortfall(0.3, 0.4) < 0


@pytest.mark.long
def test_a_policy_out_of_tolerance_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """LFU is far below LRU on an LRU stack, the default is not."""
    arguments = ["--seeds", "1", "--capacities", "20", "--workload", "LRU stack"]
    assert main([*arguments, "--policy", "lfu"]) == 1
    assert "tolerances below LRU" in capsys.readouterr().out
    assert main(arguments) == 0
