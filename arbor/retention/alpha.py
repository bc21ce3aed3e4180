"""Alpha: the attention from which a token counts as read; the file of the one fitted to a model."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from arbor.errors import UsageError
from arbor.retention.policy import Policy
from arbor.support.atomic_write import write_atomically

DEFAULT_ALPHA = 1e-4  # of RaaS, and of LazyEviction for most of its models
_FORMAT = "arbor.alpha/1"


def with_alpha(policy: Policy, path: Path | None) -> Policy:
    """A policy whose alpha is a number: the one given, else the model's, else the default.

    A policy whose scorer does not ask when tokens were read (``by_activation``) has the default.

    Args:
        policy: of the settings.
        path: the file of `save_alpha` for the model; None where there is none.

    Raises:
        UsageError: the file holds no alpha.
    """
    if policy.protect.threshold is not None:
        return policy
    fitted = None
    if path is not None and getattr(policy.scorer, "by_activation", False):
        fitted = _fitted(path)
    alpha = DEFAULT_ALPHA if fitted is None else fitted
    return replace(policy, protect=replace(policy.protect, threshold=alpha))


def save_alpha(path: Path, alpha: float, provenance: Mapping[str, Any]) -> None:
    """Write a small JSON file that `with_alpha` reads.

    Args:
        path: where to.
        alpha: the threshold.
        provenance: its origin, for readers of the file.

    Raises:
        UsageError: the file cannot be written.
    """
    document = {"schema": _FORMAT, "alpha": alpha, "provenance": dict(provenance)}
    write_atomically(path, json.dumps(document, indent=2, sort_keys=True) + "\n")


def _fitted(path: Path) -> float:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
        if document["schema"] != _FORMAT:
            raise ValueError(f"its schema is {document['schema']}, not {_FORMAT}")
        alpha = float(document["alpha"])
        if not 0 < alpha < 1:
            raise ValueError(f"alpha is {alpha}, not between 0 and 1")
        return alpha
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise UsageError(
            "alpha-unreadable",
            f"{path} holds no alpha: {type(error).__name__}: {error}.",
            "`arbor calibrate window` writes such a file; or give the policy threshold=0.0001.",
            path=str(path),
        ) from error
