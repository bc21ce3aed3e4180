"""Ids and splits of problems, both by content alone."""

from __future__ import annotations

import hashlib

VALIDATION_SHARE = 20
TEST_SHARE = 10


def content_id(task: str, text: str) -> str:
    """Stable id of a problem: 16 hex digits of sha256 over task name and canonical text."""
    return hashlib.sha256(f"{task}\n{text}".encode("utf-8", "backslashreplace")).hexdigest()[:16]


def split_of(identity: str) -> str:
    """Split of a content id: one in 20 is ``validation``, one in 10 ``test``, the rest ``train``.

    Args:
        identity: from `content_id`.
    """
    number = int(identity, 16)
    if number % VALIDATION_SHARE == 0:
        return "validation"
    if number // VALIDATION_SHARE % TEST_SHARE == 0:
        return "test"
    return "train"
