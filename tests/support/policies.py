"""Every named policy of this checkout, and those that a test needs."""

from __future__ import annotations

from typing import Any

import pytest

from arbor.registry import names, resolve
from arbor.retention.policy import Policy

POLICIES: dict[str, Policy] = {name: resolve("policy", name) for name in names("policy")}


def needed(name: str) -> Any:
    """A policy, or the test is skipped where its folder was taken out."""
    if name not in POLICIES:
        pytest.skip(f"the folder of the policy {name} was taken out")
    return POLICIES[name]


def of_papers(kind: str, *rows: tuple[str, dict[str, Any]]) -> tuple[Any, ...]:
    """Components by name and settings; without those whose folder was taken out."""
    return tuple(resolve(kind, name)(**settings) for name, settings in rows if name in names(kind))
