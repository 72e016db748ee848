"""Constraints are checked in a process of their own: what overflows a stack or takes too long costs that one alone."""

from __future__ import annotations

import json
import os
import resource
import signal
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import pytest

from wicore_trt.core.loop import STACK as ENGINE_STACK
from wicore_trt.errors import InvalidRequestError, UnavailableError
from wicore_trt.process import checker
from wicore_trt.process.checker import Checker
from wicore_trt.types import Constraint, ConstraintKind

GOOD = Constraint(ConstraintKind.REGEX, "[0-9]{4}")
CHAIN = Constraint(
    ConstraintKind.GRAMMAR, "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(3000)) + 'a3000: "x"'
)
REFERENCES = Constraint(
    ConstraintKind.JSON_SCHEMA,
    json.dumps({"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(3000)}, "$ref": "#/$defs/a0"}),
)
LONG = Constraint(ConstraintKind.REGEX, "a?" * 40_000)  # some 17 s and 3 GB


@pytest.fixture(scope="module")
def checks() -> Checker:
    return Checker()


@pytest.mark.parametrize("constraint", [CHAIN, REFERENCES, LONG], ids=["chain", "references", "long"])
def test_what_ends_the_process_is_refused_and_the_next_one_is_checked(checks: Checker, constraint: Constraint) -> None:
    for _ in range(2):  # the second time from what is known
        with pytest.raises(InvalidRequestError, match="takes too much") as caught:
            checks.check(constraint)
        assert caught.value.field == "constraint"
    checks.check(GOOD)


def test_reasons_come_across(checks: Checker) -> None:
    with pytest.raises(InvalidRequestError, match="cannot be kept: .*unclosed|cannot be kept: .*parse"):
        checks.check(Constraint(ConstraintKind.REGEX, "(" + "\u00e9"))


def test_a_process_that_was_killed_is_followed_by_another_one() -> None:
    made = Checker()
    made.check(GOOD)
    assert checker.WORKER.process is not None
    os.kill(checker.WORKER.process.pid, signal.SIGKILL)
    made.check(Constraint(ConstraintKind.REGEX, "b{1}"))


def test_where_no_process_can_be_started_that_is_said_and_the_next_one_is_checked() -> None:
    made, (soft, hard) = Checker(), resource.getrlimit(resource.RLIMIT_NOFILE)
    if checker.WORKER.process is not None:
        checker.WORKER.process.kill()
        checker.WORKER.process.wait()
    resource.setrlimit(resource.RLIMIT_NOFILE, (1, hard))
    try:
        asked = _aside(made.check, GOOD)
        with pytest.raises(UnavailableError, match="cannot be started now: .*Too many open files"):
            asked.result(60)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    _aside(made.check, GOOD).result(60)


def _aside(check: Callable[[Constraint], None], constraint: Constraint) -> Future[None]:
    """On a thread that holds up nothing should it wait for ever."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            outcome.set_result(check(constraint))
        except Exception as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return outcome


def test_threads_get_their_own_answers(checks: Checker) -> None:
    def ask(i: int) -> str:
        try:
            checks.check(Constraint(ConstraintKind.JSON_SCHEMA, json.dumps({"type": f"t{i}" if i % 2 else "string"})))
        except InvalidRequestError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(4) as pool:
        for i, said in enumerate(pool.map(ask, range(40))):
            assert (f"t{i}" in said) if i % 2 else not said


def test_the_engine_has_more_stack_than_the_check() -> None:
    assert ENGINE_STACK >= 8 * checker.LIMITS.stack > 0
