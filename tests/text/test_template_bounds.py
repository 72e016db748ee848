"""Chat templates that would take all time or memory are ended, and the next one is rendered as ever."""

from __future__ import annotations

import os
import resource
import signal
import threading
from pathlib import Path

import pytest
from suspend import suspend_process

from wicore_trt import worker_process
from wicore_trt.errors import EngineFormatError, InvalidRequestError, UnavailableError
from wicore_trt.text import chat
from wicore_trt.text.chat import ChatTemplate, TemplateRefusal

MESSAGES = [{"role": "user", "content": "hello"}]


def render(source: str) -> str:
    return ChatTemplate(source, {"bos_token": "<bos>"}, Path("t")).render_messages(MESSAGES, add_generation_prompt=True)


@pytest.mark.parametrize(
    "source",
    [
        "{{ 'x' * 10**10 }}",
        "{{ '%999999999999d' % 1 }}",
        "{% set s = namespace(x='ab') %}{% for i in range(60) %}{% set s.x = s.x ~ s.x %}{% endfor %}",
        "{{ 'a' | center(10**11) }}",
        "{{ 'a' * 40000000 }}",
        "{% macro f(n) %}{{ f(n) }}{% endmacro %}{{ f(1) }}",
    ],
)
def test_memory_is_bounded(source: str) -> None:
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((InvalidRequestError, EngineFormatError), match="The chat template"):
        render(source)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB
    assert render("{{ bos_token }}{{ messages[0].content }}") == "<bos>hello"


def test_time_is_bounded() -> None:
    loop = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
    with pytest.raises(InvalidRequestError, match="it takes more than 2 s"):
        render(loop)  # which takes hours
    assert render("{{ messages[0].content }}") == "hello"


def test_a_worker_that_was_killed_is_replaced() -> None:
    assert render("{{ 1 }}") == "1"
    assert chat.WORKER.process is not None
    os.kill(chat.WORKER.process.pid, signal.SIGKILL)
    chat.WORKER.process.wait()
    assert render("{{ 2 }}") == "2"


def test_a_worker_that_is_killed_at_work_is_no_fault_of_the_template() -> None:
    """As where the machine's memory is short; the first template of a server would have ended it."""
    slow = "{% for a in range(40) %}{% for b in range(50000) %}{% endfor %}{% endfor %}slow"
    assert render("{{ 1 }}") == "1"
    assert chat.WORKER.process is not None
    timer = threading.Timer(0.1, os.kill, (chat.WORKER.process.pid, signal.SIGKILL))
    timer.start()
    assert chat.run_template(slow, {}, {}) == {"text": "slow"}
    timer.join()


def test_a_job_that_is_interrupted_leaves_its_answer_to_nobody() -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    slow = "{% for a in range(60) %}{% for b in range(50000) %}{% endfor %}{% endfor %}slow"
    assert render("{{ 1 }}") == "1"
    former = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with pytest.raises(KeyboardInterrupt):
            chat.run_template(slow, {}, {})
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, former)
    assert render("{{ messages[0].content }}") == "hello"


def test_a_worker_that_does_not_read_its_job_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert render("{{ 1 }}") == "1"
    assert chat.WORKER.process is not None
    worker = chat.WORKER.process.pid
    monkeypatch.setattr(worker_process, "WAIT_SECONDS", 0.2)
    suspend_process(worker)
    rescue = threading.Timer(60, os.kill, (worker, signal.SIGKILL))  # or a failure of this test would hang
    rescue.start()
    with pytest.raises(UnavailableError, match="got no time"):  # which is no fault of the template
        chat.run_template("{{ x }}", {}, {"x": "x" * (1 << 20)})
    assert rescue.is_alive(), "the worker was ended from outside"
    rescue.cancel()
    monkeypatch.undo()
    assert render("{{ 2 }}") == "2"


@pytest.mark.forks
def test_a_process_that_was_forked_while_a_template_was_rendered_renders_its_own() -> None:
    with chat.WORKER.lock:
        child = os.fork()
        if child == 0:
            os._exit(0 if chat.WORKER.lock.acquire(timeout=1) else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_text_that_json_would_escape_comes_whole() -> None:
    assert chat.run_template("{{ '\x01' * 12000000 }}", {}, {}) == {"text": "\x01" * 12_000_000}


def test_refusals_and_odd_text_pass_through() -> None:
    with pytest.raises(InvalidRequestError, match="refuses these messages: no") as caught:
        render("{{ raise_exception('no') }}")
    assert isinstance(caught.value.__cause__, TemplateRefusal)
    assert render("{{ '\\ud800' }}\n\u65e5{{ messages[0].content }}") == "\ud800\n\u65e5hello"


def test_a_template_as_long_as_a_book_is_not_compiled() -> None:
    with pytest.raises(EngineFormatError, match="more than 262144 characters"):
        ChatTemplate("x" * 300_000, {}, Path("t"))
