"""Feature: what a folder of `arbor/papers` or `arbor/integrations` adds to arbor, by name.

The rest of arbor imports neither of them. It finds what they add here, and works without it where
a folder was taken out.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from arbor.errors import UsageError

GROUPS = ("papers", "integrations")


@dataclass(frozen=True)
class Feature:
    """What one folder adds; the constant ``FEATURE`` of its ``__init__.py``, which imports nothing
    else. Paths are dotted, as in ``package.module:Name``, and imported when they are first used.

    Attributes:
        names: components by kind and name, see `arbor.registry`.
        adapters: by the package whose classes are made into components, what does so.
        hooks: by the setting of `Solver` that asks for it, what takes part in the engine's work
            (`arbor.engine.hooks`).
        commands: path and purpose of each command of ``arbor``, by its name.
        calibrations: likewise those of ``arbor calibrate``.
        parts: by kind and name, what the rest asks for by both, see `arbor.registry.part`:
            a ``format`` of ``arbor trace convert``, a ``cluster`` of ``arbor eval --workers``.
        extras: by the name of an extra, what it adds, and the distributions it installs.
    """

    names: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    adapters: Mapping[str, str] = field(default_factory=dict)
    hooks: Mapping[str, str] = field(default_factory=dict)
    commands: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    calibrations: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    parts: Mapping[str, Mapping[str, str]] = field(default_factory=dict)
    extras: Mapping[str, tuple[str, tuple[str, ...]]] = field(default_factory=dict)


@functools.cache
def features() -> tuple[Feature, ...]:
    """Those of all folders that are there, in the order of their names."""
    here = Path(__file__).parent
    return tuple(
        importlib.import_module(f"arbor.{group}.{folder.parent.name}").FEATURE
        for group in GROUPS
        for folder in sorted((here / group).glob("*/__init__.py"))
    )


def hook(setting: str) -> Any:
    """What takes part in the engine's work where a setting asks for it; None: no folder has it."""
    path = next((each.hooks[setting] for each in features() if setting in each.hooks), None)
    if path is None:
        return None
    module, _, names = path.partition(":")
    return functools.reduce(getattr, names.split("."), importlib.import_module(module))


def hook_for(name: str, value: object) -> Any:
    """What takes part in the engine's work for a setting.

    Args:
        name: of the setting.
        value: that was asked for, for the message.

    Raises:
        UsageError: the folder that has it was taken out.
    """
    found = hook(name)
    if found is None:
        raise UsageError(
            name.replace("_", "-"),
            f"{name}={value}: this copy of arbor lacks the folder of arbor/papers that does it.",
            "Leave the setting out, or install arbor-search whole.",
        )
    return found
