"""Define shapes of answers, and those with choices of OpenAI's first routes.

Must not know engines or transports. Invariants: id, object, created and model are equal in all chunks of an answer;
a sequence's chunks add up to its text; every token that usage counts has its probability, also the one that ended
the text, because evaluation harnesses count back from the end.
"""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any

import msgspec

from wicore_trt.access.entry import Totals
from wicore_trt.errors import WicoreError
from wicore_trt.http.errors import error_bytes
from wicore_trt.text.calls import CallFinder, gather_parts
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.types import Completion, FinishReason, TextOutput, TokenLogprob

encode = msgspec.json.Encoder().encode


def describe_usage(totals: Totals) -> dict[str, object]:
    return {
        "prompt_tokens": totals.prompt,
        "completion_tokens": totals.output,
        "total_tokens": totals.prompt + totals.output,
        "prompt_tokens_details": {"cached_tokens": totals.cached},
    }


class ResponseShape(ABC):
    """Shape of one answer, whole or as the events of a stream."""

    done = b""
    """End of a stream that was not broken."""

    @abstractmethod
    def make_answer(self, completions: Sequence[Completion], totals: Totals) -> bytes:
        """Make the whole answer."""

    def open_sequence(self, index: int, totals: Totals) -> bytes:
        """Make the events before a sequence's first chunk."""
        return b""

    @abstractmethod
    def make_chunk(self, index: int, output: TextOutput, totals: Totals) -> bytes:
        """Make the chunk of an output, b"" where there is nothing to send."""

    def close_stream(self, totals: Totals) -> bytes:
        """Make the events after the end of all sequences."""
        return b""

    def break_stream(self, error: WicoreError) -> bytes:
        return b"event: error\ndata: " + error_bytes(error) + b"\n\n"


# A front makes a chunk for every token, so a chunk is made of ready bytes and one encoded text.
class ChoiceShape(ResponseShape):
    """Answer with choices: its head, and the form of a choice."""

    done = b"data: [DONE]\n\n"
    prefix = ""
    one_prompt = True
    """True where all sequences have one prompt, which the answer describes beside its choices."""
    kind = ""
    chunk_kind = ""

    def __init__(
        self,
        model: str,
        tokenizer: Tokenizer,
        *,
        usage: bool = False,
        continuous: bool = False,
        token_ids: bool = False,
        prompt_top: int | None = None,
    ) -> None:
        """Choose contents: `usage` announces counts, `continuous` has them in chunks, `token_ids` adds token ids.
        `prompt_top` is how many reported alternatives of prompts go into `prompt_logprobs`, which None leaves out."""
        self._tokenizer = tokenizer
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}
        head = encode({"object": self.chunk_kind, **self._head})
        self._open = b"data: " + head[:-1] + b',"choices":[{"index":'
        self._usage, self._continuous = usage, continuous
        self._token_ids, self._prompt_top = token_ids, prompt_top
        self._tail = b',"usage":null}\n\n' if usage and not continuous else b"}\n\n"
        self._empty = b"data: " + head[:-1] + b',"choices":[],"usage":'

    def make_answer(self, completions: Sequence[Completion], totals: Totals) -> bytes:
        choices, of_prompt = [], dict[str, Any]()
        for index, completion in enumerate(completions):
            made = self._make_choice(index, completion)
            made.setdefault("finish_reason", completion.finish_reason.value)
            choice = {"index": index, **made, "stop_reason": completion.stop_reason}
            if self._token_ids:
                choice["token_ids"], of_prompt["prompt_token_ids"] = completion.token_ids, totals.prompts[index]
            if self._prompt_top is not None:
                of_prompt["prompt_logprobs"] = self._prompt_logprobs(completion)
            choices.append(choice if self.one_prompt else choice | of_prompt)
        head = {"object": self.kind, **self._head, "choices": choices, "usage": describe_usage(totals)}
        return encode(head | of_prompt if self.one_prompt else head)

    def make_chunk(self, index: int, output: TextOutput, totals: Totals) -> bytes:
        text, reason = output.text, output.finish_reason
        reported = output.logprobs or output.prompt_logprobs
        if not (text or reason or reported or self._continuous or self._token_ids):
            return b""
        logprobs = encode(self._list_logprobs(index, output)) if reported else b"null"
        end = b"null"
        if reason is not None:
            end = b'"%b","stop_reason":%b' % (reason.value.encode(), encode(output.stop_reason))
        ids = b',"token_ids":' + encode(output.token_ids) if self._token_ids else b""
        tail = self._encode_usage(totals) if self._continuous else self._tail
        parts = (self._open, index, self._encode_body(text), logprobs, end, ids, tail)
        return b'%b%d,%b,"logprobs":%b,"finish_reason":%b%b}]%b' % parts

    def close_stream(self, totals: Totals) -> bytes:
        """Make the last chunk, which has the counts, where they are wanted."""
        return self._empty + encode(describe_usage(totals)) + b"}\n\n" if self._usage else b""

    def _encode_usage(self, totals: Totals) -> bytes:
        return b',"usage":' + encode(describe_usage(totals)) + b"}\n\n"

    def _prompt_logprobs(self, completion: Completion) -> list[dict[int, dict[str, Any]] | None]:
        """List probabilities of the prompt as vLLM does: by token id, the prompt's own among them."""
        found: list[dict[int, dict[str, Any]] | None] = [None]
        for entry in completion.prompt_logprobs[1:]:
            tokens: dict[int, dict[str, Any]] = {}
            best = enumerate(entry.top[: self._prompt_top], 1)
            for rank, (token, logprob) in [(None, (entry.token_id, entry.logprob)), *best]:
                tokens[token] = {"logprob": logprob, "rank": rank, "decoded_token": self._token_text(token)}
            found.append(tokens)
        return found

    def _token_text(self, token: int) -> str:
        return self._tokenizer.token_bytes(token).decode(errors="replace")

    @abstractmethod
    def _encode_body(self, text: str) -> bytes:
        """Encode the text of a chunk."""

    @abstractmethod
    def _list_logprobs(self, index: int, output: TextOutput) -> dict[str, Any]:
        """List the probabilities of a chunk."""

    @abstractmethod
    def _make_choice(self, index: int, completion: Completion) -> dict[str, Any]:
        """Make text and probabilities of a sequence of the whole answer, and the reason of its end if a special one."""


def token_entry(tokenizer: Tokenizer, entry: TokenLogprob) -> dict[str, Any]:
    """Describe a token, its probability and the alternatives, with text and bytes."""
    chosen, *top = [
        {"token": raw.decode(errors="replace"), "logprob": logprob, "bytes": list(raw)}
        for token, logprob in ((entry.token_id, entry.logprob), *entry.top)
        for raw in (tokenizer.token_bytes(token),)
    ]
    return {**chosen, "top_logprobs": top}


class ChatShape(ChoiceShape):
    prefix, kind, chunk_kind = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def open_sequence(self, index: int, totals: Totals) -> bytes:
        role = b'%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}]' % index
        prompt = b',"prompt_token_ids":' + encode(totals.prompts[index]) if self._token_ids else b""
        return self._open + role + prompt + (self._encode_usage(totals) if self._continuous else self._tail)

    def _encode_body(self, text: str) -> bytes:
        return b'"delta":{"content":' + encode(text) + b"}" if text else b'"delta":{}'

    def _list_logprobs(self, index: int, output: TextOutput | Completion) -> dict[str, Any]:
        return {"content": [token_entry(self._tokenizer, entry) for entry in output.logprobs], "refusal": None}

    def _make_choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "message": {"role": "assistant", "content": completion.text, "refusal": None},
            "logprobs": self._list_logprobs(index, completion) if completion.logprobs else None,
        }


class CompletionShape(ChoiceShape):
    """Shape of a completion. `prompts` are the texts to repeat in front, one for each sequence, where wanted.
    `top` alternatives of the text's tokens are reported."""

    prefix, kind, chunk_kind = "cmpl", "text_completion", "text_completion"
    one_prompt = False

    def __init__(self, *args: Any, prompts: Sequence[str] = (), top: int | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._prompts, self._top = prompts, top
        self._echoed: dict[int, Echo] = {}
        self._offsets: dict[int, int] = {}

    def open_sequence(self, index: int, totals: Totals) -> bytes:
        if not (self._prompts or self._token_ids):
            return b""
        prompt = b',"prompt_token_ids":' + encode(totals.prompts[index]) if self._token_ids else b""
        text = encode(self._prompts[index] if self._prompts else "")
        echo = b'%d,"text":%b,"logprobs":null,"finish_reason":null%b}]' % (index, text, prompt)
        return self._open + echo + (self._encode_usage(totals) if self._continuous else self._tail)

    def _encode_body(self, text: str) -> bytes:
        return b'"text":' + encode(text)

    def _list_logprobs(self, index: int, output: TextOutput | Completion) -> dict[str, Any]:
        found: dict[str, list[Any]] = {"tokens": [], "token_logprobs": [], "top_logprobs": [], "text_offset": []}
        offset = self._offsets.get(index, len(self._prompts[index]) if self._prompts else 0)
        if self._prompts and self._top is not None:
            echo = self._echoed.setdefault(index, Echo(self._prompts[index].encode()))
            for entry in output.prompt_logprobs:
                first = not echo.tokens
                self._add_token(found, entry, echo.locate_token(self._tokenizer.token_bytes(entry.token_id)))
                if first:
                    found["token_logprobs"][0] = found["top_logprobs"][0] = None
        for entry in output.logprobs:
            self._add_token(found, entry, offset)
            offset += len(found["tokens"][-1])
        self._offsets[index] = offset
        return found

    def _add_token(self, found: dict[str, list[Any]], entry: TokenLogprob, offset: int) -> None:
        found["tokens"].append(self._token_text(entry.token_id))
        found["token_logprobs"].append(entry.logprob)
        best_last = reversed(entry.top[: self._top])  # several bytes may have one text
        found["top_logprobs"].append({self._token_text(token): logprob for token, logprob in best_last})
        found["text_offset"].append(offset)

    def _make_choice(self, index: int, completion: Completion) -> dict[str, Any]:
        return {
            "text": (self._prompts[index] if self._prompts else "") + completion.text,
            "logprobs": self._list_logprobs(index, completion) if self._top is not None else None,
        }


class Echo:
    """Positions, in characters, of a prompt's tokens in its text; `tokens` counts them.
    Tokens that the text lacks, as BOS, have no length."""

    def __init__(self, text: bytes) -> None:
        self._text = text
        self._at = self._characters = self.tokens = 0

    def locate_token(self, token: bytes) -> int:
        """Locate where the next token begins: after a character of which it has only later bytes."""
        begin = self._characters
        self.tokens += 1
        if self._text.startswith(token, self._at):
            self._at += len(token)
            self._characters += sum(byte & 0xC0 != 0x80 for byte in token)
        return begin


class AnswerCalls:
    def __init__(self) -> None:
        self._finders: dict[int, CallFinder] = {}

    def read_output(self, index: int, output: TextOutput | Completion) -> tuple[dict[str, Any], str | None]:
        """Return what an output adds to a message, and the finish reason that ends the message with it."""
        finder, reason = self._finders.setdefault(index, CallFinder()), output.finish_reason
        pieces = finder.push_text(output.text) + (finder.end_output() if reason is not None else [])
        text, calls = gather_parts(pieces)  # the parts of each call put together
        delta: dict[str, Any] = {"content": text} if text else {}
        for call in calls:
            function = {"arguments": call.arguments}
            entry: dict[str, Any] = {"index": call.call, "function": function}
            if call.name is not None:
                function = {"name": call.name, **function}
                entry = {"index": call.call, "id": call.id, "type": "function", "function": function}
            delta.setdefault("tool_calls", []).append(entry)
        if reason is FinishReason.STOP and finder.is_whole:
            return delta, "tool_calls"
        return delta, None if reason is None else reason.value


class ToolShape(ChatShape):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._calls = AnswerCalls()

    def make_chunk(self, index: int, output: TextOutput, totals: Totals) -> bytes:
        delta, reason = self._calls.read_output(index, output)
        if not (delta or reason or output.logprobs or self._continuous or self._token_ids):
            return b""
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": self._list_logprobs(index, output) if output.logprobs else None,
            "finish_reason": reason,
            **({} if reason is None else {"stop_reason": output.stop_reason}),
            **({"token_ids": output.token_ids} if self._token_ids else {}),
        }
        raw = self._open.removesuffix(b'{"index":') + encode(choice) + b"]"
        return raw + (self._encode_usage(totals) if self._continuous else self._tail)

    def _make_choice(self, index: int, completion: Completion) -> dict[str, Any]:
        delta, reason = AnswerCalls().read_output(index, completion)
        calls = [{k: v for k, v in call.items() if k != "index"} for call in delta.get("tool_calls", ())]
        message = {"role": "assistant", "content": delta.get("content"), "refusal": None}
        return {
            **super()._make_choice(index, completion),
            "message": message | ({"tool_calls": calls} if calls else {"content": delta.get("content", "")}),
            "finish_reason": reason,
        }
