"""Layer groups of unlike sizes: pages, pools and the torch and native operators take each group's own."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch.nn import functional as F

from tests.parity.paged import PagedDriver, relative_error
from wicore_trt.backends.torch import native
from wicore_trt.backends.torch.executor import TorchExecutor
from wicore_trt.checkpoint.names import Role, unified_tensors
from wicore_trt.model.gemma3 import EMBEDDING, FINAL_NORM, layer_weight
from wicore_trt.model.spec import GLOBAL, LOCAL, Gemma3Spec, LayerGroup
from wicore_trt.runtime.options import ExecutorOptions
from wicore_trt.runtime.pools import make_pools, plan_layout

PAGE = 4


class UnlikeSpec(Gemma3Spec):
    """Global layers have another head size and other KV heads than local ones."""

    def layer_group(self, name: str) -> LayerGroup:
        group = super().layer_group(name)
        return replace(group, head_dim=48, num_kv_heads=1, softmax_scale=0.2) if name == GLOBAL else group


SPEC = UnlikeSpec(
    vocab_size=97, hidden_size=24, num_layers=5, num_heads=4, num_kv_heads=2, head_dim=16, intermediate_size=40,
    query_pre_attn_scalar=20.0, rms_norm_eps=1e-6, rope_theta=1e6, rope_local_theta=1e4, rope_scaling_factor=8.0,
    sliding_window=6, layer_groups=(LOCAL, GLOBAL, LOCAL, LOCAL, GLOBAL), max_position_embeddings=256,
    tie_word_embeddings=True,
)  # fmt: skip


def test_pages_and_pools_have_the_sizes_of_their_group() -> None:
    settings = ExecutorOptions(kv_bytes=1 << 20, max_batch_tokens=64)
    layout = plan_layout(SPEC, "bfloat16", PAGE, 64, settings)
    assert layout.page_bytes == {GLOBAL: 2 * 2 * PAGE * 48 * 2, LOCAL: 3 * 2 * PAGE * 32 * 2}
    assert layout.slab_pages is not None and layout.memory_bytes <= 1 << 20
    assert len({layout.slab_pages[g] * layout.page_bytes[g] for g in layout.page_bytes}) == 1
    pools = make_pools(SPEC, layout, lambda shape, dtype: torch.empty(shape, dtype=dtype))
    assert pools[GLOBAL].shape[1:] == (2, 2, PAGE, 1, 48) and pools[LOCAL].shape[1:] == (3, 2, PAGE, 2, 16)
    assert all(pool[0].nbytes == layout.page_bytes[group] for group, pool in pools.items())
    assert pools[GLOBAL].data_ptr() == pools[LOCAL].data_ptr()


def random_tensors(generator: torch.Generator) -> dict[str, torch.Tensor]:
    found = {}
    for tensor in unified_tensors(SPEC):
        if tensor.role is not Role.HEAD:
            deviation = 0.4 if tensor.role is Role.NORM else 1.5 * tensor.shape[-1] ** -0.5
            found[tensor.name] = deviation * torch.randn(tensor.shape, generator=generator)
            found[tensor.name] += tensor.role is Role.NORM
    return found


def dense_logits(tensors: dict[str, torch.Tensor], ids: list[int]) -> torch.Tensor:
    """Logits [len(ids), vocab] by the definition, without pages, batches or fused operators."""

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return F.rms_norm(x, x.shape[-1:], tensors[name], SPEC.rms_norm_eps)

    n, at = len(ids), torch.arange(len(ids))
    x = tensors[EMBEDDING][ids] * SPEC.hidden_size**0.5
    for i, name in enumerate(SPEC.layer_groups):
        heads, dim, scale, window, theta, factor = (
            (1, 48, 0.2, n, 1e6, 8.0) if name == GLOBAL else (2, 16, 20.0**-0.5, 6, 1e4, 1.0)
        )
        qkv = norm(x, layer_weight(i, "input_layernorm")) @ tensors[layer_weight(i, "attention.qkv")].T
        q, k, v = (t.view(n, -1, dim) for t in qkv.split([4 * dim, heads * dim, heads * dim], 1))
        q = norm(q, layer_weight(i, "attention.q_layernorm"))
        k = norm(k, layer_weight(i, "attention.k_layernorm"))
        angles = at[:, None] / factor * theta ** -(torch.arange(0, dim, 2) / dim)
        turn = torch.polar(torch.ones_like(angles), angles)[:, None]
        q, k = (
            torch.cat(((z := torch.complex(*t.chunk(2, -1)) * turn).real, z.imag), -1).transpose(0, 1) for t in (q, k)
        )
        k, v = (t.repeat_interleave(4 // heads, 0) for t in (k, v.transpose(0, 1)))
        behind = at[:, None] - at
        scores = (q @ k.mT * scale).masked_fill((behind < 0) | (behind >= window), -math.inf)
        attended = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1) @ tensors[layer_weight(i, "attention.dense")].T
        x = x + norm(attended, layer_weight(i, "post_layernorm"))
        y = norm(x, layer_weight(i, "pre_feedforward_layernorm"))
        gate, up = (y @ tensors[layer_weight(i, f"mlp.{part}")].T for part in ("fc", "gate"))
        down = (F.gelu(gate, approximate="tanh") * up) @ tensors[layer_weight(i, "mlp.proj")].T
        x = x + norm(down, layer_weight(i, "post_feedforward_layernorm"))
    return norm(x, FINAL_NORM) @ tensors[EMBEDDING].T


@pytest.mark.parametrize("kernels", ["torch", "native"])
def test_operators_compute_with_the_sizes_of_each_group(kernels: str) -> None:
    if kernels == "native" and native.load_library() is None:
        pytest.skip("the native CPU kernels are not built here")
    tensors = random_tensors(torch.Generator().manual_seed(5))
    settings = ExecutorOptions(device="cpu", kernels=kernels, page_tokens=PAGE, kv_bytes=1 << 20, max_context=64)
    driver = PagedDriver(TorchExecutor.from_tensors(SPEC, "float32", tensors, settings))
    ids = torch.randint(SPEC.vocab_size, (40,), generator=torch.Generator().manual_seed(6)).tolist()
    wanted = dense_logits(tensors, ids)
    first, second = driver.new_sequence(), driver.new_sequence()
    assert relative_error(driver.step([(first, ids[:11])])[0], wanted[10]) < 1e-4
    logits = driver.step([(second, ids[:3]), (first, ids[11:30])])
    assert relative_error(logits, wanted[[2, 29]]) < 1e-4
    for position in range(30, 40):
        assert relative_error(driver.step([(first, [ids[position]])])[0], wanted[position]) < 1e-4
