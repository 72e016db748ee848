"""Steps that run ahead on a device whose page copies end when they end: the same answers, and nothing is left over."""

from __future__ import annotations

import random
from functools import partial

import campaign
import pytest

pytest.importorskip("torch")

from campaign import Shape, Stack
from late_device import LateExecutor

from wicore_trt.model.spec import GLOBAL, LOCAL


@pytest.mark.parametrize(
    ("policy", "disk"),
    [
        *(("through", True), ("back", False)),
        *(pytest.param(*p, marks=pytest.mark.long) for p in (("through", False), ("back", True))),
        *(pytest.param("selective", disk, marks=pytest.mark.long) for disk in (False, True)),
    ],
)
def test_random_traffic(tmp_path, monkeypatch, policy, disk):
    """Arrivals, aborts, deadlines, preemption, parking, pages of host and disk; each step checks each position that its
    queries see, so a copy that is late or early is a failure of the step."""
    seed = random.randrange(1 << 30)
    rng = random.Random(seed)
    monkeypatch.setattr(campaign, "FakeExecutor", partial(LateExecutor, seed=seed))
    shape = Shape(
        pages={GLOBAL: rng.choice((32, 40, 64)), LOCAL: rng.choice((20, 32))},
        max_batch_tokens=rng.choice((8, 16, 64)),
        max_sequences=rng.choice((2, 4, 8)),
        window=rng.choice((3, 8, 9)),
    )
    path, slots = tmp_path if disk else None, rng.choice((24, 60, 120))
    stack = Stack(path, seed=seed, shape=shape, host_slots=slots, write_policy=policy)
    for _ in range(250):
        if len(stack.expected) < 12 and rng.random() < 0.4:
            deadline = stack.now + rng.randint(1, 60) if rng.random() < 0.1 else None
            stack.add(answer=rng.randint(1, 40), n=rng.choice((1, 1, 1, 2, 3)), deadline=deadline)
        if stack.expected and rng.random() < 0.06:
            stack.abort(rng.choice(sorted(stack.expected))[0])
        if rng.random() < 0.02:
            stack.forget_device()
        stack.now += rng.random()
        stack.step()
        stack.core.scheduler.check_integrity()
    stack.settle(60.0, check=True)
    assert stack.wrong == 0 and stack.finished and stack.executor.led > 5, (seed, shape)
    stack.check_idle()
    stack.close()
