"""Thresholds of CGEE: what is recorded, which setting is chosen, where the file is used."""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run_cli import in_process

from arbor import Solver
from arbor.engine.early_exit import LayerExit
from arbor.errors import UsageError
from arbor.events import Event, Verified
from arbor.measure.calibrate_exit import (
    CONFIDENCES,
    GAPS,
    Recorder,
    Verification,
    calibrate_exit,
    collect_verifications,
)
from arbor.model.loading import ModelLocation
from arbor.run.setup import resolve_verifier
from arbor.tasks.game24 import Game24
from arbor.verifiers.cgee import CGEE
from arbor.verifiers.exact import Exact
from arbor.verifiers.exit_thresholds import ExitThresholds, load_thresholds, save_thresholds
from arbor.verifiers.self_eval import SelfEval
from arbor.verifiers.vote import Vote

pytestmark = pytest.mark.usefixtures("loaded_once")

LAYERS = 4


def verification(
    problem: int,
    confidence: float = 0.9,
    gap: float | None = 0.1,
    right: bool = True,
    uncertainties: tuple[float, ...] = (0.5, 0.1, 0.1),
    settles: int = 2,
) -> Verification:
    """Two candidates: the first has the larger p; full verification prefers it if `right`.

    After `settles` layers the questions have their final values, before that the opposite ones.
    """
    values = (0.8, 0.2) if right else (0.2, 0.8)
    early = [values if layers >= settles else values[::-1] for layers in range(1, LAYERS)]
    return Verification(
        problem, confidence, gap, 0, values, (0, 1), (uncertainties,) * 2, tuple(early)
    )


def tail(k: int, n: int, p: float) -> float:
    """P(at most k of n)."""
    return sum(math.comb(n, i) * p**i * (1 - p) ** (n - i) for i in range(k + 1))


def test_the_cheapest_safe_setting_is_chosen_and_its_bound_is_exact() -> None:
    # below 0.7 the confident candidate is often wrong; gaps say nothing
    found = [verification(i, 0.95, 0.1) for i in range(500)]
    found += [verification(500 + i, 0.65, 0.1, right=i % 2 == 0) for i in range(100)]

    chosen = calibrate_exit(found, risk=0.02, error=0.05)

    assert chosen.skip.setting == (0.7, 0.0)
    assert chosen.skip.saved == pytest.approx(500 / 600)
    assert (chosen.skip.disagreements, chosen.skip.n) == (0, 600)
    candidates = len(CONFIDENCES) * len(GAPS)
    assert chosen.skip.candidates == candidates
    assert tail(0, 600, chosen.skip.bound) == pytest.approx(0.05 / candidates)
    assert chosen.risk.confidence == 0.7


def test_a_looser_risk_accepts_disagreements() -> None:
    found = [verification(i, right=i % 50 > 0) for i in range(1000)]

    strict = calibrate_exit(found, risk=0.02).skip
    loose = calibrate_exit(found, risk=0.05).skip

    assert strict.setting is None and calibrate_exit(found, risk=0.02).risk.gap == 1.0
    assert (loose.saved, loose.disagreements) == (1.0, 20)
    assert tail(20, 1000, loose.bound) == pytest.approx(0.05 / loose.candidates)


def test_a_few_verifications_prove_nothing() -> None:
    found = [verification(i) for i in range(30)]

    chosen = calibrate_exit(found, risk=0.02)

    assert chosen.skip.setting is None and chosen.leave.setting is None
    assert chosen.risk == ExitThresholds()
    with pytest.raises(UsageError, match="calibrate-few"):
        calibrate_exit(found[:7])
    with pytest.raises(UsageError, match=r"setting-range.*risk=0"):
        calibrate_exit(found, risk=0)


def test_a_single_state_is_never_skipped() -> None:
    found = [verification(i, gap=None) for i in range(1000)]

    assert calibrate_exit(found).skip.setting is None


def test_layers_are_saved_where_the_values_have_settled() -> None:
    # one check after the other at 0.1: leaves after 3 of 4 layers with patience 1
    found = [verification(i) for i in range(1000)]
    hasty = [verification(i, uncertainties=(0.1, 0.1, 0.1), settles=3) for i in range(1000)]

    chosen = calibrate_exit(found)
    assert chosen.leave.setting is not None
    assert chosen.leave.setting.patience == 1
    # settle 1.1 leaves after 2 layers already, where the values are the final ones
    assert chosen.leave.saved == pytest.approx(2 / LAYERS)
    kept = calibrate_exit(hasty).leave
    assert kept.setting is not None and kept.saved == pytest.approx(1 / LAYERS)
    assert kept.disagreements == 0


@given(st.lists(st.sampled_from((0.05, 0.2, 0.6)), min_size=3, max_size=3), st.integers(1, 3))
def test_offline_exits_are_those_of_the_rule(values: list[float], patience: int) -> None:
    rule = LayerExit(2, 0.3, 0.2, patience)
    made = verification(0, uncertainties=tuple(values))

    ends = made.leaves_at(rule)

    def stable(at: int) -> bool:
        return values[at] < 0.3 and round(abs(values[at] - values[at - 1]), 4) < 0.2

    want = next(
        (
            at + 1
            for at in range(patience, 3)
            if at >= 1 and all(stable(at - back) for back in range(patience))
        ),
        LAYERS,
    )
    assert ends == [want, want]
    assert made.valued(ends) == (made.values if want == LAYERS else made.by_layer[want - 1])


def test_the_papers_thresholds_are_percentiles_of_thirty_problems() -> None:
    found = [verification(i, (i + 1) / 100, (i + 1) / 1000) for i in range(30)]
    found += [verification(30 + i, 1.0, 1.0, uncertainties=(0.9, 0.9, 0.9)) for i in range(20)]

    paper = calibrate_exit(found).paper

    assert paper.confidence == 0.23  # 23 of 30 are at or below it
    assert paper.gap == 0.008
    assert paper.exit_rule.threshold == 0.1  # where 0.5, 0.1, 0.1 first settles
    assert paper.exit_rule.patience == 1


# What is recorded is what a search would do


def test_a_recorded_search_says_where_the_same_search_would_leave() -> None:
    rule = LayerExit(2, 0.5, 0.1, 1)
    settings: dict[str, Any] = {"controller": "tot,width=3", "deterministic": True}
    heard: list[Event] = []
    with Solver(verifier=Recorder(), **settings) as solver:
        problems = list(itertools.islice(solver.task.problems("train"), 1))
        found = collect_verifications(solver, problems)
    with Solver(
        verifier=CGEE(levels="exit", exit_rule=rule, audit=True),
        listeners=[heard.append],
        **settings,
    ) as solver:
        solver.solve(problems[0])
    first = next(event for event in heard if isinstance(event, Verified))
    ends = found[0].leaves_at(rule)

    assert first.exit_layer == tuple(ends[row] - 1 for row in found[0].rows)
    assert min(ends) < first.layers
    assert first.values == pytest.approx(found[0].valued(ends), abs=1e-6)
    assert first.audited == pytest.approx(found[0].values, abs=1e-6)
    assert len(found[0].by_layer) == first.layers - 1


def test_votes_are_recorded_by_the_vote_of_each_candidate() -> None:
    with Solver(verifier=Recorder(Vote(choices=2)), controller="tot,width=3") as solver:
        found = collect_verifications(solver, itertools.islice(solver.task.problems("train"), 1))

    several = next(each for each in found if len(each.uncertainties) > 1)
    depth = len(several.by_layer) + 1
    ends = [2, *[depth] * (len(several.uncertainties) - 1)]
    valued = several.valued(ends)
    for value, row, early, full in zip(
        valued, several.rows, several.by_layer[1], several.values, strict=True
    ):
        assert value == (early if row == 0 else full)


def test_questions_have_to_be_known_at_once() -> None:
    class Silent:
        def inquire(self, task: Any, problem: Any, candidates: Any, encoder: Any) -> None:
            return None

    with (
        Solver(verifier=Recorder(Silent()), controller="tot,width=2") as solver,
        pytest.raises(UsageError, match="calibrate-exit"),
    ):
        collect_verifications(solver, [solver.task.parse("4 5 6 10")])


# The file


THRESHOLDS = ExitThresholds(0.8, 0.05, LayerExit(threshold=0.2, patience=1))
PAPER = ExitThresholds(0.6, 0.01, LayerExit(threshold=0.4))


def test_a_file_holds_the_thresholds_of_several_tasks(tmp_path: Path) -> None:
    path = tmp_path / "exit.json"
    save_thresholds(path, "game24", {"risk": THRESHOLDS, "paper": PAPER}, model="m")
    save_thresholds(path, "chains", {"risk": PAPER, "paper": PAPER}, model="m")

    assert load_thresholds(path, "game24") == THRESHOLDS
    assert load_thresholds(path, "game24", "paper") == PAPER
    assert load_thresholds(path, "chains") == PAPER
    assert load_thresholds(path, "recall") is None


@pytest.mark.parametrize(
    "text", ["", "{}", '{"schema": "arbor.exit/1", "tasks": {"game24": {"risk": {"gap": 1}}}}']
)
def test_a_broken_file_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "exit.json"
    path.write_text(text)

    with pytest.raises(UsageError, match="exit-unreadable"):
        load_thresholds(path, "game24")


def test_a_models_directory_brings_its_thresholds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = dataclasses.replace(Solver().checkpoint.source, path=str(tmp_path))
    save_thresholds(tmp_path / "exit.json", "game24", {"risk": THRESHOLDS, "paper": PAPER})

    def resolved(verifier: Any, source: ModelLocation = source) -> Any:
        return resolve_verifier(verifier, Game24(), source)

    assert resolved(CGEE()) == CGEE(confidence=0.8, gap=0.05, exit_rule=THRESHOLDS.exit_rule)
    by_paper = resolved(CGEE(calibration="paper", gap=0.3))
    assert (by_paper.confidence, by_paper.gap) == (0.6, 0.3)
    own = LayerExit(threshold=0.7)
    assert resolved(CGEE(exit_rule=own)).exit_rule == own
    assert resolved(SelfEval()) == SelfEval() and resolved(Exact()) == Exact()
    other = dataclasses.replace(source, path="Some/Model", revision="v1")
    assert resolved(CGEE(), other) == CGEE()
    monkeypatch.setenv("ARBOR_CACHE", str(tmp_path / "kept"))
    kept = tmp_path / "kept" / "exit" / "Some%2FModel"
    kept.mkdir(parents=True)
    save_thresholds(kept / "v1.json", "game24", {"risk": PAPER, "paper": PAPER})
    assert resolved(CGEE(), other).confidence == 0.6


def test_the_command_writes_a_file_that_is_read_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "exit.json"
    run = in_process(capsys)

    done = run(
        "calibrate", "exit", "--n", "8", "--controller", "tot,width=2", "--out", str(path),
        "--json",
    )  # fmt: skip

    assert done.code == 0, done.err
    written = done.document
    assert written["task"] == "game24" and written["problems"] == 8
    assert written["skip"]["candidates"] == len(CONFIDENCES) * len(GAPS)
    assert load_thresholds(path, "game24") == ExitThresholds(), "8 problems are too few"
    paper = load_thresholds(path, "game24", "paper")
    assert paper is not None and 0 < paper.confidence <= 1
    assert json.loads(path.read_text())["tasks"]["game24"]["provenance"]["risk"] == 0.02
