"""BranchStop: the rule by which confident branches end others early (RKSC's decode-time gate)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from arbor.components import setting_text, split_spec
from arbor.engine.hooks import Branch, Stopped
from arbor.errors import UsageError, check_settings, unknown_setting
from arbor.events import BranchesStopped
from arbor.papers.rksc.cgee import leading_two, relative_gap
from arbor.papers.rksc.exit_thresholds import DECIMALS
from arbor.tree import NodeState

Text = tuple[int, ...]


class Branches:
    """The blocks of one leaf, which are compared at the same length whatever the budget.

    One that is ahead of another at a comparison is held until that one has caught up, so what is
    compared depends on the tokens alone.

    Args:
        is_decisive: whether one of these texts, by their confidences, ends others.
        branches: at least two, of one operation and one leaf.
        least: tokens of a branch before it may be stopped.
        spares: branches of the most confident text go on.
    """

    def __init__(
        self,
        is_decisive: Callable[[list[Text], list[float]], bool],
        branches: Sequence[Branch],
        *,
        least: int,
        spares: bool,
    ) -> None:
        self._is_decisive = is_decisive
        self._branches = tuple(branches)
        self._least = least
        self._spares = spares
        self._compared = least - 1  # tokens at the last comparison

    def ahead(self) -> list[int]:
        """Places of the branches that have to wait for others before their next token."""
        open_ = self._open
        length = {place: _length(self._branches[place]) for place in open_}
        slowest = min(length.values(), default=0)
        return [place for place in open_ if length[place] > max(slowest, self._least - 1)]

    def chosen(self) -> Stopped | None:
        """Compare the branches, if all that decode have a further token.

        Returns:
            those that end, and what happened; None where no branch ends.
        """
        open_ = self._open
        lengths = {_length(self._branches[place]) for place in open_}
        if len(lengths) != 1 or min(lengths) <= self._compared:
            return None
        (self._compared,) = lengths
        texts = [_text(branch) for branch in self._branches]
        confidences = [_confidence(branch) for branch in self._branches]
        if not self._is_decisive(texts, confidences):
            return None
        leader = texts[max(range(len(texts)), key=lambda place: confidences[place])]
        ending = [place for place in open_ if not (self._spares and texts[place] == leader)]
        if not ending:
            return None
        stopped = BranchesStopped(
            leaf=self._branches[0].leaf.id,
            tokens=self._compared,
            branches=tuple(branch.node.id for branch in self._branches),
            confidences=tuple(confidences),
            stopped=tuple(self._branches[place].node.id for place in ending),
        )
        return Stopped(tuple(ending), stopped)

    @property
    def _open(self) -> list[int]:
        """Places of the branches that have not come to their end."""
        return [place for place, branch in enumerate(self._branches) if branch.stop is None]


def _text(branch: Branch) -> Text:
    """The tokens of a branch, one that waits to be computed included."""
    pending = () if branch.pending is None else (branch.pending,)
    return (*branch.node.tokens, *pending)


def _length(branch: Branch) -> int:
    return len(branch.node.tokens) + (branch.pending is not None)


def _confidence(branch: Branch) -> float:
    """The mean top-1 probability of a branch's tokens, to `DECIMALS` decimals."""
    node = branch.node
    # a closed block has its mean; the last token of an open one is still to be computed
    if node.state is NodeState.CLOSED:
        return round(node.top1, DECIMALS)
    return round((node.top1 + branch.top1) / _length(branch), DECIMALS)


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
        check_settings(
            self,
            confidence=(0 <= self.confidence <= 1, "from 0 to 1"),
            gap=(0 <= self.gap <= 1, "from 0 to 1"),
            least=(self.least >= 1, "at least 1"),
        )

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

    def watch(self, branches: Sequence[Branch]) -> Branches:
        """The branches, compared at the same length whatever the budget."""
        return Branches(self.is_decisive, branches, least=self.least, spares=self.ends == "others")

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
