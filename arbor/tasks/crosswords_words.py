"""Questions about a mini crossword: for next words, and whether the clues can still be met.

The forms are those of Tree of Thoughts (Yao et al., arXiv 2305.10601): the board and the clues of
the words that are open, answered by lines such as ``h1. apple (medium)``; and clues with the
letters that are known, answered by sure, maybe or impossible. Three things differ. The text and the
examples are arbor's own, one verdict is for all clues instead of one for each, and it is read at
once, without lines of reasoning before it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

BOARD = "Board:"  # begins a state
CONFIDENCES = ("certain", "high", "medium", "low")
LABELS: Mapping[str, float] = {" sure": 1.0, " maybe": 0.5, " impossible": 0.0}
# in the example of a list, whose board has the word h1
LISTED = ("h2. tenor (certain)", "h3. untie (high)", "h4. sound (low)", "v4. noise (medium)")

_ASKED = (
    "List words of five letters that fit open clues and the letters on the board, one on each line, "
    f"with how sure each is: {', '.join(CONFIDENCES[:-1])} or {CONFIDENCES[-1]}."
)
# clues and how likely it is that words meet them all
_JUDGED = (
    ((("It pumps blood", "HE_R_"), ("Sap of a pine", "R_S__")), 1.0),
    ((("Wrong use", "ABUSE"), ("Insults", "ZX___")), 0.0),
    ((("What is left of a fire", "E__E_"), ("Fashion of the day", "T_E__")), 0.5),
    ((("Glowing piece of coal", "TRUMP"),), 0.0),
    ((("Direction of the market", "TREND"),), 1.0),
)

Clues = Sequence[tuple[str, str]]  # clues, and the letters of their words


def list_question(shown: str, example: str) -> str:
    """The question for next words.

    Args:
        shown: a state, see `state`.
        example: another, which is answered by `LISTED`.
    """
    listed = "\n".join(LISTED)
    return f"{_ASKED}\n\n{_list_of(example)}{listed}\n\n{_list_of(shown)}"


def state(rows: Sequence[str], opened: Clues) -> str:
    """A board, and the words that are open.

    Args:
        rows: of the board.
        opened: clues with their names.
    """
    board = "\n".join(map(_spaced, rows))
    clues = "\n".join(_known(clue, letters) for clue, letters in opened)
    return f"{BOARD}\n{board}\nOpen clues:\n{clues}"


def value_question(clues: Clues, labels: Mapping[str, float]) -> str:
    """The question whether words can meet all of these clues, up to its label.

    Args:
        clues: asked about.
        labels: label -> its worth; an example is left out where none has its worth.
    """
    label_of: dict[float, str] = {}
    for label, worth in labels.items():
        label_of.setdefault(worth, label)
    shown = "".join(
        f"{_line(judged)} ->{label_of[worth]}\n" for judged, worth in _JUDGED if worth in label_of
    )
    *others, last = map(str.strip, label_of.values())
    return (
        "Can a word of five letters meet each clue, with the letters that are known? "
        f"{', '.join(others)} or {last}.\n{shown}{_line(clues)} ->"
    )


def _list_of(shown: str) -> str:
    """The head of a list of next words."""
    return f"{shown}\nPossible words:\n"


def _line(clues: Clues) -> str:
    """Clues on one line."""
    return "; ".join(_known(clue, letters) for clue, letters in clues)


def _known(clue: str, letters: str) -> str:
    """A clue with the letters of its word."""
    return f"{clue}: {_spaced(letters)}"


def _spaced(letters: str) -> str:
    """Letters with spaces between, so that each is a token of its own."""
    return " ".join(letters)
