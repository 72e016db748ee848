"""Answer GET /metrics in Prometheus' format, from the engine, this process's counters and the system.

Must not know names of metrics. Invariants: operators alone get it; an engine or a driver that does not answer delays
no scrape.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from contextlib import suppress

from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from wicore_trt import __version__
from wicore_trt.access.calls import Call
from wicore_trt.core.port import EnginePort
from wicore_trt.core.times import Times
from wicore_trt.errors import ForbiddenError, WicoreError
from wicore_trt.http.context import Context
from wicore_trt.metrics.exposition import MetricsSnapshot, collect_families, render_metrics
from wicore_trt.metrics.machine import GpuUse, read_gpu_use, read_process_use
from wicore_trt.types import EngineStats

ANSWER_S = 2.0
"""Seconds that the engine may take to tell its statistics; a scrape has some ten seconds."""


async def serve_metrics(context: Context, call: Call) -> ASGIApp:
    """Everything, for an operator."""
    if not call.who.operator:
        raise ForbiddenError("The metrics tell of every tenant.", fix="Use an operator's key.")
    found = collect_families(await take_snapshot(context))

    async def reply(scope: Scope, receive: Receive, send: Send) -> None:
        raw, content_type = render_metrics(found, Headers(scope=scope).get("accept", ""))
        await Response(raw, headers={"content-type": content_type})(scope, receive, send)

    return reply


async def _ask_stats(part: EnginePort) -> EngineStats | None:
    if part.dead is None:
        with suppress(TimeoutError, WicoreError):
            async with asyncio.timeout(ANSWER_S):
                return await part.stats()
    return None


async def take_snapshot(context: Context) -> MetricsSnapshot:
    engine = context.engine
    gpus: Sequence[GpuUse] = ()
    parts = engine.engine.parts if engine is not None else ()
    stats = await asyncio.gather(*map(_ask_stats, parts))
    names = ["engine"] if len(parts) == 1 else [f"engine-{i}" for i in range(len(parts))]
    pids = {name: part.pid for name, part in zip(names, parts, strict=True) if part.pid != os.getpid()}
    pids["front"] = os.getpid()
    if context.gpus is None or context.gpus.done():  # a driver that does not answer takes one thread for all scrapes
        context.gpus = asyncio.ensure_future(asyncio.to_thread(read_gpu_use))
    with suppress(TimeoutError):
        gpus = await asyncio.wait_for(asyncio.shield(context.gpus), ANSWER_S)
    return MetricsSnapshot(
        version=__version__, state=context.state, calls=context.admission.counts,
        open_requests=engine.live if engine is not None else 0,
        model=engine.info if engine is not None else None, engines=stats,
        times=engine.times if engine is not None else Times(),
        finished=engine.count_finished() if engine is not None else {},
        processes={name: read_process_use(pid) for name, pid in pids.items() if pid is not None},
        gpus=gpus,
    )  # fmt: skip
