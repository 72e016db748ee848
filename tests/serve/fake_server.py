"""A server process over the fake engine: python fake_server.py '{"step_s": 0.01, "load_s": 0, "server": {...}}'.

`hold` names a file: while it is there, the engine stands still after ten steps.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from fakes import FakeExecutor
from serving import make_engine

from wicore_trt.access import log
from wicore_trt.config import ServerSettings
from wicore_trt.core.offload import on_daemon_thread
from wicore_trt.errors import EngineFormatError, WicoreError
from wicore_trt.runtime.batch import StepBatch, StepResult
from wicore_trt.serve.lifecycle import run_server


def hold(executor: FakeExecutor, file: Path) -> None:
    execute = executor.execute

    def held(batch: StepBatch) -> StepResult:
        while len(executor.steps) >= 10 and file.exists():
            time.sleep(0.005)
        return execute(batch)

    executor.execute = held


def main(options: dict) -> int:
    def load():
        time.sleep(options.get("load_s", 0))
        if options.get("load_fails"):
            raise EngineFormatError("engine.json is missing.")
        engine = make_engine(step_s=options.get("step_s", 0.0))
        executor = engine.engine._loop._core.executor
        executor.fail_at = options.get("fail_at")
        if "hold" in options:
            hold(executor, Path(options["hold"]))
        return engine

    log.configure(json_lines=options.get("json", False))
    settings = ServerSettings(**{"port": 0, "http_port": None, **options.get("server", {})})
    try:
        return run_server(
            settings, lambda: on_daemon_thread(load), bound=lambda address, url: print(url or address, flush=True)
        )
    except WicoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
