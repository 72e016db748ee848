"""Header blocks and records: only the very page, part, slot, write and namespace opens, and no changed bit does."""

from __future__ import annotations

import dataclasses
import random

import numpy as np
import pytest
from disk_store_helpers import SLOT, SPACE, content, make_page
from msgspec import structs

from wicore_trt.kv.disk.cipher import PageCipher
from wicore_trt.kv.disk.format import BLOCK_BYTES, CorruptSlotError, Namespace, SlotFormat, record_fields

PAGE = make_page(4)
CIPHERS = [None, PageCipher(b"k" * 32)]


def sealed(cipher: PageCipher | None, space: Namespace = SPACE) -> tuple[bytearray, bytearray]:
    block, room = bytearray(BLOCK_BYTES), bytearray(SLOT)
    payload = memoryview(content(4, 0))
    stored = SlotFormat(space, cipher).seal(memoryview(block), PAGE, 1, 3, 9, 77, payload, memoryview(room))
    return block, bytearray(stored)


def opened(
    cipher: PageCipher | None,
    block: bytearray,
    payload: bytearray,
    asked: tuple = (PAGE, 1, 3, 9, 77),
    space: Namespace = SPACE,
) -> bytes:
    target = bytearray(payload)
    SlotFormat(space, cipher).open(memoryview(block), *asked, memoryview(target))
    return bytes(target)


@pytest.mark.parametrize("cipher", CIPHERS)
def test_what_was_sealed_opens(cipher: PageCipher | None) -> None:
    block, stored = sealed(cipher)
    assert opened(cipher, block, stored) == content(4, 0)
    assert (bytes(stored) == content(4, 0)) == (cipher is None)


@pytest.mark.parametrize("cipher", CIPHERS)
def test_anything_else_that_is_asked_for_does_not_open(cipher: PageCipher | None) -> None:
    block, stored = sealed(cipher)
    other_pages = [
        structs.replace(PAGE, key=b"x" * 32),
        structs.replace(PAGE, group="global"),
        structs.replace(PAGE, index=5),
        structs.replace(PAGE, parent=None),
        structs.replace(PAGE, parent=bytes(32)),
        structs.replace(PAGE, tenant=b"x" * 16),
    ]
    asked = [(page, 1, 3, 9, 77) for page in other_pages]
    asked += [(PAGE, 0, 3, 9, 77), (PAGE, 1, 2, 9, 77), (PAGE, 1, 3, 8, 77), (PAGE, 1, 3, 9, 78)]
    for other in asked:
        with pytest.raises(CorruptSlotError):
            opened(cipher, block, stored, other)
    with pytest.raises(CorruptSlotError):
        opened(cipher, block, stored[:-512])


@pytest.mark.parametrize(
    "change",
    [
        {"engine": "other"},
        {"kernels": "native"},
        {"page_tokens": 32},
        {"layout": {"global": SLOT, "local": SLOT}},
        {"kv_dtype": "float16"},
        {"rank": 1},
        {"world": 2},
    ],
)
def test_another_namespace_does_not_open(change: dict) -> None:
    other = dataclasses.replace(SPACE, **change)
    assert other.digest != SPACE.digest
    block, stored = sealed(None)
    with pytest.raises(CorruptSlotError):
        opened(None, block, stored, space=other)


def test_the_order_of_the_groups_is_not_part_of_a_namespace() -> None:
    turned = dataclasses.replace(SPACE, layout=dict(reversed(SPACE.layout.items())))
    assert turned.digest == SPACE.digest and turned.groups == SPACE.groups


def test_cipher_and_plain_do_not_read_each_other() -> None:
    for mine, other in (CIPHERS, reversed(CIPHERS)):
        block, stored = sealed(mine)
        with pytest.raises(CorruptSlotError):
            opened(other, block, stored)
    block, stored = sealed(CIPHERS[1])
    with pytest.raises(CorruptSlotError):
        opened(PageCipher(b"j" * 32), block, stored)


@pytest.mark.parametrize("cipher", CIPHERS)
def test_no_changed_bit_opens(cipher: PageCipher | None) -> None:
    block, stored = sealed(cipher)
    for _ in range(300):
        target = random.choice([block, stored])
        at, bit = random.randrange(len(target)), 1 << random.randrange(8)
        target[at] ^= bit
        with pytest.raises(CorruptSlotError):
            opened(cipher, block, stored)
        target[at] ^= bit
    assert opened(cipher, block, stored) == content(4, 0)


def test_a_record_has_the_fields_that_numpy_reads() -> None:
    record = SlotFormat(SPACE, None).make_record(PAGE, 1, 3, 9, 77)
    found = np.frombuffer(record, dtype=record_fields(SPACE.page_tokens))[0]
    assert (found["part"], found["parts"], found["slot"], found["write_id"], found["index"]) == (1, 3, 9, 77, 4)
    assert found["key"].item() == PAGE.key and SPACE.groups[found["group"]] == PAGE.group
