"""Token-level beam search: transformers' results, within the budget, without a copy of KV."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.models import build, path_logits
from support.slow_cases import every
from support.trees import PROMPT, Lab

from arbor import Solver, UsageError
from arbor.engine.beam_search import BeamGroup, BeamSettings, EarlyStopping, Hypothesis
from arbor.errors import BudgetInfeasible, ModelError
from arbor.tree import ThoughtTree

EARLY: dict[EarlyStopping, Any] = {"first": True, "heuristic": False, "never": "never"}
CPU = torch.device("cpu")


def by_transformers(
    model: Any, prompt: Sequence[int], settings: BeamSettings, ends: tuple[int, ...]
) -> list[tuple[list[int], float]]:
    """Tokens up to the end, and scores, of every beam that `generate` returns."""
    out = model.generate(
        torch.tensor([list(prompt)]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        num_beams=settings.beams,
        num_return_sequences=settings.beams,
        max_new_tokens=settings.max_tokens,
        length_penalty=settings.length_penalty,
        early_stopping=EARLY[settings.early_stopping],
        do_sample=False,
        eos_token_id=list(ends) or None,
        pad_token_id=0,
        return_dict_in_generate=True,
        output_scores=True,
    )
    found = []
    for row, score in zip(out.sequences.tolist(), out.sequences_scores.tolist(), strict=True):
        tokens = row[len(prompt) :]
        end = next((i + 1 for i, token in enumerate(tokens) if token in ends), len(tokens))
        found.append((tokens[:end], score))
    return found


def searched(
    model: Any,
    settings: BeamSettings,
    ends: tuple[int, ...] = (),
    prompt: Sequence[int] = PROMPT,
    slots: int = 1000,
) -> tuple[list[Hypothesis], Lab]:
    lab = Lab(model, debug=True)
    lab.open(ThoughtTree(prompt), slots)
    return lab.search_beams(settings, ends), lab


def agree(got: Sequence[Hypothesis], want: Sequence[tuple[Sequence[int], float]]) -> bool:
    return [list(each.tokens) for each in got] == [list(tokens) for tokens, _ in want] and all(
        abs(each.score - score) < 1e-4 for each, (_, score) in zip(got, want, strict=True)
    )


# What is found

ENDS = ((), (5,), (5, 9, 12, 40, 41, 42))
GRID = list(itertools.product((2, 3, 8), ENDS, (0.0, 1.0, -0.5, 2.0), EARLY))


@pytest.mark.parametrize(
    ("beams", "ends", "penalty", "early"),
    every(
        4,
        [
            pytest.param(*case, marks=[pytest.mark.slow] * bool(place % 5), id=f"case{place}")
            for place, case in enumerate(GRID)
        ],
    ),
)
def test_it_finds_what_transformers_finds(
    beams: int, ends: tuple[int, ...], penalty: float, early: EarlyStopping
) -> None:
    settings = BeamSettings(beams=beams, max_tokens=9, length_penalty=penalty, early_stopping=early)
    want = by_transformers(build("llama"), PROMPT, settings, ends)
    got, _ = searched(build("llama"), settings, ends)

    assert agree(got, want)


# Diverse beams, by a reading of the paper that knows nothing of tensors


def diverse(
    model: Any, prompt: Sequence[int], beams: int, groups: int, strength: float, length: int
) -> list[tuple[list[int], float]]:
    """Diverse beam search (arXiv 1610.02424, algorithm 1) with Hamming diversity, by lists."""
    size = beams // groups
    every: list[list[tuple[list[int], float]]] = [[([], 0.0)] for _ in range(groups)]
    for _ in range(length):
        chosen: list[int] = []
        for g in range(groups):
            options = []
            for tokens, score in every[g]:
                logits = path_logits(model, [*prompt, *tokens])[-1]
                for token, each in enumerate(torch.log_softmax(logits, -1).tolist()):
                    penalty = strength * chosen.count(token)
                    options.append(([*tokens, token], score + each - penalty))
            every[g] = sorted(options, key=lambda option: -option[1])[:size]
            chosen += [tokens[-1] for tokens, _ in every[g]]
    found = [(tokens, score / length) for group in every for tokens, score in group]
    return sorted(found, key=lambda each: -each[1])


@pytest.mark.parametrize(("groups", "strength"), [(2, 0.0), (2, 0.7), (3, 0.4), (6, 2.0)])
def test_diverse_beams_are_those_of_the_paper(groups: int, strength: float) -> None:
    settings = BeamSettings(beams=6, max_tokens=4, groups=groups, diversity=strength)
    got, _ = searched(build("llama"), settings)

    assert agree(got, diverse(build("llama"), PROMPT, 6, groups, strength, 4))


# Selection alone


@given(
    st.integers(1, 5),
    st.sampled_from(list(EARLY)),
    st.sampled_from([-1.0, 0.0, 1.0]),
    st.integers(0, 1000),
)
def test_finished_hypotheses_are_the_best_that_ended(
    count: int, early: EarlyStopping, penalty: float, seed: int
) -> None:
    settings = BeamSettings(beams=count, max_tokens=6, length_penalty=penalty, early_stopping=early)
    group = BeamGroup(count, settings, (0, 1), CPU)
    generator = torch.Generator().manual_seed(seed)
    steps = 0
    while not group.over:
        steps += 1
        logits = 2 * torch.randn(count, 12, generator=generator)
        parents = group.choose(torch.log_softmax(logits, -1))
        assert parents.min() >= 0 and parents.max() < count
        rows = {tuple(tokens) for tokens in group.tokens.tolist()}
        assert len(rows) == count or steps == 1
        assert not np.isin(group.tokens, (0, 1)).any() or steps == 6
    found = group.hypotheses()

    assert steps <= 6
    assert len(found) == count
    scores = [each.score for each in found if each.finished]
    assert scores == sorted(scores, reverse=True)
    for each in found:
        assert not {0, 1} & set(each.tokens[:-1])
        assert not each.finished or each.tokens[-1] in (0, 1) or len(each.tokens) == 6


# KV


def test_a_fork_copies_nothing_and_every_slot_is_given_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = Lab(build("llama"), debug=True)
    tree = ThoughtTree(PROMPT)
    lab.open(tree, 1000)
    held: list[int] = []
    lab.listener = lambda event: None
    right = lab.runner.forward

    def forward(*args: Any, **kwargs: Any) -> Any:
        held.append(lab.memory.used - len(PROMPT))
        return right(*args, **kwargs)

    monkeypatch.setattr(lab.runner, "forward", forward)
    settings = BeamSettings(beams=8, max_tokens=10)
    found = lab.search_beams(settings, ())

    distinct = {each.tokens[:n] for each in found for n in range(1, 10)}
    assert held[0] == 0 and held[1] == 8
    assert all(count <= 8 * step for step, count in enumerate(held))
    assert len(distinct) <= held[-1] < 8 * 9, "hypotheses share the tokens that they have in common"
    assert lab.memory.used == len(PROMPT)
    assert tree.root.span.exact.all()


def test_a_failed_forward_gives_every_slot_back(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Lab(build("llama"), debug=True)
    tree = ThoughtTree(PROMPT)
    lab.open(tree, 200)
    right, calls = lab.runner.forward, itertools.count()

    def fail(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == 3:
            raise RuntimeError("broken")
        return right(*args, **kwargs)

    with monkeypatch.context() as patched:
        patched.setattr(lab.runner, "forward", fail)
        with pytest.raises(RuntimeError, match="broken"):
            lab.search_beams(BeamSettings(beams=3, max_tokens=50), ())
    assert lab.memory.used == len(PROMPT)
    assert lab.search_beams(BeamSettings(beams=3, max_tokens=5), ())


# The solver and the command


@pytest.fixture(scope="module")
def solver() -> Any:
    with Solver() as made:
        made.load()
        yield made


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"beams": 0}, "at least 1"),
        ({"beams": 2.5}, "beams is 2.5"),
        ({"max_tokens": None}, "at least 1"),
        ({"beams": 4, "groups": 3}, "a number of beams that groups divides"),
        ({"diversity": 1.0}, "Set groups as well"),
        ({"groups": 2, "diversity": -1.0}, "from 0 to 1,000,000"),
        ({"length_penalty": float("nan")}, "from -10 to 10"),
        ({"length_penalty": 1e308}, "from -10 to 10"),
        ({"early_stopping": "always"}, "first, heuristic, never"),
    ],
)
def test_invalid_settings_are_named_with_what_works(
    solver: Solver, settings: dict[str, Any], says: str
) -> None:
    with pytest.raises(UsageError, match=says):
        solver.generate("4 5 6 10", **settings)


def test_a_staging_buffer_takes_its_part_of_the_budget_and_changes_nothing_else() -> None:
    tiers = {"host": "4000tok", "staging": "64tok"}
    with Solver(budget="200tok", **tiers) as staged, Solver() as plain:
        for budget in ("10000tok", 1.0, "200tok"):
            found = staged.generate("hi", beams=2, max_tokens=40, budget=budget)
            assert found == plain.generate("hi", beams=2, max_tokens=40)
        with pytest.raises(BudgetInfeasible) as caught:
            staged.generate("hi", beams=2, max_tokens=40, budget="60tok")
        least = caught.value.needed
        assert staged.generate("hi", beams=2, max_tokens=1, budget=f"{least}tok")


def test_the_budget_that_a_refusal_names_works() -> None:
    with Solver() as solver:
        for budget in ("5tok", "17tok"):
            with pytest.raises(BudgetInfeasible) as caught:
                solver.generate("4 5 6 10", beams=6, max_tokens=7, budget=budget)
            enough = f"{caught.value.needed}tok"
            assert solver.generate("4 5 6 10", beams=6, max_tokens=7, budget=enough)


def test_there_are_no_more_continuations_than_the_vocabulary_has() -> None:
    with Solver() as solver:
        every = len(solver.tokenizer)
        found = solver.generate("1", beams=every + 5, max_tokens=1)

    assert len(found) <= every
    assert min(each.score for each in found) > -1000
    assert len({each.tokens for each in found}) == len(found)


def test_logits_that_are_not_finite_end_what_is_no_search_too() -> None:
    with Solver() as solver:
        weights = dict(solver.checkpoint.load().runner.model.named_parameters())
        name = [each for each in weights if "norm" in each][-1]
        solver.update_weights({name: torch.full_like(weights[name], 3e38)})
        with pytest.raises(ModelError, match="logits-not-finite"):
            solver.generate("4", max_tokens=3)
        with pytest.raises(ModelError, match="logits-not-finite"):
            solver.logprobs([([5, 6], [7])])
