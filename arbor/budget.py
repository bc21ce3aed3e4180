"""The KV budget: parsing, slots for one search, feasibility."""

from __future__ import annotations

import math
import re
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from functools import partial
from numbers import Real
from typing import Any, Literal

from arbor.errors import BudgetInfeasible, BudgetRange

Unit = Literal["ratio", "tokens", "bytes"]

DECODED = 4  # tokens of a block that are on the device at least while it is decoded

_FORMS = "For an absolute size write 8192tok or 6GiB."
_BYTES = {
    "b": 1,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
}
_WHOLE = r"[1-9][0-9]{0,2}(?:,[0-9]{3})+|[0-9]+(?:_[0-9]+)*"
_SIZE = re.compile(rf"((?:{_WHOLE})(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]+)")
_COMMA = re.compile(r"([0-9]{1,9}),([0-9]{1,9})\s*([A-Za-z]*)")  # for a decimal point
_BINARY = ("TiB", "GiB", "MiB", "KiB")


@dataclass(frozen=True, slots=True)
class Footprint:
    """The KV that a search can need, in tokens; weights are never counted.

    Attributes:
        prompt_tokens: tokens at the root.
        step_tokens: most tokens of one block.
        max_depth: most blocks on one path.
        blocks: most blocks the search creates, root excluded.
        question_tokens: tokens appended to one path for a while: a verifier's question, or one for
            proposals with its completion; 0 where there is neither.
        protected_tokens: lossy mode: tokens of a path that always stay; None: paths stay whole.
        proposals: most questions for proposals at a time; 0 where thoughts are sampled.
        staging_tokens: slots through which attention reads KV in host memory; with such a buffer a
            path may be longer than the budget. 0: none.
        path_limit: most tokens of a path after the prompt; None: those of `max_depth` blocks.
        first_question: `question_tokens` after one thought, where longer paths have longer
            questions; None: as many.
    """

    prompt_tokens: int
    step_tokens: int
    max_depth: int
    blocks: int
    question_tokens: int = 0
    protected_tokens: int | None = None
    proposals: int = 0
    staging_tokens: int = 0
    path_limit: int | None = None
    first_question: int | None = None

    def __post_init__(self) -> None:
        assert self.prompt_tokens >= 0, f"prompt_tokens={self.prompt_tokens} is negative"
        assert self.question_tokens >= 0, f"question_tokens={self.question_tokens} is negative"
        assert self.step_tokens >= 1, f"step_tokens={self.step_tokens} is below 1"
        assert self.max_depth >= 1, f"max_depth={self.max_depth} is below 1"
        assert self.blocks >= 1, f"blocks={self.blocks} is below 1"

    @property
    def full_tokens(self) -> int:
        """The worst case: most tokens of full retention, prompt + blocks x step + one question, or
        all for proposals; and the staging buffer."""
        asked = max(1, self.proposals) * self.question_tokens
        tree = self.prompt_tokens + self.blocks * self.step_tokens
        return tree + asked + self.staging_tokens

    @property
    def path_blocks(self) -> int:
        """Blocks on the longest path: `max_depth`, or fewer if the search never makes so many."""
        return min(self.max_depth, self.blocks)

    @property
    def path_tokens(self) -> int:
        """Positions of the longest path and a question: prompt + depth x step, or `path_limit`
        where that is less, + question."""
        steps = self.path_blocks * self.step_tokens
        most = self.path_limit if self.is_limited and self.path_limit else steps
        return self.prompt_tokens + most + self.question_tokens

    @property
    def is_limited(self) -> bool:
        """Whether `path_limit` ends a path before its blocks do."""
        return self.path_limit is not None and self.path_limit < self.path_blocks * self.step_tokens

    def levers(self, context: int, resized: Callable[..., Footprint] | None = None) -> list[str]:
        """Flags that each limit the longest path to `context` positions.

        Args:
            context: of the model.
            resized: the footprint with another `max_depth`, `step_tokens` or `path_limit`, given by
                name; None: its questions stay as long.
        """
        flags = {"--max-depth": "max_depth", "--step-tokens": "step_tokens"}
        if self.is_limited:
            flags = {"--path-tokens": "path_limit"}
        resized = resized or partial(replace, self)

        def most(name: str) -> int:
            sizes = range(1, min(getattr(self, name), context) + 1)
            return bisect_right(
                sizes, context, key=lambda size: resized(**{name: size}).path_tokens
            )

        return [f"{flag} {found}" for flag, name in flags.items() if (found := most(name))]

    @property
    def first_tokens(self) -> int:
        """Positions of the prompt, one thought and a question."""
        return self.prompt_tokens + self.first_step + self.first_asked

    @property
    def first_step(self) -> int:
        """Most tokens of one thought: `step_tokens`, or `path_limit` where that is less."""
        return min(self.step_tokens, self.path_limit or self.step_tokens)

    @property
    def first_asked(self) -> int:
        """Tokens of the question after one thought."""
        return self.question_tokens if self.first_question is None else self.first_question

    @property
    def smallest_tokens(self) -> int:
        """Slots without which a search cannot begin: `enough_tokens` of its first thought."""
        return self._least(self.first_tokens, self.first_asked)

    @property
    def enough_tokens(self) -> int:
        """Slots that are enough for any tree of the search: of the longest path; in lossy mode, of
        what is protected of it and `decoded_tokens`; with a staging buffer, of that and the newest
        tokens."""
        return self._least(self.path_tokens, self.question_tokens)

    def _least(self, whole: int, asked: int) -> int:
        if self.staging_tokens:
            # with the buffer a path needs its last tokens, and new ones or a question after them
            newest = DECODED + max(self.decoded_tokens, asked)
            return self.staging_tokens + min(whole, newest)
        if self.protected_tokens is None:
            return whole
        return min(whole, self.protected_tokens + self.decoded_tokens + asked)

    @property
    def decoded_tokens(self) -> int:
        """Slots that a block needs in lossy mode while it is decoded; its other tokens may go."""
        return min(self.step_tokens, DECODED)


@dataclass(frozen=True, slots=True)
class Plan:
    """The budget of one search in slots, known before anything loads.

    Attributes:
        budget_tokens: slots the search may hold at any instant, at most `full_tokens`; for a part,
            those of full retention, of which it is one.
        full_tokens: slots full retention could need: the worst case.
        smallest_tokens: slots below which the search cannot begin.
        enough_tokens: slots that are enough for any tree of the search.
        bytes_per_token: KV bytes of one token over all layers.
        prompt_tokens, step_tokens, max_depth, blocks, question_tokens, proposals: as in
            `Footprint`.
        part: the part kept of what full retention holds; None: the budget is an amount.
        host_tokens, disk_tokens: tokens that these tiers may hold of what has left the device.
        kv_dtype: of the KV, as in `Solver`.
        host_bits: of a number of KV in host memory; 0: full precision.
        host_token_bytes: bytes of a token there, scales included; 0: `bytes_per_token`.
        staging_tokens: as in `Footprint`.
    """

    budget_tokens: int
    full_tokens: int
    smallest_tokens: int
    enough_tokens: int
    bytes_per_token: int
    prompt_tokens: int
    step_tokens: int
    max_depth: int
    blocks: int
    question_tokens: int
    part: float | None = None
    host_tokens: int = 0
    disk_tokens: int = 0
    kv_dtype: str = "auto"
    proposals: int = 0
    host_bits: int = 0
    host_token_bytes: int = 0
    staging_tokens: int = 0

    @property
    def most_held(self) -> int:
        """Most slots of blocks and questions under full retention: the worst case without the
        staging buffer."""
        return self.full_tokens - self.staging_tokens

    @property
    def fraction(self) -> Fraction | None:
        """The part as the decimal in its text, so that 0.29 of 100 is 29; None: an amount."""
        return None if self.part is None else Fraction(repr(self.part))

    @property
    def room_tokens(self) -> int:
        """Slots for controllers that ask how many blocks may decode at once: the budget, or the
        part of the worst case."""
        if self.fraction is None:
            return self.budget_tokens
        return max(self.smallest_tokens, math.floor(self.fraction * self.full_tokens))

    @property
    def ratio(self) -> float:
        """The part kept: as given, or an amount as a part of the worst case, in (0, 1]."""
        if self.part is not None:
            return self.part
        return min(1.0, self.budget_tokens / self.full_tokens)

    @property
    def budget_bytes(self) -> int:
        """KV bytes of the budget; weights excluded."""
        return self.budget_tokens * self.bytes_per_token

    @property
    def full_bytes(self) -> int:
        """KV bytes of full retention; weights excluded."""
        return self.full_tokens * self.bytes_per_token

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived numbers, JSON-able; the part, lower tiers, proposals and another
        dtype of the KV only where there are such."""
        tiers = ("host_tokens", "host_bits", "host_token_bytes", "staging_tokens", "disk_tokens")
        counts = (*tiers, "proposals")
        numbers = {
            **{name: value for name, value in asdict(self).items() if name not in counts},
            "ratio": self.ratio,
            "budget_bytes": self.budget_bytes,
            "full_bytes": self.full_bytes,
        }
        some = {name: getattr(self, name) for name in counts}
        numbers |= {name: count for name, count in some.items() if count}
        if self.part is None:
            del numbers["part"]
        if self.kv_dtype == "auto":
            del numbers["kv_dtype"]
        return numbers


@dataclass(frozen=True, slots=True)
class Budget:
    """How much KV may be resident on the device.

    Attributes:
        unit: ``ratio``: the part *kept* of what full retention of the same search holds at the same
            time, and at least one expansion; ``tokens``; or ``bytes`` of KV (weights, activations
            and workspace are not KV and not counted).
        amount: in (0, 1] for a ratio, where 1 is everything; a whole number >= 1 otherwise.
    """

    unit: Unit
    amount: float

    def __post_init__(self) -> None:
        if self.unit == "ratio":
            if not 0 < self.amount <= 1:  # also refuses nan
                raise _not_a_ratio(_plain(self.amount), self.amount)
        elif not (1 <= self.amount < math.inf and self.amount == math.floor(self.amount)):
            raise BudgetRange(
                "budget-range",
                f"--budget: {_plain(self.amount)} {self.unit} is not a whole number of at least 1.",
                _FORMS,
                value=_finite(self.amount),
            )

    @classmethod
    def absolute(cls, value: Budget | int | str, *units: Unit) -> Budget | None:
        """A size in one of some units as a user writes it; None: not one.

        Args:
            value: as in `parse`.
            units: tokens, bytes, or both.
        """
        try:
            size = cls.parse(value)
        except BudgetRange:
            return None
        return size if size.unit in units else None

    @classmethod
    def parse(cls, value: Budget | float | str) -> Budget:
        """A budget as a user writes it.

        Args:
            value: ``full``; a ratio ``0 < x <= 1`` of full retention (the part kept; 1 is
                ``full``); ``8192tok``; or KV bytes as ``6GiB``, ``512MiB``, ``1.5GB`` (B, KiB to
                TiB, KB to TB; any case). Digits may be grouped: ``8,192tok``, ``8_192tok``.

        Raises:
            BudgetRange: any other value; suggests the likely form.
        """
        if isinstance(value, Budget):
            return value
        if isinstance(value, Real) and not isinstance(value, bool):
            text = repr(value) if isinstance(value, int) else repr(float(value))
        elif isinstance(value, str):
            text = value.strip()
        else:
            raise _unreadable(str(value))
        if text.lower() == "full":
            return cls("ratio", 1.0)
        match = _SIZE.fullmatch(text)
        if match is not None and not math.isinf(_number(match[1])):
            number, unit = Fraction(match[1].replace(",", "").replace("_", "")), match[2].lower()
            if unit in ("tok", "token", "tokens"):
                if number < 1 or number.denominator != 1:
                    raise _too_small(text, "a whole number of tokens, at least 1")
                return cls("tokens", int(number))
            if unit in _BYTES:
                size = math.floor(number * _BYTES[unit])
                if size < 1:
                    raise _too_small(text, "at least one byte")
                return cls("bytes", size)
            raise _unreadable(text, _nearest_unit(match[1], unit))
        if (comma := _COMMA.fullmatch(text)) is not None:
            point, unit = float(f"{comma[1]}.{comma[2]}"), comma[3]
            if unit.lower() in _BYTES:
                raise _unreadable(text, f"Did you mean {point:g}{unit}?")
            if not unit and 0 < point < 1:
                raise _unreadable(text, f"Did you mean {point:g} (keep {100 * point:g} %)?")
            if not unit and not re.fullmatch(_WHOLE, text):
                raise _not_a_ratio(text, point)
        ratio = _number(text)
        if 0 < ratio <= 1:
            return cls("ratio", ratio)
        if not math.isnan(ratio):
            raise _not_a_ratio(text, ratio)
        percent = _number(text.removesuffix("%")) if text.endswith("%") else math.nan
        guess = (
            f"Did you mean {percent / 100:g} (keep {percent:g} %)?" if 0 < percent <= 100 else ""
        )
        raise _unreadable(text, guess)

    def __str__(self) -> str:
        """The form that `parse` reads back to an equal budget."""
        if self.unit == "ratio":
            return "full" if self.amount == 1 else repr(self.amount)
        amount = int(self.amount)
        if self.unit == "tokens":
            return f"{amount}tok"
        for unit in _BINARY:
            if amount % _BYTES[unit.lower()] == 0:
                return f"{amount // _BYTES[unit.lower()]}{unit}"
        return f"{amount}B"

    @property
    def keeps_all(self) -> bool:
        """Whether it is full retention."""
        return self.unit == "ratio" and self.amount == 1

    def tokens(self, full_tokens: int, bytes_per_token: int) -> int:
        """The budget in slots, where full retention is known to hold so many.

        A ratio is read as the decimal in its text, so that 0.29 of 100 is 29; it rounds down, to
        one token at least. Bytes round down. The result is at most full retention.

        Args:
            full_tokens: slots of full retention.
            bytes_per_token: KV bytes of one token over all layers, >= 1.
        """
        if self.unit == "ratio":
            tokens = max(1, math.floor(Fraction(repr(float(self.amount))) * full_tokens))
        elif self.unit == "tokens":
            tokens = int(self.amount)
        else:
            tokens = int(self.amount) // bytes_per_token
        return min(tokens, full_tokens)

    def plan(self, footprint: Footprint, bytes_per_token: int) -> Plan:
        """The budget in slots for one search. A ratio always works: it gives way to one expansion.

        Args:
            footprint: the KV the search can need.
            bytes_per_token: KV bytes of one token over all layers, >= 1.

        Raises:
            BudgetInfeasible: an amount in which the search cannot begin; names the smallest number
                of tokens, and other remedies. `needed` is `Footprint.smallest_tokens`.
        """
        assert bytes_per_token >= 1, f"bytes_per_token={bytes_per_token} is below 1"
        is_part = self.unit == "ratio"
        full = footprint.full_tokens
        tokens = full if is_part else self.tokens(full, bytes_per_token)
        if tokens >= footprint.smallest_tokens:
            return Plan(
                budget_tokens=tokens,
                full_tokens=full,
                smallest_tokens=footprint.smallest_tokens,
                enough_tokens=footprint.enough_tokens,
                bytes_per_token=bytes_per_token,
                prompt_tokens=footprint.prompt_tokens,
                step_tokens=footprint.step_tokens,
                max_depth=footprint.max_depth,
                blocks=footprint.blocks,
                question_tokens=footprint.question_tokens,
                part=float(self.amount) if is_part else None,
                proposals=footprint.proposals,
                staging_tokens=footprint.staging_tokens,
            )
        if footprint.staging_tokens:
            parts = f"{footprint.staging_tokens:,} staging + the newest tokens"
        elif footprint.smallest_tokens == footprint.first_tokens:
            parts = f"{footprint.prompt_tokens:,} prompt + {footprint.first_step:,}"
        else:
            parts = f"{footprint.protected_tokens:,} protected + {footprint.decoded_tokens:,}"
        if footprint.first_asked:
            parts += f" + {footprint.first_asked:,} question"
        raise BudgetInfeasible(
            footprint.smallest_tokens,
            tokens,
            f"the first thought ({parts})",
            f"Smallest workable: {footprint.smallest_tokens}tok, or a ratio as in --budget 0.25. "
            f"{self._levers(footprint, tokens)}",
        )

    def _levers(self, footprint: Footprint, tokens: int) -> str:
        """Other remedies; with a number only where it is certain to work.

        Steps of less than half the length are not suggested: thoughts cut so short hold no answer.
        """
        if footprint.staging_tokens:
            return "Or: a smaller staging."
        if footprint.smallest_tokens < footprint.first_tokens:
            return "Or: fewer protected tokens, as with --set recent=0."
        step = tokens - footprint.prompt_tokens - footprint.first_asked
        if 2 * step >= footprint.step_tokens:
            return f"Or: --step-tokens {step}."
        return "Or: a shorter prompt."


def _number(text: str) -> float:
    """The plain decimal number, or nan."""
    try:
        return float(text.replace(",", "")) if "_" not in text else math.nan
    except ValueError:
        return math.nan


def _plain(value: float) -> str:
    """25 rather than 25.0."""
    return f"{value:.12g}"


def _finite(value: float) -> float | str:
    return value if math.isfinite(value) else str(value)


def _not_a_ratio(text: str, value: float) -> BudgetRange:
    if 1 < value <= 100:
        guess = f"Did you mean {value / 100:g} (keep {value:g} %)? "
    elif value > 100 and math.isfinite(value) and value == math.floor(value):
        guess = f"Did you mean {value:.0f}tok? "
    else:
        guess = ""
    return BudgetRange(
        "budget-range",
        f"--budget {text}: a ratio lies in (0, 1] and is the part KEPT.",
        f"{guess}{_FORMS} (kvpress compression_ratio r = budget 1-r)",
        value=_finite(value),
    )


def _too_small(text: str, needed: str) -> BudgetRange:
    return BudgetRange("budget-range", f"--budget {text}: it must be {needed}.", _FORMS, value=text)


def _unreadable(text: str, guess: str = "") -> BudgetRange:
    return BudgetRange(
        "budget-range",
        f"--budget {text}: neither a ratio in (0, 1] (the part KEPT) nor a size.",
        f"{guess} {_FORMS}".strip(),
        value=text,
    )


def _nearest_unit(number: str, unit: str) -> str:
    """A guess for an unknown unit: 6G is 6GiB, 8t and 8tk are 8tok; earlier 0.25max was a ratio."""
    if unit == "max":
        return f"Did you mean {number}?"
    if unit in ("t", "to", "tk", "toks", "slots"):
        return f"Did you mean {number}tok?"
    if unit[0] in "kmg":
        return f"Did you mean {number}{unit[0].upper()}iB?"
    return ""
