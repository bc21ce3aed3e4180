"""Where the tokens of blocks come from."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, Protocol, get_args

from torch import Tensor

from arbor.engine.grammar import Grammar
from arbor.engine.operation import Growth, Row
from arbor.engine.sampling import Drawing, Draws, confidence, first_draw, likeliest, sample
from arbor.engine.sampling_graphs import SamplingGraphs
from arbor.engine.stop_rule import StopReason
from arbor.engine.text import added, before
from arbor.errors import UsageError
from arbor.kernels.fused.choice import NativeChoice
from arbor.model.sampling_params import Sampling
from arbor.tree import Node


class TokenSource(Protocol):
    """Chooses tokens, and decides where blocks end and how they are reported."""

    def choose(self, rows: Sequence[Row], logits: Tensor) -> list[int]:
        """The next token of each row ([n, V] float32), as its `growth` says; its `logprob`,
        `drawn` and `top1` are set."""
        ...

    def stop(self, node: Node, growth: Growth) -> StopReason | None:
        """Why the block ends with its last token; None if it goes on."""
        ...

    def confidence(self, nodes: Sequence[Node], logits: Tensor) -> list[float]:
        """The model's confidence after these whole blocks (`sampling.confidence`)."""
        ...

    def finish(self, node: Node) -> None:
        """The block is over: set its text, and make `logprob` and `top1` those of the whole
        block."""
        ...


class ModelSampler:
    """Samples from the model's own distribution.

    Args:
        tokenizer: a Hugging Face tokenizer.
        top: tokens whose entropy is the confidence, see `sampling.confidence`.
        graphs: of draws; None: without.
    """

    def __init__(self, tokenizer: Any, top: int = 0, graphs: SamplingGraphs | None = None) -> None:
        self._tokenizer = tokenizer
        self._top = top
        self._first = first_draw() if graphs is None else graphs.draw

    def begin(self, rows: Sequence[Row], logits: Tensor) -> Drawing | None:
        """Have a device draw what `choose` would return; None: it takes the host."""
        growth = rows[0].growth
        alike = growth.grammar is None and all(row.growth is growth for row in rows)
        if isinstance(self._first, NativeChoice) or not alike:
            return None
        numbers = [row.code.number for row in rows]
        return Drawing(logits, numbers, growth.sampling, self._first)

    def end(self, rows: Sequence[Row], logits: Tensor, drawing: Drawing) -> list[int]:
        """What `choose` returns, drawn by `begin`."""
        return self._take(rows, logits, drawing.result())

    def choose(self, rows: Sequence[Row], logits: Tensor) -> list[int]:
        """One sampled token per row."""
        growth = rows[0].growth
        if growth.grammar is None and all(row.growth is growth for row in rows):  # mostly
            numbers = [row.code.number for row in rows]
            drawn = sample(logits, numbers, growth.sampling, self._first)
            return self._take(rows, logits, drawn)
        logits = self._masked(rows, logits)
        alike: dict[Sampling, list[int]] = {}
        for place, row in enumerate(rows):
            alike.setdefault(row.growth.sampling, []).append(place)
        # all are drawn before any row is given its own: where one fails, no number is used up
        draws = []
        for sampling, places in alike.items():
            mine = [rows[place] for place in places]
            some = logits if len(alike) == 1 else logits[places]
            numbers = [row.code.number for row in mine]
            draws.append((places, mine, some, sample(some, numbers, sampling, self._first)))
        tokens = [0] * len(rows)
        for places, mine, some, drawn in draws:
            for place, token in zip(places, self._take(mine, some, drawn), strict=True):
                tokens[place] = token
        return tokens

    def _take(self, rows: Sequence[Row], logits: Tensor, drawn: Draws) -> list[int]:
        """Let rows have what was drawn for them; returns the tokens."""
        for i, row in enumerate(rows):
            row.logprob, row.top1 = drawn.logprob[i], drawn.top1[i]
            row.drawn = math.log(drawn.share[i])
            row.code.narrow(drawn.left[i], drawn.share[i])
        asked = [place for place, row in enumerate(rows) if row.growth.alternatives]
        if asked:
            most = max(rows[place].growth.alternatives for place in asked)
            for place, found in zip(asked, likeliest(logits[asked], most), strict=True):
                token, logprob = drawn.tokens[place], drawn.logprob[place]
                rows[place].alternatives = tuple(
                    (each, logprob if each == token else other)  # summed in another order
                    for each, other in found[: rows[place].growth.alternatives]
                )
        return drawn.tokens

    def _masked(self, rows: Sequence[Row], logits: Tensor) -> Tensor:
        """The logits, without the tokens that the formats of the rows leave out."""
        places: dict[Grammar, list[int]] = {}
        for place, row in enumerate(rows):
            if row.growth.grammar is not None:
                places.setdefault(row.growth.grammar, []).append(place)
        if not places:
            return logits
        masked = logits.clone()
        for grammar, mine in places.items():
            masked[mine] = grammar.mask([rows[place].node for place in mine], logits[mine])
        return masked

    def stop(self, node: Node, growth: Growth) -> StopReason | None:
        """By the rule of the operation."""
        # of the path before the block; nothing asks for it without a limit of the path
        reasoned = 0 if growth.stop.path_tokens is None else node.reasoned - len(node.tokens)
        if growth.stop.goes_on(node.tokens, reasoned):
            return None
        reason = growth.stop.after(node.tokens, before(node), reasoned)
        if reason is not None and growth.grammar is not None:
            growth.grammar.forget(node)
        return reason

    def confidence(self, nodes: Sequence[Node], logits: Tensor) -> list[float]:
        """From the logits."""
        return confidence(logits, self._top)

    def finish(self, node: Node) -> None:
        """Decodes the text; `top1` becomes a mean."""
        node.top1 /= max(1, len(node.tokens) - node.given)
        node.text = added(self._decode, before(node), node.tokens)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True)
        return text


class CheckedSource:
    """A token source whose answers are checked before they are used.

    Args:
        source: one that is not arbor's own.
    """

    def __init__(self, source: TokenSource) -> None:
        self._source = source

    def choose(self, rows: Sequence[Row], logits: Tensor) -> list[int]:
        """One token of the vocabulary per row.

        Raises:
            UsageError: anything else.
        """
        answer: Any = self._source.choose(rows, logits)
        try:
            tokens = [operator.index(token) for token in answer]
        except TypeError as error:
            raise self._refused("chose something that is not a token id") from error
        if len(tokens) != len(rows):
            raise self._refused(f"chose {len(tokens)} tokens for {len(rows)} blocks")
        if not 0 <= min(tokens) <= max(tokens) < logits.shape[-1]:
            raise self._refused(f"chose a token outside 0 to {logits.shape[-1] - 1}")
        return tokens

    def stop(self, node: Node, growth: Growth) -> StopReason | None:
        """A stop reason or None.

        Raises:
            UsageError: anything else.
        """
        reason = self._source.stop(node, growth)
        if reason is not None and reason not in get_args(StopReason):
            raise self._refused(f"ended a block with the unknown reason {reason!r}")
        return reason

    def confidence(self, nodes: Sequence[Node], logits: Tensor) -> list[float]:
        """One finite number per block.

        Raises:
            UsageError: anything else.
        """
        answer: Any = self._source.confidence(nodes, logits)
        try:
            sure = [float(each) for each in answer]
        except (TypeError, ValueError) as error:
            raise self._refused("gave a confidence that is not a number") from error
        if len(sure) != len(nodes) or not all(map(math.isfinite, sure)):
            raise self._refused(f"gave {sure} as the confidence of {len(nodes)} blocks")
        return sure

    def finish(self, node: Node) -> None:
        """As the source does."""
        self._source.finish(node)

    def _refused(self, what: str) -> UsageError:
        return UsageError("token-answer", f"the token source {type(self._source).__name__} {what}.")
