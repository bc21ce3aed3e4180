"""Branches that end early: the rule, what is compared, and that a budget changes none of it."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import Words, build
from support.slow_cases import every
from support.trees import SAMPLED, Lab, own_logits

from arbor.engine.operation import Growth
from arbor.engine.stop_rule import StopRule
from arbor.events import Boundary, BranchesStopped, Event, Evicted
from arbor.papers.rksc.branch_stop import BranchStop
from arbor.tasks.base import BlockLimits
from arbor.tree import Node, NodeState, ThoughtTree

pytestmark = pytest.mark.usefixtures("loaded_once")

LONGEST = 9
WIDTH = 4
# weights are random and p is about 1/V everywhere: only the gap matters
GAPS = (0.02, 0.1, 0.3)


def growth(rule: BranchStop | None, seed: int = 3, stop: tuple[str, ...] = (" 1",)) -> Growth:
    """Blocks end with a token whose text has a 1 first, so their lengths differ."""
    return Growth(
        seed, SAMPLED, StopRule(Words(), BlockLimits(stop, LONGEST, 8), ()), branch_hook=rule
    )


def sprouted(
    model: Any, rule: BranchStop | None, *, slots: int = 4096, seed: int = 3
) -> tuple[ThoughtTree, list[Node], list[Event]]:
    """The children of a root, grown under a rule."""
    lab = Lab(model, debug=True)
    tree = lab.plant(slots)
    lab.events.clear()
    children = lab.grow([(tree.root, WIDTH)], growth(rule, seed))
    return tree, children, lab.events


def stops(events: list[Event]) -> dict[int, str]:
    return {event.node: event.stop for event in events if isinstance(event, Boundary)}


def gated(events: list[Event]) -> list[BranchesStopped]:
    return [event for event in events if isinstance(event, BranchesStopped)]


def expected(rule: BranchStop, tokens: list[tuple[int, ...]], top1: list[list[float]]) -> list[int]:
    """Tokens that each branch keeps, from those that it has without the rule."""
    ends = [len(each) for each in tokens]
    for now in range(rule.least, max(ends) + 1):
        have = [min(now, end) for end in ends]
        if now not in have:
            break
        p = [round(math.fsum(t[:n]) / n, 4) for t, n in zip(top1, have, strict=True)]
        texts = [each[:n] for each, n in zip(tokens, have, strict=True)]
        best = max(range(len(p)), key=lambda place: p[place])
        rest = [q for q, text in zip(p, texts, strict=True) if text != texts[best]]
        if not rest or p[best] < rule.confidence:
            continue
        if round((p[best] - max(rest)) / p[best], 4) < rule.gap:
            continue
        for place in range(len(ends)):
            # a block that ends with this very token has ended
            if ends[place] > now and (rule.ends == "all" or texts[place] != texts[best]):
                ends[place] = now
    return ends


@pytest.fixture(scope="module")
def model() -> Any:
    return build("llama")


@pytest.fixture(scope="module")
def reference() -> Any:
    """The same weights, with Hugging Face's own attention."""
    return build("llama")


@given(
    st.lists(st.integers(0, 2), min_size=1, max_size=4),
    st.lists(st.sampled_from((0.0, 0.5, 0.7, 0.9)), min_size=4, max_size=4),
    st.sampled_from((0.0, 0.6, 0.9)),
    st.sampled_from((0.0, 0.2, 0.5)),
)
def test_the_rule_is_the_formula_over_different_texts(
    texts: list[int], confidences: list[float], confidence: float, gap: float
) -> None:
    rule = BranchStop("all", confidence, gap)
    each = confidences[: len(texts)]
    best = {text: max(p for t, p in zip(texts, each, strict=True) if t == text) for text in texts}
    first, *others = sorted(best.values(), reverse=True)

    decisive = rule.is_decisive([(text,) for text in texts], each)

    if not others:
        assert not decisive, "a single text has no competitor"
    else:
        lead = round((first - others[0]) / first, 4) if first else 0.0
        assert decisive == (first >= confidence and lead >= gap)


@pytest.mark.parametrize("ends", ["all", "others"])
@pytest.mark.parametrize("seed", every(3, range(6)))
def test_branches_are_cut_where_the_rule_says_and_are_else_the_same(
    model: Any, reference: Any, ends: Any, seed: int
) -> None:
    tree, children, _ = sprouted(model, None, seed=seed)
    probabilities = {n: torch.softmax(rows, -1) for n, rows in own_logits(reference, tree).items()}
    top1 = [probabilities[c.id].max(-1).values[: len(c.tokens)].tolist() for c in children]
    cut = 0
    for gap in GAPS:
        rule = BranchStop(ends, 0.0, gap, least=2)
        want = expected(rule, [tuple(child.tokens) for child in children], top1)

        _, mine, events = sprouted(model, rule, seed=seed)

        assert [len(child.tokens) for child in mine] == want
        for child, whole in zip(mine, children, strict=True):
            assert child.tokens == whole.tokens[: len(child.tokens)]
            assert child.state is NodeState.CLOSED
            shorter = len(child.tokens) < len(whole.tokens)
            assert (stops(events)[child.id] == "gate") == shorter
            cut += shorter
        stopped = [node for event in gated(events) for node in event.stopped]
        assert sorted(stopped) == [c.id for c in mine if stops(events)[c.id] == "gate"]
    assert cut, "the rule ends some"


@pytest.mark.parametrize("ends", ["all", "others"])
@pytest.mark.parametrize("slots", every(3, [23, 27, 34]))
def test_what_ends_does_not_depend_on_the_budget(model: Any, ends: Any, slots: int) -> None:
    held = stopped = 0
    for seed in range(4):
        rule = BranchStop(ends, 0.0, 0.1, least=3)
        _, whole, events = sprouted(model, rule, seed=seed)

        tree, mine, tight = sprouted(model, rule, slots=slots, seed=seed)

        assert [child.tokens for child in mine] == [child.tokens for child in whole]
        assert [stops(tight)[c.id] for c in mine] == [stops(events)[c.id] for c in whole]
        assert [dataclasses.astuple(e) for e in gated(tight)] == [
            dataclasses.astuple(e) for e in gated(events)
        ]
        stopped += len(gated(events))
        held += any(isinstance(event, Evicted) for event in tight)
        assert all(node.state is not NodeState.OPEN for node in tree)
    assert stopped, "some branches end early"
    assert held, "rows had to wait"
