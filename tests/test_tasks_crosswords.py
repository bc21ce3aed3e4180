"""Mini crosswords: boards from lines, the end of a path, and scores by letter, word and game."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from arbor.tasks.crosswords import (
    BoardGrader,
    Crosswords,
    board_of,
)

TASK = Crosswords()
WORDS = ("STUNG", "TENOR", "UNTIE", "NOISE", "GREEK")  # rows, and columns too
KEY = "\n".join(WORDS)
PROBLEM = replace(TASK.parse(TASK.example), expected=KEY)
ROWS = [f"h{place}. {word.lower()}\n" for place, word in enumerate(WORDS, 1)]


def grade(answer: str | None) -> tuple[bool, dict[str, float]]:
    found = TASK.grade(PROBLEM, answer)
    return found.correct, dict(found.scores)


def test_scores_count_letters_words_and_the_game() -> None:
    board = TASK.answer(PROBLEM, [ROWS[0], "h2. tends\n"])

    correct, found = grade(board)
    assert not correct and found["game"] == 0.0
    assert found["letter"] == pytest.approx((5 + 3) / 25)  # tenor, tends
    assert found["word"] == pytest.approx(1 / 10)


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


def test_the_words_of_a_list_are_thoughts_the_surest_first() -> None:
    text = (
        "1. h2. Tenor (low)\n- v1: STRAY\nh3. abcdef\nh9. aaaaa\nh4\n"
        "* h4. noise, Certain\nH5. greek (medium)\nv4. noise (high\n"
    )

    assert TASK.proposals(PROBLEM, (), text) == [
        "h4. noise\n",
        "v4. noise\n",
        "h5. greek\n",
        "h2. tenor\n",
        "v1. stray\n",
    ]


@pytest.mark.parametrize(
    ("line", "ends"),
    [(line, False) for line in ("", " ", "v", "v2", "v2 ", "v2.", "v2. ", "v2. teno", "v2. tenor")]
    + [
        (line, True) for line in ("v6", "v2 t", "v2. tenors", "v2. t1", "v2. teno\n", "the", "v2\n")
    ],
)
def test_a_line_that_may_still_fill_a_word_ends_no_path(line: str, ends: bool) -> None:
    assert TASK.is_terminal(PROBLEM, [ROWS[0], line]) is ends
    assert TASK.is_terminal(PROBLEM, [*ROWS, line]), "the board is full"


def test_words_that_do_not_fit_are_no_thoughts_and_without_another_the_path_ends() -> None:
    text = "h1. trend (certain)\nh1. stung (certain)\nv1. trend (certain)\nv2. tenor (low)\n"

    assert TASK.proposals(PROBLEM, ROWS[:1], text) == ["v2. tenor\n"]
    for empty in ("h1. trend (certain)\n", "None of them fits.\n", ""):
        found = TASK.proposals(PROBLEM, ROWS[:1], empty)
        assert len(found) == 1 and TASK.is_terminal(PROBLEM, [ROWS[0], *found])
        assert TASK.answer(PROBLEM, [ROWS[0], *found]) == TASK.answer(PROBLEM, ROWS[:1])
