"""Request traces: one JSON object a line with the block ids of each prompt.

The format is that of the Mooncake traces (FAST 2025): `timestamp` (ms), `input_length`, `output_length` (tokens) and
`hash_ids`, prefix-chained ids of blocks of 512 tokens, of which the last may be partial. It must not know policies or
tiers. Invariant: requests are in the order of arrival and a block has one parent.
"""

from __future__ import annotations

import itertools
import json
import random
from dataclasses import dataclass
from pathlib import Path

from wicore_trt.arithmetic import div_ceil
from wicore_trt.errors import ConfigError

BLOCK_TOKENS = 512


@dataclass(frozen=True, slots=True)
class TraceRequest:
    """Request of a trace. `blocks` name its prefix in order; `tokens` is its length; `at_s` its arrival in seconds.
    `answer` is the number of generated tokens, None when unknown."""

    blocks: tuple[int, ...]
    tokens: int
    answer: int | None = None
    at_s: float = 0.0


def load_trace(path: Path, *, limit: int | None = None, plain: bool = False) -> list[TraceRequest]:
    """Read the first `limit` requests; with `plain` also those without hash_ids, which share nothing. Raises
    ConfigError naming file and line when a request cannot be read or is older than the one before it."""
    requests: list[TraceRequest] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if limit is not None and len(requests) >= limit:
                    break
                if line.strip():
                    requests.append(_request(line, f"{path}:{number}", plain))
                    if len(requests) > 1 and not requests[-1].at_s >= requests[-2].at_s:
                        raise ConfigError(f"{path}:{number}: the request came before the one in front of it.")
    except OSError as error:
        raise ConfigError(f"trace {path}: {error.strerror}.", fix="Give a JSON-lines file with hash_ids.") from error
    if not requests:
        raise ConfigError(f"trace {path} has no requests.")
    return requests


def generate_trace(conversations: int, seed: int = 0) -> list[TraceRequest]:
    """Generate a trace, the same for the same arguments. A conversation begins with one of 20 system prompts of 1 to 8
    blocks, the k-th with a probability in proportion to 1/k. It has 1 + geometric turns, 5 on average. Each adds a
    question and the answer before it, 0.25 to 8 blocks in all, log-uniform. One conversation a second begins; the time
    to the next turn is log-normal with a median of a minute, so about a hundred are open at a time."""
    rng, fresh = random.Random(seed), itertools.count()
    systems = [[next(fresh) for _ in range(rng.randint(1, 8))] for _ in range(20)]
    shares = [1 / rank for rank in range(1, 21)]
    found: list[tuple[float, int, TraceRequest]] = []
    now = 0.0
    for _ in range(conversations):
        now += rng.expovariate(1.0)
        at, (blocks,) = now, rng.choices(systems, shares)
        tokens, done = len(blocks) * BLOCK_TOKENS, len(blocks)
        while True:
            tokens += int(BLOCK_TOKENS * 2 ** rng.uniform(-2, 3))
            # A block that the prompt fills in part has a name of its own: the next turn's is another one.
            blocks = blocks[:done] + [next(fresh) for _ in range(div_ceil(tokens, BLOCK_TOKENS) - done)]
            found.append((at, len(found), TraceRequest(tuple(blocks), tokens, at_s=at)))
            done = tokens // BLOCK_TOKENS
            if rng.random() < 0.2:
                break
            at += 60 * rng.lognormvariate(0, 1)
    return [request for _, _, request in sorted(found)]


def _request(line: str, where: str, plain: bool) -> TraceRequest:
    try:
        data = json.loads(line)
        plain = plain and "hash_ids" not in data
        blocks = () if plain else tuple(int(block) for block in data["hash_ids"])
        tokens = int(data.get("input_length", len(blocks) * BLOCK_TOKENS))
        answer = int(data["output_length"]) if "output_length" in data else None
        at_s = float(data.get("timestamp", 0)) / 1e3
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise ConfigError(f"{where}: not a trace request ({error}).", fix="Each line needs hash_ids.") from error
    if not plain and (not blocks or len(set(blocks)) != len(blocks)):
        raise ConfigError(f"{where}: hash_ids must be a non-empty list without repeats.")
    if plain and tokens < 1:
        raise ConfigError(f"{where}: a request without hash_ids needs input_length.")
    return TraceRequest(blocks, tokens, answer, at_s)


def count_unique_blocks(requests: list[TraceRequest]) -> int:
    return len({block for request in requests for block in request.blocks})
