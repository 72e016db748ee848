"""A queue whose head does not fit: it is not looked up again at every step, and it runs as soon as it can."""

from __future__ import annotations

from fakes import make_core

from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import GenerateRequest, SamplingParams


def request(name: str, prompt: list[int], max_tokens: int, priority: int = 0) -> GenerateRequest:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return GenerateRequest(name, tuple(prompt), params, priority=priority)


def test_a_head_that_does_not_fit_costs_nothing_until_pages_are_freed():
    core = make_core(pages={GLOBAL: 20, LOCAL: 40}, page_tokens=4, max_batch_tokens=64)
    core.add(request("runs", [2, 3, 4], 20))
    core.step()
    manager, asked = core.scheduler.manager, []
    lookup = manager.find_prefix

    def counted(pages, tokens):
        asked.append(len(tokens))
        return lookup(pages, tokens)

    manager.find_prefix = counted
    core.add(request("waits", list(range(76)), 2))
    for _ in range(12):
        core.step()
    assert asked == [76] and len(core.scheduler.waiting) == 1
    core.add(request("urgent", [5, 6, 7], 2, priority=-2))
    core.step()
    assert asked == [76, 3, 76], "a newcomer that goes first is admitted, and the head is asked again"
    for _ in range(7):
        core.step()
    assert [s.request.request_key for s in core.scheduler.running] == ["waits"]
