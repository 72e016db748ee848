"""Runs a module and counts where its main thread stands, by windows of some seconds.

    python -m benchmarks.stacks OUT.txt [--window-s 5] MODULE ARGUMENT ...

A thread looks every 2 ms at the stack of the main thread, in which benchmarks step their engine. OUT.txt gets for each
window the share of the looks by function, everything below it included, and by line without. Looks wait for the
interpreter's lock, so code that holds it for long is counted late, at its end. Knows nothing of what it runs.
"""

from __future__ import annotations

import argparse
import runpy
import sys
import threading
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import FrameType

LOOK_S, DEPTH, FUNCTIONS, LINES = 0.002, 60, 40, 25


class Stacks:
    """Counts of windows: looks, functions on the stack, and lines at its top."""

    def __init__(self, window_s: float) -> None:
        self._window_s, self._begun = window_s, time.monotonic()
        self._functions, self._lines = defaultdict[int, Counter[str]](Counter), defaultdict[int, Counter[str]](Counter)

    def look_at(self, frame: FrameType | None) -> None:
        window, seen = int((time.monotonic() - self._begun) / self._window_s), set[str]()
        for depth in range(DEPTH):
            if frame is None:
                break
            place = f"{Path(frame.f_code.co_filename).name}:{frame.f_code.co_qualname}"
            if depth == 0:
                self._lines[window][f"{place}:{frame.f_lineno}"] += 1
            seen.add(place)
            frame = frame.f_back
        self._functions[window].update(seen)

    def look_for_ever(self, thread: int) -> None:
        while True:
            time.sleep(LOOK_S)
            self.look_at(sys._current_frames().get(thread))  # noqa: SLF001 -- its only name

    def describe(self) -> str:
        said = []
        for window, lines in sorted(self._lines.items()):
            looks = lines.total()
            said.append(f"from {window * self._window_s:g} s: {looks} looks")
            for counts, most in ((self._functions[window], FUNCTIONS), (lines, LINES)):
                said += [f"  {count / looks:6.1%} {name}" for name, count in counts.most_common(most)] + [""]
        return "\n".join(said)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("output", type=Path)
    parser.add_argument("--window-s", type=float, default=5.0)
    parser.add_argument("module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER)
    given = parser.parse_args()
    stacks, main_thread = Stacks(given.window_s), threading.get_ident()
    threading.Thread(target=stacks.look_for_ever, args=(main_thread,), daemon=True).start()
    sys.argv = [given.module, *given.arguments]
    try:
        runpy.run_module(given.module, run_name="__main__", alter_sys=True)
    finally:
        given.output.write_text(stacks.describe(), encoding="utf-8")


if __name__ == "__main__":
    main()
