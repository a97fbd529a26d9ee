"""Reads the body of a request: OpenAI's chat completions and completions, and mlx-lm's samplers.

Input: bytes. Output: `Asked`, with every value checked. What is wrong raises RequestError, which
names the field and the HTTP status. What the API knows and K3 can't do is refused, not skipped;
fields that change nothing here (`user`, `store`, …) are ignored, and null is the same as nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from kimi_k3_mlx.chat.render import EFFORTS, function_of
from kimi_k3_mlx.errors import KimiError
from kimi_k3_mlx.schema import Json

THINKING_EFFORTS = {"minimal": "low", "medium": None, "xhigh": "max"} | {e: e for e in EFFORTS}
"""OpenAI's names for what K3 knows; its encoder refuses `medium`, and nothing said is near it."""

MANY = 10**9
NUMBERS: dict[str, tuple[type, float, float, float | None]] = {
    "temperature": (float, 0, 2, None),
    "top_p": (float, 0, 1, None),
    "top_k": (int, 0, MANY, None),
    "min_p": (float, 0, 1, None),
    "xtc_probability": (float, 0, 1, 0.0),
    "xtc_threshold": (float, 0, 0.5, 0.1),
    "repetition_penalty": (float, 0, 100, 0.0),
    "repetition_context_size": (int, 0, MANY, 20),
    "presence_penalty": (float, -100, 100, 0.0),
    "presence_context_size": (int, 0, MANY, 20),
    "frequency_penalty": (float, -100, 100, 0.0),
    "frequency_context_size": (int, 0, MANY, 20),
}
"""Numbers of sampling: type, smallest, largest, and mlx-lm's default; None: the server's own."""

UNSUPPORTED = {
    "adapters": "this server serves one build, without adapters",
    "draft_model": "this server serves one build, without a draft model",
    "functions": "`functions` is OpenAI's old name: write `tools`",
    "function_call": "`function_call` is OpenAI's old name: write `tool_choice`",
    "audio": "K3 has no voice",
    "suffix": "K3 does not fill in the middle",
    "echo": "the prompt is not repeated",
}
MAX_STOPS, MAX_STOP, MAX_TOP_LOGPROBS = 16, 1000, 20


class RequestError(KimiError):
    """A request that is not answered: what HTTP calls it, and which field is to blame."""

    def __init__(
        self,
        message: str,
        param: str | None = None,
        *,
        status: int = 400,
        code: str | None = None,
        kind: str = "invalid_request_error",
    ) -> None:
        super().__init__(message)
        self.param, self.status, self.code, self.kind = param, status, code, kind

    def body(self) -> Json:
        """The error in OpenAI's shape."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}


@dataclass(frozen=True)
class Asked:
    """What a client wants. Without `messages` it is a completion of `prompt`."""

    sampling: dict[str, Any]
    """By the names of `NUMBERS`; a server's own defaults are not in here."""
    stream: bool = False
    include_usage: bool = False
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: bool = False
    top_logprobs: int = 0
    messages: list[Json] | None = None
    prompt: str = ""
    tools: list[Json] = field(default_factory=list)
    tool_choice: str | None = None
    thinking: bool = True
    effort: str | None = None
    response_format: Any = None

    @property
    def offered(self) -> list[Json]:
        """The tools that may be called, those of later system messages too."""
        if self.tool_choice == "none":
            return []
        return [*self.tools, *later_tools(self.messages or [])]


def parse(raw: bytes) -> Json:
    """The JSON object of a body."""
    try:
        body = json.loads(raw.decode())
        if b"\\u" in raw:
            json.dumps(body, ensure_ascii=False).encode()
    except RecursionError as error:
        raise RequestError("the body is nested too deeply.") from error
    except (UnicodeDecodeError, UnicodeEncodeError) as error:
        raise RequestError(f"the body is not UTF-8: {error.reason}.") from error
    except ValueError as error:
        raise RequestError(f"the body is not JSON: {error}.") from error
    if not isinstance(body, dict):
        raise RequestError(f"the body is a {type(body).__name__}, not an object.")
    return {key: value for key, value in body.items() if value is not None}


def chat(body: Json, vocabulary: int) -> Asked:
    """A request for a chat completion; what K3's format can't say is left to the renderer."""
    messages = read(body, "messages", list)
    if not messages:
        raise RequestError("`messages` is missing or empty.", "messages")
    tools = read(body, "tools", list, [])
    check_tools([*tools, *later_tools(messages)])
    choice = body.get("tool_choice")
    if isinstance(choice, dict):
        tools, choice = [named_tool(choice, tools)], "required"
    if choice == "required" and not tools:
        raise RequestError("`tool_choice` is required, but there are no tools.", "tool_choice")
    thinking, effort = thinking_of(body)
    top = number(body, "top_logprobs", int, 0, MAX_TOP_LOGPROBS, 0)
    if top and not read(body, "logprobs", bool, False):
        raise RequestError("`top_logprobs` needs `logprobs`: true.", "top_logprobs")
    return Asked(
        **common(body, vocabulary),
        messages=[with_known_role(message) for message in messages],
        tools=tools,
        tool_choice=choice,
        thinking=thinking,
        effort=effort,
        response_format=body.get("response_format"),
        logprobs=read(body, "logprobs", bool, False),
        top_logprobs=top,
    )


def text(body: Json, vocabulary: int) -> Asked:
    """A request for a completion; control tokens' names in its prompt are text."""
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1:
        prompt = prompt[0]
    if not isinstance(prompt, str) or not prompt:
        raise RequestError("`prompt` must be one string, not empty.", "prompt")
    if body.get("logprobs"):
        raise RequestError("`logprobs` are given for chat completions only.", "logprobs")
    return Asked(**common(body, vocabulary), prompt=prompt)


def common(body: Json, vocabulary: int) -> dict[str, Any]:
    """What both kinds of request have."""
    for name, reason in UNSUPPORTED.items():
        if body.get(name):
            raise RequestError(f"`{name}` is not supported: {reason}.", name)
    for name in ("n", "best_of"):
        number(body, name, int, 1, 1, 1)
    read(body, "model", str, "")
    options = read(body, "stream_options", dict, {})
    most = [n for n in ("max_completion_tokens", "max_tokens") if n in body]
    sampling = {
        name: number(body, name, kind, least, largest, default)
        for name, (kind, least, largest, default) in NUMBERS.items()
        if name in body or default is not None
    }
    seed = number(body, "seed", int, -(2**63), 2**64 - 1, None)
    return {
        "sampling": sampling,
        "stream": read(body, "stream", bool, False),
        "include_usage": bool(options.get("include_usage")),
        "max_tokens": number(body, most[0], int, 1, MANY, None) if most else None,
        "stop": stop_words(body),
        "seed": None if seed is None else seed % 2**64,
        "logit_bias": logit_bias(body, vocabulary),
    }


def read(body: Json, name: str, kind: type, default: Any = None) -> Any:
    """A field of one type."""
    value = body.get(name, default)
    if value is not default and not isinstance(value, kind):
        raise RequestError(
            f"`{name}` is a {type(value).__name__}; a {kind.__name__} was expected.", name
        )
    return value


def number(body: Json, name: str, kind: type, least: float, most: float, default: Any) -> Any:
    """A number between two others. NaN is between none, and true is no number."""
    value = body.get(name, default)
    if value is default:
        return default
    kinds = (int, float) if kind is float else (int,)
    if isinstance(value, bool) or not isinstance(value, kinds) or not least <= value <= most:
        what = "whole number" if kind is int else "number"
        given = repr(value) if isinstance(value, float) else shortened(value)
        raise RequestError(f"`{name}` is {given}: no {what} from {least:,} to {most:,}.", name)
    return kind(value)


def shortened(value: Any) -> str:
    """As much of a value as fits a sentence."""
    shown = json.dumps(value, ensure_ascii=False)
    return shown if len(shown) <= 40 else f"{shown[:30]}… ({len(shown):,} characters)"


def stop_words(body: Json) -> tuple[str, ...]:
    """Texts that end an answer."""
    words = body.get("stop", [])
    words = [words] if isinstance(words, str) else words
    if (
        not isinstance(words, list)
        or len(words) > MAX_STOPS
        or not all(isinstance(word, str) and 0 < len(word) <= MAX_STOP for word in words)
    ):
        raise RequestError(
            f"`stop` is no string or list of at most {MAX_STOPS} strings of 1 to {MAX_STOP:,} "
            "characters.",
            "stop",
        )
    return tuple(words)


def logit_bias(body: Json, vocabulary: int) -> dict[int, float] | None:
    """Additions to logits by token: an id outside of the vocabulary would be written anywhere."""
    given = read(body, "logit_bias", dict, {})
    found = {}
    for token, value in given.items():
        if not token.isdecimal() or len(token) > 9 or int(token) >= vocabulary:
            raise RequestError(
                f"`logit_bias` names the token {shortened(token)}, "
                f"which is no id from 0 to {vocabulary - 1:,}.",
                "logit_bias",
            )
        found[int(token)] = number({"logit_bias": value}, "logit_bias", float, -100, 100, 0.0)
    return found or None


def check_tools(tools: list[Any]) -> None:
    """Refuse tools that are no functions with a name."""
    for i, tool in enumerate(tools):
        kind = tool.get("type", "function") if isinstance(tool, dict) else None
        name = function_of(tool).get("name") if kind == "function" else None
        if not isinstance(name, str) or not name:
            raise RequestError(f"tools[{i}] is no function with a name.", "tools")


def later_tools(messages: list[Any]) -> list[Any]:
    """The tools of system messages, which K3 takes at any place."""
    systems = [it for it in messages if isinstance(it, dict) and it.get("role") == "system"]
    return [tool for it in systems if isinstance(it.get("tools"), list) for tool in it["tools"]]


def named_tool(choice: Json, tools: list[Json]) -> Json:
    """The one tool that must be called: K3 can only be told to call some tool."""
    wanted = function_of(choice).get("name")
    for tool in tools:
        if function_of(tool).get("name") == wanted:
            return tool
    raise RequestError(
        f"`tool_choice` names {shortened(wanted)}, which is not in `tools`.", "tool_choice"
    )


def with_known_role(message: Any) -> Any:
    """`developer` is what OpenAI calls `system` now."""
    if isinstance(message, dict) and message.get("role") == "developer":
        return message | {"role": "system"}
    return message


def thinking_of(body: Json) -> tuple[bool, str | None]:
    """Whether and how much to think: `reasoning_effort`, or the template's own arguments."""
    options = read(body, "chat_template_kwargs", dict, {})
    thinking = options.get("enable_thinking", options.get("thinking", True))
    if not isinstance(thinking, bool):
        raise RequestError("`thinking` is neither true nor false.", "chat_template_kwargs")
    name = "reasoning_effort"
    effort = body.get(name, options.get("thinking_effort"))
    if effort == "none":
        return False, None
    if effort is None:
        return thinking, None
    if not isinstance(effort, str) or effort not in THINKING_EFFORTS:
        known = ", ".join(["none", *THINKING_EFFORTS])
        raise RequestError(f"`{name}` is {shortened(effort)}: none of {known}.", name)
    return thinking, THINKING_EFFORTS[effort]
