"""``arbor eval``: dataset, folder, resuming, results and comparison."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import re
import shutil
import signal
import textwrap
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from support import fake_solver
from support.run_cli import Arbor, await_line, in_process, spawn
from support.slow_cases import every

from arbor import Solver
from arbor.cli.progress import Progress
from arbor.engine.rehydration import Rehydration
from arbor.measure.evaluation.page import index_page
from arbor.model.loading import locate_model
from arbor.retention.alpha import save_alpha
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


def test_samples_that_are_no_longer_asked_for_count_with_a_warning(command: Arbor) -> None:
    whole = run(command, three())
    less = run(command, three(), "--limit", "2")

    assert less.document["n"] == whole.document["n"] == 3
    assert "1 sample(s) of out are not among those asked for" in less.err
    assert "asked for" not in whole.err


def test_other_settings_are_refused_and_named(command: Arbor) -> None:
    run(command, three())
    before = {path: path.read_bytes() for path in Path("out").rglob("*") if path.is_file()}

    ran = run(command, three(), "--seed", "7", "--timeout", "3")

    assert (ran.code, ran.document["error"]["code"]) == (2, "run-differs")
    assert ran.document["error"]["data"]["keys"] == ["seed", "timeout"]
    assert "seed (0 there, 7 here), timeout (none there, 3.0 here)" in ran.err
    assert "--fresh" in ran.err
    assert {p: p.read_bytes() for p in Path("out").rglob("*") if p.is_file()} == before


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


def test_resuming_with_another_alpha_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    model, real = Path("m"), in_process(capsys)
    shutil.copytree(locate_model("builtin:sapling").path, model)
    words = ["eval", "chains", "--model", "m", "--controller", "chain", "--limit", "1"]
    words += ["--policy", "raas", "--mode", "lossy", "--output", "out", "--json"]
    first = real(*words)
    save_alpha(model / "alpha.json", 0.002, {"task": "chains"})

    changed = real(*words)

    assert (first.code, changed.code) == (0, 2)
    assert changed.document["error"]["code"] == "run-differs"
    assert changed.document["error"]["data"]["keys"] == ["policy.protect.threshold"]


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


@pytest.mark.parametrize("number", every(2, [signal.SIGINT, signal.SIGKILL]), ids=["INT", "KILL"])
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


@pytest.mark.slow
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


def test_errors_are_reported_with_their_reasons(command: Arbor) -> None:
    run(command, unsolvable(), "--on-error", "continue")
    again = ("eval", "problems.jsonl", "--task", "reasoning", "--output", "out", "-q")
    ran = command(*again, "--on-error", "continue")

    assert "errors      1 problem-too-long; the first: 9,120 tokens; the context is" in ran.out
    found = json.loads(Path("out/results.json").read_text("utf-8"))
    assert found["error_codes"] == {"problem-too-long": 1}
    assert found["first_error"]["hint"] == "Shorter."
    assert (found["errors"], found["missing"]) == (1, 0), "a failed sample has been run"


# Where samples come from


@pytest.mark.parametrize("name", ["own.py:Two", "own_module:Two", "own_module:TWO"])
def test_a_task_of_ones_own_is_named_as_its_components_are_and_resumed_from_elsewhere(
    name: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    text = """
        from dataclasses import dataclass, replace
        from arbor.tasks.game24 import Game24

        @dataclass(frozen=True)
        class Two(Game24):
            def problems(self, split, limit=None):
                for problem in super().problems(split, 2):
                    yield replace(problem, id=f"two-{problem.id}")

        TWO = Two()
    """
    (tmp_path / "own.py").write_text(textwrap.dedent(text))
    (tmp_path / "own_module.py").write_text(textwrap.dedent(text))
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    arbor, out = in_process(capsys), str(tmp_path / "out")

    done = arbor("eval", name, "--controller", "chain", "--output", out)
    first = Path(out, "samples.jsonl").read_bytes()
    monkeypatch.chdir("elsewhere")
    again = arbor("eval", "--config", f"{out}/run.toml", "--output", out)

    assert (done.code, again.code) == (0, 0), again.err
    assert Path(out, "samples.jsonl").read_bytes() == first
    assert [row["id"][:4] for row in rows(out)] == ["two-", "two-"]


def broken(text: str | bytes, name: str = "x.jsonl") -> Any:
    def write() -> list[str]:
        Path(name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return [name, "--task", "reasoning"]

    return write


ROWS = [
    (["gsm8k"], 2, "no-problems", ("arbor eval problems.jsonl --task gsm8k",)),
    (["gsm9k"], 2, "unknown-dataset", ("Known: chains, countdown, game24, recall; or a file",)),
    (["mine.py:Mine"], 2, "task-broken", ("mine.py: no such file",)),
    (["nowhere:Mine"], 2, "task-broken", ("No module named 'nowhere'",)),
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
    (
        broken('[{"problem": "a", "answer": "1"}', "x.json"),
        4,
        "dataset-invalid",
        ("line 1 is not JSON",),
    ),
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
    (["game24", "--limit", str(2**63)], 2, "limit", ("100 for the first hundred",)),
    (["game24", "--limit", "9" * 5000], 2, "limit", ("100 for the first hundred",)),
    (
        lambda: [*broken('{"problem": "a", "answer": "1"}\n')(), "--encoding", "base64"],
        *(2, "encoding", ("'base64'", "--encoding utf-8 or latin-1")),
    ),
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


# Gates and comparisons


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


def test_only_samples_with_the_same_problem_are_compared(command: Arbor) -> None:
    problems = {"a": ("p1", "p2", "p3"), "b": ("p1", "q2", "p3"), "c": ("q1", "q2", "q3")}
    names = {
        output: dataset(
            *({"id": str(n), "problem": text} for n, text in enumerate(texts)),
            name=f"{output}.jsonl",
        )
        for output, texts in problems.items()
    }
    run(command, names["a"], output="a")

    pair = run(command, names["b"], "--compare", "a", output="b").document["comparison"]
    text = command("eval", names["b"], "--task", "reasoning", "--output", "b", "--compare", "a").out
    other = run(command, names["c"], "--compare", "a", output="c")

    assert (pair["n"], pair["other_problem"]) == (2, 1)
    assert "2 samples in both; 1 left out, whose ids have other problems there" in text
    assert other.document["error"]["code"] == "run-disjoint"
    assert "none of these 3 samples; 3 of their ids have other problems there" in other.err
    assert not Path("c").exists()


# The page


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


# Grades
