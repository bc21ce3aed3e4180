"""Engine: forward passes over the tree, each within the budget."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from arbor.engine.boundary import Stop, StopRule
from arbor.engine.pieces import context_of, head, segments_of
from arbor.engine.plan import (
    ForwardPlan,
    Piece,
    Segment,
    SharedPrefix,
    plan_forward,
    visibility,
)
from arbor.engine.ranges import phase
from arbor.engine.residency import Residency
from arbor.engine.runner import ForwardResult, ModelRunner
from arbor.engine.running import MARGIN, Lengths, Row, Running, ended
from arbor.engine.sampling import Code, Sampling, confidence, sample
from arbor.engine.waves import fitting, halves
from arbor.errors import ArborError, BudgetInfeasible, OutOfMemory
from arbor.events import (
    KV,
    Boundary,
    Cause,
    Detail,
    Event,
    Evicted,
    Forwarded,
    ForwardKind,
    Opened,
    Rehydrated,
    Sampled,
)
from arbor.memory import KVMemory
from arbor.memory.shortage import forward_too_large, is_shortage
from arbor.retention.msve import MSVE
from arbor.retention.policy import Policy
from arbor.retention.uses import Uses
from arbor.tree import NO_SLOT, Node, NodeState, ThoughtTree

NEXT_LOGITS_BYTES = 256 << 20
OBSERVE_EVERY = 4  # attention is observed in every fourth layer, the last of each four
PIECE = 64  # tokens of a prompt that lossy mode prefills at once at most, evicting in between
T = TypeVar("T")
Mode = Literal["lossless", "lossy"]
Rehydrate = Literal["selective", "span", "off"]
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
    or raises `BudgetInfeasible` with the smallest budget that would do and leaves the tree as it was. So it does where the
    machine runs out of memory (`OutOfMemory`), with a budget that leaves room for the forward.

    Two modes. ``lossless``: every running path is complete and exact before anything is computed after it, so that the
    budget changes time and nothing else; what does not fit together runs one after another. ``lossy``: tokens of running
    paths may leave as well, as the policy says, and what is computed then is computed over the gaps.

    Args:
        runner: the model.
        tokenizer: a Hugging Face tokenizer, for questions and boundaries.
        policy: what evictable blocks keep, and which tokens.
        mode: see above.
        rehydrate: what comes back when a path runs again: ``selective``, the missing tokens; ``span``, every token of a
            block that misses one (ArborKV section 4); ``off`` (lossy only), nothing: eviction cannot be undone.
        msve: block values for policies that read them.
        emit: listener for everything that happens.
        detail: how much it is told of decoding.
        min_saved_reads: see `plan_forward`.
        debug: poison freed slots and check all invariants after every change.
    """

    def __init__(
        self,
        runner: ModelRunner,
        tokenizer: Any,
        *,
        policy: Policy,
        mode: Mode = "lossless",
        rehydrate: Rehydrate = "selective",
        msve: MSVE | None = None,
        emit: Callable[[Event], None] = lambda event: None,
        detail: Detail = "events",
        min_saved_reads: int = 0,
        debug: bool = False,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.emit = emit
        self.detail = detail
        self.policy = policy
        self.mode = mode
        self.rehydrate = rehydrate
        self.msve = msve or MSVE()
        assert mode == "lossy" or rehydrate != "off", "lossless needs what it evicted back"
        self._lossy = mode == "lossy"
        self._min_saved_reads = min_saved_reads
        self._debug = debug
        self._memory: KVMemory | None = None
        self._tree: ThoughtTree | None = None
        self._residency: Residency | None = None
        self._next_logits: dict[int, Tensor] = {}
        self._computed: set[int] = set()
        self._interrupted: Callable[[], bool] = lambda: False
        self._hidden: frozenset[int] = frozenset()
        self._lengths = Lengths()
        self._steps = _Steps()

    # Life of a tree

    def open(
        self,
        tree: ThoughtTree,
        slots: int,
        interrupted: Callable[[], bool] = lambda: False,
        uses: Uses | None = None,
    ) -> None:
        """Begin a tree within a budget of `slots`; the last tree's KV is freed.

        Args:
            tree: holds only its root.
            slots: tokens of KV.
            interrupted: asked after every decode step whether to give up the blocks in progress.
            uses: of a recorded run of the same search, for the clairvoyant policy.

        Raises:
            OutOfMemory: the machine has less memory than that.
        """
        if self._memory is None or self._memory.slots != slots:
            self._memory = self._residency = None  # two pools at once may be too much
            self._memory = KVMemory(
                self.runner.layer_kv,
                slots,
                self.runner.dtype,
                self.runner.device,
                weight_bytes=self.runner.weight_bytes,
                debug=self._debug,
            )
        self._memory.attach(tree)
        self._tree = tree
        self._residency = Residency(
            tree,
            self._memory,
            self.policy,
            msve=self.msve,
            lossy=self._lossy,
            uses=uses,
            emit=lambda event: self.emit(event),
        )
        self._next_logits.clear()
        self._computed.clear()
        self._lengths = Lengths()
        self._steps = _Steps()
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
    def residency(self) -> Residency:
        assert self._residency is not None, "no tree is open"
        return self._residency

    @property
    def kv(self) -> KV:
        """Slots per tier now."""
        return self.residency.kv

    def encode(self, text: str) -> list[int]:
        """Token ids of a continuation (no special tokens)."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    # Operations

    def extend(self, node: Node) -> None:
        """Make the path of `node` complete: the prefill of a prompt, or the rehydration of a path."""
        self._require([node], [0])
        with self._naming_a_shortage("prefill"):
            self._complete([node], reserve=0, want=[node])

    def room(self, leaf_tokens: int) -> int:
        """Blocks of up to `leaf_tokens` tokens that may decode at once beside the longest path, at least 1."""
        if self._lossy:
            return max(1, self.memory.slots // 2 // max(1, leaf_tokens))
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
        self.residency.changed(children)
        self.decode(children, growth)
        return children

    def decode(self, children: Sequence[Node], growth: Growth) -> None:
        """Decode open blocks up to their boundaries, together as far as the budget allows.

        Args:
            children: open blocks without KV, empty or with a first token that is given rather than sampled.
            growth: how.

        Raises:
            BudgetInfeasible: a single child does not fit beside its path; or the policy gives up less than it takes.
            OutOfMemory: a forward does not fit beside weights and KV.
                Where it failed half-way, all of the children are PRUNED and hold nothing, those that were finished included.
        """
        longest = growth.stop.max_tokens
        order = self._in_order(children, [child.parent or child for child in children])
        parents = [child.parent for child in order if child.parent is not None]
        self._require(parents, [longest] * len(parents))
        rows = deque(
            Row(child, leaf, Code(growth.seed, child, growth.sampling))
            for child, leaf in zip(order, parents, strict=True)
        )
        for row in rows:
            if row.node.tokens:  # it was given, and is run like one that was sampled
                row.pending = row.node.tokens[-1]
                self.tree.take_back(row.node)
        self.residency.changed(children)
        self.residency.operation += bool(rows)
        running = Running(self.memory.slots, longest, self._lossy, rows)
        try:
            with phase("decode"), self._naming_a_shortage("decode"):
                self._decode(running, growth)
        except (BudgetInfeasible, OutOfMemory):
            self._tell_steps()
            for row in running.rows:
                if row.pending is None and row.node.tokens and not row.node.span.resident[-1]:
                    self.tree.take_back(row.node)  # chosen, and never run
            self._give_up(children)
            raise

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
        order = self._in_order(range(len(nodes)), nodes)
        answers: list[Tensor] = [torch.empty(0)] * len(nodes)
        lengths = [len(questions[i]) for i in order]
        for wave in self._waves([nodes[i] for i in order], lengths):
            chosen = [order[i] for i in wave]
            with self._naming_a_shortage("verify"):
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
        self.residency.changed(nodes)
        if counts:
            self.emit(Evicted(cause="close", nodes=tuple(sorted(counts)), kv=self.kv))

    @contextmanager
    def hiding(self, nodes: Sequence[Node]) -> Iterator[None]:
        """Within, nothing attends to these blocks: what the search would do had it lost them (ArborKV's leave-one-out).

        They are masked, not zeroed: a zero key still draws attention. What is grown within is not exact; forget it.
        """
        known, self._next_logits = self._next_logits, {}
        self._hidden = frozenset(node.id for node in nodes)
        try:
            yield
        finally:
            self._hidden, self._next_logits = frozenset(), known

    # Planning

    def _fit(
        self, needed: int, leaves: Sequence[Node], cause: Cause, *, spare: bool | None = None
    ) -> None:
        """`Residency.fit`, as a phase."""
        with phase("policy"):
            self.residency.fit(needed, leaves, cause, spare=spare)

    def _require(self, nodes: Sequence[Node], extra: Sequence[int]) -> None:
        """Raise unless each node's path (in lossy mode: what is protected of it) and its extra tokens fit the budget."""
        protect = self.policy.protect
        most = protect.sinks + protect.recent if self._lossy else self.memory.slots + 1
        ends = [min(node.end, most) for node in nodes]
        needed = max((end + more for end, more in zip(ends, extra, strict=True)), default=0)
        if needed > self.memory.slots:
            what = "what is protected of a path" if self._lossy else "the longest path"
            raise BudgetInfeasible(needed, self.memory.slots, f"{what} with its next block")

    def _in_order(self, work: Sequence[T], nodes: Sequence[Node]) -> list[T]:
        """Pieces of work in depth-first order of the tree, so that a wave shares what it can; from the end that lies on
        the device. Where a level does not fit, the search then goes to and fro over it rather than round in circles, and
        finds what the last wave left. Results do not depend on the order.

        Args:
            work: what there is to do.
            nodes: the block at whose end each piece of work begins.
        """
        order = sorted(range(len(work)), key=lambda i: (nodes[i].key, i))
        held = np.array([np.count_nonzero(nodes[i].span.resident) for i in order])
        place = np.arange(len(order))
        if (held * place).sum() > (held * place[::-1]).sum():
            order.reverse()
        return [work[i] for i in order]

    def _waves(self, nodes: Sequence[Node], extra: Sequence[int]) -> Iterator[list[int]]:
        """Cut one operation into waves that fit, and tell the policy which are still to come.

        Args:
            nodes: where each piece of work begins, in depth-first order, so that a wave shares what it can.
            extra: tokens each needs beyond its path.

        Yields:
            indices into `nodes`.
        """
        self.residency.operation += bool(nodes)
        cut = (
            halves(extra, self.memory.slots)
            if self._lossy
            else fitting(nodes, extra, self.memory.slots)
        )
        waves = list(cut)
        for index, wave in enumerate(waves):
            self.residency.expect([[nodes[i] for i in later] for later in waves[index + 1 :]])
            yield wave

    # Completing paths

    def _complete(
        self,
        leaves: Sequence[Node],
        *,
        reserve: int,
        want: Sequence[Node],
        beside: Sequence[Node] = (),
    ) -> list[Tensor]:
        """Bring back what the leaves' paths miss, in one forward over the missing tokens only.

        Every run of consecutive missing tokens is one segment whose context ends where the run begins; all K/V are
        written before anything attends, so earlier runs are context of later ones.

        Args:
            leaves: whose paths.
            reserve: slots that must be free afterwards.
            want: those of them whose logits after the last token are needed.
            beside: ends of other running paths, which stay.

        Returns:
            [V] float32 for each that was wanted.
        """
        path = self.tree.paths(leaves)
        root = path[0]
        if self._lossy and self.rehydrate != "off":
            for leaf in leaves:
                if not leaf.span.exact.all():  # what was known was computed over a gap
                    self._next_logits.pop(leaf.id, None)
        if self._lossy and root.id not in self._computed and root.end > self.memory.slots - reserve:
            self._prefill_in_pieces(root)
        known = {leaf.id: self._next_logits.get(leaf.id) for leaf in want}
        fill = self._fill(path, leaves, want, reserve, beside)
        if fill.segments:
            with self._undone_on_error(fill.written):
                kind: ForwardKind = "rehydrate" if fill.back else "prefill"
                logits = self._forward(kind, fill.segments).logits
            known.update(zip(fill.wanted, logits, strict=True))
            self._remember(fill.wanted, logits)
        self.residency.used(path)
        return [row for leaf in want if (row := known[leaf.id]) is not None]

    def _prefill_in_pieces(self, root: Node) -> None:
        """A prompt longer than the budget (lossy mode): piece by piece, the policy evicting in between."""
        piece = max(1, min(PIECE, self.memory.slots // 4))
        for begin in range(0, root.end, piece):
            end = min(root.end, begin + piece)
            try:
                self._fit(end - begin, [root], "transition")
            except BudgetInfeasible:
                self.memory.release([root])
                self.residency.changed([root])
                raise
            exact = bool(root.span.exact[:begin].all())
            offsets = np.arange(begin, end)
            context = tuple(head(root, begin))
            slots = self.memory.place(root, offsets, exact=exact, depth=self.runner.layer_count)
            self.residency.changed([root])
            segment = Segment(
                context=context,
                tokens=root.tokens[begin:end],
                positions=offsets,
                tail=slots,
                write=slots,
                logits=int(end == root.end),
            )
            with self._undone_on_error([(root, offsets)]):
                logits = self._forward("prefill", [segment]).logits
        self._computed.add(root.id)
        self._remember([root.id], logits)

    def _holes(
        self, path: Sequence[Node], leaves: Sequence[Node], reserve: int
    ) -> dict[int, NDArray[np.int64]]:
        """Tokens of each block that the next forward computes. Where the paths may not stay whole (lossy mode), what the
        policy does not keep of them has left when this returns, so that the holes and `reserve` fit beside the rest."""
        whole = sum(len(node.tokens) for node in path) + reserve <= self.memory.slots
        if self._lossy and self.rehydrate == "off":
            never = [node for node in path if node.id not in self._computed]
            new = sum(int((~node.span.resident).sum()) for node in never)
            self._fit(new + reserve, leaves, "transition")
            holes = dict.fromkeys((node.id for node in path), np.empty(0, np.int64))
            return holes | {node.id: np.flatnonzero(~node.span.resident) for node in never}
        if self._lossy and not whole:
            return self._chosen(path, leaves, reserve)
        holes = {node.id: np.flatnonzero(~node.span.exact) for node in path}
        if self.rehydrate == "span":
            for node in path:
                if len(holes[node.id]):
                    holes[node.id] = np.arange(len(node.tokens))
        return holes

    def _chosen(
        self, path: Sequence[Node], leaves: Sequence[Node], reserve: int
    ) -> dict[int, NDArray[np.int64]]:
        """The path does not fit (lossy, reversible): the policy chooses among all its tokens; what it chose and is gone
        comes back, the rest leaves."""
        began = time.perf_counter()
        residency = self.residency
        ids = np.array(sorted(node.id for node in path), np.int64)
        blocks = residency.offered(leaves, ids, spare=False, whole=True)
        room = self.memory.slots - reserve
        counts, chosen = residency.decide(blocks, room)
        residency.keep(blocks, chosen, counts, room, "transition", began)
        holes = {}
        for index, node_id in enumerate(ids):
            node, offsets = self.tree[int(node_id)], chosen[index]
            missing = offsets[node.span.slot[offsets] == NO_SLOT]
            again = self.rehydrate == "span" and len(missing)
            holes[node.id] = offsets if again else missing
        return holes

    def _fill(
        self,
        path: Sequence[Node],
        leaves: Sequence[Node],
        want: Sequence[Node],
        reserve: int,
        beside: Sequence[Node] = (),
    ) -> _Fill:
        """Place what is missing of the running paths.

        Args:
            path: their union.
            leaves: their ends.
            want: leaves whose logits after the last token are needed.
            reserve: slots that must be free afterwards.
            beside: ends of other running paths, which stay.
        """
        memory, layers = self.memory, self.runner.layer_count
        ordered = sorted(path, key=lambda node: node.key)
        wanted = {leaf.id for leaf in want if leaf.id not in self._next_logits}
        holes = self._holes(ordered, leaves, reserve + len(wanted))
        for (
            leaf
        ) in want:  # its last token runs again for its logits, and needs a slot while it does
            last = len(leaf.tokens) - 1
            if leaf.id in wanted and leaf.span.slot[last] == NO_SLOT:
                holes[leaf.id] = np.union1d(holes[leaf.id], [last])
        absent = {
            node.id: holes[node.id][node.span.slot[holes[node.id]] == NO_SLOT] for node in ordered
        }
        needed = sum(len(offsets) for offsets in absent.values()) + reserve
        self._fit(needed, [*leaves, *beside], "transition", spare=True)
        back: list[tuple[int, int]] = []
        repeated = 0
        clean: dict[int, bool] = {}
        for node in ordered:
            here, hole = absent[node.id], holes[node.id]
            stale = np.setdiff1d(hole, here, assume_unique=True)
            above = node.parent is None or clean.get(node.parent.id, True)
            exact = not self._lossy or (above and self._is_whole(node, hole))
            if len(stale):
                memory.rewrite(node, stale, exact=exact, depth=layers)
            if len(here):
                first = int(node.span.slot[here[0] - 1]) + 1 if here[0] else NO_SLOT
                memory.place(node, here, exact=exact, depth=layers, first=first)
            clean[node.id] = exact and bool(node.span.exact.all())
            if len(hole) and node.id in self._computed:
                back.append((node.id, len(here)))
                repeated += len(stale)
            self._computed.add(node.id)
        self.residency.changed(ordered)
        if back:
            nodes = tuple(sorted(back))
            self.emit(Rehydrated(nodes=nodes, mode="recompute", kv=self.kv, repeated=repeated))
        segments, order = segments_of(ordered, holes, wanted, memory.pool.trash, self._hidden)
        written = [(node, holes[node.id]) for node in ordered if len(holes[node.id])]
        return _Fill(segments, order, written, bool(back))

    def _is_whole(self, node: Node, hole: NDArray[np.int64]) -> bool:
        """Whether every token of a block is exact once these are computed."""
        exact = node.span.exact.copy()
        exact[hole] = True
        return bool(exact.all())

    @contextmanager
    def _undone_on_error(self, filled: Sequence[Filled]) -> Iterator[None]:
        """If the forward that should write these tokens fails, they hold no KV: drop them again."""
        try:
            yield
        except BaseException:
            for node, offsets in filled:
                self.memory.evict(node, offsets)
            self.residency.changed([node for node, _ in filled])
            raise

    @contextmanager
    def _naming_a_shortage(self, kind: ForwardKind, rows: int = 0) -> Iterator[None]:
        """If the machine runs out of memory within, say what held it and what budget would leave room."""
        try:
            yield
        except (RuntimeError, MemoryError) as error:
            if isinstance(error, ArborError) or not is_shortage(error):
                raise
            raise forward_too_large(
                error,
                self.runner.device,
                f"{kind} of {rows:,} tokens" if rows else kind,
                weights=self.runner.weight_bytes,
                slots=self.memory.slots,
                bytes_per_token=self.memory.bytes_per_token,
                least=max(node.end for node in self.tree) + max(rows, 1),
            ) from error

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
        fill = self._fill(path, nodes, (), sum(len(question) for question in questions))
        segments = list(fill.segments)
        borrowed = []
        for node, question in zip(nodes, questions, strict=True):
            slots = memory.borrow(question, node.end)
            borrowed.append(slots)
            segments.append(
                Segment(
                    context=tuple(context_of(node, self._hidden)),
                    tokens=question,
                    positions=np.arange(node.end, node.end + len(question)),
                    tail=slots,
                    write=slots,
                    logits=1,
                )
            )
        try:
            with self._undone_on_error(fill.written):
                logits = self._forward("verify", segments).logits
        finally:
            memory.give_back(np.concatenate(borrowed))
        self.residency.used(path)
        return logits

    # Decoding

    def _decode(self, running: Running, growth: Growth) -> None:
        """Every block decodes until its own boundary; all that fit together do so in one batch.

        A block's last token is run too: its K/V complete the block, and its logits are where children begin.
        """
        shared: SharedPrefix | None = None
        stopped = self._interrupted()
        began = time.perf_counter()
        while running and not stopped:
            if self._join(running, growth):
                shared, began = None, time.perf_counter()
            if self.memory.free < len(running.rows) and self._squeeze(running):
                shared = None
            rows = running.rows
            self._append(rows)
            plan = plan_forward(
                [row.segment() for row in rows],
                min_saved_reads=self._min_saved_reads,
                shared=shared,
            )
            written = [(row.node, np.array([len(row.node.tokens) - 1])) for row in rows]
            with self._undone_on_error(written), self._naming_a_shortage("decode", plan.rows):
                logits = self._run(plan).logits
            for row in rows:
                row.node.logprob += row.logprob
                row.node.top1 += row.top1
            shared = plan.shared
            done, going = ended(rows)
            if done:
                self._end(running, [rows[i] for i in done], logits[done])
                logits, shared = logits[going], None
            self._steps.add(plan, time.perf_counter() - began)
            began = time.perf_counter()
            if self.detail != "events":
                self._tell_steps()
            stopped = bool(running) and self._interrupted()
            if not stopped:
                self._choose(running.rows, logits, growth)
        if stopped:
            self._cut([row.node for row in (*running.rows, *running.waiting)])
        self._tell_steps()

    def _join(self, running: Running, growth: Growth) -> bool:
        """Let the rows begin, or go on, that fit beside those that run; whether there were any."""
        beside = running.nodes
        joined = running.admit(self._lengths.expected(running.longest))
        if not joined:
            return False
        self.residency.expect(running.upcoming())
        fresh = [row for row in joined if row.pending is None]
        begins = [row.begin for row in joined]
        known = self._complete(
            begins, reserve=len(joined), want=[row.leaf for row in fresh], beside=beside
        )
        starts = self.memory.starts(running.longest, len(joined))
        for row, start in zip(joined, starts, strict=True):
            slots = row.node.span.slot
            row.next_slot = int(slots[-1]) + 1 if len(slots) else int(start)
            if row.pending is not None:
                self.tree.append(row.node, row.pending)
                row.pending = None
        self._look_back(joined)
        if fresh:
            self._choose(fresh, torch.stack(known), growth)
        return True

    def _end(self, running: Running, done: Sequence[Row], logits: Tensor) -> None:
        """These blocks are whole."""
        running.end(done)
        self._close(done, logits)
        nodes = [row.node for row in done]
        self.residency.used(self.tree.paths(nodes))
        self._computed.update(node.id for node in nodes)
        for node in nodes:
            self._lengths.add(len(node.tokens))

    def _look_back(self, rows: Sequence[Row]) -> None:
        """What each row reads before its own block, and whether that is whole and exact."""
        contexts: dict[int, tuple[tuple[Piece, ...], bool]] = {}
        for row in rows:
            if row.leaf.id not in contexts:
                exact = not self._lossy or all(bool(n.span.exact.all()) for n in row.leaf.path)
                contexts[row.leaf.id] = (tuple(context_of(row.leaf, self._hidden)), exact)
            row.context, row.exact = contexts[row.leaf.id]

    def _squeeze(self, running: Running) -> bool:
        """Make room for the next tokens of each row: `MARGIN` where something can leave, one in any case. Lossless, rows
        wait again where the running paths leave no room for all (one row always fits). Whether the rows, or what they read,
        have changed."""
        changed = self._lossy
        pinned = self._pinned(running)
        while not self._lossy and pinned + len(running.rows) > self.memory.slots:
            self._preempt(running)
            changed = True
            pinned = self._pinned(running)
        rows, nodes = running.rows, running.nodes
        most = self.memory.slots - pinned
        try:
            self._fit(min(MARGIN * len(rows), most), nodes, "pressure")
        except BudgetInfeasible:  # the policy gives up less than that
            self._fit(len(rows), nodes, "pressure")
        if self._lossy:
            self._look_back(rows)
        return changed

    def _pinned(self, running: Running) -> int:
        """Slots of what stays while these rows run: their paths, or (lossy mode) their own tokens."""
        kept = running.nodes if self._lossy else self.tree.paths(running.nodes)
        return sum(int(np.count_nonzero(node.span.resident)) for node in kept)

    def _preempt(self, running: Running) -> None:
        """The row that joined last waits again: its tokens are known, their K/V are computed anew when it goes on."""
        row = running.preempt()
        row.pending = row.node.tokens[-1]
        self.tree.take_back(row.node)
        freed = self.memory.release([row.node])
        self._computed.add(row.node.id)
        self.residency.changed([row.node])
        if freed:
            lost = ((row.node.id, freed),)
            self.emit(Evicted(cause="pressure", nodes=lost, kv=self.kv))

    def _append(self, rows: Sequence[Row]) -> None:
        """A slot for each row's last token."""
        for row in rows:
            row.next_slot = 1 + self.memory.append(
                row.node, row.next_slot, exact=row.exact, depth=self.runner.layer_count
            )

    def _choose(self, rows: Sequence[Row], logits: Tensor, growth: Growth) -> None:
        """Sample one token per row, and see whether it ends the block."""
        if not rows:
            return
        drawn = sample(logits, [row.code.number for row in rows], growth.sampling)
        for i, row in enumerate(rows):
            self.tree.append(row.node, drawn.tokens[i])
            row.logprob, row.top1 = drawn.logprob[i], drawn.top1[i]
            row.code.narrow(drawn.left[i], drawn.share[i])
            row.stop = growth.stop.after(row.node.tokens)
        if self.detail == "tokens":
            nodes = tuple(row.node.id for row in rows)
            self.emit(Sampled(nodes, tuple(drawn.tokens), tuple(drawn.logprob)))

    def _close(self, rows: Sequence[Row], logits: Tensor) -> None:
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

    def _give_up(self, children: Sequence[Node]) -> None:
        """An operation that cannot be finished: its blocks hold nothing any more, and none of them is open."""
        self._cut([child for child in children if child.state is NodeState.OPEN])
        for child in children:
            child.state = NodeState.PRUNED
        self.forget(children)

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

    def _run(self, plan: ForwardPlan, observe: bool = True) -> ForwardResult:
        """One forward; tells the policy what was attended to, where it asks for that."""
        if not (observe and self.policy.observes):
            return self.runner.forward(plan, self.memory.pool)
        layers = range(self.runner.layer_count)
        watched = [i for i in layers if i % OBSERVE_EVERY == OBSERVE_EVERY - 1] or [layers[-1]]
        result = self.runner.forward(plan, self.memory.pool, mass=dict.fromkeys(watched))
        assert result.mass is not None
        slots, queries = visibility(plan.segments, self.memory.pool.trash)
        heads = sum(self.runner.specs[i].shape.num_qo_heads for i in watched)
        mass = result.mass[torch.from_numpy(slots).to(result.mass.device)] / heads
        self.residency.observe(slots, mass.cpu().numpy(), queries)
        return result

    def _forward(self, kind: ForwardKind, segments: Sequence[Segment]) -> ForwardResult:
        self._tell_steps()
        began = time.perf_counter()
        plan: ForwardPlan = plan_forward(segments, min_saved_reads=self._min_saved_reads)
        with phase(kind), self._naming_a_shortage(kind, plan.rows):
            result = self._run(
                plan, observe=kind != "rehydrate"
            )  # these queries were counted before
        self._account(
            kind,
            plan.rows,
            1,
            plan.read_tokens,
            plan.unique_read_tokens,
            time.perf_counter() - began,
        )
        return result

    def _tell_steps(self) -> None:
        """Tell the decode steps since the last forward of another kind."""
        told, self._steps = self._steps, _Steps()
        if told.steps:
            self._account("decode", told.rows, told.steps, told.read, told.unique, told.elapsed_s)

    def _account(
        self, kind: ForwardKind, rows: int, steps: int, read: int, unique: int, elapsed_s: float
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


@dataclass(slots=True)
class _Fill:
    """A completion, placed and ready to run.

    Attributes:
        segments: what to run.
        wanted: blocks whose logits after the last token it gives, in order.
        written: which tokens of which blocks it writes.
        back: some of them had been computed before.
    """

    segments: list[Segment]
    wanted: list[int]
    written: list[Filled]
    back: bool


@dataclass(slots=True)
class _Steps:
    """Decode steps that were not told yet."""

    steps: int = 0
    rows: int = 0
    read: int = 0
    unique: int = 0
    elapsed_s: float = 0.0

    def add(self, plan: ForwardPlan, elapsed_s: float) -> None:
        """One more step."""
        self.steps += 1
        self.rows += plan.rows
        self.read += plan.read_tokens
        self.unique += plan.unique_read_tokens
        self.elapsed_s += elapsed_s
