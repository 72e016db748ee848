"""Any order of requests, aborts, lost pages, flipped bits and restarts: right tokens, nothing stuck, nothing leaked.

Invariants: I6, I12.
"""

from __future__ import annotations

import dataclasses
import shutil
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from campaign import Shape, Stack
from fakes import clear_cache
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import CacheHints, CachePriority, CacheStore

OPERATIONS: Counter[str] = Counter()
"""Rules that ran, by name, over all examples of this process."""
HINTS = st.builds(
    CacheHints,
    session=st.sampled_from(["", "", "s", "t"]),
    priority=st.sampled_from(list(CachePriority)),
    ttl_s=st.sampled_from([None, None, 0.5, 20.0]),
) | st.builds(CacheHints, store=st.sampled_from([CacheStore.DEVICE, CacheStore.NEVER]))


class TierMachine(RuleBasedStateMachine):
    coded = False

    @initialize(
        seed=st.integers(0, 1 << 32),
        device=st.sampled_from([{GLOBAL: 42, LOCAL: 24}, {GLOBAL: 80, LOCAL: 60}, {GLOBAL: 44}, {LOCAL: 40}]),
        host_slots=st.sampled_from([8, 40, 120]),
        disk=st.booleans(),
        window=st.sampled_from([3, 8, 13]),
        policy=st.sampled_from(["lru", "cost", "a2cr"]),
        write_policy=st.sampled_from(["through", "selective", "back"]),
        quota=st.sampled_from([1.0, 0.6]),
        late=st.booleans(),
    )
    def begin(self, seed, device, host_slots, disk, window, policy, write_policy, quota, late) -> None:
        self.dir = Path(tempfile.mkdtemp()) if disk else None
        self.stack = Stack(
            self.dir, seed=seed, shape=Shape(pages=device, window=window), host_slots=host_slots, policy=policy,
            late=late and not self.coded, write_policy=write_policy, tenant_quota=quota,
            disk_bytes=(1 << 20) + seed % (2 << 20), **self.more(seed),
        )  # fmt: skip
        self.live: list[str] = []

    def more(self, seed: int) -> dict[str, Any]:
        return {}

    def did(self, what: str) -> None:
        OPERATIONS[what] += 1

    @rule(
        answer=st.sampled_from([1, 5, 25]),
        n=st.sampled_from([1, 1, 3]),
        priority=st.sampled_from([-1, 0, 0, 2]),
        salt=st.sampled_from(["", "", "a"]),
        hints=HINTS,
        within=st.sampled_from([None, None, 5.0]),
    )
    def request(self, answer, n, priority, salt, hints, within) -> None:
        deadline = None if within is None else self.stack.now + within
        self.live.append(
            self.stack.add(answer=answer, n=n, priority=priority, cache_salt=salt, cache=hints, deadline=deadline)
        )
        self.did("request")

    @rule(count=st.integers(1, 12))
    def steps(self, count) -> None:
        for _ in range(count):
            self.stack.step()
            self.did("step")

    @rule()
    def finish(self) -> None:
        self.stack.settle(60.0)
        self.stack.check_idle()
        self.did("finish")

    @rule(which=st.integers(0, 1 << 16))
    def abort(self, which) -> None:
        self.live = [name for name in self.live if name in self.stack.core.sequences]
        if self.live:
            self.stack.abort(self.live[which % len(self.live)])
            self.did("abort")

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0, 700.0]))
    def time_passes(self, seconds) -> None:
        self.stack.now += seconds
        self.did("time")

    @rule()
    def clear_everything(self) -> None:
        clear_cache(self.stack.manager)
        self.did("clear")

    @rule()
    def clear_device(self) -> None:
        self.stack.forget_device()
        self.did("clear device")

    @rule()
    def drop_host_pages(self) -> None:
        for copy in list(self.stack.tiers.host.iterate_copies()):
            if copy.ready and self.stack.rng.random() < 0.4:
                self.stack.tiers.host.drop_copy(copy, "test")
        self.did("drop host")

    @rule(share=st.sampled_from([0.1, 1.0]))
    def flip_host_bits(self, share) -> None:
        self.stack.flip_host(share)
        self.did("flip")

    @rule()
    def wait_for_transfers(self) -> None:
        self.stack.core.do_housekeeping()
        self.did("tidy")

    @rule(engine=st.sampled_from(["fake", "fake", "other"]), page_tokens=st.sampled_from([4, 4, 3]))
    def restart(self, engine, page_tokens) -> None:
        self.stack.restart(engine=engine, page_tokens=page_tokens)
        self.did("restart")

    @invariant()
    def whole(self) -> None:
        stack = getattr(self, "stack", None)
        if stack is not None:
            stack.core.scheduler.check_integrity()
            stack.manager.retention.check_integrity()
            assert stack.wrong == 0

    def teardown(self) -> None:
        stack = getattr(self, "stack", None)
        if stack is None:
            return
        try:
            stack.settle(60.0)
            stack.check_idle()
            assert stack.wrong == 0
        finally:
            stack.close()
            if self.dir is not None:
                shutil.rmtree(self.dir)


def profile(examples: int, steps: int) -> settings:
    """Without shrinking: what the threads do is not replayed."""
    return settings(
        max_examples=examples, stateful_step_count=steps, deadline=None, database=None,
        suppress_health_check=list(HealthCheck), phases=[Phase.generate],
    )  # fmt: skip


def test_any_order_of_events() -> None:
    run_state_machine_as_test(TierMachine, settings=profile(30, 50))


class CodedTierMachine(TierMachine):
    """Pages of 16 and 32 KiB, some of which have no code; restarts with and without it."""

    coded = True

    def more(self, seed: int) -> dict[str, Any]:
        return {"coded": True, "compression": "lossless", "host_bytes": 12288 * (10, 40, 120)[seed % 3]}

    @rule(code=st.sampled_from(["none", "lossless"]))
    def restart_with(self, code) -> None:
        self.stack.kv = dataclasses.replace(self.stack.kv, compression=code)
        self.stack.restart()
        self.did(f"restart with {code}")


def test_any_order_of_events_with_coded_pages() -> None:
    pytest.importorskip("torch")
    run_state_machine_as_test(CodedTierMachine, settings=profile(6, 30))


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_ten_thousand_events_with_coded_pages() -> None:
    OPERATIONS.clear()
    while OPERATIONS.total() < 10_000:
        run_state_machine_as_test(CodedTierMachine, settings=profile(10, 100))
    print(f"{OPERATIONS.total():,} operations: {dict(OPERATIONS)}")


@pytest.mark.long
@pytest.mark.timeout(7200)
def test_a_hundred_thousand_events() -> None:
    OPERATIONS.clear()
    while OPERATIONS.total() < 100_000:
        run_state_machine_as_test(TierMachine, settings=profile(25, 200))
    print(f"{OPERATIONS.total():,} operations: {dict(OPERATIONS)}")
