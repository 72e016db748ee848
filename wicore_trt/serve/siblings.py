"""The other fronts of this server, which are asked by way of the supervisor.

Must not know what is told. Invariants: who asks waits for ANSWER_S at most, whichever front or supervisor stands still
and however many ask; a front is asked so seldom that one which stands still for a while is not taken for one that
hangs.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from wicore_trt.access.fronts import Fronts
from wicore_trt.core.cells import Cells

ANSWER_S = 1.0
AT_ONCE = 4
"""Questions under way."""


class Siblings(Fronts):
    """Construct it on the event loop. `offer` says something to the supervisor, kind and facts, if it takes it."""

    def __init__(
        self, number: int, count: int, cells: Cells, offer: Callable[..., bool], *, listening: bool = False
    ) -> None:
        super().__init__(cells)
        self.number, self.count, self.listening = number, count, listening
        self._offer = offer
        self._calls = itertools.count(random.getrandbits(48))  # the next front of this number draws others
        self._asked: dict[int, _Answers] = {}
        self._under_way: dict[str | None, asyncio.Task[list[dict[str, Any]]]] = {}
        self._places = asyncio.Semaphore(AT_ONCE)

    async def ask(self, tenant: str | None) -> list[dict[str, Any]]:
        if self.count == 1:
            return []
        task = self._under_way.get(tenant)
        if task is None:
            task = self._under_way[tenant] = asyncio.ensure_future(self._ask(tenant))
            task.add_done_callback(lambda _: self._under_way.pop(tenant))
        return await asyncio.shield(task)

    async def _ask(self, tenant: str | None) -> list[dict[str, Any]]:
        call, answers = next(self._calls), _Answers()
        with suppress(TimeoutError):
            async with asyncio.timeout(ANSWER_S), self._places:
                self._asked[call] = answers
                try:
                    if self._offer("ask", call=call, tenant=tenant):
                        await answers.whole.wait()
                finally:
                    del self._asked[call]
        return answers.found

    def heard(self, message: dict[str, Any]) -> None:
        """What the supervisor says of a question: how many were asked, or what one of them told."""
        answers = self._asked.get(message["call"])
        if answers is None:
            return
        if message["kind"] == "expect":
            answers.expected = message["count"]
        else:
            answers.count += 1
            if message["told"] is not None:  # else it is about to begin
                answers.found.append(message["told"])
        if answers.expected == answers.count:
            answers.whole.set()


class _Answers:
    def __init__(self) -> None:
        self.expected: int | None = None
        self.count = 0
        self.found: list[dict[str, Any]] = []
        self.whole = asyncio.Event()
