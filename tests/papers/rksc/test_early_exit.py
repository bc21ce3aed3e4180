"""Questions that leave between the layers: the rule, the logits they leave with, what stays."""

from __future__ import annotations

import copy
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.fakes import FakeTask
from support.models import ARCHITECTURES, build
from support.slow_cases import every
from support.trees import Lab, grown, leaves_of, relative_error
from test_cgee import branches, silent
from torch import Tensor

from arbor import Solver, components
from arbor.errors import ModelError, UsageError
from arbor.events import Event, Forwarded, Rehydrated, Verified
from arbor.kernels.attention.rowwise import RowwiseAttention
from arbor.kernels.attention.torch_cascade import TorchCascade
from arbor.kernels.linear.layers import pack_linears
from arbor.memory.pool import KVPool
from arbor.model.plan import Segment, plan_forward
from arbor.model.runner import ModelRunner
from arbor.papers.rksc.cgee import CGEE
from arbor.papers.rksc.exit_thresholds import DECIMALS, LayerExit
from arbor.papers.rksc.exit_watch import Exiting, entropy, lack_of_margin, ways_of
from arbor.tree import Node
from arbor.verifiers.exact import Exact

pytestmark = pytest.mark.usefixtures("loaded_once")

LAYERS = 3  # of the small models
NEVER = LayerExit(threshold=0.0)
# leaves after so many layers, whatever the state: a check before it, and entropy is at most 1
AFTER = {n: LayerExit(first=n, threshold=9.0, settle=9.0, patience=1) for n in (2, 3)}
NAMES = ("llama", "qwen3", "mistral_window", "gemma2", "gemma3_text", "granite", "cohere2", "gpt2")
TOLERANCE = 2e-6
SQUEEZED = 31


class Answers(NamedTuple):
    """Logits [n, V], the layers that each question ran through, and under an audit [n, V] of all
    layers."""

    logits: Tensor
    layers: tuple[int, ...]
    full: Tensor | None


def ask_early(
    lab: Lab,
    nodes: Sequence[Node],
    questions: Sequence[Sequence[int]],
    rule: LayerExit,
    verdicts: Sequence[Sequence[int]] = (),
    audit: bool = False,
) -> Answers:
    ways = ways_of(rule, len(nodes), verdicts, audit=audit)
    logits = lab.ask(nodes, questions, ways)
    full = [way.full for way in ways if way.full is not None]
    return Answers(logits, tuple(way.layers for way in ways), torch.stack(full) if full else None)


# The rule


rules = st.builds(
    LayerExit,
    first=st.integers(1, 6),
    threshold=st.sampled_from((0.0, 0.3, 0.5, 2.0)),
    settle=st.sampled_from((0.0, 0.05, 0.2, 2.0)),
    patience=st.integers(1, 3),
    every=st.integers(1, 3),
)


@given(rules, st.lists(st.sampled_from((0.1, 0.2, 0.3, 0.4, 0.9)), min_size=12, max_size=12))
def test_a_question_leaves_at_the_first_layer_that_the_rule_allows(
    rule: LayerExit, values: list[float]
) -> None:
    exiting = Exiting(rule)
    exiting.begin(12)
    for layers in range(1, 12):
        if rule.checks(layers) and exiting.look(layers, values[layers - 1]):
            break

    def allowed(layers: int) -> bool:
        looked = [layers - back * rule.every for back in range(rule.patience, -1, -1)]
        if layers < rule.first or (layers - rule.first) % rule.every or looked[0] < 1:
            return False
        pairs = itertools.pairwise(values[at - 1] for at in looked)
        return all(
            now < rule.threshold and round(abs(now - before), 9) < rule.settle
            for before, now in pairs
        )

    want = next((layers for layers in range(1, 12) if allowed(layers)), 12)
    assert exiting.layers == want


@pytest.mark.parametrize("name", ["first", "patience", "every"])
def test_counts_are_at_least_one(name: str) -> None:
    with pytest.raises(UsageError, match=f"setting-range.*{name}=0"):
        LayerExit(**{name: 0})


@pytest.mark.parametrize("name", ["threshold", "settle"])
def test_thresholds_are_numbers_from_zero(name: str) -> None:
    for wrong in (-0.1, math.nan):
        with pytest.raises(UsageError, match=f"setting-range.*{name}"):
            LayerExit(**{name: wrong})


def test_bits_that_depend_on_the_batch_decide_nothing() -> None:
    rule = LayerExit(first=1, threshold=0.3, settle=0.1, patience=1)

    for wrong in (-1e-7, 0.0, 1e-7):
        assert not rule.is_over(2, [0.31, 0.3 + wrong])
        assert not rule.is_over(2, [0.2, 0.1 + wrong])
        assert rule.is_over(2, [0.2, 0.2 + wrong])


def test_uncertainties_are_shares_of_the_largest() -> None:
    logits = torch.tensor([[0.0] * 8, [100.0] + [0.0] * 7, [-math.inf] * 7 + [0.0]])

    assert entropy(logits).tolist() == pytest.approx([1.0, 0.0, 0.0], abs=1e-6)
    assert lack_of_margin(torch.tensor([0.0, 0.0])) == pytest.approx(1.0)
    assert lack_of_margin(torch.tensor([math.log(3), 0.0])) == pytest.approx(0.5)
    assert lack_of_margin(torch.tensor([0.3])) == 0.0


# Unembedding


def path_plan(runner: ModelRunner, rows: int) -> Any:
    slots = torch.arange(rows, dtype=torch.int32).numpy()
    ids = [3 + row for row in range(rows)]
    segment = Segment((), ids, slots.astype("int64"), slots, slots, rows)
    return plan_forward([segment]), KVPool(runner.layer_kv, rows, runner.dtype, runner.device)


@pytest.mark.parametrize("name", every(6, sorted(set(ARCHITECTURES) - {"gemma3n_text"})))
def test_a_state_has_the_logits_of_a_model_that_ends_with_it(name: str) -> None:
    runner = ModelRunner(build(name), TorchCascade())
    layers = range(runner.layer_count)
    states = runner.forward(*path_plan(runner, 7), hidden=layers).hidden

    for layer in layers:
        want = runner.forward(*path_plan(runner, 7), stop_after=layer).logits
        found = runner.unembed(states[layer])
        assert relative_error(found, want) < TOLERANCE
        some = [5, 3, 40]
        assert relative_error(runner.unembed(states[layer], some), found[:, some]) < TOLERANCE
    whole = runner.forward(*path_plan(runner, 7)).logits
    assert relative_error(whole, want) < TOLERANCE, "the layers come back"


@pytest.mark.parametrize("packed", [False, True])
def test_without_the_final_norm_the_head_reads_the_state_itself(packed: bool) -> None:
    model = build("qwen3")
    want = copy.deepcopy(model.lm_head)
    if packed:
        pack_linears(model)
    runner = ModelRunner(model, TorchCascade())
    state = torch.randn(4, 32)

    raw = runner.unembed(state, norm=False)

    assert relative_error(raw, want(state).detach()) < TOLERANCE
    assert relative_error(runner.unembed(state, [7], norm=False), raw[:, [7]]) < TOLERANCE
    assert relative_error(runner.unembed(state), raw) > 0.1


# Questions in the engine


def questions(tree: Any) -> tuple[list[Any], list[list[int]]]:
    nodes = [*leaves_of(tree), tree.root]
    return nodes, [[5 + place, 9, 11][: 1 + place % 3] for place in range(len(nodes))]


@functools.cache
def laboratory(name: str) -> Lab:
    return Lab(build(name), debug=True)


def truncated(lab: Lab, layers: int, nodes: Sequence[Any], asked: Sequence[Sequence[int]]) -> Any:
    """Answers of the model without its last layers: a whole path at a time."""
    found = []
    for node, question in zip(nodes, asked, strict=True):
        ids = [token for each in node.path for token in each.tokens] + list(question)
        slots = torch.arange(len(ids), dtype=torch.int32).numpy()
        segment = Segment((), ids, slots.astype("int64"), slots, slots, 1)
        runner = lab.runner
        pool = KVPool(runner.layer_kv, len(ids), runner.dtype, runner.device)
        found.append(runner.forward(plan_forward([segment]), pool, stop_after=layers - 1).logits[0])
    return torch.stack(found)


@pytest.mark.parametrize("slots", [4096, SQUEEZED])
@pytest.mark.parametrize("name", every(4, NAMES))
def test_a_question_leaves_with_the_truncated_models_answer_and_its_path_stays_whole(
    name: str, slots: int
) -> None:
    lab = laboratory(name)
    lab.events.clear()
    tree, answers = grown(lab, slots)
    nodes, asked = questions(tree)

    early = ask_early(lab, nodes, asked, AFTER[2])

    assert early.layers == (2,) * len(nodes)
    assert relative_error(early.logits, truncated(lab, 2, nodes, asked)) < TOLERANCE
    # paths came back in the forward that questions left
    assert any(isinstance(event, Rehydrated) for event in lab.events) == (slots == SQUEEZED)
    whole = lab.ask(nodes, asked)
    assert relative_error(whole, truncated(lab, LAYERS, nodes, asked)) < TOLERANCE
    assert relative_error(grown(lab, slots)[1], answers) < TOLERANCE


@pytest.mark.parametrize("name", NAMES)
def test_an_exit_at_the_last_layer_is_full_verification_bit_for_bit(name: str) -> None:
    lab = laboratory(name)
    tree, _ = grown(lab)
    nodes, asked = questions(tree)
    lab.extend(tree.root)

    whole = lab.ask(nodes, asked)

    for rule in (NEVER, AFTER[3]):
        early = ask_early(lab, nodes, asked, rule)
        assert torch.equal(early.logits, whole)
        assert early.layers == (LAYERS,) * len(nodes)
        assert early.full is None


def test_the_rows_of_a_question_leave_together_and_those_of_paths_never() -> None:
    lab = laboratory("llama")
    tree, _ = grown(lab, SQUEEZED)
    nodes, asked = questions(tree)
    forward, seen = lab.runner.forward, []

    def spied(plan: Any, pool: Any, **given: Any) -> Any:
        result = forward(plan, pool, **given)
        if result.exit_layer is not None:
            seen.append(result.exit_layer)
        return result

    lab.runner.forward = spied  # type: ignore[method-assign]
    try:
        ask_early(lab, nodes, asked, AFTER[2])
    finally:
        del lab.runner.forward

    layers = torch.cat(seen)
    left, stayed = int((layers == 1).sum()), int((layers == LAYERS - 1).sum())
    assert left == sum(map(len, asked)), "every token of every question, and no other"
    assert left + stayed == len(layers) and stayed > 0, "paths came back in these forwards"


def test_each_question_leaves_by_its_own_uncertainty() -> None:
    lab = laboratory("llama")
    tree, _ = grown(lab)
    nodes, asked = questions(tree)
    states = [entropy(truncated(lab, layers, nodes, asked)).tolist() for layers in (1, 2)]
    between = sorted(states[1])[len(nodes) // 2]  # half of them are below
    rule = LayerExit(first=2, threshold=between, settle=9.0, patience=1)

    early = ask_early(lab, nodes, asked, rule)

    want = [2 if round(each, DECIMALS) < between else LAYERS for each in states[1]]
    assert early.layers == tuple(want) and set(want) == {2, LAYERS}
    left = truncated(lab, 2, nodes, asked)
    whole = truncated(lab, LAYERS, nodes, asked)
    expected = torch.stack([left[i] if n == 2 else whole[i] for i, n in enumerate(want)])
    assert relative_error(early.logits, expected) < TOLERANCE


def test_questions_of_several_searches_leave_by_their_own_rules() -> None:
    lab = laboratory("qwen3")
    tree, _ = grown(lab)
    nodes, asked = questions(tree)
    lab.events.clear()
    margin = LayerExit(threshold=9.0, settle=9.0, first=2, patience=1, measure="margin")
    operations = [
        lab.begin_ask(nodes, asked, ways_of(AFTER[2], len(nodes))),
        lab.begin_ask(nodes, asked),
        lab.begin_ask(nodes, asked, ways_of(margin, len(nodes), [[1, 2]] * len(nodes))),
    ]
    while not all(operation.done for operation in operations):
        lab.step()

    forwards = [e for e in lab.events if isinstance(e, Forwarded) and e.kind == "verify"]
    assert len(forwards) == 1, "they ran together"
    left, whole, by_margin = (operation.result() for operation in operations)
    assert relative_error(left, truncated(lab, 2, nodes, asked)) < TOLERANCE
    assert torch.equal(by_margin, left)
    assert relative_error(whole, truncated(lab, LAYERS, nodes, asked)) < TOLERANCE


def test_questions_of_several_hooks_leave_in_one_forward() -> None:
    class Other(Exiting):
        """A way of another hook, with the same rule."""

    lab = laboratory("llama")
    tree, _ = grown(lab)
    nodes, asked = questions(tree)
    ways = [
        (Exiting if place % 2 else Other)(AFTER[2 + place % 3 % 2]) for place in range(len(nodes))
    ]
    lab.events.clear()
    answers = lab.ask(nodes, asked, ways)

    want = [way.rule.first for way in ways]
    assert [way.layers for way in ways] == want and set(want) == {2, 3}
    left, whole = truncated(lab, 2, nodes, asked), truncated(lab, LAYERS, nodes, asked)
    expected = torch.stack([left[i] if n == 2 else whole[i] for i, n in enumerate(want)])
    assert relative_error(answers, expected) < TOLERANCE
    forwards = [e for e in lab.events if isinstance(e, Forwarded) and e.kind == "verify"]
    assert len(forwards) == 1


def test_blocks_decode_on_while_questions_leave() -> None:
    lab = laboratory("llama")
    tree, _ = grown(lab)
    nodes, asked = questions(tree)
    from test_engine import growth

    want = [child.tokens for child in lab.grow([(tree.root, 3)], growth())]
    growing = lab.begin_grow([(tree.root, 3)], growth())
    lab.step()
    ways = ways_of(AFTER[2], len(nodes))
    asking = lab.begin_ask(nodes, asked, ways)
    while not (growing.done and asking.done):
        lab.step()

    assert {each.layers for each in ways} == {2}
    assert relative_error(asking.result(), truncated(lab, 2, nodes, asked)) < TOLERANCE
    assert [len(child.tokens) for child in growing.result()] == [len(each) for each in want]


def deterministic(name: str) -> Lab:
    model = build(name)
    pack_linears(model, deterministic=True)
    return Lab(model, RowwiseAttention(), deterministic=True)


@pytest.mark.parametrize("measure", ["entropy", "margin"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_deterministic_answers_do_not_depend_on_the_batch(name: str, measure: Any) -> None:
    lab = deterministic(name)
    tree, _ = grown(lab)
    nodes, asked = questions(tree)
    verdicts = [[3, 8, 12]] * len(nodes)
    probe = ask_early(lab, nodes, asked, LayerExit(threshold=0.0, patience=1, measure=measure), verdicts, audit=True)  # fmt: skip
    assert probe.layers == (LAYERS,) * len(nodes)
    ways = ways_of(LayerExit(threshold=0, patience=1, measure=measure), len(nodes), verdicts)
    lab.ask(nodes, asked, ways)
    between = sorted(each.values[-1] for each in ways)[len(nodes) // 2]
    rule = LayerExit(threshold=between, settle=9.0, patience=1, measure=measure)

    together = ask_early(lab, nodes, asked, rule, verdicts)
    audited = ask_early(lab, nodes, asked, rule, verdicts, audit=True)

    assert len(set(together.layers)) == 2
    for place, (node, question) in enumerate(zip(nodes, asked, strict=True)):
        alone = ask_early(lab, [node], [question], rule, verdicts[:1])
        assert alone.layers[0] == together.layers[place]
        assert torch.equal(alone.logits[0], together.logits[place])
    assert audited.layers == together.layers
    assert torch.equal(audited.logits, together.logits)
    assert audited.full is not None and torch.equal(audited.full, lab.ask(nodes, asked))


def test_a_forward_that_fails_forgets_its_checks() -> None:
    lab = laboratory("llama")
    tree, _ = grown(lab)
    nodes, asked = questions(tree)
    unembed = lab.runner.unembed
    calls = []

    def failing(state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(len(state))
        if len(calls) == 2:
            raise ZeroDivisionError
        return unembed(state, *args, **kwargs)

    lab.runner.unembed = failing  # type: ignore[method-assign]
    try:
        with pytest.raises(ZeroDivisionError):
            ask_early(lab, nodes, asked, AFTER[2])
    finally:
        del lab.runner.unembed
    lab.memory.check()

    assert ask_early(lab, nodes, asked, AFTER[2]).layers == (2,) * len(nodes)


def test_attention_of_questions_that_may_leave_is_not_observed() -> None:
    seen = []
    for rule in (AFTER[2], NEVER, None):
        lab = Lab(build("llama"), policy="h2o")
        tree, _ = grown(lab)
        nodes, asked = questions(tree)
        before = lab.state.statistics.block_attention(torch.arange(len(tree)).numpy()).tolist()
        operation = lab.begin_ask(nodes, asked, ways_of(rule, len(nodes)) if rule else ())
        while not operation.done:
            lab.step()
        after = lab.state.statistics.block_attention(torch.arange(len(tree)).numpy()).tolist()
        seen.append(before == after)

    assert seen == [True, True, False]


def test_layers_that_take_several_states_are_refused_by_name() -> None:
    lab = laboratory("gemma3n_text")
    tree, _ = grown(lab)

    with pytest.raises(ModelError, match=r"arch-unsupported.*rows cannot leave"):
        ask_early(lab, leaves_of(tree), [[5]] * len(leaves_of(tree)), AFTER[2])


def test_a_margin_needs_verdicts() -> None:
    lab = laboratory("llama")
    tree, _ = grown(lab)

    with pytest.raises(UsageError, match=r"exit-verdicts"):
        ask_early(lab, [tree.root], [[5]], LayerExit(measure="margin"))


# In a search


def test_levels_need_questions_that_are_known_at_once() -> None:
    with pytest.raises(UsageError, match=r"exit-verifier.*levels=exit"):
        CGEE(Exact(), levels="exit")
    assert CGEE(Exact(), levels="skip").levels == "skip"


def test_level_two_alone_never_skips() -> None:
    clear = branches(0.9, 0.1)

    inquiry = CGEE(confidence=0.5, gap=0.1, levels="exit").inquire(
        FakeTask(), clear[0], clear, silent()
    )

    assert inquiry is not None and len(inquiry.nodes) == 2
    ways = [each for each in inquiry.ways if isinstance(each, Exiting)]
    assert [(each.rule, each.audit) for each in ways] == [(LayerExit(), False)] * 2
    assert list(inquiry.rows) == [0, 1]
    assert [len(each) for each in inquiry.verdicts] == [2, 2]


def test_the_rule_goes_by_the_names_of_its_settings() -> None:
    built = components.build("verifier", "cgee,levels=exit,threshold=0.2,first=3,measure=margin")

    assert built == CGEE(
        levels="exit", exit_rule=LayerExit(first=3, threshold=0.2, measure="margin")
    )
    assert components.build("verifier", components.spec_of(built)) == built


EAGER = LayerExit(first=2, threshold=0.9, settle=0.9, patience=1)


def search(verifier: Any, **settings: Any) -> tuple[Any, list[Verified]]:
    heard: list[Event] = []
    with Solver(
        controller="tot,width=3", verifier=verifier, listeners=[heard.append],
        deterministic=True, debug=True, **settings,
    ) as solver:  # fmt: skip
        found = solver.solve("4 5 6 10")
    return found, [event for event in heard if isinstance(event, Verified)]


def test_a_search_reports_where_its_questions_left() -> None:
    solution, events = search(CGEE(levels="exit", exit_rule=EAGER))

    assert solution.metrics.left_early > 0
    layers = events[0].layers
    for event in events:
        assert len(event.exit_layer) == len(event.entropy) == len(event.nodes)
        for exit_layer, values in zip(event.exit_layer, event.entropy, strict=True):
            assert len(values) == layers
            known = [place for place, value in enumerate(values) if not math.isnan(value)]
            assert known and known == list(range(known[0], known[-1] + 1))
            assert exit_layer in (known[-1], layers - 1)
    skipped = sum(layers - 1 - at for event in events for at in event.exit_layer)
    assert solution.metrics.layers_skipped == skipped


@pytest.mark.slow
@pytest.mark.parametrize("measure", ["entropy", pytest.param("margin", marks=pytest.mark.slow)])
def test_an_audit_changes_no_value_and_a_small_budget_none_either(measure: Any) -> None:
    rule = LayerExit(first=2, threshold=0.9, settle=0.9, patience=1, measure=measure)
    gate = CGEE(levels="exit", exit_rule=rule)
    _, plain = search(gate)
    audited, heard = search(CGEE(levels="exit", exit_rule=rule, audit=True))
    _, squeezed = search(gate, budget="0.6")

    for other in (heard, squeezed):
        assert [e.values for e in other] == [e.values for e in plain]
        assert [e.exit_layer for e in other] == [e.exit_layer for e in plain]
    assert audited.metrics.audited_verifications == len(plain)
    full = {event.nodes: event.audited for event in heard}
    _, whole = search(CGEE(levels="exit", exit_rule=LayerExit(threshold=0.0)))
    first = whole[0]
    assert full[first.nodes] == first.values


def test_a_rule_that_never_holds_is_full_verification() -> None:
    _, plain = search("self")
    _, never = search(CGEE(levels="exit", exit_rule=LayerExit(threshold=0.0)))

    assert [e.values for e in never] == [e.values for e in plain]
