"""Limits that end a run or a path early, and their checks."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

from arbor.support.setting import changed_settings, checked_number, checked_values, setting
from arbor.tasks.base import BlockLimits
from arbor.tasks.step_format import StepFormat

First = Literal["answer", "verified"]
ACCEPTED = 0.5  # least value of a verified path: more likely right than wrong


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """The limits of one run.

    Attributes:
        timeout: wall seconds since the search began, those in which it waited for its turn in the
            engine not counted; then the best so far is the answer.
        max_tokens: tokens of closed blocks; after the round in which they are reached, the best so
            far is the answer.
        first: end at the first finished path with an answer (``answer``), or at the first of those
            that the verifier values at 0.5 or more (``verified``).
        confidence: in (0, 1]; end once the confidence in the best answer reaches it: its score, or
            under a voting aggregate the probability that it stays ahead.
    """

    HEADING = "Limits"

    timeout: float | None = setting(
        None, "Most seconds; then the best answer so far.", metavar="S", least=0, requested=True
    )
    max_tokens: int | None = setting(
        None, "Tokens of thoughts after whose round the best answer so far is taken.", least=1
    )
    first: First | None = setting(
        None,
        "Stop at the first answer, or at the first that the verifier values at 0.5 or more.",
        shown="set",
        requested=True,
    )
    confidence: float | None = setting(
        None,
        "Stop once the best answer has this value or, in a vote, this chance to stay ahead.",
        shown="set",
        least=0,
        most=1,
        above=True,
        requested=True,
    )

    @property
    def limits(self) -> dict[str, Any]:
        """The limits given, by name; needed to repeat a run, though not solver settings."""
        return changed_settings(self, RunLimits)


@dataclass(frozen=True)
class SessionLimits(RunLimits):
    """The limits of a session.

    A round gets only as many blocks as fit `max_tokens` by the mean length of the blocks before it,
    and the first round, before which no length is known, is not cut. A round whose blocks are
    longer comes to its end: which of them end first depends on the KV budget, and the tree may not.
    `timeout` is checked before each ask and each decode step. Up to half of either is kept until a
    path has an answer; with it one path goes on alone.

    Attributes:
        max_depth: thoughts on one path.
        max_expansions: leaves grown in all; None: as many as the controller asks for.
    """

    max_depth: int
    max_expansions: int | None = None

    def reached_by(self, value: float) -> bool:
        """Whether a finished path with an answer and this value ends the search by `first`."""
        return self.first == "answer" or (self.first == "verified" and value >= ACCEPTED)


@dataclass(frozen=True, kw_only=True)
class BoundarySettings:
    """Limits of paths instead of the task's; None keeps the task's.

    Attributes:
        max_depth: thoughts per path.
        path_tokens: tokens per path, the prompt not counted.
        step_tokens: tokens per thought.
        step_format: what every thought has to match: ``regex:PATTERN``, ``json:SCHEMA``,
            ``json:FILE`` or a JSON schema as a mapping; needs ``arbor-search[structured]``.
    """

    max_depth: int | None = setting(
        None,
        "Most thoughts on one path; default: the task's.",
        least=1,
        recorded="always",
        requested=True,
    )
    path_tokens: int | None = setting(
        None,
        "Most tokens of one path; default: the task's.",
        shown="short",
        least=1,
        requested=True,
    )
    step_tokens: int | None = setting(
        None,
        "Most tokens in one thought; default: the task's.",
        least=1,
        recorded="always",
        requested=True,
    )
    step_format: StepFormat | None = setting(
        None,
        "Format of every thought: regex:PATTERN, json:SCHEMA or json:FILE.",
        shown="set",
        metavar="KIND:TEXT",
        read=StepFormat.parse,
    )

    def boundary_in(self, usual: BlockLimits) -> BlockLimits:
        """A task's boundary with these limits.

        Raises:
            UsageError: a format that cannot be used.
        """
        form = usual.form if self.step_format is None else self.step_format
        if form is not None and form is not usual.form:
            from arbor.engine.grammar import check_format

            check_format(form)
        return dataclasses.replace(
            usual,
            max_depth=self.max_depth or usual.max_depth,
            max_tokens=self.step_tokens or usual.max_tokens,
            path_tokens=self.path_tokens or usual.path_tokens,
            form=form,
        )


def limited(
    usual: BlockLimits,
    max_depth: int | None = None,
    step_tokens: int | None = None,
    path_tokens: int | None = None,
) -> BlockLimits:
    """A boundary with other limits; None keeps one.

    Raises:
        UsageError: a limit that is not a whole number of at least 1.
    """
    given = {"max_depth": max_depth, "step_tokens": step_tokens, "path_tokens": path_tokens}
    checked = dict(checked_values(BoundarySettings, "a path", given))
    return BoundarySettings(**checked).boundary_in(usual)


def check_count(name: str, limit: Any) -> int | None:
    """A limit on a number of things; None: unlimited.

    Raises:
        UsageError: not a whole number of at least 1.
    """
    return None if limit is None else checked_number(name, limit, whole=True, least=1)
