"""The README is run as it stands: its Python, its commands and the output it shows."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from support import warm_process

pytestmark = pytest.mark.usefixtures("loaded_once")

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", README, re.MULTILINE | re.DOTALL)
PYTHON = [text for language, text in BLOCKS if language == "python"]
LINES = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
# what a reader types after having installed arbor
COMMANDS = [part for line in LINES for part in line.split(" && ") if part.startswith("arbor ")]


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, str]]:
    """An empty folder, and an environment in which `arbor` is this checkout."""
    folder = tmp_path_factory.mktemp("readme")
    programs = tmp_path_factory.mktemp("bin")
    warm_process.program(programs / "arbor", "-m", "arbor")
    settings = dict(os.environ)
    settings["PATH"] = os.pathsep.join((str(programs), settings["PATH"]))
    settings["PYTHONPATH"] = str(ROOT)
    return folder, settings


def test_the_first_command_is_the_first_thing_to_type() -> None:
    assert LINES[0] == 'pip install -e . -c constraints.txt && arbor solve "4 5 6 10"'
    assert COMMANDS[0] == 'arbor solve "4 5 6 10"'


@pytest.mark.parametrize("number", range(len(PYTHON)))
def test_its_python_runs(
    number: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    module = types.ModuleType("readme")
    monkeypatch.setitem(sys.modules, "readme", module)

    code = compile(PYTHON[number], f"README.md, python block {number + 1}", "exec")
    exec(code, vars(module))

    assert capsys.readouterr().out.strip(), "it prints an answer"


@pytest.mark.parametrize("number", range(len(COMMANDS)))
def test_its_commands_run(number: int, shell: tuple[Path, dict[str, str]]) -> None:
    folder, settings = shell

    done = subprocess.run(
        ["/bin/sh", "-c", COMMANDS[number]],
        cwd=folder,
        env=settings,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


@pytest.mark.timeout(300)
def test_its_real_model_keeps_within_the_budget_it_names(
    smollm2: Path, shell: tuple[Path, dict[str, str]]
) -> None:
    folder, settings = shell
    block = next(text for _, text in BLOCKS if "SmolLM2" in text).replace("\\\n", " ")
    named = f"~/.cache/arbor-test-models/{smollm2.name}"
    _, solve, check = (line.replace(named, str(smollm2)) for line in block.splitlines())
    assert str(smollm2) in solve

    done = subprocess.run(
        ["/bin/sh", "-c", f"{solve} -v --set threads=1 && {check}"],
        cwd=folder,
        env=settings,
        capture_output=True,
        text=True,
    )

    assert done.returncode == 0, done.stderr
    assert "consistent" in done.stdout
    held = re.search(r"held ([\d,]+) of the ([\d,]+) tokens that full retention", done.stderr)
    assert held is not None, done.stderr
    kept, whole = (int(each.replace(",", "")) for each in held.groups())
    # a wave is given room for the mean thought, and its own may be shorter
    assert kept <= 0.3 * whole or "one expansion is that much" in done.stderr


def without_times(text: str) -> str:
    """The text with ``0`` for seconds and tokens per second."""
    return re.sub(r"[\d.]+(?= s\b| tok/s)", "0", text)


def test_it_shows_the_output_of_a_command(shell: tuple[Path, dict[str, str]]) -> None:
    folder, settings = shell
    shown = next(text for language, text in BLOCKS if language == "text")
    command = COMMANDS[1]

    done = subprocess.run(  # piped, only -v prints what a terminal shows
        ["/bin/sh", "-c", f"{command} -v"],
        cwd=folder,
        env=settings,
        capture_output=True,
        text=True,
    )

    printed = without_times(done.stdout + done.stderr).splitlines()
    missing = [line for line in without_times(shown).splitlines() if line not in printed]
    assert not missing, "\n".join(["not printed:", *missing, "printed:", *printed])
