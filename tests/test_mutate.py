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


@pytest.mark.parametrize(
    "source",
    [
        '"""a < 1"""',
        "x: Literal[1] | None",
        "def f(a: Array[1] | None) -> int | None: pass",
        "@dataclass(frozen=True, slots=True)\nclass A: pass",
        "__slots__ = ('a', 1)",
        "assert a < 1, f'{a + 1}'",
        "x = f'{a + 1}'",
        "log.info('%d', a + 1)",
        "logging.getLogger(__name__).debug(a + 1)",
        "import a.b as c",
        "if TYPE_CHECKING:\n    x = 1",
        "x = zip(a, b, strict=True)",
        "Union = A | B",
        "def __repr__(self):\n    return a + 1",
        "def __init__(self, a):\n    self.a = a",
        "def f():\n    a = b",
        "def f():\n    return None",
    ],
)
def test_what_no_test_should_see_is_left_alone(source: str) -> None:
    assert mutated(source) == []


def test_a_returned_false_becomes_true_and_not_none() -> None:
    assert mutated("def f():\n    return False") == ["def f():\n    return True"]


def test_every_mutant_of_a_module_is_another_program_of_as_many_lines() -> None:
    source = (ROOT / "arbor/retention/ordering.py").read_bytes()

    found = mutate.mutants_of("ordering.py", source)

    assert len(found) > 20
    assert len({each.apply(source) for each in found}) == len(found)
    for each in found:
        assert source[each.start : each.end].decode() == each.before
        assert source[: each.start].count(b"\n") + 1 == each.line


def test_equivalent_mutants_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "arbor").mkdir()
    (tmp_path / "arbor/a.py").write_text("x = a < b\ny = a < b\n", encoding="utf-8")
    listed = mutate.Equivalent("arbor/a.py", "x = a < b", "< -> <=", "a and b are never equal")

    every = mutate.all_mutants(tmp_path, ["arbor"], ())
    others = mutate.all_mutants(tmp_path, ["arbor"], (listed,))

    assert [(each.line, each.change) for each in every if each not in others] == [(1, "< -> <=")]


def test_a_tuning_constant_is_left_alone_where_it_is_set_and_nowhere_else() -> None:
    source = b"MOST_LOGITS = 256 << 20\nMOST = 3\ndef f():\n    MOST_LOGITS = 5\n"

    tuned = mutate.mutants_of("arbor/engine/forest_state.py", source)
    others = mutate.mutants_of("arbor/engine/other.py", source)

    assert {each.line for each in tuned} == {2, 4}
    assert {each.line for each in others} == {1, 2, 4}


def test_every_listed_tuning_constant_is_one_of_its_module() -> None:
    for (file, name), why in mutate.TUNING.items():
        assert f"\n{name} = " in (ROOT / file).read_text("utf-8")
        assert name == name.upper() and why


def test_a_module_is_mutated_alone(tmp_path: Path) -> None:
    (tmp_path / "arbor").mkdir()
    for name in ("a", "b"):
        (tmp_path / f"arbor/{name}.py").write_text("x = 3\n", encoding="utf-8")

    assert {each.file for each in mutate.all_mutants(tmp_path, ["arbor"])} == {
        "arbor/a.py",
        "arbor/b.py",
    }
    assert {each.file for each in mutate.all_mutants(tmp_path, ["arbor/b.py"])} == {"arbor/b.py"}


@pytest.mark.slow
def test_every_listed_equivalent_is_a_mutant() -> None:
    files = {each.file for each in mutate.EQUIVALENT}
    found = set()
    for file in files:
        source = (ROOT / file).read_bytes()
        lines = source.decode().splitlines()
        found |= {
            (file, lines[each.line - 1].strip(), each.change)
            for each in mutate.mutants_of(file, source)
        }

    assert [each for each in mutate.EQUIVALENT if each[:3] not in found] == []
    assert all(each.why for each in mutate.EQUIVALENT)


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


def test_a_copied_tree_has_links_and_nothing_that_is_ignored(tmp_path: Path) -> None:
    tree = mutate.copied_tree(ROOT, tmp_path / "tree")

    assert (tree / "arbor/kernels").is_symlink() and (
        tree / "arbor/kernels/attention/base.py"
    ).is_file()
    assert (tree / "scripts/mutate.py").is_file()
    assert not [*tree.rglob("__pycache__"), *tree.glob(".git")]


def test_the_summary_gives_the_share_and_its_interval() -> None:
    outcomes = [mutate.Outcome("test", 1.0)] * 9 + [mutate.Outcome("", 3.0)]

    assert mutate.summary(outcomes) == "9 of 10 mutants killed: 90.0% [55.5%, 99.7%], 12 s"
