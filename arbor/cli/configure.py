"""``--config`` and ``--preset``: defaults of options, and settings of components."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from arbor.cli.command import RENAMED
from arbor.cli.component_settings import PARTS
from arbor.components import split_spec
from arbor.errors import UsageError, unknown_setting
from arbor.run.config import read_config, refuse_trust
from arbor.run.presets import preset

# versions of what wrote the file and of what it used
IGNORED = ("arbor", "grader_version", "model_content", "prompt_version")
# keys of a context's `meta`
CONFIG_PATH = "arbor.config.path"  # the file of the defaults
CONFIG_SETTINGS = "arbor.config.settings"  # part -> (its name, its settings as KEY=VALUE)
CONFIG_VALUES = "arbor.config.values"  # setting without an option -> its value


def take_defaults(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Makes a configuration the defaults of the options; flags and the environment win."""
    if path is not None:
        _set_defaults(ctx, read_config(path), str(path))
        ctx.meta[CONFIG_PATH] = path


def take_preset(ctx: click.Context, parameter: click.Parameter, name: str | None) -> None:
    """Makes a preset the defaults of the options, unless there is a configuration."""
    if name is not None and not ctx.default_map:
        _set_defaults(ctx, preset(name), name)


def _set_defaults(ctx: click.Context, config: Mapping[str, Any], source: str) -> None:
    refuse_trust(config, source)
    options = {each.name: each for each in ctx.command.params if each.name}
    set_only = getattr(ctx.command, "set_only", {})
    defaults: dict[str, Any] = {}
    values: dict[str, Any] = {}
    settings: dict[str, tuple[str, list[str]]] = {}
    for key, value in config.items():
        if key in IGNORED:
            continue
        if key in PARTS and isinstance(value, Mapping):
            rest = dict(value)
            name = str(rest.pop("name", ""))
            if name:
                defaults[key] = name
            settings[key] = name, [f"{key}.{k}={_text(v)}" for k, v in rest.items()]
        elif key in options and not isinstance(value, Mapping):
            _check_kind(options[key], key, value, source)
            defaults[key] = value
        elif key in set_only:
            values[key] = value
        elif RENAMED.get(key) in options:
            message = f"{source}: '{key}' is now '{RENAMED[key]}'."
            raise UsageError("unknown-setting", message, setting=key, path=source)
        else:
            known = sorted({*options, *set_only, *PARTS} - {"config", "set", "trust_remote_code"})
            raise unknown_setting(f"{source}: there is", key, known, path=source)
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


def settings_of_parts(values: Mapping[str, Any]) -> list[str]:
    """The settings of a configuration's components, as ``--set`` takes them.

    The settings of a component that a flag replaced are left out.

    Args:
        values: a command's options by name.
    """
    ctx = click.get_current_context(silent=True)
    settings = {} if ctx is None else ctx.meta.get(CONFIG_SETTINGS, {})
    return [
        each
        for part, (name, rows) in settings.items()
        if not name or split_spec(str(values.get(part)))[0] == name
        for each in rows
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
