"""Calls of functions in a model's text, whole and in parts."""

from __future__ import annotations

import json
from typing import Any

import pytest

pytest.importorskip("fastapi", reason="the extra `server` is not installed")
pytest.importorskip("openai", reason="the extra `test` is not installed")

from openai.lib.streaming.chat import ChatCompletionStreamState
from openai.types.chat import ChatCompletionChunk

from arbor.integrations.server.planned import Planned
from arbor.integrations.server.responses import Responses
from arbor.run.choices import Delta, Finish

ADD = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": {"c": [2]}}}\n</tool_call>'
NOW = '<tool_call>{"name": "now"}</tool_call>'


def form(calls: int) -> Responses:
    return Responses("m", Planned((), 1, 0, 1.0, (), False, False, calls), "chat.completion")


ADDED = ("add", '{"a": 1, "b": {"c": [2]}}')
CASES = [
    (ADD, None, [ADDED]),
    (f"I add.\n{ADD}\n{NOW}\n", "I add.\n", [ADDED, ("now", "{}")]),
    (f"{ADD} and more, {NOW}, done", "and more, , done", [ADDED, ("now", "{}")]),
    (f"{ADD}\n<tool_call>\n{{'x'}}\n</tool_call>{NOW}", "<tool_call>\n{'x'}\n</tool_call>", 2),
    (f'{NOW}\n<tool_call>\n{{"name": "ad', '<tool_call>\n{"name": "ad', [("now", "{}")]),
    ('<tool_call>{"name": "</tool_call>"}</tool_call>', None, [("</tool_call>", "{}")]),
    ("2 <tool_box>", "2 <tool_box>", []),
    ("", "", []),
    *(
        (text, text, [])
        for text in (
            "<tool_call>{",
            "<tool_call>5</tool_call>",
            '<tool_call>{"name": 5}</tool_call>',
            '<tool_call>{"name": "x", "arguments": "y"}</tool_call>',
            '<tool_call>{"name": "x", "arguments": {"y": NaN}}</tool_call>',
            '<tool_call>{"name": "\\ud83d"}</tool_call>',
            '<tool_call>{"name": "x"}',
            "<tool_call>" + "[" * 100_000 + "</tool_call>",
        )
    ),
]


def named(calls: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(each["function"]["name"], each["function"]["arguments"]) for each in calls]


@pytest.mark.parametrize(("text", "content", "found"), CASES, ids=range(len(CASES)))
@pytest.mark.parametrize("finish", ["stop", "length"])
def test_a_message_has_the_complete_calls_and_the_rest_as_text(
    text: str, content: str | None, found: Any, finish: Finish
) -> None:
    choice = form(9)._whole(0, [Delta(0, text, (), finish)])

    calls = choice["message"].get("tool_calls", [])
    assert choice["message"]["content"] == content
    assert found in (named(calls), len(calls))
    assert choice["finish_reason"] == ("tool_calls" if calls and finish == "stop" else finish)


@pytest.mark.parametrize("text", [text for text, *_ in CASES[:-1]], ids=range(len(CASES) - 1))
@pytest.mark.parametrize("size", [1, 3, 100])
def test_a_stream_has_the_calls_of_the_whole(text: str, size: int) -> None:
    whole = form(9)._whole(0, [Delta(0, text, (), "stop")])
    parts = [text[at : at + size] for at in range(0, len(text), size)]

    responses, choices = form(9), []
    for delta in [*(Delta(0, part) for part in parts[:-1]), Delta(0, *parts[-1:], finish="stop")]:
        for line in responses.chunk(0, delta).decode().strip().split("\n\n"):
            choices += json.loads(line.removeprefix("data: "))["choices"]

    said = "".join(each["delta"].get("content", "") for each in choices)
    calls = [call for each in choices for call in each["delta"].get("tool_calls", [])]
    assert [call["index"] for call in calls] == list(range(len(calls)))
    assert named(calls) == named(whole["message"].get("tool_calls", []))
    assert said == (whole["message"]["content"] or "")
    assert [each["finish_reason"] for each in choices if each["finish_reason"]] == [
        whole["finish_reason"]
    ]
    assert "tool_calls" not in choices[-1]["delta"], "the end comes by itself"


def test_calls_beyond_the_most_are_left_out() -> None:
    choice = form(1)._whole(0, [Delta(0, f"{NOW}{ADD}", (), "stop")])

    assert named(choice["message"]["tool_calls"]) == [("now", "{}")]
    assert choice["message"]["content"] is None


def test_the_client_of_openai_sees_each_call_end() -> None:
    responses = form(9)
    deltas = [Delta(0, f"Now.{NOW}"), Delta(0, ADD, (), "stop")]
    lines = b"".join(responses.chunk(0, each) for each in deltas).decode().strip().split("\n\n")
    state: Any = ChatCompletionStreamState()

    events = [
        event
        for line in lines
        for event in state.handle_chunk(
            ChatCompletionChunk.model_validate_json(line.removeprefix("data: "))
        )
    ]

    ended = [each for each in events if each.type == "tool_calls.function.arguments.done"]
    assert [(each.name, each.arguments) for each in ended] == [("now", "{}"), ADDED]
