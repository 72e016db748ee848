"""NativeOps on whole random models: held to the torch operators, and logits of the same bits for a sequence however
it is cut, batched and laid out in pages."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from wicore_trt.backends.torch import native_ops
from wicore_trt.backends.torch.native import NativeLibrary
from wicore_trt.backends.torch.native_ops import NativeOps, NativeWeights, explain_unsupported, rope_table
from wicore_trt.backends.torch.ops import TorchModel, TorchOps
from wicore_trt.backends.torch.weights import fuse_weights
from wicore_trt.checkpoint.names import Role, unified_tensors, weight_scale_name
from wicore_trt.model.gemma3 import forward, layer_weight
from wicore_trt.model.spec import Gemma3Spec
from wicore_trt.runtime.attention_mass import AttentionProbe
from wicore_trt.runtime.batch import SequenceSlice, StepBatch
from wicore_trt.runtime.dtypes import E4M3, E4M3_MAX, TORCH_DTYPES
from wicore_trt.runtime.executor import KVLayout
from wicore_trt.runtime.step_inputs import StepInputs

ENGINES = ["float32", "bfloat16", "float16", "fp8"]
PAGE_TOKENS, PAGES = 8, 64
TOLERANCE = {"float32": 1e-4, "bfloat16": 4e-2, "float16": 6e-3, "fp8": 1.5e-1}  # of the largest logit


def tiny_spec(*, tied: bool = True, softcap: float | None = None) -> Gemma3Spec:
    return Gemma3Spec(
        vocab_size=131, hidden_size=72, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=32,
        intermediate_size=100, query_pre_attn_scalar=24.0, rms_norm_eps=1e-6, rope_theta=1e6, rope_local_theta=1e4,
        rope_scaling_factor=8.0, sliding_window=11, layer_groups=("local", "global", "local"),
        max_position_embeddings=4096, tie_word_embeddings=tied, final_logit_softcapping=softcap,
    )  # fmt: skip


def random_tensors(spec: Gemma3Spec, engine: str, rng: torch.Generator) -> dict[str, torch.Tensor]:
    """Tensors of an engine's file: gate and up apart, FP8 scales beside their matrices, no head when it is tied."""
    tensors: dict[str, torch.Tensor] = {}
    dtype = TORCH_DTYPES["bfloat16" if engine == "fp8" else engine]
    for t in unified_tensors(spec):
        value = torch.randn(t.shape, generator=rng)
        if t.role is Role.NORM:
            tensors[t.name] = 1 + value / 4
        elif t.role is Role.LINEAR and engine == "fp8":
            value = value / t.shape[1] ** 0.5
            scale = value.abs().amax(1) / E4M3_MAX
            tensors[t.name] = (value / scale[:, None]).to(E4M3)
            tensors[weight_scale_name(t.name)] = scale
        elif t.role is not Role.HEAD or not spec.tie_word_embeddings:
            tensors[t.name] = (value / t.shape[1] ** 0.5).to(dtype)
    return tensors


class Engine:
    """A random model of one dtype, on fresh pools for the native and for the torch operators."""

    def __init__(self, lib: NativeLibrary, spec: Gemma3Spec, engine: str, rng: torch.Generator) -> None:
        self.spec, self.rng = spec, rng
        dtype = "bfloat16" if engine == "fp8" else engine
        tensors = fuse_weights(random_tensors(spec, engine, rng), spec)
        self.layout = KVLayout(PAGE_TOKENS, dtype, {"global": PAGES, "local": PAGES}, {})
        self.pools = {g: self.new_pool(g) for g in self.layout.num_pages}
        weights = NativeWeights.from_tensors(lib, tensors, spec, dtype)
        self.of_native = lib, weights, spec, dtype, self.layout, self.pools
        self.native = NativeOps(*self.of_native)
        torch_pools = {g: self.new_pool(g) for g in self.pools}
        self.model = TorchModel(spec, dtype, tensors, torch_pools, torch.device("cpu"))

    def new_pool(self, group: str) -> torch.Tensor:
        spec = self.spec
        shape = (PAGES, len(spec.layers_of(group)), 2, PAGE_TOKENS, spec.num_kv_heads, spec.head_dim)
        return torch.full(shape, torch.nan, dtype=TORCH_DTYPES[self.layout.kv_dtype])

    def prompt(self, length: int) -> list[int]:
        return torch.randint(0, self.spec.vocab_size, (length,), generator=self.rng).tolist()

    def inputs(self, slices: list[SequenceSlice]) -> StepInputs:
        return StepInputs.from_batch(StepBatch(slices), self.layout, ("global", "local"))

    def run(self, slices: list[SequenceSlice]) -> torch.Tensor:
        return self.native.compute_logits(self.inputs(slices)).clone()

    def oracle(self, slices: list[SequenceSlice]) -> torch.Tensor:
        return forward(TorchOps(self.model, self.inputs(slices)), self.spec)


def piece(tokens: list[int], pages: list[int], start: int = 0, *, sample: bool = True) -> SequenceSlice:
    return SequenceSlice(0, tokens, start, {"global": pages, "local": pages}, sample)


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tied", [True, False])
def test_logits_are_those_of_the_torch_operators(
    lib: NativeLibrary, rng: torch.Generator, engine: str, tied: bool
) -> None:
    model = Engine(lib, tiny_spec(tied=tied, softcap=None if tied else 2.0), engine, rng)
    slots = torch.randperm(PAGES, generator=rng).tolist()
    for start in (0, 17):
        slices = [piece(model.prompt(17), slots[:8], start), piece(model.prompt(17), slots[8:16], start)]
        expected = model.oracle(slices)
        difference = (model.run(slices) - expected).abs().max()
        assert difference <= TOLERANCE[engine] * expected.abs().max()


@pytest.mark.parametrize("engine", ENGINES)
def test_a_sequence_has_the_same_bits_in_any_batch(lib: NativeLibrary, rng: torch.Generator, engine: str) -> None:
    model = Engine(lib, tiny_spec(), engine, rng)
    prompts = [model.prompt(n) for n in (1, 9, 40)]
    alone = [model.run([piece(p, list(range(8)))]) for p in prompts]
    for threads in (1, 2):
        lib.set_threads(threads)
        slots = torch.randperm(PAGES, generator=rng).tolist()
        pages = [slots[8 * i : 8 * i + 8] for i in range(3)]
        order = torch.randperm(3, generator=rng).tolist()
        together = model.run([piece(prompts[i], pages[i]) for i in order])
        assert torch.equal(together, torch.cat([alone[i] for i in order]))
        # The same prompts in chunks, other tokens beside them, the last token as a decode step.
        for chunk in (1, 7, 39):
            for start in range(0, 40, chunk):
                end = min(start + chunk, 40)
                company = piece(model.prompt(3), pages[0])
                logits = model.run([company, piece(prompts[2][start:end], pages[2], start)])
            assert torch.equal(logits[1:], alone[2])


def test_a_step_runs_the_last_ones_operators_again_only_where_they_are_its_own(
    lib: NativeLibrary, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = Engine(lib, tiny_spec(softcap=2.0), "bfloat16", rng)
    recorded = list[Any]()

    def record(*given: Any) -> torch.Tensor:
        recorded.append(given)
        return forward(*given)

    monkeypatch.setattr(native_ops, "forward", record)
    monkeypatch.setattr(native_ops, "ROPE_BLOCK", 16)
    features, image = torch.randn(1, 1, 72, generator=rng), ((1, 1, 0),)

    def pair(start: int, count: int = 1, sampled: str = "ab", slots: tuple[int, int] = (0, 4)) -> list[SequenceSlice]:
        return [
            piece(model.prompt(count), list(range(slot, slot + 4)), start, sample=name in sampled)
            for name, slot in zip("ab", slots, strict=True)
        ]

    steps = [
        (pair(0, 9), False, (), True), (pair(9), False, (), True), (pair(10), False, (), False),
        (pair(11), True, (), True), (pair(11), False, (), True), (pair(11, slots=(4, 0)), False, (), False),
        (pair(12), False, image, True), (pair(12), False, (), True), (pair(12), False, (), False),
        (pair(13, 1, "a"), False, (), True), (pair(14, 1, "b"), False, (), False), (pair(13), False, (), True),
        (pair(13)[:1], False, (), True), (pair(15)[1:], False, (), False), (pair(16)[1:], False, (), True),
        (pair(17)[1:], False, (), False),
    ]  # fmt: skip
    for number, (slices, probed, images, anew) in enumerate(steps):
        inputs = replace(model.inputs(slices), images=images)
        probes = [AttentionProbe(1, torch.arange(2)) if probed else None for _ in range(2)]
        before = len(recorded)
        logits = model.native.compute_logits(inputs, probes[0], features).clone()
        assert len(recorded) - before == anew, number
        assert torch.equal(logits, NativeOps(*model.of_native).compute_logits(inputs, probes[1], features)), number
        queries = [probe.queries for probe in probes if probe and probe.queries is not None]
        assert len(queries) == 2 * probed
        assert not probed or torch.equal(*queries)


def test_a_step_that_lacked_memory_for_rotary_tables_makes_them_when_it_runs_again(
    lib: NativeLibrary, rng: torch.Generator, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lack(*given: Any) -> Any:
        raise MemoryError

    model = Engine(lib, tiny_spec(), "bfloat16", rng)
    monkeypatch.setattr(native_ops, "ROPE_BLOCK", 8)
    model.run([piece(model.prompt(7), [0, 1])])
    for _ in range(2):
        model.run([piece(model.prompt(1), [0, 1], 7)])
    step = [piece(model.prompt(1), [0, 1], 8)]
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(native_ops, "rope_table", lack)
        model.run(step)
    assert torch.equal(model.run(step), NativeOps(*model.of_native).compute_logits(model.inputs(step)))


def test_a_step_that_samples_nothing_has_no_logits(lib: NativeLibrary, rng: torch.Generator) -> None:
    model = Engine(lib, tiny_spec(), "bfloat16", rng)
    assert model.run([piece(model.prompt(5), [0], sample=False)]).shape == (0, 131)


def test_steady_state_keeps_its_buffers(lib: NativeLibrary, rng: torch.Generator) -> None:
    model = Engine(lib, tiny_spec(), "bfloat16", rng)
    model.run([piece(model.prompt(20), [0, 1, 2])])
    buffers = {name: b.data_ptr() for name, b in model.native._buffers.items()}
    for position in range(20, 24):
        model.run([piece(model.prompt(1), [0, 1, 2], position)])
    assert {name: b.data_ptr() for name, b in model.native._buffers.items()} == buffers


def test_packed_weights_take_the_memory_of_the_weights(lib: NativeLibrary, rng: torch.Generator) -> None:
    spec = tiny_spec()
    tensors = fuse_weights(random_tensors(spec, "bfloat16", rng), spec)
    weights = NativeWeights.from_tensors(lib, tensors, spec, "bfloat16")
    matrices = (192 * 72) + 3 * (256 * 72 + 128 * 128 + 256 * 72 + 128 * 100)  # rows padded to 64
    unique = {packed.data.data_ptr(): packed.data.nbytes for packed in weights.packed.values()}
    assert sum(unique.values()) == 2 * matrices
    assert sum(norm.nbytes for norm in weights.norms.values()) == 4 * (3 * (4 * 72 + 2 * 32) + 72)


def test_rope_table_does_not_depend_on_its_length() -> None:
    spec = tiny_spec()
    for group in ("global", "local"):
        long, short = (rope_table(spec.layer_group(group), length) for length in (700, 33))
        assert all(torch.equal(a[:33], b) for a, b in zip(long, short, strict=True))


def test_what_the_kernels_do_not_cover_is_named() -> None:
    spec = tiny_spec()
    assert explain_unsupported(spec, "bfloat16", ["lm_head.weight"]) is None
    assert "KV" in (explain_unsupported(spec, "fp8", []) or "")
    names = [layer_weight(0, "mlp.proj"), "transformer.layers.0.mlp.proj.activation_scaling_factor"]
    assert "static" in (explain_unsupported(spec, "bfloat16", names) or "")
