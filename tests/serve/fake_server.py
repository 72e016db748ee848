"""A server process over the fake engine: python fake_server.py '{"step_s": 0.01, "load_s": 0, "server": {...}}'."""

from __future__ import annotations

import json
import sys
import time

from serving import make_engine

from wicore_trt.config import ServerSettings
from wicore_trt.errors import EngineFormatError, WicoreError
from wicore_trt.serve import log
from wicore_trt.serve.lifecycle import run_server


def main(options: dict) -> int:
    def load():
        time.sleep(options.get("load_s", 0))
        if options.get("load_fails"):
            raise EngineFormatError("engine.json is missing.")
        engine = make_engine(step_s=options.get("step_s", 0.0))
        engine._loop._core.executor.fail_at = options.get("fail_at")
        return engine

    log.configure(json_lines=options.get("json", False))
    settings = ServerSettings(**{"port": 0, **options.get("server", {})})
    try:
        return run_server(settings, load, announce=lambda address: print(address, flush=True))
    except WicoreError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code


if __name__ == "__main__":
    sys.exit(main(json.loads(sys.argv[1])))
