"""Makes an engine that can step from settings: opens the directory, builds executor, cache, scheduler and core.

The only place in `core` that knows which classes make up an engine; devices are imported inside the function.
Invariant: the KV keys name everything that KV values depend on, the kernels that compute them included.
"""

from __future__ import annotations

import logging
import os
from contextlib import ExitStack
from dataclasses import dataclass, fields
from pathlib import Path
from typing import cast

from wicore_trt.config import BATCH_TOKENS, ExecutorSettings, KVSettings, Settings
from wicore_trt.core.assemble_kv import make_cache
from wicore_trt.core.engine import EngineCore
from wicore_trt.core.limits import Limits
from wicore_trt.core.loop import Core
from wicore_trt.core.request_core import RequestCore
from wicore_trt.engine.directory import EngineDir, open_engine
from wicore_trt.engine.options import SCHEDULE_THEMSELVES, find_backend
from wicore_trt.errors import ConfigError, EnvironmentUnfitError
from wicore_trt.grammar.matcher import Grammars
from wicore_trt.model.vision import VisionSpec
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.executor import Executor, RequestExecutor
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.schedule.scheduler import Scheduler
from wicore_trt.schedule.step_time import StepTime
from wicore_trt.text.model_files import FILES
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.types import ImageInfo, ModelInfo, SamplingParams

log = logging.getLogger(__name__)

THEIR_KV = ("device_fraction", "prefix_cache")
"""Settings of kv that an engine with a KV cache of its own may be given: its memory is a share, too, and it shares
nothing between requests."""


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    core: Core
    tokenizer: Tokenizer
    info: ModelInfo

    @property
    def engine_core(self) -> EngineCore:
        assert isinstance(self.core, EngineCore)
        return self.core


def load_engine(settings: Settings, executor: Executor | None = None, *, serves: bool = False) -> LoadedEngine:
    """Load the engine that `settings.engine` names. A running `executor` of it gets a new cache and scheduler.
    `serves`: prepare constraints now, not at the first one, and apply the waiting limits of `settings.scheduler`.
    Raises ConfigError when no engine is named, EngineFormatError when it cannot be trusted, EnvironmentUnfitError when
    this machine cannot run it or the KV pool is too small for max_context tokens."""
    if settings.engine is None:
        raise ConfigError("No engine is named.", fix="Give its directory: wicore serve ENGINE.")
    if settings.executor.devices:
        _choose_devices(settings.executor, serves=serves)
    engine = open_engine(Path(settings.engine))
    tokenizer = Tokenizer.from_files(engine.read_present(FILES), engine.path)
    manifest = engine.manifest
    asked, built = settings.scheduler.max_context, manifest.max_context
    max_context = min(asked or built, built)
    if asked is not None and asked > built:
        log.warning("serving %d tokens of context, not %d: the engine was built for no more", built, asked)
    core: Core
    if manifest.backend in SCHEDULE_THEMSELVES:
        core = _make_request_core(engine, settings, tokenizer, max_context)
        kernels, kv_dtype, page_tokens = core.executor.kernels, manifest.kv_dtype, 0
    else:
        grammars = Grammars(tokenizer, manifest.spec.vocab_size)
        if serves:
            grammars.warm()
        with ExitStack() as undo:  # of what is opened here, if something fails behind it
            if executor is None:
                executor = make_executor(engine, settings)
                undo.callback(executor.close)
            core = _make_core(engine, settings, executor, grammars, max_context, undo)
            undo.pop_all()
        layout = core.executor.layout
        kernels, kv_dtype, page_tokens = core.executor.kernels, layout.kv_dtype, layout.page_tokens
    if serves and tokenizer.chat_note is not None:
        log.warning("%s", tokenizer.chat_note)
    if serves:
        given = settings.scheduler
        core.limits = Limits(given.max_queue_s, _to_seconds(given.target_ttft_ms), given.timeout_s)
    spec, names = manifest.spec, settings.model.name
    info = ModelInfo(
        model_id=names[0] if names else manifest.model_id, aliases=tuple(names[1:]), backend=manifest.backend,
        kernels=kernels, dtype=manifest.dtype, kv_dtype=kv_dtype,
        quantization=manifest.quantization["algo"] if manifest.quantization else None,
        max_context_tokens=max_context, vocab_size=spec.vocab_size, hidden_size=spec.hidden_size,
        num_layers=spec.num_layers, num_heads=spec.num_heads, num_kv_heads=spec.num_kv_heads, ranks=manifest.tp_size,
        fingerprint=manifest.fingerprint, eos_token_ids=tokenizer.eos_ids, bos_token_id=tokenizer.bos_id,
        chat=tokenizer.has_chat and tokenizer.chat_fault is None, chat_note=tokenizer.chat_note,
        page_tokens=page_tokens, engine_context_tokens=manifest.max_context, build=manifest.seal,
        images=ImageInfo(v.image_size, v.tokens, v.begin_id, v.soft_id, v.end_id) if (v := manifest.vision) else None,
    )  # fmt: skip
    return LoadedEngine(core, tokenizer, info)


def _choose_devices(given: ExecutorSettings, *, serves: bool) -> None:
    """Let this process see the GPUs of `given.devices` alone, which a server has told its processes. Raises ConfigError
    where that has no effect."""
    import torch

    names, named = ",".join(given.devices), "CUDA_VISIBLE_DEVICES"
    initialized = torch.cuda.is_initialized()  # type: ignore[no-untyped-call]
    if not serves and initialized and os.environ.get(named) != names:
        fix = f"Set {named} to {names} before it starts."
        raise ConfigError("executor.devices: this process uses GPUs already.", fix=fix)
    if not serves:
        os.environ[named] = names
    if given.device == "cpu" or (given.device == "auto" and not torch.cuda.is_available()):
        raise ConfigError("executor.devices: the engine would run on the CPU.", fix="Leave executor.devices out.")


def _make_request_core(engine: EngineDir, settings: Settings, tokenizer: Tokenizer, max_context: int) -> RequestCore:
    """Make the core of a backend that schedules itself. Raises ConfigError for settings of a KV cache of ours."""
    for setting in fields(KVSettings):
        if setting.name not in THEIR_KV and getattr(settings.kv, setting.name) != getattr(KVSettings(), setting.name):
            name = f"kv.{setting.name}"
            raise ConfigError(
                f"{name}: an engine of backend {engine.manifest.backend} keeps its KV cache to itself.",
                fix=f"Leave {name} out.",
            )
    executor = find_backend(engine.manifest.backend).open(engine, executor_options(settings))
    return RequestCore(cast(RequestExecutor, executor), eos_ids=tokenizer.eos_ids, max_context=max_context)


def _make_core(
    engine: EngineDir, settings: Settings, executor: Executor, grammars: Grammars, max_context: int, undo: ExitStack
) -> EngineCore:
    manifest, layout = engine.manifest, executor.layout
    manager, loader = make_cache(
        settings.kv,
        layout,
        manifest.spec.sliding_window,
        engine=manifest.fingerprint,
        kernels=executor.kernels,
        copier=executor.copier,
    )
    undo.callback(manager.close, 0.0)
    given, batch_tokens = settings.scheduler, executor_options(settings, manifest.vision).max_batch_tokens
    batch_tokens = min(batch_tokens, executor.max_batch_tokens)
    if not manager.can_run(max_context, batch_tokens):
        raise EnvironmentUnfitError(
            f"KV pages {layout.num_pages} hold no sequence of {max_context} tokens.",
            fix="Raise kv.device_bytes or lower scheduler.max_context.",
        )
    scheduler = Scheduler(
        manager,
        max_batch_tokens=batch_tokens,
        max_sequences=min(given.max_sequences, executor.max_sequences or given.max_sequences),
        loader=loader,
        slice_tokens=executor.slice_tokens,
        score_rows=executor.score_rows,
        graph_sizes=executor.graph_sizes,
        step_time=StepTime(_to_seconds(given.target_itl_ms)),
    )
    warm_up(executor)
    eos_ids = grammars.tokenizer.eos_ids
    return EngineCore(executor, scheduler, eos_ids=eos_ids, max_context=max_context, grammars=grammars)


def make_executor(engine: EngineDir, settings: Settings) -> Executor:
    """Open the backend's executor. Raises EnvironmentUnfitError if it cannot run here or schedules itself."""
    backend = engine.manifest.backend
    if backend in SCHEDULE_THEMSELVES:
        raise EnvironmentUnfitError(f"Engines of backend {backend} make their steps themselves; this needs one step.")
    return cast(Executor, find_backend(backend).open(engine, executor_options(settings, engine.manifest.vision)))


def executor_options(settings: Settings, vision: VisionSpec | None = None) -> ExecutorOptions:
    """Make the options of an executor. Raises ConfigError if a step has no room for an image of `vision`."""
    return ExecutorOptions(
        device=settings.executor.device, kernels=settings.executor.kernels, threads=settings.executor.threads,
        page_tokens=settings.kv.page_tokens, kv_bytes=settings.kv.device_bytes,
        kv_fraction=settings.kv.device_fraction,
        max_batch_tokens=_count_batch_tokens(settings, 0 if vision is None else vision.tokens),
        max_sequences=settings.scheduler.max_sequences, max_context=settings.scheduler.max_context,
        batch_invariant=settings.executor.batch_invariant, loads=settings.kv.host_bytes > 0,
        code_pages=settings.kv.host_bytes > 0 and settings.kv.compression != "none",
        peer_access=settings.executor.peer_access, compare_ranks=settings.executor.compare_ranks,
    )  # fmt: skip


def _count_batch_tokens(settings: Settings, image_tokens: int) -> int:
    """Count the most tokens of a step. It takes an image whole, beside all others that decode, or nobody would know
    when an image's turn comes: a smaller default is raised, a smaller setting refused."""
    sequences, given = settings.scheduler.max_sequences, settings.scheduler.max_batch_tokens
    least = image_tokens + sequences - 1 if image_tokens else 1
    if given is not None and given < least:
        raise ConfigError(
            f"scheduler.max_batch_tokens = {given} is too few for an image of {image_tokens} tokens beside"
            f" {sequences - 1} sequences that decode.",
            fix=f"Set it to {least} at least (--max-batch-tokens), or lower scheduler.max_sequences.",
        )
    if given is not None:
        return given
    device = settings.executor.device
    if device == "auto":
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
    return max(BATCH_TOKENS[device], least)


def _to_seconds(milliseconds: float | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1e3


def warm_up(executor: Executor) -> None:
    """Run one token through the model, so that the first request does not pay for first touches of the weights."""
    piece = SequenceSlice(
        seq_id=-1, token_ids=[0], start=0,
        pages={group: [slots[0]] for group, slots in executor.layout.separate_slots().items()}, sample=True,
        params=SamplingParams(temperature=0.0), prompt_len=1,
    )  # fmt: skip
    executor.execute(StepBatch([piece]))
    executor.release(piece.seq_id)
