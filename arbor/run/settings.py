"""What a solver's settings mean, checked before anything loads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast, get_args

from arbor import registry
from arbor.engine.mode import Mode, Rehydrate
from arbor.errors import UsageError, unknown_setting
from arbor.model.loading import ModelLocation
from arbor.model.sampling_params import Sampling
from arbor.retention.base import Allocator, Scorer
from arbor.retention.msve import MSVE
from arbor.retention.policy import Policy
from arbor.run.limits import limit_of
from arbor.support.cache_dir import msve_file
from arbor.tasks.base import BlockLimits


def component_of(kind: str, given: Any, protocol: type[Any]) -> Any:
    """A component by its name or as it is, which has everything that is asked of its kind.

    Args:
        kind: as in `registry.build`.
        given: a name, a table of settings, a class or a ready component.
        protocol: what the kind has to have; a `Policy` has to be one.

    Raises:
        UsageError: something is missing; says what.
    """
    built = registry.build(kind, given)
    if protocol is Policy:
        wrong = "" if isinstance(built, Policy) else "is no arbor.retention.policy.Policy"
        parts = () if wrong else ((built.allocator, Allocator), (built.scorer, Scorer))
        lacking = [name for part, wanted in parts for name in lacks(part, wanted)]
    else:
        wrong, lacking = "", lacks(built, protocol)
    if lacking:
        wrong = f"has no {' and no '.join(repr(name) for name in lacking)}"
    if wrong:
        name = registry.spec_of(built)["name"]
        raise UsageError(
            "component-incomplete",
            f"'{name}' cannot be the {kind}: it {wrong}.",
            "docs/controller.md and docs/policy.md have examples, ARCHITECTURE.md what other kinds need.",
            kind=kind,
            lacking=lacking,
        )
    return built


def lacks(component: Any, protocol: type[Any]) -> list[str]:
    """Names that a protocol asks for and a component does not have."""
    wanted = {**vars(protocol), **getattr(protocol, "__annotations__", {})}
    return [name for name in wanted if not name.startswith("_") and not hasattr(component, name)]


def msve_of(given: MSVE | str | os.PathLike[str] | None, source: ModelLocation) -> MSVE:
    """The block values that were given, or those that were fitted to the model: beside its weights in a directory, in
    `cache_dir` for a model of the Hub."""
    if isinstance(given, MSVE):
        return given
    if given is not None:
        return MSVE.parse(os.fspath(given))
    if not source.path:  # a ready model
        return MSVE()
    folder = Path(source.path)
    fitted = folder / "msve.json"
    if not folder.is_dir():
        fitted = msve_file(source.path, source.revision)
    return MSVE.load(fitted) if fitted.is_file() else MSVE()


def resolve_mode(mode: str, rehydrate: str | None) -> tuple[Mode, Rehydrate]:
    """Mode and rehydration, checked together.

    Raises:
        UsageError: an unknown one, or two that do not go together.
    """
    if mode not in get_args(Mode):
        raise UsageError(
            "mode", f"there is no mode '{mode}'.", f"Known: {', '.join(get_args(Mode))}."
        )
    chosen = rehydrate or ("off" if mode == "lossy" else "selective")
    if chosen not in get_args(Rehydrate):
        known = ", ".join(get_args(Rehydrate))
        raise UsageError("rehydrate", f"there is no rehydration '{chosen}'.", f"Known: {known}.")
    if mode == "lossless" and chosen == "off":
        raise UsageError(
            "rehydrate", "lossless needs what was evicted back.", "Take mode=lossy, or selective."
        )
    return cast(Mode, mode), cast(Rehydrate, chosen)


def sampling_of(settings: Mapping[str, Any]) -> Sampling:
    """How tokens are chosen, from some settings of it.

    Raises:
        UsageError: a setting that there is not, or that cannot be meant.
    """
    refuse_unknown("sampling", settings, [each.name for each in dataclasses.fields(Sampling)])
    return Sampling(**settings)


def refuse_unknown(whose: str, settings: Iterable[str], known: Iterable[str]) -> None:
    """Refuse a setting that there is not.

    Raises:
        UsageError: names it and the nearest one.
    """
    names = sorted(known)
    for name in settings:
        if name not in names:
            raise unknown_setting(f"{whose} has", name, names)


def boundary_of(
    boundary: BlockLimits, max_depth: int | None, step_tokens: int | None
) -> BlockLimits:
    """A task's boundary with other limits.

    Raises:
        UsageError: a limit that is no whole number of at least 1.
    """
    return dataclasses.replace(
        boundary,
        max_depth=limit_of("max_depth", max_depth) or boundary.max_depth,
        max_tokens=limit_of("step_tokens", step_tokens) or boundary.max_tokens,
    )
