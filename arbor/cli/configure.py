"""``--config``: a TOML file gives the defaults of a command's options, and settings of its parts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import click

from arbor.cli.build import PARTS
from arbor.components import split_spec
from arbor.config import read_config, refuse_trust
from arbor.errors import unknown_setting
from arbor.run.presets import preset

# what a solver calls it -> what the option is called
OPTIONS = {"max_depth": "depth", "backend": "attn"}
NOTES = ("arbor",)  # what a file says of itself: the version that wrote it
SETTINGS = "arbor.run.settings"  # where the command keeps a file's settings, by part


CONFIG = "arbor.config"  # in a context's `meta`: the file its defaults are from


def take_defaults(ctx: click.Context, parameter: click.Parameter, path: Path | None) -> None:
    """Reads a configuration before the other options, which then fall back on it; flags and the environment win."""
    if path is not None:
        _fall_back(ctx, read_config(path), path)
        ctx.meta[CONFIG] = path


def take_preset(ctx: click.Context, parameter: click.Parameter, name: str | None) -> None:
    """The same with the settings of a preset; a configuration beside it wins."""
    if name is not None and not ctx.default_map:
        _fall_back(ctx, preset(name), Path(name))


def _fall_back(ctx: click.Context, config: Mapping[str, Any], path: Path) -> None:
    refuse_trust(config, str(path))
    known = {each.name for each in ctx.command.params if each.name}
    defaults: dict[str, Any] = {}
    settings: dict[str, tuple[str, list[str]]] = {}
    for key, value in config.items():
        if key in NOTES:
            continue
        name = OPTIONS.get(key, key)
        if key in PARTS and isinstance(value, Mapping):
            rest = dict(value)
            chosen = str(rest.pop("name", ""))
            if chosen:
                defaults[name] = chosen
            settings[key] = chosen, [f"{key}.{k}={_text(v)}" for k, v in rest.items()]
        elif name in known and not isinstance(value, Mapping):
            defaults[name] = value
        else:
            names = sorted({*known, *PARTS} - {"config", "set", "trust_remote_code"})
            raise unknown_setting(f"{path}: there is", key, names, path=str(path))
    ctx.default_map = defaults
    ctx.meta[SETTINGS] = settings


def all_settings(given: Mapping[str, Any]) -> tuple[str, ...]:
    """What a configuration and ``--set`` ask for together; the settings of a part that a flag replaced are left out."""
    ctx = click.get_current_context(silent=True)
    settings = {} if ctx is None else ctx.meta.get(SETTINGS, {})
    kept = [
        each
        for part, (chosen, rows) in settings.items()
        if not chosen or split_spec(str(given.get(part)))[0] == chosen
        for each in rows
    ]
    return (*kept, *given["set"])


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return json.dumps(value)
