"""Limits that end a run early: their values, their checks, and the limit on generated tokens."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from arbor.errors import UsageError
from arbor.events import Boundary, Event
from arbor.support.setting import checked_number, setting, settings_of

if TYPE_CHECKING:
    from arbor.retention.policy import Policy

First = Literal["answer", "verified"]
ACCEPTED = 0.5  # least value of a verified path: more likely right than wrong


@dataclass(frozen=True, kw_only=True)
class RunLimits:
    """The limits of one run.

    Attributes:
        timeout: wall seconds; then the best so far is the answer.
        max_tokens: tokens of closed blocks; then the best so far is the answer.
        first: end at the first finished path with an answer (``answer``), or at the first of those
            that the verifier values at 0.5 or more (``verified``).
        confidence: in (0, 1]; end once the confidence in the best answer reaches it: its score, or
            under a voting aggregate the probability that it stays ahead.
    """

    HEADING = "Limits"

    timeout: float | None = setting(
        None, "Most seconds; then the best answer so far.", metavar="S", least=0
    )
    max_tokens: int | None = setting(
        None, "Most tokens in finished thoughts; then the best answer so far.", least=1
    )
    first: First | None = setting(
        None,
        "Stop at the first answer, or at the first that the verifier values at 0.5 or more.",
        shown="set",
    )
    confidence: float | None = setting(
        None,
        "Stop once the best answer has this value or, in a vote, this chance to stay ahead.",
        shown="set",
        least=0,
        most=1,
        above=True,
    )

    @property
    def limits(self) -> dict[str, Any]:
        """The limits given, by name; needed to repeat a run, though not solver settings."""
        found = {name: getattr(self, name) for name in settings_of(RunLimits)}
        return {name: limit for name, limit in found.items() if limit is not None}


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a session.

    Attributes:
        max_depth: thoughts on one path.
        max_expansions: leaves grown in all; None: as many as the controller asks for.
        max_tokens: sampled tokens of closed blocks. A round gets only as many blocks as fit by the
            mean length of the blocks before it; `TokenLimit` ends one whose blocks are longer. The
            first round, before which no length is known, is not cut. None: no limit.
        timeout_s: wall seconds, checked before each ask and each decode step; None: no limit.
        first: end at the first finished path with an answer (``answer``), or at the first of those
            whose value is at least `ACCEPTED` (``verified``); None: no limit.
        confidence: end once the confidence of the best answer reaches this, see
            `arbor.aggregate.base`; None: no limit.
    """

    max_depth: int
    max_expansions: int | None = None
    max_tokens: int | None = None
    timeout_s: float | None = None
    first: First | None = None
    confidence: float | None = None

    def reached_by(self, value: float) -> bool:
        """Whether a finished path with an answer and this value ends the search by `first`."""
        return self.first == "answer" or (self.first == "verified" and value >= ACCEPTED)


def check_destroying(policy: Policy, mode: str, rehydrate: str) -> None:
    """Refuse a policy that destroys tokens where what has left comes back.

    Raises:
        UsageError: these settings contradict each other.
    """
    if policy.destroys and (mode != "lossy" or rehydrate != "off"):
        raise UsageError(
            "mode",
            f"the policy '{policy.name}' destroys tokens (the last tier of the memory hierarchy), and "
            "what has left is computed again in this mode.",
            "Take mode=lossy without rehydrate, or another policy.",
        )


def check_granularity(policy: Policy, mode: str, *, staged: bool = False) -> None:
    """Refuse KV heads with tokens of their own where tokens have to come back one by one, or are
    read in host memory.

    Args:
        policy, mode: of the run.
        staged: whether attention reads KV in host memory.

    Raises:
        UsageError: these settings contradict each other.
    """
    if not policy.by_head:
        return
    if mode != "lossy":
        raise UsageError(
            "granularity",
            "granularity=head: a slot that is kept holds another token in each KV head, and lossless "
            "mode keeps exact KV.",
            f"Take mode=lossy, or {policy.by_token}.",
        )
    if staged:
        raise UsageError(
            "granularity",
            "granularity=head: records in host memory hold whole tokens, and with staging attention "
            "reads them there.",
            f"Leave out staging, or take {policy.by_token}.",
        )


def check_packing(policy: Policy, bits: int | None, staging: bool) -> None:
    """Refuse a policy that packs tokens where there is no tier for them.

    Raises:
        UsageError: these settings contradict each other.
    """
    if policy.packs and (bits is None or not staging):
        raise UsageError(
            "host-bits",
            f"the policy '{policy.name}' packs tokens (packed), and no tier has few bits and is read "
            "where it is.",
            "Give host, host_bits=8 and staging too, or leave out packed.",
        )


def check_count(name: str, limit: Any, least: int = 1) -> int | None:
    """A limit on a number of things; None: unlimited.

    Raises:
        UsageError: not a whole number, or below `least`.
    """
    return None if limit is None else checked_number(name, limit, whole=True, least=least)


class TokenLimit:
    """A listener that ends the search once so many tokens of its closed blocks were sampled.

    Args:
        most: tokens.
        stop: ends the search; called at every boundary from then on.
    """

    def __init__(self, most: int, stop: Callable[[], None]) -> None:
        self._left = most
        self._stop = stop

    def __call__(self, event: Event) -> None:
        """Counts the tokens of a closed block."""
        if isinstance(event, Boundary):
            self._left -= len(event.ids) - event.given
            if self._left <= 0:
                self._stop()
