"""Options shared by commands, and the shell's completions of backends and recipes.

Must not import anything heavy before the shell asks. Invariant: a name is offered only when it exists.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from typer import Option

if TYPE_CHECKING:
    from wicore_trt.backends.torch.calibrate import TextCalibration

CalibrateTokensOption = Annotated[int, Option(min=1, max=1 << 24, metavar="N", help="Tokens of the text to use.")]
NoKVScalesOption = Annotated[bool, Option("--no-kv-scales", help="With --calibrate: no scales for an FP8 KV cache.")]
LoraOption = Annotated[
    Path | None, Option("--lora", metavar="DIR", help="LoRA adapter of PEFT to merge into the source.")
]
MmprojOption = Annotated[
    Path | None, Option("--mmproj", metavar="FILE", help="Image encoder of a GGUF model, as llama.cpp makes it.")
]
TextOnlyOption = Annotated[bool, Option("--text-only", help="Leave the image encoder out.")]


def make_calibration(text: Path | None, tokens: int, kv_scales: bool) -> TextCalibration | None:
    if text is None:
        return None
    from wicore_trt.backends.torch.calibrate import TextCalibration

    return TextCalibration(text, tokens, kv_scales)


def complete_backends(incomplete: str) -> list[str]:
    from wicore_trt.engine.options import BACKENDS

    return [name for name in BACKENDS if name.startswith(incomplete)]


def complete_recipes(incomplete: str) -> list[str]:
    from wicore_trt.recipe import list_recipes

    return [name for name in list_recipes() if name.startswith(incomplete)]
