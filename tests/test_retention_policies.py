"""What holds for every retention policy: bounds, protection, determinism, termination."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.offers import EVERY, SEEDS, evict, held, offer, room_for
from support.policies import POLICIES

from arbor import Solver
from arbor.components import build, spec_of
from arbor.engine.policy_view import PolicyView
from arbor.errors import UsageError
from arbor.retention.base import Blocks, Floats, Ints, Scorer, Tokens
from arbor.retention.policy import Policy, Protect
from arbor.retention.selection import select_all_but, select_by_count

POLICY = st.sampled_from(list(EVERY.values()))
SHARES = st.floats(0, 1)
MANY = settings(max_examples=150)  # of each of the policies a few


@MANY
@given(policy=POLICY, seed=SEEDS, share=SHARES)
def test_counts_lie_between_floor_and_resident_and_use_all_the_room(
    policy: Policy, seed: int, share: float
) -> None:
    blocks = offer(seed)
    room = room_for(blocks, share)

    counts = policy.allocator.counts(blocks, room, policy.scorer)

    assert counts.dtype == np.int64 and counts.shape == (len(blocks),)
    assert (blocks.floor <= counts).all() and (counts <= blocks.resident).all()
    assert counts.sum() == min(room, blocks.resident.sum())


@MANY
@given(policy=POLICY, seed=SEEDS, share=SHARES)
def test_kept_sets_are_sorted_parts_of_what_is_resident_and_hold_what_is_protected(
    policy: Policy, seed: int, share: float
) -> None:
    blocks = offer(seed)
    counts = policy.allocator.counts(blocks, room_for(blocks, share), policy.scorer)

    chosen = select_by_count(blocks, counts, policy.scorer)

    assert len(chosen) == len(blocks)
    for index, offsets in enumerate(chosen):
        protected = held(blocks, index)[blocks.tokens.protected[blocks.tokens.block == index]]
        assert len(offsets) == counts[index]
        assert (np.diff(offsets) > 0).all()
        assert set(offsets) <= set(held(blocks, index))
        assert set(protected) <= set(offsets)


@MANY
@given(policy=POLICY, seed=SEEDS, shares=st.lists(SHARES, min_size=2, max_size=5))
def test_under_repeated_pressure_kept_sets_only_shrink(
    policy: Policy, seed: int, shares: list[float]
) -> None:
    blocks = offer(seed)
    for share in shares:
        room = room_for(blocks, share)
        counts = policy.allocator.counts(blocks, room, policy.scorer)
        after = evict(blocks, list(select_by_count(blocks, counts, policy.scorer)))

        assert (after.resident == counts).all() and (after.resident <= blocks.resident).all()
        blocks = after


@MANY
@given(policy=POLICY, seed=SEEDS, share=SHARES)
def test_an_answer_is_the_same_twice_and_whatever_was_asked_before(
    policy: Policy, seed: int, share: float
) -> None:
    blocks, other = offer(seed), offer(seed + 1)
    room = room_for(blocks, share)
    first = policy.allocator.counts(blocks, room, policy.scorer)
    chosen = list(select_by_count(blocks, first, policy.scorer))

    policy.allocator.counts(other, room_for(other, share), policy.scorer)
    second = policy.allocator.counts(blocks, room, policy.scorer)

    assert (first == second).all()
    again = select_by_count(blocks, second, policy.scorer)
    assert all((a == b).all() for a, b in zip(chosen, again, strict=True))


# Scores


@dataclasses.dataclass(frozen=True)
class Given:
    """Scores that are given."""

    values: tuple[float, ...]

    @property
    def observes(self) -> bool:
        return False

    def scores(self, tokens: Tokens) -> Floats:
        return np.resize(np.array(self.values), len(tokens.block))


@pytest.mark.parametrize(
    "values", [(0.0,), (1.0, 1.0), (-1e300, 1e300), (-0.0, 0.0), (5e-324, 0.0)]
)
@pytest.mark.parametrize("name", sorted({"h2o", "kkt", "lru"} & set(POLICIES)))
@given(seed=SEEDS, share=SHARES)
def test_protected_tokens_stay_whatever_the_scores(
    name: str, values: tuple[float, ...], seed: int, share: float
) -> None:
    blocks, scorer = offer(seed), Given(values)
    tokens = blocks.tokens

    counts = POLICIES[name].allocator.counts(blocks, room_for(blocks, share), scorer)

    chosen = select_by_count(blocks, counts, scorer)
    for token in np.flatnonzero(tokens.protected):
        assert tokens.offset[token] in chosen[int(tokens.block[token])]


@given(seed=SEEDS)
def test_the_view_of_some_blocks_is_a_part_of_the_view_of_all(seed: int) -> None:
    blocks = offer(seed)
    part = np.flatnonzero(np.random.default_rng(seed).random(len(blocks)) < 0.5)
    here = np.isin(blocks.tokens.block, part)

    some = blocks.see(part)

    for field in dataclasses.fields(Tokens):
        got, want = getattr(some, field.name), getattr(blocks.tokens, field.name)[here]
        if field.name == "kv":
            got, want = got.place, want.place
        assert (got == want).all()


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_score_that_is_not_finite_is_noticed(bad: float) -> None:
    blocks = offer(1, 8, ties=False)
    scorer = Given((0.5, bad))

    with pytest.raises(UsageError, match="not finite"):
        POLICIES["h2o"].allocator.counts(blocks, room_for(blocks, 0.5), scorer)
    with pytest.raises(UsageError, match="not finite"):
        select_by_count(blocks, np.maximum(blocks.resident - 1, 0), scorer)


def test_scores_of_another_shape_are_noticed() -> None:
    class Short(Given):
        def scores(self, tokens: Tokens) -> Floats:
            return np.zeros(1)

    blocks = offer(1, 8, ties=False)
    with pytest.raises(UsageError, match=r"scores of shape \(1,\)"):
        select_by_count(blocks, np.maximum(blocks.resident - 1, 0), Short(()))


def test_a_token_that_leaves_twice_is_noticed() -> None:
    blocks = offer(1, 8, ties=False)

    assert int(blocks.resident.sum() - select_all_but(blocks, np.array([2, 0]))[0].sum()) == 2
    with pytest.raises(UsageError, match="named a token twice"):
        select_all_but(blocks, np.array([2, 2]))


class Zeros:
    """Keeps nothing, floors or not."""

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        return np.zeros(len(blocks), np.int64)


class AllLeave:
    """Names every token."""

    def leaving(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        return np.arange(len(blocks.tokens.block))

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        return select_all_but(blocks, self.leaving(blocks, room, scorer))[0]


class Grows:
    """Writes into the offer."""

    def counts(self, blocks: Blocks, room: int, scorer: Scorer) -> Ints:
        blocks.resident[:] += 5
        return blocks.floor


@dataclass(frozen=True)
class Unprotects:
    """Writes into the tokens it is shown."""

    observes: bool = False

    def scores(self, tokens: Tokens) -> Floats:
        tokens.protected[:] = False
        return tokens.position.astype(np.float64)


@pytest.mark.parametrize(
    ("policy", "problem"),
    [
        (Policy(Zeros(), protect=Protect(tail=4, floor=4)), "Zeros keeps 0 tokens of a block"),
        (Policy(AllLeave()), "AllLeave keeps 0 tokens of a block that keeps 4 in any case"),
        (Policy(Grows()), "Grows raised ValueError in 'counts'"),
        (Policy(POLICIES["h2o"].allocator, Unprotects()), "Unprotects raised ValueError"),
    ],
    ids=lambda each: "",
)
def test_what_stays_in_any_case_cannot_be_taken(policy: Policy, problem: str) -> None:
    settings = {"mode": "lossy", "budget": "70tok", "max_expansions": 4}
    with Solver(policy=policy, **settings) as solver, pytest.raises(UsageError) as caught:
        solver.solve("4 5 6 10")
    assert problem in caught.value.message
    assert caught.value.code == "policy-answer"


@pytest.mark.parametrize("seed", [37, 4])
def test_a_floor_is_what_is_protected_also_where_that_was_eased(
    monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    right = PolicyView._floor
    eased = 0

    def floor(self: PolicyView, *args: Any) -> Ints:
        nonlocal eased
        found = right(self, *args)
        ids, resident, see, *_, protect = args
        tokens = see(np.arange(len(ids)))
        protected = np.bincount(tokens.block[tokens.protected], minlength=len(ids))
        assert (found == np.maximum(np.minimum(resident, protect.floor), protected)).all()
        eased += 0 < protect.tail < self._policy.protect.tail
        return found

    monkeypatch.setattr(PolicyView, "_floor", floor)
    settings = {"controller": "beam", "max_depth": 3, "step_tokens": 9}
    with Solver(policy="arborkv", budget="90tok", seed=seed, **settings) as solver:
        solver.solve("4 5 6 10")
    assert eased


def test_floors_that_do_not_fit_are_noticed() -> None:
    blocks = offer(2, 8, ties=False)
    blocks = dataclasses.replace(blocks, floor=blocks.resident)
    room = int(blocks.floor.sum()) - 1

    for name in sorted({"lru", "kkt", "arborkv", "h2o", "uniform"} & set(POLICIES)):
        with pytest.raises(AssertionError, match=f"of {room} slots"):
            POLICIES[name].allocator.counts(blocks, room, POLICIES[name].scorer)


# Names


def test_policies_that_know_paths_spare_them_and_published_ones_protect_tails() -> None:
    sparing = {name for name, policy in POLICIES.items() if policy.spares_paths}
    published = {name for name, policy in POLICIES.items() if policy.protect.tail}

    assert sparing >= {"belady", "ends", "lru", "reentry"}
    assert not sparing & {"h2o", "snapkv", "streaming", "tova", "uniform"}
    assert published == {"arborkv", "kkt"} & set(POLICIES)
    assert Protect() == Protect(sinks=4, recent=8, tail=0, floor=0, threshold=None)
    own = dict.fromkeys(published, Protect(tail=8, floor=4))
    own |= {"lazyeviction": Protect(recent=25), "raas": Protect(prompt=True)}
    own |= {"rpc": Protect(recent=32), "vatp": Protect(sinks=20)}
    own |= dict.fromkeys(("thinkv", "thinkv-bits", "triattention"), Protect(prompt=True))
    own["hierarchy"] = Protect(recent=128, prompt=True)
    for name in POLICIES:
        assert POLICIES[name].protect == own.get(name, Protect())


def test_protection_is_given_up_from_the_floor_to_the_sinks() -> None:
    eased = list(Protect(sinks=1, recent=2, tail=3, floor=4, threshold=0.5).easing())

    assert [(each.sinks, each.recent, each.tail, each.floor) for each in eased] == [
        (1, 2, 3, 4),
        (1, 2, 3, 2),
        (1, 2, 3, 1),
        (1, 2, 3, 0),
        (1, 2, 1, 0),
        (1, 2, 0, 0),
        (1, 1, 0, 0),
        (1, 0, 0, 0),
        (0, 0, 0, 0),
    ]
    assert {each.threshold for each in eased} == {0.5}
    prompt = [each.prompt for each in Protect(1, 1, 1, 0, prompt=True).easing()]
    assert prompt == [True, True, False, False, False]  # tail, prompt, recent, sinks
    assert list(Protect(0, 0, 0, 0).easing()) == [Protect(0, 0, 0, 0)]


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("lru", "sinks", -1),
        ("lru", "threshold", -1e-9),
    ],
)
def test_a_setting_out_of_range_is_refused(name: str, setting: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{setting}={value}"):
        build("policy", name, **{setting: value})


@given(st.sampled_from(sorted(POLICIES)), st.booleans(), st.sampled_from([0, 3, 25]))
def test_settings_that_specs_leave_out_come_back(name: str, prompt: bool, spare: int) -> None:
    policy = build("policy", name, prompt=prompt, spare=spare)

    spec = spec_of(policy)

    assert build("policy", spec) == policy
    assert ("prompt" in spec["protect"], "spare" in spec["trigger"]) == (prompt, spare > 0)


@pytest.mark.parametrize(
    ("name", "settings", "message"),
    [
        ("h2o", {"observed": "half"}, "one, quarter or all"),
        ("streaming", {"observed": "all"}, "reads neither attention nor keys nor queries"),
        ("h2o", {"observed": "one", "granularity": "head"}, "granularity=head reads every layer"),
        ("thinkv", {"observed": "all", "allocator": {"layers": (1,)}}, "with layers=1"),
    ],
)
def test_layers_that_nothing_is_read_of_are_refused(
    name: str, settings: dict[str, Any], message: str
) -> None:
    policy = POLICIES[name]
    settings = dict(settings)
    if "allocator" in settings:
        settings["allocator"] = dataclasses.replace(policy.allocator, **settings["allocator"])
    with pytest.raises(UsageError, match=message):
        dataclasses.replace(policy, **settings)
