"""Dynamic Parallel Tree Search: several paths at a time, some exploited and some explored."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

from arbor.tree import Node, NodeState, ThoughtTree, paths_of

from .base import Expansion
from .search import (
    Rounds,
    blocks_that_grow,
    check_at_once,
    check_settings,
    check_shares,
    finite,
    give_up,
    mean,
    repeats,
)


@dataclass(frozen=True)
class DPTS:
    """Dynamic Parallel Tree Search (Ding et al., arXiv 2502.16235, ACL 2025).

        select    of all leaves at any depth, those with the highest
                  S = Q / N + c sqrt(1 + N_parent) r / (1 + N) take the free slots; as long as fewer
                  than p of the slots exploit, those with the highest r exploit, the rest explore
        expand    every leaf in a slot grows `width` thoughts
        transit   a leaf that exploits hands its slot to its best child b if r_b > theta_es, else
                  the slot is free (early stop); one that explores hands it to b, which then
                  exploits, if r_b > theta_ds (deep seek)
        back up   a thought that ends a path adds its r to Q and 1 to N of its ancestors

    r is the verifier's value, theta_ds is lambda_ds times the mean r of the candidates (the leaves
    that may grow), theta_es is lambda_es times that mean, and the highest r of a candidate after
    t_star. Q begins with 0 and N with 1. The released code is yifu-ding/DPTS.

    With `continuous` each slot goes on by itself: when its leaf has grown, its thoughts are valued
    and it takes the next leaf, while the other slots are in the middle of theirs. Without it, all
    slots wait for the longest thought of the round.

    Time is counted in ticks: a round, and without rounds as many grown leaves as there are slots
    (the root alone is the first tick).

    Args:
        width: W, thoughts sampled of each leaf.
        parallel: P, slots: leaves that grow at a time.
        exploit: p, share of the slots that exploit, rounded down.
        exploration: c.
        lambda_es, lambda_ds: factors of the two thresholds.
        t_star: when theta_es becomes the highest r.
        t_unit: t_star counts ``ticks`` (the paper) or ``finished`` paths.
        mean: of r over ``candidates`` (the paper) or over all children that were ``kept`` in a slot
            (the released code), 0 before the first.
        hard_split: deep seek never makes more than p of the slots exploit; otherwise it may for
            some time (the paper).
        keep_stopped: the thoughts of a path that stopped early stay candidates; otherwise they are
            given up.
        adaptive: P is what the budget has room for, at most `parallel` (the paper's adaptive
            width). The tree then depends on the budget; without it, leaves without room wait, and
            a smaller budget costs time only.
        dominance: the search ends when t_star paths have finished and every leaf in a slot is
            worth less than the best of them (what the released code does with t_star).
        dedup: of siblings with the same thought only the first counts.
        threshold, stop_value: what grows at all, and when the search ends; see `Stops`.
        max_visited: leaves that grow, the root included. The search has no bound of its own (the
            paper's is 60 or 120 seconds).
        continuous: see above.

    Differs from the paper and the released code:

    - A thought is what ends at the task's boundary, and its siblings are samples, each by itself
      (released: chunks of 100 tokens, four beams of one beam search).
    - All thoughts that end a path are finished at once (released: only the best child; the others
      take a slot first). A slot whose best child ends a path is free.
    - After t_star a path goes on if its best child ties with the best candidate; it is one itself,
      so a strict comparison would stop every path.
    - A leaf in a slot is not selected again and keeps its role (released: one exploiting leaf in
      seven became an exploring one, and every fifth iteration had a free slot). The root exploits.
    - lambda_ds is used (released: lambda_es in its place), and t_star switches theta_es (released:
      it ends the search, see `dominance`).
    - The width depends on the budget only with `adaptive`, and then on the tokens of KV
      there is room for (released: the memory in use at the moment, at most 4).
    - `best` returns finished paths by the value of their last thought (released: five votes).
    - `dedup`, `threshold`, `stop_value` and `max_visited` are new (False, -1, None and a large
      number for the paper's).
    """

    width: int = 4
    parallel: int = 4
    exploit: float = 0.5
    exploration: float = 0.5**0.5
    lambda_es: float = 0.8
    lambda_ds: float = 0.8
    t_star: int = 5
    t_unit: Literal["ticks", "finished"] = "ticks"
    mean: Literal["candidates", "kept"] = "candidates"
    hard_split: bool = False
    keep_stopped: bool = True
    adaptive: bool = False
    dominance: bool = False
    dedup: bool = True
    threshold: float = 0.0
    stop_value: float | None = 1.0
    max_visited: int = 40
    continuous: bool = True

    def __post_init__(self) -> None:
        check_settings(
            self,
            {"width": 1, "parallel": 1, "max_visited": 1}
            | dict.fromkeys(("t_star", "exploration", "lambda_es", "lambda_ds"), 0),
        )
        check_at_once(self, "width")
        check_shares(self, "exploit")

    def exploiting(self, slots: int) -> int:
        """How many of so many slots exploit at most; the share is the decimal in its text."""
        return math.floor(Fraction(repr(float(self.exploit))) * slots)

    def start(self, tree: ThoughtTree, max_depth: int) -> DPTSSearch:
        return DPTSSearch(self, tree, max_depth)

    def max_blocks(self, max_depth: int) -> int:
        """width min(max_visited, 1 + width + ... + width^(max_depth - 1))."""
        return self.width * blocks_that_grow(self.width, max_depth, most=self.max_visited)


class DPTSSearch(Rounds[DPTS]):
    """The slots and candidates of one problem.

    Attributes:
        continuous: see `Continuous`.
        early_stops, deep_seeks: number of either so far.
    """

    def __init__(self, settings: DPTS, tree: ThoughtTree, max_depth: int) -> None:
        super().__init__(settings, tree, max_depth)
        self.continuous = settings.continuous
        self.early_stops = self.deep_seeks = 0
        self._candidates: dict[int, Node] = {}  # by id
        self._growing: dict[int, bool] = {}  # leaves in slots, by id, and whether each exploits
        self._kept = [tree.root]  # leaves that a slot was handed to and that do not grow yet
        self._visited = 0  # leaves that grew or grow
        self._grown = 0  # leaves that have grown
        self._finished = 0
        self._most = -math.inf  # the highest value of a finished path
        self._kept_values: list[float] = []
        self._gain: dict[int, float] = {}  # Q, by id; 0 where it is missing
        self._visits: dict[int, int] = {}  # N, by id; 1 where it is missing
        self._over = False

    def score(self, node: Node) -> float:
        """S of a leaf."""
        visits, parent = self._visits.get(node.id, 1), node.parent
        above = 1 if parent is None else self._visits.get(parent.id, 1)
        bonus = math.sqrt(1 + above) * node.value / (1 + visits)
        return self._gain.get(node.id, 0.0) / visits + self._settings.exploration * bonus

    def scores(self) -> dict[int, float]:
        """S of the leaves that grow or may, and of the blocks that lead to them."""
        growing = [self._tree[leaf] for leaf in self._growing]
        leaves = (*self._candidates.values(), *self._kept, *growing)
        blocks = [node for node in paths_of(leaves) if node.parent is not None]
        return finite({node.id: self.score(node) for node in blocks})

    # What grows

    def ask(self, room: int) -> list[Expansion]:
        if not self.continuous and self._growing:
            return [each for each in self._next if each.leaf.id in self._growing]
        settings = self._settings
        slots = settings.parallel
        if settings.adaptive:
            slots = max(1, min(slots, room // settings.width))
        free = min(slots - len(self._growing), settings.max_visited - self._visited)
        if self._over or free <= 0:
            return []
        kept = sorted(self._kept, key=lambda node: (-node.value, node.id))
        waiting = {node.id: node for node in kept[free:]}
        pool = sorted((self._candidates | waiting).values(), key=self._rank)
        kept = kept[:free]
        picks = pool[: free - len(kept)]
        if self._is_dominated([*kept, *picks]):
            self._over = True
            return []
        self._candidates |= waiting
        self._kept = []
        exploiting = sum(self._growing.values()) + len(kept)
        more = max(0, settings.exploiting(slots) - exploiting)
        best = sorted(picks, key=lambda node: (-node.value, node.id))[:more]
        self._growing |= {node.id: True for node in kept}
        self._growing |= {node.id: node in best for node in picks}
        for node in picks:
            del self._candidates[node.id]
        self._visited += len(kept) + len(picks)
        self._next = [Expansion(node, settings.width) for node in (*kept, *picks)]
        return list(self._next)

    def _rank(self, node: Node) -> tuple[float, int]:
        return -self.score(node), node.id

    def _is_dominated(self, chosen: Sequence[Node]) -> bool:
        settings = self._settings
        leaves = [*chosen, *(self._tree[node] for node in self._growing)]
        return (
            settings.dominance
            and self._finished >= settings.t_star
            and max((leaf.value for leaf in leaves), default=math.inf) < self._most
        )

    def prospects(self) -> dict[int, float]:
        """Candidates by their score: half for those that would take the slots now, half of that for
        as many after them, and so on."""
        if self._over or self._visited >= self._settings.max_visited:
            return {}
        ranked = sorted(self._candidates.values(), key=self._rank)
        slots = self._settings.parallel
        likely = {node.id: 0.5 ** (1 + place // slots) for place, node in enumerate(ranked)}
        return likely | {node.id: 1.0 for node in self._kept if node.parent is not None}

    # What has grown

    def tell(self, children: Sequence[Node]) -> None:
        families: dict[int, list[Node]] = {}
        for child in sorted(children, key=lambda child: child.id):
            assert child.parent is not None
            families.setdefault(child.parent.id, []).append(child)
        tick = 1 + math.ceil(self._grown / self._settings.parallel)
        waits = self.continuous or families  # for a leaf in progress, or left out by a limit
        ended = [leaf for leaf in self._growing if leaf in families or not waits]
        roles = {leaf: self._growing.pop(leaf) for leaf in ended}
        self._grown += len(ended)
        for leaf in ended:
            self._take(families.get(leaf, []))
        stop = self._settings.stop_value
        if stop is not None and self._most >= stop:
            self._over = True
        else:
            self._transit(families, roles, tick)
            if self._visited >= self._settings.max_visited:  # nothing else grows any more
                give_up([*self._candidates.values(), *self._kept])
        give_up(self._tree[leaf] for leaf in ended)

    def _take(self, siblings: Sequence[Node]) -> None:
        """Finish the thoughts that end a path; the others are candidates."""
        repeated = repeats(siblings) if self._settings.dedup else [False] * len(siblings)
        for child, again in zip(siblings, repeated, strict=True):
            if child.state is NodeState.TERMINAL:
                if not again:
                    self._back_up(child)
            elif self._may_grow(child) and not again:
                self._candidates[child.id] = child
            else:
                give_up([child])

    def _back_up(self, leaf: Node) -> None:
        self._finished += 1
        self._most = max(self._most, leaf.value)
        for node in leaf.path:
            self._gain[node.id] = self._gain.get(node.id, 0.0) + leaf.value
            self._visits[node.id] = self._visits.get(node.id, 1) + 1

    def _transit(self, families: dict[int, list[Node]], roles: dict[int, bool], tick: int) -> None:
        """Hand slots on, by thresholds that are the same for all leaves of a `tell`.

        Args:
            families: children by leaf.
            roles: the leaves that have grown, and whether each exploited.
            tick: of the leaves.
        """
        settings = self._settings
        values = [node.value for node in self._candidates.values()]
        highest = max(values, default=0.0)
        base = values if settings.mean == "candidates" else self._kept_values
        average = mean(base)
        late = (tick if settings.t_unit == "ticks" else self._finished) > settings.t_star
        exploiting = settings.exploiting(settings.parallel)
        for leaf, exploits in roles.items():
            best = max(families.get(leaf, []), key=lambda n: (n.value, -n.id), default=None)
            if best is None or best.id not in self._candidates:  # it has ended, or is refuted
                continue
            if exploits:
                goes_on = (
                    best.value >= highest if late else best.value > settings.lambda_es * average
                )
                self.early_stops += not goes_on
            else:
                full = sum(self._growing.values()) + len(self._kept) >= exploiting
                goes_on = best.value > settings.lambda_ds * average
                goes_on = goes_on and not (settings.hard_split and full)
                self.deep_seeks += goes_on
            if goes_on:
                self._kept.append(self._candidates.pop(best.id))
                self._kept_values.append(best.value)
            elif exploits and not settings.keep_stopped:
                stopped = [node for node in families[leaf] if node.id in self._candidates]
                for node in stopped:
                    del self._candidates[node.id]
                give_up(stopped)
