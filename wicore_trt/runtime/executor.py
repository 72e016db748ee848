"""The contracts between the engine loop and what computes.

An `Executor` loads an engine and runs one step: batch in, sampled tokens out. It must not know requests, queues or
prefix reuse. A `RequestExecutor` takes whole requests and makes its steps itself. Invariant: a sequence's tokens depend
on that sequence alone (and its seed), not on the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from wicore_trt.arithmetic import div_ceil
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.runtime.batch import StepBatch, StepResult
from wicore_trt.types import GenerateRequest, TokenOutput


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of the paged KV cache.

    A page holds K and V of all layers of one group for `page_tokens` tokens, contiguous:
    [layers_in_group, 2 (K, V), page_tokens, kv_heads, head_dim] in `kv_dtype` ("float32", "bfloat16", ...).
    `num_pages[group]` is the pool's size. With `slab_pages` both pools are the same memory, so that `num_pages` is what
    each could have alone: a slab of `slab_pages[group]` pages holds pages of one group at a time (`kv/slabs.py`), and
    slot n of a group begins n page sizes behind the one base.
    """

    page_tokens: int
    kv_dtype: str
    num_pages: dict[str, int]
    page_bytes: dict[str, int]
    slab_pages: dict[str, int] | None = None

    @property
    def memory_bytes(self) -> int:
        """Bytes of all pools."""
        sizes = [self.num_pages[g] * self.page_bytes[g] for g in self.num_pages]
        return max(sizes) if self.slab_pages is not None else sum(sizes)

    def separate_slots(self) -> dict[str, range]:
        """Slots of each group that have no byte in common, for who gives out slots without slabs."""
        found, begin = {}, 0
        for group, count in self.num_pages.items():
            size = self.page_bytes[group]
            part = self.memory_bytes // len(self.num_pages) // size if self.slab_pages is not None else count
            first = div_ceil(begin, size) if self.slab_pages is not None else 0
            found[group] = range(first, min(count, first + part))
            begin = found[group].stop * size
        return found

    def find_overlaps(self, group: str, slot: int) -> list[tuple[str, int]]:
        """(group, slot) of all slots that have a byte in common with this one, itself first."""
        found = [(group, slot)]
        if self.slab_pages is not None:
            size = self.page_bytes[group]
            begin, end = slot * size, (slot + 1) * size
            for other, count in self.page_bytes.items():
                if other != group:
                    found += [(other, i) for i in range(begin // count, div_ceil(end, count))]
        return found


Done = Callable[[bytes | None, float], None]
"""What a page copier calls when a copy is over: the digest of the page's bytes on the device, 16 bytes, before they
left or after they came, and the seconds that the copy itself took, without waiting."""
CameIn = Callable[[Sequence[bytes | None], float], None]
"""The same for the next pages of a call that asked for many, in its order: their digests, and the seconds of all."""


class PageCopier(Protocol):
    """Moves pages between a device pool and host buffers, in order with the executor's steps and with each other:
    values read are those before any step that starts later, and `done` of `to_device` is called when later steps see
    the pages; it takes many pages of one group at a time, each in its parts, and no slot twice. The device slot may be
    written by later steps as soon as `to_host` returns. Host buffers belong to the copy until `done`, which any thread
    may call, also before the call returns. Copies of one direction end in order.
    `settled`: whatever steps wrote into the page was there when the last collected step had ended, and no step that is
    under way writes it, so that it need not wait for those.
    `broken`: why no copy will end any more; `done` of those under way is then never called. `checks`: `done` has
    digests; else they are None, and who needs them takes `digest` of the bytes in host memory."""

    broken: BaseException | None
    checks: bool

    def pin(self, memory: memoryview, /) -> bool:
        """Lock host memory that copies will use for as long as the copier lives, where that makes them faster. True:
        it is backed by memory now. Any thread."""
        ...

    def to_host(
        self, group: str, slot: int, parts: Sequence[memoryview], done: Done, /, *, settled: bool = False
    ) -> None: ...

    def to_device(
        self, group: str, slots: Sequence[int], pages: Sequence[Sequence[memoryview]], done: CameIn, /
    ) -> None: ...

    def flush(self) -> None:
        """Begin the copies asked for so far, which begin in batches. So does the next step."""
        ...

    def digest(self, parts: Sequence[memoryview], /) -> bytes:
        """The digest of a page's bytes that lie in host memory: all parts but the last are multiples of 4,096 bytes.
        Any thread."""
        ...


class Executor(Protocol):
    """Engine loaded on one device. `kernels` names the implementation of the operators, because KV values of
    different ones differ in their last bits. `copier` moves pages between its pools and host memory. With
    fewer than `slice_tokens` tokens a step gets no shorter, because the weights are read all the same. More than
    `max_sequences` running sequences are right but slow; None is no such limit. `score_rows`: targets that the slices
    of one step may have together, 0 where it reports none. `graph_sizes`: by how many sequences at most decode a
    token each, to how many tokens of prompts beside them steps are padded, both ascending, so that they start at once;
    the kernels of all others are launched one by one, for which the device may wait. Empty where nothing is padded."""

    spec: Gemma3Spec
    kernels: str
    layout: KVLayout
    max_batch_tokens: int
    slice_tokens: int
    max_sequences: int | None
    score_rows: int
    graph_sizes: dict[int, tuple[int, ...]]
    copier: PageCopier

    def execute(self, batch: StepBatch) -> StepResult:
        """Run one step. Raises only on a broken device; a bad sequence is reported in StepResult.failed."""
        ...

    def release(self, seq_id: int) -> None:
        """Forget the sampling state of a finished, cancelled or preempted sequence. Unknown ids are ignored."""
        ...

    def close(self) -> None:
        """Free device memory. The executor is unusable afterwards."""
        ...


@runtime_checkable
class AheadExecutor(Executor, Protocol):
    """An executor that can start a step before the tokens of the last one are read, so that the device never waits for
    the host. `execute(batch)` is `submit(batch)`, then `collect()`. Steps run in the order of their submission; at most
    two are submitted and not collected."""

    def submit(self, batch: StepBatch) -> None:
        """Start a step; what the batch refers to may change afterwards. One that raises was not submitted."""
        ...

    def collect(self) -> StepResult:
        """Wait for the oldest step that was submitted and not collected. Where it raises, that step is over all the
        same."""
        ...

    def leads(self, batch: StepBatch) -> bool:
        """Tell whether the step after `batch`, the last one submitted, may name its sampled tokens UNREAD."""
        ...


class RequestExecutor(Protocol):
    """Engine that schedules by itself: sequences of requests in, their tokens out as they come. At most
    `max_sequences` are submitted and not ended. All calls but `check` come from one thread."""

    spec: Gemma3Spec
    kernels: str
    max_sequences: int

    def check(self, request: GenerateRequest, stop_ids: tuple[int, ...]) -> None:
        """Raise InvalidRequestError for what the engine cannot do, or would do otherwise than SamplingParams says."""
        ...

    def submit(self, request: GenerateRequest, index: int, seed: int, stop_ids: tuple[int, ...]) -> None:
        """Start the index-th sequence of a checked request; `seed` is in [0, 2**64). `stop_ids` end it, and are
        reported as its last token. Raises WicoreError where the engine does not take it, which fails alone."""
        ...

    def poll(self, timeout_s: float) -> list[TokenOutput]:
        """Take what sequences gained; waits at most `timeout_s` seconds for something. The last output of a sequence
        has a finish reason. Raises when the engine is broken."""
        ...

    def cancel(self, request_key: str, index: int) -> None:
        """End a sequence that was submitted; nothing of it is reported any more. Unknown ones are ignored."""
        ...

    def close(self) -> None:
        """Stop the engine and free device memory. The executor is unusable afterwards."""
        ...
