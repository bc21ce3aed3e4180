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
from typing import Any

import click
import huggingface_hub.constants
import numpy as np
import pytest
from support import warm_process
from support.fake_run import fake_run, tick
from support.run_cli import FAKE, Arbor, environment, in_process
from support.slow_cases import every

import arbor.cli.demo
from arbor import Solution, Solver, registry
from arbor.cli.app import COMMANDS, cli
from arbor.cli.command import Group
from arbor.cli.options import COMPLETION
from arbor.feature import features, hook
from arbor.model.loading import BUILTIN
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


def test_a_printed_configuration_has_what_was_given_for_this_machine(
    command: Arbor, tmp_path: Path
) -> None:
    given = {
        "threads": 2,
        "keep_kv": str(tmp_path / "kv"),
        "keep_kv_size": "1GiB",
        "disk": "2GiB",
        "disk_dir": str(tmp_path),
        "trace_level": "steps",
    }
    flags = [word for name, value in given.items() for word in ("--set", f"{name}={value}")]
    first = saved(command, *flags, "--device", "cpu", "--trace-text", "none", "--trust-remote-code")

    again = command("solve", "--config", "run.toml", "--print-config")

    assert {"device": "cpu", "trace_text": "none", **given}.items() <= first.items()
    assert "trust_remote_code" not in first, "no file trusts"
    assert tomllib.loads(again.out) == first
    with Solver.from_config("run.toml") as solver:
        assert (solver.setup.device, solver.setup.threads) == ("cpu", 2)
    assert not {*first} & {"tp", "debug", "record_bytes"}


def test_a_trace_s_configuration_has_its_level_and_nothing_of_the_machine(command: Arbor) -> None:
    command("solve", "4 5 6 10", "--set", "threads=2", "--trace", "one.arbor.jsonl")
    level = ("--set", "trace_level=steps")
    command("solve", "4 5 6 10", *level, "--trace", "steps.arbor.jsonl")

    plain, steps = (
        tomllib.loads(command("trace", "config", f"{name}.arbor.jsonl").out)
        for name in ("one", "steps")
    )

    assert steps == plain | {"trace_level": "steps"}
    assert not {*plain} & {"threads", "trace_level"}


def test_flags_win_over_the_environment_and_that_over_the_file(
    command: Arbor, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("run.toml").write_text('budget = 0.5\nseed = 1\ncontroller = "chain"\n', encoding="utf-8")
    monkeypatch.setenv("ARBOR_SOLVE_SEED", "2")
    monkeypatch.setenv("ARBOR_SOLVE_BUDGET", "0.75")

    config = saved(command, "--config", "run.toml", "--budget", "0.9")

    assert config["budget"] == "0.9" and config["seed"] == 2
    assert config["controller"]["name"] == "chain"


TEXT = 'controller = "tot,width=5"\n'
TABLE = '[controller]\nname = "tot"\nstrategy = "dfs"\nwidth = 5\n[sampling]\ntemperature = 0.9\n'


@pytest.mark.parametrize(
    ("config", "variable", "flags", "found"),
    [
        (TEXT, "", ["--set", "width=3"], ("tot", 3, 1.0)),
        (TEXT, "", ["--set", "controller.width=3"], ("tot", 3, 1.0)),
        ("", "tot,width=5", ["--set", "width=3"], ("tot", 3, 1.0)),
        ("", "", ["--controller", "tot,width=5", "--set", "width=3"], ("tot", 3, 1.0)),
        (TABLE, "", ["--controller", "tot,width=3"], ("tot", 3, 0.9)),
        (TABLE, "tot,width=4", ["--set", "width=3"], ("tot", 3, 0.9)),
        (TABLE, "", ["--set", "controller=beam"], ("beam", 4, 0.9)),
        (TABLE, "", ["--set", "controller=tot,width=3"], ("tot", 3, 0.9)),
        (TABLE, "", ["--temperature", "0.4"], ("tot", 5, 0.4)),
        (TABLE, "", ["--set", "temperature=0.2", "--temperature", "0.4"], ("tot", 5, 0.2)),
        (TABLE, "", ["--temperature", "0.4", "--set", "sampling.temperature=0.2"], ("tot", 5, 0.2)),
    ],
)
def test_set_wins_over_an_option_and_that_over_the_file(
    command: Arbor,
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    variable: str,
    flags: list[str],
    found: tuple[str, int, float],
) -> None:
    Path("given.toml").write_text(config, encoding="utf-8")
    if variable:
        monkeypatch.setenv("ARBOR_SOLVE_CONTROLLER", variable)

    read = saved(command, "--config", "given.toml", *flags)

    controller = read["controller"]
    assert (controller["name"], controller["width"], read["sampling"]["temperature"]) == found


SETS = 'set = ["width=7", "seed=9", "threads=2"]\n[controller]\nname = "tot"\nbeam = 2\n'


@pytest.mark.parametrize(
    ("config", "variables", "flags", "found"),
    [
        (SETS, {}, [], (7, 2, 9)),
        (SETS, {}, ["--seed", "5"], (7, 2, 5)),
        (SETS, {}, ["--controller", "tot,width=6"], (6, 2, 9)),
        (SETS, {}, ["--set", "beam=3"], (7, 3, 9)),
        (SETS, {}, ["--set", "controller.width=3", "--set", "seed=4"], (3, 2, 4)),
        (SETS, {"SEED": "6", "CONTROLLER": "tot,width=4"}, [], (4, 2, 6)),
        (SETS, {"SET": "width=4 beam=6"}, ["--set", "beam=3"], (4, 3, 9)),
        ("", {"SET": "seed=9 width=7"}, ["--seed", "5", "--controller", "tot,width=2"], (2, 5, 5)),
        ("", {"SET": "controller=tot,width=7"}, ["--controller", "tot,beam=2"], (10, 2, 0)),
        ("", {"SET": "seed=9 width=7", "SEED": "3"}, [], (7, 5, 9)),
    ],
)
def test_set_of_a_file_or_a_variable_loses_to_a_stronger_source(
    command: Arbor,
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    variables: dict[str, str],
    flags: list[str],
    found: tuple[int, int, int],
) -> None:
    Path("given.toml").write_text(config, encoding="utf-8")
    for name, value in variables.items():
        monkeypatch.setenv(f"ARBOR_SOLVE_{name}", value)

    read = saved(command, "--config", "given.toml", *flags)

    assert (read["controller"]["width"], read["controller"]["beam"], read["seed"]) == found


@pytest.mark.parametrize(
    ("config", "variable", "flags", "twice"),
    [
        ("", "", ["--set", "width=2", "--set", "controller.width=3"], "--set: 'width'"),
        ("", "", ["--set", "seed=2", "--set", "seed=3"], "--set: 'seed'"),
        ("", "seed=2 seed=3", ["--seed", "1"], "ARBOR_SOLVE_SET: 'seed'"),
        ('set = ["seed=2"]\nseed = 3', "", [], "given.toml: 'seed'"),
        ('set = ["width=2", "width=3"]', "", [], "given.toml: 'width'"),
        ('set = ["width=2"]\n[controller]\nname = "tot"\nwidth = 3', "", [], "given.toml: 'width'"),
        ("temperature = 0.3\n[sampling]\ntemperature = 0.9", "", [], "given.toml: 'temperature'"),
        ('set = ["top_p=0.3"]\n[sampling]\ntop_p = 0.9', "", [], "given.toml: 'top_p'"),
    ],
)
def test_a_source_that_sets_one_twice_is_refused(
    command: Arbor,
    monkeypatch: pytest.MonkeyPatch,
    config: str,
    variable: str,
    flags: list[str],
    twice: str,
) -> None:
    Path("given.toml").write_text(config, encoding="utf-8")
    monkeypatch.setenv("ARBOR_SOLVE_SET", variable)

    ran = command("solve", "4 5 6 10", "--config", "given.toml", *flags, "--print-config")

    assert (ran.code, ran.out) == (2, "")
    assert f"[setting] {twice} is set twice." in ran.err


@pytest.mark.parametrize("config", ['kv_dtype = "int8"', "[sampling]\ntemperature = 0.9", ""])
def test_a_file_and_a_preset_are_refused_together(
    command: Arbor, monkeypatch: pytest.MonkeyPatch, config: str
) -> None:
    Path("only.toml").write_text(config, encoding="utf-8")
    both = ["--config", "only.toml", "--preset", "config-s"]
    for words in (both, both[2:] + both[:2], []):
        if not words:
            monkeypatch.setenv("ARBOR_SOLVE_CONFIG", "only.toml")
            monkeypatch.setenv("ARBOR_SOLVE_PRESET", "config-s")
        ran = command("solve", "4 5 6 10", *words, "--print-config")
        assert (ran.code, ran.out) == (2, "")
        assert "--config and --preset both" in ran.err


@pytest.mark.parametrize("flag", ["config", "preset"])
def test_a_flag_for_a_file_or_a_preset_wins_over_a_variable_for_the_other(
    command: Arbor, monkeypatch: pytest.MonkeyPatch, flag: str
) -> None:
    Path("only.toml").write_text('kv_dtype = "int8"', encoding="utf-8")
    values = {"config": "only.toml", "preset": "config-s"}
    other = next(each for each in values if each != flag)
    monkeypatch.setenv(f"ARBOR_SOLVE_{other.upper()}", values[other])

    read = saved(command, f"--{flag}", values[flag])

    assert (read.get("kv_dtype") == "int8") == (flag == "config")
    assert (read.get("max_expansions") == 64) == (flag == "preset")


@pytest.mark.parametrize(
    "text", ["regex:a b", "regex:it's \\d+", r"regex:\d \\", 'json:{"type": "string"}', "regex:a"]
)
def test_the_variable_that_an_error_names_holds_the_setting(
    command: Arbor, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    monkeypatch.setenv("ARBOR_SOLVE_STEP_FORMAT", text)
    refused = command("solve", "4 5 6 10", "--print-config").err
    monkeypatch.delenv("ARBOR_SOLVE_STEP_FORMAT")
    (word,) = shlex.split(refused.partition("is now ")[2].partition(". See")[0])
    variable, _, value = word.partition("=")

    monkeypatch.setenv(variable, f"{value} width=3")
    config = saved(command, "4 5 6 10")

    assert (config["step_format"], config["controller"]["width"]) == (text, 3)


def test_a_variable_with_half_a_quotation_is_refused(
    command: Arbor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ARBOR_SOLVE_SET", "width=3 step_format='regex:a")

    ran = command("solve", "4 5 6 10", "--print-config")

    assert ran.code == 2
    assert "no closing quotation. Quote each word as in a shell." in ran.err


@pytest.mark.parametrize("setting", ["first=foo", "confidence=2", "timeout=-1", "trace_level=foo"])
@pytest.mark.parametrize(
    "words", ["solve --print-config", "solve --dry-run", "eval game24 -o runs"]
)
def test_a_setting_of_the_run_is_checked_before_anything_is_done(
    command: Arbor, setting: str, words: str
) -> None:
    key, _, value = setting.partition("=")
    text = value if value.lstrip("-").isdecimal() else f'"{value}"'
    Path("run.toml").write_text(f"{key} = {text}\n", encoding="utf-8")

    for given in (("--set", setting), ("--config", "run.toml")):
        ran = command(*words.split(), *given)
        assert (ran.code, ran.out, "loading" in ran.err) == (2, "", False)
        assert value in ran.err
    assert not Path("runs").exists()


def test_set_reads_the_value_of_an_option_as_the_option_does(command: Arbor) -> None:
    given = ("output=runs", "concurrency=auto", "limit=2", "sample_id=3a6bc65b3c19ae5c")

    ran = command("eval", "game24", *(word for each in given for word in ("--set", each)))

    assert ran.code == 0, ran.err
    assert tomllib.loads(Path("runs/run.toml").read_text("utf-8"))["sample_id"] == [
        "3a6bc65b3c19ae5c"
    ]


# The log


@pytest.fixture
def log() -> Iterator[logging.Logger]:
    """arbor's log; its handlers are taken away afterwards."""
    logger = logging.getLogger("arbor")
    before, level = list(logger.handlers), logger.level
    yield logger
    logger.handlers[:] = before
    logger.setLevel(level)


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


@pytest.mark.slow
def test_commands_options_and_names_complete() -> None:
    assert complete("arbor", "tr", heavy="torch numpy rich") == ["trace"]
    assert "--max-tokens" in complete("arbor", "solve", "--max")
    assert complete("arbor", "solve", "--controller", "bea", heavy="torch rich") == ["beam"]
    assert complete("arbor", "solve", "--task", "game") == ["game24"]
    assert complete("arbor", "solve", "--policy", "arb") == ["arborkv"]
    assert complete("arbor", "trace", "conv") == ["convert"]
    assert complete("arbor", "eval", "ga") == ["game24", "ga"]
    assert complete("arbor", "list", "contr") == [registry.plural("controller")]


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


# tests of a folder's own run the examples of its commands
CORE = tuple(name for name in COMMANDS if not any(name in each.commands for each in features()))
LIGHT = ("solve", "eval", "compare", "bench", "list", "prompt", "trace", "completion", "view")
HEAVY = tuple(name for name in CORE if name not in LIGHT)
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


@pytest.mark.parametrize("example", every(6, examples(LIGHT)))
def test_every_example_of_a_help_page_runs(
    example: str, shell: tuple[Path, dict[str, str]]
) -> None:
    folder, settings = shell
    if "--workers" in example:  # each builds a solver of its own, which is no fake
        pytest.importorskip("ray")
        settings = settings | {"PATH": os.environ["PATH"]}
        example = example.replace("--limit 50", "--limit 2")
    for word, kind, part in (("--workers", "cluster", "ray"), (" otlp", "format", "otlp")):
        if word in example and part not in registry.PARTS[kind]:
            pytest.skip(f"the folder of the {kind} {part} is not there")
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
    if values := hook("msve"):
        values().save(folder / "msve.json")
    if "triattention" in registry.names("policy"):
        made_up_queries()[0].save(folder / "queries.npz")
    row = {"question": "3 boxes of 3 pens: how many?", "answer": "#### 9"}
    assert dataset_split_of(row["question"]) == "calibration"
    (folder / "gsm8k.jsonl").write_text(json.dumps(row), encoding="utf-8")
    (folder / "keys.txt").write_text("a-key-of-sixteen-characters\n", encoding="utf-8")
    with Solver(controller="beam", verifier="exact", max_expansions=2) as solver:
        return folder, solver.solve("4 5 6 10", trace=folder / "run.arbor.jsonl")


@pytest.mark.parametrize("example", every(6, examples(HEAVY)))
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
    monkeypatch.setattr(arbor.cli.demo, "search", lambda output, folder, seed: solution)
    for path, made in MADE_UP.items():
        if f"arbor calibrate {path.partition(' ')[0]}" in example:
            monkeypatch.setattr(path.partition(" ")[2], lambda *given, made=made: made())

    program, *arguments = shlex.split(example)
    ran = command(*arguments)

    solved = solution.answer is not None or arguments[0] != "demo"
    assert (program, ran.code) == ("arbor", 0 if solved else 3), ran.err
    assert ran.out


def made_up_window() -> Any:
    from arbor.papers.lazyeviction.calibrate import Recurrence

    return Recurrence(1e-3, 25, 80, 8, 900, 0.98, {1e-3: 0.96}, {50: 9, 80: 25}, 0.5)


def made_up_thoughts() -> Any:
    from arbor.papers.related.calibrate_thoughts import ThoughtTypes

    return ThoughtTypes((0.5, 0.8), (2,), (1, 1, 3), (2, 1, 3), 0.3, 8, 40, (0.2, 0.9))


def made_up_queries() -> Any:
    """Of the built-in model's sizes."""
    from arbor.papers.related.query_means import LayerMeans, QueryMeans

    layer = LayerMeans(np.ones((8, 64), np.float32), np.ones((8, 32), np.float32))
    return QueryMeans((layer,) * 6, 900), 8


def made_up_losses() -> list[Any]:
    """Blocks that cost the answer where the model attended to them."""
    from arbor.papers.arborkv.calibrate import Example

    return [
        Example(problem, block / 6, 0.5, block / 6, float(block > 3))
        for problem in range(10)
        for block in range(6)
    ]


def made_up_verifications() -> list[Any]:
    """Two thoughts each, of which the confident one is right, after every layer."""
    from arbor.papers.rksc.calibration import Verification

    values = (0.8, 0.2)
    return [
        Verification(problem, 0.9, 0.1, 0, values, (0, 1), ((0.5, 0.1),) * 2, (values,) * 2)
        for problem in range(10)
    ]


# what takes long of a calibration, and what it is taken to find
MADE_UP = {
    "msve arbor.papers.arborkv.calibrate.collect": made_up_losses,
    "exit arbor.papers.rksc.calibration.collect_verifications": made_up_verifications,
    "window arbor.papers.lazyeviction.calibrate.calibrate_window": made_up_window,
    "thoughts arbor.papers.related.calibrate_thoughts.calibrate_thoughts": made_up_thoughts,
    "queries arbor.papers.related.calibrate_queries.collect_queries": made_up_queries,
}
