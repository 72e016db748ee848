"""Describe tools that clients run, but do not describe as functions, as functions for the model.

In OpenAI's Responses and Anthropic's Messages these are free text, groups of functions, and shells and editors whose
schemas models are taught (platform.openai.com/docs/api-reference/responses,
docs.anthropic.com/en/docs/agents-and-tools/tool-use). Must not know engines. Invariant: a call, and the same call
when it comes back as history, have one `Form`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from wicore_trt.errors import InvalidRequestError, shown
from wicore_trt.http.bodies import FLAG, NUMBER, TEXT, TEXTS, list_of, object_of, one_of


@dataclass(frozen=True, slots=True)
class Form:
    """Form of a call as an item of Responses: its type, the prefix of its id, and the key of its arguments.
    `fixed` precedes the model's arguments. `name` is the tool's own, in `namespace`, where the item has them."""

    item: str = "function_call"
    prefix: str = "fc"
    key: str = "arguments"
    name: str | None = None
    namespace: str | None = None
    fixed: tuple[tuple[str, Any], ...] = ()

    def make_fields(self, text: str) -> dict[str, Any]:
        """Make the item's fields beside ids and status; a call that was cut off has no arguments in `text`."""
        given: Any = text
        if self.key != "arguments":
            try:
                given = json.loads(text)
            except ValueError:
                given = {}
            given = given.get("input", "") if self.key == "input" else {**dict(self.fixed), **given}
        named = {"name": self.name, "namespace": self.namespace}
        return {**{key: value for key, value in named.items() if value is not None}, self.key: given}


_EDITS = {
    **dict.fromkeys(("path", "file_text", "old_str", "new_str", "insert_text"), TEXT),
    **{"insert_line": NUMBER, "view_range": list_of(NUMBER, minItems=2, maxItems=2)},
}
LOCAL: Mapping[str, tuple[Form, str, dict[str, Any]]] = {
    "local_shell": (
        Form("local_shell_call", "lsh", "action", fixed=(("type", "exec"), ("env", {}))),
        "Run a command on the user's machine; a list of its words.",
        object_of("command", command=TEXTS, working_directory=TEXT, timeout_ms=NUMBER),
    ),
    "shell": (
        Form("shell_call", "sh", "action"), "Run commands of a shell on the user's machine.",
        object_of("commands", commands=TEXTS, timeout_ms=NUMBER, max_output_length=NUMBER),
    ),
    "apply_patch": (
        Form("apply_patch_call", "apc", "operation"), "Create, change or delete a file by a diff of V4A.",
        object_of("type path", type=one_of("create_file update_file delete_file"), path=TEXT, diff=TEXT),
    ),
}  # fmt: skip
"""OpenAI's tools by type: their form, what the model is told, the schema of what it gives."""
ANTHROPIC: Mapping[str, tuple[str, dict[str, Any]]] = {
    "bash": (
        "Run a command in a shell that stays open. `restart` begins a new one.",
        object_of("", command=TEXT, restart=FLAG),
    ),
    "text_editor": (
        "View, create and edit text files.",
        object_of("command path", command=one_of("view create str_replace insert undo_edit"), **_EDITS),
    ),
    "memory": (
        "View, create and edit files below /memories, which outlive this conversation.",
        object_of(
            "command", command=one_of("view create str_replace insert delete rename"), **_EDITS,
            old_path=TEXT, new_path=TEXT,
        ),
    ),
}  # fmt: skip
"""Anthropic's tools that the client runs, by type without its date."""
FORMS = {form.item: (name, form) for name, (form, _, _) in LOCAL.items()}
"""The tool and the form of each type of item."""
LONGEST = 64
"""Characters of a function's name, as `text.tools` takes it."""
_DATE = re.compile(r"_\d{8}")


def join_namespace(namespace: object, name: str) -> str:
    """Name a namespace's function for the model; a name that is too long is cut."""
    if not isinstance(namespace, str) or not namespace:
        return name
    whole = f"{namespace}.{name}"
    return whole if len(whole) <= LONGEST else f"{whole[: LONGEST - 9]}.{sha256(whole.encode()).hexdigest()[:8]}"


def response_tools(tools: list[dict[str, Any]] | None) -> tuple[list[dict[str, Any]] | None, dict[str, Form]]:
    """Convert tools of Responses to tools of a chat; return the forms of their calls by the model's names, too.
    Hosted tools are kept as they came. Raises InvalidRequestError."""
    forms: dict[str, Form] = {}
    if tools is None:
        return None, forms
    found = []
    for where, namespace, tool in _list_tools(tools):
        kind, name, function = tool.get("type") or "function", tool.get("name"), tool
        if kind == "custom":
            form = Form("custom_tool_call", "ctc", "input", str(name), namespace)
            function = {
                "name": name,
                "description": _describe_free_text(where, tool),
                "parameters": object_of("input", input=TEXT),
            }
        elif kind == "function":
            form = Form(name=str(name), namespace=namespace)
        elif isinstance(kind, str) and kind in LOCAL and tool.get("environment") in (None, {"type": "local"}):
            form, description, parameters = LOCAL[kind]
            function = {"name": kind, "description": description, "parameters": parameters}
        else:
            found.append(tool)
            continue
        inner_name = join_namespace(namespace, str(function["name"])) if isinstance(function.get("name"), str) else None
        forms[str(inner_name)] = form
        found.append({"type": "function", "function": {**function, "name": inner_name}})
    return found, forms


def _list_tools(tools: list[dict[str, Any]]) -> Iterator[tuple[str, str | None, dict[str, Any]]]:
    for i, tool in enumerate(tools):
        if tool.get("type") != "namespace":
            yield f"tools[{i}]", None, tool
            continue
        inside, name = tool.get("tools"), tool.get("name")
        if not (isinstance(name, str) and isinstance(inside, list) and all(isinstance(one, dict) for one in inside)):
            raise InvalidRequestError(f"tools[{i}] must have a name and tools.", field=f"tools[{i}]")
        for j, one in enumerate(inside):
            if one.get("type") not in ("function", "custom"):
                where = f"tools[{i}].tools[{j}]"
                raise InvalidRequestError(f"{where}: {shown(one.get('type'))} is not supported.", field=where)
            yield f"tools[{i}].tools[{j}]", name, one


def _describe_free_text(where: str, tool: Mapping[str, Any]) -> str:
    """Describe a tool of free text for the model. Its grammar is described, but not enforced."""
    given = tool.get("format") or {"type": "text"}
    if not isinstance(given, dict) or given.get("type") not in ("text", "grammar"):
        raise InvalidRequestError(f"{where}.format must be of type text or grammar.", field=where)
    paragraphs = [str(tool.get("description") or "")]
    if given["type"] == "grammar":
        paragraphs.append(f"`input` follows this grammar ({given.get('syntax')}):\n{given.get('definition')}")
    return "\n\n".join(filter(None, paragraphs))


def convert_message_tool(tool: dict[str, Any]) -> dict[str, Any]:
    """Convert a tool of Messages to a tool of a chat; a hosted one is kept as it came."""
    kind = tool.get("type") or "custom"
    if kind == "custom":
        return {"type": "function", "function": {**tool, "parameters": tool.get("input_schema")}}
    known = ANTHROPIC.get(_DATE.sub("", kind)) if isinstance(kind, str) else None
    if known is None:
        return tool
    function = {"name": tool.get("name"), "description": known[0], "parameters": known[1]}
    return {"type": "function", "function": function}
