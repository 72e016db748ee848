"""A supervised server over the fake engine: python fake_parts.py '{"step_s": 0.01, "server": {...}}'.

Prints `bound ADDRESS` and `ready on ADDRESS`. Options reach the other processes by WICORE_TEST_OPTIONS: `step_s`,
`load_s`, `fail_at` (the step that breaks an engine), `hang_at` (one that does not end), `load_fails`, `stands` (an
engine stops itself while it loads), `ranks` (that it says it has), `backlog` (bytes after which the engine cuts off a
front), `dies` (the process that ends while it starts, every time), `chat` (the model has a chat template or not, and
any text has tokens), `host_bytes` of a host tier, and `pids`, a folder where each process leaves its number; `front_s`,
`silence_s` (of an engine that loads), `quiet_s`, `dump_s`, `slow_s`, `quick_s`, `patience` and `together_s` are the
supervisor's and its log's; with `narrow` its sockets hold few messages; with `images` the engine sees. `recipe` names a
file of settings that the server reads, and reads again; `build` one that names the engine's build. While the file
`hold` is there, engines stand still after ten steps, and none loads; while `short` is in `pids`, none finds the memory
to load. With `both` lines have the address of gRPC before that of HTTP.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import signal
import socket
import sys
import time
from dataclasses import replace
from pathlib import Path

from fake_tokenizer import IMAGE_BEGIN, IMAGE_END, IMAGE_SOFT, FakeTokenizer, encode_any

from wicore_trt.access import log
from wicore_trt.config import KVSettings, LoadedSettings, LogSettings, ServerSettings, Settings, resolve_settings
from wicore_trt.errors import EngineFormatError, WicoreError
from wicore_trt.process import child, supervisor
from wicore_trt.process.supervisor import Supervisor
from wicore_trt.text.chat import content_text
from wicore_trt.text.images import expand_marks
from wicore_trt.types import ImageInfo

MAX_CONTEXT = 4096
HERE = "process.fake_parts"


def options() -> dict:
    return json.loads(os.environ["WICORE_TEST_OPTIONS"])


def leave_number(name: str) -> None:
    if "pids" in options():
        (Path(options()["pids"]) / f"{name}-{os.getpid()}").touch()
    if options().get("dies") == name:
        os._exit(3)


def load_engine(settings: Settings):
    from fakes import FAKE_INFO, FakeEncoder, hold_steps, make_core

    from wicore_trt.link import channel
    from wicore_trt.model.spec import GLOBAL, LOCAL

    leave_number("engine")
    given = options()
    exit_thread = {"x86_64": 60}.get(platform.machine(), 93)  # SYS_exit: the main thread ends, the others go on
    signal.signal(signal.SIGUSR2, lambda *_: ctypes.CDLL(None).syscall(exit_thread, 0))
    channel.MAX_BACKLOG = given.get("backlog", channel.MAX_BACKLOG)
    time.sleep(given.get("load_s", 0))
    hold = Path(given.get("hold", "/nowhere"))
    while hold.exists():
        time.sleep(0.005)
    if given.get("stands"):
        os.kill(os.getpid(), signal.SIGSTOP)
    if "pids" in given and (Path(given["pids"]) / "short").exists():
        raise MemoryError("the machine is short of it")
    if given.get("load_fails"):
        raise EngineFormatError("engine.json is missing.")
    sequences = given.get("max_sequences", 64)
    pages = {GLOBAL: max(sequences * 40, 1200), LOCAL: max(sequences * 12, 400)}
    core = make_core(
        pages=pages, max_context=MAX_CONTEXT, max_sequences=sequences,
        kv=KVSettings(host_bytes=given["host_bytes"]) if "host_bytes" in given else None,
        images=FakeEncoder() if given.get("images") else None,
    )  # fmt: skip
    core.executor.step_s = given.get("step_s", 0.0)
    core.executor.fail_at = given.get("fail_at")
    hold_steps(core.executor, hold)
    if "hang_at" in given:
        hang_at(core.executor, given["hang_at"])
    info = replace(FAKE_INFO, max_context_tokens=MAX_CONTEXT, bos_token_id=2, chat=given.get("chat", False))
    images = ImageInfo(8, FakeEncoder.tokens, IMAGE_BEGIN, IMAGE_SOFT, IMAGE_END) if given.get("images") else None
    return core, replace(info, build=build(), images=images, ranks=given.get("ranks", 1))


def build() -> str:
    return Path(options()["build"]).read_text() if "build" in options() else ""


def hang_at(executor, step: int) -> None:
    execute = executor.execute

    def hanging(batch):
        while len(executor.steps) >= step:
            time.sleep(1)
        return execute(batch)

    executor.execute = hanging


class AnyTextTokenizer(FakeTokenizer):
    """Every character has a token, several may have one."""

    def encode(self, text, *, add_bos=True, max_tokens=None):
        return encode_any(text)

    def apply_chat(self, messages, *, images=(), **_):
        text = "".join(content_text("messages", message["content"]) for message in messages)
        return self.encode(expand_marks([text], images, "messages")[0])


def load_tokenizer(settings: Settings, checked_build: str | None) -> FakeTokenizer:
    leave_number("front")
    if "pids" in options():
        (Path(options()["pids"]) / "checked").write_text(str(checked_build))
    tokenizer = AnyTextTokenizer() if "chat" in options() else FakeTokenizer()
    tokenizer.build = build()
    return tokenizer


def main(given: dict) -> int:
    os.environ["WICORE_TEST_OPTIONS"] = json.dumps(given)
    logs = LogSettings(level=given.get("level", "info"), json=given.get("json", False))
    log.configure_logging(json_lines=logs.json, level=logs.level.upper())
    log.TOGETHER_S = given.get("together_s", log.TOGETHER_S)
    if given.get("narrow"):
        socketpair = socket.socketpair

        def narrow_pair(*kind):
            pair = socketpair(*kind)
            pair[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)
            return pair

        child.socket.socketpair = narrow_pair
    supervisor.FRONT_S = given.get("front_s", supervisor.FRONT_S)
    supervisor.QUIET_S = given.get("quiet_s", supervisor.QUIET_S)
    supervisor.LOAD_S = given.get("silence_s", supervisor.LOAD_S)
    child.QUICK_S = given.get("quick_s", child.QUICK_S)
    child.PATIENCE = supervisor.PATIENCE = given.get("patience", child.PATIENCE)
    supervisor.DUMP_S = given.get("dump_s", supervisor.DUMP_S)
    supervisor.SLOW_S = given.get("slow_s", supervisor.SLOW_S)
    server = ServerSettings(**{"port": 0, "http_port": None, "grace_s": 60.0, **given.get("server", {})})
    both = given.get("both", False)
    tell = lambda kind: lambda address, url: print(kind, *[address] * both, url or address, flush=True)  # noqa: E731
    recipe = given.get("recipe")
    overrides = {"server.grace_s": 60.0, "server.port": 0, "server.http_port": "none"}
    overrides |= {f"server.{key}": value for key, value in given.get("server", {}).items()}

    def read() -> LoadedSettings:
        if recipe is None:
            return LoadedSettings(Settings(server=server, log=logs), {})
        return resolve_settings(recipe, overrides, {})

    try:
        return Supervisor(
            read(),
            max_context=MAX_CONTEXT,
            load_engine=f"{HERE}:load_engine",
            load_tokenizer=f"{HERE}:load_tokenizer",
            reread=read,
            report_bound=tell("bound"),
            report_serving=tell("ready on"),
        ).run()
    except WicoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
