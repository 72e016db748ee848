"""Chooses tokens: on the device, with temperature, top-k, top-p and min-p, and on the host for all other parameters.

Kernels draw the tokens of `runtime.sampler.Sampler`: same random number of seed and index, same order of candidates,
sums in float64. Only where that number lies within rounding of a border may they differ. Must not know requests, pages
or readers of tokens. Invariants: a row's token depends on that row's logits, parameters, seed and index alone (I14);
drawing allocates nothing after construction and does not wait for the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch

from wicore_trt.backends.triton.ops import TritonModel
from wicore_trt.backends.triton.roles import DRAW_WIDE, DRAWING
from wicore_trt.plugins.step_layout import Logits, SampleArrays, sample_launches, sample_scratch, wide_launch
from wicore_trt.runtime.batch import SampledTokens, SequenceSlice, StepResult
from wicore_trt.runtime.cuda_device import CudaDevice
from wicore_trt.runtime.sampler import NOT_FINITE, Sampler
from wicore_trt.types import SamplingParams

WORDS = {"temperatures": 2, "top_p": 2, "min_p": 2, "seeds": 2, "top_k": 1, "indices": 1}
"""A row's parameters in the order in which they lie in the block, and their int32s."""
TYPES = {"seeds": np.int64, "top_k": np.int32, "indices": np.int32}
WIDE_ROWS = 8
"""Rows that `kernels.sample_wide` decides at the same time."""


GREEDY, DRAWN, HOST = "greedy", "drawn", "host"
"""Chooser of a token: the graph, the kernels that draw, or the host."""


def choose_way(params: SamplingParams | None) -> str:
    """Choose GREEDY, DRAWN or HOST by parameters; GREEDY for a slice without any, whose token nobody takes."""
    if params is None:
        return GREEDY
    if params.logprobs is not None or params.logit_bias or params.penalized:
        return HOST
    return GREEDY if params.greedy else DRAWN


class DeviceSampler:
    """Sampler that draws from `model.memory.logits` into `model.memory.results` on the model's stream."""

    def __init__(self, model: TritonModel, device: CudaDevice) -> None:
        """Prepare the kernels; without them in the engine the sampler is not `available`."""
        self._model, self._rows, self._vocab = model, model.memory.limits.rows, model.shape.vocab_size
        self.available = all(model.table.role_entries(role) for role in (*DRAWING.values(), DRAW_WIDE))
        if not self.available:
            return
        *starts, words = (self._rows * before for before in accumulate(WORDS.values(), initial=0))
        self._offsets = dict(zip(WORDS, starts, strict=True))
        self._staging = [device.staging((words,)) for _ in range(2)]
        """Blocks used in turn: the device may still read one step's when the next step is put on the stream."""
        self._block = device.empty((words,), torch.int32)
        chunk = min(int(e.kernel.constants["CHUNK"]) for e in model.table.role_entries(DRAWING["choose"]))
        group = int(model.table.role_entries(DRAWING["choose"])[0].kernel.constants["GROUP"])
        capacity = int(model.table.role_entries(DRAWING["draw"])[0].kernel.constants["CAPACITY"])
        sizes = sample_scratch(self._vocab, chunk, group, capacity)
        self._scratch = {
            name: device.empty((self._rows * size,), getattr(torch, kind)) for name, (kind, size) in sizes.items()
        }
        self._weights = device.empty((min(WIDE_ROWS, self._rows) * self._vocab,), torch.float64)

    def draw_rows(self, rows: int, drawn: Mapping[int, SequenceSlice]) -> None:
        """Choose a token or status for each of the first `rows` rows: `drawn` ones by their parameters, others
        greedily. A status that is not 0 marks logits that are not finite."""
        assert self.available and rows <= self._rows
        self._staging.reverse()
        self._fill_parameters(rows, drawn)
        self._block.copy_(self._staging[0], non_blocking=True)
        memory, model = self._model.memory, self._model
        places = {name: self._block.data_ptr() + 4 * at for name, at in self._offsets.items()}
        places |= {name: tensor.data_ptr() for name, tensor in self._scratch.items()}
        arrays = SampleArrays(memory.results[0].data_ptr(), memory.results[1].data_ptr(), **places)
        entries = {name: model.find_kernel(role, rows) for name, role in DRAWING.items()}
        logits = Logits(memory.logits.data_ptr(), rows, self._vocab)
        for name, call in sample_launches(entries["choose"].kernel.constants, logits, arrays).items():
            model.launch_kernel(entries[name], call)
        params = [piece.params for piece in drawn.values() if piece.params is not None]
        if any(p.top_k > 0 or p.top_p < 1.0 or p.min_p > 0.0 for p in params):
            call = wide_launch(logits, arrays, self._weights.data_ptr(), len(self._weights) // self._vocab)
            model.launch_kernel(model.find_kernel(DRAW_WIDE, rows), call)

    def _fill_parameters(self, rows: int, drawn: Mapping[int, SequenceSlice]) -> None:
        pieces = drawn.values()
        params = [piece.params for piece in pieces if piece.params is not None]
        values: dict[str, list[float]] = {
            "temperatures": [p.temperature for p in params], "top_p": [p.top_p for p in params],
            "min_p": [p.min_p for p in params], "top_k": [min(p.top_k, self._vocab) for p in params],
            "seeds": [(s.seed + (1 << 63)) % (1 << 64) - (1 << 63) for s in pieces],
            "indices": [s.start + len(s.token_ids) - s.prompt_len for s in pieces],
        }  # fmt: skip
        block, where = self._staging[0].numpy(), [*drawn]
        for name, at in self._offsets.items():
            view = block[at : at + WORDS[name] * self._rows].view(TYPES.get(name, np.float64))
            if name == "temperatures":
                view[:rows] = 0.0
            view[where] = np.array(values[name], view.dtype)


class StepSampler:
    """Chooser of a step's tokens: the graph's kernels and `drawing` on the device, a `Sampler` on the host for the
    rest. Logits stay on the device."""

    def __init__(self, model: TritonModel, device: CudaDevice, drawing: DeviceSampler | None = None) -> None:
        self._model, self._device, self.host = model, device, Sampler()
        self.drawing = drawing or DeviceSampler(model, device)
        self._last: tuple[list[SamplingParams | None], list[str]] = ([], [])
        """Parameters of the last step, and their choosers."""

    def choose_ways(self, slices: Sequence[SequenceSlice]) -> list[str]:
        params = [s.params for s in slices]
        if params != self._last[0]:  # else it is as in the last step, since parameters do not change
            self._last = params, [choose_way(p) for p in params]
        ways = self._last[1]
        if not self.drawing.available:
            ways = [HOST if way is DRAWN else way for way in ways]
        if any(s.suppress_eos or s.mask is not None for s in slices):
            ways = [HOST if s.suppress_eos or s.mask is not None else way for s, way in zip(slices, ways, strict=True)]
        return ways

    def take_tokens(
        self, slices: Sequence[SequenceSlice], rows: list[int], left: list[int], results: np.ndarray
    ) -> StepResult:
        """Collect the tokens of a step that is over, with those that the host chooses for slices at the indices `left`.
        `results` int32 [2, rows] are the device's tokens and statuses."""
        tokens, status = results.tolist()
        if rows != [*range(len(tokens))]:
            tokens, status = [tokens[row] for row in rows], [status[row] for row in rows]
        if not left and not any(status):
            return StepResult([SampledTokens(s.seq_id, (token,)) for s, token in zip(slices, tokens, strict=True)])
        hosts = self.sample_on_host([slices[n] for n in left], [rows[n] for n in left]) if left else StepResult([])
        found, failed = {one.seq_id: one for one in hosts.sampled}, dict(hosts.failed)
        here = {*left}
        for n, piece in enumerate(slices):
            if n not in here and status[n]:
                failed[piece.seq_id] = NOT_FINITE
            elif n not in here:
                found[piece.seq_id] = SampledTokens(piece.seq_id, (tokens[n],))
        return StepResult([found[s.seq_id] for s in slices if s.seq_id in found], failed)

    def sample_on_host(self, slices: Sequence[SequenceSlice], rows: list[int]) -> StepResult:
        logits, cap = self._model.memory.logits, self._model.shape.spec.final_logit_softcapping
        with self._device.active(), torch.inference_mode():
            logits = logits[: len(rows)] if rows == list(range(len(rows))) else logits[rows]
            if cap is not None:  # it must not hide an infinite logit
                logits = torch.where(logits.isposinf(), torch.nan, torch.tanh(logits / cap) * cap)
            return self.host.sample(logits, slices)


FILTERED = SamplingParams(temperature=1.0, top_k=2, top_p=0.9)
"""Parameters that go through all kernels, for warming up."""
