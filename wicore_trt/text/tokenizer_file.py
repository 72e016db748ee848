"""Check tokenizer.json: the parts that Gemma 3's tokenizers are made of, within bounds.

The library `tokenizers` builds whatever a file asks for, such as regular expressions and replacements that multiply
text, and panics on some of it, so the file is checked first. Must not know other files or the model. Invariants:
loading costs time and memory in proportion to the file, use in proportion to the text; text grows to at most
MAX_GROWTH times its length and a few characters; no id and no token stands for two.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from itertools import chain
from math import prod
from pathlib import Path
from typing import Annotated, Any, Literal

import tokenizers
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from wicore_trt.collector import collection_paused
from wicore_trt.errors import EngineFormatError, first_fault, shown
from wicore_trt.files import UntrustedFiles

MAX_GROWTH = 8
"""Times by which normalizing or decoding may make a text longer; Gemma's replace one character by one."""

_MAX_VALUES = 4_000_000  # a JSON value takes some 60 bytes of memory; Gemma's file has 1.3 million
_MAX_GROUPS = 1_500_000  # objects and lists; Gemma's file has 0.5 million
_MAX_ID = 1 << 24
_MAX_TOKEN = 512  # characters; Gemma's longest has 31
_MAX_ADDED = 1 << 20  # characters of all added tokens, which the library makes an automaton of; Gemma's have 80,000
_SAID = 300  # characters of what the library says, which may quote the whole file

_Short = Annotated[str, Field(max_length=16)]
_Character = Annotated[str, Field(min_length=1, max_length=1)]
_Few = Field(max_length=8)


class _Part(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", protected_namespaces=())


class _StringPattern(_Part):
    String: Annotated[str, Field(min_length=1, max_length=16)]


class _AnyText(_Part):
    String: _Short


class _Replace(_Part):
    type: Literal["Replace"]
    pattern: _StringPattern
    content: _Short


class _Prepend(_Part):
    type: Literal["Prepend"]
    prepend: _Short


class _Normalizers(_Part):
    type: Literal["Sequence"]
    normalizers: Annotated[list[Annotated[_Replace | _Prepend, Field(discriminator="type")]], _Few]


class _Split(_Part):
    type: Literal["Split"]
    pattern: _AnyText
    behavior: Literal["MergedWithPrevious", "MergedWithNext", "Isolated", "Contiguous"]  # "Removed" would lose text
    invert: Literal[False]


class _Metaspace(_Part):
    type: Literal["Metaspace"]
    replacement: _Character
    prepend_scheme: Literal["always", "never", "first"]
    split: bool = True


class _Splitters(_Part):
    type: Literal["Sequence"]
    pretokenizers: Annotated[list[Annotated[_Split | _Metaspace, Field(discriminator="type")]], _Few]


class _Plain(_Part):
    type: Literal["ByteFallback", "Fuse"]


class _Strip(_Part):
    type: Literal["Strip"]
    content: _Character
    start: Annotated[int, Field(ge=0, le=16)]
    stop: Literal[0]  # the library panics on a token of fewer characters


class _Decoders(_Part):
    type: Literal["Sequence"]
    decoders: Annotated[list[Annotated[_Replace | _Plain | _Strip | _Metaspace, Field(discriminator="type")]], _Few]


class _Template(_Part):
    """Template of BOS, not used: `text.tokenizer` adds BOS itself."""

    type: Literal["TemplateProcessing"]
    single: Annotated[list[dict[str, Any]], _Few]
    pair: Annotated[list[dict[str, Any]], _Few]
    special_tokens: Annotated[dict[str, dict[str, Any]], _Few]


_Id = Annotated[int, Field(ge=0, lt=_MAX_ID)]
_Token = Annotated[str, Field(max_length=_MAX_TOKEN)]


class _WordLevel(_Part):
    type: Literal["WordLevel"]
    vocab: dict[_Token, _Id]
    unk_token: str


class _Bpe(_Part):
    type: Literal["BPE"]
    vocab: dict[_Token, _Id]
    merges: list[Any]  # the library looks at each
    unk_token: str | None = None
    dropout: Annotated[float, Field(ge=0, le=0)] | None = None  # with it one text has many encodings
    continuing_subword_prefix: Literal[""] | None = None
    end_of_word_suffix: Literal[""] | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


class _Added(_Part):
    id: _Id
    content: Annotated[_Token, Field(min_length=1)]
    single_word: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    special: bool


class _File(_Part):
    version: Literal["1.0"] = "1.0"
    truncation: dict[str, Any] | None = None  # switched off when it is loaded, as padding is
    padding: dict[str, Any] | None = None
    added_tokens: list[_Added] = []
    normalizer: Annotated[_Replace | _Prepend | _Normalizers, Field(discriminator="type")] | None = None
    pre_tokenizer: Annotated[_Split | _Metaspace | _Splitters, Field(discriminator="type")] | None = None
    post_processor: _Template | None = None
    decoder: Annotated[_Replace | _Plain | _Strip | _Metaspace | _Decoders, Field(discriminator="type")] | None = None
    model: Annotated[_Bpe | _WordLevel, Field(discriminator="type")]


@collection_paused()  # a million values are made and stay until the file has been checked
def read_tokenizer(data: bytes, path: Path, fix: str, *, checked: bool = False) -> tokenizers.Tokenizer:
    """Load the tokenizer from the bytes of the file `path`, without padding and truncation. Raises EngineFormatError
    with `fix`, naming the key, for contents that are not Gemma's kind or contradict each other. `checked`: the same
    bytes were found right before; to check them takes as long as to load them."""
    door = UntrustedFiles(path.parent, EngineFormatError, fix)
    added = [] if checked else _check_file(data, path, door)
    try:
        backend = tokenizers.Tokenizer.from_buffer(data)
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":  # Rust's, of no Exception's kind
            raise door.make_error(path, f"cannot be read: {' '.join(str(error).split())[:_SAID]}") from error
        raise
    backend.no_padding()
    backend.no_truncation()
    loaded = {index: token.content for index, token in backend.get_added_tokens_decoder().items()}
    for token in added:  # the library numbers a token that the vocabulary lacks as it likes
        if loaded.get(token.id) != token.content:
            raise door.make_error(
                path, f"gives the added token {shown(token.content)} the id {token.id}, which it cannot have"
            )
    return backend


def _check_file(data: bytes, path: Path, door: UntrustedFiles) -> list[_Added]:
    """Check all but what the library does with the added tokens, which are returned."""
    if data.count(b",") > _MAX_VALUES or data.count(b"[") + data.count(b"{") > _MAX_GROUPS:
        raise door.make_error(path, f"has more than {_MAX_VALUES} values or {_MAX_GROUPS} objects and lists")
    try:
        file = _File.model_validate(door.parse_json(data, path))
    except ValidationError as error:
        raise door.make_error(path, f"is not a tokenizer of Gemma 3: {first_fault(error)}") from error
    wrong = _find_contradiction(file)
    if wrong:
        raise door.make_error(path, wrong)
    return file.added_tokens


def _find_contradiction(file: _File) -> str | None:
    """Find a contradiction in the file, as the rest of a sentence about it."""
    model = file.model
    for name, ids in (("model.vocab", model.vocab.values()), ("added_tokens", [t.id for t in file.added_tokens])):
        if (double := _find_double(ids)) is not None:
            return f"gives the id {double} to two tokens of {name}"
    if (double := _find_double(token.content for token in file.added_tokens)) is not None:
        return f"has the added token {shown(double)} twice"
    if sum(len(token.content) for token in file.added_tokens) > _MAX_ADDED:
        return f"has more than {_MAX_ADDED} characters of added tokens"
    if model.unk_token is not None and model.unk_token not in model.vocab:
        return f"lacks its unknown token {shown(model.unk_token)} in model.vocab"
    for key, part in (("normalizer", file.normalizer), ("decoder", file.decoder)):
        steps: list[Any] = [part]
        if isinstance(part, (_Normalizers, _Decoders)):
            steps = list(part.normalizers if isinstance(part, _Normalizers) else part.decoders)
        replaced = [max(1.0, len(s.content) / len(s.pattern.String)) for s in steps if isinstance(s, _Replace)]
        if prod(replaced) > MAX_GROWTH:
            return f"makes text more than {MAX_GROWTH} times longer by its {key}"
    return None


def _find_double(values: Iterable[Any]) -> Any | None:
    seen: set[Any] = set()
    return next((value for value in values if value in seen or seen.add(value)), None)  # type: ignore[func-returns-value]


def longest_token(backend: tokenizers.Tokenizer, vocabulary: Iterable[str]) -> int | None:
    """Return the most characters of text that a token stands for, None where the tokenizer's parts do not say.
    `vocabulary` has the texts of the tokens that are not added ones. Exact for Gemma."""
    model, added = backend.model, backend.get_added_tokens_decoder().values()
    if type(model).__name__ != "BPE" or not model.byte_fallback or len(set(find_byte_ids(backend))) < 256:
        return None
    if any(token.lstrip or token.rstrip for token in added):
        return None
    replace = re.fullmatch(r'Replace\(pattern=String\("([^"\\]*)"\), content="([^"\\]*)"\)', str(backend.normalizer))
    if backend.normalizer is not None and (replace is None or len(replace[2]) < len(replace[1])):
        return None
    if backend.pre_tokenizer is not None and not re.fullmatch(
        r"Split\(.*behavior=(MergedWithPrevious|MergedWithNext|Isolated|Contiguous).*\)", str(backend.pre_tokenizer)
    ):
        return None
    # Normalizers replace a string by one that is no shorter, and pre-tokenizers split and drop nothing, so no
    # character is lost. BPE cuts that text into pieces of the vocabulary, or into bytes where it has none, at least
    # one for a character, so nothing becomes one unknown token. Added tokens stand for their own text alone.
    return max(map(len, chain(vocabulary, (token.content for token in added))))


def find_byte_ids(backend: tokenizers.Tokenizer) -> Iterable[int]:
    if "ByteFallback" not in str(backend.decoder):
        return ()
    pieces = (f"<0x{byte:02X}>" for byte in range(256))
    return [i for i in map(backend.token_to_id, pieces) if i is not None]
