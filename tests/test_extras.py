"""Extras: their states in doctor, and the files that installing and packaging rest on."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import click
import pytest
from support.taken_out import TAKEN_OUT, WHY

from arbor.cli import show as extras
from arbor.cli.app import cli
from arbor.cli.show import EXTRAS, extra_states

ROOT = Path(__file__).parents[1]
FOR_DEVELOPERS = {"dev", "test"}


@pytest.fixture(scope="module")
def project() -> dict[str, Any]:
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    found: dict[str, Any] = tomllib.loads(text)["project"]
    return found


def distribution(requirement: str) -> str:
    return re.split(r"[><=!~ ;\[]", requirement)[0]


@pytest.mark.skipif(bool(TAKEN_OUT), reason=WHY)
def test_doctor_knows_every_extra_and_its_packages(project: dict[str, Any]) -> None:
    declared = project["optional-dependencies"]

    assert EXTRAS.keys() == declared.keys() - FOR_DEVELOPERS
    for name, (_, packages) in EXTRAS.items():
        assert set(packages) == {distribution(each) for each in declared[name]}, name


@pytest.mark.skipif(bool(TAKEN_OUT), reason=WHY)
def test_a_missing_extra_says_what_it_would_add(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(extras, "version_of", lambda name: None if name == "uvicorn" else "1")

    states = extra_states()

    assert states["server"] == "adds arbor serve; not installed: uvicorn"
    assert states["math"] == "installed: the grader math"


@pytest.mark.skipif(bool(TAKEN_OUT), reason=WHY)
def test_the_guide_lists_every_extra() -> None:
    guide = (ROOT / "docs/start.md").read_text(encoding="utf-8")
    rows = [line.split("|")[1] for line in guide.splitlines() if line.startswith("| `")]

    assert sorted(re.findall(r"`([^`]+)`", " ".join(rows))) == sorted(EXTRAS)


@pytest.mark.skipif(bool(TAKEN_OUT), reason=WHY)
def test_the_container_copies_and_starts_what_there_is(project: dict[str, Any]) -> None:
    text = (ROOT / "Containerfile").read_text(encoding="utf-8")
    ignored = (ROOT / ".containerignore").read_text(encoding="utf-8").split()
    (wanted,) = set(re.findall(r"python:(3\.\d+)-slim", text))
    (named,) = re.findall(r"\*\.whl\)\[([a-z,-]+)\]", text)

    assert f"Programming Language :: Python :: {wanted}" in project["classifiers"]
    assert set(named.split(",")) <= EXTRAS.keys()
    for part in ("arbor", "kernels", "controllers", "verifiers", "pyproject.toml", "setup.py"):
        assert part not in ignored and (ROOT / part).exists()
    assert project["readme"] not in ignored
    (words,) = re.findall(r"^CMD \[(.*)\]$", text, re.MULTILINE)
    name, *options = re.findall(r'"([^"]+)"', words)
    serve = cli.get_command(click.Context(cli), name)
    assert serve is not None and serve.make_context(name, options).params["bind"] == "0.0.0.0"
