"""The settings of a search that a request asks for, within the server's limits."""

from __future__ import annotations

import dataclasses
import types
from contextlib import suppress
from typing import Any, Literal, Union, cast, get_args, get_origin

from arbor import components, registry
from arbor.errors import ArborError, UsageError
from arbor.integrations.server.refusals import Refusal
from arbor.integrations.server.schema import Component, SearchFields
from arbor.integrations.server.settings import ServerSettings
from arbor.run.limits import BoundarySettings, limited
from arbor.run.plugin_answers import check_boundary, most_blocks_of
from arbor.run.request import Options, Request
from arbor.run.settings import Settings, with_breadth
from arbor.run.setup import Setup
from arbor.support.annotations import types_of
from arbor.support.setting import settings_of
from arbor.verifiers.base import OwnsModel, parts_of

MOST_NUMBER = 10**6  # of a setting
# settings whose limit in `ServerSettings` has another name
LIMIT_OF = {"path_tokens": "max_search_tokens", "step_tokens": "max_tokens"}


def search_changes(search: SearchFields, setup: Setup, settings: ServerSettings) -> dict[str, Any]:
    """The fields of `Setup` that a search changes.

    Args:
        search: as asked for.
        setup: of the server.
        settings: its limits.

    Raises:
        Refusal: beyond the server's limits, or a component that requests may not name.
        ArborError: an unknown name, an invalid setting, or too large a search.
    """
    given = search.given(Settings)
    for name, value in given.items():
        _check_within(name, value, settings)
    task = _component("task", given.get("task"), setup.task)
    named, own = given.get("controller"), components.spec_of(setup.controller)["name"]
    if named not in (None, own):
        given["controller"] = with_breadth(named, task)
    parts = {
        name: _component(name, given.pop(name, None), getattr(setup, name))
        for name in registry.KINDS
        if name in SearchFields.model_fields
    }
    usual = setup.boundary if task is setup.task else check_boundary(task)
    path = {name: given.pop(name) for name in settings_of(BoundarySettings) if name in given}
    boundary = limited(usual, **path)
    check_size(
        parts["controller"],
        boundary.max_depth,
        given.get("max_expansions") or setup.max_expansions or settings.max_expansions,
        settings,
    )
    changes = {
        **parts,
        "task": task,
        "boundary": boundary,
        "max_expansions": setup.max_expansions or settings.max_expansions,
    }
    others = {name: value for name, value in given.items() if name not in settings_of(Request)}
    return changes | {
        name: settings_of(Settings)[name].checked(each) for name, each in others.items()
    }


def check_size(
    controller: Any, max_depth: int, max_expansions: int, settings: ServerSettings
) -> None:
    """Refuse a search that may open more blocks than the server allows.

    Args:
        controller: of the search.
        max_depth: thoughts on one path.
        max_expansions: leaves that it grows.
        settings: of the server.

    Raises:
        UsageError: it may; the hint has what would work.
    """

    def blocks(controller: Any, depth: int = max_depth) -> int:
        return most_blocks_of(controller, depth, max_expansions)

    most = blocks(controller)
    if most <= settings.max_blocks:
        return
    names = ["max_depth"] if blocks(controller, 1) <= settings.max_blocks else []
    for name in components.settings_of(controller):
        with suppress(ArborError, TypeError):  # not a number, or one that others contradict
            if blocks(dataclasses.replace(controller, **{name: 1})) <= settings.max_blocks:
                names.append(name)
    hints = [f"a smaller {' or '.join(names)}"] if names else []
    expansions = settings.max_blocks // most_blocks_of(controller, 1, 1)
    if expansions and most_blocks_of(controller, max_depth, expansions) <= settings.max_blocks:
        hints.insert(0, f"max_expansions={expansions}")
    raise UsageError(
        "search-too-large",
        f"this search may open {most:,} blocks; the server allows {settings.max_blocks:,}.",
        f"Give {', or '.join(hints)}." if hints else "",
    )


def search_options(
    search: SearchFields,
    max_tokens: int | None,
    seed: int,
    timeout_s: float,
    settings: ServerSettings,
) -> Options:
    """The options of a run that a search asks for.

    Args:
        search: as asked for.
        max_tokens: to generate, as far as they are allowed; None: that many.
        seed: of the run.
        timeout_s: of the request.
        settings: the server's limits.
    """
    most = settings.max_search_tokens
    options: Any = search.given(Request) | {
        "seed": seed,
        "max_tokens": min(most, max_tokens or most),
        "timeout": timeout_s,
    }
    return cast(Options, options)


def _check_within(name: str, value: Any, settings: ServerSettings) -> None:
    """Refuses a number above the server's limit of the same name, or of `LIMIT_OF`."""
    most = getattr(settings, LIMIT_OF.get(name, name), None)
    if isinstance(value, int) and most is not None and value > most:
        raise Refusal(
            400,
            "limit_exceeded",
            f"{name} is {value:,}; the server allows {most:,}.",
            param=f"arbor.{name}",
        )


def _component(kind: str, given: Component | None, usual: Any) -> Any:
    """A component that a request names, or the server's own.

    A name is a registered one: a dotted path would import any module. Its settings are numbers,
    truth values and words of a fixed set: a text may name a file.
    """
    if given is None:
        return usual
    settings: dict[str, Any] = {}
    if isinstance(given, dict):
        settings = dict(given)
        name = settings.pop("name", None)
    else:
        name, found = components.split_spec(given)
        settings = dict(found)
    place = f"arbor.{kind}"
    if not isinstance(name, str):
        raise Refusal(400, "invalid_request", f"{place} needs a name.", param=place)
    if name not in registry.names(kind):
        raise registry.unknown(kind, name)
    if name == components.spec_of(usual)["name"] and not settings:
        return usual
    known = registry.resolve(kind, name)
    free = _free_settings(known)
    for setting, value in settings.items():
        if setting in components.settings_of(known) and setting not in free:
            raise Refusal(
                400,
                "setting_not_allowed",
                f"{place}: requests may not set '{setting}' of '{name}'.",
                param=f"{place}.{setting}",
            )
        if isinstance(value, int | float) and abs(value) > MOST_NUMBER:
            raise Refusal(
                400,
                "limit_exceeded",
                f"{place}: {setting} is above {MOST_NUMBER:,}.",
                param=f"{place}.{setting}",
            )
    built = components.build(kind, name, **settings)
    if kind == "verifier" and any(isinstance(part, OwnsModel) for part in parts_of(built)):
        raise Refusal(
            400,
            "setting_not_allowed",
            f"{place}: '{name}' has a model of its own, and the server has loaded none for it.",
            param=place,
        )
    return settings_of(Settings)[kind].checked(built)


def _free_settings(component: Any) -> set[str]:
    """The settings of a class or component that requests may change."""
    if not dataclasses.is_dataclass(component):
        return set()
    cls = component if isinstance(component, type) else type(component)
    hints = types_of(cls)
    return {name for name in components.settings_of(component) if _is_free(hints.get(name))}


def _is_free(hint: Any) -> bool:
    """Whether a type holds numbers, truth values and words of a fixed set only."""
    origin = get_origin(hint)
    if origin is Literal:
        return True
    if origin in (Union, types.UnionType):
        return all(_is_free(each) for each in get_args(hint))
    return hint in (bool, int, float, type(None))
