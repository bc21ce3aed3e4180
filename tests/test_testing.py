"""check_policy: every policy of ours passes, and every way to go wrong is named."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from support.policies import POLICIES
from support.slow_cases import every

from arbor.retention.base import Blocks, Ints, Scorer, Tokens
from arbor.retention.ordering import order, whole_blocks
from arbor.testing import check_policy

pytestmark = pytest.mark.usefixtures("loaded_once")


@pytest.mark.parametrize("name", every(5, sorted(POLICIES)))
def test_every_policy_of_ours_passes(name: str) -> None:
    check_policy(name)


@pytest.mark.parametrize("name", ["h2o", "keydiff", "rkv", "vatp", "expected", "uniform", "lru"])
def test_policies_whose_heads_keep_their_own_tokens_pass(name: str) -> None:
    check_policy(dataclasses.replace(POLICIES[name], granularity="head"), examples=40)


@dataclass(frozen=True)
class Wrong:
    """An allocator that goes wrong in a way of one's choice."""

    way: str

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Any:
        fair: Ints = whole_blocks(blocks, room, order(blocks.depth))
        match self.way:
            case "greedy":
                return blocks.resident.copy()
            case "more":
                return fair + (len(blocks) > 0)
            case "negative":
                return np.full(len(blocks), -1)
            case "list":
                return fair.tolist()
            case "floats":
                return fair.astype(float)
            case "short":
                return fair[:-1]
            case "by id":
                return whole_blocks(blocks, room, order(blocks.ids))
            case _:
                blocks.value[:] = 0
                return fair


@pytest.mark.parametrize(
    ("way", "sentence"),
    [
        ("greedy", "tokens in all; offered"),
        ("more", "keeps more tokens than are resident|tokens in all"),
        ("negative", "falls below the floors"),
        ("list", "counts is list of \\?, not int64"),
        ("floats", "ndarray of float64, not int64"),
        ("short", "counts for [1-9]"),
        ("by id", "for the same blocks with their ids exchanged"),
        ("writes", "writes into its arguments; copy them first"),
    ],
)
def test_every_way_an_allocator_goes_wrong_is_named(way: str, sentence: str) -> None:
    with pytest.raises(AssertionError, match=f"Wrong: .*({sentence})"):
        check_policy(Wrong(way))


class Moody:
    """Another answer each time."""

    def __init__(self) -> None:
        self.asked = 0

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        self.asked += 1
        preferred = np.roll(np.arange(len(blocks)), self.asked)
        return whole_blocks(blocks, room, preferred)


def test_an_allocator_that_changes_its_mind_is_found() -> None:
    with pytest.raises(AssertionError, match=r"Moody: .* for the same; offered"):
        check_policy(Moody())


@dataclass(frozen=True)
class Sighted:
    """A scorer that goes wrong in a way of one's choice."""

    way: str
    observes: bool = False

    def scores(self, tokens: Tokens) -> Any:
        match self.way:
            case "secretly":
                return tokens.mass.astype(float)
            case "infinite":
                return np.full(len(tokens.block), np.inf)
            case "whole":
                return tokens.position
            case "by block":
                return tokens.block.astype(float)
            case _:
                return np.zeros(len(tokens.block) + 1)


@pytest.mark.parametrize(
    ("way", "sentence"),
    [
        ("secretly", "reads attention, but `observes` is false"),
        ("infinite", "a score is not finite"),
        ("whole", "of int64, not float64"),
        ("by block", "other scores for the same blocks in another order"),
        ("long", "scores for"),
    ],
)
def test_every_way_a_scorer_goes_wrong_is_named(way: str, sentence: str) -> None:
    with pytest.raises(AssertionError, match=f"Sighted: .*{sentence}"):
        check_policy(Sighted(way))
