"""Every named policy, ready: those of the core and those of the folders that are there."""

from __future__ import annotations

from arbor.registry import BUILTIN, resolve
from arbor.retention.policy import Policy

POLICIES: dict[str, Policy] = {name: resolve("policy", name) for name in sorted(BUILTIN["policy"])}
