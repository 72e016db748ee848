"""Images over gRPC: as bytes and URLs, of texts and of parts of turns, and with `Client`."""

from __future__ import annotations

import asyncio
import base64

import pytest
from serving import failure, request, serving
from web import IMAGES, SEQUENCE, executor_of, expected_seeing, make_engine, pixels, png

from wicore_trt.client import Client
from wicore_trt.errors import InvalidRequestError
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.types import SamplingParams

GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


def url_of(data: bytes) -> str:
    return f"data:image/png;base64,{base64.b64encode(data).decode()}"


def chat_of(*parts: pb2.ContentPart, role: str = "user") -> pb2.Chat:
    return pb2.Chat(messages=[pb2.ChatMessage(role=role, parts=parts)])


def seen(colour: int) -> pb2.ContentPart:
    return pb2.ContentPart(image=pb2.Image(data=png(colour)))


async def test_images_of_texts_and_turns_are_read(tmp_path):
    async with serving(make_engine(images=True)) as running:
        begun = executor_of(running.engine).images.begun
        given = [pb2.Image(data=png(1)), pb2.Image(url=url_of(png(2)))]
        for text, whole in (
            ("a<start_of_image>b<start_of_image>", f"a{SEQUENCE}b{SEQUENCE}"),
            ("ab", f"{SEQUENCE}{SEQUENCE}ab"),
        ):
            answer = [one async for one in running.stub.Generate(request(text, 6, images=given))]
            said, tokens = expected_seeing(whole, 6)
            assert "".join(one.delta.text + one.finish.delta.text for one in answer) == said
            assert answer[-1].finish.usage.prompt_tokens == tokens
        assert set(begun) == {pixels(1), pixels(2)}
        chat = chat_of(pb2.ContentPart(text="a"), seen(3), pb2.ContentPart(text="b"))
        answer = [one async for one in running.stub.Generate(request(None, 6, chat=chat))]
        said, tokens = expected_seeing(f"a{SEQUENCE}b", 6)
        assert "".join(one.delta.text + one.finish.delta.text for one in answer) == said and begun[-1] == pixels(3)
        counted = await running.stub.Tokenize(pb2.TokenizeRequest(chat=chat))
        assert len(counted.token_ids) == tokens == answer[-1].finish.usage.prompt_tokens
        path = tmp_path / "a.png"
        path.write_bytes(png(4))
        with Client(running.address) as client:
            assert (await asyncio.to_thread(client.info)).images == IMAGES
            for image in (png(4), path, str(path), url_of(png(4))):
                turns = [
                    {"role": "user", "content": [{"type": "image", "image": image}, {"type": "text", "text": "b"}]}
                ]
                [done] = await asyncio.to_thread(client.chat, turns, GREEDY)
                assert done.text == expected_seeing(f"{SEQUENCE}b", 6)[0]
                assert begun.count(pixels(4)) == 1 and begun[-1] == pixels(4)
            prompt = {"prompt": "a<start_of_image>b", "images": [path]}
            [[done]] = await asyncio.to_thread(client.generate, prompt, GREEDY)
            assert (done.text, done.usage.prompt_tokens) == expected_seeing(f"a{SEQUENCE}b", 6)
            with pytest.raises(InvalidRequestError, match="cannot be read") as caught:
                await asyncio.to_thread(client.generate, {"prompt": "a", "images": [png(1)[:30]]}, GREEDY)
            assert caught.value.field == "images[0]"
            (tmp_path / "empty.png").write_bytes(b"")
            for wrong in (png(1)[:30], b"", tmp_path / "empty.png", tmp_path / "none.png", "data:,"):  # here and there
                turns = [
                    {"role": "user", "content": [{"type": "text", "text": "b"}, {"type": "image", "image": wrong}]}
                ]
                with pytest.raises(InvalidRequestError) as caught:
                    await asyncio.to_thread(client.chat, turns, GREEDY)
                assert caught.value.field == "chat.messages[0].parts[1].image", wrong


async def test_what_cannot_be_is_named():
    async with serving(make_engine(images=True)) as running:
        for message, field in (
            (request(None, 6, chat=chat_of(pb2.ContentPart(image=pb2.Image()))), "chat.messages[0].parts[0].image"),
            (request(None, 6, chat=chat_of(seen(1), role="system")), "chat.messages[0].parts[0].image"),
            (request(None, 6, chat=chat_of(*[seen(1)] * 17)), "chat.messages[0].parts[16].image"),
            (request("a", 6, images=[pb2.Image(url="file:///x")]), "images[0]"),
            (request("a", 6, images=[pb2.Image(url="http://127.0.0.1/x")]), "images[0]"),
            (request(None, 6, token_ids=pb2.TokenIds(ids=[1]), images=[pb2.Image(data=b"x")]), "images"),
            (request(None, 6, chat=pb2.Chat(messages=[pb2.ChatMessage(role="user", content="x", parts=[seen(1)])])),
             "chat.messages[0].parts"),
        ):  # fmt: skip
            code, why, details = await failure(running.stub.Generate(message))
            assert code.name == "INVALID_ARGUMENT", why
            assert details["BadRequest"].field_violations[0].field == field, why
    async with serving() as running:
        _, why, details = await failure(running.stub.Generate(request(None, 6, chat=chat_of(seen(1)))))
        assert details["BadRequest"].field_violations[0].field == "chat.messages[0].parts[0].image"
        assert "text alone" in why
        with Client(running.address) as client:
            assert (await asyncio.to_thread(client.info)).images is None
