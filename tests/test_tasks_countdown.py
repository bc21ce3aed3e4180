"""Countdown and Game of 24: the grader, the legal steps, the exact values, the splits."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from arbor.errors import InputError
from arbor.tasks.base import Problem, Task
from arbor.tasks.countdown import (
    Countdown,
    can_reach,
    compose,
    exact_steps,
    legal_steps,
    normalise,
    parse_expression,
    parse_step,
    replay,
    solution_paths,
    solve,
)
from arbor.tasks.game24 import LARGEST_CARD, Game24, classic
from arbor.tasks.splits import content_id

GAME = Game24()
COUNTDOWN = Countdown()
PROBLEM = GAME.parse("4 5 6 10")
PATH = ["10 - 4 = 6 (left: 5 6 6)\n", "5 * 6 = 30 (left: 6 30)\n", "30 - 6 = 24 (left: 24)\n"]


def correct(problem: Problem, answer: str | None) -> bool:
    return GAME.grade(problem, answer).correct


def reachable_by_brute_force(numbers: tuple[int, ...]) -> set[Fraction]:
    """Every exact value of every expression, by splitting the multiset in two in every way."""
    if len(numbers) == 1:
        return {Fraction(numbers[0])}
    found = set()
    for size in range(1, len(numbers)):
        for chosen in itertools.combinations(range(len(numbers)), size):
            left = tuple(numbers[i] for i in chosen)
            right = tuple(numbers[i] for i in range(len(numbers)) if i not in chosen)
            for a in reachable_by_brute_force(left):
                for b in reachable_by_brute_force(right):
                    found |= {a + b, a - b, a * b}
                    if b:
                        found.add(a / b)
    return found


@pytest.mark.parametrize("task", [GAME, COUNTDOWN])
def test_the_examples_in_words_are_solved_by_legal_lines(task: Countdown) -> None:
    assert len(task.solved) >= 3
    for numbers, target in task.solved:
        lines = solve(numbers, target)
        assert lines is not None and correct_for(numbers, target, lines)
        shown = task.in_words().prompt(task.parse(task.example))
        assert "".join(lines) in shown


def correct_for(numbers: tuple[int, ...], target: int, lines: list[str]) -> bool:
    steps = replay(numbers, lines)
    return steps is not None and steps[-1].left == (target,)


def test_the_value_question_in_words_shows_what_is_left_and_has_three_labels() -> None:
    task = GAME.in_words()

    start, later = task.question(PROBLEM, []), task.question(PROBLEM, PATH[:2])

    assert start.text.endswith("\n4 5 6 10 -> 24:") and later.text.endswith("\n6 30 -> 24:")
    assert list(start.values) == [" sure", " likely", " impossible"]
    assert task.question(PROBLEM, ["nonsense\n"]).text.endswith("\nno numbers -> 24:")
    assert GAME.question(PROBLEM, []).text == "Reachable?"


def test_both_are_tasks() -> None:
    assert isinstance(GAME, Task)
    assert isinstance(COUNTDOWN, Task)


def test_a_path_composes_to_its_expression() -> None:
    assert GAME.answer(PROBLEM, PATH) == "5 * 6 - (10 - 4)"
    path = ["10 - 4 = 6 (left: 5 6 6)\n", "5 * 6 = 30 (left: 6 30)\n"]
    assert GAME.answer(PROBLEM, path) is None
    other = GAME.parse("1 2 4 7")
    steps = ["7 - 1 = 6 (left: 2 4 6)\n", "4 * 6 = 24 (left: 2 24)\n", "24 / 2 = 12 (left: 12)\n"]
    assert compose(other.data["numbers"], steps) == "4 * (7 - 1) / 2"
    assert GAME.answer(other, steps) is None, (
        "an expression that misses the target is not an answer"
    )
    assert not correct(other, GAME.answer(other, steps))


@pytest.mark.parametrize(
    ("steps", "expression"),
    [
        (["3 + 4 = 7 (left: 5 7)", "7 - 5 = 2 (left: 2)"], "3 + 4 - 5"),
        (["4 - 3 = 1 (left: 1 5)", "5 - 1 = 4 (left: 4)"], "5 - (4 - 3)"),
        (["4 - 3 = 1 (left: 1 5)", "1 + 5 = 6 (left: 6)"], "4 - 3 + 5"),
        (["3 * 4 = 12 (left: 5 12)", "5 / 12 = 5/12 (left: 5/12)"], "5 / (3 * 4)"),
        (["3 / 4 = 3/4 (left: 3/4 5)", "5 / 3/4 = 20/3 (left: 20/3)"], "5 / (3 / 4)"),
        (["3 + 4 = 7 (left: 5 7)", "5 * 7 = 35 (left: 35)"], "5 * (3 + 4)"),
    ],
)
def test_parentheses_stand_only_where_they_are_needed(steps: list[str], expression: str) -> None:
    assert compose([3, 4, 5], steps) == expression


@pytest.mark.parametrize(
    "thought",
    [
        "10 - 4 = 6 (left: 5 6 7)\n",  # wrong rest
        "10 - 4 = 7 (left: 5 6 7)\n",  # wrong arithmetic
        "9 - 4 = 5 (left: 5 5 6)\n",  # a number that is not there
        "5 * 5 = 25 (left: 4 6 10 25)\n",  # one number twice
        "10 - 4 = 6 (left: 6 6)\n",  # a number lost
        "10 / 0 = 0 (left: 0 4 5 6)\n",
        "10 - 4 = 6\n",
        "10 - 4 = 6 (left: 5 6 6) and more\n",
        "10 ** 4 = 10000 (left: 5 6 10000)\n",
        "",
        "1/0 - 4 = 6 (left: 5 6 6)\n",
    ],
)
def test_an_illegal_step_is_worth_nothing_and_gives_no_answer(thought: str) -> None:
    assert replay([4, 5, 6, 10], [thought]) is None
    assert GAME.value(PROBLEM, [thought]) == 0.0
    assert GAME.answer(PROBLEM, [thought, *PATH[1:]]) is None
    assert GAME.is_terminal(PROBLEM, [thought])


def test_a_path_ends_with_one_number() -> None:
    assert not GAME.is_terminal(PROBLEM, [])
    assert not GAME.is_terminal(PROBLEM, PATH[:2])
    assert GAME.is_terminal(PROBLEM, PATH)


def test_left_may_stand_in_any_order_and_steps_may_use_fractions() -> None:
    assert GAME.value(PROBLEM, ["10 - 4 = 6 (left: 6 5 6)\n"]) == 1.0
    problem = GAME.parse("3 3 8 8")
    path = [
        "8 / 3 = 8/3 (left: 3 8 8/3)\n",
        "3 - 8/3 = 1/3 (left: 8 1/3)\n",
        "8 / 1/3 = 24 (left: 24)\n",
    ]
    assert [GAME.value(problem, path[:i]) for i in range(4)] == [1.0] * 4
    assert GAME.answer(problem, path) == "8 / (3 - 8 / 3)"
    assert correct(problem, GAME.answer(problem, path))


@pytest.mark.parametrize(
    "answer",
    [
        "5 * 6 - (10 - 4)",
        "(10 − 4) × 5 − 6",
        "(10-4)*5-6=24",
        "Answer: (10 - 4) * 5 - 6 = 24",
        "The answer is (10 - 4) * 5 - 6.",
        "**Answer:** (10 - 4) * 5 - 6",
        "**Answer: (10 - 4) * 5 - 6**",
        r"\boxed{(10 - 4) \times 5 - 6}",
        r"$(10 - 4) \cdot 5 - 6 = 24$",
        "((10) - (4)) * 5 - 6",
        "Let me think.\n\nAnswer: (10 - 4) · 5 – 6 = 24\n",
    ],
)
def test_a_right_answer_is_accepted_however_it_is_written(answer: str) -> None:
    assert correct(PROBLEM, answer), GAME.grade(PROBLEM, answer).reason


@pytest.mark.parametrize(
    "answer",
    [
        None,
        "",
        "  \n",
        "24",
        "(10 - 4) * 5 - 6 = 25",  # a wrong right side
        "(10 - 4) * 5 - 6 = 24 = 24",
        "(10 - 4) * 5 - 6 =",
        "(10 - 4) * 5",  # a number missing
        "(10 - 4) * 5 - 6 + 5 - 5",  # a number too often
        "10 + 4 + 5 + 6",  # another value
        "(10 - 4) * 5 - 6.0",
        "(10 - 4) * 5 - 06",
        "(10 - 4) * 5 - 6 # 24",
        "(10 - 4)(5) - 6",
        "-(4 - 10) * 5 - 6",
        "(10 - 4) * 5 - +6",
        "(10 - 4 * 5 - 6",
        "10 - 4) * 5 - 6",
        "() * 10",
        "(10 - 4) * 5 -",
        "(10 - 4) * 5 - ６",  # a full-width digit
        "10 / (4 - 4) * 5 - 6",
        "10 - 4 ** 5 - 6",
        "**10 - 4** * 5 - 6 ** 1",
        "(10 - 4) * 5 - 6 if True else 0",
        "(" * 400 + "24" + ")" * 400,
        "9" * 5000,
    ],
)
def test_a_wrong_answer_is_not(answer: str | None) -> None:
    grade = GAME.grade(PROBLEM, answer)
    assert not grade.correct
    assert grade.reason


@pytest.mark.parametrize(
    ("numbers", "answer"),
    [
        ("1 1 1 4", "4! * 1 * 1 * 1"),
        ("1 1 1 4", "factorial(4)*1*1*1"),
        ("1 2 12 12", "12+12**1**2"),
        ("1 1 1 4", "4*1*1*1*len('aaaaaa')"),
        ("1 1 1 4", "__import__('os').getpid() * 0 + 24"),
        ("4 4 6 8", "(4+8)(6-4)"),
        ("1 1 2 2", "24 if [1, 1, 2, 2] else 0"),
        ("1 2 3 4", "1_2 * (3 - 4)"),
        ("1 1 1 4", "0x18 + 1 - 1 + 4 - 4"),
        ("2 2 2 2", "2 << 2 + 2 * 2"),
        ("2 4 5 7", "24 (2 4 5 7)"),
        ("1 2 3 4", "12 + 3 * 4"),
        ("4 4 6 8", "(4 + 8) * (6 - 4) = 25"),
        ("1 1 1 4", "4.__class__.__name__ * 0 + 24"),
    ],
)
def test_what_deceived_other_graders_does_not_deceive_this_one(numbers: str, answer: str) -> None:
    assert not correct(GAME.parse(numbers), answer)


def test_a_fraction_is_exact_where_floats_are_not() -> None:
    assert correct(GAME.parse("1 5 5 5"), "5 * (5 - 1 / 5)")
    assert parse_expression("49 * (1 / 49)")[0] == 1


def test_a_near_miss_is_a_miss() -> None:
    problem = COUNTDOWN.make([3, 999_983, 999_979, 72], 24)
    assert not COUNTDOWN.grade(problem, "72 / 3 * 999983 / 999979").correct


def test_normalise_leaves_a_plain_expression_alone() -> None:
    assert normalise("(1 + 2) * 3 - 4") == "(1 + 2) * 3 - 4"


@given(st.lists(st.integers(1, 13), min_size=2, max_size=4))
def test_reachability_agrees_with_brute_force(numbers: list[int]) -> None:
    found = reachable_by_brute_force(tuple(numbers))
    state = tuple(sorted(numbers))
    for target in (0, 1, 7, 24, 100):
        assert can_reach(state, target) == (target in found)


@given(st.data())
def test_a_composed_path_is_right_exactly_when_it_ends_at_the_target(data: st.DataObject) -> None:
    numbers = data.draw(st.lists(st.integers(1, 25), min_size=4, max_size=6))
    fractions = data.draw(st.booleans())
    state = tuple(sorted(numbers))
    path = []
    while len(state) > 1:
        steps = exact_steps(state) if fractions else legal_steps(state)  # type: ignore[arg-type]
        step = data.draw(st.sampled_from(steps))
        path.append(step.text)
        state = step.left
    target = data.draw(st.sampled_from((24, max(0, int(state[0])))))
    problem = COUNTDOWN.make(numbers, target)
    expression = compose(numbers, path)
    assert expression is not None
    assert COUNTDOWN.grade(problem, expression).correct == (state[0] == target)
    assert COUNTDOWN.answer(problem, path) == (expression if state[0] == target else None)
    assert COUNTDOWN.value(problem, path) == float(state[0] == target)


@given(st.text(alphabet="0123456789+-*/() =.^!x×÷", max_size=40))
def test_the_grader_never_raises(answer: str) -> None:
    GAME.grade(PROBLEM, answer)


@given(st.lists(st.integers(0, 60), min_size=2, max_size=5))
def test_legal_steps_are_exact_steps_that_stay_whole(numbers: list[int]) -> None:
    state = tuple(sorted(numbers))
    whole = [s.text for s in exact_steps(state) if not isinstance(s.result, Fraction)]
    texts = [step.text for step in legal_steps(state)]
    assert sorted(texts) == sorted(whole)
    assert len(set(texts)) == len(texts)
    assert all(replay(numbers, [text]) for text in texts)


def test_a_step_reads_back_as_it_was_written() -> None:
    for step in exact_steps((4, 5, 6, 10)):
        assert parse_step(step.text) == step


def test_solve_finds_a_solution_for_every_classic_hand() -> None:
    assert len(classic()) == 1362
    for hand in classic()[::100]:
        path = solve(hand, 24)
        assert path is not None
        problem = GAME.make(hand)
        assert correct(problem, GAME.answer(problem, path))
    assert solve([1, 1, 1, 1], 24) is None


def test_the_hands_kept_as_data_are_those_a_search_finds() -> None:
    cards = range(1, LARGEST_CARD + 1)
    every_hand = itertools.combinations_with_replacement(cards, 4)
    solvable = [hand for hand in every_hand if can_reach(hand, 24)]

    def rank(hand: tuple[int, ...]) -> tuple[int, str]:
        return solution_paths(hand, 24), content_id("game24", " ".join(map(str, hand)))

    hardest = [tuple(each.data["numbers"]) for each in Game24().problems("hard")]
    assert list(classic()) == solvable
    assert hardest == sorted(solvable, key=rank)[:100]


def test_splits_are_disjoint_and_held_out() -> None:
    found = {split: list(GAME.problems(split)) for split in ("validation", "test", "hard")}
    assert {split: len(problems) for split, problems in found.items()} == {
        "validation": 262,
        "test": 1000,
        "hard": 100,
    }
    held = [tuple(p.data["numbers"]) for problems in found.values() for p in problems]
    assert sorted(held) == sorted(classic())
    train = list(GAME.problems("train", 60))
    assert all(max(p.data["numbers"]) > LARGEST_CARD for p in train)
    ids = [p.id for problems in found.values() for p in problems] + [p.id for p in train]
    assert len(set(ids)) == len(ids)
    assert all(GAME.value(p, []) == 1.0 for p in train)


def test_the_hard_hands_are_those_with_the_fewest_paths() -> None:
    hard = [solution_paths(tuple(p.data["numbers"]), 24) for p in GAME.problems("hard")]
    rest = [solution_paths(tuple(p.data["numbers"]), 24) for p in GAME.problems("test", 100)]
    assert hard == sorted(hard)
    assert max(hard) <= min(rest)


def test_countdown_splits_are_disjoint_solvable_and_never_train_on_the_game() -> None:
    found = {
        split: list(COUNTDOWN.problems(split, 30)) for split in ("train", "validation", "test")
    }
    ids = [p.id for problems in found.values() for p in problems]
    assert len(set(ids)) == len(ids)
    assert found == {s: list(COUNTDOWN.problems(s, 30)) for s in found}
    for p in found["train"]:
        assert not (len(p.data["numbers"]) == 4 and p.data["target"] == 24)
    for p in found["test"][:10]:
        if len(p.data["numbers"]) == 4:
            assert COUNTDOWN.value(p, []) == 1.0


def test_the_id_depends_on_the_content_and_not_on_the_order() -> None:
    assert GAME.parse("10 6 5 4").id == GAME.parse("4,5, 6 10").id != GAME.parse("4 5 6 11").id
    assert COUNTDOWN.parse("3 7 25 50 -> 331").id == COUNTDOWN.parse("50 25 7 3 -> 331").id
    assert COUNTDOWN.parse("3 7 25 50 -> 331").data == {"numbers": [3, 7, 25, 50], "target": 331}


def test_the_prompt_looks_like_the_state_after_a_step() -> None:
    assert GAME.prompt(GAME.parse("10 4 6 5")) == "Target 24 (left: 4 5 6 10)\n"
    assert COUNTDOWN.prompt(COUNTDOWN.parse("50 3 7 25 -> 331")) == "Target 331 (left: 3 7 25 50)\n"


@pytest.mark.parametrize("task", [GAME, COUNTDOWN])
def test_an_empty_problem_says_what_would_work(task: Countdown) -> None:
    with pytest.raises(InputError) as error:
        task.parse(" \n")
    assert error.value.code == "problem-empty"
    assert task.parse(error.value.hint.removeprefix("Try: "))


@pytest.mark.parametrize(
    ("task", "text"),
    [
        (GAME, "4 5 6"),
        (GAME, "4 5 6 10 11"),
        (GAME, "4 5 six 10"),
        (GAME, "4 5 6 0"),
        (GAME, "4 5 6 -10"),
        (GAME, "4 5 6 1.5"),
        (GAME, "4 5 6 ５"),
        (COUNTDOWN, "3 7 25 50"),
        (COUNTDOWN, "3 7 25 50 ->"),
        (COUNTDOWN, "3 7 25 -> 331"),
        (COUNTDOWN, "3 7 25 50 1 2 3 -> 331"),
        (COUNTDOWN, "3 7 25 x -> 331"),
    ],
)
def test_an_invalid_problem_says_why_and_what_would_work(task: Countdown, text: str) -> None:
    with pytest.raises(InputError) as error:
        task.parse(text)
    assert error.value.code == "problem-invalid"
    assert task.parse(error.value.hint.removeprefix("Try: "))


@pytest.mark.parametrize("task", [GAME, COUNTDOWN])
def test_an_unknown_split_is_named(task: Countdown) -> None:
    with pytest.raises(InputError, match="dev"):
        task.problems("dev")


# Lists of next steps


def test_a_question_for_steps_shows_an_example_and_what_is_left() -> None:
    first, later = GAME.proposal(PROBLEM, ()), GAME.proposal(PROBLEM, PATH[:1])

    example, _, asked = first.text.rpartition("Input: ")
    head, steps, *lines = example.splitlines()
    assert (head, steps) == ("Input: 2 3 5 12", "Possible next steps:")
    legal = [step.text for step in legal_steps((2, 3, 5, 12))]
    assert set(map(str.rstrip, legal)) > set(lines) and len(lines) == 8
    assert {parsed.sign for parsed in map(parse_step, lines) if parsed} == set("+-*/")
    assert asked == "4 5 6 10\nPossible next steps:\n"
    assert later.text == f"{example}Input: 5 6 6\nPossible next steps:\n"
    assert (first.max_tokens, first.stop) == (320, ("\n\n", "Input:"))
    assert not first.text.endswith(first.stop)


@pytest.mark.parametrize("task", [GAME, COUNTDOWN])
def test_every_next_step_is_read_as_a_thought(task: Countdown) -> None:
    problem = task.parse(task.example)
    steps = [step.text for step in legal_steps(tuple(sorted(problem.data["numbers"])))]
    steps += [step.text for step in exact_steps((1, 5, Fraction(7, 3)))]

    for form in ("{}", "- {}", "12. {}", "(3) {}", "{} (sure)"):
        text = "\n".join(form.format(step.strip()) for step in steps)
        assert task.proposals(problem, (), f"{text}\n\n") == steps


@pytest.mark.parametrize(
    ("line", "thought"),
    [
        ("10 − 4 = 6 (left: 5 6 6)", "10 - 4 = 6 (left: 5 6 6)\n"),
        ("10 - 4 = 6 (left: 6 6 5)", "10 - 4 = 6 (left: 5 6 6)\n"),
        ("4 * 5 = 21 (left: 6 10 21)", "4 * 5 = 21 (left: 6 10 21)\n"),  # the verifier judges
        ("4 - 5 = -1 (left: -1 6 10)", "4 - 5 = -1 (left: -1 6 10)\n"),
        ("4 + 5 = 9", None),
        ("4 + 5 = 9 (left: 6 9 10", None),
        ("4 + 5/0 = 9 (left: 6 9 10)", None),
        ("1.4 + 5 = 9 (left: 6 9 10)", None),
        ("Input: 4 5 6 10", None),
        ("", None),
    ],
)
def test_a_line_of_a_list_is_a_step_in_its_own_form(line: str, thought: str | None) -> None:
    assert GAME.proposals(PROBLEM, (), f"{line}\n") == ([] if thought is None else [thought])


@given(text=st.text(st.sampled_from("0123456789+-*/= (left:)\n"), max_size=80))
def test_any_text_gives_thoughts_that_are_read_as_they_are(text: str) -> None:
    thoughts = GAME.proposals(PROBLEM, (), text)

    assert GAME.proposals(PROBLEM, (), "".join(thoughts)) == thoughts
    assert all(parse_step(each) and each.endswith("\n") for each in thoughts)
