"""From files to greedy tokens: `LLM` on a built engine against transformers' model and processor."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from tiny_images import load_oracle, load_processor, write_image_source

from wicore_trt import LLM, InvalidRequestError, SamplingParams, build_engine

GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


def make_file(seed: int, form: str) -> tuple[bytes, Image.Image]:
    """A file and the picture that a reader sees."""
    size = (600, 260) if seed % 2 else (60, 50)
    out = io.BytesIO()
    small = np.random.default_rng(seed).integers(0, 256, (size[1] // 5, size[0] // 5, 3), np.uint8)
    Image.fromarray(small).resize(size).save(out, form)
    return out.getvalue(), Image.open(out).convert("RGB")


def test_files_become_the_tokens_that_transformers_says(tmp_path: Path) -> None:
    write_image_source(tmp_path / "source")
    build_engine(str(tmp_path / "source"), tmp_path / "engine", dtype="float32")
    model, processor = load_oracle(tmp_path / "source"), load_processor(tmp_path / "source")
    with LLM(tmp_path / "engine", scheduler__max_images=12) as llm:
        for count, crops in ((1, False), (2, True), (5, True), (5, False)):
            files = [make_file(i, ("PNG", "JPEG", "WEBP", "BMP", "GIF")[i]) for i in range(count)]
            parts, theirs = [], []
            for number, (data, _) in enumerate(files):
                given: bytes | Path = data
                if number == 0:
                    given = tmp_path / "file"
                    given.write_bytes(data)
                parts += [{"type": "text", "text": f"{number}: "}, {"type": "image", "image": given, "crops": crops}]
                theirs += [parts[-2], {"type": "image"}]
            text = processor.apply_chat_template(
                [{"role": "user", "content": theirs}], tokenize=False, add_generation_prompt=True
            )
            asked = {"do_pan_and_scan": crops, "add_special_tokens": False, "return_tensors": "pt"}
            inputs = processor(images=[image for _, image in files], text=text, **asked)
            inputs.pop("num_crops", None)
            with torch.no_grad():
                want = model.generate(**inputs, max_new_tokens=12, do_sample=False, eos_token_id=-1)
            [got] = llm.chat([{"role": "user", "content": parts}], GREEDY)
            begin = inputs["input_ids"].shape[1]
            assert got.usage.prompt_tokens == begin
            assert list(got.token_ids) == want[0, begin:].tolist(), (count, crops)
        [[marked]] = llm.generate({"prompt": "a <start_of_image>", "images": [files[0][0]]}, GREEDY)
        assert marked.token_ids and marked.usage.prompt_tokens > 6
        with pytest.raises(InvalidRequestError, match="at most 12 images") as caught:
            llm.generate({"prompt": "<start_of_image>" * 13, "images": [files[0][0]] * 13})
        assert caught.value.field == "images[12]"
