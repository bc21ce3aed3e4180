"""Mirror: a search's tree in the tokens of its reward model, and the scores of its blocks."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from arbor.aggregate.base import Steps, reduced
from arbor.engine.engine import Engine
from arbor.engine.operation import Reading
from arbor.errors import BudgetInfeasible, InputError
from arbor.events import Event, Forwarded, Listener, Rehydrated, Scored
from arbor.tree import Node, NodeState, ThoughtTree

from ..base import Verdict

if TYPE_CHECKING:
    from torch import Tensor

    from arbor.budget import Plan


class StepTokens(Protocol):
    """Token ids of a step."""

    def __call__(self, text: str, *, first: bool) -> list[int]: ...


@dataclass
class RewardCost:
    """A listener that counts what the reward model's engine does for one search.

    Attributes:
        computed: tokens run through the model.
        recomputed: those of them that had been evicted.
        peak: most tokens held at any instant.
        elapsed_s: seconds in forwards.
    """

    computed: int = 0
    recomputed: int = 0
    peak: int = 0
    elapsed_s: float = 0.0

    def __call__(self, event: Event) -> None:
        match event:
            case Forwarded():
                self.computed += event.rows
                self.peak = max(self.peak, event.peak)
                self.elapsed_s += event.elapsed_s
            case Rehydrated():
                self.recomputed += sum(count for _, count in event.nodes) + event.repeated
            case _:
                pass


class Mirror:
    """The tree of one search in the reward model's engine.

    Every block of the search that is judged has a block here: the same step, tokenised by itself
    with its separator. Equal steps after equal paths are one block. The mirror is therefore a tree
    whatever the tokenizer; where it would join characters of two steps into one token, the tokens
    differ from those of the whole text.

    Args:
        engine: of the reward model.
        prompt: token ids before the first step.
        end: token ids at whose end a path is scored; none: at the end of its last step.
        step_tokens: of a step.
        values: of scores [n, labels].
        steps: the value of a path from those of its steps.
        context: positions of the model.
        plan: the budget of this search.
        pool: the budget of all searches in progress, tokens.
        verifier: its name, for events.
        emit: called with the events of the search.
        explain: an error that names the verifier, for one of the engine.
    """

    def __init__(
        self,
        engine: Engine,
        prompt: Sequence[int],
        end: Sequence[int],
        step_tokens: StepTokens,
        values: Callable[[Tensor], Sequence[float]],
        steps: Steps,
        *,
        context: int,
        plan: Plan,
        pool: int,
        verifier: str,
        emit: Listener,
        explain: Callable[[BudgetInfeasible], BudgetInfeasible],
    ) -> None:
        self.engine = engine
        self.tree = ThoughtTree(prompt)
        self.end = list(end)
        self.steps = steps
        self.values = values
        self.cost, self._reported = RewardCost(), RewardCost()
        self.explain = explain
        self._step_tokens = step_tokens
        self._context = context
        self._verifier = verifier
        self._emit = emit
        self._scores: dict[int, float] = {}  # by id of the mirror's block
        self._of: dict[int, Node] = {}  # by id of the search's block
        self._uses: Counter[int] = Counter()  # blocks of the search by id of the mirror's block
        self._children: dict[tuple[int, tuple[int, ...]], Node] = {}
        engine.open(
            self.tree,
            plan.budget_tokens if plan.part is None else plan.room_tokens,
            pool=pool,
            part=plan.fraction,
            emit=self.cost,
        )

    def begin(self, candidates: Sequence[Node]) -> PathScoring:
        """Begin to score the paths of blocks; all that are new in one operation.

        Raises:
            BudgetInfeasible: a path does not fit.
            InputError: a path exceeds the reward model's context.
        """
        ends = [self._mirrored(node) for node in candidates]
        wanted = [each for end in ends for each in self._scored_at(end)]
        fresh = [node for node in dict.fromkeys(wanted) if node.id not in self._scores]
        for node in fresh:
            if node.end + len(self.end) > self._context:
                raise InputError(
                    "problem-too-long",
                    f"a path has {node.end + len(self.end):,} tokens of the reward model of "
                    f"'{self._verifier}', whose context is {self._context:,}.",
                    "Use a smaller --max-depth or --step-tokens.",
                    tokens=node.end + len(self.end),
                    context=self._context,
                )
        return PathScoring(self, ends, fresh)

    def scored(self, nodes: Sequence[Node], scores: Tensor) -> None:
        """Keep the scores of blocks.

        Args:
            nodes: of the mirror.
            scores: [n, labels] float32.
        """
        self._scores.update(zip((node.id for node in nodes), self.values(scores), strict=True))

    def verdict(self, ends: Sequence[Node], fresh: Sequence[Node]) -> Verdict:
        """The values of paths all of whose scores are known; reports the cost since the last one.

        Args:
            ends: the last block of each, in the mirror.
            fresh: blocks scored for them.
        """
        cost, before, last = self.cost, self._reported, [self._scores[end.id] for end in ends]
        self._emit(
            Scored(
                verifier=self._verifier,
                steps=len(fresh),
                path_tokens=sum(node.end + len(self.end) for node in fresh),
                computed=cost.computed - before.computed,
                recomputed=cost.recomputed - before.recomputed,
                peak=cost.peak,
                elapsed_s=cost.elapsed_s - before.elapsed_s,
            )
        )
        self._reported = dataclasses.replace(cost)
        if self.steps == "last":
            return Verdict(tuple(last), 0)
        paths = [[self._scores[node.id] for node in self._scored_at(end)] for end in ends]
        values = tuple(reduced(path, self.steps) for path in paths)
        return Verdict(values, 0, scores=tuple(last))

    def forget(self, nodes: Sequence[Node]) -> None:
        """Free the blocks that mirror these of the search and no other."""
        gone = []
        for node in nodes:
            mine = self._of.pop(node.id, None)
            if mine is None or mine.parent is None:
                continue
            self._uses[mine.id] -= 1
            if not self._uses[mine.id]:
                gone.append(mine)
                del self._children[mine.parent.id, tuple(mine.tokens)]
                mine.state = NodeState.PRUNED
        self.engine.forget(gone)

    def close(self) -> None:
        """End the search; its KV is freed."""
        self.engine.finish(self.tree)
        self.engine.close(self.tree)

    def _scored_at(self, end: Node) -> Sequence[Node]:
        """The blocks whose scores give the value of a path: its last, or those of all its steps.

        A path whose steps have no token is scored at the end of its prompt.
        """
        steps: Sequence[Node] = () if self.steps == "last" else end.path[1:]
        return steps or (end,)

    def _mirrored(self, node: Node) -> Node:
        """The block of the mirror for one of the search; those that are missing are made."""
        missing: list[Node] = []
        while node.parent is not None and node.id not in self._of:
            missing.append(node)
            node = node.parent
        mine = self._of.get(node.id, self.tree.root)
        for each in reversed(missing):
            tokens = self._step_tokens(each.text, first=each.depth == 1)
            mine = self._child(mine, tokens) if tokens else mine
            self._of[each.id] = mine
            self._uses[mine.id] += 1
        return mine

    def _child(self, parent: Node, tokens: Sequence[int]) -> Node:
        key = (parent.id, tuple(tokens))
        if key not in self._children:
            child = self.tree.fork(parent)
            for token in tokens:
                self.tree.append(child, token)
            child.state = NodeState.CLOSED
            self.engine.changed([child])
            self._children[key] = child
        return self._children[key]


class PathScoring:
    """A verdict in progress.

    Args:
        mirror: the search's.
        ends: the last block of each path, in the mirror.
        fresh: blocks whose scores are still to be read.

    Raises:
        BudgetInfeasible: one of them does not fit with its path.
    """

    def __init__(self, mirror: Mirror, ends: Sequence[Node], fresh: Sequence[Node]) -> None:
        self._mirror = mirror
        self._ends = ends
        self._fresh = fresh
        self._operation: Reading | None = None
        if fresh:
            try:
                self._operation = (
                    mirror.engine.begin_ask(fresh, [mirror.end] * len(fresh))
                    if mirror.end
                    else mirror.engine.begin_read(fresh)
                )
            except BudgetInfeasible as error:
                raise mirror.explain(error) from error

    @property
    def done(self) -> bool:
        return self._operation is None or self._operation.done

    def verdict(self) -> Verdict:
        """The values of the paths.

        Raises:
            BudgetInfeasible, OutOfMemory: what ended the operation.
            ModelError: scores that are not finite.
        """
        if self._operation is not None:
            self._mirror.scored(self._fresh, self._operation.result())
        return self._mirror.verdict(self._ends, self._fresh)
