"""Hostile texts as problems, answer keys and settings: a correct search, or one clear error."""

from __future__ import annotations

import io
import json
import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.hostile import CHARACTERS, LONG, MARKUP, OBEYED, TERMINAL, hostile

from arbor import Solver
from arbor.cli import main
from arbor.controllers.chain import Chain
from arbor.errors import ArborError, InputError, UsageError
from arbor.tasks.base import Problem
from arbor.tasks.chains import Chains
from arbor.tasks.countdown import Countdown
from arbor.tasks.game24 import Game24
from arbor.tasks.reasoning import Reasoning
from arbor.tasks.recall import Recall

pytestmark = pytest.mark.usefixtures("loaded_once")

TASKS = (Game24(), Countdown(), Chains(), Recall(), Reasoning())
MILLION = "x" * 10**6
TEXTS = (
    *(*MARKUP, *TERMINAL, *CHARACTERS, *LONG, MILLION, "4 " * 500_000),
    *("4 5 6 10\0", "4 5 6 1\u0660", "4\u202e 5 6 10", "\x1b[31m4 5 6 10", "4 5 6 10\ud800"),
    "Rooms: " + "A has B. " * 50_000 + "Find B from A",
    "Facts: " + "Tom has 4 more than Amy. " * 20_000 + "How many does Tom have?",
    f"Facts: {MILLION}. Amy has 3. How many does Amy have?",
    f"Rooms: {MILLION}. B is empty. Find B from K",
    f"4 5 6 {MILLION}",
    f"4 5 6 {'9' * 5000}",
)
SEEDS = 300


@pytest.fixture(scope="module")
def solver() -> Iterator[Solver]:
    with Solver(task="reasoning", controller=Chain(1), step_tokens=2, max_depth=1) as made:
        made.load()
        yield made


def refusal(error: ArborError) -> str:
    """The error's line, which is short and holds nothing that a terminal obeys."""
    assert isinstance(error, InputError | UsageError), error
    line = str(error)
    assert len(line) < 1000 and not OBEYED.search(line), line[:300]
    json.dumps(error.to_dict()).encode()
    return line


@pytest.mark.parametrize("task", TASKS, ids=lambda task: str(task.name))
def test_a_task_reads_a_text_or_refuses_it_in_one_line(task: Any) -> None:
    read = refused = 0
    draws = (hostile(random.Random(seed)) for seed in range(SEEDS))
    for text in (*TEXTS, *draws):
        try:
            problem = task.parse(text)
        except InputError as error:
            refused += 1
            assert "\n" not in refusal(error)
            continue
        read += 1
        task.prompt(problem).encode()
    assert refused and (read or task.name != "reasoning")


def test_half_of_a_character_is_refused_wherever_it_comes_from(solver: Solver) -> None:
    with pytest.raises(InputError, match="the answer key: character 1 is"):
        solver.solve("What is 2+3?", expected="\ud800")
    with pytest.raises(InputError, match="the problem: character 2 is"):
        solver.solve(Problem("0", "reasoning", "2\ud800"))
    for setting in ("stop", "yes", "no"):
        with pytest.raises(UsageError, match=rf"{setting} holds \\ud800, half of a character"):
            Reasoning(**{setting: ("a", "\ud800")})
    found = solver.solve_batch(["\ud800", "What is 2+3?"], on_error="return")
    assert [each.error is None for each in found] == [False, True]


# The command line


@pytest.fixture
def no_bug(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """An exception that the command would report as a bug reaches the test."""

    def reach(output: Any, words: list[str], error: Exception) -> int:
        raise AssertionError(f"arbor {' '.join(words)[:200]!r}") from error

    monkeypatch.setattr("arbor.cli.app._crash", reach)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("no_bug")
@pytest.mark.slow
def test_a_hostile_text_on_the_command_line_is_read_or_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for text in (*MARKUP, *TERMINAL, *CHARACTERS, "x" * 100_000, "4 5 6 \udcff"):
        for task in ("game24", "reasoning"):
            data = text.encode("utf-8", "surrogatepass")
            monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(data)))
            for words in ([text], ["-"]):
                code = main(["solve", "--task", task, "--dry-run", "--", *words])
                said = capsys.readouterr()
                assert code in (0, 2, 4), (text, said.err)
                assert (code == 0) == ("arbor: error: [" not in said.err), said.err
                assert not OBEYED.search(said.out + said.err), (text, said)
                assert code == 0 or len(said.err) < 1000
    assert sys.stdin


# Datasets
