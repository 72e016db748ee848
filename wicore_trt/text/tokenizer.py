"""Convert text to token ids and back, and chat messages to prompts, from a model's own files.

Reads tokenizer.json with `tokenizers`; must not know requests or engines. Invariants: an encoded prompt begins with
at most one BOS that the caller did not write; every special id comes from the files. Instances are immutable after
construction and safe to share between threads.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import tokenizers

from wicore_trt.arithmetic import div_ceil
from wicore_trt.errors import ConfigError, ContextLengthError, EngineFormatError, InvalidRequestError, shown
from wicore_trt.files import LIST_BYTES, TOKENIZER_BYTES, UntrustedFiles, is_present
from wicore_trt.text.chat import ANSWER, CALL_TOKENS, PROBE, SAID, ChatTemplate, checked_variables
from wicore_trt.text.images import IMAGE_TOKENS, expand_marks, list_image_roles
from wicore_trt.text.model_files import FILES, REBUILD, TOKENIZER, ModelFiles
from wicore_trt.text.tokenizer_file import find_byte_ids, longest_token, read_tokenizer
from wicore_trt.text.turns import has_calls, plain_messages, render_turns, tool_messages
from wicore_trt.text.untrusted import ControlTokens
from wicore_trt.types import ImageFile

_TAG = re.compile(r"<[^<>\s]{1,40}>|\[/?[A-Z_@]{2,40}\]")
_JOINING = re.compile(
    r"Sequence\(decoders=\["
    r'(?:Replace\(pattern=String\("([^"\\]*)"\), content="([^"\\]*)"\), )?'
    r"ByteFallback\(\), Fuse\(\)\]\)"
)
"""Decoders that join texts of tokens and change nothing but each token by itself, and runs of bytes; Gemma's is one."""


# Special-token text inside a prompt ("<end_of_turn>") becomes the special token, as in transformers' `encode`:
# authors of prompts write tokens. In messages it is text (`text.untrusted`): turns are the template's.
class Tokenizer:
    """Tokenizer of an engine or checkpoint directory. Ids are below `vocab_size`, but for added tokens below
    `model_size`.
    Added tokens may lie beyond the rows of the embedding, as <image_soft_token> of Gemma 3 1B does; callers must not
    give these to a model. `eos_ids` are all ids that end a generation, and `ends` the places that name each.
    `chat_fault` is why the model cannot chat, or None. `byte_ids` are the byte-fallback tokens: a run of them is one
    stretch of UTF-8, whose text is known only when the run has ended. `longest_token` is the most characters of text
    that a token stands for, None where unknown. `home` has its files, if any."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_id: int | None,
        eos_ids: Mapping[int, Sequence[str]] | tuple[int, ...],
        adds_bos: bool = True,
        chat: ChatTemplate | None = None,
        home: Path | None = None,
    ) -> None:
        self.home = home
        self.build = ""  # the seal of the engine that it is of, where that matters
        self.reads_images = False  # that engine does
        self._backend = backend
        self._adds_bos = adds_bos and bos_id is not None
        self._chat, self.has_chat = chat, chat is not None
        self.takes_tools = chat is not None and "tools" in chat.takes  # in a form that `text.calls` reads
        # The token that ends a turn of a model without chat template, which does not name it among its ends.
        self.turn_end = None if chat is not None else backend.token_to_id("<end_of_turn>")
        written = chat.source if chat is not None else "<start_of_turn><end_of_turn>"
        self._control = ControlTokens(backend, written, (bos_id, *eos_ids, *map(backend.token_to_id, IMAGE_TOKENS)))
        called = CALL_TOKENS if self.takes_tools else ()
        self._shown = {i for i in map(backend.token_to_id, called) if i is not None}
        self.bos_id = bos_id
        self.ends = {i: [*eos_ids[i]] if isinstance(eos_ids, Mapping) else [] for i in eos_ids}
        self.chat_fault = self._prove_chat()
        self.eos_ids = tuple(self.ends)
        vocabulary: dict[str, int] = backend.get_vocab(with_added_tokens=False)  # a copy of all, so taken once
        self.model_size: int = max(vocabulary.values(), default=-1) + 1
        self.vocab_size: int = max(self.model_size - 1, *backend.get_added_tokens_decoder(), -1) + 1
        self.byte_ids = frozenset(find_byte_ids(backend))
        self.longest_token = longest_token(backend, vocabulary)
        joining = _JOINING.fullmatch(str(backend.decoder))
        self._joins = joining is not None
        self._replaced = (joining[1], joining[2]) if joining is not None and joining[1] else None
        self._token_text: dict[int, str] = {}
        self._token_bytes: dict[int, bytes] = {}

    @classmethod
    def from_dir(cls, path: Path) -> Tokenizer:
        """Load the files of a directory with `from_files`. Raises EngineFormatError for unreadable files, too."""
        door = UntrustedFiles(path, EngineFormatError, REBUILD)
        limits = {name: TOKENIZER_BYTES if name == TOKENIZER else LIST_BYTES for name in FILES}
        files = {
            n: door.read_bytes(path / n, limit=size)
            for n, size in limits.items()
            if n == TOKENIZER or is_present(path / n)
        }
        return cls.from_files(files, path)

    @classmethod
    def from_files(cls, files: Mapping[str, bytes], where: Path, *, checked: bool = False) -> Tokenizer:
        """Load the tokenizer from files by name; names outside of FILES are ignored. `where` is for messages.
        `checked`: the same tokenizer.json was loaded before, so its parts are not checked again.
        tokenizer.json is required. With a chat template, end ids are all that generation_config.json, config.json
        and the eos_token of tokenizer_config.json and special_tokens_map.json name, and the template's end of turn.
        A base model has the end ids of the first file that names some, as in transformers. BOS comes from the same
        files, the token names first. The chat template is chat_template.jinja, chat_template.json or the one in
        tokenizer_config.json, in this order.
        Raises EngineFormatError for missing, broken or contradicting files."""
        if TOKENIZER not in files:
            raise EngineFormatError(f"{where / TOKENIZER} is missing.", fix=REBUILD)
        backend = read_tokenizer(files[TOKENIZER], where / TOKENIZER, REBUILD, checked=checked)
        read = ModelFiles(files, where, backend)
        chat = read.read_chat_template()
        made = cls(
            backend, bos_id=read.read_bos(), eos_ids=read.read_ends(every=chat is not None),
            adds_bos=read.tokenizer_config.get("add_bos_token") is not False, chat=chat, home=where,
        )  # fmt: skip
        if not made.eos_ids:
            fix = "Put the model's generation_config.json beside its weights and build again."
            raise EngineFormatError(f"No file in {where} names the token that ends a generation.", fix=fix)
        return made

    @property
    def chat_note(self) -> str | None:
        """Sentence for users who chat with the model, or None."""
        if self.chat_fault is not None:
            return f"The model cannot chat: {self.chat_fault}."
        if self._chat is None:
            return "A base model without a chat template: it answers in Gemma's turns, untrained for them."
        return None

    def _prove_chat(self) -> str | None:
        """Check that a rendered conversation has its text, its marks and its one BOS; return what is wrong. The
        template's end of turn is among `ends` afterwards."""
        if self._chat is None:
            text: str | None = render_turns([PROBE, ANSWER, PROBE], (), add_generation_prompt=True)
        elif self._chat.fault is not None:
            return f"its chat template takes no text of a user: {self._chat.fault}"
        else:
            text = self._chat.run_probe(ANSWER) or self._chat.run_probe()
        parts = (text or "").partition(str(ANSWER["content"]))
        end = _TAG.match(parts[2].lstrip())
        for tag in sorted({end[0] if end else "", *_TAG.findall(parts[0].replace(SAID, "") + parts[2])} - {""}):
            ids = self.encode(tag, add_bos=False, field="messages")
            if len(ids) != 1 and (self._chat is None or tag == (end and end[0]) or self._backend.token_to_id(tag)):
                return f"its mark {tag} is {len(ids)} tokens, not one"
            if end and tag == end[0] and self._chat is not None:
                self.ends.setdefault(ids[0], []).append("the chat template")
        ids = self.encode(text or "", field="messages")
        if SAID not in self.decode(ids, skip_special=False):
            return "its tokenizer loses text"
        return None

    def chat_doubts(self) -> list[str]:
        """List flaws of a model's chats that do not prevent them, in sentences."""
        if self._chat is None or self.chat_fault is not None:
            return []
        text, doubts = self._chat.run_probe() or "", []
        if self.encode(text, field="messages").count(self.bos_id if self.bos_id is not None else -1) > 1:
            doubts.append("conversations begin with BOS twice, as the chat template writes them.")
        if "tools" in self._chat.variables and not self.takes_tools:
            doubts.append("the chat template names tools and writes no calls that can be read: WiCore's own are used.")
        return doubts

    def described_ends(self) -> str:
        """Describe the ends: their text, and where each came from."""
        text = self._backend.id_to_token
        return ", ".join(f"{i} {shown(text(i))} ({', '.join(places)})" for i, places in self.ends.items())

    def encode(
        self, text: str, *, add_bos: bool = True, max_tokens: int | None = None, field: str = "prompt"
    ) -> list[int]:
        """Encode a prompt; other Python threads run meanwhile.
        `add_bos` puts BOS first, unless the text begins with it or the model's files say that it has none. Raises
        InvalidRequestError (`field`) for text that is not valid Unicode. Text with so many characters that it must
        have more than `max_tokens` tokens is refused, too, before any work."""
        self._check_text(text, field, max_tokens)
        # `encode` would hold Python's interpreter lock for all of its time, which stops every other thread.
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        if add_bos and self._adds_bos and ids[:1] != [self.bos_id]:
            assert self.bos_id is not None
            ids.insert(0, self.bos_id)
        return ids

    def decode(self, ids: Iterable[int], *, skip_special: bool = True) -> str:
        """Decode token ids; each byte that is part of no character becomes U+FFFD, ids beyond the vocabulary
        nothing.
        Raises InvalidRequestError (field "token_ids") for a negative or absurdly large id."""
        ids = list(ids)
        if skip_special and self._shown and not self._shown.isdisjoint(ids):  # calls are text
            runs = groupby(ids, key=self._shown.__contains__)
            return "".join(self.decode(run, skip_special=not shown) for shown, run in runs)
        try:
            text: str = self._backend.decode(ids, skip_special_tokens=skip_special)
            if "\ufffd" not in text or (run := self.byte_run(skip_special=skip_special)) is None:
                return text
            # Hugging Face's ByteFallback gives the whole run of bytes to one wrong byte.
            return "".join(map(run.decode_next, ids)) + run.end_run()
        except (OverflowError, TypeError) as error:
            raise InvalidRequestError("Token ids must be integers in [0, 2^32).", field="token_ids") from error

    def token_text(self, token: int) -> str | None:
        """Return the text of this token in any company, "" for a special one.
        None where it depends on the tokens around it: for byte-fallback tokens, and for decoders that do more than
        to join the tokens' texts."""
        if not self._joins or token in self.byte_ids:
            return None
        found = self._token_text.get(token)
        if found is None:
            found = self._token_text[token] = self.decode([token])
        return found

    def byte_run(self, *, skip_special: bool = True) -> ByteRun | None:
        """Make a decoder of ids one at a time; None where a token's text depends on the tokens around it."""
        return ByteRun(self, skip_special) if self._joins else None

    def token_bytes(self, token: int) -> bytes:
        """Return the bytes of one token inside of a text, special tokens included.
        A byte-fallback token is its byte, so that an output's tokens, put together, are the bytes of its text."""
        found = self._token_bytes.get(token)
        if found is None:
            if token in self.byte_ids:
                found = bytes.fromhex(str(self._backend.id_to_token(token))[3:5])  # <0xE2>
            else:
                # Twice, because a decoder may strip the first space of a text.
                before = self.decode([token], skip_special=False)
                found = self.decode([token, token], skip_special=False)[len(before) :].encode()
            self._token_bytes[token] = found
        return found

    def describe_config(self) -> dict[str, object]:
        """Return facts of the tokenizer by the names of tokenizer_config.json."""
        special = {"bos_token": self.bos_id, "eos_token": self.eos_ids[0]}
        texts = {name: None if i is None else self._backend.id_to_token(i) for name, i in special.items()}
        template = None if self._chat is None else self._chat.source
        return {
            "tokenizer_class": "PreTrainedTokenizerFast", "vocab_size": self.vocab_size, **texts,
            "eos_token_ids": self.eos_ids, "add_bos_token": self._adds_bos, "chat_template": template,
        }  # fmt: skip

    def find_named_specials(self, text: str) -> dict[int, str]:
        """Find the special tokens, which are no text, that a text names."""
        found = {self._backend.token_to_id(name): name for name in self._control.pattern.findall(text)}
        return {token: name for token, name in found.items() if token is not None and not self.decode([token])}

    def list_vocabulary(self) -> list[bytes | None]:
        """List the bytes of each id as `token_bytes` gives them; takes a second for Gemma's vocabulary.
        None for special tokens, which are no text, and for ids without a token."""
        found: list[bytes | None] = [None] * self.vocab_size
        special = {token for token, added in self._backend.get_added_tokens_decoder().items() if added.special}
        special |= {*self.eos_ids, self.bos_id if self.bos_id is not None else -1}
        for piece, token in self._backend.get_vocab(with_added_tokens=True).items():
            if token in special:
                continue
            if self._joins and token not in self.byte_ids:
                found[token] = (piece.replace(*self._replaced) if self._replaced else piece).encode()
            else:
                found[token] = self.token_bytes(token)
        return found

    def apply_chat(
        self,
        messages: Sequence[Mapping[str, object]],
        *,
        functions: Sequence[Mapping[str, Any]] = (),
        chat_template_kwargs: Mapping[str, Any] | None = None,
        add_generation_prompt: bool = True,
        max_tokens: int | None = None,
        images: Sequence[ImageFile] = (),
    ) -> list[int]:
        """Encode a conversation in the model's own format; see `text.chat` for messages. `images` are prepared ones, in
        the order of their parts, whose soft tokens `text.images` inserts.
        A template that takes tools gets functions, calls and results; for others `text.turns` makes messages of
        them. Without a template `text.turns` makes the whole text. `chat_template_kwargs` are other variables of the
        template. Raises InvalidRequestError (fields "messages", "chat_template_kwargs") for invalid values, and for
        a text that is too long as in `encode`."""
        if self.chat_fault is not None:
            raise InvalidRequestError(str(self.chat_note), field="messages")
        pictured = images or list_image_roles(messages)
        asked = (messages, functions, chat_template_kwargs)
        (messages, functions, chat_template_kwargs), cut = self._control.mark_texts(asked)
        if self._chat is None:
            checked_variables(chat_template_kwargs)
            rendered = render_turns(messages, functions, add_generation_prompt=add_generation_prompt)
        else:
            if self.takes_tools and has_calls(messages):
                messages = tool_messages(messages)
            elif functions or has_calls(messages):
                messages, functions = plain_messages(messages, functions), ()
            rendered = self._chat.render_messages(
                messages,
                functions=functions,
                variables=chat_template_kwargs,
                add_generation_prompt=add_generation_prompt,
            )
        texts, ids = [rendered] if cut is None else cut(rendered), list[int]()
        if pictured:
            texts[::2] = expand_marks([text or "" for text in texts[::2]], images, "messages")
        self._check_text("".join(filter(None, texts)), "messages", max_tokens)
        for i, text in enumerate(texts):
            if text:
                control = self._control
                ids += control.encode_as_text(text) if i % 2 else self.encode(text, add_bos=i == 0, field="messages")
        return ids

    def _check_text(self, text: str, field: str, max_tokens: int | None) -> None:
        if max_tokens is not None and self.longest_token is not None and len(text) > max_tokens * self.longest_token:
            raise ContextLengthError.from_counts(div_ceil(len(text), self.longest_token), max_tokens, field, least=True)
        try:
            text.encode("utf-8")
        except (UnicodeEncodeError, AttributeError) as error:
            raise InvalidRequestError(f"The text is not valid Unicode: {error}.", field=field) from error


@dataclass(slots=True)
class ByteRun:
    """Decoder of ids one at a time, for tokenizers whose tokens have the same text in any company, but for bytes.
    Bytes make characters with their neighbours; special tokens without text between them do not separate them."""

    tokenizer: Tokenizer
    skip_special: bool
    _utf8: codecs.IncrementalDecoder | None = None  # has up to three bytes

    def decode_next(self, token: int) -> str:
        """Return the text that is certain with this id."""
        tokenizer = self.tokenizer
        if token in tokenizer.byte_ids:
            self._utf8 = self._utf8 or _UTF8(errors=_EACH_BYTE)
            return self._utf8.decode(tokenizer.token_bytes(token))
        text = tokenizer.token_text(token) if self.skip_special else tokenizer.decode([token], skip_special=False)
        assert text is not None
        return self.end_run() + text if text else ""

    def end_run(self) -> str:
        """Return the rest: bytes that have become no character."""
        return self._utf8.decode(b"", True) if self._utf8 is not None else ""


_UTF8, _EACH_BYTE = codecs.getincrementaldecoder("utf-8"), "wicore_each_byte"


def _each_byte(error: UnicodeError) -> tuple[str, int]:
    """Return U+FFFD for each byte, as ByteFallback does; Python's `replace` has one for all that began a character."""
    assert isinstance(error, UnicodeDecodeError)
    return "\ufffd" * (error.end - error.start), error.end


codecs.register_error(_EACH_BYTE, _each_byte)


def check_rows(token_ids: Sequence[int], vocab_size: int, text: object) -> None:
    """Raise ConfigError when `text` has an id that is no row of an embedding with `vocab_size` rows."""
    if token_ids and max(token_ids) >= vocab_size:
        fix = "Take that token out."
        raise ConfigError(f"{text} has the token id {max(token_ids)}, for which the model has no row.", fix=fix)
