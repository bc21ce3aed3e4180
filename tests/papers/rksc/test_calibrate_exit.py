"""Thresholds of CGEE: what is recorded, which setting is chosen, where the file is used."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.run_cli import in_process

from arbor import Solver
from arbor.components import build
from arbor.errors import UsageError
from arbor.events import Event, Verified
from arbor.model.loading import ModelLocation
from arbor.papers.rksc.calibration import (
    CONFIDENCES,
    GAPS,
    Recorder,
    Verification,
    calibrate_exit,
    collect_verifications,
)
from arbor.papers.rksc.cgee import CGEE
from arbor.papers.rksc.exit_thresholds import ExitThresholds, LayerExit, save_thresholds
from arbor.run.setup import resolve_verifier
from arbor.tasks.game24 import Game24
from arbor.verifiers.combined import Combined
from arbor.verifiers.exact import Exact
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


# The file


THRESHOLDS = ExitThresholds(0.8, 0.05, LayerExit(threshold=0.2, patience=1))
PAPER = ExitThresholds(0.6, 0.01, LayerExit(threshold=0.4))


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
    for own in (LayerExit(threshold=0.7), LayerExit()):
        assert resolved(CGEE(exit_rule=own)).exit_rule == own
    given = build("verifier", "cgee,levels=exit,threshold=0.3")
    assert resolved(given).exit_rule == LayerExit(), "0.3 is the default, and was asked for"
    assert resolved(CGEE(Vote())) == CGEE(Vote()), "they are those of the verifier self"
    both = resolved(Combined(parts=(CGEE(), Exact())))
    assert both == Combined(parts=(resolved(CGEE()), Exact()))
    assert resolved(SelfEval()) == SelfEval() and resolved(Exact()) == Exact()
    other = dataclasses.replace(source, path="Some/Model", revision="v1")
    assert resolved(CGEE(), other) == CGEE()
    monkeypatch.setenv("ARBOR_CACHE", str(tmp_path / "kept"))
    kept = tmp_path / "kept" / "exit" / "Some%2FModel"
    kept.mkdir(parents=True)
    save_thresholds(kept / "v1.json", "game24", {"risk": PAPER, "paper": PAPER})
    assert resolved(CGEE(), other).confidence == 0.6


# The command


def refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str
) -> Any:
    """The error of ``arbor calibrate exit``, before a problem is solved."""
    monkeypatch.setattr(Solver, "solve", lambda *_: pytest.fail("a problem was solved"))
    ran = in_process(capsys)("calibrate", "exit", *words, "--json")
    assert ran.code == 2
    return ran.document["error"]


@pytest.mark.parametrize("out", [(), ("--out", "exit.json")], ids=["by default", "named"])
def test_a_damaged_file_is_refused_before_anything_is_solved(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    out: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "exit.json").write_text("{bad")

    error = refused(capsys, monkeypatch, *out)
    assert error["code"] == "exit-unreadable" and error["hint"].startswith("Delete it")


@pytest.mark.parametrize(
    ("command", "file"), [("exit", "exit"), ("msve", "msve"), ("window", "alpha")]
)
def test_a_default_file_that_cannot_be_written_is_refused_before_anything_is_solved(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    command: str,
    file: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / f"{file}.json").mkdir()
    monkeypatch.setattr(Solver, "solve", lambda *_: pytest.fail("a problem was solved"))

    ran = in_process(capsys)("calibrate", command, "--json")
    assert (ran.code, ran.document["error"]["code"]) == (2, "output-nowhere")


@pytest.mark.parametrize("option", ["--risk", "--error"])
def test_a_certain_risk_is_refused_before_anything_is_solved(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, option: str
) -> None:
    message = refused(capsys, monkeypatch, option, "1")["message"]
    assert option in message and "> 0 and < 1" in message


def test_a_controller_that_verifies_nothing_is_named() -> None:
    with Solver(controller="chain", max_depth=1, step_tokens=2, verifier=Recorder()) as solver:
        problems = itertools.islice(solver.task.problems("train"), 20)
        with pytest.raises(UsageError, match="'chain' verifies nothing: 8 problems"):
            collect_verifications(solver, problems)
