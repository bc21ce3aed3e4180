"""Searches whose trees are drawn: rounds of growing, asking and giving up, under any budget."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence

from support.models import Words, config_of, random_model
from support.trees import SAMPLED, Lab

from arbor.engine.mode import Mode, Rehydrate, Share
from arbor.engine.operation import Asking, GivenBlock, Growing, Growth, Operation
from arbor.engine.stop_rule import StopRule
from arbor.memory.stores import LowerRoom
from arbor.model.fetch_costs import FetchCosts, Run
from arbor.tasks.base import BlockLimits
from arbor.tree import Node, NodeState, ThoughtTree

DEPTH, QUESTION = 5, 6  # most blocks on a path, most tokens of a question
HOSTS = (0, 7, 60, 3000, 3000)  # tokens: none, a few spans, more than any search has
POLICIES: dict[Mode, tuple[str, ...]] = {
    "lossless": ("reentry", "lru", "arborkv", "uniform"),
    "lossy": ("ends", "uniform", "snapkv", "h2o"),
}
REHYDRATE: dict[Mode, tuple[Rehydrate, ...]] = {
    "lossless": ("selective", "span"),
    "lossy": ("selective", "span", "off"),
}

# in float64 no token depends on the order of sums; K/V of the second layer depend on the path
MODEL = random_model(config_of("llama", num_hidden_layers=2)).double()


class AnyCosts(FetchCosts):
    """What is fetched is drawn at random rather than measured."""

    def __init__(self, choices: random.Random) -> None:
        super().__init__((), 0.0, ((1, 0.0),))
        object.__setattr__(self, "_choices", choices)

    def fetched(self, runs: Sequence[Run], rows: int) -> list[bool]:
        choices: random.Random = self._choices  # type: ignore[attr-defined]
        return [choices.random() < 0.5 for _ in runs]


class DrawnSearch:
    """A search whose tree, in lossless mode, depends on its seed alone.

    Args:
        seed: of all its choices.
        longest: most tokens of a block.
        rounds: how often it grows.
        given: the part of the rounds whose blocks are given, each computed in one forward.
        early: the part of the blocks that a question is asked about while others grow.

    Attributes:
        least: tokens of the longest path, and of a question after it, that it has needed at once.
        peak: what full retention of it has held at most, as the engine counts it.
    """

    def __init__(
        self, seed: int, longest: int, rounds: int, given: float = 0.7, early: float = 0.0
    ) -> None:
        self.choices = random.Random(seed)
        ends = range(0, 80, self.choices.choice([2, 4, 12, 60]))
        stop = StopRule(Words(), BlockLimits((), longest, DEPTH), ends)
        self.growth = Growth(seed, SAMPLED, stop)
        length = self.choices.randint(3, 12)
        self.tree = ThoughtTree([(seed + at) % 60 + 1 for at in range(length)])
        self.nodes: dict[tuple[int, ...], Node] = {(): self.tree.root}
        self.least = self.tree.root.end
        self.peak = 0
        self._rounds = rounds
        self._given = given
        self._early, self._when = early, random.Random(seed)
        self._questions: list[Asking] = []
        self._looked: set[Node] = set()

    @property
    def tokens(self) -> list[list[int]]:
        return [node.tokens for node in self.tree]

    def steps(self, lab: Lab) -> Iterator[Operation]:
        """Operations, one after the other; each is to be done before the next is asked for."""
        choices = self.choices
        yield lab.begin_extend(self.tree.root)
        for _ in range(self._rounds):
            ends = [key for key in self.nodes if len(key) < DEPTH]
            if choices.random() < 0.5:  # the oldest again: siblings of several rounds
                ends = ends[:3]
            leaves = choices.sample(ends, min(len(ends), choices.randint(1, 4)))
            pairs = [(self.nodes[key], choices.randint(1, 4)) for key in leaves]
            if choices.random() < self._given:  # siblings that begin alike, and share
                given = [self._alike(leaf) for leaf, width in pairs for _ in range(width)]
                growing = lab.begin_given(given)
            else:
                growing = lab.begin_grow(pairs, self.growth)
            yield growing
            grown = growing.result()
            yield from self._questions  # as a session does before it gives blocks up
            self.nodes |= {child.key: child for child in grown}
            asked_early = QUESTION if self._early else 0
            self.least = max(self.least, *(child.end + asked_early for child in grown))
            # of new blocks, or of any: equal tokens of siblings may have left at different times
            known = grown if choices.random() < 0.5 else [*self.nodes.values()]
            asked = choices.sample(known, choices.randint(0, min(len(known), 8)))
            if asked:
                questions = [[7] * choices.randint(1, QUESTION) for _ in asked]
                yield lab.begin_ask(asked, questions)
                ends_of = [n.end + len(q) for n, q in zip(asked, questions, strict=True)]
                self.least = max(self.least, *ends_of)
            idle = [key for key, node in self.nodes.items() if key and not node.children]
            for key in choices.sample(idle, min(len(idle), choices.randint(0, 3))):
                node = self.nodes.pop(key)
                node.state = NodeState.PRUNED
                lab.forget([node])

    def meanwhile(self, lab: Lab, growing: Operation) -> None:
        """Ask about blocks that have ended while others grow; the tree does not depend on it."""
        if not self._early or not isinstance(growing, Growing):
            return
        for child in growing.children:
            if child.state is NodeState.CLOSED and child not in self._looked:
                self._looked.add(child)
                if self._when.random() < self._early:
                    question = [7] * self._when.randint(1, QUESTION)
                    asking = lab.begin_ask([child], [question], counts=False, ahead_of=growing)
                    self._questions.append(asking)

    def check(self) -> None:
        """Every early question has been answered, or is still to be."""
        for asking in self._questions:
            if asking.done:
                asking.check()

    def _alike(self, leaf: Node) -> GivenBlock:
        """A block whose first tokens are those of its siblings, up to some place."""
        most = self.growth.stop.max_tokens
        common = self.choices.randint(self.choices.choice([1, most // 2]), most)
        tokens = [(leaf.id + at) % 50 + 1 for at in range(common)]
        tokens += [self.choices.randint(1, 60)] * self.choices.randint(0, most - len(tokens))
        return GivenBlock(leaf, tokens, self.growth, whole=True)


def run(lab: Lab, searches: Sequence[DrawnSearch], look: Callable[[], None] = lambda: None) -> None:
    """Take steps until all are over, those that are over closed at once; look after each."""
    going = {search: search.steps(lab) for search in searches}
    waiting: dict[DrawnSearch, Operation] = {each: next(steps) for each, steps in going.items()}
    while waiting:
        for search, operation in list(waiting.items()):
            upcoming: Operation | None = operation
            while upcoming is not None and upcoming.done:
                upcoming.check()
                upcoming = next(going[search], None)
            if upcoming is None:
                del waiting[search]
                search.check()
                search.peak = lab.state.trees[search.tree].retained.peak
                lab.close(search.tree)
                look()
            else:
                waiting[search] = upcoming
                search.meanwhile(lab, upcoming)
        if waiting:
            lab.step()
            look()


def drawn_lab(choices: random.Random, share: Share, mode: Mode = "lossless") -> Lab:
    """An engine with a drawn policy and host tier; a few check every invariant, which takes as long
    as all else."""
    host = choices.choice(HOSTS)
    return Lab(
        MODEL,
        policy=choices.choice(POLICIES[mode]),
        mode=mode,
        rehydrate=choices.choice(REHYDRATE[mode]),
        share=share,
        lower=LowerRoom(host) if host else LowerRoom(),
        costs=AnyCosts(choices) if host else None,
        debug=choices.random() < 0.15,
    )
