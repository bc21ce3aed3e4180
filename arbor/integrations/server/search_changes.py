"""The settings of a search that a request asks for, within the server's limits."""

from __future__ import annotations

import dataclasses
import types
import typing
from typing import Any, Literal

from arbor import components, registry
from arbor.integrations.server.refusals import Refusal
from arbor.integrations.server.schema import Component, SearchFields
from arbor.integrations.server.settings import ServerSettings
from arbor.run.boundary import limited
from arbor.run.breadth import with_breadth
from arbor.run.plugin_answers import check_boundary, most_blocks
from arbor.run.request import Options
from arbor.run.settings import Settings
from arbor.run.setup import Setup
from arbor.support.setting import settings_of
from arbor.verifiers.base import OwnsModel, parts_of

MOST_NUMBER = 10**6  # of a setting


def search_changes(search: SearchFields, setup: Setup, settings: ServerSettings) -> dict[str, Any]:
    """The fields of `Setup` that a search changes.

    Args:
        search: as asked for.
        setup: of the server.
        settings: its limits.

    Raises:
        Refusal: beyond the server's limits, or a component that requests may not name.
        ArborError: an unknown name or an invalid setting.
    """
    task = _component("task", search.task, setup.task)
    named, own = search.controller, components.spec_of(setup.controller)["name"]
    broad = named if named in (None, own) else with_breadth(named, task)
    controller = _component("controller", broad, setup.controller)
    depth = _within("max_depth", search.max_depth, settings.max_depth)
    path = _within("path_tokens", search.path_tokens, settings.max_search_tokens)
    step = _within("step_tokens", search.step_tokens, settings.max_tokens)
    most = _within("max_expansions", search.max_expansions, settings.max_expansions)
    usual = setup.boundary if task is setup.task else check_boundary(task)
    boundary = limited(usual, depth, step, path)
    blocks = most_blocks(controller, boundary.max_depth)
    if blocks > settings.max_blocks:
        raise Refusal(
            400,
            "search_too_large",
            f"This search may open {blocks:,} blocks; the server allows {settings.max_blocks:,}.",
            param="arbor.controller",
        )
    return {
        "task": task,
        "controller": controller,
        "verifier": _component("verifier", search.verifier, setup.verifier),
        "aggregate": _component("aggregate", search.aggregate, setup.aggregate),
        "boundary": boundary,
        "max_expansions": most or setup.max_expansions or settings.max_expansions,
    }


def search_options(
    search: SearchFields, max_tokens: int | None, seed: int, settings: ServerSettings
) -> Options:
    """The options of a run that a search asks for.

    Args:
        search: as asked for.
        max_tokens: to generate, as far as they are allowed; None: that many.
        seed: of the run.
        settings: the server's limits.
    """
    most = settings.max_search_tokens
    return {
        "seed": seed,
        "budget": search.budget,
        "max_tokens": min(most, max_tokens or most),
        "first": search.first,
        "confidence": search.confidence,
    }


def _within(name: str, value: int | None, most: int) -> int | None:
    """A number within a limit of the server."""
    if value is not None and value > most:
        raise Refusal(
            400,
            "limit_exceeded",
            f"{name} is {value:,}; the server allows {most:,}.",
            param=f"arbor.{name}",
        )
    return value


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
    hints = typing.get_type_hints(cls)
    return {name for name in components.settings_of(component) if _is_free(hints.get(name))}


def _is_free(hint: Any) -> bool:
    """Whether a type holds numbers, truth values and words of a fixed set only."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        return True
    if origin in (typing.Union, types.UnionType):
        return all(_is_free(each) for each in typing.get_args(hint))
    return hint in (bool, int, float, type(None))
