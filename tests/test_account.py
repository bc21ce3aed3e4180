"""A budget that is a part of full retention, and an amount: what searches hold at every instant."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from fractions import Fraction
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from support.drawn_searches import MODEL, QUESTION, DrawnSearch, drawn_lab, run
from support.slow_cases import only
from support.trees import Lab

from arbor.engine.operation import GivenBlock, Growing
from arbor.engine.retained import UNLIMITED, PartOfRetained
from arbor.errors import BudgetInfeasible
from arbor.events import Evicted, Forwarded
from arbor.memory import memory as memory_module
from arbor.memory.stores import LowerRoom
from arbor.tree import NO_RECORD, NodeState, ThoughtTree

PARTS = ("0.02", "0.1", "0.25", "0.5", "0.9")


@pytest.fixture(autouse=True)
def small_pools(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pool that grows begins with a few slots."""
    monkeypatch.setattr(memory_module, "FIRST_BYTES", 1)


class Watch:
    """What is held and allowed after every step, and what may be allowed, counted from the trees.

    Args:
        lab: whose trees are open, with a part of full retention as their budget.
        part: of it.
        least: tokens that every search is left in lossy mode; None: one expansion.
    """

    def __init__(self, lab: Lab, part: Fraction, least: int | None = None) -> None:
        self.lab, self.part, self.least = lab, part, least
        self._peaks: dict[ThoughtTree, int] = {}

    def __call__(self) -> None:
        trees = list(self.lab.state.trees)
        for group in [[each] for each in trees] if self.lab.state.own_budgets else [trees]:
            if group:
                self._look_at(group)

    def _look_at(self, trees: list[ThoughtTree]) -> None:
        state, full, expansion = self.lab.state, 0, self.least or 0
        ended = [state.trees[tree].lengths for tree in trees]
        count = sum(each.count for each in ended)
        of_all = sum(each.total for each in ended) / count if count else 0.0
        for tree in trees:
            lengths = state.trees[tree].lengths
            alive = [node for node in tree if node.state is not NodeState.PRUNED]
            mean = lengths.mean if lengths.count else of_all
            # a block that waits again has one more token than it shows
            grown = [n for n in alive if n.state is NodeState.OPEN]
            now = sum(len(n.tokens) for n in alive if n.state is not NodeState.OPEN)
            now += sum(max(len(n.tokens) + 1, mean) for n in grown)
            self._peaks[tree] = max(self._peaks.get(tree, 0), int(now))
            full += self._peaks[tree]
            for node in alive if self.least is None else ():
                children = [child for child in node.children if child in alive]
                own = sum(len(child.tokens) + 1 for child in children)
                expansion = max(expansion, node.end + own + QUESTION)
        account = state.account(trees[0])
        counted = max(math.floor(self.part * full), expansion)
        assert account.used <= account.slots <= counted


def shape(choices: random.Random) -> tuple[int, int]:
    """Most tokens of a block, and how often a search grows."""
    longest = choices.choice([4, 20, 100])
    return longest, 2 if longest == 100 else 3


def of_full_retention(seed: int, count: int, budgets: int) -> None:
    """Searches, at full retention and in drawn budgets: they grow the same trees, whatever is
    evicted, fetched and shared, and hold no more than is allowed.

    Args:
        seed: of all that is drawn.
        count: searches in one engine.
        budgets: how often.
    """
    choices = random.Random(seed)
    share = choices.choice(["exact", "exact", "off"])
    longest, rounds = shape(choices)
    early = choices.choice([0.0, 0.7, 1.0])

    def searches() -> list[DrawnSearch]:
        numbers = range(count * seed, count * (seed + 1))
        return [DrawnSearch(each, longest, rounds, early=early) for each in numbers]

    whole = Lab(MODEL, policy="reentry", share=share)
    expected = searches()
    for search in expected:
        whole.open(search.tree, 0, part=Fraction(1), alone=False)
    held: list[int] = []
    run(whole, expected, lambda: held.append(whole.memory.used))
    if count == 1 and share == "off":  # what siblings share, they hold twice until they have ended
        assert expected[0].peak == max(held)
    least = max(search.least for search in expected)

    for _ in range(budgets):
        lab, found = drawn_lab(choices, share), searches()
        if choices.random() < 0.5:
            part = Fraction(choices.choice(PARTS))
            for search in found:
                lab.open(search.tree, 0, part=part, alone=False)
            run(lab, found, Watch(lab, part))
            assert [each.peak for each in found] == [each.peak for each in expected]
        else:
            slots = least + choices.randint(0, choices.choice([1, longest, 3 * longest]))
            for search in found:
                lab.open(search.tree, slots, alone=False)
            run(lab, found)
            assert max(each.peak for each in lab.events if isinstance(each, Forwarded)) <= slots
        assert [each.tokens for each in found] == [each.tokens for each in expected]


def test_a_block_lends_nothing_that_it_is_lent_itself() -> None:
    """Three siblings begin alike: one was fetched, a second took from it and gave to the third."""
    of_full_retention(667, 1, 4)


@pytest.mark.parametrize("seed", only({16, 44}, range(60)))
def test_a_question_that_goes_first_leaves_room_for_the_blocks_of_others(seed: int) -> None:
    choices = random.Random(seed)
    longest, rounds = shape(choices)
    lab = Lab(MODEL, policy="reentry")
    found = [DrawnSearch(8 * seed + at, longest, rounds, early=1.0) for at in range(8)]
    part = Fraction(choices.choice(["0.02", "0.1", "0.25"]))
    for search in found:
        lab.open(search.tree, 0, part=part, alone=False)

    run(lab, found, Watch(lab, part))


def lossy(seed: int, count: int) -> None:
    """Searches in lossy mode, each within its own drawn budget until it ends."""
    choices = random.Random(seed)
    longest, rounds = shape(choices)
    given = choices.choice([0.0, 0.7])
    lab = drawn_lab(choices, "off", "lossy")
    # what the policy protects, new tokens and a question; a given block is never left out
    least = lab.policy.protect.sinks + lab.policy.protect.recent + 4 + QUESTION
    room = least + longest if given else least
    searches = [DrawnSearch(count * seed + at, longest, rounds, given) for at in range(count)]
    if choices.random() < 0.5:
        part = Fraction(choices.choice(PARTS))
        for search in searches:
            lab.open(search.tree, 0, part=part, least=least, alone=False)
        run(lab, searches, Watch(lab, part, room))
    else:
        slots = room + choices.randint(0, choices.choice([1, longest, 3 * longest]))
        for search in searches:
            lab.open(search.tree, slots, pool=count * slots, alone=False)
        run(lab, searches)
        assert max(each.peak for each in lab.events if isinstance(each, Forwarded)) <= slots


def each_of(check: Callable[[int], None], seeds: range) -> None:
    """Check every seed; the first that fails is named."""
    for seed in seeds:
        try:
            check(seed)
        except Exception as error:
            error.add_note(f"seed {seed}")
            raise


# the engine before what siblings share was fetched once fails parts 3 and 9
@pytest.mark.parametrize("part", only({3}, range(120)))
def test_searches_in_any_budget_have_the_trees_of_full_retention(part: int) -> None:
    """48 searches."""
    each_of(lambda seed: of_full_retention(seed, 1, 4), range(12 * part, 12 * part + 12))


@pytest.mark.parametrize("part", only({30}, range(90)))
def test_eight_searches_in_any_budget_have_the_trees_of_full_retention(part: int) -> None:
    """32 searches."""
    each_of(lambda seed: of_full_retention(seed, 8, 2), range(2 * part, 2 * part + 2))


@pytest.mark.parametrize("part", only({30}, range(90)))
def test_in_lossy_mode_searches_end_within_any_budget(part: int) -> None:
    """16 searches: eight alone, and eight in one engine."""
    each_of(lambda seed: lossy(seed, 1), range(8 * part, 8 * part + 8))
    each_of(lambda seed: lossy(seed, 8), range(part, part + 1))


def of_forty(lab: Lab, search: DrawnSearch) -> Growing:
    """Begin to grow a block whose 40 tokens are given."""
    tokens = tuple(range(20, 60))
    block = GivenBlock(search.tree.root, tokens, search.growth, whole=True)
    return lab.begin_given([block])


def test_a_part_in_lossy_mode_leaves_room_for_a_block_of_given_tokens() -> None:
    """The search once waited for ever for a part of full retention that was smaller."""
    lab = Lab(MODEL, policy="ends", mode="lossy", share="off", rehydrate="off")
    search = DrawnSearch(3, 40, 1)
    lab.open(search.tree, 0, part=Fraction("0.1"), least=22, alone=False)
    lab.extend(search.tree.root)

    growing = of_forty(lab, search)
    for _ in range(3):
        lab.step()

    assert len(growing.result()[0].tokens) == 40
    assert lab.state.account(search.tree).slots == 12 + 40, "what is protected of the path, and it"


def test_a_block_that_fits_nowhere_ends_its_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    """It once was tried again for ever: it was taken for one of the blocks that run."""
    monkeypatch.setattr(Lab, "_require", lambda *_: None)
    lab = Lab(MODEL, policy="ends", mode="lossy", share="off", rehydrate="off")
    search = DrawnSearch(3, 40, 1)
    lab.open(search.tree, 30, alone=False)
    lab.extend(search.tree.root)

    growing = of_forty(lab, search)
    for _ in range(3):
        lab.step()

    with pytest.raises(BudgetInfeasible, match="with its next block"):
        growing.result()


@pytest.mark.parametrize("slots", [30, 33])
def test_what_two_siblings_have_records_of_is_fetched_once(slots: int) -> None:
    """One left the device while the other was computed anew; both were planned to share."""
    lab = Lab(MODEL, policy="lru", lower=LowerRoom(1000), debug=True)
    search = DrawnSearch(3, 14, 4)
    lab.open(search.tree, slots)
    root = search.tree.root
    lab.extend(root)
    common = tuple(range(20, 30))
    siblings = []
    for tokens in ((*common, 1, 2), range(40, 52), (*common, 3, 4), range(30, 42)):
        block = GivenBlock(root, tuple(tokens), search.growth, whole=True)
        siblings += lab._complete(lab.begin_given([block])).result()
    one, _, other, _ = siblings
    assert all((node.span.record[:2] != NO_RECORD).all() for node in (one, other))

    lab.ask([one, other], [[7, 7], [7, 7]])

    asked = [e for e in lab.events if isinstance(e, Forwarded) and e.kind == "verify"]
    assert len(asked) == 1 and lab.memory.peak <= slots


def test_full_retention_never_evicts_and_its_pool_grows_as_it_is_used(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_module, "FIRST_BYTES", 1)
    lab = Lab(MODEL, policy="reentry", debug=True)
    search = DrawnSearch(5, 12, 4)
    lab.open(search.tree, 0, part=Fraction(1))
    begun = lab.memory.slots
    lab.extend(search.tree.root)
    slots = search.tree.root.span.slot.copy()
    before = [k[slots].clone() for k in lab.memory.pool.k]
    children = lab.sprout([(search.tree.root, 40)], length=9)

    assert begun == 1 and lab.memory.slots >= lab.memory.used > 100
    assert all(
        torch.equal(k[slots], old) for k, old in zip(lab.memory.pool.k, before, strict=True)
    ), "what the slots hold stays in them"
    assert np.array_equal(search.tree.root.span.slot, slots)
    assert lab.state.account(search.tree).slots == UNLIMITED
    assert all(child.span.resident.all() for child in children)
    assert not any(isinstance(event, Evicted) for event in lab.events)


def test_an_amount_below_the_prompt_and_a_token_is_refused_with_the_size_that_works() -> None:
    lab = Lab(MODEL, policy="reentry", debug=True)
    search = DrawnSearch(3, 12, 4)
    lab.open(search.tree, search.tree.root.end)
    lab.extend(search.tree.root)

    with pytest.raises(BudgetInfeasible) as caught:
        lab.begin_grow([(search.tree.root, 1)], search.growth)

    assert caught.value.needed == search.tree.root.end + 1


# A part of full retention


def search_of(least: int, expected: int, most: int) -> Any:
    """What a part asks of a search."""
    lengths = SimpleNamespace(count=0, total=0)
    return SimpleNamespace(least=least, most=most, lengths=lengths, expected=lambda _: expected)


def test_a_part_reports_the_least_where_that_was_more() -> None:
    part, search = PartOfRetained(Fraction(1, 4)), search_of(10, 80, 200)
    part.take(search)
    assert part() == 20 and part.report() == (20, 0)
    search.least = 30
    assert part() == 30 and part.report() == (30, 30)


def test_the_whole_is_that_of_the_searches_in_progress() -> None:
    whole, last = PartOfRetained(Fraction(1)), search_of(10, 80, 50)
    whole.take(search_of(10, 80, 200))
    whole.take(last)
    assert whole() == 250
    whole.drop(last)
    assert whole() == 200
