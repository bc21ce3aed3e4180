"""Prompts: templates, examples, messages for chat models, and ``arbor prompt``."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from arbor.cli.build import warn_of_misfit
from arbor.cli.record_options import SolverOptions
from arbor.errors import UsageError
from arbor.run.planning import encode_problem, encode_prompt, fitted
from arbor.tasks.countdown import Countdown
from arbor.tasks.crosswords import Crosswords
from arbor.tasks.game24 import Game24
from arbor.tasks.prompt_template import FOLDER, read_template
from arbor.tasks.reasoning import Reasoning

NAMES = sorted(path.stem for path in FOLDER.glob("*.toml"))
VALID = """
schema = "arbor.template/1"
system = "Be brief."
prompt = "{examples}Q: {problem}\\nA:"
example = "Q: {problem}\\nA: {solution}\\n"

[[examples]]
problem = "1+1?"
solution = "2"
"""


def written(text: str, name: str = "mine.toml") -> str:
    Path(name).write_text(text, encoding="utf-8")
    return str(Path(name).absolute())


@pytest.fixture(autouse=True)
def in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# Templates


@pytest.mark.parametrize("name", NAMES)
def test_the_built_in_templates_are_valid_and_show_their_examples(name: str) -> None:
    template = read_template(name)
    shots = len(template.examples)
    text = template.text("What is it?", shots)

    assert shots >= 1
    assert text.count("What is it?") == 1 and text.index("What is it?") > 0
    for example in template.examples:
        assert example.problem in text and example.solution in text
        assert example.solution not in template.text("What is it?", 0)
    assert not re.search(r"\{(problem|examples|solution)\}", text)


class Vocabulary:
    """A tokenizer of so many entries, a token for each character."""

    def __init__(self, entries: int, chat: bool = False) -> None:
        self._entries = entries
        self.chat_template = "a template" if chat else None

    def __len__(self) -> int:
        return self._entries

    all_special_tokens = ()

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def encode(self, text: str, **_: Any) -> list[int]:
        return list(map(ord, text))

    def apply_chat_template(self, messages: Any, **_: Any) -> str:
        turns = (f"<{each['role']}>{each['content']}" for each in messages)
        return f"{''.join(turns)}<assistant>"


@pytest.mark.parametrize("task", [Game24(), Countdown(), Reasoning(), Crosswords()])
@pytest.mark.parametrize("chat", [False, True])
def test_a_model_that_reads_words_is_told_what_to_do(task: Any, chat: bool) -> None:
    tokenizer, problem = Vocabulary(50_000, chat), task.parse(task.example)

    fit = fitted(task, tokenizer)
    text = "".join(map(chr, encode_problem(tokenizer, fit, problem)))

    assert text.endswith("<assistant>") is chat
    assert len(text) > len(problem.text) + 60 and problem.text.split()[-1] in text
    assert text.count("<assistant>") == (1 + len(fit.turns(problem)) // 2 if chat else 0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = [", "is not TOML"),
        ("", "has the schema None"),
        ('schema = "arbor.template/2"', "has the schema 'arbor.template/2'"),
        ('schema = "arbor.template/1"', "has no {problem}"),
        ('schema = "arbor.template/1"\nprompt = 3', "has no text as 'prompt'"),
        ('schema = "arbor.template/1"\nprompt = "{problem}"\nshots = 3', "no setting 'shots'"),
        (VALID.replace("{examples}", ""), "no place for them"),
        (VALID.replace("{solution}", ""), "no place for them"),
        (VALID.replace('solution = "2"', ""), "example 1 without problem and solution"),
        (VALID.replace('solution = "2"', "solution = 2"), "no text as 'solution'"),
        (VALID.replace("[[examples]]", "[examples]").replace('solution = "2"', ""), "example 1"),
    ],
)
def test_an_invalid_template_says_what_would_work(text: str, words: str) -> None:
    path = written(text)

    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        Reasoning(template=path).parse("2+2?")
    assert caught.value.code in ("template-invalid", "unknown-setting")


# Messages


def read(tokenizer: Any, task: Any) -> str:
    return "".join(map(chr, encode_prompt(tokenizer, "2+2?", task)))


# The command


# Tasks and models that do not fit


@pytest.mark.parametrize(("entries", "warned"), [(640, False), (50_000, True)])
def test_a_model_of_words_and_a_task_of_lines_do_not_fit(entries: int, warned: bool) -> None:
    said: list[str] = []
    output: Any = SimpleNamespace(warn=said.append)
    files = SimpleNamespace(tokenizer=Vocabulary(entries))
    solver: Any = SimpleNamespace(checkpoint=SimpleNamespace(read=lambda: files))
    for task in ("chains", "game24"):
        options = SolverOptions(given={"task": task, "model": "m.gguf"}, set=())
        warn_of_misfit(output, options, solver)

    assert [("'chains' has no instructions" in each) for each in said] == [True] * warned
