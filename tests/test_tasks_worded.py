r"""Tasks in words: rows of well-known data files, the end of a path, its answer, and the grade."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from arbor.engine.stop_rule import StopRule
from arbor.errors import InputError, UsageError
from arbor.measure.evaluation.dataset import of_rows
from arbor.measure.evaluation.rows import DataRow
from arbor.registry import BUILTIN
from arbor.tasks.arc import ARC
from arbor.tasks.base import Converses, Guesses, Task, Versioned
from arbor.tasks.reasoning import AIME, GSM8K, Math, Reasoning
from arbor.tasks.worded import spoken

TASKS: list[Any] = [AIME(), ARC(), GSM8K(), Math(grader="exact"), Reasoning()]


def graded(task: Any, row: dict[str, Any], text: str, problem: str, answer: str) -> bool:
    """Whether a text solves the problem of a row."""
    words, key = task.entry(row, problem, answer)
    parsed = replace(task.parse(words), expected=key)
    found: bool = task.grade(parsed, task.answer(parsed, [text])).correct
    return found


class Pieces:
    """A tokenizer of words with the space before them, as most of models."""

    def __init__(self, text: str) -> None:
        self.pieces = re.findall(r"\n+|[ ]?\w+|[ ]?[^\w\s]", text)

    def decode(self, tokens: list[int]) -> str:
        return "".join(self.pieces[token] for token in tokens)


@pytest.mark.parametrize(
    "sentences",
    [
        ["The Moon orbits the Earth.", " It is grey.", " Really?", " Yes!", " Good"],
        ["Dr. Smith of the U.S. has 3.5 apples, e.g. red ones.", " He eats one."],
        ["He has 5.\n", "So he pays 10."],
        ["1. First add 2 and 3.\n", "2. Then halve it.", "\n\nDone."],
        ["Wait.", ".. I see."],
        ["Here $$x. y$$ is open.", " Done."],
    ],
)
def test_a_sentence_ends_at_its_full_stop(sentences: list[str]) -> None:
    tokenizer = Pieces("".join(sentences))
    rule = StopRule(tokenizer, Reasoning(steps="sentence").boundary, [])
    found: list[list[int]] = [[]]
    for token in range(len(tokenizer.pieces)):
        found[-1].append(token)
        if not rule.goes_on(found[-1]) and rule.after(found[-1]):
            found.append([])

    assert list(filter(None, map(tokenizer.decode, found))) == sentences


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_every_task_in_words_has_every_part(task: Any) -> None:
    problem = task.parse(task.example)

    assert isinstance(task, Task) and isinstance(task, Guesses)
    assert isinstance(task, Versioned) and isinstance(task, Converses)
    assert task.name == problem.task and BUILTIN["task"][task.name]
    assert problem.text in task.prompt(problem)
    assert task.parse(task.example).id == problem.id
    assert task.grading and task.prompt_version
    assert replace(task, system=task.system_message).prompt_version == task.prompt_version
    assert replace(task, system="Be terse.").prompt_version != task.prompt_version
    with pytest.raises(InputError, match="problem-empty"):
        task.parse("  ")
    with pytest.raises(UsageError, match="no-problems"):
        task.problems("test")
    with pytest.raises(UsageError, match="no-exact-verifier"):
        task.value(problem, [])


# GSM8K


@pytest.mark.parametrize(
    ("text", "correct", "terminal", "guess"),
    [
        ("48/2 = 24\n#### 72", True, True, False),
        ("#### 72\n\nQuestion: more\nAnswer: 3\n#### 9", True, True, False),
        ("#### 72 clips", True, True, False),
        ("So \\boxed{\\$72.00}", True, True, False),
        ("The answer is $72.", True, False, False),
        ("which makes 72.", True, False, True),
        ("#### 1. Count\nso 72 clips", True, False, True),
        ("#### 71", False, True, False),
        ("none", False, False, False),
    ],
)
def test_gsm8k(text: str, correct: bool, terminal: bool, guess: bool) -> None:
    task = GSM8K()
    problem = task.parse("How many?")

    assert graded(task, {}, text, "How many?", "#### 72") is correct
    assert task.is_terminal(problem, [text]) is terminal
    assert task.is_guess(problem, [text]) is guess


# AIME


# ARC


@pytest.mark.parametrize(
    ("thoughts", "answer", "terminal", "guess"),
    [
        (["A mirror is smooth.\n", "The answer is A.\n"], "A", True, False),
        (["The answer is a candle.\n"], "C", True, False),
        (["A magnet attracts iron.\n", "So it is (B)"], "B", False, True),
        (["A magnet attracts iron.\n", "So it is that one"], None, False, False),
        (["The answer is D.\n"], "D", True, False),
    ],
)
def test_arc_reads_letters(
    thoughts: list[str], answer: str | None, terminal: bool, guess: bool
) -> None:
    problem = ARC().parse("Which?\nA. a magnet\n(B) a mirror\n3) a candle\nD: a cup")

    assert ARC().answer(problem, thoughts) == answer
    assert ARC().is_terminal(problem, thoughts) is terminal
    assert ARC().is_guess(problem, thoughts) is guess


@pytest.mark.parametrize(
    ("row", "options", "key"),
    [
        (
            {
                "question": "Which is true?\nA. iron rusts\nB. gold rusts",
                "choices": {"text": ["only the first", "only the second"], "label": ["A", "B"]},
                "answerKey": "B",
            },
            ["only the first", "only the second"],
            "B",
        ),
        ({"question": "Which?\n1) one\nA. x\nB. y", "answerKey": "2"}, ["x", "y"], "B"),
        ({"question": "Which?\nB. x\nA. y", "answerKey": "B"}, None, "from A or 1 on"),
        ({"question": "Which?\nA. x\nB. y", "answerKey": "G"}, None, "Labels: A, B"),
        ({"question": "Which?\nA. x\nB. y", "answerKey": "²"}, None, "Labels: A, B"),
        (
            {
                "question": "Which?",
                "choices": {"text": ["x"] * 27, "label": [f"L{place}" for place in range(27)]},
                "answerKey": "L1",
            },
            None,
            "from two to 26",
        ),
    ],
)
def test_a_key_of_arc_names_an_option_of_its_row(
    row: dict[str, Any], options: list[str] | None, key: str
) -> None:
    if options is None:
        with pytest.raises(InputError) as caught:
            ARC().entry(row, row["question"], row["answerKey"])
        assert key in str(caught.value)
        return

    (sample,) = of_rows([DataRow("line 1", row)], ARC(), "f")

    assert (sample.problem.data["options"], sample.problem.expected) == (options, key)


# Thinking tags and steps


@pytest.mark.parametrize(
    ("text", "rest"),
    [
        ("plain", "plain"),
        ("<think>\\boxed{1}</think>\\boxed{2}", "\\boxed{2}"),
        ("\\boxed{1}</think>\nSo 2", "\nSo 2"),
        ("<think>\\boxed{1}", ""),
        ("so <think>hm", "so "),
    ],
)
def test_text_between_thinking_tags_is_not_an_answer(text: str, rest: str) -> None:
    assert spoken(text) == rest
    assert Reasoning().is_terminal(Reasoning().parse("?"), [text]) is ("boxed" in rest)


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("Each tray has 12 rolls, so the four trays have 4 * 12 rolls.\n\n", True),
        ("Each tray has 12 rolls, so the four trays have 4 * 12 rolls.\n", False),
        ("**Step 1: How many rolls the four trays have in the morning:**\n\n", False),
        ("The four trays of the baker hold together, in the morning, rolls:\n\n", False),
        ("So they have\n\\[\n4 \\times 12 = 48 \\text{ rolls in the morning}\n\n", False),
        ("So they have\n\\[\n4 \\times 12 = 48 \\text{ rolls in the morning}\n\\]\n\n", True),
        ("\\begin{align*}\na &= 4 \\times 12 \\\\[4pt]\n&= 48\n\\end{align*}\n\n", True),
        ("\\[\na = 4 \\times 12 \\\\[4pt]\n\\text{which is what the trays have}\n\n", False),
        ("With all of the rolls in the trays $x,$$y,$ and $z$ are known now.\n\n", True),
        ("All of the rolls cost \\$$x$, and the trays \\$5 in the morning.\n\n", True),
        ("The rolls cost $5 and the trays $$x = 4 \\times 12\n\\text{dollars}\n\n", False),
        ("```python\nrolls = 4 * 12\nprint(rolls)  # in the morning\n\n", False),
        ("Therefore:\n\n", False),
        ("\n\n", False),
        ("The answer is \\boxed{18}.\n", True),
        ("".join(f"{n}. Then {n} trays have {12 * n} rolls.\n" for n in range(1, 8)), True),
    ],
)
def test_a_paragraph_is_a_thought(text: str, ends: bool) -> None:
    rule = Reasoning().boundary.ends

    assert rule is not None
    tokens = len(re.findall(r"\w+|[^\w ]", text))  # about as a tokenizer counts
    assert rule(text, tokens) is ends


# Lists of next steps
