"""``--set`` from flags, the environment and a file: what came from a stronger source wins."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import click
from click.core import ParameterSource

from arbor.cli.configure import (
    CONFIG_PATH,
    KINDS,
    config_values,
    set_twice,
    settings_of_parts,
)
from arbor.components import split_spec

WEAKEST_FIRST = (
    ParameterSource.DEFAULT,
    ParameterSource.DEFAULT_MAP,
    ParameterSource.ENVIRONMENT,
    ParameterSource.COMMANDLINE,
)
DEFAULT, FILE, ENVIRONMENT, FLAG = range(len(WEAKEST_FIRST))  # sources, as ranks

Row = tuple[int, str]  # rank of its source, and NAME=VALUE or PART.NAME=VALUE


def ranks_of(names: Iterable[str]) -> dict[str, int]:
    """The rank of the source of each option's value, and of settings that a file alone gives."""
    ctx = click.get_current_context(silent=True)
    found = {name: ctx and ctx.get_parameter_source(name) for name in names}
    ranks = {name: WEAKEST_FIRST.index(source) for name, source in found.items() if source}
    return dict.fromkeys(names, DEFAULT) | ranks | dict.fromkeys(config_values(), FILE)


def set_rows(given: Iterable[str]) -> list[Row]:
    """What every source sets, weakest first; click gives that of the strongest alone.

    Args:
        given: the option's value, as click gives it.
    """
    ctx = click.get_current_context(silent=True)
    if ctx is None:
        return [(FLAG, text) for text in given]
    option = next(each for each in ctx.command.params if each.name == "set")
    flags = given if ctx.get_parameter_source("set") is ParameterSource.COMMANDLINE else ()
    return [
        *((FILE, str(text)) for text in (ctx.default_map or {}).get("set", ())),
        *((ENVIRONMENT, text) for text in option.value_from_envvar(ctx) or ()),
        *((FLAG, text) for text in flags),
    ]


def source_of(rank: int) -> str:
    """A source of settings by its rank, as a user knows it."""
    ctx = click.get_current_context(silent=True)
    if ctx is not None and rank == FILE:
        return str(ctx.meta.get(CONFIG_PATH, "the file"))
    return f"{ctx.auto_envvar_prefix}_SET" if ctx is not None and rank == ENVIRONMENT else "--set"


def component_settings(
    rows: Iterable[Row], values: Mapping[str, Any], ranks: Mapping[str, int]
) -> tuple[str, ...]:
    """The settings of components, each as its strongest source has it.

    Args:
        rows: those of ``--set``, weakest source first; the tables of a file are added.
        values: the options, among them the components as ``NAME,KEY=VALUE``.
        ranks: of the sources of `values`.

    Raises:
        UsageError: a source sets one twice.
    """
    every = [*((FILE, text) for text in settings_of_parts(values)), *rows]
    specs = {
        kind: split_spec(values[kind])[1] for kind in KINDS if isinstance(values.get(kind), str)
    }
    kept = []
    for place, (rank, text) in enumerate(every):
        part, name = _place_of(text)
        again = [above for above, other in every[place + 1 :] if _same(part, name, other)]
        if rank in again:
            raise set_twice(source_of(rank), name)
        chosen = any(
            name in given and part in ("", kind) and ranks[kind] > rank
            for kind, given in specs.items()
        )
        if not again and not chosen:
            kept.append(text)
    return tuple(kept)


def _place_of(text: str) -> tuple[str, str]:
    """The part, empty where none is named, and the name of a setting."""
    part, _, name = text.partition("=")[0].strip().rpartition(".")
    return part, name


def _same(part: str, name: str, other: str) -> bool:
    """Whether another text sets it too; a name without a part is of the part that has it."""
    owner, key = _place_of(other)
    return key == name and (owner == part or not owner or not part)
