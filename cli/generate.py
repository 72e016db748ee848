"""`wicore generate`: complete one prompt with an engine in this process, streaming to the terminal.

Invariant: standard output carries the completion (or one JSON object) and nothing else.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from wicore_trt.errors import InvalidRequestError


def command(
    engine: Annotated[Path, Argument(help="Engine directory.", show_default=False)],
    prompt: Annotated[
        str | None, Argument(help="The prompt; read from standard input when it is left out or '-'.")
    ] = None,
    max_tokens: Annotated[int, Option(help="Most tokens to generate.")] = 128,
    temperature: Annotated[float, Option(help="0 takes the most probable token each time.")] = 0.0,
    top_k: Annotated[int, Option(help="Sample among the k most probable tokens; 0: all.")] = 0,
    top_p: Annotated[float, Option(help="Sample among the most probable tokens that make up this mass.")] = 1.0,
    min_p: Annotated[float, Option(help="Drop tokens below this share of the best one's probability.")] = 0.0,
    repetition_penalty: Annotated[float, Option(help="Above 1 makes seen tokens less likely.")] = 1.0,
    seed: Annotated[int | None, Option(help="Makes sampling repeatable.")] = None,
    stop: Annotated[list[str] | None, Option(help="Stop at this text; may be given several times.")] = None,
    image: Annotated[
        list[str] | None,
        Option(metavar="FILE", help="An image that the prompt shows; may be given several times."),
    ] = None,
    chat: Annotated[
        bool, Option("--chat", help="Wrap the prompt as a user turn of the model's chat template.")
    ] = False,
    ignore_eos: Annotated[bool, Option("--ignore-eos", help="Go on after end-of-sequence tokens.")] = False,
    threads: Annotated[int, Option(help="CPU threads; 0: all.")] = 0,
    as_json: Annotated[bool, Option("--json", help="Print one JSON object instead of the text.")] = False,
) -> None:
    """Complete one prompt, without a server.

    Images come first, or where a prompt without --chat has <start_of_image>.
    """
    from wicore_trt.cli._ui import progress
    from wicore_trt.images.files import read_image
    from wicore_trt.types import SamplingParams

    params = SamplingParams(
        max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p,
        repetition_penalty=repetition_penalty, seed=seed, stop=tuple(stop or ()), ignore_eos=ignore_eos,
    )  # fmt: skip
    text = prompt
    if text is None or text == "-":
        try:
            text = sys.stdin.buffer.read().decode().removesuffix("\n")
        except UnicodeDecodeError as error:
            raise InvalidRequestError(f"Standard input is not UTF-8: {error}.", field="prompt") from error
    images = [read_image(path, f"--image {path}") for path in image or ()]
    asked: Any = {"prompt": text, "images": images} if images else text
    if chat:
        shown = [{"type": "image", "image": one} for one in images]
        asked = [{"role": "user", "content": [*shown, {"type": "text", "text": text}] if images else text}]
    with progress(quiet=as_json) as report:
        report(f"loading {engine}", 0, 1)
        from wicore_trt.llm import LLM

        llm = LLM(engine, executor__threads=threads)
        report(f"loading {engine}", 1, 1)
    with llm:
        started = time.perf_counter()
        outputs = llm.stream(asked, params)
        parts: list[str] = []
        first = started
        for output in outputs:
            first = first if parts else time.perf_counter()
            parts.append(output.text)
            if not as_json:
                sys.stdout.write(output.text)
                sys.stdout.flush()
        elapsed = time.perf_counter() - first
        usage = output.usage
        assert usage is not None and output.finish_reason is not None
    rate = (usage.completion_tokens - 1) / elapsed if usage.completion_tokens > 1 else None
    if as_json:
        result: dict[str, Any] = {
            "text": "".join(parts), "finish_reason": output.finish_reason.value, "stop_reason": output.stop_reason,
            "prompt_tokens": usage.prompt_tokens, "completion_tokens": usage.completion_tokens,
            "ttft_s": round(first - started, 4), "tokens_per_s": rate and round(rate, 1),
        }  # fmt: skip
        print(json.dumps(result, ensure_ascii=False))
        return
    print()
    if sys.stderr.isatty():
        speed = f", {rate:.1f} tokens/s" if rate else ""
        print(f"[{usage.completion_tokens} tokens, first after {first - started:.2f} s{speed}]", file=sys.stderr)
