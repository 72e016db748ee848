"""Bytes that conversations take in each KV tier: the arithmetic of `wicore kv plan`.

Counts what the tiers count: full pages, whole slots, the disk's headers. Must not know running engines. Invariant: a
host or disk tier of these bytes holds these sessions without an eviction; shared prefixes only make room.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass
from math import lcm

from wicore_trt.arithmetic import (
    ITEM_BYTES,
    count_lone_pages,
    div_ceil,
    first_visible_page,
    least_slabs,
    pages_per_slab,
)
from wicore_trt.kv.disk.format import BLOCK_BYTES
from wicore_trt.kv.disk.space import MAX_SLABS, SLAB_BYTES, Space
from wicore_trt.kv.tiers.host import find_coded_geometry
from wicore_trt.model.hf_config import read_hf_config
from wicore_trt.model.spec import GLOBAL, GROUPS, LOCAL, Gemma3Spec
from wicore_trt.plugins.code_layout import find_code
from wicore_trt.plugins.layout import PoolShape

_DIRECTORY_BYTES = 64 << 10  # the disk tier's directories and its lock file count too

# (layers, hidden, query heads, KV heads, head size, intermediate, window, longest context), from the config.json of
# google/gemma-3-270m, -1b-pt, -4b-pt, -12b-pt and -27b-pt.
_SIZES = {
    "gemma3-270m": (18, 640, 4, 1, 256, 2048, 512, 32_768),
    "gemma3-1b": (26, 1152, 4, 1, 256, 6912, 512, 32_768),
    "gemma3-4b": (34, 2560, 8, 4, 256, 10_240, 1024, 131_072),
    "gemma3-12b": (48, 3840, 16, 8, 256, 15_360, 1024, 131_072),
    "gemma3-27b": (62, 5376, 32, 16, 128, 21_504, 1024, 131_072),
}
MODELS = tuple(_SIZES)
"""Names that `builtin_spec` knows."""


def builtin_spec(name: str) -> Gemma3Spec:
    """Return the published sizes of a Gemma 3 model; KeyError for a name that is not in MODELS."""
    layers, hidden, heads, kv_heads, head_dim, intermediate, window, longest = _SIZES[name]
    return read_hf_config(
        {
            "model_type": "gemma3_text",
            "num_hidden_layers": layers,
            "hidden_size": hidden,
            "num_attention_heads": heads,
            "num_key_value_heads": kv_heads,
            "head_dim": head_dim,
            "intermediate_size": intermediate,
            "sliding_window": window,
            "max_position_embeddings": longest,
            "query_pre_attn_scalar": 256 if head_dim == 256 else hidden // heads,
        }
    )


@dataclass(frozen=True, slots=True)
class Geometry:
    """Storage of one model's pages: bytes of a page on the device and its slots by layer group, bytes of a slot."""

    spec: Gemma3Spec
    page_tokens: int
    kv_dtype: str
    page_bytes: Mapping[str, int]
    slot_bytes: int
    slots_per_page: Mapping[str, int]

    @classmethod
    def from_spec(cls, spec: Gemma3Spec, page_tokens: int, kv_dtype: str, *, coded: bool = False) -> Geometry:
        """Take sizes of a model; `coded`: as with kv.compression lossless, where such pages have a code."""
        size, codes = ITEM_BYTES[kv_dtype], dict[str, int]()
        page_bytes = {g: spec.page_bytes(g, page_tokens, size) for g in GROUPS if spec.layers_of(g)}
        for group in map(spec.layer_group, page_bytes if coded and spec.head_dim >= 16 else ()):
            shape = PoolShape(len(group.layers), page_tokens, group.num_kv_heads, group.head_dim, kv_dtype)
            if (code := find_code(shape)) is not None:
                codes[group.name] = code.coded_bytes
        return cls(spec, page_tokens, kv_dtype, page_bytes, *find_coded_geometry(page_bytes, codes)[:2])

    def first_visible_page(self, tokens: int) -> int:
        """Index of the first local page that the token at position `tokens` looks at."""
        return first_visible_page(tokens, self.spec.sliding_window, self.page_tokens)

    def disk_slots(self, nbytes: int) -> int:
        return self._disk_space(nbytes).slots_within(nbytes - _DIRECTORY_BYTES)

    def disk_bytes(self, slots: int) -> int:
        """Limit under which a disk tier holds `slots` slots, in bytes."""
        return self._disk_space(SLAB_BYTES).bytes_of(slots) + _DIRECTORY_BYTES

    def _disk_space(self, limit: int) -> Space:
        slab_bytes = max(SLAB_BYTES, limit // (MAX_SLABS // 2))
        return Space(self.slot_bytes, max(1, slab_bytes // (BLOCK_BYTES + self.slot_bytes)), self.page_tokens)

    def device_bytes(self, sessions: int, tokens: int, max_batch_tokens: int, *, loads: bool = False) -> int:
        """Budget with which `runtime.pool_sizes` has room for `sessions` sequences of `tokens` tokens; `loads` as
        there."""
        pages = self._device_pages(sessions, tokens, max_batch_tokens, loads)
        apart = sum(pages[group] * size for group, size in self.page_bytes.items())
        least = self._least_slabs(tokens, max_batch_tokens, loads)
        if least is None or apart < least * self.slab_bytes:
            return apart
        return max(least, self._count_slabs(pages)) * self.slab_bytes

    @property
    def slab_bytes(self) -> int:
        """Bytes of a slab, which changes hands between the layer groups on the device."""
        return lcm(*self.page_bytes.values())

    def _device_pages(self, sessions: int, tokens: int, max_batch_tokens: int, loads: bool) -> dict[str, int]:
        whole = div_ceil(tokens, self.page_tokens)
        window = min(whole, div_ceil(self.spec.sliding_window, self.page_tokens) + 1)
        spare = min(div_ceil(max_batch_tokens, self.page_tokens), whole - window) + window * loads
        more = sessions > 1  # a page for each, as admission leaves one for each that runs
        return {GLOBAL: sessions * (whole + more), LOCAL: sessions * (window + more) + spare}

    def _count_slabs(self, pages: Mapping[str, int]) -> int:
        per_slab = pages_per_slab(self.page_bytes)
        return sum(div_ceil(pages[group], count) for group, count in per_slab.items())

    def _least_slabs(self, tokens: int, max_batch_tokens: int, loads: bool) -> int | None:
        """Slabs from which on the groups share the memory, as in `runtime.pool_sizes`; None for one group."""
        if len(self.page_bytes) == 1:
            return None
        per_slab = pages_per_slab(self.page_bytes)
        whole, local, window = count_lone_pages(
            tokens, self.spec.sliding_window, max_batch_tokens, self.page_tokens, loads=loads
        )
        return least_slabs((whole, per_slab[GLOBAL]), (local, per_slab[LOCAL]), window)

    def device_sessions(self, nbytes: int, tokens: int, max_batch_tokens: int, *, loads: bool = False) -> int:
        """Count the sequences of `tokens` tokens for which `nbytes` are enough; see `device_bytes`."""

        least = self._least_slabs(tokens, max_batch_tokens, loads)

        def fit(sessions: int) -> bool:
            if least is None or nbytes // self.slab_bytes < least:
                return self.device_bytes(sessions, tokens, max_batch_tokens, loads=loads) <= nbytes
            pages = self._device_pages(sessions, tokens, max_batch_tokens, loads)
            return self._count_slabs(pages) <= nbytes // self.slab_bytes

        most = 1
        while fit(most):
            most *= 2
        return bisect_left(range(1, most), True, key=lambda sessions: not fit(sessions))


@dataclass(frozen=True, slots=True)
class SessionSize:
    """Pages that one conversation of `tokens` tokens leaves in a lower tier while it waits for its next turn. Local
    ones are the windows at its two resume points: the end of the last prompt, for another answer to it, and the end of
    the last reply, of `reply_tokens`. Windows of earlier turns leave first."""

    geometry: Geometry
    tokens: int
    reply_tokens: int

    @property
    def page_indices(self) -> Mapping[str, range | list[int]]:
        held: dict[str, range | list[int]] = {}
        size, count = self.geometry.page_tokens, self.tokens // self.geometry.page_tokens
        if GLOBAL in self.geometry.page_bytes:
            held[GLOBAL] = range(count)
        if LOCAL in self.geometry.page_bytes:
            ends = (max(0, self.tokens - self.reply_tokens - 1) // size, count)
            held[LOCAL] = sorted({i for n in ends for i in range(self.geometry.first_visible_page(n * size), n)})
        return held

    @property
    def slot_count(self) -> int:
        return sum(len(pages) * self.geometry.slots_per_page[group] for group, pages in self.page_indices.items())

    @property
    def host_bytes(self) -> int:
        return self.slot_count * self.geometry.slot_bytes

    def bytes_of(self, group: str) -> int:
        each = self.geometry.slots_per_page.get(group, 0) * self.geometry.slot_bytes
        return len(self.page_indices.get(group, ())) * each

    @property
    def all_layers_bytes(self) -> int:
        """Bytes that all layers of all its full pages would take."""
        return self.tokens // self.geometry.page_tokens * sum(self.geometry.page_bytes.values())

    @property
    def saving_factor(self) -> float:
        """Factor by which a tier holds more tokens than one that keeps the pages of all layers."""
        return self.all_layers_bytes / self.host_bytes if self.host_bytes else 1.0

    @property
    def resume_bytes(self) -> int:
        """Bytes that the disk reads when the conversation goes on: headers too, and one window."""
        size, count = self.geometry.page_tokens, self.tokens // self.geometry.page_tokens
        window = count - self.geometry.first_visible_page(count * size)
        slots = count * self.geometry.slots_per_page.get(GLOBAL, 0)
        slots += window * self.geometry.slots_per_page.get(LOCAL, 0)
        return slots * (BLOCK_BYTES + self.geometry.slot_bytes)
