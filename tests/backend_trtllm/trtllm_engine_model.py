"""A model of TensorRT-LLM's PyTorch engine around a KV connector: a block pool, and the calls in their order.

The KV values of a position are a hash of all tokens up to it (and of the salt), so whatever a block holds can be
checked byte by byte. Free blocks are poisoned.
"""

from __future__ import annotations

import pickle
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from backend_trtllm.trtllm_stand_in import RequestData, SchedulerOutput

SIZE, LAYERS, WIDTH = 4, 3, 5
POISON = -1


def values(tokens: list[int], salt: int | None, device: str = "cpu") -> torch.Tensor:
    """int16 [len(tokens), LAYERS, 2, WIDTH]."""
    state, rows = str(salt).encode(), []
    for token in tokens:
        state = blake2b(state + token.to_bytes(4, "little"), digest_size=60).digest()
        rows.append(torch.frombuffer(bytearray(state), dtype=torch.int16).view(LAYERS, 2, WIDTH))
    return torch.stack(rows).to(device)


@dataclass
class Running:
    """One request. `computed` counts positions with KV, `told` what the scheduler's output has said so far."""

    request: Any
    tokens: list[int]
    blocks: list[int]
    computed: int
    matched: int
    told_tokens: int = 0
    told_blocks: int = 0
    first: bool = field(default=True)


class EngineModel:
    """`counts_matched`: whether computed_position of a new request counts the connector's tokens; versions differ."""

    def __init__(
        self,
        connector: Any,
        llm_args: Any,
        blocks: int = 40,
        *,
        counts_matched: bool = False,
        device: str = "cpu",
        stream: Any = None,
    ) -> None:
        self.pool = torch.full((blocks, LAYERS, 2, SIZE * WIDTH), POISON, dtype=torch.int16, device=device)
        self.device, self.stream = device, stream
        self.scheduler, self.worker = connector.WicoreScheduler(llm_args), connector.WicoreWorker(llm_args)
        self.worker.register_kv_caches(self.pool)
        self.free = list(range(blocks))
        self.counts_matched = counts_matched
        self.saving: dict[int, list[int]] = {}
        self.next_id = 0
        self.loaded = 0

    @property
    def hub(self) -> Any:
        return self.worker.hub

    def add(self, tokens: list[int], salt: int | None = None, *, device: int = 0, **attributes: Any) -> Running:
        """Match and allocate. `device` tokens are there already, from the engine's own reuse."""
        self.next_id += 1
        request = SimpleNamespace(request_id=self.next_id, cache_salt_id=salt, lora_task_id=None, **attributes)
        running = Running(request, list(tokens), [], device, 0)
        request.get_tokens = lambda beam: list(running.tokens)
        running.matched, asynchronous = self.scheduler.get_num_new_matched_tokens(request, device)
        assert asynchronous is False and device + running.matched < len(tokens)
        running.blocks = [self.free.pop(0) for _ in range(-(-len(tokens) // SIZE))]
        if device:
            self._write(running, 0, device)
        self.scheduler.update_state_after_alloc(request, list(running.blocks))
        return running

    def step(self, running: Running, count: int) -> None:
        """One forward pass over the next `count` positions of one request."""
        data = self._data(running, count)
        output = SchedulerOutput([data], []) if running.first else SchedulerOutput([], [data])
        self.worker.bind_connector_meta(pickle.loads(pickle.dumps(self.scheduler.build_connector_meta(output))))
        self.worker.start_load_kv(self.stream)
        if running.first:
            running.computed += running.matched
            self.loaded += running.matched
            running.first = False
        for layer in range(LAYERS):
            self.worker.wait_for_layer_load(layer, self.stream)
            self.worker.save_kv_layer(layer, self.stream)
        self.check(running)
        self._write(running, running.computed, running.computed + count)
        running.computed += count
        self.worker.wait_for_save(self.stream)
        self.poll([])

    def serve(self, tokens: list[int], salt: int | None = None, *, answer: int = 2, chunk: int = 7) -> int:
        """A whole request; the tokens that were matched."""
        running = self.add(tokens, salt)
        self.prefill(running, chunk)
        for i in range(answer):
            self.generate(running, 500 + (tokens[-1] + i) % 97)
        self.finish(running)
        return running.matched

    def prefill(self, running: Running, chunk: int = 7) -> None:
        while running.first or running.computed < len(running.tokens):
            left = len(running.tokens) - running.computed - (running.matched if running.first else 0)
            self.step(running, min(chunk, left))

    def generate(self, running: Running, token: int) -> None:
        running.tokens.append(token)
        if len(running.tokens) > len(running.blocks) * SIZE:
            running.blocks.append(self.free.pop(0))
        self.step(running, 1)

    def finish(self, running: Running) -> bool:
        """End a request; whether its blocks wait for a save."""
        waits = self.scheduler.request_finished(running.request, list(running.blocks))
        if waits:
            self.saving[running.request.request_id] = running.blocks
            self.poll([running.request.request_id])
        else:
            self._release(running.blocks)
        return bool(waits)

    def poll(self, finished: list[int]) -> None:
        saved, loaded = self.worker.get_finished(finished, [])
        assert loaded == []
        for request_id in saved:
            self._release(self.saving.pop(request_id))

    def settle(self) -> None:
        """Until nothing is under way in the tiers."""
        assert self.hub.tiers.lower.wait_idle(60)
        self.poll([])
        assert not self.saving

    def check(self, running: Running) -> None:
        """The blocks of a request hold what its tokens say, up to what was computed or loaded."""
        if not running.computed:
            return
        found = torch.cat([self.pool[b].view(LAYERS, 2, SIZE, WIDTH) for b in running.blocks], dim=2)
        expected = values(running.tokens, running.request.cache_salt_id, self.device).permute(1, 2, 0, 3)
        assert torch.equal(found[:, :, : running.computed], expected[:, :, : running.computed])

    def check_idle(self) -> None:
        """Nothing is held for requests that ended."""
        self.settle()
        index = self.hub.tiers.lower.host
        assert not any(copy.readers for copy in index.iterate_copies()) and len(self.free) == len(self.pool)
        assert not self.hub.stored and not any(self.hub.matched.values())
        index.check_integrity()

    def close(self) -> None:
        self.hub.close()

    def _data(self, running: Running, count: int) -> RequestData:
        position = running.computed + (running.matched if running.first and self.counts_matched else 0)
        data = RequestData(
            running.request.request_id,
            running.tokens[running.told_tokens :],
            running.blocks[running.told_blocks :],
            position,
            count,
        )
        running.told_tokens, running.told_blocks = len(running.tokens), len(running.blocks)
        return data

    def _write(self, running: Running, start: int, stop: int) -> None:
        rows = values(running.tokens[:stop], running.request.cache_salt_id, self.device)
        for position in range(start, stop):
            block = self.pool[running.blocks[position // SIZE]].view(LAYERS, 2, SIZE, WIDTH)
            block[:, :, position % SIZE] = rows[position]

    def _release(self, blocks: list[int]) -> None:
        for block in blocks:
            self.pool[block] = POISON
        self.free.extend(blocks)


def model_directory(path: Path, **config: Any) -> Path:
    """Files that a fingerprint is made of."""
    import json

    path.mkdir()
    (path / "config.json").write_text(json.dumps({"vocab_size": 1000} | config))
    (path / "model.safetensors").write_bytes(b"weights")
    return path


def arguments(directory: Path, **changes: Any) -> SimpleNamespace:
    """TorchLlmArgs as far as the connector reads them."""
    cache = SimpleNamespace(tokens_per_block=SIZE, dtype="auto", max_attention_window=changes.pop("windows", None))
    return SimpleNamespace(
        **{
            "model": str(directory),
            "dtype": "bfloat16",
            "load_format": "auto",
            "model_kwargs": None,
            "quant_config": None,
            "attn_backend": "TRTLLM",
            "tensor_parallel_size": 1,
            "pipeline_parallel_size": 1,
            "max_seq_len": 128,
            "kv_cache_config": cache,
        }
        | changes
    )
