"""Every named policy of this checkout, and components of papers that are there."""

from __future__ import annotations

from typing import Any

import pytest

from arbor.registry import names, resolve
from arbor.retention.policy import Policy


class Named(dict[str, Policy]):
    """Policies by name; a test that asks for one whose folder was taken out is skipped."""

    def __missing__(self, name: str) -> Policy:
        pytest.skip(f"the folder of the policy {name} was taken out")


POLICIES = Named({name: resolve("policy", name) for name in names("policy")})


def of_papers(kind: str, *rows: tuple[str, dict[str, Any]]) -> tuple[Any, ...]:
    """Components by name and settings; without those whose folder was taken out."""
    return tuple(resolve(kind, name)(**settings) for name, settings in rows if name in names(kind))
