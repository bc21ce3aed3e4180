"""The pages in docs/: what they show runs, what they list is what the code has."""

from __future__ import annotations

import ast
import functools
import importlib
import os
import re
import subprocess
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import click
import pytest
from support import warm_process
from support.taken_out import TAKEN_OUT, WHY

import arbor.errors
from arbor.cli.app import cli
from arbor.errors import ArborError

pytestmark = [
    pytest.mark.usefixtures("loaded_once"),
    pytest.mark.skipif(bool(TAKEN_OUT), reason=WHY),
]

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = sorted([*DOCS.glob("*.md"), *(DOCS / "papers").glob("*.md")])
LINKING = sorted([*ROOT.glob("*.md"), *DOCS.rglob("*.md"), *(ROOT / "examples").rglob("*.md")])
CODE = ("arbor", "kernels", "controllers", "verifiers", "scripts", "examples")
OPTION = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]*")
OTHERS = re.compile(r"pip install|podman run|inspect eval|lm_eval")  # programs with other options
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
MOST_PAGES, MOST_WORDS, MOST_WORDS_OF_A_PAGE = 24, 28_900, 2_200

# pages whose commands or Python evaluate many problems
SLOW_COMMANDS = {
    *("answers", "budget", "cpu", "errors", "eval", "python", "retention", "rksc", "task"),
    *("tiers", "trace", "verifier"),
}
SLOW_PYTHON = {"cpu", "python", "rksc", "server", "tiers", "verifier"}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of one language."""
    return [text for kind, text in FENCE.findall(page.read_text("utf-8")) if kind == language]


def halves(language: str, slow: set[str]) -> list[object]:
    """The pages that have such blocks: those of the default run, and a slow case of the others."""
    having = [page for page in PAGES if blocks(page, language)]
    return [
        pytest.param([page for page in having if page.stem not in slow], id="quick"),
        pytest.param(
            [page for page in having if page.stem in slow], id="slow", marks=pytest.mark.slow
        ),
    ]


@pytest.mark.timeout(600)
@pytest.mark.parametrize("pages", halves("python", SLOW_PYTHON))
def test_the_python_of_the_pages_runs(
    pages: list[Path],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for page in pages:
        for number, text in enumerate(blocks(page, "python"), 1):
            module = types.ModuleType("page")
            monkeypatch.setitem(sys.modules, "page", module)
            where = f"{page.name}, python block {number}"

            exec(compile(text, where, "exec"), vars(module))

            assert capsys.readouterr().out.strip(), f"{where} prints nothing"


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("pages", halves("bash", SLOW_COMMANDS))
def test_the_commands_of_the_pages_run_in_their_order(pages: list[Path], tmp_path: Path) -> None:
    programs = tmp_path / "bin"
    programs.mkdir()
    warm_process.program(programs / "arbor", "-m", "arbor")
    path = os.pathsep.join((str(programs), os.environ["PATH"]))
    for page in pages:
        folder = tmp_path / page.stem
        folder.mkdir()
        for block in blocks(page, "bash"):
            done = subprocess.run(
                ["/bin/bash", "-e", "-c", block],
                cwd=folder,
                env=os.environ | {"PATH": path, "PYTHONPATH": str(ROOT)},
                capture_output=True,
                text=True,
            )
            assert done.returncode == 0, f"{page.name}: {block}\n{done.stderr}"
            assert done.stdout.strip(), f"{page.name}: {block} prints nothing"


def dead_links(page: Path) -> Iterator[str]:
    """The links of a page whose file or heading does not exist."""
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text("utf-8")):
        name, _, anchor = target.partition("#")
        linked = page if not name else page.parent / name
        found = target.startswith("https://") or linked.exists()
        if found and anchor and not target.startswith("https://"):
            titles = re.findall(r"^#+ (.*)$", linked.read_text("utf-8"), re.MULTILINE)
            slugs = [re.sub(r"[^\w -]", "", title.lower()).replace(" ", "-") for title in titles]
            found = anchor in slugs
        if not found:
            yield f"{page.relative_to(ROOT)}: {target}"


def test_every_link_leads_somewhere() -> None:
    assert [link for page in LINKING for link in dead_links(page)] == []


def options(text: str) -> set[str]:
    """The long options that a text names."""
    return set(OPTION.findall(text))


@functools.cache
def options_of_script(script: str) -> set[str]:
    """The options that a script names, and those that several share."""
    shared = ROOT / "scripts/model_and_problems.py"
    return options("".join(path.read_text("utf-8") for path in (ROOT / script, shared)))


def options_of_arbor(group: click.Group = cli) -> set[str]:
    """The options of every command."""
    context = click.Context(group)
    commands = [group.get_command(context, name) for name in group.list_commands(context)]
    found: set[str] = set()
    for each in (group, *filter(None, commands)):
        for parameter in each.get_params(click.Context(each)):
            found |= {*parameter.opts, *parameter.secondary_opts}
        if isinstance(each, click.Group) and each is not group:
            found |= options_of_arbor(each)
    return found


def test_the_options_of_scripts_that_pages_name_exist() -> None:
    named = {
        (script, option)
        for page in LINKING
        for script, rest in re.findall(
            r"python (scripts/\w+\.py)((?:[^`\n]|\\\n)*)", page.read_text("utf-8")
        )
        for option in options(rest)
    }

    assert len(named) > 10
    assert [each for each in sorted(named) if each[1] not in options_of_script(each[0])] == []


def test_every_option_that_a_page_names_is_arbor_s_or_that_of_a_script_it_names() -> None:
    known, unknown = options_of_arbor(), []
    for page in LINKING:
        if page.name == "CHANGELOG.md":  # it names former ones
            continue
        text = page.read_text("utf-8")
        scripts = set(re.findall(r"scripts/\w+\.py", text))
        named = options("\n".join(line for line in text.splitlines() if not OTHERS.search(line)))
        named -= known.union(*map(options_of_script, scripts))
        unknown += [f"{page.relative_to(ROOT)}: {option}" for option in sorted(named)]

    assert unknown == []


def test_every_page_that_a_message_names_exists() -> None:
    named = {
        (name, str(path.relative_to(ROOT)))
        for folder in CODE
        for path in sorted((ROOT / folder).rglob("*.py"))
        for name in re.findall(r"docs/[a-z_/-]+\.md", path.read_text("utf-8"))
    }

    assert len(named) > 10
    assert [each for each in sorted(named) if not (ROOT / each[0]).exists()] == []


def test_a_page_answers_the_question_of_its_title_in_ten_minutes() -> None:
    words = {}
    for page in PAGES:
        text = page.read_text("utf-8")
        assert re.match(r"# [^\n]+\?\n", text), f"{page.name}: its title asks what it answers"
        words[page.name] = sum(1 for word in text.split() if re.search(r"\w", word))

    assert {name: n for name, n in words.items() if n > MOST_WORDS_OF_A_PAGE} == {}
    assert len(PAGES) <= MOST_PAGES and sum(words.values()) <= MOST_WORDS


def test_the_generated_parts_are_those_of_the_code() -> None:
    done = warm_process.run("scripts/docs.py", "--check", cwd=ROOT)

    assert done.returncode == 0, done.stdout + done.stderr


# Errors


def raised(source: str) -> set[tuple[str, str]]:
    """(code, class) of every deliberate error that a module makes; what is filled in later stands
    in capitals."""
    kinds = {name for name, each in vars(arbor.errors).items() if _is_error(each)}
    found: set[tuple[str, str]] = set()
    if not any(f"{kind}(" in source for kind in kinds):
        return found
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


def codes() -> set[tuple[str, str]]:
    """Every code in the package, with the exit code of the errors that have it."""
    found = {("2", "unknown-KIND"), ("6", "budget-infeasible")}
    folders = ("arbor", "kernels", "controllers", "verifiers")
    for path in [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]:
        for code, kind in raised(path.read_text("utf-8")):
            exit_code = getattr(importlib.import_module("arbor.errors"), kind).exit_code
            found.add(("130" if code == "interrupted" else str(exit_code), code))
    return found


def rows() -> dict[str, list[str]]:
    """The codes of each table of docs/errors.md by the exit codes of its heading."""
    text = (DOCS / "errors.md").read_text("utf-8")
    parts = re.split(r"^## Exit codes? (.*)$", text, flags=re.MULTILINE)[1:]
    tables = dict(zip(parts[::2], parts[1::2], strict=True))
    return {name: re.findall(r"^\| `([\w-]+)` \|", table, re.M) for name, table in tables.items()}


def test_every_error_has_a_row_and_every_row_an_error() -> None:
    described = {
        (exit_code, code)
        for heading, listed in rows().items()
        for exit_code in re.findall(r"\d+", heading)
        for code in listed
    }
    shared = {each for each in described if each[1] in ("bug", "interrupted")}  # one table

    assert sorted(codes() - described) == [], "errors without a row in docs/errors.md"
    assert sorted(described - shared - codes()) == [], "rows of docs/errors.md without an error"
    for listed in rows().values():
        assert listed == sorted(listed, key=str.lower)


def test_a_code_is_found_however_it_is_made() -> None:
    source = 'raise UsageError("limit", "x")\nraise InputError(f"not-{encoding.lower()}", "x")'

    assert raised(source) == {("limit", "UsageError"), ("not-ENCODING", "InputError")}


def test_the_exit_codes_of_the_page_are_those_of_the_help() -> None:
    from arbor.cli.command import EXIT_CODES

    page = re.findall(r"^\| (\d+) \|", (DOCS / "errors.md").read_text("utf-8"), re.MULTILINE)

    assert page == re.findall(r"(?<=[ \n])(\d+) [a-zA-Z]", EXIT_CODES.partition("):")[2])
    classes = {str(e.exit_code) for e in vars(arbor.errors).values() if _is_error(e)}
    assert classes <= set(page)
