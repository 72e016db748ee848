"""Our tiers as KV-cache connector of TensorRT-LLM's PyTorch backend (1.1 and later); never run with the library itself.

    LLM(model=DIRECTORY, kv_connector_config=KvCacheConnectorConfig(**CONNECTOR))

with WICORE_KV__HOST_BYTES, WICORE_KV__DISK_PATH and so on in the environment. TensorRT-LLM makes a scheduler and a
worker, which share a `_Hub` in one process. Must not know model code. Invariant: tokens are promised only when their
pages lie verified in host memory and cannot leave before they are loaded.

Reason: no call can say that a load failed; once `get_num_new_matched_tokens` returned n, the engine computes from token
n on. So the look-up waits for the disk, at most MATCH_S, while the engine stands still, and promises what has come. For
the same reason only one rank works: rank 0 answers for all and cannot know what others hold.

Our key chain (kv/pages/hashing.py) names pages, never a block's own tokens. Blocks are copied in order with the forward
pass, on its stream. Contract: tensorrt_llm/_torch/pyexecutor/kv_cache_connector.py.
"""

from __future__ import annotations

import atexit
import hashlib
import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from wicore_trt.backends.trtllm.tiers import GROUP, BlockTiers
from wicore_trt.checkpoint.digest import hash_file
from wicore_trt.config import KVSettings, load_settings
from wicore_trt.errors import ConfigError, EnvironmentUnfitError
from wicore_trt.files import UntrustedFiles
from wicore_trt.kv.disk.format import Namespace
from wicore_trt.kv.pages.hashing import KeyChain, TenantNames
from wicore_trt.kv.pages.page import Page
from wicore_trt.kv.tiers.moves import CopyState, Fetch, TierCopy

CONNECTOR = {
    "connector_module": "wicore_trt.backends.trtllm.connector",
    "connector_scheduler_class": "WicoreScheduler",
    "connector_worker_class": "WicoreWorker",
}
"""Arguments of KvCacheConnectorConfig."""
MATCH_S = 1.0
_ARGUMENTS = ("dtype", "load_format", "model_kwargs", "quant_config", "attn_backend")
_FILES = ("*.json", "*.safetensors", "*.bin")
_OPAQUE = ("image_token_index", "image_token_id", "boi_token_index", "eoi_token_index")
CLOSE_S = 10.0
_PARALLEL = ("tensor_parallel_size", "pipeline_parallel_size", "context_parallel_size")


@dataclass(frozen=True, slots=True)
class StepMoves:
    """Moves around one forward pass: (request, page, block) to load before it and to save after it."""

    loads: list[tuple[int, Page, int]] = field(default_factory=list)
    saves: list[tuple[int, Page, int]] = field(default_factory=list)


@dataclass(slots=True)
class _Sequence:
    """State of a request. `start`: tokens on the device before its first pass; the last `promised` of them are loaded
    from `matched`; `saved`: pages already considered for saving."""

    names: TenantNames
    start: int
    promised: int
    matched: list[Fetch]
    keys: list[bytes]
    tokens: list[int] = field(default_factory=list)
    blocks: list[int] = field(default_factory=list)
    saved: int = 0


class EngineIdentity:
    """Identity of an engine, all that its KV blocks depend on besides tokens: `fingerprint` and `kernels` for page keys
    and the disk's namespace; `plain` tells prompts of text alone. Engines of equal names compute equal blocks, up to
    the engine's own rounding between batch shapes. Hashes all files of the model, once. Raises EnvironmentUnfitError
    when `llm_args.model` is no directory."""

    def __init__(self, llm_args: Any) -> None:
        directory = Path(str(llm_args.model))
        if not directory.is_dir():
            problem = f"The connector names KV blocks after the model's files, and {directory} is no directory."
            raise EnvironmentUnfitError(problem, fix="Give LLM the directory that the model was downloaded to.")
        files = sorted(path for pattern in _FILES for path in directory.glob(pattern))
        facts: dict[str, Any] = {name: repr(getattr(llm_args, name, None)) for name in _ARGUMENTS}
        facts["kv_dtype"] = repr(getattr(llm_args.kv_cache_config, "dtype", None))
        facts["files"] = {path.name: hash_file(path) for path in files}
        text = json.dumps(facts, sort_keys=True).encode()
        self.fingerprint = hashlib.blake2b(text, digest_size=32, person=b"wicore-trtllm-1").hexdigest()
        try:
            self.kernels = f"tensorrt-llm/{version('tensorrt-llm')}"
        except PackageNotFoundError:
            raise EnvironmentUnfitError("TensorRT-LLM is not installed.", fix="pip install tensorrt-llm") from None
        config = UntrustedFiles(directory, EnvironmentUnfitError).read_json(directory / "config.json")
        self._vocab = int((config.get("text_config") or config).get("vocab_size", 1 << 31))
        self._opaque = frozenset(config[key] for key in _OPAQUE if isinstance(config.get(key), int))

    def plain(self, tokens: list[int]) -> bool:
        """Tell whether no token stands for an image, whose content tokens do not name."""
        return max(tokens) < self._vocab and self._opaque.isdisjoint(tokens)


class _Hub:
    """State that scheduler and worker of one engine share."""

    def __init__(self, llm_args: Any, settings: KVSettings) -> None:
        _check_arguments(llm_args, settings)
        self.llm_args, self.settings = llm_args, settings
        self.roles: set[str] = set()
        self.identity = EngineIdentity(llm_args)
        self.page_tokens = int(llm_args.kv_cache_config.tokens_per_block)
        self.tiers: BlockTiers | None = None
        self.chain: KeyChain | None = None
        self.stored: dict[int, list[TierCopy]] = {}
        self.matched: dict[int, list[Fetch]] = {}

    def open(self, tensor: Any) -> None:
        """Make the tiers for a pool [blocks, ...]. Raises EnvironmentUnfitError for any other shape."""
        import torch

        from wicore_trt.runtime.page_copier import TorchPageCopier

        if self.tiers is not None or not isinstance(tensor, torch.Tensor):
            raise EnvironmentUnfitError(
                "The connector was given several KV pools, and its contract has one: a model with sliding windows gets "
                "one pool per window.",
                fix="Leave kv_cache_config.max_attention_window out, or run without the connector.",
            )
        per_block = tensor[0].numel() if tensor.ndim >= 2 and len(tensor) else 0
        if not tensor.is_contiguous() or not per_block or per_block % self.page_tokens:
            raise EnvironmentUnfitError(
                f"The connector takes a contiguous KV pool [blocks, layers, 2, values of {self.page_tokens} tokens]; "
                f"this one is {list(tensor.shape)}.",
                fix="Use a TensorRT-LLM release whose connector registers the unique primary pool.",
            )
        shape, dtype = tuple(tensor.shape[1:]), str(tensor.dtype)
        fingerprint = f"{self.identity.fingerprint}/{dtype}/{'x'.join(map(str, shape))}"
        page_bytes = {GROUP: per_block * tensor.element_size()}
        kernels = f"{self.identity.kernels}/{torch.cuda.get_device_name(tensor.device) if tensor.is_cuda else 'cpu'}"
        namespace = Namespace(fingerprint, kernels, self.page_tokens, page_bytes, dtype, 0, 1)
        self.tiers = BlockTiers(self.settings, namespace, TorchPageCopier({GROUP: tensor}))
        name, secret = f"{fingerprint}/{kernels}", self.tiers.secret
        self.chain = KeyChain(name, self.page_tokens, rank=0, world=1, secret=secret)
        atexit.register(self.close)

    def list_storing(self, request_id: int) -> list[TierCopy]:
        """List copies of a request's blocks that still read them."""
        return [copy for copy in self.stored.get(request_id, ()) if copy.state is CopyState.WRITING]

    def close(self) -> None:
        """Write transfers under way to disk and free the directory."""
        if self.tiers is not None:
            atexit.unregister(self.close)
            self.tiers.lower.close(CLOSE_S)
            self.tiers = None


_pending: list[_Hub] = []
"""Hubs that wait for their other role."""


def _join_hub(role: str, llm_args: Any) -> _Hub:
    for hub in _pending:
        if role not in hub.roles and hub.llm_args == llm_args:
            _pending.remove(hub)
            break
    else:
        hub = _Hub(llm_args, load_settings().kv)
        _pending.append(hub)
    hub.roles.add(role)
    return hub


def _check_arguments(llm_args: Any, settings: KVSettings) -> None:
    if not settings.host_bytes:
        raise ConfigError("The connector has no host memory to use.", fix="Set WICORE_KV__HOST_BYTES, to 16GiB say.")
    if any((getattr(llm_args, name, 1) or 1) > 1 for name in _PARALLEL):
        problem = "The connector works on one rank: the contract gives rank 0 no way to ask what other ranks can load."
        raise EnvironmentUnfitError(problem, fix="Use one GPU, or run without the connector.")
    windows = llm_args.kv_cache_config.max_attention_window
    longest = getattr(llm_args, "max_seq_len", None)
    if windows and not (longest and all(window >= longest for window in windows)):
        raise EnvironmentUnfitError(
            f"With attention windows {list(windows)} TensorRT-LLM has several KV pools or drops blocks, and its "
            "connector contract knows neither.",
            fix="Leave kv_cache_config.max_attention_window out: all layers then keep all blocks, in one pool.",
        )


class TieredScheduler:
    """Scheduler half, without its base class; see `WicoreScheduler`."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # type: ignore[call-arg] # TensorRT-LLM's class comes behind in the order
        self.hub = _join_hub("scheduler", llm_args)
        self._sequences: dict[int, _Sequence] = {}
        self._ignored: set[int] = set()

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Count tokens beyond `num_computed_tokens` that host memory holds, verified, in whole blocks; at least one
        token of the prompt is left to compute. Never asynchronous."""
        hub, size = self.hub, self.hub.page_tokens
        again = request.request_id in self._sequences or request.request_id in self._ignored
        self._drop_sequence(request.request_id)
        tokens = list(request.get_tokens(0))
        if hub.tiers is None or hub.chain is None or again or not self._is_plain(request, tokens):
            # a request that comes a second time was paused: the engine no longer says which blocks are new
            self._ignored.add(request.request_id)
            return 0, False
        salt = "" if request.cache_salt_id is None else str(request.cache_salt_id)
        names, keys = hub.chain.derive_names("", salt), list[bytes]()
        names.extend_keys(keys, tokens)
        first, matched = num_computed_tokens // size, list[Fetch]()
        if num_computed_tokens % size == 0:
            pages = [_make_page(keys, i, names) for i in range(first, (len(tokens) - 1) // size)]
            matched = hub.tiers.match(keys, pages, MATCH_S)
        promised = len(matched) * size
        hub.matched[request.request_id] = matched
        start = num_computed_tokens + promised
        self._sequences[request.request_id] = _Sequence(names, start, promised, matched, keys)
        return promised, False

    def update_state_after_alloc(self, request: Any, block_ids: Sequence[int]) -> None:
        """Check that the blocks hold the promised tokens; the scheduler's output gives the blocks again."""
        sequence = self._sequences.get(request.request_id)
        if sequence is not None and len(block_ids) * self.hub.page_tokens < sequence.start:
            raise RuntimeError(f"{len(block_ids)} blocks cannot hold the {sequence.start} tokens that were matched")

    def build_connector_meta(self, scheduler_output: Any) -> StepMoves:
        moves = StepMoves()
        for data in scheduler_output.new_requests:
            sequence = self._sequences.get(data.request_id)
            if sequence is not None:
                # whether computed_position counts matched tokens differs by version; the smaller reading is safe
                done = min(data.computed_position + sequence.promised, sequence.start)
                self._save_full_pages(data, sequence, done + data.num_scheduled_tokens, moves)
                first = (sequence.start - sequence.promised) // self.hub.page_tokens
                for i, fetch in enumerate(sequence.matched, start=first):
                    moves.loads.append((data.request_id, fetch.page, sequence.blocks[i]))
                sequence.matched = []
        for data in scheduler_output.cached_requests:
            sequence = self._sequences.get(data.request_id)
            if sequence is not None:
                self._save_full_pages(data, sequence, data.computed_position + data.num_scheduled_tokens, moves)
        return moves

    def request_finished(self, request: Any, cache_block_ids: Sequence[int]) -> bool:
        """Tell whether blocks of the request are still being copied; the worker's `get_finished` reports the end."""
        hub = self.hub
        self._drop_sequence(request.request_id)
        self._ignored.discard(request.request_id)
        if hub.tiers is None:
            return False
        hub.tiers.lower.poll_all()
        under_way = hub.list_storing(request.request_id)
        hub.stored.pop(request.request_id, None)
        if under_way:
            hub.stored[request.request_id] = under_way
        return bool(under_way)

    def _save_full_pages(self, data: Any, sequence: _Sequence, computed: int, moves: StepMoves) -> None:
        """Plan to save pages that are full once the pass has computed tokens below `computed`."""
        hub = self.hub
        assert hub.tiers is not None
        sequence.tokens.extend(data.new_tokens)
        sequence.blocks.extend(data.new_block_ids)
        sequence.names.extend_keys(sequence.keys, sequence.tokens)
        full = min(computed // hub.page_tokens, len(sequence.keys), len(sequence.blocks))
        for i in range(sequence.saved, full):  # the engine's own reuse may have found pages that our tiers lost
            page = _make_page(sequence.keys, i, sequence.names)
            if not hub.tiers.has_page(page):
                moves.saves.append((data.request_id, page, sequence.blocks[i]))
        sequence.saved = max(sequence.saved, full)

    def _drop_sequence(self, request_id: int) -> None:
        """Forget a request, and release what was matched for it and not loaded."""
        self._sequences.pop(request_id, None)
        for fetch in self.hub.matched.pop(request_id, ()):
            assert self.hub.tiers is not None
            self.hub.tiers.lower.up.release_fetch(fetch)

    def _is_plain(self, request: Any, tokens: list[int]) -> bool:
        """Tell whether KV values follow from the tokens alone: no LoRA, no images."""
        other = (getattr(request, name, None) for name in ("lora_task_id", "multimodal_hashes"))
        return bool(tokens) and self.hub.identity.plain(tokens) and all(value is None for value in other)


class TieredWorker:
    """Worker half, without its base class; see `WicoreWorker`."""

    def __init__(self, llm_args: Any) -> None:
        super().__init__(llm_args)  # type: ignore[call-arg] # TensorRT-LLM's class comes behind in the order
        self.hub = _join_hub("worker", llm_args)
        self._waiting: set[int] = set()

    def register_kv_caches(self, kv_cache_tensor: Any) -> None:
        """Open the tiers on the block pool, one contiguous tensor with the block first."""
        self.hub.open(kv_cache_tensor)

    def start_load_kv(self, stream: Any) -> None:
        """Copy matched pages into their blocks, in order with the pass on `stream`."""
        moves = self._read_moves()
        with _enter_stream(stream):
            for request_id, page, block in moves.loads:
                fetches = self.hub.matched.get(request_id)
                if not fetches or fetches[0].page != page:
                    raise RuntimeError(f"page {page.index} of request {request_id} was promised and is not held")
                assert self.hub.tiers is not None
                self.hub.tiers.lower.up.upload_pages([fetches.pop(0).take_copy()], [block])

    def wait_for_layer_load(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: loads are on the stream before the first layer."""

    def save_kv_layer(self, layer_idx: int, stream: Any) -> None:
        """Do nothing: a block is saved whole, after the last layer."""

    def wait_for_save(self, stream: Any) -> None:
        """Copy full blocks to the host, in order with the pass on `stream`."""
        moves, tiers = self._read_moves(), self.hub.tiers
        if tiers is None:
            return
        with _enter_stream(stream):
            for request_id, page, block in moves.saves:
                copy = tiers.lower.down.store_page(page, block)
                if copy is not None:
                    self.hub.stored.setdefault(request_id, []).append(copy)
        tiers.lower.poll_all()

    def get_finished(
        self, finished_gen_req_ids: list[int], started_loading_req_ids: list[int]
    ) -> tuple[list[int], list[int]]:
        """Return (requests whose blocks are no longer read, [])."""
        hub = self.hub
        if hub.tiers is not None:
            hub.tiers.lower.poll_all()
        self._waiting.update(finished_gen_req_ids)
        saved = [key for key in sorted(self._waiting) if hub.tiers is None or not hub.list_storing(key)]
        for request_id in saved:
            self._waiting.discard(request_id)
            hub.stored.pop(request_id, None)
        return saved, []

    def _read_moves(self) -> StepMoves:
        return self.get_connector_meta() or StepMoves()  # type: ignore[attr-defined] # of TensorRT-LLM's class


def __getattr__(name: str) -> Any:
    """Make `WicoreScheduler` and `WicoreWorker` on first use: the classes above, derived from TensorRT-LLM's."""
    if name not in ("WicoreScheduler", "WicoreWorker"):
        raise AttributeError(name)
    from tensorrt_llm._torch.pyexecutor import kv_cache_connector as theirs

    if name == "WicoreScheduler":
        return type(name, (TieredScheduler, theirs.KvCacheConnectorScheduler), {"__module__": __name__})
    return type(name, (TieredWorker, theirs.KvCacheConnectorWorker), {"__module__": __name__})


def _make_page(keys: list[bytes], i: int, names: TenantNames) -> Page:
    return Page(keys[i], GROUP, i, keys[i - 1] if i else None, names.tag)


def _enter_stream(stream: Any) -> AbstractContextManager[Any]:
    if stream is None:
        return nullcontext()
    import torch

    context: AbstractContextManager[Any] = torch.cuda.stream(stream)
    return context
