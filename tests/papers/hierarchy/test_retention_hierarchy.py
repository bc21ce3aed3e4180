"""The policy `hierarchy`: a bounded part of a path's tokens is destroyed, by a clock."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.masked_reads import Reads, masked_logits, recorded
from support.models import build
from support.policies import POLICIES
from support.trees import GREEDY, PROMPT, Lab, relative_error

from arbor.components import build as component
from arbor.events import Evicted
from arbor.papers.hierarchy.hierarchy import Evict, Hierarchy
from arbor.retention.base import Blocks, Ints, Tokens
from arbor.retention.policy import Policy, Protect, Trigger
from arbor.retention.scorers import HeavyHitters
from arbor.retention.selection import select

EVERY = 8
LONG = 60


def path_of(
    mass: list[float], prompt: int, gone: int = 0, recent: int = 0, *, runs: bool = True
) -> Blocks:
    """A prompt and one block that decodes, whose first `gone` tokens have left and whose last token
    is still to be computed.

    Args:
        mass: of the tokens of the block that are on the device.
        prompt: tokens of the prompt.
        gone: tokens of the block that are not there.
        recent: how many of the block's last ones are protected.
        runs: whether the path runs.
    """
    own = len(mass)
    position = np.concatenate([np.arange(prompt), prompt + gone + np.arange(own)])
    return Blocks.when_read(
        {},
        ids=np.arange(2),
        length=np.array([prompt, gone + own + 1]),
        resident=np.array([prompt, own]),
        floor=np.array([prompt, recent]),
        depth=np.array([0, 1]),
        turn=np.zeros(2, np.int64),
        active=np.full(2, runs),
        scheduled=np.array([9, 0]),
        see=lambda _: Tokens.when_read(
            {},
            block=np.repeat([0, 1], [prompt, own]),
            offset=np.concatenate([np.arange(prompt), gone + np.arange(own)]),
            position=position,
            mass=np.concatenate([np.zeros(prompt), mass]),
            queries=np.ones(len(position), np.int64),
            protected=(position < prompt) | (position >= prompt + gone + own - recent),
        ),
    )


def destroyed(allocator: Hierarchy, blocks: Blocks) -> list[int]:
    """Positions that leave at an event."""
    room = int(blocks.resident.sum()) - allocator.excess(blocks)
    return sorted(blocks.tokens.position[allocator.leaving(blocks, room, HeavyHitters())].tolist())


# mass of the tokens after a prompt of 3: of positions 3 .. 12
MASS = [0.0, 0.0, 0.5, 0.2, 0.9, 0.1, 0.6, 0.3, 0.0, 0.0]


@pytest.mark.parametrize(
    ("settings", "found"),
    [
        # the first and the last 2 are safe: 5 .. 10 are eligible, of which 8, 6 and 10 received
        # least
        ({"evict": "per_event", "ratio": 0.5}, [6, 8, 10]),
        ({"evict": "per_event", "ratio": 0.34}, [6, 8]),
        ({"evict": "per_event", "ratio": 0.16}, []),
        ({"evict": "size", "size": 4}, [6, 8]),
        ({"evict": "size", "size": 6}, []),
        ({"evict": "cumulative", "ratio": 0.5}, [6, 8, 10]),
    ],
)
def test_the_worst_eligible_tokens_are_destroyed(
    settings: dict[str, Any], found: list[int]
) -> None:
    blocks = path_of(MASS, prompt=3, recent=2)
    assert destroyed(Hierarchy(first=2, **settings), blocks) == found


@pytest.mark.parametrize(("ratio", "found"), [(0.5, [5, 6, 10]), (0.3, [5]), (0.2, []), (0.0, [])])
def test_what_has_left_before_counts(ratio: float, found: list[int]) -> None:
    # positions 3 and 4 are gone; with 5 .. 12 that makes 10 that were ever eligible
    blocks = path_of(MASS, prompt=3, gone=2, recent=2)
    assert destroyed(Hierarchy(ratio, first=0), blocks) == found


@pytest.mark.parametrize(
    ("packed", "done", "found"),
    [
        # eligible are 5 .. 10, of which 8, 6 and 10 received least, then 5
        (0.5, [], [6, 8, 10]),
        (0.34, [], [6, 8]),
        (0.5, [8], [6, 10]),
        (0.5, [5, 7, 9], []),  # they have risen, and stay packed
        (1.0, [5, 7], [6, 8, 9, 10]),
        (0.0, [], []),
    ],
)
def test_the_worst_eligible_tokens_are_packed_and_those_that_were_count(
    packed: float, done: list[int], found: list[int]
) -> None:
    blocks = path_of(MASS, prompt=3, recent=2)
    before = np.isin(blocks.tokens.position, done)
    chosen = Hierarchy(first=2, packed=packed).packing(blocks, before, HeavyHitters())
    assert sorted(blocks.tokens.position[chosen].tolist()) == found


@given(
    mass=st.lists(st.floats(0, 9), min_size=1, max_size=30),
    ratio=st.floats(0, 1),
    evict=st.sampled_from(["cumulative", "per_event", "size"]),
    gone=st.integers(0, 20),
    recent=st.integers(0, 8),
    first=st.integers(0, 5),
)
def test_what_is_destroyed_is_bounded_and_never_protected(
    mass: list[float], ratio: float, evict: Evict, gone: int, recent: int, first: int
) -> None:
    recent = min(recent, len(mass))
    blocks = path_of(mass, prompt=4, gone=gone, recent=recent)
    allocator = Hierarchy(ratio, evict, size=5, first=first)

    places = destroyed(allocator, blocks)

    tokens = blocks.tokens
    eligible = (tokens.position >= 4 + first) & ~tokens.protected
    assert set(places) <= set(tokens.position[eligible].tolist())
    held = int(eligible.sum())
    if evict == "size":
        assert held - len(places) == min(held, 5)
    elif evict == "per_event":
        assert len(places) == int(ratio * held)
    else:
        assert len(places) + gone <= max(gone, ratio * (held + gone))
        assert len(places) + gone + 1 > min(ratio * (held + gone), held + gone)
    stay = tokens.mass[eligible & ~np.isin(tokens.position, places)]
    lost = tokens.mass[np.isin(tokens.position, places)]
    assert not len(lost) or not len(stay) or lost.max() <= stay.min()


def small(evict: Evict, ratio: float = 0.2, size: int = 10) -> Policy:
    return dataclasses.replace(
        POLICIES["hierarchy"],
        allocator=Hierarchy(ratio, evict, size, first=2),
        protect=Protect(recent=6, prompt=True),
        trigger=Trigger(every=EVERY),
    )


def lab_of(evict: Evict, **given: Any) -> Lab:
    policy = small(evict, **given)
    return Lab(build("llama"), policy=policy, mode="lossy", rehydrate="off", debug=True)


@pytest.mark.parametrize("evict", ["cumulative", "per_event", "size"])
def test_a_chain_reads_what_is_left_and_loses_tokens_at_the_clock_only(
    evict: Evict, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: Reads = recorded(monkeypatch)
    lab = lab_of(evict)
    tree = lab.plant()
    (block,) = lab.sprout([(tree.root, 1)], GREEDY, LONG)

    want = masked_logits(build("llama"), block, seen, None)
    assert want[len(PROMPT) - 1 : -1].argmax(-1).tolist() == block.tokens
    assert relative_error(lab.state.logits[block.row], want[-1]) < 1e-4
    gone = [event for event in lab.events if isinstance(event, Evicted)]
    assert gone and {event.cause for event in gone} == {"clock"}
    # the prompt and the first two tokens stay, and the window at every step
    assert tree.root.span.resident.all() and block.span.resident[:2].all()
    for (_, position), held in seen.items():
        assert set(range(position - 5, position + 1)) <= set(held)


def test_at_every_instant_no_more_than_the_part_of_all_eligible_tokens_is_gone() -> None:
    lost, eligible = 0, 0
    lab = lab_of("cumulative", ratio=0.3)
    tree = lab.plant()
    for _ in range(6):
        leaf = tree.nodes[-1]
        lab.events.clear()
        (block,) = lab.sprout([(leaf, 1)], GREEDY, 11)
        for event in lab.events:
            if isinstance(event, Evicted):
                lost += sum(count for _, count in event.nodes)
                eligible = block.end - len(PROMPT) - 2 - 6
                assert lost <= 0.3 * eligible
    assert lost > 0.3 * eligible - 3, "the bound is used"


def test_a_part_of_what_is_left_at_each_event_adds_up() -> None:
    counts = {}
    for evict in ("cumulative", "per_event"):
        lab = lab_of(evict)  # type: ignore[arg-type]
        tree = lab.plant()
        (block,) = lab.sprout([(tree.root, 1)], GREEDY, LONG)
        counts[evict] = int((~block.span.resident).sum())
    live, alone = 0, 0
    for end in range(EVERY, LONG + 1, EVERY):  # as events of one path come
        live = end - 2 - 6 - alone
        alone += int(0.2 * max(0, live))
    assert counts["cumulative"] <= 0.2 * (LONG - 8)
    assert abs(counts["per_event"] - alone) <= 2
    assert counts["per_event"] > 2 * counts["cumulative"]


@pytest.mark.parametrize("among", ["together", "fair", "first-come", "shortest-first"])
def test_a_search_that_waits_loses_nothing_at_the_clock(among: str) -> None:
    """One search decodes 20 tokens, another one waits with 60, after prompts of 4."""
    block = np.repeat(np.arange(4), [4, 20, 4, 60])
    offset = np.concatenate([np.arange(count) for count in (4, 20, 4, 60)])
    position = np.array([0, 4, 0, 4])[block] + offset

    def see(indices: Ints) -> Tokens:
        mine = np.isin(block, indices)
        return Tokens.when_read(
            {},
            block=block[mine],
            offset=offset[mine],
            position=position[mine],
            mass=np.linspace(1, 2, len(position))[mine],
            queries=np.ones(int(mine.sum()), np.int64),
            protected=position[mine] < 4,
        )

    blocks = Blocks.when_read(
        {},
        ids=np.arange(4),
        length=np.array([4, 21, 4, 60]),
        resident=np.array([4, 20, 4, 60]),
        floor=np.array([4, 0, 4, 0]),
        depth=np.array([0, 1, 0, 1]),
        turn=np.array([0, 0, 1, 1]),
        active=np.array([True, True, False, False]),
        scheduled=np.array([9, 0, 9, 9]),
        see=see,
    )
    policy: Policy = component("policy", f"hierarchy,ratio=0.5,among={among}")
    excess = policy.allocator.excess(blocks)  # type: ignore[attr-defined]
    assert excess == 8

    counts, _ = select(blocks, 88 - excess, policy.shared_allocator, policy.scorer)

    assert counts.tolist() == [4, 12, 4, 60]
