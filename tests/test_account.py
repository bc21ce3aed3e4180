"""A budget that is a part of full retention, and an amount: what searches hold at every instant."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from support.models import Words, build
from support.slow_cases import every
from support.trees import SAMPLED, Lab

from arbor.engine.account import UNLIMITED
from arbor.engine.operation import GivenBlock
from arbor.engine.stop_rule import StopRule
from arbor.engine.token_source import Growth
from arbor.errors import BudgetInfeasible
from arbor.events import Evicted, Forwarded, Limited
from arbor.memory import memory as memory_module
from arbor.memory.stores import LowerRoom
from arbor.model.fetch_costs import FetchCosts, Run
from arbor.tasks.base import BlockLimits
from arbor.tree import NO_RECORD, Node, NodeState, ThoughtTree

pytestmark = pytest.mark.usefixtures("loaded_once")

# in float64 no token depends on the order of sums
MODEL = build("llama").to(torch.float64)
DEPTH, QUESTION = 5, 6  # most blocks on a path, most tokens of a question


class AnyCosts(FetchCosts):
    """What is fetched is drawn at random rather than measured."""

    def __init__(self, choices: random.Random) -> None:
        super().__init__((), 0.0, ((1, 0.0),))
        object.__setattr__(self, "_choices", choices)

    def fetched(self, runs: Sequence[Run], rows: int) -> list[bool]:
        choices: random.Random = self._choices  # type: ignore[attr-defined]
        return [choices.random() < 0.5 for _ in runs]


class Search:
    """A search whose tree depends on its seed alone: rounds of growing, asking and giving up."""

    def __init__(self, lab: Lab, seed: int, longest: int, temperature: float = 1.0) -> None:
        self.choices = random.Random(seed)
        ends = range(0, 80, self.choices.choice([3, 8, 40, 80]))
        stop = StopRule(Words(), BlockLimits((), longest, DEPTH), ends)
        self.growth = Growth(seed, SAMPLED, stop)
        self.lab = lab
        length = self.choices.randint(3, 12)
        self.tree = ThoughtTree([(seed + at) % 60 + 1 for at in range(length)])
        self.nodes: dict[tuple[int, ...], Node] = {(): self.tree.root}

    def open(self, slots: int, **settings: Any) -> None:
        self.lab.open(self.tree, slots, alone=False, **settings)

    def rounds(self, count: int) -> Any:
        """Operations, one after the other; each is to be done before the next is asked for."""
        lab, choices = self.lab, self.choices
        yield lab.begin_extend(self.tree.root)
        for _ in range(count):
            ends = [key for key in self.nodes if len(key) < DEPTH]
            leaves = choices.sample(ends, min(len(ends), choices.randint(1, 4)))
            pairs = [(self.nodes[key], choices.randint(1, 4)) for key in leaves]
            if choices.random() < 0.6:  # siblings that begin alike, and share
                given = [self.alike(leaf) for leaf, width in pairs for _ in range(width)]
                growing = lab.begin_given(given)
            else:
                growing = lab.begin_grow(pairs, self.growth)
            yield growing
            grown = growing.result()
            self.nodes |= {child.key: child for child in grown}
            asked = choices.sample(grown, choices.randint(0, len(grown)))
            if asked:
                questions = [[7] * choices.randint(1, QUESTION) for _ in asked]
                asking = lab.begin_ask(asked, questions)
                yield asking
                asking.result()
            idle = [key for key, node in self.nodes.items() if key and not node.children]
            for key in choices.sample(idle, min(len(idle), choices.randint(0, 3))):
                node = self.nodes.pop(key)
                node.state = NodeState.PRUNED
                lab.forget([node])

    def alike(self, leaf: Node) -> GivenBlock:
        """A block whose first tokens are those of its siblings, up to some place."""
        most = self.growth.stop.max_tokens
        tokens = [(leaf.id + at) % 50 + 1 for at in range(most)][: self.choices.randint(1, most)]
        tokens += [self.choices.randint(1, 60)] * self.choices.randint(0, most - len(tokens))
        return GivenBlock(leaf, tokens, self.growth, whole=True)

    @property
    def tokens(self) -> list[list[int]]:
        return [node.tokens for node in self.tree]


def run(
    lab: Lab, searches: Sequence[Search], rounds: int, look: Callable[[], None] = lambda: None
) -> None:
    """Take steps until all are over, those that are over closed at once; look after each."""
    going = {search: iter(search.rounds(rounds)) for search in searches}
    waiting: dict[Search, Any] = {search: next(steps) for search, steps in going.items()}
    while waiting:
        for search, operation in list(waiting.items()):
            while operation is not None and operation.done:
                operation.check()
                operation = next(going[search], None)
            if operation is None:
                del waiting[search]
                lab.close(search.tree)
                look()
            else:
                waiting[search] = operation
        if waiting:
            lab.step()
            look()


class Watch:
    """What is held and allowed after every step, and what may be allowed, counted from the trees.

    Attributes:
        seen: (held, allowed, allowed as counted here).
    """

    def __init__(self, lab: Lab, part: Fraction) -> None:
        self.lab, self.part = lab, part
        self.seen: list[tuple[int, int, int]] = []
        self._peaks: dict[ThoughtTree, int] = {}

    def __call__(self) -> None:
        lab, full, expansion = self.lab, 0, 0
        if not lab.state.trees:
            return
        ended = [opened.lengths for opened in lab.state.trees.values() if opened.lengths.count]
        count = sum(each.count for each in ended)
        of_all = sum(each.total for each in ended) / count if count else 0.0
        for tree, opened in lab.state.trees.items():
            alive = [node for node in tree if node.state is not NodeState.PRUNED]
            mean = opened.lengths.mean if opened.lengths.count else of_all
            # a block that waits again has one more token than it shows
            grown = [n for n in alive if n.state is NodeState.OPEN]
            now = sum(len(n.tokens) for n in alive if n.state is not NodeState.OPEN)
            now += sum(max(len(n.tokens) + 1, mean) for n in grown)
            self._peaks[tree] = max(self._peaks.get(tree, 0), int(now))
            full += self._peaks[tree]
            for node in alive:
                children = [child for child in node.children if child in alive]
                own = sum(len(child.tokens) + 1 for child in children)
                expansion = max(expansion, node.end + own + QUESTION)
        account = lab.state.account(next(iter(lab.state.trees)))
        counted = max(math.floor(self.part * full), expansion)
        self.seen.append((lab.memory.used, account.slots, counted))


def lab_of(seed: int, **settings: Any) -> Lab:
    choices = random.Random(seed)
    host = choices.choice([0, 0, 7, 60, 100_000])
    lower = LowerRoom(host) if host else LowerRoom()
    share = choices.choice(["exact", "exact", "off"])
    return Lab(
        MODEL,
        policy=choices.choice(["reentry", "lru", "arborkv", "uniform"]),
        rehydrate=choices.choice(["selective", "span"]),
        share=share,
        lower=lower,
        costs=AnyCosts(choices) if host else None,
        debug=True,
        **settings,
    )


SEEDS = every(20, range(400))


@pytest.mark.parametrize("seed", SEEDS)
def test_a_part_of_full_retention_is_held_at_every_instant_and_changes_no_token(seed: int) -> None:
    choices = random.Random(seed)
    part = Fraction(choices.choice(["0.02", "0.1", "0.25", "0.5", "0.9"]))
    longest, count = choices.choice([4, 12, 100]), choices.choice([1, 1, 3])
    rounds = 2 if longest == 100 else 4
    whole = Lab(MODEL, policy="reentry")
    expected = [Search(whole, seed + at, longest) for at in range(count)]
    for search in expected:
        search.open(0, part=Fraction(1))
    run(whole, expected, rounds)

    lab = lab_of(seed)
    watch = Watch(lab, part)
    searches = [Search(lab, seed + at, longest) for at in range(count)]
    for search in searches:
        search.open(0, part=part)
    run(lab, searches, rounds, watch)

    assert [each.tokens for each in searches] == [each.tokens for each in expected]
    assert all(held <= allowed <= counted for held, allowed, counted in watch.seen)


@pytest.mark.parametrize("seed", SEEDS)
def test_an_amount_in_which_every_path_fits_is_enough_whatever_is_fetched(seed: int) -> None:
    """More was once planned than fits: equal tokens of siblings were fetched once for each."""
    choices = random.Random(seed)
    longest = choices.choice([4, 12, 100])
    rounds = 2 if longest == 100 else 4
    whole = Lab(MODEL, policy="reentry")
    expected = Search(whole, seed, longest)
    expected.open(0, part=Fraction(1))
    run(whole, [expected], rounds)
    slots = max(node.end for node in expected.tree) + QUESTION + choices.choice([0, 1, 5, 20])

    lab = lab_of(seed)
    search = Search(lab, seed, longest)
    search.open(slots)
    run(lab, [search], rounds)

    assert search.tokens == expected.tokens
    assert max(event.peak for event in lab.events if isinstance(event, Forwarded)) <= slots


@pytest.mark.parametrize("seed", every(6, range(60)))
def test_in_lossy_mode_a_part_is_held_down_to_what_the_policy_protects(seed: int) -> None:
    choices = random.Random(seed)
    part = Fraction(choices.choice(["0.1", "0.25", "0.5"]))
    lab = Lab(
        MODEL,
        policy=choices.choice(["ends", "uniform", "snapkv"]),
        mode="lossy",
        rehydrate=choices.choice(["off", "selective"]),
        debug=True,
    )
    least = lab.policy.protect.sinks + lab.policy.protect.recent + 4 + QUESTION
    held: list[tuple[int, int, int]] = []

    def look() -> None:
        for tree in lab.state.trees:
            account = lab.state.account(tree)
            held.append((account.used, account.slots, tree.tokens))

    searches = [Search(lab, seed + at, 12) for at in range(choices.choice([1, 3]))]
    for search in searches:
        search.open(0, part=part, least=least)
    run(lab, searches, 3, look)

    assert all(used <= allowed for used, allowed, _ in held)
    assert all(allowed <= max(least, part * (whole + 16 * 12)) for _, allowed, whole in held)
    assert any(isinstance(event, Evicted) for event in lab.events)


@pytest.mark.parametrize("slots", [30, 33])
def test_what_two_siblings_have_records_of_is_fetched_once(slots: int) -> None:
    """One left the device while the other was computed anew; both were planned to share."""
    lab = Lab(MODEL, policy="lru", lower=LowerRoom(1000), debug=True)
    search = Search(lab, 3, 14)
    search.open(slots)
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
    search = Search(lab, 5, 12)
    search.open(0, part=Fraction(1))
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


def test_what_was_allowed_is_reported_after_every_wave() -> None:
    lab = Lab(MODEL, policy="reentry", share="off", debug=True)
    search = Search(lab, 3, 12)
    search.open(0, part=Fraction("0.25"))
    run(lab, [search], 4)

    reports = [event for event in lab.events if isinstance(event, Limited)]
    held = [event.kv.device for event in lab.events if isinstance(event, Forwarded)]
    assert max(report.tokens for report in reports) >= max(held)
    assert [report.retained for report in reports] == sorted(report.retained for report in reports)
    alive = sum(len(n.tokens) for n in search.tree if n.state is not NodeState.PRUNED)
    assert reports[-1].retained >= alive


def test_an_amount_below_the_prompt_and_a_token_is_refused_with_the_size_that_works() -> None:
    lab = Lab(MODEL, policy="reentry", debug=True)
    search = Search(lab, 3, 12)
    search.open(search.tree.root.end)
    lab.extend(search.tree.root)

    with pytest.raises(BudgetInfeasible) as caught:
        lab.begin_grow([(search.tree.root, 1)], search.growth)

    assert caught.value.needed == search.tree.root.end + 1
