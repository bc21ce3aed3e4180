"""Mini crosswords: boards from lines, the end of a path, and scores by letter, word and game."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run_cli import Arbor

from arbor.errors import InputError
from arbor.measure.evaluation.results import results, scores
from arbor.tasks.base import BoundedQuestions, Guesses, ReadsRows, Task
from arbor.tasks.crosswords import (
    EMPTY,
    NAMES,
    BoardGrader,
    Crosswords,
    board_of,
    filled,
    words_of,
)

TASK = Crosswords()
WORDS = ("STUNG", "TENOR", "UNTIE", "NOISE", "GREEK")  # rows, and columns too
KEY = "\n".join(WORDS)
PROBLEM = replace(TASK.parse(TASK.example), expected=KEY)
ROWS = [f"h{place}. {word.lower()}\n" for place, word in enumerate(WORDS, 1)]


def grade(answer: str | None) -> tuple[bool, dict[str, float]]:
    found = TASK.grade(PROBLEM, answer)
    return found.correct, dict(found.scores)


def test_it_is_a_task_that_reads_rows() -> None:
    assert isinstance(TASK, Task) and isinstance(TASK, ReadsRows) and isinstance(TASK, Guesses)
    assert TASK.boundary.max_depth == len(NAMES)


def test_a_full_board_is_the_answer_and_ends_the_path() -> None:
    assert not TASK.is_terminal(PROBLEM, ROWS[:4])
    assert TASK.is_terminal(PROBLEM, ROWS)
    assert TASK.answer(PROBLEM, ROWS) == KEY
    assert not TASK.is_guess(PROBLEM, ROWS)
    assert grade(KEY) == (True, {"letter": 1.0, "word": 1.0, "game": 1.0})


def test_words_down_fill_the_same_squares() -> None:
    across = filled(["h1. stung\n", "v1. stung\n"])[0]

    assert across == ("STUNG", "T____", "U____", "N____", "G____")
    assert words_of(across)[:2] == ["STUNG", "T____"] and words_of(across)[5] == "STUNG"


@pytest.mark.parametrize(
    "line", ["h1. trend", "h6. stung", "h1. stun", "h1 stung", "done", "h1. stung", "v1. trend"]
)
def test_a_line_that_fills_no_word_ends_the_path_with_the_board_before(line: str) -> None:
    thoughts = [ROWS[0], f"{line}\n", ROWS[1]]

    assert TASK.is_terminal(PROBLEM, thoughts)
    assert TASK.answer(PROBLEM, thoughts) == "STUNG\n" + "\n".join([EMPTY * 5] * 4)
    assert TASK.is_guess(PROBLEM, thoughts)


def test_an_empty_board_is_not_an_answer() -> None:
    assert TASK.answer(PROBLEM, ["well\n"]) is None
    assert TASK.grade(PROBLEM, None).method == "none"
    assert TASK.grade(PROBLEM, "STUNG").extracted is None


def test_scores_count_letters_words_and_the_game() -> None:
    board = TASK.answer(PROBLEM, [ROWS[0], "h2. tends\n"])

    correct, found = grade(board)
    assert not correct and found["game"] == 0.0
    assert found["letter"] == pytest.approx((5 + 3) / 25)  # tenor, tends
    assert found["word"] == pytest.approx(1 / 10)


def test_the_question_shows_the_board() -> None:
    question = TASK.question(PROBLEM, ROWS[:1])

    assert isinstance(TASK, BoundedQuestions)
    assert len(question.text.encode()) < TASK.max_question_tokens
    assert "STUNG\n_____\n" in question.text and set(question.values.values()) == {0.0, 1.0}


@pytest.mark.parametrize(
    "text",
    [
        KEY,
        "".join(WORDS),
        "/".join(WORDS).lower(),
        "\n".join(" ".join(word) for word in WORDS),
        json.dumps(list("".join(WORDS))).strip("[]").replace('"', ""),
    ],
)
def test_a_board_is_read_in_any_dress(text: str) -> None:
    assert board_of(text) == WORDS
    assert BoardGrader().grade(text, KEY).correct


@given(st.text(st.sampled_from("ABC_ \n/"), max_size=60))
def test_a_board_has_five_rows_of_five(text: str) -> None:
    board = board_of(text)

    assert board is None or [len(row) for row in board] == [5] * 5


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.sampled_from(WORDS)), max_size=12))
def test_letters_never_change(lines: list[tuple[str, str]]) -> None:
    thoughts = [f"{name}. {word}\n" for name, word in lines]
    before = "".join(filled([])[0])
    for count in range(len(thoughts) + 1):
        after = "".join(filled(thoughts[:count])[0])
        assert all(b in (EMPTY, a) for a, b in zip(after, before, strict=True))
        before = after


@pytest.mark.parametrize("text", ["h1. one", TASK.example.replace("h2", "h1"), "a\n" * 10])
def test_a_problem_has_ten_named_clues(text: str) -> None:
    with pytest.raises(InputError, match="ten lines of clues"):
        TASK.parse(text)


def test_rows_may_be_lists(command: Arbor) -> None:
    clues = [line.partition(". ")[2] for line in TASK.example.splitlines()]
    row = {"clues": clues, "letters": list("".join(WORDS))}
    Path("x.jsonl").write_text(json.dumps(row) + "\n", encoding="utf-8")

    ran = command("eval", "x.jsonl", "--task", "crosswords", "--output", "out", "--json")

    assert ran.document["n"] == 1 and ran.document["grader"] == "crosswords/1"
    (line,) = Path("out/samples.jsonl").read_text("utf-8").splitlines()
    assert json.loads(line)["problem"] == TASK.example
    assert json.loads(line)["expected"] == KEY


def test_a_key_that_is_not_a_board_is_refused() -> None:
    with pytest.raises(InputError, match="not a board of 25 letters"):
        TASK.entry({}, TASK.example, "STUNG")


def test_the_means_of_scores_count_samples_without_one_as_zero() -> None:
    rows = [{"grade": {"scores": {"letter": 1.0, "game": 1.0}}}, {"grade": None}]

    assert scores(rows) == {"game": 0.5, "letter": 0.5}
    assert results([])["scores"] == {}


def test_the_words_of_a_list_are_thoughts() -> None:
    text = "1. h2. Tenor (certain)\n- v1: STRAY\nh3. abcdef\nh9. aaaaa\nh4\n* h4. noise, low\n"

    proposal = TASK.proposal(TASK.parse(TASK.example), ("h1. stung\n",))

    assert TASK.proposals(TASK.parse(TASK.example), (), text) == [
        "h2. tenor\n",
        "v1. stray\n",
        "h4. noise\n",
    ]
    assert proposal.text.startswith("The board is now\nSTUNG\n_____\n")
    assert proposal.max_tokens == 10 * TASK.boundary.max_tokens
