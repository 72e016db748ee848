"""Pages at rest: the published vectors of the cipher, what a part is bound to, keys per tenant, key files."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from threading import Thread

import pytest
from disk_campaign import tag_of
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from wicore_trt.errors import ConfigError
from wicore_trt.kv.disk.cipher import NONCE_BYTES, PageCipher, _TenantKey, load_key_file
from wicore_trt.kv.pages.page import Page

PAGE = Page(b"k" * 32, "global", 7, b"p" * 32, tag_of("a"))


def seal(cipher: PageCipher, data: bytes, header: bytes = b"h") -> tuple[bytes, bytes]:
    return cipher.seal(PAGE, 1, 3, 99, header, memoryview(data))


def test_part_keys_are_those_of_the_published_vectors() -> None:
    """c2sp.org/XAES-256-GCM, both vectors: the top bit of L clear and set."""
    nonce = b"ABCDEFGHIJKLMNOPQRSTUVWX"
    vectors = {
        1: "c8612c9ed53fe43e8e005b828a1631a0bbcb6ab2f46514ec4f439fcfd0fa969b",
        3: "e9c621d4cdd9b11b00a6427ad7e559aeedd66b3857646677748f8ca796cb3fd8",
    }
    for byte, key in vectors.items():
        assert _TenantKey(bytes([byte]) * 32).part_key(nonce) == (bytes.fromhex(key), nonce[12:])


def test_accumulated_vectors_of_key_derivation_and_gcm() -> None:
    """The specification's 10,000 random messages, hashed: the parts of `seal` put together by hand."""
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

    stream = hashlib.shake_128(b"").digest(10_000 * (32 + 24 + 2 * 256))
    place, total = 0, hashlib.shake_128()

    def take(count: int) -> bytes:
        nonlocal place
        place += count
        return stream[place - count : place]

    for _ in range(10_000):
        key, nonce = take(32), take(24)
        text = take(take(1)[0])
        bound = take(take(1)[0])
        part_key, iv = _TenantKey(key).part_key(nonce)
        total.update(AESGCM(part_key).encrypt(iv, text, bound))
    assert total.hexdigest(32) == "e6b9edf2df6cec60c8cbd864e2211b597fb69a529160cd040d56c0c210081939"


@given(st.binary(max_size=200), st.binary(max_size=40))
def test_what_was_sealed_opens(data: bytes, header: bytes) -> None:
    cipher = PageCipher(os.urandom(32))
    sealed, text = seal(cipher, data, header)
    assert len(sealed) == cipher.overhead_bytes and len(text) == len(data)
    out = bytearray(text)
    cipher.open(PAGE, 1, 3, 99, header, sealed, memoryview(out))
    assert bytes(out) == data


@given(st.data())
def test_one_changed_bit_anywhere_does_not_open(data: st.DataObject) -> None:
    cipher = PageCipher(os.urandom(32))
    sealed, text = seal(cipher, data.draw(st.binary(min_size=1, max_size=100)), b"head")
    both = bytearray(sealed + text + b"head")
    bit = data.draw(st.integers(0, len(both) * 8 - 1))
    both[bit // 8] ^= 1 << bit % 8
    cut, end = len(sealed), len(sealed) + len(text)
    with pytest.raises(ValueError):
        cipher.open(PAGE, 1, 3, 99, bytes(both[end:]), bytes(both[:cut]), memoryview(both)[cut:end])


@pytest.mark.parametrize(
    "change",
    [
        {"key": b"x" * 32},
        {"group": "local"},
        {"index": 8},
        {"parent": None},
        {"parent": b"q" * 32},
        {"tenant": tag_of("b")},
        {"part": 0},
        {"parts": 4},
        {"write_id": 100},
        {"header": b"hh"},
        {"master": b"m" * 32},
    ],
)
def test_a_part_is_bound_to_what_it_was_sealed_with(change: dict[str, object]) -> None:
    master = os.urandom(32)
    sealed, text = seal(PageCipher(master), bytes(64))
    where = {"part": 1, "parts": 3, "write_id": 99, "header": b"h", "master": master}
    page = replace(PAGE, **{k: v for k, v in change.items() if k not in where})
    where |= {k: v for k, v in change.items() if k in where}
    cipher = PageCipher(where.pop("master"))
    with pytest.raises(ValueError):
        cipher.open(page, **where, sealed=sealed, data=memoryview(bytearray(text)))


def test_lengths_are_part_of_what_is_bound() -> None:
    """Moving a byte from one field to the next must not open: "global"+"p.." and "globalp"+"..."."""
    cipher = PageCipher(os.urandom(32))
    sealed, text = seal(cipher, bytes(16), b"h")
    moved = replace(PAGE, group="globalp", parent=b"p" * 31)
    with pytest.raises(ValueError):
        cipher.open(moved, 1, 3, 99, b"h", sealed, memoryview(bytearray(text)))


def test_the_same_page_never_looks_the_same() -> None:
    """Rewrites and restarts with the same write id get fresh nonces, so equal pages cannot be seen on disk."""
    master = os.urandom(32)
    seen = [seal(PageCipher(master), bytes(32)) for _ in range(2000)]
    assert len({sealed[:NONCE_BYTES] for sealed, _ in seen}) == len({text for _, text in seen}) == 2000


def test_lengths_that_do_not_fit_do_not_open() -> None:
    cipher = PageCipher(os.urandom(32))
    sealed, text = seal(cipher, bytes(64))
    for bad, size in ((sealed[:-1], 64), (b"", 64), (sealed, 63), (sealed, 65)):
        with pytest.raises(ValueError):
            cipher.open(PAGE, 1, 3, 99, b"h", bad, memoryview(bytearray(text.ljust(size)[:size])))


def test_threads_share_a_cipher() -> None:
    cipher, wrong = PageCipher(os.urandom(32)), []

    def work(seed: int) -> None:
        page = replace(PAGE, tenant=tag_of(str(seed % 3)))
        for i in range(200):
            data = os.urandom(100)
            sealed, text = cipher.seal(page, 0, 1, i, b"", memoryview(data))
            out = bytearray(text)
            cipher.open(page, 0, 1, i, b"", sealed, memoryview(out))
            wrong.extend([i] if out != data else [])

    threads = [Thread(target=work, args=(seed,)) for seed in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_many_tenants_are_kept_in_bounds() -> None:
    cipher = PageCipher(os.urandom(32))
    first = cipher.seal(PAGE, 0, 1, 0, b"", memoryview(b"x" * 20))
    for i in range(1500):
        cipher.seal(replace(PAGE, tenant=tag_of(str(i))), 0, 1, 0, b"", memoryview(b""))
    assert cipher._tenant_key.cache_info().currsize <= 1024
    out = bytearray(first[1])
    cipher.open(PAGE, 0, 1, 0, b"", first[0], memoryview(out))
    assert out == b"x" * 20


def key_file(path: Path, data: bytes, mode: int = 0o600) -> Path:
    path.write_bytes(data)
    path.chmod(mode)
    return path


def test_key_files(tmp_path: Path) -> None:
    key = os.urandom(31) + b"\xff"
    assert load_key_file(key_file(tmp_path / "raw", key)) == key
    assert load_key_file(key_file(tmp_path / "hex", key.hex().encode() + b"\n", 0o400)) == key


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o601, 0o666])
def test_a_key_that_others_may_use_is_refused(tmp_path: Path, mode: int) -> None:
    with pytest.raises(ConfigError, match="chmod 600"):
        load_key_file(key_file(tmp_path / "key", os.urandom(32), mode))


@pytest.mark.parametrize("data", [b"", b"x" * 31, b"x" * 33, b"0" * 32, b"0" * 63, b"g" * 64, b"0" * 66, b"\xff" * 64])
def test_a_file_without_a_key_is_refused(tmp_path: Path, data: bytes) -> None:
    with pytest.raises(ConfigError, match="64 hexadecimal digits"):
        load_key_file(key_file(tmp_path / "key", data))


def test_a_missing_key_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="umask 077; head -c 32 /dev/urandom"):
        load_key_file(tmp_path / "none")
    with pytest.raises(ConfigError, match="directory"):
        load_key_file(tmp_path)
    with pytest.raises(ConfigError, match="32"):
        PageCipher(b"short")
