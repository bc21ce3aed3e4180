"""Components checked for the members that their kind needs; imports no torch."""

from __future__ import annotations

from typing import Any

from arbor import components
from arbor.errors import UsageError
from arbor.retention.base import Allocator, Scorer
from arbor.retention.policy import Policy


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
