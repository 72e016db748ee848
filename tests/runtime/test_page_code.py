"""Coded pages on the CPU: the format word by word, every bit back, and bytes that are no code."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hostile_pages import PAGES, make_pages

from benchmarks.gpu.page_code import decode_page, decode_pages, encode_page, encode_pages
from wicore_trt.plugins.code_layout import HEADER_BYTES, PageCode, find_code
from wicore_trt.plugins.layout import PoolShape

SMALL = PageCode(3, 16, 48)
CODES = [SMALL, PageCode(20, 16, 16), PageCode(2, 32, 128), PageCode(2, 32, 320)]


def read_as_described(code: PageCode, coded: bytes) -> list[int]:
    """Decode by the description of the format alone, value by value: what another reader would do."""

    def number(at: int, size: int = 4) -> int:
        return int.from_bytes(coded[at : at + size], "little")

    tile = next(t for t in (128, 64, 32, 16) if code.channels % t == 0)
    assert coded[:4] == b"WKC\x02" and number(4) == code.rows and number(8) == code.channels
    tiles = code.blocks * code.channels // tile
    tops = 16 + -(-4 * tiles // 16) * 16
    bits = tops + code.blocks * code.channels
    signs = bits + code.blocks * 3 * code.channels * code.rows // 8
    escapes = signs + code.blocks * code.rows * code.channels
    values, at = [0] * (code.blocks * code.rows * code.channels), 0
    for block in range(code.blocks):
        for channel in range(code.channels):
            column = block * code.channels + channel
            if channel % tile == 0:
                assert number(16 + 4 * (column // tile)) == at
            size = code.rows // 8
            planes = [number(bits + ((3 * block + k) * code.channels + channel) * size, size) for k in range(3)]
            for row in range(code.rows):
                place = (block * code.rows + row) * code.channels + channel
                distance, sign = sum((planes[k] >> row & 1) << k for k in range(3)), coded[signs + place]
                exponent = coded[tops + column] - distance if distance < 7 else coded[escapes + at]
                at += distance == 7
                values[place] = sign >> 7 << 15 | exponent << 7 | sign & 127
    assert at == number(12) and not any(coded[escapes + at :]) and len(coded) == code.values * 3 // 2
    return values


@pytest.mark.parametrize("kind", PAGES)
def test_a_page_is_coded_as_described_or_kept_raw(kind: str) -> None:
    rng = np.random.default_rng(1)
    for code in CODES:
        page = PAGES[kind](rng, code, (code.blocks, code.rows, code.channels)).astype(np.uint16)
        coded = encode_page(code, page.tobytes())
        if kind in ("random bits", "one escape too many"):
            assert coded is None
        elif kind not in ("special", "distances up to 8", "one loud row"):
            assert coded is not None
        if coded is not None:
            assert read_as_described(code, coded) == page.reshape(-1).tolist()
            assert decode_page(code, coded) == page.tobytes()


def test_the_format_stays_what_it_is() -> None:
    """Coded bytes of format 2, which files keep: another format needs another number."""
    whole = hashlib.blake2b(digest_size=8)
    for code in CODES[:3]:
        noise = np.frombuffer(hashlib.shake_256(bytes([code.rows])).digest(code.raw_bytes), "<u2")
        far = np.where(noise >> 8 & 127 == 127, 50, (noise >> 7 & 7) % 7)
        coded = encode_page(code, (noise & 0x807F | 100 - far << 7).astype("<u2").tobytes())
        assert coded is not None
        whole.update(coded)
    assert whole.hexdigest() == "8254ca5d450d4f37"


def test_bytes_that_are_no_code_are_refused_or_give_some_page() -> None:
    rng = np.random.default_rng(2)
    coded = encode_page(SMALL, make_pages(SMALL, 2, seed=3)[1].tobytes())
    assert coded is not None
    for at in (*range(12), *rng.integers(16, len(coded), 100)):
        damaged = bytearray(coded)
        damaged[at] ^= 1 << rng.integers(8)
        if at < 12:
            with pytest.raises(ValueError, match="no coded page"):
                decode_page(SMALL, damaged)
        else:
            assert len(decode_page(SMALL, damaged)) == SMALL.raw_bytes
    for wrong in (b"", coded[:-1], coded + b"\0"):
        with pytest.raises(ValueError, match="no coded page"):
            decode_page(SMALL, wrong)
    noise = rng.integers(0, 256, (200, SMALL.coded_bytes), dtype=np.uint8)
    noise[::2, 16 : SMALL.tops] = 255
    assert decode_pages(SMALL, noise).shape == (200, SMALL.values)


def test_pages_that_cannot_gain_have_no_code() -> None:
    for shape, numbers in (
        ((52, 32, 16, 128), (104, 32, 2048)),
        ((3, 64, 1, 256), (12, 32, 256)),
        ((3, 16, 1, 256), (6, 16, 256)),
    ):
        code = find_code(PoolShape(*shape, "bfloat16"))
        assert code is not None and (code.blocks, code.rows, code.channels) == numbers
    assert find_code(PoolShape(1, 16, 1, 16, "bfloat16")) is None
    for layers in (1, 2, 3, 7):
        for tokens, heads in ((16, 2), (32, 1), (128, 3)):
            code = find_code(PoolShape(layers, tokens, heads, 16, "bfloat16"))
            assert code is not None and code.room >= 0
    for tokens, dtype in ((8, "bfloat16"), (32, "float16"), (32, "fp8"), (32, "float32")):
        assert find_code(PoolShape(3, tokens, 1, 256, dtype)) is None


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_million_pages_come_back() -> None:
    """Every kind, each page in ten forms: channels turned, signs and mantissas drawn anew."""
    count, kept = 0, 0
    for seed in range(1000):
        code, rng = CODES[seed % 2], np.random.default_rng(seed)
        made = make_pages(code, 100, seed).reshape(100, code.blocks, code.rows, code.channels)
        pages = np.concatenate([np.roll(made, turn, axis=3) for turn in range(10)]).reshape(1000, -1)
        pages[100:] ^= rng.integers(0, 65536, pages[100:].shape, dtype=np.uint16) & 0x807F
        coded, escapes = encode_pages(code, pages)
        fits = escapes <= code.room
        assert (decode_pages(code, coded)[fits] == pages[fits]).all() and not coded[~fits, HEADER_BYTES:].any()
        count, kept = count + len(pages), kept + int(fits.sum())
    assert count == 1_000_000 and kept > count // 2


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_pages_of_a_real_model_fit(engine_270m: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All pages of 16 and of 32 tokens that Gemma 3 270M writes."""
    torch = pytest.importorskip("torch")
    from wicore_trt.backends.torch.executor import TorchExecutor
    from wicore_trt.llm import LLM
    from wicore_trt.types import SamplingParams

    seen: dict[tuple[int, str, int], Any] = {}
    execute = TorchExecutor.execute

    def record(self: TorchExecutor, batch: Any) -> Any:
        result, tokens = execute(self, batch), self.layout.page_tokens
        for piece in batch.slices:
            for group, table in piece.pages.items():
                for i in range(piece.start // tokens, (piece.start + len(piece.token_ids)) // tokens):
                    if table[i] >= 0:
                        seen[piece.seq_id, group, i] = self.pools[group][table[i]].view(-1, tokens, 256).clone()
        return result

    monkeypatch.setattr(TorchExecutor, "execute", record)
    with LLM(engine_270m, kv__device_bytes="512MiB") as llm:
        text = Path(__file__).read_text(encoding="utf-8")
        llm.generate([text[:4000], text[4000:]], SamplingParams(max_tokens=64, temperature=0.0))
    assert len(seen) > 100
    for (_, group, _), page in seen.items():
        for tokens in (16, 32):
            code = PageCode(page.shape[0], tokens, 256)
            for part in page.split(tokens, dim=1):
                raw = part.contiguous().view(torch.int16).numpy().tobytes()
                coded = encode_page(code, raw)
                assert coded is not None, group
                assert decode_page(code, coded) == raw
