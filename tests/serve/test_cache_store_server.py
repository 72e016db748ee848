"""`cache.store` at a server, proved by its memory, its files and its KV events.

No page of a `device` or `never` request leaves the device, and no event tells of `never`.
"""

from __future__ import annotations

import os
import random
import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import httpx
import pytest
from serve.test_rank_kills import WORDS, RankServer
from tiny_source import write_tiny_source

from wicore_trt import LLM, SamplingParams
from wicore_trt.engine.build import build_engine
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2_grpc, kv_pb2

ANSWER, PROOF_BYTES = 56, 128


def read_pages(engine: Path, prompts: list[str]) -> dict[str, set[bytes]]:
    """The last bytes of each page that an engine with plenty of memory stores for a prompt and its answer."""
    found: dict[str, set[bytes]] = {}
    params = SamplingParams(max_tokens=ANSWER, temperature=0, ignore_eos=True)
    with LLM(engine, kv__device_bytes="8MiB", kv__host_bytes="16MiB", executor__threads=1) as llm:
        tiers, seen = llm._core.scheduler.manager.tiers, set()
        for prompt in prompts:
            llm.generate([prompt], params)
            llm._core.do_housekeeping()
            tiers.wait_idle(60)
            found[prompt] = set()
            for copy in tiers.host.iterate_copies():
                if copy.page.key not in seen:
                    seen.add(copy.page.key)
                    data = b"".join(map(bytes, tiers.movers.host.page_parts(copy)))
                    found[prompt].add(data[-PROOF_BYTES:])
    return found


def read_host_tier(pid: int) -> bytes:
    """The memory of a process that came from `mmap` without a file: its host tier; tensors lie elsewhere."""
    data = b""
    with open(f"/proc/{pid}/maps") as maps, open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
        for line in maps:
            if "/dev/zero" in line:
                begin, end = (int(part, 16) for part in line.split()[0].split("-"))
                memory.seek(begin)
                while begin < end and (part := memory.read(end - begin)):
                    data += part
                    begin += len(part)
    return data


def list_tokens(address: str) -> tuple[set[tuple[int, ...]], set[tuple[int, ...]]]:
    """The tokens of pages that a subscriber is told of: of those on the device, and below."""
    device, below = set[tuple[int, ...]](), set[tuple[int, ...]]()
    with grpc.insecure_channel(address) as channel:
        call = inference_pb2_grpc.InferenceServiceStub(channel).SubscribeKVEvents(kv_pb2.SubscribeKVEventsRequest())
        for message in call:
            for pages in message.snapshot.pages:
                (device if pages.tier == "device" else below).update(tuple(p.token_ids) for p in pages.pages)
            if message.snapshot.last:
                call.cancel()
                return device, below


@pytest.mark.long
@pytest.mark.timeout(600)
def test_what_a_request_forbids_is_in_no_memory_file_or_event(tmp_path: Path) -> None:
    seed = int.from_bytes(os.urandom(4), "little")
    print("seed", seed)
    rng = random.Random(seed)
    build_engine(write_tiny_source(tmp_path / "source"), tmp_path / "engine", page_tokens=8)
    stores = {
        "".join(rng.choices(WORDS, k=rng.randrange(30, 64))): ("all", "device", "all", "never")[i % 4]
        for i in range(24)
    }
    known = read_pages(tmp_path / "engine", list(stores))
    server = RankServer(tmp_path / "engine", tmp_path, "--kv-bytes", "144KiB")
    try:
        server.wait_until_ready()
        address = re.search(r"ready on (\S+)", server.log.read_text())[1]
        pid = server.find_ranks("wicore_trt.process.engine")[0].pid

        def ask(prompt: str) -> int:
            body = {"prompt": prompt, "max_tokens": ANSWER, "temperature": 0, "ignore_eos": True}
            reply = httpx.post(f"{server.url}/v1/completions", json={**body, "cache": {"store": stores[prompt]}},
                               timeout=60)  # fmt: skip
            assert reply.status_code == 200, reply.text
            return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

        with ThreadPoolExecutor(8) as pool:
            for _ in range(2):
                cached = dict(zip(stores, pool.map(ask, stores), strict=True))
        first = next(prompt for prompt, store in stores.items() if store == "device")
        assert ask(first) >= 0 and ask(first) > 30, "pages of `device` requests are found on the device"
        assert not any(cached[prompt] for prompt, store in stores.items() if store == "never")
        device, below = list_tokens(address)
        memory = read_host_tier(pid)
        server.process.terminate()
        assert server.process.wait(60) == 0
    finally:
        server.process.kill()
    files = b"".join(path.read_bytes() for path in (tmp_path / "disk").rglob("*") if path.is_file())
    letters = {prompt: tuple(WORDS.index(c) + 7 for c in prompt) for prompt in stores}

    def tells(pages: set[tuple[int, ...]], prompt: str) -> bool:
        return any(page in (letters[prompt][i : i + 8] for i in range(len(prompt))) for page in pages if page)

    for prompt, store in stores.items():
        inside = [sum(proof in place for proof in known[prompt]) for place in (memory, files)]
        if store == "all":
            assert min(inside) > 2 and tells(below, prompt), "what may leave the device does"
        else:
            assert inside == [0, 0] and not tells(below, prompt), f"pages of a {store!r} request left the device"
            assert store == "device" or not tells(device, prompt)
    assert tells(device, first)
