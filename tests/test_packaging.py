"""What is installed: one package, whole, light to import, and no trap for its neighbours."""

from __future__ import annotations

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import click
import pytest
from conftest import runs_in

import arbor

ROOT = Path(__file__).parents[1]
LINKED = ("kernels", "controllers", "verifiers")
NOT_PACKAGED = (
    ".git",
    "*.so",
    ".*_cache",
    "__pycache__",
    "*.egg-info",
    "build",
    "dist",
    "tests",
    ".venv",
)


def python(code: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], cwd=cwd, capture_output=True, text=True)


@pytest.fixture(scope="module")
def wheel_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel built from a copy of the sources."""
    folder = tmp_path_factory.mktemp("wheel")
    source = folder / "source"
    ignore = shutil.ignore_patterns(*NOT_PACKAGED)
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore)
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation"]
    command += ["--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    shutil.rmtree(source)
    return next(folder.glob("*.whl"))


@pytest.fixture(scope="module")
def wheel(wheel_file: Path) -> list[str]:
    """The files in the wheel."""
    with zipfile.ZipFile(wheel_file) as archive:
        return archive.namelist()


@pytest.mark.slow
def test_the_wheel_has_every_source_file_as_a_plain_file(wheel: list[str]) -> None:
    sources = {
        f"arbor/{path.relative_to(ROOT / 'arbor')}"
        for entry in (ROOT / "arbor").iterdir()
        for path in (entry.rglob("*.py") if entry.is_dir() else [entry])
        if path.suffix == ".py" and "__pycache__" not in path.parts
    }

    assert sources <= set(wheel)
    for folder in LINKED:
        assert any(name.startswith(f"arbor/{folder}/") for name in sources)


@pytest.mark.slow
def test_the_wheel_installs_into_a_clean_environment(wheel_file: Path, tmp_path: Path) -> None:
    """Its dependencies are those of this environment, which take gigabytes."""
    venv.create(tmp_path / "env", with_pip=False)
    own = tmp_path / "env/bin/python"
    install = [sys.executable, "-m", "pip", "--python", str(own), "install", "--no-deps"]
    alone = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [*install, "--no-index", str(wheel_file)],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=alone,
    )
    assert done.returncode == 0, done.stdout + done.stderr

    def run(*words: str) -> str:
        packages = str(Path(click.__file__).parents[1])
        settings = {**os.environ, "PYTHONPATH": packages}
        ran = subprocess.run(words, cwd=tmp_path, env=settings, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
        return ran.stdout

    assert run(str(tmp_path / "env/bin/arbor"), "--version") == f"arbor {arbor.__version__}\n"
    where = "import arbor; print(arbor.__file__)"
    assert Path(run(str(own), "-c", where).strip()).is_relative_to(tmp_path / "env")
    point = (
        "from importlib.metadata import entry_points as found; print(*found(group='inspect_ai'))"
    )
    assert "arbor.integrations.inspect_ai.provider" in run(str(own), "-c", point)


@pytest.mark.parametrize("compiler", ["false", "/nowhere/c++"])
def test_without_a_working_compiler_the_package_still_builds(compiler: str, tmp_path: Path) -> None:
    settings = {**os.environ, "CXX": compiler, "PATH": str(tmp_path)}
    if compiler == "false":
        settings["CXX"] = shutil.which("false") or "false"
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, env=settings, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr
    assert "the native kernels were not built" in done.stderr and settings["CXX"] in done.stderr
    assert not list(tmp_path.rglob("*.so"))


def test_the_compiler_is_the_whole_command_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = runpy.run_path(str(ROOT / "kernels/csrc/build.py"))
    shown = tmp_path / "shown"
    wrapper = tmp_path / "a wrapper"
    wrapper.write_text(f'#!/bin/sh\necho "$@" > {shown}\nexit 7\n', encoding="utf-8")
    wrapper.chmod(0o755)

    monkeypatch.setenv("CXX", f"'{wrapper}' g++ -O1")
    with pytest.raises(RuntimeError, match="a wrapper"):
        build["build"](tmp_path / "library.so")
    assert shown.read_text("utf-8") == "g++ -O1 -dumpmachine\n"

    monkeypatch.setenv("CXX", "/nowhere/c++ -O1")
    with pytest.raises(RuntimeError, match="/nowhere/c\\+\\+ cannot be run"):
        build["build"](tmp_path / "library.so")


CUT_OFF = """
import socket

def cut_off(*args, **kwargs):
    raise OSError("the network is cut off")

socket.socket.connect = socket.socket.connect_ex = socket.getaddrinfo = cut_off
"""


@pytest.mark.slow
@pytest.mark.slow
def test_the_demo_runs_from_the_wheel_without_a_network(wheel_file: Path, tmp_path: Path) -> None:
    """A pure wheel is installed by unpacking it, so no installer is needed."""
    site, away = tmp_path / "site", tmp_path / "away"
    away.mkdir()
    with zipfile.ZipFile(wheel_file) as archive:
        archive.extractall(site)
    (site / "sitecustomize.py").write_text(CUT_OFF, encoding="utf-8")
    steering = ("HF_", "TRANSFORMERS_", "ARBOR_", "XDG_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(steering)}
    settings = kept | {"PYTHONPATH": str(site), "HOME": str(away)}

    def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", code, *arguments]
        return subprocess.run(command, cwd=away, env=settings, capture_output=True, text=True)

    where = run("import arbor; print(arbor.__file__)")
    assert Path(where.stdout.strip()) == site / "arbor/__init__.py"
    asked = run("import socket; socket.create_connection(('127.0.0.1', 9))")
    assert "the network is cut off" in asked.stderr

    done = run("import sys; from arbor.cli import main; sys.exit(main())", "demo")

    assert (done.returncode in (0, 3), done.stderr) == (True, ""), "an answer, or none"
    assert "arbor-demo.html" in done.stdout
    page = (away / "arbor-demo.html").read_text(encoding="utf-8")
    assert page.lstrip().startswith("<!doctype html>") and len(page) > 100_000


@pytest.mark.parametrize("folder", LINKED)
def test_the_outer_folders_are_linked_into_the_package(folder: str) -> None:
    link = ROOT / "arbor" / folder

    assert link.is_symlink() and str(link.readlink()) == f"../{folder}"
    assert not (ROOT / folder / "__init__.py").exists(), "it would shadow other packages"


def test_version_and_changelog_agree() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    headings = re.findall(r"^## \[([^\]]+)\]", changelog, re.MULTILINE)

    assert headings[:2] == ["Unreleased", arbor.__version__]
    assert f"\nversion: {arbor.__version__}\n" in citation


def test_every_dependency_is_pinned_and_tested_as_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    needed = project["dependencies"] + project["optional-dependencies"]["test"]

    assert {re.split(r"[><=!~ ;\[]", need)[0] for need in needed} <= set(pins)


def test_importing_arbor_imports_neither_torch_nor_transformers() -> None:
    done = python(
        "import arbor, sys; arbor.ArborError; arbor.Budget; arbor.Metrics; arbor.read_trace\n"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )

    assert done.returncode == 0, done.stderr


def test_the_check_is_the_same_everywhere() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    run = (ROOT / ".ci/run").read_text(encoding="utf-8")
    command = 'pip install -e ".[test]" -c constraints.txt && make check'

    assert command in readme.splitlines()
    install, check = command.split(" && ")
    assert install in run.splitlines()
    part = r"PART=\$\(\(commit % (\d+)\)\)/(\d+)"
    parts = re.fullmatch(
        f"{check} && make without {part} && make slow {part}", run.splitlines()[-1]
    )
    assert parts is not None and parts[1] == parts[2] and parts[3] == parts[4]
    assert (ROOT / ".ci/run").stat().st_mode & 0o111, ".ci/run is not executable"


def test_every_slow_test_is_in_one_part() -> None:
    """`make slow PART=K/N` for all K is `make slow`."""

    def item(name: str, *, slow: bool) -> Any:
        return SimpleNamespace(nodeid=name, get_closest_marker=lambda _: slow or None)

    tests = [item(f"tests/test_fuzz.py::test[{i}]", slow=True) for i in range(300)]
    parts = [[runs_in(f"{part}/8", test) for test in tests] for part in range(8)]

    assert [sum(held) for held in zip(*parts, strict=True)] == [1] * 300
    assert all(20 <= sum(part) <= 60 for part in parts)
    assert all(runs_in(f"{part}/8", item("tests/test_a.py::b", slow=False)) for part in range(8))


def test_no_file_is_too_large_to_clone() -> None:
    limit = 50 * 2**20
    files = subprocess.run(
        ["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True
    ).stdout.split("\0")

    assert not [name for name in files if name and (ROOT / name).stat().st_size > limit]
