"""Limits that end a run early: their values, their checks, and the limit on generated tokens."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TypedDict, cast, get_args

from arbor.engine.mode_names import SIMILAR, Share
from arbor.errors import UsageError
from arbor.events import Boundary, Event

if TYPE_CHECKING:
    from arbor.retention.policy import Policy

First = Literal["answer", "verified"]
ACCEPTED = 0.5  # least value of a verified path: more likely right than wrong


class RunLimits(TypedDict):
    """The limits of one run, see `Request`."""

    timeout: float | None
    max_tokens: int | None
    first: First | None
    confidence: float | None


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
            `arbor.aggregate.confidence`; None: no limit.
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


def check_rehydration(mode: str, rehydrate: str | None) -> None:
    """Refuses lossless search without rehydration.

    Raises:
        UsageError: these settings contradict each other.
    """
    if mode == "lossless" and rehydrate == "off":
        raise UsageError(
            "rehydrate", "lossless needs what was evicted back.", "Take mode=lossy, or selective."
        )


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
            "Take --mode lossy without --rehydrate, or another --policy.",
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
            f"Take --mode lossy, or {policy.by_token}.",
        )
    if staged:
        raise UsageError(
            "granularity",
            "granularity=head: records in host memory hold whole tokens, and with --staging "
            "attention reads them there.",
            f"Leave out --staging, or take {policy.by_token}.",
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
            "Give --host, --host-bits 8 and --staging too, or leave out packed.",
        )


def check_staging(given: bool, mode: str, rehydrate: str) -> None:
    """Refuse a staging buffer where attention cannot read KV in host memory.

    Raises:
        UsageError: these settings contradict each other.
    """
    if given and rehydrate != ("selective" if mode == "lossless" else "off"):
        raise UsageError(
            "staging",
            "attention reads KV in host memory in lossless mode with selective rehydration, and in "
            "lossy mode with none.",
            "Leave out --staging, or --rehydrate.",
        )


def check_tiers(
    given: bool, rehydrate: str, *, host_bits: int | None, mode: str, kv_dtype: str
) -> None:
    """Refuse lower tiers where nothing comes back from them, and packed ones where they would break
    a promise.

    Args:
        given: whether there are tiers that KV comes back from.
        rehydrate, host_bits, mode, kv_dtype: as in `Solver`.

    Raises:
        UsageError: these settings contradict each other.
    """
    if host_bits is not None and mode == "lossless":
        raise UsageError(
            "host-bits",
            f"--host-bits {host_bits} rounds KV, and lossless mode promises exact KV.",
            "Leave it out, or take --mode lossy --rehydrate selective, or --staging there.",
        )
    if host_bits is not None and kv_dtype != "auto":
        raise UsageError(
            "host-bits",
            f"--host-bits {host_bits} quantises KV in full precision, and it is {kv_dtype}.",
            "Leave out --host-bits, or --kv-dtype.",
        )
    if given and rehydrate == "off":
        raise UsageError(
            "tier-unused",
            "KV that leaves the device never comes back in this mode.",
            "Leave out --host and --disk, or take --rehydrate selective.",
        )


def check_sharing(share: str, mode: str, rehydrate: str | None) -> None:
    """Refuses an unknown kind of sharing, and similar prompts in a search that promises the exact
    result.

    Raises:
        UsageError: unknown, or these settings contradict each other.
    """
    if share not in get_args(Share):
        known = ", ".join(get_args(Share))
        raise UsageError("share", f"unknown sharing '{share}'.", f"Known: {known}.")
    if share in SIMILAR and (mode != "lossy" or rehydrate not in (None, "off")):
        raise UsageError(
            "share",
            f"share={share} has a search read another prompt than its own, for good.",
            "Take mode=lossy and no rehydration with it, or share=exact.",
        )


def check_seed(seed: Any) -> int:
    """A seed.

    Raises:
        UsageError: not a whole number, or below 0.
    """
    number = _whole(seed)
    if number is None or number < 0:
        raise UsageError("seed", f"seed is {seed!r}.", "It is a whole number, 0 or more.")
    return number


def check_count(name: str, limit: Any, least: int = 1) -> int | None:
    """A limit on a number of things; None: unlimited.

    Raises:
        UsageError: not a whole number, or below `least`.
    """
    if limit is None:
        return None
    number = _whole(limit)
    if number is None or number < least:
        raise UsageError(
            "limit", f"{name} is {limit!r}.", f"It is a whole number, {least} or more."
        )
    return number


def check_timeout(seconds: Any) -> float | None:
    """A limit on wall time, in seconds; None: unlimited.

    Raises:
        UsageError: not a number, or below 0.
    """
    if seconds is None:
        return None
    try:
        number = math.nan if isinstance(seconds, str | bool) else float(seconds)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not number >= 0:
        raise UsageError("limit", f"timeout is {seconds!r}.", "It is 0 seconds or more.")
    return number


def check_first(first: Any) -> First | None:
    """A limit on the first solution; None: no limit.

    Raises:
        UsageError: neither ``answer`` nor ``verified``.
    """
    known = get_args(First)
    if first is None:
        return None
    for each in known:
        if first == each:
            return cast(First, each)
    raise UsageError("limit", f"first is {first!r}.", f"It is {' or '.join(known)}.")


def check_confidence(confidence: Any) -> float | None:
    """A limit on the confidence of the best answer; None: no limit.

    Raises:
        UsageError: not a number above 0 and at most 1.
    """
    if confidence is None:
        return None
    try:
        number = math.nan if isinstance(confidence, str | bool) else float(confidence)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not 0 < number <= 1:
        message = f"confidence is {confidence!r}."
        raise UsageError("limit", message, "It is a number above 0 and at most 1.")
    return number


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


def _whole(value: Any) -> int | None:
    """A whole number as an int; None for anything else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
