"""The command line: what it prints where, how it ends, and that its errors say what would work."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support.fake_run import fake_run, tick
from support.run_cli import REAL, Arbor, await_line, environment, spawn
from support.slow_cases import every

from arbor.measure.evaluation.folder import RunFolder
from arbor.trace import Replay, TraceWriter, read_trace

TRACE, OTHER_RUN = "run.arbor.jsonl", "other-run"


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    path = tmp_path / "run.arbor.jsonl"
    with TraceWriter(path, clock=tick()) as writer:
        for event in fake_run(seed=1):
            writer(event)
    return path


# What it prints


def test_a_pipe_gets_the_answer_and_nothing_else(command: Arbor) -> None:
    ran = command("solve", "4 5 6 10")

    assert (ran.code, ran.out, ran.err) == (0, "(10 - 4) * 5 - 6\n", "")


def test_flags_reach_the_solver(command: Arbor) -> None:
    config = command(
        *("solve", "4 5 6 10", "--json", "--max-depth", "2", "--step-tokens", "9", "--seed", "7"),
        *("--temperature", "0", "--set", "top_p=0.5", "--set", "top_k=3"),
        *("--set", "max_expansions=11"),
        *("--timeout", "1.5", "--expected", "24", "--deterministic", "--dtype", "float32"),
        *("--set", "first=verified", "--set", "confidence=0.9"),
        *("--set", "trace_level=tokens", "--set", "cuda_graphs=false"),
        *("--model", "./m", "--controller", "beam", "--verifier", "exact", "--budget", "0.7"),
    ).document["config"]

    assert config["sampling"] == repr({"temperature": 0.0, "top_p": 0.5, "top_k": 3})
    assert config["controller"].startswith("Beam(")
    assert config["verifier"].startswith("Exact(")
    assert {k: config[k] for k in ("max_depth", "step_tokens", "seed", "max_expansions")} == {
        "max_depth": "2",
        "step_tokens": "9",
        "seed": "7",
        "max_expansions": "11",
    }
    assert (config["timeout"], config["expected"], config["model"]) == (1.5, "24", "./m")
    assert (config["first"], config["confidence"]) == ("verified", 0.9)
    assert (config["deterministic"], config["dtype"]) == ("True", "'float32'")
    assert (config["trace_level"], config["cuda_graphs"]) == ("tokens", "False")


@pytest.mark.parametrize(
    ("setting", "code", "words"),
    [
        ("widht=3", "unknown-setting", "Did you mean 'width'?"),
        ("controller.widht=3", "unknown-setting", "Did you mean 'width'?"),
        ("sampling.topp=3", "unknown-setting", "Did you mean 'top_p'?"),
        ("width", "setting", "KEY=VALUE"),
        ("engine.width=3", "setting", "PART is one of"),
        ("width=many", "setting-type", "width"),
        ("top_k=many", "setting-type", "must be a whole number"),
        ("arithmetic=perhaps", "setting-type", "must be true or false"),
    ],
)
def test_an_invalid_setting_is_refused(command: Arbor, setting: str, code: str, words: str) -> None:
    ran = command("solve", "4 5 6 10", "--set", setting)

    assert ran.code == 2
    assert f"[{code}]" in ran.err and words in ran.err


# Where the problem comes from


# How it goes wrong


@pytest.mark.parametrize(
    ("arguments", "exit_code", "code", "words"),
    [
        (["solv"], 2, "usage", "Did you mean 'solve'?"),
        (["solve", "x", "--bugdet", "1"], 2, "usage", "--budget"),
        (["solve", "x", "--max-depth", "0"], 2, "usage", "--max-depth"),
        (["solve", "x", "--timeout", "soon"], 2, "usage", "'soon' must be a number >= 0."),
        (["solve", "x", "--set", "top_p=2"], 2, "limit", "of at least 0 and at most 1."),
        (["solve", "What is 2+3?"], 4, "problem-invalid", "--task reasoning"),
        (["solve", "x", "-o", "y"], 2, "usage", "Name the file with --trace or --html."),
        (["solve", "4 5 6 10", "--budget", "0,5"], 2, "budget-range", "Did you mean 0.5 (keep"),
        (["solve", "4", "5", "6", "10"], 2, "usage", "Put the problem in quotes"),
        (["view", "a", "--event", "-1"], 2, "usage", "must be a whole number >= 0."),
        (["solve"], 2, "usage", "no problem is given"),
        (["solve", "x", "--file", "y"], 2, "usage", "exclude each other"),
        (["solve", "--file", "nowhere.txt"], 4, "problem-unreadable", "No such file"),
        (["solve", ""], 4, "problem-empty", "Try: 4 5 6 10"),
        (["solve", "4 5"], 4, "problem-invalid", "four are needed"),
        (["solve", "4 5 6 10", "--budget", "25"], 2, "budget-range", "Did you mean 0.25"),
        (["solve", "4 5 6 10", "--budget", "1tok"], 6, "budget-infeasible", "28tok"),
        (["solve", "4 5 6 10", "--task", "game42"], 2, "unknown-task", "Did you mean 'game24'"),
        (["solve", "4 5 6 10", "--controller", "tott"], 2, "unknown-controller", "'tot'"),
        (["solve", "4 5 6 10", "--verifier", "sef"], 2, "unknown-verifier", "'self'"),
        (["solve", "\udce9"], 4, "not-utf8", "--file"),
        (["trace", "info", "nowhere"], 4, "trace-unreadable", "No such file"),
        (["list", "planets"], 2, "usage", "planets"),
        (["solve", "4 5 6 10", "--trace", "no/where.jsonl"], 2, "trace-unwritable", "No such"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_an_error_says_what_and_what_would_work(
    command: Arbor, arguments: list[str], exit_code: int, code: str, words: str
) -> None:
    ran = command(*arguments)

    assert ran.code == exit_code
    assert ran.out == ""
    assert ran.err.startswith(f"arbor: error: [{code}] ")
    assert words in ran.err
    assert "Traceback" not in ran.err

    error = command(*arguments, "--json").document["error"]
    assert error["code"] == code
    assert set(error) == {"code", "message", "hint", "data"}


def test_an_environment_variable_sets_an_option(
    command: Arbor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARBOR_SOLVE_SEED", "9")

    assert command("solve", "4 5 6 10", "--json").document["config"]["seed"] == "9"


def test_more_continuations_than_beams_are_refused(command: Arbor) -> None:
    ran = command("generate", "one", "--beams", "2", "--best", "4")

    assert ran.code == 2 and "Give --beams 4." in ran.err
    assert "None" not in command("generate", "--help-all").out


@pytest.mark.parametrize(
    "arguments",
    every(
        4,
        [
            ["--version"],
            ["--help"],
            ["solve", "--help"],
            ["solve", "--help-all"],
            ["solve", "4 5"],
            ["eval", "--help"],
            ["bench", "--help"],
            ["bench", "--compare", "nowhere.json"],
            ["eval", "nowhere.jsonl"],
            ["eval", "game24", "--limit", "x"],
            ["solve", "4 5 6 10", "--budget", "25"],
            ["solve", "4 5 6 10", "--controller", "tott"],
            ["solve", "4 5 6 10", "--device", "tpu"],
            ["solve", "4 5 6 10", "--dtype", "float33"],
            ["solve", "4 5 6 10", "--backend", "troch"],
            ["solve", "4 5 6 10", "--rehydrate", "off"],
            ["solve", "4 5 6 10", "--model", "./nowhere"],
            ["solve", "4 5 6 10", "--set", "msve=./nowhere"],
            ["solve", "4 5 6 10", "--set", "top_k=-1"],
            ["solve", "4 5 6 10", "--set", "nonsense=1"],
            ["solve", "4 5 6 10", "--set", "width=3", "--print-config"],
            ["solve", "4 5 6 10", "--dry-run"],
            ["solve", "4 5 6 10", "--dry-run", "--budget", "3tok"],
            ["info"],
            ["info", "--controller", "beam", "--json"],
            ["eval", "game24", "--output", OTHER_RUN],
            ["info", "./nowhere"],
            ["replay", "nowhere", "--policy", "arbokv"],
            ["trace", "info", "nowhere"],
            ["trace", "info", TRACE],
            ["trace", "check", TRACE],
            ["view", TRACE, "--term"],
            ["view", TRACE, "-o", "-"],
            ["list", "controllers"],
            ["list", "verifiers"],
        ],
    ),
    ids=" ".join,
)
def test_torch_is_not_imported_before_it_is_needed(
    arguments: list[str], trace: Path, tmp_path: Path
) -> None:
    RunFolder(tmp_path / "out", {"seed": 5}).close()
    paths = {TRACE: str(trace), OTHER_RUN: str(tmp_path / "out")}
    arguments = [paths.get(word, word) for word in arguments]
    code = (
        "import sys; from arbor.cli import main; main(sys.argv[1:]);"
        "sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    )

    with spawn(*arguments, code=code) as process:
        assert process.communicate(timeout=60) and process.returncode == 0


# Terminals, pipes, signals


def test_a_closed_pipe_is_not_an_error() -> None:
    with spawn("list", "tasks", code=REAL) as process:
        assert process.stdout is not None and process.stderr is not None
        process.stdout.close()

        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 0


@pytest.mark.parametrize(
    ("number", "exit_code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)], ids=["INT", "TERM"]
)
def test_the_first_signal_gives_the_best_so_far(
    tmp_path: Path, number: int, exit_code: int
) -> None:
    trace = tmp_path / "run.arbor.jsonl"
    with spawn("solve", "4 5 6 10", "--revision", "endless", "--trace", str(trace)) as process:
        await_line(process, b"running")

        process.send_signal(number)
        out, err = process.communicate(timeout=60)

    assert process.returncode == exit_code
    assert out == b"(10 - 4) * 5 - 6\n"
    assert b"stopping after this forward pass" in err
    replay = Replay.of(read_trace(trace))
    assert replay.problems == []
    assert replay.ended is not None and replay.ended.status == "interrupted"


def test_the_second_signal_ends_at_once() -> None:
    with spawn("solve", "4 5 6 10", "--revision", "endless,stuck") as process:
        await_line(process, b"running")
        process.send_signal(signal.SIGINT)
        await_line(process, b"stopping")
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=60)

    assert process.returncode == 130
    assert b"[interrupted]" in err and b"Traceback" not in err


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=["INT", "TERM"])
@pytest.mark.parametrize(
    "module",
    [
        "click.core",
        "arbor.cli.app",
        "arbor.cli.build",
        pytest.param("torch._C", marks=pytest.mark.slow),
        pytest.param("torch", marks=pytest.mark.slow),
        pytest.param("arbor.solver", marks=pytest.mark.slow),
        pytest.param("transformers.configuration_utils", marks=pytest.mark.slow),
    ],
)
def test_a_signal_during_start_up_ends_with_one_line(module: str, number: int) -> None:
    command = [sys.executable, "-X", "importtime", "-c", REAL, "solve", "4 5 6 10"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environment()
    ) as process:
        await_line(process, b" " + module.encode() + b"\n")
        process.send_signal(number)
        out, err = process.communicate(timeout=60)

    lines = [line for line in err.splitlines() if not line.startswith(b"import time:")]
    assert (process.returncode, out) == (128 + number, b"")
    assert lines == [b"arbor: error: [interrupted] stopped at once."]


def test_a_signal_during_a_command_s_import_ends_with_one_line(tmp_path: Path) -> None:
    """An exception raised there would become a `RuntimeError` (Python 3.11: in `__set_name__`)."""
    (tmp_path / "signalling.py").write_text(
        "import os, signal\n"
        "class Named:\n"
        "    def __set_name__(self, owner, name):\n"
        "        os.kill(os.getpid(), signal.SIGTERM)\n"
        "class Owner:\n"
        "    named = Named()\n"
    )
    code = "import sys; from arbor.cli import app, main; sys.path.append(sys.argv.pop()); "
    code += "app.cli.lazy['solve'] = ('signalling:solve', ''); sys.exit(main())"

    with spawn("solve", "4 5 6 10", str(tmp_path), code=code) as process:
        out, err = process.communicate(timeout=60)

    assert (process.returncode, out) == (128 + signal.SIGTERM, b"")
    assert err == b"arbor: error: [interrupted] stopped at once.\n"


@pytest.mark.parametrize("where", ["__del__", "a callback"])
def test_a_signal_where_python_ignores_exceptions_ends_the_process(
    where: str, tmp_path: Path
) -> None:
    (tmp_path / "signalling.py").write_text(
        "import os, signal, weakref\n"
        "def kill(*_):\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "class Dropped:\n"
        f"    {'__del__' if where == '__del__' else 'unused'} = kill\n"
        "def solve(*_, **__):\n"
        "    dropped = Dropped()\n"
        "    callback = weakref.ref(dropped, kill)\n"
        "    del dropped\n"
        "    print('went on')\n"
    )
    code = "import sys; sys.path.append(sys.argv.pop()); import signalling; "
    code += "from arbor.cli import app, main; app._run = signalling.solve; sys.exit(main())"

    with spawn("solve", "4 5 6 10", str(tmp_path), code=code) as process:
        out, err = process.communicate(timeout=60)

    assert (process.returncode, out) == (128 + signal.SIGTERM, b"")
    assert err == b"arbor: error: [interrupted] stopped at once.\n"


# Other commands


def test_trace_info_shows_the_run(command: Arbor, trace: Path) -> None:
    ran = command("trace", "info", str(trace))

    assert ran.code == 0
    assert "problem   4 5 6 10  (game24, seed 0)" in ran.out
    assert "answer    (10 - 4) * 5 - 6" in ran.out
    assert "end       solved in" in ran.out

    document = command("trace", "info", str(trace), "--json").document
    assert (document["status"], document["complete"]) == ("solved", True)
    assert document["metrics"]["nodes"] > 1


@pytest.mark.parametrize("kind", ["controllers", "verifiers", "tasks", "backends", "models"])
def test_list_names_what_there_is(
    command: Arbor, kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "none"))
    text = command("list", kind).out

    rows = command("list", kind, "--json").document[kind]
    assert rows
    for row in rows:
        assert row["name"] in text
