"""Encryption of KV pages at rest: AES-256-GCM with a key of its own per tenant.

A tenant's key is HKDF-SHA256 of the master key, so that a page sealed for one tenant cannot be opened with another
tenant's key. Each part is sealed with XAES-256-GCM (c2sp.org/XAES-256-GCM): a key for this one part is derived from the
tenant's key and 96 bits of a random 192-bit nonce; the other 96 bits are the nonce of AES-256-GCM.

Why 192 random bits: a nonce must never repeat under one key, over rewrites of a slot, restarts, erased indexes and
copies of the directory. Counters (write ids) begin again when an index is lost, and with 96 random bits a key is used
up after 2^32 parts. With 192 random bits 2^80 parts leave a risk of 2^-32, and nothing has to be remembered.

Must not know files or slots. Invariant: a part opens only under its tenant, page, part number, write id and header.
"""

from __future__ import annotations

import os
import shlex
import stat
import struct
from functools import lru_cache

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from wicore_trt.errors import ConfigError
from wicore_trt.kv.pages.page import Page

KEY_BYTES = 32
NONCE_BYTES = 24
TAG_BYTES = 16

TAG_FAULT = "encryption tag: changed, or another key"
"""Message of the ValueError for a part that does not open."""

_TENANTS = 1024  # derived keys kept; deriving one takes some 10 us
_BLOCK = 16  # AES; the library wants this much room behind the output of update_into


class PageCipher:
    """Seals and opens the parts of pages, on any thread. Raises ConfigError unless `master_key` has 32 bytes."""

    overhead_bytes = NONCE_BYTES + TAG_BYTES

    def __init__(self, master_key: bytes) -> None:
        if len(master_key) != KEY_BYTES:
            raise ConfigError(f"The key has {len(master_key)} bytes.", fix=f"Give one of {KEY_BYTES} bytes.")

        def tenant_key(tenant: bytes) -> _TenantKey:
            kdf = HKDF(hashes.SHA256(), KEY_BYTES, salt=None, info=b"wicore-kv" + tenant)
            return _TenantKey(kdf.derive(master_key))

        self._tenant_key = lru_cache(maxsize=_TENANTS)(tenant_key)

    def seal(
        self, page: Page, part: int, parts: int, write_id: int, header: bytes, payload: memoryview
    ) -> tuple[bytes, bytes]:
        """(nonce and tag of `overhead_bytes`, ciphertext as long as `payload`). `header` is bound, not encrypted."""
        nonce = os.urandom(NONCE_BYTES)
        key, iv = self._tenant_key(page.tenant).part_key(nonce)
        seal = Cipher(algorithms.AES(key), modes.GCM(iv)).encryptor()
        seal.authenticate_additional_data(_bind_part(page, part, parts, write_id, header))
        ciphertext = seal.update(payload) + seal.finalize()
        return nonce + seal.tag, ciphertext

    def open(
        self, page: Page, part: int, parts: int, write_id: int, header: bytes, sealed: bytes, data: memoryview
    ) -> None:
        """Decrypt `data` in place. `sealed` is what `seal` returned first. ValueError when anything differs from what
        was sealed; `data` then means nothing."""
        if len(sealed) != self.overhead_bytes:
            raise ValueError("nonce and tag have the wrong length")
        key, iv = self._tenant_key(page.tenant).part_key(sealed[:NONCE_BYTES])
        unseal = Cipher(algorithms.AES(key), modes.GCM(iv, sealed[NONCE_BYTES:])).decryptor()
        unseal.authenticate_additional_data(_bind_part(page, part, parts, write_id, header))
        head = max(0, len(data) - _BLOCK)
        tail = bytes(data[head:])
        if head:
            unseal.update_into(data[:head], data)
        data[head:] = unseal.update(tail)
        try:
            unseal.finalize()
        except InvalidTag:
            raise ValueError(TAG_FAULT) from None


class _TenantKey:
    """Step 1 to 6 of XAES-256-GCM: from a tenant's key and a 24-byte nonce to the key and nonce of one part."""

    def __init__(self, key: bytes) -> None:
        self._ecb = Cipher(algorithms.AES(key), modes.ECB())
        block = int.from_bytes(self._ecb.encryptor().update(bytes(_BLOCK)), "big")
        # CMAC's first subkey (NIST SP 800-38B): a doubling in GF(2^128).
        self._subkey = (block << 1 & (1 << 128) - 1) ^ (0x87 if block >> 127 else 0)

    def part_key(self, nonce: bytes) -> tuple[bytes, bytes]:
        blocks = (struct.pack(">HBx", i, ord("X")) + nonce[:12] for i in (1, 2))
        masked = (int.from_bytes(block, "big") ^ self._subkey for block in blocks)
        return self._ecb.encryptor().update(b"".join(block.to_bytes(_BLOCK, "big") for block in masked)), nonce[12:]


def _bind_part(page: Page, part: int, parts: int, write_id: int, header: bytes) -> bytes:
    """Everything that a part is sealed to. Lengths go first, so that no two inputs give the same bytes."""
    group, parent = page.group.encode(), page.parent or b""
    sizes = struct.pack("<5I", len(page.key), len(group), len(parent), len(page.tenant), len(header))
    numbers = struct.pack("<QIIQ", page.index, part, parts, write_id)
    return b"".join((sizes, numbers, page.key, group, parent, page.tenant, header))


def load_key_file(path: str | os.PathLike[str]) -> bytes:
    """Read a master key: 32 raw bytes, or 64 hexadecimal digits. Raises ConfigError, also if others may read it."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            mode = os.fstat(file.fileno()).st_mode
            if not stat.S_ISREG(mode):  # a pipe would hold up who reads it
                raise ConfigError(f"Key file {path} is not a regular file.", fix="Give the path of a regular file.")
            data = file.read(4 * KEY_BYTES)
    except OSError as error:
        fix = f"Make one: (umask 077; head -c {KEY_BYTES} /dev/urandom > {shlex.quote(str(path))})"
        raise ConfigError(f"Key file {path}: {error.strerror or error}.", fix=fix) from error
    if mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"Key file {path} is open to other users.", fix=f"Run: chmod 600 {shlex.quote(str(path))}")
    try:
        key = bytes.fromhex(data.decode("ascii"))  # first: 32 hexadecimal digits are half a key, not a raw one
    except ValueError:
        key = data
    if len(key) != KEY_BYTES:
        fix = f"It must hold {KEY_BYTES} raw bytes, or {2 * KEY_BYTES} hexadecimal digits."
        raise ConfigError(f"Key file {path} holds no key.", fix=fix)
    return key
