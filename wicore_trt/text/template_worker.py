"""Render chat templates in a process of its own, which `text.chat` owns.

A template is a program from a file. jinja2's sandbox bounds neither its time nor its memory (a loop over 10^9), so
the kernel does. Must not know what messages mean, or files. Invariant: a job takes at most LIMITS, or the process ends.
"""

from __future__ import annotations

import datetime
import json
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NoReturn

from wicore_trt.worker_process import WorkerLimits, serve_jobs

if TYPE_CHECKING:
    import jinja2

LIMITS = WorkerLimits(cpu_seconds=2.0, memory=1 << 30, answer=32 << 20)
_MESSAGE = 300  # characters of what went wrong


class _Refusal(Exception):
    """Refusal by the template itself, which called raise_exception."""


def main() -> None:
    """Answer jobs until stdin ends."""
    import jinja2.ext
    import jinja2.sandbox  # noqa: F401 -- before there are limits: it is in no job's time

    serve_jobs(_answer_job, LIMITS)


# A job is JSON: `source`, `tokens` and, to render and not only to compile, `values`. The owner imports this module for
# the limits alone, so jinja2 is imported where it is used.
def _answer_job(data: bytes) -> bytes:
    """Return "t" and the text (without values the names that the template reads, one a line), or "r" and the message
    of a template that called raise_exception."""
    job = json.loads(data)
    try:
        template, names = _compiled(job["source"])
        text = names if job["values"] is None else template.render(job["tokens"] | job["values"])
        return b"t" + text.encode("utf-8", "surrogatepass")
    except _Refusal as error:
        return b"r" + str(error)[:_MESSAGE].encode("utf-8", "surrogatepass")


@lru_cache(maxsize=8)
def _compiled(source: str) -> tuple[jinja2.Template, str]:
    """Compile a template; return it with the names that it reads and does not set, one a line.
    The environment follows transformers' apply_chat_template (utils/chat_template_utils.py): sandboxed,
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
