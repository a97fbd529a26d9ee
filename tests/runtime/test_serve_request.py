"""Reading requests: every field's type and range, and what K3 can't do. No model is needed."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kimi_k3_mlx.errors import DoesNotFitError, UsageError
from kimi_k3_mlx.runtime.load import load_tokenizer
from kimi_k3_mlx.runtime.machine import Machine
from kimi_k3_mlx.runtime.server import request
from kimi_k3_mlx.runtime.server.prompt import Prompter
from kimi_k3_mlx.runtime.server.reply import Reply, Usage
from kimi_k3_mlx.runtime.server.request import NUMBERS, Asked, RequestError
from kimi_k3_mlx.runtime.server.settings import Room, Settings, room_of
from tests.runtime.fake_mac import FakeMac
from tests.runtime.serving import TINY_K3, tool

HELLO = {"messages": [{"role": "user", "content": "x"}]}
ADD, SUB = tool("add", a="number"), tool("sub")


def chat(**fields: Any) -> Asked:
    return request.chat(request.parse(json.dumps(HELLO | fields).encode()), 1000)


BAD = [
    ("temperature", "hot", "`temperature` is \"hot\": no number from 0 to 2"),
    ("temperature", True, "`temperature` is true"),
    ("temperature", float("nan"), "`temperature` is nan"),
    ("temperature", 10**400, r"401 characters\)"),
    ("top_p", 1.5, "no number from 0 to 1"),
    ("top_k", 2.0, "`top_k` is 2.0: no whole number"),
    ("seed", 2**64, "no whole number"),
    ("max_tokens", 0, "from 1 to"),
    ("max_completion_tokens", "9", "`max_completion_tokens`"),
    ("n", 2, "`n` is 2: no whole number from 1 to 1"),
    ("stream", "yes", "`stream` is a str; a bool was expected"),
    ("stream_options", [1], "`stream_options` is a list"),
    ("stop", [""], "`stop`"),
    ("stop", 5, "`stop`"),
    ("stop", ["x"] * 17, "`stop`"),
    ("logit_bias", {"1000": 1}, "no id from 0 to 999"),
    ("logit_bias", {"-1": 1}, "no id from"),
    ("logit_bias", {"5": "x"}, "`logit_bias` is \"x\""),
    ("top_logprobs", 5, "needs `logprobs`"),
    ("tools", [5], r"tools\[0\]"),
    ("tools", [{"type": "web_search"}], r"tools\[0\] is no function with a name"),
    ("tools", {"a": 1}, "`tools` is a dict"),
    ("tool_choice", {"function": {"name": "add"}}, "\"add\", which is not in `tools`"),
    ("tool_choice", "required", "there are no tools"),
    ("reasoning_effort", "huge", "none of none, minimal, medium, xhigh, low, high, max"),
    ("reasoning_effort", 5, "`reasoning_effort` is 5"),
    ("chat_template_kwargs", {"thinking": "no"}, "neither true nor false"),
    ("adapters", "x", "without adapters"),
    ("functions", [{}], "write `tools`"),
    ("model", 5, "`model` is a int"),
    ("messages", [], "`messages` is missing or empty"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "words"), BAD)
def test_what_is_wrong_is_named(name: str, value: Any, words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        chat(**{name: value})
    assert caught.value.status == 400
    assert caught.value.param in (name, "chat_template_kwargs")
    json.dumps(caught.value.body(), allow_nan=False)


@given(st.dictionaries(
    st.sampled_from(sorted({name for name, _, _ in BAD} | set(NUMBERS))),
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
        lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=5,
    ),
    max_size=5,
))  # fmt: skip
@settings(deadline=None, max_examples=300)
def test_nothing_but_a_request_error_comes_of_any_body(fields: dict[str, Any]) -> None:
    body = {key: value for key, value in (HELLO | fields).items() if value is not None}
    for reader in (request.chat, request.text):
        with suppress(RequestError):
            assert reader(body | {"prompt": "x"}, 1000).sampling["xtc_threshold"] <= 0.5


@pytest.fixture(scope="module")
def prompter() -> Prompter:
    return Prompter(load_tokenizer(TINY_K3, None), None)


ANY = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3) | st.just("system"),
    lambda inner: (
        st.lists(inner, max_size=2)
        | st.dictionaries(
            st.sampled_from(["type", "text", "name", "function", "arguments", "image_url", "id"]),
            inner,
            max_size=3,
        )
    ),
    max_leaves=6,
)
MESSAGE = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | ANY},
    optional={
        key: ANY
        for key in ("content", "tool_calls", "tools", "tool_call_id", "name", "reasoning_content")
    },
)


@given(
    st.lists(MESSAGE | ANY, max_size=3),
    st.fixed_dictionaries({}, optional={"tools": ANY, "tool_choice": ANY, "response_format": ANY}),
)
@settings(deadline=None, max_examples=300)
def test_any_conversation_is_a_prompt_or_refused(
    prompter: Prompter, messages: list[Any], options: dict[str, Any]
) -> None:
    body = {"messages": messages} | {k: v for k, v in options.items() if v is not None}
    with suppress(RequestError):
        asked = request.chat(body, 1000)
        prompt = prompter.prompt(asked)
        assert prompt.marks == sorted(prompt.marks)
        assert all(prompt.ids[mark - 1] == prompter.end for mark in prompt.marks)
        Reply(asked, Usage(1), {}, str)


@given(st.binary(max_size=40))
def test_any_bytes_are_an_object_or_refused(raw: bytes) -> None:
    with suppress(RequestError):
        assert isinstance(request.parse(raw), dict)


def test_defaults_and_names() -> None:
    asked = chat(temperature=None, user="me", store=True)
    assert "temperature" not in asked.sampling
    assert (asked.max_tokens, asked.seed, asked.stop, asked.logit_bias) == (None, None, (), None)
    assert asked.thinking
    assert chat(max_tokens=5, max_completion_tokens=7).max_tokens == 7
    assert chat(seed=-1).seed == 2**64 - 1
    assert chat(stop="end").stop == ("end",)
    assert chat(logit_bias={"7": 2}).logit_bias == {7: 2.0}
    (message,) = chat(messages=[{"role": "developer", "content": "x"}]).messages or []
    assert message == {"role": "system", "content": "x"}


@pytest.mark.parametrize(
    ("fields", "thinking", "effort"),
    [
        ({"reasoning_effort": "none"}, False, None),
        ({"reasoning_effort": "minimal"}, True, "low"),
        ({"reasoning_effort": "medium"}, True, None),
        ({"reasoning_effort": "high"}, True, "high"),
        ({"reasoning_effort": "xhigh"}, True, "max"),
        ({"chat_template_kwargs": {"enable_thinking": False}}, False, None),
        ({"chat_template_kwargs": {"thinking": False}}, False, None),
        ({"chat_template_kwargs": {"thinking_effort": "max"}}, True, "max"),
    ],
)
def test_thinking(fields: dict[str, Any], thinking: bool, effort: str | None) -> None:
    assert (chat(**fields).thinking, chat(**fields).effort) == (thinking, effort)


def test_a_certain_tool_is_the_only_one_and_required() -> None:
    named = chat(tools=[ADD, SUB], tool_choice={"type": "function", "function": {"name": "sub"}})
    assert (named.tools, named.tool_choice) == ([SUB], "required")
    assert chat(tools=[ADD], tool_choice="none").offered == []
    later = [{"role": "system", "tools": [SUB]}, *HELLO["messages"]]
    assert chat(tools=[ADD], messages=later).offered == [ADD, SUB]


def test_room_counts_prompt_and_answer() -> None:
    room = Room(100, "that is it")
    assert room.for_answer(60, 40, 8192) == 40
    assert room.for_answer(60, None, 8192) == 40, "a default is no wish"
    assert room.for_answer(60, None, 10) == 10
    for n_prompt, asked in ((60, 41), (100, None)):
        with pytest.raises(RequestError, match=r"but 100 fit: that is it\.") as caught:
            room.for_answer(n_prompt, asked, 8192)
        assert caught.value.code == "context_length_exceeded"


def test_room_of_a_mac(tiny_text_source: Path) -> None:
    """The rest of the memory, for every sequence; the model's context elsewhere."""
    config = json.loads((tiny_text_source / "config.json").read_text())
    context = config["text_config"]["max_position_embeddings"]
    mac = Machine.read(tiny_text_source, FakeMac(ram_gib=24))
    one = Settings(tiny_text_source, prompt_cache_bytes=5 << 30)
    config["text_config"]["max_position_embeddings"] = 1 << 40
    alone = room_of(one, config, mac)
    assert "5.37 GB of prompt caches" in alone.reason
    two = Settings(tiny_text_source, prompt_cache_bytes=5 << 30, decode_concurrency=2)
    assert abs(room_of(two, config, mac).n_tokens - alone.n_tokens / 2) < alone.n_tokens / 1000
    config["text_config"]["max_position_embeddings"] = context
    assert room_of(one, config, mac).n_tokens == context
    full = Settings(tiny_text_source, prompt_cache_bytes=8 << 30)
    with pytest.raises(DoesNotFitError, match=r"at most 8\.59 GB can be wired"):
        room_of(full, config, mac)


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "mac.local"])
def test_other_addresses_need_a_key(host: str) -> None:
    with pytest.raises(UsageError, match="there is no key"):
        Settings(Path("x"), host=host).check()
    Settings(Path("x"), host=host, api_key="k").check()
    for key in ("", " ", "ключ"):
        with pytest.raises(UsageError, match="empty or not ASCII"):
            Settings(Path("x"), host=host, api_key=key).check()


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "::1", "127.0.0.2"])
def test_this_machine_needs_none(host: str) -> None:
    Settings(Path("x"), host=host).check()
