"""Logits to tokens: bias, penalties, temperature, filters, seeded draws and log-probabilities.

Knows rows of logits and their slices; must not know the model, pages or requests. Invariant (I14): a row's token
depends on that row's logits, parameters, earlier tokens and seed alone, not on other rows or preemptions. So reductions
that round run over fixed-size blocks of one row, and candidates have one order: higher logit, then lower token id.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from numpy.random import Philox

from wicore_trt.arithmetic import div_ceil
from wicore_trt.runtime.batch import SampledTokens, SequenceSlice, StepResult
from wicore_trt.types import SamplingParams, TokenLogprob

NOT_FINITE = "logits are not finite"
NONE_ALLOWED = "no token that the constraint allows is possible"
_CANDIDATES = 1024  # top-k, top-p and min-p look at this many best tokens, then at 16 times as many, then at all
_GROUP = 64  # maxima of groups of this many tokens bound the best candidates from below
_BLOCK = 512  # weights are summed in blocks of this many tokens
_ROWS_AT_ONCE = 16  # bounds the float64 working memory


class Sampler:
    """Sampler of one token per row; keeps token counts per `seq_id` for penalties until `release`."""

    def __init__(self) -> None:
        self._counts: dict[int, _TokenCounts] = {}

    def sample(self, logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> StepResult:
        """Sample from `logits` (float32 [R, V], any device, unchanged); `slices[r]` is the slice of row r. A row with
        NaN or +inf, or without any finite logit, is reported in `failed`; -inf entries are masked tokens. `logits` as
        given decide that, so bias, penalties and stop tokens fail no row. A constraint can, if its mask leaves none."""
        assert logits.ndim == 2 and logits.dtype == torch.float32 and len(slices) == logits.shape[0]
        best, raw_peaks = _find_best(logits)
        finite, failed = np.isfinite(raw_peaks), dict[int, str]()  # by row
        edited, peaks = self._edit_logits(logits, slices, finite, failed), raw_peaks
        if edited is not logits:
            best, peaks = _find_best(edited)
            for row in np.flatnonzero(finite & ~np.isfinite(peaks)).tolist():  # nothing is left to choose from
                if slices[row].mask is not None:
                    failed.setdefault(row, NONE_ALLOWED)
                    continue
                edited[row] = logits[row]
                best[row : row + 1], peaks[row : row + 1] = _find_best(logits[row : row + 1])
        failed |= {int(row): NOT_FINITE for row in np.flatnonzero(~finite)}
        alive = [r for r in range(len(slices)) if r not in failed]
        chosen = {r: int(best[r]) for r in alive}
        drawn = [r for r in alive if not _require_params(slices[r]).greedy]
        for start in range(0, len(drawn), _ROWS_AT_ONCE):
            rows = drawn[start : start + _ROWS_AT_ONCE]
            tokens = _draw_tokens(_select_rows(edited, rows), peaks[rows], [slices[r] for r in rows])
            chosen.update(zip(rows, tokens, strict=True))
        logprobs: dict[int, tuple[TokenLogprob, ...]] = {}
        reported = [r for r in alive if _require_params(slices[r]).logprobs is not None]
        for start in range(0, len(reported), _ROWS_AT_ONCE):
            rows = reported[start : start + _ROWS_AT_ONCE]
            tops = [_require_params(slices[r]).logprobs or 0 for r in rows]
            values = _compute_logprobs(_select_rows(logits, rows), raw_peaks[rows], [chosen[r] for r in rows], tops)
            logprobs.update((row, (value,)) for row, value in zip(rows, values, strict=True))
        return StepResult(
            [SampledTokens(slices[r].seq_id, (chosen[r],), logprobs.get(r, ())) for r in alive],
            failed={slices[row].seq_id: why for row, why in sorted(failed.items())},
        )

    def step(self, logits: torch.Tensor, slices: Sequence[SequenceSlice]) -> StepResult:
        """Score the targets of slices and sample those that ask for it; `logits` float32 [R, V] of
        `StepInputs.sample_rows`."""
        if not any(piece.targets for piece in slices):
            sampling = [piece for piece in slices if piece.sample]
            return self.sample(logits, sampling) if sampling else StepResult([])
        rows, sampling, row = [], [], 0
        scored: dict[int, list[TokenLogprob]] = {}
        failed: dict[int, str] = {}
        for piece in slices:
            found = _score_targets(logits[row : row + len(piece.targets)], piece)
            row += len(piece.targets)
            if found is None:
                failed[piece.seq_id] = NOT_FINITE
            elif found:
                scored[piece.seq_id] = found
            if piece.sample and found is not None:
                sampling.append(piece)
                rows.append(row)
            row += piece.sample
        result = self.sample(logits[rows], sampling) if sampling else StepResult([])
        return replace(result, failed=failed | result.failed, prompt_logprobs=scored)

    def release(self, seq_id: int) -> None:
        self._counts.pop(seq_id, None)

    def _edit_logits(
        self, logits: torch.Tensor, slices: Sequence[SequenceSlice], finite: np.ndarray, failed: dict[int, str]
    ) -> torch.Tensor:
        """Apply bias, penalties, eos suppression and masks, on a copy if need be. Rows without a mask are `failed`."""
        edited = logits
        for row, piece in enumerate(slices):
            params = _require_params(piece)
            penalized, mask = params.penalized, piece.mask if finite[row] else None
            if not (penalized or params.logit_bias or piece.suppress_eos or mask is not None):
                continue
            if edited is logits:
                edited = logits.clone()
            if params.logit_bias:
                bias = {token: value for token, value in params.logit_bias.items() if token < logits.shape[1]}
                tokens = torch.tensor([*bias], dtype=torch.int64, device=logits.device)
                edited[row, tokens] += torch.tensor([*bias.values()], dtype=logits.dtype, device=logits.device)
            if penalized:
                _penalize_tokens(edited[row], self._count_tokens(piece), params)
            if piece.suppress_eos:
                vocab = logits.shape[1]
                stops = [token for token in piece.stop_ids if token < vocab]
                edited[row, torch.tensor(stops, dtype=torch.int64, device=logits.device)] = -torch.inf
            if isinstance(mask, str):
                failed[row] = mask
            elif mask is not None:
                bits = np.unpackbits(np.frombuffer(mask, np.uint8), count=logits.shape[1], bitorder="little")
                edited[row].masked_fill_(torch.from_numpy(bits == 0).to(logits.device), -torch.inf)
        return edited

    def _count_tokens(self, piece: SequenceSlice) -> _TokenCounts:
        """Count a slice's tokens, and at the sequence's first slice those before it."""
        if piece.start == len(piece.earlier_ids):
            self._counts[piece.seq_id] = _TokenCounts()
        counts = self._counts[piece.seq_id]
        counts.add(piece.earlier_ids, piece.prompt_len)
        assert counts.length == piece.start, "tokens of a penalized sequence were never told"
        counts.add(piece.token_ids, piece.prompt_len)
        return counts


def _score_targets(logits: torch.Tensor, piece: SequenceSlice) -> list[TokenLogprob] | None:
    """Compute log-probabilities of a slice's targets; None where logits are not finite."""
    if not piece.targets:
        return []
    _, peaks = _find_best(logits)
    if not np.isfinite(peaks).all():
        return None
    found, top = [], _require_params(piece).prompt_logprobs or 0
    for start in range(0, len(piece.targets), _ROWS_AT_ONCE):
        part = slice(start, start + _ROWS_AT_ONCE)
        found += _compute_logprobs(logits[part], peaks[part], piece.targets[part], [top] * len(piece.targets[part]))
    return found


class _TokenCounts:
    """Counts of a sequence's first `length` tokens: `outputs[i]` of `ids[i]`, 0 if only the prompt has it."""

    def __init__(self) -> None:
        self.ids, self.outputs, self.length = array("q"), array("f"), 0
        self._slots: dict[int, int] = {}

    def add(self, token_ids: Sequence[int], prompt_len: int) -> None:
        for position, token in enumerate(token_ids, self.length):
            slot = self._slots.setdefault(token, len(self.ids))
            if slot == len(self.ids):
                self.ids.append(token)
                self.outputs.append(0)
            self.outputs[slot] += position >= prompt_len
        self.length += len(token_ids)


def draw_uniform(seed: int, position: int) -> float:
    """Draw the uniform number in [0, 1) of an output position, by Philox4x64-10 (Salmon et al., SC 2011). The key is
    the sequence's seed and the counter the position + 1 (numpy steps it first); 53 bits of the first word."""
    return (int(Philox(key=seed & (2**64 - 1), counter=position).random_raw()) >> 11) * 2.0**-53


def _require_params(piece: SequenceSlice) -> SamplingParams:
    assert piece.params is not None, "a slice that samples or scores has parameters"
    return piece.params


def _is_filtered(params: SamplingParams, vocab: int) -> bool:
    return 0 < params.top_k < vocab or params.top_p < 1.0 or params.min_p > 0.0


def _select_rows(logits: torch.Tensor, rows: list[int]) -> torch.Tensor:
    return logits if len(rows) == logits.shape[0] else logits[rows]


def _find_best(logits: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    """Find the lowest index of each row's maximum (int64 [R]) and the maximum; a NaN counts as the maximum."""
    if logits.device.type == "cpu":  # numpy's argmax is an order of magnitude faster there
        array = logits.numpy()
        best = array.argmax(axis=-1)
        return best, array[np.arange(len(best)), best]
    index = logits.argmax(dim=-1, keepdim=True)
    both = torch.cat([index.double(), logits.gather(1, index).double()], dim=1).cpu().numpy()
    return both[:, 0].astype(np.int64), both[:, 1]


def _penalize_tokens(row: torch.Tensor, counts: _TokenCounts, params: SamplingParams) -> None:
    """Apply CTRL's repetition penalty (arXiv:1909.05858), then OpenAI's presence and frequency penalties. Finite logits
    stay finite, clamped to float32's range."""
    host_tokens, host_counts = np.frombuffer(counts.ids, np.int64), np.frombuffer(counts.outputs, np.float32)
    known = host_tokens < row.shape[0]
    tokens = torch.from_numpy(host_tokens[known]).to(row.device)
    outputs = torch.from_numpy(host_counts[known]).to(row.device)
    values = row[tokens]
    penalty = params.repetition_penalty
    edited = torch.where(values > 0, values / penalty, values * penalty)
    edited = edited - params.frequency_penalty * outputs - params.presence_penalty * (outputs > 0)
    limit = torch.finfo(row.dtype).max
    row[tokens] = torch.where(values.isfinite(), edited.clamp(-limit, limit), values)


def _compute_weights(logits: torch.Tensor, peaks: np.ndarray, temperatures: Sequence[float]) -> torch.Tensor:
    """Compute exp((logit - peak) / temperature), float64 [R, blocks, _BLOCK], zero beyond the vocabulary."""
    rows, vocab = logits.shape
    blocks = div_ceil(vocab, _BLOCK)
    weights = torch.zeros((rows, blocks * _BLOCK), dtype=torch.float64, device=logits.device)
    shifts, scales = torch.tensor(peaks, dtype=torch.float64), torch.tensor(temperatures, dtype=torch.float64)
    inside = weights[:, :vocab]
    if logits.device.type == "cpu":
        array = inside.numpy()
        np.subtract(logits.numpy(), shifts[:, None].numpy(), out=array)
        with np.errstate(over="ignore"):  # to -inf, at temperatures next to zero
            np.divide(array, scales[:, None].numpy(), out=array)
        np.exp(array, out=array)
    else:
        inside.copy_(logits)
        inside.sub_(shifts[:, None].to(logits.device)).div_(scales[:, None].to(logits.device)).exp_()
    return weights.view(rows, blocks, _BLOCK)


def _sum_blocks(weights: torch.Tensor) -> np.ndarray:
    sums: np.ndarray = weights.sum(dim=-1).cpu().numpy()
    return sums


def _pick_index(weights: np.ndarray, target: float) -> tuple[int, float]:
    """Find the index where the running sum of `weights` first exceeds `target`, and the part of target that remains
    there. Never an entry of weight zero, however the sums were rounded."""
    sums = np.cumsum(weights)
    index = min(np.searchsorted(sums, target, side="right"), np.searchsorted(sums, sums[-1], side="left"))
    return int(index), target - (float(sums[index - 1]) if index else 0.0)


def _draw_tokens(logits: torch.Tensor, peaks: np.ndarray, slices: Sequence[SequenceSlice]) -> list[int]:
    """Draw tokens of rows with temperature > 0, by inverting the cumulative distribution of what the filters leave."""
    vocab = logits.shape[1]
    params = [_require_params(piece) for piece in slices]
    numbers = [draw_uniform(piece.seed, piece.start + len(piece.token_ids) - piece.prompt_len) for piece in slices]
    tokens = [-1] * len(slices)

    masses: dict[int, np.ndarray] = {}  # per row: the weight of each block of its whole distribution
    whole = [
        r for r, p in enumerate(params) if not 0 < p.top_k < vocab and (p.top_p < 1.0 or not _is_filtered(p, vocab))
    ]
    if whole:
        weights = _compute_weights(_select_rows(logits, whole), peaks[whole], [params[r].temperature for r in whole])
        masses = dict(zip(whole, _sum_blocks(weights), strict=True))
        for i, r in enumerate(whole):
            if not _is_filtered(params[r], vocab):
                block, rest = _pick_index(masses[r], numbers[r] * float(np.cumsum(masses[r])[-1]))
                tokens[r] = block * _BLOCK + _pick_index(weights[i, block].cpu().numpy(), rest)[0]

    filtered = [r for r, token in enumerate(tokens) if token < 0]
    best = _find_candidates(_select_rows(logits, filtered), min(_CANDIDATES, vocab)) if filtered else []
    for r, (ids, values) in zip(filtered, best, strict=True):
        mass = float(masses[r].sum()) if r in masses else None
        kept = _filter_candidates(values, vocab, mass, params[r])
        for count in (16 * _CANDIDATES, vocab):
            if kept is None:
                [(ids, values)] = _find_candidates(logits[r : r + 1], min(count, vocab))
                kept = _filter_candidates(values, vocab, mass, params[r])
        assert kept is not None
        tokens[r] = int(ids[_pick_index(kept, numbers[r] * float(np.cumsum(kept)[-1]))[0]])
    return tokens


def _find_candidates(logits: torch.Tensor, count: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Find each row's ids and logits (float64) of at least its `count` best tokens, best first, then lower id first."""
    rows, vocab = logits.shape
    if count == vocab:
        values, ids = logits.sort(dim=-1, descending=True, stable=True)
        return list(zip(ids.cpu().numpy(), values.double().cpu().numpy(), strict=True))
    least = _bound_candidates(logits, count)
    row_ids, ids = (logits >= least).nonzero(as_tuple=True)
    host_values, host_ids = logits[row_ids, ids].double().cpu().numpy(), ids.cpu().numpy()
    bounds = np.searchsorted(row_ids.cpu().numpy(), np.arange(rows + 1))
    ordered = []
    for start, stop in zip(bounds[:-1], bounds[1:], strict=True):
        order = np.argsort(-host_values[start:stop], kind="stable")
        ordered.append((host_ids[start:stop][order], host_values[start:stop][order]))
    return ordered


def _bound_candidates(logits: torch.Tensor, count: int) -> torch.Tensor:
    """Find for each row a value that at least `count` logits reach, and usually few more do ([R, 1])."""
    rows, vocab = logits.shape
    groups = vocab // _GROUP
    if groups >= 2 * count:
        logits = logits[:, : groups * _GROUP].reshape(rows, groups, _GROUP).amax(dim=-1)
    return logits.topk(count, dim=-1).values[:, -1:]


def _filter_candidates(values: np.ndarray, vocab: int, mass: float | None, params: SamplingParams) -> np.ndarray | None:
    """Apply top-k, then top-p, then min-p to the leading candidates; None if more candidates are needed. `values` are
    the best logits in order; `mass` is the summed weight of the row, given for top-p without top-k. The smallest
    nucleus whose probability reaches top_p stays, and at least one candidate."""
    limit = min(params.top_k or vocab, vocab)
    with np.errstate(over="ignore"):
        weights = np.exp((values[:limit] - values[0]) / params.temperature)
    if limit < vocab:
        if len(weights) < limit:
            return None
        mass = float(np.cumsum(weights)[-1])
    keep = len(weights)
    if params.top_p < 1.0:
        assert mass is not None
        sums = np.cumsum(weights)
        keep = min(keep, 1 + int(np.searchsorted(sums, params.top_p * mass, side="left")))
    keep = min(keep, int(np.count_nonzero(weights >= params.min_p)))
    if keep == len(weights) < limit:
        return None
    kept: np.ndarray = weights[:keep]
    return kept


def _compute_logprobs(
    logits: torch.Tensor, peaks: np.ndarray, tokens: Sequence[int], tops: Sequence[int]
) -> list[TokenLogprob]:
    """Compute the log-softmax of the chosen token and of the `tops[r]` best ones per row, without impossible tokens."""
    sums = _sum_blocks(_compute_weights(logits, peaks, [1.0] * len(tokens)))
    chosen = logits[torch.arange(len(tokens)), torch.tensor(tokens)].double().cpu().numpy()
    best = _find_candidates(logits, min(max(tops), logits.shape[1])) if max(tops) else []
    results = []
    for r, token in enumerate(tokens):
        total = float(peaks[r]) + float(np.log(sums[r].sum()))
        pairs = zip(*best[r], strict=True) if best else ()
        top = tuple((int(i), float(v) - total) for i, v in pairs if np.isfinite(v))[: tops[r]]
        results.append(TokenLogprob(token, float(chosen[r]) - total, top))
    return results
