"""Conversations: as token ids, as the problem of a task, and the runs that continue them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from arbor import components
from arbor.aggregate.best import Best
from arbor.controllers.chain import Chain
from arbor.errors import UsageError
from arbor.model.chat_template import refuse_broken_template
from arbor.model.control_tokens import control_tokens, encode_marked
from arbor.model.sampling_params import Sampling
from arbor.tasks.base import BlockLimits, Converses, Task
from arbor.tasks.plain_text import PlainText, SteppedText
from arbor.tasks.step_format import StepFormat
from arbor.verifiers.exact import Exact

STEPS = 64  # of a text at most, where its tokens are not used up before


def conversation_tokens(
    tokenizer: Any,
    messages: Sequence[Mapping[str, Any]],
    tools: Sequence[Mapping[str, Any]] = (),
) -> list[int]:
    """Token ids of a conversation, up to the beginning of the next message.

    Without a chat template it is the contents, separated by empty lines. Control tokens named in
    the contents are text (`ControlTokens`).

    Args:
        tokenizer: of the model.
        messages: each with ``role`` and ``content``; perhaps with ``tool_calls``.
        tools: functions that the model may call, as chat templates read them.

    Raises:
        UsageError: the chat template cannot be used, or leaves tools or calls out.
        Exception: the chat template's own, where it refuses the messages.
    """
    refuse_broken_template(tokenizer)
    mark = control_tokens(tokenizer).mark
    turns, offered = _marked(messages, mark), _marked(tools, mark) or None
    template = getattr(tokenizer, "chat_template", None)
    if any(each.get("tool_calls") for each in messages) and "tool_calls" not in str(template):
        raise _left_out("calls of tools", "Write them into the messages.")
    write = partial(
        tokenizer.apply_chat_template, turns, add_generation_prompt=True, tokenize=False
    )
    text = write(tools=offered) if template else ""
    if offered and text == (write() if template else ""):
        raise _left_out("tools", "Leave them out, or describe them in a message.")
    if not template:
        return encode_marked(tokenizer, "\n\n".join(each["content"] for each in turns))
    return encode_marked(tokenizer, text, add_special_tokens=False)


def _marked(value: Any, mark: Callable[[str], str]) -> Any:
    """A value as JSON has it, with the names of control tokens marked in every text."""
    if isinstance(value, str):
        return mark(value)
    if isinstance(value, Mapping):
        return {mark(name): _marked(each, mark) for name, each in value.items()}
    if isinstance(value, Sequence):
        return [_marked(each, mark) for each in value]
    return value


def _left_out(what: str, hint: str) -> UsageError:
    return UsageError("chat-template", f"the model's chat template takes no {what}.", hint)


def problem_of(messages: Sequence[Mapping[str, str]]) -> tuple[str, str]:
    """System message and problem of a conversation that a task reads.

    Raises:
        UsageError: more than one problem, or none.
    """
    system = "\n\n".join(each["content"] for each in messages if each["role"] == "system")
    others = [each for each in messages if each["role"] != "system"]
    if len(others) != 1 or others[0]["role"] != "user":
        raise UsageError(
            "conversation",
            f"{len(others)} messages without the system message, and a task reads one problem.",
            "Give one user message, perhaps after a system message.",
        )
    return system, others[0]["content"]


def with_system(task: Task, system: str) -> Task:
    """A task with a system message of a conversation; an empty one changes nothing.

    Raises:
        UsageError: it takes none.
    """
    if not system:
        return task
    if not isinstance(task, Converses) or "system" not in components.settings_of(task):
        raise UsageError(
            "conversation",
            f"the task '{task.name}' takes no system message.",
            "Leave it out, or name a task in words.",
        )
    changed: Task = components.build("task", task, system=system)
    return changed


def plain_decoding(
    ends: Sequence[str],
    max_tokens: int,
    sampling: Sampling,
    choices: int = 1,
    form: StepFormat | None = None,
    alternatives: int = 0,
) -> dict[str, Any]:
    """The fields of `Setup` that make a run continue a text without a search."""
    return {
        "task": PlainText(),
        "controller": Chain(choices),
        "verifier": Exact(),
        "aggregate": Best(),
        "boundary": BlockLimits(tuple(ends), max_tokens, 1, form),
        "sampling": sampling,
        "max_expansions": None,
        "branch_stop": None,
        "verifier_models": {},
        "alternatives": alternatives,
    }


def stepped_search(
    ends: Sequence[str], max_tokens: int, step_tokens: int, sampling: Sampling
) -> dict[str, Any]:
    """The fields of `Setup` that make a search continue a text, step by step."""
    step = min(step_tokens, max_tokens)
    depth = max(STEPS, -(-max_tokens // step))
    task = SteppedText(tuple(ends), max_tokens=step, max_depth=depth, path_tokens=max_tokens)
    return {"task": task, "boundary": task.boundary, "sampling": sampling}
