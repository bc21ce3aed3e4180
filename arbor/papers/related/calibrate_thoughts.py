"""The types of thoughts of ThinKV: the sparsities between the modes of a model's segments."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from arbor.errors import UsageError
from arbor.papers.related.thinkv import layer_sparsity
from arbor.retention.base import Bools, Floats, Ints
from arbor.retention.scorers import Recency
from arbor.retention.token_kv import Observation
from arbor.run.solution import Solution
from arbor.solver import Solver
from arbor.tasks.base import Problem

MODES = 3  # execution, reasoning and transition
MOST_LAYERS = 4  # that are observed, as in the paper
SMALL = 0.05  # of the highest mode's density: a lower maximum is a few segments apart, and no mode
_POINTS = 2001  # of the grid on [0, 1]


@dataclass(frozen=True)
class EveryLayer(Recency):
    """Has the keys and the last queries of all layers kept.

    Attributes:
        window: queries of a path; of a longer one the last are measured.
    """

    window: int = 1024

    @property
    def observation(self) -> Observation:
        return Observation(keys=True, window=self.window, every=1)


@dataclass(frozen=True, slots=True)
class ThoughtTypes:
    """What a model's segments say about types.

    Attributes:
        valleys: the two sparsities between the types; none: no layer has three modes.
        layers: whose sparsity is compared with them.
        modes: of the density in each layer of the model.
        narrow_modes: likewise with kernels of half the width, which show how far the number of
            modes is the data's.
        by_position: median over the layers of the squared correlation of a segment's sparsity with
            the logarithm of its first position.
        problems, segments: numbers used.
        range: the 5th and the 95th percentile of the sparsities, all layers together.
    """

    valleys: tuple[float, ...]
    layers: tuple[int, ...]
    modes: tuple[int, ...]
    narrow_modes: tuple[int, ...]
    by_position: float
    problems: int
    segments: int
    range: tuple[float, float]

    @property
    def settings(self) -> str:
        """The policy with these types, as ``--policy`` takes it."""
        if not self.valleys:
            return "thinkv"
        low, high = self.valleys
        return f"thinkv,valleys={low:g},{high:g},layers={','.join(map(str, self.layers))}"


def calibrate_thoughts(
    solver: Solver, problems: Iterable[Problem], segment: int = 128
) -> ThoughtTypes:
    """Solve problems at full retention and find the types of their segments.

    Args:
        solver: a full budget, one path at a time, and a policy whose scorer is `EveryLayer`.
        problems: of a training split.
        segment: most tokens of one, as `ThinKV.segment`.

    Raises:
        UsageError: no path has a thought.
    """
    assert isinstance(solver.policy.scorer, EveryLayer), "the solver's policy keeps no queries"
    found = [path_segments(solver, solver.solve(each), segment) for each in problems]
    if not sum(len(starts) for _, starts in found):
        raise UsageError(
            "setting-range",
            f"none of {len(found)} solved problems has a thought.",
            "Give more problems, or longer ones.",
        )
    sparsity, starts = (np.concatenate(each, axis=-1) for each in zip(*found, strict=True))
    return types_of(sparsity, starts, len(found))


def path_segments(solver: Solver, solution: Solution, segment: int) -> tuple[Floats, Ints]:
    """The sparsities of a solution's segments, float64 [layers, S], and their first positions,
    int64 [S]; the prompt is none.

    Args:
        solver: has just found the solution.
        solution: its last one.
        segment: most tokens of one.
    """
    engine = solver.engine
    path = [engine.tree[node_id] for node_id in solution.path]
    (sequence,) = engine.residency.view.offered(path[-1:], where="anywhere").tokens.kv.sequences
    measured = layer_sparsity(sequence)
    columns, starts = [], []
    begin = len(path[0].tokens)
    for node in path[1:]:
        end = begin + len(node.tokens)
        for start in range(begin, end, segment):
            mine = (sequence.asked >= start) & (sequence.asked < min(end, start + segment))
            if mine.any():
                columns.append(measured[:, mine].mean(1))
                starts.append(start)
        begin = end
    return np.array(columns).reshape(-1, len(measured)).T, np.array(starts, np.int64)


def types_of(sparsity: Floats, starts: Ints, problems: int) -> ThoughtTypes:
    """The types of segments by kernel density estimation.

    Source: the calibration of ThinKV (arXiv 2510.01290, section 4.1), read from summaries: of each
    layer the density of the sparsities, its modes, and the minima between them; layers with three
    modes are observed, and their minima averaged. Differs: the density is that of segments, which
    are what is typed, of all texts together. Of more than four such layers those count whose minima
    are deepest, each compared with the lower of the two modes beside it.

    Args:
        sparsity: float64 [layers, S], S >= 1.
        starts: int64 [S], first positions, >= 1.
        problems: whose they are.
    """
    splits = [modes_of(layer) for layer in sparsity]
    clear = [at for at, (modes, _, _) in enumerate(splits) if len(modes) == MODES]
    clear.sort(key=lambda at: (splits[at][2], at))
    layers = sorted(clear[:MOST_LAYERS])
    valleys = np.mean([splits[at][1] for at in layers], axis=0) if layers else np.zeros(0)
    low, high = np.percentile(sparsity, [5, 95])
    return ThoughtTypes(
        valleys=tuple(round(float(each), 4) for each in valleys),
        layers=tuple(layers),
        modes=tuple(len(modes) for modes, _, _ in splits),
        narrow_modes=tuple(len(modes_of(layer, 0.5)[0]) for layer in sparsity),
        by_position=float(np.median([_explained(layer, np.log(starts)) for layer in sparsity])),
        problems=problems,
        segments=sparsity.shape[1],
        range=(float(low), float(high)),
    )


def modes_of(values: Floats, narrower: float = 1.0) -> tuple[Floats, Floats, float]:
    """The modes of numbers in [0, 1], by a density with Gaussian kernels and Scott's width.

    Args:
        values: float64 [S], S >= 1.
        narrower: factor of that width.

    Returns:
        the modes, increasing; the lowest place between each two; and the density there, at most,
        as a part of that of the lower mode beside it (0 with one mode).

    Example:
        >>> modes, valleys, _ = modes_of(np.repeat([0.2, 0.6, 0.9], 20))
        >>> modes.round(1).tolist(), len(valleys)
        ([0.2, 0.6, 0.9], 2)
    """
    grid = np.linspace(0, 1, _POINTS)
    width = narrower * values.std(ddof=1) * len(values) ** -0.2 if len(values) > 1 else 0.0
    if width < grid[1]:
        return values.mean(keepdims=True), np.zeros(0), 0.0
    density = np.exp(-0.5 * ((grid[:, None] - values) / width) ** 2).sum(1)
    tops = np.flatnonzero(_rises(density) & _rises(density[::-1])[::-1])
    tops = tops[density[tops] >= SMALL * density.max()]
    between = [int(low) + int(density[low : high + 1].argmin()) for low, high in pairwise(tops)]
    depth = [
        density[at] / min(density[low], density[high])
        for at, (low, high) in zip(between, pairwise(tops), strict=True)
    ]
    return grid[tops], grid[between], float(max(depth, default=0.0))


def _rises(density: Floats) -> Bools:
    """Where a number is larger than the one before, or the first."""
    rises: Bools = np.concatenate([[True], density[1:] > density[:-1]])
    return rises


def _explained(values: Floats, by: Floats) -> float:
    """The squared correlation of numbers with others; 0 where either has no spread."""
    spread = values.std() * by.std()
    if not spread:
        return 0.0
    return float((((values - values.mean()) * (by - by.mean())).mean() / spread) ** 2)
