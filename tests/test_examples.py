"""The plug-ins in examples/: named in their guides, found by entry points, used in a search."""

from __future__ import annotations

import json
import os
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support import warm_process

from arbor.registry import KINDS, plural

ROOT = Path(__file__).parents[1]
EXAMPLES = {path.name: path for path in sorted((ROOT / "examples").iterdir()) if path.is_dir()}
MOST_LINES = 80
GUIDES = {"policy": "retention.md"}  # of the others, docs/KIND.md
SHOWN = ("controller", "policy")  # short enough to stand in their guides

SEARCH = """
import json, sys
from arbor import Solver
from arbor.registry import plugins

kind, name = sys.argv[1:]
problem = "1 2 3 4" if kind == "task" else "4 5 6 10"
with Solver(budget="150tok", **{kind: name}) as solver:
    solution = solver.solve(problem)
    settings = Solver.from_config(solution.config).config
print(json.dumps({
    "plugins": plugins(kind),
    "used": solution.config[kind]["name"],
    "built again": settings == solution.config,
    "blocks": solution.metrics.nodes,
    "evicted": solution.metrics.evictions,
    "asked": solution.metrics.asked,
    "answer": solution.answer,
    "correct": solution.correct,
}))
"""


def project(folder: Path) -> dict[str, Any]:
    text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    found: dict[str, Any] = tomllib.loads(text)
    return found


def module(folder: Path) -> Path:
    (name,) = project(folder)["tool"]["setuptools"]["py-modules"]
    return folder / f"{name}.py"


def install(folder: Path, site: Path) -> tuple[str, str]:
    """Leave a project as an installer would: its module and metadata; the entry point's name and
    value."""
    about = project(folder)["project"]
    ((group, points),) = about["entry-points"].items()
    lines = [f"{name} = {value}" for name, value in points.items()]
    info = site / f"{about['name'].replace('-', '_')}-{about['version']}.dist-info"
    info.mkdir(parents=True)
    head = f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n"
    (info / "METADATA").write_text(head, encoding="utf-8")
    text = "\n".join([f"[{group}]", *lines, ""])
    (info / "entry_points.txt").write_text(text, encoding="utf-8")
    (site / module(folder).name).write_bytes(module(folder).read_bytes())
    assert group == f"arbor.{plural(folder.name)}"
    ((name, value),) = points.items()
    return name, value


def test_there_is_one_example_for_each_kind_that_has_a_guide() -> None:
    assert set(EXAMPLES) == {"controller", "policy", "task", "verifier"} <= set(KINDS)


@pytest.mark.parametrize("kind", EXAMPLES)
def test_the_guide_links_the_module_and_shows_the_entry_point(kind: str) -> None:
    guide = (ROOT / "docs" / GUIDES.get(kind, f"{kind}.md")).read_text(encoding="utf-8")
    source = module(EXAMPLES[kind]).read_text(encoding="utf-8")
    lines = (EXAMPLES[kind] / "pyproject.toml").read_text(encoding="utf-8").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith("[project.entry-points"))

    assert f"```toml\n{lines[begin]}\n{lines[begin + 1]}\n```" in guide
    assert f"(../examples/{kind}/)" in guide
    assert len(source.splitlines()) <= MOST_LINES
    if kind in SHOWN:
        assert f"```python\n{source}" in guide


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "controller")) for kind in EXAMPLES],
)
def test_the_example_is_found_by_its_entry_point_and_searches(kind: str, tmp_path: Path) -> None:
    name, value = install(EXAMPLES[kind], tmp_path)

    variables = os.environ | {"PYTHONPATH": os.pathsep.join((str(tmp_path), str(ROOT)))}
    done = warm_process.run("-c", SEARCH, kind, name, cwd=tmp_path, env=variables)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["plugins"] == {name: value}
    assert found["used"] == name and found["built again"]
    assert found["blocks"] > 3
    if kind == "policy":
        assert found["evicted"] > 0
    if kind == "verifier":
        assert 0 < found["asked"] < found["blocks"] - 1, "some thoughts, not all"
    if kind == "task":
        assert found["answer"] and found["correct"]
