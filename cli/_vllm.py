"""Options of `vllm serve` as `wicore serve` takes them.

One table maps each name to our option, to the reason why it changes nothing, or to the reason why it is refused. Must
not know settings. Invariant: no option of the table is dropped silently.
"""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import typer
from typer.core import TyperCommand

RENAMED = {
    "--max-model-len": "--max-context", "--max-num-seqs": "--max-sequences",
    "--max-num-batched-tokens": "--max-batch-tokens", "--kv-cache-memory-bytes": "--kv-bytes",
    "--kv-offloading-size": "--kv-host-bytes", "--ssl-certfile": "--tls-cert", "--ssl-keyfile": "--tls-key",
    "--ssl-ca-certs": "--tls-client-ca", "--allowed-origins": "--cors-origins",
    "--uvicorn-log-level": "--log-level", "--data-parallel-size": "--replicas",
}  # fmt: skip
"""Option of vLLM to the option with the same meaning."""

_COUNTS = {"k": 10**3, "m": 10**6, "K": 2**10, "M": 2**20}  # "32k" and "32K" of vLLM's counts
_COUNTED = {"--max-model-len", "--max-num-seqs", "--max-num-batched-tokens"}

UNNEEDED = {
    "--enable-prefix-caching": "prefixes are cached unless kv.prefix_cache is off",
    "--enable-chunked-prefill": "prompts are always cut to what a step has time for",
    "--async-scheduling": "steps are always scheduled ahead",
    "--trust-remote-code": "no code of a model runs",
    "--enable-auto-tool-choice": "tools are always served",
    "--language-model-only": "an engine built with --text-only reads no images",
    "--enforce-eager": "an engine is compiled before it is served",
    "--disable-custom-all-reduce": "ranks exchange within their kernels",
    "--disable-log-requests": "the log has a line for each request; --log-level warning leaves it out",
    "--no-enable-log-requests": "the log has a line for each request; --log-level warning leaves it out",
    "--disable-log-stats": "the log has no statistics; /metrics has",
    "--disable-uvicorn-access-log": "--log-level warning leaves lines of requests out",
}
"""Flags of vLLM without a value that change nothing, and the reason."""

UNNEEDED_VALUES = {
    "--tool-call-parser": "the engine's chat template decides",
    "--reasoning-parser": "Gemma 3 does not reason in marks", "--load-format": "an engine has one format",
    "--tokenizer-mode": "an engine has its tokenizer",
    "--block-size": "pages have the engine's size; kv.page_tokens sets another",
    "--swap-space": "--kv-host-bytes gives host memory to the cache", "--seed": "a request's own seed decides",
    "--generation-config": "the engine's generation_config.json is served",
    "--attention-backend": "the engine has its kernels",
    "--compilation-config": "an engine is compiled before it is served",
    "--download-dir": "an engine is on this machine", "--max-log-len": "prompts are not logged",
}  # fmt: skip
"""Options of vLLM with a value that change nothing, and the reason."""

REFUSED = {
    "--tensor-parallel-size": (("1",), "the engine has its ranks: wicore build --tp"),
    "--pipeline-parallel-size": (("1",), "layers are not spread over GPUs"),
    "--dtype": (("auto",), "the engine has its dtype: wicore build --dtype"),
    "--quantization": ((), "the engine has its dtype: wicore build --dtype"),
    "--kv-cache-dtype": (("auto",), "the engine has its KV dtype: wicore build --kv-dtype"),
    "--tokenizer": ((), "the engine has its tokenizer: build it from a source with another"),
    "--revision": ((), "the engine was built from one revision: wicore build --revision"),
    "--chat-template": ((), "the engine has its template: build it from a source with another"),
    "--hf-overrides": ((), "the engine has its configuration: build it from a source with another"),
    "--lora-modules": ((), "adapters are merged when an engine is built: wicore build --lora"),
    "--speculative-config": ((), "there is no speculative decoding"),
    "--cpu-offload-gb": (("0",), "weights stay on the device"),
    "--root-path": (("",), "routes begin at /"),
    "--config": ((), "settings of a file are a recipe: wicore serve RECIPE"),
}
"""Option of vLLM to the values that ask for nothing, and the reason for which others are refused."""

_SHORT = {"-tp": "--tensor-parallel-size", "-pp": "--pipeline-parallel-size", "-dp": "--data-parallel-size"}
_SHORT |= {"-q": "--quantization"}


class ServeCommand(TyperCommand):
    """`wicore serve`, which takes vLLM's options too."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        return super().parse_args(ctx, translate_options(args))


def translate_options(args: list[str]) -> list[str]:
    """Translate arguments of `vllm serve` for `wicore serve`; our own options stay. Prints a line for each option that
    changes nothing. Raises typer.BadParameter for a refused one."""
    found: list[str] = []
    rest = iter(args)
    for arg in rest:
        name, given, value = arg.partition("=")
        name = _SHORT.get(name, name.replace("_", "-") if name.startswith("--") else name)
        if name == "--model":
            found.append(value if given else next(rest, ""))
        elif name in UNNEEDED:
            _report_ignored(name, UNNEEDED[name])
        elif name in RENAMED or name in UNNEEDED_VALUES or name in REFUSED:
            value = value if given else next(rest, "")
            if name in RENAMED:
                found += _rename_flag(name, value)
            elif name in UNNEEDED_VALUES:
                _report_ignored(name, UNNEEDED_VALUES[name])
            elif value not in REFUSED[name][0]:
                raise typer.BadParameter(f"not served: {REFUSED[name][1]}.", param_hint=name)
        else:
            found.append(name + given + value)
    return found


def _rename_flag(name: str, value: str) -> list[str]:
    if name == "--max-model-len" and value in ("auto", "-1"):
        return []
    if name == "--kv-offloading-size":
        value += "GiB"  # vLLM's unit
    elif name == "--allowed-origins" and value.startswith("["):
        value = ",".join(json.loads(value))
    elif name in _COUNTED and (match := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmM])", value)):
        value = str(int(float(match[1]) * _COUNTS[match[2]]))
    return [RENAMED[name], value]


def _report_ignored(name: str, reason: str) -> None:
    print(f"note: {name} changes nothing: {reason}.", file=sys.stderr)
