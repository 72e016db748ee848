"""Tokenizer files, BOS, chat and refusals."""

from __future__ import annotations

import json
import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import tokenizers
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from synthetic_tokenizer import BOS, END_OF_TURN, EOS, TURN, synthetic, write

from wicore_trt.errors import EngineFormatError, InvalidRequestError
from wicore_trt.text.detokenizer import IncrementalDetokenizer
from wicore_trt.text.tokenizer import Tokenizer
from wicore_trt.text.tokenizer_file import longest_token

BASE = {"tokenizer_config": {"bos_token": "<bos>", "eos_token": "<eos>"}}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_dir(write(tmp_path_factory.mktemp("tokenizer")))


def test_attributes_come_from_the_files(chat: Tokenizer) -> None:
    assert (chat.bos_id, chat.eos_ids, chat.has_chat) == (BOS, (EOS, END_OF_TURN), True)
    assert chat.vocab_size == synthetic().vocab_size
    assert len(chat.byte_ids) == 256


@pytest.mark.parametrize("post_processor", [False, True])
@pytest.mark.parametrize("text", ["hello", "<bos>hello", "", "<bos>"])
def test_bos_exactly_once(tmp_path: Path, post_processor: bool, text: str) -> None:
    tokenizer = Tokenizer.from_dir(write(tmp_path, post_processor=post_processor))
    ids = tokenizer.encode(text)
    assert ids[0] == BOS and ids.count(BOS) == 1
    assert tokenizer.encode(text, add_bos=False).count(BOS) == text.count("<bos>")


def test_model_without_bos(tmp_path: Path) -> None:
    config = {"eos_token": "<eos>", "bos_token": "<bos>", "add_bos_token": False}
    assert BOS not in Tokenizer.from_dir(write(tmp_path, tokenizer_config=config)).encode("hello")


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_text_survives(text: str) -> None:
    tokenizer = synthetic()
    for special in ("<bos>", "<eos>", "<end_of_turn>", "<start_of_turn>", "<pad>", "<unk>"):
        assume(special not in text)  # they are tokens of their own, which decoding leaves out
    assert tokenizer.decode(tokenizer.encode(text)) == text.replace("\u2581", " ")


def test_specials(chat: Tokenizer) -> None:
    assert chat.encode("<end_of_turn>", add_bos=False) == [END_OF_TURN]
    assert chat.decode([END_OF_TURN, *chat.encode("hello")]) == "hello"
    assert chat.decode([BOS, END_OF_TURN], skip_special=False) == "<bos><end_of_turn>"


@pytest.mark.parametrize("text", ["\ud800", "a\udfffb", 7])
def test_invalid_text_is_refused(chat: Tokenizer, text: str) -> None:
    with pytest.raises(InvalidRequestError) as error:
        chat.encode(text)
    assert error.value.field == "prompt"
    with pytest.raises(InvalidRequestError) as error:
        chat.apply_chat([{"role": "user", "content": text}])
    assert error.value.field == "messages"


@pytest.mark.parametrize("ids", [[-1], [1 << 40], ["a"]])
def test_decode_refuses_what_is_no_id(chat: Tokenizer, ids: list[int]) -> None:
    with pytest.raises(InvalidRequestError):
        chat.decode(ids)


@pytest.mark.parametrize(
    ("files", "eos"),
    [
        ({"generation_config": {"eos_token_id": 0}}, (0, EOS, END_OF_TURN)),
        ({"generation_config": {"eos_token_id": [0, 1, 0]}}, (0, 1, END_OF_TURN)),
        ({"generation_config": {}, "config": {"eos_token_id": 4}}, (4, EOS, END_OF_TURN)),
        ({"generation_config": None, "config": {"text_config": {"eos_token_id": [4]}}}, (4, EOS, END_OF_TURN)),
        ({"generation_config": {"config_eos_token_id": [4]}}, (4, EOS, END_OF_TURN)),
        ({"generation_config": None}, (EOS, END_OF_TURN)),
        ({"generation_config": None, "special_tokens_map": {"eos_token": "<pad>"}}, (EOS, 0, END_OF_TURN)),
        ({"generation_config": None, "tokenizer_config": {"eos_token": {"content": "<end_of_turn>"}}}, (END_OF_TURN,)),
        ({"generation_config": None, "tokenizer_config": None, "special_tokens_map": {"eos_token": "<eos>"}}, (EOS,)),
        # Base models end where the first file says, as in transformers.
        ({"generation_config": {"eos_token_id": 0}, "config": {"eos_token_id": [1, 5]}, **BASE}, (0,)),
        ({"generation_config": {"config_eos_token_id": [1, 5]}, **BASE}, (1, 5)),
        ({"generation_config": None, **BASE}, (EOS,)),
    ],
)
def test_end_ids(tmp_path: Path, files: dict[str, object], eos: tuple[int, ...]) -> None:
    assert Tokenizer.from_dir(write(tmp_path, **files)).eos_ids == eos


@pytest.mark.parametrize(
    "files",
    [
        {"generation_config": {"eos_token_id": "1"}},
        {"generation_config": {"eos_token_id": [True]}},
        {"generation_config": [1]},
        {"generation_config": None, "tokenizer_config": {"eos_token": "<nowhere>"}},
        {"generation_config": None, "tokenizer_config": {"bos_token": "<bos>"}},
        {"tokenizer_config": {"chat_template": "{% for %}"}},
        {"chat_template": {"chat_template": 7}},
    ],
)
def test_contradicting_files_are_refused(tmp_path: Path, files: dict[str, object]) -> None:
    with pytest.raises(EngineFormatError) as error:
        Tokenizer.from_dir(write(tmp_path, **files))
    assert error.value.fix


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json"])
@pytest.mark.parametrize("damage", ["cut", "binary", "pointer"])
def test_broken_files_are_refused(tmp_path: Path, name: str, damage: str) -> None:
    path = write(tmp_path) / name
    data = path.read_bytes()
    pointer = b"version https://git-lfs.github.com/spec/v1\n"
    path.write_bytes({"cut": data[: len(data) // 2], "binary": b"\x00\xff", "pointer": pointer}[damage])
    with pytest.raises(EngineFormatError, match=name) as error:
        Tokenizer.from_dir(tmp_path)
    assert error.value.fix


def test_missing_directory_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EngineFormatError, match="missing"):
        Tokenizer.from_dir(tmp_path / "nowhere")


def test_chat_template_sources(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D{{ messages[0].content }}"}, {"name": "other", "template": "O"}]
    write(tmp_path, tokenizer_config={"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": named})
    messages = [{"role": "user", "content": "x"}]
    seen = []
    files = [
        ("chat_template.json", '{"chat_template": "J{{ messages[0].content }}"}'),
        ("chat_template.jinja", "T{{ messages[0].content }}"),
    ]
    for name, text in [("", ""), *files]:
        if name:
            (tmp_path / name).write_text(text)
        tokenizer = Tokenizer.from_dir(tmp_path)
        seen.append(tokenizer.decode(tokenizer.apply_chat(messages)))
    assert seen == ["Dx", "Jx", "Tx"]


def test_chat_of_gemma(chat: Tokenizer) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": " hello "},
        {"role": "assistant", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": " world"}]},
        {"role": "user", "content": [{"type": "text", "text": "bye"}], "name": "x", "tool_calls": None},
    ]
    ids = chat.apply_chat(messages)
    assert ids[:2] == [BOS, TURN] and ids.count(BOS) == 1 and ids.count(END_OF_TURN) == 3
    assert chat.decode(ids, skip_special=False) == (
        "<bos><start_of_turn>user\nbe brief\n\nhello<end_of_turn>\n<start_of_turn>model\nhelloworld<end_of_turn>\n"
        "<start_of_turn>user\nbye<end_of_turn>\n<start_of_turn>model\n"
    )
    without = chat.apply_chat(messages, add_generation_prompt=False)
    assert ids[: len(without)] == without and chat.decode(ids[len(without) :], skip_special=False).endswith("model\n")


def test_aliases_of_roles(chat: Tokenizer) -> None:
    ids = [
        chat.apply_chat([{"role": s, "content": "a"}, {"role": "user", "content": "b"}, {"role": a, "content": "c"}])
        for s, a in (("system", "assistant"), ("developer", "model"))
    ]
    assert ids[0] == ids[1]


@pytest.mark.parametrize(
    ("messages", "says"),
    [
        ([], "non-empty"),
        ("hello", "non-empty list"),
        ([["user", "x"]], r"messages\[0\]"),
        ([{"content": "x"}], "role"),
        ([{"role": "tool", "content": "x"}], "of a call before it"),
        ([{"role": "wizard", "content": "x"}], "role"),
        ([{"role": ["user"], "content": "x"}], "role"),
        ([{"role": "user"}], "content"),
        ([{"role": "user", "content": None}], "content"),
        ([{"role": "user", "content": []}], "content"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}],
            "content.0. must be .*image",
        ),
        ([{"role": "user", "content": [{"type": "audio"}]}], r"content\[0\]"),
        ([{"role": "user", "content": [{"type": "text", "text": 1}]}], r"content\[0\]"),
        ([{"role": "user", "content": "x", "tool_calls": [1]}], "tool_calls"),
        ([{"role": "system", "content": "x"}], "no user turn"),
        ([{"role": "user", "content": "x", "prefix": True}], "prefix"),
        ([{"role": "assistant", "content": "x"}], "alternate"),
        ([{"role": "system", "content": "x"}] * 2, "no user turn"),
    ],
)
def test_wrong_messages_are_refused(chat: Tokenizer, messages: object, says: str) -> None:
    with pytest.raises(InvalidRequestError, match=says) as error:
        chat.apply_chat(messages)
    assert error.value.field == "messages"


def test_turns_of_one_role_in_a_row_become_one(chat: Tokenizer) -> None:
    roles = ["system", "developer", "user", "user", "assistant", "model", "user"]
    given = [{"role": role, "content": str(i)} for i, role in enumerate(roles)]
    whole = ["0\n\n1", "2\n\n3", "4\n\n5", "6"]
    merged = [{"role": r, "content": c} for r, c in zip(["system", *["user", "assistant"] * 2], whole, strict=False)]
    assert chat.apply_chat(given) == chat.apply_chat(merged)
    assert "0\n\n1\n\n2\n\n3" in chat.decode(chat.apply_chat(given))


def said(tokenizer: Tokenizer, messages: list[dict[str, object]], **more: object) -> str:
    return tokenizer.decode(tokenizer.apply_chat(messages, **more), skip_special=False)  # type: ignore[arg-type]


def turns(*pairs: tuple[str, object]) -> list[dict[str, object]]:
    return [{"role": role, "content": content} for role, content in pairs]


@pytest.mark.parametrize("template", [True, False])
def test_a_later_system_message_is_part_of_the_users_next_turn(tmp_path: Path, template: bool) -> None:
    more = {} if template else {"tokenizer_config": {"bos_token": "<bos>", "eos_token": "<eos>"}}
    tokenizer = Tokenizer.from_dir(write(tmp_path, **more))
    later = said(tokenizer, turns(("user", "a"), ("assistant", "b"), ("developer", "c"), ("user", "d")))
    assert later == said(tokenizer, turns(("user", "a"), ("assistant", "b"), ("user", "c\n\nd")))
    last = said(tokenizer, turns(("system", "s"), ("user", "a"), ("assistant", "b"), ("system", "c")))
    assert last == said(tokenizer, turns(("user", "s\n\na"), ("assistant", "b"), ("user", "c")))
    behind = said(tokenizer, turns(("user", "a"), ("system", "c"), ("assistant", "b"), ("user", "d")))
    assert behind == said(tokenizer, turns(("user", "a\n\nc"), ("assistant", "b"), ("user", "d")))


def test_where_ends_come_from(tmp_path: Path) -> None:
    tokenizer = Tokenizer.from_dir(
        write(tmp_path, generation_config={"eos_token_id": 1, "config_eos_token_id": [1, 4]})
    )
    assert tokenizer.described_ends() == (
        "1 '<eos>' (generation_config.json, config.json, tokenizer_config.json), 4 '<start_of_turn>' (config.json), "
        "5 '<end_of_turn>' (the chat template)"
    )


@pytest.mark.parametrize("added", [["<start_of_turn>"], ["<end_of_turn>"], []])
@pytest.mark.parametrize("template", [True, False])
def test_marks_of_turns_that_are_no_tokens_are_named(tmp_path: Path, added: list[str], template: bool) -> None:
    path = write(tmp_path, **({} if template else BASE)) / "tokenizer.json"
    file = json.loads(path.read_text())
    file["added_tokens"] = [t for t in file["added_tokens"] if "turn" not in t["content"] or t["content"] in added]
    path.write_text(json.dumps(file))
    tokenizer = Tokenizer.from_dir(tmp_path)
    mark = "<start_of_turn>" if added == ["<end_of_turn>"] else "<end_of_turn>"
    assert tokenizer.chat_fault is not None and f"its mark {mark} is " in tokenizer.chat_fault
    with pytest.raises(InvalidRequestError, match="cannot chat"):
        tokenizer.apply_chat([{"role": "user", "content": "a"}])
    assert tokenizer.encode("hello")


LOOP = "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.role }}\n{{ m.content }}<end_of_turn>\n{% endfor %}"


def with_template(directory: Path, template: str) -> Tokenizer:
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": template}
    return Tokenizer.from_dir(write(directory, tokenizer_config=config))


def test_what_a_template_takes_comes_as_it_was_given(tmp_path: Path) -> None:
    tokenizer = with_template(tmp_path, LOOP)
    given = turns(
        ("system", "s"), ("user", "a"), ("user", "b"), ("developer", "c"), ("assistant", "d"), ("system", "e")
    )
    assert said(tokenizer, given) == "<bos>" + "".join(
        f"<start_of_turn>{m['role']}\n{m['content']}<end_of_turn>\n" for m in given
    )
    without = LOOP.replace("{{ m.content }}", "{{ raise_exception('no') if m.role == 'system' }}{{ m.content }}")
    assert said(with_template(tmp_path, without), turns(("system", "s"), ("user", "a"))).count("user\ns") == 1


def test_variables_and_unknown_keys_reach_the_template(tmp_path: Path) -> None:
    template = "{{ bos_token }}{% if enable_thinking %}t{% endif %}"
    template += "{% for m in messages %}{{ m.mood }}{{ m.content }}{% endfor %}"
    tokenizer = with_template(tmp_path, template)
    given = [{"role": "user", "content": "a", "mood": "m"}]
    assert said(tokenizer, given) == "<bos>ma"
    assert said(tokenizer, given, chat_template_kwargs={"enable_thinking": True, "other": [1]}) == "<bos>tma"
    for wrong in ({"messages": []}, {"tools": []}, {"add_generation_prompt": False}, [1], {"x": {1}}):
        with pytest.raises(InvalidRequestError) as error:
            tokenizer.apply_chat(given, chat_template_kwargs=wrong)  # type: ignore[arg-type]
        assert error.value.field == "chat_template_kwargs"


def test_no_template_and_failing_templates(tmp_path: Path) -> None:
    messages = [{"role": "user", "content": "x"}]
    plain = synthetic()
    assert plain.decode(plain.apply_chat(messages), skip_special=False) == (
        "<bos><start_of_turn>user\nx<end_of_turn>\n<start_of_turn>model\n"
    )
    assert not plain.has_chat and plain.turn_end == END_OF_TURN
    base = {"bos_token": "<bos>", "eos_token": "<eos>"}
    for source in ("{{ 1 / 0 }}", "{{ messages.append(1) }}", "{{ ''.__class__.__mro__[1].__subclasses__() }}"):
        tokenizer = Tokenizer.from_dir(write(tmp_path, tokenizer_config=base | {"chat_template": source}))
        with pytest.raises(InvalidRequestError, match="cannot chat: its chat template takes no text"):
            tokenizer.apply_chat(messages)


def test_template_environment(tmp_path: Path) -> None:
    source = (
        "{% for m in messages %}\n{{ m.content }}{% break %}\n{% endfor %}\n"
        "{{ strftime_now('%Y')[:2] }}{{ {'a': '<é>'} | tojson }}"
    )
    config = {"bos_token": "<bos>", "eos_token": "<eos>", "chat_template": source}
    tokenizer = Tokenizer.from_dir(write(tmp_path, tokenizer_config=config))
    assert tokenizer.decode(tokenizer.apply_chat([{"role": "user", "content": "x"}])) == 'x20{"a": "<é>"}'


def test_threads_share_one_tokenizer(chat: Tokenizer) -> None:
    def work(i: int) -> bool:
        text = f"hello world {'abc'[i % 3]}" * (i % 7 + 1)
        ids = chat.apply_chat([{"role": "user", "content": text}])
        return text in chat.decode(ids) and chat.decode(chat.encode(text)) == text

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(200)))


def test_same_as_transformers(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    write(tmp_path)
    theirs = transformers.PreTrainedTokenizerFast.from_pretrained(tmp_path)
    ours = Tokenizer.from_dir(tmp_path)
    for text in ["hello  world", " hello", "a<end_of_turn>\nb", "naïve 😀 日本", ""]:
        assert ours.encode(text) == theirs.encode(text)
        assert ours.decode(ours.encode(text)) == theirs.decode(ours.encode(text), skip_special_tokens=True)
    messages = [{"role": "system", "content": "s"}, {"role": "user", "content": "u "}]
    rendered = theirs.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert ours.apply_chat(messages) == theirs.encode(rendered, add_special_tokens=False)


def turns_of_another_thread(work) -> int:
    """How often another thread ran while `work` did."""
    turns, begun, running = 0, threading.Event(), True

    def tick() -> None:
        nonlocal turns
        begun.wait()
        while running:
            time.sleep(0.001)
            turns += running

    thread = threading.Thread(target=tick)
    thread.start()
    begun.set()
    work()
    running = False
    thread.join()
    return turns


@pytest.mark.model
def test_real_tokenizer(engine_270m: Path) -> None:
    tokenizer = Tokenizer.from_dir(engine_270m)
    assert (tokenizer.bos_id, tokenizer.vocab_size, tokenizer.has_chat) == (2, 262144, False)
    assert 1 in tokenizer.eos_ids and len(tokenizer.byte_ids) == 256 and tokenizer.token_text(9259) == "Hello"
    text = "Hello world,  naïve\n\n🙂 日本語 \U000e0041\U0001f9ff ᚠᛇᚻ 𓀀𓂀"
    ids = tokenizer.encode(text)
    assert ids[:3] == [2, 9259, 1902] and tokenizer.byte_ids.intersection(ids)
    assert tokenizer.decode(ids) == text
    detokenizer = IncrementalDetokenizer(tokenizer, stop=("𓂀",))
    assert "".join(detokenizer.push_ids([i]) for i in ids) + detokenizer.flush_text() == text[:-1]
    assert detokenizer.matched == "𓂀"

    rng = random.Random(1)
    long = "".join(rng.choice("abcdefghijklmnopqrstuvwxyz ") for _ in range(200_000))
    end = time.monotonic() + 60  # on a busy machine another thread has few turns, by chance
    while turns_of_another_thread(lambda: tokenizer.encode(long)) <= 5:
        assert time.monotonic() < end, "other threads were kept from running"
    assert tokenizer.longest_token == 31


def test_a_token_stands_for_no_more_characters_than_the_tokenizer_says() -> None:
    """So a text of more than max_tokens times as many is refused before it is encoded, and no other one is."""
    tokenizer, rng = synthetic(), random.Random(1)
    longest = tokenizer.longest_token
    assert longest is not None and longest >= len("<end_of_turn>")
    pieces = [*tokenizer._backend.get_vocab(with_added_tokens=True), " ", "\n", "é", "\U0001f600", "a\u0300", "\0"]
    for _ in range(300):
        text = "".join(rng.choice(pieces) * rng.choice((1, 1, 5)) for _ in range(rng.randint(1, 30)))
        tokens = tokenizer.encode(text, add_bos=False)
        assert len(text) <= len(tokens) * longest, text
        assert tokenizer.encode(text, add_bos=False, max_tokens=len(tokens)) == tokens
    with pytest.raises(InvalidRequestError, match="at least 11") as error:
        tokenizer.encode("a" * (10 * longest + 1), max_tokens=10)
    assert error.value.field == "prompt"
    assert tokenizer.encode("<end_of_turn>" * 10, add_bos=False, max_tokens=10)


def test_where_a_tokenizer_may_lose_characters_no_text_is_refused_by_its_length() -> None:
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0, "<unk>": 1}, "<unk>"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    assert longest_token(backend, backend.get_vocab()) is None
    stripping = tokenizers.Tokenizer.from_str(synthetic()._backend.to_str())
    assert longest_token(stripping, stripping.get_vocab()) is not None
    stripping.add_tokens([tokenizers.AddedToken("<greedy>", lstrip=True)])
    assert longest_token(stripping, stripping.get_vocab()) is None
    for normalizer in (tokenizers.normalizers.NFC(), tokenizers.normalizers.Replace("ab", "c")):
        losing = tokenizers.Tokenizer.from_str(synthetic()._backend.to_str())
        losing.normalizer = normalizer
        assert longest_token(losing, losing.get_vocab()) is None
