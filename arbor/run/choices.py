"""Answers: the choices of a run, folded from its events as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from arbor.engine.text import Decode
from arbor.events import Boundary, Ended, Event, Opened, Sampled, Shared
from arbor.run.solution import Solution
from arbor.run.text_stream import Piece, TextStream, TextToken

Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A choice has grown, or has ended.

    Attributes:
        choice: its number within the run.
        text: what it has grown by.
        tokens: those that begin in it, where they are wanted.
        finish: why it has ended; None: it goes on.
        found: of a search, what the choice is.
    """

    choice: int
    text: str = ""
    tokens: tuple[TextToken, ...] = ()
    finish: Finish | None = None
    found: dict[str, Any] | None = None


@dataclass(slots=True)
class Cost:
    """What a run has cost.

    Attributes:
        prompt: tokens of the prompt.
        reused: of these, tokens whose KV another request had left.
        counters: `Metrics`, once the run has ended.
    """

    prompt: int = 0
    reused: int = 0
    counters: dict[str, Any] = field(default_factory=dict)

    def count(self, event: Event) -> None:
        """Count an event."""
        match event:
            case Opened(parent=None, tokens=tokens):
                self.prompt = tokens
            case Shared(nodes=nodes):
                self.reused += sum(count for node, count in nodes if node == 0)
            case Ended(metrics=metrics):
                self.counters = metrics
            case _:
                pass

    @property
    def generated(self) -> int:
        """Tokens sampled."""
        return int(self.counters.get("tokens_generated", 0))


class Answers(Protocol):
    """The choices of a run, folded from its events."""

    cost: Cost

    def feed(self, event: Event) -> Iterator[Delta]:
        """What an event adds."""
        ...

    def end(self, solution: Solution) -> Iterator[Delta]:
        """What the end of the run adds."""
        ...


class PlainAnswers:
    """The choices of plain decoding: the blocks after the prompt.

    Args:
        decode: the tokenizer's, special tokens skipped.
        prompt: token ids.
        choices: number of them.
        stops: stop strings.
        with_logprobs: whether deltas name their tokens.
        named: the tokenizer's decoding with the names of special tokens; for alternatives.
        copies: how often the only choice is handed out, as a choice each time.
    """

    def __init__(
        self,
        decode: Decode,
        prompt: Sequence[int],
        choices: int,
        stops: Sequence[str],
        with_logprobs: bool,
        named: Decode | None = None,
        copies: int = 1,
    ) -> None:
        self.cost = Cost()
        self._with_logprobs = with_logprobs
        self._copies = range(copies)
        self._streams = [TextStream(decode, prompt, stops, named) for _ in range(choices)]
        self._read = [0] * choices  # tokens
        self._going = set(range(choices))
        self._choice: dict[int, int] = {}  # by block

    def feed(self, event: Event) -> Iterator[Delta]:
        """What an event adds: text as it is sampled, and the rest when a block closes."""
        return self._copied(self._feed(event))

    def _feed(self, event: Event) -> Iterator[Delta]:
        self.cost.count(event)
        match event:
            case Opened(node=node, parent=0, index=index):
                self._choice[node] = index
            case Sampled(nodes=nodes, ids=ids, logprobs=logprobs, alternatives=found):
                others = found or [()] * len(nodes)
                for node, token, logprob, other in zip(nodes, ids, logprobs, others, strict=True):
                    choice = self._choice[node]
                    self._read[choice] += 1
                    given = [logprob] if self._with_logprobs else []
                    piece = self._streams[choice].feed([token], given, other)
                    if piece.text or piece.tokens:
                        yield self._delta(choice, piece)
            case Boundary(node=node, ids=ids, stop=stop):
                choice = self._choice[node]
                stream = self._streams[choice]
                first = stream.feed(ids[self._read[choice] :])
                rest = stream.end(by_token=stop == "eos")
                whole = Piece(first.text + rest.text, first.tokens + rest.tokens)
                stopped = stream.stopped or stop in ("step", "eos")
                self._going.discard(choice)
                yield self._delta(choice, whole, "stop" if stopped else "length")
            case _:
                pass

    def end(self, solution: Solution) -> Iterator[Delta]:
        """The end of choices that never began: the deadline came first."""
        return self._copied(Delta(choice, finish="length") for choice in sorted(self._going))

    def _copied(self, deltas: Iterator[Delta]) -> Iterator[Delta]:
        if len(self._copies) == 1:
            return deltas
        return (replace(delta, choice=copy) for delta in deltas for copy in self._copies)

    def _delta(self, choice: int, piece: Piece, finish: Finish | None = None) -> Delta:
        return Delta(choice, piece.text, piece.tokens, finish)


class SearchAnswers:
    """The choices of a search: its finished paths, the one with the answer first.

    Args:
        choices: most of them.
    """

    def __init__(self, choices: int) -> None:
        self.cost = Cost()
        self._choices = choices
        self._parent: dict[int, int] = {}
        self._text: dict[int, str] = {}

    def feed(self, event: Event) -> Iterator[Delta]:
        """Nothing: which path is the best is known at the end."""
        self.cost.count(event)
        match event:
            case Opened(node=node, parent=int(parent)):
                self._parent[node] = parent
            case Boundary(node=node, text=text):
                self._text[node] = text
            case _:
                pass
        return iter(())

    def end(self, solution: Solution) -> Iterator[Delta]:
        """The finished paths, best first; an empty text where there are none."""
        finish: Finish = "stop" if solution.finish_reason in ("solved", "exhausted") else "length"
        best = solution.path[-1] if solution.path else None
        order = sorted(solution.candidates, key=lambda each: each.node != best)
        for choice, each in enumerate(order[: self._choices]):
            found = {"answer": each.answer, "value": each.value, "guessed": each.guessed}
            yield Delta(choice, self._path_text(each.node), (), finish, found)
        if not order:
            yield Delta(0, "", (), finish, {"answer": None, "value": None, "guessed": False})

    def _path_text(self, node: int) -> str:
        texts = []
        while node in self._parent:
            texts.append(self._text.get(node, ""))
            node = self._parent[node]
        return "".join(reversed(texts))


class PathTokens:
    """The tokens of each path of a search, folded from its events."""

    def __init__(self) -> None:
        self._parent: dict[int, int] = {}
        self._ids: dict[int, tuple[int, ...]] = {}
        self._logprobs: dict[int, list[float]] = {}
        self._stop: dict[int, str] = {}

    def feed(self, event: Event) -> None:
        """Fold an event."""
        match event:
            case Opened(node=node, parent=int(parent)):
                self._parent[node] = parent
            case Sampled(nodes=nodes, logprobs=logprobs):
                for node, logprob in zip(nodes, logprobs, strict=True):
                    self._logprobs.setdefault(node, []).append(logprob)
            case Boundary(node=node, ids=ids, stop=stop):
                self._ids[node] = tuple(ids)
                self._stop[node] = stop
            case _:
                pass

    def ids(self, node: int) -> list[int]:
        """Token ids of the path to a block, without the prompt."""
        return [token for each in self._path(node) for token in self._ids.get(each, ())]

    def logprobs(self, node: int) -> list[float]:
        """Log probabilities of these tokens in the model's own distribution.

        Empty where the events do not have them all: at another level of detail than ``tokens``, or
        of a thought that was proposed rather than sampled.
        """
        path = self._path(node)
        found = [logprob for each in path for logprob in self._logprobs.get(each, ())]
        return found if len(found) == len(self.ids(node)) else []

    def stop(self, node: int) -> str:
        """Why the block ended, as in `Boundary`; empty where it has not."""
        return self._stop.get(node, "")

    def _path(self, node: int) -> list[int]:
        path = []
        while node in self._parent:
            path.append(node)
            node = self._parent[node]
        return path[::-1]
