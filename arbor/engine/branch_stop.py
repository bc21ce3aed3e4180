"""BranchStop: the rule by which confident branches end others early (RKSC's decode-time gate)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from arbor.components import setting_text, split_spec
from arbor.engine.confidence_gap import leading_two, relative_gap
from arbor.engine.mode_names import ModeSettings
from arbor.errors import UsageError, unknown_setting
from arbor.support.setting import setting

Ends = Literal["all", "others"]

_NUMBERS = {"confidence": float, "gap": float, "least": int}
_EXAMPLE = "As in 'others', or 'all,confidence=0.72,gap=0.1,least=3'."


@dataclass(frozen=True, slots=True)
class BranchStop:
    """Blocks that grow from one leaf end early once one of them is decisively more confident.

        max_b p(b) >= confidence   and   (p1 - p2) / p1 >= gap

    p(b) is the mean top-1 probability of the tokens that branch b has so far, p1 and p2 the two
    largest of different texts. The branches are compared after every token that all of them have,
    from the `least`-th on; one that has ended counts with its last p.

    Source: RKSC (arXiv 2606.09937), appendix I.1: "early termination on EOS or decode-level CGEE
    gate", with theta = 0.72 and r = 0.10; after three tokens at least in the released code, which
    ends all branches. Differs: branches are the blocks of one expansion, which share their context;
    `others` lets the confident one reach its boundary; equal texts count once.

    Args:
        ends: ``all`` branches, or the ``others``, those of another text than the confident one.
        confidence: least p1, in [0, 1].
        gap: least relative gap, in [0, 1].
        least: tokens of a branch before it may be stopped, >= 1.
    """

    ends: Ends
    confidence: float = 0.72
    gap: float = 0.10
    least: int = 3

    def __post_init__(self) -> None:
        if self.ends not in get_args(Ends):
            raise UsageError("branch-stop", f"branch_stop={self.ends}: unknown.", _EXAMPLE)
        for name in ("confidence", "gap"):
            if not 0 <= getattr(self, name) <= 1:
                raise UsageError(
                    "setting-range", f"{name}={getattr(self, name)}: it must be from 0 to 1."
                )
        if self.least < 1:
            raise UsageError("setting-range", f"least={self.least}: it must be at least 1.")

    @classmethod
    def parse(cls, value: str | Self) -> Self:
        """A rule as a user gives it: ``all`` or ``others``, perhaps with settings.

        Raises:
            UsageError: neither, an unknown setting, or an invalid value.
        """
        if isinstance(value, cls):
            return value
        name, texts = split_spec(str(value))
        settings: dict[str, Any] = {}
        for key, text in texts.items():
            if key not in _NUMBERS:
                raise unknown_setting("branch_stop has", key, sorted(_NUMBERS))
            try:
                settings[key] = _NUMBERS[key](text)
            except ValueError as error:
                raise UsageError(
                    "branch-stop", f"branch_stop: {key}={text} is not a number.", _EXAMPLE
                ) from error
        return cls(name, **settings)  # type: ignore[arg-type]  # checked

    def __str__(self) -> str:
        numbers = ((name, getattr(self, name)) for name in _NUMBERS)
        return ",".join((self.ends, *(f"{name}={setting_text(each)}" for name, each in numbers)))

    def is_decisive(self, texts: list[tuple[int, ...]], confidences: list[float]) -> bool:
        """Whether one text is decisively more confident than every other.

        Args:
            texts: the tokens of each branch.
            confidences: p of each.
        """
        leading = leading_two(texts, confidences)
        return (
            len(leading) > 1
            and leading[0] >= self.confidence
            and relative_gap(*leading) >= self.gap
        )


@dataclass(frozen=True, kw_only=True)
class BranchStopSettings(ModeSettings):
    """The rule of a search.

    Attributes:
        branch_stop: a `BranchStop` or its text, by which blocks of one expansion end early where
            one of them is confident (docs/early-exit.md); None: never.
    """

    branch_stop: BranchStop | None = setting(
        None,
        "End branches early where one is confident: all, or the others.",
        metavar="WHICH",
        shown="set",
        read=BranchStop.parse,
    )

    def check_branch_stop(self) -> None:
        """Refuses the rule in lossy mode.

        Raises:
            UsageError: these settings contradict each other.
        """
        if self.branch_stop is not None and self.mode == "lossy":
            raise UsageError(
                "branch-stop",
                "branches are compared at the same length, and in lossy mode not all of them decode "
                "together.",
                "Use branch_stop in lossless mode.",
            )
