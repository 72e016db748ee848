"""Check that the tokenizer files of a checkpoint make a tokenizer of its model, before hours of work build on them.

It knows nothing of weights. Invariant: a tokenizer that passes loads in the engine, and its model's ids are rows of
the embedding. The builder is told where answers end and, if so, why the model cannot chat.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from wicore_trt.checkpoint.names import TEXT_ONLY
from wicore_trt.errors import CheckpointError, EngineFormatError, shown
from wicore_trt.files import TOKENIZER_BYTES, UntrustedFiles, is_present
from wicore_trt.text.tokenizer import Tokenizer

_CONFIG, _ROLES, _ADDED = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
_FLAGS = ("id", "lstrip", "rstrip", "normalized", "single_word")  # which text becomes a token


def check_tokenizer(directory: Path, source: str, vocab_size: int, marks: Sequence[int] = ()) -> list[str]:
    """Check the files of `directory`, which come from `source`, against an embedding of `vocab_size` rows, and `marks`,
    tokens in and around images, against their text. Without tokenizer.json there is nothing to check. Returns
    sentences for the user. Raises CheckpointError in terms of the source."""
    if not (directory / "tokenizer.json").is_file():
        return []
    try:
        tokenizer = Tokenizer.from_dir(directory)
    except EngineFormatError as error:
        message = error.message.replace(str(directory), source)
        raise CheckpointError(message, fix="Download the model's tokenizer files again.") from error
    ids = {i for i in (*tokenizer.eos_ids, tokenizer.bos_id, tokenizer.model_size - 1) if i is not None}
    if max(ids) >= vocab_size:
        problem = f"{source}: its tokenizer has the id {max(ids)}, but the model has {vocab_size} tokens."
        raise CheckpointError(problem, fix="Take tokenizer and weights from the same model.")
    text = tokenizer.decode(marks, skip_special=False)
    if tokenizer.encode(text, add_bos=False) != [*marks]:
        problem = f"{source}: its tokenizer has no marks {[*marks]} around images; their text is {shown(text)}."
        raise CheckpointError(problem, fix=f"Take tokenizer and config.json from the same model. {TEXT_ONLY}")
    notes = [f"answers end at {tokenizer.described_ends()}.", *filter(None, (tokenizer.chat_note,))]
    notes += [*tokenizer.chat_doubts(), *_compare_places(directory, source)]
    beyond = range(vocab_size, tokenizer.vocab_size)
    if not beyond:
        return notes
    tokens = f"{len(beyond)} added token{'s' if len(beyond) > 1 else ''} beyond the model's {vocab_size} rows"
    first = shown(tokenizer.decode(beyond[:1], skip_special=False))
    return [*notes, f"the tokenizer has {tokens}, from {first} on; text that holds one is refused."]


def _compare_places(directory: Path, source: str) -> list[str]:
    """Compare the tokenizer's other files with tokenizer.json and each other; returns sentences on ignored values.
    Raises CheckpointError for a token that tokenizer.json does not hold as another file has it."""
    door, names = UntrustedFiles(directory), ("tokenizer.json", _CONFIG, _ROLES, _ADDED)
    files = (door.read_json(directory / n, limit=TOKENIZER_BYTES) if is_present(directory / n) else {} for n in names)
    backend, config, roles, added = files
    tokens = [(_ADDED, {"content": content, "id": index}) for content, index in added.items()]
    decoder = _as_object(config.get("added_tokens_decoder"))
    tokens += [(_CONFIG, {**_as_object(t), "id": int(i) if i.isdecimal() else i}) for i, t in decoder.items()]
    for place, file in ((_CONFIG, config), (_ROLES, roles)):
        for key in ("additional_special_tokens", "extra_special_tokens"):
            more = file.get(key) or ()
            for token in more.values() if isinstance(more, dict) else more:
                tokens.append((place, {**_as_object(token)} or {"content": token}))
    known = {token["content"]: token for token in backend.get("added_tokens", ())}
    for place, token in tokens:
        have = known.get(str(token.get("content")))
        if have is None or any(token.get(key, have[key]) != have[key] for key in _FLAGS):
            problem = f"{source}: {place} has the token {shown(token.get('content'))} that tokenizer.json has not so."
            fix = "Load the tokenizer with transformers and save it again: that makes its files agree."
            raise CheckpointError(problem, fix=fix)
    return [*_compare_roles(backend, config, roles), *_compare_templates(directory, config)]


def _compare_roles(backend: Mapping[str, Any], config: Mapping[str, Any], roles: Mapping[str, Any]) -> list[str]:
    """Return sentences on a BOS that two files name, and on what tokenizer.json puts around a text."""
    notes = list[str]()
    one, two = (_as_object(file.get("bos_token")).get("content", file.get("bos_token")) for file in (config, roles))
    if None not in (one, two) and one != two:
        notes.append(f"bos_token is {shown(one)} in {_CONFIG}, {shown(two)} in {_ROLES}: the first counts.")
    single = _as_object(backend.get("post_processor")).get("single") or [{}]
    before, behind = ("SpecialToken" in single[at] for at in (0, -1))
    adds = (one or two) is not None and config.get("add_bos_token") is not False
    if before != adds:
        notes.append(f"texts begin with{'' if adds else 'out'} BOS here; tokenizer.json says otherwise.")
    if behind and len(single) > 1:
        notes.append("tokenizer.json ends each text with a token that is left out, so that answers go on from it.")
    return notes


def _compare_templates(directory: Path, config: Mapping[str, Any]) -> list[str]:
    door, given, notes = UntrustedFiles(directory), config.get("chat_template"), list[str]()
    if isinstance(given, list):
        named = {t.get("name"): t.get("template") for t in given if isinstance(t, dict)}
        given = named.pop("default", None)
        notes += [f"the chat template {shown(name)} is left aside: default serves every chat." for name in named]
    outer, jinja = directory / "chat_template.json", directory / "chat_template.jinja"
    templates = {
        jinja.name: door.read_text(jinja) if is_present(jinja) else None,
        outer.name: door.read_json(outer).get("chat_template") if is_present(outer) else None,
        _CONFIG: given,
    }
    texts = {name: text.strip() for name, text in templates.items() if isinstance(text, str)}
    if len({*texts.values()}) > 1:
        notes.append(f"{' and '.join(texts)} hold different chat templates: that of {next(iter(texts))} counts.")
    return notes


def _as_object(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, dict) else {}
