"""Windows of local pages against the definition, page by page."""

from __future__ import annotations

import random

from fakes import make_core

from wicore_trt.arithmetic import div_ceil, first_visible_page
from wicore_trt.kv.sequence_pages import Windows
from wicore_trt.model.spec import GLOBAL, LOCAL
from wicore_trt.types import GenerateRequest, SamplingParams


def test_windows_are_those_of_the_definition() -> None:
    for _ in range(500):
        size, window, checkpoint = random.randint(1, 8), random.randint(1, 60), random.randint(1, 12)
        points = {random.randint(0, 50) for _ in range(random.randint(0, 3))}

        def first(n: int, size: int = size, window: int = window) -> int:
            return first_visible_page(n * size, window, size)

        def near(n: int, page: int, first=first) -> bool:
            return first(n) <= page < n

        windows = Windows(first, checkpoint)
        durable = {page for page in range(60) if any(near(n, page) for n in points)}
        at_checkpoints = {page for page in range(60) if near(div_ceil(page + 1, checkpoint) * checkpoint, page)}
        start = random.randint(0, 40)
        stop = random.randint(start, 50)
        assert windows.pages_before(points) == durable
        assert windows.pages_before(points, start, stop) == durable & {*range(start, stop)}
        assert windows.checkpoint_pages(start, stop) == at_checkpoints & {*range(start, stop)}
        gone = {page for page in range(start, first(stop)) if page not in durable | at_checkpoints}
        assert windows.unwanted_pages(start, stop, points) == gone


def test_pages_that_slide_out_in_the_step_that_wrote_them_are_not_told_of() -> None:
    """Nobody could find them: neither events nor books hear of them."""
    sizes = {"page_tokens": 4, "window": 8, "max_batch_tokens": 200, "max_context": 512, "checkpoint_tokens": 64}
    core = make_core(pages={GLOBAL: 100, LOCAL: 100}, **sizes)
    published, publish = [], core.scheduler.manager.pools[LOCAL].publish_slots
    core.scheduler.manager.pools[LOCAL].publish_slots = lambda slots, pages: (
        published.extend(page.index for page in pages) or publish(slots, pages)
    )
    prompt = tuple(random.randrange(2, 97) for _ in range(160))
    core.add(GenerateRequest("a", prompt, SamplingParams(max_tokens=1, ignore_eos=True)))
    while core.has_work:
        core.step()
        core.scheduler.check_integrity()
    windows = {*range(14, 16), *range(30, 32), *range(37, 40)}
    assert windows <= set(published) <= windows | {13, 29, 36} and len(published) == len(set(published))


def test_a_page_that_slides_out_unwritten_is_noticed() -> None:
    sizes = {"page_tokens": 4, "window": 8, "max_batch_tokens": 200, "max_context": 512, "checkpoint_tokens": 64}
    core = make_core(pages={GLOBAL: 100, LOCAL: 100}, **sizes)
    pool, slots = core.scheduler.manager.pools[LOCAL], []
    write = pool.write_tokens

    def forgetful(slot, begin, end) -> None:
        write(slot, begin, end)
        slots.append(slot)
        if len(slots) == 4:
            pool.written[slot] = 1

    pool.write_tokens = forgetful
    core.add(GenerateRequest("a", tuple(range(5, 85)), SamplingParams(max_tokens=1, ignore_eos=True)))
    (output,) = core.step()
    assert output.error == "Page 3 was to be published with 1 tokens written."
