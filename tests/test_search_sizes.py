"""Measured sizes of searches: their arithmetic, their files, and what a ratio means with them."""

from __future__ import annotations

import json
import logging
import statistics
import sys
import threading
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.slow_cases import only

from arbor import Solver
from arbor.budget import Budget
from arbor.controllers.tot import ToT
from arbor.errors import BudgetInfeasible
from arbor.model.loading import BUILTIN
from arbor.run.full_retention import FullRetention
from arbor.run.search_sizes import (
    FILE,
    SearchKind,
    SearchSize,
    SearchSizes,
    read_sizes,
    sizes_text,
)
from arbor.support.cache_dir import cache_dir, search_sizes_file
from arbor.trace import read_trace

sys.path.append(str(Path(__file__).parents[1] / "scripts"))

from measure_sizes import KINDS, measure

pytestmark = pytest.mark.usefixtures("loaded_once")

PUZZLE = "4 5 6 10"
SMALL = ToT(beam=4, width=6)  # nothing is measured for it
KIND = SearchKind('{"name": "a"}', '{"name": "b"}', '{"name": "c"}', 32, 3)
SHIPPED = BUILTIN["sapling"] / FILE

names = st.text(max_size=8).map(lambda name: json.dumps({"name": name}))
kinds = st.builds(
    SearchKind,
    names,
    names,
    names,
    st.integers(1, 999),
    st.integers(1, 99),
    st.none() | st.integers(1, 99),
)
sizes = st.lists(st.integers(0, 10**6), min_size=1, max_size=30).map(SearchSize.of)


# The record


@given(st.lists(st.integers(0, 10**7), min_size=2, max_size=60))
def test_a_size_is_mean_deviation_and_range_of_its_searches(tokens: list[int]) -> None:
    size = SearchSize.of(tokens)

    assert (size.n, size.least, size.most) == (len(tokens), min(tokens), max(tokens))
    assert size.mean == pytest.approx(statistics.fmean(tokens), abs=1e-3)
    assert size.deviation == pytest.approx(statistics.stdev(tokens), rel=1e-6, abs=1e-3)
    assert size.least <= size.expected <= size.most


def test_one_search_is_a_size() -> None:
    assert SearchSize.of([7]) == SearchSize(1, 7.0, 0.0, 7, 7)


@pytest.mark.parametrize(
    "changed",
    [
        {"n": 0},
        {"mean": float("nan")},
        {"deviation": -1.0},
        {"deviation": float("inf")},
        {"least": 9},
        {"most": 6},
        {"most": 10**18},
    ],
)
def test_no_search_has_such_a_size(changed: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="not a measured size"):
        replace(SearchSize(2, 7.5, 0.7, 7, 8), **changed)


# The file


@given(st.dictionaries(kinds, sizes, max_size=5))
def test_a_file_gives_back_what_was_written(tmp_path_factory: Any, found: Any) -> None:
    path = tmp_path_factory.getbasetemp() / "sizes.json"
    path.write_text(sizes_text(found, model="m"), encoding="utf-8")

    assert read_sizes(path) == found


def test_a_kind_and_its_size_share_one_table() -> None:
    size = SearchSize.of([3, 5])

    assert KIND.to_dict().keys().isdisjoint(asdict(size))
    assert SearchKind.from_dict(KIND.to_dict() | asdict(size)) == KIND
    assert SearchSize.from_dict(KIND.to_dict() | asdict(size)) == size


def broken(**changed: Any) -> str:
    document = json.loads(sizes_text({KIND: SearchSize.of([3, 5])}))
    for name, value in changed.items():
        if value is None:
            del document["searches"][0][name]
        else:
            document["searches"][0][name] = value
    return json.dumps(document)


BROKEN = (
    "",
    "[]",
    "{}",
    "\x00",
    '{"schema": "arbor.search_sizes/9", "searches": []}',
    '{"schema": "arbor.search_sizes/1"}',
    '{"schema": "arbor.search_sizes/1", "searches": [3]}',
    "[" * 100_000,
    broken(n=None),
    broken(n=0),
    broken(n=True),
    broken(n="2"),
    broken(mean="4"),
    broken(mean=9.0),
    broken(most=1),
    broken(task="game24"),
    broken(step_tokens=0),
    broken(max_depth=1.5),
    broken(max_expansions="none"),
)


@pytest.mark.parametrize("text", BROKEN)
def test_a_damaged_file_is_no_measurement(text: str, caplog: pytest.LogCaptureFixture) -> None:
    path = search_sizes_file("Some/Model", None)
    path.parent.mkdir(parents=True)
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ValueError, match="holds no measured sizes"):
        read_sizes(path)
    with caplog.at_level(logging.WARNING):
        assert SearchSizes("Some/Model").expected(KIND) is None
    assert "it is ignored" in caplog.text
    SearchSizes("Some/Model").learn(KIND, 12)  # measured anew
    assert SearchSizes("Some/Model").expected(KIND) == SearchSize.of([12])


# Learning


def test_every_model_and_revision_learns_for_itself(tmp_path: Path) -> None:
    here, there = tmp_path / "here" / "model", tmp_path / "there" / "model"
    here.mkdir(parents=True), there.mkdir(parents=True)
    models = (("A/b", None), ("A/b", "v1"), ("A/c", None), (str(here), None), (str(there), None))
    for number, (model, revision) in enumerate(models, 1):
        SearchSizes(model, revision).learn(KIND, number)

    learned = [SearchSizes(*each).expected(KIND) for each in models]

    assert learned == [SearchSize.of([number]) for number in range(1, 6)]
    assert SearchSizes("A/b").expected(replace(KIND, max_depth=4)) is None


def test_an_answer_never_changes_while_a_solver_lives() -> None:
    early = SearchSizes("A/b")
    assert early.expected(KIND) is None
    early.learn(KIND, 5)

    assert early.expected(KIND) is None
    late = SearchSizes("A/b")
    assert late.expected(KIND) == SearchSize.of([5])
    late.learn(KIND, 9)
    assert late.expected(KIND) == SearchSize.of([5])
    assert SearchSizes("A/b").expected(KIND) == SearchSize.of([5, 9])


def test_a_ready_model_learns_nothing() -> None:
    SearchSizes("").learn(KIND, 5)

    assert SearchSizes("").expected(KIND) is None
    assert not cache_dir().exists()


def test_sizes_that_come_with_a_model_stay(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text(sizes_text({KIND: SearchSize.of([100])}), encoding="utf-8")
    other = replace(KIND, step_tokens=1)
    for kind in (KIND, other):
        SearchSizes(str(tmp_path)).learn(kind, 5)

    assert SearchSizes(str(tmp_path)).expected(KIND) == SearchSize.of([100])
    assert SearchSizes(str(tmp_path)).expected(other) == SearchSize.of([5])


def test_without_a_writable_cache_nothing_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    for folder in (tmp_path / "file", tmp_path / ("long" * 100)):
        monkeypatch.setenv("ARBOR_CACHE", str(folder))

        SearchSizes("A/b").learn(KIND, 5)

        assert SearchSizes("A/b").expected(KIND) is None


def test_searches_that_end_together_leave_a_whole_file() -> None:
    def many(number: int) -> None:
        for _ in range(30):
            SearchSizes("A/b").learn(replace(KIND, max_depth=number), number)

    threads = [threading.Thread(target=many, args=(number,)) for number in range(1, 5)]
    for thread in threads:
        thread.start()
    for _ in range(100):
        read_sizes(search_sizes_file("A/b", None))  # raises on half a file
    for thread in threads:
        thread.join()

    found = read_sizes(search_sizes_file("A/b", None))
    assert found and all(size.least == size.most == kind.max_depth for kind, size in found.items())
    assert [each.name for each in search_sizes_file("A/b", None).parent.iterdir()] == ["main.json"]


# A ratio in a search


def test_a_ratio_of_the_built_in_search_evicts() -> None:
    with Solver(budget=0.25) as solver:
        plan, solution = solver.plan(PUZZLE), solver.solve(PUZZLE)

    assert plan.expected_tokens is not None and plan.searches >= 20
    assert plan.budget_tokens == plan.expected_tokens // 4 < plan.full_tokens // 4
    assert solution.budget_reached and solution.metrics.evicted_tokens > 0
    assert solution.metrics.peak_tokens <= plan.budget_tokens


def test_until_something_is_measured_a_ratio_is_a_part_of_the_worst_case() -> None:
    with Solver(controller=SMALL, budget=0.5) as first:
        before = first.plan(PUZZLE)
        solution = first.solve(PUZZLE)
        assert first.plan(PUZZLE) == before, "its own search changes nothing"
    after = Solver(controller=SMALL, budget=0.5).plan(PUZZLE)

    assert (before.expected_tokens, before.budget_tokens) == (None, before.full_tokens // 2)
    assert first.config["budget"] == solution.config["budget"] == "0.5max"
    assert after.searches == 1 and after.expected_tokens is not None
    assert after.prompt_tokens < after.expected_tokens < after.full_tokens
    assert after.full_tokens == before.full_tokens
    assert after.budget_tokens == max(1, after.expected_tokens // 2)


def learned(**settings: Any) -> int:
    """Measured searches after one run."""
    run = {name: settings.pop(name) for name in ("max_tokens", "timeout") if name in settings}
    with Solver(controller=SMALL, **settings) as solver:
        solver.solve(PUZZLE, **run)
    return Solver(controller=SMALL, **settings).plan(PUZZLE).searches


@pytest.mark.slow
def test_only_searches_that_end_by_their_own_rules_are_measured() -> None:
    assert learned(step_format=r"regex:[\x20-\x7e]*") == 0
    assert learned(max_tokens=3) == 0
    assert learned(timeout=0) == 0
    assert learned(mode="lossy", budget="120tok") == 0
    assert learned(max_expansions=2) == 1
    assert learned() == 1
    assert learned(seed=1) == 2


def test_every_budget_measures_what_full_retention_of_the_search_holds() -> None:
    full = FullRetention()
    assert learned(deterministic=True, listeners=(full,)) == 1
    assert learned(deterministic=True, budget="115tok") == 2

    (size,) = read_sizes(next((cache_dir() / "search_sizes").glob("*/*.json"))).values()
    question = Solver(controller=SMALL).plan(PUZZLE).question_tokens
    assert (size.n, size.mean, size.deviation) == (2, full.peak + question, 0.0)


def test_what_a_run_wrote_down_repeats_its_slots(tmp_path: Path) -> None:
    path = tmp_path / "run.arbor.jsonl"
    with Solver(controller=SMALL) as solver:
        solver.solve(PUZZLE)
    with Solver(controller=SMALL, budget=0.8) as solver:
        solver.solve(PUZZLE, trace=path)
    header = read_trace(path).header
    assert header is not None
    with Solver(controller=SMALL) as solver:  # what is measured now is something else
        solver.solve("1 2 3 4", seed=5)

    again = Solver.from_config(header.config)

    assert header.config["budget"].startswith("0.8 of prompt+")
    assert header.kv["budget_tokens"] == header.kv["expected_tokens"] * 8 // 10
    assert again.plan(PUZZLE).budget_tokens == header.kv["budget_tokens"]
    assert again.config == header.config
    assert Solver(controller=SMALL, budget=0.8).config != again.config


@pytest.mark.parametrize("budget", only(["0.6max"], ["full", "200tok", "0.6max"]))
def test_a_header_has_no_expectation_where_the_budget_is_no_part_of_it(
    budget: str, tmp_path: Path
) -> None:
    headers = []
    for number in range(2):
        path = tmp_path / f"{number}.arbor.jsonl"
        with Solver(controller=SMALL, budget=budget) as solver:
            solver.solve(PUZZLE, trace=path)
        headers.append(read_trace(path).header)

    first, second = headers
    assert first is not None and second is not None
    assert first.kv == second.kv and "expected_tokens" not in first.kv
    assert first.config["budget"] == second.config["budget"] == budget


def test_a_ratio_below_one_path_names_the_ratio_that_works() -> None:
    solver = Solver()
    with pytest.raises(BudgetInfeasible) as caught:
        solver.plan(PUZZLE, budget=0.05)

    smallest = solver.plan(PUZZLE).smallest_ratio
    assert f"Smallest workable: {smallest:g} or " in caught.value.hint
    assert "of an expected" in caught.value.hint
    assert solver.plan(PUZZLE, budget=smallest).budget_tokens >= caught.value.needed
    with pytest.raises(BudgetInfeasible):
        solver.plan(PUZZLE, budget=smallest - 0.02)


# What is shipped


def test_the_built_in_model_comes_with_the_searches_that_are_named() -> None:
    shipped = read_sizes(SHIPPED)

    for task, controller, verifier in KINDS:
        solver = Solver(task=task, controller=controller, verifier=verifier)
        size = shipped[solver._setup.kind]
        assert size.n >= 20 and 0 < size.least <= size.most < solver.plan().full_tokens
    assert len(shipped) == len(KINDS)


def test_its_file_is_in_the_form_that_is_written() -> None:
    text = SHIPPED.read_text(encoding="utf-8")

    assert sizes_text(read_sizes(SHIPPED), **json.loads(text)["provenance"]) == text


@pytest.mark.parametrize("task", ["game24", "chains"])
def test_measuring_again_gives_sizes_in_the_range_that_is_shipped(task: str) -> None:
    kind, found = measure(3, task=task, controller="chain", verifier="self")

    size = read_sizes(SHIPPED)[kind]
    assert all(size.least <= each <= size.most for each in found)


def test_an_open_ratio_is_settled_by_a_measurement() -> None:
    ratio = Budget.parse(0.25)

    assert ratio.open and not ratio.resolved(None).open and not ratio.resolved(9).open
    assert str(ratio.resolved(None)) == "0.25max"
    assert str(ratio.resolved(677)) == "0.25 of prompt+677"
    for text in ("full", "0.25max", "8tok", "1GiB", "0.25 of prompt+7"):
        assert Budget.parse(text).resolved(677) == Budget.parse(text)
