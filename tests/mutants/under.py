"""Run a Python module with the package wicore_trt of another directory: `under.py DIRECTORY MODULE [ARGS]`.

An editable install finds its own package before any path; its finder is taken out first.
"""

from __future__ import annotations

import runpy
import sys
from pathlib import Path


def main() -> None:
    directory, module, *arguments = sys.argv[1:]
    sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirect" not in type(finder).__name__]
    sys.path.insert(0, str(Path(directory).resolve()))
    import wicore_trt

    assert Path(wicore_trt.__file__).is_relative_to(Path(directory).resolve()), wicore_trt.__file__
    sys.argv = [module, *arguments]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main()
