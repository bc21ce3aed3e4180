"""Mini crosswords: five by five letters, ten clues; one thought fills one word.

A problem is ten lines, ``h1. clue`` to ``h5. clue`` across and ``v1. clue`` to ``v5. clue`` down; a
thought is a line such as ``h2. motor``. A path ends when the board is full, or with a line that
names no word of the board or changes a letter.

Source: Yao et al., Tree of Thoughts (arXiv 2305.10601), section 4.3: the share of letters, of words
and of games that are right. Differs from its released code, which puts the board and the state of
every clue into a new prompt for each thought: here a path is one text, and questions follow it.
There the deepest state counts; so here a path that ends early has the board of its legal lines as a
guess.

The questions have the forms of Tree of Thoughts: the board and the clues of the words that are
open, answered by lines such as ``h1. apple (medium)``; and clues with the letters that are known,
answered by sure, maybe or impossible. Three things differ: text and examples are arbor's own, one
verdict is for all clues instead of one for each, and it is read at once, without lines of reasoning
before it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from arbor.errors import InputError
from arbor.tasks.base import DataColumns, Grade, Problem, Proposal, Question
from arbor.tasks.grading.base import Grader, invalid
from arbor.tasks.worded import Worded, spoken

SIZE = 5
EMPTY = "_"
NAMES = tuple(f"{side}{place}" for side in "hv" for place in range(1, SIZE + 1))

_CLUE = re.compile(r"\s*([hv][1-5])\s*[.:]\s*(\S.*)")
_WORD = re.compile(r"\s*([hv][1-5])\s*[.:]\s*([A-Za-z]{5})\s*")
# the beginning of such a line, where a text ends
_BEGUN = re.compile(
    r"^[^\S\n]*[hv](?:[1-5][^\S\n]*(?:[.:][^\S\n]*[A-Za-z]{0,4})?)?\Z", re.MULTILINE
)
CONFIDENCES = ("certain", "high", "medium", "low")
# after the mark of a list, and before a remark such as (certain)
_PROPOSED = re.compile(
    rf"(?:[-*\s]|[0-9]{{1,3}}[.)]\s)*{_WORD.pattern}(?![A-Za-z])"
    rf"(?:[\W_]*({'|'.join(CONFIDENCES)})\b)?",
    re.IGNORECASE,
)
_NO_WORD = "done"  # a line that fills no word, which ends a path

EXAMPLE = (
    "Hurt by a bee",
    "High voice of a man",
    "Loosen a knot",
    "What disturbs a sleeper",
    "Language of Homer",
    "Pricked by a nettle",
    "Singer such as Pavarotti",
    "Undo laces",
    "Random part of a signal",
    "From Athens",
)
EXAMPLE_WORD = "stung"  # the first of its words, on the board of the example of a list
LISTED = ("h2. tenor (certain)", "h3. untie (high)", "h4. sound (low)", "v4. noise (medium)")
ASKED = (
    "List words of five letters that fit open clues and the letters on the board, one on each line, "
    f"with how sure each is: {', '.join(CONFIDENCES[:-1])} or {CONFIDENCES[-1]}."
)
BOARD = "Board:"  # begins a state

LABELS: Mapping[str, float] = {" sure": 1.0, " maybe": 0.5, " impossible": 0.0}
# clues and how likely it is that words meet them all
JUDGED = (
    ((("It pumps blood", "HE_R_"), ("Sap of a pine", "R_S__")), 1.0),
    ((("Wrong use", "ABUSE"), ("Insults", "ZX___")), 0.0),
    ((("What is left of a fire", "E__E_"), ("Fashion of the day", "T_E__")), 0.5),
    ((("Glowing piece of coal", "TRUMP"),), 0.0),
    ((("Direction of the market", "TREND"),), 1.0),
)

Board = tuple[str, ...]  # rows of `SIZE` signs each
Clues = Sequence[tuple[str, str]]  # clues, and the letters of their words


@dataclass(frozen=True)
class BoardGrader(Grader):
    """Boards letter by letter; correct if all of them are right."""

    version = "crosswords/1"

    def grade(self, answer: str | None, expected: str | None) -> Grade:
        """See `Grader.grade`; the scores are ``letter``, ``word`` and ``game``."""
        board = None if answer is None else board_of(answer)
        if board is None:
            return invalid("There is no board of five rows in the answer.")
        extracted = "\n".join(board)
        key = None if expected is None else board_of(expected)
        if key is None:
            return Grade(False, extracted, "The problem has no answer key.")
        letters = [a == b for a, b in zip("".join(board), "".join(key), strict=True)]
        words = [a == b for a, b in zip(words_of(board), words_of(key), strict=True)]
        scores = {
            "letter": sum(letters) / len(letters),
            "word": sum(words) / len(words),
            "game": float(board == key),
        }
        reason = f"{sum(letters)} of {len(letters)} letters and {sum(words)} of {len(words)} words."
        return Grade(board == key, extracted, reason, "board", scores)


@dataclass(frozen=True)
class Crosswords(Worded):
    """Mini crosswords of five by five letters; one thought fills one word."""

    stop: tuple[str, ...] = ("\n",)
    max_tokens: int = 16
    max_depth: int = 10

    listed = 10
    columns = DataColumns(("clues", "problem"), ("letters", "answer"), lists=True)

    example = "\n".join(f"{name}. {clue}" for name, clue in zip(NAMES, EXAMPLE, strict=True))
    name = "crosswords"
    judge = BoardGrader()

    def parse(self, text: str) -> Problem:
        """See `Task.parse`."""
        problem = super().parse(text)
        found = [_CLUE.fullmatch(line) for line in problem.text.splitlines() if line.strip()]
        if [match[1] if match else "" for match in found] != list(NAMES):
            raise InputError(
                "problem-invalid",
                "the problem is not ten lines of clues, h1. to h5. and v1. to v5.",
                f"As in: {self.example.splitlines()[0]}",
            )
        return super().parse(
            "\n".join(f"{match[1]}. {match[2].strip()}" for match in found if match)
        )

    def entry(
        self, row: Mapping[str, Any], problem: str, answer: str | None
    ) -> tuple[str, str | None]:
        """See `ReadsRows.entry`; clues without names are h1 to h5 and v1 to v5."""
        lines = problem.splitlines()
        if len(lines) == len(NAMES) and not any(map(_CLUE.fullmatch, lines)):
            problem = "\n".join(f"{name}. {line}" for name, line in zip(NAMES, lines, strict=True))
        if answer is None:
            return problem, None
        board = board_of(answer)
        if board is None or EMPTY in "".join(board):
            raise InputError(
                "dataset-invalid",
                "its answer is not a board of 25 letters.",
                'As in: "letters": "AGENDMOTORARTSYSALLESLEER", or a list of them.',
            )
        return problem, "\n".join(board)

    def is_terminal(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        """Whether the board is full, or the last line fills no word, however it goes on."""
        board, legal = filled([_BEGUN.sub("", spoken("".join(thoughts)))])
        return not legal or EMPTY not in "".join(board)

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        """The board of the legal lines, as five rows; None for an empty one."""
        board, _ = filled(thoughts)
        return "\n".join(board) if set("".join(board)) != {EMPTY} else None

    def is_guess(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        answer = self.answer(problem, thoughts)
        return answer is not None and EMPTY in answer

    def marked(self, problem: Problem, text: str) -> str | None:
        return None if EMPTY in (found := "\n".join(filled([text])[0])) else found

    def stated(self, problem: Problem, text: str) -> str | None:
        return self.marked(problem, text)

    def guess(self, problem: Problem, text: str) -> str | None:
        return self.answer(problem, [text])

    def turns(self, problem: Problem) -> list[dict[str, str]]:
        """See `GivesTurns`; without `shots`, a chat model is shown the examples too."""
        template = self.prompt_template()
        shots = len(template.examples) if self.shots is None else self.shots
        return template.turns(problem.text, shots)

    def question(self, problem: Problem, thoughts: Sequence[str]) -> Question:
        """See `Task.question`: about the clues with two known letters or more, as released; at no
        thoughts about all, so that no later question is longer."""
        clues = _clues_of(problem, filled(thoughts)[0])
        known = [(clue, word) for _, clue, word in clues if word.count(EMPTY) <= SIZE - 2]
        asked = known or [(clue, word) for _, clue, word in clues]
        own = (self.yes, self.no) != (Worded.yes, Worded.no)
        verdicts = dict.fromkeys(self.yes, 1.0) | dict.fromkeys(self.no, 0.0)
        labels = verdicts if own else LABELS
        return Question(f"\n{value_question(asked, labels)}", labels)

    def proposal(self, problem: Problem, thoughts: Sequence[str]) -> Proposal:
        """See `Proposes`; a list ends where the model goes on with a board."""
        return replace(super().proposal(problem, thoughts), stop=(BOARD,))

    def list_question(self, problem: Problem, thoughts: Sequence[str]) -> str:
        example = _list_head(
            Problem("", self.name, self.example), [f"{NAMES[0]}. {EXAMPLE_WORD}\n"]
        )
        listed = "\n".join(LISTED)
        return f"{ASKED}\n\n{example}{listed}\n\n{_list_head(problem, thoughts)}"

    def proposals(self, problem: Problem, thoughts: Sequence[str], text: str) -> list[str]:
        """See `Proposes`: lines with a word that fits on the board, the surest first; without one,
        a line that ends the path."""
        board, _ = filled(thoughts)
        found = [match for line in spoken(text).splitlines() if (match := _PROPOSED.match(line))]
        found.sort(key=_doubt)
        fits = [
            f"{match[1].lower()}. {match[2].lower()}"
            for match in found
            if _with_word(board, match[1].lower(), match[2].upper()) is not None
        ]
        return [self._ended(line) for line in fits or [_NO_WORD]]


def _doubt(proposed: re.Match[str]) -> int:
    """The place of a proposal's confidence, the highest first; the last without one."""
    confidence = (proposed[3] or "").lower()
    return CONFIDENCES.index(confidence) if confidence else len(CONFIDENCES)


def _clues_of(problem: Problem, board: Board) -> list[tuple[str, str, str]]:
    """Names, clues and the words on the board, with `EMPTY` where a letter is not known."""
    found = (_CLUE.fullmatch(line) for line in problem.text.splitlines())
    clues = [(match[1], match[2]) for match in found if match]
    return [(*clue, word) for clue, word in zip(clues, words_of(board), strict=True)]


def filled(thoughts: Sequence[str]) -> tuple[Board, bool]:
    """The board of a path, and whether every line of it fills a word.

    The lines after one that does not are left out.
    """
    board: Board = (EMPTY * SIZE,) * SIZE
    for line in spoken("".join(thoughts)).splitlines():
        if not line.strip():
            continue
        match = _WORD.fullmatch(line)
        after = None if match is None else _with_word(board, match[1], match[2].upper())
        if after is None:
            return board, False
        board = after
    return board, True


def _with_word(board: Board, name: str, word: str) -> Board | None:
    """The board with one more word; None if that changes a letter, or nothing."""
    squares = [list(row) for row in board]
    place = int(name[1]) - 1
    for step, letter in enumerate(word):
        row, column = (place, step) if name[0] == "h" else (step, place)
        if squares[row][column] not in (EMPTY, letter):
            return None
        squares[row][column] = letter
    after = tuple("".join(row) for row in squares)
    return None if after == board else after


def words_of(board: Board) -> list[str]:
    """The ten words of a board, in the order of `NAMES`."""
    return [*board, *("".join(row[place] for row in board) for place in range(SIZE))]


def board_of(text: str) -> Board | None:
    """A text as a board: 25 letters or ``_``, with spaces, line ends or slashes between."""
    signs = re.sub(r"[\s/,|]+", "", text[:1000]).upper()
    if not re.fullmatch(rf"[A-Z{EMPTY}]{{{SIZE * SIZE}}}", signs):
        return None
    return tuple(signs[at : at + SIZE] for at in range(0, len(signs), SIZE))


# Questions


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
        f"{_line(judged)} ->{label_of[worth]}\n" for judged, worth in JUDGED if worth in label_of
    )
    *others, last = map(str.strip, label_of.values())
    return (
        "Can a word of five letters meet each clue, with the letters that are known? "
        f"{', '.join(others)} or {last}.\n{shown}{_line(clues)} ->"
    )


def _list_head(problem: Problem, thoughts: Sequence[str]) -> str:
    """The board of a path, its open clues, and the head of a list of next words."""
    board, _ = filled(thoughts)
    clues = _clues_of(problem, board)
    shown = "\n".join(
        _known(f"{name}. {clue}", word) for name, clue, word in clues if EMPTY in word
    )
    rows = "\n".join(map(" ".join, board))
    return f"{BOARD}\n{rows}\nOpen clues:\n{shown}\nPossible words:\n"


def _line(clues: Clues) -> str:
    """Clues on one line."""
    return "; ".join(_known(clue, letters) for clue, letters in clues)


def _known(clue: str, letters: str) -> str:
    """A clue with the letters of its word; with spaces between each is a token of its own."""
    return f"{clue}: {' '.join(letters)}"
