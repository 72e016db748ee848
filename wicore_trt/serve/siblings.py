"""The other fronts of this server, which are asked by way of the supervisor.

Must not know what is told. Invariants: a front that does not answer is waited for ANSWER_S; however many ask, a front
is asked so seldom that one which stands still for a while is not taken for one that hangs.
"""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import Callable
from typing import Any

from wicore_trt.access.fronts import Fronts
from wicore_trt.core.cells import Cells

ANSWER_S = 1.0
AT_ONCE = 4
"""Questions under way."""


class Siblings(Fronts):
    """Construct it on the event loop. `send` says something to the supervisor: kind and facts."""

    def __init__(
        self, number: int, count: int, cells: Cells, send: Callable[..., None], *, listening: bool = False
    ) -> None:
        super().__init__(cells)
        self.number, self.count, self.listening = number, count, listening
        self._send = send
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
        async with self._places:
            call, answers = next(self._calls), _Answers()
            self._asked[call] = answers
            self._send("ask", call=call, tenant=tenant)
            try:
                await asyncio.wait_for(answers.whole.wait(), ANSWER_S)
            except TimeoutError:
                pass
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
