"""The window of LazyEviction, measured on solved problems."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
from support.run_cli import in_process

from arbor import Solver
from arbor.components import build
from arbor.errors import UsageError
from arbor.papers.lazyeviction.calibrate import Recurrence, calibrate_window
from arbor.retention.alpha import save_alpha, with_alpha
from arbor.retention.token_statistics import TokenStatistics
from arbor.tasks.base import Problem
from arbor.tasks.splits import dataset_split_of

ALPHA = 0.02


def solver(threshold: float = ALPHA) -> Solver:
    return Solver(
        task="chains", controller="chain", policy=f"lazyeviction,threshold={threshold}", seed=3
    )


@pytest.fixture(scope="module")
def intervals() -> list[int]:
    """The longest interval of each token of two problems, from the attention of every forward."""
    longest: list[int] = []
    seen: dict[tuple[int, int], list[tuple[int, float]]] = {}
    right = TokenStatistics.observe

    def observe(self: TokenStatistics, owner: Any, position: Any, mass: Any, queries: Any) -> None:
        for row, at, received, count in zip(owner, position, mass, queries, strict=True):
            seen.setdefault((int(row), int(at)), []).append((int(count), received / count))
        right(self, owner, position, mass, queries)

    with solver() as running, mock.patch.object(TokenStatistics, "observe", observe):
        for problem in itertools.islice(running.task.problems("train"), 2):
            seen.clear()
            solution = running.solve(problem)
            for node_id in solution.path:
                node = running.engine.tree[node_id]
                for at in range(node.start, node.end):
                    longest.append(brute_force(seen.get((node.row, at), [])))
    return longest


def brute_force(forwards: list[tuple[int, float]]) -> int:
    """MRI of one token: the most queries between two forwards that gave it enough attention."""
    clock = np.cumsum([count for count, _ in forwards])
    times = [clock[0]] if len(clock) else []
    times += [now for now, (_, mean) in zip(clock[1:], forwards[1:], strict=True) if mean >= ALPHA]
    return int(max(np.diff(times), default=0))


@pytest.mark.slow
def test_intervals_are_those_of_the_attention_of_every_forward(intervals: list[int]) -> None:
    with solver() as running:
        found = calibrate_window(
            running, itertools.islice(running.task.problems("train"), 2), 80, (ALPHA,)
        )

    again = [each for each in intervals if each]
    assert (found.problems, found.tokens) == (2, len(intervals))
    assert found.read_again == pytest.approx(len(again) / len(intervals))
    assert found.window == found.intervals[80] == np.percentile(again, 80, method="higher")
    assert (
        found.intervals[50]
        <= found.intervals[80]
        <= found.intervals[95]
        == np.percentile(again, 95, method="higher")
    )
    assert 0.2 < found.heavy < 1


def test_the_command_solves_the_calibration_split_of_a_file(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    names = [f"{i} boxes of 3 pens: how many pens?" for i in range(60)]
    lines = [json.dumps({"question": each, "answer": "#### 6"}) for each in names]
    (tmp_path / "gsm8k.jsonl").write_text("\n".join(lines), encoding="utf-8")
    solved: list[Problem] = []

    def calibrate(
        solver: Solver, problems: list[Problem], percentile: float, alphas: Any
    ) -> Recurrence:
        solved.extend(problems)
        return Recurrence(2e-4, 9, percentile, len(problems), 90, 0.5, {2e-4: 0.97}, {50: 9}, 0.5)

    monkeypatch.setattr("arbor.papers.lazyeviction.calibrate.calibrate_window", calibrate)
    words = ["calibrate", "window", str(tmp_path / "gsm8k.jsonl"), "--task", "gsm8k", "--n", "8"]
    words += ["--out", str(tmp_path / "alpha.json")]
    result = in_process(capsys)(*words, "--json")

    assert result.code == 0, result.err
    expected = [name for name in names if dataset_split_of(name) == "calibration"]
    assert [each.text for each in solved] == expected[:8]
    assert {each.expected for each in solved} == {"6"}, "the task has read them"
    ready = with_alpha(build("policy", "raas"), tmp_path / "alpha.json")
    assert ready.protect.threshold == 2e-4, "policies read the file"
    assert result.document["dataset"] == str(tmp_path / "gsm8k.jsonl")


@pytest.mark.slow
def test_alpha_is_the_smallest_at_which_most_tokens_recur_and_else_the_best() -> None:
    with solver() as running:
        problems = list(itertools.islice(running.task.problems("train"), 2))
        found = calibrate_window(running, problems, 80, (1e-4, 1e-3, 4e-3, 0.5))
        alone = calibrate_window(running, problems, 80, (4e-3,))

    assert found.recurring[1e-4] < 0.95 < found.recurring[4e-3]
    assert found.alpha == next(a for a, share in found.recurring.items() if share > 0.95)
    assert found.recurring[4e-3] == alone.recurring[4e-3]
    with solver() as running:
        none = calibrate_window(running, problems, 80, (1e-4, 0.02))
    assert none.alpha == max(none.recurring, key=lambda alpha: none.recurring[alpha])


@pytest.mark.parametrize(
    ("policy", "alpha"), [("raas", 0.002), ("raas,threshold=0.003", 0.003), ("h2o", 1e-4)]
)
def test_policies_that_ask_when_tokens_were_read_take_alpha_from_the_models_file(
    tmp_path: Path, policy: str, alpha: float
) -> None:
    save_alpha(tmp_path / "alpha.json", 0.002, {"task": "chains"})
    ready = build("policy", policy)

    assert with_alpha(ready, tmp_path / "alpha.json").protect.threshold == alpha
    assert with_alpha(build("policy", "raas"), None).protect.threshold == 1e-4


@pytest.mark.parametrize("text", ["{}", '{"schema": "arbor.alpha/1", "alpha": 7}', "no JSON"])
def test_a_damaged_file_of_alpha_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "alpha.json").write_text(text, encoding="utf-8")

    with pytest.raises(UsageError, match="alpha-unreadable"):
        with_alpha(build("policy", "lazyeviction"), tmp_path / "alpha.json")
