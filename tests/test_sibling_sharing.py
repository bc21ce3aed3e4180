"""Siblings that begin alike share KV: fewer slots, fewer reads, the same tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import pytest
from support.models import Words, build
from support.trees import PROMPT, QUESTIONS, SAMPLED, Lab, planted_again, relative_error
from torch import Tensor

from arbor import Solver
from arbor.engine.operation import Growth, Row
from arbor.engine.retained import Lengths
from arbor.engine.scheduler import MARGIN
from arbor.engine.stop_rule import StopRule
from arbor.engine.token_source import ModelSampler
from arbor.errors import UsageError
from arbor.events import (
    Boundary,
    Discarded,
    Event,
    Evicted,
    Forwarded,
    Merged,
    Opened,
    Rehydrated,
    Shared,
)
from arbor.forest import LEAST_SIBLING, Forest
from arbor.memory.stores import NO_ROOM, LowerRoom
from arbor.metrics import MetricsFold
from arbor.retention.block_table import BlockTable
from arbor.tasks.base import BlockLimits
from arbor.trace import Replay
from arbor.tree import NO_RECORD, Node, NodeState, ThoughtTree

pytestmark = pytest.mark.usefixtures("loaded_once")

LENGTH = 14
COMMON = 10
HEAD = tuple(8 + (5 * i) % 70 for i in range(COMMON))
FIRST, SECOND, THIRD = ((*HEAD, *end) for end in ((9, 3, 60, 2), (71, 9, 41, 40), (9, 44, 45, 46)))
OTHER = tuple(range(20, 20 + LENGTH))
SHORT = (*HEAD[: LEAST_SIBLING - 1], *range(50, 50 + LENGTH - LEAST_SIBLING + 1))
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


def test_siblings_with_little_in_common_share_nothing() -> None:
    lab = lab_of(FIRST, SHORT)
    tree, _ = grown(lab)

    assert lab.memory.used == tree.tokens
    assert not events(lab, Merged)


@pytest.mark.parametrize("share", ["prompts", "off"])
def test_siblings_share_only_where_that_is_asked_for(share: Literal["prompts", "off"]) -> None:
    lab = lab_of(FIRST, SECOND, share=share)
    tree, _ = grown(lab)

    assert lab.memory.used == tree.tokens


def test_lossy_siblings_share_nothing() -> None:
    lab = Lab(build("llama"), source=Scripted({0: FIRST, 1: SECOND}), mode="lossy", debug=True)
    tree, _ = grown(lab)

    assert lab.memory.used == tree.tokens


def test_a_block_closed_later_shares_with_one_closed_in_an_earlier_operation() -> None:
    lab = lab_of(FIRST, SECOND, THIRD)
    tree = lab.plant(400)
    blocks = [lab.grow([(tree.root, 1)], GROWTH)[0] for _ in range(3)]

    assert lab.memory.used == tree.tokens - 2 * COMMON - 1, "the first and third share one more"
    is_as_alone(lab, blocks)


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


def test_rows_that_run_share_with_those_that_join_after_a_block_has_closed() -> None:
    """The context of a row is set again where its path comes to share with another one."""
    lab = lab_of(FIRST, SECOND)
    tree = lab.plant(400)
    (first,) = lab.grow([(tree.root, 1)], GROWTH)
    long = Growth(3, SAMPLED, StopRule(Words(), BlockLimits((), 40, 8), ()))
    running = lab.begin_grow([(first, 1)], long)
    lab.step()
    (second,) = lab.grow([(tree.root, 1)], GROWTH)
    assert not running.done
    lab.events.clear()
    joined = lab.begin_grow([(second, 1)], GROWTH)
    for _ in range(4):
        lab.step()
    batch = lab._parts.stepper._batch
    keys = [[piece.key for piece in context] for context in batch._contexts]

    assert len(keys) == 2
    assert keys[0][:2] == keys[1][:2], "the prompt, and what the siblings have in common"
    assert keys[0][2:] != keys[1][2:]
    while not (joined.done and running.done):
        lab.step()
    is_as_alone(lab, [first, second])


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


def test_of_what_siblings_share_no_more_leaves_than_is_needed() -> None:
    """The least recently used goes first."""
    twins = tuple((*range(30, 30 + COMMON), *end) for end in ((9, 3, 60, 2), (71, 9, 41, 40)))
    lab = lab_of(FIRST, SECOND, *twins, OTHER)
    _, (first, second, third, fourth, other) = grown(lab, slots=70)
    lab.ask([first], QUESTIONS[:1])
    lab.grow([(other, 1)], Growth(3, SAMPLED, StopRule(Words(), BlockLimits((), 30, 8), ())))

    for node in (first, second):
        assert node.span.resident.tolist() == [True] * COMMON + [False] * (LENGTH - COMMON)
    assert not third.span.resident.any() and not fourth.span.resident.any()
    is_as_alone(lab, [first, third])


def test_blocks_that_were_given_up_are_work_for_nothing_any_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab = lab_of(FIRST, SECOND, THIRD, FIRST)
    tree, (first, second, third, same) = grown(lab)
    forest, touched = lab.state.forest, set()
    right = BlockTable.touch

    def touch(self: BlockTable, node: Node) -> None:
        touched.add(node)
        right(self, node)

    assert set(forest.cuts) == {node.row for node in (first, second, third, same)}
    for node in (first, third):
        node.state = NodeState.PRUNED
    lab.forget([first, third])
    with monkeypatch.context() as patched:
        patched.setattr(BlockTable, "touch", touch)
        lab.state.sharing_changed()

    assert touched - {tree.root} == {second, same}
    assert forest.alike(second) == [(same, COMMON)]
    assert lab.memory.shared_within(tree) == COMMON
    lab.memory.check()
    is_as_alone(lab, [second, same, third])  # one that was given up is read all the same


def test_room_is_not_sought_among_blocks_that_hold_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    lab, (first, second) = crowded_out()
    assert {first.row, second.row} <= set(lab.state.forest.cuts)
    monkeypatch.setattr(Forest, "alike", None)

    assert not lab._parts.residency._drop_shared(1, [first.path[0]], "pressure")


def test_siblings_that_come_back_together_are_computed_once() -> None:
    lab, (first, second) = crowded_out()
    visits = [lab.begin_extend(node) for node in (first, second)]
    while lab.busy:
        lab.step()
    for visit in visits:
        visit.result()

    assert lab.rows() == 2 * LENGTH - COMMON
    back = [event for event in lab.events if isinstance(event, Rehydrated)]
    assert sum(count for event in back for _, count in event.nodes) == 2 * LENGTH
    assert sum(event.shared for event in back) == COMMON
    assert second.span.slot[:COMMON].tolist() == first.span.slot[:COMMON].tolist()
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


def test_records_go_to_no_sibling_that_is_given_up_too() -> None:
    lab, siblings = crowded_out(LowerRoom(99))
    for node in siblings:
        node.state = NodeState.PRUNED
    lab.forget(siblings)
    (gone,) = events(lab, Discarded)
    assert not gone.taken  # type: ignore[union-attr]
    assert not any((node.span.record != NO_RECORD).any() for node in siblings)


def test_a_sibling_takes_over_only_what_it_lacks() -> None:
    lab, (first, second) = crowded_out(LowerRoom(99))
    holder, heir = (first, second) if first.span.record[0] != NO_RECORD else (second, first)
    memory = lab.memory
    memory.evict(first.tree[3], np.arange(3))  # another block
    slots = memory.place(heir, np.arange(3), exact=True, depth=2)
    memory.commit()
    holder.state = NodeState.PRUNED
    lab.forget([holder])
    assert heir.span.slot[:3].tolist() == slots.tolist()
    held = heir.span.record[:COMMON] != NO_RECORD
    assert held.tolist() == [False] * 3 + [True] * (COMMON - 3)


def test_a_block_that_comes_back_takes_what_its_sibling_holds() -> None:
    lab, (first, second) = crowded_out()
    lab.extend(second)
    lab.extend(first)

    assert lab.rows() == 2 * LENGTH - COMMON
    (shared,) = events(lab, Shared)
    assert shared.nodes == ((first.id, COMMON),)  # type: ignore[union-attr]
    is_as_alone(lab, [first, second])


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


def test_nothing_is_shared_while_blocks_are_hidden() -> None:
    lab = lab_of(FIRST, SECOND)
    tree = lab.plant(400)
    (first,) = lab.grow([(tree.root, 1)], GROWTH)
    with lab.hiding([tree.root]):
        (second,) = lab.grow([(tree.root, 1)], GROWTH)

    assert second.tokens[:COMMON] == first.tokens[:COMMON]
    assert not np.intersect1d(second.span.slot, first.span.slot).size


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


@pytest.mark.parametrize("budget", ["full", "0.3"])
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


def test_unknown_sharing_is_refused() -> None:
    with pytest.raises(UsageError, match="unknown sharing 'some'") as caught:
        Solver(share="some")  # type: ignore[arg-type]
    assert caught.value.code == "share"
