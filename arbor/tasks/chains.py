"""Chains: grade-school word problems whose answer needs a chain of facts, given in another order.

    Facts: Tom has 4 more than Amy. Bob has 7. Amy has 3. Sue has 2 times as many as Tom. How many
    does Sue have? Plan: Sue Tom Amy Then Amy has 3: Amy = 3 Then Tom has 4 more than Amy: Amy = 3,
    3 + 4 = 7, Tom = 7 Then Sue has 2 times as many as Tom: Tom = 7, 7 * 2 = 14, Sue = 14 Answer: 14

The first thought may be a plan (the chain backwards); every later line restates one fact, names the
quantities it needs from earlier lines, computes, and states the person's quantity; the last is the
answer. ``more``, ``fewer`` and ``times`` look one line back. ``as many as X and Y together`` looks
back one line (X) and ``recall`` lines (Y): the controlled recall distance. Distractors are chains
of their own and people who depend on the chain but lead nowhere. All quantities are from 1 to 99.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from arbor.errors import UsageError
from arbor.support.texts import clipped
from arbor.tasks.base import BlockLimits, Grade, Problem
from arbor.tasks.generated import Drawn
from arbor.tasks.splits import content_id

# fmt: off
NAMES = (
    "Amy", "Ben", "Cal", "Dan", "Eva", "Fay", "Gus", "Hal", "Ian", "Jan", "Kim", "Lea",
    "Max", "Ned", "Oli", "Pam", "Ray", "Sue", "Tom", "Una", "Val", "Wes", "Zoe", "Abe",
)
MORE_NAMES = (  # for problems with more people than `NAMES` has
    "Ada", "Bob", "Deb", "Eli", "Gil", "Ida", "Joy", "Kit", "Liz", "Mia", "Nat", "Peg",
    "Rob", "Sid", "Ted", "Uma",
)
# fmt: on
LARGEST = 99
_SIGNS = {"more": "+", "fewer": "-", "times": "*", "sum": "+"}  # of the kinds that calculate
_NAME = "([A-Z][a-z]{1,11})"
_FACT = re.compile(
    rf"{_NAME} has (?:([0-9]{{1,3}})|([0-9]{{1,3}}) (more|fewer) than {_NAME}"
    rf"|([0-9]) times as many as {_NAME}|as many as {_NAME} and {_NAME} together)"
)
_LINE = re.compile(r"Then ([^:\n]+): .+\n?")
_ASKS = re.compile(rf"How many does {_NAME} have\?")
_SAID = re.compile(r"(?:(?:the )?answer(?: is)?\s*:?\s*)?([0-9]{1,9})\.?", re.IGNORECASE)
_ANSWER = re.compile(r"Answer: ([0-9]{1,4})\n?")


@dataclass(frozen=True, slots=True)
class Fact:
    """One person's quantity, given or relative to others.

    Attributes:
        who: the person.
        kind: ``is``, ``more``, ``fewer``, ``times`` or ``sum``.
        amount: the number in the fact; 0 for ``sum``.
        needs: the people it depends on, in the order of the text.
    """

    who: str
    kind: str
    amount: int
    needs: tuple[str, ...]

    @property
    def text(self) -> str:
        """The fact, without full stop."""
        if self.kind == "is":
            return f"{self.who} has {self.amount}"
        if self.kind == "times":
            return f"{self.who} has {self.amount} times as many as {self.needs[0]}"
        if self.kind == "sum":
            return f"{self.who} has as many as {self.needs[0]} and {self.needs[1]} together"
        return f"{self.who} has {self.amount} {self.kind} than {self.needs[0]}"

    def quantity(self, known: Mapping[str, int]) -> int:
        """The person's quantity, from those of the people it needs."""
        if self.kind == "is":
            return self.amount
        first, second = self._operands(known)
        return {"+": first + second, "-": first - second, "*": first * second}[_SIGNS[self.kind]]

    def line(self, known: Mapping[str, int]) -> str:
        """This fact's thought."""
        result, work = self.quantity(known), ""
        if self.kind != "is":
            first, second = self._operands(known)
            work = "".join(f"{name} = {known[name]}, " for name in self.needs)
            work += f"{first} {_SIGNS[self.kind]} {second} = {result}, "
        return f"Then {self.text}: {work}{self.who} = {result}\n"

    def _operands(self, known: Mapping[str, int]) -> tuple[int, int]:
        return known[self.needs[0]], known[self.needs[1]] if self.kind == "sum" else self.amount


def parse_fact(text: str) -> Fact | None:
    """A fact from its text without full stop; None for any other text."""
    match = _FACT.fullmatch(text)
    if match is None:
        return None
    who, own, amount, kind, other, factor, base, left, right = match.groups()
    if own:
        return Fact(who, "is", int(own), ())
    if kind:
        return Fact(who, kind, int(amount), (other,))
    if factor:
        return Fact(who, "times", int(factor), (base,))
    return Fact(who, "sum", 0, (left, right))


def quantities(facts: Sequence[Fact]) -> dict[str, int]:
    """Person -> quantity, for everyone whose quantity follows from the facts."""
    known: dict[str, int] = {}
    waiting = list(facts)
    while ready := [fact for fact in waiting if all(name in known for name in fact.needs)]:
        for fact in ready:
            known[fact.who] = fact.quantity(known)
        waiting = [fact for fact in waiting if fact not in ready]
    return known


def chain_to(facts: Sequence[Fact], asked: str) -> list[Fact]:
    """The facts the answer needs, each after what it depends on."""
    by_name = {fact.who: fact for fact in facts}
    order: dict[Fact, None] = {}
    waiting = [asked]
    while waiting:
        fact = by_name[waiting[-1]]
        needed = [name for name in fact.needs if by_name[name] not in order]
        if needed:
            waiting.append(needed[-1])
        else:
            waiting.pop()
            order[fact] = None
    return list(order)


def _new_fact(
    rng: random.Random, who: str, chain: Sequence[str], known: dict[str, int], recall: int
) -> Fact:
    """A fact about a new person after the last of the chain; the result is 1 to `LARGEST`."""
    last = chain[-1]
    while True:
        kind = rng.choices(
            ("more", "fewer", "times", "sum"), (3, 3, 2, 4 if len(chain) > recall else 0)
        )[0]
        if kind == "sum":
            fact = Fact(who, "sum", 0, (last, chain[-1 - recall]))
        elif kind == "times":
            fact = Fact(who, "times", rng.randint(2, 4), (last,))
        else:
            fact = Fact(who, kind, rng.randint(1, 20), (last,))
        result = fact.quantity(known)
        if 1 <= result <= LARGEST:
            known[who] = result
            return fact


def generate(
    rng: random.Random,
    steps: int,
    distractors: int,
    recall: int,
    people: Sequence[str] = NAMES,
) -> tuple[list[Fact], str]:
    """Shuffled facts and the person asked for.

    Args:
        steps: people in the chain that leads to the answer, >= 2.
        distractors: other people; at most len(people) - steps.
        recall: lines back to the second person of a ``sum``, >= 1.
        people: the names to draw from.
    """
    names = rng.sample(people, steps + distractors)
    known: dict[str, int] = {}
    facts = []
    chain: list[str] = []
    for name in names[:steps]:
        if chain:
            fact = _new_fact(rng, name, chain, known, recall)
        else:
            fact = Fact(name, "is", rng.randint(1, 20), ())
            known[name] = fact.amount
        facts.append(fact)
        chain.append(name)
    other: list[str] = []
    for name in names[steps:]:
        roll = rng.random()
        if other and roll < 0.5:
            facts.append(_new_fact(rng, name, other, known, recall))
            other.append(name)
        elif roll < 0.7:
            facts.append(_new_fact(rng, name, [rng.choice(chain)], known, 1))
        else:
            facts.append(Fact(name, "is", rng.randint(1, 20), ()))
            known[name] = facts[-1].amount
            other = [name]
    rng.shuffle(facts)
    return facts, names[steps - 1]


@dataclass(frozen=True)
class Chains(Drawn):
    """Dependency-chain word problems.

    Attributes:
        fewest, most: people in the chain that leads to the answer; at most 40.
        distractors: the largest number of other people.
        recall: the largest number of lines back to the second person of a ``sum``.

    Raises:
        UsageError: a number out of its range.
    """

    fewest: int = 2
    most: int = 16
    distractors: int = 4
    recall: int = 4

    def __post_init__(self) -> None:
        largest = len(NAMES) + len(MORE_NAMES)
        for name, holds, needed in (
            ("fewest", 2 <= self.fewest <= self.most, f"from 2 to most={self.most}"),
            ("most", self.most <= largest, f"at most {largest}, a person for each step"),
            ("distractors", self.distractors >= 0, "0 or more"),
            ("recall", self.recall >= 1, "1 or more"),
        ):
            if not holds:
                value = getattr(self, name)
                raise UsageError("setting-range", f"{name}={value}: it must be {needed}.")

    example = "Facts: Tom has 4 more than Amy. Amy has 3. How many does Tom have?"

    name = "chains"

    @property
    def people(self) -> Sequence[str]:
        """The names that problems draw from: `NAMES`, and 16 more if `NAMES` may be too few."""
        enough = self.most + self.distractors <= len(NAMES)
        return NAMES if enough else NAMES + MORE_NAMES

    @property
    def boundary(self) -> BlockLimits:
        # the plan is the longest line of a long chain: a name a step
        longest = max(48, self.most + 8)
        return BlockLimits(stop=("\n",), max_tokens=longest, max_depth=self.most + 4)

    def make(self, facts: Sequence[Fact], asked: str) -> Problem:
        text = f"Facts: {'. '.join(fact.text for fact in facts)}. How many does {asked} have?"
        known = quantities(facts)
        data: dict[str, Any] = {
            "facts": [fact.text for fact in facts],
            "asked": asked,
            "steps": len(chain_to(facts, asked)),
        }
        return Problem(content_id("chains", text), self.name, text, str(known[asked]), data)

    def parse(self, text: str) -> Problem:
        self._demand_text(text)
        body = " ".join(text.split()).removeprefix("Facts: ")
        *sentences, question = body.split(". ")
        asks = _ASKS.fullmatch(question)
        if asks is None:
            raise self._invalid(text, "does not end with 'How many does NAME have?'")
        facts = []
        for sentence in sentences:
            fact = parse_fact(sentence)
            if fact is None:
                raise self._invalid(text, f"'{clipped(sentence)}' is not a fact")
            facts.append(fact)
        if len({fact.who for fact in facts}) != len(facts):
            raise self._invalid(text, "has two facts about one person")
        known = quantities(facts)
        if asks[1] not in known:
            raise self._invalid(text, f"leaves open how many {asks[1]} has")
        for who, count in known.items():
            if not 1 <= count <= LARGEST:
                raise self._invalid(
                    text, f"gives {who} {count:,}, which is not from 1 to {LARGEST}"
                )
        return self.make(facts, asks[1])

    def draw(self, rng: random.Random, size: int) -> Problem:
        """One problem of so many people in its chain, of any split."""
        distractors = rng.randint(0, min(self.distractors, len(self.people) - size))
        recall = rng.randint(1, self.recall)
        return self.make(*generate(rng, size, distractors, recall, self.people))

    def facts(self, problem: Problem) -> list[Fact]:
        facts = [parse_fact(text) for text in problem.data["facts"]]
        return [fact for fact in facts if fact is not None]

    def solution(self, problem: Problem) -> list[str]:
        """The thoughts of the solution: plan, one line per fact, answer."""
        order = chain_to(self.facts(problem), problem.data["asked"])
        known: dict[str, int] = {}
        lines = ["Plan: " + " ".join(fact.who for fact in reversed(order)) + "\n"]
        for fact in order:
            lines.append(fact.line(known))
            known[fact.who] = fact.quantity(known)
        return [*lines, f"Answer: {known[problem.data['asked']]}\n"]

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        match = _ANSWER.fullmatch(thoughts[-1]) if thoughts else None
        return match[1] if match else None

    def grade(self, problem: Problem, answer: str | None) -> Grade:
        """Compares numbers, never texts: ``14``, ``Answer: 14`` and ``14.`` are the same."""
        if answer is None or not answer.strip():
            return Grade(False, None, "There is no answer.")
        number, key = _number_of(answer), _number_of(problem.expected or "")
        if number is None:
            return Grade(False, None, f"'{answer.strip()[:20]}' is not a number.")
        if key is None:
            return Grade(False, str(number), f"The key '{problem.expected}' is not a number.")
        if number != key:
            return Grade(False, str(number), f"The answer is {key}, not {number}.")
        return Grade(True, str(number), f"{problem.data['asked']} has {key}.")

    def value(self, problem: Problem, thoughts: Sequence[str]) -> float:
        """1 while every line restates a given fact and computes it right from earlier lines."""
        facts = {fact.text: fact for fact in self.facts(problem)}
        asked = problem.data["asked"]
        known: dict[str, int] = {}
        for index, thought in enumerate(thoughts):
            if thought.startswith("Plan:"):
                order = chain_to(list(facts.values()), asked)
                if index or thought != f"Plan: {' '.join(f.who for f in reversed(order))}\n":
                    return 0.0
                continue
            if thought.startswith("Answer:"):
                last = index == len(thoughts) - 1
                return float(last and thought == f"Answer: {known.get(asked, '?')}\n")
            line = _LINE.fullmatch(thought)
            fact = facts.get(line[1]) if line else None
            if fact is None or any(name not in known for name in fact.needs):
                return 0.0
            if thought != fact.line(known):
                return 0.0
            known[fact.who] = fact.quantity(known)
        return 1.0


def _number_of(text: str) -> int | None:
    """The number of an answer or a key: ``14``, ``Answer: 14``, ``14.``; None for another text."""
    match = _SAID.fullmatch(text.strip())
    return int(match[1]) if match else None
