"""The KV budget: parsing, slots for one search, feasibility."""

from __future__ import annotations

import math
import re
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from numbers import Real
from typing import Any, Literal

from arbor.errors import BudgetInfeasible, BudgetRange

Unit = Literal["ratio", "max", "tokens", "bytes"]

DECODED = 4  # tokens of a block that are on the device at least while it is decoded

_FORMS = "For an absolute size write 8192tok or 6GiB."
_MAX = "max"
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
_SIZE = re.compile(r"([0-9][0-9_,]*(?:\.[0-9]+)?|\.[0-9]+)\s*([A-Za-z]+)")
_RESOLVED = re.compile(r"(\S+)\s+of\s+prompt\s*\+\s*([0-9]{1,15})", re.IGNORECASE)
_BINARY = ("TiB", "GiB", "MiB", "KiB")


@dataclass(frozen=True, slots=True)
class Footprint:
    """The KV a search can need and is expected to need, in tokens; weights are never counted.

    Attributes:
        prompt_tokens: tokens at the root.
        step_tokens: most tokens of one block.
        max_depth: most blocks on one path.
        blocks: most blocks the search creates, root excluded.
        question_tokens: tokens appended to one path for a while: a verifier's question, or one for
            proposals with its completion; 0 where there is neither.
        protected_tokens: lossy mode: tokens of a path that always stay; None: paths stay whole.
        beyond_prompt: tokens that full retention of this kind of search is expected to hold at its
            peak, the prompt excluded; None: not measured.
        searches: number of measured searches behind `beyond_prompt`.
        proposals: most questions for proposals at a time; 0 where thoughts are sampled.
        staging_tokens: slots through which attention reads KV in host memory; with such a buffer a
            path may be longer than the budget. 0: none.
        path_limit: most tokens of a path after the prompt; None: those of `max_depth` blocks.
    """

    prompt_tokens: int
    step_tokens: int
    max_depth: int
    blocks: int
    question_tokens: int = 0
    protected_tokens: int | None = None
    beyond_prompt: int | None = None
    searches: int = 0
    proposals: int = 0
    staging_tokens: int = 0
    path_limit: int | None = None

    def __post_init__(self) -> None:
        assert self.prompt_tokens >= 0, f"prompt_tokens={self.prompt_tokens} is negative"
        assert self.question_tokens >= 0, f"question_tokens={self.question_tokens} is negative"
        assert self.step_tokens >= 1, f"step_tokens={self.step_tokens} is below 1"
        assert self.max_depth >= 1, f"max_depth={self.max_depth} is below 1"
        assert self.blocks >= 1, f"blocks={self.blocks} is below 1"
        assert (self.beyond_prompt or 0) >= 0, f"beyond_prompt={self.beyond_prompt} is negative"

    @property
    def full_tokens(self) -> int:
        """The worst case: most tokens of full retention, prompt + blocks x step + one question, or
        all for proposals; and the staging buffer."""
        asked = max(1, self.proposals) * self.question_tokens
        tree = self.prompt_tokens + self.blocks * self.step_tokens
        return tree + asked + self.staging_tokens

    @property
    def expected_tokens(self) -> int | None:
        """Expected peak of full retention, at most the worst case; None: not measured."""
        if self.beyond_prompt is None:
            return None
        most = self.prompt_tokens + self.beyond_prompt + self.staging_tokens
        return max(1, min(most, self.full_tokens))

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

    def levers(self, context: int) -> list[str]:
        """Flags that each limit the longest path to `context` positions."""
        room = context - self.prompt_tokens - self.question_tokens
        flags = {"--max-depth": room // self.step_tokens, "--step-tokens": room // self.path_blocks}
        if self.is_limited:
            flags = {"--path-tokens": room}
        return [f"{flag} {most}" for flag, most in flags.items() if most >= 1]

    @property
    def smallest_tokens(self) -> int:
        """Slots of one path; in lossy mode, of its protected tokens and `decoded_tokens`; with a
        staging buffer, of that and the newest tokens."""
        whole = self.path_tokens
        if self.staging_tokens:
            return self.staging_tokens + min(whole, self.newest_tokens)
        if self.protected_tokens is None:
            return whole
        return min(whole, self.protected_tokens + self.decoded_tokens + self.question_tokens)

    @property
    def newest_tokens(self) -> int:
        """Slots that a path needs with a staging buffer: its last tokens, and new ones or a
        question after them."""
        return DECODED + max(self.decoded_tokens, self.question_tokens)

    @property
    def decoded_tokens(self) -> int:
        """Slots that a block needs in lossy mode while it is decoded; its other tokens may go."""
        return min(self.step_tokens, DECODED)


@dataclass(frozen=True, slots=True)
class Plan:
    """The budget of one search in slots, known before anything loads.

    Attributes:
        budget_tokens: slots the search may hold at any instant; at most `full_tokens`.
        full_tokens: slots full retention could need: the worst case.
        smallest_tokens: slots below which the search cannot run.
        bytes_per_token: KV bytes of one token over all layers.
        prompt_tokens, step_tokens, max_depth, blocks, question_tokens, proposals: as in
            `Footprint`.
        expected_tokens: slots full retention is expected to hold at its peak; None: not measured.
        searches: number of measured searches behind `expected_tokens`; 0 where it was given.
        host_tokens, disk_tokens: tokens that these tiers may hold of what has left the device.
        kv_dtype: of the KV, as in `Solver`.
        host_bits: of a number of KV in host memory; 0: full precision.
        host_token_bytes: bytes of a token there, scales included; 0: `bytes_per_token`.
        staging_tokens: as in `Footprint`.
    """

    budget_tokens: int
    full_tokens: int
    smallest_tokens: int
    bytes_per_token: int
    prompt_tokens: int
    step_tokens: int
    max_depth: int
    blocks: int
    question_tokens: int
    expected_tokens: int | None = None
    searches: int = 0
    host_tokens: int = 0
    disk_tokens: int = 0
    kv_dtype: str = "auto"
    proposals: int = 0
    host_bits: int = 0
    host_token_bytes: int = 0
    staging_tokens: int = 0

    @property
    def reference_tokens(self) -> int:
        """Slots a ratio is a part of: the expected peak, or the worst case if not measured."""
        return self.full_tokens if self.expected_tokens is None else self.expected_tokens

    @property
    def most_held(self) -> int:
        """Most slots of blocks and questions under full retention: the worst case without the
        staging buffer."""
        return self.full_tokens - self.staging_tokens

    @property
    def ratio(self) -> float:
        """The part of `reference_tokens` kept, in (0, 1]; 1 for more than all of them."""
        return min(1.0, self.budget_tokens / self.reference_tokens)

    @property
    def smallest_ratio(self) -> float:
        """The smallest ratio that works, rounded up to two significant digits."""
        return _round_up(Fraction(self.smallest_tokens, self.reference_tokens))

    @property
    def budget_bytes(self) -> int:
        """KV bytes of the budget; weights excluded."""
        return self.budget_tokens * self.bytes_per_token

    @property
    def full_bytes(self) -> int:
        """KV bytes of full retention; weights excluded."""
        return self.full_tokens * self.bytes_per_token

    @property
    def expected_bytes(self) -> int | None:
        """KV bytes of the expected peak; None: not measured."""
        if self.expected_tokens is None:
            return None
        return self.expected_tokens * self.bytes_per_token

    @property
    def unmeasured(self) -> Plan:
        """The same slots without the expectation, for runs whose budget does not depend on it."""
        return replace(self, expected_tokens=None, searches=0)

    def to_dict(self) -> dict[str, Any]:
        """All fields and derived numbers, JSON-able; the expectation, lower tiers, proposals and
        another dtype of the KV only where there are such."""
        tiers = ("host_tokens", "host_bits", "host_token_bytes", "staging_tokens", "disk_tokens")
        counts = (*tiers, "proposals")
        optional = ("expected_tokens", "searches", "kv_dtype", *counts)
        numbers = {
            **{name: value for name, value in asdict(self).items() if name not in optional},
            "ratio": self.ratio,
            "smallest_ratio": self.smallest_ratio,
            "budget_bytes": self.budget_bytes,
            "full_bytes": self.full_bytes,
        }
        if self.expected_tokens is not None:
            numbers |= {
                "expected_tokens": self.expected_tokens,
                "expected_bytes": self.expected_bytes,
                "searches": self.searches,
            }
        some = {name: getattr(self, name) for name in counts}
        numbers |= {name: count for name, count in some.items() if count}
        return numbers if self.kv_dtype == "auto" else numbers | {"kv_dtype": self.kv_dtype}


@dataclass(frozen=True, slots=True)
class Budget:
    """How much KV may be resident on the device.

    Attributes:
        unit: ``ratio``: the part *kept* of the expected peak of full retention; ``max``: the part
            kept of the worst case; ``tokens``; or ``bytes`` of KV (weights, activations and
            workspace are not KV and not counted).
        amount: in (0, 1] for ``ratio`` and ``max``, a whole number >= 1 otherwise. A ratio of 1
            is everything, so its unit becomes ``max``.
        beyond_prompt: for a ratio: the expected peak without the prompt, if it is given rather
            than measured.
    """

    unit: Unit
    amount: float
    beyond_prompt: int | None = None

    def __post_init__(self) -> None:
        if self.unit in ("ratio", "max"):
            if not 0 < self.amount <= 1:  # also refuses nan
                raise _not_a_ratio(_plain(self.amount), self.amount)
            if self.amount == 1:
                object.__setattr__(self, "unit", "max")
        elif not (1 <= self.amount < math.inf and self.amount == math.floor(self.amount)):
            raise BudgetRange(
                "budget-range",
                f"--budget: {_plain(self.amount)} {self.unit} is not a whole number of at least 1.",
                _FORMS,
                value=_finite(self.amount),
            )
        if self.unit != "ratio":
            object.__setattr__(self, "beyond_prompt", None)
        elif self.beyond_prompt is not None and self.beyond_prompt < 0:
            raise _unreadable(f"{self.amount!r} of prompt+{self.beyond_prompt}")

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
            value: ``full``; a ratio ``0 < x <= 1`` of the expected peak (the part kept; 1 is
                ``full``); ``0.25max``, a part of the worst case; ``0.25 of prompt+669``, a ratio
                with its expected peak; ``8192tok``; or KV bytes as ``6GiB``, ``512MiB``, ``1.5GB``
                (B, KiB to TiB, KB to TB; any case). Digits may be grouped with ``,`` or ``_``.

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
            return cls("max", 1.0)
        if (resolved := _RESOLVED.fullmatch(text)) is not None:
            return cls("ratio", _part(resolved[1], text), int(resolved[2]))
        if text.lower().endswith(_MAX):
            return cls("max", _part(text[: -len(_MAX)], text))
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
        if re.fullmatch(r"0,[0-9]{1,9}", text) and float(point := text.replace(",", ".")) > 0:
            guess = f"Did you mean {point} (keep {100 * float(point):g} %)?"
            raise _unreadable(text, guess)
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
        if self.unit == "max":
            return "full" if self.amount == 1 else f"{self.amount!r}{_MAX}"
        if self.unit == "ratio":
            given = self.beyond_prompt
            return repr(self.amount) if given is None else f"{self.amount!r} of prompt+{given}"
        amount = int(self.amount)
        if self.unit == "tokens":
            return f"{amount}tok"
        for unit in _BINARY:
            if amount % _BYTES[unit.lower()] == 0:
                return f"{amount // _BYTES[unit.lower()]}{unit}"
        return f"{amount}B"

    @property
    def open(self) -> bool:
        """Whether the slots depend on measurements: a ratio whose expected peak is not given."""
        return self.unit == "ratio" and self.beyond_prompt is None

    def resolved(self, beyond_prompt: int | None) -> Budget:
        """The budget that means the same whatever is measured later.

        An open ratio gets the expected peak, or becomes a part of the worst case; any other budget
        stays as it is.

        Args:
            beyond_prompt: the expected peak without the prompt; None: not measured.
        """
        if not self.open:
            return self
        if beyond_prompt is None:
            return Budget("max", self.amount)
        return Budget("ratio", self.amount, beyond_prompt)

    def tokens(
        self, full_tokens: int, bytes_per_token: int, expected_tokens: int | None = None
    ) -> int:
        """The budget in slots.

        A ratio is read as the decimal in its text, so that 0.29 of 100 is 29; it rounds down, to
        one token at least. Bytes round down. The result is at most the worst case.

        Args:
            full_tokens: slots of the worst case.
            bytes_per_token: KV bytes of one token over all layers, >= 1.
            expected_tokens: slots of the expected peak; None: a ratio is a part of the worst case.
        """
        if self.unit in ("ratio", "max"):
            reference = full_tokens
            if self.unit == "ratio" and expected_tokens is not None:
                reference = expected_tokens
            tokens = max(1, math.floor(Fraction(repr(float(self.amount))) * reference))
        elif self.unit == "tokens":
            tokens = int(self.amount)
        else:
            tokens = int(self.amount) // bytes_per_token
        return min(tokens, full_tokens)

    def plan(self, footprint: Footprint, bytes_per_token: int) -> Plan:
        """The budget in slots for one search.

        Args:
            footprint: the KV the search can need and is expected to need; an expectation given
                with the budget replaces it.
            bytes_per_token: KV bytes of one token over all layers, >= 1.

        Raises:
            BudgetInfeasible: one path does not fit; names the smallest ratio and number of tokens,
                and other remedies. `needed` is `Footprint.smallest_tokens`.
        """
        assert bytes_per_token >= 1, f"bytes_per_token={bytes_per_token} is below 1"
        if self.beyond_prompt not in (None, footprint.beyond_prompt):
            footprint = replace(footprint, beyond_prompt=self.beyond_prompt, searches=0)
        tokens = self.tokens(footprint.full_tokens, bytes_per_token, footprint.expected_tokens)
        plan = Plan(
            budget_tokens=tokens,
            full_tokens=footprint.full_tokens,
            smallest_tokens=footprint.smallest_tokens,
            bytes_per_token=bytes_per_token,
            prompt_tokens=footprint.prompt_tokens,
            step_tokens=footprint.step_tokens,
            max_depth=footprint.max_depth,
            blocks=footprint.blocks,
            question_tokens=footprint.question_tokens,
            expected_tokens=footprint.expected_tokens,
            searches=footprint.searches,
            proposals=footprint.proposals,
            staging_tokens=footprint.staging_tokens,
        )
        if tokens >= footprint.smallest_tokens:
            return plan
        if footprint.staging_tokens:
            parts = f"{footprint.staging_tokens:,} staging + the newest tokens"
        elif footprint.smallest_tokens == footprint.path_tokens:
            steps = f"{footprint.path_blocks} x {footprint.step_tokens:,}"
            if footprint.is_limited:
                steps = f"at most {footprint.path_limit:,}"
            parts = f"{footprint.prompt_tokens:,} prompt + {steps}"
        else:
            parts = f"{footprint.protected_tokens:,} protected + {footprint.decoded_tokens:,}"
        if footprint.question_tokens:
            parts += f" + {footprint.question_tokens:,} question"
        raise BudgetInfeasible(
            footprint.smallest_tokens,
            tokens,
            f"one path ({parts})",
            f"Smallest workable: {plan.smallest_ratio:.12g} or {footprint.smallest_tokens}tok "
            f"of {_reference(plan)}. {self._levers(footprint, tokens, bytes_per_token)}",
        )

    def _levers(self, footprint: Footprint, tokens: int, bytes_per_token: int) -> str:
        """Other remedies; with a number only where it is certain to work.

        An absolute budget is constant when the search shrinks; a ratio shrinks with it. Only the
        controller knows how the number of blocks depends on the depth, so a part gets no depth; a
        part of the expected peak gets no shorter step either, since that is another kind of search.
        Steps of less than half the length are not suggested: thoughts cut so short hold no answer.
        """
        fixed = footprint.prompt_tokens + footprint.question_tokens
        levers = []
        depth = (tokens - fixed) // footprint.step_tokens
        absolute = self.unit in ("tokens", "bytes")
        whole = footprint.protected_tokens is None and not footprint.staging_tokens
        if absolute and depth >= 1 and whole:
            levers.append(f"--max-depth {depth}")
        steps = range(footprint.step_tokens - 1, (footprint.step_tokens - 1) // 2, -1)
        for step in () if self.unit == "ratio" and footprint.beyond_prompt is not None else steps:
            shape = replace(footprint, step_tokens=step)
            if self.tokens(shape.full_tokens, bytes_per_token) >= shape.smallest_tokens:
                levers.append(f"--step-tokens {step}")
                break
        if levers:
            return f"Or: {', '.join(levers)}."
        if footprint.smallest_tokens < footprint.path_tokens and footprint.protected_tokens:
            return "Or: fewer protected tokens, as with --set recent=0."
        if footprint.staging_tokens:
            return "Or: a smaller --staging."
        return "Or: a shorter prompt, or a smaller --max-depth."


def _reference(plan: Plan) -> str:
    """What the smallest workable ratio is a part of."""
    if plan.expected_tokens is None:
        return f"{plan.full_tokens:,}"
    return f"an expected {plan.expected_tokens:,}"


def _round_up(ratio: Fraction) -> float:
    """The smallest decimal with two significant digits that is not below `ratio`, at most 1."""
    scale = 100
    while ratio * scale < 10:
        scale *= 10
    return float(min(Fraction(1), Fraction(math.ceil(ratio * scale), scale)))


def _number(text: str) -> float:
    """The plain decimal number, or nan."""
    try:
        return float(text.replace(",", "")) if "_" not in text else math.nan
    except ValueError:
        return math.nan


def _part(number: str, text: str) -> float:
    """The decimal in (0, 1] at the beginning of a budget.

    Raises:
        BudgetRange: another number, or none.
    """
    part = math.nan if "," in number else _number(number)
    if math.isnan(part):
        raise _unreadable(text)
    if not 0 < part <= 1:
        raise _not_a_ratio(text, part)
    return part


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
    """A guess for an unknown unit: 6G is 6GiB, 8t and 8tk are 8tok."""
    if unit in ("t", "to", "tk", "toks", "slots"):
        return f"Did you mean {number}tok?"
    if unit[0] in "kmg":
        return f"Did you mean {number}{unit[0].upper()}iB?"
    return ""
