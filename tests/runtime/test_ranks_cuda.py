"""Engines of two and four ranks on GPUs: the tokens of one GPU, in any company, through all tiers, and no rank left.

pytest -q -s tests/runtime/test_ranks_cuda.py
"""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable, Iterator
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton", reason="pip install -e .[triton]")
if torch.cuda.device_count() < 2:
    pytest.skip("needs two GPUs", allow_module_level=True)

from PIL import Image  # noqa: E402
from tiny_images import write_image_source  # noqa: E402

from wicore_trt import LLM, SamplingParams  # noqa: E402
from wicore_trt.engine.build import build_engine  # noqa: E402
from wicore_trt.errors import RankError  # noqa: E402
from wicore_trt.runtime.batch import SequenceSlice, StepBatch  # noqa: E402
from wicore_trt.runtime.ranks import RankedAheadExecutor  # noqa: E402

SIZES = {
    "hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64,
    "num_hidden_layers": 6, "sliding_window": 64, "sliding_window_pattern": 3, "max_position_embeddings": 2048,
}  # fmt: skip
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=2)
DRAWN = SamplingParams(max_tokens=24, ignore_eos=True, seed=7, top_k=40, top_p=0.95)
SETTINGS = {"executor__compare_ranks": True, "kv__device_bytes": "64MiB", "scheduler__max_sequences": 32}
Opener = Callable[..., LLM]


@pytest.fixture(scope="module")
def open_model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Opener]:
    home = tmp_path_factory.mktemp("ranks")
    source = write_image_source(home / "source", **SIZES)
    target = "sm{}{}".format(*torch.cuda.get_device_capability())

    def open_one(tp: int, dtype: str = "bfloat16", kv_dtype: str = "auto", **settings: Any) -> LLM:
        path = home / f"{dtype}-{kv_dtype}-{tp}"
        if not path.exists():
            build_engine(
                source, path, backend="triton", targets=[target], dtype=dtype, kv_dtype=kv_dtype, tp_size=tp,
                max_context=2048,
            )  # fmt: skip
        return LLM(path, **(SETTINGS | settings))

    yield open_one


def make_prompts(count: int, seed: int, most: int = 200) -> list[str]:
    rng = random.Random(seed)
    return ["".join(rng.choices("abcdefghij klmn", k=rng.randrange(3, most))) for _ in range(count)]


def make_image(seed: int) -> bytes:
    file, pixels = BytesIO(), np.random.default_rng(seed).integers(0, 256, (56, 56, 3), np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def answer_all(model: LLM, prompts: list[Any], params: SamplingParams) -> list[Any]:
    return [found[0] for found in model.generate(prompts, params)]


def answer_each(model: LLM, prompts: list[Any], params: SamplingParams) -> list[tuple[int, ...]]:
    return [tuple(model.generate([prompt], params)[0][0].token_ids) for prompt in prompts]


def skip_without_gpus(ranks: int) -> None:
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} GPUs")


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "bound"),
    [("bfloat16", "auto", 0.15), ("bfloat16", "fp8", 0.3), ("fp8", "auto", 0.6), ("q4_0", "auto", 0.15)],
)
@pytest.mark.parametrize("ranks", [2, 4])
def test_tokens_are_those_of_one_gpu_but_for_ties(
    open_model: Opener, dtype: str, kv_dtype: str, bound: float, ranks: int
) -> None:
    """Prompts of a few tokens and of more than ranks push, with images and without."""
    skip_without_gpus(ranks)
    prompts: list[Any] = [*make_prompts(12, 3), *make_prompts(2, 4, 900)]
    prompts += [{"prompt": f"ab <start_of_image> {p[:40]}", "images": [make_image(i)]} for i, p in enumerate(prompts)]
    answers = []
    for tp in (1, ranks):
        with open_model(tp, dtype, kv_dtype) as model:
            answers.append(answer_all(model, prompts, GREEDY))
    same = 0
    for one, two in zip(*answers, strict=True):
        for i, (right, found) in enumerate(zip(one.token_ids, two.token_ids, strict=True)):
            if right != found:
                known = dict(one.logprobs[i].top)
                assert found in known and known[right] - known[found] < bound, (i, "another token, and no tie")
                break
            same += 1
    print(f"\n{dtype}, KV {kv_dtype}, {ranks} ranks: {same} of {len(prompts) * 24} tokens before the first tie")
    assert same > len(prompts) * 24 // 4


@pytest.mark.parametrize(("ranks", "peer_access"), [(2, True), (2, False), (4, True)])
def test_company_tiers_and_preemption_change_no_bit(
    open_model: Opener, tmp_path: Path, ranks: int, peer_access: bool
) -> None:
    """Batch-invariant: each sequence alone, and all in a crowd that the device has no room for; also without peer
    access, which must give the same bits."""
    skip_without_gpus(ranks)
    prompts = make_prompts(40, 5, 400)
    mode = {"executor__batch_invariant": True}
    with open_model(ranks, **mode) as model:
        wanted = answer_each(model, prompts, GREEDY), answer_each(model, prompts, DRAWN)
    tight = {"kv__device_bytes": "2MiB", "kv__host_bytes": "64MiB", "kv__disk_path": str(tmp_path / "disk")}
    tight |= {"executor__peer_access": peer_access, "scheduler__max_context": 1024}
    with open_model(ranks, **mode, **tight) as model:
        for _ in range(2):  # the second time from lower tiers
            for params, right in zip((GREEDY, DRAWN), wanted, strict=True):
                assert [tuple(found.token_ids) for found in answer_all(model, prompts, params)] == right
        print(f"\n{model.stats().kv}" if hasattr(model.stats(), "kv") else "")


def greedy_slice() -> SequenceSlice:
    params = SamplingParams(temperature=0.0)
    return SequenceSlice(1, [3, 4], 0, {"global": [0], "local": [0]}, sample=True, params=params, prompt_len=2)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_hangs_ends_the_engine_soon(open_model: Opener, how: signal.Signals) -> None:
    model = open_model(2)
    executor: Any = model._core.executor  # type: ignore[attr-defined]
    assert isinstance(executor, RankedAheadExecutor)
    process = executor._group.processes[0]
    slices = [StepBatch([greedy_slice()]) for _ in range(200)]
    assert executor.execute(slices[0]).sampled
    process.send_signal(how)
    begun = time.monotonic()
    with pytest.raises(RankError, match="rank 1 (has ended|was stopped|hangs)|in vain"):
        for batch in slices:
            executor.execute(batch)
    took = time.monotonic() - begun
    print(f"\n{how.name}: {executor._group.failure} after {took:.2f} s")
    assert took < 3.0
    with pytest.raises(RankError):
        executor.submit(slices[0])
    model.close()
    assert process.returncode == -signal.SIGKILL
