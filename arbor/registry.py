"""Names for the command line and the trace header, and the classes they stand for.

Every class is named by its dotted path and imported when it is first asked for. Other distributions add names through
entry points in the groups ``arbor.controllers``, ``arbor.verifiers``, ``arbor.tasks``, ``arbor.policies``,
``arbor.allocators``, ``arbor.scorers`` and ``arbor.backends``:

    [project.entry-points."arbor.controllers"]
    mine = "package.module:Mine"

In one's own program a decorator is enough:

    @register.controller("mine")
    class Mine: ...

A name that clashes with an earlier one (ours first, then by distribution name) is still reached as ``distribution/mine``.
A class without a name is reached as ``package.module:Mine``. ``ARBOR_PLUGINS=off`` hides all plugins, and
``ARBOR_PLUGINS=mine,other`` all but these.
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from importlib import metadata
from typing import Any, TypeVar

from arbor.errors import UnknownName, UsageError

BUILTIN: Mapping[str, Mapping[str, str]] = {
    "controller": {
        "beam": "arbor.controllers.beam:Beam",
        "chain": "arbor.controllers.chain:Chain",
        "tot": "arbor.controllers.tot:ToT",
    },
    "verifier": {
        "exact": "arbor.verifiers.exact:Exact",
        "self": "arbor.verifiers.self_eval:SelfEval",
    },
    "task": {
        "chains": "arbor.tasks.chains:Chains",
        "countdown": "arbor.tasks.countdown:Countdown",
        "game24": "arbor.tasks.game24:Game24",
        "reasoning": "arbor.tasks.reasoning:Reasoning",
        "recall": "arbor.tasks.recall:Recall",
    },
    "policy": {
        "arborkv": "arbor.retention.policy:ArborKV",
        "belady": "arbor.retention.policy:BeladyPolicy",
        "full": "arbor.retention.policy:FullRetention",
        "h2o": "arbor.retention.policy:H2O",
        "kkt": "arbor.retention.policy:KKTPolicy",
        "lru": "arbor.retention.policy:LRUPolicy",
        "random": "arbor.retention.policy:RandomTokens",
        "reentry": "arbor.retention.policy:ReentryPolicy",
        "streaming": "arbor.retention.policy:StreamingLLM",
        "tova": "arbor.retention.policy:TOVAPolicy",
        "uniform": "arbor.retention.policy:UniformPolicy",
    },
    "allocator": {
        "belady": "arbor.retention.allocators.belady:Belady",
        "full": "arbor.retention.allocators.full:Full",
        "kkt": "arbor.retention.allocators.kkt:KKT",
        "lru": "arbor.retention.allocators.lru:LRU",
        "pooled": "arbor.retention.allocators.pooled:Pooled",
        "ratio": "arbor.retention.allocators.ratio:Ratio",
        "reentry": "arbor.retention.allocators.reentry:Reentry",
        "uniform": "arbor.retention.allocators.uniform:Uniform",
    },
    "scorer": {
        "chance": "arbor.retention.scorers.random_tokens:Chance",
        "heavy": "arbor.retention.scorers.heavy_hitters:HeavyHitters",
        "recency": "arbor.retention.scorers.recency:Recency",
        "tova": "arbor.retention.scorers.tova:TOVA",
    },
    "backend": {
        "reference": "arbor.kernels.reference:ReferenceAttention",
        "rowwise": "arbor.kernels.rowwise:RowwiseAttention",
        "torch": "arbor.kernels.torch_cascade:TorchCascade",
    },
}

KINDS = tuple(BUILTIN)


T = TypeVar("T", bound=type[Any])


class Register:
    """Names classes of one's own: ``@register.controller("mine")`` above one, for every kind of `KINDS`."""

    def __init__(self) -> None:
        self._named: dict[str, dict[str, type[Any]]] = {kind: {} for kind in KINDS}

    def __getattr__(self, kind: str) -> Callable[[str], Callable[[T], T]]:
        if kind not in KINDS:
            raise AttributeError(f"there is no kind '{kind}'; kinds are {', '.join(KINDS)}")
        return functools.partial(self._name, kind)

    def of(self, kind: str) -> Mapping[str, type[Any]]:
        """The classes named so far, by name."""
        return self._named.setdefault(kind, {})

    def _name(self, kind: str, name: str) -> Callable[[T], T]:
        def decorate(cls: T) -> T:
            earlier = self.of(kind).get(name)
            # running a notebook's cell again names the same class again
            again = earlier is not None and _path_of(earlier) == _path_of(cls)
            if not again and (earlier is not None or name in names(kind)):
                raise UsageError(
                    "name-taken",
                    f"there is a {kind} '{name}' already.",
                    f"Choose another name, such as 'my-{name}'.",
                    name=name,
                )
            if ":" in name or not name:
                raise UsageError(
                    "name-taken", f"'{name}' is no name for a {kind}.", "Leave out the colon."
                )
            self._named[kind][name] = cls
            return cls

        return decorate


def plural(kind: str) -> str:
    """``policy`` -> ``policies``; entry-point groups and ``arbor list`` go by it."""
    return f"{kind[:-1]}ies" if kind.endswith("y") else f"{kind}s"


def names(kind: str) -> tuple[str, ...]:
    """Every name of a kind, ours first, then plugins', then registered ones, each sorted; imports none of them."""
    return (*sorted(builtin(kind)), *sorted(_plugins(kind)), *sorted(register.of(kind)))


def plugins(kind: str) -> dict[str, str]:
    """Names that other distributions added, and the dotted paths they stand for; imports none of them."""
    return {name: point.value for name, point in sorted(_plugins(kind).items())}


def resolve(kind: str, name: str) -> type[Any]:
    """The class a name stands for.

    Args:
        kind: one of `KINDS`.
        name: one of `names(kind)`, or ``package.module:Class``, which imports that module.

    Raises:
        UnknownName: no such name; says the nearest one.
        UsageError: a plugin or a dotted path that cannot be imported, or is no class.
    """
    path = builtin(kind).get(name)
    if path is not None:
        return _load(path, kind, name)
    registered = register.of(kind).get(name)
    if registered is not None:
        return registered
    plugin = _plugins(kind).get(name)
    if plugin is not None:
        return _load(plugin.value, kind, name, plugin=True)
    if ":" in name:
        return _load(name, kind, name, plugin=True)
    raise unknown(kind, name)


def unknown(kind: str, name: str, more: Iterable[str] = ()) -> UnknownName:
    """The error for a name that no table holds: every name there is, and which of them are plugins'.

    Args:
        kind: one of `KINDS`.
        name: what was asked.
        more: names that mean something there though they stand for no class.
    """
    allowed = _allowed()
    note = f"plugins loaded: {', '.join(plugins(kind)) or 'none'}"
    if allowed:
        note += f"; ARBOR_PLUGINS={allowed}"
    return UnknownName(kind, name, {*more, *names(kind)}, note)


def name_of(cls: type[Any]) -> str:
    """The name a class goes by, found without importing anything."""
    path = _path_of(cls)
    for kind in KINDS:
        for name, own in register.of(kind).items():
            if own is cls:
                return name
        for name, known in BUILTIN[kind].items():
            if known == path:
                return name
        for name, point in _plugins(kind).items():
            module, _, attribute = point.value.partition(":")
            attribute = attribute.partition("[")[0].strip()
            loaded = sys.modules.get(module.strip())
            if point.value == path or (loaded and getattr(loaded, attribute, None) is cls):
                return name
    return path


def builtin(kind: str) -> Mapping[str, str]:
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
    """Plugins by name, read from their distributions' metadata only; one warning for each that cannot be meant."""
    if allowed.lower() == "off":
        return {}
    wanted = [word.strip() for word in allowed.split(",") if word.strip()]
    found: dict[str, metadata.EntryPoint] = {}
    points = sorted(
        metadata.entry_points(group=f"arbor.{plural(kind)}"),
        key=lambda p: (_distribution(p), p.name, p.value),
    )
    for point in points:
        full = f"{_distribution(point)}/{point.name}"
        if wanted and point.name not in wanted and full not in wanted:
            continue
        module, colon, attribute = point.value.partition(":")
        if not (module.strip() and colon and attribute.strip()):
            warnings.warn(
                f"arbor: the {kind} plugin '{full}' is left out: '{point.value}' is not package.module:Class.",
                RuntimeWarning,
                stacklevel=4,
            )
            continue
        clash = point.name in found or point.name in BUILTIN[kind]
        found.setdefault(full if clash else point.name, point)
    return found


def _distribution(point: metadata.EntryPoint) -> str:
    return point.dist.name if point.dist is not None else ""


def _load(path: str, kind: str, name: str, plugin: bool = False) -> type[Any]:
    module, _, attribute = path.partition(":")
    attribute = attribute.partition("[")[0].strip()  # extras, as in "module:Class [extra]"
    try:
        found = functools.reduce(
            getattr, attribute.split("."), importlib.import_module(module.strip())
        )
    except Exception as error:
        if not plugin:
            raise
        raise UsageError(
            f"{kind}-broken",
            f"the {kind} '{name}' ({path}) cannot be imported: {type(error).__name__}: {error}.",
            "ARBOR_PLUGINS=off hides plugins.",
            name=name,
            path=path,
        ) from error
    if not isinstance(found, type):
        raise UsageError(
            f"{kind}-broken", f"the {kind} '{name}' ({path}) is no class.", "", name=name, path=path
        )
    return found


def _path_of(cls: type[Any]) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


register = Register()
