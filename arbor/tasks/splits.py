"""Identity and membership by content: a problem's id and split depend on what it says, on nothing else."""

from __future__ import annotations

import hashlib

VALIDATION_SHARE = 20
TEST_SHARE = 10


def content_id(task: str, text: str) -> str:
    """Stable id of a problem: the first 16 hex digits of sha256 over task name and canonical text."""
    return hashlib.sha256(f"{task}\n{text}".encode()).hexdigest()[:16]


def split_of(identity: str) -> str:
    """Split of a content id: one in 20 is ``validation``, one in 10 ``test``, the rest ``train``.

    Args:
        identity: what `content_id` returned.
    """
    number = int(identity, 16)
    if number % VALIDATION_SHARE == 0:
        return "validation"
    if number // VALIDATION_SHARE % TEST_SHARE == 0:
        return "test"
    return "train"
