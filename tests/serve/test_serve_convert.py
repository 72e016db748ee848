"""Pure parts of the server: messages to plain types and back, statuses, log lines."""

from __future__ import annotations

import json
import logging
import random
import re

import pytest
from serving import details_of

from wicore_trt import errors
from wicore_trt.access.log import JsonFormatter, LineFormatter
from wicore_trt.serve import convert
from wicore_trt.serve.gen.wicore.inference.v1 import inference_pb2 as pb2
from wicore_trt.serve.guard import DuplicateRequestError, make_status
from wicore_trt.types import FinishReason, SamplingParams, TextOutput, TokenLogprob, Usage


def test_sampling_defaults_and_values():
    assert convert.read_sampling_params(pb2.SamplingParams()) == SamplingParams()
    given = SamplingParams(
        max_tokens=7, min_tokens=2, temperature=0.1, top_k=5, top_p=0.3, min_p=0.07, repetition_penalty=1.1,
        presence_penalty=-0.3, frequency_penalty=0.9, seed=-(2**63), n=3, logprobs=0, logit_bias={3: -1.5},
        stop=("ü", "b"), stop_token_ids=(4, 5), ignore_eos=True, include_stop=True,
    )  # fmt: skip
    fields = {name: getattr(given, name) for name in given.__slots__}
    assert convert.read_sampling_params(pb2.SamplingParams(**fields)) == given  # doubles: 0.1 stays 0.1
    assert convert.read_sampling_params(pb2.SamplingParams(temperature=0.0)).greedy


@pytest.mark.parametrize("seed", range(5))
def test_outputs_of_any_size_arrive_whole_in_bounded_messages(seed):
    rng = random.Random(seed)
    count = rng.choice((0, 1, 511, 512, 513, rng.randrange(5000)))
    ids = tuple(rng.randrange(262_144) for _ in range(count))
    logprobs = tuple(TokenLogprob(t, -rng.random(), ((t, -0.5), (1, -2.0))) for t in ids)
    text = "".join(rng.choice("añ€😀 ") for _ in range(rng.randrange(3 * count + 2)))
    prompt = tuple(TokenLogprob(t, -1.0) for t in range(rng.choice((0, 3, 512, 1300))))
    output = TextOutput("r", 3, text, ids, logprobs, FinishReason.STOP, "end", Usage(9, count, 4), prompt)
    messages = list(convert.make_responses(output, first_token_s=0.25, total_s=61.5))
    assert [m.WhichOneof("event") for m in messages] == ["delta"] * (len(messages) - 1) + ["finish"]
    assert all((m.request_id, m.index) == ("r", 3) for m in messages)
    deltas = [m.finish.delta if m.HasField("finish") else m.delta for m in messages]
    assert "".join(d.text for d in deltas) == text
    assert [t for d in deltas for t in d.token_ids] == list(ids)
    entries = [entry for d in deltas for entry in d.logprobs]
    assert [e.token_id for e in entries] == list(ids) and all(len(e.top) == 2 for e in entries)
    assert [entry.token_id for d in deltas for entry in d.prompt_logprobs] == list(range(len(prompt)))
    assert max(max(len(d.token_ids), len(d.prompt_logprobs)) for d in deltas) <= 512
    finish = messages[-1].finish
    assert finish.reason == pb2.FINISH_REASON_STOP and finish.stop_string == "end"
    assert (finish.usage.prompt_tokens, finish.usage.completion_tokens, finish.usage.cached_tokens) == (9, count, 4)
    assert finish.timings.total.ToMilliseconds() == 61_500
    assert finish.timings.time_to_first_token.ToMilliseconds() == 250


def test_every_error_of_ours_has_a_status_that_fits_into_metadata():
    kinds, todo = [], [errors.WicoreError]
    while todo:
        kind = todo.pop()
        kinds.append(kind)
        todo += [found for found in kind.__subclasses__() if not found.__module__.startswith("wicore_trt.http")]
    assert DuplicateRequestError in kinds and len(kinds) >= 14
    for kind in kinds:
        keywords = {"field": "n"} if issubclass(kind, errors.InvalidRequestError) else {}
        status = make_status(kind("bad \N{SNOWMAN}" * 1000, fix="Mend it.", **keywords), "call-1")
        details = details_of(status)
        assert status.code != 0 and len(status.message) == 512 and status.ByteSize() < 4096
        words = re.findall("[A-Z][a-z]+", kind.__name__.removesuffix("Error"))
        known = {errors.ContextLengthError: "INVALID_REQUEST", errors.QueueFullError: "QUEUE_FULL"}
        assert details["ErrorInfo"].reason == known.get(kind, "_".join(words).upper()) != ""
        assert details["RequestInfo"].request_id == "call-1"
        assert ("BadRequest" in details) == bool(keywords)
        comes_back = issubclass(kind, errors.QueueFullError) or kind.grpc_code == "UNAVAILABLE"
        assert ("RetryInfo" in details) == comes_back


@pytest.mark.parametrize("formatter", [LineFormatter(), JsonFormatter()])
def test_a_record_is_one_line_whatever_a_client_sent(formatter):
    record = logging.LogRecord("wicore_trt.x", logging.INFO, __file__, 1, "Generate %s", ("OK\n\x1bINFO forged",), None)
    record.facts = {"id": "a b\nc", "tokens": 3, "error": 'say "hi"\x1b[31m'}
    line = formatter.format(record)
    assert "\n" not in line and "\x1b" not in line
    if isinstance(formatter, JsonFormatter):
        assert json.loads(line)["error"] == record.facts["error"]
    else:
        assert "tokens=3" in line and 'id="a b\\nc"' in line
