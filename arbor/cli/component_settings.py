"""``--set KEY=VALUE``: which component a setting belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from arbor import components, registry
from arbor.errors import UsageError, unknown_setting

KINDS = ("controller", "verifier", "aggregate", "task", "policy")
PARTS = (*KINDS, "sampling")
_BOOLEAN = {"true": True, "false": False}
# name -> how its text is read, and what it must be
SAMPLING: dict[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "a number"),
    "top_p": (float, "a number"),
    "top_k": (int, "a number"),
    "min_p": (float, "a number"),
    "arithmetic": (_BOOLEAN.__getitem__, "true or false"),
}


def settings_by_part(
    settings: Iterable[str], names: Mapping[str, str]
) -> dict[str, dict[str, Any]]:
    """Settings by the part they belong to, each of `PARTS`.

    ``width=4`` goes to the part that has this setting, ``verifier.width=4`` to the verifier.

    Args:
        settings: each as KEY=VALUE or PART.KEY=VALUE.
        names: the name of each of `KINDS`, perhaps with settings (`components.split_spec`).

    Raises:
        UsageError: not KEY=VALUE, or a key of no part, or of several.
    """
    parts: dict[str, dict[str, Any]] = {part: {} for part in PARTS}
    for setting in settings:
        key, equals, value = setting.partition("=")
        part, dot, name = key.strip().rpartition(".")
        if not equals or not name or (dot and part not in parts):
            raise UsageError(
                "setting",
                f"--set {setting}: it is neither KEY=VALUE nor PART.KEY=VALUE.",
                f"PART is one of {', '.join(PARTS)}.",
                setting=setting,
            )
        part = part or _part_of(name, names, setting)
        if part != "sampling":
            parts[part][name] = value.strip()  # the registry reads it by the field's type
            continue
        if name not in SAMPLING:
            raise unknown_setting("there is", name, [f"sampling.{known}" for known in SAMPLING])
        read, wanted = SAMPLING[name]
        try:
            parts[part][name] = read(value.strip().lower())
        except (ValueError, KeyError) as error:
            text = f"--set {setting}: '{value}' is not {wanted}."
            raise UsageError("setting-type", text) from error
    return parts


def _part_of(name: str, names: Mapping[str, str], setting: str) -> str:
    """The only part with a setting of this name."""
    owners = {known: ["sampling"] for known in SAMPLING}
    for kind in KINDS:
        component = registry.resolve(kind, components.split_spec(names[kind])[0])
        if dataclasses.is_dataclass(component):
            for known in components.settings_of(component):
                owners.setdefault(known, []).append(kind)
    if name not in owners:
        choices = sorted(f"{owner}.{key}" for key, those in owners.items() for owner in those)
        raise unknown_setting("there is", name, choices)
    if len(owners[name]) > 1:
        hint = " or ".join(f"--set {owner}.{setting}" for owner in owners[name])
        raise UsageError("setting-ambiguous", f"--set {setting}: whose '{name}'?", f"{hint}.")
    return owners[name][0]
