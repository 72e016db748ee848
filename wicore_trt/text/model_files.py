"""Read the small files beside tokenizer.json: BOS, the ends of a generation, the chat template.

Must not know how text becomes ids. Invariant: files that contradict each other or name unknown tokens are refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tokenizers

from wicore_trt.errors import EngineFormatError, shown
from wicore_trt.files import CONFIG_ENDS, UntrustedFiles
from wicore_trt.text.chat import ChatTemplate

TOKENIZER = "tokenizer.json"
FILES = (
    TOKENIZER, "tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "config.json",
    "chat_template.jinja", "chat_template.json",
)  # fmt: skip
"""The files that say how a model's text becomes token ids, where a conversation's turns begin and what ends them."""
REBUILD = "Build the engine again from a source that has its tokenizer files."


class ModelFiles:
    def __init__(self, files: Mapping[str, bytes], path: Path, backend: tokenizers.Tokenizer) -> None:
        self._files, self._path = files, path
        self._door = UntrustedFiles(path, EngineFormatError, REBUILD)
        self._backend = backend
        self.tokenizer_config = self._read_json("tokenizer_config.json")
        self._names = self._read_json("special_tokens_map.json") | self.tokenizer_config
        generation, config = self._read_json("generation_config.json"), self._read_json("config.json")
        inner = config.get("text_config")
        self._configs = {
            "generation_config.json": generation,
            "config.json": {"eos_token_id": generation.get(CONFIG_ENDS)} | config,
            "config.json: text_config": inner if isinstance(inner, dict) else {},
        }

    def _read_json(self, name: str) -> dict[str, Any]:
        """Read a JSON object, {} when there is no such file."""
        if name not in self._files:
            return {}
        value = self._door.parse_json(self._files[name], self._path / name)
        if not isinstance(value, dict):
            raise EngineFormatError(f"{self._path / name} must hold a JSON object.", fix=REBUILD)
        return value

    def read_bos(self) -> int | None:
        name = _read_content(self._names.get("bos_token"))
        if name is not None:
            return self._find_token("bos_token", name)
        ids = [i for place, config in self._configs.items() for i in self._read_ids(config, "bos_token_id", place)]
        return ids[0] if ids else None

    def read_ends(self, *, every: bool) -> dict[int, list[str]]:
        """Read the ids that end a generation with all places that name them, or with the first place that has any."""
        found: dict[int, list[str]] = {}
        for place, config in self._configs.items():
            for end in self._read_ids(config, "eos_token_id", place):
                found.setdefault(end, []).append(place)
            if found and not every:
                return found
        for place in ("tokenizer_config.json", "special_tokens_map.json"):
            name = _read_content(self._read_json(place).get("eos_token"))
            if name is not None and (not found or self._backend.token_to_id(name) is not None):
                found.setdefault(self._find_token("eos_token", name), []).append(place)
            if found and not every:
                return found
        return found

    def read_chat_template(self) -> ChatTemplate | None:
        source, origin = self._find_template()
        if source is None:
            return None
        extra = self._names.get("extra_special_tokens")  # a list, or an object of names that the template may use
        given = {**self._names, **(extra if isinstance(extra, Mapping) else {})}
        texts = {name: _read_content(token) for name, token in given.items() if name.endswith("_token")}
        roles = dict.fromkeys(("bos_token", "eos_token", "unk_token", "pad_token"), "")
        return ChatTemplate(source, roles | {name: text for name, text in texts.items() if text}, origin)

    def _find_template(self) -> tuple[str | None, Path]:
        jinja = "chat_template.jinja"
        if jinja in self._files:
            return self._door.decode_text(self._files[jinja], self._path / jinja), self._path / jinja
        for name in ("chat_template.json", "tokenizer_config.json"):
            value, path = self._read_json(name).get("chat_template"), self._path / name
            if isinstance(value, list):  # several named templates
                named = {t.get("name"): t.get("template") for t in value if isinstance(t, dict)}
                value = named.get("default")
                if named and value is None:
                    problem = f"chat_template in {path} has {shown(next(iter(named)))} and none of the name default."
                    raise EngineFormatError(problem, fix="Name the one that chats default.")
            if value is not None:
                if not isinstance(value, str):
                    raise EngineFormatError(f"chat_template in {path} must be a string.", fix=REBUILD)
                return value, path
        return None, self._path

    def _find_token(self, role: str, name: str) -> int:
        index = self._backend.token_to_id(name)
        if index is None:
            raise EngineFormatError(f"{role} {shown(name)} in {self._path} is not in tokenizer.json.", fix=REBUILD)
        return int(index)

    def _read_ids(self, config: Mapping[str, Any], key: str, place: str) -> tuple[int, ...]:
        value = config.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) and i >= 0 for i in ids):
            where = self._path / place
            raise EngineFormatError(f"{key} in {where} must be token ids, got {shown(value)}.", fix=REBUILD)
        return tuple(dict.fromkeys(ids))


def _read_content(token: object) -> str | None:
    """Read a token's text, written plainly or as {"content": ...}."""
    value = token.get("content") if isinstance(token, Mapping) else token
    return value if isinstance(value, str) else None
