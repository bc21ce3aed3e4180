"""Names of components, for the command line and trace headers, and the classes they stand for.

A name stands for a class, or for a ready component, and is imported by its dotted path when it is
first asked for. Other distributions add names through entry points in the groups
``arbor.controllers``, ``arbor.verifiers``, ``arbor.aggregates``, ``arbor.tasks``,
``arbor.policies``, ``arbor.allocators``, ``arbor.scorers`` and ``arbor.backends``:

    [project.entry-points."arbor.controllers"]
    mine = "package.module:Mine"

    [project.entry-points."arbor.policies"]
    deepest = "package.module:DEEPEST"

Within one program a call is enough, above a class as a decorator:

    register.policy("deepest", Policy(Deepest()))

    @register.controller("mine")
    class Mine: ...

A name that clashes with an earlier one (built-in names first, then by distribution name) is reached
as ``distribution/mine``; a component without a name as ``package.module:Mine``, or by its file as
``folder/mine.py:Mine``. Modules of the working directory, and next to that file, are found too.
``ARBOR_PLUGINS=off`` hides all plugins, and ``ARBOR_PLUGINS=mine,other`` all but these.
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import importlib.util
import inspect
import operator
import os
import re
import reprlib
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar, overload

from arbor.errors import UnknownName, UsageError
from arbor.feature import Feature, features

_CORE: Mapping[str, Mapping[str, str]] = {
    "controller": {
        "ab-mcts": "arbor.controllers.ab_mcts:ABMCTS",
        "beam": "arbor.controllers.beam:Beam",
        "best-first": "arbor.controllers.best_first:BestFirst",
        "best-of-n": "arbor.controllers.chain:BEST_OF_N",
        "chain": "arbor.controllers.chain:Chain",
        "dpts": "arbor.controllers.dpts:DPTS",
        "dvts": "arbor.controllers.dvts:DVTS",
        "eptree": "arbor.controllers.eptree:EPTree",
        "ets": "arbor.controllers.ets:ETS",
        "mcts": "arbor.controllers.mcts:MCTS",
        "rap": "arbor.controllers.mcts:VARIANTS.rap",
        "rebase": "arbor.controllers.rebase:Rebase",
        "rest-mcts": "arbor.controllers.mcts:VARIANTS.rest-mcts",
        "rstar": "arbor.controllers.mcts:VARIANTS.rstar",
        "tot": "arbor.controllers.tot:ToT",
    },
    "verifier": {
        "combined": "arbor.verifiers.combined:Combined",
        "exact": "arbor.verifiers.exact:Exact",
        "orm": "arbor.verifiers.reward_model:OutcomeRewardModel",
        "prm": "arbor.verifiers.reward_model:ProcessRewardModel",
        "self": "arbor.verifiers.self_eval:SelfEval",
        "vote": "arbor.verifiers.vote:Vote",
    },
    "aggregate": {
        "argmax": "arbor.aggregate.argmax:Argmax",
        "best": "arbor.aggregate.best:Best",
        "majority": "arbor.aggregate.majority:Majority",
        "weighted": "arbor.aggregate.weighted:Weighted",
    },
    "task": {
        "aime": "arbor.tasks.reasoning:AIME",
        "arc": "arbor.tasks.arc:ARC",
        "chains": "arbor.tasks.chains:Chains",
        "countdown": "arbor.tasks.countdown:Countdown",
        "crosswords": "arbor.tasks.crosswords:Crosswords",
        "game24": "arbor.tasks.game24:Game24",
        "gsm8k": "arbor.tasks.reasoning:GSM8K",
        "math": "arbor.tasks.reasoning:Math",
        "reasoning": "arbor.tasks.reasoning:Reasoning",
        "recall": "arbor.tasks.recall:Recall",
    },
    "policy": {
        name: f"arbor.retention.policy:POLICIES.{name}"
        for name in (
            "belady",
            "ends",
            "full",
            "h2o",
            "lru",
            "random",
            "reentry",
            "snapkv",
            "streaming",
            "uniform",
        )
    },
    "allocator": {
        "belady": "arbor.retention.allocators.by_block:Belady",
        "ends": "arbor.retention.allocators.by_block:Ends",
        "full": "arbor.retention.allocators.by_block:Full",
        "lru": "arbor.retention.allocators.by_block:LRU",
        "pooled": "arbor.retention.allocators.pooled:Pooled",
        "reentry": "arbor.retention.allocators.by_block:Reentry",
        "uniform": "arbor.retention.allocators.by_block:Uniform",
    },
    "scorer": {
        "heavy": "arbor.retention.scorers:HeavyHitters",
        "random": "arbor.retention.scorers:RandomTokens",
        "recency": "arbor.retention.scorers:Recency",
        "tova": "arbor.retention.scorers:TOVA",
        "window": "arbor.retention.scorers:Window",
    },
    "backend": {
        "rowwise": "arbor.kernels.attention.rowwise:RowwiseAttention",
        "invariant": "arbor.kernels.attention.invariant_cascade:InvariantCascade",
        "native": "arbor.kernels.attention.native_cascade:NativeCascade",
        "torch": "arbor.kernels.attention.torch_cascade:TorchCascade",
        "triton": "arbor.kernels.attention.triton_tree:TritonTree",
    },
}

# other things that are asked for by kind and name
_CORE_PARTS: Mapping[str, Mapping[str, str]] = {
    "cluster": {},
    "format": {"perfetto": "arbor.trace.perfetto:to_perfetto"},
}


def _with_features(
    core: Mapping[str, Mapping[str, str]],
    added: Callable[[Feature], Mapping[str, Mapping[str, str]]],
) -> Mapping[str, Mapping[str, str]]:
    """Paths by kind and name, those of folders included."""
    return {
        kind: functools.reduce(
            operator.or_, (dict(added(each).get(kind, {})) for each in features()), dict(named)
        )
        for kind, named in core.items()
    }


BUILTIN = _with_features(_CORE, lambda each: each.names)
PARTS = _with_features(_CORE_PARTS, lambda each: each.parts)

FILE = ".py"
_FILE_NAMED = re.compile(r"[^\s=,;\"'\[\]{}][^=,;\"'\[\]{}]*\.py(?=:)")
_NAME = re.compile(r"[^\s,:=]+")  # what else has a meaning where a component is named
KINDS = tuple(BUILTIN)

# earlier names that traces still hold, and today's
RENAMED: Mapping[tuple[str, str], str] = {("scorer", "chance"): "random"}

# packages whose classes are made into components, and what does so
ADAPTERS: Mapping[str, str] = {
    package: path for each in features() for package, path in each.adapters.items()
}
# those whose classes are components of no kind unless the folder of this name adapts them, and how
# they are installed
NEED_ADAPTERS: Mapping[str, str] = {
    "kvpress": "pip install --no-deps kvpress==0.5.4 && "
    "pip install datasets requests fire cachetools pandas"
}

C = TypeVar("C")
T = TypeVar("T", bound=type[Any])


class Register:
    """Names given within a program, for every kind of `KINDS`: ``register.policy("mine", MINE)``.

    Without a component the call is a decorator: ``@register.controller("mine")`` above a class.
    """

    def __init__(self) -> None:
        self._named: dict[str, dict[str, Any]] = {kind: {} for kind in KINDS}

    def __getattr__(self, kind: str) -> Naming:
        if kind not in KINDS:
            raise AttributeError(f"unknown kind '{kind}'; kinds are {', '.join(KINDS)}")
        return Naming(kind, self._named[kind])

    def of(self, kind: str) -> Mapping[str, Any]:
        """The classes and components of a kind named so far, by name."""
        return self._named[kind]


class Naming:
    """Gives names to components of one kind."""

    def __init__(self, kind: str, named: dict[str, Any]) -> None:
        self._kind = kind
        self._named = named

    @overload
    def __call__(self, name: str) -> Callable[[T], T]: ...
    @overload
    def __call__(self, name: str, component: C) -> C: ...
    def __call__(self, name: str, component: Any = None) -> Any:
        """Name a class or a ready component, and return it; without one, a decorator that does.

        Raises:
            UsageError: the name is taken, or none that the command line can give.
        """
        if not isinstance(name, str) or not _NAME.fullmatch(name):
            raise UsageError(
                "name-taken",
                f"invalid {self._kind} name {reprlib.repr(name)}.",
                "A name is a text without spaces, commas, colons and equals signs, such as 'mine'.",
            )
        if component is None:
            return functools.partial(self, name)
        earlier = self._named.get(name)
        # running a notebook's cell again names the same thing again
        again = earlier is not None and _shape(earlier) == _shape(component)
        if not again and name in names(self._kind):
            raise UsageError(
                "name-taken",
                f"the {self._kind} name '{name}' is taken.",
                f"Choose another name, such as 'my-{name}'.",
                name=name,
            )
        self._named[name] = _named(component, name)
        return self._named[name]


def plural(kind: str) -> str:
    """``policy`` -> ``policies``; entry-point groups and ``arbor list`` go by it."""
    return f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"


def names(kind: str) -> tuple[str, ...]:
    """Names of a kind: built-in ones, then plugins', then registered ones, each sorted.

    Nothing is imported.
    """
    return (*sorted(builtin(kind)), *sorted(_plugins(kind)), *sorted(register.of(kind)))


def plugins(kind: str) -> dict[str, str]:
    """Names added by other distributions, and their dotted paths. Nothing is imported."""
    return {name: point.value for name, point in sorted(_plugins(kind).items())}


def resolve(kind: str, name: str) -> Any:
    """The class or the ready component a name stands for.

    Args:
        kind: one of `KINDS`.
        name: one of `names(kind)`, or ``package.module:Class`` or ``file.py:Class``, which imports
            that module.

    Raises:
        UnknownName: unknown name; suggests the closest match.
        UsageError: a plugin or dotted path that cannot be imported, or holds a function or module;
            or a class of `ADAPTERS` that cannot be that component.
    """
    if name in builtin(kind):
        return _load(builtin(kind)[name], name)
    if name in register.of(kind):
        return register.of(kind)[name]
    plugin = _plugins(kind).get(name)
    if plugin is None and ":" not in name:
        if (kind, name) not in RENAMED:
            raise unknown(kind, name)
        return resolve(kind, RENAMED[kind, name])
    path = name if plugin is None else plugin.value
    try:
        found = _load(path, name)
    except Exception as error:
        reason, hint = f"{type(error).__name__}: {error}", ""
        package = path.partition(":")[0].partition(".")[0]
        if isinstance(error, ModuleNotFoundError) and package in NEED_ADAPTERS:
            hint = NEED_ADAPTERS[package]
        elif plugin is not None:
            hint = "ARBOR_PLUGINS=off hides plugins."
        elif isinstance(error, FileNotFoundError) and not Path(_split(path)[0]).exists():
            reason, hint = (
                f"{_split(path)[0]}: no such file",
                f"It was looked for from {Path.cwd()}.",
            )
        place = "" if path == name else f" ({path})"
        raise UsageError(
            f"{kind}-broken",
            f"the {kind} '{name}'{place} cannot be imported: {reason}.",
            hint,
            name=name,
            path=path,
        ) from error
    for base in getattr(found, "__mro__", ()):
        package = base.__module__.partition(".")[0]
        if adapter := ADAPTERS.get(package):
            return _load(adapter, name)(kind, found, name)
        if package in NEED_ADAPTERS:
            raise UsageError(
                f"{kind}-broken",
                f"'{name}' is a class of {package}, and the folder that adapts those is not there.",
                f"Put back arbor/integrations/{package}.",
                name=name,
            )
    if inspect.isroutine(found) or inspect.ismodule(found):
        raise UsageError(
            f"{kind}-broken",
            f"the {kind} '{name}' ({path}) is neither a class nor a ready component.",
            "",
            name=name,
            path=path,
        )
    return found


def part(kind: str, name: str) -> Any:
    """What stands under a name of `PARTS`.

    Raises:
        UnknownName: no folder of `arbor.integrations` that is there adds it.
    """
    if name not in PARTS[kind]:
        raise UnknownName(kind, name, PARTS[kind], "folders of arbor/integrations add others")
    return _load(PARTS[kind][name], name)


def unknown(kind: str, name: str, more: Iterable[str] = ()) -> UnknownName:
    """The error for an unknown name: lists all names, and those added by plugins.

    Args:
        kind: one of `KINDS`.
        name: what was asked.
        more: names valid there though they stand for no component.
    """
    allowed = _allowed()
    note = f"plugins loaded: {', '.join(plugins(kind)) or 'none'}"
    if allowed:
        note += f"; ARBOR_PLUGINS={allowed}"
    if name.endswith(FILE):
        note = f"what a file holds goes by both names, as in {name}:NAME"
    return UnknownName(kind, name, {*more, *names(kind)}, note)


def name_of(component: Any) -> str:
    """The name of a class or ready component; its dotted path without one. Imports nothing."""
    if not isinstance(component, type):
        return getattr(component, "registered_as", "") or name_of(type(component))
    path = _path_of(component)
    for kind in KINDS:
        for name, own in register.of(kind).items():
            if own is component:
                return name
        for name, known in BUILTIN[kind].items():
            if known == path:
                return name
        for name, point in _plugins(kind).items():
            module, attribute = _split(point.value)
            loaded = sys.modules.get(module)
            if point.value == path or (loaded and getattr(loaded, attribute, None) is component):
                return name
    return path


def builtin(kind: str) -> Mapping[str, str]:
    """Built-in names of a kind, and their dotted paths.

    Raises:
        UnknownName: unknown kind.
    """
    table = BUILTIN.get(kind)
    if table is None:
        raise UnknownName("kind", kind, KINDS)
    return table


def _plugins(kind: str) -> Mapping[str, metadata.EntryPoint]:
    return _installed(kind, _allowed())


def _allowed() -> str:
    return os.environ.get("ARBOR_PLUGINS", "").strip()


@functools.cache
def _installed(kind: str, allowed: str) -> Mapping[str, metadata.EntryPoint]:
    """Plugins by name, from their distributions' metadata; warns once of each malformed entry."""
    if allowed.lower() == "off":
        return {}
    wanted = [word.strip() for word in allowed.split(",") if word.strip()]
    found: dict[str, metadata.EntryPoint] = {}
    points = sorted(
        _entry_points(tuple(sys.path)).select(group=f"arbor.{plural(kind)}"),
        key=lambda p: (_distribution(p), p.name, p.value),
    )
    for point in points:
        full = f"{_distribution(point)}/{point.name}"
        if wanted and point.name not in wanted and full not in wanted:
            continue
        if not all(_split(point.value)):
            warnings.warn(
                f"arbor: the {kind} plugin '{full}' is left out: "
                f"'{point.value}' is not package.module:Class.",
                RuntimeWarning,
                stacklevel=4,
            )
            continue
        clash = point.name in found or point.name in BUILTIN[kind]
        found.setdefault(full if clash else point.name, point)
    return found


@functools.lru_cache(maxsize=1)
def _entry_points(path: tuple[str, ...]) -> Any:
    """Entry points of all distributions on `path`, which is ``sys.path``; read once for all kinds.

    The class depends on the version of Python; each has ``select(group=…)``.
    """
    return metadata.entry_points()


def _distribution(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""


def _load(path: str, name: str) -> Any:
    """What a dotted path holds: attributes, and the entries of a mapping."""
    module, attributes = _split(path)
    found = _module(module)
    for attribute in attributes.split("."):
        found = found[attribute] if isinstance(found, Mapping) else getattr(found, attribute)
    return _named(found, name)


def _module(name: str) -> Any:
    """A module by its dotted name or its file; the working directory is looked through last."""
    if not name.endswith(FILE):
        top = name.partition(".")[0]
        own = Path(top).is_dir() or Path(f"{top}{FILE}").is_file()
        if own and top not in sys.modules:
            _look_in(Path.cwd())
        return importlib.import_module(name)
    return importlib.import_module(str(Path(name).expanduser().resolve(strict=True)))


class _ModulesByFile(MetaPathFinder):
    """Finds a module whose name is the absolute path of its file, so that pickle does too.

    What is before a dot in such a name is taken for a package, which is empty.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = Path(fullname)
        if not file.is_absolute():
            return None
        if not fullname.endswith(FILE):
            return ModuleSpec(fullname, None, is_package=True)
        _look_in(file.parent)  # a file imports what lies next to it
        return importlib.util.spec_from_file_location(fullname, file)


def _look_in(folder: Path) -> None:
    """Let modules of a folder be found, after all that is installed."""
    if folder not in map(Path, sys.path):
        sys.path.append(str(folder))


def _split(path: str) -> tuple[str, str]:
    """Module and attribute of a dotted path, without extras as in ``module:Class [extra]``."""
    file, ends, rest = path.partition(f"{FILE}:")
    module, _, attribute = (f"{file}{FILE}", "", rest) if ends else path.partition(":")
    return module.strip(), attribute.partition("[")[0].strip()


def from_root(text: str) -> str:
    """A text that names components, as ``policy=mine.py:Mine``, with their files from the root."""

    def whole(found: re.Match[str]) -> str:
        file = Path(found[0]).expanduser()
        return str(file.resolve()) if file.is_file() else found[0]

    return _FILE_NAMED.sub(whole, text)


def _named(component: Any, name: str) -> Any:
    """A ready component with its name in the field `registered_as`, if its class has that field.

    A file is named from the root, as the one of a class is.
    """
    module, attribute = _split(name)
    if module.endswith(FILE):
        name = f"{Path(module).expanduser().resolve()}:{attribute}"
    if isinstance(component, type) or getattr(component, "registered_as", name) == name:
        return component
    return dataclasses.replace(component, registered_as=name)


def _path_of(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def _shape(component: Any) -> tuple[str, ...]:
    """The path of a class; of a ready component, the paths of its class and its parts' classes."""
    if isinstance(component, type):
        return (_path_of(component),)
    parts = dataclasses.fields(component) if dataclasses.is_dataclass(component) else ()
    values = (component, *(getattr(component, part.name) for part in parts))
    return ("a ready component", *(_path_of(type(value)) for value in values))


register = Register()
sys.meta_path.append(_ModulesByFile())
