"""An engine for the HTTP tests whose sequences may be constrained: characters are tokens."""

from __future__ import annotations

from dataclasses import replace

from constrained import CharTokenizer, constrained_core
from fakes import FAKE_INFO, VOCAB, FakeEncoder
from web import IMAGES, MAX_CONTEXT, WebTokenizer

from wicore_trt.core.port import LocalEngine
from wicore_trt.core.text_engine import TextEngine
from wicore_trt.grammar.matcher import Grammars
from wicore_trt.model.spec import GLOBAL, LOCAL

PAINT = {
    "type": "object",
    "properties": {"color": {"enum": ["red", "blue"]}, "size": {"type": "integer", "minimum": 1, "maximum": 9}},
    "required": ["color", "size"],
    "additionalProperties": False,
}
"""Parameters of a function."""


class WebCharTokenizer(CharTokenizer, WebTokenizer):
    """Any text in, characters out."""


def make_constrained_engine(max_context: int = MAX_CONTEXT) -> TextEngine:
    tokenizer = WebCharTokenizer()
    core = constrained_core(
        pages={GLOBAL: 2 * max_context // 4, LOCAL: 512},
        max_context=max_context,
        max_sequences=16,
        max_batch_tokens=256,
        grammars=Grammars(tokenizer, VOCAB),
        images=FakeEncoder(),
    )
    info = replace(FAKE_INFO, max_context_tokens=max_context, images=IMAGES)
    return TextEngine(LocalEngine(core, max_waiting=100), tokenizer, info)
