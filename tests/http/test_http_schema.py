"""The OpenAPI document, and what a generator of requests finds when it believes it."""

from __future__ import annotations

import asyncio
import sys

import pytest
from web import make_engine, serving

from wicore_trt.http.routes import ROUTES


async def test_the_document_names_every_route_and_field():
    async with serving() as running:
        found = (await running.client.get("/openapi.json")).json()
    assert found["openapi"] == "3.1.0" and set(found["paths"]) == {o.path.replace(":path", "") for o in ROUTES}
    chat = found["components"]["schemas"]["ChatBody"]
    assert chat["required"] == ["messages"] and chat["properties"]["temperature"]["description"]
    answers = found["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"} and "429" in answers


@pytest.mark.parametrize(
    ("phases", "examples"), [("fuzzing", "1"), pytest.param("coverage,fuzzing", "3", marks=pytest.mark.long)]
)
async def test_generated_requests_find_no_fault_of_ours(tmp_path, phases, examples):
    """Valid bodies and broken ones, methods that are not there; every answer is a documented one of its kind."""
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
        "unsupported_method"
    )
    async with serving(make_engine(max_batch_tokens=512)) as running:
        runner = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "from schemathesis.cli import schemathesis; schemathesis()",
            "run", f"{running.url}/openapi.json", "--checks", checks, "--phases", phases,
            "--max-examples", examples, "--seed", "1", "--generation-database", "none", "--no-color",
            "--request-timeout", "120", "--suppress-health-check", "all",
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
            cwd=tmp_path,
        )  # fmt: skip
        printed, _ = await runner.communicate()
    assert runner.returncode == 0, printed.decode()[-8000:]
    assert f"Tested: {len(ROUTES)}" in printed.decode()
