"""How many tokens each KV head keeps: AdaKV's and PyramidKV's rules against plain loops."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from arbor.heads.selection import ranked_means
from arbor.heads.sets import moved_cells
from arbor.kernels.native import native_library
from arbor.kernels.native_heads import held_by_head
from arbor.retention.head_budgets import (
    Adaptive,
    Cells,
    HeadBudgets,
    Pyramid,
    moved_out,
    vacated,
)

needs_library = pytest.mark.skipif(native_library() is None, reason="no native library")


@dataclass(frozen=True)
class Offer:
    """Cells of some blocks; see `Cells`."""

    scores: NDArray[np.float64]
    holder: NDArray[np.int64]
    layer: NDArray[np.int64]
    protected: NDArray[np.bool_]
    sizes: NDArray[np.int64]
    keep: NDArray[np.int64]


@st.composite
def offers(draw: st.DrawFn, across_layers: bool = False) -> Offer:
    """Blocks in which heads hold each other's cells, within a layer or across them."""
    layers, heads = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    sizes = np.array(draw(st.lists(st.integers(2, 8), min_size=1, max_size=4)))
    keep = np.array([draw(st.integers(1, int(size) - 1)) for size in sizes])
    total, count = layers * heads, int(sizes.sum())
    layer = np.repeat(np.arange(layers), heads)
    values = draw(st.sampled_from([2, 1000]))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    protected = rng.random(count) < draw(st.sampled_from([0.0, 0.2, 0.9]))
    holder = np.tile(np.arange(total)[:, None], count)
    for slot in np.flatnonzero(rng.random(count) < 0.7):
        if across_layers:
            holder[:, slot] = rng.integers(0, total, total)
        else:
            holder[:, slot] = layer * heads + rng.integers(0, heads, total)
    scores = rng.integers(0, values, (total, count)).astype(np.float64)
    return Offer(scores, holder, layer, protected, sizes, keep)


def cells_of(offer: Offer) -> list[list[tuple[int, int]]]:
    """(cell, slot) of each block."""
    ends = np.cumsum(offer.sizes)
    return [
        [(cell, slot) for cell in range(len(offer.layer)) for slot in range(end - size, end)]
        for end, size in zip(ends.tolist(), offer.sizes.tolist(), strict=True)
    ]


def best_first(offer: Offer, cells: list[tuple[int, int]], tight: bool) -> list[tuple[int, int]]:
    """Protected ones first (where they do not fit: they alone), then by score, slot and cell."""
    return sorted(
        cells,
        key=lambda at: (
            not offer.protected[at[1]],
            -offer.scores[at] if tight == offer.protected[at[1]] else 0.0,
            -at[1],
            -at[0],
        ),
    )


def is_tight(offer: Offer, cells: list[tuple[int, int]], keep: int) -> bool:
    return len({slot for _, slot in cells if offer.protected[slot]}) > keep


def stays_of(budgets: HeadBudgets, offer: Offer) -> NDArray[np.bool_]:
    return kept_of(budgets, cells_in(offer))


def cells_in(offer: Offer) -> Cells:
    return Cells(offer.scores, offer.holder, offer.layer, offer.protected, offer.sizes, offer.keep)


def kept_of(budgets: HeadBudgets, cells: Cells) -> NDArray[np.bool_]:
    return cells.stays(budgets.counts(cells), budgets.competes)


@given(offers(), st.sampled_from([0.0, 0.2, 0.5, 1.0]))
def test_heads_of_a_layer_compete_for_its_cells(offer: Offer, safeguard: float) -> None:
    stays = stays_of(Adaptive(safeguard), offer)
    for cells, keep in zip(cells_of(offer), offer.keep.tolist(), strict=True):
        tight = is_tight(offer, cells, keep)
        for layer in set(offer.layer.tolist()):
            mine = [at for at in cells if offer.layer[at[0]] == layer]
            heads = [head for head, its in enumerate(offer.layer.tolist()) if its == layer]
            guarded = [at for at in mine if offer.protected[at[1]]]
            safe = []
            for head in heads:
                held = best_first(offer, [at for at in mine if offer.holder[at] == head], tight)
                safe += held[: math.ceil(safeguard * keep - 1e-9)]
            if tight:  # of protected tokens some leave, and all others
                safe = [at for at in safe if at in guarded]
            first = [] if tight else guarded
            safe = [at for at in best_first(offer, safe, tight) if at not in first]
            rest = [at for at in best_first(offer, mine, tight) if at not in first + safe]
            wanted = (first + safe + rest)[: keep * len(heads)]
            assert {at for at in mine if stays[at]} == set(wanted)


@given(offers(across_layers=True), st.sampled_from([1.0, 2.0, 20.0]))
def test_lower_layers_keep_more(offer: Offer, beta: float) -> None:
    stays = stays_of(Pyramid(beta), offer)
    total = len(offer.layer)
    for cells, keep in zip(cells_of(offer), offer.keep.tolist(), strict=True):
        tight = is_tight(offer, cells, keep)
        kept = [[at for at in cells if stays[at] and offer.holder[at] == h] for h in range(total)]
        held = [[at for at in cells if offer.holder[at] == h] for h in range(total)]
        assert sum(map(len, kept)) == keep * total
        for mine, all_of_it in zip(kept, held, strict=True):
            assert set(mine) == set(best_first(offer, all_of_it, tight)[: len(mine)])
        if tight:
            continue
        # a head with tokens left keeps, besides protected ones, as many as any of a higher layer
        free = [sum(not offer.protected[slot] for _, slot in mine) for mine in kept]
        for low in range(total):
            for high in range(total):
                if offer.layer[low] < offer.layer[high] and len(kept[low]) < len(held[low]):
                    assert free[low] >= free[high] - 1  # but for rounding


def test_budgets_fall_linearly_from_the_first_layer_to_the_last() -> None:
    layers, count, keep = 5, 100, 20
    layer = np.arange(layers)
    cells = Cells(
        np.random.default_rng(0).random((layers, count)),
        None,
        layer,
        np.zeros(count, np.bool_),
        np.array([count]),
        np.array([keep]),
    )
    # 2 m - m / 20 = 39, m / 20 = 1; the published rule
    assert kept_of(Pyramid(20.0), cells).sum(1).tolist() == [39, 30, 20, 10, 1]
    assert kept_of(Pyramid(1.0), cells).sum(1).tolist() == [20] * layers


@pytest.mark.parametrize("budgets", [Adaptive(), Pyramid()], ids=["adaptive", "pyramid"])
@given(data=st.data())
def test_what_stays_moves_to_later_slots_of_its_block(
    budgets: HeadBudgets, data: st.DataObject
) -> None:
    offer = data.draw(offers(across_layers=isinstance(budgets, Pyramid)))
    stays = stays_of(budgets, offer)
    pools = budgets.pools(offer.layer)
    cell, source, into, target, leaving = vacated(stays, pools)
    block = np.repeat(np.arange(len(offer.sizes)), offer.sizes)

    lost = np.bincount(block[leaving], minlength=len(offer.sizes))
    assert lost.tolist() == (offer.sizes - offer.keep).tolist()
    assert (block[source] == block[target]).all() and (source < target).all()
    each = len(offer.layer) // pools
    assert (cell // each == into // each).all()
    assert leaving[source].all() and not leaving[target].any()
    named = np.where(stays, np.arange(stays.size).reshape(stays.shape), -1)
    after = named.copy()
    after[into, target] = named[cell, source]
    assert sorted(after[:, ~leaving].ravel()) == sorted(named[stays])
    # of slots whose tokens stay in every head none leaves
    guarded = np.bincount(block[offer.protected], minlength=len(offer.sizes))
    roomy = (guarded <= offer.keep)[block]
    assert not (leaving & offer.protected & roomy).any()


@given(offers())
def test_one_more_slot_is_worth_the_next_best_cells(offer: Offer) -> None:
    means = offer.scores.mean(0)
    found = ranked_means(offer.scores, means, offer.sizes, int(offer.layer[-1]) + 1)
    for end, size in zip(np.cumsum(offer.sizes), offer.sizes, strict=True):
        mine = slice(end - size, end)
        layers = []
        for layer in set(offer.layer.tolist()):
            ordered = np.sort(offer.scores[offer.layer == layer][:, mine].ravel())
            layers.append(ordered.reshape(size, -1).mean(1))
        assert sorted(found[mine]) == pytest.approx(np.mean(layers, 0).tolist())
        by_mean = np.lexsort((np.arange(size), means[mine]))
        assert (np.diff(found[mine][by_mean]) >= 0).all()


# The native kernels


def same_moves(budgets: HeadBudgets, cells: Cells) -> bool:
    """Whether the kernel moves what numpy does."""
    moved, wanted = moved_out(budgets, cells, moved_cells), moved_out(budgets, cells)
    return all(np.array_equal(mine, its) for mine, its in zip(moved, wanted, strict=True))


@needs_library
@pytest.mark.parametrize("budgets", [Adaptive(), Pyramid()], ids=["adaptive", "pyramid"])
@pytest.mark.parametrize("levels", [3, 1 << 20])
def test_the_native_kernel_moves_what_numpy_moves_of_long_blocks(
    budgets: HeadBudgets, levels: int
) -> None:
    """Event after event, each over the cells that the one before has left."""
    layers, heads, count = 3, 4, 1500
    layer = np.repeat(np.arange(layers), heads)
    sizes = np.array([700, 1, 63, 736])
    rng = np.random.default_rng(5)
    scores = rng.integers(-levels, levels, (len(layer), count)).astype(np.float32)
    holder = np.tile(np.arange(len(layer), dtype=np.int16)[:, None], count)
    protected = np.zeros(count, np.bool_)
    protected[[0, 1, 2, 3, *range(-8, 0)]] = True
    for part in (0.9, 0.6, 0.5, 0.02):
        keep = np.maximum(1, (part * sizes).astype(np.int64))
        cells = Cells(scores, holder, layer, protected, sizes, keep, held_by_head)
        assert np.array_equal(cells.held, dataclasses.replace(cells, counter=None).held)
        assert same_moves(budgets, cells)
        cell, source, into, target, leaving = moved_out(budgets, cells, moved_cells)
        scores[into, target] = scores[cell, source]
        holder[into, target] = holder[cell, source]
        scores, holder = scores[:, ~leaving], holder[:, ~leaving]
        protected, sizes = protected[~leaving], keep
