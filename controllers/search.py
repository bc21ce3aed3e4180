"""What searches share: checks of settings, rounds, the order of paths, what is given up."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

from arbor import errors
from arbor.errors import UsageError
from arbor.tree import Node, NodeState, ThoughtTree

from .base import Expansion

# Settings

MOST = 10**12  # of any number, so that none overflows
MOST_AT_ONCE = 100_000  # children of a leaf; beginning so many took 8 s and 0.7 GB with Sapling


def check_settings(settings: Any, least: Mapping[str, float]) -> None:
    """Refuse words that a setting does not have, and numbers that are too small or too large.

    Args:
        settings: a dataclass; settings that are a `Literal` have one of its words.
        least: setting -> the least value it may have, where it is not None.

    Raises:
        UsageError: names the setting and what it may be.
    """
    errors.check_settings(settings)
    for name, lowest in least.items():
        value = getattr(settings, name)
        if value is not None and not lowest <= value <= MOST:
            most = f" and at most {MOST:,}" if value > MOST else ""
            raise UsageError(
                "setting-range", f"{name}={value}: it must be at least {lowest}{most}."
            )


def check_at_once(settings: Any, *names: str) -> None:
    """Refuse settings by which a leaf gets more children at once than a machine can begin.

    Args:
        names: of the settings; their product is the number of children.

    Raises:
        UsageError: names them and what they may be.
    """
    values = [getattr(settings, name) for name in names]
    if math.prod(values) > MOST_AT_ONCE:
        given = ", ".join(f"{name}={value}" for name, value in zip(names, values, strict=True))
        raise UsageError(
            "setting-range",
            f"{given}: {' times '.join(names)} must be at most {MOST_AT_ONCE:,}.",
        )


def check_shares(settings: Any, *names: str) -> None:
    """Refuse settings that are not from 0 to 1.

    Raises:
        UsageError: names the setting.
    """
    for name in names:
        if not 0 <= getattr(settings, name) <= 1:
            raise UsageError(
                "setting-range", f"{name}={getattr(settings, name)}: it must be from 0 to 1."
            )


def mean(values: Sequence[float]) -> float:
    """The mean of some numbers; 0.0 of none.

    They are made smaller first, which changes no bit: their sum may be beyond any float.
    """
    scale = 0.5 ** len(values).bit_length()
    return math.fsum(each * scale for each in values) / (len(values) * scale) if values else 0.0


def finite(scores: Mapping[int, float]) -> dict[int, float]:
    """Figures by which a search chooses; an infinite one is as high as the highest of the others,
    or as low as the lowest."""
    known = [score for score in scores.values() if math.isfinite(score)] or [1.0]
    lowest, highest = min(known), max(known)
    return {block: max(lowest, min(score, highest)) for block, score in scores.items()}


def blocks_that_grow(
    width: int, levels: int, *, most: float = math.inf, beam: float = math.inf
) -> int:
    """Blocks of a tree's first levels, 1 + width + width^2 + ..., but at most `most` in all and
    `beam` in a level; as quick for many levels as for few."""
    total, level = 0, 1
    for left in range(levels, 0, -1):
        below = int(min(level * width, beam))
        if below == level:  # and so are all the levels below
            return int(min(total + left * level, most))
        total += level
        if total >= most:
            return int(most)
        level = below
    return total


# Rounds


class Stops(Protocol):
    """Settings that most searches have.

    Attributes:
        threshold: a thought grows only if its value is above this; the default, 0, leaves out what
            a verifier refutes.
        stop_value: the search ends as soon as a finished path is worth this much; None for never. 1
            is a proof from the exact verifier; a model that judges itself stays below it, so its
            searches run to their end.
    """

    @property
    def threshold(self) -> float: ...
    @property
    def stop_value(self) -> float | None: ...


Settings = TypeVar("Settings", bound=Stops)


class Rounds(Generic[Settings]):
    """Base of the searches of one problem that go in rounds; `_next` is what grows now.

    Args:
        settings: of the controller.
        tree: with its root alone.
        max_depth: blocks on one path.
        first: children of the root in the first round; 0: a search begins otherwise.
    """

    def __init__(
        self, settings: Settings, tree: ThoughtTree, max_depth: int, first: int = 0
    ) -> None:
        self._settings = settings
        self._tree = tree
        self._max_depth = max_depth
        self._next = [Expansion(tree.root, first)] if first else []

    def ask(self, room: int) -> list[Expansion]:
        return list(self._next)

    def best(self) -> list[Node]:
        return finished(self._tree)

    def _is_solved(self, children: Iterable[Node]) -> bool:
        """Whether a finished path is worth so much that the search ends."""
        stop = self._settings.stop_value
        return stop is not None and any(
            child.state is NodeState.TERMINAL and child.value >= stop for child in children
        )

    def _may_grow(self, node: Node) -> bool:
        """Whether a thought's path has not ended, may be longer, and is worth enough."""
        return (
            node.state is NodeState.CLOSED
            and node.depth < self._max_depth
            and node.value > self._settings.threshold
        )


class Levels(Rounds[Settings], ABC):
    """Base of the searches in which what does not grow in the next round never grows."""

    def reads(self, children: Sequence[Node]) -> Sequence[Node]:
        """The children; none of the last level, on whose values nothing depends."""
        goes_on = any(
            child.state is NodeState.CLOSED and child.depth < self._max_depth for child in children
        )
        return children if goes_on else ()

    def tell(self, children: Sequence[Node]) -> None:
        level = sorted(children, key=lambda child: child.id)
        self._next = []
        if self._is_solved(level):
            return
        self._next = self._chosen(level)
        growing = {expansion.leaf.id for expansion in self._next}
        give_up(child for child in level if child.id not in growing)

    @abstractmethod
    def _chosen(self, level: Sequence[Node]) -> list[Expansion]:
        """What grows next, of the children of a round in order of id."""

    def prospects(self) -> dict[int, float]:
        return {}


# Blocks


def mean_logprob(leaf: Node) -> float:
    """Mean log probability of a path's tokens, without the prompt; -inf without tokens."""
    blocks = leaf.path[1:]
    tokens = sum(len(block.tokens) for block in blocks)
    return sum(block.logprob for block in blocks) / tokens if tokens else float("-inf")


def finished(tree: ThoughtTree) -> list[Node]:
    """The TERMINAL leaves, best first: by value, then mean log probability of the path, then id.

    Where only some of them were valued, values say nothing of the others and do not count.
    """
    leaves = [node for node in tree if node.state is NodeState.TERMINAL]
    some = len({leaf.valued for leaf in leaves}) > 1
    return sorted(
        leaves, key=lambda leaf: (0.0 if some else -leaf.value, -mean_logprob(leaf), leaf.id)
    )


def repeats(level: Iterable[Node]) -> list[bool]:
    """Per block, whether an earlier one of the level has the same thoughts, outer spaces apart."""
    seen: set[tuple[str, ...]] = set()
    result = []
    for node in level:
        text = tuple(thought.strip() for thought in node.thoughts)
        result.append(text in seen)
        seen.add(text)
    return result


def without_repeats(level: Sequence[Node]) -> list[Node]:
    """The blocks of a level that repeat no earlier one."""
    return [node for node, again in zip(level, repeats(level), strict=True) if not again]


def give_up(nodes: Iterable[Node], may_grow: Callable[[Node], bool] | None = None) -> None:
    """Set PRUNED on blocks that will never grow again, and on ancestors with only such children.

    Finished leaves stay TERMINAL, and the blocks that lead to one keep their state; the root is
    never given up.

    Args:
        may_grow: whether an ancestor still grows more children, and therefore stays; by default
            none does.
    """
    for given_up in nodes:
        node = given_up
        while (
            node.parent is not None
            and node.state is NodeState.CLOSED
            and all(child.state is NodeState.PRUNED for child in node.children)
            and (node is given_up or may_grow is None or not may_grow(node))
        ):
            node.state = NodeState.PRUNED
            node = node.parent
