"""Random searches over several trees of one engine, step by step, against each tree grown alone."""

from __future__ import annotations

import errno
import functools
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, get_args
from unittest.mock import patch

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from support.models import VOCABULARY, Words, build, path_logits
from support.policies import POLICIES
from support.trees import Lab, path_ids, relative_error
from torch import Tensor

from arbor import forest
from arbor.engine import residency, scheduler
from arbor.engine.mode import Mode
from arbor.engine.operation import Growth, Operation, Row
from arbor.engine.step import Stepper
from arbor.engine.stop_rule import StopRule
from arbor.engine.token_source import ModelSampler
from arbor.errors import ArborError, OutOfMemory, UsageError
from arbor.events import Discarded, Event, Evicted, Rehydrated
from arbor.forest import LEAST_COMMON, LEAST_SIBLING
from arbor.memory import prefix_cache
from arbor.memory.packed_store import PackedStore
from arbor.memory.stores import NO_ROOM, DiskStore, LowerRoom, Store
from arbor.model.fetch_costs import FetchCosts
from arbor.model.runner import ModelRunner
from arbor.model.sampling_params import Sampling
from arbor.retention.allocators.per_tree import Among
from arbor.retention.policy import Policy, Protect, Trigger
from arbor.support.packed_size import BITS
from arbor.tasks.base import BlockLimits
from arbor.tree import NO_RECORD, NO_SLOT, Node, NodeState, ThoughtTree, Tier

POLICY_NAMES = sorted(set(POLICIES) - {"belady"})
LOSSLESS = [name for name in POLICY_NAMES if not POLICIES[name].by_head]
EVICTING = sorted(set(POLICY_NAMES) - {"full"})
PROMPTS = ((5, 17, 40, 8, 77, 23, 61, 5, 90, 33, 12, 50), (9, 3, 3, 41), (60, 2, 71, 8, 8, 19, 35))
ALIKE = (PROMPTS[0], (*PROMPTS[0][:8], 9, 3), (*PROMPTS[0][:5], 60, 2, 71), PROMPTS[0][:8])
SAMPLINGS = (Sampling(temperature=0.0), Sampling(temperature=1.0, top_p=0.95))
LENGTHS = (1, 3, 5)
EOS = range(VOCABULARY // 8)  # tokens that end a block early
STOPS = {length: StopRule(Words(), BlockLimits((), length, 8), EOS) for length in LENGTHS}
MOST_TREES = 4
MOST_BLOCKS = 14
DEPTH = 3
LONGEST = len(PROMPTS[0]) + DEPTH * max(LENGTHS)
QUESTION = (7, 8, 9)
FAILURES = ("forward", "policy", "memory", "policy", "forward")
COPIES = ("store", "fetch")
DISK_FAULTS = ("none", "full", "short", "torn", "unreadable")


STEPS = int(os.environ.get("ARBOR_FUZZ_STEPS", "2000"))  # of each machine in the slow test

# a fetch is worth it always, sometimes, never
COSTS = tuple(
    f"host={event}+1;disk={event}+3;key=0.1;forward=1:10,8:30,64:400" for event in (0, 40, 10**6)
)
PACKED_COSTS = tuple(costs.replace("host", "compressed") for costs in COSTS)
PACKED_GROUP = 4  # tokens that are packed together
SMALLEST = LONGEST + len(QUESTION)
PROTECTED = Protect().sinks + Protect().recent
ROOMY = 1000  # slots for a policy that evicts nothing
AMONG = get_args(Among)
NO_TRIGGER, EARLY = Trigger(), Trigger(every=2, above=0.6)
# granularity, and how many tokens each KV head keeps
Keeping = tuple[str, str]
KEEPING: tuple[Keeping, ...] = (
    ("token", "equal"),
    ("head", "equal"),
    ("head", "adaptive"),
    ("head", "pyramid"),
)
NOISE = 1e-4  # of logits; rounding stays far below it

Lie = Literal["choose", "late choose", "stop", "confidence"]
Breakdown = Literal["forward", "memory", "policy", "store", "fetch"]
DiskFault = Literal["none", "full", "short", "torn", "unreadable"]


class Failure(RuntimeError):
    """Stands for whatever stops a forward."""


class Deaf(RuntimeError):
    """Stands for whatever a listener raises."""


class Source(ModelSampler):
    """The model's tokens, with wrong answers for some operations.

    Attributes:
        lies: what is wrong in the answers for an operation.
        owners: the operations of the blocks that were sampled.
        noise: added to the logits, [V]; or None.
    """

    def __init__(self) -> None:
        super().__init__(Words())
        self.lies: dict[Operation, Lie] = {}
        self.owners: dict[Node, Operation] = {}
        self.noise: Tensor | None = None

    def choose(self, rows: Sequence[Row], logits: Tensor) -> list[int]:
        self.owners.update((row.node, row.operation) for row in rows)
        lies = [self.lies.get(row.operation) for row in rows]
        if "choose" in lies:
            raise UsageError("token-answer", "none")
        tokens = super().choose(rows, logits if self.noise is None else logits + self.noise)
        return [
            -1 if lie == "late choose" else token for token, lie in zip(tokens, lies, strict=True)
        ]

    def stop(self, node: Node, growth: Growth) -> Any:
        if self.lies.get(self.owners[node]) == "stop":
            return "whim"
        return super().stop(node, growth)

    def confidence(self, nodes: Sequence[Node], logits: Tensor) -> list[float]:
        sure = super().confidence(nodes, logits)
        lies = [self.lies.get(self.owners[node]) == "confidence" for node in nodes]
        return [float("nan") if lie else each for lie, each in zip(lies, sure, strict=True)]


@functools.cache
def oracle() -> Any:
    """The model as Hugging Face runs it: no cache, no sharing, no budget."""
    return build("llama")


@functools.cache
def answer(ids: tuple[int, ...]) -> Tensor:
    """Logits after these tokens, by Hugging Face."""
    return path_logits(oracle(), ids)[-1]


@functools.cache
def alone() -> tuple[Lab, Source]:
    """An engine for one tree at a time, under full retention."""
    source = Source()
    return Lab(build("llama"), source=source), source


def grown_alone(child: Node, growth: Growth, noise: Tensor | None = None) -> tuple[int, ...]:
    """The tokens of a block that grows from the same path in an engine of its own."""
    assert child.parent is not None
    lab, source = alone()
    tree = ThoughtTree(child.path[0].tokens)
    leaf = tree.root
    for block in child.path[1:]:
        leaf = tree.fork(leaf)
        leaf.index = block.index
        if block is not child:
            for token in block.tokens:
                tree.append(leaf, token)
            leaf.state = NodeState.CLOSED
    lab.open(tree, ROOMY)
    lab.state.shares_prompts = lab.state.keeps_prompts = False
    lab.events.clear()
    source.noise = noise
    lab.decode([leaf], growth)
    source.owners.clear()
    return tuple(leaf.tokens)


_known: dict[Any, tuple[int, ...]] = {}


def expected_tokens(child: Node, growth: Growth) -> tuple[int, ...]:
    """`grown_alone`, each block once."""
    assert child.parent is not None
    place = (growth.seed, growth.sampling, growth.stop.max_tokens)
    key = (tuple(path_ids(child.parent)), child.start, child.key, *place)
    if key not in _known:
        _known[key] = grown_alone(child, growth)
    return _known[key]


def is_a_tie(child: Node, growth: Growth) -> bool:
    """Whether a difference as small as rounding gives the block these tokens."""
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        noise = NOISE * torch.randn(VOCABULARY, generator=generator)
        if grown_alone(child, growth, noise) == tuple(child.tokens):
            return True
    return False


@dataclass(eq=False)
class Plot:
    """One tree in the engine.

    Attributes:
        left: decode steps until an interruption; below 0: none comes.
        deaf_in: events until the listener raises; below 0: it does not.
        raised: the listener has raised what no operation has ended with yet.
        interrupted: an operation was interrupted.
        heard: events.
        kept: steps since the listener raised that.
        moved: tokens that went to lower tiers, came back from them, and were given up there.
    """

    tree: ThoughtTree
    slots: int
    left: int = -1
    deaf_in: int = -1
    raised: bool = False
    interrupted: bool = False
    heard: int = 0
    kept: int = 0
    moved: Counter[str] = field(default_factory=Counter)

    def listen(self, event: Event) -> None:
        self.heard += 1
        if isinstance(event, Discarded):
            TALLY.taken += sum(count for _, count in event.taken)
            self.moved["discarded"] += sum(count for _, count in event.nodes)
        elif isinstance(event, Evicted):
            self.moved["stored"] += sum(count for _, count in event.stored)
        elif isinstance(event, Rehydrated) and event.mode == "fetch":
            self.moved["fetched"] += sum(count for _, count in event.nodes)
        self.deaf_in -= 1
        if self.deaf_in == 0:
            self.raised = True
            raise Deaf

    def is_over(self) -> bool:
        self.left -= 1
        if self.left == 0:
            self.interrupted = True
            return True
        return False

    @property
    def alive(self) -> list[Node]:
        return [node for node in self.tree if node.state is NodeState.CLOSED]


@dataclass(eq=False)
class Job:
    """One operation in progress.

    Attributes:
        kind: of the operation.
        nodes: that it is about.
        patience: steps within which it must be done.
        growth: how blocks are decoded.
    """

    operation: Any
    plot: Plot
    kind: Literal["grow", "ask", "extend"]
    nodes: list[Node]
    patience: int
    growth: Growth | None = None

    @property
    def work(self) -> int:
        """Steps that it takes alone at most."""
        each = 2 if self.growth is None else self.growth.stop.max_tokens + 3
        return each * len(self.nodes)


@dataclass
class Tally:
    """What all machines of this process have run.

    Attributes:
        rules: steps of the machines.
        steps: of the engine.
        blocks: that were compared with those of a tree alone.
        shared: slots that prompts shared, summed over the checks.
        siblings: tokens in the slots of siblings, likewise.
        stored: tokens in lower tiers, likewise.
        taken: tokens whose records siblings took over.
        rounded: tokens on the device whose packed record is kept, summed over the checks.
        kept: slots of finished prompts that no tree used, likewise.
        mixed: slots whose KV heads held different tokens, likewise.
        ties: of these differed by rounding.
        ended: operations, by how they ended.
        runs: machines in which something was stored, fetched, discarded, and all of them.
        faults: of the disk and of copies, by kind.
    """

    rules: int = 0
    steps: int = 0
    blocks: int = 0
    shared: int = 0
    siblings: int = 0
    stored: int = 0
    taken: int = 0
    rounded: int = 0
    kept: int = 0
    mixed: int = 0
    ties: int = 0
    ended: Counter[str] = field(default_factory=Counter)
    runs: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


TALLY = Tally()


class Grove(RuleBasedStateMachine):
    """Trees are opened, grown, asked about, cut off and closed in any order, in either mode."""

    debug = True
    lossless = True
    prompts: tuple[tuple[int, ...], ...] = PROMPTS
    least_common = LEAST_COMMON
    least_sibling = LEAST_SIBLING
    most_new = scheduler.MOST_NEW

    def begin(
        self,
        pool: int,
        policy: str,
        mode: Mode,
        rehydrate: Any,
        among: Among = "together",
        trigger: Trigger = NO_TRIGGER,
        lower: LowerRoom = NO_ROOM,
        costs: FetchCosts | None = None,
        keeping: Keeping = KEEPING[0],
    ) -> None:
        self.patches = [
            patch.object(module, "LEAST_COMMON", self.least_common)
            for module in (forest, prefix_cache)
        ]
        self.patches.append(patch.object(forest, "LEAST_SIBLING", self.least_sibling))
        self.patches.append(patch.object(scheduler, "MOST_NEW", self.most_new))
        self.patches.append(patch.object(PackedStore, "group", PACKED_GROUP))
        self.patches += self.more_patches()
        for each in self.patches:
            each.start()
        self.source = Source()
        self.lab = Lab(
            build("llama"),
            policy=with_heads(policy, keeping, among=among, trigger=trigger),
            mode=mode,
            rehydrate=rehydrate,
            source=self.source,
            lower=lower,
            costs=costs,
            debug=self.debug,
        )
        self.most = ROOMY if policy == "full" else pool
        self.own_budgets = mode == "lossy" and not lower.staging
        self.pool = self.most * (MOST_TREES if self.own_budgets else 1)
        self.plots: list[Plot] = []
        self.jobs: list[Job] = []
        self.left: list[tuple[Plot, int]] = []  # and the events it had heard
        self.open_tree(0, 0)

    def more_patches(self) -> list[Any]:
        """What else is replaced while a machine runs."""
        return []

    # What is drawn

    def plot(self, place: int) -> Plot:
        return self.plots[place % len(self.plots)]

    def job(self, place: int, kind: str = "") -> Job | None:
        some = [job for job in self.jobs if kind in ("", job.kind)]
        return some[place % len(some)] if some else None

    def able(self) -> list[tuple[Plot, Node]]:
        """Leaves that may grow."""
        return [
            (plot, node)
            for plot in self.plots
            if len(plot.tree) < MOST_BLOCKS and self.busy(plot) < 2
            for node in plot.alive
            if node.depth < DEPTH
        ]

    def busy(self, plot: Plot) -> int:
        """Operations in progress on a tree."""
        return sum(job.plot is plot for job in self.jobs)

    # Trees

    @precondition(lambda self: len(self.plots) < MOST_TREES)
    @rule(prompt=st.integers(0, 100), spare=st.integers(0, 20))
    def open_tree(self, prompt: int, spare: int) -> None:
        plot = Plot(
            ThoughtTree(self.prompts[prompt % len(self.prompts)]), min(self.most, SMALLEST + spare)
        )
        self.lab.open(
            plot.tree,
            plot.slots,
            alone=False,
            pool=self.pool,
            emit=plot.listen,
            interrupted=plot.is_over,
        )
        self.plots.append(plot)
        assert self.lab.memory.slots == self.pool
        assert self.lab.room(max(LENGTHS), plot.tree) >= 1

    @precondition(lambda self: self.plots)
    @rule(place=st.integers(0, 100), finish=st.booleans())
    def leave_tree(self, place: int, finish: bool) -> None:
        """A tree is given up, in the middle of its operations or not."""
        plot = self.plot(place)
        (self.lab.finish if finish else self.lab.close)(plot.tree)
        self.plots.remove(plot)
        for job in [job for job in self.jobs if job.plot is plot]:
            assert isinstance(job.operation.error, InterruptedError)
            assert job.operation.done
            self.jobs.remove(job)
            TALLY.ended["closed"] += 1
        if not finish or self.plots:
            assert plot.tree.forest is None
            assert not any(node.span.resident.any() for node in plot.tree)
            assert all(len(node.span) == len(node.tokens) for node in plot.tree)
        self.left.append((plot, plot.heard))

    # Operations

    def start(self, job: Job) -> None:
        self.jobs.append(job)
        job.patience = 20 + 4 * sum(each.work for each in self.jobs)
        for each in self.jobs:  # those of later trees wait for it; those of earlier ones do not
            if self.turn(each) > self.turn(job):
                each.patience += 4 * job.work

    def turn(self, job: Job) -> int:
        return self.plots.index(job.plot)

    @precondition(lambda self: self.able())
    @rule(
        place=st.integers(0, 100),
        other=st.integers(0, 100),
        width=st.integers(1, 3),
        length=st.sampled_from(LENGTHS),
        sampling=st.sampled_from(SAMPLINGS),
        seed=st.integers(0, 2),
    )
    def grow(
        self, place: int, other: int, width: int, length: int, sampling: Sampling, seed: int
    ) -> None:
        able = self.able()
        plot, leaf = able[place % len(able)]
        mine = [node for its, node in able if its is plot]
        leaves = list(dict.fromkeys([leaf, mine[other % len(mine)]]))
        growth = Growth(seed, sampling, STOPS[length])
        try:
            operation = self.lab.begin_grow([(each, width) for each in leaves], growth)
        except Deaf:
            assert plot.raised
            plot.raised = False
            self.clear_away(plot)
            return
        self.start(Job(operation, plot, "grow", operation.children, 0, growth))

    @precondition(lambda self: any(self.busy(plot) < 2 for plot in self.plots))
    @rule(places=st.lists(st.integers(0, 100), min_size=1, max_size=4))
    def ask(self, places: list[int]) -> None:
        plots = [plot for plot in self.plots if self.busy(plot) < 2]
        plot = plots[places[0] % len(plots)]
        nodes = [plot.alive[place % len(plot.alive)] for place in places]
        operation = self.lab.begin_ask(nodes, [QUESTION] * len(nodes))
        self.start(Job(operation, plot, "ask", nodes, 0))

    @precondition(lambda self: any(self.busy(plot) < 2 for plot in self.plots))
    @rule(place=st.integers(0, 100), where=st.integers(0, 100))
    def extend(self, place: int, where: int) -> None:
        plots = [plot for plot in self.plots if self.busy(plot) < 2]
        plot = plots[place % len(plots)]
        node = plot.alive[where % len(plot.alive)]
        self.start(Job(self.lab.begin_extend(node), plot, "extend", [node], 0))

    @precondition(lambda self: self.jobs)
    @rule(steps=st.integers(1, 12))
    def go_on(self, steps: int) -> None:
        for _ in range(steps):
            if not self.lab.busy:
                return
            self.step()

    @precondition(lambda self: self.jobs)
    @rule()
    def go_on_to_the_end(self) -> None:
        self.finish_all()

    def finish_all(self) -> None:
        while self.lab.busy:
            self.step()

    # What goes wrong

    @precondition(lambda self: self.plots)
    @rule(place=st.integers(0, 100), steps=st.integers(1, 6))
    def interrupt(self, place: int, steps: int) -> None:
        self.plot(place).left = steps

    @precondition(lambda self: self.plots)
    @rule(place=st.integers(0, 100), events=st.integers(1, 8))
    def deafen(self, place: int, events: int) -> None:
        plot = self.plot(place)
        if not plot.raised:
            plot.deaf_in = events

    @precondition(lambda self: any(job.kind == "grow" for job in self.jobs))
    @rule(
        place=st.integers(0, 100),
        lie=st.sampled_from(("choose", "late choose", "stop", "confidence")),
    )
    def lie(self, place: int, lie: Lie) -> None:
        job = self.job(place, "grow")
        assert job is not None
        self.source.lies[job.operation] = lie

    @precondition(lambda self: self.jobs)
    @rule(kind=st.sampled_from(FAILURES))
    def break_down(self, kind: Breakdown) -> None:
        """The next forward, or decision of the policy, fails; what follows works again."""
        self.step(kind)

    @precondition(lambda self: self.plots)
    @rule(place=st.integers(0, 100))
    def give_up(self, place: int) -> None:
        plot = self.plot(place)
        leaves = [node for node in plot.alive if node.parent is not None and not node.children]
        if leaves and not self.busy(plot):
            leaf = leaves[place % len(leaves)]
            leaf.state = NodeState.PRUNED
            self.forget(plot, [leaf])
            assert not leaf.span.resident.any()

    def forget(self, plot: Plot, nodes: Sequence[Node]) -> None:
        try:
            self.lab.forget(nodes)
        except Deaf:
            assert plot.raised
            plot.raised = False

    def clear_away(self, plot: Plot) -> None:
        """Give up the open blocks that an operation with an error has left."""
        used = {node for job in self.jobs if job.kind == "grow" for node in job.nodes}
        left = [n for n in plot.tree if n.state is NodeState.OPEN and n not in used]
        for node in left:
            node.state = NodeState.PRUNED
        self.forget(plot, left)

    # A step and what it has done

    def step(self, kind: Breakdown | None = None) -> None:
        concerned: set[Operation] = set()
        with failing(self.lab, kind, concerned) as failed:
            TALLY.steps += 1
            for group in self.lab._parts.stepper._schedulers.groups:
                known = group.focus, group.expansion()
                if not group.may_admit():
                    assert not group.admit()
                    assert (group.focus, group.expansion()) == known
            self.lab.step()
        assert kind in (None, "policy", *COPIES) or failed or not self.jobs or not concerned
        ended = [job for job in self.jobs if job.operation.done]
        broken = [job for job in ended if failed and is_the_failure(job, kind)]
        if failed:
            if kind in COPIES:
                TALLY.faults[kind] += 1
            assert broken, "the failure has ended no operation"
            assert {job.operation for job in broken} <= concerned
        self.jobs = [job for job in self.jobs if job not in ended]
        for job in ended:
            self.over(job, kind if job in broken else None)
        for job in self.jobs:
            job.patience -= not failed
            assert job.patience > 0, "an operation is starved"
        for plot in self.plots:
            if plot.raised and self.lab.state.trees[plot.tree].failure is None:
                # an operation that had an error of its own has ended with that
                assert any(job.plot is plot for job in ended), "what a listener raised was lost"
                plot.raised = False
            # what it raised at the end of an operation ends the next one
            plot.kept = plot.kept + 1 if plot.raised and self.busy(plot) else 0
            assert plot.kept < 2, "what a listener raised was kept"

    def over(self, job: Job, kind: Breakdown | None) -> None:
        error, plot = job.operation.error, job.plot
        TALLY.ended[f"{job.kind} {type(error).__name__}"] += 1
        if isinstance(error, Deaf):
            assert plot.raised
            plot.raised = False
        elif isinstance(error, UsageError) and kind is None:
            assert job.operation in self.source.lies
        elif error is not None and kind is None:
            raise AssertionError("an operation ended without reason") from error
        self.source.lies.pop(job.operation, None)
        if error is None:
            getattr(self, f"has_{job.kind}")(job)
        elif isinstance(error, ArborError) and job.kind == "grow":
            assert all(node.state is NodeState.PRUNED for node in job.nodes)
            assert not any(node.span.resident.any() for node in job.nodes)
        self.clear_away(plot)
        for node in job.nodes:
            self.source.owners.pop(node, None)

    def has_grow(self, job: Job) -> None:
        assert job.growth is not None
        assert job.operation.result() == job.nodes
        for child in job.nodes:
            assert len(child.span) == len(child.tokens) <= job.growth.stop.max_tokens
            if child.state is not NodeState.CLOSED:
                assert child.state is NodeState.PRUNED and job.plot.interrupted
                continue
            full = len(child.tokens) == job.growth.stop.max_tokens
            assert full or child.tokens[-1] in EOS
            if self.lossless:
                TALLY.blocks += 1
                if expected_tokens(child, job.growth) != tuple(child.tokens):
                    assert is_a_tie(child, job.growth), "a block differs from the one grown alone"
                    TALLY.ties += 1

    def has_ask(self, job: Job) -> None:
        answers = job.operation.result()
        assert answers.isfinite().all()
        if self.lossless:
            for node, got in zip(job.nodes, answers, strict=True):
                assert relative_error(got, answer((*path_ids(node), *QUESTION))) < 1e-4

    def has_extend(self, job: Job) -> None:
        job.operation.result()
        if self.lossless:
            assert all(block.span.exact.all() for block in job.nodes[0].path)

    # What is always true

    @invariant()
    def the_account_is_right(self) -> None:
        if hasattr(self, "lab"):
            TALLY.rules += 1
            memory = self.lab.memory
            memory.check()
            assert memory.used <= self.pool
            assert not memory.pending
            assert self.lab.busy == bool(self.jobs)
            assert all(plot.heard == heard for plot, heard in self.left)
            used = {tree: memory.used_by(tree) for tree in memory.forest.trees}
            for tree, count in used.items():
                held = [s for node in tree for s in node.span.slot[node.span.resident].tolist()]
                assert count == len(set(held))
                assert memory.shared_within(tree) == len(held) - len(set(held))
                TALLY.siblings += len(held) - len(set(held))
            for plot in self.plots if self.own_budgets else ():
                assert memory.peak_of(plot.tree) <= plot.slots
            every = {s for node in memory.forest for s in node.span.slot.tolist()} - {NO_SLOT}
            kept = set(np.flatnonzero(memory.prefixes.references(memory.slots)).tolist())
            assert memory.used == len(every | kept)
            assert memory.available == self.pool - len(every)
            TALLY.shared += sum(used.values()) - len(every)
            TALLY.kept += len(kept - every)
            if not used:
                return
            table = self.lab.state.table
            table.refresh()
            blocks = memory.table.references - memory.prefixes.references(memory.slots)
            for node in memory.forest:
                if node.row < len(table) and node.state is not NodeState.OPEN:
                    held = node.span.slot[node.span.resident]
                    assert table.resident[node.row] == np.count_nonzero(blocks[held] == 1)

    def teardown(self) -> None:
        """All is done in the end, and afterwards every tree can be grown again."""
        if not hasattr(self, "lab"):
            return
        try:
            self.end()
        finally:
            for each in self.patches:
                each.stop()

    def end(self) -> None:
        for plot in self.plots:
            plot.left = plot.deaf_in = -1
        self.finish_all()
        assert not self.jobs
        for plot in self.plots:
            plot.raised = False
            self.lab.state.trees[plot.tree].failure = None
            self.start(
                Job(self.lab.begin_extend(plot.tree.root), plot, "extend", [plot.tree.root], 0)
            )
            self.finish_all()
        for tree in list(self.lab.memory.forest.trees):  # the last one finished is still there
            self.lab.close(tree)
        self.the_account_is_right()


def is_the_failure(job: Job, kind: Breakdown | None) -> bool:
    error = job.operation.error
    if kind == "policy":
        return isinstance(error, UsageError) and error.code == "policy"
    wanted = {"memory": OutOfMemory, "forward": Failure, "store": Failure, "fetch": Failure}
    return kind is not None and isinstance(error, wanted[kind])


def place_of(lab: Lab, kind: Breakdown | None) -> tuple[Any, str]:
    """What fails, and the name of its function; None where there is no such thing."""
    if kind == "policy":
        return residency, "select"
    if kind in COPIES:
        stores: list[Store] = [shelf.store for shelf in lab.memory.lower]
        return stores[-1] if stores else None, "write" if str(kind).endswith("store") else "read"
    return ModelRunner, "forward"


@contextmanager
def failing(
    lab: Lab, kind: Breakdown | None, concerned: set[Operation]
) -> Iterator[list[Breakdown]]:
    """Within, the first forward, decision of the policy, or copy to or from the last store fails,
    with what had a part in it."""
    failed: list[Breakdown] = []
    where, name = place_of(lab, kind)
    if kind is None or where is None:
        yield failed
        return
    right = getattr(where, name)
    errors = {
        "forward": Failure(),
        "memory": torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB."),
        "policy": UsageError("policy", "a wrong answer"),
        "store": Failure(),
        "fetch": Failure(),
    }

    def fail_once(*args: Any, **kwargs: Any) -> Any:
        if failed:
            return right(*args, **kwargs)
        failed.append(kind)
        stepper: Stepper = lab._parts.stepper
        concerned.update(row.operation for row in stepper._schedulers.rows)
        concerned.update(work.operation for work in stepper._joined)
        raise errors[kind]

    with patch.object(where, name, fail_once):
        yield failed


class LosslessGrove(Grove):
    """In a budget that holds a path, or several: what grows is what grows alone."""

    @initialize(
        policy=st.sampled_from(LOSSLESS),
        rehydrate=st.sampled_from(("selective", "span")),
        spare=st.integers(0, 60),
        among=st.sampled_from(AMONG),
        trigger=st.sampled_from((NO_TRIGGER, EARLY)),
    )
    def plant(
        self, policy: str, rehydrate: Any, spare: int, among: Among, trigger: Trigger
    ) -> None:
        self.begin(SMALLEST + spare, policy, "lossless", rehydrate, among, trigger)


class AlikeGrove(LosslessGrove):
    """With prompts that begin alike, and share KV."""

    prompts = ALIKE
    least_common = 3
    least_sibling = 2
    most_new = 10

    def end(self) -> None:
        super().end()
        self.lab.memory.free_kept_prompts(self.pool)
        assert self.lab.memory.used == 0


class FaultyDisk:
    """The system's calls that a store on disk makes, of which some go wrong.

    Attributes:
        fault: what goes wrong: no room is left; a part is written, and the caller hears of it, or
            does not; nothing can be read.
        left: tokens that are written well before that.
    """

    def __init__(self) -> None:
        self.fault: DiskFault = "none"
        self.left = 0
        self._write, self._read = os.pwrite, os.preadv

    def patches(self) -> list[Any]:
        calls = {"pwrite": self.write, "preadv": self.read}
        return [patch.object(os, name, call) for name, call in calls.items()]

    def write(self, file: int, data: Any, place: int) -> int:
        if self.fault in ("none", "unreadable") or self.left > 0:
            self.left -= 1
            return self._write(file, data, place)
        TALLY.faults[self.fault] += 1
        if self.fault == "full":
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self._write(file, memoryview(data)[: len(data) // 2], place)
        return written if self.fault == "short" else len(data)

    def read(self, file: int, buffers: Any, place: int) -> int:
        if self.fault == "unreadable":
            TALLY.faults[self.fault] += 1
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._read(file, buffers, place)

    def flip_a_bit(self, file: int, place: int) -> None:
        if size := os.fstat(file).st_size:
            (byte,) = os.pread(file, 1, place % size)
            self._write(file, bytes([byte ^ 1]), place % size)
            TALLY.faults["flipped"] += 1


class TieredGrove(AlikeGrove):
    """With room for evicted KV in host memory and on a disk that fails and forgets; the first tree
    has grown beyond the budget."""

    @initialize(
        policy=st.sampled_from(EVICTING),
        rehydrate=st.sampled_from(("selective", "span")),
        spare=st.integers(0, 8),
        trigger=st.sampled_from((NO_TRIGGER, EARLY)),
        host=st.sampled_from((0, 3, 12, 60)),
        disk=st.sampled_from((4, 20, 60)),
        costs=st.sampled_from((None, None, *map(FetchCosts.parse, COSTS))),
        seed=st.integers(0, 2),
    )
    def plant(  # type: ignore[override]
        self,
        policy: str,
        rehydrate: Any,
        spare: int,
        trigger: Trigger,
        host: int,
        disk: int,
        costs: FetchCosts | None,
        seed: int,
    ) -> None:
        self.disk = FaultyDisk()
        lower = LowerRoom(host, disk)
        slots = SMALLEST + spare
        self.begin(slots, policy, "lossless", rehydrate, trigger=trigger, lower=lower, costs=costs)
        for leaf in range(3):  # of what has grown by then
            self.grow(leaf, leaf, 3, max(LENGTHS), SAMPLINGS[1], seed)
            self.finish_all()
        for leaf in (4, 8, 5, 9):  # whose paths have lost tokens
            self.extend(0, leaf)
            self.finish_all()

    def more_patches(self) -> list[Any]:
        return self.disk.patches()

    @precondition(lambda self: any(self.busy(plot) < 2 for plot in self.plots))
    @rule(kind=st.sampled_from(COPIES), place=st.integers(0, 100), where=st.integers(0, 100))
    def break_a_copy(self, kind: Breakdown, place: int, where: int) -> None:
        """A path comes back, and the first copy to or from the last store fails."""
        self.extend(place, where)
        self.step(kind)

    @rule(fault=st.sampled_from(DISK_FAULTS), left=st.integers(0, 3))
    def break_the_disk(self, fault: DiskFault, left: int) -> None:
        self.disk.fault, self.disk.left = fault, left

    @rule(place=st.integers(0, 10**6))
    def flip_a_bit(self, place: int) -> None:
        for shelf in self.lab.memory.lower:
            if isinstance(shelf.store, DiskStore):
                self.disk.flip_a_bit(shelf.store._file, place)

    @invariant()
    def what_comes_back_is_counted(self) -> None:
        if hasattr(self, "lab"):
            lower = self.lab.memory.lower
            held = sum(shelf.table.used for shelf in lower)
            assert held <= sum(shelf.store.records for shelf in lower)
            TALLY.stored += held

    def end(self) -> None:
        super().end()
        plots = [*self.plots, *(plot for plot, _ in self.left)]
        moved = sum((plot.moved for plot in plots), Counter[str]())
        TALLY.runs.update(("all", *moved))


class LossyGrove(Grove):
    """In budgets below a path too, reversible or not."""

    lossless = False

    @initialize(
        policy=st.sampled_from(POLICY_NAMES),
        rehydrate=st.sampled_from(("off", "selective", "span")),
        pool=st.integers(PROTECTED + max(LENGTHS) + len(QUESTION), SMALLEST + 20),
        among=st.sampled_from(AMONG),
        trigger=st.sampled_from((NO_TRIGGER, EARLY)),
        keeping=st.sampled_from(KEEPING),
    )
    def plant(
        self,
        policy: str,
        rehydrate: Any,
        pool: int,
        among: Among,
        trigger: Trigger,
        keeping: Keeping,
    ) -> None:
        self.begin(pool, policy, "lossy", rehydrate, among, trigger, keeping=keeping)

    @invariant()
    def mixed_slots_are_counted(self) -> None:
        if hasattr(self, "lab"):
            TALLY.mixed += int(np.count_nonzero(self.lab.memory.table.mixed))


class PackedGrove(LossyGrove):
    """With host memory in few bits, which now and then has no memory to pack in."""

    @initialize(
        policy=st.sampled_from(POLICY_NAMES),
        rehydrate=st.sampled_from(("selective", "span")),
        pool=st.integers(PROTECTED + max(LENGTHS) + len(QUESTION), SMALLEST + 40),
        trigger=st.sampled_from((NO_TRIGGER, EARLY)),
        host=st.integers(1, 60),
        bits=st.sampled_from(BITS),
        costs=st.sampled_from((None, *map(FetchCosts.parse, PACKED_COSTS))),
        keeping=st.sampled_from(KEEPING),
    )
    def plant(  # type: ignore[override]
        self,
        policy: str,
        rehydrate: Any,
        pool: int,
        trigger: Trigger,
        host: int,
        bits: int,
        costs: FetchCosts | None,
        keeping: Keeping,
    ) -> None:
        lower = LowerRoom(host, host_bits=bits)
        self.begin(
            pool,
            policy,
            "lossy",
            rehydrate,
            trigger=trigger,
            lower=lower,
            costs=costs,
            keeping=keeping,
        )

    def store(self) -> PackedStore:
        (shelf,) = self.lab.memory.lower
        assert isinstance(shelf.store, PackedStore)
        return shelf.store

    @rule(full=st.booleans())
    def run_out_of_memory(self, full: bool) -> None:
        store: Any = self.store()
        store._quantise = refuse_memory if full else partial(PackedStore._quantise, store)

    @invariant()
    def what_has_an_origin_is_what_is_read_there(self) -> None:
        if hasattr(self, "lab"):
            memory = self.lab.memory
            TALLY.stored += memory.lower.used(Tier.COMPRESSED)
            for node in memory.forest:
                span = node.span
                at = np.flatnonzero(span.origin != NO_RECORD)
                if len(at):
                    rows, intact = self.store().read(span.origin[at], torch.device("cpu"))
                    assert torch.equal(memory.pool.gather(span.slot[at])[intact], rows[intact])
                    TALLY.rounded += len(at)


def with_heads(name: str, keeping: Keeping, **settings: Any) -> Policy:
    """A policy whose KV heads keep tokens of their own, if that is asked for and it can."""
    granularity, heads = keeping
    policy = replace(POLICIES[name], **settings)
    try:
        return replace(policy, granularity=granularity, heads=heads)  # type: ignore[arg-type]
    except UsageError:
        return policy


def refuse_memory(*args: Any) -> None:
    """Stands for an allocation that fails."""
    raise RuntimeError("DefaultCPUAllocator: can't allocate memory")


for each in (LosslessGrove, AlikeGrove, TieredGrove, LossyGrove, PackedGrove):
    each.TestCase.settings = settings(max_examples=12, stateful_step_count=25, deadline=None)
TieredGrove.TestCase.settings = settings(max_examples=8, stateful_step_count=20, deadline=None)
TestLossless = LosslessGrove.TestCase
TestAlike = AlikeGrove.TestCase
TestLossy = LossyGrove.TestCase
TestPacked = PackedGrove.TestCase


class TestTiered(TieredGrove.TestCase):  # type: ignore[misc]
    """Most machines have stored, fetched and given up KV."""

    def runTest(self) -> None:
        before = TALLY.runs.copy()
        super().runTest()
        reached_the_stores(TALLY.runs - before, stored=0.9, fetched=0.3, discarded=0.5)


def reached_the_stores(runs: Counter[str], **parts: float) -> None:
    """At least these parts of the runs moved KV to lower tiers and back."""
    for moved, part in parts.items():
        assert runs[moved] >= part * runs["all"], f"{moved} in {runs[moved]} of {runs['all']} runs"


STEPS_EACH = 100


@pytest.mark.slow
@pytest.mark.parametrize("grove", [LosslessGrove, AlikeGrove, TieredGrove, LossyGrove, PackedGrove])
def test_many_trees_for_long(grove: type[Grove]) -> None:
    """More histories, longer ones, other ones every time; `pytest -s` shows the counts.

    ``ARBOR_FUZZ_STEPS`` sets the steps of each machine.
    """

    class Long(grove):  # type: ignore[valid-type, misc]
        debug = False

    histories = max(1, STEPS // STEPS_EACH)
    steps, runs = TALLY.steps, TALLY.runs.copy()
    began = time.thread_time()
    run_state_machine_as_test(
        Long,
        settings=settings(
            max_examples=histories,
            stateful_step_count=STEPS_EACH,
            deadline=None,
            derandomize=False,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    print(f"{time.thread_time() - began:.0f} s of CPU", TALLY)
    assert TALLY.steps - steps > 4 * histories
    if grove is TieredGrove:  # drawn anew each time: 32 to 84 % fetched, 45 to 76 % discarded
        reached_the_stores(TALLY.runs - runs, stored=0.9, fetched=0.1, discarded=0.1)
