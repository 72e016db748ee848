"""The learnt policy: better than LRU where there is something to learn, never much worse where there is not."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import pytest

from wicore_trt.kv.policy.cost import CostPolicy, LRUGuard
from wicore_trt.kv.policy.policy import Key, Node
from wicore_trt.kv.policy.reuse import PageClass, ReuseModel, TouchGroup
from wicore_trt.kv.study.simulate import simulate
from wicore_trt.kv.study.trace import BLOCK_TOKENS, TraceRequest, count_unique_blocks


class Ids:
    def __init__(self) -> None:
        self.next = 0

    def new(self, count: int) -> list[int]:
        self.next += count
        return list(range(self.next - count, self.next))


def chat(rng: random.Random, think: float, more: float, sessions: int = 1500) -> list[list[int]]:
    """Sessions of several turns under five system prompts; `more` is the chance of another turn."""
    ids, out = Ids(), []
    system = [ids.new(4) for _ in range(5)]
    for i in range(sessions):
        chain = system[min(4, int(rng.paretovariate(1)) - 1)] + ids.new(rng.randint(2, 20))
        at = float(i)
        while True:
            out.append((at, chain + ids.new(1)))
            if rng.random() > more:
                break
            chain = chain + ids.new(rng.randint(1, 4))
            at += rng.lognormvariate(math.log(think), 1)
    return [chain for _, chain in sorted(out, key=lambda request: request[0])]


def documents(rng: random.Random, skew: float, moves: int = 0) -> list[list[int]]:
    """One document of eight blocks a request, Zipf popularity, shuffled anew `moves` times."""
    ids, order = Ids(), list(range(400))
    docs = [ids.new(8) for _ in order]
    weights = [1 / (i + 1) ** skew for i in order]
    out = []
    for i in range(4000):
        if moves and i % (4000 // moves) == 0:
            rng.shuffle(order)
        out.append(docs[order[rng.choices(range(400), weights)[0]]] + ids.new(1))
    return out


def loop(rng: random.Random) -> list[list[int]]:
    ids = Ids()
    docs = [ids.new(8) for _ in range(200)]
    return [docs[i % 200] for i in range(3000)]


def recency(rng: random.Random) -> list[list[int]]:
    """LRU stack model: the best policy is LRU."""
    ids, stack, out = Ids(), [], []
    for _ in range(6000):
        depth = int(rng.expovariate(1 / 60))
        chain = ids.new(6) if rng.random() < 0.35 or depth >= len(stack) else stack.pop(depth)
        stack.insert(0, chain)
        out.append(chain)
    return out


def scan(rng: random.Random) -> list[list[int]]:
    ids = Ids()
    return [ids.new(10) for _ in range(1000)]


WORKLOADS: dict[str, Callable[[random.Random], list[list[int]]]] = {
    "chat, short think": lambda rng: chat(rng, 30, 0.6),
    "chat, long think": lambda rng: chat(rng, 200, 0.6),
    "agent": lambda rng: chat(rng, 3, 0.9, 400),
    "documents": lambda rng: documents(rng, 0.8),
    "moving documents": lambda rng: documents(rng, 1.0, moves=5),
    "loop": loop,
    "recency": recency,
    "scan": scan,
}
GAINS = {"chat, long think": 1.03, "documents": 1.05, "moving documents": 1.02, "loop": 20.0}


def hit_rate(policy: str, requests: list[TraceRequest], pages: int) -> float:
    return simulate(requests, policy, {"device": pages}).hit_rate


@pytest.mark.parametrize("share", [0.05, pytest.param(0.2, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    "workload",
    [
        pytest.param(n, marks=pytest.mark.long) if n in ("agent", "chat, short think", "documents") else n
        for n in WORKLOADS
    ],
)
def test_never_one_percent_below_lru_and_better_where_it_can(workload: str, share: float) -> None:
    chains = WORKLOADS[workload](random.Random(11))
    requests = [TraceRequest(tuple(chain), len(chain) * BLOCK_TOKENS) for chain in chains]
    pages = int(count_unique_blocks(requests) * share)
    lru, learnt = hit_rate("lru", requests, pages), hit_rate("cost", requests, pages)
    assert learnt >= 0.99 * lru - 1e-3, (lru, learnt)
    if share == 0.05 and workload in GAINS:
        assert learnt > GAINS[workload] * lru, (lru, learnt)


def test_page_cost_decides_between_equally_likely_pages() -> None:
    def survivors(page_cost: Callable[[int], float] | None) -> int:
        policy = CostPolicy(300, page_cost=page_cost, victim_cache=True)  # no guard
        rng = random.Random(5)
        for i in range(3000):
            chain = [(i, j) for j in range(rng.choice((2, 12)))]
            for _ in range(2 if i % 3 else 1):
                policy.touch_chain(chain)
                policy.add_pages([key for key in chain if key not in policy])
            for key in policy.choose_victims(max(0, len(policy) - 300)) or []:
                policy.remove_page(key)
        return sum(node.depth >= 6 for node in policy._nodes.values() if node.resident)

    assert survivors(lambda depth: 1.0 + 10.0 * depth) > survivors(lambda depth: 1.0 / (1.0 + depth))


def test_the_model_ranks_known_hazards() -> None:
    """Classes with geometric reuse at known rates: their indices are as their rates, and flat over age."""
    rng, model = random.Random(2), ReuseModel(unit=1.0, memory=1e9)
    kinds = {PageClass(0, 0): 0.02, PageClass(1, 0): 0.002}
    for kind, rate in kinds.items():
        for _ in range(20_000):
            age = rng.expovariate(rate)
            model.end_wait(TouchGroup(kind, 0), 1, min(age, 2000.0), reused=age < 2000.0)
    model.refresh_estimates([], 0)
    fast, slow = kinds
    for age in (10, 25, 60):
        assert model.rank_index(fast, age) / model.rank_index(slow, age) == pytest.approx(10, rel=0.3)
    assert model.rank_index(slow, 100) == pytest.approx(model.rank_index(slow, 10), rel=0.3)


def test_pages_that_return_after_a_fixed_time_are_worth_more_shortly_before() -> None:
    model, kind = ReuseModel(unit=1.0, memory=1e9), PageClass(0, 0)
    for _ in range(1000):
        model.end_wait(TouchGroup(kind, 0), 1, 100.0, reused=True)
    for _ in range(1000):
        model.end_wait(TouchGroup(kind, 0), 1, 1000.0, reused=False)
    model.refresh_estimates([], 0)
    early, before, after = (model.rank_index(kind, age) for age in (5, 80, 300))
    assert before > 2 * early
    assert before > 5 * after


def test_open_pages_count_as_survival() -> None:
    """The same reuses look worse when many pages of the class still wait."""

    def index(waiting: int) -> float:
        model = ReuseModel(unit=1.0, memory=1e9)
        kind = PageClass(0, 0)
        for _ in range(200):
            model.end_wait(TouchGroup(kind, 0), 1, 5.0, reused=True)
        group = TouchGroup(kind, 0)
        group.open = waiting
        model.refresh_estimates([group], 100)
        return model.rank_index(kind, 2.0)

    assert index(2000) < 0.3 * index(0)


def path_of(*keys: Key) -> list[Node]:
    path: list[Node] = []
    for key in keys:
        path.append(Node(key, path[-1] if path else None))
    return path


def always_good(i: int) -> tuple[list[Node], int]:
    """Sixteen pages that LRU holds for ever."""
    return path_of(*(i % 4 * 4 + j for j in range(4))), 4


def trial_wins(guard: LRUGuard, first: int = 0, limit: int = 3000) -> int:
    """Traffic on which LRU never hits and the trial does (one hot chain among scans), until the guard lets the learnt
    order decide; the number of requests."""
    for i in range(limit):
        for keys in (["hot", "warm"], [(first, i, j) for j in range(30)]):
            if guard.observe_request(path_of(*keys), 0):
                return i + 1
    raise AssertionError("a trial that wins was not believed")


def guard_that_likes_hot_pages() -> LRUGuard:
    guard = LRUGuard(20, lambda node: 1.0 if node.key in ("hot", "warm") else 0.0)
    guard.begin_trial([])
    return guard


def test_lru_decides_until_a_trial_wins() -> None:
    guard = guard_that_likes_hot_pages()
    for i in range(500):
        assert not guard.observe_request(*always_good(i)), "on this traffic both orders are alike"
    assert guard.use_lru and guard.trial is not None
    assert 2 < trial_wins(guard) < 50
    assert not guard.use_lru


def test_losses_to_lru_are_bounded_and_stakes_grow() -> None:
    """The trial always promises what the tier then does not deliver."""
    guard, lost, waits = guard_that_likes_hot_pages(), 0, []
    for attempt in range(6):
        waits.append(trial_wins(guard, attempt))
        for i in range(1000):
            keys, hits = always_good(i)
            if guard.observe_request(keys, 0):
                break
            lost += hits if i >= 4 else 0
        assert guard.use_lru, "it did not give up"
        guard.begin_trial([])
    assert lost <= 6 * 5 * 4
    assert waits[-1] > 4 * waits[1]


def test_gains_are_credit_for_bad_luck() -> None:
    guard = guard_that_likes_hot_pages()
    for i in range(100):
        guard.observe_request(*always_good(i))
    trial_wins(guard)
    for i in range(2000):
        assert not guard.observe_request(path_of(("new", i)), 1), "the tier hits what LRU cannot"
    misses = next(i for i in range(1000) if guard.observe_request(always_good(i)[0], 0))
    assert 64 <= misses <= 80, "64 requests of credit, 4 of loss, 4 that LRU misses too"


def test_generated_pages_count_for_lru_too() -> None:
    """Pages that came in without a look-up are hits of the shadow when the next request asks for them."""
    guard = guard_that_likes_hot_pages()
    trial_wins(guard)
    answer = path_of(*(("answer", i) for i in range(8)))
    for node in answer:
        guard.hold_pages([node])
    assert any(guard.observe_request(answer[: i + 1], 0) for i in range(7)), "LRU would have hit them"


def answers_tell(swapped: bool = False) -> list[TraceRequest]:
    """Alike prompts of ten blocks; those with short answers (`swapped`: long ones) come back once, after 400 others."""
    rng, ids, due, out = random.Random(3), Ids(), dict[int, tuple[int, ...]](), []
    for i in range(6000):
        chain = due.pop(i, None)
        returns = chain is None and rng.random() < 0.3
        if chain is None:
            chain = tuple(ids.new(10))
        if returns:
            due[i + 400] = chain
        out.append(TraceRequest(chain, 10 * BLOCK_TOKENS, 20 if returns != swapped else 300))
    return out


@pytest.mark.long
@pytest.mark.parametrize("swapped", [False, True])
def test_the_length_of_answers_tells_which_prompts_come_back(swapped: bool) -> None:
    """Which of the two it is is learnt. LRU would need 4,000 pages for one hit."""
    requests = answers_tell(swapped)
    unknown = [TraceRequest(request.blocks, request.tokens) for request in requests]
    told, lru = (hit_rate(policy, requests, 1800) for policy in ("cost", "lru"))
    assert lru == 0.0
    assert told > 1.3 * hit_rate("cost", unknown, 1800) > 0.0


def test_an_answer_changes_the_class_of_all_pages_of_its_request() -> None:
    """Generated pages too; a later request's answer replaces it, and a policy that never hears of one works."""
    policy = CostPolicy(100)
    policy.touch_chain(["a", "b"])
    policy.add_pages(["a", "b"])
    policy.add_pages(["c"], "b")

    def coarse() -> set[int]:
        groups = [policy._nodes[key].learnt for key in "abc"]
        assert all(isinstance(group, TouchGroup) for group in groups)
        return {group.page_class.coarse >> 8 for group in groups if isinstance(group, TouchGroup)}

    assert coarse() == {0}
    policy.note_answer(["a", "b", "c", "never seen"], 500)
    assert coarse() == {2}
    policy.note_answer(["a", "b", "c"], 3)
    assert coarse() == {1}
    policy.check_integrity()
