"""What a retention policy costs: microseconds per Pressure event, against the paper's loop that
takes token by token.

    python scripts/bench_policy.py --json out.json

A tree of blocks of 128 tokens (200 and 1,280 blocks are ArborKV's Config-S and Config-L) holds a
quarter of its KV, as the policy shared it out while other leaves ran. Then the search moves on, and
an expansion needs room: one event. Timed alone:

    view     read the blocks that changed, paths, distances, re-entry, MSVE: everything the
             allocator is given
    counts   the allocator
    kept     which tokens of each block stay, the token view of the blocks that lose some included
    tokens   the token view of all blocks, for allocators that rank all tokens; counts is given it
    engine   the whole event as `Residency` runs it, on a tree whose tokens lie in a pool of slots
             that the policy brought down to its quarter itself: offer and decision, the blocks of
             the running paths read again before; without moving anything
    carried  carrying it out, one event after another: tokens evicted, reported, and the blocks that
             lost some read again
    loop     the paper's Pressure loop (Algorithm 2, lines 28-32): argmin over all blocks, one token
             less, again

The loop is given what it lacks in the paper: a priority (the utility a block loses with the token,
w ln(k / (k - 1))), an end (blocks at K_min are passed over), and numpy for its argmin, kept up to
date. It must arrive at the counts of `kkt`. Thread CPU time of one thread; median and quartiles.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from arbor.engine.forest_state import ForestState
from arbor.engine.open_tree import OpenTree, RunHooks
from arbor.engine.residency import Residency
from arbor.memory import KVMemory
from arbor.memory.pool import LayerKV
from arbor.papers.arborkv.kkt import KKT
from arbor.papers.arborkv.msve import MSVE
from arbor.registry import names, resolve
from arbor.retention.base import NEVER, Blocks, Ints, TokenAllocator, Tokens
from arbor.retention.block_table import BlockTable
from arbor.retention.policy import Policy
from arbor.retention.selection import select, select_all_but, select_by_count
from arbor.retention.token_statistics import AttentionColumns, TokenStatistics
from arbor.tree import Node, NodeState, Span, Spans, ThoughtTree

BLOCK = 128  # tokens, as in the paper
PROMPT = 512
RUNNING = 8  # leaves
CARRIED = 8  # events carried out one after another
BRANCHING = {200: 3, 1280: 5, 10_000: 5}


class Search:
    """A tree as a search leaves it behind, and the figures an engine would keep of it."""

    def __init__(self, size: int, seed: int) -> None:
        self.rng = np.random.default_rng(seed)
        self.tree = ThoughtTree(range(PROMPT))
        branching, level = BRANCHING.get(size, 4), [self.tree.root]
        while len(self.tree) < size:
            children = [self.tree.fork(parent) for parent in level for _ in range(branching)]
            grown = max(RUNNING, len(children) // 2)
            level = [children[i] for i in self.rng.permutation(len(children))[:grown]]
        self.tree.nodes[size:] = []
        for node in self.tree:
            node.children = [child for child in node.children if child.id < size]
            if node.parent is not None:
                node.start = node.parent.end
                node.tokens.extend([0] * BLOCK)
                node.span.grow(BLOCK)
                node.state = NodeState.CLOSED
                node.value, node.confidence = self.rng.random(2).tolist()
        self.frontier = [node for node in self.tree if not node.children]
        self.table = BlockTable()
        self.statistics = TokenStatistics()
        for node in self.tree:
            self.table.touch(node)
            self.statistics.open(node.id, node.start, len(node.tokens))
        self.table.refresh()
        owner = np.repeat(np.arange(size), self.table.length)
        offset = np.arange(len(owner)) - np.repeat(
            np.cumsum(self.table.length) - self.table.length, self.table.length
        )
        heat = self.rng.pareto(1.2, len(owner)).astype(np.float32) * 1e-3
        self.statistics.observe(
            owner, self.table.start[owner] + offset, heat, self.rng.integers(1, 500, len(owner))
        )
        self.table.last_used[:] = self.rng.integers(0, size, size)
        self.next_use = np.where(
            self.rng.random(size) < 0.3, self.rng.integers(0, size, size), NEVER
        )
        self.growable = np.array([node.id for node in self.frontier])
        self.outlook = self.rng.dirichlet(np.ones(len(self.frontier)))

    def leaves(self) -> list[Node]:
        """Leaves that run next; most lie near one another, as after a step of a beam."""
        first = int(self.rng.integers(len(self.frontier) - RUNNING))
        return self.frontier[first : first + RUNNING]

    def view(self, policy: Policy, leaves: list[Node], resident: Ints | None = None) -> Blocks:
        """What the policy may take from while these leaves run, all by arrays.

        Args:
            resident: by node id, tokens on the device; all if None.
        """
        table = self.table
        for leaf in leaves:
            table.touch(leaf)
        table.refresh()
        running = [leaf.id for leaf in leaves]
        active = table.on_paths(running)
        have = table.length if resident is None else resident
        ids = np.flatnonzero((have > 0) & ~active)
        held, protect = have[ids], policy.protect
        observed = policy.observes
        attention = self.statistics.block_attention(ids) if observed else np.zeros(len(ids))
        value, confidence = table.expected()[ids], table.confidence[ids]
        likely = table.reentry(self.growable, self.outlook)
        return Blocks(
            ids=ids,
            length=table.length[ids],
            resident=held,
            floor=np.minimum(held, max(protect.floor, protect.tail)),
            depth=table.depth[ids],
            distance=table.distances(running)[ids],
            active=active[ids],
            value=value,
            confidence=confidence,
            attention=attention,
            score=MSVE().scores(value, confidence, attention),
            last_used=table.last_used[ids],
            scheduled=np.full(len(ids), NEVER),
            reentry=likely[ids],
            turn=np.zeros(len(ids), np.int64),
            next_use=self.next_use[ids],
            see=lambda indices: self.tokens(policy, ids, held, indices),
        )

    def tokens(self, policy: Policy, ids: Ints, held: Ints, indices: Ints) -> Tokens:
        """Token view of the last `held` tokens of some blocks."""
        sizes = held[indices]
        block = np.repeat(indices, sizes)
        place = np.arange(len(block)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        offset = (self.table.length[ids] - held)[block] + place
        nothing = np.zeros(len(block), np.int64)
        seen = AttentionColumns(
            *[nothing.astype(float)] * 2, *[nothing] * 3, *[nothing.astype(float)] * 2
        )
        if policy.observes:
            seen = self.statistics.view(ids[block], offset)
        return Tokens(
            block=block,
            offset=offset,
            position=self.table.start[ids][block] + offset,
            mass=seen.mass,
            latest=seen.latest,
            queries=seen.queries,
            activated=seen.activated,
            recurrence=seen.recurrence,
            lately=seen.lately,
            credit=seen.credit,
            key=(ids[block] * 1_000_003 + offset).astype(np.uint64),
            protected=offset >= self.table.length[ids][block] - policy.protect.tail,
        )


def event(search: Search, policy: Policy, share: float) -> tuple[Blocks, int, list[Node]]:
    """One Pressure event of a search that has run within its budget until now.

    Returns:
        what is offered, the room there is, the leaves that run.
    """
    budget = int(share * int(search.table.length.sum()))
    before = search.leaves()
    blocks = search.view(policy, before)
    paths = search.table.on_paths([leaf.id for leaf in before])
    room = budget - int(search.table.length[paths].sum())
    resident = np.where(paths, search.table.length, 0)
    resident[blocks.ids] = policy.allocator.counts(blocks, room, policy.scorer)
    leaves = search.leaves()
    blocks = search.view(policy, leaves, resident)
    paths = search.table.on_paths([leaf.id for leaf in leaves])
    needed = int(search.table.length[paths].sum()) + RUNNING * BLOCK  # the new paths, and a step
    return blocks, max(int(blocks.floor.sum()), budget - needed), leaves


def engine_event(
    search: Search, policy: Policy, share: float
) -> tuple[Callable[[], Any], Callable[[], float]]:
    """The same event in the engine.

    Returns:
        what to time, offer and decision; and what carries out one more event, in microseconds.
    """
    tree = search.tree
    total = sum(len(node.tokens) for node in tree)
    memory = KVMemory((LayerKV(1, 1, 1),), total, torch.float32, torch.device("cpu"))
    tree.forest, tree.spans = None, Spans()  # it was in the memory of the policy before
    for node in tree:
        node.row, node.span = node.id, Span(tree.spans)
        node.span.grow(len(node.tokens))
    memory.adopt(tree)
    likely = dict(zip(search.growable.tolist(), search.outlook.tolist(), strict=True))
    state = ForestState(memory, policy.protect)
    state.open(OpenTree(tree, memory, total, RunHooks(outlook=lambda: likely)))
    state.statistics = search.statistics
    residency = Residency(state, policy, MSVE())
    for node in tree:
        memory.place(node, np.arange(len(node.tokens)), exact=True, depth=1)
    memory.commit()
    for clock, node in enumerate(search.rng.permutation(np.array(tree.nodes, object))):
        state.table.use([node], clock)
    state.changed(tree.nodes)
    residency.fit(total - int(share * total), search.leaves(), "pressure")
    leaves = search.leaves()
    paths = tree.paths(leaves)
    missing = sum(int((~node.span.resident).sum()) for node in paths)
    taken = missing + RUNNING * BLOCK
    offer = partial(residency.view.offered, leaves)

    def decide() -> Any:
        state.changed(paths)
        blocks = offer()
        room = int(blocks.resident.sum()) - taken
        return residency.decide(blocks, room, lambda protect: offer(protect=protect))

    def carry_out() -> float:
        blocks = offer()
        held = int(blocks.resident.sum())
        room = held - min(taken, held // 2)
        blocks, counts, chosen = residency.decide(
            blocks, room, lambda protect: offer(protect=protect)
        )
        began = time.thread_time_ns()
        residency.keep(blocks, chosen, counts, room, "pressure", 0.0)
        state.table.refresh()
        return (time.thread_time_ns() - began) / 1e3

    return decide, carry_out


def pressure_loop(
    weight: NDArray[np.float64], floor: Ints, resident: Ints, room: int
) -> tuple[Ints, int]:
    """The paper's loop: counts, and how many tokens it took."""
    counts = resident.copy()
    with np.errstate(divide="ignore"):
        loss = np.where(counts > floor, -weight * np.log1p(-1 / np.maximum(counts, 1)), np.inf)
    total, steps = int(counts.sum()), 0
    while total > room:
        block = int(np.argmin(loss))
        counts[block] -= 1
        kept = int(counts[block])
        spare = kept > int(floor[block])
        loss[block] = -weight[block] * np.log1p(-1 / kept) if spare else np.inf
        total -= 1
        steps += 1
    return counts, steps


def timed(call: Callable[[], Any], rounds: int) -> dict[str, float]:
    """Microseconds of thread CPU time: median and quartiles."""
    call()
    times = []
    for _ in range(rounds):
        began = time.thread_time_ns()
        call()
        times.append((time.thread_time_ns() - began) / 1e3)
    return quartiles(times)


def quartiles(times: list[float]) -> dict[str, float]:
    """Median and quartiles, and of how many."""
    low, median, high = (round(float(each), 1) for each in np.percentile(times, [25, 50, 75]))
    return {"median": median, "low": low, "high": high, "n": len(times)}


def measure(search: Search, policy: Policy, share: float, rounds: int) -> dict[str, Any]:
    """One policy's event, timed part by part."""
    blocks, room, leaves = event(search, policy, share)
    resident = np.zeros(len(search.table), np.int64)
    resident[blocks.ids] = blocks.resident
    allocator, scorer = policy.allocator, policy.scorer
    counts, _ = select(blocks, room, allocator, scorer)
    every = np.arange(len(blocks))

    def choose() -> Any:
        if isinstance(allocator, TokenAllocator):
            return select_all_but(blocks, gone)
        return select_by_count(blocks, counts, scorer)

    def ask() -> Any:
        if isinstance(allocator, TokenAllocator):
            return allocator.leaving(blocks, room, scorer)
        return allocator.counts(blocks, room, scorer)

    gone = ask()
    decide, carry_out = engine_event(search, policy, share)
    row: dict[str, Any] = {
        "blocks": len(search.table),
        "policy": policy.name,
        "offered": len(blocks),
        "tokens": int(blocks.resident.sum()),
        "taken": int(blocks.resident.sum() - counts.sum()),
        "view_us": timed(lambda: search.view(policy, leaves, resident), rounds),
        "counts_us": timed(ask, rounds),
        "kept_us": timed(choose, rounds),
        "engine_us": timed(decide, rounds),
        "carried_us": quartiles([carry_out() for _ in range(CARRIED)]),
    }
    if isinstance(allocator, TokenAllocator):
        row["tokens_us"] = timed(lambda: blocks.see(every), max(5, rounds // 5))
    parts = (row["view_us"], row["counts_us"], row["kept_us"])
    row["event_us"] = round(sum(part["median"] for part in parts), 1)
    if isinstance(allocator, KKT):
        assert (blocks.floor >= 1).all(), "the loop is defined from one token up"
        weight = blocks.score**allocator.gamma
        weight = weight * np.exp(-allocator.lambda_distance * blocks.distance)
        given = weight, blocks.floor, blocks.resident, room
        slow, row["loop_steps"] = pressure_loop(*given)
        row["loop_differs"] = int((slow != counts).sum())
        row["loop_us"] = timed(lambda: pressure_loop(*given), max(5, rounds // 10))
        row["loop_times"] = round(row["loop_us"]["median"] / row["counts_us"]["median"], 1)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sizes", type=int, nargs="+", default=[200, 1280, 10_000])
    parser.add_argument("--share", type=float, default=0.25, help="part of the KV that is kept")
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    rows = []
    for size in args.sizes:
        search = Search(size, args.seed)
        for policy in (resolve("policy", name) for name in names("policy")):
            # a made-up search has no keys, and no heads
            if not (policy.keeps_all or policy.observation.keys or policy.by_head):
                rows.append(measure(search, policy, args.share, args.rounds))
                print(json.dumps(rows[-1]), flush=True)
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
