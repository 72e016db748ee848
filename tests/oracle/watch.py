"""Nobody is stuck, and nobody waits longer than the planner promises.

Reads scheduler and device between steps. Invariant: some sequence gets further within a bounded number of steps and a
bounded time; a request that is alone idles no longer than its plans allow, and computes no token twice.
"""

from __future__ import annotations

from dataclasses import dataclass

from oracle.checks import require
from oracle.device import Failure
from oracle.ledger import Ledger
from oracle.stack import Stack

MAX_IDLE_STEPS = 100_000
LOAD_WAIT_S = 0.0055
"""A step that waits for a load comes back after 5 ms at the latest."""


class Progress:
    """`again` starts the watch anew, as when time passed that is nobody's fault."""

    def __init__(self, ledger: Ledger, now: float) -> None:
        self._ledger = ledger
        self._mark = (0, 0)
        self._since, self._steps = now, 0

    def again(self, now: float) -> None:
        self._since, self._steps = now, 0

    def stepped(self, stack: Stack) -> None:
        ledger, now = self._ledger, stack.world.clock()
        for sequence in [*stack.scheduler.running, *stack.scheduler.waiting]:
            live = ledger.live.get((sequence.request.request_key, sequence.index))
            if live is not None:
                live.furthest = max(live.furthest, sequence.computed)
        mark = (ledger.requests - len(ledger.live), sum(live.furthest for live in ledger.live.values()))
        if mark != self._mark:
            self._mark = mark
            self.again(now)
            return
        self._steps += 1
        speeds = stack.world.speeds
        tokens = sum(len(live.request.prompt_token_ids) + 60 for live in ledger.live.values())
        bound = 1.0 + 40 * tokens * speeds.token + 2 * max(stack.waits[-20:], default=0.0)
        bound += 2000 * (speeds.link + speeds.checksum) + 40 * stack.setup.image_s * len(ledger.live)
        if self._steps > MAX_IDLE_STEPS or now - self._since > (bound if stack.world.virtual else 30.0):
            what = f"{self._steps} steps, {now - self._since:.3f} s (bound {bound:.3f})"
            raise Failure("stuck", f"{what} for {sorted(ledger.live)}")


@dataclass
class Lone:
    """A request that is alone until its first token, and where everything stood when it came."""

    place: tuple[str, int]
    prompt: int
    now: float
    busy_s: float
    copies_s: float
    tokens: int
    plans: int
    images_s: float = 0.0

    @classmethod
    def begin(cls, place: tuple[str, int], prompt: int, stack: Stack) -> Lone:
        device = stack.device
        now = stack.world.clock()
        busy_s = device.busy_s - max(0.0, device.busy_until - now)  # a step that nobody needs any more may still run
        images_s = 0.0
        if device.images is not None:  # an image of somebody who left may still be encoded
            images_s = device.images.busy_s - max(0.0, device.images.until - now)
        return cls(place, prompt, now, busy_s, stack.copier.seconds, device.tokens, len(stack.waits), images_s)

    def answered(self, stack: Stack) -> None:
        device, waits = stack.device, stack.waits[self.plans :]
        idle = stack.world.clock() - self.now - (device.busy_s - self.busy_s) - (stack.copier.seconds - self.copies_s)
        if device.images is not None:
            idle -= device.images.busy_s - self.images_s
        text = f"{self.place} idled {idle:.4f} s; plans may wait {waits}"
        require(idle <= sum(waits) + LOAD_WAIT_S * (len(waits) + 1), "late", text)
        computed = device.tokens - self.tokens
        require(computed <= self.prompt + 1, "late", f"{self.place} computed {computed} tokens for {self.prompt}")
