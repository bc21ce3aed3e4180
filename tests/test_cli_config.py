"""Where options come from: flags, the environment, a file; and what a shell completes."""

from __future__ import annotations

import json
import logging
import os
import shlex
import subprocess
import sys
import tomllib
import webbrowser
from collections.abc import Iterable, Iterator
from pathlib import Path

import click
import huggingface_hub.constants
import numpy as np
import pytest
from support import warm_process
from support.fake_run import fake_run, tick
from support.run_cli import FAKE, Arbor, environment, in_process

import arbor.cli.demo
import arbor.measure.calibrate
import arbor.measure.calibrate_exit
import arbor.measure.calibrate_queries
import arbor.measure.calibrate_window
import arbor.server.serving
from arbor import Solution, Solver, registry
from arbor.cli.app import COMMANDS, cli
from arbor.cli.command import SHORT_HELP_END, Group
from arbor.cli.options import COMPLETION
from arbor.cli.solve import solve
from arbor.measure.calibrate import Example
from arbor.measure.calibrate_exit import Verification
from arbor.measure.calibrate_queries import CollectedQueries
from arbor.measure.calibrate_window import Recurrence
from arbor.model.loading import BUILTIN
from arbor.retention.msve import MSVE
from arbor.retention.query_means import LayerMeans, QueryMeans
from arbor.run.limits import RunLimits
from arbor.run.presets import preset
from arbor.support.setting import settings_of
from arbor.tasks.splits import dataset_split_of
from arbor.trace import TraceWriter

pytestmark = pytest.mark.usefixtures("loaded_once")


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Arbor:
    """``arbor`` with its real solver, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    return in_process(capsys)


def saved(command: Arbor, *arguments: str) -> dict[str, object]:
    """The resolved configuration, also written to ``run.toml``."""
    ran = command("solve", *arguments, "--print-config")
    assert (ran.code, ran.err) == (0, "")
    Path("run.toml").write_text(ran.out, encoding="utf-8")
    return tomllib.loads(ran.out)


# Configurations


def test_a_printed_configuration_is_a_configuration(command: Arbor) -> None:
    first = saved(
        *(command, "4 5 6 10", "--controller", "beam", "--set", "beam_size=3", "--budget", "0.5"),
        *("--seed", "7", "--max-depth", "3", "--temperature", "0.5", "--verifier", "exact"),
        *("--max-tokens", "99", "--set", "max_expansions=8", "--deterministic", "--timeout", "5"),
        "--set",
        "cuda_graphs=false",
    )

    again = command("solve", "--config", "run.toml", "--print-config")

    assert tomllib.loads(again.out) == first
    assert first["controller"]["name"] == "beam" and first["controller"]["beam_size"] == 3
    assert (first["seed"], first["max_depth"], first["max_tokens"]) == (7, 3, 99)
    assert (first["timeout"], first["deterministic"]) == (5.0, True)
    assert first["cuda_graphs"] is False
    assert first["sampling"]["temperature"] == 0.5


def test_a_name_with_settings_goes_with_set_and_with_a_file(command: Arbor) -> None:
    named = ("--policy", "arborkv,tail=3", "--controller", "beam,width=2")
    kept = saved(command, "4 5 6 10", *named, "--set", "beam_size=3", "--set", "eta=0.25")
    assert (kept["controller"]["width"], kept["controller"]["beam_size"]) == (2, 3)
    assert (kept["policy"]["protect"]["tail"], kept["policy"]["allocator"]["eta"]) == (3, 0.25)

    again = command(
        *("solve", "--config", "run.toml", "--policy", "arborkv,tail=5", "--print-config")
    )
    policy = tomllib.loads(again.out)["policy"]
    assert (policy["protect"]["tail"], policy["allocator"]["eta"]) == (5, 0.25)

    ran = command("eval", "game24", "--limit", "1", *named, "--set", "beam_size=3", "--json", "-q")
    assert (ran.code, ran.document["n"]) == (0, 1)


def test_a_configuration_needs_no_problem(command: Arbor) -> None:
    assert "problem" not in saved(command)
    as_json = command("solve", "--print-config", "--json").document
    assert as_json["schema"] == "arbor.config/1" and as_json["problem"] is None


def test_flags_win_over_the_environment_and_that_over_the_file(
    command: Arbor, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run.toml").write_text('budget = 0.5\nseed = 1\ncontroller = "chain"\n', encoding="utf-8")
    monkeypatch.setenv("ARBOR_SOLVE_SEED", "2")
    monkeypatch.setenv("ARBOR_SOLVE_BUDGET", "0.75")

    config = saved(command, "--config", "run.toml", "--budget", "0.9")

    assert config["budget"] == "0.9" and config["seed"] == 2
    assert config["controller"]["name"] == "chain"


def test_a_flag_that_replaces_a_part_leaves_its_settings_behind(command: Arbor) -> None:
    text = 'set = ["top_k=3"]\n[controller]\nname = "beam"\nbeam_size = 3\n'
    Path("run.toml").write_text(text, encoding="utf-8")

    same = saved(command, "--config", "run.toml", "--set", "width=5")
    assert (same["controller"]["beam_size"], same["controller"]["width"]) == (3, 5)

    Path("run.toml").write_text(text, encoding="utf-8")
    other = saved(command, "--config", "run.toml", "--controller", "tot")
    assert other["controller"]["name"] == "tot" and "beam_size" not in other["controller"]
    assert other["sampling"]["top_k"] == 3


def test_a_trace_repeats_its_run(command: Arbor) -> None:
    arguments = ("--controller", "tot", "--set", "beam=2", "--set", "width=3", "--seed", "5")
    command("solve", "4 5 6 10", "--trace", "a.arbor.jsonl", "--budget", "0.5", *arguments)
    Path("run.toml").write_text(command("trace", "config", "a.arbor.jsonl").out, encoding="utf-8")

    again = command("solve", "--config", "run.toml", "--trace", "b.arbor.jsonl")

    assert again.code in (0, 3)
    ran = command("trace", "diff", "a.arbor.jsonl", "b.arbor.jsonl", "--json").document
    assert (ran["same_tree"], ran["same_events"], ran["settings"]) == (True, True, [])


# The log


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """arbor's log; its handlers are taken away afterwards."""
    logger = logging.getLogger("arbor")
    before, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = before
    logger.setLevel(level)


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        ([], ["warning"]),
        (["-q"], []),
        (["-v"], ["info", "warning"]),
        (["-vv"], ["debug", "info", "warning"]),
    ],
    ids=" ".join,
)
@pytest.mark.parametrize("before", [True, False])
def test_the_log_is_shown_as_asked_and_written_whole(
    command: Arbor,
    log: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    flags: list[str],
    shown: list[str],
    before: bool,
) -> None:
    def work(kind: str) -> list[object]:
        for level in ("debug", "info", "warning"):
            getattr(logging.getLogger("arbor.engine"), level)("at %s", level)
        return []

    monkeypatch.setattr("arbor.cli.show._components", work)
    asked = [*flags, "--log-file", "run.log"]

    ran = command(*asked, "list", "tasks") if before else command("list", "tasks", *asked)

    assert ran.err.splitlines() == [f"arbor: {level}: at {level}" for level in shown]
    rows = [json.loads(line) for line in Path("run.log").read_text("utf-8").splitlines()]
    assert [row["message"] for row in rows] == ["at debug", "at info", "at warning"]
    assert {row["logger"] for row in rows} == {"arbor.engine"}
    assert set(rows[0]) == {"time", "level", "logger", "message"}


@pytest.mark.parametrize(
    ("variable", "value", "shown"),
    [
        ("ARBOR_QUIET", "1", []),
        ("ARBOR_VERBOSE", "1", ["info", "warning"]),
    ],
)
def test_the_environment_sets_what_every_command_shares(
    command: Arbor,
    log: logging.Logger,
    monkeypatch: pytest.MonkeyPatch,
    variable: str,
    value: str,
    shown: list[str],
) -> None:
    def work(kind: str) -> list[object]:
        for level in ("debug", "info", "warning"):
            getattr(logging.getLogger("arbor.engine"), level)("at %s", level)
        return []

    monkeypatch.setattr("arbor.cli.show._components", work)
    monkeypatch.setenv(variable, value)

    assert command("list", "tasks").err.splitlines() == [
        f"arbor: {level}: at {level}" for level in shown
    ]


def test_a_variable_gives_several_settings(command: Arbor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ARBOR_SOLVE_SET", "width=3 top_k=5")

    config = saved(command)

    assert (config["controller"]["width"], config["sampling"]["top_k"]) == (3, 5)


# Former names


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["solve", "4 5 6 10", "--attn", "torch"], "--attn is now --backend."),
        (["solve", "4 5 6 10", "--attn=torch"], "--attn is now --backend."),
        (["eval", "game24", "--depth", "2"], "--depth is now --max-depth."),
        (["bench", "--depth=2"], "--depth is now --max-depth."),
        (["info", "--attn", "torch"], "--attn is now --backend."),
        (["view", "--depth", "2"], "No such option '--depth'"),
    ],
)
def test_a_former_flag_is_refused_with_its_new_name(
    command: Arbor, arguments: list[str], words: str
) -> None:
    ran = command(*arguments)

    assert (ran.code, ran.out) == (2, "")
    assert words in ran.err and "[usage]" in ran.err


def test_a_former_variable_is_refused_with_its_new_name(
    command: Arbor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARBOR_SOLVE_ATTN", "torch")

    ran = command("solve", "4 5 6 10", "--print-config")

    assert (ran.code, ran.out) == (2, "")
    assert "[usage] ARBOR_SOLVE_ATTN is now ARBOR_SOLVE_BACKEND." in ran.err
    assert command("solve", "--help").code == command("list", "tasks").code == 0


@pytest.mark.parametrize(("former", "name"), [("attn", "backend"), ("depth", "max_depth")])
def test_a_former_key_of_a_configuration_is_refused_with_its_new_name(
    command: Arbor, former: str, name: str
) -> None:
    Path("run.toml").write_text(f'{former} = "3"\n', encoding="utf-8")

    ran = command("solve", "4 5 6 10", "--config", "run.toml", "--print-config")

    assert (ran.code, ran.out) == (2, "")
    assert f"[unknown-setting] run.toml: '{former}' is now '{name}'." in ran.err


# Settings


def test_solve_has_few_options_and_the_list_has_every_setting(command: Arbor) -> None:
    context = solve.make_context("solve", ["4 5 6 10"])
    options = [each for each in solve.get_params(context) if isinstance(each, click.Option)]

    assert len([each for each in options if getattr(each, "common", False)]) <= 16
    assert len([each for each in options if each.help]) <= 45
    rows = {row["name"]: row for row in command("list", "settings", "--json").document["settings"]}
    shown = {each.name for each in options}
    assert {name for name, row in rows.items() if row["option"]} <= shown
    assert not {name for name, row in rows.items() if not row["option"]} & shown
    assert rows.keys() >= settings_of(RunLimits).keys() | {"kv_probe", "top_k", "staging"}


GIVEN_BY_SET = [
    *(("adapter", "lora"), ("branch_stop", "others"), ("confidence", "0.9"), ("disk", "1GiB")),
    *(("cuda_graphs", "false"), ("fetch", "always"), ("first", "answer"), ("host_bits", "8")),
    *(("keep_kv", "kv"), ("kv_dtype", "int8"), ("kv_probe", "8,4,2"), ("max_expansions", "8")),
    *(("msve", "2,1,1,-2"), ("share", "similar"), ("staging", "64tok"), ("threads", "2")),
    *(("step_format", "regex:a b"), ("top_p", "0.5"), ("trace_level", "steps")),
]


@pytest.mark.parametrize(("name", "value"), GIVEN_BY_SET)
def test_a_flag_that_is_a_setting_is_refused_with_the_form_that_works(
    command: Arbor, monkeypatch: pytest.MonkeyPatch, name: str, value: str
) -> None:
    flag, form = f"--{name.replace('_', '-')}", f"--set {name}={shlex.quote(value)}"

    for words in ([flag, value], [f"{flag}={value}"]):
        ran = command("solve", "4 5 6 10", *words, "--print-config")
        assert (ran.code, ran.out) == (2, "")
        assert f"[usage] {flag} is now {form}." in ran.err

    monkeypatch.setenv(f"ARBOR_SOLVE_{name.upper()}", value)
    ran = command("solve", "4 5 6 10", "--print-config")
    assert (ran.code, ran.out) == (2, "")
    assert f"is now ARBOR_SOLVE_SET={shlex.quote(f'{name}={value}')}." in ran.err


def test_switches_that_are_settings_are_refused_too(command: Arbor) -> None:
    ran = command("solve", "4 5 6 10", "--no-cuda-graphs", "--print-config")
    assert (ran.code, "--set cuda_graphs=false" in ran.err) == (2, True)
    ran = command("solve", "4 5 6 10", "--audit-verify")
    assert (ran.code, "--set audit=true" in ran.err) == (2, True)


def test_set_takes_what_a_solver_takes_and_refuses_the_rest(command: Arbor) -> None:
    given = {"mode": "lossy", "host": "2MiB", "rehydrate": "selective", "host_bits": 8}
    words = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    config = saved(command, "4 5 6 10", *words)

    wanted = Solver(**given).config | {"problem": "4 5 6 10"}
    assert config == {key: value for key, value in wanted.items() if value is not None}
    assert command("solve", "--config", "run.toml", "--print-config").code == 0
    for setting, message in (
        ("threads=many", "[setting-type] threads=many: it must be a whole number."),
        ("threads=0", "[limit] threads is 0."),
        ("kv_dtype=int4", "[setting-choice] unknown kv_dtype 'int4'. Known: auto, int8."),
        ("stagin=64tok", "Did you mean 'staging'?"),
        ("staging", "it is neither KEY=VALUE nor PART.KEY=VALUE"),
        ("host_bits=2", "KV is packed in 8 or 4 bits. Take 8 or 4."),
    ):
        ran = command("solve", "4 5 6 10", "--set", setting)
        assert (ran.code, ran.out, message in ran.err) == (2, "", True), ran.err


def test_a_setting_of_a_component_and_of_the_solver_says_whose_it_is(command: Arbor) -> None:
    asked = ("4 5 6 10", "--verifier", "cgee", "--set")
    ran = command("solve", *asked, "confidence=0.9")

    assert (ran.code, "[setting-ambiguous]" in ran.err) == (2, True)
    assert "--set verifier.confidence=0.9 or --set solver.confidence=0.9" in ran.err
    assert saved(command, *asked, "verifier.confidence=0.9")["verifier"]["confidence"] == 0.9
    assert saved(command, *asked, "solver.confidence=0.9")["confidence"] == 0.9


def test_a_preset_gives_info_its_settings_too(command: Arbor) -> None:
    small = command("info", "--preset", "config-s", "--json").document["plan"]
    wide = command("info", "--preset", "config-s", "--set", "width=5", "--json").document["plan"]

    with Solver(**preset("config-s")) as solver:
        assert small == solver.plan().to_dict()
    assert wide != small


# Commands, help and completion


def commands(group: Group, path: tuple[str, ...] = ()) -> Iterator[tuple[str, click.Command]]:
    """Every command below a group, by what one types."""
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        assert found is not None
        if isinstance(found, Group):
            yield from commands(found, (*path, name))
        else:
            yield " ".join((*path, name)), found


def test_every_command_is_where_the_table_says_and_says_what_it_is_for() -> None:
    context = click.Context(cli)

    for name, (_, purpose) in COMMANDS.items():
        found = cli.get_command(context, name)
        assert found is not None and found.name == name
        assert purpose.endswith(".") and len(purpose) < 70


@pytest.mark.parametrize(("name", "found"), list(commands(cli)), ids=lambda value: str(value))
def test_help_is_a_sentence_three_examples_and_short_options(
    name: str, found: click.Command
) -> None:
    text = found.help or ""
    first, _, rest = text.partition("\n")

    assert first.endswith((".", ";")) or "." in text.partition("\n\n")[0]
    examples = [line for line in rest.splitlines() if line.strip().startswith(("arbor ", "echo "))]
    assert len(examples) >= (2 if name == "doctor" else 3), "three commands to copy"
    for parameter in found.params:
        if isinstance(parameter, click.Option):
            assert parameter.help and parameter.help.endswith("."), parameter.name
            assert len(parameter.help) <= 100, parameter.name


def help_pages() -> list[tuple[str, ...]]:
    """The words before ``-h`` of every help page, those of groups included."""
    names = [tuple(name.split()) for name, _ in commands(cli)]
    return list(dict.fromkeys(name[:length] for name in names for length in range(len(name) + 1)))


def one_line(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("words", help_pages(), ids=" ".join)
def test_the_short_help_fits_one_screen_and_the_long_help_has_every_option(
    words: tuple[str, ...], command: Arbor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    context = click.Context(cli, info_name="arbor")
    for word in words:
        assert isinstance(context.command, Group)
        below = context.command.get_command(context, word)
        assert below is not None
        context = click.Context(below, parent=context, info_name=word)
    parameters = context.command.get_params(context)
    records = {each: each.get_help_record(context) for each in parameters}
    rows = {each: one_line(" ".join(record)) for each, record in records.items() if record}

    short, long = command(*words, "-h").out, command(*words, "--help-all").out

    assert command(*words, "--help").out == short
    assert len(short.splitlines()) <= 40
    assert max(map(len, [*short.splitlines(), *long.splitlines()])) <= 80
    listed = [row for each, row in rows.items() if getattr(each, "common", False)]
    assert listed and len(listed) < len(rows)
    assert not [row for row in rows.values() if row not in one_line(long)]
    head, options = short.split("\nOptions:\n")
    assert one_line(options) == f"{' '.join(listed)} {SHORT_HELP_END}"
    assert set(head.splitlines()) <= set(long.splitlines())


@pytest.mark.parametrize("name", ["solve", "eval", "trace events"])
def test_every_option_completes(name: str) -> None:
    words = name.split()
    found = dict(commands(cli))[name]
    flags = [max(each.opts, key=len) for each in found.params if isinstance(each, click.Option)]

    assert set(complete("arbor", *words, "--")) >= {*flags, "--help", "--help-all"}


@pytest.mark.parametrize(("name", "found"), list(commands(cli)), ids=lambda value: str(value))
def test_every_flag_is_a_variable_of_its_name(name: str, found: click.Command) -> None:
    for option in found.params:
        if isinstance(option, click.Option):
            flag = max(option.opts, key=len).removeprefix("--")
            assert option.name == flag.replace("-", "_"), "click names the variable after it"


def complete(*words: str, heavy: str = "torch transformers") -> list[str]:
    """What a shell is offered for the last word; nothing `heavy` is imported for it."""
    asked = {COMPLETION: "bash_complete", "COMP_WORDS": " ".join(words)}
    code = (
        "import sys\n"
        "sys.argv = ['arbor']\n"
        "from arbor.cli import main\n"
        "try:\n"
        "    main()\n"
        "finally:\n"
        f"    assert not set({heavy.split()}) & set(sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment(COMP_CWORD=str(len(words) - 1), **asked),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return [line.partition(",")[2] for line in done.stdout.splitlines()]


def test_commands_options_and_names_complete() -> None:
    assert complete("arbor", "tr", heavy="torch numpy rich") == ["trace"]
    assert "--max-tokens" in complete("arbor", "solve", "--max")
    assert complete("arbor", "solve", "--controller", "bea", heavy="torch rich") == ["beam"]
    assert complete("arbor", "solve", "--task", "game") == ["game24"]
    assert complete("arbor", "solve", "--policy", "arb") == ["arborkv"]
    assert complete("arbor", "trace", "conv") == ["convert"]
    assert complete("arbor", "eval", "ga") == ["game24", "ga"]
    assert complete("arbor", "list", "contr") == [registry.plural("controller")]


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_gets_a_script(command: Arbor, shell: str) -> None:
    ran = command("completion", shell)

    assert ran.code == 0
    assert f"{COMPLETION}={shell}_complete" in ran.out
    if shell == "bash":
        assert subprocess.run(["/bin/bash", "-n"], input=ran.out, text=True).returncode == 0


# The examples of the help pages


def examples(of: Iterable[str] = COMMANDS) -> list[str]:
    """The examples of some commands' help pages and of those below them, each once."""
    pages = [(name, cli.get_command(click.Context(cli), name)) for name in of]
    texts = [found.help for _, found in pages if found is not None]
    texts += [each.help for name, each in commands(cli) if name.split()[0] in of]
    lines = (
        line.strip().partition("  ")[0] for text in texts for line in (text or "").splitlines()
    )
    return list(dict.fromkeys(line for line in lines if line.startswith(("arbor ", "echo "))))


LIGHT = (
    *("solve", "eval", "compare", "bench", "list", "prompt", "trace", "completion", "view"),
    "man",
)
HEAVY = tuple(name for name in COMMANDS if name not in LIGHT)
STUBS = {
    "jq": "exec cat > /dev/null",
    "less": "exec cat > /dev/null",
    "vizviewer": 'exec test -s "$1"',
    "browser": "exit 0",
}


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """A home with the files and programs that help pages name, and an `arbor` with a fake
    solver."""
    folder = tmp_path_factory.mktemp("examples")
    for name in ("run", "full", "small", "tenth", "a", "b"):
        for suffix in ("", ".gz"):
            with TraceWriter(folder / f"{name}.arbor.jsonl{suffix}", clock=tick()) as writer:
                for event in fake_run(seed=1):
                    writer(event)
    (folder / ".config" / "fish" / "completions").mkdir(parents=True)
    (folder / ".local" / "share" / "man" / "man1").mkdir(parents=True)
    (folder / "bin").mkdir()
    warm_process.program(folder / "bin" / "arbor", "-c", FAKE)
    for name, text in STUBS.items():
        program = folder / "bin" / name
        program.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        program.chmod(0o755)
    path = os.pathsep.join((str(folder / "bin"), os.environ["PATH"]))
    own = {"PATH": path, "HOME": str(folder), "BROWSER": "browser %s"}
    settings = environment(HF_HUB_CACHE=str(folder / "hub"), **own)
    (folder / "problems.jsonl").write_text('{"problem": "one", "answer": "1"}\n', encoding="utf-8")
    baseline = ["arbor", "eval", "game24", "--limit", "2", "--output", "runs/baseline"]
    timings = ["arbor", "bench", "--controller", "beam", "--output-json", "before.json"]
    for words in (baseline, timings):
        subprocess.run(words, cwd=folder, env=settings, check=True, capture_output=True)
    before = json.loads((folder / "before.json").read_text("utf-8"))
    for row in before["rows"]:
        row["cpu_s"]["seconds"] = [99.0] * 5  # so that nothing is slower now
    (folder / "before.json").write_text(json.dumps(before), encoding="utf-8")
    return folder, settings


@pytest.mark.parametrize("example", examples(LIGHT))
def test_every_example_of_a_help_page_runs(
    example: str, shell: tuple[Path, dict[str, str]]
) -> None:
    folder, settings = shell
    if "--workers" in example:
        pytest.importorskip("ray")
    if "--trace run.arbor.jsonl" in example:  # a search does not overwrite the trace of another
        (folder / "run.arbor.jsonl").unlink()

    done = subprocess.run(
        ["/bin/bash", "-o", "pipefail", "-c", example],
        cwd=folder,
        env=settings,
        capture_output=True,
        text=True,
        timeout=120,
    )

    assert (done.returncode, done.stderr) == (0, "")


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Solution]:
    """A folder with a real run, the models that help pages name, and a Hub cache with one more; the
    run's solution."""
    folder = tmp_path_factory.mktemp("desk")
    hub = folder / "hub" / "models--Qwen--Qwen2.5-7B-Instruct"
    for place in (folder / "model", folder / "my-model", hub / "snapshots" / "abc"):
        place.parent.mkdir(parents=True, exist_ok=True)
        place.symlink_to(BUILTIN["sapling"], target_is_directory=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text("abc", encoding="utf-8")
    MSVE().save(folder / "msve.json")
    MADE_UP_QUERIES.means.save(folder / "queries.npz")
    row = {"question": "3 boxes of 3 pens: how many?", "answer": "#### 9"}
    assert dataset_split_of(row["question"]) == "calibration"
    (folder / "gsm8k.jsonl").write_text(json.dumps(row), encoding="utf-8")
    (folder / "keys.txt").write_text("a-key-of-sixteen-characters\n", encoding="utf-8")
    with Solver(controller="beam", verifier="exact", max_expansions=2) as solver:
        return folder, solver.solve("4 5 6 10", trace=folder / "run.arbor.jsonl")


@pytest.mark.parametrize("example", examples(HEAVY))
def test_every_example_of_a_help_page_that_needs_a_model_runs(
    example: str,
    desk: tuple[Path, Solution],
    command: Arbor,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    folder, solution = desk
    for path in folder.iterdir():
        (tmp_path / path.name).symlink_to(path)
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(webbrowser, "open", lambda address: True)
    # what takes long: searches, whose own tests run them
    # a server answers until a signal ends it, and the usual port may be taken
    bound = arbor.server.serving.bound_socket
    monkeypatch.setattr(arbor.server.serving, "bound_socket", lambda host, port: bound(host, 0))
    monkeypatch.setattr(arbor.server.serving.Server, "run", lambda server, sockets: server.ready())
    monkeypatch.setattr(arbor.cli.demo, "search", lambda output, folder, seed: solution)
    monkeypatch.setattr(
        arbor.measure.calibrate, "collect", lambda solver, problems: made_up_losses()
    )
    monkeypatch.setattr(
        arbor.measure.calibrate_exit,
        "collect_verifications",
        lambda solver, problems: made_up_verifications(),
    )
    monkeypatch.setattr(
        arbor.measure.calibrate_window,
        "calibrate_window",
        lambda solver, problems, percentile: MADE_UP_WINDOW,
    )
    monkeypatch.setattr(
        arbor.measure.calibrate_queries,
        "collect_queries",
        lambda solver, problems: MADE_UP_QUERIES,
    )

    program, *arguments = shlex.split(example)
    ran = command(*arguments)

    solved = solution.answer is not None or arguments[0] != "demo"
    assert (program, ran.code) == ("arbor", 0 if solved else 3), ran.err
    assert ran.out


MADE_UP_WINDOW = Recurrence(25, 80, 8, 900, 0.98, {50: 9, 80: 25}, 0.5)
MADE_UP_QUERIES = CollectedQueries(  # of the built-in model's sizes
    QueryMeans((LayerMeans(np.ones((8, 64), np.float32), np.ones((8, 32), np.float32)),) * 6, 900),
    problems=8,
    concentration=(0.7,) * 6,
)


def made_up_losses() -> list[Example]:
    """Blocks that cost the answer where the model attended to them."""
    return [
        Example(problem, block / 6, 0.5, block / 6, float(block > 3))
        for problem in range(10)
        for block in range(6)
    ]


def made_up_verifications() -> list[Verification]:
    """Two thoughts each, of which the confident one is right, after every layer."""
    values = (0.8, 0.2)
    return [
        Verification(problem, 0.9, 0.1, 0, values, (0, 1), ((0.5, 0.1),) * 2, (values,) * 2)
        for problem in range(10)
    ]


def test_every_command_has_its_examples_run() -> None:
    assert set(examples()) == {*examples(LIGHT), *examples(HEAVY)}
    for name in COMMANDS:
        assert [line for line in examples() if f"arbor {name}" in line], name
