"""The command line: what it prints where, how it ends, and that its errors say what would work."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import fake_solver
from support.fake_run import fake_run, tick
from support.run_cli import REAL, Arbor, await_line, environment, spawn
from support.slow_cases import every

import arbor
from arbor import components, registry
from arbor.aggregate.base import AnswerVotes
from arbor.aggregate.weighted import Weighted
from arbor.budget import Budget, Footprint
from arbor.cli.output import Output
from arbor.cli.show import listed
from arbor.cli.signals import Interrupted, StopSignals
from arbor.cli.solve import (
    budget_line,
    numbers_line,
    print_plan,
    unreached_line,
    votes_table,
)
from arbor.measure.evaluation.folder import RunFolder
from arbor.metrics import Metrics
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


def test_verbose_prints_the_numbers_on_stderr(command: Arbor) -> None:
    ran = command("solve", "4 5 6 10", "--budget", "0.5", "-v")

    budget, loading, numbers, unreached = ran.err.splitlines()
    assert loading == "loading builtin:sapling · weights float32, 3.73 GiB · seed 0"
    assert ran.out == "(10 - 4) * 5 - 6\n"
    assert budget == (
        "budget 0.5 keeps 50 % of what full retention holds at the time, and one expansion in any "
        "case; full retention needs 500 tokens (500 KiB) at most"
    )
    assert numbers.startswith("solved in 0.")
    for part in (" blocks · ", " tok/s · peak KV ", " % of budget", "thoughts"):
        assert part in numbers
    assert unreached == (
        "this budget was never reached: peak 80 of 200 tokens; 50tok to 79tok would evict KV"
    )


def test_quiet_means_quiet(command: Arbor) -> None:
    ran = command("solve", "4 5 6 10", "-q", "--display", "plain")

    assert (ran.out, ran.err) == ("(10 - 4) * 5 - 6\n", "")


def test_json_is_one_document(command: Arbor) -> None:
    ran = command("solve", "4 5 6 10", "--json")

    assert ran.document["schema"] == "arbor.solution/1"
    assert ran.document["answer"] == "(10 - 4) * 5 - 6"
    assert ran.document["metrics"]["blocks"] > 0
    assert ran.err == ""


def test_shared_options_may_stand_before_the_command(command: Arbor) -> None:
    assert command("--json", "solve", "4 5 6 10").document["finish_reason"] == "solved"
    assert command("-v", "solve", "4 5 6 10").err.startswith("budget full keeps")


def test_a_search_without_an_answer_ends_with_three(command: Arbor) -> None:
    ran = command("solve", "4 5 6 10", "--revision", "none")

    assert (ran.code, ran.out) == (3, "")
    assert ran.err.startswith("arbor: [no-answer] search exhausted after ")


def test_a_search_without_an_answer_is_still_one_document(command: Arbor) -> None:
    ran = command("solve", "4 5 6 10", "--revision", "none", "--json")

    assert (ran.code, ran.document["answer"]) == (3, None)


def test_a_trace_is_written_and_checks(command: Arbor) -> None:
    command("solve", "4 5 6 10", "--trace", "run.arbor.jsonl.gz")

    ran = command("trace", "check", "run.arbor.jsonl.gz")
    assert ran.code == 0
    assert "blocks, consistent" in ran.out


def test_a_guessed_answer_is_marked(command: Arbor) -> None:
    plain = command("solve", "4 5 6 10")
    ran = command("solve", "4 5 6 10", "--revision", "guess")

    assert "guess" not in plain.err
    assert (ran.code, ran.out) == (0, plain.out)
    assert "[guessed-answer] the text marks no answer" in ran.err
    for words, guessed in (("cpu", False), ("guess", True)):
        document = command("solve", "4 5 6 10", "--revision", words, "--json").document
        assert document["guessed"] is guessed


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        (
            {"peak_tokens": 749, "budget_tokens": 1500, "smallest_tokens": 109},
            "this budget was never reached: peak 749 of 1,500 tokens; 109tok to 748tok would evict "
            "KV",
        ),
        (
            {"peak_tokens": 80, "budget_tokens": 1500, "smallest_tokens": 109},
            "this budget was never reached: peak 80 of 1,500 tokens",
        ),
        ({"peak_tokens": 1500, "budget_tokens": 1500}, ""),
        ({"peak_tokens": 1400, "budget_tokens": 1500, "pressure_events": 1}, ""),
        ({"peak_tokens": 749, "budget_tokens": 3533}, ""),
    ],
)
def test_a_budget_that_was_never_reached_is_said(counts: dict[str, int], line: str) -> None:
    assert unreached_line(Metrics(full_tokens=3533, **counts)) == line


SHAPE = Footprint(11, 32, 3, 110, 2)


@pytest.mark.parametrize(
    ("budget", "line"),
    [
        (
            "0.25",
            "keeps 25 % of what full retention holds at the time, and one expansion in any case; "
            "full retention needs 3,533 tokens (41.4 MiB) at most",
        ),
        (
            "200tok",
            "keeps 200 tokens (2.34 MiB) at most; full retention needs 3,533 tokens (41.4 MiB) at "
            "most",
        ),
        ("full", "keeps everything, 3,533 tokens (41.4 MiB) at most"),
    ],
)
def test_the_plan_line_says_what_is_kept_and_the_worst_case(budget: str, line: str) -> None:
    plan = Budget.parse(budget).plan(SHAPE, 12_288)

    assert budget_line(budget, plan) == f"budget {budget} {line}"


@pytest.mark.parametrize(
    ("counts", "line"),
    [
        (
            {"peak_tokens": 175, "retained_tokens": 703},
            "held 175 of the 703 tokens that full retention holds (25 %, 0 B)",
        ),
        (
            {
                "peak_tokens": 235,
                "retained_tokens": 287,
                "expansion_tokens": 235,
                "peak_unshared_tokens": 780,
            },
            "held 235 of the 287 tokens that full retention holds (82 %, 0 B; one expansion is that "
            "much; 780 without prefix sharing)",
        ),
    ],
)
def test_the_summary_gives_the_ratio_that_was_reached(counts: dict[str, int], line: str) -> None:
    assert line in numbers_line("solved", Metrics(part=0.25, **counts))


def test_a_dry_run_shows_what_is_kept_and_the_worst_case(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_plan(Output(), Budget.parse("0.25").plan(SHAPE, 12_288))

    assert capsys.readouterr().out.splitlines() == [
        "budget                  0.25 of what full retention holds at the time, at least one expansion",
        "worst case             3,533 tokens  41.4 MiB  full retention, at most",
        "smallest workable         45 tokens   540 KiB  prompt, one thought and a question, as an amount",
        "enough                   109 tokens  1.28 MiB  for any tree, as an amount",
        "shape             11 prompt + 110 blocks of 32 + 2 question, 3 deep",
    ]


def test_a_dry_run_shows_the_plan_only(command: Arbor) -> None:
    ran = command("solve", "4 5 6 10", "--dry-run", "--budget", "100tok")

    assert ran.code == 0
    weights, *plan = ran.out.splitlines()
    assert weights == "weights           float32, 3.73 GiB"
    assert plan == [
        "budget                   100 tokens   100 KiB  0.2 of the worst case",
        "worst case               500 tokens   500 KiB  full retention, at most",
        "smallest workable         28 tokens    28 KiB  prompt, one thought and a question, as an amount",
        "enough                    44 tokens    44 KiB  for any tree, as an amount",
        "shape             20 prompt + 60 blocks of 8 + 0 question, 3 deep",
    ]
    as_json = command("solve", "4 5 6 10", "--dry-run", "--json").document
    assert (as_json["schema"], as_json["full_tokens"]) == ("arbor.plan/1", 500)


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


def test_set_goes_to_the_part_that_has_it(command: Arbor) -> None:
    arguments = ("--set", "width=3", "--set", "sampling.top_k=5", "--set", "temperature=0.25")
    arguments += ("--set", "arithmetic=false")

    config = command("solve", "4 5 6 10", "--json", *arguments).document["config"]

    assert "width=3" in config["controller"]
    assert config["sampling"] == repr({"top_k": 5, "temperature": 0.25, "arithmetic": False})


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


def test_a_file_is_a_problem(command: Arbor, tmp_path: Path) -> None:
    (tmp_path / "problem.txt").write_bytes(b"\xef\xbb\xbf4 5 6 10\n")

    assert command("solve", "--file", "problem.txt").code == 0


def test_a_dash_is_stdin() -> None:
    with spawn("solve", "-", stdin=subprocess.PIPE) as process:
        out, err = process.communicate(b"4 5 6 10\n", timeout=60)

    assert (process.returncode, out, err) == (0, b"(10 - 4) * 5 - 6\n", b"")


def test_a_file_that_is_not_utf8_says_where(command: Arbor, tmp_path: Path) -> None:
    (tmp_path / "problem.txt").write_bytes(b"4 5\n6 \xe9")

    ran = command("solve", "--file", "problem.txt", "--json")

    assert ran.code == 4
    assert ran.err == (
        "arbor: error: [not-utf8] problem.txt: byte 0xe9 at offset 6 (line 2). "
        "It may be Latin-1: iconv -f latin1 -t utf8, or --encoding latin-1.\n"
    )
    assert ran.document["error"]["data"] == {"path": "problem.txt", "offset": 6, "line": 2}


def test_another_encoding_is_read(command: Arbor, tmp_path: Path) -> None:
    (tmp_path / "problem.txt").write_bytes("4 5 6 10".encode("utf-16"))

    assert command("solve", "--file", "problem.txt", "--encoding", "utf-16").code == 0


# How it goes wrong


@pytest.mark.parametrize("words", [[], ["solve"], ["trace"], ["trace", "check"]], ids=" ".join)
def test_help_is_a_command_too(command: Arbor, words: list[str]) -> None:
    shown = command("help", *words)

    assert shown.code == 0
    assert shown.out == command(*words, "-h").out == command(*words, "--help").out
    assert command("help", *words, "--help-all").out == command(*words, "--help-all").out


def test_help_of_an_unknown_command_suggests_the_closest_match(command: Arbor) -> None:
    ran = command("help", "slove")

    assert ran.code == 2
    assert "Did you mean 'solve'?" in ran.err


def test_an_environment_variable_that_sets_nothing_is_named(
    command: Arbor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARBOR_SOLVE_BUGET", "0.5")
    monkeypatch.setenv("ARBOR_TRACE_CHECK_JSON", "1")

    ran = command("solve", "4 5 6 10")

    assert ran.code == 0
    assert ran.err == (
        "arbor: warning: the environment variable ARBOR_SOLVE_BUGET sets nothing. "
        "Did you mean 'ARBOR_SOLVE_BUDGET'?\n"
    )


def test_words_for_the_built_in_model_are_warned_of(command: Arbor) -> None:
    ran = command("solve", "What is 2+3?", "--task", "reasoning")

    assert "with --task reasoning its answers are guesses" in ran.err


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


def test_debug_shows_the_traceback(command: Arbor) -> None:
    ran = command("--debug", "solve", "4 5 6 10", "--budget", "25")

    assert ran.code == 2
    assert "Traceback" in ran.err and "[budget-range]" in ran.err


def test_a_bug_keeps_its_traceback_in_a_file(command: Arbor, tmp_path: Path) -> None:
    ran = command("solve", "4 5 6 10", "--revision", "bug")

    report = next(tmp_path.glob("arbor-crash-*.txt"))
    assert ran.code == 1
    assert ran.err.startswith("arbor: error: [bug] RuntimeError: a plank came loose; ")
    assert str(report) in ran.err and "doctor" in ran.err
    assert "Traceback" not in ran.err
    assert "a plank came loose" in report.read_text(encoding="utf-8")


def test_out_of_memory_is_not_a_bug(command: Arbor, monkeypatch: pytest.MonkeyPatch) -> None:
    class OutOfMemoryError(RuntimeError):
        pass

    def fail(self: object, problem: str) -> None:
        raise OutOfMemoryError("CUDA out of memory. Tried to allocate 512.00 MiB.\nmore")

    monkeypatch.setattr(fake_solver.FakeSolver, "plan", fail)

    ran = command("solve", "4 5 6 10")

    assert ran.code == 6
    assert "[oom] CUDA out of memory. Tried to allocate 512.00 MiB. Try a smaller" in ran.err


def test_what_may_not_be_read_is_not_a_bug(command: Arbor, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: object, problem: str) -> None:
        raise PermissionError(13, "Permission denied", "models/mine/config.json")

    monkeypatch.setattr(fake_solver.FakeSolver, "plan", fail)

    ran = command("solve", "4 5 6 10")

    assert ran.code == 2
    assert "[no-permission] models/mine/config.json: Permission denied." in ran.err


def test_no_arguments_show_the_help(command: Arbor) -> None:
    ran = command()

    assert ran.code == 2
    assert "Usage: arbor" in ran.err


@pytest.mark.parametrize("words", [[], ["solve"], ["trace"], ["trace", "check"]], ids=" ".join)
def test_the_long_help_ends_with_the_exit_codes(command: Arbor, words: list[str]) -> None:
    ran = command(*words, "--help-all")

    assert ran.code == 0
    assert "130 Ctrl-C" in ran.out.splitlines()[-1]


def test_an_unknown_option_points_to_the_long_help(command: Arbor) -> None:
    assert "See 'arbor solve --help-all'." in command("solve", "--nothing").err


def test_the_long_help_groups_options_and_shows_defaults(command: Arbor) -> None:
    text = command("solve", "--help-all").out

    for heading in ("Problem:", "Search:", "KV budget:", "Model:", "Sampling:", "Output:"):
        assert f"\n{heading}\n" in text
    assert "[default: builtin:sapling]" in " ".join(text.split())
    assert text.count('arbor solve "4 5 6 10"') == 2


def test_an_environment_variable_sets_an_option(
    command: Arbor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARBOR_SOLVE_SEED", "9")

    assert command("solve", "4 5 6 10", "--json").document["config"]["seed"] == "9"


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


@pytest.mark.parametrize("words", ["arbor slove ", "arbor trace chek ", "arbor nothing --"])
def test_completion_after_a_mistyped_command_says_nothing_worse(words: str) -> None:
    tab = {"_ARBOR_COMPLETE": "bash_complete", "COMP_WORDS": words, "COMP_CWORD": "2"}
    with spawn(code=REAL, env=environment(**tab)) as process:
        _, err = process.communicate(timeout=60)

    assert (process.returncode, err) == (0, b"")


def test_the_version_is_arbors(command: Arbor) -> None:
    assert command("--version").out == f"arbor {arbor.__version__}\n"


# Terminals, pipes, signals


def read_terminal(arguments: list[str], **more: str) -> tuple[int, str]:
    """Exit code and everything a terminal showed."""
    master, slave = pty.openpty()
    settings = environment(**({"TERM": "xterm"} | more))
    with spawn(*arguments, stdout=slave, stderr=slave, env=settings) as process:
        os.close(slave)
        shown = b""
        while True:
            ready, _, _ = select.select([master], [], [], 60)
            try:
                data = os.read(master, 65536) if ready else b""
            except OSError:  # Linux says so when the other end closes
                data = b""
            if not data:
                break
            shown += data
        os.close(master)
        return process.wait(timeout=60), shown.decode()


def test_a_terminal_shows_budget_answer_and_numbers() -> None:
    code, shown = read_terminal(["solve", "4 5 6 10", "--color", "never"])

    assert code == 0
    budget, answer, end = (shown.index(t) for t in ("budget full", "(10 - 4)", "solved in"))
    assert budget < answer < end
    assert shown.index("blocks  ") < answer, "the meter is drawn while the search runs"
    numbers, note = shown.rstrip().splitlines()[-2:]
    assert numbers.endswith("thoughts") and note.startswith("this budget was never reached")


def test_a_dumb_terminal_gets_lines_and_no_control_characters() -> None:
    code, shown = read_terminal(["solve", "4 5 6 10"], TERM="dumb")

    assert code == 0 and "(10 - 4) * 5 - 6" in shown
    assert "\x1b" not in shown and "\r" not in shown.replace("\r\n", "\n")


def test_no_color_leaves_no_colors() -> None:
    _, shown = read_terminal(["solve", "4 5 6 10", "--display", "plain"], NO_COLOR="1")

    assert "\x1b[3" not in shown


def test_an_ascii_terminal_is_written_to_in_ascii() -> None:
    ascii = environment(PYTHONIOENCODING="ascii")
    with spawn("solve", "4 5 6 10", "-v", env=ascii) as process:
        out, err = process.communicate(timeout=60)

    assert process.returncode == 0
    assert b" | seed 0" in err
    err.decode("ascii")
    out.decode("ascii")


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


def test_a_signal_without_a_search_ends_at_once() -> None:
    with StopSignals(), pytest.raises(Interrupted) as caught:
        signal.raise_signal(signal.SIGTERM)

    assert caught.value.exit_code == 143


def test_the_old_handlers_come_back() -> None:
    before = signal.getsignal(signal.SIGINT)

    with StopSignals():
        assert signal.getsignal(signal.SIGINT) != before

    assert signal.getsignal(signal.SIGINT) == before


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


def test_trace_info_reads_a_damaged_trace_and_says_so(command: Arbor, trace: Path) -> None:
    data = trace.read_bytes()
    trace.write_bytes(data[: len(data) // 2] + b"\n{broken\n")

    ran = command("trace", "info", str(trace))

    assert ran.code == 0
    assert "incomplete trace" in ran.err and "lines are unreadable" in ran.err


def test_trace_check_fails_with_seven(command: Arbor, trace: Path) -> None:
    lines = trace.read_bytes().splitlines(keepends=True)
    trace.write_bytes(b"".join(lines[:5] + lines[6:-1]))

    ran = command("trace", "check", str(trace))

    assert ran.code == 7
    assert "event 6 instead of 5" in ran.out
    assert "the end is missing" in ran.out
    assert command("trace", "check", str(trace), "--json").document["ok"] is False


def test_trace_check_of_something_else_fails_with_seven(command: Arbor, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("buy milk\n", encoding="utf-8")

    assert command("trace", "check", "notes.txt").code == 7


def test_trace_events_lists_them(command: Arbor, trace: Path) -> None:
    run = list(fake_run(seed=1))

    ran = command("trace", "events", str(trace))
    chosen = command("trace", "events", str(trace), "--type", "boundary", "--limit", "2", "--json")

    assert len(ran.out.splitlines()) == len(run)
    assert [event["e"] for event in chosen.document["events"]] == ["boundary", "boundary"]


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


def test_verbose_lists_the_answers_with_their_votes(
    command: Arbor, monkeypatch: pytest.MonkeyPatch
) -> None:
    votes = (AnswerVotes("8 - 2", 2, 1.25, (7, 9)), AnswerVotes("a\nb", 1, 0.5, (8,)))
    monkeypatch.setattr(fake_solver.FakeSolution, "votes", votes)
    options = ("--controller", "best-of-n", "--aggregate", "weighted", "--set", "steps=min")

    lines = command("solve", "4 5 6 10", *options, "-v").err.splitlines()

    begin = lines.index("answer  votes    score  paths")
    assert lines[begin + 1] == "8 - 2       2    1.250  #7 #9"
    assert lines[begin + 2].split() == ["a", "b", "1", "0.500", "#8"]
    assert "votes" not in command("solve", "4 5 6 10", *options).err
    assert fake_solver.SOLVERS[-1].settings["aggregate"] == Weighted("min")


def test_the_table_of_answers_is_cut_where_it_is_long() -> None:
    votes = [AnswerVotes(f"a\n{n}" * 40, 99, 0.5, tuple(range(99))) for n in range(12)]

    lines = votes_table(votes)

    assert len(lines) == 12
    assert lines[-1] == "… 2 more answers"
    assert all(len(line) < 160 and line.endswith("#7 …") for line in lines[1:-1])
    assert votes_table([]) == []


def test_list_without_a_kind_lists_every_kind(
    command: Arbor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import huggingface_hub.constants

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path / "none"))

    document = command("list", "--json").document
    lines = command("list").out.splitlines()

    kinds = [registry.plural(kind) for kind in registry.KINDS]
    assert list(document) == ["schema", *kinds, "models", "settings"]
    assert [line for line in lines if line in document] == [*kinds, "models", "settings"]


@pytest.mark.parametrize("columns", ["60", "100", "300"])
def test_list_is_wrapped_at_words_and_shows_settings_as_they_are_set(
    command: Arbor, monkeypatch: pytest.MonkeyPatch, columns: str
) -> None:
    monkeypatch.setenv("COLUMNS", columns)

    for kind in registry.KINDS:
        lines = command("list", registry.plural(kind)).out.splitlines()
        rows = command("list", registry.plural(kind), "--json").document[registry.plural(kind)]
        assert max(map(len, lines)) <= min(int(columns), 100)
        words = iter(" ".join(lines).split())
        for row in rows:
            default = registry.resolve(kind, row["name"])
            settings = {
                name: components.setting_text(value) for name, value in row["settings"].items()
            }
            written = ", ".join(f"{name}={text}" for name, text in settings.items())
            expected = f"{row['name']} {row['what']} {written}".split()
            assert [next(words) for _ in expected] == expected
            assert row["what"].endswith((".", ")"))
            # backends need a device to be built
            if kind != "backend":
                plain = default() if isinstance(default, type) else default
                assert components.build(kind, row["name"], **settings) == plain
        assert next(words, None) is None


def test_list_shows_a_name_without_a_sentence_and_one_that_is_long() -> None:
    long = "package.module:" + "Class" * 12
    rows = [{"name": "short", "what": "", "settings": {}}, {"name": long, "what": "Does it."}]

    assert list(listed(rows, 40, "")) == ["short", long, "       Does it."]


def test_doctor_is_one_document(command: Arbor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARBOR_PLUGINS", "off")
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    document = command("doctor", "--json").document

    assert document["arbor"] == arbor.__version__
    assert document["packages"]["torch"]
    assert set(document["plugins"]) == set(document["names"]) == set(registry.KINDS)
    assert document["settings"]["ARBOR_PLUGINS"] == "off"
    ran = command("doctor")
    assert "arbor" in ran.out and "hf_secret" not in f"{ran.out}{document}"
