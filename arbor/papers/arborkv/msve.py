"""The worth of a block, from three signals the search has anyway, fitted to its cost of loss."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from arbor.errors import UsageError
from arbor.retention.base import Floats, normalised
from arbor.support.atomic_write import write_atomically

_FORMAT = "arbor.msve/1"
_LEAST_SPREAD = 0.05  # of a signal in [0, 1]; one that varies less carries almost nothing


@dataclass(frozen=True)
class MSVE:
    """Multi-Signal Value Estimation, ArborKV section 4: s = sigmoid(theta . [v, u, a] + bias).

    Differs from the paper: a bias, without which theta >= 0 gives s >= 0.5 for every block; no clip
    to [0, 1] after the sigmoid, which changes nothing; u, called uncertainty there, is confidence
    (1 - H / ln|V|); a is the mean attention per query, not a sum that grows as the search goes on.

    The defaults are a guess, since the paper publishes no theta: value counts most, the three
    signals at one half give s = 0.5. `arbor calibrate msve` fits them for a model.

    Attributes:
        theta: weights of value, confidence and attention.
        bias: added to the weighted sum.
        top: tokens in the entropy of the confidence: so many most probable ones, and the others as
            one (the variant of Eq. 1); 0: all.
    """

    theta: tuple[float, float, float] = (2.0, 1.0, 1.0)
    bias: float = -2.0
    top: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.top, int) or isinstance(self.top, bool) or self.top < 0:
            raise UsageError(
                "setting-range",
                f"top={self.top}: it must be a whole number, 0 (all tokens) or more.",
            )
        if len(self.theta) != 3 or not all(map(math.isfinite, (*self.theta, self.bias))):
            raise UsageError(
                "setting-range",
                f"theta={self.theta}, bias={self.bias}: they must be three weights and a bias, all finite.",
            )

    def scores(self, value: Floats, confidence: Floats, attention: Floats) -> Floats:
        """s of each block.

        Args:
            value: v, [M]; if any lies outside [0, 1], all are scaled from the smallest to the
                largest (all equal: 0.5).
            confidence: u, [M], in [0, 1].
            attention: a, [M], in [0, 1].

        Returns:
            float64 [M], in (0, 1).
        """
        first, second, third = self.theta
        signal = first * normalised(value) + second * confidence + third * attention
        return _sigmoid(signal + self.bias)

    def __str__(self) -> str:
        """Three weights, the bias and, if it is not 0, `top`, as `parse` reads them."""
        return ",".join(map(repr, (*self.theta, self.bias, *([self.top] if self.top else []))))

    @classmethod
    def parse(cls, text: str) -> MSVE:
        """Weights from numbers (``2,1,1,-2``; with `top` ``2,1,1,-2,50``) or a file of `save`.

        Raises:
            UsageError: neither numbers nor such a file.
        """
        try:
            numbers, (top,) = text.split(",")[:4], text.split(",")[4:] or ["0"]
            value, confidence, attention, bias = map(float, numbers)
            likeliest = int(top)
        except ValueError:
            return cls.load(Path(text))
        return cls((value, confidence, attention), bias, likeliest)

    def save(self, path: Path, **provenance: Any) -> None:
        """Write a small JSON file.

        Args:
            path: where to.
            provenance: the fit's origin (model, task, date, figures), for readers of the file.

        Raises:
            UsageError: the file cannot be written.
        """
        document = {
            "schema": _FORMAT,
            "theta": list(self.theta),
            "bias": self.bias,
            "top": self.top,
            "provenance": provenance,
        }
        write_atomically(path, json.dumps(document, indent=2, sort_keys=True) + "\n")

    @staticmethod
    def load(path: Path) -> MSVE:
        """Weights from a file that `save` wrote.

        Raises:
            UsageError: not such a file.
        """
        try:
            document = json.loads(path.read_text(encoding="utf-8"))
            if document["schema"] != _FORMAT:
                raise ValueError(f"its schema is {document['schema']}, not {_FORMAT}")
            value, confidence, attention = map(float, document["theta"])
            top = document.get("top", 0)  # missing in older files
            return MSVE((value, confidence, attention), float(document["bias"]), top)
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise UsageError(
                "msve-unreadable",
                f"{path} holds no MSVE weights: {type(error).__name__}: {error}.",
                "`arbor calibrate msve` writes such a file; --set msve=2,1,1,-2 does without it.",
                path=str(path),
            ) from error


def fit(features: ArrayLike, drop: ArrayLike, ridge: float = 1e-3) -> MSVE:
    """Logistic regression of a block's cost of loss on its three signals.

    Minimises the mean cross-entropy of sigmoid(theta . x + bias) against `drop`, plus
    ridge / 2 |theta|^2 on standardised features (the bias is free), by Newton's method from zero:
    deterministic, no learning rate. A signal that hardly varies is not scaled up to vary like the
    others: a weight in the thousands would fit its last digits, and decide alone wherever the
    signal does vary.

    Args:
        features: float [N, 3], v, u, a of each masked block.
        drop: float [N], cost of masking it: 1 = the answer was lost, 0 = nothing, or in between;
            below 0 (masking helped) counts as 0.
        ridge: strength of the penalty; keeps weights finite where a signal separates the outcomes
            or never varies.

    Raises:
        UsageError: no examples, or shapes that do not match.
    """
    x, y = np.asarray(features, np.float64), np.asarray(drop, np.float64)
    if x.ndim != 2 or x.shape[1] != 3 or len(x) == 0 or y.shape != (len(x),):
        raise UsageError(
            "msve-fit",
            f"features {x.shape} and drops {y.shape} do not make a fit.",
            "Features are [N, 3], drops [N], N >= 1.",
        )
    y = np.clip(y, 0.0, 1.0)
    mean, spread = x.mean(axis=0), x.std(axis=0)
    scale = np.where(spread > 1e-12, np.maximum(spread, _LEAST_SPREAD), 1.0)
    design = np.column_stack([(x - mean) / scale, np.ones(len(x))])
    # a trace of penalty on the bias: a finite fit where all outcomes are alike
    penalty = np.diag([ridge, ridge, ridge, 1e-6])
    weights = np.zeros(4)
    for _ in range(100):
        guess = _sigmoid(design @ weights)
        gradient = design.T @ (guess - y) / len(x) + penalty @ weights
        curvature = (design * (guess * (1 - guess))[:, None]).T @ design / len(x) + penalty
        step = np.linalg.solve(curvature, gradient)
        weights -= step / max(1.0, float(np.abs(step).max()))  # at most one unit at a time
        if float(np.abs(step).max()) < 1e-10:
            break
    theta = weights[:3] / scale
    value, confidence, attention = map(float, theta)
    return MSVE((value, confidence, attention), float(weights[3] - theta @ mean))


def rank_correlation(first: ArrayLike, second: ArrayLike) -> float:
    """Spearman's rho: Pearson's correlation of ranks; tied values share their mean rank.

    Args:
        first: float [N].
        second: float [N].

    Returns:
        a number in [-1, 1]; 0 where one of them does not vary.
    """
    a, b = _mean_ranks(np.asarray(first, float)), _mean_ranks(np.asarray(second, float))
    a, b = a - a.mean(), b - b.mean()
    size = math.sqrt(float(a @ a) * float(b @ b))
    return float(np.clip(a @ b / size, -1.0, 1.0)) if size > 0 else 0.0


def _mean_ranks(values: Floats) -> Floats:
    """Ranks from 1, [N]; equal values share the mean of their ranks."""
    _, place, count = np.unique(values, return_inverse=True, return_counts=True)
    ranks: Floats = (np.cumsum(count) - (count - 1) / 2)[place]
    return ranks


def _sigmoid(x: Floats) -> Floats:
    """1 / (1 + e^-x), without overflow, strictly between 0 and 1."""
    half = np.tanh(x / 2)
    result: Floats = np.clip((1 + half) / 2, 1e-13, 1 - 1e-13)
    return result
