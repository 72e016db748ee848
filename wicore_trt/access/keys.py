"""API keys, and the tenant of each.

Knows keys and their file; it must not know calls. Invariants: no key is in an error, a log line or a repr; the time of
a look-up reveals nothing of the keys, as it compares digests under a random key of this server.
"""

from __future__ import annotations

import os
import re
import secrets
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from pathlib import Path

from wicore_trt.errors import ConfigError
from wicore_trt.files import LIST_BYTES, UntrustedFiles, quote_arg

TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")
KEY = re.compile(r"[!-9;-~]{16,512}")  # visible ASCII but the colon
ROLE = re.compile(r"(?P<operator>operator)|requests=(?P<requests>[1-9]\d{0,11})|tokens=(?P<tokens>[1-9]\d{0,11})")


@dataclass(frozen=True, slots=True)
class Identity:
    """Caller that a key stands for. An operator sees everybody's counts and KV events, a tenant its own requests'.
    Rates are the key's own, in place of the tenant's. `key` names the key in every process without revealing it."""

    tenant: str = ""
    operator: bool = False
    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    key: bytes = field(default=b"", repr=False, compare=False)


_SECRET = secrets.token_bytes(32)
EVERYBODY = Identity("", operator=True)
"""The one trusted user of a server that has no keys, and the owner of its single key."""


class KeyRing:
    """Identities by key, and by the keys' names. Not `needed` without keys: everybody is the one trusted user."""

    def __init__(self, identities: Mapping[str, Identity]) -> None:
        named = {
            key: replace(identity, key=blake2b(key.encode(errors="surrogateescape"), digest_size=16).digest())
            for key, identity in identities.items()
        }
        self._identities = {_digest_key(key): identity for key, identity in named.items()}
        self.named = {identity.key: identity for identity in named.values()}
        self.needed = bool(identities)

    @classmethod
    def from_files(cls, api_key: str | None, keys_file: str | None) -> KeyRing:
        """Read the operator's key `server.api_key` and the keys of `server.keys_file`. Raises ConfigError for a file
        that cannot be read, that others may read, or that has invalid lines."""
        found = read_keys(keys_file) if keys_file is not None else {}
        if api_key is not None:
            if found.get(api_key, EVERYBODY) != EVERYBODY:
                raise ConfigError("server.api_key is also in server.keys_file.", fix="Remove one of them.")
            found[api_key] = EVERYBODY
        return cls(found)

    def replace_keys(self, other: KeyRing) -> None:
        """Replace the keys by another ring's. Open calls keep their identity and check it by `refresh_identity`."""
        self._identities, self.named, self.needed = other._identities, other.named, other.needed

    def find_identity(self, key: str) -> Identity | None:
        return self._identities.get(_digest_key(key)) if self.needed else EVERYBODY

    def refresh_identity(self, who: Identity) -> Identity | None:
        """Find the present identity of `who`'s key, None where the key was revoked."""
        return self.named.get(who.key) if self.needed else EVERYBODY


def _digest_key(key: str) -> bytes:
    return blake2b(key.encode(errors="surrogateescape"), key=_SECRET, digest_size=32).digest()


def read_keys(path: str) -> dict[str, Identity]:
    """Read identities by key from a file. Raises ConfigError; no key is in its message. A line is `TENANT:KEY`, with
    optional `:operator`, and `:requests=N` and `:tokens=N` for the key's own rates a minute; empty and # lines are
    skipped. A tenant may have several keys, so that one can replace another."""
    door = UntrustedFiles(
        error=ConfigError, fix="Give a regular file: each process of the server reads it, and again on reload."
    )
    try:
        with door.open_file(Path(path), limit=LIST_BYTES) as file:
            status = os.fstat(file.fileno())
            lines = file.read(LIST_BYTES).decode().splitlines()
    except UnicodeDecodeError:
        raise ConfigError(f"server.keys_file: cannot read {path}: it is not UTF-8.") from None
    except ConfigError as error:
        reason = error.message.removeprefix(f"{path} ")
        raise ConfigError(f"server.keys_file: cannot read {path}: it {reason}", fix=error.fix) from None
    if status.st_mode & (stat.S_IRWXG | stat.S_IRWXO):
        raise ConfigError(f"server.keys_file: {path} is open to other users.", fix=f"Run: chmod 600 {quote_arg(path)}")
    found: dict[str, Identity] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        tenant, _, rest = line.strip().partition(":")
        key, *roles = rest.split(":")
        said = [(name, text) for role in map(ROLE.fullmatch, roles) if role for name, text in role.groupdict().items()]
        given = {name: text for name, text in said if text is not None}
        wrong = None
        if not TENANT.fullmatch(tenant):
            wrong = "a tenant's name has 1 to 64 letters, digits, dots, dashes and underscores"
        elif not KEY.fullmatch(key):
            wrong = "a key has 16 to 512 visible ASCII characters without colons"
        elif len(given) != len(roles):
            wrong = "behind a key stand at most :operator, :requests=N and :tokens=N, each once"
        elif key in found:
            wrong = "the key is there already"
        if wrong is not None:
            raise ConfigError(f"{path}, line {number}: {wrong}.", fix="Write TENANT:KEY or TENANT:KEY:operator.")
        requests, tokens = (int(given[kind]) if kind in given else None for kind in ("requests", "tokens"))
        found[key] = Identity(tenant, "operator" in given, requests, tokens)
    if not found:
        raise ConfigError(f"server.keys_file: {path} holds no key.", fix="Write TENANT:KEY, one key a line.")
    return found
