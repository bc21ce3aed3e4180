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
from support.run_cli import in_process
from support.trees import PROMPT, SAMPLED, Lab, own_logits
from test_replay import counters
from test_scheduler import operation, row

from arbor import Solver
from arbor.engine.branch_stop import BranchStop
from arbor.engine.branches import Branches
from arbor.engine.stop_rule import StopRule
from arbor.engine.token_source import Growth
from arbor.errors import UsageError
from arbor.events import Boundary, BranchesStopped, Event, Evicted
from arbor.measure.replay import Recording, replay, replay_smallest
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
        seed, SAMPLED, StopRule(Words(), BlockLimits(stop, LONGEST, 8), ()), branch_stop=rule
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
@pytest.mark.parametrize("seed", range(6))
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
@pytest.mark.parametrize("slots", [23, 27, 34])
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


def test_an_interruption_gives_up_the_rows_that_are_held(model: Any) -> None:
    rule = BranchStop("all", 1.0, 1.0, least=2)  # never decisive
    over = [False]
    lab = Lab(model, debug=True)
    tree = lab.plant(23, interrupted=lambda: over[0])
    operation = lab.begin_grow([(tree.root, WIDTH)], growth(rule, stop=()))
    while not operation.held:
        lab.step()
    over[0] = True

    while not operation.done:
        lab.step()

    assert not operation.held
    assert all(child.state is not NodeState.OPEN for child in operation.result())
    assert any(child.state is NodeState.PRUNED for child in operation.children)
    lab.memory.check()


def test_branches_of_one_leaf_alone_are_compared(model: Any) -> None:
    rule = BranchStop("all", 0.0, 0.0, least=1)
    lab = Lab(model)
    tree = lab.plant()
    first, second = lab.grow([(tree.root, 2)], growth(None))
    lab.events.clear()

    lab.grow([(first, 1), (second, 1)], growth(rule))

    assert not gated(lab.events), "an only child has no competitor"


def test_a_token_that_waits_to_be_computed_belongs_to_the_text() -> None:
    tree = ThoughtTree(PROMPT)
    work = operation(tree, 100)
    rows = [row(work, tree.root, length=2) for _ in range(3)]
    for each, token, top1 in zip(rows, (5, 5, 6), (0.9, 0.8, 0.3), strict=True):
        each.pending, each.node.top1, each.top1 = token, 2 * top1, top1
    branches = Branches(BranchStop("others", 0.5, 0.5, least=3), rows)

    stopped = branches.compare()

    assert stopped is not None
    assert stopped.confidences == (0.9, 0.8, 0.3)
    assert stopped.stopped == (rows[2].node.id,), "equal texts go on with the confident one"
    assert [each.stop for each in rows] == [None, None, "gate"]
    assert branches.compare() is None, "once for each token"


def test_the_setting_reads_as_it_is_written() -> None:
    rule = BranchStop.parse("others,gap=0.25,least=5")
    assert rule == BranchStop("others", 0.72, 0.25, 5)
    assert BranchStop.parse(str(rule)) == rule
    with Solver(branch_stop=rule) as solver:
        config = solver.config
    assert config["branch_stop"] == "others,confidence=0.72,gap=0.25,least=5"
    with Solver.from_config(config) as again:
        assert again.setup.branch_stop == rule
    with Solver() as plain:
        assert "branch_stop" not in plain.config


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("some", "branch-stop"),
        ("all,gap=high", "branch-stop"),
        ("all,gpa=0.1", "unknown-setting.*gap"),
        ("all,gap=2", "setting-range"),
        ("all,least=0", "setting-range"),
    ],
)
def test_a_wrong_setting_is_refused(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Solver(branch_stop=text)


def test_lossy_mode_is_refused() -> None:
    with pytest.raises(UsageError, match=r"branch-stop.*lossy"):
        Solver(mode="lossy", policy="streaming", branch_stop="all")


def test_a_search_counts_what_it_stopped_and_replays_to_the_same_counters() -> None:
    events: list[Event] = []
    search = {"name": "tot", "beam": 2, "width": 4}
    rule = "others,confidence=0.5,gap=0.02,least=4"
    with Solver(controller=search, branch_stop=rule, listeners=(events.append,)) as solver:
        metrics = solver.solve("4 5 6 10").metrics
        tokenizer = solver.tokenizer
    stopped = [node for event in gated(events) for node in event.stopped]

    assert metrics.branches_stopped == len(stopped) > 0
    assert not metrics.verifications, "it is not a verification"
    record = Recording.of(events)
    slots, again = replay_smallest(record, tokenizer, policy="lru", slots=10)
    assert again.tokens_generated == metrics.tokens_generated
    assert counters(replay(record, tokenizer, policy="lru", slots=4096)) == counters(metrics)
    assert slots < metrics.peak_tokens


def test_the_command_has_the_option(capsys: pytest.CaptureFixture[str]) -> None:
    ran = in_process(capsys)(
        *("solve", "4 5 6 10", "--set", "branch_stop=others,confidence=0.5,gap=0.02", "--json"),
        *("--set", "width=3", "--set", "beam=1"),
    )
    assert ran.document["config"]["branch_stop"].startswith("others,")
    assert ran.document["metrics"]["branches_stopped"] > 0
