"""The log of a supervised server as JSON: each line about a request has its id, and no line has what it said."""

from __future__ import annotations

import json
import secrets

import grpc
import httpx
from process.test_supervisor import supervised
from serve.serving import failure, request
from web import GREEDY, expected

from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc


def secret() -> str:
    """A text that no other line has, of letters that the fake vocabulary has."""
    return "".join(secrets.choice("abcdefghjkmnpqrst") for _ in range(24))


async def test_lines_have_ids_and_nothing_that_was_said(tmp_path):
    said, key, wrong_key = secret(), secret(), secret()
    options = {"json": True, "level": "debug", "chat": True, "fail_at": 60, "step_s": 0.002}
    async with supervised(tmp_path, **options, server={"http_port": 0, "api_key": key}) as server:
        url = await server.line("bound")
        await server.line("ready on")
        headers = {"authorization": f"Bearer {key}"}
        async with httpx.AsyncClient(base_url=url, timeout=60, headers=headers) as client:

            async def post(number: int, path: str, **body) -> httpx.Response:
                found = await client.post(path, json=body, headers={"x-request-id": f"web-{number}"})
                assert found.headers["x-request-id"] == f"web-{number}"
                return found

            good = await post(0, "/v1/completions", prompt=said, max_tokens=12, **GREEDY)
            told = good.json()["choices"][0]["text"]
            assert told == expected(said, 12)
            conversation = [{"role": "user", "content": said}]
            assert (await post(1, "/v1/chat/completions", messages=conversation, max_tokens=3)).status_code == 200
            wrong = [
                {"prompt": {"text": said}},
                {"prompt": said, "max_tokens": said},
                {"prompt": said, "guided_regex": f"({said}"},
                {"prompt": said, "guided_json": {"type": said}},
                {"prompt": said, "stop": [said] * 99},
                {"prompt": said, "logit_bias": {said: 1}},
                {"messages": said},
                {"prompt": said, "model": said},
            ]
            for number, body in enumerate(wrong, 2):
                path = "/v1/chat/completions" if "messages" in body else "/v1/completions"
                found = await post(number, path, **body)
                assert 400 <= found.status_code < 500, body
            await client.post("/tokenize", json={"prompt": said})
            await client.get("/v1/models", headers={"authorization": f"Bearer {wrong_key}"}, params={"key": key})
            plain = {"content-type": "application/json"}
            await client.post("/v1/completions", content=f'{{"prompt": "{said}', headers=plain)
            async with grpc.aio.insecure_channel(await grpc_address(client, server)) as channel:
                await over_grpc(channel, key, said)
            dies = await post(99, "/v1/completions", prompt=said, max_tokens=500, **GREEDY)
            assert dies.status_code == 503
        server.process.terminate()
        _, log = await server.end()
    lines = [json.loads(line) for line in log.splitlines()]
    for text in (said, key, wrong_key, told):
        assert text not in log, [line for line in log.splitlines() if text in line]
    ids = {line["id"]: line for line in lines if line["logger"] == "wicore_trt.access"}
    assert {f"web-{n}" for n in (*range(len(wrong) + 2), 99)} <= ids.keys()
    assert ids["web-0"] | {"tokens": 12, "finish": "length", "code": "200"} == ids["web-0"]
    assert ids["web-0"]["queue_ms"] + ids["web-0"]["prefill_ms"] <= ids["web-0"]["ttft_ms"] + 0.2
    assert ids["web-2"]["error"] == "InvalidRequestError" and ids["web-2"]["field"] == "prompt"
    assert ids["web-99"]["code"] == "503" and "device lost" in ids["web-99"]["error"]
    assert ids["rpc-1"]["code"] == "OK" and ids["rpc-2"]["code"] == "INVALID_ARGUMENT"
    refused = [line for line in lines if line["message"].startswith("refused")]
    assert len(refused) == 2 and "rpc-3" in {line["id"] for line in refused}


async def grpc_address(client: httpx.AsyncClient, server) -> str:
    """Where gRPC is: `bound` names the URL of HTTP alone."""
    line = await server.log_line("loading the engine for")
    return line.split("loading the engine for ")[1].split(" and")[0]


async def over_grpc(channel: grpc.aio.Channel, key: str, said: str) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    good, bad = request(said, 5), pb2.GenerateRequest(text=said, request_id=said + "\n")
    for number, (message, shown) in enumerate(((good, key), (bad, key), (good, said)), 1):
        call = stub.Generate(message, metadata=[("x-api-key", shown), ("x-request-id", f"rpc-{number}")])
        if number == 1:
            assert ("x-request-id", "rpc-1") in tuple(await call.initial_metadata())
            async for _ in call:
                pass
        else:
            assert (await failure(call))[2]["RequestInfo"].request_id == f"rpc-{number}"
