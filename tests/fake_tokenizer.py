"""A tokenizer of one token for each character; it imports nothing, so that processes of tests start soon."""

from __future__ import annotations

VOCAB = 97
EOS = 1


IMAGE_BEGIN, IMAGE_SOFT, IMAGE_END = 95, 96, 94
"""Tokens of images: the characters DEL, none that texts have, and ~."""


def encode_any(text: str) -> list[int]:
    """Every character has a token, several may have one; those of images have theirs."""
    text = text.replace("<start_of_image>", "\x7f").replace("<end_of_image>", "~")
    return [(ord(c) - 32) % VOCAB for c in text]


class FakeTokenizer:
    """Token t is the character chr(32 + t); EOS is special and has no text."""

    build = ""
    home = None
    bos_id = None
    eos_ids = (EOS,)
    vocab_size = VOCAB
    has_chat = False
    turn_end = None
    chat_fault = chat_note = None
    takes_tools = False
    byte_ids = frozenset()
    longest_token = 1

    def byte_run(self):
        return None

    def encode(self, text: str, *, add_bos: bool = True, max_tokens: int | None = None) -> list[int]:
        return [ord(c) - 32 for c in text]

    def decode(self, ids, *, skip_special: bool = True) -> str:
        return "".join(chr(32 + t) for t in ids if not (skip_special and t == EOS))

    def token_text(self, token: int) -> str | None:
        return None

    def find_named_specials(self, text: str) -> dict[int, str]:
        return {EOS: "<eos>"} if "<eos>" in text else {}

    def describe_config(self) -> dict[str, object]:
        return {"eos_token": "<eos>"}

    def token_bytes(self, token: int) -> bytes:
        return b"<eos>" if token == EOS else chr(32 + token).encode()

    def apply_chat(self, messages, *, functions=(), add_generation_prompt=True, **_: object) -> list[int]:
        return self.encode("".join(str(m["content"]) for m in messages))
