"""Render chat templates in a process of its own: `python -m wicore_trt.text.template_worker`.

A template is a program from a file. jinja2's sandbox bounds neither its time nor its memory (a loop over 10^9), so
the kernel does. Must not know what messages mean, or files. Invariant: a job takes at most CPU_SECONDS of processor
time and MEMORY bytes, or the process ends.
"""

from __future__ import annotations

import datetime
import json
import resource
import signal
import struct
import sys
from functools import lru_cache
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    import jinja2

CPU_SECONDS = 2.0
MEMORY = 1 << 30
MAX_TEXT = 32 << 20  # bytes of an answer
_MESSAGE = 300  # characters of what went wrong
_KINDS = {b"t": "text", b"r": "refused", b"b": "broken"}


class _Refusal(Exception):
    """Refusal by the template itself, which called raise_exception."""


# Protocol. stdin: a length in 8 bytes and that much JSON: `source`, `tokens` and, to render and not only to compile,
# `values`. stdout: a length, a letter and that much UTF-8: "text" (without values the names that the template reads,
# one a line), "refused" when it called raise_exception, or "broken". The owner imports this module for the protocol
# alone, so jinja2 is imported where it is used.
def read_job(stream: IO[bytes]) -> Any:
    """Read one JSON value. Raises EOFError when the stream has ended, or the value is longer than MEMORY bytes."""
    head = stream.read(8)
    size = struct.unpack("<Q", head)[0] if len(head) == 8 else MEMORY + 1
    data = stream.read(size) if size <= MEMORY else b""
    if len(data) != size:
        raise EOFError
    return json.loads(data)


def write_job(stream: IO[bytes], value: Any) -> None:
    data = json.dumps(value, ensure_ascii=False).encode("utf-8", "surrogatepass")
    stream.write(struct.pack("<Q", len(data)) + data)
    stream.flush()


def read_answer(stream: IO[bytes]) -> dict[str, str]:
    """Read {"text"}, {"refused"} or {"broken"}. Raises EOFError as `read_job` does, also beyond MAX_TEXT bytes."""
    head = stream.read(9)
    size, kind = struct.unpack("<Qc", head) if len(head) == 9 else (MAX_TEXT + 1, b"")
    data = stream.read(size) if size <= MAX_TEXT else b""
    if len(data) != size:
        raise EOFError
    return {_KINDS[kind]: data.decode("utf-8", "surrogatepass")}


def main() -> None:
    """Answer jobs until stdin ends."""
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401 -- before there are limits: it is in no job's time

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal's; the owner ends this process by closing stdin
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # which ends the process, also inside of a long string operation
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    limit = MEMORY if hard == resource.RLIM_INFINITY else min(MEMORY, hard)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    while True:
        try:
            job = read_job(sys.stdin.buffer)
        except EOFError:
            return
        signal.setitimer(signal.ITIMER_PROF, CPU_SECONDS)
        answer = _answer(job)
        signal.setitimer(signal.ITIMER_PROF, 0)
        [(name, text)] = answer.items()  # not as JSON, in which some texts are six times as long
        data = text.encode("utf-8", "surrogatepass")
        sys.stdout.buffer.write(struct.pack("<Qc", len(data), name[:1].encode()) + data)
        sys.stdout.buffer.flush()


def _answer(job: dict[str, Any]) -> dict[str, str]:
    try:
        template, names = _compiled(job["source"])
        text = names if job["values"] is None else template.render(job["tokens"] | job["values"])
        if len(text.encode("utf-8", "surrogatepass")) > MAX_TEXT:
            return {"broken": f"it makes more than {MAX_TEXT} bytes of text"}
        return {"text": text}
    except _Refusal as error:
        return {"refused": str(error)[:_MESSAGE]}
    except MemoryError:
        return {"broken": "it takes too much memory"}
    except Exception as error:
        return {"broken": " ".join(f"{type(error).__name__}: {error}".split())[:_MESSAGE]}


@lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[jinja2.Template, str]:
    """Compile a template; return it with the names that it reads and does not set, one a line.
    The environment is that of transformers' apply_chat_template (utils/chat_template_utils.py): sandboxed,
    immutable, trimmed blocks, loop controls, `generation` blocks, raise_exception, strftime_now, and a tojson filter
    that does not escape HTML."""
    import jinja2.ext
    import jinja2.meta
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """Block {% generation %}: marks what trainers learn from, and leaves the text as it is."""

        tags = {"generation"}

        def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )

    def refuse(message: str) -> NoReturn:
        raise _Refusal(message)

    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda form: datetime.datetime.now().strftime(form)
    environment.filters["tojson"] = _tojson
    names = jinja2.meta.find_undeclared_variables(environment.parse(source))
    return environment.from_string(source), "\n".join(sorted(names))


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


if __name__ == "__main__":
    main()
