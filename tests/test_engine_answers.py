"""What policies and token sources answer is checked before anything is done with it, with and
without ``-O``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.models import VOCABULARY, Words, build
from support.policies import POLICIES
from support.slow_cases import every
from support.trees import GREEDY, LENGTH, PROMPT, Lab, relative_error

from arbor.engine.token_source import ModelSampler
from arbor.errors import UsageError
from arbor.retention.allocators.by_block import LRU, Uniform
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.base import Allocator, Blocks, Ints, Scorer, Tokens
from arbor.retention.policy import Policy, Protect
from arbor.retention.scorers import Recency
from arbor.tree import NodeState, ThoughtTree

SLOTS = len(PROMPT) + 4 * LENGTH
ROOT = Path(__file__).parents[1]


class Fault:
    """What a component answers instead of the right answer, while it is `armed`."""

    def __init__(self, change: Callable[[Any, Any], Any]) -> None:
        self.change = change
        self.armed = False

    def __call__(self, right: Any, about: Any) -> Any:
        return self.change(right, about) if self.armed else right


@dataclass(frozen=True)
class Counting:
    fault: Fault

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        answer: Ints = self.fault(LRU().counts(blocks, room, scorer), blocks)
        return answer


@dataclass(frozen=True)
class Leaving(Pooled):
    fault: Fault

    def leaving(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        answer: Ints = self.fault(super().leaving(blocks, room, scorer), blocks)
        return answer


@dataclass(frozen=True)
class Crediting(Pooled):
    fault: Fault

    def credited(self, blocks: Blocks, room: int, scorer: Scorer) -> Any:
        right = super().leaving(blocks, room, scorer), blocks.tokens.mass
        return self.fault(right, blocks)


@dataclass(frozen=True)
class Scoring:
    fault: Fault
    observes: bool = False

    def scores(self, tokens: Tokens) -> Any:
        return self.fault(Recency().scores(tokens), tokens)


class Choosing(ModelSampler):
    """A token source that chooses wrong tokens."""

    def __init__(self, fault: Fault) -> None:
        super().__init__(Words())
        self.fault = fault

    def choose(self, *args: Any) -> Any:
        return self.fault(super().choose(*args), None)


class Judging(Choosing):
    """One that is unsure in a wrong way."""

    choose = ModelSampler.choose

    def confidence(self, *args: Any) -> Any:
        return self.fault(super().confidence(*args), None)


class Stopping(Choosing):
    """One that ends blocks for no known reason."""

    choose = ModelSampler.choose

    def stop(self, *args: Any) -> Any:
        return self.fault(super().stop(*args), None)


def one_more(values: Any) -> Any:
    return np.concatenate([values, values[-1:]])


COUNTS: dict[str, Callable[[Any, Any], Any]] = {
    "more than a block has": lambda right, blocks: blocks.resident + 1,
    "fewer than none": lambda right, blocks: right - right.max(initial=0) - 1,
    "too few blocks": lambda right, blocks: right[:-1],
    "too many blocks": lambda right, blocks: one_more(right),
    "one number for all": lambda right, blocks: 0,
    "a column": lambda right, blocks: right[:, None],
    "more than the room": lambda right, blocks: blocks.resident.copy(),
    "fractions": lambda right, blocks: right + 0.5,
    "no number": lambda right, blocks: right * np.nan,
    "words": lambda right, blocks: ["a"] * len(right),
    "nothing": lambda right, blocks: None,
}
GONE: dict[str, Callable[[Any, Any], Any]] = {
    "past the end": lambda right, blocks: right + len(blocks.tokens.block),
    "before the beginning": lambda right, blocks: right - len(blocks.tokens.block),
    "one token twice": lambda right, blocks: np.repeat(right[:1], len(right)),
    "too few": lambda right, blocks: right[:-1],
    "none": lambda right, blocks: right[:0],
    "fractions": lambda right, blocks: right + 0.5,
    "a mask": lambda right, blocks: np.isin(np.arange(len(blocks.tokens.block)), right),
    "a column": lambda right, blocks: right[:, None],
    "nothing": lambda right, blocks: None,
}
CREDIT: dict[str, Callable[[Any, Any], Any]] = {
    "fractions": lambda right, blocks: (right[0] + 0.5, right[1]),
    "no pair": lambda right, blocks: right[0],
    "too little credit": lambda right, blocks: (right[0], right[1][:-1]),
    "NaN": lambda right, blocks: (right[0], right[1] * np.nan),
    "words": lambda right, blocks: (right[0], ["a"] * len(right[1])),
    "nothing": lambda right, blocks: None,
}
SCORES: dict[str, Callable[[Any, Any], Any]] = {
    "no number": lambda right, tokens: right * np.nan,
    "NaN": lambda right, tokens: np.where(np.arange(len(right)), right, np.nan),
    "infinity": lambda right, tokens: right + np.inf,
    "too few": lambda right, tokens: right[:-1],
    "too many": lambda right, tokens: one_more(right),
    "one for all": lambda right, tokens: 1.0,
    "a column": lambda right, tokens: right[:, None],
    "words": lambda right, tokens: ["a"] * len(right),
    "complex": lambda right, tokens: right * 1j,
    "nothing": lambda right, tokens: None,
}
CHOSEN: dict[str, Callable[[Any, Any], Any]] = {
    "too few": lambda right, _: right[:-1],
    "too many": lambda right, _: [*right, 3],
    "below the vocabulary": lambda right, _: [-1] * len(right),
    "past the vocabulary": lambda right, _: [VOCABULARY] * len(right),
    "fractions": lambda right, _: [3.5] * len(right),
    "words": lambda right, _: ["a"] * len(right),
    "nothing": lambda right, _: None,
}
SURE: dict[str, Callable[[Any, Any], Any]] = {
    "too few": lambda right, _: right[:-1],
    "no number": lambda right, _: [float("nan")] * len(right),
    "words": lambda right, _: ["a"] * len(right),
    "nothing": lambda right, _: None,
}
STOPS: dict[str, Callable[[Any, Any], Any]] = {
    "an unknown reason": lambda right, _: "because",
    "yes": lambda right, _: True,
}


def policy_of(allocator: Allocator, scorer: Scorer | None = None) -> Policy:
    protect = Protect(sinks=2, recent=0, tail=0, floor=0)
    return replace(
        POLICIES["lru"], allocator=allocator, scorer=scorer or Recency(), protect=protect
    )


KINDS: dict[str, tuple[dict[str, Any], Callable[[Fault], dict[str, Any]]]] = {
    "counts": (COUNTS, lambda fault: {"policy": policy_of(Counting(fault))}),
    "leaving": (GONE, lambda fault: {"policy": policy_of(Leaving(fault))}),
    "credited": (CREDIT, lambda fault: {"policy": policy_of(Crediting(fault))}),
    "scores": (SCORES, lambda fault: {"policy": policy_of(Uniform(), Scoring(fault))}),
    "pooled scores": (SCORES, lambda fault: {"policy": policy_of(Pooled(), Scoring(fault))}),
    "tokens": (CHOSEN, lambda fault: {"source": Choosing(fault)}),
    "confidence": (SURE, lambda fault: {"source": Judging(fault)}),
    "stop": (STOPS, lambda fault: {"source": Stopping(fault)}),
}
CASES = [(kind, name) for kind, (faults, _) in KINDS.items() for name in faults]


def residency(tree: ThoughtTree) -> list[list[list[int]]]:
    return [[node.span.slot.tolist(), node.span.exact.tolist()] for node in tree]


def complaints(kind: str, name: str) -> list[str]:
    """What goes wrong where a component answers so; no ``assert``, which ``-O`` would leave out."""
    faults, parts = KINDS[kind]
    fault = Fault(faults[name])
    lab = Lab(build("llama"), debug=True, **parts(fault))
    tree = lab.plant(SLOTS)
    first, second, third = lab.sprout([(tree.root, 3)])
    want = lab.ask([first, third], [(7, 8)] * 2)
    held = residency(tree)
    fault.armed = True
    wrong = []
    try:
        if "source" in parts(fault):
            lab.sprout([(first, 1)], GREEDY)
        else:
            lab.residency.fit(lab.memory.free + 4, [second], "pressure")
        wrong.append("nothing was refused")
    except UsageError as error:
        if error.code not in ("policy-answer", "token-answer"):
            wrong.append(f"code {error.code}")
    except Exception as error:
        wrong.append(repr(error))
    if residency(tree)[: len(held)] != held:
        wrong.append("tokens left")
    if any(node.state is NodeState.OPEN or node.span.resident.any() for node in tree.nodes[4:]):
        wrong.append("an unfinished block is still there")
    fault.armed = False
    lab.memory.check()
    if relative_error(lab.ask([first, third], [(7, 8)] * 2), want) > 1e-5:
        wrong.append("other answers afterwards")
    grown = lab.sprout([(second, 2)])
    if [len(child.tokens) for child in grown] != [LENGTH] * 2 or lab.memory.peak > SLOTS:
        wrong.append("the search does not go on")
    return wrong


@pytest.mark.parametrize(("kind", "name"), every(3, CASES))
def test_a_wrong_answer_is_refused_and_nothing_is_lost(kind: str, name: str) -> None:
    assert complaints(kind, name) == []


def main() -> None:
    """The cases of this module, in a Python without assertions."""
    if __debug__:
        raise SystemExit("assertions are on")
    torch.set_num_threads(1)
    wrong = {case: found for case in CASES if (found := complaints(*case))}
    if wrong:
        raise SystemExit(str(wrong))
    print(f"{len(CASES)} cases")
