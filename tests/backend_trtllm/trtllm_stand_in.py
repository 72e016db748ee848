"""A module `tensorrt_llm` with the signatures that our integration uses, and nothing behind them.

Signatures are 1.2's (nanobind/executor/*.cpp, models/gemma/model.py, layers/attention.py, kv_cache_connector.py), so an
argument that does not exist is a TypeError, and so is one of a wrong type. The Gemma class has the two faults that ours
repairs. The executor answers with tokens that a test scripts, or with those of `next_token`.
"""

from __future__ import annotations

import enum
import sys
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import pytest


def check_types(given: dict[str, Any], **wanted: Any) -> None:
    """TypeError, as nanobind has it, for an argument of a wrong type."""
    for name, kind in wanted.items():
        value, kinds = given[name], kind if isinstance(kind, tuple) else (kind,)
        if isinstance(value, bool) and bool not in kinds or not isinstance(value, kinds):
            raise TypeError(f"{name}: incompatible function argument {value!r}")


NONE = type(None)
NUMBER = (int, float, NONE)


class SamplingConfig:
    def __init__(
        self, beam_width=1, *, top_k=None, top_p=None, top_p_min=None, top_p_reset_ids=None, top_p_decay=None,
        seed=None, temperature=None, min_tokens=None, beam_search_diversity_rate=None, repetition_penalty=None,
        presence_penalty=None, frequency_penalty=None, length_penalty=None, early_stopping=None,
        no_repeat_ngram_size=None, num_return_sequences=None, min_p=None, beam_width_array=None,
    ):  # fmt: skip
        given = {k: v for k, v in locals().items() if k != "self"}
        check_types(given, top_k=(int, NONE), top_p=NUMBER, seed=(int, NONE), temperature=NUMBER)
        check_types(given, min_tokens=(int, NONE), repetition_penalty=NUMBER, min_p=NUMBER)
        if seed is not None and not 0 <= seed < 1 << 64:
            raise TypeError("seed")
        if temperature is not None and temperature <= 0:
            raise RuntimeError("temperature must be positive")
        self.__dict__.update(given)


class OutputConfig:
    def __init__(
        self, return_log_probs=False, return_context_logits=False, return_generation_logits=False,
        exclude_input_from_output=False, return_encoder_output=False, return_perf_metrics=False,
        additional_model_outputs=None,
    ):  # fmt: skip
        self.__dict__.update({k: v for k, v in locals().items() if k != "self"})


class Request:
    def __init__(
        self, input_token_ids, max_tokens, *, streaming=False, sampling_config=None, output_config=None, end_id=None,
        pad_id=None, position_ids=None, bad_words=None, stop_words=None, embedding_bias=None, lora_config=None,
        lookahead_config=None, kv_cache_retention_config=None, logits_post_processor_name=None,
        logits_post_processor=None, client_id=None, return_all_generated_tokens=False, priority=0.5, type=None,
        context_phase_params=None, num_return_sequences=1, eagle_config=None, guided_decoding_params=None,
        allotted_time_ms=None, cache_salt_id=None,
    ):  # fmt: skip
        given = {k: v for k, v in locals().items() if k != "self"}
        check_types(given, input_token_ids=list, max_tokens=int, streaming=bool, end_id=(int, NONE))
        check_types(given, sampling_config=SamplingConfig, output_config=OutputConfig, cache_salt_id=(int, NONE))
        if stop_words is not None and not all(isinstance(word, list) for word in stop_words):
            raise TypeError("stop_words")
        if max_tokens < 1 or (cache_salt_id is not None and cache_salt_id < 0):
            raise RuntimeError("out of range")
        self.__dict__.update(given)


class KvCacheConfig:
    def __init__(
        self, enable_block_reuse=True, max_tokens=None, max_attention_window=None, sink_token_length=None,
        free_gpu_memory_fraction=None, host_cache_size=None, onboard_blocks=True, cross_kv_cache_fraction=None,
        secondary_offload_min_priority=None, event_buffer_max_size=0, *, enable_partial_reuse=True,
        copy_on_partial_reuse=True, use_uvm=False, attention_dp_events_gather_period_ms=5, runtime_defaults=None,
        max_gpu_total_bytes=0,
    ):  # fmt: skip
        given = {k: v for k, v in locals().items() if k != "self"}
        check_types(given, enable_block_reuse=bool, max_tokens=(int, NONE), max_attention_window=(list, NONE))
        check_types(given, free_gpu_memory_fraction=NUMBER, host_cache_size=(int, NONE), event_buffer_max_size=int)
        check_types(given, secondary_offload_min_priority=(int, NONE))
        self.__dict__.update(given)


class BatchingType(enum.Enum):
    STATIC = 0
    INFLIGHT = 1


class ModelType(enum.Enum):
    DECODER_ONLY = 0


class FinishReason(enum.Enum):
    NOT_FINISHED = 0
    END_ID = 1
    STOP_WORDS = 2
    LENGTH = 3
    TIMED_OUT = 4
    CANCELLED = 5


class ExecutorConfig:
    def __init__(
        self, max_beam_width=1, scheduler_config=None, kv_cache_config=None, enable_chunked_context=False,
        normalize_log_probs=True, iter_stats_max_iterations=1000, request_stats_max_iterations=0,
        batching_type=BatchingType.INFLIGHT, max_batch_size=None, max_num_tokens=None, parallel_config=None,
        peft_cache_config=None, logits_post_processor_config=None, decoding_config=None, use_gpu_direct_storage=False,
        gpu_weights_percent=1.0, max_queue_size=None, extended_runtime_perf_knob_config=None, debug_config=None,
        recv_poll_period_ms=0, max_seq_idle_microseconds=0, spec_dec_config=None, guided_decoding_config=None,
        additional_model_outputs=None, cache_transceiver_config=None, gather_generation_logits=False,
        mm_embedding_offloading=False, enable_trt_overlap=False,
    ):  # fmt: skip
        given = {k: v for k, v in locals().items() if k != "self"}
        check_types(given, kv_cache_config=KvCacheConfig, enable_chunked_context=bool, batching_type=BatchingType)
        check_types(given, max_batch_size=(int, NONE), max_num_tokens=(int, NONE))
        self.__dict__.update(given)


class Response:
    def __init__(self, request_id: int, tokens: list[int], reason: FinishReason, error: str = "") -> None:
        self.request_id, self.error_msg = request_id, error
        final = reason is not FinishReason.NOT_FINISHED
        self.result = SimpleNamespace(is_final=final, output_token_ids=[tokens], finish_reasons=[reason])

    def has_error(self) -> bool:
        return bool(self.error_msg)


FIRST_LETTER = 262


def next_token(tokens: list[int], seed: int | None = None) -> int:
    """The model: a letter of the tests' tokenizer, by all tokens so far, and by the seed too where it samples."""
    return FIRST_LETTER + int.from_bytes(blake2b(repr((tokens, seed)).encode(), digest_size=4).digest()) % 52


class Executor:
    """`script` maps a request's first prompt token to what it answers: token lists, FinishReasons and error texts, an
    item per response; a token list goes on, the others end, and "run" is a 7 in every response until it is cancelled.
    Without a script it answers with `next_token`, one in each response. `pace_s`: time between responses."""

    made: list[Executor] = []
    script: dict[int, list[Any]] = {}
    load_error = ""
    pace_s = 0.002

    def __init__(self, model_path: Any, model_type: ModelType, executor_config: ExecutorConfig) -> None:
        if not isinstance(model_path, (str, Path)) or not isinstance(executor_config, ExecutorConfig):
            raise TypeError("Executor")
        if self.load_error:
            raise RuntimeError(self.load_error)
        self.model_path, self.config = Path(model_path), executor_config
        self.requests: dict[int, Request] = {}
        self.cancelled: list[int] = []
        self.stopped = False
        self.broken: Exception | None = None
        self._todo: dict[int, list[Any]] = {}
        self._made: dict[int, list[int]] = {}
        Executor.made.append(self)

    def enqueue_request(self, request: Request) -> int:
        if not isinstance(request, Request):
            raise TypeError("request")
        if self.stopped or request.input_token_ids[0] == 63:
            raise RuntimeError("prompt 63 is not liked")
        engine_id = len(self.requests) + 1
        self.requests[engine_id] = request
        self._todo[engine_id] = list(self.script.get(request.input_token_ids[0], ["model"]))
        self._made[engine_id] = []
        return engine_id

    def await_responses(self, *, timeout: timedelta) -> list[Response]:
        if not isinstance(timeout, timedelta):
            raise TypeError("timeout")
        assert not self.stopped, "waiting after shutdown"
        time.sleep(min(timeout.total_seconds(), self.pace_s))
        if self.broken is not None:
            raise self.broken
        running = list(self._todo)[: self.config.max_batch_size]
        return [response for engine_id in running if (response := self._step(engine_id)) is not None]

    def _step(self, engine_id: int) -> Response | None:
        todo = self._todo[engine_id]
        step = FinishReason.CANCELLED if engine_id in self.cancelled else todo[0]
        if step == "break":
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        if step == "run":
            return Response(engine_id, [7], FinishReason.NOT_FINISHED)
        if step == "model":
            return self._model(engine_id)
        todo.pop(0)
        if not isinstance(step, list):
            del self._todo[engine_id]
            if isinstance(step, FinishReason):
                return Response(engine_id, [], step)
            return Response(engine_id, [], FinishReason.NOT_FINISHED, step)
        if todo and isinstance(todo[0], FinishReason):
            del self._todo[engine_id]
            return Response(engine_id, step, todo.pop(0))
        return Response(engine_id, step, FinishReason.NOT_FINISHED)

    def _model(self, engine_id: int) -> Response:
        request, made = self.requests[engine_id], self._made[engine_id]
        sampling = request.sampling_config
        token = next_token(request.input_token_ids + made, None if sampling.top_k == 1 else sampling.seed)
        if token == request.end_id and len(made) < (sampling.min_tokens or 0):
            token += 1  # min_tokens hides end_id from the sampling, and no other token
        made.append(token)
        reason = FinishReason.NOT_FINISHED
        if token == request.end_id:
            reason = FinishReason.END_ID
        elif [token] in (request.stop_words or []):
            reason = FinishReason.STOP_WORDS
        elif len(made) == request.max_tokens:
            reason = FinishReason.LENGTH
        if reason is not FinishReason.NOT_FINISHED:
            del self._todo[engine_id]
        return Response(engine_id, [token], reason)

    def cancel_request(self, id: int) -> None:
        assert not self.stopped, "cancelled after shutdown"
        self.cancelled.append(id)

    def shutdown(self) -> None:
        assert not self.stopped
        self.stopped = True


# --- models/gemma/model.py and what it needs ---


class RotaryScalingType(enum.Enum):
    none = 0
    linear = 1


class RopeEmbeddingUtils:
    @staticmethod
    def create_sinusoidal_positions_for_attention_plugin(
        num_pos, dim, theta=10000.0, scale=1.0, scale_type=RotaryScalingType.none, rope_scaling_config=None
    ):
        scale = 1.0 / scale if scale_type is RotaryScalingType.linear else scale
        frequencies = (scale / theta ** (np.arange(0, dim, 2) / dim)).astype(np.float32)
        angles = np.outer(np.arange(num_pos, dtype=np.float32), frequencies)[..., None]
        return frequencies, np.concatenate([np.cos(angles), np.sin(angles)], -1).reshape(1, -1).astype(np.float32)


class Parameter:
    def __init__(self, value: np.ndarray) -> None:
        self.raw_value = value

    value = property(lambda self: self.raw_value)

    @value.setter
    def value(self, v: np.ndarray) -> None:
        assert v.shape == self.raw_value.shape and v.dtype == self.raw_value.dtype
        self.raw_value = v


class GemmaForCausalLM:
    """With both faults: scaled tables for local layers, and 1e-5 in q and k norms."""

    def __init__(self, config: Any) -> None:
        factor = (config.rotary_scaling or {}).get("factor", 1.0)
        kind = RotaryScalingType.linear if config.rotary_scaling else RotaryScalingType.none
        for suffix, base in (("", config.rotary_base), ("_local", config.rope_local_base_freq)):
            table = RopeEmbeddingUtils.create_sinusoidal_positions_for_attention_plugin(
                config.max_position_embeddings, config.head_size, base, factor, kind
            )
            setattr(self, f"rotary_inv_freq{suffix}", Parameter(table[0]))
            setattr(self, f"embed_positions_for_gpt_attention{suffix}", Parameter(table[1]))
        layers = [
            SimpleNamespace(
                attention=SimpleNamespace(
                    is_local=bool((i + 1) % config._sliding_window_pattern),
                    q_layernorm=SimpleNamespace(eps=1e-5),
                    k_layernorm=SimpleNamespace(eps=1e-5),
                    rotary_embedding_scale_type=kind,
                    rotary_embedding_scale=factor,
                )
            )
            for i in range(config.num_hidden_layers)
        ]
        self.transformer = SimpleNamespace(layers=layers)

    def seen(self) -> dict[str, Any]:
        """What an engine would be made of."""
        attention = [layer.attention for layer in self.transformer.layers]
        return {
            "global": self.rotary_inv_freq.raw_value.tolist(),
            "local": self.rotary_inv_freq_local.raw_value.tolist(),
            "local_table": self.embed_positions_for_gpt_attention_local.raw_value[0, :64].tolist(),
            "is_local": [a.is_local for a in attention],
            "scale": [a.rotary_embedding_scale for a in attention],
            "scale_type": [a.rotary_embedding_scale_type.name for a in attention],
            "eps": sorted({n.eps for a in attention for n in (a.q_layernorm, a.k_layernorm)}),
        }


# --- _torch/pyexecutor/kv_cache_connector.py ---


class KvCacheConnectorWorker(ABC):
    def __init__(self, llm_args):
        self._llm_args = llm_args
        self._metadata = None
        super().__init__()

    def bind_connector_meta(self, metadata):
        self._metadata = metadata

    def get_connector_meta(self):
        return self._metadata

    def register_forward_pass_callable(self):  # noqa: B027 -- as it is there
        pass

    @abstractmethod
    def register_kv_caches(self, kv_cache_tensor): ...

    @abstractmethod
    def start_load_kv(self, stream): ...

    @abstractmethod
    def wait_for_layer_load(self, layer_idx, stream): ...

    @abstractmethod
    def save_kv_layer(self, layer_idx, stream): ...

    @abstractmethod
    def wait_for_save(self, stream): ...

    @abstractmethod
    def get_finished(self, finished_gen_req_ids, started_loading_req_ids): ...


class KvCacheConnectorScheduler(ABC):
    def __init__(self, llm_args):
        self._llm_args = llm_args
        super().__init__()

    @abstractmethod
    def build_connector_meta(self, scheduler_output): ...

    @abstractmethod
    def get_num_new_matched_tokens(self, request, num_computed_tokens): ...

    @abstractmethod
    def request_finished(self, request, cache_block_ids): ...

    @abstractmethod
    def update_state_after_alloc(self, request, block_ids): ...


@dataclass
class RequestData:
    request_id: int
    new_tokens: list[int]
    new_block_ids: list[int]
    computed_position: int
    num_scheduled_tokens: int


@dataclass
class SchedulerOutput:
    new_requests: list[RequestData] = field(default_factory=list)
    cached_requests: list[RequestData] = field(default_factory=list)


def install(monkeypatch: pytest.MonkeyPatch | None = None) -> None:
    """Make `import tensorrt_llm` find the stand-in."""
    here = sys.modules[__name__]
    contents = {
        "": {"__version__": "1.2.1"},
        "functional": {"RopeEmbeddingUtils": RopeEmbeddingUtils, "RotaryScalingType": RotaryScalingType},
        "models": {},
        "models.gemma": {},
        "models.gemma.model": {"GemmaForCausalLM": GemmaForCausalLM},
        "bindings": {"executor": here},
        "_torch": {},
        "_torch.pyexecutor": {},
        "_torch.pyexecutor.kv_cache_connector": {
            "KvCacheConnectorWorker": KvCacheConnectorWorker,
            "KvCacheConnectorScheduler": KvCacheConnectorScheduler,
        },
    }
    for name, attributes in contents.items():
        full = f"tensorrt_llm.{name}".rstrip(".")
        module = ModuleType(full)
        module.__dict__.update(attributes)
        if monkeypatch is None:
            sys.modules[full] = module
        else:
            monkeypatch.setitem(sys.modules, full, module)


def install_metadata(monkeypatch: pytest.MonkeyPatch, directory: Path, version: str = "1.2.1") -> None:
    """Make importlib.metadata find the package in `version`."""
    info = directory / f"tensorrt_llm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tensorrt-llm\nVersion: {version}\n")
    monkeypatch.syspath_prepend(str(directory))


def install_command(monkeypatch: pytest.MonkeyPatch, directory: Path) -> None:
    """Put a `trtllm-build` on PATH."""
    directory.mkdir(parents=True, exist_ok=True)
    command = directory / "trtllm-build"
    script = Path(__file__).with_name("trtllm_build_stand_in.py")
    command.write_text(f'#!/bin/sh\nexec "{sys.executable}" "{script}" "$@"\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(directory), prepend=":")
