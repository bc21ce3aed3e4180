"""Recall: depth-first search through rooms; backtracking needs a room seen long ago.

    Rooms: K has B R. B has M. M is empty. R has T D. T is empty. D is empty. Find D from K
    Enter K: B R
    Enter B: M
    Enter M: empty
    Back to K: R
    Enter R: T D
    Enter T: empty
    Back to R: D
    Enter D: found
    Answer: K R D

``Enter`` restates the doors of a room; ``Back to`` names the last entered room with untried doors,
and these. The distance between a room's ``Enter`` and its ``Back to`` is the recall distance.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from arbor.errors import UsageError
from arbor.support.texts import clipped
from arbor.tasks.base import BlockLimits, Grade, Problem
from arbor.tasks.generated import Drawn
from arbor.tasks.splits import content_id

ROOMS = tuple("ABCDEFGHIJKLMNOPQRSTUVWXYZ")
_ROOM = re.compile(r"([A-Z]) (?:is empty|has ([A-Z](?: [A-Z])*))")
_ASKS = re.compile(r"Find ([A-Z]) from ([A-Z])")


def walk(doors: dict[str, tuple[str, ...]], start: str, goal: str) -> list[str]:
    """The thoughts of depth-first search to the goal, doors in the given order, and the answer."""
    lines: list[str] = []
    path: list[str] = []
    untried: dict[str, list[str]] = {}

    def enter(room: str) -> None:
        path.append(room)
        untried[room] = list(doors[room])
        seen = "found" if room == goal else " ".join(doors[room]) or "empty"
        lines.append(f"Enter {room}: {seen}\n")

    enter(start)
    while path[-1] != goal:
        if not untried[path[-1]]:
            while not untried[path[-1]]:
                path.pop()
            lines.append(f"Back to {path[-1]}: {' '.join(untried[path[-1]])}\n")
        enter(untried[path[-1]].pop(0))
    return [*lines, f"Answer: {' '.join(path)}\n"]


@dataclass(frozen=True)
class Recall(Drawn):
    """Depth-first search through rooms.

    Attributes:
        fewest, most: number of rooms, from 2 to 26.

    Raises:
        UsageError: a number out of its range.
    """

    fewest: int = 4
    most: int = 16

    def __post_init__(self) -> None:
        if not 2 <= self.fewest <= self.most <= len(ROOMS):
            raise UsageError(
                "setting-range",
                f"fewest={self.fewest}, most={self.most}: rooms must be 2 to {len(ROOMS)}, and "
                "fewest at most most.",
            )

    example = "Rooms: K has B R. B is empty. R is empty. Find R from K"

    name = "recall"

    @property
    def boundary(self) -> BlockLimits:
        return BlockLimits(stop=("\n",), max_tokens=32, max_depth=2 * self.most + 1)

    def make(self, rooms: Sequence[tuple[str, tuple[str, ...]]], start: str, goal: str) -> Problem:
        sentences = ". ".join(
            f"{room} has {' '.join(doors)}" if doors else f"{room} is empty"
            for room, doors in rooms
        )
        text = f"Rooms: {sentences}. Find {goal} from {start}"
        answer = walk(dict(rooms), start, goal)[-1].removeprefix("Answer: ").strip()
        data: dict[str, Any] = {
            "rooms": [[room, list(doors)] for room, doors in rooms],
            "start": start,
            "goal": goal,
        }
        return Problem(content_id("recall", text), self.name, text, answer, data)

    def parse(self, text: str) -> Problem:
        self._demand_text(text)
        body = " ".join(text.split()).removeprefix("Rooms: ")
        *sentences, question = body.split(". ")
        asks = _ASKS.fullmatch(question)
        if asks is None:
            raise self._invalid(text, "does not end with 'Find GOAL from START'")
        rooms: list[tuple[str, tuple[str, ...]]] = []
        for sentence in sentences:
            match = _ROOM.fullmatch(sentence)
            if match is None:
                raise self._invalid(text, f"'{clipped(sentence)}' is not a room")
            rooms.append((match[1], tuple(match[2].split()) if match[2] else ()))
        names = [room for room, _ in rooms]
        behind = [door for _, doors in rooms for door in doors]
        goal, start = asks[1], asks[2]
        if sorted(names) != sorted([*behind, start]) or len(dict(rooms)) != len(rooms):
            raise self._invalid(
                text, "is not a tree: each room but the first has exactly one door to it"
            )
        reached, waiting = [start], [start]
        while waiting:
            doors = dict(rooms)[waiting.pop()]
            reached += doors
            waiting += doors
        if goal not in reached:
            raise self._invalid(text, f"has no way from {start} to {goal}")
        return self.make(rooms, start, goal)

    def draw(self, rng: random.Random, size: int) -> Problem:
        """One problem of so many rooms, of any split; the goal is an empty room."""
        names = rng.sample(ROOMS, size)
        doors: dict[str, list[str]] = {names[0]: []}
        for name in names[1:]:
            parent = rng.choice([room for room in doors if len(doors[room]) < 3][-4:])
            doors[parent].append(name)
            doors[name] = []
        goal = rng.choice([room for room in names if not doors[room]])
        rooms_in_order = [(room, tuple(behind)) for room, behind in doors.items()]
        rng.shuffle(rooms_in_order)
        return self.make(rooms_in_order, names[0], goal)

    def solution(self, problem: Problem) -> list[str]:
        rooms = {room: tuple(doors) for room, doors in problem.data["rooms"]}
        return walk(rooms, problem.data["start"], problem.data["goal"])

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        match = re.fullmatch(r"Answer: ([A-Z](?: [A-Z])*)\n?", thoughts[-1]) if thoughts else None
        return match[1] if match else None

    def grade(self, problem: Problem, answer: str | None) -> Grade:
        """Compares the rooms of the way, in order."""
        if answer is None or not answer.strip():
            return Grade(False, None, "There is no answer.")
        way, key = _way_of(answer), _way_of(problem.expected or "")
        if way != key:
            return Grade(False, way, f"The way is {key}, not {way[:60]}.")
        return Grade(True, way, "This is the way.")

    def value(self, problem: Problem, thoughts: Sequence[str]) -> float:
        """1 while the path is the beginning of the depth-first walk; else 0."""
        return float(list(thoughts) == self.solution(problem)[: len(thoughts)])


def _way_of(text: str) -> str:
    """The rooms of an answer or a key, a space between two."""
    return " ".join(text.strip().removeprefix("Answer:").replace(".", " ").split())
