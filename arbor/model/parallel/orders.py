"""Orders: what the first of several ranks tells the others to compute."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from arbor.kernels.attention.base import CascadeLayout, CascadeLevel
from arbor.model.plan import ForwardPlan

Levels = tuple[tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32], bool], ...]


@dataclass(frozen=True, slots=True)
class PoolPlace:
    """A pool of KV; each rank has one of the same slots, for its own heads.

    Attributes:
        number: of the pool.
        slots: it has now.
        dtype: name of its dtype.
        gone: numbers of pools that are no longer used.
    """

    number: int
    slots: int
    dtype: str
    gone: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class ForwardOrder:
    """Run a forward.

    Attributes:
        pool: where KV is read and written.
        columns: of the plan: ids, positions, write, logit rows, and rows that run again.
        layouts: of the plan, by window.
        last: layer to run.
        hidden: layers whose outputs are returned.
        mass: layers whose attention is observed.
        queries: layer -> rows whose queries are returned.
    """

    pool: PoolPlace
    columns: tuple[NDArray[Any], ...]
    layouts: Mapping[int | None, tuple[int, Levels]]
    last: int
    hidden: tuple[int, ...] = ()
    mass: tuple[int, ...] = ()
    queries: Mapping[int, NDArray[np.int64]] | None = None

    @property
    def plan(self) -> ForwardPlan:
        """The batch, without its segments."""
        ids, positions, write, logit_rows, again = map(torch.from_numpy, self.columns)
        unknown: Any = None
        layouts = {
            window: CascadeLayout(
                rows,
                tuple(
                    CascadeLevel(
                        torch.from_numpy(rows_of),
                        torch.from_numpy(keys_of),
                        torch.from_numpy(keys),
                        causal,
                    )
                    for rows_of, keys_of, keys, causal in levels
                ),
            )
            for window, (rows, levels) in self.layouts.items()
        }
        return ForwardPlan(
            rows=len(ids),
            ids=ids,
            positions=positions,
            write=write,
            logit_rows=logit_rows,
            again=again,
            table=unknown,
            shared=unknown,
            reads=unknown,
            unique_reads=unknown,
            layouts=layouts,
        )


@dataclass(frozen=True, slots=True)
class ReadOrder:
    """Read the keys or values of a layer.

    Attributes:
        pool: of which.
        layer: of which.
        values: values, or else keys.
        slots: int64 [n].
    """

    pool: PoolPlace
    layer: int
    values: bool
    slots: NDArray[np.int64]


def columns_of(plan: ForwardPlan) -> tuple[NDArray[Any], ...]:
    """The columns of a plan, see `ForwardOrder`."""
    columns = (plan.ids, plan.positions, plan.write, plan.logit_rows, plan.again)
    return tuple(each.numpy() for each in columns)


def layouts_of(
    plan: ForwardPlan, windows: Sequence[int | None]
) -> dict[int | None, tuple[int, Levels]]:
    """The layouts of a plan, see `ForwardOrder`."""
    found = {}
    for window in windows:
        layout = plan.layout(window)
        levels = tuple(
            (
                each.qo_indptr.numpy(),
                each.kv_indptr.numpy(),
                each.kv_indices.numpy(),
                each.causal,
            )
            for each in layout.levels
        )
        found[window] = layout.rows, levels
    return found
