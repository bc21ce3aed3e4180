"""The pages in docs/: what they show runs, what they list is what the code has."""

from __future__ import annotations

import ast
import importlib
import os
import re
import subprocess
import sys
import types
from pathlib import Path

import pytest
from support import warm_process
from support.taken_out import TAKEN_OUT, WHY

import arbor.errors
from arbor.errors import ArborError

pytestmark = [
    pytest.mark.usefixtures("loaded_once"),
    pytest.mark.skipif(bool(TAKEN_OUT), reason=WHY),
]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.glob("*.md") if not path.name.startswith("view"))
LINKING = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
WARNINGS = {"no-space", "no-answer"}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [text for kind, text in FENCE.findall(page.read_text("utf-8")) if kind == language]


# they evaluate many problems, or run many commands
SLOW_PAGES = {
    *("aggregate", "budget", "compare", "early-exit", "eval", "exit-codes", "generate"),
    *("kv-dtype", "prompt", "retention", "reward", "sharing", "tiers", "trace", "weights"),
}
SLOW_PYTHON = {
    *(("eval", 0), ("python", 3), ("retention", 0), ("server", 0)),
    *(("sharing", 0), ("sharing", 1), ("sharing", 2), ("tiers", 0), ("tiers", 1), ("tiers", 2)),
}
PYTHON = [
    pytest.param(
        page,
        n,
        id=f"{page.stem}-{n}",
        marks=[pytest.mark.slow] * ((page.stem, n) in SLOW_PYTHON),
    )
    for page in PAGES
    for n in range(len(blocks(page, "python")))
]
SHELL = [
    pytest.param(page, id=page.stem, marks=[pytest.mark.slow] * (page.stem in SLOW_PAGES))
    for page in PAGES
    if blocks(page, "bash")
]


@pytest.mark.parametrize(("page", "number"), PYTHON)
def test_the_python_of_a_page_runs(
    page: Path,
    number: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    module = types.ModuleType("page")
    monkeypatch.setitem(sys.modules, "page", module)

    text = blocks(page, "python")[number]
    exec(compile(text, f"{page.name}, python block {number + 1}", "exec"), vars(module))

    assert capsys.readouterr().out.strip(), "it prints something"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", SHELL)
def test_the_commands_of_a_page_run_in_their_order(page: Path, tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    warm_process.program(programs / "arbor", "-m", "arbor")
    path = os.pathsep.join((str(programs), os.environ["PATH"]))

    for block in blocks(page, "bash"):
        done = subprocess.run(
            ["/bin/bash", "-e", "-c", block],
            cwd=tmp_path,
            env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, f"{block}\n{done.stderr}"
        assert done.stdout.strip()


@pytest.mark.parametrize("page", LINKING, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        linked = page if not name else page.parent / name
        assert linked.exists(), target
        if anchor:
            titles = re.findall(r"^#+ (.*)$", linked.read_text("utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            assert anchor in slugs, target


def test_the_generated_parts_are_those_of_the_code() -> None:
    done = warm_process.run("scripts/docs.py", "--check", cwd=ROOT)

    assert done.returncode == 0, done.stdout + done.stderr


# Errors


def raised(source: str) -> set[tuple[str, str]]:
    """(code, class) of every deliberate error that a module makes; what is filled in later stands
    in capitals."""
    kinds = {name for name, each in vars(arbor.errors).items() if _is_error(each)}
    found = set()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not node.args:
            continue
        called = node.func.id if isinstance(node.func, ast.Name) else ""
        code = node.args[0]
        if called not in kinds or called in ("UnknownName", "BudgetInfeasible"):
            continue
        if isinstance(code, ast.Constant):
            found.add((str(code.value), called))
        elif isinstance(code, ast.JoinedStr):
            found.add(("".join(map(_part, code.values)), called))
    return found


def _is_error(each: object) -> bool:
    return isinstance(each, type) and issubclass(each, ArborError)


def _part(part: ast.expr) -> str:
    if isinstance(part, ast.Constant):
        return str(part.value)
    return next(node.id for node in ast.walk(part) if isinstance(node, ast.Name)).upper()


def codes() -> dict[str, set[str]]:
    """Every code in the package, and the exit codes of the errors that have it."""
    found = {"unknown-KIND": {"2"}, "budget-infeasible": {"6"}}
    for path in sorted((ROOT / "arbor").rglob("*.py")) + [
        path
        for folder in ("kernels", "controllers", "verifiers")
        for path in sorted((ROOT / folder).rglob("*.py"))
    ]:
        for code, kind in raised(path.read_text("utf-8")):
            exit_code = str(getattr(importlib.import_module("arbor.errors"), kind).exit_code)
            found.setdefault(code, set()).add("130, 143" if code == "interrupted" else exit_code)
    return found


def entries() -> dict[str, str]:
    """The sections of docs/errors.md."""
    text = (DOCS / "errors.md").read_text("utf-8")
    parts = re.split(r"^## (.*)$", text, flags=re.MULTILINE)[1:]
    return dict(zip(parts[::2], parts[1::2], strict=True))


def test_every_error_has_an_entry_and_every_entry_an_error() -> None:
    described, made = entries(), codes()

    assert sorted(made.keys() - described.keys()) == [], "codes without an entry in docs/errors.md"
    assert sorted(described.keys() - made.keys()) == [], (
        "entries of docs/errors.md without an error"
    )
    for code, text in described.items():
        assert all(f"Exit code {each}." in text for each in made[code]), code
        assert len(text.strip().splitlines()) >= 3, f"{code}: what happened, and what to do"


def test_the_entries_are_sorted() -> None:
    assert list(entries()) == sorted(entries(), key=str.lower)


def test_a_code_is_found_however_it_is_made() -> None:
    source = 'raise UsageError("limit", "x")\nraise InputError(f"not-{encoding.lower()}", "x")'

    assert raised(source) == {("limit", "UsageError"), ("not-ENCODING", "InputError")}


def test_the_exit_codes_of_the_page_are_those_of_the_help() -> None:
    from arbor.cli.command import EXIT_CODES

    page = re.findall(r"^\| (\d+) \|", (DOCS / "exit-codes.md").read_text("utf-8"), re.MULTILINE)

    assert page == re.findall(r"(?<=[ \n])(\d+) [a-zA-Z]", EXIT_CODES.partition("):")[2])
    classes = {str(e.exit_code) for e in vars(arbor.errors).values() if _is_error(e)}
    assert classes <= set(page)
