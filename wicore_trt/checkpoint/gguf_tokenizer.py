"""Make Gemma's tokenizer files, as Hugging Face's `tokenizers` reads them, from GGUF metadata.

It knows nothing of weights. Invariants: a vocabulary has one piece per row of the embedding and ids inside of it;
ids equal those of transformers' AutoTokenizer for the same file, but for special tokens that the file types as text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

from wicore_trt.checkpoint.gguf_file import MetadataKeys
from wicore_trt.errors import CheckpointError, list_some, named, shown

SPACE = "\u2581"  # SentencePiece's visible space
MAX_PIECE = 256  # characters of a piece; Gemma's longest has 31
_MAX_CHARACTERS = 1 << 22  # of all pieces; Gemma's have 1.5 million
_MAX_MERGES = 2_000_000  # Gemma has 0.5 million
_NORMAL, _CONTROL, _USER_DEFINED, _BYTE = 1, 3, 4, 6
_MAX_TYPE = 6
_BYTES = re.compile("<0x[0-9A-F]{2}>")
_UNK = 3  # SentencePiece's unknown token where the file does not name it
_PREFIX = "tokenizer.ggml."
_TEMPLATE = "tokenizer.chat_template"
_END_OF_TURN = "<end_of_turn>"
_MARK = re.compile(r"<[^<>]+>|\[[^\[\]]+\]", re.DOTALL)  # how special tokens are spelt
_SPECIAL = re.compile(  # those of Gemma that stand for no text
    r"<(pad|eos|bos|unk|mask|2mass|(start|end)_of_(turn|image)|image_soft_token|unused\d+)>|\[@BOS@\]|<\|.+\|>"
)
_MODELS = ("llama", "gpt2", "gemma4")  # the last are BPE with merges
_ONLY = {  # what llama.cpp can be asked for with other tokenizers, at the one value that Gemma's have
    "add_space_prefix": False, "add_eos_token": False, "add_sep_token": False, "remove_extra_whitespaces": False,
    "add_padding_token": False, "add_unknown_token": False,
}  # fmt: skip
_PRE = ("default", "gemma4")  # the second is how llama.cpp splits text whose spaces are visible
_USED = {"model", "pre", "tokens", "token_type", "scores", "merges", "add_bos_token", "eos_token_ids"}
_ENDS = ("eos", "eot", "eom")
_IDS = {"bos", *_ENDS, "unknown", "padding"}  # keys NAME_token_id that are used; in other places of a model the rest
_IDLE_IDS = {
    "seperator", "separator", "cls", "mask", "prefix", "suffix", "middle", "fim_pre", "fim_suf", "fim_mid", "fim_pad",
    "fim_rep", "fim_sep", "image", "boi", "eoi",
}  # fmt: skip
_IDLE = {"tokenizer.chat_templates", "tokenizer.huggingface.json", "tokenizer.rwkv.world"}  # no loader reads them
_BOS = re.compile(r"[^\s$:]+")  # what a template of `tokenizers` can name


# GGUF of model "llama" stores SentencePiece pieces without merges, which follow from the vocabulary: a piece can come
# from any two pieces that it splits into, and pieces merge in the order of their ids. llama.cpp's converter writes
# model "gpt2" where tokenizer.model is missing: the same pieces, and the merges of tokenizer.json. Normalizer,
# splitter and decoder are those of Gemma's published tokenizer.json.
@dataclass(frozen=True, slots=True)
class GgufVocabulary:
    """Tokenizer of a GGUF file. `pieces[i]` is the spelling of token i in the file, `kinds[i]` its SentencePiece
    type.
    `bos` and the like are ids or None; `ends` are all ids that end a generation, ascending. `merges` are the file's
    own, None where they follow from the pieces. `templates` are the chat templates beside `chat_template`, by name.
    `place` is the file, for errors; `notes` are sentences for the user."""

    place: str
    pieces: list[str]
    kinds: list[int]
    bos: int | None
    eos: int | None
    unk: int | None
    pad: int | None
    ends: list[int]
    adds_bos: bool
    chat_template: str | None
    templates: dict[str, str] = field(default_factory=dict)
    merges: list[tuple[str, str]] | None = None
    notes: list[str] = field(default_factory=list)


def read_vocabulary(metadata: Mapping[str, Any], size: int, place: str) -> GgufVocabulary:
    """Read the tokenizer from the metadata of the file `place`, whose embedding has `size` rows.
    End ids are eos, end of turn if named, and `<end_of_turn>` when there is a chat template. Raises CheckpointError,
    naming the key, for another kind of tokenizer and for contradictions."""
    keys = _TokenizerKeys(metadata, place, _PREFIX)
    model, pre = metadata.get(f"{_PREFIX}model"), metadata.get(f"{_PREFIX}pre")
    if model not in _MODELS:
        problem = f"{place}: its tokenizer is {shown(model)}; Gemma's is 'llama' (SentencePiece) or 'gpt2'."
        raise CheckpointError(problem)
    if pre is not None and pre not in _PRE:
        raise keys.make_value_error("pre", pre, "one of " + ", ".join(map(repr, _PRE)) + " for Gemma")
    pieces = keys.read_pieces(size)
    if model != "llama" and not {SPACE, "<0x00>", "<0xFF>"} <= set(pieces):
        problem = f"{place}: its tokenizer is {model!r} of bytes spelt as letters, as Llama 3's is, not Gemma's."
        raise CheckpointError(problem)
    kinds = keys.read_kinds(pieces)
    ids = {keys.read_token_id(f"{name}_token_id", size) for name in _IDS}
    marked = _mark_specials(pieces, kinds, {*ids, *keys.read_ends(size)})
    keys.check_pieces(pieces, kinds)
    if model == "llama":  # merges decide elsewhere; Ollama's converter writes ids as scores there
        keys.check_scores(pieces, kinds)
    keys.refuse_others()
    templates: dict[str, str] = {}
    for key, value in metadata.items():
        if key == _TEMPLATE or key.startswith(f"{_TEMPLATE}."):
            if not isinstance(value, str):
                raise CheckpointError(f"{place}: {named(key)} is {shown(value)}; it must be text.")
            templates[key.removeprefix(_TEMPLATE).removeprefix(".") or "default"] = value
    template = templates.pop("default", None)
    bos = keys.read_token_id("bos_token_id", size)
    if bos is not None and not _BOS.fullmatch(pieces[bos]):
        raise keys.make_value_error("bos_token_id", pieces[bos], "a word such as <bos>")
    eos, unk = keys.read_token_id("eos_token_id", size), keys.read_token_id("unknown_token_id", size)
    ends = {*(keys.read_token_id(f"{end}_token_id", size) for end in _ENDS), *keys.read_ends(size)}
    if template is not None and _END_OF_TURN in pieces:
        ends.add(pieces.index(_END_OF_TURN))
    if unk is None and size <= _UNK:
        raise keys.make_missing_error("unknown_token_id")
    merges, notes = keys.read_merges(pieces, needed=model != "llama"), list[str]()
    if merges is not None:
        made, vocab = {"".join(pair) for pair in merges}, set(pieces)
        texts = (p for p, k in zip(pieces, kinds, strict=True) if k == _NORMAL)
        lost = [p for p in texts if p not in made and _is_made_of_two(p, vocab)]
        if lost:
            notes.append(
                f"{len(lost)} pieces, as {shown(lost[0])}, come from no merge of the file: text becomes others."
            )
    if marked:
        notes.append(f"the file types {list_some(marked)} as text; each is read as one special token.")
    return GgufVocabulary(
        place=place, pieces=pieces, kinds=kinds, bos=bos, eos=eos, unk=unk,
        pad=keys.read_token_id("padding_token_id", size), ends=sorted(end for end in ends if end is not None),
        adds_bos=keys.find_value("add_bos_token", bool, "a boolean") is not False,
        chat_template=template, templates=templates, merges=merges, notes=notes,
    )  # fmt: skip


def _mark_specials(pieces: list[str], kinds: list[int], ids: set[int | None]) -> list[str]:
    """Correct `kinds` of special tokens that a converter typed as text; returns the pieces corrected.
    Special are Gemma's own, the `ids` that keys name, and pieces spelt as marks that no two pieces merge to: text
    could never become those. No piece that Gemma's vocabulary types as text is one."""
    vocab, marked = set(pieces), []
    for index, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)):
        if kind in (_CONTROL, _USER_DEFINED, _BYTE) or not _MARK.fullmatch(piece) or _BYTES.fullmatch(piece):
            continue
        special = index in ids or _SPECIAL.fullmatch(piece) is not None
        if special or (kind <= _NORMAL and not _is_made_of_two(piece, vocab)):
            kinds[index] = _CONTROL if special else _USER_DEFINED
            if kind == _NORMAL:
                marked.append(piece)
    return marked


def _is_made_of_two(piece: str, vocab: Container[str]) -> bool:
    return any(piece[:cut] in vocab and piece[cut:] in vocab for cut in range(1, len(piece)))


class _TokenizerKeys(MetadataKeys):
    def find_value(self, key: str, kind: type, expected: str) -> Any:
        value = self.find_metadata(key)
        if value is not None and (not isinstance(value, kind) or (kind is int and isinstance(value, bool))):
            raise self.make_value_error(key, value, expected)
        return value

    def read_token_id(self, key: str, size: int) -> int | None:
        value: int | None = self.find_value(key, int, "a token id")
        if value is not None and not 0 <= value < size:
            raise self.make_value_error(key, value, f"an id below {size}, the size of the vocabulary")
        return value

    def read_ends(self, size: int) -> list[int]:
        key = "eos_token_ids"
        values: list[Any] = self.find_value(key, list, "a list of token ids") or []
        if not all(isinstance(v, int) and not isinstance(v, bool) and 0 <= v < size for v in values):
            raise self.make_value_error(key, values, f"a list of ids below {size}, the size of the vocabulary")
        return values

    def read_pieces(self, size: int) -> list[str]:
        """Read the tokens: one per row of the embedding, each once, none empty or so long that merging takes ages."""
        pieces = self.find_value("tokens", list, "a list of tokens")
        if pieces is None:
            raise self.make_missing_error("tokens")
        if not all(isinstance(piece, str) for piece in pieces):
            raise self.make_value_error("tokens", pieces, "a list of text")
        if len(pieces) != size:
            problem = f"{self._place}: {_PREFIX}tokens has {len(pieces)} tokens, but the embedding has {size} rows."
            raise CheckpointError(problem)
        for index, piece in enumerate(pieces):
            if not 0 < len(piece) <= MAX_PIECE:
                wanted = f"1 to {MAX_PIECE} characters long, not {len(piece)}"
                raise self.make_value_error(f"tokens[{index}]", piece, wanted)
        if sum(map(len, pieces)) > _MAX_CHARACTERS:
            raise CheckpointError(f"{self._place}: {_PREFIX}tokens has more than {_MAX_CHARACTERS} characters.")
        places: dict[str, int] = {}
        for index, piece in enumerate(map(_respell_spaces, pieces)):
            if places.setdefault(piece, index) != index:
                raise self.make_value_error(f"tokens[{index}]", piece, f"another one than token {places[piece]}")
        return list[str](pieces)

    def read_kinds(self, pieces: list[str]) -> list[int]:
        """Read SentencePiece's type of each piece as a new list; 0 where the file has none.
        Pieces spelt as a byte and typed as text become bytes: BPE has no type for those."""
        size = len(pieces)
        kinds = self.find_value("token_type", list, "a list of types") or [0] * size
        if len(kinds) != size or not all(type(k) is int and 0 <= k <= _MAX_TYPE for k in kinds):
            raise self.make_value_error("token_type", kinds, f"{size} types from 0 to {_MAX_TYPE}, one per token")
        return [_BYTE if k == _NORMAL and _BYTES.fullmatch(p) else k for p, k in zip(pieces, kinds, strict=True)]

    def read_merges(self, pieces: list[str], *, needed: bool) -> list[tuple[str, str]] | None:
        """Read the file's merges. Merges beside SentencePiece's scores are not used, but must give the same pieces."""
        merges = self.find_value("merges", list, "a list of merges")
        if needed and not merges:
            raise self.make_missing_error("merges")
        if not merges:
            return None
        pairs = [tuple(merge.split(" ")) if isinstance(merge, str) else () for merge in merges]
        odd = next((index for index, pair in enumerate(pairs) if len(pair) != 2), None)
        if odd is not None:
            raise self.make_value_error(f"merges[{odd}]", merges[odd], "two pieces with a space between them")
        if needed:
            return pairs  # type: ignore[return-value]
        vocab = {piece: index for index, piece in enumerate(pieces)}
        order = [vocab.get("".join(pair), -1) for pair in pairs]
        if -1 in order or order != sorted(order):
            wanted = "in the order of the pieces that they make, as SentencePiece's are"
            raise self.make_value_error("merges", merges, wanted)
        return None

    def check_pieces(self, pieces: list[str], kinds: list[int]) -> None:
        """Check that exactly the pieces <0x00> to <0xFF> are bytes: text meets the spelling."""
        for index, (piece, kind) in enumerate(zip(pieces, kinds, strict=True)):
            if kind == _BYTE and not _BYTES.fullmatch(piece):
                wanted = "spelt as <0x0A> is, because its type is a byte's"
                raise self.make_value_error(f"tokens[{index}]", piece, wanted)
            if kind not in (0, _BYTE) and _BYTES.fullmatch(piece):
                wanted = f"{_BYTE}, a byte's, as the token {piece} is spelt"
                raise self.make_value_error(f"token_type[{index}]", kind, wanted)

    def check_scores(self, pieces: list[str], kinds: list[int]) -> None:
        """Check that scores (SentencePiece merges the higher first) give the order of ids, by which text merges."""
        scores = self.find_value("scores", list, "a list of numbers")
        if scores is None:
            return
        if len(scores) != len(kinds) or not all(isinstance(score, float) for score in scores):
            raise self.make_value_error("scores", scores, f"{len(kinds)} numbers, one per token")
        vocab = set(pieces)
        normal = [index for index, kind in enumerate(kinds) if kind == _NORMAL]
        if any(not scores[after] < scores[index] for index, after in pairwise(normal)):
            made = (i for i in normal if _is_made_of_two(pieces[i], vocab))  # the others' scores decide nothing
            for index, after in pairwise(made):
                if not scores[after] < scores[index]:
                    wanted = f"below {scores[index]}, that of token {index}"
                    raise self.make_value_error(f"scores[{after}]", scores[after], wanted)

    def refuse_others(self) -> None:
        for name, value in self._metadata.items():
            key = name.removeprefix(_PREFIX)
            idle = name in _IDLE or name == _TEMPLATE or name.startswith(f"{_TEMPLATE}.")
            if not name.startswith("tokenizer.") or idle or key in _USED:
                continue
            if key.endswith("_token_id") and key.removesuffix("_token_id") in _IDS | _IDLE_IDS:
                continue
            if key not in _ONLY:
                raise CheckpointError(f"{self._place}: WiCore does not know what {named(name)} asks for.")
            if value != _ONLY[key] or isinstance(value, bool) != isinstance(_ONLY[key], bool):
                raise self.make_value_error(key, value, f"{_ONLY[key]!r} for Gemma")


def write_tokenizer(vocabulary: GgufVocabulary, generation_config: Mapping[str, Any], directory: Path) -> list[Path]:
    """Write tokenizer.json, tokenizer_config.json and generation_config.json; returns their paths.
    Raises CheckpointError when `tokenizers` cannot make a tokenizer of the vocabulary."""
    paths = [directory / n for n in ("tokenizer.json", "tokenizer_config.json", "generation_config.json")]
    try:
        tokenizer = _build_tokenizer(vocabulary)
    except Exception as error:  # tokenizers raises bare Exception
        raise CheckpointError(f"{vocabulary.place}: no tokenizer can be made of its tokens: {error}.") from error
    paths[0].write_text(tokenizer.to_str(pretty=False), encoding="utf-8")  # its own save hides what failed
    config: dict[str, Any] = {
        "tokenizer_class": "GemmaTokenizer",
        "add_bos_token": vocabulary.adds_bos,
        "add_eos_token": False,
        "clean_up_tokenization_spaces": False,
    }
    for role in ("bos", "eos", "unk", "pad"):
        if (index := getattr(vocabulary, role)) is not None:
            config[f"{role}_token"] = vocabulary.pieces[index]
    if vocabulary.chat_template is not None:
        config["chat_template"] = vocabulary.chat_template
    if vocabulary.templates:
        all_of_them = {"default": vocabulary.chat_template} | vocabulary.templates
        config["chat_template"] = [{"name": n, "template": t} for n, t in all_of_them.items() if t is not None]
    for path, data in zip(paths[1:], (config, dict(generation_config)), strict=True):
        path.write_text(json.dumps(data, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    return paths


def _build_tokenizer(vocabulary: GgufVocabulary) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

    raw = vocabulary.pieces
    tokens = [_respell_spaces(t) for t in raw]
    vocab = {token: index for index, token in enumerate(tokens)}
    unk = tokens[_UNK if vocabulary.unk is None else vocabulary.unk]
    merges = _find_merges(tokens, vocab) if vocabulary.merges is None else vocabulary.merges
    bpe = models.BPE(vocab=vocab, merges=merges, unk_token=unk, fuse_unk=True, byte_fallback=True)
    tokenizer = Tokenizer(bpe)
    tokenizer.normalizer = normalizers.Replace(" ", SPACE)
    tokenizer.pre_tokenizer = pre_tokenizers.Split(" ", behavior="merged_with_previous")
    tokenizer.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    added = [
        AddedToken(token, normalized=False, special=kind == _CONTROL)
        for token, kind in zip(raw, vocabulary.kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED) and token in vocab
    ]
    tokenizer.add_tokens(added)
    bos = vocabulary.bos
    if bos is not None and vocabulary.adds_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{raw[bos]} $A", pair=f"{raw[bos]} $A {raw[bos]}:1 $B:1", special_tokens=[(raw[bos], bos)]
        )
    return tokenizer


def _respell_spaces(token: str) -> str:
    """Respell runs of spaces, which GGUF has as spaces: the normalizer turns spaces of text into the visible one."""
    return SPACE * len(token) if " " in token and not token.strip() else token


def _find_merges(tokens: list[str], vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """List all splits of each token into two tokens, by the token's id and then longest left part first."""
    splits = (
        (token[:cut], token[cut:])
        for token in tokens
        for cut in range(len(token) - 1, 0, -1)
        if token[:cut] in vocab and token[cut:] in vocab
    )
    merges = list(islice(splits, _MAX_MERGES + 1))
    if len(merges) > _MAX_MERGES:
        raise ValueError(f"they merge in more than {_MAX_MERGES} ways")
    return merges
