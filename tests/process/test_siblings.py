"""What fronts say to a supervisor that stands still: nobody waits for it, and nothing is lost that it must hear."""

from __future__ import annotations

import asyncio
import time

from wicore_trt.core.cells import Cells
from wicore_trt.errors import EngineFormatError
from wicore_trt.process.child import Control, Rein
from wicore_trt.serve import siblings
from wicore_trt.serve.siblings import Siblings

LONG = "x" * 100_000
"""Of such texts a socket holds two."""


def ends() -> tuple[Rein, Rein]:
    """The supervisor's, which hears nothing by itself, and a front's."""
    ours, theirs = Control.pair()
    return ours, Rein(theirs._sock)


async def test_a_supervisor_that_stands_still_holds_up_no_front(monkeypatch):
    monkeypatch.setattr(siblings, "ANSWER_S", 0.2)
    supervisor, front = ends()
    for call in range(6):
        front.send("metrics", call=call, text=LONG)
    fronts, begun = Siblings(1, 2, Cells(), front.offer), time.monotonic()
    assert await asyncio.gather(*(fronts.ask(str(tenant)) for tenant in range(400))) == [[]] * 400
    assert time.monotonic() - begun < 20
    front.send("idle")
    heard = []
    while len(heard) < 7:
        await asyncio.sleep(0.001)  # the front goes on when there is room
        heard.append(supervisor.receive()[0])
    assert [message.get("call") for message in heard] == [*range(6), None] and heard[6]["kind"] == "idle"
    waiting = asyncio.ensure_future(fronts.ask("alice"))
    await asyncio.sleep(0.01)
    asked = supervisor.receive()[0]
    assert (asked["kind"], asked["tenant"]) == ("ask", "alice")
    fronts.heard({"kind": "expect", "call": asked["call"], "count": 1})
    fronts.heard({"kind": "told", "call": asked["call"], "told": {"front": 2}})
    assert await waiting == [{"front": 2}]


async def test_nobody_waits_longer_for_an_answer_because_others_wait_for_theirs(monkeypatch):
    monkeypatch.setattr(siblings, "ANSWER_S", 0.3)
    said = []
    fronts, begun = Siblings(1, 2, Cells(), lambda kind, **facts: said.append(kind) or True), time.monotonic()
    loop = asyncio.get_running_loop()
    moment = loop.time()
    with monkeypatch.context() as patch:  # all come at one moment, however busy the machine is
        patch.setattr(loop, "time", lambda: moment)
        asked = [asyncio.ensure_future(fronts.ask(str(tenant))) for tenant in range(100)]
        while len(fronts._under_way) < len(asked) or not said:
            await asyncio.sleep(0)
    await asyncio.gather(*asked)
    assert time.monotonic() - begun < 5.0 and len(said) <= 2 * siblings.AT_ONCE, "not one after the other"


def test_a_front_that_ends_says_why_when_its_supervisor_goes_on():
    supervisor, front = ends()

    async def talk() -> None:
        for call in range(4):
            front.send("metrics", call=call, text=LONG)

    asyncio.run(talk())
    heard = []

    async def listen() -> None:
        while not heard or heard[-1]["kind"] != "failed":
            try:
                heard.append(supervisor.receive()[0])
            except BlockingIOError:
                await asyncio.sleep(0.001)

    def end() -> None:
        front.outlive_loop()
        front.send_error(EngineFormatError("it is missing"))

    async def both() -> None:
        await asyncio.gather(listen(), asyncio.to_thread(end))

    asyncio.run(asyncio.wait_for(both(), 20))
    assert len(heard) == 5 and heard[-1]["message"] == "it is missing"
