"""`wicore chat`: a conversation in the terminal, with a running server or an engine in this process.

Invariants: standard output carries the answers and, on a terminal, the prompts; notes and counts go to standard error;
what a model writes cannot steer a terminal. Ctrl-C ends an answer, not the program. Closing a partner's stream, or an
exception inside it, ends its request.
"""

from __future__ import annotations

import json
import mimetypes
import signal
import sys
import time
from base64 import b64encode
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from wicore_trt.errors import AuthenticationError, InvalidRequestError, UnavailableError, WicoreError

HELP = (
    "/reset begins anew, /system TEXT sets the system prompt, /image FILE shows an image with the next line, "
    "/save FILE writes the conversation as JSON, // says /."
)

Prompt = str | Sequence[Mapping[str, Any]]
TIMEOUT_S = 600.0


def command(
    where: Annotated[
        str, Argument(metavar="[ADDRESS|URL|ENGINE]", help="HOST:PORT of gRPC, URL, or engine directory.")
    ] = "127.0.0.1:50051",
    system: Annotated[str, Option(help="System prompt.")] = "",
    image: Annotated[
        list[str] | None, Option(metavar="FILE", help="An image that the first line shows; may be repeated.")
    ] = None,
    max_tokens: Annotated[int, Option(help="Most tokens of an answer.")] = 512,
    temperature: Annotated[float, Option(help="0 takes the most probable token each time.")] = 1.0,
    top_p: Annotated[float, Option(help="Sample among the most probable tokens that make up this mass.")] = 0.95,
    seed: Annotated[int | None, Option(help="Makes sampling repeatable.")] = None,
    api_key: Annotated[
        str | None, Option(envvar="WICORE_SERVER__API_KEY", show_envvar=False, help="The server's API key.")
    ] = None,
    ca: Annotated[Path | None, Option(help="Certificates to trust, PEM; turns TLS on for gRPC.")] = None,
    threads: Annotated[int, Option(help="CPU threads of an engine in this process; 0: all.")] = 0,
) -> None:
    """Talk to a model: a running server's, or an engine's in this process.

    Each line is a turn. Ctrl-C stops an answer, Ctrl-D ends. /help lists commands.
    """
    sampling = {"max_tokens": max_tokens, "temperature": temperature, "top_p": top_p, "seed": seed}
    partner = open_partner(where, api_key=api_key, ca=ca, threads=threads)
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
            fix = "Ask it once: wicore generate --image FILE."
            raise WicoreError("This model has no chat template, so a conversation with it shows no images.", fix=fix)
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


@dataclass(frozen=True, slots=True)
class ReplyPart:
    """Text that came, and the counts (prompt, completion, cached) where they are known."""

    text: str
    counts: tuple[int, int, int] | None = None


@dataclass(frozen=True, slots=True)
class Partner:
    """`chats`: whether the model has a chat template. `steps_here`: the work is done in this process, and must not be
    left in the middle of a step."""

    chats: bool
    stream: Callable[[Prompt, Mapping[str, Any]], Iterator[ReplyPart]]
    close: Callable[[], None]
    steps_here: bool = False


def open_partner(where: str, *, api_key: str | None, ca: Path | None, threads: int) -> Partner:
    """Choose the partner by `where`: a URL, an engine's directory, else HOST:PORT of gRPC."""
    if where.startswith(("http://", "https://")):
        return _open_http(where.rstrip("/"), api_key, ca)
    if Path(where).is_dir():
        from wicore_trt.llm import LLM

        llm = LLM(Path(where), executor__threads=threads)
        return Partner(llm.info.chat, _adapt_stream(llm.stream), llm.close, steps_here=True)
    if "/" in where:
        raise InvalidRequestError(f"{where} is neither a directory nor an address.", field="where")
    from wicore_trt.client import Client

    client = Client(where, api_key=api_key, ca=ca)
    return Partner(client.has_chat_template(), _adapt_stream(client.stream), client.close)


def _adapt_stream(stream: Callable[..., Any]) -> Callable[[Prompt, Mapping[str, Any]], Iterator[ReplyPart]]:
    """Adapt `LLM.stream` and `Client.stream` to ReplyPart."""

    def pieces(prompt: Prompt, sampling: Mapping[str, Any]) -> Iterator[ReplyPart]:
        from wicore_trt.types import SamplingParams

        outputs = stream(prompt, SamplingParams(**sampling))
        try:
            for output in outputs:
                usage = output.usage
                counts = (usage.prompt_tokens, usage.completion_tokens, usage.cached_tokens) if usage else None
                yield ReplyPart(output.text, counts)
        finally:
            outputs.close()

    return pieces


def _open_http(url: str, api_key: str | None, ca: Path | None) -> Partner:
    def call(path: str, body: object = None) -> Any:
        return _send_request(url, path, body, api_key, ca)

    with call("/status") as answer:
        model = json.load(answer)["model"]
    if model is None:
        raise UnavailableError(f"{url} is loading its engine.", fix="Try again in a moment.")

    def stream(prompt: Prompt, sampling: Mapping[str, Any]) -> Iterator[ReplyPart]:
        options = {"stream": True, "stream_options": {"include_usage": True}}
        body = {**options, **{name: value for name, value in sampling.items() if value is not None}}
        path, field = ("/v1/completions", "prompt") if isinstance(prompt, str) else ("/v1/chat/completions", "messages")
        with call(path, {**body, field: prompt}) as answer:
            yield from _read_parts(answer)

    return Partner(model["chat"], stream, lambda: None)


def _send_request(url: str, path: str, body: object, api_key: str | None, ca: Path | None) -> Any:
    """Send a request and return the response. Raises the error that the server reports."""
    import ssl
    from urllib.error import HTTPError, URLError
    from urllib.request import HTTPSHandler, ProxyHandler, Request, build_opener

    headers = {"content-type": "application/json"} | ({"authorization": f"Bearer {api_key}"} if api_key else {})
    request = Request(url + path, None if body is None else json.dumps(body).encode(), headers)
    opener = build_opener(ProxyHandler({}), HTTPSHandler(context=ssl.create_default_context(cafile=ca)))
    try:
        return opener.open(request, timeout=TIMEOUT_S)
    except HTTPError as error:
        try:
            text = json.load(error)["error"]["message"]
        except (ValueError, KeyError, TypeError):
            text = f"{url} answered {error.code}."
        known = {401: AuthenticationError, 503: UnavailableError}
        raise known.get(error.code, WicoreError)(text) from None
    except URLError as error:
        why = getattr(error.reason, "strerror", None) or error.reason
        fix = "Start a server (wicore serve) or give another address."
        raise UnavailableError(f"No server answers at {url}: {why}.", fix=fix) from None


def _read_parts(lines: Any) -> Iterator[ReplyPart]:
    """Read the events of a streamed answer. Raises WicoreError for one that breaks off."""
    failed = False
    for raw in lines:
        line = raw.decode().rstrip("\r\n")
        failed = failed or line == "event: error"
        if not line.startswith("data: "):
            continue
        if line == "data: [DONE]":
            return
        data = json.loads(line[6:])
        if failed:
            raise WicoreError(data["error"]["message"])
        choice: dict[str, Any] = next(iter(data["choices"]), {})
        text = choice.get("text") or choice.get("delta", {}).get("content") or ""
        usage = data.get("usage")
        counts = None
        if usage:
            cached = usage["prompt_tokens_details"]["cached_tokens"]
            counts = (usage["prompt_tokens"], usage["completion_tokens"], cached)
        yield ReplyPart(text, counts)
    raise WicoreError("The connection ended before the answer did.")
