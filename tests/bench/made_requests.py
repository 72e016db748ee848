"""Requests of made-up tokens, and a target's answers to them, for the tests of benchmarks."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from wicore_trt.bench.client import Target
from wicore_trt.bench.load import ClientSession
from wicore_trt.bench.measure import RequestRecord
from wicore_trt.bench.workload import BenchRequest, LoadShape, WordList, make_sessions


def make_requests(
    vocab: int, count: int, tokens: int, output_tokens: int, *, seed: int = 0, shared_prefix: int = 0
) -> list[BenchRequest]:
    shape = LoadShape((tokens,), (output_tokens,), shared_prefix=shared_prefix)
    sessions, words = make_sessions(shape, [0.0] * count, seed=seed, run="run"), WordList(vocab, seed=seed)
    return [ClientSession(session, words, chat=False).make_request(0) for session in sessions]


async def ask_at_once(target: Target, requests: Iterable[BenchRequest]) -> list[RequestRecord]:
    return await asyncio.gather(*map(target.generate, requests))


async def ask_in_turn(target: Target, requests: Iterable[BenchRequest]) -> list[RequestRecord]:
    return [await target.generate(request) for request in requests]
