"""Prompts: templates, examples, messages for chat models, and ``arbor prompt``."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run_cli import Arbor

from arbor.cli.build import warn_of_misfit
from arbor.cli.record_options import SolverOptions
from arbor.errors import InputError, UsageError
from arbor.run.planning import encode_problem, encode_prompt, fitted
from arbor.tasks.countdown import Countdown
from arbor.tasks.crosswords import Crosswords
from arbor.tasks.game24 import Game24
from arbor.tasks.prompt_template import FOLDER, Example, PromptTemplate, read_template
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


def test_the_prompt_of_reasoning_is_as_before() -> None:
    task = Reasoning(shots=0)

    assert task.prompt(task.parse("How many?")) == (
        "Solve the problem. Reason step by step, in short steps with an empty line after each. "
        "Put the final answer in \\boxed{}.\n\nProblem: How many?\n\nSolution:\n"
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_chat_model_is_asked_without_examples_and_a_base_model_is_shown_all(name: str) -> None:
    template = read_template(name)
    if not template.chat:
        pytest.skip("one prompt for both")

    (message,) = template.turns("What is it?", None)

    assert message["role"] == "user" and message["content"].count("What is it?") == 1
    assert all(each.solution in template.text("What is it?", None) for each in template.examples)
    assert all(each.solution not in message["content"] for each in template.examples)


def test_examples_of_a_chat_are_earlier_turns() -> None:
    task = Reasoning(template=written(f'chat = "Solve: {{problem}}"\n{VALID}'), shots=1)

    assert task.turns(task.parse("2+2?")) == [
        {"role": "user", "content": "Solve: 1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "Solve: 2+2?"},
    ]
    with pytest.raises(UsageError, match=r"no \{problem\} in its chat"):
        read_template(written(f'chat = "Solve."\n{VALID}', "other.toml"))


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


def test_a_model_trained_on_lines_gets_its_own_prompt() -> None:
    game, problem = Game24(), Game24().parse("4 5 6 10")
    small = Vocabulary(640)

    assert fitted(game, small) is game
    text = "".join(map(chr, encode_problem(small, game, problem)))
    assert text == "Target 24 (left: 4 5 6 10)\n"


def test_a_template_of_a_users_own() -> None:
    task = Reasoning(template=written(VALID), shots=1)

    assert task.prompt(task.parse("2+2?")) == "Q: 1+1?\nA: 2\nQ: 2+2?\nA:"
    assert task.system_message == "Be brief."
    assert Reasoning(template=task.template, system="Hm.").system_message == "Hm."
    assert Reasoning(template=task.template).prompt_version != task.prompt_version


def test_a_template_may_ask_for_next_steps() -> None:
    plain, own = (
        Reasoning(template=written(VALID)),
        f'propose = "Steps of {{problem}}:\\n"\n{VALID}',
    )
    asking = Reasoning(template=written(own, "asking.toml"))
    problem = asking.parse("2+2?")

    assert asking.proposal(problem, ()).text == "\n\nSteps of 2+2?:\n"
    assert asking.proposal(problem, ("a\n",)).text == "Steps of 2+2?:\n"
    assert asking.prompt_version != plain.prompt_version
    assert plain.proposal(problem, ()) == Reasoning().proposal(problem, ())


def test_a_template_that_has_changed_is_read_again() -> None:
    task = Reasoning(template=written(VALID))
    before, version = task.prompt(task.parse("2+2?")), task.prompt_version
    written(VALID.replace("A:", "Answer:"))
    os.utime("mine.toml", ns=(1, 1))

    assert before == "Q: 2+2?\nA:"
    assert task.prompt(task.parse("2+2?")) == "Q: 2+2?\nAnswer:"
    assert task.prompt_version != version


@given(st.text(max_size=30), st.text(max_size=30))
def test_braces_in_a_problem_stay_as_they_are(problem: str, solution: str) -> None:
    template = PromptTemplate(
        "<{examples}|{problem}>", "[{problem}:{solution}]", (Example(problem, solution),)
    )

    assert template.text("{examples}{problem}", 1) == (
        f"<[{problem}:{solution}]|{{examples}}{{problem}}>"
    )


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


def test_a_missing_template_names_the_built_in_ones() -> None:
    with pytest.raises(
        InputError, match=r"template-unreadable.*aime, arc, crosswords, gsm8k, math, reasoning"
    ):
        Reasoning(template="nope.toml").parse("2+2?")


@pytest.mark.parametrize("shots", [-1, 99])
def test_the_number_of_examples_is_checked(shots: int) -> None:
    with pytest.raises(UsageError, match=f"shots={shots}"):
        Reasoning(shots=shots).parse("2+2?")


# Messages


class Chat:
    """A tokenizer with a chat template; ids are the characters."""

    chat_template = "{{ messages }}"

    def __init__(self, refuses_system: bool = False) -> None:
        self._refuses = refuses_system

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [ord(each) for each in text]

    def apply_chat_template(self, messages: Any, **options: Any) -> str:
        if self._refuses and messages[0]["role"] == "system":
            raise ValueError("System role not supported")
        said = "".join(f"<{each['role']}>{each['content']}" for each in messages)
        return said + "<assistant>"


def read(tokenizer: Any, task: Any) -> str:
    return "".join(map(chr, encode_prompt(tokenizer, "2+2?", task)))


def test_a_prompt_is_a_message_where_there_is_a_chat_template() -> None:
    assert read(Chat(), None) == read(Chat(), Reasoning()) == "<user>2+2?<assistant>"
    assert read(Chat(), Reasoning(system="Hm.")) == "<system>Hm.<user>2+2?<assistant>"
    assert read(Chat(), Reasoning(chat="off")) == "2+2?"
    assert read(Chat(), Reasoning(chat="off", system="Hm.")) == "Hm.\n\n2+2?"


def test_a_template_without_system_messages_says_what_would_work() -> None:
    with pytest.raises(UsageError, match=r"System role not supported.*chat=off") as caught:
        read(Chat(refuses_system=True), Reasoning(system="Hm."))
    assert caught.value.code == "chat-template"
    assert read(Chat(refuses_system=True), Reasoning()) == "<user>2+2?<assistant>"


# The command


def test_the_command_shows_the_text_and_counts_the_tokens(command: Arbor) -> None:
    document = command("prompt", "game24", "4 5 6 10", "--json").document

    assert document["text"].endswith("Target 24 (left: 4 5 6 10)\n")
    assert document["tokens"] == len(document["ids"]) > 5
    shown = command("prompt", "game24", "4 5 6 10", "-v")
    assert shown.out.rstrip("\n") == document["text"].rstrip("\n")
    assert f"{document['tokens']} tokens of builtin:sapling" in shown.err


def test_the_command_has_the_settings_of_the_task(command: Arbor) -> None:
    path = written(VALID)

    ran = command("prompt", "reasoning", "2+2?", "--set", "shots=1", "--set", f"template={path}")
    assert "Q: 1+1?\nA: 2\nQ: 2+2?\nA:" in ran.out
    Path("problem.txt").write_text("3+3?")
    assert "3+3?" in command("prompt", "gsm8k", "--file", "problem.txt").out


def test_a_printed_template_is_valid(command: Arbor) -> None:
    for name in NAMES:
        ran = command("prompt", name, "--template")
        task = Reasoning(template=written(ran.out, f"{name}-copy.toml"))
        assert task.prompt_template() == read_template(name)


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code"),
    [
        (["gsm9k"], 2, "unknown-task"),
        (["game24", "4 5"], 4, "problem-invalid"),
        (["game24", "--template"], 2, "template-missing"),
        (["math", "x", "--file", "x.txt"], 2, "usage"),
        (["math", "--file", "x.txt"], 4, "problem-unreadable"),
        (["math", "--set", "shot=1"], 2, "unknown-setting"),
        (["math", "--set", "width=1"], 2, "unknown-setting"),
        (["math", "--model", "./nowhere"], 5, "model-not-found"),
    ],
)
def test_an_error_of_the_command(
    command: Arbor, arguments: list[str], exit_code: int, code: str
) -> None:
    ran = command("prompt", *arguments, "--json")

    assert ran.code == exit_code
    assert json.loads(ran.out)["error"]["code"] == code
    assert "Traceback" not in ran.err


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
