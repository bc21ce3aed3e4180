"""``--set``, ``--config`` and ``--preset``: settings by component, and defaults of options."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import click

from arbor import components, registry
from arbor.components import split_spec
from arbor.errors import UsageError, unknown_setting
from arbor.model.sampling_params import Sampling
from arbor.run.config import read_config, refuse_trust, refuse_updated
from arbor.run.presets import preset
from arbor.support.setting import settings_of

KINDS = components.PARTS
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


# versions of what wrote the file and of what it used
IGNORED = ("arbor", "grader_version", "model_content", "prompt_version")
# keys of a context's `meta`
CONFIG_PATH = "arbor.config.path"  # the file of the defaults
CONFIG_SETTINGS = "arbor.config.settings"  # part -> (its name, its settings by name, as text)
CONFIG_VALUES = "arbor.config.values"  # setting without an option -> its value


def take_defaults(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Makes a configuration the defaults of the options; flags and the environment win."""
    if path is not None and not _has_defaults(ctx, "config", "preset"):
        _set_defaults(ctx, read_config(path), str(path))
        ctx.meta[CONFIG_PATH] = path


def take_preset(ctx: click.Context, parameter: click.Parameter, name: str | None) -> None:
    """Makes a preset the defaults of the options; flags and the environment win."""
    if name is not None and not _has_defaults(ctx, "preset", "config"):
        _set_defaults(ctx, preset(name), name)


def _has_defaults(ctx: click.Context, name: str, other: str) -> bool:
    """Whether another option has given the defaults, as a flag against this one's variable.

    Raises:
        UsageError: it has, and neither wins.
    """
    if ctx.default_map is None:
        return False
    if (ctx.get_parameter_source(name), ctx.get_parameter_source(other)) == (
        click.core.ParameterSource.ENVIRONMENT,
        click.core.ParameterSource.COMMANDLINE,
    ):
        return True
    raise UsageError(
        "usage",
        "--config and --preset both give the defaults of the other options.",
        "Leave one out; with --print-config, 'arbor solve --preset NAME' writes a file to change.",
    )


def _set_defaults(ctx: click.Context, config: Mapping[str, Any], source: str) -> None:
    """Makes settings the defaults of the options.

    Raises:
        UsageError: an unknown or invalid one, or what no file may set.
    """
    refuse_trust(config, source)
    refuse_updated(config, source)
    options = {each.name: each for each in ctx.command.params if each.name}
    set_only = getattr(ctx.command, "set_only", {})
    defaults: dict[str, Any] = {}
    values: dict[str, Any] = {}
    settings: dict[str, tuple[str, dict[str, str]]] = {}
    for key, value in config.items():
        if key in IGNORED:
            continue
        if key in PARTS and isinstance(value, Mapping):
            rest = dict(value)
            name = str(rest.pop("name", ""))
            if name:
                defaults[key] = name
            settings[key] = name, {k: _text(v) for k, v in rest.items()}
        elif key in options and not isinstance(value, Mapping):
            _check_kind(options[key], key, value, source)
            defaults[key] = value
        elif key in set_only:
            values[key] = value
        else:
            known = sorted({*options, *set_only, *PARTS} - {"config", "trust_remote_code"})
            raise unknown_setting(f"{source}: there is", key, known, path=source)
    for name in settings.get("sampling", ("", {}))[1]:
        if name in config:
            raise set_twice(source, name)
    ctx.default_map = defaults
    ctx.meta[CONFIG_SETTINGS], ctx.meta[CONFIG_VALUES] = settings, values


def _check_kind(option: click.Parameter, key: str, value: Any, source: str) -> None:
    """Refuses a list for a single value, a single value for a list, and text for a switch."""
    if isinstance(option, click.Option) and option.is_flag and not isinstance(value, bool):
        wanted = "true or false"
    elif option.multiple != isinstance(value, list):
        wanted = "a list" if option.multiple else "a single value"
    elif isinstance(option.type, click.Path) and not isinstance(value, str):
        wanted = "a path, as text"
    else:
        return
    raise UsageError("setting-type", f"{source}: {key} must be {wanted}.", setting=key, path=source)


def config_values() -> dict[str, Any]:
    """The settings of a configuration that have no option."""
    ctx = click.get_current_context(silent=True)
    return {} if ctx is None else ctx.meta.get(CONFIG_VALUES, {})


def is_in_file(name: str) -> bool:
    """Whether the configuration itself gives a setting, which its ``set`` may give too."""
    ctx = click.get_current_context(silent=True)
    if ctx is None:
        return False
    _, sampling = ctx.meta.get(CONFIG_SETTINGS, {}).get("sampling", ("", {}))
    return name in {**(ctx.default_map or {}), **config_values(), **sampling}


def set_twice(source: str, name: str) -> UsageError:
    """The error for a setting that one source, as a user knows it, gives twice."""
    return UsageError("setting", f"{source}: '{name}' is set twice.", "Set it once.", setting=name)


def settings_of_parts(values: Mapping[str, Any]) -> list[str]:
    """The settings of a configuration's components, as ``--set`` takes them.

    Those of a component that an option replaced are left out, and those that an option has too.
    """
    ctx = click.get_current_context(silent=True)
    settings = {} if ctx is None else ctx.meta.get(CONFIG_SETTINGS, {})
    found = []
    for part, (name, rows) in settings.items():
        chosen, given = split_spec(str(values.get(part)))
        own = [each for each in settings_of(Sampling) if values.get(each) is not None]
        taken = own if part == "sampling" else given
        if not name or chosen == split_spec(name)[0]:
            found += [f"{part}.{key}={value}" for key, value in rows.items() if key not in taken]
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
