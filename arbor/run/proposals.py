"""Proposals: the model lists next thoughts of a state in one completion, and each line is one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cached_property
from itertools import islice
from typing import cast

from arbor.engine.engine import Engine
from arbor.engine.operation import GivenBlock, Growing, Growth
from arbor.engine.text import before, sampled_text
from arbor.run.planning import proposal_tokens
from arbor.run.plugin_answers import Answers, unchecked
from arbor.tasks.base import BlockLimits, Problem, Proposes, Task
from arbor.tree import Node


class Proposals:
    """Asks the model for next thoughts, and reads them from its completions.

    The question for a state and the completion are one block of the tree, a child of the state's
    whose first tokens are given: its KV is in the budget and shares the path like any block's. The
    search gives it up as soon as its thoughts are read.

    Args:
        engine: of the search.
        task: can ask for thoughts; its answers are checked.
        problem: what is solved.
        growth: of the search's blocks.
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

        Args:
            leaves: blocks of one tree.
            counts: as for `Engine.begin_grow`.

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
        """The thoughts that a completion lists: the first different ones, at most `width`.

        Args:
            block: closed, of `begin`.
            width: thoughts at most.
        """
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
            raise Answers("task", unchecked(cast(Task, self._task))).wrong(
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
