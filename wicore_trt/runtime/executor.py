"""Protocols between the engine loop and executors.

An `Executor` runs one step: batch in, sampled tokens out. It must not know requests, queues or prefix reuse. A
`RequestExecutor` takes whole requests and schedules steps itself. Invariant: a sequence's logits depend on it alone,
but for rounding where an engine is not batch-invariant (I21); its tokens depend on these and its seed (I14).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from wicore_trt.arithmetic import div_ceil
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.runtime.batch import StepBatch, StepResult
from wicore_trt.types import Bytes, GenerateRequest, TokenOutput


@dataclass(frozen=True, slots=True)
class KVLayout:
    """Geometry of the paged KV cache. A page holds K and V of all layers of one group for `page_tokens` tokens,
    contiguous: [layers_in_group, 2 (K, V), page_tokens, kv_heads, head_dim] in `kv_dtype` ("float32", "bfloat16", ...).
    `num_pages[group]` is the pool's size. With `slab_pages` both pools share one memory, and `num_pages` is what each
    could have alone. A slab holds `slab_pages[group]` pages of one group at a time (`kv/slabs.py`); slot n begins n
    page sizes behind the common base."""

    page_tokens: int
    kv_dtype: str
    num_pages: dict[str, int]
    page_bytes: dict[str, int]
    slab_pages: dict[str, int] | None = None

    @property
    def memory_bytes(self) -> int:
        sizes = [self.num_pages[g] * self.page_bytes[g] for g in self.num_pages]
        return max(sizes) if self.slab_pages is not None else sum(sizes)

    def separate_slots(self) -> dict[str, range]:
        """List slots of each group such that no two share a byte, for pools without slabs."""
        found, begin = {}, 0
        for group, count in self.num_pages.items():
            size = self.page_bytes[group]
            part = self.memory_bytes // len(self.num_pages) // size if self.slab_pages is not None else count
            first = div_ceil(begin, size) if self.slab_pages is not None else 0
            found[group] = range(first, min(count, first + part))
            begin = found[group].stop * size
        return found

    def find_overlaps(self, group: str, slot: int) -> list[tuple[str, int]]:
        """List (group, slot) of all slots that share a byte with this one, itself first."""
        found = [(group, slot)]
        if self.slab_pages is not None:
            size = self.page_bytes[group]
            begin, end = slot * size, (slot + 1) * size
            for other, count in self.page_bytes.items():
                if other != group:
                    found += [(other, i) for i in range(begin // count, div_ceil(end, count))]
        return found


Parts = Sequence[memoryview]
"""Host buffers of a page, in order."""
Done = Callable[[bytes | None, float], None]
"""Takes, when a copy is over, the digest of the page's bytes on the device and the seconds of the copy alone.
The digest has 16 bytes; a coded page has that of its code, or UNFIT where its bytes are no code of the size."""
UNFIT = b""
CameIn = Callable[[Sequence[bytes | None], float], None]
"""Called for the next pages of a call that asked for many, in its order: their digests, and the seconds of all."""


class PageCopier(Protocol):
    """Copier of pages between a device pool and host buffers, in order with the executor's steps and with other copies.

    `to_host` reads values from before any later step, and the slot may be written by later steps once it returns.
    `to_device` takes many pages of one group, each in its parts, and no slot twice; later steps see the pages when
    `done` is called. Host buffers belong to the copy until `done`, which any thread may call, also before the call
    returns. Copies of one direction end in order. `settled`: the page was complete when the last collected step ended
    and no step under way writes it, so the copy need not wait for steps. `broken`: why no copy will end any more;
    `done` of those under way is then never called. `checks`: `done` gets digests; otherwise they are None, and callers
    use `digest` of the bytes in host memory. `coded_bytes`: of a page's code, by those layer groups whose pages go
    coded into host buffers of so many bytes in all, and come back from there; longer buffers get the page itself."""

    broken: BaseException | None
    checks: bool
    coded_bytes: Mapping[str, int]

    def pin(self, memory: memoryview, /) -> bool:
        """Lock host memory for faster copies while the copier lives. Any thread. Returns True if it is backed now."""

    def to_host(self, group: str, slot: int, parts: Parts, done: Done, /, *, settled: bool = False) -> None: ...

    def to_device(self, group: str, slots: Sequence[int], pages: Sequence[Parts], done: CameIn, /) -> None: ...

    def flush(self) -> None:
        """Begin the copies asked for so far; else they begin in batches, at the latest before the next step."""

    def digest(self, parts: Parts, /) -> bytes:
        """Compute the digest of a page in host memory. Parts but the last are multiples of 4,096 bytes. Any thread."""


@runtime_checkable
class SharedCopier(PageCopier, Protocol):
    """Copier over several processes, whose host buffers all lie in memory that it maps."""

    def map_memory(self, size: int, /) -> memoryview:
        """Map `size` zero bytes, from the begin of a page of memory."""


NOT_FINITE = "its features are not finite in the engine's dtype"
"""Why an image cannot be encoded: of this image, whoever encodes it."""
NOT_ENCODED = "the engine's log says why"


class ImageEncoder(Protocol):
    """Encoder of images between or beside the steps of an executor, one image after the other. Slot n of `slots` holds
    the features of one image, [tokens, hidden size] in the engine's dtype, from the end of `begin(n, ...)` until the
    next one. Callers begin no slot that a step under way reads. `tokens`, `pixel_bytes`: of each image. An encoding
    that takes the place of steps comes in `parts` of `part_s` seconds; `parts` is 0 for one that runs by itself."""

    slots: int
    tokens: int
    pixel_bytes: int
    parts: int
    part_s: float

    def begin(self, slot: int, pixels: Bytes, /) -> int:
        """Begin to encode uint8 [size, size, 3] into a slot, return a number for `is_finite` at once. Parts that the
        image before has not run are left out."""

    def run_parts(self, count: int, /) -> None:
        """Let the next parts of the image begun last run behind the steps submitted so far; return at once."""

    def take_ended(self, timeout_s: float = 0.0, /) -> list[tuple[int, str | None]]:
        """Return slots whose encoding ended since the last call, and why it failed. Steps submitted from now on see the
        features. Waits at most `timeout_s` seconds for one. An encoding by parts may still run, before such steps."""

    def is_finite(self, begun: int, /) -> bool:
        """Tell whether the features of an image, by what `begin` returned, are finite: right as soon as a step that
        reads them has ended, until its slot is begun for the second time after it."""


class Executor(Protocol):
    """Engine loaded on one device.

    `kernels` names the operators' implementation, because KV values of different ones differ in their last bits.
    `copier` moves pages between pools and host memory. A step of fewer than `slice_tokens` tokens is no shorter,
    because it reads all weights. More than `max_sequences` running sequences are right but slow; None: no such
    limit. `score_rows`: most targets of one step's slices, 0 where it reports none. `graph_sizes` tells to which
    numbers of prompt tokens steps are padded, by the most sequences that decode beside them; both ascend. Padded
    steps start at once. The kernels of others are launched one by one, for which the device may wait. Empty where
    nothing is padded. `images`: None for an engine that reads text alone."""

    spec: Gemma3Spec
    kernels: str
    layout: KVLayout
    max_batch_tokens: int
    slice_tokens: int
    max_sequences: int | None
    score_rows: int
    graph_sizes: dict[int, tuple[int, ...]]
    copier: PageCopier

    @property
    def images(self) -> ImageEncoder | None: ...

    def execute(self, batch: StepBatch) -> StepResult:
        """Run one step. Raises only on a broken device; a bad sequence is reported in StepResult.failed."""

    def release(self, seq_id: int) -> None:
        """Forget the sampling state of a finished, cancelled or preempted sequence. Unknown ids are ignored."""

    def close(self) -> None:
        """Free device memory, for good."""


@runtime_checkable
class AheadExecutor(Executor, Protocol):
    """Executor that can start a step before the last one's tokens are read, so that the device never waits for the
    host. `execute(batch)` is `submit(batch)`, then `collect()`. Steps run in order; at most two are not collected."""

    def submit(self, batch: StepBatch) -> None:
        """Start a step; the batch's data may change afterwards. If it raises, nothing was submitted."""

    def collect(self) -> StepResult:
        """Wait for the oldest submitted step. It is over even if this raises."""

    def leads(self, batch: StepBatch) -> bool:
        """Tell whether the step after `batch`, the last one submitted, may name its sampled tokens UNREAD."""


class RequestExecutor(Protocol):
    """Engine that schedules by itself: sequences of requests in, their tokens out. At most `max_sequences` run. All
    calls but `check` come from one thread."""

    spec: Gemma3Spec
    kernels: str
    max_sequences: int

    def check(self, request: GenerateRequest, stop_ids: tuple[int, ...]) -> None:
        """Raise InvalidRequestError for what the engine cannot do, or would do otherwise than SamplingParams says."""

    def submit(self, request: GenerateRequest, index: int, seed: int, stop_ids: tuple[int, ...]) -> None:
        """Start the index-th sequence of a checked request; `seed` is in [0, 2**64). `stop_ids` end it, and are
        reported as its last token. Raises WicoreError where the engine refuses this sequence alone."""

    def poll(self, timeout_s: float) -> list[TokenOutput]:
        """Take new outputs, waiting at most `timeout_s` seconds. A sequence's last one has a finish reason. Raises when
        the engine is broken."""

    def cancel(self, request_key: str, index: int) -> None:
        """End a submitted sequence and report nothing more of it. Unknown ones are ignored."""

    def close(self) -> None:
        """Stop the engine and free device memory, for good."""
