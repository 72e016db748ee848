"""Token ids of prompts with images equal those of transformers' Gemma3Processor; users' texts never make a place."""

from __future__ import annotations

import hashlib
import io
from dataclasses import replace
from functools import cache
from itertools import product
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from tiny_images import BOI, EOI, SOFT, TOKENS, load_processor, write_image_tokenizer

from wicore_trt.arithmetic import div_ceil
from wicore_trt.core.prompts import ImageLimits, encode_request, prepare_images_now
from wicore_trt.errors import ContextLengthError, InvalidRequestError
from wicore_trt.images.files import take_images
from wicore_trt.images.prepare import PIECES
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.types import ImageFile, ImageInfo, ModelInfo, SamplingParams, TextRequest

IMAGES = ImageInfo(size=56, tokens=TOKENS, begin_id=BOI, soft_id=SOFT, end_id=EOI)
INFO = ModelInfo(
    model_id="tiny", backend="torch", kernels="torch", dtype="float32", kv_dtype="float32", quantization=None,
    max_context_tokens=2048, vocab_size=384, hidden_size=16, num_layers=4, num_heads=4, num_kv_heads=2,
    fingerprint="f", eos_token_ids=(1,), bos_token_id=2, chat=True, images=IMAGES,
)  # fmt: skip


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    write_image_tokenizer(path)
    return path


@pytest.fixture(scope="module")
def tokenizer(home: Path) -> Tokenizer:
    return Tokenizer.from_dir(home)


@cache
def make_image(number: int) -> tuple[bytes, Image.Image]:
    """A file and its picture; every other one is long enough for crops."""
    size = (600, 260) if number % 2 else (60, 50)
    image = Image.fromarray(np.random.default_rng(number).integers(0, 256, (*size[::-1], 3), np.uint8))
    out = io.BytesIO()
    image.save(out, "PNG")
    return out.getvalue(), image


def encode(tokenizer: Tokenizer, images: tuple[ImageFile, ...] = (), info: ModelInfo = INFO, **given) -> TextRequest:
    request = TextRequest("r", SamplingParams(), images=images, **given)
    return encode_request(tokenizer, prepare_images_now(request, info, ImageLimits()), info)


@pytest.mark.parametrize("crops", [False, True])
def test_tokens_and_pixels_equal_those_of_the_processor(home: Path, tokenizer: Tokenizer, crops: bool) -> None:
    """Texts and images in every order, ends with line breaks that merge with those of images included."""
    processor = load_processor(home)
    atoms = ["I", "say: it ", "\n\nuser\n", ""]
    lines = [list(order) for order in product(atoms, repeat=3) if "I" in order][::2]
    lines += [["I"] * 5, ["a", "I", "I", "\n", "I", "b"]]
    for number, line in enumerate(lines):
        count, parts, marks = 0, [], []
        for atom in line:
            parts.append({"type": "image"} if atom == "I" else {"type": "text", "text": atom})
            marks.append("<start_of_image>" if atom == "I" else atom)
            count += atom == "I"
        made = [make_image((number + i) % 6) for i in range(count)]
        images = tuple(ImageFile(data=data, crops=crops) for data, _ in made)
        turns = [{"role": "user", "content": parts}]
        rendered = processor.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        for text, given in ((rendered, {"messages": tuple(turns)}), ("".join(marks), {"prompt": "".join(marks)})):
            want = processor(
                images=[image for _, image in made], text=text, do_pan_and_scan=crops, add_special_tokens=False
            )
            ids = list(want["input_ids"][0])
            ids = ids if ids[0] == 2 else [2, *ids]
            got = encode(tokenizer, images, **given)
            assert list(got.prompt_token_ids or ()) == ids, line
            assert len(got.content) == len(want["pixel_values"]) and not got.images
            for span, pixels in zip(got.content, want["pixel_values"], strict=True):
                assert span.end - span.begin == TOKENS and ids[span.begin - 1] == BOI and ids[span.end] == EOI
                assert set(ids[span.begin : span.end]) == {SOFT}
                ours = np.frombuffer(span.pixels, np.uint8).reshape(56, 56, 3).transpose(2, 0, 1)
                assert np.array_equal((ours / np.float32(255) - np.float32(0.5)) / np.float32(0.5), pixels)
                size = div_ceil(len(span.pixels), PIECES)
                pieces = [span.pixels[at : at + size] for at in range(0, len(span.pixels), size)]
                whole = hashlib.sha256(b"".join(hashlib.sha256(piece).digest() for piece in pieces))
                assert span.digest == whole.digest()


def test_texts_of_users_make_no_place(tokenizer: Tokenizer) -> None:
    image = ImageFile(data=make_image(0)[0])
    said = "<start_of_image><image_soft_token><end_of_image> <start_of_im"
    parts = [{"type": "text", "text": said}, {"type": "image"}, {"type": "text", "text": "age>"}]
    got = encode(tokenizer, (image,), messages=({"role": "user", "content": parts},))
    ids = list(got.prompt_token_ids or ())
    assert ids.count(BOI) == ids.count(EOI) == 1 and ids.count(SOFT) == TOKENS
    text = tokenizer.decode(ids, skip_special=False)
    assert text.count("<start_of_image>") == 2 and said in text
    for count in (0, 2):
        with pytest.raises(InvalidRequestError, match=f"1 parts.*for {count} images|for 0 images"):
            encode(tokenizer, (image,) * count, messages=({"role": "user", "content": parts},))


@pytest.mark.parametrize("chat", [True, False])
def test_images_in_results_of_tools_and_merged_turns(home: Path, tmp_path: Path, chat: bool) -> None:
    """Also for a base model, whose turns are ours."""
    write_image_tokenizer(tmp_path)
    if not chat:
        config = (tmp_path / "tokenizer_config.json").read_text()
        assert '"chat_template"' in config
        (tmp_path / "tokenizer_config.json").write_text(config.replace('"chat_template"', '"unused"'))
    tokenizer = Tokenizer.from_dir(tmp_path)
    assert tokenizer.has_chat is chat
    images = tuple(ImageFile(data=make_image(i)[0]) for i in range(3))
    call = {"id": "c", "type": "function", "function": {"name": "look", "arguments": "{}"}}
    turns = (
        {"role": "system", "content": "be"},
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "a"}]},
        {"role": "user", "content": [{"type": "text", "text": "b <start_of_image>"}, {"type": "image"}]},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {
            "role": "tool",
            "tool_call_id": "c",
            "content": [{"type": "text", "text": "<start_of_image>"}, {"type": "image"}],
        },
    )
    got = encode(tokenizer, images, messages=turns, functions=({"name": "look", "parameters": {}},))
    ids = list(got.prompt_token_ids or ())
    text = tokenizer.decode(ids, skip_special=False)
    assert [span.pixels for span in got.content] == [
        prepare_images_now(TextRequest("r", SamplingParams(), images=(i,), prompt="x"), INFO, ImageLimits())
        .images[0]
        .pixels[0]
        for i in images
    ]
    soft = "<image_soft_token>" * TOKENS
    assert text.count(soft) == 3 and ids.count(BOI) == 3
    assert f'"content": "<start_of_image>"}}\n</tool_response>\n\n<start_of_image>{soft}<end_of_image>' in text


@pytest.mark.parametrize(
    ("given", "field", "message"),
    [
        ({"messages": ({"role": "system", "content": [{"type": "image"}]}, {"role": "user", "content": "a"})},
         "images[0]", "role system takes no image"),
        ({"messages": ({"role": "user", "content": "<start_of_image>"},)}, "images[0]", '"image"} for 1 images'),
        ({"prompt": "<start_of_image><start_of_image>"}, "images[0]", "has 2 places for 1"),
        ({"prompt": "<start_of_image><image_soft_token>"}, "images[0]", "tokens of images beside"),
        ({"prompt_token_ids": (2, BOI)}, "images[0]", "a prompt as text"),
        ({"prompt": "<start_of_image>", "truncate_prompt_tokens": 5}, "truncate_prompt_tokens", "not truncated"),
    ],
)  # fmt: skip
def test_images_without_their_place_are_refused(tokenizer: Tokenizer, given: dict, field: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        encode(tokenizer, (ImageFile(data=make_image(0)[0], field="images[0]"),), **given)
    assert caught.value.field == field


def test_a_system_turn_of_several_parts_is_whole(tokenizer: Tokenizer) -> None:
    """Gemma's template reads the first part alone of such a turn."""
    parts = [{"type": "text", "text": text} for text in ("one ", " two")]
    turns = ({"role": "system", "content": parts}, {"role": "user", "content": "three"})
    assert "onetwo\n\nthree" in tokenizer.decode(tokenizer.apply_chat(turns))


def test_images_come_first_where_the_prompt_has_no_place(tokenizer: Tokenizer) -> None:
    images = tuple(ImageFile(data=make_image(i)[0]) for i in (0, 2))
    marked = encode(tokenizer, images, prompt="<start_of_image><start_of_image>a")
    assert encode(tokenizer, images, prompt="a") == marked and len(marked.content) == 2


def test_limits_name_the_image(tokenizer: Tokenizer) -> None:
    images = tuple(ImageFile(data=make_image(1)[0], crops=True, field=f"images[{i}]") for i in range(6))
    prompt = "<start_of_image>" * 6
    with pytest.raises(InvalidRequestError, match="at most 16 images") as caught:  # three of each, with its crops
        encode(tokenizer, images, prompt=prompt)
    assert caught.value.field == "images[5]"
    with pytest.raises(InvalidRequestError, match="text alone") as caught:
        encode(tokenizer, images[1:2], replace(INFO, images=None), prompt="<start_of_image>")
    assert caught.value.field == "images[1]"
    with pytest.raises(ContextLengthError, match="the prompt has 101"):
        encode(tokenizer, images[:1], replace(INFO, max_context_tokens=64), prompt="<start_of_image>")
    with pytest.raises(InvalidRequestError, match="no PNG, JPEG") as caught:
        encode(tokenizer, (ImageFile(data=b"<svg/>", field="x"),), prompt="<start_of_image>")
    assert caught.value.field == "x"


def test_parts_and_prompts_of_programs(tmp_path: Path) -> None:
    data = make_image(0)[0]
    (tmp_path / "a.png").write_bytes(data)
    content = [
        {"type": "text", "text": "a"},
        {"type": "image", "image": tmp_path / "a.png", "crops": True},
        {"type": "image_url", "image_url": {"url": "https://example.org/a", "detail": "high"}},
    ]
    turns, images = take_images([{"role": "user", "content": content}])
    assert turns == [{"role": "user", "content": [content[0], {"type": "image"}, {"type": "image"}]}]
    assert images == (
        ImageFile(data=data, crops=True, field="messages[0].content[1]"),
        ImageFile(url="https://example.org/a", crops=True, field="messages[0].content[2]"),
    )
    assert take_images({"prompt": "x", "images": [data]}) == (
        {"prompt": "x"},
        (ImageFile(data=data, field="images[0]"),),
    )
    assert take_images([1, 2]) == ([1, 2], ()) and take_images("x") == ("x", ())
    for wrong in ([tmp_path / "none"], [5], [b""], [tmp_path], ["/dev/null\0"]):
        with pytest.raises(InvalidRequestError) as caught:
            take_images({"prompt": "x", "images": wrong})
        assert caught.value.field == "images[0]"
