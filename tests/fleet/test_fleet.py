"""Two real workers behind SMG and behind Dynamo: hits, streams, aborts, drain, overload, kills."""

from __future__ import annotations

import asyncio
import random
import signal
from collections.abc import Iterator

import httpx
import pytest
from fleet import DYNAMO, LIMIT_S, SMG, Fleet, Worker, converse, stream, wait_until

pytestmark = [pytest.mark.model, pytest.mark.long, pytest.mark.timeout(3600)]
KILLS = 20
STORIES = [f"Story number {i * 37} begins in a town of {i + 3} houses:" for i in range(6)]


@pytest.fixture(scope="module", params=["smg", "dynamo"])
def fleet(request, engine_270m, tmp_path_factory) -> Iterator[Fleet]:
    if not (SMG if request.param == "smg" else DYNAMO).exists():
        pytest.skip(f"no environment with {request.param}: make test-fleet makes it")
    fleet = Fleet(request.param, engine_270m, tmp_path_factory.mktemp(request.param))
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.end()


def counts(workers: list[Worker]) -> tuple[int, int]:
    found = [worker.stats() for worker in workers]
    return sum(s["prompt_tokens"] for s in found), sum(s["cached_prompt_tokens"] for s in found)


def hit_rate(workers: list[Worker], url: str, seed: int) -> float:
    before = counts(workers)
    asyncio.run(converse(url, seed))
    prompts, cached = (after - was for after, was in zip(counts(workers), before, strict=True))
    return cached / prompts


def test_prefixes_are_found_as_by_one_worker(fleet):
    one = hit_rate(fleet.workers[:1], fleet.workers[0].url, seed=1)
    both = hit_rate(fleet.workers, fleet.url, seed=2)
    print(f"{fleet.kind}: {both:.3f} of the prompts found, by one worker {one:.3f}")
    assert both >= 0.9 * one


def test_streams_are_the_same_as_a_workers_own(fleet):
    answers = asyncio.run(fleet.ask(STORIES, 24))
    alone = asyncio.run(_ask_worker(fleet.workers[0], STORIES, 24))
    assert [a.text for a in answers] == [a.text for a in alone] and not any(a.lost for a in answers)


async def _ask_worker(worker: Worker, prompts: list[str], max_tokens: int) -> list:
    async with httpx.AsyncClient(base_url=worker.url, timeout=LIMIT_S) as client:
        return [await stream(client, prompt, max_tokens) for prompt in prompts]


def idle(fleet: Fleet) -> bool:
    return not any(w.stats()["requests_running"] + w.stats()["requests_waiting"] for w in fleet.workers)


def test_a_client_that_leaves_ends_its_request(fleet):
    async def leave() -> None:
        began = asyncio.Event()
        task = asyncio.ensure_future(fleet.ask(STORIES[:1], 4000, first=began.set))
        await asyncio.wait_for(began.wait(), LIMIT_S)
        task.cancel()

    asyncio.run(leave())
    wait_until(lambda: idle(fleet), "the request has ended", 30)


def test_overload_is_told(fleet):
    """Nothing is lost and nothing hangs: who is not served is refused, by a status or, where the router has begun to
    stream, by an error that says so."""
    answers = asyncio.run(fleet.ask([f"{story} {i}" for i in range(10) for story in STORIES], 48))
    refused = [a for a in answers if a.status in (429, 503) or "rate_limit_error" in (a.lost or "")]
    served = [a for a in answers if a.lost is None]
    print(f"{fleet.kind}: {len(served)} served, {len(refused)} refused with {sorted({a.status for a in refused})}")
    assert refused and len(refused) + len(served) == len(answers), [a.lost for a in answers if a.lost][:2]
    wait_until(lambda: idle(fleet), "all have ended", 30)


def test_a_worker_that_drains_loses_nothing(fleet):
    leaving, staying = fleet.workers

    async def drain() -> list:
        began = asyncio.Semaphore(0)
        task = asyncio.ensure_future(fleet.ask(STORIES, 60, first=began.release))
        for _ in STORIES:
            await asyncio.wait_for(began.acquire(), LIMIT_S)
        assert leaving.server.process is not None
        leaving.server.process.send_signal(signal.SIGTERM)
        return await task

    answers = asyncio.run(drain())
    assert not [answer.lost for answer in answers if answer.lost]
    assert leaving.server.process.wait(LIMIT_S) == 0, "all requests could finish"
    assert not any(answer.lost for answer in asyncio.run(fleet.ask(STORIES, 4)))
    leaving.start()
    leaving.wait()
    fleet.until_used(leaving)


def test_workers_that_are_killed(fleet):
    """With SMG a killed worker's streams end with an error event, and no other; Dynamo goes on elsewhere, to the
    same text. Requests that follow are served at once, and a worker that comes back has its share again."""
    lost = held = kept = 0
    shares = []
    for kill in range(KILLS):
        prompts = [f"{random.random()} {story}" for story in STORIES]  # new ones, or all go where the first went
        answers, victim, running = asyncio.run(_kill_amid(fleet, prompts, both=kill % 2 == 0))
        [survivor] = [worker for worker in fleet.workers if worker is not victim]
        truth = [answer.text for answer in asyncio.run(_ask_worker(survivor, prompts, 60))]
        ended = [answer for answer in answers if answer.lost]
        lost, held, kept = lost + len(ended), held + running[0], kept + running[1]
        assert len(ended) <= (running[0] if fleet.kind == "smg" else 0), [answer.lost for answer in ended]
        assert all(answer.lost.startswith("{'error'") for answer in ended), [answer.lost for answer in ended]
        for answer, text in zip(answers, truth, strict=True):
            assert text.startswith(answer.text) if answer.lost else answer.text == text
        assert not any(answer.lost for answer in asyncio.run(fleet.ask(STORIES[:2], 4)))
        victim.end()
        victim.start()
        victim.wait()
        fleet.until_used(victim)
        shares.append(share_of(fleet, victim))
    share = sum(shares) / KILLS
    print(f"{fleet.kind}: {KILLS} kills, {held} streams on the killed workers, {lost} lost, {kept} on the others")
    print(f"{fleet.kind}: those that came back had {share:.2f} of new prompts")
    assert held and (fleet.kind == "dynamo" or lost) and share > 0


def share_of(fleet: Fleet, worker: Worker) -> float:
    """Of the tokens of new prompts, several at a time."""
    before, own = counts(fleet.workers)[0], counts([worker])[0]
    asyncio.run(fleet.ask([f"{random.random()} {story}" for story in STORIES], 8))
    return (counts([worker])[0] - own) / (counts(fleet.workers)[0] - before)


async def _kill_amid(fleet: Fleet, prompts: list[str], *, both: bool) -> tuple[list, Worker, tuple[int, int]]:
    """The answers, the busier worker, which was killed, and how many it and the other were at; with `both` what is
    beside it dies."""
    began = asyncio.Semaphore(0)
    task = asyncio.ensure_future(fleet.ask(prompts, 60, first=began.release))
    for _ in prompts:
        await asyncio.wait_for(began.acquire(), LIMIT_S)
    (others, _), (running, victim) = sorted(
        ((worker.stats()["requests_running"], worker) for worker in fleet.workers), key=lambda entry: entry[0]
    )
    if both and victim.side is not None:
        victim.side.end()
    victim.server.end()
    return await task, victim, (running, others)
