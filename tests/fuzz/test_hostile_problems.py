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
from arbor.cli.encoding import decoded
from arbor.controllers.chain import Chain
from arbor.errors import ArborError, InputError, UsageError
from arbor.tasks.base import Problem
from arbor.tasks.chains import Chains
from arbor.tasks.countdown import Countdown
from arbor.tasks.game24 import Game24
from arbor.tasks.reasoning import Reasoning
from arbor.tasks.recall import Recall
from arbor.trace import Replay, read_trace

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


@pytest.mark.parametrize("text", ["\ud800", "What is 2+3?\udfff", "\ud83d\ude00"])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: str(task.name))
def test_half_of_a_character_is_one_input_error(task: Any, text: str) -> None:
    with Solver(task=task, verifier="self") as solver, pytest.raises(InputError) as caught:
        solver.solve(text)

    assert caught.value.code == "not-utf8"
    assert caught.value.message.startswith("the problem: character ")


def test_a_search_of_a_hostile_text_is_a_search(solver: Solver, tmp_path: Path) -> None:
    texts = [*MARKUP, *TERMINAL, *CHARACTERS]
    searched = 0
    for number, text in enumerate(texts):
        path = tmp_path / f"{number}.arbor.jsonl"
        try:
            solution = solver.solve(f"What is 2+3? {text}", trace=path)
        except InputError as error:
            assert error.code in ("not-utf8", "problem-too-long"), refusal(error)
            continue
        searched += 1
        trace = read_trace(path)
        assert trace.header is not None and trace.header.problem == solution.problem
        assert Replay.of(trace).problems == []
    assert searched > len(texts) // 2


@pytest.mark.parametrize("text", (*LONG[:1], MILLION))
def test_a_text_longer_than_the_context_is_refused_by_its_tokens(solver: Solver, text: str) -> None:
    with pytest.raises(InputError, match="problem-too-long") as caught:
        solver.solve(text)
    refusal(caught.value)


def test_half_of_a_character_is_refused_wherever_it_comes_from(solver: Solver) -> None:
    with pytest.raises(InputError, match="the answer key: character 1 is"):
        solver.solve("What is 2+3?", expected="\ud800")
    with pytest.raises(InputError, match="the prompt: character "):
        solver.solve(Problem("0", "reasoning", "2\ud800"))
    for setting in ("stop", "yes", "no"):
        with pytest.raises(UsageError, match=rf"{setting} holds \\ud800, half of a character"):
            Reasoning(**{setting: ("a", "\ud800")})
    found = solver.solve_batch(["\ud800", "What is 2+3?"], on_error="return")
    assert [each.error is None for each in found] == [False, True]


def test_a_problem_of_another_type_is_one_of_many_errors(solver: Solver) -> None:
    (failed,) = solver.solve_batch([24], on_error="return")  # type: ignore[list-item]

    assert failed.error is not None and failed.error["code"] == "problem-type"
    with pytest.raises(UsageError, match="expected=24: the answer key is a text"):
        solver.solve("What is 2+3?", expected=24)  # type: ignore[arg-type]


class Halves(Reasoning):
    """A task of a user, whose question to the model has half of a character."""

    def question(self, problem: Problem, thoughts: Any) -> Any:
        asked = super().question(problem, thoughts)
        return type(asked)(f"{asked.text}\ud800", asked.values)


def test_a_question_with_half_of_a_character_is_refused() -> None:
    task = Halves()
    with Solver(task=task) as solver, pytest.raises(InputError, match="the question to the model:"):
        solver.solve("What is 2+3?")


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


@pytest.mark.usefixtures("no_bug")
def test_hostile_flags_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ("--task", "--controller", "--verifier", "--policy", "--budget", "--model", "--set")
    for flag in (*flags, "--expected", "--dtype", "--device", "--encoding", "--file"):
        for text in ("\udcff", "\x1b[2J", "\u202e", "a=\udcff", "reasoning,stop=\udcff", "a\rb"):
            code = main(["solve", "4 5 6 10", "--dry-run", flag, text])
            said = capsys.readouterr()
            unused = flag == "--encoding"  # the problem is not in a file
            allowed = (0, 2, 4, 5) if flag == "--expected" or unused else (2, 4, 5)
            assert code in allowed, (flag, text, said.err)
            assert not OBEYED.search(said.out + said.err), (flag, text, said)


@pytest.mark.parametrize(
    ("encoding", "data", "code"),
    [
        ("utf-7", b"4 5 6 +2AA-", "not-utf8"),
        ("utf-8\0", b"4 5 6 10", "encoding"),
        ("punycode", b"a-99999999", "encoding"),
        ("idna", b"xn--999999999", "encoding"),
        ("undefined", b"4", "encoding"),
        ("\ud800", b"4", "encoding"),
        ("utf\x1b8", b"\xff", "not-utf8"),
        ("x" * 100_000, b"4", "encoding"),
        ("ascii", b"\xff", "not-ascii"),
    ],
)
def test_a_strange_encoding_is_one_error(encoding: str, data: bytes, code: str) -> None:
    with pytest.raises((InputError, UsageError)) as caught:
        decoded(data, encoding, "problem.txt")

    assert caught.value.code == code
    refusal(caught.value)


# Datasets


@pytest.mark.usefixtures("no_bug")
def test_a_dataset_of_hostile_texts_is_one_evaluation(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    words = [text for text in (*MARKUP, *TERMINAL, *CHARACTERS) if "\ud800" not in text]
    rows = [{"problem": f"2+3? {text}", "answer": text, "id": text} for text in words]
    path = tmp_path / "hostile.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows), encoding="utf-8")
    command = ["eval", str(path), "--task", "reasoning", "--output", "runs", "--max-depth", "1"]
    command += ["--on-error", "continue", "--step-tokens", "2", "--controller", "chain,samples=1"]

    code = main(command)

    said = capsys.readouterr()
    assert code == 0, said.err
    assert not OBEYED.search(said.out + said.err), said
    kept = [json.loads(line) for line in Path("runs/samples.jsonl").read_bytes().splitlines()]
    assert sorted(row["id"] for row in kept) == sorted(words)
    assert all(Replay.of(read_trace(Path("runs", row["trace"]))).problems == [] for row in kept)
    assert main(command) == 0, "a finished evaluation is shown again"
    assert "left out" not in capsys.readouterr().err


@pytest.mark.parametrize("column", ["problem", "answer"])
def test_half_of_a_character_in_a_dataset_is_named(
    column: str, capsys: pytest.CaptureFixture[str], tmp_path: Path, no_bug: None
) -> None:
    row = {"problem": "4 5 6 10", "answer": "24"} | {column: "4 \ud800"}
    path = tmp_path / "halves.jsonl"
    path.write_text(json.dumps(row), encoding="utf-8")

    assert main(["eval", str(path), "--output", "runs"]) == 4

    err = capsys.readouterr().err
    assert f"halves.jsonl: line 1 has \\ud800 in '{column}', half of a character" in err
