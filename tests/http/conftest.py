"""One server for all tests of a module that do not change it, over the engine that the module's `make_one` makes."""

from __future__ import annotations

from functools import partial

import pytest
import pytest_asyncio
from lazy import LazyModule
from web import make_engine, serving

openai = LazyModule("openai")


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def running(request):
    make_one = getattr(request.module, "make_one", partial(make_engine, logprobs=True))
    async with serving(make_one()) as found:
        yield found


@pytest.fixture
def client(running):
    plain = openai.DefaultAsyncHttpxClient(verify=False)  # reading the system's certificates takes 30 ms, a test 5
    return openai.AsyncOpenAI(base_url=f"{running.url}/v1", api_key="none", max_retries=0, http_client=plain)
