"""``--set KEY=VALUE``: which component a setting belongs to."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from arbor import components, registry
from arbor.errors import UsageError, unknown_setting
from arbor.model.sampling_params import Sampling
from arbor.support.setting import settings_of

KINDS = ("controller", "verifier", "aggregate", "task", "policy")
PARTS = (*KINDS, "sampling")


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
        part = part or _part_of(name, names)
        if part != "sampling":
            parts[part][name] = value.strip()  # the registry reads it by the field's type
            continue
        known = settings_of(Sampling)
        if name not in known:
            raise unknown_setting("there is", name, [f"sampling.{each}" for each in known])
        parts[part][name] = components.convert(value.strip(), known[name].hint, name)
    return parts


def owner_of(name: str, names: Mapping[str, str]) -> str:
    """The only component with a setting of this name; empty: none.

    Raises:
        UsageError: there are several.
    """
    owners = [kind for kind in KINDS if name in _settings_of(kind, names[kind])]
    if len(owners) > 1:
        hint = " or ".join(f"--set {owner}.{name}=…" for owner in owners)
        raise UsageError("setting-ambiguous", f"--set {name}: whose '{name}'?", f"{hint}.")
    return owners[0] if owners else ""


def _part_of(name: str, names: Mapping[str, str]) -> str:
    """The only part with a setting of this name."""
    part = "sampling" if name in settings_of(Sampling) else owner_of(name, names)
    if not part:
        from arbor.run.settings import Settings  # the command line starts without it

        choices = [f"{kind}.{key}" for kind in KINDS for key in _settings_of(kind, names[kind])]
        choices += [f"sampling.{key}" for key in settings_of(Sampling)]
        choices += [key for key, each in settings_of(Settings).items() if each.about.shown == "set"]
        raise unknown_setting("there is", name, sorted(choices))
    return part


def _settings_of(kind: str, spec: str) -> tuple[str, ...]:
    component = registry.resolve(kind, components.split_spec(spec)[0])
    return components.settings_of(component) if dataclasses.is_dataclass(component) else ()
