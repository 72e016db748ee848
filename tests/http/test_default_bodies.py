"""Bodies that clients send by default are served.

bodies/ holds what coding agents sent, recorded: texts are cut short and some of many functions left out, but no field,
item, block or kind of tool.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest
from constrained_web import make_constrained_engine
from web import serving

BODIES = sorted((Path(__file__).parent / "bodies").glob("*.json"))
LIMITS = {"/v1/responses": "max_output_tokens", "/v1/messages": "max_tokens", "/v1/chat/completions": "max_tokens"}
ENDS = ("response.completed", "response.incomplete", "message_stop", "data: [DONE]")
pytestmark = pytest.mark.asyncio(loop_scope="module")
make_one = partial(make_constrained_engine, 16_384)


@pytest.mark.parametrize("path", BODIES, ids=lambda path: path.stem)
async def test_a_default_body_is_served(running, path):
    given = json.loads(path.read_text())
    route, body = given["path"].partition("?")[0], given["body"]
    asked = {**body, "model": "fake", LIMITS[route]: 4}
    assert asked["stream"] is True
    found = await running.client.post(given["path"], json=asked, headers=given["headers"])
    assert found.status_code == 200, found.text
    assert any(end in found.text for end in ENDS) and "event: error" not in found.text
    kinds = {tool.get("type") for tool in body.get("tools", ())} - {None, "function", "namespace", "custom"}
    assert found.headers.get("x-wicore-tools-left-out", "") == ", ".join(sorted(kinds))
    if route == "/v1/messages":
        prompt = {name: asked[name] for name in ("model", "messages", "system", "tools") if name in asked}
        counted = await running.client.post(f"{route}/count_tokens?beta=true", json=prompt, headers=given["headers"])
        assert counted.json()["input_tokens"] > 0


@pytest.mark.parametrize("header", ["authorization", "x-api-key"])
async def test_either_header_carries_the_key_and_a_probe_of_the_root_is_answered(tmp_path, header):
    keys = tmp_path / "keys"
    keys.write_text("tenant:" + "k" * 20 + "\n")
    keys.chmod(0o600)
    async with serving(make_constrained_engine(), keys_file=str(keys)) as running:
        key = {header: "k" * 20 if header == "x-api-key" else f"Bearer {'k' * 20}"}
        body = {"model": "fake", "messages": [{"role": "user", "content": "hi"}]}
        asked = partial(running.client.post, "/v1/messages", json={**body, "max_tokens": 3})
        assert [(await asked(headers=one)).status_code for one in (key, {})] == [200, 401]
        assert (await running.client.head("/", headers=key)).status_code == 200
