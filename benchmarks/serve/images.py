"""Images behind a server on a GPU: the first token after a picture, and decode beside a stream of pictures.

    python -m benchmarks.serve.images [--only bf16,fp8] [--repeats 12] [--seconds 8]

Weights are made up (27B's shapes and the true image encoder), so answers mean nothing and times hold. `first`: one JPEG
of 1,024 x 768 pixels, another each time, and 64 tokens of text are posted to /v1/chat/completions for one token;
milliseconds until the answer is there, nothing cached, and the server's own parts of it. `beside`: streams decode,
pictures come at `--rate` a second, each for one token; tokens a second and gaps between tokens, before and during it.
Invariant: every request must give its tokens, or the run fails. Needs a GPU.
"""

from __future__ import annotations

import argparse
import base64
import http.client
import io
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

from PIL import Image

from benchmarks.common import say
from benchmarks.gpu.cases import CONFIGS, PAGE_TOKENS
from wicore_trt.engine import build
from wicore_trt.engine.options import DummyModel
from wicore_trt.model.vision import VisionSpec
from wicore_trt.runtime.cuda_device import CudaDevice

WORDS = {"<bos>": 2, "<eos>": 1, "<unk>": 3, "<start_of_image>": 4, "<image_soft_token>": 5, "<end_of_image>": 6}
TEMPLATE = (
    "<bos>{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
    "{% if p.type == 'image' %}<start_of_image>{% else %}{{ p.text }}{% endif %}{% endfor %}{% endif %}{% endfor %}"
)
VISION = VisionSpec(
    image_size=896, patch_size=14, hidden_size=1152, num_layers=27, num_heads=16, intermediate_size=4304,
    layer_norm_eps=1e-6, tokens=256, text_hidden_size=5376, begin_id=4, soft_id=5, end_id=6,
)  # fmt: skip
TOKENIZER = {
    "tokenizer.json": {
        "version": "1.0",
        "added_tokens": [
            {"id": i, "content": word, "special": True, "single_word": False, "lstrip": False, "rstrip": False,
             "normalized": False}
            for word, i in sorted(WORDS.items(), key=lambda item: item[1])
        ],
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE", "unk_token": "<unk>", "byte_fallback": True, "merges": [],
            "vocab": {"<pad>": 0, **WORDS} | {f"<0x{i:02X}>": 7 + i for i in range(256)},
        },
    },
    "tokenizer_config.json": {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": TEMPLATE},
}  # fmt: skip
STREAMS, SIZE, TEXT = 16, (1024, 768), 64


def build_image_engine(path: Path, name: str, target: str) -> None:
    config = CONFIGS[name]
    with mock.patch.object(build, "_DUMMY_TOKENIZER", TOKENIZER):
        build.build_engine(
            config.model, path, backend="triton", dtype=config.dtype, kv_dtype=config.kv_dtype, page_tokens=PAGE_TOKENS,
            targets=[target], dummy=DummyModel(config.model, config.spec, VISION), force=True,
        )  # fmt: skip


@contextmanager
def run_server(engine: Path) -> Iterator[tuple[tuple[str, int], Path]]:
    """Yield host and port where a server of the engine listens, and its log."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "wicore_trt", "serve", str(engine), "--http-port", str(port), "--grpc-port", "0"]
    settings = {"WICORE_SCHEDULER__MAX_SEQUENCES": "64", "WICORE_SCHEDULER__MAX_CONTEXT": "8192"}
    settings["WICORE_KV__DEVICE_BYTES"] = str(8 << 30)  # and nothing is prepared twice
    with tempfile.NamedTemporaryFile("w+") as log:
        process = subprocess.Popen(command, env=os.environ | settings, stdout=subprocess.PIPE, stderr=log, text=True)
        killer = threading.Timer(120.0, process.kill)
        killer.start()
        try:
            assert process.stdout is not None
            if not process.stdout.readline().startswith("ready on"):
                log.seek(0)
                raise RuntimeError(f"the server did not start:\n{log.read()[-3000:]}")
            killer.cancel()
            say(f"{engine.name} is ready")
            yield ("127.0.0.1", port), Path(log.name)
        finally:
            killer.cancel()
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()


def make_picture(number: int) -> bytes:
    """A JPEG of a smooth picture with some noise: each number gives another."""
    source = random.Random(number)
    small = Image.frombytes("RGB", (64, 48), source.randbytes(64 * 48 * 3))
    out = io.BytesIO()
    small.resize(SIZE, Image.Resampling.BICUBIC).save(out, "JPEG", quality=90)
    return out.getvalue()


def make_body(text: str, picture: bytes | None, tokens: int) -> bytes:
    content: list[dict[str, Any]] = [{"type": "text", "text": text}]
    if picture is not None:
        url = "data:image/jpeg;base64," + base64.b64encode(picture).decode()
        content.insert(0, {"type": "image_url", "image_url": {"url": url}})
    asked = {"messages": [{"role": "user", "content": content}], "max_tokens": tokens, "stream": True}
    return json.dumps(asked | {"temperature": 0, "ignore_eos": True}).encode()


def stream_answer(address: tuple[str, int], body: bytes, stamps: list[float] | None = None) -> None:
    """Post a chat and read its answer to the end. Puts the time of each event into `stamps`."""
    connection = http.client.HTTPConnection(*address)
    connection.request("POST", "/v1/chat/completions", body, {"content-type": "application/json"})
    answer = connection.getresponse()
    if answer.status != 200:
        raise RuntimeError(f"{answer.status}: {answer.read()[:500]!r}")
    for line in answer:
        if line.startswith(b"data: {"):
            if b'"error"' in line[:40]:
                raise RuntimeError(line[:500].decode())
            if stamps is not None:
                stamps.append(time.perf_counter())
    connection.close()


def words(seed: int, count: int) -> str:
    """Text of so many tokens: each byte is one."""
    inside = random.Random(seed).choices("abcdefghijklmnopqrstuvwxyz ", k=count - 2)
    return f"x{''.join(inside)}x"


def read_parts(log: Path, count: int) -> dict[str, float]:
    """Medians of the parts of the last requests' time to a first token, by the server: the front with its processes,
    the engine before the first step (an image's encoding among others), the step."""
    lines = [line for line in log.read_text().splitlines() if "ttft_ms=" in line][-count:]
    fields = [dict(word.split("=") for word in line.split() if word.count("=") == 1) for line in lines]
    ttft, queue, step = ([float(f[name]) for f in fields] for name in ("ttft_ms", "queue_ms", "prefill_ms"))
    front = [whole - before - inside for whole, before, inside in zip(ttft, queue, step, strict=True)]
    return {f"{n}_ms": statistics.median(v) for n, v in {"front": front, "before_step": queue, "step": step}.items()}


def measure_first(address: tuple[str, int], log: Path, repeats: int, *, image: bool) -> dict[str, float]:
    times = []
    for i in range(repeats + 3):
        body = make_body(words(i, TEXT), make_picture(i) if image else None, 1)
        begun = time.perf_counter()
        stream_answer(address, body)
        times.append(1e3 * (time.perf_counter() - begun))
        time.sleep(0.05)
    kept = sorted(times[3:])
    whole = {"median_ms": statistics.median(kept), "least_ms": kept[0], "most_ms": kept[-1]}
    return {n: round(ms, 1) for n, ms in (whole | read_parts(log, repeats)).items()}


def measure_beside(address: tuple[str, int], rate: float, seconds: float) -> dict[str, float]:
    """Decode rates and gaps of streams before pictures come and while they come."""
    stamps: list[list[float]] = [[] for _ in range(STREAMS)]
    failures: list[BaseException] = []

    def guard(function: Any, *given: Any) -> None:
        try:
            function(*given)
        except BaseException as error:
            failures.append(error)

    tokens = int(150 * seconds) + 100  # more than fit into that time
    bodies = [make_body(words(1000 + i, 512), None, tokens) for i in range(STREAMS)]
    pictures = [make_body(words(5000 + i, 16), make_picture(5000 + i), 1) for i in range(int(rate * seconds))]
    threads = [threading.Thread(target=guard, args=(stream_answer, address, b, s), daemon=True)
               for b, s in zip(bodies, stamps, strict=True)]  # fmt: skip
    for thread in threads:
        thread.start()
    while any(len(s) < 40 for s in stamps) and not failures:
        time.sleep(0.05)
    begun = time.perf_counter()
    time.sleep(seconds / 2)
    middle, posts = time.perf_counter(), list[threading.Thread]()
    for i, body in enumerate(pictures):
        time.sleep(max(0.0, middle + i / rate - time.perf_counter()))
        posts.append(threading.Thread(target=guard, args=(stream_answer, address, body), daemon=True))
        posts[-1].start()
    end = time.perf_counter()
    for thread in (*posts, *threads):
        thread.join(60)
    if failures:
        raise RuntimeError(f"{len(failures)} requests failed: {failures[0]!r}")
    found: dict[str, float] = {}
    for name, (low, high) in (("before", (begun, middle)), ("during", (middle, end))):
        inside = [[t for t in s if low <= t < high] for s in stamps]
        gaps = sorted(1e3 * (b - a) for s in inside for a, b in zip(s, s[1:], strict=False))
        found |= {
            f"{name}_tokens_s": sum(map(len, inside)) / (high - low),
            f"{name}_gap_p50_ms": statistics.median(gaps),
        }
        found[f"{name}_gap_p99_ms"] = gaps[int(0.99 * len(gaps))]
    found["decode_kept"] = found["during_tokens_s"] / found["before_tokens_s"]
    found["p99_ratio"] = found["during_gap_p99_ms"] / found["before_gap_p99_ms"]
    return found


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="bf16,fp8")
    parser.add_argument("--repeats", type=int, default=12)
    parser.add_argument("--rate", type=float, default=10.0)
    parser.add_argument("--seconds", type=float, default=8.0)
    parser.add_argument("--output", type=Path)
    given, rows = parser.parse_args(argv), list[dict[str, Any]]()
    with tempfile.TemporaryDirectory() as scratch:
        for name in given.only.split(","):
            engine = Path(scratch, name)
            build_image_engine(engine, name, CudaDevice().target)
            say(f"{name} is built")
            with run_server(engine) as (address, log):
                row: dict[str, Any] = {"engine": CONFIGS[name].title}
                rows.append(row)
                for part, measure in (
                    ("text", partial(measure_first, address, log, given.repeats, image=False)),
                    ("image", partial(measure_first, address, log, given.repeats, image=True)),
                    ("beside", partial(measure_beside, address, given.rate, given.seconds)),
                ):
                    row[part] = measure()
                    say(json.dumps({"engine": row["engine"], part: row[part]}))
                    if given.output:
                        given.output.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
