"""Engine: forward passes over the tree, each within the budget."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from arbor.engine.decoding import Decoding
from arbor.engine.forward_pass import ForwardPasses
from arbor.engine.mode import Lossless, Lossy, Mode, Rehydrate, Rules
from arbor.engine.nvtx import nvtx_range
from arbor.engine.rehydration import Rehydration
from arbor.engine.residency import Residency
from arbor.engine.sampling import ArithmeticCode
from arbor.engine.scheduler import Row
from arbor.engine.token_source import CheckedSource, Growth, ModelSampler, TokenSource
from arbor.engine.tree_state import RunHooks, TreeState, ignore
from arbor.errors import ArborError, BudgetInfeasible
from arbor.events import KV, Detail, Evicted, ForwardKind, Listener, Opened
from arbor.memory import KVMemory
from arbor.model.plan import Segment
from arbor.model.runner import ModelRunner
from arbor.retention.future_reads import FutureReads
from arbor.retention.msve import MSVE
from arbor.retention.policy import Policy
from arbor.tree import Node, NodeState, ThoughtTree

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class _Parts:
    """The parts of the engine that work on one tree."""

    rules: Rules
    residency: Residency
    forwards: ForwardPasses
    rehydration: Rehydration
    decoding: Decoding


class Engine:
    """Runs the model over one tree at a time. Knows no search.

    Every public operation is a transaction: plan what it needs, evict to fit, allocate, only then
    compute. It succeeds, or raises `BudgetInfeasible` with the smallest budget that would do and
    leaves the tree as it was. So it does where the machine runs out of memory (`OutOfMemory`), with
    a budget that leaves room for the forward. Whatever else cuts it off (a listener that raises, an
    interruption), no token claims KV that was not computed, and the engine can go on.

    Two modes. ``lossless``: every running path is complete and exact before anything is computed
    after it, so that the budget changes time and nothing else; what does not fit together runs one
    after another. ``lossy``: tokens of running paths may leave as well, as the policy says, and
    what is computed then is computed over the gaps.

    Args:
        runner: the model.
        tokenizer: a Hugging Face tokenizer, for questions and boundaries.
        policy: what evictable blocks keep, and which tokens.
        mode: see above.
        rehydrate: what comes back when a path runs again: ``selective``, the missing tokens;
            ``span``, every token of a block that misses one (ArborKV section 4); ``off`` (lossy
            only), nothing: eviction cannot be undone.
        msve: block values for policies that read them.
        source: where tokens come from; by default the model.
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
        source: TokenSource | None = None,
        min_saved_reads: int = 0,
        debug: bool = False,
    ) -> None:
        self.runner = runner
        self.tokenizer = tokenizer
        self.policy = policy
        self.mode = mode
        self.rehydrate = rehydrate
        self.msve = msve or MSVE()
        assert mode == "lossy" or rehydrate != "off", "lossless needs what it evicted back"
        self._mode: type[Lossless | Lossy] = Lossy if mode == "lossy" else Lossless
        self._min_saved_reads = min_saved_reads
        self._debug = debug
        self._source = (
            ModelSampler(tokenizer, self.msve.top) if source is None else CheckedSource(source)
        )
        self._memory: KVMemory | None = None
        self._state: TreeState | None = None
        self._opened: _Parts | None = None

    # Life of a tree

    def open(
        self,
        tree: ThoughtTree,
        slots: int,
        *,
        emit: Listener = ignore,
        detail: Detail = "events",
        outlook: Callable[[], Mapping[int, float]] = dict,
        interrupted: Callable[[], bool] = bool,
        reads: FutureReads | None = None,
    ) -> None:
        """Begin a run on a tree within a budget of `slots`; the last tree's KV is freed.

        Args:
            tree: holds only its root.
            slots: tokens of KV.
            emit: listener for everything that happens, until `finish`.
            detail: how finely decoding is reported to it.
            outlook: probability that a later operation reads the path to a block, by node id.
            interrupted: asked after every decode step whether to give up the blocks in progress.
            reads: future reads of a recorded run of the same search, for the clairvoyant policy.

        Raises:
            OutOfMemory: the machine has less memory than that.
        """
        if self._memory is None or self._memory.slots != slots:
            # two pools at once may be too much
            self._memory = self._state = self._opened = None
            self._memory = KVMemory(
                self.runner.layer_kv,
                slots,
                self.runner.dtype,
                self.runner.device,
                weight_bytes=self.runner.weight_bytes,
                debug=self._debug,
            )
        self._memory.attach(tree)
        run = RunHooks(emit, detail, outlook, interrupted)
        state = TreeState(tree, self._memory, self.policy.protect, run, reads)
        rules = self._mode(state, self.policy, self.rehydrate)
        residency = Residency(state, self.policy, self.msve, rules.paths_lose)
        forwards = ForwardPasses(
            state,
            self.runner,
            observes=self.policy.observes,
            min_saved_reads=self._min_saved_reads,
        )
        rehydration = Rehydration(state, residency, forwards, rules)
        decoding = Decoding(state, residency, forwards, rehydration, self._source, rules)
        self._state = state
        self._opened = _Parts(rules, residency, forwards, rehydration, decoding)

    def finish(self) -> None:
        """End of the run: nothing is emitted any more; the tree and its KV stay usable until the
        next `open`."""
        if self._state is not None:
            self._state.finish()

    @property
    def state(self) -> TreeState:
        """The state of the open tree."""
        assert self._state is not None, "no tree is open"
        return self._state

    @property
    def _parts(self) -> _Parts:
        assert self._opened is not None, "no tree is open"
        return self._opened

    @property
    def memory(self) -> KVMemory:
        return self.state.memory

    @property
    def tree(self) -> ThoughtTree:
        return self.state.tree

    @property
    def residency(self) -> Residency:
        return self._parts.residency

    @property
    def kv(self) -> KV:
        """Slots per tier now."""
        return self.state.kv

    def changed(self, nodes: Sequence[Node]) -> None:
        """The search has valued these blocks."""
        self.state.changed(nodes)

    def encode(self, text: str) -> list[int]:
        """Token ids of a continuation (no special tokens)."""
        return list(self.tokenizer.encode(text, add_special_tokens=False))

    # Operations

    def extend(self, node: Node) -> None:
        """Make the path of `node` complete: the prefill of a prompt, or the rehydration of a
        path."""
        self._require([node], [0])
        with self._transaction("prefill"):
            self._parts.rehydration.complete([node], reserve=0, want=[node])

    def room(self, leaf_tokens: int) -> int:
        """Blocks of up to `leaf_tokens` tokens that may decode at once, at least 1."""
        return self._parts.rules.room(leaf_tokens)

    def grow(self, leaves: Sequence[tuple[Node, int]], growth: Growth) -> list[Node]:
        """Decode new children, all of them together as far as the budget allows, each up to its own
        boundary.

        Args:
            leaves: (leaf, width) pairs.
            growth: how.

        Returns:
            The new closed blocks, in the order asked. After an interruption the unfinished ones are
            PRUNED.

        Raises:
            BudgetInfeasible: a single child does not fit after its path.
        """
        longest = growth.stop.max_tokens
        self._require([leaf for leaf, _ in leaves], [longest] * len(leaves))
        children = [self.tree.fork(leaf) for leaf, width in leaves for _ in range(width)]
        self.state.changed(children)
        for child in children:
            parent = None if child.parent is None else child.parent.id
            self.state.emit(Opened(child.id, parent, child.index, child.depth, tokens=0, text=""))
        self.decode(children, growth)
        return children

    def decode(self, children: Sequence[Node], growth: Growth) -> None:
        """Decode open blocks up to their boundaries, together as far as the budget allows.

        Args:
            children: open blocks without KV, empty or with a first token that is given rather than
                sampled.
            growth: how.

        Raises:
            BudgetInfeasible: a single child does not fit after its path; or the policy gives up
                less than it takes.
            OutOfMemory: a forward does not fit next to weights and KV.
            UsageError: an answer of the policy or the token source breaks its protocol.
                After any of these all of the children are PRUNED and hold nothing, those that were
                finished included.
        """
        longest = growth.stop.max_tokens
        order = self._in_order(children, [child.parent or child for child in children])
        parents = [child.parent for child in order if child.parent is not None]
        self._require(parents, [longest] * len(parents))
        rows = deque(
            Row(child, leaf, ArithmeticCode(growth.seed, child, growth.sampling))
            for child, leaf in zip(order, parents, strict=True)
        )
        for row in rows:
            if row.node.tokens:  # it was given, and is run like one that was sampled
                row.pending = row.node.tokens[-1]
                self.tree.take_back(row.node)
        self.state.changed(children)
        if rows:
            self.state.begin_operation()
        scheduler = self._parts.rules.scheduler(longest, rows)
        try:
            with nvtx_range("decode"), self._transaction("decode"):
                self._parts.decoding.run(scheduler, growth)
        except BaseException as error:
            self._parts.decoding.drop_chosen(scheduler.rows)
            if isinstance(error, ArborError):
                self._parts.forwards.report_steps()
                self._give_up(children)
            raise

    def ask(self, nodes: Sequence[Node], questions: Sequence[Sequence[int]]) -> Tensor:
        """The model's next-token logits after `path + question`, for each pair; leaves the tree as
        it was.

        Args:
            nodes: blocks.
            questions: token ids, at least one each.

        Returns:
            [len(nodes), V] float32.

        Raises:
            BudgetInfeasible: one question does not fit after its path.
        """
        self._require(nodes, [len(question) for question in questions])
        order = self._in_order(range(len(nodes)), nodes)
        answers: list[Tensor] = [torch.empty(0)] * len(nodes)
        lengths = [len(questions[i]) for i in order]
        for wave in self._waves([nodes[i] for i in order], lengths):
            chosen = [order[i] for i in wave]
            with self._transaction("verify"):
                logits = self._ask([nodes[i] for i in chosen], [questions[i] for i in chosen])
            for row, index in enumerate(chosen):
                answers[index] = logits[row]
        return torch.stack(answers) if answers else torch.empty(0, 0)

    def forget(self, nodes: Sequence[Node]) -> None:
        """Free the KV of blocks that the search has given up."""
        counts = []
        for node in nodes:
            self.state.logits.pop(node.id, None)
            freed = self.memory.release([node])
            if freed:
                counts.append((node.id, freed))
        self.state.changed(nodes)
        if counts:
            self.state.emit(Evicted(cause="close", nodes=tuple(sorted(counts)), kv=self.kv))

    @contextmanager
    def hiding(self, nodes: Sequence[Node]) -> Iterator[None]:
        """Within, nothing attends to these blocks: what the search would do had it lost them
        (ArborKV's leave-one-out).

        They are masked, not zeroed: a zero key still draws attention. Blocks computed before keep
        the KV they have, and where it was evicted they get the same again. What is grown within is
        not exact, and computed anew if it is read afterwards.
        """
        with self.state.hiding(nodes):
            yield

    # Planning

    def _require(self, nodes: Sequence[Node], extra: Sequence[int]) -> None:
        """Raise `BudgetInfeasible` unless what is required of each node's path fits with its extra
        tokens."""
        rules = self._parts.rules
        ends = [rules.required(node) for node in nodes]
        needed = max((end + more for end, more in zip(ends, extra, strict=True)), default=0)
        if needed > self.memory.slots:
            what = f"{rules.must_fit} with its next block"
            raise BudgetInfeasible(needed, self.memory.slots, what)

    def _in_order(self, work: Sequence[T], nodes: Sequence[Node]) -> list[T]:
        """Pieces of work in depth-first order of the tree, so that a wave shares what it can.

        Directions alternate, starting at the resident end: where a level does not fit, a fixed
        direction thrashes LRU.
        Results do not depend on the order.

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
        """Cut one operation into waves that fit, and note for the policy which are still to come.

        Args:
            nodes: where each piece of work begins, in depth-first order, so that a wave shares what
                it can.
            extra: tokens each needs beyond its path.

        Yields:
            indices into `nodes`.
        """
        if nodes:
            self.state.begin_operation()
        waves = self._parts.rules.waves(nodes, extra)
        for index, wave in enumerate(waves):
            self.state.expect([[nodes[i] for i in later] for later in waves[index + 1 :]])
            yield wave

    # Parts of operations

    @contextmanager
    def _transaction(self, kind: ForwardKind) -> Iterator[None]:
        """Within, slots are given to tokens that forwards then write. After a failure, whatever it
        is, what has not been written holds none."""
        if self.memory.pending:  # the last undoing was cut off itself
            self._parts.rehydration.undo()
        try:
            with self._parts.forwards.explaining_out_of_memory(kind):
                yield
        except BaseException:
            self._parts.rehydration.undo()
            raise

    def _ask(self, nodes: Sequence[Node], questions: Sequence[Sequence[int]]) -> Tensor:
        memory, rehydration = self.memory, self._parts.rehydration
        placed = rehydration.place(nodes, reserve=sum(len(question) for question in questions))
        segments = []
        borrowed = []
        contexts = self.state.contexts(nodes)
        for node, question, context in zip(nodes, questions, contexts, strict=True):
            slots = memory.borrow(question, node.end)
            borrowed.append(slots)
            segments.append(
                Segment(
                    context=context,
                    tokens=question,
                    positions=np.arange(node.end, node.end + len(question)),
                    tail=slots,
                    write=slots,
                    logits=1,
                )
            )
        logits = rehydration.compute(placed, "verify", segments)
        for slots in borrowed:
            memory.give_back(slots)
        self.state.used(self.tree.paths(nodes))
        return logits

    def _give_up(self, children: Sequence[Node]) -> None:
        """An operation that cannot be finished: its blocks hold nothing any more, and none of them
        is open."""
        self._parts.decoding.cut([child for child in children if child.state is NodeState.OPEN])
        for child in children:
            child.state = NodeState.PRUNED
        self.forget(children)
