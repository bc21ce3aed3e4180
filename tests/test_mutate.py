"""The mutation script: the changes it makes, those it leaves out, and its verdicts."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest
from support.slow_cases import every

ROOT = Path(__file__).parents[1]


def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate", ROOT / "scripts/mutate.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["mutate"] = module
    spec.loader.exec_module(module)
    return module


mutate = script()


def mutated(source: str) -> list[str]:
    """The sources of all mutants, stripped."""
    data = source.encode()
    return [each.apply(data).decode().strip() for each in mutate.mutants_of("m.py", data)]


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("x = a < b", ["x = a <= b", "x = a >= b"]),
        ("x = a <= b", ["x = a < b", "x = a > b"]),
        ("x = a == b", ["x = a != b"]),
        ("x = a is not None", ["x = a is None"]),
        ("x = a in b", ["x = a not in b"]),
        ("x = (a) < (  # a < comment\n b)", ["x = (a) <= (  # a < comment\n b)"]),
        ("x = a < b == c", ["x = a < b != c"]),
        ("x = a + b", ["x = a - b"]),
        ("x = a // b", ["x = a * b"]),
        ("def f():\n    return a | b", ["def f():\n    return a & b"]),
        ("x = -a", ["x = (a)"]),
        ("x += a", ["x -= a", "pass"]),
        ("x = a and b or c", ["x = a or b or c", "x = a and b and c"]),
        ("x = not a", ["x = (a)"]),
        ("if a: b()", ["if (not (a)): b()", "if a: pass"]),
        ("while a: break", ["while (not (a)): break", "while a: pass"]),
        ("x = [a for a in b if c]", ["x = [a for a in b if (not (c))]"]),
        ("x = a if b else c", ["x = a if (not (b)) else c"]),
        ("x = 3", ["x = 4", "x = 2"]),
        ("x = 0", ["x = 1"]),
        ("x = 0.5", ["x = 1.0"]),
        ("x = True", ["x = False"]),
        ("def f(a=1): pass", ["def f(a=2): pass", "def f(a=0): pass"]),
        ("def f(a):\n    a.b = c", ["def f(a):\n    pass"]),
        ("def f():\n    return a", ["def f():\n    return None"]),
        ("def f():\n    return 0", ["def f():\n    return None", "def f():\n    return 1"]),
        ("raise E('text')", ["pass"]),
        ("del a[b]", ["pass"]),
        ("é = 'é' < a", ["é = 'é' <= a"]),
    ],
)
def test_a_change_is_made_at_its_place(source: str, expected: list[str]) -> None:
    assert set(expected) <= set(mutated(source))


@pytest.mark.parametrize("folder", every(3, mutate.FOLDERS))
def test_every_module_has_tests(folder: str) -> None:
    for path in (ROOT / folder).rglob("*.py"):
        files = mutate.tests_of(ROOT, str(path.relative_to(ROOT)))

        assert files and len(set(files)) == len(files)
        assert all((ROOT / file).is_file() for file in files)


@pytest.mark.slow
def test_a_mutant_is_killed_by_a_test_or_the_time_limit_or_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module, tests = tmp_path / "arbor/engine/steps.py", tmp_path / "tests/test_steps.py"
    for path in (module, tests):
        path.parent.mkdir(parents=True)
    source = "def up_to(n):\n    i = 0\n    while i < n:\n        i += 1\n    return i\n"
    module.write_text(source, encoding="utf-8")
    tests.write_text(
        "from arbor.engine.steps import up_to\ndef test_it(): assert up_to(3) == 3\n",
        encoding="utf-8",
    )
    monkeypatch.setattr(mutate, "TEST_LIMIT_S", 2)
    chosen = [
        each
        for each in mutate.all_mutants(tmp_path, ["arbor"])
        if each.change in ("< -> <=", "i += 1 -> pass", "0 -> 1")
    ]

    server = mutate.TestServer(tmp_path)
    verdicts = {
        mutant.change: outcome.killed_by for mutant, outcome in mutate.judged([server], chosen)
    }
    server.close()

    assert verdicts == {
        "0 -> 1": "",
        "< -> <=": "tests/test_steps.py::test_it",
        "i += 1 -> pass": "tests/test_steps.py::test_it",
    }
    assert module.read_text(encoding="utf-8") == source
