"""Early questions: those of a verification that are asked while other blocks still grow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from arbor.tree import Node, NodeState

if TYPE_CHECKING:
    from torch import Tensor

    from arbor.engine.engine import Engine
    from arbor.engine.operation import Asking, Growing


class SomeEnded:
    """Wait until some blocks have ended while others still wait for room, or until all have.

    Args:
        growing: the blocks, in progress.
    """

    def __init__(self, growing: Growing) -> None:
        self._growing = growing
        self._left = growing.left
        self._taken: set[Node] = set()
        self._ended: list[Node] = []

    @property
    def done(self) -> bool:
        """Whether there is something to take, or nothing to come."""
        growing = self._growing
        if growing.divided and growing.left != self._left:
            self._left = growing.left
            self._ended = [
                child
                for child in growing.children
                if child.state is NodeState.CLOSED and child not in self._taken
            ]
        return growing.done or bool(self._ended)

    def take(self) -> list[Node]:
        """The blocks that have ended since the last call."""
        ended, self._ended = self._ended, []
        self._taken.update(ended)
        return ended


class EarlyQuestions:
    """Questions that are asked as soon as they can be, and their answers.

    Where the blocks of a round do not all fit at once, the first of them have left the device when
    the last have ended, and would be computed again to be judged. An answer depends on the path and
    the question alone, so that it may as well be asked for before.

    Args:
        engine: answers.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._asking: list[Asking] = []
        self._places: dict[_Asked, tuple[Asking, int]] = {}
        self._about: dict[Node, list[Asking]] = {}

    def ask(
        self, nodes: Sequence[Node], questions: Sequence[Sequence[int]], growing: Growing
    ) -> None:
        """Ask, ahead of the blocks of an operation that wait; what was asked before is not asked
        again."""
        asked = [_asked(node, question) for node, question in zip(nodes, questions, strict=True)]
        fresh = {each: at for at, each in enumerate(asked) if each not in self._places}
        if not fresh:
            return
        asking = self._engine.begin_ask(
            [nodes[at] for at in fresh.values()],
            [questions[at] for at in fresh.values()],
            counts=False,
            ahead_of=growing,
        )
        self._asking.append(asking)
        self._places |= {each: (asking, place) for place, each in enumerate(fresh)}
        for at in fresh.values():
            self._about.setdefault(nodes[at], []).append(asking)

    @property
    def waiting(self) -> list[Asking]:
        """What is not answered yet."""
        return [each for each in self._asking if not each.done]

    def answered(self, node: Node) -> bool:
        """Whether all that was asked about a block is answered."""
        about = self._about.get(node, ())
        return bool(about) and all(asking.done for asking in about)

    def take(self, nodes: Sequence[Node], questions: Sequence[Sequence[int]]) -> dict[int, Tensor]:
        """The answers there are, [V] float32, by the place of the question."""
        found = {}
        for at, (node, question) in enumerate(zip(nodes, questions, strict=True)):
            asking, place = self._places.get(_asked(node, question), (None, 0))
            if asking is not None and asking.done and asking.error is None:
                found[at] = asking.answers[place]
        return found

    def clear(self) -> None:
        """Forget all."""
        self._asking.clear()
        self._places.clear()
        self._about.clear()


# a block's parent and tokens, which siblings may have in common; and the question's tokens
_Asked = tuple[Node | None, tuple[int, ...], tuple[int, ...]]


def _asked(node: Node, question: Sequence[int]) -> _Asked:
    return node.parent, tuple(node.tokens), tuple(question)
