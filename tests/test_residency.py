"""Policies inside the engine: every one of them, reversible and irreversible, lossless and
lossy."""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import WINDOW, Words, build
from support.offers import AtMost
from support.policies import POLICIES
from support.slow_cases import every, only
from support.trees import (
    GREEDY,
    LENGTH,
    PROMPT,
    Lab,
    grown,
    own_logits,
    planted_again,
    relative_error,
)
from transformers import AutoModelForCausalLM

from arbor.engine.mode import Mode
from arbor.engine.operation import Growth
from arbor.engine.stop_rule import StopRule
from arbor.errors import BudgetInfeasible
from arbor.events import Allocated, Evicted, Rehydrated
from arbor.model.plan import Piece, Segment, plan_forward, visibility
from arbor.model.runner import ModelRunner
from arbor.retention.base import Blocks, Tokens
from arbor.retention.policy import Policy, Protect
from arbor.tasks.base import BlockLimits
from arbor.tree import ThoughtTree

WORKING = sorted(set(POLICIES) - {"full"})
LOSSLESS = [name for name in WORKING if not POLICIES[name].by_head]
FIRST = {"ams", "arborkv", "h2o", "lru", "reentry"}  # of each kind one; the others run later
BY_POLICY, BY_LOSSLESS_POLICY = (
    [pytest.param(name, marks=[] if name in FIRST else pytest.mark.slow) for name in names]
    for names in (WORKING, LOSSLESS)
)
REVERSIBLE = ("selective", "span")
LITTLE = Protect(sinks=4, recent=0, tail=0, floor=0)


def little(policy: str) -> Policy:
    """A policy that protects no more than the trees of these tests can spare."""
    return dataclasses.replace(POLICIES[policy], protect=LITTLE)


@pytest.fixture(scope="module")
def full() -> tuple[list[list[int]], torch.Tensor]:
    """Tokens and answers under full retention."""
    tree, answers = grown(Lab(build("llama")))
    return [node.tokens for node in tree], answers


@pytest.mark.parametrize("policy", every(3, BY_LOSSLESS_POLICY))
def test_what_a_policy_was_shown_is_gone_when_it_has_decided(policy: str) -> None:
    """Views of all tokens take megabytes: they must not wait for the garbage collector."""
    lab = Lab(build("llama"), policy=policy)
    gc.collect()  # what other tests left
    gc.disable()
    try:
        grown(lab, 32)
        left = [each for each in gc.get_objects() if type(each) in (Blocks, Tokens)]
    finally:
        gc.enable()

    assert any(isinstance(event, Allocated) for event in lab.events)
    assert not left


@pytest.mark.parametrize("rehydrate", every(3, REVERSIBLE))
@pytest.mark.parametrize("policy", BY_LOSSLESS_POLICY)
def test_lossless_gives_the_tree_of_full_retention_under_every_policy(
    policy: str, rehydrate: str, full: tuple[list[list[int]], torch.Tensor]
) -> None:
    lab = Lab(build("llama"), policy=policy, rehydrate=rehydrate, debug=True)
    tree, answers = grown(lab, 32)

    assert [node.tokens for node in tree] == full[0]
    assert relative_error(answers, full[1]) < 1e-5
    assert any(isinstance(event, Rehydrated) for event in lab.events)
    assert lab.memory.peak <= 32


@pytest.mark.parametrize("policy", every(3, WORKING))
def test_lossy_within_the_whole_footprint_is_full_retention(
    policy: str, full: tuple[list[list[int]], torch.Tensor]
) -> None:
    lab = Lab(build("llama"), policy=little(policy), mode="lossy", rehydrate="off", debug=True)
    tree, answers = grown(lab, 4096)

    assert [node.tokens for node in tree] == full[0]
    assert relative_error(answers, full[1]) < 1e-5
    assert not any(isinstance(event, Evicted) for event in lab.events)


@pytest.mark.parametrize("rehydrate", only(["off"], ("off", *REVERSIBLE)))
@pytest.mark.parametrize("policy", BY_POLICY)
def test_lossy_runs_below_the_smallest_lossless_budget_and_holds_it(
    policy: str, rehydrate: str
) -> None:
    slots = len(PROMPT) + LENGTH - 3  # not even the first path fits
    lab = Lab(build("llama"), policy=little(policy), mode="lossy", rehydrate=rehydrate, debug=True)
    tree, answers = grown(lab, slots)

    assert len(tree) == 10
    assert torch.isfinite(answers).all()
    assert lab.memory.peak <= slots
    assert any(isinstance(event, Evicted) for event in lab.events)
    # what is marked exact is what full retention holds; what is not may be anything
    oracle = planted_again(build("llama"), tree)
    here, there = lab.memory.pool, oracle.memory.pool
    for node in tree:
        exact = np.flatnonzero(node.span.exact)
        got, want = node.span.slot[exact], oracle.tree[node.id].span.slot[exact]
        for layer in range(len(here.layers)):
            assert torch.allclose(here.k[layer][got], there.k[layer][want], atol=1e-5)
            assert torch.allclose(here.v[layer][got], there.v[layer][want], atol=1e-5)


@pytest.mark.parametrize("spares", [True, False])
def test_a_flat_policy_takes_from_the_running_path_last_if_told_so(spares: bool) -> None:
    policy = dataclasses.replace(little("tova"), spares_paths=spares)
    lab = Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(40)
    deep = lab.sprout([(tree.root, 1)])[0]
    lab.sprout([(lab.sprout([(deep, 1)])[0], 2)])
    (leaf,) = lab.sprout([(tree.root, 1)])
    lab.sprout([(leaf, 1)])

    whole = all(node.span.resident.all() for node in leaf.path[1:])
    assert whole == spares
    assert lab.memory.peak == 40


@pytest.mark.parametrize("policy", every(4, WORKING))
def test_a_policy_that_spares_paths_takes_from_them_last(policy: str) -> None:
    lab = Lab(build("llama"), policy=little(policy), mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(40)
    lab.sprout([(tree.root, 2)])  # 22 tokens, of which these are 10
    (leaf,) = lab.sprout([(tree.root, 1)])
    lab.sprout([(leaf, 2)])  # 37
    lab.sprout(
        [(leaf, 1)]
    )  # two more than there is room for, and two blocks that are not on the path

    whole = all(node.span.resident.all() for node in leaf.path)
    if POLICIES[policy].spares_paths:
        assert whole
    elif policy in (
        "random",
        "streaming",
        "uniform",
    ):  # the others happen to take only what is off the path
        assert not whole
    assert lab.memory.peak == 40


@pytest.mark.parametrize("rehydrate", REVERSIBLE)
def test_a_path_that_fits_is_whole_and_exact_again_after_loss(rehydrate: str) -> None:
    lab = Lab(build("llama"), policy=little("h2o"), mode="lossy", rehydrate=rehydrate, debug=True)
    tree = lab.plant(20)  # a path fits, two do not
    second = lab.sprout([(tree.root, 2)])[1]
    want = own_logits(build("llama"), tree)[second.id][-1]
    assert (second.span.resident & ~second.span.exact).any()  # it was decoded over a gap
    assert relative_error(lab.state.logits[second.id], want) > 1e-3
    lab.extend(second)

    assert all(node.span.exact.all() for node in second.path)
    assert relative_error(lab.state.logits[second.id], want) < 1e-5


def test_a_prompt_longer_than_the_budget_goes_in_piece_by_piece() -> None:
    lab = Lab(build("llama"), policy=little("streaming"), mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(30, tuple(range(3, 83)))

    held = np.flatnonzero(tree.root.span.resident)
    assert len(held) <= 30
    assert held[:4].tolist() == [0, 1, 2, 3]  # sinks
    assert held[-1] == 79
    assert lab.memory.peak <= 30


def test_every_decision_is_reported_with_its_signals() -> None:
    lab = Lab(build("llama"), policy="kkt", debug=True)
    grown(lab, 32)
    reported = [event for event in lab.events if isinstance(event, Allocated)]
    lost = [event for event in lab.events if isinstance(event, Evicted) and event.cause != "close"]

    assert reported
    assert len(reported) == len(lost)
    for decided, evicted in zip(reported, lost, strict=True):
        assert decided.policy == "kkt"
        assert [(n, had - kept) for n, had, kept in decided.nodes] == list(evicted.nodes)
        by = decided.signals
        assert set(by) == {"score", "value", "confidence", "attention", "depth", "distance"}
        read = [np.array(by[name]) for name in ("value", "confidence", "attention")]
        assert lab.scores.scores(*read) == pytest.approx(by["score"], abs=2e-3)
    assert any(attention > 0 for decided in reported for attention in decided.signals["attention"])


@pytest.mark.parametrize("mode", ("lossless", "lossy"))
@pytest.mark.parametrize("name", ("arborkv", "lru", "h2o"))
def test_floors_and_parts_of_the_view_are_those_of_all_tokens(name: str, mode: Mode) -> None:
    protect = Protect(sinks=14, recent=7, tail=3 if name == "arborkv" else 0, floor=1)
    policy = dataclasses.replace(POLICIES[name], protect=protect)
    lab = Lab(build("llama"), policy=policy, mode=mode, debug=True)
    tree = lab.plant(4096)
    first, second, third = lab.sprout([(tree.root, 3)])
    (deep,) = lab.sprout([(first, 1)])
    lab.memory.evict(second, np.array([0, 3]))
    lab.memory.evict(third, np.array([4]))
    lab.memory.evict(deep, np.array([4]))
    lab.state.changed([second, third, deep])
    limits = set()
    for leaves in ([deep], [deep, second], [tree.root]):
        for where in ("off", "anywhere"):
            for ids in (None, np.array([0, first.id, third.id])):
                blocks = lab.residency.view.offered(leaves, ids, where=where, whole=ids is not None)
                tokens = blocks.tokens
                for index, node in enumerate(tree[int(i)] for i in blocks.ids):
                    held = node.span.resident | (ids is not None)
                    here = tokens.offset[tokens.block == index]
                    assert here.tolist() == np.flatnonzero(held).tolist()
                    assert (tokens.position[tokens.block == index] == node.start + here).all()
                    tail = len(node.tokens) - (protect.tail or -1)
                    window = [leaf.end - protect.recent for leaf in leaves if node in leaf.path]
                    safe = [
                        node.start + t < protect.sinks
                        or t >= tail
                        or any(node.start + t >= begin for begin in window)
                        for t in here.tolist()
                    ]
                    assert tokens.protected[tokens.block == index].tolist() == safe
                    seen = lab.state.statistics.view(node.id, here)
                    mass = seen.mass if policy.observes else np.zeros(len(here))
                    assert tokens.mass[tokens.block == index].tolist() == mass.tolist()
                guarded = np.bincount(tokens.block[tokens.protected], minlength=len(blocks))
                kept = np.minimum(blocks.resident, protect.floor)
                # without a tail, blocks off the running paths have no protected tokens
                slow = np.maximum(kept, guarded) if protect.tail or where != "off" else kept
                assert blocks.floor.tolist() == slow.tolist()
                limits.update(blocks.floor.tolist())
                part = np.arange(0, len(blocks), 2)
                some, here = blocks.see(part), np.isin(tokens.block, part)
                for field in dataclasses.fields(Tokens):
                    got, want = getattr(some, field.name), getattr(tokens, field.name)
                    if field.name == "kv":
                        got, want = got.place, want.place
                        if not policy.observation.keys:
                            assert got is want is None
                            continue
                    assert got.tolist() == want[here].tolist()
    assert len(limits) > 2


def test_attention_is_counted_once_per_query_that_sees_a_token() -> None:
    lab = Lab(build("llama"), policy=little("h2o"), mode="lossy", rehydrate="off")
    tree = lab.plant(4096)
    first, second = lab.sprout([(tree.root, 2)], GREEDY)
    (deep,) = lab.sprout([(first, 1)], GREEDY)
    seen = lab.state.statistics.view(tree.root.id, np.arange(len(PROMPT)))

    later = len(first.tokens) + len(second.tokens) + len(deep.tokens)
    own = len(PROMPT) - np.arange(len(PROMPT))
    assert (seen.queries == own + later).all()
    total = sum(lab.state.statistics.view(n.id, np.arange(len(n.tokens))).mass.sum() for n in tree)
    # every query hands out exactly 1; those that ran again for their logits hand out nothing
    assert total == pytest.approx(len(PROMPT) + later, rel=1e-4)


@pytest.mark.parametrize(("layers", "watched"), [(9, [3, 7]), (3, [2])])
def test_attention_is_observed_in_every_fourth_layer_or_in_the_last_one(
    layers: int, watched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = build("llama").config
    config.num_hidden_layers = layers
    lab = Lab(AutoModelForCausalLM.from_config(config).eval(), policy="h2o", mode="lossy")
    asked: list[list[int]] = []
    right = ModelRunner.forward

    def forward(self: ModelRunner, *args: Any, **kwargs: Any) -> Any:
        asked.append(list(kwargs.get("mass", ())))
        return right(self, *args, **kwargs)

    monkeypatch.setattr(ModelRunner, "forward", forward)

    lab.plant()

    assert asked == [watched]


def test_a_token_ages_only_while_the_window_of_all_layers_holds_it() -> None:
    lab = Lab(build("mistral_window"), policy=little("h2o"), mode="lossy", rehydrate="off")
    tree = lab.plant(4096)
    first, _ = lab.sprout([(tree.root, 2)], GREEDY)
    lab.sprout([(first, 1)], GREEDY)
    rows = [place for node in tree for place in range(node.start, node.start + len(node.tokens))]

    seen = lab.state.statistics.view(tree.root.id, np.arange(len(PROMPT))).queries
    assert seen.tolist() == [
        sum(0 <= row - key < WINDOW for row in rows) for key in range(len(PROMPT))
    ]


def test_what_is_computed_again_ages_no_token() -> None:
    lab = Lab(build("llama"), policy=little("h2o"))
    tree = lab.plant()
    first, _ = lab.sprout([(tree.root, 2)], GREEDY)
    lab.memory.evict(tree.root, np.arange(6, 10))
    lab.memory.free_blocks([first])
    lab.state.changed([tree.root, first])

    def seen() -> list[tuple[list[float], list[int]]]:
        views = [lab.state.statistics.view(n.id, np.arange(len(n.tokens))) for n in tree]
        return [(view.mass.tolist(), view.queries.tolist()) for view in views]

    before = seen()
    lab.extend(first)

    assert isinstance(lab.events[-2], Rehydrated)
    assert first.span.resident.all()
    assert seen() == before


def test_protection_is_given_up_step_by_step_and_sinks_last() -> None:
    steps = list(Protect(sinks=2, recent=3, tail=1, floor=2).easing())

    assert [(p.floor, p.tail, p.recent, p.sinks) for p in steps] == [
        (2, 1, 3, 2),
        (1, 1, 3, 2),
        (0, 1, 3, 2),
        (0, 0, 3, 2),
        (0, 0, 1, 2),
        (0, 0, 0, 2),
        (0, 0, 0, 1),
        (0, 0, 0, 0),
    ]


def test_the_budget_that_a_policy_would_need_is_named() -> None:
    lab = Lab(build("llama"), policy="full", debug=True)
    tree = lab.plant(len(PROMPT) + LENGTH + 2)
    lab.sprout([(tree.root, 1)])

    with pytest.raises(BudgetInfeasible) as caught:
        lab.residency.fit(lab.memory.free + 3, [tree.root], "pressure")

    assert (caught.value.needed, caught.value.budget) == (lab.memory.slots + 3, lab.memory.slots)


@pytest.mark.parametrize("policy", [name for name in WORKING if POLICIES[name].spares_paths])
def test_paths_lose_tokens_only_once_everything_off_them_has_left(policy: str) -> None:
    lab = Lab(build("llama"), policy=little(policy), mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(40)
    first, second = lab.sprout([(tree.root, 2)])
    for more, path in ((4, 17), (5, 17), (8, 14)):  # tokens beyond what was free
        needed = lab.memory.free + more - (5 - int(second.span.resident.sum()))
        lost = lab.residency.fit(needed, [first], "pressure")

        assert lost is (path < 17)
        assert second.span.resident.sum() == max(0, 5 - more)
        assert tree.root.span.resident.sum() + first.span.resident.sum() == path
    off_paths, on_paths = [event for event in lab.events if isinstance(event, Allocated)][-2:]
    assert (off_paths.room, on_paths.room) == (0, path)


@pytest.mark.parametrize(
    ("among", "evicted"),
    [("together", True), ("fair", False), ("first-come", False), ("shortest-first", False)],
)
def test_a_capacity_is_of_each_search_where_room_is_divided(among: Any, evicted: bool) -> None:
    """Two searches with two blocks each off their running paths, as many as one may keep."""
    policy = dataclasses.replace(POLICIES["lru"], allocator=AtMost(2), among=among, protect=LITTLE)
    lab = Lab(build("llama"), policy=policy, debug=True)
    growth = Growth(3, GREEDY, StopRule(Words(), BlockLimits((), LENGTH, 8), ()))
    trees = [ThoughtTree(PROMPT), ThoughtTree(PROMPT[::-1])]
    for tree in trees:
        lab.open(tree, 200, alone=False, pool=400)
        lab.extend(tree.root)
    for leaf, width in ((0, 3), (1, 1)):
        both = [lab.begin_grow([(tree.nodes[leaf], width)], growth) for tree in trees]
        while not all(operation.done for operation in both):
            lab.step()
        for operation in both:
            operation.result()
    lost = [event for event in lab.events if isinstance(event, Evicted)]

    assert bool(lost) is evicted
    assert {event.cause for event in lost} <= {"clock"}


def test_a_block_without_a_value_is_worth_what_the_one_above_it_is() -> None:
    lab = Lab(build("llama"), policy=little("arborkv"))
    tree = lab.plant()
    table = lab.state.table

    def worth() -> list[float]:
        table.refresh()
        return [float(number) for number in table.expected()]

    assert worth() == [1.0]  # nothing is known
    first, second = lab.sprout([(tree.root, 2)])
    first.value, first.valued = 0.2, True
    lab.sprout([(first, 1), (second, 1)])
    lab.state.changed([first])
    assert worth() == [0.2, 0.2, 0.2, 0.2, 0.2]
    second.value, second.valued = 0.9, True
    lab.state.changed([second])
    assert worth() == [0.9, 0.2, 0.9, 0.2, 0.9]
    first.value = -3.1  # a scale of its own: from the smallest to the largest of the tree
    lab.state.changed([first])
    assert worth() == [1.0, 0.0, 1.0, 0.0, 1.0]


@pytest.mark.parametrize("length", [24, 25, 26])
def test_a_prompt_of_about_the_budget_goes_in(length: int) -> None:
    lab = Lab(build("llama"), policy=little("lru"), mode="lossy", rehydrate="off", debug=True)
    tree = lab.plant(25, tuple(range(3, 3 + length)))
    lab.sprout([(tree.root, 1)])

    assert lab.memory.peak == 25


@given(
    start=st.integers(0, 6),
    tail=st.integers(0, 3),
    rows=st.integers(1, 5),
    window=st.integers(1, 9),
)
def test_beyond_the_window_nobody_sees(start: int, tail: int, rows: int, window: int) -> None:
    held = np.arange(0, start, 2, dtype=np.int32)  # with gaps
    piece = Piece("a", held, held)
    positions = np.arange(start + tail, start + tail + rows)
    own = np.arange(start, start + tail + rows).astype(np.int32)  # a slot is its position
    segment = Segment((piece,), [1] * rows, positions, own, own[tail:])

    slots, seen = visibility(plan_forward([segment]), 99, window)

    expected = {
        key: count
        for key in (*held.tolist(), *own.tolist())
        if (count := sum(0 <= row - key < window for row in positions.tolist()))
    }
    assert dict(zip(slots.tolist(), seen.tolist(), strict=True)) == expected


def test_the_tokens_a_policy_sees_carry_the_same_key_whatever_the_order() -> None:
    def keys(order: tuple[int, int]) -> dict[tuple[int, ...], list[int]]:
        lab = Lab(build("llama"), policy="random")
        tree = lab.plant(4096)
        ends = lab.sprout([(tree.root, 2)], GREEDY)
        for index in order:
            lab.sprout([(ends[index], 1)], GREEDY)
        blocks = lab.residency.view.offered([tree.root])
        view = blocks.tokens
        return {
            tree[int(node_id)].key: view.key[view.block == i].tolist()
            for i, node_id in enumerate(blocks.ids)
        }

    assert keys((0, 1)) == keys((1, 0))


@pytest.mark.skipif("arborkv" not in POLICIES, reason="without the paper")
@pytest.mark.parametrize(("value", "shown"), [("verifier", [0.4, 0.4]), ("controller", [0.4, 0.9])])
def test_the_figures_by_which_a_search_chooses_are_shown_to_a_policy_that_asks(
    value: str, shown: list[float]
) -> None:
    allocator = dataclasses.replace(POLICIES["arborkv"].allocator, value=value)
    lab = Lab(build("llama"), policy=dataclasses.replace(POLICIES["arborkv"], allocator=allocator))
    tree = ThoughtTree(PROMPT)
    lab.open(tree, 200, scores=lambda: {2: 0.9})
    lab.extend(tree.root)
    for child in lab.sprout([(tree.root, 2)], GREEDY):
        child.value, child.valued = 0.4, True
        lab.state.changed([child])

    assert lab.residency.view.offered([tree.root]).value.tolist() == shown


@pytest.mark.parametrize("policy", ["random", "h2o"])
def test_a_policy_is_shown_nothing_of_a_tree_that_was_closed(policy: str) -> None:
    def opened(lab: Lab, prompt: Sequence[int]) -> ThoughtTree:
        lab.open(tree := ThoughtTree(prompt), 200, alone=False, pool=200)
        lab.extend(tree.root)
        return tree

    def shown(lab: Lab) -> list[list[float]]:
        tree = opened(lab, PROMPT)
        lab.sprout([(tree.root, 2)], GREEDY)
        blocks = lab.residency.view.offered([tree.root])
        tokens = blocks.tokens
        columns = [blocks.ids, blocks.depth, blocks.distance, blocks.attention]
        columns += [tokens.position, tokens.key, tokens.mass, tokens.queries]
        return [column.round(5).tolist() for column in columns]

    fresh, used = (Lab(build("llama"), policy=policy, debug=True) for _ in range(2))
    for lab in (fresh, used):
        opened(lab, PROMPT[:3])  # keeps the pool
    closed = opened(used, PROMPT[::-1])
    (child,) = used.sprout([(closed.root, 1)])
    used.sprout([(child, 1)])
    assert len(used.residency.view.offered([closed.root]).tokens.key) == 3 + 2 * LENGTH
    used.close(closed)

    assert shown(used) == shown(fresh)


@pytest.mark.parametrize("closed", [False, True])
def test_ties_go_by_node_id_whatever_was_searched_and_closed_before(closed: bool) -> None:
    lab = Lab(build("llama"), policy=POLICIES["uniform"], mode="lossy", rehydrate="off", debug=True)
    tree, other = ThoughtTree(PROMPT), ThoughtTree(PROMPT[::-1])
    if closed:
        lab.open(other, 40, pool=80)
        lab.extend(other.root)
        lab.sprout([(other.root, 3)])
    lab.open(tree, 28, alone=not closed, pool=80)
    lab.extend(tree.root)
    first, second = lab.sprout([(tree.root, 2)], length=5)
    if closed:
        lab.close(other)  # its rows lie below those of the tree
    lab.sprout([(first, 2)], length=5)
    lab.sprout([(second, 2)], length=5)

    blocks = lab.residency.view.offered([tree.nodes[-1]], where="anywhere", tree=tree)
    ids = [node.id for node in lab.memory.forest.nodes(blocks.ids.tolist())]
    assert ids == sorted(ids)
    held = [int(node.span.resident.sum()) for node in tree]
    assert held[1:] == [3, 3, 2, 2, 5, 5]
