"""Hostile values: what a body, a message or a constraint may hold that nobody would write by mistake.

Each function draws from a random.Random alone, so that an input follows from its seed and number.
"""

from __future__ import annotations

import base64
import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

sys.path.append(str(Path(__file__).resolve().parent.parent / "images"))

import hostile_files

NUMBERS = (
    *("1e400", "-1e400", "1e-400", "NaN", "Infinity", "-Infinity", "-0", "-0.0", "9223372036854775807"),
    *("9223372036854775808", "-9223372036854775809", "18446744073709551616", "1e19", "0.1e1", "01", "1.", ".5"),
    *("+1", "0x10", "1_000", "1e", "1" * 400, "1" * 5000, "0." + "0" * 400 + "1", "2147483648", "4294967296", "true"),
)
TEXTS = (
    *('"\\ud800"', '"\\udfff\\ud800"', '"\\u0000"', '"\x00"', '"\\x"', '"\\u12"', '"unterminated', '""', '"\ufeff"'),
    *('"\U0001f9ff\\ud83d"', '"a\nb"', "'single'", '"\x7f\x1b[2J"', '"%s%n{}"', '"../../etc/passwd"', '"\u202e"'),
)
FIELDS = (
    *("model", "prompt", "messages", "max_tokens", "min_tokens", "temperature", "top_p", "top_k", "min_p", "n", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "logit_bias", "stop", "stop_token_ids", "stream"),
    *("include_stop_str_in_output", "ignore_eos", "priority", "cache_salt", "cache", "timeout", "stream_options"),
    *(
        "response_format",
        "structured_outputs",
        "guided_json",
        "guided_regex",
        "guided_choice",
        "guided_grammar",
        "echo",
    ),
    *("logprobs", "top_logprobs", "tools", "tool_choice", "parallel_tool_calls", "max_completion_tokens", "user"),
    *("add_special_tokens", "best_of", "functions", "images", "tokens", "add_generation_prompt", "temprature", ""),
)


def nested(rng: Random, depth: int) -> str:
    """Brackets in brackets, sometimes not closed."""
    opening, closing = rng.choice([("[", "]"), ('{"a":', "}"), ('[{"a":[', "]}]")])
    return opening * depth + rng.choice(["1", "", '"x"', "null"]) + closing * rng.choice([depth, depth, depth - 1, 0])


def raw_value(rng: Random, depth: int = 2) -> str:
    """A JSON value as text, not always valid."""
    match rng.randrange(12):
        case 0 | 1 | 2:
            return rng.choice(NUMBERS)
        case 3 | 4:
            return rng.choice(TEXTS)
        case 5:
            return json.dumps(rng.choice(["", "a" * rng.choice([1, 65, 257, 5000]), "\u00e9" * 300, "hello"]))
        case 6:
            return rng.choice(["true", "false", "null", "nul", "TRUE", "undefined"])
        case 7:
            return nested(rng, rng.choice([3, 70, 600, 5000]))
        case 8 if depth:
            return "[" + ",".join(raw_value(rng, depth - 1) for _ in range(rng.choice([0, 1, 3, 40]))) + "]"
        case 9 if depth:
            pairs = (f'"{rng.choice(FIELDS)}":{raw_value(rng, depth - 1)}' for _ in range(rng.choice([0, 1, 3, 30])))
            return "{" + ",".join(pairs) + "}"
        case 10:
            return json.dumps([rng.choice(["x", 1, None, {}]) for _ in range(rng.choice([17, 1025, 10_000]))])
        case _:
            return json.dumps({str(i): rng.choice([100, -100, 101, 1e308]) for i in range(rng.choice([1, 90, 1025]))})


def regex(rng: Random) -> str:
    """Regular expressions that are dear to compile or to follow."""
    n = rng.choice([3, 10, 40, 200, 2000])
    return rng.choice(
        (
            "(a+)+b",
            f"(a|b)*a(a|b){{{n}}}",
            "a?" * n + "a" * n,
            ".*" * n,
            "(" * n + "a" + ")" * n,
            f"[^a]{{0,{n}}}",
            "((((a{9}){9}){9}){9}){9}",
            f"(.{{0,{n}}}){{{n}}}",
            "(a|" * n + "b" + ")" * n,
            r"(\p{L}\p{N}\w\W){200}",
            "[",
            "(?<",
            "\\",
            "(?=a)",
            "a{2147483648}",
            "\\1(a)",
            "(?i)" * n,
            "[^\\x00-\\U0010ffff]",
            "$^",
            "\U0001f600+",
            "|".join(str(i * 7919) for i in range(n)),
        )
    )


def lark(rng: Random) -> str:
    """Lark grammars that recurse, nest and repeat."""
    n = rng.choice([5, 60, 400, 4000])
    return rng.choice(
        (
            'start: start "a" | "b"',
            'start: s\ns: s s s | s s | "a" | ',
            "start: start",
            "start: missing",
            "start:",
            "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(n)) + f'a{n}: "x"',
            "start: a0\n" + "".join(f"a{i}: a{i + 1}\n" for i in range(n)) + f'a{n}: "x"',
            "start: T0\n" + "".join(f"T{i}: T{i + 1} T{i + 1}\n" for i in range(min(n, 30))) + f'T{min(n, 30)}: "x"',
            "start: " + "a? " * n + '\na: b? b?\nb: "x"? /[a-z]/?',
            "start: " + "(" * n + '"a"' + ")" * n,
            f'start: "a"{{1,{n * 1000}}}',
            'start: ((("a"{1,100}){1,100}){1,100}){1,100}',
            "start: /" + "a.*" * n + "/",
            "start: ("
            + " | ".join(f"T{i}" for i in range(n))
            + ")*\n"
            + "".join(f"T{i}: /[a-z ]{{1,{i + 1}}}/\n" for i in range(n)),
            "start: T\nT: " + " & ".join(f"~/.*a.{{{i}}}/" for i in range(min(n, 20))),
            "%import common.WORD\nstart: WORD",
            'start: a\na: %json {"type":"object"}',
            "\x00",
            "start: " + "| " * n,
        )
    )[:131072]


def schema(rng: Random) -> object:
    """Schemas that recurse, multiply, or hold what cannot be kept."""
    n = rng.choice([3, 30, 300, 3000])
    halves = [{"type": "object", "properties": {f"p{i}": {"const": i}}} for i in range(min(n, 40))]
    found: tuple[object, ...] = (
        {"$ref": "#"},
        {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
        {"$ref": "http://example.com/x"},
        {"enum": [f"{i * 7919:x}" for i in range(n * 3)]},
        {"enum": []},
        {},
        True,
        False,
        {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(n)}},
        {"type": "object", "properties": {f"p{i}": {} for i in range(n)}, "required": [f"p{i}" for i in range(n)]},
        {"$defs": {f"a{i}": {"$ref": f"#/$defs/a{i + 1}"} for i in range(n)} | {f"a{n}": {}}, "$ref": "#/$defs/a0"},
        {
            "$defs": {f"a{i}": {"type": "array", "items": {"$ref": f"#/$defs/a{i + 1}"}} for i in range(n)}
            | {f"a{n}": {}},
            "$ref": "#/$defs/a0",
        },
        {
            "$defs": {f"a{i}": {"allOf": [{"$ref": f"#/$defs/a{i + 1}"}] * 2} for i in range(min(n, 40))}
            | {f"a{min(n, 40)}": {"type": "string"}},
            "$ref": "#/$defs/a0",
        },
        {"allOf": [{"anyOf": halves}] * min(n, 12)},
        {"oneOf": halves},
        {"not": {}},
        {"type": "array", "minItems": n * 1000},
        {"type": "string", "pattern": regex(rng)},
        {"type": "string", "minLength": n, "maxLength": n * n},
        {"type": "number", "multipleOf": 1e-300},
        {"type": "integer", "minimum": 5, "maximum": 2},
        {"type": 7},
        [],
        3,
        {"type": "object", "patternProperties": {f"^{i}a*b*$": {} for i in range(min(n, 300))}},
        {"x-guidance": {"lenient": True, "whitespace_pattern": regex(rng)}, "type": "object"},
        json.loads("[" * 90 + "]" * 90),
        {"type": "string", "format": "uuid"},
        {"properties": 1},
        {"required": [1]},
    )
    return rng.choice(found)


def bits(rng: Random, data: bytes) -> bytes:
    """Some bits of these bytes are flipped, some bytes are gone, doubled or new."""
    found = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 5, 20])):
        at = rng.randrange(len(found) + 1)
        match rng.randrange(5):
            case 0 | 1 if at < len(found):
                found[at] ^= 1 << rng.randrange(8)
            case 2:
                del found[at : at + rng.choice([1, 2, 8, 64])]
            case 3:
                found[at:at] = rng.randbytes(rng.choice([1, 4, 16]))
            case _:
                found[at:at] = found[at : at + rng.choice([1, 8, 64])]
    return bytes(found)


Draw = Callable[[Random], object]


def image_file(rng: Random) -> bytes:
    """A small picture, often broken; one in a hundred takes a decoder seconds."""
    if rng.random() < 0.3:
        return hostile_files.whole_file(rng, rng.choice(["PNG", "JPEG", "WEBP", "BMP", "GIF"]))
    return rng.choice(hostile_files.SLOW if rng.random() < 0.01 else hostile_files.KINDS)(rng) or b"\0"


def image_url(rng: Random) -> str:
    text = base64.b64encode(image_file(rng)).decode()
    return rng.choice(
        [
            *[f"data:image/png;base64,{text}"] * 12, f"data:;base64,{text[:-3]}", f"data:image/x,{text}",
            "data:,", f"DATA:image/jpeg;charset=x;BASE64,{text[:20]} \n{text[20:]}", f"data:;base64,{text}====",
            text, "data:", "data:;base64,\u00e9", "data:;base64," + "A" * rng.choice([1, 100_000, 3_000_000]), "",
            "ftp://x/y", "http:", "data:,%" + "%41" * 1000 + "%zz", "http://127.0.0.1:1/x.png", "http://169.254.169.254/latest/meta-data",
            "http://a@b/c", "https://[::1]/a", "file:///etc/passwd", "http://" + "a" * 5000, "gopher://x", "\0",
        ]
    )  # fmt: skip


def image_part(rng: Random) -> object:
    """A part of a message in one of the spellings of the APIs, or in one of none."""
    url, more = image_url(rng), rng.choice([{}, {}, {"detail": rng.choice(["high", "low", "auto", "x", 1, None])}])
    data = url.partition(",")[2]
    return rng.choice(
        [
            *[{"type": "image_url", "image_url": {"url": url} | more}] * 4, {"type": "image_url", "image_url": url},
            {"type": "input_image", "image_url": url} | more, {"type": "image", "url": url},
            {"type": "image", "image": data},
            {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": data}},
            {"type": "image", "source": {"type": "url", "url": url}}, {"type": "image"},
            {"type": "image_url", "image_url": 7},
            {"type": "image", "source": {"type": "base64", "data": [data]}}, {"type": "input_image", "file_id": "f"},
            {"type": "text", "text": "<start_of_image><image_soft_token>\x7f"}, {"type": "input_text"}, url, None,
        ]
    )  # fmt: skip


def image_turns(rng: Random) -> list[object]:
    """A conversation with images, also where none may be."""
    roles = ["user"] * 8 + ["system", "assistant", "tool", "developer", "x"]
    counts = rng.choice([[1], [1], [2, 1], [0, 3], [17], [1] * 5])
    return [
        {"role": "user" if i == 0 and rng.random() < 0.8 else rng.choice(roles),
         "content": [image_part(rng) for _ in range(count)] or "a"}
        for i, count in enumerate(counts)
    ]  # fmt: skip
