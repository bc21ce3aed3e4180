"""Countdown in words: instructions and examples for models that were not trained on it.

The forms are those of Tree of Thoughts (Yao et al., arXiv 2305.10601): solved inputs before the
problem, a step on each line, and a value prompt whose labels are sure, likely and impossible. Three
things differ. The text and the puzzles are arbor's own, the last step is not written again as an
expression, and a label is read at once, without lines of calculation before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

# worth of a label, in the released proportion of 20, 1 and 0.001
LABELS: Mapping[str, float] = {" sure": 1.0, " likely": 0.05, " impossible": 0.0}
# solved in the prompt; none is among the hundred hard puzzles of Tree of Thoughts
EXAMPLES: tuple[tuple[int, ...], ...] = ((1, 2, 4, 6), (2, 6, 8, 10), (5, 6, 7, 8))
OTHER_EXAMPLES = (((2, 5, 7, 10), 45), ((3, 4, 6, 9, 20), 74), ((1, 5, 8, 11), 58))
_JUDGED = (
    ("4 20", 24, "sure"),
    ("7 9", 24, "impossible"),
    ("4 9 11", 24, "sure"),
    ("3 5 8", 24, "likely"),
    ("1 2 2", 24, "impossible"),
    ("3 5 9", 60, "likely"),
    ("6 8", 48, "sure"),
)


def instruction(target: int) -> str:
    """What is asked, and the form of a line."""
    return (
        f"Reach {target} with all of the numbers, each used exactly once, with + - * and /. In each "
        "step two of the numbers that are left become one. Write only the steps, each on a line of "
        "its own, followed by the numbers that are left after it, as in the examples."
    )


def numbers_line(numbers: Sequence[int], target: int) -> str:
    """A problem as the model is shown it."""
    return f"Numbers: {' '.join(map(str, numbers))} (target {target})"


def text_prompt(examples: Sequence[tuple[str, str]], problem: str, target: int) -> str:
    """The prompt for a base model.

    Args:
        examples: problems and their steps, lines with a line break.
        problem: as of `numbers_line`.
        target: of the problem.
    """
    shown = "".join(f"{asked}\nSteps:\n{steps}\n" for asked, steps in examples)
    return f"{instruction(target)}\n\n{shown}{problem}\nSteps:\n"


def turns(examples: Sequence[tuple[str, str]], problem: str, target: int) -> list[dict[str, str]]:
    """The prompt for a chat model: the examples are earlier turns."""
    messages: list[dict[str, str]] = []
    for number, (asked, steps) in enumerate(examples):
        first = f"{instruction(target)}\n\n{asked}" if number == 0 else asked
        messages.append({"role": "user", "content": first})
        messages.append({"role": "assistant", "content": steps.rstrip("\n")})
    return [*messages, {"role": "user", "content": problem}]


def value_question(left: str, target: int) -> str:
    """The question whether the target can be reached with what is left, up to its label."""
    shown = "".join(f"{numbers} -> {goal}: {label}\n" for numbers, goal, label in _JUDGED)
    return (
        "\nCan the numbers that are left reach the target, each used once? "
        f"sure, likely or impossible.\n{shown}{left} -> {target}:"
    )
