"""Hooks: the moments at which a feature takes part in what the engine does.

- A prompt is about to be read: `PromptHook`, given to the engine.
- Questions are between two layers: `Way`, given with each question.
- Blocks of one leaf were given a token: `BranchHook`, given with how they grow.

The engine knows these protocols and no feature. A hook decides; the engine acts on what it says,
so that none can leave the KV in a state of its own. Where none is attached nothing is called.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from arbor.engine.mode_names import ModeSettings
from arbor.errors import UsageError
from arbor.events import Event, Listener
from arbor.feature import hook_for
from arbor.retention.base import BlockScores
from arbor.support.setting import setting
from arbor.tree import Node, ThoughtTree

if TYPE_CHECKING:
    from torch import Tensor

    from arbor.memory import KVMemory
    from arbor.model.layers import Leave
    from arbor.model.runner import ModelRunner

# A prompt is about to be read


@dataclass(frozen=True, slots=True)
class OtherPrompt:
    """A prompt that a search reads in place of its own.

    Attributes:
        tokens: those of the other prompt.
        begin: first tokens that the two have in common; nothing after them is exact.
    """

    tokens: tuple[int, ...]
    begin: int


class PromptHook(Protocol):
    """Says whether a search reads another prompt than its own; in lossy mode."""

    def other(self, memory: KVMemory, tree: ThoughtTree, emit: Listener) -> OtherPrompt | None:
        """What is read in place of a prompt; None: the prompt itself.

        Args:
            memory: of the engine; prompts of earlier searches are kept in it.
            tree: open, with nothing computed.
            emit: called with what there is to report.
        """
        ...


# Questions are between two layers


class Way(Protocol):
    """The way of one question through the layers, which may end before the last one."""

    @staticmethod
    def watch(
        runner: ModelRunner, ways: Sequence[Any], ends: Sequence[int], counts: Sequence[int]
    ) -> Leave:
        """What is asked after each layer of a forward which rows leave.

        Args:
            runner: runs the forward.
            ways: all of this class in it.
            ends: the row after each question's last one.
            counts: rows of each.
        """
        ...

    def answer(self, logits: Tensor) -> Tensor:
        """The answer to the question, [V] float32.

        Args:
            logits: of the state that its last row ended with.
        """
        ...


# Blocks of one leaf were given a token


class Branch(Protocol):
    """A block while it decodes, as a hook sees it.

    Attributes:
        leaf: the block it grows from.
        node: the block.
        pending: a token that was chosen and is not among the block's yet.
        top1: the highest probability that there was when its last token was chosen.
        stop: why it ends with its last token; None while it goes on.
    """

    @property
    def leaf(self) -> Node: ...

    @property
    def node(self) -> Node: ...

    @property
    def pending(self) -> int | None: ...

    @property
    def top1(self) -> float: ...

    @property
    def stop(self) -> str | None: ...


@dataclass(frozen=True, slots=True)
class Stopped:
    """Branches that end with their last token.

    Attributes:
        places: theirs among the branches that are watched.
        event: reports it.
    """

    places: tuple[int, ...]
    event: Event


class Watch(Protocol):
    """Looks at the branches of one leaf each time some of them were given a token."""

    def ahead(self) -> Sequence[int]:
        """Places of the branches that wait before their next token."""
        ...

    def chosen(self) -> Stopped | None:
        """Which branches end now; None: none."""
        ...


class BranchHook(Protocol):
    """Compares blocks that grow from one leaf in one operation."""

    def watch(self, branches: Sequence[Branch]) -> Watch:
        """A watch over these, at least two."""
        ...


def _scores(given: object) -> BlockScores:
    values = hook_for("msve", given)
    found: BlockScores = given if isinstance(given, values) else values.parse(str(given))
    return found


def _branch_stop(given: object) -> BranchHook:
    found: BranchHook = hook_for("branch_stop", given)(given)
    return found


@dataclass(frozen=True, kw_only=True)
class HookSettings(ModeSettings):
    """What features take part with, where a user asks for it.

    Attributes:
        msve: the scores of blocks, for the policies that read them: an `MSVE`, its numbers
            (``2,1,1,-2``), or a file of ``arbor calibrate msve``; by default the model directory's
            ``msve.json``, what was calibrated for this GGUF file or revision of a Hub model, or the
            defaults of `MSVE` (docs/papers/arborkv.md).
        branch_stop: a `BranchHook` or its text, by which blocks of one expansion end early where
            one of them is confident (docs/papers/rksc.md); None: never.
    """

    msve: BlockScores | None = setting(
        None,
        "Block values written by 'arbor calibrate msve'; default: those of the model.",
        shown="set",
        metavar="FILE",
        read=_scores,
        recorded="always",
    )
    branch_stop: BranchHook | None = setting(
        None,
        "End branches early where one is confident: all, or the others.",
        metavar="WHICH",
        shown="set",
        read=_branch_stop,
    )

    def check_hooks(self) -> None:
        """Refuses what cannot take part in this mode.

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
