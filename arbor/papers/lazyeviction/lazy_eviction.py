"""Tokens that are expected to be read again win: LazyEviction."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np

from arbor.components import ONLY_IF_SET
from arbor.errors import check_settings
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.base import Floats, Tokens
from arbor.retention.policy import Policy, Protect, Trigger

COLD = 32  # tokens read again before W is estimated from them
PERCENTILE = 80  # of the intervals, which W is; the paper's
_FAR = 700.0  # above it exp overflows


@dataclass(frozen=True)
class LazyEviction:
    """A token scores H1 + H2: whether it is due to be read again, and how regularly it is read.

        H1 = 2 sigma(-(t - TS) / MRI)
        H2 = 2 sigma(-(MRI - 1) / window)      fixed
             2 sigma(-1 / (MRI - 1))           paper

    TS is when its attention last reached `Protect.threshold`, MRI the longest time between two such
    times (`Tokens.activated`, `Tokens.recurrence`), t now, all counted in queries that could see
    the token, so that a branch nobody reads does not age.
    A token that was never read again since it was written (MRI 0) has H1 = 1 while t = TS, the
    limit, then 0, and H2 = 0.
    Source: LazyEviction (arXiv 2506.15969), Eqs. 3 to 5. Its H2 grows with the interval, which
    contradicts its text (tokens read at short intervals matter more): ``fixed`` falls with it. For
    an interval of 1, where the paper divides by 0, its H2 is the limit, 0. Differs: one set for all
    heads and layers.

    With `online`, W of ``fixed`` is the 80th percentile of the intervals of the tokens that are
    scored, as the paper's W is of a sample; until `COLD` of them were read again it is `window`.
    Source: its online cold start (Limitations), which fixes W after some requests. Differs: tokens
    that were evicted are not counted, and W changes at every eviction; `Trigger.spare` and
    `Protect.recent` do not change.

    Attributes:
        h1: ``on``, or ``off``: H2 alone (its Table 4).
        h2: ``fixed``, ``paper`` or ``off``: H1 alone.
        window: W of ``fixed``, in queries, >= 1.
        online: whether W is estimated from the tokens scored; with ``fixed`` only.
    """

    observes: ClassVar[bool] = True
    by_activation: ClassVar[bool] = True

    h2: Literal["fixed", "paper", "off"] = "fixed"
    window: int = 25
    h1: Literal["on", "off"] = field(default="on", metadata=ONLY_IF_SET)
    online: bool = field(default=False, metadata=ONLY_IF_SET)

    def __post_init__(self) -> None:
        check_settings(
            self,
            window=(self.window >= 1, "at least 1, such as 25"),
            h1=(
                self.h1 == "on" or (self.h1 == "off" and self.h2 != "off"),
                "on, or off with an h2",
            ),
            online=(not self.online or self.h2 == "fixed", "false, or true with h2=fixed"),
        )

    def scores(self, tokens: Tokens) -> Floats:
        age = (tokens.queries - tokens.activated).astype(float)
        interval = tokens.recurrence.astype(float)
        known = interval > 0
        due = np.where(known, _falling(age / np.maximum(interval, 1)), age == 0)
        if self.h2 == "off":
            return due
        if self.h1 == "off":
            due = np.zeros_like(age)
        if self.h2 == "fixed":
            regular = _falling((interval - 1) / self._width(interval[known]))
        else:
            regular = np.where(interval > 1, _falling(1 / np.maximum(interval - 1, 1)), 0.0)
        return due + np.where(known, regular, 0.0)

    def _width(self, intervals: Floats) -> float:
        """W, from the intervals of the tokens that were read again."""
        if not self.online or len(intervals) < COLD:
            return self.window
        return float(np.percentile(intervals, PERCENTILE, method="higher"))


def _falling(x: Floats) -> Floats:
    """2 sigma(-x): 1 at 0, towards 0."""
    return 2 / (1 + np.exp(np.minimum(x, _FAR)))


POLICY = Policy(
    Pooled(),
    LazyEviction(),
    Protect(recent=25),
    trigger=Trigger(spare=25),
    summary="Keeps tokens read at intervals that are due; alpha 1e-4 by default (LazyEviction).",
)
