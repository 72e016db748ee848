"""A line for a few places: who comes while all are taken waits in order.

Who waits may be a coroutine or a plain function, which costs nothing while it waits and may find that it does not want
its place any more. On one event loop. It must not know what the places are for. Invariant: a place that is free is
given to who waits longest, BATCH at a time, so that the loop's other work goes on between.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial

BATCH = 16
"""Who does not want its place any more takes part of a millisecond to say so."""


class Line:
    """So many `places`."""

    def __init__(self, places: int) -> None:
        self.free = places
        self._waiting: deque[Callable[[], bool]] = deque()
        self._goes_on = False

    def __len__(self) -> int:
        """How many wait."""
        return len(self._waiting)

    def locked(self) -> bool:
        """Whether who comes now waits."""
        return not self.free or bool(self._waiting)

    def ask(self, come: Callable[[], bool]) -> None:
        """Call `come` when there is a place for it, perhaps at once; it is false where it does not take the place, and
        must not raise."""
        self._waiting.append(come)
        if not self._goes_on:
            self._go_on()

    def forget(self, come: Callable[[], bool]) -> None:
        """It waits no more, where it still did."""
        with suppress(ValueError):
            self._waiting.remove(come)

    async def acquire(self) -> None:
        """Wait for a place."""
        if not self.locked():
            self.free -= 1
            return
        turn = asyncio.get_running_loop().create_future()
        come = partial(_come, turn)
        self.ask(come)
        try:
            await turn
        except asyncio.CancelledError:
            self.forget(come)
            if turn.done() and not turn.cancelled():  # it was given the place in this moment
                self.release()
            raise

    def release(self) -> None:
        """Give a place back."""
        self.free += 1
        if self._waiting and not self._goes_on:
            self._go_on()

    def _go_on(self) -> None:
        self._goes_on = True  # while it does: who comes may come to release its place
        for _ in range(BATCH):
            if not self.free or not self._waiting:
                break
            come = self._waiting.popleft()
            self.free -= 1
            if not come():
                self.free += 1
        self._goes_on = bool(self.free and self._waiting)
        if self._goes_on:
            asyncio.get_running_loop().call_soon(self._go_on)


def _come(turn: asyncio.Future[None]) -> bool:
    if turn.done():  # nobody waits any more
        return False
    turn.set_result(None)
    return True
