"""Who is refused under overload, by whom and how: a campaign in virtual time over everything between client and queue.

The promise: nothing is lost or stuck however it ends, and when the overload is over everybody is served.
"""

from __future__ import annotations

import asyncio
import json
import random
from collections import Counter

import pytest
from overload.virtual_front import KEYS, End, Site, VirtualLoop
from web import expected

from wicore_trt.core.limits import Limits

WISHED = (
    "end 429",
    "left",
    "engine ended",
    "drained",
    "served",
    "clock jumped",
    "wrong",
)
SEEDS, LONG = 12, 200


async def ask(site: Site, rng: random.Random) -> None:
    """One request of a random kind, which ends as it may."""
    tenant, how = rng.choice(list(KEYS)), rng.choice(("http", "http", "chat", "websocket", "grpc", "grpc"))
    size = rng.choice((1, 5, 40, 300, 1500, 2500, 3500))
    prompt = "".join(rng.choice("abcdef") for _ in range(size))
    n = rng.choice((1, 1, 1, 1, 2, 4))
    count = rng.randint(1, 6)
    priority = rng.choice((0, 0, 0, 0, -2, -1, 1, 2))
    timeout = rng.choice((None, None, None, 0.5, 5.0))
    wrong = rng.random() < 0.05
    if wrong:
        priority = rng.choice((3, -3, 99, 2**31 - 1, -(2**31)))
    leave_s = rng.choice((None, None, None, 0.0, 0.001, 0.02, 0.2, 1.0))
    fields = {"max_tokens": count, "temperature": 0.0, "ignore_eos": True}
    many = how == "http" and rng.random() < 0.1
    if how == "grpc":
        if timeout is not None:
            from google.protobuf.duration_pb2 import Duration

            fields["timeout"] = Duration(nanos=int(timeout % 1 * 1e9), seconds=int(timeout))
        end = await site.grpc(tenant, {"prompt": prompt, "n": n, "priority": priority, **fields}, leave_s=leave_s)
    else:
        body = {"n": n, "priority": priority, **fields}
        if timeout is not None:
            body["timeout"] = timeout
        if how == "chat" or how == "websocket" and rng.random() < 0.3:
            body["messages"] = [{"role": "user", "content": prompt}]
        else:
            body["prompt"] = [prompt, prompt] if many else prompt
        if how == "websocket":
            end = await site.websocket(tenant, body, leave_s=leave_s, cancel=rng.random() < 0.5)
        else:
            body["stream"] = not many and rng.random() < 0.3
            path = "/v1/chat/completions" if how == "chat" else "/v1/completions"
            slow_s = rng.choice((0.0, 0.0, 0.01, 3.0))
            end = await site.http(tenant, path, body, leave_s=leave_s, slow_s=slow_s)
            if body["stream"] and end.status == 200:
                site.paths["streamed"] += 1
                return
    check_end(site, end, how, prompt, count, n, wrong=wrong, left=leave_s is not None, timed=timeout is not None)


def check_end(site: Site, end: End, how, prompt, count, n, *, wrong: bool, left: bool, timed: bool) -> None:
    allowed = {200, 429, 503} | ({499} if left else set()) | ({504} if timed else set())
    if wrong:
        site.paths["wrong"] += 1
        allowed = allowed - {200} | {400}
    if n > site._max_waiting:
        allowed |= {400}
    if site.paths["clock jumped"]:
        allowed |= {408}
    assert end.status in allowed, (how, end)
    if end.status == 200:
        site.paths["served"] += 1
        text = expected(prompt, count)
        if how in ("http", "chat"):
            found = [c.get("text", c.get("message", {}).get("content")) for c in json.loads(end.text)["choices"]]
            assert set(found) == {text}
        else:
            assert timed or sorted(end.text) == sorted(n * text)


async def scenario(seed: int, monkeypatch) -> Counter[str]:
    rng = random.Random(seed)
    slowest = rng.choice((0.0, 0.0, 0.01, 0.3))
    step_s = rng.choice((0.002, 0.02, 0.5, 3.0))
    limits = rng.choice(
        (
            Limits(),
            Limits(max_queue_s=rng.choice((0.0, 0.1, 1.0, 10.0))),
            Limits(target_ttft_s=rng.choice((0.1, 0.45, 2.0))),
            Limits(max_queue_s=2.0, target_ttft_s=0.45),
        )
    )
    site = Site(
        rng, monkeypatch, places=rng.randint(1, 6), max_waiting=rng.choice((1, 3, 8, 64)), limits=limits,
        step_s=lambda: rng.uniform(0.2, 1.8) * step_s,
        delay=(lambda: rng.uniform(0.0, slowest)) if slowest else (lambda: None), slowest=slowest,
    )  # fmt: skip
    await site.start()
    tasks: list[asyncio.Task] = []
    ending = rng.random() < 0.2
    for _ in range(rng.randint(1, 5)):  # bursts
        for _ in range(rng.choice((1, 10, 60))):
            tasks.append(asyncio.ensure_future(ask(site, rng)))
            if rng.random() < 0.2:
                await asyncio.sleep(rng.choice((0.0, 0.001, 0.05)))
        await asyncio.sleep(rng.choice((0.0, 0.01, 1.0, 3.0)))
        if rng.random() < 0.15:
            asyncio.get_running_loop().now += rng.choice((0.5, 5.0, 100.0))
            site.paths["clock jumped"] += 1
        if rng.random() < 0.1:
            await site.kill_engine()
            site.paths["engine ended"] += 1
            await asyncio.sleep(rng.choice((0.0, 0.5)))
            await site.start_engine()
    if ending:
        site.context.draining = True
        site.service.draining = True
        site.paths["drained"] += 1
    done = asyncio.gather(*tasks)
    await asyncio.wait_for(done, 2000.0)
    await asyncio.sleep(2 * slowest + 4 * step_s)  # aborts are on their way
    site.check_idle()
    counts = site.admission.counts
    told = Counter(status for (_, _, status), n in counts.http.items() for _ in range(n) if status != "101")
    assert told == Counter({str(k): v for k, v in site.by_way.get("http", {}).items()}), "metrics tell what clients saw"
    site.context.draining = site.service.draining = False
    await asyncio.sleep(4 * step_s + 2 * slowest)
    if limits.max_queue_s != 0.0:
        for tenant in KEYS:  # everybody is served again
            end = await site.http(tenant, "/v1/completions", {"prompt": "hello", "max_tokens": 2, "temperature": 0})
            assert end.status == 200, end
    site.check_idle()
    await site.stop()
    site.paths |= Counter({f"end {status}": n for status, n in site.ends.items()})
    return site.paths


def run(seed: int) -> Counter[str]:
    with pytest.MonkeyPatch.context() as monkeypatch, asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(scenario(seed, monkeypatch))


def play(seeds: range) -> None:
    found: Counter[str] = Counter()
    for seed in seeds:
        try:
            found += run(seed)
        except BaseException as error:
            error.add_note(f"seed {seed}")
            raise
    assert not [path for path in WISHED if not found[path]], found


def test_overload_loses_nothing_and_ends():
    play(range(SEEDS))


@pytest.mark.long
def test_overload_loses_nothing_in_many_scenarios():
    play(range(SEEDS, LONG))
