"""``arbor eval``: dataset, folder, resuming, results and comparison."""

from __future__ import annotations

import base64
import hashlib
import html
import io
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import fake_run, fake_solver
from support.run_cli import REAL, Arbor, await_line, in_process, spawn

from arbor import Solver
from arbor._version import __version__
from arbor.cli.evaluation.eval_report import result_lines
from arbor.cli.progress import WINDOW, Progress
from arbor.engine.rehydration import Rehydration
from arbor.errors import UsageError
from arbor.events import Ended
from arbor.measure.evaluation.compare import ArmRuns, compare_arms, difference_text
from arbor.measure.evaluation.dataset import of_task, window
from arbor.measure.evaluation.folder import RunFolder, digest
from arbor.measure.evaluation.page import index_page
from arbor.measure.evaluation.results import results
from arbor.model.loading import locate_model
from arbor.tasks.base import Problem
from arbor.tasks.game24 import Game24
from arbor.tasks.splits import dataset_split_of
from arbor.trace import Replay, read_trace

RIGHT = "(10 - 4) * 5 - 6"  # what the fake solver answers
ENDS = (pytest.param(signal.SIGINT, marks=pytest.mark.slow), signal.SIGKILL)
FILES = {"run.toml", "samples.jsonl", "results.json", "index.html", "traces"}


def dataset(*rows: dict[str, Any], name: str = "problems.jsonl") -> str:
    """A file of rows; a row without a key has the fake solver's answer."""
    lines = (json.dumps({"answer": RIGHT, **row}) + "\n" for row in rows)
    Path(name).write_text("".join(lines), encoding="utf-8")
    return name


def three() -> str:
    return dataset({"problem": "one"}, {"problem": "two", "answer": "2"}, {"problem": "three"})


def run(command: Arbor, *arguments: str, output: str = "out") -> Any:
    """``arbor eval`` of problems in words; its results as a document."""
    return command("eval", *arguments, "--task", "reasoning", "--output", output, "--json")


def rows(folder: str = "out") -> list[dict[str, Any]]:
    lines = Path(folder, "samples.jsonl").read_bytes().splitlines()
    return [json.loads(line) for line in lines]


def solved() -> int:
    """Searches of the last solver."""
    return len(fake_solver.SOLVERS[-1].solved)


# What is written


def test_duplicate_rows_are_one_sample_and_announced(command: Arbor) -> None:
    ran = run(command, dataset({"problem": "one"}, {"problem": "one"}))

    assert ran.document["n"] == 1
    assert "problems.jsonl: 1 duplicate row(s) left out" in ran.err


def test_an_empty_file_is_not_blamed_on_the_limit(command: Arbor) -> None:
    Path("empty.jsonl").write_text("", encoding="utf-8")

    ran = command("eval", "empty.jsonl", "--limit", "5")

    assert ran.code == 4
    assert "empty.jsonl has no samples." in ran.err and "--limit" not in ran.err


def test_the_configuration_names_the_dataset_by_its_absolute_path(command: Arbor) -> None:
    run(command, three())

    config = tomllib.loads(Path("out/run.toml").read_text("utf-8"))
    assert config["dataset"] == str(Path("problems.jsonl").absolute())


def test_a_split_of_a_file_is_part_of_the_run(command: Arbor) -> None:
    names = [f"problem {i}" for i in range(20)]
    expected = [name for name in names if dataset_split_of(name) == "evaluation"]
    run(command, dataset(*({"problem": name} for name in names)), "--split", "evaluation")

    assert [row["problem"] for row in rows()] == expected and 0 < len(expected) < 20
    assert tomllib.loads(Path("out/run.toml").read_text("utf-8"))["split"] == "evaluation"
    assert run(command, "problems.jsonl", "--split", "calibration").code == 2, "another run"


def test_a_changed_option_or_configuration_is_resolved_again(command: Arbor) -> None:
    run(command, three())
    solvers = len(fake_solver.SOLVERS)

    assert run(command, three(), "--seed", "1").code == 2
    text = Path("out/run.toml").read_text("utf-8")
    Path("out/run.toml").write_text("x = 1\n" + text, encoding="utf-8")
    assert run(command, three()).code == 2
    assert len(fake_solver.SOLVERS) == solvers + 2


def test_a_run_leaves_settings_samples_traces_results_and_a_page(command: Arbor) -> None:
    ran = run(command, three())

    assert ran.code == 0
    assert {path.name for path in Path("out").iterdir()} == FILES
    assert json.loads(Path("out/results.json").read_text("utf-8")) == ran.document
    assert (ran.document["n"], ran.document["right"], ran.document["missing"]) == (3, 2, 0)
    assert ran.document["accuracy"] == pytest.approx(2 / 3)
    assert ran.document["interval"] == pytest.approx([0.0943, 0.9916], abs=1e-4)
    assert [(row["problem"], row["correct"]) for row in rows()] == [
        *(("one", True), ("two", False), ("three", True)),
    ]
    metrics = [row["metrics"] for row in rows()]
    total = ran.document["tokens_generated"]["total"]
    assert total == sum(each["tokens_generated"] for each in metrics) > 0
    assert ran.document["peak_tokens"]["max"] == max(each["peak_tokens"] for each in metrics)
    assert ran.document["cpu_s"]["total"] == pytest.approx(sum(row["cpu_s"] for row in rows()))
    for row in rows():
        assert Replay.of(read_trace(Path("out", row["trace"]))).problems == []


def test_every_sample_has_a_seed_of_its_own_by_content(command: Arbor) -> None:
    run(command, three())
    run(command, dataset({"problem": "three"}, {"problem": "one"}), output="others")
    run(command, three(), "--seed", "1", output="another")

    seeds = {row["problem"]: row["seed"] for row in rows()}
    assert len(set(seeds.values())) == 3
    assert all(0 <= seed < 2**32 for seed in seeds.values())
    for row in rows():
        header = read_trace(Path("out", row["trace"])).header
        assert header is not None and header.seed == row["seed"]
    assert all(row["seed"] == seeds[row["problem"]] for row in rows("others"))
    assert not {row["seed"] for row in rows("another")} & set(seeds.values())


def test_without_json_the_results_are_lines(command: Arbor) -> None:
    ran = command("eval", three(), "--task", "reasoning", "--output", "out", "-q")

    assert ran.out.splitlines()[0] == "accuracy    66.7 % (9.4 to 99.2), 2 of 3 right"
    assert ran.out.splitlines()[-1] == "folder      out"
    assert ran.err == ""


def test_without_output_a_folder_is_named_after_time_and_dataset(command: Arbor) -> None:
    assert command("eval", "game24", "--limit", "2").code == 0

    (made,) = Path("runs").iterdir()
    assert re.fullmatch(r"\d{8}T\d{6}Z_game24_[0-9a-f]{6}", made.name)
    assert len(rows(str(made))) == 2


def test_traces_are_left_out_when_they_are_off(command: Arbor) -> None:
    run(command, three(), "--trace", "off")

    assert list(Path("out/traces").iterdir()) == []
    assert {row["trace"] for row in rows()} == {None}


def test_a_trace_without_words_has_none(command: Arbor) -> None:
    run(command, dataset({"problem": "one"}), "--trace-text", "none")

    assert read_trace(Path("out", rows()[0]["trace"])).events[0].problem == ""


def test_an_id_that_is_not_a_file_name_gets_one(command: Arbor) -> None:
    names = ["../../etc/passwd", "a b", "a/b", ".", "é" * 200, "CON"]

    assert run(command, dataset(*({"id": n, "problem": n} for n in names))).code == 0

    traces = [row["trace"] for row in rows()]
    assert len(set(traces)) == len(names)
    for trace in traces:
        assert re.fullmatch(r"traces/[A-Za-z0-9_~-]+\.arbor\.jsonl\.gz", trace)
        assert Path("out", trace).is_file()
    assert traces[-1] == "traces/CON.arbor.jsonl.gz"


# Going on


def test_the_same_command_again_solves_nothing_again(command: Arbor) -> None:
    first = run(command, three())
    assert solved() == 3
    before = Path("out/samples.jsonl").read_bytes()

    solvers = len(fake_solver.SOLVERS)
    again = run(command, three())

    assert len(fake_solver.SOLVERS) == solvers, "a finished run needs no solver"
    assert Path("out/samples.jsonl").read_bytes() == before
    assert again.document == first.document


def test_a_finished_run_is_shown_without_torch(command: Arbor) -> None:
    arguments = (three(), "--task", "reasoning", "--output", "out", "--json")
    first = command("eval", *arguments)
    code = (
        "import sys; from arbor.cli import main; ended = main(sys.argv[1:])\n"
        "sys.exit(99 if {'torch', 'transformers'} & set(sys.modules) else ended)"
    )

    with spawn("eval", *arguments, code=code) as process:
        out, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (0, b"")
    assert json.loads(out) == first.document


def test_a_larger_limit_goes_on_where_the_smaller_one_ended(command: Arbor) -> None:
    for limit, new, n in (("5", 5, 5), ("8", 3, 8), ("9-12", 4, 12)):
        ran = command("eval", "game24", "--limit", limit, "--output", "out", "--json")

        assert (solved(), ran.document["n"]) == (new, n)


def test_the_order_of_a_file_is_nothing(command: Arbor) -> None:
    run(command, dataset({"problem": "one"}, {"problem": "two"}))
    run(command, dataset({"problem": "two"}, {"problem": "one"}, {"problem": "three"}))

    assert solved() == 1
    assert len({row["id"] for row in rows()}) == len(rows()) == 3


def test_a_problem_that_changed_under_its_id_is_solved_again(command: Arbor) -> None:
    run(command, dataset({"id": "a", "problem": "one"}, {"id": "b", "problem": "two"}))
    ran = run(command, dataset({"id": "a", "problem": "uno"}, {"id": "b", "problem": "two"}))

    assert (solved(), ran.document["n"]) == (1, 2)


def test_other_settings_are_refused_and_named(command: Arbor) -> None:
    run(command, three())
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}

    ran = run(command, three(), "--seed", "7", "--timeout", "3")

    assert (ran.code, ran.document["error"]["code"]) == (2, "run-differs")
    assert ran.document["error"]["data"]["keys"] == ["seed", "timeout"]
    assert "seed (0 there, 7 here), timeout (none there, 3.0 here)" in ran.err
    assert "--fresh" in ran.err
    assert {p: p.read_bytes() for p in Path("out").rglob("*") if p.is_file()} == before


def test_what_only_says_which_samples_may_differ(command: Arbor) -> None:
    run(command, three())

    ran = run(command, three(), "--limit", "2", "--trace", "off", "--on-error", "continue")

    assert ran.code == 0


def test_fresh_starts_over(command: Arbor) -> None:
    run(command, three())
    old = Path("out/traces/old.arbor.jsonl.gz")
    old.write_bytes(b"")

    ran = run(command, three(), "--seed", "7", "--fresh", "--limit", "1")

    assert (ran.code, solved(), len(rows())) == (0, 1, 1)
    assert not old.exists()


def test_half_a_line_and_a_broken_one_lose_no_other(command: Arbor) -> None:
    run(command, three())
    path = Path("out/samples.jsonl")
    first, second, third = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(first + b"{broken\n" + second + third[: len(third) // 2])

    ran = run(command, three())

    assert (ran.code, solved(), ran.document["n"]) == (0, 1, 3)
    assert "1 unreadable line(s)" in ran.err
    assert path.read_bytes().startswith(first + b"{broken\n" + second + b'{"schema"')


def test_two_processes_do_not_write_to_one_folder(command: Arbor) -> None:
    run(command, three())
    config = {"budget": "other"}
    Path("busy").mkdir()
    folder = RunFolder(Path("busy"), config)
    try:
        ran = run(command, three(), output="busy")
    finally:
        folder.close()

    assert (ran.code, ran.document["error"]["code"]) == (2, "run-busy")


def test_the_settings_of_a_run_repeat_it(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    real = in_process(capsys)
    first = real(
        *("eval", "game24", "--limit", "2", "--controller", "chain", "--temperature", "0.5"),
        *(
            "--max-tokens",
            "40",
            "--set",
            "first=answer",
            "--set",
            "confidence=0.75",
            "--sample-id",
            "3a6bc65b3c19ae5c",
            "--output",
            "out",
            "--json",
        ),
    )

    again = real("eval", "--config", "out/run.toml", "--output", "out", "--json")

    assert (first.code, again.code) == (0, 0)
    assert again.document == first.document and len(rows()) == 1
    with Solver.from_config("out/run.toml") as solver:
        assert solver.config["controller"]["name"] == "chain"
        assert solver.sampling.temperature == 0.5


def test_a_ratio_means_the_same_in_the_first_run_and_the_second(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    real = in_process(capsys)
    search = ("eval", "game24", "--set", "beam=4", "--set", "width=6", "--output", "out", "--json")
    search = (*search, "--concurrency", "1")  # together they share one ratio

    first = real(*search, "--limit", "1", "--budget", "0.25")
    second = real(*search, "--limit", "2", "--budget", "0.25")
    other = real(*search, "--limit", "2", "--budget", "0.6")
    rows = [json.loads(line) for line in Path("out/samples.jsonl").read_text().splitlines()]
    again = real(*search, "--limit", "2", "--budget", "0.25", "--fresh")
    anew = [json.loads(line) for line in Path("out/samples.jsonl").read_text().splitlines()]

    assert (first.code, second.code, again.code) == (0, 0, 0), second.err
    assert tomllib.loads(Path("out/run.toml").read_text())["budget"] == "0.25"
    assert (other.code, other.document["error"]["code"]) == (2, "run-differs")
    assert [row["metrics"]["peak_tokens"] for row in rows] == [
        row["metrics"]["peak_tokens"] for row in anew
    ]


def test_resuming_with_other_weights_is_refused(command: Arbor, tmp_path: Path) -> None:
    model = Path("m")
    shutil.copytree(locate_model("builtin:sapling").path, model)
    (weights,) = model.glob("*.safetensors")
    before = weights.stat()
    first = run(command, three(), "--model", str(model), "--limit", "1")

    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    os.utime(weights, ns=(before.st_atime_ns, before.st_mtime_ns))
    more = run(command, three(), "--model", str(model))
    shown = run(command, three(), "--model", str(model), "--limit", "1")
    fresh = run(command, three(), "--model", str(model), "--fresh")

    assert first.code == 0
    for ran in (more, shown):
        assert (ran.code, ran.document["error"]["code"]) == (2, "run-differs")
        assert "other weights: the files of m have changed" in ran.err
    assert (fresh.code, fresh.document["n"]) == (0, 3)


def test_a_folder_of_an_earlier_version_is_resumed(command: Arbor) -> None:
    run(command, three(), "--limit", "1")
    config = Path("out/run.toml")
    kept = [line for line in config.read_text().splitlines() if "model_content" not in line]
    config.write_text("\n".join(kept[:-1]) + "\n")

    ran = run(command, three())

    assert (ran.code, ran.document["n"]) == (0, 3)
    assert "model_content" in config.read_text()


def test_an_internal_error_ends_its_own_sample_and_no_other(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    place, calls = Rehydration.place, 0

    def fails_once(self: Rehydration, *leaves: Any, **settings: Any) -> Any:
        nonlocal calls
        calls += 1
        assert calls != 9, "more was planned than fits"
        return place(self, *leaves, **settings)

    monkeypatch.setattr(Rehydration, "place", fails_once)
    real = in_process(capsys)
    ran = real("eval", "game24", "--limit", "3", "--concurrency", "1", "--output", "out", "--json")

    rows = [json.loads(line) for line in Path("out/samples.jsonl").read_text().splitlines()]
    (bad,) = [row for row in rows if row.get("error")]
    assert ran.code == 1 and len(rows) == 3
    assert bad["id"] in ran.err and "1 sample(s)" in ran.err
    assert bad["error"]["code"] == "bug" and "more was planned" in bad["error"]["message"]
    assert "fails_once" in bad["error"]["data"]["traceback"]
    assert sum(row["finish_reason"] != "error" for row in rows) == 2
    assert Path("out", bad["trace"]).is_file()


def test_a_folder_with_something_else_is_left_alone(command: Arbor) -> None:
    Path("out").mkdir()
    Path("out/thesis.tex").write_text("years of work", encoding="utf-8")

    for more in ([], ["--fresh"]):
        ran = run(command, three(), *more)
        assert (ran.code, ran.document["error"]["code"]) == (2, "run-foreign")
        assert "thesis.tex" in ran.err
    assert [path.name for path in Path("out").iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL], ids=["INT", "KILL"])
def test_a_run_that_is_ended_keeps_what_is_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    monkeypatch.chdir(tmp_path)
    name = dataset({"problem": "one"}, {"problem": "two"}, {"problem": "endless"})
    out = tmp_path / "out put"
    arguments = ("eval", name, "--task", "reasoning", "--output", str(out))
    for _ in range(2):  # the second time, it begins where it was ended
        with spawn(*arguments) as process:
            await_line(process, b"running")
            process.send_signal(number)
            said, err = process.communicate(timeout=60)

        assert [row["problem"] for row in rows(str(out))] == ["one", "two"]
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert f"arbor eval --config '{out}/run.toml' --output '{out}'" in err.decode()
            assert b"2 of 2 right" in said and b"not run     1" in said
            assert json.loads((out / "results.json").read_text("utf-8"))["missing"] == 1


@pytest.mark.parametrize("number", ENDS, ids=["INT", "KILL"])
def test_a_concurrent_run_that_is_ended_keeps_what_is_finished_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """An endless sample among others, four at a time; the rest is finished when it is ended."""
    monkeypatch.chdir(tmp_path)
    short = [{"problem": f"problem {place}"} for place in range(9)]
    endless = [{"problem": "endless one"}, {"problem": "endless two"}]
    name = dataset(*short[:2], endless[0], *short[2:], endless[1])
    arguments = ("eval", name, "--task", "reasoning", "--output", "out", "--concurrency", "4")
    for _ in range(2):  # the second time, it begins where it was ended
        with spawn(*arguments) as process:
            await_line(process, b"running")  # nothing else is left
            process.send_signal(number)
            said, err = process.communicate(timeout=60)

        assert sorted(row["problem"] for row in rows()) == [each["problem"] for each in short]
        for row in rows():
            assert Replay.of(read_trace(Path("out", row["trace"]))).problems == []
        if number == signal.SIGINT:
            assert process.returncode == 130
            assert b"to resume: arbor eval" in err
            assert b"9 of 9 right" in said and b"not run     2" in said
            assert all(read_trace(path).events for path in Path("out/traces").iterdir())
    name = dataset(*short)  # without what never ends
    with spawn(*arguments, "--json") as process:
        said, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    assert (json.loads(said)["n"], json.loads(said)["missing"]) == (9, 0)


@pytest.mark.parametrize("number", ENDS, ids=["INT", "KILL"])
def test_a_concurrent_run_that_is_ended_in_the_middle_finishes_the_rest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """What never ends takes all places before the other problems begin."""
    monkeypatch.chdir(tmp_path)
    problems = [{"id": f"s{place}", "problem": f"problem {place}"} for place in range(6)]
    endless = [{"id": f"e{place}", "problem": f"endless {place}"} for place in range(4)]
    name = dataset(problems[0], *endless, *problems[1:])
    arguments = ("eval", name, "--task", "reasoning", "--output", "out", "--concurrency", "4")
    with spawn(*arguments) as process:
        await_line(process, b"running")  # all places are taken
        process.send_signal(number)
        process.communicate(timeout=60)
    assert [row["problem"] for row in rows()] == ["problem 0"]
    kept = rows()

    dataset(*problems)
    with spawn(*arguments, "--json") as process:
        said, err = process.communicate(timeout=60)

    assert process.returncode == 0, err
    assert (json.loads(said)["n"], json.loads(said)["missing"]) == (6, 0)
    assert rows()[0] == kept[0]
    assert all(read_trace(Path("out", row["trace"])).events for row in rows())


# Samples that cannot be solved


def unsolvable() -> str:
    return dataset({"problem": "one"}, {"problem": "unsolvable two"}, {"problem": "three"})


def test_a_sample_that_cannot_be_solved_stops_and_loses_nothing(command: Arbor) -> None:
    ran = run(command, unsolvable(), "--concurrency", "1")

    assert (ran.code, ran.document["error"]["code"]) == (4, "problem-too-long")
    assert ran.document["error"]["data"]["sample"]
    assert "1 finished sample(s) kept; to resume: arbor eval --config out/run.toml" in ran.err
    assert [row["problem"] for row in rows()] == ["one"]
    assert json.loads(Path("out/results.json").read_text("utf-8"))["missing"] == 2


def test_samples_that_were_read_ahead_and_never_begun_leave_no_trace(command: Arbor) -> None:
    name = dataset(*({"problem": each} for each in ("one", "unsolvable two", "three", "four")))
    ran = run(command, name, "--concurrency", "4")

    assert ran.document["error"]["code"] == "problem-too-long"
    traces = sorted(Path("out/traces").iterdir())
    assert all(read_trace(path).events for path in traces)
    assert len(traces) == 1, "that had begun"

    ran = run(command, name, "--concurrency", "4", "--on-error", "continue")
    assert (ran.document["n"], ran.document["errors"]) == (4, 1)
    assert all(read_trace(path).events for path in Path("out/traces").iterdir())


@pytest.mark.parametrize("interrupted", [pytest.param(True, marks=pytest.mark.slow), False])
@pytest.mark.slow
def test_real_samples_that_were_never_begun_leave_no_trace(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, interrupted: bool
) -> None:
    """A large problem waits when the signal comes; or an error ends the problems after it."""
    monkeypatch.chdir(tmp_path)
    long = "word " * (40 if interrupted else 5000)
    small = [{"id": f"s{place}", "problem": f"{place}+3"} for place in range(4)]
    name = dataset(*small[:2], {"id": "long", "problem": long}, *small[2:])
    sizes = (
        "--step-tokens",
        "20",
        "--max-depth",
        "3",
        "--concurrency",
        "2" if interrupted else "4",
    )
    arguments = ("eval", name, "--task", "reasoning", "--output", "out", *sizes)
    with spawn(*arguments, code=REAL) as process:
        if interrupted:
            assert process.stderr is not None
            while not list(Path("out/traces").glob("long.*")):
                assert process.poll() is None, process.stderr.read().decode()
                time.sleep(0.001)
            process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=100)

    assert process.returncode == (130 if interrupted else 4), err
    traces = list(Path("out/traces").iterdir())
    assert all(read_trace(path).events for path in traces), err
    assert len(traces) >= (1 if interrupted else 2)


def test_what_the_first_sample_cannot_have_leaves_no_folder(command: Arbor) -> None:
    ran = run(command, unsolvable(), "--budget", "3tok")

    assert (ran.code, ran.document["error"]["code"]) == (6, "budget-infeasible")
    assert not Path("out").exists()


def test_errors_are_reported_with_their_reasons(command: Arbor) -> None:
    run(command, unsolvable(), "--on-error", "continue")
    again = ("eval", "problems.jsonl", "--task", "reasoning", "--output", "out", "-q")
    ran = command(*again, "--on-error", "continue")

    assert "errors      1 problem-too-long; the first: 9,120 tokens; the context is" in ran.out
    found = json.loads(Path("out/results.json").read_text("utf-8"))
    assert found["error_codes"] == {"problem-too-long": 1}
    assert found["first_error"]["hint"] == "Shorter."


def test_or_it_counts_as_wrong_and_is_tried_again(command: Arbor) -> None:
    ran = run(command, unsolvable(), "--on-error", "continue", "--concurrency", "1")

    assert (ran.code, ran.document["n"], ran.document["right"]) == (0, 3, 2)
    assert (ran.document["errors"], ran.document["missing"]) == (1, 1)
    assert rows()[1]["error"]["code"] == "problem-too-long"
    assert rows()[1]["trace"] is None
    assert len(list(Path("out/traces").iterdir())) == 2, "an empty file is not a trace"

    run(command, unsolvable(), "--on-error", "continue")
    assert solved() == 1


def test_a_problem_the_task_cannot_read_is_an_error_of_its_line(command: Arbor) -> None:
    name = dataset({"problem": "4 5 6 10"}, {"problem": "4 5"})

    ran = command("eval", name, "--output", "out", "--json")
    assert (ran.code, ran.document["error"]["code"]) == (4, "problem-invalid")
    assert "problems.jsonl, line 2: " in ran.err and "Try: 4 5 6 10" in ran.err
    assert not Path("out").exists(), "nothing was begun"

    ran = command("eval", name, "--output", "out", "--json", "--on-error", "continue")
    assert (ran.code, ran.document["n"], ran.document["errors"]) == (0, 2, 1)


@pytest.mark.parametrize("nothing", ["", None, float("nan")])
def test_a_row_without_an_answer_is_an_error_of_its_line(command: Arbor, nothing: object) -> None:
    rows = [{"problem": "one", "answer": "1"}, {"problem": "two", "answer": nothing}]
    Path("problems.jsonl").write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")

    ran = run(command, "problems.jsonl", "--on-error", "continue")

    assert (ran.document["n"], ran.document["errors"]) == (2, 1)


# Where samples come from


def test_a_task_has_problems_of_its_own(command: Arbor) -> None:
    ran = command("eval", "chains", "--limit", "3", "--output", "out", "--json")

    assert (ran.code, ran.document["n"]) == (0, 3)
    assert all(row["problem"].startswith("Facts: ") for row in rows())
    assert "Chains(" in Path("out/run.toml").read_text("utf-8")


def test_a_task_that_repeats_itself_has_each_sample_once() -> None:
    class Repeats(Game24):
        def problems(self, split: str, limit: int | None = None) -> Iterator[Problem]:
            hands = itertools.cycle(((4, 5, 6, 10), (1, 2, 3, 4), (10, 6, 5, 4)))
            return (self.make(hand) for hand in itertools.islice(hands, limit))

    samples = of_task(Repeats(), "test", 1, 5)

    assert [sample.text for sample in samples] == ["1 2 3 4", "10 6 5 4"]
    assert samples[1].id == Game24().make((4, 5, 6, 10)).id


def test_a_task_without_a_limit_gives_a_hundred(command: Arbor) -> None:
    assert command("eval", "recall", "--output", "out", "--json").document["n"] == 100


def test_columns_may_have_other_names_and_numbers_are_text(command: Arbor) -> None:
    rows_ = [{"question": "How many?", "key": 72}, {"question": 5, "key": "x"}]
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows_)
    Path("q.jsonl").write_text(f"\ufeff{lines}\n", encoding="utf-8")

    ran = run(command, "q.jsonl", "--input-key", "question", "--target-key", "key")

    assert ran.code == 0
    assert [(r["problem"], r["expected"]) for r in rows()] == [("How many?", "72"), ("5", "x")]


def test_a_separator_of_lines_within_a_problem_does_not_end_a_row(command: Arbor) -> None:
    Path("u.jsonl").write_text(
        '{"problem": "one\u2028two", "answer": "1"}\n', encoding="utf-8", newline=""
    )

    assert run(command, "u.jsonl").document["n"] == 1
    assert rows()[0]["problem"] == "one\u2028two"


def test_a_table_is_read(command: Arbor) -> None:
    text = f'problem,answer,id\n"one, two\nthree",{RIGHT},a\nfour,"say ""5""",\n'
    Path("t.csv").write_text(text, encoding="utf-8")

    assert run(command, "t.csv").document["right"] == 1
    assert [row["problem"] for row in rows()] == ["one, two\nthree", "four"]
    assert rows()[0]["id"] == "a" and len(rows()[1]["id"]) == 16
    assert rows()[1]["expected"] == 'say "5"'


def test_a_row_that_is_there_twice_is_one_sample(command: Arbor) -> None:
    same = {"problem": "one"}

    assert run(command, dataset(same, {"problem": "two"}, same)).document["n"] == 2


def test_a_key_of_the_tasks_own_is_enough(command: Arbor) -> None:
    Path("k.jsonl").write_text('{"problem": "4 5 6 10"}\n', encoding="utf-8")

    command("eval", "k.jsonl", "--output", "out")

    assert rows()[0]["expected"] == "24"


def test_stdin_is_a_dataset() -> None:
    with spawn(
        *("eval", "-", "--task", "reasoning", "--output", "/dev/null"), stdin=subprocess.PIPE
    ) as process:
        _, err = process.communicate(b"not JSON\n", timeout=60)
    assert process.returncode == 4
    assert b"[dataset-invalid] stdin: line 1 is not JSON" in err


def test_only_some_samples_are_solved(command: Arbor) -> None:
    name = dataset(*({"id": each, "problem": each} for each in ("a", "b", "c")))

    run(command, name, "--sample-id", "c", "--sample-id", "a")

    assert [row["id"] for row in rows()] == ["a", "c"]


@pytest.mark.parametrize(
    ("limit", "part"), [("3", (0, 3)), ("1-3", (0, 3)), ("11-20", (10, 20)), ("7-7", (6, 7))]
)
def test_a_limit_is_a_number_or_a_range_with_both_ends(limit: str, part: tuple[int, int]) -> None:
    assert window(limit) == part


@pytest.mark.parametrize("limit", ["0", "-3", "3-1", "1.5", "all", "1-", "0-4", ""])
def test_anything_else_is_not_a_limit(limit: str) -> None:
    with pytest.raises(UsageError, match="101-200"):
        window(limit)


def broken(text: str | bytes, name: str = "x.jsonl") -> Any:
    def write() -> list[str]:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return [name, "--task", "reasoning"]

    return write


ROWS = [
    (["gsm8k"], 2, "no-problems", ("arbor eval problems.jsonl --task gsm8k",)),
    (["gsm9k"], 2, "unknown-dataset", ("Known: chains, countdown, game24, recall; or a file",)),
    (["x.xlsx"], 2, "dataset-format", (".jsonl, .json, .csv, .tsv, .parquet", '{"problem": ')),
    (["x.parquet"], 4, "dataset-unreadable", ("No such file",)),
    (["hf:gsm8k"], 2, "dataset-format", ("hf:openai/gsm8k/main:test",)),
    (
        broken('{"problem": "a", "answer": " "}\n'),
        4,
        "dataset-invalid",
        ("line 1: its 'answer' is empty",),
    ),
    *(
        (
            broken(f'{{"problem": "a", "answer": {nothing}}}\n'),
            4,
            "dataset-invalid",
            ("line 1: its 'answer' is empty",),
        )
        for nothing in ('""', "null", "NaN")
    ),
    (broken('{"problem": NaN, "answer": 1}\n'), 4, "dataset-invalid", ("no text in 'problem'",)),
    (broken('[{"problem": "a", "answer": "1"}', "x.json"), 4, "dataset-invalid", ("no end",)),
    (broken("problem\tanswer\na\t1\t2\n", "x.tsv"), 4, "dataset-invalid", ("line 2 has more",)),
    (broken("a,b,a\n1,2,3\n", "x.csv"), 4, "dataset-invalid", ("names the column 'a' twice",)),
    (broken("problem,answer\na\n", "x.csv"), 4, "dataset-invalid", ("line 2 has no 'answer'",)),
    (broken("PAR1", "x.parquet"), 4, "dataset-invalid", ("cannot be read as Parquet",)),
    (broken(b'{"problem": "a"', "x.json"), 4, "dataset-invalid", ("line 1 is not JSON",)),
    (["nowhere.jsonl"], 4, "dataset-unreadable", ("No such file",)),
    (["reasoning"], 2, "no-problems", ("arbor eval problems.jsonl --task reasoning",)),
    (["game24", "--task", "chains"], 2, "usage", ("Leave --task out",)),
    (["game24", "--split", "tset"], 4, "split-unknown", ("train, validation, test, hard",)),
    (
        ["x.jsonl", "--split", "test"],
        4,
        "split-unknown",
        ("calibration, evaluation; without --split all rows",),
    ),
    (["game24", "--limit", "many"], 2, "limit", ("100 for the first hundred",)),
    (["game24", "--limit", "5000-5001"], 4, "dataset-empty", ("in 5000-5001", "smaller")),
    (["game24", "--sample-id", "x"], 2, "unknown-sample", ("100 samples", "here 3")),
    (["game24", "--compare", "nowhere"], 4, "run-unreadable", ("arbor eval --output",)),
    (["game24", "--budget", "25"], 2, "budget-range", ("Did you mean 0.25",)),
    (["game24", "--fail-under", "70"], 2, "usage", ("--fail-under",)),
    (["game24", "--trace", "x"], 2, "usage", ("'on', 'off'",)),
    (broken(""), 4, "dataset-empty", ("x.jsonl has no samples",)),
    (
        broken('{"problem": "a"}\n'),
        4,
        "dataset-invalid",
        ("line 1 has no 'answer'", "--target-key"),
    ),
    (
        broken('\n{"q": 1, "r": 2}\n'),
        4,
        "dataset-invalid",
        ("line 2", "It has: q, r", "--input-key"),
    ),
    (broken('{"problem": ["a"]}\n'), 4, "dataset-invalid", ("no text in 'problem'",)),
    (broken("[1]\n"), 4, "dataset-invalid", ("line 1 is not a JSON object",)),
    (broken('{"problem"\n'), 4, "dataset-invalid", ("line 1 is not JSON (Expecting",)),
    (broken("[" * 100_000), 4, "dataset-invalid", ("line 1 is not JSON",)),
    (
        broken(
            '{"id": 1, "problem": "a", "answer": "1"}\n{"id": 1, "problem": "b", "answer": "1"}\n'
        ),
        *(4, "dataset-invalid", ("line 1 and line 2 have the id '1' and differ",)),
    ),
    (broken(b'{"problem": "\xe9"}\n'), 4, "not-utf8", ("x.jsonl: byte 0xe9", "--encoding latin-1")),
    *(
        (
            broken('{"problem": "a", "answer": "1"}\n'.encode(encoding)),
            4,
            "not-utf8",
            (f"It is {name.upper()}: iconv -f {name} -t utf8, or --encoding {name}.",),
        )
        for encoding, name in (("utf-16", "utf-16"), ("utf-32", "utf-32"))
    ),
    (broken("a,b\n1,2,3\n", "x.csv"), 4, "dataset-invalid", ("line 2 has more cells",)),
    (broken('problem,answer\n"a,1\n', "x.csv"), 4, "dataset-invalid", ("is not CSV",)),
]


@pytest.mark.parametrize(("arguments", "exit_code", "code", "words"), ROWS)
def test_an_error_says_what_would_work(
    command: Arbor, arguments: Any, exit_code: int, code: str, words: tuple[str, ...]
) -> None:
    given = arguments() if callable(arguments) else arguments

    ran = command("eval", *given, "--output", "out")

    assert (ran.code, ran.out) == (exit_code, "")
    assert ran.err.startswith(f"arbor: error: [{code}] ") and "Traceback" not in ran.err
    for each in words:
        assert each in ran.err
    assert not Path("out").exists()


@pytest.mark.parametrize("output", ["/dev/null", "/dev/null/out"])
def test_a_folder_that_cannot_be_made_says_so(command: Arbor, output: str) -> None:
    ran = command("eval", three(), "--task", "reasoning", "--output", output)

    assert ran.code == 2
    assert "--output" in ran.err and "Traceback" not in ran.err


# Gates and comparisons


@pytest.mark.parametrize(("gate", "code"), [("0.66", 0), ("0.67", 7)])
def test_a_gate_fails_with_seven(command: Arbor, gate: str, code: int) -> None:
    ran = run(command, three(), "--fail-under", gate)

    assert ran.code == code
    assert ("[fail-under] the accuracy is 0.6667, below 0.67" in ran.err) == (code == 7)
    assert ran.document["n"] == 3


def test_two_runs_are_compared_pair_by_pair(command: Arbor) -> None:
    for output, wrong in (("a", range(0, 2)), ("b", range(1, 9))):
        numbers = range(10) if output == "b" else range(1, 12)
        key = {True: "wrong", False: RIGHT}
        name = dataset(
            *({"id": str(n), "problem": f"p{n}", "answer": key[n in wrong]} for n in numbers),
        )
        more = ["--compare", "a"] if output == "b" else []
        ran = run(command, name, *more, output=output)

    pair = ran.document["comparison"]
    assert (pair["with"], pair["n"]) == ("a", 9)  # 1 to 9
    outcomes = {name: pair[name] for name in ("both", "only_first", "only_second", "neither")}
    assert outcomes == {"both": 1, "only_first": 0, "only_second": 7, "neither": 1}
    assert pair["difference"] == pytest.approx(-7 / 9)
    assert pair["p"] == pytest.approx(2 / 2**7)
    assert pair["interval"][0] < -7 / 9 < pair["interval"][1]
    assert pair["tokens_generated"]["difference"] == 0
    text = command(
        *("eval", name, "--task", "reasoning", "--output", "b", "--compare", "a"),
    ).out
    assert "-77.8 points (" in text and "only the other 7; McNemar p = 0.0156" in text


def test_runs_without_a_common_sample_are_not_compared(command: Arbor) -> None:
    run(command, three(), output="a")

    ran = run(command, dataset({"problem": "another"}), "--compare", "a")

    assert (ran.code, ran.document["error"]["code"]) == (2, "run-disjoint")
    assert not Path("out").exists()


def test_limits_that_ended_searches_are_counted() -> None:
    limits = ("max_tokens", None, "first", "max_tokens")

    assert results([{"limit": each} for each in limits])["limits"] == {"first": 1, "max_tokens": 2}


def test_what_failed_costs_nothing_and_is_not_right() -> None:
    good = {"correct": True, "answer": "1", "metrics": {"peak_tokens": 10}, "cpu_s": 2.0}
    failed = {"correct": None, "answer": None, "metrics": {}, "error": {"code": "x"}, "cpu_s": 9.0}

    found = results([good, failed])

    assert (found["accuracy"], found["errors"], found["no_answer"]) == (0.5, 1, 0)
    assert found["peak_tokens"]["mean"] == 10 and found["cpu_s"]["total"] == 2.0
    assert results([])["accuracy"] is None


def test_the_digest_is_of_what_a_result_depends_on() -> None:
    config = {"budget": "0.5", "limit": "3", "policy": {"name": "lru"}}

    assert digest(config) == digest(config | {"limit": "9", "trace": "off", "timeout": None})
    assert digest(config) != digest(config | {"policy": {"name": "h2o"}})


# The page


def test_the_page_lists_every_sample_and_links_to_pages_only(command: Arbor) -> None:
    run(command, three())

    page = Path("out/index.html").read_text("utf-8")

    assert re.findall(r'<tr class="(\w+)"', page) == ["right", "wrong", "right"]
    assert "<a " not in page, "a trace is downloaded and not shown"
    assert f"<code>arbor view {rows()[0]['trace']} --open</code>" in page
    assert "2 of 3 right" in page
    assert command("view", "out", "--samples").code == 0
    page = Path("out/index.html").read_text("utf-8")
    links = re.findall(r'<a href="([^"]+)"', page)
    assert links == [row["trace"].replace(".arbor.jsonl.gz", ".html") for row in rows()]


def test_the_page_says_what_the_run_was_made_with(command: Arbor) -> None:
    run(command, three(), "--seed", "7")

    page = Path("out/index.html").read_text("utf-8")

    made = dict(re.findall("<dt>(.*?)</dt><dd>(.*?)</dd>", page))
    assert made["seed"] == "7" and made["arbor"] == __version__ and made["model"]
    assert made["search"]
    assert re.fullmatch(r"20\d\d-\d\d-\d\d \d\d:\d\d UTC", made["last search"])
    assert re.search("<pre>.*seed = .*</pre>", page, re.DOTALL), "every setting is there"


def test_too_few_samples_and_ties_are_not_given_a_p_value() -> None:
    pair = {"value": 0.0, "interval": [0.0, 0.0], "p": 1.0}

    assert difference_text({**pair, "n": 3}) == "+0.0, 3 problems decide nothing"
    assert difference_text({**pair, "n": 1}) == "+0.0, 1 problem decides nothing"
    assert difference_text({**pair, "n": 40}) == "+0.0, the same on all 40"
    differs = {"value": 0.5, "interval": [0.1, 0.9], "p": 0.03, "n": 6}
    assert difference_text(differs) == "+50.0 (+10.0 to +90.0), p = 0.03"


def test_the_page_has_the_run_over_time(command: Arbor, monkeypatch: pytest.MonkeyPatch) -> None:
    run(command, three())
    page = Path("out/index.html").read_text("utf-8")
    data = json.loads(html.unescape(re.findall(r'data-run="([^"]*)"', page)[0]))

    assert [bar[0] for bar in data["bars"]] == [0, 1, 2]
    assert 0 < max(data["used"]) <= 200 and max(data["budget"]) == 200

    def read(path: Path) -> Any:
        raise AssertionError("the traces are the same")

    monkeypatch.setattr("arbor.measure.evaluation.run_timeline.lines_of", read)
    run(command, three())
    assert Path("out/index.html").read_text("utf-8") == page


def test_without_traces_the_page_says_what_it_lacks(command: Arbor) -> None:
    run(command, three(), "--trace", "off")

    page = Path("out/index.html").read_text("utf-8")
    assert "The run over time is drawn from traces; there is none." in page
    assert "data-run" not in page


def test_the_page_runs_its_own_script_only_and_asks_nobody() -> None:
    hostile = '<script>alert(1)</script><img src=x onerror="alert(1)">"\'&'
    row = {"id": hostile, "problem": hostile, "answer": hostile, "expected": hostile}

    pages = {f"traces/{hostile}": f"traces/{hostile}.html"}

    page = index_page(hostile, [hostile], [row | {"trace": f"traces/{hostile}"}], pages)

    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', page)
    assert policy is not None
    (script,) = re.findall("<script>(.*?)</script>", page, re.DOTALL)
    allowed = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert policy[1] == (
        f"default-src 'none'; script-src 'sha256-{allowed}'; style-src 'unsafe-inline'; img-src data:"
    )
    assert "alert" not in script
    assert page.count("<script") == 1 and "<img" not in page
    assert not re.search(r"https?://|//[a-z]", page)
    assert page.count("&lt;script&gt;") >= 5
    assert re.findall(r'href="([^"]*)"', page)[1].startswith("traces/%3Cscript%3E")


def test_a_long_problem_is_cut_on_the_page() -> None:
    page = index_page("x", [], [{"id": "a", "problem": "p" * 5000}])

    assert "p" * 300 + "…" in page and "p" * 301 not in page


# Progress


def shown(live: bool, seconds: float, samples: int = 40) -> list[str]:
    """What a run of so many seconds a sample shows."""
    now = [0.0]
    console = Console(file=io.StringIO(), width=100, force_terminal=live)
    with Progress(console, live, samples, clock=lambda: now[0]) as progress:
        for number in range(samples):
            now[0] += seconds
            progress.add(number % 2 == 0)
    return str(console.file.getvalue()).splitlines()  # type: ignore[attr-defined]


def test_a_log_gets_a_line_each_half_minute() -> None:
    lines = shown(live=False, seconds=10)

    assert len(lines) == 13
    assert lines[0] == "arbor: 3 of 40, 66.7 % right, 6.0 per minute, 6 min left"
    assert shown(live=False, seconds=31, samples=200)[0].endswith("1.9 per minute, 1.7 h left")
    assert shown(live=False, seconds=120)[0].endswith("30.0 per hour, 78 min left")
    assert shown(live=False, seconds=0.25, samples=200)[0].endswith("240 per minute, 20 s left")


def test_a_short_run_says_nothing_in_a_log() -> None:
    assert shown(live=False, seconds=0.7) == []


def test_a_terminal_gets_one_line_again_and_again() -> None:
    text = "\n".join(shown(live=True, seconds=1, samples=3))

    assert "2 of 3, 50.0 % right, 60.0 per minute, 1 s left" in text and "arbor:" not in text


def test_a_run_that_says_nothing_counts_all_the_same() -> None:
    progress = Progress(None, True, 2)
    progress.add(True)

    assert progress.line().startswith("1 of 2, 100.0 % right")


# Grades


def test_invalid_answers_are_counted_apart_and_the_grader_is_named(command: Arbor) -> None:
    ran = run(
        command,
        dataset(
            {"problem": "one"},
            {"problem": "two", "answer": "2"},
            {"problem": "three invalid", "answer": "3"},
        ),
    )

    found = ran.document
    assert (found["n"], found["right"], found["invalid"], found["no_answer"]) == (3, 1, 1, 0)
    assert found["methods"] == {"none": 1, "text": 2}
    assert found["grader"] == "exact/3"
    assert [row["grade"]["extracted"] is None for row in rows()] == [False, False, True]
    shown = command("eval", "problems.jsonl", "--task", "reasoning", "--output", "out")
    assert "invalid     1" in shown.out


def test_guesses_and_cut_paths_are_counted_and_marked() -> None:
    ended = {"error": None, "expected": "7", "paths": 4, "metrics": {}}
    rows = [
        ended | {"id": "a", "answer": "7", "correct": True, "guessed": True, "cut_paths": 1},
        ended | {"id": "b", "answer": "6", "correct": False, "cut_paths": 0},
        ended | {"id": "c", "answer": None, "correct": False, "finish_reason": "cut"},
    ]
    rows[2]["cut_paths"] = 4

    found = results(rows) | {"missing": 0, "folder": "out"}

    assert (found["guessed"], found["cut"]) == (1, 1)
    assert (found["cut_paths"], found["paths"]) == (5, 12)
    lines = result_lines(found)
    assert "guessed     1" in lines
    assert any(line.startswith("cut         1 of 3 samples; 5 of 12 paths") for line in lines)
    page = index_page("run", lines, rows)
    assert re.findall(r'data-outcome="([^"]+)"', page) == [
        "right|guessed",
        "wrong",
        "no answer|cut",
    ]
    assert "right (guessed)" in page and "no answer (cut)" in page
    (row,) = compare_arms([ArmRuns("a", None, (0,), ("a",), ({r["id"]: r for r in rows},))])
    assert (row["guessed"], row["cut"]) == (pytest.approx(1 / 3), pytest.approx(1 / 3))


def test_timeouts_of_the_grader_are_shown() -> None:
    grade = {"extracted": "9", "method": "timeout", "correct": False, "reason": "timeout: …"}
    row = {"id": "1", "answer": "9", "correct": False, "error": None, "grade": grade}

    found = results([row]) | {"missing": 0, "folder": "out"}

    assert found["methods"] == {"timeout": 1}
    assert any(line.startswith("grading     1 timeout") for line in result_lines(found))


def test_a_run_with_another_grader_or_prompt_is_not_resumed(command: Arbor) -> None:
    run(command, three())
    config = Path("out/run.toml")
    text = config.read_text("utf-8")
    assert 'grader_version = "exact/3"' in text and "prompt_version = " in text

    config.write_text(text.replace("exact/3", "exact/0"), encoding="utf-8")

    ran = run(command, three())
    assert ran.code == 2 and "grader_version (exact/0 there, exact/3 here)" in ran.err


def progress_of(samples: int, at_once: int) -> tuple[Progress, list[float]]:
    """The progress of a run that shows nothing, and its clock."""
    now = [0.0]
    return Progress(None, False, samples, at_once, clock=lambda: now[0]), now


def test_the_rate_is_that_of_the_samples_finished_last() -> None:
    progress, now = progress_of(1000, 1)
    for seconds in (1.0,) * 100 + (60.0,) * WINDOW:
        now[0] += seconds
        progress.add(True)

    assert progress.line().endswith("1.0 per minute, 14.5 h left")
    now[0] += 60.0 * WINDOW  # nothing is finished for as long again
    assert progress.line().endswith("30.0 per hour, 28.9 h left")


def test_the_rate_of_several_at_a_time_counts_them_all() -> None:
    progress, now = progress_of(80, 8)
    begin = next(fake_run.fake_run(seed=1))
    assert progress.line() == "0 of 80"
    now[0] = 500.0  # loading the model
    for _ in range(8):
        progress.hear(begin)
    assert progress.line() == "0 of 80, 8 in progress"
    for _ in range(5):  # eight at a time take half a minute
        now[0] += 30.0
        for _ in range(8):
            progress.hear(Ended("solved", 1))
            progress.add(True)
            progress.hear(begin)

    assert progress.line() == (
        "40 of 80, 8 in progress, 100.0 % right, 16.0 per minute, 2 min left"
    )
