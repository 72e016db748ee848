"""Attention, rotary embedding and cache updates against torch; then all three over the steps of a small decoder."""

from __future__ import annotations

import pytest
import torch
from network_evaluator import Evaluator
from small_network import FLOATS, SmallNetwork, trt
from torch.nn.functional import scaled_dot_product_attention

Tensor = torch.Tensor
SOFTMAX, KINDS = trt.AttentionNormalizationOp.SOFTMAX, trt.CausalMaskKind
NAN = float("nan")

pytestmark = pytest.mark.long


@pytest.fixture
def net() -> SmallNetwork:
    return SmallNetwork()


def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape).to(dtype)


def reference(q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None = None) -> Tensor:
    """float64, unscaled; `visible` is bool or added."""
    q, k, v = q.double(), k.double(), v.double()
    mask = visible if visible is None or visible.dtype == torch.bool else visible.double()
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=1.0, enable_gqa=True)


def close(actual: Tensor, expected: Tensor) -> None:
    eps = torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual.double(), expected, rtol=0.51 * eps + 1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("kind", ["NONE", "UPPER_LEFT", "LOWER_RIGHT"])
def test_attention_without_lengths(net: SmallNetwork, dtype: torch.dtype, kind: str) -> None:
    q, k, v = (random(2, h, s, 16, dtype=dtype) for h, s in ((6, 5), (2, 9), (2, 9)))
    tensors = [net.input(n, t) for n, t in (("q", q), ("k", k), ("v", v))]
    net.output("y", net.network.add_attention_v2(*tensors, SOFTMAX, getattr(KINDS, kind)))
    i, j = torch.arange(5)[:, None], torch.arange(9)
    visible = {"NONE": None, "UPPER_LEFT": j <= i, "LOWER_RIGHT": j <= i + 4}[kind]
    close(net.evaluate()["y"], reference(q, k, v, visible))


@pytest.mark.parametrize("shape", [(2, 6, 5, 9), (1, 1, 5, 9), (2, 1, 1, 9)])
@pytest.mark.parametrize("kind", ["bool", "added"])
def test_attention_with_a_mask(net: SmallNetwork, shape: tuple[int, ...], kind: str) -> None:
    q, k, v = random(2, 6, 5, 16), random(2, 3, 9, 16), random(2, 3, 9, 16)
    mask = torch.randn(shape) * 2 if kind == "added" else torch.rand(shape) < 0.6
    if kind == "bool":
        mask[..., 0] = True
    layer = net.network.add_attention_v2(
        *(net.input(n, t) for n, t in (("q", q), ("k", k), ("v", v))), SOFTMAX, KINDS.NONE
    )
    layer.mask = net.input("mask", mask)
    net.output("y", layer)
    close(net.evaluate()["y"], reference(q, k, v, mask.expand(2, 6, 5, 9)))


@pytest.mark.parametrize("masked", [False, True])
def test_key_value_lengths(net: SmallNetwork, masked: bool) -> None:
    """Entries beyond a length are not read, and LOWER_RIGHT counts from the length, per batch entry."""
    q, k, v = random(3, 4, 2, 8), random(3, 2, 7, 8), random(3, 2, 7, 8)
    lengths = torch.tensor([7, 3, 2], dtype=torch.int32)
    mask = torch.rand(3, 1, 2, 7) < 0.5
    mask[..., 1] = True
    for b, n in enumerate(lengths.tolist()):
        k[b, :, n:] = v[b, :, n:] = NAN
    tensors = [net.input(n, t) for n, t in (("q", q), ("k", k), ("v", v))]
    layer = net.network.add_attention_v2(*tensors, SOFTMAX, KINDS.NONE if masked else KINDS.LOWER_RIGHT)
    layer.key_value_lengths = net.input("lengths", lengths)
    if masked:
        layer.mask = net.input("mask", mask)
    net.output("y", layer)
    y = net.evaluate()["y"]
    for b, n in enumerate(lengths.tolist()):
        causal = torch.arange(n) <= torch.arange(2)[:, None] + n - 2
        visible = mask[b, :, :, :n] if masked else causal
        close(y[b], reference(q[b], k[b, :, :n], v[b, :, :n], visible))


@pytest.mark.parametrize("length", [-1, 5])
def test_a_length_beyond_the_cache_is_refused(net: SmallNetwork, length: int) -> None:
    x = net.input("x", random(1, 2, 4, 8))
    layer = net.network.add_attention_v2(x, x, x, SOFTMAX, KINDS.NONE)
    layer.key_value_lengths = net.input("lengths", torch.tensor([length], dtype=torch.int32))
    net.output("y", layer)
    with pytest.raises(AssertionError, match="lengths"):
        net.evaluate()


def test_a_query_that_sees_nothing_is_nan(net: SmallNetwork) -> None:
    q, k = random(2, 2, 3, 8), random(2, 2, 4, 8)
    tensors = [net.input(n, t) for n, t in (("q", q), ("k", k), ("v", k))]
    layer = net.network.add_attention_v2(*tensors, SOFTMAX, KINDS.LOWER_RIGHT)
    layer.key_value_lengths = net.input("lengths", torch.tensor([0, 2], dtype=torch.int32))
    net.output("y", layer)
    masked = net.network.add_attention_v2(*tensors, SOFTMAX, KINDS.NONE)
    masked.mask = net.input("mask", torch.tensor([[[True], [False], [True]]]).expand(1, 1, 3, 4).contiguous())
    net.output("masked", masked)
    results = net.evaluate()
    y = results["y"]
    assert y[0].isnan().all() and y[1, :, 0].isnan().all() and y[1, :, 1:].isfinite().all()
    assert results["masked"].isnan().all(-1).all(0).all(0).tolist() == [False, True, False]
    assert results["masked"][:, :, ::2].isfinite().all()


def test_a_masked_entry_that_holds_nan_shows(net: SmallNetwork) -> None:
    q, k = random(1, 1, 1, 8), random(1, 1, 3, 8)
    k[:, :, 1] = NAN
    layer = net.network.add_attention_v2(
        net.input("q", q), net.input("k", k.nan_to_num()), net.input("v", k), SOFTMAX, KINDS.NONE
    )
    layer.mask = net.input("mask", torch.tensor([[[[True, False, True]]]]))
    net.output("y", layer)
    assert net.evaluate()["y"].isnan().all()


@pytest.mark.parametrize("attribute", ["norm_op", "form", "ranks"])
def test_other_attentions_are_refused(net: SmallNetwork, attribute: str) -> None:
    packed = attribute == "form"
    x = net.input("x", random(3, 2, 8) if packed else random(1, 2, 3, 8))
    none = trt.AttentionNormalizationOp.NONE
    layer = net.network.add_attention_v2(x, x, x, none if attribute == "norm_op" else SOFTMAX, KINDS.NONE)
    if packed:
        layer.query_form = layer.key_value_form = trt.AttentionIOForm.PACKED_NHD
        layer.query_lengths = layer.key_value_lengths = net.input("n", torch.tensor([0, 3], dtype=torch.int32))
    if attribute == "ranks":
        layer.num_ranks = 2
    net.output("y", layer)
    with pytest.raises(NotImplementedError):
        net.evaluate()


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [16, 8])
@pytest.mark.parametrize("by_position", [False, True])
def test_rotary_embedding(
    net: SmallNetwork, dtype: torch.dtype, interleaved: bool, rotated: int, by_position: bool
) -> None:
    """Against the product of complex numbers."""
    x, angles = random(2, 3, 5, 16, dtype=dtype), torch.rand(11, rotated // 2) * 6
    positions = torch.randint(0, 11, (2, 5)).int()
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    at = positions.long()
    tables = (cos, sin) if by_position else (cos[at], sin[at])
    tensors = [net.input(n, t) for n, t in zip(("x", "cos", "sin"), (x, *tables), strict=True)]
    layer = net.network.add_rotary_embedding(*tensors, interleaved, rotated)
    if by_position:
        layer.set_input(3, net.input("positions", positions))
    net.output("y", layer)
    part = x[..., :rotated].double()
    shape = (*part.shape[:-1], rotated // 2, 2)
    pairs = part.reshape(shape) if interleaved else torch.stack(part.chunk(2, -1), -1)
    turned = torch.complex(pairs[..., 0], pairs[..., 1]) * torch.complex(cos.double(), sin.double())[at][:, None]
    both = torch.view_as_real(turned)
    expected = torch.cat([both.flatten(-2) if interleaved else both.mT.flatten(-2), x[..., rotated:].double()], -1)
    close(net.evaluate()["y"], expected)


def test_a_position_beyond_the_table_is_refused(net: SmallNetwork) -> None:
    x, table = random(1, 1, 1, 8), net.input("table", torch.ones(4, 4))
    layer = net.network.add_rotary_embedding(net.input("x", x), table, table, False, 0)
    layer.set_input(3, net.input("positions", torch.tensor([[4]], dtype=torch.int32)))
    net.output("y", layer)
    with pytest.raises(IndexError):
        net.evaluate()


@pytest.mark.parametrize("first", [[0, 3], [5, 1], [-1, 0], [0, 6]])
def test_kv_cache_update(net: SmallNetwork, first: list[int]) -> None:
    cache, update = random(2, 3, 8, 4), random(2, 3, 3, 4)
    tensors = [net.input(n, t) for n, t in (("cache", cache), ("update", update))]
    at = net.input("at", torch.tensor(first, dtype=torch.int32))
    net.output("y", net.network.add_kv_cache_update(*tensors, at, trt.KVCacheMode.LINEAR))
    if not all(0 <= n <= 5 for n in first):
        with pytest.raises(IndexError):
            net.evaluate()
        return
    before, expected = cache.clone(), cache.clone()
    for b, n in enumerate(first):
        expected[b, :, n : n + 3] = update[b]
    assert torch.equal(net.evaluate()["y"], expected)
    assert torch.equal(cache, before), "the caller's cache changed"


def decoder(net: SmallNetwork) -> Evaluator:
    """q, k, v of the new tokens -> caches with them, and the tokens' attention. B slots, T tokens each."""
    dtype = torch.float32
    q = net.dynamic_input("q", (-1, 4, -1, 8), dtype)
    new = {n: net.dynamic_input(n, (-1, 2, -1, 8), dtype) for n in ("k", "v")}
    at, lengths = (net.dynamic_input(n, (-1,), torch.int32) for n in ("at", "lengths"))
    caches = []
    for name, update in new.items():
        cache = net.dynamic_input("cache_" + name, (-1, 2, 12, 8), dtype)
        caches.append(net.network.add_kv_cache_update(cache, update, at, trt.KVCacheMode.LINEAR))
    layer = net.network.add_attention_v2(q, *(c.get_output(0) for c in caches), SOFTMAX, KINDS.LOWER_RIGHT)
    layer.key_value_lengths = lengths
    net.output("y", layer)
    for name, updated in zip(new, caches, strict=True):
        net.output(f"cache_{name}_out", updated)
    return Evaluator(net.network)


def test_steps_of_a_decoder_equal_one_full_attention(net: SmallNetwork) -> None:
    """Two slots at different positions: chunks of 4, 1 and 2 tokens behind 0 and 3 tokens already there."""
    step, chunks, before = decoder(net), (4, 1, 2), (0, 3)
    total = sum(chunks) + max(before)
    q, k, v = random(2, 4, total, 8), random(2, 2, total, 8), random(2, 2, total, 8)
    caches = {n: torch.full((2, 2, 12, 8), NAN) for n in ("cache_k", "cache_v")}
    caches["cache_k"][1, :, :3], caches["cache_v"][1, :, :3] = k[1, :, :3], v[1, :, :3]
    done = torch.tensor(before, dtype=torch.int32)
    out: list[list[Tensor]] = [[], []]
    for tokens in chunks:
        parts = {
            name: torch.stack([t[b, :, n : n + tokens] for b, n in enumerate(done.tolist())])
            for name, t in (("q", q), ("k", k), ("v", v))
        }
        results = step.evaluate(parts | caches | {"at": done, "lengths": done + tokens})
        caches = {n: results[n + "_out"] for n in caches}
        done = done + tokens
        for b in range(2):
            out[b].append(results["y"][b])
    for b, end in enumerate(done.tolist()):
        causal = torch.ones(end, end, dtype=torch.bool).tril()
        expected = reference(q[b, :, :end], k[b, :, :end], v[b, :, :end], causal)
        close(torch.cat(out[b], 1), expected[:, before[b] :])
