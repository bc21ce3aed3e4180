"""LevelRule: whether a span that several rows share is read once for all of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from arbor.errors import UsageError
from arbor.feature import hook_for
from arbor.support.setting import setting

BUCKET = 64  # tokens of shared spans that are judged alike
NEVER = 0
KV_PROBE = ("kept", "measure")  # settings that ask for what was measured on this machine


@dataclass(frozen=True, slots=True)
class LevelRule:
    """What makes a shared span a level of the cascade of its own, rather than a part of each row's
    reads.

    Attributes:
        min_saved_reads: key reads that it must save, and more than that.
        least_rows: the fewest rows for which it pays, by length in buckets of 64 tokens (the last
            for all longer spans; `NEVER`: for none), as a KV probe measured; empty: not
            measured. It replaces `min_saved_reads`.
        most_levels: spans within as many others are never levels; None: there is no limit.
    """

    min_saved_reads: int = 0
    least_rows: tuple[int, ...] = ()
    most_levels: int | None = None

    def pays(self, rows: int, tokens: int, level: int = 0) -> bool:
        """Whether a span of so many tokens, shared by so many rows, becomes a level below so many
        others."""
        if self.most_levels is not None and level >= self.most_levels:
            return False
        if not self.least_rows:
            return (rows - 1) * tokens > self.min_saved_reads
        least = self.least_rows[min(tokens // BUCKET, len(self.least_rows) - 1)]
        return least != NEVER and rows >= max(2, least)

    @classmethod
    def parse(cls, text: str) -> Self:
        """``8,4,2`` -> at least 8 rows below 64 tokens, 4 below 128, else 2.

        Raises:
            UsageError: anything else.
        """
        try:
            rows = tuple(int(each) for each in text.split(","))
        except ValueError:
            rows = ()
        if not rows or min(rows) < 0:
            raise UsageError(
                "kv-probe",
                f"unknown KV probe '{text}'.",
                "Known: kept, measure, off, or rows for spans below 64, 128, … tokens, as in 8,4,2.",
            )
        return cls(least_rows=rows)

    def __str__(self) -> str:
        return ",".join(map(str, self.least_rows))


def check_kv_probe(text: str) -> str:
    """A way to choose the rule.

    Raises:
        UsageError: neither one of the words nor a rule.
    """
    if text not in (*KV_PROBE, "off"):
        LevelRule.parse(text)
    if text == "measure":
        hook_for("kv_probe", text)
    return text


@dataclass(frozen=True, kw_only=True)
class LevelSettings:
    """Which rule a solver takes.

    Attributes:
        kv_probe: from how many rows on a shared span is read once for all of them: ``kept``, as
            was measured for this model on this machine, if it was; ``measure``: now; ``off``: by a
            fixed rule, as always if `deterministic`; or the numbers of a measurement (``8,4,2``).
    """

    HEADING = "Model"

    kv_probe: str = setting(
        "kept",
        "When rows read a shared span once: as measured before (kept), measure, off, or 8,4,2.",
        shown="set",
        read=check_kv_probe,
    )
