"""Hostile HTTP: scripts of what a client sends on one connection, waits for and leaves.

A script is a list of steps: bytes are sent, numbers are seconds to wait, READ waits for an answer and HEAD for the head
of one, HALF closes the sending half, RESET vanishes. A client that is at the end of its script reads what has come and
leaves.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from random import Random

from values import FIELDS, NUMBERS, TEXTS, bits, image_turns, image_url, lark, nested, raw_value, regex, schema

READ, HEAD, HALF, RESET = "read", "head", "half", "reset"
Step = bytes | float | str
ROUTES = ("/v1/chat/completions", "/v1/completions", "/v1/inference", "/tokenize", "/detokenize")
IMAGE_ROUTES = ("/v1/chat/completions", "/tokenize", "/v1/responses", "/v1/messages", "/v1/inference")
GETS = (
    "/v1/models",
    "/v1/models/x",
    "/v1/stats",
    "/status",
    "/version",
    "/health",
    "/ready",
    "/metrics",
    "/openapi.json",
    "/",
)


def post(path: str, body: bytes, *more: str, length: int | str | None = None, version: str = "1.1") -> bytes:
    head = [f"POST {path} HTTP/{version}", "host: x", "content-type: application/json", *more]
    if length != "":
        head.append(f"content-length: {len(body) if length is None else length}")
    return "\r\n".join(head).encode("utf-8", "surrogatepass") + b"\r\n\r\n" + body


def valid(rng: Random, **more: object) -> tuple[str, dict[str, object]]:
    """A route and a body that it answers."""
    path = rng.choice(ROUTES[:3])
    body: dict[str, object] = {"max_tokens": rng.choice([1, 3, 20]), "temperature": 0, "ignore_eos": True}
    if path == ROUTES[0]:
        body["messages"] = [{"role": "user", "content": "hi"}]
    else:
        body["prompt"] = "hello"
    if path != ROUTES[2] and rng.random() < 0.5:
        body["stream"] = True
    return path, body | more


def field(rng: Random) -> list[Step]:
    """One field of a good body has a value that it should not have."""
    path, body = valid(rng)
    raw, name = json.dumps(body), rng.choice(FIELDS)
    return [post(path, f'{raw[:-1]},"{name}":{raw_value(rng)}}}'.encode("utf-8", "surrogatepass")), READ]


def number(rng: Random) -> list[Step]:
    path, body = valid(rng)
    name = rng.choice(FIELDS[3:13])
    body.pop(name, None)
    return [post(path, f'{json.dumps(body)[:-1]},"{name}":{rng.choice(NUMBERS)}}}'.encode()), READ]


def text(rng: Random) -> list[Step]:
    path = rng.choice(ROUTES)
    value = rng.choice(TEXTS).encode("utf-8", "surrogatepass")
    if rng.random() < 0.3:
        value = (
            b'"'
            + rng.choice([b"\xff", b"\xed\xa0\x80", b"\xc0\xaf", b"\xf8\x88\x80\x80\x80", rng.randbytes(20)])
            + b'"'
        )
    name = rng.choice([b"prompt", b"stop", b"model", b"cache_salt", b"guided_regex"])
    rest = b"" if name == b"prompt" else b'"prompt":"a",'
    return [post(path, b"{" + rest + b'"max_tokens":2,"' + name + b'":' + value + b"}"), READ]


def broken(rng: Random) -> list[Step]:
    """A good body with bits flipped."""
    path, body = valid(rng)
    return [post(path, bits(rng, json.dumps(body).encode())), READ]


def nest(rng: Random) -> list[Step]:
    return [post(rng.choice(ROUTES), nested(rng, rng.choice([60, 900, 20_000, 300_000])).encode()), READ]


def doubled(rng: Random) -> list[Step]:
    path, body = valid(rng)
    name = rng.choice(list(body))
    again = f'{json.dumps(body)[:-1]},"{name}":{rng.choice([json.dumps(body[name]), raw_value(rng)])}}}'
    return [post(path, again.encode("utf-8", "surrogatepass")), READ]


def many(rng: Random) -> list[Step]:
    """Lists and objects of many items."""
    n = rng.choice([200, 1000, 10_000, 60_000])
    path, body = valid(rng)
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {}}}}}
    more: dict[str, object] = rng.choice(
        [
            {"stop": ["x" * (i % 300) for i in range(n)]},
            {"logit_bias": {str(i): rng.choice([1, 1e308, -100]) for i in range(n)}},
            {"logit_bias": {rng.choice(["-1", "1e3", "\u0661", "9" * 50, " 5", ""]): 1}},
            {"stop_token_ids": list(range(n))},
            {"tools": [tool | {"function": tool["function"] | {"name": f"f{i}"}} for i in range(min(n, 1000))]},
            {"messages": [{"role": "user", "content": "a"}] * n},
            {"prompt": ["a"] * n},
            {"prompt": [[5]] * n},
            {"prompt": [5] * n},
            {"prompt": "a" * n * 60},
            {"n": 32, "prompt": ["a"] * 100},
            {f"x{i}": 1 for i in range(min(n, 10_000))},
            {"guided_choice": ["c" * (i % 50 + 1) for i in range(n)]},
        ]
    )
    if "tools" in more:
        path, body = ROUTES[0], {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    return [post(path, json.dumps(body | more).encode()), READ]


def constraint(rng: Random) -> list[Step]:
    """Schemas, regexes and grammars that blow up."""
    path, body = valid(rng)
    if path == ROUTES[2]:
        path = ROUTES[1]
    made = schema(rng)
    more: dict[str, object] = rng.choice(
        [
            {"guided_regex": regex(rng)},
            {"guided_grammar": lark(rng)},
            {"guided_json": made},
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": made}}},
            {
                "structured_outputs": {
                    rng.choice(["json", "regex", "choice", "grammar", "x"]): rng.choice([made, regex(rng)])
                }
            },
            {"guided_choice": [regex(rng)[:50] or "x" for _ in range(rng.choice([1, 40, 4000]))]},
            {"response_format": {"type": rng.choice(["json_object", "text", "x", 1])}},
        ]
    )
    if rng.random() < 0.2:
        function = {"name": "f", "parameters": made, "strict": rng.random() < 0.5}
        path, more = ROUTES[0], {"tools": [{"type": "function", "function": function}], "tool_choice": "required"}
    more |= {"max_tokens": rng.choice([1, 4, 12])}
    return [post(path, json.dumps(body | more).encode("utf-8", "surrogatepass")), READ]


def headers(rng: Random) -> list[Step]:
    """Many, long or odd headers."""
    path, body = valid(rng)
    more = rng.choice(
        [
            [f"x-{i}: {'v' * rng.choice([1, 100])}" for i in range(rng.choice([100, 300, 3000]))],
            ["x-long: " + "v" * rng.choice([1000, 70_000, 300_000])],
            ["authorization: Bearer " + "k" * 5000, "x-api-key: \x7f\xe9"],
            ["x-request-id: " + rng.choice(["a" * 200, "a b", "\t", "\u00e9", "id\x01"])],
            ["content-type: text/plain"],
            ["content-encoding: gzip"],
            ["expect: 100-continue"],
            [" folded: 1"],
            ["no colon"],
            ["x: a\rb"],
            ["x: a\x00b"],
            [": empty"],
            ["x y: 1"],
            ["connection: upgrade", "upgrade: h2c", "http2-settings: AAA"],
            ["connection: upgrade", "upgrade: websocket"],
            ["range: bytes=0-1"],
            ["accept: " + "a/b," * 4000],
            ["host: y"],
            ["origin: http://evil.example", "access-control-request-method: POST"],
            ["te: trailers", "trailer: x"],
        ]
    )
    return [post(path, json.dumps(body).encode(), *more), READ]


def heads(rng: Random) -> list[Step]:
    """Request lines that are none, or of other things."""
    path = rng.choice(GETS + ROUTES)
    line = rng.choice(
        [
            f"GET {path} HTTP/1.1",
            f"GET {path} HTTP/1.0",
            f"GET {path} HTTP/2.0",
            f"GET {path} HTTP/9.9",
            f"get {path} HTTP/1.1",
            f"GET  {path}  HTTP/1.1",
            f"GET {path}",
            "GET",
            "",
            "\x16\x03\x01\x02\x00\x01",
            "PRI * HTTP/2.0",
            f"TRACE {path} HTTP/1.1",
            f"DELETE {path} HTTP/1.1",
            f"HEAD {path} HTTP/1.1",
            f"OPTIONS {path} HTTP/1.1",
            "OPTIONS * HTTP/1.1",
            "GET http://other/health HTTP/1.1",
            "CONNECT x:80 HTTP/1.1",
            f"GET {path}?{'q' * 70_000} HTTP/1.1",
            f"GET /{'../' * 50}etc/passwd HTTP/1.1",
            "GET /%2e%2e/%00%ff HTTP/1.1",
            "GET /v1/models/" + "%41" * 999 + " HTTP/1.1",
            "GET /v1/models/\u00e9\u0100 HTTP/1.1",
            "GET //health HTTP/1.1",
            "GET /health#f HTTP/1.1",
            "GET ? HTTP/1.1",
            "PATCH / HTTP/1.1",
        ]
    )
    return [line.encode() + b"\r\nhost: x\r\n\r\n", READ]


def noise(rng: Random) -> list[Step]:
    """A whole request with bits flipped, or bytes of nothing."""
    if rng.random() < 0.3:
        return [rng.randbytes(rng.choice([1, 100, 70_000])), READ]
    path, body = valid(rng)
    return [bits(rng, post(path, json.dumps(body).encode())), READ]


def chunked(rng: Random) -> list[Step]:
    """Bodies in chunks that stall, lie or never end."""
    path, body = valid(rng)
    raw = json.dumps(body).encode()
    head = post(path, b"", "transfer-encoding: chunked", length="")
    cut = rng.randrange(len(raw))
    parts = [b"%x\r\n" % len(piece) + piece + b"\r\n" for piece in (raw[:cut], raw[cut:]) if piece]
    whole = head + b"".join(parts) + b"0\r\n\r\n"
    return rng.choice(
        [
            [head, parts[0], 0.2, RESET],
            [head, parts[0], 0.2, *parts[1:], b"0\r\n\r\n", READ],
            [head + b"ffffffffffffffff\r\n" + raw, READ],
            [head + b"-1\r\n" + raw, READ],
            [head + b"zz\r\n" + raw, READ],
            [head + b"5;ext=" + b"x" * 90_000 + b"\r\nhello\r\n0\r\n\r\n", READ],
            [head + b"".join(b"1\r\n \r\n" for _ in range(3000)) + b"".join(parts) + b"0\r\n\r\n", READ],
            [whole[:-2] + b"x-trailer: 1\r\n\r\n", READ],
            [head + b"".join(parts) + b"0\r\n" + b"t: x\r\n" * 20_000, READ],
            [whole + b"garbage", READ],
        ]
    )


def smuggled(rng: Random) -> list[Step]:
    """Two lengths, or a length and chunks: nobody may see another request in the body."""
    inner = b"GET /v1/models/smuggled HTTP/1.1\r\nhost: x\r\n\r\n"
    path, body = valid(rng)
    raw = json.dumps(body).encode()
    more, length = rng.choice(
        [
            (["transfer-encoding: chunked"], None),
            (["content-length: 3"], None),
            (["transfer-encoding: identity"], None),
            (["transfer-encoding: chunked, identity"], ""),
            (["transfer-encoding:\x0bchunked"], None),
            (["transfer-encoding: xchunked"], ""),
            (["transfer-encoding : chunked"], None),
            (["content-length: +5"], ""),
            (["content-length: 5, 5"], ""),
            ([], "0x10"),
            ([], "-5"),
            ([], "9" * 30),
            ([], "1e3"),
            (["transfer-encoding: chunked", "transfer-encoding: x"], ""),
        ]
    )
    return [post(path, rng.choice([raw, b"0\r\n\r\n", raw[:5]]) + inner, *more, length=length), READ]


def pipelined(rng: Random) -> list[Step]:
    """Requests before the answers."""
    path, body = valid(rng)
    one = rng.choice([post(path, json.dumps(body).encode()), b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"])
    return [one * rng.choice([2, 10, 40, 400]), rng.choice([READ, RESET, 0.05])]


def slow(rng: Random) -> list[Step]:
    """Byte by byte, and gone before the end."""
    path, body = valid(rng)
    raw = post(path, json.dumps(body).encode())
    cuts = sorted(rng.sample(range(1, len(raw)), 4))
    steps: list[Step] = []
    for start, end in zip([0, *cuts], [*cuts, len(raw)], strict=True):
        steps += [raw[start:end], 0.05]
    return [*steps[: rng.randrange(2, len(steps))], rng.choice([RESET, HALF, 0.2])]


def vanishing(rng: Random) -> list[Step]:
    """A client that leaves: before, while and after it is answered."""
    path, body = valid(rng, max_tokens=rng.choice([5, 400]))
    raw = post(path, json.dumps(body).encode())
    cut = rng.choice([len(raw), len(raw), rng.randrange(len(raw))])
    return [raw[:cut], rng.choice([0.0, 0.03, 0.3]), rng.choice([RESET, HALF, READ])]


def late(rng: Random) -> list[Step]:
    """Times and waits: requests that are over before they begin."""
    path, body = valid(rng, timeout=rng.choice([1e-9, 1e-3, 0.05, 1e12, 1e13, 1e308]), max_tokens=50)
    return [post(path, json.dumps(body).encode()), READ]


def odd(rng: Random) -> list[Step]:
    """Good requests with unusual wishes."""
    path, body = valid(rng)
    more: dict[str, object] = rng.choice(
        [
            {"n": 32, "max_tokens": 3},
            {"logprobs": True, "top_logprobs": 20},
            {"logprobs": 20},
            {"echo": True},
            {"seed": -(2**63)},
            {"stop": ["a", "ab", "b" * 256]},
            {"min_tokens": 5, "max_tokens": 5},
            {"cache": {"session": "s" * 256, "ttl_s": 1e-9}},
            {"cache": {"priority": "high", "ttl_s": 2592000}},
            {"cache_salt": "\U0001f9ff" * 256},
            {"max_tokens": 2**31 - 1, "timeout": 0.1},
            {"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
            {"prompt": []},
            {"prompt": [[]]},
            {"prompt": ""},
            {"prompt": "\x00\uffff"},
            {"messages": []},
            {"messages": [{"role": "tool", "content": "x"}]},
            {"messages": [{}]},
            {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * 500}]},
            {
                "messages": [
                    {
                        "role": "assistant",
                        "tool_calls": [{"id": "x", "type": "function", "function": {"name": "f", "arguments": "{"}}],
                    }
                ]
            },
            {"tools": [{}]},
            {"tools": [{"type": "function", "function": {"name": "a b"}}]},
            {"tool_choice": {"type": "function"}},
            {"priority": 2},
            {"temperature": 1e-7},
            {"top_p": 5e-324},
            {"top_k": -1, "min_p": 1},
            {"tokens": [96, 97, 2**31 - 1]},
        ]
    )
    return [post(rng.choice([path, *ROUTES]), json.dumps(body | more).encode()), READ]


def pictures(rng: Random) -> list[Step]:
    """Images in every route that takes some, whose client may not wait for an answer."""
    path = rng.choice([*IMAGE_ROUTES, *IMAGE_ROUTES[:2]])
    if path == "/v1/inference":
        made: object = [image_url(rng).partition(",")[rng.choice([0, 2, 2])] for _ in range(rng.choice([1, 2, 17]))]
        body = {"prompt": rng.choice(["a", "<start_of_image>a"]), "images": rng.choice([made, made, made, [1], "x"])}
    else:
        body = {"input" if path == "/v1/responses" else "messages": image_turns(rng)}
    if path != "/tokenize":
        body |= {"max_tokens" if path != "/v1/responses" else "max_output_tokens": 3, "stream": rng.random() < 0.3}
    body.pop("stream", None) if path == "/v1/inference" else None
    raw = json.dumps(body).encode()
    return [post(path, raw), rng.choice([READ, READ, READ, RESET, 0.02, 0.3])]


KINDS: dict[str, Callable[[Random], list[Step]]] = {
    made.__name__: made
    for made in (
        *(field, number, text, broken, nest, doubled, many, constraint, headers, heads, noise, chunked, smuggled),
        *(pipelined, slow, vanishing, late, odd, pictures),
    )
}
