"""Questions that leave between the layers: the rule, the logits they leave with, what stays."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import ARCHITECTURES, build
from support.slow_cases import every
from support.trees import Lab, grown, leaves_of, relative_error
from torch import Tensor

from arbor import Solver
from arbor.engine.early_exit import Exiting, LayerExit
from arbor.events import Event, Forwarded, Rehydrated, Verified
from arbor.kernels.linear import pack_linears
from arbor.kernels.rowwise import RowwiseAttention
from arbor.kernels.torch_cascade import TorchCascade
from arbor.memory.pool import KVPool
from arbor.model.plan import Segment, plan_forward
from arbor.model.runner import ModelRunner
from arbor.verifiers.cgee import CGEE

pytestmark = pytest.mark.usefixtures("loaded_once")

LAYERS = 3  # of the small models
NEVER = LayerExit(threshold=0.0)
# leaves after so many layers, whatever the state: a check before it, and entropy is at most 1
AFTER = {n: LayerExit(first=n, threshold=9.0, settle=9.0, patience=1) for n in (2, 3)}
NAMES = ("llama", "qwen3", "mistral_window", "gemma2", "gemma3_text", "granite", "cohere2", "gpt2")
TOLERANCE = 2e-6
SQUEEZED = 31


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


# Unembedding


def path_plan(runner: ModelRunner, rows: int) -> Any:
    slots = torch.arange(rows, dtype=torch.int32).numpy()
    ids = [3 + row for row in range(rows)]
    segment = Segment((), ids, slots.astype("int64"), slots, slots, rows)
    return plan_forward([segment]), KVPool(runner.layer_kv, rows, runner.dtype, runner.device)


@pytest.mark.parametrize("name", every(3, sorted(set(ARCHITECTURES) - {"gemma3n_text"})))
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

    early = lab.ask_early(nodes, asked, AFTER[2])

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
        early = lab.ask_early(nodes, asked, rule)
        assert torch.equal(early.logits, whole)
        assert early.layers == (LAYERS,) * len(nodes)
        assert early.full is None


def test_questions_of_several_searches_leave_by_their_own_rules() -> None:
    lab = laboratory("qwen3")
    tree, _ = grown(lab)
    nodes, asked = questions(tree)
    lab.events.clear()
    operations = [
        lab.begin_ask(nodes, asked, AFTER[2]),
        lab.begin_ask(nodes, asked),
        lab.begin_ask(nodes, asked, LayerExit(threshold=9.0, settle=9.0, first=2, patience=1,
                      measure="margin"), [[1, 2]] * len(nodes)),
    ]  # fmt: skip
    while not all(operation.done for operation in operations):
        lab.step()

    forwards = [e for e in lab.events if isinstance(e, Forwarded) and e.kind == "verify"]
    assert len(forwards) == 1, "they ran together"
    left, whole, by_margin = (operation.result() for operation in operations)
    assert relative_error(left, truncated(lab, 2, nodes, asked)) < TOLERANCE
    assert torch.equal(by_margin, left)
    assert relative_error(whole, truncated(lab, LAYERS, nodes, asked)) < TOLERANCE


def deterministic(name: str) -> Lab:
    model = build(name)
    pack_linears(model, deterministic=True)
    lab = Lab(model, RowwiseAttention())
    lab.runner.deterministic = True
    return lab


@pytest.mark.parametrize("measure", ["entropy", "margin"])
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_deterministic_answers_do_not_depend_on_the_batch(name: str, measure: Any) -> None:
    lab = deterministic(name)
    tree, _ = grown(lab)
    nodes, asked = questions(tree)
    verdicts = [[3, 8, 12]] * len(nodes)
    probe = lab.ask_early(nodes, asked, LayerExit(threshold=0.0, patience=1, measure=measure), verdicts, audit=True)  # fmt: skip
    assert probe.layers == (LAYERS,) * len(nodes)
    begun = lab.begin_ask(nodes, asked, LayerExit(threshold=0, patience=1, measure=measure), verdicts)  # fmt: skip
    while not begun.done:
        lab.step()
    between = sorted(each.values[-1] for each in begun.exits)[len(nodes) // 2]
    rule = LayerExit(threshold=between, settle=9.0, patience=1, measure=measure)

    together = lab.ask_early(nodes, asked, rule, verdicts)
    audited = lab.ask_early(nodes, asked, rule, verdicts, audit=True)

    assert len(set(together.layers)) == 2
    for place, (node, question) in enumerate(zip(nodes, asked, strict=True)):
        alone = lab.ask_early([node], [question], rule, verdicts[:1])
        assert alone.layers[0] == together.layers[place]
        assert torch.equal(alone.logits[0], together.logits[place])
    assert audited.layers == together.layers
    assert torch.equal(audited.logits, together.logits)
    assert audited.full is not None and torch.equal(audited.full, lab.ask(nodes, asked))


def test_an_interrupted_forward_forgets_its_checks() -> None:
    lab = laboratory("llama")
    tree, _ = grown(lab)
    nodes, asked = questions(tree)
    unembed = lab.runner.unembed
    calls = []

    def failing(state: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        calls.append(len(state))
        if len(calls) == 2:
            raise KeyboardInterrupt
        return unembed(state, *args, **kwargs)

    lab.runner.unembed = failing  # type: ignore[method-assign]
    try:
        with pytest.raises(KeyboardInterrupt):
            lab.ask_early(nodes, asked, AFTER[2])
    finally:
        del lab.runner.unembed
    lab.memory.check()

    assert lab.ask_early(nodes, asked, AFTER[2]).layers == (2,) * len(nodes)


# In a search


def search(verifier: Any, **settings: Any) -> tuple[Any, list[Verified]]:
    heard: list[Event] = []
    with Solver(
        controller="tot,width=3", verifier=verifier, listeners=[heard.append],
        deterministic=True, debug=True, **settings,
    ) as solver:  # fmt: skip
        found = solver.solve("4 5 6 10")
    return found, [event for event in heard if isinstance(event, Verified)]


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
