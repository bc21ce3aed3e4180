"""Choices: the choices of a run as text and tokens, folded from its events as they come."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from arbor.engine.text import LOOK_BACK, Decode, added
from arbor.events import Boundary, Ended, Event, Opened, Sampled, Shared
from arbor.model.sampling_params import Sampling
from arbor.run.solution import Solution


@dataclass(frozen=True, slots=True)
class TextToken:
    """One generated token.

    Attributes:
        text: what it adds to the text; empty for a part of a character and for special tokens.
        logprob: its log probability in the model's own distribution.
        offset: characters of the choice's text before it.
        alternatives: texts of the most probable tokens in its place, and their log probabilities;
            a special token has its name.
    """

    text: str
    logprob: float
    offset: int
    alternatives: tuple[tuple[str, float], ...] = ()


@dataclass(frozen=True, slots=True)
class TextPiece:
    """Text that is certain to be part of the choice, with the tokens that begin in it."""

    text: str
    tokens: tuple[TextToken, ...] = ()


class TextStream:
    """The text of a block token by token, without the stop string that ends it.

    Text that may turn out to be the beginning of a stop string is held back until that is known.

    Args:
        decode: the tokenizer's, special tokens skipped.
        before: the end of the prompt.
        stops: stop strings.
        named: the tokenizer's decoding with the names of special tokens; for alternatives.
    """

    def __init__(
        self,
        decode: Decode,
        before: Sequence[int],
        stops: Sequence[str],
        named: Decode | None = None,
    ) -> None:
        self._decode = decode
        self._named = named or decode
        self._before = list(before[-LOOK_BACK:])
        self._stops = stops
        self._held = ""
        self._tokens: list[TextToken] = []
        self._emitted = 0
        self._read = 0
        self.stopped = False

    def feed(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float] = (),
        alternatives: Sequence[tuple[int, float]] = (),
    ) -> TextPiece:
        """Text that has become certain with further tokens."""
        for place, token in enumerate(tokens):
            text = added(self._decode, self._before, [token])
            if logprobs:
                others = tuple(
                    (text if other == token else self._text_of(other), logprob)
                    for other, logprob in alternatives
                )
                self._tokens.append(TextToken(text, logprobs[place], self._read, others))
            self._before = [*self._before, token][-LOOK_BACK:]
            self._read += len(text)
            self._held += text
        if self.stopped:
            self._held = ""
            return TextPiece("")
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self._held = self._held[: min(found)]
            self.stopped = True
            return self.end()
        keep = max((_begun(self._held, stop) for stop in self._stops), default=0)
        sure = len(self._held) - keep
        text, self._held = self._held[:sure], self._held[sure:]
        return self._piece(text)

    def end(self, *, by_token: bool = False) -> TextPiece:
        """The text that was held back, and tokens without a text after it: the block has ended."""
        text, self._held = self._held, ""
        piece = self._piece(text)
        if self.stopped:
            return piece
        left = self._tokens[:-1] if by_token else self._tokens
        self._tokens = []
        return TextPiece(text, (*piece.tokens, *left))

    def _text_of(self, token: int) -> str:
        return added(self._decode, self._before, [token]) or self._named([token])

    def _piece(self, text: str) -> TextPiece:
        self._emitted += len(text)
        ready = [token for token in self._tokens if token.offset < self._emitted]
        self._tokens = self._tokens[len(ready) :]
        return TextPiece(text, tuple(ready))


def _begun(text: str, stop: str) -> int:
    """Characters at the end of a text with which a stop string begins."""
    most = min(len(text), len(stop) - 1)
    return next((n for n in range(most, 0, -1) if text.endswith(stop[:n])), 0)


Finish = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Delta:
    """A choice has grown, or has ended.

    Attributes:
        choice: its number within the run.
        text: what it has grown by.
        tokens: those that begin in it, where they are wanted.
        finish: why it has ended, ``length`` where a limit cut it; None: it goes on.
        found: of a search, what the choice is.
    """

    choice: int
    text: str = ""
    tokens: tuple[TextToken, ...] = ()
    finish: Finish | None = None
    found: dict[str, Any] | None = None


@dataclass(slots=True)
class RunCost:
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


class Choices(Protocol):
    """The choices of a run, folded from its events."""

    cost: RunCost

    def feed(self, event: Event) -> Iterator[Delta]:
        """What an event adds."""
        ...

    def end(self, solution: Solution) -> Iterator[Delta]:
        """What the end of the run adds."""
        ...


def copies_of(choices: int, sampling: Sampling) -> int:
    """How many choices of plain decoding are one that is decoded once: greedy ones are equal."""
    return choices if sampling.temperature == 0 else 1


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
        self.cost = RunCost()
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
                whole = TextPiece(first.text + rest.text, first.tokens + rest.tokens)
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

    def _delta(self, choice: int, piece: TextPiece, finish: Finish | None = None) -> Delta:
        return Delta(choice, piece.text, piece.tokens, finish)


class SearchAnswers:
    """The choices of a search: its finished paths, the one with the answer first."""

    def __init__(self, choices: int) -> None:
        self.cost = RunCost()
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
        best = solution.path[-1] if solution.path else None
        order = sorted(solution.candidates, key=lambda each: each.node != best)
        for choice, each in enumerate(order[: self._choices]):
            found = {"answer": each.answer, "value": each.value, "guessed": each.guessed}
            finish: Finish = "length" if each.cut else "stop"
            yield Delta(choice, self._path_text(each.node), (), finish, found)
        if not order:
            finish = "stop" if solution.finish_reason == "exhausted" else "length"
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
