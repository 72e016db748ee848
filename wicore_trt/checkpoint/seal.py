"""Seals: JSON objects that carry a digest of themselves, so that a change by hand or by a bad disk is seen.

For `config.json` of a checkpoint and `engine.json`. It must not know what their keys mean. Invariant: an object whose
seal is whole has exactly the keys and values that were sealed; white space and the order of keys do not count.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any

from wicore_trt.checkpoint.digest import DIGEST_BYTES, canonical_json

SEAL = "seal"
"""The key under which an object carries its seal, which is not under the seal."""
_SHORT_BYTES = 8
_SHOWN = 80


def seal_of(data: Mapping[str, Any]) -> dict[str, Any]:
    """What a JSON object carries so that a change of it is seen: the digest of its canonical form, and short ones of
    its values and of theirs, which tell what was changed."""
    keys = {name: _digest(value, _SHORT_BYTES) for name, value in _leaves(data).items()}
    return {"digest": _digest(data, DIGEST_BYTES), "keys": keys}


def broken_seal(data: Mapping[str, Any], seal: object) -> str | None:
    """What is wrong with `data`, whose `seal_of` was `seal` when it was written, naming keys; None for nothing."""
    if not isinstance(seal, dict) or {*seal} != {"digest", "keys"} or not isinstance(seal["keys"], dict):
        return "its seal is missing or damaged"
    if seal == seal_of(data):
        return None
    leaves, keys = _leaves(data), seal["keys"]
    changed = [n for n, value in leaves.items() if n in keys and keys[n] != _digest(value, _SHORT_BYTES)]
    found = {"was changed": changed, "is missing": {*keys} - {*leaves}, "was added": {*leaves} - {*keys}}
    named = [f"{sorted(names)[0][:_SHOWN]!r} {what}" for what, names in found.items() if names]
    return named[0] if named else "its seal was changed"


def _leaves(data: Mapping[str, Any]) -> dict[str, Any]:
    """Values by key, those of objects one level down by "key.key"."""
    leaves: dict[str, Any] = {}
    for name, value in data.items():
        inner = value if isinstance(value, dict) and value else None
        leaves |= {f"{name}.{key}": below for key, below in inner.items()} if inner else {name: value}
    return leaves


def _digest(value: object, size: int) -> str:
    return hashlib.blake2b(canonical_json(value), digest_size=size, person=b"wicore-seal").hexdigest()
