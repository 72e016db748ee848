"""`wicore chat`: a conversation in the terminal, with a running server or an engine in this process.

Invariants: standard output carries the answers and, on a terminal, the prompts; notes and counts go to standard error;
what a model writes cannot steer a terminal. Ctrl-C ends an answer, not the program.
"""

from __future__ import annotations

import json
import mimetypes
import signal
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from wicore_trt.errors import WicoreError

if TYPE_CHECKING:
    from wicore_trt.cli._partner import Partner

HELP = (
    "/reset begins anew, /system TEXT sets the system prompt, /image FILE shows an image with the next line, "
    "/save FILE writes the conversation as JSON, // says /."
)


def command(
    where: Annotated[
        str, typer.Argument(metavar="[ADDRESS|URL|ENGINE]", help="HOST:PORT of gRPC, URL, or engine directory.")
    ] = "127.0.0.1:50051",
    system: Annotated[str, typer.Option(help="System prompt.")] = "",
    image: Annotated[
        list[str] | None, typer.Option(metavar="FILE", help="An image that the first line shows; may be repeated.")
    ] = None,
    max_tokens: Annotated[int, typer.Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, typer.Option(help="0 takes the most probable token each time.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Sample among the most probable tokens that make up this mass.")] = 0.95,
    seed: Annotated[int | None, typer.Option(help="Makes sampling repeatable.")] = None,
    api_key: Annotated[
        str | None, typer.Option(envvar="WICORE_SERVER__API_KEY", show_envvar=False, help="The server's API key.")
    ] = None,
    ca: Annotated[Path | None, typer.Option(help="Certificates to trust, PEM; turns TLS on for gRPC.")] = None,
    threads: Annotated[int, typer.Option(help="CPU threads of an engine in this process; 0: all.")] = 0,
) -> None:
    """Talk to a model: a running server's, or an engine's in this process.

    Each line is a turn. Ctrl-C stops an answer, Ctrl-D ends. /help lists commands.
    """
    from wicore_trt.cli._partner import partner_of

    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    partner = partner_of(where, api_key=api_key, ca=ca, threads=threads)
    talk = ChatSession(partner, sampling, system, tty=sys.stdin.isatty() and sys.stdout.isatty())
    try:
        if not partner.chats:
            print_note(
                "This model has no chat template: it does not answer, it continues the text so far and what you write."
            )
        for path in image or ():
            talk.attach_image(path)
        talk.run_session()
    finally:
        partner.close()


def print_note(text: str) -> None:
    """Print a line that is no answer to stderr."""
    print(f"\033[2m{text}\033[0m" if sys.stderr.isatty() else text, file=sys.stderr, flush=True)


def strip_controls(text: str) -> str:
    """Remove characters that steer a terminal."""
    return "".join(c for c in text if c in "\n\t" or (ord(c) >= 32 and not 127 <= ord(c) < 160))


@dataclass(slots=True)
class ChatSession:
    """Conversation in a terminal. `tty`: somebody types and reads."""

    partner: Partner
    sampling: dict[str, Any]
    system: str
    tty: bool
    turns: list[dict[str, Any]] = field(default_factory=list)
    images: list[dict[str, Any]] = field(default_factory=list)
    """Parts of the next turn, as data: URLs, which every partner and a saved file take."""
    saved: set[str] = field(default_factory=set)  # files that are ours to write again

    def run_session(self) -> None:
        """Run until the end of input. Failures are printed on a terminal; without one the first failure ends the
        session."""
        if self.tty:
            import readline  # noqa: F401  (edits lines and remembers them)

            print_note(HELP)
        for line in self._read_lines():
            try:
                if line.startswith("/") and not line.startswith("//"):
                    self._obey_command(line)
                elif line.strip():
                    self._print_answer(line.removeprefix("/") if line.startswith("//") else line)
            except WicoreError as error:
                if not self.tty:
                    raise
                print_note(f"error: {error}")

    def _read_lines(self) -> Iterator[str]:
        if not self.tty:
            yield from (line.rstrip("\r\n") for line in sys.stdin)
            return
        while True:
            try:
                with on_interrupt(_raise_interrupt):
                    line = input("> ")
            except EOFError:
                print()
                return
            except KeyboardInterrupt:
                print()
                print_note("Ctrl-D ends.")
                continue
            yield line

    def _obey_command(self, line: str) -> None:
        name, _, rest = line.partition(" ")
        rest = rest.strip()
        if name == "/reset":
            self.turns.clear()
            self.images.clear()
            print_note("A new conversation.")
        elif name == "/system":
            self.system = rest
            print_note("The system prompt is set." if rest else "There is no system prompt any more.")
            if not self.partner.chats:
                print_note("A model without chat template does not see it.")
        elif name == "/image" and rest:
            self.attach_image(rest)
            print_note("The next line shows it.")
        elif name == "/save" and rest:
            try:
                with Path(rest).expanduser().open("w" if rest in self.saved else "x", encoding="utf-8") as file:
                    file.write(json.dumps(self._list_messages(), ensure_ascii=False, indent=1) + "\n")
            except OSError as error:
                raise WicoreError(f"{rest}: {error.strerror}.") from None
            self.saved.add(rest)
            print_note(f"Saved to {rest}.")
        else:
            print_note(HELP)

    def attach_image(self, path: str) -> None:
        """Show an image with the next line. Raises InvalidRequestError for a file that cannot be read."""
        from wicore_trt.images.files import read_image

        if not self.partner.chats:
            raise WicoreError("A model without chat template takes no images here.")
        image = read_image(path if ":" in path else str(Path(path).expanduser()), "image")
        kind = mimetypes.guess_type(path)[0] or "image/png"
        url = image.url or f"data:{kind};base64,{b64encode(image.data).decode()}"
        self.images.append({"type": "image_url", "image_url": {"url": url}})

    def _list_messages(self) -> list[dict[str, Any]]:
        return ([{"role": "system", "content": self.system}] if self.system else []) + self.turns

    def _make_prompt(self) -> Any:
        """Make the conversation, or for a model without template all text so far."""
        if self.partner.chats:
            return self._list_messages()
        text = ""
        for turn in self.turns:
            apart = text and not text[-1].isspace() and not turn["content"][:1].isspace()
            text += ("\n" if apart else "") + turn["content"]
        return text

    def _print_answer(self, line: str) -> None:
        """Send a line and print the answer. A turn that fails is taken back."""
        shown, self.images = self.images, []
        self.turns.append({"role": "user", "content": [*shown, {"type": "text", "text": line}] if shown else line})
        parts: list[str] = []
        started = first = time.perf_counter()
        counts, stopped = None, False
        try:
            with self._allow_interrupt() as asked:
                pieces = self.partner.stream(self._make_prompt(), self.sampling)
                try:
                    for piece in pieces:
                        first = first if parts else time.perf_counter()
                        parts.append(piece.text)
                        counts = piece.counts or counts
                        sys.stdout.write(strip_controls(piece.text) if sys.stdout.isatty() else piece.text)
                        sys.stdout.flush()
                        if asked:
                            stopped = True
                            break
                finally:
                    pieces.close()  # type: ignore[attr-defined]
        except KeyboardInterrupt:
            if not self.tty:
                raise
            stopped = True
        except WicoreError:
            self.turns.pop()
            if parts:
                print()
            raise
        print(flush=True)
        if text := "".join(parts):
            self.turns.append({"role": "assistant", "content": text})
        else:
            self.turns.pop()  # stopped before it began
        if not self.tty:
            return
        if counts is None:
            print_note("[stopped]")
            return
        prompt, output, cached = counts
        rest_s = time.perf_counter() - first
        rate = f", {(output - 1) / rest_s:.1f} tokens/s" if output > 1 and rest_s > 0 else ""
        end, cache = "stopped; " if stopped else "", f"prompt {prompt}, {cached} from the cache"
        print_note(f"[{end}{output} tokens; {cache}; first after {first - started:.2f} s{rate}]")

    @contextmanager
    def _allow_interrupt(self) -> Iterator[list[int]]:
        """While somebody is there Ctrl-C ends the answer: at once, or behind the step that runs in this process, which
        must not be left half-way. The list then holds something."""
        asked: list[int] = []
        handler = (lambda *_: asked.append(1)) if self.partner.steps_here else _raise_interrupt
        with on_interrupt(handler) if self.tty else nullcontext():
            yield asked


def _raise_interrupt(*_: object) -> None:
    """Raise KeyboardInterrupt, in place of `cli.main`'s handler: this interrupt does not end the program."""
    raise KeyboardInterrupt


@contextmanager
def on_interrupt(handler: Callable[..., object]) -> Iterator[None]:
    """Replace the handler of Ctrl-C meanwhile."""
    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
