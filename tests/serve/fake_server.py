"""A server process over the fake engine: python fake_server.py '{"step_s": 0.01, "load_s": 0, "server": {...}}'.

`hold` names a file: while it is there, the engine stands still after ten steps.
"""

from __future__ import annotations

import asyncio
import json
import signal
import sys
import time
from pathlib import Path

from fakes import hold_steps
from serving import make_engine

from wicore_trt.access import log
from wicore_trt.config import ServerSettings
from wicore_trt.core.offload import Offload
from wicore_trt.core.text_engine import TextEngine
from wicore_trt.errors import EngineFormatError, WicoreError
from wicore_trt.serve.lifecycle import Servers, ServingProcess


class LocalProcess(ServingProcess):
    """Loads the engine in this process; a signal stops it."""

    def __init__(self, options: dict) -> None:
        super().__init__(ServerSettings(**{"port": 0, "http_port": None, **options.get("server", {})}))
        self._options = options

    def begin_watching(self, servers: Servers) -> None:
        for number in (signal.SIGTERM, signal.SIGINT):
            asyncio.get_running_loop().add_signal_handler(number, self.stop_serving)
        self._loading = asyncio.ensure_future(Offload(1).run_function("", self._load))
        self._loading.add_done_callback(lambda _: self.changed.set())

    def find_engine(self) -> TextEngine | None:
        return self._loading.result() if self._loading.done() else None

    def report_bound(self, address: str, url: str | None) -> None:
        print(url or address, flush=True)

    def _load(self) -> TextEngine:
        options = self._options
        time.sleep(options.get("load_s", 0))
        if options.get("load_fails"):
            raise EngineFormatError("engine.json is missing.")
        engine = make_engine(step_s=options.get("step_s", 0.0))
        executor = engine.engine._loop._core.executor
        executor.fail_at = options.get("fail_at")
        if "hold" in options:
            hold_steps(executor, Path(options["hold"]))
        return engine


def main(options: dict) -> int:
    log.configure_logging(json_lines=options.get("json", False))
    try:
        return LocalProcess(options).run()
    except WicoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
