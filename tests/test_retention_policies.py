"""What holds for every retention policy: bounds, protection, determinism, termination."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.offers import EVERY, SEEDS, evict, held, offer, permuted, room_for
from support.policies import POLICIES

from arbor.components import build, spec_of
from arbor.errors import BudgetInfeasible, UsageError
from arbor.papers.arborkv.kkt import KKT
from arbor.papers.arborkv.ratio import Ratio
from arbor.retention.allocators.pooled import Pooled
from arbor.retention.base import Allocator, Blocks, Floats, Ints, Scorer, Tokens
from arbor.retention.ordering import lowest, order
from arbor.retention.policy import Policy, Protect
from arbor.retention.scorers.heavy_hitters import HeavyHitters
from arbor.retention.scorers.random_tokens import RandomTokens
from arbor.retention.selection import best_tokens, select, select_all_but, select_by_count

# allocators that choose within parts of a block
DIVIDING = {"ams", "chunkkv", "strata", "thinkv"}
every_policy = pytest.mark.parametrize("policy", EVERY.values(), ids=list(EVERY))
SHARES = st.floats(0, 1)
FEW = settings(max_examples=15)  # of each of many policies


def unseen(blocks: Blocks) -> Blocks:
    """The same offer, whose token view must not be asked for."""

    def see(indices: Ints) -> Tokens:
        raise AssertionError("nobody needs the tokens")

    return dataclasses.replace(blocks, see=see)


@every_policy
@FEW
@given(seed=SEEDS, share=SHARES)
def test_counts_lie_between_floor_and_resident_and_use_all_the_room(
    policy: Policy, seed: int, share: float
) -> None:
    blocks = offer(seed)
    room = room_for(blocks, share)

    counts = policy.allocator.counts(blocks, room, policy.scorer)

    assert counts.dtype == np.int64 and counts.shape == (len(blocks),)
    assert (blocks.floor <= counts).all() and (counts <= blocks.resident).all()
    assert counts.sum() == min(room, blocks.resident.sum())


@every_policy
@FEW
@given(seed=SEEDS, share=SHARES)
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


@every_policy
@FEW
@given(seed=SEEDS)
def test_where_everything_fits_everything_stays_unseen(policy: Policy, seed: int) -> None:
    blocks = offer(seed)
    for spare in (0, 1, 1000):
        room = int(blocks.resident.sum()) + spare

        counts = policy.allocator.counts(unseen(blocks), room, policy.scorer)

        assert (counts == blocks.resident).all()
    chosen = select_by_count(blocks, counts, policy.scorer)
    assert all((chosen[i] == held(blocks, i)).all() for i in range(len(blocks)))


@every_policy
@FEW
@given(seed=SEEDS, shares=st.lists(SHARES, min_size=2, max_size=5))
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


@every_policy
@FEW
@given(seed=SEEDS, share=SHARES)
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


@every_policy
@FEW
@given(seed=SEEDS, share=SHARES)
def test_blocks_under_other_ids_keep_the_same_tokens(
    policy: Policy, seed: int, share: float
) -> None:
    blocks = offer(seed, ties=False)
    order = np.random.default_rng(seed).permutation(len(blocks))
    moved = permuted(blocks, order)
    room = room_for(blocks, share)

    counts = policy.allocator.counts(blocks, room, policy.scorer)
    there = policy.allocator.counts(moved, room, policy.scorer)

    assert np.abs(there - counts[order]).max(initial=0) <= 1
    # where lengths or positions are equal the node id decides, by one token a block
    if policy not in (EVERY["streaming"], EVERY["uniform"], EVERY["arborkv, ratio_min"]):
        chosen = select_by_count(blocks, counts, policy.scorer)
        again = select_by_count(moved, there, policy.scorer)
        assert (there == counts[order]).all()
        assert all((again[i] == chosen[old]).all() for i, old in enumerate(order.tolist()))


@every_policy
@FEW
@given(seed=SEEDS)
def test_at_their_floors_blocks_stay_as_they_are(policy: Policy, seed: int) -> None:
    blocks = offer(seed)

    counts = policy.allocator.counts(blocks, int(blocks.floor.sum()), policy.scorer)

    assert (counts == blocks.floor).all()


@every_policy
def test_pressure_ends_at_once_where_every_block_is_at_its_minimum(policy: Policy) -> None:
    """The paper's loop decrements the block of least priority to K_min, and then it for ever."""
    blocks = offer(3, 2000, longest=40)
    least = dataclasses.replace(blocks, resident=blocks.floor, see=evict_to_floor(blocks).only)

    for room in (int(least.floor.sum()), int(least.floor.sum()) + 1):
        assert (policy.allocator.counts(least, room, policy.scorer) == least.floor).all()
    for share in (0.0, 0.001, 0.5, 0.999):
        policy.allocator.counts(blocks, room_for(blocks, share), policy.scorer)


def evict_to_floor(blocks: Blocks) -> Tokens:
    tokens = blocks.tokens
    place = np.arange(len(tokens.block)) - np.searchsorted(tokens.block, tokens.block)
    stays = place < blocks.floor[tokens.block]
    return Tokens(**{f.name: getattr(tokens, f.name)[stays] for f in dataclasses.fields(Tokens)})


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
@pytest.mark.parametrize("name", ["h2o", "kkt", "lru"])
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


@given(
    seed=SEEDS,
    share=SHARES,
    longest=st.sampled_from([3, 12, 70]),
    ties=st.booleans(),
    scorer=st.sampled_from([policy.scorer for policy in EVERY.values()]),
)
def test_a_block_keeps_its_best_tokens(
    seed: int, share: float, longest: int, ties: bool, scorer: Scorer
) -> None:
    """By hand: protected ones, the higher score, the later position."""
    blocks = offer(seed, ties=ties, longest=longest)
    tokens, scores = blocks.tokens, scorer.scores(blocks.tokens)
    counts = np.floor(blocks.resident * share).astype(np.int64)
    one = np.random.default_rng(seed).random(len(blocks)) < 0.5  # half of them lose one token
    counts = np.where(one, np.maximum(blocks.resident - 1, 0), counts)

    chosen = select_by_count(blocks, counts, scorer)

    for index, offsets in enumerate(chosen):
        here = np.flatnonzero(tokens.block == index)
        ranked = sorted(
            here, key=lambda i: (not tokens.protected[i], -scores[i], -tokens.offset[i])
        )
        assert sorted(tokens.offset[ranked[: counts[index]]]) == offsets.tolist()


@every_policy
@FEW
@given(seed=SEEDS, share=SHARES, ties=st.booleans())
def test_what_an_allocator_of_tokens_gives_up_is_what_kept_sets_lack(
    policy: Policy, seed: int, share: float, ties: bool
) -> None:
    blocks = offer(seed, ties=ties)
    room = room_for(blocks, share)

    counts, chosen = select(blocks, room, policy.allocator, policy.scorer)

    assert (counts == policy.allocator.counts(blocks, room, policy.scorer)).all()
    again = select_by_count(blocks, counts, policy.scorer)
    if policy.name not in DIVIDING:
        assert [each.tolist() for each in chosen] == [each.tolist() for each in again]
    tokens = blocks.tokens
    for which in (chosen, again):
        gone = set(zip(*(column.tolist() for column in which.leaving()), strict=True))
        stays = {(index, offset) for index, each in enumerate(which) for offset in each.tolist()}
        assert gone.isdisjoint(stays)
        assert gone | stays == set(zip(tokens.block.tolist(), tokens.offset.tolist(), strict=True))
        assert sorted(gone) == list(zip(*(each.tolist() for each in which.leaving()), strict=True))


def test_an_allocator_of_tokens_ranks_them_once() -> None:
    asked = []

    class Counting(Given):
        def scores(self, tokens: Tokens) -> Floats:
            asked.append(len(tokens.block))
            return super().scores(tokens)

    blocks = offer(5, 12, ties=False)
    counts, chosen = select(blocks, room_for(blocks, 0.5), Pooled(), Counting((0.0, 1.0)))

    assert asked == [int(blocks.resident.sum())]
    assert [len(each) for each in chosen] == counts.tolist()
    assert asked == [int(blocks.resident.sum())]


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


@given(
    keys=st.lists(st.sampled_from([-1.0, -0.0, 0.0, 0.5, 3.0]), max_size=12),
    count=st.integers(0, 12),
)
def test_the_first_of_an_order_are_found_without_it(keys: list[float], count: int) -> None:
    key = np.array(keys)

    assert sorted(lowest(key, count)) == sorted(order(key)[:count])


def test_where_not_all_protected_tokens_fit_they_compete() -> None:
    protected = np.array([True, False, True, True, False, True, False])
    scores = np.array([1.0, 9.0, 2.0, 0.0, 8.0, -5.0, 3.0])
    sizes = np.array([5, 2])

    def stay(*counts: int) -> list[int]:
        return np.flatnonzero(best_tokens(protected, scores, sizes, np.array(counts))).tolist()

    assert stay(2, 1) == [0, 2, 5]
    assert stay(3, 0) == [0, 2, 3]
    assert stay(4, 2) == [0, 1, 2, 3, 5, 6]
    assert scores.tolist() == [1.0, 9.0, 2.0, 0.0, 8.0, -5.0, 3.0]


@given(seed=SEEDS, share=SHARES)
def test_of_equal_scores_the_newer_token_stays(seed: int, share: float) -> None:
    blocks = offer(seed)
    counts = POLICIES["kkt"].allocator.counts(blocks, room_for(blocks, share), Given((1.0,)))

    chosen = select_by_count(blocks, counts, Given((1.0,)))

    for index, offsets in enumerate(chosen):
        protected = blocks.tokens.protected[blocks.tokens.block == index]
        here = held(blocks, index)
        free = here[~protected]
        expected = [*here[protected], *free[len(free) - (len(offsets) - protected.sum()) :]]
        assert sorted(expected) == offsets.tolist()


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


def test_only_an_error_in_a_part_from_outside_is_explained() -> None:
    class Failing(Given):
        def scores(self, tokens: Tokens) -> Floats:
            raise ValueError("no scores today")

    class Own(Failing):
        __module__ = "arbor.retention.scorers.own"

    blocks = offer(1, 8, ties=False)
    counts = np.maximum(blocks.resident - 1, 0)
    with pytest.raises(UsageError, match="Failing raised ValueError in 'scores': no scores today"):
        select_by_count(blocks, counts, Failing(()))
    with pytest.raises(ValueError, match="no scores today"):
        select_by_count(blocks, counts, Own(()))


def test_a_token_that_leaves_twice_is_noticed() -> None:
    blocks = offer(1, 8, ties=False)

    assert int(blocks.resident.sum() - select_all_but(blocks, np.array([2, 0]))[0].sum()) == 2
    with pytest.raises(UsageError, match="named a token twice"):
        select_all_but(blocks, np.array([2, 2]))


def test_floors_that_do_not_fit_are_noticed() -> None:
    blocks = offer(2, 8, ties=False)
    blocks = dataclasses.replace(blocks, floor=blocks.resident)
    room = int(blocks.floor.sum()) - 1

    for name in ("lru", "kkt", "arborkv", "h2o", "uniform"):
        with pytest.raises(AssertionError, match=f"of {room} slots"):
            POLICIES[name].allocator.counts(blocks, room, POLICIES[name].scorer)


# Selection sets


def test_kept_sets_can_be_asked_for_like_a_list() -> None:
    blocks = offer(4, 9, ties=False)
    counts = np.maximum(blocks.resident - np.arange(9) % 3, 0)

    chosen = select_by_count(blocks, counts, POLICIES["streaming"].scorer)

    assert [len(each) for each in chosen] == counts.tolist()
    assert (chosen[-1] == chosen[8]).all()
    assert len(chosen[2:5]) == 3
    with pytest.raises(IndexError):
        chosen[9]


def test_kept_sets_of_whole_and_empty_blocks_need_no_tokens() -> None:
    blocks = offer(4, 9, ties=False)
    whole = dataclasses.replace(blocks, resident=blocks.length)
    counts = np.where(np.arange(9) % 2, blocks.length, 0)

    chosen = select_by_count(unseen(whole), counts, POLICIES["h2o"].scorer)

    assert [each.tolist() for each in chosen] == [list(range(count)) for count in counts]


# Columns


def test_a_column_is_made_once_and_only_when_somebody_reads_it() -> None:
    made = []

    def depth(_: Blocks) -> Ints:
        made.append("depth")
        return np.arange(3)

    def distance(_: Blocks) -> Ints:
        raise AssertionError("nobody reads it")

    whole = offer(1, 3)
    later = {"depth": depth, "distance": distance}
    now = {f.name: getattr(whole, f.name) for f in dataclasses.fields(Blocks)}
    blocks = Blocks.when_read(later, **{k: v for k, v in now.items() if k not in later})

    assert not made
    assert blocks.depth.tolist() == blocks.depth.tolist() == [0, 1, 2]
    assert made == ["depth"]
    assert blocks.read == ("depth",) and whole.read == ()
    assert blocks.tokens.block.tolist() == whole.tokens.block.tolist()
    with pytest.raises(AttributeError, match="Blocks has no column 'breadth'"):
        blocks.breadth  # type: ignore[attr-defined]  # noqa: B018


# Names


def test_every_named_policy_is_in_the_table_and_goes_by_its_name() -> None:
    for name, policy in POLICIES.items():
        assert policy.name == name == spec_of(policy)["name"]
        assert isinstance(policy.allocator, Allocator)
        assert isinstance(policy.scorer, Scorer)
        assert policy.observes == policy.scorer.observes
        assert policy.summary.endswith(".")


def test_a_policy_needs_a_recording_where_its_allocator_does() -> None:
    assert [name for name, policy in POLICIES.items() if policy.needs_recording] == ["belady"]
    assert build("policy", "lru,allocator=belady").needs_recording
    assert not build("policy", "belady,allocator=lru").needs_recording


def test_a_policy_whose_allocator_keeps_everything_says_so() -> None:
    assert [name for name, policy in POLICIES.items() if policy.keeps_all] == ["full"]


def test_policies_and_their_parts_are_values() -> None:
    for policy in POLICIES.values():
        assert hash(policy) == hash(dataclasses.replace(policy))
    assert POLICIES["arborkv"].allocator == Ratio(0.5, 2.0, 0.0, 0.5, 0.0)
    assert POLICIES["kkt"].allocator == KKT(2.0, 0.0, 0.5)
    assert POLICIES["h2o"].scorer == HeavyHitters(normalise=False)
    assert POLICIES["random"].scorer == RandomTokens(seed=0)
    assert not Policy(KKT()).spares_paths and not Policy(KKT()).summary


def test_policies_that_know_paths_spare_them_and_published_ones_protect_tails() -> None:
    sparing = {name for name, policy in POLICIES.items() if policy.spares_paths}
    published = {name for name, policy in POLICIES.items() if policy.protect.tail}

    assert sparing >= {"belady", "ends", "lru", "reentry"}
    assert not sparing & {"h2o", "snapkv", "streaming", "tova", "uniform"}
    assert published == {"arborkv", "kkt"}
    assert Protect() == Protect(sinks=4, recent=8, tail=0, floor=0, threshold=1e-4)
    own = dict.fromkeys(published, Protect(tail=8, floor=4))
    own |= {"lazyeviction": Protect(recent=25), "raas": Protect(prompt=True)}
    own |= {"rpc": Protect(recent=32), "vatp": Protect(sinks=20)}
    own |= dict.fromkeys(("thinkv", "triattention"), Protect(prompt=True))
    own["hierarchy"] = Protect(recent=128, prompt=True)
    for name in POLICIES:
        assert POLICIES[name].protect == own.get(name, Protect())


def test_a_policy_of_ones_own_protects_what_the_built_in_ones_do() -> None:
    own = Policy(POLICIES["lru"].allocator)

    assert own.protect == POLICIES["lru"].protect == POLICIES["reentry"].protect


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


def test_policies_that_read_attention_say_so() -> None:
    reading = [name for name, policy in sorted(POLICIES.items()) if policy.observes]

    assert reading == [
        *("adakv", "ams", "arborkv", "chunkkv", "h2o", "hierarchy", "kkt", "lazyeviction"),
        *("pyramidkv", "raas", "snapkv", "strata", "tova", "vatp"),
    ]


def test_settings_of_a_policys_parts_go_by_their_own_names() -> None:
    policy = build(
        "policy", "arborkv", eta="1", lambda_distance="0.25", normalise="true", sinks="2"
    )

    assert policy.allocator.eta == 1.0
    assert policy.allocator.lambda_distance == 0.25
    assert policy.allocator.gamma == 2.0
    assert policy.scorer.normalise is True
    assert policy.protect == Protect(sinks=2, tail=8, floor=4)
    assert build("policy", spec_of(policy)) == policy
    assert build("policy", policy, tail="3").protect == Protect(sinks=2, tail=3, floor=4)


def test_a_setting_no_part_has_is_refused_by_name() -> None:
    with pytest.raises(UsageError, match="'lru' has no setting 'eta'"):
        build("policy", "lru", eta="1")
    with pytest.raises(UsageError, match="Did you mean 'eta'"):
        build("policy", "arborkv", etta="1")


@pytest.mark.parametrize(
    ("name", "setting", "value"),
    [
        ("arborkv", "eta", 0.0),
        ("arborkv", "eta", 1.5),
        ("arborkv", "gamma", 0.0),
        ("arborkv", "gamma", float("inf")),
        ("arborkv", "lambda_distance", -0.1),
        ("arborkv", "lambda_depth", float("nan")),
        ("arborkv", "ratio_min", 1.5),
        ("kkt", "gamma", -1.0),
        ("lru", "sinks", -1),
        ("lru", "threshold", -1e-9),
        ("arborkv", "ratio_min", -0.1),
        ("arborkv", "lambda_depth", float("inf")),
        ("arborkv", "lambda_distance", float("inf")),
    ],
)
def test_a_setting_out_of_range_is_refused(name: str, setting: str, value: float) -> None:
    with pytest.raises(UsageError, match=f"{setting}={value}"):
        build("policy", name, **{setting: value})


def test_the_ends_of_each_range_are_settings_too() -> None:
    edges = {
        "eta": 1.0,
        "ratio_min": 1.0,
        "lambda_distance": 0.0,
        "lambda_depth": -9.0,
        "gamma": 0.1,
    }

    assert build("policy", "arborkv", **edges).allocator == Ratio(1.0, 0.1, -9.0, 0.0, 1.0)
    assert build("policy", "arborkv", ratio_min=0).allocator == Ratio()
    assert not any(
        dataclasses.astuple(
            build("policy", POLICIES["lru"], sinks=0, recent=0, threshold=0).protect
        )
    )
    with pytest.raises(UsageError, match="threshold=nan: it must be 0 or more"):
        Protect(threshold=float("nan"))


def test_full_retention_refuses_what_does_not_fit() -> None:
    blocks = offer(2, 8, ties=False)
    total = int(blocks.resident.sum())
    full = POLICIES["full"]

    assert (full.allocator.counts(blocks, total, full.scorer) == blocks.resident).all()
    with pytest.raises(BudgetInfeasible) as caught:
        full.allocator.counts(blocks, total - 1, full.scorer)
    assert (caught.value.needed, caught.value.budget) == (total, total - 1)


@pytest.mark.parametrize("name", sorted(POLICIES))
@pytest.mark.parametrize("prompt", [True, False])
@pytest.mark.parametrize("spare", [0, 3, 25])
def test_settings_that_specs_leave_out_come_back(name: str, prompt: bool, spare: int) -> None:
    policy = build("policy", name, prompt=prompt, spare=spare)

    spec = spec_of(policy)

    assert build("policy", spec) == policy
    assert ("prompt" in spec["protect"], "spare" in spec["trigger"]) == (prompt, spare > 0)
