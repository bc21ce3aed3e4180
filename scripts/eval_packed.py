"""What packed KV costs in answers, by bits and by the way in which it is quantised.

    python scripts/eval_packed.py chains --n 500 --csv docs/experiments/packed.csv
    python scripts/eval_packed.py game24 --n 500 --bits 8 --schemes once truncated

Before the rounds of a search between which it grew by 64 tokens or more (the interval of the paper)
all its KV goes to host memory, and comes back as it is needed. Nothing else is lossy: the budget
holds everything. Arms are paired with exact host memory, problem by problem: `chains` (greedy, one
path) and `game24` (`tot`, at most 300 tokens); `--task` and `--dataset` have other problems
searched in these ways.

Schemes: `once`, as arbor packs (K per channel of 32 tokens, V per 32 channels of a token, quantised
once); `requantised`, the same scales, but a record that is read is given up, so that its token is
quantised anew each time it leaves; `tensor`, one scale for K and one for V of each layer of 32
tokens, quantised once; `truncated`, symmetric with one scale per tensor, quantised anew each time,
and rounded towards zero, as a cast of numbers to integers does.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np
import torch
from experiment_table import ExperimentTable, add_options
from model_and_problems import add_model_and_problems, problems_of, settings_of, task_of, tree_of
from rounds import solved_columns
from torch import Tensor

from arbor import Solver
from arbor.controllers.chain import ChainSearch
from arbor.controllers.tot import BreadthFirst
from arbor.memory import stores
from arbor.memory.packed_store import PackedStore, Scales
from arbor.run.solution import Solution

AT_ONCE = 32
INTERVAL = 64  # tokens between two times at which everything leaves
SEARCHES: dict[str, tuple[type[Any], dict[str, Any], int | None]] = {
    "chains": (ChainSearch, {"controller": "chain", "sampling": {"temperature": 0.0}}, None),
    "game24": (BreadthFirst, {"controller": "tot"}, 300),
}


class Requantised(PackedStore):
    """What is read gives up its record."""

    keeps = False


class PerTensor(PackedStore):
    """One grid for K and one for V of each layer."""

    layers: int  # of the model

    def _scales(self, keys: Tensor, values: Tensor) -> tuple[Scales, Scales]:
        return (
            self._by_layer(keys, lambda x: x[:1]),
            self._by_layer(values.flatten(1), lambda x: x.reshape(values.shape)[..., :1]),
        )

    def _by_layer(self, x: Tensor, shaped: Callable[[Tensor], Tensor]) -> Scales:
        layers = x.reshape(len(x), self.layers, -1).transpose(0, 1)
        whole = Scales.of(layers.flatten(1), 1, self.bits)
        each = [
            part.unsqueeze(2).expand(layers.shape).transpose(0, 1).flatten(1)
            for part in (whole.low, whole.step)
        ]
        return Scales(*map(shaped, each))


class Truncated(PackedStore):
    """Whole multiples of the largest magnitude of K or V of a layer, divided by that of a code;
    quantised anew each time, towards zero. What it holds is not packed: only the numbers count."""

    keeps = False
    layers: int  # of the model

    def __init__(self, records: int, keys: int, numbers: int, dtype: Any, bits: int) -> None:
        super().__init__(records, keys, numbers, dtype, bits)
        self._rows = torch.empty(records, numbers, dtype=dtype)

    def _quantise(self, group: int, first: int, end: int) -> None:
        rows = self._waiting[: end - first]
        for columns in (slice(self._keys), slice(self._keys, None)):
            layers = rows[:, columns].reshape(end - first, self.layers, -1)
            scale = layers.abs().amax((0, 2), keepdim=True) / (2 ** (self.bits - 1) - 1)
            self._rows[first:end, columns] = ((layers / scale).trunc() * scale).flatten(1)
        self._packed[group] = True

    def _decoded(self, index: Tensor) -> Tensor:
        return self._rows[index]


SCHEMES: dict[str, type[PackedStore]] = {
    "once": PackedStore,
    "requantised": Requantised,
    "tensor": PerTensor,
    "truncated": Truncated,
}


@contextmanager
def managed(search: type[Any], solver: Solver) -> Iterator[None]:
    """Within, all KV of a tree leaves the device before rounds of its search."""
    ask = search.ask
    left = WeakKeyDictionary[Any, int]()  # length of the tree when its KV left, by search

    def ask_after(self: Any, room: int) -> Any:
        tokens = self._tree.tokens
        if tokens - left.setdefault(self, self._tree.root.end) < INTERVAL:
            return ask(self, room)
        left[self] = tokens
        state = solver.engine.state
        gone = {}
        for node in self._tree:
            here = np.flatnonzero(node.span.resident)
            if len(here):
                gone[node] = solver.engine.memory.evict(node, here)
        state.changed(gone)
        state.report_evicted(gone, "clock")
        return ask(self, room)

    with patch.object(search, "ask", ask_after):
        yield


def solved(args: argparse.Namespace, bits: int | None, scheme: str) -> list[Solution]:
    """The solutions of one arm."""
    search, settings, most = SEARCHES[args.search]
    with ExitStack() as stack:
        solver = Solver(
            **settings_of(args),
            mode="lossy",
            rehydrate="selective",
            host="200000tok",
            host_bits=bits,
            fetch="always",
            threads=1,
            **settings,
        )
        stack.enter_context(solver)
        packed = type(scheme, (SCHEMES[scheme],), {"layers": solver.describe().layers})
        stack.enter_context(patch.object(stores, "PackedStore", packed))
        stack.enter_context(managed(search, solver))
        problems = problems_of(args, solver.task, args.n)
        return solver.solve_batch(problems, concurrency=AT_ONCE, max_tokens=most, on_error="return")


def rows_of(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Share solved of each arm, and the paired difference to exact host memory.

    A search that fails, as where packed keys make the logits overflow, has not solved its problem.
    """
    exact: list[Solution] = []
    for arm in [None, *((scheme, each) for scheme in args.schemes for each in args.bits)]:
        scheme, bits = ("once", None) if arm is None else arm
        found = solved(args, bits, scheme)
        exact, n = exact or found, len(found)
        right = [bool(each.correct) for each in found]
        other = sum(tree_of(one) != tree_of(two) for one, two in zip(found, exact, strict=True))
        moved = [
            each.metrics.tokens_fetched / max(each.metrics.tokens_generated, 1) for each in found
        ]
        yield {
            "case": args.task,
            "scheme": "exact" if arm is None else arm[0],
            "bits": 32 if arm is None else arm[1],
            **solved_columns(right, [bool(each.correct) for each in exact]),
            "other_trees": round(100 * other / n, 2),
            "fetched_per_generated": round(float(np.mean(moved)), 2),
            "recomputed": sum(each.metrics.tokens_recomputed for each in found),
            "n": n,
            "n_of": "problems",
        }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("search", choices=list(SEARCHES), help="also the usual task")
    add_model_and_problems(parser, task=None)
    parser.add_argument("--n", type=int, default=500, help="problems")
    parser.add_argument("--bits", type=int, nargs="+", default=[8, 4, 2])
    parser.add_argument("--schemes", nargs="+", choices=list(SCHEMES), default=list(SCHEMES))
    add_options(parser)
    args = parser.parse_args()
    args.usual_task = args.search
    args.task = task_of(args)
    table = ExperimentTable(args)
    for row in rows_of(args):
        table.show(row)


if __name__ == "__main__":
    main()
