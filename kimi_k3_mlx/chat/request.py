"""What a request adds to its messages: tools, thinking effort, tool choice, response format.

Input: the options of a request, as OpenAI's API writes them. Output: the pieces of K3's own system
messages, whose sentences are those it was trained on.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from typing import Any

from kimi_k3_mlx.chat.pieces import Piece, element
from kimi_k3_mlx.errors import UsageError
from kimi_k3_mlx.schema import Json

TOOLS_FIRST = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
TOOLS_LATER = (
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n"
)
EFFORT = (
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort={}`."
)
CHOICES = {
    "required": "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.",
    "none": "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.",
}
FORMAT = (
    "The system is invoked with `response_format={}`.\n"
    "Your response must be raw JSON data without markdown code blocks (```json) or any additional "
    "formatting."
)
SCHEMA = "\nThe JSON data must match the following schema:\n"


def declaration(tools: Sequence[Json], *, later: bool = False) -> Iterator[Piece]:
    """The system message that declares tools."""
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, dict) for tool in tools):
        raise UsageError("`tools` is no list of objects.")
    sentence = TOOLS_LATER if later else TOOLS_FIRST
    return system_message("tool-declare", sentence + fenced(list(tools)))


def effort_message(effort: str) -> Iterator[Piece]:
    """The system message about how much to think."""
    return system_message("thinking-effort", EFFORT.format(effort))


def last_messages(tool_choice: Any, response_format: Any) -> Iterator[Piece]:
    """The system messages that come after the conversation."""
    if tool_choice not in (None, "auto", *CHOICES):
        raise UsageError(
            f"the tool choice {tool_choice!r} is none of auto, required and none.",
            "K3 can't be told which tool to call: offer only that one, and choose required.",
        )
    if tool_choice in CHOICES:
        yield from system_message("tool-choice", CHOICES[tool_choice])
    kind = response_format.get("type") if isinstance(response_format, dict) else response_format
    if kind == "json_object":
        yield from system_message("response-format", FORMAT.format(kind))
    elif kind == "json_schema":
        body = FORMAT.format(kind) + SCHEMA + fenced(schema_of(response_format))
        yield from system_message("response-format", body)
    elif kind not in (None, "text"):
        raise UsageError(f"the response format {kind!r} is none of text, json_object, json_schema.")


def schema_of(response_format: Any) -> Json:
    """The schema in a response format of type `json_schema`."""
    found = response_format.get("json_schema") if isinstance(response_format, dict) else None
    schema = found.get("schema", found) if isinstance(found, dict) else None
    if not isinstance(schema, dict):
        raise UsageError(
            "the response format json_schema has no schema.",
            'write {"type": "json_schema", "json_schema": {"schema": {…}}}.',
        )
    return schema


def fenced(value: Any) -> str:
    """A value as compact JSON with sorted keys, in a block of code."""
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return f"```json\n{text}\n```"


def system_message(kind: str, body: str) -> Iterator[Piece]:
    """A system message of K3's own."""
    attributes = {"role": "system", "type": kind}
    return element("message", attributes, [Piece(body, "system")], end=True)
