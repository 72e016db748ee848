"""One server for all tests of a module that do not change it."""

from __future__ import annotations

import pytest_asyncio
from web import make_engine, serving


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running():
    async with serving(make_engine(logprobs=True)) as found:
        yield found
