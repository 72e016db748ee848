"""Fields of a request that are served, ignored or refused, those inside of fields too.

The one table of it, as plain data that knows no transport. At each place of a request a field that its JSON schema
names is served. One that would change the answer is refused by its path, unless its value asks for nothing, and so is a
likely misspelling of a served one. Any other is accepted, for real clients send many, unless the schema is closed.
Invariant: no field that this table knows to change an answer is dropped silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.text.chat import REFUSED_KEYS

HARMLESS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "reasoning_effort", "reasoning", "verbosity"),
        *("truncation", "max_tool_calls", "prompt_cache_options", "background_options", "access_programs"),
        *("thinking", "context_management", "inference_geo", "speed", "diagnostics", "user_profile_id"),
        *("workspace_id", "cache_control", "betas"),
        *("include_reasoning", "request_id", "session_id", "stream_interval", "cache_prompt", "models", "provider"),
        *("timings_per_token", "separate_reasoning", "stream_reasoning", "stream_tokens", "keep_alive"),
        "output_schema",  # of a tool: what its result is
    )
)
"""Accepted and ignored wherever they stand: they say nothing about the tokens of the answer, or would only have let a
prompt be shortened that is refused without them."""

Neutral = Mapping[str, tuple[object, ...]]

REFUSED: Neutral = {
    # What a server with a memory of its own would do.
    **dict.fromkeys(("previous_response_id", "conversation", "moderation", "container"), ()),
    "background": (False,), "mcp_servers": ([],),
    # Older names of tools, and other constraints.
    "functions": ([],), "function_call": ("none", "auto"),
    **dict.fromkeys(("structural_tag", "guided_decoding_backend", "guided_whitespace_pattern"), ()),
    # Other media and other ways to an answer.
    **dict.fromkeys(("audio", "prediction", "web_search_options", "logprob_token_ids"), ()),
    "modalities": (["text"],), "suffix": ("",), "best_of": (1,), "use_beam_search": (False,),
    "length_penalty": (1, 1.0), "early_stopping": (False,), "return_tokens_as_token_ids": (False,),
    # Other prompts.
    **dict.fromkeys(("chat_template", "prompt_embeds"), ()),
    "documents": ([],), "continue_final_message": (False,), "mm_processor_kwargs": ({},),
    # Other sampling.
    **dict.fromkeys(("thinking_token_budget", "repetition_detection", "samplers", "custom_logit_processor"), ()),
    **dict.fromkeys(("top_a", "dry_multiplier", "xtc_probability", "dynatemp_range"), (0, 0.0)),
    **dict.fromkeys(("typical_p", "tfs_z"), (1, 1.0)),
    "spaces_between_special_tokens": (True,), "logits_processors": ([],), "mirostat": (0,),
    # Names of llama.cpp, SGLang and Transformers.
    "n_predict": (-1,), "t_max_predict_ms": (-1,), "n_probs": (0,), "no_repeat_ngram_size": (0,),
    **dict.fromkeys(("n_cmpl", "num_beams", "num_return_sequences"), (1,)), "typ_p": (1, 1.0), "top_n_sigma": (-1, 0),
    **dict.fromkeys(("input_ids", "input_embeds"), ()), "stop_regex": ([], ""), "negative_prompt": ("",),
    **dict.fromkeys(("return_logprob", "return_hidden_states"), (False,)), "guidance_scale": (1, 1.0), "lora": ([],),
    # Other machines.
    **dict.fromkeys(("vllm_xargs", "kv_transfer_params", "session_params"), ({},)), "lora_path": (),
}  # fmt: skip
"""Refused with 400, but for null and for these values, which ask for nothing."""
REFUSED_INSIDE: Mapping[str, Neutral] = {
    "messages": dict.fromkeys(REFUSED_KEYS, (False, [], {}, "")),
    "tools": {"parameters": (), "function": ()},  # where another shape of tools is served
    "tools.function": {"input_schema": ()},
    "structured_outputs": {
        **dict.fromkeys(("disable_any_whitespace", "disable_additional_properties"), (False,)),
        "disable_fallback": (False, True),
    },
}
"""Fields refused at places inside, by their paths without numbers."""

MAX_FIELDS = 128
"""Fields of one body. Looking for misspellings takes time for each."""
LONGEST = 40
"""Characters of a name that may be a misspelling."""
MISSPELLED = 0.8
"""How much alike two names are that are meant to be the same, by difflib's ratio."""


def alike(first: object, second: object) -> bool:
    """Equal, and both of them flags or neither: in Python 1 is True."""
    return first == second and isinstance(first, bool) == isinstance(second, bool)


@dataclass(frozen=True, slots=True)
class Place:
    """An object of a request, or each of a list. `served` leads to what is inside, None where that is not looked at;
    `closed`: nothing else is accepted; `elsewhere` are served by other routes, so that who sends them here expects
    something."""

    served: Mapping[str, Place | None]
    refused: Neutral
    closed: bool = False
    elsewhere: frozenset[str] = frozenset()

    @classmethod
    def of(cls, schema: Mapping[str, Any], every: Iterable[str] = ()) -> Place:
        """The whole of a request that has this JSON schema, among routes that together serve `every`."""
        place = _place(schema, schema.get("$defs", {}), "")
        assert place is not None
        return cls(place.served, REFUSED, place.closed, frozenset(every) - place.served.keys() - HARMLESS)

    def check(self, body: Mapping[str, Any]) -> None:
        """Raise InvalidRequestError for the first field that changes the answer, or is meant to be another."""
        if len(body) > MAX_FIELDS:
            raise InvalidRequestError(f"The body has {len(body)} fields; at most {MAX_FIELDS} are taken.", field="body")
        self.look(body, "", set())

    def paths(self, above: str = "") -> Iterator[tuple[str, Place]]:
        """This place and all inside, with their paths."""
        yield above, self
        for name, inside in self.served.items():
            if inside is not None:
                yield from inside.paths(f"{above}.{name}" if above else name)

    def look(self, found: Mapping[str, Any], above: str, strange: set[tuple[int, str]]) -> None:
        """Check an object at this place, whose path is `above`. `strange` are the names that were compared with
        served ones, by place."""
        for name, value in found.items():
            if value is None:
                continue
            if name not in self.served:
                self._unserved(name, value, f"{above}.{name}" if above else name, strange)
            elif (inside := self.served[name]) is not None:
                path = f"{above}.{name}" if above else name
                if isinstance(value, dict):
                    inside.look(value, path, strange)
                elif isinstance(value, list):
                    for i, item in enumerate(value):
                        if isinstance(item, dict):
                            inside.look(item, f"{path}[{i}]", strange)

    def _unserved(self, name: str, value: object, path: str, strange: set[tuple[int, str]]) -> None:
        if name in self.refused:
            if not any(alike(value, neutral) for neutral in self.refused[name]):
                raise InvalidRequestError(f"{path} is not supported.", field=path, fix="Leave it out.")
        elif self.closed:
            if value is not False:
                raise InvalidRequestError(f"{shown(path)} is no known field.", field=path, fix="Leave it out.")
        elif name in self.elsewhere:
            if value is not False:
                raise InvalidRequestError(f"{name} is no field of this route.", field=name, fix="Leave it out.")
        elif name not in HARMLESS and (id(self), name) not in strange:
            strange.add((id(self), name))
            if len(strange) > MAX_FIELDS:
                raise InvalidRequestError(f"More than {MAX_FIELDS} unknown fields.", field=path)
            if near := self._near(name):
                raise InvalidRequestError(f"{shown(path)} is no known field.", field=path, fix=f"Did you mean {near}?")

    def _near(self, name: str) -> str | None:
        """The served field that a name is meant to be, also in the way of JavaScript (`topP`)."""
        if len(name) > LONGEST:
            return None
        name = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
        return next(iter(difflib.get_close_matches(name, self.served, n=1, cutoff=MISSPELLED)), None)


def _place(schema: Mapping[str, Any], definitions: Mapping[str, Any], path: str) -> Place | None:
    """Read from a schema the place of objects that a value is, or is a list of; None where it names no fields."""
    objects = list(_objects(schema, definitions))
    names = {name for one in objects for name in one["properties"]}
    served = {}
    for name in sorted(names):
        inside = {"anyOf": [one["properties"][name] for one in objects if name in one["properties"]]}
        served[name] = _place(inside, definitions, f"{path}.{name}".lstrip("."))
    closed = all(one.get("additionalProperties") is False for one in objects)
    refused = {name: neutral for name, neutral in REFUSED_INSIDE.get(path, {}).items() if name not in served}
    return Place(served, refused, closed) if names else None


def _objects(schema: Mapping[str, Any], definitions: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The schemas with fields of their own."""
    if "$ref" in schema:
        yield from _objects(definitions[schema["$ref"].rpartition("/")[2]], definitions)
    for inner in (*schema.get("anyOf", ()), *([schema["items"]] if "items" in schema else ())):
        yield from _objects(inner, definitions)
    if "properties" in schema:
        yield schema
