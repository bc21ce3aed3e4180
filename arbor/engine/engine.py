"""Engine: forward passes over the tree, each within the budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.engine.boundary import Stop, StopRule
from arbor.engine.plan import ForwardPlan, Piece, Segment, SharedPrefix, plan_forward
from arbor.engine.runner import ForwardResult, ModelRunner
from arbor.engine.sampling import Sampling, confidence, sample, stream
from arbor.errors import BudgetInfeasible
from arbor.events import KV, Boundary, Event, Evicted, Forwarded, Opened, Pressure, Rehydrated
from arbor.memory import KVMemory
from arbor.retention.base import Allocator, Block
from arbor.tree import NO_SLOT, Node, NodeState, ThoughtTree

NEXT_LOGITS_BYTES = 256 << 20
Kind = Literal["prefill", "decode", "verify"]
Filled = tuple[Node, NDArray[np.int64]]  # a block, and offsets of its tokens that a forward writes


@dataclass(frozen=True, slots=True)
class Growth:
    """How blocks are decoded: the random seed, how tokens are chosen, where a block ends."""

    seed: int
    sampling: Sampling
    stop: StopRule


class Engine:
    """Runs the model over one tree at a time. Knows no search.

    Every public operation is a transaction: plan what it needs, evict to fit, allocate, only then compute. It succeeds,
    or raises `BudgetInfeasible` with the smallest budget that would do and leaves the tree as it was.

    Args:
        runner: the model.
        tokenizer: a Hugging Face tokenizer, for questions and boundaries.
        allocator: what evictable blocks keep under pressure.
        emit: listener for everything that happens.
        min_saved_reads: see `plan_forward`.
        debug: poison freed slots and check all invariants after every change.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        *,
        allocator: Allocator,
        emit: Callable[[Event], None] = lambda event: None,
        min_saved_reads: int = 0,
        debug: bool = False,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.emit = emit
        self._allocator = allocator
        self._min_saved_reads = min_saved_reads
        self._debug = debug
        self._memory: KVMemory | None = None
        self._tree: ThoughtTree | None = None
        self._next_logits: dict[int, Tensor] = {}
        self._last_used: dict[int, int] = {}
        self._computed: set[int] = set()
        self._clock = 0
        self._interrupted: Callable[[], bool] = lambda: False

    # Life of a tree

    def open(
        self, tree: ThoughtTree, slots: int, interrupted: Callable[[], bool] = lambda: False
    ) -> None:
        """Begin a tree within a budget of `slots`; the last tree's KV is freed.

        Args:
            tree: holds only its root.
            slots: tokens of KV.
            interrupted: asked after every decode step whether to give up the blocks in progress.
        """
        if self._memory is None or self._memory.slots != slots:
            self._memory = KVMemory(
                self.runner.layer_kv,
                slots,
                self.runner.dtype,
                self.runner.device,
                debug=self._debug,
            )
        self._memory.attach(tree)
        self._tree = tree
        self._next_logits.clear()
        self._last_used.clear()
        self._computed.clear()
        self._clock = 0
        self._interrupted = interrupted

    @property
    def memory(self) -> KVMemory:
        assert self._memory is not None, "no tree is open"
        return self._memory

    @property
    def tree(self) -> ThoughtTree:
        assert self._tree is not None, "no tree is open"
        return self._tree

    @property
    def kv(self) -> KV:
        """Slots per tier now."""
        return KV(device=self.memory.used)

    def encode(self, text: str) -> list[int]:
        """Token ids of a continuation (no special tokens)."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    # Operations

    def extend(self, node: Node) -> None:
        """Make the path of `node` complete: the prefill of a prompt, or the rehydration of a path."""
        self._require([node], [0])
        self._complete([node], reserve=0, kind="prefill", need_logits=True)

    def room(self, leaf_tokens: int) -> int:
        """Blocks of up to `leaf_tokens` tokens that may decode at once beside the longest path, at least 1."""
        longest = max(node.end for node in self.tree)
        return max(1, (self.memory.slots - longest) // max(1, leaf_tokens))

    def grow(self, leaves: Sequence[tuple[Node, int]], growth: Growth) -> list[Node]:
        """Decode new children, all of them together as far as the budget allows, each up to its own boundary.

        Args:
            leaves: (leaf, width) pairs.
            growth: how.

        Returns:
            The new closed blocks, in the order asked. After an interruption the unfinished ones are PRUNED.

        Raises:
            BudgetInfeasible: a single child does not fit beside its path.
        """
        longest = growth.stop.max_tokens
        self._require([leaf for leaf, _ in leaves], [longest] * len(leaves))
        children = []
        for leaf, width in leaves:
            for _ in range(width):
                child = self.tree.fork(leaf)
                children.append(child)
                self.emit(
                    Opened(
                        node=child.id,
                        parent=leaf.id,
                        index=child.index,
                        depth=child.depth,
                        tokens=0,
                        text="",
                    )
                )
        self.decode(children, growth)
        return children

    def decode(self, children: Sequence[Node], growth: Growth) -> None:
        """Decode open blocks up to their boundaries, together as far as the budget allows.

        Args:
            children: open blocks without KV, empty or with a first token that is given rather than sampled.
            growth: how.

        Raises:
            BudgetInfeasible: a single child does not fit beside its path.
        """
        longest = growth.stop.max_tokens
        order = sorted(children, key=lambda child: child.key)
        parents = [child.parent for child in order if child.parent is not None]
        self._require(parents, [longest] * len(parents))
        for wave in self._waves(parents, [longest] * len(order)):
            if self._interrupted():
                self._cut([order[i] for i in wave])
            else:
                self._decode([order[i] for i in wave], growth)

    def ask(self, nodes: Sequence[Node], questions: Sequence[Sequence[int]]) -> Tensor:
        """The model's next-token logits after `path + question`, for each pair; leaves the tree as it was.

        Args:
            nodes: blocks.
            questions: token ids, at least one each.

        Returns:
            [len(nodes), V] float32.

        Raises:
            BudgetInfeasible: one question does not fit beside its path.
        """
        self._require(nodes, [len(question) for question in questions])
        order = sorted(range(len(nodes)), key=lambda i: nodes[i].key)
        answers: list[Tensor] = [torch.empty(0)] * len(nodes)
        lengths = [len(questions[i]) for i in order]
        for wave in self._waves([nodes[i] for i in order], lengths):
            chosen = [order[i] for i in wave]
            logits = self._ask([nodes[i] for i in chosen], [questions[i] for i in chosen])
            for row, index in enumerate(chosen):
                answers[index] = logits[row]
        return torch.stack(answers) if answers else torch.empty(0, 0)

    def forget(self, nodes: Sequence[Node]) -> None:
        """The search will not come back to these blocks: free what they hold."""
        counts = []
        for node in nodes:
            self._next_logits.pop(node.id, None)
            freed = self.memory.release([node])
            if freed:
                counts.append((node.id, freed))
        if counts:
            self.emit(Evicted(cause="close", nodes=tuple(sorted(counts)), kv=self.kv))

    # Fitting

    def _require(self, nodes: Sequence[Node], extra: Sequence[int]) -> None:
        """Raise unless each node's path and its extra tokens fit the budget by themselves."""
        needed = max((node.end + more for node, more in zip(nodes, extra, strict=True)), default=0)
        if needed > self.memory.slots:
            raise BudgetInfeasible(
                needed, self.memory.slots, "the longest path with its next block"
            )

    def _waves(self, nodes: Sequence[Node], extra: Sequence[int]) -> Iterator[list[int]]:
        """Cut work into waves that fit: the union of a wave's paths plus its extra tokens is within the budget.

        Args:
            nodes: in depth-first order, so that a wave shares what it can.
            extra: tokens each needs beyond its path.

        Yields:
            indices into `nodes`.
        """
        wave: list[int] = []
        paths: set[int] = set()
        total = 0
        for index, (node, more) in enumerate(zip(nodes, extra, strict=True)):
            new = [n for n in node.path if n.id not in paths]
            cost = sum(len(n.tokens) for n in new) + more
            if wave and total + cost > self.memory.slots:
                yield wave
                wave, paths = [], set()
                new, total = node.path, 0
                cost = node.end + more
            wave.append(index)
            paths.update(n.id for n in new)
            total += cost
        if wave:
            yield wave

    def _fit(self, needed: int, protected: Sequence[Node]) -> None:
        """Free slots until `needed` are free, taking them from blocks off the running paths."""
        memory = self.memory
        if needed <= memory.free:
            return
        self.emit(Pressure(needed=needed, free=memory.free, limit=memory.slots))
        pinned = {node.id for node in protected}
        blocks = [
            Block(node, int(node.span.resident.sum()), self._last_used.get(node.id, 0))
            for node in self.tree
            if node.id not in pinned
        ]
        blocks = [block for block in blocks if block.resident]
        room = memory.free + sum(block.resident for block in blocks) - needed
        assert room >= 0, "a wave was planned that does not fit"
        counts = []
        for block, kept in zip(blocks, self._allocator.counts(blocks, room), strict=True):
            if kept < block.resident:
                gone = np.flatnonzero(block.node.span.resident)[kept:]
                memory.evict(block.node, gone)
                counts.append((block.node.id, len(gone)))
        assert memory.free >= needed, "the allocator kept more than there was room for"
        self.emit(Evicted(cause="pressure", nodes=tuple(counts), kv=self.kv))

    def _touch(self, nodes: Sequence[Node]) -> None:
        self._clock += 1
        for node in nodes:
            self._last_used[node.id] = self._clock

    # Rehydration

    def _complete(
        self, leaves: Sequence[Node], *, reserve: int, kind: Kind, need_logits: bool
    ) -> list[Tensor]:
        """Make the union of the leaves' paths complete and exact, in one forward over the missing tokens only.

        Every run of consecutive missing tokens is one segment whose context ends where the run begins; all K/V are
        written before anything attends, so earlier runs are context of later ones.

        Args:
            leaves: whose paths.
            reserve: slots that must be free afterwards.
            kind: what the forward is accounted as.
            need_logits: return the logits after each leaf's last token.

        Returns:
            [V] float32 per leaf, or nothing.
        """
        path = self.tree.paths(leaves)
        known = {leaf.id: self._next_logits.get(leaf.id) for leaf in leaves}
        segments, wanted, filled = self._fill(path, leaves if need_logits else (), reserve)
        if segments:
            with self._undone_on_error(filled):
                logits = self._forward(kind, segments).logits
            known.update(zip(wanted, logits, strict=True))
            self._remember(wanted, logits)
        self._touch(path)
        return [row for leaf in leaves if (row := known[leaf.id]) is not None]

    def _fill(
        self, path: Sequence[Node], leaves: Sequence[Node], reserve: int
    ) -> tuple[list[Segment], list[int], list[Filled]]:
        """Place what is missing of Path*; returns the segments that compute it (depth first), the ids of the leaves
        whose logits they give, in order, and which tokens they write."""
        memory = self.memory
        ordered = sorted(path, key=lambda node: node.key)
        holes = {node.id: np.flatnonzero(~node.span.exact) for node in ordered}
        absent = {
            node.id: holes[node.id][node.span.slot[holes[node.id]] == NO_SLOT] for node in ordered
        }
        self._fit(sum(len(offsets) for offsets in absent.values()) + reserve, path)
        layers = self.runner.layer_count
        back: list[tuple[int, int]] = []
        for node in ordered:
            here, hole = absent[node.id], holes[node.id]
            stale = np.setdiff1d(hole, here, assume_unique=True)
            if len(stale):
                memory.rewrite(node, stale, exact=True, depth=layers)
            if len(here):
                first = int(node.span.slot[here[0] - 1]) + 1 if here[0] else NO_SLOT
                memory.place(node, here, exact=True, depth=layers, first=first)
            if len(here) and node.id in self._computed:
                back.append((node.id, len(here)))
            self._computed.add(node.id)
        if back:
            self.emit(Rehydrated(nodes=tuple(sorted(back)), mode="recompute", kv=self.kv))

        want = {leaf.id for leaf in leaves if leaf.id not in self._next_logits}
        trash = np.full(1, memory.pool.trash, np.int32)
        segments: list[Segment] = []
        wanted: list[int] = []
        for node in ordered:
            runs = _runs(holes[node.id])
            last = len(node.tokens) - 1
            again = node.id in want and (not runs or runs[-1][1] != last + 1)
            if again:  # the last token is resident: it runs once more, for its logits only
                runs.append((last, last + 1))
            if node.id in want:
                wanted.append(node.id)
            for begin, end in runs:
                slots = node.span.slot[begin:end]
                segments.append(
                    Segment(
                        context=(*self._context(node.parent), *self._head(node, begin)),
                        tokens=node.tokens[begin:end],
                        positions=np.arange(node.start + begin, node.start + end),
                        tail=slots,
                        write=trash if again and begin == last else slots,
                        logits=int(node.id in want and end == last + 1),
                    )
                )
        return segments, wanted, [(node, holes[node.id]) for node in ordered if len(holes[node.id])]

    @contextmanager
    def _undone_on_error(self, filled: Sequence[Filled]) -> Iterator[None]:
        """If the forward that should write these tokens fails, they hold no KV: drop them again."""
        try:
            yield
        except BaseException:
            for node, offsets in filled:
                self.memory.evict(node, offsets)
            raise

    def _context(self, node: Node | None) -> list[Piece]:
        """The pieces of the path that ends with `node`, resident tokens only."""
        return [] if node is None else [p for n in node.path for p in self._head(n, len(n.tokens))]

    def _head(self, node: Node, end: int) -> list[Piece]:
        """The resident ones of a block's first `end` tokens, as one piece (or none)."""
        slots = node.span.slot[:end]
        offsets = np.flatnonzero(slots >= 0)
        if len(offsets) == 0:
            return []
        return [Piece((node.id, end), slots[offsets], (node.start + offsets).astype(np.int32))]

    def _remember(self, nodes: Sequence[int], logits: Tensor) -> None:
        """Keep the logits after blocks' last tokens, the oldest dropped beyond `NEXT_LOGITS_BYTES`."""
        for row, node_id in enumerate(nodes):
            self._next_logits[node_id] = logits[row].clone()
        if nodes:
            most = max(len(nodes), NEXT_LOGITS_BYTES // (4 * logits.shape[-1]))
            while len(self._next_logits) > most:
                del self._next_logits[next(iter(self._next_logits))]

    # Questions

    def _ask(self, nodes: Sequence[Node], questions: Sequence[Sequence[int]]) -> Tensor:
        memory = self.memory
        path = self.tree.paths(nodes)
        segments, _, filled = self._fill(path, (), sum(len(question) for question in questions))
        borrowed = []
        for node, question in zip(nodes, questions, strict=True):
            slots = memory.borrow(question, node.end)
            borrowed.append(slots)
            segments.append(
                Segment(
                    context=tuple(self._context(node)),
                    tokens=question,
                    positions=np.arange(node.end, node.end + len(question)),
                    tail=slots,
                    write=slots,
                    logits=1,
                )
            )
        try:
            with self._undone_on_error(filled):
                logits = self._forward("verify", segments).logits
        finally:
            memory.give_back(np.concatenate(borrowed))
        self._touch(path)
        return logits

    # Decoding

    def _decode(self, children: Sequence[Node], growth: Growth) -> None:
        """One wave: every child decodes until its own boundary, all in one batch.

        A block's last token is run too: its K/V complete the block, and its logits are where children begin.
        """
        longest, layers = growth.stop.max_tokens, self.runner.layer_count
        leaves = [child.parent for child in children if child.parent is not None]
        logits = torch.stack(
            self._complete(
                leaves, reserve=longest * len(children), kind="prefill", need_logits=True
            )
        )
        contexts = {leaf.id: tuple(self._context(leaf)) for leaf in dict.fromkeys(leaves)}
        starts = self.memory.starts(longest, len(children))
        rows = [
            _Row(child, contexts[leaf.id], stream(growth.seed, child), int(start))
            for child, leaf, start in zip(children, leaves, starts, strict=True)
        ]
        began, steps, ran, read, unique = time.perf_counter(), 0, 0, 0, 0
        shared: SharedPrefix | None = None
        new = [i for i, row in enumerate(rows) if not row.node.tokens]
        self._choose([rows[i] for i in new], logits[new], growth)
        while rows:
            for row in rows:
                row.next_slot = 1 + self.memory.append(
                    row.node, row.next_slot, exact=True, depth=layers
                )
            plan = plan_forward(
                [row.segment() for row in rows],
                min_saved_reads=self._min_saved_reads,
                shared=shared,
            )
            written = [(row.node, np.array([len(row.node.tokens) - 1])) for row in rows]
            with self._undone_on_error(written):
                logits = self.runner.forward(plan, self.memory.pool).logits
            shared = plan.shared
            steps, ran = steps + 1, ran + len(rows)
            read, unique = read + plan.read_tokens, unique + plan.unique_read_tokens
            done = [i for i, row in enumerate(rows) if row.stop is not None]
            if done:
                self._close([rows[i] for i in done], logits[done])
                going = [i for i, row in enumerate(rows) if row.stop is None]
                rows, logits, shared = [rows[i] for i in going], logits[going], None
            if rows and self._interrupted():
                self._cut([row.node for row in rows])
                break
            if rows:
                self._choose(rows, logits, growth)
        self._touch(self.tree.paths(children))
        self._computed.update(child.id for child in children)
        self._account("decode", ran, steps, read, unique, time.perf_counter() - began)

    def _choose(self, rows: Sequence[_Row], logits: Tensor, growth: Growth) -> None:
        """Sample one token per row, and see whether it ends the block."""
        if not rows:
            return
        greedy = growth.sampling.temperature == 0
        uniforms = [0.0 if greedy else float(row.random.random()) for row in rows]
        drawn = sample(logits, uniforms, growth.sampling)
        for row, token, logprob, top1 in zip(
            rows, drawn.tokens, drawn.logprob, drawn.top1, strict=True
        ):
            self.tree.append(row.node, token)
            row.node.logprob += logprob
            row.node.top1 += top1
            row.stop = growth.stop.after(row.node.tokens)

    def _close(self, rows: Sequence[_Row], logits: Tensor) -> None:
        self._remember([row.node.id for row in rows], logits)
        for row, sure in zip(rows, confidence(logits), strict=True):
            node = row.node
            assert row.stop is not None
            node.state = NodeState.CLOSED
            node.confidence = sure
            self._boundary(node, row.stop)

    def _cut(self, nodes: Sequence[Node]) -> None:
        """An interruption: unfinished blocks are given up as they are."""
        for node in nodes:
            node.state = NodeState.PRUNED
            self._boundary(node, "limit")

    def _boundary(self, node: Node, stop: Stop) -> None:
        node.top1 /= max(1, len(node.tokens))
        node.text = self.tokenizer.decode(node.tokens, skip_special_tokens=True)
        self.emit(
            Boundary(
                node=node.id,
                ids=tuple(node.tokens),
                text=node.text,
                stop=stop,
                logprob=node.logprob,
                confidence=node.confidence,
                top1=node.top1,
            )
        )

    # Forward

    def _forward(self, kind: Kind, segments: Sequence[Segment]) -> ForwardResult:
        began = time.perf_counter()
        plan: ForwardPlan = plan_forward(segments, min_saved_reads=self._min_saved_reads)
        result = self.runner.forward(plan, self.memory.pool)
        self._account(
            kind,
            plan.rows,
            1,
            plan.read_tokens,
            plan.unique_read_tokens,
            time.perf_counter() - began,
        )
        return result

    def _account(
        self, kind: Kind, rows: int, steps: int, read: int, unique: int, elapsed_s: float
    ) -> None:
        self.emit(
            Forwarded(
                kind=kind,
                rows=rows,
                steps=steps,
                read_tokens=read,
                unique_read_tokens=unique,
                kv=self.kv,
                peak=self.memory.peak,
                elapsed_s=elapsed_s,
            )
        )


class _Row:
    """One block while it decodes."""

    __slots__ = ("context", "next_slot", "node", "random", "stop")

    def __init__(
        self, node: Node, context: tuple[Piece, ...], random: np.random.Generator, start: int
    ) -> None:
        self.node = node
        self.context = context
        self.random = random
        self.next_slot = start
        self.stop: Stop | None = None

    def segment(self) -> Segment:
        """Its last token, after everything before it."""
        node = self.node
        slots = node.span.slot
        return Segment(
            context=self.context,
            tokens=node.tokens[-1:],
            positions=np.array([node.end - 1]),
            tail=slots,
            write=slots[-1:],
            logits=1,
        )


def _runs(offsets: NDArray[np.int64]) -> list[tuple[int, int]]:
    """Increasing offsets as half-open runs of consecutive ones: 0 1 2 5 -> (0, 3), (5, 6)."""
    if len(offsets) == 0:
        return []
    breaks = np.flatnonzero(np.diff(offsets) != 1) + 1
    begins = offsets[np.concatenate(([0], breaks))]
    ends = offsets[np.concatenate((breaks - 1, [len(offsets) - 1]))] + 1
    return list(zip(begins.tolist(), ends.tolist(), strict=True))
