"""Bodies of requests: whatever JSON comes, it is understood or refused in words that name the field."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dsv41.errors import UserError
from infer.api import _CHAT, _COMPLETION, Api
from infer.continuation import check_prompt
from infer.sampling import sampling_rows
from infer.server import _read
from tests.models import tiny_model
from tests.serving import HI, TWO_LAYERS

API = Api(tiny_model(**TWO_LAYERS), "tiny", 128)
WORDS = ("user", "assistant", "tool", "system", "function", "text", "json_schema", "object", "auto", "high", "{}", '{"a": [1]}')
NAMES = ("role", "content", "tool_calls", "tool_call_id", "id", "type", "function", "name", "arguments", "text", "schema")
NAMES += ("json_schema", "reasoning_content", "include_usage", "image_url")

numbers = st.integers() | st.floats() | st.sampled_from([10**400, -(10**400), 2**31, 2**63])
leaves = st.none() | st.booleans() | numbers | st.text(max_size=5) | st.sampled_from(WORDS)
values = st.recursive(
    leaves, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4), max_leaves=8
)
functions = st.fixed_dictionaries({"name": values, "arguments": values})
calls = st.fixed_dictionaries({}, optional={"id": values, "type": values, "function": functions | values})
messages = st.fixed_dictionaries(
    {"role": st.sampled_from(["user", "assistant", "tool", "system"]) | values},
    optional={
        "content": st.text(max_size=5) | values,
        "tool_calls": st.lists(calls, max_size=2) | calls | values,
        "tool_call_id": st.sampled_from(["a", "b"]) | values,
        "reasoning_content": values,
    },
)


def understood(read, body):
    """Reads a body; what is understood goes as far as the device."""
    try:
        asked = _read(read, json.dumps(body).encode())
        for request in asked.requests:
            check_prompt(request.ids, request.sampling, API.model.config, 128, "prompt")
    except UserError:
        return
    sampling_rows([request.sampling for request in asked.requests])


def bodies(names, **known):
    rest = dict.fromkeys(sorted(names - known.keys() - {"model"}), values)
    return st.fixed_dictionaries(known, optional=rest)


@settings(max_examples=300, deadline=None)
@given(
    bodies(_CHAT, messages=st.lists(messages, max_size=4).map(lambda some: [*some, *HI]) | values)
    | st.fixed_dictionaries({"messages": st.lists(messages, max_size=4).map(lambda some: [*some, *HI])})
)
def test_any_chat_is_understood_or_refused(body):
    understood(API.chat, body)


@settings(max_examples=200, deadline=None)
@given(bodies(_COMPLETION, prompt=st.text(max_size=5) | st.lists(st.integers(0, 300), max_size=4) | values) | values)
def test_any_completion_is_understood_or_refused(body):
    understood(API.completion, body)


def said(**fields):
    return [*HI, {"role": "assistant", **fields}, *HI]


CALL = {"id": "a", "function": {"name": "f", "arguments": "{}"}}


@pytest.mark.parametrize(
    ("messages", "message"),
    [
        (said(tool_calls=CALL), "messages[1].tool_calls: found {'id'"),
        (said(tool_calls="f"), "messages[1].tool_calls: found 'f'"),
        (said(tool_calls=[{**CALL, "id": {}}]), "messages[1].tool_calls[0].id: found {}, allowed is text"),
        (said(tool_calls=[CALL, {**CALL, "id": [1]}]), "messages[1].tool_calls[1].id: found [1]"),
        (said(tool_calls=[5]), "messages[1].tool_calls[0]: found 5"),
        (said(tool_calls=[{"function": {"name": 5, "arguments": "{}"}}]), "messages[1].tool_calls[0].function.name: found 5"),
        (said(tool_calls=[{"function": {"name": "f", "arguments": "["}}]), "tool_calls[0].function.arguments: found '['"),
        (said(reasoning_content=5), "messages[1].reasoning_content: found 5"),
        ([*said(tool_calls=[CALL]), {"role": "tool", "tool_call_id": 5, "content": "x"}], "messages[3].tool_call_id: found 5"),
    ],
)
def test_a_message_that_is_wrong_is_named_by_its_path(messages, message):
    with pytest.raises(UserError) as found:
        API.chat({"messages": messages})
    assert message in str(found.value)


@pytest.mark.parametrize("field", ["messages", "tools", "response_format", "stop", "thinking", "tool_choice", "seed"])
def test_what_is_nested_too_deeply_is_refused(field):
    deep = "[" * 100_000 + "]" * 100_000
    whole = f'{{"type": "json_schema", "json_schema": {{"schema": {{"a": {deep}}}}}}}' if field == "response_format" else deep
    for depth in (5_000, 100_000) if field != "response_format" else (100_000,):
        text = whole.replace(deep, "[" * depth + "]" * depth)
        body = f'{{"messages": {json.dumps(HI)}, "{field}": {text}}}' if field != "messages" else f'{{"messages": {text}}}'
        with pytest.raises(UserError, match=f"{field}|nested too deeply"):
            _read(API.chat, body.encode())
