"""Mutation checks: small changes to the engine, each of which a test must detect.

    python scripts/mutate.py --n 100 --workers 2 --csv mutants.csv
    python scripts/mutate.py --folder arbor/memory --n 20 --seed 1
    python scripts/mutate.py --folder arbor/engine/step.py --list

Mutants are sampled with a seed from all changes of these kinds: a comparison flipped or its bound
moved, an arithmetic or bitwise operator swapped, `and` and `or` swapped, a condition negated, a
number or a truth value changed, a statement removed, a return value dropped. Each runs in a copy of
the tree against the tests that name its module, then its package, until one fails. Docstrings,
annotations, decorators, assertions, error and log texts are not mutated, nor is a returned `False`,
which no caller can tell from None but mypy can (it is changed to `True`). Some mutants alter
nothing that a test could see, such as how much is looked at first: read each survivor.

Every mutant is a row of the CSV: file, line, kind, change, killed by, seconds. `killed by` is a
test (one that takes too long fails), `timeout` for all of them, or empty where the mutant survived.
The summary gives the share killed and its interval.

The script is ours because mutmut 3 loses the linked folders of the package and leaves out decorated
functions, and cosmic-ray has neither removed statements, nor samples, nor tests by module; it has
annotations among its mutants, and eleven replacements for every operator.
"""

from __future__ import annotations

import argparse
import ast
import csv
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeGuard

from arbor.kernels import native
from arbor.measure.statistics import clopper_pearson

ROOT = Path(__file__).parents[1]
FOLDERS = ("arbor/memory", "arbor/engine", "arbor/retention")
TEST_LIMIT_S = 60  # per test; a mutant that loops forever is killed by it
MUTANT_LIMIT_S = 900
# tests of commands start processes; those of loading need a process that has imported nothing yet
LEFT_OUT = ("test_architecture", "test_cli", "test_loading")


@dataclass(frozen=True, slots=True)
class Mutant:
    """One change to one file.

    Attributes:
        file: relative path.
        line: 1-based.
        kind: "compare", "arithmetic", "logic", "negate", "constant", "statement" or "return".
        start, end: byte offsets of the replaced source.
        before, after: the replaced source and its replacement.
    """

    file: str
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    @property
    def change(self) -> str:
        """The change on one line."""
        return f"{_one_line(self.before)} -> {_one_line(self.after)}"

    def apply(self, source: bytes) -> bytes:
        """The mutated source."""
        return source[: self.start] + self.after.encode() + source[self.end :]


def _one_line(text: str, most: int = 60) -> str:
    short = " ".join(text.split())
    return short if len(short) <= most else f"{short[: most - 1]}…"


COMPARISONS: dict[type[ast.cmpop], tuple[str, ...]] = {
    ast.Lt: ("<=", ">="),
    ast.LtE: ("<", ">"),
    ast.Gt: (">=", "<="),
    ast.GtE: (">", "<"),
    ast.Eq: ("!=",),
    ast.NotEq: ("==",),
    ast.Is: ("is not",),
    ast.IsNot: ("is",),
    ast.In: ("not in",),
    ast.NotIn: ("in",),
}
OPERATORS: dict[type[ast.operator], tuple[str, str]] = {
    ast.Add: ("+", "-"),
    ast.Sub: ("-", "+"),
    ast.Mult: ("*", "+"),
    ast.Div: ("/", "*"),
    ast.FloorDiv: ("//", "*"),
    ast.Mod: ("%", "//"),
    ast.Pow: ("**", "*"),
    ast.LShift: ("<<", ">>"),
    ast.RShift: (">>", "<<"),
    ast.BitAnd: ("&", "|"),
    ast.BitOr: ("|", "&"),
    ast.BitXor: ("^", "&"),
}
COMPARISON = re.compile(r"\bis\s+not\b|\bnot\s+in\b|\bis\b|\bin\b|[<>=!]=|[<>]")
LOGGERS = {"log", "logger", "logging", "warnings"}
# zip(strict=...) is an assertion; numpy's assume_unique=... is one too, which makes it faster
UNMUTATED_KEYWORDS = {"strict", "assume_unique"}
TEXTS = {"__repr__", "__str__"}


class _Finder(ast.NodeVisitor):
    """Collects the mutants of one file."""

    def __init__(self, file: str, source: bytes) -> None:
        self.file = file
        self.source = source
        self.line_starts = [0]
        for line in source.splitlines(keepends=True):
            self.line_starts.append(self.line_starts[-1] + len(line))
        self.found: list[Mutant] = []
        self.function = ""

    def span(self, node: ast.expr | ast.stmt) -> tuple[int, int]:
        assert node.end_lineno is not None and node.end_col_offset is not None
        return (
            self.line_starts[node.lineno - 1] + node.col_offset,
            self.line_starts[node.end_lineno - 1] + node.end_col_offset,
        )

    def text(self, start: int, end: int) -> str:
        return self.source[start:end].decode()

    def add(self, kind: str, start: int, end: int, after: str) -> None:
        line = self.source.count(b"\n", 0, start) + 1
        self.found.append(Mutant(self.file, line, kind, start, end, self.text(start, end), after))

    def replace(self, kind: str, node: ast.expr | ast.stmt, after: str) -> None:
        self.add(kind, *self.span(node), after)

    def between(self, kind: str, left: ast.expr, right: ast.expr, old: str, new: str) -> None:
        """Replace the operator `old` between two expressions; parentheses may stand there too."""
        start, end = self.span(left)[1], self.span(right)[0]
        gap = re.sub(
            r"#[^\n]*", lambda comment: " " * len(comment[0].encode()), self.text(start, end)
        )
        at = start + len(gap[: gap.index(old)].encode())
        self.add(kind, at, at + len(old), new)

    def negate(self, test: ast.expr) -> None:
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            return  # removing the `not` is a mutant of its own
        start, end = self.span(test)
        self.add("negate", start, end, f"(not ({self.text(start, end)}))")

    # Statements

    def visit_FunctionDef(self, node: ast.FunctionDef) -> None:
        if node.name in TEXTS:
            return
        for default in [*node.args.defaults, *node.args.kw_defaults]:
            if default is not None:
                self.visit(default)
        outer, self.function = self.function, node.name
        for statement in node.body:
            self.visit(statement)
        self.function = outer

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        for statement in node.body:
            self.visit(statement)

    def visit_Import(self, node: ast.Import) -> None:
        pass

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        pass

    def visit_Assert(self, node: ast.Assert) -> None:
        pass

    def visit_Raise(self, node: ast.Raise) -> None:
        self.replace("statement", node, "pass")

    def visit_AnnAssign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)

    def visit_Assign(self, node: ast.Assign) -> None:
        stored = {name.id for name in ast.walk(node) if _is_stored(name)}
        if any(name.startswith("__") for name in stored):
            return
        # without a local name or an attribute set in __init__ nearly everything fails
        if not stored and self.function not in ("", "__init__"):
            self.replace("statement", node, "pass")
        self.generic_visit(node)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.replace("statement", node, "pass")
        if type(node.op) in OPERATORS:
            old, new = OPERATORS[type(node.op)]
            self.between("arithmetic", node.target, node.value, f"{old}=", f"{new}=")
        self.generic_visit(node)

    def visit_Delete(self, node: ast.Delete) -> None:
        self.replace("statement", node, "pass")

    def visit_Break(self, node: ast.Break) -> None:
        self.replace("statement", node, "pass")

    def visit_Continue(self, node: ast.Continue) -> None:
        self.replace("statement", node, "pass")

    def visit_Expr(self, node: ast.Expr) -> None:
        if isinstance(node.value, ast.Constant) or _is_logging(node.value):
            return
        if isinstance(node.value, ast.Call):
            self.replace("statement", node, "pass")
        self.visit(node.value)

    def visit_Return(self, node: ast.Return) -> None:
        if node.value is None or _is_none(node.value):
            return
        if not _is_false(node.value):
            self.replace("return", node.value, "None")
        self.visit(node.value)

    def visit_If(self, node: ast.If) -> None:
        if "TYPE_CHECKING" in ast.unparse(node.test):
            return
        self.negate(node.test)
        self.generic_visit(node)

    def visit_While(self, node: ast.While) -> None:
        if not isinstance(node.test, ast.Constant):
            self.negate(node.test)
            self.visit(node.test)
        for statement in [*node.body, *node.orelse]:
            self.visit(statement)

    # Expressions

    def visit_JoinedStr(self, node: ast.JoinedStr) -> None:
        pass

    def visit_keyword(self, node: ast.keyword) -> None:
        if node.arg not in UNMUTATED_KEYWORDS:
            self.visit(node.value)

    def visit_Lambda(self, node: ast.Lambda) -> None:
        self.visit(node.body)

    def visit_IfExp(self, node: ast.IfExp) -> None:
        self.negate(node.test)
        self.generic_visit(node)

    def visit_comprehension(self, node: ast.comprehension) -> None:
        for condition in node.ifs:
            self.negate(condition)
        self.generic_visit(node)

    def visit_Compare(self, node: ast.Compare) -> None:
        operands = [node.left, *node.comparators]
        for left, operator, right in zip(operands, node.ops, node.comparators, strict=False):
            found = COMPARISON.search(self.text(self.span(left)[1], self.span(right)[0]))
            assert found is not None
            for new in COMPARISONS[type(operator)]:
                self.between("compare", left, right, found[0], new)
        self.generic_visit(node)

    def visit_BoolOp(self, node: ast.BoolOp) -> None:
        old, new = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
        for left, right in zip(node.values, node.values[1:], strict=False):
            self.between("logic", left, right, old, new)
        self.generic_visit(node)

    def visit_BinOp(self, node: ast.BinOp) -> None:
        is_type = isinstance(node.op, ast.BitOr) and not self.function
        if type(node.op) in OPERATORS and not is_type:
            self.between("arithmetic", node.left, node.right, *OPERATORS[type(node.op)])
        self.generic_visit(node)

    def visit_UnaryOp(self, node: ast.UnaryOp) -> None:
        if isinstance(node.op, ast.Not | ast.USub | ast.Invert):
            kind = "negate" if isinstance(node.op, ast.Not) else "arithmetic"
            self.replace(kind, node, f"({self.text(*self.span(node.operand))})")
        self.generic_visit(node)

    def visit_Constant(self, node: ast.Constant) -> None:
        value = node.value
        if isinstance(value, bool):
            self.replace("constant", node, str(not value))
        elif isinstance(value, int):
            self.replace("constant", node, str(value + 1))
            if value > 0:
                self.replace("constant", node, str(value - 1))
        elif isinstance(value, float):
            self.replace("constant", node, repr(value * 2 if value else 1.0))


def _is_stored(node: ast.AST) -> TypeGuard[ast.Name]:
    return isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)


def _is_logging(node: ast.expr) -> bool:
    while isinstance(node, ast.Call | ast.Attribute):
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in LOGGERS


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _is_false(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is False


def mutants_of(file: str, source: bytes) -> list[Mutant]:
    """Every mutant of a file that still compiles, in the order of the source."""
    finder = _Finder(file, source)
    finder.visit(ast.parse(source))
    found = sorted(set(finder.found), key=lambda each: (each.start, each.end, each.after))
    return [each for each in found if _compiles(each.apply(source))]


def _compiles(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec")
    except (SyntaxError, ValueError):
        return False
    return True


def all_mutants(root: Path, folders: Sequence[str]) -> list[Mutant]:
    """The mutants of every module in some folders, or of modules named themselves."""
    found = []
    for folder in folders:
        at = root / folder
        for path in [at] if at.is_file() else sorted(at.rglob("*.py")):
            found += mutants_of(str(path.relative_to(root)), path.read_bytes())
    return found


def tests_of(root: Path, file: str) -> tuple[str, ...]:
    """The test files for a module, in the order in which they run."""
    module = file.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    texts = {
        path: path.read_text("utf-8")
        for path in sorted((root / "tests").rglob("test_*.py"))
        if not path.stem.startswith(LEFT_OUT)
    }
    package = module.rpartition(".")[0]
    named = [re.compile(rf"\b{re.escape(name)}\b") for name in (module, package)]
    found = (path for name in named for path, text in texts.items() if name.search(text))
    files = [str(path.relative_to(root)) for path in dict.fromkeys(found)]
    assert files, f"no tests for {file}: none names its package"
    return tuple(files)


@dataclass(frozen=True, slots=True)
class Outcome:
    """The tests' verdict on a mutant.

    Attributes:
        killed_by: the first test that failed, "timeout", or "" if none did.
        seconds: wall time.
    """

    killed_by: str
    seconds: float


def copied_tree(root: Path, to: Path) -> Path:
    """A copy of the tree without what git ignores; links stay links."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=root,
        capture_output=True,
        check=True,
    ).stdout.decode()
    for name in listed.split("\0"):
        source, target = root / name, to / name
        if name and (source.is_symlink() or source.is_file()):
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)
    return to


class TestServer:
    """A process per tree that forks for every run of its tests; see `scripts/mutate_server.py`."""

    __test__ = False  # not a class of tests, whatever its name

    def __init__(self, tree: Path) -> None:
        self.tree = tree
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts/mutate_server.py")],
            cwd=tree,
            env=os.environ
            | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
            | {"ARBOR_NATIVE_FILE": str(native.FILE)},  # git ignores it
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def run(self, files: Sequence[str], limit_s: float = MUTANT_LIMIT_S) -> Outcome:
        """Run test files until one test fails."""
        assert self._process.stdin is not None and self._process.stdout is not None
        options = ["-x", "-q", "-p", "no:cacheprovider", f"--timeout={TEST_LIMIT_S}"]
        # the server has imported some of pytest's plugins already, with what it preloads
        options += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]
        request = {
            "tree": str(self.tree),
            "arguments": [*options, "--tb=no", "-rfE", *files],
            "environment": {"HYPOTHESIS_PROFILE": "mutants"},
            "limit_s": limit_s,
        }
        began = time.perf_counter()
        print(json.dumps(request), file=self._process.stdin, flush=True)
        done = json.loads(self._process.stdout.readline())
        code, output = done["code"], done["output"]
        seconds = time.perf_counter() - began
        if code is None:
            return Outcome("timeout", seconds)
        if code == 0:
            return Outcome("", seconds)
        # 1: a test failed; 2, 3: an import or pytest itself did; 4, 5: this script is at fault
        assert code in (1, 2, 3) or code < 0, output
        failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
        return Outcome(failed[1] if failed else f"exit code {code}", seconds)

    def close(self) -> None:
        self._process.communicate()  # closes the pipes, which ends the process


def judged(
    servers: Sequence[TestServer], mutants: Sequence[Mutant]
) -> Iterator[tuple[Mutant, Outcome]]:
    """Apply each mutant to a copied tree, run its tests, restore the file; a thread per server."""
    idle: SimpleQueue[TestServer] = SimpleQueue()
    for server in servers:
        idle.put(server)

    def judge(mutant: Mutant) -> tuple[Mutant, Outcome]:
        server = idle.get()
        path = server.tree / mutant.file
        source = path.read_bytes()
        path.write_bytes(mutant.apply(source))
        try:
            return mutant, server.run(tests_of(server.tree, mutant.file))
        finally:
            path.write_bytes(source)
            idle.put(server)

    with ThreadPoolExecutor(len(servers)) as pool:
        yield from pool.map(judge, mutants)


def summary(outcomes: Sequence[Outcome]) -> str:
    """The share of mutants killed, with its exact 95 % interval."""
    killed = sum(bool(each.killed_by) for each in outcomes)
    low, high = clopper_pearson(killed, len(outcomes))
    return (
        f"{killed} of {len(outcomes)} mutants killed: {killed / len(outcomes):.1%} "
        f"[{low:.1%}, {high:.1%}], {sum(each.seconds for each in outcomes):.0f} s"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--n", type=int, default=100, help="mutants, sampled (default: 100)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument(
        "--folder", nargs="+", default=FOLDERS, help="folders or modules of the package"
    )
    parser.add_argument("--workers", type=int, default=1, help="mutants tested at once")
    parser.add_argument("--csv", type=Path, help="write a row per mutant")
    parser.add_argument("--list", action="store_true", help="print the sample, run nothing")
    given = parser.parse_args()
    every = all_mutants(ROOT, given.folder)
    drawn = random.Random(given.seed).sample(range(len(every)), min(given.n, len(every)))
    sample = [every[index] for index in sorted(drawn)]
    print(f"{len(sample)} of {len(every)} mutants, seed {given.seed}", flush=True)
    if given.list:
        for mutant in sample:
            print(f"{mutant.file}:{mutant.line} {mutant.kind}: {mutant.change}")
        return
    with tempfile.TemporaryDirectory() as scratch:
        servers = [
            TestServer(copied_tree(ROOT, Path(scratch, str(k)))) for k in range(given.workers)
        ]
        needed = list(dict.fromkeys(file for each in sample for file in tests_of(ROOT, each.file)))
        unchanged = servers[0].run(needed, limit_s=max(4, len(needed)) * MUTANT_LIMIT_S)
        assert not unchanged.killed_by, f"fails without a mutant: {unchanged.killed_by}"
        print(f"{len(needed)} test files pass unchanged, {unchanged.seconds:.0f} s", flush=True)
        rows = []
        for mutant, outcome in judged(servers, sample):
            rows.append((mutant, outcome))
            verdict = f"killed by {outcome.killed_by}" if outcome.killed_by else "SURVIVED"
            print(
                f"{mutant.file}:{mutant.line} {mutant.kind}: {mutant.change}: "
                f"{verdict}, {outcome.seconds:.0f} s",
                flush=True,
            )
            if given.csv:
                _write(given.csv, rows)
        for server in servers:
            server.close()
    print(summary([outcome for _, outcome in rows]))


def _write(path: Path, rows: Sequence[tuple[Mutant, Outcome]]) -> None:
    with path.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file)
        table.writerow(("file", "line", "kind", "change", "killed_by", "seconds"))
        for mutant, outcome in rows:
            table.writerow(
                (
                    *(mutant.file, mutant.line, mutant.kind, mutant.change),
                    *(outcome.killed_by, f"{outcome.seconds:.1f}"),
                )
            )


if __name__ == "__main__":
    main()
