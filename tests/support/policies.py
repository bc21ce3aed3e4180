"""Every named policy of this checkout."""

from __future__ import annotations

from arbor.registry import names, resolve
from arbor.retention.policy import Policy

POLICIES: dict[str, Policy] = {name: resolve("policy", name) for name in names("policy")}
