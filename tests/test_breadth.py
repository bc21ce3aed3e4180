"""Searches of problems in words are narrow unless they are given a breadth, and say how long they
may take."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from arbor import Solver
from arbor.cli import solve as estimate
from arbor.run.settings import NARROW, resolve_component, with_breadth
from arbor.tasks.game24 import Game24
from arbor.tasks.reasoning import Reasoning


@pytest.mark.parametrize("name", sorted(NARROW))
def test_a_search_in_words_is_narrower_by_default(name: str) -> None:
    narrow: Any = resolve_component("controller", with_breadth(name, Reasoning()), object)
    usual: Any = resolve_component("controller", with_breadth(name, Game24()), object)

    assert narrow.max_blocks(8) < usual.max_blocks(8)


def test_the_estimate_is_the_time_in_which_the_weights_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    info, boundary = Solver().describe(), Reasoning().boundary
    monkeypatch.setattr(estimate.timeit, "repeat", lambda *_, **__: [estimate._SAMPLE / 10e9])
    large = replace(info, parameters=1_500_000_000, weights_bytes=3_000_000_000)

    assert estimate.step_seconds(large) == pytest.approx(0.3)
    assert estimate.step_seconds(replace(large, weights="int8")) == pytest.approx(0.15)
    line = estimate.estimate_line(765, boundary, large, "auto")
    assert line.startswith(
        "at most 765 thoughts, 2,048 tokens a path · estimate: 0.3 s a token, 10 min"
    )
    assert estimate.estimate_line(765, boundary, info, "auto") == "", "a moment"
    assert estimate.estimate_line(765, boundary, large, "cuda:0") == ""


def test_a_search_is_not_ended_by_its_estimate(monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(*_: Any, **__: Any) -> list[float]:
        raise MemoryError

    monkeypatch.setattr(estimate.timeit, "repeat", none_left)
    info = replace(Solver().describe(), weights_bytes=3_000_000_000)

    assert estimate.estimate_line(765, Reasoning().boundary, info, "auto") == ""
