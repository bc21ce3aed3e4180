"""Imports go down only; the lower floors import no torch; every module has a docstring."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TypeGuard

import pytest

from arbor.feature import GROUPS

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "arbor"

# Bottom first. A unit is a module or a folder of arbor; it may import itself and lower floors.
FLOORS: tuple[tuple[str, ...], ...] = (
    ("_version", "errors"),
    ("feature",),
    ("registry", "support"),
    ("components",),
    ("aggregate", "budget", "events", "kernels", "sapling", "tasks", "tree"),
    ("forest", "metrics", "retention"),
    ("memory",),
    ("controllers", "model", "trace"),
    ("heads",),
    ("engine", "testing", "view"),
    ("verifiers",),
    ("run",),
    ("solver",),
    ("measure",),
    ("cli",),
    ("integrations", "papers"),
    ("__main__",),
)
FLOOR = {unit: number for number, units in enumerate(FLOORS) for unit in units}

# A folder of more entries is no longer read at a glance.
MOST_ROOMS = 32

# Narrower than the floors: a controller sees the tree and nothing of the machine.
ONLY = {"controllers": {"controllers", "errors", "tree"}}

# Functions of torch whose tensors have its default dtype where none is given.
MAKERS = tuple(
    f"torch.{name}"
    for name in ["empty", "eye", "full", "linspace", "ones", "rand", "randn", "zeros"]
)

# The modules and folders that may import torch, directly or through others.
TORCH = (
    "__main__",
    "engine",
    "heads.attention",
    "heads.sets",
    "heads.table",
    "integrations.inspect_ai.model",
    "integrations.kvpress.press",
    "integrations.lm_eval.model",
    "integrations.training.grpo",
    "kernels",
    "measure.replay",
    "memory",
    "model.attention",
    "model.describe",
    "model.fetch_probe",
    "model.fuse",
    "model.gguf.weights",
    "model.graphs",
    "model.int8_weights",
    "model.kv_identity",
    "model.layers",
    "model.measurement_file",
    "model.new_weights",
    "model.parallel.followers",
    "model.parallel.layers",
    "model.parallel.orders",
    "model.parallel.ranks",
    "model.plan",
    "model.ready",
    "model.rotation",
    "model.runner",
    "model.scoring",
    "model.sharing",
    "model.streaming",
    "model.threads",
    "model.weights",
    "papers.arborkv.calibrate",
    "papers.lazyeviction.calibrate",
    "papers.related.calibrate_queries",
    "papers.rksc.calibration",
    "papers.rksc.exit_watch",
    "papers.rksc.kv_probe",
    "papers.rksc.similar_prompts",
    "run.expansions",
    "run.session",
    "run.verification",
    "verifiers.reward.engine",
    "verifiers.reward.mirror",
)

# Packages outside the standard library that each unit, or folder of a group, may import; others
# may import none.
PACKAGES = {
    "cli": {"click", "huggingface_hub", "rich", "torch"},
    "controllers": {"numpy", "scipy"},
    "engine": {"numpy", "torch", "xgrammar"},
    "forest": {"numpy"},
    "heads": {"numpy", "torch"},
    "kernels": {"flashinfer", "gguf", "numpy", "torch", "triton"},
    "integrations.inspect_ai": {"anyio", "inspect_ai"},
    "integrations.kvpress": {"torch"},
    "integrations.lm_eval": {"lm_eval"},
    "integrations.ray": {"ray"},
    "integrations.training": {"torch", "trl"},
    "integrations.server": {
        "click",
        "fastapi",
        "prometheus_client",
        "pydantic",
        "starlette",
        "uvicorn",
    },
    "measure": {"datasets", "numpy", "pyarrow", "scipy", "torch"},
    "memory": {"numpy", "torch"},
    "model": {
        "accelerate",
        "gguf",
        "huggingface_hub",
        "numpy",
        "peft",
        "safetensors",
        "tokenizers",
        "torch",
        "transformers",
    },
    "papers": {"click", "numpy", "torch"},
    "retention": {"numpy", "torch"},
    "run": {"networkx", "numpy", "pandas", "rich", "torch"},
    "sapling": {"numpy", "safetensors", "tokenizers", "torch", "transformers"},
    "solver": {"torch"},
    "support": {"numpy"},
    "tasks": {"math_verify", "sympy"},
    "testing": {"numpy", "torch"},
    "tree": {"numpy"},
    "verifiers": {"numpy", "torch"},
    "view": {"rich"},
}


def sources() -> list[Path]:
    """Every Python file of the package, as a path below ``arbor/``; linked folders included."""
    found = []
    for entry in sorted(PACKAGE.iterdir()):
        if entry.is_dir():
            found.extend(sorted(entry.rglob("*.py")))
        elif entry.suffix == ".py":
            found.append(entry)
    return [path for path in found if "__pycache__" not in path.parts]


SOURCES = sources()


def name_of(path: Path) -> str:
    """``arbor/trace/read.py`` -> ``arbor.trace.read``; a package is named by its folder."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def unit_of(module: str) -> str:
    """``arbor.trace.read`` -> ``trace``; empty for ``arbor`` itself."""
    return module.split(".")[1] if "." in module else ""


def house_of(module: str) -> str:
    """What is taken out whole: ``arbor.papers.tova.scorer`` -> ``papers.tova``; else the unit."""
    unit, _, rest = module.removeprefix("arbor").removeprefix(".").partition(".")
    return f"{unit}.{rest.partition('.')[0]}" if unit in GROUPS and rest else unit


def is_in_group(module: str) -> bool:
    """Whether a module of arbor is in a folder of a group, or what such a folder holds."""
    return module.startswith(tuple(f"arbor.{group}." for group in GROUPS))


def is_taken_out(name: str) -> bool:
    """Whether a name of a list below is in a folder of a group that is not there."""
    house = PACKAGE.joinpath(*house_of(f"arbor.{name}").split("."))
    return is_in_group(f"arbor.{name}") and not house.is_dir()


def imports_torch(module: str) -> bool:
    """Whether ``arbor.model.runner`` or a folder it lies in is listed in `TORCH`."""
    return any(f"{module}.".startswith(f"arbor.{listed}.") for listed in TORCH)


def label(path: Path) -> str:
    return str(path.relative_to(ROOT))


def is_typing_block(node: ast.AST) -> TypeGuard[ast.If]:
    return isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)


parsed = cache(ast.parse)


def imports(tree: ast.AST, typing: bool) -> Iterator[ast.Import | ast.ImportFrom]:
    """Import statements at any depth; those for type checkers with `typing` only."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.expr):
            continue  # of which no part is a statement
        if isinstance(node, ast.Import | ast.ImportFrom):
            yield node
        elif is_typing_block(node) and not typing:
            for other in node.orelse:
                yield from imports(ast.Module([other], []), typing)
        else:
            yield from imports(node, typing)


def imported(path: Path, text: str, typing: bool = False) -> Iterator[tuple[int, str]]:
    """(line, absolute dotted name) of each import of a file at run time, or of any import."""
    module = name_of(path)
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in imports(parsed(text), typing):
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield node.lineno, alias.name
            continue
        base = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        origin = ".".join([*base, *([node.module] if node.module else [])])
        for alias in node.names:
            yield node.lineno, f"{origin}.{alias.name}"


def taken_from_arbor(text: str) -> set[str]:
    """Names that a module takes from ``arbor`` itself, as in ``arbor.Solver``."""
    return {
        node.attr
        for node in ast.walk(parsed(text))
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "arbor"
    }


def violations(path: Path, text: str) -> list[str]:
    """Imports of a file that its floor does not allow, one sentence each."""
    module = name_of(path)
    unit, house = unit_of(module), house_of(module)
    wrong = [
        f"{label(path)}:{line} imports {name}, whose folder may be taken out"
        for line, name in imported(path, text, typing=True)
        if is_in_group(name) and house_of(name) != house
    ]
    for line, name in imported(path, text):
        top = name.split(".")[0]
        if name == "arbor":
            if taken_from_arbor(text) - {"__version__"}:
                wrong.append(f"{label(path)}:{line} imports all of arbor for more than its version")
        elif top == "arbor":
            target = unit_of(name)
            if target in ("__version__", unit) or is_in_group(name):
                continue
            if unit in GROUPS and path.name == "__init__.py" and target != "feature":
                wrong.append(f"{label(path)}:{line} imports {name} wherever arbor is imported")
            elif target not in FLOOR:
                wrong.append(f"{label(path)}:{line} imports {name}, which has no floor")
            elif unit in ONLY and target not in ONLY[unit]:
                wrong.append(f"{label(path)}:{line} imports {name}; {unit} may not")
            elif unit and FLOOR[target] >= FLOOR[unit]:
                wrong.append(
                    f"{label(path)}:{line} imports {name}: floor {FLOOR[unit]} ({unit}) "
                    f"reaches up to floor {FLOOR[target]} ({target})"
                )
            elif not unit and target != "_version":
                wrong.append(f"{label(path)}:{line} imports {name}; public names load lazily")
        elif top not in sys.stdlib_module_names and top not in PACKAGES.get(
            house, PACKAGES.get(unit, set())
        ):
            wrong.append(f"{label(path)}:{line} imports {name}; {house or 'arbor'} may not need it")
    return wrong


def rooms() -> set[str]:
    """The modules and folders of ``arbor/``; not the package's own ``__init__.py`` and
    ``py.typed``."""
    entries = [path for path in PACKAGE.iterdir() if path.is_dir() or path.suffix == ".py"]
    return {path.stem for path in entries} - {"__init__", "__pycache__"}


def test_every_room_has_a_floor() -> None:
    missing = sorted(rooms() - set(FLOOR))
    gone = sorted(set(FLOOR) - rooms())

    assert not missing, f"add to FLOORS: {missing}"
    assert not gone, f"remove from FLOORS: {gone}"


def test_the_package_is_read_at_a_glance() -> None:
    assert len(rooms()) <= MOST_ROOMS, sorted(rooms())


def test_every_listed_importer_of_torch_exists() -> None:
    modules = {name_of(path).removeprefix("arbor.") for path in SOURCES}
    known = rooms() | modules
    gone = [name for name in TORCH if name not in known and not is_taken_out(name)]

    assert not gone, f"remove from TORCH: {gone}"


def test_imports_go_down_only() -> None:
    wrong = [each for path in SOURCES for each in violations(path, path.read_text("utf-8"))]

    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize(
    ("where", "text"),
    [
        ("tree.py", "import arbor.run.session"),
        ("tree.py", "def f():\n    from arbor import solver"),
        ("trace/read.py", "from ..engine import Engine"),
        ("controllers/beam.py", "from arbor.memory import KVMemory"),
        ("events.py", "import torch"),
        ("run/session.py", "import arbor\narbor.Solver"),
        ("cli/solve.py", "from arbor.integrations.server import app"),
        ("integrations/ray/__init__.py", "from arbor.measure.cluster import Cluster"),
        ("integrations/ray/ray_cluster.py", "from arbor.integrations.server import app"),
        ("integrations/ray/ray_cluster.py", "import fastapi"),
    ],
)
def test_a_planted_upward_import_is_found(where: str, text: str) -> None:
    wrong = violations(PACKAGE / where, text)

    assert len(wrong) == 1
    assert f"arbor/{where}" in wrong[0]


def test_imports_for_the_type_checker_are_exempt() -> None:
    text = "if TYPE_CHECKING:\n    from arbor.solver import Solver"

    assert not violations(PACKAGE / "tree.py", text)
    assert violations(PACKAGE / "tree.py", text.replace("solver", "integrations.ray.ray_cluster"))


def names_in(path: Path) -> set[str]:
    """Absolute names that a file imports anywhere, for type checkers too."""
    package = name_of(path).split(".")[: None if path.name == "__init__.py" else -1]
    found = set()
    for node in imports(parsed(path.read_text(encoding="utf-8")), typing=True):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        else:
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *filter(None, [node.module])])
            found |= {module, *(f"{module}.{alias.name}" for alias in node.names)}
    return found


def test_no_imports_go_in_a_circle_even_for_the_type_checker() -> None:
    names = {name_of(path) for path in SOURCES} - {"arbor"}
    left = {name_of(path): (names_in(path) & names) - {name_of(path)} for path in SOURCES}
    while free := {name for name, needed in left.items() if not needed}:
        left = {name: needed - free for name, needed in left.items() if name not in free}

    assert not left, f"in a circle, or above one: {left}"


# packages of extras that a module imports when it is imported itself
OPTIONAL = ("inspect_ai",)


def test_the_torch_free_floors_import_no_torch() -> None:
    modules = [name_of(path) for path in SOURCES if not imports_torch(name_of(path))]
    code = (
        "import importlib, sys\n"
        f"for name in {modules!r}:\n"
        "    try:\n"
        "        importlib.import_module(name)\n"
        "    except ModuleNotFoundError as error:\n"
        f"        assert error.name in {OPTIONAL!r}, error\n"
        "    heavy = {'torch', 'transformers'} & set(sys.modules)\n"
        "    assert not heavy, f'importing {name} imports {heavy}'\n"
    )

    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)

    assert done.returncode == 0, done.stderr


def test_every_module_has_a_docstring() -> None:
    for path in SOURCES:
        text = path.read_text(encoding="utf-8")
        assert ast.get_docstring(parsed(text)) or (
            path.name == "__init__.py" and not text.strip()
        ), f"{label(path)} has no docstring"


def test_tensors_are_made_in_a_named_dtype() -> None:
    """A program may change torch's default, and transformers does while it loads a model."""
    calls = (
        (path, node)
        for path in SOURCES
        for node in ast.walk(parsed(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in MAKERS
    )
    unnamed = [
        f"{label(path)}: {ast.unparse(node)}"
        for path, node in calls
        if not {each.arg for each in node.keywords} & {"dtype", None}  # None: **settings
    ]

    assert not unnamed


def exported(tree: ast.Module) -> list[str] | None:
    """The names in a module's ``__all__``, if it has one."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            names: list[str] = ast.literal_eval(node.value)
            return names
    return None


def defined(tree: ast.Module) -> set[str]:
    """Names a module binds at its top level, those imported for the type checker included."""
    names: set[str] = set()
    for node in [*tree.body, *(inner for n in tree.body if is_typing_block(n) for inner in n.body)]:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            names |= {(alias.asname or alias.name).split(".")[0] for alias in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {target.id for target in targets if isinstance(target, ast.Name)}
    return names


def test_all_is_sorted_and_complete() -> None:
    for path in SOURCES:
        tree = parsed(path.read_text(encoding="utf-8"))
        names, own = exported(tree), defined(tree)
        if names is None:
            continue
        kinds = [(0 if n.isupper() else 1 if n[0].isupper() else 2, n) for n in names]
        assert kinds == sorted(set(kinds)), f"{label(path)}: __all__ is not sorted"
        assert set(names) <= own, f"{label(path)}: no {sorted(set(names) - own)}"
        if path.name == "__init__.py":
            loose = {"TYPE_CHECKING", "Any", "annotations", *sys.stdlib_module_names}
            public = {name for name in own if not name.startswith("_")} - loose
            assert public <= set(names), f"{label(path)}: __all__ lacks {public - set(names)}"


def test_every_public_name_loads() -> None:
    import arbor

    for name in arbor.__all__:
        assert getattr(arbor, name) is not None
    assert set(arbor._HOME) | {"__version__"} == set(arbor.__all__)


def test_a_name_arbor_does_not_have_is_an_attribute_error() -> None:
    import arbor

    with pytest.raises(AttributeError, match="no attribute 'Slover'"):
        _ = arbor.Slover
