"""PromptTemplate: a prompt as a data file, with examples and a system message.

    schema = "arbor.template/1"
    system = ""                                  # for models with a chat template
    prompt = "{examples}Problem: {problem}\\n"    # what the model reads
    example = "Problem: {problem}\\n{solution}\\n\\n"
    chat = "{problem}\\nReason step by step."      # the message to a model with a chat template
    propose = "List next steps, one a line:\\n"   # asks for several thoughts at once

    [[examples]]
    problem = "What is 2 + 2?"
    solution = "It is \\\\boxed{4}."

The templates of arbor's own tasks are in ``arbor/tasks/prompts/``, to copy and change.
"""

from __future__ import annotations

import functools
import hashlib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from arbor.errors import InputError, UsageError, unknown_setting
from arbor.support.texts import surrogate_of

SCHEMA = "arbor.template/1"
FOLDER = Path(__file__).with_name("prompts")

_FIELD = re.compile(r"\{(problem|solution|examples)\}")
_KEYS = ("schema", "system", "prompt", "example", "examples", "chat", "propose")


class SolvedExample(NamedTuple):
    """A solved problem in a prompt."""

    problem: str
    solution: str


@dataclass(frozen=True, slots=True)
class PromptTemplate:
    """A prompt with fields in braces.

    Attributes:
        prompt: the text with ``{problem}``, and ``{examples}`` where examples belong.
        example: one example, with ``{problem}`` and ``{solution}``.
        examples: in the order in which they are shown.
        system: the system message; empty for none.
        propose: the question for several next steps, with ``{problem}`` if it repeats it; empty
            for the task's own.
        chat: the message to a model with a chat template, with ``{problem}``; examples are earlier
            turns then. Empty: `prompt`, with the examples in it.
    """

    prompt: str
    example: str = ""
    examples: tuple[SolvedExample, ...] = ()
    system: str = ""
    propose: str = ""
    chat: str = ""

    def turns(self, problem: str, shots: int | None) -> list[dict[str, str]]:
        """The messages to a model with a chat template, up to the user's last one.

        Args:
            problem: the text.
            shots: examples; None: none.
        """
        if not self.chat:
            return [{"role": "user", "content": self.text(problem, shots or 0)}]
        messages = []
        for each in self.examples[: shots or 0]:
            asked = _filled(self.chat, problem=each.problem)
            messages.append({"role": "user", "content": asked})
            messages.append({"role": "assistant", "content": each.solution.strip()})
        return [*messages, {"role": "user", "content": _filled(self.chat, problem=problem)}]

    def text(self, problem: str, shots: int | None) -> str:
        """The prompt of a problem as one text, after so many of the examples; None: after all that
        the template has, or none where it has no `chat`."""
        if shots is None:
            shots = len(self.examples) if self.chat else 0
        shown = "".join(
            _filled(self.example, problem=each.problem, solution=each.solution)
            for each in self.examples[:shots]
        )
        return _filled(self.prompt, problem=problem, examples=shown)

    def question(self, problem: str) -> str:
        """The question for several next steps of a problem; empty for the task's own."""
        return _filled(self.propose, problem=problem)

    def digest(self, shots: int | None) -> str:
        """Digest of everything except the problem."""
        text = f"{self.system}\0{self.text('', shots)}\0{self.prompt}"
        if self.chat:
            text += f"\0{self.turns('', shots)}\0{self.chat}"
        if self.propose:
            text += f"\0{self.propose}"
        return hashlib.blake2b(text.encode("utf-8", "backslashreplace"), digest_size=6).hexdigest()


def _filled(text: str, **fields: str) -> str:
    """A text with its fields; braces in their values stay as they are."""
    return _FIELD.sub(lambda match: fields.get(match[1], ""), text)


def read_template(path: str) -> PromptTemplate:
    """The template in a file; read again only when it has changed.

    Args:
        path: see `template_file`.

    Raises:
        InputError: the file cannot be read.
        UsageError: it is not a template; names the key.
    """
    file = template_file(path)
    try:
        changed = file.stat().st_mtime_ns
    except OSError:  # its error is that of reading it
        changed = 0
    return _template(file, path, changed)


@functools.lru_cache(maxsize=64)
def _template(file: Path, path: str, changed: int) -> PromptTemplate:
    data = _read(file, path)
    for key in data:
        if key not in _KEYS:
            raise unknown_setting(f"{path}: there is", key, _KEYS, path=path)
    if data.get("schema") != SCHEMA:
        raise _invalid(path, f"has the schema {data.get('schema')!r}", f'schema = "{SCHEMA}"')
    prompt, example, system, propose, chat = (
        _text(data, key, path) for key in ("prompt", "example", "system", "propose", "chat")
    )
    if "{problem}" not in prompt:
        raise _invalid(path, "has no {problem} in its prompt", 'prompt = "Problem: {problem}\\n"')
    if chat and "{problem}" not in chat:
        raise _invalid(path, "has no {problem} in its chat", 'chat = "{problem}\\nThink."')
    shown = "Problem: {problem}\\n{solution}\\n\\n"
    listed = data.get("examples", [])
    rows = listed if isinstance(listed, list) else [listed]
    examples = []
    for number, row in enumerate(rows, 1):
        if not isinstance(row, dict) or set(row) != {"problem", "solution"}:
            raise _invalid(
                path, f"has an example {number} without problem and solution", "[[examples]]"
            )
        examples.append(SolvedExample(_text(row, "problem", path), _text(row, "solution", path)))
    if examples and ("{examples}" not in prompt or "{solution}" not in example):
        raise _invalid(
            path,
            "has examples, but no place for them",
            f'{{examples}} in prompt, example = "{shown}"',
        )
    return PromptTemplate(prompt, example, tuple(examples), system, propose, chat)


def template_file(path: str) -> Path:
    """The file of a template, given by its path or by the name of a built-in one."""
    builtin = FOLDER / f"{path}.toml"
    return builtin if path.isidentifier() and builtin.is_file() else Path(path)


def _read(file: Path, path: str) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8-sig"))
    except OSError as error:
        known = ", ".join(sorted(each.stem for each in FOLDER.glob("*.toml")))
        raise InputError(
            "template-unreadable",
            f"the template {path} cannot be read: {error.strerror}.",
            f"Name a file, or one of: {known}.",
            path=path,
        ) from error
    except (ValueError, RecursionError) as error:  # neither UTF-8 nor TOML
        raise _invalid(path, f"is not TOML ({error})", 'prompt = "Problem: {problem}\n"') from error


def _text(data: dict[str, Any], key: str, path: str) -> str:
    value = data.get(key, "")
    if not isinstance(value, str) or surrogate_of(value):
        raise _invalid(path, f"has no text as '{key}'", f'{key} = "…"')
    return value


def _invalid(path: str, what: str, would: str) -> UsageError:
    return UsageError(
        "template-invalid",
        f"{path} {what}.",
        f"As in: {would}. 'arbor prompt TASK --template' prints a valid one.",
        path=path,
    )
