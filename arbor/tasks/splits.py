"""Ids and splits of problems, both by content alone."""

from __future__ import annotations

import hashlib

VALIDATION_SHARE = 20
TEST_SHARE = 10
CALIBRATION_SHARE = 5
DATASET_SPLITS = ("calibration", "evaluation")


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


def dataset_split_of(text: str) -> str:
    """Split of a problem of a data set: one in 5 is for ``calibration``, the rest ``evaluation``.

    Equal problems are in one split, whatever the order, the ids and the other columns of the file.

    Args:
        text: the problem as the data set has it; white space around it does not count.
    """
    number = int(content_id("dataset", text.strip()), 16)
    return DATASET_SPLITS[number % CALIBRATION_SHARE > 0]
