"""Tests write nothing below the user's home."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

PROGRAM = """
import importlib.util
from pathlib import Path
from wicore_trt.checkpoint.demo import cache_directory
print(cache_directory() / "model")
if importlib.util.find_spec("triton"):
    from triton import knobs
    print(knobs.cache.dir)
    print(knobs.cache.dump_dir)
"""


def test_what_tests_start_caches_in_a_folder_of_the_run() -> None:
    """With a home where nothing can be made: whoever would write there gets an error instead."""
    environment = {**os.environ, "HOME": os.devnull}
    done = subprocess.run([sys.executable, "-c", PROGRAM], env=environment, capture_output=True, text=True, check=True)
    own = Path(os.environ["XDG_CACHE_HOME"])
    assert own.is_relative_to(tempfile.gettempdir())
    assert [line for line in done.stdout.splitlines() if not Path(line).is_relative_to(own)] == []
