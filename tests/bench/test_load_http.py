"""The HTTP client of load tests: against our own server, and against servers that refuse, lie, die or stutter."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress

import pytest
import trustme
from bench.made_requests import ask_at_once, ask_in_turn, make_requests
from hypothesis import given, settings
from hypothesis import strategies as st
from web import make_engine, serving

from wicore_trt.bench.http import ANY_CONTEXT, ANY_VOCABULARY, HttpTarget, Stream
from wicore_trt.bench.load import LoadOptions, run_load
from wicore_trt.bench.measure import Slo
from wicore_trt.bench.workload import BenchRequest, LoadShape, WordList, make_sessions
from wicore_trt.errors import ConfigError, UnavailableError, WicoreError

ASKED = BenchRequest((5, 6, 7), 6)
CHAT = BenchRequest((), 6, messages=({"role": "user", "content": "hello"},))


def event(text: str | None, tokens: int | None = None, *, chat: bool = False, cached: int | None = None) -> bytes:
    """A chunk with this text (None: no choice) and the usage so far."""
    choice = {"delta": {"content": text}} if chat else {"text": text}
    body: dict = {"id": "x", "choices": [] if text is None else [{"index": 0, "finish_reason": None, **choice}]}
    if tokens is not None:
        body["usage"] = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": 3 + tokens}
    if cached is not None:
        body["usage"]["prompt_tokens_details"] = {"cached_tokens": cached}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


@asynccontextmanager
async def scripted(script: Callable[[asyncio.StreamWriter, dict], AsyncIterator[None]]) -> AsyncIterator[str]:
    """A server that knows one model and answers each POST as `script` does; gives its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                length = [int(line.split(":")[1]) for line in head.lower().split("\r\n") if "content-length" in line]
                body = json.loads(await reader.readexactly(length[0])) if length else {}
                if head.startswith("GET /v1/models "):
                    plain(writer, 200, {"data": [{"id": "scripted", "max_model_len": 500}]})
                elif head.startswith("GET /status "):
                    writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n<ok>")
                elif head.startswith("GET"):
                    plain(writer, 404, {})
                else:
                    await script(writer, body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def plain(writer: asyncio.StreamWriter, status: int, body: object) -> None:
    raw = json.dumps(body).encode()
    writer.write(b"HTTP/1.1 %d X\r\ncontent-length: %d\r\n\r\n" % (status, len(raw)) + raw)


def streaming(*parts: bytes, end: bool = True):
    """Sends the parts, each when the one before has left; without `end` the connection closes in the middle."""

    async def script(writer: asyncio.StreamWriter, body: dict) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        for part in parts:
            writer.write(b"%x\r\n%s\r\n" % (len(part), part))
            await writer.drain()
            await asyncio.sleep(0.002)
        if end:
            writer.write(b"0\r\n\r\n")
        else:
            raise ConnectionError

    return script


async def one(script, request: BenchRequest = ASKED, **kwargs):
    async with scripted(script) as url:
        target = await HttpTarget.connect(url, **kwargs)
        try:
            return await target.generate(request)
        finally:
            await target.close()


@pytest.mark.parametrize("chat", [False, True])
async def test_our_own_server(chat):
    async with serving(make_engine(step_s=0.002)) as running:
        target = await HttpTarget.connect(running.url + "/v1/", chat=chat)
        info = running.engine.info
        assert (target.info.model_id, target.info.vocab_size) == (info.model_id, info.vocab_size)
        assert target.info.max_context_tokens == info.max_context_tokens
        request = CHAT if chat else make_requests(97, 1, 20, 6)[0]
        before = await target.tier_hits()
        records = await ask_at_once(target, [request] * 5)
        await target.close()
    assert before == {"device": 0}
    for record in records:
        assert (record.error, record.output_tokens) == (None, 6) and record.counted and record.tells_cached
        assert record.prompt_tokens == (5 if chat else 20)
        assert sum(tokens for _, tokens in record.arrivals) == 6 and len(record.gaps_s()) == 5
        assert record.started <= record.sent < record.arrivals[0][0] <= record.finished
        assert isinstance(record.answer, str)


async def test_hits_of_our_server_by_tier():
    async with serving(make_engine()) as running:
        target = await HttpTarget.connect(running.url)
        request = make_requests(97, 1, 20, 6)[0]
        records = await ask_in_turn(target, [request] * 3)
        hits = await target.tier_hits()
        await target.close()
    assert hits == {"device": sum(r.cached_tokens for r in records)} and hits["device"] > 0


async def test_several_tokens_a_chunk_are_counted_by_the_usage_beside_them():
    record = await one(streaming(event("", 0), event("abc", 3), event("d", 4), event("ef", 6), event(None, 6), DONE))
    assert record.error is None and record.counted
    assert [tokens for _, tokens in record.arrivals] == [3, 1, 2]
    gaps = record.gaps_s()
    assert [gap == 0 for gap in gaps] == [True, True, False, False, True] and record.answer == "abcdef"
    assert record.tpot_s == pytest.approx((record.finished - record.arrivals[0][0]) / 5)


async def test_an_empty_first_chunk_is_no_first_token():
    first = event("", chat=True)
    script = streaming(first, *[event("x", chat=True)] * 6, event(None, 6, cached=2), DONE)
    record = await one(script, CHAT, chat=True)
    assert record.error is None and len(record.arrivals) == 6 and record.cached_tokens == 2 and record.tells_cached
    async with scripted(script) as url:
        target = await HttpTarget.connect(url)
        assert target.info.vocab_size == ANY_VOCABULARY and await target.tier_hits() == {}
        await target.close()


async def test_a_usage_at_the_end_alone_leaves_no_gaps_where_chunks_have_more_tokens():
    record = await one(streaming(event("abc"), event("def"), event(None, 6), DONE))
    assert record.error is None and record.output_tokens == 6 and record.gaps_s() == []
    assert len(record.arrivals) == 2 and record.counted and not record.tells_cached
    finish = json.dumps({"choices": [{"text": "f"}], "usage": {"prompt_tokens": 3, "completion_tokens": 6}})
    record = await one(streaming(*[event("x")] * 5, f"data: {finish}\n\n".encode(), DONE))
    assert [tokens for _, tokens in record.arrivals] == [1] * 6 and len(record.gaps_s()) == 5


async def test_without_usage_chunks_are_counted_and_the_record_says_so():
    record = await one(streaming(*[event("x")] * 4, DONE))
    assert record.error is None and record.output_tokens == 4 and not record.counted


@pytest.mark.parametrize("cuts", [1, 7, 10_000])
async def test_lines_cut_anywhere_and_comments_and_carriage_returns(cuts):
    whole = b": keep-alive\n\n" + event("ab", 2).replace(b"\n", b"\r\n") + event("é", 6) + event(None, 6) + DONE
    parts = [whole[i : i + cuts] for i in range(0, len(whole), cuts)]
    record = await one(streaming(*parts))
    assert record.error is None and [tokens for _, tokens in record.arrivals] == [2, 4] and record.answer == "abé"


@settings(deadline=None)
@given(st.lists(st.integers(0, 4), min_size=1, max_size=12), st.lists(st.integers(1, 300), max_size=40))
def test_tokens_are_accounted_for_however_bytes_come(chunks, cuts):
    """Against the sums of the chunks; time is the number of the read that completed a chunk."""
    so_far, raw, ends = 0, b"", []
    for tokens in chunks:
        so_far += tokens
        raw += event("x" * tokens, so_far)
        ends.append((len(raw), tokens))
    raw += DONE
    edges = sorted({cut % len(raw) for cut in cuts} | {len(raw)})
    stream, before = Stream(), 0
    for moment, edge in enumerate(edges):
        stream.take_bytes(raw[before:edge], float(moment))
        before = edge
    wanted = []
    for end, tokens in ends:
        read = next(i for i, edge in enumerate(edges) if edge >= end - 1)  # the line's own end is enough
        wanted += [(float(read), tokens)] if tokens else []
    assert stream.done and stream.arrivals() == wanted


@pytest.mark.parametrize(
    ("script", "status", "words"),
    [
        (streaming(event("ab", 2), end=False), "BROKEN", ""),
        (streaming(event("abcdef", 6), event(None, 6)), "BROKEN", "ended before its end"),
        (streaming(event("abcdef", 6), b'data: {"choices": [{"finish_reason": "abort"}]}\n\n', DONE), "ERROR", "abort"),
        (streaming(event("ab", 2), event(None, 2), DONE), "INCOMPLETE", "asked for 6 tokens, usage says 2, 2 came"),
        (streaming(event(None, 6), DONE), "INCOMPLETE", "usage says 6, 0 came"),
        (streaming(event("a", 1), b'data: {"error": {"message": "lost it"}}\n\n'), "ERROR", "lost it"),
        (streaming(b"data: {nonsense\n\n", DONE), "INVALID", ""),
        (streaming(b'data: {"choices": [{"text": "\xff"}]}\n\n', DONE), "INVALID", ""),
        (streaming(b'data: {"error": ' + b"[" * 100_000 + b"\n\n", DONE), "INVALID", ""),
        (streaming(event("abcdef", 10**400), DONE), "INVALID", ""),
    ],
)
async def test_what_breaks_is_a_record_with_its_status(script, status, words):
    record = await one(script)
    assert record.status == status and words in record.error
    assert record.output_tokens == 0 and record.sent is not None and record.finished > record.started


async def test_a_stream_may_end_without_done():
    """As that of `transformers serve`: the usage with the reason to finish, and nothing behind it."""
    usage = {"prompt_tokens": 3, "completion_tokens": 6}
    last = json.dumps({"choices": [{"delta": {}, "finish_reason": "length"}], "usage": usage})
    role = b'data: {"choices": [{"delta": {"role": "assistant"}}]}\n\n'
    parts = [role, *[event("x", chat=True)] * 6, f"data: {last}\n\n".encode()]
    record = await one(streaming(*parts), CHAT, chat=True)
    assert record.error is None and record.prompt_tokens == 3 and len(record.gaps_s()) == 5
    assert (await one(streaming(*parts, end=False), CHAT, chat=True)).status == "BROKEN"


async def test_an_answer_that_may_end_early():
    script = streaming(event("ab", 2), event(None, 2), DONE)
    record = await one(script, BenchRequest((5,), 6, ignore_eos=False))
    assert (record.error, record.output_tokens) == (None, 2)


async def test_bodies_are_what_was_asked_for():
    seen: list[dict] = []

    async def script(writer, body):
        seen.append(body)
        await streaming(event("abcdef", 6), event(None, 6), DONE)(writer, body)

    await one(script)
    await one(script, CHAT, chat=True, extra={"stream_options": None, "priority": 2})
    completion, chat = seen
    assert completion["prompt"] == [5, 6, 7] and completion["ignore_eos"] and completion["stream"]
    assert completion["stream_options"] == {"include_usage": True, "continuous_usage_stats": True}
    assert chat["messages"] == [{"role": "user", "content": "hello"}] and "prompt" not in chat
    assert "stream_options" not in chat and chat["priority"] == 2 and chat["model"] == "scripted"


async def test_refusals_are_counted_apart_and_are_not_good():
    served = 0

    async def script(writer, body):
        nonlocal served
        served += 1
        if served % 3 == 1:
            plain(writer, 429, {"error": {"message": "full", "type": "x"}})
        elif served % 3 == 2:
            plain(writer, 500, ["odd"])
        else:
            await streaming(event("abcd", 4), event(None, 4), DONE)(writer, body)

    async with scripted(script) as url:
        target = await HttpTarget.connect(url)
        sessions = make_sessions(LoadShape((8,), (4,), turns=2), [0.0] * 9, seed=0, run="a")
        load = await run_load(target, sessions, WordList(1000, seed=0), LoadOptions(1), slo=Slo(ttft_s=60))
        await target.close()
    assert load.planned == 18 and load.unsent + sum(load.statuses.values()) == 18
    assert load.statuses.keys() == {"OK", "429", "500"}
    assert load.refused == load.statuses["429"] == load.refusal.count and load.failed == load.statuses["500"]
    assert load.good == load.throughput.completed == load.statuses["OK"]
    assert load.examples["429"] == "429: full"


async def test_no_server_wrong_model_wrong_key_say_so():
    with pytest.raises(UnavailableError, match="No server answers at http://127.0.0.1:1: Connection refused. Start"):
        await HttpTarget.connect("http://127.0.0.1:1")
    async with serving(api_key="secret") as running:
        with pytest.raises(WicoreError, match="401"):
            await HttpTarget.connect(running.url)
        target = await HttpTarget.connect(running.url, api_key="secret")
        assert (await target.generate(make_requests(97, 1, 20, 6)[0])).error is None
        with pytest.raises(ConfigError, match="does not serve other"):
            await HttpTarget.connect(running.url, api_key="secret", model="other")
        await target.close()
    async with scripted(streaming()) as url:
        with pytest.raises(WicoreError, match="404"):
            await HttpTarget.connect(url + "/nothing")
        unlisted = await HttpTarget.connect(url + "/nothing", model="any")
        assert unlisted.info.model_id == "any"
        await unlisted.close()
        target = await HttpTarget.connect(url)
    assert (await target.generate(ASKED)).status in ("CONNECT", "BROKEN")  # the server is gone
    await target.close()


@asynccontextmanager
async def saying(answers: dict[str, bytes]) -> AsyncIterator[str]:
    """A server that answers a GET of these paths with these bytes; gives its URL."""

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            while True:
                raw = answers[(await reader.readuntil(b"\r\n\r\n")).decode().split()[1]]
                writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n" % len(raw) + raw)
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


@pytest.mark.parametrize("told", [b"0", b"-5", b"[]", b'"8"', b"1e300", b"true", b"99999999999", b"null"])
async def test_sizes_that_can_be_none_are_as_those_that_are_not_told(told):
    models = b'{"data": [{"id": "odd", "max_model_len": %s}]}' % told
    answers = {"/v1/models": models, "/status": b'{"model": {"vocab_size": %s}}' % told}
    async with saying(answers) as url:
        target = await HttpTarget.connect(url)
        assert (target.info.vocab_size, target.info.max_context_tokens) == (ANY_VOCABULARY, ANY_CONTEXT)
        await target.close()


@pytest.mark.parametrize(
    "models", [b'{"data": [{"id": null}]}', b'{"data": [5]}', b'{"data": {}}', b"[]", b"{", b"\xff"]
)
async def test_a_list_of_models_that_is_none_says_so(models):
    async with saying({"/v1/models": models, "/status": b""}) as url:
        with pytest.raises(WicoreError, match="does not answer as OpenAI's API does"):
            await HttpTarget.connect(url)


@pytest.mark.parametrize("value", [b"{} 5", b'{tier="device"} +Inf', b'{tier="device"} NaN', b'{tier="dev'])
async def test_odd_metrics_cost_no_run(value):
    metrics = b"wicore_kv_hit_tokens_total" + value + b"\n"
    answers = {"/v1/models": b'{"data": [{"id": "odd"}]}', "/status": b"", "/metrics": metrics}
    async with saying(answers) as url:
        target = await HttpTarget.connect(url)
        assert await target.tier_hits() == {}
        await target.close()


async def test_tls_is_checked(tmp_path):
    authority, paths = trustme.CA(), {name: tmp_path / name for name in ("cert", "key", "ca")}
    server = authority.issue_cert("127.0.0.1")
    server.cert_chain_pems[0].write_to_path(paths["cert"])
    server.private_key_pem.write_to_path(paths["key"])
    authority.cert_pem.write_to_path(paths["ca"])
    async with serving(tls_cert=str(paths["cert"]), tls_key=str(paths["key"])) as running:
        with pytest.raises(UnavailableError, match="certificate"):
            await HttpTarget.connect(running.url)
        target = await HttpTarget.connect(running.url, tls_ca=paths["ca"])
        assert (await target.generate(make_requests(97, 1, 20, 6)[0])).error is None
        await target.close()
    with pytest.raises(ConfigError, match="none cannot be read"):
        await HttpTarget.connect("https://127.0.0.1:1", tls_ca=tmp_path / "none")
