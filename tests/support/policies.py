"""Every named policy of this checkout."""

from __future__ import annotations

import pytest

from arbor.registry import names, resolve
from arbor.retention.policy import Policy


class Named(dict[str, Policy]):
    """Policies by name; a test that asks for one whose folder was taken out is skipped."""

    def __missing__(self, name: str) -> Policy:
        pytest.skip(f"the folder of the policy {name} was taken out")


POLICIES = Named({name: resolve("policy", name) for name in names("policy")})
