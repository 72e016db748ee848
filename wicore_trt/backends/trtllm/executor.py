"""Runs a TensorRT-LLM engine of 1.2 through its C++ executor.

`tensorrt_llm.bindings.executor` directly, because ModelRunnerCpp cannot set a host cache. One thread takes responses
and hands them to the streams that wait. It must not know tokenizers or transports. Invariant: every stream ends, with a
finish reason or an exception, also when the engine dies; a stream that is dropped is cancelled in the engine.

Block reuse is off unless asked for: with Gemma 3's several windows it crashes engines of 1.2.0 under in-flight batching
(NVIDIA/TensorRT-LLM issue 13123), and without it a host cache has no use, as offloading serves reuse alone.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any

from wicore_trt.backends.trtllm.installed import require_tensorrt_llm
from wicore_trt.backends.trtllm.requests import (
    EngineLimits,
    SequenceOutput,
    check_request,
    make_request,
    new_seed,
    stop_ids,
)
from wicore_trt.errors import (
    ConfigError,
    EngineDeadError,
    EngineFormatError,
    EnvironmentUnfitError,
    InvalidRequestError,
    UnavailableError,
)
from wicore_trt.files import Door
from wicore_trt.types import FinishReason, GenerateRequest, TokenOutput

POLL = timedelta(milliseconds=100)
EVENT_WAIT_MS = 2000.0
_WORLD_SIZES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class CacheSettings:
    """The engine's KV cache. `gpu_share` of the free device memory, or at most `max_tokens`. `block_reuse` is an
    opt-in at the user's risk; `host_bytes` and `event_buffer` (KV events kept) need it. Blocks of a priority below
    `offload_priority`, 0 to 100, are dropped and not offloaded."""

    gpu_share: float = 0.9
    max_tokens: int | None = None
    block_reuse: bool = False
    host_bytes: int = 0
    offload_priority: int = 35
    event_buffer: int = 1024


@dataclass(frozen=True, slots=True)
class CacheTiers:
    """Blocks that the engine really has, by attention window; empty without block reuse, when it does not say."""

    device_blocks: dict[int, int]
    host_blocks: dict[int, int]


class TrtllmExecutor:
    """One engine: `engine` is the directory with TensorRT-LLM's config.json and rank{N}.engine. Calls may come from any
    thread. On a rank other than 0 of a tensor-parallel engine (`leader` is False) only `close` does anything: it waits
    until rank 0 closes.

    Raises EnvironmentUnfitError when TensorRT-LLM is missing, the engine does not load, its ranks were not started by
    mpirun or the host cache was not made; ConfigError for settings that exclude each other; EngineFormatError for a
    directory that is no engine.
    """

    def __init__(self, engine: Path, *, eos_ids: tuple[int, ...], cache: CacheSettings | None = None) -> None:
        require_tensorrt_llm()
        settings = cache or CacheSettings()
        _check(settings)
        config = _read_config(engine)
        model, build = config["pretrained_config"], config["build_config"]
        _check_world(int(model["mapping"]["world_size"]))
        self.limits = EngineLimits(int(model["vocab_size"]), int(build["max_seq_len"]), eos_ids)
        self.windows = [min(w, self.limits.max_seq_len) for w in model["runtime_defaults"]["max_attention_window"]]
        import tensorrt_llm  # noqa: F401 -- loads the plugins that engines need
        from tensorrt_llm.bindings import executor as bindings

        self._bindings = bindings
        try:
            executor_config = executor_configuration(bindings, settings, self.windows, build)
            self._executor = bindings.Executor(str(engine), bindings.ModelType.DECODER_ONLY, executor_config)
        except RuntimeError as error:
            raise EnvironmentUnfitError(
                f"TensorRT-LLM does not load {engine}: {error}.", fix="Build it on this machine: wicore build"
            ) from error
        self.leader = bool(self._executor.can_enqueue_requests())
        self._lock = threading.Lock()
        self._streams: dict[int, tuple[GenerateRequest, SimpleQueue[Any]]] = {}
        self._failure: Exception | None = None
        self._closed = False
        self._generated = 0
        self.tiers = self._measure_tiers(settings)
        self._receiver = threading.Thread(target=self._receive, name="wicore-trtllm-responses", daemon=True)
        if self.leader:
            self._receiver.start()

    def generate(self, request: GenerateRequest) -> Iterator[TokenOutput]:
        """Outputs of all sequences of a request, as they come. It runs from the first `next` on; closing the iterator
        cancels it. A passed deadline ends open sequences with DEADLINE.

        Raises InvalidRequestError at once; while iterating EngineDeadError, and UnavailableError after `close`.
        `request.priority` and `request.cache` have no effect on this engine.
        """
        check_request(request, self.limits)
        return self._stream(request)

    def cancel(self, request_id: str) -> None:
        """End the sequences of a request with CANCELLED. Unknown ids are ignored."""
        with self._lock:
            found = [(i, queue) for i, (request, queue) in self._streams.items() if request.request_id == request_id]
        for engine_id, queue in found:
            self._cancel(engine_id)
            queue.put((engine_id, FinishReason.CANCELLED))

    def stats(self) -> dict[str, int]:
        """Sequences that run, tokens made since start, and blocks of the device's cache once a step has run."""
        found = {"running": len(self._streams), "generated_tokens": self._generated}
        latest = [] if self._closed else list(self._executor.get_latest_iteration_stats())
        if latest and latest[-1].kv_cache_stats is not None:
            kv = latest[-1].kv_cache_stats
            found |= {"kv_blocks": kv.max_num_blocks, "kv_blocks_free": kv.free_num_blocks}
        return found

    def close(self) -> None:
        """Stop the engine. Streams that wait raise UnavailableError. May be called twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self._tell_all()
        if self._receiver.is_alive():
            self._receiver.join()
        self._executor.shutdown()

    # --- one request ---------------------------------------------------------------------------------------------

    def _stream(self, request: GenerateRequest) -> Iterator[TokenOutput]:
        queue: SimpleQueue[Any] = SimpleQueue()
        stops = stop_ids(request.params, self.limits)
        mine: dict[int, SequenceOutput] = {}
        try:
            seed = new_seed(request.params)
            for index in range(request.params.n):
                theirs = make_request(self._bindings, request, index, seed, self.limits)
                sequence = SequenceOutput(request, index, frozenset(stops), stops[0] if stops else None)
                mine[self._submit(request, theirs, queue)] = sequence
            while mine:
                left = None if request.deadline is None else request.deadline - time.monotonic()
                try:
                    engine_id, item = queue.get(left is None or left > 0, left)
                except Empty:
                    for sequence in mine.values():
                        yield sequence.end(FinishReason.DEADLINE)
                    return
                if isinstance(item, Exception):
                    raise item
                if engine_id in mine:
                    yield from self._next(engine_id, mine, item)
        finally:
            for engine_id in mine:
                self._forget(engine_id, cancel=True)

    def _next(self, engine_id: int, mine: dict[int, SequenceOutput], item: Any) -> Iterator[TokenOutput]:
        """What one queue item means for its sequence: a response, or the reason to end it."""
        sequence = mine[engine_id]
        running = False
        if isinstance(item, FinishReason):
            output = sequence.end(item)
        elif item.has_error():
            output = sequence.end(FinishReason.ERROR, error=str(item.error_msg))
        else:
            output = sequence.take(item.result)
            running = not item.result.is_final
        self._generated += len(output.token_ids)
        if sequence.finished:
            del mine[engine_id]
            self._forget(engine_id, cancel=running)
        if output.token_ids or output.finish_reason is not None:
            yield output

    def _submit(self, request: GenerateRequest, theirs: Any, queue: SimpleQueue[Any]) -> int:
        with self._lock:  # a response may come before enqueue_request returns its id; the receiver waits for the lock
            if self._failure is not None or self._closed:
                raise self._why()
            try:
                engine_id = int(self._executor.enqueue_request(theirs))
            except RuntimeError as error:
                raise InvalidRequestError(f"TensorRT-LLM refuses the request: {error}.", field="request") from error
            self._streams[engine_id] = (request, queue)
        return engine_id

    def _forget(self, engine_id: int, *, cancel: bool) -> None:
        with self._lock:
            self._streams.pop(engine_id, None)
        if cancel:
            self._cancel(engine_id)

    def _cancel(self, engine_id: int) -> None:
        with self._lock:
            if not self._closed and self._failure is None:
                self._executor.cancel_request(engine_id)

    # --- the engine ----------------------------------------------------------------------------------------------

    def _receive(self) -> None:
        try:
            while not self._closed:
                for response in self._executor.await_responses(timeout=POLL):
                    with self._lock:
                        known = self._streams.get(response.request_id)
                    if known is not None:
                        known[1].put((response.request_id, response))
        except Exception as error:  # whatever it is, the streams must hear of it
            _log.exception("TensorRT-LLM's executor failed")
            self._failure = error
            self._tell_all()

    def _tell_all(self) -> None:
        with self._lock:
            waiting = list(self._streams.items())
        for engine_id, (_, queue) in waiting:
            queue.put((engine_id, self._why()))

    def _why(self) -> Exception:
        if self._failure is not None:
            return EngineDeadError(f"TensorRT-LLM's executor failed: {self._failure}.")
        return UnavailableError("The engine is closed.")

    def _measure_tiers(self, settings: CacheSettings) -> CacheTiers:
        """What the engine made of the settings: it has ignored host_cache_size before (issue 2225)."""
        tiers = CacheTiers({}, {})
        if not settings.block_reuse or not self.leader:
            return tiers
        manager = self._executor.get_kv_cache_event_manager()
        for event in manager.get_latest_events(EVENT_WAIT_MS) if manager is not None else ():
            blocks = getattr(event.data, "num_blocks_per_cache_level", None)
            if blocks is not None:
                tiers.device_blocks[event.window_size] = blocks[0]
                tiers.host_blocks[event.window_size] = blocks[1] if len(blocks) > 1 else 0
        _log.info("TensorRT-LLM's KV blocks by window: device %s, host %s", tiers.device_blocks, tiers.host_blocks)
        if settings.host_bytes and not any(tiers.host_blocks.values()):
            self._executor.shutdown()
            raise EnvironmentUnfitError(
                f"TensorRT-LLM made no host cache, although {settings.host_bytes:,} bytes were asked for.",
                fix="Ask for more than one block of every window, or for none.",
            )
        return tiers


def executor_configuration(bindings: Any, settings: CacheSettings, windows: list[int], build: dict[str, Any]) -> Any:
    """bindings.ExecutorConfig for an engine with attention `windows` (one per layer) and this `build_config`."""
    cache = bindings.KvCacheConfig(
        enable_block_reuse=settings.block_reuse,
        max_tokens=settings.max_tokens,
        max_attention_window=windows,
        free_gpu_memory_fraction=settings.gpu_share,
        host_cache_size=settings.host_bytes or None,
        secondary_offload_min_priority=settings.offload_priority if settings.host_bytes else None,
        event_buffer_max_size=settings.event_buffer if settings.block_reuse else 0,
    )
    return bindings.ExecutorConfig(
        max_beam_width=1,
        kv_cache_config=cache,
        enable_chunked_context=True,
        batching_type=bindings.BatchingType.INFLIGHT,
        max_batch_size=int(build["max_batch_size"]),
        max_num_tokens=int(build["max_num_tokens"]),
    )


def _check(settings: CacheSettings) -> None:
    if settings.host_bytes and not settings.block_reuse:
        raise ConfigError(
            "A host cache serves TensorRT-LLM's block reuse alone, and that is off: it crashes Gemma 3 engines of "
            "1.2.0 under in-flight batching (NVIDIA/TensorRT-LLM issue 13123).",
            fix="Set host_bytes to 0, or block_reuse to true at your own risk.",
        )
    if settings.block_reuse:
        _log.warning(
            "block reuse is on: Gemma 3 engines of TensorRT-LLM 1.2.0 are known to crash with it (issue 13123)"
        )


def _check_world(world: int) -> None:
    started = next((int(os.environ[name]) for name in _WORLD_SIZES if name in os.environ), 1)
    if started != world:
        raise EnvironmentUnfitError(
            f"The engine has {world} ranks, and {started} were started.", fix=f"Start it by mpirun -n {world}."
        )


def _read_config(engine: Path) -> dict[str, Any]:
    try:
        config = Door(engine, EngineFormatError, fix="Build it again.").json(engine / "config.json")
        model, build = config["pretrained_config"], config["build_config"]
        windows = model["runtime_defaults"]["max_attention_window"]
        whole = len(windows) == model["num_hidden_layers"] and build["max_seq_len"] > 1
    except (KeyError, TypeError) as error:
        raise EngineFormatError(f"{engine} is no TensorRT-LLM engine: {error!r}.", fix="Build it again.") from error
    if not whole:
        raise EngineFormatError(f"{engine} has no attention window for each layer.", fix="Build it again.")
    return config
