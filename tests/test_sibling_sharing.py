"""Siblings that begin alike share KV: fewer slots, fewer reads, the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import pytest
from support.models import Words, build
from support.slow_cases import every
from support.trees import PROMPT, QUESTIONS, SAMPLED, Lab, planted_again, relative_error
from torch import Tensor

from arbor import Solver
from arbor.engine.operation import Growth, Row
from arbor.engine.retained import Lengths
from arbor.engine.scheduler import MARGIN
from arbor.engine.stop_rule import StopRule
from arbor.engine.token_source import ModelSampler
from arbor.events import (
    Boundary,
    Discarded,
    Event,
    Evicted,
    Forwarded,
    Merged,
    Opened,
    Rehydrated,
)
from arbor.memory.stores import NO_ROOM, LowerRoom
from arbor.metrics import MetricsFold
from arbor.tasks.base import BlockLimits
from arbor.trace import Replay
from arbor.tree import NO_RECORD, Node, NodeState, ThoughtTree

pytestmark = pytest.mark.usefixtures("loaded_once")

LENGTH = 14
COMMON = 10
HEAD = tuple(8 + (5 * i) % 70 for i in range(COMMON))
FIRST, SECOND, THIRD = ((*HEAD, *end) for end in ((9, 3, 60, 2), (71, 9, 41, 40), (9, 44, 45, 46)))
OTHER = tuple(range(20, 20 + LENGTH))
GROWTH = Growth(3, SAMPLED, StopRule(Words(), BlockLimits((), LENGTH, 8), ()))


class Scripted(ModelSampler):
    """Gives the children of the prompt the tokens of a script, by their index, and deeper blocks
    those of the model."""

    def __init__(self, script: Mapping[int, Sequence[int]]) -> None:
        super().__init__(Words())
        self.script = script

    def choose(self, rows: Sequence[Row], logits: Tensor) -> list[int]:
        chosen = super().choose(rows, logits)
        return [
            self.script[row.node.index][len(row.node.tokens)] if row.node.depth == 1 else token
            for row, token in zip(rows, chosen, strict=True)
        ]


def lab_of(
    *blocks: Sequence[int],
    share: Literal["exact", "prompts", "off"] = "exact",
    lower: LowerRoom = NO_ROOM,
) -> Lab:
    source = Scripted(dict(enumerate(blocks)))
    return Lab(build("llama"), source=source, debug=True, share=share, lower=lower)


def grown(lab: Lab, *, slots: int = 400) -> tuple[ThoughtTree, list[Node]]:
    """A prompt and the children that the script gives it."""
    tree = lab.plant(slots)
    source = lab._source
    script = getattr(source, "_source", source).script
    return tree, lab.grow([(tree.root, len(script))], GROWTH)


def is_as_alone(lab: Lab, nodes: Sequence[Node]) -> None:
    """Whether questions after blocks are answered as by an engine that computed each path alone."""
    for node in nodes:
        again = planted_again(build("llama"), node.tree)
        want = again.ask([again.tree[node.id]] * len(QUESTIONS), QUESTIONS)
        assert relative_error(lab.ask([node] * len(QUESTIONS), QUESTIONS), want) < 1e-5


def events(lab: Lab, kind: type[Event]) -> list[Event]:
    return [event for event in lab.events if isinstance(event, kind)]


def test_a_block_that_closes_gives_back_what_a_sibling_holds() -> None:
    lab = lab_of(FIRST, OTHER, SECOND, FIRST)
    tree, (first, other, second, same) = grown(lab)

    assert second.span.slot[:COMMON].tolist() == first.span.slot[:COMMON].tolist()
    assert same.span.slot.tolist() == first.span.slot.tolist()
    assert not np.intersect1d(other.span.slot, first.span.slot).size
    assert not np.intersect1d(second.span.slot[COMMON:], first.span.slot).size
    assert lab.memory.used == tree.tokens - COMMON - LENGTH == lab.memory.used_by(tree)
    (merged,) = events(lab, Merged)
    rows = ((second.id, first.id, COMMON), (same.id, first.id, LENGTH))
    assert merged.nodes == rows  # type: ignore[union-attr]
    assert merged.kv.shared == COMMON + LENGTH  # type: ignore[union-attr]
    is_as_alone(lab, [first, second, same])


@pytest.mark.parametrize("share", ["prompts", "off"])
def test_siblings_share_only_where_that_is_asked_for(share: Literal["prompts", "off"]) -> None:
    lab = lab_of(FIRST, SECOND, share=share)
    tree, _ = grown(lab)

    assert lab.memory.used == tree.tokens


def unique_reads(lab: Lab) -> int:
    return sum(event.unique_read_tokens for event in lab.events if isinstance(event, Forwarded))


def test_a_forward_reads_what_siblings_share_once() -> None:
    """Children of the first and the last of three siblings: rows next to each other share."""
    unique = {}
    for share in ("exact", "prompts"):
        lab = lab_of(FIRST, OTHER, SECOND, share=share)  # type: ignore[arg-type]
        _, blocks = grown(lab)
        lab.events.clear()
        lab.grow([(block, 1) for block in blocks], GROWTH)
        unique[share] = unique_reads(lab)

    assert unique["prompts"] - unique["exact"] == COMMON * LENGTH


def test_a_block_that_is_given_up_leaves_what_its_sibling_uses() -> None:
    lab = lab_of(FIRST, SECOND)
    tree, (first, second) = grown(lab)
    held = second.span.slot.tolist()
    lab.events.clear()
    table = lab.state.table
    table.refresh()
    assert table.resident[second.row] == LENGTH - COMMON, "a shared slot is offered to no policy"
    first.state = NodeState.PRUNED
    lab.forget([first])

    assert second.span.slot.tolist() == held
    assert (lab.memory.table.owner[held] == second.row).all()
    assert lab.memory.used == len(tree.root.tokens) + LENGTH
    (gone,) = events(lab, Evicted)
    assert gone.nodes == ((first.id, LENGTH),)  # type: ignore[union-attr]
    assert gone.kv.shared == 0  # type: ignore[union-attr]
    table.refresh()
    assert table.resident[second.row] == LENGTH, "all of it can leave now"
    is_as_alone(lab, [second])


def crowded_out(lower: LowerRoom = NO_ROOM) -> tuple[Lab, list[Node]]:
    """Two siblings that share, of which nothing is on the device any more."""
    lab = lab_of(FIRST, SECOND, OTHER, lower=lower)
    _, (first, second, other) = grown(lab, slots=12 + LENGTH + 40)
    lab.grow([(other, 1)], Growth(3, SAMPLED, StopRule(Words(), BlockLimits((), 40, 8), ())))
    assert not first.span.resident.any() and not second.span.resident.any()
    lab.events.clear()
    return lab, [first, second]


def test_what_siblings_share_leaves_last_and_from_all_of_them() -> None:
    lab, (first, second) = crowded_out()
    assert lab.memory.shared_within(first.tree) == 0
    is_as_alone(lab, [first, second])


@pytest.mark.parametrize("lower", [LowerRoom(99), LowerRoom(10, 99)], ids=["host", "both"])
def test_a_block_that_is_given_up_leaves_its_records_to_a_sibling(lower: LowerRoom) -> None:
    lab, siblings = crowded_out(lower)
    holder = next(node for node in siblings if (node.span.record[:COMMON] != NO_RECORD).all())
    (heir,) = (node for node in siblings if node is not holder)
    records = holder.span.record[:COMMON].tolist()
    assert (heir.span.record[:COMMON] == NO_RECORD).all()
    holder.state = NodeState.PRUNED
    lab.forget([holder])

    assert heir.span.record[:COMMON].tolist() == records
    (gone,) = events(lab, Discarded)
    assert gone.nodes == ((holder.id, LENGTH),)  # type: ignore[union-attr]
    assert gone.taken == ((heir.id, COMMON),)  # type: ignore[union-attr]
    lab.extend(heir)
    assert lab.rows() == 0, "nothing is computed again"
    is_as_alone(lab, [heir])


def test_a_failed_rehydration_takes_back_what_was_to_be_shared(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab, (first, second) = crowded_out()
    right = lab.runner.forward

    def fail(*args: object, **kwargs: object) -> None:
        monkeypatch.setattr(lab.runner, "forward", right)
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(lab.runner, "forward", fail)
    visits = [lab.begin_extend(node) for node in (first, second)]
    while lab.busy:
        lab.step()
    for visit in visits:
        with pytest.raises(RuntimeError, match="the device is gone"):
            visit.result()

    assert not first.span.resident.any() and not second.span.resident.any()
    lab.memory.check()
    back = sum(n for e in lab.events if isinstance(e, Rehydrated) for _, n in e.nodes)
    lost = [row for e in lab.events if isinstance(e, Evicted) for row in e.nodes]
    gone = sum(count for node, count in lost if node in (first.id, second.id))
    assert back == gone == 2 * LENGTH
    is_as_alone(lab, [first, second])


def test_paths_join_together_that_fit_thanks_to_what_siblings_share() -> None:
    room = 12 + 2 * LENGTH - COMMON
    for slots, together in ((room + 2 * MARGIN, 2), (room + 2 * MARGIN - 1, 1)):
        lab = lab_of(FIRST, SECOND)
        _, blocks = grown(lab, slots=slots)
        short = Growth(3, SAMPLED, StopRule(Words(), BlockLimits((), 3, 8), ()))
        lab.opened.lengths = Lengths()
        lab.opened.lengths.add(1)  # blocks are expected to end within the margin
        growing = lab.begin_grow([(block, 1) for block in blocks], short)
        lab.step()
        assert len(lab._parts.stepper._schedulers.rows) == together, slots
        while not growing.done:
            lab.step()
        growing.result()


def test_a_trace_with_shared_siblings_adds_up() -> None:
    lab = lab_of(FIRST, SECOND, OTHER)
    replay, fold = Replay(), MetricsFold()

    def listen(event: Event) -> None:
        replay(event)
        fold(event)

    lab.listener = listen
    listen(Opened(0, None, 0, 0, tokens=len(PROMPT), text=""))
    _, (first, second, other) = grown(lab, slots=12 + LENGTH + 40)
    lab.grow([(other, 1)], Growth(3, SAMPLED, StopRule(Words(), BlockLimits((), 40, 8), ())))
    visits = [lab.begin_extend(node) for node in (first, second)]
    while lab.busy:
        lab.step()
    assert all(visit.done for visit in visits)
    lab.forget([first])

    assert replay.problems == []
    for node in (first, second, other):
        assert replay.blocks[node.id].resident == np.count_nonzero(node.span.resident)
    metrics = fold.metrics()
    assert metrics.tokens_merged == metrics.tokens_shared == COMMON
    assert metrics.to_dict()["tokens_merged"] == COMMON
    assert "tokens_merged" not in MetricsFold().metrics().to_dict()


@pytest.mark.parametrize("budget", every(2, ["full", "0.3"]))
def test_a_search_is_the_same_whether_siblings_share_or_not(budget: str) -> None:
    trees, metrics = {}, {}
    for share in ("exact", "off"):
        heard: list[Event] = []
        with Solver(
            share=share,  # type: ignore[arg-type]
            budget=budget,
            deterministic=True,
            listeners=[heard.append],
            seed=2,
        ) as solver:
            metrics[share] = solver.solve("4 5 6 10").metrics
        closed = {event.node: event for event in heard if isinstance(event, Boundary)}
        trees[share] = [closed[node] for node in sorted(closed)]

    assert trees["exact"] == trees["off"], "bit for bit"
    assert metrics["exact"].tokens_merged > 0 == metrics["off"].tokens_merged
    assert metrics["exact"].peak_tokens <= metrics["off"].peak_tokens
    if budget == "full":
        assert metrics["exact"].peak_tokens < metrics["off"].peak_tokens
