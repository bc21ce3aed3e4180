"""A task, an engine and tree growth without a model: searches run in milliseconds.

Children are scripted: a script maps a block's key (its child indices from the root) to its thought.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from arbor.controllers.base import Controller, Expansion, Search
from arbor.tasks.base import BlockLimits, Grade, Problem, Question
from arbor.tree import Node, NodeState, ThoughtTree

if TYPE_CHECKING:
    from torch import Tensor

Key = tuple[int, ...]


@dataclass(frozen=True)
class Thought:
    """One scripted thought: its text, its value, and whether the path ends with it."""

    text: str
    value: float = 0.5
    terminal: bool = False
    logprob: float = -1.0
    tokens: int = 1


Script = Callable[[Key], Thought]


def scripted(thoughts: Mapping[Key, Thought], otherwise: Thought | None = None) -> Script:
    """A script from a table; other blocks have their key as text, or `otherwise`."""

    def script(key: Key) -> Thought:
        return thoughts.get(key) or otherwise or Thought(f"thought {key}")

    return script


def hashed(seed: int, *, words: int = 1000, terminal: float = 0.1, values: int = 8) -> Script:
    """A script by hashing: few `words` repeat, few `values` tie; `terminal`: share of path ends."""

    def script(key: Key) -> Thought:
        digest = hashlib.sha256(f"{seed} {key}".encode()).digest()
        value = digest[0] % (values + 1) / values
        return Thought(
            text=f"w{int.from_bytes(digest[1:5]) % words}",
            value=value,
            terminal=digest[5] < terminal * 256,
            logprob=-digest[6] / 64,
            tokens=1 + digest[7] % 3,
        )

    return script


def grow(tree: ThoughtTree, expansions: Sequence[Expansion], script: Script) -> list[Node]:
    """The children asked for, closed and valued, in the order asked."""
    children = []
    for expansion in expansions:
        for _ in range(expansion.width):
            child = tree.fork(expansion.leaf)
            thought = script(child.key)
            other, child.given = expansion.begin or (child, 0)
            for token in (*other.tokens[: child.given], *range(thought.tokens)):
                tree.append(child, token)
            each = thought.logprob / thought.tokens
            child.logprobs = [*other.logprobs[: child.given], *[each] * thought.tokens]
            child.text = thought.text
            child.value = thought.value
            child.logprob = thought.logprob
            child.state = NodeState.TERMINAL if thought.terminal else NodeState.CLOSED
            children.append(child)
    return children


@dataclass
class Run:
    """A finished search: its tree, and for each ask the (key, width) pairs asked for."""

    tree: ThoughtTree
    search: Search
    asked: list[list[tuple[Key, int]]] = field(default_factory=list)

    @property
    def blocks(self) -> int:
        return len(self.tree) - 1

    @property
    def best(self) -> list[Key]:
        return [leaf.key for leaf in self.search.best()]

    def state(self, *key: int) -> NodeState:
        """The state of the block with this key."""
        node = self.tree.root
        for index in key:
            node = node.children[index]
        return node.state


def run(
    controller: Controller,
    script: Script,
    max_depth: int,
    *,
    rooms: Callable[[int], int] = lambda step: 4,
    shuffle: Callable[[list[Node]], list[Node]] = list,
    limit: int = 500,
) -> Run:
    """A whole search against a script.

    Args:
        rooms: what each ask is given as room.
        shuffle: reorders what tell gets, to show that the order does not matter.
        limit: asks before the search counts as endless.
    """
    tree = ThoughtTree([0, 1, 2], "prompt")
    done = Run(tree, controller.start(tree, max_depth))
    for step in range(limit):
        expansions = done.search.ask(rooms(step))
        if not expansions:
            return done
        done.asked.append([(e.leaf.key, e.width) for e in expansions])
        done.search.tell(shuffle(grow(tree, expansions, script)))
    raise AssertionError(f"the search did not end within {limit} asks")


@dataclass(frozen=True)
class FakeTask:
    """Thoughts are words; ``!`` ends a path; ``v`` and a digit give the value, in ninths."""

    ask_about: str = " ok?"
    verdicts: Mapping[str, float] = field(default_factory=lambda: {" yes": 1.0, " no": 0.0})

    @property
    def name(self) -> str:
        return "fake"

    @property
    def boundary(self) -> BlockLimits:
        return BlockLimits(stop=("\n",), max_tokens=4, max_depth=5)

    def parse(self, text: str) -> Problem:
        return Problem(text, self.name, text)

    def problems(self, split: str, limit: int | None = None) -> Iterator[Problem]:
        return iter([self.parse("fake")])

    def prompt(self, problem: Problem) -> str:
        return problem.text

    def is_terminal(self, problem: Problem, thoughts: Sequence[str]) -> bool:
        return bool(thoughts) and "!" in thoughts[-1]

    def answer(self, problem: Problem, thoughts: Sequence[str]) -> str | None:
        return thoughts[-1].strip("!\n") if self.is_terminal(problem, thoughts) else None

    def grade(self, problem: Problem, answer: str | None) -> Grade:
        return Grade(answer == problem.expected, answer, "Same text or not.")

    def value(self, problem: Problem, thoughts: Sequence[str]) -> float:
        digit = re.search(r"v(\d)", thoughts[-1]) if thoughts else None
        return int(digit[1]) / 9 if digit else 0.0

    def question(self, problem: Problem, thoughts: Sequence[str]) -> Question:
        return Question(self.ask_about, dict(self.verdicts))


class FakeAsker:
    """An engine whose tokenizer cuts words and whose logits are scripted.

    Args:
        judge: the logits of some tokens, by text, for a block and its question; every other token
            has -2.
        pieces: what one token may be, as a regular expression; a word with the space before it, or
            one other character.
    """

    def __init__(
        self,
        judge: Callable[[Node, str], Mapping[str, float]],
        pieces: str = r"\s?\w+|.",
        vocabulary: int = 256,
    ) -> None:
        self.judge = judge
        self.pieces = re.compile(pieces, re.DOTALL)
        self.vocabulary = vocabulary
        self.ids: dict[str, int] = {}
        self.calls: list[tuple[list[Node], list[str]]] = []

    def encode(self, text: str) -> list[int]:
        return [self.ids.setdefault(piece, len(self.ids)) for piece in self.pieces.findall(text)]

    def decode(self, ids: Sequence[int]) -> str:
        texts = list(self.ids)
        return "".join(texts[token] for token in ids)

    def ask(self, nodes: Sequence[Node], questions: Sequence[Sequence[int]]) -> Tensor:
        import torch  # here, so that searches are tested without it

        asked = [self.decode(question) for question in questions]
        self.calls.append((list(nodes), asked))
        logits = torch.full((len(nodes), self.vocabulary), -2.0)
        for row, (node, question) in enumerate(zip(nodes, asked, strict=True)):
            for text, logit in self.judge(node, question).items():
                logits[row, self.encode(text)[0]] = logit
        return logits
