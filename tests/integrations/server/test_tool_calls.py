"""Calls of functions in a model's text, whole and in parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")

from arbor.integrations.server.planned import Planned
from arbor.integrations.server.responses import Responses
from arbor.run.choices import Delta

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"c": [2]}}}\n</tool_call>'
NOW = '<tool_call>{"name": "now"}</tool_call>'


def form(calls: int) -> Responses:
    return Responses("m", Planned((), 1, 0, 1.0, (), False, False, calls), "chat.completion")


ADDED = ("add", '{"a": 1, "b": {"c": [2]}}')
CASES = [
    (ADD, (None, [ADDED], "tool_calls")),
    (f"I add.\n{ADD}\n{NOW}\n", ("I add.\n", [ADDED, ("now", "{}")], "tool_calls")),
    ("2 <tool_box>", ("2 <tool_box>", [], "stop")),
    ("", ("", [], "stop")),
    *(
        (text, (text, [], "stop"))
        for text in (
            "<tool_call>{",
            "<tool_call>5</tool_call>",
            '<tool_call>{"name": 5}</tool_call>',
            '<tool_call>{"name": "x", "arguments": "y"}</tool_call>',
            '<tool_call>{"name": "x"}',
            f"{ADD} and more",
            "<tool_call>" + "[" * 100_000,
        )
    ),
]


@pytest.mark.parametrize(("text", "found"), CASES[:6], ids=range(6))
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stream_has_the_calls_of_the_whole(text: str, found: Any, size: int) -> None:
    responses = form(9)
    parts = [text[at : at + size] for at in range(0, len(text), size)]
    deltas = [*(Delta(0, part) for part in parts), Delta(0, "", (), "stop")]

    choices = [
        json.loads(responses.chunk(0, each).removeprefix(b"data: "))["choices"][0]
        for each in deltas
    ]

    said = "".join(each["delta"].get("content", "") for each in choices)
    calls = [call for each in choices for call in each["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    named = [(each["function"]["name"], each["function"]["arguments"]) for each in calls]
    content = said if said or not calls else None
    assert (content, named, choices[-1]["finish_reason"]) == found
