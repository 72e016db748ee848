"""Split answers into blocks: a text, or calls of functions one after the other.

Shared by the shapes of OpenAI's Responses and Anthropic's Messages. Must not know transports. Invariants: one block
is open at a time, and each is opened and closed once; the deltas of a block add up to its text; an answer has a
block.
"""

from __future__ import annotations

import json
import uuid
from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from wicore_trt.access.entry import Totals
from wicore_trt.http.shapes import ResponseShape, encode
from wicore_trt.text.calls import CallFinder, TextPart
from wicore_trt.types import Completion, FinishReason, TextOutput

Change = Literal["open", "delta", "close"]


@dataclass(slots=True)
class Block:
    """Text, or a call of the function `name`, whose arguments are the text then."""

    number: int
    name: str | None
    parts: list[str] = field(default_factory=list)
    id: str = field(default_factory=lambda: uuid.uuid4().hex)

    @property
    def text(self) -> str:
        return "".join(self.parts)

    @property
    def is_whole(self) -> bool:
        if self.name is None:
            return True
        try:
            json.loads(self.text)
        except ValueError:
            return False
        return True


class BlockShape(ResponseShape):
    """Shape of an answer of blocks. `calls`: functions may be called; `last` is the answer's last output.
    `is_open`: the last block is not closed yet."""

    def __init__(self, *, calls: bool) -> None:
        self.blocks: list[Block] = []
        self.last: TextOutput | Completion | None = None
        self._finder = CallFinder() if calls else None
        self.is_open = False

    @property
    def has_calls(self) -> bool:
        """True where the answer is calls, none of them cut off."""
        return bool(self.blocks) and self.blocks[0].name is not None and self.blocks[-1].is_whole

    def make_answer(self, completions: Sequence[Completion], totals: Totals) -> bytes:
        [completion] = completions
        for _ in self._list_changes(completion):
            pass
        return encode(self.make_whole(totals))

    def make_chunk(self, index: int, output: TextOutput, totals: Totals) -> bytes:
        return b"".join(self.make_event(change, block, new) for change, block, new in self._list_changes(output))

    @abstractmethod
    def make_whole(self, totals: Totals) -> dict[str, Any]:
        """Make the answer of all blocks."""

    @abstractmethod
    def make_event(self, change: Change, block: Block, new: str) -> bytes:
        """Make the event of a change; `new` is what a delta adds."""

    def take_output(self, output: TextOutput | Completion) -> None:
        """Keep what an output has beside its text, before its changes are sent."""

    def _list_changes(self, output: TextOutput | Completion) -> Iterator[tuple[Change, Block, str]]:
        self.take_output(output)
        ended = output.finish_reason is not None
        if self._finder is None:
            pieces = [TextPart(text=output.text)] if output.text else []
        else:
            pieces = self._finder.push_text(output.text) + (self._finder.end_output() if ended else [])
        for piece in pieces:
            if piece.call is None and not self.blocks or piece.name is not None:
                yield from self._close_block()
                yield self._open_block(piece.name)
            if piece.text or piece.arguments:
                block, new = self.blocks[-1], piece.text or piece.arguments
                block.parts.append(new)
                yield "delta", block, new
        if ended:
            self.last = output
            if not self.blocks:
                yield self._open_block(None)
            yield from self._close_block()

    def _open_block(self, name: str | None) -> tuple[Change, Block, str]:
        self.blocks.append(Block(len(self.blocks), name))
        self.is_open = True
        return "open", self.blocks[-1], ""

    def _close_block(self) -> Iterator[tuple[Change, Block, str]]:
        if self.is_open:
            self.is_open = False
            yield "close", self.blocks[-1], ""


def named_event(kind: str, **fields: Any) -> bytes:
    """Make a server-sent event that is named as its type."""
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), encode({"type": kind, **fields}))


def was_cut(last: TextOutput | Completion | None) -> bool:
    """Return True when an answer ended before the model ended it."""
    return last is not None and last.finish_reason is not FinishReason.STOP
