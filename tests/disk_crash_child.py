"""A process that is there to be killed: it writes pages and says on a pipe which the store acknowledged.

`serve` runs in a process that has imported everything and forks one child per line of its input, so that a kill costs
milliseconds. A child takes `<seed>`, opens the store (as large as `LIMIT`), and writes, moves and erases pages until it
is killed. Lines on its output: "w <page> <version> <slots>" after done(OK), "e <page>" before the page is erased or
its slots are used again, "s <page> <version> <slots>" before a write.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

from disk_store_helpers import buffers, content, make_page, open_store

from wicore_trt.kv.disk.cipher import PageCipher
from wicore_trt.kv.disk.store import Outcome

LIMIT = 1 << 20
PAGES = 80


def settings(cipher: bool) -> dict:
    return {
        "limit_bytes": LIMIT,
        "threads": 3,
        "cipher": PageCipher(b"k" * 32) if cipher else None,
        "slab_bytes": 16 * 8192,
    }


def work(path: Path, seed: int, cipher: bool, out: int) -> None:
    """Never returns."""
    choose = random.Random(seed)
    store = open_store(path, **settings(cipher))
    held = {page.index: slots for page, slots in store.recover_pages()}
    free = sorted(set(range(store.num_slots)) - {slot for slots in held.values() for slot in slots})
    room = threading.Semaphore(6)
    version = seed << 20
    busy: set[int] = set()

    def say(text: str) -> None:
        os.write(out, f"{text}\n".encode())

    while True:
        room.acquire()
        number = choose.choice([n for n in range(PAGES) if n not in busy])
        parts = choose.choice([1, 1, 2, 3])
        while number in held or len(free) < parts:
            gone = number if number in held else choose.choice([n for n in held if n not in busy])
            say(f"e {gone}")
            store.erase_slots(held[gone])
            free.extend(held.pop(gone))
        version += 1
        slots = tuple(free.pop(choose.randrange(len(free))) for _ in range(parts))
        held[number] = slots
        busy.add(number)
        say(f"s {number} {version} {','.join(map(str, slots))}")

        def done(outcome: Outcome, number: int = number, version: int = version, slots: tuple = slots) -> None:
            assert outcome is Outcome.OK, outcome
            say(f"w {number} {version} {','.join(map(str, slots))}")
            busy.discard(number)
            room.release()

        store.write_page(
            make_page(number), slots, buffers([content(number, part, version) for part in range(parts)]), done
        )


def serve() -> None:
    path, cipher = Path(sys.argv[1]), sys.argv[2] == "cipher"
    for line in sys.stdin:
        read, write = os.pipe()
        child = os.fork()
        if child == 0:
            os.close(read)
            work(path, int(line), cipher, write)
        os.close(write)
        print(child, flush=True)
        while data := os.read(read, 1 << 16):
            sys.stdout.write(data.decode())
        os.close(read)
        os.waitpid(child, 0)
        print("end", flush=True)


if __name__ == "__main__":
    serve()
