"""The proof of a GPU's answers, rehearsed on a CPU: what it judges, and that it notices what is wrong."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from parity.tiny import cast
from runtime.triton_cpu import executor_of, oracle_of, rounded, small_model

from benchmarks.answers.check import Subject, check_answers, run_in_company
from benchmarks.answers.data import (
    DEFAULT,
    INVARIANT,
    Answers,
    Errors,
    Oracle,
    Piece,
    choose_ids,
    find_differences,
    find_divergences,
    plan_step,
)
from benchmarks.answers.oracle import begin_oracle, dequantize_weights, join_oracle
from benchmarks.answers.prompts import LONG, PROMPTS, SINGLE, long_text
from benchmarks.answers.runs import Run, torch_step, triton_step
from wicore_trt.backends.torch.weights import EngineTensors, fuse_weights
from wicore_trt.runtime.dtypes import E4M3

NEW = 4


def silent(text: str) -> None:
    pass


def loaded(model, dtype: str, tensors=None) -> EngineTensors:
    return EngineTensors(model.spec, dtype, dtype, fuse_weights(tensors or model.tensors, model.spec), page_tokens=4)


def made_oracle(
    seed: int, prompts=((3, 17, 5, 9, 30, 2, 11), (8,), (1, 40, 2)), new: int = NEW
) -> tuple[object, Oracle]:
    model = small_model(seed)
    names, given = [f"p{i}" for i in range(len(prompts))], [list(p) for p in prompts]
    oracle = begin_oracle(names, given, loaded(model, "float32"), "tiny", silent, new)
    return model, join_oracle(oracle, "bfloat16", loaded(model, "bfloat16", rounded(model, "bfloat16", False)), silent)


def torch_subject(model, dtype: str, tensors=None) -> Subject:
    def opened(mode: str, graphs: bool):
        executor = oracle_of(model, dtype, tensors=tensors, kv_pages={"global": 60, "local": 60})
        yield torch_step(executor), executor.layout

    return Subject(dtype, opened, (DEFAULT,), has_graphs=False)


def test_the_oracle_agrees_with_itself_and_survives_a_file(tmp_path):
    model, oracle = made_oracle(1)
    lines: list[str] = []
    problems, tokens = check_answers(torch_subject(model, "float32", model.tensors), oracle, lines.append)
    assert problems == [] and (tokens == oracle.tokens).all(), lines
    oracle.save(tmp_path / "oracle.npz")
    again = Oracle.load(tmp_path / "oracle.npz")
    assert again.names == oracle.names and again.prompts == oracle.prompts and (again.ids == oracle.ids).all()
    assert (again.answers["bfloat16"].values == oracle.answers["bfloat16"].values).all()
    assert again.rounding("bfloat16", "float32").largest > again.rounding("float32", "float32").mean > 0
    assert again.turnable("bfloat16", "float32") <= 2 * again.rounding("bfloat16", "float32").largest


def test_a_wrong_model_is_noticed():
    model, oracle = made_oracle(2)
    wrong = {n: t * 1.2 if n.endswith("ln_f.weight") else t for n, t in model.tensors.items()}
    problems, _ = check_answers(torch_subject(model, "float32", wrong), oracle, silent)
    assert any("logits err" in p for p in problems)


def test_the_interpreted_triton_executor_follows_the_oracle():
    """Logits belong to the slices that gave them, for steps of single tokens and mixed ones."""
    model, oracle = made_oracle(3, prompts=((3, 17, 5), (8,)), new=2)
    pages = {"global": 8, "local": 8}
    executor = executor_of(model, "bfloat16", kv_pages=pages, max_sequences=2, max_batch_tokens=4)
    run = Run(triton_step(executor, executor), executor.layout, 2, forced=oracle.tokens, ids=oracle.ids)
    said = run.together(oracle.prompts, 3)
    expected = oracle.answers["bfloat16"]
    assert Errors.between(said.values, expected.values).largest < 0.05 * np.abs(expected.values).max()
    assert all(d.explained(0.2) for d in find_divergences(said.tokens, expected))


def test_company_covers_all_prompts_and_marks_name_every_bit():
    model, oracle = made_oracle(4)
    executor = oracle_of(model, "float32", tensors=model.tensors, kv_pages={"global": 60, "local": 60})
    run = Run(torch_step(executor), executor.layout, NEW)
    base = run.together(oracle.prompts, 5)
    for how, said in run_in_company(run, oracle.prompts, 2):
        expected = base.tokens[1:] if how == "alone" else base.tokens
        assert (said.tokens == expected).all(), how
    logits = torch.randn(3, 100)
    other = logits.clone()
    other[1, 7] = torch.nextafter(other[1, 7], torch.tensor(9.0))
    run._weights = None
    assert (run._mark(logits) == run._mark(other)).tolist() == [True, False, True]


class Drifting:
    """A step whose logits depend on how many slices it has: what batch-invariant mode must not do."""

    def __init__(self, step, by: float) -> None:
        self.step, self.by = step, by

    def __call__(self, slices):
        tokens, logits = self.step(slices)
        return tokens, logits + self.by * len(slices)


@pytest.mark.parametrize("by", [0.0, 1e-3])
def test_company_that_changes_bits_is_a_problem_in_invariant_mode(by):
    model, oracle = made_oracle(5)
    oracle = replace(oracle, answers={**oracle.answers, "bfloat16": oracle.answers["float32"]})

    def opened(mode: str, graphs: bool):
        executor = oracle_of(model, "float32", tensors=model.tensors, kv_pages={"global": 60, "local": 60})
        step = torch_step(executor)

        def rounded_step(slices):
            tokens, logits = step(slices)
            return tokens, (logits * 64).round() / 64  # what another order of sums changes is rounded off

        yield Drifting(rounded_step, by), executor.layout

    problems, _ = check_answers(Subject("bfloat16", opened, (INVARIANT,), has_graphs=True), oracle, silent)
    assert any("other bits" in p for p in problems) == bool(by)


def test_divergences_are_judged_by_gaps_alone():
    top_ids = np.array([[[5, 7, 9]], [[1, 2, 3]], [[4, 6, 8]]], np.int32)
    top = np.array([[[9.0, 8.95, 3.0]], [[9.0, 8.0, 7.0]], [[9.0, 8.9, 8.8]]], np.float32)
    found = find_divergences(np.array([[7], [2], [0]]), Answers(top, top_ids, top))
    assert [(d.prompt, round(d.gap, 2), d.explained(0.3)) for d in found] == [
        (0, 0.05, True),
        (1, 1.0, False),
        (2, 0.2, False),
    ]
    assert found[2].at_least and "NOT EXPLAINED" in found[2].line("x", 0.3) and "tie" in found[0].line("x", 0.3)


def test_errors_that_are_not_finite_are_beyond_every_bound():
    assert not Errors.between(np.array([np.nan]), np.array([1.0])).within(Errors(1e9, 1e9))
    assert Errors(1.9, 1.4).within(Errors(1, 1)) and not Errors(2.1, 1).within(Errors(1, 1))
    assert not Errors(1, 1.6).within(Errors(1, 1))


def test_steps_decode_first_and_prompts_share_the_rest():
    assert plan_step([4, 0, 3], [4, 9, 5], [8, 12, 6], 6) == [Piece(0, 4, 1), Piece(1, 0, 5)]
    assert plan_step([8, 12, 5], [4, 9, 5], [8, 12, 6], 6) == [Piece(2, 5, 1)]
    assert plan_step([8, 12, 6], [4, 9, 5], [8, 12, 6], 6) == []
    assert find_differences(np.array([[1, 2], [3, 4]]), np.array([[1, 2], [3, 5]])) == [None, 1]


def test_kept_ids_are_the_largest_and_the_same_random_ones():
    ids = choose_ids(np.array([[[4, 2]], [[7, 1]]], np.int32), 1000)
    assert ids[:, 0, :2].tolist() == [[4, 2], [7, 1]] and (ids[0, 0, 2:] == ids[1, 0, 2:]).all()
    assert len(set(ids[0, 0, 2:].tolist())) == ids.shape[2] - 2


def test_dequantized_weights_mean_the_same():
    model = small_model(6)
    engine = loaded(model, "bfloat16", cast(model.spec, model.tensors, E4M3))
    plain = dequantize_weights(engine)
    name = next(n for n, t in engine.tensors.items() if t.dtype == E4M3)
    expected = engine.tensors[name].float() * engine.tensors[name + "s_scaling_factor"][:, None]
    assert torch.equal(plain.tensors[name], expected) and not any("scaling" in n for n in plain.tensors)


def test_prompts_are_twenty_and_one_is_long():
    assert len({*PROMPTS, LONG, SINGLE}) == 20 and len(set(PROMPTS.values())) == 18
    assert len(long_text().split()) > 500
