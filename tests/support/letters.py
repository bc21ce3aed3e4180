"""A small model that writes what a test says, letter by letter, and searches with it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from support.fakes import FakeTask
from support.models import VOCABULARY, build
from support.trees import Lab
from torch import Tensor

from arbor.controllers.base import Controller
from arbor.engine.mode import Mode, Rehydrate
from arbor.engine.operation import Growth, Row
from arbor.engine.stop_rule import StopRule
from arbor.engine.token_source import ModelSampler
from arbor.events import Event, Header
from arbor.model.sampling_params import Sampling
from arbor.run.limits import SessionLimits
from arbor.run.session import Outcome, Session
from arbor.tasks.base import Problem, Proposal
from arbor.trace import Replay
from arbor.tree import Node
from arbor.verifiers.base import Verifier
from arbor.verifiers.exact import Exact

LETTERS = "\n" + "".join(map(chr, range(32, 127)))
END = len(LETTERS)  # ends a text
assert VOCABULARY > END

# thoughts of a path -> what the model writes after its question
Writer = Callable[[list[str]], str]


class Letters:
    """A tokenizer with a token for each letter."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [LETTERS.index(letter) for letter in text]

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(LETTERS[token] for token in ids if token != END)


class Scripted(ModelSampler):
    """Blocks whose text is scripted.

    Attributes:
        writes: the completion after a question; the end of the text follows it.
        samples: the text of a block that is sampled.
    """

    def __init__(self) -> None:
        super().__init__(Letters())
        self.writes: Writer = lambda thoughts: ""
        self.samples: Callable[[Node], str] = lambda node: f"v{node.index}\n"

    def choose(self, rows: Sequence[Row], logits: Tensor) -> list[int]:
        super().choose(rows, logits)
        return [self._next(row.node) for row in rows]

    def _next(self, node: Node) -> int:
        at = len(node.tokens) - node.given
        text = self.writes(node.thoughts[:-1]) if node.given else self.samples(node)
        return Letters().encode(text[at])[0] if at < len(text) else END


@dataclass(frozen=True)
class Listing(FakeTask):
    """Thoughts are lines of a list.

    Attributes:
        longest: tokens of the longest completion.
        end: ends a completion.
        quotes: the question repeats the thoughts.
    """

    longest: int = 24
    end: str = "."
    quotes: bool = False

    def proposal(self, problem: Problem, thoughts: Sequence[str]) -> Proposal:
        quoted = "".join(thoughts) if self.quotes else ""
        return Proposal(f"{quoted}next?", self.longest, (self.end,))

    def proposals(self, problem: Problem, thoughts: Sequence[str], text: str) -> list[str]:
        lines = text.removesuffix(self.end).split("\n")
        return [f"{line}\n" for line in lines if line]


class Desk(Lab):
    """An engine whose model writes what a test says."""

    def __init__(self, mode: Mode = "lossless", rehydrate: Rehydrate = "selective") -> None:
        self.script = Scripted()
        super().__init__(
            build("llama"), source=self.script, mode=mode, rehydrate=rehydrate, debug=True
        )
        self.tokenizer = Letters()


@dataclass
class Found:
    """A search that has ended.

    Attributes:
        outcome: of the session.
        events: header first.
        session: it.
    """

    outcome: Outcome
    events: list[Event]
    session: Session
    problems: list[str] = field(default_factory=list)

    @property
    def texts(self) -> list[tuple[tuple[str, ...], str]]:
        """The thoughts of each block's path, questions left out, and its state."""
        return [
            (tuple(node.thoughts), node.state.value)
            for node in self.outcome.tree
            if node.id == 0 or not is_question(node)
        ]


def is_question(node: Node) -> bool:
    """Whether a block is a question, with what was written after it."""
    return node.text.endswith("next?") or "next?" in node.text


def search(
    desk: Desk,
    controller: Controller,
    *,
    task: Listing | None = None,
    verifier: Verifier | None = None,
    slots: int = 4096,
    limits: SessionLimits | None = None,
    heard: Callable[[Event, Session], None] = lambda event, session: None,
) -> Found:
    """A whole search from the prompt ``go:``."""
    task = task or Listing()
    events: list[Event] = [
        Header("", "", "", "", "", "", 0, None, {}, {}, {}, {"budget_tokens": slots})
    ]

    def emit(event: Event) -> None:
        events.append(event)
        heard(event, session)

    boundary = task.boundary
    session = Session(
        desk,
        task,
        task.parse("go:"),
        controller,
        verifier or Exact(),
        Growth(3, Sampling(), StopRule(Letters(), boundary, (END,))),
        limits or SessionLimits(boundary.max_depth),
        slots,
        emit,
    )
    if desk._opened is not None:
        for tree in list(desk.state.trees):
            desk.close(tree)
    outcome = session.run(Letters().encode("go:"), "go:")
    replay = Replay()
    for event in events:
        replay(event)
    return Found(outcome, events, session, replay.problems)
