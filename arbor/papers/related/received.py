"""Tokens win by the attention they received: TOVA, RaaS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from arbor.retention.allocators.pooled import Pooled
from arbor.retention.base import Floats, Tokens
from arbor.retention.policy import Policy, Protect
from arbor.retention.scorers import TOVA

TOVA_POLICY = Policy(
    Pooled(),
    TOVA(),
    summary="Keeps the tokens of the whole tree that the last query attended to (TOVA).",
)


@dataclass(frozen=True)
class RaaS:
    """A token scores the queries since it was written or its attention last reached alpha, negated.

    Alpha is `Protect.threshold`, calibrated for the model (`arbor.retention.alpha`), else 1e-4.
    RaaS protects the prompt (`Protect.prompt`).
    Source: RaaS (arXiv 2502.11147), which evicts the oldest timestamp. Differs: one set for all
    heads and layers; time is counted in queries that could see the token, so that a branch nobody
    reads does not age; no pages.
    """

    observes: ClassVar[bool] = True
    by_activation: ClassVar[bool] = True

    def scores(self, tokens: Tokens) -> Floats:
        return (tokens.activated - tokens.queries).astype(float)


RAAS_POLICY = Policy(
    Pooled(),
    RaaS(),
    Protect(prompt=True),
    summary="Keeps the prompt and the tokens whose attention last reached alpha, by default 1e-4 (RaaS).",
)
