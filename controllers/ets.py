"""ETS: REBASE in which an integer program chooses the paths that are worth their KV."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from arbor.tree import Node, ThoughtTree

from .rebase import Rebase, RebaseSearch, rebase_widths
from .search import check_settings

_WORDS = re.compile(r"\w+|[^\w\s]")
# The solver stops within 1e-6 of the optimum; scaled, within 1e-9 of the objective's units.
_SCALE = 1000.0
# Between equally good choices the thoughts of higher value win, then the earlier ones.
_TIE = 1e-6


@dataclass(frozen=True)
class ETS(Rebase):
    """Efficient tree search (Hooper et al., arXiv 2502.13575; SqueezeAILab/ETS,
    `select_softmax_costmodel`).

    At every level, the thoughts i that may grow and the blocks j above them are chosen by

        max   sum_i O_i x_i - lambda_c (sum_j c_j y_j + sum_i c_i x_i) + lambda_s / K sum_k z_k
        s.t.  y_j >= x_i for the blocks j above i,  z_k <= sum of x_i of cluster k,  sum_i x_i >= 1,
              x, y, z binary

    with O_i the share of the width that REBASE gives thought i, c the share of a block in the cost
    of all of them, and K clusters of similar thoughts. REBASE then shares the whole width among the
    chosen thoughts; see `Rebase`.

    Args:
        lambda_c: weight of the cost; 0 for REBASE.
        lambda_s: weight of the clusters covered; 0 for none. 1.5 is the released one for width 16.
        cost: ``tokens``, a block's length, so that the cost is the KV that the level holds; or
            ``blocks``, 1 each, as released.
        distance: average cosine distance at which two clusters stay apart.
        width, softmax_temperature, dedup, threshold, stop_value: as in `Rebase`.

    Differs from the released code: ``cost=tokens`` (in the released code a comment plans it), in
    which the prompt costs nothing, as every choice holds it; thoughts are similar by the cosine of
    their word counts (released: of sentence embeddings); HiGHS solves the program exactly
    (released: CBC); of equally good choices one is fixed by value and id. Differences of REBASE
    itself are those of `Rebase`.
    """

    lambda_c: float = 1.0
    lambda_s: float = 1.5
    cost: Literal["tokens", "blocks"] = "tokens"
    distance: float = 0.05

    def __post_init__(self) -> None:
        super().__post_init__()
        check_settings(self, {"lambda_c": 0, "lambda_s": 0, "distance": 0})

    def start(self, tree: ThoughtTree, max_depth: int) -> ETSSearch:
        return ETSSearch(self, tree, max_depth)


class ETSSearch(RebaseSearch[ETS]):
    """The levels of one problem."""

    def _kept(self, able: Sequence[Node], width: int) -> Sequence[Node]:
        """The thoughts that the integer program chooses."""
        if len(able) < 2:
            return able
        settings = self._settings
        widths = rebase_widths([node.value for node in able], width, settings.softmax_temperature)
        clusters = similar([node.text for node in able], settings.distance)
        picked = choose(able, widths, clusters, settings)
        return [node for node, pick in zip(able, picked, strict=True) if pick]


def choose(
    leaves: Sequence[Node], widths: Sequence[int], clusters: Sequence[int], settings: ETS
) -> list[bool]:
    """The solution x of the integer program.

    Args:
        leaves: thoughts that may grow, two or more, in order of id.
        widths: what REBASE gives each.
        clusters: of each, from 0.
        settings: the weights.
    """
    from scipy.optimize import Bounds, LinearConstraint, milp

    above = {node.id: node for leaf in leaves for node in leaf.path[:-1]}
    place = {number: len(leaves) + index for index, number in enumerate(sorted(above))}
    blocks = [*leaves, *(above[number] for number in sorted(above))]
    count = max(clusters) + 1
    covered = settings.lambda_s > 0 and count > 1

    objective = np.zeros(len(blocks) + (count if covered else 0))
    objective[: len(leaves)] = np.asarray(widths) / sum(widths)
    objective[: len(blocks)] -= settings.lambda_c * costs(blocks, settings)
    if covered:
        objective[len(blocks) :] = settings.lambda_s / count
    order = sorted(range(len(leaves)), key=lambda index: -leaves[index].value)  # stable
    for rank, index in enumerate(order):
        objective[index] += _TIE * (len(leaves) - rank) / len(leaves)

    rows: list[NDArray[np.float64]] = []  # each at least 0

    def add(*terms: tuple[int, float]) -> None:
        row = np.zeros(len(objective))
        for index, factor in terms:
            row[index] = factor
        rows.append(row)

    for index, leaf in enumerate(leaves):
        for node in leaf.path[:-1]:
            add((place[node.id], 1.0), (index, -1.0))
    if covered:
        for cluster in range(count):
            members = [index for index, each in enumerate(clusters) if each == cluster]
            add((len(blocks) + cluster, -1.0), *((index, 1.0) for index in members))
    least = np.zeros(len(rows) + 1)
    least[-1] = 1.0
    add(*((index, 1.0) for index in range(len(leaves))))
    found = milp(
        -_SCALE * objective,
        integrality=np.ones(len(objective)),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(np.array(rows), lb=least),
        options={"mip_rel_gap": 0.0},
    )
    assert found.x is not None, found.message  # every single thought is a solution
    return [value > 0.5 for value in found.x[: len(leaves)]]


def costs(blocks: Sequence[Node], settings: ETS) -> NDArray[np.float64]:
    """The share of each block in the cost of all of them; 0 for the prompt where tokens count."""
    if settings.cost == "blocks":
        return np.full(len(blocks), 1 / len(blocks))
    tokens = [0 if node.parent is None else len(node.tokens) for node in blocks]
    return np.array(tokens, np.float64) / max(1, sum(tokens))


def similar(texts: Sequence[str], distance: float) -> list[int]:
    """The cluster of each text, from 0 in order of appearance: average linkage by word counts.

    Args:
        texts: two or more.
        distance: cosine distance at which clusters stay apart.
    """
    from scipy.cluster.hierarchy import fcluster, linkage

    words = [_WORDS.findall(text.lower()) or [""] for text in texts]
    column = {word: 0 for each in words for word in each}
    column = {word: index for index, word in enumerate(column)}
    counts = np.zeros((len(texts), len(column)))
    for row, each in enumerate(words):
        for word in each:
            counts[row, column[word]] += 1
    labels = fcluster(linkage(counts, "average", metric="cosine"), distance, "distance")
    number: dict[int, int] = {}
    return [number.setdefault(int(label), len(number)) for label in labels]
