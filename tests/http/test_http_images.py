"""Images in requests: every spelling of every route becomes the same pixels in its place, or a 400 that names it."""

from __future__ import annotations

import base64
import io
import json
import random
from functools import partial

import pytest
import websockets
from PIL import Image
from web import GREEDY, IMAGES, SEQUENCE, error_of, executor_of, make_engine, pixels, png, serving
from web import expected_seeing as expected

from wicore_trt.runtime.executor import NOT_FINITE

pytestmark = pytest.mark.asyncio(loop_scope="module")
make_one = partial(make_engine, images=True)


def text_of(data: bytes) -> str:
    return base64.b64encode(data).decode()


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{text_of(data)}"


def part(colour: int, **more) -> dict:
    return {"type": "image_url", "image_url": {"url": url_of(png(colour)), **more}}


def sources(data: bytes) -> dict:
    """An image as the parts of chats that clients of several servers send."""
    inside = {"type": "base64", "media_type": "image/png", "data": text_of(data)}
    return {
        "openai": {"type": "image_url", "image_url": {"url": url_of(data), "detail": "auto"}},
        "text": {"type": "image_url", "image_url": url_of(data)},
        "responses": {"type": "input_image", "image_url": url_of(data), "detail": "low"},
        "anthropic": {"type": "image", "source": inside},
        "anthropic-url": {"type": "image", "source": {"type": "url", "url": url_of(data)}},
        "transformers": {"type": "image", "image": url_of(data)},
        "url": {"type": "image", "url": url_of(data)},
        "base64": {"type": "image", "base64": text_of(data), "mime_type": "image/png"},
        "mcp": {"type": "image", "data": text_of(data), "mimeType": "image/png"},
    }


@pytest.mark.parametrize(("number", "name"), list(enumerate(sources(b"x"))))
async def test_every_spelling_is_the_same_image(running, number, name):
    given = sources(png(100 + number))[name]
    answer = await running.chat([{"type": "text", "text": "see"}, given, {"type": "text", "text": "this"}])
    assert answer.status_code == 200, answer.text
    said, tokens = expected(f"see{SEQUENCE}this", 5)
    assert answer.json()["choices"][0]["message"]["content"] == said
    assert answer.json()["usage"]["prompt_tokens"] == tokens
    assert executor_of(running.engine).images.begun[-1] == pixels(100 + number)


async def test_images_keep_their_order_and_are_counted(running):
    turns = [
        {"role": "user", "content": [part(1), {"type": "text", "text": "a"}, part(2)]},
        {"role": "assistant", "content": "b"},
        {"role": "user", "content": [{"type": "text", "text": "c"}, part(3)]},
    ]
    body = {"messages": turns, "max_tokens": 5, **GREEDY}
    answer = (await running.post("/v1/chat/completions", body)).json()
    said, tokens = expected(f"{SEQUENCE}a{SEQUENCE}bc{SEQUENCE}", 5)
    assert answer["choices"][0]["message"]["content"] == said and answer["usage"]["prompt_tokens"] == tokens
    assert executor_of(running.engine).images.begun[-3:] == [pixels(1), pixels(2), pixels(3)]
    assert (await running.post("/tokenize", {"messages": turns})).json()["count"] == tokens


async def test_messages_have_image_blocks_also_in_results_of_tools(running):
    image = {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": text_of(png(21))}}
    turns = [
        {"role": "user", "content": [{"type": "text", "text": "a"}, image, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "look", "input": {}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "c1", "content": [
            {"type": "text", "text": "d"}, sources(png(22))["anthropic"]]}]},
    ]  # fmt: skip
    body = {"messages": turns, "max_tokens": 3, "temperature": 0}
    answer = await running.post("/v1/messages", body)
    assert answer.status_code == 200, answer.text
    assert executor_of(running.engine).images.begun[-2:] == [pixels(21), pixels(22)]
    usage = answer.json()["usage"]
    counted = (await running.post("/v1/messages/count_tokens", {"messages": turns})).json()["input_tokens"]
    assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"] > 2 * IMAGES.tokens
    one = (await running.post("/v1/messages", {**body, "messages": turns[:1]})).json()
    assert one["content"][0]["text"] == expected(f"a{SEQUENCE}b", 3)[0]


async def test_responses_have_input_images_also_in_outputs_of_functions(running):
    image = {"type": "input_image", "image_url": url_of(png(31)), "detail": "auto"}
    items = [
        {"role": "user", "content": [{"type": "input_text", "text": "a"}, image]},
        {"type": "function_call", "call_id": "c1", "name": "look", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": [sources(png(32))["responses"]]},
    ]
    answer = await running.post("/v1/responses", {"input": items, "max_output_tokens": 3, "temperature": 0})
    assert answer.status_code == 200, answer.text
    assert executor_of(running.engine).images.begun[-2:] == [pixels(31), pixels(32)]
    counted = await running.post("/v1/responses/input_tokens", {"input": items})
    assert counted.json()["input_tokens"] == answer.json()["usage"]["input_tokens"]


async def test_results_of_tools_in_chats_have_images(running):
    called = {"id": "c1", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = [
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c1", "content": [{"type": "text", "text": "d"}, part(41)]},
    ]
    answer = await running.post("/v1/chat/completions", {"messages": turns, "max_tokens": 3})
    assert answer.status_code == 200, answer.text
    assert executor_of(running.engine).images.begun[-1] == pixels(41)


async def test_the_websocket_takes_images(running):
    turns = [{"role": "user", "content": [{"type": "text", "text": "a"}, part(45)]}]
    async with websockets.connect(f"{running.url.replace('http', 'ws')}/v1/stream") as socket:
        await socket.send(json.dumps({"type": "generate", "id": "a", "messages": turns, "max_tokens": 5, **GREEDY}))
        frames = [json.loads(await socket.recv())]
        while frames[-1]["type"] == "delta":
            frames.append(json.loads(await socket.recv()))
    said, tokens = expected(f"a{SEQUENCE}", 5)
    assert "".join(frame["text"] for frame in frames[:-1]) == said
    assert frames[-1]["usage"]["prompt_tokens"] == tokens


@pytest.mark.parametrize(("prompt", "whole"), [("see", f"{SEQUENCE}see"), ("a <start_of_image> b", f"a {SEQUENCE} b")])
async def test_inference_takes_images(running, prompt, whole):
    for given in (text_of(png(51)), url_of(png(51))):
        body = {"prompt": prompt, "images": [given], "max_tokens": 5, **GREEDY}
        answer = await running.post("/v1/inference", body)
        assert answer.status_code == 200 and answer.json()["content"] == expected(whole, 5)[0], answer.text


async def test_high_detail_asks_for_crops(running):
    found = []
    for detail in ("auto", "high"):
        image = {"type": "image_url", "image_url": {"url": url_of(png(61, 1200, 400)), "detail": detail}}
        found.append((await running.post("/tokenize", {"messages": [{"role": "user", "content": [image]}]})).json())
    plain, cropped = (one["tokens"].count(IMAGES.soft_id) for one in found)
    assert (plain, cropped) == (IMAGES.tokens, 4 * IMAGES.tokens)


async def test_a_photo_of_a_megabyte_is_read(running):
    """Its digits as base64 are more than a body of few items may have outside of texts."""
    made = io.BytesIO()
    Image.frombytes("RGB", (640, 640), random.Random(1).randbytes(3 * 640 * 640)).save(made, "PNG")
    text = 'it\'s "quoted" \\ and \\"'
    answer = await running.chat(
        [{"type": "text", "text": text}, {"type": "image_url", "image_url": url_of(made.getvalue())}]
    )
    assert answer.status_code == 200, answer.text[:500]
    raw = b'{"prompt": "' + b"1" * 300_000 + b'\\\\", "seed": ' + b"1" * 300_000 + b"}"
    refused = await running.client.post("/v1/completions", content=raw, headers={"content-type": "application/json"})
    assert refused.status_code == 400 and "digits" in error_of(refused)["message"]


def ask(*parts: object, role: str = "user") -> dict:
    return {"messages": [{"role": "user", "content": "x"}, {"role": role, "content": list(parts)}], "max_tokens": 2}


BROKEN = png(1)[:40]


@pytest.mark.parametrize(
    ("path", "body", "param", "why"),
    [
        ("chat/completions", ask({"type": "text", "text": "x"}, {"type": "image_url", "image_url": url_of(BROKEN)}),
         "messages[1].content[1]", "cannot be read"),
        ("chat/completions", ask(part(1, detail="fine")), "messages[1].content[0]", "detail"),
        ("chat/completions", ask({"type": "image"}), "messages[1].content[0]", "has a url"),
        ("chat/completions", ask({"type": "image_url", "image_url": "data:image/png;base64,&&"}),
         "messages[1].content[0]", "not valid"),
        ("chat/completions", ask({"type": "image_url", "image_url": "file:///etc/passwd"}), "messages[1].content[0]",
         "begins with data:"),
        ("chat/completions", ask({"type": "image_url", "image_url": {"url": "http://127.0.0.1/x.png"}}),
         "messages[1].content[0]", "not fetched here"),
        ("chat/completions", ask(*[part(1)] * 17), "messages[1].content[16]", "at most 16 images"),
        ("chat/completions", ask(part(1), role="system"), "messages[1].content[0]", "takes no image"),
        ("chat/completions", ask(part(1)) | {"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not truncated"),
        ("messages", ask({"type": "image", "source": {"type": "base64", "data": text_of(BROKEN)}}),
         "messages[1].content[0]", "cannot be read"),
        ("messages", {**ask({"type": "text", "text": "x"}), "system": [sources(png(1))["anthropic"]]}, "system[0]",
         "takes no image"),
        ("messages", ask({"type": "image", "source": {"type": "file", "file_id": "f"}}), "messages[1].content[0]",
         "has a url"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "file_id": "f"}]}]},
         "input[0].content[0]", "has a url"),
        ("responses", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": url_of(BROKEN)}]}]},
         "input[0].content[0]", "cannot be read"),
        ("inference", {"prompt": "x", "images": [text_of(png(1)), text_of(BROKEN)]}, "images[1]", "cannot be read"),
        ("inference", {"prompt": "<start_of_image>", "images": [text_of(png(1))] * 2}, "images[0]", "1 places for 2"),
    ],
)  # fmt: skip
async def test_what_cannot_be_is_400_with_the_path(running, path, body, param, why):
    found = await running.post(f"/v1/{path}", body)
    assert found.status_code == 400 and error_of(found)["param"] == param, found.text
    assert why in error_of(found)["message"]


async def test_an_image_that_the_encoder_fails_on_is_told_without_insides(running, monkeypatch):
    """Features that are not finite are the image's fault; the device's faults are for the operator's eyes."""
    encoder = executor_of(running.engine).images

    def fail(*_: object) -> None:
        raise RuntimeError("CUDA error 719 at 0x7f")

    with monkeypatch.context() as patch:
        patch.setattr(encoder, "begin", fail)
        found = await running.post("/v1/chat/completions", ask(part(61)))
        assert found.status_code == 500 and "the engine's log says why" in found.text and "CUDA" not in found.text
    with monkeypatch.context() as patch:
        patch.setattr(encoder, "take_ended", lambda timeout_s=0.0: [(0, NOT_FINITE)])
        found = await running.post("/v1/chat/completions", ask(part(62)))
        assert found.status_code == 400 and error_of(found)["param"] == "images", found.text
    encoder.take_ended()
    found = await running.post("/v1/chat/completions", ask(part(62)))
    assert found.status_code == 200, found.text


async def test_an_engine_of_text_alone_says_so():
    async with serving() as running:
        for path, body, param in (
            ("/v1/chat/completions", ask(part(1)), "messages[1].content[0]"),
            ("/v1/messages", ask(sources(png(1))["anthropic"]), "messages[1].content[0]"),
            ("/v1/responses", {"input": [{"role": "user", "content": [sources(png(1))["responses"]]}]},
             "input[0].content[0]"),
            ("/v1/inference", {"prompt": "x", "images": [text_of(png(1))]}, "images[0]"),
            ("/tokenize", {"messages": ask(part(1))["messages"]}, "messages[1].content[0]"),
        ):  # fmt: skip
            found = await running.post(path, body)
            assert found.status_code == 400 and error_of(found)["param"] == param, found.text
            assert "text alone" in error_of(found)["message"]
