"""Which fields of a request are served, which are ignored and which are refused.

The one table of it. Real clients send fields that change nothing for us, so those are accepted; a field that would have
changed the answer is refused with its name, unless its value asks for nothing. Fields that nobody knows are accepted
too, unless they look like a misspelling of a served one. Invariant: no field that this table knows to change an answer
is dropped silently.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from wicore_trt.errors import InvalidRequestError, shown

HARMLESS = frozenset(
    (
        *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key"),
        *("prompt_cache_retention", "reasoning_effort", "reasoning", "verbosity"),
        *("truncation", "max_tool_calls", "prompt_cache_options", "background_options", "access_programs"),
        *("thinking", "context_management", "inference_geo", "speed", "diagnostics", "user_profile_id"),
        *("workspace_id", "cache_control", "betas"),
        *("include_reasoning", "request_id", "session_id", "stream_interval", "cache_prompt", "models", "provider"),
        *("timings_per_token", "separate_reasoning", "stream_reasoning", "stream_tokens", "keep_alive"),
    )
)
"""Accepted and ignored: they say nothing about the tokens of the answer, or would only have let a prompt be shortened
that is refused without them."""

REFUSED: Mapping[str, tuple[object, ...]] = {
    # What a server with a memory of its own would do.
    "previous_response_id": (),
    "conversation": (),
    "background": (False,),
    "moderation": (),
    "container": (),
    "mcp_servers": ([],),
    # Older names of tools.
    "functions": ([],),
    "function_call": ("none", "auto"),
    **dict.fromkeys(("structural_tag", "json_schema", "grammar", "regex", "ebnf"), ()),
    **dict.fromkeys(("guided_decoding_backend", "guided_whitespace_pattern"), ()),
    # Other media and other ways to an answer.
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "web_search_options": (),
    "suffix": ("",),
    "best_of": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "early_stopping": (False,),
    "logprob_token_ids": (),
    "return_token_ids": (False,),
    "return_tokens_as_token_ids": (False,),
    # Other prompts.
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
    "continue_final_message": (False,),
    "mm_processor_kwargs": ({},),
    "truncate_prompt_tokens": (),
    "prompt_embeds": (),
    # Other sampling.
    "allowed_token_ids": (),
    "bad_words": ([],),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "logits_processors": ([],),
    "thinking_token_budget": (),
    "repetition_detection": (),
    "typical_p": (1, 1.0),
    "tfs_z": (1, 1.0),
    "top_a": (0, 0.0),
    "mirostat": (0,),
    "dry_multiplier": (0, 0.0),
    "xtc_probability": (0, 0.0),
    "dynatemp_range": (0, 0.0),
    "samplers": (),
    # Other machines.
    "vllm_xargs": ({},),
    "kv_transfer_params": ({},),
    "lora_path": (),
    "session_params": ({},),
    "custom_logit_processor": (),
}
"""Refused with 400, but for null and for these values, which ask for nothing."""

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
class Fields:
    """The fields of one route. `elsewhere` are served by other routes, so that who sends them here expects something;
    `own` are values that ask for nothing where REFUSED knows no such field."""

    served: frozenset[str]
    elsewhere: frozenset[str]

    @classmethod
    def of(cls, served: Iterable[str], every: Iterable[str]) -> Fields:
        """Of a route that serves `served` among routes that together serve `every`."""
        return cls(frozenset(served), frozenset(every) - frozenset(served))

    def check(self, body: Mapping[str, Any]) -> None:
        """Raise InvalidRequestError for the first field that would have changed the answer."""
        if len(body) > MAX_FIELDS:
            raise InvalidRequestError(f"The body has {len(body)} fields; at most {MAX_FIELDS} are taken.", field="body")
        for name, value in body.items():
            if name in self.served or name in HARMLESS or value is None:
                continue
            if name in REFUSED:
                if not any(alike(value, neutral) for neutral in REFUSED[name]):
                    raise InvalidRequestError(f"{name} is not supported.", field=name, fix="Leave it out.")
            elif name in self.elsewhere:
                if value is not False:
                    raise InvalidRequestError(f"{name} is no field of this route.", field=name, fix="Leave it out.")
            elif near := self._near(name):
                raise InvalidRequestError(f"{shown(name)} is no known field.", field=name, fix=f"Did you mean {near}?")

    def _near(self, name: str) -> str | None:
        """The served field that a name is meant to be."""
        if len(name) > LONGEST:
            return None
        return next(iter(difflib.get_close_matches(name, self.served, n=1, cutoff=MISSPELLED)), None)
