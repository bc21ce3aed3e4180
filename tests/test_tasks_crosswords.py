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
from arbor.tasks.base import Guesses, ReadsRows, Task
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


def test_the_question_is_about_the_clues_with_two_known_letters() -> None:
    across, crossing = TASK.question(PROBLEM, ROWS[:1]), TASK.question(PROBLEM, ROWS[:2])

    assert across.text.endswith("-> sure\nHurt by a bee: S T U N G ->")
    assert "; Pricked by a nettle: S T _ _ _; " in crossing.text
    assert crossing.text.rpartition("\n")[2].count("_ _ _") == 5
    assert crossing.values == {" sure": 1.0, " maybe": 0.5, " impossible": 0.0}


def test_no_question_is_longer_than_the_one_at_no_thoughts() -> None:
    longest = TASK.question(PROBLEM, ()).text
    listed = TASK.proposal(PROBLEM, ()).text

    assert all(clue.partition(". ")[2] in longest for clue in PROBLEM.text.splitlines())
    for count in range(1, 5):
        assert len(TASK.question(PROBLEM, ROWS[:count]).text) <= len(longest)
        assert len(TASK.proposal(PROBLEM, ROWS[:count]).text) <= len(listed)


def test_verdicts_of_ones_own_replace_the_labels() -> None:
    question = replace(TASK, yes=(" yes",), no=(" no", " never")).question(PROBLEM, ROWS[:1])

    assert question.values == {" yes": 1.0, " no": 0.0, " never": 0.0}
    assert "yes or no.\n" in question.text and "-> yes\n" in question.text
    assert "maybe" not in question.text and "sure" not in question.text


def test_a_chat_model_is_shown_the_example_unless_shots_says_otherwise() -> None:
    turns = TASK.turns(PROBLEM)

    assert [each["role"] for each in turns] == ["user", "assistant", "user"]
    assert filled([turns[1]["content"]]) == (("HEART", "EMBER", "ABUSE", "RESIN", "TREND"), True)
    assert turns[2]["content"].endswith(PROBLEM.text)
    assert len(replace(TASK, shots=0).turns(PROBLEM)) == 1


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


def test_words_that_do_not_fit_are_no_thoughts_and_without_another_the_path_ends() -> None:
    text = "h1. trend (certain)\nh1. stung (certain)\nv1. trend (certain)\nv2. tenor (low)\n"

    assert TASK.proposals(PROBLEM, ROWS[:1], text) == ["v2. tenor\n"]
    for empty in ("h1. trend (certain)\n", "None of them fits.\n", ""):
        found = TASK.proposals(PROBLEM, ROWS[:1], empty)
        assert len(found) == 1 and TASK.is_terminal(PROBLEM, [ROWS[0], *found])
        assert TASK.answer(PROBLEM, [ROWS[0], *found]) == TASK.answer(PROBLEM, ROWS[:1])


def test_the_list_question_shows_the_board_and_its_open_clues_after_an_example() -> None:
    problem = TASK.parse("\n".join(f"{name}. Clue of {name}" for name in NAMES))
    proposal = TASK.proposal(problem, ("h1. stung\n", "v1. stung\n"))
    head, _, state = proposal.text.rpartition("\n\n")

    assert state.startswith("Board:\nS T U N G\nT _ _ _ _\n")
    assert "\nv2. Clue of v2: T _ _ _ _\n" in state and state.endswith("\nPossible words:\n")
    assert "Clue of h1" not in state and "Clue of v1" not in state
    example = TASK.parse(TASK.example)
    answered = head.rpartition("Possible words:\n")[2]
    assert len(TASK.proposals(example, ROWS[:1], answered)) == len(answered.splitlines())
    assert proposal.max_tokens == 10 * TASK.boundary.max_tokens
    assert state.startswith(proposal.stop) and not proposal.text.endswith(proposal.stop)
