"""Options of an engine on a machine: plain values, the same for every backend. Knows no device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

DEFAULT_KV_BYTES = 1 << 30
CPU_SLICE_TOKENS, GPU_SLICE_TOKENS = 32, 256
"""The least tokens of a prompt that are worth a step of their own."""


@dataclass(frozen=True, slots=True)
class ExecutorOptions:
    """Options of an engine on this machine. None takes the engine's own value where nothing else is said.

    `device`: "auto" (a GPU that PyTorch can use, else the CPU), "cpu", "cuda" or "cuda:1". `kernels`: "native",
    "torch", or "auto": native on a CPU when the library was built and covers the engine. `threads`: CPU threads of a
    step, 0 for PyTorch's choice. `kv_pages` sets each layer group's pages; otherwise `kv_bytes` is divided between the
    groups. With neither, backend triton takes the memory left, up to `kv_fraction` of the GPU, others DEFAULT_KV_BYTES.
    `batch_invariant`: kernels do not change with the size of a step (backend triton). `loads`: prefixes will be loaded
    from lower tiers, which takes KV pages. `code_pages`: the copier codes pages, if the engine can. `image_slots`:
    images whose features are kept. `compare_ranks` ends an engine of several ranks that have different rows behind the
    last layer, or chose different tokens. Without `peer_access` GPUs exchange through host memory."""

    device: str = "auto"
    kernels: str = "auto"
    threads: int = 0
    page_tokens: int | None = None
    kv_pages: Mapping[str, int] | None = None
    kv_bytes: int | None = DEFAULT_KV_BYTES
    kv_fraction: float = 0.9
    max_batch_tokens: int = 512
    max_sequences: int = 64
    max_context: int | None = None
    batch_invariant: bool = False
    loads: bool = False
    code_pages: bool = False
    image_slots: int = 32
    compare_ranks: bool = False
    peer_access: bool = True
