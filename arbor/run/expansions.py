"""Expansions: those that overlap in time, and thoughts that the model proposes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, cast

from arbor.controllers.base import Expansion
from arbor.engine.engine import Engine
from arbor.engine.operation import GivenBlock, Growing, Growth
from arbor.engine.text import before, sampled_text
from arbor.run.planning import proposal_tokens
from arbor.run.plugin_answers import PluginCalls, unchecked
from arbor.run.searches import Awaited, Steps
from arbor.tasks.base import BlockLimits, Problem, Proposes, Task
from arbor.tree import Node

if TYPE_CHECKING:
    from arbor.engine.operation import Growing

# the children with a value, and whether their verification asked the model
Grown = tuple[list[Node], bool]


class Overlapping:
    """One expansion while it grows and while its children are verified.

    Its time is logical, so that the order of ends depends on the blocks alone: not on which rows
    had to wait, nor on how many steps the engine took. It ends after as many ticks as its longest
    block has sampled tokens, and one more if the verification asks the model.

    Attributes:
        question: asks the model for its children; None: they are sampled.
        children: all of its children so far, those that an interruption gave up included.
        awaited: what it waits for; None once it has ended.
        end: when it ended, ticks; None before that.
        reported: the children given to `tell`.
    """

    def __init__(self, expansion: Expansion, start: int, steps: Steps[Grown]) -> None:
        self.expansion = expansion
        self.start = start
        self._steps = steps
        self.awaited: Awaited | None = next(steps)
        first: Sequence[Node] = cast("Growing", self.awaited).children
        self.question = first[0] if expansion.generate == "propose" else None
        self.children: Sequence[Node] = [] if self.question else first
        self.end: int | None = None
        self.reported: list[Node] = []
        self._asks = False  # its verification has asked the model

    @property
    def ready(self) -> bool:
        """Whether it can go on."""
        return self.awaited is not None and self.awaited.done

    @property
    def earliest(self) -> int:
        """The earliest time at which it can end, ticks."""
        if self.end is not None:
            return self.end
        return self.start + max(1, self._longest) + self._asks

    @property
    def _longest(self) -> int:
        """Sampled tokens of its longest block so far."""
        blocks = self.children if self.question is None else [self.question]
        return max(len(block.tokens) - block.given for block in blocks)

    @property
    def blocks(self) -> list[Node]:
        """Its children so far, and the question for them."""
        return [*self.children, *([] if self.question is None else [self.question])]

    def go_on(self) -> None:
        """Continue as far as possible.

        Raises:
            Exception: what ended the operation it waited for, or what the verifier raised.
        """
        while self.awaited is not None and self.awaited.done:
            try:
                self.awaited = next(self._steps)
                if self.question is not None and not self.children:
                    self.children = getattr(self.awaited, "children", [])
                    continue
                self._asks = self._asks or getattr(self.awaited, "counts", True)
            except StopIteration as stopped:
                self.reported, asked = stopped.value
                self.end = self.start + self._longest + (self._asks or asked)
                self.awaited = None

    def close(self) -> None:
        """Give up what it was about to do."""
        self._steps.close()


class AnyEnded:
    """Wait until an expansion can go on, or can be reported."""

    def __init__(self, overlapping: Sequence[Overlapping]) -> None:
        self._overlapping = overlapping

    @property
    def done(self) -> bool:
        """Whether one can."""
        return any(each.ready for each in self._overlapping) or bool(due(self._overlapping))


def due(overlapping: Sequence[Overlapping]) -> list[Overlapping]:
    """The expansions that ended first, all at one time; none while another may still end before or
    with them.
    """
    ends = [each.end for each in overlapping if each.end is not None]
    if not ends:
        return []
    first = min(ends)
    if any(each.end is None and each.earliest <= first for each in overlapping):
        return []
    return [each for each in overlapping if each.end == first]


class Proposals:
    """Asks the model for next thoughts, and reads them from its completions.

    The question for a state and the completion are one block of the tree, a child of the state's
    whose first tokens are given: its KV is in the budget and shares the path like any block's. The
    search gives it up as soon as its thoughts are read.
    """

    def __init__(self, engine: Engine, task: Proposes, problem: Problem, growth: Growth) -> None:
        self._engine = engine
        self._task = task
        self._problem = problem
        self._growth = growth
        self._asked: dict[int, Growth] = {}  # by id of the block

    @cached_property
    def longest(self) -> int:
        """Tokens of the question at no thoughts and its longest completion, which the plan
        counts."""
        return proposal_tokens(self._task, self._problem, self._engine)

    def begin(self, leaves: Sequence[Node], *, counts: bool = True) -> Growing:
        """Ask for the next thoughts of states, as one operation; at least one.

        Raises:
            BudgetInfeasible: a question and its completion do not fit after a path.
            UsageError: a question leaves no room for a completion.
        """
        blocks = [self._question(leaf) for leaf in leaves]
        operation = self._engine.begin_given(blocks, counts=counts)
        for child, block in zip(operation.children, blocks, strict=True):
            self._asked[child.id] = block.growth
        return operation

    def is_question(self, node: Node) -> bool:
        """Whether a block is a question whose thoughts have not been read."""
        return node.id in self._asked

    def read(self, block: Node, width: int) -> list[GivenBlock]:
        """The thoughts that a completion lists: the first different ones, at most `width`."""
        leaf, growth = block.parent, self._asked.pop(block.id)
        assert leaf is not None, "a question follows a state"
        text = sampled_text(self._decode, block)
        if growth.stop.after(block.tokens, before(block)) == "length":
            text = text[: text.rfind("\n") + 1]
        most = self._growth.stop.longest(leaf.reasoned)
        found = self._task.proposals(self._problem, leaf.thoughts, text)
        thoughts = dict.fromkeys(tuple(self._engine.encode(each)[:most]) for each in found)
        return [
            GivenBlock(leaf, tokens, self._growth, whole=True)
            for tokens in islice(filter(None, thoughts), width)
        ]

    def _question(self, leaf: Node) -> GivenBlock:
        proposal = self._task.proposal(self._problem, leaf.thoughts)
        tokens = self._engine.encode(proposal.text)
        most = min(len(tokens) + proposal.max_tokens, self.longest)
        if not len(tokens) < most:
            raise PluginCalls("task", unchecked(cast(Task, self._task))).wrong(
                "proposal",
                proposal.text,
                f"a question of fewer than {self.longest:,} tokens, which is what the one at no "
                "thoughts and its completion may have",
            )
        limits = BlockLimits(proposal.stop, most, max_depth=1)
        growth = replace(self._growth, stop=self._growth.stop.within(limits), grammar=None)
        return GivenBlock(leaf, tokens, growth)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._engine.tokenizer.decode(tokens, skip_special_tokens=True)
        return text
