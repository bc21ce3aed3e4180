"""Monte Carlo tree search: UCT and PUCT over thoughts, with the settings of its published forms."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from arbor.tree import Node, NodeState, ThoughtTree

from .base import Expansion
from .search import (
    Rounds,
    blocks_that_grow,
    check_at_once,
    check_settings,
    check_shares,
    finished,
    finite,
    give_up,
)


@dataclass(frozen=True)
class MCTS:
    """Monte Carlo tree search over thoughts (Kocsis and Szepesvari 2006; AlphaZero).

        select     from the root down to a block that has not grown all its children:
                   uct   argmax Q + c sqrt(ln N(parent) / N)
                   puct  argmax Q + c P sqrt(N(parent)) / (1 + N), P the share of exp(mean log
                         probability of the block's tokens) among its siblings
        expand     that block grows its missing children; the simulation goes on with the best one
        roll out   up to `rollout` further steps: grow rollout_width children, go on with the best
        back up    G, the reward of the simulation, along its path: N += 1, and Q is the mean of the
                   rewards (backup=mean) or the highest (backup=max)

    Q of a block without a visit is its value. The last simulation rolls out to the end of its path
    if no path has ended. The sources with their settings are in `VARIANTS`:

    ``rap``: RAP (Hao et al., arXiv 2305.14992; llm-reasoners, examples/RAP/gsm8k): UCT with c = 1,
    10 simulations, 4 children, rollouts to the end, reward=mean, backup=max.
    ``rstar``: rStar (Qi et al., arXiv 2408.06195; zhentingqi/rStar): UCT with c = 2, unvisited
    children first, 15 simulations, rollouts to the end, the reward of the last block.
    ``rest-mcts``: ReST-MCTS* (Zhang et al., arXiv 2406.03816; THUDM/ReST-MCTS): c = 0.99,
    3 children, rollouts of 3 steps of which the best value counts one half, an unvisited child's
    exploration term 1, at most 100 simulations, an end at a value of 0.9.

    Args:
        selection: ``uct`` or ``puct``.
        exploration: c. 1 as in RAP; AlphaZero's is 1.25.
        first_play: the exploration term of a child without a visit; inf for always before its
            siblings; None: by the formula, with one visit (uct) or none (puct).
        width: children of a block.
        simulations: in all; each grows at most one block, and one more for each step of a rollout.
        leaves: simulations in progress at a time. Their blocks grow in one batch; 1 is the
            sequential search of the sources. A simulation in progress counts as a visit of reward 0
            on its path, so that the next one goes elsewhere (Chaslot et al. 2008).
        rollout: steps after the expansion; 0 takes the value of the new block for the rollout
            (AlphaZero), None goes on to the end of the path.
        rollout_width: children grown at each step of a rollout, at most `width`; they stay in the
            tree.
        reward: G: ``last``, the value of the last block; ``max``, the highest of the rollout's
            values; ``mean``, for each block of the path the mean of the values from it on (RAP).
        rollout_weight: alpha, for ``last`` and ``max``: G = (1 - alpha) value of the expansion's
            best child + alpha that of the rollout.
        backup: ``mean`` or ``max``.
        threshold, stop_value: what grows at all, and when the search ends; see `Stops`.

    Differs from the sources:

    - Finished paths and subtrees in which nothing can grow are not visited again (sources: they
      are, which costs simulations and no tokens), so every simulation grows a block.
    - A child that repeats the text of an earlier sibling is given up.
    - Rollouts follow the value, ties by id (rStar: at random; ReST-MCTS*: chosen likewise, and
      its rollouts leave the tree).
    - `best` returns finished paths, by value, then mean log probability, then id (RAP: votes of
      the edges' rewards; rStar: a second model).
    - `threshold` and `stop_value` are new (-1 and None for the behaviour of RAP and rStar), and so
      is `leaves`.
    """

    kind: ClassVar[str] = "controller"  # of its names, see `registry.KINDS`

    selection: Literal["uct", "puct"] = "uct"
    exploration: float = 1.0
    first_play: float | None = None
    width: int = 4
    simulations: int = 32
    leaves: int = 4
    rollout: int | None = 0
    rollout_width: int = 1
    reward: Literal["last", "mean", "max"] = "last"
    rollout_weight: float = 1.0
    backup: Literal["mean", "max"] = "mean"
    threshold: float = 0.0
    stop_value: float | None = 1.0
    registered_as: str = field(
        default="", kw_only=True, repr=False, compare=False, metadata={"setting": False}
    )

    def __post_init__(self) -> None:
        check_settings(
            self,
            dict.fromkeys(("width", "simulations", "leaves", "rollout_width"), 1)
            | {"rollout": 0, "exploration": 0},
        )
        check_at_once(self, "width")
        check_shares(self, "rollout_weight")

    @property
    def summary(self) -> str:
        """A sentence for lists of controllers."""
        return _SUMMARIES.get(self.registered_as, "Monte Carlo tree search over thoughts.")

    def start(self, tree: ThoughtTree, max_depth: int) -> MCTSSearch:
        return MCTSSearch(self, tree, max_depth)

    def max_blocks(self, max_depth: int) -> int:
        """simulations (width + steps rollout_width), and at most width + ... + width^max_depth.

        steps is the smaller of `rollout` and max_depth - 1, in the last simulation the latter;
        rollout_width counts up to `width`.
        """
        steps = max_depth - 1 if self.rollout is None else min(self.rollout, max_depth - 1)
        rolled = self.simulations * steps + max_depth - 1 - steps
        most = self.simulations * self.width + rolled * min(self.rollout_width, self.width)
        return min(self.width * blocks_that_grow(self.width, max_depth, most=most), most)


@dataclass(slots=True)
class _Simulation:
    """A simulation in progress.

    Attributes:
        path: root to the block that grows now.
        chosen: blocks of the path that selection chose; the others are new.
        steps: steps of the rollout that are left.
        width: children to grow.
    """

    path: list[Node]
    chosen: int
    steps: int
    width: int


class MCTSSearch(Rounds[MCTS]):
    """The tree statistics and the simulations in progress of one problem."""

    def __init__(self, settings: MCTS, tree: ThoughtTree, max_depth: int) -> None:
        super().__init__(settings, tree, max_depth)
        self._visits: Counter[int] = Counter()
        self._rewards: dict[int, float] = {}  # their sum, or the highest
        self._flying: Counter[int] = Counter()  # visits of simulations in progress
        self._asked: Counter[int] = Counter()  # children asked for
        self._children: dict[int, list[Node]] = {}  # grown children, repeats left out
        self._running: list[_Simulation] = []
        self._started = 0
        self._prospects: dict[int, float] | None = None  # since the last round, where asked for
        self._refill()

    def ask(self, room: int) -> list[Expansion]:
        return [Expansion(each.path[-1], each.width) for each in self._running]

    def tell(self, children: Sequence[Node]) -> None:
        level = sorted(children, key=lambda child: child.id)
        if self._is_solved(level):
            self._running = []
            self._prospects = {}
            return
        grown: dict[int, list[Node]] = {}
        for child in level:
            if child.parent is not None:
                grown.setdefault(child.parent.id, []).append(child)
        going, reported = [], []
        for each in self._running:
            leaf = each.path[-1]
            own = grown.get(leaf.id, [])
            if grown and not own:  # a limit left it out of this round
                going.append(each)
                continue
            reported.append(each)
            self._asked[leaf.id] -= each.width - (len(own) or each.width)
            if self._advance(each, self._fresh(leaf, own)):
                going.append(each)
            else:
                self._back_up(each)
        grew = [each.path[each.chosen - 1] for each in reported]
        tips = [each.path[-1] for each in reported]
        self._running = going
        self._give_up([*level, *grew, *tips])
        self._refill()

    def prospects(self) -> Mapping[int, float]:
        """Leaves with the probability that one of the remaining simulations grows them.

        A simulation is taken to choose each child in proportion to its selection score.
        """
        if self._prospects is None:
            self._prospects = self._foresee()
        return self._prospects

    def scores(self) -> dict[int, float]:
        """What selection maximises, of each grown child."""
        found = {
            child.id: self._score(self._tree[parent], child)
            for parent, children in self._children.items()
            for child in children
        }
        return finite(found)

    # Simulations

    def _refill(self) -> None:
        """Start simulations until `leaves` are in progress."""
        blocked = {each.path[-1].id for each in self._running}
        while (
            len(self._running) < self._settings.leaves
            and self._started < self._settings.simulations
            and (path := self._select(blocked)) is not None
        ):
            leaf = path[-1]
            width = self._settings.width - self._asked[leaf.id]
            self._started += 1
            self._asked[leaf.id] = self._settings.width
            self._fly(path, 1)
            rollout = self._settings.rollout
            is_last = self._started == self._settings.simulations
            if rollout is None or (is_last and not finished(self._tree)):
                rollout = self._max_depth
            self._running.append(_Simulation(path, len(path), rollout, width))
            blocked.add(leaf.id)
        self._prospects = None

    def _select(self, blocked: set[int]) -> list[Node] | None:
        """The path to the block that grows next; None if there is none.

        Args:
            blocked: ids of blocks below which nothing can be selected now; written.
        """
        path = [self._tree.root]
        while path:
            node = path[-1]
            if node.id not in blocked:
                if self._asked[node.id] < self._settings.width:
                    return path
                options = [
                    child
                    for child in self._children.get(node.id, [])
                    if child.state is NodeState.CLOSED and child.id not in blocked
                ]
                if options:
                    path.append(
                        max(options, key=lambda each: (self._score(node, each), each.value))
                    )
                    continue
                blocked.add(node.id)
            path.pop()
        return None

    def _score(self, parent: Node, child: Node) -> float:
        """What selection maximises."""
        settings = self._settings
        visits, flying = self._visits[child.id], self._flying[child.id]
        known = max(1, visits)
        value = self._mean(child)
        if flying:
            value *= known / (known + flying)
        if visits + flying == 0 and settings.first_play is not None:
            return value + settings.first_play
        above = max(1, self._visits[parent.id] + self._flying[parent.id])
        if settings.selection == "uct":
            return value + settings.exploration * math.sqrt(math.log(above) / (known + flying))
        share = self._share(parent, child)
        return value + settings.exploration * share * math.sqrt(above) / (1 + visits + flying)

    def _mean(self, node: Node) -> float:
        """Q."""
        visits = self._visits[node.id]
        if visits == 0:
            return node.value
        total = self._rewards[node.id]
        return total if self._settings.backup == "max" else total / visits

    def _share(self, parent: Node, child: Node) -> float:
        """P."""
        siblings = self._children[parent.id]
        total = sum(map(_likelihood, siblings))
        return _likelihood(child) / total if total > 0 else 1 / len(siblings)

    def _fly(self, path: Sequence[Node], change: int) -> None:
        """Count a simulation in progress along a path, or no longer (-1)."""
        for node in path:
            self._flying[node.id] += change

    def _fresh(self, leaf: Node, children: Sequence[Node]) -> list[Node]:
        """The new children of a block that repeat no sibling."""
        known = self._children.setdefault(leaf.id, [])
        texts = {child.text.strip() for child in known}
        fresh = []
        for child in children:
            if child.text.strip() not in texts:
                texts.add(child.text.strip())
                fresh.append(child)
        known.extend(fresh)
        return fresh

    def _advance(self, simulation: _Simulation, fresh: Sequence[Node]) -> bool:
        """Go on with the best new child; whether the rollout takes another step there."""
        if not fresh:
            return False
        best = max(fresh, key=lambda child: child.value)  # the first on ties
        simulation.path.append(best)
        self._fly([best], 1)
        if simulation.steps == 0 or not self._may_grow(best):
            return False
        simulation.steps -= 1
        simulation.width = min(self._settings.rollout_width, self._settings.width)
        self._asked[best.id] = simulation.width
        return True

    def _back_up(self, simulation: _Simulation) -> None:
        """Add the reward of a simulation along its path."""
        path, settings = simulation.path, self._settings
        self._fly(path, -1)
        reward = self._reward(path[simulation.chosen - 1 :])
        total, blocks = 0.0, 0
        for node in reversed(path):
            if settings.reward == "mean":
                if node.parent is not None:
                    total, blocks = total + node.value, blocks + 1
                reward = total / blocks if blocks else 0.0
            visits = self._visits[node.id]
            before = self._rewards.get(node.id, 0.0)
            if settings.backup == "max":
                self._rewards[node.id] = max(before, reward) if visits else reward
            else:
                self._rewards[node.id] = before + reward
            self._visits[node.id] = visits + 1

    def _reward(self, blocks: Sequence[Node]) -> float:
        """G of ``last`` and ``max``.

        Args:
            blocks: the block that selection chose, the expansion's best child, the rollout.
        """
        if len(blocks) < 3:
            return blocks[-1].value
        first, rollout = blocks[1].value, [block.value for block in blocks[2:]]
        end = max(rollout) if self._settings.reward == "max" else rollout[-1]
        weight = self._settings.rollout_weight
        return (1 - weight) * first + weight * end

    # Blocks

    def _give_up(self, nodes: Sequence[Node]) -> None:
        """Give up those of these blocks that will never grow."""

        busy = {each.path[-1].id for each in self._running}

        def lives(node: Node) -> bool:
            if node.parent is None or node.id in busy:
                return True
            kept = any(child is node for child in self._children.get(node.parent.id, []))
            asked = self._asked[node.id]
            return kept and self._may_grow(node) and asked < self._settings.width

        give_up((node for node in nodes if not lives(node)), lives)

    # Foresight

    def _foresee(self) -> dict[int, float]:
        left = self._settings.simulations - self._started
        if left <= 0:
            return {}
        busy = {each.path[-1].id for each in self._running}
        found: dict[int, float] = {}
        shares = [(self._tree.root, 1.0)]
        for node, share in shares:
            options = [
                child
                for child in self._children.get(node.id, [])
                if child.state is NodeState.CLOSED and child.id not in busy
            ]
            if not options and node.id not in busy and self._asked[node.id] < self._settings.width:
                found[node.id] = 1 - (1 - share) ** left
            scores = [max(0.0, self._score(node, child)) for child in options]
            total = sum(scores)
            for child, score in zip(options, scores, strict=True):
                part = score / total if 0 < total < math.inf else 1 / len(options)
                shares.append((child, share * part))
        return found


def _likelihood(node: Node) -> float:
    """exp of the mean log probability of a block's tokens; 0 without tokens."""
    return math.exp(node.logprob / len(node.tokens)) if node.tokens else 0.0


_SUMMARIES = {
    "rap": "`mcts` as in RAP (Hao et al., arXiv 2305.14992): rollouts to the end, mean rewards, max.",
    "rest-mcts": "`mcts` as in ReST-MCTS* (Zhang et al., arXiv 2406.03816): rollouts of 3 steps.",
    "rstar": "`mcts` as in rStar (Qi et al., arXiv 2408.06195): rollouts to the end, UCT with c = 2.",
}

# The settings of the sources, by name.
VARIANTS: Mapping[str, MCTS] = {
    "rap": MCTS(
        simulations=10,
        leaves=1,
        rollout=None,
        rollout_width=4,
        reward="mean",
        backup="max",
        registered_as="rap",
    ),
    "rstar": MCTS(
        exploration=2.0,
        first_play=math.inf,
        width=3,
        simulations=15,
        leaves=1,
        rollout=None,
        rollout_width=3,
        registered_as="rstar",
    ),
    "rest-mcts": MCTS(
        exploration=0.99,  # 0.7 sqrt 2, the source's root of 2 ln N / n in this one's formula
        first_play=1.0,
        width=3,
        simulations=100,
        leaves=1,
        rollout=3,
        reward="max",
        rollout_weight=0.5,
        stop_value=0.9,
        registered_as="rest-mcts",
    ),
}
