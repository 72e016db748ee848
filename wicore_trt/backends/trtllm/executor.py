"""Runs an engine through TensorRT-LLM 1.2's own executor; never run with the library itself, only with a stand-in.

`tensorrt_llm.bindings.executor` schedules by itself. Must not know tokenizers, queues or transports. Invariants:
responses for a sequence that was cancelled or has ended here are dropped; a broken library raises and is never taken
for silence. Requests that `check_request` lets pass are sampled as `SamplingParams` defines: a parameter that is
silently ignored is a wrong token. Outputs end at the same token as ours, whether the engine reports stop tokens or not.

Block reuse is off: with Gemma 3's several windows it crashes engines of 1.2.0 under in-flight batching
(NVIDIA/TensorRT-LLM issue 13123). So there is no host cache either, as its offloading serves reuse alone.

Names: tensorrt_llm.bindings.executor of 1.2 (nanobind/executor/request.cpp).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import timedelta
from hashlib import blake2b
from typing import TYPE_CHECKING, Any

from wicore_trt.backends.trtllm.installed import ENGINE_DIR, require_tensorrt_llm
from wicore_trt.engine.manifest import rebuild_engine
from wicore_trt.errors import ConfigError, EngineFormatError, EnvironmentUnfitError, InvalidRequestError, WicoreError
from wicore_trt.files import UntrustedFiles
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.types import CacheStore, FinishReason, GenerateRequest, SamplingParams, TokenOutput, Usage

if TYPE_CHECKING:
    from wicore_trt.engine.directory import EngineDir

_FINISH = {
    "END_ID": FinishReason.STOP, "STOP_WORDS": FinishReason.STOP, "LENGTH": FinishReason.LENGTH,
    "TIMED_OUT": FinishReason.DEADLINE, "CANCELLED": FinishReason.CANCELLED,
}  # fmt: skip


class TrtllmExecutor:
    """Implements `RequestExecutor` for an engine on this machine's GPU. Raises EnvironmentUnfitError when TensorRT-LLM
    or a GPU is missing, differs from the build's, or refuses the engine; ConfigError for settings that the library
    lacks; EngineFormatError for files that are no engine of one rank."""

    def __init__(self, engine: EngineDir, settings: ExecutorOptions) -> None:
        if settings.device == "cpu":
            raise ConfigError("executor.device: engines of backend tensorrt-llm run on GPUs.", fix="Leave it out.")
        version = require_tensorrt_llm()
        target = _check_machine(engine, version)
        config = _read_config(engine)
        model, build = config["pretrained_config"], config["build_config"]
        self.spec = engine.manifest.spec
        self.kernels = f"tensorrt-llm-{version}-{target}"
        self.max_sequences = min(int(build["max_batch_size"]), settings.max_sequences)
        self._max_context = min(int(build["max_seq_len"]), settings.max_context or int(build["max_seq_len"]))
        import tensorrt_llm  # noqa: F401 -- loads the plugins that engines need
        from tensorrt_llm.bindings import executor as bindings

        self._bindings = bindings
        windows = [min(w, int(build["max_seq_len"])) for w in model["runtime_defaults"]["max_attention_window"]]
        try:
            cache = bindings.KvCacheConfig(
                enable_block_reuse=False, max_attention_window=windows, free_gpu_memory_fraction=settings.kv_fraction
            )
            limits = bindings.ExecutorConfig(
                max_beam_width=1, kv_cache_config=cache, enable_chunked_context=True,
                batching_type=bindings.BatchingType.INFLIGHT, max_batch_size=self.max_sequences,
                max_num_tokens=min(int(build["max_num_tokens"]), settings.max_batch_tokens),
            )  # fmt: skip
            path = str(engine.path / ENGINE_DIR)
            self._executor = bindings.Executor(path, bindings.ModelType.DECODER_ONLY, limits)
        except RuntimeError as error:
            problem = f"TensorRT-LLM {version} does not load engine {engine.path}: {_join_words(error)}."
            raise EnvironmentUnfitError(problem, fix=rebuild_engine(engine.path, engine.manifest)) from error
        self._sequences: dict[int, SequenceOutput] = {}  # by the library's request id
        self._ids: dict[tuple[str, int], int] = {}  # (request id, index) -> the library's

    def check(self, request: GenerateRequest, stop_ids: tuple[int, ...]) -> None:
        """Raises InvalidRequestError. Reads only constants, so any thread may call."""
        check_request(request, stop_ids)

    def submit(self, request: GenerateRequest, index: int, seed: int, stop_ids: tuple[int, ...]) -> None:
        """Raises WicoreError with the library's words. `poll` also reports a library that is broken."""
        theirs = make_request(self._bindings, request, seed, stop_ids, self._max_context)
        try:
            number = int(self._executor.enqueue_request(theirs))
        except RuntimeError as error:
            raise WicoreError(f"TensorRT-LLM refuses the request: {_join_words(error)}.") from error
        self._sequences[number] = SequenceOutput(request, index, frozenset(stop_ids), stop_ids[0] if stop_ids else None)
        self._ids[request.request_key, index] = number

    def poll(self, timeout_s: float) -> list[TokenOutput]:
        """Raises RuntimeError with the library's words when it is broken."""
        outputs: list[TokenOutput] = []
        for response in self._executor.await_responses(timeout=timedelta(seconds=timeout_s)):
            sequence = self._sequences.get(response.request_id)
            if sequence is None:
                continue
            failed = response.has_error()
            outputs += [sequence.fail(_join_words(response.error_msg))] if failed else sequence.take(response.result)
            if sequence.finished:
                self._forget_sequence(response.request_id, sequence)
                if not failed and not response.result.is_final:
                    self._executor.cancel_request(response.request_id)  # it goes on behind a stop token
        return outputs

    def cancel(self, request_key: str, index: int) -> None:
        number = self._ids.get((request_key, index))
        if number is not None:
            self._forget_sequence(number, self._sequences[number])
            self._executor.cancel_request(number)

    def close(self) -> None:
        """Shut the library down; call it once."""
        self._executor.shutdown()

    def _forget_sequence(self, number: int, sequence: SequenceOutput) -> None:
        del self._sequences[number], self._ids[sequence.request.request_key, sequence.index]


def _check_machine(engine: EngineDir, installed: str) -> str:
    """Find the architecture of this machine's GPU. Raises EnvironmentUnfitError where the engine was built for another
    one or by another TensorRT-LLM."""
    import torch

    manifest, built = engine.manifest, engine.manifest.compiled.get("tensorrt_llm")
    if built != installed:
        problem = f"engine {engine.path} was built by TensorRT-LLM {built}, and {installed} is installed."
        raise EnvironmentUnfitError(problem, fix=f"Install that version. Or: {rebuild_engine(engine.path, manifest)}")
    targets = ", ".join(manifest.targets)
    if not torch.cuda.is_available():
        raise EnvironmentUnfitError(f"engine {engine.path} is for {targets}, and PyTorch finds no GPU here.")
    here = "sm{}{}".format(*torch.cuda.get_device_capability())
    if here not in manifest.targets:
        fix = "Build it again on this machine: trtllm-build compiles for the GPU that it runs on."
        raise EnvironmentUnfitError(f"engine {engine.path} is for {targets}, and this GPU is {here}.", fix=fix)
    return here


def _read_config(engine: EngineDir) -> dict[str, Any]:
    directory = engine.path / ENGINE_DIR
    try:
        files = UntrustedFiles(directory, EngineFormatError, fix="Build it again.")
        config = files.read_json(directory / "config.json")
        model, build = config["pretrained_config"], config["build_config"]
        windows, world = model["runtime_defaults"]["max_attention_window"], int(model["mapping"]["world_size"])
        sizes = [int(build[name]) for name in ("max_seq_len", "max_batch_size", "max_num_tokens")]
        whole = len(windows) == model["num_hidden_layers"] and min(*sizes, *windows) > 0
    except (KeyError, TypeError, ValueError) as error:
        raise EngineFormatError(f"{directory} is no TensorRT-LLM engine: {error!r}.", fix="Build it again.") from error
    if world != 1:
        problem = f"This engine is split over {world} ranks, and backend 'tensorrt-llm' runs one."
        raise EngineFormatError(problem, fix="Build it again with --tp 1.")
    if not whole:
        raise EngineFormatError(f"{directory} has no attention window for each layer, or no limits.")
    return config


def _join_words(words: object) -> str:
    return " ".join(str(words).split()).rstrip(".")


def check_request(request: GenerateRequest, stop_ids: tuple[int, ...]) -> None:
    params, other = request.params, "TensorRT-LLM engines do not have it as this API defines it."
    refused = {
        "presence_penalty": params.presence_penalty,  # it counts the prompt's tokens, we do not
        "frequency_penalty": params.frequency_penalty,
        "logprobs": params.logprobs is not None,  # of the filtered distribution there, and without alternatives
        "prompt_logprobs": params.prompt_logprobs is not None,
        "constraint": params.constraint,  # its own grammars are of another engine, and would mean something else
        "logit_bias": params.logit_bias,
        "cache.store": request.cache.store is not CacheStore.ALL,  # its block manager decides where blocks go
    }
    for name, asked in refused.items():
        if asked:
            fix = "Use repetition_penalty." if name.endswith("penalty") else "Leave it out."
            raise InvalidRequestError(f"{name}: {other}", field=name, fix=fix)
    if params.min_tokens and len(stop_ids) > 1:  # it holds back one stop token only
        raise InvalidRequestError(f"min_tokens with several stop tokens: {other}", field="min_tokens")


def make_request(
    bindings: Any, request: GenerateRequest, seed: int, stop_ids: tuple[int, ...], max_context: int
) -> Any:
    """Make the bindings.Request of one sequence. `bindings` is tensorrt_llm.bindings.executor."""
    params, prompt = request.params, request.prompt_token_ids
    room, salt = max_context - len(prompt), None
    if request.cache_salt:  # TensorRT-LLM's block key of a tenant is below 2**63
        digest = blake2b(request.cache_salt.encode(), digest_size=8, person=b"wicore-trtllm").digest()
        salt = int.from_bytes(digest, "little") >> 1
    return bindings.Request(
        input_token_ids=list(prompt), max_tokens=min(room, params.max_tokens or room), streaming=True,
        sampling_config=_make_sampling(bindings, params, seed),
        output_config=bindings.OutputConfig(exclude_input_from_output=True), end_id=stop_ids[0] if stop_ids else None,
        stop_words=[[token] for token in stop_ids[1:]] or None, cache_salt_id=salt,
    )  # fmt: skip


def _make_sampling(bindings: Any, params: SamplingParams, seed: int) -> Any:
    """Make the SamplingConfig. Unless greedy, top_p is given: without top_k and top_p TensorRT-LLM is greedy."""
    optional: dict[str, Any] = {"min_tokens": params.min_tokens} if params.min_tokens else {}
    if params.repetition_penalty != 1.0:
        optional["repetition_penalty"] = params.repetition_penalty
    if params.greedy:
        return bindings.SamplingConfig(top_k=1, **optional)
    if params.min_p:
        optional["min_p"] = params.min_p
    if params.top_k:
        optional["top_k"] = params.top_k
    return bindings.SamplingConfig(top_p=params.top_p, temperature=params.temperature, seed=seed, **optional)


@dataclass(slots=True)
class SequenceOutput:
    """Sequence on its way. `stops` are its stop tokens, `end_id` the one that the engine knows as such."""

    request: GenerateRequest
    index: int
    stops: frozenset[int]
    end_id: int | None
    produced: int = field(default=0)
    finished: bool = field(default=False)

    def take(self, result: Any) -> list[TokenOutput]:
        """Take what a bindings.Result adds. `finished` tells whether this was the last."""
        tokens = list(result.output_token_ids[0])
        name = result.finish_reasons[0].name if result.is_final and result.finish_reasons else ""
        reason = _FINISH.get(name)
        if name == "END_ID" and self.end_id is not None and not self.stops.intersection(tokens):
            tokens.append(self.end_id)  # whether the engine reports it depends on its version
        for place, token in enumerate(tokens):
            if token in self.stops:
                tokens, reason = tokens[: place + 1], FinishReason.STOP
                break
        stopped = reason is FinishReason.STOP and tokens and tokens[-1] in self.request.params.stop_token_ids
        self.finished = reason is not None or result.is_final
        self.produced += len(tokens)
        if self.finished and reason is None:
            return [self.fail("TensorRT-LLM ended the sequence without a reason.")]
        if reason is FinishReason.STOP and tokens and tokens[-1] not in self.stops:
            # The engine kept the stop token to itself. The last token of an output that says STOP is no text.
            return [self._make_output(tuple(tokens), None, None), self._make_output((), reason, None)]
        if not tokens and reason is None:
            return []
        return [self._make_output(tuple(tokens), reason, tokens[-1] if stopped else None)]

    def fail(self, error: str) -> TokenOutput:
        self.finished = True
        return self._make_output((), FinishReason.ERROR, None, error)

    def _make_output(
        self, tokens: tuple[int, ...], reason: FinishReason | None, stop: int | None, error: str | None = None
    ) -> TokenOutput:
        # cached_tokens stays 0: its count of reused blocks is over all pools, and says nothing about tokens
        usage = Usage(len(self.request.prompt_token_ids), self.produced)
        return TokenOutput(
            self.request.request_key, self.index, tokens, finish_reason=reason, stop_reason=stop, usage=usage,
            error=error,
        )  # fmt: skip
