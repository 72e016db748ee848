"""The TensorRT networks that are built reproduce transformers' logits: evaluated on the CPU, layer by layer."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from parity.fp8 import fp8_model
from parity.paged import relative_error
from parity.tiny import TinyModel, cast, overflowing_model, tiny_model
from plan_driver import PlanDriver, Slot

from wicore_trt.backends.tensorrt import ops as lower_tensorrt
from wicore_trt.backends.tensorrt.plan_io import PlanLimits

LIMITS = PlanLimits(max_batch=3, max_chunk=24, max_context=160)
# of the largest logit; the bound of a dtype is a few times its unit roundoff, for a few layers
BOUNDS = {"float32": 2e-5, "float16": 1e-2, "bfloat16": 0.12}


def schedule(driver: PlanDriver, prompts: list[list[int]], seed: int) -> list[tuple[int, int, torch.Tensor]]:
    """Prompts by random chunks, interleaved with joint decode steps: (sequence, position, logits [vocab])."""
    rng = random.Random(seed)
    slots: list[Slot] = [driver.new_slot() for _ in prompts]
    found = []
    while any(slot.tokens < len(prompt) for slot, prompt in zip(slots, prompts, strict=True)):
        ready = [i for i, slot in enumerate(slots) if slot.tokens < len(prompts[i])]
        if rng.random() < 0.5:
            i = rng.choice(ready)
            chunk = prompts[i][slots[i].tokens :][: rng.randint(1, driver.limits.max_chunk)]
            found.append((i, slots[i].tokens + len(chunk) - 1, driver.prefill(slots[i], chunk)))
            continue
        active = [i for i in ready if rng.random() < 0.7] or ready[:1]
        tokens = [prompts[i][slots[i].tokens] if i in active else None for i in range(len(slots))]
        logits = driver.decode(slots, tokens)
        found += [(i, slots[i].tokens - 1, logits[row]) for row, i in enumerate(active)]
    return found


def prompts_of(model: TinyModel, seed: int, count: int = 3, longest: int = 90) -> list[list[int]]:
    rng = random.Random(seed)
    lengths = [longest, *(rng.randint(1, longest) for _ in range(count - 1))]
    return [[rng.randrange(model.spec.vocab_size) for _ in range(n)] for n in lengths]


def compare(model: TinyModel, driver: PlanDriver, seed: int) -> tuple[float, float]:
    """Logits of a random schedule against transformers' whole-sequence pass: the largest relative error of a
    position, and the error of all of them together in the root mean square."""
    prompts = prompts_of(model, seed)
    expected = [model.hf_logits(prompt) for prompt in prompts]
    found = schedule(driver, prompts, seed)
    ours, theirs = torch.stack([f[2] for f in found]), torch.stack([expected[i][at] for i, at, _ in found])
    worst = max(relative_error(a, b) for a, b in zip(ours, theirs, strict=True))
    return worst, float((ours - theirs).norm() / theirs.norm())


@pytest.mark.parametrize("dtype", list(BOUNDS))
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
def test_networks_reproduce_transformers(seed: int, dtype: str, tmp_path: Path) -> None:
    """Sliding windows, both groups, several slots, idle slots, chunks of any size, caches carried through."""
    model = tiny_model(seed)
    tensors = cast(model.spec, model.tensors, getattr(torch, dtype))
    driver = PlanDriver(model.spec, tensors, tmp_path, LIMITS, dtype=dtype)
    assert compare(model, driver, seed)[0] < BOUNDS[dtype]


def test_decode_with_a_long_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Query heads as rows of their KV head, as contexts beyond what the decode kernel takes have it."""
    monkeypatch.setattr(lower_tensorrt, "DIRECT_ENTRIES", LIMITS.max_context)
    model = tiny_model(6, num_attention_heads=4, num_key_value_heads=2)
    driver = PlanDriver(model.spec, model.tensors, tmp_path, LIMITS, dtype="float32")
    assert compare(model, driver, 6)[0] < BOUNDS["float32"]


@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(1, 4))])
def test_fp8_follows_its_definition(seed: int, tmp_path: Path) -> None:
    """transformers with the definition of an FP8 product in place of its linears; float32 between the products, because
    with 16 bits there E4M3 values flip to their neighbours and nothing sharp can be said."""
    model, tensors = fp8_model(seed)
    driver = PlanDriver(model.spec, tensors, tmp_path, LIMITS, dtype="float32")
    worst, rms = compare(model, driver, seed)
    assert worst < 0.1 and rms < 0.01


@pytest.mark.parametrize("where", ["residual", pytest.param("mlp", marks=pytest.mark.long)])
def test_float16_survives_values_beyond_its_range(where: str, tmp_path: Path) -> None:
    model = overflowing_model(where)
    driver = PlanDriver(model.spec, cast(model.spec, model.tensors, torch.float16), tmp_path, LIMITS, dtype="float16")
    assert compare(model, driver, 3)[0] < BOUNDS["float16"]


def test_fp8_cache_holds_values_that_pages_can_hold(tmp_path: Path) -> None:
    """Whatever enters a cache is an E4M3 value times the layer's scale, so a page in FP8 loses nothing."""
    model = tiny_model(2)
    scales = {f"transformer.layers.{i}.attention.kv_cache_scaling_factor": 0.01 + 0.003 * i for i in range(99)}
    tensors = dict(model.tensors) | {
        n: torch.tensor([s]) for n, s in scales.items() if int(n.split(".")[2]) < model.spec.num_layers
    }
    driver = PlanDriver(model.spec, tensors, tmp_path, LIMITS, dtype="float32", kv_dtype="fp8")
    slot = driver.new_slot()
    driver.prefill(slot, prompts_of(model, 2)[0][:20])
    for name, cache in slot.caches.items():
        scale = scales[f"transformer.layers.{name.split('.')[2]}.attention.kv_cache_scaling_factor"]
        written = cache[:, :20]
        again = (written / scale).to(torch.float8_e4m3fn).float() * scale
        assert written.isfinite().all() and torch.equal(again, written), name
