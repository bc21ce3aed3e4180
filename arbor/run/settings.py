"""Settings of a solver, checked and resolved before anything loads."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, cast, get_args

from arbor import components
from arbor.engine.mode import Mode, Rehydrate
from arbor.errors import UsageError, unknown_setting
from arbor.model.loading import ModelLocation
from arbor.model.sampling_params import Sampling
from arbor.retention.base import Allocator, Scorer
from arbor.retention.msve import MSVE
from arbor.retention.policy import Policy
from arbor.run.limits import check_count
from arbor.support.cache_dir import msve_file
from arbor.tasks.base import BlockLimits


def resolve_component(kind: str, given: Any, protocol: type[Any]) -> Any:
    """A component with every member that its kind needs.

    Args:
        kind: as in `components.build`.
        given: a name, a table of settings, a class or a ready component; for a policy also an
            allocator, which becomes `Policy(allocator)`.
        protocol: the members needed; for a policy the class `Policy`.

    Raises:
        UsageError: a member is missing; names it.
    """
    built = components.build(kind, given)
    if protocol is Policy:
        if isinstance(built, Allocator):
            built = Policy(built)
        wrong = "" if isinstance(built, Policy) else "is not an arbor.retention.policy.Policy"
        if isinstance(built, Scorer):
            wrong += f" but a scorer: write Policy(allocator, {type(built).__name__}(…))"
        parts = () if wrong else ((built.allocator, Allocator), (built.scorer, Scorer))
        missing = [name for part, wanted in parts for name in missing_members(part, wanted)]
    else:
        wrong, missing = "", missing_members(built, protocol)
    if missing:
        wrong = f"has no {' and no '.join(repr(name) for name in missing)}"
    if wrong:
        name = components.spec_of(built)["name"]
        raise UsageError(
            "component-incomplete",
            f"'{name}' cannot be the {kind}: it {wrong}.",
            f"docs/{kind}.md has a complete example.",
            kind=kind,
            lacking=missing,
        )
    return built


def missing_members(component: Any, protocol: type[Any]) -> list[str]:
    """Public names of a protocol that a component does not have."""
    wanted = {**vars(protocol), **getattr(protocol, "__annotations__", {})}
    return [name for name in wanted if not name.startswith("_") and not _has(component, name)]


def _has(component: Any, name: str) -> bool:
    try:
        return hasattr(component, name)
    except Exception:  # a property that fails, which its use reports
        return True


def resolve_msve(given: MSVE | str | os.PathLike[str] | None, source: ModelLocation) -> MSVE:
    """The block values given, or those fitted to the model, or the defaults.

    Fitted values lie in the model's directory, or in the cache directory for a model of the Hub.
    """
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
        UsageError: unknown, or not possible together.
    """
    if mode not in get_args(Mode):
        raise UsageError("mode", f"unknown mode '{mode}'.", f"Known: {', '.join(get_args(Mode))}.")
    chosen = rehydrate or ("off" if mode == "lossy" else "selective")
    if chosen not in get_args(Rehydrate):
        known = ", ".join(get_args(Rehydrate))
        raise UsageError("rehydrate", f"unknown rehydration '{chosen}'.", f"Known: {known}.")
    if mode == "lossless" and chosen == "off":
        raise UsageError(
            "rehydrate", "lossless needs what was evicted back.", "Take mode=lossy, or selective."
        )
    return cast(Mode, mode), cast(Rehydrate, chosen)


def resolve_sampling(settings: Mapping[str, Any], defaults: Sampling | None = None) -> Sampling:
    """Sampling with some settings changed.

    Args:
        settings: by name.
        defaults: the other settings.

    Raises:
        UsageError: an unknown setting, or an invalid value.
    """
    refuse_unknown("sampling", settings, [each.name for each in dataclasses.fields(Sampling)])
    return dataclasses.replace(defaults or Sampling(), **settings)


def refuse_unknown(owner: str, settings: Iterable[str], known: Iterable[str]) -> None:
    """Refuse an unknown setting.

    Raises:
        UsageError: names it and the closest known one.
    """
    names = sorted(known)
    for name in settings:
        if name not in names:
            raise unknown_setting(f"{owner} has", name, names)


def resolve_boundary(
    boundary: BlockLimits, max_depth: int | None, step_tokens: int | None
) -> BlockLimits:
    """A task's boundary with other limits; None keeps the task's.

    Raises:
        UsageError: a limit that is not a whole number of at least 1.
    """
    return dataclasses.replace(
        boundary,
        max_depth=check_count("max_depth", max_depth) or boundary.max_depth,
        max_tokens=check_count("step_tokens", step_tokens) or boundary.max_tokens,
    )
