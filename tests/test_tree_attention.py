"""Tree attention in two launches: its work items, and its kernel interpreted and compiled."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from support.tree_standin import keys_read
from test_graphs import Tree
from test_invariant_triton import run_check
from torch import Tensor

from arbor import Solver
from arbor.errors import UsageError
from arbor.kernels.attention import tree_work as work_module
from arbor.kernels.attention import triton_tree
from arbor.kernels.attention.base import AttentionShape, CascadeLayout, CascadeLevel
from arbor.kernels.attention.fixed import Bucket, bucket_of
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.kernels.attention.tree_work import (
    PROGRAMS,
    STEP_KEYS,
    most_work,
    tree_work,
    wide_tile,
)
from arbor.kernels.attention.triton_tree import FixedTree, TritonTree
from arbor.model.plan import Piece, Segment, plan_forward, usual_levels

LLAMA = AttentionShape(32, 8, 128, 128, scaling=128**-0.5)
TRASH = 300  # the slot of no token


@pytest.mark.slow
def test_it_agrees_with_the_reference_as_planned_and_in_a_buckets_buffers() -> None:
    run_check("tree", interpreted=True)


@pytest.mark.slow
def test_it_reads_8_bit_kv() -> None:
    run_check("tree_int8", interpreted=True)


@pytest.mark.slow
def test_8_bit_kv_is_written_as_on_a_cpu() -> None:
    run_check("stored_int8", interpreted=True)


@pytest.mark.slow
def test_it_compiles_for_hopper() -> None:
    run_check("tree_hopper", interpreted=False)


def ints(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32)


def layout_of(leaves: int, shared: int, own: int) -> CascadeLayout:
    """Leaves with a list of their own each, below one span and two halves of another."""
    half = leaves // 2
    slots = torch.arange(shared + shared // 2 * 2 + leaves * own, dtype=torch.int32)
    root = CascadeLevel(ints(0, leaves), ints(0, shared), slots[:shared], causal=False)
    ends = ints(0, shared // 2, shared // 2 * 2)
    middle = CascadeLevel(ints(0, half, leaves), ends, slots[shared:][: ends[2]], causal=False)
    rows = torch.arange(leaves + 1, dtype=torch.int32)
    last = CascadeLevel(rows, rows * own, slots[shared + ends[2] :], causal=True)
    return CascadeLayout(leaves, (root, middle, last))


@pytest.mark.parametrize(
    ("leaves", "shared", "own"), [(2, 8000, 3), (64, 1024, 100), (256, 900, 1)]
)
def test_every_row_meets_every_key_once_and_no_program_has_more_than_its_share(
    leaves: int, shared: int, own: int
) -> None:
    layout = layout_of(leaves, shared, own)

    work = tree_work(layout, LLAMA)

    met = np.zeros((leaves, len(work.slots)), int)
    items = work.items.numpy()
    for first_row, end_row, first_key, end_key, *_ in items:
        met[first_row:end_row, first_key:end_key] += 1
    wanted = np.zeros_like(met)
    before = 0
    for level in layout.levels:
        rows, keys = level.qo_indptr.numpy(), level.kv_indptr.numpy() + before
        for request in range(len(rows) - 1):
            wanted[rows[request] : rows[request + 1], keys[request] : keys[request + 1]] = 1
        before += len(level.kv_indices)
    assert (met == wanted).all()
    counts, keys = items[:, 1] - items[:, 0], items[:, 3] - items[:, 2]
    assert counts.max() * LLAMA.group <= wide_tile(LLAMA)
    assert keys.max() <= keys.sum() * LLAMA.num_kv_heads / PROGRAMS + STEP_KEYS
    assert (np.diff(keys) <= 0).all(), "the longest are taken first"
    assert sorted(work.places.tolist()) == list(range(counts.sum()))
    most = most_work(LLAMA, leaves, levels=3)
    assert len(items) <= most[0] and len(work.places) <= most[1]


def test_parts_of_a_row_lie_side_by_side() -> None:
    work = tree_work(layout_of(6, 300, 5), LLAMA)
    for first_row, end_row, *_, place, _ in work.items.tolist():
        for number in range(end_row - first_row):
            row = first_row + number
            assert work.ends[row] <= work.places[place + number] < work.ends[row + 1]


def test_keys_of_a_prompt_that_none_of_a_tiles_rows_reads_are_left_out() -> None:
    level = CascadeLevel(ints(0, 64), ints(0, 64), torch.arange(64).int(), causal=True)
    work = tree_work(CascadeLayout(64, (level,)), LLAMA)
    assert sorted(work.items[:, :4].tolist()) == [[n, n + 16, 0, n + 16] for n in (0, 16, 32, 48)]


def test_a_step_that_does_not_fit_a_buckets_buffers_is_told_so() -> None:
    fits, longer = layout_of(6, 64, 5), layout_of(6, 400_000, 5)
    fixed = TritonTree().fixed(LLAMA, Bucket(8, 3, 4), slots=1000)
    assert fixed is not None and bucket_of([fits]) == Bucket(8, 3, 4)
    assert TritonTree().bucket([fits]) == Bucket(8, 4, 0)
    assert fixed.prepare(fits, trash=1000) is not None
    assert fixed.prepare(longer, trash=1000) is None


@pytest.mark.parametrize("seed", range(5))
def test_a_deep_tree_has_a_bucket_with_room_for_it(seed: int) -> None:
    layout = Tree(rows=40, seed=seed, depths=14).step().layout(None)
    assert bucket_of([layout]) is None, "too deep for the cascade"
    bucket = TritonTree().bucket([layout])
    assert bucket is not None and bucket.levels == 16
    fixed = TritonTree().fixed(LLAMA, bucket, slots=TRASH)
    assert fixed is not None
    lists = fixed.prepare(layout, TRASH)
    assert lists is not None
    wanted = keys_read(tree_work(layout, LLAMA).lists, layout.rows)
    found = keys_read(lists, bucket.rows)
    assert [*map(sorted, found[: layout.rows])] == [*map(sorted, wanted)]
    assert found[layout.rows :] == [[TRASH]] * (bucket.rows - layout.rows)


def test_a_deeper_tree_than_any_bucket_is_read_in_as_many_levels_as_there_are() -> None:
    chain = tuple(
        Piece(place, np.arange(9) + 9 * place, np.arange(9) + 9 * place) for place in range(25)
    )
    ends = [9 * place for place in range(1, 26)]
    segments = [
        Segment(chain[: place + 1], [1], np.array([end]), *(np.array([300 + place]),) * 2, 1)
        for place, end in enumerate(ends)
    ]
    plain = plan_forward(segments).layout(None)
    assert len(plain.levels) > 16 and TritonTree().bucket([plain]) is None
    levels = usual_levels(torch.device("cpu"), TritonTree())
    layout = plan_forward(segments, levels=replace(levels, min_saved_reads=0)).layout(None)
    assert len(layout.levels) == 16 and TritonTree().bucket([layout]) is not None
    found = keys_read(tree_work(layout, LLAMA).lists, layout.rows)
    wanted = keys_read(tree_work(plain, LLAMA).lists, plain.rows)
    assert [*map(sorted, found)] == [*map(sorted, wanted)]


def test_a_bucket_whose_parts_would_take_too_much_memory_has_no_buffers() -> None:
    wide = AttentionShape(128, 128, 512, 512, scaling=0.1)
    assert TritonTree().fixed(wide, Bucket(256, 6, 64), slots=1000) is None


def test_a_model_in_float64_is_refused_with_the_dtype_that_works() -> None:
    checkpoint = Solver(dtype="float64", device="cpu").checkpoint
    checkpoint.backend = "triton"
    with pytest.raises(UsageError, match="no kernels for float64") as error:
        checkpoint.backend_name(checkpoint.read().info)
    assert "--dtype float32" in error.value.hint


# Trees that grow


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Rows of each layout whose items were planned; a row's list has room for three keys."""
    found: list[int] = []

    def counted(layout: CascadeLayout, *others: Any) -> Any:
        found.append(layout.rows)
        return tree_work(layout, *others)

    monkeypatch.setattr(triton_tree, "tree_work", counted)
    for module in (triton_tree, work_module):
        monkeypatch.setattr(module, "ROOM", 3)
    return found


def fixed_for(shape: AttentionShape, bucket: Bucket) -> FixedTree:
    found = TritonTree().fixed(shape, bucket, slots=TRASH)
    assert found is not None
    return found


def load(fixed: FixedTree, layout: CascadeLayout) -> None:
    lists = fixed.prepare(layout, TRASH)
    assert lists is not None
    fixed.plan(lists)
    right = RowwiseAttention().plan(layout, fixed._shape).keys
    found = keys_read(fixed._buffers, fixed._bucket.rows)
    assert [sorted(each) for each in found[: layout.rows]] == [sorted(k.tolist()) for k in right]
    assert found[layout.rows :] == [[TRASH]] * (fixed._bucket.rows - layout.rows)


def test_items_are_planned_once_for_a_tree_whose_rows_are_given_tokens(planned: list[int]) -> None:
    tree = Tree(5, seed=1)
    fixed = fixed_for(LLAMA, Bucket(8, 4, 8))

    for _ in range(12):
        load(fixed, tree.step().layout(None))

    assert planned == [8] * 3, "at first, and after every three tokens more"


@pytest.mark.parametrize(
    "change",
    [
        lambda tree: tree.step(),  # a step that these buffers were not told of
        lambda tree: setattr(tree, "shared", None),
        lambda tree: (tree.contexts.pop(), tree.tails.pop(), setattr(tree, "shared", None)),
        lambda tree: tree.tails[1].__setitem__(0, tree.free.pop()),  # a token that has moved
    ],
)
def test_items_are_planned_anew_for_any_other_change(
    planned: list[int], change: Callable[[Tree], Any]
) -> None:
    tree = Tree(5, seed=1)
    fixed = fixed_for(LLAMA, Bucket(8, 4, 8))
    load(fixed, tree.step().layout(None))

    change(tree)
    load(fixed, tree.step().layout(None))
    load(fixed, tree.step().layout(None))

    assert len(planned) == 2


def test_a_window_is_planned_at_every_step(planned: list[int]) -> None:
    tree = Tree(5, seed=1)
    fixed = fixed_for(AttentionShape(6, 2, 32, 32, scaling=0.3, window=4), Bucket(8, 1, 0))

    for _ in range(5):
        load(fixed, tree.step().layout(4))

    assert len(planned) == 5


def test_a_plan_that_was_not_carried_out_is_made_again(planned: list[int]) -> None:
    tree = Tree(5, seed=1)
    fixed = fixed_for(LLAMA, Bucket(8, 4, 8))
    load(fixed, tree.step().layout(None))

    assert fixed.prepare(tree.step().layout(None), TRASH) is not None  # and no `plan`
    load(fixed, tree.step().layout(None))

    assert len(planned) == 2
